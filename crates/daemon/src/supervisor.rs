//! The task that owns the cell and every process in it.
//!
//! Commands arrive by a bounded channel, state leaves by watches. The task is the only one that
//! talks to init, so what it knows is in the order in which it happened. It runs on the thread that
//! launched the cell (a current-thread runtime): the kernel ends a cell with that thread.
//!
//! ```text
//! no cell --call--> launch --ok--> standing --end of a channel--> no cell
//!                     `--failure--> no cell (at most three in a row, then a pause)
//! ```

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use cofferdam_cell::channel::Received;
use cofferdam_cell::protocol::{CallId, Event, Exec, KillCause, Request, Status, Stdio, Target};
use cofferdam_proto::v1;
use cofferdam_spec::{Command as Program, Exit, Limits, SessionId, Tag};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{Id, JoinError, JoinSet};

use crate::decide::{self, GRACE, LAUNCH_PAUSE, LaunchBudget, Refusal};
use crate::flow::Flow;
use crate::link::{Incoming, Launch, Link, Port, SendError};
use crate::process::{About, End, LeaderEnd, Phase, Process};
use crate::pump::{Pump, Streams, sleep_until};
use crate::records::{Keep, Records};
use crate::stdin::{self, Stdin};
use crate::toolbox::Toolbox;

/// Commands that may wait for the supervisor; beyond it callers wait.
const COMMANDS_MAX: usize = 64;

/// A program that a client wants started; every part has been checked.
#[derive(Debug)]
pub(crate) struct StartProcess {
    pub(crate) program: Program,
    pub(crate) session: SessionId,
    pub(crate) tag: Tag,
    pub(crate) limits: Limits,
    /// Whether the wall limit also ends what outlives the leader.
    pub(crate) wall_bounds_tree: bool,
    pub(crate) stdio: Stdio,
    /// Written first to the standard input.
    pub(crate) input: Bytes,
    /// Whether `input` is all of it.
    pub(crate) input_is_whole: bool,
    pub(crate) workspace_read_only: bool,
    pub(crate) keep: Keep,
    pub(crate) on_disconnect: OnDisconnect,
    /// Whether the program waits for the stream of the client that starts it.
    pub(crate) wait_for_reader: bool,
}

/// What happens to the tree when its client goes away before the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnDisconnect {
    /// It is killed.
    Kill,
    /// It goes on.
    GoOn,
}

/// Why no program was started. Nothing has run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartRefused {
    /// The daemon takes no call now.
    #[error("the call was not admitted: {0:?}")]
    NotAdmitted(Refusal),
    /// There is no cell to run it in.
    #[error("the cell does not stand: {reason}")]
    NoCell {
        /// The step that failed, and how.
        reason: String,
        /// When to ask again.
        retry: Duration,
    },
    /// The supervisor has ended.
    #[error("the daemon stops")]
    Stopped,
}

/// Asks the supervisor to kill trees. Each call asks a bounded number of times (its limits, its
/// client, its drain), so the channel needs no bound of its own, and no kill is ever lost.
#[derive(Debug, Clone)]
pub(crate) struct Kills(mpsc::UnboundedSender<Urgent>);

/// What must not wait behind calls: it is taken also while the way to init is clogged.
#[derive(Debug)]
enum Urgent {
    Kill { call: CallId, grace: Duration, cause: KillCause },
    Drain,
    KillRunning(KillCause),
    Stop,
}

impl Kills {
    /// For tests of what kills nothing.
    #[cfg(test)]
    pub(crate) fn nowhere() -> Self {
        Self(mpsc::unbounded_channel().0)
    }

    /// Kills a call's tree; a call that is gone is ignored.
    pub(crate) fn kill(&self, call: CallId, grace: Duration, cause: KillCause) {
        // Without a supervisor there is no cell, and so no tree.
        let _ = self.0.send(Urgent::Kill { call, grace, cause });
    }
}

