//! Opening files, and reading lines of texts.
//!
//! A text is read once, part by part: the same bytes make the stamp, decide the encoding, count the
//! lines and fill the window that was asked for. So what is told belongs together as far as the
//! kernel's reads do, and memory is bounded by what is shown.

use std::os::fd::OwnedFd;

use cofferdam_spec::Stamp;
use encoding_rs::{CoderResult, Decoder, UTF_16BE, UTF_16LE};
use memchr::memchr;
use rustix::fs::OFlags;

use crate::call::{
    Answer, Encoding, Entry, Fault, FaultKind, LineEnding, Media, ReadText, STAMP_BYTES_MAX,
    TextRead,
};
use crate::entry::entry;
use crate::fault::{at, found};
use crate::media::{Format, PageCounter};
use crate::resolve::{Last, resolve};
use crate::serve::Reply;
use crate::stamp::{Hash, Parts, UNSIZED_BYTES_MAX, bytes_to_read, has_more};
use crate::text::{Utf8Check, Window};

/// Bytes of UTF-8 that UTF-16 is decoded to at a time.
const DECODED_BYTES: usize = 64 * 1024;

/// Answers [`FileCall::Open`](crate::FileCall::Open), and leaves the descriptor in `opened`.
pub(crate) fn open(path: &str, opened: &mut Option<OwnedFd>) -> Result<Answer, Fault> {
    let place = resolve(path, Last::Follow)?;
    let (file, stat) = place.open_regular()?;
    // It was opened so that nothing waits; whoever gets it should find it as any other.
    rustix::fs::fcntl_setfl(&file, OFlags::empty()).map_err(at("open"))?;
    *opened = Some(file);
    Ok(Answer::Opened(entry(place.canonical, &stat, None)))
}

/// Answers [`FileCall::ReadText`](crate::FileCall::ReadText).
pub(crate) fn read_text(call: &ReadText, reply: &dyn Reply) -> Result<Answer, Fault> {
    let place = resolve(&call.path, Last::Follow)?;
    let (file, stat) = place.open_regular()?;
    let entry = entry(place.canonical, &stat, None);
    let mut has_stamp = entry.size <= STAMP_BYTES_MAX;
    let mut parts = Parts::new(&file, bytes_to_read(entry.size), reply);
    let mut hash = Hash::default();
    let mut reading = Reading::new(call, entry.size);
    let (mut end, mut seen) = (End::Whole, 0);
    while let Some(part) = parts.next()? {
        if has_stamp {
            hash.add(part);
        }
        reading.add(part)?;
        seen += part.len() as u64;
        if !has_stamp && reading.is_settled() {
            end = End::Settled;
            break;
        }
    }
    if entry.size == 0 && seen > 0 {
        // What the kernel makes up while it is read is another text each time.
        has_stamp = false;
        if seen >= UNSIZED_BYTES_MAX && has_more(&file, seen)? {
            end = End::Limit;
        }
    }
    let stamp = has_stamp.then(|| hash.stamp());
    reading.end(entry, stamp, end).map(|read| Answer::Text(Box::new(read)))
}

/// Where the reading of a file ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// At its end.
    Whole,
    /// Where nothing that comes changes the answer.
    Settled,
    /// At [`UNSIZED_BYTES_MAX`], and there is more.
    Limit,
}

/// How bytes become text.
enum Decoding {
    Utf8 { with_bom: bool, check: Utf8Check },
    Utf16 { encoding: Encoding, decoder: Decoder, decoded: String },
}

impl Decoding {
    /// As the first bytes say, and how many of them are a mark and no text.
    fn of(head: &[u8]) -> (Self, usize) {
        let (encoding, decoder) = if head.starts_with(b"\xff\xfe") {
            (Encoding::Utf16Le, UTF_16LE.new_decoder_without_bom_handling())
        } else if head.starts_with(b"\xfe\xff") {
            (Encoding::Utf16Be, UTF_16BE.new_decoder_without_bom_handling())
        } else {
            let with_bom = head.starts_with(b"\xef\xbb\xbf");
            let check = Utf8Check::default();
            return (Decoding::Utf8 { with_bom, check }, if with_bom { 3 } else { 0 });
        };
        (Decoding::Utf16 { encoding, decoder, decoded: String::with_capacity(DECODED_BYTES) }, 2)
    }
}

