//! Files over gRPC, with the real file tools in place of a toolbox.

use std::fs;

use bytes::Bytes;
use cofferdam_spec::Stamp;
use sha2::{Digest, Sha256};
use tonic::{Code, Status};
use tonic_types::StatusExt;
use v1::expected::State;
use v1::read_response::Part;

use super::*;

/// A directory for the files of a test, by its canonical path.
pub(super) fn directory(daemon: &TestDaemon) -> String {
    let path = daemon.directory.path().canonicalize().unwrap().join("files");
    fs::create_dir(&path).unwrap();
    path.to_str().unwrap().to_owned()
}

pub(super) fn stamp(content: &[u8]) -> v1::Stamp {
    let digest = Sha256::digest(content).into();
    (&Stamp { digest, size: content.len() as u64 }).into()
}

pub(super) fn reason(status: &Status) -> (Code, String) {
    let details = status.get_error_details();
    let info = details.error_info().unwrap_or_else(|| panic!("{status:?}"));
    assert_eq!(info.domain, "cofferdam");
    (status.code(), info.reason.clone())
}

fn refused<T: std::fmt::Debug>(result: Result<T, Status>) -> (Code, String) {
    reason(&result.unwrap_err())
}

fn is(code: Code, reason: &str) -> (Code, String) {
    (code, reason.to_owned())
}

fn target(path: &str, session: &str) -> v1::WriteTarget {
    v1::WriteTarget {
        path: path.to_owned(),
        session: session.to_owned(),
        request_id: request_id(),
        ..v1::WriteTarget::default()
    }
}

fn expected(state: State) -> Option<v1::Expected> {
    Some(v1::Expected { state: Some(state) })
}

impl TestDaemon {
    pub(super) async fn read_lines(
        &mut self,
        path: &str,
        session: &str,
        first_line: u64,
        max_lines: u64,
    ) -> Result<v1::ReadTextResponse, Status> {
        let (path, session) = (path.to_owned(), session.to_owned());
        let request = v1::ReadTextRequest { path, session, first_line, max_lines };
        Ok(soon(self.files.read_text(request)).await?.into_inner())
    }

    async fn write_to(
        &mut self,
        target: v1::WriteTarget,
        text: &str,
    ) -> Result<v1::FileWritten, Status> {
        let request = v1::WriteTextRequest { target: Some(target), text: text.to_owned() };
        let response = soon(self.files.write_text(request)).await?.into_inner();
        assert!(response.enforcement.is_some());
        Ok(response.written.unwrap())
    }

    pub(super) async fn write_text(
        &mut self,
        path: &str,
        session: &str,
        text: &str,
    ) -> Result<v1::FileWritten, Status> {
        self.write_to(target(path, session), text).await
    }

    async fn edit(
        &mut self,
        path: &str,
        session: &str,
        old: &str,
        new: &str,
    ) -> Result<v1::EditResponse, Status> {
        let request = v1::EditRequest {
            path: path.to_owned(),
            session: session.to_owned(),
            request_id: request_id(),
            old_text: old.to_owned(),
            new_text: new.to_owned(),
            ..v1::EditRequest::default()
        };
        Ok(soon(self.files.edit(request)).await?.into_inner())
    }

    async fn read_bytes(
        &mut self,
        request: v1::ReadRequest,
    ) -> Result<(Vec<u8>, v1::ReadEnded), Status> {
        let mut parts = soon(self.files.read(request)).await?.into_inner();
        let first = soon(parts.next()).await.unwrap()?;
        assert!(matches!(first.part, Some(Part::Started(_))), "{first:?}");
        let (mut bytes, mut ended) = (Vec::new(), None);
        let mut next = None;
        while let Some(part) = soon(parts.next()).await {
            match part?.part.unwrap() {
                Part::Chunk(chunk) => {
                    assert_eq!(*next.get_or_insert(chunk.offset), chunk.offset);
                    next = Some(chunk.offset + chunk.data.len() as u64);
                    bytes.extend_from_slice(&chunk.data);
                }
                Part::Ended(last) => ended = Some(last),
                Part::Started(_) => panic!("started twice"),
            }
        }
        Ok((bytes, ended.unwrap()))
    }