/// A started process in the hands of its client. Dropping it before the end kills the tree, if
/// the client wanted that.
#[derive(Debug)]
pub(crate) struct Lease {
    process: Arc<Process>,
    kills: Option<Kills>,
}

impl Lease {
    /// The process.
    pub(crate) fn process(&self) -> &Arc<Process> {
        &self.process
    }

    /// The client saw the end.
    pub(crate) fn release(&mut self) {
        self.kills = None;
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(kills) = &self.kills
            && self.process.end().is_none()
        {
            kills.kill(self.process.about.call, GRACE, KillCause::Client);
        }
    }
}

/// What the supervisor tells the world.
#[derive(Debug, Clone)]
pub(crate) struct State {
    /// Calls whose end has not been reported.
    pub(crate) running: usize,
    /// Calls of which a process may live.
    pub(crate) trees: usize,
    /// Calls since the start.
    pub(crate) calls: u64,
    /// How often a cell was started.
    pub(crate) generation: u32,
    /// What the kernel enforces.
    pub(crate) enforcement: v1::Enforcement,
    /// Things a person should know.
    pub(crate) warnings: Vec<String>,
    /// Whether new calls are refused.
    pub(crate) draining: bool,
}

#[derive(Debug)]
enum Command {
    Start(Box<StartProcess>, oneshot::Sender<Result<Lease, StartRefused>>),
    Find(String, oneshot::Sender<Option<Arc<Process>>>),
    Page(Option<SessionId>, CallId, usize, oneshot::Sender<Vec<Arc<Process>>>),
    Signal { call: CallId, signal: i32, target: Target, reply: oneshot::Sender<u32> },
    EndSession(SessionId, oneshot::Sender<Vec<Arc<Process>>>),
    Toolbox(oneshot::Sender<Result<Toolbox, StartRefused>>),
}

/// What a request to init was about, for when it cannot be sent.
#[derive(Debug, Clone, Copy)]
enum Sent {
    Exec(CallId),
    Signal(u64),
    Kill,
}

impl Sent {
    fn of(request: &Request) -> Self {
        match request {
            Request::Exec(exec) => Self::Exec(exec.call),
            Request::Signal { token, .. } => Self::Signal(*token),
            Request::Kill { .. } | Request::EndSession { .. } => Self::Kill,
        }
    }
}

/// The way to the supervisor.
#[derive(Debug, Clone)]
pub(crate) struct Handle {
    commands: mpsc::Sender<Command>,
    urgent: mpsc::UnboundedSender<Urgent>,
    state: watch::Receiver<State>,
}

impl Handle {
    /// Starts a program.
    pub(crate) async fn start(&self, start: StartProcess) -> Result<Lease, StartRefused> {
        let ask = |reply| Command::Start(Box::new(start), reply);
        self.ask(ask).await.unwrap_or(Err(StartRefused::Stopped))
    }

    /// The process of that name, running or retained.
    pub(crate) async fn find(&self, id: &str) -> Option<Arc<Process>> {
        self.ask(|reply| Command::Find(id.to_owned(), reply)).await?
    }

    /// At most `count` processes after `after`, oldest first.
    pub(crate) async fn page(
        &self,
        session: Option<SessionId>,
        after: CallId,
        count: usize,
    ) -> Vec<Arc<Process>> {
        let ask = |reply| Command::Page(session, after, count, reply);
        self.ask(ask).await.unwrap_or_default()
    }

    /// Sends a signal; `None` when the call is gone.
    pub(crate) async fn signal(&self, call: CallId, signal: i32, target: Target) -> Option<u32> {
        self.ask(|reply| Command::Signal { call, signal, target, reply }).await
    }

    /// Kills a session's trees; returns those of which something lived.
    pub(crate) async fn end_session(&self, session: SessionId) -> Vec<Arc<Process>> {
        self.ask(|reply| Command::EndSession(session, reply)).await.unwrap_or_default()
    }

    /// The toolbox of the cell that stands; starts a cell when there is none.
    pub(crate) async fn toolbox(&self) -> Result<Toolbox, StartRefused> {
        self.ask(Command::Toolbox).await.unwrap_or(Err(StartRefused::Stopped))
    }

