//! The cell: what runs on the confined side (init, keepers, shims, toolbox), the protocol that it
//! speaks, and how the trusted side starts it.
//!
//! Knows no gRPC and no tokio: a program that only wants a cell calls [`run_if_launched`] first
//! and [`launch`] then, and talks to [`Cell::init`].

#![forbid(unsafe_code)]

mod call;
pub mod channel;
mod init;
mod keeper;
mod launch;
mod notes;
pub mod protocol;
mod shim;
mod stdio;
mod supervision;
mod toolbox;
mod tree;

pub use launch::{Cell, LaunchError, launch, run_if_launched};
