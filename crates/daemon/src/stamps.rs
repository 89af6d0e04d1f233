//! What each session has seen of which file, and what that gives it the right to do.
//!
//! A stamp is held per session and canonical path, with the lines that were shown while the file
//! had that content. Nothing here reads a file or a clock: callers say what happened and when. The
//! invariant: [`Right::Whole`] is answered only for a content whose every line the session was
//! shown, or that it wrote itself.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;
use std::time::SystemTime;

use cofferdam_files::call::Encoding;
use cofferdam_spec::{LineRange, SessionId, Stamp};

use crate::files::Caller;

/// Stamps of all sessions. Above it the one that was longest unused goes, and its file must be read
/// again before it is changed.
const STAMPS_MAX: usize = 100_000;

/// Events of all paths. Above it the oldest goes.
const EVENTS_MAX: usize = 100_000;

/// Separate ranges of lines of one stamp. Above it the shortest is forgotten, and counts as not
/// shown.
const RANGES_MAX: usize = 1_000;

/// What was seen of a content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Seen {
    /// Every byte.
    All,
    /// Some lines of a text.
    Lines(Lines),
}

/// Lines of a text that were shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lines {
    /// In order, neither overlapping nor touching.
    ranges: Vec<LineRange>,
    /// Lines of the text.
    total: u64,
    /// How it was decoded.
    encoding: Encoding,
}

impl Lines {
    /// The lines of one read; `range` is `None` when none was shown.
    pub(crate) fn new(range: Option<LineRange>, total: u64, encoding: Encoding) -> Self {
        Self { ranges: range.into_iter().collect(), total, encoding }
    }

    fn add(&mut self, range: LineRange) {
        // Those that overlap or touch it become one with it.
        let start = self.ranges.partition_point(|one| one.last.saturating_add(1) < range.first);
        let end = self.ranges.partition_point(|one| one.first <= range.last.saturating_add(1));
        let merged = self.ranges[start..end].iter().fold(range, |all, one| LineRange {
            first: all.first.min(one.first),
            last: all.last.max(one.last),
        });
        self.ranges.splice(start..end, [merged]);
        if self.ranges.len() > RANGES_MAX {
            let length = |one: &LineRange| one.last - one.first;
            let shortest = (0..self.ranges.len()).min_by_key(|index| length(&self.ranges[*index]));
            shortest.map(|index| self.ranges.remove(index));
        }
    }

    fn holds(&self, first: u64, last: u64) -> bool {
        first > last || self.ranges.iter().any(|one| one.first <= first && last <= one.last)
    }

    fn is_text(&self) -> bool {
        matches!(self.encoding, Encoding::Utf8 | Encoding::Utf8Bom)
    }

    fn is_whole(&self) -> bool {
        self.is_text() && self.holds(1, self.total)
    }

    /// The lines that are known after an edit of this text, which then has `total` lines. What
    /// the edit put in place of lines that were not all known is not known.
    fn after(&self, edit: &Replaced, total: u64) -> Self {
        let &Replaced { first_line, old_breaks, new_breaks, replacements } = edit;
        let mut after = Self::new(None, total, self.encoding);
        let mut add = |first: u64, last: u64| {
            let last = last.min(total);
            if first <= last {
                after.add(LineRange { first, last });
            }
        };
        if old_breaks == new_breaks {
            self.ranges.iter().for_each(|one| add(one.first, one.last));
            return after;
        }
        for one in self.ranges.iter().filter(|one| one.first < first_line) {
            add(one.first, one.last.min(first_line - 1));
        }
        if replacements == 1 {
            let last_old = first_line.saturating_add(old_breaks);
            if self.holds(first_line, last_old.min(self.total)) {
                add(first_line, first_line.saturating_add(new_breaks));
            }
            let moved = |line: u64| (line - old_breaks).saturating_add(new_breaks);
            for one in self.ranges.iter().filter(|one| one.last > last_old) {
                add(moved(one.first.max(last_old + 1)), moved(one.last));
            }
        }
        after
    }
}

/// What an edit replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Replaced {
    /// Line of the first replacement, counted from 1.
    pub(crate) first_line: u64,
    /// Line feeds of the text that was replaced.
    pub(crate) old_breaks: u64,
    /// Line feeds of what was put there.
    pub(crate) new_breaks: u64,
    /// Number of replacements.
    pub(crate) replacements: u64,
}

/// What a session may do with a file that still holds what it saw.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Right {
    /// It has not seen the file.
    None,
    /// Everything: it has seen all of this content.
    Whole(Stamp),
    /// Change it, but not overwrite it.
    Part {
        /// The content.
        stamp: Stamp,
        /// The lines that were shown.
        shown: Vec<LineRange>,
        /// Lines of the file.
        total_lines: u64,
    },
    /// Move and remove it: its text was decoded in a way that does not say what its bytes are.
    NotText {
        /// The content.
        stamp: Stamp,
        /// How it was decoded.
        encoding: Encoding,
    },
}

impl Right {
    /// The content that was seen.
    pub(crate) fn stamp(&self) -> Option<Stamp> {
        match self {
            Right::None => None,
            Right::Whole(stamp) | Right::Part { stamp, .. } | Right::NotText { stamp, .. } => {
                Some(*stamp)
            }
        }
    }
}

