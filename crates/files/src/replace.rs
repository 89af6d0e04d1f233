//! Replacing the content of one file, in one step, so that nobody's text is lost.
//!
//! The new content is written to a temporary file T beside the target P and written through to the
//! disk. A new file then gets its name, when nobody was faster. An existing one is exchanged with T
//! in one step, and only then it is decided: what T holds now is what P held at that very moment.
//!
//! ```text
//!  look at P, judge ─ fill T ─ exchange T and P ─ T holds what was seen ──────────── remove T
//!                                               ├ so, but is open for writing ────── keep T
//!                                               └ something else: P holds ours? ─ yes: exchange
//!                                                  │ no                            back ─ T holds
//!                                                  keep T: conflict ◄─ no ──────── ours? yes:
//!                                                                                  remove T, stale
//! ```
//!
//! So of two writers who expect the same content exactly one wins, and what a program writes in
//! between stays in P, or is kept. Where T cannot be made or not exchanged, the file is written in
//! place, see `in_place.rs`. What a killed process leaves is settled in `recover.rs`.
//!
//! The caller holds the lock of the path.

use std::os::fd::{AsFd as _, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use cofferdam_spec::Stamp;
use rustix::buffer::spare_capacity;
use rustix::fs::{AtFlags, Gid, Mode, OFlags, RenameFlags, Stat, Uid, XattrFlags};
use rustix::io::Errno;

use crate::call::{Expected, Fault, FaultKind, STAMP_BYTES_MAX, Written};
use crate::fault::{at, found, kernel};
use crate::resolve::{Place, identity, open_below};
use crate::serve::{Gone, Reply};
use crate::stamp::{Hash, Parts, hash_file, still_wanted};
use crate::steps::{Step, Steps};
use crate::store::{
    Intent, Note, Purpose, Store, kept_name, open_for_sync, temporary_name, write_all_at,
};
use crate::syncs::Syncs;
use crate::text::count_lines;

/// What a UTF-8 text may start with.
const BOM: &[u8] = b"\xef\xbb\xbf";

/// How often a write or an edit is tried, because somebody else wrote in between.
pub(crate) const ATTEMPTS_MAX: u32 = 3;

/// How long a program that has the old file open for writing may take to close it. Most that do are
/// just finishing.
const WRITER_WAIT: Duration = Duration::from_millis(50);

/// How often to look whether it has.
const WRITER_POLL: Duration = Duration::from_millis(1);

/// What may be written besides by group and others; the toolbox has no umask of its own caller.
pub(crate) const MODE_MASK: u32 = 0o777 & !0o022;

/// The content to write.
pub(crate) enum Body {
    /// In memory.
    Bytes(Vec<u8>),
    /// In a file, from its start.
    File {
        /// The file.
        file: OwnedFd,
        /// Number of bytes.
        size: u64,
    },
}

impl Body {
    /// Gives the parts to `take`, in order. Fails when a file is shorter than was told.
    pub(crate) fn each_part(
        &self,
        reply: &dyn Reply,
        take: &mut dyn FnMut(&[u8]) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        match self {
            Body::Bytes(bytes) => {
                // In parts, so that giving up is noticed.
                for part in bytes.chunks(4 * 1024 * 1024) {
                    still_wanted(reply)?;
                    take(part)?;
                }
                Ok(())
            }
            Body::File { file, size } => {
                let (mut parts, mut seen) = (Parts::new(file, *size, reply), 0);
                while let Some(part) = parts.next()? {
                    seen += part.len() as u64;
                    take(part)?;
                }
                if seen < *size {
                    return Err(found(FaultKind::Other, "read the content: it was cut off"));
                }
                Ok(())
            }
        }
    }

    fn starts_with_bom(&self) -> Result<bool, Fault> {
        match self {
            Body::Bytes(bytes) => Ok(bytes.starts_with(BOM)),
            Body::File { file, size } => Ok(*size >= 3 && holds_bom(file)?),
        }
    }
}

/// Whether a file starts with a byte order mark.
fn holds_bom(file: &OwnedFd) -> Result<bool, Fault> {
    let mut start = Vec::with_capacity(BOM.len());
    while start.len() < BOM.len() {
        let offset = start.len() as u64;
        match rustix::io::pread(file, spare_capacity(&mut start), offset) {
            Ok(0) => break,
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(kernel("read", errno)),
        }
    }
    Ok(start.starts_with(BOM))
}

/// What is going to be written.
pub(crate) struct New<'a> {
    body: &'a Body,
    /// Whether a byte order mark comes first.
    bom: bool,
    /// Stamp of all of it.
    pub(crate) stamp: Stamp,
    lines: u64,
}

