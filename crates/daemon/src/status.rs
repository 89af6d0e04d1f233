//! Where the daemon's faults become gRPC: each status carries `google.rpc.ErrorInfo` and one more
//! detail that a program can act on.

mod files;

use std::collections::HashMap;
use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, FieldViolation, StatusExt};

use crate::decide::{CALLS_MAX, Refusal};
use crate::files::FileError;
use crate::stdin::{StdinClosed, StdinError};
use crate::supervisor::StartRefused;

/// `ErrorInfo.domain` of everything here.
const DOMAIN: &str = "cofferdam";

/// How long a client waits before it asks again where that may help.
const RETRY: Duration = Duration::from_secs(1);

/// Why a call could not be carried out.
#[derive(Debug)]
pub(crate) enum Fault {
    /// Fields of the request are wrong.
    Invalid(Vec<FieldViolation>),
    /// The bytes are no request.
    Undecodable {
        /// Path of the field, as far as it is known.
        field: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A message is larger than its limit.
    TooLarge {
        /// Its size in bytes.
        size: u64,
        /// Its limit.
        limit: u64,
    },
    /// No such process, or it is not retained any more.
    NotFound {
        /// The name asked for.
        process_id: String,
    },
    /// The program was not started.
    Start(StartRefused),
    /// The input could not be written or closed.
    Stdin {
        /// The process.
        process_id: String,
        /// Why.
        error: StdinError,
    },
    /// The process has no terminal.
    NoTerminal {
        /// The process.
        process_id: String,
    },
    /// The process has ended.
    Ended {
        /// The process.
        process_id: String,
    },
    /// An offset beyond the end of a stream that is complete.
    BeyondEnd {
        /// Field of the request.
        field: &'static str,
        /// The offset.
        offset: u64,
        /// Where the stream ends.
        total: u64,
    },
    /// A job file could not be read.
    Output {
        /// The process.
        process_id: String,
        /// The cause, for the log only.
        error: std::io::Error,
    },
    /// The terminal refused.
    Terminal {
        /// The process.
        process_id: String,
        /// The cause.
        error: rustix::io::Errno,
    },
    /// A call about files.
    File(FileError),
    /// Another stream goes on with the watch.
    WatchResumed,
    /// A streamed content did not go on.
    UploadIdle {
        /// How long was waited for it.
        limit: Duration,
    },
    /// A client did not read the results of its search.
    ReaderStalled {
        /// How long was waited for it.
        limit: Duration,
    },
}

/// One wrong field.
pub(crate) fn violation(field: impl Into<String>, reason: impl ToString) -> FieldViolation {
    FieldViolation::new(field, reason.to_string())
}

impl From<StartRefused> for Fault {
    fn from(refused: StartRefused) -> Self {
        Fault::Start(refused)
    }
}

impl From<FileError> for Fault {
    fn from(error: FileError) -> Self {
        Fault::File(error)
    }
}

impl From<Fault> for Status {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Invalid(violations) => invalid(violations),
            Fault::Undecodable { field, reason } => {
                let mut details = info("UNDECODABLE_REQUEST", &[("field", &field)]);
                details.add_bad_request_violation(&field, &reason);
                let message = format!("the request cannot be decoded: {field}: {reason}");
                Status::with_error_details(Code::InvalidArgument, message, details)
            }
            Fault::TooLarge { size, limit } => too_large(size, limit),
            Fault::NotFound { process_id } => {
                let mut details = info("PROCESS_NOT_FOUND", &[("process_id", &process_id)]);
                details.set_resource_info("process", &process_id, "", "unknown or forgotten");
                let message = format!("there is no process {process_id:?}, running or retained");
                Status::with_error_details(Code::NotFound, message, details)
            }
            Fault::Start(refused) => start_refused(&refused),
            Fault::Stdin { process_id, error } => stdin(&process_id, &error),
            Fault::NoTerminal { process_id } => {
                precondition("NO_TERMINAL", &process_id, "the process does not run on a terminal")
            }
            Fault::Ended { process_id } => {
                precondition("PROCESS_ENDED", &process_id, "the process has ended")
            }
            Fault::BeyondEnd { field, offset, total } => {
                beyond(field, format!("is {offset}, the stream has {total} bytes"))
            }
            Fault::Output { process_id, error } => {
                tracing::error!(process = process_id, %error, "a job file cannot be read");
                let mut details = info("OUTPUT_UNREADABLE", &[("process_id", &process_id)]);
                details.set_resource_info("output", &process_id, "", "the job file cannot be read");
                let message = "the output that was kept cannot be read any more";
                Status::with_error_details(Code::DataLoss, message, details)
            }
            Fault::Terminal { process_id, error } => precondition(
                "TERMINAL_FAILED",
                &process_id,
                &format!("the terminal refused: {error}"),
            ),
            Fault::File(error) => files::status(error),
            Fault::WatchResumed => {
                let message = "another stream goes on with this watch";
                let mut details = info("WATCH_RESUMED", &[]);
                details.add_precondition_failure_violation("WATCH_RESUMED", "watch", message);
                Status::with_error_details(Code::Aborted, message, details)
            }
            Fault::UploadIdle { limit } => {
                let limit = limit.as_secs();
                let message = format!(
                    "no message of the upload came for {limit} s, so it was given up; nothing was \
                     written"
                );
                let mut details = info("UPLOAD_IDLE", &[("limit_seconds", &limit.to_string())]);
                details.set_retry_info(Some(RETRY));
                Status::with_error_details(Code::DeadlineExceeded, message, details)
            }
            Fault::ReaderStalled { limit } => {
                let limit = limit.as_secs();
                let message = format!(
                    "the client read nothing for {limit} s, so the search was ended; others wait \
                     for its place"
                );
                let mut details = info("READER_STALLED", &[("limit_seconds", &limit.to_string())]);
                details.add_quota_failure_violation("searches", &message);
                Status::with_error_details(Code::ResourceExhausted, message, details)
            }
        }
    }
}

