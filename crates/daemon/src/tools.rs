//! The tools that a model calls, exactly as it sees them: JSON in, JSON out.
//!
//! A thin shell over processes and files. Each tool has a file: its description, its fields, and
//! how an answer is told. [`schema`] checks inputs against the same table that a model is told,
//! [`errors`] has every sentence about a failure, [`text`] keeps results within a budget.

mod bash;
mod edit_file;
mod errors;
mod glob;
mod grep;
mod jobs;
mod output;
mod paths;
mod read_file;
mod schema;
mod search;
mod text;
mod write_file;

use std::fmt::Write as _;
use std::sync::Arc;

use serde::Serialize;

use crate::files::{Caller, Files};
use crate::status::Fault;
use crate::supervisor::Handle;
pub(crate) use crate::tools::bash::Background;
use crate::tools::bash::Bash;
use crate::tools::errors::{Failed, ToolError, excerpt};
use crate::tools::schema::{Definition, as_markdown};
use crate::validate::Rules;

/// Every tool, in the order in which they are listed.
pub(crate) static DEFINITIONS: [&Definition; 6] = [
    &bash::DEFINITION,
    &read_file::DEFINITION,
    &write_file::DEFINITION,
    &edit_file::DEFINITION,
    &glob::DEFINITION,
    &grep::DEFINITION,
];

/// Bytes of a tool's name that an error repeats.
const NAME_SHOWN_MAX: usize = 80;

/// Room for everything of a result but its longest texts.
const RESULT_BYTES_EXPECTED: usize = 256;

/// What a tool answers.
#[derive(Debug)]
pub(crate) struct Answer {
    /// A JSON object.
    pub(crate) output_json: String,
    /// Whether it is `{"error": ...}`.
    pub(crate) is_error: bool,
}

/// The tools of one workspace.
#[derive(Debug)]
pub(crate) struct Tools {
    files: Files,
    bash: Bash,
}

impl Tools {
    /// Over a cell's processes and files.
    pub(crate) fn new(
        supervisor: Handle,
        rules: Arc<Rules>,
        files: Files,
        background: Background,
    ) -> Self {
        Self { bash: Bash::new(supervisor, rules, files.clone(), background), files }
    }

    /// Calls a tool. A [`Fault`] means that the call could not be carried out.
    pub(crate) async fn call(
        &self,
        caller: &Caller,
        name: &str,
        input_json: &str,
    ) -> Result<Answer, Fault> {
        match self.try_call(caller, name, input_json).await {
            Ok(output_json) => Ok(Answer { output_json, is_error: false }),
            Err(Failed::Tool(error)) => Ok(Answer { output_json: error.to_json(), is_error: true }),
            Err(Failed::Call(fault)) => Err(fault),
        }
    }

    async fn try_call(
        &self,
        caller: &Caller,
        name: &str,
        input_json: &str,
    ) -> Result<String, Failed> {
        let Some(definition) = DEFINITIONS.into_iter().find(|one| one.name == name) else {
            return Err(unknown(name).into());
        };
        let input = definition.check(input_json)?;
        match definition.name {
            "bash" => self.bash.call(caller, input).await,
            "read_file" => read_file::call(&self.files, caller, input).await,
            "write_file" => write_file::call(&self.files, caller, input).await,
            "edit_file" => edit_file::call(&self.files, caller, input).await,
            "glob" => glob::call(&self.files, input).await,
            "grep" => grep::call(&self.files, input).await,
            _ => Err(unknown(name).into()),
        }
    }
}

fn unknown(name: &str) -> ToolError {
    let names: Vec<&str> = DEFINITIONS.iter().map(|definition| definition.name).collect();
    let reason = format!("there is no such tool; the tools are {}.", names.join(", "));
    ToolError::invalid_input(excerpt(name, NAME_SHOWN_MAX), &reason, "Nothing was done.")
}

/// A result as JSON. `expected` is the length of its longest texts.
fn to_json(output: &impl Serialize, expected: usize) -> String {
    let mut json = Vec::with_capacity(expected + expected / 8 + RESULT_BYTES_EXPECTED);
    // Results are strings, numbers and flags under fixed names, which have a JSON form, always; and
    // that is UTF-8.
    let _ = serde_json::to_writer(&mut json, output);
    String::from_utf8(json).unwrap_or_default()
}

/// The tools for people: `docs/tools.md`.
pub fn markdown() -> String {
    let mut page = HEAD.to_owned();
    for definition in DEFINITIONS {
        let effect = if definition.read_only {
            "Changes nothing in the workspace."
        } else {
            "May change the workspace."
        };
        // Writing to a string does not fail.
        let _ = write!(
            page,
            "\n## {}\n\n{}\n\n{effect}\n\n{}",
            definition.name,
            as_markdown(definition.about),
            definition.markdown()
        );
    }
    page.push_str(TAIL);
    page
}