impl<'a> New<'a> {
    fn measure(body: &'a Body, bom: bool, reply: &dyn Reply) -> Result<Self, Fault> {
        let (mut hash, mut lines, mut in_line) = (Hash::default(), 0, false);
        // Parts are never empty.
        let mut add = |part: &[u8]| {
            hash.add(part);
            // The first line of a part may be one that was counted already.
            lines += count_lines(part) - u64::from(in_line);
            in_line = !part.ends_with(b"\n");
            Ok(())
        };
        if bom {
            add(BOM)?;
        }
        body.each_part(reply, &mut add)?;
        Ok(Self { body, bom, stamp: hash.stamp(), lines })
    }

    /// Writes all of it to a file, from its start.
    pub(crate) fn write_to(
        &self,
        file: &OwnedFd,
        steps: &Steps,
        step: Step,
        reply: &dyn Reply,
    ) -> Result<(), Fault> {
        let mut offset = 0;
        let mut write = |part: &[u8]| {
            steps.before(step).map_err(at("write"))?;
            write_all_at(file.as_fd(), part, offset).map_err(at("write"))?;
            offset += part.len() as u64;
            Ok(())
        };
        if self.bom {
            write(BOM)?;
        }
        self.body.each_part(reply, &mut write)
    }
}

/// A file that was looked at.
pub(crate) struct Old {
    pub(crate) file: OwnedFd,
    pub(crate) stat: Stat,
    /// `None` above [`STAMP_BYTES_MAX`].
    pub(crate) stamp: Option<Stamp>,
}

impl Old {
    /// Looks at the regular file that is at `place`; `None` when nothing is.
    pub(crate) fn look(place: &Place, reply: &dyn Reply) -> Result<Option<Self>, Fault> {
        match place.open_regular() {
            Ok((file, stat)) => {
                let stamp = hash_file(&file, STAMP_BYTES_MAX, reply)?;
                Ok(Some(Self { file, stat, stamp }))
            }
            Err(Fault { kind: FaultKind::NotFound, .. }) => Ok(None),
            Err(fault) => Err(fault),
        }
    }

    /// Whether both are the same content. Files too large for a stamp are the same when they are
    /// the same file, of one size and time of change.
    fn holds_same_as(&self, other: &Self) -> bool {
        let told = |stat: &Stat| (identity(stat), stat.st_size, stat.st_mtime, stat.st_mtime_nsec);
        match (self.stamp, other.stamp) {
            (Some(one), Some(other)) => one == other,
            (None, None) => told(&self.stat) == told(&other.stat),
            _ => false,
        }
    }
}

/// Judges what is there by what is expected, before anything is done.
pub(crate) fn judge(expected: &Expected, old: Option<&Old>) -> Result<(), Fault> {
    let kind = match (expected, old) {
        (Expected::Any, _)
        | (Expected::Absent | Expected::Exactly { or_absent: true, .. }, None) => return Ok(()),
        (Expected::Exactly { or_absent: false, .. }, None) => FaultKind::Stale(None),
        (Expected::Absent, Some(old)) => FaultKind::Exists(old.stamp),
        (Expected::Exactly { stamp, .. }, Some(old)) => match old.stamp {
            Some(there) if there == *stamp => return Ok(()),
            Some(there) => FaultKind::Stale(Some(there)),
            // It cannot be what somebody has a stamp of.
            None => FaultKind::TooLarge { size: old.stat.st_size as u64, limit: STAMP_BYTES_MAX },
        },
    };
    Err(found(kind, "compare"))
}

