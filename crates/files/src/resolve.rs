//! From a path to a directory that is held open, and a name in it.
//!
//! A path is followed component by component, each opened below the one before and never through a
//! symlink; a symlink is read, and what it says is followed in the same way. So the directory that
//! is held and the canonical path that is told always belong together, whatever is renamed
//! meanwhile, and no entry that only the kernel can follow (the magic links of `/proc`) is taken.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RawMode, ResolveFlags, Stat};
use rustix::io::Errno;

use crate::call::{Fault, FaultKind, FileKind};
use crate::fault::{at, found, kernel};
use crate::syncs::Syncs;

/// Symlinks in one path: as many as the kernel follows (`path_resolution(7)`).
const LINKS_MAX: usize = 40;

/// Longest path, and longest target of a symlink, in bytes (`PATH_MAX` without its NUL).
const PATH_BYTES_MAX: usize = 4095;

/// What happens to a symlink at the end of a path. A slash after it always follows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Last {
    /// It is followed. One that leads to nothing leads to the name that it says.
    Follow,
    /// The link itself is meant.
    Keep,
}

/// A directory that is open, and a name in it that need not exist.
#[derive(Debug)]
pub(crate) struct Place {
    /// The directory, opened with `O_PATH`.
    pub(crate) directory: OwnedFd,
    /// The name, one component; `.` when the path means the directory itself.
    pub(crate) name: Vec<u8>,
    /// Canonical path: that of the directory, and the name.
    pub(crate) canonical: Vec<u8>,
    /// Whether the path ended with a slash or a dot, so that only a directory can be meant.
    pub(crate) must_be_directory: bool,
}

impl Place {
    /// The name, for system calls.
    pub(crate) fn name(&self) -> &OsStr {
        OsStr::from_bytes(&self.name)
    }

    /// The canonical path as text. Only paths that a caller named, and what symlinks say, come
    /// here; a symlink may say what is no UTF-8, and then nothing can be done with it.
    pub(crate) fn canonical_text(&self) -> Result<String, Fault> {
        String::from_utf8(self.canonical.clone()).map_err(|_| found(FaultKind::BadPath, "resolve"))
    }

    /// What is there now, without following it; `None` when nothing is.
    pub(crate) fn look(&self) -> Result<Option<Stat>, Fault> {
        match rustix::fs::statat(&self.directory, self.name(), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(kernel("stat", errno)),
        }
    }

    /// Opens what is there, whatever it is now, without following a symlink and without waiting
    /// for the other end of a pipe.
    pub(crate) fn open(&self, flags: OFlags) -> Result<OwnedFd, Errno> {
        let mut flags = flags | OFlags::NOFOLLOW;
        // With `O_PATH` nothing waits, and `openat2` takes no other flag beside it.
        if !flags.contains(OFlags::PATH) {
            flags |= OFlags::NONBLOCK | OFlags::NOCTTY;
        }
        open_below(&self.directory, self.name(), flags, Mode::empty())
    }

    /// Opens the regular file that is there for reading, and describes it. Anything else is refused
    /// without being opened for reading: that could wait, or take what was meant for another.
    pub(crate) fn open_regular(&self) -> Result<(OwnedFd, Stat), Fault> {
        let held = self.open(OFlags::PATH).map_err(at("open"))?;
        let stat = rustix::fs::fstat(&held).map_err(at("stat"))?;
        match kind_of(stat.st_mode) {
            FileKind::Regular if self.must_be_directory => {
                return Err(found(FaultKind::NotDirectory, "open"));
            }
            FileKind::Regular => {}
            FileKind::Directory => return Err(found(FaultKind::IsDirectory, "open")),
            // It became one since it was resolved.
            FileKind::Symlink => return Err(kernel("open", Errno::LOOP)),
            kind => return Err(found(FaultKind::NotRegular(kind), "open")),
        }
        let file = self.open(OFlags::RDONLY).map_err(at("open"))?;
        // Another file may have taken the name in between; it is judged as well.
        let stat = rustix::fs::fstat(&file).map_err(at("stat"))?;
        match kind_of(stat.st_mode) {
            FileKind::Regular => Ok((file, stat)),
            FileKind::Directory => Err(found(FaultKind::IsDirectory, "open")),
            kind => Err(found(FaultKind::NotRegular(kind), "open")),
        }
    }
}

