//! Requests that are wrong: each gets a typed error that names field and reason, nothing runs, and
//! the daemon goes on.
#![forbid(unsafe_code)]

use std::time::Duration;

use bytes::Bytes;
use cofferdam_e2e::{
    Daemon, bash, both, duration, error_info, field_violations, program, raw_call, unique,
};
use cofferdam_proto::v1;
use tonic::{Code, Status};

const EXECUTE: &str = "/cofferdam.v1.ProcessService/Execute";
const LIST: &str = "/cofferdam.v1.ProcessService/List";

/// Asserts the form of a refusal and gives the first field with its reason.
#[track_caller]
fn refused<T: std::fmt::Debug>(what: &str, answer: Result<T, Status>) -> (String, String) {
    let status = answer.expect_err(what);
    assert_eq!(status.code(), Code::InvalidArgument, "{what}: {status:?}");
    let (reason, domain) = error_info(&status);
    assert_eq!(domain, "cofferdam", "{what}");
    assert!(!reason.is_empty(), "{what}");
    field_violations(&status).into_iter().next().unwrap_or_else(|| panic!("{what}: no field"))
}

fn with(change: impl FnOnce(&mut v1::ExecuteRequest)) -> v1::ExecuteRequest {
    let mut request = bash("touch ran");
    change(&mut request);
    request
}

fn process(change: impl FnOnce(&mut v1::ProcessConfig)) -> v1::ExecuteRequest {
    with(|request| change(request.process.as_mut().expect("it has one")))
}

fn limit(limits: v1::Limits) -> v1::ExecuteRequest {
    with(|request| request.limits = Some(limits))
}

