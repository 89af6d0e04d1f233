//! FilesystemService and StampService over gRPC: each call, each refusal, and files of odd kinds
//! and sizes.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::{FileExt, chown};
use std::time::{Duration, Instant};

use cofferdam_e2e::{
    Daemon, both, error_info, field_violations, program, resident_bytes, soak, unique, wait_for,
    within,
};
use cofferdam_probes::Pattern;
use cofferdam_proto::v1;
use cofferdam_proto::v1::expected::State;
use cofferdam_proto::v1::{
    ChangeKind, FileType, StampChange, StampState, read_response, watch_dir_response, write_request,
};
use sha2::{Digest, Sha256};
use tonic::{Code, Status, Streaming};
use tonic_types::StatusExt;

const SESSION: &str = "reader";

fn expected(state: State) -> Option<v1::Expected> {
    Some(v1::Expected { state: Some(state) })
}

fn any() -> Option<v1::Expected> {
    expected(State::Any(v1::Any {}))
}

/// The stamp of some bytes.
fn stamp(bytes: impl AsRef<[u8]>) -> v1::Stamp {
    v1::Stamp {
        algorithm: v1::DigestAlgorithm::Sha256.into(),
        digest: Sha256::digest(&bytes).to_vec().into(),
        size: bytes.as_ref().len() as u64,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn target(path: &str, expected: Option<v1::Expected>) -> v1::WriteTarget {
    v1::WriteTarget {
        path: path.to_owned(),
        expected,
        session: SESSION.to_owned(),
        request_id: unique(),
        ..v1::WriteTarget::default()
    }
}

fn write_text(path: &str, text: &str, expected: Option<v1::Expected>) -> v1::WriteTextRequest {
    v1::WriteTextRequest { target: Some(target(path, expected)), text: text.to_owned() }
}

fn edit(path: &str, old: &str, new: &str) -> v1::EditRequest {
    v1::EditRequest {
        path: path.to_owned(),
        session: SESSION.to_owned(),
        request_id: unique(),
        old_text: old.to_owned(),
        new_text: new.to_owned(),
        ..v1::EditRequest::default()
    }
}

fn lines(path: &str, first_line: u64, max_lines: u64) -> v1::ReadTextRequest {
    v1::ReadTextRequest {
        path: path.to_owned(),
        first_line,
        max_lines,
        session: SESSION.to_owned(),
    }
}

fn bytes(path: &str, offset: u64, length: u64) -> v1::ReadRequest {
    v1::ReadRequest { path: path.to_owned(), offset, length, session: SESSION.to_owned() }
}

fn remove(path: &str, expected: Option<v1::Expected>, recursive: bool) -> v1::RemoveRequest {
    v1::RemoveRequest {
        path: path.to_owned(),
        expected,
        session: SESSION.to_owned(),
        request_id: unique(),
        recursive,
    }
}

fn rename(from: &str, to: &str, expected: Option<v1::Expected>) -> v1::MoveRequest {
    v1::MoveRequest {
        from: from.to_owned(),
        to: to.to_owned(),
        expected,
        session: SESSION.to_owned(),
        request_id: unique(),
    }
}

fn stat(path: &str) -> v1::StatRequest {
    v1::StatRequest { path: path.to_owned(), ..v1::StatRequest::default() }
}

/// A whole read: what it began with, its bytes, what it ended with.
async fn drain(
    mut parts: Streaming<v1::ReadResponse>,
    offset: u64,
) -> (v1::ReadStarted, Vec<u8>, v1::ReadEnded) {
    let mut held = Vec::new();
    let first = parts.message().await.expect("a stream").expect("a first part").part;
    let Some(read_response::Part::Started(started)) = first else {
        panic!("starts with {first:?}")
    };
    loop {
        let part = parts.message().await.expect("the stream goes on").expect("it ends properly");
        match part.part {
            Some(read_response::Part::Chunk(chunk)) => {
                assert_eq!(chunk.offset, offset + held.len() as u64);
                assert!(chunk.data.len() <= 1 << 20, "{}", chunk.data.len());
                held.extend_from_slice(&chunk.data);
            }
            Some(read_response::Part::Ended(ended)) => {
                assert!(parts.message().await.expect("a clean end").is_none());
                return (started, held, ended);
            }
            other => panic!("in the middle of a read: {other:?}"),
        }
    }
}

/// A whole read that must work.
async fn read(daemon: &Daemon, request: v1::ReadRequest) -> (Vec<u8>, v1::ReadEnded) {
    let offset = request.offset;
    let parts = daemon.files().read(request).await.expect("it is readable").into_inner();
    let (_, held, ended) = drain(parts, offset).await;
    assert_eq!(ended.stamp, Some(stamp(&held)), "the digest is that of the bytes");
    (held, ended)
}

/// The refusal of a read, which may come with the call or instead of the first part.
async fn read_refused(daemon: &Daemon, request: v1::ReadRequest) -> Status {
    match daemon.files().read(request).await {
        Err(status) => status,
        Ok(answer) => answer.into_inner().message().await.expect_err("a refusal"),
    }
}

/// Asserts code and reason of a refusal.
#[track_caller]
fn refused(status: &Status, code: Code, reason: &str) {
    assert_eq!(status.code(), code, "{status:?}");
    let info = error_info(status);
    assert_eq!((info.0.as_str(), info.1.as_str()), (reason, "cofferdam"), "{status:?}");
}

/// Asserts code and domain of a refusal.
#[track_caller]
fn refused_as(status: &Status, code: Code) {
    assert_eq!(status.code(), code, "{status:?}");
    let (reason, domain) = error_info(status);
    assert!(domain == "cofferdam" && !reason.is_empty(), "{status:?}");
}

/// Streams a write.
async fn write(
    daemon: &Daemon,
    target: v1::WriteTarget,
    chunks: Vec<Vec<u8>>,
) -> Result<v1::FileWritten, Status> {
    let first = v1::WriteRequest { part: Some(write_request::Part::Target(target)) };
    let data = chunks
        .into_iter()
        .map(|chunk| v1::WriteRequest { part: Some(write_request::Part::Data(chunk.into())) });
    let requests: Vec<_> = [first].into_iter().chain(data).collect();
    let answer = daemon.files().write(tokio_stream::iter(requests)).await?.into_inner();
    Ok(answer.written.expect("a write tells what it wrote"))
}

/// One page of the session's stamps.
async fn stamps(daemon: &Daemon) -> Vec<v1::StampRecord> {
    let request = v1::ListStampsRequest { session: SESSION.to_owned(), ..Default::default() };
    daemon.stamps().list_stamps(request).await.expect("it answers").into_inner().stamps
}

/// Time on a processor that a process used, in ticks.
fn ticks(pid: i32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("it lives");
    let (_, rest) = stat.rsplit_once(") ").expect("a name");
    let fields: Vec<&str> = rest.split(' ').collect();
    let number = |index: usize| fields[index].parse::<u64>().expect("a number");
    number(11) + number(12)
}

both! {
    async fn stat_describes_each_kind(who) {
        let daemon = Daemon::start(who).await;
        let make = "printf text > f; chmod 640 f; mkdir d; ln -s f link; ln f hard; mkfifo p";
        daemon.shell(make).await.expect(0, "");
        let mut files = daemon.files();
        let mut info = async |request: v1::StatRequest| {
            files.stat(request).await.expect("it is there").into_inner()
        };
        let file = info(v1::StatRequest { with_stamp: true, ..stat("/workspace/f") }).await;
        assert_eq!(file.stamp, Some(stamp("text")));
        let about = file.info.expect("it is described");
        assert_eq!((about.name.as_str(), about.path.as_str()), ("f", "/workspace/f"));
        assert_eq!((about.r#type(), about.size), (FileType::Regular, 4));
        assert_eq!((about.mode & 0o7777, about.links), (0o640, 2));
        let followed = info(stat("/workspace/link")).await.info.expect("described");
        assert_eq!(followed.r#type(), FileType::Regular);
        let link = v1::StatRequest { no_follow: true, ..stat("/workspace/link") };
        let link = info(link).await.info.expect("described");
        assert_eq!((link.r#type(), link.symlink_target.as_str()), (FileType::Symlink, "f"));
        assert_eq!(link.path, "/workspace/link");
        for (path, kind) in [
            ("/workspace/d", FileType::Directory), ("d", FileType::Directory),
            ("/workspace/p", FileType::Fifo), ("/dev/null", FileType::CharacterDevice),
        ] {
            let about = info(stat(path)).await.info.expect("described");
            assert_eq!(about.r#type(), kind, "{path}");
        }
        // It gave no right to overwrite.
        let status = files.write_text(write_text("/workspace/f", "x", None)).await;
        refused(&status.expect_err("it was not read"), Code::FailedPrecondition, "NOT_READ");
    }

    async fn stamps_guard_what_a_session_has_seen(who) {
        let daemon = Daemon::start(who).await;
        let mut files = daemon.files();
        let path = "/workspace/f";
        let text: String = (1..=50).map(|n| format!("line {n}\n")).collect();
        daemon.put_text("f", &text);

        let status = files.write_text(write_text(path, "x", None)).await;
        refused(&status.expect_err("not read"), Code::FailedPrecondition, "NOT_READ");
        let status = files.edit(edit(path, "line 1\n", "x\n")).await;
        refused(&status.expect_err("not read"), Code::FailedPrecondition, "NOT_READ");
        let status = files.r#move(rename(path, "/workspace/g", None)).await;
        refused(&status.expect_err("not read"), Code::FailedPrecondition, "NOT_READ");
        let status = files.remove(remove(path, None, false)).await;
        refused(&status.expect_err("not read"), Code::FailedPrecondition, "NOT_READ");

        let part = files.read_text(lines(path, 3, 2)).await.expect("it is there").into_inner();
        assert_eq!(part.text, "line 3\nline 4\n");
        assert_eq!(part.range, Some(v1::LineRange { first: 3, last: 4 }));
        assert_eq!((part.total_lines, part.next_line, part.cut), (Some(50), 5, false));
        assert_eq!((part.encoding(), part.line_ending()), (v1::TextEncoding::Utf8, v1::LineEnding::Lf));
        assert_eq!(part.stamp, Some(stamp(&text)));
        let status = files.write_text(write_text(path, "x", None)).await;
        refused(&status.expect_err("in part"), Code::FailedPrecondition, "PARTLY_READ");
        let held = stamps(&daemon).await;
        assert_eq!(held.len(), 1, "{held:?}");
        assert_eq!(held[0].shown, [v1::LineRange { first: 3, last: 4 }]);
        assert!(!held[0].complete && held[0].state() == StampState::Fresh, "{held:?}");

        // A part is enough for an edit.
        let status = files.edit(edit(path, "line", "x")).await.expect_err("50 times");
        refused(&status, Code::FailedPrecondition, "OCCURRENCES");
        let count = status.get_details_error_info().expect("of ours").metadata;
        assert!(count.values().any(|value| value == "50"), "{count:?}");
        let status = files.edit(edit(path, "nowhere", "x")).await.expect_err("not there");
        refused(&status, Code::FailedPrecondition, "OCCURRENCES");
        let edited = files.edit(edit(path, "line 7\n", "seven\n")).await.expect("once").into_inner();
        assert_eq!((edited.replacements, edited.first_line), (1, 7));
        let text = text.replace("line 7\n", "seven\n");
        let written = edited.written.expect("it tells");
        assert_eq!((written.path.as_str(), written.existed, written.atomic), (path, true, true));
        assert_eq!(written.stamp, Some(stamp(&text)));
        assert_eq!(fs::read_to_string(daemon.workspace.join("f")).expect("there"), text);
        let all = v1::EditRequest { replace_all: true, ..edit(path, "line", "row") };
        let all = files.edit(all).await.expect("many").into_inner();
        assert_eq!((all.replacements, all.first_line), (49, 1));

        files.read_text(lines(path, 0, 0)).await.expect("all of it");
        daemon.put_text("f", "changed\n");
        let status = files.write_text(write_text(path, "x", None)).await.expect_err("stale");
        refused(&status, Code::Aborted, "STALE_READ");
        let current = stamp("changed\n");
        let metadata = status.get_details_error_info().expect("of ours").metadata;
        assert!(metadata.values().any(|value| value.contains(&hex(&current.digest))), "{metadata:?}");
        for status in [
            files.edit(edit(path, "changed", "x")).await.expect_err("stale"),
            files.r#move(rename(path, "/workspace/g", None)).await.expect_err("stale"),
            files.remove(remove(path, None, false)).await.expect_err("stale"),
            files.write_text(write_text(path, "x", expected(State::Stamp(stamp("other")))))
                .await.expect_err("another stamp"),
        ] {
            refused(&status, Code::Aborted, "STALE_READ");
        }
        let absent = || expected(State::Absent(v1::Absent {}));
        let status = files.write_text(write_text(path, "x", absent())).await;
        refused_as(&status.expect_err("it exists"), Code::AlreadyExists);
        assert_eq!(fs::read_to_string(daemon.workspace.join("f")).expect("there"), "changed\n");

        let right = write_text(path, "by stamp\n", expected(State::Stamp(current.clone())));
        let written = files.write_text(right).await.expect("the stamp is right").into_inner();
        let written = written.written.expect("it tells");
        assert_eq!(written.previous_stamp, Some(current));
        let moved = files.r#move(rename(path, "/workspace/g", None)).await.expect("own write");
        let moved = moved.into_inner();
        assert_eq!((moved.from.as_str(), moved.to.as_str()), (path, "/workspace/g"));
        daemon.put_text("h", "there\n");
        let status = files.r#move(rename("/workspace/g", "/workspace/h", None)).await;
        refused_as(&status.expect_err("a move replaces nothing"), Code::AlreadyExists);
        let removed = files.remove(remove("/workspace/g", None, false)).await.expect("moved along");
        assert_eq!(removed.into_inner().removed, 1);
        assert!(!daemon.workspace.join("g").exists() && !daemon.workspace.join("f").exists());
        files.write_text(write_text("/workspace/n", "x", absent())).await.expect("it is new");
        files.write_text(write_text("/workspace/h", "x", any())).await.expect("anything");
    }

    async fn stamps_are_listed_verified_told_and_cleared(who) {
        let daemon = Daemon::start(who).await;
        let (mut files, mut stamp_client) = (daemon.files(), daemon.stamps());
        for name in ["a", "b", "c"] {
            daemon.put_text(name, name);
            files.read_text(lines(&format!("/workspace/{name}"), 0, 0)).await.expect("there");
        }
        let held = stamps(&daemon).await;
        let paths: Vec<&str> = held.iter().map(|one| one.path.as_str()).collect();
        assert_eq!(paths, ["/workspace/a", "/workspace/b", "/workspace/c"]);
        for (one, name) in held.iter().zip(["a", "b", "c"]) {
            assert_eq!(one.stamp, Some(stamp(name)));
            assert!(one.complete && one.time.is_some() && !one.call.is_empty(), "{one:?}");
            assert_eq!((one.session.as_str(), one.state()), (SESSION, StampState::Fresh));
        }
        let page = |token: String| v1::ListStampsRequest {
            session: SESSION.to_owned(), page_size: 2, page_token: token, ..Default::default()
        };
        let first = stamp_client.list_stamps(page(String::new())).await.expect("a page").into_inner();
        assert_eq!(first.stamps.len(), 2);
        let second = stamp_client.list_stamps(page(first.next_page_token)).await.expect("a page");
        let second = second.into_inner();
        assert_eq!((second.stamps.len(), second.next_page_token.as_str()), (1, ""));
        let other = v1::ListStampsRequest { session: "other".to_owned(), ..Default::default() };
        let other = stamp_client.list_stamps(other).await.expect("it answers").into_inner();
        assert!(other.stamps.is_empty());

        daemon.put_text("b", "changed");
        fs::remove_file(daemon.workspace.join("c")).expect("it is there");
        let verify = v1::VerifyStampsRequest { session: SESSION.to_owned(), ..Default::default() };
        let verified = stamp_client.verify_stamps(verify).await.expect("it answers").into_inner();
        let states: Vec<_> = verified.stamps.iter().map(v1::StampRecord::state).collect();
        assert_eq!(states, [StampState::Fresh, StampState::Stale, StampState::Gone]);

        files.write_text(write_text("/workspace/b", "x", None)).await.expect_err("stale");
        files.write_text(write_text("/workspace/a", "new", None)).await.expect("it was read");
        let history = async |path: &str| {
            let request = v1::GetStampHistoryRequest { path: path.to_owned(), ..Default::default() };
            let answer = daemon.stamps().get_stamp_history(request).await.expect("it answers");
            let events = answer.into_inner().events;
            assert!(events.iter().all(|event| event.session == SESSION), "{events:?}");
            events.iter().map(v1::StampEvent::change).collect::<Vec<_>>()
        };
        assert_eq!(history("/workspace/a").await, [StampChange::Written, StampChange::Read]);
        assert_eq!(history("/workspace/b").await, [StampChange::RefusedStale, StampChange::Read]);

        let clear = v1::ClearStampsRequest {
            session: SESSION.to_owned(), path_prefix: "/workspace/a".to_owned(), request_id: unique(),
        };
        let cleared = stamp_client.clear_stamps(clear).await.expect("it answers").into_inner();
        assert_eq!(cleared.cleared, 1);
        let status = files.write_text(write_text("/workspace/a", "x", None)).await;
        refused(&status.expect_err("dropped"), Code::FailedPrecondition, "NOT_READ");
        assert_eq!(history("/workspace/a").await[0], StampChange::Cleared);
        let clear = v1::ClearStampsRequest {
            session: SESSION.to_owned(), request_id: unique(), ..Default::default()
        };
        stamp_client.clear_stamps(clear).await.expect("it answers");
        assert_eq!(stamps(&daemon).await, []);
    }

    async fn what_is_missing_is_not_found(who) {
        let daemon = Daemon::start(who).await;
        let mut files = daemon.files();
        let missing = "/workspace/none";
        let glob = v1::GlobRequest { pattern: "*".into(), path: missing.into(), ..Default::default() };
        let grep = v1::GrepRequest { pattern: "x".into(), path: missing.into(), ..Default::default() };
        let list = v1::ListDirRequest { path: missing.into(), ..Default::default() };
        let watch = v1::WatchDirRequest { path: missing.into(), ..Default::default() };
        for status in [
            files.stat(stat(missing)).await.expect_err("missing"),
            files.list_dir(list).await.expect_err("missing"),
            read_refused(&daemon, bytes(missing, 0, 0)).await,
            files.read_text(lines(missing, 0, 0)).await.expect_err("missing"),
            files.edit(v1::EditRequest { expected: any(), ..edit(missing, "a", "b") })
                .await.expect_err("missing"),
            files.r#move(rename(missing, "/workspace/to", any())).await.expect_err("missing"),
            files.remove(remove(missing, any(), false)).await.expect_err("missing"),
            files.glob(glob).await.expect_err("missing"),
            match files.grep(grep).await {
                Err(status) => status,
                Ok(answer) => answer.into_inner().message().await.expect_err("missing"),
            },
            match files.watch_dir(watch).await {
                Err(status) => status,
                Ok(answer) => answer.into_inner().message().await.expect_err("missing"),
            },
        ] {
            refused_as(&status, Code::NotFound);
            assert!(status.message().contains(missing), "{status:?}");
        }
    }

    async fn wrong_fields_are_named(who) {
        let daemon = Daemon::start(who).await;
        daemon.put_text("f", "text\n");
        let mut files = daemon.files();
        let long = format!("/{}", "p".repeat(4096));
        let f = "/workspace/f";
        let mut wrong = Vec::new();
        for path in ["", "/a\0b", long.as_str()] {
            wrong.push(("path", files.stat(stat(path)).await.expect_err("no path")));
            wrong.push(("path", files.read_text(lines(path, 0, 0)).await.expect_err("no path")));
            wrong.push(("path", read_refused(&daemon, bytes(path, 0, 0)).await));
        }
        let list = v1::ListDirRequest { path: "/".into(), page_size: 1001, ..Default::default() };
        wrong.push(("page_size", files.list_dir(list).await.expect_err("large")));
        let list =
            v1::ListDirRequest { path: "/".into(), page_token: "odd".into(), ..Default::default() };
        wrong.push(("page_token", files.list_dir(list).await.expect_err("odd")));
        let glob = v1::GlobRequest { limit: 1001, pattern: "*".into(), ..Default::default() };
        wrong.push(("limit", files.glob(glob).await.expect_err("large")));
        wrong.push(("old_text", files.edit(edit(f, "", "x")).await.expect_err("empty")));
        wrong.push(("new_text", files.edit(edit(f, "x", "x")).await.expect_err("the same")));
        let unnamed = v1::EditRequest { request_id: String::new(), ..edit(f, "a", "b") };
        wrong.push(("request_id", files.edit(unnamed).await.expect_err("unnamed")));
        let unnamed = v1::RemoveRequest { request_id: String::new(), ..remove(f, any(), false) };
        wrong.push(("request_id", files.remove(unnamed).await.expect_err("unnamed")));
        let make = v1::MakeDirRequest { path: "/workspace/d".into(), ..Default::default() };
        wrong.push(("request_id", files.make_dir(make).await.expect_err("unnamed")));
        let none = v1::WriteTextRequest::default();
        wrong.push(("target", files.write_text(none).await.expect_err("no target")));
        let odd = v1::Stamp { digest: vec![1, 2, 3].into(), ..stamp("x") };
        let odd = write_text(f, "x", expected(State::Stamp(odd)));
        wrong.push(("target.expected.stamp", files.write_text(odd).await.expect_err("short")));
        let none = write_text("", "x", any());
        wrong.push(("target.path", files.write_text(none).await.expect_err("no path")));
        let mut unnamed = write_text(f, "x", any());
        unnamed.target.as_mut().expect("it has one").request_id.clear();
        wrong.push(("target.request_id", files.write_text(unnamed).await.expect_err("unnamed")));
        for (field, status) in wrong {
            assert_eq!(status.code(), Code::InvalidArgument, "{field}: {status:?}");
            refused_as(&status, Code::InvalidArgument);
            let named = field_violations(&status);
            assert_eq!(named[0].0, field, "{named:?}");
            assert!(named[0].1.len() > 3, "{named:?}");
        }
        daemon.shell("ls; cat f").await.expect(0, "f\ntext\n");
    }

    async fn directories_are_made_listed_and_removed(who) {
        let daemon = Daemon::start(who).await;
        let mut files = daemon.files();
        let make = |path: &str, parents| v1::MakeDirRequest {
            path: path.to_owned(), session: SESSION.to_owned(), request_id: unique(), mode: 0, parents,
        };
        let status = files.make_dir(make("/workspace/a/b", false)).await.expect_err("no parent");
        refused_as(&status, Code::NotFound);
        let made = files.make_dir(make("/workspace/a/b", true)).await.expect("made").into_inner();
        assert_eq!((made.path.as_str(), made.created), ("/workspace/a/b", true));
        let again = files.make_dir(make("/workspace/a/b", true)).await.expect("there").into_inner();
        assert!(!again.created);
        let status = files.make_dir(make("/workspace/a/b", false)).await.expect_err("it is there");
        refused_as(&status, Code::AlreadyExists);
        daemon.shell("stat -c %a a a/b; echo x > a/f; ln -s f a/l").await.expect(0, "755\n755\n");
        let list = v1::ListDirRequest { path: "/workspace/a".into(), ..Default::default() };
        let listed = files.list_dir(list).await.expect("listed").into_inner();
        let entries: Vec<_> =
            listed.entries.iter().map(|one| (one.name.as_str(), one.r#type())).collect();
        let right =
            [("b", FileType::Directory), ("f", FileType::Regular), ("l", FileType::Symlink)];
        assert_eq!(entries, right);
        let status = files.remove(remove("/workspace/a", None, false)).await.expect_err("not empty");
        refused_as(&status, Code::FailedPrecondition);
        let removed = files.remove(remove("/workspace/a", None, true)).await.expect("removed");
        assert_eq!(removed.into_inner().removed, 4);
        daemon.shell("ls -A").await.expect(0, "");
    }

    async fn a_move_to_another_mount_is_refused(who) {
        let daemon = Daemon::start(who).await;
        daemon.put_text("f", "text");
        let mut files = daemon.files();
        let status = files.r#move(rename("/workspace/f", "/tmp/f", any())).await;
        refused_as(&status.expect_err("/tmp is another mount"), Code::FailedPrecondition);
        daemon.shell("cat f; ls -A /tmp").await.expect(0, "text");
    }

    async fn searches_find_what_is_there(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("mkdir d; printf 'one\\ntwo\\none\\n' > d/a.rs; echo one > b.txt; mkfifo p")
            .await.expect(0, "");
        let mut files = daemon.files();
        let glob = v1::GlobRequest { pattern: "**/*.rs".into(), ..Default::default() };
        let found = files.glob(glob).await.expect("found").into_inner();
        assert_eq!(found.paths, ["/workspace/d/a.rs"]);
        assert_eq!((found.path.as_str(), found.truncated), ("/workspace", false));
        assert!(found.account.expect("an account").complete);
        let grep = v1::GrepRequest { pattern: "^one$".into(), r#type: "rust".into(), ..Default::default() };
        let mut parts = files.grep(grep).await.expect("found").into_inner();
        let (mut matched, mut ended) = (Vec::new(), None);
        while let Some(part) = parts.message().await.expect("the stream goes on") {
            match part.part {
                Some(v1::grep_response::Part::File(file)) => {
                    assert_eq!(file.path, "/workspace/d/a.rs");
                    matched.extend(file.lines.iter().map(|line| (line.number, line.text.clone())));
                }
                Some(v1::grep_response::Part::Ended(end)) => ended = Some(end),
                None => panic!("an empty part"),
            }
        }
        assert_eq!(matched, [(1, "one".to_owned()), (3, "one".to_owned())]);
        let ended = ended.expect("it ends with a sum");
        assert_eq!((ended.matches, ended.files), (2, 1));
        assert!(ended.account.expect("an account").complete);
    }

    async fn sixty_four_mebibytes_are_read_with_their_digest(who) {
        const SIZE: usize = 64 << 20;
        let daemon = Daemon::start(who).await;
        let whole = Pattern::new(11).bytes(0, SIZE);
        daemon.put_text("big", &whole);
        let before = resident_bytes(daemon.pid);
        let (held, ended) = read(&daemon, bytes("/workspace/big", 0, 0)).await;
        assert!(held == whole && !ended.changed);
        let grown = resident_bytes(daemon.pid).saturating_sub(before);
        assert!(grown < 32 << 20, "{grown} bytes more");
        // A read of the whole is a read.
        let held = stamps(&daemon).await;
        assert_eq!((held.len(), held[0].complete), (1, true));
        for (offset, length) in [(0, 1), (1 << 20, 1 << 20), (12_345, 3_000_000), (SIZE as u64 - 5, 0)] {
            let (held, _) = read(&daemon, bytes("/workspace/big", offset, length)).await;
            let end = if length == 0 { SIZE } else { (offset + length) as usize };
            assert!(held == whole[offset as usize..end], "{offset} {length}");
        }
        let (held, _) = read(&daemon, bytes("/workspace/big", SIZE as u64 - 5, 100)).await;
        assert!(held == whole[SIZE - 5..]);
        let status = read_refused(&daemon, bytes("/workspace/big", SIZE as u64 + 1, 0)).await;
        refused_as(&status, Code::OutOfRange);
        let status = daemon.files().read_text(lines("/workspace/f", 9, 0)).await;
        refused_as(&status.expect_err("it is missing"), Code::NotFound);
        daemon.put_text("f", "one\n");
        let status = daemon.files().read_text(lines("/workspace/f", 9, 0)).await;
        refused_as(&status.expect_err("one line"), Code::OutOfRange);
    }

    async fn a_streamed_write_is_whole_or_nothing(who) {
        const SIZE: usize = 20 << 20;
        let daemon = Daemon::start(who).await;
        let whole = Pattern::new(12).bytes(0, SIZE);
        let chunks = || whole.chunks(1 << 20).map(<[u8]>::to_vec).collect::<Vec<_>>();
        let absent = || expected(State::Absent(v1::Absent {}));
        let path = "/workspace/deep/er/f";
        let written = write(&daemon, target(path, absent()), chunks()).await.expect("it is new");
        assert_eq!((written.existed, written.stamp), (false, Some(stamp(&whole))));
        let host = daemon.workspace.join("deep/er/f");
        assert!(fs::read(&host).expect("it is there") == whole);
        let status = write(&daemon, target(path, absent()), chunks()).await;
        refused_as(&status.expect_err("it is there"), Code::AlreadyExists);
        let none = v1::WriteTarget { no_parents: true, ..target("/workspace/no/f", absent()) };
        refused_as(&write(&daemon, none, chunks()).await.expect_err("no parent"), Code::NotFound);

        // A stream that breaks off: the client goes away in the middle.
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        let mut files = v1::filesystem_service_client::FilesystemServiceClient::new(daemon.new_channel());
        let broken = tokio::spawn(async move {
            files.write(tokio_stream::wrappers::ReceiverStream::new(receiver)).await
        });
        let first = v1::WriteRequest { part: Some(write_request::Part::Target(target(path, any()))) };
        sender.send(first).await.expect("it is taken");
        for _ in 0..5 {
            let part = Some(write_request::Part::Data(vec![b'x'; 1 << 20].into()));
            sender.send(v1::WriteRequest { part }).await.expect("it is taken");
        }
        broken.abort();
        assert!(broken.await.expect_err("it was given up").is_cancelled());
        drop(sender);
        // The daemon serves the next write of that file only after the broken one is over.
        let next = write(&daemon, target("/workspace/next", absent()), chunks()).await;
        next.expect("it is new");
        assert!(fs::read(&host).expect("it is there") == whole, "a broken write changed the file");
        daemon.shell("ls -A . deep/er").await.expect(0, ".:\ndeep\nnext\n\ndeep/er:\nf\n");
    }

    async fn large_directories_come_in_pages(who) {
        let entries: usize = if soak() { 1_000_000 } else { 100_000 };
        let daemon = Daemon::start(who).await;
        let directory = daemon.workspace.join("many");
        fs::create_dir(&directory).expect("a directory");
        for number in 0..entries {
            fs::File::create(directory.join(format!("{number:07}"))).expect("a file");
        }
        chown(&directory, Some(who.id()), Some(who.id())).expect("root can");
        let memory = || resident_bytes(daemon.pid) + resident_bytes(daemon.toolbox().pid);
        let before = memory();
        let (mut token, mut next, mut most) = (String::new(), 0, 0);
        let mut files = daemon.files();
        loop {
            let request = v1::ListDirRequest {
                path: "/workspace/many".to_owned(), page_size: 1000, page_token: token,
            };
            let page = files.list_dir(request).await.expect("a page").into_inner();
            assert!(page.entries.len() <= 1000, "{}", page.entries.len());
            for entry in &page.entries {
                assert_eq!(entry.name, format!("{next:07}"));
                next += 1;
            }
            most = most.max(memory());
            if page.next_page_token.is_empty() {
                break;
            }
            assert_eq!(page.entries.len(), 1000, "only the last page is short");
            token = page.next_page_token;
        }
        assert_eq!(next, entries);
        let grown = most.saturating_sub(before);
        assert!(grown < 64 << 20, "{grown} bytes more for {entries} entries");
    }

    async fn what_is_no_file_is_refused_at_once(who) {
        let daemon = Daemon::start(who).await;
        let make = "mkfifo p; python3 -c 'import socket; \
                    s=socket.socket(socket.AF_UNIX); s.bind(\"s\")'; mkdir d";
        daemon.shell(make).await.expect(0, "");
        let mut files = daemon.files();
        for path in ["/workspace/p", "/workspace/s", "/dev/zero", "/dev/full", "/dev/tty", "/workspace/d"] {
            let start = Instant::now();
            let change = v1::EditRequest { expected: any(), ..edit(path, "a", "b") };
            for status in [
                read_refused(&daemon, bytes(path, 0, 0)).await,
                files.read_text(lines(path, 0, 0)).await.expect_err(path),
                files.write_text(write_text(path, "x", any())).await.expect_err(path),
                files.edit(change).await.expect_err(path),
            ] {
                refused_as(&status, Code::FailedPrecondition);
                assert!(status.message().contains(path), "{status:?}");
            }
            assert!(start.elapsed() < within(2.0), "{path}: {:?}", start.elapsed());
        }
        daemon.shell("stat -c %F p s d").await.expect(0, "fifo\nsocket\ndirectory\n");
    }

    async fn growing_and_sparse_files_have_an_end(who) {
        let daemon = Daemon::start(who).await;
        daemon.put_text("log", "0123456789abcdef".repeat(1 << 20));
        daemon.shell("while [ ! -e end ]; do echo more >> log; done >/dev/null 2>&1 &")
            .await.expect(0, "");
        for _ in 0..5 {
            let start = Instant::now();
            let (held, _) = read(&daemon, bytes("/workspace/log", 0, 0)).await;
            assert!(start.elapsed() < within(10.0), "{:?}", start.elapsed());
            assert!(held.len() >= 16 << 20, "{}", held.len());
        }
        daemon.put_text("end", "");
        let size = 2u64 << 30;
        let sparse = fs::File::create(daemon.workspace.join("sparse")).expect("a file");
        sparse.set_len(size).expect("it is sparse");
        sparse.write_all_at(b"end", size - 3).expect("it is written");
        let (held, _) = read(&daemon, bytes("/workspace/sparse", size - 6, 0)).await;
        assert_eq!(held, b"\0\0\0end");
        let (held, _) = read(&daemon, bytes("/workspace/sparse", 1 << 30, 1 << 20)).await;
        assert!(held.len() == 1 << 20 && held.iter().all(|byte| *byte == 0));
        // Above 256 MiB there is no stamp, also when it is asked for.
        let asked = v1::StatRequest { with_stamp: true, ..stat("/workspace/sparse") };
        let about = daemon.files().stat(asked).await.expect("it is there").into_inner();
        assert_eq!((about.stamp, about.info.expect("described").size), (None, size));
    }

    async fn a_search_ends_when_nobody_waits_for_it(who) {
        let daemon = Daemon::start(who).await;
        let make = "mkdir t; yes 'some words here, and 12345 numbers' | head -c 8000000 > t/0; \
                    for i in $(seq 1 2000); do ln t/0 t/$i; done";
        daemon.shell(make).await.expect(0, "");
        let toolbox = daemon.toolbox().pid;
        let grep = v1::GrepRequest {
            pattern: "(some|any)[a-z ,]+and [0-9]+ letters".to_owned(), ..Default::default()
        };
        let before = ticks(toolbox);
        let mut files = v1::filesystem_service_client::FilesystemServiceClient::new(daemon.new_channel());
        let search = tokio::spawn(async move {
            files.grep(grep).await.expect("it begins").into_inner().message().await
        });
        wait_for("it searches", Duration::from_secs(10), || {
            (ticks(toolbox) >= before + 20).then_some(())
        })
        .await;
        assert!(!search.is_finished(), "it takes longer than this");
        search.abort();
        assert!(search.await.expect_err("it was given up").is_cancelled());
        let mut last = (ticks(toolbox), Instant::now());
        wait_for("the toolbox rests", within(2.0), || {
            let now = ticks(toolbox);
            if now != last.0 {
                last = (now, Instant::now());
            }
            (last.1.elapsed() > Duration::from_millis(300)).then_some(())
        })
        .await;
        daemon.read("/workspace/t/1").await.ok();
    }

    async fn a_watch_tells_every_change_or_that_it_lost_some(who) {
        let daemon = Daemon::start(who).await;
        let probe = daemon.put_probe();
        daemon.shell("mkdir few many").await.expect(0, "");
        for (name, files, may_lose) in [("few", 1_000u64, false), ("many", 50_000, true)] {
            let path = format!("/workspace/{name}");
            let request = v1::WatchDirRequest { path: path.clone(), ..Default::default() };
            let mut events = daemon.files().watch_dir(request).await.expect("it begins").into_inner();
            let first = events.message().await.expect("a stream").expect("a first event").event;
            let Some(watch_dir_response::Event::Started(started)) = first else {
                panic!("starts with {first:?}")
            };
            assert_eq!((started.path.as_str(), started.directories), (path.as_str(), 1));
            let churn = program([probe.clone(), "churn".into(), path.clone(), files.to_string()]);
            let channel = daemon.new_channel();
            let last = daemon.workspace.join(name).join("last");
            let churned = tokio::spawn(async move {
                let mut client = v1::process_service_client::ProcessServiceClient::new(channel);
                let answer = client.execute(churn).await.expect("it answers").into_inner();
                assert_eq!(answer.stdout, "ok\n");
                fs::write(last, "").expect("a file");
            });
            let (mut made, mut gone, mut lost) = (HashSet::new(), HashSet::new(), false);
            let end = format!("{path}/last");
            loop {
                let event = tokio::time::timeout(Duration::from_secs(60), events.message()).await;
                let event = event.expect("the last change is told").expect("a stream");
                match event.expect("it does not end").event {
                    Some(watch_dir_response::Event::Change(change)) if change.path == end => break,
                    Some(watch_dir_response::Event::Change(change)) => match change.kind() {
                        ChangeKind::Create => assert!(made.insert(change.path)),
                        ChangeKind::Remove => assert!(gone.insert(change.path)),
                        ChangeKind::Write | ChangeKind::Chmod => {}
                        other => panic!("{other:?}: {change:?}"),
                    },
                    Some(watch_dir_response::Event::Overflow(_)) => {
                        lost = true;
                        // The last change may be among the lost ones: there is another.
                        daemon.put_text(&format!("{name}/last"), "again");
                    }
                    Some(watch_dir_response::Event::Keepalive(_)) => {}
                    other => panic!("{other:?}"),
                }
            }
            if !churned.is_finished() {
                // The test's own sign of an overflow came before the end of the changes.
                assert!(lost);
            }
            churned.await.expect("it churned");
            let all = (made.len() as u64, gone.len() as u64);
            assert!(lost || all == (files, files), "{name}: {all:?} told, and no word of a loss");
            assert!(may_lose || !lost, "{name}: {files} files are no reason to lose any");
        }
    }
}
