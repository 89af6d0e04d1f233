//! Who answers which call.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use crate::call::{Answer, FileCall};
use crate::lock::Locks;
use crate::steps::Steps;
use crate::store::Store;
use crate::syncs::Syncs;
use crate::{change, edit, entry, read, recover, search, watch, write};

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
    /// `.cofferdam/` below the home directory, where what must not be lost is kept.
    pub(crate) store: Store,
    /// Directories that wait to be written through.
    pub(crate) syncs: Syncs,
    /// The files that are being changed.
    pub(crate) locks: Locks,
    /// Where tests step in.
    pub(crate) steps: Steps,
}

impl Files {
    /// The tools, for programs whose home directory is `home`.
    pub fn new(home: PathBuf) -> Self {
        Self {
            store: Store::new(home),
            syncs: Syncs::start(),
            locks: Locks::default(),
            steps: Steps::default(),
        }
    }

    /// Finishes or undoes what an earlier life left half done. Called once, before the first call.
    pub fn recover(&self) {
        recover::recover(&self.store);
    }

    /// Answers a call. `content` is the descriptor that came with a [`Content::Descriptor`].
    ///
    /// [`Content::Descriptor`]: crate::call::Content::Descriptor
    pub fn serve(&self, call: FileCall, content: Option<OwnedFd>, reply: &dyn Reply) {
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
            FileCall::Write(call) => write::write(self, call, content, reply),
            FileCall::Edit(call) => edit::edit(self, &call, reply),
            FileCall::MakeDir { path, mode, parents } => {
                change::make_dir(self, &path, mode, parents)
            }
            FileCall::Move { from, to, guard } => {
                change::move_entry(self, &from, &to, &guard, reply)
            }
            FileCall::Remove { path, recursive, guard } => {
                change::remove(self, &path, recursive, &guard, reply)
            }
        };
        // When nobody waits, nobody misses it.
        let _ = reply.send(answer.unwrap_or_else(Answer::Failed), opened);
    }
}
