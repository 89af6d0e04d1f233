//! What a gRPC status means: refused by the daemon, lost on the way, or never sent.

use std::error::Error as _;

use cofferdam_client::{ClientError, Code, FieldProblem, Refusal};
use tonic::Status;
use tonic_types::StatusExt as _;

/// Whether a call changes something, so that a lost answer leaves the outcome open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    /// It does.
    Mutates,
    /// It does not: asking again is harmless.
    Reads,
}

/// Turns a status into the client's error.
pub(crate) fn client_error(operation: &'static str, effect: Effect, status: Status) -> ClientError {
    let spoken_by_daemon = status.get_details_error_info().is_some();
    if spoken_by_daemon || !lost(&status) {
        return ClientError::Refused { operation, refusal: refusal(&status) };
    }
    match effect {
        Effect::Mutates if !never_sent(&status) => {
            ClientError::OutcomeUnknown { operation, source: Some(Box::new(status)) }
        }
        _ => ClientError::Transport { operation, source: Box::new(status) },
    }
}

/// Whether the status was made on this side because the answer did not arrive. A status that
/// came over the wire has no source; an end without a status is `Unknown` (tonic's
/// `infer_grpc_status`).
fn lost(status: &Status) -> bool {
    status.source().is_some()
        || matches!(status.code(), tonic::Code::Unknown | tonic::Code::Cancelled)
}

/// Whether the transport could not even be opened.
fn never_sent(status: &Status) -> bool {
    let mut source = status.source();
    while let Some(error) = source {
        if error.is::<NotConnected>() {
            return true;
        }
        source = error.source();
    }
    false
}

/// The connector's error: the socket could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("connect to the socket")]
pub(crate) struct NotConnected(#[source] pub(crate) std::io::Error);

fn refusal(status: &Status) -> Refusal {
    let fields = status.get_details_bad_request().map(|bad| bad.field_violations);
    Refusal {
        code: code(status.code()),
        reason: status.get_details_error_info().map(|info| info.reason).unwrap_or_default(),
        message: status.message().to_owned(),
        fields: fields
            .unwrap_or_default()
            .into_iter()
            .map(|violation| FieldProblem {
                field: violation.field,
                description: violation.description,
            })
            .collect(),
        retry_after: status.get_details_retry_info().and_then(|info| info.retry_delay),
    }
}

fn code(code: tonic::Code) -> Code {
    match code {
        tonic::Code::Cancelled => Code::Cancelled,
        tonic::Code::InvalidArgument => Code::InvalidArgument,
        tonic::Code::DeadlineExceeded => Code::DeadlineExceeded,
        tonic::Code::NotFound => Code::NotFound,
        tonic::Code::AlreadyExists => Code::AlreadyExists,
        tonic::Code::PermissionDenied => Code::PermissionDenied,
        tonic::Code::ResourceExhausted => Code::ResourceExhausted,
        tonic::Code::FailedPrecondition => Code::FailedPrecondition,
        tonic::Code::Aborted => Code::Aborted,
        tonic::Code::OutOfRange => Code::OutOfRange,
        tonic::Code::Unimplemented => Code::Unimplemented,
        tonic::Code::Internal => Code::Internal,
        tonic::Code::Unavailable => Code::Unavailable,
        tonic::Code::DataLoss => Code::DataLoss,
        tonic::Code::Unauthenticated => Code::Unauthenticated,
        tonic::Code::Ok | tonic::Code::Unknown => Code::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::time::Duration;

    use tonic_types::ErrorDetails;

    use super::*;

    fn with_source(mut status: Status, source: std::io::Error) -> Status {
        status.set_source(std::sync::Arc::new(NotConnected(source)));
        status
    }

    #[test]
    fn what_the_daemon_says_is_a_refusal_with_all_its_details() {
        let mut details = ErrorDetails::with_error_info("DRAINING", "cofferdam", HashMap::new());
        details.set_retry_info(Some(Duration::from_secs(1)));
        details.add_bad_request_violation("process.cwd", "is relative");
        let status =
            Status::with_error_details(tonic::Code::Unavailable, "the daemon is ending", details);
        let error = client_error("Start", Effect::Mutates, status);
        assert!(error.is_unavailable());
        assert_eq!(
            error.refusal(),
            Some(&Refusal {
                code: Code::Unavailable,
                reason: "DRAINING".into(),
                message: "the daemon is ending".into(),
                fields: vec![FieldProblem {
                    field: "process.cwd".into(),
                    description: "is relative".into()
                }],
                retry_after: Some(Duration::from_secs(1)),
            })
        );
    }

    #[test]
    fn an_end_without_a_status_leaves_a_mutation_open() {
        let status = || Status::unknown("grpc-status header missing");
        let error = client_error("Execute", Effect::Mutates, status());
        assert!(matches!(error, ClientError::OutcomeUnknown { .. }), "{error}");
        let error = client_error("Get", Effect::Reads, status());
        assert!(matches!(error, ClientError::Transport { .. }), "{error}");
    }

    #[test]
    fn a_call_that_was_never_sent_has_a_known_outcome() {
        let refused = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        let status = with_source(Status::unavailable("x"), refused);
        let error = client_error("Execute", Effect::Mutates, status);
        assert!(matches!(error, ClientError::Transport { .. }), "{error}");
    }
}