/// The kind that a mode tells.
pub(crate) fn kind_of(mode: RawMode) -> FileKind {
    match FileType::from_raw_mode(mode) {
        FileType::Directory => FileKind::Directory,
        FileType::Symlink => FileKind::Symlink,
        FileType::Fifo => FileKind::Fifo,
        FileType::Socket => FileKind::Socket,
        FileType::CharacterDevice => FileKind::CharacterDevice,
        FileType::BlockDevice => FileKind::BlockDevice,
        FileType::RegularFile | FileType::Unknown => FileKind::Regular,
    }
}

/// Device and number: what names a file as long as it exists.
pub(crate) fn identity(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

/// Opens one component below a directory.
pub(crate) fn open_below(
    directory: impl AsFd,
    name: &OsStr,
    flags: OFlags,
    mode: Mode,
) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_SYMLINKS;
    // EAGAIN stays a fault: with one component no rename can race (`openat2(2)`), so it means that
    // a program holds a lease on the file, which it may keep for long (`fcntl(2)`).
    rustix::io::retry_on_intr(|| {
        rustix::fs::openat2(&directory, name, flags | OFlags::CLOEXEC, mode, resolve)
    })
}

/// Follows `path`. Every directory before the last component must exist.
pub(crate) fn resolve(path: &str, last: Last) -> Result<Place, Fault> {
    Walk::start(path)?.run(last, &mut |_, _| Err(Errno::NOENT))
}

/// As [`resolve`]; directories that are missing are made with mode 0755, where the path itself
/// names them, and what holds them is given to `syncs`. What a symlink names is not made: one that
/// leads to nothing was not made to be filled.
pub(crate) fn resolve_making_parents(
    path: &str,
    last: Last,
    syncs: &Syncs,
) -> Result<Place, Fault> {
    Walk::start(path)?.run(last, &mut |directory, name| {
        match rustix::fs::mkdirat(directory, name, Mode::from_raw_mode(0o755)) {
            // Somebody else was faster.
            Err(Errno::EXIST) => Ok(()),
            made => made.map(|()| syncs.changed(directory)),
        }
    })
}

/// Makes a component that is missing, or says that it stays so.
type Make<'a> = dyn FnMut(&OwnedFd, &OsStr) -> Result<(), Errno> + 'a;

/// A walk along a path.
struct Walk {
    /// The directories from the root to where the walk is, with their names; never empty.
    open: Vec<(OwnedFd, Vec<u8>)>,
    /// Components to come.
    ahead: VecDeque<Vec<u8>>,
    /// How many of those, at most, a symlink said.
    said: usize,
    links: usize,
}

impl Walk {
    fn start(path: &str) -> Result<Self, Fault> {
        if !path.starts_with('/') || path.contains('\0') {
            return Err(found(FaultKind::BadPath, "resolve"));
        }
        if path.len() > PATH_BYTES_MAX {
            return Err(kernel("resolve", Errno::NAMETOOLONG));
        }
        Ok(Self {
            open: vec![(root()?, Vec::new())],
            ahead: split(path.as_bytes()),
            said: 0,
            links: 0,
        })
    }

    fn run(mut self, last: Last, make: &mut Make<'_>) -> Result<Place, Fault> {
        while let Some(name) = self.ahead.pop_front() {
            let is_said = self.said > 0;
            self.said = self.said.saturating_sub(1);
            match name.as_slice() {
                b"." if !self.ahead.is_empty() => continue,
                b"." => return Ok(self.here()),
                b".." => {
                    if self.open.len() > 1 {
                        self.open.pop();
                    }
                    if self.ahead.is_empty() {
                        return Ok(self.here());
                    }
                    continue;
                }
                _ => {}
            }
            let is_last = self.ahead.is_empty();
            // A slash after the last name, which `split` turned into a dot.
            let must_be_directory = self.ahead.iter().all(|next| next.as_slice() == b".");
            let text = OsStr::from_bytes(&name);
            let directory = &self.open[self.open.len() - 1].0;
            if is_last && last == Last::Keep {
                return Ok(self.at(name, false));
            }
            match rustix::fs::readlinkat(directory, text, Vec::with_capacity(256)) {
                Ok(target) => {
                    self.follow(target.as_bytes())?;
                    continue;
                }
                // Not a symlink.
                Err(Errno::INVAL) => {}
                Err(Errno::NOENT) if is_last => return Ok(self.at(name, false)),
                Err(Errno::NOENT) if must_be_directory => return Ok(self.at(name, true)),
                Err(Errno::NOENT) if is_said => return Err(kernel("resolve", Errno::NOENT)),
                Err(Errno::NOENT) => make(directory, text).map_err(at("mkdir"))?,
                Err(errno) => return Err(kernel("resolve", errno)),
            }
            if is_last {
                return Ok(self.at(name, false));
            }
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW;
            let below = match open_below(directory, text, flags, Mode::empty()) {
                // It became a symlink since it was looked at: once more.
                Err(Errno::LOOP) => {
                    self.count_link()?;
                    self.ahead.push_front(name);
                    self.said += usize::from(is_said);
                    continue;
                }
                Err(Errno::NOTDIR) if must_be_directory => return Ok(self.at(name, true)),
                opened => opened.map_err(at("resolve"))?,
            };
            self.open.push((below, name));
        }
        // The path was only slashes.
        Ok(self.here())
    }

