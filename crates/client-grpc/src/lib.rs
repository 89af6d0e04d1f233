//! The client over gRPC on a unix socket.
//!
//! [`GrpcClient`] turns plain requests into messages and messages into plain answers; what a
//! failure means is decided in one place, `status.rs`.

#![forbid(unsafe_code)]

mod address;
mod client;
mod status;
mod wire;

pub use address::{AddressError, SUN_PATH_BYTES_MAX, UnixAddress};
pub use client::{GrpcClient, GrpcEvents};