    async fn upload(
        &mut self,
        target: v1::WriteTarget,
        content: &[u8],
    ) -> Result<v1::FileWritten, Status> {
        use v1::write_request::Part;
        let message = |part| v1::WriteRequest { part: Some(part) };
        let mut messages = vec![message(Part::Target(target))];
        let data = content.chunks(1 << 20).map(|part| Part::Data(Bytes::copy_from_slice(part)));
        messages.extend(data.map(message));
        let response = soon(self.files.write(futures::stream::iter(messages))).await?;
        Ok(response.into_inner().written.unwrap())
    }

    async fn remove(&mut self, path: &str, session: &str) -> Result<v1::RemoveResponse, Status> {
        let request = v1::RemoveRequest {
            path: path.to_owned(),
            session: session.to_owned(),
            request_id: request_id(),
            ..v1::RemoveRequest::default()
        };
        Ok(soon(self.files.remove(request)).await?.into_inner())
    }

    async fn move_to(
        &mut self,
        from: &str,
        to: &str,
        session: &str,
    ) -> Result<v1::MoveResponse, Status> {
        let request = v1::MoveRequest {
            from: from.to_owned(),
            to: to.to_owned(),
            session: session.to_owned(),
            request_id: request_id(),
            expected: None,
        };
        Ok(soon(self.files.r#move(request)).await?.into_inner())
    }
}

#[tokio::test]
async fn a_file_is_overwritten_only_by_who_has_seen_all_of_it() {
    let mut daemon = TestDaemon::new().await;
    let file = format!("{}/f", directory(&daemon));
    let old: String = (1..=10).map(|line| format!("line {line}\n")).collect();
    fs::write(&file, &old).unwrap();
    let not_read = is(Code::FailedPrecondition, "NOT_READ");
    assert_eq!(refused(daemon.write_text(&file, "a", "new").await), not_read);
    let read = daemon.read_lines(&file, "a", 1, 4).await.unwrap();
    assert_eq!((read.text.lines().count(), read.next_line), (4, 5));
    assert_eq!(read.stamp, Some(stamp(old.as_bytes())));
    let partly = daemon.write_text(&file, "a", "new").await.unwrap_err();
    assert_eq!(reason(&partly), is(Code::FailedPrecondition, "PARTLY_READ"));
    let details = partly.get_error_details();
    let metadata = &details.error_info().unwrap().metadata;
    assert_eq!((&*metadata["shown"], &*metadata["total_lines"]), ("1-4", "10"));
    daemon.read_lines(&file, "a", 5, 6).await.unwrap();
    assert_eq!(refused(daemon.write_text(&file, "b", "new").await), not_read);
    let written = daemon.write_text(&file, "a", "new").await.unwrap();
    assert_eq!(written.previous_stamp, Some(stamp(old.as_bytes())));
    assert_eq!((written.stamp, written.existed), (Some(stamp(b"new")), true));
    // What it wrote it has seen.
    daemon.write_text(&file, "a", "newer").await.unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), "newer");
}

#[tokio::test]
async fn a_change_behind_the_session_is_a_stale_read_with_what_is_there() {
    let mut daemon = TestDaemon::new().await;
    let file = format!("{}/f", directory(&daemon));
    fs::write(&file, "one\n").unwrap();
    daemon.read_lines(&file, "a", 1, 9).await.unwrap();
    fs::write(&file, "two\n").unwrap();
    for status in [
        daemon.write_text(&file, "a", "x").await.unwrap_err(),
        daemon.edit(&file, "a", "two", "x").await.unwrap_err(),
        daemon.remove(&file, "a").await.unwrap_err(),
        daemon.move_to(&file, &format!("{file}2"), "a").await.unwrap_err(),
    ] {
        assert_eq!(reason(&status), is(Code::Aborted, "STALE_READ"));
        let digest = Stamp { digest: Sha256::digest(b"two\n").into(), size: 4 }.to_string();
        let details = status.get_error_details();
        assert_eq!(details.error_info().unwrap().metadata["digest"], digest);
        assert_eq!(details.error_info().unwrap().metadata["size"], "4");
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "two\n");
}

#[tokio::test]
async fn what_a_call_says_it_expects_is_never_ignored() {
    let mut daemon = TestDaemon::new().await;
    let file = format!("{}/f", directory(&daemon));
    fs::write(&file, "one").unwrap();
    let with = |state| v1::WriteTarget { expected: expected(state), ..target(&file, "a") };
    let absent = with(State::Absent(v1::Absent {}));
    let exists = refused(daemon.write_to(absent, "x").await);
    assert_eq!(exists, is(Code::AlreadyExists, "EXISTS"));
    let other = with(State::Stamp(stamp(b"two")));
    let stale = refused(daemon.write_to(other, "x").await);
    assert_eq!(stale, is(Code::Aborted, "STALE_READ"));
    let right = with(State::Stamp(stamp(b"one")));
    daemon.write_to(right, "two").await.unwrap();
    let any = with(State::Any(v1::Any {}));
    daemon.write_to(any, "three").await.unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), "three");
}

