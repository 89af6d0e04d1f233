//! One process: what was asked, what is known of its tree, what it printed.
//!
//! Its state leaves by two watches with one writer each: the supervisor writes [`Tree`] (what init
//! reported), the pump writes [`Progress`] (what readers may see). Everybody else only reads.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime};

use cofferdam_cell::protocol::{CallId, KillCause, Status};
use cofferdam_spec::{Exit, Limits, SessionId, Tag};
use tokio::sync::watch;

use crate::account::INLINE_BYTES_MAX;
use crate::flow::Flow;
use crate::output::OutputLog;
use crate::stdin::Stdin;

/// The output streams of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
    /// The terminal, where both are one.
    Pty,
}

impl Stream {
    fn file_suffix(self) -> &'static str {
        match self {
            Stream::Stdout => "stdout",
            Stream::Stderr => "stderr",
            Stream::Pty => "pty",
        }
    }
}

/// What stays the same from start to end.
#[derive(Debug)]
pub(crate) struct About {
    /// Its name in this workspace, never used again.
    pub(crate) id: String,
    /// Its name between daemon and init; grows with time.
    pub(crate) call: CallId,
    /// Whose call it is.
    pub(crate) session: SessionId,
    /// A name for people.
    pub(crate) tag: Tag,
    /// Program and arguments.
    pub(crate) argv: Vec<String>,
    /// Whether it runs on a terminal.
    pub(crate) pty: bool,
    /// Limits in force.
    pub(crate) limits: Limits,
    /// When it was asked for.
    pub(crate) start_time: SystemTime,
    /// The same by the clock that only goes forward.
    pub(crate) start: Instant,
}

/// The leader's end, as init reported it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LeaderEnd {
    /// How.
    pub(crate) status: Status,
    /// Why init was killing the tree.
    pub(crate) killed: Option<KillCause>,
    /// Processes of the call that outlived it.
    pub(crate) background: u32,
    /// When.
    pub(crate) at: Instant,
}

/// What is known of the tree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tree {
    /// Set once the leader has ended.
    pub(crate) leader: Option<LeaderEnd>,
    /// Set once nothing is left.
    pub(crate) gone: Option<Instant>,
}

/// The end that callers are told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct End {
    /// Why.
    pub(crate) exit: Exit,
    /// Process id of the leader in the cell; none when it never ran.
    pub(crate) pid: Option<u32>,
    /// From start to exit.
    pub(crate) duration: Duration,
    /// Processes of the call that still ran.
    pub(crate) background: u32,
    /// Whether one of them held an output stream.
    pub(crate) detached: bool,
}

/// Where a process is in its life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Init has been asked to start it.
    Starting,
    /// It runs.
    Running {
        /// Process id of the leader in the cell.
        pid: u32,
    },
    /// Its end has been reported.
    Ended(Arc<End>),
}

/// What readers see. Every change wakes them.
#[derive(Debug, Clone)]
pub(crate) struct Progress {
    /// Where it is in its life.
    pub(crate) phase: Phase,
    /// Bytes of all streams so far.
    pub(crate) bytes: u64,
}

/// A process and all that readers may ask of it.
#[derive(Debug)]
pub(crate) struct Process {
    /// What stays the same.
    pub(crate) about: About,
    /// Its standard input.
    pub(crate) stdin: Stdin,
    /// The reader that it waits for, if any.
    pub(crate) flow: Flow,
    tree: watch::Sender<Tree>,
    progress: watch::Sender<Progress>,
    logs: Mutex<Vec<OutputLog>>,
    terminal: OnceLock<Weak<OwnedFd>>,
}

impl Process {
    /// A process that is about to be started; its job files will lie in `jobs`.
    pub(crate) fn new(about: About, stdin: Stdin, flow: Flow, jobs: &Path) -> Self {
        let log = |stream: &Stream| {
            OutputLog::new(jobs.join(format!("{}.{}", about.id, stream.file_suffix())))
        };
        let logs = Mutex::new(streams(about.pty).iter().map(log).collect());
        Self {
            stdin,
            flow,
            tree: watch::Sender::new(Tree::default()),
            progress: watch::Sender::new(Progress { phase: Phase::Starting, bytes: 0 }),
            logs,
            terminal: OnceLock::new(),
            about,
        }
    }

