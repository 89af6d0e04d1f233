//! Calls to the toolbox of the cell. Each has a lane for itself while it runs, a socket pair with a
//! thread of the toolbox at its other end, so that answers need no order among calls, and a call
//! that nobody waits for any more ends with its lane. A lane whose call is over is used again, the
//! last one first: its thread is still warm.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use cofferdam_cell::channel::{BODY_BYTES_MAX, Channel, Received};
use cofferdam_cell::protocol::{LANES_MAX, ToolboxRequest};
use cofferdam_files::FileCall;
use cofferdam_files::call::{Answer, Content, Fault};
use rustix::fs::OFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::link::Ends;
use crate::ready::register;

/// Longest text that a call may carry: what the channel takes, with room for the framing.
pub(crate) const CALL_BYTES_MAX: usize = BODY_BYTES_MAX - 16 * 1024;

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

/// How often an answer is looked for before the task sleeps until it is woken. Small calls are
/// answered within some of these, and waking costs more than the call, above all in a virtual
/// machine. Other tasks run in between.
const LOOKS: usize = 60;

/// The toolbox of the cell that stood when this was given out. It does not keep that cell alive.
#[derive(Debug, Clone)]
pub(crate) struct Toolbox {
    ends: Weak<Ends>,
    lanes: Arc<Lanes>,
}

/// The lanes to one toolbox.
#[derive(Debug)]
struct Lanes {
    /// Lanes without a call.
    idle: Mutex<Vec<Lane>>,
    /// As many permits as there may be calls at once.
    free: Arc<Semaphore>,
}

impl Lanes {
    fn idle(&self) -> MutexGuard<'_, Vec<Lane>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Toolbox {
    /// Over the ends of a cell.
    pub(crate) fn new(ends: Weak<Ends>) -> Self {
        let free = Arc::new(Semaphore::new(LANES_MAX));
        Self { ends, lanes: Arc::new(Lanes { idle: Mutex::default(), free }) }
    }

