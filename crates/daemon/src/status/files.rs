//! Faults of calls about files.

use cofferdam_files::call::{Encoding, Fault, FaultKind};
use cofferdam_spec::{LineRange, Stamp};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use super::{RETRY, info, start_refused};
use crate::decide::Refusal;
use crate::files::FileError;
use crate::supervisor::StartRefused;

/// Bytes of a path that an error repeats: it stands there three times, and all of it must fit into
/// the 8 KiB of metadata that common clients take.
const PATH_BYTES_SHOWN: usize = 768;

/// Bytes of an engine's words, and ranges of lines, that an error repeats.
const REASON_BYTES_SHOWN: usize = 512;
const RANGES_SHOWN: usize = 20;

/// The status of an error.
pub(super) fn status(error: FileError) -> Status {
    match error {
        FileError::Fault { path, fault } => of_fault(About::new(&path), fault),
        FileError::NotRead { path } => About::new(&path).precondition(
            "NOT_READ",
            "the session has not read it; read it first, or say what it is expected to hold",
        ),
        FileError::PartlyRead { path, shown, total_lines } => {
            let seen = ranges(&shown);
            let mut about = About::new(&path);
            about.add("shown", &seen);
            about.add("total_lines", &total_lines.to_string());
            about.precondition(
                "PARTLY_READ",
                &format!(
                    "the session has read only lines {seen} of {total_lines}; read the rest, or \
                     change it by an edit"
                ),
            )
        }
        FileError::NotText { path, encoding } => {
            let how = match encoding {
                Encoding::Utf16Le | Encoding::Utf16Be => "it is UTF-16",
                _ => "it holds bytes that are no UTF-8",
            };
            About::new(&path).precondition(
                "NOT_TEXT",
                &format!(
                    "{how}, so to write the text that was read would change more than was meant; \
                     read its bytes first"
                ),
            )
        }
        FileError::Stale { path, current } => stale(About::new(&path), current),
        FileError::Conflict { path, kept } => conflict(About::new(&path), &kept),
        FileError::Draining => start_refused(&StartRefused::NotAdmitted(Refusal::Draining)),
        FileError::Busy(reason) => {
            let mut details = info("TOO_MANY_CALLS", &[]);
            details.add_quota_failure_violation("files", &reason).set_retry_info(Some(RETRY));
            Status::with_error_details(Code::ResourceExhausted, reason, details)
        }
        FileError::CellLost => {
            let mut details = info("CELL_LOST", &[]);
            details.set_retry_info(Some(RETRY));
            let message = "the cell ended during the call; whether a change was made is not known. \
                           To ask again is safe for a change that expects a stamp or absence: it \
                           is refused when it was made";
            Status::with_error_details(Code::Unavailable, message, details)
        }
        FileError::NoCell { reason, retry } => {
            start_refused(&StartRefused::NoCell { reason, retry })
        }
    }
}

/// The file that an error is about, and what a program may want to know of it.
struct About {
    path: String,
    metadata: Vec<(&'static str, String)>,
}

impl About {
    fn new(path: &str) -> Self {
        let path = shortened(path, PATH_BYTES_SHOWN);
        Self { metadata: vec![("path", path.clone())], path }
    }

    fn add(&mut self, key: &'static str, value: &str) {
        self.metadata.push((key, value.to_owned()));
    }

    fn details(&self, reason: &str) -> ErrorDetails {
        let metadata: Vec<_> =
            self.metadata.iter().map(|(key, value)| (*key, value.as_str())).collect();
        info(reason, &metadata)
    }

    fn status(&self, code: Code, description: &str, details: ErrorDetails) -> Status {
        Status::with_error_details(code, format!("{}: {description}", self.path), details)
    }

    fn precondition(&self, reason: &str, description: &str) -> Status {
        self.unmet(Code::FailedPrecondition, reason, description)
    }

    fn unmet(&self, code: Code, reason: &str, description: &str) -> Status {
        let mut details = self.details(reason);
        details.add_precondition_failure_violation(reason, &self.path, description);
        self.status(code, description, details)
    }

    fn resource(&self, code: Code, reason: &str, description: &str) -> Status {
        let mut details = self.details(reason);
        details.set_resource_info("file", &self.path, "", description);
        self.status(code, description, details)
    }

    fn request(&self, code: Code, reason: &str, field: &str, description: &str) -> Status {
        let mut details = self.details(reason);
        details.add_bad_request_violation(field, description);
        self.status(code, description, details)
    }

