//! Watches, and how a client that lost its stream goes on with one.
//!
//! Changes have numbers, and a token says up to which one its client got. The newest changes are
//! kept, also those that were sent. A watch whose stream is gone stays for a while: what happens
//! meanwhile waits in its socket and in the kernel's queue, which are bounded and say when they
//! overflow. A token that cannot be gone on from gets a new watch and an overflow.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use cofferdam_files::call::Change;
use cofferdam_proto::v1;
use cofferdam_proto::v1::watch_dir_response::Event;
use futures::stream::{self, Stream};
use tokio::sync::Notify;
use tokio::time::Instant;
use tonic::Status;

use super::wire;
use crate::files::{FileError, Files, Watching};
use crate::status::Fault;

/// Newest changes of one watch that can be sent again.
const CHANGES_MAX: usize = 10_000;

/// How long a watch without a stream stays.
const PARKED_MAX: Duration = Duration::from_secs(30);

/// Silence after which a keepalive is sent.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// Tells a token of ours from other text.
const TOKEN_PREFIX: &str = "w";

/// The newest changes of a watch. The first change ever has the number 1.
#[derive(Debug)]
struct Log {
    changes: VecDeque<Change>,
    /// Number of the newest.
    last: u64,
    max: usize,
}

/// What a log holds at a number.
#[derive(Debug, PartialEq, Eq)]
enum At<'a> {
    Change(&'a Change),
    /// It is gone; the oldest one that is held has this number.
    Gone(u64),
    /// It has not happened.
    Nothing,
}

impl Log {
    fn new(max: usize) -> Self {
        Self { changes: VecDeque::new(), last: 0, max }
    }

    fn push(&mut self, change: Change) {
        if self.changes.len() >= self.max {
            self.changes.pop_front();
        }
        self.changes.push_back(change);
        self.last += 1;
    }

    fn at(&self, number: u64) -> At<'_> {
        let first = self.last + 1 - self.changes.len() as u64;
        if number > self.last {
            return At::Nothing;
        }
        let index = number.checked_sub(first).and_then(|index| usize::try_from(index).ok());
        match index.and_then(|index| self.changes.get(index)) {
            Some(change) => At::Change(change),
            None => At::Gone(first),
        }
    }

    /// Whether a client that has everything up to `number` can be told all that follows.
    fn can_go_on_from(&self, number: u64) -> bool {
        number <= self.last && !matches!(self.at(number + 1), At::Gone(_))
    }
}

#[derive(Debug)]
struct Slot {
    id: u64,
    path: String,
    recursive: bool,
    watching: Watching,
    log: Log,
    /// Grows with each stream; only the newest one gets changes.
    owner: u64,
    /// Without a stream: until when it stays.
    parked_until: Option<Instant>,
}

type Shared<T> = Arc<Mutex<T>>;

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
struct Hub {
    nonce: u32,
    slots: Mutex<Slots>,
    /// Somebody parked a watch.
    parked: Notify,
}

#[derive(Debug, Default)]
struct Slots {
    by_id: HashMap<u64, Shared<Slot>>,
    last_id: u64,
}

/// The watches of all clients.
#[derive(Debug, Clone)]
pub(crate) struct Watches(Arc<Hub>);

impl Watches {
    /// Without a watch. Tokens of another nonce are not gone on from.
    pub(crate) fn new(nonce: u32) -> Self {
        Self(Arc::new(Hub { nonce, slots: Mutex::default(), parked: Notify::new() }))
    }

    /// Ends watches whose client did not come back in time; never returns.
    pub(crate) async fn expire(&self) -> Infallible {
        loop {
            let next = self.drop_expired(Instant::now());
            let woken = self.0.parked.notified();
            match next {
                None => woken.await,
                Some(next) => {
                    tokio::select! {
                        () = woken => {}
                        () = tokio::time::sleep_until(next) => {}
                    }
                }
            }
        }
    }

    /// Returns when the next one expires.
    fn drop_expired(&self, now: Instant) -> Option<Instant> {
        let mut slots = lock(&self.0.slots);
        slots.by_id.retain(|_, slot| lock(slot).parked_until.is_none_or(|until| until > now));
        slots.by_id.values().filter_map(|slot| lock(slot).parked_until).min()
    }