/// The fault of a change that was overtaken [`ATTEMPTS_MAX`] times; `there` is what is there, where
/// known.
pub(crate) fn overtaken(expected: &Expected, there: Option<Stamp>) -> Fault {
    let kind = match expected {
        // Nothing that is there can be stale.
        Expected::Any => FaultKind::Busy,
        Expected::Absent | Expected::Exactly { .. } => FaultKind::Stale(there),
    };
    found(kind, "compare")
}

/// A caller who never gives up: past the exchange a write is finished, whoever waits for it.
pub(crate) struct Patient;

impl Reply for Patient {
    fn send(&self, _: crate::call::Answer, _: Option<OwnedFd>) -> Result<(), Gone> {
        Err(Gone)
    }

    fn is_wanted(&self) -> bool {
        true
    }
}

/// One replacement.
pub(crate) struct Replace<'a> {
    pub(crate) store: &'a Store,
    pub(crate) syncs: &'a Syncs,
    pub(crate) steps: &'a Steps,
    /// Where; no symlink, and not a place that only a directory can have.
    pub(crate) place: &'a Place,
    /// Its canonical path.
    pub(crate) canonical: &'a str,
    /// What must be there.
    pub(crate) expected: Expected,
    /// The new content.
    pub(crate) body: &'a Body,
    /// Whether to keep a byte order mark that only the old content has.
    pub(crate) keep_bom: bool,
    /// Permission bits of a new file.
    pub(crate) mode: u32,
    pub(crate) reply: &'a dyn Reply,
}

/// How an attempt ended that nothing was wrong with.
pub(crate) enum Attempt {
    /// The file is written.
    Written(Written),
    /// Somebody else wrote in between, and nothing was changed: it must be judged anew. With what
    /// is there, where known.
    Overtaken(Option<Stamp>),
}

