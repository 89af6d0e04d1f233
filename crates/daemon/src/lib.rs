//! The daemon: gRPC services over one cell.
//!
//! [`Config`] → [`Daemon::new`] (opens the cell) → [`Daemon::run`] (serves until told to leave).
//! One [`supervisor`] task owns the cell; each running process has one [`pump`]; handlers only
//! translate. Everything runs on one thread, the one that launched the cell: the kernel ends a
//! cell with its thread, and no call pays for a change of threads.
#![forbid(unsafe_code)]

mod account;
mod config;
mod decide;
mod drain;
mod escape;
mod events;
mod explain;
mod files;
mod flow;
mod link;
mod listen;
mod output;
mod process;
mod pump;
mod ready;
mod records;
mod services;
mod stamps;
mod status;
mod stdin;
mod supervisor;
#[cfg(test)]
mod testing;
mod toolbox;
mod tools;
mod validate;

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use cofferdam_cell::LaunchError;
use cofferdam_proto::v1::filesystem_service_server::FilesystemServiceServer;
use cofferdam_proto::v1::process_service_server::ProcessServiceServer;
use cofferdam_proto::v1::stamp_service_server::StampServiceServer;
use cofferdam_proto::v1::tool_service_server::ToolServiceServer;
use cofferdam_proto::v1::workspace_service_server::WorkspaceServiceServer;
use cofferdam_spec::Enforcement;
use thiserror::Error;
use tokio::net::UnixListener;
use tokio::sync::{oneshot, watch};
use tonic::transport::Server;
use tonic_health::ServingStatus;

pub use crate::config::Config;
use crate::explain::ExplainLayer;
use crate::files::Files;
use crate::link::{Launch, Port};
use crate::listen::{Connections, Incoming, Peers};
use crate::services::{
    Facts, Filesystem, Processes, Stamping, ToolCalls, WRITE_TEXT_REQUEST_BYTES_MAX, Watches,
    Workspace,
};
use crate::supervisor::{Handle, Supervisor};
pub use crate::tools::markdown as tools_markdown;
use crate::tools::{Background, Tools};
use crate::validate::{EXECUTE_REQUEST_BYTES_MAX, MESSAGE_BYTES_MAX, Rules, TRANSPORT_SLACK_BYTES};

/// Both ends ask for a sign of life when a connection is silent for so long …
const HTTP2_KEEPALIVE: Duration = Duration::from_secs(30);
/// … and give up on it when none comes.
const HTTP2_KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// Streams of one connection: calls and the readers beside them.
const STREAMS_MAX: u32 = 1024;

/// What a client may send ahead on one stream and on one connection; larger than the default
/// 64 KiB, so that the input of an Execute does not wait for acknowledgements.
const STREAM_WINDOW_BYTES: u32 = 1024 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 4 * 1024 * 1024;

/// After the last call has ended: time for clients to take their last events. A client that does
/// not read, or watches the health for ever, does not hold the daemon longer.
const SERVER_STOP_MAX: Duration = Duration::from_secs(2);