    /// The stream of a watch: of the one that `token` names, when that can be gone on with, and of
    /// a new one otherwise.
    pub(super) async fn watch(
        &self,
        files: &Files,
        path: String,
        recursive: bool,
        token: &str,
    ) -> Result<impl Stream<Item = Result<v1::WatchDirResponse, Status>> + Send + use<>, FileError>
    {
        let mut reader = match self.resume(files, &path, recursive, token) {
            Some(reader) => reader,
            None => {
                let watching = files.watch(&path, recursive).await?;
                self.begin(files, path, recursive, watching)
            }
        };
        reader.greet();
        if !token.is_empty() && !reader.resumed {
            reader.queue.push_back(Event::Overflow(v1::WatchOverflow {}));
        }
        Ok(stream::unfold(reader, |mut reader| async move {
            let response = reader.next().await?;
            Some((response, reader))
        }))
    }

    fn begin(&self, files: &Files, path: String, recursive: bool, watching: Watching) -> Reader {
        let mut slots = lock(&self.0.slots);
        slots.last_id += 1;
        let id = slots.last_id;
        let log = Log::new(CHANGES_MAX);
        let (owner, parked_until) = (1, None);
        let slot = Slot { id, path, recursive, watching, log, owner, parked_until };
        let slot = Arc::new(Mutex::new(slot));
        slots.by_id.insert(id, Arc::clone(&slot));
        Reader::new(self, files, slot, (id, owner), 1)
    }

    fn resume(&self, files: &Files, path: &str, recursive: bool, token: &str) -> Option<Reader> {
        let (nonce, id, number) = parse_token(token)?;
        let slots = lock(&self.0.slots);
        let slot = slots.by_id.get(&id).filter(|_| nonce == self.0.nonce)?;
        let owner = {
            let mut slot = lock(slot);
            let is_same = slot.path == path && slot.recursive == recursive;
            if !is_same || !slot.log.can_go_on_from(number) {
                return None;
            }
            // A stream that its client lost may not know it yet.
            slot.owner += 1;
            slot.parked_until = None;
            slot.owner
        };
        let mut reader = Reader::new(self, files, Arc::clone(slot), (id, owner), number + 1);
        reader.resumed = true;
        Some(reader)
    }

    fn forget(&self, id: u64) {
        lock(&self.0.slots).by_id.remove(&id);
    }
}

fn token(nonce: u32, id: u64, number: u64) -> String {
    format!("{TOKEN_PREFIX}-{nonce:08x}-{id:x}-{number:x}")
}

fn parse_token(token: &str) -> Option<(u32, u64, u64)> {
    let mut parts = token.split('-');
    let prefix = parts.next()?;
    let nonce = u32::from_str_radix(parts.next()?, 16).ok()?;
    let id = u64::from_str_radix(parts.next()?, 16).ok()?;
    let number = u64::from_str_radix(parts.next()?, 16).ok()?;
    (prefix == TOKEN_PREFIX && parts.next().is_none()).then_some((nonce, id, number))
}

/// What a poll of the watch brings.
enum Polled {
    Event(Event),
    TakenOver,
    /// The directory is gone, and that is told.
    Ended,
    Failed(FileError),
}

/// One stream of a watch.
struct Reader {
    watches: Watches,
    enforcement: v1::Enforcement,
    draining: Pin<Box<dyn Future<Output = ()> + Send>>,
    slot: Shared<Slot>,
    id: u64,
    owner: u64,
    /// Number of the next change.
    next: u64,
    queue: VecDeque<Event>,
    resumed: bool,
    ended: bool,
}

impl Reader {
    fn new(
        watches: &Watches,
        files: &Files,
        slot: Shared<Slot>,
        (id, owner): (u64, u64),
        next: u64,
    ) -> Self {
        let drained = files.clone();
        Self {
            watches: watches.clone(),
            enforcement: files.enforcement(),
            draining: Box::pin(async move { drained.draining().await }),
            slot,
            id,
            owner,
            next,
            queue: VecDeque::new(),
            resumed: false,
            ended: false,
        }
    }

    fn greet(&mut self) {
        let started = {
            let slot = lock(&self.slot);
            v1::WatchStarted {
                path: slot.watching.canonical.clone(),
                directories: slot.watching.directories,
                not_watched: slot.watching.not_watched,
                enforcement: Some(self.enforcement.clone()),
            }
        };
        self.queue.push_back(Event::Started(started));
    }