impl Replace<'_> {
    /// Replaces the file.
    pub(crate) fn run(&self) -> Result<Written, Fault> {
        let mut there = None;
        for _ in 0..ATTEMPTS_MAX {
            let old = Old::look(self.place, self.reply)?;
            match self.attempt(old)? {
                Attempt::Written(written) => return Ok(written),
                Attempt::Overtaken(stamp) => there = stamp,
            }
        }
        Err(overtaken(&self.expected, there))
    }

    /// Replaces what was seen, `None` for no file.
    pub(crate) fn attempt(&self, old: Option<Old>) -> Result<Attempt, Fault> {
        judge(&self.expected, old.as_ref())?;
        let bom = match &old {
            Some(old) if self.keep_bom => holds_bom(&old.file)? && !self.body.starts_with_bom()?,
            _ => false,
        };
        let new = New::measure(self.body, bom, self.reply)?;
        let mut temporary = match (self.make_temporary(&new, old.as_ref())?, &old) {
            (Made::Temporary(temporary), _) => temporary,
            // The directory is not ours to change, but the file may be.
            (Made::Refused(Errno::ACCESS | Errno::PERM | Errno::ROFS), Some(old)) => {
                return self.write_in_place(old, &new);
            }
            (Made::Refused(errno), _) => return Err(kernel("create a temporary file", errno)),
        };
        self.fill(&mut temporary, &new, old.as_ref())?;
        match old {
            None => self.put(temporary, &new),
            Some(old) => self.exchange(temporary, &new, &old),
        }
    }

    /// Notes the intent, and makes T.
    fn make_temporary(&self, new: &New<'_>, old: Option<&Old>) -> Result<Made<'_>, Fault> {
        let name = temporary_name()?;
        let at_it = beside(self.place, &name)?;
        let purpose = Purpose::Replace { new: new.stamp, old: old.and_then(|old| old.stamp) };
        let note = self.store.note(&intent(self.place, &name, purpose), self.steps)?;
        // An existing file's mode is set once it is complete.
        let mode = if old.is_some() { 0o600 } else { self.mode & MODE_MASK };
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let made = self.steps.before(Step::MakeTemporary).and_then(|()| {
            let mode = Mode::from_raw_mode(mode);
            open_below(&self.place.directory, name.as_ref(), flags, mode)
        });
        let file = match made {
            Ok(file) => file,
            Err(errno) => return Ok(Made::Refused(errno)),
        };
        let mut temporary = Temporary {
            place: self.place,
            at_it,
            name,
            file: None,
            identity: (0, 0),
            armed: true,
            note,
        };
        temporary.identity =
            rustix::fs::fstat(&file).map(|stat| identity(&stat)).map_err(at("stat"))?;
        temporary.file = Some(file);
        Ok(Made::Temporary(temporary))
    }

    /// Fills T, and writes it through to the disk. From here on nobody has it open for writing.
    fn fill(
        &self,
        temporary: &mut Temporary<'_>,
        new: &New<'_>,
        old: Option<&Old>,
    ) -> Result<(), Fault> {
        let Some(file) = temporary.file.take() else { return Ok(()) };
        new.write_to(&file, self.steps, Step::Fill, self.reply)?;
        if let Some(old) = old {
            self.steps.before(Step::CopyAttributes).map_err(at("copy attributes"))?;
            copy_attributes(old, &file).map_err(at("copy attributes"))?;
        }
        self.steps.before(Step::SyncTemporary).map_err(at("fsync"))?;
        rustix::fs::fsync(&file).map_err(at("fsync"))?;
        still_wanted(self.reply)?;
        temporary.note.complete()
    }

    /// Gives T the name of a file that does not exist.
    fn put(&self, mut temporary: Temporary<'_>, new: &New<'_>) -> Result<Attempt, Fault> {
        let directory = &self.place.directory;
        self.steps.before(Step::Place).map_err(at("rename"))?;
        let (flags, name) = (RenameFlags::NOREPLACE, self.place.name());
        let put =
            match rustix::fs::renameat_with(directory, &temporary.name, directory, name, flags) {
                // The file system knows no such rename. A link replaces nothing either, and T is
                // removed when it is dropped.
                Err(Errno::INVAL | Errno::NOSYS) => rustix::fs::linkat(
                    directory,
                    &temporary.name,
                    directory,
                    name,
                    AtFlags::empty(),
                ),
                Ok(()) => {
                    temporary.armed = false;
                    Ok(())
                }
                refused => refused,
            };
        match put {
            Ok(()) => {}
            Err(Errno::EXIST) => return Ok(Attempt::Overtaken(None)),
            Err(errno) => return Err(kernel("rename", errno)),
        }
        self.sync_directory();
        Ok(Attempt::Written(self.written(new, None, true)))
    }

    /// Exchanges T and the target, and settles what came out.
    fn exchange(
        &self,
        mut temporary: Temporary<'_>,
        new: &New<'_>,
        old: &Old,
    ) -> Result<Attempt, Fault> {
        // Whatever happens from here on, T may hold what is not ours to remove.
        temporary.armed = false;
        let exchanged = self.steps.before(Step::Exchange).and_then(|()| temporary.exchange());
        if let Err(errno) = exchanged {
            temporary.armed = true;
            return match errno {
                Errno::NOENT => Ok(Attempt::Overtaken(None)),
                // A mount point; no exchange on this file system, or across what looks like one;
                // a directory where only owners may rename.
                Errno::BUSY
                | Errno::INVAL
                | Errno::NOSYS
                | Errno::XDEV
                | Errno::PERM
                | Errno::ACCESS => {
                    drop(temporary);
                    self.write_in_place(old, new)
                }
                errno => Err(kernel("rename", errno)),
            };
        }
        let there = self.peek(Step::Judge, &temporary.at_it);
        if let Some((there, quiet)) = &there
            && there.holds_same_as(old)
        {
            let quiet = *quiet;
            let removed = quiet && temporary.remove(self.steps).is_ok();
            let mut kept = match (removed, quiet) {
                (true, _) => None,
                (false, true) => Some(self.keep(&temporary)),
                // What a program goes on to write must have a name: a copy would not get it.
                (false, false) => Some(self.keep_beside(&temporary)),
            };
            self.sync_directory();
            if removed {
                kept = keep_late(self.store, &self.place.name, there);
            }
            let mut written = self.written(new, Some(old), true);
            written.link_broken = there.stat.st_nlink > 1;
            written.kept = kept;
            return Ok(Attempt::Written(written));
        }
        let there = there.and_then(|(there, _)| there.stamp);
        if self.take_back(&temporary, new) {
            self.sync_directory();
            return Ok(Attempt::Overtaken(there));
        }
        let kept = if is_written_to(&temporary.at_it) {
            self.keep_beside(&temporary)
        } else {
            self.keep(&temporary)
        };
        self.sync_directory();
        Err(found(FaultKind::Conflict { kept }, "rename"))
    }

    /// Exchanges back when the target still is what was written. True when T held just that again,
    /// and is removed; otherwise T must be kept.
    fn take_back(&self, temporary: &Temporary<'_>, new: &New<'_>) -> bool {
        let ours = temporary.identity;
        let is_ours = |place: &Place| {
            let opened = place.open_regular();
            opened.is_ok_and(|(file, stat)| {
                identity(&stat) == ours
                    && hash_file(&file, u64::MAX, &Patient) == Ok(Some(new.stamp))
            })
        };
        if !is_ours(self.place) {
            return false;
        }
        let back = self.steps.before(Step::ExchangeBack).and_then(|()| temporary.exchange());
        if back.is_err() {
            return false;
        }
        // Held until it is removed, so that nobody opens it for writing.
        let Some((_held, quiet)) = self.peek(Step::JudgeAgain, &temporary.at_it) else {
            return false;
        };
        if !quiet || !is_ours(&temporary.at_it) {
            return false;
        }
        temporary.remove(self.steps).is_ok()
    }

    /// As [`look_quietly`], after an exchange.
    fn peek(&self, step: Step, place: &Place) -> Option<(Old, bool)> {
        self.steps.before(step).ok()?;
        look_quietly(place)
    }

    /// Moves T to where conflicts are kept, and says where it is; where that fails, it stays.
    fn keep(&self, temporary: &Temporary<'_>) -> String {
        let kept = self.steps.before(Step::Keep).map_err(at("keep")).and_then(|()| {
            let directory = self.place.directory.as_fd();
            self.store.keep(directory, &temporary.name, &self.place.name)
        });
        kept.unwrap_or_else(|_| {
            let directory = self.canonical.rfind('/').map_or("", |end| &self.canonical[..end]);
            format!("{directory}/{}", temporary.name)
        })
    }

    /// Gives T a name beside the target that people see, and says where it is; where that fails, it
    /// stays.
    fn keep_beside(&self, temporary: &Temporary<'_>) -> String {
        let directory = &self.place.directory;
        let flags = RenameFlags::NOREPLACE;
        let named = self.steps.before(Step::Keep).map_err(at("keep")).and_then(|()| {
            let name = kept_name(&self.place.name)?;
            rustix::fs::renameat_with(directory, &temporary.name, directory, &name, flags)
                .map_err(at("keep"))?;
            Ok(name)
        });
        let name = named.unwrap_or_else(|_| temporary.name.clone());
        let above = self.canonical.rfind('/').map_or("", |end| &self.canonical[..end]);
        format!("{above}/{name}")
    }

    /// The name is written through soon, see [`Syncs`]. That it cannot be is no reason to say that
    /// the change failed: it is done.
    fn sync_directory(&self) {
        if let Some(directory) = open_for_sync(self.place)
            && self.steps.before(Step::SyncDirectory).is_ok()
        {
            self.syncs.soon(directory);
        }
    }

    /// The account of a write.
    pub(crate) fn written(&self, new: &New<'_>, old: Option<&Old>, atomic: bool) -> Written {
        Written {
            canonical: self.canonical.to_owned(),
            existed: old.is_some(),
            previous: old.and_then(|old| old.stamp),
            stamp: new.stamp,
            lines: new.lines,
            atomic,
            link_broken: false,
            kept: None,
            bom_kept: new.bom,
        }
    }
}

