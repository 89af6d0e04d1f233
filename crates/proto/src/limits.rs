//! Limits of a call. On the wire 0 means unset, as proto3 has it.

use std::time::Duration;

use cofferdam_spec::CallLimits;

use crate::time::{DurationError, duration_from_wire, duration_to_wire};
use crate::v1;

/// A time limit that is no length of time.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("limits.{field} {source}")]
pub struct LimitFieldError {
    /// Field of `Limits`.
    pub field: &'static str,
    /// What is wrong with it.
    pub source: DurationError,
}

/// Checks the limits that a call asks for; every wrong field is reported.
pub fn call_limits(wire: &v1::Limits) -> Result<CallLimits, Vec<LimitFieldError>> {
    let mut problems = Vec::new();
    let mut time = |field, value: &Option<prost_types::Duration>| -> Option<Duration> {
        match value.as_ref().map(duration_from_wire).transpose() {
            Ok(time) => time,
            Err(source) => {
                problems.push(LimitFieldError { field, source });
                None
            }
        }
    };
    let limits = CallLimits {
        wall: time("wall", &wire.wall),
        idle: time("idle", &wire.idle),
        output_bytes: (wire.output_bytes != 0).then_some(wire.output_bytes),
        memory_bytes: (wire.memory_bytes != 0).then_some(wire.memory_bytes),
        processes: (wire.processes != 0).then_some(wire.processes),
        open_files: (wire.open_files != 0).then_some(wire.open_files),
        file_bytes: (wire.file_bytes != 0).then_some(wire.file_bytes),
    };
    if problems.is_empty() { Ok(limits) } else { Err(problems) }
}

impl From<&CallLimits> for v1::Limits {
    fn from(limits: &CallLimits) -> Self {
        Self {
            wall: limits.wall.map(duration_to_wire),
            idle: limits.idle.map(duration_to_wire),
            output_bytes: limits.output_bytes.unwrap_or(0),
            memory_bytes: limits.memory_bytes.unwrap_or(0),
            processes: limits.processes.unwrap_or(0),
            open_files: limits.open_files.unwrap_or(0),
            file_bytes: limits.file_bytes.unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::option::of;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_wrong_field_is_named() {
        let bad = prost_types::Duration { seconds: -5, nanos: 0 };
        let wire = v1::Limits { wall: Some(bad), idle: Some(bad), ..v1::Limits::default() };
        let fields: Vec<_> =
            call_limits(&wire).unwrap_err().into_iter().map(|problem| problem.field).collect();
        assert_eq!(fields, ["wall", "idle"]);
    }

    fn time() -> impl Strategy<Value = Option<Duration>> {
        of((0..1_000_000_u64, 0..1_000_000_000_u32).prop_map(|(s, n)| Duration::new(s, n)))
    }

    proptest! {
        #[test]
        fn limits_survive_the_wire(
            (wall, idle) in (time(), time()),
            (output_bytes, memory_bytes, file_bytes) in
                (of(1..u64::MAX), of(1..u64::MAX), of(1..u64::MAX)),
            (processes, open_files) in (of(1..u32::MAX), of(1..u32::MAX)),
        ) {
            let limits = CallLimits {
                wall, idle, output_bytes, memory_bytes, processes, open_files, file_bytes,
            };
            prop_assert_eq!(call_limits(&v1::Limits::from(&limits)), Ok(limits));
        }
    }
}
