//! `cofferdam exec` behaves as a good shell tool does.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::place::{Ended, Kept, Place, processes_with, unique_seconds, wait_until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

#[test]
fn streams_stay_apart_and_the_status_passes_through() {
    let place = Place::new();
    let script = "printf 'o\\377\\000ut'; printf err >&2; exit 7";
    let output = place.exec(&[], &["sh", "-c", script]).output().unwrap();
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(output.stdout, b"o\xff\0ut");
    assert_eq!(output.stderr, b"err");
}

#[test]
fn input_passes_through_to_its_last_byte() {
    let place = Place::new();
    let bytes: Vec<u8> =
        (0..3_000_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let mut command = place.exec(&[], &["cat"]);
    let mut child = Kept(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
    let mut stdin = child.0.stdin.take().unwrap();
    let copy = bytes.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&copy).unwrap());
    let mut got = Vec::new();
    child.0.stdout.take().unwrap().read_to_end(&mut got).unwrap();
    writer.join().unwrap();
    assert!(got == bytes, "{} bytes of {} came back", got.len(), bytes.len());
    assert_eq!(child.0.wait().unwrap().code(), Some(0));
}

#[test]
fn a_slow_reader_gets_every_byte_as_from_a_pipe() {
    const BYTES: usize = 64 * 1024 * 1024;
    let place = Place::new();
    let script = format!("head -c {BYTES} /dev/zero; echo end");
    let mut command = place.exec(&[], &["sh", "-c", &script]);
    let mut child = Kept(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut stdout = child.0.stdout.take().unwrap();
    let (mut total, mut buffer, mut end) = (0, vec![0; 1 << 20], Vec::new());
    while let count @ 1.. = stdout.read(&mut buffer).unwrap() {
        // Four times what the daemon keeps goes by while this reader sleeps now and then.
        if total % (8 << 20) < count {
            std::thread::sleep(Duration::from_millis(50));
        }
        total += count;
        end.extend_from_slice(&buffer[count.saturating_sub(4)..count]);
    }
    assert_eq!(total, BYTES + 4);
    assert!(end.ends_with(b"end\n"));
    assert_eq!(child.0.wait().unwrap().code(), Some(0));
}

#[test]
fn a_program_that_reads_no_input_does_not_wait_for_it() {
    let place = Place::new();
    let mut command = place.exec(&[], &["true"]);
    // Nobody writes to this pipe, and nobody closes it before the end.
    let mut child = Kept(command.stdin(Stdio::piped()).spawn().unwrap());
    let stdin = child.0.stdin.take();
    assert_eq!(child.0.wait().unwrap().code(), Some(0));
    drop(stdin);
}

#[test]
fn what_cannot_be_started_says_why() {
    let place = Place::new();
    let exec = |text: &str| format!("cofferdam: exec: {text}\n");
    assert_eq!(
        place.run(&[], &["no-such-program"]),
        Ended::new(127, "", &exec("no-such-program: No such file or directory"))
    );
    assert_eq!(
        place.run(&[], &["/etc/passwd"]),
        Ended::new(126, "", &exec("/etc/passwd: Permission denied"))
    );
    assert_eq!(
        place.run(&["--cwd", "/no/such"], &["true"]),
        Ended::new(125, "", &exec("directory /no/such: No such file or directory"))
    );
}

#[test]
fn limits_end_the_tree_with_status_124() {
    let place = Place::new();
    let seconds = unique_seconds();
    let script = format!("setsid sleep {seconds} & sleep {seconds}");
    let ended = place.run(&["--timeout", "200ms"], &["bash", "-c", &script]);
    let said = "cofferdam: exec: bash: timed out after 200ms\n";
    assert_eq!(ended, Ended::new(124, "", said));
    assert_eq!(processes_with(&seconds), 0);
    let ended = place.run(&["--idle-timeout", "200ms"], &["sleep", &seconds]);
    let said = "cofferdam: exec: sleep: timed out after no output for 200ms\n";
    assert_eq!(ended, Ended::new(124, "", said));
}

#[test]
fn a_signal_that_ends_the_program_becomes_128_and_its_number() {
    let place = Place::new();
    assert_eq!(place.run(&[], &["sh", "-c", "kill -SEGV $$"]), Ended::new(139, "", ""));
}

#[test]
fn environment_directory_and_session_are_passed() {
    let place = Place::new();
    let options = ["--env", "A=one", "--env", "B=two=2", "--cwd", "/tmp", "--session", "other"];
    let ended = place.run(&options, &["sh", "-c", "echo $A $B $PWD"]);
    assert_eq!(ended, Ended::new(0, "one two=2 /tmp\n", ""));
}

#[test]
fn a_read_only_call_changes_nothing_in_the_workspace() {
    let place = Place::new();
    let ended = place.run(&["--read-only"], &["sh", "-c", "echo x > f"]);
    assert_ne!(ended.status, Some(0));
    assert!(!place.workspace().join("f").exists());
    assert_eq!(place.run(&[], &["sh", "-c", "echo x > f"]), Ended::new(0, "", ""));
    assert_eq!(fs::read_to_string(place.workspace().join("f")).unwrap(), "x\n");
}

#[test]
fn a_reader_that_goes_away_ends_everything_quietly() {
    let place = Place::new();
    let word = unique_seconds();
    let mut command = place.exec(&[], &["yes", &word]);
    let mut child = Kept(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, format!("{word}\n"));
    assert_eq!(child.0.wait().unwrap().code(), Some(141));
    let mut said = String::new();
    child.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(said, "");
    assert_eq!(processes_with(&word), 0);
}

#[test]
fn signals_reach_the_programs_group() {
    let place = Place::new();
    for (signal, name) in
        [(Signal::SIGTERM, "TERM"), (Signal::SIGINT, "INT"), (Signal::SIGHUP, "HUP")]
    {
        let script = format!(
            "trap 'echo got {name}; exit 5' {name}; echo ready; while :; do sleep 0.05; done"
        );
        let mut command = place.exec(&[], &["bash", "-c", &script]);
        let mut child = Kept(command.stdout(Stdio::piped()).spawn().unwrap());
        let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "ready");
        kill(Pid::from_raw(child.0.id() as i32), signal).unwrap();
        assert_eq!(lines.next().unwrap().unwrap(), format!("got {name}"));
        assert_eq!(child.0.wait().unwrap().code(), Some(5));
    }
}

