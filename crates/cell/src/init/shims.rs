//! Sessions, their keepers, and their shims: who forks, who waits, who gets which call.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use cofferdam_sys::{Kinship, fork};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::Init;
use crate::call::{Call, Phase};
use crate::channel::Channel;
use crate::keeper;
use crate::notes::{Notes, Slot};
use crate::protocol::CallId;
use crate::supervision::{ForkShim, Run, ShimId};

/// Shims that wait in each session, so that a call does not wait for a fork.
const IDLE_SHIMS_MIN: usize = 2;
/// Idle shims of a session above which some are let go.
pub(super) const IDLE_SHIMS_KEPT: usize = 4;
/// Sessions whose keeper stays without a call; above it the longest unused goes.
const IDLE_SESSIONS_MAX: usize = 16;
/// How long a session without a call keeps its keeper and shims, unless it is the one that was used
/// last. Making them anew costs a call about a millisecond.
const IDLE_SESSION_TIME: Duration = Duration::from_secs(5);
/// Sessions at which those above [`IDLE_SESSIONS_MAX`] go at once, before another one is begun:
/// each has at least three processes, and a flood of sessions must not use up those of the cell.
pub(super) const SESSIONS_MAX: usize = 64;

/// A session: its keeper and its idle shims.
#[derive(Debug, Default)]
pub(super) struct Session {
    pub(super) keeper: Option<Keeper>,
    /// Number of the keeper's signal domain; never used twice.
    pub(super) domain: u64,
    pub(super) idle: Vec<ShimId>,
    /// Shims that the keeper has been asked for.
    pub(super) expected: HashSet<ShimId>,
    /// Calls that wait for a shim.
    pub(super) waiting: VecDeque<CallId>,
    /// Keepers that died in a row without having forked a shim.
    pub(super) keeper_deaths: u32,
    pub(super) last_used: u64,
    /// When that was.
    pub(super) used_at: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct Keeper {
    pub(super) pid: i32,
    pub(super) channel: Channel<ForkShim, ()>,
    pub(super) stopped_before: bool,
}

/// A shim.
#[derive(Debug)]
pub(super) struct Shim {
    pub(super) session: String,
    /// The signal domain that it is in; see [`Session::domain`].
    pub(super) domain: u64,
    pub(super) notes: Notes,
    pub(super) slot: Slot,
    pub(super) pid: Option<i32>,
    pub(super) channel: Channel<Run, ()>,
    /// A second holder of the shim's end: what a killed shim has not read is read from here.
    pub(super) unread: Channel<(), Run>,
    pub(super) call: Option<CallId>,
    pub(super) stopped_before: bool,
}

/// Name of the session whose keeper and shims are made before the first call; no caller can use
/// it, for a session's name is printable.
pub(super) const UNNAMED: &str = "\0";

impl Init {
    /// Gives the first session the keeper and the shims that were made ahead.
    pub(super) fn adopt(&mut self, name: &str) {
        if self.sessions.contains_key(name) {
            return;
        }
        let Some(unnamed) = self.sessions.remove(UNNAMED) else { return };
        for shim in self.shims.values_mut() {
            shim.session = name.to_owned();
        }
        self.sessions.insert(name.to_owned(), unnamed);
    }

    pub(super) fn session(&mut self, name: &str) -> &mut Session {
        self.uses += 1;
        let uses = self.uses;
        let session = self.sessions.entry(name.to_owned()).or_default();
        session.last_used = uses;
        session.used_at = Some(Instant::now());
        session
    }

    /// Pairs waiting calls with idle shims, then sees that shims are coming for the rest.
    pub(super) fn dispatch(&mut self, name: &str) {
        while let Some(session) = self.sessions.get_mut(name) {
            let Some(call) = session.waiting.front().copied() else { break };
            let Some(shim) = session.idle.pop() else { break };
            session.waiting.pop_front();
            self.hand(call, shim);
        }
        self.replenish(name);
    }