    /// Waits until the daemon drains, or its supervisor has ended.
    pub(crate) async fn draining(&self) {
        let _ = self.state().wait_for(|state| state.draining).await;
    }

    /// From here on new calls are refused.
    pub(crate) fn drain(&self) {
        // Without a supervisor there is nothing to refuse, to kill or to end; below alike.
        let _ = self.urgent.send(Urgent::Drain);
    }

    /// Kills every call whose end has not been reported.
    pub(crate) fn kill_running(&self, cause: KillCause) {
        let _ = self.urgent.send(Urgent::KillRunning(cause));
    }

    /// Ends the supervisor, and the cell with it.
    pub(crate) fn stop(&self) {
        let _ = self.urgent.send(Urgent::Stop);
    }

    /// The latest state, and news of later ones.
    pub(crate) fn state(&self) -> watch::Receiver<State> {
        self.state.clone()
    }

    /// What the kernel enforces.
    pub(crate) fn enforcement(&self) -> v1::Enforcement {
        self.state.borrow().enforcement.clone()
    }

    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).await.ok()?;
        answer.await.ok()
    }
}

/// A call of which a process may live.
#[derive(Debug)]
struct Tree {
    process: Arc<Process>,
    stdin: stdin::Kind,
    started: bool,
}

/// The task's state.
pub(crate) struct Supervisor {
    launch: Launch,
    link: Option<Link>,
    budget: LaunchBudget,
    jobs: PathBuf,
    /// Makes process names differ between daemons of one workspace.
    nonce: u32,
    calls: u64,
    running: usize,
    draining: bool,
    trees: HashMap<CallId, Tree>,
    records: Records,
    pumps: JoinSet<Pump>,
    pumped: HashMap<Id, Arc<Process>>,
    signals: HashMap<u64, oneshot::Sender<u32>>,
    next_token: u64,
    commands: mpsc::Receiver<Command>,
    urgent: mpsc::UnboundedReceiver<Urgent>,
    kills: Kills,
    state: watch::Sender<State>,
}

impl Supervisor {
    /// A supervisor over a cell that stands. Job files go to `jobs`.
    pub(crate) fn new(
        launch: Launch,
        port: Port,
        jobs: PathBuf,
        nonce: u32,
    ) -> std::io::Result<(Self, Handle)> {
        let (commands_in, commands) = mpsc::channel(COMMANDS_MAX);
        let (urgent_in, urgent) = mpsc::unbounded_channel();
        let state = watch::Sender::new(State {
            running: 0,
            trees: 0,
            calls: 0,
            generation: 1,
            enforcement: v1::Enforcement::from(&port.enforcement),
            warnings: Vec::new(),
            draining: false,
        });
        let handle =
            Handle { commands: commands_in, urgent: urgent_in.clone(), state: state.subscribe() };
        let supervisor = Self {
            launch,
            link: Some(Link::new(port.ends)?),
            budget: LaunchBudget::default(),
            jobs,
            nonce,
            calls: 0,
            running: 0,
            draining: false,
            trees: HashMap::new(),
            records: Records::default(),
            pumps: JoinSet::new(),
            pumped: HashMap::new(),
            signals: HashMap::new(),
            next_token: 0,
            commands,
            urgent,
            kills: Kills(urgent_in),
            state,
        };
        Ok((supervisor, handle))
    }

    /// Runs until it is told to stop; then the cell ends, and every pump.
    pub(crate) async fn run(mut self) {
        loop {
            let clogged = self.link.as_ref().is_some_and(Link::is_clogged);
            let expiry = self.records.next_expiry();
            tokio::select! {
                biased;
                incoming = next_incoming(&mut self.link) => self.on_incoming(incoming),
                Some(urgent) = self.urgent.recv() => match urgent {
                    Urgent::Kill { call, grace, cause } => {
                        self.send(Request::Kill { call, grace, cause });
                    }
                    Urgent::Drain => {
                        self.draining = true;
                        self.state.send_modify(|state| state.draining = true);
                    }
                    Urgent::KillRunning(cause) => self.kill_running(cause),
                    Urgent::Stop => break,
                },
                Some(pump) = self.pumps.join_next_with_id() => self.on_pump(pump),
                command = self.commands.recv(), if !clogged => match command {
                    None => break,
                    Some(command) => self.on_command(command),
                },
                () = sleep_until(expiry) => self.records.forget(Instant::now()),
            }
        }
        self.link = None;
        self.pumps.shutdown().await;
    }

