//! Pages that are made from the program: what a model is told of the tools.

use std::fs;

use anyhow::{Context as _, ensure};

use crate::stage::cargo;

/// The page of the tools.
const TOOLS: &str = "docs/tools.md";

/// Writes the pages.
pub(crate) fn write() -> anyhow::Result<()> {
    fs::create_dir_all("docs").context("make docs")?;
    fs::write(TOOLS, tools()?).with_context(|| format!("write {TOOLS}"))
}

/// Fails when a page is not what the program says.
pub(crate) fn check() -> anyhow::Result<()> {
    let page = fs::read_to_string(TOOLS).with_context(|| format!("read {TOOLS}"))?;
    ensure!(page == tools()?, "{TOOLS} is not what the tools say: run `cargo xtask docs`");
    Ok(())
}

fn tools() -> anyhow::Result<String> {
    let mut command = cargo(&["run", "--release", "--locked", "--quiet", "-p", "cofferdam-cli"]);
    let output = command.args(["--", "tools", "--markdown"]).output().context("start cargo")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}: {errors}", output.status);
    String::from_utf8(output.stdout).context("the page is no UTF-8")
}