    /// Makes a call, once a lane is free. `content` goes along as its content.
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
        // A watch has its own thread there, and keeps its lane for good.
        let is_watch = matches!(call, FileCall::Watch { .. });
        let permit = match is_watch {
            true => None,
            // It is never closed.
            false => Arc::clone(&self.lanes.free).acquire_owned().await.ok(),
        };
        let idle = if is_watch { None } else { self.lanes.idle().pop() };
        let lane = match idle {
            Some(lane) => lane,
            None => self.open_lane().await?,
        };
        let descriptors: Vec<_> = content.into_iter().collect();
        patiently(|| lane.get_ref().0.send(&call, &descriptors)).await?;
        Ok(Answers { lane: Some(lane), permit, lanes: Arc::clone(&self.lanes) })
    }

    /// Makes a lane. One whose thread is still busy with a call that was given up is not waited
    /// for: the toolbox has threads to spare.
    async fn open_lane(&self) -> Result<Lane, ToolboxError> {
        let (ours, theirs) = pair().map_err(ToolboxError::Socket)?;
        let lane = register(CallEnd(Channel::new(ours)), Interest::READABLE);
        let lane = lane.map_err(ToolboxError::Socket)?;
        patiently(|| match self.ends.upgrade() {
            Some(ends) => ends.toolbox().send(&ToolboxRequest::Lane, &[theirs.as_fd()]),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        })
        .await?;
        Ok(lane)
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

/// Sends, and tries again for a while where the socket is full, or too many descriptors are in
/// flight.
async fn patiently(mut send: impl FnMut() -> io::Result<()>) -> Result<(), ToolboxError> {
    let deadline = tokio::time::Instant::now() + ROOM_MAX;
    let mut pause = PAUSE;
    loop {
        match send() {
            Ok(()) => return Ok(()),
            Err(error) if may_pass(&error) => {}
            Err(error) if is_end(&error) => return Err(ToolboxError::CellLost),
            Err(error) => return Err(ToolboxError::Socket(error)),
        }
        if tokio::time::Instant::now() + pause > deadline {
            return Err(ToolboxError::Busy);
        }
        // There is no event for the number of descriptors in flight.
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// The answers of one call. Dropping them before the last one gives the call up.
#[derive(Debug)]
pub(crate) struct Answers {
    /// `None` behind the last answer.
    lane: Option<Lane>,
    /// Frees the lane's place, when it is over or dropped.
    permit: Option<OwnedSemaphorePermit>,
    lanes: Arc<Lanes>,
}

impl Answers {
    /// The next answer, with the descriptor beside it; `None` behind the last one. Nothing is lost
    /// when the wait is given up.
    pub(crate) async fn next(&mut self) -> Result<Option<Answered>, ToolboxError> {
        for _ in 0..LOOKS {
            let Some(lane) = &self.lane else { return Ok(None) };
            match lane.get_ref().0.receive_now() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                received => return self.take(received).map(Some),
            }
            std::thread::yield_now();
            tokio::task::yield_now().await;
        }
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// As [`Answers::next`], without looking often; the last one who asked is woken.
    pub(crate) fn poll_next(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Option<Answered>, ToolboxError>> {
        loop {
            let Some(lane) = &self.lane else { return Poll::Ready(Ok(None)) };
            let mut guard = match lane.poll_read_ready(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(ToolboxError::Socket(error))),
                Poll::Ready(Ok(guard)) => guard,
            };
            let received = match guard.try_io(|end| end.get_ref().0.receive()) {
                Err(_would_block) => continue,
                Ok(received) => received,
            };
            return Poll::Ready(self.take(received).map(Some));
        }
    }

    /// What was received; behind a last answer the lane is free.
    fn take(
        &mut self,
        received: io::Result<Option<Received<Answer>>>,
    ) -> Result<Answered, ToolboxError> {
        match received {
            Ok(Some(received)) => {
                if received.message.is_last()
                    && let Some(lane) = self.lane.take()
                    && self.permit.is_some()
                {
                    self.lanes.idle().push(lane);
                    self.permit = None;
                }
                Ok((received.message, received.descriptors.into_iter().next()))
            }
            Ok(None) => Err(ToolboxError::CellLost),
            Err(error) if is_end(&error) => Err(ToolboxError::CellLost),
            Err(error) => Err(ToolboxError::Socket(error)),
        }
    }
}

/// Our end of a lane.
type Lane = AsyncFd<CallEnd>;

#[derive(Debug)]
struct CallEnd(Channel<FileCall, Answer>);

impl AsRawFd for CallEnd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// A socket pair for a lane; the first end, ours, does not block.
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

    /// The toolbox's end of the next lane.
    fn lane(far: &Far) -> Channel<Answer, FileCall> {
        let received = far.receive().unwrap().unwrap();
        assert_eq!(received.message, ToolboxRequest::Lane);
        Channel::new(received.descriptors.into_iter().next().unwrap())
    }

    fn take(lane: &Channel<Answer, FileCall>) -> (FileCall, Option<OwnedFd>) {
        let received = lane.receive().unwrap().unwrap();
        (received.message, received.descriptors.into_iter().next())
    }

    fn failed() -> Fault {
        Fault { kind: FaultKind::NotFound, step: "open".to_owned(), errno: 2 }
    }

    #[tokio::test]
    async fn a_call_brings_its_content_there_and_its_answers_back() {
        let (toolbox, _ends, far) = toolbox();
        let (read, write) = std::io::pipe().unwrap();
        let mut answers = toolbox.call(open("/a"), Some(write.as_fd())).await.unwrap();
        let reply = lane(&far);
        let (call, content) = take(&reply);
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
        let reply = lane(&far);
        take(&reply);
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
        let reply = lane(&far);
        take(&reply);
        reply.send(&Answer::Changes(Vec::new()), &[]).unwrap();
        drop(answers);
        let error = reply.send(&Answer::Changes(Vec::new()), &[]).unwrap_err();
        assert!(is_end(&error), "{error:?}");
    }

    #[tokio::test]
    async fn a_lane_is_used_again_when_its_call_is_over_and_not_when_it_was_given_up() {
        let (toolbox, _ends, far) = toolbox();
        let over = async |reply: &Channel<Answer, FileCall>, path: &str| {
            let mut answers = toolbox.call(open(path), None).await.unwrap();
            assert_eq!(take(reply).0, open(path));
            reply.send(&Answer::Failed(failed()), &[]).unwrap();
            assert!(answers.next().await.unwrap().is_some());
            assert!(answers.next().await.unwrap().is_none());
        };
        let mut answers = toolbox.call(open("/1"), None).await.unwrap();
        let first = lane(&far);
        assert_eq!(take(&first).0, open("/1"));
        first.send(&Answer::Failed(failed()), &[]).unwrap();
        assert!(answers.next().await.unwrap().is_some());
        over(&first, "/2").await;
        over(&first, "/3").await;
        drop(toolbox.call(open("/4"), None).await.unwrap());
        assert_eq!(take(&first).0, open("/4"));
        assert!(first.receive().unwrap().is_none(), "it is closed");
        let _fifth = toolbox.call(open("/5"), None).await.unwrap();
        assert_eq!(take(&lane(&far)).0, open("/5"));
    }

    #[tokio::test]
    async fn no_more_calls_run_at_once_than_there_are_lanes() {
        let (toolbox, _ends, far) = toolbox();
        let mut running = Vec::new();
        for _ in 0..LANES_MAX {
            running.push((toolbox.call(open("/a"), None).await.unwrap(), lane(&far)));
        }
        let mut waiting = std::pin::pin!(toolbox.call(open("/late"), None));
        assert!(futures::poll!(waiting.as_mut()).is_pending());
        // A watch needs none of them.
        let watch = FileCall::Watch { path: "/".to_owned(), recursive: false };
        let _watch = toolbox.call(watch.clone(), None).await.unwrap();
        assert_eq!(take(&lane(&far)).0, watch);
        let (mut answers, reply) = running.pop().unwrap();
        take(&reply);
        reply.send(&Answer::Failed(failed()), &[]).unwrap();
        assert!(answers.next().await.unwrap().is_some());
        waiting.await.unwrap();
        assert_eq!(take(&reply).0, open("/late"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_socket_is_waited_for_and_then_called_busy() {
        let (toolbox, ends, far) = toolbox();
        let mut kept = 0;
        while ends.toolbox().send(&ToolboxRequest::Survey { token: 0 }, &[]).is_ok() {
            kept += 1;
            assert!(kept < 100_000);
        }
        let busy = toolbox.call(open("/a"), None).await.unwrap_err();
        assert!(matches!(busy, ToolboxError::Busy), "{busy:?}");
        let (_, later) = tokio::join!(
            async {
                tokio::time::sleep(ROOM_MAX / 2).await;
                (0..kept).for_each(|_| drop(far.receive().unwrap()));
            },
            toolbox.call(open("/late"), None)
        );
        later.unwrap();
        assert_eq!(take(&lane(&far)).0, open("/late"));
    }

    #[tokio::test]
    async fn a_call_that_is_too_long_does_not_reach_the_toolbox() {
        let (toolbox, _ends, far) = toolbox();
        let error = toolbox.call(open(&"x".repeat(BODY_BYTES_MAX)), None).await.unwrap_err();
        assert!(matches!(error, ToolboxError::TooLong { .. }), "{error:?}");
        assert_eq!(far.receive().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let longest = open(&"x".repeat(CALL_BYTES_MAX));
        toolbox.call(longest.clone(), None).await.unwrap();
        assert_eq!(take(&lane(&far)).0, longest);
    }
}
