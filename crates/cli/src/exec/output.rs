//! Standard output and standard error: a thread writes them, because a write may wait for ever.

use std::io;
use std::os::fd::BorrowedFd;
use std::thread::JoinHandle;

use bytes::Bytes;
use cofferdam_client::OutputStream;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::stdio::{stderr, stdout};
use tokio::sync::mpsc;

/// Chunks between daemon and reader. The daemon keeps what does not fit here.
const CHUNKS_MAX: usize = 64;

/// Why output could not be passed on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OutputError {
    /// The reader of standard output or standard error has gone away.
    #[error("the reader of the output has gone away")]
    ReaderGone,
    /// Something else.
    #[error("write the program's output")]
    Write(#[source] io::Error),
}

/// The writing thread.
#[derive(Debug)]
pub(crate) struct Writer {
    queue: mpsc::Sender<(OutputStream, Bytes)>,
    thread: JoinHandle<Result<(), OutputError>>,
}

impl Writer {
    /// Starts the thread.
    pub(crate) fn spawn() -> io::Result<Self> {
        Self::spawn_with(|stream, data| match stream {
            OutputStream::Stdout | OutputStream::Pty => write_all(stdout(), data),
            OutputStream::Stderr => write_all(stderr(), data),
        })
    }

    /// Starts a thread that hands every chunk to `write`.
    pub(crate) fn spawn_with(
        write: impl Fn(OutputStream, &[u8]) -> Result<(), OutputError> + Send + 'static,
    ) -> io::Result<Self> {
        let (queue, mut chunks) = mpsc::channel::<(OutputStream, Bytes)>(CHUNKS_MAX);
        let thread = std::thread::Builder::new().name("output".to_owned()).spawn(move || {
            while let Some((stream, data)) = chunks.blocking_recv() {
                write(stream, &data)?;
            }
            Ok(())
        })?;
        Ok(Self { queue, thread })
    }

    /// Queues a chunk. Once the thread has failed this waits for ever: [`failed`](Self::failed)
    /// tells, and nothing more of the program is of interest.
    pub(crate) async fn write(&self, stream: OutputStream, data: Bytes) {
        if self.queue.send((stream, data)).await.is_err() {
            std::future::pending().await
        }
    }

    /// Completes when the thread has failed.
    pub(crate) async fn failed(&self) {
        self.queue.closed().await;
    }

    /// Completes when everything is written, or writing has failed.
    pub(crate) async fn finish(self) -> Result<(), OutputError> {
        drop(self.queue);
        tokio::task::spawn_blocking(|| self.thread.join())
            .await
            .map_err(|error| OutputError::Write(io::Error::other(error)))?
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

fn write_all(fd: BorrowedFd<'_>, mut data: &[u8]) -> Result<(), OutputError> {
    while !data.is_empty() {
        match rustix::io::write(fd, data) {
            Ok(count) => data = &data[count..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                // Somebody made the shared description non-blocking.
                let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::OUT)];
                match poll(&mut fds, None) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(error) => return Err(OutputError::Write(error.into())),
                }
            }
            Err(Errno::PIPE) => return Err(OutputError::ReaderGone),
            Err(error) => return Err(OutputError::Write(error.into())),
        }
    }
    Ok(())
}
