//! The task of one running process: moves its output into the logs and its input out of the
//! buffer, watches the idle and output limits, and decides with [`Ending`] when its end is told.
//!
//! It waits for no reader, so a client that stops reading cannot stall the program, unless the client
//! that started it asked for just that ([`flow`](crate::flow)).

use std::future::poll_fn;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use cofferdam_cell::protocol::KillCause;
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;

use crate::decide::{Ending, GRACE, Next, exit_reason};
use crate::flow::Offsets;
use crate::output::OutputLog;
use crate::process::{End, Phase, Process, Tree};
use crate::ready;
use crate::stdin::{self, StdinClosed};
use crate::supervisor::Kills;

/// One read: the capacity of a pipe.
const READ_BYTES: usize = 64 * 1024;

/// Reads of one stream before other tasks get their turn.
const READS_PER_TURN: usize = 8;

/// Reads that empty the largest pipe that a program can ask for (`fs.pipe-max-size`, 1 MiB), and
/// one that finds it empty.
const SWEEP_READS_MAX: usize = 17;

/// One descriptor of the process; a terminal's is source and sink at once.
#[derive(Debug)]
struct Descriptor {
    fd: Arc<OwnedFd>,
    interest: Interest,
    /// Set with the first wait. Of a program that is reported with its end, nothing is waited for.
    watched: OnceLock<AsyncFd<Arc<OwnedFd>>>,
}

impl Descriptor {
    fn new(fd: OwnedFd, interest: Interest) -> Arc<Self> {
        Arc::new(Self { fd: Arc::new(fd), interest, watched: OnceLock::new() })
    }

    fn watch(&self) -> io::Result<()> {
        if self.watched.get().is_none() {
            let watched = ready::register(Arc::clone(&self.fd), self.interest)?;
            // Only the pump, which is one task, comes here.
            let _ = self.watched.set(watched);
        }
        Ok(())
    }
}

/// The streams that [`cofferdam_cell::protocol::Event::Started`] brought.
#[derive(Debug)]
pub(crate) struct Streams {
    /// Output, in the order of [`Process::streams`]; `None` once ended.
    sources: Vec<Option<Arc<Descriptor>>>,
    /// Input; `None` once closed.
    sink: Option<Arc<Descriptor>>,
}

/// Init handed over other descriptors than asked for.
#[derive(Debug, thiserror::Error)]
#[error("{got} descriptors came with the program, {expected} were expected")]
pub(crate) struct StreamsError {
    /// What came.
    got: usize,
    /// What should have come.
    expected: usize,
}

impl Streams {
    /// Takes the descriptors of a start. `stdin` tells whether a pipe was asked for.
    pub(crate) fn new(
        process: &Process,
        stdin: stdin::Kind,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Self, StreamsError> {
        let expected = process.streams().len() + usize::from(stdin == stdin::Kind::Pipe);
        let got = descriptors.len();
        if got != expected {
            return Err(StreamsError { got, expected });
        }
        let mut descriptors = descriptors.into_iter();
        if stdin == stdin::Kind::Terminal {
            let both = Interest::READABLE | Interest::WRITABLE;
            let master = descriptors.next().map(|fd| Descriptor::new(fd, both));
            if let Some(master) = &master {
                process.set_terminal(Arc::downgrade(&master.fd));
            }
            return Ok(Self { sources: vec![master.clone()], sink: master });
        }
        let mut sink = None;
        if stdin == stdin::Kind::Pipe {
            sink = descriptors.next().map(|fd| Descriptor::new(fd, Interest::WRITABLE));
        }
        let sources = descriptors.map(|fd| Some(Descriptor::new(fd, Interest::READABLE))).collect();
        Ok(Self { sources, sink })
    }

    /// Before the first wait.
    fn watch(&self) -> io::Result<()> {
        self.sources.iter().flatten().chain(&self.sink).try_for_each(|stream| stream.watch())
    }

    fn open(&self) -> usize {
        self.sources.iter().flatten().count()
    }
}

/// The pump of one process.
#[derive(Debug)]
pub(crate) struct Pump {
    process: Arc<Process>,
    pid: u32,
    streams: Streams,
    tree: watch::Receiver<Tree>,
    /// News of the reader that the process waits for.
    flow: watch::Receiver<Offsets>,
    kills: Kills,
    ending: Ending,
    last_output: Instant,
    /// Whether a stream had to wait for its reader.
    was_ahead: bool,
    /// Whether a limit of ours has been reported to init.
    over_limit: bool,
}

impl Pump {
    /// A pump for a process that has just started.
    pub(crate) fn new(process: Arc<Process>, pid: u32, streams: Streams, kills: Kills) -> Self {
        let ending = Ending { open: streams.open(), ..Ending::default() };
        let tree = process.tree();
        let flow = process.flow.news();
        let last_output = Instant::now();
        process.enter(Phase::Running { pid });
        Self {
            process,
            pid,
            streams,
            tree,
            flow,
            kills,
            ending,
            last_output,
            was_ahead: false,
            over_limit: false,
        }
    }

