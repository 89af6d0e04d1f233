//! Finding files by name, and lines in files.
//!
//! Both walk a tree in the order of its paths' bytes ([`walk`]), so that two searches of the same
//! tree answer the same, whatever a limit cut off and however many threads worked. What may be left
//! out is decided by ignore files of the workspace and by nothing else ([`ignores`]): no
//! configuration of a user, no ignore file above the workspace, no environment variable. Symlinks
//! below what was named are not followed, and nothing but regular files is opened.

mod glob;
mod grep;
mod ignores;
mod line;
mod outbox;
mod pattern;
mod sink;
#[cfg(test)]
pub(crate) mod testing;
pub(crate) mod walk;

pub(crate) use glob::glob;
pub(crate) use grep::grep;

use crate::call::{Fault, FaultKind};
use crate::fault::found;

/// Where the workspace is: ignore files above it do not count.
const WORKSPACE: &str = "/workspace";

/// The fault of a pattern, a filter or a type that is not understood.
fn bad_pattern(reason: impl Into<String>) -> Fault {
    found(FaultKind::BadPattern { reason: reason.into() }, "read the pattern")
}
