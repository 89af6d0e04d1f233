//! Every unsafe block and raw system call of the workspace, as small safe functions.
//!
//! A function is here only when neither `rustix` nor `nix` offers it safely. Each says what makes
//! it sound; none decides anything.

mod fork;
mod lease;
mod mount;
mod net;
mod restrict;
mod shared;
mod signal;
mod spawn;

pub use fork::{Kinship, fork, reset_signals};
pub use lease::{give_back_lease, holds_read_lease, take_read_lease};
pub use mount::{MountAttributes, set_mount_attributes};
pub use net::bring_loopback_up;
pub use restrict::{
    Instruction, drop_bounding_set, drop_capabilities, install_filter, landlock_abi,
    restrict_with_ruleset,
};
pub use shared::{SHARED_CELLS, shared_cells};
pub use signal::send_signal;
pub use spawn::{Spawn, SpawnError, SpawnStep, Spawned, spawn};

use std::io;

/// The result of a raw system call as `io::Result`.
fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
