//! What can be asked about files, and what is answered.
//!
//! Paths are what a caller named, in UTF-8, absolute paths of the cell.

use cofferdam_spec::{LineRange, Stamp};
use serde::{Deserialize, Serialize};

/// Largest file that is hashed for a stamp, in bytes: 256 MiB. Larger ones have none.
pub const STAMP_BYTES_MAX: u64 = 256 * 1024 * 1024;

/// Largest file that an edit changes, in bytes.
pub const EDIT_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// Largest content that travels in a call, in bytes; larger ones come as a descriptor.
pub const CONTENT_BYTES_MAX: usize = 64 * 1024;

/// Content for a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Content {
    /// In the call, at most [`CONTENT_BYTES_MAX`].
    Inline(Vec<u8>),
    /// In the second descriptor of the call, a sealed memory file or a file without a name, from its
    /// start, this many bytes.
    Descriptor {
        /// Number of bytes.
        size: u64,
    },
}

/// What a file must hold for a change to happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Expected {
    /// There is no file; otherwise [`FaultKind::Exists`], with its stamp.
    Absent,
    /// Exactly this; otherwise [`FaultKind::Stale`], with the stamp that is there. With
    /// `or_absent`, nothing is as good.
    Exactly {
        /// The content.
        stamp: Stamp,
        /// Whether the file may be gone.
        or_absent: bool,
    },
    /// Anything, also nothing.
    Any,
}

/// For which file the daemon decided what is [`Expected`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Guard {
    /// The canonical path that was judged. When the call's path leads elsewhere by now, nothing is
    /// changed, and [`FaultKind::Elsewhere`] tells the canonical path. `None` when `expected` holds
    /// wherever the path leads.
    pub canonical: Option<String>,
    /// What it must hold.
    pub expected: Expected,
}

/// A call about files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileCall {
    /// Answered by [`Answer::Entry`].
    Stat {
        /// The entry.
        path: String,
        /// Whether a symlink is followed.
        follow: bool,
        /// Whether to read a regular file of at most [`STAMP_BYTES_MAX`] for its stamp.
        with_stamp: bool,
    },
    /// Entries of a directory in the order of their names' bytes. Answered by [`Answer::Entries`].
    List {
        /// The directory.
        path: String,
        /// Only names above this one.
        after: Option<Vec<u8>>,
        /// Most entries, 1 to 1,000.
        max: u32,
    },
    /// Opens a regular file for reading. Answered by [`Answer::Opened`] with its descriptor.
    Open {
        /// The file.
        path: String,
    },
    /// Answered by [`Answer::Text`].
    ReadText(ReadText),
    /// Replaces or creates a file. Answered by [`Answer::Written`].
    Write(Write),
    /// Replaces texts in a file of at most [`EDIT_BYTES_MAX`]. Answered by [`Answer::Edited`].
    Edit(Edit),
    /// Answered by [`Answer::Made`].
    MakeDir {
        /// The directory.
        path: String,
        /// Permission bits.
        mode: u32,
        /// Whether to make parents, and to accept a directory that exists.
        parents: bool,
    },
    /// Moves an entry, replacing nothing; symlinks are moved, not followed. Answered by
    /// [`Answer::Moved`].
    Move {
        /// What to move.
        from: String,
        /// To where.
        to: String,
        /// About `from`; directories and symlinks have no content, for them it only says whether
        /// the path still leads to the same place.
        guard: Guard,
    },
    /// Removes an entry; symlinks are removed, not followed. Answered by [`Answer::Removed`].
    Remove {
        /// The entry.
        path: String,
        /// Whether a directory goes with everything below it.
        recursive: bool,
        /// As in `Move`.
        guard: Guard,
    },
    /// Answered by [`Answer::Found`].
    Glob(Glob),
    /// Answered by any number of [`Answer::Matches`], then [`Answer::Searched`].
    Grep(Grep),
    /// Answered by [`Answer::Watching`], then by [`Answer::Changes`] until the call is given up, or
    /// the directory is gone: then [`Answer::WatchEnded`] is the last.
    Watch {
        /// The directory.
        path: String,
        /// Whether everything below is watched too.
        recursive: bool,
    },
}

/// Lines of a text to read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadText {
    /// The file.
    pub path: String,
    /// First line, counted from 1.
    pub first_line: u64,
    /// Most lines, at least 1.
    pub max_lines: u64,
    /// Most bytes of [`TextRead::text`]. The first line is given however long it is (but see
    /// `max_line_chars`).
    pub max_bytes: u64,
    /// Longest line in UTF-16 units; a longer one is cut there and gets the suffix ` [truncated]`.
    pub max_line_chars: u64,
    /// Whether each line starts with its number, a colon and a blank, and lines are joined without
    /// a line feed at the end (as the tool `read_file` shows them). Otherwise each has its own.
    pub numbered: bool,
    /// Whether images and PDFs are described ([`TextRead::media`]) and not refused as binary.
    pub accept_media: bool,
}