fn info(reason: &str, metadata: &[(&str, &str)]) -> ErrorDetails {
    let metadata: HashMap<String, String> =
        metadata.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    ErrorDetails::with_error_info(reason, DOMAIN, metadata)
}

fn invalid(violations: Vec<FieldViolation>) -> Status {
    let mut message = "the request is not valid".to_owned();
    for (index, one) in violations.iter().enumerate() {
        message.push_str(if index == 0 { ": " } else { "; " });
        message.push_str(&format!("{}: {}", one.field, one.description));
    }
    let mut details = info("INVALID_FIELD", &[]);
    details.set_bad_request(violations);
    Status::with_error_details(Code::InvalidArgument, message, details)
}

fn too_large(size: u64, limit: u64) -> Status {
    let (size, limit) = (size.to_string(), limit.to_string());
    let message = format!("the request is {size} bytes long, the limit is {limit}");
    let mut details = info("MESSAGE_TOO_LARGE", &[("size", &size), ("limit", &limit)]);
    details.add_quota_failure_violation("request", &message);
    Status::with_error_details(Code::ResourceExhausted, message, details)
}

fn start_refused(refused: &StartRefused) -> Status {
    let retry = |code, reason: &str, message: String, after| {
        let mut details = info(reason, &[]);
        details.set_retry_info(Some(after));
        Status::with_error_details(code, message, details)
    };
    match refused {
        StartRefused::NotAdmitted(Refusal::Draining) => {
            let message = "the daemon is draining and takes no new call";
            retry(Code::Unavailable, "DRAINING", message.to_owned(), RETRY)
        }
        StartRefused::NotAdmitted(Refusal::TooMany) => {
            let limit = CALLS_MAX.to_string();
            let message = format!("{limit} calls run, which is the limit");
            let mut details = info("TOO_MANY_CALLS", &[("limit", &limit)]);
            details.add_quota_failure_violation("calls", &message).set_retry_info(Some(RETRY));
            Status::with_error_details(Code::ResourceExhausted, message, details)
        }
        StartRefused::NoCell { reason, retry: after } => {
            let message = format!("the cell could not be started: {reason}");
            let mut details = info("CELL_UNAVAILABLE", &[("step", reason)]);
            details.set_retry_info(Some(*after));
            Status::with_error_details(Code::Unavailable, message, details)
        }
        StartRefused::Stopped => {
            retry(Code::Unavailable, "STOPPING", "the daemon stops".to_owned(), RETRY)
        }
    }
}