#[tokio::test]
async fn a_symlink_and_a_detour_share_the_stamp_of_the_file() {
    let mut daemon = TestDaemon::new().await;
    let place = directory(&daemon);
    let (file, link) = (format!("{place}/f"), format!("{place}/link"));
    fs::write(&file, "one").unwrap();
    std::os::unix::fs::symlink("f", &link).unwrap();
    daemon.read_lines(&link, "a", 1, 9).await.unwrap();
    let detour = format!("{place}/../files//./f");
    daemon.write_text(&detour, "a", "two").await.unwrap();
    daemon.edit(&link, "a", "two", "three").await.unwrap();
    let written = daemon.write_text(&link, "a", "four").await.unwrap();
    assert_eq!(written.path, file);
    assert_eq!(fs::read_link(&link).unwrap().to_str(), Some("f"));
}

#[tokio::test]
async fn edits_need_a_read_of_any_part_and_say_how_often_the_text_stands_there() {
    let mut daemon = TestDaemon::new().await;
    let file = format!("{}/f", directory(&daemon));
    let missing = refused(daemon.edit(&file, "a", "x", "y").await);
    assert_eq!(missing, is(Code::NotFound, "NOT_FOUND"));
    fs::write(&file, "a b\nb\nc\nd\n").unwrap();
    let unread = refused(daemon.edit(&file, "a", "c", "y").await);
    assert_eq!(unread, is(Code::FailedPrecondition, "NOT_READ"));
    daemon.read_lines(&file, "a", 1, 1).await.unwrap();
    let twice = daemon.edit(&file, "a", "b", "y").await.unwrap_err();
    assert_eq!(reason(&twice), is(Code::FailedPrecondition, "OCCURRENCES"));
    let details = twice.get_error_details();
    assert_eq!(details.error_info().unwrap().metadata["count"], "2");
    let edited = daemon.edit(&file, "a", "c", "y\nz").await.unwrap();
    assert_eq!((edited.replacements, edited.first_line), (1, 3));
    // An edit of a part is no sight of the whole.
    let partly = refused(daemon.write_text(&file, "a", "x").await);
    assert_eq!(partly, is(Code::FailedPrecondition, "PARTLY_READ"));
    daemon.edit(&file, "a", "z", "w").await.unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), "a b\nb\ny\nw\nd\n");
}

#[tokio::test]
async fn a_text_that_does_not_say_its_bytes_is_not_overwritten_before_they_are_read() {
    let mut daemon = TestDaemon::new().await;
    let file = format!("{}/f", directory(&daemon));
    fs::write(&file, b"caf\xe9\n").unwrap();
    let read = daemon.read_lines(&file, "a", 1, 9).await.unwrap();
    assert_eq!(read.encoding(), v1::TextEncoding::Lossy);
    let not_text = is(Code::FailedPrecondition, "NOT_TEXT");
    assert_eq!(refused(daemon.write_text(&file, "a", "x").await), not_text);
    assert_eq!(refused(daemon.edit(&file, "a", "caf", "x").await), not_text);
    let session = "a".to_owned();
    let request = v1::ReadRequest { path: file.clone(), session, ..v1::ReadRequest::default() };
    let (bytes, ended) = daemon.read_bytes(request).await.unwrap();
    assert_eq!((&bytes[..], ended.changed), (&b"caf\xe9\n"[..], false));
    daemon.write_text(&file, "a", "x").await.unwrap();
}

