//! The toolbox: the cell's first process, one pid namespace above the commands and out of their
//! sight, behind the same mounts and rules.
//!
//! Its threads are made before a command can run. What may take long is a worker's; the first
//! thread hears requests and watches for the end of init.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::channel::Channel;
use crate::protocol::{SURVEY_ENTRIES_MAX, ToolboxReply, ToolboxRequest};

/// Where the workspace is.
const WORKSPACE: &str = "/workspace";

/// Requests that may wait for the worker; the daemon sends one at a time.
const WAITING_MAX: usize = 16;

type Replies = Arc<Channel<ToolboxReply, ToolboxRequest>>;

/// Serves until the daemon or init is gone.
pub(crate) fn run(channel: Channel<ToolboxReply, ToolboxRequest>, init: Pid) -> u8 {
    let channel = Arc::new(channel);
    let Ok(init) = pidfd_open(init, PidfdFlags::empty()) else { return 1 };
    let (surveys, asked) = sync_channel(WAITING_MAX);
    let replies = Arc::clone(&channel);
    // Never joined: it ends with the process, which this thread ends.
    let worker = thread::Builder::new().name("survey".to_owned());
    if worker.spawn(move || serve_surveys(&asked, &replies)).is_err() {
        return 1;
    }
    loop {
        let mut ready = [PollFd::new(&*channel, PollFlags::IN), PollFd::new(&init, PollFlags::IN)];
        if rustix::io::retry_on_intr(|| poll(&mut ready, None)).is_err() {
            return 1;
        }
        if !ready[1].revents().is_empty() {
            return 0;
        }
        if ready[0].revents().is_empty() {
            continue;
        }
        let Ok(Some(received)) = channel.receive() else { return 0 };
        let served = match received.message {
            ToolboxRequest::Survey { token } => surveys.try_send(token).is_ok(),
        };
        if !served {
            return 0;
        }
    }
}

fn serve_surveys(asked: &Receiver<u64>, replies: &Replies) {
    let own = rustix::process::geteuid().as_raw();
    while let Ok(token) = asked.recv() {
        let (foreign, complete) = count_foreign(Path::new(WORKSPACE), own, SURVEY_ENTRIES_MAX);
        if replies.send(&ToolboxReply::Surveyed { token, foreign, complete }, &[]).is_err() {
            return;
        }
    }
}

/// Entries below `root` whose owner is not `own`, and whether all were visited. Directories that
/// cannot be read count as one entry; links are not followed.
fn count_foreign(root: &Path, own: u32, most: u64) -> (u64, bool) {
    let (mut foreign, mut visited) = (0, 0);
    let mut open: Vec<PathBuf> = vec![root.to_owned()];
    while let Some(directory) = open.pop() {
        let Ok(entries) = fs::read_dir(&directory) else { continue };
        for entry in entries.flatten() {
            visited += 1;
            if visited > most {
                return (foreign, false);
            }
            let Ok(metadata) = entry.metadata() else { continue };
            foreign += u64::from(metadata.uid() != own);
            if metadata.is_dir() {
                open.push(entry.path());
            }
        }
    }
    (foreign, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_survey_counts_other_owners_and_says_when_it_stopped() {
        let directory = std::env::temp_dir().join(format!("survey-{}", std::process::id()));
        fs::create_dir_all(directory.join("a/b")).unwrap();
        fs::write(directory.join("a/b/file"), "").unwrap();
        let own = fs::metadata(&directory).unwrap().uid();
        assert_eq!(count_foreign(&directory, own, 100), (0, true));
        assert_eq!(count_foreign(&directory, own + 1, 100), (3, true));
        assert_eq!(count_foreign(&directory, own + 1, 2), (2, false));
        fs::remove_dir_all(directory).unwrap();
    }
}
