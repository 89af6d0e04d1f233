//! The gRPC services: each handler translates, calls, translates back.

mod process;
mod workspace;

pub(crate) use process::Processes;
pub(crate) use workspace::{Facts, Workspace};
