//! `~/.cofferdam/`: what must outlive a change that is cut off, and what must not be lost.
//!
//! - `intents/`: one file for each change under way, telling which temporary file it made. They are
//!   not written through to the disk: they are for a process that is killed, and what a loss of
//!   power leaves is settled by the order in which the files themselves are written through.
//! - `undo/`: old contents of files that are being written in place.
//! - `conflicts/`: files that somebody else wrote at the same time; nobody removes them but the
//!   user.
//!
//! The programs of the cell can write here too, so whatever is read back is only believed as far as
//! these programs could have done the same themselves.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Write as _;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use cofferdam_spec::Stamp;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags, SeekFrom};
use rustix::io::Errno;
use rustix::rand::GetRandomFlags;
use serde::{Deserialize, Serialize};

use crate::call::{Fault, FaultKind, FileKind};
use crate::fault::{at, found, io_at, kernel};
use crate::resolve::{Place, kind_of, open_below};
use crate::steps::{Step, Steps};

/// The directory below the home directory.
const NAME: &str = ".cofferdam";

/// Intents of changes under way.
pub(crate) const INTENTS: &str = "intents";

/// Old contents of files that are written in place.
pub(crate) const UNDO: &str = "undo";

/// Files that are kept because somebody else wrote them at the same time.
pub(crate) const CONFLICTS: &str = "conflicts";

/// What temporary files start and end with; 16 hexadecimal digits lie between.
const TEMPORARY: (&str, &str) = (".cofferdam-", ".tmp");

/// Longest name of an entry, in bytes (`NAME_MAX`).
const NAME_BYTES_MAX: usize = 255;

/// Bytes of one read when a file is copied.
const COPY_BYTES: usize = 256 * 1024;

/// Stands after the description in an intent once its temporary file is complete.
const COMPLETE: u8 = b'C';

/// The directory, found anew each time: programs may remove it.
#[derive(Debug)]
pub(crate) struct Store {
    home: PathBuf,
}

/// What a change is going to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Intent {
    /// Canonical path of the directory.
    pub(crate) directory: Vec<u8>,
    /// Name of the temporary file in it.
    pub(crate) temporary: String,
    /// Name of what is changed.
    pub(crate) name: Vec<u8>,
    /// What the temporary file is for.
    pub(crate) purpose: Purpose,
}

/// What a temporary file is for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Purpose {
    /// It gets the new content, is exchanged with the target, and then holds the old content.
    Replace {
        /// The new content.
        new: Stamp,
        /// The old content; `None` when there was none, or it was too large for a stamp.
        old: Option<Stamp>,
    },
    /// It is the target itself under another name, just before it is removed.
    Remove,
}

/// An intent that was read back.
#[derive(Debug)]
pub(crate) struct Noted {
    pub(crate) intent: Intent,
    /// Whether the temporary file was complete.
    pub(crate) complete: bool,
}

impl Noted {
    /// Reads an intent; `None` when it is none.
    pub(crate) fn read(bytes: &[u8]) -> Option<Self> {
        let (intent, rest) = postcard::take_from_bytes(bytes).ok()?;
        Some(Self { intent, complete: !rest.is_empty() })
    }
}

/// A fault about the directory itself, which is not what the call is about.
fn of_store(step: &'static str) -> impl Fn(Errno) -> Fault {
    move |errno| match kernel(step, errno) {
        fault @ Fault { kind: FaultKind::NoSpace, .. } => fault,
        fault => Fault { kind: FaultKind::Other, ..fault },
    }
}

/// 16 hexadecimal digits that nobody can foresee.
pub(crate) fn random_digits() -> Result<String, Fault> {
    let mut bytes = [0_u8; 8];
    let mut filled = 0;
    while filled < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            Ok(more) => filled += more,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(kernel("getrandom", errno)),
        }
    }
    Ok(format!("{:016x}", u64::from_ne_bytes(bytes)))
}

