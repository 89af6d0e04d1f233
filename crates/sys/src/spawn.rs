//! Programs in the cell: vfork, a fixed list of steps, exec.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::AtomicU32;

use rustix::process::Pid;

use crate::restrict::{Instruction, install_filter};

/// What to execute, prepared so that the child makes system calls only.
#[derive(Debug)]
pub struct Spawn<'a> {
    /// Paths to try in order, as `execvp(3)` would find the program.
    pub candidates: &'a [CString],
    /// Arguments.
    pub argv: &'a [CString],
    /// `NAME=value` strings.
    pub env: &'a [CString],
    /// Directory.
    pub cwd: &'a CStr,
    /// Becomes descriptors 0, 1 and 2; everything else is closed.
    pub stdio: [BorrowedFd<'a>; 3],
    /// Whether descriptor 0 is a terminal that becomes the controlling one.
    pub controlling_terminal: bool,
    /// `(resource, value)` for `setrlimit(2)`, soft and hard alike.
    pub limits: &'a [(u32, u64)],
    /// The Landlock layer of the program.
    pub ruleset: BorrowedFd<'a>,
    /// A further seccomp filter of the program; empty for none.
    pub filter: &'a [Instruction],
    /// Where the kernel stores the new process's id before it executes anything: a cell of
    /// [`shared_cells`](crate::shared_cells) tells it even to those who outlive the caller.
    pub pid_cell: &'a AtomicU32,
}

/// A program that runs: the leader of its own session and process group.
#[derive(Debug)]
pub struct Spawned {
    /// Its process id.
    pub pid: Pid,
    /// Names it even when the id has been given to another process.
    pub pidfd: OwnedFd,
}

/// The steps of the child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpawnStep {
    /// Make the process.
    Clone,
    /// Lead a session.
    Session,
    /// Take the terminal.
    Terminal,
    /// Place the standard streams.
    Stdio,
    /// Set a resource limit.
    Limits,
    /// Enter the directory.
    Cwd,
    /// Add the Landlock layer.
    Landlock,
    /// Install the further filter.
    Filter,
    /// Close or mark the other descriptors.
    Descriptors,
    /// Execute the program.
    Exec,
}

impl SpawnStep {
    /// Its name in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            SpawnStep::Clone => "clone",
            SpawnStep::Session => "session",
            SpawnStep::Terminal => "terminal",
            SpawnStep::Stdio => "stdio",
            SpawnStep::Limits => "limits",
            SpawnStep::Cwd => "cwd",
            SpawnStep::Landlock => "landlock",
            SpawnStep::Filter => "filter",
            SpawnStep::Descriptors => "descriptors",
            SpawnStep::Exec => "exec",
        }
    }
}

/// A step that failed. No process is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpawnError {
    /// The step.
    pub step: SpawnStep,
    /// Its errno.
    pub errno: i32,
}

/// Stack of the child until exec: it calls a handful of small functions. Only the touched pages
/// cost anything.
const STACK_BYTES: usize = 32 * 1024;

/// File mode mask of every program, whatever the daemon's is: files are not writable for others.
const UMASK: libc::mode_t = 0o022;

/// What parent and child share.
struct Shared<'a> {
    spawn: &'a Spawn<'a>,
    candidates: Vec<*const libc::c_char>,
    argv: Vec<*const libc::c_char>,
    env: Vec<*const libc::c_char>,
    failure: Option<(SpawnStep, i32)>,
}

