//! The one reader that a process may wait for.
//!
//! By default a process waits for nobody, and a reader that is slow loses the middle of the output.
//! A client can ask for the other thing, what a pipe does: the program's output is not read on
//! while that client's stream is far behind. It ends with that stream.

use tokio::sync::watch;

/// Bytes of each stream that the log may be ahead of the reader: with what one sweep of a full
/// pipe adds (1 MiB), well within what the log keeps of a stream's end, so that nothing is lost.
const AHEAD_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// Standard output (or the terminal) and standard error.
const STREAMS_MAX: usize = 2;

/// How far the reader has come in each stream; `None` when nobody is waited for.
pub(crate) type Offsets = Option<[u64; STREAMS_MAX]>;

/// Connects a reader with the pump.
#[derive(Debug)]
pub(crate) struct Flow(watch::Sender<Offsets>);

impl Flow {
    /// Waits for a reader, or for nobody.
    pub(crate) fn new(wait: bool) -> Self {
        Self(watch::Sender::new(wait.then_some([0; STREAMS_MAX])))
    }

    /// Whether a stream of `total` bytes is too far ahead of its reader.
    pub(crate) fn is_ahead(&self, stream: usize, total: impl FnOnce() -> u64) -> bool {
        let read = self.0.borrow().and_then(|offsets| offsets.get(stream).copied());
        read.is_some_and(|read| total().saturating_sub(read) > AHEAD_BYTES_MAX)
    }

    /// The reader wants `offset` next.
    pub(crate) fn advance(&self, stream: usize, offset: u64) {
        self.0.send_if_modified(|offsets| {
            let slot = offsets.as_mut().and_then(|offsets| offsets.get_mut(stream));
            slot.map(|slot| *slot = offset).is_some()
        });
    }

    /// The reader is gone.
    pub(crate) fn release(&self) {
        self.0.send_if_modified(|offsets| offsets.take().is_some());
    }

    /// Whether somebody is waited for, and news of it.
    pub(crate) fn news(&self) -> watch::Receiver<Offsets> {
        self.0.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_waits_only_for_its_own_reader_and_only_while_there_is_one() {
        let flow = Flow::new(true);
        assert!(!flow.is_ahead(0, || AHEAD_BYTES_MAX));
        assert!(flow.is_ahead(0, || AHEAD_BYTES_MAX + 1));
        flow.advance(0, 1);
        assert!(!flow.is_ahead(0, || AHEAD_BYTES_MAX + 1));
        assert!(flow.is_ahead(1, || AHEAD_BYTES_MAX + 1));
        flow.release();
        assert!(!flow.is_ahead(1, || u64::MAX));
        assert!(!Flow::new(false).is_ahead(0, || u64::MAX));
    }
}