    async fn next(&mut self) -> Option<Result<v1::WatchDirResponse, Status>> {
        if self.ended {
            return None;
        }
        if let Some(event) = self.queue.pop_front() {
            return Some(Ok(self.response(event)));
        }
        let (slot, next) = (&self.slot, &mut self.next);
        let changes = std::future::poll_fn(|context| poll(slot, self.owner, next, context));
        let polled = tokio::select! {
            biased;
            () = &mut self.draining => Ok(Polled::Failed(FileError::Draining)),
            polled = tokio::time::timeout(KEEPALIVE, changes) => polled,
        };
        let fault = match polled {
            Err(_) => return Some(Ok(self.response(Event::Keepalive(v1::WatchKeepalive {})))),
            Ok(Polled::Event(event)) => return Some(Ok(self.response(event))),
            Ok(Polled::TakenOver) => Fault::WatchResumed,
            Ok(Polled::Ended) => {
                self.watches.forget(self.id);
                self.ended = true;
                return None;
            }
            Ok(Polled::Failed(error)) => {
                self.watches.forget(self.id);
                error.into()
            }
        };
        self.ended = true;
        Some(Err(fault.into()))
    }

    fn response(&self, event: Event) -> v1::WatchDirResponse {
        let resume_token = token(self.watches.0.nonce, self.id, self.next - 1);
        v1::WatchDirResponse { event: Some(event), resume_token }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        {
            let mut slot = lock(&self.slot);
            if slot.owner != self.owner {
                return;
            }
            slot.parked_until = Some(Instant::now() + PARKED_MAX);
            tracing::debug!(watch = slot.id, "a watch lost its client");
        }
        self.watches.0.parked.notify_one();
    }
}

/// The next event for the stream `owner`, whose next change has the number `next`.
fn poll(slot: &Mutex<Slot>, owner: u64, next: &mut u64, context: &mut Context<'_>) -> Poll<Polled> {
    let mut slot = lock(slot);
    if slot.owner != owner {
        return Poll::Ready(Polled::TakenOver);
    }
    loop {
        match slot.log.at(*next) {
            At::Change(change) => {
                *next += 1;
                let event = match wire::change(change) {
                    Some(change) => Event::Change(change),
                    None => Event::Overflow(v1::WatchOverflow {}),
                };
                return Poll::Ready(Polled::Event(event));
            }
            At::Gone(first) => {
                *next = first;
                return Poll::Ready(Polled::Event(Event::Overflow(v1::WatchOverflow {})));
            }
            At::Nothing => {}
        }
        match slot.watching.poll_changes(context) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Err(error)) => return Poll::Ready(Polled::Failed(error)),
            Poll::Ready(Ok(None)) => return Poll::Ready(Polled::Ended),
            Poll::Ready(Ok(Some(changes))) => {
                changes.into_iter().for_each(|one| slot.log.push(one))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(number: u8) -> Change {
        Change::Write { path: vec![number] }
    }

    #[test]
    fn a_log_holds_the_newest_and_says_what_is_gone() {
        let mut log = Log::new(3);
        assert_eq!(log.at(1), At::Nothing);
        assert!(log.can_go_on_from(0));
        for number in 1..=5 {
            log.push(write(number));
        }
        assert_eq!(log.at(2), At::Gone(3));
        assert_eq!(log.at(3), At::Change(&write(3)));
        assert_eq!(log.at(5), At::Change(&write(5)));
        assert_eq!(log.at(6), At::Nothing);
        let able: Vec<u64> = (0..9).filter(|number| log.can_go_on_from(*number)).collect();
        assert_eq!(able, [2, 3, 4, 5]);
    }

    #[test]
    fn tokens_come_back_and_other_texts_do_not() {
        assert_eq!(parse_token(&token(7, 1, u64::MAX)), Some((7, 1, u64::MAX)));
        for text in ["", "w", "w-1-2", "w-1-2-3-4", "x-1-2-3", "w-1-2-é", "w-1-2-fffffffffffffffff"]
        {
            assert_eq!(parse_token(text), None, "{text}");
        }
    }
}
