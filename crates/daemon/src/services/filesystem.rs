//! `FilesystemService`.

mod read;
mod reader;
mod upload;
mod watch;
mod wire;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use cofferdam_files::call::{Entry, Glob, Grep, ReadText};
use cofferdam_proto::v1;
use cofferdam_proto::v1::filesystem_service_server::FilesystemService;
use cofferdam_proto::v1::write_request::Part;
use futures::stream::{self, Stream as FutureStream, StreamExt};
use prost::Message;
use tonic::{Request, Response, Status, Streaming};

use self::read::Wanted;
pub(crate) use self::upload::UPLOAD_BYTES_MAX;
pub(crate) use self::watch::Watches;
use crate::files::{Caller, EditFile, Files, GrepPart, Matches, WriteContent, WriteFile};
use crate::status::{Fault, violation};
use crate::validate::{Checker, MESSAGE_BYTES_MAX, PAGE_MAX, within};

/// Largest WriteTextRequest.
pub(crate) const WRITE_TEXT_REQUEST_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// Largest data of one message of a Write.
const WRITE_DATA_BYTES_MAX: usize = 1024 * 1024;

/// Permission bits of what is made, where a call names none.
const FILE_MODE: u32 = 0o644;
const DIRECTORY_MODE: u32 = 0o755;

/// Lines of a ReadText that names no number.
const LINES_DEFAULT: u64 = 2000;

/// Bytes of a ReadText's lines, so that the response stays below its limit.
const TEXT_BYTES_MAX: u64 = 768 * 1024;

/// Longest line of a ReadText, in UTF-16 units: in UTF-8 it takes at most three times as many
/// bytes, which is what one response has room for.
const LINE_CHARS_MAX: u64 = 256 * 1024;

/// Longest line of a Grep.
const GREP_LINE_CHARS_MAX: u64 = 2000;

/// Results of a Glob that names no number; matches of each file of a Grep that names none.
const RESULTS_DEFAULT: u32 = 100;
const RESULTS_MAX: u32 = 1000;

/// Most lines around a match.
const CONTEXT_MAX: u32 = 100;

/// Room for everything of a response but its entries.
const BYTES_RESERVED: usize = 64 * 1024;

/// How long a Grep waits for its client to read on. Few searches run at once.
const READER_PATIENCE: Duration = Duration::from_secs(30);

/// Tells a page token of ours from other text.
const PAGE_TOKEN_PREFIX: &str = "after-";

type Parts<T> = Pin<Box<dyn FutureStream<Item = Result<T, Status>> + Send>>;

/// The service.
#[derive(Debug, Clone)]
pub(crate) struct Filesystem {
    files: Files,
    watches: Watches,
    /// Where uploads are kept until they are whole.
    uploads: Arc<Path>,
}

impl Filesystem {
    /// A service over files. Uploads are kept in `uploads`, without names.
    pub(crate) fn new(files: Files, watches: Watches, uploads: PathBuf) -> Self {
        Self { files, watches, uploads: uploads.into() }
    }

    async fn write_content(
        &self,
        target: Target,
        content: WriteContent,
    ) -> Result<(v1::FileWritten, Option<v1::Enforcement>), Status> {
        let Target { caller, write } = target;
        let write = WriteFile { content, ..write };
        let written = self.files.write(&caller, write).await.map_err(Fault::from)?;
        Ok((wire::written(written), Some(self.files.enforcement())))
    }
}

/// A checked target of a write; its content is not there yet.
struct Target {
    caller: Caller,
    write: WriteFile,
}

fn target(checker: &mut Checker, target: Option<&v1::WriteTarget>) -> Option<Target> {
    let Some(target) = target else {
        checker.refuse("target", "is missing");
        return None;
    };
    let (caller, path, expected, mode) = checker.inside("target", |checker| {
        (
            checker.caller(&target.session, &target.request_id),
            checker.path("path", &target.path),
            checker.expected(target.expected.as_ref()),
            checker.mode(target.mode, FILE_MODE),
        )
    });
    let write = WriteFile {
        path: path?,
        content: WriteContent::Bytes(bytes::Bytes::new()),
        expected: expected?,
        mode: mode?,
        parents: !target.no_parents,
        keep_bom: false,
    };
    Some(Target { caller: caller?, write })
}

#[tonic::async_trait]
impl FilesystemService for Filesystem {
    type ReadStream = Parts<v1::ReadResponse>;
    type GrepStream = Parts<v1::GrepResponse>;
    type WatchDirStream = Parts<v1::WatchDirResponse>;

