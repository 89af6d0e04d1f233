//! Walking a tree in the order of its paths' bytes.
//!
//! Every directory is opened from the base on by names only, never through a symlink, and closed
//! before the next: a walk holds two descriptors at most, however deep the tree is. What it keeps
//! in memory are the names of the directories on the way, those of wanted entries only.

use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir};
use rustix::io::Errno;

use super::ignores::{self, Chain};
use crate::call::{Account, Fault, FileKind};
use crate::fault::at;
use crate::resolve::{kind_of, open_below};
use crate::serve::Reply;

/// Bytes of directory entries that are taken at once.
const BUFFER_BYTES: usize = 32 * 1024;

/// Longest part of a path that the kernel is given at once; it takes up to 4,095 bytes.
const PATH_PART_MAX: usize = 4000;

/// Entries after which it is asked whether anybody still waits: less than a millisecond. A
/// directory counts as [`DIRECTORY_ENTRIES`] more.
const ENTRIES_PER_LOOK: u32 = 512;
const DIRECTORY_ENTRIES: u32 = 8;

/// What an entry is, as far as a walk cares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Met {
    Directory,
    Regular,
    /// A symlink, or what must not be opened.
    Other,
}

/// What of a tree is wanted.
pub(super) struct Wanted<'a> {
    /// Whether a regular file, or what lies in a directory (`true`), is wanted. The path begins
    /// below the base.
    pub(super) entry: &'a (dyn Fn(&[u8], bool) -> bool + Sync),
    /// Whether ignore files are disregarded.
    pub(super) include_ignored: bool,
    /// Whether `.git` directories are entered.
    pub(super) enter_git: bool,
    /// Whether each regular file counts as searched when it is met, wanted or not.
    pub(super) count_files: bool,
}

/// A walk.
pub(super) struct Walk<'a> {
    base: OwnedFd,
    wanted: Wanted<'a>,
    reply: &'a dyn Reply,
    /// Absolute path of the entry at hand.
    path: Vec<u8>,
    /// Where the part below the base begins in `path`.
    below: usize,
    levels: Vec<Level>,
    account: Account,
    until_look: u32,
    given_up: bool,
}

/// A directory on the way.
struct Level {
    /// Length of its absolute path with the slash after it.
    length: usize,
    /// Names of its entries; those of directories end with a slash, which gives the order of whole
    /// paths.
    names: Vec<u8>,
    /// The entries in `names`, in order.
    entries: Vec<Range<usize>>,
    next: usize,
    chain: Option<Chain>,
}

impl<'a> Walk<'a> {
    /// Begins a walk in a directory, whose canonical path is `canonical`. Fails when the directory
    /// itself cannot be read.
    pub(super) fn start(
        base: OwnedFd,
        canonical: &[u8],
        workspace: &[u8],
        wanted: Wanted<'a>,
        reply: &'a dyn Reply,
    ) -> Result<Self, Fault> {
        let mut path = canonical.to_vec();
        if path != b"/" {
            path.push(b'/');
        }
        let mut walk = Self {
            base,
            wanted,
            reply,
            below: path.len(),
            path,
            levels: Vec::new(),
            account: Account::default(),
            until_look: ENTRIES_PER_LOOK,
            given_up: false,
        };
        let directory = walk.open_directory().map_err(at("open"))?;
        let chain = if walk.wanted.include_ignored {
            None
        } else {
            ignores::of_base(&directory, canonical, workspace)
        };
        walk.read(&directory, chain).map_err(at("list"))?;
        Ok(walk)
    }

    /// The absolute path of the next wanted file; `None` at the end.
    pub(super) fn next(&mut self) -> Option<&[u8]> {
        loop {
            if self.given_up {
                return None;
            }
            let level = self.levels.last_mut()?;
            let Some(entry) = level.entries.get(level.next) else {
                self.levels.pop();
                continue;
            };
            level.next += 1;
            self.path.truncate(level.length);
            self.path.extend_from_slice(&level.names[entry.clone()]);
            if self.path.last() != Some(&b'/') {
                return Some(&self.path);
            }
            self.enter();
        }
    }

    /// Where the part below the base begins in a path.
    pub(super) fn below(&self) -> usize {
        self.below
    }

    /// What was met since it was last asked.
    pub(super) fn take_account(&mut self) -> Account {
        std::mem::take(&mut self.account)
    }

    /// Whether nobody waited any more.
    pub(super) fn given_up(&self) -> bool {
        self.given_up
    }

    /// Goes into the directory at hand.
    fn enter(&mut self) {
        let above = self.levels.last().and_then(|level| level.chain.clone());
        let entered = self.open_directory().and_then(|directory| {
            let chain = if self.wanted.include_ignored {
                None
            } else {
                ignores::load(&directory, self.path.len(), above.as_ref())
            };
            self.read(&directory, chain)
        });
        match entered {
            // Gone since it was listed: it was not met.
            Ok(()) | Err(Errno::NOENT) => {}
            // It is no directory any more.
            Err(Errno::LOOP | Errno::NOTDIR) => self.account.special += 1,
            Err(_) => self.account.unreadable += 1,
        }
        self.look(DIRECTORY_ENTRIES);
    }

