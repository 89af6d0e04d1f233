//! Replacing a text in a file.

use memchr::memmem;
use rustix::io::Errno;

use crate::call::{Answer, EDIT_BYTES_MAX, Edit, Expected, Fault, FaultKind};
use crate::fault::{at, found, kernel};
use crate::replace::{ATTEMPTS_MAX, Attempt, Body, Old, Replace, judge, overtaken};
use crate::resolve::{Last, resolve};
use crate::serve::{Files, Reply};
use crate::stamp::{Parts, hash_bytes};
use crate::write::{leads_to, refuse_directory};

/// Replaces a text.
pub(crate) fn edit(files: &Files, call: &Edit, reply: &dyn Reply) -> Result<Answer, Fault> {
    if call.old.is_empty() || call.old == call.new {
        return Err(kernel("edit: the text to replace is empty, or the new one", Errno::INVAL));
    }
    let place = resolve(&call.path, Last::Follow)?;
    refuse_directory(&place)?;
    let canonical = place.canonical_text()?;
    leads_to(&call.guard, &canonical)?;
    let _held = files.locks.hold(&place.canonical, reply)?;
    let mut there = None;
    for _ in 0..ATTEMPTS_MAX {
        let (file, stat) = match place.open_regular() {
            Ok(opened) => opened,
            Err(fault) if fault.kind == FaultKind::NotFound => return Err(gone(call, fault)),
            Err(fault) => return Err(fault),
        };
        let size = stat.st_size as u64;
        if size > EDIT_BYTES_MAX {
            return Err(too_large(size));
        }
        let mut text = Vec::with_capacity(size as usize);
        let mut parts = Parts::new(&file, size, reply);
        while let Some(part) = parts.next()? {
            text.extend_from_slice(part);
        }
        let stat = rustix::fs::fstat(&file).map_err(at("stat"))?;
        let old = Old { file, stat, stamp: Some(hash_bytes(&text)) };
        match call.guard.expected {
            // A file that should not be there cannot be edited.
            Expected::Absent => return Err(found(FaultKind::Stale(old.stamp), "compare")),
            expected => judge(&expected, Some(&old))?,
        }
        let replaced = replace(&text, call)?;
        let replace = Replace {
            store: &files.store,
            syncs: &files.syncs,
            steps: &files.steps,
            place: &place,
            canonical: &canonical,
            expected: call.guard.expected,
            body: &Body::Bytes(replaced.text),
            keep_bom: false,
            mode: 0,
            reply,
        };
        match replace.attempt(Some(old))? {
            Attempt::Written(written) => {
                return Ok(Answer::Edited {
                    written,
                    replacements: replaced.count,
                    first_line: replaced.first_line,
                });
            }
            Attempt::Overtaken(stamp) => there = stamp,
        }
    }
    Err(overtaken(&call.guard.expected, there))
}

/// The fault for a file that is not there.
fn gone(call: &Edit, fault: Fault) -> Fault {
    match call.guard.expected {
        Expected::Exactly { or_absent: false, .. } => found(FaultKind::Stale(None), "compare"),
        _ => fault,
    }
}

fn too_large(size: u64) -> Fault {
    found(FaultKind::TooLarge { size, limit: EDIT_BYTES_MAX }, "edit")
}

/// What an edit makes of a text.
#[derive(Debug, PartialEq, Eq)]
struct Replaced {
    text: Vec<u8>,
    count: u64,
    first_line: u64,
}

/// Replaces in `text` what the call names, from left to right; occurrences do not overlap.
fn replace(text: &[u8], call: &Edit) -> Result<Replaced, Fault> {
    let (old, new) = (call.old.as_bytes(), call.new.as_bytes());
    let finder = memmem::Finder::new(old);
    let mut occurrences = finder.find_iter(text);
    let first = occurrences.next();
    let count = u64::from(first.is_some()) + occurrences.count() as u64;
    let occurs = |other: &[u8]| other != old && memmem::find(text, other).is_some();
    let first = match first {
        Some(first) if count == 1 || call.all => first,
        _ => {
            let other_line_endings =
                count == 0 && other_line_endings(&call.old).iter().any(|other| occurs(other));
            return Err(found(FaultKind::Occurrences { count, other_line_endings }, "edit"));
        }
    };
    // Neither can wrap: lengths are below 2^63, and the product is checked.
    let removed = count * old.len() as u64;
    let added = count.saturating_mul(new.len() as u64);
    let size = (text.len() as u64 - removed).saturating_add(added);
    if size > EDIT_BYTES_MAX {
        return Err(too_large(size));
    }
    let mut replaced = Vec::with_capacity(size as usize);
    let mut from = 0;
    for start in finder.find_iter(text) {
        replaced.extend_from_slice(&text[from..start]);
        replaced.extend_from_slice(new);
        from = start + old.len();
    }
    replaced.extend_from_slice(&text[from..]);
    let first_line = 1 + memchr::memchr_iter(b'\n', &text[..first]).count() as u64;
    Ok(Replaced { text: replaced, count, first_line })
}

