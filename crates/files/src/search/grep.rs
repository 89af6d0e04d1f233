//! Finding lines in files.
//!
//! The syntax, and what a line is, are ripgrep's: a pattern is Unicode, `^` and `$` are ends of
//! lines, and without `multiline` no match spans lines. Of a file below what was named, nothing is
//! searched from its first NUL byte on; a file that was named itself is searched to its end, and
//! its NUL bytes are text, so that its line numbers are those that reading it shows. Files with a
//! UTF-16 byte order mark are decoded. A carriage return before a line feed stays in the line.
//!
//! `glob` and `file_type` choose among the files that are met: what they leave out is in no
//! account, and what ignore files exclude they do not bring back. A file that was named itself is
//! searched whatever they say.
//!
//! Files are searched by several threads, and told in the order of their paths' bytes. When the
//! cell has no room for more threads, those that there are do all of the work.

use std::cell::Cell;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use grep_regex::{RegexMatcher, RegexMatcherBuilder};
use grep_searcher::{BinaryDetection, MmapChoice, Searcher, SearcherBuilder};
use ignore::overrides::{Override, OverrideBuilder};
use ignore::types::{Types, TypesBuilder};
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::outbox::{Outbox, Piece, Total};
use super::pattern;
use super::sink::{FileSink, Interest, WantedFile};
use super::walk::{self, Walk, Wanted};
use super::{WORKSPACE, bad_pattern};
use crate::call::{Account, Answer, Fault, FaultKind, FileKind, FileMatches, Grep, GrepMode};
use crate::fault::{at, found, kernel};
use crate::resolve::{Last, kind_of, resolve};
use crate::serve::Reply;

/// Most threads of one search; more of them wait for the disk and for each other.
const THREADS_MAX: usize = 4;

/// Largest compiled pattern, and largest cache of its automaton, in bytes. The work for each byte of
/// a line grows with the pattern, and cannot be given up within a line: nested repetitions like
/// `(a{1,1000}){1,1000}` would take hours and gigabytes.
const PATTERN_BYTES_MAX: usize = 2 * 1024 * 1024;
const AUTOMATON_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Files that a thread takes at once.
const BATCH_FILES: usize = 16;

/// Bytes of matches that a batch gathers before its turn; then its thread waits for it.
const BATCH_BYTES_MAX: usize = 1024 * 1024;

/// Longest line, and with `multiline` longest file, in bytes. Longer ones count as too large.
const HEAP_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Names of types told when one is unknown.
const NEAR_TYPES_MAX: usize = 8;

/// Finds lines.
pub(crate) fn grep(grep: &Grep, reply: &dyn Reply) -> Result<Answer, Fault> {
    grep_in(grep, WORKSPACE, reply)
}

/// As [`grep`], for a workspace elsewhere.
fn grep_in(grep: &Grep, workspace: &str, reply: &dyn Reply) -> Result<Answer, Fault> {
    let matcher = matcher(grep)?;
    let filter = Filter::new(grep)?;
    let base = resolve(&grep.path, Last::Follow)?;
    let canonical = base.canonical_text()?;
    let stat = base.look()?.ok_or_else(|| kernel("grep", Errno::NOENT))?;
    let over = AtomicBool::new(false);
    let outbox = Outbox::new(reply, grep.mode, grep.max_bytes, &over);
    let search = Search { grep, matcher, reply, outbox, over: &over };
    let given_up = match kind_of(stat.st_mode) {
        FileKind::Directory => {
            let wanted = Wanted {
                entry: &|below, is_directory| filter.wants(below, is_directory),
                include_ignored: grep.include_ignored,
                enter_git: pattern::names_git(&canonical)
                    || grep.glob.as_deref().is_some_and(pattern::names_git),
                count_files: false,
            };
            let directory = base.open(OFlags::PATH).map_err(at("open"))?;
            let keep = rustix::io::dup(&directory).map_err(at("open"))?;
            let walk =
                Walk::start(directory, &base.canonical, workspace.as_bytes(), wanted, reply)?;
            search.tree(walk, &keep)
        }
        FileKind::Regular => {
            let (file, _) = base.open_regular()?;
            search.named_file(file, &base.canonical)
        }
        kind => return Err(found(FaultKind::NotRegular(kind), "grep")),
    };
    let Total { matches, files, account, out_of_bytes, .. } = search.outbox.into_total();
    let account = Account { complete: !given_up && !out_of_bytes, ..account };
    Ok(Answer::Searched { canonical, matches, files, out_of_bytes, account })
}