const HEAD: &str = "<!-- Made by `cargo xtask docs` from the tools' schemas; change those. -->

# Tools

What a model sees of a workspace: `ToolService.ListTools` names these tools with a JSON Schema of
their input, a closed object, and `ToolService.CallTool` calls one. The descriptions below are what
a model reads. Paths are paths in the cell.

`cofferdam call TOOL JSON` does the same from a shell.
";

const TAIL: &str = "
## Results

A result is a JSON object. Fields with a question mark are there only when they say something.

| tool | result |
|---|---|
| `bash` | `status` (`completed`, `running`, `timed_out`), `exitCode` (null unless completed), `stdout`, `stderr`, `truncated`, `signal`?, `pid`?, `outputDirectory`?, `message`?, `notes`? |
| `read_file` | `content`, `path`, `totalLines`? (none above 256 MiB), `truncated`, `nextOffset`?, `note`?, `encoding`? (unless UTF-8), `lossy`?, `lineEndings`? (`crlf`, `mixed`), `file`? (`mediaType`, `size`, `width`?, `height`?, `pages`?) |
| `write_file` | `existed`, `path`, `note`?, `atomic`? (false), `linkBroken`? (true), `keptPath`? |
| `edit_file` | `path`, `replacements`, `firstLine`, `note`?, `atomic`?, `linkBroken`?, `keptPath`? |
| `glob` | `content`, `count`, `path`, `truncated`, `skipped`, `note`? |
| `grep` | `content`, `matchCount` (matching lines, in mode `files` files), `path`, `truncated`, `skipped`, `note`? |

`skipped` counts what a search met and did not look into: `ignored`, `hidden` (`.git` directories
and temporary files of the file tools; other hidden files are searched), `binary`, `too_large`,
`unreadable`. Its `non_utf8_name` counts files that were searched although their names are not
UTF-8; such names are shown escaped.

A command that goes on in the background has `pid`, its process group, and `outputDirectory` with
the files `stdout` and `stderr`, which follow its output, and `exit`, which has the exit code once it
has ended. The files of finished commands stay for the last 16 of them, at most 128 MiB together
(the newest stays however large it is); the oldest go first.

## Errors

A tool that refused or failed answers `{\"error\": {\"code\", \"message\", \"hint\"}}` with `is_error`
set: an answer to the model. A gRPC error means that the call could not be carried out at all.

| code | meaning |
|---|---|
| `INVALID_INPUT` | the input does not fit the schema, a path is relative, or there is no such tool |
| `NOT_FOUND`, `NOT_A_DIRECTORY`, `IS_A_DIRECTORY`, `NOT_REGULAR`, `LINK_LOOP`, `NAME_TOO_LONG`, `INVALID_PATH` | the path does not lead to what the tool needs |
| `PERMISSION_DENIED`, `READ_ONLY` | modes, owners or the rules of the cell forbid it |
| `NOT_READ`, `PARTLY_READ`, `STALE_READ` | the file was not read, not all of it, or has changed since |
| `CONFLICT` | another program wrote at the same time; both contents are kept |
| `NOT_TEXT`, `BINARY_FILE` | the file is no UTF-8 text |
| `NO_MATCH`, `NOT_UNIQUE` | `oldString` does not stand in the file, or more than once |
| `OFFSET_PAST_END`, `TOO_LARGE`, `NO_SPACE` | beyond the file's end, or a limit |
| `INVALID_PATTERN` | the pattern, the glob or the file type is not understood |
| `OUTCOME_UNKNOWN`, `CANCELLED`, `SANDBOX_FAILED`, `DENIED` | a command without an end of its own; `stdout` and `stderr` are in the error |
| `EXISTS`, `NOT_EMPTY`, `ELSEWHERE`, `BUSY`, `IO_ERROR` | as the message says |
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_tool_is_told_which_there_are() {
        assert_eq!(
            unknown("nosuch").message,
            "Invalid input for tool \"nosuch\": there is no such tool; the tools are bash, \
            read_file, write_file, edit_file, glob, grep."
        );
        assert!(unknown(&"é".repeat(10_000)).message.len() < 300);
    }

    #[test]
    fn the_page_has_every_tool_and_every_field() {
        let page = markdown();
        for definition in DEFINITIONS {
            assert!(page.contains(&format!("\n## {}\n", definition.name)));
            for field in definition.fields {
                assert!(page.contains(&format!("| `{}` |", field.name)));
            }
        }
    }
}
