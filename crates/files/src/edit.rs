//! Replacing a text in a file.

use memchr::memmem;
use rustix::io::Errno;

use crate::call::{Answer, EDIT_BYTES_MAX, Edit, Expected, Fault, FaultKind};
use crate::fault::{at, found, kernel};
use crate::replace::{Attempt, Body, Old, Replace, judge};
use crate::resolve::{Last, resolve};
use crate::serve::{Files, Reply};
use crate::stamp::{Parts, hash_bytes};
use crate::write::{leads_to, refuse_directory};

/// How often an edit starts over because somebody else wrote in between.
const ATTEMPTS_MAX: u32 = 3;

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
    Err(found(FaultKind::Stale(there), "compare"))
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