/// The text with all its lines ended by line feeds, and by carriage return and line feed.
fn other_line_endings(text: &str) -> [Vec<u8>; 2] {
    let lf = text.replace("\r\n", "\n");
    let crlf = lf.replace('\n', "\r\n");
    [lf.into_bytes(), crlf.into_bytes()]
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;
    use crate::call::FileCall;
    use crate::replace::tests::{Made, ask, exactly, guard};
    use crate::stamp::hash_bytes;

    fn call(path: String, old: &str, new: &str, all: bool, expected: Expected) -> Edit {
        Edit { path, old: old.to_owned(), new: new.to_owned(), all, guard: guard(expected) }
    }

    fn edit(made: &Made, call: Edit) -> Result<(u64, u64), FaultKind> {
        match ask(&made.files, FileCall::Edit(call), None) {
            Ok(Answer::Edited { replacements, first_line, .. }) => Ok((replacements, first_line)),
            Ok(other) => panic!("{other:?}"),
            Err(fault) => Err(fault.kind),
        }
    }

    #[test]
    fn one_occurrence_or_all_are_replaced() {
        let other =
            |count, other_line_endings| Err(FaultKind::Occurrences { count, other_line_endings });
        for (text, old, new, all, result, after) in [
            ("a\nb\nc\n", "b", "x", false, Ok((1, 2)), "a\nx\nc\n"),
            ("a\nb\nb\n", "b", "x", false, other(2, false), "a\nb\nb\n"),
            ("a\nb\nb\n", "b", "", true, Ok((2, 2)), "a\n\n\n"),
            ("aaaaa", "aa", "b", true, Ok((2, 1)), "bba"),
            ("a\r\nb\r\n", "a\nb", "x", false, other(0, true), "a\r\nb\r\n"),
            ("a\nb\n", "a\r\nb", "x", true, other(0, true), "a\nb\n"),
            ("a\nb\n", "c\nd", "x", false, other(0, false), "a\nb\n"),
            ("", "a", "b", true, other(0, false), ""),
            ("\u{feff}a\0b", "\0", "\0\0", false, Ok((1, 1)), "\u{feff}a\0\0b"),
        ] {
            let made = Made::new();
            fs::write(made.path("file"), text).unwrap();
            let call = call(made.path("file"), old, new, all, exactly(text.as_bytes()));
            assert_eq!(edit(&made, call), result, "{text:?} {old:?}");
            assert_eq!(fs::read_to_string(made.path("file")).unwrap(), after);
            made.assert_clean("edited");
        }
    }

    #[test]
    fn what_is_expected_is_judged_before_the_text() {
        let old = hash_bytes(b"a");
        let other = |or_absent| Expected::Exactly { stamp: hash_bytes(b"other"), or_absent };
        for (there, expected, kind) in [
            (None, Expected::Any, FaultKind::NotFound),
            (None, Expected::Absent, FaultKind::NotFound),
            (None, other(true), FaultKind::NotFound),
            (None, other(false), FaultKind::Stale(None)),
            (Some("a"), Expected::Absent, FaultKind::Stale(Some(old))),
            (Some("a"), other(true), FaultKind::Stale(Some(old))),
        ] {
            let made = Made::new();
            if let Some(text) = there {
                fs::write(made.path("file"), text).unwrap();
            }
            let call = call(made.path("file"), "nowhere", "x", false, expected);
            assert_eq!(edit(&made, call), Err(kind), "{there:?} {expected:?}");
        }
        let made = Made::new();
        fs::write(made.path("file"), "a").unwrap();
        for (old, new) in [("", "x"), ("a", "a")] {
            let call = call(made.path("file"), old, new, true, Expected::Any);
            let fault = ask(&made.files, FileCall::Edit(call), None).unwrap_err();
            assert_eq!(fault.errno, libc::EINVAL);
        }
    }

    #[test]
    fn no_edit_makes_a_file_larger_than_one_can_be_edited() {
        let (text, new) = (vec![b'a'; 100_000], "b".repeat(1000));
        let call = call(String::new(), "a", &new, true, Expected::Any);
        let limit = EDIT_BYTES_MAX;
        let kind = FaultKind::TooLarge { size: 100_000_000, limit };
        assert_eq!(replace(&text, &call).unwrap_err().kind, kind);
    }

    /// What an edit means, read slowly: the text, the number of occurrences and the first line.
    fn model(text: &[u8], old: &[u8], new: &[u8]) -> (Vec<u8>, u64, u64) {
        let (mut after, mut count, mut first, mut at) = (Vec::new(), 0, 0, 0);
        while at < text.len() {
            if text[at..].starts_with(old) {
                if count == 0 {
                    first = 1 + text[..at].iter().filter(|byte| **byte == b'\n').count() as u64;
                }
                count += 1;
                after.extend_from_slice(new);
                at += old.len();
            } else {
                after.push(text[at]);
                at += 1;
            }
        }
        (after, count, first)
    }

    /// Few pieces, so that they occur often: line ends, a byte order mark, a NUL, half a character.
    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        let pieces: [&[u8]; 8] =
            [b"a", b"b", b"\n", b"\r\n", b"\r", b"\xef\xbb\xbf", b"\0", b"\xc3"];
        prop::collection::vec(prop::sample::select(pieces.to_vec()), 0..40)
            .prop_map(|pieces| pieces.concat())
    }

    fn text() -> impl Strategy<Value = String> {
        prop::collection::vec(prop::sample::select(vec!["a", "b", "\n", "\r\n", "\r", "\0"]), 1..4)
            .prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn an_edit_is_what_the_model_says(
            bytes in bytes(),
            old in text(),
            new in text(),
            all: bool,
        ) {
            let (after, count, first_line) = model(&bytes, old.as_bytes(), new.as_bytes());
            let call = call(String::new(), &old, &new, all, Expected::Any);
            match replace(&bytes, &call) {
                Ok(replaced) => {
                    prop_assert_eq!(replaced, Replaced { text: after, count, first_line });
                    prop_assert!(all || count == 1);
                }
                Err(Fault { kind: FaultKind::Occurrences { count: told, .. }, .. }) => {
                    prop_assert_eq!(told, count);
                    prop_assert!(count == 0 || (count > 1 && !all));
                }
                Err(fault) => prop_assert!(false, "{:?}", fault),
            }
        }
    }
}
