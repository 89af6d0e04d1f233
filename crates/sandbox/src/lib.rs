//! Isolation: the plan of a cell, the recipe that enforces it, and the probe of the host.
#![forbid(unsafe_code)]

mod plan;
mod step;

pub use plan::{CellIds, Plan, PlanError};
pub use step::{SetupError, Step};
