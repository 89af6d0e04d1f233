//! Lines of texts: counting them, and keeping those of a window.

use std::borrow::Cow;
use std::fmt::Write as _;

use cofferdam_spec::LineRange;
use memchr::memchr_iter;

use crate::call::{LineEnding, ReadText};

/// What a line that was cut ends with.
pub(crate) const CUT_SUFFIX: &str = " [truncated]";

/// Lines of a text: only a line feed ends one, and what follows the last one counts when it is not
/// empty.
pub(crate) fn count_lines(bytes: &[u8]) -> u64 {
    let ended = memchr_iter(b'\n', bytes).count() as u64;
    ended + u64::from(bytes.last().is_some_and(|last| *last != b'\n'))
}

/// A text as far as `chars_max` UTF-16 units of it, and whether there is more. No character is cut
/// in two: of one that needs two units, with room for one only, nothing is kept.
pub(crate) fn cut_line(text: &str, chars_max: u64) -> (&str, bool) {
    // No character has more units than bytes.
    if text.len() as u64 <= chars_max {
        return (text, false);
    }
    let mut units = 0;
    for (at, character) in text.char_indices() {
        units += character.len_utf16() as u64;
        if units > chars_max {
            return (&text[..at], true);
        }
    }
    (text, false)
}

/// Checks parts of a text for UTF-8.
#[derive(Debug, Default)]
pub(crate) struct Utf8Check {
    wrong: bool,
    /// A character that began at the end of the last part.
    begun: [u8; 4],
    begun_bytes: usize,
}

impl Utf8Check {
    /// Looks at the bytes that come next.
    pub(crate) fn add(&mut self, mut part: &[u8]) {
        while self.begun_bytes > 0
            && !self.wrong
            && let Some((first, rest)) = part.split_first()
        {
            // Three bytes are at most begun, and a fourth always decides.
            self.begun[self.begun_bytes] = *first;
            self.begun_bytes += 1;
            part = rest;
            match std::str::from_utf8(&self.begun[..self.begun_bytes]) {
                Ok(_) => self.begun_bytes = 0,
                Err(error) => self.wrong = error.error_len().is_some(),
            }
        }
        if self.wrong {
            return;
        }
        if let Err(error) = std::str::from_utf8(part) {
            let begun = &part[error.valid_up_to()..];
            self.wrong = error.error_len().is_some();
            if !self.wrong {
                self.begun[..begun.len()].copy_from_slice(begun);
                self.begun_bytes = begun.len();
            }
        }
    }

    /// Whether all was UTF-8 so far; a character may have begun.
    pub(crate) fn is_good(&self) -> bool {
        !self.wrong
    }

    /// Whether all was UTF-8, and has ended.
    pub(crate) fn is_whole(&self) -> bool {
        !self.wrong && self.begun_bytes == 0
    }
}

/// The lines of a text that were asked for, gathered while the text goes by. What is in memory is
/// bounded by what is shown: of a line no more than that is kept.
pub(crate) struct Window<'a> {
    call: &'a ReadText,
    /// Number of the line that is going by.
    number: u64,
    /// Whether it has bytes.
    begun: bool,
    /// Its bytes from earlier parts, as many as may be shown.
    held: Vec<u8>,
    /// Bytes of a line that are worth keeping.
    held_max: u64,
    /// The byte before the next one.
    last: u8,
    crlf: bool,
    lf: bool,
    text: String,
    /// Bytes of the lines that are shown, with one for each line feed.
    used: u64,
    shown: Option<LineRange>,
    full: bool,
    cut: bool,
}

impl<'a> Window<'a> {
    /// Of a text of about `size` bytes.
    pub(crate) fn new(call: &'a ReadText, size: u64) -> Self {
        // A unit has at most 3 bytes, so these always hold one unit too many, whole.
        let held_max = call.max_line_chars.saturating_mul(3).saturating_add(4);
        let room = size.min(call.max_bytes).min(64 * 1024) as usize;
        Self {
            call,
            number: 1,
            begun: false,
            held: Vec::new(),
            held_max,
            last: 0,
            crlf: false,
            lf: false,
            text: String::with_capacity(room + room / 8),
            used: 0,
            shown: None,
            full: false,
            cut: false,
        }
    }

    /// Looks at the bytes that come next; what is no UTF-8 is shown as U+FFFD.
    pub(crate) fn add(&mut self, part: &[u8]) {
        let mut start = 0;
        for end in memchr_iter(b'\n', part) {
            let before = if end > 0 { part[end - 1] } else { self.last };
            if before == b'\r' {
                self.crlf = true;
            } else {
                self.lf = true;
            }
            if self.wants() {
                self.line(&part[start..end], true);
            }
            self.number += 1;
            self.begun = false;
            start = end + 1;
        }
        if let Some(last) = part.last() {
            self.last = *last;
        }
        let rest = &part[start..];
        if !rest.is_empty() {
            self.begun = true;
            if self.wants() {
                self.hold(rest);
            }
        }
    }

    /// Nothing comes any more: what is left is a line.
    pub(crate) fn end(&mut self) {
        if self.begun && self.wants() {
            self.line(&[], false);
        }
    }

    /// Whether nothing that comes changes what is shown, and whether there is more to read.
    pub(crate) fn is_settled(&self) -> bool {
        self.full && self.next().is_some()
    }

    /// Lines so far.
    pub(crate) fn lines(&self) -> u64 {
        self.number - 1 + u64::from(self.begun)
    }

    /// What is shown.
    pub(crate) fn shown(&self) -> Option<LineRange> {
        self.shown
    }

