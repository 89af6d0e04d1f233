//! A cell's other end on threads of the test: runs ordinary children, each a process group.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio as ChildStdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use cofferdam_cell::channel::{Channel, Received};
use cofferdam_cell::protocol::{
    CallId, Event, Exec, KillCause, Request, Status, Stdio, Target, ToolboxReply, ToolboxRequest,
};
use cofferdam_files::call::Answer;
use cofferdam_files::{FileCall, Files, Gone, Reply};
use cofferdam_spec::{Enforcement, Engine, Level, NetworkMode};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, socketpair};

use crate::link::{Ends, Port};

/// Holds a fake cell; it lives until [`FakeCell::die`].
pub(crate) struct FakeCell {
    socket: OwnedFd,
    toolbox: OwnedFd,
    trees: Arc<Mutex<HashMap<CallId, Tree>>>,
}

impl FakeCell {
    /// The cell ends: every process is killed and the channels close.
    pub(crate) fn die(self) {
        for tree in self.trees.lock().unwrap().values() {
            let _ = killpg(tree.group, Signal::SIGKILL);
        }
        rustix::net::shutdown(&self.socket, Shutdown::Both).unwrap();
        rustix::net::shutdown(&self.toolbox, Shutdown::Both).unwrap();
    }
}

struct Tree {
    group: Pid,
    session: String,
    killed: Option<KillCause>,
    kill_at: Option<Instant>,
}

fn pair() -> (OwnedFd, OwnedFd) {
    let kind = SocketType::SEQPACKET;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
    nonblocking(&ours);
    (ours, theirs)
}

fn nonblocking(fd: &impl AsFd) {
    let flags = rustix::fs::fcntl_getfl(fd).unwrap();
    rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK).unwrap();
}

/// A running fake whose programs have this home directory, and what the daemon gets of it.
pub(crate) fn launch(home: PathBuf) -> (FakeCell, Port) {
    let (init, init_end) = pair();
    let (toolbox, toolbox_end) = pair();
    let socket = init_end.try_clone().unwrap();
    let toolbox_socket = toolbox_end.try_clone().unwrap();
    thread::spawn(move || serve_files(&Channel::new(toolbox_end), home));
    let trees = Arc::new(Mutex::new(HashMap::new()));
    let init_trees = Arc::clone(&trees);
    thread::spawn(move || serve(&Arc::new(Channel::new(init_end)), &init_trees));
    let enforcement = Enforcement {
        engine: Engine::Native,
        level: Level::Namespaces,
        landlock_abi: 7,
        rights_not_handled: Vec::new(),
        network: NetworkMode::None,
        policy_digest: [1; 32],
        seccomp_digest: [2; 32],
        not_enforced: Vec::new(),
    };
    let ends = Ends::Pair { init: Channel::new(init), toolbox: Channel::new(toolbox) };
    (FakeCell { socket, toolbox: toolbox_socket, trees }, Port { ends, enforcement })
}

type Init = Channel<Event, Request>;
type Trees = Mutex<HashMap<CallId, Tree>>;

/// The toolbox: the real file tools, over the files of the test.
fn serve_files(channel: &Channel<ToolboxReply, ToolboxRequest>, home: PathBuf) {
    let files = Arc::new(Files::new(home));
    while let Ok(Some(Received { message, descriptors })) = channel.receive() {
        if message != ToolboxRequest::Lane {
            continue;
        }
        let files = Arc::clone(&files);
        thread::spawn(move || {
            let lane = Lane(Channel::new(descriptors.into_iter().next().unwrap()));
            while let Ok(Some(Received { message, descriptors })) = lane.0.receive() {
                files.serve(message, descriptors.into_iter().next(), &lane);
            }
        });
    }
}

struct Lane(Channel<Answer, FileCall>);

impl Reply for Lane {
    fn send(&self, answer: Answer, descriptor: Option<OwnedFd>) -> Result<(), Gone> {
        let descriptors: Vec<_> = descriptor.iter().map(AsFd::as_fd).collect();
        self.0.send(&answer, &descriptors).map_err(|_| Gone)
    }

    fn is_wanted(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut ready = [PollFd::new(&self.0, PollFlags::empty())];
        matches!(rustix::io::retry_on_intr(|| poll(&mut ready, Some(&now))), Ok(0))
    }
}

