//! Writing a file in place, where it cannot be exchanged.
//!
//! The old content is saved to `~/.cofferdam/undo/` and written through to the disk first; a write
//! that fails puts it back at once, and one that is cut off is undone when the toolbox starts
//! again. When even the putting back fails, the saved content stays, and the caller is told where.
//! Another program that reads meanwhile may see a part of each, so the answer says that the
//! change was not atomic.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use cofferdam_spec::Stamp;
use rustix::fs::{AtFlags, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::call::{Fault, FaultKind};
use crate::fault::{at, found, kernel};
use crate::replace::{Attempt, New, Old, Patient, Replace};
use crate::resolve::identity;
use crate::stamp::{Hash, Parts, bytes_to_read, hash_file};
use crate::steps::Step;
use crate::store::{UNDO, create, random_digits, write_all_at};

/// Ends a saved content that is complete. Before it stand the length of the description, as four
/// bytes, least first, before that the description, and before that the content.
const MAGIC: &[u8; 8] = b"cofundo1";

/// Bytes of the length and of [`MAGIC`].
const END_BYTES: u64 = 12;

/// Longest description, in bytes: a path of 4,096 and two stamps fit.
const DESCRIPTION_BYTES_MAX: u64 = 8 * 1024;

/// What a saved content belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Saved {
    /// Canonical path of the file.
    pub(crate) target: Vec<u8>,
    /// What it held, and what is saved here.
    pub(crate) old: Stamp,
    /// What is being written.
    pub(crate) new: Stamp,
}

impl Saved {
    /// What follows the content; `None` when the path is too long to be described.
    pub(crate) fn trailer(&self) -> Option<Vec<u8>> {
        let mut trailer = postcard::to_stdvec(self).ok()?;
        let length = u32::try_from(trailer.len()).ok()?;
        trailer.extend_from_slice(&length.to_le_bytes());
        trailer.extend_from_slice(MAGIC);
        Some(trailer)
    }

    /// Reads the description of a saved content; `None` when it is none, or not complete. Whether
    /// the content is what the description says is for the caller to find out.
    pub(crate) fn read(file: &OwnedFd) -> Result<Option<Self>, Fault> {
        let size = rustix::fs::fstat(file).map_err(at("stat"))?.st_size as u64;
        let Some(end) = size.checked_sub(END_BYTES) else { return Ok(None) };
        let Some(length) = read_exactly(file.as_fd(), end, END_BYTES)?.as_deref().and_then(length)
        else {
            return Ok(None);
        };
        let Some(start) = end.checked_sub(length) else { return Ok(None) };
        let Some(description) = read_exactly(file.as_fd(), start, length)? else {
            return Ok(None);
        };
        let Ok((saved, rest)) = postcard::take_from_bytes::<Self>(&description) else {
            return Ok(None);
        };
        Ok((rest.is_empty() && saved.old.size == start).then_some(saved))
    }

    /// Whether the content that is saved is the one described.
    pub(crate) fn is_whole(&self, file: &OwnedFd) -> Result<bool, Fault> {
        let (mut parts, mut hash) = (Parts::new(file, self.old.size, &Patient), Hash::default());
        while let Some(part) = parts.next()? {
            hash.add(part);
        }
        Ok(hash.stamp() == self.old)
    }

    /// Writes the content that is saved back to the target, which is open for writing.
    pub(crate) fn restore(&self, file: &OwnedFd, target: &OwnedFd) -> Result<(), Fault> {
        let (mut parts, mut offset) = (Parts::new(file, self.old.size, &Patient), 0);
        while let Some(part) = parts.next()? {
            write_all_at(target.as_fd(), part, offset).map_err(at("write"))?;
            offset += part.len() as u64;
        }
        rustix::fs::ftruncate(target, self.old.size).map_err(at("truncate"))?;
        rustix::fs::fsync(target).map_err(at("fsync"))
    }
}

/// Length of the description, as the end of a saved content tells; `None` when it is none.
fn length(end: &[u8]) -> Option<u64> {
    let (length, magic) = end.split_at_checked(4)?;
    let length = u64::from(u32::from_le_bytes(length.try_into().ok()?));
    (magic == MAGIC && length <= DESCRIPTION_BYTES_MAX).then_some(length)
}

/// So many bytes, at most [`DESCRIPTION_BYTES_MAX`]; `None` when the file ends before.
fn read_exactly(file: BorrowedFd<'_>, offset: u64, size: u64) -> Result<Option<Vec<u8>>, Fault> {
    let mut bytes = vec![0; size as usize];
    let mut filled = 0;
    while filled < bytes.len() {
        match rustix::io::pread(file, &mut bytes[filled..], offset + filled as u64) {
            Ok(0) => return Ok(None),
            Ok(read) => filled += read,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(kernel("read", errno)),
        }
    }
    Ok(Some(bytes))
}

