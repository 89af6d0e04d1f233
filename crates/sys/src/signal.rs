//! Signals by number.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::check;

/// Sends signal `number`, real-time signals included, to the process that `pidfd` names.
pub fn send_signal(pidfd: BorrowedFd<'_>, number: i32) -> io::Result<()> {
    // SAFETY: the null pointer asks the kernel to fill in the sender; no memory is passed.
    check(unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd.as_raw_fd(),
            number,
            std::ptr::null::<libc::siginfo_t>(),
            0,
        )
    })?;
    Ok(())
}
