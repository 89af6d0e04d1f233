//! The daemon's services over a fake cell: an in-process init that runs ordinary children. What the
//! kernel enforces is not here; it is tested end to end.

mod calls;
mod endings;
pub(crate) mod fake;
mod faults;
mod files;
mod stamps;
mod tools;
mod watches;

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cofferdam_cell::LaunchError;
use cofferdam_proto::v1;
use cofferdam_proto::v1::filesystem_service_client::FilesystemServiceClient;
use cofferdam_proto::v1::process_event::Event;
use cofferdam_proto::v1::process_service_client::ProcessServiceClient;
use cofferdam_proto::v1::stamp_service_client::StampServiceClient;
use cofferdam_proto::v1::workspace_service_client::WorkspaceServiceClient;
use cofferdam_sandbox::{CellIds, Plan};
use cofferdam_spec::{HostImage, Policy};
use futures::StreamExt;
use hyper_util::rt::TokioIo;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};

use crate::link::Port;
use crate::testing::fake::FakeCell;
use crate::{Config, Daemon, RunError};

/// Longer than anything here takes, shorter than a person's patience.
const PATIENCE: Duration = Duration::from_secs(20);

/// A daemon under test, with a client.
struct TestDaemon {
    directory: tempfile::TempDir,
    cells: Arc<Mutex<Cells>>,
    stop: Option<oneshot::Sender<()>>,
    running: JoinHandle<Result<(), RunError>>,
    processes: ProcessServiceClient<Channel>,
    workspace: WorkspaceServiceClient<Channel>,
    files: FilesystemServiceClient<Channel>,
    stamps: StampServiceClient<Channel>,
}

/// What the fake launcher has done, and does next.
#[derive(Default)]
struct Cells {
    fail: bool,
    launched: u32,
    current: Option<FakeCell>,
}

impl TestDaemon {
    async fn new() -> Self {
        Self::with(|_| {}).await
    }

    async fn with(change: impl FnOnce(&mut Config)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut config = Config {
            plan: plan(directory.path().to_owned()),
            state: directory.path().to_owned(),
            idle_exit: None,
            drain_grace: Duration::from_secs(5),
            version: "test",
        };
        change(&mut config);
        let cells = Arc::new(Mutex::new(Cells::default()));
        let launcher = Arc::clone(&cells);
        let home = directory.path().join("home");
        std::fs::create_dir(&home).unwrap();
        let launch = Box::new(move || launch(&launcher, &home));
        let daemon = Daemon::with_launch(config, launch).unwrap();
        let socket = directory.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        let (stop, stopped) = oneshot::channel();
        let running = tokio::spawn(daemon.run(listener, async {
            let _ = stopped.await;
        }));
        let channel = connect(socket).await;
        let processes = ProcessServiceClient::new(channel.clone());
        let workspace = WorkspaceServiceClient::new(channel.clone());
        let files = FilesystemServiceClient::new(channel.clone())
            .max_decoding_message_size(1024 * 1024)
            .max_encoding_message_size(64 * 1024 * 1024);
        let stamps = StampServiceClient::new(channel);
        let stop = Some(stop);
        Self { directory, cells, stop, running, processes, workspace, files, stamps }
    }

    /// A second connection.
    async fn connect(&self) -> ProcessServiceClient<Channel> {
        ProcessServiceClient::new(connect(self.directory.path().join("socket")).await)
    }

    fn stop(&mut self) {
        self.stop.take().unwrap().send(()).unwrap();
    }

    fn job_files(&self) -> usize {
        std::fs::read_dir(self.directory.path().join("jobs")).unwrap().count()
    }

    async fn execute(&mut self, script: &str) -> v1::ExecuteResponse {
        self.processes.execute(execute(script)).await.unwrap().into_inner()
    }

    async fn start(&mut self, request: v1::StartRequest) -> Events {
        Events(self.processes.start(request).await.unwrap().into_inner())
    }
}

