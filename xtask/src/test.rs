//! `cargo xtask test` and `cargo xtask soak`: everything is built once, then every test runs.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::stage::{Stages, cargo};
use crate::tools;

/// How long the tests take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Length {
    /// Below ten minutes.
    Usual,
    /// The long counts.
    Soak,
}

/// Runs every test.
pub(crate) fn test(length: Length) -> anyhow::Result<()> {
    let mut stages = Stages::default();
    let python = stages.run("tools", tools::find)?;
    let build = ["build", "--release", "--workspace", "--all-targets", "--locked"];
    stages.command("build", &mut cargo(&build))?;
    let prepare = |command: &mut Command| {
        command.env("COFFERDAM_BIN", binary()).env("COFFERDAM_PYTHON", &python);
        if length == Length::Soak {
            command.env("COFFERDAM_SOAK", "1");
        }
    };
    let mut tests = if has_nextest() {
        cargo(&["nextest", "run", "--release", "--workspace", "--locked", "--no-fail-fast"])
    } else {
        eprintln!("cargo-nextest is not installed; cargo test runs the same tests");
        cargo(&["test", "--release", "--workspace", "--all-targets", "--locked", "--no-fail-fast"])
    };
    prepare(&mut tests);
    stages.command("tests", &mut tests)?;
    let mut doctests = cargo(&["test", "--release", "--workspace", "--doc", "--locked"]);
    prepare(&mut doctests);
    stages.command("tests in the documentation", &mut doctests)?;
    stages.command("tour", Command::new(binary()).arg("tour").stdout(Stdio::null()))?;
    stages.print();
    Ok(())
}

/// The built `cofferdam`.
pub(crate) fn binary() -> PathBuf {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    let target = std::path::absolute(target).expect("the current directory exists");
    target.join("release/cofferdam")
}

fn has_nextest() -> bool {
    let mut command = cargo(&["nextest", "--version"]);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}