fn stdin(process_id: &str, error: &StdinError) -> Status {
    match error {
        StdinError::Beyond { .. } => beyond("offset", error.to_string()),
        StdinError::Closed(closed) => {
            let reason = match closed {
                StdinClosed::Never => "NO_STDIN",
                StdinClosed::ByCaller | StdinClosed::ByProgram => "STDIN_CLOSED",
                StdinClosed::Ended => "PROCESS_ENDED",
            };
            precondition(reason, process_id, &closed.to_string())
        }
    }
}

fn beyond(field: &str, description: String) -> Status {
    let mut details = info("OFFSET_OUT_OF_RANGE", &[]);
    details.add_bad_request_violation(field, &description);
    Status::with_error_details(Code::OutOfRange, format!("{field}: {description}"), details)
}

fn precondition(reason: &str, process_id: &str, description: &str) -> Status {
    let mut details = info(reason, &[("process_id", process_id)]);
    details.add_precondition_failure_violation(reason, process_id, description);
    let message = format!("process {process_id}: {description}");
    Status::with_error_details(Code::FailedPrecondition, message, details)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Fault> {
        let process_id = || "p-1".to_owned();
        let stdin = |error| Fault::Stdin { process_id: process_id(), error };
        let mut all = vec![
            Fault::Invalid(vec![violation("a", "b"), violation("c", "d")]),
            Fault::Undecodable { field: "session".into(), reason: "not UTF-8".into() },
            Fault::TooLarge { size: 2, limit: 1 },
            Fault::NotFound { process_id: process_id() },
            Fault::Start(StartRefused::NotAdmitted(Refusal::Draining)),
            Fault::Start(StartRefused::NotAdmitted(Refusal::TooMany)),
            Fault::Start(StartRefused::NoCell { reason: "x".into(), retry: RETRY }),
            Fault::Start(StartRefused::Stopped),
            stdin(StdinClosed::Never.into()),
            stdin(StdinClosed::ByProgram.into()),
            stdin(StdinClosed::Ended.into()),
            stdin(StdinError::Beyond { offset: 2, accepted: 1 }),
            Fault::NoTerminal { process_id: process_id() },
            Fault::Ended { process_id: process_id() },
            Fault::BeyondEnd { field: "stdout_offset", offset: 2, total: 1 },
            Fault::Output { process_id: process_id(), error: std::io::ErrorKind::Other.into() },
            Fault::Terminal { process_id: process_id(), error: rustix::io::Errno::IO },
            Fault::WatchResumed,
        ];
        all.extend(files::tests::all().into_iter().map(Fault::File));
        all
    }

    #[test]
    fn every_status_has_a_reason_of_ours_and_one_more_detail() {
        for fault in all() {
            let name = format!("{fault:?}");
            let details = Status::from(fault).get_error_details();
            let info = details.error_info().unwrap_or_else(|| panic!("{name}"));
            assert_eq!(info.domain, DOMAIN);
            assert!(info.reason.bytes().all(|b| b.is_ascii_uppercase() || b == b'_'), "{name}");
            let more = [
                details.bad_request().is_some(),
                details.precondition_failure().is_some(),
                details.quota_failure().is_some(),
                details.resource_info().is_some(),
                details.retry_info().is_some(),
            ];
            assert!(more.contains(&true), "{name}");
        }
    }

    #[test]
    fn every_wrong_field_is_in_the_message() {
        let status = Status::from(all().remove(0));
        assert_eq!(status.message(), "the request is not valid: a: b; c: d");
    }
}
