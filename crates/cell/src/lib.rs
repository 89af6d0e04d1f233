//! The cell: what runs on the confined side (init, shims, toolbox), the protocol that it speaks,
//! and how the trusted side starts it.
#![forbid(unsafe_code)]

pub mod channel;
mod launch;
pub mod protocol;

pub use launch::{Cell, LaunchError, launch, run_if_launched};
