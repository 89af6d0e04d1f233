//! Commands that turn on their supervisors, on each other and on the host's patience: a call's
//! tree always ends, another session's call never notices, and nothing is left.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use cofferdam_e2e::{
    CellTrace, Daemon, Options, all_processes, bash, both, duration, limits, soak, unique,
    wait_for, within,
};
use cofferdam_proto::v1;
use cofferdam_proto::v1::exit::Reason;
use cofferdam_proto::v1::process_service_client::ProcessServiceClient;
use nix::sys::signal::Signal;
use tokio::task::JoinSet;
use tonic::transport::Channel;

/// Wall limit of an offending call, in seconds.
const OFFENDER_WALL: f64 = 1.0;

/// Longest time that a tree may live above its wall limit: SIGTERM, a grace, SIGKILL.
const GRACE: f64 = 4.0;

/// Offending calls of a test, and how many of them run at once.
const OFFENDERS: usize = 200;
const AT_ONCE: usize = 16;

/// Runs `command` again and again in one session beside a long call of another, and checks what
/// that call saw and what is left.
async fn offend(daemon: &Daemon, command: &str) {
    daemon.bash("true").await.expect_code(0);
    let before = daemon.footprint();
    let marker = format!("1000.{}", unique().replace('-', ""));
    let offence = command.replace("MARKER", &marker);
    let witness_ends = format!("/workspace/end-{marker}");
    let witness = bash(&format!(
        "i=0; until [ -e {witness_ends} ]; do i=$((i+1)); echo $i; sleep 0.02; done; echo end"
    ));
    let witness = v1::ExecuteRequest { session: "witness".to_owned(), ..witness };
    let mut witness_client = ProcessServiceClient::new(daemon.new_channel());
    let witness = tokio::spawn(async move { witness_client.execute(witness).await });
    wait_for("the witness runs", Duration::from_secs(10), || {
        daemon.marked(&witness_ends).first().map(|_| ())
    })
    .await;

    let mut running = JoinSet::new();
    for number in 0..OFFENDERS {
        if running.len() == AT_ONCE {
            ended_well(daemon, running.join_next().await.expect("one runs"));
        }
        running.spawn(one_offence(daemon.channel(), offence.clone(), number));
    }
    while let Some(ended) = running.join_next().await {
        ended_well(daemon, ended);
    }
    wait_for("every offender's tree is gone", within(OFFENDER_WALL + GRACE), || {
        daemon.marked(&marker).iter().all(|p| p.command_line.contains("until")).then_some(())
    })
    .await;

    daemon.put_text(witness_ends.trim_start_matches("/workspace/"), "");
    let answer = witness.await.expect("no panic").expect("it answers").into_inner();
    assert_eq!(
        answer.exit.and_then(|exit| exit.reason),
        Some(Reason::Exited(v1::Exited { code: 0 }))
    );
    let account = answer.output.and_then(|output| output.stdout).expect("an account");
    assert_eq!(account.dropped_bytes, 0);
    let text = String::from_utf8(answer.stdout.to_vec()).expect("numbers");
    let mut lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.pop(), Some("end"));
    assert!(lines.len() > 10, "the witness saw the whole time: {}", lines.len());
    let numbers: Vec<usize> = lines.iter().map(|line| line.parse().expect("a number")).collect();
    assert_eq!(numbers, (1..=numbers.len()).collect::<Vec<_>>());

    daemon.bash("echo next").await.expect(0, "next\n");
    daemon.expect_footprint(&before).await;
    assert_eq!(daemon.workspace_info().await.cell_generation, 1, "{}", daemon.log());
}

/// Shows the cell when an offence did not end as it must.
fn ended_well(daemon: &Daemon, offence: Result<(), tokio::task::JoinError>) {
    offence.unwrap_or_else(|error| panic!("{error}\nin the cell: {:#?}", daemon.cell()));
}

async fn one_offence(channel: Channel, command: String, number: usize) {
    let request = v1::ExecuteRequest {
        session: "offender".to_owned(),
        limits: Some(limits(OFFENDER_WALL)),
        ..bash(&command)
    };
    let start = Instant::now();
    let limit = within(OFFENDER_WALL + GRACE);
    let mut client = ProcessServiceClient::new(channel);
    let answer = tokio::time::timeout(2 * limit, client.execute(request)).await;
    let answer = answer.unwrap_or_else(|_| panic!("offence {number} never ended"));
    let took = start.elapsed();
    let answer = answer.unwrap_or_else(|status| panic!("offence {number}: {status:?}"));
    assert!(took < limit, "offence {number} took {took:?}: {answer:?}");
    let reason = answer.into_inner().exit.and_then(|exit| exit.reason).expect("a reason");
    assert!(
        matches!(
            reason,
            Reason::Exited(_) | Reason::Signaled(_) | Reason::Lost(_) | Reason::TimedOut(_)
        ),
        "offence {number}: {reason:?}"
    );
}