/// A file that is being read.
struct Reading<'a> {
    accept_media: bool,
    first_line: u64,
    window: Window<'a>,
    /// Decided by the first part.
    decoding: Option<Decoding>,
    /// What it may be when it is no text, where that is welcome.
    format: Option<Format>,
    pixels: Option<(u64, u64)>,
    pages: PageCounter,
    has_nul: bool,
}

impl<'a> Reading<'a> {
    fn new(call: &'a ReadText, size: u64) -> Self {
        Self {
            accept_media: call.accept_media,
            first_line: call.first_line,
            window: Window::new(call, size),
            decoding: None,
            format: None,
            pixels: None,
            pages: PageCounter::new(),
            has_nul: false,
        }
    }

    /// Looks at the bytes that come next. The first part must hold the header of an image.
    fn add(&mut self, part: &[u8]) -> Result<(), Fault> {
        let mut text = part;
        let decoding = match &mut self.decoding {
            Some(decoding) => decoding,
            none => {
                let (decoding, mark) = Decoding::of(part);
                text = &part[mark..];
                self.format = Format::of(part).filter(|_| self.accept_media);
                self.pixels = self.format.and_then(|format| format.size(part));
                none.insert(decoding)
            }
        };
        match decoding {
            Decoding::Utf8 { check, .. } => {
                self.has_nul |= memchr(0, text).is_some();
                if self.has_nul && self.format.is_none() {
                    return Err(found(FaultKind::Binary, "read"));
                }
                check.add(text);
                match self.format {
                    Some(Format::Pdf) => self.pages.add(part),
                    Some(_) if self.has_nul => {}
                    _ => self.window.add(text),
                }
            }
            Decoding::Utf16 { decoder, decoded, .. } => {
                decode(decoder, text, false, decoded, &mut self.window);
            }
        }
        Ok(())
    }

    /// Whether nothing that comes changes the answer, but for the count of lines and the encoding.
    fn is_settled(&self) -> bool {
        self.is_media(true) || self.window.is_settled()
    }

    /// Whether it is an image or a document, and no text. With `more` to come, the last character
    /// may lack bytes.
    fn is_media(&self, more: bool) -> bool {
        match self.format {
            None => false,
            Some(Format::Pdf) => true,
            Some(_) => self.has_nul || !self.is_utf8(more),
        }
    }

    /// Whether all bytes so far are UTF-8, or were decoded to it.
    fn is_utf8(&self, more: bool) -> bool {
        match &self.decoding {
            Some(Decoding::Utf8 { check, .. }) if more => check.is_good(),
            Some(Decoding::Utf8 { check, .. }) => check.is_whole(),
            _ => true,
        }
    }

    /// The answer. Without a stamp there is no account of all of the file.
    fn end(mut self, entry: Entry, stamp: Option<Stamp>, end: End) -> Result<TextRead, Fault> {
        let at_end = end == End::Whole;
        let encoding = match &self.decoding {
            Some(Decoding::Utf16 { encoding, .. }) => *encoding,
            _ if !self.is_utf8(!at_end) => Encoding::Lossy,
            Some(Decoding::Utf8 { with_bom: true, .. }) => Encoding::Utf8Bom,
            _ => Encoding::Utf8,
        };
        if let Some(format) = self.format.filter(|_| self.is_media(!at_end)) {
            return Ok(TextRead {
                entry,
                text: String::new(),
                range: None,
                total_lines: None,
                next_line: None,
                cut: false,
                encoding,
                line_ending: LineEnding::None,
                stamp,
                media: Some(Media {
                    media_type: format.media_type().to_owned(),
                    width: self.pixels.map(|(width, _)| width),
                    height: self.pixels.map(|(_, height)| height),
                    // Of a document that was not read to its end the number says nothing.
                    pages: self.pages.pages().filter(|_| at_end),
                }),
            });
        }
        if at_end {
            if let Some(Decoding::Utf16 { decoder, decoded, .. }) = &mut self.decoding {
                decode(decoder, &[], true, decoded, &mut self.window);
            }
            self.window.end();
            let total_lines = self.window.lines();
            // An empty text can be read from its first line on, though it has none.
            if self.first_line > total_lines.max(1) {
                return Err(found(FaultKind::PastEnd { total_lines }, "read"));
            }
        }
        let (mut next_line, mut cut) = (self.window.next(), self.window.cut());
        if end == End::Limit && next_line.is_none() {
            // A line that the limit cuts is shown as far as it goes when it is the first.
            if self.window.shown().is_none() {
                self.window.end();
                cut = true;
            }
            let Some(shown) = self.window.shown() else {
                // What was asked for lies beyond the limit.
                let (size, limit) = (UNSIZED_BYTES_MAX + 1, UNSIZED_BYTES_MAX);
                return Err(found(FaultKind::TooLarge { size, limit }, "read"));
            };
            next_line = Some(shown.last + 1);
        }
        Ok(TextRead {
            entry,
            range: self.window.shown(),
            total_lines: stamp.map(|_| self.window.lines()),
            next_line,
            cut,
            encoding,
            line_ending: self.window.line_ending(),
            text: self.window.into_text(),
            stamp,
            media: None,
        })
    }
}

