//! Directories that changed are written through to the disk soon.
//!
//! A file's content is on the disk before its name is changed, so a loss of power leaves the old
//! file or the new one, whole. Which of them is settled when its directory is on the disk as well.
//! That is not waited for (it would double what a small write costs), but done within
//! [`GATHER`], for all changes of that time together.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};

use crate::resolve::{identity, open_below};

/// How long changes are gathered.
const GATHER: Duration = Duration::from_millis(20);

/// Directories that may wait; beyond it a change waits for its own.
const WAITING_MAX: usize = 256;

/// Writes a directory through to the disk. That it cannot be is no reason to say that the change
/// failed: it is done, and stays so unless the power fails now.
type Through = Arc<dyn Fn(&OwnedFd) + Send + Sync>;

/// Directories that wait to be written through.
pub(crate) struct Syncs {
    /// `None` when there is no thread for them.
    queue: Option<SyncSender<OwnedFd>>,
    through: Through,
}

impl fmt::Debug for Syncs {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Syncs")
    }
}

impl Syncs {
    /// With a thread, which ends with this.
    pub(crate) fn start() -> Self {
        Self::with(Arc::new(|directory| {
            let _ = rustix::fs::fsync(directory);
        }))
    }

    /// As [`Syncs::start`], with `through` for the disk.
    pub(crate) fn with(through: Through) -> Self {
        let (queue, waiting) = sync_channel(WAITING_MAX);
        let thread = thread::Builder::new().name("syncs".to_owned());
        let shared = Arc::clone(&through);
        let started = thread.spawn(move || write_through(&waiting, &shared));
        Self { queue: started.is_ok().then_some(queue), through }
    }

    /// Writes `directory` through, soon; at once where nobody else can.
    pub(crate) fn soon(&self, directory: OwnedFd) {
        let left = match &self.queue {
            Some(queue) => queue.try_send(directory).err().map(|error| match error {
                TrySendError::Full(directory) | TrySendError::Disconnected(directory) => directory,
            }),
            None => Some(directory),
        };
        if let Some(directory) = left {
            (self.through)(&directory);
        }
    }

    /// As [`Syncs::soon`], for a directory that may be open as a place only. One that cannot be
    /// read cannot be written through.
    pub(crate) fn changed(&self, directory: &OwnedFd) {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        if let Ok(directory) = open_below(directory, OsStr::new("."), flags, Mode::empty()) {
            self.soon(directory);
        }
    }
}

/// Takes directories until nobody sends any.
fn write_through(waiting: &Receiver<OwnedFd>, through: &Through) {
    while let Ok(first) = waiting.recv() {
        let until = Instant::now() + GATHER;
        let mut together = vec![first];
        while together.len() < WAITING_MAX
            && let Ok(next) = waiting.recv_timeout(until.saturating_duration_since(Instant::now()))
        {
            together.push(next);
        }
        each_once(&together, through);
    }
}

/// Writes each of these directories through once, however often it is among them.
fn each_once(directories: &[OwnedFd], through: &Through) {
    let mut seen = HashSet::new();
    for directory in directories {
        let which = rustix::fs::fstat(directory).map(|stat| identity(&stat));
        if which.is_err() || which.is_ok_and(|which| seen.insert(which)) {
            through(directory);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::fs::{self, File};
    use std::os::unix::fs::MetadataExt as _;
    use std::path::PathBuf;
    use std::sync::mpsc::channel;

    use super::*;

    /// So many directories, and their numbers.
    fn made(count: usize) -> (tempfile::TempDir, Vec<(PathBuf, u64)>) {
        let made = tempfile::tempdir().unwrap();
        let one = |number: usize| {
            let path = made.path().join(number.to_string());
            fs::create_dir(&path).unwrap();
            let number = fs::metadata(&path).unwrap().ino();
            (path, number)
        };
        let all = (0..count).map(one).collect();
        (made, all)
    }

    /// Tells the number of each directory that is written through. Ends when nobody can do that any
    /// more.
    fn telling() -> (Through, Receiver<u64>) {
        let (tell, told) = channel();
        let through = move |directory: &OwnedFd| {
            tell.send(rustix::fs::fstat(directory).unwrap().st_ino).unwrap();
        };
        (Arc::new(through), told)
    }

    fn open(path: &PathBuf) -> OwnedFd {
        File::open(path).unwrap().into()
    }

    #[test]
    fn of_those_that_wait_together_each_is_written_through_once() {
        let (_held, all) = made(5);
        let (through, told) = telling();
        let three_times: Vec<OwnedFd> =
            [&all, &all, &all].into_iter().flatten().map(|(path, _)| open(path)).collect();
        each_once(&three_times, &through);
        drop(through);
        let expected: Vec<u64> = all.iter().map(|(_, number)| *number).collect();
        assert_eq!(told.iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn none_is_forgotten_of_more_than_may_wait() {
        const TIMES: usize = 20;
        let (_held, all) = made(WAITING_MAX / 4);
        let (through, told) = telling();
        let syncs = Syncs::with(through);
        for _ in 0..TIMES {
            all.iter().for_each(|(path, _)| syncs.soon(open(path)));
        }
        drop(syncs);
        let mut times = HashMap::new();
        told.iter().for_each(|number| *times.entry(number).or_insert(0) += 1);
        for (path, number) in &all {
            let times = times.remove(number).unwrap_or(0);
            assert!((1..=TIMES).contains(&times), "{times} times: {}", path.display());
        }
        assert_eq!(times, HashMap::new());
    }

    #[test]
    fn without_a_thread_it_is_done_at_once() {
        let (_held, all) = made(1);
        let (through, told) = telling();
        let syncs = Syncs { queue: None, through };
        syncs.soon(open(&all[0].0));
        assert_eq!(told.try_recv(), Ok(all[0].1));
        syncs.changed(&open(&all[0].0));
        assert_eq!(told.try_recv(), Ok(all[0].1));
    }
}
