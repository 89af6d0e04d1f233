//! Trees and replies for tests.

use std::ffi::OsStr;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, Ordering};

use crate::call::{Account, Answer};
use crate::serve::{Gone, Reply};

/// Keeps what is sent.
pub(crate) struct Kept {
    pub(crate) answers: Mutex<Vec<Answer>>,
    /// Looks after which nobody waits any more.
    looks: AtomicI64,
}

impl Kept {
    pub(crate) fn new() -> Self {
        Self::for_looks(i64::MAX)
    }

    pub(crate) fn for_looks(looks: i64) -> Self {
        Self { answers: Mutex::default(), looks: AtomicI64::new(looks) }
    }
}

impl Reply for Kept {
    fn send(&self, answer: Answer, _: Option<OwnedFd>) -> Result<(), Gone> {
        self.answers.lock().unwrap().push(answer);
        Ok(())
    }

    fn is_wanted(&self) -> bool {
        self.looks.fetch_sub(1, Ordering::Relaxed) > 0
    }
}

/// A directory with files.
pub(crate) struct Tree {
    _made: tempfile::TempDir,
    pub(crate) root: PathBuf,
}

impl Tree {
    /// An empty one.
    pub(crate) fn new() -> Self {
        let made = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(made.path()).unwrap();
        // Also for threads of another user.
        fs::set_permissions(&root, fs::Permissions::from_mode(0o755)).unwrap();
        Self { _made: made, root }
    }

    /// One with these files, each with one line.
    pub(crate) fn with(files: &[&str]) -> Self {
        let tree = Self::new();
        for file in files {
            tree.write(file, "needle\n");
        }
        tree
    }

    /// Writes a file, with its directories.
    pub(crate) fn write(&self, path: impl AsRef<[u8]>, content: impl AsRef<[u8]>) {
        let path = self.root.join(OsStr::from_bytes(path.as_ref()));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// A path in it.
    pub(crate) fn path(&self, below: &str) -> String {
        let path = if below.is_empty() { self.root.clone() } else { self.root.join(below) };
        path.to_str().unwrap().to_owned()
    }

    /// A path that was told, from the root on; bytes that are no text are replaced.
    pub(crate) fn below(&self, path: &[u8]) -> String {
        let prefix = [self.root.as_os_str().as_bytes(), b"/"].concat();
        let path = path.strip_prefix(prefix.as_slice()).expect("a path in the tree");
        String::from_utf8_lossy(path).into_owned()
    }
}

/// Files that an account tells of.
pub(crate) fn sum(account: &Account) -> u64 {
    let Account { searched, ignored, hidden, binary, too_large, unreadable, .. } = account;
    searched
        + ignored
        + hidden
        + binary
        + too_large
        + unreadable
        + account.non_utf8_name
        + account.special
}

/// Runs `work` as a user whom modes of files stop, whoever runs the tests.
pub(crate) fn as_ordinary_user<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            if rustix::process::geteuid().is_root() {
                let nobody = rustix::process::Uid::from_raw(65534);
                rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
            }
            work()
        });
        thread.join().unwrap()
    })
}
