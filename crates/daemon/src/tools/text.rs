//! Text for a model: within a budget, and readable whatever the bytes are.

use std::borrow::Cow;

pub(crate) use crate::escape::escaped;

/// Bytes of one text in a tool's result: 50 KiB, about what a model reads at once.
pub(crate) const BUDGET_BYTES: usize = 51_200;

/// Lines of one text in a tool's result.
pub(crate) const BUDGET_LINES: usize = 2_000;

/// Longest line in UTF-16 units, where lines are cut one by one.
pub(crate) const LINE_UNITS_MAX: u64 = 2_000;

/// Of a text that is cut in the middle, a quarter is its start …
const HEAD_BYTES: usize = BUDGET_BYTES / 4;
const HEAD_LINES: usize = BUDGET_LINES / 4;

/// … and the rest its end, where programs say what went wrong.
const TAIL_BYTES: usize = BUDGET_BYTES - HEAD_BYTES;
const TAIL_LINES: usize = BUDGET_LINES - HEAD_LINES;

/// Head and tail of a text that is too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    /// The head ends here.
    pub(crate) head_end: usize,
    /// The tail starts here; not before `head_end`.
    pub(crate) tail_start: usize,
    /// Lines of the head, one that is cut too.
    pub(crate) first: usize,
    /// Lines of the tail, one that is cut too.
    pub(crate) last: usize,
    /// Lines of the text.
    pub(crate) total: usize,
}

/// Lines of a text; what follows the last line feed counts when it is not empty.
pub(crate) fn count_lines(text: &str) -> usize {
    let feeds = text.bytes().filter(|byte| *byte == b'\n').count();
    feeds + usize::from(!text.is_empty() && !text.ends_with('\n'))
}

/// Where a text is cut; `None` when it is within the budget. Lines stay whole, but one that is
/// longer than its part of the budget is cut inside.
pub(crate) fn cut(text: &str) -> Option<Cut> {
    let total = count_lines(text);
    if text.len() <= BUDGET_BYTES && total <= BUDGET_LINES {
        return None;
    }
    let head_end = head_end(text);
    let tail_start = tail_start(text, head_end);
    Some(Cut {
        head_end,
        tail_start,
        first: count_lines(&text[..head_end]),
        last: count_lines(&text[tail_start..]),
        total,
    })
}

fn head_end(text: &str) -> usize {
    let bytes = text.as_bytes();
    let room = text.floor_char_boundary(HEAD_BYTES);
    let feeds = bytes[..room].iter().enumerate().filter(|(_, byte)| **byte == b'\n');
    let ends = feeds.map(|(index, _)| index + 1).take(HEAD_LINES);
    let (whole, lines) = ends.fold((0, 0), |(_, lines), end| (end, lines + 1));
    let next = &bytes[whole..];
    let next_is_long = !next[..next.len().min(HEAD_BYTES)].contains(&b'\n');
    if lines < HEAD_LINES && next_is_long { room } else { whole }
}

fn tail_start(text: &str, head_end: usize) -> usize {
    let bytes = text.as_bytes();
    let room = text.ceil_char_boundary(text.len().saturating_sub(TAIL_BYTES)).max(head_end);
    // The line feed at the very end closes the last line.
    let inner = text.len() - usize::from(text.ends_with('\n'));
    let starts_a_line = |at: usize| at == 0 || bytes[at - 1] == b'\n';
    let mut start = room;
    if !starts_a_line(room) {
        let next = bytes[room..inner].iter().position(|byte| *byte == b'\n');
        let next = next.map(|index| room + index + 1);
        let line_end = next.unwrap_or(text.len());
        let window = line_end.checked_sub(TAIL_BYTES).map(|from| &bytes[from..line_end - 1]);
        let line_is_long = window.is_some_and(|window| !window.contains(&b'\n'));
        start = match next {
            Some(next) if !line_is_long => next,
            _ => room,
        };
    }
    let feeds = bytes[start..inner].iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n');
    match feeds.map(|(index, _)| start + index + 1).nth(TAIL_LINES - 1) {
        Some(line) => line,
        None => start,
    }
}

/// A text whose redraws by carriage return are left out: of each line what was written after the
/// last return stays, and a return at its end. Also how many redraws are left out.
pub(crate) fn without_redraws(text: &str) -> (Cow<'_, str>, usize) {
    let mut left_out = 0;
    let mut kept = String::new();
    let mut copied = 0;
    let mut start = 0;
    // Most texts have none, and are not copied.
    while let Some(index) = text[start..].find('\r') {
        let line_start = text[..start + index].rfind('\n').map_or(0, |feed| feed + 1);
        let line_end = text[line_start..].find('\n').map_or(text.len(), |feed| line_start + feed);
        let body = text[line_start..line_end].trim_end_matches('\r');
        if let Some(last) = body.rfind('\r') {
            left_out += body[..=last].split('\r').filter(|state| !state.is_empty()).count();
            kept.push_str(&text[copied..line_start]);
            copied = line_start + last + 1;
        }
        start = line_end;
    }
    if copied == 0 && kept.is_empty() {
        return (Cow::Borrowed(text), 0);
    }
    kept.push_str(&text[copied..]);
    (Cow::Owned(kept), left_out)
}

/// Joins sentences to one note; `None` without any.
pub(crate) fn note(sentences: Vec<String>) -> Option<String> {
    (!sentences.is_empty()).then(|| sentences.join(" "))
}