/// Whether a stamp still tells the content of its file, as last looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Freshness {
    /// It does.
    Fresh,
    /// The file holds something else.
    Stale,
    /// There is no such file.
    Gone,
}

/// What happened to a stamp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// A read showed the content.
    Read,
    /// A write or an edit made it.
    Written,
    /// The file was moved here.
    Moved,
    /// The file was removed, or moved away.
    Removed,
    /// Somebody dropped the stamp.
    Cleared,
    /// A change was refused, because the content was another one.
    RefusedStale,
}

/// One entry of the history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Event {
    /// Grows with time; never used twice.
    pub(crate) number: u64,
    /// Whose stamp.
    pub(crate) session: SessionId,
    /// Canonical path.
    pub(crate) path: Arc<str>,
    /// What happened.
    pub(crate) change: Change,
    /// The stamp afterwards.
    pub(crate) stamp: Option<Stamp>,
    /// The call.
    pub(crate) call: String,
    /// When.
    pub(crate) time: SystemTime,
}

/// A stamp that a session holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    /// Who.
    pub(crate) session: SessionId,
    /// Canonical path.
    pub(crate) path: Arc<str>,
    /// What was seen.
    pub(crate) stamp: Stamp,
    /// The lines that were shown; empty when `complete`.
    pub(crate) shown: Vec<LineRange>,
    /// Whether the file may be overwritten.
    pub(crate) complete: bool,
    /// The call that set it.
    pub(crate) call: String,
    /// When.
    pub(crate) time: SystemTime,
    /// Whether it is fresh.
    pub(crate) freshness: Freshness,
}

#[derive(Debug, Clone)]
struct Held {
    stamp: Stamp,
    seen: Seen,
    call: String,
    time: SystemTime,
    freshness: Freshness,
    /// Its key in `Stamps::uses`.
    used: u64,
}

impl Held {
    fn is_whole(&self) -> bool {
        match &self.seen {
            Seen::All => true,
            Seen::Lines(lines) => lines.is_whole(),
        }
    }

    fn shown(&self) -> Vec<LineRange> {
        match &self.seen {
            Seen::Lines(lines) if !lines.is_whole() => lines.ranges.clone(),
            _ => Vec::new(),
        }
    }

    fn right(&self) -> Right {
        let stamp = self.stamp;
        match &self.seen {
            Seen::Lines(lines) if !lines.is_text() => {
                Right::NotText { stamp, encoding: lines.encoding }
            }
            Seen::Lines(lines) if !lines.is_whole() => {
                Right::Part { stamp, shown: lines.ranges.clone(), total_lines: lines.total }
            }
            _ => Right::Whole(stamp),
        }
    }
}

/// The stamps of all sessions. The session without a name holds none: whoever shares it has not
/// seen what another one did.
#[derive(Debug)]
pub(crate) struct Stamps {
    sessions: BTreeMap<SessionId, BTreeMap<Arc<str>, Held>>,
    /// Every stamp, longest unused first.
    uses: BTreeMap<u64, (SessionId, Arc<str>)>,
    last_use: u64,
    events: VecDeque<Event>,
    last_event: u64,
    stamps_max: usize,
    events_max: usize,
}

impl Default for Stamps {
    fn default() -> Self {
        Self::with_bounds(STAMPS_MAX, EVENTS_MAX)
    }
}

impl Stamps {
    fn with_bounds(stamps_max: usize, events_max: usize) -> Self {
        Self {
            sessions: BTreeMap::new(),
            uses: BTreeMap::new(),
            last_use: 0,
            events: VecDeque::new(),
            last_event: 0,
            stamps_max,
            events_max,
        }
    }

    /// What the session may do with the file. Counts as a use.
    pub(crate) fn right(&mut self, session: &SessionId, path: &str) -> Right {
        let Some((path, held)) = self.take(session, path) else { return Right::None };
        let right = held.right();
        self.put(session, path, held);
        right
    }

    /// A read showed `seen` of a file that held `stamp`.
    pub(crate) fn read(
        &mut self,
        caller: &Caller,
        path: &str,
        stamp: Stamp,
        seen: Seen,
        now: SystemTime,
    ) {
        let before = self.take(&caller.session, path);
        let (path, before) = before.map_or_else(|| (path.into(), None), |(p, h)| (p, Some(h)));
        let seen = match (before, seen) {
            (Some(held), seen) if held.stamp == stamp => join(held.seen, seen),
            (_, seen) => seen,
        };
        self.set(caller, path, stamp, seen, Change::Read, now);
    }

    /// The session wrote the whole file.
    pub(crate) fn written(&mut self, caller: &Caller, path: &str, stamp: Stamp, now: SystemTime) {
        self.set(caller, path.into(), stamp, Seen::All, Change::Written, now);
    }

