//! What a file held when somebody looked.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Content of a file at one time: SHA-256 of its raw bytes, and their number. Times, owners and
/// names are no part of it: what holds the same bytes has the same stamp.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Stamp {
    /// SHA-256 of the bytes.
    pub digest: [u8; 32],
    /// Their number.
    pub size: u64,
}

impl fmt::Display for Stamp {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.digest {
            write!(formatter, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Stamp {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Stamp({self}, {} bytes)", self.size)
    }
}

/// Lines of a text, counted from 1, both ends included; never empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LineRange {
    /// First line.
    pub first: u64,
    /// Last line; not below `first`.
    pub last: u64,
}
