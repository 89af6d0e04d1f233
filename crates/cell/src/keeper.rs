//! The keeper of a session: holds the session's signal domain and forks its shims.
//!
//! A Landlock domain can only be inherited. So each session has one process that has entered the
//! session's layer, and every shim of the session is its copy: calls of one session can signal
//! each other, calls of two sessions cannot. Shims are children of init (CLONE_PARENT), so that
//! the keeper's end, which its session's programs can bring about, costs nothing but the domain.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU32;

use cofferdam_sys::{Kinship, SHARED_CELLS, fork, restrict_with_ruleset};

use crate::channel::Channel;
use crate::notes::Notes;
use crate::shim;
use crate::supervision::{ForkShim, Report, What};

/// What a keeper is forked with, in this order.
pub(crate) struct Inheritance {
    /// From init.
    pub(crate) requests: OwnedFd,
    /// To init.
    pub(crate) reports: OwnedFd,
    /// The layer of the session.
    pub(crate) session_ruleset: OwnedFd,
    /// The layer of each call.
    pub(crate) command_ruleset: OwnedFd,
    /// The layer of each call that may not change the workspace.
    pub(crate) read_only_ruleset: OwnedFd,
    /// The memory of the shims' notes.
    pub(crate) cells: &'static [AtomicU32; SHARED_CELLS],
}

/// Runs until init closes the channel.
pub(crate) fn run(inheritance: Inheritance) -> u8 {
    let Inheritance {
        requests,
        reports,
        session_ruleset,
        command_ruleset,
        read_only_ruleset,
        cells,
    } = inheritance;
    let _named = rustix::thread::set_name(c"cofferdam-keep");
    if restrict_with_ruleset(session_ruleset.as_fd()).is_err() {
        return 1;
    }
    drop(session_ruleset);
    let requests = Channel::<(), ForkShim>::new(requests);
    let reports = Channel::<Report, ()>::new(reports);
    loop {
        let Ok(Some(mut received)) = requests.receive() else { return 0 };
        let ForkShim { shim, slot } = received.message;
        let Some(channel) = received.descriptors.pop() else { return 1 };
        let keep =
            [channel.as_fd(), reports.as_fd(), command_ruleset.as_fd(), read_only_ruleset.as_fd()];
        let forked = fork(Kinship::Sibling, &keep, |kept| {
            let Ok([channel, reports, command_ruleset, read_only_ruleset]) =
                <[OwnedFd; 4]>::try_from(kept)
            else {
                return 1;
            };
            let notes = Notes::of(cells, slot);
            shim::run(shim, channel, reports, [&command_ruleset, &read_only_ruleset], notes)
        });
        let what = match forked {
            Ok(pid) => What::Forked { pid: pid.as_raw_nonzero().get() },
            Err(error) => What::ForkFailed { errno: error.raw_os_error().unwrap_or(libc::EIO) },
        };
        if reports.send(&Report { shim, what }, &[]).is_err() {
            return 0;
        }
    }
}