/// Compiles the pattern.
fn matcher(grep: &Grep) -> Result<RegexMatcher, Fault> {
    if grep.pattern.is_empty() {
        return Err(bad_pattern("the pattern is empty\nhint: .* finds all lines"));
    }
    if !grep.multiline && grep.pattern.contains('\n') {
        return Err(bad_pattern(
            "the pattern holds a line feed\nhint: a match spans lines with multiline",
        ));
    }
    let mut builder = RegexMatcherBuilder::new();
    builder
        .case_insensitive(grep.ignore_case)
        .fixed_strings(grep.literal)
        .multi_line(true)
        .unicode(true)
        .size_limit(PATTERN_BYTES_MAX)
        .dfa_size_limit(AUTOMATON_BYTES_MAX)
        .octal(false);
    if !grep.multiline {
        builder.line_terminator(Some(b'\n')).dot_matches_new_line(false);
    }
    builder.build(&grep.pattern).map_err(|error| {
        let hint = match error.kind() {
            grep_regex::ErrorKind::NotAllowed(_) => "a match spans lines with multiline",
            _ => "with literal the pattern is taken as a text",
        };
        bad_pattern(format!("{error}\nhint: {hint}"))
    })
}

/// Which files are searched.
struct Filter {
    glob: Option<Override>,
    types: Option<Types>,
}

impl Filter {
    fn new(grep: &Grep) -> Result<Self, Fault> {
        let glob = grep.glob.as_deref().map(|glob| {
            let mut builder = OverrideBuilder::new("");
            builder.allow_unclosed_class(false);
            builder
                .add(glob)
                .and_then(|builder| builder.build())
                .map_err(|error| bad_pattern(format!("glob: {error}")))
        });
        Ok(Self {
            glob: glob.transpose()?,
            types: grep.file_type.as_deref().map(types).transpose()?,
        })
    }

    /// Whether a file, or what lies in a directory, is searched.
    fn wants(&self, below: &[u8], is_directory: bool) -> bool {
        let path: &std::ffi::OsStr = std::os::unix::ffi::OsStrExt::from_bytes(below);
        let path = Path::new(path);
        if self.glob.as_ref().is_some_and(|glob| glob.matched(path, is_directory).is_ignore()) {
            return false;
        }
        let is_of_type = |types: &Types| types.matched(path, false).is_whitelist();
        is_directory || self.types.as_ref().is_none_or(is_of_type)
    }
}

/// The files of a type.
fn types(name: &str) -> Result<Types, Fault> {
    let mut builder = TypesBuilder::new();
    builder.add_defaults();
    let known = builder.definitions();
    if name != "all" && !known.iter().any(|known| known.name() == name) {
        let mut near: Vec<(usize, &str)> = known
            .iter()
            .map(|known| (distance(name, known.name()), known.name()))
            .filter(|(distance, known)| {
                *distance <= 2.min(name.len() / 2) || known.contains(name) || name.contains(known)
            })
            .collect();
        near.sort_unstable();
        let near: Vec<&str> = near.into_iter().take(NEAR_TYPES_MAX).map(|(_, name)| name).collect();
        let hint = match near.as_slice() {
            [] => "glob chooses files by name, for example *.rs".to_owned(),
            near => format!("types with similar names: {}", near.join(", ")),
        };
        return Err(bad_pattern(format!("there is no file type {name:?}\nhint: {hint}")));
    }
    builder.select(name).build().map_err(|error| bad_pattern(error.to_string()))
}

