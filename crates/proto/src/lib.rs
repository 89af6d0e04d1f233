//! The gRPC contract: code generated from `proto/`, and the conversions between wire and spec.
//!
//! A wire message is what a peer claims; the conversions to spec refuse what the plain data cannot
//! hold, and name the field. The conversions to the wire always work.
#![forbid(unsafe_code)]

mod enforcement;
mod exit;
mod limits;
mod stamp;
mod time;

pub use enforcement::EnforcementError;
pub use exit::ExitError;
pub use limits::{LimitFieldError, call_limits};
pub use stamp::StampError;
pub use time::{DurationError, duration_from_wire, duration_to_wire};

/// Generated messages, clients and servers of package `cofferdam.v1`.
#[expect(missing_docs, reason = "generated; the comments are in the .proto files")]
#[allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    unreachable_pub,
    reason = "generated"
)]
pub mod v1 {
    tonic::include_proto!("cofferdam.v1");
}

/// The encoded `FileDescriptorSet`, for reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptor.bin"));
