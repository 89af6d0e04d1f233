//! The policy: what a workspace's programs may reach. One TOML file; every key has a default.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use thiserror::Error;

use crate::{Level, Limits, NetworkMode};

/// Whether a mount can be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Access {
    /// Writes fail with EROFS.
    ReadOnly,
    /// Writes reach the host's files.
    ReadWrite,
}

/// A directory of the host shown in the cell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mount {
    /// Absolute path on the host; it must exist.
    pub host: String,
    /// Absolute path in the cell, outside of the system's directories.
    pub cell: String,
    /// Whether it can be written; read-only by default.
    #[serde(default = "read_only")]
    pub access: Access,
}

fn read_only() -> Access {
    Access::ReadOnly
}

/// The environment of every program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EnvPolicy {
    /// Names of the daemon's own variables that are passed on. Nothing else is inherited.
    pub allow: Vec<String>,
    /// Variables set to fixed values.
    pub set: BTreeMap<String, String>,
    /// Value of PATH.
    pub path: String,
}

impl Default for EnvPolicy {
    fn default() -> Self {
        Self {
            allow: Vec::new(),
            set: BTreeMap::new(),
            path: "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned(),
        }
    }
}

/// Who the cell's programs are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CellPolicy {
    /// The id that programs get when root serves a workspace owned by root. Not 0.
    pub uid: u32,
}

impl Default for CellPolicy {
    fn default() -> Self {
        Self { uid: 60989 }
    }
}

/// Who commits made in the cell are by, unless the repository says otherwise.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GitIdentity {
    /// `user.name`; empty leaves it unset.
    pub name: String,
    /// `user.email`; empty leaves it unset.
    pub email: String,
}

/// The policy of a workspace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Policy {
    /// The level that the host must be able to enforce.
    pub level: Level,
    /// What the cell reaches of the network.
    pub network: NetworkMode,
    /// Further directories of the host.
    pub mounts: Vec<Mount>,
    /// The environment of programs.
    pub env: EnvPolicy,
    /// Limits of a call; a call may ask for less.
    pub limits: Limits,
    /// Size of `/tmp` in bytes; 0 means 1 GiB or a quarter of memory, whichever is less.
    pub tmp_bytes: u64,
    /// Who the programs are.
    pub cell: CellPolicy,
    /// Allows ptrace between the processes of one call, for debuggers.
    pub debug: bool,
    /// Identity of commits.
    pub git: GitIdentity,
    /// User ids that may connect to the socket besides root and the daemon's own.
    pub socket_users: Vec<u32>,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            level: Level::Namespaces,
            network: NetworkMode::None,
            mounts: Vec::new(),
            env: EnvPolicy::default(),
            limits: Limits::default(),
            tmp_bytes: 0,
            cell: CellPolicy::default(),
            debug: false,
            git: GitIdentity::default(),
            socket_users: Vec::new(),
        }
    }
}

/// One thing wrong with a policy file.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PolicyProblem {
    /// The file is not TOML, or a key or a value's type is not known.
    #[error("{0}")]
    Syntax(String),
    /// A value is refused.
    #[error("{key} = {value}: {reason}")]
    Value {
        /// The key, with its table.
        key: String,
        /// The value as it would be written.
        value: String,
        /// Why it is refused.
        reason: &'static str,
    },
}

/// Directories of the cell that a mount may not replace or cover.
const RESERVED: [&str; 12] = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc",
    "/proc",
    "/dev",
    "/sys",
    "/tmp",
    "/workspace",
];

impl Policy {
    /// Reads a policy file's text. Every problem is reported, not only the first.
    pub fn parse(text: &str) -> Result<Policy, Vec<PolicyProblem>> {
        let policy: Policy = toml::from_str(text)
            .map_err(|error| vec![PolicyProblem::Syntax(error.to_string().trim().to_owned())])?;
        let problems = policy.problems();
        if problems.is_empty() { Ok(policy) } else { Err(problems) }
    }