/// Changes of one character that make one name of the other.
fn distance(from: &str, to: &str) -> usize {
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (deleted, a) in from.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = deleted + 1;
        for (column, b) in to.bytes().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[to.len()]
}

/// A search, as all threads see it.
struct Search<'a> {
    grep: &'a Grep,
    matcher: RegexMatcher,
    reply: &'a dyn Reply,
    outbox: Outbox<'a>,
    /// Set when nobody waits, or a limit is reached.
    over: &'a AtomicBool,
}

/// Where files come from.
struct Source<'a> {
    walk: Walk<'a>,
    /// Number of the next batch.
    next: u64,
    ended: bool,
}

/// Files that one thread searches.
struct Batch {
    number: u64,
    /// Absolute paths.
    paths: Vec<Vec<u8>>,
    /// What was met on the way to them.
    met: Account,
}

impl Source<'_> {
    /// The next batch; the last one is not full, and may be empty.
    fn batch(&mut self) -> Option<Batch> {
        if self.ended {
            return None;
        }
        let mut paths = Vec::with_capacity(BATCH_FILES);
        while paths.len() < BATCH_FILES {
            match self.walk.next() {
                Some(path) => paths.push(path.to_vec()),
                None => {
                    self.ended = true;
                    break;
                }
            }
        }
        let number = self.next;
        self.next += 1;
        Some(Batch { number, paths, met: self.walk.take_account() })
    }
}

impl Search<'_> {
    /// Searches a tree; tells whether nobody waited any more.
    fn tree(&self, walk: Walk<'_>, base: &OwnedFd) -> bool {
        let below = walk.below();
        let mut source = Source { walk, next: 0, ended: false };
        let first = source.batch();
        let is_small = source.ended;
        let source = Mutex::new(source);
        thread::scope(|scope| {
            if !is_small {
                let threads = thread::available_parallelism().map_or(1, usize::from);
                for _ in 1..threads.min(THREADS_MAX) {
                    let helper = thread::Builder::new().name("grep".to_owned());
                    if helper.spawn_scoped(scope, || self.work(&source, base, below, None)).is_err()
                    {
                        // No room for another thread; what there are do it all.
                        break;
                    }
                }
            }
            self.work(&source, base, below, first);
        });
        let source = source.into_inner().unwrap_or_else(PoisonError::into_inner);
        source.walk.given_up() || self.over.load(Ordering::Relaxed)
    }

    /// Takes batches until there are no more.
    fn work(&self, source: &Mutex<Source<'_>>, base: &OwnedFd, below: usize, first: Option<Batch>) {
        let mut worker = Worker::new(self, BinaryDetection::quit(0));
        let mut batch = first;
        loop {
            let taken = batch
                .take()
                .or_else(|| source.lock().unwrap_or_else(PoisonError::into_inner).batch());
            let Some(Batch { number, paths, met }) = taken else { return };
            worker.begin(number, met);
            for path in &paths {
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
                match walk::open(base, &path[below..], flags) {
                    Ok(file) => worker.file(file, path),
                    Err(errno) => worker.unopened(errno),
                }
                if self.over.load(Ordering::Relaxed) {
                    break;
                }
            }
            worker.end();
            if self.over.load(Ordering::Relaxed) {
                // Others may wait for a turn that does not come.
                return self.outbox.end();
            }
        }
    }

    /// Searches a file that was named; tells whether nobody waited any more.
    fn named_file(&self, file: OwnedFd, path: &[u8]) -> bool {
        let mut worker = Worker::new(self, BinaryDetection::none());
        worker.begin(0, Account::default());
        worker.file(file, path);
        worker.end();
        self.over.load(Ordering::Relaxed)
    }
}

/// One thread of a search.
struct Worker<'a> {
    search: &'a Search<'a>,
    matcher: RegexMatcher,
    searcher: Searcher,
    interest: Interest<'a>,
    /// The batch at hand.
    number: u64,
    pieces: Vec<Piece>,
    bytes: usize,
}

