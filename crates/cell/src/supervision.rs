//! What init, the keepers of sessions and the shims of calls say to each other.

use cofferdam_spec::{Command, Limits};
use serde::{Deserialize, Serialize};

use crate::notes::Slot;
use crate::protocol::Status;

/// Names a shim in reports; never used twice.
pub(crate) type ShimId = u64;

/// Init to a keeper: fork a shim. Beside it travels the shim's end of its channel.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct ForkShim {
    pub(crate) shim: ShimId,
    /// Where it leaves its notes.
    pub(crate) slot: Slot,
}

/// Init to a shim: run a program. Beside it travel its standard streams.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Run {
    pub(crate) command: Command,
    pub(crate) limits: Limits,
    pub(crate) terminal: bool,
    pub(crate) workspace_read_only: bool,
}

/// Keepers and shims to init, all through one socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) shim: ShimId,
    pub(crate) what: What,
}

/// What happened to a shim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum What {
    /// The keeper has forked it.
    Forked { pid: i32 },
    /// The keeper could not.
    ForkFailed { errno: i32 },
    /// Its program runs. Beside it travels the leader's pidfd.
    Spawned { pid: i32 },
    /// Its program could not be started; the shim is idle again.
    SpawnFailed { step: String, errno: i32 },
    /// The leader has ended. Without children left, the shim is idle again.
    Exited { status: Status, children: bool },
    /// `Spawned` and `Exited` in one, of a program that ended at once.
    Ran { pid: i32, status: Status, children: bool },
    /// After `Exited` with children: now none is left, and the shim is idle again.
    Empty,
}
