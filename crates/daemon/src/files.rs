//! What services do with files: the decisions about stamps, and the calls that carry them out.
//!
//! The toolbox does what it is told and answers what it found. Whether a session may overwrite a
//! file is decided here, by what it has seen (its stamps), and travels as a condition that the
//! toolbox checks in the moment of the change.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use cofferdam_cell::protocol::WATCHES_MAX;
use cofferdam_files::FileCall;
use cofferdam_files::call::{
    Account, Answer, CONTENT_BYTES_MAX, Change, Content, Edit, Encoding, Entry, Expected, Fault,
    FaultKind, FileKind, FileMatches, Glob, Grep, Guard, ReadText, TextRead, Write, Written,
};
use cofferdam_proto::v1;
use cofferdam_spec::{LineRange, SessionId, Stamp};
use rustix::fs::{FileType as RawKind, MemfdFlags, SealFlags};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::decide::Refusal;
use crate::stamps::{Freshness, Lines, Record, Replaced, Right, Seen, Stamps};
use crate::supervisor::{Handle, StartRefused};
use crate::toolbox::{Answered, Answers, CALL_BYTES_MAX, Toolbox, ToolboxError};

/// Calls about files that may wait or run at once. Each costs two descriptors.
const CALLS_MAX: usize = 256;

/// Searches at once: half of the toolbox's threads, so that the other half is free for what is
/// quick.
const SEARCHES_MAX: usize = 4;

/// How long a search waits for another one to end.
const SEARCH_PATIENCE: Duration = Duration::from_secs(30);

/// Longest texts of an edit, in bytes together: what a call to the toolbox takes, with room for the
/// path, which is in it up to twice.
pub(crate) const EDIT_BYTES_MAX: usize = CALL_BYTES_MAX - 16 * 1024;

/// How often a change is decided anew because its path leads elsewhere: once for a path with
/// symlinks, and a few times more for somebody who turns them meanwhile.
const DECISIONS_MAX: usize = 5;

/// Who calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Caller {
    /// Whose stamps count and are set. The session without a name holds none.
    pub(crate) session: SessionId,
    /// The request id, or the method's name where there is none.
    pub(crate) call: String,
}

/// What a change may find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Overwrite {
    /// What the session has seen: all of it for a write, any part of it for other changes.
    Seen,
    /// Exactly this.
    Stamp(Stamp),
    /// Nothing.
    Absent,
    /// Anything, also nothing.
    Any,
}

/// Content for a file.
#[derive(Debug)]
pub(crate) enum WriteContent {
    /// In memory.
    Bytes(Bytes),
    /// A file without a name, from its start, and its length in bytes.
    File(OwnedFd, u64),
}

/// A file to write.
#[derive(Debug)]
pub(crate) struct WriteFile {
    /// The file, an absolute path.
    pub(crate) path: String,
    /// Its new content.
    pub(crate) content: WriteContent,
    /// What may be overwritten.
    pub(crate) expected: Overwrite,
    /// Permission bits of a new file.
    pub(crate) mode: u32,
    /// Whether missing directories are made.
    pub(crate) parents: bool,
    /// Keep a UTF-8 byte order mark that the file has and the content has not.
    pub(crate) keep_bom: bool,
}

/// A text to replace.
#[derive(Debug)]
pub(crate) struct EditFile {
    /// The file, an absolute path.
    pub(crate) path: String,
    /// What to replace, not empty.
    pub(crate) old: String,
    /// What to put there, different from `old`.
    pub(crate) new: String,
    /// Whether every occurrence is replaced; otherwise there must be exactly one.
    pub(crate) all: bool,
    /// What may be changed.
    pub(crate) expected: Overwrite,
}

/// What was replaced.
#[derive(Debug)]
pub(crate) struct Edited {
    /// The file.
    pub(crate) written: Written,
    /// Number of replacements.
    pub(crate) replacements: u64,
    /// Line of the first one, counted from 1.
    pub(crate) first_line: u64,
}

/// Files that were found by name.
#[derive(Debug)]
pub(crate) struct Found {
    /// Canonical directory.
    pub(crate) canonical: String,
    /// Absolute paths, raw, in the order of their bytes.
    pub(crate) paths: Vec<Vec<u8>>,
    /// Whether there are more.
    pub(crate) truncated: bool,
    /// The account.
    pub(crate) account: Account,
}

/// A part of a search.
#[derive(Debug)]
pub(crate) enum GrepPart {
    /// Lines of one file; a file with many comes in several parts.
    File(FileMatches),
    /// The end; nothing follows.
    End {
        /// Canonical path.
        canonical: String,
        /// Matching lines of all files.
        matches: u64,
        /// Files with a match.
        files: u64,
        /// Whether `max_bytes` ended the search.
        out_of_bytes: bool,
        /// The account.
        account: Account,
    },
}

