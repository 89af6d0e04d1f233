//! Processes that go on in our own code.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::process::Pid;

use crate::check;

/// What the new process is to its caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kinship {
    /// A child.
    Child,
    /// A child of the caller's parent (CLONE_PARENT).
    Sibling,
    /// A child, and the first process of a pid namespace of its own (CLONE_NEWPID). Unlike after
    /// `unshare`, the caller can still make threads.
    NamespaceInit,
}

/// First descriptor of those that the child keeps; 0, 1 and 2 stay what they are.
const FIRST_KEPT: RawFd = 3;

/// Forks; `child` runs in the new process, which exits with what it returns (70 after a panic).
///
/// The child's descriptors are 0, 1, 2 and those of `keep`, which arrive as its argument, in
/// order; all others are closed before it runs, so `child` must not use a descriptor that it
/// captured. Nothing of the caller's stack is unwound in the child.
///
/// Fails with EBUSY when the caller has a second thread: a lock that it held would stay locked in
/// the child for ever. `/proc/self` must be reachable for that check, or the caller vouches for
/// it by having set up a cell without one.
pub fn fork(
    kinship: Kinship,
    keep: &[BorrowedFd<'_>],
    child: impl FnOnce(Vec<OwnedFd>) -> u8,
) -> io::Result<Pid> {
    if is_threaded() {
        return Err(io::Error::from_raw_os_error(libc::EBUSY));
    }
    let flags = match kinship {
        Kinship::Child => libc::SIGCHLD,
        Kinship::Sibling => libc::SIGCHLD | libc::CLONE_PARENT,
        Kinship::NamespaceInit => libc::SIGCHLD | libc::CLONE_NEWPID,
    };
    // SAFETY: without CLONE_VM and with no stack, clone is fork: both processes go on with copies
    // of all memory. The caller has one thread (checked above), so that no lock is held by a
    // thread that the child lacks, and the child never returns from this function.
    let result = unsafe {
        libc::syscall(
            libc::SYS_clone,
            libc::c_long::from(flags),
            0_usize,
            0_usize,
            0_usize,
            0_usize,
        )
    };
    if let Some(pid) = Pid::from_raw(check(result)? as i32) {
        return Ok(pid);
    }
    let code = catch_unwind(AssertUnwindSafe(|| match keep_only(keep) {
        Ok(kept) => child(kept),
        Err(_) => 71,
    }))
    .unwrap_or(70);
    // SAFETY: ends this process without running destructors or exit handlers of the caller, whose
    // copied objects still name descriptors that this process has given to others.
    unsafe { libc::_exit(i32::from(code)) }
}

/// Gives every signal its default action: a parent started by `nohup` ignores SIGHUP, Rust's
/// runtime ignores SIGPIPE, and programs would inherit both.
pub fn reset_signals() {
    for signal in 1..=libc::SIGRTMAX() {
        // SAFETY: SIG_DFL is a valid action for every signal; those whose action cannot be changed
        // answer EINVAL, which leaves them as wanted.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

/// Whether the process has more than one thread; false where `/proc` cannot say.
fn is_threaded() -> bool {
    // Two links of the directory itself and one for each thread.
    std::os::linux::fs::MetadataExt::st_nlink(&match std::fs::metadata("/proc/self/task") {
        Ok(metadata) => metadata,
        Err(_) => return false,
    }) > 3
}

/// Closes every descriptor but the standard ones and `keep`.
fn keep_only(keep: &[BorrowedFd<'_>]) -> io::Result<Vec<OwnedFd>> {
    // First above all targets, so that no source is overwritten before it has been copied.
    let floor = FIRST_KEPT + keep.len() as RawFd;
    let above: Vec<OwnedFd> = keep
        .iter()
        .map(|descriptor| rustix::io::fcntl_dupfd_cloexec(descriptor, floor))
        .collect::<Result<_, _>>()?;
    for (descriptor, target) in above.iter().zip(FIRST_KEPT..) {
        // SAFETY: dup3 replaces whatever `target` was. This process is a fresh fork whose other
        // descriptors are about to be closed; no object of it uses them any more.
        check(unsafe {
            libc::syscall(libc::SYS_dup3, descriptor.as_fd().as_raw_fd(), target, libc::O_CLOEXEC)
        })?;
    }
    std::mem::forget(above);
    // SAFETY: as above: closes descriptors that no object of this process uses any more.
    check(unsafe { libc::syscall(libc::SYS_close_range, floor, u32::MAX, 0) })?;
    Ok((FIRST_KEPT..floor)
        // SAFETY: the descriptors were just made by dup3, and nothing else owns them.
        .map(|descriptor| unsafe { OwnedFd::from_raw_fd(descriptor) })
        .collect())
}

#[cfg(test)]
mod tests {
    use rustix::process::{WaitOptions, waitpid};

    use super::*;

    /// Runs `test` in a process with one thread, as test threads are not.
    fn in_single_thread(test: impl FnOnce() -> u8) -> i32 {
        // SAFETY: a test process whose other threads sit in the harness; `test` allocates, which
        // glibc's malloc allows after fork.
        match unsafe { libc::fork() } {
            0 => {
                let code = catch_unwind(AssertUnwindSafe(test)).unwrap_or(99);
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(i32::from(code)) }
            }
            pid => wait(Pid::from_raw(pid).unwrap()),
        }
    }

    fn wait(pid: Pid) -> i32 {
        let (_, status) = waitpid(Some(pid), WaitOptions::empty()).unwrap().unwrap();
        status.exit_status().unwrap()
    }

    #[test]
    fn the_child_has_just_the_kept_descriptors_in_order() {
        let code = in_single_thread(|| {
            let (read, write) = std::io::pipe().unwrap();
            let child = fork(Kinship::Child, &[write.as_fd(), read.as_fd()], |kept| {
                let open = std::fs::read_dir("/proc/self/fd").unwrap().count();
                rustix::io::write(&kept[0], b"x").unwrap();
                let mut byte = [0];
                rustix::io::read(&kept[1], &mut byte).unwrap();
                // 0, 1, 2, the two kept ones and the directory being read.
                if open == 6 && byte == *b"x" { 7 } else { 1 }
            });
            wait(child.unwrap()) as u8
        });
        assert_eq!(code, 7);
    }

    #[test]
    fn a_panic_in_the_child_ends_the_child() {
        let code = in_single_thread(|| {
            std::panic::set_hook(Box::new(|_| ()));
            wait(fork(Kinship::Child, &[], |_| panic!("on purpose")).unwrap()) as u8
        });
        assert_eq!(code, 70);
    }

    #[test]
    fn a_threaded_caller_is_refused() {
        let other = std::thread::spawn(std::thread::park);
        let error = fork(Kinship::Child, &[], |_| 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBUSY));
        other.thread().unpark();
        other.join().unwrap();
    }
}
