//! Images and documents, told by their first bytes.
//!
//! No picture is decoded: width and height stand in the header. Every parser takes any bytes, reads
//! only the header that it is given, and tells nothing rather than something it does not know.

use memchr::memchr;
use memchr::memmem::Finder;

/// Formats that are told by their first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// PNG (RFC 2083).
    Png,
    /// JPEG (ITU T.81).
    Jpeg,
    /// GIF, 87a and 89a.
    Gif,
    /// WebP (RFC 9649).
    WebP,
    /// PDF (ISO 32000).
    Pdf,
}

impl Format {
    /// The format whose magic bytes a file starts with.
    pub(crate) fn of(head: &[u8]) -> Option<Self> {
        if head.starts_with(b"\x89PNG\r\n\x1a\n") {
            Some(Format::Png)
        } else if head.starts_with(b"\xff\xd8\xff") {
            Some(Format::Jpeg)
        } else if head.starts_with(b"GIF87a") || head.starts_with(b"GIF89a") {
            Some(Format::Gif)
        } else if head.starts_with(b"RIFF") && head.get(8..12) == Some(b"WEBP") {
            Some(Format::WebP)
        } else if head.starts_with(b"%PDF-") {
            Some(Format::Pdf)
        } else {
            None
        }
    }

    /// Its media type.
    pub(crate) fn media_type(self) -> &'static str {
        match self {
            Format::Png => "image/png",
            Format::Jpeg => "image/jpeg",
            Format::Gif => "image/gif",
            Format::WebP => "image/webp",
            Format::Pdf => "application/pdf",
        }
    }

    /// Width and height of an image in pixels, from the file's first bytes; `None` where they do
    /// not tell, or tell 0.
    pub(crate) fn size(self, head: &[u8]) -> Option<(u64, u64)> {
        let (width, height) = match self {
            Format::Png if head.get(12..16)? == b"IHDR" => (big(head, 16, 4)?, big(head, 20, 4)?),
            Format::Png | Format::Pdf => return None,
            Format::Jpeg => jpeg_size(head)?,
            Format::Gif => (little(head, 6, 2)?, little(head, 8, 2)?),
            Format::WebP => webp_size(head)?,
        };
        (width > 0 && height > 0).then_some((width, height))
    }
}