    fn on_command(&mut self, command: Command) {
        match command {
            Command::Start(start, reply) => {
                // A client that is gone by now drops the lease, which kills what it asked to.
                let _ = reply.send(self.start(*start));
            }
            Command::Find(id, reply) => {
                let _ = reply.send(self.records.find(&id));
            }
            Command::Page(session, after, count, reply) => {
                let _ = reply.send(self.records.page(session.as_ref(), after, count));
            }
            Command::Signal { call, signal, target, reply } => {
                self.signal(call, signal, target, reply);
            }
            Command::EndSession(session, reply) => {
                let _ = reply.send(self.end_session(&session));
            }
            Command::Toolbox(reply) => {
                let _ = reply.send(self.toolbox());
            }
        }
    }

    fn toolbox(&mut self) -> Result<Toolbox, StartRefused> {
        // How many calls about files may run is not decided here: they are no processes.
        decide::admit(self.draining, 0).map_err(StartRefused::NotAdmitted)?;
        self.ensure_cell()?;
        let no_cell = || StartRefused::NoCell {
            reason: "the cell ended as it was asked for".to_owned(),
            retry: LAUNCH_PAUSE,
        };
        self.link.as_ref().map(Link::toolbox).ok_or_else(no_cell)
    }

    fn start(&mut self, start: StartProcess) -> Result<Lease, StartRefused> {
        decide::admit(self.draining, self.running).map_err(StartRefused::NotAdmitted)?;
        self.ensure_cell()?;
        self.calls += 1;
        let call = self.calls;
        let kind = match start.stdio {
            Stdio::Pipes { stdin: true } => stdin::Kind::Pipe,
            Stdio::Pipes { stdin: false } => stdin::Kind::Null,
            Stdio::Pty(_) => stdin::Kind::Terminal,
        };
        let about = About {
            id: format!("p-{:08x}-{call}", self.nonce),
            call,
            session: start.session.clone(),
            tag: start.tag,
            argv: start.program.argv().to_vec(),
            pty: kind == stdin::Kind::Terminal,
            limits: start.limits.clone(),
            start_time: SystemTime::now(),
            start: Instant::now(),
        };
        let stdin = Stdin::new(kind, start.input, start.input_is_whole);
        let process =
            Arc::new(Process::new(about, stdin, Flow::new(start.wait_for_reader), &self.jobs));
        self.records.insert(Arc::clone(&process), start.keep);
        let tree = Tree { process: Arc::clone(&process), stdin: kind, started: false };
        self.trees.insert(call, tree);
        self.running += 1;
        self.publish();
        let kills = (start.on_disconnect == OnDisconnect::Kill).then(|| self.kills.clone());
        self.send(Request::Exec(Box::new(Exec {
            call,
            session: start.session.as_str().to_owned(),
            command: start.program,
            limits: start.limits,
            wall_bounds_tree: start.wall_bounds_tree,
            grace: GRACE,
            stdio: start.stdio,
            workspace_read_only: start.workspace_read_only,
        })));
        Ok(Lease { process, kills })
    }

