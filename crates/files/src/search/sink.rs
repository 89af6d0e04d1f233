//! Lines of one file, as the searcher finds them.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read};
use std::sync::atomic::{AtomicBool, Ordering};

use grep_matcher::Matcher as _;
use grep_regex::RegexMatcher;
use grep_searcher::{Searcher, Sink, SinkContext, SinkFinish, SinkMatch};

use super::line::show;
use crate::call::{FileMatches, Grep, GrepMode, Line};
use crate::serve::Reply;

/// Most bytes of lines in one answer; with paths and numbers it stays below 256 KiB.
const ANSWER_BYTES: usize = 128 * 1024;

/// What a line costs beside its text, in bytes.
const LINE_BYTES: usize = 32;

/// Where the parts of a file with many matches go before the file ends. `false` ends the search.
pub(super) type Overflow<'a> = &'a mut dyn FnMut(FileMatches) -> bool;

/// Gathers the matches of a file.
pub(super) struct FileSink<'a> {
    grep: &'a Grep,
    matcher: &'a RegexMatcher,
    overflow: Overflow<'a>,
    found: FileMatches,
    bytes: usize,
    /// Whether NUL bytes were met.
    binary: bool,
}

impl<'a> FileSink<'a> {
    /// For the file with this absolute path.
    pub(super) fn new(
        grep: &'a Grep,
        matcher: &'a RegexMatcher,
        path: &[u8],
        overflow: Overflow<'a>,
    ) -> Self {
        let found = FileMatches {
            path: path.to_vec(),
            lines: Vec::new(),
            matches: 0,
            limit_reached: false,
            lossy: false,
            binary: false,
        };
        Self { grep, matcher, overflow, found, bytes: 0, binary: false }
    }

    /// What was not passed on yet, if there is anything, and whether NUL bytes ended the search;
    /// `nul` is what was noted when the file was read.
    pub(super) fn end(mut self, nul: bool) -> (Option<FileMatches>, bool) {
        self.found.binary = self.binary || nul;
        let (any, is_binary) = (self.found.matches > 0, self.found.binary);
        (any.then_some(self.found), is_binary)
    }

    /// Whether the limit is reached, so that one more match only tells that there are more.
    fn is_full(&self) -> bool {
        self.grep.mode == GrepMode::Content && self.found.matches >= u64::from(self.grep.limit)
    }

    /// Adds a line; `false` ends the search.
    fn add(&mut self, number: u64, line: &[u8], matched: bool) -> bool {
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        let focus = || match self.matcher.find(line) {
            Ok(Some(found)) if matched => found.start()..found.end(),
            _ => 0..0,
        };
        let shown = show(line, focus, self.grep.max_line_chars);
        self.found.lossy |= shown.lossy;
        let cost = shown.text.len() + LINE_BYTES;
        let goes_on = self.bytes + cost <= ANSWER_BYTES || self.pass_on();
        self.bytes += cost;
        self.found.matches += u64::from(matched);
        self.found.lines.push(Line { number, text: shown.text, matched, cut: shown.cut });
        goes_on
    }

    /// Passes on what there is, and begins anew.
    fn pass_on(&mut self) -> bool {
        let part =
            FileMatches { lines: std::mem::take(&mut self.found.lines), ..self.found.clone() };
        self.bytes = 0;
        (self.overflow)(part)
    }
}

impl Sink for FileSink<'_> {
    type Error = io::Error;

    fn matched(&mut self, _: &Searcher, found: &SinkMatch<'_>) -> io::Result<bool> {
        match self.grep.mode {
            GrepMode::Files => {
                self.found.matches = 1;
                return Ok(false);
            }
            GrepMode::Count => {
                self.found.matches += found.lines().count() as u64;
                return Ok(true);
            }
            GrepMode::Content => {}
        }
        let first = found.line_number().unwrap_or(1);
        for (line, number) in found.lines().zip(first..) {
            if self.is_full() {
                self.found.limit_reached = true;
                return Ok(false);
            }
            if !self.add(number, line, true) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn context(&mut self, _: &Searcher, context: &SinkContext<'_>) -> io::Result<bool> {
        let number = context.line_number().unwrap_or(1);
        Ok(self.add(number, context.bytes(), false))
    }

    fn binary_data(&mut self, _: &Searcher, _: u64) -> io::Result<bool> {
        self.binary = true;
        Ok(true)
    }

    fn finish(&mut self, _: &Searcher, finish: &SinkFinish) -> io::Result<()> {
        self.binary |= finish.binary_byte_offset().is_some();
        Ok(())
    }
}

/// Reads between two looks whether anybody still waits: 2 MiB of a long file, or some short ones.
const READS_PER_LOOK: u32 = 32;

/// Whether anybody still waits for what a thread does.
pub(super) struct Interest<'a> {
    pub(super) reply: &'a dyn Reply,
    /// Set when nobody waits, and read by all threads.
    pub(super) given_up: &'a AtomicBool,
    /// Reads since the last look.
    pub(super) reads: Cell<u32>,
}

impl Interest<'_> {
    /// Whether a read may go on.
    fn is_there(&self) -> bool {
        self.reads.set((self.reads.get() + 1) % READS_PER_LOOK);
        if self.reads.get() == 0 && !self.reply.is_wanted() {
            self.given_up.store(true, Ordering::Relaxed);
        }
        !self.given_up.load(Ordering::Relaxed)
    }
}

/// A file that is read only while somebody waits and, where asked for, to its first NUL byte only.
pub(super) struct WantedFile<'a> {
    file: File,
    interest: &'a Interest<'a>,
    nul: Nul<'a>,
}

/// What a NUL byte means.
enum Nul<'a> {
    /// Nothing was read yet, so it is open.
    Unknown(&'a Cell<bool>),
    /// The end; it is noted.
    Ends(&'a Cell<bool>),
    /// Text.
    Nothing,
}

impl<'a> WantedFile<'a> {
    /// With `nul`, notes there whether a NUL byte ended the file. One that begins as UTF-16 is read
    /// to its end.
    pub(super) fn new(file: File, interest: &'a Interest<'a>, nul: Option<&'a Cell<bool>>) -> Self {
        Self { file, interest, nul: nul.map_or(Nul::Nothing, Nul::Unknown) }
    }
}

impl Read for WantedFile<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if !self.interest.is_there() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        if matches!(self.nul, Nul::Ends(met) if met.get()) {
            return Ok(0);
        }
        let count = self.file.read(buffer)?;
        let bytes = &buffer[..count];
        if let Nul::Unknown(met) = self.nul {
            let is_utf_16 = bytes.starts_with(b"\xff\xfe") || bytes.starts_with(b"\xfe\xff");
            self.nul = if is_utf_16 { Nul::Nothing } else { Nul::Ends(met) };
        }
        // Looking for any is faster than looking for the first.
        if let Nul::Ends(met) = self.nul
            && bytes.contains(&0)
        {
            met.set(true);
            return Ok(bytes.iter().position(|byte| *byte == 0).unwrap_or(count));
        }
        Ok(count)
    }
}
