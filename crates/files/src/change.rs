//! Making directories, moving and removing.

use std::ffi::OsStr;
use std::os::fd::{AsFd as _, OwnedFd};

use cofferdam_spec::Stamp;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, ResolveFlags, SeekFrom};
use rustix::io::Errno;

use crate::call::{Answer, Expected, Fault, FaultKind, FileKind, Guard};
use crate::fault::{at, found, kernel};
use crate::replace::{MODE_MASK, Old, Patient, intent, judge, keep_late, look_quietly};
use crate::resolve::{Last, Place, identity, kind_of, resolve, resolve_making_parents};
use crate::serve::{Files, Reply};
use crate::stamp::still_wanted;
use crate::steps::Step;
use crate::store::{Purpose, os, temporary_name};
use crate::write::leads_to;

/// Directories that nobody removes or moves: the workspace, and what the cell is made of.
const ROOTS: [&str; 3] = ["/", "/workspace", "/tmp"];

/// How often a directory that fills up again is emptied before it is given up.
const ROUNDS_MAX: u32 = 16;

/// Directories on the way down that are held open. Above them, the way back up is `..`, and what it
/// leads to is compared with what was there.
const HELD_MAX: usize = 32;

/// Names of subdirectories that are remembered at once.
const NAMES_MAX: usize = 10_000;

/// Entries that are removed between two questions whether somebody still waits.
const ASK_EVERY: u64 = 64;

/// Makes a directory.
pub(crate) fn make_dir(
    files: &Files,
    path: &str,
    mode: u32,
    parents: bool,
) -> Result<Answer, Fault> {
    let place = if parents {
        resolve_making_parents(path, Last::Follow, &files.syncs)?
    } else {
        resolve(path, Last::Keep)?
    };
    let canonical = place.canonical_text()?;
    let mode = Mode::from_raw_mode(mode & MODE_MASK);
    match rustix::fs::mkdirat(&place.directory, place.name(), mode) {
        Ok(()) => {
            files.syncs.changed(&place.directory);
            Ok(Answer::Made { canonical, created: true })
        }
        Err(Errno::EXIST) => {
            let kind = place.look()?.map(|stat| kind_of(stat.st_mode));
            if parents && kind == Some(FileKind::Directory) {
                return Ok(Answer::Made { canonical, created: false });
            }
            Err(kernel("mkdir", Errno::EXIST))
        }
        Err(errno) => Err(kernel("mkdir", errno)),
    }
}

/// Follows a path to an entry itself: its directory and its own name, also where the path ends in a
/// slash or a dot.
fn entry(path: &str) -> Result<Place, Fault> {
    let place = resolve(path, Last::Keep)?;
    if place.name != b"." {
        return Ok(place);
    }
    let canonical = place.canonical_text()?;
    let mut named = resolve(&canonical, Last::Keep)?;
    named.must_be_directory = true;
    Ok(named)
}

/// The kind of what is there.
fn kind(place: &Place) -> Result<FileKind, Fault> {
    let stat = place.look()?.ok_or_else(|| kernel("stat", Errno::NOENT))?;
    let kind = kind_of(stat.st_mode);
    if place.must_be_directory && kind != FileKind::Directory {
        return Err(found(FaultKind::NotDirectory, "stat"));
    }
    Ok(kind)
}

fn refuse_roots(files: &Files, canonical: &str) -> Result<(), Fault> {
    let is_home = std::path::Path::new(canonical) == files.store.home();
    if is_home || ROOTS.contains(&canonical) {
        return Err(found(FaultKind::Denied, "change a directory that the cell is made of"));
    }
    Ok(())
}

/// What a regular file must hold, when it matters.
fn exact(guard: &Guard, old: &Old) -> Result<Option<Stamp>, Fault> {
    judge(&guard.expected, Some(old))?;
    Ok(match guard.expected {
        Expected::Exactly { stamp, .. } => Some(stamp),
        Expected::Any | Expected::Absent => None,
    })
}

/// Looks at a regular file and judges it; what it must hold, when it matters.
fn judged(place: &Place, guard: &Guard, reply: &dyn Reply) -> Result<Option<Stamp>, Fault> {
    if guard.expected == Expected::Any {
        return Ok(None);
    }
    match Old::look(place, reply)? {
        Some(old) => exact(guard, &old),
        None => Err(kernel("open", Errno::NOENT)),
    }
}

