//! Durations.

use std::time::Duration;

use thiserror::Error;

/// Why a wire duration is no length of time.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DurationError {
    /// Below zero.
    #[error("is negative")]
    Negative,
    /// Nanoseconds outside of one second.
    #[error("has {nanos} nanos, allowed are 0 to 999,999,999")]
    Nanos {
        /// The value.
        nanos: i32,
    },
    /// Above what `google.protobuf.Duration` allows.
    #[error("has {seconds} seconds, the largest is {SECONDS_MAX}")]
    TooLong {
        /// The value.
        seconds: i64,
    },
}

/// Largest number of seconds in a `google.protobuf.Duration` (10,000 years).
const SECONDS_MAX: i64 = 315_576_000_000;

const NANOS_PER_SECOND: i32 = 1_000_000_000;

/// Checks a wire duration.
pub fn duration_from_wire(wire: &prost_types::Duration) -> Result<Duration, DurationError> {
    if wire.seconds < 0 || (wire.seconds == 0 && wire.nanos < 0 && wire.nanos > -NANOS_PER_SECOND) {
        return Err(DurationError::Negative);
    }
    if !(0..NANOS_PER_SECOND).contains(&wire.nanos) {
        return Err(DurationError::Nanos { nanos: wire.nanos });
    }
    if wire.seconds > SECONDS_MAX {
        return Err(DurationError::TooLong { seconds: wire.seconds });
    }
    Ok(Duration::new(wire.seconds.unsigned_abs(), wire.nanos.unsigned_abs()))
}

/// A duration on the wire; more than the wire can say becomes its largest value.
pub fn duration_to_wire(time: Duration) -> prost_types::Duration {
    match i64::try_from(time.as_secs()) {
        Ok(seconds) if seconds <= SECONDS_MAX => prost_types::Duration {
            seconds,
            nanos: i32::try_from(time.subsec_nanos()).unwrap_or(NANOS_PER_SECOND - 1),
        },
        _ => prost_types::Duration { seconds: SECONDS_MAX, nanos: 0 },
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(seconds: i64, nanos: i32) -> Result<Duration, DurationError> {
        duration_from_wire(&prost_types::Duration { seconds, nanos })
    }

    #[test]
    fn what_is_no_length_of_time_is_refused() {
        assert_eq!(check(-1, 0), Err(DurationError::Negative));
        assert_eq!(check(0, -1), Err(DurationError::Negative));
        assert_eq!(check(1, -1), Err(DurationError::Nanos { nanos: -1 }));
        let nanos = NANOS_PER_SECOND;
        assert_eq!(check(0, nanos), Err(DurationError::Nanos { nanos }));
        assert_eq!(check(i64::MAX, 0), Err(DurationError::TooLong { seconds: i64::MAX }));
        assert_eq!(check(2, 5), Ok(Duration::new(2, 5)));
    }

    #[test]
    fn more_than_the_wire_can_say_becomes_its_largest() {
        assert_eq!(duration_to_wire(Duration::MAX).seconds, SECONDS_MAX);
    }

    proptest! {
        #[test]
        fn durations_survive_the_wire(seconds in 0..SECONDS_MAX as u64, nanos in 0_u32..1_000_000_000) {
            let time = Duration::new(seconds, nanos);
            prop_assert_eq!(duration_from_wire(&duration_to_wire(time)), Ok(time));
        }

        #[test]
        fn no_wire_duration_panics(seconds: i64, nanos: i32) {
            let _ = check(seconds, nanos);
        }
    }
}
