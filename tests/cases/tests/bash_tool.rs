//! The cases of the area `bash` again, through the tool: what the model sees of each.
#![forbid(unsafe_code)]

use std::fs;
use std::time::{Duration, Instant};

use cofferdam_e2e::{
    CellTrace, Daemon, Options, ToolReply, all_processes, both, call_tool, tools_of, wait_for,
    within,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

/// Most bytes of a stream in an answer, without the line that tells of the gap.
const STREAM_BYTES_MAX: usize = 51_200;

/// Most lines of a stream in an answer.
const STREAM_LINES_MAX: usize = 2000;

/// The line that stands where a stream was cut.
#[derive(Debug)]
struct Gap {
    first: usize,
    last: usize,
    total: usize,
    path: String,
}

/// Takes a cut stream apart: head, gap, tail.
#[track_caller]
fn gap<'a>(reply: &'a ToolReply, stream: &str) -> (Vec<&'a str>, Gap, Vec<&'a str>) {
    assert!(reply.ok().flag("truncated"), "{}", reply.describe());
    let text = reply.text(stream);
    let lines: Vec<&str> = text.lines().collect();
    let start = format!("[{stream} truncated: showing first ");
    let at = lines.iter().position(|line| line.starts_with(&start));
    let at = at.unwrap_or_else(|| panic!("no line tells of the gap: {}", reply.describe()));
    let parsed = lines[at].strip_prefix(&start).and_then(|rest| {
        let (first, rest) = rest.split_once(" and last ")?;
        let (last, rest) = rest.split_once(" of ")?;
        let (total, rest) = rest.split_once(" lines; all of it: ")?;
        let path = rest.strip_suffix(']')?.to_owned();
        let number = |text: &str| text.parse().ok();
        Some(Gap { first: number(first)?, last: number(last)?, total: number(total)?, path })
    });
    let gap = parsed.unwrap_or_else(|| panic!("an odd line: {}", lines[at]));
    assert!(text.len() <= STREAM_BYTES_MAX + lines[at].len() + 2, "{}", text.len());
    assert!(lines.len() <= STREAM_LINES_MAX + 1, "{}", lines.len());
    (lines[..at].to_vec(), gap, lines[at + 1..].to_vec())
}

/// Whether anything but the streams says a word.
fn mentions(reply: &ToolReply, words: &[&str]) -> bool {
    let mut rest = reply.json.clone();
    let fields = rest.as_object_mut().expect("an object");
    fields.remove("stdout");
    fields.remove("stderr");
    let rest = rest.to_string();
    words.iter().any(|word| rest.contains(word))
}

