//! Frames that belong together leave in one write.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, BufWriter, ReadBuf};

/// What is gathered before it is written: a full frame of HTTP/2 (16 KiB by default, RFC 9113
/// section 4.2) and the headers around it.
const CAPACITY: usize = 16 * 1024 + 512;

/// Above it nothing is gained by waiting for more.
const ENOUGH: usize = 4 * 1024;

/// A connection that gathers what is written within one turn of the runtime.
///
/// HTTP/2 flushes the headers of a call before its body, and a body before its trailers. Written
/// one by one, each wakes the peer, which finds half a message and sleeps again; on few
/// processors it takes the writer's for that. So a flush first lets the tasks that are ready run,
/// once: what they add leaves in the same write.
#[derive(Debug)]
pub struct JoinedWrites<T> {
    inner: BufWriter<T>,
    /// Whether the others had their turn since the last write.
    yielded: bool,
}

impl<T: AsyncWrite> JoinedWrites<T> {
    /// Gathers what is written to `inner`.
    pub fn new(inner: T) -> Self {
        Self { inner: BufWriter::with_capacity(CAPACITY, inner), yielded: false }
    }

    /// The connection itself.
    pub fn get_ref(&self) -> &T {
        self.inner.get_ref()
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for JoinedWrites<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for JoinedWrites<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    /// Without it HTTP/2 joins small frames by itself, and hands over large ones in pieces, which
    /// are joined here.
    fn is_write_vectored(&self) -> bool {
        false
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if (1..ENOUGH).contains(&self.inner.buffer().len()) && !self.yielded {
            self.yielded = true;
            // A task that wakes itself while it runs comes after those that are ready.
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let flushed = ready!(Pin::new(&mut self.inner).poll_flush(context));
        self.yielded = false;
        Poll::Ready(flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use futures::future::poll_fn;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// Counts the writes that reach it.
    #[derive(Debug, Default)]
    struct Counted(Vec<usize>);

    impl AsyncWrite for Counted {
        fn poll_write(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            self.0.push(bytes.len());
            Poll::Ready(Ok(bytes.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn what_comes_between_a_flush_and_the_next_turn_leaves_with_it() {
        let mut joined = JoinedWrites::new(Counted::default());
        joined.write_all(b"headers").await.unwrap();
        let first = poll_fn(|context| Poll::Ready(Pin::new(&mut joined).poll_flush(context)));
        assert!(first.await.is_pending());
        joined.write_all(b"body").await.unwrap();
        joined.flush().await.unwrap();
        assert_eq!(joined.get_ref().0, [11]);
        // And again: the next flush waits for its own turn.
        joined.write_all(b"next").await.unwrap();
        let next = poll_fn(|context| Poll::Ready(Pin::new(&mut joined).poll_flush(context)));
        assert!(next.await.is_pending());
        joined.flush().await.unwrap();
        assert_eq!(joined.get_ref().0, [11, 4]);
    }

    #[tokio::test]
    async fn a_large_frame_leaves_at_once_and_whole() {
        let mut joined = JoinedWrites::new(Counted::default());
        joined.write_all(&[0; 9]).await.unwrap();
        joined.write_all(&[0; 16 * 1024]).await.unwrap();
        let flush = poll_fn(|context| Poll::Ready(Pin::new(&mut joined).poll_flush(context)));
        assert!(matches!(flush.await, Poll::Ready(Ok(()))));
        assert_eq!(joined.get_ref().0, [9 + 16 * 1024]);
    }

    #[tokio::test]
    async fn nothing_is_lost_at_the_end() {
        let (near, mut far) = tokio::io::duplex(8);
        let mut joined = JoinedWrites::new(near);
        let bytes: Vec<u8> = (0..=255).cycle().take(100_000).collect();
        let sent = bytes.clone();
        let writer = tokio::spawn(async move {
            for piece in sent.chunks(777) {
                joined.write_all(piece).await.unwrap();
                joined.flush().await.unwrap();
            }
            joined.write_all(b"end").await.unwrap();
            joined.shutdown().await.unwrap();
        });
        let mut received = Vec::new();
        far.read_to_end(&mut received).await.unwrap();
        writer.await.unwrap();
        assert_eq!(received, [&bytes[..], b"end"].concat());
    }
}
