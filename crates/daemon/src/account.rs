//! What a reply says about output: the inline excerpt of Execute and the exact account of bytes.

use std::io;

use bytes::{Bytes, BytesMut};
use cofferdam_proto::v1;

use crate::output::{OutputLog, Read};

/// Most of one stream in an answer of Execute: two of them and the rest stay below 1 MiB.
pub(crate) const INLINE_BYTES_MAX: u64 = 384 * 1024;

/// Of an excerpt that leaves something out, a quarter is the stream's start and the rest its end,
/// where programs say what went wrong.
const HEAD_SHARE: u64 = 4;

/// Account of a stream of which everything that the job file holds can be read.
pub(crate) fn of_log(log: &OutputLog) -> v1::StreamAccount {
    let held = log.held();
    account(log.total(), held.head, held.tail, held.head + held.tail)
}

/// Head and tail of a stream, at most `max` bytes, and their account.
pub(crate) fn excerpt(log: &OutputLog, max: u64) -> io::Result<(Bytes, v1::StreamAccount)> {
    let held = log.held();
    let stored = held.tail_start + held.tail;
    let unbroken = held.head == held.tail_start;
    let (head, tail_from) = if unbroken && stored <= max {
        (stored, stored)
    } else {
        let head = held.head.min(max / HEAD_SHARE);
        let oldest = if unbroken { head } else { held.tail_start };
        (head, oldest.max(stored.saturating_sub(max - max / HEAD_SHARE)))
    };
    let mut bytes = BytesMut::with_capacity((head + stored - tail_from) as usize);
    for (from, to) in [(0, head), (tail_from, stored)] {
        copy(log, from, to, &mut bytes)?;
    }
    let account = account(log.total(), head, stored - tail_from, held.head + held.tail);
    Ok((bytes.freeze(), account))
}

fn account(total: u64, head: u64, tail: u64, readable: u64) -> v1::StreamAccount {
    v1::StreamAccount {
        total_bytes: total,
        kept_bytes: head + tail,
        dropped_bytes: total - head - tail,
        head_bytes: head,
        tail_bytes: tail,
        readable_bytes: readable,
    }
}

fn copy(log: &OutputLog, mut from: u64, to: u64, into: &mut BytesMut) -> io::Result<()> {
    while from < to {
        match log.read_at(from, usize::try_from(to - from).unwrap_or(usize::MAX))? {
            Read::Data { bytes, .. } => {
                from += bytes.len() as u64;
                into.extend_from_slice(&bytes);
            }
            Read::Gap { .. } | Read::End => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::output::STREAM_BYTES_MAX;

    fn log_of(size: u64) -> (tempfile::TempDir, OutputLog) {
        let directory = tempfile::tempdir().unwrap();
        let mut log = OutputLog::new(directory.path().join("p.stdout"));
        let block: Vec<u8> = (0..1 << 16).map(byte_at).collect();
        let mut left = size;
        while left > 0 {
            let part = left.min(block.len() as u64);
            log.append(&block[..part as usize]);
            left -= part;
        }
        (directory, log)
    }

    /// The model's stream has a period of 64 KiB.
    fn byte_at(offset: u64) -> u8 {
        let at = (offset & 0xffff) as u32;
        (at.wrapping_mul(2_654_435_761) >> 24) as u8
    }

    fn check(size: u64, max: u64) {
        let (_directory, log) = log_of(size);
        let (bytes, account) = excerpt(&log, max).unwrap();
        assert_eq!(account.total_bytes, size);
        assert_eq!(account.kept_bytes + account.dropped_bytes, size);
        assert_eq!(account.head_bytes + account.tail_bytes, account.kept_bytes);
        assert_eq!(bytes.len() as u64, account.kept_bytes);
        assert_eq!(account.readable_bytes, size.min(STREAM_BYTES_MAX));
        let head = (0..account.head_bytes).map(byte_at);
        let tail = (size - account.tail_bytes..size).map(byte_at);
        assert!(bytes.iter().copied().eq(head.chain(tail)));
    }

    #[test]
    fn a_small_stream_is_whole() {
        for size in [0, 1, INLINE_BYTES_MAX] {
            let (_directory, log) = log_of(size);
            let (bytes, account) = excerpt(&log, INLINE_BYTES_MAX).unwrap();
            assert_eq!((bytes.len() as u64, account.dropped_bytes), (size, 0));
            assert_eq!((account.head_bytes, account.tail_bytes), (size, 0));
        }
    }

    #[test]
    fn a_large_stream_keeps_a_quarter_of_head() {
        let (_directory, log) = log_of(INLINE_BYTES_MAX + 1);
        let account = excerpt(&log, INLINE_BYTES_MAX).unwrap().1;
        assert_eq!((account.head_bytes, account.tail_bytes), (96 * 1024, 288 * 1024));
        assert_eq!(account.dropped_bytes, 1);
    }

    #[test]
    fn accounts_are_exact_around_every_bound() {
        for bound in [INLINE_BYTES_MAX, 4 << 20, STREAM_BYTES_MAX] {
            for size in bound - 1..=bound + 1 {
                check(size, INLINE_BYTES_MAX);
            }
        }
        check(3 * STREAM_BYTES_MAX + 12_345, INLINE_BYTES_MAX);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn accounts_are_exact(size in 0_u64..200_000, max in 8_u64..100_000) {
            check(size, max);
        }
    }
}