    /// Whether nothing more can come.
    pub(crate) fn is_done(&self) -> bool {
        self.ending.next(Instant::now()) == Next::Done
    }

    /// Runs to the process's end and reports it. Output may go on after that.
    pub(crate) async fn until_reported(mut self) -> Self {
        self.observe_tree();
        loop {
            match self.ending.next(Instant::now()) {
                Next::Wait(until) => self.step(until).await,
                Next::Report => {
                    self.sweep();
                    self.report(self.ending.open > 0);
                    return self;
                }
                Next::Done => return self,
            }
        }
    }

    /// Goes on after the report: what background processes write goes into the logs.
    pub(crate) async fn until_done(mut self) -> Self {
        while let Next::Wait(until) = self.ending.next(Instant::now()) {
            self.step(until).await;
        }
        self.sweep();
        self
    }

    /// Takes what lies in the pipes already. A deadline ends the waiting for output, not the
    /// reading of it: on a loaded machine this task may run for the first time after its deadline.
    fn sweep(&mut self) {
        let total = self.streams.sweep(&self.process);
        self.ending.open = self.streams.open();
        if let Some(total) = total {
            self.observe_output(total);
        }
    }

    async fn step(&mut self, until: Option<Instant>) {
        if let Err(error) = self.streams.watch() {
            self.give_up_streams(&error);
        }
        let ahead = self.is_ahead();
        if std::mem::replace(&mut self.was_ahead, ahead) && !ahead {
            // The silence so far was ours.
            self.last_output = Instant::now();
        }
        let deadline = [until, self.idle_deadline()].into_iter().flatten().min();
        let before = self.streams.open();
        let has_sink = self.streams.sink.is_some();
        let waits = self.flow.borrow().is_some();
        tokio::select! {
            biased;
            Ok(()) = self.tree.changed() => self.observe_tree(),
            () = sleep_until(deadline) => self.observe_idle(),
            () = self.process.stdin.work(), if has_sink => {}
            Ok(()) = self.flow.changed(), if waits => {}
            bytes = poll_fn(|context| self.streams.poll(&self.process, context)) => {
                self.ending.open = self.streams.open();
                if let Some(total) = bytes {
                    self.observe_output(total);
                } else if before != self.ending.open {
                    self.process.announce(self.process.with_logs(total));
                }
            }
        }
    }

    /// What cannot be waited for cannot be read: the program must not go on without.
    fn give_up_streams(&mut self, error: &io::Error) {
        tracing::error!(process = self.process.about.id, %error, "streams cannot be watched");
        self.streams.sources.fill(None);
        self.streams.sink = None;
        self.ending.open = 0;
        self.process.stdin.end(StdinClosed::Ended);
        self.kills.kill(self.process.about.call, Duration::ZERO, KillCause::Supervision);
    }

    fn observe_tree(&mut self) {
        let Tree { leader, gone } = *self.tree.borrow_and_update();
        self.ending.gone = gone;
        if let Some(leader) = leader {
            self.ending.exited = Some(leader.at);
            self.ending.killed = leader.killed.is_some();
            self.streams.sink = None;
            self.process.stdin.end(StdinClosed::Ended);
            // In most calls this finds the end of every stream, and the end is reported without
            // waiting for the runtime to hear of it.
            self.sweep();
        }
    }

