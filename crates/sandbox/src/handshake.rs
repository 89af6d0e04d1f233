//! What toolbox and init say to each other while the cell is made: results of steps, and the two
//! namespaces.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use crate::{SetupError, Step};

/// Longest message: a step, an errno and a path.
const MESSAGE_BYTES_MAX: usize = 8 * 1024;

pub(crate) fn send_result(
    socket: BorrowedFd<'_>,
    result: &Result<(), SetupError>,
) -> io::Result<()> {
    let message = postcard::to_stdvec(result).map_err(io::Error::other)?;
    rustix::net::send(socket, &message, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The other side's result. That it ended without one is a failure of the fork.
pub(crate) fn receive_result(socket: BorrowedFd<'_>) -> Result<(), SetupError> {
    let mut buffer = [0_u8; MESSAGE_BYTES_MAX];
    let died = SetupError { step: Step::ForkInit, errno: libc::ECHILD, object: None };
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recv(socket, &mut buffer[..], RecvFlags::empty())
    });
    match received {
        Ok((_, length)) if length > 0 => {
            postcard::from_bytes(&buffer[..length]).map_err(|_| died.clone())?
        }
        _ => Err(died),
    }
}

pub(crate) fn send_descriptors(
    socket: BorrowedFd<'_>,
    descriptors: &[BorrowedFd<'_>; 2],
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(descriptors));
    let byte = [io::IoSlice::new(&[1])];
    rustix::net::sendmsg(socket, &byte, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

pub(crate) fn receive_descriptors(socket: BorrowedFd<'_>) -> io::Result<[OwnedFd; 2]> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut slices = [io::IoSliceMut::new(&mut byte)];
    rustix::net::recvmsg(socket, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    // The toolbox failed before it could hand them over: its own report names the step.
    <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| io::Error::from_raw_os_error(libc::EPIPE))
}
