//! Descriptions of a workspace and of what its daemon can do.

use std::time::SystemTime;

use cofferdam_spec::Enforcement;

/// What a daemon enforces, lacks and accepts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// What the kernel enforces for every call.
    pub enforcement: Enforcement,
    /// Version of the daemon.
    pub version: String,
    /// Grows when clients must know more than new fields.
    pub protocol_generation: u32,
    /// Size limits of messages.
    pub message_limits: MessageLimits,
    /// What was probed on the host.
    pub capabilities: Vec<Capability>,
}

/// Size limits of messages, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MessageLimits {
    /// A request of `execute`.
    pub execute_request_bytes: u64,
    /// Every other request.
    pub request_bytes: u64,
    /// Every response.
    pub response_bytes: u64,
    /// Calls that may run at once.
    pub concurrent_calls: u32,
    /// Kept of each output stream.
    pub retained_output_bytes: u64,
}

/// One thing that was tried on the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capability {
    /// What.
    pub name: String,
    /// Whether it works.
    pub available: bool,
    /// How it was found out, and what is lost without it.
    pub detail: String,
    /// What would make it available.
    pub fix: String,
}

/// A workspace with its daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workspace {
    /// Directory on the host.
    pub host_directory: String,
    /// The same directory in the cell.
    pub cell_directory: String,
    /// Name of the image.
    pub image: String,
    /// User id of every program.
    pub uid: u32,
    /// Group id of every program.
    pub gid: u32,
    /// When the daemon started.
    pub start_time: SystemTime,
    /// Process id of the daemon.
    pub daemon_pid: u32,
    /// Processes that run now.
    pub running_processes: u32,
    /// Calls since the start.
    pub calls_total: u64,
    /// How often the cell was started.
    pub cell_generation: u32,
    /// Things a person should know.
    pub warnings: Vec<String>,
}
