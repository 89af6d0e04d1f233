//! The content of a Write on its way from the stream to the toolbox: in memory while it is small,
//! then in a file without a name, so that memory stays bounded and a stream that breaks off leaves
//! nothing behind.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use cofferdam_files::call::{CONTENT_BYTES_MAX, Fault as FileFault, FaultKind};
use futures::stream::{Stream, StreamExt};
use rustix::fs::{Mode, OFlags};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tonic::Status;

use crate::files::{FileError, WriteContent};
use crate::status::Fault;

/// Messages that wait for the disk.
const MESSAGES_AHEAD: usize = 4;

/// Largest content of a Write, in bytes: far above what a workspace's files hold, and below what
/// fills a disk unnoticed.
pub(crate) const UPLOAD_BYTES_MAX: u64 = 4 * 1024 * 1024 * 1024;

/// How long a Write waits for the next message. Each upload holds one of the calls that may run.
const UPLOAD_IDLE_MAX: Duration = Duration::from_secs(60);

/// A content that grows.
enum Upload {
    Memory(BytesMut),
    Disk { data: mpsc::Sender<Bytes>, writer: JoinHandle<io::Result<(OwnedFd, u64)>> },
}

/// Takes the whole stream, at most [`UPLOAD_BYTES_MAX`]. The temporary file is on the file system of
/// `directory`.
pub(super) async fn receive(
    directory: &Path,
    path: &str,
    stream: impl Stream<Item = Result<Bytes, Status>> + Unpin,
) -> Result<WriteContent, Status> {
    receive_at_most(UPLOAD_BYTES_MAX, directory, path, stream).await
}

async fn receive_at_most(
    limit: u64,
    directory: &Path,
    path: &str,
    mut stream: impl Stream<Item = Result<Bytes, Status>> + Unpin,
) -> Result<WriteContent, Status> {
    let mut size = 0_u64;
    let failed = |error: &io::Error| Status::from(Fault::from(failed(path, error)));
    let mut upload = Upload::Memory(BytesMut::new());
    while let Some(data) = next(&mut stream).await? {
        size = size.saturating_add(data.len() as u64);
        if size > limit {
            return Err(Fault::TooLarge { size, limit }.into());
        }
        upload = match upload {
            Upload::Memory(mut held) if held.len() + data.len() <= CONTENT_BYTES_MAX => {
                held.extend_from_slice(&data);
                Upload::Memory(held)
            }
            Upload::Memory(held) => {
                let (sender, receiver) = mpsc::channel(MESSAGES_AHEAD);
                let directory = directory.to_owned();
                let writer = tokio::task::spawn_blocking(move || write(&directory, receiver));
                // The channel has room for both.
                let _ = sender.send(held.freeze()).await;
                let _ = sender.send(data).await;
                Upload::Disk { data: sender, writer }
            }
            Upload::Disk { data: sender, writer } => {
                if sender.send(data).await.is_err() {
                    drop(sender);
                    return Err(failed(&finish(writer).await.err().unwrap_or_else(cut_short)));
                }
                Upload::Disk { data: sender, writer }
            }
        };
    }
    match upload {
        Upload::Memory(held) => Ok(WriteContent::Bytes(held.freeze())),
        Upload::Disk { data, writer } => {
            drop(data);
            let (file, size) = finish(writer).await.map_err(|error| failed(&error))?;
            Ok(WriteContent::File(file, size))
        }
    }
}

async fn next(
    stream: &mut (impl Stream<Item = Result<Bytes, Status>> + Unpin),
) -> Result<Option<Bytes>, Status> {
    let idle = || Status::from(Fault::UploadIdle { limit: UPLOAD_IDLE_MAX });
    let next = tokio::time::timeout(UPLOAD_IDLE_MAX, stream.next()).await;
    next.map_err(|_| idle())?.transpose()
}

fn cut_short() -> io::Error {
    io::ErrorKind::UnexpectedEof.into()
}

async fn finish(writer: JoinHandle<io::Result<(OwnedFd, u64)>>) -> io::Result<(OwnedFd, u64)> {
    writer.await.unwrap_or_else(|error| Err(io::Error::other(error)))
}

fn failed(path: &str, error: &io::Error) -> FileError {
    let kind = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => FaultKind::NoSpace,
        _ => {
            tracing::error!(%error, "an upload could not be kept");
            FaultKind::Other
        }
    };
    let errno = error.raw_os_error().unwrap_or(0);
    let fault = FileFault { kind, step: "upload".to_owned(), errno };
    FileError::Fault { path: path.to_owned(), fault }
}

