//! `read_file`: lines of a text, or what is known of an image or a document.

use cofferdam_files::call::{Encoding, LineEnding, Media, ReadText, TextRead};
use serde::Serialize;

use crate::files::{Caller, Files};
use crate::tools::errors::{Doing, Failed, ToolError, encoding_name, file_error};
use crate::tools::paths;
use crate::tools::schema::{Arguments, Definition, Field, Kind};
use crate::tools::text::{BUDGET_BYTES, BUDGET_LINES, LINE_UNITS_MAX, escaped, note};
use crate::tools::to_json;

/// Largest image that a model is shown, in bytes …
const IMAGE_BYTES_MAX: u64 = 3 * 1024 * 1024;

/// … and in pixels of one side.
const IMAGE_SIDE_MAX: u64 = 8000;

/// Largest PDF that a model is shown, in bytes.
const PDF_BYTES_MAX: u64 = 20 * 1024 * 1024;

/// The tool.
pub(crate) static DEFINITION: Definition = Definition {
    name: "read_file",
    about: "Reads a text file of the workspace. Each line is shown as its number, a colon, a blank \
            and the exact text of the line; only \\n ends a line. At most 2000 lines and 51200 \
            bytes \
            are shown at once, and 2000 characters of a line; nextOffset says where to go on. \
            Reading \
            a file is what allows to overwrite it: write_file needs all lines to have been read, \
            edit_file any part. Of PNG, JPEG, GIF and WebP images and of PDFs the type and the \
            size \
            are told. Other binary files are refused.",
    read_only: true,
    fields: &[
        Field {
            name: "filePath",
            about: "Absolute path such as /workspace/foo.ts, or a path beginning with $HOME/.",
            kind: Kind::Text,
            required: true,
        },
        Field {
            name: "offset",
            about: "First line to show, counted from 1. Default 1.",
            kind: Kind::Count { min: 1, max: None },
            required: false,
        },
        Field {
            name: "limit",
            about: "Most lines to show. Default 2000; more than 2000 is taken as 2000.",
            kind: Kind::Count { min: 1, max: None },
            required: false,
        },
    ],
};

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Output<'a> {
    content: &'a str,
    path: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    total_lines: Option<u64>,
    truncated: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    next_offset: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    encoding: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lossy: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    line_endings: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<File<'a>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct File<'a> {
    media_type: &'a str,
    size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    width: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    height: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pages: Option<u64>,
}

/// Calls it.
pub(crate) async fn call(
    files: &Files,
    caller: &Caller,
    mut input: Arguments,
) -> Result<String, Failed> {
    let given = input.required_text("filePath")?;
    let offset = input.count("offset").unwrap_or(1);
    let lines_max = BUDGET_LINES as u64;
    let limit = input.count("limit").unwrap_or(lines_max).min(lines_max);
    let read = ReadText {
        path: paths::absolute("filePath", &given)?,
        first_line: offset,
        max_lines: limit,
        max_bytes: BUDGET_BYTES as u64,
        max_line_chars: LINE_UNITS_MAX,
        numbered: true,
        accept_media: true,
    };
    match files.read_text(Some(caller), read).await {
        Ok(read) => Ok(render(&given, &read)?),
        Err(error) => Err(file_error(Doing::Read { offset }, &given, error)),
    }
}

fn render(given: &str, read: &TextRead) -> Result<String, ToolError> {
    let path = escaped(&read.entry.path);
    if let Some(media) = &read.media {
        return media_json(given, &path, read.entry.size, media);
    }
    let output = Output {
        content: &read.text,
        path: &path,
        total_lines: read.total_lines,
        truncated: read.next_line.is_some() || read.cut,
        next_offset: read.next_line,
        note: note(sentences(read)),
        encoding: encoding_name(read.encoding),
        lossy: (read.encoding == Encoding::Lossy).then_some(true),
        line_endings: match read.line_ending {
            LineEnding::CrLf => Some("crlf"),
            LineEnding::Mixed => Some("mixed"),
            LineEnding::Lf | LineEnding::None => None,
        },
        file: None,
    };
    Ok(to_json(&output, read.text.len()))
}