/// Looks at what is at `place` under a name that nobody else knows, and whether nobody has it open
/// for writing. As long as the file is held nobody can open it so. `None` when it cannot be looked
/// at: then it is not what was expected.
pub(crate) fn look_quietly(place: &Place) -> Option<(Old, bool)> {
    let (file, _) = place.open_regular().ok()?;
    let quiet = wait_for_writers(&file);
    // Once it is quiet, this is the last word.
    let stat = rustix::fs::fstat(&file).ok()?;
    let stamp = hash_file(&file, STAMP_BYTES_MAX, &Patient).ok()?;
    Some((Old { file, stat, stamp }, quiet))
}

/// The old file, which was called `name`, is gone, but a program may have found it by its name
/// before, and have come to opening it only after it was looked at. Then it waits for our lease to
/// end: it is let in, and what it writes is kept. Where it is, unless nothing was written.
pub(crate) fn keep_late(store: &Store, name: &[u8], old: &Old) -> Option<String> {
    if cofferdam_sys::holds_read_lease(old.file.as_fd()).unwrap_or(true) {
        return None;
    }
    // Where there are no leases there was nothing to give back.
    let _ = cofferdam_sys::give_back_lease(old.file.as_fd());
    wait_for_writers(&old.file);
    if hash_file(&old.file, STAMP_BYTES_MAX, &Patient) == Ok(old.stamp) {
        return None;
    }
    // Without room it cannot be kept, and it has no name that it could stay at.
    store.keep_copy(old.file.as_fd(), name).ok()
}

