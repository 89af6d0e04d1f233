//! Waiting for states, and counting what must not leak.

use std::collections::HashSet;
use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::processes::{Process, all_processes, descendants};

/// How often a state is looked at.
const POLL: Duration = Duration::from_millis(5);

/// Waits until `state` gives something; panics with `what` when the time is over.
#[track_caller]
pub fn wait_for<T>(
    what: &str,
    limit: Duration,
    mut state: impl FnMut() -> Option<T>,
) -> impl Future<Output = T> {
    let caller = std::panic::Location::caller();
    let what = what.to_owned();
    async move {
        let start = Instant::now();
        loop {
            if let Some(value) = state() {
                return value;
            }
            assert!(start.elapsed() < limit, "{caller}: not within {limit:?}: {what}");
            tokio::time::sleep(POLL).await;
        }
    }
}

/// An upper limit of time for an idle machine; three times that on a loaded one.
pub fn within(seconds: f64) -> Duration {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let running = load.split(' ').next().and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0);
    let processors = std::thread::available_parallelism().map_or(1, usize::from) as f64;
    Duration::from_secs_f64(if running > processors { 3.0 * seconds } else { seconds })
}

/// Resident memory of a process, in bytes.
pub fn resident_bytes(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the process lives");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("it has memory");
    let kibibytes: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kibibytes * 1024
}

/// Most processes of our own in an idle cell: toolbox, init, and for each of up to three sessions a
/// keeper and four idle shims.
const SUPERVISORS_MAX: usize = 2 + 3 * 5;

/// Most descriptors of init in an idle cell: its own, and a few for each keeper and shim.
const INIT_DESCRIPTORS_MAX: usize = 16 + 3 * SUPERVISORS_MAX;

/// What a daemon holds of the host. Two of an idle daemon are equal when nothing leaked between.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Footprint {
    /// Programs that calls started, zombies included.
    pub programs: usize,
    /// Processes of our own above [`SUPERVISORS_MAX`]; how many of these wait is not fixed.
    pub surplus_supervisors: usize,
    /// Descriptors of init above [`INIT_DESCRIPTORS_MAX`].
    pub surplus_init_descriptors: usize,
    /// Open descriptors of the daemon, without the job files that it retains for readers.
    pub descriptors: usize,
    /// Mounts that the host sees and that name the test's directory.
    pub host_mounts: usize,
    /// Mounts in the cell.
    pub cell_mounts: usize,
    /// Cgroup directories whose name is ours.
    pub cgroups: usize,
    /// Entries of the daemon's directory for temporary files.
    pub temporary_files: usize,
}

impl Footprint {
    /// Counts.
    pub fn of(daemon: i32, directory: &Path, temporary: &Path) -> Footprint {
        let below = descendants(daemon);
        let entries = |path: &Path| fs::read_dir(path).map_or(0, Iterator::count);
        let lines = |path: String, word: &str| {
            let text = fs::read_to_string(path).unwrap_or_default();
            text.lines().filter(|line| line.contains(word)).count()
        };
        let directory = directory.to_string_lossy();
        let own = |process: &&Process| process.command_line == "cofferdam-cell";
        let supervisors = below.iter().filter(own).count();
        let init =
            below.iter().find(|process| process.ids.len() > 1 && process.ids.last() == Some(&1));
        let init_descriptors =
            init.map_or(0, |init| entries(Path::new(&format!("/proc/{}/fd", init.pid))));
        Footprint {
            programs: below.len() - supervisors,
            surplus_supervisors: supervisors.saturating_sub(SUPERVISORS_MAX),
            surplus_init_descriptors: init_descriptors.saturating_sub(INIT_DESCRIPTORS_MAX),
            descriptors: descriptors(daemon, &format!("{directory}/state/jobs/")),
            host_mounts: lines("/proc/self/mountinfo".to_owned(), &directory),
            cell_mounts: below
                .iter()
                .map(|process| lines(format!("/proc/{}/mountinfo", process.pid), " "))
                .max()
                .unwrap_or(0),
            cgroups: cgroups(Path::new("/sys/fs/cgroup"), 0),
            temporary_files: entries(temporary),
        }
    }
}

/// Open descriptors of a process that do not lie below `retained`.
fn descriptors(pid: i32, retained: &str) -> usize {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let targets = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    targets.filter(|target| !target.to_string_lossy().starts_with(retained)).count()
}

/// Directories of the cgroup trees that carry our name.
fn cgroups(path: &Path, depth: usize) -> usize {
    if depth > 6 {
        return 0;
    }
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| {
            let ours = entry.file_name().to_string_lossy().contains("cofferdam");
            usize::from(ours) + cgroups(&entry.path(), depth + 1)
        })
        .sum()
}

/// The processes of a cell, remembered so that they can be looked for after their daemon's end.
#[derive(Debug, Clone)]
pub struct CellTrace {
    members: HashSet<(i32, u64)>,
    namespaces: HashSet<String>,
    /// Kept open, so that the kernel gives the numbers of these namespaces to no other.
    _held: Arc<Vec<File>>,
}

impl CellTrace {
    /// Remembers the cell below `daemon`.
    pub fn of(daemon: i32) -> CellTrace {
        let own = fs::read_link("/proc/self/ns/pid").expect("/proc is mounted");
        let own_mount = fs::read_link("/proc/self/ns/mnt").expect("/proc is mounted");
        let below = descendants(daemon);
        let paths = below.iter().flat_map(|process| {
            ["pid", "mnt"].map(|kind| format!("/proc/{}/ns/{kind}", process.pid))
        });
        let held = paths.filter_map(|path| File::open(path).ok()).collect();
        let mut namespaces: HashSet<String> = below
            .iter()
            .flat_map(|process| [process.pid_namespace.clone(), process.mount_namespace.clone()])
            .collect();
        for host in [own, own_mount] {
            namespaces.remove(host.to_string_lossy().as_ref());
        }
        namespaces.remove("");
        assert!(!namespaces.is_empty(), "the daemon has a cell: {below:?}");
        CellTrace {
            members: below.iter().map(|p| (p.pid, p.start)).collect(),
            namespaces,
            _held: Arc::new(held),
        }
    }

    /// What of the cell still lives. A zombie does not: after its daemon's end it is left to the
    /// host's init, which reaps in its own time.
    pub fn left(&self) -> Vec<Process> {
        all_processes()
            .into_iter()
            .filter(|process| process.state != 'Z')
            .filter(|process| {
                self.members.contains(&(process.pid, process.start))
                    || self.namespaces.contains(&process.pid_namespace)
                    || self.namespaces.contains(&process.mount_namespace)
            })
            .collect()
    }
}
