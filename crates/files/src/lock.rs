//! One change of a file at a time: locks by canonical path.
//!
//! They keep apart the calls of this process, whose threads serve them. What other processes do
//! meanwhile is noticed when files are exchanged, see `replace.rs`.

use std::collections::HashSet;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::call::Fault;
use crate::serve::Reply;
use crate::stamp::still_wanted;

/// How often a call that waits for a lock asks whether somebody still waits for it.
const ASK_EVERY: Duration = Duration::from_millis(20);

/// The paths that are locked. A path is in the table only while somebody holds it.
#[derive(Debug, Default)]
pub(crate) struct Locks {
    held: Mutex<HashSet<Vec<u8>>>,
    freed: Condvar,
}

impl Locks {
    /// Waits until nobody holds `path`, and holds it. Fails at step `cancelled` when nobody waits
    /// for the call any more.
    pub(crate) fn hold(&self, path: &[u8], reply: &dyn Reply) -> Result<Held<'_>, Fault> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        while held.contains(path) {
            let waited = self.freed.wait_timeout(held, ASK_EVERY);
            held = waited.unwrap_or_else(PoisonError::into_inner).0;
            still_wanted(reply)?;
        }
        held.insert(path.to_vec());
        Ok(Held { locks: self, path: path.to_vec() })
    }

    /// Holds two paths, which may be the same. Everybody takes the lesser one first, so that two
    /// calls never wait for each other.
    pub(crate) fn hold_both(
        &self,
        one: &[u8],
        other: &[u8],
        reply: &dyn Reply,
    ) -> Result<Vec<Held<'_>>, Fault> {
        let first = self.hold(one.min(other), reply)?;
        if one == other {
            return Ok(vec![first]);
        }
        Ok(vec![first, self.hold(one.max(other), reply)?])
    }
}

/// A lock that is held until this is dropped.
#[derive(Debug)]
pub(crate) struct Held<'a> {
    locks: &'a Locks,
    path: Vec<u8>,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut held = self.locks.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.remove(&self.path);
        self.locks.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::testing::{Nobody, Waiting};

    #[test]
    fn one_at_a_time_holds_a_path_and_none_stays_in_the_table() {
        let (locks, inside, turns) = (Locks::default(), AtomicU32::new(0), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for turn in 0..200_u32 {
                        let (one, other): (&[u8], &[u8]) =
                            if turn % 2 == 0 { (b"/a", b"/b") } else { (b"/b", b"/a") };
                        let held = locks.hold_both(one, other, &Waiting).unwrap();
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        turns.fetch_add(1, Ordering::SeqCst);
                        inside.fetch_sub(1, Ordering::SeqCst);
                        drop(held);
                    }
                });
            }
        });
        assert_eq!(turns.into_inner(), 1600);
        assert!(locks.held.lock().unwrap().is_empty());
    }

    #[test]
    fn who_is_gone_does_not_wait() {
        let locks = Locks::default();
        let held = locks.hold(b"/a", &Nobody).unwrap();
        assert_eq!(locks.hold(b"/a", &Nobody).unwrap_err().step, "cancelled");
        assert_eq!(locks.hold_both(b"/b", b"/b", &Nobody).unwrap().len(), 1);
        drop(held);
        locks.hold(b"/a", &Nobody).unwrap();
    }
}
