//! Attempts on sockets. Addresses are loopback addresses and unix sockets only.

use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixStream};
use std::process::ExitCode;
use std::time::Duration;

use super::{Outcome, check, done, errno, last_errno, show};

/// Qualcomm's IPC router, which the libc crate does not name.
const AF_QIPCRTR: i32 = 42;

fn loopback(text: &str) -> SocketAddr {
    let address: SocketAddr = text.parse().expect("an address with a port");
    assert!(address.ip().is_loopback(), "probes speak to loopback addresses only");
    address
}

/// Connects to a unix socket; a leading `@` names an abstract one.
pub(crate) fn connect_unix(address: &str) -> Outcome {
    let result = match address.strip_prefix('@') {
        Some(name) => UnixAddr::from_abstract_name(name).and_then(|a| UnixStream::connect_addr(&a)),
        None => UnixStream::connect(address),
    };
    result.map_err(|error| errno(&error))?;
    done()
}

pub(crate) fn connect_tcp(address: &str) -> Outcome {
    TcpStream::connect_timeout(&loopback(address), Duration::from_secs(5))
        .map_err(|error| errno(&error))?;
    done()
}

pub(crate) fn send_udp(address: &str, text: &str) -> Outcome {
    let address = loopback(address);
    let own: SocketAddr =
        if address.is_ipv4() { "127.0.0.1:0" } else { "[::1]:0" }.parse().expect("a constant");
    let socket = UdpSocket::bind(own).map_err(|error| errno(&error))?;
    socket.send_to(text.as_bytes(), address).map_err(|error| errno(&error))?;
    done()
}

/// TCP Fast Open: the payload travels in the first packet, past Landlock's connect right.
pub(crate) fn fast_open(address: &str) -> Outcome {
    let SocketAddr::V4(address) = loopback(address) else { panic!("an IPv4 address") };
    // SAFETY: no pointer is passed.
    let socket = check(unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0) }.into())? as i32;
    let target = libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: address.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
        sin_zero: [0; 8],
    };
    let payload = b"fast";
    // SAFETY: payload and address outlive the call and their lengths are theirs.
    let sent = unsafe {
        libc::sendto(
            socket,
            payload.as_ptr().cast(),
            payload.len(),
            libc::MSG_FASTOPEN | libc::MSG_NOSIGNAL,
            (&raw const target).cast(),
            size_of_val(&target) as u32,
        )
    };
    check(sent as i64)?;
    done()
}

/// Asks for a socket of every family, and prints `family type protocol result`.
pub(crate) fn families() -> ExitCode {
    for family in 1..46 {
        let kind = match family {
            libc::AF_PACKET | libc::AF_NETLINK | libc::AF_KEY => libc::SOCK_RAW,
            libc::AF_ALG | AF_QIPCRTR => libc::SOCK_SEQPACKET,
            libc::AF_UNIX | libc::AF_INET | libc::AF_INET6 | libc::AF_VSOCK => libc::SOCK_STREAM,
            _ => libc::SOCK_DGRAM,
        };
        socket(family, kind, 0);
    }
    socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_AUDIT);
    socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_NETFILTER);
    socket(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP);
    socket(libc::AF_INET, libc::SOCK_STREAM, 262);
    socket(libc::AF_INET, libc::SOCK_DGRAM, 0);
    socket(libc::AF_INET6, libc::SOCK_DGRAM, 0);
    ExitCode::SUCCESS
}

fn socket(family: i32, kind: i32, protocol: i32) {
    // SAFETY: no pointer is passed.
    let descriptor = unsafe { libc::socket(family, kind, protocol) };
    let outcome = if descriptor < 0 { Err(last_errno()) } else { done() };
    if descriptor >= 0 {
        // SAFETY: the descriptor is ours and is used no more.
        unsafe { libc::close(descriptor) };
    }
    println!("{family} {kind} {protocol} {}", show(outcome));
}