fn write(directory: &Path, mut data: mpsc::Receiver<Bytes>) -> io::Result<(OwnedFd, u64)> {
    let mut file = nameless(directory)?;
    let mut size = 0;
    while let Some(bytes) = data.blocking_recv() {
        file.write_all(&bytes)?;
        size += bytes.len() as u64;
    }
    // The cell gets a descriptor of its own, which begins at the start and can only be read.
    let own = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    Ok((rustix::fs::open(own, flags, Mode::empty())?, size))
}

fn nameless(directory: &Path) -> io::Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    match rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => Ok(File::from(file)),
        // Not every file system has files without a name; then it loses its name at once.
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR) => {
            let path = fresh_name(directory);
            let mut options = OpenOptions::new();
            options.read(true).write(true).create_new(true).mode(0o600);
            let file = options.open(&path)?;
            std::fs::remove_file(&path)?;
            Ok(file)
        }
        Err(error) => Err(error.into()),
    }
}

fn fresh_name(directory: &Path) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    directory.join(format!("upload-{}", NEXT.fetch_add(1, Ordering::Relaxed)))
}

#[cfg(test)]
mod tests {
    use futures::stream;

    use super::*;

    fn pieces(sizes: &[usize]) -> Vec<Result<Bytes, Status>> {
        let piece = |(index, size): (usize, &usize)| Ok(Bytes::from(vec![index as u8; *size]));
        sizes.iter().enumerate().map(piece).collect()
    }

    fn content(sizes: &[usize]) -> Vec<u8> {
        pieces(sizes).into_iter().flat_map(|piece| piece.unwrap().to_vec()).collect()
    }

    #[tokio::test]
    async fn contents_of_every_size_arrive_whole() {
        let directory = tempfile::tempdir().unwrap();
        let small = [1, 0, CONTENT_BYTES_MAX - 1];
        let got = receive(directory.path(), "/a", stream::iter(pieces(&small))).await.unwrap();
        let WriteContent::Bytes(bytes) = got else { panic!("{got:?}") };
        assert_eq!(bytes, content(&small));
        let large = [CONTENT_BYTES_MAX, 1, 1 << 20, 3, 1 << 20, 1 << 20, 1 << 20, 5];
        let got = receive(directory.path(), "/a", stream::iter(pieces(&large))).await.unwrap();
        let WriteContent::File(file, size) = got else { panic!("{got:?}") };
        let mut bytes = Vec::new();
        io::Read::read_to_end(&mut File::from(file), &mut bytes).unwrap();
        assert_eq!((size as usize, bytes == content(&large)), (bytes.len(), true));
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn a_stream_that_breaks_off_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        for size in [1, 1 << 20] {
            let mut broken = pieces(&[size]);
            broken.push(Err(Status::cancelled("gone")));
            let error = receive(directory.path(), "/a", stream::iter(broken)).await.unwrap_err();
            assert_eq!(error.code(), tonic::Code::Cancelled);
        }
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn a_content_above_the_limit_is_refused_with_the_limit() {
        let directory = tempfile::tempdir().unwrap();
        let limit = 3 << 20;
        let receive = async |last| {
            let sizes = [1 << 20, 1 << 20, 1 << 20, last];
            let pieces = stream::iter(pieces(&sizes));
            receive_at_most(limit, directory.path(), "/a", pieces).await
        };
        assert!(receive(0).await.is_ok());
        let error = receive(1).await.unwrap_err();
        assert_eq!(error.code(), tonic::Code::ResourceExhausted);
        assert!(error.message().contains(&limit.to_string()), "{error:?}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_falls_silent_ends() {
        let directory = tempfile::tempdir().unwrap();
        let silent = stream::iter(pieces(&[1])).chain(stream::pending());
        let error = receive(directory.path(), "/a", silent).await.unwrap_err();
        assert_eq!(error.code(), tonic::Code::DeadlineExceeded);
        assert_eq!(
            error.message(),
            "no message of the upload came for 60 s, so it was given up; nothing was written"
        );
    }

    #[tokio::test]
    async fn a_disk_that_fails_is_told_and_ends_the_upload() {
        let endless = stream::repeat_with(|| Ok(Bytes::from(vec![0; 1 << 20]))).take(100);
        let got = receive(Path::new("/no/such/directory"), "/a", endless).await;
        assert_eq!(got.unwrap_err().code(), tonic::Code::Internal);
    }
}