fn rename(from: &Place, from_name: &OsStr, to: &Place, to_name: &OsStr) -> Result<(), Errno> {
    let flags = RenameFlags::NOREPLACE;
    rustix::fs::renameat_with(&from.directory, from_name, &to.directory, to_name, flags)
}

/// What is at `place`, looked at however long it takes; `None` when it is no regular file that can
/// be read, or too large for a stamp.
fn stamp_of(place: &Place) -> Option<Stamp> {
    Old::look(place, &Patient).ok().flatten().and_then(|old| old.stamp)
}

/// Moves an entry.
pub(crate) fn move_entry(
    files: &Files,
    from: &str,
    to: &str,
    guard: &Guard,
    reply: &dyn Reply,
) -> Result<Answer, Fault> {
    let (from, to) = (entry(from)?, entry(to)?);
    let (from_text, to_text) = (from.canonical_text()?, to.canonical_text()?);
    leads_to(guard, &from_text)?;
    refuse_roots(files, &from_text)?;
    let _held = files.locks.hold_both(&from.canonical, &to.canonical, reply)?;
    let kind = kind(&from)?;
    if to.must_be_directory && kind != FileKind::Directory {
        return Err(found(FaultKind::NotDirectory, "rename"));
    }
    let expected = match kind {
        FileKind::Regular => judged(&from, guard, reply)?,
        _ => None,
    };
    files.steps.before(Step::Rename).map_err(at("rename"))?;
    match rename(&from, from.name(), &to, to.name()) {
        Ok(()) => {}
        Err(Errno::EXIST) => {
            return Err(Fault {
                kind: FaultKind::Exists(stamp_of(&to)),
                ..kernel("rename", Errno::EXIST)
            });
        }
        Err(errno) => return Err(kernel("rename", errno)),
    }
    if let Some(expected) = expected {
        files.steps.before(Step::Judge).map_err(at("compare"))?;
        let there = stamp_of(&to);
        if there != Some(expected) {
            return match rename(&to, to.name(), &from, from.name()) {
                Ok(()) => Err(found(FaultKind::Stale(there), "compare")),
                // Somebody made another one meanwhile; what was moved stays where it is.
                Err(_) => Err(found(FaultKind::Conflict { kept: to_text }, "rename")),
            };
        }
    }
    files.syncs.changed(&from.directory);
    files.syncs.changed(&to.directory);
    Ok(Answer::Moved { from: from_text, to: to_text })
}

/// Removes an entry.
pub(crate) fn remove(
    files: &Files,
    path: &str,
    recursive: bool,
    guard: &Guard,
    reply: &dyn Reply,
) -> Result<Answer, Fault> {
    let place = entry(path)?;
    let canonical = place.canonical_text()?;
    leads_to(guard, &canonical)?;
    refuse_roots(files, &canonical)?;
    let _held = files.locks.hold(&place.canonical, reply)?;
    let removed = match kind(&place)? {
        FileKind::Directory if recursive => remove_tree(&place, reply)?,
        FileKind::Directory => {
            rustix::fs::unlinkat(&place.directory, place.name(), AtFlags::REMOVEDIR)
                .map_err(at("rmdir"))?;
            1
        }
        FileKind::Regular => {
            match judged(&place, guard, reply)? {
                Some(expected) => remove_exactly(files, &place, expected)?,
                None => unlink(&place)?,
            }
            1
        }
        _ => {
            unlink(&place)?;
            1
        }
    };
    files.syncs.changed(&place.directory);
    Ok(Answer::Removed { canonical, removed })
}

fn unlink(place: &Place) -> Result<(), Fault> {
    rustix::fs::unlinkat(&place.directory, place.name(), AtFlags::empty()).map_err(at("unlink"))
}

