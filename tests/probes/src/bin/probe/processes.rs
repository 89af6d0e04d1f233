//! Attempts on other processes and on the terminal.

use std::ptr;

use super::{Outcome, check, done};

fn number(text: &str) -> i32 {
    text.parse().expect("a number")
}

/// One signal to one process; never to a group or to all.
pub(crate) fn kill(pid: &str, signal: &str) -> Outcome {
    let pid = number(pid);
    assert!(pid > 1, "only single processes are signalled, and not the host's first");
    // SAFETY: no pointer is passed.
    check(unsafe { libc::kill(pid, number(signal)) }.into())?;
    done()
}

/// Reads a limit of another process.
pub(crate) fn limit(pid: &str) -> Outcome {
    let mut old = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `old` is a live rlimit and no new one is given.
    let result = unsafe { libc::prlimit(number(pid), libc::RLIMIT_NOFILE, ptr::null(), &mut old) };
    check(result.into())?;
    done()
}

pub(crate) fn trace_me() -> Outcome {
    // SAFETY: PTRACE_TRACEME ignores every other argument.
    check(unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) })?;
    done()
}

/// Attaches to a process without stopping it; the attachment ends with this process.
pub(crate) fn trace(pid: &str) -> Outcome {
    // SAFETY: PTRACE_SEIZE reads no memory of ours.
    check(unsafe { libc::ptrace(libc::PTRACE_SEIZE, number(pid), 0, 0) })?;
    done()
}

/// Types a character into the terminal on standard input.
pub(crate) fn push_input() -> Outcome {
    let character = b'#';
    // SAFETY: the argument is one live byte, which is what TIOCSTI reads.
    check(unsafe { libc::ioctl(0, libc::TIOCSTI, &raw const character) }.into())?;
    done()
}
