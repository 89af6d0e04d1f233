//! Writing a file.

use std::os::fd::OwnedFd;

use crate::call::{Answer, Content, Fault, FaultKind, FileKind, Guard, Write};
use crate::fault::found;
use crate::replace::{Body, Replace};
use crate::resolve::{Last, Place, kind_of, resolve, resolve_making_parents};
use crate::serve::{Files, Reply};

/// Writes a file.
pub(crate) fn write(
    files: &Files,
    call: Write,
    content: Option<OwnedFd>,
    reply: &dyn Reply,
) -> Result<Answer, Fault> {
    let body = match (call.content, content) {
        (Content::Inline(bytes), _) => Body::Bytes(bytes),
        (Content::Descriptor { size }, Some(file)) => Body::File { file, size },
        (Content::Descriptor { .. }, None) => {
            return Err(found(FaultKind::Other, "take the content: its descriptor is missing"));
        }
    };
    let place = find(files, &call.path, &call.guard, call.parents)?;
    let canonical = place.canonical_text()?;
    let _held = files.locks.hold(&place.canonical, reply)?;
    let replace = Replace {
        store: &files.store,
        syncs: &files.syncs,
        steps: &files.steps,
        place: &place,
        canonical: &canonical,
        expected: call.guard.expected,
        body: &body,
        keep_bom: call.keep_bom,
        mode: call.mode,
        reply,
    };
    replace.run().map(Answer::Written)
}

/// Where a file is to be written.
fn find(files: &Files, path: &str, guard: &Guard, parents: bool) -> Result<Place, Fault> {
    // What can only be a directory is refused before directories are made for it.
    let means_directory = matches!(path.rsplit('/').next(), Some("" | "." | ".."));
    let place = match resolve(path, Last::Follow) {
        Err(Fault { kind: FaultKind::NotFound, .. }) if parents && !means_directory => {
            if let Some(canonical) = foresee(path) {
                leads_to(guard, &canonical)?;
            }
            resolve_making_parents(path, Last::Follow, &files.syncs)?
        }
        place => place?,
    };
    refuse_directory(&place)?;
    leads_to(guard, &place.canonical_text()?)?;
    Ok(place)
}

/// The canonical path that `path` will have once its missing directories are made; `None` where
/// that cannot be told.
fn foresee(path: &str) -> Option<String> {
    let mut missing: Vec<&str> = Vec::new();
    let mut rest = path;
    while let Some((above, name)) = rest.rsplit_once('/') {
        match name {
            "" | "." => {}
            ".." => return None,
            name => missing.push(name),
        }
        let above = if above.is_empty() { "/" } else { above };
        match resolve(above, Last::Follow) {
            Ok(place) => {
                let found = place.canonical_text().ok()?;
                let names = missing.iter().rev().map(|name| format!("/{name}"));
                return Some(found.trim_end_matches('/').to_owned() + &names.collect::<String>());
            }
            Err(Fault { kind: FaultKind::NotFound, .. }) => rest = above,
            Err(_) => return None,
        }
    }
    None
}

/// Refuses a place where there is a directory, or only one could be.
pub(crate) fn refuse_directory(place: &Place) -> Result<(), Fault> {
    let kind = place.look()?.map(|stat| kind_of(stat.st_mode));
    match kind {
        Some(FileKind::Directory) => Err(found(FaultKind::IsDirectory, "open")),
        Some(_) if place.must_be_directory => Err(found(FaultKind::NotDirectory, "open")),
        None if place.must_be_directory => Err(found(FaultKind::IsDirectory, "open")),
        _ => Ok(()),
    }
}

/// Refuses a path that leads elsewhere than when it was judged.
pub(crate) fn leads_to(guard: &Guard, canonical: &str) -> Result<(), Fault> {
    match &guard.canonical {
        Some(judged) if judged != canonical => {
            Err(found(FaultKind::Elsewhere { canonical: canonical.to_owned() }, "resolve"))
        }
        _ => Ok(()),
    }
}