    fn observe_output(&mut self, total: u64) {
        self.last_output = Instant::now();
        self.process.announce(total);
        if self.process.about.limits.output_bytes.is_some_and(|limit| total > limit) {
            self.kill(KillCause::Output);
        }
    }

    fn observe_idle(&mut self) {
        let is_due = |pump: &Self| pump.idle_deadline().is_some_and(|at| Instant::now() >= at);
        if is_due(self) {
            // What lies in the pipes is output too, and this task may run late.
            self.sweep();
        }
        if is_due(self) {
            self.kill(KillCause::Idle);
        }
    }

    fn idle_deadline(&self) -> Option<Instant> {
        let idle = self.process.about.limits.idle?;
        if self.is_ahead() {
            // It is we who do not listen.
            return None;
        }
        (self.ending.exited.is_none() && !self.over_limit).then(|| self.last_output + idle)
    }

    /// Whether a stream waits for its reader.
    fn is_ahead(&self) -> bool {
        (0..self.process.streams().len()).any(|index| self.process.is_ahead(index))
    }

    fn kill(&mut self, cause: KillCause) {
        if self.ending.exited.is_none() && !self.over_limit {
            self.over_limit = true;
            self.kills.kill(self.process.about.call, GRACE, cause);
        }
    }

    fn report(&mut self, detached: bool) {
        self.ending.reported = true;
        let Tree { leader, gone } = *self.tree.borrow();
        let Some(leader) = leader else { return };
        let about = &self.process.about;
        self.process.enter(Phase::Ended(Arc::new(End {
            exit: exit_reason(leader.status, leader.killed, &about.limits),
            pid: Some(self.pid),
            duration: leader.at.saturating_duration_since(about.start),
            background: if gone.is_some() { 0 } else { leader.background },
            detached,
        })));
    }
}

impl Streams {
    /// Moves what can be moved. Ready with the total of all output when there is new output, with
    /// `None` when only a stream ended.
    fn poll(&mut self, process: &Process, context: &mut Context<'_>) -> Poll<Option<u64>> {
        self.poll_sink(process, context);
        let mut total = None;
        let mut ended = false;
        for (index, slot) in self.sources.iter_mut().enumerate() {
            let Some(source) = slot else { continue };
            for _ in 0..READS_PER_TURN {
                // The reader's next step wakes this task.
                if process.is_ahead(index) {
                    break;
                }
                let sink = |bytes: &[u8]| process.append(index, bytes);
                match poll_read(source, context, sink) {
                    Poll::Ready(Some(bytes)) => total = Some(bytes),
                    Poll::Ready(None) => {
                        *slot = None;
                        ended = true;
                        break;
                    }
                    Poll::Pending => break,
                }
            }
        }
        if total.is_some() || ended { Poll::Ready(total) } else { Poll::Pending }
    }

    /// Reads each source until it is empty, at most as much as a pipe can hold.
    fn sweep(&mut self, process: &Process) -> Option<u64> {
        let mut total = None;
        for (index, slot) in self.sources.iter_mut().enumerate() {
            let Some(source) = slot else { continue };
            let mut buffer = [MaybeUninit::<u8>::uninit(); READ_BYTES];
            for _ in 0..SWEEP_READS_MAX {
                match rustix::io::read(&source.fd, &mut buffer[..]) {
                    Ok((bytes @ [_, ..], _)) => total = Some(process.append(index, bytes)),
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => break,
                    Ok(([], _)) | Err(_) => {
                        *slot = None;
                        break;
                    }
                }
            }
        }
        total
    }

