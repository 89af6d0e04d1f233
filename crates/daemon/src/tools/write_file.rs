//! `write_file`: a whole file.

use bytes::Bytes;
use cofferdam_files::call::Written;
use serde::Serialize;

use crate::files::{Caller, Files, Overwrite, WriteContent, WriteFile};
use crate::tools::errors::{Doing, Failed, file_error};
use crate::tools::paths;
use crate::tools::schema::{Arguments, Definition, Field, Kind};
use crate::tools::text::note;
use crate::tools::to_json;

/// Permission bits of a new file: as the cell's umask (022) leaves them.
const MODE: u32 = 0o644;

/// The tool.
pub(crate) static DEFINITION: Definition = Definition {
    name: "write_file",
    about: "Writes a whole file of the workspace, exactly as given; missing directories are made. \
    A \
            new file needs nothing. An existing file is overwritten only when all its lines have \
            been \
            read with read_file and it has not changed since, so that nothing unseen is lost; \
            one's \
            own writes count as read. Symbolic links are followed and stay. The change is atomic.",
    read_only: false,
    fields: &[
        Field {
            name: "filePath",
            about: "Absolute path such as /workspace/foo.ts, or a path beginning with $HOME/.",
            kind: Kind::Text,
            required: true,
        },
        Field {
            name: "content",
            about: "The complete new content, also the empty string. A line feed at the end is not \
                    added.",
            kind: Kind::Text,
            required: true,
        },
    ],
};

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Output<'a> {
    existed: bool,
    path: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
    #[serde(flatten)]
    how: How<'a>,
}

/// How a file was changed, where that was not the usual way.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct How<'a> {
    /// `Some(false)` when the file was written in place.
    #[serde(skip_serializing_if = "Option::is_none")]
    atomic: Option<bool>,
    /// `Some(true)` when other names keep the old content.
    #[serde(skip_serializing_if = "Option::is_none")]
    link_broken: Option<bool>,
    /// Where the old file was moved.
    #[serde(skip_serializing_if = "Option::is_none")]
    kept_path: Option<&'a str>,
}

impl<'a> How<'a> {
    /// What is unusual about a change.
    pub(crate) fn of(written: &'a Written) -> Self {
        Self {
            atomic: (!written.atomic).then_some(false),
            link_broken: written.link_broken.then_some(true),
            kept_path: written.kept.as_deref(),
        }
    }
}

/// Calls it.
pub(crate) async fn call(
    files: &Files,
    caller: &Caller,
    mut input: Arguments,
) -> Result<String, Failed> {
    let given = input.required_text("filePath")?;
    let content = input.required_text("content")?;
    let write = WriteFile {
        path: paths::absolute("filePath", &given)?,
        content: WriteContent::Bytes(Bytes::from(content)),
        expected: Overwrite::Seen,
        mode: MODE,
        parents: true,
        keep_bom: true,
    };
    match files.write(caller, write).await {
        Ok(written) => Ok(render(&written)),
        Err(error) => Err(file_error(Doing::Write, &given, error)),
    }
}

fn render(written: &Written) -> String {
    let output = Output {
        existed: written.existed,
        path: &written.canonical,
        note: note(sentences(written)),
        how: How::of(written),
    };
    to_json(&output, 0)
}

/// What a person would want to be told about a change.
pub(crate) fn sentences(written: &Written) -> Vec<String> {
    let mut sentences = Vec::new();
    if let Some(previous) = written.previous
        && previous.size > 0
        && written.stamp.size == 0
    {
        sentences.push(format!("The file is empty now; it had {} bytes.", previous.size));
    }
    if written.bom_kept {
        sentences.push(
            "The byte order mark at the file's start was kept; it is not part of the text."
                .to_owned(),
        );
    }
    if !written.atomic {
        sentences
            .push("The file was written in place, because it could not be exchanged.".to_owned());
    }
    if written.link_broken {
        sentences.push("Other names (hard links) of the file keep the old content.".to_owned());
    }
    if let Some(kept) = &written.kept {
        sentences
            .push(format!("A program still had the old file open for writing; it is {kept} now."));
    }
    sentences
}

#[cfg(test)]
pub(crate) mod tests {
    use cofferdam_spec::Stamp;
    use serde_json::{Value, json};

    use super::*;

    pub(crate) fn written(before: Option<u64>, after: u64) -> Written {
        let stamp = |size| Stamp { digest: [0; 32], size };
        Written {
            canonical: "/workspace/f".to_owned(),
            existed: before.is_some(),
            previous: before.map(stamp),
            stamp: stamp(after),
            lines: 1,
            atomic: true,
            link_broken: false,
            kept: None,
            bom_kept: false,
        }
    }

    fn shown(written: &Written) -> Value {
        serde_json::from_str(&render(written)).unwrap()
    }

    #[test]
    fn an_ordinary_write_says_whether_there_was_a_file() {
        let expected = |existed| json!({ "existed": existed, "path": "/workspace/f" });
        assert_eq!(shown(&written(None, 0)), expected(false));
        assert_eq!(shown(&written(Some(3), 4)), expected(true));
        assert_eq!(shown(&written(Some(0), 0)), expected(true));
    }

    #[test]
    fn emptying_a_file_is_said_with_its_old_size() {
        assert_eq!(shown(&written(Some(5), 0))["note"], "The file is empty now; it had 5 bytes.");
    }

    #[test]
    fn what_was_not_as_usual_is_said_in_fields_and_words() {
        let unusual = Written {
            atomic: false,
            link_broken: true,
            kept: Some("/home/agent/.cofferdam/conflicts/1".to_owned()),
            bom_kept: true,
            ..written(Some(1), 1)
        };
        let shown = shown(&unusual);
        assert_eq!((&shown["atomic"], &shown["linkBroken"]), (&json!(false), &json!(true)));
        assert_eq!(shown["keptPath"], "/home/agent/.cofferdam/conflicts/1");
        let note = shown["note"].as_str().unwrap();
        for part in ["byte order mark", "in place", "hard links", "conflicts/1"] {
            assert!(note.contains(part), "{note}");
        }
    }
}