/// A file to write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Write {
    /// The file; symlinks are followed, and stay.
    pub path: String,
    /// Its new content.
    pub content: Content,
    /// What must be there.
    pub guard: Guard,
    /// Permission bits of a new file; an existing one keeps its own.
    pub mode: u32,
    /// Whether missing directories are made.
    pub parents: bool,
    /// Keep a UTF-8 byte order mark that the file has and the content has not.
    pub keep_bom: bool,
}

/// A text to replace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Edit {
    /// The file; symlinks are followed, and stay.
    pub path: String,
    /// What to replace, not empty; compared byte by byte.
    pub old: String,
    /// What to put there, different from `old`.
    pub new: String,
    /// Whether every occurrence is replaced; otherwise there must be exactly one.
    pub all: bool,
    /// What must be there.
    pub guard: Guard,
}

/// Files to find by name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Glob {
    /// The pattern; see `GlobRequest.pattern` in `proto/cofferdam/v1/filesystem.proto`.
    pub pattern: String,
    /// Directory.
    pub path: String,
    /// Most results.
    pub limit: u32,
    /// Most bytes of all results with one byte between each.
    pub max_bytes: u64,
    /// Whether ignore files are disregarded.
    pub include_ignored: bool,
}

/// What a grep returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum GrepMode {
    /// Matching lines.
    Content,
    /// Files with a match.
    Files,
    /// The number of matching lines of each file.
    Count,
}

/// Lines to find.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grep {
    /// Regular expression or text, not empty.
    pub pattern: String,
    /// File or directory.
    pub path: String,
    /// Only files that match this glob.
    pub glob: Option<String>,
    /// Only files of this type.
    pub file_type: Option<String>,
    /// Whether case is ignored.
    pub ignore_case: bool,
    /// Whether the pattern is a text.
    pub literal: bool,
    /// Whether a match may span lines.
    pub multiline: bool,
    /// Lines around each match.
    pub context: u32,
    /// Most matching lines of each file.
    pub limit: u32,
    /// What comes back.
    pub mode: GrepMode,
    /// Whether ignore files are disregarded.
    pub include_ignored: bool,
    /// Longest line in UTF-16 units; a longer one is cut around its first match.
    pub max_line_chars: u64,
    /// Most bytes of all lines, after which the search ends; `None` for no bound.
    pub max_bytes: Option<u64>,
}

/// Kinds of entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A directory.
    Directory,
    /// A symlink.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
    /// A character device.
    CharacterDevice,
    /// A block device.
    BlockDevice,
}

impl FileKind {
    /// For a sentence: `a FIFO`.
    pub fn with_article(self) -> &'static str {
        match self {
            FileKind::Regular => "a regular file",
            FileKind::Directory => "a directory",
            FileKind::Symlink => "a symbolic link",
            FileKind::Fifo => "a FIFO (named pipe)",
            FileKind::Socket => "a socket",
            FileKind::CharacterDevice => "a character device",
            FileKind::BlockDevice => "a block device",
        }
    }
}

/// An entry of the file system.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Canonical path of its directory, without symlinks, and its own name; both as raw bytes.
    pub path: Vec<u8>,
    /// What it is.
    pub kind: FileKind,
    /// Length in bytes.
    pub size: u64,
    /// Permission and set-id bits.
    pub mode: u32,
    /// Owner in the cell.
    pub uid: u32,
    /// Group in the cell.
    pub gid: u32,
    /// Last change of the content: seconds and nanoseconds since 1970.
    pub modified: (i64, u32),
    /// Names of the file.
    pub links: u64,
    /// What a symlink says; `None` also where it may not be read, as some of `/proc`.
    pub target: Option<Vec<u8>>,
}

/// How a text is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Encoding {
    /// UTF-8.
    Utf8,
    /// UTF-8 behind a byte order mark, which is not part of the text.
    Utf8Bom,
    /// UTF-16 behind a byte order mark, least byte first.
    Utf16Le,
    /// UTF-16 behind a byte order mark, most byte first.
    Utf16Be,
    /// Unknown: what is no UTF-8 is shown as U+FFFD.
    Lossy,
}

/// How lines end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LineEnding {
    /// All by a line feed.
    Lf,
    /// All by carriage return and line feed.
    CrLf,
    /// Some so, some so.
    Mixed,
    /// There is no line feed.
    None,
}

/// An image or a document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Media {
    /// `image/png`, `image/jpeg`, `image/gif`, `image/webp`, `application/pdf`.
    pub media_type: String,
    /// Pixels, of images whose header tells.
    pub width: Option<u64>,
    /// Pixels, of images whose header tells.
    pub height: Option<u64>,
    /// Pages, of documents where they could be counted; at least so many, because those in
    /// compressed parts are not seen.
    pub pages: Option<u64>,
}

