//! The directories of finished jobs: the newest ones stay, so that a few noisy commands cannot fill
//! the cell's /tmp for ever.
//!
//! Only finished jobs are counted here. One that still runs has its directory for itself, and is
//! told once its last byte has come.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use cofferdam_files::call::FaultKind;
use cofferdam_spec::SessionId;

use crate::files::{Caller, FileError, Files, Overwrite};

/// Finished jobs whose directories stay: more than a model looks back at.
pub(crate) const FINISHED_MAX: usize = 16;

/// Bytes of all of them, of which the tool's description tells: little beside the memory or the
/// disk of any host. The newest one stays however large it is, because an answer names its files.
pub(crate) const FINISHED_BYTES_MAX: u64 = 128 * 1024 * 1024;

/// The directory of a finished job.
#[derive(Debug, PartialEq, Eq)]
struct Finished {
    directory: String,
    bytes: u64,
}

/// The finished jobs of a workspace.
#[derive(Debug, Default)]
pub(crate) struct Jobs(Mutex<VecDeque<Finished>>);

impl Jobs {
    /// A job that has ended has, or is about to have, `bytes` more in its directory. Removes the
    /// directories for which there is no room any more.
    pub(crate) async fn finished(&self, files: &Files, directory: &str, bytes: u64) {
        let too_many = {
            let mut jobs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            admit(&mut jobs, directory, bytes)
        };
        for one in too_many {
            remove(files, &one.directory, true).await;
        }
    }
}

/// Adds to a job, which is the newest then, and takes out the oldest ones above the bounds.
fn admit(jobs: &mut VecDeque<Finished>, directory: &str, bytes: u64) -> Vec<Finished> {
    let known = jobs.iter().position(|one| one.directory == directory);
    let before = known.and_then(|index| jobs.remove(index)).map_or(0, |one| one.bytes);
    let bytes = before.saturating_add(bytes);
    jobs.push_back(Finished { directory: directory.to_owned(), bytes });
    let mut all = jobs.iter().fold(0_u64, |sum, one| sum.saturating_add(one.bytes));
    let mut too_many = Vec::new();
    while jobs.len() > FINISHED_MAX || (all > FINISHED_BYTES_MAX && jobs.len() > 1) {
        let Some(oldest) = jobs.pop_front() else { break };
        all = all.saturating_sub(oldest.bytes);
        too_many.push(oldest);
    }
    too_many
}

/// Removes a file or a directory of a job, with all that it holds when it is `recursive`. What
/// cannot be removed stays: it is the cell's, and a command may have taken it over.
pub(crate) async fn remove(files: &Files, path: &str, recursive: bool) {
    let caller = Caller { session: SessionId::default(), call: "bash".to_owned() };
    let removed = files.remove(&caller, path, recursive, Overwrite::Any).await;
    let expected = |kind: &FaultKind| matches!(kind, FaultKind::NotFound | FaultKind::NotEmpty);
    match removed {
        Ok(_) => {}
        Err(FileError::Fault { fault, .. }) if expected(&fault.kind) => {}
        Err(error) => tracing::warn!(path, ?error, "a job's files could not be removed"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(jobs: &[Finished]) -> Vec<&str> {
        jobs.iter().map(|one| one.directory.as_str()).collect()
    }

    #[test]
    fn the_oldest_go_when_there_are_too_many() {
        let mut jobs = VecDeque::new();
        for number in 0..FINISHED_MAX {
            assert_eq!(admit(&mut jobs, &number.to_string(), 1), []);
        }
        // It has more to keep, and counts as the newest from then on.
        assert_eq!(admit(&mut jobs, "0", 1), []);
        assert_eq!(names(&admit(&mut jobs, "x", 1)), ["1"]);
        assert_eq!(jobs.len(), FINISHED_MAX);
        assert_eq!(jobs[FINISHED_MAX - 2], Finished { directory: "0".to_owned(), bytes: 2 });
    }

    #[test]
    fn the_oldest_go_when_they_are_too_large_and_the_newest_stays() {
        let mut jobs = VecDeque::new();
        let third = FINISHED_BYTES_MAX / 3;
        for name in ["a", "b", "c"] {
            assert_eq!(admit(&mut jobs, name, third), []);
        }
        assert_eq!(names(&admit(&mut jobs, "d", third)), ["a"]);
        assert_eq!(names(&admit(&mut jobs, "e", 2 * FINISHED_BYTES_MAX)), ["b", "c", "d"]);
        assert_eq!(names(&admit(&mut jobs, "f", u64::MAX)), ["e"]);
        assert_eq!(jobs.len(), 1);
    }
}
