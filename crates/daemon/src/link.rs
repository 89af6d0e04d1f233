//! The daemon's end of a cell: requests out without losing one, events in, and the news of its
//! death.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use cofferdam_cell::channel::{Channel, Received};
use cofferdam_cell::protocol::{Event, Request, ToolboxReply, ToolboxRequest};
use cofferdam_cell::{Cell, LaunchError};
use cofferdam_spec::Enforcement;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::ready::register;
use crate::toolbox::Toolbox;

/// Names the only question that the toolbox is asked.
const SURVEY_TOKEN: u64 = 1;

/// A cell that stands.
#[derive(Debug)]
pub(crate) struct Port {
    /// Its channels. Dropping them ends it.
    pub(crate) ends: Ends,
    /// What the kernel enforces.
    pub(crate) enforcement: Enforcement,
}

impl From<Cell> for Port {
    fn from(cell: Cell) -> Self {
        let enforcement = cell.enforcement.clone();
        Self { ends: Ends::Cell(Box::new(cell)), enforcement }
    }
}

/// Starts a cell.
pub(crate) type Launch = Box<dyn FnMut() -> Result<Port, LaunchError> + Send>;

/// The channels of a cell.
#[derive(Debug)]
pub(crate) enum Ends {
    /// A real one.
    Cell(Box<Cell>),
    /// A thread of a test that plays its part.
    #[cfg(test)]
    Pair {
        /// To init.
        init: Channel<Request, Event>,
        /// To the toolbox.
        toolbox: Channel<ToolboxRequest, ToolboxReply>,
    },
}

impl Ends {
    fn init(&self) -> &Channel<Request, Event> {
        match self {
            Ends::Cell(cell) => &cell.init,
            #[cfg(test)]
            Ends::Pair { init, .. } => init,
        }
    }

    /// The way to the toolbox.
    pub(crate) fn toolbox(&self) -> &Channel<ToolboxRequest, ToolboxReply> {
        match self {
            Ends::Cell(cell) => &cell.toolbox,
            #[cfg(test)]
            Ends::Pair { toolbox, .. } => toolbox,
        }
    }
}

#[derive(Debug)]
struct InitEnd(Arc<Ends>);

impl AsRawFd for InitEnd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.init().as_fd().as_raw_fd()
    }
}

#[derive(Debug)]
struct ToolboxEnd(Arc<Ends>);

impl AsRawFd for ToolboxEnd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.toolbox().as_fd().as_raw_fd()
    }
}

/// Why a request did not reach init.
#[derive(Debug)]
pub(crate) enum SendError {
    /// Only this one could not be sent; the cell is well.
    Refused(io::Error),
    /// The cell is gone.
    Lost(io::Error),
}

/// What happened at the link.
#[derive(Debug)]
pub(crate) enum Incoming {
    /// Init reported something.
    Event(Received<Event>),
    /// A request that had waited could not be sent.
    Refused(Request, io::Error),
    /// Every request that had waited is sent.
    Unclogged,
    /// The toolbox counted the files that programs see as somebody else's.
    Surveyed {
        /// Their number.
        foreign: u64,
        /// Whether everything was visited.
        complete: bool,
    },
    /// The cell is gone.
    Lost(io::Error),
}

/// A cell, for the supervisor's task.
#[derive(Debug)]
pub(crate) struct Link {
    init: AsyncFd<InitEnd>,
    /// Watches for room in the socket to init, while requests wait for it. Always to watch would
    /// wake the daemon each time that init has read a request, in the middle of every call.
    room: Option<AsyncFd<OwnedFd>>,
    toolbox: AsyncFd<ToolboxEnd>,
    lanes: Toolbox,
    /// Requests that found the socket full. While there are any, the supervisor takes no command,
    /// so their number is bounded by what one command and the pending kills ask for.
    outbox: VecDeque<Request>,
}

impl Link {
    /// Registers the channels with the runtime, and asks for a survey of the workspace.
    pub(crate) fn new(ends: Ends) -> io::Result<Self> {
        let ends = Arc::new(ends);
        ends.toolbox().send(&ToolboxRequest::Survey { token: SURVEY_TOKEN }, &[])?;
        Ok(Self {
            init: register(InitEnd(Arc::clone(&ends)), Interest::READABLE)?,
            room: None,
            lanes: Toolbox::new(Arc::downgrade(&ends)),
            toolbox: register(ToolboxEnd(ends), Interest::READABLE)?,
            outbox: VecDeque::new(),
        })
    }

