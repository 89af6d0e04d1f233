//! A daemon of the test's own.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use cofferdam_proto::v1;
use cofferdam_proto::v1::filesystem_service_client::FilesystemServiceClient;
use cofferdam_proto::v1::process_service_client::ProcessServiceClient;
use cofferdam_proto::v1::stamp_service_client::StampServiceClient;
use cofferdam_proto::v1::tool_service_client::ToolServiceClient;
use cofferdam_proto::v1::workspace_service_client::WorkspaceServiceClient;
use hyper_util::rt::TokioIo;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;
use tonic::Status;
use tonic::transport::{Channel, Endpoint, Uri};

use crate::call::{Run, bash, limits, unique};
use crate::host::Who;
use crate::processes::{Process, descendants};
use crate::tool::ToolReply;
use crate::watch::{CellTrace, Footprint, wait_for};
use crate::{binary, probe};

/// Longest time from start to readiness.
const START_TIME_MAX: Duration = Duration::from_secs(20);

/// Longest time from SIGTERM to the end, above the daemon's own grace.
const STOP_TIME_MAX: Duration = Duration::from_secs(30);

/// Largest message of ToolService, with what the transport adds.
const TOOL_MESSAGE_MAX: usize = 17 * 1024 * 1024;

/// How a daemon is started.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Text of its policy file.
    pub policy: Option<String>,
    /// Further variables of its environment. `{}` in a value stands for the test's directory.
    pub env: Vec<(String, String)>,
    /// Further arguments of `serve`.
    pub arguments: Vec<String>,
    /// Its umask, in octal, where it is not the test's.
    pub umask: Option<&'static str>,
    /// Whether it runs on a terminal, whose record is `terminal` in its directory.
    pub on_terminal: bool,
    /// Owner of the workspace where it is not the daemon's user.
    pub workspace_owner: Option<u32>,
    /// Size of a tmpfs that is mounted as the workspace, as `mount` takes it.
    pub workspace_tmpfs: Option<&'static str>,
    /// Files of the workspace that are bind mounts of a file of the same name in `backing`, each
    /// with its text.
    pub bound_files: Vec<(&'static str, &'static str)>,
    /// Called with the test's directory, which has `workspace`, `outside`, `home` and `tmp`, before
    /// the daemon starts.
    pub before: Option<fn(&Path)>,
}

/// A running daemon with its workspace. Dropping it ends both.
#[derive(Debug)]
pub struct Daemon {
    /// Who runs it.
    pub who: Who,
    /// The workspace on the host.
    pub workspace: PathBuf,
    /// Its state directory.
    pub state: PathBuf,
    /// A directory beside the workspace that is not shown in the cell; anybody may read it.
    pub outside: PathBuf,
    /// Its process id.
    pub pid: i32,
    child: Option<Child>,
    channel: Channel,
    log: Arc<Mutex<String>>,
    options: Options,
    // Before the directory: what is mounted in it goes first.
    _mounts: Mounts,
    directory: TempDir,
}

/// What the test mounted. Dropping it unmounts.
#[derive(Debug, Default)]
struct Mounts(Vec<PathBuf>);

impl Mounts {
    fn tmpfs(&mut self, target: &Path, size: &str) {
        let data = format!("size={size},mode=755");
        mount(Some("none"), target, Some("tmpfs"), MsFlags::empty(), Some(data.as_str()))
            .expect("root can mount");
        self.0.push(target.to_owned());
    }

    fn bind(&mut self, source: &Path, target: &Path) {
        let none: Option<&str> = None;
        mount(Some(source), target, none, MsFlags::MS_BIND, none).expect("root can mount");
        self.0.push(target.to_owned());
    }
}

impl Drop for Mounts {
    fn drop(&mut self) {
        for target in self.0.iter().rev() {
            if let Err(error) = umount2(target, MntFlags::MNT_DETACH) {
                eprintln!("{} stays mounted: {error}", target.display());
            }
        }
    }
}

/// A started program, before it is ready.
struct Started {
    child: Child,
    log: Arc<Mutex<String>>,
    lines: Receiver<()>,
}

impl Daemon {
    /// Starts a daemon with the default policy.
    pub async fn start(who: Who) -> Daemon {
        Self::start_with(who, Options::default()).await
    }