/// What the text alone does not say.
fn sentences(read: &TextRead) -> Vec<String> {
    let mut sentences = Vec::new();
    if read.total_lines == Some(0) {
        sentences.push("file is empty".to_owned());
    }
    if read.cut {
        sentences.push("Lines above 2000 characters are cut and end with [truncated].".to_owned());
    }
    match read.encoding {
        Encoding::Utf8 | Encoding::Utf8Bom => {}
        Encoding::Lossy => sentences.push(
            "The file is not valid UTF-8: bytes that are not are shown as U+FFFD. write_file and \
             edit_file refuse it; change it with a command."
                .to_owned(),
        ),
        Encoding::Utf16Le | Encoding::Utf16Be => sentences.push(
            "The file is UTF-16 and shown decoded. write_file and edit_file refuse it; convert it \
             with a command first, for example iconv."
                .to_owned(),
        ),
    }
    match read.line_ending {
        LineEnding::CrLf => sentences.push("Lines end with \\r\\n.".to_owned()),
        LineEnding::Mixed => {
            sentences.push("Some lines end with \\r\\n, some with \\n.".to_owned());
        }
        LineEnding::Lf | LineEnding::None => {}
    }
    if read.stamp.is_none() {
        sentences.push(
            "The file is larger than 256 MiB: its lines are not counted, and write_file and \
             edit_file refuse it."
                .to_owned(),
        );
    }
    sentences
}

fn media_json(given: &str, path: &str, size: u64, media: &Media) -> Result<String, ToolError> {
    let is_pdf = media.media_type == "application/pdf";
    let pixels = match (media.width, media.height) {
        (Some(width), Some(height)) => format!("{width}x{height} pixels, "),
        _ => String::new(),
    };
    let side = media.width.unwrap_or(0).max(media.height.unwrap_or(0));
    if is_pdf && size > PDF_BYTES_MAX {
        return Err(ToolError::new(
            "TOO_LARGE",
            format!(
                "PDF \"{given}\" is {size} bytes; read_file shows PDFs up to 20 MiB. Split it, or \
                 extract its text with a command first."
            ),
            "Nothing was read.",
        ));
    }
    if !is_pdf && (size > IMAGE_BYTES_MAX || side > IMAGE_SIDE_MAX) {
        return Err(ToolError::new(
            "TOO_LARGE",
            format!(
                "Image \"{given}\" is {pixels}{size} bytes; read_file shows images up to 3 MiB and \
                 8000 pixels per side. Make it smaller with a command first."
            ),
            "Nothing was read.",
        ));
    }
    let pages = media.pages.map_or(String::new(), |pages| format!("{pages} pages, "));
    let kind = if is_pdf { "PDF" } else { "Image" };
    let content =
        format!("{kind} \"{given}\" ({}, {pixels}{pages}{size} bytes).", media.media_type);
    let output = Output {
        content: &content,
        path,
        total_lines: Some(0),
        truncated: false,
        next_offset: None,
        note: None,
        encoding: None,
        lossy: None,
        line_endings: None,
        file: Some(File {
            media_type: &media.media_type,
            size,
            width: media.width,
            height: media.height,
            pages: media.pages,
        }),
    };
    Ok(to_json(&output, content.len()))
}

#[cfg(test)]
mod tests {
    use cofferdam_files::call::{Entry, FileKind};
    use cofferdam_spec::{LineRange, Stamp};
    use serde_json::{Value, json};

    use super::*;