both! {
    async fn kill_9_all_in_a_loop(who) {
        let daemon = Daemon::start(who).await;
        offend(&daemon, "setsid sleep MARKER & sleep MARKER & kill -9 -1; sleep MARKER").await;
    }

    async fn kill_stop_all_in_a_loop(who) {
        let daemon = Daemon::start(who).await;
        offend(&daemon, "setsid sleep MARKER & sleep MARKER & kill -STOP -1; sleep MARKER").await;
    }

    async fn kill_9_of_the_supervisor_in_a_loop(who) {
        let daemon = Daemon::start(who).await;
        offend(&daemon, "setsid sleep MARKER & sleep MARKER & kill -9 $PPID; sleep MARKER").await;
    }

    async fn kill_stop_of_the_supervisor_in_a_loop(who) {
        let daemon = Daemon::start(who).await;
        offend(&daemon, "setsid sleep MARKER & sleep MARKER & kill -STOP $PPID; sleep MARKER").await;
    }

    async fn a_killed_supervisor_does_not_hide_the_end(who) {
        let daemon = Daemon::start(who).await;
        for _ in 0..20 {
            let run = daemon.bash("kill -9 $PPID; exit 7").await;
            run.expect_within(2.0);
            let seen = matches!(run.reason(), Reason::Lost(_)) || run.code() == Some(7)
                || matches!(run.reason(), Reason::Signaled(end) if end.number == 9);
            assert!(seen, "{run:?}");
        }
        for _ in 0..20 {
            let run = daemon.bash("kill -STOP $PPID; echo out; exit 7").await;
            run.expect(7, "out\n").expect_within(5.0);
        }
    }

    async fn init_cannot_be_ended_or_stopped_from_inside(who) {
        let daemon = Daemon::start(who).await;
        let init = daemon.init();
        for signal in ["KILL", "STOP", "TERM", "HUP", "INT", "SEGV", "USR1", "CHLD", "42"] {
            daemon.bash(&format!("kill -{signal} 1 2>/dev/null; true")).await.expect_code(0);
            daemon.bash("echo alive").await.expect(0, "alive\n").expect_within(2.0);
        }
        assert_eq!((daemon.init().pid, daemon.init().start), (init.pid, init.start));
        assert_eq!(daemon.workspace_info().await.cell_generation, 1);
    }

    async fn detached_children_end_with_the_explicit_limit(who) {
        let daemon = Daemon::start(who).await;
        daemon.bash("true").await.expect_code(0);
        let before = daemon.footprint();
        let marker = format!("2000.{}", unique().replace('-', ""));
        let command = format!(
            "setsid sleep {marker} & (setsid sh -c '(sleep {marker} &) ; sleep {marker} & exec sleep {marker}' &); \
             python3 -c 'import os\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  os.execlp(\"sleep\", \"sleep\", \"{marker}\")' ; \
             echo started"
        );
        let start = Instant::now();
        let run = daemon.bash_timeout(&command, 2.0).await;
        run.expect(0, "started\n").expect_within(2.0);
        assert!(run.account().background_processes >= 1, "{:?}", run.account());
        wait_for("all of them sleep", Duration::from_millis(1500), || {
            let asleep = daemon.cell().into_iter().filter(|p| p.command_line == format!("sleep {marker}"));
            (asleep.count() == 5).then_some(())
        })
        .await;
        wait_for("the detached children are gone", within(2.0 + GRACE), || {
            daemon.marked(&marker).is_empty().then_some(())
        })
        .await;
        assert!(start.elapsed() > Duration::from_millis(1900), "not before the limit");
        daemon.expect_footprint(&before).await;
    }

    async fn a_tree_that_ignores_sigterm_ends(who) {
        let daemon = Daemon::start(who).await;
        let marker = format!("3000.{}", unique().replace('-', ""));
        let command = format!(
            "trap '' TERM INT HUP; (trap '' TERM; setsid sleep {marker}) & sleep {marker} & \
             while :; do sleep {marker}; done"
        );
        let run = daemon.bash_timeout(&command, 1.0).await;
        run.expect_within(1.0 + GRACE);
        assert!(matches!(run.reason(), Reason::TimedOut(_)), "{run:?}");
        wait_for("the tree is gone", within(1.0), || {
            daemon.marked(&marker).is_empty().then_some(())
        })
        .await;
    }

    async fn a_process_that_outlives_its_first_thread_ends(who) {
        let daemon = Daemon::start(who).await;
        let marker = format!("first-thread-{}", unique());
        // 60 is exit(2), which ends the calling thread alone; `/proc` then shows the process as `Z`.
        let script = "import ctypes, threading, time\n\
            threading.Thread(target=time.sleep, args=(60,)).start()\n\
            ctypes.CDLL(None).syscall(60, 0)\n";
        daemon.put_text("outlive.py", script);
        let run = daemon.bash_timeout(&format!("exec python3 outlive.py {marker}"), 1.0).await;
        run.expect_within(1.0 + GRACE);
        assert!(matches!(run.reason(), Reason::TimedOut(_)), "{run:?}");
        daemon.bash("echo next").await.expect(0, "next\n").expect_within(2.0);
    }

    async fn a_stopped_tree_ends(who) {
        let daemon = Daemon::start(who).await;
        let marker = format!("4000.{}", unique().replace('-', ""));
        let command = format!("sleep {marker} & kill -STOP $!; setsid sleep {marker} & kill -STOP $$; echo no");
        let run = daemon.bash_timeout(&command, 1.0).await;
        run.expect_within(1.0 + GRACE);
        assert!(matches!(run.reason(), Reason::TimedOut(_)), "{run:?}");
        assert_eq!(run.stdout(), "");
        wait_for("the tree is gone", within(1.0), || {
            daemon.marked(&marker).is_empty().then_some(())
        })
        .await;
    }

    async fn a_flood_of_zombies_is_reaped(who) {
        let daemon = Daemon::start(who).await;
        let probe = daemon.put_probe();
        daemon.bash("true").await.expect_code(0);
        let before = daemon.footprint();
        let rounds = if soak() { 20 } else { 6 };
        for _ in 0..rounds {
            daemon.bash(&format!("{probe} zombies 800")).await.expect(0, "ok\n");
        }
        daemon.expect_footprint(&before).await;
        let zombies: Vec<_> = daemon.cell().into_iter().filter(|p| p.state == 'Z').collect();
        assert!(zombies.is_empty(), "{zombies:?}");
    }

    async fn a_fork_bomb_is_bounded_and_ends(who) {
        let daemon = Daemon::start(who).await;
        let probe = daemon.put_probe();
        daemon.bash("true").await.expect_code(0);
        let before = daemon.footprint();
        let host = std::fs::read_link("/proc/self/ns/pid").expect("/proc is mounted");
        let request = v1::ExecuteRequest {
            session: "bomb".to_owned(),
            limits: Some(v1::Limits { processes: 64, ..limits(3.0) }),
            ..cofferdam_e2e::program([probe.as_str(), "fork-bomb", &host.display().to_string()])
        };
        let mut client = ProcessServiceClient::new(daemon.new_channel());
        let bomb = tokio::spawn(async move { client.execute(request).await });
        wait_for("the bomb is at its bound", Duration::from_secs(3), || {
            (daemon.marked("fork-bomb").len() >= 40).then_some(())
        })
        .await;
        let mut most = 0;
        let mut answers = 0;
        while !bomb.is_finished() {
            most = most.max(daemon.marked("fork-bomb").len());
            let run = daemon.bash("echo answer").await;
            run.expect_within(3.0);
            answers += usize::from(run.code() == Some(0));
        }
        assert!((40..=64).contains(&most), "at most 64 processes: {most}");
        assert!(answers > 0, "other calls run beside it");
        let answer = bomb.await.expect("no panic").expect("it answers").into_inner();
        let reason = answer.exit.and_then(|exit| exit.reason);
        assert!(matches!(reason, Some(Reason::TimedOut(_))), "{reason:?}");
        wait_for("the bomb is gone", within(GRACE), || {
            daemon.marked("fork-bomb").is_empty().then_some(())
        })
        .await;
        daemon.expect_footprint(&before).await;
    }

    async fn a_killed_daemon_leaves_nothing(who) {
        let mut daemon = Daemon::start(who).await;
        let marker = format!("5000.{}", unique().replace('-', ""));
        let command = format!(
            "trap '' TERM HUP INT; setsid sleep {marker} & (sleep {marker} & exit) ; kill -STOP $$"
        );
        let start = v1::StartRequest {
            process: bash(&command).process,
            session: "test".to_owned(),
            request_id: unique(),
            ..Default::default()
        };
        daemon.start_detached(start).await;
        daemon.bash(&format!("nohup sleep {marker} >/dev/null 2>&1 &")).await.expect_code(0);
        wait_for("all of them run", Duration::from_secs(5), || {
            (daemon.marked(&format!("sleep {marker}")).len() >= 3).then_some(())
        })
        .await;
        let trace = CellTrace::of(daemon.pid);
        assert!(trace.left().len() >= 6, "{:?}", trace.left());
        daemon.signal(Signal::SIGKILL);
        let status = daemon.ended().await;
        assert!(!status.success());
        let killed = Instant::now();
        let limit = within(0.1);
        loop {
            let left = trace.left();
            if left.is_empty() {
                break;
            }
            assert!(killed.elapsed() < limit, "after {:?}: {left:#?}", killed.elapsed());
        }
        let left: Vec<_> =
            all_processes().into_iter().filter(|p| p.command_line.contains(&marker)).collect();
        assert!(left.is_empty(), "{left:?}");
    }

    async fn signals_reach_leader_group_or_tree(who) {
        let daemon = Daemon::start(who).await;
        for (target, lives) in [
            (v1::SignalTarget::Leader, 2),
            (v1::SignalTarget::Group, 1),
            (v1::SignalTarget::Tree, 0),
        ] {
            let marker = format!("6000.{}", unique().replace('-', ""));
            let command = format!("sleep {marker} & setsid sleep {marker} & echo up; wait; wait");
            let start = v1::StartRequest {
                process: bash(&command).process,
                session: "test".to_owned(),
                request_id: unique(),
                ..Default::default()
            };
            let process_id = daemon.start_detached(start).await;
            wait_for("both children run", Duration::from_secs(5), || {
                let sleeping = daemon.marked(&format!("sleep {marker}"));
                let sleeping = sleeping.iter().filter(|p| p.command_line.starts_with("sleep"));
                (sleeping.count() == 2).then_some(())
            })
            .await;
            let signal = v1::SendSignalRequest {
                process_id: process_id.clone(),
                signal: nix::libc::SIGKILL,
                target: target.into(),
                request_id: unique(),
            };
            let answer = daemon.processes().send_signal(signal).await.expect("it answers").into_inner();
            assert_eq!(answer.delivered, 3 - lives, "{target:?}");
            let wait = v1::WaitRequest {
                process_id,
                timeout: Some(duration(Duration::from_secs(5))),
            };
            let ended = daemon.processes().wait(wait).await.expect("it answers").into_inner();
            let exit = ended.process.and_then(|process| process.exit).and_then(|exit| exit.reason);
            assert!(matches!(&exit, Some(Reason::Signaled(end)) if end.number == 9), "{exit:?}");
            wait_for("the right ones live", Duration::from_secs(2), || {
                let left = daemon.marked(&format!("sleep {marker}"));
                (left.iter().filter(|p| p.state != 'Z').count() == lives as usize).then_some(())
            })
            .await;
        }
    }

    async fn a_client_that_goes_away_ends_its_execute(who) {
        let daemon = Daemon::start(who).await;
        let marker = format!("7000.{}", unique().replace('-', ""));
        let mut client = ProcessServiceClient::new(daemon.new_channel());
        let request = bash(&format!("setsid sleep {marker} & sleep {marker}"));
        let call = tokio::spawn(async move { client.execute(request).await });
        wait_for("it runs", Duration::from_secs(5), || {
            (daemon.marked(&format!("sleep {marker}")).len() >= 2).then_some(())
        })
        .await;
        call.abort();
        wait_for("its tree is gone", within(GRACE), || {
            daemon.marked(&marker).is_empty().then_some(())
        })
        .await;
    }

    async fn stopping_ends_everything(who) {
        let daemon = Daemon::start_with(who, Options::default()).await;
        daemon.bash("trap '' TERM; (trap '' TERM; setsid sleep 8000) & disown; exit 0").await.expect_code(0);
        daemon.stop().await;
    }
}
