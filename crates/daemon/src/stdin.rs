//! The standard input of a process between WriteStdin and the pump that writes it.
//!
//! Writers wait for room, so a program that does not read holds at most
//! [`BUFFER_BYTES`] and one message of the daemon's memory.

use std::collections::VecDeque;
use std::sync::Mutex;

use bytes::{Buf, Bytes};
use thiserror::Error;
use tokio::sync::Notify;

/// While this much waits for the program, further writes wait too: four pipes' worth, enough that
/// a program which reads is never short of input.
pub(crate) const BUFFER_BYTES: usize = 256 * 1024;

/// The terminal's end-of-file character.
const VEOF: &[u8] = &[0x04];

/// What kind of input a process has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// None: it reads `/dev/null`.
    Null,
    /// A pipe.
    Pipe,
    /// A terminal.
    Terminal,
}

/// Why nothing can be written any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(crate) enum StdinClosed {
    /// It was started without one.
    #[error("the process was started without a standard input")]
    Never,
    /// CloseStdin, or Start with all of the input.
    #[error("the standard input was closed before")]
    ByCaller,
    /// The program closed its end.
    #[error("the program closed its standard input")]
    ByProgram,
    /// The process has ended.
    #[error("the process has ended")]
    Ended,
}

/// Why a write was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum StdinError {
    /// There is no open input.
    #[error(transparent)]
    Closed(#[from] StdinClosed),
    /// The offset leaves a hole.
    #[error("offset {offset} lies beyond the {accepted} bytes accepted so far")]
    Beyond {
        /// The offset asked for.
        offset: u64,
        /// Bytes accepted since the start.
        accepted: u64,
    },
}

/// The input of one process.
#[derive(Debug)]
pub(crate) struct Stdin {
    kind: Kind,
    state: Mutex<State>,
    /// Wakes the pump.
    work: Notify,
    /// Wakes writers.
    room: Notify,
}

#[derive(Debug)]
struct State {
    queue: VecDeque<Bytes>,
    queued: usize,
    accepted: u64,
    closed: Option<StdinClosed>,
}

/// What the pump does next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Write these bytes, then call [`Stdin::wrote`].
    Write(Bytes),
    /// Close the program's input: all of it has been written.
    Close,
    /// Nothing now; [`Stdin::work`] tells when.
    Nothing,
}

impl Stdin {
    /// An input that begins with `first`, and ends with it when `whole`.
    pub(crate) fn new(kind: Kind, first: Bytes, whole: bool) -> Self {
        let closed = match kind {
            Kind::Null => Some(StdinClosed::Never),
            Kind::Pipe | Kind::Terminal => whole.then_some(StdinClosed::ByCaller),
        };
        let (queued, accepted) = (first.len(), first.len() as u64);
        let queue = if first.is_empty() { VecDeque::new() } else { VecDeque::from([first]) };
        let state = Mutex::new(State { queue, queued, accepted, closed });
        Self { kind, state, work: Notify::new(), room: Notify::new() }
    }

    /// Accepts `data` whole once there is room. Bytes below what was accepted before are left
    /// out, so a repeated write is not doubled. Returns what is accepted since the start.
    pub(crate) async fn write(&self, data: Bytes, offset: Option<u64>) -> Result<u64, StdinError> {
        loop {
            let room = self.room.notified();
            if let Some(accepted) = self.try_write(&data, offset)? {
                return Ok(accepted);
            }
            room.await;
        }
    }

    fn try_write(&self, data: &Bytes, offset: Option<u64>) -> Result<Option<u64>, StdinError> {
        let mut state = self.lock();
        if let Some(closed) = state.closed {
            return Err(closed.into());
        }
        let accepted = state.accepted;
        let mut rest = data.clone();
        if let Some(offset) = offset {
            if offset > accepted {
                return Err(StdinError::Beyond { offset, accepted });
            }
            let known = usize::try_from(accepted - offset).unwrap_or(usize::MAX);
            rest.advance(known.min(rest.len()));
        }
        if rest.is_empty() {
            return Ok(Some(accepted));
        }
        if state.queued >= BUFFER_BYTES {
            return Ok(None);
        }
        state.queued += rest.len();
        state.accepted += rest.len() as u64;
        state.queue.push_back(rest);
        self.work.notify_one();
        Ok(Some(state.accepted))
    }

    /// Ends the input after what was accepted. Closing twice is no error. A terminal gets its
    /// end-of-file character and stays open, as a keyboard does.
    pub(crate) fn close(&self) -> Result<(), StdinClosed> {
        let mut state = self.lock();
        match state.closed {
            None if self.kind == Kind::Terminal => {
                state.queue.push_back(Bytes::from_static(VEOF));
                state.queued += VEOF.len();
            }
            None => state.closed = Some(StdinClosed::ByCaller),
            Some(StdinClosed::ByCaller) => {}
            Some(closed) => return Err(closed),
        }
        self.work.notify_one();
        self.room.notify_waiters();
        Ok(())
    }

