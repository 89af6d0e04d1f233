//! The connection.

use std::time::Duration;

use bytes::Bytes;
use cofferdam_client::{
    CallToolRequest, Capabilities, Chunks, Client, ClientError, Events, ExecuteReply,
    ExecuteRequest, Page, ProcessEvent, ProcessInfo, SignalTarget, StampEvent, StampRecord,
    StartRequest, Tool, ToolReply, Workspace,
};
use cofferdam_proto::duration_to_wire;
use cofferdam_proto::v1::{
    self, filesystem_service_client, process_service_client, stamp_service_client,
    tool_service_client, workspace_service_client,
};
use cofferdam_spec::PtySize;
use cofferdam_transport::JoinedWrites;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Response, Status, Streaming};

use crate::UnixAddress;
use crate::status::{Effect, NotConnected, client_error};
use crate::wire::{
    Unusable, capabilities_from_wire, event_from_wire, execute_from_wire, execute_to_wire,
    history_from_wire, list_from_wire, malformed, process_from_wire, stamps_from_wire,
    start_to_wire, target_to_wire, tool_reply_from_wire, tools_from_wire, workspace_from_wire,
};

/// Largest answer: the contract's 1 MiB, and the transport's room above it.
const RESPONSE_BYTES_MAX: usize = 1024 * 1024 + 64 * 1024;

/// Largest request that is sent: above the contract's 16 MiB, so that the daemon's own refusal,
/// which names the limit, is what a caller sees.
const REQUEST_BYTES_MAX: usize = 17 * 1024 * 1024;

/// What may be on its way in one stream, and in all: enough that a file is read at the speed of
/// the machine, whatever the two sides are busy with.
const STREAM_WINDOW_BYTES: u32 = 8 * 1024 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 16 * 1024 * 1024;

/// Largest frame that the daemon may send: a chunk of a file and its framing in one piece.
const FRAME_BYTES_MAX: u32 = 1024 * 1024 + 64 * 1024;

/// A connection to one daemon. It does not reconnect to another daemon on the same path without
/// its calls failing first: a process belongs to the daemon that started it.
#[derive(Debug, Clone)]
pub struct GrpcClient {
    processes: process_service_client::ProcessServiceClient<Channel>,
    workspace: workspace_service_client::WorkspaceServiceClient<Channel>,
    tools: tool_service_client::ToolServiceClient<Channel>,
    stamps: stamp_service_client::StampServiceClient<Channel>,
    files: filesystem_service_client::FilesystemServiceClient<Channel>,
}

impl GrpcClient {
    /// Connects. The socket is opened now, so that a daemon that is not there is known at once.
    pub async fn connect(address: &UnixAddress) -> Result<Self, ClientError> {
        let transport = |source: Box<dyn std::error::Error + Send + Sync>| ClientError::Transport {
            operation: "connect",
            source,
        };
        let path = address.path().to_owned();
        let connector = tower::service_fn(move |_| {
            let path = path.clone();
            async move {
                let stream = UnixStream::connect(path).await.map_err(NotConnected)?;
                Ok::<_, NotConnected>(TokioIo::new(JoinedWrites::new(stream)))
            }
        });
        // The URI only fills in `:authority`; the connector knows the path.
        let channel = Endpoint::from_static("http://localhost")
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_frame_size(FRAME_BYTES_MAX)
            .connect_with_connector(connector)
            .await
            .map_err(|error| transport(Box::new(error)))?;
        let processes = process_service_client::ProcessServiceClient::new(channel.clone())
            .max_decoding_message_size(RESPONSE_BYTES_MAX)
            .max_encoding_message_size(REQUEST_BYTES_MAX);
        let workspace = workspace_service_client::WorkspaceServiceClient::new(channel.clone())
            .max_decoding_message_size(RESPONSE_BYTES_MAX);
        let tools = tool_service_client::ToolServiceClient::new(channel.clone())
            .max_decoding_message_size(RESPONSE_BYTES_MAX)
            .max_encoding_message_size(REQUEST_BYTES_MAX);
        let stamps = stamp_service_client::StampServiceClient::new(channel.clone())
            .max_decoding_message_size(RESPONSE_BYTES_MAX);
        let files = filesystem_service_client::FilesystemServiceClient::new(channel)
            .max_decoding_message_size(RESPONSE_BYTES_MAX);
        Ok(Self { processes, workspace, tools, stamps, files })
    }

    // A tonic client is a handle that needs `&mut`; its clone is cheap and shares the connection.
    fn processes(&self) -> process_service_client::ProcessServiceClient<Channel> {
        self.processes.clone()
    }

    fn workspace(&self) -> workspace_service_client::WorkspaceServiceClient<Channel> {
        self.workspace.clone()
    }

    fn tools(&self) -> tool_service_client::ToolServiceClient<Channel> {
        self.tools.clone()
    }

    fn files(&self) -> filesystem_service_client::FilesystemServiceClient<Channel> {
        self.files.clone()
    }

    fn stamps(&self) -> stamp_service_client::StampServiceClient<Channel> {
        self.stamps.clone()
    }
}