/// A number of at most 8 bytes, most byte first.
fn big(bytes: &[u8], at: usize, length: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(length)?)?;
    Some(bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

/// A number of at most 8 bytes, least byte first.
fn little(bytes: &[u8], at: usize, length: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(length)?)?;
    Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

/// The size in the first start of frame. Segments before it are skipped by their lengths.
fn jpeg_size(head: &[u8]) -> Option<(u64, u64)> {
    let mut at = 2;
    loop {
        // Up to the next marker; any number of FF may stand before its code.
        at += memchr(0xff, head.get(at..)?)?;
        while *head.get(at)? == 0xff {
            at += 1;
        }
        let code = head[at];
        at += 1;
        match code {
            // No marker, or one without a segment.
            0x00 | 0x01 | 0xd0..=0xd8 => {}
            // Start of frame; C4, C8 and CC are tables and extensions.
            0xc0..=0xc3 | 0xc5..=0xc7 | 0xc9..=0xcb | 0xcd..=0xcf => {
                return Some((big(head, at + 5, 2)?, big(head, at + 3, 2)?));
            }
            // The end, or the picture itself, before any frame.
            0xd9 | 0xda => return None,
            _ => at += big(head, at, 2)? as usize,
        }
    }
}

/// The size in the first chunk: of a simple file in either coding, or of the canvas.
fn webp_size(head: &[u8]) -> Option<(u64, u64)> {
    match head.get(12..16)? {
        b"VP8 " if head.get(23..26)? == b"\x9d\x01\x2a" => {
            Some((little(head, 26, 2)? & 0x3fff, little(head, 28, 2)? & 0x3fff))
        }
        b"VP8L" if *head.get(20)? == 0x2f => {
            let sizes = little(head, 21, 4)?;
            Some(((sizes & 0x3fff) + 1, (sizes >> 14 & 0x3fff) + 1))
        }
        b"VP8X" => Some((little(head, 24, 3)? + 1, little(head, 27, 3)? + 1)),
        _ => None,
    }
}

/// Bytes from the start of `/Type` in which `/Page` must have ended.
const PAGE_BYTES: usize = 32;

/// Counts the pages of a PDF: objects with `/Type /Page`.
///
/// It is a lower bound: newer PDFs keep such objects in compressed streams, which are not opened.
/// Objects that a later version of the same file replaced are counted with their successors.
pub(crate) struct PageCounter {
    finder: Finder<'static>,
    pages: u64,
    /// The last bytes, in which a page may have begun; at most [`PAGE_BYTES`].
    undecided: Vec<u8>,
}

impl PageCounter {
    /// Nothing was counted.
    pub(crate) fn new() -> Self {
        Self { finder: Finder::new(b"/Type"), pages: 0, undecided: Vec::new() }
    }

    /// Looks at the bytes that come next.
    pub(crate) fn add(&mut self, part: &[u8]) {
        self.undecided.extend_from_slice(&part[..part.len().min(PAGE_BYTES)]);
        let decided = self.undecided.len().saturating_sub(PAGE_BYTES);
        self.pages += self.count(&self.undecided, decided);
        if part.len() > PAGE_BYTES {
            let decided = part.len() - PAGE_BYTES;
            self.pages += self.count(part, decided);
            self.undecided.clear();
            self.undecided.extend_from_slice(&part[decided..]);
        } else {
            self.undecided.drain(..decided);
        }
    }

    /// The number of pages; `None` when there was none to see.
    pub(crate) fn pages(&self) -> Option<u64> {
        let pages = self.pages + self.count(&self.undecided, self.undecided.len());
        (pages > 0).then_some(pages)
    }

    /// Pages that begin before `end`.
    fn count(&self, bytes: &[u8], end: usize) -> u64 {
        let starts = self.finder.find_iter(bytes).take_while(|start| *start < end);
        starts.filter(|start| is_page(&bytes[*start..bytes.len().min(start + PAGE_BYTES)])).count()
            as u64
    }
}

/// Whether `/Type` is followed by exactly the name `/Page`.
fn is_page(bytes: &[u8]) -> bool {
    let blank = |byte: &u8| matches!(byte, 0 | b'\t' | b'\n' | 0x0c | b'\r' | b' ');
    let Some(value) = bytes.strip_prefix(b"/Type") else { return false };
    let name = value.iter().position(|byte| !blank(byte)).map_or(&[][..], |at| &value[at..]);
    let Some(after) = name.strip_prefix(b"/Page") else { return false };
    // A name goes on until a blank or a delimiter.
    after.first().is_none_or(|byte| blank(byte) || b"()<>[]{}/%".contains(byte))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn png(width: u32, height: u32) -> Vec<u8> {
        let mut bytes = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR".to_vec();
        bytes.extend(width.to_be_bytes());
        bytes.extend(height.to_be_bytes());
        bytes.extend(b"\x08\x06\0\0\0");
        bytes
    }

    fn jpeg(segments: &[u8]) -> Vec<u8> {
        [b"\xff\xd8", segments].concat()
    }

    fn webp(chunk: &[u8]) -> Vec<u8> {
        [b"RIFF\x1a\0\0\0WEBP", chunk].concat()
    }

    #[test]
    fn headers_tell_format_and_size() {
        let frame = b"\xff\xc2\0\x0b\x08\x01\x02\x03\x04\x01\x01\x11\0";
        let exif = [&b"\xff\xe1\x02\x02"[..], &[0xff; 0x200], b"\xff\xff"].concat();
        let table = b"\xff\xc4\0\x05\x01\x02\x03";
        let restart = b"\xff\xd0\xff\x01";
        type Case = (Vec<u8>, Format, Option<(u64, u64)>);
        let cases: [Case; 14] = [
            (png(640, 0x0102_0304), Format::Png, Some((640, 0x0102_0304))),
            (png(0, 5), Format::Png, None),
            (png(1, 1)[..20].to_vec(), Format::Png, None),
            (b"GIF89a\x40\x01\xf0\0\xf7".to_vec(), Format::Gif, Some((320, 240))),
            (b"GIF87a\x01".to_vec(), Format::Gif, None),
            (jpeg(frame), Format::Jpeg, Some((0x304, 0x102))),
            (
                jpeg(&[&exif[..], table, restart, frame].concat()),
                Format::Jpeg,
                Some((0x304, 0x102)),
            ),
            (jpeg(&[b"\xff\xda\0\x03\0", &frame[..]].concat()), Format::Jpeg, None),
            (jpeg(b"\xff\xe0\xff\xff"), Format::Jpeg, None),
            (
                webp(b"VP8 \0\0\0\0\x30\x01\0\x9d\x01\x2a\x40\x41\xf0\0"),
                Format::WebP,
                Some((0x140, 0xf0)),
            ),
            // 300 - 1 = 0x12b and 200 - 1 = 0xc7, 14 bits each.
            (webp(b"VP8L\0\0\0\0\x2f\x2b\xc1\x31\0"), Format::WebP, Some((300, 200))),
            (webp(b"VP8X\x0a\0\0\0\0\0\0\0\x3f\x01\0\xef\0\0"), Format::WebP, Some((320, 240))),
            (webp(b"ALPH"), Format::WebP, None),
            (b"%PDF-1.7\n".to_vec(), Format::Pdf, None),
        ];
        for (bytes, format, size) in cases {
            assert_eq!(Format::of(&bytes), Some(format), "{bytes:x?}");
            assert_eq!(format.size(&bytes), size, "{bytes:x?}");
        }
        for bytes in [&b""[..], b"GIF88a", b"RIFF\0\0\0\0WAVE", b"\x89PNG", b" %PDF-1.7"] {
            assert_eq!(Format::of(bytes), None, "{bytes:x?}");
        }
    }

    fn pages(bytes: &[u8], part: usize) -> Option<u64> {
        let mut counter = PageCounter::new();
        bytes.chunks(part).for_each(|part| counter.add(part));
        counter.pages()
    }

    #[test]
    fn pages_are_objects_of_the_type_page_however_the_file_is_cut() {
        let pdf = b"%PDF-1.4\n1 0 obj<</Type/Pages/Kids[2 0 R]/Count 2>>\n\
            2 0 obj << /Type /Page /Parent 1 0 R >>\n3 0 obj<</Type\r\n/Page>>\n\
            4 0 obj<</Type/PageLabel>>/Type/Catalog/Types/Page /Type/Page";
        for part in 1..pdf.len() {
            assert_eq!(pages(pdf, part), Some(3), "{part}");
        }
        assert_eq!(pages(b"%PDF-1.5 stream", 100), None);
    }

    proptest! {
        #[test]
        fn no_bytes_are_too_strange(
            format in 0..5_usize,
            bytes in prop::collection::vec(prop_oneof![Just(0xff_u8), any::<u8>()], 0..200),
            part in 1..40_usize,
        ) {
            let magic: [&[u8]; 5] = [
                b"\x89PNG\r\n\x1a\n",
                b"\xff\xd8\xff",
                b"GIF89a",
                b"RIFF\0\0\0\0WEBPVP8X",
                b"%PDF-",
            ];
            let bytes = [magic[format], &bytes].concat();
            let told = Format::of(&bytes).unwrap();
            for end in 0..bytes.len() {
                if let Some((width, height)) = told.size(&bytes[..end]) {
                    prop_assert!(width > 0 && height > 0);
                    prop_assert_eq!(told.size(&bytes), Some((width, height)));
                }
            }
            prop_assert_eq!(pages(&bytes, part), pages(&bytes, bytes.len()));
        }
    }
}