    async fn stat(
        &self,
        request: Request<v1::StatRequest>,
    ) -> Result<Response<v1::StatResponse>, Status> {
        let request = request.into_inner();
        within(&request, MESSAGE_BYTES_MAX)?;
        let mut checker = Checker::default();
        let path = checker.path("path", &request.path);
        let path = checker.finish(path)?;
        let found = self.files.stat(&path, !request.no_follow, request.with_stamp).await;
        let (entry, stamp) = found.map_err(Fault::from)?;
        Ok(Response::new(v1::StatResponse {
            info: Some(wire::info(&entry)),
            stamp: stamp.filter(|_| request.with_stamp).as_ref().map(Into::into),
            enforcement: Some(self.files.enforcement()),
        }))
    }

    async fn list_dir(
        &self,
        request: Request<v1::ListDirRequest>,
    ) -> Result<Response<v1::ListDirResponse>, Status> {
        let request = request.into_inner();
        within(&request, MESSAGE_BYTES_MAX)?;
        let mut checker = Checker::default();
        let path = checker.path("path", &request.path);
        let count = checker.bounded("page_size", request.page_size, PAGE_MAX, PAGE_MAX);
        let after = match request.page_token.as_str() {
            "" => Some(None),
            token => parse_page_token(token).map(Some),
        };
        if after.is_none() {
            checker.refuse("page_token", "is none that this service gave");
        }
        let page = || Some((path?, count?, after?));
        let (path, count, after) = checker.finish(page())?;
        let listed = self.files.list(&path, after, count).await;
        let (entries, more) = listed.map_err(Fault::from)?;
        let (entries, next_page_token) = fill_page(&entries, more);
        let enforcement = Some(self.files.enforcement());
        Ok(Response::new(v1::ListDirResponse { entries, next_page_token, enforcement }))
    }

    async fn read(
        &self,
        request: Request<v1::ReadRequest>,
    ) -> Result<Response<Self::ReadStream>, Status> {
        let request = request.into_inner();
        within(&request, MESSAGE_BYTES_MAX)?;
        let mut checker = Checker::default();
        let path = checker.path("path", &request.path);
        let caller = checker.reader(&request.session, "Read");
        let (path, caller) = checker.finish(path.zip(caller))?;
        let opened = self.files.open(&path).await.map_err(Fault::from)?;
        let wanted = Wanted { offset: request.offset, length: request.length };
        let parts = read::parts(self.files.clone(), path, opened, wanted, caller)?;
        Ok(Response::new(Box::pin(parts)))
    }

    async fn read_text(
        &self,
        request: Request<v1::ReadTextRequest>,
    ) -> Result<Response<v1::ReadTextResponse>, Status> {
        let request = request.into_inner();
        within(&request, MESSAGE_BYTES_MAX)?;
        let mut checker = Checker::default();
        let path = checker.path("path", &request.path);
        let caller = checker.reader(&request.session, "ReadText");
        let (path, caller) = checker.finish(path.zip(caller))?;
        let max_lines = if request.max_lines == 0 { LINES_DEFAULT } else { request.max_lines };
        let read = ReadText {
            path,
            first_line: request.first_line.max(1),
            max_lines,
            max_bytes: TEXT_BYTES_MAX,
            max_line_chars: LINE_CHARS_MAX,
            numbered: false,
            accept_media: false,
        };
        let text = self.files.read_text(Some(&caller), read).await.map_err(Fault::from)?;
        let enforcement = Some(self.files.enforcement());
        Ok(Response::new(v1::ReadTextResponse { enforcement, ..wire::text(text) }))
    }

    async fn write(
        &self,
        request: Request<Streaming<v1::WriteRequest>>,
    ) -> Result<Response<v1::WriteResponse>, Status> {
        let mut stream = request.into_inner();
        let Some(Part::Target(first)) = stream.message().await?.and_then(|first| first.part) else {
            let missing = vec![violation("target", "must be in the first message")];
            return Err(Fault::Invalid(missing).into());
        };
        within(&first, MESSAGE_BYTES_MAX)?;
        let mut checker = Checker::default();
        let checked = target(&mut checker, Some(&first));
        let target = checker.finish(checked)?;
        // An upload holds a descriptor and a thread, so it counts.
        let permit = self.files.admit().map_err(Fault::from)?;
        let data = stream.map(|message| {
            let refuse = |reason| Fault::Invalid(vec![violation("data", reason)]);
            match message?.part {
                Some(Part::Data(data)) if data.len() > WRITE_DATA_BYTES_MAX => {
                    let (size, limit) = (data.len() as u64, WRITE_DATA_BYTES_MAX as u64);
                    Err(Fault::TooLarge { size, limit }.into())
                }
                Some(Part::Data(data)) => Ok(data),
                Some(Part::Target(_)) => Err(refuse("only the first message has a target").into()),
                None => Err(refuse("is missing").into()),
            }
        });
        let content = upload::receive(&self.uploads, &target.write.path, data).await?;
        drop(permit);
        let (written, enforcement) = self.write_content(target, content).await?;
        let written = Some(written);
        let response = v1::WriteResponse { written, enforcement, ..v1::WriteResponse::default() };
        Ok(Response::new(response))
    }