#[tokio::test]
async fn large_contents_go_up_and_come_down_whole() {
    let mut daemon = TestDaemon::new().await;
    let file = format!("{}/f", directory(&daemon));
    for size in [0, 100, 70_000, 5 << 20] {
        let content: Vec<u8> = (0..size).map(|index: usize| (index * 7 % 251) as u8).collect();
        let written = daemon.upload(target(&file, "a"), &content).await.unwrap();
        assert_eq!(written.stamp, Some(stamp(&content)));
        let request = v1::ReadRequest { path: file.clone(), ..v1::ReadRequest::default() };
        let (bytes, ended) = daemon.read_bytes(request.clone()).await.unwrap();
        assert!(bytes == content, "{size} bytes");
        assert_eq!((ended.stamp, ended.changed), (Some(stamp(&content)), false));
        let (offset, length) = (size as u64 / 2, size as u64 / 3);
        let request = v1::ReadRequest { offset, length, ..request };
        let (bytes, _) = daemon.read_bytes(request.clone()).await.unwrap();
        let end = if length == 0 { size } else { (offset + length) as usize };
        assert!(bytes == content[offset as usize..end], "{size} bytes in part");
        let beyond = v1::ReadRequest { offset: size as u64 + 1, ..request };
        // A file that says it has no bytes may have some, as those of /proc do.
        if size > 0 {
            let beyond = refused(daemon.read_bytes(beyond).await);
            assert_eq!(beyond, is(Code::OutOfRange, "OFFSET_OUT_OF_RANGE"));
        }
        let text = String::from_utf8(vec![b'x'; size]).unwrap();
        daemon.write_text(&file, "a", &text).await.unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), text);
    }
    assert_eq!(daemon.job_files(), 0);
}

#[tokio::test]
async fn an_upload_that_breaks_off_writes_nothing() {
    use v1::write_request::Part;
    let mut daemon = TestDaemon::new().await;
    let file = format!("{}/f", directory(&daemon));
    let (sender, receiver) = futures::channel::mpsc::unbounded();
    let message = |part| v1::WriteRequest { part: Some(part) };
    sender.unbounded_send(message(Part::Target(target(&file, "a")))).unwrap();
    sender.unbounded_send(message(Part::Data(vec![0; 1 << 20].into()))).unwrap();
    let mut files = daemon.files.clone();
    let upload = tokio::spawn(async move { files.write(receiver).await });
    until(async || daemon.execute("true").await.exit.is_some()).await;
    upload.abort();
    assert!(upload.await.unwrap_err().is_cancelled());
    daemon.execute("true").await;
    assert!(!fs::exists(&file).unwrap());
    let no_target = futures::stream::iter([message(Part::Data(Bytes::new()))]);
    let status = daemon.files.write(no_target).await.unwrap_err();
    assert_eq!(status.get_details_bad_request().unwrap().field_violations[0].field, "target");
    drop(sender);
}

#[tokio::test]
async fn moves_and_removals_take_the_stamps_along() {
    let mut daemon = TestDaemon::new().await;
    let place = directory(&daemon);
    let file = format!("{place}/d/f");
    daemon.write_text(&file, "a", "one").await.unwrap();
    let unread = refused(daemon.move_to(&file, &format!("{place}/x"), "b").await);
    assert_eq!(unread, is(Code::FailedPrecondition, "NOT_READ"));
    // A directory has no content.
    let (from, to) = (format!("{place}/d"), format!("{place}/e"));
    let moved = daemon.move_to(&from, &to, "b").await.unwrap();
    assert_eq!((moved.from, moved.to), (from, to.clone()));
    let file = format!("{to}/f");
    daemon.write_text(&file, "a", "two").await.unwrap();
    let full = refused(daemon.remove(&to, "a").await);
    assert_eq!(full, is(Code::FailedPrecondition, "NOT_EMPTY"));
    let removed = daemon.remove(&file, "a").await.unwrap();
    assert_eq!((removed.path, removed.removed), (file.clone(), 1));
    let gone = refused(daemon.remove(&file, "a").await);
    assert_eq!(gone, is(Code::NotFound, "NOT_FOUND"));
}