/// A new name for a temporary file.
pub(crate) fn temporary_name() -> Result<String, Fault> {
    Ok(format!("{}{}{}", TEMPORARY.0, random_digits()?, TEMPORARY.1))
}

/// Whether a name is one that [`temporary_name`] gives.
pub(crate) fn is_temporary_name(name: &str) -> bool {
    let digits = name.strip_prefix(TEMPORARY.0).and_then(|name| name.strip_suffix(TEMPORARY.1));
    digits.is_some_and(is_digits)
}

/// Whether a text is one that [`random_digits`] gives.
pub(crate) fn is_digits(text: &str) -> bool {
    text.len() == 16 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

impl Store {
    /// The store below a home directory.
    pub(crate) fn new(home: PathBuf) -> Self {
        Self { home }
    }

    /// The home directory.
    pub(crate) fn home(&self) -> &Path {
        &self.home
    }

    /// Opens one of the directories, and makes it when it is missing.
    pub(crate) fn directory(&self, name: &str) -> Result<OwnedFd, Fault> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut home = rustix::fs::openat(CWD, &self.home, flags, Mode::empty());
        if matches!(home, Err(Errno::ACCESS)) {
            // A program took its rights away, which the owner may give back.
            let _ = rustix::fs::chmod(&self.home, Mode::RWXU);
            home = rustix::fs::openat(CWD, &self.home, flags, Mode::empty());
        }
        let own = open_or_make(&home.map_err(of_store("open the home directory"))?, NAME)
            .map_err(of_store("open ~/.cofferdam"))?;
        open_or_make(&own, name).map_err(of_store("open a directory below ~/.cofferdam"))
    }

    /// Opens one of the directories; `None` when it is not there, or cannot be opened.
    pub(crate) fn existing(&self, name: &str) -> Option<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW;
        let home = rustix::fs::openat(
            CWD,
            &self.home,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        );
        let own = open_below(home.ok()?, OsStr::new(NAME), flags, Mode::empty()).ok()?;
        open_below(own, OsStr::new(name), flags, Mode::empty()).ok()
    }

    /// Notes what is going to be done.
    pub(crate) fn note<'a>(&self, intent: &Intent, steps: &'a Steps) -> Result<Note<'a>, Fault> {
        let failed = of_store("note the change in ~/.cofferdam/intents");
        steps.before(Step::NoteIntent).map_err(&failed)?;
        let directory = self.directory(INTENTS)?;
        let name = random_digits()?;
        // It holds two paths and two stamps; nothing of it can fail to be encoded.
        let bytes = postcard::to_stdvec(intent).map_err(|_| failed(Errno::INVAL))?;
        let file = File::from(create(&directory, &name).map_err(&failed)?);
        // From here on it is removed, whatever happens.
        let mut note = Note { directory, name, file, steps };
        note.write(&bytes)?;
        Ok(note)
    }

    /// Moves `temporary`, a file in `directory`, to where conflicts are kept, and says where it is.
    /// `name` is what it was called. On another file system it is copied, written through and
    /// removed.
    pub(crate) fn keep(
        &self,
        directory: BorrowedFd<'_>,
        temporary: &str,
        name: &[u8],
    ) -> Result<String, Fault> {
        let failed = of_store("move a file to ~/.cofferdam/conflicts");
        let conflicts = self.directory(CONFLICTS)?;
        let kept = conflict_name(name)?;
        let flags = RenameFlags::NOREPLACE;
        match rustix::fs::renameat_with(directory, temporary, &conflicts, &kept, flags) {
            Ok(()) => Ok(self.path_of(CONFLICTS, &kept)),
            Err(Errno::XDEV | Errno::INVAL | Errno::NOSYS) => {
                // A symlink is what it says.
                let kept = match rustix::fs::readlinkat(directory, temporary, Vec::new()) {
                    Ok(target) => {
                        rustix::fs::symlinkat(target, &conflicts, &kept).map_err(&failed)?;
                        self.path_of(CONFLICTS, &kept)
                    }
                    Err(_) => {
                        let source = open_regular_below(directory, temporary).map_err(&failed)?;
                        self.keep_copy(source.as_fd(), name)?
                    }
                };
                rustix::fs::unlinkat(directory, temporary, AtFlags::empty()).map_err(&failed)?;
                Ok(kept)
            }
            Err(errno) => Err(failed(errno)),
        }
    }

    /// Copies a file that was called `name` to where conflicts are kept, writes it through, and
    /// says where it is.
    pub(crate) fn keep_copy(&self, source: BorrowedFd<'_>, name: &[u8]) -> Result<String, Fault> {
        let failed = of_store("copy a file to ~/.cofferdam/conflicts");
        let conflicts = self.directory(CONFLICTS)?;
        let kept = conflict_name(name)?;
        let copy = create(&conflicts, &kept).map_err(&failed)?;
        let copied = copy_all(source, copy.as_fd())
            .and_then(|()| rustix::fs::fsync(&copy))
            .and_then(|()| rustix::fs::fsync(&conflicts));
        if let Err(errno) = copied {
            // A part of it is of no use.
            let _ = rustix::fs::unlinkat(&conflicts, &kept, AtFlags::empty());
            return Err(failed(errno));
        }
        Ok(self.path_of(CONFLICTS, &kept))
    }

    /// Path of a file in one of the directories.
    pub(crate) fn path_of(&self, directory: &str, name: &str) -> String {
        format!("{}/{NAME}/{directory}/{name}", self.home.display())
    }
}

