//! Standard input: a thread reads it, because a read may wait for ever.

use std::io;

use bytes::Bytes;
use rustix::fs::{FileType, fstat, major, minor};
use rustix::stdio::stdin;
use rustix::termios::isatty;
use tokio::sync::mpsc;

/// One read: what a pipe holds.
pub(crate) const READ_BYTES: usize = 64 * 1024;

/// Reads that wait for the daemon, which takes all of them in one call.
const CHUNKS_MAX: usize = 8;

/// Whether the program gets our input. Without a terminal of its own it gets none of a person's
/// typing, and from `/dev/null` nothing needs to be carried.
pub(crate) fn source(pty: bool) -> io::Result<bool> {
    if isatty(stdin()) {
        return Ok(pty);
    }
    let found = fstat(stdin())?;
    let null = FileType::from_raw_mode(found.st_mode) == FileType::CharacterDevice
        && (major(found.st_rdev), minor(found.st_rdev)) == (1, 3);
    Ok(!null || pty)
}

/// Reads until the end, in the background.
pub(crate) fn read_chunks() -> io::Result<mpsc::Receiver<io::Result<Bytes>>> {
    let (sender, receiver) = mpsc::channel(CHUNKS_MAX);
    std::thread::Builder::new().name("stdin".to_owned()).spawn(move || {
        loop {
            let mut chunk = vec![0; READ_BYTES];
            let item = match rustix::io::retry_on_intr(|| rustix::io::read(stdin(), &mut chunk)) {
                // A terminal that was hung up says so by an error.
                Ok(0) | Err(rustix::io::Errno::IO) => return,
                Ok(count) => {
                    chunk.truncate(count);
                    Ok(Bytes::from(chunk))
                }
                Err(rustix::io::Errno::AGAIN) => {
                    // Somebody made the shared description non-blocking.
                    let mut fds = [rustix::event::PollFd::from_borrowed_fd(
                        stdin(),
                        rustix::event::PollFlags::IN,
                    )];
                    let _ = rustix::event::poll(&mut fds, None);
                    continue;
                }
                Err(error) => Err(error.into()),
            };
            let last = item.is_err();
            if sender.blocking_send(item).is_err() || last {
                return;
            }
        }
    })?;
    Ok(receiver)
}
