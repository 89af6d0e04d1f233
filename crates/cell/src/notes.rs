//! What a shim notes down in memory that it shares with init, so that a shim which is killed in
//! the middle takes nothing with it: its program's process id, stored by the kernel before the
//! program runs, and its status, stored before the program is reaped.

use std::sync::atomic::{AtomicU32, Ordering};

use cofferdam_sys::SHARED_CELLS;

use crate::protocol::Status;

/// Where a shim's notes are.
pub(crate) type Slot = u16;

/// Slots, and so shims that can live at one time.
pub(crate) const SLOTS: usize = SHARED_CELLS / 2;

/// The notes of one shim.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Notes {
    pid: &'static AtomicU32,
    status: &'static AtomicU32,
}

const EXITED: u32 = 1 << 16;
const SIGNALED: u32 = 2 << 16;
const CORE: u32 = 1 << 8;

impl Notes {
    /// The notes in `slot`, which is below [`SLOTS`].
    pub(crate) fn of(cells: &'static [AtomicU32; SHARED_CELLS], slot: Slot) -> Self {
        let pair = usize::from(slot) % SLOTS * 2;
        Self { pid: &cells[pair], status: &cells[pair + 1] }
    }

    /// Init: a new call begins.
    pub(crate) fn clear(self) {
        self.pid.store(0, Ordering::Relaxed);
        self.status.store(0, Ordering::Relaxed);
    }

    /// Where the kernel stores the program's process id.
    pub(crate) fn pid_cell(self) -> &'static AtomicU32 {
        self.pid
    }

    /// The program's process id, once it exists.
    pub(crate) fn pid(self) -> Option<i32> {
        match self.pid.load(Ordering::Relaxed) {
            0 => None,
            pid => i32::try_from(pid).ok(),
        }
    }

    /// Shim: the program has ended and is about to be reaped.
    pub(crate) fn note_status(self, status: Status) {
        let word = match status {
            Status::Exited(code) => EXITED | (code as u32 & 0xff),
            Status::Signaled { signal, core } => {
                SIGNALED | (signal as u32 & 0x7f) | if core { CORE } else { 0 }
            }
            Status::Lost => 0,
        };
        self.status.store(word, Ordering::Release);
    }

    /// The program's status, once noted.
    pub(crate) fn status(self) -> Option<Status> {
        let word = self.status.load(Ordering::Acquire);
        if word & EXITED != 0 {
            Some(Status::Exited((word & 0xff) as i32))
        } else if word & SIGNALED != 0 {
            Some(Status::Signaled { signal: (word & 0x7f) as i32, core: word & CORE != 0 })
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_survives_and_shims_do_not_share_notes() {
        let cells = cofferdam_sys::shared_cells().unwrap();
        let (notes, other) = (Notes::of(cells, 7), Notes::of(cells, 8));
        let codes = (0..256).map(Status::Exited);
        let signals =
            (1..65).flat_map(|signal| [true, false].map(|core| Status::Signaled { signal, core }));
        for status in codes.chain(signals) {
            notes.note_status(status);
            assert_eq!(notes.status(), Some(status));
        }
        assert_eq!((notes.pid(), other.status()), (None, None));
        notes.clear();
        assert_eq!(notes.status(), None);
    }
}