    pub(super) fn hand(&mut self, id: CallId, shim_id: ShimId) {
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
    pub(super) fn replenish(&mut self, name: &str) {
        // Among very many sessions the processes go to calls.
        let spare = if self.sessions.len() > IDLE_SESSIONS_MAX { 0 } else { IDLE_SHIMS_MIN };
        let session = self.session(name);
        let wanted = session.waiting.len() + spare;
        let missing = wanted.saturating_sub(session.idle.len() + session.expected.len());
        for _ in 0..missing {
            if let Err(error) = self.request_shim(name) {
                if matches!(
                    error.kind(),
                    io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
                ) {
                    // The keeper has ended and is not reaped yet; then the next one is asked.
                    return;
                }
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

    pub(super) fn request_shim(&mut self, name: &str) -> io::Result<()> {
        if self.session(name).keeper.is_none() {
            let keeper = self.fork_keeper()?;
            let session = self.session(name);
            session.keeper = Some(keeper);
            session.domain = session.last_used;
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
        let domain = session.domain;
        self.free_slots.pop();
        let shim = Shim {
            session: name.to_owned(),
            domain,
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

    pub(super) fn fork_keeper(&self) -> io::Result<Keeper> {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        // Init never waits for a keeper, which its session's programs can stop.
        rustix::io::ioctl_fionbio(&ours, true)?;
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

    /// Lets keeper and shims without a call go; they end at the end of their channels. Shims of calls
    /// stay until those are over.
    pub(super) fn forget_session(&mut self, name: &str) {
        let Some(mut session) = self.sessions.remove(name) else { return };
        for shim in session.idle.drain(..).chain(session.expected.drain()) {
            self.remove_shim(&shim);
        }
        // What the keeper may still have forked is nobody's.
        self.strays_may_exist = true;
        if !session.waiting.is_empty() {
            // They get a shim of a new domain, and end by their kill.
            self.session(name).waiting = session.waiting;
            self.dispatch(name);
        }
    }

    /// The shim's call is over: it is idle again.
    pub(super) fn release(&mut self, id: ShimId) {
        let Some(shim) = self.shims.get_mut(&id) else { return };
        shim.stopped_before = false;
        let name = shim.session.clone();
        match self.sessions.get_mut(&name) {
            Some(session) if session.domain == shim.domain => {
                session.idle.push(id);
                self.dispatch(&name);
            }
            // Its session has ended, or its keeper: so does it.
            _ => drop(self.remove_shim(&id)),
        }
    }

    pub(super) fn remove_shim(&mut self, id: &ShimId) -> Option<Shim> {
        let shim = self.shims.remove(id)?;
        self.free_slots.push(shim.slot);
        Some(shim)
    }

    pub(super) fn shim_with(&self, pid: i32) -> Option<ShimId> {
        self.shims.iter().find(|(_, shim)| shim.pid == Some(pid)).map(|(id, _)| *id)
    }

    pub(super) fn retire(&mut self) {
        let mut surplus_shims = Vec::new();
        for session in self.sessions.values_mut() {
            let surplus = session.idle.len().saturating_sub(IDLE_SHIMS_KEPT);
            surplus_shims.extend(session.idle.drain(..surplus.div_ceil(2)));
        }
        for shim in surplus_shims {
            self.remove_shim(&shim);
        }
        while self.sessions.len() > 1 {
            let busy: HashSet<&str> = self.calls.values().map(Call::session).collect();
            let newest = self.sessions.values().map(|session| session.last_used).max();
            let unused = self.sessions.iter().filter(|(name, session)| {
                !busy.contains(name.as_str()) && Some(session.last_used) != newest
            });
            let Some((name, session)) = unused.min_by_key(|(_, session)| session.last_used) else {
                return;
            };
            let is_idle = session.used_at.is_none_or(|at| at.elapsed() >= IDLE_SESSION_TIME);
            if !is_idle && self.sessions.len() <= IDLE_SESSIONS_MAX {
                return;
            }
            let name = name.clone();
            let before = self.sessions.len();
            self.forget_session(&name);
            if self.sessions.len() == before {
                return;
            }
        }
    }
}
