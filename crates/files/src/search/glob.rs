//! Finding files by name.
//!
//! Regular files are found, and nothing else. What a pattern names before its first wildcard is
//! named explicitly: symlinks in it are followed, and ignore files do not hide it (see
//! [`super::ignores`]). A pattern that is as it stands the path of an existing file finds it too,
//! whatever its characters mean otherwise; so a symlink to a file can be found by its exact name
//! only.
//!
//! The walk has an order, so it ends when one file more than the limit is found: those that are
//! told are the first in the order of bytes, and `truncated` is exact. The account then tells what
//! was met until there.

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::WORKSPACE;
use super::pattern::{self, Rest};
use super::walk::{Walk, Wanted};
use crate::call::{Account, Answer, Fault, FaultKind, FileKind, Glob};
use crate::fault::{at, found, kernel};
use crate::resolve::{Last, Place, kind_of, resolve};
use crate::serve::Reply;

/// Finds files.
pub(crate) fn glob(glob: &Glob, reply: &dyn Reply) -> Result<Answer, Fault> {
    glob_in(glob, WORKSPACE, reply)
}

/// As [`glob`], for a workspace elsewhere.
fn glob_in(glob: &Glob, workspace: &str, reply: &dyn Reply) -> Result<Answer, Fault> {
    let split = pattern::split(&glob.pattern)?;
    let is_absolute = glob.pattern.starts_with('/');
    let base_path = if is_absolute { split.directory.as_str() } else { glob.path.as_str() };
    let base = resolve(base_path, Last::Follow)?;
    let canonical = base.canonical_text()?;
    let mut listing = Listing::new(glob);
    match kind_at(&base)? {
        FileKind::Directory => {}
        FileKind::Regular => return file_as_base(glob, &split.rest, &base),
        kind => return Err(found(FaultKind::NotRegular(kind), "glob")),
    }
    let literal =
        if is_absolute { glob.pattern.clone() } else { format!("{canonical}/{}", glob.pattern) };
    let mut account = Account { complete: true, ..Account::default() };
    let from = match &split.rest {
        Rest::Name(name) => {
            let plain = if is_absolute {
                format!("{}/{name}", split.directory)
            } else {
                format!("{canonical}/{}{name}", split.directory)
            };
            listing.add_named(&plain)?;
            None
        }
        Rest::Wild(_) if is_absolute => Some(base),
        Rest::Wild(_) => directory_below(&canonical, &split.directory)?,
    };
    if let (Some(from), Rest::Wild(rest)) = (from, &split.rest) {
        let compiled = pattern::compile(rest);
        if compiled.is_ok() || !listing.add_named(&literal)? {
            let depth = pattern::depth_max(rest);
            let set = compiled?;
            let entry = |below: &[u8], is_directory: bool| {
                if is_directory {
                    let slashes = below.iter().filter(|byte| **byte == b'/').count();
                    return depth.is_none_or(|depth| slashes < depth);
                }
                set.is_match(std::path::Path::new(as_os(below)))
            };
            let wanted = Wanted {
                entry: &entry,
                include_ignored: glob.include_ignored,
                enter_git: pattern::names_git(&glob.pattern) || pattern::names_git(&canonical),
                count_files: true,
            };
            let directory = from.open(OFlags::PATH).map_err(at("open"))?;
            let mut walk =
                Walk::start(directory, &from.canonical, workspace.as_bytes(), wanted, reply)?;
            while !listing.is_over() {
                let Some(path) = walk.next() else { break };
                listing.add(path);
            }
            let is_complete = !listing.is_over() && !walk.given_up();
            account = Account { complete: is_complete, ..walk.take_account() };
        }
        listing.add_named(&literal)?;
    } else {
        listing.add_named(&literal)?;
        account.searched = listing.paths.len() as u64;
    }
    let (paths, truncated) = listing.end();
    Ok(Answer::Found { canonical, paths, truncated, account })
}

