//! The directories of a workspace: itself, and the state that its daemon keeps outside of it.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use cofferdam_client_grpc::{AddressError, UnixAddress};
use etcetera::BaseStrategy as _;
use sha2::{Digest as _, Sha256};
use thiserror::Error;

use crate::text;

/// Bytes of the workspace's digest in the name of its state directory (16 hexadecimal digits).
const NAME_DIGEST_BYTES: usize = 8;

/// Why the directories cannot be used. Nothing has been changed.
#[derive(Debug, Error)]
pub(crate) enum StateError {
    /// A file operation failed.
    #[error("{operation} {path}")]
    Io {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Not a directory.
    #[error("workspace {0} is not a directory")]
    NotADirectory(PathBuf),
    /// The whole host.
    #[error("workspace / is refused: it is the whole host, nothing would be kept away")]
    Root,
    /// What the daemon trusts would be writable by the cell.
    #[error("{what} {inner} lies inside the workspace {workspace}, where the cell can change it")]
    Inside { what: &'static str, inner: PathBuf, workspace: PathBuf },
    /// The cell would see the daemon's own files.
    #[error("workspace {workspace} lies inside the state directory {state}")]
    WorkspaceInState { workspace: PathBuf, state: PathBuf },
    /// Somebody else's.
    #[error("state directory {path} belongs to user {owner}, not to user {user}")]
    Owner { path: PathBuf, owner: u32, user: u32 },
    /// No home directory.
    #[error("no home directory is known for the state of workspaces; name one with --state")]
    NoHome,
    /// The address file holds no address.
    #[error(transparent)]
    Address(#[from] AddressError),
}

/// Attaches what was tried, and on what.
fn failed(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StateError {
    let path = path.to_owned();
    move |source| StateError::Io { operation, path, source }
}

/// The workspace's real path, when it can be a workspace.
pub(crate) fn workspace(path: &Path) -> Result<PathBuf, StateError> {
    let real = path.canonicalize().map_err(failed("open workspace", path))?;
    if !real.metadata().map_err(failed("open workspace", path))?.is_dir() {
        return Err(StateError::NotADirectory(real));
    }
    if real == Path::new("/") {
        return Err(StateError::Root);
    }
    Ok(real)
}

/// Refuses a path of the daemon's that the cell could change.
pub(crate) fn outside(what: &'static str, path: &Path, workspace: &Path) -> Result<(), StateError> {
    let inner = real_path(path)?;
    if inner.starts_with(workspace) {
        let workspace = workspace.to_owned();
        return Err(StateError::Inside { what, inner, workspace });
    }
    Ok(())
}

/// The real path of something that may not exist yet: that of its nearest existing ancestor, and
/// the rest.
fn real_path(path: &Path) -> Result<PathBuf, StateError> {
    let absolute = std::path::absolute(path).map_err(failed("resolve", path))?;
    let mut missing: Vec<OsString> = Vec::new();
    let mut existing = absolute.as_path();
    loop {
        match existing.canonicalize() {
            Ok(real) => return Ok(missing.iter().rev().fold(real, |real, name| real.join(name))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // A name that ends in `..` has no meaning before it exists.
                let (Some(name), Some(parent)) = (existing.file_name(), existing.parent()) else {
                    return Err(failed("resolve", path)(error));
                };
                missing.push(name.to_owned());
                existing = parent;
            }
            Err(error) => return Err(failed("resolve", path)(error)),
        }
    }
}

/// The state directory of one workspace.
#[derive(Debug, Clone)]
pub(crate) struct StateDir {
    path: PathBuf,
}

impl StateDir {
    /// Finds it: `chosen`, or by the workspace's real path. Makes nothing.
    pub(crate) fn locate(workspace: &Path, chosen: Option<&Path>) -> Result<Self, StateError> {
        let path = match chosen {
            Some(path) => path.to_owned(),
            None => {
                let base = etcetera::choose_base_strategy().map_err(|_| StateError::NoHome)?;
                let base = base.state_dir().ok_or(StateError::NoHome)?;
                base.join("cofferdam").join(name(workspace))
            }
        };
        outside("state directory", &path, workspace)?;
        let path = real_path(&path)?;
        if workspace.starts_with(&path) {
            let workspace = workspace.to_owned();
            return Err(StateError::WorkspaceInState { workspace, state: path });
        }
        Ok(Self { path })
    }

    /// Makes it where it does not exist, for its owner alone.
    pub(crate) fn create(&self) -> Result<(), StateError> {
        let path = &self.path;
        let create = failed("create state directory", path);
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(create)?;
        let found = fs::metadata(path).map_err(failed("examine", path))?;
        let user = rustix::process::geteuid().as_raw();
        if found.uid() != user {
            return Err(StateError::Owner { path: path.clone(), owner: found.uid(), user });
        }
        if found.mode() & 0o777 != 0o700 {
            let mode = fs::Permissions::from_mode(0o700);
            fs::set_permissions(path, mode).map_err(failed("close to others", path))?;
        }
        Ok(())
    }

    /// The directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Where the daemon listens, unless told otherwise.
    pub(crate) fn socket(&self) -> Result<UnixAddress, AddressError> {
        UnixAddress::new(&self.path.join("daemon.sock"))
    }

    /// Held for the daemon's life.
    pub(crate) fn lock_file(&self) -> PathBuf {
        self.path.join("lock")
    }

    /// Held while a daemon is being started, by whoever starts it and by the daemon itself.
    pub(crate) fn start_lock_file(&self) -> PathBuf {
        self.path.join("start.lock")
    }

    /// Where a detached daemon's standard error goes.
    pub(crate) fn log_file(&self) -> PathBuf {
        self.path.join("daemon.log")
    }

    /// What becomes `/home/agent`.
    pub(crate) fn home(&self) -> PathBuf {
        self.path.join("home")
    }

    fn address_file(&self) -> PathBuf {
        self.path.join("address")
    }

    /// The address of the workspace's daemon, as it last published it.
    pub(crate) fn read_address(&self) -> Result<Option<UnixAddress>, StateError> {
        let path = self.address_file();
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(UnixAddress::parse(text.trim_end())?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed("read", &path)(error)),
        }
    }

    /// Publishes the address, all of it at once. The caller holds the lock and listens already.
    pub(crate) fn publish(&self, address: &UnixAddress) -> Result<(), StateError> {
        let path = self.address_file();
        let new = self.path.join("address.new");
        fs::write(&new, format!("{address}\n")).map_err(failed("write", &new))?;
        fs::rename(&new, &path).map_err(failed("publish", &path))
    }

    /// Takes the address back, so that clients no longer come here.
    pub(crate) fn withdraw(&self) -> Result<(), StateError> {
        let path = self.address_file();
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(failed("remove", &path)(error))
            }
            _ => Ok(()),
        }
    }
}

/// Name of a workspace's state directory.
fn name(workspace: &Path) -> String {
    text::hex(&Sha256::digest(workspace.as_os_str().as_bytes())[..NAME_DIGEST_BYTES])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_is_the_first_16_digits_of_the_paths_digest() {
        // printf %s /srv/project | sha256sum
        assert_eq!(name(Path::new("/srv/project")), "4f3f91f6b0b47e3b");
    }

    #[test]
    fn a_state_directory_in_the_workspace_is_refused_however_it_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let workspace = dir.path().canonicalize().unwrap().join("w");
        fs::create_dir(&workspace).unwrap();
        std::os::unix::fs::symlink(&workspace, dir.path().join("link")).unwrap();
        for inside in ["w", "w/a/b", "link/a", "w/../w/a"] {
            let error = StateDir::locate(&workspace, Some(&dir.path().join(inside))).unwrap_err();
            assert!(matches!(error, StateError::Inside { .. }), "{inside}: {error}");
        }
        let error = StateDir::locate(&workspace, Some(dir.path())).unwrap_err();
        assert!(matches!(error, StateError::WorkspaceInState { .. }), "{error}");
        let state = StateDir::locate(&workspace, Some(&dir.path().join("s/t"))).unwrap();
        assert!(!state.path().exists());
        state.create().unwrap();
        assert_eq!(fs::metadata(state.path()).unwrap().mode() & 0o777, 0o700);
    }

    #[test]
    fn what_is_no_directory_is_no_workspace() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        fs::write(&file, "").unwrap();
        assert!(matches!(workspace(&file), Err(StateError::NotADirectory(_))));
        assert!(matches!(workspace(Path::new("/")), Err(StateError::Root)));
        assert!(matches!(workspace(&dir.path().join("no")), Err(StateError::Io { .. })));
    }

    #[test]
    fn an_address_is_published_and_withdrawn() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir { path: dir.path().to_owned() };
        assert_eq!(state.read_address().unwrap(), None);
        let address = state.socket().unwrap();
        state.publish(&address).unwrap();
        assert_eq!(state.read_address().unwrap(), Some(address));
        state.withdraw().unwrap();
        state.withdraw().unwrap();
        assert_eq!(state.read_address().unwrap(), None);
    }
}
