//! One call as init sees it: its phase, its deadline, and whether its tree is being killed.
//! Decisions only; what they ask for is done by [`init`](crate::init).

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::protocol::{Exec, KillCause, Status, Stdio};
use crate::stdio::Streams;
use crate::supervision::{Run, ShimId};

/// Where a call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// It waits for a shim.
    Waiting,
    /// A shim has been sent the call and has not answered.
    Handed { shim: ShimId },
    /// Its program was started by this shim.
    Running { shim: ShimId },
    /// Its shim is dead; what is left of it falls to init.
    Orphaned,
}

/// The program of a call.
#[derive(Debug)]
pub(crate) struct Leader {
    pub(crate) pid: i32,
    /// Not for one that had ended when it was reported.
    pub(crate) pidfd: Option<OwnedFd>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kill {
    cause: KillCause,
    /// When SIGKILL begins.
    at: Instant,
}

/// One call.
#[derive(Debug)]
pub(crate) struct Call {
    exec: Exec,
    pub(crate) streams: Streams,
    pub(crate) phase: Phase,
    pub(crate) leader: Option<Leader>,
    /// The leader's status, once reported.
    pub(crate) exited: Option<Status>,
    /// The leader's process id, when its shim died before it could report it.
    pub(crate) orphan_pid: Option<i32>,
    /// The leader's status when init itself reaped it.
    pub(crate) orphan_status: Option<Status>,
    /// How often a shim died before it looked at the call.
    pub(crate) hand_overs: u32,
    deadline: Option<Instant>,
    kill: Option<Kill>,
}

impl Call {
    pub(crate) fn new(exec: Exec, streams: Streams, now: Instant) -> Self {
        let deadline = exec.limits.wall.and_then(|wall| now.checked_add(wall));
        Self {
            exec,
            streams,
            phase: Phase::Waiting,
            leader: None,
            exited: None,
            orphan_pid: None,
            orphan_status: None,
            hand_overs: 0,
            deadline,
            kill: None,
        }
    }

    pub(crate) fn session(&self) -> &str {
        &self.exec.session
    }

    pub(crate) fn grace(&self) -> Duration {
        self.exec.grace
    }

    pub(crate) fn run(&self) -> Run {
        Run {
            command: self.exec.command.clone(),
            limits: self.exec.limits.clone(),
            terminal: matches!(self.exec.stdio, Stdio::Pty(_)),
            workspace_read_only: self.exec.workspace_read_only,
        }
    }

    /// The shim that has the call.
    pub(crate) fn shim(&self) -> Option<ShimId> {
        match self.phase {
            Phase::Handed { shim } | Phase::Running { shim } => Some(shim),
            Phase::Waiting | Phase::Orphaned => None,
        }
    }

    /// The program runs. Returns the daemon's ends of its streams.
    pub(crate) fn start(&mut self, pid: i32, pidfd: Option<OwnedFd>) -> Vec<OwnedFd> {
        if let Phase::Handed { shim } = self.phase {
            self.phase = Phase::Running { shim };
        }
        self.leader = Some(Leader { pid, pidfd });
        self.streams.take_daemon_ends()
    }

    /// The daemon's ends of the streams of a call that was never reported as started.
    pub(crate) fn unsent_ends(&mut self) -> Option<Vec<OwnedFd>> {
        self.leader.is_none().then(|| self.streams.take_daemon_ends())
    }

    /// The leader has ended. Returns why it was being killed, if it was.
    pub(crate) fn exit(&mut self, status: Status) -> Option<KillCause> {
        self.exited = Some(status);
        if !self.exec.wall_bounds_tree {
            self.deadline = None;
        }
        self.kill.map(|kill| kill.cause)
    }

    /// Begins to kill the tree, or shortens the grace of a kill under way. True the first time.
    pub(crate) fn start_kill(&mut self, now: Instant, grace: Duration, cause: KillCause) -> bool {
        let at = now + grace;
        match &mut self.kill {
            Some(kill) => {
                kill.at = kill.at.min(at);
                false
            }
            None => {
                self.kill = Some(Kill { cause, at });
                true
            }
        }
    }

    pub(crate) fn is_being_killed(&self) -> bool {
        self.kill.is_some()
    }

    /// Whether the wall limit has passed and nothing has been done about it.
    pub(crate) fn wall_expired(&self, now: Instant) -> bool {
        self.kill.is_none() && self.deadline.is_some_and(|deadline| deadline <= now)
    }

    /// Whether the grace is over, so that what is left gets SIGKILL.
    pub(crate) fn must_kill(&self, now: Instant) -> bool {
        self.phase != Phase::Orphaned && self.kill.is_some_and(|kill| kill.at <= now)
    }

    /// When something is to be done: the deadline, the end of the grace, and from then on after
    /// every `interval`.
    pub(crate) fn next_event(&self, now: Instant, interval: Duration) -> Option<Instant> {
        match self.kill {
            // What falls to init is looked after there.
            _ if self.phase == Phase::Orphaned => None,
            Some(kill) if kill.at <= now => Some(now + interval),
            Some(kill) => Some(kill.at),
            None => self.deadline,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::os::fd::AsFd;

    use cofferdam_spec::{Command, Limits};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn call(wall: Option<Duration>, wall_bounds_tree: bool, now: Instant) -> Call {
        let null = std::fs::File::open("/dev/null").unwrap();
        let stdio = Stdio::Pipes { stdin: false };
        let command =
            Command::new(vec!["true".into()], &BTreeMap::new(), [], String::new()).unwrap();
        let exec = Exec {
            call: 1,
            session: String::new(),
            command,
            limits: Limits { wall, ..Limits::default() },
            wall_bounds_tree,
            grace: SECOND,
            stdio,
            workspace_read_only: false,
        };
        Call::new(exec, Streams::open(stdio, null.as_fd()).unwrap(), now)
    }

    #[test]
    fn the_wall_limit_ends_with_the_leader_unless_the_call_set_it() {
        let now = Instant::now();
        for (bounds_tree, expired_after_exit) in [(false, false), (true, true)] {
            let mut call = call(Some(2 * SECOND), bounds_tree, now);
            assert!(!call.wall_expired(now + SECOND));
            assert!(call.wall_expired(now + 2 * SECOND));
            assert_eq!(call.exit(Status::Exited(0)), None);
            assert_eq!(call.wall_expired(now + 3 * SECOND), expired_after_exit);
        }
    }

    #[test]
    fn a_kill_has_one_cause_and_its_grace_only_gets_shorter() {
        let now = Instant::now();
        let mut call = call(None, false, now);
        assert_eq!(call.next_event(now, SECOND), None);
        assert!(call.start_kill(now, 5 * SECOND, KillCause::Idle));
        assert!(!call.start_kill(now, 9 * SECOND, KillCause::Client));
        assert_eq!(call.next_event(now, SECOND), Some(now + 5 * SECOND));
        assert!(!call.start_kill(now, SECOND, KillCause::Client));
        assert!(!call.must_kill(now));
        assert!(call.must_kill(now + SECOND));
        let later = now + 2 * SECOND;
        assert_eq!(call.next_event(later, SECOND), Some(later + SECOND));
        assert_eq!(call.exit(Status::Lost), Some(KillCause::Idle));
    }

    #[test]
    fn an_orphaned_call_has_no_deadline_of_its_own() {
        let now = Instant::now();
        let mut call = call(Some(SECOND), true, now);
        call.phase = Phase::Orphaned;
        assert_eq!(call.next_event(now + 5 * SECOND, SECOND), None);
        assert_eq!(call.shim(), None);
    }
}
