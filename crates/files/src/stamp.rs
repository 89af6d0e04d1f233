//! Stamps of files, and reading a file part by part.

use std::os::fd::{AsFd, OwnedFd};

use cofferdam_spec::Stamp;
use rustix::buffer::spare_capacity;
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};

use crate::call::{Fault, FaultKind};
use crate::fault::{at, found, kernel};
use crate::serve::Reply;

/// Bytes of one read: a file of 1 MiB costs two, and a part stays in the cache of a core while it
/// is hashed and searched.
const PART_BYTES: u64 = 512 * 1024;

/// Bytes between two questions whether somebody still waits: hashing so many takes a few
/// milliseconds, or 20 without instructions for it.
const WANTED_BYTES: u64 = 4 * 1024 * 1024;

/// Most that is read of a file of which the kernel does not know the size, and says 0: those of
/// `/proc` and `/sys`.
pub(crate) const UNSIZED_BYTES_MAX: u64 = 1024 * 1024;

/// Most that is read of a file whose size is said to be `size`, in bytes.
pub(crate) fn bytes_to_read(size: u64) -> u64 {
    if size == 0 { UNSIZED_BYTES_MAX } else { size }
}

/// Whether a file has bytes from `offset` on.
pub(crate) fn has_more(file: &OwnedFd, offset: u64) -> Result<bool, Fault> {
    let read = rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut [0_u8; 1], offset));
    Ok(read.map_err(at("read"))? > 0)
}

/// The parts of a file, from its start to the size that it had when it was opened. So the end comes
/// also when somebody makes it longer all the time; when it becomes shorter, it ends there.
pub(crate) struct Parts<'a> {
    file: &'a OwnedFd,
    reply: &'a dyn Reply,
    /// Bytes that were read.
    offset: u64,
    /// Where to end.
    size: u64,
    /// Where to ask next whether somebody waits.
    ask_at: u64,
    part: Vec<u8>,
}

impl<'a> Parts<'a> {
    /// The parts of a regular file that is `size` bytes long. Whether somebody waits is asked of
    /// `reply`.
    pub(crate) fn new(file: &'a OwnedFd, size: u64, reply: &'a dyn Reply) -> Self {
        let part = Vec::with_capacity(size.min(PART_BYTES) as usize);
        Self { file, reply, offset: 0, size, ask_at: WANTED_BYTES, part }
    }

    /// The next part; `None` at the end. Fails at step `cancelled` when nobody waits any more.
    pub(crate) fn next(&mut self) -> Result<Option<&[u8]>, Fault> {
        let wanted = (self.size - self.offset).min(PART_BYTES) as usize;
        if wanted == 0 {
            return Ok(None);
        }
        if self.offset >= self.ask_at {
            still_wanted(self.reply)?;
            self.ask_at = self.offset + WANTED_BYTES;
        }
        self.part.clear();
        self.part.reserve(wanted);
        while self.part.len() < wanted {
            let offset = self.offset + self.part.len() as u64;
            match rustix::io::pread(self.file.as_fd(), spare_capacity(&mut self.part), offset) {
                Ok(0) => {
                    // It is shorter by now.
                    self.size = offset;
                    break;
                }
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(kernel("read", errno)),
            }
        }
        // The buffer may have more room than was asked for, and the file more bytes than it had.
        self.part.truncate(wanted);
        self.offset += self.part.len() as u64;
        Ok((!self.part.is_empty()).then_some(self.part.as_slice()))
    }
}

/// Fails at step `cancelled` when nobody waits any more.
pub(crate) fn still_wanted(reply: &dyn Reply) -> Result<(), Fault> {
    if reply.is_wanted() { Ok(()) } else { Err(found(FaultKind::Other, "cancelled")) }
}

/// The stamp of a regular file, read from its start to the size that it has now; `None` above
/// `size_max` bytes. Fails at step `cancelled` when nobody waits any more.
pub(crate) fn hash_file(
    file: &OwnedFd,
    size_max: u64,
    reply: &dyn Reply,
) -> Result<Option<Stamp>, Fault> {
    let stat = rustix::fs::fstat(file).map_err(at("stat"))?;
    // The kernel knows no negative size.
    let size = stat.st_size as u64;
    if size > size_max {
        return Ok(None);
    }
    let mut parts = Parts::new(file, size, reply);
    let mut hash = Hash::default();
    while let Some(part) = parts.next()? {
        hash.add(part);
    }
    Ok(Some(hash.stamp()))
}

/// The stamp of a file that holds these bytes.
pub(crate) fn hash_bytes(bytes: &[u8]) -> Stamp {
    let mut hash = Hash::default();
    hash.add(bytes);
    hash.stamp()
}

/// A stamp in the making.
#[derive(Default)]
pub(crate) struct Hash {
    digest: Sha256,
    size: u64,
}

impl Hash {
    /// Adds the bytes that come next.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.digest.update(bytes);
        self.size += bytes.len() as u64;
    }

    /// The stamp of all bytes.
    pub(crate) fn stamp(self) -> Stamp {
        Stamp { digest: self.digest.finalize().into(), size: self.size }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;

    use super::*;
    use crate::testing::{Nobody, Waiting};

    fn hex(stamp: &Stamp) -> String {
        stamp.to_string()
    }

    #[test]
    fn bytes_have_the_digest_of_fips_180_4() {
        let stamp = hash_bytes(b"abc");
        assert_eq!(stamp.size, 3);
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hex(&stamp), expected);
    }

    #[test]
    fn a_file_has_the_stamp_of_its_bytes_in_however_many_parts() {
        for size in [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES + 7] {
            let bytes: Vec<u8> = (0..size).map(|at| (at % 251) as u8).collect();
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&bytes).unwrap();
            let file = OwnedFd::from(file);
            assert_eq!(hash_file(&file, size, &Waiting).unwrap(), Some(hash_bytes(&bytes)));
            if size > 0 {
                assert_eq!(hash_file(&file, size - 1, &Waiting).unwrap(), None, "{size}");
            }
        }
    }

    #[test]
    fn a_long_file_is_given_up_when_nobody_waits() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(3 * WANTED_BYTES).unwrap();
        let fault = hash_file(&OwnedFd::from(file), u64::MAX, &Nobody).unwrap_err();
        assert_eq!(fault, found(FaultKind::Other, "cancelled"));
    }

    #[test]
    fn a_file_that_becomes_shorter_ends_there_and_a_longer_one_where_it_ended() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(10).unwrap();
        let descriptor = OwnedFd::from(file.try_clone().unwrap());
        assert_eq!(Parts::new(&descriptor, 20, &Waiting).next().unwrap(), Some(&[0; 10][..]));
        assert_eq!(Parts::new(&descriptor, 7, &Waiting).next().unwrap(), Some(&[0; 7][..]));
        File::set_len(&file, 0).unwrap();
        assert_eq!(Parts::new(&descriptor, 7, &Waiting).next().unwrap(), None);
    }
}
