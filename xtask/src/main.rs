//! `cargo xtask`: the checks, tests and measurements of this repository.

#![forbid(unsafe_code)]

mod bench;
mod ci;
mod docs;
mod edges;
mod metadata;
mod stage;
mod supply;
mod test;
mod tools;

use std::path::PathBuf;

use clap::{Parser, Subcommand};

/// Checks, tests and measures this repository.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Format, lints, edges between crates, documentation, licences and sources.
    Ci,
    /// Makes the pages below docs/ from the program.
    Docs,
    /// Builds everything once and runs every test.
    Test,
    /// As `test`, with the long counts.
    Soak,
    /// Measures calls against bare spawning and against bubblewrap.
    Bench(bench::Args),
}

fn main() -> anyhow::Result<()> {
    std::env::set_current_dir(root())?;
    match Cli::parse().task {
        Task::Ci => ci::ci(),
        Task::Docs => docs::write(),
        Task::Test => test::test(test::Length::Usual),
        Task::Soak => test::test(test::Length::Soak),
        Task::Bench(args) => bench::bench(&args),
    }
}

/// The repository.
fn root() -> PathBuf {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("xtask lies in the repository").to_owned()
}
