//! Lines of texts.

use memchr::memchr_iter;

/// Lines of a text: only a line feed ends one, and what follows the last one counts when it is not
/// empty.
pub(crate) fn count_lines(bytes: &[u8]) -> u64 {
    let ended = memchr_iter(b'\n', bytes).count() as u64;
    ended + u64::from(bytes.last().is_some_and(|last| *last != b'\n'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_line_feed_ends_a_line() {
        for (text, lines) in
            [("", 0), ("\n", 1), ("a", 1), ("a\n", 1), ("a\n\nb", 3), ("a\rb\r", 1), ("\r\n\r\n", 2)]
        {
            assert_eq!(count_lines(text.as_bytes()), lines, "{text:?}");
        }
    }
}