    /// Starts a daemon.
    pub async fn start_with(who: Who, options: Options) -> Daemon {
        let directory = tempfile::Builder::new()
            .prefix("cofferdam-test-")
            .permissions(fs::Permissions::from_mode(0o755))
            .tempdir_in("/tmp")
            .expect("a temporary directory can be made");
        let root = directory.path();
        own(root, who.id());
        let [workspace, outside, _, _] =
            ["workspace", "outside", "home", "tmp"].map(|name| made(root, name, who.id()));
        let mounts = mounted(root, &workspace, who.id(), &options);
        if let Some(owner) = options.workspace_owner {
            own(&workspace, owner);
        }
        if let Some(before) = options.before {
            before(root);
        }
        let state = root.join("state");
        let started = launch(who, &options, root);
        let mut daemon = Daemon {
            who,
            workspace,
            channel: connect(&state.join("daemon.sock")),
            state,
            outside,
            pid: started.child.id() as i32,
            child: Some(started.child),
            log: started.log,
            options,
            _mounts: mounts,
            directory,
        };
        daemon.wait_until_ready(&started.lines).await;
        daemon
    }

    /// Starts it again over the same workspace and state, after it has ended.
    pub async fn restart(&mut self) {
        assert!(self.child.is_none(), "the earlier one was reaped");
        let started = launch(self.who, &self.options, self.directory.path());
        self.pid = started.child.id() as i32;
        self.child = Some(started.child);
        self.log = started.log;
        self.channel = connect(&self.socket());
        self.wait_until_ready(&started.lines).await;
    }

    /// Kills it without warning, reaps it, and starts it again.
    pub async fn kill_and_restart(&mut self) {
        self.signal(Signal::SIGKILL);
        self.ended().await;
        self.restart().await;
    }

