//! A shim: starts the program of a call and gathers every process that the call leaves behind.
//!
//! It is a subreaper, so a child that was forked twice or leads its own session falls to it and
//! not to init; while it lives, the processes below it are exactly the call's. It decides nothing
//! and holds no deadline: its call can kill it, and init then cleans up. One shim serves one call
//! at a time, and any number one after the other.

use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};

use cofferdam_sandbox::Filter;
use cofferdam_spec::{Command, Limits};
use cofferdam_sys::{Spawn, SpawnError, SpawnStep, Spawned, spawn};
use nix::errno::Errno;
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Pid;

use crate::channel::{Channel, Received};
use crate::notes::Notes;
use crate::protocol::Status;
use crate::supervision::{Report, Run, ShimId, What};

/// Where programs are looked for when the environment has no PATH.
const DEFAULT_PATH: &str = "/usr/bin:/bin";

/// How long a program may take before it is reported as running: short programs are told of once,
/// with their end, which saves a wake-up of init and several of the daemon. Twice what a shell
/// takes to start and end (2 ms), and far below what anybody sees of a program's first output.
const REPORT_DELAY: Timespec = Timespec { tv_sec: 0, tv_nsec: 4_000_000 };

/// Runs until init closes the channel.
pub(crate) fn run(
    id: ShimId,
    channel: OwnedFd,
    reports: OwnedFd,
    [command_ruleset, read_only_ruleset]: [&OwnedFd; 2],
    notes: Notes,
) -> u8 {
    let _named = rustix::thread::set_name(c"cofferdam-shim");
    let own = rustix::process::getpid();
    if rustix::process::set_child_subreaper(Some(own)).is_err() {
        return 1;
    }
    let channel = Channel::<(), Run>::new(channel);
    let reports = Channel::<Report, ()>::new(reports);
    loop {
        let Ok(Some(Received { message, descriptors })) = channel.receive() else { return 0 };
        let ruleset = if message.workspace_read_only { read_only_ruleset } else { command_ruleset };
        let started = start(&message, &descriptors, ruleset, notes);
        // Ours are copies: the program's end of output is when the program's own are closed.
        drop(descriptors);
        let report = |what, pidfd: Option<&OwnedFd>| {
            let descriptors: Vec<_> = pidfd.into_iter().map(AsFd::as_fd).collect();
            reports.send(&Report { shim: id, what }, &descriptors)
        };
        let told = match started {
            Err(SpawnError { step, errno }) => {
                report(What::SpawnFailed { step: step.as_str().to_owned(), errno }, None)
            }
            Ok(Spawned { pid, pidfd }) => {
                let number = pid.as_raw_nonzero().get();
                if ends_soon(&pidfd) {
                    gather(pid, notes, |what| {
                        let what = match what {
                            What::Exited { status, children } => {
                                What::Ran { pid: number, status, children }
                            }
                            other => other,
                        };
                        report(what, None)
                    })
                } else {
                    // Without the pidfd (descriptors in flight are counted) the leader cannot be
                    // signalled alone; its tree still can.
                    let spawned = report(What::Spawned { pid: number }, Some(&pidfd))
                        .or_else(|_| report(What::Spawned { pid: number }, None));
                    spawned.and_then(|()| {
                        drop(pidfd);
                        gather(pid, notes, |what| report(what, None))
                    })
                }
            }
        };
        if told.is_err() {
            return 0;
        }
    }
}

/// Whether the program ends within [`REPORT_DELAY`].
fn ends_soon(pidfd: &OwnedFd) -> bool {
    let mut ready = [PollFd::new(pidfd, PollFlags::IN)];
    matches!(poll(&mut ready, Some(&REPORT_DELAY)), Ok(1))
}

/// Reaps until no child is left.
fn gather(
    leader: Pid,
    notes: Notes,
    report: impl Fn(What) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let mut exited = false;
    loop {
        // First only looked at: a shim that is killed while it waits may still reap, and would
        // take the leader's status with it.
        let (pid, status) = match waitid(Id::All, WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) {
            Ok(WaitStatus::Exited(pid, code)) => (pid, Status::Exited(code)),
            Ok(WaitStatus::Signaled(pid, signal, core)) => {
                (pid, Status::Signaled { signal: signal as i32, core })
            }
            Ok(_) | Err(Errno::EINTR) => continue,
            // No child is left.
            Err(_) if exited => return report(What::Empty),
            // Never before the leader was reaped: only we reap it.
            Err(errno) => return Err(errno.into()),
        };
        let is_leader = pid.as_raw() == leader.as_raw_nonzero().get();
        if is_leader {
            notes.note_status(status);
        }
        waitpid(pid, None)?;
        if is_leader {
            let children = has_children();
            report(What::Exited { status, children })?;
            if !children {
                return Ok(());
            }
            exited = true;
        }
    }
}

