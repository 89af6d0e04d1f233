//! Where the programs under test are.

use std::env;
use std::path::{Path, PathBuf};

/// `cofferdam`: `COFFERDAM_BIN`, or the file of that name in the target directory of this test.
pub fn binary() -> PathBuf {
    match env::var_os("COFFERDAM_BIN") {
        Some(path) => existing(PathBuf::from(path)),
        None => beside_the_test("cofferdam"),
    }
}

/// `probe`, our own program that tries forbidden things.
pub fn probe() -> PathBuf {
    beside_the_test("probe")
}

/// `cell-standalone`, which starts a cell without a daemon.
pub fn standalone() -> PathBuf {
    beside_the_test("cell-standalone")
}

fn beside_the_test(name: &str) -> PathBuf {
    let test = env::current_exe().expect("the test knows its own path");
    let profile = test.parent().and_then(Path::parent).expect("a test lies in <target>/deps");
    existing(profile.join(name))
}

fn existing(path: PathBuf) -> PathBuf {
    assert!(
        path.is_file(),
        "{} does not exist: run `cargo xtask test`, or first \
         `cargo build --release --workspace --bins`",
        path.display()
    );
    path
}