    /// It says one line when it is ready; a line before it (a warning) does not count.
    async fn wait_until_ready(&mut self, lines: &Receiver<()>) {
        let (start, socket) = (Instant::now(), self.socket());
        loop {
            match lines.recv_timeout(START_TIME_MAX.saturating_sub(start.elapsed())) {
                Ok(()) if std::os::unix::net::UnixStream::connect(&socket).is_ok() => break,
                Ok(()) => {}
                Err(RecvTimeoutError::Timeout) => {
                    panic!("the daemon was not ready within {START_TIME_MAX:?}: {}", self.log())
                }
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("the daemon ended before it was ready: {}", self.log())
                }
            }
        }
        if self.options.on_terminal {
            self.pid = self.workspace_info().await.daemon_pid as i32;
        }
    }

    /// What it wrote to standard error.
    pub fn log(&self) -> String {
        self.log.lock().expect("no writer panicked").clone()
    }

    /// The directory that holds workspace, state, home and `outside`.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The socket.
    pub fn socket(&self) -> PathBuf {
        self.state.join("daemon.sock")
    }

    /// The shared connection.
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// A connection of its own.
    pub fn new_channel(&self) -> Channel {
        connect(&self.socket())
    }

    /// A client of ProcessService.
    pub fn processes(&self) -> ProcessServiceClient<Channel> {
        ProcessServiceClient::new(self.channel())
    }

    /// A client of WorkspaceService.
    pub fn workspaces(&self) -> WorkspaceServiceClient<Channel> {
        WorkspaceServiceClient::new(self.channel())
    }

    /// A client of ToolService that takes large messages.
    pub fn tools(&self) -> ToolServiceClient<Channel> {
        tools_of(self.channel())
    }

    /// A client of FilesystemService.
    pub fn files(&self) -> FilesystemServiceClient<Channel> {
        FilesystemServiceClient::new(self.channel())
    }

    /// A client of StampService.
    pub fn stamps(&self) -> StampServiceClient<Channel> {
        StampServiceClient::new(self.channel())
    }

    /// Calls a tool in the session `test`.
    pub async fn call(&self, name: &str, input: Value) -> ToolReply {
        self.call_as("test", name, input).await
    }

    /// Calls a tool in a session.
    pub async fn call_as(&self, session: &str, name: &str, input: Value) -> ToolReply {
        self.call_text(session, name, input.to_string()).await
    }

    /// Calls a tool with an input that is written out.
    pub async fn call_text(&self, session: &str, name: &str, input_json: String) -> ToolReply {
        match call_tool(&mut self.tools(), session, name, input_json).await {
            Ok(reply) => reply,
            Err(status) => panic!("CallTool {name} failed: {status:?}\ndaemon: {}", self.log()),
        }
    }

    /// Runs a shell command through the tool `bash`.
    pub async fn shell(&self, command: &str) -> ToolReply {
        self.call("bash", serde_json::json!({ "command": command })).await
    }

    /// Runs a shell command through the tool `bash`, with a time limit.
    pub async fn shell_timeout(&self, command: &str, seconds: u64) -> ToolReply {
        let input = serde_json::json!({ "command": command, "timeoutSeconds": seconds });
        self.call("bash", input).await
    }

    /// Reads a whole file through the tool `read_file`.
    pub async fn read(&self, path: &str) -> ToolReply {
        self.call("read_file", serde_json::json!({ "filePath": path })).await
    }

    /// Writes a file through the tool `write_file`.
    pub async fn write(&self, path: &str, content: &str) -> ToolReply {
        self.call("write_file", serde_json::json!({ "filePath": path, "content": content })).await
    }

    /// Finds files through the tool `glob`, from /workspace on.
    pub async fn glob(&self, pattern: &str) -> ToolReply {
        self.call("glob", serde_json::json!({ "pattern": pattern })).await
    }

    /// Finds lines through the tool `grep`, from /workspace on.
    pub async fn grep(&self, pattern: &str) -> ToolReply {
        self.call("grep", serde_json::json!({ "pattern": pattern })).await
    }

    /// GetWorkspace.
    pub async fn workspace_info(&self) -> v1::GetWorkspaceResponse {
        let answer = self.workspaces().get_workspace(v1::GetWorkspaceRequest {}).await;
        answer.expect("GetWorkspace answers").into_inner()
    }

    /// Execute.
    pub async fn try_run(
        &self,
        request: v1::ExecuteRequest,
    ) -> Result<v1::ExecuteResponse, Status> {
        self.processes().execute(request).await.map(tonic::Response::into_inner)
    }

    /// Execute, which must answer.
    pub async fn run(&self, request: v1::ExecuteRequest) -> Run {
        let start = Instant::now();
        match self.try_run(request).await {
            Ok(response) => Run { response, took: start.elapsed() },
            Err(status) => panic!("Execute failed: {status:?}\ndaemon: {}", self.log()),
        }
    }

    /// A shell command.
    pub async fn bash(&self, command: &str) -> Run {
        self.run(bash(command)).await
    }

    /// A shell command with a wall limit.
    pub async fn bash_timeout(&self, command: &str, seconds: f64) -> Run {
        self.run(v1::ExecuteRequest { limits: Some(limits(seconds)), ..bash(command) }).await
    }

    /// Starts a process and takes its id; the stream of its events is closed.
    pub async fn start_detached(&self, request: v1::StartRequest) -> String {
        let mut events = self.start_stream(request).await;
        let first = events.message().await.expect("a stream of events").expect("its first event");
        match first.event {
            Some(v1::process_event::Event::Started(started)) => started.process_id,
            other => panic!("the first event is `started`: {other:?}"),
        }
    }

    /// Starts a process and follows it.
    pub async fn start_stream(
        &self,
        request: v1::StartRequest,
    ) -> tonic::Streaming<v1::ProcessEvent> {
        match self.processes().start(request).await {
            Ok(answer) => answer.into_inner(),
            Err(status) => panic!("Start failed: {status:?}\ndaemon: {}", self.log()),
        }
    }

    /// The processes of its cell.
    pub fn cell(&self) -> Vec<Process> {
        descendants(self.pid)
    }

    /// The cell's init, as the host sees it.
    pub fn init(&self) -> Process {
        let cell = self.cell();
        let init =
            cell.iter().find(|process| process.ids.len() > 1 && process.ids.last() == Some(&1));
        init.unwrap_or_else(|| panic!("the cell has a process 1: {cell:?}")).clone()
    }

    /// The toolbox: the cell's first process.
    pub fn toolbox(&self) -> Process {
        let cell = self.cell();
        let first = cell.iter().find(|process| process.parent == self.pid);
        first.unwrap_or_else(|| panic!("the cell has a first process: {cell:?}")).clone()
    }

    /// The processes of the cell whose command line holds `marker`.
    pub fn marked(&self, marker: &str) -> Vec<Process> {
        self.cell().into_iter().filter(|process| process.command_line.contains(marker)).collect()
    }

    /// What it holds of the host.
    pub fn footprint(&self) -> Footprint {
        Footprint::of(self.pid, self.directory(), &self.directory().join("tmp"))
    }

    /// Waits until it holds what it held, and panics with the difference when it does not come.
    pub async fn expect_footprint(&self, before: &Footprint) {
        let start = Instant::now();
        loop {
            let now = self.footprint();
            if now == *before {
                return;
            }
            if start.elapsed() > Duration::from_secs(10) {
                assert_eq!(now, *before, "something leaked: {:#?}", self.cell());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Puts the probe program into the workspace and gives its path in the cell.
    pub fn put_probe(&self) -> String {
        self.put(&probe(), "probe")
    }

    /// Copies a program into the workspace and gives its path in the cell.
    pub fn put(&self, program: &Path, name: &str) -> String {
        let target = self.workspace.join(name);
        fs::copy(program, &target).expect("the program can be copied");
        fs::set_permissions(&target, fs::Permissions::from_mode(0o755))
            .expect("its mode can be set");
        own(&target, self.owner());
        format!("/workspace/{name}")
    }

    /// Writes a file into the workspace.
    pub fn put_text(&self, name: &str, text: impl AsRef<[u8]>) {
        let target = self.workspace.join(name);
        fs::write(&target, text).expect("a file can be written");
        own(&target, self.owner());
    }

    fn owner(&self) -> u32 {
        use std::os::unix::fs::MetadataExt;
        self.workspace.metadata().expect("the workspace exists").uid()
    }

    /// Sends one signal to the daemon.
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid), signal).expect("the daemon can be signalled");
    }

    /// Waits for its end and reaps it.
    pub async fn ended(&mut self) -> ExitStatus {
        let mut child = self.child.take().expect("it was not reaped before");
        wait_for("the daemon ends", STOP_TIME_MAX, || {
            child.try_wait().expect("the daemon can be waited for")
        })
        .await
    }

    /// Ends it as a person would, and checks that nothing of its cell is left.
    pub async fn stop(mut self) {
        let trace = CellTrace::of(self.pid);
        self.signal(Signal::SIGTERM);
        let status = self.ended().await;
        assert!(status.success(), "the daemon ended with {status}: {}", self.log());
        wait_for("the cell is gone", Duration::from_secs(5), || {
            trace.left().is_empty().then_some(())
        })
        .await;
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the daemon said:\n{}", self.log());
        }
        if let Some(mut child) = self.child.take() {
            if self.pid != child.id() as i32 {
                // Under `script` the daemon is a grandchild. Failure means that it has ended.
                let _ = kill(Pid::from_raw(self.pid), Signal::SIGKILL);
            }
            let _ = child.kill();
            child.wait().expect("a child can be waited for");
        }
    }
}