/// Removes a file that holds what is expected: under another name, where nobody replaces it, it is
/// compared once more, while nobody has it open for writing. One that a program keeps open so is
/// put back: what is written to it later must not be lost.
fn remove_exactly(files: &Files, place: &Place, expected: Stamp) -> Result<(), Fault> {
    let name = temporary_name()?;
    let aside = crate::replace::beside(place, &name)?;
    let _note = files.store.note(&intent(place, &name, Purpose::Remove), &files.steps)?;
    files.steps.before(Step::Rename).map_err(at("rename"))?;
    rename(place, place.name(), &aside, aside.name()).map_err(at("rename"))?;
    let there = files.steps.before(Step::Judge).ok().and_then(|()| look_quietly(&aside));
    let stamp = there.as_ref().and_then(|(old, _)| old.stamp);
    if let Some((old, true)) = &there
        && stamp == Some(expected)
    {
        let removed = files.steps.before(Step::RemoveTemporary).map_err(at("unlink"));
        return match removed.and_then(|()| unlink(&aside)) {
            Ok(()) => {
                // The removal is done; what came too late for it is among the conflicts.
                let _ = keep_late(&files.store, &place.name, old);
                Ok(())
            }
            Err(fault) => Err(put_back(files, place, &aside, fault)),
        };
    }
    let stale = found(FaultKind::Stale(stamp), "compare");
    Err(put_back(files, place, &aside, stale))
}

/// Gives a file its name back, and says why it was not removed; when somebody made another one
/// meanwhile, it is kept among the conflicts.
fn put_back(files: &Files, place: &Place, aside: &Place, fault: Fault) -> Fault {
    if rename(aside, aside.name(), place, place.name()).is_ok() {
        return fault;
    }
    let name = String::from_utf8_lossy(&aside.name);
    let kept = files.store.keep(place.directory.as_fd(), &name, &place.name);
    let kept = kept.unwrap_or_else(|_| String::from_utf8_lossy(&aside.canonical).into_owned());
    found(FaultKind::Conflict { kept }, "rename")
}

/// A directory on the way down.
struct Level {
    /// Its name in the one above.
    name: Vec<u8>,
    /// Which one it is.
    identity: (u64, u64),
    /// Not held when too many below it are.
    held: Option<OwnedFd>,
    /// Subdirectories to go into.
    below: Vec<Vec<u8>>,
    /// How often it was not empty.
    rounds: u32,
}

/// Opens a directory below another one, never through a symlink and not across a mount point.
fn open_level(above: &OwnedFd, name: Vec<u8>) -> Result<Level, Errno> {
    let resolve = ResolveFlags::BENEATH
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_XDEV;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let held = loop {
        match rustix::fs::openat2(above, os(&name), flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            opened => break opened?,
        }
    };
    let identity = identity(&rustix::fs::fstat(&held)?);
    Ok(Level { name, identity, held: Some(held), below: Vec::new(), rounds: 0 })
}

/// Why a directory of the tree was not opened.
fn not_opened(errno: Errno) -> Fault {
    match errno {
        // What is mounted is not part of the tree.
        Errno::XDEV => {
            let step = "remove: something is mounted there, which must be unmounted first";
            Fault { kind: FaultKind::Denied, ..kernel(step, errno) }
        }
        errno => kernel("open", errno),
    }
}

/// Removes a directory with everything below it, and counts what was removed. Depth costs memory
/// for names, and neither stack nor descriptors.
fn remove_tree(place: &Place, reply: &dyn Reply) -> Result<u64, Fault> {
    let mut removed = 0;
    let mut levels = vec![open_level(&place.directory, place.name.clone()).map_err(not_opened)?];
    while let Some(level) = levels.last_mut() {
        let Some(directory) = &level.held else {
            return Err(found(FaultKind::Other, "remove: a directory is not held"));
        };
        if let Some(name) = level.below.pop() {
            match open_level(directory, name.clone()) {
                Ok(below) => {
                    levels.push(below);
                    let depth = levels.len();
                    // The root of the tree stays held.
                    if depth > HELD_MAX + 1 {
                        levels[depth - 1 - HELD_MAX].held = None;
                    }
                }
                // Somebody else removed it.
                Err(Errno::NOENT) => {}
                // It is something else by now; the next look at its directory tells.
                Err(Errno::NOTDIR | Errno::LOOP) => {}
                Err(errno) => return Err(not_opened(errno)),
            }
            continue;
        }
        match empty(directory, &mut level.below, &mut removed, reply)? {
            Seen::Nothing => {}
            Seen::Part => continue,
            Seen::All => {
                level.rounds += 1;
                if level.rounds > ROUNDS_MAX {
                    return Err(kernel("rmdir", Errno::NOTEMPTY));
                }
                continue;
            }
        }
        let rounds = level.rounds;
        let up = go_up(place, &mut levels)?;
        let Some(done) = levels.pop() else { break };
        match rustix::fs::unlinkat(&up, os(&done.name), AtFlags::REMOVEDIR) {
            Ok(()) => removed += 1,
            Err(Errno::NOENT) => {}
            Err(Errno::NOTEMPTY) if rounds < ROUNDS_MAX => {
                levels.push(Level { rounds: rounds + 1, ..done });
                continue;
            }
            Err(errno) => return Err(kernel("rmdir", errno)),
        }
        if let Some(above) = levels.last_mut()
            && above.held.is_none()
        {
            above.held = Some(up);
        }
    }
    Ok(removed)
}

