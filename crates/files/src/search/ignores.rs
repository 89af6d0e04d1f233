//! What ignore files exclude.
//!
//! The files are those that ripgrep reads: `.rgignore`, `.ignore`, `.gitignore` and
//! `.git/info/exclude`, in this order of strength; within a kind the deepest directory that has a
//! word on a path decides. Git's own two kinds count without a repository too, and end at the
//! border of a repository within a repository. A symlink is not read as an ignore file.
//!
//! What a caller names explicitly is searched. So for a directory that is named:
//! - ignore files from the workspace's root down to it count for what lies below it, but those that
//!   exclude the directory itself, or one above it, are disregarded;
//! - when its own would exclude everything in it (as `venv/.gitignore` does with `*`), they are
//!   disregarded, and when those above would, they are as well;
//! - those below it always count.
//!
//! The root of the workspace is what is searched when nothing is named; its own always count.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::Arc;

use ignore::Match;
use ignore::gitignore::{Gitignore, GitignoreBuilder};
use rustix::fs::{CWD, Mode, OFlags};

use super::walk::{self, Met};
use crate::call::FileKind;
use crate::resolve::{kind_of, open_below};

/// Ignore files, the strongest first.
const FILES: [&str; 4] = [".rgignore", ".ignore", ".gitignore", ".git/info/exclude"];

/// The first of [`FILES`] that belongs to git.
const FIRST_OF_GIT: usize = 2;

/// Most bytes of an ignore file that are read: large ones have some hundred KiB.
const FILE_BYTES_MAX: u64 = 1024 * 1024;

/// The ignore files of a directory, and of those above it.
#[derive(Debug)]
pub(super) struct Ignores {
    above: Option<Chain>,
    /// Length of the directory's absolute path with the slash after it.
    length: usize,
    /// For each of [`FILES`].
    sets: [Gitignore; FILES.len()],
    /// Whether a repository begins here.
    repository: bool,
}

/// The ignore files of a directory and above; directories without any are left out.
pub(super) type Chain = Arc<Ignores>;

/// Reads the ignore files of `directory`, whose absolute path has `length` bytes with a slash after
/// it, and adds them to those above.
pub(super) fn load(directory: &OwnedFd, length: usize, above: Option<&Chain>) -> Option<Chain> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW;
    let repository = open_below(directory, OsStr::new(".git"), flags, Mode::empty()).is_ok();
    let sets = FILES.map(|name| {
        let may_exist = repository || !name.starts_with(".git/");
        if may_exist { read(directory, name) } else { Gitignore::empty() }
    });
    if !repository && sets.iter().all(Gitignore::is_empty) {
        return above.cloned();
    }
    Some(Arc::new(Ignores { above: above.cloned(), length, sets, repository }))
}

/// Reads one ignore file; what cannot be read, or has no meaning, excludes nothing.
fn read(directory: &OwnedFd, name: &str) -> Gitignore {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let Ok(file) = open_below(directory, OsStr::new(name), flags, Mode::empty()) else {
        return Gitignore::empty();
    };
    let is_regular =
        rustix::fs::fstat(&file).is_ok_and(|stat| kind_of(stat.st_mode) == FileKind::Regular);
    let mut text = Vec::new();
    if !is_regular || File::from(file).take(FILE_BYTES_MAX).read_to_end(&mut text).is_err() {
        return Gitignore::empty();
    }
    let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&text);
    let mut builder = GitignoreBuilder::new("");
    for line in text.split(|byte| *byte == b'\n') {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if let Ok(line) = std::str::from_utf8(line) {
            // A line that is no pattern excludes nothing, as in git.
            let _ = builder.add_line(None, line);
        }
    }
    builder.build().unwrap_or_else(|_| Gitignore::empty())
}

/// Whether the absolute path of an entry below is excluded. Directories above it are not judged.
pub(super) fn excludes(chain: Option<&Chain>, path: &[u8], is_directory: bool) -> bool {
    let mut verdicts: [Option<bool>; FILES.len()] = [None; FILES.len()];
    let mut same_repository = true;
    let mut next = chain;
    while let Some(ignores) = next {
        let below = Path::new(OsStr::from_bytes(&path[ignores.length..]));
        for (kind, set) in ignores.sets.iter().enumerate() {
            let counts = kind < FIRST_OF_GIT || same_repository;
            if counts && verdicts[kind].is_none() && !set.is_empty() {
                verdicts[kind] = match set.matched(below, is_directory) {
                    Match::None => None,
                    Match::Ignore(_) => Some(true),
                    Match::Whitelist(_) => Some(false),
                };
            }
        }
        same_repository &= !ignores.repository;
        next = ignores.above.as_ref();
    }
    verdicts.into_iter().flatten().next().unwrap_or(false)
}

/// The ignore files that count for what lies in `base`, a directory that was named, with the
/// canonical path `path`; see the module.
pub(super) fn of_base(base: &OwnedFd, path: &[u8], workspace: &[u8]) -> Option<Chain> {
    let length = |path: &[u8]| if path == b"/" { 1 } else { path.len() + 1 };
    let above = if path.starts_with(&[workspace, b"/"].concat()) {
        above_base(path, workspace)
    } else {
        None
    };
    let all = load(base, length(path), above.as_ref());
    if path == workspace || !excludes_all(base, path, all.as_ref()) {
        return all;
    }
    above.filter(|above| !excludes_all(base, path, Some(above)))
}

/// The ignore files from the workspace to the directory that holds `path`, without those that
/// exclude `path` or a directory above it.
fn above_base(path: &[u8], workspace: &[u8]) -> Option<Chain> {
    let mut chain = None;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(CWD, c"/", flags, Mode::empty()).ok()?;
    let mut end = workspace.len();
    while end < path.len() {
        if let Ok(directory) = walk::open(&root, &path[1..end], flags) {
            chain = load(&directory, end + 1, chain.as_ref());
        }
        let name = path[end + 1..].split(|byte| *byte == b'/').next().unwrap_or_default();
        end += 1 + name.len();
        if excludes(chain.as_ref(), &path[..end], true) {
            chain = None;
        }
    }
    chain
}

/// Whether nothing in a directory would be left, its ignore files aside.
fn excludes_all(directory: &OwnedFd, path: &[u8], chain: Option<&Chain>) -> bool {
    if chain.is_none() {
        return false;
    }
    let mut entry = if path == b"/" { path.to_vec() } else { [path, b"/"].concat() };
    let length = entry.len();
    let mut left = false;
    // Opened anew: descriptors that share a position would list it only once.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let Ok(directory) = walk::open(directory, b"", flags) else { return false };
    let listed = walk::list(&directory, &mut |name, met| {
        entry.truncate(length);
        entry.extend_from_slice(name);
        let counts = match met {
            Met::Directory => name != b".git",
            Met::Regular => !FILES.iter().any(|file| file.as_bytes() == name),
            Met::Other => false,
        };
        left = counts && !excludes(chain, &entry, met == Met::Directory);
        !left
    });
    listed.is_ok() && !left
}
