//! What a model is told when a tool refused or failed. Models and tests know some of these
//! sentences by heart, so they are exact.

use cofferdam_files::call::{Encoding, Fault as FileFault, FaultKind};
use cofferdam_spec::LineRange;
use serde::Serialize;

use crate::files::FileError;
use crate::status::Fault;
use crate::supervisor::StartRefused;
use crate::tools::text::escaped;

/// Bytes of an engine's own words that are repeated.
const REASON_BYTES_MAX: usize = 2048;

/// A tool's refusal or failure: an answer to the model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct ToolError {
    /// The kind, for programs.
    pub(crate) code: &'static str,
    /// What went wrong.
    pub(crate) message: String,
    /// What to do about it.
    pub(crate) hint: String,
    /// What a command had printed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) stdout: Option<String>,
    /// What a command had printed to its standard error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) stderr: Option<String>,
}

impl ToolError {
    /// An error without output.
    pub(crate) fn new(
        code: &'static str,
        message: impl Into<String>,
        hint: impl Into<String>,
    ) -> Self {
        let (message, hint) = (message.into(), hint.into());
        Self { code, message, hint, stdout: None, stderr: None }
    }

    /// An input that the tool does not take.
    pub(crate) fn invalid_input(tool: &str, reason: &str, hint: impl Into<String>) -> Self {
        Self::new("INVALID_INPUT", format!("Invalid input for tool \"{tool}\": {reason}"), hint)
    }

    /// As JSON: `{"error": {...}}`.
    pub(crate) fn to_json(&self) -> String {
        #[derive(Serialize)]
        struct Envelope<'a> {
            error: &'a ToolError,
        }
        // Strings under fixed names have a JSON form, always.
        serde_json::to_string(&Envelope { error: self }).unwrap_or_default()
    }
}

/// Why a call has no answer for the model: the tool failed, or nothing could be carried out.
#[derive(Debug)]
pub(crate) enum Failed {
    /// An answer to the model.
    Tool(ToolError),
    /// The call could not be carried out.
    Call(Fault),
}

impl From<ToolError> for Failed {
    fn from(error: ToolError) -> Self {
        Failed::Tool(error)
    }
}

/// What a tool was doing, for its sentences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Doing {
    /// `read_file`, and its first line.
    Read {
        /// The first line that was asked for.
        offset: u64,
    },
    /// `write_file`.
    Write,
    /// `edit_file`.
    Edit,
    /// `glob`.
    Glob,
    /// `grep`.
    Grep,
}

/// The first characters of a text, at most `max` bytes.
pub(crate) fn excerpt(text: &str, max: usize) -> &str {
    &text[..text.floor_char_boundary(max)]
}

/// Says what happened to `shown`, the path as the model gave it.
pub(crate) fn file_error(doing: Doing, shown: &str, error: FileError) -> Failed {
    match error {
        FileError::Fault { path: _, fault } => fault_error(doing, shown, &fault).into(),
        FileError::NotRead { path: _ } => ToolError::new(
            "NOT_READ",
            format!(
                "You must read file {shown} before overwriting it. Use the read_file tool first."
            ),
            "Nothing was changed. Read the file, then decide whether the change is still right.",
        )
        .into(),
        FileError::PartlyRead { path: _, shown: ranges, total_lines } => ToolError::new(
            "PARTLY_READ",
            format!(
                "You have read only lines {} of {total_lines} of file {shown}. Read the rest \
                 before overwriting it, or use edit_file.",
                line_ranges(&ranges)
            ),
            "Nothing was changed.",
        )
        .into(),
        FileError::NotText { path: _, encoding } => not_text(doing, shown, encoding).into(),
        FileError::Stale { path: _, current } => ToolError::new(
            "STALE_READ",
            format!(
                "File {shown} has been modified since it was last read. Please read the file again \
                 before modifying it."
            ),
            match current {
                Some(_) => "Nothing was changed. A command or another agent changed the file.",
                None => "Nothing was changed. The file is gone, or cannot be read any more.",
            },
        )
        .into(),
        FileError::Conflict { path: _, kept } => ToolError::new(
            "CONFLICT",
            format!(
                "File {shown} was written by another program at the same time. Both contents are \
                 kept: one in the file, the other in {kept}."
            ),
            "Read both, then write what is right.",
        )
        .into(),
        FileError::Busy(what) => {
            ToolError::new("BUSY", what, "Nothing was done. Ask again in a moment.").into()
        }
        FileError::Draining | FileError::CellLost | FileError::NoCell { .. } => {
            Failed::Call(Fault::from(error))
        }
    }
}