/// A file where a directory was meant: the file itself when the pattern matches its name.
fn file_as_base(glob: &Glob, rest: &Rest, base: &Place) -> Result<Answer, Fault> {
    let is_match = match rest {
        _ if glob.pattern.starts_with('/') => false,
        _ if glob.pattern.as_bytes() == base.name => true,
        Rest::Name(name) => name.as_bytes() == base.name && !glob.pattern.contains('/'),
        Rest::Wild(_) => pattern::compile(&glob.pattern)?.is_match(base.name()),
    };
    if !is_match {
        return Err(found(FaultKind::NotDirectory, "glob"));
    }
    Ok(Answer::Found {
        canonical: base.canonical_text()?,
        paths: vec![base.canonical.clone()],
        truncated: false,
        account: Account { searched: 1, complete: true, ..Account::default() },
    })
}

/// The directory that a pattern names before its first wildcard; `None` when there is none.
fn directory_below(canonical: &str, below: &str) -> Result<Option<Place>, Fault> {
    let nothing = |fault: &Fault| {
        matches!(fault.kind, FaultKind::NotFound | FaultKind::NotDirectory | FaultKind::NameTooLong)
    };
    let place = match resolve(&format!("{canonical}/{below}"), Last::Follow) {
        Ok(place) => place,
        Err(fault) if nothing(&fault) => return Ok(None),
        Err(fault) => return Err(fault),
    };
    match kind_at(&place) {
        Ok(FileKind::Directory) => Ok(Some(place)),
        Ok(_) => Ok(None),
        Err(fault) if nothing(&fault) => Ok(None),
        Err(fault) => Err(fault),
    }
}

/// What is at a place; nothing is a fault.
fn kind_at(place: &Place) -> Result<FileKind, Fault> {
    let stat = place.look()?.ok_or_else(|| kernel("glob", Errno::NOENT))?;
    Ok(kind_of(stat.st_mode))
}

fn as_os(bytes: &[u8]) -> &std::ffi::OsStr {
    std::os::unix::ffi::OsStrExt::from_bytes(bytes)
}

/// Paths that were found.
struct Listing {
    /// In order.
    paths: Vec<Vec<u8>>,
    bytes: u64,
    limit: usize,
    bytes_max: u64,
}

impl Listing {
    fn new(glob: &Glob) -> Self {
        let limit = usize::try_from(glob.limit).unwrap_or(usize::MAX);
        Self { paths: Vec::new(), bytes: 0, limit, bytes_max: glob.max_bytes }
    }

    /// Adds a path that is above all others.
    fn add(&mut self, path: &[u8]) {
        self.bytes += path.len() as u64 + u64::from(!self.paths.is_empty());
        self.paths.push(path.to_vec());
    }

    /// Whether there are more than may be told.
    fn is_over(&self) -> bool {
        self.paths.len() > self.limit || self.bytes > self.bytes_max
    }

    /// Adds a path at its place when it is that of a regular file, or of a symlink that leads to
    /// one; tells whether it is.
    fn add_named(&mut self, path: &str) -> Result<bool, Fault> {
        let Ok(place) = resolve(path, Last::Keep) else { return Ok(false) };
        let Ok(Some(stat)) = place.look() else { return Ok(false) };
        let is_file = match kind_of(stat.st_mode) {
            FileKind::Regular => !place.must_be_directory,
            FileKind::Symlink => resolve(path, Last::Follow)
                .and_then(|target| kind_at(&target))
                .is_ok_and(|kind| kind == FileKind::Regular),
            _ => false,
        };
        if is_file && let Err(index) = self.paths.binary_search(&place.canonical) {
            self.bytes += place.canonical.len() as u64 + u64::from(!self.paths.is_empty());
            self.paths.insert(index, place.canonical);
        }
        Ok(is_file)
    }

    /// The paths that may be told, and whether there are more.
    fn end(mut self) -> (Vec<Vec<u8>>, bool) {
        let mut truncated = false;
        while self.is_over() {
            let Some(last) = self.paths.pop() else { break };
            self.bytes -= last.len() as u64 + u64::from(!self.paths.is_empty());
            truncated = true;
        }
        (self.paths, truncated)
    }
}

#[cfg(test)]
mod tests;
