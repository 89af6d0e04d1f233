//! A client without a daemon: it plays a script and remembers what it was asked.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Duration;

use bytes::Bytes;
use cofferdam_spec::PtySize;

use crate::{
    CallToolRequest, Capabilities, Chunks, Client, ClientError, Events, ExecuteReply,
    ExecuteRequest, Page, ProcessEvent, ProcessInfo, SignalTarget, StampEvent, StampRecord,
    StartRequest, Tool, ToolReply, Workspace,
};

/// Something that a [`FakeClient`] was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are those of the trait's methods")]
pub enum Call {
    Execute(ExecuteRequest),
    Start(StartRequest),
    Connect { process_id: String, stdout_offset: u64, stderr_offset: u64 },
    WriteStdin { process_id: String, offset: u64, data: Bytes },
    CloseStdin { process_id: String },
    SendSignal { process_id: String, signal: i32, target: SignalTarget },
    ResizePty { process_id: String, size: PtySize },
    List { session: String, page_token: String },
    Get { process_id: String },
    Wait { process_id: String, timeout: Option<Duration> },
    GetCapabilities,
    GetWorkspace,
    EndSession { session: String },
    Read { path: String, offset: u64, length: u64, session: String },
    ListTools,
    CallTool(CallToolRequest),
    ListStamps { session: String, path_prefix: String, page_token: String },
    GetStampHistory { path: String, session: String, page_token: String },
    VerifyStamps { session: String, path_prefix: String, page_token: String },
    ClearStamps { session: String, path_prefix: String },
}

/// The script's answers, by kind, and the calls that came.
#[derive(Debug, Default)]
struct State {
    calls: Vec<Call>,
    executes: VecDeque<Result<ExecuteReply, ClientError>>,
    streams: VecDeque<Result<FakeEvents, ClientError>>,
    processes: VecDeque<Result<ProcessInfo, ClientError>>,
    capabilities: Option<Capabilities>,
    workspace: Option<Workspace>,
    tools: Option<Vec<Tool>>,
    reads: VecDeque<Result<Vec<Bytes>, ClientError>>,
    tool_replies: VecDeque<Result<ToolReply, ClientError>>,
    stamps: Vec<StampRecord>,
    stamp_history: Vec<StampEvent>,
}

/// A scripted client. A call that needs an answer which the script does not have panics: the test
/// that uses it is wrong.
#[derive(Debug, Default)]
pub struct FakeClient {
    state: Mutex<State>,
}

impl FakeClient {
    /// A client without a script.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the answer to one `execute`.
    pub fn answer_execute(self, answer: Result<ExecuteReply, ClientError>) -> Self {
        self.with(|state| state.executes.push_back(answer));
        self
    }

    /// Adds the events of one `start` or `connect`. Without an exit event at the end the stream
    /// ends with [`ClientError::OutcomeUnknown`], as a broken connection does.
    pub fn answer_stream(self, events: impl IntoIterator<Item = ProcessEvent>) -> Self {
        let events = FakeEvents { events: events.into_iter().collect(), exited: false };
        self.with(|state| state.streams.push_back(Ok(events)));
        self
    }

    /// Adds the refusal of one `start` or `connect`.
    pub fn refuse_stream(self, error: ClientError) -> Self {
        self.with(|state| state.streams.push_back(Err(error)));
        self
    }

    /// Adds the answer to one `get` or `wait`.
    pub fn answer_process(self, answer: Result<ProcessInfo, ClientError>) -> Self {
        self.with(|state| state.processes.push_back(answer));
        self
    }

    /// Sets what `get_capabilities` answers.
    pub fn with_capabilities(self, capabilities: Capabilities) -> Self {
        self.with(|state| state.capabilities = Some(capabilities));
        self
    }

    /// Sets what `get_workspace` answers.
    pub fn with_workspace(self, workspace: Workspace) -> Self {
        self.with(|state| state.workspace = Some(workspace));
        self
    }

