//! Why a call could not be carried out. A program that failed is not an error: see
//! [`Exit`](cofferdam_spec::Exit).

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use thiserror::Error;

/// Why a call could not be carried out.
#[derive(Debug, Error)]
pub enum ClientError {
    /// The daemon was not reached, or a call that changes nothing got no answer.
    #[error("{operation}: the daemon cannot be reached")]
    Transport {
        /// The call.
        operation: &'static str,
        /// The transport's own error.
        #[source]
        source: Box<dyn StdError + Send + Sync>,
    },
    /// The daemon answered that it does not do this. Nothing has run.
    #[error("{operation}: {refusal}")]
    Refused {
        /// The call.
        operation: &'static str,
        /// Its answer.
        refusal: Refusal,
    },
    /// The call was sent and its outcome did not come back. Ask again with the same request id.
    #[error("{operation}: outcome unknown, the answer was lost")]
    OutcomeUnknown {
        /// The call.
        operation: &'static str,
        /// The transport's own error, where there was one.
        #[source]
        source: Option<Box<dyn StdError + Send + Sync>>,
    },
    /// The daemon's answer lacks something that the contract promises, or has it in a form that
    /// this client does not know.
    #[error("{operation}: the daemon's answer has no usable {field}")]
    Malformed {
        /// The call.
        operation: &'static str,
        /// The answer's field.
        field: &'static str,
    },
}

impl ClientError {
    /// The daemon's answer, when it refused.
    pub fn refusal(&self) -> Option<&Refusal> {
        match self {
            Self::Refused { refusal, .. } => Some(refusal),
            _ => None,
        }
    }

    /// Whether the daemon said that it is ending, so that another one has to be asked.
    pub fn is_unavailable(&self) -> bool {
        self.refusal().is_some_and(|refusal| refusal.code == Code::Unavailable)
    }
}

/// What the daemon said when it refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The kind.
    pub code: Code,
    /// The machine-readable reason, in capitals; empty when the transport refused.
    pub reason: String,
    /// A sentence for people.
    pub message: String,
    /// The request's fields that are wrong.
    pub fields: Vec<FieldProblem>,
    /// After which time asking again makes sense.
    pub retry_after: Option<Duration>,
}

impl fmt::Display for Refusal {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.message)?;
        for problem in self.fields.iter().filter(|problem| !self.message.contains(&problem.field)) {
            write!(out, "; {}: {}", problem.field, problem.description)?;
        }
        if self.reason.is_empty() {
            write!(out, " ({})", self.code)
        } else {
            write!(out, " ({}, {})", self.code, self.reason)
        }
    }
}

/// One field of a request that was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldProblem {
    /// Path of the field in the request.
    pub field: String,
    /// What is wrong with it.
    pub description: String,
}

/// The kinds of refusal (gRPC's status codes).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are gRPC's own and explained there")]
pub enum Code {
    Cancelled,
    Unknown,
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Aborted,
    OutOfRange,
    Unimplemented,
    Internal,
    Unavailable,
    DataLoss,
    Unauthenticated,
}

impl fmt::Display for Code {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Cancelled => "CANCELLED",
            Self::Unknown => "UNKNOWN",
            Self::InvalidArgument => "INVALID_ARGUMENT",
            Self::DeadlineExceeded => "DEADLINE_EXCEEDED",
            Self::NotFound => "NOT_FOUND",
            Self::AlreadyExists => "ALREADY_EXISTS",
            Self::PermissionDenied => "PERMISSION_DENIED",
            Self::ResourceExhausted => "RESOURCE_EXHAUSTED",
            Self::FailedPrecondition => "FAILED_PRECONDITION",
            Self::Aborted => "ABORTED",
            Self::OutOfRange => "OUT_OF_RANGE",
            Self::Unimplemented => "UNIMPLEMENTED",
            Self::Internal => "INTERNAL",
            Self::Unavailable => "UNAVAILABLE",
            Self::DataLoss => "DATA_LOSS",
            Self::Unauthenticated => "UNAUTHENTICATED",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_reads_as_one_line_with_field_kind_and_reason() {
        let refusal = Refusal {
            code: Code::InvalidArgument,
            reason: "BAD_REQUEST".into(),
            message: "the request is not valid".into(),
            fields: vec![FieldProblem { field: "process.cwd".into(), description: "empty".into() }],
            retry_after: None,
        };
        assert_eq!(
            ClientError::Refused { operation: "Start", refusal }.to_string(),
            "Start: the request is not valid; process.cwd: empty (INVALID_ARGUMENT, BAD_REQUEST)"
        );
    }
}