    /// Goes on with what a symlink says.
    fn follow(&mut self, target: &[u8]) -> Result<(), Fault> {
        self.count_link()?;
        if target.is_empty() {
            return Err(kernel("resolve", Errno::NOENT));
        }
        if target[0] == b'/' {
            self.open.truncate(1);
        }
        for component in split(target).into_iter().rev() {
            self.ahead.push_front(component);
            self.said += 1;
        }
        let length: usize = self.ahead.iter().map(|component| component.len() + 1).sum();
        if length > 2 * PATH_BYTES_MAX {
            return Err(kernel("resolve", Errno::NAMETOOLONG));
        }
        Ok(())
    }

    fn count_link(&mut self) -> Result<(), Fault> {
        self.links += 1;
        if self.links > LINKS_MAX { Err(kernel("resolve", Errno::LOOP)) } else { Ok(()) }
    }

    /// The directory where the walk is.
    fn here(mut self) -> Place {
        let canonical = if self.open.len() == 1 { b"/".to_vec() } else { self.path() };
        // The root stays, so there is always one.
        let (directory, _) = self.open.swap_remove(self.open.len() - 1);
        Place { directory, name: b".".to_vec(), canonical, must_be_directory: true }
    }

    /// A name in the directory where the walk is.
    fn at(mut self, name: Vec<u8>, must_be_directory: bool) -> Place {
        let mut canonical = self.path();
        canonical.push(b'/');
        canonical.extend_from_slice(&name);
        let (directory, _) = self.open.swap_remove(self.open.len() - 1);
        Place { directory, name, canonical, must_be_directory }
    }

    /// The directory's path; empty for the root.
    fn path(&self) -> Vec<u8> {
        self.open[1..].iter().flat_map(|(_, name)| [b"/", name.as_slice()].concat()).collect()
    }
}

fn root() -> Result<OwnedFd, Fault> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(CWD, c"/", flags, Mode::empty()).map_err(at("open /"))
}