    fn open_directory(&self) -> Result<OwnedFd, Errno> {
        let below = &self.path[self.below..];
        open(&self.base, below, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW)
    }

    /// Lists the directory at hand, and makes it the innermost level.
    fn read(&mut self, directory: &OwnedFd, chain: Option<Chain>) -> Result<(), Errno> {
        let length = self.path.len();
        let mut level =
            Level { length, names: Vec::new(), entries: Vec::new(), next: 0, chain: None };
        let listed = list(directory, &mut |name, met| {
            if self.wants(name, met, length, chain.as_ref()) {
                let start = level.names.len();
                level.names.extend_from_slice(name);
                if met == Met::Directory {
                    level.names.push(b'/');
                }
                level.entries.push(start..level.names.len());
            }
            self.look(1);
            !self.given_up
        });
        self.path.truncate(length);
        listed?;
        let names = &level.names;
        level.entries.sort_unstable_by(|a, b| names[a.clone()].cmp(&names[b.clone()]));
        level.chain = chain;
        self.levels.push(level);
        Ok(())
    }

    /// Judges an entry of a directory, and counts it when it goes no further.
    fn wants(&mut self, name: &[u8], met: Met, length: usize, chain: Option<&Chain>) -> bool {
        let is_directory = met == Met::Directory;
        if (is_directory && name == b".git" && !self.wanted.enter_git)
            || (met == Met::Regular && is_own(name))
        {
            self.account.hidden += 1;
            return false;
        }
        if met == Met::Other {
            self.account.special += 1;
            return false;
        }
        self.path.truncate(length);
        self.path.extend_from_slice(name);
        if ignores::excludes(chain, &self.path, is_directory) {
            self.account.ignored += 1;
            return false;
        }
        if self.wanted.count_files && !is_directory {
            count_searched(&mut self.account, name);
        }
        (self.wanted.entry)(&self.path[self.below..], is_directory)
    }

    /// Asks now and then whether anybody still waits.
    fn look(&mut self, entries: u32) {
        self.until_look = self.until_look.saturating_sub(entries);
        if self.until_look == 0 {
            self.until_look = ENTRIES_PER_LOOK;
            self.given_up |= !self.reply.is_wanted();
        }
    }
}

/// Counts a file that was searched, by its name or its path.
pub(super) fn count_searched(account: &mut Account, path: &[u8]) {
    if std::str::from_utf8(path).is_ok() {
        account.searched += 1;
    } else {
        account.non_utf8_name += 1;
    }
}

/// Adds up two accounts; complete are they when both are.
pub(super) fn add(account: &mut Account, other: &Account) {
    account.searched += other.searched;
    account.ignored += other.ignored;
    account.hidden += other.hidden;
    account.binary += other.binary;
    account.too_large += other.too_large;
    account.unreadable += other.unreadable;
    account.non_utf8_name += other.non_utf8_name;
    account.special += other.special;
}

/// Whether a file is one of ours: content on its way to its name.
fn is_own(name: &[u8]) -> bool {
    name.starts_with(b".cofferdam-") && name.ends_with(b".tmp")
}

/// Opens what lies below a directory, through no symlink and however long the path is. An empty
/// path is the directory itself.
pub(crate) fn open(base: &OwnedFd, below: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    let mut rest = below.strip_suffix(b"/").unwrap_or(below);
    if rest.is_empty() {
        rest = b".";
    }
    let mut held: Option<OwnedFd> = None;
    while rest.len() > PATH_PART_MAX {
        // Names have at most 255 bytes, so there is a slash.
        let Some(slash) = rest[..PATH_PART_MAX].iter().rposition(|byte| *byte == b'/') else {
            return Err(Errno::NAMETOOLONG);
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW;
        let from = held.as_ref().unwrap_or(base);
        held = Some(open_below(from, OsStr::from_bytes(&rest[..slash]), flags, Mode::empty())?);
        rest = &rest[slash + 1..];
    }
    open_below(held.as_ref().unwrap_or(base), OsStr::from_bytes(rest), flags, Mode::empty())
}

/// Tells each entry of a directory, until `tell` says no.
pub(crate) fn list(
    directory: &OwnedFd,
    tell: &mut dyn FnMut(&[u8], Met) -> bool,
) -> Result<(), Errno> {
    let mut buffer = [MaybeUninit::<u8>::uninit(); BUFFER_BYTES];
    let mut entries = RawDir::new(directory, &mut buffer);
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        let met = match entry.file_type() {
            FileType::Directory => Met::Directory,
            FileType::RegularFile => Met::Regular,
            FileType::Unknown => {
                let flags = AtFlags::SYMLINK_NOFOLLOW;
                match rustix::fs::statat(directory, entry.file_name(), flags) {
                    Ok(stat) => match kind_of(stat.st_mode) {
                        FileKind::Directory => Met::Directory,
                        FileKind::Regular => Met::Regular,
                        _ => Met::Other,
                    },
                    // Gone meanwhile.
                    Err(_) => continue,
                }
            }
            _ => Met::Other,
        };
        if !tell(name, met) {
            break;
        }
    }
    Ok(())
}
