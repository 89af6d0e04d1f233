//! Telling what changes below a directory.
//!
//! Each directory has an inotify watch of its own. What appears in a new directory before its watch
//! stands is found by listing it afterwards, and told as created. Directories are kept by the watch
//! of their parent and their name, so that one that moves within the tree takes everything below it
//! along. A watch is added by path, as the kernel wants it; a directory that was exchanged
//! meanwhile is not watched.
//!
//! When the kernel's queue runs over, or a directory's place is not known any more, that is told as
//! [`Change::Overflow`], and the tree is looked at again.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;

use crate::call::{Answer, Change, Fault, FaultKind, FileKind};
use crate::fault::{at, found, kernel};
use crate::resolve::{Last, identity, kind_of, resolve};
use crate::search::walk::{self, Met};
use crate::serve::Reply;

/// Changes in one answer, and bytes of their paths: an answer stays below 256 KiB.
const CHANGES_MAX: usize = 1000;
const CHANGES_BYTES_MAX: usize = 128 * 1024;

/// Bytes of events that are read at once: some thousand.
const BUFFER_BYTES: usize = 64 * 1024;

/// How long a quiet watch waits before it asks whether anybody still listens.
const QUIET: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// How long the second half of a move is waited for. The kernel tells both at once.
const MOVE_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// Events after which the second half of a move does not come any more.
const MOVE_EVENTS: u64 = 256;

/// Entries that are listed between two looks whether anybody still waits.
const ENTRIES_PER_LOOK: u32 = 512;

/// Tells changes until nobody waits for them, or the directory is gone; that is told first.
pub(crate) fn watch(path: &str, recursive: bool, reply: &dyn Reply) -> Result<Answer, Fault> {
    let place = resolve(path, Last::Follow)?;
    let canonical = place.canonical_text()?;
    let stat = place.look()?.ok_or_else(|| kernel("watch", Errno::NOENT))?;
    if kind_of(stat.st_mode) != FileKind::Directory {
        return Err(found(FaultKind::NotDirectory, "watch"));
    }
    let root = place.open(OFlags::PATH | OFlags::DIRECTORY).map_err(at("open"))?;
    let flags = CreateFlags::NONBLOCK | CreateFlags::CLOEXEC;
    let inotify = Arc::new(inotify::init(flags).map_err(at("make a watch"))?);
    let mut watch = Watch {
        inotify,
        root,
        canonical: place.canonical,
        recursive,
        reply,
        root_id: 0,
        directories: HashMap::new(),
        not_watched: 0,
        told: HashSet::new(),
        moved: Vec::new(),
        events: 0,
        changes: Vec::new(),
        bytes: 0,
        until_look: ENTRIES_PER_LOOK,
        is_over: false,
    };
    watch.root_id = watch.add(b"").map_err(at("watch"))?;
    watch.directories.insert(watch.root_id, Directory::default());
    watch.scan(watch.root_id, &mut HashSet::new(), false);
    let watching = Answer::Watching {
        canonical,
        directories: watch.directories.len() as u64,
        not_watched: watch.not_watched,
    };
    if reply.send(watching, None).is_ok() {
        watch.run()?;
    }
    if !watch.changes.is_empty() {
        // When nobody waits, nobody misses them.
        let _ = reply.send(Answer::Changes(watch.changes), None);
    }
    Ok(Answer::WatchEnded)
}

/// A directory that is watched.
#[derive(Debug, Default)]
struct Directory {
    /// Watch of its parent; `None` for the root.
    parent: Option<i32>,
    name: Vec<u8>,
    /// Watches of directories in it.
    children: HashMap<Vec<u8>, i32>,
}

/// The first half of a move.
struct Moved {
    cookie: u32,
    /// The directory it was in.
    parent: i32,
    name: Vec<u8>,
    directory: bool,
    /// Where in `changes` it is told, until that is sent.
    change: Option<usize>,
    /// Number of its event.
    event: u64,
}

struct Watch<'a> {
    inotify: Arc<OwnedFd>,
    root: OwnedFd,
    canonical: Vec<u8>,
    recursive: bool,
    reply: &'a dyn Reply,
    /// Watch of the root.
    root_id: i32,
    /// By their watch.
    directories: HashMap<i32, Directory>,
    not_watched: u64,
    /// What was told as created because it was listed, and may come as an event too.
    told: HashSet<(i32, Vec<u8>)>,
    moved: Vec<Moved>,
    /// Events so far.
    events: u64,
    /// What was not sent yet.
    changes: Vec<Change>,
    bytes: usize,
    until_look: u32,
    /// Nobody waits, or the root is gone.
    is_over: bool,
}

