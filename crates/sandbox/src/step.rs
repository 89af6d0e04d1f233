//! The steps of the recipe, by name.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// One step of the recipe that makes a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Step {
    /// Reach the workspace's directory.
    OpenWorkspace,
}

/// A step that failed.
#[derive(Debug, Clone, PartialEq, Eq, Error, Serialize, Deserialize)]
#[error("{step:?} failed: errno {errno}")]
pub struct SetupError {
    /// The step.
    pub step: Step,
    /// Its errno.
    pub errno: i32,
}
