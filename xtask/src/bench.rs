//! `cargo xtask bench`: what a call costs, beside bare spawning and bubblewrap.
//!
//! Everything that is compared is measured in turns within one run, so that a busy machine is busy
//! for all of it. It runs as root and as an ordinary user. A budget that is missed is shown, not
//! an error: on a shared machine a figure says little alone.

mod daemon;
mod files;
mod measure;
mod stats;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};

use crate::stage::{cargo, succeed};
use crate::test::binary;
use daemon::Daemon;
use stats::Summary;

/// The ordinary user.
const USER: u32 = 1000;

/// Idle daemons that are weighed; the median counts.
const IDLE_DAEMONS: usize = 3;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Also write every figure to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Rounds of the latency measurement.
    #[arg(long, value_name = "N", default_value_t = 300)]
    rounds: usize,
    /// Measure as whoever this is, with the `cofferdam` in this directory, and print JSON.
    #[arg(long, hide = true, value_name = "DIR")]
    inner: Option<PathBuf>,
}

/// Everything that was measured as one user.
#[derive(Debug, Serialize, Deserialize)]
struct Figures {
    who: String,
    /// Milliseconds from the daemon's start to its first answer.
    start_ms: Summary,
    programs: Vec<Program>,
    files: files::Files,
    /// Mebibytes of daemon and cell, idle (proportional set size).
    idle_mib: Option<Summary>,
}

/// What was measured of one program.
#[derive(Debug, Serialize, Deserialize)]
struct Program {
    name: String,
    /// Milliseconds of a bare `posix_spawn` and wait, with the standard streams on `/dev/null`.
    spawn_ms: Summary,
    /// The same with both outputs read to their end.
    spawn_and_read_ms: Summary,
    execute_ms: Summary,
    bubblewrap_ms: Summary,
    /// Calls a second with many in flight.
    spawn_rate: Summary,
    execute_rate: Summary,
}

/// A figure with what it should be.
struct Budget {
    name: String,
    value: f64,
    unit: &'static str,
    limit: f64,
    /// Whether more is worse.
    at_most: bool,
}

impl Budget {
    fn is_kept(&self) -> bool {
        if self.at_most { self.value <= self.limit } else { self.value >= self.limit }
    }
}

