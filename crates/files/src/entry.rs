//! What is known of an entry without reading it, and the entries of a directory.

use std::collections::BinaryHeap;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;

use rustix::fs::{AtFlags, Mode, OFlags, RawDir, SeekFrom, Stat};
use rustix::io::Errno;

use crate::call::{Answer, Entry, Fault, FaultKind, FileKind, STAMP_BYTES_MAX};
use crate::fault::{at, found, kernel};
use crate::resolve::{Last, kind_of, open_below, resolve};
use crate::serve::Reply;
use crate::stamp::{has_more, hash_file, still_wanted};

/// Most entries of one answer to a list.
const LIST_MAX: usize = 1_000;

/// Most bytes of the paths and targets of one answer to a list. A packet between cell and daemon
/// holds 4 MiB, and 1,000 entries with the longest paths and targets are more.
const LIST_BYTES_MAX: usize = 3 * 1024 * 1024;

/// Bytes for the kernel to put names in: some hundred of them at once.
const NAMES_BYTES: usize = 32 * 1024;

/// Names between two questions whether somebody still waits: about a millisecond.
const WANTED_NAMES: usize = 4_096;

/// The entry that the kernel describes. `path` is canonical, `target` is what a symlink says.
pub(crate) fn entry(path: Vec<u8>, stat: &Stat, target: Option<Vec<u8>>) -> Entry {
    Entry {
        path,
        kind: kind_of(stat.st_mode),
        size: stat.st_size as u64,
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        modified: (stat.st_mtime, stat.st_mtime_nsec as u32),
        links: stat.st_nlink,
        target,
    }
}

/// Describes what stands under a name in a directory, without following it; `None` when nothing
/// does. `path` is its canonical path.
fn describe(directory: &OwnedFd, name: &OsStr, path: Vec<u8>) -> Result<Option<Entry>, Fault> {
    let stat = match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(kernel("stat", errno)),
    };
    if kind_of(stat.st_mode) != FileKind::Symlink {
        return Ok(Some(entry(path, &stat, None)));
    }
    // The link is held, so that what it says and the rest belong together.
    let held = match open_below(directory, name, OFlags::PATH | OFlags::NOFOLLOW, Mode::empty()) {
        Ok(held) => held,
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(kernel("stat", errno)),
    };
    let stat = rustix::fs::fstat(&held).map_err(at("stat"))?;
    let target = match kind_of(stat.st_mode) {
        // A link of `/proc` may be there to see, but not to read.
        FileKind::Symlink => rustix::fs::readlinkat(&held, c"", Vec::with_capacity(256)).ok(),
        _ => None,
    };
    Ok(Some(entry(path, &stat, target.map(|target| target.into_bytes()))))
}

/// Answers [`FileCall::Stat`](crate::FileCall::Stat).
pub(crate) fn stat(
    path: &str,
    follow: bool,
    with_stamp: bool,
    reply: &dyn Reply,
) -> Result<Answer, Fault> {
    let place = resolve(path, if follow { Last::Follow } else { Last::Keep })?;
    let described = describe(&place.directory, place.name(), place.canonical.clone())?
        .ok_or_else(|| kernel("stat", Errno::NOENT))?;
    match described.kind {
        FileKind::Directory => {}
        _ if place.must_be_directory => return Err(found(FaultKind::NotDirectory, "stat")),
        // It became one since it was resolved.
        FileKind::Symlink if follow => return Err(kernel("stat", Errno::LOOP)),
        FileKind::Regular if with_stamp && described.size <= STAMP_BYTES_MAX => {
            let (file, stat) = place.open_regular()?;
            let stamp = match hash_file(&file, STAMP_BYTES_MAX, reply)? {
                // What the kernel makes up while it is read has none.
                Some(stamp) if stamp.size == 0 && has_more(&file, 0).unwrap_or(true) => None,
                stamp => stamp,
            };
            return Ok(Answer::Entry(entry(place.canonical, &stat, None), stamp));
        }
        _ => {}
    }
    Ok(Answer::Entry(described, None))
}

/// Answers [`FileCall::List`](crate::FileCall::List).
pub(crate) fn list(
    path: &str,
    after: Option<Vec<u8>>,
    max: u32,
    reply: &dyn Reply,
) -> Result<Answer, Fault> {
    let place = resolve(path, Last::Follow)?;
    let directory = place.open(OFlags::RDONLY | OFlags::DIRECTORY).map_err(at("open"))?;
    let max = (max as usize).clamp(1, LIST_MAX);
    let mut after = after;
    loop {
        let (names, mut more) = smallest_names(&directory, after.as_deref(), max, reply)?;
        after = names.last().cloned();
        let (mut entries, mut bytes) = (Vec::with_capacity(names.len()), 0);
        for name in names {
            let path = below(&place.canonical, &name);
            // Whoever is gone since the names were read is left out.
            let Some(entry) = describe(&directory, OsStr::from_bytes(&name), path)? else {
                continue;
            };
            bytes += entry.path.len() + entry.target.as_ref().map_or(0, Vec::len);
            if bytes > LIST_BYTES_MAX && !entries.is_empty() {
                more = true;
                break;
            }
            entries.push(entry);
        }
        // A page that is empty says where no next one starts: where all are gone, go on.
        if !entries.is_empty() || !more {
            return Ok(Answer::Entries { entries, more });
        }
    }
}

