//! The daemon's end of a cell: requests out without losing one, events in, and the news of its
//! death.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;

use cofferdam_cell::channel::{Channel, Received};
use cofferdam_cell::protocol::{Event, Request, ToolboxReply, ToolboxRequest};
use cofferdam_cell::{Cell, LaunchError};
use cofferdam_spec::Enforcement;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::ready::register;

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

    fn toolbox(&self) -> &Channel<ToolboxRequest, ToolboxReply> {
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
    toolbox: AsyncFd<ToolboxEnd>,
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
            init: register(InitEnd(Arc::clone(&ends)), Interest::READABLE | Interest::WRITABLE)?,
            toolbox: register(ToolboxEnd(ends), Interest::READABLE)?,
            outbox: VecDeque::new(),
        })
    }

    /// Sends a request, or keeps it until the socket has room.
    pub(crate) fn send(&mut self, request: Request) -> Result<(), SendError> {
        if !self.outbox.is_empty() {
            self.outbox.push_back(request);
            return Ok(());
        }
        match self.channel().send(&request, &[]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.outbox.push_back(request);
                Ok(())
            }
            Err(error) => Err(classify(error)),
            Ok(()) => Ok(()),
        }
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
                ready = self.init.writable(), if !self.outbox.is_empty() => {
                    let Ok(mut guard) = ready else { continue };
                    while let Some(request) = self.outbox.front() {
                        let sent = guard.try_io(|end| end.get_ref().0.init().send(request, &[]));
                        let Ok(sent) = sent else { break };
                        let request = self.outbox.pop_front();
                        match (sent.map_err(classify), request) {
                            (Err(SendError::Lost(error)), _) => return Incoming::Lost(error),
                            (Err(SendError::Refused(error)), Some(request)) => {
                                return Incoming::Refused(request, error);
                            }
                            _ => {}
                        }
                    }
                    if self.outbox.is_empty() {
                        return Incoming::Unclogged;
                    }
                }
            }
        }
    }

    fn channel(&self) -> &Channel<Request, Event> {
        self.init.get_ref().0.init()
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
