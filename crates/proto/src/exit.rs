//! How a process ended.

use cofferdam_spec::{Exit, TimeLimit};
use thiserror::Error;

use crate::time::{DurationError, duration_from_wire, duration_to_wire};
use crate::v1;
use crate::v1::exit::Reason;

/// Why a wire exit is none that this version knows.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ExitError {
    /// No reason is set, or one of a later version.
    #[error("exit has no known reason")]
    NoReason,
    /// The time limit is not known.
    #[error("exit.timed_out.limit {value} is not known")]
    UnknownLimit {
        /// The enum's number.
        value: i32,
    },
    /// The limit's value is no length of time.
    #[error("exit.timed_out.after {0}")]
    After(#[source] DurationError),
}

impl From<&Exit> for v1::Exit {
    fn from(exit: &Exit) -> Self {
        let reason = match exit {
            Exit::Exited { code } => Reason::Exited(v1::Exited { code: *code }),
            Exit::Signaled { number, core, maybe_oom } => Reason::Signaled(v1::Signaled {
                number: *number,
                core: *core,
                maybe_oom: *maybe_oom,
            }),
            Exit::TimedOut { limit, after } => Reason::TimedOut(v1::TimedOut {
                limit: time_limit(*limit).into(),
                after: Some(duration_to_wire(*after)),
            }),
            Exit::OomKilled => Reason::OomKilled(v1::OomKilled {}),
            Exit::OutputLimit { limit_bytes } => {
                Reason::OutputLimit(v1::OutputLimit { limit_bytes: *limit_bytes })
            }
            Exit::Cancelled { by } => Reason::Cancelled(v1::Cancelled { by: by.clone() }),
            Exit::Denied { rule } => Reason::Denied(v1::Denied { rule: rule.clone() }),
            Exit::SandboxFailed { step, errno } => Reason::SandboxFailed(v1::SandboxFailed {
                step: step.clone(),
                errno: *errno,
                message: sandbox_message(step, *errno),
            }),
            Exit::Lost => Reason::Lost(v1::Lost {}),
        };
        Self { reason: Some(reason) }
    }
}

impl TryFrom<v1::Exit> for Exit {
    type Error = ExitError;

    fn try_from(wire: v1::Exit) -> Result<Self, ExitError> {
        Ok(match wire.reason.ok_or(ExitError::NoReason)? {
            Reason::Exited(exited) => Exit::Exited { code: exited.code },
            Reason::Signaled(v1::Signaled { number, core, maybe_oom }) => {
                Exit::Signaled { number, core, maybe_oom }
            }
            Reason::TimedOut(timed_out) => Exit::TimedOut {
                limit: match v1::TimeLimit::try_from(timed_out.limit) {
                    Ok(v1::TimeLimit::Wall) => TimeLimit::Wall,
                    Ok(v1::TimeLimit::Idle) => TimeLimit::Idle,
                    _ => return Err(ExitError::UnknownLimit { value: timed_out.limit }),
                },
                after: duration_from_wire(&timed_out.after.unwrap_or_default())
                    .map_err(ExitError::After)?,
            },
            Reason::OomKilled(v1::OomKilled {}) => Exit::OomKilled,
            Reason::OutputLimit(limit) => Exit::OutputLimit { limit_bytes: limit.limit_bytes },
            Reason::Cancelled(cancelled) => Exit::Cancelled { by: cancelled.by },
            Reason::Denied(denied) => Exit::Denied { rule: denied.rule },
            Reason::SandboxFailed(failed) => {
                Exit::SandboxFailed { step: failed.step, errno: failed.errno }
            }
            Reason::Lost(v1::Lost {}) => Exit::Lost,
        })
    }
}

fn time_limit(limit: TimeLimit) -> v1::TimeLimit {
    match limit {
        TimeLimit::Wall => v1::TimeLimit::Wall,
        TimeLimit::Idle => v1::TimeLimit::Idle,
    }
}

fn sandbox_message(step: &str, errno: i32) -> String {
    let error = std::io::Error::from_raw_os_error(errno).to_string();
    let text = error.split(" (os error").next().unwrap_or(&error);
    match step {
        "exec" => format!("the program could not be executed: {text}"),
        "cwd" => format!("the working directory could not be entered: {text}"),
        _ => format!("the cell could not start the program, step {step}: {text}"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn any_exit() -> impl Strategy<Value = Exit> {
        let limit = prop_oneof![Just(TimeLimit::Wall), Just(TimeLimit::Idle)];
        prop_oneof![
            any::<i32>().prop_map(|code| Exit::Exited { code }),
            any::<(i32, bool, bool)>().prop_map(|(number, core, maybe_oom)| Exit::Signaled {
                number,
                core,
                maybe_oom
            }),
            (limit, 0..1_000_000_u64, 0..1_000_000_000_u32).prop_map(|(limit, seconds, nanos)| {
                Exit::TimedOut { limit, after: Duration::new(seconds, nanos) }
            }),
            Just(Exit::OomKilled),
            any::<u64>().prop_map(|limit_bytes| Exit::OutputLimit { limit_bytes }),
            any::<String>().prop_map(|by| Exit::Cancelled { by }),
            any::<String>().prop_map(|rule| Exit::Denied { rule }),
            any::<(String, i32)>().prop_map(|(step, errno)| Exit::SandboxFailed { step, errno }),
            Just(Exit::Lost),
        ]
    }

    proptest! {
        #[test]
        fn every_exit_survives_the_wire(exit in any_exit()) {
            prop_assert_eq!(Exit::try_from(v1::Exit::from(&exit)), Ok(exit));
        }
    }

    #[test]
    fn an_exit_of_a_later_version_is_refused() {
        assert_eq!(Exit::try_from(v1::Exit { reason: None }), Err(ExitError::NoReason));
        let timed_out = v1::TimedOut { limit: 9, after: None };
        let wire = v1::Exit { reason: Some(Reason::TimedOut(timed_out)) };
        assert_eq!(Exit::try_from(wire), Err(ExitError::UnknownLimit { value: 9 }));
    }

    #[test]
    fn the_message_is_a_sentence_without_numbers() {
        let text = "the program could not be executed: No such file or directory";
        assert_eq!(sandbox_message("exec", 2), text);
    }
}
