//! Opening a file for reading.

use std::os::fd::OwnedFd;

use rustix::fs::OFlags;

use crate::call::{Answer, Fault};
use crate::entry::entry;
use crate::fault::at;
use crate::resolve::{Last, resolve};

/// Answers [`FileCall::Open`](crate::FileCall::Open), and leaves the descriptor in `opened`.
pub(crate) fn open(path: &str, opened: &mut Option<OwnedFd>) -> Result<Answer, Fault> {
    let place = resolve(path, Last::Follow)?;
    let (file, stat) = place.open_regular()?;
    // It was opened so that nothing waits; whoever gets it should find it as any other.
    rustix::fs::fcntl_setfl(&file, OFlags::empty()).map_err(at("open"))?;
    *opened = Some(file);
    Ok(Answer::Opened(entry(place.canonical, &stat, None)))
}
