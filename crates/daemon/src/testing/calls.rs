//! What calls do when all is well.

use bytes::Bytes;

use super::*;

#[tokio::test]
async fn execute_brings_output_and_an_exact_account() {
    let mut daemon = TestDaemon::new().await;
    let answer = daemon.execute("printf out; printf error >&2; exit 3").await;
    assert_eq!((&answer.stdout[..], &answer.stderr[..]), (&b"out"[..], &b"error"[..]));
    assert_eq!(answer.exit, exited(3));
    let output = answer.output.unwrap();
    let whole = |bytes| v1::StreamAccount {
        total_bytes: bytes,
        kept_bytes: bytes,
        head_bytes: bytes,
        readable_bytes: bytes,
        ..v1::StreamAccount::default()
    };
    assert_eq!(output.stdout, Some(whole(3)));
    assert_eq!(output.stderr, Some(whole(5)));
    assert_eq!((output.process_id.as_str(), output.detached), ("", false));
    assert_eq!(answer.enforcement.unwrap().level, "namespaces");
    assert_eq!(daemon.job_files(), 0);
    let list = daemon.processes.list(v1::ListRequest::default()).await.unwrap().into_inner();
    assert_eq!(list.processes, []);
}

#[tokio::test]
async fn a_program_that_does_not_exist_is_a_result() {
    let mut daemon = TestDaemon::new().await;
    let mut request = execute("");
    request.process.as_mut().unwrap().command = vec!["/no/such/program".to_owned()];
    let answer = daemon.processes.execute(request.clone()).await.unwrap().into_inner();
    let failed = v1::SandboxFailed {
        step: "exec".to_owned(),
        errno: 2,
        message: "the program could not be executed: No such file or directory".to_owned(),
    };
    let reason = Some(v1::exit::Reason::SandboxFailed(failed));
    assert_eq!(answer.exit, Some(v1::Exit { reason }));
    // Start tells the same by its only event.
    let mut events = daemon.start(v1::StartRequest { process: request.process, ..start("") }).await;
    let event = events.next().await;
    assert!(matches!(event.event, Some(Event::Exit(exit)) if Some(&exit) == answer.exit.as_ref()));
}

#[tokio::test]
async fn execute_gives_its_whole_input_and_then_its_end() {
    let mut daemon = TestDaemon::new().await;
    let stdin = Bytes::from(vec![b'x'; 3 << 20]);
    let request = v1::ExecuteRequest { stdin, ..execute("wc -c") };
    let answer = soon(daemon.processes.execute(request)).await.unwrap().into_inner();
    assert_eq!(answer.stdout, "3145728\n");
}

#[tokio::test]
async fn a_program_that_reads_no_input_ends_all_the_same() {
    let mut daemon = TestDaemon::new().await;
    let stdin = Bytes::from(vec![b'x'; 3 << 20]);
    let request = v1::ExecuteRequest { stdin, ..execute("exec 0<&-; echo done") };
    let answer = soon(daemon.processes.execute(request)).await.unwrap().into_inner();
    assert_eq!((answer.stdout, answer.exit), (Bytes::from("done\n"), exited(0)));
}

#[tokio::test]
async fn a_cut_answer_names_the_process_whose_output_connect_reads() {
    let mut daemon = TestDaemon::new().await;
    let script = "head -c 1000000 /dev/zero | tr '\\0' x; printf end";
    let answer = daemon.execute(script).await;
    let output = answer.output.unwrap();
    let account = output.stdout.unwrap();
    assert_eq!(account.total_bytes, 1_000_003);
    assert_eq!((account.head_bytes, account.tail_bytes), (96 << 10, 288 << 10));
    assert_eq!(account.kept_bytes + account.dropped_bytes, account.total_bytes);
    assert!(answer.stdout.ends_with(b"xend"));
    let events = daemon.processes.connect(connect_from(&output.process_id, 0)).await.unwrap();
    let all = Events(events.into_inner()).collect(0).await;
    assert_eq!(all.stdout.len(), 1_000_003);
}

#[tokio::test]
async fn start_streams_both_outputs_and_ends_with_the_exit() {
    let mut daemon = TestDaemon::new().await;
    let mut events = daemon.start(start("echo a; echo b >&2; exit 7")).await;
    let process_id = events.started().await;
    let all = events.collect(0).await;
    assert_eq!((&all.stdout[..], &all.stderr[..]), (&b"a\n"[..], &b"b\n"[..]));
    let exit = all.exit.unwrap();
    assert!(matches!(exit.event, Some(Event::Exit(exit)) if Some(&exit) == exited(7).as_ref()));
    let output = exit.output.unwrap();
    assert_eq!((output.process_id, output.stdout.unwrap().total_bytes), (process_id, 2));
    assert!(exit.duration.is_some() && exit.enforcement.is_some());
}