/// Takes the answer of a unary call.
fn answer<T, U>(
    operation: &'static str,
    effect: Effect,
    result: Result<Response<T>, Status>,
    convert: impl FnOnce(T) -> Result<U, Unusable>,
) -> Result<U, ClientError> {
    let message = result.map_err(|status| client_error(operation, effect, status))?.into_inner();
    convert(message).map_err(malformed(operation))
}

/// The events of one process over gRPC.
#[derive(Debug)]
pub struct GrpcEvents {
    operation: &'static str,
    stream: Streaming<v1::ProcessEvent>,
    exited: bool,
}

impl Events for GrpcEvents {
    async fn next(&mut self) -> Result<Option<ProcessEvent>, ClientError> {
        if self.exited {
            return Ok(None);
        }
        let operation = self.operation;
        match self.stream.message().await {
            Ok(Some(message)) => {
                let event = event_from_wire(message).map_err(malformed(operation))?;
                self.exited = matches!(event, ProcessEvent::Exit(_));
                Ok(Some(event))
            }
            Ok(None) => Err(ClientError::OutcomeUnknown { operation, source: None }),
            Err(status) => Err(client_error(operation, Effect::Mutates, status)),
        }
    }
}

/// The bytes of one file over gRPC.
#[derive(Debug)]
pub struct GrpcChunks {
    stream: Streaming<v1::ReadResponse>,
    ended: bool,
}

impl Chunks for GrpcChunks {
    async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        let operation = "Read";
        while !self.ended {
            let message = self.stream.message().await;
            let message =
                message.map_err(|status| client_error(operation, Effect::Reads, status))?;
            match message.and_then(|message| message.part) {
                Some(v1::read_response::Part::Started(_)) => {}
                Some(v1::read_response::Part::Chunk(chunk)) => return Ok(Some(chunk.data)),
                Some(v1::read_response::Part::Ended(_)) => self.ended = true,
                None => return Err(ClientError::OutcomeUnknown { operation, source: None }),
            }
        }
        Ok(None)
    }
}

impl Client for GrpcClient {
    type Events = GrpcEvents;
    type Chunks = GrpcChunks;

    async fn execute(&self, request: ExecuteRequest) -> Result<ExecuteReply, ClientError> {
        let result = self.processes().execute(execute_to_wire(request)).await;
        answer("Execute", Effect::Mutates, result, execute_from_wire)
    }

    async fn start(&self, request: StartRequest) -> Result<GrpcEvents, ClientError> {
        let result = self.processes().start(start_to_wire(request)).await;
        answer("Start", Effect::Mutates, result, |stream| {
            Ok(GrpcEvents { operation: "Start", stream, exited: false })
        })
    }

    async fn connect(
        &self,
        process_id: &str,
        stdout_offset: u64,
        stderr_offset: u64,
    ) -> Result<GrpcEvents, ClientError> {
        let process_id = process_id.to_owned();
        let request = v1::ConnectRequest { process_id, stdout_offset, stderr_offset };
        let result = self.processes().connect(request).await;
        answer("Connect", Effect::Reads, result, |stream| {
            Ok(GrpcEvents { operation: "Connect", stream, exited: false })
        })
    }

    async fn write_stdin(
        &self,
        process_id: &str,
        offset: u64,
        data: Bytes,
        request_id: &str,
    ) -> Result<u64, ClientError> {
        let request = v1::WriteStdinRequest {
            process_id: process_id.to_owned(),
            data,
            request_id: request_id.to_owned(),
            offset: Some(offset),
        };
        let result = self.processes().write_stdin(request).await;
        answer("WriteStdin", Effect::Mutates, result, |reply| Ok(reply.offset))
    }

    async fn close_stdin(&self, process_id: &str, request_id: &str) -> Result<(), ClientError> {
        let request = v1::CloseStdinRequest {
            process_id: process_id.to_owned(),
            request_id: request_id.to_owned(),
        };
        let result = self.processes().close_stdin(request).await;
        answer("CloseStdin", Effect::Mutates, result, |_| Ok(()))
    }

    async fn send_signal(
        &self,
        process_id: &str,
        signal: i32,
        target: SignalTarget,
        request_id: &str,
    ) -> Result<u32, ClientError> {
        let request = v1::SendSignalRequest {
            process_id: process_id.to_owned(),
            signal,
            target: target_to_wire(target).into(),
            request_id: request_id.to_owned(),
        };
        let result = self.processes().send_signal(request).await;
        answer("SendSignal", Effect::Mutates, result, |reply| Ok(reply.delivered))
    }

    async fn resize_pty(
        &self,
        process_id: &str,
        size: PtySize,
        request_id: &str,
    ) -> Result<(), ClientError> {
        let request = v1::ResizePtyRequest {
            process_id: process_id.to_owned(),
            rows: size.rows.into(),
            cols: size.cols.into(),
            request_id: request_id.to_owned(),
        };
        let result = self.processes().resize_pty(request).await;
        answer("ResizePty", Effect::Mutates, result, |_| Ok(()))
    }