/// The directory above the last level, held for reading.
fn go_up(place: &Place, levels: &mut [Level]) -> Result<OwnedFd, Fault> {
    let held = |fd: &OwnedFd| fd.try_clone().map_err(crate::fault::io_at("dup"));
    let [.., above, last] = levels else { return held(&place.directory) };
    if let Some(above) = &above.held {
        return held(above);
    }
    let Some(last) = &last.held else { return held(&place.directory) };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let up = rustix::fs::openat(last, c"..", flags, Mode::empty()).map_err(at("open"))?;
    let stat = rustix::fs::fstat(&up).map_err(at("stat"))?;
    // Somebody moved the directory away, and its `..` with it.
    if identity(&stat) != above.identity {
        return Err(kernel("remove: a directory was moved away meanwhile", Errno::NOENT));
    }
    Ok(up)
}

/// How much of a directory was seen.
enum Seen {
    Nothing,
    /// As many subdirectories as are remembered at once.
    Part,
    All,
}

/// Removes what is in a directory but for its subdirectories, whose names are put into `below`.
fn empty(
    directory: &OwnedFd,
    below: &mut Vec<Vec<u8>>,
    removed: &mut u64,
    reply: &dyn Reply,
) -> Result<Seen, Fault> {
    rustix::fs::seek(directory, SeekFrom::Start(0)).map_err(at("read the directory"))?;
    let mut space = Vec::with_capacity(32 * 1024);
    let mut entries = rustix::fs::RawDir::new(directory, space.spare_capacity_mut());
    let mut seen = 0_u64;
    while let Some(entry) = entries.next() {
        let entry = entry.map_err(at("read the directory"))?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        seen += 1;
        if seen.is_multiple_of(ASK_EVERY) {
            still_wanted(reply)?;
        }
        if entry.file_type() != FileType::Directory {
            match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
                Ok(()) => {
                    *removed += 1;
                    continue;
                }
                Err(Errno::NOENT) => continue,
                // It is a directory, or became one.
                Err(Errno::ISDIR) => {}
                Err(errno) => return Err(kernel("unlink", errno)),
            }
        }
        below.push(name.to_bytes().to_vec());
        if below.len() >= NAMES_MAX {
            return Ok(Seen::Part);
        }
    }
    Ok(if seen == 0 { Seen::Nothing } else { Seen::All })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, symlink};
    use std::path::Path;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::call::FileCall;
    use crate::replace::tests::{Made, ask, exactly, guard};
    use crate::stamp::hash_bytes;
    use crate::syncs::Syncs;
    use crate::testing::{Nobody, Waiting};

    fn make(made: &Made, name: &str, parents: bool) -> Result<bool, FaultKind> {
        let call = FileCall::MakeDir { path: made.path(name), mode: 0o777, parents };
        match ask(&made.files, call, None) {
            Ok(Answer::Made { created, .. }) => Ok(created),
            Ok(other) => panic!("{other:?}"),
            Err(fault) => Err(fault.kind),
        }
    }

    fn shift(made: &Made, from: &str, to: &str, expected: Expected) -> Result<(), Fault> {
        let (from, to) = (made.path(from), made.path(to));
        ask(&made.files, FileCall::Move { from, to, guard: guard(expected) }, None).map(|_| ())
    }

    fn take(
        made: &Made,
        name: &str,
        recursive: bool,
        expected: Expected,
    ) -> Result<u64, FaultKind> {
        let path = made.path(name);
        match ask(&made.files, FileCall::Remove { path, recursive, guard: guard(expected) }, None) {
            Ok(Answer::Removed { removed, .. }) => Ok(removed),
            Ok(other) => panic!("{other:?}"),
            Err(fault) => Err(fault.kind),
        }
    }

    #[test]
    fn directories_are_made_with_and_without_parents() {
        let made = Made::new();
        assert_eq!(make(&made, "a", false), Ok(true));
        assert_eq!(fs::metadata(made.path("a")).unwrap().mode() & 0o7777, 0o755);
        assert_eq!(make(&made, "a", false), Err(FaultKind::Exists(None)));
        assert_eq!(make(&made, "a", true), Ok(false));
        assert_eq!(make(&made, "a/", true), Ok(false));
        assert_eq!(make(&made, "b/c/d", false), Err(FaultKind::NotFound));
        assert_eq!(make(&made, "b/c/d", true), Ok(true));
        fs::write(made.path("file"), "").unwrap();
        assert_eq!(make(&made, "file", true), Err(FaultKind::Exists(None)));
        assert_eq!(make(&made, "file/x", true), Err(FaultKind::NotDirectory));
        symlink("a", made.path("link")).unwrap();
        assert_eq!(make(&made, "link", true), Ok(false));
        assert_eq!(make(&made, "link", false), Err(FaultKind::Exists(None)));
    }

    #[test]
    fn a_move_replaces_nothing_and_moves_what_is_expected() {
        let made = Made::new();
        fs::write(made.path("one"), "one").unwrap();
        fs::write(made.path("two"), "two").unwrap();
        let kind = |result: Result<(), Fault>| result.map_err(|fault| fault.kind);
        assert_eq!(
            kind(shift(&made, "one", "two", Expected::Any)),
            Err(FaultKind::Exists(Some(hash_bytes(b"two"))))
        );
        assert_eq!(
            kind(shift(&made, "one", "one", Expected::Any)),
            Err(FaultKind::Exists(Some(hash_bytes(b"one"))))
        );
        assert_eq!(
            kind(shift(&made, "one", "new", exactly(b"other"))),
            Err(FaultKind::Stale(Some(hash_bytes(b"one"))))
        );
        assert_eq!(kind(shift(&made, "missing", "new", Expected::Any)), Err(FaultKind::NotFound));
        assert_eq!(kind(shift(&made, "one", "new/", Expected::Any)), Err(FaultKind::NotDirectory));
        assert_eq!(shift(&made, "one", "new", exactly(b"one")), Ok(()));
        assert_eq!(fs::read(made.path("new")).unwrap(), b"one");
        symlink("new", made.path("link")).unwrap();
        assert_eq!(shift(&made, "link", "moved", exactly(b"ignored")), Ok(()));
        assert_eq!(fs::read_link(made.path("moved")).unwrap(), Path::new("new"));
        fs::create_dir_all(made.path("dir/below")).unwrap();
        let inside = shift(&made, "dir", "dir/below/x", Expected::Any).unwrap_err();
        assert_eq!((inside.kind, inside.errno), (FaultKind::Other, libc::EINVAL));
        assert_eq!(shift(&made, "dir/", "dir2/", Expected::Any), Ok(()));
        assert!(Path::new(&made.path("dir2/below")).is_dir());
    }

    #[test]
    fn a_file_that_changes_while_it_is_moved_or_removed_stays() {
        for moves in [true, false] {
            let path = Arc::new(Mutex::new(String::new()));
            let told = Arc::clone(&path);
            let mut made = Made::new();
            made.files.steps.before = Some(Box::new(move |step| {
                if step == Step::Rename {
                    fs::write(told.lock().unwrap().as_str(), "other").unwrap();
                }
                Ok(())
            }));
            *path.lock().unwrap() = made.path("file");
            fs::write(made.path("file"), "old").unwrap();
            let result = if moves {
                shift(&made, "file", "new", exactly(b"old")).map_err(|fault| fault.kind)
            } else {
                take(&made, "file", false, exactly(b"old")).map(|_| ())
            };
            assert_eq!(result, Err(FaultKind::Stale(Some(hash_bytes(b"other")))));
            assert_eq!(fs::read(made.path("file")).unwrap(), b"other");
            assert!(!Path::new(&made.path("new")).exists());
            made.assert_clean("changed");
        }
    }

    #[test]
    fn a_removal_that_is_killed_at_any_step_is_done_or_undone() {
        /// Note, rename, compare, unlink, and forget.
        const STEPS: usize = 5;
        let count = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&count);
        let mut made = Made::new();
        made.files.steps.before = Some(Box::new(move |_| {
            counted.fetch_add(1, Ordering::SeqCst);
            Ok(())
        }));
        fs::write(made.path("file"), "old").unwrap();
        assert_eq!(take(&made, "file", false, exactly(b"old")), Ok(1));
        assert_eq!(count.load(Ordering::SeqCst), STEPS);
        for last in 0..STEPS {
            let (stopped, wait) = std::sync::mpsc::channel();
            let (stopped, count) = (Mutex::new(stopped), AtomicUsize::new(0));
            let mut made = Made::new();
            made.files.steps.before = Some(Box::new(move |_| {
                if count.fetch_add(1, Ordering::SeqCst) == last {
                    stopped.lock().unwrap().send(()).unwrap();
                    loop {
                        std::thread::park();
                    }
                }
                Ok(())
            }));
            fs::write(made.path("file"), "old").unwrap();
            let made = Arc::new(made);
            let killed = Arc::clone(&made);
            std::thread::spawn(move || take(&killed, "file", false, exactly(b"old")));
            wait.recv().unwrap();
            Files::new(made.root.join("home")).recover();
            // At the last step it is unlinked, and only the intent is left to be removed.
            let expected = (last < STEPS - 1).then(|| b"old".to_vec());
            assert_eq!(fs::read(made.path("file")).ok(), expected, "killed at {last}");
            made.assert_clean("killed");
            // The thread holds it for ever; the directory goes here.
            fs::remove_dir_all(&made.root).unwrap();
        }
    }

    #[test]
    fn a_file_is_removed_only_when_it_holds_what_is_expected() {
        let made = Made::new();
        fs::write(made.path("file"), "old").unwrap();
        let stale = Err(FaultKind::Stale(Some(hash_bytes(b"old"))));
        assert_eq!(take(&made, "file", false, exactly(b"other")), stale);
        assert_eq!(take(&made, "file/", false, Expected::Any), Err(FaultKind::NotDirectory));
        assert_eq!(take(&made, "file", false, exactly(b"old")), Ok(1));
        assert_eq!(take(&made, "file", false, exactly(b"old")), Err(FaultKind::NotFound));
        fs::create_dir(made.path("dir")).unwrap();
        symlink("dir", made.path("link")).unwrap();
        fs::write(made.path("dir/file"), "").unwrap();
        assert_eq!(take(&made, "dir", false, Expected::Any), Err(FaultKind::NotEmpty));
        assert_eq!(take(&made, "link", true, Expected::Any), Ok(1));
        assert!(Path::new(&made.path("dir/file")).exists());
        assert_eq!(take(&made, "dir/", true, Expected::Any), Ok(2));
        made.assert_clean("removed");
    }

    #[test]
    fn a_file_that_a_program_has_open_for_writing_is_not_removed() {
        let made = Made::new();
        fs::write(made.path("file"), "old").unwrap();
        let mut writer = fs::OpenOptions::new().append(true).open(made.path("file")).unwrap();
        let stale = Err(FaultKind::Stale(Some(hash_bytes(b"old"))));
        assert_eq!(take(&made, "file", false, exactly(b"old")), stale);
        std::io::Write::write_all(&mut writer, b" and more").unwrap();
        drop(writer);
        assert_eq!(fs::read(made.path("file")).unwrap(), b"old and more");
        assert_eq!(take(&made, "file", false, exactly(b"old and more")), Ok(1));
        made.assert_clean("removed");
    }

    #[test]
    fn every_directory_that_changes_is_written_through() {
        let mut made = Made::new();
        for directory in ["from", "to", "tree/below"] {
            fs::create_dir_all(made.path(directory)).unwrap();
        }
        fs::write(made.path("from/file"), "").unwrap();
        let number = |name: &str| fs::metadata(made.path(name)).unwrap().ino();
        let (work, from, to) = (number("."), number("from"), number("to"));
        let (tell, told) = std::sync::mpsc::channel();
        made.files.syncs = Syncs::with(Arc::new(move |directory: &OwnedFd| {
            tell.send(rustix::fs::fstat(directory).unwrap().st_ino).unwrap();
        }));
        // Each waits for its own: those of several calls are written through together.
        let next = |count: usize| {
            let patience = std::time::Duration::from_secs(20);
            let mut next: Vec<u64> =
                (0..count).map(|_| told.recv_timeout(patience).unwrap()).collect();
            next.sort_unstable();
            next
        };
        assert_eq!(shift(&made, "from/file", "to/file", Expected::Any), Ok(()));
        let mut both = vec![from, to];
        both.sort_unstable();
        assert_eq!(next(2), both);
        assert_eq!(take(&made, "to/file", false, Expected::Any), Ok(1));
        assert_eq!(next(1), [to]);
        assert_eq!(take(&made, "tree", true, Expected::Any), Ok(2));
        assert_eq!(next(1), [work]);
        assert_eq!(make(&made, "one", false), Ok(true));
        assert_eq!(next(1), [work]);
        assert_eq!(make(&made, "to/a/b", true), Ok(true));
        let mut parents = vec![to, fs::metadata(made.path("to/a")).unwrap().ino()];
        parents.sort_unstable();
        assert_eq!(next(2), parents);
        assert_eq!(told.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty));
    }

    #[test]
    fn what_the_cell_is_made_of_is_neither_removed_nor_moved() {
        let made = Made::new();
        let home = made.root.join("home").to_str().unwrap().to_owned();
        for path in ["/", "/tmp", "/tmp/", "/tmp/.", "/../tmp", home.as_str()] {
            let guard = guard(Expected::Any);
            let (from, to) = (path.to_owned(), made.path("new"));
            let call = FileCall::Move { from, to, guard: guard.clone() };
            assert_eq!(ask(&made.files, call, None).unwrap_err().kind, FaultKind::Denied);
            let call = FileCall::Remove { path: path.to_owned(), recursive: true, guard };
            assert_eq!(ask(&made.files, call, None).unwrap_err().kind, FaultKind::Denied);
        }
    }

    #[test]
    fn a_deep_and_wide_tree_goes_and_what_links_name_stays() {
        const DEPTH: usize = 3000;
        let made = Made::new();
        fs::create_dir(made.path("tree")).unwrap();
        fs::create_dir(made.path("outside")).unwrap();
        fs::write(made.path("outside/file"), "stays").unwrap();
        symlink(made.path("outside"), made.path("tree/link")).unwrap();
        for number in 0..500 {
            fs::write(made.path(&format!("tree/{number}")), "").unwrap();
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let mut directory = rustix::fs::open(made.path("tree"), flags, Mode::empty()).unwrap();
        for _ in 0..DEPTH {
            rustix::fs::mkdirat(&directory, "d", Mode::RWXU).unwrap();
            directory = rustix::fs::openat(&directory, "d", flags, Mode::empty()).unwrap();
        }
        let removed = take(&made, "tree", true, Expected::Any);
        assert_eq!(removed, Ok(DEPTH as u64 + 502));
        assert!(!Path::new(&made.path("tree")).exists());
        assert_eq!(fs::read(made.path("outside/file")).unwrap(), b"stays");
    }

    #[test]
    fn a_removal_ends_when_nobody_waits_and_when_a_program_fills_the_directory() {
        let made = Made::new();
        fs::create_dir(made.path("tree")).unwrap();
        for number in 0..1000 {
            fs::write(made.path(&format!("tree/{number}")), "").unwrap();
        }
        let place = resolve(&made.path("tree"), Last::Keep).unwrap();
        assert_eq!(remove_tree(&place, &Nobody).unwrap_err().step, "cancelled");
        assert!(fs::read_dir(made.path("tree")).unwrap().count() > 900);
        let done = std::sync::atomic::AtomicBool::new(false);
        let path = made.path("tree");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::SeqCst) {
                    for number in 0..100 {
                        // It may be gone for good by then.
                        let _ = fs::write(format!("{path}/{number}"), "");
                    }
                }
            });
            let result = remove_tree(&place, &Waiting);
            done.store(true, Ordering::SeqCst);
            // Either it won, or it gave up; it never goes on for ever.
            match result {
                Ok(removed) => assert!(removed > 900),
                Err(fault) => assert_eq!(fault.kind, FaultKind::NotEmpty),
            }
        });
    }
}