    /// Sets what `list_tools` answers.
    pub fn with_tools(self, tools: Vec<Tool>) -> Self {
        self.with(|state| state.tools = Some(tools));
        self
    }

    /// Adds the answer to one `read`.
    pub fn answer_read(self, answer: Result<Vec<Bytes>, ClientError>) -> Self {
        self.with(|state| state.reads.push_back(answer));
        self
    }

    /// Adds the answer to one `call_tool`.
    pub fn answer_tool(self, answer: Result<ToolReply, ClientError>) -> Self {
        self.with(|state| state.tool_replies.push_back(answer));
        self
    }

    /// Sets the stamps that there are. `list_stamps` and `verify_stamps` show those that are asked
    /// for, `clear_stamps` drops them.
    pub fn with_stamps(self, stamps: Vec<StampRecord>) -> Self {
        self.with(|state| state.stamps = stamps);
        self
    }

    /// Sets what `get_stamp_history` answers.
    pub fn with_stamp_history(self, history: Vec<StampEvent>) -> Self {
        self.with(|state| state.stamp_history = history);
        self
    }

    /// The calls so far, in order.
    pub fn calls(&self) -> Vec<Call> {
        self.with(|state| state.calls.clone())
    }

    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut self.state.lock().expect("no test panics while it holds the script"))
    }

    /// Notes a call and takes its answer from the script.
    fn play<T>(&self, call: Call, take: impl FnOnce(&mut State) -> Option<T>) -> T {
        let answer = self.with(|state| {
            state.calls.push(call.clone());
            take(state)
        });
        answer.unwrap_or_else(|| panic!("the script has no answer to {call:?}"))
    }
}

/// The scripted events of one process.
#[derive(Debug)]
pub struct FakeEvents {
    events: VecDeque<ProcessEvent>,
    exited: bool,
}

impl Events for FakeEvents {
    async fn next(&mut self) -> Result<Option<ProcessEvent>, ClientError> {
        match self.events.pop_front() {
            Some(event) => {
                self.exited |= matches!(event, ProcessEvent::Exit(_));
                Ok(Some(event))
            }
            None if self.exited => Ok(None),
            None => Err(ClientError::OutcomeUnknown { operation: "Start", source: None }),
        }
    }
}

/// Chunks of a script.
#[derive(Debug)]
pub struct FakeChunks(VecDeque<bytes::Bytes>);

impl Chunks for FakeChunks {
    async fn next(&mut self) -> Result<Option<bytes::Bytes>, ClientError> {
        Ok(self.0.pop_front())
    }
}

impl Client for FakeClient {
    type Events = FakeEvents;
    type Chunks = FakeChunks;

    async fn execute(&self, request: ExecuteRequest) -> Result<ExecuteReply, ClientError> {
        self.play(Call::Execute(request), |state| state.executes.pop_front())
    }

    async fn start(&self, request: StartRequest) -> Result<FakeEvents, ClientError> {
        self.play(Call::Start(request), |state| state.streams.pop_front())
    }

    async fn connect(
        &self,
        process_id: &str,
        stdout_offset: u64,
        stderr_offset: u64,
    ) -> Result<FakeEvents, ClientError> {
        let process_id = process_id.to_owned();
        let call = Call::Connect { process_id, stdout_offset, stderr_offset };
        self.play(call, |state| state.streams.pop_front())
    }

    async fn write_stdin(
        &self,
        process_id: &str,
        offset: u64,
        data: Bytes,
        _request_id: &str,
    ) -> Result<u64, ClientError> {
        let written = offset + data.len() as u64;
        let process_id = process_id.to_owned();
        Ok(self.play(Call::WriteStdin { process_id, offset, data }, |_| Some(written)))
    }

    async fn close_stdin(&self, process_id: &str, _request_id: &str) -> Result<(), ClientError> {
        self.play(Call::CloseStdin { process_id: process_id.to_owned() }, |_| Some(()));
        Ok(())
    }

