//! Stamps: what a session has seen of which file.

use std::time::SystemTime;

use cofferdam_spec::{LineRange, Stamp};

/// Whether a stamp still tells the content of its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StampState {
    /// The file holds what the session saw.
    Fresh,
    /// The file holds something else.
    Stale,
    /// There is no file of that path.
    Gone,
}

impl StampState {
    /// In one word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fresh => "fresh",
            Self::Stale => "stale",
            Self::Gone => "gone",
        }
    }
}

/// A stamp that a session holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StampRecord {
    /// Who holds it.
    pub session: String,
    /// Canonical path in the cell.
    pub path: String,
    /// What was seen.
    pub stamp: Stamp,
    /// The call that set it.
    pub call: String,
    /// When it was set.
    pub time: SystemTime,
    /// Whether it is fresh, as last verified.
    pub state: StampState,
    /// Lines that were shown; empty when every line was.
    pub shown: Vec<LineRange>,
    /// Whether every line was shown, so that the file may be overwritten.
    pub complete: bool,
}

/// What happened to a stamp.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StampChange {
    /// A read showed the content.
    Read,
    /// A write or an edit made the content.
    Written,
    /// The file was moved here.
    Moved,
    /// The session removed the file, or moved it away.
    Removed,
    /// The stamp was dropped.
    Cleared,
    /// A write was refused because the content had changed.
    RefusedStale,
}

impl StampChange {
    /// In one or two words.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Written => "written",
            Self::Moved => "moved",
            Self::Removed => "removed",
            Self::Cleared => "cleared",
            Self::RefusedStale => "refused stale",
        }
    }
}

/// One entry of a path's history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StampEvent {
    /// Who.
    pub session: String,
    /// What happened.
    pub change: StampChange,
    /// The stamp afterwards; `None` when there is none.
    pub stamp: Option<Stamp>,
    /// The call.
    pub call: String,
    /// When.
    pub time: SystemTime,
}
