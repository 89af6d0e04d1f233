//! Connections on the unix socket: who may, how many, and how many there are.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use cofferdam_transport::JoinedWrites;
use futures::stream::Stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::time::{Instant, Sleep};
use tonic::transport::server::{Connected, UdsConnectInfo};

/// Connections at once: four for each call that may run.
const CONNECTIONS_MAX: usize = 1024;

/// Pause after an accept that failed, for example for want of descriptors: long enough not to
/// spin, short enough not to be noticed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Who may connect.
#[derive(Debug)]
pub(crate) struct Peers {
    /// The daemon's own user.
    pub(crate) own: u32,
    /// Users whom the policy names.
    pub(crate) named: Vec<u32>,
}

impl Peers {
    fn admit(&self, uid: u32) -> bool {
        uid == 0 || uid == self.own || self.named.contains(&uid)
    }
}

/// How many connections there are.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Connections {
    /// Now.
    pub(crate) open: usize,
    /// Since the start.
    pub(crate) total: u64,
}

/// The connections of a listener, already checked.
pub(crate) struct Incoming {
    listener: UnixListener,
    peers: Peers,
    count: watch::Sender<Connections>,
    pause: Option<Pin<Box<Sleep>>>,
}

impl Incoming {
    /// Takes connections from `listener`; `count` follows how many are open.
    pub(crate) fn new(
        listener: UnixListener,
        peers: Peers,
        count: watch::Sender<Connections>,
    ) -> Self {
        Self { listener, peers, count, pause: None }
    }

    fn check(&self, stream: &UnixStream) -> bool {
        let open = self.count.borrow().open;
        match stream.peer_cred() {
            Err(error) => tracing::warn!(%error, "a peer without credentials was turned away"),
            Ok(peer) if !self.peers.admit(peer.uid()) => {
                tracing::warn!(uid = peer.uid(), pid = peer.pid(), "a peer was turned away");
            }
            Ok(_) if open >= CONNECTIONS_MAX => {
                tracing::warn!(open, "a connection above the limit was turned away");
            }
            Ok(_) => return true,
        }
        false
    }
}

impl Stream for Incoming {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(pause) = &mut self.pause {
                ready!(pause.as_mut().poll(context));
                self.pause = None;
            }
            match ready!(self.listener.poll_accept(context)) {
                Ok((stream, _)) => {
                    if self.check(&stream) {
                        let connection = Connection::new(stream, self.count.clone());
                        return Poll::Ready(Some(Ok(connection)));
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "accept failed");
                    let until = Instant::now() + ACCEPT_PAUSE;
                    self.pause = Some(Box::pin(tokio::time::sleep_until(until)));
                }
            }
        }
    }
}

/// One open connection.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: JoinedWrites<UnixStream>,
    count: watch::Sender<Connections>,
}

impl Connection {
    fn new(stream: UnixStream, count: watch::Sender<Connections>) -> Self {
        count.send_modify(|count| {
            count.open += 1;
            count.total += 1;
        });
        Self { stream: JoinedWrites::new(stream), count }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.count.send_modify(|count| count.open = count.open.saturating_sub(1));
    }
}

impl Connected for Connection {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> UdsConnectInfo {
        self.stream.get_ref().connect_info()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_the_own_user_and_named_users_may_connect() {
        let peers = Peers { own: 1000, named: vec![1001] };
        let admitted: Vec<_> = (998..1003).chain([0]).filter(|uid| peers.admit(*uid)).collect();
        assert_eq!(admitted, [1000, 1001, 0]);
    }
}