    /// The session replaced texts: the file held `previous`, and holds `stamp` with `total` lines.
    pub(crate) fn edited(
        &mut self,
        caller: &Caller,
        path: &str,
        (previous, stamp): (Option<Stamp>, Stamp),
        (edit, total): (&Replaced, u64),
        now: SystemTime,
    ) {
        let held = self.held(&caller.session, path).filter(|held| Some(held.stamp) == previous);
        let seen = match held {
            Some(held) if held.is_whole() => Seen::All,
            Some(Held { seen: Seen::Lines(lines), .. }) => Seen::Lines(lines.after(edit, total)),
            // It was told what the file must hold, but has not seen it.
            _ => Seen::Lines(Lines::new(None, total, Encoding::Utf8)),
        };
        self.set(caller, path.into(), stamp, seen, Change::Written, now);
    }

    /// The entry is at `to` now, with everything below it. Its stamps go along in every session.
    pub(crate) fn moved(&mut self, caller: &Caller, from: &str, to: &str, now: SystemTime) {
        let holders: Vec<SessionId> = self.sessions.keys().cloned().collect();
        for session in holders {
            let caller = Caller { session, call: caller.call.clone() };
            for path in self.paths(&caller.session, from) {
                let Some((path, held)) = self.take(&caller.session, &path) else { continue };
                let target: Arc<str> = format!("{to}{}", &path[from.len()..]).into();
                self.note(&caller, path, Change::Removed, None, now);
                self.note(&caller, Arc::clone(&target), Change::Moved, Some(held.stamp), now);
                self.put(&caller.session, target, held);
            }
        }
    }

    /// The session removed the entry with everything below it. Other sessions keep their stamps,
    /// which are of a file that is gone.
    pub(crate) fn removed(&mut self, caller: &Caller, path: &str, now: SystemTime) {
        self.drop_below(caller, path, Change::Removed, now);
    }

    /// Drops the session's stamps of `prefix` and of what is below it; the empty one means all.
    /// Returns their number.
    pub(crate) fn clear(&mut self, caller: &Caller, prefix: &str, now: SystemTime) -> u64 {
        self.drop_below(caller, prefix, Change::Cleared, now)
    }

    /// A change was refused, because the file holds `current`.
    pub(crate) fn refused_stale(
        &mut self,
        caller: &Caller,
        path: &str,
        current: Option<Stamp>,
        now: SystemTime,
    ) {
        if caller.session == SessionId::default() {
            return;
        }
        let mut stamp = None;
        if let Some(held) = self.held_mut(&caller.session, path) {
            stamp = Some(held.stamp);
            if current != stamp {
                held.freshness = if current.is_some() { Freshness::Stale } else { Freshness::Gone };
            }
        }
        self.note(caller, path.into(), Change::RefusedStale, stamp, now);
    }

    /// Somebody looked at the file again. A stamp that was set meanwhile stays as it is.
    pub(crate) fn verified(&mut self, record: &Record, freshness: Freshness) {
        if let Some(held) = self.held_mut(&record.session, &record.path)
            && held.stamp == record.stamp
        {
            held.freshness = freshness;
        }
    }

    /// At most `count` stamps by session and path: of one session or all, of `prefix` and what is
    /// below it (the empty one means all), behind `after`.
    pub(crate) fn page(
        &self,
        session: Option<&SessionId>,
        prefix: &str,
        after: Option<&(SessionId, String)>,
        count: usize,
    ) -> Vec<Record> {
        let wanted = |one: &SessionId| {
            session.is_none_or(|session| session == one)
                && after.is_none_or(|(session, _)| session <= one)
        };
        let mut page = Vec::new();
        for (session, stamps) in self.sessions.iter().filter(|(session, _)| wanted(session)) {
            let after = after.filter(|(last, _)| last == session).map(|(_, path)| path.as_str());
            let start = match after {
                Some(path) if path >= prefix => Bound::Excluded(path),
                _ => Bound::Included(prefix),
            };
            let below = stamps
                .range::<str, _>((start, Bound::Unbounded))
                .take_while(|(path, _)| path.starts_with(prefix))
                .filter(|(path, _)| is_below(path, prefix));
            page.extend(below.take(count - page.len()).map(|(path, held)| Record {
                session: session.clone(),
                path: Arc::clone(path),
                stamp: held.stamp,
                shown: held.shown(),
                complete: held.is_whole(),
                call: held.call.clone(),
                time: held.time,
                freshness: held.freshness,
            }));
            if page.len() == count {
                break;
            }
        }
        page
    }

    /// At most `count` events of a path, newest first: of one session or all, with numbers below
    /// `before`.
    pub(crate) fn history(
        &self,
        path: &str,
        session: Option<&SessionId>,
        before: Option<u64>,
        count: usize,
    ) -> Vec<Event> {
        self.events
            .iter()
            .rev()
            .filter(|event| before.is_none_or(|before| event.number < before))
            .filter(|event| &*event.path == path)
            .filter(|event| session.is_none_or(|session| *session == event.session))
            .take(count)
            .cloned()
            .collect()
    }

    fn held(&self, session: &SessionId, path: &str) -> Option<&Held> {
        self.sessions.get(session)?.get(path)
    }

    fn held_mut(&mut self, session: &SessionId, path: &str) -> Option<&mut Held> {
        self.sessions.get_mut(session)?.get_mut(path)
    }