/// Whether a program has the file at `place` open for writing, also after a while.
fn is_written_to(place: &Place) -> bool {
    place.open_regular().is_ok_and(|(file, _)| !wait_for_writers(&file))
}

/// Waits a while for programs that have a file open for writing, and says whether none has. Then
/// nobody opens it so as long as it is held.
fn wait_for_writers(file: &OwnedFd) -> bool {
    let until = Instant::now() + WRITER_WAIT;
    loop {
        match cofferdam_sys::take_read_lease(file.as_fd()) {
            Ok(false) if Instant::now() < until => thread::sleep(WRITER_POLL),
            Ok(quiet) => return quiet,
            // Somebody else's file, or a file system without leases: it cannot be told, and the
            // content decides alone.
            Err(_) => return true,
        }
    }
}

/// What a change of `place` is going to do.
pub(crate) fn intent(place: &Place, temporary: &str, purpose: Purpose) -> Intent {
    let end = place.canonical.len().saturating_sub(place.name.len() + 1);
    Intent {
        directory: place.canonical[..end].to_vec(),
        temporary: temporary.to_owned(),
        name: place.name.clone(),
        purpose,
    }
}

/// What became of T.
enum Made<'a> {
    Temporary(Temporary<'a>),
    /// The kernel refused to make it.
    Refused(Errno),
}

/// T: removed when it is dropped, as long as it is armed; its intent goes after it.
struct Temporary<'a> {
    /// Where the target is.
    place: &'a Place,
    /// Where T is.
    at_it: Place,
    name: String,
    /// Which file it is.
    identity: (u64, u64),
    /// Open for writing, until it is filled.
    file: Option<OwnedFd>,
    armed: bool,
    note: Note<'a>,
}

