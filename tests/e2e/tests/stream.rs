//! Events, offsets, limits and ends: every byte of output is accounted for, whoever reads it.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cofferdam_e2e::{
    Daemon, Options, bash, both, duration, error_info, limits, program, resident_bytes, soak,
    unique, wait_for, within,
};
use cofferdam_probes::Pattern;
use cofferdam_proto::v1;
use cofferdam_proto::v1::exit::Reason;
use cofferdam_proto::v1::process_event::Event;
use cofferdam_proto::v1::process_service_client::ProcessServiceClient;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sha2::{Digest, Sha256};
use tonic::Code;
use tonic_types::StatusExt;

fn start(request: v1::ExecuteRequest) -> v1::StartRequest {
    v1::StartRequest {
        process: request.process,
        limits: request.limits,
        session: request.session,
        request_id: request.request_id,
        ..Default::default()
    }
}

fn connect(process_id: &str, stdout_offset: u64) -> v1::ConnectRequest {
    v1::ConnectRequest { process_id: process_id.to_owned(), stdout_offset, stderr_offset: 0 }
}

/// What one stream of events brought.
#[derive(Debug, Default)]
struct Seen {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    lags: Vec<v1::Lag>,
    started: Option<v1::Started>,
    last: Option<v1::ProcessEvent>,
}

impl Seen {
    async fn all(mut events: tonic::Streaming<v1::ProcessEvent>) -> Seen {
        let mut seen = Seen::default();
        while let Some(event) = events.message().await.expect("the stream goes on") {
            assert!(seen.last.is_none(), "nothing comes after the exit: {event:?}");
            match &event.event {
                Some(Event::Started(started)) => seen.started = Some(started.clone()),
                Some(Event::Stdout(bytes)) => {
                    assert_eq!(event.offset, seen.stdout.len() as u64);
                    seen.stdout.extend_from_slice(bytes);
                }
                Some(Event::Stderr(bytes)) => {
                    assert_eq!(event.offset, seen.stderr.len() as u64);
                    seen.stderr.extend_from_slice(bytes);
                }
                Some(Event::Lag(lag)) => seen.lags.push(*lag),
                Some(Event::Exit(_)) => seen.last = Some(event),
                Some(Event::Keepalive(_)) => {}
                other => panic!("not an event of a process without a terminal: {other:?}"),
            }
        }
        seen
    }

    fn reason(&self) -> Reason {
        match self.last.as_ref().and_then(|event| event.event.clone()) {
            Some(Event::Exit(exit)) => exit.reason.expect("an exit has a reason"),
            other => panic!("the last event is the exit: {other:?}"),
        }
    }
}

async fn ended(daemon: &Daemon, process_id: &str) -> v1::ProcessInfo {
    let wait = v1::WaitRequest {
        process_id: process_id.to_owned(),
        timeout: Some(duration(Duration::from_secs(60))),
    };
    let answer = daemon.processes().wait(wait).await.expect("Wait answers").into_inner();
    let info = answer.process.expect("a process");
    assert!(info.exit.is_some(), "it ended in time: {info:?}");
    info
}

fn exit_reason(info: &v1::ProcessInfo) -> Reason {
    info.exit.clone().and_then(|exit| exit.reason).expect("a reason")
}

/// A small generator of the test's choices; its seed is printed.
struct Choices(u64);

impl Choices {
    fn new() -> Choices {
        let seed = std::time::UNIX_EPOCH.elapsed().expect("a clock").as_nanos() as u64;
        eprintln!("seed {seed}");
        Choices(seed)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(1);
        let bytes = Pattern::new(self.0).bytes(0, 8);
        u64::from_le_bytes(bytes.try_into().expect("8 bytes")) % limit
    }
}

