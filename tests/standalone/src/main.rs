//! `cell-standalone`: starts one cell without a daemon, on a given workspace, and ends it. With
//! `--fail-at STEP` that step of the recipe fails with EIO. It then looks at itself, and prints
//! what is left.
#![forbid(unsafe_code)]

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use cofferdam_cell::{LaunchError, launch};
use cofferdam_sandbox::{Plan, Step};
use cofferdam_spec::{HostImage, Policy};

const IMAGE: &str = include_str!("../../../sandbox-images/host/image.toml");

fn main() -> ExitCode {
    if let Some(code) = cofferdam_cell::run_if_launched() {
        return code;
    }
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cell-standalone: {error:#}");
            ExitCode::from(64)
        }
    }
}

fn name(step: Step) -> String {
    format!("{step:?}")
}

fn run() -> Result<()> {
    let mut workspace = None;
    let mut home = None;
    let mut fail_at = None;
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().with_context(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--workspace" => workspace = Some(PathBuf::from(value()?)),
            "--home" => home = Some(PathBuf::from(value()?)),
            "--fail-at" => {
                let wanted = value()?;
                let step = Step::ALL.iter().find(|step| name(**step) == wanted);
                fail_at = Some(*step.with_context(|| format!("no step {wanted:?}"))?);
            }
            "--list-steps" => {
                for step in Step::ALL {
                    println!("{step:?}\t{step}");
                }
                return Ok(());
            }
            _ => bail!("unknown argument {argument:?}"),
        }
    }
    let workspace = workspace.context("--workspace is missing")?;
    let home = home.context("--home is missing")?;
    let mut plan = Plan::prepare(&workspace, &home, HostImage::parse(IMAGE)?, Policy::default())?;
    plan.fail_at = fail_at;
    let before = Held::now()?;
    match launch(&plan) {
        Ok(cell) => {
            drop(cell);
            println!("ok");
        }
        Err(LaunchError::Setup(error)) => {
            println!("failed\t{:?}\t{}\n{error}", error.step, error.errno);
            let left = Held::now()?;
            println!(
                "left\tdescriptors {}\tchildren {}\tmounts {}",
                left.descriptors - before.descriptors,
                left.children - before.children,
                left.mounts - before.mounts
            );
        }
        Err(other) => bail!(other),
    }
    Ok(())
}

/// What this process holds.
struct Held {
    descriptors: isize,
    children: isize,
    mounts: isize,
}

impl Held {
    fn now() -> Result<Held> {
        let own = std::process::id();
        let mut children = 0;
        for entry in fs::read_dir("/proc")? {
            let stat = fs::read_to_string(entry?.path().join("stat")).unwrap_or_default();
            let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1));
            children += isize::from(parent == Some(own.to_string().as_str()));
        }
        Ok(Held {
            descriptors: fs::read_dir("/proc/self/fd")?.count() as isize,
            children,
            mounts: fs::read_to_string("/proc/self/mountinfo")?.lines().count() as isize,
        })
    }
}