    fn ensure_cell(&mut self) -> Result<(), StartRefused> {
        if self.link.is_some() {
            return Ok(());
        }
        let no_cell = |reason, retry| StartRefused::NoCell { reason, retry };
        self.budget
            .check(Instant::now())
            .map_err(|left| no_cell("several launches in a row failed".to_owned(), left))?;
        let port = (self.launch)().map_err(|error| chain(&error)).and_then(|port| {
            let Port { ends, enforcement } = port;
            Link::new(ends).map(|link| (link, enforcement)).map_err(|e| chain(&e))
        });
        match port {
            Ok((link, enforcement)) => {
                self.link = Some(link);
                self.budget.succeeded();
                self.state.send_modify(|state| {
                    state.generation += 1;
                    state.enforcement = v1::Enforcement::from(&enforcement);
                });
                tracing::info!("a new cell stands");
                Ok(())
            }
            Err(reason) => {
                self.budget.failed(Instant::now());
                tracing::error!(%reason, "the cell could not be started");
                Err(no_cell(reason, LAUNCH_PAUSE))
            }
        }
    }

    fn signal(&mut self, call: CallId, signal: i32, target: Target, reply: oneshot::Sender<u32>) {
        if self.trees.contains_key(&call) {
            self.next_token += 1;
            let token = self.next_token;
            self.signals.insert(token, reply);
            self.send(Request::Signal { call, signal, target, token });
        }
    }

    fn end_session(&mut self, session: &SessionId) -> Vec<Arc<Process>> {
        let of_session = |tree: &&Tree| tree.process.about.session == *session;
        let ended: Vec<_> =
            self.trees.values().filter(of_session).map(|tree| Arc::clone(&tree.process)).collect();
        if !ended.is_empty() {
            let session = session.as_str().to_owned();
            self.send(Request::EndSession { session, grace: GRACE });
        }
        ended
    }

    fn kill_running(&mut self, cause: KillCause) {
        let running = |tree: &&Tree| tree.process.end().is_none();
        let calls: Vec<_> =
            self.trees.values().filter(running).map(|tree| tree.process.about.call).collect();
        for call in calls {
            self.send(Request::Kill { call, grace: GRACE, cause });
        }
    }

    /// Sends to init. Without a cell there is nothing that the request could be about.
    fn send(&mut self, request: Request) {
        let sent = Sent::of(&request);
        match self.link.as_mut().map(|link| link.send(request)) {
            None | Some(Ok(())) => {}
            Some(Err(SendError::Refused(error))) => self.refused(sent, &error),
            Some(Err(SendError::Lost(error))) => self.lose_cell(&error),
        }
    }

    fn refused(&mut self, request: Sent, error: &std::io::Error) {
        tracing::error!(%error, "a request could not be sent to init");
        match request {
            Sent::Exec(call) => {
                self.never_started(call, "send".to_owned(), error.raw_os_error().unwrap_or(0));
            }
            // Whoever waits for the answer hears that the call is gone.
            Sent::Signal(token) => drop(self.signals.remove(&token)),
            // A tree that cannot be killed must not go on.
            Sent::Kill => self.lose_cell(error),
        }
    }

    fn on_incoming(&mut self, incoming: Incoming) {
        match incoming {
            Incoming::Event(received) => self.on_event(received),
            Incoming::Refused(request, error) => self.refused(Sent::of(&request), &error),
            Incoming::Unclogged => {}
            Incoming::Surveyed { foreign, complete } => {
                let warnings = decide::survey_warnings(foreign, complete);
                self.state.send_modify(|state| state.warnings = warnings);
            }
            Incoming::Lost(error) => self.lose_cell(&error),
        }
    }

    fn on_event(&mut self, received: Received<Event>) {
        match received.message {
            Event::Started { call, pid } => self.on_started(call, pid, received.descriptors),
            Event::ExecFailed { call, step, errno } => self.never_started(call, step, errno),
            Event::Exited { call, status, killed, background } => {
                let at = Instant::now();
                let Some(tree) = self.trees.get(&call) else { return };
                tree.process.update_tree(|tree| {
                    tree.leader = Some(LeaderEnd { status, killed, background, at });
                    tree.gone = (background == 0).then_some(at);
                });
                if background == 0 {
                    self.trees.remove(&call);
                    self.publish();
                }
            }
            Event::TreeGone { call } => {
                if let Some(tree) = self.trees.remove(&call) {
                    tree.process.update_tree(|tree| tree.gone = Some(Instant::now()));
                    self.publish();
                }
            }
            Event::Signaled { token, delivered } => {
                if let Some(reply) = self.signals.remove(&token) {
                    let _ = reply.send(delivered);
                }
            }
        }
    }