#[tokio::test]
async fn input_is_written_in_pieces_repeated_without_doubling_and_closed() {
    let mut daemon = TestDaemon::new().await;
    let request = v1::StartRequest {
        stdin: Bytes::from("first "),
        stdin_mode: v1::StdinMode::Pipe.into(),
        ..start("cat")
    };
    let mut events = daemon.start(request).await;
    let process_id = events.started().await;
    let write = |data: &'static str, offset| v1::WriteStdinRequest {
        process_id: process_id.clone(),
        data: Bytes::from(data),
        request_id: request_id(),
        offset,
    };
    for (request, accepted) in [
        (write("second ", None), 13),
        (write("second ", Some(6)), 13),
        (write("d x", Some(11)), 14),
    ] {
        let answer = daemon.processes.write_stdin(request).await.unwrap().into_inner();
        assert_eq!(answer.offset, accepted);
    }
    let status = daemon.processes.write_stdin(write("x", Some(99))).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::OutOfRange);
    let close =
        || v1::CloseStdinRequest { process_id: process_id.clone(), request_id: request_id() };
    daemon.processes.close_stdin(close()).await.unwrap();
    let all = events.collect(0).await;
    assert_eq!(String::from_utf8(all.stdout).unwrap(), "first second x");
    let status = daemon.processes.write_stdin(write("x", None)).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::FailedPrecondition);
}

#[tokio::test]
async fn a_writer_waits_for_a_program_that_does_not_read() {
    let mut daemon = TestDaemon::new().await;
    let request = v1::StartRequest {
        stdin_mode: v1::StdinMode::Pipe.into(),
        ..start("read -r line; echo $line; cat | wc -c")
    };
    let mut events = daemon.start(request).await;
    let process_id = events.started().await;
    let mut writer = daemon.connect().await;
    let request = move |data: Vec<u8>| v1::WriteStdinRequest {
        process_id: process_id.clone(),
        data: data.into(),
        request_id: request_id(),
        offset: None,
    };
    let close_id = request(Vec::new()).process_id;
    let writing = tokio::spawn(async move {
        writer.write_stdin(request(b"go\n".to_vec())).await.unwrap();
        for _ in 0..40 {
            writer.write_stdin(request(vec![b'x'; 100_000])).await.unwrap();
        }
        let close = v1::CloseStdinRequest { process_id: close_id, request_id: request_id() };
        writer.close_stdin(close).await.unwrap();
    });
    let all = events.collect(0).await;
    soon(writing).await.unwrap();
    assert_eq!(String::from_utf8(all.stdout).unwrap(), "go\n4000000\n");
}

#[tokio::test]
async fn a_reader_that_stops_neither_stalls_the_program_nor_loses_count() {
    let mut daemon = TestDaemon::new().await;
    let mut events = daemon.start(start("head -c 67108864 /dev/zero")).await;
    let process_id = events.started().await;
    let mut other = daemon.connect().await;
    let wait = v1::WaitRequest { process_id, timeout: None };
    let info = soon(other.wait(wait)).await.unwrap().into_inner().process.unwrap();
    assert_eq!(info.exit, exited(0));
    let all = events.collect(0).await;
    assert_eq!(all.stdout.len() as u64 + all.lag, 64 << 20);
    assert!(all.lag > 40 << 20, "the ring went round");
}

#[tokio::test]
async fn what_clients_read_over_many_connections_is_the_whole_output() {
    let mut daemon = TestDaemon::new().await;
    let mut events = daemon.start(start("seq 300000; sleep 0.2; seq 300000")).await;
    let process_id = events.started().await;
    let mut clients = 0;
    let mut joined = Vec::new();
    loop {
        // Each client takes some events and is gone.
        let request = connect_from(&process_id, joined.len() as u64);
        let mut events = Events(daemon.processes.connect(request).await.unwrap().into_inner());
        clients += 1;
        let mut events_left = clients * 7 % 6;
        let mut ended = false;
        while events_left > 0 && !ended {
            match events.next().await.event {
                Some(Event::Stdout(bytes)) => joined.extend_from_slice(&bytes),
                Some(Event::Exit(_)) => ended = true,
                _ => {}
            }
            events_left -= 1;
        }
        if ended {
            break;
        }
    }
    let once: String = (1..=300_000).map(|number| format!("{number}\n")).collect();
    assert_eq!(joined.len(), 2 * once.len());
    assert!(joined == once.repeat(2).into_bytes());
}

