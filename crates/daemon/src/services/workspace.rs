//! `WorkspaceService`.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use cofferdam_proto::v1;
use cofferdam_proto::v1::workspace_service_server::WorkspaceService;
use cofferdam_spec::{ARGUMENT_BYTES_MAX, ARGUMENTS_BYTES_MAX, Capability, Limits};
use tonic::{Request, Response, Status};

use crate::decide::{CALLS_MAX, GRACE};
use crate::files::{Caller, Files};
use crate::output::STREAM_BYTES_MAX;
use crate::services::UPLOAD_BYTES_MAX;
use crate::supervisor::Handle;
use crate::validate::{Checker, EXECUTE_REQUEST_BYTES_MAX, MESSAGE_BYTES_MAX, within};

/// Grows when clients must know more than new fields.
const PROTOCOL_GENERATION: u32 = 1;

/// How long EndSession waits beyond the grace for a tree to be gone.
const END_SESSION_MAX: Duration = Duration::from_secs(5);

/// What the workspace is; fixed while the daemon runs.
#[derive(Debug)]
pub(crate) struct Facts {
    pub(crate) version: &'static str,
    pub(crate) limits: Limits,
    pub(crate) directory: String,
    pub(crate) image: String,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) start_time: SystemTime,
    pub(crate) capabilities: Vec<Capability>,
}

/// The service.
#[derive(Debug, Clone)]
pub(crate) struct Workspace {
    supervisor: Handle,
    facts: Arc<Facts>,
    files: Files,
}

impl Workspace {
    /// A service over a supervisor and the files of its cell.
    pub(crate) fn new(supervisor: Handle, facts: Facts, files: Files) -> Self {
        Self { supervisor, facts: Arc::new(facts), files }
    }
}

fn to_wire(capability: &Capability) -> v1::Capability {
    let Capability { name, available, detail, fix } = capability.clone();
    v1::Capability { name, available, detail, fix }
}

#[tonic::async_trait]
impl WorkspaceService for Workspace {
    async fn get_capabilities(
        &self,
        _: Request<v1::GetCapabilitiesRequest>,
    ) -> Result<Response<v1::GetCapabilitiesResponse>, Status> {
        let limits = &self.facts.limits;
        let seconds = |time: Option<Duration>| time.map_or(0, |time| time.as_secs().max(1));
        Ok(Response::new(v1::GetCapabilitiesResponse {
            enforcement: Some(self.supervisor.enforcement()),
            version: self.facts.version.to_owned(),
            protocol_generation: PROTOCOL_GENERATION,
            message_limits: Some(v1::MessageLimits {
                execute_request_bytes: EXECUTE_REQUEST_BYTES_MAX,
                request_bytes: MESSAGE_BYTES_MAX,
                response_bytes: MESSAGE_BYTES_MAX,
                argument_bytes: ARGUMENT_BYTES_MAX as u64,
                arguments_bytes: ARGUMENTS_BYTES_MAX as u64,
                concurrent_calls: CALLS_MAX as u32,
                retained_output_bytes: STREAM_BYTES_MAX,
                write_content_bytes: UPLOAD_BYTES_MAX,
            }),
            call_limits: Some(v1::CallLimits {
                wall_default_seconds: seconds(limits.wall),
                idle_default_seconds: seconds(limits.idle),
                processes: limits.processes,
                open_files: limits.open_files,
            }),
            capabilities: self.facts.capabilities.iter().map(to_wire).collect(),
        }))
    }

    async fn get_workspace(
        &self,
        _: Request<v1::GetWorkspaceRequest>,
    ) -> Result<Response<v1::GetWorkspaceResponse>, Status> {
        let state = self.supervisor.state().borrow().clone();
        let facts = &self.facts;
        Ok(Response::new(v1::GetWorkspaceResponse {
            host_directory: facts.directory.clone(),
            cell_directory: "/workspace".to_owned(),
            image: facts.image.clone(),
            uid: facts.uid,
            gid: facts.gid,
            start_time: Some(facts.start_time.into()),
            daemon_pid: std::process::id(),
            running_processes: u32::try_from(state.running).unwrap_or(u32::MAX),
            calls_total: state.calls,
            cell_generation: state.generation,
            enforcement: Some(state.enforcement),
            warnings: state.warnings,
        }))
    }

    async fn end_session(
        &self,
        request: Request<v1::EndSessionRequest>,
    ) -> Result<Response<v1::EndSessionResponse>, Status> {
        let request = request.into_inner();
        within(&request, MESSAGE_BYTES_MAX)?;
        let mut checker = Checker::default();
        checker.request_id(&request.request_id);
        let session = checker.session(&request.session);
        let session = checker.finish(session)?;
        let caller = Caller { session: session.clone(), call: request.request_id };
        self.files.with_stamps(|stamps| stamps.clear(&caller, "", SystemTime::now()));
        let ended = self.supervisor.end_session(session).await;
        let all_gone = async {
            for process in &ended {
                process.gone().await;
            }
        };
        if tokio::time::timeout(GRACE + END_SESSION_MAX, all_gone).await.is_err() {
            tracing::error!("processes of an ended session are still there");
        }
        Ok(Response::new(v1::EndSessionResponse {
            ended_processes: u32::try_from(ended.len()).unwrap_or(u32::MAX),
            enforcement: Some(self.supervisor.enforcement()),
        }))
    }
}