/// Decodes the bytes that come next. `last` says that none come after them.
fn decode(
    decoder: &mut Decoder,
    mut bytes: &[u8],
    last: bool,
    decoded: &mut String,
    window: &mut Window<'_>,
) {
    loop {
        let (result, read, _) = decoder.decode_to_string(bytes, decoded, last);
        window.add(decoded.as_bytes());
        decoded.clear();
        bytes = &bytes[read..];
        if result == CoderResult::InputEmpty {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{Read as _, Write as _};
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;
    use std::path::{Path, PathBuf};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    use cofferdam_spec::LineRange;
    use proptest::prelude::*;
    use rustix::fs::{CWD, Mode};

    use super::*;
    use crate::call::FileKind;
    use crate::stamp::hash_bytes;
    use crate::testing::{Nobody, Waiting};

    fn made() -> (tempfile::TempDir, PathBuf) {
        let made = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(made.path()).unwrap();
        (made, root)
    }

    fn call(path: &Path) -> ReadText {
        ReadText {
            path: path.to_str().unwrap().to_owned(),
            first_line: 1,
            max_lines: u64::MAX,
            max_bytes: u64::MAX,
            max_line_chars: u64::MAX,
            numbered: false,
            accept_media: true,
        }
    }

    fn read(call: &ReadText) -> Result<TextRead, FaultKind> {
        match read_text(call, &Waiting) {
            Ok(Answer::Text(read)) => Ok(*read),
            Ok(answer) => panic!("{answer:?}"),
            Err(fault) => Err(fault.kind),
        }
    }

    fn lines(first: u64, last: u64) -> Option<LineRange> {
        Some(LineRange { first, last })
    }

    #[test]
    fn encodings_endings_and_borders() {
        let (_made, root) = made();
        let path = root.join("file");
        use Encoding::{Lossy, Utf8, Utf8Bom, Utf16Be, Utf16Le};
        use LineEnding::{CrLf, Lf, Mixed};
        let none = LineEnding::None;
        let cases: [(&[u8], &str, u64, Encoding, LineEnding); 27] = [
            (b"", "", 0, Utf8, none),
            (b"a", "a", 1, Utf8, none),
            (b"a\n", "a\n", 1, Utf8, Lf),
            (b"a\nb", "a\nb", 2, Utf8, Lf),
            (b"\n", "\n", 1, Utf8, Lf),
            (b"\n\n\n", "\n\n\n", 3, Utf8, Lf),
            (b"a\rb\r", "a\rb\r", 1, Utf8, none),
            (b"a\r\nb\r\n", "a\r\nb\r\n", 2, Utf8, CrLf),
            (b"\r\n", "\r\n", 1, Utf8, CrLf),
            (b"a\r\nb\nc", "a\r\nb\nc", 3, Utf8, Mixed),
            (b"\n\r\n", "\n\r\n", 2, Utf8, Mixed),
            (b"a\x0cb\xe2\x80\xa8c\xc2\x85d", "a\x0cb\u{2028}c\u{85}d", 1, Utf8, none),
            (b"\xef\xbb\xbf", "", 0, Utf8Bom, none),
            (b"\xef\xbb\xbfa\n", "a\n", 1, Utf8Bom, Lf),
            (b"\xef\xbb", "\u{fffd}", 1, Lossy, none),
            (b"\xef\xbb\xbf\xff", "\u{fffd}", 1, Lossy, none),
            (b"caf\xe9\n", "caf\u{fffd}\n", 1, Lossy, Lf),
            (b"\xe2\x82\n", "\u{fffd}\n", 1, Lossy, Lf),
            (b"\xff\xfe", "", 0, Utf16Le, none),
            (b"\xfe\xff", "", 0, Utf16Be, none),
            (b"\xff\xfeh\0i\0\r\0\n\0", "hi\r\n", 1, Utf16Le, CrLf),
            (b"\xfe\xff\0h\0i\0\n\0x", "hi\nx", 2, Utf16Be, Lf),
            // A NUL as a letter is still text.
            (b"\xff\xfe\0\0a\0", "\0a", 1, Utf16Le, none),
            (b"\xff\xfe\x3d\xd8\x00\xdeb\0", "\u{1f600}b", 1, Utf16Le, none),
            (b"\xff\xfe\x3d\xd8b\0", "\u{fffd}b", 1, Utf16Le, none),
            (b"\xff\xfe\x00\xdeb\0", "\u{fffd}b", 1, Utf16Le, none),
            (b"\xff\xfea\0b", "a\u{fffd}", 1, Utf16Le, none),
        ];
        for (bytes, text, total, encoding, line_ending) in cases {
            fs::write(&path, bytes).unwrap();
            let read = read(&call(&path)).unwrap();
            let expected = TextRead {
                entry: read.entry.clone(),
                text: text.to_owned(),
                range: lines(1, total).filter(|_| total > 0),
                total_lines: Some(total),
                next_line: None,
                cut: false,
                encoding,
                line_ending,
                stamp: Some(hash_bytes(bytes)),
                media: None,
            };
            assert_eq!(read, expected, "{bytes:x?}");
            assert_eq!(read.entry.size, bytes.len() as u64);
            assert_eq!(read.entry.path, path.to_str().unwrap().as_bytes());
        }
        for bytes in [&b"\0"[..], b"text\n\0", b"\xef\xbb\xbf\0", b"\x7fELF\0\xff"] {
            fs::write(&path, bytes).unwrap();
            assert_eq!(read(&call(&path)), Err(FaultKind::Binary), "{bytes:x?}");
        }
    }

    #[test]
    fn a_file_whose_size_is_not_known_has_no_stamp_and_says_that_it_goes_on() {
        let proc = read(&call(Path::new("/proc/self/status"))).unwrap();
        assert_eq!((proc.stamp, proc.total_lines, proc.next_line), (None, None, None));
        assert!(proc.text.starts_with("Name:") && proc.text.ends_with('\n'));
        let stat = crate::entry::stat("/proc/self/status", true, true, &Waiting).unwrap();
        assert!(matches!(stat, Answer::Entry(_, None)), "{stat:?}");
        // What the limit ends, in a line and after one.
        let read = |first_line: u64, text: &str| {
            let call = ReadText { first_line, ..call(Path::new("/")) };
            let mut reading = Reading::new(&call, 0);
            reading.add(text.as_bytes()).unwrap();
            let read = reading.end(anything(), None, End::Limit).map_err(|fault| fault.kind)?;
            Ok((read.text, read.next_line, read.cut))
        };
        let told = |text: &str, next, cut| Ok((text.to_owned(), Some(next), cut));
        assert_eq!(read(1, "a\nb\n"), told("a\nb\n", 3, false));
        assert_eq!(read(1, "a\nb"), told("a\n", 2, false));
        assert_eq!(read(2, "a\nb"), told("b", 3, true));
        let (size, limit) = (UNSIZED_BYTES_MAX + 1, UNSIZED_BYTES_MAX);
        assert_eq!(read(3, "a\nb"), Err(FaultKind::TooLarge { size, limit }));
    }

    #[test]
    fn a_window_tells_whether_more_follows() {
        let (_made, root) = made();
        let path = root.join("ten");
        fs::write(&path, "1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n").unwrap();
        let whole = call(&path);
        let numbered = ReadText { numbered: true, ..whole.clone() };
        // Two lines with their numbers and feeds are 10 bytes.
        let small = ReadText { max_bytes: 10, ..numbered.clone() };
        let tiny = ReadText { max_bytes: 0, ..numbered.clone() };
        for (call, first_line, max_lines, text, range, next) in [
            (&numbered, 8, 3, "8: 8\n9: 9\n10: 10", (8, 10), None),
            (&numbered, 1, 3, "1: 1\n2: 2\n3: 3", (1, 3), Some(4)),
            (&numbered, 8, 2, "8: 8\n9: 9", (8, 9), Some(10)),
            (&numbered, 10, u64::MAX, "10: 10", (10, 10), None),
            (&small, 1, 10, "1: 1\n2: 2", (1, 2), Some(3)),
            (&small, 9, 10, "9: 9", (9, 9), Some(10)),
            (&tiny, 3, 10, "3: 3", (3, 3), Some(4)),
            (&whole, 9, 10, "9\n10\n", (9, 10), None),
        ] {
            let read = read(&ReadText { first_line, max_lines, ..call.clone() }).unwrap();
            assert_eq!(read.text, text);
            assert_eq!(read.range, lines(range.0, range.1), "{text:?}");
            assert_eq!((read.next_line, read.total_lines), (next, Some(10)), "{text:?}");
        }
        for first_line in [11, 12, u64::MAX] {
            let past = read(&ReadText { first_line, ..whole.clone() });
            assert_eq!(past, Err(FaultKind::PastEnd { total_lines: 10 }));
        }
        fs::write(&path, "").unwrap();
        let past = read(&ReadText { first_line: 2, ..whole });
        assert_eq!(past, Err(FaultKind::PastEnd { total_lines: 0 }));
    }

    #[test]
    fn long_lines_are_cut_and_their_neighbours_are_not() {
        let (_made, root) = made();
        let path = root.join("mix");
        // Longer than a part, with characters across the borders of parts.
        let long = "€".repeat(700_000);
        fs::write(&path, format!("head\n{long}\ntail\n")).unwrap();
        let whole = call(&path);
        let cut = read(&ReadText { max_line_chars: 5, numbered: true, ..whole.clone() }).unwrap();
        assert_eq!(cut.text, "1: head\n2: €€€€€ [truncated]\n3: tail");
        assert!(cut.cut);
        assert_eq!((cut.range, cut.encoding), (lines(1, 3), Encoding::Utf8));
        let all = read(&whole).unwrap();
        assert_eq!(all.text, format!("head\n{long}\ntail\n"));
        assert!(!all.cut);
        assert_eq!(all.stamp, Some(hash_bytes(all.text.as_bytes())));
    }

    #[test]
    fn images_and_documents_are_described_where_they_are_welcome() {
        let (_made, root) = made();
        let path = root.join("media");
        let media = |media_type: &str, size: Option<(u64, u64)>, pages| Media {
            media_type: media_type.to_owned(),
            width: size.map(|(width, _)| width),
            height: size.map(|(_, height)| height),
            pages,
        };
        let gif = b"GIF89a\x40\x01\xf0\0\xf7\0\0;";
        let jpeg = b"\xff\xd8\xff\xc0\x01\x0b\x08\x01\x02\x03\x04\x01";
        let pdf = b"%PDF-1.4\n<</Type/Page>>\n<</Type /Page>>\n";
        for (bytes, expected) in [
            (&gif[..], media("image/gif", Some((320, 240)), None)),
            (jpeg, media("image/jpeg", Some((0x304, 0x102)), None)),
            (pdf, media("application/pdf", None, Some(2))),
            (b"%PDF-1.7\n\0\xff", media("application/pdf", None, None)),
        ] {
            fs::write(&path, bytes).unwrap();
            let welcome = read(&ReadText { first_line: 7, ..call(&path) }).unwrap();
            assert_eq!(welcome.media, Some(expected));
            assert_eq!((welcome.text.as_str(), welcome.range), ("", None));
            assert_eq!(welcome.stamp, Some(hash_bytes(bytes)));
            let refused = read(&ReadText { accept_media: false, ..call(&path) });
            if bytes.contains(&0) {
                assert_eq!(refused, Err(FaultKind::Binary));
            } else {
                assert_eq!(refused.unwrap().media, None);
            }
        }
        // Text always wins, but over a document.
        fs::write(&path, "GIF89a is a format\n").unwrap();
        let text = read(&call(&path)).unwrap();
        assert_eq!((text.media, text.text.as_str()), (None, "GIF89a is a format\n"));
    }

    #[test]
    fn only_regular_files_are_opened() {
        let (_made, root) = made();
        fs::write(root.join("file"), "text").unwrap();
        fs::create_dir(root.join("directory")).unwrap();
        symlink("file", root.join("link")).unwrap();
        symlink("nothing", root.join("dangling")).unwrap();
        symlink("loop", root.join("loop")).unwrap();
        let _listener = UnixListener::bind(root.join("socket")).unwrap();
        rustix::fs::mkfifoat(CWD, root.join("fifo"), Mode::from_raw_mode(0o600)).unwrap();
        symlink("/dev/zero", root.join("zero")).unwrap();
        for (name, kind) in [
            ("directory", FaultKind::IsDirectory),
            ("dangling", FaultKind::NotFound),
            ("loop", FaultKind::Loop),
            ("socket", FaultKind::NotRegular(FileKind::Socket)),
            ("fifo", FaultKind::NotRegular(FileKind::Fifo)),
            ("zero", FaultKind::NotRegular(FileKind::CharacterDevice)),
            ("file/", FaultKind::NotDirectory),
            ("file/x", FaultKind::NotDirectory),
        ] {
            let path = root.join(name);
            assert_eq!(read(&call(&path)), Err(kind.clone()), "{name}");
            let mut opened = None;
            let fault = open(path.to_str().unwrap(), &mut opened).unwrap_err();
            assert_eq!((fault.kind, opened.is_none()), (kind, true), "{name}");
        }
        let mut opened = None;
        let answer = open(root.join("link").to_str().unwrap(), &mut opened).unwrap();
        let Answer::Opened(entry) = answer else { panic!("{answer:?}") };
        assert_eq!(entry.path, root.join("file").to_str().unwrap().as_bytes());
        let opened = opened.unwrap();
        let flags = rustix::fs::fcntl_getfl(&opened).unwrap();
        assert_eq!(flags & (OFlags::ACCMODE | OFlags::NONBLOCK), OFlags::RDONLY);
        let mut text = String::new();
        fs::File::from(opened).read_to_string(&mut text).unwrap();
        assert_eq!(text, "text");
    }

    #[test]
    fn a_file_that_grows_while_it_is_read_has_an_end() {
        let (_made, root) = made();
        let path = root.join("log");
        fs::write(&path, "line\n".repeat(500_000)).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut file = fs::File::options().append(true).open(&path).unwrap();
                let more = "line\n".repeat(1_000);
                for _ in 0..20_000 {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    file.write_all(more.as_bytes()).unwrap();
                }
            });
            let read = read(&ReadText { max_lines: 1, ..call(&path) });
            stop.store(true, Ordering::Relaxed);
            let read = read.unwrap();
            assert_eq!(read.stamp.unwrap().size, read.entry.size);
            assert_eq!(read.total_lines, Some(read.entry.size.div_ceil(5)));
            assert_eq!((read.text.as_str(), read.next_line), ("line\n", Some(2)));
        });
    }

    /// A file of 8 GiB that starts with `text`, and whose rest is a hole.
    fn sparse(path: &Path, text: impl AsRef<[u8]>) {
        fs::write(path, text).unwrap();
        fs::File::options().write(true).open(path).unwrap().set_len(8 << 30).unwrap();
    }

    #[test]
    fn of_a_file_too_large_for_a_stamp_no_more_is_read_than_the_window_needs() {
        let (_made, root) = made();
        let path = root.join("big");
        sparse(&path, "one\ntwo\n".repeat(100_000));
        let started = Instant::now();
        let first = read(&ReadText { max_lines: 2, ..call(&path) }).unwrap();
        let expected = TextRead {
            entry: first.entry.clone(),
            text: "one\ntwo\n".to_owned(),
            range: lines(1, 2),
            total_lines: None,
            next_line: Some(3),
            cut: false,
            encoding: Encoding::Utf8,
            line_ending: LineEnding::Lf,
            stamp: None,
            media: None,
        };
        assert_eq!(first, expected);
        // The window lies in the hole, whose first bytes tell that this is no text.
        let hole = ReadText { first_line: 1_000_000, ..call(&path) };
        assert_eq!(read(&hole), Err(FaultKind::Binary));
        sparse(&path, "\n");
        assert_eq!(read(&call(&path)), Err(FaultKind::Binary));
        sparse(&path, "%PDF-1.7\n/Type /Page\n");
        let pdf = read(&call(&path)).unwrap();
        assert_eq!((pdf.media.unwrap().pages, pdf.stamp), (None, None));
        sparse(&path, b"GIF89a\x40\x01\xf0\0");
        let image = read(&call(&path)).unwrap();
        assert_eq!((image.media.unwrap().width, image.stamp), (Some(320), None));
        // To read all of it each time takes longer, even of a hole.
        assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    }

    #[test]
    fn a_long_way_to_the_window_is_given_up_when_nobody_waits() {
        let (_made, root) = made();
        let path = root.join("utf16");
        fs::write(&path, b"\xff\xfe").unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_len(8 << 30).unwrap();
        let call = ReadText { first_line: 2, ..call(&path) };
        let fault = read_text(&call, &Nobody).unwrap_err();
        assert_eq!(fault, found(FaultKind::Other, "cancelled"));
    }

    /// What a simple reader says, which has the whole file and all the time.
    fn model(bytes: &[u8], call: &ReadText) -> Result<TextRead, FaultKind> {
        let (text, encoding) = model_text(bytes)?;
        let all: Vec<&str> = text.split_inclusive('\n').collect();
        let total = all.len() as u64;
        if call.first_line > total.max(1) {
            return Err(FaultKind::PastEnd { total_lines: total });
        }
        let (mut shown, mut used, mut any_cut) = (Vec::new(), 0, false);
        for (index, line) in all.iter().enumerate().skip(call.first_line as usize - 1) {
            let (content, feed) = line.strip_suffix('\n').map_or((*line, ""), |line| (line, "\n"));
            let units = content.encode_utf16().count() as u64;
            let is_cut = units > call.max_line_chars;
            let mut content = content.to_owned();
            while content.encode_utf16().count() as u64 > call.max_line_chars {
                content.pop();
            }
            if is_cut {
                content.push_str(" [truncated]");
            }
            let (line, cost) = if call.numbered {
                let line = format!("{}: {content}", index + 1);
                let cost = line.len() + 1;
                (line, cost)
            } else {
                let line = content + feed;
                let cost = line.len();
                (line, cost)
            };
            let full = used + cost as u64 > call.max_bytes || shown.len() as u64 == call.max_lines;
            if full && !shown.is_empty() {
                break;
            }
            used += cost as u64;
            shown.push(line);
            any_cut |= is_cut;
        }
        let last = call.first_line + shown.len() as u64 - 1;
        let (lf, crlf) = (text.matches('\n').count(), text.matches("\r\n").count());
        Ok(TextRead {
            entry: anything(),
            text: shown.join(if call.numbered { "\n" } else { "" }),
            range: lines(call.first_line, last).filter(|_| !shown.is_empty()),
            total_lines: Some(total),
            next_line: Some(last + 1).filter(|next| *next <= total),
            cut: any_cut,
            encoding,
            line_ending: match (lf - crlf, crlf) {
                (0, 0) => LineEnding::None,
                (_, 0) => LineEnding::Lf,
                (0, _) => LineEnding::CrLf,
                _ => LineEnding::Mixed,
            },
            stamp: Some(hash_bytes(bytes)),
            media: None,
        })
    }

    fn model_text(bytes: &[u8]) -> Result<(String, Encoding), FaultKind> {
        type FromBytes = fn([u8; 2]) -> u16;
        let utf16: [(&[u8], Encoding, FromBytes); 2] = [
            (b"\xff\xfe", Encoding::Utf16Le, u16::from_le_bytes),
            (b"\xfe\xff", Encoding::Utf16Be, u16::from_be_bytes),
        ];
        for (mark, encoding, unit) in utf16 {
            let Some(rest) = bytes.strip_prefix(mark) else { continue };
            let mut units = rest.chunks_exact(2).map(|pair| unit([pair[0], pair[1]]));
            let decoded = char::decode_utf16(units.clone());
            let mut text: String = decoded.map(|one| one.unwrap_or('\u{fffd}')).collect();
            // Half a unit is wrong; after half a pair both are wrong together (Encoding Standard).
            let half_pair = units.next_back().is_some_and(|unit| (0xd800..0xdc00).contains(&unit));
            if rest.len() % 2 == 1 && !half_pair {
                text.push('\u{fffd}');
            }
            return Ok((text, encoding));
        }
        let (rest, encoding) = match bytes.strip_prefix(b"\xef\xbb\xbf") {
            Some(rest) => (rest, Encoding::Utf8Bom),
            None => (bytes, Encoding::Utf8),
        };
        if rest.contains(&0) {
            return Err(FaultKind::Binary);
        }
        let encoding = if std::str::from_utf8(rest).is_ok() { encoding } else { Encoding::Lossy };
        Ok((String::from_utf8_lossy(rest).into_owned(), encoding))
    }

    fn anything() -> Entry {
        Entry {
            path: b"/file".to_vec(),
            kind: FileKind::Regular,
            size: 0,
            mode: 0,
            uid: 0,
            gid: 0,
            modified: (0, 0),
            links: 1,
            target: None,
        }
    }

    /// Reads bytes that come in parts of this size, but for the first, which holds the marks.
    fn read_parts(bytes: &[u8], part: usize, call: &ReadText) -> Result<TextRead, FaultKind> {
        let mut reading = Reading::new(call, bytes.len() as u64);
        let (head, rest) = bytes.split_at(bytes.len().min(3));
        for part in std::iter::once(head).chain(rest.chunks(part)) {
            reading.add(part).map_err(|fault| fault.kind)?;
        }
        reading.end(anything(), Some(hash_bytes(bytes)), End::Whole).map_err(|fault| fault.kind)
    }

    fn piece() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![
            8 => "[a-z]{1,9}".prop_map(String::into_bytes),
            8 => Just(b"\n".to_vec()),
            4 => Just(b"\r\n".to_vec()),
            1 => Just(b"\r".to_vec()),
            4 => "[é€😀]{1,4}".prop_map(String::into_bytes),
            1 => Just(b"\xef\xbb\xbf".to_vec()),
            1 => prop::collection::vec(1..=255_u8, 1..3),
        ]
    }

    fn content() -> impl Strategy<Value = Vec<u8>> {
        let pieces = || prop::collection::vec(piece(), 0..30).prop_map(|pieces| pieces.concat());
        let utf16 = |mark: [u8; 2], bytes: fn(u16) -> [u8; 2]| {
            (pieces(), prop::collection::vec(any::<u8>(), 0..4)).prop_map(move |(text, end)| {
                let text = String::from_utf8_lossy(&text).into_owned();
                let units = text.encode_utf16().flat_map(bytes);
                mark.into_iter().chain(units).chain(end).collect()
            })
        };
        prop_oneof![
            4 => pieces(),
            1 => pieces().prop_map(|text| [b"\xef\xbb\xbf", text.as_slice()].concat()),
            1 => utf16([0xff, 0xfe], u16::to_le_bytes),
            1 => utf16([0xfe, 0xff], u16::to_be_bytes),
            1 => prop::collection::vec(prop_oneof![Just(b'\n'), any::<u8>()], 0..40),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn texts_are_read_as_a_simple_reader_does(
            bytes in content(),
            part in 1..9_usize,
            first_line in 1..12_u64,
            max_lines in 1..12_u64,
            max_bytes in 0..60_u64,
            max_line_chars in 0..20_u64,
            numbered: bool,
        ) {
            let call = ReadText {
                first_line,
                max_lines,
                max_bytes,
                max_line_chars,
                numbered,
                accept_media: false,
                ..call(Path::new("/file"))
            };
            prop_assert_eq!(read_parts(&bytes, part, &call), model(&bytes, &call));
        }

        #[test]
        fn all_pages_are_the_text(
            bytes in content(),
            part in 1..9_usize,
            max_lines in 1..5_u64,
            max_bytes in 0..60_u64,
        ) {
            let mut call = ReadText {
                max_lines,
                max_bytes,
                accept_media: false,
                ..call(Path::new("/file"))
            };
            let Ok((text, _)) = model_text(&bytes) else {
                prop_assert_eq!(read_parts(&bytes, part, &call), Err(FaultKind::Binary));
                return Ok(());
            };
            let mut pages = String::new();
            for _ in 0..=bytes.len() {
                let page = read_parts(&bytes, part, &call).unwrap();
                pages += &page.text;
                match page.next_line {
                    Some(next) => call.first_line = next,
                    None => break,
                }
            }
            prop_assert_eq!(pages, text);
        }
    }
}