/// Starts a program. Returns when it has been executed, or the first step that failed.
///
/// The program inherits the caller's signal actions (see [`reset_signals`](crate::reset_signals))
/// and an empty signal mask.
pub fn spawn(spawn: &Spawn<'_>) -> Result<Spawned, SpawnError> {
    let pointers = |strings: &[CString]| {
        let ends = strings.iter().map(|string| string.as_ptr());
        ends.chain([ptr::null()]).collect::<Vec<_>>()
    };
    let mut shared = Shared {
        spawn,
        candidates: spawn.candidates.iter().map(|path| path.as_ptr()).collect(),
        argv: pointers(spawn.argv),
        env: pointers(spawn.env),
        failure: None,
    };
    let mut stack = Vec::<u128>::with_capacity(STACK_BYTES / size_of::<u128>());
    let top = stack.spare_capacity_mut().as_mut_ptr_range().end;
    let mut pidfd: RawFd = -1;
    let flags = libc::CLONE_VM
        | libc::CLONE_VFORK
        | libc::CLONE_PIDFD
        | libc::CLONE_CHILD_SETTID
        | libc::SIGCHLD;
    // SAFETY: the child runs `child` on its own stack (16-byte aligned, growing down from the
    // end) in this process's memory while this thread is suspended (CLONE_VFORK), until it has
    // executed or exited. The kernel stores one integer through each of the two pointers. `child` only makes system calls and touches `shared`, to which nothing
    // else refers meanwhile; it never unwinds and never returns to this frame.
    let pid = unsafe {
        libc::clone(
            child,
            top.cast(),
            flags,
            (&raw mut shared).cast(),
            &raw mut pidfd,
            ptr::null_mut::<libc::c_void>(),
            spawn.pid_cell.as_ptr(),
        )
    };
    if pid < 0 {
        let errno = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        return Err(SpawnError { step: SpawnStep::Clone, errno });
    }
    // SAFETY: the kernel stored a new descriptor there because of CLONE_PIDFD.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    let pid = Pid::from_raw(pid).expect("clone gave a process id");
    // SAFETY: `failure` was written, if at all, by the child before it ended, and that is over.
    match unsafe { ptr::read_volatile(&raw const shared.failure) } {
        None => Ok(Spawned { pid, pidfd }),
        Some((step, errno)) => {
            let _reaped =
                rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
            Err(SpawnError { step, errno })
        }
    }
}

extern "C" fn child(argument: *mut libc::c_void) -> libc::c_int {
    // SAFETY: `argument` is the `Shared` of the suspended parent (see `spawn`).
    let shared = unsafe { &mut *argument.cast::<Shared<'_>>() };
    let failure = steps(shared);
    shared.failure = Some(failure);
    // SAFETY: ends the child without touching the parent's memory further.
    unsafe { libc::_exit(127) }
}

/// Executes the program, or returns the step that failed and its errno.
fn steps(shared: &mut Shared<'_>) -> (SpawnStep, i32) {
    let spawn = shared.spawn;
    // SAFETY: system calls with integers, and with pointers into memory of the suspended parent
    // that stays valid and unchanged until exec or exit.
    unsafe {
        let none: libc::sigset_t = std::mem::zeroed();
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
        if libc::setsid() < 0 {
            return (SpawnStep::Session, errno());
        }
        let stdio = spawn.stdio.map(|descriptor| descriptor.as_raw_fd());
        if spawn.controlling_terminal && libc::ioctl(stdio[0], libc::TIOCSCTTY, 0) < 0 {
            return (SpawnStep::Terminal, errno());
        }
        // The sources lie above 2: a cell's own 0, 1 and 2 are always open.
        for (source, target) in stdio.into_iter().zip(0..) {
            if libc::dup2(source, target) < 0 {
                return (SpawnStep::Stdio, errno());
            }
        }
        libc::umask(UMASK);
        for (resource, value) in spawn.limits {
            let limit = libc::rlimit64 { rlim_cur: *value, rlim_max: *value };
            if libc::syscall(libc::SYS_prlimit64, 0, *resource, &raw const limit, 0) < 0 {
                return (SpawnStep::Limits, errno());
            }
        }
        if libc::syscall(libc::SYS_landlock_restrict_self, spawn.ruleset.as_raw_fd(), 0) < 0 {
            return (SpawnStep::Landlock, errno());
        }
        if !spawn.filter.is_empty() && install_filter(spawn.filter).is_err() {
            return (SpawnStep::Filter, errno());
        }
        if libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) < 0
        {
            return (SpawnStep::Descriptors, errno());
        }
        if libc::chdir(spawn.cwd.as_ptr()) < 0 {
            return (SpawnStep::Cwd, errno());
        }
        let mut result = libc::ENOENT;
        for candidate in &shared.candidates {
            libc::execve(*candidate, shared.argv.as_ptr(), shared.env.as_ptr());
            // As execvp(3): a directory of PATH that lacks it or forbids it is passed over, and a
            // program that was found but forbidden is the better answer than "not found".
            match errno() {
                libc::ENOENT | libc::ENOTDIR => (),
                libc::EACCES => result = libc::EACCES,
                other => return (SpawnStep::Exec, other),
            }
        }
        (SpawnStep::Exec, result)
    }
}

fn errno() -> i32 {
    // SAFETY: the location is valid for this thread, which the child borrows.
    unsafe { *libc::__errno_location() }
}
