//! What the toolbox answers, on the wire.

use cofferdam_files::call::{
    Account, Change, Encoding, Entry, FileKind, FileMatches, GrepMode, Line, LineEnding, TextRead,
    Written,
};
use cofferdam_proto::v1;

use crate::escape::escaped;

/// Bytes of lines in one part of a grep.
const PART_BYTES_MAX: usize = 512 * 1024;

/// What a line costs beside its text, at most.
const LINE_BYTES: usize = 32;

/// A raw path as text. One that is UTF-8 stays as it is, so that it can be named in a call; another
/// one is shown escaped.
pub(super) fn shown(bytes: &[u8]) -> String {
    std::str::from_utf8(bytes).map_or_else(|_| escaped(bytes).into_owned(), str::to_owned)
}

/// Name of the entry in its directory.
pub(super) fn name(entry: &Entry) -> &[u8] {
    entry.path.rsplit(|byte| *byte == b'/').next().unwrap_or_default()
}

/// An entry.
pub(super) fn info(entry: &Entry) -> v1::FileInfo {
    let name = name(entry);
    let is_utf8 = std::str::from_utf8(name).is_ok();
    let (seconds, nanos) = entry.modified;
    v1::FileInfo {
        name: shown(name),
        path: shown(&entry.path),
        r#type: file_type(entry.kind).into(),
        size: entry.size,
        mode: entry.mode,
        uid: entry.uid,
        gid: entry.gid,
        modified_time: Some(prost_types::Timestamp {
            seconds,
            nanos: i32::try_from(nanos).unwrap_or(0),
        }),
        links: entry.links,
        symlink_target: entry.target.as_deref().map(shown).unwrap_or_default(),
        name_bytes: if is_utf8 { bytes::Bytes::new() } else { name.to_vec().into() },
    }
}

fn file_type(kind: FileKind) -> v1::FileType {
    match kind {
        FileKind::Regular => v1::FileType::Regular,
        FileKind::Directory => v1::FileType::Directory,
        FileKind::Symlink => v1::FileType::Symlink,
        FileKind::Fifo => v1::FileType::Fifo,
        FileKind::Socket => v1::FileType::Socket,
        FileKind::CharacterDevice => v1::FileType::CharacterDevice,
        FileKind::BlockDevice => v1::FileType::BlockDevice,
    }
}

/// Lines that were read; the caller adds what is enforced.
pub(super) fn text(read: TextRead) -> v1::ReadTextResponse {
    v1::ReadTextResponse {
        info: Some(info(&read.entry)),
        text: read.text,
        range: read.range.map(Into::into),
        total_lines: read.total_lines,
        next_line: read.next_line.unwrap_or(0),
        cut: read.cut,
        encoding: encoding(read.encoding).into(),
        line_ending: line_ending(read.line_ending).into(),
        stamp: read.stamp.as_ref().map(Into::into),
        enforcement: None,
    }
}

fn encoding(encoding: Encoding) -> v1::TextEncoding {
    match encoding {
        Encoding::Utf8 => v1::TextEncoding::Utf8,
        Encoding::Utf8Bom => v1::TextEncoding::Utf8Bom,
        Encoding::Utf16Le => v1::TextEncoding::Utf16Le,
        Encoding::Utf16Be => v1::TextEncoding::Utf16Be,
        Encoding::Lossy => v1::TextEncoding::Lossy,
    }
}

fn line_ending(ending: LineEnding) -> v1::LineEnding {
    match ending {
        LineEnding::Lf => v1::LineEnding::Lf,
        LineEnding::CrLf => v1::LineEnding::Crlf,
        LineEnding::Mixed => v1::LineEnding::Mixed,
        LineEnding::None => v1::LineEnding::None,
    }
}

/// What a change did to a file.
pub(super) fn written(written: Written) -> v1::FileWritten {
    v1::FileWritten {
        path: written.canonical,
        existed: written.previous.is_some(),
        previous_stamp: written.previous.as_ref().map(Into::into),
        stamp: Some((&written.stamp).into()),
        atomic: written.atomic,
        link_broken: written.link_broken,
        kept_path: written.kept.unwrap_or_default(),
    }
}

/// The account of a search.
pub(super) fn account(account: &Account) -> v1::SearchAccount {
    let &Account {
        searched,
        ignored,
        hidden,
        binary,
        too_large,
        unreadable,
        non_utf8_name,
        special,
        complete,
    } = account;
    v1::SearchAccount {
        searched,
        ignored,
        hidden,
        binary,
        too_large,
        unreadable,
        non_utf8_name,
        special,
        complete,
    }
}