    /// Sends a request, or keeps it until the socket has room.
    pub(crate) fn send(&mut self, request: Request) -> Result<(), SendError> {
        if self.outbox.is_empty() {
            match self.channel().send(&request, &[]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let socket = self.channel().as_fd().try_clone_to_owned();
                    let room = socket.and_then(|fd| register(fd, Interest::WRITABLE));
                    self.room = Some(room.map_err(SendError::Refused)?);
                }
                sent => return sent.map_err(classify),
            }
        }
        self.outbox.push_back(request);
        Ok(())
    }

    /// Calls to the toolbox of this cell.
    pub(crate) fn toolbox(&self) -> Toolbox {
        self.lanes.clone()
    }

    /// Whether requests wait for room.
    pub(crate) fn is_clogged(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Waits for the next thing that happens. Nothing is lost when the wait is given up.
    pub(crate) async fn next(&mut self) -> Incoming {
        loop {
            tokio::select! {
                biased;
                ready = self.init.readable() => match ready {
                    Err(error) => return Incoming::Lost(error),
                    Ok(mut guard) => match guard.try_io(|end| end.get_ref().0.init().receive()) {
                        Ok(Ok(Some(received))) => return Incoming::Event(received),
                        Ok(Ok(None)) => return Incoming::Lost(end_of_file("init")),
                        Ok(Err(error)) => return Incoming::Lost(error),
                        Err(_would_block) => {}
                    },
                },
                ready = self.toolbox.readable() => match ready {
                    Err(error) => return Incoming::Lost(error),
                    Ok(mut guard) => match guard.try_io(|end| end.get_ref().0.toolbox().receive()) {
                        Ok(Ok(Some(received))) => {
                            if let ToolboxReply::Surveyed { token: SURVEY_TOKEN, foreign, complete } =
                                received.message
                            {
                                return Incoming::Surveyed { foreign, complete };
                            }
                        }
                        Err(_would_block) => {}
                        Ok(Ok(None)) => return Incoming::Lost(end_of_file("toolbox")),
                        Ok(Err(error)) => return Incoming::Lost(error),
                    },
                },
                () = room(&self.room), if !self.outbox.is_empty() => {
                    if let Some(incoming) = self.flush() {
                        return incoming;
                    }
                }
            }
        }
    }

    /// Sends what waits, until the socket is full again.
    fn flush(&mut self) -> Option<Incoming> {
        while let Some(request) = self.outbox.pop_front() {
            match self.channel().send(&request, &[]) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.outbox.push_front(request);
                    return None;
                }
                Err(error) => {
                    return Some(match classify(error) {
                        SendError::Lost(error) => Incoming::Lost(error),
                        SendError::Refused(error) => Incoming::Refused(request, error),
                    });
                }
            }
        }
        self.room = None;
        Some(Incoming::Unclogged)
    }

    fn channel(&self) -> &Channel<Request, Event> {
        self.init.get_ref().0.init()
    }
}

/// Waits for a sign that the socket may have room.
async fn room(room: &Option<AsyncFd<OwnedFd>>) {
    match room {
        Some(socket) => {
            if let Ok(mut guard) = socket.writable().await {
                guard.clear_ready();
            }
        }
        None => std::future::pending().await,
    }
}

fn classify(error: io::Error) -> SendError {
    match error.kind() {
        io::ErrorKind::BrokenPipe
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::NotConnected => SendError::Lost(error),
        _ => SendError::Refused(error),
    }
}

fn end_of_file(who: &str) -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, format!("the cell's {who} closed its channel"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use cofferdam_cell::protocol::KillCause;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    }

    fn kill(call: u64) -> Request {
        Request::Kill { call, grace: Duration::ZERO, cause: KillCause::Client }
    }

    #[tokio::test]
    async fn requests_that_find_the_socket_full_wait_and_arrive_in_order() {
        let (init, init_end) = pair();
        let (toolbox, _toolbox_end) = pair();
        let ends = Ends::Pair { init: Channel::new(init), toolbox: Channel::new(toolbox) };
        let mut link = Link::new(ends).unwrap();
        let mut sent = 0;
        while !link.is_clogged() {
            link.send(kill(sent)).unwrap();
            sent += 1;
        }
        for _ in 0..10 {
            link.send(kill(sent)).unwrap();
            sent += 1;
        }
        let init = Channel::<Event, Request>::new(init_end);
        let mut arrived = Vec::new();
        while (arrived.len() as u64) < sent {
            while let Ok(Some(received)) = init.receive() {
                arrived.push(received.message);
            }
            if link.is_clogged() {
                let next = tokio::time::timeout(Duration::from_secs(5), link.next());
                assert!(matches!(next.await, Ok(Incoming::Unclogged)));
            }
        }
        assert_eq!(arrived, (0..sent).map(kill).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn the_end_of_either_channel_is_the_end_of_the_cell() {
        for lost in 0..2 {
            let (init, init_end) = pair();
            let (toolbox, toolbox_end) = pair();
            let ends = Ends::Pair { init: Channel::new(init), toolbox: Channel::new(toolbox) };
            let mut link = Link::new(ends).unwrap();
            let mut peers = vec![init_end, toolbox_end];
            drop(peers.remove(lost));
            assert!(matches!(link.next().await, Incoming::Lost(_)), "{lost}");
        }
    }
}
