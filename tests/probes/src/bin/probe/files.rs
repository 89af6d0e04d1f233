//! Attempts on files, mounts and descriptors.

use std::ffi::CString;
use std::process::ExitCode;
use std::{fs, ptr};

use super::{Outcome, check, done, errno};

fn text(path: &str) -> CString {
    CString::new(path).expect("an argument holds no NUL")
}

pub(crate) fn open(path: &str, flags: i32) -> Outcome {
    let path = text(path);
    // SAFETY: the path is a live C string; the descriptor ends with the process.
    let result =
        unsafe { libc::open(path.as_ptr(), flags | libc::O_NONBLOCK | libc::O_NOCTTY, 0o644) };
    check(result.into())?;
    done()
}

pub(crate) fn rename(from: &str, to: &str) -> Outcome {
    fs::rename(from, to).map_err(|error| errno(&error))?;
    done()
}

pub(crate) fn link(from: &str, to: &str) -> Outcome {
    fs::hard_link(from, to).map_err(|error| errno(&error))?;
    done()
}

/// Makes a device node for `/dev/null`'s device.
pub(crate) fn mknod(path: &str) -> Outcome {
    let path = text(path);
    // SAFETY: the path is a live C string.
    let result = unsafe { libc::mknod(path.as_ptr(), libc::S_IFCHR | 0o666, libc::makedev(1, 3)) };
    check(result.into())?;
    done()
}

/// Tries to make the mount at `path` writable.
pub(crate) fn remount(path: &str) -> Outcome {
    let path = text(path);
    let flags = libc::MS_REMOUNT | libc::MS_BIND;
    // SAFETY: the target is a live C string; a remount reads no other pointer.
    let result =
        unsafe { libc::mount(ptr::null(), path.as_ptr(), ptr::null(), flags, ptr::null()) };
    check(result.into())?;
    done()
}

pub(crate) fn unmount(path: &str) -> Outcome {
    let path = text(path);
    // SAFETY: the path is a live C string.
    check(unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) }.into())?;
    done()
}

/// Prints every open descriptor and what it is, less the one that lists them.
pub(crate) fn descriptors() -> ExitCode {
    let mut lines = Vec::new();
    for entry in fs::read_dir("/proc/self/fd").expect("/proc is mounted") {
        let path = entry.expect("a directory of /proc can be read").path();
        let target = fs::read_link(&path).unwrap_or_default();
        let own = target.to_string_lossy().ends_with("/fd");
        if !own {
            let number = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            lines.push(format!("{number} {}", target.display()));
        }
    }
    lines.sort();
    println!("{}", lines.join("\n"));
    ExitCode::SUCCESS
}
