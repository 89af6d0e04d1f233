//! What probes and tests share: the names of errnos, and a stream of bytes that both sides can
//! compute from any offset.

mod errno;
mod pattern;

pub use errno::errno_name;
pub use pattern::Pattern;