    async fn write_text(
        &self,
        request: Request<v1::WriteTextRequest>,
    ) -> Result<Response<v1::WriteTextResponse>, Status> {
        let request = request.into_inner();
        within(&request, WRITE_TEXT_REQUEST_BYTES_MAX)?;
        let mut checker = Checker::default();
        let checked = target(&mut checker, request.target.as_ref());
        let target = checker.finish(checked)?;
        let content = WriteContent::Bytes(request.text.into());
        let (written, enforcement) = self.write_content(target, content).await?;
        Ok(Response::new(v1::WriteTextResponse {
            written: Some(written),
            enforcement,
            ..v1::WriteTextResponse::default()
        }))
    }

    async fn edit(
        &self,
        request: Request<v1::EditRequest>,
    ) -> Result<Response<v1::EditResponse>, Status> {
        let request = request.into_inner();
        within(&request, MESSAGE_BYTES_MAX)?;
        let mut checker = Checker::default();
        let caller = checker.caller(&request.session, &request.request_id);
        let path = checker.path("path", &request.path);
        let expected = checker.expected_content(request.expected.as_ref());
        if request.old_text.is_empty() {
            checker.refuse("old_text", "is empty");
        } else if request.old_text == request.new_text {
            checker.refuse("new_text", "is the same as old_text");
        }
        let edit = || {
            let edit = EditFile {
                path: path?,
                old: request.old_text,
                new: request.new_text,
                all: request.replace_all,
                expected: expected?,
            };
            Some((caller?, edit))
        };
        let (caller, edit) = checker.finish(edit())?;
        let edited = self.files.edit(&caller, edit).await.map_err(Fault::from)?;
        Ok(Response::new(v1::EditResponse {
            written: Some(wire::written(edited.written)),
            replacements: edited.replacements,
            first_line: edited.first_line,
            enforcement: Some(self.files.enforcement()),
            ..v1::EditResponse::default()
        }))
    }

    async fn make_dir(
        &self,
        request: Request<v1::MakeDirRequest>,
    ) -> Result<Response<v1::MakeDirResponse>, Status> {
        let request = request.into_inner();
        within(&request, MESSAGE_BYTES_MAX)?;
        let mut checker = Checker::default();
        let caller = checker.caller(&request.session, &request.request_id);
        let path = checker.path("path", &request.path);
        let mode = checker.mode(request.mode, DIRECTORY_MODE);
        let checked = || Some((caller?, path?, mode?));
        let (_, path, mode) = checker.finish(checked())?;
        let made = self.files.make_dir(&path, mode, request.parents).await;
        let (path, created) = made.map_err(Fault::from)?;
        Ok(Response::new(v1::MakeDirResponse {
            path,
            created,
            enforcement: Some(self.files.enforcement()),
            ..v1::MakeDirResponse::default()
        }))
    }