/// Opens a regular file for reading; nothing else is copied.
fn open_regular_below(directory: BorrowedFd<'_>, name: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = open_below(directory, OsStr::new(name), flags, Mode::empty())?;
    match kind_of(rustix::fs::fstat(&file)?.st_mode) {
        FileKind::Regular => Ok(file),
        _ => Err(Errno::INVAL),
    }
}

/// A name among the conflicts: time, random digits, and as much of `name` as fits.
fn conflict_name(name: &[u8]) -> Result<String, Fault> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut kept = format!("{}-{}-", now.as_secs(), random_digits()?);
    for char in String::from_utf8_lossy(name).chars() {
        if kept.len() + char.len_utf8() > NAME_BYTES_MAX {
            break;
        }
        kept.push(char);
    }
    Ok(kept)
}

/// A name beside `name` for a file that is still written to.
pub(crate) fn kept_name(name: &[u8]) -> Result<String, Fault> {
    let mut kept = String::new();
    for char in String::from_utf8_lossy(name).chars() {
        if kept.len() + char.len_utf8() > NAME_BYTES_MAX - 48 {
            break;
        }
        kept.push(char);
    }
    Ok(format!("{kept}.cofferdam-kept-{}", random_digits()?))
}

/// Opens a directory below another one, and makes it when it is missing. Programs of the cell can
/// put something else in its place: that gets another name, so that nobody's writes stop.
fn open_or_make(above: &OwnedFd, name: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW;
    match open_below(above, OsStr::new(name), flags, Mode::empty()) {
        Err(Errno::NOENT) => {
            match rustix::fs::mkdirat(above, name, Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
            open_below(above, OsStr::new(name), flags, Mode::empty())
        }
        Err(Errno::NOTDIR | Errno::LOOP | Errno::ACCESS) => {
            let digits = random_digits().map_err(|_| Errno::IO)?;
            rustix::fs::renameat(above, name, above, format!("{name}-broken-{digits}"))?;
            rustix::fs::mkdirat(above, name, Mode::RWXU)?;
            open_below(above, OsStr::new(name), flags, Mode::empty())
        }
        opened => opened,
    }
}

/// Makes a file that only its owner reads, for reading and writing.
pub(crate) fn create(directory: &OwnedFd, name: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
    open_below(directory, OsStr::new(name), flags, Mode::RUSR | Mode::WUSR)
}

/// Writes all of `bytes` at `offset`.
pub(crate) fn write_all_at(
    file: BorrowedFd<'_>,
    mut bytes: &[u8],
    mut offset: u64,
) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::pwrite(file, bytes, offset) {
            Ok(0) => return Err(Errno::NOSPC),
            Ok(written) => {
                bytes = &bytes[written..];
                offset += written as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Copies a file from its start to the end that it has now to the start of another: somebody may
/// make it longer all the time.
fn copy_all(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<(), Errno> {
    let size = rustix::fs::fstat(from)?.st_size as u64;
    let mut part = vec![0; COPY_BYTES];
    let mut offset = 0;
    while offset < size {
        let wanted = (size - offset).min(COPY_BYTES as u64) as usize;
        match rustix::io::pread(from, &mut part[..wanted], offset) {
            // It is shorter by now.
            Ok(0) => break,
            Ok(read) => {
                write_all_at(to, &part[..read], offset)?;
                offset += read as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Names in a directory that is open for reading, at most `most`.
pub(crate) fn names(directory: &OwnedFd, most: usize) -> Result<Vec<Vec<u8>>, Errno> {
    rustix::fs::seek(directory, SeekFrom::Start(0))?;
    let mut space = [MaybeUninit::uninit(); 8192];
    let mut entries = rustix::fs::RawDir::new(directory, &mut space);
    let mut names = Vec::new();
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(name.to_vec());
        }
        if names.len() >= most {
            break;
        }
    }
    Ok(names)
}

/// Opens what must be written through for the directory of `place` to be: the directory, or, where
/// that may be written and not read, the file, which on journaling file systems does the same.
/// `None` when neither can be opened.
pub(crate) fn open_for_sync(place: &Place) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    open_below(&place.directory, OsStr::new("."), flags, Mode::empty())
        .or_else(|_| place.open(OFlags::RDONLY))
        .ok()
}

/// An intent that is noted until this is dropped.
pub(crate) struct Note<'a> {
    directory: OwnedFd,
    name: String,
    file: File,
    steps: &'a Steps,
}

impl Note<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        let failed = io_at("note the change in ~/.cofferdam/intents");
        self.file.write_all(bytes).map_err(failed)
    }

    /// Notes that the temporary file is complete: from here on its name may hold what somebody else
    /// wrote.
    pub(crate) fn complete(&mut self) -> Result<(), Fault> {
        self.steps.before(Step::NoteComplete).map_err(at("note the change"))?;
        self.write(&[COMPLETE])
    }
}

impl Drop for Note<'_> {
    fn drop(&mut self) {
        let _ = self.steps.before(Step::ForgetIntent);
        // One that stays is looked at when the toolbox starts again, and then removed.
        let _ = rustix::fs::unlinkat(&self.directory, &self.name, AtFlags::empty());
    }
}

/// Where a canonical path leads, whose last name need not exist; `None` when it cannot be one.
/// Fails when its directory cannot be reached now, with [`FaultKind::Elsewhere`] when a symlink
/// stands on the way.
pub(crate) fn find_again(canonical: &[u8]) -> Result<Option<Place>, Fault> {
    let is_name = |name: &[u8]| !matches!(name, b"" | b"." | b"..");
    let Some(text) = std::str::from_utf8(canonical).ok().filter(|text| !text.contains('\0')) else {
        return Ok(None);
    };
    let names = text.strip_prefix('/').map(|names| names.split('/'));
    if !names.is_some_and(|mut names| names.all(|name| is_name(name.as_bytes()))) {
        return Ok(None);
    }
    let place = crate::resolve::resolve(text, crate::resolve::Last::Keep)?;
    if place.canonical != canonical {
        let canonical = String::from_utf8_lossy(&place.canonical).into_owned();
        return Err(found(FaultKind::Elsewhere { canonical }, "resolve"));
    }
    Ok(Some(place))
}

/// A name for system calls.
pub(crate) fn os(name: &[u8]) -> &OsStr {
    OsStr::from_bytes(name)
}