/// What a grep shall return; `None` when it is not known.
pub(super) fn grep_mode(value: i32) -> Option<GrepMode> {
    match v1::GrepMode::try_from(value).ok()? {
        v1::GrepMode::Unspecified | v1::GrepMode::Content => Some(GrepMode::Content),
        v1::GrepMode::Files => Some(GrepMode::Files),
        v1::GrepMode::Count => Some(GrepMode::Count),
    }
}

/// Lines of one file, in parts that fit into a message. Each part says how many matches there are
/// up to its end, and the last one what is true of the whole.
pub(super) fn matches(found: FileMatches) -> Vec<v1::GrepFile> {
    let path = shown(&found.path);
    let mut left = found.lines.iter().filter(|line| line.matched).count() as u64;
    let mut parts = Vec::new();
    let mut lines: Vec<v1::GrepLine> = Vec::new();
    let mut room = PART_BYTES_MAX;
    let part = |lines, left| v1::GrepFile {
        path: path.clone(),
        lines,
        matches: found.matches.saturating_sub(left),
        limit_reached: false,
        lossy: found.lossy,
        binary: false,
    };
    for Line { number, text, matched, cut } in found.lines {
        let size = text.len() + LINE_BYTES;
        if size > room && !lines.is_empty() {
            parts.push(part(std::mem::take(&mut lines), left));
            room = PART_BYTES_MAX;
        }
        room = room.saturating_sub(size);
        left -= u64::from(matched);
        lines.push(v1::GrepLine { number, text, matched, cut });
    }
    let last = v1::GrepFile {
        limit_reached: found.limit_reached,
        binary: found.binary,
        ..part(lines, left)
    };
    parts.push(last);
    parts
}

/// A change below a watched directory; `None` for lost ones.
pub(super) fn change(change: &Change) -> Option<v1::WatchChange> {
    let of = |kind: v1::ChangeKind, path: &[u8], directory| {
        let path = shown(path);
        Some(v1::WatchChange { kind: kind.into(), path, from: String::new(), directory })
    };
    match change {
        Change::Create { path, directory } => of(v1::ChangeKind::Create, path, *directory),
        Change::Write { path } => of(v1::ChangeKind::Write, path, false),
        Change::Remove { path, directory } => of(v1::ChangeKind::Remove, path, *directory),
        Change::Chmod { path, directory } => of(v1::ChangeKind::Chmod, path, *directory),
        Change::Rename { from, to, directory } => {
            let to = of(v1::ChangeKind::Rename, to.as_deref().unwrap_or_default(), *directory);
            let from = from.as_deref().map(shown).unwrap_or_default();
            to.map(|to| v1::WatchChange { from, ..to })
        }
        Change::Overflow => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_not_utf8_are_shown_and_kept() {
        assert_eq!(shown("/é".as_bytes()), "/é");
        assert_eq!(shown(b"/a\xff\xc3b"), "/a\\xff\\xc3b");
        assert_eq!(shown(b"/a\n\\xff"), "/a\n\\xff");
        assert_eq!(shown(b"/a\n\\\xff"), "/a\\n\\\\\\xff");
        let entry = Entry {
            path: b"/d/a\xff".to_vec(),
            kind: FileKind::Fifo,
            size: 1,
            mode: 0o644,
            uid: 1,
            gid: 2,
            modified: (3, 4),
            links: 1,
            target: None,
        };
        let info = info(&entry);
        assert_eq!((&*info.name, &*info.path), ("a\\xff", "/d/a\\xff"));
        assert_eq!((&info.name_bytes[..], info.r#type()), (&b"a\xff"[..], v1::FileType::Fifo));
    }

    #[test]
    fn many_lines_come_in_parts_that_lose_nothing() {
        let line = |number| Line {
            number,
            text: "x".repeat(PART_BYTES_MAX / 3),
            matched: number % 2 == 1,
            cut: false,
        };
        let found = FileMatches {
            path: b"/a".to_vec(),
            lines: (1..=7).map(line).collect(),
            matches: 14,
            limit_reached: true,
            lossy: true,
            binary: true,
        };
        let parts = matches(found);
        let numbers: Vec<Vec<u64>> =
            parts.iter().map(|part| part.lines.iter().map(|line| line.number).collect()).collect();
        assert_eq!(numbers, [vec![1, 2], vec![3, 4], vec![5, 6], vec![7]]);
        let counts: Vec<_> = parts.iter().map(|part| (part.matches, part.limit_reached)).collect();
        assert_eq!(counts, [(11, false), (12, false), (13, false), (14, true)]);
    }

    #[test]
    fn a_file_without_lines_is_one_part() {
        let found = FileMatches {
            path: b"/a".to_vec(),
            lines: Vec::new(),
            matches: 3,
            limit_reached: false,
            lossy: false,
            binary: false,
        };
        let expected =
            v1::GrepFile { path: "/a".to_owned(), matches: 3, ..v1::GrepFile::default() };
        assert_eq!(matches(found), [expected]);
    }
}
