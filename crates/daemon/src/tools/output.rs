//! What a command printed, as a model reads it.

use std::borrow::Cow;
use std::io;

use bytes::{Bytes, BytesMut};

use crate::account;
use crate::output::OutputLog;
use crate::tools::text::{Cut, cut, without_redraws};

/// What the daemon holds of a stream.
#[derive(Debug, Clone)]
pub(crate) struct Held {
    /// The bytes, in order.
    bytes: Bytes,
    /// Where bytes are missing, and how many.
    gap: Option<(usize, u64)>,
}

impl Held {
    /// Reads a log. Fails when the job file cannot be read, or was given up.
    pub(crate) fn read(log: &OutputLog) -> io::Result<Self> {
        let (bytes, account) = account::excerpt(log, u64::MAX)?;
        if bytes.is_empty() && account.total_bytes > 0 {
            return Err(io::Error::other("the output is not kept any more"));
        }
        let at = usize::try_from(account.head_bytes).unwrap_or(usize::MAX).min(bytes.len());
        let gap = (account.dropped_bytes > 0).then_some((at, account.dropped_bytes));
        Ok(Self { bytes, gap })
    }

    /// The content of a file that holds it: the bytes as they are, with a line where some are
    /// missing.
    pub(crate) fn into_file(self) -> Bytes {
        let Some((at, missing)) = self.gap else { return self.bytes };
        let line = gap_line(missing);
        let mut file = BytesMut::with_capacity(self.bytes.len() + line.len());
        file.extend_from_slice(&self.bytes[..at]);
        file.extend_from_slice(line.as_bytes());
        file.extend_from_slice(&self.bytes[at..]);
        file.freeze()
    }

    /// The text for a model.
    pub(crate) fn render(&self, stream: &'static str) -> Rendered {
        let mut notes = Vec::new();
        let decoded = match self.gap {
            None => String::from_utf8_lossy(&self.bytes),
            Some((at, missing)) => {
                let (head, tail) = self.bytes.split_at(at);
                let mut text = String::from_utf8_lossy(head).into_owned();
                text.push_str(&gap_line(missing));
                text.push_str(&String::from_utf8_lossy(tail));
                Cow::Owned(text)
            }
        };
        // What a gap tears apart is no fault of the program, but it is replaced all the same.
        if std::str::from_utf8(&self.bytes).is_err() {
            notes.push(format!("{stream}: bytes that are not UTF-8 are shown as U+FFFD."));
        }
        let (text, left_out) = without_redraws(&decoded);
        if left_out > 0 {
            notes.push(format!(
                "{stream}: {left_out} redraws by carriage return are left out; pipe it through \
                 tr '\\r' '\\n' to see them."
            ));
        }
        // A text that is both stays where it is.
        let text = match text {
            Cow::Owned(text) => text,
            Cow::Borrowed(_) => decoded.into_owned(),
        };
        let cut = cut(&text);
        Rendered { stream, text, cut, missing: self.gap.map_or(0, |(_, missing)| missing), notes }
    }
}

/// Marks where bytes are missing.
fn gap_line(missing: u64) -> String {
    format!(
        "\n[{missing} bytes are missing here: of each stream only the first 4 MiB and the last 12 \
        MiB are kept]\n"
    )
}

/// A stream's text that has to be shown, whole or in parts.
#[derive(Debug)]
pub(crate) struct Rendered {
    stream: &'static str,
    text: String,
    cut: Option<Cut>,
    missing: u64,
    /// What a reader should know.
    pub(crate) notes: Vec<String>,
}

impl Rendered {
    /// Whether something is left out.
    pub(crate) fn is_truncated(&self) -> bool {
        self.cut.is_some() || self.missing > 0
    }

