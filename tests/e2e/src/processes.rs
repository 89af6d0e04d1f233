//! The host's processes, read from `/proc`.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

/// One process as the host sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Its id.
    pub pid: i32,
    /// Its parent's id.
    pub parent: i32,
    /// Start time in clock ticks since boot: with the id it names a process for ever.
    pub start: u64,
    /// State letter.
    pub state: char,
    /// Command line, its arguments separated by spaces; empty for a zombie.
    pub command_line: String,
    /// `pid:[inode]` of the namespace it is in; empty when it is gone.
    pub pid_namespace: String,
    /// `mnt:[inode]`.
    pub mount_namespace: String,
    /// Its ids from the host's namespace inwards.
    pub ids: Vec<i32>,
}

impl Process {
    fn read(pid: i32) -> Option<Process> {
        let directory = format!("/proc/{pid}");
        let stat = fs::read_to_string(format!("{directory}/stat")).ok()?;
        let (_, rest) = stat.rsplit_once(") ")?;
        let fields: Vec<&str> = rest.split(' ').collect();
        let status = fs::read_to_string(format!("{directory}/status")).ok()?;
        let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
        let namespace = |kind| {
            fs::read_link(Path::new(&directory).join("ns").join(kind))
                .map(|target| target.to_string_lossy().into_owned())
                .unwrap_or_default()
        };
        let command_line = fs::read(format!("{directory}/cmdline")).unwrap_or_default();
        Some(Process {
            pid,
            parent: fields.get(1)?.parse().ok()?,
            start: fields.get(19)?.parse().ok()?,
            state: fields.first()?.chars().next()?,
            command_line: String::from_utf8_lossy(&command_line)
                .replace('\0', " ")
                .trim()
                .to_owned(),
            pid_namespace: namespace("pid"),
            mount_namespace: namespace("mnt"),
            ids: ids.split_whitespace().filter_map(|id| id.parse().ok()).collect(),
        })
    }
}

/// Every process that could be read.
pub fn all_processes() -> Vec<Process> {
    let entries = fs::read_dir("/proc").expect("/proc is mounted");
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(Process::read)
        .collect()
}

/// The processes below `pid`, without itself.
pub fn descendants(pid: i32) -> Vec<Process> {
    let mut found = HashSet::from([pid]);
    let mut all = all_processes();
    let mut below = Vec::new();
    loop {
        let (children, others): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|process| found.contains(&process.parent));
        if children.is_empty() {
            return below;
        }
        found.extend(children.iter().map(|process| process.pid));
        below.extend(children);
        all = others;
    }
}
