//! How calls, sessions and the daemon end.

use std::time::Instant;

use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_types::StatusExt;
use v1::exit::Reason;

use super::*;

fn limits(change: impl FnOnce(&mut v1::Limits)) -> Option<v1::Limits> {
    let mut limits = v1::Limits::default();
    change(&mut limits);
    Some(limits)
}

fn timed_out(limit: v1::TimeLimit, after: i32) -> Option<Reason> {
    let after = milliseconds(after);
    Some(Reason::TimedOut(v1::TimedOut { limit: limit.into(), after }))
}

fn cancelled(by: &str) -> Option<Reason> {
    Some(Reason::Cancelled(v1::Cancelled { by: by.to_owned() }))
}

async fn reason(
    daemon: &mut TestDaemon,
    script: &str,
    limits: Option<v1::Limits>,
) -> Option<Reason> {
    let request = v1::ExecuteRequest { limits, ..execute(script) };
    let answer = soon(daemon.processes.execute(request)).await.unwrap().into_inner();
    answer.exit.unwrap().reason
}

#[tokio::test]
async fn every_limit_has_its_exit_reason() {
    let mut daemon = TestDaemon::new().await;
    let wall = limits(|limits| limits.wall = milliseconds(200));
    let got = reason(&mut daemon, "echo a; sleep 60", wall).await;
    assert_eq!(got, timed_out(v1::TimeLimit::Wall, 200));

    let idle = || limits(|limits| limits.idle = milliseconds(300));
    let got = reason(&mut daemon, "echo a; sleep 60", idle()).await;
    assert_eq!(got, timed_out(v1::TimeLimit::Idle, 300));
    let busy = "for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.1; done";
    assert_eq!(reason(&mut daemon, busy, idle()).await, exited(0).unwrap().reason);

    let output = limits(|limits| limits.output_bytes = 1000);
    let got = reason(&mut daemon, "yes", output).await;
    assert_eq!(got, Some(Reason::OutputLimit(v1::OutputLimit { limit_bytes: 1000 })));

    let signaled = v1::Signaled { number: 9, core: false, maybe_oom: true };
    assert_eq!(reason(&mut daemon, "kill -9 $$", None).await, Some(Reason::Signaled(signaled)));
}

#[tokio::test]
async fn a_killed_call_is_answered_when_its_tree_is_gone() {
    let mut daemon = TestDaemon::new().await;
    let file = daemon.directory.path().join("alive");
    let script = format!(
        "bash -c 'trap \"\" TERM; while :; do echo x >> {}; sleep 0.05; done' & wait",
        file.display()
    );
    let wall = limits(|limits| limits.wall = milliseconds(200));
    assert_eq!(reason(&mut daemon, &script, wall).await, timed_out(v1::TimeLimit::Wall, 200));
    let size = || std::fs::metadata(&file).unwrap().len();
    let before = size();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(size(), before);
}

#[tokio::test]
async fn a_background_process_does_not_hold_the_call_and_its_output_stays_its_own() {
    let mut daemon = TestDaemon::new().await;
    let begin = Instant::now();
    let answer = daemon.execute("(sleep 0.5; echo late; sleep 0.5) & echo now").await;
    assert!(begin.elapsed() < Duration::from_millis(450), "{:?}", begin.elapsed());
    assert_eq!((&answer.stdout[..], answer.exit), (&b"now\n"[..], exited(0)));
    let output = answer.output.unwrap();
    assert_eq!((output.background_processes, output.detached), (1, true));
    assert_eq!(daemon.execute("sleep 0.7; echo next").await.stdout, "next\n");
    let events = daemon.processes.connect(connect_from(&output.process_id, 0)).await.unwrap();
    let all = Events(events.into_inner()).collect(0).await;
    assert_eq!(String::from_utf8(all.stdout).unwrap(), "now\nlate\n");
}

#[tokio::test]
async fn a_client_that_goes_away_ends_its_execute() {
    let mut daemon = TestDaemon::new().await;
    let mut other = daemon.connect().await;
    let call = tokio::spawn(async move { other.execute(execute("echo begun; sleep 60")).await });
    until(async || !list(&mut daemon).await.is_empty()).await;
    call.abort();
    until(async || list(&mut daemon).await.is_empty()).await;
}

#[tokio::test]
async fn a_started_process_outlives_its_client_unless_told_otherwise() {
    let mut daemon = TestDaemon::new().await;
    let mut stays = daemon.start(start("sleep 60")).await;
    let stays_id = stays.started().await;
    let request = v1::StartRequest { kill_on_disconnect: true, ..start("sleep 60") };
    let mut goes = daemon.start(request).await;
    let goes_id = goes.started().await;
    drop((stays, goes));
    let wait = v1::WaitRequest { process_id: goes_id, timeout: None };
    let info = soon(daemon.processes.wait(wait)).await.unwrap().into_inner().process.unwrap();
    assert_eq!(info.exit.unwrap().reason, cancelled("client"));
    let wait = v1::WaitRequest { process_id: stays_id, timeout: milliseconds(50) };
    let info = daemon.processes.wait(wait).await.unwrap().into_inner().process.unwrap();
    assert_eq!(info.state(), v1::ProcessState::Running);
}

async fn list(daemon: &mut TestDaemon) -> Vec<v1::ProcessInfo> {
    daemon.processes.list(v1::ListRequest::default()).await.unwrap().into_inner().processes
}