/// The `max` first names of a directory above `after`, in the order of their bytes, and whether
/// there are more. One pass over the directory, and no more than `max` names in memory.
fn smallest_names(
    directory: &OwnedFd,
    after: Option<&[u8]>,
    max: usize,
    reply: &dyn Reply,
) -> Result<(Vec<Vec<u8>>, bool), Fault> {
    rustix::fs::seek(directory, SeekFrom::Start(0)).map_err(at("list"))?;
    // The largest name is on top, and leaves first.
    let mut smallest: BinaryHeap<Vec<u8>> = BinaryHeap::with_capacity(max);
    let (mut more, mut seen) = (false, 0_usize);
    let mut buffer: Vec<u8> = Vec::with_capacity(NAMES_BYTES);
    let mut names = RawDir::new(directory, buffer.spare_capacity_mut());
    while let Some(name) = names.next() {
        let name = name.map_err(at("list"))?;
        let name = name.file_name().to_bytes();
        seen += 1;
        if seen.is_multiple_of(WANTED_NAMES) {
            still_wanted(reply)?;
        }
        if name == b"." || name == b".." || after.is_some_and(|after| name <= after) {
            continue;
        }
        if smallest.len() < max {
            smallest.push(name.to_vec());
            continue;
        }
        more = true;
        if let Some(mut largest) = smallest.peek_mut()
            && name < largest.as_slice()
        {
            largest.clear();
            largest.extend_from_slice(name);
        }
    }
    let mut names = smallest.into_sorted_vec();
    // A directory that changes may tell a name twice.
    names.dedup();
    Ok((names, more))
}