/// A connection to the daemon at `socket`, made when it is first used.
fn connect(socket: &Path) -> Channel {
    let socket = socket.to_owned();
    let endpoint = Endpoint::from_static("http://localhost");
    endpoint.connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { tokio::net::UnixStream::connect(socket).await.map(TokioIo::new) }
    }))
}

/// A client of ToolService that takes large messages.
pub fn tools_of(channel: Channel) -> ToolServiceClient<Channel> {
    ToolServiceClient::new(channel)
        .max_encoding_message_size(TOOL_MESSAGE_MAX)
        .max_decoding_message_size(TOOL_MESSAGE_MAX)
}

/// Calls a tool of a client.
pub async fn call_tool(
    tools: &mut ToolServiceClient<Channel>,
    session: &str,
    name: &str,
    input_json: String,
) -> Result<ToolReply, Status> {
    let start = Instant::now();
    let request = v1::CallToolRequest {
        name: name.to_owned(),
        input_json,
        session: session.to_owned(),
        request_id: unique(),
    };
    let response = tools.call_tool(request).await?.into_inner();
    Ok(ToolReply::new(response, start.elapsed()))
}

/// Mounts what the options ask for.
fn mounted(root: &Path, workspace: &Path, id: u32, options: &Options) -> Mounts {
    let mut mounts = Mounts::default();
    if let Some(size) = options.workspace_tmpfs {
        mounts.tmpfs(workspace, size);
        own(workspace, id);
    }
    if !options.bound_files.is_empty() {
        let backing = made(root, "backing", id);
        for (name, text) in &options.bound_files {
            for (directory, text) in [(&*backing, *text), (workspace, "")] {
                fs::write(directory.join(name), text).expect("a file can be written");
                own(&directory.join(name), id);
            }
            mounts.bind(&backing.join(name), &workspace.join(name));
        }
    }
    mounts
}