    async fn send_signal(
        &self,
        process_id: &str,
        signal: i32,
        target: SignalTarget,
        _request_id: &str,
    ) -> Result<u32, ClientError> {
        let process_id = process_id.to_owned();
        Ok(self.play(Call::SendSignal { process_id, signal, target }, |_| Some(1)))
    }

    async fn resize_pty(
        &self,
        process_id: &str,
        size: PtySize,
        _request_id: &str,
    ) -> Result<(), ClientError> {
        let process_id = process_id.to_owned();
        self.play(Call::ResizePty { process_id, size }, |_| Some(()));
        Ok(())
    }

    async fn list(
        &self,
        session: &str,
        page_token: &str,
    ) -> Result<Page<ProcessInfo>, ClientError> {
        let call = Call::List { session: session.to_owned(), page_token: page_token.to_owned() };
        let items = self.play(call, |state| {
            let described = state.processes.iter().flatten().cloned().collect();
            Some(described)
        });
        Ok(Page { items, next_page_token: String::new() })
    }

    async fn get(&self, process_id: &str) -> Result<ProcessInfo, ClientError> {
        let call = Call::Get { process_id: process_id.to_owned() };
        self.play(call, |state| state.processes.pop_front())
    }

    async fn wait(
        &self,
        process_id: &str,
        timeout: Option<Duration>,
    ) -> Result<ProcessInfo, ClientError> {
        let call = Call::Wait { process_id: process_id.to_owned(), timeout };
        self.play(call, |state| state.processes.pop_front())
    }

    async fn get_capabilities(&self) -> Result<Capabilities, ClientError> {
        Ok(self.play(Call::GetCapabilities, |state| state.capabilities.clone()))
    }

    async fn get_workspace(&self) -> Result<Workspace, ClientError> {
        Ok(self.play(Call::GetWorkspace, |state| state.workspace.clone()))
    }

    async fn end_session(&self, session: &str, _request_id: &str) -> Result<u32, ClientError> {
        Ok(self.play(Call::EndSession { session: session.to_owned() }, |_| Some(0)))
    }

    async fn list_tools(&self) -> Result<Vec<Tool>, ClientError> {
        Ok(self.play(Call::ListTools, |state| state.tools.clone()))
    }

    async fn read(
        &self,
        path: &str,
        offset: u64,
        length: u64,
        session: &str,
    ) -> Result<FakeChunks, ClientError> {
        let (path, session) = (path.to_owned(), session.to_owned());
        let call = Call::Read { path, offset, length, session };
        let chunks = self.play(call, |state| state.reads.pop_front())?;
        Ok(FakeChunks(chunks.into()))
    }

    async fn call_tool(&self, request: CallToolRequest) -> Result<ToolReply, ClientError> {
        self.play(Call::CallTool(request), |state| state.tool_replies.pop_front())
    }

    async fn list_stamps(
        &self,
        session: &str,
        path_prefix: &str,
        page_token: &str,
    ) -> Result<Page<StampRecord>, ClientError> {
        let call = Call::ListStamps {
            session: session.to_owned(),
            path_prefix: path_prefix.to_owned(),
            page_token: page_token.to_owned(),
        };
        Ok(self.play(call, |state| Some(page_of(&state.stamps, session, path_prefix))))
    }

    async fn get_stamp_history(
        &self,
        path: &str,
        session: &str,
        page_token: &str,
    ) -> Result<Page<StampEvent>, ClientError> {
        let call = Call::GetStampHistory {
            path: path.to_owned(),
            session: session.to_owned(),
            page_token: page_token.to_owned(),
        };
        let items = self.play(call, |state| Some(state.stamp_history.clone()));
        Ok(Page { items, next_page_token: String::new() })
    }

    async fn verify_stamps(
        &self,
        session: &str,
        path_prefix: &str,
        page_token: &str,
    ) -> Result<Page<StampRecord>, ClientError> {
        let call = Call::VerifyStamps {
            session: session.to_owned(),
            path_prefix: path_prefix.to_owned(),
            page_token: page_token.to_owned(),
        };
        Ok(self.play(call, |state| Some(page_of(&state.stamps, session, path_prefix))))
    }