#[tokio::test]
async fn connect_beyond_the_end_of_an_ended_process_is_out_of_range() {
    let mut daemon = TestDaemon::new().await;
    let mut events = daemon.start(start("echo abc")).await;
    let process_id = events.started().await;
    events.collect(0).await;
    let tail = daemon.processes.connect(connect_from(&process_id, 3)).await.unwrap();
    assert_eq!(Events(tail.into_inner()).collect(3).await.stdout, b"\n");
    let status = daemon.processes.connect(connect_from(&process_id, 5)).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::OutOfRange);
}

#[tokio::test]
async fn processes_are_listed_in_pages_described_and_waited_for() {
    let mut daemon = TestDaemon::new().await;
    let mut ids = Vec::new();
    for number in 0..3 {
        let request = v1::StartRequest {
            tag: format!("tag {number}"),
            session: format!("s{}", number % 2),
            ..start("read x")
        };
        let request = v1::StartRequest { stdin_mode: v1::StdinMode::Pipe.into(), ..request };
        ids.push(daemon.start(request).await.started().await);
    }
    let list = |page_size, page_token: &str, session: &str| v1::ListRequest {
        session: session.to_owned(),
        page_size,
        page_token: page_token.to_owned(),
    };
    let names = |page: &v1::ListResponse| -> Vec<String> {
        page.processes.iter().map(|info| info.process_id.clone()).collect()
    };
    let first = daemon.processes.list(list(2, "", "")).await.unwrap().into_inner();
    assert_eq!(names(&first), ids[..2]);
    let token = &first.next_page_token;
    let second = daemon.processes.list(list(2, token, "")).await.unwrap().into_inner();
    assert_eq!((names(&second), second.next_page_token.as_str()), (ids[2..].to_vec(), ""));
    let odd = daemon.processes.list(list(0, "", "s1")).await.unwrap().into_inner();
    assert_eq!(names(&odd), ids[1..2]);

    let get = v1::GetRequest { process_id: ids[0].clone() };
    let info = daemon.processes.get(get).await.unwrap().into_inner().process.unwrap();
    assert_eq!((info.tag.as_str(), info.session.as_str()), ("tag 0", "s0"));
    assert_eq!(info.state(), v1::ProcessState::Running);
    assert_eq!((info.command, info.exit), (shell("read x").unwrap().command, None));

    let wait = |timeout| v1::WaitRequest { process_id: ids[0].clone(), timeout };
    let info = daemon.processes.wait(wait(milliseconds(20))).await.unwrap().into_inner();
    assert_eq!(info.process.unwrap().exit, None);
    let close = v1::CloseStdinRequest { process_id: ids[0].clone(), request_id: request_id() };
    daemon.processes.close_stdin(close).await.unwrap();
    let info = soon(daemon.processes.wait(wait(None))).await.unwrap().into_inner();
    assert_eq!(info.process.unwrap().exit, exited(1));
}

#[tokio::test]
async fn a_signal_reaches_the_leader() {
    let mut daemon = TestDaemon::new().await;
    let mut events =
        daemon.start(start("trap 'exit 5' USR1; echo ready; while :; do sleep 0.01; done")).await;
    let process_id = events.started().await;
    assert!(matches!(events.next().await.event, Some(Event::Stdout(_))));
    let signal = || v1::SendSignalRequest {
        process_id: process_id.clone(),
        signal: 10,
        request_id: request_id(),
        ..v1::SendSignalRequest::default()
    };
    let answer = daemon.processes.send_signal(signal()).await.unwrap().into_inner();
    assert_eq!(answer.delivered, 1);
    let exit = events.collect(6).await.exit.unwrap();
    assert!(matches!(exit.event, Some(Event::Exit(exit)) if Some(&exit) == exited(5).as_ref()));
    let status = daemon.processes.send_signal(signal()).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::FailedPrecondition);
}

#[tokio::test]
async fn the_workspace_counts_its_calls() {
    let mut daemon = TestDaemon::new().await;
    daemon.execute("true").await;
    daemon.execute("true").await;
    let workspace =
        daemon.workspace.get_workspace(v1::GetWorkspaceRequest {}).await.unwrap().into_inner();
    assert_eq!((workspace.calls_total, workspace.running_processes), (2, 0));
    assert_eq!((workspace.cell_generation, workspace.image.as_str()), (1, "host"));
    assert_eq!(workspace.daemon_pid, std::process::id());
    let request = v1::GetCapabilitiesRequest {};
    let capabilities = daemon.workspace.get_capabilities(request).await.unwrap().into_inner();
    assert_eq!(capabilities.message_limits.unwrap().execute_request_bytes, 16 << 20);
}
