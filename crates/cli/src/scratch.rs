//! Temporary directories for demonstrations and checks, on a file system that a cell can use.

use std::io;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// `statfs(2)`'s number of overlayfs, which refuses id-mapped mounts on top of it.
const OVERLAYFS: u64 = 0x794c_7630;

/// A directory that goes away with its value, holding an empty workspace and an empty state
/// directory beside each other.
pub(crate) struct Scratch {
    directory: TempDir,
    pub(crate) workspace: PathBuf,
    pub(crate) state: PathBuf,
    /// Why it is not in the usual place.
    pub(crate) note: Option<String>,
}

impl Scratch {
    /// Makes it.
    pub(crate) fn new() -> io::Result<Self> {
        let usual = std::env::temp_dir();
        let (base, note) = match shared_memory_instead_of(&usual)? {
            Some(other) => {
                let text = format!(
                    "{} is on overlayfs, which cannot show root's files to a cell; {} is used",
                    usual.display(),
                    other.display()
                );
                (other, Some(text))
            }
            None => (usual, None),
        };
        let directory = tempfile::Builder::new().prefix("cofferdam-").tempdir_in(base)?;
        let (workspace, state) =
            (directory.path().join("workspace"), directory.path().join("state"));
        std::fs::create_dir(&workspace)?;
        std::fs::create_dir(&state)?;
        Ok(Self { workspace: workspace.canonicalize()?, state, directory, note })
    }

    /// The directory that holds both.
    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// Another place, where root's files are on a file system that cannot be id-mapped.
fn shared_memory_instead_of(usual: &Path) -> io::Result<Option<PathBuf>> {
    let other = Path::new("/dev/shm");
    let overlay = u64::try_from(rustix::fs::statfs(usual)?.f_type) == Ok(OVERLAYFS);
    let root = rustix::process::geteuid().is_root();
    Ok((overlay && root && other.is_dir()).then(|| other.to_owned()))
}