    async fn clear_stamps(
        &self,
        session: &str,
        path_prefix: &str,
        _request_id: &str,
    ) -> Result<u64, ClientError> {
        let call =
            Call::ClearStamps { session: session.to_owned(), path_prefix: path_prefix.to_owned() };
        Ok(self.play(call, |state| {
            let before = state.stamps.len();
            state.stamps.retain(|stamp| !is_meant(stamp, session, path_prefix));
            Some((before - state.stamps.len()) as u64)
        }))
    }
}

fn page_of(stamps: &[StampRecord], session: &str, path_prefix: &str) -> Page<StampRecord> {
    let meant = |stamp: &&StampRecord| is_meant(stamp, session, path_prefix);
    let items = stamps.iter().filter(meant).cloned().collect();
    Page { items, next_page_token: String::new() }
}

/// Whether a stamp belongs to the session and its path is, or lies below, the prefix.
fn is_meant(stamp: &StampRecord, session: &str, path_prefix: &str) -> bool {
    let of_session = session.is_empty() || stamp.session == session;
    let prefix = path_prefix.trim_end_matches('/');
    let below = match stamp.path.strip_prefix(prefix) {
        Some(rest) => prefix.is_empty() || rest.is_empty() || rest.starts_with('/'),
        None => false,
    };
    of_session && below
}

#[cfg(test)]
mod tests {
    use futures::executor::block_on;

    use super::*;

    fn started() -> ProcessEvent {
        ProcessEvent::Started { process_id: "p1".into(), pid: 7, replayed: false }
    }

    #[test]
    fn a_stream_without_an_exit_event_ends_with_an_unknown_outcome() {
        let client = FakeClient::new().answer_stream([started()]);
        let mut events = block_on(client.start(StartRequest::default())).unwrap();
        assert_eq!(block_on(events.next()).unwrap(), Some(started()));
        let error = block_on(events.next()).unwrap_err();
        assert!(matches!(error, ClientError::OutcomeUnknown { .. }), "{error}");
    }

    #[test]
    fn calls_are_remembered_in_order() {
        let client = FakeClient::new();
        assert_eq!(block_on(client.write_stdin("p1", 3, Bytes::from("ab"), "r")).unwrap(), 5);
        block_on(client.close_stdin("p1", "r")).unwrap();
        let data = Bytes::from("ab");
        let write = Call::WriteStdin { process_id: "p1".into(), offset: 3, data };
        assert_eq!(client.calls(), [write, Call::CloseStdin { process_id: "p1".into() }]);
    }

    fn stamp(session: &str, path: &str) -> StampRecord {
        StampRecord {
            session: session.to_owned(),
            path: path.to_owned(),
            stamp: cofferdam_spec::Stamp { digest: [0; 32], size: 0 },
            call: "r".to_owned(),
            time: std::time::SystemTime::UNIX_EPOCH,
            state: crate::StampState::Fresh,
            shown: Vec::new(),
            complete: true,
        }
    }

    #[test]
    fn stamps_are_found_and_dropped_by_session_and_directory() {
        let stamps = vec![stamp("a", "/w/x"), stamp("a", "/w/x/y"), stamp("a", "/w/xy")];
        let client = FakeClient::new().with_stamps([stamps, vec![stamp("b", "/w/x")]].concat());
        assert_eq!(block_on(client.list_stamps("", "", "")).unwrap().items.len(), 4);
        assert_eq!(block_on(client.verify_stamps("a", "/w/x/", "")).unwrap().items.len(), 2);
        assert_eq!(block_on(client.clear_stamps("a", "/w/x", "r")).unwrap(), 2);
        let left = block_on(client.list_stamps("a", "/w", "")).unwrap().items;
        assert_eq!(left, [stamp("a", "/w/xy")]);
    }

    #[test]
    #[should_panic(expected = "the script has no answer to GetWorkspace")]
    fn a_call_outside_of_the_script_panics() {
        let _ = block_on(FakeClient::new().get_workspace());
    }
}
