//! The command line: `exec` as a good shell tool, daemons that are joined or started, refusals.
#![forbid(unsafe_code)]

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use cofferdam_e2e::{Who, all_processes, binary, both, run_outside, wait_for, within};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

/// A workspace without a daemon, and the command line that is used on it. Dropping it ends the
/// daemon that was started for it.
struct Place {
    who: Who,
    root: TempDir,
    program: PathBuf,
}

impl Place {
    fn new(who: Who) -> Place {
        let root = tempfile::Builder::new()
            .prefix("cofferdam-test-")
            .permissions(fs::Permissions::from_mode(0o755))
            .tempdir_in("/tmp")
            .expect("a temporary directory");
        chown(root.path(), Some(who.id()), Some(who.id())).expect("root can");
        let program = root.path().join("cofferdam");
        fs::copy(binary(), &program).expect("the program can be copied");
        for name in ["workspace", "home", "tmp"] {
            let path = root.path().join(name);
            fs::create_dir(&path).expect("a directory");
            chown(&path, Some(who.id()), Some(who.id())).expect("root can");
        }
        Place { who, root, program }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.who.command(&self.program);
        command
            .args(arguments)
            .current_dir(self.path("workspace"))
            .env("HOME", self.path("home"))
            .env("XDG_STATE_HOME", self.path("home/state"))
            .env("TMPDIR", self.path("tmp"))
            .env_remove("COFFERDAM_ADDR")
            .stdin(Stdio::null());
        command
    }

    fn exec(&self, argv: &[&str]) -> Command {
        let mut arguments = vec!["exec", "--idle-exit", "2s", "--"];
        arguments.extend(argv);
        self.command(&arguments)
    }

    fn output(&self, argv: &[&str]) -> Output {
        self.exec(argv).output().expect("it can be started")
    }

    fn sh(&self, script: &str) -> Output {
        self.output(&["/bin/bash", "--noprofile", "--norc", "-c", script])
    }