/// A search that runs. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Matches {
    path: String,
    answers: Answers,
    _permits: [OwnedSemaphorePermit; 2],
}

impl Matches {
    /// The next part. Not to be asked again after [`GrepPart::End`] or an error.
    pub(crate) async fn next(&mut self) -> Result<GrepPart, FileError> {
        match self.answers.next().await {
            Ok(Some((Answer::Matches(matches), _))) => Ok(GrepPart::File(matches)),
            Ok(Some((
                Answer::Searched { canonical, matches, files, out_of_bytes, account },
                _,
            ))) => Ok(GrepPart::End { canonical, matches, files, out_of_bytes, account }),
            Ok(Some((Answer::Failed(fault), _))) => Err(ToolboxError::Failed(fault)),
            Ok(_) => Err(ToolboxError::Unexpected),
            Err(error) => Err(error),
        }
        .map_err(|error| FileError::of(&self.path, error))
    }
}

/// A watch that stands. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Watching {
    /// The path of the call.
    path: String,
    /// Canonical directory.
    pub(crate) canonical: String,
    /// Directories that are watched.
    pub(crate) directories: u64,
    /// Directories that are not.
    pub(crate) not_watched: u64,
    answers: Answers,
    _permits: [OwnedSemaphorePermit; 2],
}

impl Watching {
    /// The next changes; `None` when the directory is gone, which the last change told. Whoever
    /// asked last is woken. Not to be asked again after an error or the end.
    pub(crate) fn poll_changes(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Option<Vec<Change>>, FileError>> {
        let Poll::Ready(answer) = self.answers.poll_next(context) else { return Poll::Pending };
        let changes = match answer {
            Ok(Some((Answer::Changes(changes), _))) => Ok(Some(changes)),
            Ok(Some((Answer::WatchEnded, _))) => Ok(None),
            Ok(Some((Answer::Failed(fault), _))) => Err(ToolboxError::Failed(fault)),
            Ok(_) => Err(ToolboxError::Unexpected),
            Err(error) => Err(error),
        };
        Poll::Ready(changes.map_err(|error| FileError::of(&self.path, error)))
    }
}

/// A regular file, open for reading.
#[derive(Debug)]
pub(crate) struct Opened {
    /// What it is.
    pub(crate) entry: Entry,
    /// The file.
    pub(crate) file: OwnedFd,
    /// Counts as a call while the file is read.
    pub(crate) permit: OwnedSemaphorePermit,
}

/// Why nothing was done, except where [`FileError::Conflict`] says so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FileError {
    /// The toolbox refused or failed.
    Fault {
        /// The path of the call.
        path: String,
        /// What went wrong.
        fault: Fault,
    },
    /// The file exists, and the session holds no stamp of it.
    NotRead {
        /// Its path.
        path: String,
    },
    /// The session has not seen every line.
    PartlyRead {
        /// Its path.
        path: String,
        /// The lines that it has seen, in order.
        shown: Vec<LineRange>,
        /// Lines of the file.
        total_lines: u64,
    },
    /// The session has seen it as a text that does not say what its bytes are, so that to write
    /// that text back would change more than was meant.
    NotText {
        /// Its path.
        path: String,
        /// How it was read: lossy, or as UTF-16.
        encoding: Encoding,
    },
    /// It holds something else than expected.
    Stale {
        /// Its path.
        path: String,
        /// What it holds; `None` when it is gone, or could not be read.
        current: Option<Stamp>,
    },
    /// Somebody else wrote at the same time; both contents are kept.
    Conflict {
        /// Its path.
        path: String,
        /// Where the other content is.
        kept: String,
    },
    /// The daemon takes no new call.
    Draining,
    /// Too much runs at once; the sentence says what.
    Busy(String),
    /// The cell ended during the call. Whether a change was made is not known. To ask again is safe
    /// where the change is guarded by a stamp, the session's or a given one, or by
    /// [`Overwrite::Absent`]: it is refused when it was made.
    CellLost,
    /// There is no cell.
    NoCell {
        /// The step that failed, and how.
        reason: String,
        /// When to ask again.
        retry: Duration,
    },
}