/// Measures.
pub(crate) fn bench(args: &Args) -> anyhow::Result<()> {
    if let Some(directory) = &args.inner {
        let figures = measure::measure(directory, args.rounds)?;
        println!("{}", serde_json::to_string(&figures)?);
        return Ok(());
    }
    ensure!(
        rustix::process::geteuid().is_root(),
        "start it as root: it measures as root and as an ordinary user, and weighs idle cells"
    );
    succeed(&mut cargo(&["build", "--release", "--locked", "-p", "cofferdam-cli", "-p", "xtask"]))?;
    let directory = tempfile::Builder::new().prefix("cofferdam-bench-").tempdir()?;
    // The ordinary user must reach the programs.
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755))?;
    let xtask = binary().with_file_name("xtask");
    for program in [&binary(), &xtask] {
        let name = program.file_name().context("a program has a name")?;
        fs::copy(program, directory.path().join(name))?;
    }
    let mut all = Vec::new();
    for user in [None, Some(USER)] {
        let mut figures = run_inner(directory.path(), args.rounds, user)?;
        figures.idle_mib = Some(weigh(directory.path(), user)?);
        print(&figures);
        all.push(figures);
    }
    if let Some(path) = &args.json {
        fs::write(path, serde_json::to_string_pretty(&all)? + "\n")
            .with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

/// A command as `user`, or as root.
fn command(program: &Path, user: Option<u32>) -> Command {
    let Some(user) = user else { return Command::new(program) };
    let mut command = Command::new("setpriv");
    let id = user.to_string();
    command.args(["--reuid", &id, "--regid", &id, "--clear-groups", "--"]).arg(program);
    command
}

fn run_inner(directory: &Path, rounds: usize, user: Option<u32>) -> anyhow::Result<Figures> {
    let mut command = command(&directory.join("xtask"), user);
    command.args(["bench", "--rounds", &rounds.to_string(), "--inner"]).arg(directory);
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
    ensure!(output.status.success(), "measuring as {user:?}: {}", output.status);
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Weighs idle daemons with their cells.
fn weigh(directory: &Path, user: Option<u32>) -> anyhow::Result<Summary> {
    let mut mebibytes = Vec::new();
    for _ in 0..IDLE_DAEMONS {
        let place = measure::place(directory, user)?;
        let daemon = Daemon::start(command(&directory.join("cofferdam"), user), &place)?;
        mebibytes.push(daemon.idle_pss_bytes()? as f64 / (1024.0 * 1024.0));
    }
    Ok(Summary::of(&mut mebibytes))
}

fn budgets(figures: &Figures) -> Vec<Budget> {
    let at_most =
        |name: String, value, unit, limit| Budget { name, value, unit, limit, at_most: true };
    let at_least =
        |name: String, value, unit, limit| Budget { name, value, unit, limit, at_most: false };
    let mut budgets = Vec::new();
    for program in &figures.programs {
        let name = &program.name;
        let limit = if name == measure::TRUE { 2.0 } else { 1.5 };
        let (execute, spawn) = (&program.execute_ms, &program.spawn_ms);
        budgets.push(at_most(
            format!("Execute / bare spawn of {name}"),
            execute.median / spawn.median,
            "x",
            limit,
        ));
        budgets.push(at_least(
            format!("bubblewrap / Execute of {name}"),
            program.bubblewrap_ms.median / execute.median,
            "x",
            3.0,
        ));
        budgets.push(at_least(
            format!("rate of Execute / of bare spawn, {} in flight, {name}", measure::IN_FLIGHT),
            program.execute_rate.median / program.spawn_rate.median,
            "x",
            0.6,
        ));
    }
    let files = &figures.files;
    budgets.push(at_most("read_file of 1 KiB".into(), files.read_small_ms.median, "ms", 0.15));
    budgets.push(at_most(
        "write_file of 1 KiB / bare write, fsync, rename".into(),
        files.write_small_ms.median / files.bare_write_ms.median,
        "x",
        2.0,
    ));
    budgets.push(at_least("Read of 64 MiB".into(), files.read_large_gib.median, "GiB/s", 1.0));
    budgets.push(at_most(
        "grep of 10,000 files / rg in the cell".into(),
        files.grep_ms.median / files.rg_in_cell_ms.median,
        "x",
        1.15,
    ));
    budgets.push(at_most(
        "grep of 10,000 files / rg outside".into(),
        files.grep_ms.median / files.rg_bare_ms.median,
        "x",
        1.5,
    ));
    budgets.push(at_most(
        "glob of 10,000 files / rg --files outside".into(),
        files.glob_ms.median / files.rg_files_bare_ms.median,
        "x",
        1.3,
    ));
    budgets.push(at_most("start to first answer".into(), figures.start_ms.median, "ms", 30.0));
    if let Some(idle) = &figures.idle_mib {
        budgets.push(at_most("idle daemon and cell, PSS".into(), idle.median, "MiB", 16.0));
    }
    budgets
}

fn print(figures: &Figures) {
    println!("\nas {}", figures.who);
    println!("  {:<34} {:>9} {:>9}", "milliseconds", "median", "p95");
    let row = |name: &str, summary: &Summary| {
        println!("  {name:<34} {:>9.3} {:>9.3}", summary.median, summary.p95);
    };
    for program in &figures.programs {
        let name = &program.name;
        row(&format!("{name}: bare spawn"), &program.spawn_ms);
        row(&format!("{name}: bare spawn, output read"), &program.spawn_and_read_ms);
        row(&format!("{name}: Execute"), &program.execute_ms);
        row(&format!("{name}: bubblewrap"), &program.bubblewrap_ms);
    }
    row("start to first answer", &figures.start_ms);
    let files = &figures.files;
    row("read_file, 1 KiB", &files.read_small_ms);
    row("write_file, 1 KiB", &files.write_small_ms);
    row("bare write, fsync, rename", &files.bare_write_ms);
    row("grep, 10,000 files", &files.grep_ms);
    row("rg in the cell", &files.rg_in_cell_ms);
    row("rg outside", &files.rg_bare_ms);
    row("glob, 10,000 files", &files.glob_ms);
    row("rg --files in the cell", &files.rg_files_in_cell_ms);
    row("rg --files outside", &files.rg_files_bare_ms);
    row("Read of 64 MiB (GiB a second)", &files.read_large_gib);
    println!("  {:<34} {:>9} {:>9}", "calls a second", "median", "p95");
    for program in &figures.programs {
        row(&format!("{}: bare spawn", program.name), &program.spawn_rate);
        row(&format!("{}: Execute", program.name), &program.execute_rate);
    }
    println!("  {:<52} {:>8} {:>10}", "budget", "is", "should be");
    for budget in budgets(figures) {
        let Budget { name, value, unit, limit, at_most } = &budget;
        let sign = if *at_most { "<=" } else { ">=" };
        let verdict = if budget.is_kept() { "kept" } else { "MISSED" };
        println!("  {name:<52} {value:>6.2} {unit:<3} {sign} {limit:<5} {verdict}");
    }
}
