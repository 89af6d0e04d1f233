//! One output stream of a process, kept in its job file.
//!
//! The file has two parts: the stream's first bytes (the head) stay, everything later goes round
//! in a ring (the tail). So its size is bounded, whatever the program writes, and what is gone is
//! one range between head and tail, known to the byte. Readers hold no queue: each asks for bytes
//! at its own offset and learns of a gap when the ring has overtaken it.
//!
//! ```text
//! stream  |--------head--------|.....gone.....|------------tail------------|
//!         0                head_end       tail_start                     total
//! ```
//!
//! A file that cannot be written any more (a full disk) freezes: what it holds stays readable,
//! what comes later only counts.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use bytes::Bytes;

/// Bytes at a stream's start that are kept for good: the first error of a long build is here.
const HEAD_BYTES: u64 = 4 * 1024 * 1024;

/// Bytes at a stream's end that are kept: with the head 16 MiB, the bound of a job file.
const TAIL_BYTES: u64 = 12 * 1024 * 1024;

/// Most that one stream keeps.
pub(crate) const STREAM_BYTES_MAX: u64 = HEAD_BYTES + TAIL_BYTES;

/// How a job file is divided.
#[derive(Debug, Clone, Copy)]
struct Shape {
    head: u64,
    tail: u64,
}

/// Answer to a read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Read {
    /// Bytes of the stream, at least one.
    Data {
        /// Where the first one belongs.
        offset: u64,
        /// The bytes.
        bytes: Bytes,
    },
    /// Nothing is left of the bytes from `from` up to, not including, `to`.
    Gap {
        /// First byte that is gone.
        from: u64,
        /// First byte that may be there again.
        to: u64,
    },
    /// The offset is at the end of what has been produced, or beyond.
    End,
}

/// What can be read of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Held {
    /// Bytes from the stream's start.
    pub(crate) head: u64,
    /// Where the second readable range begins.
    pub(crate) tail_start: u64,
    /// Its length.
    pub(crate) tail: u64,
}

/// The log of one stream. Dropping it removes its file.
#[derive(Debug)]
pub(crate) struct OutputLog {
    path: PathBuf,
    shape: Shape,
    file: Option<File>,
    /// Bytes that the program wrote.
    total: u64,
    /// Bytes that went into the file, counted from the stream's start. Equal to `total` unless
    /// the file froze.
    stored: u64,
    frozen: bool,
}

impl OutputLog {
    /// A log without a file yet; the first byte makes it.
    pub(crate) fn new(path: PathBuf) -> Self {
        Self::with_shape(path, Shape { head: HEAD_BYTES, tail: TAIL_BYTES })
    }

    fn with_shape(path: PathBuf, shape: Shape) -> Self {
        Self { path, shape, file: None, total: 0, stored: 0, frozen: false }
    }

    /// Bytes that the program wrote.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// What can still be read.
    pub(crate) fn held(&self) -> Held {
        let tail_start = self.tail_start();
        Held { head: self.head_end(), tail_start, tail: self.stored - tail_start }
    }

    /// Adds what the program wrote.
    pub(crate) fn append(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        if self.frozen {
            return;
        }
        if let Err(error) = self.store(bytes) {
            tracing::warn!(path = %self.path.display(), %error, "output is no longer kept");
            self.frozen = true;
        }
    }

    /// Gives up what is held, now and in future; only the total goes on counting.
    pub(crate) fn discard(&mut self) {
        self.remove_file();
        self.frozen = true;
        self.stored = 0;
    }

    /// At most `max` bytes at `offset`, or what is there instead. Fails when the file cannot be
    /// read, or somebody cut it.
    pub(crate) fn read_at(&self, offset: u64, max: usize) -> io::Result<Read> {
        if offset >= self.total {
            return Ok(Read::End);
        }
        let end = if offset < self.head_end() {
            self.head_end()
        } else if offset < self.tail_start() {
            return Ok(Read::Gap { from: offset, to: self.tail_start() });
        } else if offset < self.stored {
            self.stored
        } else {
            return Ok(Read::Gap { from: offset, to: self.total });
        };
        let (position, room) = self.place(offset);
        let length = (end - offset).min(room).min(max as u64);
        let bytes = self.load(position, length as usize)?;
        Ok(Read::Data { offset, bytes })
    }

    fn head_end(&self) -> u64 {
        self.stored.min(self.shape.head)
    }

    fn tail_start(&self) -> u64 {
        let oldest = self.stored.saturating_sub(self.shape.tail);
        oldest.max(self.shape.head).min(self.stored)
    }

    /// Where a byte of the stream lies in the file, and how many follow it without a turn.
    fn place(&self, offset: u64) -> (u64, u64) {
        let Shape { head, tail } = self.shape;
        match offset.checked_sub(head) {
            None => (offset, head - offset),
            Some(beyond) => (head + beyond % tail, tail - beyond % tail),
        }
    }