impl FileError {
    fn of(path: &str, error: ToolboxError) -> Self {
        let other = |kind, step: &str, errno| FileError::Fault {
            path: path.to_owned(),
            fault: Fault { kind, step: step.to_owned(), errno },
        };
        match error {
            ToolboxError::Failed(fault) => FileError::Fault { path: path.to_owned(), fault },
            ToolboxError::CellLost => FileError::CellLost,
            ToolboxError::Busy => FileError::Busy(error.to_string()),
            ToolboxError::TooLong { size, limit } => {
                other(FaultKind::TooLarge { size, limit }, "send", 0)
            }
            ToolboxError::Socket(source) => {
                tracing::error!(error = %source, "a call to the toolbox failed");
                other(FaultKind::Other, "socket", source.raw_os_error().unwrap_or(0))
            }
            ToolboxError::Unexpected => {
                tracing::error!("{error}");
                other(FaultKind::Other, "answer", 0)
            }
        }
    }

    fn fault(path: &str, kind: FaultKind, step: &str) -> Self {
        let fault = Fault { kind, step: step.to_owned(), errno: 0 };
        FileError::Fault { path: path.to_owned(), fault }
    }
}

impl From<StartRefused> for FileError {
    fn from(refused: StartRefused) -> Self {
        match refused {
            StartRefused::NotAdmitted(Refusal::Draining) | StartRefused::Stopped => {
                FileError::Draining
            }
            StartRefused::NotAdmitted(Refusal::TooMany) => {
                FileError::Busy("as many calls run as may".to_owned())
            }
            StartRefused::NoCell { reason, retry } => FileError::NoCell { reason, retry },
        }
    }
}

/// The files of the workspace, for every service: the way to them, the stamps, and how much may
/// run at once.
#[derive(Debug, Clone)]
pub(crate) struct Files(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    supervisor: Handle,
    stamps: Mutex<Stamps>,
    calls: Arc<Semaphore>,
    searches: Arc<Semaphore>,
    watches: Arc<Semaphore>,
}

/// What a right leads to.
enum Decision {
    /// The change may be tried, under this condition.
    Try(Guard),
    /// The path leads there, whose stamp counts.
    Elsewhere(String),
}

impl Files {
    /// Over a supervisor's cell, without a stamp.
    pub(crate) fn new(supervisor: Handle) -> Self {
        let semaphore = |permits| Arc::new(Semaphore::new(permits));
        Self(Arc::new(Shared {
            supervisor,
            stamps: Mutex::default(),
            calls: semaphore(CALLS_MAX),
            searches: semaphore(SEARCHES_MAX),
            watches: semaphore(WATCHES_MAX),
        }))
    }

    /// What the kernel enforces.
    pub(crate) fn enforcement(&self) -> v1::Enforcement {
        self.0.supervisor.enforcement()
    }

    /// Waits until the daemon drains.
    pub(crate) async fn draining(&self) {
        self.0.supervisor.draining().await;
    }

