//! Calls to the toolbox of the cell: each has a socket pair of its own, so that answers need no
//! order among calls, and a call that nobody waits for any more ends with its socket.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Weak;
use std::task::{Context, Poll};
use std::time::Duration;

use cofferdam_cell::channel::{BODY_BYTES_MAX, Channel};
use cofferdam_cell::protocol::ToolboxRequest;
use cofferdam_files::FileCall;
use cofferdam_files::call::{Answer, Content, Fault};
use rustix::fs::OFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::link::Ends;
use crate::ready::register;

/// Longest text that a call may carry: what the channel takes, with room for the framing.
const CALL_BYTES_MAX: usize = BODY_BYTES_MAX - 16 * 1024;

/// How long a call waits for room in the socket before the toolbox counts as busy. Its threads take
/// what is quick within milliseconds.
const ROOM_MAX: Duration = Duration::from_secs(5);

/// First and longest pause between two tries.
const PAUSE: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// An answer, with the descriptor beside it.
pub(crate) type Answered = (Answer, Option<OwnedFd>);

/// Why a call to the toolbox brought no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ToolboxError {
    /// The toolbox answered that it failed.
    #[error("the toolbox failed at {}: {:?}", .0.step, .0.kind)]
    Failed(Fault),
    /// The cell has ended.
    #[error("the cell ended during the call")]
    CellLost,
    /// The toolbox takes no call for so long.
    #[error("the toolbox took no call for {} s", ROOM_MAX.as_secs())]
    Busy,
    /// The call is too long to be sent.
    #[error("the call is {size} bytes long, the limit is {CALL_BYTES_MAX}")]
    TooLong {
        /// Its length in bytes.
        size: u64,
        /// The limit.
        limit: u64,
    },
    /// The call's socket could not be made or used.
    #[error("the call's socket failed")]
    Socket(#[source] io::Error),
    /// The toolbox gave another answer than the call has.
    #[error("the toolbox answered something else than was asked")]
    Unexpected,
}

/// The toolbox of the cell that stood when this was given out. It does not keep that cell alive.
#[derive(Debug, Clone)]
pub(crate) struct Toolbox {
    ends: Weak<Ends>,
}

impl Toolbox {
    /// Over the ends of a cell.
    pub(crate) fn new(ends: Weak<Ends>) -> Self {
        Self { ends }
    }

