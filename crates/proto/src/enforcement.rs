//! What the kernel enforces.

use cofferdam_spec::{Enforcement, Engine, Level, NetworkMode};
use thiserror::Error;

use crate::v1;

/// Why a wire report is none that this version understands.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum EnforcementError {
    /// A word of a later version.
    #[error("enforcement.{field} {value:?} is not known")]
    Unknown {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
    },
    /// A digest that is not 32 bytes long.
    #[error("enforcement.{field} is {length} bytes long, a SHA-256 has 32")]
    Digest {
        /// The field.
        field: &'static str,
        /// Its length.
        length: usize,
    },
}

impl From<&Enforcement> for v1::Enforcement {
    fn from(enforcement: &Enforcement) -> Self {
        Self {
            engine: enforcement.engine.as_str().to_owned(),
            level: enforcement.level.as_str().to_owned(),
            landlock_abi: enforcement.landlock_abi,
            rights_not_handled: enforcement.rights_not_handled.clone(),
            network: enforcement.network.as_str().to_owned(),
            policy_digest: enforcement.policy_digest.to_vec().into(),
            seccomp_digest: enforcement.seccomp_digest.to_vec().into(),
            not_enforced: enforcement.not_enforced.clone(),
        }
    }
}

impl TryFrom<v1::Enforcement> for Enforcement {
    type Error = EnforcementError;

    fn try_from(wire: v1::Enforcement) -> Result<Self, EnforcementError> {
        Ok(Self {
            engine: word("engine", &wire.engine, Engine::Native, Engine::as_str)?,
            level: word("level", &wire.level, Level::Namespaces, Level::as_str)?,
            landlock_abi: wire.landlock_abi,
            rights_not_handled: wire.rights_not_handled,
            network: word("network", &wire.network, NetworkMode::None, NetworkMode::as_str)?,
            policy_digest: digest("policy_digest", &wire.policy_digest)?,
            seccomp_digest: digest("seccomp_digest", &wire.seccomp_digest)?,
            not_enforced: wire.not_enforced,
        })
    }
}

fn word<T: Copy>(
    field: &'static str,
    value: &str,
    known: T,
    text: fn(T) -> &'static str,
) -> Result<T, EnforcementError> {
    if value == text(known) {
        return Ok(known);
    }
    Err(EnforcementError::Unknown { field, value: value.to_owned() })
}

fn digest(field: &'static str, bytes: &[u8]) -> Result<[u8; 32], EnforcementError> {
    bytes.try_into().map_err(|_| EnforcementError::Digest { field, length: bytes.len() })
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_report_survives_the_wire(
            landlock_abi in any::<u32>(),
            (policy_digest, seccomp_digest) in any::<([u8; 32], [u8; 32])>(),
            (rights_not_handled, not_enforced) in
                (vec(any::<String>(), 0..3), vec(any::<String>(), 0..3)),
        ) {
            let enforcement = Enforcement {
                engine: Engine::Native,
                level: Level::Namespaces,
                landlock_abi,
                rights_not_handled,
                network: NetworkMode::None,
                policy_digest,
                seccomp_digest,
                not_enforced,
            };
            let wire = v1::Enforcement::from(&enforcement);
            prop_assert_eq!(Enforcement::try_from(wire), Ok(enforcement));
        }
    }

    #[test]
    fn a_word_of_a_later_version_is_named() {
        let wire = v1::Enforcement { engine: "wasm".to_owned(), ..v1::Enforcement::default() };
        let error = EnforcementError::Unknown { field: "engine", value: "wasm".to_owned() };
        assert_eq!(Enforcement::try_from(wire), Err(error));
    }
}