    fn on_started(&mut self, call: CallId, pid: u32, descriptors: Vec<std::os::fd::OwnedFd>) {
        let Some(tree) = self.trees.get_mut(&call) else { return };
        if std::mem::replace(&mut tree.started, true) {
            return;
        }
        let process = Arc::clone(&tree.process);
        match Streams::new(&process, tree.stdin, descriptors) {
            Ok(streams) => {
                let pump = Pump::new(Arc::clone(&process), pid, streams, self.kills.clone());
                let task = self.pumps.spawn(pump.until_reported());
                self.pumped.insert(task.id(), process);
            }
            Err(error) => {
                tracing::error!(process = process.about.id, %error, "a process without streams");
                self.send(Request::Kill {
                    call,
                    grace: Duration::ZERO,
                    cause: KillCause::Supervision,
                });
                self.report_without_pump(&process, Exit::Lost);
            }
        }
    }

    fn never_started(&mut self, call: CallId, step: String, errno: i32) {
        let Some(tree) = self.trees.remove(&call) else { return };
        tree.process.update_tree(|tree| tree.gone = Some(Instant::now()));
        self.report_without_pump(&tree.process, Exit::SandboxFailed { step, errno });
    }

    fn report_without_pump(&mut self, process: &Process, exit: Exit) {
        process.stdin.end(stdin::StdinClosed::Ended);
        process.enter(Phase::Ended(Arc::new(End {
            exit,
            pid: None,
            duration: process.about.start.elapsed(),
            background: 0,
            detached: false,
        })));
        self.finish(process);
    }

    fn on_pump(&mut self, joined: Result<(Id, Pump), JoinError>) {
        let id = joined.as_ref().map_or_else(JoinError::id, |(id, _)| *id);
        let Some(process) = self.pumped.remove(&id) else { return };
        match joined {
            Ok((_, pump)) => {
                if !pump.is_done() {
                    // Nobody waits for this one: it ends with its streams, or with the daemon.
                    let task = self.pumps.spawn(pump.until_done());
                    self.pumped.insert(task.id(), Arc::clone(&process));
                }
                self.finish(&process);
            }
            Err(error) => {
                tracing::error!(process = process.about.id, %error, "a pump ended early");
                self.send(Request::Kill {
                    call: process.about.call,
                    grace: Duration::ZERO,
                    cause: KillCause::Supervision,
                });
                if process.end().is_none() {
                    self.report_without_pump(&process, Exit::Lost);
                }
            }
        }
    }

    /// The end has been reported. A second time is nothing new.
    fn finish(&mut self, process: &Process) {
        if self.records.finish(process, Instant::now()) {
            self.running = self.running.saturating_sub(1);
            self.publish();
        }
    }

    fn lose_cell(&mut self, error: &std::io::Error) {
        tracing::error!(%error, "the cell is gone");
        self.link = None;
        self.signals.clear();
        let at = Instant::now();
        let lost = LeaderEnd { status: Status::Lost, killed: None, background: 0, at };
        for (_, tree) in std::mem::take(&mut self.trees) {
            tree.process.update_tree(|tree| {
                tree.leader.get_or_insert(lost);
                tree.gone = Some(at);
            });
            if !tree.started {
                self.report_without_pump(&tree.process, Exit::Lost);
            }
        }
        self.publish();
    }

    fn publish(&self) {
        self.state.send_modify(|state| {
            state.running = self.running;
            state.trees = self.trees.len();
            state.calls = self.calls;
        });
    }
}

async fn next_incoming(link: &mut Option<Link>) -> Incoming {
    match link {
        Some(link) => link.next().await,
        None => std::future::pending().await,
    }
}

/// An error and its causes in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        // Some errors show their cause and name it too.
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}