#[tokio::test]
async fn end_session_ends_its_processes_and_no_others() {
    let mut daemon = TestDaemon::new().await;
    let of = |session: &str| v1::StartRequest { session: session.to_owned(), ..start("sleep 60") };
    let mut mine = daemon.start(of("mine")).await;
    mine.started().await;
    let other = daemon.start(of("other")).await.started().await;
    let background =
        v1::ExecuteRequest { session: "mine".to_owned(), ..execute("sleep 60 >/dev/null 2>&1 &") };
    daemon.processes.execute(background).await.unwrap();
    let request = v1::EndSessionRequest { session: "mine".to_owned(), request_id: request_id() };
    let answer = soon(daemon.workspace.end_session(request)).await.unwrap().into_inner();
    assert_eq!(answer.ended_processes, 2);
    let exit = mine.collect(0).await.exit.unwrap();
    let session = cancelled("session");
    assert!(matches!(exit.event, Some(Event::Exit(exit)) if exit.reason == session));
    let get = v1::GetRequest { process_id: other };
    let info = daemon.processes.get(get).await.unwrap().into_inner().process.unwrap();
    assert_eq!(info.state(), v1::ProcessState::Running);
}

#[tokio::test]
async fn a_dead_cell_loses_its_calls_and_the_next_call_gets_a_new_one() {
    let mut daemon = TestDaemon::new().await;
    let mut events = daemon.start(start("echo before; sleep 60")).await;
    events.started().await;
    assert!(matches!(events.next().await.event, Some(Event::Stdout(_))));
    daemon.cells.lock().unwrap().current.take().unwrap().die();
    let exit = events.collect(7).await.exit.unwrap();
    let lost = Some(Reason::Lost(v1::Lost {}));
    assert!(matches!(exit.event, Some(Event::Exit(exit)) if exit.reason == lost));
    assert_eq!(daemon.execute("echo after").await.stdout, "after\n");
    let workspace =
        daemon.workspace.get_workspace(v1::GetWorkspaceRequest {}).await.unwrap().into_inner();
    assert_eq!(workspace.cell_generation, 2);
    assert_eq!(daemon.cells.lock().unwrap().launched, 2);
}

#[tokio::test]
async fn a_cell_that_cannot_stand_is_unavailable_with_the_reason() {
    let mut daemon = TestDaemon::new().await;
    let cell = {
        let mut cells = daemon.cells.lock().unwrap();
        cells.fail = true;
        cells.current.take().unwrap()
    };
    cell.die();
    for attempt in 0..4 {
        let mut status = None;
        until(async || {
            match daemon.processes.execute(execute("true")).await {
                // The news of the cell's death may come after the call.
                Ok(answer) => {
                    let lost = Some(Reason::Lost(v1::Lost {}));
                    assert_eq!(answer.into_inner().exit.unwrap().reason, lost);
                }
                Err(error) => status = Some(error),
            }
            status.is_some()
        })
        .await;
        let status = status.unwrap();
        assert_eq!(status.code(), tonic::Code::Unavailable);
        assert_eq!(status.get_details_error_info().unwrap().reason, "CELL_UNAVAILABLE");
        assert!(status.get_details_retry_info().unwrap().retry_delay.is_some());
        let expected = if attempt < 3 { "told to fail" } else { "several launches" };
        assert!(status.message().contains(expected), "{attempt}: {}", status.message());
    }
}

#[tokio::test]
async fn a_drain_ends_calls_refuses_new_ones_and_leaves_with_exit_events() {
    let mut daemon = TestDaemon::with(|config| {
        config.drain_grace = Duration::from_millis(700);
    })
    .await;
    let mut ends = daemon.start(start("sleep 0.3; echo done")).await;
    ends.started().await;
    let mut killed = daemon.start(start("sleep 60")).await;
    killed.started().await;
    let channel = connect(daemon.directory.path().join("socket")).await;
    let mut health = HealthClient::new(channel);
    let mut serving = async || {
        let service = "cofferdam.v1.ProcessService".to_owned();
        let answer = health.check(HealthCheckRequest { service }).await.unwrap();
        answer.into_inner().status()
    };
    assert_eq!(serving().await, ServingStatus::Serving);
    daemon.stop();
    until(async || serving().await == ServingStatus::NotServing).await;
    let status = daemon.processes.execute(execute("true")).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unavailable);
    assert_eq!(status.get_details_error_info().unwrap().reason, "DRAINING");
    let retry = status.get_details_retry_info().unwrap().retry_delay;
    assert_eq!(retry, Some(Duration::from_secs(1)));
    assert_eq!(ends.collect(0).await.stdout, b"done\n");
    let exit = killed.collect(0).await.exit.unwrap();
    let drained = cancelled("drain");
    assert!(matches!(exit.event, Some(Event::Exit(exit)) if exit.reason == drained));
    soon(daemon.running).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_daemon_that_nobody_needs_leaves() {
    let idle = Duration::from_millis(300);
    let mut daemon = TestDaemon::with(|config| config.idle_exit = Some(idle)).await;
    daemon.start(start("sleep 0.8")).await.started().await;
    drop((daemon.processes, daemon.workspace, daemon.files, daemon.stamps));
    let begin = Instant::now();
    soon(daemon.running).await.unwrap().unwrap();
    assert!(begin.elapsed() >= Duration::from_millis(900), "{:?}", begin.elapsed());
}