impl Temporary<'_> {
    fn exchange(&self) -> Result<(), Errno> {
        let directory = &self.place.directory;
        let (name, flags) = (self.place.name(), RenameFlags::EXCHANGE);
        rustix::fs::renameat_with(directory, &self.name, directory, name, flags)
    }

    fn remove(&self, steps: &Steps) -> Result<(), Errno> {
        steps.before(Step::RemoveTemporary)?;
        rustix::fs::unlinkat(&self.place.directory, &self.name, AtFlags::empty())
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        if self.armed {
            let _ = rustix::fs::unlinkat(&self.place.directory, &self.name, AtFlags::empty());
        }
    }
}

/// Another name in the directory of `place`.
pub(crate) fn beside(place: &Place, name: &str) -> Result<Place, Fault> {
    let directory = place.directory.try_clone().map_err(crate::fault::io_at("dup"))?;
    let Intent { directory: mut canonical, .. } = intent(place, name, Purpose::Remove);
    canonical.push(b'/');
    canonical.extend_from_slice(name.as_bytes());
    Ok(Place { directory, name: name.as_bytes().to_vec(), canonical, must_be_directory: false })
}

/// The names of extended attributes that rule access (`acl(5)`).
const ACL: &str = "system.posix_acl_access";

/// Attributes that belong to a content and not to a name: the kernel takes them from a file that is
/// written.
const OF_CONTENT: [&str; 3] = ["security.capability", "security.ima", "security.evm"];

/// Largest list of names, and largest value, of extended attributes (`xattr(7)`).
const XATTR_BYTES_MAX: usize = 64 * 1024;

/// Gives a file the owner, mode and extended attributes of another, as far as the kernel lets us.
fn copy_attributes(old: &Old, file: &OwnedFd) -> Result<(), Errno> {
    let made = rustix::fs::fstat(file)?;
    let differs = |old: u32, new: u32| (old != new).then_some(old);
    let user = differs(old.stat.st_uid, made.st_uid).map(Uid::from_raw);
    let group = differs(old.stat.st_gid, made.st_gid).map(Gid::from_raw);
    // One by one: often the group may be given and the owner not. What may not, stays ours.
    if group.is_some() {
        let _ = rustix::fs::fchown(file, None, group);
    }
    if user.is_some() {
        let _ = rustix::fs::fchown(file, user, None);
    }
    let kept = attribute_names(&old.file)?;
    // One that the directory gives to new files would cut the mode.
    if attribute_names(file)?.iter().any(|name| name == ACL) {
        rustix::fs::fremovexattr(file, ACL)?;
    }
    let mode = old.stat.st_mode & 0o7777;
    match rustix::fs::fchmod(file, Mode::from_raw_mode(mode)) {
        // The filter of the cell lets nobody make set-id files.
        Err(Errno::PERM) if mode & 0o6000 != 0 => {
            rustix::fs::fchmod(file, Mode::from_raw_mode(mode & 0o1777))?;
        }
        set => set?,
    }
    // After the mode, which an access control list refines.
    for name in kept.iter().filter(|name| !OF_CONTENT.contains(&name.as_str())) {
        let mut value = vec![0; XATTR_BYTES_MAX];
        let Ok(size) = rustix::fs::fgetxattr(&old.file, name.as_str(), &mut value[..]) else {
            continue;
        };
        let value = &value[..size];
        // What the kernel keeps for itself is not ours to copy; room there must be.
        if let Err(errno @ (Errno::NOSPC | Errno::DQUOT)) =
            rustix::fs::fsetxattr(file, name.as_str(), value, XattrFlags::empty())
        {
            return Err(errno);
        }
    }
    Ok(())
}

/// Names of the extended attributes of a file; none where there are none.
fn attribute_names(file: &OwnedFd) -> Result<Vec<String>, Errno> {
    if matches!(rustix::fs::flistxattr_query(file), Ok(0) | Err(Errno::OPNOTSUPP)) {
        return Ok(Vec::new());
    }
    let mut list = vec![0; XATTR_BYTES_MAX];
    let size = rustix::fs::flistxattr(file, &mut list[..])?;
    let names = list[..size].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    Ok(names.map(|name| String::from_utf8_lossy(name).into_owned()).collect())
}

#[cfg(test)]
pub(crate) mod tests;
