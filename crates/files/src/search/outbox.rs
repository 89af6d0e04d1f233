//! What threads found, sent in the order of the walk.
//!
//! The walk numbers its batches of files; whoever ends one hands it in. Those whose turn has come
//! are sent by one thread at a time, in order, and with them the account of what was met until
//! there, so that an answer that a limit ends is the same every time. A thread that has much to
//! hand in waits for its turn; the one whose turn it is never waits, so some thread always goes on.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::walk;
use crate::call::{Account, Answer, FileMatches, GrepMode};
use crate::serve::Reply;

/// Bytes of batches whose turn has not come, above which threads wait with more.
const WAITING_BYTES_MAX: usize = 16 * 1024 * 1024;

/// A piece of a batch.
#[derive(Debug)]
pub(super) enum Piece {
    /// What was met.
    Met(Account),
    /// Matches of a file.
    Matches {
        found: FileMatches,
        /// Whether no more of this file follows.
        is_last: bool,
    },
}

impl Piece {
    /// About how many bytes it takes.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Piece::Met(_) => size_of::<Piece>(),
            Piece::Matches { found, .. } => {
                let lines: usize = found.lines.iter().map(|line| line.text.len() + 48).sum();
                size_of::<Piece>() + found.path.len() + lines
            }
        }
    }
}

/// What all searches together found.
#[derive(Debug, Default)]
pub(super) struct Total {
    pub(super) matches: u64,
    pub(super) files: u64,
    pub(super) account: Account,
    /// Whether `max_bytes` ended the search.
    pub(super) out_of_bytes: bool,
    bytes: u64,
}

/// Sends what threads hand in.
pub(super) struct Outbox<'a> {
    reply: &'a dyn Reply,
    mode: GrepMode,
    bytes_max: Option<u64>,
    /// Set when the search is over, and read by all threads.
    over: &'a AtomicBool,
    queue: Mutex<Queue>,
    /// Told when a turn comes, or the search is over.
    turn: Condvar,
    /// Only taken by who sends.
    total: Mutex<Total>,
}

#[derive(Default)]
struct Queue {
    /// Whose turn it is.
    next: u64,
    waiting: BTreeMap<u64, Vec<Piece>>,
    /// Bytes of `waiting`.
    bytes: usize,
    is_sending: bool,
}

impl<'a> Outbox<'a> {
    pub(super) fn new(
        reply: &'a dyn Reply,
        mode: GrepMode,
        bytes_max: Option<u64>,
        over: &'a AtomicBool,
    ) -> Self {
        let (queue, turn, total) = (Mutex::default(), Condvar::new(), Mutex::default());
        Self { reply, mode, bytes_max, over, queue, turn, total }
    }

    /// Hands in the end of a batch.
    pub(super) fn hand_in(&self, number: u64, pieces: Vec<Piece>) {
        let bytes: usize = pieces.iter().map(Piece::bytes).sum();
        let mut queue = lock(&self.queue);
        while number != queue.next && queue.bytes > WAITING_BYTES_MAX && !self.is_over() {
            queue = wait(&self.turn, queue);
        }
        queue.bytes += bytes;
        queue.waiting.insert(number, pieces);
        if queue.is_sending {
            // Who sends looks again before it stops.
            return;
        }
        queue.is_sending = true;
        loop {
            let turn = queue.next;
            let Some(pieces) = queue.waiting.remove(&turn) else { break };
            queue.bytes -= pieces.iter().map(Piece::bytes).sum::<usize>();
            drop(queue);
            self.send(pieces);
            queue = lock(&self.queue);
            queue.next += 1;
            self.turn.notify_all();
        }
        queue.is_sending = false;
        self.turn.notify_all();
    }

    /// Hands in a part of a batch that is not at its end, in its turn. `false` when the search is
    /// over.
    pub(super) fn hand_in_part(&self, number: u64, pieces: Vec<Piece>) -> bool {
        let mut queue = lock(&self.queue);
        while (number != queue.next || queue.is_sending) && !self.is_over() {
            queue = wait(&self.turn, queue);
        }
        if self.is_over() {
            return false;
        }
        queue.is_sending = true;
        drop(queue);
        self.send(pieces);
        lock(&self.queue).is_sending = false;
        self.turn.notify_all();
        !self.is_over()
    }

    /// Ends the search for every thread.
    pub(super) fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
        // Taken so that nobody is between looking and waiting.
        drop(lock(&self.queue));
        self.turn.notify_all();
    }

    /// What was sent.
    pub(super) fn into_total(self) -> Total {
        self.total.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    fn send(&self, pieces: Vec<Piece>) {
        let mut total = lock(&self.total);
        for piece in pieces {
            if self.is_over() {
                return;
            }
            match piece {
                Piece::Met(account) => walk::add(&mut total.account, &account),
                Piece::Matches { mut found, is_last } => {
                    let is_cut = self.cut(&mut total, &mut found);
                    let any = !found.lines.is_empty() || self.mode != GrepMode::Content;
                    if is_last || is_cut {
                        total.matches += found.matches;
                        total.files += u64::from(found.matches > 0);
                    }
                    if any && found.matches > 0 {
                        let sent = self.reply.send(Answer::Matches(found), None);
                        if sent.is_err() {
                            return self.end();
                        }
                    }
                    if is_cut {
                        total.out_of_bytes = true;
                        return self.end();
                    }
                }
            }
        }
    }

    /// Takes away what is above `max_bytes`, and tells whether there was any. Each line counts with
    /// its line feed, and each file without lines by its path.
    fn cut(&self, total: &mut Total, found: &mut FileMatches) -> bool {
        let Some(bytes_max) = self.bytes_max else { return false };
        if self.mode != GrepMode::Content {
            total.bytes += found.path.len() as u64 + 1;
            if total.bytes > bytes_max {
                found.matches = 0;
            }
            return total.bytes > bytes_max;
        }
        for (index, line) in found.lines.iter().enumerate() {
            total.bytes += line.text.len() as u64 + 1;
            if total.bytes > bytes_max {
                let matched = found.lines[index..].iter().filter(|line| line.matched).count();
                found.matches -= (matched as u64).min(found.matches);
                found.limit_reached = false;
                found.lines.truncate(index);
                return true;
            }
        }
        false
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No thread leaves what it guards half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition.wait(guard).unwrap_or_else(PoisonError::into_inner)
}
