//! Init: pid 1 of the cell. Spawns through shims, reaps, keeps the deadlines, and kills trees.
//!
//! Nothing that a command does can kill or stop it (it is pid 1 of their namespace), read or trace
//! it (it is not dumpable and in an outer Landlock domain), or fill its queues (it reads only what
//! shims and daemon say). It has one thread and no state but what is here:
//!
//! ```text
//! daemon ── Request ──▶ init ── ForkShim ──▶ keeper (one a session)
//!        ◀── Event ───       ── Run ───────▶ shim   (one a running call, and some idle)
//!                            ◀── Report ─── keepers and shims, through one socket
//!                            ◀── SIGCHLD ── keepers, shims, and what falls to init
//! ```
//!
//! **Invariant.** Every child of init is a keeper, a shim, or the remains of a shim that was
//! killed. The last kind is killed until nothing is left.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use cofferdam_sandbox::InitSide;
use cofferdam_sys::{Kinship, SHARED_CELLS, fork, send_signal, shared_cells};
use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use rustix::event::epoll;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, Signal, kill_process};

use crate::call::{Call, Phase};
use crate::channel::{Channel, Received};
use crate::keeper;
use crate::notes::{Notes, SLOTS, Slot};
use crate::protocol::{CallId, Event, Exec, KillCause, Request, Status, Target};
use crate::stdio::Streams;
use crate::supervision::{ForkShim, Report, Run, ShimId, What};
use crate::tree::{Process, Table, signal};

/// Shims that wait in each session, so that a call does not wait for a fork.
const IDLE_SHIMS_MIN: usize = 2;
/// Idle shims of a session above which some are let go.
const IDLE_SHIMS_KEPT: usize = 4;
/// How often surplus shims are let go.
const RETIRE_INTERVAL: Duration = Duration::from_secs(1);
/// How often a tree that is being killed is killed again.
const KILL_INTERVAL: Duration = Duration::from_millis(4);
/// How often a call is given to another shim because the one that had it died before it looked.
const HAND_OVERS_MAX: u32 = 8;
/// Keepers of a session that may die in a row while a call waits; a command that kills them as
/// fast as they come must not keep init busy for ever.
const KEEPER_DEATHS_MAX: u32 = 16;
/// Sessions whose keeper stays without a call; above it the longest unused goes.
const IDLE_SESSIONS_MAX: usize = 16;

/// A session: its keeper and its idle shims.
#[derive(Debug, Default)]
struct Session {
    keeper: Option<Keeper>,
    idle: Vec<ShimId>,
    /// Shims that the keeper has been asked for.
    expected: HashSet<ShimId>,
    /// Calls that wait for a shim.
    waiting: VecDeque<CallId>,
    /// Keepers that died in a row without having forked a shim.
    keeper_deaths: u32,
    last_used: u64,
}

#[derive(Debug)]
struct Keeper {
    pid: i32,
    channel: Channel<ForkShim, ()>,
    stopped_before: bool,
}

/// A shim.
#[derive(Debug)]
struct Shim {
    session: String,
    notes: Notes,
    slot: Slot,
    pid: Option<i32>,
    channel: Channel<Run, ()>,
    /// A second holder of the shim's end: what a killed shim has not read is read from here.
    unread: Channel<(), Run>,
    call: Option<CallId>,
    stopped_before: bool,
}

/// Name of the session whose keeper and shims are made before the first call; no caller can use
/// it, for a session's name is printable.
const UNNAMED: &str = "\0";

