//! Named stages whose time is printed.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

/// The stages of one run, in order.
#[derive(Debug, Default)]
pub(crate) struct Stages {
    done: Vec<(String, Duration)>,
}

impl Stages {
    /// Runs a stage.
    pub(crate) fn run<T>(
        &mut self,
        name: &str,
        stage: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        eprintln!("== {name}");
        let before = Instant::now();
        let result = stage().with_context(|| format!("stage {name:?} failed"));
        self.done.push((name.to_owned(), before.elapsed()));
        result
    }

    /// Runs a program as a stage.
    pub(crate) fn command(&mut self, name: &str, command: &mut Command) -> anyhow::Result<()> {
        self.run(name, || succeed(command))
    }

    /// Prints the time of every stage.
    pub(crate) fn print(&self) {
        let total: Duration = self.done.iter().map(|(_, time)| *time).sum();
        eprintln!("== time of each stage");
        for (name, time) in &self.done {
            eprintln!("{:>8.1} s  {name}", time.as_secs_f64());
        }
        eprintln!("{:>8.1} s  together", total.as_secs_f64());
    }
}

/// `cargo` with arguments; the one that runs this.
pub(crate) fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args);
    command
}

/// Runs a program that must succeed.
pub(crate) fn succeed(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().with_context(|| format!("start {command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}