    fn quota(&self, reason: &str, description: &str) -> Status {
        let mut details = self.details(reason);
        details.add_quota_failure_violation(&self.path, description);
        self.status(Code::ResourceExhausted, description, details)
    }
}

fn of_fault(mut about: About, fault: Fault) -> Status {
    about.add("step", &fault.step);
    if fault.errno != 0 {
        about.add("errno", &fault.errno.to_string());
    }
    match fault.kind {
        FaultKind::NotFound => about.resource(Code::NotFound, "NOT_FOUND", "does not exist"),
        FaultKind::NotDirectory => about.precondition(
            "NOT_DIRECTORY",
            "it, or something that it is said to lie in, is not a directory",
        ),
        FaultKind::IsDirectory => about.precondition("IS_DIRECTORY", "is a directory"),
        FaultKind::NotRegular(kind) => about.precondition(
            "NOT_REGULAR",
            &format!("is {}, not a regular file", kind.with_article()),
        ),
        FaultKind::Denied => {
            about.resource(Code::PermissionDenied, "DENIED", "the cell does not allow it")
        }
        FaultKind::ReadOnly => {
            about.resource(Code::PermissionDenied, "READ_ONLY", "lies on something read-only")
        }
        FaultKind::Exists(stamp) => {
            add_stamp(&mut about, stamp);
            about.resource(Code::AlreadyExists, "EXISTS", "exists already")
        }
        FaultKind::NotEmpty => about.precondition(
            "NOT_EMPTY",
            "the directory is not empty; ask for a recursive removal, or remove what it holds",
        ),
        FaultKind::Loop => about.precondition("SYMLINK_LOOP", "leads through too many symlinks"),
        FaultKind::NameTooLong => about.request(
            Code::InvalidArgument,
            "NAME_TOO_LONG",
            "path",
            "is too long, as a whole or in one component",
        ),
        FaultKind::BadPath => {
            about.request(Code::InvalidArgument, "BAD_PATH", "path", "is no absolute path")
        }
        FaultKind::NoSpace => about.quota("NO_SPACE", "there is no room left"),
        FaultKind::TooLarge { size, limit } => {
            about.add("size", &size.to_string());
            about.add("limit", &limit.to_string());
            about.quota("TOO_LARGE", &format!("is {size} bytes long, the limit is {limit}"))
        }
        FaultKind::Binary => about.precondition("BINARY", "is not a text; read its bytes instead"),
        FaultKind::PastEnd { total_lines } => {
            about.add("total_lines", &total_lines.to_string());
            let description = format!("lies beyond the end: the file has {total_lines} lines");
            about.request(Code::OutOfRange, "PAST_END", "first_line", &description)
        }
        FaultKind::Elsewhere { canonical } => {
            about.add("canonical", &shortened(&canonical, PATH_BYTES_SHOWN));
            about.unmet(
                Code::Aborted,
                "PATH_CHANGED",
                "leads to another file each time it is looked at; ask again",
            )
        }
        FaultKind::Stale(current) => stale(about, current),
        FaultKind::Conflict { kept } => conflict(about, &kept),
        FaultKind::Occurrences { count, other_line_endings } => {
            about.add("count", &count.to_string());
            about.add("other_line_endings", if other_line_endings { "true" } else { "false" });
            let hint = match (count, other_line_endings) {
                (0, true) => "; it does with other line endings",
                (0, false) => "",
                _ => "; say more of what stands around it, or replace all",
            };
            let times = if count == 1 { "once".to_owned() } else { format!("{count} times") };
            about.precondition("OCCURRENCES", &format!("the old text stands there {times}{hint}"))
        }
        FaultKind::BadPattern { reason } => {
            let reason = shortened(&reason, REASON_BYTES_SHOWN);
            about.request(Code::InvalidArgument, "BAD_PATTERN", "pattern", &reason)
        }
        FaultKind::OtherFileSystem => about.precondition(
            "OTHER_FILE_SYSTEM",
            "lies on another file system; copy it and remove it",
        ),
        FaultKind::Leased => {
            about.precondition("LEASED", "is leased by a program, which must give it back first")
        }
        FaultKind::TooMany { limit } => {
            about.add("limit", &limit.to_string());
            about.quota(
                "TOO_MANY_WATCHES",
                &format!("{limit} watches run in the cell, and no more may; end one first"),
            )
        }
        FaultKind::Busy => about.unmet(
            Code::Aborted,
            "OVERTAKEN",
            "somebody else wrote it each time that the change was tried, and it was not made; ask \
             again",
        ),
        FaultKind::Other => {
            let cause = match fault.errno {
                0 => String::new(),
                errno => format!(": {}", std::io::Error::from_raw_os_error(errno)),
            };
            let description = format!("{} failed{cause}", shortened(&fault.step, PATH_BYTES_SHOWN));
            about.resource(Code::Internal, "FILE_FAILED", &description)
        }
    }
}

fn stale(mut about: About, current: Option<Stamp>) -> Status {
    add_stamp(&mut about, current);
    let description = match current {
        Some(_) => "holds something else than expected; read it again before it is changed",
        None => "is gone, or cannot be read; look again before it is changed",
    };
    about.unmet(Code::Aborted, "STALE_READ", description)
}

fn conflict(mut about: About, kept: &str) -> Status {
    let kept = shortened(kept, PATH_BYTES_SHOWN);
    about.add("kept", &kept);
    let description =
        format!("somebody else wrote it at the same time; the other content is kept in {kept}");
    about.unmet(Code::Aborted, "WRITE_CONFLICT", &description)
}

fn add_stamp(about: &mut About, stamp: Option<Stamp>) {
    if let Some(stamp) = stamp {
        about.add("digest", &stamp.to_string());
        about.add("size", &stamp.size.to_string());
    }
}

fn ranges(shown: &[LineRange]) -> String {
    let one = |range: &LineRange| match range.last - range.first {
        0 => range.first.to_string(),
        _ => format!("{}-{}", range.first, range.last),
    };
    let mut texts: Vec<String> = shown.iter().take(RANGES_SHOWN).map(one).collect();
    if shown.is_empty() {
        texts.push("none".to_owned());
    } else if shown.len() > RANGES_SHOWN {
        texts.push("…".to_owned());
    }
    texts.join(", ")
}

fn shortened(text: &str, max: usize) -> String {
    if text.len() <= max {
        return text.to_owned();
    }
    format!("{}…", &text[..text.floor_char_boundary(max)])
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use cofferdam_files::call::FileKind;

    use super::*;

    pub(crate) fn all() -> Vec<FileError> {
        let path = || "/workspace/a".to_owned();
        let stamp = Stamp { digest: [7; 32], size: 3 };
        let kinds = [
            FaultKind::NotFound,
            FaultKind::NotDirectory,
            FaultKind::IsDirectory,
            FaultKind::NotRegular(FileKind::Fifo),
            FaultKind::Denied,
            FaultKind::ReadOnly,
            FaultKind::Exists(Some(stamp)),
            FaultKind::NotEmpty,
            FaultKind::Loop,
            FaultKind::NameTooLong,
            FaultKind::BadPath,
            FaultKind::NoSpace,
            FaultKind::TooLarge { size: 2, limit: 1 },
            FaultKind::Binary,
            FaultKind::PastEnd { total_lines: 3 },
            FaultKind::Elsewhere { canonical: path() },
            FaultKind::Stale(None),
            FaultKind::Conflict { kept: path() },
            FaultKind::Occurrences { count: 0, other_line_endings: true },
            FaultKind::BadPattern { reason: "x".repeat(9000) },
            FaultKind::Leased,
            FaultKind::OtherFileSystem,
            FaultKind::TooMany { limit: 32 },
            FaultKind::Busy,
            FaultKind::Other,
        ];
        let fault = |kind| FileError::Fault {
            path: path(),
            fault: Fault { kind, step: "open".to_owned(), errno: 5 },
        };
        let mut all: Vec<FileError> = kinds.into_iter().map(fault).collect();
        all.extend([
            FileError::NotRead { path: path() },
            FileError::PartlyRead {
                path: path(),
                shown: (0..1000).map(|n| LineRange { first: 3 * n + 1, last: 3 * n + 2 }).collect(),
                total_lines: 5000,
            },
            FileError::NotText { path: path(), encoding: Encoding::Lossy },
            FileError::Stale { path: "é".repeat(2047), current: Some(stamp) },
            FileError::Conflict { path: path(), kept: path() },
            FileError::Draining,
            FileError::Busy("too much".to_owned()),
            FileError::CellLost,
            FileError::NoCell { reason: "x".to_owned(), retry: Duration::from_secs(1) },
        ]);
        all
    }

    #[test]
    fn no_status_is_larger_than_common_clients_take() {
        for error in all() {
            let name = format!("{error:?}");
            let status = status(error);
            // Bytes that are not ASCII take three in the message, and the details grow by a third.
            let size = 3 * status.message().len() + status.details().len() * 4 / 3;
            assert!(size < 8 * 1024, "{size} bytes: {name}");
        }
    }

    #[test]
    fn a_stale_read_tells_the_current_stamp() {
        let current = Some(Stamp { digest: [0xab; 32], size: 3 });
        let status = status(FileError::Stale { path: "/a".to_owned(), current });
        assert_eq!(status.code(), Code::Aborted);
        let info = status.get_details_error_info().unwrap();
        assert_eq!(info.reason, "STALE_READ");
        assert_eq!(info.metadata["digest"], "ab".repeat(32));
        assert_eq!((&*info.metadata["size"], &*info.metadata["path"]), ("3", "/a"));
    }

    #[test]
    fn ranges_are_said_as_a_person_would() {
        let range = |first, last| LineRange { first, last };
        assert_eq!(ranges(&[range(1, 1), range(4, 9)]), "1, 4-9");
        assert_eq!(ranges(&[]), "none");
    }
}