/// Lines that were read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextRead {
    /// The file.
    pub entry: Entry,
    /// The lines.
    pub text: String,
    /// Which they are; `None` for an empty file and for media.
    pub range: Option<LineRange>,
    /// Lines of the file; `None` where it has no stamp, and for media. What follows the last
    /// line feed counts when it is not empty.
    pub total_lines: Option<u64>,
    /// Next line to read; `None` at the end. It is told, too, where a file of `/proc` or `/sys` is
    /// longer than the 1 MiB of it that can be read; to read on there is [`FaultKind::TooLarge`].
    pub next_line: Option<u64>,
    /// Whether a line was cut.
    pub cut: bool,
    /// How the file is encoded.
    pub encoding: Encoding,
    /// How its lines end, as far as they were looked at.
    pub line_ending: LineEnding,
    /// Stamp of the file; `None` above [`STAMP_BYTES_MAX`], and for one that has content though its
    /// size is said to be 0, as those of `/proc`.
    pub stamp: Option<Stamp>,
    /// Set for images and documents; then there is no text.
    pub media: Option<Media>,
}

/// What a change did to a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    /// Its canonical path.
    pub canonical: String,
    /// Whether there was a file before.
    pub existed: bool,
    /// Its stamp before; `None` when there was no file, or one above [`STAMP_BYTES_MAX`].
    pub previous: Option<Stamp>,
    /// Its stamp now.
    pub stamp: Stamp,
    /// Lines of the new content; see [`TextRead::total_lines`].
    pub lines: u64,
    /// Whether it was exchanged in one step.
    pub atomic: bool,
    /// Whether other names keep the old content.
    pub link_broken: bool,
    /// The name that the old file has now, because a program still had it open for writing.
    pub kept: Option<String>,
    /// Whether a byte order mark was kept that the content did not have.
    pub bom_kept: bool,
}

/// Exact account of a search; see `SearchAccount` in `proto/cofferdam/v1/filesystem.proto`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Account {
    /// Files that were searched, or compared with the pattern.
    pub searched: u64,
    /// Excluded by ignore files.
    pub ignored: u64,
    /// Hidden, and `.git`.
    pub hidden: u64,
    /// With NUL bytes.
    pub binary: u64,
    /// Above the size limit.
    pub too_large: u64,
    /// Could not be read.
    pub unreadable: u64,
    /// Names that are not UTF-8.
    pub non_utf8_name: u64,
    /// Neither file nor directory, and symlinks.
    pub special: u64,
    /// Whether everything was seen.
    pub complete: bool,
}

/// A line that was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// Counted from 1.
    pub number: u64,
    /// Without line feed.
    pub text: String,
    /// Whether it is a match, and not context.
    pub matched: bool,
    /// Whether it was cut.
    pub cut: bool,
}

/// Lines that were found in one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileMatches {
    /// Its absolute path, raw.
    pub path: Vec<u8>,
    /// The lines, in order; none in the modes files and count.
    pub lines: Vec<Line>,
    /// Matching lines of the file so far.
    pub matches: u64,
    /// Whether the limit ended the search of the file before its end.
    pub limit_reached: bool,
    /// Whether bytes of the file are no UTF-8.
    pub lossy: bool,
    /// Whether NUL bytes in the file ended its search.
    pub binary: bool,
}

