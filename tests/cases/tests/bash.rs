//! The cases of the area `bash`, through Execute of the real daemon, as root and as an ordinary
//! user. Where a case names the tool's own wording (a flag, a note), the fields that the tool will
//! make it of are checked: exit reason and output account.
#![forbid(unsafe_code)]

use std::fs;
use std::time::{Duration, Instant};

use cofferdam_e2e::{
    CellTrace, Daemon, Options, all_processes, bash, both, duration, error_info, field_violations,
    unique, wait_for, within,
};
use cofferdam_proto::v1;
use cofferdam_proto::v1::exit::Reason;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tonic::Code;

/// The exit reason of a wall limit.
fn timed_out(seconds: u64) -> Reason {
    Reason::TimedOut(v1::TimedOut {
        limit: v1::TimeLimit::Wall.into(),
        after: Some(duration(Duration::from_secs(seconds))),
    })
}

/// Everything that a retained process wrote to standard output.
async fn whole_stdout(daemon: &Daemon, process_id: &str) -> Vec<u8> {
    let request = v1::ConnectRequest { process_id: process_id.to_owned(), ..Default::default() };
    let mut events =
        daemon.processes().connect(request).await.expect("Connect answers").into_inner();
    let mut bytes = Vec::new();
    while let Some(event) = events.message().await.expect("the stream goes on") {
        match event.event {
            Some(v1::process_event::Event::Stdout(chunk)) => bytes.extend_from_slice(&chunk),
            Some(v1::process_event::Event::Lag(lag)) => panic!("output is missing: {lag:?}"),
            _ => {}
        }
    }
    bytes
}