    /// Looks at the stamps, or changes them.
    pub(crate) fn with_stamps<T>(&self, use_them: impl FnOnce(&mut Stamps) -> T) -> T {
        // A panic of another user leaves them as good as it found them: each change is one insert.
        use_them(&mut self.0.stamps.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Counts as a call until the permit is dropped.
    pub(crate) fn admit(&self) -> Result<OwnedSemaphorePermit, FileError> {
        Arc::clone(&self.0.calls)
            .try_acquire_owned()
            .map_err(|_| FileError::Busy(format!("{CALLS_MAX} calls about files run already")))
    }

    /// Describes an entry; with the stamp of a regular file when it is asked for.
    pub(crate) async fn stat(
        &self,
        path: &str,
        follow: bool,
        with_stamp: bool,
    ) -> Result<(Entry, Option<Stamp>), FileError> {
        let call = FileCall::Stat { path: path.to_owned(), follow, with_stamp };
        match self.one(path, call, None).await? {
            (Answer::Entry(entry, stamp), _) => Ok((entry, stamp)),
            _ => Err(FileError::of(path, ToolboxError::Unexpected)),
        }
    }

    /// Entries of a directory above the name `after`, and whether there are more.
    pub(crate) async fn list(
        &self,
        path: &str,
        after: Option<Vec<u8>>,
        max: u32,
    ) -> Result<(Vec<Entry>, bool), FileError> {
        let call = FileCall::List { path: path.to_owned(), after, max };
        match self.one(path, call, None).await? {
            (Answer::Entries { entries, more }, _) => Ok((entries, more)),
            _ => Err(FileError::of(path, ToolboxError::Unexpected)),
        }
    }

    /// Opens a regular file for reading.
    pub(crate) async fn open(&self, path: &str) -> Result<Opened, FileError> {
        let permit = self.admit()?;
        let toolbox = self.0.supervisor.toolbox().await?;
        let call = FileCall::Open { path: path.to_owned() };
        let opened = toolbox.one(call, None).await.map_err(|error| FileError::of(path, error))?;
        let (Answer::Opened(entry), Some(file)) = opened else {
            return Err(FileError::of(path, ToolboxError::Unexpected));
        };
        // The descriptor comes from the cell: reading anything else could wait for ever.
        let is_regular = rustix::fs::fstat(&file)
            .is_ok_and(|stat| RawKind::from_raw_mode(stat.st_mode) == RawKind::RegularFile);
        if !is_regular {
            return Err(FileError::of(path, ToolboxError::Unexpected));
        }
        Ok(Opened { entry, file, permit })
    }

    /// The caller was shown every byte of a file that held `stamp`.
    pub(crate) fn seen_whole(&self, caller: &Caller, canonical: &str, stamp: Stamp) {
        self.with_stamps(|stamps| {
            stamps.read(caller, canonical, stamp, Seen::All, SystemTime::now());
        });
    }

    /// Reads lines, and sets the stamp for the caller; not for media.
    pub(crate) async fn read_text(
        &self,
        caller: Option<&Caller>,
        read: ReadText,
    ) -> Result<TextRead, FileError> {
        let path = read.path.clone();
        let (Answer::Text(text), _) = self.one(&path, FileCall::ReadText(read), None).await? else {
            return Err(FileError::of(&path, ToolboxError::Unexpected));
        };
        if let (Some(caller), Some(stamp), Some(total), None) =
            (caller, text.stamp, text.total_lines, &text.media)
            && let Ok(canonical) = std::str::from_utf8(&text.entry.path)
        {
            let range = text.range.filter(|range| 0 < range.first && range.first <= range.last);
            let seen = Seen::Lines(Lines::new(range, total, text.encoding));
            self.with_stamps(|stamps| {
                stamps.read(caller, canonical, stamp, seen, SystemTime::now());
            });
        }
        Ok(*text)
    }

    /// Replaces or creates a file.
    pub(crate) async fn write(
        &self,
        caller: &Caller,
        write: WriteFile,
    ) -> Result<Written, FileError> {
        let WriteFile { path, content, expected, mode, parents, keep_bom } = write;
        let content = Prepared::new(&path, content).await?;
        let mut canonical = guess(&path);
        for _ in 0..DECISIONS_MAX {
            let guard = match self.decide_write(caller, &path, &canonical, expected).await? {
                Decision::Try(guard) => guard,
                Decision::Elsewhere(there) => {
                    canonical = there;
                    continue;
                }
            };
            let expects_nothing = guard.expected == Expected::Absent;
            let call = FileCall::Write(Write {
                path: path.clone(),
                content: content.to_wire(),
                guard,
                mode,
                parents,
                keep_bom,
            });
            match self.one(&path, call, content.descriptor()).await {
                Ok((Answer::Written(written), _)) => {
                    self.with_stamps(|stamps| {
                        let (path, now) = (&written.canonical, SystemTime::now());
                        stamps.written(caller, path, written.stamp, now);
                    });
                    return Ok(written);
                }
                Ok(_) => return Err(FileError::of(&path, ToolboxError::Unexpected)),
                Err(FileError::Fault { fault, .. }) => match fault.kind {
                    FaultKind::Elsewhere { canonical: there } => canonical = there,
                    FaultKind::Exists(_) if expected == Overwrite::Seen && expects_nothing => {
                        return Err(FileError::NotRead { path });
                    }
                    _ => return Err(self.refused(caller, (path, &canonical), expected, fault)),
                },
                Err(error) => return Err(error),
            }
        }
        Err(FileError::fault(&path, FaultKind::Elsewhere { canonical }, "resolve"))
    }

    /// Replaces texts in a file; at most [`EDIT_BYTES_MAX`] of both.
    pub(crate) async fn edit(&self, caller: &Caller, edit: EditFile) -> Result<Edited, FileError> {
        let EditFile { path, old, new, all, expected } = edit;
        let breaks = |text: &str| text.bytes().filter(|byte| *byte == b'\n').count() as u64;
        let (old_breaks, new_breaks) = (breaks(&old), breaks(&new));
        let mut canonical = guess(&path);
        for _ in 0..DECISIONS_MAX {
            let guard = match self.decide_edit(caller, &path, &canonical, expected).await? {
                Decision::Try(guard) => guard,
                Decision::Elsewhere(there) => {
                    canonical = there;
                    continue;
                }
            };
            let call = FileCall::Edit(Edit {
                path: path.clone(),
                old: old.clone(),
                new: new.clone(),
                all,
                guard,
            });
            match self.one(&path, call, None).await {
                Ok((Answer::Edited { written, replacements, first_line }, _)) => {
                    let replaced = Replaced { first_line, old_breaks, new_breaks, replacements };
                    let contents = (written.previous, written.stamp);
                    self.with_stamps(|stamps| {
                        let (about, now) = ((&replaced, written.lines), SystemTime::now());
                        stamps.edited(caller, &written.canonical, contents, about, now);
                    });
                    return Ok(Edited { written, replacements, first_line });
                }
                Ok(_) => return Err(FileError::of(&path, ToolboxError::Unexpected)),
                Err(FileError::Fault { fault, .. }) => match fault.kind {
                    FaultKind::Elsewhere { canonical: there } => canonical = there,
                    _ => return Err(self.refused(caller, (path, &canonical), expected, fault)),
                },
                Err(error) => return Err(error),
            }
        }
        Err(FileError::fault(&path, FaultKind::Elsewhere { canonical }, "resolve"))
    }

    /// Makes a directory; returns its canonical path, and whether it was made now.
    pub(crate) async fn make_dir(
        &self,
        path: &str,
        mode: u32,
        parents: bool,
    ) -> Result<(String, bool), FileError> {
        let call = FileCall::MakeDir { path: path.to_owned(), mode, parents };
        match self.one(path, call, None).await? {
            (Answer::Made { canonical, created }, _) => Ok((canonical, created)),
            _ => Err(FileError::of(path, ToolboxError::Unexpected)),
        }
    }

    /// Moves an entry; returns both canonical paths.
    pub(crate) async fn move_entry(
        &self,
        caller: &Caller,
        from: &str,
        to: &str,
        expected: Overwrite,
    ) -> Result<(String, String), FileError> {
        let call = |guard| FileCall::Move { from: from.to_owned(), to: to.to_owned(), guard };
        match self.change_entry(caller, from, expected, call).await? {
            Answer::Moved { from, to } => {
                self.with_stamps(|stamps| stamps.moved(caller, &from, &to, SystemTime::now()));
                Ok((from, to))
            }
            _ => Err(FileError::of(from, ToolboxError::Unexpected)),
        }
    }

    /// Removes an entry; returns its canonical path, and how many entries were removed.
    pub(crate) async fn remove(
        &self,
        caller: &Caller,
        path: &str,
        recursive: bool,
        expected: Overwrite,
    ) -> Result<(String, u64), FileError> {
        let call = |guard| FileCall::Remove { path: path.to_owned(), recursive, guard };
        match self.change_entry(caller, path, expected, call).await? {
            Answer::Removed { canonical, removed } => {
                self.with_stamps(|stamps| stamps.removed(caller, &canonical, SystemTime::now()));
                Ok((canonical, removed))
            }
            _ => Err(FileError::of(path, ToolboxError::Unexpected)),
        }
    }

    /// Finds files by name. Waits up to 30 s while as many searches run as may.
    pub(crate) async fn glob(&self, glob: Glob) -> Result<Found, FileError> {
        let path = glob.path.clone();
        let (toolbox, _permits) = self.begin_search().await?;
        match toolbox.one(FileCall::Glob(glob), None).await {
            Ok((Answer::Found { canonical, paths, truncated, account }, _)) => {
                Ok(Found { canonical, paths, truncated, account })
            }
            Ok(_) => Err(FileError::of(&path, ToolboxError::Unexpected)),
            Err(error) => Err(FileError::of(&path, error)),
        }
    }

    /// Finds lines. Waits up to 30 s while as many searches run as may.
    pub(crate) async fn grep(&self, grep: Grep) -> Result<Matches, FileError> {
        let path = grep.path.clone();
        let (toolbox, permits) = self.begin_search().await?;
        let answers = toolbox.call(FileCall::Grep(grep), None).await;
        let answers = answers.map_err(|error| FileError::of(&path, error))?;
        Ok(Matches { path, answers, _permits: permits })
    }

    /// Watches a directory.
    pub(crate) async fn watch(&self, path: &str, recursive: bool) -> Result<Watching, FileError> {
        let call = self.admit()?;
        let watch = Arc::clone(&self.0.watches)
            .try_acquire_owned()
            .map_err(|_| FileError::Busy(format!("{WATCHES_MAX} watches run already")))?;
        let toolbox = self.0.supervisor.toolbox().await?;
        let failed = |error| FileError::of(path, error);
        let request = FileCall::Watch { path: path.to_owned(), recursive };
        let mut answers = toolbox.call(request, None).await.map_err(failed)?;
        match answers.next().await.map_err(failed)? {
            Some((Answer::Watching { canonical, directories, not_watched }, _)) => Ok(Watching {
                path: path.to_owned(),
                canonical,
                directories,
                not_watched,
                answers,
                _permits: [call, watch],
            }),
            Some((Answer::Failed(fault), _)) => Err(failed(ToolboxError::Failed(fault))),
            _ => Err(failed(ToolboxError::Unexpected)),
        }
    }

    /// Reads the file of a stamp again, notes whether the stamp is fresh, and returns that.
    pub(crate) async fn verify(&self, record: &Record) -> Result<Freshness, FileError> {
        let freshness = match self.stat(&record.path, false, true).await {
            Ok((_, current)) if current == Some(record.stamp) => Freshness::Fresh,
            Ok(_) => Freshness::Stale,
            Err(FileError::Fault { fault, .. }) => match fault.kind {
                FaultKind::NotFound | FaultKind::NotDirectory => Freshness::Gone,
                // What cannot be read is not known to be what was seen.
                _ => Freshness::Stale,
            },
            Err(error) => return Err(error),
        };
        self.with_stamps(|stamps| stamps.verified(record, freshness));
        Ok(freshness)
    }

    /// A call that has one answer.
    async fn one(
        &self,
        path: &str,
        call: FileCall,
        content: Option<BorrowedFd<'_>>,
    ) -> Result<Answered, FileError> {
        let _permit = self.admit()?;
        let toolbox = self.0.supervisor.toolbox().await?;
        toolbox.one(call, content).await.map_err(|error| FileError::of(path, error))
    }

    async fn begin_search(&self) -> Result<(Toolbox, [OwnedSemaphorePermit; 2]), FileError> {
        let call = self.admit()?;
        let free = Arc::clone(&self.0.searches).acquire_owned();
        let search = tokio::time::timeout(SEARCH_PATIENCE, free).await.map_err(|_| {
            let waited = SEARCH_PATIENCE.as_secs();
            FileError::Busy(format!("{SEARCHES_MAX} searches run, and none ended in {waited} s"))
        })?;
        // The semaphore is never closed.
        let search = search.map_err(|_| FileError::Draining)?;
        // Asked for behind the wait: by now another cell may stand.
        let toolbox = self.0.supervisor.toolbox().await?;
        Ok((toolbox, [call, search]))
    }

    /// The entry that the path leads to, unless there is none.
    async fn look(
        &self,
        path: &str,
        with_stamp: bool,
    ) -> Result<Option<(Entry, Option<Stamp>)>, FileError> {
        match self.stat(path, true, with_stamp).await {
            Ok(found) => Ok(Some(found)),
            Err(FileError::Fault { fault: Fault { kind: FaultKind::NotFound, .. }, .. }) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn holds(&self, caller: &Caller, canonical: &str) -> bool {
        self.right(caller, canonical) != Right::None
    }

    fn right(&self, caller: &Caller, canonical: &str) -> Right {
        self.with_stamps(|stamps| stamps.right(&caller.session, canonical))
    }

    async fn decide_write(
        &self,
        caller: &Caller,
        path: &str,
        canonical: &str,
        expected: Overwrite,
    ) -> Result<Decision, FileError> {
        if let Some(guard) = unconditional(expected) {
            return Ok(Decision::Try(guard));
        }
        let right = self.right(caller, canonical);
        let expected = match (&right, right.stamp()) {
            (Right::None, _) | (_, None) => Expected::Absent,
            (Right::Whole(stamp), _) => Expected::Exactly { stamp: *stamp, or_absent: true },
            // What is gone may be written anew, however little was seen of it.
            (_, Some(stamp)) => match self.look(path, true).await? {
                None => Expected::Absent,
                Some((entry, _)) if entry.path != canonical.as_bytes() => return elsewhere(entry),
                Some((_, current)) if current != Some(stamp) => {
                    return Err(self.stale(caller, path.to_owned(), canonical, current));
                }
                Some(_) => return Err(not_whole(path, right)),
            },
        };
        Ok(Decision::Try(Guard { canonical: Some(canonical.to_owned()), expected }))
    }

    async fn decide_edit(
        &self,
        caller: &Caller,
        path: &str,
        canonical: &str,
        expected: Overwrite,
    ) -> Result<Decision, FileError> {
        if let Some(guard) = unconditional(expected) {
            return Ok(Decision::Try(guard));
        }
        let right = self.right(caller, canonical);
        let stamp = match (&right, right.stamp()) {
            (Right::NotText { .. }, Some(stamp)) => {
                let (entry, current) = self.stat(path, true, true).await?;
                if entry.path != canonical.as_bytes() {
                    return elsewhere(entry);
                }
                return Err(if current == Some(stamp) {
                    not_whole(path, right)
                } else {
                    self.stale(caller, path.to_owned(), canonical, current)
                });
            }
            (_, Some(stamp)) => stamp,
            (_, None) => {
                let (entry, _) = self.stat(path, true, false).await?;
                return match entry.kind {
                    FileKind::Directory => {
                        Err(FileError::fault(path, FaultKind::IsDirectory, "edit"))
                    }
                    FileKind::Regular if entry.path != canonical.as_bytes() => elsewhere(entry),
                    FileKind::Regular => Err(FileError::NotRead { path: path.to_owned() }),
                    kind => Err(FileError::fault(path, FaultKind::NotRegular(kind), "edit")),
                };
            }
        };
        let expected = Expected::Exactly { stamp, or_absent: false };
        Ok(Decision::Try(Guard { canonical: Some(canonical.to_owned()), expected }))
    }

    /// Carries out a move or a removal.
    async fn change_entry(
        &self,
        caller: &Caller,
        path: &str,
        expected: Overwrite,
        call: impl Fn(Guard) -> FileCall,
    ) -> Result<Answer, FileError> {
        let mut canonical = guess(path);
        for _ in 0..DECISIONS_MAX {
            let guard = match unconditional(expected) {
                Some(guard) => guard,
                None => {
                    let (entry, _) = self.stat(path, false, false).await?;
                    let guard = self.decide_change(caller, path, entry)?;
                    canonical = guard.canonical.clone().unwrap_or(canonical);
                    guard
                }
            };
            match self.one(path, call(guard), None).await {
                Ok((answer, _)) => return Ok(answer),
                Err(FileError::Fault { fault, .. }) => match fault.kind {
                    FaultKind::Elsewhere { canonical: there } => canonical = there,
                    _ => {
                        return Err(self.refused(
                            caller,
                            (path.to_owned(), &canonical),
                            expected,
                            fault,
                        ));
                    }
                },
                Err(error) => return Err(error),
            }
        }
        Err(FileError::fault(path, FaultKind::Elsewhere { canonical }, "resolve"))
    }

    fn decide_change(&self, caller: &Caller, path: &str, entry: Entry) -> Result<Guard, FileError> {
        let is_regular = entry.kind == FileKind::Regular;
        let not_read = || FileError::NotRead { path: path.to_owned() };
        // A path that cannot be said has no stamp, and cannot be named as the one that was judged.
        let Ok(canonical) = String::from_utf8(entry.path) else {
            return if is_regular {
                Err(not_read())
            } else {
                Ok(Guard { canonical: None, expected: Expected::Any })
            };
        };
        let expected = if is_regular {
            let stamp = self.right(caller, &canonical).stamp().ok_or_else(not_read)?;
            Expected::Exactly { stamp, or_absent: false }
        } else {
            Expected::Any
        };
        Ok(Guard { canonical: Some(canonical), expected })
    }

    /// What a fault of a change means for the caller. `canonical` is where the path leads, when the
    /// session's stamp decided, and otherwise a guess.
    fn refused(
        &self,
        caller: &Caller,
        (path, canonical): (String, &str),
        expected: Overwrite,
        fault: Fault,
    ) -> FileError {
        let by_stamp = expected == Overwrite::Seen;
        match fault.kind {
            FaultKind::Stale(current) if by_stamp || self.holds(caller, canonical) => {
                self.stale(caller, path, canonical, current)
            }
            // Where the path leads was not asked, so there is no path whose history it is.
            FaultKind::Stale(current) => FileError::Stale { path, current },
            FaultKind::Conflict { kept } => FileError::Conflict { path, kept },
            _ => FileError::Fault { path, fault },
        }
    }

    fn stale(
        &self,
        caller: &Caller,
        path: String,
        canonical: &str,
        current: Option<Stamp>,
    ) -> FileError {
        self.with_stamps(|stamps| {
            stamps.refused_stale(caller, canonical, current, SystemTime::now());
        });
        FileError::Stale { path, current }
    }
}

/// The condition that a caller gave itself; `None` when the session's stamp decides.
fn unconditional(expected: Overwrite) -> Option<Guard> {
    let expected = match expected {
        Overwrite::Seen => return None,
        Overwrite::Stamp(stamp) => Expected::Exactly { stamp, or_absent: false },
        Overwrite::Absent => Expected::Absent,
        Overwrite::Any => Expected::Any,
    };
    Some(Guard { canonical: None, expected })
}

fn elsewhere(entry: Entry) -> Result<Decision, FileError> {
    match String::from_utf8(entry.path) {
        Ok(canonical) => Ok(Decision::Elsewhere(canonical)),
        Err(error) => {
            let path = String::from_utf8_lossy(error.as_bytes()).into_owned();
            // No stamp is held of a path that cannot be said.
            Err(FileError::NotRead { path })
        }
    }
}

fn not_whole(path: &str, right: Right) -> FileError {
    let path = path.to_owned();
    match right {
        Right::Part { shown, total_lines, .. } => {
            FileError::PartlyRead { path, shown, total_lines }
        }
        Right::NotText { encoding, .. } => FileError::NotText { path, encoding },
        Right::None | Right::Whole(_) => FileError::NotRead { path },
    }
}

/// What the canonical path is when the path has no symlinks and no `..`, which is the usual case.
pub(crate) fn guess(path: &str) -> String {
    let mut guess = String::with_capacity(path.len());
    for part in path.split('/').filter(|part| !part.is_empty() && *part != ".") {
        guess.push('/');
        guess.push_str(part);
    }
    if guess.is_empty() { "/".to_owned() } else { guess }
}

/// Content on its way to the toolbox.
enum Prepared {
    Inline(Bytes),
    Descriptor(OwnedFd, u64),
}

impl Prepared {
    async fn new(path: &str, content: WriteContent) -> Result<Self, FileError> {
        match content {
            WriteContent::File(file, size) => Ok(Self::Descriptor(file, size)),
            WriteContent::Bytes(bytes) if bytes.len() <= CONTENT_BYTES_MAX => {
                Ok(Self::Inline(bytes))
            }
            WriteContent::Bytes(bytes) => {
                let size = bytes.len() as u64;
                let made = tokio::task::spawn_blocking(move || memory_file(&bytes)).await;
                let made = made.unwrap_or_else(|error| Err(io::Error::other(error)));
                let file =
                    made.map_err(|error| FileError::of(path, ToolboxError::Socket(error)))?;
                Ok(Self::Descriptor(file, size))
            }
        }
    }

    fn to_wire(&self) -> Content {
        match self {
            Self::Inline(bytes) => Content::Inline(bytes.to_vec()),
            Self::Descriptor(_, size) => Content::Descriptor { size: *size },
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Inline(_) => None,
            Self::Descriptor(file, _) => Some(file.as_fd()),
        }
    }
}

/// A sealed memory file with these bytes.
fn memory_file(bytes: &[u8]) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::NOEXEC_SEAL;
    let file = rustix::fs::memfd_create("cofferdam-content", flags)?;
    let mut written = 0;
    while written < bytes.len() {
        written += rustix::io::pwrite(&file, &bytes[written..], written as u64)?;
    }
    let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guess_leaves_out_what_means_nothing_and_keeps_what_may_mean_something() {
        for (path, expected) in [
            ("/workspace/a", "/workspace/a"),
            ("//workspace/./a//b/.", "/workspace/a/b"),
            ("/workspace/../a", "/workspace/../a"),
            ("/", "/"),
        ] {
            assert_eq!(guess(path), expected);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_search_does_not_wait_for_ever_for_others() {
        let directory = tempfile::tempdir().unwrap();
        let (_cell, port) = crate::testing::fake::launch(directory.path().to_owned());
        let launch = || Err(cofferdam_cell::LaunchError::Spawn(io::Error::other("one cell")));
        let logs = directory.path().to_owned();
        let made = crate::supervisor::Supervisor::new(Box::new(launch), port, logs, 7);
        let (_supervisor, handle) = made.unwrap();
        let files = Files::new(handle);
        let all = u32::try_from(SEARCHES_MAX).unwrap();
        let _running = Arc::clone(&files.0.searches).acquire_many_owned(all).await.unwrap();
        let before = tokio::time::Instant::now();
        let error = files.begin_search().await.unwrap_err();
        let sentence = "4 searches run, and none ended in 30 s".to_owned();
        assert_eq!(error, FileError::Busy(sentence));
        assert!(before.elapsed() >= SEARCH_PATIENCE);
    }

    #[test]
    fn content_in_memory_is_whole_and_sealed() {
        let bytes = vec![7; 3 << 20];
        let file = memory_file(&bytes).unwrap();
        let mut read = vec![0; bytes.len()];
        assert_eq!(rustix::io::pread(&file, &mut read, 0).unwrap(), bytes.len());
        assert_eq!(read, bytes);
        assert_eq!(rustix::io::pwrite(&file, b"x", 0), Err(rustix::io::Errno::PERM));
    }
}
