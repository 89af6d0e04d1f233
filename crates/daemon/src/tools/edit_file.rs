//! `edit_file`: one text in a file becomes another.

use serde::Serialize;

use crate::files::{Caller, EDIT_BYTES_MAX, EditFile, Edited, Files, Overwrite};
use crate::tools::errors::{Doing, Failed, ToolError, file_error};
use crate::tools::paths;
use crate::tools::schema::{Arguments, Definition, Field, Kind};
use crate::tools::text::note;
use crate::tools::to_json;
use crate::tools::write_file::{How, sentences};

/// The tool.
pub(crate) static DEFINITION: Definition = Definition {
    name: "edit_file",
    about: "Replaces an exact text in a file of the workspace by another. The file must have been \
            read with read_file, any part of it, and not have changed since. oldString is compared \
            byte by byte, without the line numbers that read_file shows, and must stand in the \
            file \
            exactly once, unless replaceAll is set. The change is atomic.",
    read_only: false,
    fields: &[
        Field {
            name: "filePath",
            about: "Absolute path such as /workspace/foo.ts, or a path beginning with $HOME/.",
            kind: Kind::Text,
            required: true,
        },
        Field {
            name: "oldString",
            about: "The text to replace.",
            kind: Kind::NonEmptyText,
            required: true,
        },
        Field {
            name: "newString",
            about: "The text to put there, also the empty string; different from oldString.",
            kind: Kind::Text,
            required: true,
        },
        Field {
            name: "replaceAll",
            about: "Replace every occurrence. Default false.",
            kind: Kind::Flag,
            required: false,
        },
    ],
};

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Output<'a> {
    path: &'a str,
    replacements: u64,
    first_line: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
    #[serde(flatten)]
    how: How<'a>,
}

/// Calls it.
pub(crate) async fn call(
    files: &Files,
    caller: &Caller,
    mut input: Arguments,
) -> Result<String, Failed> {
    let given = input.required_text("filePath")?;
    let edit = EditFile {
        path: paths::absolute("filePath", &given)?,
        old: input.required_text("oldString")?,
        new: input.required_text("newString")?,
        all: input.flag("replaceAll"),
        expected: Overwrite::Seen,
    };
    if edit.old == edit.new {
        let reason = "oldString and newString are the same, so there is nothing to change.";
        return Err(ToolError::invalid_input("edit_file", reason, "Nothing was changed.").into());
    }
    let size = edit.old.len() + edit.new.len();
    if size > EDIT_BYTES_MAX {
        let reason = format!(
            "oldString and newString together are {size} bytes long, the limit is \
             {EDIT_BYTES_MAX}."
        );
        let hint = "Nothing was changed. Make several smaller edits, or use write_file.";
        return Err(ToolError::invalid_input("edit_file", &reason, hint).into());
    }
    match files.edit(caller, edit).await {
        Ok(edited) => Ok(render(&edited)),
        Err(error) => Err(file_error(Doing::Edit, &given, error)),
    }
}

fn render(edited: &Edited) -> String {
    let output = Output {
        path: &edited.written.canonical,
        replacements: edited.replacements,
        first_line: edited.first_line,
        note: note(sentences(&edited.written)),
        how: How::of(&edited.written),
    };
    to_json(&output, 0)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::tools::write_file::tests::written;

    #[test]
    fn an_edit_says_how_often_and_where_first() {
        let edited = Edited { written: written(Some(5), 6), replacements: 2, first_line: 7 };
        let shown: Value = serde_json::from_str(&render(&edited)).unwrap();
        let expected = json!({ "path": "/workspace/f", "replacements": 2, "firstLine": 7 });
        assert_eq!(shown, expected);
    }
}
