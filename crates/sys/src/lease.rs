//! Leases: whether a file is open for writing somewhere.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::check;

/// From `asm-generic/fcntl.h`, which both of our architectures use; the libc crate has no name for
/// it.
const F_SETSIG: i32 = 10;

/// Takes a read lease on the file that `file` was opened for reading as: from now on whoever opens
/// it for writing, or cuts it, waits until the lease is given back, or until the kernel's patience
/// ends (`/proc/sys/fs/lease-break-time`, 45 s by default).
///
/// False when the file is open for writing somewhere (EAGAIN), a shared writable mapping included.
/// Fails when the caller does not own the file (EACCES), and on file systems without leases.
///
/// When somebody waits, the kernel tells so by SIGURG, which a process ignores unless it asked for
/// it; the default would be SIGIO, which ends it.
pub fn take_read_lease(file: BorrowedFd<'_>) -> io::Result<bool> {
    // SAFETY: both commands take an integer, and the borrow keeps the descriptor open.
    check(unsafe { libc::fcntl(file.as_raw_fd(), F_SETSIG, libc::SIGURG) }.into())?;
    // SAFETY: as above.
    match check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) }.into()) {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether the read lease that was taken through `file` is whole. False once somebody waits to open
/// the file for writing, or to cut it, and when there is none.
pub fn holds_read_lease(file: BorrowedFd<'_>) -> io::Result<bool> {
    // SAFETY: the command takes no argument, and the borrow keeps the descriptor open.
    let lease = check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLEASE) }.into())?;
    Ok(lease == libc::F_RDLCK.into())
}

/// Gives a lease back; closing the last descriptor of the opened file does so too.
pub fn give_back_lease(file: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the command takes an integer, and the borrow keeps the descriptor open.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) }.into())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File, OpenOptions};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_lease_is_had_only_while_nobody_writes() {
        let path = std::env::temp_dir().join(format!("lease-{}", std::process::id()));
        fs::write(&path, "x").unwrap();
        let reader = File::open(&path).unwrap();
        let writer = OpenOptions::new().append(true).open(&path).unwrap();
        assert!(!take_read_lease(reader.as_fd()).unwrap());
        assert!(!holds_read_lease(reader.as_fd()).unwrap());
        drop(writer);
        assert!(take_read_lease(reader.as_fd()).unwrap());
        // Readers are let in, and a writer that will not wait is turned away, but noticed.
        File::open(&path).unwrap();
        assert!(holds_read_lease(reader.as_fd()).unwrap());
        use std::os::unix::fs::OpenOptionsExt as _;
        let refused =
            OpenOptions::new().append(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EWOULDBLOCK));
        assert!(!holds_read_lease(reader.as_fd()).unwrap());
        give_back_lease(reader.as_fd()).unwrap();
        OpenOptions::new().append(true).open(&path).unwrap();
        fs::remove_file(path).unwrap();
    }
}
