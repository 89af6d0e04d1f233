//! The gRPC contract: code generated from `proto/`, and the conversions between wire and spec.

/// Generated messages, clients and servers of package `cofferdam.v1`.
#[expect(missing_docs, reason = "generated; the comments are in the .proto files")]
#[allow(clippy::all, unreachable_pub, reason = "generated")]
pub mod v1 {
    tonic::include_proto!("cofferdam.v1");
}

/// The encoded `FileDescriptorSet`, for reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptor.bin"));