#[test]
fn a_killed_exec_leaves_nothing() {
    let place = Place::new();
    let seconds = unique_seconds();
    let script = format!("setsid sleep {seconds} & sleep {seconds}");
    let mut child = Kept(place.exec(&[], &["bash", "-c", &script]).spawn().unwrap());
    wait_until("both run", || processes_with(&seconds) == 2);
    child.0.kill().unwrap();
    wait_until("nothing runs", || processes_with(&seconds) == 0);
}

#[test]
fn a_daemon_that_dies_leaves_an_unknown_outcome_and_the_next_call_works() {
    let place = Place::new();
    let seconds = unique_seconds();
    let mut command = place.exec(&[], &["sleep", &seconds]);
    let child = Kept(command.stderr(Stdio::piped()).spawn().unwrap());
    wait_until("it runs", || processes_with(&seconds) == 1);
    place.end_daemon(Signal::SIGKILL);
    let mut child = child;
    assert_eq!(child.0.wait().unwrap().code(), Some(125));
    let mut said = String::new();
    child.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.starts_with("cofferdam: exec: Start: outcome unknown"), "{said}");
    assert_eq!(place.run(&[], &["echo", "again"]), Ended::new(0, "again\n", ""));
}

#[test]
fn a_daemon_that_drains_ends_its_calls_and_the_next_one_takes_new_ones() {
    let place = Place::new();
    let seconds = unique_seconds();
    let mut command = place.exec(&[], &["sh", "-c", "echo ready; sleep \"$0\"", &seconds]);
    let mut child = Kept(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    let old = place.daemon().unwrap();
    kill(old, Signal::SIGTERM).unwrap();
    // It waits for the old daemon's end, which lets the running call go on for its grace.
    let ended = place.run(&[], &["echo", "new"]);
    assert_eq!(ended, Ended::new(0, "new\n", ""));
    assert_ne!(place.daemon(), Some(old));
    assert_eq!(child.0.wait().unwrap().code(), Some(130));
}

#[test]
fn many_at_once_share_one_daemon() {
    let place = Place::new();
    let children: Vec<_> = (0..12)
        .map(|_| {
            let mut command = place.exec(&[], &["sh", "-c", "echo ok"]);
            Kept(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
        })
        .collect();
    for mut child in children {
        let mut said = String::new();
        child.0.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        child.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!((child.0.wait().unwrap().code(), said.as_str()), (Some(0), "ok\n"));
    }
    let log = fs::read_to_string(place.state().join("daemon.log")).unwrap();
    assert_eq!(log.matches("serving").count(), 1, "{log}");
}

#[test]
fn a_daemon_that_ends_when_idle_is_replaced_without_a_lost_call() {
    let place = Place::new();
    for round in 0..10 {
        let ended = place.run(&["--idle-exit", "1s"], &["echo", "x"]);
        assert_eq!(ended, Ended::new(0, "x\n", ""), "round {round}");
        // The next call comes while the daemon ends, a little earlier or later each time.
        std::thread::sleep(Duration::from_millis(990 + 3 * round));
    }
    wait_until("the last daemon has ended", || place.daemon().is_none());
    assert!(!place.state().join("daemon.sock").exists());
    assert!(!place.state().join("address").exists());
}

#[test]
fn another_policy_than_the_running_one_is_refused() {
    let place = Place::new();
    let policy = place.path().join("policy.toml");
    fs::write(&policy, "debug = true\n").unwrap();
    let with_policy = ["--policy", policy.to_str().unwrap()];
    assert_eq!(place.run(&[], &["true"]).status, Some(0));
    let refused = place.run(&with_policy, &["true"]);
    assert_eq!(refused.status, Some(125));
    assert!(refused.stderr.contains("and the policy asked for is"), "{}", refused.stderr);
    place.end_daemon(Signal::SIGTERM);
    assert_eq!(place.run(&with_policy, &["true"]), Ended::new(0, "", ""));
    assert_eq!(place.run(&with_policy, &["true"]), Ended::new(0, "", ""));
}

#[test]
fn the_reason_of_a_daemon_that_does_not_start_is_told() {
    let place = Place::new();
    let policy = place.path().join("policy.toml");
    fs::write(&policy, "cell.uid = 0\ntmp_bytes = 1\n").unwrap();
    let ended = place.run(&["--policy", policy.to_str().unwrap()], &["true"]);
    assert_eq!(ended.status, Some(125));
    for problem in ["cell.uid = 0", "tmp_bytes = 1"] {
        assert!(ended.stderr.contains(problem), "{}", ended.stderr);
    }
}

#[test]
fn json_tells_everything_about_one_call() {
    let place = Place::new();
    let ended = place.run(&["--json"], &["sh", "-c", "echo out; echo err >&2; exit 3"]);
    assert_eq!((ended.status, ended.stderr.as_str()), (Some(3), ""));
    let object: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(object["exit"], serde_json::json!({ "reason": "exited", "code": 3 }));
    assert_eq!((&object["stdout"], &object["stderr"]), (&"out\n".into(), &"err\n".into()));
    assert_eq!(object["enforcement"]["level"], "namespaces");
}

#[test]
fn an_address_from_the_environment_is_used_and_a_flag_is_stronger() {
    let place = Place::new();
    assert_eq!(place.run(&[], &["true"]).status, Some(0));
    let address = fs::read_to_string(place.state().join("address")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_cofferdam"));
    command.args(["exec", "--", "pwd"]).env("COFFERDAM_ADDR", address.trim()).stdin(Stdio::null());
    assert_eq!(Ended::of(command.output().unwrap()), Ended::new(0, "/workspace\n", ""));
    command.env("COFFERDAM_ADDR", "unix:/no/such/socket");
    let ended = Ended::of(command.output().unwrap());
    assert_eq!(ended.status, Some(125));
    assert!(ended.stderr.contains("the daemon cannot be reached"), "{}", ended.stderr);
    let mut command = place.exec(&[], &["true"]);
    command.env("COFFERDAM_ADDR", "unix:/no/such/socket");
    assert_eq!(Ended::of(command.output().unwrap()), Ended::new(0, "", ""));
}
