//! What a harness asks of a daemon, as a trait over plain data, and a scripted fake of it.
//!
//! This crate knows no transport: `cofferdam-client-grpc` is the real implementation. Two rules
//! hold for every implementation, so that callers need not repeat them:
//!
//! - An event stream that ends without an exit event is [`ClientError::OutcomeUnknown`], never a
//!   quiet end. `None` from [`Events::next`] always follows an exit event.
//! - A mutating call whose answer was lost on the way is [`ClientError::OutcomeUnknown`]; asking
//!   again with the same request id gives the first answer and does nothing twice.

#![forbid(unsafe_code)]

mod error;
mod fake;
mod process;
mod stamp;
mod tool;
mod workspace;

use std::future::Future;
use std::time::Duration;

pub use error::{ClientError, Code, FieldProblem, Refusal};
pub use fake::{Call, FakeClient, FakeEvents};
pub use process::{
    ExecuteReply, ExecuteRequest, ExitReport, OutputAccount, OutputStream, Page, ProcessEvent,
    ProcessInfo, Program, ProtectedPath, Pty, SignalTarget, StartRequest, StdinMode, StreamAccount,
};
pub use stamp::{StampChange, StampEvent, StampRecord, StampState};
pub use tool::{CallToolRequest, Tool, ToolReply};
pub use workspace::{Capabilities, Capability, MessageLimits, Workspace};

/// Largest chunk for [`Client::write_stdin`]: a request is at most 1 MiB.
pub const STDIN_CHUNK_BYTES: usize = 512 * 1024;

/// The events of one process, in order.
pub trait Events: Send {
    /// The next event; `None` after the exit event.
    fn next(
        &mut self,
    ) -> impl Future<Output = Result<Option<ProcessEvent>, ClientError>> + Send + '_;
}

/// The bytes of one file, in order.
pub trait Chunks: Send {
    /// The next bytes; `None` after the last ones.
    fn next(
        &mut self,
    ) -> impl Future<Output = Result<Option<bytes::Bytes>, ClientError>> + Send + '_;
}

/// A connection to the daemon of one workspace.
pub trait Client: Send + Sync {
    /// What [`start`](Self::start) and [`connect`](Self::connect) return.
    type Events: Events;

    /// What [`read`](Self::read) returns.
    type Chunks: Chunks;

    /// Runs a program to its end.
    fn execute(
        &self,
        request: ExecuteRequest,
    ) -> impl Future<Output = Result<ExecuteReply, ClientError>> + Send;

    /// Starts a program and follows it.
    fn start(
        &self,
        request: StartRequest,
    ) -> impl Future<Output = Result<Self::Events, ClientError>> + Send;

    /// Follows a process, running or retained, from the given offsets.
    fn connect(
        &self,
        process_id: &str,
        stdout_offset: u64,
        stderr_offset: u64,
    ) -> impl Future<Output = Result<Self::Events, ClientError>> + Send;

    /// Writes at most [`STDIN_CHUNK_BYTES`] to a program's input, where `offset` bytes have been
    /// written before. Returns the bytes accepted since the start.
    fn write_stdin(
        &self,
        process_id: &str,
        offset: u64,
        data: bytes::Bytes,
        request_id: &str,
    ) -> impl Future<Output = Result<u64, ClientError>> + Send;

    /// Ends a program's input.
    fn close_stdin(
        &self,
        process_id: &str,
        request_id: &str,
    ) -> impl Future<Output = Result<(), ClientError>> + Send;

    /// Sends a signal; returns how many processes it reached.
    fn send_signal(
        &self,
        process_id: &str,
        signal: i32,
        target: SignalTarget,
        request_id: &str,
    ) -> impl Future<Output = Result<u32, ClientError>> + Send;

    /// Changes the size of a program's terminal.
    fn resize_pty(
        &self,
        process_id: &str,
        size: cofferdam_spec::PtySize,
        request_id: &str,
    ) -> impl Future<Output = Result<(), ClientError>> + Send;

    /// Lists processes, oldest first. Empty `session`: of all sessions; empty `page_token`: from
    /// the start.
    fn list(
        &self,
        session: &str,
        page_token: &str,
    ) -> impl Future<Output = Result<Page<ProcessInfo>, ClientError>> + Send;

    /// Describes one process.
    fn get(
        &self,
        process_id: &str,
    ) -> impl Future<Output = Result<ProcessInfo, ClientError>> + Send;

    /// Waits until a process has ended, or `timeout` has passed; then its `exit` is `None`.
    fn wait(
        &self,
        process_id: &str,
        timeout: Option<Duration>,
    ) -> impl Future<Output = Result<ProcessInfo, ClientError>> + Send;

    /// What the daemon enforces, lacks and accepts.
    fn get_capabilities(&self) -> impl Future<Output = Result<Capabilities, ClientError>> + Send;

    /// The workspace, its ids and counters.
    fn get_workspace(&self) -> impl Future<Output = Result<Workspace, ClientError>> + Send;

    /// Ends every process of a session; returns how many calls were ended.
    fn end_session(
        &self,
        session: &str,
        request_id: &str,
    ) -> impl Future<Output = Result<u32, ClientError>> + Send;

    /// Reads a regular file from `offset` on, at most `length` bytes; 0 means to its end. A `session`
    /// that reads the whole file may change it afterwards; an empty one sets no stamp.
    fn read(
        &self,
        path: &str,
        offset: u64,
        length: u64,
        session: &str,
    ) -> impl Future<Output = Result<Self::Chunks, ClientError>> + Send;

    /// The tools that a model can call.
    fn list_tools(&self) -> impl Future<Output = Result<Vec<Tool>, ClientError>> + Send;

    /// Calls a tool. What it refused or failed at is an answer, with `is_error`.
    fn call_tool(
        &self,
        request: CallToolRequest,
    ) -> impl Future<Output = Result<ToolReply, ClientError>> + Send;

    /// Lists the stamps that sessions hold. Empty `session`: of all sessions; empty `path_prefix`:
    /// of all paths; empty `page_token`: from the start.
    fn list_stamps(
        &self,
        session: &str,
        path_prefix: &str,
        page_token: &str,
    ) -> impl Future<Output = Result<Page<StampRecord>, ClientError>> + Send;

    /// Lists what set and dropped the stamps of one path, newest first. Empty `session`: of all
    /// sessions.
    fn get_stamp_history(
        &self,
        path: &str,
        session: &str,
        page_token: &str,
    ) -> impl Future<Output = Result<Page<StampEvent>, ClientError>> + Send;

    /// Reads the files of a session's stamps again and says which are fresh.
    fn verify_stamps(
        &self,
        session: &str,
        path_prefix: &str,
        page_token: &str,
    ) -> impl Future<Output = Result<Page<StampRecord>, ClientError>> + Send;

    /// Drops stamps of a session; returns how many.
    fn clear_stamps(
        &self,
        session: &str,
        path_prefix: &str,
        request_id: &str,
    ) -> impl Future<Output = Result<u64, ClientError>> + Send;
}
