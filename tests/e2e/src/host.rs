//! The host's side of a test: who runs what, and what a directory looks like.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// The ordinary user of the tests.
pub const USER: u32 = 1000;

/// Who runs the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who {
    /// Root, on a workspace that root owns.
    Root,
    /// An ordinary user without further groups, on a workspace of its own.
    User,
}

impl Who {
    /// User and group id of the daemon.
    pub fn id(self) -> u32 {
        match self {
            Who::Root => 0,
            Who::User => USER,
        }
    }

    /// A command that runs `program` as this user.
    pub fn command(self, program: impl AsRef<OsStr>) -> Command {
        assert!(
            nix::unistd::geteuid().is_root(),
            "these tests start daemons of root and of an ordinary user, so they run as root"
        );
        match self {
            Who::Root => Command::new(program),
            Who::User => as_user(USER, program),
        }
    }
}

/// A command that runs `program` as `id`, without further groups.
pub fn as_user(id: u32, program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command
        .arg(format!("--reuid={id}"))
        .arg(format!("--regid={id}"))
        .args(["--clear-groups", "--"])
        .arg(program);
    command
}

/// What a program gave outside of any cell.
#[derive(Debug)]
pub struct Outside {
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

/// Runs a command outside of any cell and takes its output; it must exit with 0.
pub fn run_outside(command: &mut Command) -> Outside {
    let Output { status, stdout, stderr } =
        command.stdin(Stdio::null()).output().expect("the command can be started");
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let outside = Outside { stdout: text(&stdout), stderr: text(&stderr) };
    assert!(status.success(), "{command:?}: {status}: {outside:?}");
    outside
}

/// Every entry below `directory`: path, type and mode, owner, size, links and target. Directories'
/// sizes are left out, since they depend on entries that came and went.
pub fn snapshot(directory: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    collect(directory, &mut lines);
    lines.sort();
    lines
}

fn collect(path: &Path, lines: &mut Vec<String>) {
    let Ok(meta) = path.symlink_metadata() else { return };
    let size = if meta.is_dir() { 0 } else { meta.size() };
    let target = fs::read_link(path).unwrap_or_default();
    lines.push(format!(
        "{} {:o} {}:{} {size} {} {}",
        path.display(),
        meta.mode(),
        meta.uid(),
        meta.gid(),
        meta.nlink(),
        target.display()
    ));
    if meta.is_dir() {
        for entry in fs::read_dir(path).into_iter().flatten().flatten() {
            collect(&entry.path(), lines);
        }
    }
}