/// A call that could not be carried out.
pub(crate) fn refused(why: StartRefused) -> Failed {
    Failed::Call(Fault::Start(why))
}

fn fault_error(doing: Doing, shown: &str, fault: &FileFault) -> ToolError {
    let verb = match doing {
        Doing::Read { .. } => "read",
        Doing::Write => "write",
        Doing::Edit => "edit",
        Doing::Glob => "search",
        Doing::Grep => "search",
    };
    let unchanged = match doing {
        Doing::Write | Doing::Edit => "Nothing was changed.",
        Doing::Read { .. } | Doing::Glob | Doing::Grep => "Nothing was read.",
    };
    let error = |code, message: String, hint: &str| {
        ToolError::new(code, message, format!("{unchanged} {hint}").trim_end())
    };
    match &fault.kind {
        FaultKind::NotFound => match doing {
            Doing::Read { .. } | Doing::Edit => ToolError::new(
                "NOT_FOUND",
                format!(
                    "File not found: {shown}. Verify the path exists and is accessible in the \
                     sandbox."
                ),
                "glob finds files by name.",
            ),
            Doing::Write => error(
                "NOT_FOUND",
                format!("Cannot write {shown}: a directory of the path does not exist."),
                "",
            ),
            Doing::Glob => ToolError::new(
                "NOT_FOUND",
                format!(
                    "Directory not found: {shown}. Verify the path exists and is accessible in \
                     the sandbox."
                ),
                "This is not an empty result: nothing was searched.",
            ),
            Doing::Grep => ToolError::new(
                "NOT_FOUND",
                format!(
                    "File or directory not found: {shown}. Verify the path exists and is \
                     accessible in the sandbox."
                ),
                "This is not an empty result: nothing was searched.",
            ),
        },
        FaultKind::NotDirectory if doing == Doing::Glob => ToolError::new(
            "NOT_A_DIRECTORY",
            format!("{shown} is not a directory. glob searches directories."),
            "Leave the file's name out of path, or use read_file or grep for the file.",
        ),
        FaultKind::NotDirectory => error(
            "NOT_A_DIRECTORY",
            format!("Cannot {verb} {shown}: a part of the path is not a directory."),
            "",
        ),
        FaultKind::IsDirectory => error(
            "IS_A_DIRECTORY",
            format!("Cannot {verb} {shown}: it is a directory, not a file."),
            "glob lists the files below a directory.",
        ),
        FaultKind::NotRegular(kind) => error(
            "NOT_REGULAR",
            format!("Cannot {verb} {shown}: it is {}, not a regular file.", kind.with_article()),
            "It was not opened.",
        ),
        FaultKind::Denied => error(
            "PERMISSION_DENIED",
            format!("Cannot {verb} {shown}: permission denied."),
            "The file's mode, its owner or the rules of the sandbox forbid it.",
        ),
        FaultKind::ReadOnly => error(
            "READ_ONLY",
            format!("Cannot {verb} {shown}: it lies on a read-only file system."),
            "Files below /workspace, $HOME and /tmp can be written.",
        ),
        FaultKind::Exists(_) => error("EXISTS", format!("Cannot {verb} {shown}: it exists."), ""),
        FaultKind::NotEmpty => {
            error("NOT_EMPTY", format!("Cannot {verb} {shown}: the directory is not empty."), "")
        }
        FaultKind::Loop => error(
            "LINK_LOOP",
            format!("Cannot {verb} {shown}: its symbolic links lead in a circle."),
            "",
        ),
        FaultKind::NameTooLong => error(
            "NAME_TOO_LONG",
            format!("Cannot {verb} {shown}: a name may have 255 bytes and a path 4095."),
            "",
        ),
        FaultKind::BadPath => error(
            "INVALID_PATH",
            format!("Cannot {verb} {shown}: the path is empty, relative, or holds a NUL."),
            "",
        ),
        FaultKind::NoSpace => error(
            "NO_SPACE",
            format!("Cannot {verb} {shown}: no space left on the device, or a quota is reached."),
            "Remove what is not needed any more.",
        ),
        FaultKind::TooLarge { size, limit } => error(
            "TOO_LARGE",
            format!("Cannot {verb} {shown}: it has {size} bytes, the limit is {limit}."),
            "A command can work on parts of it, for example head, tail or sed.",
        ),
        FaultKind::Binary => match doing {
            Doing::Read { .. } => ToolError::new(
                "BINARY_FILE",
                format!(
                    "File \"{shown}\" appears to be a binary file. read_file only supports text \
                     files, PNG, JPEG, GIF, or WebP images, and PDFs."
                ),
                "A command can look into it, for example file, od or strings.",
            ),
            _ => error(
                "BINARY_FILE",
                format!("Cannot {verb} {shown}: it appears to be a binary file."),
                "A command can change it.",
            ),
        },
        FaultKind::PastEnd { total_lines } => {
            let offset = match doing {
                Doing::Read { offset } => offset,
                _ => 0,
            };
            let advice = if *total_lines == 0 {
                " Use the default offset to read an empty file."
            } else {
                ""
            };
            ToolError::new(
                "OFFSET_PAST_END",
                format!(
                    "offset {offset} is past the end of the file ({total_lines} lines).{advice}"
                ),
                "Lines are counted from 1.",
            )
        }
        FaultKind::Elsewhere { canonical } => error(
            "ELSEWHERE",
            format!("Cannot {verb} {shown}: the path just changed and leads to {canonical} now."),
            "Read the file again.",
        ),
        // The daemon turns these into errors of its own; a toolbox that answers them all the same
        // is still understood.
        FaultKind::Stale(_) => error(
            "STALE_READ",
            format!(
                "File {shown} has been modified since it was last read. Please read the file again \
                 before modifying it."
            ),
            "",
        ),
        FaultKind::Conflict { kept } => ToolError::new(
            "CONFLICT",
            format!(
                "File {shown} was written by another program at the same time. Both contents are \
                 kept: one in the file, the other in {kept}."
            ),
            "Read both, then write what is right.",
        ),
        FaultKind::Occurrences { count, other_line_endings } => {
            occurrences(shown, *count, *other_line_endings)
        }
        FaultKind::BadPattern { reason } => {
            let reason = escaped_lines(excerpt(reason, REASON_BYTES_MAX));
            ToolError::new(
                "INVALID_PATTERN",
                match doing {
                    Doing::Glob => format!("glob failed: {reason}"),
                    _ => format!("grep failed: {reason}"),
                },
                match doing {
                    Doing::Glob => {
                        "* and ? stay within a component, ** crosses them, [..] and {..,..} as \
                         usual, \\ quotes. This is not an empty result: nothing was searched."
                    }
                    _ => {
                        "Patterns are regular expressions in the syntax of Rust's regex crate, \
                         without look-around and back-references; literal: true takes them as a \
                         text. This is not an empty result: nothing was searched."
                    }
                },
            )
        }
        FaultKind::Leased => error(
            "LEASED",
            format!("Cannot {verb} {shown}: a program holds a lease on it."),
            "Ask again when the program has ended.",
        ),
        FaultKind::OtherFileSystem => error(
            "OTHER_FILE_SYSTEM",
            format!("Cannot {verb} {shown}: it would come to another file system."),
            "Copy it and remove it.",
        ),
        FaultKind::TooMany { limit } => error(
            "TOO_MANY",
            format!("Cannot {verb} {shown}: {limit} such calls run already, and no more may."),
            "Ask again when one has ended.",
        ),
        FaultKind::Busy => error(
            "OVERTAKEN",
            format!("Cannot {verb} {shown}: another program wrote it at the same time."),
            "Ask again.",
        ),
        FaultKind::Other => {
            let cause = match fault.errno {
                0 => String::new(),
                errno => format!(": {}", std::io::Error::from_raw_os_error(errno)),
            };
            error("IO_ERROR", format!("Cannot {verb} {shown}: {} failed{cause}.", fault.step), "")
        }
    }
}