/// A change below a directory that is watched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    /// Something appeared.
    Create {
        /// Its path, raw.
        path: Vec<u8>,
        /// Whether it is a directory.
        directory: bool,
    },
    /// A file's content changed.
    Write {
        /// Its path, raw.
        path: Vec<u8>,
    },
    /// Something is gone.
    Remove {
        /// Its path, raw.
        path: Vec<u8>,
        /// Whether it was a directory.
        directory: bool,
    },
    /// Something has another name. One side is `None` when it lies outside of what is watched.
    Rename {
        /// Its path before, raw.
        from: Option<Vec<u8>>,
        /// Its path now, raw.
        to: Option<Vec<u8>>,
        /// Whether it is a directory.
        directory: bool,
    },
    /// Owner, mode, times or attributes changed.
    Chmod {
        /// Its path, raw.
        path: Vec<u8>,
        /// Whether it is a directory.
        directory: bool,
    },
    /// Changes were lost.
    Overflow,
}

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FaultKind {
    /// There is nothing of that path.
    NotFound,
    /// A component of the path, or what should be a directory, is none.
    NotDirectory,
    /// It is a directory, where a file is meant.
    IsDirectory,
    /// It is neither a regular file nor a directory.
    NotRegular(FileKind),
    /// The kernel refuses: modes, ownership, or the rules of the cell.
    Denied,
    /// It lies on something read-only.
    ReadOnly,
    /// It exists and should not; with its stamp when it is a regular file that could be read.
    Exists(Option<Stamp>),
    /// The directory is not empty.
    NotEmpty,
    /// Too many symlinks.
    Loop,
    /// A component or the path is too long.
    NameTooLong,
    /// The path is empty, relative, or holds a NUL.
    BadPath,
    /// No room, or a quota is reached.
    NoSpace,
    /// It is larger than this call can take.
    TooLarge {
        /// Its size.
        size: u64,
        /// The limit.
        limit: u64,
    },
    /// It holds NUL bytes, or is no text.
    Binary,
    /// The first line asked for lies beyond the end.
    PastEnd {
        /// Lines of the file.
        total_lines: u64,
    },
    /// The path leads to another file than the one that was judged.
    Elsewhere {
        /// Where.
        canonical: String,
    },
    /// It holds something else than expected; with what it holds, unless it is gone.
    Stale(Option<Stamp>),
    /// Somebody else wrote at the same time; both contents are kept. Or a write in place failed,
    /// and so did putting the old content back: then `errno` says why it failed, the file holds a
    /// part of the new content and what is left of the old, and the next start of the cell tries to
    /// put the old one back.
    Conflict {
        /// Where the other one is; below `undo/` it is the old content, and a short description of
        /// ours after it.
        kept: String,
    },
    /// The text to replace does not stand there exactly once.
    Occurrences {
        /// How often it stands there.
        count: u64,
        /// Whether it would stand there with other line endings.
        other_line_endings: bool,
    },
    /// The pattern, the glob or the file type is not understood.
    BadPattern {
        /// The engine's words.
        reason: String,
    },
    /// A program holds a lease on it (`fcntl(2)`), and must give it back first.
    Leased,
    /// What is moved would come to another file system.
    OtherFileSystem,
    /// As many as there may be run already.
    TooMany {
        /// How many that is.
        limit: u64,
    },
    /// Somebody else wrote it each time that the change was tried, though anything was expected.
    Busy,
    /// Something else.
    Other,
}

/// Why a call failed. Nothing of it was done, except where [`FaultKind::Conflict`] says so.
/// A removal of a directory may have removed a part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// What went wrong.
    pub kind: FaultKind,
    /// What was being done: `open`, `rename` ….
    pub step: String,
    /// The kernel's number, where the kernel refused; 0 otherwise.
    pub errno: i32,
}

/// What the toolbox answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// To [`FileCall::Stat`].
    Entry(Entry, Option<Stamp>),
    /// To [`FileCall::List`].
    Entries {
        /// The entries.
        entries: Vec<Entry>,
        /// Whether there are more.
        more: bool,
    },
    /// To [`FileCall::Open`], with a descriptor that can only be read.
    Opened(Entry),
    /// To [`FileCall::ReadText`].
    Text(Box<TextRead>),
    /// To [`FileCall::Write`].
    Written(Written),
    /// To [`FileCall::Edit`].
    Edited {
        /// The file.
        written: Written,
        /// Number of replacements.
        replacements: u64,
        /// Line of the first one.
        first_line: u64,
    },
    /// To [`FileCall::MakeDir`].
    Made {
        /// Canonical path.
        canonical: String,
        /// Whether it was made now.
        created: bool,
    },
    /// To [`FileCall::Move`].
    Moved {
        /// Canonical path before.
        from: String,
        /// Canonical path now.
        to: String,
    },
    /// To [`FileCall::Remove`].
    Removed {
        /// Canonical path.
        canonical: String,
        /// Entries that were removed.
        removed: u64,
    },
    /// To [`FileCall::Glob`].
    Found {
        /// Canonical directory.
        canonical: String,
        /// Absolute paths, raw, in the order of their bytes.
        paths: Vec<Vec<u8>>,
        /// Whether there are more.
        truncated: bool,
        /// The account.
        account: Account,
    },
    /// To [`FileCall::Grep`]: lines of one file. At most 256 KiB, so a file may come in parts.
    Matches(FileMatches),
    /// To [`FileCall::Grep`]: the end.
    Searched {
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
    /// To [`FileCall::Watch`]: nothing is missed from here on.
    Watching {
        /// Canonical path.
        canonical: String,
        /// Directories that are watched.
        directories: u64,
        /// Directories that are not.
        not_watched: u64,
    },
    /// To [`FileCall::Watch`].
    Changes(Vec<Change>),
    /// To [`FileCall::Watch`]: the end. When the directory is gone from its path, the last change
    /// before this is its [`Change::Remove`].
    WatchEnded,
    /// The call failed.
    Failed(Fault),
}

impl Answer {
    /// Whether no other answer follows.
    pub fn is_last(&self) -> bool {
        !matches!(self, Answer::Matches(_) | Answer::Watching { .. } | Answer::Changes(_))
    }
}
