//! The daemon's decisions, without I/O and without a clock: how a process ended, when its output
//! stops being waited for, whom to admit, what to forget, when to leave.

use std::time::{Duration, Instant};

use cofferdam_cell::protocol::{KillCause, SURVEY_ENTRIES_MAX, Status};
use cofferdam_spec::{Exit, Limits, TimeLimit};

/// Time between SIGTERM and SIGKILL when a limit, a client or a drain ends a tree: enough for a
/// program to write its state, short enough that a caller waits for it.
pub(crate) const GRACE: Duration = Duration::from_secs(2);

/// How long output may arrive after the leader's exit, while another process holds the stream,
/// before the call is answered without it. What the leader wrote is in the pipe already.
pub(crate) const DRAIN_MAX: Duration = Duration::from_millis(100);

/// After a kill and its grace, how long the tree may take to be gone before the call is answered.
/// SIGKILL takes effect at once unless a process hangs in the kernel.
pub(crate) const KILL_MAX: Duration = Duration::from_secs(3);

/// Calls that may run at once. Each costs three descriptors and up to 32 MiB of job files.
pub(crate) const CALLS_MAX: usize = 256;

/// Finished processes that stay readable.
pub(crate) const FINISHED_MAX: usize = 256;

/// Job files of finished processes, together.
pub(crate) const FINISHED_BYTES_MAX: u64 = 512 * 1024 * 1024;

/// Retention of a process whose call names none.
pub(crate) const RETENTION_DEFAULT: Duration = Duration::from_secs(5 * 60);

/// Longest retention that a call may ask for.
pub(crate) const RETENTION_MAX: Duration = Duration::from_secs(24 * 3600);

/// Launches of a cell that may fail in a row before callers are told to wait.
const LAUNCH_FAILURES_MAX: u32 = 3;

/// How long callers wait then.
pub(crate) const LAUNCH_PAUSE: Duration = Duration::from_secs(5);

/// SIGKILL.
const KILL_SIGNAL: i32 = 9;

/// How a process ended, from what init saw and why it was killing.
pub(crate) fn exit_reason(status: Status, killed: Option<KillCause>, limits: &Limits) -> Exit {
    let own = |maybe_oom| match status {
        Status::Exited(code) => Exit::Exited { code },
        Status::Signaled { signal, core } => {
            Exit::Signaled { number: signal, core, maybe_oom: maybe_oom && signal == KILL_SIGNAL }
        }
        Status::Lost => Exit::Lost,
    };
    let timed_out = |limit, after: Option<Duration>| match after {
        Some(after) => Exit::TimedOut { limit, after },
        // Init named a limit that the call does not have: its word about the program still stands.
        None => own(false),
    };
    let cancelled = |by: &str| Exit::Cancelled { by: by.to_owned() };
    match killed {
        None => own(true),
        Some(KillCause::Supervision) => own(false),
        Some(KillCause::Wall) => timed_out(TimeLimit::Wall, limits.wall),
        Some(KillCause::Idle) => timed_out(TimeLimit::Idle, limits.idle),
        Some(KillCause::Output) => match limits.output_bytes {
            Some(limit_bytes) => Exit::OutputLimit { limit_bytes },
            None => own(false),
        },
        Some(KillCause::Client) => cancelled("client"),
        Some(KillCause::Session) => cancelled("session"),
        Some(KillCause::Drain) => cancelled("drain"),
    }
}

/// The end of a process, as its pump sees it.
///
/// ```text
/// running --exit--> draining --end of output, or time--> reported --end of output--> done
/// ```
#[derive(Debug, Clone, Default)]
pub(crate) struct Ending {
    /// Output streams that have not ended.
    pub(crate) open: usize,
    /// When the leader ended.
    pub(crate) exited: Option<Instant>,
    /// Whether the tree was being killed then.
    pub(crate) killed: bool,
    /// When nothing of the tree was left.
    pub(crate) gone: Option<Instant>,
    /// Whether the end has been reported.
    pub(crate) reported: bool,
}

/// What a pump does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Go on, at most until then.
    Wait(Option<Instant>),
    /// Report the end.
    Report,
    /// Nothing more can come.
    Done,
}

impl Ending {
    /// The next action at `now`.
    pub(crate) fn next(&self, now: Instant) -> Next {
        let Some(exited) = self.exited else { return Next::Wait(None) };
        if self.reported {
            return match self.gone {
                _ if self.open == 0 => Next::Done,
                Some(gone) if now >= gone + DRAIN_MAX => Next::Done,
                Some(gone) => Next::Wait(Some(gone + DRAIN_MAX)),
                None => Next::Wait(None),
            };
        }
        // A killed call is answered when it is true that nothing of it runs.
        let settled = if self.killed { self.gone } else { Some(exited) };
        let deadline = match settled {
            Some(_) if self.open == 0 => return Next::Report,
            Some(settled) => settled + DRAIN_MAX,
            None => exited + GRACE + KILL_MAX,
        };
        if now >= deadline {
            return Next::Report;
        }
        Next::Wait(Some(deadline))
    }
}