fn launch(cells: &Mutex<Cells>, home: &Path) -> Result<Port, LaunchError> {
    let mut cells = cells.lock().unwrap();
    if cells.fail {
        return Err(LaunchError::Spawn(std::io::Error::other("told to fail")));
    }
    cells.launched += 1;
    let (cell, port) = fake::launch(home.to_owned());
    cells.current = Some(cell);
    Ok(port)
}

fn plan(directory: PathBuf) -> Plan {
    let image = HostImage { name: "host".to_owned(), directories: Vec::new(), etc: Vec::new() };
    let ids = CellIds { uid: 1, gid: 1, map_root_files: false };
    let policy = Policy::default();
    Plan { workspace: directory.clone(), home: directory, image, policy, ids, fail_at: None }
}

async fn connect(socket: PathBuf) -> Channel {
    let connector = tower::service_fn(move |_: tonic::transport::Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://localhost").connect_with_connector(connector).await.unwrap()
}

fn request_id() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("r{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

fn shell(script: &str) -> Option<v1::ProcessConfig> {
    let command = ["bash", "-c", script].map(str::to_owned).to_vec();
    Some(v1::ProcessConfig { command, ..v1::ProcessConfig::default() })
}

fn execute(script: &str) -> v1::ExecuteRequest {
    v1::ExecuteRequest {
        process: shell(script),
        request_id: request_id(),
        ..v1::ExecuteRequest::default()
    }
}

fn start(script: &str) -> v1::StartRequest {
    v1::StartRequest {
        process: shell(script),
        request_id: request_id(),
        ..v1::StartRequest::default()
    }
}

fn connect_from(process_id: &str, stdout_offset: u64) -> v1::ConnectRequest {
    let process_id = process_id.to_owned();
    v1::ConnectRequest { process_id, stdout_offset, stderr_offset: 0 }
}

fn milliseconds(number: i32) -> Option<prost_types::Duration> {
    let nanos = number % 1000 * 1_000_000;
    Some(prost_types::Duration { seconds: i64::from(number / 1000), nanos })
}

async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("within patience")
}

/// Waits until it is true, by asking again.
async fn until(mut ask: impl AsyncFnMut() -> bool) {
    soon(async {
        while !ask().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

fn exited(code: i32) -> Option<v1::Exit> {
    Some(v1::Exit { reason: Some(v1::exit::Reason::Exited(v1::Exited { code })) })
}

/// The stream of a Start or Connect.
struct Events(tonic::Streaming<v1::ProcessEvent>);

/// All that a stream brought.
#[derive(Debug, Default)]
struct Collected {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    lag: u64,
    exit: Option<v1::ProcessEvent>,
}

impl Events {
    async fn next(&mut self) -> v1::ProcessEvent {
        soon(self.0.next()).await.unwrap().unwrap()
    }

    async fn started(&mut self) -> String {
        match self.next().await.event {
            Some(Event::Started(started)) => started.process_id,
            other => panic!("{other:?}"),
        }
    }

    /// Reads to the end. Offsets must go on without a hole that no lag event names.
    async fn collect(mut self, stdout_offset: u64) -> Collected {
        let mut all = Collected::default();
        let mut next = [stdout_offset, 0];
        while let Some(event) = soon(self.0.next()).await {
            let event = event.unwrap();
            assert!(all.exit.is_none(), "an event after the exit");
            match &event.event {
                Some(Event::Stdout(bytes)) => {
                    assert_eq!(event.offset, next[0]);
                    next[0] += bytes.len() as u64;
                    all.stdout.extend_from_slice(bytes);
                }
                Some(Event::Stderr(bytes)) => {
                    assert_eq!(event.offset, next[1]);
                    next[1] += bytes.len() as u64;
                    all.stderr.extend_from_slice(bytes);
                }
                Some(Event::Lag(lag)) => {
                    assert_eq!(lag.skipped_from, next[0]);
                    next[0] = lag.skipped_to;
                    all.lag += lag.skipped_to - lag.skipped_from;
                }
                Some(Event::Started(_) | Event::Keepalive(_)) => {}
                Some(Event::Exit(_)) => all.exit = Some(event),
                other => panic!("{other:?}"),
            }
        }
        assert!(all.exit.is_some(), "the exit is the last event");
        all
    }
}
