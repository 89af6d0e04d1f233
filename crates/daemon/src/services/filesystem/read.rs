//! The stream of a Read: another thread reads and hashes, a few chunks ahead of the client.

use std::io;
use std::os::fd::OwnedFd;

use bytes::Bytes;
use cofferdam_files::call::{Fault as FileFault, FaultKind, STAMP_BYTES_MAX};
use cofferdam_proto::v1;
use cofferdam_proto::v1::read_response::Part;
use cofferdam_spec::Stamp;
use futures::stream::{self, Stream, StreamExt};
use rustix::fs::{Stat, fstat};
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;
use tonic::Status;

use super::wire;
use crate::files::{Caller, FileError, Files, Opened};
use crate::status::Fault;

/// Bytes of one chunk: half of what a message may hold.
const CHUNK_BYTES: usize = 512 * 1024;

/// Chunks that are read ahead.
const CHUNKS_AHEAD: usize = 4;

/// Most bytes of a file that says it has none, as those of `/proc` do.
const UNSIZED_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// Which bytes of a file are wanted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    /// First byte.
    pub(super) offset: u64,
    /// Most bytes; 0 means to the end.
    pub(super) length: u64,
}

/// What the reading thread tells.
enum Progress {
    Chunk { offset: u64, data: Bytes },
    Ended { stamp: Stamp, changed: bool, whole: bool },
    Failed(io::Error),
}

/// The parts of a read. A read of the whole file sets the caller's stamp.
pub(super) fn parts(
    files: Files,
    path: String,
    opened: Opened,
    wanted: Wanted,
    caller: Caller,
) -> Result<impl Stream<Item = Result<v1::ReadResponse, Status>> + Send + use<>, Fault> {
    let Opened { entry, file, permit } = opened;
    let start = fstat(&file).map_err(|error| failed(&path, &error.into()))?;
    let (size, offset) = (start.st_size as u64, wanted.offset);
    if offset > size && (size > 0 || offset > UNSIZED_BYTES_MAX) {
        return Err(Fault::BeyondEnd { field: "offset", offset, total: size });
    }
    let (progress, next) = mpsc::channel(CHUNKS_AHEAD);
    // It ends by itself when nobody receives any more.
    tokio::task::spawn_blocking(move || read(&file, &start, wanted, &progress));
    let started =
        v1::ReadStarted { info: Some(wire::info(&entry)), enforcement: Some(files.enforcement()) };
    let first = stream::once(async { Ok(response(Part::Started(started))) });
    let canonical = String::from_utf8(entry.path).ok();
    let rest = stream::unfold((next, permit), |(mut next, permit)| async {
        let progress = next.recv().await?;
        Some((progress, (next, permit)))
    });
    let rest = rest.map(move |progress| match progress {
        Progress::Chunk { offset, data } => {
            Ok(response(Part::Chunk(v1::ReadChunk { offset, data })))
        }
        Progress::Ended { stamp, changed, whole } => {
            let is_stamp = whole && !changed && stamp.size <= STAMP_BYTES_MAX;
            if let (true, Some(canonical)) = (is_stamp, &canonical) {
                files.seen_whole(&caller, canonical, stamp);
            }
            let stamp = Some((&stamp).into());
            Ok(response(Part::Ended(v1::ReadEnded { stamp, changed })))
        }
        Progress::Failed(error) => Err(failed(&path, &error).into()),
    });
    Ok(first.chain(rest))
}

fn response(part: Part) -> v1::ReadResponse {
    v1::ReadResponse { part: Some(part) }
}

fn failed(path: &str, error: &io::Error) -> Fault {
    let errno = error.raw_os_error().unwrap_or(0);
    let fault = FileFault { kind: FaultKind::Other, step: "read".to_owned(), errno };
    FileError::Fault { path: path.to_owned(), fault }.into()
}

fn read(file: &OwnedFd, start: &Stat, wanted: Wanted, progress: &mpsc::Sender<Progress>) {
    let last = match read_chunks(file, start, wanted, progress) {
        Ok(Some(ended)) => ended,
        Ok(None) => return,
        Err(error) => Progress::Failed(error),
    };
    // Without a receiver nobody misses it.
    let _ = progress.blocking_send(last);
}

/// Reads to the end; `None` when nobody receives any more.
fn read_chunks(
    file: &OwnedFd,
    start: &Stat,
    wanted: Wanted,
    progress: &mpsc::Sender<Progress>,
) -> io::Result<Option<Progress>> {
    let Wanted { mut offset, length } = wanted;
    // A file that grows all the time ends where it ended when the read began.
    let size = if start.st_size == 0 { UNSIZED_BYTES_MAX } else { start.st_size as u64 };
    let end = if length == 0 { size } else { size.min(offset.saturating_add(length)) };
    let mut hash = Sha256::new();
    while offset < end {
        let room = usize::try_from(end - offset).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
        let data = chunk(file, offset, room)?;
        if data.is_empty() {
            break;
        }
        hash.update(&data);
        let at = offset;
        offset += data.len() as u64;
        if progress.blocking_send(Progress::Chunk { offset: at, data }).is_err() {
            return Ok(None);
        }
    }
    let now = fstat(file)?;
    let time = |stat: &Stat| (stat.st_size, stat.st_mtime, stat.st_mtime_nsec);
    let size = offset - wanted.offset;
    Ok(Some(Progress::Ended {
        stamp: Stamp { digest: hash.finalize().into(), size },
        changed: time(start) != time(&now),
        whole: wanted.offset == 0 && size == start.st_size as u64,
    }))
}

/// The next bytes; fewer than `length` only at the end of the file.
fn chunk(file: &OwnedFd, offset: u64, length: usize) -> io::Result<Bytes> {
    let mut bytes = Vec::with_capacity(length);
    while bytes.len() < length {
        let at = offset + bytes.len() as u64;
        let read = rustix::io::retry_on_intr(|| {
            rustix::io::pread(file, rustix::buffer::spare_capacity(&mut bytes), at)
        });
        if read? == 0 {
            break;
        }
    }
    bytes.truncate(length);
    Ok(bytes.into())
}