/// Starts `cofferdam serve` in the test's directory.
fn launch(who: Who, options: &Options, root: &Path) -> Started {
    let mut serve: Vec<String> = vec![
        reachable(&binary(), root).display().to_string(),
        "serve".to_owned(),
        "--workspace".to_owned(),
        root.join("workspace").display().to_string(),
        "--state".to_owned(),
        root.join("state").display().to_string(),
    ];
    if let Some(policy) = &options.policy {
        let path = root.join("policy.toml");
        fs::write(&path, policy).expect("the policy can be written");
        serve.extend(["--policy".to_owned(), path.display().to_string()]);
    }
    serve.extend(options.arguments.iter().cloned());
    let home = root.join("home");
    let mut command = command(who, &serve, options, root);
    command
        .env("HOME", &home)
        .env("XDG_STATE_HOME", home.join("state"))
        .env("TMPDIR", root.join("tmp"))
        .current_dir(root)
        .stdin(if options.on_terminal { Stdio::piped() } else { Stdio::null() })
        .stdout(if options.on_terminal { Stdio::piped() } else { Stdio::null() })
        .stderr(Stdio::piped());
    for (name, value) in &options.env {
        command.env(name, value.replace("{}", &root.display().to_string()));
    }
    let mut child = command.spawn().expect("the daemon's program can be started");
    let said: Box<dyn Read + Send> = if options.on_terminal {
        Box::new(child.stdout.take().expect("it is piped"))
    } else {
        Box::new(child.stderr.take().expect("it is piped"))
    };
    let log = Arc::new(Mutex::new(String::new()));
    let lines = follow(said, Arc::clone(&log));
    Started { child, log, lines }
}

fn command(who: Who, serve: &[String], options: &Options, root: &Path) -> Command {
    let shell = |script: &str| {
        let mut command = who.command("sh");
        command.args(["-c", script, "sh"]).args(serve);
        command
    };
    if options.on_terminal {
        let mut command = who.command("script");
        command.args(["-qfec", &serve.join(" ")]).arg(root.join("terminal"));
        command
    } else if let Some(umask) = options.umask {
        shell(&format!("umask {umask}; exec \"$@\""))
    } else {
        let mut command = who.command(&serve[0]);
        command.args(&serve[1..]);
        command
    }
}

/// Collects what a daemon says, and reports each line.
fn follow(said: Box<dyn Read + Send>, log: Arc<Mutex<String>>) -> Receiver<()> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(said).lines().map_while(Result::ok) {
            log.lock().expect("no reader panicked").push_str(&format!("{line}\n"));
            // The receiver is gone once the daemon is ready.
            let _ = sender.send(());
        }
    });
    receiver
}

fn made(root: &Path, name: &str, id: u32) -> PathBuf {
    let path = root.join(name);
    fs::create_dir(&path).expect("a directory can be made");
    own(&path, id);
    path
}

fn own(path: &Path, id: u32) {
    std::os::unix::fs::chown(path, Some(id), Some(id)).expect("root can give a file away");
}

/// The program itself where everybody can execute it, or a copy of it in `root`.
fn reachable(program: &Path, root: &Path) -> PathBuf {
    let open = program
        .ancestors()
        .all(|path| path.metadata().is_ok_and(|meta| meta.permissions().mode() & 0o001 != 0));
    if open {
        return program.to_owned();
    }
    let copy = root.join("cofferdam");
    // After a restart it is there, and a process of the earlier cell may still execute it.
    if !copy.exists() {
        fs::copy(program, &copy).expect("the program can be copied");
    }
    copy
}