/// Reaps what has ended; whether something else runs.
fn has_children() -> bool {
    loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive) => return true,
            Ok(_) | Err(Errno::EINTR) => continue,
            Err(_) => return false,
        }
    }
}

fn start(
    run: &Run,
    stdio: &[OwnedFd],
    ruleset: &OwnedFd,
    notes: Notes,
) -> Result<Spawned, SpawnError> {
    let failed = |step, errno| SpawnError { step, errno };
    let [stdin, stdout, stderr] = stdio else {
        return Err(failed(SpawnStep::Stdio, libc::EBADF));
    };
    let strings = Strings::new(&run.command).ok_or(failed(SpawnStep::Exec, libc::EINVAL))?;
    let filter = run.workspace_read_only.then(Filter::of_read_only_calls);
    spawn(&Spawn {
        candidates: &strings.candidates,
        argv: &strings.argv,
        env: &strings.env,
        cwd: &strings.cwd,
        stdio: [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()],
        controlling_terminal: run.terminal,
        limits: &resource_limits(&run.limits),
        ruleset: ruleset.as_fd(),
        filter: filter.as_ref().map_or(&[], Filter::program),
        pid_cell: notes.pid_cell(),
    })
}

/// A command as C strings.
struct Strings {
    candidates: Vec<CString>,
    argv: Vec<CString>,
    env: Vec<CString>,
    cwd: CString,
}

impl Strings {
    /// `None` for a NUL inside, which a validated command does not have.
    fn new(command: &Command) -> Option<Self> {
        let argv = command.argv().iter().map(|text| CString::new(text.as_str()).ok());
        let env =
            command.env().iter().map(|(name, value)| CString::new(format!("{name}={value}")).ok());
        let path = command.env().get("PATH").map_or(DEFAULT_PATH, String::as_str);
        let candidates = candidates(&command.argv()[0], path);
        Some(Self {
            candidates: candidates
                .into_iter()
                .map(|path| CString::new(path).ok())
                .collect::<Option<_>>()?,
            argv: argv.collect::<Option<_>>()?,
            env: env.collect::<Option<_>>()?,
            cwd: CString::new(command.cwd()).ok()?,
        })
    }
}

/// The paths where `execvp(3)` would look: the program itself when it holds a slash, else it below
/// each directory of `path`, where an empty one is the current directory.
fn candidates(program: &str, path: &str) -> Vec<String> {
    if program.contains('/') {
        return vec![program.to_owned()];
    }
    let below = |directory: &str| match directory {
        "" => program.to_owned(),
        directory => format!("{directory}/{program}"),
    };
    path.split(':').map(below).collect()
}

/// Limits for `setrlimit(2)`, none above what this process may give.
fn resource_limits(limits: &Limits) -> Vec<(u32, u64)> {
    use rustix::process::{Resource, getrlimit};
    let mut list = vec![(libc::RLIMIT_CORE, 0)];
    let mut lower = |number, resource, value: u64| {
        list.push((
            number,
            getrlimit(resource).maximum.map_or(value, |maximum| maximum.min(value)),
        ));
    };
    lower(libc::RLIMIT_NPROC, Resource::Nproc, limits.processes.into());
    lower(libc::RLIMIT_NOFILE, Resource::Nofile, limits.open_files.into());
    if let Some(bytes) = limits.memory_bytes {
        lower(libc::RLIMIT_DATA, Resource::Data, bytes);
    }
    if let Some(bytes) = limits.file_bytes {
        lower(libc::RLIMIT_FSIZE, Resource::Fsize, bytes);
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_looked_for_as_execvp_does() {
        assert_eq!(candidates("ls", "/usr/bin:/bin"), ["/usr/bin/ls", "/bin/ls"]);
        assert_eq!(candidates("./ls", "/usr/bin"), ["./ls"]);
        assert_eq!(candidates("ls", ":/bin"), ["ls", "/bin/ls"]);
    }

    #[test]
    fn no_program_may_write_a_core_file() {
        assert_eq!(resource_limits(&Limits::default())[0], (libc::RLIMIT_CORE, 0));
    }
}