/// The components of a path; a slash at the end becomes a dot, so that the last name is followed
/// and must be a directory.
fn split(path: &[u8]) -> VecDeque<Vec<u8>> {
    let mut components: VecDeque<Vec<u8>> = path
        .split(|byte| *byte == b'/')
        .filter(|part| !part.is_empty())
        .map(<[u8]>::to_vec)
        .collect();
    if path.ends_with(b"/") && !components.is_empty() {
        components.push_back(b".".to_vec());
    }
    components
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use super::*;

    fn text(path: &Path) -> &str {
        path.to_str().unwrap()
    }

    fn canonical(path: &Path, last: Last) -> Result<String, FaultKind> {
        resolve(text(path), last)
            .and_then(|place| place.canonical_text())
            .map_err(|fault| fault.kind)
    }

    #[test]
    fn links_dots_and_slashes_lead_to_the_canonical_path() {
        let made = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(made.path()).unwrap();
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::write(root.join("a/b/file"), "x").unwrap();
        symlink("a/b", root.join("to_b")).unwrap();
        symlink(root.join("a"), root.join("a/b/up")).unwrap();
        symlink("file", root.join("a/b/link")).unwrap();
        symlink("missing/../later", root.join("lost")).unwrap();
        symlink("new", root.join("a/dangling")).unwrap();
        for (path, last, expected) in [
            ("to_b/file", Last::Follow, "a/b/file"),
            ("to_b/up/b/./file", Last::Follow, "a/b/file"),
            ("a//b/../b/link", Last::Follow, "a/b/file"),
            ("a/b/link", Last::Keep, "a/b/link"),
            ("to_b", Last::Keep, "to_b"),
            ("to_b/", Last::Keep, "a/b"),
            ("a/dangling", Last::Follow, "a/new"),
            ("a/nothing", Last::Follow, "a/nothing"),
            ("a/b/..", Last::Follow, "a"),
        ] {
            let expected = text(&root.join(expected)).to_owned();
            assert_eq!(canonical(&root.join(path), last), Ok(expected), "{path}");
        }
        assert_eq!(canonical(&root.join("lost"), Last::Follow), Err(FaultKind::NotFound));
        assert_eq!(canonical(&root.join("a/b/file/x"), Last::Follow), Err(FaultKind::NotDirectory));
        assert_eq!(canonical(Path::new("/"), Last::Follow), Ok("/".to_owned()));
        assert_eq!(canonical(Path::new("/../.."), Last::Follow), Ok("/".to_owned()));
    }

    #[test]
    fn a_slash_at_the_end_means_a_directory() {
        let made = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(made.path()).unwrap();
        fs::write(root.join("file"), "x").unwrap();
        for name in ["file/", "new/"] {
            let place = resolve(text(&root.join(name)), Last::Follow).unwrap();
            assert!(place.must_be_directory, "{name}");
        }
        let place = resolve(text(&root.join("file/")), Last::Follow).unwrap();
        assert_eq!(place.open_regular().unwrap_err().kind, FaultKind::NotDirectory);
    }

    #[test]
    fn loops_end_and_magic_links_are_not_taken() {
        let made = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(made.path()).unwrap();
        symlink("b", root.join("a")).unwrap();
        symlink("a", root.join("b")).unwrap();
        assert_eq!(canonical(&root.join("a"), Last::Follow), Err(FaultKind::Loop));
        fs::create_dir(root.join("gone")).unwrap();
        let held = fs::File::open(root.join("gone")).unwrap();
        fs::remove_dir(root.join("gone")).unwrap();
        let magic = format!("/proc/self/fd/{}/x", std::os::fd::AsRawFd::as_raw_fd(&held));
        // The kernel would go through it; what it says as a text leads nowhere.
        assert_eq!(canonical(Path::new(&magic), Last::Follow), Err(FaultKind::NotFound));
    }

    #[test]
    fn parents_are_made_where_they_are_missing() {
        let made = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(made.path()).unwrap();
        let path = root.join("x/y/z.txt");
        assert_eq!(resolve(text(&path), Last::Follow).unwrap_err().kind, FaultKind::NotFound);
        let place = resolve_making_parents(text(&path), Last::Follow, &Syncs::start()).unwrap();
        assert_eq!(place.name, b"z.txt");
        assert!(root.join("x/y").is_dir() && !path.exists());
        // Not what a symlink names, but what lies below a directory that it leads to.
        symlink("nowhere/deep", root.join("dangling")).unwrap();
        symlink("x/y", root.join("good")).unwrap();
        let below = |name: &str| root.join(name).to_str().unwrap().to_owned();
        for lost in ["dangling/a/b.txt", "dangling/b.txt"] {
            let refused =
                resolve_making_parents(&below(lost), Last::Follow, &Syncs::start()).unwrap_err();
            assert_eq!(refused.kind, FaultKind::NotFound, "{lost}");
        }
        assert!(!root.join("nowhere").exists());
        let place = resolve_making_parents(&below("good/new/b.txt"), Last::Follow, &Syncs::start())
            .unwrap();
        assert_eq!(place.canonical_text().unwrap(), below("x/y/new/b.txt"));
    }

    #[test]
    fn a_file_on_which_a_program_holds_a_lease_is_answered_at_once() {
        let made = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(made.path()).unwrap();
        fs::write(root.join("file"), "x").unwrap();
        let held = fs::File::open(root.join("file")).unwrap();
        assert!(cofferdam_sys::take_read_lease(held.as_fd()).unwrap());
        let place = resolve(text(&root.join("file")), Last::Follow).unwrap();
        assert!(place.open(OFlags::RDONLY).is_ok());
        assert_eq!(place.open(OFlags::WRONLY).unwrap_err(), Errno::AGAIN);
    }

    #[test]
    fn bad_paths_are_refused() {
        for path in ["", "relative", "/a\0b"] {
            assert_eq!(resolve(path, Last::Follow).unwrap_err().kind, FaultKind::BadPath);
        }
        let long = format!("/{}", "x".repeat(300));
        let place = resolve(&long, Last::Follow);
        assert_eq!(place.unwrap_err().kind, FaultKind::NameTooLong);
    }
}