    /// The line after what is shown, when it was seen.
    pub(crate) fn next(&self) -> Option<u64> {
        self.shown.map(|shown| shown.last + 1).filter(|next| *next <= self.lines())
    }

    /// Whether a line was cut.
    pub(crate) fn cut(&self) -> bool {
        self.cut
    }

    /// How the lines end that went by.
    pub(crate) fn line_ending(&self) -> LineEnding {
        match (self.lf, self.crlf) {
            (true, true) => LineEnding::Mixed,
            (true, false) => LineEnding::Lf,
            (false, true) => LineEnding::CrLf,
            (false, false) => LineEnding::None,
        }
    }

    /// The lines that are shown.
    pub(crate) fn into_text(self) -> String {
        self.text
    }

    /// Whether the line that is going by belongs to the window.
    fn wants(&self) -> bool {
        !self.full && self.number >= self.call.first_line
    }

    fn hold(&mut self, bytes: &[u8]) {
        let room = self.held_max.saturating_sub(self.held.len() as u64);
        let kept = (bytes.len() as u64).min(room) as usize;
        self.held.extend_from_slice(&bytes[..kept]);
    }

    /// The line that is going by has ended; `rest` are its bytes that are not held yet.
    fn line(&mut self, rest: &[u8], with_feed: bool) {
        if self.held.is_empty() {
            let kept = (rest.len() as u64).min(self.held_max) as usize;
            return self.show(&rest[..kept], with_feed);
        }
        self.hold(rest);
        let held = std::mem::take(&mut self.held);
        self.show(&held, with_feed);
    }

    fn show(&mut self, line: &[u8], with_feed: bool) {
        let line: Cow<'_, str> = String::from_utf8_lossy(line);
        let (line, cut) = cut_line(&line, self.call.max_line_chars);
        let suffix = if cut { CUT_SUFFIX } else { "" };
        let prefix = if self.call.numbered { decimal_digits(self.number) + 2 } else { 0 };
        // Joined lines count as if each had its feed, so that a page does not depend on its last.
        let feed = u64::from(with_feed || self.call.numbered);
        let cost = prefix + line.len() as u64 + suffix.len() as u64 + feed;
        if self.shown.is_some() && self.used.saturating_add(cost) > self.call.max_bytes {
            self.full = true;
            return;
        }
        if self.call.numbered {
            if self.shown.is_some() {
                self.text.push('\n');
            }
            // A string takes whatever is written to it.
            let _ = write!(self.text, "{}: ", self.number);
        }
        self.text.push_str(line);
        self.text.push_str(suffix);
        if with_feed && !self.call.numbered {
            self.text.push('\n');
        }
        self.used += cost;
        self.cut |= cut;
        let first = self.shown.map_or(self.number, |shown| shown.first);
        self.shown = Some(LineRange { first, last: self.number });
        self.full = self.number - first + 1 >= self.call.max_lines;
    }
}

/// Digits of a number, in base ten.
fn decimal_digits(number: u64) -> u64 {
    u64::from(number.checked_ilog10().unwrap_or(0)) + 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_a_line_feed_ends_a_line() {
        for (text, lines) in [
            ("", 0),
            ("\n", 1),
            ("a", 1),
            ("a\n", 1),
            ("a\n\nb", 3),
            ("a\rb\r", 1),
            ("\r\n\r\n", 2),
            ("a\u{2028}b\u{85}c\x0bd\x0ce", 1),
        ] {
            assert_eq!(count_lines(text.as_bytes()), lines, "{text:?}");
        }
    }

    #[test]
    fn a_line_is_cut_between_characters() {
        for (text, chars_max, expected) in [
            ("", 0, ("", false)),
            ("abc", 3, ("abc", false)),
            ("abc", 2, ("ab", true)),
            ("ééé", 3, ("ééé", false)),
            ("a😀", 2, ("a", true)),
            ("a😀", 3, ("a😀", false)),
            ("a😀b", 3, ("a😀", true)),
        ] {
            assert_eq!(cut_line(text, chars_max), expected, "{text:?} {chars_max}");
        }
    }

    #[test]
    fn of_a_line_no_more_is_held_than_is_shown() {
        let call = ReadText {
            path: "/file".to_owned(),
            first_line: 2,
            max_lines: 10,
            max_bytes: 1_000,
            max_line_chars: 7,
            numbered: false,
            accept_media: false,
        };
        let mut window = Window::new(&call, u64::MAX);
        let part = "é".repeat(100_000);
        for line in ["", "ééééééé [truncated]\n"] {
            for _ in 0..20 {
                window.add(part.as_bytes());
                assert!(window.held.capacity() < 100, "{}", window.held.capacity());
            }
            window.add(b"\n");
            assert_eq!(window.text, line);
        }
        assert!(window.text.capacity() < 2_000, "{}", window.text.capacity());
        assert_eq!((window.lines(), window.next()), (2, None));
    }

    proptest! {
        #[test]
        fn parts_are_checked_as_the_whole_is(
            bytes in prop::collection::vec(
                prop_oneof![
                    3 => "[a-zé€😀\u{fffd}]{0,3}".prop_map(String::into_bytes),
                    1 => prop::collection::vec(any::<u8>(), 0..3),
                ],
                0..12,
            ).prop_map(|parts| parts.concat()),
            part in 1..6_usize,
        ) {
            let mut check = Utf8Check::default();
            bytes.chunks(part).for_each(|part| check.add(part));
            prop_assert_eq!(check.is_whole(), std::str::from_utf8(&bytes).is_ok());
            let begun = std::str::from_utf8(&bytes)
                .is_err_and(|error| error.error_len().is_none());
            prop_assert_eq!(check.is_good(), check.is_whole() || begun);
        }
    }
}