    /// Its output streams, in the order of [`Process::with_logs`].
    pub(crate) fn streams(&self) -> &'static [Stream] {
        streams(self.about.pty)
    }

    /// Reads its logs, one per stream.
    pub(crate) fn with_logs<T>(&self, read: impl FnOnce(&[OutputLog]) -> T) -> T {
        read(&self.lock_logs())
    }

    /// For the pump: adds what the program wrote to a stream, and returns the total of all.
    pub(crate) fn append(&self, stream: usize, bytes: &[u8]) -> u64 {
        let mut logs = self.lock_logs();
        if let Some(log) = logs.get_mut(stream) {
            log.append(bytes);
        }
        logs.iter().map(OutputLog::total).sum()
    }

    /// For the pump: whether a stream must wait for its reader.
    pub(crate) fn is_ahead(&self, stream: usize) -> bool {
        let total = || self.with_logs(|logs| logs.get(stream).map_or(0, OutputLog::total));
        self.flow.is_ahead(stream, total)
    }

    /// Gives up its job files. Bytes that still come are only counted.
    pub(crate) fn discard_output(&self) {
        self.lock_logs().iter_mut().for_each(OutputLog::discard);
    }

    /// What its job files take.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.with_logs(|logs| logs.iter().map(|log| log.held().head + log.held().tail).sum())
    }

    /// Whether an answer of Execute leaves something out that Connect can show.
    pub(crate) fn is_worth_keeping(&self) -> bool {
        let cut = self.with_logs(|logs| logs.iter().any(|log| log.total() > INLINE_BYTES_MAX));
        cut || self.end().is_some_and(|end| end.detached)
    }

    /// The latest progress, and news of later ones.
    pub(crate) fn progress(&self) -> watch::Receiver<Progress> {
        self.progress.subscribe()
    }

    /// Where it is in its life.
    pub(crate) fn phase(&self) -> Phase {
        self.progress.borrow().phase.clone()
    }

    /// Its end, once reported.
    pub(crate) fn end(&self) -> Option<Arc<End>> {
        match &self.progress.borrow().phase {
            Phase::Ended(end) => Some(Arc::clone(end)),
            Phase::Starting | Phase::Running { .. } => None,
        }
    }

    /// Waits for its end to be reported.
    pub(crate) async fn ended(&self) -> Arc<End> {
        let mut progress = self.progress();
        loop {
            if let Phase::Ended(end) = &progress.borrow_and_update().phase {
                return Arc::clone(end);
            }
            // The sender lives in `self`, so there is always a next change.
            let _ = progress.changed().await;
        }
    }

    /// Waits until nothing of its tree is left.
    pub(crate) async fn gone(&self) {
        let _ = self.tree.subscribe().wait_for(|tree| tree.gone.is_some()).await;
    }

    /// For the supervisor and the pump: news of the tree.
    pub(crate) fn tree(&self) -> watch::Receiver<Tree> {
        self.tree.subscribe()
    }

    /// For the supervisor: init reported something.
    pub(crate) fn update_tree(&self, update: impl FnOnce(&mut Tree)) {
        self.tree.send_modify(update);
    }

    /// For the pump (or, before there is one, the supervisor): the process moved on.
    pub(crate) fn enter(&self, phase: Phase) {
        self.progress.send_modify(|progress| progress.phase = phase);
    }

    /// For the pump: there is more to read.
    pub(crate) fn announce(&self, bytes: u64) {
        self.progress.send_modify(|progress| progress.bytes = bytes);
    }

    /// For the supervisor: remembers the terminal's master without keeping it open.
    pub(crate) fn set_terminal(&self, master: Weak<OwnedFd>) {
        // A process is started once, so there is never a second master.
        let _ = self.terminal.set(master);
    }

    /// The terminal's master, while the pump holds it.
    pub(crate) fn terminal(&self) -> Option<Arc<OwnedFd>> {
        self.terminal.get().and_then(Weak::upgrade)
    }

    fn lock_logs(&self) -> MutexGuard<'_, Vec<OutputLog>> {
        self.logs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn streams(pty: bool) -> &'static [Stream] {
    if pty { &[Stream::Pty] } else { &[Stream::Stdout, Stream::Stderr] }
}
