//! Requests, events and descriptions of processes.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use cofferdam_spec::{CallLimits, Enforcement, Exit, PtySize};

/// What to run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Program {
    /// Program and arguments.
    pub command: Vec<String>,
    /// Added to the policy's environment.
    pub env: BTreeMap<String, String>,
    /// Absolute path in the cell; empty means `/workspace`.
    pub cwd: String,
}

impl Program {
    /// A program with its arguments, in `/workspace`, with the policy's environment.
    pub fn new<T: Into<String>>(command: impl IntoIterator<Item = T>) -> Self {
        Self { command: command.into_iter().map(Into::into).collect(), ..Self::default() }
    }
}

/// A program to run to its end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExecuteRequest {
    /// What to run.
    pub program: Program,
    /// Its whole input.
    pub stdin: Bytes,
    /// Narrows the policy's limits.
    pub limits: CallLimits,
    /// Whether the call may change nothing under `/workspace`.
    pub workspace_read_only: bool,
    /// Whose call this is.
    pub session: String,
    /// Unique in the workspace.
    pub request_id: String,
}

/// How a program that was run to its end did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecuteReply {
    /// Head and tail of standard output.
    pub stdout: Bytes,
    /// Head and tail of standard error.
    pub stderr: Bytes,
    /// Whether this is the stored answer of an earlier call.
    pub replayed: bool,
    /// The rest.
    pub report: ExitReport,
}

/// What is known once a process has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExitReport {
    /// How it ended.
    pub exit: Exit,
    /// Exact account of its output.
    pub output: OutputAccount,
    /// Protected paths that appeared and were moved away.
    pub protected_paths: Vec<ProtectedPath>,
    /// Time from start to exit.
    pub duration: Duration,
    /// What the kernel enforced.
    pub enforcement: Enforcement,
    /// Position in the audit log; 0 without one.
    pub audit_sequence: u64,
    /// Hash of the audit record.
    pub audit_hash: Bytes,
}

/// Account of both output streams. On a terminal there is one stream, `stdout`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OutputAccount {
    /// Standard output, or the terminal.
    pub stdout: StreamAccount,
    /// Standard error.
    pub stderr: StreamAccount,
    /// The process whose output [`Client::connect`](crate::Client::connect) reads.
    pub process_id: String,
    /// Processes of the call that outlived its leader.
    pub background_processes: u32,
    /// Whether one of them still held an output stream at the end.
    pub detached: bool,
}

/// Account of one stream: total = kept + dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StreamAccount {
    /// Bytes that the process wrote.
    pub total_bytes: u64,
    /// Bytes of the reply.
    pub kept_bytes: u64,
    /// Bytes that the reply leaves out.
    pub dropped_bytes: u64,
    /// Bytes of the reply from the stream's start.
    pub head_bytes: u64,
    /// Bytes of the reply from the stream's end.
    pub tail_bytes: u64,
    /// Bytes that can still be read.
    pub readable_bytes: u64,
}

/// A protected path that appeared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProtectedPath {
    /// Path in the cell.
    pub path: String,
    /// What was done.
    pub action: String,
}

/// A terminal to run on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pty {
    /// Its size.
    pub size: PtySize,
    /// Value of TERM.
    pub term: String,
}

/// What a started program reads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum StdinMode {
    /// End of file at once, after the request's own bytes.
    #[default]
    Closed,
    /// A pipe that `write_stdin` feeds.
    Pipe,
}

/// A program to start and follow.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StartRequest {
    /// What to run.
    pub program: Program,
    /// Written first to its input.
    pub stdin: Bytes,
    /// Where more input comes from.
    pub stdin_mode: StdinMode,
    /// Narrows the policy's limits.
    pub limits: CallLimits,
    /// Whether the call may change nothing under `/workspace`.
    pub workspace_read_only: bool,
    /// Whose call this is.
    pub session: String,
    /// Unique in the workspace.
    pub request_id: String,
    /// Run on a terminal.
    pub pty: Option<Pty>,
    /// How long the output stays readable after the exit.
    pub retention: Option<Duration>,
    /// A name for people.
    pub tag: String,
    /// Whether the tree is killed when the event stream is dropped before the exit.
    pub kill_on_disconnect: bool,
    /// Whether the program waits for the reader of the events, as for the reader of a pipe;
    /// otherwise a slow reader loses the middle of the output.
    pub wait_for_reader: bool,
}

/// The output streams of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OutputStream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
    /// The terminal.
    Pty,
}

/// One event of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessEvent {
    /// First event of every stream.
    Started {
        /// Name of the process in the workspace.
        process_id: String,
        /// Its process id in the cell.
        pid: u32,
        /// Whether it had been started by an earlier call with the same request id.
        replayed: bool,
    },
    /// Output.
    Output {
        /// Of which stream.
        stream: OutputStream,
        /// Offset of the first byte in that stream.
        offset: u64,
        /// The bytes.
        data: Bytes,
    },
    /// Output that was dropped before this reader asked for it.
    Lag {
        /// Of which stream.
        stream: OutputStream,
        /// First byte that is missing.
        skipped_from: u64,
        /// First byte that is there again.
        skipped_to: u64,
    },
    /// Nothing happened for a while.
    Keepalive,
    /// Last event.
    Exit(Box<ExitReport>),
}

/// Whom a signal reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignalTarget {
    /// The process that was started.
    Leader,
    /// Its process group.
    Group,
    /// Every process of the call.
    Tree,
}

/// Describes a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessInfo {
    /// Its name in the workspace.
    pub process_id: String,
    /// Its process id in the cell.
    pub pid: u32,
    /// Whose call it is.
    pub session: String,
    /// Its name for people.
    pub tag: String,
    /// Program and arguments.
    pub command: Vec<String>,
    /// When it was started.
    pub start_time: SystemTime,
    /// How it ended; `None` while it runs.
    pub exit: Option<Exit>,
    /// Account of its output so far.
    pub output: OutputAccount,
    /// Whether it runs on a terminal.
    pub pty: bool,
}

/// Part of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<T> {
    /// The items.
    pub items: Vec<T>,
    /// Where the next part starts; empty after the last one.
    pub next_page_token: String,
}