    async fn list(
        &self,
        session: &str,
        page_token: &str,
    ) -> Result<Page<ProcessInfo>, ClientError> {
        let request = v1::ListRequest {
            session: session.to_owned(),
            page_size: 0,
            page_token: page_token.to_owned(),
        };
        let result = self.processes().list(request).await;
        answer("List", Effect::Reads, result, list_from_wire)
    }

    async fn get(&self, process_id: &str) -> Result<ProcessInfo, ClientError> {
        let request = v1::GetRequest { process_id: process_id.to_owned() };
        let result = self.processes().get(request).await;
        answer("Get", Effect::Reads, result, |reply| process_from_wire(reply.process))
    }

    async fn wait(
        &self,
        process_id: &str,
        timeout: Option<Duration>,
    ) -> Result<ProcessInfo, ClientError> {
        let request = v1::WaitRequest {
            process_id: process_id.to_owned(),
            timeout: timeout.map(duration_to_wire),
        };
        let result = self.processes().wait(request).await;
        answer("Wait", Effect::Reads, result, |reply| process_from_wire(reply.process))
    }

    async fn get_capabilities(&self) -> Result<Capabilities, ClientError> {
        let result = self.workspace().get_capabilities(v1::GetCapabilitiesRequest {}).await;
        answer("GetCapabilities", Effect::Reads, result, capabilities_from_wire)
    }

    async fn get_workspace(&self) -> Result<Workspace, ClientError> {
        let result = self.workspace().get_workspace(v1::GetWorkspaceRequest {}).await;
        answer("GetWorkspace", Effect::Reads, result, workspace_from_wire)
    }

    async fn end_session(&self, session: &str, request_id: &str) -> Result<u32, ClientError> {
        let request = v1::EndSessionRequest {
            session: session.to_owned(),
            request_id: request_id.to_owned(),
        };
        let result = self.workspace().end_session(request).await;
        answer("EndSession", Effect::Mutates, result, |reply| Ok(reply.ended_processes))
    }

    async fn read(
        &self,
        path: &str,
        offset: u64,
        length: u64,
        session: &str,
    ) -> Result<GrpcChunks, ClientError> {
        let (path, session) = (path.to_owned(), session.to_owned());
        let result = self.files().read(v1::ReadRequest { path, offset, length, session }).await;
        answer("Read", Effect::Reads, result, |stream| Ok(GrpcChunks { stream, ended: false }))
    }

    async fn list_tools(&self) -> Result<Vec<Tool>, ClientError> {
        let result = self.tools().list_tools(v1::ListToolsRequest {}).await;
        answer("ListTools", Effect::Reads, result, |reply| Ok(tools_from_wire(reply)))
    }

    async fn call_tool(&self, request: CallToolRequest) -> Result<ToolReply, ClientError> {
        let CallToolRequest { name, input_json, session, request_id } = request;
        let request = v1::CallToolRequest { name, input_json, session, request_id };
        let result = self.tools().call_tool(request).await;
        answer("CallTool", Effect::Mutates, result, tool_reply_from_wire)
    }

    async fn list_stamps(
        &self,
        session: &str,
        path_prefix: &str,
        page_token: &str,
    ) -> Result<Page<StampRecord>, ClientError> {
        let request = v1::ListStampsRequest {
            session: session.to_owned(),
            path_prefix: path_prefix.to_owned(),
            page_size: 0,
            page_token: page_token.to_owned(),
        };
        let result = self.stamps().list_stamps(request).await;
        answer("ListStamps", Effect::Reads, result, |reply| {
            stamps_from_wire(reply.stamps, reply.next_page_token)
        })
    }

    async fn get_stamp_history(
        &self,
        path: &str,
        session: &str,
        page_token: &str,
    ) -> Result<Page<StampEvent>, ClientError> {
        let request = v1::GetStampHistoryRequest {
            path: path.to_owned(),
            session: session.to_owned(),
            page_size: 0,
            page_token: page_token.to_owned(),
        };
        let result = self.stamps().get_stamp_history(request).await;
        answer("GetStampHistory", Effect::Reads, result, history_from_wire)
    }

    async fn verify_stamps(
        &self,
        session: &str,
        path_prefix: &str,
        page_token: &str,
    ) -> Result<Page<StampRecord>, ClientError> {
        let request = v1::VerifyStampsRequest {
            session: session.to_owned(),
            path_prefix: path_prefix.to_owned(),
            page_size: 0,
            page_token: page_token.to_owned(),
        };
        let result = self.stamps().verify_stamps(request).await;
        answer("VerifyStamps", Effect::Reads, result, |reply| {
            stamps_from_wire(reply.stamps, reply.next_page_token)
        })
    }

    async fn clear_stamps(
        &self,
        session: &str,
        path_prefix: &str,
        request_id: &str,
    ) -> Result<u64, ClientError> {
        let request = v1::ClearStampsRequest {
            session: session.to_owned(),
            path_prefix: path_prefix.to_owned(),
            request_id: request_id.to_owned(),
        };
        let result = self.stamps().clear_stamps(request).await;
        answer("ClearStamps", Effect::Mutates, result, |reply| Ok(reply.cleared))
    }
}