both! {
    async fn c001_silent_background_child(who) {
        let daemon = Daemon::start(who).await;
        let run = daemon.shell_timeout("sleep 60 & echo done", 20).await;
        run.expect(0, "done\n").expect_within(3.0);
        assert!(!run.flag("truncated"));
    }

    async fn c002_background_child_that_prints(who) {
        let daemon = Daemon::start(who).await;
        let command = "(while :; do echo tick; sleep 0.1; done) & echo started";
        let run = daemon.shell_timeout(command, 20).await;
        run.expect_code(0).expect_within(3.0);
        assert!(run.text("stdout").contains("started\n"), "{}", run.describe());
        daemon.shell("sleep 1; echo next").await.expect(0, "next\n");
    }

    async fn c004_child_that_ignores_sigterm(who) {
        let daemon = Daemon::start(who).await;
        let command = "bash -c 'trap \"\" TERM; while :; do echo x >> ALIVE; sleep 0.2; done' & wait";
        daemon.shell_timeout(command, 2).await.expect_within(6.0).expect_timed_out();
        let check = "a=$(wc -l < ALIVE); sleep 2; b=$(wc -l < ALIVE); \
                     [ $a = $b ] && echo dead || echo alive";
        daemon.shell(check).await.expect(0, "dead\n");
    }

    async fn c005_time_out_ends_the_call(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell_timeout("(sleep 6; touch PROOF_C) | cat", 2).await.expect_timed_out();
        // The case waits for 8 s: the one thing that may not happen has no state to wait for.
        let check = "sleep 8; test -e PROOF_C && echo leaked || echo clean";
        daemon.shell(check).await.expect(0, "clean\n");
    }

    async fn c007_server_survives_a_successful_call(who) {
        let daemon = Daemon::start(who).await;
        let start = "nohup python3 -m http.server 8765 >srv.log 2>&1 & sleep 1; echo up";
        daemon.shell(start).await.expect(0, "up\n").expect_within(4.0);
        let ask = "exec 3<>/dev/tcp/127.0.0.1/8765; printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3; head -1 <&3";
        let run = daemon.shell(ask).await;
        run.expect_code(0);
        assert!(run.text("stdout").contains("200"), "{}", run.describe());
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
        let run = daemon.shell_timeout(command, 2).await;
        run.expect_timed_out();
        assert_eq!(run.text("stdout"), "line1\nline2\nline3\n");
        assert!(run.text("stderr").starts_with("err1\nerr2\nerr3\n"), "{}", run.describe());
        let named = ["2 s", "2s", "2 seconds"];
        let said = mentions(&run, &named) || named.iter().any(|n| run.text("stderr").contains(n));
        assert!(said, "the limit is named: {}", run.describe());
    }

    async fn c010_standard_input_is_at_its_end(who) {
        let daemon = Daemon::start(who).await;
        let command = "cat; echo rc=$?; read -r x; echo rc=$?; \
                       python3 -c 'import sys; print(repr(sys.stdin.read()))'";
        daemon.shell(command).await.expect(0, "rc=0\nrc=1\n''\n").expect_within(3.0);
        daemon.shell("cat").await.expect(0, "");
        daemon.shell("echo ok").await.expect(0, "ok\n");
    }

    async fn c011_no_controlling_terminal(who) {
        let daemon =
            Daemon::start_with(who, Options { on_terminal: true, ..Options::default() }).await;
        let command = "(echo LEAK >/dev/tty) 2>/dev/null; echo rc=$?; \
                       (read -t 5 x </dev/tty) 2>/dev/null; echo rc=$?";
        daemon.shell(command).await.expect(0, "rc=1\nrc=1\n").expect_within(3.0);
        let record = fs::read_to_string(daemon.directory().join("terminal")).expect("a record");
        assert!(!record.contains("LEAK") && !daemon.log().contains("LEAK"), "{record}");
    }

    async fn c013_no_pager_and_no_editor(who) {
        let daemon = Daemon::start(who).await;
        let log = "git init -q r && cd r && git -c user.name=a -c user.email=a@example.invalid \
                   commit -q --allow-empty -m x && git log";
        let run = daemon.shell(log).await;
        run.expect_code(0);
        let stdout = run.text("stdout");
        assert!(stdout.contains("    x\n"), "{stdout}");
        assert!(!stdout.contains('\u{1b}') && !stdout.contains("(END)"), "{stdout}");
        let commit = "cd r && for i in 1 2; do git -c user.name=a -c user.email=a@example.invalid \
                      commit --allow-empty; echo rc=$?; done";
        let run = daemon.shell(commit).await;
        run.expect_code(0).expect_within(5.0);
        let codes: Vec<&str> =
            run.text("stdout").lines().filter(|line| line.starts_with("rc=")).collect();
        assert!(codes.len() == 2 && !codes.contains(&"rc=0"), "{}", run.describe());
    }

    async fn c014_unbalanced_quote(who) {
        let daemon = Daemon::start(who).await;
        for command in ["echo 'abc", "echo `date", "(echo a"] {
            let run = daemon.shell(command).await;
            run.expect(2, "").expect_within(3.0);
            assert!(run.text("stderr").contains("unexpected"), "{}", run.describe());
        }
        let run = daemon.shell("cat <<EOF\nnever closed").await;
        run.expect(0, "never closed\n").expect_within(3.0);
        daemon.shell("echo ok").await.expect(0, "ok\n");
    }

    async fn c016_the_shell_ends_itself(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("echo a; exit 3").await.expect(3, "a\n");
        daemon.shell("exec sh -c 'echo b; exit 5'").await.expect(5, "b\n");
        daemon.shell("set -e; echo c; false; echo no").await.expect(1, "c\n");
        let killed = daemon.shell("kill -9 $$").await;
        killed.expect_code(137).expect_within(3.0);
        daemon.shell_timeout("sleep infinity & exit 1", 20).await.expect_code(1).expect_within(3.0);
        daemon.shell("echo alive").await.expect(0, "alive\n");
    }

    async fn c017_shell_options_end_with_the_call(who) {
        let daemon = Daemon::start(who).await;
        let run = daemon.shell("set -euo pipefail; echo \"$NOPE_X\"").await;
        run.expect(1, "");
        assert!(run.text("stderr").contains("NOPE_X"), "{}", run.describe());
        daemon.shell("echo \"[$NOPE_X]\"; false; echo still").await.expect(0, "[]\nstill\n");
    }

    async fn c019_quoted_here_document(who) {
        let daemon = Daemon::start(who).await;
        let command = "cat > out.txt <<'EOF'\n\
                       it's $HOME `date` wow! \\! \\n \"q\" ${x} \\\\ %s\ttab\n\
                       EOF\n";
        daemon.shell(command).await.expect(0, "");
        let right = "48\nit's $HOME `date` wow! \\\\! \\\\n \"q\" ${x} \\\\\\\\ %s\\ttab$\n";
        daemon.shell("wc -c < out.txt; sed -n l out.txt").await.expect(0, right);
    }

    async fn c020_command_text_above_128_kib(who) {
        let daemon = Daemon::start(who).await;
        let body = "x".repeat(200_000);
        let command = format!("cat > big.txt <<'EOF'\n{body}\nEOF\nwc -c < big.txt");
        daemon.shell(&command).await.expect(0, "200001\n");
        // Its file is gone, and nothing of it lies where the command runs.
        daemon.shell("ls -A").await.expect(0, "big.txt\n");
    }

    async fn c022_first_and_last_lines_of_a_long_log(who) {
        let daemon = Daemon::start(who).await;
        let command = "echo FIRST_ERR; yes filler | head -200000; echo LAST_ERR; exit 2";
        let run = daemon.shell(command).await;
        run.expect_code(2);
        let (head, gap, tail) = gap(&run, "stdout");
        assert_eq!((head.len(), tail.len(), gap.total), (gap.first, gap.last, 200_002), "{gap:?}");
        assert_eq!((head[0], tail[tail.len() - 1]), ("FIRST_ERR", "LAST_ERR"));
        assert!(head[1..].iter().chain(&tail[..tail.len() - 1]).all(|line| *line == "filler"));
        // A quarter head, three quarters tail of the 2,000 lines, which end before the bytes do.
        assert_eq!((gap.first, gap.last), (500, 1500));
        let look = format!("grep -c LAST_ERR {0}; wc -l < {0}", gap.path);
        daemon.shell(&look).await.expect(0, "1\n200002\n");
    }

    async fn c023_one_line_of_five_megabytes(who) {
        let daemon = Daemon::start(who).await;
        let run = daemon.shell("head -c 5000000 /dev/zero | tr '\\0' x; echo; echo END").await;
        run.expect_code(0);
        assert!(run.flag("truncated"), "{}", run.describe());
        let stdout = run.text("stdout");
        assert!(stdout.len() <= STREAM_BYTES_MAX + 1024, "{}", stdout.len());
        assert!(stdout.ends_with("\nEND\n") && stdout.contains("xxx"), "{}", run.describe());
    }

    async fn c025_separate_decoders(who) {
        let daemon = Daemon::start(who).await;
        let command = "printf '\\xe6'; printf 'E\\n' >&2; sleep 0.3; printf '\\xbc\\xa2\\n'";
        let run = daemon.shell(command).await;
        run.expect(0, "漢\n");
        assert_eq!(run.text("stderr"), "E\n");
    }

    async fn c026_invalid_utf8_in_output(who) {
        let daemon = Daemon::start(who).await;
        let command = "printf 'A\\xf0\\x28\\x8c\\x28B\\n'; printf 'caf\\xe9\\n' >&2; exit 4";
        let run = daemon.shell(command).await;
        run.expect(4, "A\u{fffd}(\u{fffd}(B\n");
        assert_eq!(run.text("stderr"), "caf\u{fffd}\n");
        assert!(mentions(&run, &["lossy", "UTF-8"]), "it is marked: {}", run.describe());
        let clean = daemon.shell("echo clean").await;
        assert!(!mentions(&clean, &["\"lossy\":true", "UTF-8"]), "{}", clean.describe());
    }

    async fn c028_nul_in_an_argument(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("touch A\0B").await.err();
        daemon.read("a\0b").await.err();
        daemon.read("/workspace/a\0b").await.err();
        daemon.glob("*\0").await.err();
        daemon.shell("ls A* 2>/dev/null | wc -l").await.expect(0, "0\n");
    }

    async fn c029_progress_bars(who) {
        let daemon = Daemon::start(who).await;
        let command = "for i in $(seq 50000); do printf '\\r%d/50000' $i; done; echo; \
                       printf '\\033[31mred\\033[0m\\n'; echo END";
        let run = daemon.shell(command).await;
        run.expect_code(0);
        let stdout = run.text("stdout");
        assert!(stdout.len() <= 20_000, "redraws collapse: {}", stdout.len());
        for part in ["50000/50000", "red", "END"] {
            assert!(stdout.contains(part), "{part}: {stdout}");
        }
        assert!(!stdout.contains("49999/50000"), "{stdout}");
    }

    async fn c031_two_megabytes_on_stderr(who) {
        let daemon = Daemon::start(who).await;
        let command = "head -c 2000000 /dev/zero | tr '\\0' x >&2; echo done";
        let run = daemon.shell_timeout(command, 20).await;
        run.expect(0, "done\n").expect_within(5.0);
        assert!(run.flag("truncated"), "{}", run.describe());
        let stderr = run.text("stderr");
        assert!(stderr.contains("[stderr truncated: "), "{}", run.describe());
        assert!(stderr.len() <= STREAM_BYTES_MAX + 1024, "{}", stderr.len());
    }

    async fn c032_exit_status_of_a_pipeline(who) {
        let daemon = Daemon::start(who).await;
        let run = daemon.shell("sh -c 'echo FAIL >&2; exit 7' | tail -5").await;
        run.expect(0, "");
        assert_eq!(run.text("stderr"), "FAIL\n");
        let said = run.json.to_string().to_lowercase();
        assert!(!said.contains("success") && !said.contains("passed"), "{said}");
        daemon.shell("yes | head -1").await.expect(0, "y\n");
        daemon.shell("set -o pipefail; false | cat").await.expect(1, "");
    }

    async fn c034_directory_deleted_under_the_session(who) {
        let daemon = Daemon::start(who).await;
        daemon.put_text("file.txt", "text\n");
        daemon.shell("mkdir -p d && cd d && pwd").await.expect(0, "/workspace/d\n");
        daemon.shell("rm -rf /workspace/d").await.expect(0, "");
        daemon.shell("pwd; echo ok").await.expect(0, "/workspace\nok\n");
        daemon.glob("*").await.expect_paths(&["/workspace/file.txt"]);
        daemon.read("/workspace/file.txt").await.expect_content("1: text");
    }

    async fn c035_nothing_persists_but_files(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("mkdir -p sub; cd sub && export FOO=1").await.expect(0, "");
        daemon.shell("pwd; echo ${FOO-unset}").await.expect(0, "/workspace\nunset\n");
        daemon.shell("cd nope_dir; pwd").await.expect(0, "/workspace\n");
        let refused = daemon.write("rel.txt", "x").await.err();
        let right = "filePath must be an absolute path. Received: \"rel.txt\". \
                     Use an absolute path such as /workspace/foo.ts";
        assert!(refused.message.starts_with(right), "{refused:?}");
        daemon.write("/workspace/rel.txt", "x").await.ok();
        daemon.shell("cd /workspace && find . -name rel.txt").await.expect(0, "./rel.txt\n");
    }

    async fn c037_utf8_locale(who) {
        let daemon = Daemon::start(who).await;
        let command = "echo 漢字; printf 'é漢\\n' | wc -m; touch é.txt; ls é.txt; \
                       python3 -c 'import sys; print(sys.stdout.encoding, len(\"é漢\"))'";
        daemon.shell(command).await.expect(0, "漢字\n3\né.txt\nutf-8 2\n");
    }

    async fn c038_exit_codes_that_mean_something(who) {
        let daemon = Daemon::start(who).await;
        for (command, code) in [
            ("nosuchcmd_x", 127),
            ("touch n.sh; ./n.sh", 126),
            ("sh -c 'kill -SEGV $$'", 139),
            ("exit 255", 255),
            ("exit 256", 0),
            ("bash -c 'exit 77'", 77),
        ] {
            daemon.shell(command).await.expect_code(code);
        }
    }

    async fn c040_zombies_are_reaped(who) {
        let daemon = Daemon::start(who).await;
        let orphans = "for i in $(seq 300); do (setsid true &); done; sleep 1; \
                       grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l";
        let run = daemon.shell(orphans).await;
        run.expect_code(0);
        let zombies: u32 = run.text("stdout").trim().parse().expect("a count");
        assert!(zombies <= 2, "{}", run.describe());
        let waits = "for i in $(seq 200); do (exit 9) || [ $? = 9 ] || echo BAD; done; echo ok";
        daemon.shell(waits).await.expect(0, "ok\n");
    }

    async fn c041_kill_reaches_nobody_else(who) {
        let (a, b) = (Daemon::start(who).await, Daemon::start(who).await);
        let sleep = b.shell("sleep 300 & echo $!").await;
        let pid = sleep.expect_code(0).text("stdout").trim().to_owned();
        let killed = a.shell("kill -9 -1; pkill -9 -f .; true").await;
        if killed.is_error {
            killed.err();
        }
        let run = a.shell("echo ok; ls -d /proc/[0-9]* | wc -l").await;
        run.expect_code(0);
        let (ok, count) = run.text("stdout").split_once('\n').expect("two lines");
        assert_eq!(ok, "ok");
        assert!(count.trim().parse::<u32>().expect("a count") < 10, "{}", run.describe());
        b.shell(&format!("grep -c sleep /proc/{pid}/comm")).await.expect(0, "1\n");
        for daemon in [&a, &b] {
            assert_eq!(daemon.workspace_info().await.daemon_pid as i32, daemon.pid);
        }
    }

    async fn c043_empty_and_blank_commands(who) {
        let daemon = Daemon::start(who).await;
        for command in ["", "   ", "\n\n"] {
            let run = daemon.shell(command).await;
            run.expect_within(2.0);
            if run.is_error {
                run.err_with("command");
            } else {
                run.expect(0, "");
            }
        }
        for command in ["# only a note", ":"] {
            daemon.shell(command).await.expect(0, "").expect_within(2.0);
        }
    }

    async fn c044_output_that_imitates_the_end(who) {
        let daemon = Daemon::start(who).await;
        daemon.shell("printf abc; exit 5").await.expect(5, "abc");
        let lines = "exit code: 0\n__DONE__0\n###EXIT 0\n";
        let command = "echo 'exit code: 0'; echo __DONE__0; echo '###EXIT 0'; exit 9";
        daemon.shell(command).await.expect(9, lines);
        daemon.shell("false").await.expect(1, "");
        daemon.shell("echo $?").await.expect(0, "0\n");
    }

    async fn c046_messages_above_four_mebibytes(who) {
        let daemon = Daemon::start(who).await;
        let run = daemon.shell("head -c 6000000 /dev/urandom | base64 -w0").await;
        run.expect_code(0);
        assert!(run.flag("truncated"), "{}", run.describe());
        assert!(run.text("stdout").len() <= STREAM_BYTES_MAX + 1024);
        let make = "head -c 6000000 /dev/zero | tr '\\0' a > big; echo >> big";
        daemon.shell(make).await.expect(0, "");
        let read = daemon.read("/workspace/big").await;
        assert!(read.ok().flag("truncated"), "{}", read.describe());
        assert!(read.text("content").len() <= 51_200, "{}", read.text("content").len());
        let write = daemon.write("/workspace/w.txt", &"é".repeat(3_000_000)).await;
        if write.is_error {
            let error = write.err();
            assert!(error.message.contains(|c: char| c.is_ascii_digit()), "a limit: {error:?}");
            daemon.shell("ls w.txt 2>/dev/null | wc -l").await.expect(0, "0\n");
        } else {
            daemon.shell("wc -c < w.txt").await.expect(0, "6000000\n");
        }
    }

    async fn c047_the_cell_dies_during_a_call(who) {
        let daemon = Daemon::start(who).await;
        let trace = CellTrace::of(daemon.pid);
        let mut tools = tools_of(daemon.new_channel());
        let call = tokio::spawn(async move {
            let input = json!({ "command": "echo partial; sleep 30" }).to_string();
            call_tool(&mut tools, "test", "bash", input).await
        });
        wait_for("the command runs", Duration::from_secs(10), || {
            daemon.marked("sleep 30").iter().any(|p| p.command_line == "sleep 30").then_some(())
        })
        .await;
        kill(Pid::from_raw(daemon.init().pid), Signal::SIGKILL).expect("root can kill it");
        let start = Instant::now();
        let reply = call.await.expect("no panic").expect("an answer");
        assert!(start.elapsed() < within(5.0), "{:?}", start.elapsed());
        assert!(reply.is_error, "{}", reply.describe());
        let said = reply.json.to_string();
        assert!(said.contains("unknown") && said.contains("partial"), "{said}");
        assert!(reply.json.get("exitCode").is_none(), "{said}");
        daemon.shell("echo next").await.expect(0, "next\n");
        daemon.write("/workspace/after", "x").await.ok();
        wait_for("the first cell is gone", within(5.0), || {
            trace.left().is_empty().then_some(())
        })
        .await;
    }

    async fn c049_umask_and_ownership(who) {
        let options = Options { umask: Some("077"), ..Options::default() };
        let daemon = Daemon::start_with(who, options).await;
        let command = "umask; touch f; mkdir dd; stat -c %a f dd";
        daemon.shell(command).await.expect(0, "0022\n644\n755\n");
        daemon.write("/workspace/g/h.txt", "x").await.ok();
        let look = "stat -c %a g g/h.txt; [ $(stat -c %u f) = $(stat -c %u g/h.txt) ] && echo same";
        daemon.shell(look).await.expect(0, "755\n644\nsame\n");
    }
}
