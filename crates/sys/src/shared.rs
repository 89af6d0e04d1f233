//! Memory that forks share.

use std::io;
use std::sync::atomic::AtomicU32;

/// Bytes of the one page that is mapped.
const PAGE_BYTES: usize = 4096;

/// Cells of [`shared_cells`].
pub const SHARED_CELLS: usize = PAGE_BYTES / size_of::<AtomicU32>();

/// Maps zeroed cells that this process and all that it forks see alike. A program that is executed
/// does not have them. The mapping lasts as long as the process.
pub fn shared_cells() -> io::Result<&'static [AtomicU32; SHARED_CELLS]> {
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses overlaps nothing.
    let page = unsafe { libc::mmap(std::ptr::null_mut(), PAGE_BYTES, access, flags, -1, 0) };
    if page == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the page is zeroed, aligned, as large as the array, never unmapped, and only ever
    // used as atomics.
    Ok(unsafe { &*page.cast() })
}
