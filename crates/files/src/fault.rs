//! Faults from what the kernel says.

use rustix::io::Errno;

use crate::call::{Fault, FaultKind};

/// The fault of a step that the kernel refused.
pub(crate) fn kernel(step: &str, errno: Errno) -> Fault {
    let kind = match errno {
        Errno::NOENT => FaultKind::NotFound,
        Errno::NOTDIR => FaultKind::NotDirectory,
        Errno::ISDIR => FaultKind::IsDirectory,
        Errno::ACCESS | Errno::PERM => FaultKind::Denied,
        Errno::ROFS => FaultKind::ReadOnly,
        Errno::EXIST => FaultKind::Exists(None),
        Errno::NOTEMPTY => FaultKind::NotEmpty,
        Errno::LOOP => FaultKind::Loop,
        Errno::NAMETOOLONG => FaultKind::NameTooLong,
        // No call here waits for anything else that it would not wait for.
        Errno::AGAIN => FaultKind::Leased,
        Errno::XDEV => FaultKind::OtherFileSystem,
        Errno::NOSPC | Errno::DQUOT | Errno::FBIG => FaultKind::NoSpace,
        _ => FaultKind::Other,
    };
    Fault { kind, step: step.to_owned(), errno: errno.raw_os_error() }
}

/// A fault that is our own finding and not the kernel's.
pub(crate) fn found(kind: FaultKind, step: &str) -> Fault {
    Fault { kind, step: step.to_owned(), errno: 0 }
}

/// For `map_err`: what the kernel refused while doing `step`.
pub(crate) fn at(step: &'static str) -> impl Fn(Errno) -> Fault {
    move |errno| kernel(step, errno)
}

/// As [`at`], for what the standard library reports.
pub(crate) fn io_at(step: &'static str) -> impl Fn(std::io::Error) -> Fault {
    move |error| kernel(step, Errno::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EIO)))
}