/// Why a daemon could not be made. Nothing of it is left.
#[derive(Debug, Error)]
pub enum StartError {
    /// The directory of job files could not be made or emptied.
    #[error("{operation} {path}")]
    Jobs {
        /// What was tried.
        operation: &'static str,
        /// On which path.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The cell could not be started.
    #[error(transparent)]
    Launch(#[from] LaunchError),
}

/// Why a daemon ended other than asked.
#[derive(Debug, Error)]
pub enum RunError {
    /// The cell's channels could not be registered with the runtime.
    #[error("register the cell's channels")]
    Register(#[source] std::io::Error),
    /// The reflection service could not be made.
    #[error("build the reflection service")]
    Reflection(#[source] tonic_reflection::server::Error),
    /// The server ended.
    #[error("serve the socket")]
    Serve(#[source] tonic::transport::Error),
    /// The supervisor ended, and the cell with it.
    #[error("the supervisor ended")]
    Supervisor(#[source] Option<tokio::task::JoinError>),
}

/// A daemon whose cell stands.
pub struct Daemon {
    config: Config,
    jobs: PathBuf,
    launch: Launch,
    port: Port,
}

impl std::fmt::Debug for Daemon {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Daemon").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Daemon {
    /// Opens the cell. Blocks for some milliseconds, on a thread that must live as long as the
    /// daemon and later run it.
    pub fn new(config: Config) -> Result<Daemon, StartError> {
        let plan = config.plan.clone();
        Self::with_launch(config, Box::new(move || cofferdam_cell::launch(&plan).map(Port::from)))
    }

    fn with_launch(config: Config, mut launch: Launch) -> Result<Daemon, StartError> {
        let jobs = jobs(&config);
        empty_directory(&jobs)?;
        let port = launch()?;
        Ok(Daemon { config, jobs, launch, port })
    }

    /// Serves `listener` until `shutdown` resolves or nobody needs the daemon any more; then
    /// drains. Call it on a current-thread runtime of the thread that called [`Daemon::new`].
    pub async fn run(
        self,
        listener: UnixListener,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), RunError> {
        let Daemon { config, jobs, launch, port } = self;
        let facts = facts(&config, &port.enforcement);
        let nonce = nonce();
        let (supervisor, handle) =
            Supervisor::new(launch, port, jobs, nonce).map_err(RunError::Register)?;
        let mut task = tokio::spawn(supervisor.run());
        let served = serve(&config, facts, &handle, listener, shutdown);
        let result = tokio::select! {
            result = served => result,
            ended = &mut task => return Err(RunError::Supervisor(ended.err())),
        };
        handle.stop();
        task.await.map_err(|error| RunError::Supervisor(Some(error)))?;
        result
    }
}

async fn serve(
    config: &Config,
    facts: Facts,
    handle: &Handle,
    listener: UnixListener,
    shutdown: impl Future<Output = ()>,
) -> Result<(), RunError> {
    let connections = watch::Sender::new(Connections::default());
    let idle = drain::idle(config.idle_exit, connections.subscribe(), handle.state());
    let peers = Peers {
        own: rustix::process::geteuid().as_raw(),
        named: config.plan.policy.socket_users.clone(),
    };
    let incoming = Incoming::new(listener, peers, connections);
    let (health, health_service) = tonic_health::server::health_reporter();
    report_health(&health, ServingStatus::Serving).await;
    let rules = Arc::new(Rules {
        limits: config.plan.policy.limits.clone(),
        environment: config::base_environment(&config.plan.policy.env, |name| {
            std::env::var(name).ok()
        }),
    });
    let processes = ProcessServiceServer::new(Processes::new(handle.clone(), Arc::clone(&rules)))
        .max_decoding_message_size((EXECUTE_REQUEST_BYTES_MAX + TRANSPORT_SLACK_BYTES) as usize)
        .max_encoding_message_size(MESSAGE_BYTES_MAX as usize);
    let files = Files::new(handle.clone());
    let tools = Tools::new(handle.clone(), rules, files.clone(), Background::default());
    let tools = ToolServiceServer::new(ToolCalls::new(handle.clone(), tools))
        .max_decoding_message_size((EXECUTE_REQUEST_BYTES_MAX + TRANSPORT_SLACK_BYTES) as usize)
        .max_encoding_message_size(MESSAGE_BYTES_MAX as usize);
    let watches = Watches::new(nonce());
    let filesystem = Filesystem::new(files.clone(), watches.clone(), jobs(config));
    let filesystem = FilesystemServiceServer::new(filesystem)
        .max_decoding_message_size((WRITE_TEXT_REQUEST_BYTES_MAX + TRANSPORT_SLACK_BYTES) as usize)
        .max_encoding_message_size(MESSAGE_BYTES_MAX as usize);
    let stamps = StampServiceServer::new(Stamping::new(files.clone()))
        .max_decoding_message_size((MESSAGE_BYTES_MAX + TRANSPORT_SLACK_BYTES) as usize)
        .max_encoding_message_size(MESSAGE_BYTES_MAX as usize);
    let workspace = WorkspaceServiceServer::new(Workspace::new(handle.clone(), facts, files))
        .max_decoding_message_size((MESSAGE_BYTES_MAX + TRANSPORT_SLACK_BYTES) as usize)
        .max_encoding_message_size(MESSAGE_BYTES_MAX as usize);
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(cofferdam_proto::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let (stop, stopped) = oneshot::channel::<()>();
    let server = Server::builder()
        .http2_keepalive_interval(Some(HTTP2_KEEPALIVE))
        .http2_keepalive_timeout(Some(HTTP2_KEEPALIVE_TIMEOUT))
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_concurrent_streams(STREAMS_MAX)
        .layer(ExplainLayer)
        .add_service(filesystem)
        .add_service(processes)
        .add_service(stamps)
        .add_service(tools)
        .add_service(workspace)
        .add_service(health_service)
        .add_service(reflection().build_v1().map_err(RunError::Reflection)?)
        .add_service(reflection().build_v1alpha().map_err(RunError::Reflection)?)
        .serve_with_incoming_shutdown(incoming, async {
            let _ = stopped.await;
        });
    let leave = async {
        tokio::select! {
            () = shutdown => tracing::info!("asked to stop"),
            () = idle => tracing::info!("nobody needs this daemon"),
        }
        report_health(&health, ServingStatus::NotServing).await;
        drain::drain(handle, config.drain_grace).await;
        let _ = stop.send(());
        tokio::time::sleep(SERVER_STOP_MAX).await;
    };
    tokio::select! {
        result = server => result.map_err(RunError::Serve),
        () = leave => Ok(()),
        never = watches.expire() => match never {},
    }
}

async fn report_health(health: &tonic_health::server::HealthReporter, status: ServingStatus) {
    let names = [
        "",
        "cofferdam.v1.FilesystemService",
        "cofferdam.v1.ProcessService",
        "cofferdam.v1.StampService",
        "cofferdam.v1.ToolService",
        "cofferdam.v1.WorkspaceService",
    ];
    for name in names {
        health.set_service_status(name, status).await;
    }
}

/// Where the output of calls is, and uploads until they are whole.
fn jobs(config: &Config) -> PathBuf {
    config.state.join("jobs")
}

fn facts(config: &Config, enforcement: &Enforcement) -> Facts {
    Facts {
        capabilities: cofferdam_sandbox::capabilities(&config.plan, enforcement),
        version: config.version,
        limits: config.plan.policy.limits.clone(),
        directory: config.plan.workspace.to_string_lossy().into_owned(),
        image: config.plan.image.name.clone(),
        uid: config.plan.ids.uid,
        gid: config.plan.ids.gid,
        start_time: SystemTime::now(),
    }
}

/// Makes the names of this daemon's processes differ from those of an earlier one: a client that
/// kept a name over a restart must get NOT_FOUND, never another process.
fn nonce() -> u32 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    since.as_secs() as u32 ^ (since.subsec_nanos() << 2) ^ std::process::id().rotate_left(16)
}

/// Makes the directory, and removes what an earlier daemon left in it.
fn empty_directory(path: &std::path::Path) -> Result<(), StartError> {
    let failed = |operation, path: &std::path::Path| {
        let path = path.to_owned();
        move |source| StartError::Jobs { operation, path, source }
    };
    std::fs::create_dir_all(path).map_err(failed("create", path))?;
    for entry in std::fs::read_dir(path).map_err(failed("list", path))? {
        let file = entry.map_err(failed("list", path))?.path();
        std::fs::remove_file(&file).map_err(failed("remove", &file))?;
    }
    Ok(())
}
