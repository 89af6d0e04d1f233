//! Where a daemon listens.

use std::fmt;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Longest path of a unix socket: Linux's `sun_path` has 108 bytes, one of them is the NUL.
pub const SUN_PATH_BYTES_MAX: usize = 107;

/// The unix socket of a daemon, written `unix:/PATH`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnixAddress {
    path: PathBuf,
}

/// Why an address was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum AddressError {
    /// Not a unix socket.
    #[error("address {text:?}: this version listens on unix sockets only, written unix:/PATH")]
    NotUnix {
        /// The address.
        text: String,
    },
    /// Not an absolute path.
    #[error("address {text:?}: the socket's path must be absolute")]
    NotAbsolute {
        /// The address.
        text: String,
    },
    /// Longer than the kernel takes.
    #[error(
        "socket path {path:?} is {length} bytes long, the kernel takes at most {SUN_PATH_BYTES_MAX}"
    )]
    TooLong {
        /// The path.
        path: PathBuf,
        /// Its length.
        length: usize,
    },
}

impl UnixAddress {
    /// Takes an absolute path.
    pub fn new(path: &Path) -> Result<Self, AddressError> {
        if !path.is_absolute() {
            return Err(AddressError::NotAbsolute { text: path.display().to_string() });
        }
        let length = path.as_os_str().as_bytes().len();
        if length > SUN_PATH_BYTES_MAX {
            return Err(AddressError::TooLong { path: path.to_owned(), length });
        }
        Ok(Self { path: path.to_owned() })
    }

    /// Reads `unix:/PATH` or `unix:///PATH`.
    pub fn parse(text: &str) -> Result<Self, AddressError> {
        let path = text
            .strip_prefix("unix:")
            .ok_or_else(|| AddressError::NotUnix { text: text.to_owned() })?;
        // After `//` comes an authority, which a socket does not have.
        let path = path.strip_prefix("//").unwrap_or(path);
        if !path.starts_with('/') {
            return Err(AddressError::NotAbsolute { text: text.to_owned() });
        }
        Self::new(Path::new(path))
    }

    /// Path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl fmt::Display for UnixAddress {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "unix:{}", self.path.display())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_a_unix_address_are_read() {
        for text in ["unix:/run/a b", "unix:///run/a b"] {
            let address = UnixAddress::parse(text).unwrap();
            assert_eq!(address.path(), Path::new("/run/a b"));
            assert_eq!(address.to_string(), "unix:/run/a b");
        }
    }

    #[test]
    fn every_other_address_is_refused_with_its_reason() {
        let long = format!("unix:/{}", "x".repeat(SUN_PATH_BYTES_MAX));
        let path = PathBuf::from(&long[5..]);
        let owned = |text: &str| text.to_owned();
        let table = [
            ("127.0.0.1:80", AddressError::NotUnix { text: owned("127.0.0.1:80") }),
            ("unix:run/x", AddressError::NotAbsolute { text: owned("unix:run/x") }),
            ("unix://run/x", AddressError::NotAbsolute { text: owned("unix://run/x") }),
            (&long, AddressError::TooLong { path, length: SUN_PATH_BYTES_MAX + 1 }),
        ];
        for (text, error) in table {
            assert_eq!(UnixAddress::parse(text), Err(error));
        }
        assert!(UnixAddress::parse(&long[..long.len() - 1]).is_ok());
    }
}
