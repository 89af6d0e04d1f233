//! Directories that changed are written through to the disk soon.
//!
//! A file's content is on the disk before its name is changed, so a loss of power leaves the old
//! file or the new one, whole. Which of them is settled when its directory is on the disk as well.
//! That is not waited for (it would double what a small write costs), but done within
//! [`GATHER`], for all changes of that time together.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::resolve::identity_of;

/// How long changes are gathered.
const GATHER: Duration = Duration::from_millis(20);

/// Directories that may wait; beyond it a change waits for its own.
const WAITING_MAX: usize = 256;

/// Directories that wait to be written through.
#[derive(Debug)]
pub(crate) struct Syncs {
    /// `None` when there is no thread for them.
    queue: Option<SyncSender<OwnedFd>>,
}

impl Syncs {
    /// With a thread, which ends with this.
    pub(crate) fn start() -> Self {
        let (queue, waiting) = sync_channel(WAITING_MAX);
        let thread = thread::Builder::new().name("syncs".to_owned());
        let started = thread.spawn(move || write_through(&waiting));
        Self { queue: started.is_ok().then_some(queue) }
    }

    /// Writes `directory` through, soon; at once where nobody else can.
    pub(crate) fn soon(&self, directory: OwnedFd) {
        let left = match &self.queue {
            Some(queue) => queue.try_send(directory).err().map(|error| match error {
                std::sync::mpsc::TrySendError::Full(directory)
                | std::sync::mpsc::TrySendError::Disconnected(directory) => directory,
            }),
            None => Some(directory),
        };
        if let Some(directory) = left {
            // The change is done, and stays so unless the power fails now.
            let _ = rustix::fs::fsync(directory);
        }
    }
}

/// Takes directories until nobody sends any.
fn write_through(waiting: &Receiver<OwnedFd>) {
    while let Ok(first) = waiting.recv() {
        let until = Instant::now() + GATHER;
        let mut together = vec![first];
        while together.len() < WAITING_MAX
            && let Ok(next) = waiting.recv_timeout(until.saturating_duration_since(Instant::now()))
        {
            together.push(next);
        }
        let mut seen = HashSet::new();
        for directory in together {
            if identity_of(&directory).is_none_or(|identity| seen.insert(identity)) {
                // As above.
                let _ = rustix::fs::fsync(directory);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_directories_than_may_wait_are_all_taken() {
        let made = tempfile::tempdir().unwrap();
        let syncs = Syncs::start();
        for _ in 0..3 * WAITING_MAX {
            syncs.soon(std::fs::File::open(made.path()).unwrap().into());
        }
        let without_thread = Syncs { queue: None };
        without_thread.soon(std::fs::File::open(made.path()).unwrap().into());
        drop(syncs);
        // Every descriptor is closed in the end.
        let until = Instant::now() + Duration::from_secs(10);
        let held = || {
            let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
            open.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to == made.path()))
                .count()
        };
        while held() > 0 {
            assert!(Instant::now() < until, "{} descriptors are still open", held());
            thread::sleep(Duration::from_millis(5));
        }
    }
}