    async fn r#move(
        &self,
        request: Request<v1::MoveRequest>,
    ) -> Result<Response<v1::MoveResponse>, Status> {
        let request = request.into_inner();
        within(&request, MESSAGE_BYTES_MAX)?;
        let mut checker = Checker::default();
        let caller = checker.caller(&request.session, &request.request_id);
        let from = checker.path("from", &request.from);
        let to = checker.path("to", &request.to);
        let expected = checker.expected_content(request.expected.as_ref());
        let checked = || Some((caller?, from?, to?, expected?));
        let (caller, from, to, expected) = checker.finish(checked())?;
        let moved = self.files.move_entry(&caller, &from, &to, expected).await;
        let (from, to) = moved.map_err(Fault::from)?;
        Ok(Response::new(v1::MoveResponse {
            from,
            to,
            enforcement: Some(self.files.enforcement()),
            ..v1::MoveResponse::default()
        }))
    }

    async fn remove(
        &self,
        request: Request<v1::RemoveRequest>,
    ) -> Result<Response<v1::RemoveResponse>, Status> {
        let request = request.into_inner();
        within(&request, MESSAGE_BYTES_MAX)?;
        let mut checker = Checker::default();
        let caller = checker.caller(&request.session, &request.request_id);
        let path = checker.path("path", &request.path);
        let expected = checker.expected_content(request.expected.as_ref());
        let checked = || Some((caller?, path?, expected?));
        let (caller, path, expected) = checker.finish(checked())?;
        let removed = self.files.remove(&caller, &path, request.recursive, expected).await;
        let (path, removed) = removed.map_err(Fault::from)?;
        Ok(Response::new(v1::RemoveResponse {
            path,
            removed,
            enforcement: Some(self.files.enforcement()),
            ..v1::RemoveResponse::default()
        }))
    }

    async fn glob(
        &self,
        request: Request<v1::GlobRequest>,
    ) -> Result<Response<v1::GlobResponse>, Status> {
        let request = request.into_inner();
        within(&request, MESSAGE_BYTES_MAX)?;
        let mut checker = Checker::default();
        pattern(&mut checker, "pattern", &request.pattern);
        let path = checker.directory("path", &request.path);
        let limit = checker.bounded("limit", request.limit, RESULTS_DEFAULT, RESULTS_MAX);
        let (path, limit) = checker.finish(path.zip(limit))?;
        let glob = Glob {
            pattern: request.pattern,
            path,
            limit,
            max_bytes: MESSAGE_BYTES_MAX - BYTES_RESERVED as u64,
            include_ignored: request.include_ignored,
        };
        let found = self.files.glob(glob).await.map_err(Fault::from)?;
        let (paths, all) = fill_paths(&found.paths);
        Ok(Response::new(v1::GlobResponse {
            path: found.canonical,
            paths,
            truncated: found.truncated || !all,
            account: Some(wire::account(&found.account)),
            enforcement: Some(self.files.enforcement()),
        }))
    }

    async fn grep(
        &self,
        request: Request<v1::GrepRequest>,
    ) -> Result<Response<Self::GrepStream>, Status> {
        let request = request.into_inner();
        within(&request, MESSAGE_BYTES_MAX)?;
        let grep = grep(request)?;
        let matches = self.files.grep(grep).await.map_err(Fault::from)?;
        let parts = GrepParts { files: self.files.clone(), matches, queue: VecDeque::new() };
        let parts = stream::unfold(Some(parts), |parts| async {
            let mut parts = parts?;
            match parts.next().await {
                Ok((part, true)) => Some((Ok(part), Some(parts))),
                Ok((part, false)) => Some((Ok(part), None)),
                Err(fault) => Some((Err(fault.into()), None)),
            }
        });
        let stalled = || Fault::ReaderStalled { limit: READER_PATIENCE }.into();
        Ok(Response::new(Box::pin(reader::pass_on(parts, READER_PATIENCE, stalled))))
    }

    async fn watch_dir(
        &self,
        request: Request<v1::WatchDirRequest>,
    ) -> Result<Response<Self::WatchDirStream>, Status> {
        let request = request.into_inner();
        within(&request, MESSAGE_BYTES_MAX)?;
        let mut checker = Checker::default();
        let path = checker.path("path", &request.path);
        let path = checker.finish(path)?;
        let token = &request.resume_token;
        let events = self.watches.watch(&self.files, path, request.recursive, token).await;
        Ok(Response::new(Box::pin(events.map_err(Fault::from)?)))
    }
}

/// A search that is sent to a client, as fast as that takes it.
struct GrepParts {
    files: Files,
    matches: Matches,
    queue: VecDeque<v1::GrepFile>,
}

impl GrepParts {
    /// The next part, and whether more follows.
    async fn next(&mut self) -> Result<(v1::GrepResponse, bool), Fault> {
        use v1::grep_response::Part;
        let response = |part| v1::GrepResponse { part: Some(part) };
        loop {
            if let Some(file) = self.queue.pop_front() {
                return Ok((response(Part::File(file)), true));
            }
            match self.matches.next().await? {
                GrepPart::File(found) => self.queue.extend(wire::matches(found)),
                GrepPart::End { canonical, matches, files, account, .. } => {
                    let ended = v1::GrepEnded {
                        path: canonical,
                        matches,
                        files,
                        account: Some(wire::account(&account)),
                        enforcement: Some(self.files.enforcement()),
                    };
                    return Ok((response(Part::Ended(ended)), false));
                }
            }
        }
    }
}

fn pattern(checker: &mut Checker, field: &str, text: &str) {
    if text.is_empty() {
        checker.refuse(field, "is empty");
    } else if text.contains('\0') {
        checker.refuse(field, "holds a NUL byte");
    }
}

