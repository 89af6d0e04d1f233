//! The toolbox: the cell's first process, one pid namespace above the commands and out of their
//! sight, behind the same mounts and rules.

use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::channel::Channel;
use crate::protocol::{ToolboxReply, ToolboxRequest};

/// Serves until the daemon or init is gone.
pub(crate) fn run(channel: &Channel<ToolboxReply, ToolboxRequest>, init: Pid) -> u8 {
    let Ok(init) = pidfd_open(init, PidfdFlags::empty()) else { return 1 };
    loop {
        let (asked, ended) = {
            let mut ready = [
                PollFd::from_borrowed_fd(channel.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(init.as_fd(), PollFlags::IN),
            ];
            if rustix::io::retry_on_intr(|| poll(&mut ready, None)).is_err() {
                return 1;
            }
            (!ready[0].revents().is_empty(), !ready[1].revents().is_empty())
        };
        if ended {
            return 0;
        }
        if asked {
            let Ok(Some(received)) = channel.receive() else { return 0 };
            if channel.send(&answer(received.message), &[]).is_err() {
                return 0;
            }
        }
    }
}

fn answer(request: ToolboxRequest) -> ToolboxReply {
    match request {
        ToolboxRequest::Ping { token } => {
            let free = rustix::fs::statvfs("/workspace").map(|stat| stat.f_bavail * stat.f_frsize);
            ToolboxReply::Pong { token, workspace_free_bytes: free.unwrap_or(0) }
        }
    }
}