impl Watch<'_> {
    /// Tells what changes. What is left in `changes` at the end was not sent.
    fn run(&mut self) -> Result<(), Fault> {
        let mut buffer = vec![MaybeUninit::<u8>::uninit(); BUFFER_BYTES];
        let inotify = Arc::clone(&self.inotify);
        let mut reader = inotify::Reader::new(&*inotify, &mut buffer);
        while !self.is_over {
            match reader.next() {
                Ok(event) => {
                    let name = event.file_name().map(|name| name.to_bytes().to_vec());
                    self.event(event.wd(), event.events(), event.cookie(), name);
                    continue;
                }
                Err(Errno::INTR) => continue,
                // All there was is told.
                Err(Errno::AGAIN) => {}
                Err(errno) => return Err(kernel("read a watch", errno)),
            }
            // What was listed cannot come as an event any more.
            self.told.clear();
            if !self.moved.is_empty() {
                if self.wait(&MOVE_WAIT)? {
                    continue;
                }
                self.give_up_moves(0);
            }
            // A directory that is held open is not told to be removed.
            if rustix::fs::fstat(&self.root).is_ok_and(|stat| stat.st_nlink == 0) {
                self.root_gone();
                return Ok(());
            }
            self.send();
            if !self.wait(&QUIET)? {
                self.is_over |= !self.reply.is_wanted();
            }
        }
        Ok(())
    }

    /// Waits for events; `false` when none came.
    fn wait(&self, timeout: &Timespec) -> Result<bool, Fault> {
        let mut ready = [PollFd::new(&*self.inotify, PollFlags::IN)];
        match poll(&mut ready, Some(timeout)) {
            Ok(count) => Ok(count > 0),
            Err(Errno::INTR) => Ok(false),
            Err(errno) => Err(kernel("wait for changes", errno)),
        }
    }

    fn event(&mut self, id: i32, events: ReadFlags, cookie: u32, name: Option<Vec<u8>>) {
        self.events += 1;
        if events.contains(ReadFlags::QUEUE_OVERFLOW) {
            self.tell(Change::Overflow);
            return self.rescan();
        }
        if events.contains(ReadFlags::IGNORED) {
            return self.forget(id);
        }
        // Of a directory that moved away, what was already on its way.
        if !self.directories.contains_key(&id) {
            return;
        }
        let directory = events.contains(ReadFlags::ISDIR);
        match name {
            None if id == self.root_id => self.root_event(events),
            // The parent tells it.
            None => {}
            Some(name) => self.entry_event(id, events, cookie, name, directory),
        }
        if self.moved.first().is_some_and(|moved| self.events - moved.event > MOVE_EVENTS) {
            self.give_up_moves(MOVE_EVENTS);
        }
    }

    fn root_event(&mut self, events: ReadFlags) {
        if events.intersects(ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::UNMOUNT) {
            self.root_gone();
        } else if events.contains(ReadFlags::ATTRIB) {
            self.tell(Change::Chmod { path: self.canonical.clone(), directory: true });
        }
    }

    /// Tells that there is nothing to watch any more. It stays in `changes`.
    fn root_gone(&mut self) {
        self.send();
        if !self.is_over {
            self.changes.push(Change::Remove { path: self.canonical.clone(), directory: true });
            self.is_over = true;
        }
    }

    fn entry_event(
        &mut self,
        id: i32,
        events: ReadFlags,
        cookie: u32,
        name: Vec<u8>,
        directory: bool,
    ) {
        let path = self.path(id, &name);
        if events.contains(ReadFlags::CREATE) {
            if !self.told.remove(&(id, name.clone())) {
                self.tell(Change::Create { path, directory });
                self.enter(id, &name, directory);
            }
        } else if events.contains(ReadFlags::MODIFY) {
            self.tell(Change::Write { path });
        } else if events.contains(ReadFlags::ATTRIB) {
            self.tell(Change::Chmod { path, directory });
        } else if events.contains(ReadFlags::DELETE) {
            self.told.remove(&(id, name));
            self.tell(Change::Remove { path, directory });
        } else if events.contains(ReadFlags::MOVED_FROM) {
            self.told.remove(&(id, name.clone()));
            self.tell(Change::Rename { from: Some(path), to: None, directory });
            let change = self.changes.len().checked_sub(1);
            let event = self.events;
            self.moved.push(Moved { cookie, parent: id, name, directory, change, event });
        } else if events.contains(ReadFlags::MOVED_TO) {
            self.told.remove(&(id, name.clone()));
            let half = self.moved.iter().position(|moved| moved.cookie == cookie);
            let from = half.map(|index| self.moved.remove(index));
            let told = from
                .as_ref()
                .and_then(|from| from.change)
                .and_then(|change| self.changes.get_mut(change));
            match told {
                Some(Change::Rename { to, .. }) => *to = Some(path),
                _ => self.tell(Change::Rename { from: None, to: Some(path), directory }),
            }
            let child = from.and_then(|from| {
                self.directories.get_mut(&from.parent)?.children.remove(&from.name)
            });
            match child {
                Some(child) => self.attach(child, id, &name),
                None => self.enter(id, &name, directory),
            }
        }
    }

    /// Watches a directory that appeared, and tells what is in it.
    fn enter(&mut self, parent: i32, name: &[u8], directory: bool) {
        if directory
            && self.recursive
            && let Some(id) = self.add_child(parent, name)
        {
            self.scan(id, &mut HashSet::from([id]), true);
        }
    }

    /// Watches every directory below one that is watched, but for those in `seen`, which it adds
    /// to. With `tell`, tells every entry as created.
    fn scan(&mut self, id: i32, seen: &mut HashSet<i32>, tell: bool) {
        if !self.recursive {
            return;
        }
        let mut open = vec![id];
        while let Some(id) = open.pop() {
            let below = self.below(id);
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW;
            let mut children = Vec::new();
            let listed = walk::open(&self.root, &below, flags).and_then(|directory| {
                walk::list(&directory, &mut |name, met| {
                    let directory = met == Met::Directory;
                    if tell && self.told.insert((id, name.to_vec())) {
                        let path = self.path(id, name);
                        self.tell(Change::Create { path, directory });
                    }
                    if directory {
                        children.push(name.to_vec());
                    }
                    self.look();
                    !self.is_over
                })
            });
            match listed {
                // Gone meanwhile: there is nothing below it.
                Ok(()) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
                // What is in it is told, what is below is not.
                Err(_) => self.not_watched += 1,
            }
            for name in children {
                if self.is_over {
                    return;
                }
                match self.add_child(id, &name) {
                    Some(child) if seen.insert(child) => open.push(child),
                    _ => {}
                }
            }
        }
    }

    /// Looks at the whole tree again.
    fn rescan(&mut self) {
        self.moved.clear();
        self.told.clear();
        if !self.recursive {
            return;
        }
        let mut seen = HashSet::from([self.root_id]);
        self.scan(self.root_id, &mut seen, false);
        let gone: Vec<i32> =
            self.directories.keys().copied().filter(|id| !seen.contains(id)).collect();
        if !self.is_over {
            for id in gone {
                self.drop_watch(id);
            }
        }
    }

    /// Watches a directory in another one; `None` when that cannot be, or it is gone.
    fn add_child(&mut self, parent: i32, name: &[u8]) -> Option<i32> {
        let mut below = self.below(parent);
        below.extend_from_slice(name);
        match self.add(&below) {
            Ok(id) => {
                // The same directory, mounted below itself.
                if self.is_within(parent, id) {
                    return None;
                }
                self.attach(id, parent, name);
                Some(id)
            }
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => None,
            Err(_) => {
                self.not_watched += 1;
                None
            }
        }
    }

    /// Adds a watch for what lies below the root, and makes sure that it is on the directory that
    /// this path leads to without symlinks.
    fn add(&self, below: &[u8]) -> Result<i32, Errno> {
        let which = || {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW;
            let stat = rustix::fs::fstat(walk::open(&self.root, below, flags)?)?;
            Ok(identity(&stat))
        };
        let before = which()?;
        let mask = WatchFlags::CREATE
            | WatchFlags::MODIFY
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR
            | WatchFlags::DONT_FOLLOW
            | WatchFlags::EXCL_UNLINK;
        let path = self.absolute(below);
        let id = inotify::add_watch(&*self.inotify, OsStr::from_bytes(&path), mask)?;
        if which() == Ok(before) {
            return Ok(id);
        }
        // What took its place is told by the parent, and watched then.
        if !self.directories.contains_key(&id) {
            let _ = inotify::remove_watch(&*self.inotify, id);
        }
        Err(Errno::NOENT)
    }

    /// Puts a directory where it is now.
    fn attach(&mut self, id: i32, parent: i32, name: &[u8]) {
        self.detach(id);
        let directory = self.directories.entry(id).or_default();
        directory.parent = Some(parent);
        directory.name = name.to_vec();
        if let Some(parent) = self.directories.get_mut(&parent) {
            parent.children.insert(name.to_vec(), id);
        }
    }

    /// Takes a directory away from where it was.
    fn detach(&mut self, id: i32) {
        let Some(directory) = self.directories.get(&id) else { return };
        let (parent, name) = (directory.parent, directory.name.clone());
        if let Some(parent) = parent.and_then(|parent| self.directories.get_mut(&parent))
            && parent.children.get(&name) == Some(&id)
        {
            parent.children.remove(&name);
        }
    }

    /// Forgets a directory whose watch the kernel has ended.
    fn forget(&mut self, id: i32) {
        self.detach(id);
        self.directories.remove(&id);
        self.is_over |= id == self.root_id;
    }

    /// Ends the watches of a directory and of all below it.
    fn drop_watch(&mut self, id: i32) {
        let mut open = vec![id];
        while let Some(id) = open.pop() {
            self.detach(id);
            if let Some(directory) = self.directories.remove(&id) {
                open.extend(directory.children.into_values());
                // It may have ended by itself.
                let _ = inotify::remove_watch(&*self.inotify, id);
            }
        }
    }

    /// Whether `id` is `parent` or above it.
    fn is_within(&self, parent: i32, id: i32) -> bool {
        let mut next = Some(parent);
        while let Some(at) = next {
            if at == id {
                return true;
            }
            next = self.directories.get(&at).and_then(|directory| directory.parent);
        }
        false
    }

    /// Moves whose second half did not come within so many events led out of the tree: what moved
    /// is watched no longer.
    fn give_up_moves(&mut self, events: u64) {
        let (old, young): (Vec<Moved>, Vec<Moved>) = std::mem::take(&mut self.moved)
            .into_iter()
            .partition(|moved| events == 0 || self.events - moved.event > events);
        self.moved = young;
        for moved in old {
            let child = self
                .directories
                .get(&moved.parent)
                .and_then(|parent| parent.children.get(&moved.name).copied());
            if let Some(child) = child
                && moved.directory
            {
                self.drop_watch(child);
            }
        }
    }

    /// Path of a directory from the root on, with a slash after it; empty for the root.
    fn below(&self, id: i32) -> Vec<u8> {
        let mut names: Vec<&[u8]> = Vec::new();
        let mut next = self.directories.get(&id);
        while let Some(Directory { parent: Some(parent), name, .. }) = next {
            names.push(name);
            next = self.directories.get(parent);
        }
        names.iter().rev().flat_map(|name| [*name, b"/"].concat()).collect()
    }

    /// Absolute path of an entry of a directory.
    fn path(&self, id: i32, name: &[u8]) -> Vec<u8> {
        let mut below = self.below(id);
        below.extend_from_slice(name);
        self.absolute(&below)
    }

    fn absolute(&self, below: &[u8]) -> Vec<u8> {
        match (self.canonical.as_slice(), below) {
            (root, b"") => root.to_vec(),
            (b"/", below) => [b"/", below].concat(),
            (root, below) => [root, b"/", below].concat(),
        }
    }

    /// Adds a change; one that repeats the last adds nothing.
    fn tell(&mut self, change: Change) {
        if self.changes.last() == Some(&change) {
            return;
        }
        self.bytes += match &change {
            Change::Create { path, .. }
            | Change::Write { path }
            | Change::Remove { path, .. }
            | Change::Chmod { path, .. } => path.len(),
            Change::Rename { from, to, .. } => {
                from.as_ref().map_or(0, Vec::len) + to.as_ref().map_or(0, Vec::len)
            }
            Change::Overflow => 0,
        };
        self.changes.push(change);
        if self.changes.len() >= CHANGES_MAX || self.bytes >= CHANGES_BYTES_MAX {
            self.send();
        }
    }

    /// Sends what there is.
    fn send(&mut self) {
        self.bytes = 0;
        for moved in &mut self.moved {
            moved.change = None;
        }
        if !self.changes.is_empty() && !self.is_over {
            let changes = std::mem::take(&mut self.changes);
            self.is_over |= self.reply.send(Answer::Changes(changes), None).is_err();
        }
    }

    /// Asks now and then whether anybody still waits.
    fn look(&mut self) {
        self.until_look -= 1;
        if self.until_look == 0 {
            self.until_look = ENTRIES_PER_LOOK;
            self.is_over |= !self.reply.is_wanted();
        }
    }
}

#[cfg(test)]
mod tests;