/// `1 file`, `2 files`.
pub(crate) fn counted(count: u64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_fits_is_not_cut() {
        for text in ["", "\n", "a", "a\n", &"x\n".repeat(BUDGET_LINES), &"x".repeat(BUDGET_BYTES)] {
            assert_eq!(cut(text), None);
        }
    }

    #[test]
    fn a_long_log_keeps_a_quarter_of_lines_from_its_start() {
        let text = "filler\n".repeat(200_002);
        let cut = cut(&text).unwrap();
        assert_eq!((cut.first, cut.last, cut.total), (500, 1500, 200_002));
        assert_eq!(cut.head_end, 500 * 7);
        assert_eq!(cut.tail_start, text.len() - 1500 * 7);
    }

    #[test]
    fn one_huge_line_is_cut_inside_and_its_neighbour_is_whole() {
        let text = format!("{}\nEND\n", "x".repeat(5_000_000));
        let cut = cut(&text).unwrap();
        assert_eq!((cut.head_end, cut.first), (HEAD_BYTES, 1));
        assert_eq!((cut.tail_start, cut.last, cut.total), (text.len() - TAIL_BYTES, 2, 2));
    }

    #[test]
    fn a_huge_line_after_short_ones_is_cut_inside_too() {
        let text = format!("first\n{}", "é".repeat(1_000_000));
        let cut = cut(&text).unwrap();
        assert_eq!(cut.head_end, HEAD_BYTES);
        assert_eq!((cut.first, cut.last), (2, 1));
    }

    #[test]
    fn lines_that_fit_stay_whole() {
        let line = format!("{}\n", "y".repeat(999));
        let text = line.repeat(100);
        let cut = cut(&text).unwrap();
        assert_eq!((cut.head_end, cut.first), (12_000, 12));
        assert_eq!((cut.tail_start, cut.last), (100_000 - 38_000, 38));
    }

    fn any_text() -> impl Strategy<Value = String> {
        let line = prop_oneof![
            4 => "[a-zé漢]{0,40}",
            1 => (0_usize..60_000).prop_map(|length| "x".repeat(length)),
            1 => (0_usize..20_000).prop_map(|length| "é".repeat(length)),
        ];
        let some = proptest::collection::vec(line, 0..12).prop_map(|lines| lines.join("\n"));
        let many = (0_usize..4_000, "[a-zé]{0,30}\n").prop_map(|(count, line)| line.repeat(count));
        (some, many, any::<bool>()).prop_map(|(some, many, before)| {
            if before { format!("{some}\n{many}") } else { many + &some }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn what_is_kept_is_within_the_budget_and_really_from_the_text(text in any_text()) {
            let fits = text.len() <= BUDGET_BYTES && count_lines(&text) <= BUDGET_LINES;
            let Some(cut) = cut(&text) else {
                prop_assert!(fits);
                return Ok(());
            };
            prop_assert!(!fits);
            prop_assert!(cut.head_end < cut.tail_start);
            // Slicing panics when a boundary lies within a character.
            let (head, tail) = (&text[..cut.head_end], &text[cut.tail_start..]);
            prop_assert!(head.len() + tail.len() <= BUDGET_BYTES);
            prop_assert!(cut.first + cut.last <= BUDGET_LINES);
            prop_assert!(head.len() <= HEAD_BYTES && cut.first <= HEAD_LINES);
            prop_assert_eq!(cut.first, head.lines().count());
            prop_assert_eq!(cut.last, tail.lines().count());
            prop_assert_eq!(cut.total, text.lines().count());
            // A line that is cut is longer than its part of the budget.
            let left_out = &text[cut.head_end..cut.tail_start];
            if !head.is_empty() && !head.ends_with('\n') {
                let rest = text[cut.head_end..].split('\n').next().unwrap_or_default();
                let line = head.rsplit('\n').next().unwrap_or_default().len() + rest.len();
                prop_assert!(line >= HEAD_BYTES, "{line}");
            }
            if !left_out.ends_with('\n') {
                let rest = tail.split('\n').next().unwrap_or_default().len();
                let before = text[..cut.tail_start].rsplit('\n').next().unwrap_or_default();
                prop_assert!(before.len() + rest + 1 >= TAIL_BYTES);
            }
            // Something of both ends is always there.
            prop_assert!(!head.is_empty() && !tail.is_empty());
        }

        #[test]
        fn redraws_are_left_out_line_by_line(text in "[ab\r\n]{0,40}") {
            let (kept, _) = without_redraws(&text);
            let expected: Vec<String> = text
                .split('\n')
                .map(|line| {
                    let body = line.trim_end_matches('\r');
                    let state = body.rsplit('\r').next().unwrap_or_default();
                    format!("{state}{}", &line[body.len()..])
                })
                .collect();
            prop_assert_eq!(kept.as_ref(), expected.join("\n"));
        }
    }

    #[test]
    fn a_progress_bar_ends_as_its_last_state() {
        let bar: String = (1..=50_000).map(|n| format!("\r{n}/50000")).collect();
        let (kept, left_out) = without_redraws(&bar);
        assert_eq!((kept.as_ref(), left_out), ("50000/50000", 49_999));
        let (kept, left_out) = without_redraws("a\r\nb\r\n");
        assert_eq!((kept.as_ref(), left_out), ("a\r\nb\r\n", 0));
        assert!(matches!(without_redraws("plain\n"), (Cow::Borrowed(_), 0)));
    }
}
