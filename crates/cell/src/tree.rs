//! The processes of the cell, as init's own `/proc` shows them.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::os::fd::AsFd;

use cofferdam_sys::send_signal;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// One process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    pub(crate) parent: i32,
    pub(crate) group: i32,
    /// Whether it has ended and only waits to be reaped. A process whose first thread has ended
    /// shows the same state while its other threads go on: it is none.
    zombie: bool,
    /// Clock ticks since boot: tells a process from a later one with the same id.
    started: u64,
}

/// Every process of the pid namespace at one time.
#[derive(Debug)]
pub(crate) struct Table {
    processes: Vec<Process>,
}

impl Table {
    /// Reads `/proc`. Processes that end meanwhile are left out.
    pub(crate) fn read() -> io::Result<Self> {
        let mut processes = Vec::new();
        for entry in fs::read_dir("/proc")? {
            let name = entry?.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
            processes.extend(read_process(pid));
        }
        Ok(Self { processes })
    }

    /// The processes below `root`, without it. Zombies are left out: nothing can be done to them.
    pub(crate) fn below(&self, root: i32) -> Vec<Process> {
        self.below_all([root].into())
    }

    /// The processes that `init` must not have: its children that are not `known`, and all below.
    /// `None` when there is none, not even one that waits to be reaped.
    pub(crate) fn strays(&self, init: i32, known: &HashSet<i32>) -> Option<Vec<Process>> {
        let stray = |process: &&Process| process.parent == init && !known.contains(&process.pid);
        let roots: Vec<Process> = self.processes.iter().filter(stray).copied().collect();
        if roots.is_empty() {
            return None;
        }
        let below = self.below_all(roots.iter().map(|process| process.pid).collect());
        Some(roots.into_iter().filter(|process| !process.zombie).chain(below).collect())
    }

    fn below_all(&self, roots: HashSet<i32>) -> Vec<Process> {
        let mut children: HashMap<i32, Vec<&Process>> = HashMap::new();
        for process in &self.processes {
            children.entry(process.parent).or_default().push(process);
        }
        let mut found = Vec::new();
        let mut open: Vec<i32> = roots.into_iter().collect();
        // Each process has one parent, so this ends.
        while let Some(parent) = open.pop() {
            for child in children.remove(&parent).unwrap_or_default() {
                open.push(child.pid);
                if !child.zombie {
                    found.push(*child);
                }
            }
        }
        found
    }
}

/// Sends signal `number` to just this process, not to a later one with its id. Whether it was reached.
pub(crate) fn signal(process: &Process, number: i32) -> bool {
    let Some(pid) = Pid::from_raw(process.pid) else { return false };
    let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else { return false };
    let same = read_process(process.pid).is_some_and(|now| now.started == process.started);
    same && send_signal(pidfd.as_fd(), number).is_ok()
}

fn read_process(pid: i32) -> Option<Process> {
    parse(pid, &fs::read(format!("/proc/{pid}/stat")).ok()?)
}

/// Parses `/proc/PID/stat`; the name, which may hold anything, ends at the last parenthesis.
fn parse(pid: i32, stat: &[u8]) -> Option<Process> {
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    let text = std::str::from_utf8(&stat[end + 1..]).ok()?;
    let fields: Vec<&str> = text.split_ascii_whitespace().collect();
    let threads: u32 = fields.get(17)?.parse().ok()?;
    Some(Process {
        pid,
        zombie: matches!(*fields.first()?, "Z" | "X") && threads <= 1,
        parent: fields.get(1)?.parse().ok()?,
        group: fields.get(2)?.parse().ok()?,
        started: fields.get(19)?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(rows: &[(i32, i32, bool)]) -> Table {
        let process = |(pid, parent, zombie): &(i32, i32, bool)| Process {
            pid: *pid,
            parent: *parent,
            group: *pid,
            zombie: *zombie,
            started: 0,
        };
        Table { processes: rows.iter().map(process).collect() }
    }

    fn pids(mut processes: Vec<Process>) -> Vec<i32> {
        processes.sort_by_key(|process| process.pid);
        processes.iter().map(|process| process.pid).collect()
    }

    #[test]
    fn a_tree_is_everything_below_its_root_but_zombies() {
        let table =
            table(&[(2, 1, false), (3, 2, false), (4, 3, true), (5, 4, false), (6, 1, false)]);
        assert_eq!(pids(table.below(2)), [3, 5]);
        assert_eq!(pids(table.below(6)), []);
    }

    #[test]
    fn strays_are_inits_unknown_children_and_all_below() {
        let table =
            table(&[(2, 1, false), (3, 2, false), (7, 1, false), (8, 7, false), (9, 1, true)]);
        assert_eq!(pids(table.strays(1, &[2].into()).unwrap()), [7, 8]);
        assert_eq!(pids(table.strays(1, &[2, 7].into()).unwrap()), []);
        assert_eq!(table.strays(1, &[2, 7, 9].into()), None);
    }

    #[test]
    fn a_name_with_parentheses_and_spaces_is_no_problem() {
        let stat = b"7 (a) R 1 (x) S 5 6 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4321 0 0";
        let expected = Process { pid: 7, parent: 5, group: 6, zombie: false, started: 4321 };
        assert_eq!(parse(7, stat), Some(expected));
        assert_eq!(parse(7, b"7 (a"), None);
    }

    #[test]
    fn a_process_that_outlives_its_first_thread_is_no_zombie() {
        let stat =
            |threads| format!("7 (a) Z 5 6 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 {threads} 0 4321 0");
        assert!(!parse(7, stat(2).as_bytes()).unwrap().zombie);
        assert!(parse(7, stat(1).as_bytes()).unwrap().zombie);
        assert!(parse(7, stat(0).as_bytes()).unwrap().zombie);
    }

    #[test]
    fn the_running_process_is_found_below_its_parent() {
        let own = std::process::id() as i32;
        let parent = read_process(own).unwrap().parent;
        assert!(pids(Table::read().unwrap().below(parent)).contains(&own));
    }
}