/// An engine's message may have several lines; control characters in it are shown.
fn escaped_lines(text: &str) -> String {
    let lines: Vec<String> =
        text.lines().map(|line| escaped(line.as_bytes()).into_owned()).collect();
    lines.join("\n")
}

fn occurrences(shown: &str, count: u64, other_line_endings: bool) -> ToolError {
    if count > 1 {
        return ToolError::new(
            "NOT_UNIQUE",
            format!(
                "oldString stands {count} times in {shown}, and exactly one place can be meant."
            ),
            "Nothing was changed. Give more lines around it, or set replaceAll.",
        );
    }
    let hint = if other_line_endings {
        "Nothing was changed. It would stand there with other line endings: the file's lines end \
         with \\r\\n, or oldString's do and the file's do not."
    } else {
        "Nothing was changed. It is compared byte by byte, blanks and tabs too, without the line \
         numbers that read_file shows."
    };
    ToolError::new("NO_MATCH", format!("oldString was not found in {shown}."), hint)
}

fn not_text(doing: Doing, shown: &str, encoding: Encoding) -> ToolError {
    let (how, tool) =
        (encoding_name(encoding), if doing == Doing::Edit { "edit_file" } else { "write_file" });
    let what = match encoding {
        Encoding::Lossy => {
            "is not valid UTF-8, and was shown with replacement characters".to_owned()
        }
        _ => format!("is encoded as {}", how.unwrap_or("UTF-8")),
    };
    ToolError::new(
        "NOT_TEXT",
        format!("File {shown} {what}. {tool} writes UTF-8 only, which would change all of it."),
        "Nothing was changed. Change it with a command that knows its encoding, or convert it \
         first, for example with iconv.",
    )
}

