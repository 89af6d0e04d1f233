//! A daemon that is measured.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use cofferdam_client_grpc::UnixAddress;

/// After this time without a call the daemon counts as idle.
const SETTLE: Duration = Duration::from_millis(500);

/// Where a daemon is started.
pub(crate) struct Place {
    pub(crate) workspace: PathBuf,
    pub(crate) state: PathBuf,
    /// Keeps the directories.
    pub(crate) _directory: tempfile::TempDir,
}

/// A running daemon. Dropping it kills it, and with it its cell.
pub(crate) struct Daemon {
    child: Child,
    pub(crate) address: UnixAddress,
    /// When it was started.
    pub(crate) since: Instant,
}

impl Daemon {
    /// Starts it with `command`, which runs `cofferdam`, and waits until it serves.
    pub(crate) fn start(mut command: Command, place: &Place) -> anyhow::Result<Self> {
        command.arg("serve").arg("--workspace").arg(&place.workspace);
        command.arg("--state").arg(&place.state);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let since = Instant::now();
        let mut child = command.spawn().context("start the daemon")?;
        let mut said = String::new();
        let stderr = child.stderr.take().context("standard error is a pipe")?;
        let address = UnixAddress::new(&place.state.join("daemon.sock"))?;
        let daemon = Self { child, address, since };
        let mut lines = BufReader::new(stderr);
        while !said.contains("cofferdam: serving ") {
            let read = lines.read_line(&mut said)?;
            ensure!(read > 0, "the daemon does not start: {said}");
        }
        Ok(daemon)
    }

    /// The proportional set size of daemon and cell, once nothing happens any more.
    pub(crate) fn idle_pss_bytes(&self) -> anyhow::Result<u64> {
        std::thread::sleep(SETTLE);
        descendants(self.child.id())?.into_iter().map(pss_bytes).sum()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended by itself; either way it is reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A process and all below it.
fn descendants(root: u32) -> anyhow::Result<BTreeSet<u32>> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // A process may end while it is looked at.
        let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
        let after_name = stat.rsplit_once(')').context("stat holds a name in brackets")?.1;
        let parent = after_name.split_whitespace().nth(1).context("stat holds the parent")?;
        children.entry(parent.parse()?).or_default().push(pid);
    }
    let mut found = BTreeSet::new();
    let mut open = vec![root];
    while let Some(pid) = open.pop() {
        if found.insert(pid) {
            open.extend(children.get(&pid).into_iter().flatten());
        }
    }
    Ok(found)
}

fn pss_bytes(pid: u32) -> anyhow::Result<u64> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
    let Some(kibibytes) = line.and_then(|rest| rest.trim().strip_suffix(" kB")) else {
        bail!("{path} has no Pss");
    };
    Ok(kibibytes.trim().parse::<u64>()? * 1024)
}
