//! Stamps and ranges of lines.

use cofferdam_spec::{LineRange, Stamp};
use thiserror::Error;

use crate::v1;

/// Why a wire stamp tells no content.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum StampError {
    /// Not SHA-256.
    #[error("algorithm {algorithm} is not known, 1 (SHA-256) is")]
    Algorithm {
        /// The value.
        algorithm: i32,
    },
    /// A digest of another length.
    #[error("digest is {length} bytes long, a SHA-256 has 32")]
    Digest {
        /// Its length in bytes.
        length: usize,
    },
}

impl From<&Stamp> for v1::Stamp {
    fn from(stamp: &Stamp) -> Self {
        Self {
            algorithm: v1::DigestAlgorithm::Sha256.into(),
            digest: stamp.digest.to_vec().into(),
            size: stamp.size,
        }
    }
}

impl TryFrom<&v1::Stamp> for Stamp {
    type Error = StampError;

    fn try_from(wire: &v1::Stamp) -> Result<Self, StampError> {
        let algorithm = wire.algorithm;
        if algorithm != v1::DigestAlgorithm::Sha256 as i32 {
            return Err(StampError::Algorithm { algorithm });
        }
        let length = wire.digest.len();
        let digest = wire.digest[..].try_into().map_err(|_| StampError::Digest { length })?;
        Ok(Self { digest, size: wire.size })
    }
}

impl From<LineRange> for v1::LineRange {
    fn from(range: LineRange) -> Self {
        Self { first: range.first, last: range.last }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_stamp_survives_the_wire(digest in any::<[u8; 32]>(), size in any::<u64>()) {
            let stamp = Stamp { digest, size };
            prop_assert_eq!(Stamp::try_from(&v1::Stamp::from(&stamp)), Ok(stamp));
        }
    }

    #[test]
    fn what_is_no_sha_256_is_refused() {
        let good = v1::Stamp::from(&Stamp { digest: [1; 32], size: 3 });
        let other = v1::Stamp { algorithm: 0, ..good.clone() };
        assert_eq!(Stamp::try_from(&other), Err(StampError::Algorithm { algorithm: 0 }));
        let short = v1::Stamp { digest: vec![1; 31].into(), ..good };
        assert_eq!(Stamp::try_from(&short), Err(StampError::Digest { length: 31 }));
    }
}
