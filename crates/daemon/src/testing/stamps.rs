//! Stamps over gRPC.

use std::fs;

use super::files::{directory, stamp};
use super::*;

impl TestDaemon {
    async fn list_stamps(&mut self, session: &str) -> Vec<v1::StampRecord> {
        let session = session.to_owned();
        let request = v1::ListStampsRequest { session, ..v1::ListStampsRequest::default() };
        self.stamps.list_stamps(request).await.unwrap().into_inner().stamps
    }

    async fn verify(&mut self, session: &str) -> Vec<v1::StampState> {
        let session = session.to_owned();
        let request = v1::VerifyStampsRequest { session, ..v1::VerifyStampsRequest::default() };
        let verified = self.stamps.verify_stamps(request).await.unwrap().into_inner();
        verified.stamps.iter().map(v1::StampRecord::state).collect()
    }
}

#[tokio::test]
async fn stamps_are_listed_verified_and_cleared() {
    let mut daemon = TestDaemon::new().await;
    let place = directory(&daemon);
    let path = |name: &str| format!("{place}/{name}");
    for name in ["a", "b", "c"] {
        fs::write(path(name), "one\ntwo\n").unwrap();
        daemon.read_lines(&path(name), "s", 1, 1).await.unwrap();
    }
    daemon.write_text(&path("d"), "t", "x").await.unwrap();
    let listed = daemon.list_stamps("s").await;
    assert_eq!(listed.len(), 3);
    let first = &listed[0];
    assert_eq!((first.path.clone(), first.call.as_str()), (path("a"), "ReadText"));
    assert_eq!(first.stamp, Some(stamp(b"one\ntwo\n")));
    assert_eq!((first.complete, first.shown.len()), (false, 1));
    assert_eq!(daemon.list_stamps("").await.len(), 4);
    fs::write(path("b"), "other").unwrap();
    fs::remove_file(path("c")).unwrap();
    let states = [v1::StampState::Fresh, v1::StampState::Stale, v1::StampState::Gone];
    assert_eq!(daemon.verify("s").await, states);
    let listed = daemon.list_stamps("s").await;
    assert_eq!(listed.iter().map(v1::StampRecord::state).collect::<Vec<_>>(), states);
    let request = v1::ClearStampsRequest {
        session: "s".to_owned(),
        path_prefix: path("b"),
        request_id: request_id(),
    };
    let cleared = daemon.stamps.clear_stamps(request).await.unwrap().into_inner();
    assert_eq!(cleared.cleared, 1);
    let request = v1::EndSessionRequest { session: "s".to_owned(), request_id: request_id() };
    daemon.workspace.end_session(request).await.unwrap();
    assert_eq!(daemon.list_stamps("").await.len(), 1);
}

#[tokio::test]
async fn pages_of_stamps_and_of_a_history_lose_nothing() {
    let mut daemon = TestDaemon::new().await;
    let file = format!("{}/f", directory(&daemon));
    for (session, text) in [("a", "1"), ("a", "22")] {
        daemon.write_text(&file, session, text).await.unwrap();
    }
    fs::write(&file, "333").unwrap();
    daemon.write_text(&file, "a", "4444").await.unwrap_err();
    daemon.read_lines(&file, "b", 1, 9).await.unwrap();
    let (mut events, mut page_token) = (Vec::new(), String::new());
    for _ in 0..4 {
        let (path, page_size) = (file.clone(), 1);
        let request =
            v1::GetStampHistoryRequest { path, page_size, page_token, session: String::new() };
        let page = daemon.stamps.get_stamp_history(request).await.unwrap().into_inner();
        events.extend(page.events);
        page_token = page.next_page_token;
    }
    assert_eq!(page_token, "");
    let told: Vec<_> =
        events.iter().map(|one| (one.session.as_str(), one.change(), one.stamp.clone())).collect();
    let expected = [
        ("b", v1::StampChange::Read, Some(stamp(b"333"))),
        ("a", v1::StampChange::RefusedStale, Some(stamp(b"22"))),
        ("a", v1::StampChange::Written, Some(stamp(b"22"))),
        ("a", v1::StampChange::Written, Some(stamp(b"1"))),
    ];
    assert_eq!(told, expected);
    let request = v1::ListStampsRequest { page_size: 1, ..v1::ListStampsRequest::default() };
    let first = daemon.stamps.list_stamps(request.clone()).await.unwrap().into_inner();
    let request = v1::ListStampsRequest { page_token: first.next_page_token, ..request };
    let second = daemon.stamps.list_stamps(request).await.unwrap().into_inner();
    assert_eq!((&*first.stamps[0].session, &*second.stamps[0].session), ("a", "b"));
    assert_eq!(second.next_page_token, "");
}

#[tokio::test]
async fn a_given_stamp_leaves_no_history_where_its_path_does_not_lead() {
    let mut daemon = TestDaemon::new().await;
    let place = directory(&daemon);
    let (file, link) = (format!("{place}/f"), format!("{place}/link"));
    fs::write(&file, "one\n").unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    daemon.read_lines(&file, "s", 1, 9).await.unwrap();
    for (path, events) in [(&link, 0), (&file, 2)] {
        let target = v1::WriteTarget {
            path: path.clone(),
            session: "s".to_owned(),
            request_id: request_id(),
            expected: Some(v1::Expected {
                state: Some(v1::expected::State::Stamp(stamp(b"other"))),
            }),
            ..v1::WriteTarget::default()
        };
        let request = v1::WriteTextRequest { target: Some(target), text: "x".to_owned() };
        let status = daemon.files.write_text(request).await.unwrap_err();
        assert_eq!(super::files::reason(&status).1, "STALE_READ");
        let path = path.clone();
        let request = v1::GetStampHistoryRequest { path, ..Default::default() };
        let history = daemon.stamps.get_stamp_history(request).await.unwrap().into_inner();
        assert_eq!(history.events.len(), events);
    }
}
