//! What `glob` and `grep` have in common: the account of a search, and lists within a budget.

use cofferdam_files::call::Account;
use serde::Serialize;

use crate::tools::errors::ToolError;
use crate::tools::paths;
use crate::tools::text::{BUDGET_BYTES, BUDGET_LINES, counted, escaped, note};

/// Longest pattern, in bytes. A longer one is no pattern that a person or a model means.
const PATTERN_BYTES_MAX: usize = 64 * 1024;

/// Names that a note lists.
const NAMES_SHOWN_MAX: usize = 10;

/// Files and directories that a search met and did not look into, by reason; and files that it did
/// look into although their names are not UTF-8.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Skipped {
    ignored: u64,
    hidden: u64,
    binary: u64,
    too_large: u64,
    unreadable: u64,
    non_utf8_name: u64,
}

impl From<&Account> for Skipped {
    fn from(account: &Account) -> Self {
        Self {
            ignored: account.ignored,
            hidden: account.hidden,
            binary: account.binary,
            too_large: account.too_large,
            unreadable: account.unreadable,
            non_utf8_name: account.non_utf8_name,
        }
    }
}

impl Skipped {
    /// Sentences about what was skipped or has an odd name; `None` when nothing was.
    pub(crate) fn sentence(&self) -> Option<String> {
        let reasons = [
            (self.ignored, "excluded by ignore files"),
            (self.hidden, ".git directories or temporary files of the file tools"),
            (self.binary, "binary"),
            (self.too_large, "too large"),
            (self.unreadable, "unreadable"),
        ];
        let parts: Vec<String> = reasons
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, reason)| format!("{count} {reason}"))
            .collect();
        let skipped = (!parts.is_empty()).then(|| {
            format!(
                "Not searched: {}. A path that names such a file or directory searches it.",
                parts.join(", ")
            )
        });
        let odd = (self.non_utf8_name > 0).then(|| {
            let files = counted(self.non_utf8_name, "file", "files");
            format!("Searched too, and shown escaped: {files} with a name that is not UTF-8.")
        });
        note(skipped.into_iter().chain(odd).collect())
    }
}

/// Checks a pattern.
pub(crate) fn pattern(field: &str, tool: &str, pattern: String) -> Result<String, ToolError> {
    if pattern.len() > PATTERN_BYTES_MAX {
        let reason =
            format!("{field} is {} bytes long, the limit is {PATTERN_BYTES_MAX}.", pattern.len());
        return Err(ToolError::invalid_input(tool, &reason, "Nothing was searched."));
    }
    paths::without_nul(field, &pattern)?;
    Ok(pattern)
}

/// Lines that are collected until the budget is used up.
#[derive(Debug, Default)]
pub(crate) struct List {
    text: String,
    lines: usize,
    full: bool,
}

impl List {
    /// Adds a line, made of parts; false when it does not fit. From then on nothing fits.
    pub(crate) fn push(&mut self, parts: &[&str]) -> bool {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        // A first line is kept however long it is, so that there is always an answer.
        let fits = self.lines < BUDGET_LINES && self.text.len() + length < BUDGET_BYTES;
        if self.full || !(fits || self.lines == 0) {
            self.full = true;
            return false;
        }
        if self.lines > 0 {
            self.text.push('\n');
        }
        parts.iter().for_each(|part| self.text.push_str(part));
        self.lines += 1;
        true
    }

    /// Whether a line did not fit.
    pub(crate) fn is_full(&self) -> bool {
        self.full
    }

    /// The lines, or `nothing` when there are none, and a footer after a blank line.
    pub(crate) fn finish(self, nothing: &str, footer: Option<String>) -> String {
        let mut text = if self.lines == 0 { nothing.to_owned() } else { self.text };
        if let Some(footer) = footer {
            text.push_str("\n\n");
            text.push_str(&footer);
        }
        text
    }
}

/// Some names in a sentence.
#[derive(Debug, Default)]
pub(crate) struct Names {
    shown: Vec<String>,
    count: u64,
    last: Option<Vec<u8>>,
}

impl Names {
    /// Adds a name, unless it is the one that was added last.
    pub(crate) fn add(&mut self, path: &[u8]) {
        if self.last.as_deref() == Some(path) {
            return;
        }
        self.last = Some(path.to_vec());
        self.count += 1;
        if self.shown.len() < NAMES_SHOWN_MAX {
            self.shown.push(escaped(path).into_owned());
        }
    }

    /// `2 files WHAT: a, b.`; `None` without names.
    pub(crate) fn sentence(&self, what: &str) -> Option<String> {
        let more = if self.count > self.shown.len() as u64 { ", …" } else { "" };
        (self.count > 0).then(|| {
            let files = counted(self.count, "file", "files");
            format!("{files} {what}: {}{more}.", self.shown.join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_was_skipped_is_told_by_reason() {
        let account = Account { ignored: 2, unreadable: 1, special: 5, ..Account::default() };
        assert_eq!(
            Skipped::from(&account).sentence().unwrap(),
            "Not searched: 2 excluded by ignore files, 1 unreadable. A path that names such a \
            file or directory searches it."
        );
        assert_eq!(Skipped::from(&Account::default()).sentence(), None);
        let account = Account { non_utf8_name: 1, searched: 5, ..Account::default() };
        assert_eq!(
            Skipped::from(&account).sentence().unwrap(),
            "Searched too, and shown escaped: 1 file with a name that is not UTF-8."
        );
    }

    proptest! {
        #[test]
        fn a_list_keeps_its_first_lines_within_the_budget(
            lines in proptest::collection::vec((0_usize..9_000).prop_map(|n| "x".repeat(n)), 0..40)
        ) {
            let mut list = List::default();
            let kept = lines.iter().take_while(|line| list.push(&[line])).count();
            prop_assert_eq!(list.is_full(), kept < lines.len());
            let text = list.finish("", None);
            prop_assert!(text.len() < BUDGET_BYTES);
            prop_assert_eq!(text, lines[..kept].join("\n"));
        }
    }

    #[test]
    fn a_list_has_at_most_so_many_lines_and_always_one() {
        let mut list = List::default();
        assert!(list.push(&[&"x".repeat(BUDGET_BYTES + 1)]));
        assert!(!list.push(&["y"]));
        let mut list = List::default();
        let pushed = (0..BUDGET_LINES + 5).filter(|_| list.push(&["", "z"])).count();
        assert_eq!(pushed, BUDGET_LINES);
    }

    #[test]
    fn many_names_are_counted_and_not_all_listed() {
        let mut names = Names::default();
        assert_eq!(names.sentence("are lossy"), None);
        for number in 0..12 {
            names.add(format!("/f{number}").as_bytes());
            names.add(format!("/f{number}").as_bytes());
        }
        let sentence = names.sentence("are lossy").unwrap();
        assert!(sentence.starts_with("12 files are lossy: /f0, /f1"), "{sentence}");
        assert!(sentence.ends_with("/f9, …."), "{sentence}");
    }
}
