//! Limits of a call and how a call narrows the policy's.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The limits in force for one call. `None` means no limit of that kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Seconds from the start until the tree is killed; at least 1 ms.
    #[serde(with = "seconds", rename = "wall_seconds")]
    pub wall: Option<Duration>,
    /// Seconds without output until the tree is killed; at least 1 ms.
    #[serde(with = "seconds", rename = "idle_seconds")]
    pub idle: Option<Duration>,
    /// Bytes of output above which the tree is killed.
    pub output_bytes: Option<u64>,
    /// RLIMIT_DATA of each process, in bytes.
    pub memory_bytes: Option<u64>,
    /// Processes and threads of the cell's user, as RLIMIT_NPROC counts them (per cell).
    pub processes: u32,
    /// RLIMIT_NOFILE.
    pub open_files: u32,
    /// RLIMIT_FSIZE, in bytes.
    pub file_bytes: Option<u64>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            wall: None,
            idle: None,
            output_bytes: None,
            memory_bytes: None,
            processes: 1024,
            open_files: 4096,
            file_bytes: None,
        }
    }
}

/// What a call asks for. `None` means the policy's value.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CallLimits {
    /// See [`Limits::wall`].
    pub wall: Option<Duration>,
    /// See [`Limits::idle`].
    pub idle: Option<Duration>,
    /// See [`Limits::output_bytes`].
    pub output_bytes: Option<u64>,
    /// See [`Limits::memory_bytes`].
    pub memory_bytes: Option<u64>,
    /// See [`Limits::processes`].
    pub processes: Option<u32>,
    /// See [`Limits::open_files`].
    pub open_files: Option<u32>,
    /// See [`Limits::file_bytes`].
    pub file_bytes: Option<u64>,
}

/// Why a call's limit was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LimitError {
    /// The call wants more than the policy allows.
    #[error("limits.{field} is {asked}, the policy allows at most {allowed}")]
    Widened {
        /// Field of the request.
        field: &'static str,
        /// The call's value, in the field's unit.
        asked: String,
        /// The policy's value.
        allowed: String,
    },
    /// The value is too small to mean anything.
    #[error("limits.{field} is {asked}, the least is {least}")]
    TooSmall {
        /// Field of the request.
        field: &'static str,
        /// The call's value.
        asked: String,
        /// The least value.
        least: &'static str,
    },
    /// The value is larger than the kernel's counters.
    #[error("limits.{field} is {asked}, the largest is {largest}")]
    TooLarge {
        /// Field of the request.
        field: &'static str,
        /// The call's value.
        asked: String,
        /// The largest value.
        largest: &'static str,
    },
}

impl LimitError {
    /// Field of the request, below `limits`.
    pub fn field(&self) -> &'static str {
        match self {
            Self::Widened { field, .. }
            | Self::TooSmall { field, .. }
            | Self::TooLarge { field, .. } => field,
        }
    }
}

/// Shortest time limit: below it a program cannot even be started.
const TIME_MIN: Duration = Duration::from_millis(1);
/// Longest time limit: a year, far below the overflow of the kernel's timers.
const TIME_MAX: Duration = Duration::from_secs(366 * 24 * 3600);

impl Limits {
    /// The policy's limits narrowed by a call's. A call never widens.
    pub fn narrow(&self, call: &CallLimits) -> Result<Limits, LimitError> {
        Ok(Limits {
            wall: narrow_time("wall", self.wall, call.wall)?,
            idle: narrow_time("idle", self.idle, call.idle)?,
            output_bytes: narrow("output_bytes", self.output_bytes, call.output_bytes, 1)?,
            memory_bytes: narrow("memory_bytes", self.memory_bytes, call.memory_bytes, 1 << 20)?,
            processes: narrow("processes", Some(self.processes), call.processes, 1)?
                .unwrap_or(self.processes),
            open_files: narrow("open_files", Some(self.open_files), call.open_files, 8)?
                .unwrap_or(self.open_files),
            file_bytes: narrow("file_bytes", self.file_bytes, call.file_bytes, 1)?,
        })
    }
}

fn narrow<T: Copy + Ord + From<u32> + std::fmt::Display>(
    field: &'static str,
    policy: Option<T>,
    call: Option<T>,
    least: u32,
) -> Result<Option<T>, LimitError> {
    let Some(asked) = call else { return Ok(policy) };
    if asked < T::from(least) {
        let least = match least {
            1 => "1",
            8 => "8",
            _ => "1048576",
        };
        return Err(LimitError::TooSmall { field, asked: asked.to_string(), least });
    }
    match policy {
        Some(allowed) if asked > allowed => Err(LimitError::Widened {
            field,
            asked: asked.to_string(),
            allowed: allowed.to_string(),
        }),
        _ => Ok(Some(asked)),
    }
}

fn narrow_time(
    field: &'static str,
    policy: Option<Duration>,
    call: Option<Duration>,
) -> Result<Option<Duration>, LimitError> {
    let Some(asked) = call else { return Ok(policy) };
    let show = |time: Duration| format!("{} s", time.as_secs_f64());
    if asked < TIME_MIN {
        return Err(LimitError::TooSmall { field, asked: show(asked), least: "0.001 s" });
    }
    if asked > TIME_MAX {
        return Err(LimitError::TooLarge { field, asked: show(asked), largest: "366 days" });
    }
    match policy {
        Some(allowed) if asked > allowed => {
            Err(LimitError::Widened { field, asked: show(asked), allowed: show(allowed) })
        }
        _ => Ok(Some(asked)),
    }
}

/// Durations as seconds, 0 for none.
mod seconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(
        value: &Option<Duration>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(value.map_or(0.0, |time| time.as_secs_f64()))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Duration>, D::Error> {
        let seconds = f64::deserialize(deserializer)?;
        if seconds == 0.0 {
            return Ok(None);
        }
        Duration::try_from_secs_f64(seconds).map(Some).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_narrows_and_never_widens() {
        let policy = Limits { wall: Some(Duration::from_secs(10)), ..Limits::default() };
        let ask = |wall| CallLimits { wall: Some(wall), ..CallLimits::default() };
        let narrowed = policy.narrow(&ask(Duration::from_secs(2))).unwrap();
        assert_eq!(narrowed.wall, Some(Duration::from_secs(2)));
        assert_eq!(policy.narrow(&ask(Duration::from_secs(11))).unwrap_err().field(), "wall");
        assert_eq!(policy.narrow(&ask(Duration::ZERO)).unwrap_err().field(), "wall");
        assert_eq!(policy.narrow(&CallLimits::default()).unwrap(), policy);
    }

    #[test]
    fn counts_are_bounded_by_the_policys() {
        let policy = Limits::default();
        let ask = |processes| CallLimits { processes: Some(processes), ..CallLimits::default() };
        assert_eq!(policy.narrow(&ask(10)).unwrap().processes, 10);
        assert_eq!(policy.narrow(&ask(0)).unwrap_err().field(), "processes");
        assert_eq!(policy.narrow(&ask(1025)).unwrap_err().field(), "processes");
    }
}
