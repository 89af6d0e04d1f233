//! `ToolService`.

use std::sync::Arc;

use cofferdam_proto::v1;
use cofferdam_proto::v1::tool_service_server::ToolService;
use tonic::{Request, Response, Status};

use crate::files::Caller;
use crate::supervisor::Handle;
use crate::tools::{DEFINITIONS, Tools};
use crate::validate::{Checker, EXECUTE_REQUEST_BYTES_MAX, within};

/// The service.
#[derive(Debug, Clone)]
pub(crate) struct ToolCalls {
    supervisor: Handle,
    tools: Arc<Tools>,
}

impl ToolCalls {
    /// A service over the tools of a workspace.
    pub(crate) fn new(supervisor: Handle, tools: Tools) -> Self {
        Self { supervisor, tools: Arc::new(tools) }
    }
}

#[tonic::async_trait]
impl ToolService for ToolCalls {
    async fn list_tools(
        &self,
        _: Request<v1::ListToolsRequest>,
    ) -> Result<Response<v1::ListToolsResponse>, Status> {
        let tools = DEFINITIONS.iter().map(|definition| v1::Tool {
            name: definition.name.to_owned(),
            description: definition.about.to_owned(),
            input_schema_json: definition.schema().to_string(),
            read_only: definition.read_only,
        });
        Ok(Response::new(v1::ListToolsResponse { tools: tools.collect() }))
    }

    async fn call_tool(
        &self,
        request: Request<v1::CallToolRequest>,
    ) -> Result<Response<v1::CallToolResponse>, Status> {
        let request = request.into_inner();
        within(&request, EXECUTE_REQUEST_BYTES_MAX)?;
        let caller = caller(&request)?;
        let answer = self.tools.call(&caller, &request.name, &request.input_json).await?;
        Ok(Response::new(v1::CallToolResponse {
            output_json: answer.output_json,
            is_error: answer.is_error,
            enforcement: Some(self.supervisor.enforcement()),
            ..v1::CallToolResponse::default()
        }))
    }
}

/// Checks whose call it is, and its name.
fn caller(request: &v1::CallToolRequest) -> Result<Caller, crate::status::Fault> {
    let mut checker = Checker::default();
    checker.request_id(&request.request_id);
    let session = checker.session(&request.session);
    if request.session.is_empty() {
        checker.refuse("session", "is empty: what was read counts for a session");
    }
    let call = || Some(Caller { session: session?, call: request.request_id.clone() });
    checker.finish(call())
}
