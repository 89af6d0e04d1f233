//! Validated plain data that every other crate speaks of: policy, limits, exit reasons,
//! enforcement, identifiers and the image's contents.
//!
//! Nothing here does I/O, and a value that exists is valid: the constructors refuse what the rest
//! of the system could not carry out.

#![forbid(unsafe_code)]

mod command;
mod enforcement;
mod exit;
mod id;
mod image;
mod limits;
mod policy;
mod stamp;

pub use command::{
    ARGUMENT_BYTES_MAX, ARGUMENTS_BYTES_MAX, Command, CommandError, PATH_BYTES_MAX, PtySize,
};
pub use enforcement::{Capability, Enforcement, Engine, Level, NetworkMode};
pub use exit::{Exit, TimeLimit};
pub use id::{IdError, RequestId, SessionId, Tag};
pub use image::{HostImage, ImageError};
pub use limits::{CallLimits, LimitError, Limits};
pub use policy::{Access, CellPolicy, EnvPolicy, GitIdentity, Mount, Policy, PolicyProblem};
pub use stamp::{LineRange, Stamp};
