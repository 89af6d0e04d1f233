//! A workspace of a test's own, and the commands that are run on it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

/// Longest wait for something that must come.
const LIMIT: Duration = Duration::from_secs(30);

/// Directories, and the daemon that a command may have started in them. Dropping it ends all.
pub(crate) struct Place {
    directory: TempDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        let directory = tempfile::Builder::new().prefix("cofferdam-cli-").tempdir().unwrap();
        fs::create_dir(directory.path().join("workspace")).unwrap();
        Self { directory }
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn workspace(&self) -> PathBuf {
        self.path().join("workspace")
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.path().join("state")
    }

    /// `cofferdam` with a subcommand and this place.
    pub(crate) fn command(&self, subcommand: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cofferdam"));
        command.arg(subcommand).arg("--workspace").arg(self.workspace());
        command.arg("--state").arg(self.state()).env_remove("COFFERDAM_ADDR").stdin(Stdio::null());
        command
    }

    /// `cofferdam exec` with options and a program.
    pub(crate) fn exec(&self, options: &[&str], argv: &[&str]) -> Command {
        let mut command = self.command("exec");
        command.args(options).arg("--").args(argv);
        command
    }

    /// Runs a program to its end.
    pub(crate) fn run(&self, options: &[&str], argv: &[&str]) -> Ended {
        Ended::of(self.exec(options, argv).output().unwrap())
    }

    /// Process id of the daemon that holds the state, if one does.
    pub(crate) fn daemon(&self) -> Option<Pid> {
        let file = fs::File::open(self.state().join("lock")).ok()?;
        if file.try_lock().is_ok() {
            return None;
        }
        let text = fs::read_to_string(self.state().join("lock")).unwrap();
        Some(Pid::from_raw(text.trim().parse().expect("a holder signs")))
    }

    /// Ends the daemon and waits until it has ended.
    pub(crate) fn end_daemon(&self, signal: Signal) {
        if let Some(pid) = self.daemon() {
            let _ = kill(pid, signal);
            wait_until("the daemon has ended", || self.daemon().is_none());
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(pid) = self.daemon() {
            let _ = kill(pid, Signal::SIGKILL);
        }
    }
}

/// How a command ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    pub(crate) status: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ended {
    pub(crate) fn new(status: i32, stdout: &str, stderr: &str) -> Self {
        Self { status: Some(status), stdout: stdout.to_owned(), stderr: stderr.to_owned() }
    }

    pub(crate) fn of(output: Output) -> Self {
        Self {
            status: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

/// Watches a state; gives up loudly.
pub(crate) fn wait_until(what: &str, state: impl Fn() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !state() {
        assert!(Instant::now() < deadline, "not within {LIMIT:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// How many processes of the host have `argument` on their command line, ours left out.
pub(crate) fn processes_with(argument: &str) -> usize {
    let lines = fs::read_dir("/proc").unwrap().flatten();
    let lines = lines.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    let has = |line: &Vec<u8>, what: &str| line.split(|b| *b == 0).any(|a| a == what.as_bytes());
    lines.filter(|line| has(line, argument) && !has(line, "--workspace")).count()
}

/// An argument of `sleep` that no other process has.
pub(crate) fn unique_seconds() -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("3600.{}{:04}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Ends a child that a failed test leaves behind.
pub(crate) struct Kept(pub(crate) Child);

impl Drop for Kept {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
