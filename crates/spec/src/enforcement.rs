//! What the kernel really enforces, stated in every reply.

use serde::{Deserialize, Serialize};

/// The engine that carries calls out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// Processes under namespaces, Landlock and seccomp.
    Native,
}

impl Engine {
    /// The word used on the wire and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Engine::Native => "native",
        }
    }
}

/// How much of the host the kernel keeps away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// User, mount, pid, network, ipc and uts namespaces, Landlock and seccomp.
    Namespaces,
}

impl Level {
    /// The word used on the wire, in the policy and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Level::Namespaces => "namespaces",
        }
    }
}

/// What the cell may reach of the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NetworkMode {
    /// The cell's own loopback and nothing else.
    None,
}

impl NetworkMode {
    /// The word used on the wire and in the policy.
    pub fn as_str(self) -> &'static str {
        match self {
            NetworkMode::None => "none",
        }
    }
}

/// One thing that was tried on this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capability {
    /// For example `landlock`, `delegated cgroup v2`.
    pub name: String,
    /// Whether the host has it.
    pub available: bool,
    /// How it was found out, and what is lost without it.
    pub detail: String,
    /// What would make it available; empty when it is.
    pub fix: String,
}

/// The report that accompanies every reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enforcement {
    /// The engine.
    pub engine: Engine,
    /// The level.
    pub level: Level,
    /// Landlock ABI of the running kernel.
    pub landlock_abi: u32,
    /// Landlock rights that newer kernels handle and this one does not.
    pub rights_not_handled: Vec<String>,
    /// What the cell reaches of the network.
    pub network: NetworkMode,
    /// SHA-256 of the policy in force.
    pub policy_digest: [u8; 32],
    /// SHA-256 of the seccomp program.
    pub seccomp_digest: [u8; 32],
    /// Limits that this host cannot enforce, each with its reason.
    pub not_enforced: Vec<String>,
}
