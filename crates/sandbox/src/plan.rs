//! What a cell is to be, decided before anything is done.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use cofferdam_spec::{HostImage, Policy};
use nix::unistd::{Gid, Uid, User, chown, getegid, geteuid};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::Step;

/// Who the cell's programs are on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CellIds {
    /// User id, mapped to itself; never 0.
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

/// Why no plan could be made. At most the home directory has been created.
#[derive(Debug, Error)]
pub enum PlanError {
    /// The workspace cannot be used.
    #[error("workspace {path}: {reason}")]
    Workspace {
        /// The directory as given.
        path: PathBuf,
        /// Which rule it breaks.
        reason: &'static str,
    },
    /// A mount of the policy cannot be used.
    #[error("policy mounts.host = {path:?}: it must be an existing directory or file")]
    Mount {
        /// The host's path.
        path: String,
        /// The cause.
        #[source]
        source: io::Error,
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
        source: io::Error,
    },
}

/// Who the cell's programs are, given who serves and who owns the workspace. `primary_group` looks a user's group up.
fn cell_ids(
    server: (u32, u32),
    owner: u32,
    cell_uid: u32,
    primary_group: impl Fn(u32) -> Option<u32>,
) -> CellIds {
    match (server, owner) {
        ((0, _), 0) => CellIds { uid: cell_uid, gid: cell_uid, map_root_files: true },
        ((0, _), owner) => {
            let gid = primary_group(owner).filter(|gid| *gid != 0).unwrap_or(owner);
            CellIds { uid: owner, gid, map_root_files: false }
        }
        ((uid, gid), _) => CellIds { uid, gid, map_root_files: false },
    }
}

impl Plan {
    /// Decides who the cell's programs are, and makes `home` (mode 0700, owned by them) where it
    /// does not exist.
    pub fn prepare(
        workspace: &Path,
        home: &Path,
        image: HostImage,
        policy: Policy,
    ) -> Result<Plan, PlanError> {
        let io = |operation, path: &Path| {
            let path = path.to_owned();
            move |source| PlanError::Io { operation, path, source }
        };
        let refuse = |reason| Err(PlanError::Workspace { path: workspace.to_owned(), reason });
        let real = workspace.canonicalize().map_err(io("resolve", workspace))?;
        let metadata = real.metadata().map_err(io("stat", &real))?;
        if !metadata.is_dir() {
            return refuse("it is not a directory");
        }
        if real.to_str().is_none() || home.to_str().is_none() {
            return refuse("its path, or the state directory's, is not UTF-8: rename it");
        }
        if real == Path::new("/") {
            return refuse("the root directory cannot be a workspace: name a directory below it");
        }
        for mount in &policy.mounts {
            std::fs::metadata(&mount.host)
                .map_err(|source| PlanError::Mount { path: mount.host.clone(), source })?;
        }
        let server = (geteuid().as_raw(), getegid().as_raw());
        let ids = cell_ids(server, metadata.uid(), policy.cell.uid, |uid| {
            User::from_uid(Uid::from_raw(uid)).ok().flatten().map(|user| user.gid.as_raw())
        });
        if !home.is_dir() {
            std::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(home)
                .map_err(io("create", home))?;
        }
        // A command may have taken its own rights away.
        std::fs::set_permissions(home, Permissions::from_mode(0o700)).map_err(io("chmod", home))?;
        if server.0 == 0 {
            chown(home, Some(Uid::from_raw(ids.uid)), Some(Gid::from_raw(ids.gid)))
                .map_err(|errno| io("chown", home)(errno.into()))?;
        }
        let home = home.canonicalize().map_err(io("resolve", home))?;
        Ok(Plan { workspace: real, home, image, policy, ids, fail_at: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cell_is_never_root_and_owns_the_workspace() {
        let group = |uid| (uid == 1000).then_some(100);
        let ids = |uid, gid, map_root_files| CellIds { uid, gid, map_root_files };
        let table = [
            // Ordinary server: itself, whoever owns the directory.
            (((1000, 1000), 1000), ids(1000, 1000, false)),
            (((1000, 1000), 0), ids(1000, 1000, false)),
            // Root: the owner, with the owner's group, never root's.
            (((0, 0), 1000), ids(1000, 100, false)),
            (((0, 0), 1001), ids(1001, 1001, false)),
            // Root's own workspace: an id that nobody has.
            (((0, 0), 0), ids(60989, 60989, true)),
        ];
        for ((server, owner), expected) in table {
            assert_eq!(cell_ids(server, owner, 60989, group), expected, "{server:?} {owner}");
        }
    }

    #[test]
    fn the_root_directory_and_files_are_refused() {
        let prepare = |path: &str| {
            let image = HostImage { name: "host".into(), directories: vec![], etc: vec![] };
            Plan::prepare(Path::new(path), Path::new("/nonexistent"), image, Policy::default())
        };
        assert!(matches!(prepare("/"), Err(PlanError::Workspace { .. })));
        assert!(matches!(prepare("/etc/passwd"), Err(PlanError::Workspace { .. })));
        assert!(matches!(prepare("/no/such"), Err(PlanError::Io { operation: "resolve", .. })));
    }
}
