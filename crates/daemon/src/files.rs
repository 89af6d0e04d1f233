//! What services do with files: the decisions about stamps, and the calls that carry them out.
//!
//! The toolbox does what it is told and answers what it found. Whether a session may overwrite a
//! file is decided here, by what it has seen (its stamps), and travels as a
//! condition that the toolbox checks in the moment of the change.

use std::os::fd::OwnedFd;
use std::time::Duration;

use bytes::Bytes;
use cofferdam_files::call::{
    Account, Encoding, Fault, FileMatches, Glob, Grep, ReadText, TextRead, Written,
};
use cofferdam_spec::{LineRange, SessionId, Stamp};

use crate::supervisor::Handle;

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
pub(crate) struct Matches {}

impl Matches {
    /// The next part. Not to be asked again after [`GrepPart::End`] or an error.
    pub(crate) async fn next(&mut self) -> Result<GrepPart, FileError> {
        Err(FileError::CellLost)
    }
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
    /// The session has seen it as a text that does not say what its bytes are, so that to write that
    /// text back would change more than was meant.
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
    /// The cell ended during the call. Whether a change was made is not known; to ask again is
    /// safe, because a change is guarded by what it expects.
    CellLost,
    /// There is no cell.
    NoCell {
        /// The step that failed, and how.
        reason: String,
        /// When to ask again.
        retry: Duration,
    },
}

/// The files of the workspace.
#[derive(Debug, Clone)]
pub(crate) struct Files {
    supervisor: Handle,
}

impl Files {
    /// Over a supervisor's cell.
    pub(crate) fn new(supervisor: Handle) -> Self {
        Self { supervisor }
    }

    /// Reads lines, and sets the stamp for the caller; not for media.
    pub(crate) async fn read_text(
        &self,
        caller: Option<&Caller>,
        read: ReadText,
    ) -> Result<TextRead, FileError> {
        let _ = (caller, read, &self.supervisor);
        Err(FileError::CellLost)
    }

    /// Replaces or creates a file.
    pub(crate) async fn write(
        &self,
        caller: &Caller,
        write: WriteFile,
    ) -> Result<Written, FileError> {
        let _ = (caller, write);
        Err(FileError::CellLost)
    }

    /// Replaces texts in a file.
    pub(crate) async fn edit(&self, caller: &Caller, edit: EditFile) -> Result<Edited, FileError> {
        let _ = (caller, edit);
        Err(FileError::CellLost)
    }

    /// Finds files by name.
    pub(crate) async fn glob(&self, glob: Glob) -> Result<Found, FileError> {
        let _ = glob;
        Err(FileError::CellLost)
    }

    /// Finds lines.
    pub(crate) async fn grep(&self, grep: Grep) -> Result<Matches, FileError> {
        let _ = grep;
        Err(FileError::CellLost)
    }
}