    fn set(
        &mut self,
        caller: &Caller,
        path: Arc<str>,
        stamp: Stamp,
        seen: Seen,
        change: Change,
        now: SystemTime,
    ) {
        if caller.session == SessionId::default() {
            return;
        }
        self.note(caller, Arc::clone(&path), change, Some(stamp), now);
        let (call, time, freshness) = (caller.call.clone(), now, Freshness::Fresh);
        let held = Held { stamp, seen, call, time, freshness, used: 0 };
        self.put(&caller.session, path, held);
    }

    /// Inserts as the most recently used, and makes room for it.
    fn put(&mut self, session: &SessionId, path: Arc<str>, mut held: Held) {
        self.take(session, &path);
        self.last_use += 1;
        held.used = self.last_use;
        self.uses.insert(held.used, (session.clone(), Arc::clone(&path)));
        self.sessions.entry(session.clone()).or_default().insert(path, held);
        while self.uses.len() > self.stamps_max {
            let Some((_, (session, path))) = self.uses.pop_first() else { break };
            self.take(&session, &path);
        }
    }

    fn take(&mut self, session: &SessionId, path: &str) -> Option<(Arc<str>, Held)> {
        let stamps = self.sessions.get_mut(session)?;
        let taken = stamps.remove_entry(path);
        if stamps.is_empty() {
            self.sessions.remove(session);
        }
        if let Some((_, held)) = &taken {
            self.uses.remove(&held.used);
        }
        taken
    }

    fn paths(&self, session: &SessionId, prefix: &str) -> Vec<Arc<str>> {
        let Some(stamps) = self.sessions.get(session) else { return Vec::new() };
        stamps
            .range::<str, _>((Bound::Included(prefix), Bound::Unbounded))
            .map(|(path, _)| path)
            .take_while(|path| path.starts_with(prefix))
            .filter(|path| is_below(path, prefix))
            .cloned()
            .collect()
    }

    fn drop_below(
        &mut self,
        caller: &Caller,
        prefix: &str,
        change: Change,
        now: SystemTime,
    ) -> u64 {
        let paths = self.paths(&caller.session, prefix);
        let number = paths.len() as u64;
        for path in paths {
            self.take(&caller.session, &path);
            self.note(caller, path, change, None, now);
        }
        number
    }

    fn note(
        &mut self,
        caller: &Caller,
        path: Arc<str>,
        change: Change,
        stamp: Option<Stamp>,
        time: SystemTime,
    ) {
        if self.events.len() >= self.events_max {
            self.events.pop_front();
        }
        self.last_event += 1;
        let Caller { session, call } = caller.clone();
        let number = self.last_event;
        self.events.push_back(Event { number, session, path, change, stamp, call, time });
    }
}

/// What was seen of one content by two reads.
fn join(before: Seen, now: Seen) -> Seen {
    match (before, now) {
        (Seen::All, _) | (_, Seen::All) => Seen::All,
        (Seen::Lines(before), Seen::Lines(mut now)) => {
            if !before.is_text() {
                now.encoding = before.encoding;
            }
            before.ranges.into_iter().for_each(|range| now.add(range));
            Seen::Lines(now)
        }
    }
}