both! {
    async fn c001_silent_background_child(who) {
        let daemon = Daemon::start(who).await;
        let run = daemon.bash_timeout("sleep 60 & echo done", 20.0).await;
        run.expect(0, "done\n").expect_within(3.0);
        assert_eq!(run.account().background_processes, 1);
    }

    async fn c002_background_child_that_prints(who) {
        let daemon = Daemon::start(who).await;
        let run = daemon
            .bash_timeout("(while :; do echo tick; sleep 0.1; done) & echo started", 20.0)
            .await;
        run.expect_code(0).expect_within(3.0);
        assert!(run.stdout().contains("started\n"), "{run:?}");
        daemon.bash("sleep 1; echo next").await.expect(0, "next\n");
    }

    async fn c004_child_that_ignores_sigterm(who) {
        let daemon = Daemon::start(who).await;
        let command = "bash -c 'trap \"\" TERM; while :; do echo x >> ALIVE; sleep 0.2; done' & wait";
        let run = daemon.bash_timeout(command, 2.0).await;
        run.expect_within(6.0);
        assert_eq!(run.reason(), &timed_out(2));
        let check = "a=$(wc -l < ALIVE); sleep 2; b=$(wc -l < ALIVE); \
                     [ $a = $b ] && echo dead || echo alive";
        daemon.bash(check).await.expect(0, "dead\n");
    }

    async fn c005_time_out_ends_the_call(who) {
        let daemon = Daemon::start(who).await;
        let run = daemon.bash_timeout("(sleep 6; touch PROOF_C) | cat", 2.0).await;
        assert_eq!(run.reason(), &timed_out(2));
        // The case waits for 8 s: the one thing that may not happen has no state to wait for.
        let check = "sleep 8; test -e PROOF_C && echo leaked || echo clean";
        daemon.bash(check).await.expect(0, "clean\n");
    }

    async fn c007_server_survives_a_successful_call(who) {
        let daemon = Daemon::start(who).await;
        let start = "nohup python3 -m http.server 8765 >srv.log 2>&1 & sleep 1; echo up";
        daemon.bash(start).await.expect(0, "up\n").expect_within(4.0);
        let ask = "exec 3<>/dev/tcp/127.0.0.1/8765; printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3; head -1 <&3";
        let run = daemon.bash(ask).await;
        run.expect_code(0);
        assert!(run.stdout().contains("200"), "{run:?}");
        let servers = daemon.marked("http.server 8765");
        assert_eq!(servers.len(), 1, "{servers:?}");
        let server = servers[0].clone();
        daemon.stop().await;
        wait_for("the server is gone", within(5.0), || {
            let same = |p: &cofferdam_e2e::Process| (p.pid, p.start) == (server.pid, server.start);
            (!all_processes().iter().any(same)).then_some(())
        })
        .await;
    }

    async fn c008_output_before_a_time_out(who) {
        let daemon = Daemon::start(who).await;
        let command = "for i in 1 2 3; do echo line$i; echo err$i >&2; done; sleep 60";
        let run = daemon.bash_timeout(command, 2.0).await;
        assert_eq!(run.stdout(), "line1\nline2\nline3\n");
        assert_eq!(run.stderr(), "err1\nerr2\nerr3\n");
        assert_eq!(run.reason(), &timed_out(2));
    }

    async fn c010_standard_input_is_at_its_end(who) {
        let daemon = Daemon::start(who).await;
        let command = "cat; echo rc=$?; read -r x; echo rc=$?; \
                       python3 -c 'import sys; print(repr(sys.stdin.read()))'";
        daemon.bash(command).await.expect(0, "rc=0\nrc=1\n''\n").expect_within(3.0);
        daemon.bash("cat").await.expect(0, "");
        daemon.bash("echo ok").await.expect(0, "ok\n");
    }

    async fn c011_no_controlling_terminal(who) {
        let daemon =
            Daemon::start_with(who, Options { on_terminal: true, ..Options::default() }).await;
        let terminal = fs::read_link(format!("/proc/{}/fd/2", daemon.pid)).expect("it has a stderr");
        assert!(terminal.starts_with("/dev/pts"), "the daemon is on a terminal: {terminal:?}");
        let command = "(echo LEAK >/dev/tty) 2>/dev/null; echo rc=$?; \
                       (read -t 5 x </dev/tty) 2>/dev/null; echo rc=$?";
        daemon.bash(command).await.expect(0, "rc=1\nrc=1\n").expect_within(3.0);
        let record = fs::read_to_string(daemon.directory().join("terminal")).expect("a record");
        assert!(!record.contains("LEAK"), "{record}");
        assert!(!daemon.log().contains("LEAK"), "{}", daemon.log());
    }

    async fn c013_no_pager_and_no_editor(who) {
        let daemon = Daemon::start(who).await;
        let log = "git init -q r && cd r && git -c user.name=a -c user.email=a@example.invalid \
                   commit -q --allow-empty -m x && git log";
        let run = daemon.bash(log).await;
        run.expect_code(0);
        assert!(run.stdout().contains("    x\n"), "{run:?}");
        assert!(!run.stdout().contains(['\u{1b}']) && !run.stdout().contains("(END)"), "{run:?}");
        let commit = "cd r && for i in 1 2; do git -c user.name=a -c user.email=a@example.invalid \
                      commit --allow-empty; echo rc=$?; done";
        let run = daemon.bash(commit).await;
        run.expect_code(0).expect_within(5.0);
        let codes: Vec<String> = run.stdout().lines().map(str::to_owned).collect();
        assert_eq!(codes.len(), 2, "{run:?}");
        assert!(codes.iter().all(|code| code.starts_with("rc=") && code != "rc=0"), "{run:?}");
    }

    async fn c014_unbalanced_quote(who) {
        let daemon = Daemon::start(who).await;
        for command in ["echo 'abc", "echo `date", "(echo a"] {
            let run = daemon.bash(command).await;
            run.expect(2, "").expect_within(3.0);
            assert!(run.stderr().contains("unexpected"), "{run:?}");
        }
        let run = daemon.bash("cat <<EOF\nnever closed").await;
        run.expect(0, "never closed\n").expect_within(3.0);
        daemon.bash("echo ok").await.expect(0, "ok\n");
    }

    async fn c016_the_shell_ends_itself(who) {
        let daemon = Daemon::start(who).await;
        daemon.bash("echo a; exit 3").await.expect(3, "a\n");
        daemon.bash("exec sh -c 'echo b; exit 5'").await.expect(5, "b\n");
        daemon.bash("set -e; echo c; false; echo no").await.expect(1, "c\n");
        let run = daemon.bash("kill -9 $$").await;
        run.expect_within(3.0);
        assert!(matches!(run.reason(), Reason::Signaled(end) if end.number == 9), "{run:?}");
        daemon.bash_timeout("sleep infinity & exit 1", 20.0).await.expect_code(1).expect_within(3.0);
        daemon.bash("echo alive").await.expect(0, "alive\n");
    }

    async fn c017_shell_options_end_with_the_call(who) {
        let daemon = Daemon::start(who).await;
        let run = daemon.bash("set -euo pipefail; echo \"$NOPE_X\"").await;
        assert!(run.code().is_some_and(|code| code != 0) && run.stdout().is_empty(), "{run:?}");
        assert!(run.stderr().contains("NOPE_X"), "{run:?}");
        daemon.bash("echo \"[$NOPE_X]\"; false; echo still").await.expect(0, "[]\nstill\n");
    }

    async fn c019_quoted_here_document(who) {
        let daemon = Daemon::start(who).await;
        let command = "cat > out.txt <<'EOF'\n\
                       it's $HOME `date` wow! \\! \\n \"q\" ${x} \\\\ %s\ttab\n\
                       EOF\n";
        daemon.bash(command).await.expect(0, "");
        let right = "48\nit's $HOME `date` wow! \\\\! \\\\n \"q\" ${x} \\\\\\\\ %s\\ttab$\n";
        daemon.bash("wc -c < out.txt; sed -n l out.txt").await.expect(0, right);
    }

    async fn c020_command_text_above_128_kib(who) {
        let daemon = Daemon::start(who).await;
        let body = "x".repeat(200_000);
        let request = bash(&format!("cat > big.txt <<'EOF'\n{body}\nEOF\nwc -c < big.txt"));
        let refused = daemon.try_run(request).await.expect_err("above the kernel's limit");
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
        let violations = field_violations(&refused);
        assert_eq!(violations[0].0, "process.command[4]");
        assert!(violations[0].1.contains("131071"), "{violations:?}");
        daemon.bash("ls big.txt 2>/dev/null; echo next").await.expect(0, "next\n");
    }

    async fn c022_first_and_last_lines_of_a_long_log(who) {
        let daemon = Daemon::start(who).await;
        let run = daemon
            .bash("echo FIRST_ERR; yes filler | head -200000; echo LAST_ERR; exit 2")
            .await;
        run.expect_code(2);
        let stdout = run.stdout();
        assert!(stdout.starts_with("FIRST_ERR\n") && stdout.ends_with("LAST_ERR\n"));
        let account = run.account().stdout.expect("an account");
        let total = 10 + 7 * 200_000 + 9;
        assert_eq!(account.total_bytes, total);
        assert_eq!(account.kept_bytes as usize, run.response.stdout.len());
        assert_eq!(account.head_bytes + account.tail_bytes, account.kept_bytes);
        assert_eq!(account.kept_bytes + account.dropped_bytes, total);
        assert!(account.dropped_bytes > 0, "{account:?}");
        assert_eq!(account.readable_bytes, total);
        let whole = whole_stdout(&daemon, &run.account().process_id).await;
        assert_eq!(whole.len() as u64, total);
        let text = String::from_utf8(whole).expect("the log is ASCII");
        assert_eq!(text.matches("LAST_ERR").count(), 1);
    }

    async fn c023_one_line_of_five_megabytes(who) {
        let daemon = Daemon::start(who).await;
        let run = daemon.bash("head -c 5000000 /dev/zero | tr '\\0' x; echo; echo END").await;
        run.expect_code(0);
        assert!(run.response.stdout.len() < 1024 * 1024, "{}", run.response.stdout.len());
        assert!(run.stdout().ends_with("x\nEND\n"));
        let account = run.account().stdout.expect("an account");
        assert_eq!(account.total_bytes, 5_000_005);
        assert_eq!(account.dropped_bytes, 5_000_005 - run.response.stdout.len() as u64);
    }

    async fn c025_separate_decoders(who) {
        let daemon = Daemon::start(who).await;
        let run = daemon
            .bash("printf '\\xe6'; printf 'E\\n' >&2; sleep 0.3; printf '\\xbc\\xa2\\n'")
            .await;
        run.expect(0, "漢\n");
        assert_eq!(run.stderr(), "E\n");
    }

    async fn c026_invalid_utf8_in_output(who) {
        let daemon = Daemon::start(who).await;
        let run = daemon
            .bash("printf 'A\\xf0\\x28\\x8c\\x28B\\n'; printf 'caf\\xe9\\n' >&2; exit 4")
            .await;
        run.expect_code(4);
        assert_eq!(run.response.stdout.as_ref(), b"A\xf0\x28\x8c\x28B\n");
        assert_eq!(run.response.stderr.as_ref(), b"caf\xe9\n");
    }

    async fn c028_nul_in_an_argument(who) {
        let daemon = Daemon::start(who).await;
        let refused = daemon.try_run(bash("touch A\0B")).await.expect_err("a NUL is refused");
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
        assert_eq!(error_info(&refused).1, "cofferdam");
        assert_eq!(field_violations(&refused)[0].0, "process.command[4]");
        daemon.bash("ls A* 2>/dev/null | wc -l").await.expect(0, "0\n");
    }

    async fn c029_progress_bars(who) {
        let daemon = Daemon::start(who).await;
        let command = "for i in $(seq 50000); do printf '\\r%d/50000' $i; done; echo; \
                       printf '\\033[31mred\\033[0m\\n'; echo END";
        let run = daemon.bash(command).await;
        run.expect_code(0);
        let stdout = run.stdout();
        for part in ["50000/50000", "red", "END"] {
            assert!(stdout.contains(part), "{part}");
        }
        let account = run.account().stdout.expect("an account");
        assert_eq!(account.kept_bytes + account.dropped_bytes, account.total_bytes);
    }

    async fn c031_two_megabytes_on_stderr(who) {
        let daemon = Daemon::start(who).await;
        let command = "head -c 2000000 /dev/zero | tr '\\0' x >&2; echo done";
        let run = daemon.bash_timeout(command, 20.0).await;
        run.expect(0, "done\n").expect_within(5.0);
        let account = run.account().stderr.expect("an account");
        assert_eq!(account.total_bytes, 2_000_000);
        assert_eq!(account.dropped_bytes, 2_000_000 - run.response.stderr.len() as u64);
        assert!(account.dropped_bytes > 0);
    }

    async fn c032_exit_status_of_a_pipeline(who) {
        let daemon = Daemon::start(who).await;
        let run = daemon.bash("sh -c 'echo FAIL >&2; exit 7' | tail -5").await;
        run.expect(0, "");
        assert_eq!(run.stderr(), "FAIL\n");
        daemon.bash("yes | head -1").await.expect(0, "y\n");
        daemon.bash("set -o pipefail; false | cat").await.expect(1, "");
    }

    async fn c034_directory_deleted_under_the_session(who) {
        let daemon = Daemon::start(who).await;
        daemon.bash("mkdir -p d && cd d && pwd").await.expect(0, "/workspace/d\n");
        daemon.bash("rm -rf /workspace/d").await.expect(0, "");
        daemon.bash("pwd; echo ok").await.expect(0, "/workspace\nok\n");
        let mut request = bash("pwd");
        request.process.as_mut().expect("it has one").cwd = "/workspace/d".to_owned();
        let run = daemon.run(request).await;
        match run.reason() {
            Reason::SandboxFailed(failed) => {
                assert_eq!((failed.step.as_str(), failed.errno), ("cwd", nix::libc::ENOENT));
            }
            other => panic!("a directory that is gone is reported: {other:?}"),
        }
    }

    async fn c035_nothing_persists_but_files(who) {
        let daemon = Daemon::start(who).await;
        daemon.bash("mkdir -p sub; cd sub && export FOO=1").await.expect(0, "");
        daemon.bash("pwd; echo ${FOO-unset}").await.expect(0, "/workspace\nunset\n");
        daemon.bash("cd nope_dir; pwd").await.expect(0, "/workspace\n");
    }

    async fn c037_utf8_locale(who) {
        let daemon = Daemon::start(who).await;
        let command = "echo 漢字; printf 'é漢\\n' | wc -m; touch é.txt; ls é.txt; \
                       python3 -c 'import sys; print(sys.stdout.encoding, len(\"é漢\"))'";
        daemon.bash(command).await.expect(0, "漢字\n3\né.txt\nutf-8 2\n");
    }

    async fn c038_exit_codes_that_mean_something(who) {
        let daemon = Daemon::start(who).await;
        for (command, status) in [
            ("nosuchcmd_x", 127),
            ("touch n.sh; ./n.sh", 126),
            ("sh -c 'kill -SEGV $$'", 139),
            ("exit 255", 255),
            ("exit 256", 0),
            ("bash -c 'exit 77'", 77),
        ] {
            assert_eq!(daemon.bash(command).await.shell_status(), status, "{command}");
        }
    }

    async fn c040_zombies_are_reaped(who) {
        let daemon = Daemon::start(who).await;
        let orphans = "for i in $(seq 300); do (setsid true &); done; sleep 1; \
                       grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l";
        let run = daemon.bash(orphans).await;
        run.expect_code(0);
        let zombies: u32 = run.stdout().trim().parse().expect("a count");
        assert!(zombies <= 2, "{run:?}");
        let waits = "for i in $(seq 200); do (exit 9) || [ $? = 9 ] || echo BAD; done; echo ok";
        daemon.bash(waits).await.expect(0, "ok\n");
    }

    async fn c041_kill_reaches_nobody_else(who) {
        let (a, b) = (Daemon::start(who).await, Daemon::start(who).await);
        let pid = b.bash("sleep 300 & echo $!").await.expect_code(0).stdout();
        let run = a.bash("kill -9 -1; pkill -9 -f .; true").await;
        assert!(
            matches!(run.reason(), Reason::Exited(_) | Reason::Signaled(_) | Reason::Lost(_)),
            "{run:?}"
        );
        let run = a.bash("echo ok; ls -d /proc/[0-9]* | wc -l").await;
        run.expect_code(0);
        let stdout = run.stdout();
        let (ok, count) = stdout.split_once('\n').expect("two lines");
        assert_eq!(ok, "ok");
        assert!(count.trim().parse::<u32>().expect("a count") < 10, "{stdout}");
        b.bash(&format!("grep -c sleep /proc/{}/comm", pid.trim())).await.expect(0, "1\n");
        for daemon in [&a, &b] {
            assert_eq!(daemon.workspace_info().await.daemon_pid as i32, daemon.pid);
        }
    }

    async fn c043_empty_and_blank_commands(who) {
        let daemon = Daemon::start(who).await;
        for command in ["", "   ", "\n\n", "# only a note", ":"] {
            daemon.bash(command).await.expect(0, "").expect_within(2.0);
        }
    }

    async fn c044_output_that_imitates_the_end(who) {
        let daemon = Daemon::start(who).await;
        daemon.bash("printf abc; exit 5").await.expect(5, "abc");
        let lines = "exit code: 0\n__DONE__0\n###EXIT 0\n";
        let command = "echo 'exit code: 0'; echo __DONE__0; echo '###EXIT 0'; exit 9";
        daemon.bash(command).await.expect(9, lines);
        daemon.bash("false").await.expect(1, "");
        daemon.bash("echo $?").await.expect(0, "0\n");
    }

    async fn c046_messages_above_four_mebibytes(who) {
        let daemon = Daemon::start(who).await;
        let run = daemon.bash("head -c 6000000 /dev/urandom | base64 -w0").await;
        run.expect_code(0);
        let account = run.account().stdout.expect("an account");
        assert_eq!(account.total_bytes, 8_000_000);
        assert_eq!(account.kept_bytes as usize, run.response.stdout.len());
        assert!(run.response.stdout.len() < 1024 * 1024);
        let whole = whole_stdout(&daemon, &run.account().process_id).await;
        assert_eq!(whole.len(), 8_000_000);
        let request = v1::ExecuteRequest {
            stdin: "é".repeat(3_000_000).into(),
            ..bash("cat > w.txt; wc -c < w.txt")
        };
        daemon.run(request).await.expect(0, "6000000\n");
    }

    async fn c047_the_cell_dies_during_a_call(who) {
        let daemon = Daemon::start(who).await;
        let trace = CellTrace::of(daemon.pid);
        let channel = daemon.new_channel();
        let request = bash("echo partial; sleep 30");
        let call = tokio::spawn(async move {
            let mut client = v1::process_service_client::ProcessServiceClient::new(channel);
            client.execute(request).await
        });
        wait_for("the command runs", Duration::from_secs(10), || {
            // Not the shell, which may not have printed yet.
            daemon.cell().iter().any(|p| p.command_line == "sleep 30").then_some(())
        })
        .await;
        kill(Pid::from_raw(daemon.init().pid), Signal::SIGKILL).expect("root can kill it");
        let start = Instant::now();
        let answer = call.await.expect("no panic").expect("an answer").into_inner();
        assert!(start.elapsed() < within(5.0), "{:?}", start.elapsed());
        assert_eq!(answer.exit.and_then(|exit| exit.reason), Some(Reason::Lost(v1::Lost {})));
        assert_eq!(answer.stdout.as_ref(), b"partial\n");
        daemon.bash("echo next").await.expect(0, "next\n");
        assert_eq!(daemon.workspace_info().await.cell_generation, 2);
        wait_for("the first cell is gone", Duration::from_secs(5), || {
            trace.left().is_empty().then_some(())
        })
        .await;
    }

    async fn c049_umask_and_ownership(who) {
        let options = Options { umask: Some("077"), ..Options::default() };
        let daemon = Daemon::start_with(who, options).await;
        let command = "umask; touch f; mkdir dd; stat -c %a f dd";
        daemon.bash(command).await.expect(0, "0022\n644\n755\n");
        let request = v1::ExecuteRequest { request_id: unique(), ..bash("stat -c %u f; id -u") };
        let owners = daemon.run(request).await.stdout();
        let ids: Vec<&str> = owners.lines().collect();
        assert_eq!(ids.len(), 2);
        assert_eq!(ids[0], ids[1], "the cell's programs own what they make");
    }
}
