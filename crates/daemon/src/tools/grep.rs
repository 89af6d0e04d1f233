//! `grep`: lines in files.

use cofferdam_files::call::{Account, FileMatches, Grep, GrepMode};
use serde::Serialize;

use crate::files::{Files, GrepPart};
use crate::tools::errors::{Doing, Failed, file_error};
use crate::tools::paths::{self, WORKSPACE};
use crate::tools::schema::{Arguments, Definition, Field, Kind};
use crate::tools::search::{self, List, Names, Skipped};
use crate::tools::text::{BUDGET_BYTES, LINE_UNITS_MAX, escaped, note};
use crate::tools::to_json;

/// Matches of each file without a limit in the call.
const LIMIT_DEFAULT: u64 = 100;

/// Most matches of each file.
const LIMIT_MAX: u64 = 1000;

/// Most lines around each match.
const CONTEXT_MAX: u64 = 100;

/// The tool.
pub(crate) static DEFINITION: Definition = Definition {
    name: "grep",
    about: "Finds lines in the files of the workspace, hidden files too. Patterns are regular \
            expressions in the syntax of Rust's regex crate, without look-around and \
            back-references. Matches are shown as PATH:LINE:TEXT, lines around them as \
            PATH-LINE-TEXT, blocks with -- between; a line above 2000 characters is cut around its \
            match. What ignore files (.gitignore) exclude and .git are left out, unless path names \
            them; skipped counts what was left out. At most 51200 bytes are shown. It does not \
            count \
            as reading a file.",
    read_only: true,
    fields: &[
        Field {
            name: "pattern",
            about: "Regular expression, or a text with literal.",
            kind: Kind::NonEmptyText,
            required: true,
        },
        Field {
            name: "path",
            about: "File or directory to search: an absolute path, or one beginning with $HOME/. \
                    Default /workspace.",
            kind: Kind::Text,
            required: false,
        },
        Field {
            name: "glob",
            about: "Only files whose path below path, or whose name, matches this pattern of glob, \
                    for example *.rs.",
            kind: Kind::NonEmptyText,
            required: false,
        },
        Field {
            name: "ignoreCase",
            about: "Ignore letter case. Default false.",
            kind: Kind::Flag,
            required: false,
        },
        Field {
            name: "literal",
            about: "Take the pattern as a text. Default false.",
            kind: Kind::Flag,
            required: false,
        },
        Field {
            name: "context",
            about: "Lines to show before and after each match. Default 0.",
            kind: Kind::Count { min: 0, max: Some(CONTEXT_MAX) },
            required: false,
        },
        Field {
            name: "limit",
            about: "Most matches of each file. Default 100.",
            kind: Kind::Count { min: 1, max: Some(LIMIT_MAX) },
            required: false,
        },
        Field {
            name: "type",
            about: "Only files of this type, for example rust, py or ts.",
            kind: Kind::NonEmptyText,
            required: false,
        },
        Field {
            name: "mode",
            about: "What to show: matching lines (content), paths of files with a match (files), \
            or \
                    PATH:COUNT of matching lines (count). Default content.",
            kind: Kind::Choice(&["content", "files", "count"]),
            required: false,
        },
        Field {
            name: "multiline",
            about: "A match may span lines. Default false.",
            kind: Kind::Flag,
            required: false,
        },
    ],
};

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Output<'a> {
    content: &'a str,
    match_count: u64,
    path: &'a str,
    truncated: bool,
    skipped: Skipped,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
}

/// Calls it.
pub(crate) async fn call(files: &Files, mut input: Arguments) -> Result<String, Failed> {
    let pattern = search::pattern("pattern", "grep", input.required_text("pattern")?)?;
    let glob = input.text("glob").map(|glob| search::pattern("glob", "grep", glob)).transpose()?;
    let file_type =
        input.text("type").map(|name| search::pattern("type", "grep", name)).transpose()?;
    let given = input.text("path").unwrap_or_else(|| WORKSPACE.to_owned());
    let narrow = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    let limit = narrow(input.count("limit").unwrap_or(LIMIT_DEFAULT).clamp(1, LIMIT_MAX));
    let mode = match input.text("mode").as_deref() {
        Some("files") => GrepMode::Files,
        Some("count") => GrepMode::Count,
        _ => GrepMode::Content,
    };
    let grep = Grep {
        pattern,
        path: paths::absolute("path", &given)?,
        glob,
        file_type,
        ignore_case: input.flag("ignoreCase"),
        literal: input.flag("literal"),
        multiline: input.flag("multiline"),
        context: narrow(input.count("context").unwrap_or(0).min(CONTEXT_MAX)),
        limit,
        mode,
        include_ignored: false,
        max_line_chars: LINE_UNITS_MAX,
        max_bytes: Some(BUDGET_BYTES as u64),
    };
    let context = grep.context > 0;
    let failed = |error| file_error(Doing::Grep, &given, error);
    let mut matches = files.grep(grep).await.map_err(failed)?;
    let mut page = Page::new(mode, context);
    loop {
        match matches.next().await.map_err(failed)? {
            GrepPart::File(file) => page.add(&file),
            GrepPart::End { canonical, out_of_bytes, account, .. } => {
                return Ok(page.render(&canonical, limit, out_of_bytes, &account));
            }
        }
    }
}

