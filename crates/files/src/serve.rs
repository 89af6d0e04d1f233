//! Who answers which call.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use crate::call::{Answer, Fault, FaultKind, FileCall};
use crate::{entry, read, search, watch};

/// Nobody waits for answers any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gone;

/// Where the answers of one call go.
pub trait Reply: Sync {
    /// Sends an answer, with a descriptor for [`Answer::Opened`]. Waits while the other side does
    /// not read.
    fn send(&self, answer: Answer, descriptor: Option<OwnedFd>) -> Result<(), Gone>;

    /// Whether somebody still waits. What takes long asks every few milliseconds, and stops.
    fn is_wanted(&self) -> bool;
}

/// The file tools of one cell.
#[derive(Debug)]
pub struct Files {
    /// The home directory, where what must not be lost is kept: `.cofferdam/` below it.
    home: PathBuf,
}

impl Files {
    /// The tools, for programs whose home directory is `home`.
    pub fn new(home: PathBuf) -> Self {
        Self { home }
    }

    /// Finishes or undoes what an earlier life left half done. Called once, before the first call.
    pub fn recover(&self) {}

    /// Answers a call. `content` is the descriptor that came with a [`Content::Descriptor`].
    ///
    /// [`Content::Descriptor`]: crate::call::Content::Descriptor
    pub fn serve(&self, call: FileCall, content: Option<OwnedFd>, reply: &dyn Reply) {
        let _ = (content, &self.home);
        let mut opened = None;
        let answer = match call {
            FileCall::Stat { path, follow, with_stamp } => {
                entry::stat(&path, follow, with_stamp, reply)
            }
            FileCall::List { path, after, max } => entry::list(&path, after, max, reply),
            FileCall::Open { path } => read::open(&path, &mut opened),
            FileCall::ReadText(call) => read::read_text(&call, reply),
            FileCall::Glob(glob) => search::glob(&glob, reply),
            FileCall::Grep(grep) => search::grep(&grep, reply),
            FileCall::Watch { path, recursive } => watch::watch(&path, recursive, reply),
            _ => Err(Fault { kind: FaultKind::Other, step: "serve".to_owned(), errno: 0 }),
        };
        // When nobody waits, nobody misses it.
        let _ = reply.send(answer.unwrap_or_else(Answer::Failed), opened);
    }
}