impl<'a> Worker<'a> {
    fn new(search: &'a Search<'a>, binary: BinaryDetection) -> Self {
        let context = match search.grep.mode {
            GrepMode::Content => usize::try_from(search.grep.context).unwrap_or(usize::MAX),
            GrepMode::Files | GrepMode::Count => 0,
        };
        let searcher = SearcherBuilder::new()
            .line_number(search.grep.mode == GrepMode::Content)
            .before_context(context)
            .after_context(context)
            .multi_line(search.grep.multiline)
            .heap_limit(Some(HEAP_BYTES_MAX))
            .memory_map(MmapChoice::never())
            .bom_sniffing(true)
            .binary_detection(binary)
            .build();
        let interest = Interest { reply: search.reply, given_up: search.over, reads: Cell::new(0) };
        // Threads that share a matcher wait for its memory.
        let matcher = search.matcher.clone();
        Self { search, matcher, searcher, interest, number: 0, pieces: Vec::new(), bytes: 0 }
    }

    fn begin(&mut self, number: u64, met: Account) {
        self.number = number;
        self.push(Piece::Met(met));
    }

    fn end(&mut self) {
        self.bytes = 0;
        self.search.outbox.hand_in(self.number, std::mem::take(&mut self.pieces));
    }

    fn push(&mut self, piece: Piece) {
        self.bytes += piece.bytes();
        self.pieces.push(piece);
    }

    /// Searches a file; whether it is one is known only now that it is open.
    fn file(&mut self, file: OwnedFd, path: &[u8]) {
        let mut met = Account::default();
        match rustix::fs::fstat(&file).map(|stat| kind_of(stat.st_mode)) {
            Ok(FileKind::Regular) => self.regular(File::from(file), path, &mut met),
            Ok(_) => met.special += 1,
            Err(_) => met.unreadable += 1,
        }
        self.push(Piece::Met(met));
    }

    fn regular(&mut self, file: File, path: &[u8], met: &mut Account) {
        let Self { search, matcher, searcher, interest, number, pieces, bytes } = self;
        let mut overflow = |part: FileMatches| {
            let piece = Piece::Matches { found: part, is_last: false };
            *bytes += piece.bytes();
            pieces.push(piece);
            if *bytes <= BATCH_BYTES_MAX {
                return !search.over.load(Ordering::Relaxed);
            }
            *bytes = 0;
            search.outbox.hand_in_part(*number, std::mem::take(pieces))
        };
        let mut sink = FileSink::new(search.grep, matcher, path, &mut overflow);
        let nul = Cell::new(false);
        let ends_at_nul = searcher.binary_detection().quit_byte().is_some();
        let file = WantedFile::new(file, interest, ends_at_nul.then_some(&nul));
        let result = searcher.search_reader(&*matcher, file, &mut sink);
        let (found, is_binary) = sink.end(nul.get());
        if let Some(found) = found {
            self.push(Piece::Matches { found, is_last: true });
        }
        match result {
            Ok(()) if is_binary => met.binary += 1,
            Ok(()) => {
                walk::count_searched(met, path.rsplit(|byte| *byte == b'/').next().unwrap_or(path))
            }
            Err(_) if self.search.over.load(Ordering::Relaxed) => {}
            Err(error) if error.raw_os_error().is_some() => met.unreadable += 1,
            // The searcher's own: a line, or the file, does not fit into the memory it may take.
            Err(_) => met.too_large += 1,
        }
    }

    /// Counts a file that could not be opened.
    fn unopened(&mut self, errno: Errno) {
        let mut met = Account::default();
        match errno {
            // Gone since it was listed: it was not met.
            Errno::NOENT => return,
            // It is a symlink, or a socket, by now.
            Errno::LOOP | Errno::NXIO => met.special += 1,
            _ => met.unreadable += 1,
        }
        self.push(Piece::Met(met));
    }
}

#[cfg(test)]
mod tests;
