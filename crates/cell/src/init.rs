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

mod children;
mod shims;

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use cofferdam_sandbox::InitSide;
use cofferdam_sys::{SHARED_CELLS, send_signal, shared_cells};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::epoll;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, Signal, kill_process};

use crate::call::{Call, Phase};
use crate::channel::{Channel, Received};
use crate::notes::{SLOTS, Slot};
use crate::protocol::{CallId, Event, Exec, KillCause, Request, Status, Target};
use crate::stdio::Streams;
use crate::supervision::{Report, ShimId, What};
use crate::tree::{Process, Table, signal};

use shims::{IDLE_SHIMS_KEPT, SESSIONS_MAX, Session, Shim, UNNAMED};

/// How often surplus shims are let go.
const RETIRE_INTERVAL: Duration = Duration::from_secs(1);
/// How often a tree that is being killed is killed again.
const KILL_INTERVAL: Duration = Duration::from_millis(4);
/// Everything that init knows.
struct Init {
    control: Channel<Event, Request>,
    /// Only watched: its end is the toolbox's.
    _toolbox: OwnedFd,
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
    /// The processors that init may use.
    affinity: CpuSet,
    writable_wanted: bool,
    /// Whether sending failed for a reason that no readiness will tell the end of.
    send_later: bool,
}

const CONTROL: u64 = 0;
const REPORTS: u64 = 1;
const SIGNALS: u64 = 2;
const TOOLBOX: u64 = 3;

/// Runs until the daemon or the toolbox is gone. Returns the exit code.
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
        watch(side.toolbox.as_fd(), TOOLBOX)?;
        let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?.into();
        let mut init = Self {
            control: Channel::new(side.control),
            _toolbox: side.toolbox,
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
            affinity: sched_getaffinity(nix::unistd::Pid::from_raw(0))?,
            writable_wanted: false,
            send_later: false,
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
            // It sends nothing, so this is its end.
            if tokens.contains(&TOOLBOX) {
                return Ok(());
            }
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
        if self.sessions.len() >= SESSIONS_MAX && !self.sessions.contains_key(&session) {
            self.retire();
        }
        self.adopt(&session);
        self.calls.insert(call, Call::new(exec, streams, Instant::now()));
        self.session(&session).waiting.push_back(call);
        self.dispatch(&session);
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

    /// What is left after the grace. A call that no shim has started by then has no tree: it ends
    /// with its shim, or with its place in the queue.
    fn kill_now(&mut self, id: CallId) {
        match self.calls.get(&id).map(|call| call.phase) {
            Some(Phase::Running { .. }) => {
                for process in self.tree_of(id) {
                    signal(&process, libc::SIGKILL);
                }
            }
            Some(Phase::Handed { shim }) => {
                let pid = self.shims.get(&shim).and_then(|shim| shim.pid).and_then(Pid::from_raw);
                // It fails when the shim has ended meanwhile, which `reap` will hear.
                let _sent = pid.map(|pid| kill_process(pid, Signal::KILL));
            }
            Some(Phase::Waiting) => {
                for session in self.sessions.values_mut() {
                    session.waiting.retain(|waiting| *waiting != id);
                }
                self.end_orphaned(id);
            }
            Some(Phase::Orphaned) | None => {}
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

    fn timeout(&self) -> Option<rustix::time::Timespec> {
        let now = Instant::now();
        let calls = self.calls.values().filter_map(|call| call.next_event(now, KILL_INTERVAL));
        let strays = (self.strays_may_exist || self.send_later).then(|| now + KILL_INTERVAL);
        let surplus = |session: &Session| session.idle.len() > IDLE_SHIMS_KEPT;
        let surplus = self.sessions.values().any(surplus) || self.sessions.len() > 1;
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
        if !due.is_empty() || self.strays_may_exist {
            // A command may have pinned init to one processor, and filled that.
            let _kept = sched_setaffinity(nix::unistd::Pid::from_raw(0), &self.affinity);
        }
        for id in due {
            let Some(call) = self.calls.get_mut(&id) else { continue };
            if call.wall_expired(now) {
                let grace = call.grace();
                if call.start_kill(now, grace, KillCause::Wall) {
                    self.terminate(id);
                }
            }
            if self.calls.get(&id).is_some_and(|call| call.must_kill(now)) {
                self.kill_now(id);
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

    fn emit(&mut self, event: Event, descriptors: Vec<OwnedFd>) {
        self.outbox.push_back((event, descriptors));
    }

    fn flush(&mut self) -> io::Result<()> {
        self.send_later = false;
        while let Some((event, descriptors)) = self.outbox.front() {
            let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            match self.control.send(event, &borrowed) {
                Ok(()) => drop(self.outbox.pop_front()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // Programs of the cell can fill their user's count of descriptors in flight: then
                // it is tried again at the next tick.
                Err(error) if error.raw_os_error() == Some(libc::ETOOMANYREFS) => {
                    self.send_later = true;
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        let wanted = !self.outbox.is_empty() && !self.send_later;
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