/// Whether new calls are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The daemon is going away.
    Draining,
    /// As many run as may.
    TooMany,
}

/// Whether a new call may start beside `running` others.
pub(crate) fn admit(draining: bool, running: usize) -> Result<(), Refusal> {
    match (draining, running) {
        (true, _) => Err(Refusal::Draining),
        (false, running) if running >= CALLS_MAX => Err(Refusal::TooMany),
        (false, _) => Ok(()),
    }
}

/// A process whose end has been reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Finished {
    /// Its number; grows with time.
    pub(crate) number: u64,
    /// When its output stops being readable.
    pub(crate) until: Instant,
    /// What its job files take.
    pub(crate) bytes: u64,
}

/// Which of the finished processes, given oldest first, are forgotten at `now`: those whose time
/// is over, and the oldest ones until the rest is within the bounds.
pub(crate) fn forget(finished: &[Finished], now: Instant) -> Vec<u64> {
    let alive = |one: &&Finished| one.until > now;
    let mut count = finished.iter().filter(alive).count();
    let mut bytes: u64 = finished.iter().filter(alive).map(|one| one.bytes).sum();
    let mut forgotten = Vec::new();
    for one in finished {
        let over = count > FINISHED_MAX || bytes > FINISHED_BYTES_MAX;
        if one.until <= now {
            forgotten.push(one.number);
        } else if over {
            count -= 1;
            bytes -= one.bytes;
            forgotten.push(one.number);
        }
    }
    forgotten
}

/// Bounds how often a cell that cannot stand is tried.
#[derive(Debug, Default)]
pub(crate) struct LaunchBudget {
    failures: u32,
    last: Option<Instant>,
}

impl LaunchBudget {
    /// Whether a launch may be tried; otherwise how long to wait.
    pub(crate) fn check(&self, now: Instant) -> Result<(), Duration> {
        let Some(last) = self.last else { return Ok(()) };
        let left = (last + LAUNCH_PAUSE).saturating_duration_since(now);
        if self.failures < LAUNCH_FAILURES_MAX || left.is_zero() { Ok(()) } else { Err(left) }
    }

    /// A launch succeeded.
    pub(crate) fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// A launch failed.
    pub(crate) fn failed(&mut self, now: Instant) {
        self.failures = self.failures.saturating_add(1);
        self.last = Some(now);
    }
}

