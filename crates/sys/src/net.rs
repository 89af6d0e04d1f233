//! Network interfaces.

use std::io;
use std::os::fd::AsRawFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::check;

/// Brings the loopback interface of this network namespace up.
pub fn bring_loopback_up() -> io::Result<()> {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru {
            ifru_flags: (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short,
        },
    };
    request.ifr_name[0] = b'l' as libc::c_char;
    request.ifr_name[1] = b'o' as libc::c_char;
    // SAFETY: SIOCSIFFLAGS reads one ifreq, which lives through the call.
    check(unsafe {
        libc::syscall(
            libc::SYS_ioctl,
            socket.as_raw_fd(),
            libc::SIOCSIFFLAGS as libc::c_ulong,
            &raw const request,
        )
    })?;
    Ok(())
}
