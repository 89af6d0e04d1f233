//! The messages between daemon and init, and between daemon and toolbox.
//!
//! Each travels as one packet of a `SOCK_SEQPACKET` pair, with descriptors beside it; a body above
//! [`INLINE_BYTES_MAX`](crate::channel::INLINE_BYTES_MAX) travels in a sealed memory file. The
//! untrusted side is the cell: the daemon treats what it hears as data, bounds it, and never
//! acts on a path or a process id that came from there.

use std::time::Duration;

use cofferdam_spec::{Command, Limits, PtySize};
use serde::{Deserialize, Serialize};

/// Names a call between daemon and init; never used twice in the life of a cell.
pub type CallId = u64;

/// What a program reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stdio {
    /// Pipes. [`Event::Started`] brings the daemon's ends: standard input (when asked for),
    /// standard output, standard error; all non-blocking.
    Pipes {
        /// Whether standard input is a pipe; otherwise it is `/dev/null`.
        stdin: bool,
    },
    /// A terminal. [`Event::Started`] brings its master, non-blocking.
    Pty(PtySize),
}

/// Asks init to start a program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exec {
    /// Names the call in everything that follows.
    pub call: CallId,
    /// Calls of one session can signal each other, calls of different sessions cannot.
    pub session: String,
    /// What to run.
    pub command: Command,
    /// Limits in force. `idle` and `output_bytes` are the daemon's to watch.
    pub limits: Limits,
    /// Whether `limits.wall` also ends what outlives the leader.
    pub wall_bounds_tree: bool,
    /// Time between SIGTERM and SIGKILL when a limit ends the tree.
    pub grace: Duration,
    /// Standard streams.
    pub stdio: Stdio,
    /// Whether the call may change nothing under `/workspace`.
    pub workspace_read_only: bool,
}

/// Whom a signal reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Target {
    /// The process that was started.
    Leader,
    /// Its process group.
    Group,
    /// Every process of the call.
    Tree,
}

/// Why a tree is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum KillCause {
    /// The wall limit (init's own clock).
    Wall,
    /// The idle limit.
    Idle,
    /// The output limit.
    Output,
    /// The client went away, or asked.
    Client,
    /// Its session ended.
    Session,
    /// The daemon drains.
    Drain,
    /// The call stopped or killed its own supervisor.
    Supervision,
}

/// Daemon to init.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Start a program. Answered by [`Event::Started`] or [`Event::ExecFailed`].
    Exec(Box<Exec>),
    /// Send a signal. Answered by [`Event::Signaled`] with the same token.
    Signal {
        /// The call.
        call: CallId,
        /// Signal number, 1 to 64.
        signal: i32,
        /// Whom it reaches.
        target: Target,
        /// Comes back in the answer.
        token: u64,
    },
    /// End a call's tree: SIGTERM, `grace`, SIGKILL until nothing is left. Asking again with a
    /// shorter grace shortens it. Unknown or gone calls are ignored.
    Kill {
        /// The call.
        call: CallId,
        /// Time between SIGTERM and SIGKILL; zero means SIGKILL at once.
        grace: Duration,
        /// Reported in [`Event::Exited`], when the leader had not exited by itself.
        cause: KillCause,
    },
    /// Kill every tree of a session and forget its signal domain. Each call ends with its own
    /// events.
    EndSession {
        /// The session.
        session: String,
        /// As in [`Request::Kill`].
        grace: Duration,
    },
}

/// How the leader ended, as `waitid` told it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Status {
    /// It called exit.
    Exited(i32),
    /// A signal ended it.
    Signaled {
        /// Signal number.
        signal: i32,
        /// Whether a core file was written.
        core: bool,
    },
    /// Nobody saw its end: its supervisor was killed before it could report.
    Lost,
}

/// Init to daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// The program runs. Descriptors: see [`Stdio`]. Comes up to four milliseconds after the start,
    /// and together with the end of a program that is faster; until then a signal to the leader or its
    /// group reaches nothing.
    Started {
        /// The call.
        call: CallId,
        /// The leader's process id in the cell.
        pid: u32,
    },
    /// The program could not be started; nothing of the call is left.
    ExecFailed {
        /// The call.
        call: CallId,
        /// The step: `supervisor`, `stdio`, `limits`, `cwd`, `landlock`, `exec` ….
        step: String,
        /// Its errno.
        errno: i32,
    },
    /// The leader has ended.
    Exited {
        /// The call.
        call: CallId,
        /// How.
        status: Status,
        /// Why init was killing the tree at that time, if it was.
        killed: Option<KillCause>,
        /// Processes of the call that still run. 0: nothing is left and no further event comes.
        background: u32,
    },
    /// After [`Event::Exited`] with `background` above 0: now nothing of the call is left.
    TreeGone {
        /// The call.
        call: CallId,
    },
    /// Answer to [`Request::Signal`].
    Signaled {
        /// The request's token.
        token: u64,
        /// Processes that were reached.
        delivered: u32,
    },
}

/// Daemon to toolbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToolboxRequest {
    /// Count the files that programs of the cell see as somebody else's. Answered by
    /// [`ToolboxReply::Surveyed`], when it is done.
    Survey {
        /// Comes back in the answer.
        token: u64,
    },
    /// Opens a lane for calls about files, one after the other. The descriptor beside it is the
    /// toolbox's end of a `SOCK_SEQPACKET` pair: a [`FileCall`](cofferdam_files::FileCall) comes there, with the content to
    /// write as its descriptor where it has one, and every
    /// [`Answer`](cofferdam_files::call::Answer) goes back, until the last one; then the next call
    /// may come. Whoever closes the other end gives the call up. An end before the last answer means
    /// that the cell has ended. The toolbox serves [`LANES_MAX`] lanes at once; a lane with a watch,
    /// which has no last answer, is none of them.
    Lane,
}

/// Toolbox to daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToolboxReply {
    /// The count.
    Surveyed {
        /// The request's token.
        token: u64,
        /// Files and directories of a third owner: they appear as `nobody`'s and stay read-only.
        foreign: u64,
        /// Whether everything was visited; otherwise there are more files than
        /// [`SURVEY_ENTRIES_MAX`].
        complete: bool,
    },
}

/// Lanes that the toolbox serves at once.
pub const LANES_MAX: usize = 8;

/// Watches that the toolbox serves at once, each on a thread of its own.
pub const WATCHES_MAX: usize = 32;

/// Most entries that a survey visits.
pub const SURVEY_ENTRIES_MAX: u64 = 1_000_000;
