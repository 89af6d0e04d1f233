//! The gRPC services: each handler translates, calls, translates back.

mod filesystem;
mod process;
mod stamp;
mod tool;
mod workspace;

pub(crate) use filesystem::{Filesystem, UPLOAD_BYTES_MAX, WRITE_TEXT_REQUEST_BYTES_MAX, Watches};
pub(crate) use process::Processes;
pub(crate) use stamp::Stamping;
pub(crate) use tool::ToolCalls;
pub(crate) use workspace::{Facts, Workspace};
