//! The toolbox: the cell's first process, one pid namespace above the commands and out of their
//! sight, behind the same mounts and rules.
//!
//! The threads for calls are made before a command can run, so that no command can use up what they
//! need. The first one watches for the end of daemon and init; the others take requests from one
//! channel, whoever is free. Who takes a lane stays with it, so that a call wakes one thread and no
//! other. Only two kinds of threads are made later, and may be missing then: a watch, which has no
//! end of its own, gets one for itself, and a grep takes some to help it.
//!
//! A panic anywhere ends the process: a thread less would be one that nobody replaces, while the
//! end of the toolbox is the end of the cell, and the daemon makes another one.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::panic;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cofferdam_files::call::{Answer, Fault, FaultKind};
use cofferdam_files::{FileCall, Files, Gone, Reply};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::channel::{Channel, Received};
use crate::protocol::{LANES_MAX, SURVEY_ENTRIES_MAX, ToolboxReply, ToolboxRequest, WATCHES_MAX};

/// Where the workspace is.
const WORKSPACE: &str = "/workspace";

/// Where the home directory of the cell's programs is.
const HOME: &str = "/home/agent";

/// Threads that serve requests: one a lane, and some for new lanes and whatever else comes.
const WORKERS: usize = LANES_MAX + 2;

/// How long a thread looks for the next call before it sleeps. Calls of one agent often come close
/// together, and waking a sleeping thread costs more than a small call, above all in a virtual
/// machine.
const LOOK_AGAIN: Duration = Duration::from_micros(60);

type Requests = Channel<ToolboxReply, ToolboxRequest>;

/// What every thread shares.
struct Toolbox {
    channel: Requests,
    files: Files,
    watches: AtomicUsize,
}

/// Serves until the daemon or init is gone.
pub(crate) fn run(channel: Requests, init: Pid) -> u8 {
    end_with_any_panic();
    let Ok(init) = pidfd_open(init, PidfdFlags::empty()) else { return 1 };
    let files = Files::new(PathBuf::from(HOME));
    files.recover();
    let toolbox = Arc::new(Toolbox { channel, files, watches: AtomicUsize::new(0) });
    for number in 0..WORKERS {
        let toolbox = Arc::clone(&toolbox);
        // Never joined: they end with the process, which this thread ends.
        let worker = thread::Builder::new().name(format!("files-{number}"));
        if worker.spawn(move || toolbox.work()).is_err() {
            return 1;
        }
    }
    loop {
        // Of the channel only its end: what it brings is for the others.
        let mut ready =
            [PollFd::new(&toolbox.channel, PollFlags::RDHUP), PollFd::new(&init, PollFlags::IN)];
        match rustix::io::retry_on_intr(|| poll(&mut ready, None)) {
            Err(_) => return 1,
            Ok(_) if ready.iter().any(|one| !one.revents().is_empty()) => return 0,
            Ok(_) => {}
        }
    }
}

/// From here on a panic of any thread ends the process, after it was told as always.
fn end_with_any_panic() {
    let tell = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        tell(info);
        process::abort();
    }));
}

impl Toolbox {
    /// Serves requests until there are no more.
    fn work(self: &Arc<Self>) {
        while let Ok(Some(Received { message, descriptors })) = self.channel.receive() {
            match message {
                ToolboxRequest::Survey { token } => {
                    let own = rustix::process::geteuid().as_raw();
                    let (foreign, complete) =
                        count_foreign(Path::new(WORKSPACE), own, SURVEY_ENTRIES_MAX);
                    let surveyed = ToolboxReply::Surveyed { token, foreign, complete };
                    if self.channel.send(&surveyed, &[]).is_err() {
                        return;
                    }
                }
                // Without a socket nobody can ask.
                ToolboxRequest::Lane => {
                    if let Some(socket) = descriptors.into_iter().next() {
                        self.serve(socket);
                    }
                }
            }
        }
    }

    /// Serves a lane until the daemon closes it, or a watch takes it over.
    fn serve(self: &Arc<Self>, socket: OwnedFd) {
        let lane = Lane(Channel::new(socket));
        while let Ok(Some(Received { message, descriptors })) = lane.next() {
            if matches!(message, FileCall::Watch { .. }) {
                return self.watch(message, lane);
            }
            self.files.serve(message, descriptors.into_iter().next(), &lane);
        }
    }

    /// Gives a watch a thread of its own.
    fn watch(self: &Arc<Self>, call: FileCall, lane: Lane) {
        if self.watches.fetch_add(1, Ordering::Relaxed) < WATCHES_MAX {
            let (shared, own) = (Arc::clone(self), Arc::new(lane));
            let lane = Arc::clone(&own);
            let spawned = thread::Builder::new().name("watch".to_owned()).spawn(move || {
                shared.files.serve(call, None, &*lane);
                shared.watches.fetch_sub(1, Ordering::Relaxed);
            });
            if spawned.is_ok() {
                return;
            }
            refuse_watch(&own, FaultKind::Other, "watch: make a thread");
        } else {
            let limit = WATCHES_MAX as u64;
            refuse_watch(&lane, FaultKind::TooMany { limit }, "watch");
        }
        self.watches.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Answers a watch that cannot be served now. The lane ends with it.
fn refuse_watch(lane: &Lane, kind: FaultKind, step: &str) {
    let fault = Fault { kind, step: step.to_owned(), errno: libc::EAGAIN };
    // Whoever has given up needs no answer.
    let _ = lane.send(Answer::Failed(fault), None);
}

/// The toolbox's end of a lane.
struct Lane(Channel<Answer, FileCall>);

impl Lane {
    /// The next call; `None` when the daemon has closed its end.
    fn next(&self) -> io::Result<Option<Received<FileCall>>> {
        let until = Instant::now() + LOOK_AGAIN;
        while Instant::now() < until {
            match self.0.receive_now() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::yield_now(),
                received => return received,
            }
        }
        self.0.receive()
    }
}

impl Reply for Lane {
    fn send(&self, answer: Answer, descriptor: Option<OwnedFd>) -> Result<(), Gone> {
        let descriptors: Vec<_> = descriptor.iter().map(AsFd::as_fd).collect();
        self.0.send(&answer, &descriptors).map_err(|_| Gone)
    }

    fn is_wanted(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut ready = [PollFd::new(&self.0, PollFlags::empty())];
        matches!(rustix::io::retry_on_intr(|| poll(&mut ready, Some(&now))), Ok(0))
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
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    /// Set in the process of the test that ends by a panic.
    const PANICS: &str = "COFFERDAM_TEST_PANICS";

    #[test]
    fn a_panic_of_any_thread_ends_the_process() {
        if std::env::var_os(PANICS).is_some() {
            end_with_any_panic();
            let ended = thread::spawn(|| panic!("told to")).join();
            panic!("the process goes on: {ended:?}");
        }
        let name = "toolbox::tests::a_panic_of_any_thread_ends_the_process";
        let output = process::Command::new(std::env::current_exe().unwrap())
            .args([name, "--exact", "--nocapture"])
            .env(PANICS, "1")
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{told}");
        assert!(told.contains("told to") && !told.contains("goes on"), "{told}");
    }

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
