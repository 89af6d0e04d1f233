//! Lines as they are shown.

use std::ops::Range;

use crate::text::CUT_SUFFIX;

/// Put where a line was cut at its start.
const CUT_START: &str = "[truncated] ";

/// Most units that a caller can ask for: a line then fits into an answer.
const UNITS_MAX: u64 = 16 * 1024;

/// Bytes of the longest character.
const CHARACTER_BYTES: usize = 4;

/// A line, ready to be shown.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Shown {
    pub(super) text: String,
    /// Whether it was cut.
    pub(super) cut: bool,
    /// Whether bytes of it are no UTF-8, as far as it is shown.
    pub(super) lossy: bool,
}

/// Shows a line without its line feed. One of more than `units_max` UTF-16 units is cut to so many
/// around `focus`, its first match: from the start of the line when the match lies within, and
/// with as much before as after it otherwise.
pub(super) fn show(line: &[u8], focus: impl FnOnce() -> Range<usize>, units_max: u64) -> Shown {
    let units_max = usize::try_from(units_max.min(UNITS_MAX)).unwrap_or(usize::MAX);
    // A character has at least as many bytes as units, and what is no UTF-8 has one of each.
    if line.len() <= units_max {
        return shown(line);
    }
    if line.len() <= units_max * CHARACTER_BYTES {
        let whole = shown(line);
        if units(&whole.text) <= units_max {
            return whole;
        }
    }
    cut(line, focus(), units_max)
}

fn shown(line: &[u8]) -> Shown {
    let text = String::from_utf8_lossy(line);
    let lossy = matches!(text, std::borrow::Cow::Owned(_));
    Shown { text: text.into_owned(), cut: false, lossy }
}

fn cut(line: &[u8], focus: Range<usize>, units_max: usize) -> Shown {
    // No more than this can be shown on either side.
    let window = units_max * CHARACTER_BYTES;
    let middle = focus.start.min(line.len());
    let from = boundary(line, middle.saturating_sub(window));
    let to = boundary(line, (middle + window).min(line.len()));
    let (before, after) = (shown(&line[from..middle]), shown(&line[middle..to]));
    let focus_end = boundary(line, focus.end.clamp(middle, to));
    let focus_units = units(&shown(&line[middle..focus_end]).text);
    let (before_units, after_units) = (units(&before.text), units(&after.text));

    let lead = if from == 0 && before_units + focus_units <= units_max {
        before_units
    } else {
        let half = units_max.saturating_sub(focus_units) / 2;
        before_units.min(half.max(units_max.saturating_sub(after_units)))
    };
    let (skipped, lead) = last_units(&before.text, lead);
    let follow = first_units(&after.text, units_max.saturating_sub(units(lead)));
    let cut_start = from > 0 || skipped;
    let cut_end = to < line.len() || follow.len() < after.text.len();
    let mut text = String::with_capacity(lead.len() + follow.len() + 32);
    if cut_start {
        text.push_str(CUT_START);
    }
    text.push_str(lead);
    text.push_str(follow);
    if cut_end {
        text.push_str(CUT_SUFFIX);
    }
    let lossy =
        before.lossy && lead.contains('\u{fffd}') || after.lossy && follow.contains('\u{fffd}');
    Shown { text, cut: true, lossy }
}

/// The next position where a character may begin.
fn boundary(line: &[u8], at: usize) -> usize {
    let is_inside = |byte: &u8| byte & 0b1100_0000 == 0b1000_0000;
    at + line[at..].iter().take(CHARACTER_BYTES - 1).take_while(|byte| is_inside(byte)).count()
}

fn units(text: &str) -> usize {
    text.chars().map(char::len_utf16).sum()
}

/// As much of the start as has at most `most` units.
fn first_units(text: &str, most: usize) -> &str {
    let mut left = most;
    for (at, character) in text.char_indices() {
        if character.len_utf16() > left {
            return &text[..at];
        }
        left -= character.len_utf16();
    }
    text
}

/// As much of the end as has at most `most` units, and whether there is more before.
fn last_units(text: &str, most: usize) -> (bool, &str) {
    let mut left = most;
    for (at, character) in text.char_indices().rev() {
        if character.len_utf16() > left {
            return (true, &text[at + character.len_utf8()..]);
        }
        left -= character.len_utf16();
    }
    (false, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(line: &str, focus: &str, units_max: u64) -> Shown {
        let start = line.find(focus).unwrap();
        show(line.as_bytes(), || start..start + focus.len(), units_max)
    }

    fn text(text: &str, cut: bool) -> Shown {
        Shown { text: text.to_owned(), cut, lossy: false }
    }

    #[test]
    fn lines_are_cut_around_their_match() {
        assert_eq!(at("abcdef", "c", 6), text("abcdef", false));
        assert_eq!(at("abcdefg", "c", 6), text("abcdef [truncated]", true));
        assert_eq!(at("0123456789", "9", 4), text("[truncated] 6789", true));
        assert_eq!(at("0123456789", "5", 5), text("[truncated] 34567 [truncated]", true));
        assert_eq!(at("0123456789", "345678", 4), text("[truncated] 3456 [truncated]", true));
        assert_eq!(at("0123456789", "0123456789", 4), text("0123 [truncated]", true));
    }

    #[test]
    fn units_are_those_of_utf_16_and_no_character_is_halved() {
        assert_eq!(at("äöüß", "ö", 4), text("äöüß", false));
        assert_eq!(at("😀😀", "😀", 4), text("😀😀", false));
        assert_eq!(at("😀😀😀", "😀", 5), text("😀😀 [truncated]", true));
        assert_eq!(at("😀😀x", "x", 2), text("[truncated] x", true));
    }

    #[test]
    fn what_is_no_utf_8_is_replaced_and_told() {
        let line = show(b"caf\xe9 needle", || 5..11, 100);
        let text = "caf\u{fffd} needle".to_owned();
        assert_eq!(line, Shown { text, cut: false, lossy: true });
        // What is not shown is not told, and a real U+FFFD is text.
        let line = show(b"caf\xe9 and then the needle", || 18..24, 8);
        assert_eq!(
            line,
            Shown { text: "[truncated] e needle".to_owned(), cut: true, lossy: false }
        );
        assert!(!show("\u{fffd}".as_bytes(), || 0..0, 10).lossy);
    }

    proptest::proptest! {
        #[test]
        fn a_cut_line_is_a_part_of_the_line_and_shows_the_match(
            line in "[a-c😀ä]{0,60}", at in 0usize..60, length in 0usize..8, units_max in 1u64..30,
        ) {
            let bounds: Vec<usize> =
                line.char_indices().map(|(at, _)| at).chain([line.len()]).collect();
            let start = bounds[at.min(bounds.len() - 1)];
            let end = bounds[(at + length).min(bounds.len() - 1)];
            let shown = show(line.as_bytes(), || start..end, units_max);
            let body = shown.text.strip_prefix(CUT_START).unwrap_or(&shown.text);
            let body = body.strip_suffix(CUT_SUFFIX).unwrap_or(body);
            assert!(line.contains(body));
            assert_eq!(shown.cut, units(&line) as u64 > units_max);
            assert!(units(body) as u64 <= units_max);
            if units(&line[start..end]) as u64 <= units_max {
                assert!(body.contains(&line[start..end]));
            }
        }
    }
}