    /// Makes a call. `content` goes along as its content.
    pub(crate) async fn call(
        &self,
        call: FileCall,
        content: Option<BorrowedFd<'_>>,
    ) -> Result<Answers, ToolboxError> {
        let size = text_bytes(&call);
        if size > CALL_BYTES_MAX {
            let (size, limit) = (size as u64, CALL_BYTES_MAX as u64);
            return Err(ToolboxError::TooLong { size, limit });
        }
        let (ours, theirs) = pair().map_err(ToolboxError::Socket)?;
        let socket = register(CallEnd(Channel::new(ours)), Interest::READABLE);
        let socket = socket.map_err(ToolboxError::Socket)?;
        let request = ToolboxRequest::Call(Box::new(call));
        let deadline = tokio::time::Instant::now() + ROOM_MAX;
        let mut pause = PAUSE;
        loop {
            let mut descriptors = vec![theirs.as_fd()];
            descriptors.extend(content);
            let Some(ends) = self.ends.upgrade() else { return Err(ToolboxError::CellLost) };
            match ends.toolbox().send(&request, &descriptors) {
                Ok(()) => return Ok(Answers { socket, is_over: false }),
                Err(error) if may_pass(&error) => {}
                Err(error) if is_end(&error) => return Err(ToolboxError::CellLost),
                Err(error) => return Err(ToolboxError::Socket(error)),
            }
            drop(ends);
            if tokio::time::Instant::now() + pause > deadline {
                return Err(ToolboxError::Busy);
            }
            // There is no event for the number of descriptors in flight.
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Makes a call that has one answer. [`Answer::Failed`] is the error.
    pub(crate) async fn one(
        &self,
        call: FileCall,
        content: Option<BorrowedFd<'_>>,
    ) -> Result<Answered, ToolboxError> {
        let mut answers = self.call(call, content).await?;
        match answers.next().await? {
            Some((Answer::Failed(fault), _)) => Err(ToolboxError::Failed(fault)),
            Some((answer, descriptor)) if answer.is_last() => Ok((answer, descriptor)),
            _ => Err(ToolboxError::Unexpected),
        }
    }
}

/// The answers of one call. Dropping them gives the call up.
#[derive(Debug)]
pub(crate) struct Answers {
    socket: AsyncFd<CallEnd>,
    is_over: bool,
}

impl Answers {
    /// The next answer, with the descriptor beside it; `None` behind the last one. Nothing is lost
    /// when the wait is given up.
    pub(crate) async fn next(&mut self) -> Result<Option<(Answer, Option<OwnedFd>)>, ToolboxError> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// As [`Answers::next`]; the last one who asked is woken.
    pub(crate) fn poll_next(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Option<Answered>, ToolboxError>> {
        if self.is_over {
            return Poll::Ready(Ok(None));
        }
        loop {
            let mut guard = match self.socket.poll_read_ready(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(ToolboxError::Socket(error))),
                Poll::Ready(Ok(guard)) => guard,
            };
            let received = match guard.try_io(|end| end.get_ref().0.receive()) {
                Err(_would_block) => continue,
                Ok(received) => received,
            };
            return Poll::Ready(match received {
                Ok(Some(received)) => {
                    self.is_over = received.message.is_last();
                    Ok(Some((received.message, received.descriptors.into_iter().next())))
                }
                Ok(None) => Err(ToolboxError::CellLost),
                Err(error) if is_end(&error) => Err(ToolboxError::CellLost),
                Err(error) => Err(ToolboxError::Socket(error)),
            });
        }
    }
}

#[derive(Debug)]
struct CallEnd(Channel<(), Answer>);

impl AsRawFd for CallEnd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// A socket pair for one call; the first end, ours, does not block.
fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let kind = SocketType::SEQPACKET;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    let flags = rustix::fs::fcntl_getfl(&ours)?;
    rustix::fs::fcntl_setfl(&ours, flags | OFlags::NONBLOCK)?;
    Ok((ours, theirs))
}

/// Whether the same call may be taken a moment later.
fn may_pass(error: &io::Error) -> bool {
    let code = error.raw_os_error().map(rustix::io::Errno::from_raw_os_error);
    error.kind() == io::ErrorKind::WouldBlock
        || matches!(code, Some(rustix::io::Errno::TOOMANYREFS | rustix::io::Errno::NOBUFS))
}

fn is_end(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected};
    matches!(error.kind(), BrokenPipe | ConnectionReset | NotConnected)
}

