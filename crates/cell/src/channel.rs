//! One end of a packet socket between daemon and cell: whole messages with descriptors.

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Largest packet, and so the largest body that travels in it: enough for the usual command and
/// small enough for a buffer on the stack; far below the default socket buffer
/// (`net.core.wmem_default`, 208 KiB), so that a send cannot fail for its size.
pub const INLINE_BYTES_MAX: usize = 4 * 1024;

/// Largest body at all: a command's arguments (2 MiB) with room for its framing.
pub const BODY_BYTES_MAX: usize = 4 * 1024 * 1024;

/// Most descriptors beside one message: three streams, and the memory file.
const DESCRIPTORS_MAX: usize = 8;

/// First byte of a packet: where its body is.
const INLINE: u8 = 0;
const IN_MEMORY_FILE: u8 = 1;

/// A message that arrived, with its descriptors (all close-on-exec).
#[derive(Debug)]
pub struct Received<T> {
    /// The message.
    pub message: T,
    /// Its descriptors, in the sender's order.
    pub descriptors: Vec<OwnedFd>,
}

/// One end: sends `S`, receives `R`.
#[derive(Debug)]
pub struct Channel<S, R> {
    socket: OwnedFd,
    types: PhantomData<fn(S) -> R>,
}

impl<S, R> AsFd for Channel<S, R> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl<S: Serialize, R: DeserializeOwned> Channel<S, R> {
    /// Takes one end of a `SOCK_SEQPACKET` pair.
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket, types: PhantomData }
    }

    /// Sends one message. On a non-blocking socket, `WouldBlock` means that nothing was sent.
    pub fn send(&self, message: &S, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut packet = vec![INLINE];
        packet = postcard::to_extend(message, packet).map_err(io::Error::other)?;
        if packet.len() <= INLINE_BYTES_MAX {
            return send_packet(self.socket.as_fd(), &packet, descriptors);
        }
        let file = memory_file(&packet[1..])?;
        let mut all = vec![file.as_fd()];
        all.extend_from_slice(descriptors);
        send_packet(self.socket.as_fd(), &[IN_MEMORY_FILE], &all)
    }

    /// Receives one message; `None` at the end of the channel.
    pub fn receive(&self) -> io::Result<Option<Received<R>>> {
        self.receive_with(RecvFlags::empty())
    }

    /// As [`receive`](Self::receive), but `WouldBlock` when no message is there.
    pub fn receive_now(&self) -> io::Result<Option<Received<R>>> {
        self.receive_with(RecvFlags::DONTWAIT)
    }

    fn receive_with(&self, flags: RecvFlags) -> io::Result<Option<Received<R>>> {
        let mut packet = [0_u8; INLINE_BYTES_MAX];
        let Some((length, mut descriptors)) =
            receive_packet(self.socket.as_fd(), &mut packet, flags)?
        else {
            return Ok(None);
        };
        let message = match packet[0] {
            INLINE => decode(&packet[1..length])?,
            IN_MEMORY_FILE if !descriptors.is_empty() => {
                decode(&read_memory_file(&descriptors.remove(0))?)?
            }
            _ => return Err(bad("a packet of unknown form")),
        };
        Ok(Some(Received { message, descriptors }))
    }
}

fn bad(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn decode<T: DeserializeOwned>(body: &[u8]) -> io::Result<T> {
    postcard::from_bytes(body).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

fn send_packet(
    socket: BorrowedFd<'_>,
    packet: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors"));
    }
    let slices = [io::IoSlice::new(packet)];
    rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(socket, &slices, &mut control, SendFlags::NOSIGNAL)
    })?;
    Ok(())
}

fn receive_packet(
    socket: BorrowedFd<'_>,
    packet: &mut [u8],
    flags: RecvFlags,
) -> io::Result<Option<(usize, Vec<OwnedFd>)>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::io::retry_on_intr(|| {
        let mut slices = [io::IoSliceMut::new(packet)];
        rustix::net::recvmsg(socket, &mut slices, &mut control, flags | RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(bad("a packet that is too long"));
    }
    Ok(Some((received.bytes, descriptors)))
}

fn memory_file(body: &[u8]) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::NOEXEC_SEAL;
    let file = rustix::fs::memfd_create("cofferdam-message", flags)?;
    let mut written = 0;
    while written < body.len() {
        written += rustix::io::pwrite(&file, &body[written..], written as u64)?;
    }
    let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file)
}

fn read_memory_file(file: &OwnedFd) -> io::Result<Vec<u8>> {
    // Without the seals the other side could change the body while it is read.
    let seals = rustix::fs::fcntl_get_seals(file)?;
    if !seals.contains(SealFlags::WRITE | SealFlags::SHRINK) {
        return Err(bad("a message in a file without seals"));
    }
    let size = rustix::fs::fstat(file)?.st_size as usize;
    if size > BODY_BYTES_MAX {
        return Err(bad("a message that is too long"));
    }
    let mut body = vec![0; size];
    let mut read = 0;
    while read < size {
        match rustix::io::pread(file, &mut body[read..], read as u64)? {
            0 => return Err(bad("a message that ends early")),
            count => read += count,
        }
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn pair() -> (Channel<String, String>, Channel<String, String>) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (a, b) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        (Channel::new(a), Channel::new(b))
    }

    #[test]
    fn messages_of_every_size_arrive_whole() {
        let (a, b) = pair();
        for size in [0, 1, INLINE_BYTES_MAX - 4, INLINE_BYTES_MAX, 3 * 1024 * 1024] {
            let text = "x".repeat(size);
            a.send(&text, &[]).unwrap();
            assert_eq!(b.receive().unwrap().unwrap().message, text);
        }
    }

    #[test]
    fn descriptors_arrive_in_order_beside_small_and_large_bodies() {
        let (a, b) = pair();
        for size in [1, 100_000] {
            let (read, write) = std::io::pipe().unwrap();
            a.send(&"x".repeat(size), &[read.as_fd(), write.as_fd()]).unwrap();
            drop((read, write));
            let mut descriptors = b.receive().unwrap().unwrap().descriptors;
            assert_eq!(descriptors.len(), 2);
            rustix::io::write(&descriptors[1], b"hi").unwrap();
            descriptors.truncate(1);
            let mut text = String::new();
            std::fs::File::from(descriptors.remove(0)).read_to_string(&mut text).unwrap();
            assert_eq!(text, "hi");
        }
    }

    #[test]
    fn the_end_is_told_apart_from_a_message_and_from_nothing() {
        let (a, b) = pair();
        assert_eq!(b.receive().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(a);
        assert!(b.receive().unwrap().is_none());
    }

    #[test]
    fn an_unsealed_memory_file_is_refused() {
        let (a, b) = pair();
        let file = rustix::fs::memfd_create("x", MemfdFlags::ALLOW_SEALING).unwrap();
        send_packet(a.as_fd(), &[IN_MEMORY_FILE], &[file.as_fd()]).unwrap();
        assert_eq!(b.receive().unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn bytes_that_are_no_message_are_refused() {
        let (a, b) = pair();
        for packet in [&[7_u8, 1, 2][..], &[INLINE, 200], &[IN_MEMORY_FILE]] {
            send_packet(a.as_fd(), packet, &[]).unwrap();
            assert_eq!(b.receive().unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }
}