/// What is shown of a search.
#[derive(Debug)]
struct Page {
    mode: GrepMode,
    /// Whether blocks of lines are separated.
    blocks: bool,
    list: List,
    matches: u64,
    limit_reached: bool,
    lines_cut: bool,
    lossy: Names,
    binary: Names,
    /// Path and number of the line that was added last.
    last: Option<(Vec<u8>, u64)>,
}

impl Page {
    fn new(mode: GrepMode, blocks: bool) -> Self {
        Self {
            mode,
            blocks,
            list: List::default(),
            matches: 0,
            limit_reached: false,
            lines_cut: false,
            lossy: Names::default(),
            binary: Names::default(),
            last: None,
        }
    }

    /// Adds a part of a file.
    fn add(&mut self, file: &FileMatches) {
        let path = escaped(&file.path);
        if file.lossy {
            self.lossy.add(&file.path);
        }
        if file.binary {
            self.binary.add(&file.path);
        }
        self.limit_reached |= file.limit_reached && self.mode == GrepMode::Content;
        match self.mode {
            GrepMode::Files if file.matches > 0 => {
                self.matches += u64::from(self.list.push(&[&path]));
            }
            GrepMode::Count if file.matches > 0 => {
                if self.list.push(&[&path, ":", &file.matches.to_string()]) {
                    self.matches += file.matches;
                }
            }
            GrepMode::Files | GrepMode::Count => {}
            GrepMode::Content => {
                for line in &file.lines {
                    let follows = self.last.as_ref().is_some_and(|(last, number)| {
                        *last == file.path && number.saturating_add(1) == line.number
                    });
                    let separated = self.blocks && !follows && self.last.is_some();
                    let before = if separated { "--\n" } else { "" };
                    let between = if line.matched { ":" } else { "-" };
                    let number = line.number.to_string();
                    if !self.list.push(&[before, &path, between, &number, between, &line.text]) {
                        return;
                    }
                    self.matches += u64::from(line.matched);
                    self.lines_cut |= line.cut;
                    self.last = Some((file.path.clone(), line.number));
                }
            }
        }
    }

    fn render(self, path: &str, limit: u32, out_of_bytes: bool, account: &Account) -> String {
        let out_of_bytes = out_of_bytes || self.list.is_full();
        let mut footer = Vec::new();
        if self.limit_reached {
            footer.push(format!(
                "Match limit reached ({limit}). Use a larger limit or more specific pattern."
            ));
        }
        if out_of_bytes {
            footer.push(
                "Output truncated due to size. Use a more specific path or pattern.".to_owned(),
            );
        }
        let truncated = self.limit_reached || out_of_bytes || self.lines_cut;
        let skipped = Skipped::from(account);
        let mut sentences = Vec::new();
        if self.matches == 0 {
            sentences.extend(skipped.sentence());
        }
        sentences.extend(self.lossy.sentence("with bytes that are not UTF-8, shown as U+FFFD"));
        sentences
            .extend(self.binary.sentence("with NUL bytes, searched only up to the first of them"));
        if self.lines_cut {
            sentences.push("Lines above 2000 characters are cut around their match.".to_owned());
        }
        if !account.complete && !truncated {
            sentences.push("The search ended before everything was seen.".to_owned());
        }
        let footer = (!footer.is_empty()).then(|| format!("[{}]", footer.join(" ")));
        let content = self.list.finish("No matches found", footer);
        let output = Output {
            content: &content,
            match_count: self.matches,
            path,
            truncated,
            skipped,
            note: note(sentences),
        };
        to_json(&output, content.len())
    }
}

#[cfg(test)]
mod tests {
    use cofferdam_files::call::Line;
    use serde_json::{Value, json};

    use super::*;

    fn line(number: u64, text: &str, matched: bool) -> Line {
        Line { number, text: text.to_owned(), matched, cut: false }
    }