    fn poll_sink(&mut self, process: &Process, context: &mut Context<'_>) {
        while let Some(sink) = &self.sink {
            let bytes = match process.stdin.next() {
                stdin::Next::Write(bytes) => bytes,
                stdin::Next::Close => {
                    self.sink = None;
                    return;
                }
                stdin::Next::Nothing => return,
            };
            match poll_write(sink, context, &bytes) {
                Poll::Ready(Ok(count)) => process.stdin.wrote(count),
                Poll::Ready(Err(_)) => {
                    process.stdin.end(StdinClosed::ByProgram);
                    self.sink = None;
                }
                Poll::Pending => return,
            }
        }
    }
}

/// Reads once into `sink`; ready with its result, or with `None` at the stream's end.
fn poll_read(
    source: &Descriptor,
    context: &mut Context<'_>,
    sink: impl FnOnce(&[u8]) -> u64,
) -> Poll<Option<u64>> {
    let mut buffer = [MaybeUninit::<u8>::uninit(); READ_BYTES];
    let Some(watched) = source.watched.get() else { return Poll::Ready(None) };
    loop {
        let Ok(mut guard) = std::task::ready!(watched.poll_read_ready(context)) else {
            return Poll::Ready(None);
        };
        match rustix::io::read(&source.fd, &mut buffer[..]) {
            Ok(([], _)) => return Poll::Ready(None),
            Ok((bytes, _)) => return Poll::Ready(Some(sink(bytes))),
            Err(Errno::AGAIN) => guard.clear_ready(),
            Err(Errno::INTR) => {}
            // A terminal whose programs are gone answers EIO, which is its end of file.
            Err(_) => return Poll::Ready(None),
        }
    }
}

fn poll_write(
    sink: &Descriptor,
    context: &mut Context<'_>,
    bytes: &[u8],
) -> Poll<Result<usize, Errno>> {
    let Some(watched) = sink.watched.get() else { return Poll::Ready(Err(Errno::IO)) };
    loop {
        let Ok(mut guard) = std::task::ready!(watched.poll_write_ready(context)) else {
            return Poll::Ready(Err(Errno::IO));
        };
        match rustix::io::write(&sink.fd, bytes) {
            Err(Errno::AGAIN) => guard.clear_ready(),
            Err(Errno::INTR) => {}
            result => return Poll::Ready(result),
        }
    }
}

fn total(logs: &[OutputLog]) -> u64 {
    logs.iter().map(OutputLog::total).sum()
}

/// Sleeps until then; for ever without a time.
pub(crate) async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use cofferdam_cell::protocol::Status;
    use cofferdam_spec::{SessionId, Tag};

    use super::*;
    use crate::process::{About, LeaderEnd};
    use crate::stdin::{Kind, Stdin};

    /// A machine that is busy for longer than the drain must not cost output.
    #[tokio::test]
    async fn a_pump_that_runs_late_still_takes_what_the_program_wrote() {
        let directory = tempfile::tempdir().unwrap();
        let about = About {
            id: "p".to_owned(),
            call: 1,
            session: SessionId::default(),
            tag: Tag::default(),
            argv: Vec::new(),
            pty: false,
            limits: cofferdam_spec::Limits::default(),
            start_time: SystemTime::now(),
            start: Instant::now(),
        };
        let process = Arc::new(Process::new(
            about,
            Stdin::new(Kind::Null, bytes::Bytes::new(), true),
            crate::flow::Flow::new(false),
            directory.path(),
        ));
        let (read, write) = std::io::pipe().unwrap();
        let (read_error, held_open) = std::io::pipe().unwrap();
        for end in [&read, &read_error] {
            rustix::io::ioctl_fionbio(end, true).unwrap();
        }
        rustix::io::write(&write, b"whole").unwrap();
        drop(write);
        let descriptors = vec![OwnedFd::from(read), OwnedFd::from(read_error)];
        let streams = Streams::new(&process, Kind::Null, descriptors).unwrap();
        let long_ago = Instant::now().checked_sub(Duration::from_secs(9)).unwrap();
        process.update_tree(|tree| {
            let status = Status::Exited(0);
            tree.leader = Some(LeaderEnd { status, killed: None, background: 1, at: long_ago });
        });
        let kills = Kills::nowhere();
        Pump::new(Arc::clone(&process), 7, streams, kills).until_reported().await;
        assert_eq!(process.with_logs(|logs| logs[0].total()), 5);
        assert!(process.end().unwrap().detached, "standard error is still held");
        drop(held_open);
    }
}
