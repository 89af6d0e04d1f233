//! Rewrites the two answers that the gRPC library gives before a handler sees the request: a
//! message above the transport's limit, and bytes that are no message. Both then carry the same
//! details as every other fault of ours.

use std::task::{Context, Poll};

use futures::future::{FutureExt, Map};
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::{Code, Status};
use tower::{Layer, Service};

use crate::status::Fault;
use crate::validate::{EXECUTE_REQUEST_BYTES_MAX, MESSAGE_BYTES_MAX};

/// The methods with the larger limit.
const LARGE_PATHS: [&str; 3] = [
    "/cofferdam.v1.FilesystemService/WriteText",
    "/cofferdam.v1.ProcessService/Execute",
    "/cofferdam.v1.ToolService/CallTool",
];

/// How tonic's decoder begins its answer to a message above the transport's limit.
const TOO_LARGE: &str = "Error, decoded message length too large: found ";

/// How prost begins its answer to bytes that are no message.
const UNDECODABLE: &str = "failed to decode Protobuf message: ";

/// Adds [`Explain`] to services.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExplainLayer;

impl<S> Layer<S> for ExplainLayer {
    type Service = Explain<S>;

    fn layer(&self, inner: S) -> Explain<S> {
        Explain { inner }
    }
}

/// A service whose early answers are explained.
#[derive(Debug, Clone)]
pub(crate) struct Explain<S> {
    inner: S,
}

type Rewrite<E> = Box<dyn FnOnce(Result<Response<Body>, E>) -> Result<Response<Body>, E> + Send>;

impl<S, B> Service<Request<B>> for Explain<S>
where
    S: Service<Request<B>, Response = Response<Body>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Map<S::Future, Rewrite<S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let is_large = LARGE_PATHS.contains(&request.uri().path());
        let limit = if is_large { EXECUTE_REQUEST_BYTES_MAX } else { MESSAGE_BYTES_MAX };
        let rewrite: Rewrite<S::Error> =
            Box::new(move |result| result.map(|response| explain(response, limit)));
        self.inner.call(request).map(rewrite)
    }
}

fn explain(response: Response<Body>, limit: u64) -> Response<Body> {
    // Handlers' answers to good requests carry their status behind the body, so this is rare.
    if !response.headers().contains_key("grpc-status") {
        return response;
    }
    let Some(status) = Status::from_header_map(response.headers()) else { return response };
    match fault(&status, limit) {
        Some(fault) => Status::from(fault).into_http(),
        None => response,
    }
}

fn fault(status: &Status, limit: u64) -> Option<Fault> {
    match status.code() {
        Code::OutOfRange => {
            let rest = status.message().strip_prefix(TOO_LARGE)?;
            let size = rest.split(' ').next()?.parse().ok()?;
            Some(Fault::TooLarge { size, limit })
        }
        Code::Internal => {
            let rest = status.message().strip_prefix(UNDECODABLE)?;
            let (fields, reason) = split_fields(rest);
            // Innermost first; a person reads from outside in.
            let field = fields.into_iter().rev().collect::<Vec<_>>().join(".");
            let field = if field.is_empty() { "request".to_owned() } else { field };
            Some(Fault::Undecodable { field, reason })
        }
        _ => None,
    }
}

/// Splits `Inner.field: Outer.field: reason`.
fn split_fields(mut text: &str) -> (Vec<&str>, String) {
    let mut fields = Vec::new();
    while let Some((place, rest)) = text.split_once(": ")
        && let Some((_, field)) = place.split_once('.')
        && !place.contains(' ')
    {
        fields.push(field);
        text = rest;
    }
    (fields, text.to_owned())
}

#[cfg(test)]
mod tests {
    use cofferdam_proto::v1;
    use prost::Message;
    use tonic_types::StatusExt;

    use super::*;

    #[test]
    fn an_undecodable_request_names_the_field_from_outside_in() {
        // process { cwd: <0xff> }
        let error = v1::ExecuteRequest::decode(&[0x0a, 3, 0x1a, 1, 0xff][..]).unwrap_err();
        let status = Status::from(fault(&Status::internal(error.to_string()), 1).unwrap());
        assert_eq!(status.code(), Code::InvalidArgument);
        let details = status.get_error_details();
        let violations = &details.bad_request().unwrap().field_violations;
        assert_eq!(violations[0].field, "process.cwd");
        assert!(violations[0].description.contains("UTF-8"), "{violations:?}");
    }

    #[test]
    fn bytes_without_a_field_are_the_requests_fault() {
        let error = v1::ExecuteRequest::decode(&[0xff][..]).unwrap_err();
        match fault(&Status::internal(error.to_string()), 1) {
            Some(Fault::Undecodable { field, .. }) => assert_eq!(field, "request"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_message_above_the_transports_limit_is_told_ours() {
        let message = "Error, decoded message length too large: found 20971520 bytes, \
                       the limit is: 16842752 bytes";
        match fault(&Status::out_of_range(message), 16) {
            Some(Fault::TooLarge { size: 20_971_520, limit: 16 }) => {}
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn other_answers_stay() {
        assert!(fault(&Status::internal("x"), 1).is_none());
        assert!(fault(&Status::out_of_range("offset"), 1).is_none());
    }
}
