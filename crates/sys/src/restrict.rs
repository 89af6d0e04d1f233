//! Steps that cannot be taken back: capabilities, seccomp, Landlock.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::check;

/// One instruction of a classic BPF program, as the kernel reads it (`struct sock_filter`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Instruction {
    /// Operation.
    pub code: u16,
    /// Instructions to skip when a comparison holds.
    pub jump_true: u8,
    /// Instructions to skip when it does not.
    pub jump_false: u8,
    /// Operand.
    pub operand: u32,
}

/// The highest capability number to try; the kernel names its last by EINVAL before that.
const CAPABILITY_NUMBERS_MAX: u32 = 64;

/// Takes every capability out of the bounding set.
pub fn drop_bounding_set() -> io::Result<()> {
    for capability in 0..CAPABILITY_NUMBERS_MAX {
        // SAFETY: changes an attribute of this thread; no memory is passed.
        let result = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
        if result != 0 {
            let error = io::Error::last_os_error();
            // EINVAL: one past the last capability of this kernel.
            return match error.raw_os_error() {
                Some(libc::EINVAL) if capability > 0 => Ok(()),
                _ => Err(error),
            };
        }
    }
    Ok(())
}

/// Empties the ambient, permitted, effective and inheritable sets.
pub fn drop_capabilities() -> io::Result<()> {
    // SAFETY: changes an attribute of this thread; no memory is passed.
    if unsafe { libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    /// `_LINUX_CAPABILITY_VERSION_3` of `linux/capability.h`: two words a set.
    const VERSION_3: u32 = 0x2008_0522;
    let header: [u32; 2] = [VERSION_3, 0];
    let sets = [0_u32; 6];
    // SAFETY: the kernel reads a header of two words and, for version 3, two structs of three
    // words each.
    check(unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) })?;
    Ok(())
}

/// Installs a seccomp filter on this thread and its later children. Needs no_new_privs.
pub fn install_filter(program: &[Instruction]) -> io::Result<()> {
    #[repr(C)]
    struct Program {
        length: u16,
        filter: *const Instruction,
    }
    let length =
        u16::try_from(program.len()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    let program = Program { length, filter: program.as_ptr() };
    // SAFETY: `Program` and `Instruction` have the layout of sock_fprog and sock_filter; the
    // kernel copies `length` instructions, which are borrowed for the time of the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER as libc::c_ulong,
            0 as libc::c_ulong,
            &raw const program,
        )
    })?;
    Ok(())
}

/// The Landlock ABI of the running kernel.
pub fn landlock_abi() -> io::Result<u32> {
    const LANDLOCK_CREATE_RULESET_VERSION: u32 = 1;
    // SAFETY: with this flag the kernel reads no memory.
    let version = check(unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<u8>(),
            0_usize,
            LANDLOCK_CREATE_RULESET_VERSION,
        )
    })?;
    Ok(version as u32)
}

/// Adds a layer with a prepared ruleset to this thread's Landlock domain. Needs no_new_privs.
pub fn restrict_with_ruleset(ruleset: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), 0) })?;
    Ok(())
}
