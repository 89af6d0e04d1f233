//! What init reaps: keepers, shims, and the remains of shims that were killed.

use std::collections::HashSet;
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use rustix::process::{Pid, Signal, kill_process};

use super::Init;
use super::shims::Session;
use crate::call::{Call, Phase};
use crate::channel::Channel;
use crate::notes::Notes;
use crate::protocol::{CallId, Event, KillCause, Status};
use crate::supervision::{Run, ShimId};
use crate::tree::{Table, signal};

/// How often a call is given to another shim because the one that had it died before it looked.
const HAND_OVERS_MAX: u32 = 8;
/// Keepers of a session that may die in a row while a call waits; a command that kills them as
/// fast as they come must not keep init busy for ever.
const KEEPER_DEATHS_MAX: u32 = 16;
impl Init {
    pub(super) fn reap(&mut self) -> io::Result<()> {
        let flags = WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED;
        loop {
            match waitpid(None, Some(flags)) {
                Ok(WaitStatus::Exited(pid, code)) => {
                    self.child_ended(pid.as_raw(), Status::Exited(code))?;
                }
                Ok(WaitStatus::Signaled(pid, signal, core)) => {
                    let status = Status::Signaled { signal: signal as i32, core };
                    self.child_ended(pid.as_raw(), status)?;
                }
                Ok(WaitStatus::Stopped(pid, _)) => self.child_stopped(pid.as_raw()),
                Ok(WaitStatus::StillAlive) | Err(nix::errno::Errno::ECHILD) => return Ok(()),
                Ok(_) | Err(nix::errno::Errno::EINTR) => continue,
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    pub(super) fn child_ended(&mut self, pid: i32, status: Status) -> io::Result<()> {
        // What it said last may have come in after the reports were read.
        self.read_reports()?;
        let keeper_of = |(_, session): &(&String, &Session)| {
            session.keeper.as_ref().is_some_and(|keeper| keeper.pid == pid)
        };
        if let Some(name) = self.sessions.iter().find(keeper_of).map(|(name, _)| name.clone()) {
            self.keeper_died(&name);
            return Ok(());
        }
        if let Some(id) = self.shim_with(pid) {
            self.shim_died(id);
            return Ok(());
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
        Ok(())
    }

    /// Shims that it was asked for and has not forked will not come; those of calls live on.
    pub(super) fn keeper_died(&mut self, name: &str) {
        let session = self.session(name);
        session.keeper = None;
        // Idle ones are in a domain that no later shim will be in.
        let lost: Vec<ShimId> = session.expected.drain().chain(session.idle.drain(..)).collect();
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

    pub(super) fn shim_died(&mut self, id: ShimId) {
        let Some(shim) = self.remove_shim(&id) else { return };
        self.strays_may_exist = true;
        if let Some(session) = self.sessions.get_mut(&shim.session) {
            session.idle.retain(|idle| *idle != id);
            session.expected.remove(&id);
        }
        let Some(call_id) = shim.call else { return };
        let Some(call) = self.calls.get_mut(&call_id) else { return };
        let handed = matches!(call.phase, Phase::Handed { .. }) && !call.is_being_killed();
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
    pub(super) fn child_stopped(&mut self, pid: i32) {
        let Some(process) = Pid::from_raw(pid) else { return };
        let keeper = self
            .sessions
            .values_mut()
            .find_map(|session| session.keeper.as_mut().filter(|keeper| keeper.pid == pid));
        let first = match keeper {
            Some(keeper) => !std::mem::replace(&mut keeper.stopped_before, true),
            None => match self.shim_with(pid).and_then(|id| self.shims.get_mut(&id)) {
                Some(shim) => !std::mem::replace(&mut shim.stopped_before, true),
                // The remains of a shim, which are killed; or a shim that its keeper has not
                // reported yet, whose stop is told only once: stopped, it would never take a call.
                None => {
                    self.strays_may_exist = true;
                    true
                }
            },
        };
        let signal = if first { Signal::CONT } else { Signal::KILL };
        // It fails when the process has ended meanwhile, which `reap` will hear.
        let _sent = kill_process(process, signal);
    }

    /// Kills what fell to init. When nothing is left, the calls of dead shims are over.
    pub(super) fn kill_strays(&mut self) -> io::Result<()> {
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
        // Without descriptors to spare it is tried again at the next tick.
        let Ok(table) = Table::read() else { return Ok(()) };
        match table.strays(1, &known) {
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

    pub(super) fn finish_orphaned(&mut self) {
        let orphaned = |(_, call): &(&CallId, &Call)| matches!(call.phase, Phase::Orphaned);
        let over: Vec<CallId> = self.calls.iter().filter(orphaned).map(|(id, _)| *id).collect();
        for id in over {
            self.end_orphaned(id);
        }
    }

    /// Reports the end of a call that no shim looks after.
    pub(super) fn end_orphaned(&mut self, id: CallId) {
        let Some(mut call) = self.calls.remove(&id) else { return };
        if call.exited.is_some() {
            return self.emit(Event::TreeGone { call: id }, Vec::new());
        }
        if let Some(ends) = call.unsent_ends() {
            // Its shim died before it could report it. Without an id nobody knows whether it ran,
            // and it is lost.
            let pid = call.orphan_pid.unwrap_or(0) as u32;
            self.emit(Event::Started { call: id, pid }, ends);
        }
        let status = call.orphan_status.unwrap_or(Status::Lost);
        let killed = call.exit(status);
        self.emit(Event::Exited { call: id, status, killed, background: 0 }, Vec::new());
    }
}

/// Whether a dead shim's last message is still in its socket.
fn was_not_read(unread: &Channel<(), Run>) -> bool {
    rustix::io::ioctl_fionbio(unread.as_fd(), true).is_ok()
        && matches!(unread.receive(), Ok(Some(_)))
}
