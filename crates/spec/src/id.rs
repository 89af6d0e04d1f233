//! Identifiers that callers choose.

use thiserror::Error;

/// Longest identifier, in bytes: room for `session/call/attempt` with long parts.
const ID_BYTES_MAX: usize = 128;

/// Why an identifier was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum IdError {
    /// Nothing was given where something is needed.
    #[error("is empty")]
    Empty,
    /// It is longer than allowed.
    #[error("is {length} bytes long, the limit is {ID_BYTES_MAX}")]
    TooLong {
        /// Its length in bytes.
        length: usize,
    },
    /// It holds a byte that is not printable ASCII.
    #[error("holds the byte {byte:#04x} at {index}, only printable ASCII is allowed")]
    Unprintable {
        /// The first such byte.
        byte: u8,
        /// Its position.
        index: usize,
    },
}

fn check(text: &str) -> Result<(), IdError> {
    if text.len() > ID_BYTES_MAX {
        return Err(IdError::TooLong { length: text.len() });
    }
    match text.bytes().enumerate().find(|(_, byte)| !(0x20..0x7f).contains(byte)) {
        Some((index, byte)) => Err(IdError::Unprintable { byte, index }),
        None => Ok(()),
    }
}

/// Names one mutating call in its workspace: 1 to 128 printable ASCII bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RequestId(String);

impl RequestId {
    /// Checks and takes `text`.
    pub fn new(text: &str) -> Result<Self, IdError> {
        if text.is_empty() {
            return Err(IdError::Empty);
        }
        check(text)?;
        Ok(Self(text.to_owned()))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Whose call it is: 0 to 128 printable ASCII bytes. Sessions share the workspace's files and
/// cannot signal each other's processes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct SessionId(String);

impl SessionId {
    /// Checks and takes `text`.
    pub fn new(text: &str) -> Result<Self, IdError> {
        check(text)?;
        Ok(Self(text.to_owned()))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A name for people: 0 to 128 printable ASCII bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tag(String);

impl Tag {
    /// Checks and takes `text`.
    pub fn new(text: &str) -> Result<Self, IdError> {
        check(text)?;
        Ok(Self(text.to_owned()))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_ids_hold_1_to_128_printable_bytes() {
        assert_eq!(RequestId::new(""), Err(IdError::Empty));
        assert_eq!(RequestId::new(&"a".repeat(129)), Err(IdError::TooLong { length: 129 }));
        assert_eq!(RequestId::new("a\nb"), Err(IdError::Unprintable { byte: b'\n', index: 1 }));
        assert_eq!(RequestId::new("é"), Err(IdError::Unprintable { byte: 0xc3, index: 0 }));
        assert_eq!(RequestId::new(&"a".repeat(128)).unwrap().as_str().len(), 128);
    }

    #[test]
    fn a_session_may_be_unnamed() {
        assert_eq!(SessionId::new("").unwrap(), SessionId::default());
    }
}