/// Bytes of everything in a call that has no bound of its own.
fn text_bytes(call: &FileCall) -> usize {
    match call {
        FileCall::Stat { path, .. }
        | FileCall::Open { path }
        | FileCall::MakeDir { path, .. }
        | FileCall::Remove { path, .. }
        | FileCall::Watch { path, .. } => path.len(),
        FileCall::List { path, after, .. } => path.len() + after.as_ref().map_or(0, Vec::len),
        FileCall::ReadText(read) => read.path.len(),
        FileCall::Write(write) => {
            let inline = match &write.content {
                Content::Inline(bytes) => bytes.len(),
                Content::Descriptor { .. } => 0,
            };
            write.path.len() + inline
        }
        FileCall::Edit(edit) => edit.path.len() + edit.old.len() + edit.new.len(),
        FileCall::Move { from, to, .. } => from.len() + to.len(),
        FileCall::Glob(glob) => glob.path.len() + glob.pattern.len(),
        FileCall::Grep(grep) => {
            let filters = [&grep.glob, &grep.file_type];
            let filters: usize = filters.into_iter().flatten().map(String::len).sum();
            grep.path.len() + grep.pattern.len() + filters
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cofferdam_cell::protocol::ToolboxReply;
    use cofferdam_files::call::FaultKind;

    use super::*;

    type Far = Channel<ToolboxReply, ToolboxRequest>;

    /// A toolbox whose other end is in the hands of the test.
    fn toolbox() -> (Toolbox, Arc<Ends>, Far) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let pair = || socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let ((init, _), (toolbox, far)) = (pair(), pair());
        let ends = Ends::Pair { init: Channel::new(init), toolbox: Channel::new(toolbox) };
        let ends = Arc::new(ends);
        (Toolbox::new(Arc::downgrade(&ends)), ends, Channel::new(far))
    }

    fn open(path: &str) -> FileCall {
        FileCall::Open { path: path.to_owned() }
    }

    fn take(far: &Far) -> (FileCall, Channel<Answer, ()>, Option<OwnedFd>) {
        let received = far.receive().unwrap().unwrap();
        let ToolboxRequest::Call(call) = received.message else { panic!("no call") };
        let mut descriptors = received.descriptors.into_iter();
        (*call, Channel::new(descriptors.next().unwrap()), descriptors.next())
    }

    fn failed() -> Fault {
        Fault { kind: FaultKind::NotFound, step: "open".to_owned(), errno: 2 }
    }

    #[tokio::test]
    async fn a_call_brings_its_content_there_and_its_answers_back() {
        let (toolbox, _ends, far) = toolbox();
        let (read, write) = std::io::pipe().unwrap();
        let mut answers = toolbox.call(open("/a"), Some(write.as_fd())).await.unwrap();
        let (call, reply, content) = take(&far);
        assert_eq!(call, open("/a"));
        rustix::io::write(content.unwrap(), b"hi").unwrap();
        let mut text = [0; 2];
        rustix::io::read(&read, &mut text).unwrap();
        assert_eq!(&text, b"hi");
        reply.send(&Answer::Changes(Vec::new()), &[]).unwrap();
        reply.send(&Answer::Failed(failed()), &[read.as_fd()]).unwrap();
        drop(reply);
        let (first, descriptor) = answers.next().await.unwrap().unwrap();
        assert_eq!((first, descriptor.is_some()), (Answer::Changes(Vec::new()), false));
        let (last, descriptor) = answers.next().await.unwrap().unwrap();
        assert_eq!((last, descriptor.is_some()), (Answer::Failed(failed()), true));
        assert!(answers.next().await.unwrap().is_none());
    }

    #[tokio::test]
    async fn an_end_without_a_last_answer_means_that_the_cell_is_lost() {
        let (toolbox, ends, far) = toolbox();
        let mut answers = toolbox.call(open("/a"), None).await.unwrap();
        let (_, reply, _) = take(&far);
        reply.send(&Answer::Changes(Vec::new()), &[]).unwrap();
        drop(reply);
        assert!(answers.next().await.unwrap().is_some());
        assert!(matches!(answers.next().await, Err(ToolboxError::CellLost)));
        drop(far);
        assert!(matches!(toolbox.call(open("/a"), None).await, Err(ToolboxError::CellLost)));
        drop(ends);
        assert!(matches!(toolbox.call(open("/a"), None).await, Err(ToolboxError::CellLost)));
    }

    #[tokio::test]
    async fn a_call_that_is_dropped_is_seen_to_be_given_up() {
        let (toolbox, _ends, far) = toolbox();
        let answers = toolbox.call(open("/a"), None).await.unwrap();
        let (_, reply, _) = take(&far);
        reply.send(&Answer::Changes(Vec::new()), &[]).unwrap();
        drop(answers);
        let error = reply.send(&Answer::Changes(Vec::new()), &[]).unwrap_err();
        assert!(is_end(&error), "{error:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_socket_is_waited_for_and_then_called_busy() {
        let (toolbox, _ends, far) = toolbox();
        let mut kept = Vec::new();
        let busy = loop {
            match toolbox.call(open(&"x".repeat(3000)), None).await {
                Ok(answers) => kept.push(answers),
                Err(error) => break error,
            }
            assert!(kept.len() < 10_000);
        };
        assert!(matches!(busy, ToolboxError::Busy), "{busy:?}");
        let (_, later) = tokio::join!(
            async {
                tokio::time::sleep(ROOM_MAX / 2).await;
                (0..kept.len()).for_each(|_| drop(take(&far)));
            },
            toolbox.call(open("/late"), None)
        );
        later.unwrap();
        assert_eq!(take(&far).0, open("/late"));
    }

    #[tokio::test]
    async fn a_call_that_is_too_long_does_not_reach_the_toolbox() {
        let (toolbox, _ends, far) = toolbox();
        let error = toolbox.call(open(&"x".repeat(BODY_BYTES_MAX)), None).await.unwrap_err();
        assert!(matches!(error, ToolboxError::TooLong { .. }), "{error:?}");
        assert_eq!(far.receive().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let longest = open(&"x".repeat(CALL_BYTES_MAX));
        toolbox.call(longest.clone(), None).await.unwrap();
        assert_eq!(take(&far).0, longest);
    }
}
