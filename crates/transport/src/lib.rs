//! What both ends of a connection do with its bytes.

#![forbid(unsafe_code)]

mod joined;

pub use joined::JoinedWrites;