    /// For the pump: what to do next.
    pub(crate) fn next(&self) -> Next {
        let state = self.lock();
        match (state.queue.front(), state.closed) {
            (Some(bytes), _) => Next::Write(bytes.clone()),
            (None, Some(_)) => Next::Close,
            (None, None) => Next::Nothing,
        }
    }

    /// For the pump: the program's input took `count` bytes.
    pub(crate) fn wrote(&self, count: usize) {
        let mut state = self.lock();
        if let Some(front) = state.queue.front_mut() {
            front.advance(count.min(front.len()));
            if front.is_empty() {
                state.queue.pop_front();
            }
        }
        state.queued = state.queued.saturating_sub(count);
        if state.queued < BUFFER_BYTES {
            self.room.notify_waiters();
        }
    }

    /// For the pump: nothing more can be written, and why.
    pub(crate) fn end(&self, why: StdinClosed) {
        let mut state = self.lock();
        state.queue.clear();
        state.queued = 0;
        if state.closed != Some(StdinClosed::Never) {
            state.closed = Some(why);
        }
        self.room.notify_waiters();
    }

    /// For the pump: waits until [`Stdin::next`] may have something new.
    pub(crate) async fn work(&self) {
        self.work.notified().await;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn pipe() -> Stdin {
        Stdin::new(Kind::Pipe, Bytes::new(), false)
    }

    fn now<T>(future: impl Future<Output = T>) -> Poll<T> {
        pin!(future).poll(&mut Context::from_waker(Waker::noop()))
    }

    fn ready<T>(poll: Poll<T>) -> T {
        match poll {
            Poll::Ready(value) => value,
            Poll::Pending => panic!("waits"),
        }
    }

    #[test]
    fn a_repeated_write_is_not_doubled() {
        let stdin = pipe();
        assert_eq!(ready(now(stdin.write(Bytes::from("abc"), Some(0)))), Ok(3));
        assert_eq!(ready(now(stdin.write(Bytes::from("abcde"), Some(0)))), Ok(5));
        assert_eq!(stdin.next(), Next::Write(Bytes::from("abc")));
        stdin.wrote(3);
        assert_eq!(stdin.next(), Next::Write(Bytes::from("de")));
        let beyond = StdinError::Beyond { offset: 6, accepted: 5 };
        assert_eq!(ready(now(stdin.write(Bytes::from("x"), Some(6)))), Err(beyond));
    }

    #[test]
    fn a_writer_waits_for_room_and_then_goes_on() {
        let stdin = pipe();
        let full = Bytes::from(vec![0; BUFFER_BYTES]);
        assert!(now(stdin.write(full, None)).is_ready());
        let mut second = pin!(stdin.write(Bytes::from("x"), None));
        let mut context = Context::from_waker(Waker::noop());
        assert!(second.as_mut().poll(&mut context).is_pending());
        stdin.wrote(1);
        assert_eq!(ready(second.poll(&mut context)), Ok(BUFFER_BYTES as u64 + 1));
    }

    #[test]
    fn a_waiting_writer_hears_of_the_end() {
        let stdin = pipe();
        assert!(now(stdin.write(Bytes::from(vec![0; BUFFER_BYTES]), None)).is_ready());
        let mut second = pin!(stdin.write(Bytes::from("x"), None));
        let mut context = Context::from_waker(Waker::noop());
        assert!(second.as_mut().poll(&mut context).is_pending());
        stdin.end(StdinClosed::Ended);
        assert_eq!(ready(second.poll(&mut context)), Err(StdinClosed::Ended.into()));
    }

    #[test]
    fn the_input_closes_after_its_last_byte() {
        let stdin = Stdin::new(Kind::Pipe, Bytes::from("ab"), true);
        assert_eq!(stdin.next(), Next::Write(Bytes::from("ab")));
        stdin.wrote(1);
        assert_eq!(stdin.next(), Next::Write(Bytes::from("b")));
        stdin.wrote(1);
        assert_eq!(stdin.next(), Next::Close);
        assert_eq!(stdin.close(), Ok(()));
    }

    #[test]
    fn closing_a_terminal_sends_its_end_of_file_character() {
        let stdin = Stdin::new(Kind::Terminal, Bytes::new(), false);
        assert_eq!(stdin.close(), Ok(()));
        assert_eq!(stdin.next(), Next::Write(Bytes::from_static(VEOF)));
        stdin.wrote(1);
        assert_eq!(stdin.next(), Next::Nothing);
    }

    #[test]
    fn without_an_input_every_write_is_refused() {
        let stdin = Stdin::new(Kind::Null, Bytes::new(), true);
        let refused = ready(now(stdin.write(Bytes::from("x"), None)));
        assert_eq!(refused, Err(StdinClosed::Never.into()));
        assert_eq!(stdin.close(), Err(StdinClosed::Never));
    }
}