both! {
    async fn every_wrong_field_is_named(who) {
        let daemon = Daemon::start(who).await;
        let long = "p".repeat(5000);
        let max = Duration::from_secs(400 * 24 * 3600);
        let table: Vec<(&str, v1::ExecuteRequest, &str)> = vec![
            ("no process", with(|r| r.process = None), "process"),
            ("no command", process(|p| p.command.clear()), "process.command"),
            ("empty program", process(|p| p.command = vec![String::new()]), "process.command[0]"),
            ("NUL in an argument", process(|p| p.command[4] = "a\0b".into()), "process.command[4]"),
            ("NUL in the directory", process(|p| p.cwd = "/a\0b".into()), "process.cwd"),
            ("relative directory", process(|p| p.cwd = "a".into()), "process.cwd"),
            ("5,000-byte directory", process(|p| p.cwd = format!("/{long}")), "process.cwd"),
            ("5,000-byte program", process(|p| p.command = vec![format!("/{long}")]), "process.command[0]"),
            ("'=' in a name", process(|p| { p.env.insert("A=B".into(), "x".into()); }), "process.env"),
            ("empty name", process(|p| { p.env.insert(String::new(), "x".into()); }), "process.env"),
            ("NUL in a value", process(|p| { p.env.insert("A".into(), "x\0".into()); }), "process.env[A]"),
            ("long argument", process(|p| p.command[4] = "x".repeat(131_072)), "process.command[4]"),
            ("long arguments", process(|p| p.command = [vec!["x".into()], vec!["x".repeat(131_000); 17]].concat()), "process.command"),
            ("no request id", with(|r| r.request_id.clear()), "request_id"),
            ("long request id", with(|r| r.request_id = "x".repeat(129)), "request_id"),
            ("odd request id", with(|r| r.request_id = "a\nb".into()), "request_id"),
            ("long session", with(|r| r.session = "x".repeat(129)), "session"),
            ("odd session", with(|r| r.session = "é".into()), "session"),
            ("zero wall", limit(v1::Limits { wall: Some(duration(Duration::ZERO)), ..Default::default() }), "limits.wall"),
            ("negative wall", limit(v1::Limits { wall: Some(prost_types::Duration { seconds: -1, nanos: 0 }), ..Default::default() }), "limits.wall"),
            ("odd wall", limit(v1::Limits { wall: Some(prost_types::Duration { seconds: 1, nanos: -5 }), ..Default::default() }), "limits.wall"),
            ("long wall", limit(v1::Limits { wall: Some(duration(max)), ..Default::default() }), "limits.wall"),
            ("long idle", limit(v1::Limits { idle: Some(duration(max)), ..Default::default() }), "limits.idle"),
            ("many processes", limit(v1::Limits { processes: 5000, ..Default::default() }), "limits.processes"),
            ("many files", limit(v1::Limits { open_files: 1_000_000, ..Default::default() }), "limits.open_files"),
            ("few files", limit(v1::Limits { open_files: 3, ..Default::default() }), "limits.open_files"),
            ("little memory", limit(v1::Limits { memory_bytes: 5, ..Default::default() }), "limits.memory_bytes"),
        ];
        for (what, request, field) in table {
            let (named, reason) = refused(what, daemon.try_run(request).await);
            assert_eq!(named, field, "{what}: {reason}");
            assert!(reason.len() > 3, "{what}: {reason}");
        }
        daemon.bash("ls ran 2>/dev/null; echo ok").await.expect(0, "ok\n");
    }

    async fn other_methods_name_their_fields_too(who) {
        let daemon = Daemon::start(who).await;
        let start = |change: &dyn Fn(&mut v1::StartRequest)| {
            let mut request = v1::StartRequest {
                process: bash("touch ran").process,
                request_id: unique(),
                ..Default::default()
            };
            change(&mut request);
            request
        };
        let day = duration(Duration::from_secs(24 * 3600 + 1));
        let pty = |rows, cols, term: &str| Some(v1::Pty { rows, cols, term: term.to_owned() });
        let table = [
            ("no rows", start(&|r| r.pty = pty(0, 80, "")), "pty.rows"),
            ("many columns", start(&|r| r.pty = pty(24, 70_000, "")), "pty.cols"),
            ("NUL in TERM", start(&|r| r.pty = pty(24, 80, "a\0")), "pty.term"),
            ("long tag", start(&|r| r.tag = "x".repeat(129)), "tag"),
            ("long retention", start(&|r| r.retention = Some(day)), "retention"),
            ("unknown stdin mode", start(&|r| r.stdin_mode = 77), "stdin_mode"),
            ("no request id", start(&|r| r.request_id.clear()), "request_id"),
        ];
        for (what, request, field) in table {
            let (named, reason) = refused(what, daemon.processes().start(request).await);
            assert_eq!(named, field, "{what}: {reason}");
        }
        let running = v1::StartRequest {
            process: program(["sleep", "300"]).process,
            request_id: unique(),
            ..Default::default()
        };
        let process_id = daemon.start_detached(running).await;
        let signal = |signal, target, request_id: String| v1::SendSignalRequest {
            process_id: process_id.clone(), signal, target, request_id,
        };
        for (what, request, field) in [
            ("signal 0", signal(0, 1, unique()), "signal"),
            ("signal 65", signal(65, 1, unique()), "signal"),
            ("unknown target", signal(15, 9, unique()), "target"),
            ("no request id", signal(15, 1, String::new()), "request_id"),
        ] {
            assert_eq!(refused(what, daemon.processes().send_signal(request).await).0, field, "{what}");
        }
        let list = v1::ListRequest { page_size: 1001, ..Default::default() };
        assert_eq!(refused("large page", daemon.processes().list(list).await).0, "page_size");
        let list = v1::ListRequest { page_token: "nonsense".into(), ..Default::default() };
        assert_eq!(refused("odd token", daemon.processes().list(list).await).0, "page_token");
        for unknown in ["", "p-no-such", "\0"] {
            let get = v1::GetRequest { process_id: unknown.into() };
            let missing = daemon.processes().get(get).await.expect_err("it is unknown");
            assert_eq!(missing.code(), Code::NotFound, "{missing:?}");
            let named = ("PROCESS_NOT_FOUND".to_owned(), "cofferdam".to_owned());
            assert_eq!(error_info(&missing), named);
        }
        let wait = v1::WaitRequest {
            process_id: process_id.clone(),
            timeout: Some(prost_types::Duration { seconds: -1, nanos: 0 }),
        };
        assert_eq!(refused("negative wait", daemon.processes().wait(wait).await).0, "timeout");
        let resize = v1::ResizePtyRequest { process_id, rows: 24, cols: 80, request_id: unique() };
        let none = daemon.processes().resize_pty(resize).await.expect_err("it has no terminal");
        assert_eq!(none.code(), Code::FailedPrecondition, "{none:?}");
        assert_eq!(error_info(&none).1, "cofferdam");
        daemon.bash("ls ran 2>/dev/null; echo ok").await.expect(0, "ok\n");
    }

    async fn bytes_that_are_no_message_are_refused(who) {
        let daemon = Daemon::start(who).await;
        // Field 6 (request_id) and 5 (session) as numbers; a length beyond the end; a group that
        // never ends; bytes that are not UTF-8 in a string; noise.
        let table: [(&str, &'static str, &[u8]); 7] = [
            ("a number for request_id", EXECUTE, &[0x30, 0x01]),
            ("a number for session", EXECUTE, &[0x28, 0x01]),
            ("a number for process", EXECUTE, &[0x08, 0x01]),
            ("a length beyond the end", EXECUTE, &[0x32, 0x7f, b'x']),
            ("not UTF-8", EXECUTE, &[0x32, 0x02, 0xff, 0xfe]),
            ("noise", EXECUTE, &[0xff; 64]),
            ("a string for page_size", LIST, &[0x12, 0x01, b'x']),
        ];
        for (what, method, body) in table {
            let answer = raw_call(daemon.channel(), method, Bytes::from_static(body)).await;
            let (field, reason) = refused(what, answer);
            assert!(!field.is_empty() || !reason.is_empty(), "{what}");
            if what.starts_with("a number for request_id") || what == "not UTF-8" {
                assert_eq!(field, "request_id", "{what}: {reason}");
            }
        }
        // Positive control: the same path takes a right message.
        let body = prost::Message::encode_to_vec(&bash("echo ok"));
        let answer = raw_call(daemon.channel(), EXECUTE, body.into()).await.expect("it is right");
        let answer: v1::ExecuteResponse = prost::Message::decode(answer).expect("a response");
        assert_eq!(answer.stdout, "ok\n");
    }

    async fn messages_above_their_limit_are_refused(who) {
        let daemon = Daemon::start(who).await;
        for size in [(16 << 20) + 1, 20 << 20] {
            let request = v1::ExecuteRequest { stdin: vec![b'x'; size].into(), ..bash("touch ran") };
            let status = daemon.try_run(request).await.expect_err("above 16 MiB");
            assert_eq!(status.code(), Code::ResourceExhausted, "{size}: {status:?}");
            assert_eq!(error_info(&status).1, "cofferdam", "{size}");
            assert!(status.message().contains("16777216"), "{size}: {status:?}");
        }
        for size in [(1 << 20) + 1, 20 << 20] {
            let request = v1::StartRequest {
                process: bash("touch ran").process,
                stdin: vec![b'x'; size].into(),
                request_id: unique(),
                ..Default::default()
            };
            let status = daemon.processes().start(request).await.expect_err("above 1 MiB");
            assert_eq!(status.code(), Code::ResourceExhausted, "{size}: {status:?}");
            assert_eq!(error_info(&status).1, "cofferdam", "{size}");
            assert!(status.message().contains("1048576"), "{size}: {status:?}");
        }
        let request = v1::ExecuteRequest { stdin: vec![b'x'; 15 << 20].into(), ..bash("wc -c") };
        daemon.run(request).await.expect(0, "15728640\n");
        daemon.bash("ls ran 2>/dev/null; echo ok").await.expect(0, "ok\n");
    }
}
