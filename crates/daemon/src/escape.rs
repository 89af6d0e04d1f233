//! Paths that are no plain text, as text.

use std::borrow::Cow;
use std::fmt::Write as _;

/// A path as it is; or, when it holds control characters or is not UTF-8, with those as `\n`, `\t`,
/// `\r` or `\xNN` and its backslashes doubled.
pub(crate) fn escaped(path: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(path) {
        Ok(text) if !text.chars().any(char::is_control) => return Cow::Borrowed(text),
        _ => {}
    }
    let mut shown = String::with_capacity(path.len() + 8);
    for chunk in path.utf8_chunks() {
        for character in chunk.valid().chars() {
            match character {
                '\\' => shown.push_str("\\\\"),
                '\n' => shown.push_str("\\n"),
                '\t' => shown.push_str("\\t"),
                '\r' => shown.push_str("\\r"),
                character if character.is_control() => {
                    let mut bytes = [0; 4];
                    push_hex(&mut shown, character.encode_utf8(&mut bytes).as_bytes());
                }
                character => shown.push(character),
            }
        }
        push_hex(&mut shown, chunk.invalid());
    }
    Cow::Owned(shown)
}

fn push_hex(text: &mut String, bytes: &[u8]) {
    for byte in bytes {
        // Writing to a string does not fail.
        let _ = write!(text, "\\x{byte:02x}");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_escaped_path_is_printable_and_can_be_read_back(
            path in proptest::collection::vec(any::<u8>(), 0..40)
        ) {
            let shown = escaped(&path);
            prop_assert!(!shown.chars().any(char::is_control));
            if let Cow::Owned(shown) = &shown {
                prop_assert_eq!(unescaped(shown), path);
            } else {
                prop_assert_eq!(shown.as_bytes(), &path[..]);
            }
        }
    }

    fn unescaped(shown: &str) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut characters = shown.chars();
        while let Some(character) = characters.next() {
            if character != '\\' {
                bytes.extend(character.to_string().into_bytes());
                continue;
            }
            match characters.next().unwrap() {
                '\\' => bytes.push(b'\\'),
                'n' => bytes.push(b'\n'),
                't' => bytes.push(b'\t'),
                'r' => bytes.push(b'\r'),
                'x' => {
                    let hex: String = characters.by_ref().take(2).collect();
                    bytes.push(u8::from_str_radix(&hex, 16).unwrap());
                }
                other => panic!("{other}"),
            }
        }
        bytes
    }

    #[test]
    fn ordinary_paths_are_not_escaped() {
        assert!(matches!(escaped("/workspace/é a\\b".as_bytes()), Cow::Borrowed(_)));
        assert_eq!(escaped(b"new\nline\\x"), "new\\nline\\\\x");
        assert_eq!(escaped(b"bad\xff.txt"), "bad\\xff.txt");
        assert_eq!(escaped("a\u{85}".as_bytes()), "a\\xc2\\x85");
    }
}
