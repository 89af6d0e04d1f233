//! Isolation: the plan of a cell, the recipe that enforces it, and what a failed step means.
//!
//! Knows no gRPC and no tokio: a program that only wants a cell uses this crate and `cell`.

#![forbid(unsafe_code)]

mod handshake;
mod plan;
mod probe;
mod recipe;
mod rootfs;
mod rulesets;
mod seccomp;
mod step;

pub use plan::{CellIds, Plan, PlanError};
pub use probe::capabilities;
pub use recipe::{InitSide, ToolboxSide, enter};
pub use seccomp::Filter;
pub use step::{SetupError, Step};