struct Init {
    control: Channel<Event, Request>,
    outbox: VecDeque<(Event, Vec<OwnedFd>)>,
    reports: Channel<(), Report>,
    reports_for_children: OwnedFd,
    rulesets: [OwnedFd; 3],
    cells: &'static [AtomicU32; SHARED_CELLS],
    signals: SignalFd,
    epoll: OwnedFd,
    null: OwnedFd,
    sessions: HashMap<String, Session>,
    shims: HashMap<ShimId, Shim>,
    calls: HashMap<CallId, Call>,
    next_shim: ShimId,
    free_slots: Vec<Slot>,
    uses: u64,
    strays_may_exist: bool,
    /// Unknown children that ended while a keeper owed a report: perhaps the shim it will name.
    ended_unreported: HashSet<i32>,
    retire_at: Instant,
    writable_wanted: bool,
}

const CONTROL: u64 = 0;
const REPORTS: u64 = 1;
const SIGNALS: u64 = 2;

/// Runs until the daemon is gone. Returns the exit code.
pub(crate) fn run(side: InitSide) -> u8 {
    let _named = rustix::thread::set_name(c"cofferdam-init");
    match Init::new(side).and_then(|mut init| init.serve()) {
        Ok(()) => 0,
        Err(_) => 1,
    }
}

impl Init {
    fn new(side: InitSide) -> io::Result<Self> {
        let mut mask = SigSet::empty();
        mask.add(nix::sys::signal::Signal::SIGCHLD);
        sigprocmask(SigmaskHow::SIG_BLOCK, Some(&mask), None)?;
        let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        // Only our end does not wait: a shim that cannot report waits until it can.
        let (reports, reports_for_children) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        rustix::io::ioctl_fionbio(&reports, true)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let watch = |descriptor, token| {
            let data = epoll::EventData::new_u64(token);
            epoll::add(&epoll, descriptor, data, epoll::EventFlags::IN)
        };
        watch(side.control.as_fd(), CONTROL)?;
        watch(reports.as_fd(), REPORTS)?;
        watch(signals.as_fd(), SIGNALS)?;
        let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?.into();
        let mut init = Self {
            control: Channel::new(side.control),
            outbox: VecDeque::new(),
            reports: Channel::new(reports),
            reports_for_children,
            rulesets: [side.session_ruleset, side.command_ruleset, side.read_only_ruleset],
            cells: shared_cells()?,
            signals,
            epoll,
            null,
            sessions: HashMap::new(),
            shims: HashMap::new(),
            calls: HashMap::new(),
            next_shim: 0,
            free_slots: (0..SLOTS as Slot).rev().collect(),
            uses: 0,
            strays_may_exist: false,
            ended_unreported: HashSet::new(),
            retire_at: Instant::now() + RETIRE_INTERVAL,
            writable_wanted: false,
        };
        init.replenish(UNNAMED);
        Ok(init)
    }