    /// The daemons of this place.
    fn daemons(&self) -> Vec<i32> {
        let program = self.program.display().to_string();
        all_processes()
            .into_iter()
            .filter(|process| {
                process.command_line.starts_with(&program)
                    && process.command_line.contains(" serve ")
            })
            .map(|process| process.pid)
            .collect()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for pid in self.daemons() {
            // It may end by itself at the same time.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

#[track_caller]
fn expect(output: &Output, code: i32, stdout: &str) {
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!((output.status.code(), text.as_ref()), (Some(code), stdout), "{output:?}");
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn ended_within(child: &mut Child, limit: Duration) -> std::process::ExitStatus {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("it can be waited for") {
            return status;
        }
        if start.elapsed() > limit {
            let _ = child.kill();
            panic!("it did not end within {limit:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

both! {
    async fn exec_passes_streams_and_status(who) {
        let place = Place::new(who);
        let output = place.sh("echo out; echo err >&2; pwd; exit 7");
        expect(&output, 7, "out\n/workspace\n");
        assert_eq!(stderr(&output), "err\n");
        expect(&place.output(&["/bin/true"]), 0, "");
        expect(&place.sh("tty; [ -e /root ] || echo hidden"), 0, "not a tty\nhidden\n");
        let missing = place.output(&["no-such-program"]);
        expect(&missing, 127, "");
        assert!(stderr(&missing).contains("no-such-program"), "{missing:?}");
        expect(&place.output(&["/etc/passwd"]), 126, "");
        let killed = place.sh("kill -9 $$");
        assert!(
            killed.status.code() == Some(137) || killed.status.signal() == Some(9),
            "{killed:?}"
        );
        let mut exec = place.exec(&["wc", "-c"]);
        let mut child = exec.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("started");
        let mut input = child.stdin.take().expect("piped");
        let writer = std::thread::spawn(move || input.write_all(&vec![b'x'; 5_000_000]));
        let output = child.wait_with_output().expect("its output");
        writer.join().expect("no panic").expect("all of it is read");
        expect(&output, 0, "5000000\n");
        // More than the daemon keeps of a stream (16 MiB): the program waits for its reader.
        let big = place.sh("head -c 60000000 /dev/zero");
        assert_eq!((big.status.code(), big.stdout.len()), (Some(0), 60_000_000), "{}", stderr(&big));
    }

    async fn exec_ends_at_its_time_limit(who) {
        let place = Place::new(who);
        let mut command = place.command(&["exec", "--timeout", "1s", "--", "sleep", "300"]);
        let start = Instant::now();
        let output = command.output().expect("started");
        expect(&output, 124, "");
        assert!(start.elapsed() < within(6.0), "{:?}", start.elapsed());
        assert!(stderr(&output).contains("timed out"), "{output:?}");
    }

    async fn exec_passes_signals(who) {
        let place = Place::new(who);
        let script = "trap 'echo caught; exit 3' TERM INT; echo ready; while :; do sleep 0.05; done";
        for signal in [Signal::SIGTERM, Signal::SIGINT] {
            let mut child = place
                .exec(&["/bin/bash", "--noprofile", "--norc", "-c", script])
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .expect("started");
            let mut output = child.stdout.take().expect("piped");
            let mut ready = [0; 6];
            output.read_exact(&mut ready).expect("it is ready");
            kill(Pid::from_raw(child.id() as i32), signal).expect("it lives");
            let mut rest = String::new();
            output.read_to_string(&mut rest).expect("its output");
            let status = ended_within(&mut child, within(5.0));
            assert_eq!((rest.as_str(), status.code()), ("caught\n", Some(3)), "{signal}");
        }
        // A killed client takes its program along.
        // Not the other user's, which may run at the same time.
        let seconds = format!("317.{:05}", who.id());
        let mut child = place.exec(&["sleep", &seconds]).spawn().expect("started");
        let sleep = format!("sleep {seconds}");
        let sleeps = || all_processes().into_iter().filter(|p| p.command_line == sleep).count();
        wait_for("it sleeps", Duration::from_secs(10), || (sleeps() == 1).then_some(())).await;
        child.kill().expect("it lives");
        child.wait().expect("it ends");
        wait_for("its program is gone", within(5.0), || (sleeps() == 0).then_some(())).await;
    }

    async fn exec_ends_when_its_reader_goes_away(who) {
        let place = Place::new(who);
        let text = format!("user-{}", who.id());
        let program = format!("yes {text}");
        let mut child = place.exec(&["yes", &text]).stdout(Stdio::piped()).spawn().expect("started");
        let mut output = child.stdout.take().expect("piped");
        let mut some = [0; 1000];
        output.read_exact(&mut some).expect("it prints");
        drop(output);
        let status = ended_within(&mut child, within(5.0));
        assert!(status.code() == Some(141) || status.signal() == Some(13), "{status:?}");
        wait_for("its program is gone", within(5.0), || {
            let yes = all_processes().into_iter().filter(|p| p.command_line == program).count();
            (yes == 0).then_some(())
        })
        .await;
    }

    async fn exec_has_a_terminal_on_a_terminal(who) {
        let place = Place::new(who);
        let line = format!(
            "{} exec --idle-exit 2s -- /bin/bash -c 'tty; stty size; echo done'",
            place.program.display()
        );
        let mut command = who.command("script");
        command
            .args(["-qec", &format!("stty rows 33 cols 99; {line}"), "/dev/null"])
            .current_dir(place.path("workspace"))
            .env("HOME", place.path("home"))
            .env("XDG_STATE_HOME", place.path("home/state"));
        let output = run_outside(&mut command).stdout;
        assert!(output.contains("/dev/pts/"), "{output}");
        assert!(output.contains("33 99\r\n"), "{output}");
        let forced = place.command(&["exec", "--pty", "--", "tty"]).output().expect("started");
        assert!(String::from_utf8_lossy(&forced.stdout).contains("/dev/pts/"), "{forced:?}");
    }

    async fn two_starters_share_one_daemon(who) {
        let place = Place::new(who);
        let starters: Vec<Child> = (0..6)
            .map(|number| {
                let script = format!("echo {number} >> log; sleep 0.5");
                let mut command = place.exec(&["/bin/bash", "-c", &script]);
                command.stdout(Stdio::null()).spawn().expect("started")
            })
            .collect();
        for mut starter in starters {
            let status = ended_within(&mut starter, within(20.0));
            assert!(status.success(), "{status:?}");
        }
        assert_eq!(place.daemons().len(), 1);
        let log = fs::read_to_string(place.path("workspace/log")).expect("a log");
        assert_eq!(log.lines().count(), 6, "{log}");
        // It was asked to end 2 s after its last use.
        wait_for("the idle daemon ends", within(10.0), || {
            place.daemons().is_empty().then_some(())
        })
        .await;
        // And the next call starts another.
        expect(&place.sh("wc -l < log"), 0, "6\n");
    }

    async fn a_background_process_keeps_an_idle_daemon(who) {
        let place = Place::new(who);
        expect(&place.sh("sleep 5 >/dev/null 2>&1 & echo started"), 0, "started\n");
        let daemons = place.daemons();
        assert_eq!(daemons.len(), 1);
        let start = Instant::now();
        wait_for("the daemon ends", within(20.0), || place.daemons().is_empty().then_some(())).await;
        assert!(start.elapsed() > Duration::from_millis(4500), "{:?}", start.elapsed());
    }

    async fn state_is_private_and_outside(who) {
        let place = Place::new(who);
        expect(&place.output(&["/bin/true"]), 0, "");
        let base = place.path("home/state/cofferdam");
        let entries: Vec<PathBuf> =
            fs::read_dir(base).expect("the state").flatten().map(|entry| entry.path()).collect();
        assert_eq!(entries.len(), 1, "{entries:?}");
        let name = entries[0].file_name().unwrap_or_default().to_string_lossy().into_owned();
        assert!(name.len() == 16 && name.bytes().all(|b| b.is_ascii_hexdigit()), "{name}");
        let meta = entries[0].metadata().expect("it exists");
        assert_eq!((meta.mode() & 0o777, meta.uid()), (0o700, who.id()));
    }

    async fn what_cannot_be_is_refused(who) {
        let place = Place::new(who);
        let workspace = place.path("workspace").display().to_string();
        let inside = place.path("workspace/state").display().to_string();
        let serve = |arguments: &[&str]| {
            let mut all = vec!["serve", "--workspace", &workspace];
            all.extend(arguments);
            let output = place.command(&all).output().expect("started");
            assert_eq!(output.status.code(), Some(1), "{output:?}");
            stderr(&output)
        };
        let said = serve(&["--state", &inside]);
        assert!(said.contains("inside the workspace"), "{said}");
        assert!(!Path::new(&inside).exists(), "nothing was made");
        let socket = format!("unix:{inside}.sock");
        let state = place.path("state").display().to_string();
        let said = serve(&["--state", &state, "--listen", &socket]);
        assert!(said.contains("inside the workspace"), "{said}");
        let long = place.path(&"x".repeat(120)).display().to_string();
        let said = serve(&["--state", &long]);
        assert!(said.contains("10"), "{said}");
        assert!(said.contains("path"), "{said}");
        let policy = place.path("policy.toml");
        fs::write(&policy, "levl = 1\n").expect("a file");
        let said = serve(&["--state", &state, "--policy", &policy.display().to_string()]);
        assert!(said.contains("levl"), "{said}");
        fs::write(&policy, "tmp_bytes = 1\ncell.uid = 0\n").expect("a file");
        let said = serve(&["--state", &state, "--policy", &policy.display().to_string()]);
        assert!(said.contains("tmp_bytes") && said.contains("cell.uid"), "every problem: {said}");
        let missing = place
            .command(&["serve", "--workspace", "/nonexistent/cofferdam"])
            .output()
            .expect("started");
        assert_eq!(missing.status.code(), Some(1), "{missing:?}");
        let root = place.command(&["serve", "--workspace", "/"]).output().expect("started");
        assert_eq!(root.status.code(), Some(1), "{root:?}");

        // A second daemon of one workspace.
        expect(&place.output(&["/bin/true"]), 0, "");
        let second = place.command(&["serve", "--workspace", &workspace]).output().expect("started");
        assert_eq!(second.status.code(), Some(1), "{second:?}");
        assert!(stderr(&second).contains("already served"), "{second:?}");
        expect(&place.output(&["/bin/true"]), 0, "");
        let nowhere = place
            .command(&["exec", "--connect", "unix:/nonexistent/cofferdam.sock", "--", "true"])
            .output()
            .expect("started");
        assert_eq!(nowhere.status.code(), Some(125), "{nowhere:?}");
    }

    async fn other_users_are_turned_away(who) {
        let place = Place::new(who);
        expect(&place.output(&["/bin/true"]), 0, "");
        let base = place.path("home/state/cofferdam");
        let state = fs::read_dir(&base).expect("the state").flatten().next().expect("one").path();
        let address = format!("unix:{}", state.join("daemon.sock").display());
        // Even where the files let a stranger in, the daemon asks the kernel who it is.
        for path in [&place.path("home"), &place.path("home/state"), &base, &state] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("root can");
        }
        fs::set_permissions(state.join("daemon.sock"), fs::Permissions::from_mode(0o777)).expect("root can");
        let call = |id: u32| {
            cofferdam_e2e::as_user(id, &place.program)
                .args(["exec", "--connect", &address, "--", "echo", "in"])
                .env("HOME", "/nonexistent")
                .stdin(Stdio::null())
                .output()
                .expect("started")
        };
        expect(&call(who.id()), 0, "in\n");
        expect(&call(0), 0, "in\n");
        let stranger = call(4242);
        assert_eq!((stranger.status.code(), stranger.stdout.len()), (Some(125), 0), "{stranger:?}");
    }

    async fn doctor_and_tour_end_well(who) {
        let place = Place::new(who);
        let doctor = place.command(&["doctor"]).output().expect("started");
        assert_eq!(doctor.status.code(), Some(0), "{doctor:?}");
        let text = String::from_utf8_lossy(&doctor.stdout).into_owned();
        for word in ["namespaces", "Landlock", "seccomp"] {
            assert!(text.to_lowercase().contains(&word.to_lowercase()), "{word}: {text}");
        }
        let tour = place.command(&["tour"]).output().expect("started");
        assert_eq!(tour.status.code(), Some(0), "{tour:?}");
        assert!(!tour.stdout.is_empty());
        let program = place.program.display().to_string();
        wait_for("the tour leaves no process", within(5.0), || {
            let left = all_processes().into_iter().filter(|p| p.command_line.starts_with(&program));
            (left.count() == 0).then_some(())
        })
        .await;
        let left: Vec<_> = fs::read_dir(place.path("tmp")).expect("it exists").flatten().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}