/// The name of an encoding; `None` for plain UTF-8.
pub(crate) fn encoding_name(encoding: Encoding) -> Option<&'static str> {
    match encoding {
        Encoding::Utf8 => None,
        Encoding::Utf8Bom => Some("utf-8-bom"),
        Encoding::Utf16Le => Some("utf-16le"),
        Encoding::Utf16Be => Some("utf-16be"),
        Encoding::Lossy => Some("unknown"),
    }
}

/// `1-10, 12, 20-30`.
fn line_ranges(ranges: &[LineRange]) -> String {
    let shown: Vec<String> =
        ranges.iter().map(|range| format!("{}-{}", range.first, range.last)).collect();
    match shown.as_slice() {
        // No line at all, for example of a file that was read beyond its limits.
        [] => "0-0".to_owned(),
        _ if shown.len() > RANGES_SHOWN_MAX => {
            format!("{}, …", shown[..RANGES_SHOWN_MAX].join(", "))
        }
        _ => shown.join(", "),
    }
}

/// Ranges that a sentence lists.
const RANGES_SHOWN_MAX: usize = 20;

#[cfg(test)]
mod tests {
    use cofferdam_files::call::FileKind;
    use cofferdam_spec::Stamp;

    use super::*;

    fn tool(failed: Failed) -> ToolError {
        match failed {
            Failed::Tool(error) => error,
            Failed::Call(fault) => panic!("{fault:?}"),
        }
    }

    fn said(doing: Doing, kind: FaultKind) -> (&'static str, String) {
        let fault = FileFault { kind, step: "open".to_owned(), errno: 0 };
        let error = FileError::Fault { path: "/canonical".to_owned(), fault };
        let error = tool(file_error(doing, "/workspace/f", error));
        (error.code, error.message)
    }

    fn path() -> String {
        "/canonical".to_owned()
    }