/// A saved content on the disk.
struct Entry {
    directory: OwnedFd,
    name: String,
    file: OwnedFd,
    saved: Saved,
}

impl Entry {
    fn remove(&self) {
        // One that stays is looked at when the toolbox starts again: by then the target is whole.
        // It must not come back with the power: somebody may have changed the target again.
        let _ = rustix::fs::unlinkat(&self.directory, &self.name, AtFlags::empty());
        let _ = rustix::fs::fsync(&self.directory);
    }
}

impl Replace<'_> {
    /// Writes to the file that was seen, without another one beside it.
    pub(crate) fn write_in_place(&self, old: &Old, new: &New<'_>) -> Result<Attempt, Fault> {
        // Without O_TRUNC: until the old content is saved, nothing is changed.
        let target = self.place.open(OFlags::RDWR).map_err(at("open"))?;
        let stat = rustix::fs::fstat(&target).map_err(at("stat"))?;
        if identity(&stat) != identity(&old.stat) {
            return Ok(Attempt::Overtaken(None));
        }
        let entry = self.save(old, new)?;
        let there = self.steps.before(Step::JudgeTarget).map_err(at("compare")).and_then(|()| {
            let there = hash_file(&target, u64::MAX, self.reply)?;
            Ok((there, old.stamp.is_none_or(|stamp| there == Some(stamp))))
        });
        match there {
            Ok((there, true)) if there == Some(entry.saved.old) => {}
            Ok((there, _)) => {
                entry.remove();
                return Ok(Attempt::Overtaken(there));
            }
            Err(fault) => {
                entry.remove();
                return Err(fault);
            }
        }
        if let Err(fault) = self.overwrite(&target, new) {
            let restored = self
                .steps
                .before(Step::Restore)
                .map_err(at("write"))
                .and_then(|()| entry.saved.restore(&entry.file, &target));
            if restored.is_err() {
                // The entry stays, and the next start tries again.
                let kept = self.store.path_of(UNDO, &entry.name);
                return Err(Fault { kind: FaultKind::Conflict { kept }, ..fault });
            }
            entry.remove();
            return Err(fault);
        }
        let _ = self.steps.before(Step::RemoveSaved);
        entry.remove();
        Ok(Attempt::Written(self.written(new, Some(old), false)))
    }

    fn overwrite(&self, target: &OwnedFd, new: &New<'_>) -> Result<(), Fault> {
        // Once begun it is finished, whoever waits for it.
        new.write_to(target, self.steps, Step::WriteInPlace, &Patient)?;
        self.steps.before(Step::Truncate).map_err(at("truncate"))?;
        rustix::fs::ftruncate(target, new.stamp.size).map_err(at("truncate"))?;
        self.steps.before(Step::SyncTarget).map_err(at("fsync"))?;
        rustix::fs::fsync(target).map_err(at("fsync"))
    }

    /// Saves the old content, and writes it through to the disk.
    fn save(&self, old: &Old, new: &New<'_>) -> Result<Entry, Fault> {
        self.steps.before(Step::SaveOld).map_err(at("save the old content"))?;
        let directory = self.store.directory(UNDO)?;
        let name = random_digits()?;
        let file = create(&directory, &name).map_err(at("save the old content"))?;
        let saved = Saved {
            target: self.place.canonical.clone(),
            old: Stamp { digest: [0; 32], size: 0 },
            new: new.stamp,
        };
        let mut entry = Entry { directory, name, file, saved };
        match self.fill_saved(old, &mut entry) {
            Ok(()) => Ok(entry),
            Err(fault) => {
                entry.remove();
                Err(fault)
            }
        }
    }

    fn fill_saved(&self, old: &Old, entry: &mut Entry) -> Result<(), Fault> {
        let step = at("save the old content");
        let size = bytes_to_read(old.stat.st_size as u64);
        let (mut parts, mut hash) = (Parts::new(&old.file, size, self.reply), Hash::default());
        let mut offset = 0;
        while let Some(part) = parts.next()? {
            hash.add(part);
            write_all_at(entry.file.as_fd(), part, offset).map_err(&step)?;
            offset += part.len() as u64;
        }
        entry.saved.old = hash.stamp();
        let Some(trailer) = entry.saved.trailer() else {
            return Err(found(FaultKind::NameTooLong, "save the old content"));
        };
        write_all_at(entry.file.as_fd(), &trailer, offset).map_err(&step)?;
        rustix::fs::fsync(&entry.file).map_err(&step)?;
        rustix::fs::fsync(&entry.directory).map_err(&step)
    }
}