/// What a person should know after the workspace's files have been looked at.
pub(crate) fn survey_warnings(foreign: u64, complete: bool) -> Vec<String> {
    let mut warnings = Vec::new();
    if foreign > 0 {
        let at_least = if complete { "" } else { "at least " };
        warnings.push(format!(
            "{at_least}{foreign} files belong to neither the cell's user nor the workspace's \
             owner: programs see them as nobody's and cannot change them"
        ));
    }
    if !complete {
        warnings.push(format!(
            "the workspace has more than {SURVEY_ENTRIES_MAX} files, not all were looked at"
        ));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn limits() -> Limits {
        Limits {
            wall: Some(SECOND),
            idle: Some(2 * SECOND),
            output_bytes: Some(7),
            ..Limits::default()
        }
    }

    #[test]
    fn every_cause_has_its_exit() {
        let killed = Status::Signaled { signal: 9, core: false };
        let signaled = |maybe_oom| Exit::Signaled { number: 9, core: false, maybe_oom };
        let by = |by: &str| Exit::Cancelled { by: by.to_owned() };
        let timed_out = |limit, after| Exit::TimedOut { limit, after };
        let table = [
            (None, signaled(true)),
            (Some(KillCause::Supervision), signaled(false)),
            (Some(KillCause::Wall), timed_out(TimeLimit::Wall, SECOND)),
            (Some(KillCause::Idle), timed_out(TimeLimit::Idle, 2 * SECOND)),
            (Some(KillCause::Output), Exit::OutputLimit { limit_bytes: 7 }),
            (Some(KillCause::Client), by("client")),
            (Some(KillCause::Session), by("session")),
            (Some(KillCause::Drain), by("drain")),
        ];
        for (cause, exit) in table {
            assert_eq!(exit_reason(killed, cause, &limits()), exit, "{cause:?}");
        }
        assert_eq!(exit_reason(Status::Lost, None, &limits()), Exit::Lost);
        assert_eq!(exit_reason(Status::Exited(3), None, &limits()), Exit::Exited { code: 3 });
        let term = Status::Signaled { signal: 15, core: false };
        let exit = Exit::Signaled { number: 15, core: false, maybe_oom: false };
        assert_eq!(exit_reason(term, None, &limits()), exit);
    }

    #[test]
    fn a_call_without_background_is_reported_at_the_end_of_its_output() {
        let start = Instant::now();
        let mut ending = Ending { open: 2, ..Ending::default() };
        assert_eq!(ending.next(start), Next::Wait(None));
        (ending.exited, ending.gone) = (Some(start), Some(start));
        assert_eq!(ending.next(start), Next::Wait(Some(start + DRAIN_MAX)));
        ending.open = 0;
        assert_eq!(ending.next(start), Next::Report);
        ending.reported = true;
        assert_eq!(ending.next(start), Next::Done);
    }

    #[test]
    fn a_background_process_that_holds_a_stream_is_detached_from_after_the_drain() {
        let start = Instant::now();
        let mut ending = Ending { open: 1, exited: Some(start), ..Ending::default() };
        assert_eq!(ending.next(start + DRAIN_MAX), Next::Report);
        ending.reported = true;
        assert_eq!(ending.next(start + 60 * SECOND), Next::Wait(None));
        ending.gone = Some(start + 60 * SECOND);
        assert_eq!(ending.next(start + 60 * SECOND + DRAIN_MAX), Next::Done);
    }

    #[test]
    fn a_killed_call_is_reported_when_its_tree_is_gone() {
        let start = Instant::now();
        let mut ending = Ending { exited: Some(start), killed: true, ..Ending::default() };
        let bound = start + GRACE + KILL_MAX;
        assert_eq!(ending.next(start + SECOND), Next::Wait(Some(bound)));
        assert_eq!(ending.next(bound), Next::Report);
        ending.gone = Some(start + SECOND);
        assert_eq!(ending.next(start + SECOND), Next::Report);
    }

    #[test]
    fn only_foreign_files_and_an_unfinished_survey_are_worth_a_warning() {
        assert_eq!(survey_warnings(0, true), Vec::<String>::new());
        assert!(survey_warnings(3, true)[0].starts_with("3 files"));
        let warnings = survey_warnings(3, false);
        assert!(warnings[0].starts_with("at least 3 files"));
        assert_eq!(warnings.len(), 2);
    }

    #[test]
    fn launches_pause_after_three_failures() {
        let start = Instant::now();
        let mut budget = LaunchBudget::default();
        for _ in 0..LAUNCH_FAILURES_MAX {
            assert_eq!(budget.check(start), Ok(()));
            budget.failed(start);
        }
        assert_eq!(budget.check(start + SECOND), Err(LAUNCH_PAUSE - SECOND));
        assert_eq!(budget.check(start + LAUNCH_PAUSE), Ok(()));
        budget.succeeded();
        assert_eq!(budget.check(start), Ok(()));
    }

    #[test]
    fn new_calls_are_refused_while_draining_and_above_the_bound() {
        assert_eq!(admit(false, CALLS_MAX - 1), Ok(()));
        assert_eq!(admit(false, CALLS_MAX), Err(Refusal::TooMany));
        assert_eq!(admit(true, 0), Err(Refusal::Draining));
    }

    fn any_finished() -> impl Strategy<Value = Vec<(u64, u64)>> {
        proptest::collection::vec((0_u64..40, 0_u64..32 << 20), 0..400)
    }

    proptest! {
        #[test]
        fn what_stays_is_within_the_bounds_and_the_newest(parts in any_finished()) {
            let start = Instant::now();
            let now = start + 10 * SECOND;
            let finished: Vec<_> = parts
                .iter()
                .enumerate()
                .map(|(number, (seconds, bytes))| Finished {
                    number: number as u64,
                    until: start + Duration::from_secs(*seconds),
                    bytes: *bytes,
                })
                .collect();
            let forgotten = forget(&finished, now);
            let stays = |one: &&Finished| !forgotten.contains(&one.number);
            let left: Vec<_> = finished.iter().filter(stays).collect();
            prop_assert!(left.len() <= FINISHED_MAX);
            prop_assert!(left.iter().map(|one| one.bytes).sum::<u64>() <= FINISHED_BYTES_MAX);
            prop_assert!(left.iter().all(|one| one.until > now));
            // Nothing alive is forgotten while something older stays.
            let oldest = left.first().map_or(u64::MAX, |one| one.number);
            for one in finished.iter().filter(|one| one.until > now) {
                prop_assert_eq!(forgotten.contains(&one.number), one.number < oldest);
            }
        }

        #[test]
        fn an_ending_never_waits_for_ever_once_the_tree_is_gone(
            open in 0_usize..3,
            killed in any::<bool>(),
            reported in any::<bool>(),
        ) {
            let start = Instant::now();
            let (exited, gone) = (Some(start), Some(start));
            let ending = Ending { open, exited, killed, gone, reported };
            let at = |now| ending.next(now);
            prop_assert!(!matches!(at(start + DRAIN_MAX), Next::Wait(_)));
            if let Next::Wait(until) = at(start) {
                prop_assert_eq!(until, Some(start + DRAIN_MAX));
            }
        }
    }
}