    fn read() -> TextRead {
        TextRead {
            entry: Entry {
                path: b"/workspace/f".to_vec(),
                kind: FileKind::Regular,
                size: 4,
                mode: 0o644,
                uid: 1,
                gid: 1,
                modified: (0, 0),
                links: 1,
                target: None,
            },
            text: "1: a\n2: b".to_owned(),
            range: Some(LineRange { first: 1, last: 2 }),
            total_lines: Some(2),
            next_line: None,
            cut: false,
            encoding: Encoding::Utf8,
            line_ending: LineEnding::Lf,
            stamp: Some(Stamp { digest: [0; 32], size: 4 }),
            media: None,
        }
    }

    fn shown(read: &TextRead) -> Value {
        serde_json::from_str(&render("/workspace/f", read).unwrap()).unwrap()
    }

    #[test]
    fn an_ordinary_text_has_nothing_but_its_lines() {
        let expected = json!({
            "content": "1: a\n2: b", "path": "/workspace/f", "totalLines": 2, "truncated": false,
        });
        assert_eq!(shown(&read()), expected);
    }

    #[test]
    fn what_is_left_out_is_said() {
        let next = TextRead { next_line: Some(3), total_lines: Some(9), ..read() };
        let shown_next = shown(&next);
        assert_eq!(
            (&shown_next["truncated"], &shown_next["nextOffset"]),
            (&json!(true), &json!(3))
        );
        let cut = shown(&TextRead { cut: true, ..read() });
        assert_eq!((&cut["truncated"], cut.get("nextOffset")), (&json!(true), None));
    }

    #[test]
    fn an_empty_file_says_so() {
        let mut empty =
            TextRead { text: String::new(), range: None, total_lines: Some(0), ..read() };
        empty.entry.size = 0;
        let expected = json!({
            "content": "", "path": "/workspace/f", "totalLines": 0, "truncated": false,
            "note": "file is empty",
        });
        assert_eq!(shown(&empty), expected);
    }

    #[test]
    fn other_encodings_are_named() {
        let lossy = shown(&TextRead { encoding: Encoding::Lossy, ..read() });
        assert_eq!((&lossy["lossy"], &lossy["encoding"]), (&json!(true), &json!("unknown")));
        let utf16 = shown(&TextRead { encoding: Encoding::Utf16Le, ..read() });
        assert_eq!((utf16.get("lossy"), &utf16["encoding"]), (None, &json!("utf-16le")));
        let windows = shown(&TextRead { line_ending: LineEnding::CrLf, ..read() });
        assert_eq!(windows["lineEndings"], json!("crlf"));
    }

    #[test]
    fn a_file_without_a_stamp_omits_its_lines_and_says_why() {
        let huge = shown(&TextRead { stamp: None, total_lines: None, ..read() });
        assert_eq!(huge.get("totalLines"), None);
        assert!(huge["note"].as_str().unwrap().contains("256 MiB"));
    }

    fn image(size: u64, width: u64) -> TextRead {
        let media = Media {
            media_type: "image/png".to_owned(),
            width: Some(width),
            height: Some(10),
            pages: None,
        };
        let mut read = TextRead { text: String::new(), media: Some(media), ..read() };
        read.entry.size = size;
        read
    }

    #[test]
    fn an_image_is_described_without_its_bytes() {
        let expected = json!({
            "content": "Image \"/workspace/f\" (image/png, 20x10 pixels, 99 bytes).",
            "path": "/workspace/f", "totalLines": 0, "truncated": false,
            "file": { "mediaType": "image/png", "size": 99, "width": 20, "height": 10 },
        });
        assert_eq!(shown(&image(99, 20)), expected);
    }

    #[test]
    fn an_image_above_its_limits_is_refused_with_both_numbers() {
        for image in [image(IMAGE_BYTES_MAX + 1, 20), image(9, IMAGE_SIDE_MAX + 1)] {
            let message = render("/workspace/f", &image).unwrap_err().message;
            assert!(message.contains("images up to 3 MiB and 8000 pixels per side"), "{message}");
        }
        assert!(render("/workspace/f", &image(IMAGE_BYTES_MAX, IMAGE_SIDE_MAX)).is_ok());
    }
}