fn grep(request: v1::GrepRequest) -> Result<Grep, Fault> {
    let mut checker = Checker::default();
    pattern(&mut checker, "pattern", &request.pattern);
    let path = checker.directory("path", &request.path);
    if request.context > CONTEXT_MAX {
        let reason = format!("is {}, the largest is {CONTEXT_MAX}", request.context);
        checker.refuse("context", reason);
    }
    let limit = checker.bounded("limit", request.limit, RESULTS_DEFAULT, RESULTS_MAX);
    let mode = wire::grep_mode(request.mode);
    if mode.is_none() {
        checker.refuse("mode", format!("{} is not known", request.mode));
    }
    let unless_empty = |text: String| (!text.is_empty()).then_some(text);
    let grep = || {
        Some(Grep {
            pattern: request.pattern,
            path: path?,
            glob: unless_empty(request.glob),
            file_type: unless_empty(request.r#type),
            ignore_case: request.ignore_case,
            literal: request.literal,
            multiline: request.multiline,
            context: request.context,
            limit: limit?,
            mode: mode?,
            include_ignored: request.include_ignored,
            max_line_chars: GREP_LINE_CHARS_MAX,
            max_bytes: None,
        })
    };
    checker.finish(grep())
}

/// Names may hold any bytes, so tokens are hexadecimal.
fn page_token(name: &[u8]) -> String {
    let digits = name.iter().map(|byte| format!("{byte:02x}"));
    std::iter::once(PAGE_TOKEN_PREFIX.to_owned()).chain(digits).collect()
}

fn parse_page_token(token: &str) -> Option<Vec<u8>> {
    let digits = token.strip_prefix(PAGE_TOKEN_PREFIX)?.as_bytes();
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let pairs = digits.chunks(2).map(|pair| match pair {
        [high, low] => u8::try_from(digit(*high)? * 16 + digit(*low)?).ok(),
        _ => None,
    });
    pairs.collect()
}

/// As many entries as a response has room for, and the next page's token.
fn fill_page(found: &[Entry], more: bool) -> (Vec<v1::FileInfo>, String) {
    let mut room = MESSAGE_BYTES_MAX as usize - BYTES_RESERVED;
    let mut entries = Vec::new();
    for entry in found {
        let info = wire::info(entry);
        let Some(left) = room.checked_sub(info.encoded_len() + 8) else { break };
        room = left;
        entries.push(info);
    }
    let is_last = entries.len() == found.len() && !more;
    let last = entries.len().checked_sub(1).and_then(|index| found.get(index));
    let token = last.filter(|_| !is_last).map(|last| page_token(wire::name(last)));
    (entries, token.unwrap_or_default())
}

/// As many paths as a response has room for, and whether these are all.
fn fill_paths(found: &[Vec<u8>]) -> (Vec<String>, bool) {
    let mut room = MESSAGE_BYTES_MAX as usize - BYTES_RESERVED;
    let mut paths = Vec::new();
    for path in found {
        let path = wire::shown(path);
        let Some(left) = room.checked_sub(path.len() + 8) else { return (paths, false) };
        room = left;
        paths.push(path);
    }
    (paths, true)
}

#[cfg(test)]
mod tests {
    use cofferdam_files::call::FileKind;

    use super::*;

    fn entry(name: &[u8]) -> Entry {
        Entry {
            path: [b"/d/", name].concat(),
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

    #[test]
    fn page_tokens_come_back() {
        for name in [&b"a"[..], b"\xff\0/", b""] {
            assert_eq!(parse_page_token(&page_token(name)).as_deref(), Some(name));
        }
        for token in ["after-1", "after-zz", "61", "after-+1"] {
            assert_eq!(parse_page_token(token), None, "{token}");
        }
    }

    #[test]
    fn a_page_ends_where_the_response_is_full() {
        let long = vec![b'x'; 2000];
        let found: Vec<_> = (0..1000).map(|_| entry(&long)).collect();
        let (entries, token) = fill_page(&found, false);
        assert!((200..300).contains(&entries.len()), "{}", entries.len());
        assert_eq!(token, page_token(&long));
        let few = [entry(b"a"), entry(b"b")];
        assert_eq!(fill_page(&few, true).1, page_token(b"b"));
        assert_eq!(fill_page(&few, false).1, "");
        assert_eq!(fill_page(&[], false), (Vec::new(), String::new()));
    }

    #[test]
    fn shown_paths_stay_within_the_response() {
        let found = vec![vec![0xff; 4000]; 1000];
        let (paths, all) = fill_paths(&found);
        assert!(paths.iter().map(String::len).sum::<usize>() < MESSAGE_BYTES_MAX as usize);
        assert_eq!((paths.len(), all), (61, false));
    }
}
