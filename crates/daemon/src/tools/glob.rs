//! `glob`: files by name.

use cofferdam_files::call::Glob;
use serde::Serialize;

use crate::files::{Files, Found};
use crate::tools::errors::{Doing, Failed, file_error};
use crate::tools::paths::{self, WORKSPACE};
use crate::tools::schema::{Arguments, Definition, Field, Kind};
use crate::tools::search::{self, List, Skipped};
use crate::tools::text::{BUDGET_BYTES, counted, escaped, note};
use crate::tools::to_json;

/// Results without a limit in the call.
const LIMIT_DEFAULT: u64 = 100;

/// Most results.
const LIMIT_MAX: u64 = 1000;

/// The tool.
pub(crate) static DEFINITION: Definition = Definition {
    name: "glob",
    about: "Finds files of the workspace by name, in the order of their paths, hidden ones too. * \
    and \
            ? stay within a component, ** crosses them, [..] and {..,..} as usual, \\ quotes; a \
            pattern that is exactly the path of a file finds it. Letter case counts. Patterns are \
            compared with paths from path on: start with **/ to find a name at any depth. What \
            ignore files (.gitignore) exclude and .git are left out, unless path or the pattern \
            names \
            them; skipped counts what was left out. Results are absolute paths, one a line; one \
            with \
            control characters or not in UTF-8 is shown with \\n and \\xNN and doubled \
            backslashes.",
    read_only: true,
    fields: &[
        Field {
            name: "pattern",
            about: "The pattern, for example **/*.rs or src/*.{ts,tsx}; an absolute one is taken \
            as \
                    it is.",
            kind: Kind::NonEmptyText,
            required: true,
        },
        Field {
            name: "path",
            about: "Directory to search: an absolute path, or one beginning with $HOME/. Default \
                    /workspace.",
            kind: Kind::Text,
            required: false,
        },
        Field {
            name: "limit",
            about: "Most results. Default 100.",
            kind: Kind::Count { min: 1, max: Some(LIMIT_MAX) },
            required: false,
        },
    ],
};

#[derive(Debug, Serialize)]
struct Output<'a> {
    content: &'a str,
    count: usize,
    path: &'a str,
    truncated: bool,
    skipped: Skipped,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
}

/// Calls it.
pub(crate) async fn call(files: &Files, mut input: Arguments) -> Result<String, Failed> {
    let pattern = search::pattern("pattern", "glob", input.required_text("pattern")?)?;
    let given = input.text("path").unwrap_or_else(|| WORKSPACE.to_owned());
    let limit = input.count("limit").unwrap_or(LIMIT_DEFAULT).clamp(1, LIMIT_MAX);
    let glob = Glob {
        pattern,
        path: paths::absolute("path", &given)?,
        limit: u32::try_from(limit).unwrap_or(u32::MAX),
        max_bytes: BUDGET_BYTES as u64,
        include_ignored: false,
    };
    match files.glob(glob).await {
        Ok(found) => Ok(render(&found)),
        Err(error) => Err(file_error(Doing::Glob, &given, error)),
    }
}

fn render(found: &Found) -> String {
    let mut list = List::default();
    let mut changed = 0;
    let mut count = 0;
    for path in &found.paths {
        let shown = escaped(path);
        if !list.push(&[&shown]) {
            break;
        }
        count += 1;
        changed += u64::from(shown.as_bytes() != path.as_slice());
    }
    let truncated = found.truncated || list.is_full();
    let footer = truncated.then(|| {
        format!(
            "(Results truncated: showing first {count} results out of more. Use a more specific \
             path or pattern to narrow results.)"
        )
    });
    let skipped = Skipped::from(&found.account);
    let mut sentences = Vec::new();
    if count == 0 {
        sentences.extend(skipped.sentence());
    }
    if changed > 0 {
        let paths = counted(changed, "path is", "paths are");
        sentences.push(format!(
            "{paths} shown with \\n and \\xNN for control characters and bytes that are not UTF-8, \
             and with doubled backslashes."
        ));
    }
    if !found.account.complete && !truncated {
        sentences.push("The search ended before everything was seen.".to_owned());
    }
    let content = list.finish("No files found", footer);
    let output = Output {
        content: &content,
        count,
        path: &found.canonical,
        truncated,
        skipped,
        note: note(sentences),
    };
    to_json(&output, content.len())
}

#[cfg(test)]
mod tests {
    use cofferdam_files::call::Account;
    use serde_json::{Value, json};

    use super::*;

    fn found(paths: &[&[u8]]) -> Found {
        Found {
            canonical: "/workspace".to_owned(),
            paths: paths.iter().map(|path| path.to_vec()).collect(),
            truncated: false,
            account: Account { complete: true, ..Account::default() },
        }
    }

    fn shown(found: &Found) -> Value {
        serde_json::from_str(&render(found)).unwrap()
    }

    #[test]
    fn paths_come_one_a_line() {
        let expected = json!({
            "content": "/workspace/a b\n/workspace/c", "count": 2, "path": "/workspace",
            "truncated": false,
            "skipped": { "ignored": 0, "hidden": 0, "binary": 0, "too_large": 0, "unreadable": 0,
                         "non_utf8_name": 0 },
        });
        assert_eq!(shown(&found(&[b"/workspace/a b", b"/workspace/c"])), expected);
    }

    #[test]
    fn nothing_found_says_what_was_not_searched() {
        let mut nothing = found(&[]);
        assert_eq!(shown(&nothing).get("note"), None);
        nothing.account.ignored = 3;
        let shown = shown(&nothing);
        assert_eq!((&shown["content"], &shown["count"]), (&json!("No files found"), &json!(0)));
        assert!(shown["note"].as_str().unwrap().starts_with("Not searched: 3 excluded by ignore"));
    }

    #[test]
    fn more_results_are_said_in_the_footer() {
        let cut = Found { truncated: true, ..found(&[b"/a"]) };
        let shown = shown(&cut);
        assert_eq!(
            shown["content"],
            "/a\n\n(Results truncated: showing first 1 results out of more. Use a more specific \
            path or pattern to narrow results.)"
        );
        assert_eq!((&shown["count"], &shown["truncated"]), (&json!(1), &json!(true)));
    }

    #[test]
    fn a_name_with_a_line_feed_stays_on_its_line_and_is_noted() {
        let shown = shown(&found(&[b"/new\nline", b"/bad\xff"]));
        assert_eq!(shown["content"], "/new\\nline\n/bad\\xff");
        assert!(shown["note"].as_str().unwrap().starts_with("2 paths are shown"));
    }

    #[test]
    fn escapes_count_for_the_budget() {
        let path = [b'\x01'; 4000];
        let shown = shown(&found(&[&path[..]; 10]));
        assert_eq!((&shown["count"], &shown["truncated"]), (&json!(3), &json!(true)));
    }
}
