//! Descriptors that the runtime watches.

use std::io;
use std::os::fd::AsRawFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers a descriptor with the runtime. `owner` must keep one and the same descriptor open for
/// its whole life; both types that come here hold it and have no way to give it away.
#[expect(
    deprecated,
    reason = "its successor is an unsafe function, for owners that close their descriptor early"
)]
pub(crate) fn register<T: AsRawFd>(owner: T, interest: Interest) -> io::Result<AsyncFd<T>> {
    AsyncFd::with_interest(owner, interest)
}