    fn file(path: &str, lines: Vec<Line>) -> FileMatches {
        let matches = lines.iter().filter(|line| line.matched).count() as u64;
        FileMatches {
            path: path.as_bytes().to_vec(),
            lines,
            matches,
            limit_reached: false,
            lossy: false,
            binary: false,
        }
    }

    fn shown(page: Page) -> Value {
        let account = Account { complete: true, ..Account::default() };
        serde_json::from_str(&page.render("/workspace", 100, false, &account)).unwrap()
    }

    #[test]
    fn matches_and_context_differ_and_blocks_are_separated() {
        let mut page = Page::new(GrepMode::Content, true);
        page.add(&file("/c", vec![line(1, "a", false), line(2, "HIT", true), line(3, "b", false)]));
        // The same file goes on in another part, without a hole.
        page.add(&file("/c", vec![line(4, "HIT", true), line(9, "HIT", true)]));
        page.add(&file("/d", vec![line(10, "HIT", true)]));
        let shown = shown(page);
        assert_eq!(
            shown["content"],
            "/c-1-a\n/c:2:HIT\n/c-3-b\n/c:4:HIT\n--\n/c:9:HIT\n--\n/d:10:HIT"
        );
        assert_eq!((&shown["matchCount"], &shown["truncated"]), (&json!(4), &json!(false)));
    }

    #[test]
    fn without_context_nothing_separates_matches() {
        let mut page = Page::new(GrepMode::Content, false);
        page.add(&file("/name:52:f", vec![line(1, "x:1:n", true), line(5, "n\r", true)]));
        assert_eq!(shown(page)["content"], "/name:52:f:1:x:1:n\n/name:52:f:5:n\r");
    }

    #[test]
    fn files_and_counts_have_a_line_for_each_file() {
        let some = |matches| FileMatches { matches, ..file("/a", Vec::new()) };
        let mut page = Page::new(GrepMode::Files, false);
        page.add(&some(3));
        assert_eq!(shown(page)["content"], "/a");
        let mut page = Page::new(GrepMode::Count, false);
        page.add(&some(3));
        let shown = shown(page);
        assert_eq!((&shown["content"], &shown["matchCount"]), (&json!("/a:3"), &json!(3)));
    }

    #[test]
    fn no_match_is_a_text_of_its_own_and_says_what_was_skipped() {
        let account = Account { ignored: 1, complete: true, ..Account::default() };
        let text = Page::new(GrepMode::Content, false).render("/workspace", 100, false, &account);
        let shown: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (&shown["content"], &shown["matchCount"]),
            (&json!("No matches found"), &json!(0))
        );
        assert!(shown["note"].as_str().unwrap().contains("1 excluded by ignore files"));
    }

    #[test]
    fn footers_say_why_there_is_more() {
        let mut page = Page::new(GrepMode::Content, false);
        page.add(&FileMatches { limit_reached: true, ..file("/a", vec![line(1, "x", true)]) });
        let account = Account { complete: true, ..Account::default() };
        let shown: Value =
            serde_json::from_str(&page.render("/workspace", 7, true, &account)).unwrap();
        assert_eq!(
            shown["content"],
            "/a:1:x\n\n[Match limit reached (7). Use a larger limit or more specific pattern. \
            Output truncated due to size. Use a more specific path or pattern.]"
        );
        assert_eq!(shown["truncated"], true);
    }

    #[test]
    fn lossy_and_binary_files_are_named() {
        let mut page = Page::new(GrepMode::Content, false);
        page.add(&FileMatches { lossy: true, ..file("/l", vec![line(1, "caf\u{fffd}", true)]) });
        page.add(&FileMatches { binary: true, ..file("/z.c", vec![line(1, "needle", true)]) });
        page.add(&FileMatches { binary: true, ..file("/y.c", Vec::new()) });
        let shown = shown(page);
        assert_eq!(
            shown["note"],
            "1 file with bytes that are not UTF-8, shown as U+FFFD: /l. 2 files with NUL bytes, \
            searched only up to the first of them: /z.c, /y.c."
        );
        assert_eq!(shown["matchCount"], 2);
    }

    #[test]
    fn the_budget_ends_the_page() {
        let mut page = Page::new(GrepMode::Content, false);
        for number in 1..=100 {
            page.add(&file("/a", vec![line(number, &"x".repeat(1000), true)]));
        }
        let shown = shown(page);
        let content = shown["content"].as_str().unwrap();
        assert!(
            content.ends_with(
                "\n\n[Output truncated due to size. Use a more specific path or pattern.]"
            )
        );
        assert!(content.len() <= BUDGET_BYTES + 100);
        assert_eq!(shown["matchCount"], content.lines().count() as u64 - 2);
    }
}