    fn store(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let (position, room) = self.place(self.stored);
            let part = &bytes[..bytes.len().min(usize::try_from(room).unwrap_or(usize::MAX))];
            let written = rustix::io::pwrite(self.file()?, part, position)?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            self.stored += written as u64;
            bytes = &bytes[written..];
        }
        Ok(())
    }

    fn file(&mut self) -> io::Result<&File> {
        if self.file.is_none() {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create_new(true).mode(0o600);
            self.file = Some(options.open(&self.path)?);
        }
        self.file.as_ref().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn load(&self, position: u64, length: usize) -> io::Result<Bytes> {
        let file = self.file.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let mut bytes = Vec::with_capacity(length);
        while bytes.len() < length {
            let at = position + bytes.len() as u64;
            let spare = rustix::buffer::spare_capacity(&mut bytes);
            if rustix::io::pread(file, spare, at)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        bytes.truncate(length);
        Ok(bytes.into())
    }

    fn remove_file(&mut self) {
        if self.file.take().is_some()
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "job file was not removed");
        }
    }
}

impl Drop for OutputLog {
    fn drop(&mut self) {
        self.remove_file();
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const SMALL: Shape = Shape { head: 5, tail: 8 };

    fn small() -> (tempfile::TempDir, OutputLog) {
        let directory = tempfile::tempdir().unwrap();
        let log = OutputLog::with_shape(directory.path().join("p.stdout"), SMALL);
        (directory, log)
    }

    /// What a reader that starts at `offset` gets: each byte of the stream, or `None` where it is
    /// told of a gap.
    fn read_all(log: &OutputLog, mut offset: u64, max: usize) -> Vec<Option<u8>> {
        let mut seen = Vec::new();
        loop {
            match log.read_at(offset, max).unwrap() {
                Read::Data { offset: at, bytes } => {
                    assert_eq!(at, offset);
                    assert!(!bytes.is_empty() && bytes.len() <= max);
                    offset += bytes.len() as u64;
                    seen.extend(bytes.iter().copied().map(Some));
                }
                Read::Gap { from, to } => {
                    assert_eq!(from, offset);
                    assert!(to > from);
                    seen.extend((from..to).map(|_| None));
                    offset = to;
                }
                Read::End => return seen,
            }
        }
    }

    proptest! {
        #[test]
        fn head_and_tail_are_the_streams_own_and_the_gap_is_exact(
            parts in vec(vec(any::<u8>(), 0..12), 0..12),
            offset in 0_u64..80,
            max in 1_usize..20,
        ) {
            let (_directory, mut log) = small();
            let mut model = Vec::new();
            for part in &parts {
                log.append(part);
                model.extend_from_slice(part);
            }
            let tail_start = model.len().saturating_sub(8).max(5);
            let expected: Vec<_> = model
                .iter()
                .enumerate()
                .skip(offset as usize)
                .map(|(at, byte)| (at < 5 || at >= tail_start).then_some(*byte))
                .collect();
            prop_assert_eq!(read_all(&log, offset, max), expected);
            let held = log.held();
            let gap = tail_start.min(model.len()) - 5.min(model.len());
            prop_assert_eq!(held.head + held.tail + gap as u64, log.total());
        }

        #[test]
        fn a_slow_reader_gets_every_byte_or_an_exact_gap(
            steps in vec((vec(any::<u8>(), 0..20), any::<bool>()), 0..20),
        ) {
            let (_directory, mut log) = small();
            let (mut model, mut seen) = (Vec::new(), Vec::new());
            for (part, read) in &steps {
                log.append(part);
                model.extend_from_slice(part);
                if *read {
                    seen.extend(read_all(&log, seen.len() as u64, 7));
                }
            }
            seen.extend(read_all(&log, seen.len() as u64, 7));
            prop_assert_eq!(seen.len(), model.len());
            for (got, wrote) in seen.iter().zip(&model) {
                prop_assert!(got.is_none_or(|byte| byte == *wrote));
            }
        }
    }

    #[test]
    fn the_file_comes_with_the_first_byte_and_goes_with_the_log() {
        let (directory, mut log) = small();
        let files = || std::fs::read_dir(directory.path()).unwrap().count();
        log.append(b"");
        assert_eq!(files(), 0);
        log.append(b"a");
        assert_eq!(files(), 1);
        drop(log);
        assert_eq!(files(), 0);
    }

    #[test]
    fn the_file_stays_within_its_bound() {
        let (directory, mut log) = small();
        for _ in 0..100 {
            log.append(b"abcdefg");
        }
        let size = std::fs::metadata(directory.path().join("p.stdout")).unwrap().len();
        assert_eq!((size, log.total()), (13, 700));
    }

    #[test]
    fn a_log_that_cannot_write_counts_on_and_keeps_what_it_has() {
        let mut log = OutputLog::with_shape("/proc/self/no/such".into(), SMALL);
        log.append(b"abc");
        assert_eq!(log.total(), 3);
        assert_eq!(log.read_at(1, 9).unwrap(), Read::Gap { from: 1, to: 3 });
        assert_eq!(log.held(), Held { head: 0, tail_start: 0, tail: 0 });
    }

    #[test]
    fn a_discarded_log_is_one_gap() {
        let (directory, mut log) = small();
        log.append(b"abc");
        log.discard();
        log.append(b"de");
        assert_eq!(log.read_at(0, 9).unwrap(), Read::Gap { from: 0, to: 5 });
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_that_somebody_cut_is_an_error_and_not_an_end() {
        let (directory, mut log) = small();
        log.append(b"abc");
        let path = directory.path().join("p.stdout");
        OpenOptions::new().write(true).open(path).unwrap().set_len(0).unwrap();
        assert_eq!(log.read_at(0, 9).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