    #[test]
    fn the_sentences_that_models_know_are_exact() {
        let read = Doing::Read { offset: 100 };
        let table = [
            (
                said(read, FaultKind::NotFound),
                "NOT_FOUND",
                "File not found: /workspace/f. Verify the path exists and is accessible in the \
                sandbox.",
            ),
            (
                said(read, FaultKind::Binary),
                "BINARY_FILE",
                "File \"/workspace/f\" appears to be a binary file. read_file only supports text \
                files, PNG, JPEG, GIF, or WebP images, and PDFs.",
            ),
            (
                said(read, FaultKind::PastEnd { total_lines: 3 }),
                "OFFSET_PAST_END",
                "offset 100 is past the end of the file (3 lines).",
            ),
            (
                said(read, FaultKind::PastEnd { total_lines: 0 }),
                "OFFSET_PAST_END",
                "offset 100 is past the end of the file (0 lines). Use the default offset to read \
                an empty file.",
            ),
            (
                said(read, FaultKind::NotRegular(FileKind::Fifo)),
                "NOT_REGULAR",
                "Cannot read /workspace/f: it is a FIFO (named pipe), not a regular file.",
            ),
        ];
        for ((code, message), expected_code, expected) in table {
            assert_eq!((code, message.as_str()), (expected_code, expected));
        }
        let stamp = Stamp { digest: [0; 32], size: 1 };
        let table = [
            (
                FileError::NotRead { path: path() },
                "You must read file /workspace/f before overwriting it. Use the read_file tool \
                first.",
            ),
            (
                FileError::Stale { path: path(), current: Some(stamp) },
                "File /workspace/f has been modified since it was last read. Please read the file \
                again before modifying it.",
            ),
            (
                FileError::PartlyRead {
                    path: path(),
                    shown: vec![LineRange { first: 1, last: 10 }],
                    total_lines: 3000,
                },
                "You have read only lines 1-10 of 3000 of file /workspace/f. Read the rest before \
                overwriting it, or use edit_file.",
            ),
        ];
        for (error, expected) in table {
            assert_eq!(tool(file_error(Doing::Write, "/workspace/f", error)).message, expected);
        }
    }

    #[test]
    fn a_missing_directory_a_file_as_directory_and_a_bad_pattern_differ() {
        let bad = FaultKind::BadPattern { reason: "unclosed\nclass \u{1b}".to_owned() };
        let said = [
            said(Doing::Glob, FaultKind::NotFound),
            said(Doing::Glob, FaultKind::NotDirectory),
            said(Doing::Grep, bad),
        ];
        assert_eq!(said[0].0, "NOT_FOUND");
        assert_eq!(said[1].1, "/workspace/f is not a directory. glob searches directories.");
        assert_eq!(said[2].1, "grep failed: unclosed\nclass \\x1b");
    }

    #[test]
    fn an_unknown_failure_names_its_step_and_the_kernels_word() {
        let fault = FileFault { kind: FaultKind::Other, step: "rename".to_owned(), errno: 5 };
        let error = FileError::Fault { path: path(), fault };
        let error = tool(file_error(Doing::Write, "/workspace/f", error));
        assert_eq!(
            error.message,
            "Cannot write /workspace/f: rename failed: Input/output error (os error 5)."
        );
    }

    #[test]
    fn a_text_that_does_not_stand_there_once_says_how_often() {
        let occurrences = |count, other| {
            said(Doing::Edit, FaultKind::Occurrences { count, other_line_endings: other })
        };
        assert_eq!(occurrences(0, false).1, "oldString was not found in /workspace/f.");
        assert_eq!(
            occurrences(2, false),
            (
                "NOT_UNIQUE",
                "oldString stands 2 times in /workspace/f, and exactly one place can be meant."
                    .to_owned()
            )
        );
    }

    #[test]
    fn what_could_not_be_carried_out_is_no_answer_to_the_model() {
        for error in [FileError::Draining, FileError::CellLost] {
            assert!(matches!(file_error(Doing::Write, "/f", error), Failed::Call(_)));
        }
    }

    #[test]
    fn many_ranges_are_not_all_listed() {
        let ranges: Vec<LineRange> =
            (0..50).map(|n| LineRange { first: 3 * n + 1, last: 3 * n + 2 }).collect();
        assert!(line_ranges(&ranges).ends_with("58-59, …"));
    }

    #[test]
    fn an_error_is_one_object() {
        let error = ToolError::new("CODE", "a \"b\"", "c");
        assert_eq!(error.to_json(), r#"{"error":{"code":"CODE","message":"a \"b\"","hint":"c"}}"#);
    }
}
