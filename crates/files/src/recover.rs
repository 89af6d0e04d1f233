//! What a killed toolbox left: temporary files, and files that were being written in place.
//!
//! It runs before the first call, and makes every change that was cut off one that was done or one
//! that was not. The programs of the cell can write the notes it reads, so it only does what they
//! could do themselves: it touches regular files named like our temporary ones, and the regular
//! file that a saved content names, with the rights of their user. What it does not understand it
//! removes from the notes and leaves alone.

use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, OFlags, RenameFlags};

use crate::call::FileKind;
use crate::fault::kernel;
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
    each_note(store, UNDO, |file| undo(file, &mut left));
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
            Ok((file, _)) if is_note => settle(&file),
            _ => Note::Settled,
        };
        if note == Note::Settled {
            // A directory stays: it is none of ours, and nothing below it is looked at.
            let _ = rustix::fs::unlinkat(&directory, os(&name), AtFlags::empty());
        }
    }
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
    let Some(Noted { intent, complete }) = read_intent(file) else { return Note::Settled };
    let has_name = !intent.name.is_empty() && !intent.name.contains(&b'/');
    if !is_temporary_name(&intent.temporary) || !has_name {
        return Note::Settled;
    }
    let path = [&intent.directory, b"/".as_slice(), intent.temporary.as_bytes()].concat();
    let Some(place) = find_again(&path) else { return Note::Settled };
    let size = match place.look() {
        Ok(Some(stat)) if kind_of(stat.st_mode) == FileKind::Regular => stat.st_size as u64,
        _ => return Note::Settled,
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

fn read_intent(file: &OwnedFd) -> Option<Noted> {
    let size = rustix::fs::fstat(file).ok()?.st_size as u64;
    if size > INTENT_BYTES_MAX {
        return None;
    }
    let mut bytes = vec![0; size as usize];
    let read = rustix::io::pread(file, &mut bytes[..], 0).map_err(|errno| kernel("read", errno));
    bytes.truncate(read.ok()?);
    Noted::read(&bytes)
}

fn remove(place: &Place) -> Note {
    match rustix::fs::unlinkat(&place.directory, place.name(), AtFlags::empty()) {
        Ok(()) => Note::Settled,
        Err(_) => Note::Open,
    }
}

fn keep(store: &Store, place: &Place, name: &[u8], size: u64, left: &mut u64) -> Note {
    use std::os::fd::AsFd as _;
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

fn undo(file: &OwnedFd, left: &mut u64) -> Note {
    let Some(saved) = Saved::read(file) else { return Note::Settled };
    let Some(place) = find_again(&saved.target) else { return Note::Settled };
    let Ok((target, stat)) = place.open_regular() else { return Note::Settled };
    let size = stat.st_size as u64;
    if size == saved.old.size || size == saved.new.size {
        if !afford(left, size) {
            return Note::Open;
        }
        match hash_file(&target, size, &Patient) {
            Ok(Some(stamp)) if stamp == saved.old || stamp == saved.new => return Note::Settled,
            Ok(_) => {}
            Err(_) => return Note::Open,
        }
    }
    // Read for its digest, and once more to be written back.
    if !afford(left, saved.old.size.saturating_mul(2)) {
        return Note::Open;
    }
    // The write only began when all of it was on the disk.
    if !saved.is_whole(file) {
        return Note::Settled;
    }
    let restored = place
        .open(OFlags::RDWR)
        .map_err(|errno| kernel("open", errno))
        .and_then(|target| saved.restore(file, &target));
    if restored.is_ok() { Note::Settled } else { Note::Open }
}