/// The path of a name in a directory.
fn below(directory: &[u8], name: &[u8]) -> Vec<u8> {
    let slash: &[u8] = if directory == b"/" { b"" } else { b"/" };
    [directory, slash, name].concat()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
    use std::os::unix::net::UnixListener;
    use std::path::{Path, PathBuf};

    use super::*;
    use crate::stamp::hash_bytes;
    use crate::testing::{Nobody, Waiting};

    fn made() -> (tempfile::TempDir, PathBuf) {
        let made = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(made.path()).unwrap();
        (made, root)
    }

    fn text(path: &Path) -> &str {
        path.to_str().unwrap()
    }

    fn stat_of(path: &Path, follow: bool) -> Result<Entry, FaultKind> {
        match stat(text(path), follow, false, &Waiting) {
            Ok(Answer::Entry(entry, None)) => Ok(entry),
            Ok(answer) => panic!("{answer:?}"),
            Err(fault) => Err(fault.kind),
        }
    }

    fn names_of(
        path: &Path,
        after: Option<&[u8]>,
        max: u32,
    ) -> Result<(Vec<Vec<u8>>, bool), Fault> {
        match list(text(path), after.map(<[u8]>::to_vec), max, &Waiting)? {
            Answer::Entries { entries, more } => {
                let start = text(path).len() + 1;
                Ok((entries.into_iter().map(|entry| entry.path[start..].to_vec()).collect(), more))
            }
            answer => panic!("{answer:?}"),
        }
    }

    #[test]
    fn every_kind_is_described_as_the_kernel_does() {
        let (_made, root) = made();
        fs::write(root.join("file"), "12345").unwrap();
        fs::set_permissions(root.join("file"), fs::Permissions::from_mode(0o4640)).unwrap();
        fs::hard_link(root.join("file"), root.join("other")).unwrap();
        fs::create_dir(root.join("directory")).unwrap();
        symlink("file", root.join("link")).unwrap();
        let _listener = UnixListener::bind(root.join("socket")).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, root.join("fifo"), Mode::from_raw_mode(0o600))
            .unwrap();
        for (name, kind) in [
            ("file", FileKind::Regular),
            ("directory", FileKind::Directory),
            ("link", FileKind::Symlink),
            ("socket", FileKind::Socket),
            ("fifo", FileKind::Fifo),
        ] {
            let path = root.join(name);
            let meta = fs::symlink_metadata(&path).unwrap();
            let expected = Entry {
                path: path.as_os_str().as_bytes().to_vec(),
                kind,
                size: meta.size(),
                mode: meta.mode() & 0o7777,
                uid: meta.uid(),
                gid: meta.gid(),
                modified: (meta.mtime(), meta.mtime_nsec() as u32),
                links: meta.nlink(),
                target: (name == "link").then(|| b"file".to_vec()),
            };
            assert_eq!(stat_of(&path, false), Ok(expected), "{name}");
        }
        assert_eq!(stat_of(&root.join("file"), true).unwrap().mode, 0o4640);
        assert_eq!(stat_of(&root.join("link"), true), stat_of(&root.join("file"), false));
        let null = stat_of(Path::new("/dev/null"), true).unwrap();
        assert_eq!(null.kind, FileKind::CharacterDevice);
    }

    #[test]
    fn what_is_not_there_is_not_described() {
        let (_made, root) = made();
        fs::write(root.join("file"), "").unwrap();
        symlink("nothing", root.join("dangling")).unwrap();
        symlink("loop", root.join("loop")).unwrap();
        assert_eq!(stat_of(&root.join("nothing"), false), Err(FaultKind::NotFound));
        assert_eq!(stat_of(&root.join("dangling"), true), Err(FaultKind::NotFound));
        let dangling = stat_of(&root.join("dangling"), false).unwrap();
        assert_eq!(dangling.target, Some(b"nothing".to_vec()));
        assert_eq!(stat_of(&root.join("loop"), true), Err(FaultKind::Loop));
        assert_eq!(stat_of(&root.join("file/"), true), Err(FaultKind::NotDirectory));
        assert_eq!(stat_of(&root.join("file/x"), true), Err(FaultKind::NotDirectory));
    }

    #[test]
    fn a_stamp_is_told_of_regular_files_up_to_its_limit() {
        let (_made, root) = made();
        fs::write(root.join("file"), "abc").unwrap();
        symlink("file", root.join("link")).unwrap();
        fs::File::create(root.join("large")).unwrap().set_len(STAMP_BYTES_MAX + 1).unwrap();
        for (name, follow, stamp) in [
            ("file", true, Some(hash_bytes(b"abc"))),
            ("link", true, Some(hash_bytes(b"abc"))),
            ("link", false, None),
            ("large", true, None),
            ("", true, None),
        ] {
            let answer = stat(text(&root.join(name)), follow, true, &Waiting).unwrap();
            let Answer::Entry(_, told) = answer else { panic!("{answer:?}") };
            assert_eq!(told, stamp, "{name}");
        }
    }

    #[test]
    fn a_directory_is_listed_in_the_order_of_bytes_page_by_page() {
        let (_made, root) = made();
        let mut expected: Vec<Vec<u8>> = (0..300).map(|n| format!("f{n}").into_bytes()).collect();
        expected.extend([b"\xff bad".to_vec(), b"new\nline".to_vec(), "é".into(), "..x".into()]);
        for name in &expected {
            fs::write(root.join(OsStr::from_bytes(name)), "").unwrap();
        }
        expected.sort();
        for max in [1, 7, 303, 304, 1_000] {
            let (mut all, mut after) = (Vec::new(), None::<Vec<u8>>);
            for _ in 0..=expected.len() {
                let (names, more) = names_of(&root, after.as_deref(), max).unwrap();
                assert!(names.len() <= max as usize);
                all.extend(names);
                after = all.last().cloned();
                if !more {
                    break;
                }
                assert!(all.len() < expected.len(), "there are no more");
            }
            assert_eq!(all, expected, "{max}");
        }
        assert_eq!(names_of(&root, Some(b"\xff bad"), 10).unwrap(), (Vec::new(), false));
    }

    #[test]
    fn only_directories_are_listed() {
        let (_made, root) = made();
        fs::write(root.join("file"), "").unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, root.join("fifo"), Mode::from_raw_mode(0o600))
            .unwrap();
        fs::create_dir(root.join("empty")).unwrap();
        symlink("empty", root.join("link")).unwrap();
        assert_eq!(names_of(&root.join("empty"), None, 1).unwrap(), (Vec::new(), false));
        assert_eq!(names_of(&root.join("link"), None, 1).unwrap(), (Vec::new(), false));
        for (name, kind) in [
            ("file", FaultKind::NotDirectory),
            ("fifo", FaultKind::NotDirectory),
            ("nothing", FaultKind::NotFound),
        ] {
            assert_eq!(names_of(&root.join(name), None, 1).unwrap_err().kind, kind, "{name}");
        }
    }

    #[test]
    fn the_root_has_no_slash_of_its_own() {
        let Ok(Answer::Entries { entries, .. }) = list("/", None, 1_000, &Waiting) else {
            panic!("not listed");
        };
        assert!(entries.iter().any(|entry| entry.path == b"/proc"));
    }

    #[test]
    fn a_page_of_long_targets_fits_a_packet() {
        let (_made, root) = made();
        let target = "x".repeat(4_095);
        for number in 0..900 {
            symlink(&target, root.join(number.to_string())).unwrap();
        }
        let (names, more) = names_of(&root, None, 1_000).unwrap();
        assert!(more && names.len() < 900, "{}", names.len());
        let (rest, more) = names_of(&root, names.last().map(Vec::as_slice), 1_000).unwrap();
        assert_eq!((names.len() + rest.len(), more), (900, false));
    }

    #[test]
    fn a_long_list_is_given_up_when_nobody_waits() {
        let (_made, root) = made();
        for number in 0..WANTED_NAMES {
            fs::write(root.join(number.to_string()), "").unwrap();
        }
        let fault = list(text(&root), None, 1, &Nobody).unwrap_err();
        assert_eq!(fault, found(FaultKind::Other, "cancelled"));
    }
}