    /// The text. What is cut out of it is in a file, or could not be kept for the given reason.
    pub(crate) fn finish(self, file: Result<&str, &str>) -> String {
        let Some(Cut { head_end, tail_start, first, last, total }) = self.cut else {
            return self.text;
        };
        let (stream, at_least) = (self.stream, if self.missing > 0 { "at least " } else { "" });
        let rest = match file {
            Ok(path) if self.missing == 0 => format!("all of it: {path}"),
            Ok(path) => format!("all but {} bytes of it: {path}", self.missing),
            Err(reason) => format!("the rest could not be kept: {reason}"),
        };
        let marker = format!(
            "[{stream} truncated: showing first {first} and last {last} of {at_least}{total} \
            lines; {rest}]\n"
        );
        let head = &self.text[..head_end];
        let tail = &self.text[tail_start..];
        let mut text = String::with_capacity(head.len() + marker.len() + tail.len() + 1);
        text.push_str(head);
        if !head.is_empty() && !head.ends_with('\n') {
            text.push('\n');
        }
        text.push_str(&marker);
        text.push_str(tail);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(bytes: &[u8]) -> Held {
        Held { bytes: Bytes::copy_from_slice(bytes), gap: None }
    }

    #[test]
    fn a_short_output_is_untouched() {
        let rendered = held("abc é\r\n\u{1b}[31mred".as_bytes()).render("stdout");
        assert!(!rendered.is_truncated());
        assert_eq!(rendered.notes, Vec::<String>::new());
        assert_eq!(rendered.finish(Ok("/f")), "abc é\r\n\u{1b}[31mred");
    }

    #[test]
    fn bytes_that_are_no_text_are_replaced_and_said() {
        let rendered = held(b"A\xf0\x28\x8c\x28B\n").render("stdout");
        assert_eq!(rendered.notes, ["stdout: bytes that are not UTF-8 are shown as U+FFFD."]);
        assert_eq!(rendered.finish(Ok("/f")), "A\u{fffd}(\u{fffd}(B\n");
        // A replacement character that the program printed itself is nothing to say.
        assert_eq!(held("\u{fffd}".as_bytes()).render("stdout").notes, Vec::<String>::new());
    }

    #[test]
    fn a_long_output_has_one_line_in_its_middle_that_says_what_is_left_out() {
        let text: String = (1..=3000).map(|line| format!("{line}\n")).collect();
        let rendered = held(text.as_bytes()).render("stderr");
        assert!(rendered.is_truncated());
        let shown = rendered.finish(Ok("/tmp/x"));
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(
            (lines.len(), lines[499], lines[501], lines[2000]),
            (2001, "500", "1501", "3000")
        );
        assert_eq!(
            lines[500],
            "[stderr truncated: showing first 500 and last 1500 of 3000 lines; all of it: /tmp/x]"
        );
    }

    #[test]
    fn a_file_that_could_not_be_written_is_said() {
        let rendered = held(&[b'x'; 60_000]).render("stdout");
        let shown = rendered.finish(Err("no space left"));
        assert!(shown.contains(
            "\n[stdout truncated: showing first 1 and last 1 of 1 lines; the rest could not be \
            kept: no space left]\n"
        ));
    }

    #[test]
    fn a_gap_is_marked_in_text_and_file() {
        let gapped = Held { bytes: Bytes::from_static(b"headtail"), gap: Some((4, 9)) };
        let line = "\n[9 bytes are missing here: of each stream only the first 4 MiB and the last \
        12 MiB are kept]\n";
        assert_eq!(gapped.clone().into_file(), format!("head{line}tail"));
        let rendered = gapped.render("stdout");
        assert!(rendered.is_truncated());
        assert_eq!(rendered.finish(Ok("/f")), format!("head{line}tail"));
        let long = Held { bytes: Bytes::from("x\n".repeat(5000)), gap: Some((4000, 9)) };
        let shown = long.render("stdout").finish(Ok("/f"));
        assert!(shown.contains("of at least 5002 lines; all but 9 bytes of it: /f]\n"), "{shown}");
    }

    #[test]
    fn a_log_that_was_given_up_cannot_be_read() {
        let directory = tempfile::tempdir().unwrap();
        let mut log = OutputLog::new(directory.path().join("log"));
        log.append(b"abc");
        assert_eq!(Held::read(&log).unwrap().into_file(), "abc");
        log.discard();
        assert!(Held::read(&log).is_err());
    }
}
