//! What a killed toolbox left: temporary files, and files that were being written in place.
//!
//! It runs before the first call, and makes every change that was cut off one that was done or one
//! that was not. The programs of the cell can write the notes it reads, so it only does what they
//! could do themselves: it touches regular files named like our temporary ones, and the regular
//! file that a saved content names, with the rights of their user. What is no note of ours it
//! removes from the notes; a note that it cannot settle now, because something cannot be read,
//! stays for the next start: it may be the only copy of a text.

use std::os::fd::{AsFd as _, OwnedFd};

use rustix::fs::{AtFlags, OFlags, RenameFlags};

use crate::call::{Fault, FaultKind, FileKind};
use crate::fault::at;
use crate::in_place::Saved;
use crate::replace::Patient;
use crate::resolve::{Place, kind_of};
use crate::stamp::hash_file;
use crate::store::{
    INTENTS, Noted, Purpose, Store, UNDO, find_again, is_digits, is_temporary_name, names, os,
};

/// Notes that are looked at in one directory. The toolbox leaves one for each of its threads at
/// most; a program that makes more must not keep a cell from starting.
const NOTES_MAX: usize = 10_000;

/// Bytes of files that are read in all, for the same reason: 4 GiB take a few seconds. What lies
/// beyond stays for the next start.
const BYTES_MAX: u64 = 4 * 1024 * 1024 * 1024;

/// Longest intent, in bytes: a path, two names and two stamps fit.
const INTENT_BYTES_MAX: u64 = 16 * 1024;

/// Whether a note is of no use any more.
#[derive(PartialEq, Eq)]
enum Note {
    Settled,
    Open,
}

/// Settles everything that was left.
pub(crate) fn recover(store: &Store) {
    let mut left = BYTES_MAX;
    each_note(store, INTENTS, |file| intent(store, file, &mut left));
    each_note(store, UNDO, |file| undo(store, file, &mut left));
}

/// Shows every note of a directory to `settle`, and removes it when it is settled, or no note.
fn each_note(store: &Store, name: &str, mut settle: impl FnMut(&OwnedFd) -> Note) {
    let Some(directory) = store.existing(name) else { return };
    let Ok(found) = names(&directory, NOTES_MAX) else { return };
    for name in found {
        let Ok(held) = directory.try_clone() else { return };
        let place = Place {
            directory: held,
            name: name.clone(),
            canonical: Vec::new(),
            must_be_directory: false,
        };
        let is_note = std::str::from_utf8(&name).is_ok_and(is_digits);
        let note = match place.open_regular() {
            _ if !is_note => Note::Settled,
            Ok((file, _)) => settle(&file),
            Err(fault) if is_no_file(&fault) => Note::Settled,
            Err(_) => Note::Open,
        };
        if note == Note::Settled {
            // A directory stays: it is none of ours, and nothing below it is looked at.
            let _ = rustix::fs::unlinkat(&directory, os(&name), AtFlags::empty());
        }
    }
}

/// Whether a fault of opening says that there is no regular file. Any other, such as too many open
/// files, says nothing about what is there.
fn is_no_file(fault: &Fault) -> bool {
    matches!(
        fault.kind,
        FaultKind::NotFound | FaultKind::IsDirectory | FaultKind::NotRegular(_) | FaultKind::Loop
    )
}

/// Takes `size` from what may still be read; false when it is too much.
fn afford(left: &mut u64, size: u64) -> bool {
    let enough = size <= *left;
    if enough {
        *left -= size;
    }
    enough
}

