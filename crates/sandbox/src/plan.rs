//! What a cell is to be, decided before anything is done.

use std::path::PathBuf;

use cofferdam_spec::{HostImage, Policy};
use serde::{Deserialize, Serialize};

use crate::Step;

/// Who the cell's programs are on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CellIds {
    /// User id, mapped to itself.
    pub uid: u32,
    /// Group id, mapped to itself.
    pub gid: u32,
    /// Whether the workspace is root's and appears to the cell as its own (id-mapped mount).
    pub map_root_files: bool,
}

/// Everything that the recipe needs to know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The workspace's directory on the host; absolute, without symbolic links.
    pub workspace: PathBuf,
    /// Directory of the host that becomes `/home/agent`; it exists and belongs to the cell's user.
    pub home: PathBuf,
    /// What the cell shows of the host.
    pub image: HostImage,
    /// The policy in force.
    pub policy: Policy,
    /// Who its programs are.
    pub ids: CellIds,
    /// Makes this step fail with EIO before it does anything. For tests of what a failure leaves.
    pub fail_at: Option<Step>,
}

/// Why no plan could be made. Nothing has been changed.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The workspace cannot be used.
    #[error("workspace {path}: {reason}")]
    Workspace {
        /// The directory as given.
        path: PathBuf,
        /// Which rule it breaks.
        reason: &'static str,
    },
    /// A file operation failed.
    #[error("{operation} {path}")]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On which path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

impl Plan {
    /// Decides who the cell's programs are, and makes `home` (with the mode 0700 and that owner)
    /// where it does not exist.
    pub fn prepare(
        workspace: &std::path::Path,
        home: &std::path::Path,
        image: HostImage,
        policy: Policy,
    ) -> Result<Plan, PlanError> {
        let io = |operation, path: &std::path::Path| {
            let path = path.to_owned();
            move |source| PlanError::Io { operation, path, source }
        };
        let workspace = workspace.canonicalize().map_err(io("resolve", workspace))?;
        std::fs::create_dir_all(home).map_err(io("create", home))?;
        let ids = CellIds { uid: policy.cell.uid, gid: policy.cell.uid, map_root_files: true };
        Ok(Plan { workspace, home: home.to_owned(), image, policy, ids, fail_at: None })
    }
}