/// Whether `path` is `prefix`, or lies below it, by components; everything lies below the empty
/// one.
fn is_below(path: &str, prefix: &str) -> bool {
    match path.strip_prefix(prefix) {
        Some(rest) => {
            rest.is_empty() || rest.starts_with('/') || prefix.is_empty() || prefix == "/"
        }
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashMap, HashSet};
    use std::time::Duration;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const NOW: SystemTime = SystemTime::UNIX_EPOCH;

    fn caller(session: &str) -> Caller {
        Caller { session: SessionId::new(session).unwrap(), call: "r1".to_owned() }
    }

    fn stamp(content: u8) -> Stamp {
        Stamp { digest: [content; 32], size: u64::from(content) }
    }

    fn range(first: u64, last: u64) -> LineRange {
        LineRange { first, last }
    }

    fn lines(ranges: &[(u64, u64)], total: u64) -> Lines {
        let mut lines = Lines::new(None, total, Encoding::Utf8);
        ranges.iter().for_each(|&(first, last)| lines.add(range(first, last)));
        lines
    }

    fn shown(first: u64, last: u64, total: u64) -> Seen {
        Seen::Lines(lines(&[(first, last)], total))
    }

    fn right(stamps: &mut Stamps, session: &str, path: &str) -> Right {
        stamps.right(&caller(session).session, path)
    }

    #[test]
    fn all_lines_at_one_content_give_the_right_to_overwrite() {
        let mut stamps = Stamps::default();
        let a = caller("a");
        stamps.read(&a, "/f", stamp(1), shown(1, 4, 10), NOW);
        let part = Right::Part { stamp: stamp(1), shown: vec![range(1, 4)], total_lines: 10 };
        assert_eq!(right(&mut stamps, "a", "/f"), part);
        stamps.read(&a, "/f", stamp(1), shown(5, 10, 10), NOW);
        assert_eq!(right(&mut stamps, "a", "/f"), Right::Whole(stamp(1)));
        assert_eq!(right(&mut stamps, "b", "/f"), Right::None);
        assert_eq!(right(&mut stamps, "a", "/other"), Right::None);
    }

    #[test]
    fn another_content_drops_the_lines_of_the_one_before() {
        let mut stamps = Stamps::default();
        let a = caller("a");
        stamps.read(&a, "/f", stamp(1), shown(1, 5, 10), NOW);
        stamps.read(&a, "/f", stamp(2), shown(6, 10, 10), NOW);
        let part = Right::Part { stamp: stamp(2), shown: vec![range(6, 10)], total_lines: 10 };
        assert_eq!(right(&mut stamps, "a", "/f"), part);
    }

    #[test]
    fn an_empty_file_and_an_own_write_are_wholly_seen() {
        let mut stamps = Stamps::default();
        let a = caller("a");
        let nothing = Lines::new(None, 0, Encoding::Utf8);
        stamps.read(&a, "/empty", stamp(0), Seen::Lines(nothing), NOW);
        assert_eq!(right(&mut stamps, "a", "/empty"), Right::Whole(stamp(0)));
        stamps.written(&a, "/f", stamp(3), NOW);
        stamps.read(&a, "/f", stamp(3), shown(2, 2, 9), NOW);
        assert_eq!(right(&mut stamps, "a", "/f"), Right::Whole(stamp(3)));
    }

    #[test]
    fn a_text_that_does_not_say_its_bytes_gives_no_right_until_the_bytes_are_read() {
        for encoding in [Encoding::Lossy, Encoding::Utf16Le, Encoding::Utf16Be] {
            let mut stamps = Stamps::default();
            let a = caller("a");
            let seen = Seen::Lines(Lines::new(Some(range(1, 1)), 1, encoding));
            stamps.read(&a, "/f", stamp(1), seen, NOW);
            let not_text = Right::NotText { stamp: stamp(1), encoding };
            assert_eq!(right(&mut stamps, "a", "/f"), not_text);
            stamps.read(&a, "/f", stamp(1), Seen::All, NOW);
            assert_eq!(right(&mut stamps, "a", "/f"), Right::Whole(stamp(1)));
        }
    }

    #[test]
    fn the_session_without_a_name_holds_no_stamp() {
        let mut stamps = Stamps::default();
        stamps.written(&caller(""), "/f", stamp(1), NOW);
        stamps.refused_stale(&caller(""), "/f", None, NOW);
        assert_eq!(right(&mut stamps, "", "/f"), Right::None);
        assert_eq!(stamps.history("/f", None, None, 9), []);
    }

    #[test]
    fn a_move_takes_the_stamps_of_every_session_along_and_a_remove_only_its_own() {
        let mut stamps = Stamps::default();
        let (a, b) = (caller("a"), caller("b"));
        for (who, path) in [(&a, "/d/x"), (&b, "/d/x"), (&a, "/d"), (&a, "/d2/x")] {
            stamps.written(who, path, stamp(1), NOW);
        }
        stamps.moved(&a, "/d", "/e/new", NOW);
        for (session, path) in [("a", "/e/new"), ("a", "/e/new/x"), ("b", "/e/new/x")] {
            assert_eq!(right(&mut stamps, session, path), Right::Whole(stamp(1)), "{path}");
        }
        assert_eq!(right(&mut stamps, "a", "/d/x"), Right::None);
        assert_eq!(right(&mut stamps, "a", "/d2/x"), Right::Whole(stamp(1)));
        stamps.removed(&a, "/e", NOW);
        assert_eq!(right(&mut stamps, "a", "/e/new/x"), Right::None);
        assert_eq!(right(&mut stamps, "b", "/e/new/x"), Right::Whole(stamp(1)));
        let changes = |path| -> Vec<_> {
            let events = stamps.history(path, Some(&a.session), None, 9);
            events.into_iter().map(|event| (event.change, event.stamp)).collect()
        };
        let carried = [(Change::Removed, None), (Change::Moved, Some(stamp(1)))];
        assert_eq!(changes("/e/new/x"), carried);
        assert_eq!(changes("/d/x"), [(Change::Removed, None), (Change::Written, Some(stamp(1)))]);
    }

    #[test]
    fn clearing_goes_by_components_and_by_session() {
        let mut stamps = Stamps::default();
        let (a, b) = (caller("a"), caller("b"));
        for path in ["/d", "/d!", "/d/x", "/dd", "/d/y/z"] {
            stamps.written(&a, path, stamp(1), NOW);
            stamps.written(&b, path, stamp(1), NOW);
        }
        assert_eq!(stamps.clear(&a, "/d", NOW), 3);
        assert_eq!(right(&mut stamps, "a", "/dd"), Right::Whole(stamp(1)));
        assert_eq!(right(&mut stamps, "a", "/d!"), Right::Whole(stamp(1)));
        assert_eq!(stamps.clear(&a, "/", NOW), 2);
        assert_eq!(stamps.clear(&b, "", NOW), 5);
        assert_eq!(stamps.page(None, "", None, 9), []);
    }

    #[test]
    fn pages_go_by_session_and_path_and_never_repeat() {
        let mut stamps = Stamps::default();
        for session in ["b", "a", "c"] {
            for path in ["/d/2", "/d/1", "/d", "/d!", "/e"] {
                stamps.written(&caller(session), path, stamp(1), NOW);
            }
        }
        let all = |session: Option<&SessionId>, prefix: &str| {
            let mut found: Vec<(String, String)> = Vec::new();
            let mut after = None;
            loop {
                let page = stamps.page(session, prefix, after.as_ref(), 2);
                let Some(last) = page.last() else { return found };
                after = Some((last.session.clone(), last.path.to_string()));
                let name = |one: &Record| (one.session.as_str().to_owned(), one.path.to_string());
                found.extend(page.iter().map(name));
                assert!(found.len() <= 15);
            }
        };
        let expected = |sessions: &[&str], paths: &[&str]| -> Vec<(String, String)> {
            let one = |s: &&str| paths.iter().map(|p| ((*s).to_owned(), (*p).to_owned())).collect();
            sessions.iter().flat_map(|s| -> Vec<_> { one(s) }).collect()
        };
        let below = ["/d", "/d/1", "/d/2"];
        assert_eq!(all(None, "/d"), expected(&["a", "b", "c"], &below));
        let every = ["/d", "/d!", "/d/1", "/d/2", "/e"];
        assert_eq!(all(None, ""), expected(&["a", "b", "c"], &every));
        assert_eq!(all(Some(&caller("b").session), "/"), expected(&["b"], &every));
    }

    #[test]
    fn the_longest_unused_stamp_and_the_oldest_event_go_first() {
        let mut stamps = Stamps::with_bounds(2, 3);
        let a = caller("a");
        stamps.written(&a, "/1", stamp(1), NOW);
        stamps.written(&a, "/2", stamp(1), NOW);
        assert_eq!(right(&mut stamps, "a", "/1"), Right::Whole(stamp(1)));
        stamps.written(&a, "/3", stamp(1), NOW);
        assert_eq!(right(&mut stamps, "a", "/2"), Right::None);
        assert_eq!(right(&mut stamps, "a", "/1"), Right::Whole(stamp(1)));
        stamps.written(&a, "/4", stamp(1), NOW);
        assert_eq!(stamps.history("/1", None, None, 9), []);
        assert_eq!(stamps.history("/4", None, None, 9).len(), 1);
    }

    #[test]
    fn a_refused_change_marks_the_stamp_and_stands_in_the_history() {
        let mut stamps = Stamps::default();
        let a = caller("a");
        let later = NOW + Duration::from_secs(1);
        stamps.written(&a, "/f", stamp(1), NOW);
        stamps.refused_stale(&a, "/f", Some(stamp(2)), later);
        assert_eq!(stamps.page(None, "", None, 1)[0].freshness, Freshness::Stale);
        let event = stamps.history("/f", None, None, 1).remove(0);
        let expected = (Change::RefusedStale, Some(stamp(1)), later);
        assert_eq!((event.change, event.stamp, event.time), expected);
        let before = stamps.history("/f", None, Some(event.number), 9);
        assert_eq!(before.iter().map(|one| one.change).collect::<Vec<_>>(), [Change::Written]);
        let record = stamps.page(None, "", None, 1).remove(0);
        stamps.verified(&record, Freshness::Fresh);
        assert_eq!(stamps.page(None, "", None, 1)[0].freshness, Freshness::Fresh);
        stamps.written(&a, "/f", stamp(3), later);
        stamps.verified(&record, Freshness::Gone);
        assert_eq!(stamps.page(None, "", None, 1)[0].freshness, Freshness::Fresh);
    }

    #[test]
    fn an_edit_keeps_what_was_shown_around_it() {
        let edit = |first_line, old_breaks, new_breaks, replacements| Replaced {
            first_line,
            old_breaks,
            new_breaks,
            replacements,
        };
        let table = [
            // One more line in a line that was shown.
            (lines(&[(2, 5)], 9), edit(3, 0, 1, 1), 10, lines(&[(2, 6)], 10)),
            // The same in one that was not.
            (lines(&[(2, 5)], 9), edit(7, 0, 1, 1), 10, lines(&[(2, 5)], 10)),
            (lines(&[(2, 3), (8, 9)], 9), edit(5, 0, 2, 1), 11, lines(&[(2, 3), (10, 11)], 11)),
            // Lines go away.
            (lines(&[(2, 7)], 9), edit(4, 2, 0, 1), 7, lines(&[(2, 5)], 7)),
            // As many line feeds as before.
            (lines(&[(2, 3), (7, 7)], 9), edit(3, 1, 1, 4), 9, lines(&[(2, 3), (7, 7)], 9)),
            // Nobody knows where the others stand.
            (lines(&[(2, 7)], 9), edit(4, 0, 1, 2), 11, lines(&[(2, 3)], 11)),
        ];
        for (before, edit, total, expected) in table {
            assert_eq!(before.after(&edit, total), expected, "{edit:?}");
        }
    }

    #[test]
    fn an_edit_of_what_was_not_seen_gives_no_right_to_overwrite() {
        let mut stamps = Stamps::default();
        let a = caller("a");
        let edit = Replaced { first_line: 1, old_breaks: 0, new_breaks: 0, replacements: 1 };
        stamps.edited(&a, "/f", (Some(stamp(1)), stamp(2)), (&edit, 3), NOW);
        let part = Right::Part { stamp: stamp(2), shown: Vec::new(), total_lines: 3 };
        assert_eq!(right(&mut stamps, "a", "/f"), part);
        stamps.written(&a, "/f", stamp(3), NOW);
        stamps.edited(&a, "/f", (Some(stamp(3)), stamp(4)), (&edit, 3), NOW);
        assert_eq!(right(&mut stamps, "a", "/f"), Right::Whole(stamp(4)));
    }

    #[test]
    fn the_shortest_of_too_many_ranges_counts_as_not_shown() {
        let mut many = lines(&[(1, 1)], u64::MAX);
        for index in 1..=RANGES_MAX as u64 {
            many.add(range(10 * index, 10 * index + 1));
        }
        assert_eq!(many.ranges.len(), RANGES_MAX);
        assert!(!many.holds(1, 1));
    }

    /// A file of a model: each line has a number that no other line ever had.
    type Content = Vec<u32>;

    #[derive(Debug, Clone)]
    enum Act {
        ReadLines { session: usize, path: usize, first: usize, count: usize },
        ReadBytes { session: usize, path: usize },
        Write { session: usize, path: usize, lines: usize },
        Edit { session: usize, path: usize, first: usize, old: usize, new: usize },
        Elsewhere { path: usize, at: usize },
        Move { session: usize, from: usize, to: usize },
        Remove { session: usize, path: usize },
        Clear { session: usize },
    }

    const PATHS: [&str; 4] = ["/a", "/d", "/d/b", "/d/c"];
    const SESSIONS: [&str; 2] = ["s", "t"];

    fn any_act() -> impl Strategy<Value = Act> {
        let (session, path) = (0..SESSIONS.len(), 0..PATHS.len());
        let both = move || (session.clone(), path.clone());
        prop_oneof![
            4 => (both(), 0_usize..6, 1_usize..4).prop_map(|((session, path), first, count)| {
                Act::ReadLines { session, path, first, count }
            }),
            1 => both().prop_map(|(session, path)| Act::ReadBytes { session, path }),
            2 => (both(), 0_usize..6)
                .prop_map(|((session, path), lines)| Act::Write { session, path, lines }),
            3 => (both(), 0_usize..6, 0_usize..3, 0_usize..3).prop_map(
                |((session, path), first, old, new)| Act::Edit { session, path, first, old, new }
            ),
            2 => (0..PATHS.len(), 0_usize..6).prop_map(|(path, at)| Act::Elsewhere { path, at }),
            1 => (both(), 0..PATHS.len())
                .prop_map(|((session, from), to)| Act::Move { session, from, to }),
            1 => both().prop_map(|(session, path)| Act::Remove { session, path }),
            1 => (0..SESSIONS.len()).prop_map(|session| Act::Clear { session }),
        ]
    }

    /// A file system and what each session knows of each content.
    #[derive(Default)]
    struct Model {
        stamps: Stamps,
        files: HashMap<usize, Content>,
        contents: HashMap<Content, u8>,
        known: HashSet<(usize, Content, u32)>,
        next_line: u32,
        overwrites: usize,
    }

    impl Model {
        fn stamp(&mut self, content: &Content) -> Stamp {
            let next = self.contents.len() as u8;
            stamp(*self.contents.entry(content.clone()).or_insert(next))
        }

        fn fresh(&mut self, count: usize) -> Content {
            let first = self.next_line;
            self.next_line += count as u32;
            (first..self.next_line).collect()
        }

        fn knows(&self, session: usize, content: &Content, line: u32) -> bool {
            self.known.contains(&(session, content.clone(), line))
        }

        fn learn(&mut self, session: usize, content: &Content, lines: &[u32]) {
            self.known.extend(lines.iter().map(|line| (session, content.clone(), *line)));
        }

        fn act(&mut self, act: &Act) {
            let who = |session: usize| caller(SESSIONS[session]);
            match *act {
                Act::ReadLines { session, path, first, count } => {
                    let Some(content) = self.files.get(&path).cloned() else { return };
                    let last = (first + count).min(content.len());
                    if first >= last && !content.is_empty() {
                        return;
                    }
                    let range = (first < last).then(|| range(first as u64 + 1, last as u64));
                    let seen = Lines::new(range, content.len() as u64, Encoding::Utf8);
                    let stamp = self.stamp(&content);
                    self.stamps.read(&who(session), PATHS[path], stamp, Seen::Lines(seen), NOW);
                    if first < last {
                        self.learn(session, &content, &content[first..last]);
                    }
                }
                Act::ReadBytes { session, path } => {
                    let Some(content) = self.files.get(&path).cloned() else { return };
                    let stamp = self.stamp(&content);
                    self.stamps.read(&who(session), PATHS[path], stamp, Seen::All, NOW);
                    self.learn(session, &content, &content);
                }
                Act::Write { session, path, lines } => {
                    let old = self.files.get(&path).cloned();
                    let right = self.stamps.right(&who(session).session, PATHS[path]);
                    match (&old, &right) {
                        (None, _) => {}
                        // What the toolbox checks.
                        (Some(old), Right::Whole(stamp)) if self.stamp(old) == *stamp => {
                            for line in old {
                                assert!(self.knows(session, old, *line), "{line} of {old:?}");
                            }
                            self.overwrites += 1;
                        }
                        _ => return,
                    }
                    let new = self.fresh(lines);
                    let stamp = self.stamp(&new);
                    self.stamps.written(&who(session), PATHS[path], stamp, NOW);
                    self.learn(session, &new, &new);
                    self.files.insert(path, new);
                }
                Act::Edit { session, path, first, old, new } => {
                    let Some(content) = self.files.get(&path).cloned() else { return };
                    if first + old >= content.len() {
                        return;
                    }
                    // A part of old + 1 lines becomes a part of new + 1 lines.
                    let replaced = &content[first..=first + old];
                    let put = self.fresh(new + 1);
                    let mut after = content[..first].to_vec();
                    after.extend_from_slice(&put);
                    after.extend_from_slice(&content[first + old + 1..]);
                    let stamps = (Some(self.stamp(&content)), self.stamp(&after));
                    let edit = Replaced {
                        first_line: first as u64 + 1,
                        old_breaks: old as u64,
                        new_breaks: new as u64,
                        replacements: 1,
                    };
                    let about = (&edit, after.len() as u64);
                    self.stamps.edited(&who(session), PATHS[path], stamps, about, NOW);
                    let mut known: Vec<u32> = content.clone();
                    known.retain(|line| self.knows(session, &content, *line));
                    // With as many lines as before, each is known when its predecessor was.
                    for (index, line) in put.iter().enumerate() {
                        let whole = replaced.iter().all(|line| known.contains(line));
                        let same = old == new && known.contains(&replaced[index]);
                        if whole || same {
                            known.push(*line);
                        }
                    }
                    known.retain(|line| after.contains(line));
                    self.learn(session, &after, &known);
                    self.files.insert(path, after);
                }
                Act::Elsewhere { path, at } => {
                    let mut content = self.files.remove(&path).unwrap_or_default();
                    let at = at.min(content.len());
                    let line = self.fresh(1);
                    content.splice(at..at, line);
                    self.files.insert(path, content);
                }
                Act::Move { session, from, to } => {
                    let moves = self.files.contains_key(&from) && !self.files.contains_key(&to);
                    // In this model "/d" is a file and a directory.
                    if !moves || PATHS[to].starts_with(PATHS[from]) {
                        return;
                    }
                    self.stamps.moved(&who(session), PATHS[from], PATHS[to], NOW);
                    let content = self.files.remove(&from).unwrap();
                    self.files.insert(to, content);
                }
                Act::Remove { session, path } => {
                    self.stamps.removed(&who(session), PATHS[path], NOW);
                    self.files.remove(&path);
                }
                Act::Clear { session } => {
                    self.stamps.clear(&who(session), "", NOW);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn ranges_merge_like_a_set_of_lines(parts in vec((1_u64..60, 0_u64..9), 0..40)) {
            let mut seen = lines(&[], 60);
            let mut model = BTreeSet::new();
            for (first, more) in parts {
                seen.add(range(first, first + more));
                model.extend(first..=first + more);
                let held: Vec<u64> =
                    seen.ranges.iter().flat_map(|one| one.first..=one.last).collect();
                prop_assert_eq!(&held, &model.iter().copied().collect::<Vec<_>>());
                let apart = |pair: &[LineRange]| pair[0].last + 1 < pair[1].first;
                prop_assert!(seen.ranges.windows(2).all(apart));
            }
            prop_assert_eq!(seen.is_whole(), (1..=60).all(|line| model.contains(&line)));
        }

        #[test]
        fn no_sequence_lets_a_write_pass_over_what_was_not_wholly_seen(
            acts in vec(any_act(), 0..80),
        ) {
            let mut model = Model::default();
            acts.iter().for_each(|act| model.act(act));
        }

        #[test]
        fn the_bounds_hold_and_every_stamp_has_one_use(acts in vec(any_act(), 0..80)) {
            let mut model =
                Model { stamps: Stamps::with_bounds(3, 5), ..Model::default() };
            for act in &acts {
                model.act(act);
                let held: usize = model.stamps.sessions.values().map(BTreeMap::len).sum();
                prop_assert_eq!(held, model.stamps.uses.len());
                prop_assert!(held <= 3 && model.stamps.events.len() <= 5);
            }
        }
    }

    #[test]
    fn the_model_does_overwrite() {
        let read = |first| Act::ReadLines { session: 0, path: 0, first, count: 2 };
        let write = || Act::Write { session: 0, path: 0, lines: 4 };
        let mut model = Model::default();
        for act in [write(), write(), Act::Clear { session: 0 }, read(0), write(), read(2), write()]
        {
            model.act(&act);
        }
        assert_eq!(model.overwrites, 2);
    }
}