    fn serve(&mut self) -> io::Result<()> {
        loop {
            let mut events = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; 8];
            let timeout = self.timeout();
            let (ready, _) = match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
                Err(rustix::io::Errno::INTR) => continue,
                other => other?,
            };
            let tokens: Vec<u64> = ready.iter().map(|event| event.data.u64()).collect();
            // Reports first: what a shim said before its end counts.
            if tokens.contains(&REPORTS) || tokens.contains(&SIGNALS) {
                self.read_reports()?;
            }
            if tokens.contains(&SIGNALS) {
                while self.signals.read_signal()?.is_some() {}
                self.reap()?;
            }
            if tokens.contains(&CONTROL) && !self.read_requests()? {
                return Ok(());
            }
            self.enforce(Instant::now())?;
            self.flush()?;
        }
    }

    // ---- Requests of the daemon ----

    /// False at the end of the channel.
    fn read_requests(&mut self) -> io::Result<bool> {
        loop {
            match self.control.receive() {
                Ok(Some(Received { message, .. })) => self.handle(message),
                Ok(None) => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) => return Err(error),
            }
        }
    }

    fn handle(&mut self, request: Request) {
        match request {
            Request::Exec(exec) => self.begin(*exec),
            Request::Signal { call, signal, target, token } => {
                let delivered = self.signal(call, signal, target);
                self.emit(Event::Signaled { token, delivered }, Vec::new());
            }
            Request::Kill { call, grace, cause } => self.kill(call, grace, cause),
            Request::EndSession { session, grace } => self.end_session(&session, grace),
        }
    }

    fn begin(&mut self, exec: Exec) {
        let call = exec.call;
        let streams = match Streams::open(exec.stdio, self.null.as_fd()) {
            Ok(streams) => streams,
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                let step = "stdio".to_owned();
                return self.emit(Event::ExecFailed { call, step, errno }, Vec::new());
            }
        };
        let session = exec.session.clone();
        self.adopt(&session);
        self.calls.insert(call, Call::new(exec, streams, Instant::now()));
        self.session(&session).waiting.push_back(call);
        self.dispatch(&session);
    }

    /// Gives the first session the keeper and the shims that were made ahead.
    fn adopt(&mut self, name: &str) {
        if self.sessions.contains_key(name) {
            return;
        }
        let Some(unnamed) = self.sessions.remove(UNNAMED) else { return };
        for shim in self.shims.values_mut() {
            shim.session = name.to_owned();
        }
        self.sessions.insert(name.to_owned(), unnamed);
    }

    fn session(&mut self, name: &str) -> &mut Session {
        self.uses += 1;
        let uses = self.uses;
        let session = self.sessions.entry(name.to_owned()).or_default();
        session.last_used = uses;
        session
    }

    /// Pairs waiting calls with idle shims, then sees that shims are coming for the rest.
    fn dispatch(&mut self, name: &str) {
        while let Some(session) = self.sessions.get_mut(name) {
            let Some(call) = session.waiting.front().copied() else { break };
            let Some(shim) = session.idle.pop() else { break };
            session.waiting.pop_front();
            self.hand(call, shim);
        }
        self.replenish(name);
    }

    fn hand(&mut self, id: CallId, shim_id: ShimId) {
        let (Some(call), Some(shim)) = (self.calls.get_mut(&id), self.shims.get_mut(&shim_id))
        else {
            return;
        };
        let run = call.run();
        let streams = call.streams.program_ends();
        shim.call = Some(id);
        shim.notes.clear();
        // A shim that is gone leaves the message unread; `shim_died` finds it.
        let sent = shim.channel.send(&run, &streams);
        call.phase = Phase::Handed { shim: shim_id };
        if let Err(error) = sent {
            let errno = error.raw_os_error().unwrap_or(libc::EMSGSIZE);
            shim.call = None;
            let session = shim.session.clone();
            self.fail(id, "supervisor", errno);
            if let Some(session) = self.sessions.get_mut(&session) {
                session.idle.push(shim_id);
            }
        }
    }

    /// Asks the session's keeper for shims until enough idle ones exist or are coming.
    fn replenish(&mut self, name: &str) {
        let session = self.session(name);
        let wanted = session.waiting.len() + IDLE_SHIMS_MIN;
        let missing = wanted.saturating_sub(session.idle.len() + session.expected.len());
        for _ in 0..missing {
            if let Err(error) = self.request_shim(name) {
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                let session = self.session(name);
                // With a shim on its way the waiting calls will get it.
                if session.expected.is_empty() {
                    for call in std::mem::take(&mut session.waiting) {
                        self.fail(call, "supervisor", errno);
                    }
                }
                return;
            }
        }
    }

    fn request_shim(&mut self, name: &str) -> io::Result<()> {
        if self.session(name).keeper.is_none() {
            let keeper = self.fork_keeper()?;
            self.session(name).keeper = Some(keeper);
        }
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let slot = *self.free_slots.last().ok_or(rustix::io::Errno::AGAIN)?;
        let id = self.next_shim;
        self.next_shim += 1;
        let session = self.session(name);
        if let Some(keeper) = &session.keeper {
            keeper.channel.send(&ForkShim { shim: id, slot }, &[theirs.as_fd()])?;
        }
        session.expected.insert(id);
        self.free_slots.pop();
        let shim = Shim {
            session: name.to_owned(),
            notes: Notes::of(self.cells, slot),
            slot,
            pid: None,
            channel: Channel::new(ours),
            unread: Channel::new(theirs),
            call: None,
            stopped_before: false,
        };
        self.shims.insert(id, shim);
        Ok(())
    }

    fn fork_keeper(&self) -> io::Result<Keeper> {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let [session, command, read_only] = &self.rulesets;
        let cells = self.cells;
        let keep = [
            theirs.as_fd(),
            self.reports_for_children.as_fd(),
            session.as_fd(),
            command.as_fd(),
            read_only.as_fd(),
        ];
        let pid = fork(Kinship::Child, &keep, |kept| {
            let Ok([requests, reports, session_ruleset, command_ruleset, read_only_ruleset]) =
                <[OwnedFd; 5]>::try_from(kept)
            else {
                return 1;
            };
            keeper::run(keeper::Inheritance {
                requests,
                reports,
                session_ruleset,
                command_ruleset,
                read_only_ruleset,
                cells,
            })
        })?;
        Ok(Keeper {
            pid: pid.as_raw_nonzero().get(),
            channel: Channel::new(ours),
            stopped_before: false,
        })
    }

    fn signal(&mut self, id: CallId, number: i32, target: Target) -> u32 {
        let Some(call) = self.calls.get(&id) else { return 0 };
        if target == Target::Leader {
            let leader = call.leader.as_ref().filter(|_| call.exited.is_none());
            let sent = leader
                .and_then(|leader| leader.pidfd.as_ref())
                .map(|pidfd| send_signal(pidfd.as_fd(), number));
            return u32::from(matches!(sent, Some(Ok(()))));
        }
        let group = call.leader.as_ref().map(|leader| leader.pid);
        let tree = self.tree_of(id);
        let wanted = |process: &&Process| target == Target::Tree || Some(process.group) == group;
        let reached = |process: &&Process| signal(process, number);
        tree.iter().filter(wanted).filter(reached).count() as u32
    }

    /// The call's processes, without its shim.
    fn tree_of(&self, id: CallId) -> Vec<Process> {
        let shim = self.calls.get(&id).and_then(Call::shim).and_then(|shim| self.shims.get(&shim));
        let pid = shim.and_then(|shim| shim.pid);
        match (pid, Table::read()) {
            (Some(pid), Ok(table)) => table.below(pid),
            _ => Vec::new(),
        }
    }

    fn kill(&mut self, id: CallId, grace: Duration, cause: KillCause) {
        let now = Instant::now();
        let Some(call) = self.calls.get_mut(&id) else { return };
        if call.start_kill(now, grace, cause) && grace > Duration::ZERO {
            self.terminate(id);
        }
    }

    /// The polite part: SIGTERM, and SIGCONT so that stopped processes take it.
    fn terminate(&mut self, id: CallId) {
        for process in self.tree_of(id) {
            signal(&process, libc::SIGTERM);
            signal(&process, libc::SIGCONT);
        }
    }

    fn end_session(&mut self, name: &str, grace: Duration) {
        let of_session = |(_, call): &(&CallId, &Call)| call.session() == name;
        let calls: Vec<CallId> = self.calls.iter().filter(of_session).map(|(id, _)| *id).collect();
        for call in calls {
            self.kill(call, grace, KillCause::Session);
        }
        self.forget_session(name);
    }

    /// Lets keeper and idle shims go; they end at the end of their channels. Shims of calls stay
    /// until those are over.
    fn forget_session(&mut self, name: &str) {
        let Some(mut session) = self.sessions.remove(name) else { return };
        for shim in session.idle.drain(..) {
            self.remove_shim(&shim);
        }
        if session.waiting.is_empty() && session.expected.is_empty() {
            return;
        }
        // Calls without a shim yet still get one, and end by their kill.
        self.sessions.insert(name.to_owned(), session);
    }

    // ---- Reports of keepers and shims ----

    fn read_reports(&mut self) -> io::Result<()> {
        loop {
            match self.reports.receive() {
                Ok(Some(Received { message, mut descriptors })) => {
                    self.hear(message, descriptors.pop());
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Ok(None) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(error) => return Err(error),
            }
        }
    }

    fn hear(&mut self, report: Report, descriptor: Option<OwnedFd>) {
        let id = report.shim;
        let Some(shim) = self.shims.get_mut(&id) else { return };
        match report.what {
            What::Forked { pid } => {
                shim.pid = Some(pid);
                let name = shim.session.clone();
                let Some(session) = self.sessions.get_mut(&name) else {
                    self.remove_shim(&id);
                    return;
                };
                session.expected.remove(&id);
                session.keeper_deaths = 0;
                if self.ended_unreported.remove(&pid) {
                    self.remove_shim(&id);
                } else {
                    session.idle.push(id);
                }
                if self.shims.values().all(|shim| shim.pid.is_some()) {
                    self.ended_unreported.clear();
                }
                self.dispatch(&name);
            }
            What::ForkFailed { errno } => {
                let name = shim.session.clone();
                self.remove_shim(&id);
                let session = self.session(&name);
                session.expected.remove(&id);
                if session.expected.is_empty() && session.idle.is_empty() {
                    for call in std::mem::take(&mut session.waiting) {
                        self.fail(call, "supervisor", errno);
                    }
                }
            }
            What::Spawned { pid } => {
                let call = shim.call;
                if let Some(call) = call {
                    self.started(call, pid, descriptor);
                }
            }
            What::Ran { pid, status, children } => {
                if let Some(call) = shim.call {
                    self.started(call, pid, None);
                    self.leader_ended(id, call, status, children);
                }
            }
            What::SpawnFailed { step, errno } => {
                if let Some(call) = shim.call.take() {
                    self.fail(call, &step, errno);
                }
                self.release(id);
            }
            What::Exited { status, children } => {
                if let Some(call) = shim.call {
                    self.leader_ended(id, call, status, children);
                }
            }
            What::Empty => {
                let Some(call) = shim.call.take() else { return };
                self.calls.remove(&call);
                self.emit(Event::TreeGone { call }, Vec::new());
                self.release(id);
            }
        }
    }

    fn count(&self, shim: ShimId) -> u32 {
        let pid = self.shims.get(&shim).and_then(|shim| shim.pid);
        match (pid, Table::read()) {
            (Some(pid), Ok(table)) => table.below(pid).len() as u32,
            _ => 0,
        }
    }

    fn leader_ended(&mut self, shim_id: ShimId, call: CallId, status: Status, children: bool) {
        // Those that only wait to be reaped are counted as well, by one: their end is reported.
        let background = if children { self.count(shim_id).max(1) } else { 0 };
        self.exited(call, status, background);
        if children {
            return;
        }
        self.calls.remove(&call);
        if let Some(shim) = self.shims.get_mut(&shim_id) {
            shim.call = None;
        }
        self.release(shim_id);
    }

    fn started(&mut self, id: CallId, pid: i32, pidfd: Option<OwnedFd>) {
        let Some(call) = self.calls.get_mut(&id) else { return };
        let ends = call.start(pid, pidfd);
        self.emit(Event::Started { call: id, pid: pid as u32 }, ends);
        // A kill that came before there was a tree.
        if self.calls[&id].is_being_killed() {
            self.terminate(id);
        }
    }

    fn exited(&mut self, id: CallId, status: Status, background: u32) {
        let Some(call) = self.calls.get_mut(&id) else { return };
        let killed = call.exit(status);
        self.emit(Event::Exited { call: id, status, killed, background }, Vec::new());
    }

    /// The call could not be started.
    fn fail(&mut self, id: CallId, step: &str, errno: i32) {
        if self.calls.remove(&id).is_some() {
            let step = step.to_owned();
            self.emit(Event::ExecFailed { call: id, step, errno }, Vec::new());
        }
    }

    /// The shim's call is over: it is idle again.
    fn release(&mut self, id: ShimId) {
        let Some(shim) = self.shims.get_mut(&id) else { return };
        shim.stopped_before = false;
        let name = shim.session.clone();
        match self.sessions.get_mut(&name) {
            Some(session) => {
                session.idle.push(id);
                self.dispatch(&name);
            }
            // Its session has ended: so does it.
            None => drop(self.remove_shim(&id)),
        }
    }

    // ---- Children ----

    fn reap(&mut self) -> io::Result<()> {
        let flags = WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED;
        loop {
            match waitpid(None, Some(flags)) {
                Ok(WaitStatus::Exited(pid, code)) => {
                    self.child_ended(pid.as_raw(), Status::Exited(code));
                }
                Ok(WaitStatus::Signaled(pid, signal, core)) => {
                    let status = Status::Signaled { signal: signal as i32, core };
                    self.child_ended(pid.as_raw(), status);
                }
                Ok(WaitStatus::Stopped(pid, _)) => self.child_stopped(pid.as_raw()),
                Ok(WaitStatus::StillAlive) | Err(nix::errno::Errno::ECHILD) => return Ok(()),
                Ok(_) | Err(nix::errno::Errno::EINTR) => continue,
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    fn child_ended(&mut self, pid: i32, status: Status) {
        // What it said last may have come in after the reports were read.
        if self.read_reports().is_err() {
            return;
        }
        let keeper_of = |(_, session): &(&String, &Session)| {
            session.keeper.as_ref().is_some_and(|keeper| keeper.pid == pid)
        };
        if let Some(name) = self.sessions.iter().find(keeper_of).map(|(name, _)| name.clone()) {
            return self.keeper_died(&name);
        }
        if let Some(id) = self.shim_with(pid) {
            return self.shim_died(id);
        }
        // The remains of a shim: perhaps its leader.
        self.strays_may_exist = true;
        if self.shims.values().any(|shim| shim.pid.is_none()) {
            self.ended_unreported.insert(pid);
        }
        for call in self.calls.values_mut() {
            let notes = call.shim().and_then(|shim| self.shims.get(&shim)).map(|shim| shim.notes);
            let noted = notes.and_then(Notes::pid).or(call.orphan_pid);
            let leader = call.leader.as_ref().map(|leader| leader.pid);
            if leader == Some(pid) || (leader.is_none() && noted == Some(pid)) {
                call.orphan_status.get_or_insert(status);
            }
        }
    }

    fn remove_shim(&mut self, id: &ShimId) -> Option<Shim> {
        let shim = self.shims.remove(id)?;
        self.free_slots.push(shim.slot);
        Some(shim)
    }

    fn shim_with(&self, pid: i32) -> Option<ShimId> {
        self.shims.iter().find(|(_, shim)| shim.pid == Some(pid)).map(|(id, _)| *id)
    }

    /// Shims that it was asked for and has not forked will not come; others live on.
    fn keeper_died(&mut self, name: &str) {
        let session = self.session(name);
        session.keeper = None;
        let lost: Vec<ShimId> = session.expected.drain().collect();
        for shim in lost {
            self.remove_shim(&shim);
        }
        // One that it forked and could not report is now an unknown child.
        self.strays_may_exist = true;
        let session = self.session(name);
        session.keeper_deaths += 1;
        if session.waiting.is_empty() {
            return;
        }
        if session.keeper_deaths <= KEEPER_DEATHS_MAX {
            return self.dispatch(name);
        }
        for call in std::mem::take(&mut session.waiting) {
            self.fail(call, "supervisor", libc::ECHILD);
        }
    }

    fn shim_died(&mut self, id: ShimId) {
        let Some(shim) = self.remove_shim(&id) else { return };
        self.strays_may_exist = true;
        if let Some(session) = self.sessions.get_mut(&shim.session) {
            session.idle.retain(|idle| *idle != id);
            session.expected.remove(&id);
        }
        let Some(call_id) = shim.call else { return };
        let Some(call) = self.calls.get_mut(&call_id) else { return };
        let handed = matches!(call.phase, Phase::Handed { .. });
        if handed && call.hand_overs < HAND_OVERS_MAX && was_not_read(&shim.unread) {
            // It never saw the call: nothing has run, so another shim can have it.
            call.hand_overs += 1;
            call.phase = Phase::Waiting;
            let name = shim.session.clone();
            self.session(&name).waiting.push_front(call_id);
            return self.dispatch(&name);
        }
        call.phase = Phase::Orphaned;
        call.orphan_pid = shim.notes.pid();
        if let Some(status) = shim.notes.status() {
            call.orphan_status.get_or_insert(status);
        }
        call.start_kill(Instant::now(), Duration::ZERO, KillCause::Supervision);
    }

    /// A stopped supervisor is continued once; the second time it goes, with what is below it.
    fn child_stopped(&mut self, pid: i32) {
        let Some(process) = Pid::from_raw(pid) else { return };
        let keeper = self
            .sessions
            .values_mut()
            .find_map(|session| session.keeper.as_mut().filter(|keeper| keeper.pid == pid));
        let first = match keeper {
            Some(keeper) => !std::mem::replace(&mut keeper.stopped_before, true),
            None => match self.shim_with(pid).and_then(|id| self.shims.get_mut(&id)) {
                Some(shim) => !std::mem::replace(&mut shim.stopped_before, true),
                None => return self.strays_may_exist = true,
            },
        };
        let signal = if first { Signal::CONT } else { Signal::KILL };
        // It fails when the process has ended meanwhile, which `reap` will hear.
        let _sent = kill_process(process, signal);
    }

    // ---- Time ----

    fn timeout(&self) -> Option<rustix::time::Timespec> {
        let now = Instant::now();
        let calls = self.calls.values().filter_map(|call| call.next_event(now, KILL_INTERVAL));
        let strays = self.strays_may_exist.then(|| now + KILL_INTERVAL);
        let surplus = |session: &Session| session.idle.len() > IDLE_SHIMS_KEPT;
        let surplus =
            self.sessions.values().any(surplus) || self.sessions.len() > IDLE_SESSIONS_MAX;
        let retire = surplus.then_some(self.retire_at.max(now));
        let next = calls.chain(strays).chain(retire).min()?;
        let wait = next.saturating_duration_since(now);
        Some(rustix::time::Timespec {
            tv_sec: wait.as_secs() as i64,
            tv_nsec: wait.subsec_nanos().into(),
        })
    }

    /// Does what is due.
    fn enforce(&mut self, now: Instant) -> io::Result<()> {
        let due: Vec<CallId> = self
            .calls
            .iter()
            .filter(|(_, call)| call.next_event(now, Duration::ZERO).is_some_and(|at| at <= now))
            .map(|(id, _)| *id)
            .collect();
        for id in due {
            let Some(call) = self.calls.get_mut(&id) else { continue };
            if call.wall_expired(now) {
                let grace = call.grace();
                if call.start_kill(now, grace, KillCause::Wall) {
                    self.terminate(id);
                }
            }
            if self.calls.get(&id).is_some_and(|call| call.must_kill(now)) {
                for process in self.tree_of(id) {
                    signal(&process, libc::SIGKILL);
                }
            }
        }
        if self.strays_may_exist {
            self.kill_strays()?;
        }
        if now >= self.retire_at {
            self.retire_at = now + RETIRE_INTERVAL;
            self.retire();
        }
        Ok(())
    }

    /// Kills what fell to init. When nothing is left, the calls of dead shims are over.
    fn kill_strays(&mut self) -> io::Result<()> {
        self.reap()?;
        // A shim that its keeper has forked and not yet reported looks like a stray. Its report is
        // microseconds away, unless the keeper is stopped; then it is continued or ends.
        if self.shims.values().any(|shim| shim.pid.is_none()) {
            return Ok(());
        }
        let keepers = self.sessions.values().filter_map(|session| session.keeper.as_ref());
        let known: HashSet<i32> = keepers
            .map(|keeper| keeper.pid)
            .chain(self.shims.values().filter_map(|shim| shim.pid))
            .collect();
        match Table::read()?.strays(1, &known) {
            None => {
                self.strays_may_exist = false;
                self.finish_orphaned();
            }
            Some(strays) => {
                for process in &strays {
                    signal(process, libc::SIGKILL);
                }
            }
        }
        Ok(())
    }

    fn finish_orphaned(&mut self) {
        let orphaned = |(_, call): &(&CallId, &Call)| matches!(call.phase, Phase::Orphaned);
        let over: Vec<CallId> = self.calls.iter().filter(orphaned).map(|(id, _)| *id).collect();
        for id in over {
            let Some(mut call) = self.calls.remove(&id) else { continue };
            if call.exited.is_some() {
                self.emit(Event::TreeGone { call: id }, Vec::new());
                continue;
            }
            if let Some(ends) = call.unsent_ends() {
                // Its shim died before it could report it. Without an id nobody knows whether it
                // ran, and it is lost.
                let pid = call.orphan_pid.unwrap_or(0) as u32;
                self.emit(Event::Started { call: id, pid }, ends);
            }
            let status = call.orphan_status.unwrap_or(Status::Lost);
            let killed = call.exit(status);
            self.emit(Event::Exited { call: id, status, killed, background: 0 }, Vec::new());
        }
    }

    fn retire(&mut self) {
        let mut surplus_shims = Vec::new();
        for session in self.sessions.values_mut() {
            let surplus = session.idle.len().saturating_sub(IDLE_SHIMS_KEPT);
            surplus_shims.extend(session.idle.drain(..surplus.div_ceil(2)));
        }
        for shim in surplus_shims {
            self.remove_shim(&shim);
        }
        while self.sessions.len() > IDLE_SESSIONS_MAX {
            let busy: HashSet<&str> = self.calls.values().map(Call::session).collect();
            let unused = self.sessions.iter().filter(|(name, _)| !busy.contains(name.as_str()));
            let Some((name, _)) = unused.min_by_key(|(_, session)| session.last_used) else {
                return;
            };
            let name = name.clone();
            let before = self.sessions.len();
            self.forget_session(&name);
            if self.sessions.len() == before {
                return;
            }
        }
    }

    // ---- Events ----

    fn emit(&mut self, event: Event, descriptors: Vec<OwnedFd>) {
        self.outbox.push_back((event, descriptors));
    }

    fn flush(&mut self) -> io::Result<()> {
        while let Some((event, descriptors)) = self.outbox.front() {
            let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            match self.control.send(event, &borrowed) {
                Ok(()) => drop(self.outbox.pop_front()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        let wanted = !self.outbox.is_empty();
        if wanted != self.writable_wanted {
            self.writable_wanted = wanted;
            let mut flags = epoll::EventFlags::IN;
            flags.set(epoll::EventFlags::OUT, wanted);
            let data = epoll::EventData::new_u64(CONTROL);
            epoll::modify(&self.epoll, &self.control, data, flags)?;
        }
        Ok(())
    }
}

/// Whether a dead shim's last message is still in its socket.
fn was_not_read(unread: &Channel<(), Run>) -> bool {
    rustix::io::ioctl_fionbio(unread.as_fd(), true).is_ok()
        && matches!(unread.receive(), Ok(Some(_)))
}