    /// SHA-256 of the policy in its canonical form (JSON-free: TOML with every key, in the order
    /// of the type's fields), so that two files that mean the same have one digest.
    pub fn digest(&self) -> [u8; 32] {
        let text = toml::to_string(self).expect("a policy holds only plain data");
        Sha256::digest(text.as_bytes()).into()
    }

    fn problems(&self) -> Vec<PolicyProblem> {
        let mut problems = Vec::new();
        let mut refuse = |key: &str, value: String, reason| {
            problems.push(PolicyProblem::Value { key: key.to_owned(), value, reason });
        };
        for mount in &self.mounts {
            if !mount.host.starts_with('/') {
                refuse("mounts.host", format!("{:?}", mount.host), "must be an absolute path");
            }
            if let Some(reason) = cell_path_problem(&mount.cell) {
                refuse("mounts.cell", format!("{:?}", mount.cell), reason);
            }
        }
        for name in self.env.allow.iter().chain(self.env.set.keys()) {
            if name.is_empty() || name.contains(['=', '\0']) {
                refuse("env", format!("{name:?}"), "a name is not empty and holds no '=' or NUL");
            }
        }
        if self.env.set.values().chain([&self.env.path]).any(|value| value.contains('\0')) {
            refuse("env", "a value".to_owned(), "holds a NUL byte");
        }
        if self.cell.uid == 0 || self.cell.uid == u32::MAX {
            refuse("cell.uid", self.cell.uid.to_string(), "must be an unprivileged user id");
        }
        if self.limits.processes == 0 {
            refuse("limits.processes", "0".to_owned(), "must be at least 1");
        }
        if self.limits.open_files < 8 {
            let value = self.limits.open_files.to_string();
            refuse("limits.open_files", value, "must be at least 8");
        }
        if self.tmp_bytes != 0 && self.tmp_bytes < 1 << 16 {
            refuse("tmp_bytes", self.tmp_bytes.to_string(), "must be 0 or at least 65536");
        }
        problems
    }
}

fn cell_path_problem(path: &str) -> Option<&'static str> {
    let inside =
        |dir: &str| path.strip_prefix(dir).is_some_and(|r| r.is_empty() || r.starts_with('/'));
    if !path.starts_with('/') {
        Some("must be an absolute path")
    } else if path.contains('\0') {
        Some("holds a NUL byte")
    } else if path.split('/').skip(1).any(|part| part.is_empty() || part == "." || part == "..") {
        Some("must be a plain path without '.', '..', '//' or a final '/'")
    } else if RESERVED.iter().any(|dir| inside(dir)) || path == "/home" || path == "/home/agent" {
        Some("lies in a directory that the cell makes itself")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_file_is_the_default() {
        assert_eq!(Policy::parse("").unwrap(), Policy::default());
    }

    #[test]
    fn the_default_survives_being_written_and_read() {
        let text = toml::to_string(&Policy::default()).unwrap();
        assert_eq!(Policy::parse(&text).unwrap(), Policy::default());
    }

    #[test]
    fn every_problem_is_reported() {
        let text = "cell.uid = 0\ntmp_bytes = 1\n[[mounts]]\nhost = \"opt\"\ncell = \"/usr/x\"\n";
        let keys: Vec<_> = Policy::parse(text)
            .unwrap_err()
            .into_iter()
            .map(|problem| match problem {
                PolicyProblem::Value { key, .. } => key,
                PolicyProblem::Syntax(text) => text,
            })
            .collect();
        assert_eq!(keys, ["mounts.host", "mounts.cell", "cell.uid", "tmp_bytes"]);
    }

    #[test]
    fn unknown_keys_are_refused() {
        assert!(matches!(Policy::parse("levl = 1").unwrap_err()[..], [PolicyProblem::Syntax(_)]));
    }

    #[test]
    fn equal_policies_have_one_digest() {
        let written = Policy::parse("debug = false").unwrap();
        assert_eq!(written.digest(), Policy::default().digest());
        assert_ne!(Policy::parse("debug = true").unwrap().digest(), written.digest());
    }
}
