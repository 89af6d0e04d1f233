//! Attributes of mounts.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::check;

/// What to set on a mount. Nothing is ever cleared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MountAttributes {
    /// Writes fail with EROFS.
    pub read_only: bool,
    /// Set-user-id bits and file capabilities have no effect.
    pub no_suid: bool,
    /// Device nodes cannot be opened.
    pub no_dev: bool,
    /// Files cannot be executed.
    pub no_exec: bool,
}

/// `mount_setattr(2)` on `path` below `directory` (empty: on the directory's own mount), with the
/// mounts below it when `recursive`, mapping ids through the user namespace `id_map` when given.
pub fn set_mount_attributes(
    directory: BorrowedFd<'_>,
    path: &CStr,
    recursive: bool,
    attributes: MountAttributes,
    id_map: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut set = 0;
    for (wanted, flag) in [
        (attributes.read_only, libc::MOUNT_ATTR_RDONLY),
        (attributes.no_suid, libc::MOUNT_ATTR_NOSUID),
        (attributes.no_dev, libc::MOUNT_ATTR_NODEV),
        (attributes.no_exec, libc::MOUNT_ATTR_NOEXEC),
        (id_map.is_some(), libc::MOUNT_ATTR_IDMAP),
    ] {
        if wanted {
            set |= flag;
        }
    }
    let attr = libc::mount_attr {
        attr_set: set,
        attr_clr: 0,
        propagation: 0,
        userns_fd: id_map.map_or(0, |descriptor| descriptor.as_raw_fd() as u64),
    };
    let mut flags = libc::AT_EMPTY_PATH;
    if recursive {
        flags |= libc::AT_RECURSIVE;
    }
    // SAFETY: the kernel reads one string and one struct of the given size, both borrowed for the
    // time of the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            directory.as_raw_fd(),
            path.as_ptr(),
            flags,
            &raw const attr,
            size_of_val(&attr),
        )
    })?;
    Ok(())
}
