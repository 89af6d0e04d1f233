//! Patterns of file names.
//!
//! `*` and `?` stay within a component, `**` crosses them, `[..]` and `{..,..}` are as usual, and a
//! backslash quotes. Patterns are compared byte by byte and case counts: `?` and `[..]` stand for
//! one byte, so they match no character outside of ASCII.

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

use super::bad_pattern;
use crate::call::Fault;

/// A pattern, cut where its first wildcard begins.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Split {
    /// The directories before, without quoting, each with a slash after it.
    pub(super) directory: String,
    /// What follows.
    pub(super) rest: Rest,
}

/// The end of a pattern.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Rest {
    /// A name, without quoting: the whole pattern has no wildcard.
    Name(String),
    /// With wildcards from its first component on.
    Wild(String),
}

/// Cuts a pattern. Components that are `.` or empty are dropped; `..` is refused, and what can
/// match no file.
pub(super) fn split(pattern: &str) -> Result<Split, Fault> {
    if pattern.is_empty() {
        return Err(bad_pattern("the pattern is empty\nhint: ** finds all files"));
    }
    if pattern.contains('\0') {
        return Err(bad_pattern("the pattern holds a NUL, and no path does"));
    }
    if pattern.starts_with('!') {
        return Err(bad_pattern(
            "a pattern that excludes (with ! at its start) finds nothing\nhint: say what to find; \
             \\! is a name's exclamation mark",
        ));
    }
    if pattern.split('/').any(|component| component == "..") {
        return Err(bad_pattern("the pattern leads upwards (..)\nhint: name a path to search in"));
    }
    if pattern.ends_with('/') {
        return Err(bad_pattern(format!(
            "the pattern ends with a slash, and only files are found\nhint: {pattern}** finds all \
             files in the directory"
        )));
    }
    let pattern = tidy(pattern);
    let wild = first_wildcard(&pattern);
    let cut = pattern[..wild.unwrap_or(pattern.len())].rfind('/').map_or(0, |slash| slash + 1);
    let (directory, rest) = pattern.split_at(cut);
    let rest = match wild {
        Some(_) => Rest::Wild(rest.to_owned()),
        None => Rest::Name(unquote(rest)),
    };
    Ok(Split { directory: unquote(directory), rest })
}

/// Without components that are `.` or empty; a slash at the start stays.
fn tidy(pattern: &str) -> String {
    let components: Vec<&str> =
        pattern.split('/').filter(|component| !matches!(*component, "" | ".")).collect();
    let start = if pattern.starts_with('/') { "/" } else { "" };
    format!("{start}{}", components.join("/"))
}

/// Where the first wildcard is that no backslash quotes.
fn first_wildcard(pattern: &str) -> Option<usize> {
    let mut quoted = false;
    pattern.char_indices().find_map(|(at, character)| {
        if quoted {
            quoted = false;
            return None;
        }
        quoted = character == '\\';
        matches!(character, '*' | '?' | '[' | '{').then_some(at)
    })
}

/// Without the backslashes that quote.
fn unquote(pattern: &str) -> String {
    let mut plain = String::with_capacity(pattern.len());
    let mut characters = pattern.chars();
    while let Some(character) = characters.next() {
        plain.push(match character {
            // A backslash at the end stands for itself.
            '\\' => characters.next().unwrap_or('\\'),
            other => other,
        });
    }
    plain
}

/// Makes a pattern ready to be compared with paths.
pub(super) fn compile(pattern: &str) -> Result<GlobSet, Fault> {
    let glob = GlobBuilder::new(pattern)
        .literal_separator(true)
        .backslash_escape(true)
        .empty_alternates(true)
        .build()
        .and_then(|glob| GlobSetBuilder::new().add(glob).build());
    glob.map_err(|error| {
        bad_pattern(format!("{error}\nhint: \\[, \\{{ and \\* are these characters themselves"))
    })
}

/// Most directories between the base and a file that the pattern matches; `None` when there is no
/// bound, or it is not clear.
pub(super) fn depth_max(pattern: &str) -> Option<usize> {
    if pattern.contains("**") || pattern.contains('{') || pattern.contains('[') {
        return None;
    }
    Some(pattern.bytes().filter(|byte| *byte == b'/').count())
}

/// Whether a path or a pattern names a git directory.
pub(super) fn names_git(path: &str) -> bool {
    path.split('/').any(|component| component == ".git")
}
