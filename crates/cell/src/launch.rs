//! Starts a cell: the trusted side executes its own program again, hands over the plan, and hears
//! either that the cell stands or which step failed.

use std::os::fd::OwnedFd;
use std::process::ExitCode;

use cofferdam_sandbox::{Plan, SetupError};
use cofferdam_spec::Enforcement;
use thiserror::Error;

use crate::channel::Channel;
use crate::protocol::{Event, Request, ToolboxReply, ToolboxRequest};

/// A running cell. Dropping it ends every process of the cell and reaps its first one.
#[derive(Debug)]
pub struct Cell {
    /// To init. Non-blocking. Its end means that the cell is gone.
    pub init: Channel<Request, Event>,
    /// To the toolbox. Non-blocking. Its end means that the cell is gone.
    pub toolbox: Channel<ToolboxRequest, ToolboxReply>,
    /// What the kernel enforces.
    pub enforcement: Enforcement,
    /// Things a person should know.
    pub warnings: Vec<String>,
    /// Process id of the cell's first process (the toolbox) as the host sees it.
    pub pid: u32,
    _first: OwnedFd,
}

/// Why a cell could not be started. Nothing of it is left.
#[derive(Debug, Error)]
pub enum LaunchError {
    /// A step of the recipe failed.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// The program could not be executed again, or ended without an answer.
    #[error("start the cell's first process")]
    Spawn(#[source] std::io::Error),
}

/// Starts a cell by `plan`. Call it on a thread that lives as long as the cell should: the kernel
/// ends the cell when that thread ends (`prctl(2)`, PR_SET_PDEATHSIG).
///
/// Blocks until the cell stands, a few milliseconds.
pub fn launch(_plan: &Plan) -> Result<Cell, LaunchError> {
    Err(LaunchError::Spawn(std::io::Error::other("under construction")))
}

/// The first statement of `main` in every program that launches cells: when this process was
/// started by [`launch`], it becomes the cell and this returns its exit code.
pub fn run_if_launched() -> Option<ExitCode> {
    None
}