fn intent(store: &Store, file: &OwnedFd, left: &mut u64) -> Note {
    let Noted { intent, complete } = match read_intent(file) {
        Ok(Some(noted)) => noted,
        Ok(None) => return Note::Settled,
        Err(_) => return Note::Open,
    };
    let has_name = !intent.name.is_empty() && !intent.name.contains(&b'/');
    if !is_temporary_name(&intent.temporary) || !has_name {
        return Note::Settled;
    }
    let path = [&intent.directory, b"/".as_slice(), intent.temporary.as_bytes()].concat();
    let place = match find_again(&path) {
        Ok(Some(place)) => place,
        Ok(None) => return Note::Settled,
        // The directory is gone, and what was in it.
        Err(fault) if is_gone(&fault) => return Note::Settled,
        Err(_) => return Note::Open,
    };
    let size = match place.look() {
        Ok(Some(stat)) if kind_of(stat.st_mode) == FileKind::Regular => stat.st_size as u64,
        Ok(_) => return Note::Settled,
        Err(_) => return Note::Open,
    };
    match intent.purpose {
        // It never had another name.
        Purpose::Replace { .. } if !complete => remove(&place),
        Purpose::Replace { new, old } => {
            let known = [Some(new), old];
            if !known.iter().flatten().any(|stamp| stamp.size == size) {
                return keep(store, &place, &intent.name, size, left);
            }
            if !afford(left, size) {
                return Note::Open;
            }
            let stamp = place.open_regular().and_then(|(file, _)| hash_file(&file, size, &Patient));
            match stamp {
                Ok(Some(stamp)) if known.contains(&Some(stamp)) => remove(&place),
                _ => keep(store, &place, &intent.name, size, left),
            }
        }
        Purpose::Remove => {
            let (directory, flags) = (&place.directory, RenameFlags::NOREPLACE);
            let back = rustix::fs::renameat_with(
                directory,
                place.name(),
                directory,
                os(&intent.name),
                flags,
            );
            match back {
                Ok(()) => Note::Settled,
                Err(_) => keep(store, &place, &intent.name, size, left),
            }
        }
    }
}

/// Whether a path led to nothing, or elsewhere.
fn is_gone(fault: &Fault) -> bool {
    use FaultKind::{Elsewhere, NotDirectory, NotFound};
    matches!(fault.kind, NotFound | NotDirectory | Elsewhere { .. })
}

/// `None` when it is no intent.
fn read_intent(file: &OwnedFd) -> Result<Option<Noted>, Fault> {
    let size = rustix::fs::fstat(file).map_err(at("stat"))?.st_size as u64;
    if size > INTENT_BYTES_MAX {
        return Ok(None);
    }
    let mut bytes = vec![0; size as usize];
    let read = rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut bytes[..], 0));
    bytes.truncate(read.map_err(at("read"))?);
    Ok(Noted::read(&bytes))
}

fn remove(place: &Place) -> Note {
    match rustix::fs::unlinkat(&place.directory, place.name(), AtFlags::empty()) {
        Ok(()) => Note::Settled,
        Err(_) => Note::Open,
    }
}

fn keep(store: &Store, place: &Place, name: &[u8], size: u64, left: &mut u64) -> Note {
    // It may have to be copied.
    if !afford(left, size) {
        return Note::Open;
    }
    let Ok(temporary) = std::str::from_utf8(&place.name) else { return Note::Settled };
    match store.keep(place.directory.as_fd(), temporary, name) {
        Ok(_) => Note::Settled,
        // It stays where it is, and nothing is lost.
        Err(_) => Note::Open,
    }
}

/// Puts a content back that was being replaced in place. Only a note that is none, and one whose
/// target is whole, is settled without that: what is saved may be the only copy.
fn undo(store: &Store, file: &OwnedFd, left: &mut u64) -> Note {
    let saved = match Saved::read(file) {
        Ok(Some(saved)) => saved,
        Ok(None) => return Note::Settled,
        Err(_) => return Note::Open,
    };
    let place = match find_again(&saved.target) {
        Ok(Some(place)) => place,
        Ok(None) => return Note::Settled,
        // It may lie where something is mounted later.
        Err(_) => return Note::Open,
    };
    put_back(store, &saved, file, &place, left).unwrap_or(Note::Open)
}

fn put_back(
    store: &Store,
    saved: &Saved,
    file: &OwnedFd,
    place: &Place,
    left: &mut u64,
) -> Result<Note, Fault> {
    let (target, stat) = place.open_regular()?;
    let size = stat.st_size as u64;
    if size == saved.old.size || size == saved.new.size {
        if !afford(left, size) {
            return Ok(Note::Open);
        }
        let there = hash_file(&target, size, &Patient)?;
        if there == Some(saved.old) || there == Some(saved.new) {
            return Ok(Note::Settled);
        }
    }
    // Read for its digest, and once more to be written back; what is there now is copied.
    if !afford(left, saved.old.size.saturating_mul(2).saturating_add(size)) {
        return Ok(Note::Open);
    }
    // The write only began when all of it was on the disk.
    if !saved.is_whole(file)? {
        return Ok(Note::Settled);
    }
    let writable = place.open(OFlags::RDWR).map_err(at("open"))?;
    // It may be a part of each content, or what somebody wrote since.
    store.keep_copy(target.as_fd(), &place.name)?;
    saved.restore(file, &writable)?;
    Ok(Note::Settled)
}