fn serve(channel: &Arc<Init>, trees: &Arc<Trees>) {
    while let Ok(Some(received)) = channel.receive() {
        match received.message {
            Request::Exec(exec) => start(channel, trees, *exec),
            Request::Signal { call, signal, target, token } => {
                let delivered = match trees.lock().unwrap().get(&call) {
                    Some(tree) => {
                        let signal = Signal::try_from(signal).unwrap();
                        let sent = match target {
                            Target::Leader => kill(tree.group, signal),
                            Target::Group | Target::Tree => killpg(tree.group, signal),
                        };
                        u32::from(sent.is_ok())
                    }
                    None => 0,
                };
                let _ = channel.send(&Event::Signaled { token, delivered }, &[]);
            }
            Request::Kill { call, grace, cause } => {
                if let Some(tree) = trees.lock().unwrap().get_mut(&call) {
                    end(tree, grace, cause);
                }
            }
            Request::EndSession { session, grace } => {
                for tree in trees.lock().unwrap().values_mut() {
                    if tree.session == session {
                        end(tree, grace, KillCause::Session);
                    }
                }
            }
        }
    }
}

fn end(tree: &mut Tree, grace: Duration, cause: KillCause) {
    tree.killed.get_or_insert(cause);
    tree.kill_at = Some(Instant::now() + grace);
    let _ = killpg(tree.group, Signal::SIGTERM);
}

fn start(channel: &Arc<Init>, trees: &Arc<Trees>, exec: Exec) {
    let call = exec.call;
    let (child, descriptors) = match spawn(&exec) {
        Ok(started) => started,
        Err(error) => {
            let errno = error.raw_os_error().unwrap_or(0);
            let failed = Event::ExecFailed { call, step: "exec".to_owned(), errno };
            let _ = channel.send(&failed, &[]);
            return;
        }
    };
    let group = Pid::from_raw(child.id() as i32);
    let tree = Tree { group, session: exec.session.clone(), killed: None, kill_at: None };
    trees.lock().unwrap().insert(call, tree);
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    let _ = channel.send(&Event::Started { call, pid: child.id() }, &borrowed);
    let (channel, trees) = (Arc::clone(channel), Arc::clone(trees));
    thread::spawn(move || watch(&channel, &trees, &exec, child));
}

fn spawn(exec: &Exec) -> io::Result<(Child, Vec<OwnedFd>)> {
    let argv = exec.command.argv();
    let mut command = Command::new(&argv[0]);
    let piped = matches!(exec.stdio, Stdio::Pipes { stdin: true });
    command
        .args(&argv[1..])
        .env_clear()
        .envs(exec.command.env())
        .stdin(if piped { ChildStdio::piped() } else { ChildStdio::null() })
        .stdout(ChildStdio::piped())
        .stderr(ChildStdio::piped())
        .process_group(0);
    let mut child = command.spawn()?;
    let mut descriptors: Vec<OwnedFd> = Vec::new();
    descriptors.extend(child.stdin.take().map(OwnedFd::from));
    descriptors.extend(child.stdout.take().map(OwnedFd::from));
    descriptors.extend(child.stderr.take().map(OwnedFd::from));
    descriptors.iter().for_each(nonblocking);
    Ok((child, descriptors))
}

/// Follows one call to the end of its tree.
fn watch(channel: &Init, trees: &Trees, exec: &Exec, mut child: Child) {
    let call = exec.call;
    let deadline = exec.limits.wall.map(|wall| Instant::now() + wall);
    let mut reported = false;
    loop {
        if let Some(tree) = trees.lock().unwrap().get_mut(&call) {
            let late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if late && tree.killed.is_none() && (!reported || exec.wall_bounds_tree) {
                end(tree, exec.grace, KillCause::Wall);
            }
            if tree.kill_at.is_some_and(|at| Instant::now() >= at) {
                let _ = killpg(tree.group, Signal::SIGKILL);
            }
        }
        let group = Pid::from_raw(child.id() as i32);
        if !reported && let Ok(Some(status)) = child.try_wait() {
            let status = match (status.code(), status.signal()) {
                (Some(code), _) => Status::Exited(code),
                (None, Some(signal)) => Status::Signaled { signal, core: status.core_dumped() },
                (None, None) => Status::Lost,
            };
            let killed = trees.lock().unwrap().get(&call).and_then(|tree| tree.killed);
            let background = u32::from(killpg(group, None).is_ok());
            let exited = Event::Exited { call, status, killed, background };
            reported = true;
            if background == 0 {
                trees.lock().unwrap().remove(&call);
            }
            let _ = channel.send(&exited, &[]);
            if background == 0 {
                return;
            }
        }
        if reported && killpg(group, None).is_err() {
            trees.lock().unwrap().remove(&call);
            let _ = channel.send(&Event::TreeGone { call }, &[]);
            return;
        }
        thread::sleep(Duration::from_millis(2));
    }
}