#[tokio::test]
async fn directories_are_made_listed_in_pages_and_described() {
    let mut daemon = TestDaemon::new().await;
    let place = directory(&daemon);
    let request = v1::MakeDirRequest {
        path: format!("{place}/a/b"),
        request_id: request_id(),
        parents: true,
        ..v1::MakeDirRequest::default()
    };
    let made = daemon.files.make_dir(request).await.unwrap().into_inner();
    assert_eq!((made.path, made.created), (format!("{place}/a/b"), true));
    for name in ["c", "d", "e"] {
        fs::write(format!("{place}/{name}"), name).unwrap();
    }
    let (mut names, mut page_token) = (Vec::new(), String::new());
    for _ in 0..3 {
        let (path, page_size) = (place.clone(), 2);
        let request = v1::ListDirRequest { path, page_size, page_token };
        let page = daemon.files.list_dir(request).await.unwrap().into_inner();
        names.extend(page.entries.into_iter().map(|entry| entry.name));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!(names, ["a", "c", "d", "e"]);
    let request = v1::StatRequest {
        path: format!("{place}/c"),
        with_stamp: true,
        ..v1::StatRequest::default()
    };
    let described = daemon.files.stat(request).await.unwrap().into_inner();
    assert_eq!(described.stamp, Some(stamp(b"c")));
    assert_eq!(described.info.unwrap().r#type(), v1::FileType::Regular);
}

#[tokio::test]
async fn searches_find_files_and_lines() {
    use v1::grep_response::Part;
    let mut daemon = TestDaemon::new().await;
    let place = directory(&daemon);
    for name in ["a.rs", "b.rs", "c.txt"] {
        fs::write(format!("{place}/{name}"), "one\ntwo\n").unwrap();
    }
    let request = v1::GlobRequest {
        pattern: "*.rs".to_owned(),
        path: place.clone(),
        limit: 1,
        ..v1::GlobRequest::default()
    };
    let found = daemon.files.glob(request).await.unwrap().into_inner();
    assert_eq!((found.paths, found.truncated), (vec![format!("{place}/a.rs")], true));
    let request = v1::GrepRequest {
        pattern: "^tw.$".to_owned(),
        path: place.clone(),
        ..v1::GrepRequest::default()
    };
    let mut parts = daemon.files.grep(request.clone()).await.unwrap().into_inner();
    let (mut lines, mut ended) = (0, None);
    while let Some(part) = soon(parts.next()).await {
        match part.unwrap().part.unwrap() {
            Part::File(file) => lines += file.lines.len(),
            Part::Ended(end) => ended = Some(end),
        }
    }
    let ended = ended.unwrap();
    assert_eq!((lines, ended.matches, ended.files), (3, 3, 3));
    let bad = v1::GrepRequest { pattern: "(".to_owned(), ..request };
    let mut parts = daemon.files.grep(bad).await.unwrap().into_inner();
    let bad = soon(parts.next()).await.unwrap();
    assert_eq!(refused(bad), is(Code::InvalidArgument, "BAD_PATTERN"));
}

#[tokio::test]
async fn every_wrong_field_of_a_call_about_files_is_named_at_once() {
    let mut daemon = TestDaemon::new().await;
    let request = v1::EditRequest {
        path: "a\0".to_owned(),
        session: "é".to_owned(),
        expected: expected(State::Absent(v1::Absent {})),
        ..v1::EditRequest::default()
    };
    let status = daemon.files.edit(request).await.unwrap_err();
    let details = status.get_error_details();
    let violations = &details.bad_request().unwrap().field_violations;
    let fields: Vec<_> = violations.iter().map(|one| one.field.as_str()).collect();
    assert_eq!(fields, ["request_id", "session", "path", "expected", "old_text"]);
    let long = target(&format!("/{}", "x".repeat(4095)), "a");
    let status = daemon.write_to(v1::WriteTarget { mode: 0o7777, ..long }, "x").await.unwrap_err();
    let details = status.get_error_details();
    let violations = &details.bad_request().unwrap().field_violations;
    let fields: Vec<_> = violations.iter().map(|one| one.field.as_str()).collect();
    assert_eq!(fields, ["target.path", "target.mode"]);
}

#[tokio::test]
async fn a_lost_cell_loses_no_stamp_and_a_draining_daemon_takes_no_call() {
    let mut daemon = TestDaemon::new().await;
    let file = format!("{}/f", directory(&daemon));
    daemon.write_text(&file, "a", "one").await.unwrap();
    daemon.cells.lock().unwrap().current.take().unwrap().die();
    let mut written = None;
    until(async || {
        written = daemon.write_text(&file, "a", "two").await.ok();
        written.is_some()
    })
    .await;
    assert_eq!(written.unwrap().previous_stamp, Some(stamp(b"one")));
    let mut held = daemon.start(start("sleep 60")).await;
    held.started().await;
    daemon.stop();
    let mut status = None;
    until(async || {
        status = daemon.read_lines(&file, "a", 1, 1).await.err();
        status.is_some()
    })
    .await;
    let status = status.unwrap();
    assert_eq!(reason(&status), is(Code::Unavailable, "DRAINING"));
    assert!(status.get_details_retry_info().is_some());
}