both! {
    async fn start_streams_events_in_order(who) {
        let daemon = Daemon::start(who).await;
        let request = start(bash("echo out; echo err >&2; sleep 0.1; echo more; exit 3"));
        let seen = Seen::all(daemon.start_stream(request).await).await;
        let started = seen.started.as_ref().expect("`started` came");
        assert!(!started.process_id.is_empty() && started.pid > 1 && !started.replayed);
        assert_eq!((seen.stdout.as_slice(), seen.stderr.as_slice()), (&b"out\nmore\n"[..], &b"err\n"[..]));
        assert_eq!(seen.reason(), Reason::Exited(v1::Exited { code: 3 }));
        let last = seen.last.expect("the exit");
        assert!(last.enforcement.is_some() && last.duration.is_some());
        let account = last.output.and_then(|output| output.stdout).expect("an account");
        assert_eq!((account.total_bytes, account.dropped_bytes), (9, 0));
    }

    async fn a_thousand_killed_clients_lose_nothing(who) {
        let daemon = Daemon::start(who).await;
        let probe = daemon.put_probe();
        let kills = if soak() { 10_000 } else { 1_000 };
        let total: u64 = kills * 8 * 1024;
        let total = total.min(15 << 20);
        let command = format!("{probe} bytes {total} 42");
        let process_id = daemon.start_detached(start(bash(&command))).await;
        let mut choices = Choices::new();
        let mut joined = Vec::new();
        for number in 0..kills {
            // The last one reads to the end.
            let wanted = match kills - 1 - number {
                0 => u64::MAX,
                left => choices.below(2 * (total - joined.len() as u64) / (left + 1) + 1),
            };
            let channel = daemon.new_channel();
            let mut client = ProcessServiceClient::new(channel);
            let request = connect(&process_id, joined.len() as u64);
            let mut events = client.connect(request).await.expect("Connect answers").into_inner();
            let mut got = 0;
            let mut exited = false;
            while got < wanted && !exited {
                let Some(event) = events.message().await.expect("the stream goes on") else { break };
                match event.event {
                    Some(Event::Stdout(bytes)) => {
                        assert_eq!(event.offset, joined.len() as u64 , "client {number}");
                        // A client that dies in the middle of a chunk has only a part of it.
                        let part = bytes.len().min((wanted - got) as usize);
                        joined.extend_from_slice(&bytes[..part]);
                        got += part as u64;
                        if part < bytes.len() {
                            break;
                        }
                    }
                    Some(Event::Exit(exit)) => {
                        assert_eq!(exit.reason, Some(Reason::Exited(v1::Exited { code: 0 })));
                        exited = true;
                    }
                    Some(Event::Lag(lag)) => panic!("client {number}: {lag:?}"),
                    _ => {}
                }
            }
            assert!(number + 1 < kills || exited, "the last client sees the exit");
        }
        assert_eq!(joined.len() as u64, total);
        let right = Sha256::digest(Pattern::new(42).bytes(0, total as usize));
        assert_eq!(Sha256::digest(&joined), right);
        // Any offset, in any order.
        for _ in 0..100 {
            let offset = choices.below(total);
            let request = connect(&process_id, offset);
            // Each on a connection of its own: HTTP/2 ends one on which many streams are given up.
            let mut client = ProcessServiceClient::new(daemon.new_channel());
            let mut events = client.connect(request).await.expect("Connect answers").into_inner();
            loop {
                let event = events.message().await.expect("the stream").expect("an event");
                if let Some(Event::Stdout(bytes)) = event.event {
                    assert_eq!(event.offset, offset);
                    assert_eq!(bytes, Pattern::new(42).bytes(offset, bytes.len()));
                    break;
                }
            }
        }
        let beyond = connect(&process_id, total + 1);
        let beyond = match daemon.processes().connect(beyond).await {
            Err(status) => status,
            Ok(answer) => answer.into_inner().message().await.expect_err("beyond the end"),
        };
        assert_eq!(beyond.code(), Code::OutOfRange, "{beyond:?}");
        assert_eq!(error_info(&beyond).1, "cofferdam");
    }

    async fn a_reader_that_stops_holds_nothing_up(who) {
        let daemon = Daemon::start(who).await;
        let probe = daemon.put_probe();
        daemon.bash(&format!("{probe} bytes 30000000 1 | wc -c")).await.expect(0, "30000000\n");
        let total: u64 = 1 << 30;
        let command = format!("{probe} bytes {total} 7");
        let channel = daemon.new_channel();
        let mut client = ProcessServiceClient::new(channel);
        // The warm-up shows what an Execute of much output costs; the rest is the reader's.
        let warm = format!("{probe} bytes 40000000 7");
        daemon.bash(&warm).await.expect_code(0);
        let before = resident_bytes(daemon.pid);
        let most = Arc::new(AtomicU64::new(0));
        let watching = Arc::new(AtomicBool::new(true));
        let watcher = std::thread::spawn({
            let (most, watching, pid) = (Arc::clone(&most), Arc::clone(&watching), daemon.pid);
            move || {
                while watching.load(Ordering::Relaxed) {
                    most.fetch_max(resident_bytes(pid), Ordering::Relaxed);
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        });
        let mut events = client.start(start(bash(&command))).await.expect("Start answers").into_inner();
        let first = events.message().await.expect("the stream").expect("an event");
        let Some(Event::Started(started)) = first.event else { panic!("`started` first: {first:?}") };
        // From here the reader reads nothing until the command has ended.
        let info = ended(&daemon, &started.process_id).await;
        assert_eq!(exit_reason(&info), Reason::Exited(v1::Exited { code: 0 }));
        watching.store(false, Ordering::Relaxed);
        watcher.join().expect("the watcher did not panic");
        let grown = most.load(Ordering::Relaxed).saturating_sub(before);
        assert!(grown <= 8 << 20, "the daemon grew by {grown} bytes");

        let (mut position, mut received, mut skipped) = (0, 0, 0);
        let mut lags = Vec::new();
        let mut exit = None;
        while let Some(event) = events.message().await.expect("the stream goes on") {
            match event.event {
                Some(Event::Stdout(bytes)) => {
                    assert_eq!(event.offset, position);
                    assert_eq!(bytes, Pattern::new(7).bytes(position, bytes.len()));
                    position += bytes.len() as u64;
                    received += bytes.len() as u64;
                }
                Some(Event::Lag(lag)) => {
                    assert_eq!(lag.stream, i32::from(v1::OutputStream::Stdout));
                    assert_eq!(lag.skipped_from, position);
                    assert!(lag.skipped_to > lag.skipped_from);
                    skipped += lag.skipped_to - lag.skipped_from;
                    position = lag.skipped_to;
                    lags.push(lag);
                }
                Some(Event::Exit(_)) => exit = Some(event),
                _ => {}
            }
        }
        assert_eq!((received + skipped, position), (total, total), "{lags:?}");
        assert!(!lags.is_empty() && skipped > total / 2, "{lags:?}");
        let account = exit.and_then(|event| event.output).and_then(|output| output.stdout);
        let account = account.expect("the exit accounts");
        assert_eq!(account.total_bytes, total);
        assert!(account.readable_bytes >= 1 << 20, "{account:?}");
    }

    async fn one_fixture_per_exit_reason(who) {
        let daemon = Daemon::start(who).await;
        let second = Some(duration(Duration::from_secs(1)));
        let exited = daemon.bash("exit 42").await;
        assert_eq!(exited.reason(), &Reason::Exited(v1::Exited { code: 42 }));

        let signaled = daemon.bash("kill -TERM $$").await;
        let plain = v1::Signaled { number: nix::libc::SIGTERM, core: false, maybe_oom: false };
        assert_eq!(signaled.reason(), &Reason::Signaled(plain));

        // A host without memory events cannot tell who sent SIGKILL.
        let killed = daemon.bash("kill -KILL $$").await;
        match killed.reason() {
            Reason::Signaled(end) => {
                let right = v1::Signaled { number: nix::libc::SIGKILL, core: false, maybe_oom: true };
                assert_eq!(end, &right);
            }
            other => panic!("{other:?}"),
        }

        let wall = daemon.bash_timeout("sleep 300", 1.0).await;
        let right = v1::TimedOut { limit: v1::TimeLimit::Wall.into(), after: second };
        assert_eq!(wall.reason(), &Reason::TimedOut(right));

        let idle = v1::Limits { idle: second, ..Default::default() };
        let request = v1::ExecuteRequest {
            limits: Some(idle),
            ..bash("for i in 1 2 3 4; do echo $i; sleep 0.4; done; sleep 300")
        };
        let idle = daemon.run(request).await;
        let right = v1::TimedOut { limit: v1::TimeLimit::Idle.into(), after: second };
        assert_eq!(idle.reason(), &Reason::TimedOut(right));
        assert_eq!(idle.stdout(), "1\n2\n3\n4\n");
        assert!(idle.took > Duration::from_millis(2100), "output puts the limit off: {:?}", idle.took);

        let output = v1::Limits { output_bytes: 100_000, ..Default::default() };
        let request = v1::ExecuteRequest { limits: Some(output), ..bash("yes; echo never") };
        let output = daemon.run(request).await;
        let right = v1::OutputLimit { limit_bytes: 100_000 };
        assert_eq!(output.reason(), &Reason::OutputLimit(right));
        assert!(output.response.stdout.len() >= 100_000, "{}", output.response.stdout.len());

        for (argv, errno) in [
            (vec!["no-such-program"], nix::libc::ENOENT),
            (vec!["/workspace"], nix::libc::EACCES),
            (vec!["/etc/passwd"], nix::libc::EACCES),
        ] {
            let failed = daemon.run(program(argv.clone())).await;
            match failed.reason() {
                Reason::SandboxFailed(failed) => {
                    assert_eq!((failed.step.as_str(), failed.errno), ("exec", errno), "{argv:?}");
                    assert!(!failed.message.is_empty());
                }
                other => panic!("{argv:?}: {other:?}"),
            }
        }

        let process_id = daemon
            .start_detached(v1::StartRequest { session: "ending".into(), ..start(bash("sleep 300")) })
            .await;
        let request = v1::EndSessionRequest { session: "ending".into(), request_id: unique() };
        let answer = daemon.workspaces().end_session(request).await.expect("it answers").into_inner();
        assert_eq!(answer.ended_processes, 1);
        let info = ended(&daemon, &process_id).await;
        assert_eq!(exit_reason(&info), Reason::Cancelled(v1::Cancelled { by: "session".into() }));

        let request = v1::StartRequest { kill_on_disconnect: true, ..start(bash("sleep 300")) };
        let process_id = daemon.start_detached(request).await;
        let info = ended(&daemon, &process_id).await;
        assert_eq!(exit_reason(&info), Reason::Cancelled(v1::Cancelled { by: "client".into() }));

        // Last, since it costs the cell.
        let process_id = daemon.start_detached(start(bash("echo before; sleep 300"))).await;
        wait_for("it runs", Duration::from_secs(5), || daemon.marked("sleep 300").first().map(|_| ())).await;
        kill(Pid::from_raw(daemon.init().pid), Signal::SIGKILL).expect("root can kill it");
        let info = ended(&daemon, &process_id).await;
        assert_eq!(exit_reason(&info), Reason::Lost(v1::Lost {}));
        daemon.bash("echo next").await.expect(0, "next\n");
        // oom_killed comes from a cgroup's event and denied from a rule on programs; this host and
        // this policy have neither.
    }

    async fn a_disconnect_keeps_a_started_process(who) {
        let daemon = Daemon::start(who).await;
        let request = start(bash("until [ -e go ]; do sleep 0.02; done; echo went"));
        let process_id = daemon.start_detached(request).await;
        daemon.bash("touch go").await.expect(0, "");
        let info = ended(&daemon, &process_id).await;
        assert_eq!(exit_reason(&info), Reason::Exited(v1::Exited { code: 0 }));
        let answer = daemon.processes().connect(connect(&process_id, 0)).await.expect("it answers");
        assert_eq!(Seen::all(answer.into_inner()).await.stdout, b"went\n");
    }

    async fn a_drain_ends_what_runs_and_refuses_what_comes(who) {
        let mut daemon = Daemon::start(who).await;
        let mut client = ProcessServiceClient::new(daemon.new_channel());
        let running = bash("echo started; until [ -e go ]; do sleep 0.02; done; echo ended; exit 6");
        let running = tokio::spawn(async move { client.execute(running).await });
        wait_for("it runs", Duration::from_secs(5), || daemon.marked("until").first().map(|_| ())).await;
        let mut other = ProcessServiceClient::new(daemon.new_channel());
        other.execute(program(["/bin/true"])).await.expect("before the drain calls are taken");
        daemon.signal(Signal::SIGTERM);
        let start = Instant::now();
        let refused = loop {
            match other.execute(program(["/bin/true"])).await {
                Err(status) => break status,
                Ok(_) => assert!(start.elapsed() < within(5.0), "the drain begins"),
            }
        };
        assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
        assert_eq!(error_info(&refused).1, "cofferdam");
        let retry = refused.get_details_retry_info();
        assert!(retry.is_some_and(|retry| retry.retry_delay.is_some()), "{refused:?}");
        assert!(!running.is_finished(), "the running call goes on");
        fs::write(daemon.workspace.join("go"), "").expect("a file");
        let answer = running.await.expect("no panic").expect("it is answered").into_inner();
        assert_eq!(answer.exit.and_then(|exit| exit.reason), Some(Reason::Exited(v1::Exited { code: 6 })));
        assert_eq!(answer.stdout, "started\nended\n");
        let status = daemon.ended().await;
        assert!(status.success(), "{status}");
        assert!(!daemon.socket().exists(), "the socket is gone");
    }

    async fn a_drain_cancels_what_does_not_end(who) {
        let options = Options {
            arguments: vec!["--drain-grace".into(), "300ms".into()],
            ..Options::default()
        };
        let mut daemon = Daemon::start_with(who, options).await;
        let mut client = ProcessServiceClient::new(daemon.new_channel());
        let running = bash("trap '' TERM; echo started; while :; do sleep 0.05; done");
        let running = tokio::spawn(async move { client.execute(running).await });
        wait_for("it runs", Duration::from_secs(5), || daemon.marked("trap").first().map(|_| ())).await;
        let start = Instant::now();
        daemon.signal(Signal::SIGTERM);
        let answer = running.await.expect("no panic").expect("it is answered").into_inner();
        let reason = answer.exit.and_then(|exit| exit.reason);
        assert_eq!(reason, Some(Reason::Cancelled(v1::Cancelled { by: "drain".into() })));
        assert_eq!(answer.stdout, "started\n");
        assert!(start.elapsed() >= Duration::from_millis(300), "{:?}", start.elapsed());
        assert!(daemon.ended().await.success());
    }

    async fn standard_input_is_written_once(who) {
        let daemon = Daemon::start(who).await;
        let request = v1::StartRequest {
            stdin_mode: v1::StdinMode::Pipe.into(),
            stdin: "0".into(),
            ..start(bash("cat; echo end"))
        };
        let events = daemon.start_stream(request.clone()).await;
        let list = daemon.processes().list(v1::ListRequest::default()).await.expect("List").into_inner();
        let process_id = list.processes[0].process_id.clone();
        let write = |data: &'static str, offset, request_id: &str| v1::WriteStdinRequest {
            process_id: process_id.clone(),
            data: data.into(),
            request_id: request_id.to_owned(),
            offset,
        };
        let mut client = daemon.processes();
        let id = unique();
        let one = client.write_stdin(write("abc", Some(1), &id)).await.expect("taken").into_inner();
        assert_eq!(one.offset, 4);
        // The same id again, and the same offset with a new id: neither is doubled.
        let again = client.write_stdin(write("abc", Some(1), &id)).await.expect("taken").into_inner();
        assert_eq!(again.offset, 4);
        let same = client.write_stdin(write("abc", Some(1), &unique())).await.expect("taken").into_inner();
        assert_eq!(same.offset, 4);
        let longer = client.write_stdin(write("cde", Some(3), &unique())).await.expect("taken").into_inner();
        assert_eq!(longer.offset, 6);
        let append = client.write_stdin(write("f", None, &unique())).await.expect("taken").into_inner();
        assert_eq!(append.offset, 7);
        let gap = client.write_stdin(write("x", Some(100), &unique())).await.expect_err("a gap");
        assert_eq!(gap.code(), Code::OutOfRange, "{gap:?}");
        let close = v1::CloseStdinRequest { process_id: process_id.clone(), request_id: unique() };
        client.close_stdin(close).await.expect("it answers");
        let seen = Seen::all(events).await;
        assert_eq!(seen.stdout, b"0abcdefend\n", "{:?}", String::from_utf8_lossy(&seen.stdout));
        let late = client.write_stdin(write("x", None, &unique())).await.expect_err("it is closed");
        assert_eq!(late.code(), Code::FailedPrecondition, "{late:?}");

        let closed = daemon.start_detached(start(bash("sleep 300"))).await;
        let none = v1::WriteStdinRequest {
            process_id: closed, data: "x".into(), request_id: unique(), offset: None,
        };
        let none = client.write_stdin(none).await.expect_err("its input is closed");
        assert_eq!(none.code(), Code::FailedPrecondition, "{none:?}");
        let whole = v1::StartRequest { stdin: "whole".into(), ..start(bash("cat")) };
        assert_eq!(Seen::all(daemon.start_stream(whole).await).await.stdout, b"whole");
    }

    async fn much_input_is_passed_whole(who) {
        let daemon = Daemon::start(who).await;
        let data = Pattern::new(5).bytes(0, 8 << 20);
        let request = v1::ExecuteRequest { stdin: data.clone().into(), ..bash("sleep 0.2; sha256sum") };
        let digest = Sha256::digest(&data);
        let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        daemon.run(request).await.expect(0, &format!("{hex}  -\n"));
        // A program that does not read all of it is no error.
        let request = v1::ExecuteRequest { stdin: data.into(), ..bash("head -c 3 | wc -c") };
        daemon.run(request).await.expect(0, "3\n");
    }

    async fn list_get_wait_and_retention(who) {
        let daemon = Daemon::start(who).await;
        let mut ids = Vec::new();
        for number in 0..5 {
            let session = if number % 2 == 0 { "even" } else { "odd" };
            let request = v1::StartRequest {
                session: session.into(),
                tag: format!("tag-{number}"),
                ..start(bash("sleep 300"))
            };
            ids.push(daemon.start_detached(request).await);
        }
        let mut client = daemon.processes();
        let mut listed = Vec::new();
        let mut page_token = String::new();
        loop {
            let request = v1::ListRequest { page_size: 2, page_token, session: String::new() };
            let page = client.list(request).await.expect("List answers").into_inner();
            assert!(page.processes.len() <= 2);
            listed.extend(page.processes);
            page_token = page.next_page_token;
            if page_token.is_empty() {
                break;
            }
        }
        let names: Vec<&str> = listed.iter().map(|info| info.process_id.as_str()).collect();
        assert_eq!(names, ids, "all of them, oldest first");
        assert_eq!(listed[3].tag, "tag-3");
        let request = v1::ListRequest { session: "odd".into(), ..Default::default() };
        let odd = client.list(request).await.expect("List answers").into_inner().processes;
        assert_eq!(odd.len(), 2);
        assert!(odd.iter().all(|info| info.session == "odd"));

        let get = v1::GetRequest { process_id: ids[0].clone() };
        let info = client.get(get).await.expect("Get answers").into_inner().process.expect("one");
        assert_eq!(info.state, i32::from(v1::ProcessState::Running));
        assert_eq!(info.command.last().map(String::as_str), Some("sleep 300"));
        assert!(info.start_time.is_some() && info.exit.is_none() && !info.pty);

        let wait = v1::WaitRequest {
            process_id: ids[0].clone(),
            timeout: Some(duration(Duration::from_millis(100))),
        };
        let begin = Instant::now();
        let info = client.wait(wait).await.expect("Wait answers").into_inner().process.expect("one");
        assert!(info.exit.is_none() && begin.elapsed() >= Duration::from_millis(100));

        let signal = v1::SendSignalRequest {
            process_id: ids[0].clone(),
            signal: nix::libc::SIGTERM,
            target: v1::SignalTarget::Tree.into(),
            request_id: unique(),
        };
        client.send_signal(signal).await.expect("it answers");
        let info = ended(&daemon, &ids[0]).await;
        assert_eq!(info.state, i32::from(v1::ProcessState::Exited));

        let request = v1::StartRequest {
            retention: Some(duration(Duration::from_secs(1))),
            ..start(bash("echo kept"))
        };
        let brief = daemon.start_detached(request).await;
        ended(&daemon, &brief).await;
        let answer = client.connect(connect(&brief, 0)).await.expect("it is retained").into_inner();
        assert_eq!(Seen::all(answer).await.stdout, b"kept\n");
        let begin = Instant::now();
        loop {
            match client.get(v1::GetRequest { process_id: brief.clone() }).await {
                Err(status) => {
                    assert_eq!(status.code(), Code::NotFound, "{status:?}");
                    break;
                }
                Ok(_) => assert!(begin.elapsed() < within(5.0), "its retention ends"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(begin.elapsed() > Duration::from_millis(500), "not before its time");
    }

    async fn later_output_of_a_background_process_is_its_own_calls(who) {
        let daemon = Daemon::start(who).await;
        let run = daemon
            .bash("(until [ -e go ]; do sleep 0.02; done; echo late) & echo early")
            .await;
        run.expect(0, "early\n");
        assert!(run.account().detached, "{:?}", run.account());
        let process_id = run.account().process_id.clone();
        daemon.bash("touch go; sleep 0.3; echo own").await.expect(0, "own\n");
        let begin = Instant::now();
        loop {
            let answer = daemon.processes().connect(connect(&process_id, 0)).await.expect("it answers");
            if Seen::all(answer.into_inner()).await.stdout == b"early\nlate\n" {
                break;
            }
            assert!(begin.elapsed() < within(5.0), "the late output is in its call's file");
        }
    }

    async fn keepalives_come_while_nothing_happens(who) {
        let daemon = Daemon::start(who).await;
        let mut events = daemon.start_stream(start(bash("sleep 300"))).await;
        let begin = Instant::now();
        loop {
            let next = tokio::time::timeout(Duration::from_secs(40), events.message()).await;
            let event = next.expect("a keepalive comes").expect("the stream").expect("an event");
            match event.event {
                Some(Event::Keepalive(_)) => break,
                Some(Event::Started(_)) => {}
                other => panic!("{other:?}"),
            }
        }
        assert!(begin.elapsed() > Duration::from_millis(900), "not a busy loop");
    }

    async fn narrowed_limits_reach_the_kernel(who) {
        let daemon = Daemon::start(who).await;
        let limits = v1::Limits {
            open_files: 64,
            memory_bytes: 64 << 20,
            file_bytes: 1 << 20,
            ..limits(30.0)
        };
        let request = v1::ExecuteRequest {
            limits: Some(limits),
            ..bash("ulimit -n; ulimit -d; ulimit -f; head -c 2000000 /dev/zero > big; echo $?; \
                    stat -c %s big; python3 -c 'bytearray(200000000)' 2>/dev/null; echo $?")
        };
        daemon.run(request).await.expect(0, "64\n65536\n1024\n153\n1048576\n1\n");
        daemon.bash("python3 -c 'bytearray(200000000)'; echo $?").await.expect(0, "0\n");
    }

    async fn the_policys_limits_hold_without_asking(who) {
        let policy = "[limits]\nwall_seconds = 1.0\noutput_bytes = 1000000\nopen_files = 100\n";
        let options = Options { policy: Some(policy.into()), ..Options::default() };
        let daemon = Daemon::start_with(who, options).await;
        let run = daemon.bash("ulimit -n; sleep 300").await;
        assert_eq!(run.stdout(), "100\n");
        assert!(matches!(run.reason(), Reason::TimedOut(_)), "{run:?}");
        let request = v1::ExecuteRequest { limits: Some(limits(2.0)), ..bash("true") };
        let widened = daemon.try_run(request).await.expect_err("a call never widens");
        assert!([Code::InvalidArgument, Code::PermissionDenied].contains(&widened.code()), "{widened:?}");
    }
}

/// Two streams of one process bring the same bytes.
#[test]
fn readers_are_independent() {
    cofferdam_e2e::run(async {
        let daemon = Daemon::start(cofferdam_e2e::Who::Root).await;
        let probe = daemon.put_probe();
        let process_id = daemon
            .start_detached(start(bash(&format!("sleep 0.2; {probe} bytes 3000000 3"))))
            .await;
        let mut readers = BTreeMap::new();
        for number in 0..8 {
            let mut client = ProcessServiceClient::new(daemon.new_channel());
            let request = connect(&process_id, 0);
            readers.insert(
                number,
                tokio::spawn(async move {
                    Seen::all(client.connect(request).await.expect("it answers").into_inner()).await
                }),
            );
        }
        let right = Pattern::new(3).bytes(0, 3_000_000);
        for (number, reader) in readers {
            let seen = reader.await.expect("no panic");
            assert!(seen.stdout == right, "reader {number} has {} bytes", seen.stdout.len());
        }
    });
}
