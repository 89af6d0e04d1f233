//! The event streams of Start and Connect.
//!
//! A reader has no queue. When its gRPC stream has room it is polled, and takes the next bytes from
//! the log at its own offset; when the log has gone on without it, it gets the gap's two ends. So
//! readers cost nothing while they do not read, and slow down no program but one that was started to
//! wait for them.

use std::sync::Arc;
use std::time::Duration;

use cofferdam_proto::v1::process_event::Event;
use cofferdam_proto::{duration_to_wire, v1};
use futures::stream::{self, Stream as FutureStream};
use tokio::sync::watch;
use tonic::Status;

use crate::account;
use crate::output::Read;
use crate::process::{End, Phase, Process, Progress, Stream};
use crate::status::Fault;
use crate::supervisor::{Handle, Lease};

/// Most bytes of one event: what a pipe holds, far below the limit of a message.
const CHUNK_BYTES_MAX: usize = 64 * 1024;

/// Silence after which a keepalive is sent: half of what idle proxies allow.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// A reader of one process.
#[derive(Debug)]
pub(crate) struct Reader {
    supervisor: Handle,
    process: Arc<Process>,
    /// Kept until the end has been sent; dropping it earlier kills, when the client wanted that.
    lease: Option<Lease>,
    progress: watch::Receiver<Progress>,
    /// Next byte wanted of each stream.
    offsets: Vec<u64>,
    /// The stream that is asked first, so that one does not starve the other.
    turn: usize,
    /// Whether the process may wait for this reader.
    is_waited_for: bool,
    started: bool,
    ended: bool,
}

impl Reader {
    /// A reader for the client that started the process.
    pub(crate) fn of_lease(supervisor: Handle, lease: Lease) -> Self {
        let process = Arc::clone(lease.process());
        let offsets = vec![0; process.streams().len()];
        let mut reader = Self::of_process(supervisor, process, offsets);
        reader.lease = Some(lease);
        reader.is_waited_for = true;
        reader
    }

    /// A reader that begins at these offsets.
    pub(crate) fn of_process(supervisor: Handle, process: Arc<Process>, offsets: Vec<u64>) -> Self {
        let progress = process.progress();
        let (lease, turn) = (None, 0);
        Self {
            supervisor,
            process,
            lease,
            progress,
            offsets,
            turn,
            is_waited_for: false,
            started: false,
            ended: false,
        }
    }

    /// Its events.
    pub(crate) fn into_stream(
        self,
    ) -> impl FutureStream<Item = Result<v1::ProcessEvent, Status>> + Send {
        stream::unfold(self, |mut reader| async move {
            let event = reader.next().await?;
            Some((event, reader))
        })
    }

    async fn next(&mut self) -> Option<Result<v1::ProcessEvent, Status>> {
        while !self.ended {
            // First the phase, then the logs: whatever comes between wakes the wait below.
            let phase = self.progress.borrow_and_update().phase.clone();
            let event = match self.next_ready(&phase) {
                Ok(Some(event)) => event,
                Ok(None) => match tokio::time::timeout(KEEPALIVE, self.progress.changed()).await {
                    Ok(_) => continue,
                    Err(_) => event(0, Event::Keepalive(v1::Keepalive {})),
                },
                Err(fault) => {
                    self.ended = true;
                    return Some(Err(fault.into()));
                }
            };
            return Some(Ok(event));
        }
        None
    }

    fn next_ready(&mut self, phase: &Phase) -> Result<Option<v1::ProcessEvent>, Fault> {
        if !self.started
            && let Some(pid) = pid(phase)
        {
            self.started = true;
            return Ok(Some(self.started_event(pid)));
        }
        if let Some(event) = self.output_event()? {
            return Ok(Some(event));
        }
        let Phase::Ended(end) = phase else { return Ok(None) };
        self.ended = true;
        if let Some(lease) = &mut self.lease {
            lease.release();
        }
        Ok(Some(self.exit_event(end)))
    }

    fn started_event(&self, pid: u32) -> v1::ProcessEvent {
        let process_id = self.process.about.id.clone();
        v1::ProcessEvent {
            enforcement: Some(self.supervisor.enforcement()),
            ..event(0, Event::Started(v1::Started { process_id, pid, replayed: false }))
        }
    }

    fn output_event(&mut self) -> Result<Option<v1::ProcessEvent>, Fault> {
        let streams = self.process.streams();
        for step in 0..streams.len() {
            let index = (self.turn + step) % streams.len();
            let offset = self.offsets[index];
            let read = self.process.with_logs(|logs| logs[index].read_at(offset, CHUNK_BYTES_MAX));
            let read = read.map_err(|error| Fault::Output {
                process_id: self.process.about.id.clone(),
                error,
            })?;
            match read {
                Read::End => {}
                Read::Data { offset, bytes } => {
                    self.advance(index, offset + bytes.len() as u64);
                    self.turn = (index + 1) % streams.len();
                    let bytes = match streams[index] {
                        Stream::Stdout => Event::Stdout(bytes),
                        Stream::Stderr => Event::Stderr(bytes),
                        Stream::Pty => Event::Pty(bytes),
                    };
                    return Ok(Some(event(offset, bytes)));
                }
                Read::Gap { from, to } => {
                    self.advance(index, to);
                    let stream = wire_stream(streams[index]).into();
                    let lag = v1::Lag { stream, skipped_from: from, skipped_to: to };
                    return Ok(Some(event(0, Event::Lag(lag))));
                }
            }
        }
        Ok(None)
    }

    fn advance(&mut self, index: usize, offset: u64) {
        self.offsets[index] = offset;
        if self.is_waited_for {
            self.process.flow.advance(index, offset);
        }
    }

    fn exit_event(&self, end: &End) -> v1::ProcessEvent {
        v1::ProcessEvent {
            output: Some(output_account(&self.process)),
            duration: Some(duration_to_wire(end.duration)),
            enforcement: Some(self.supervisor.enforcement()),
            ..event(0, Event::Exit(v1::Exit::from(&end.exit)))
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if self.is_waited_for {
            self.process.flow.release();
        }
    }
}

fn event(offset: u64, event: Event) -> v1::ProcessEvent {
    v1::ProcessEvent { offset, event: Some(event), ..v1::ProcessEvent::default() }
}

fn pid(phase: &Phase) -> Option<u32> {
    match phase {
        Phase::Starting => None,
        Phase::Running { pid } => Some(*pid),
        Phase::Ended(end) => end.pid,
    }
}

fn wire_stream(stream: Stream) -> v1::OutputStream {
    match stream {
        Stream::Stdout => v1::OutputStream::Stdout,
        Stream::Stderr => v1::OutputStream::Stderr,
        Stream::Pty => v1::OutputStream::Pty,
    }
}

/// Account of what a process's job files hold. A terminal's output counts as standard output.
pub(crate) fn output_account(process: &Process) -> v1::OutputAccount {
    let mut accounts: Vec<_> = process.with_logs(|logs| logs.iter().map(account::of_log).collect());
    let stderr = (accounts.len() > 1).then(|| accounts.pop()).flatten();
    let end = process.end();
    v1::OutputAccount {
        stdout: accounts.pop(),
        stderr,
        process_id: process.about.id.clone(),
        background_processes: end.as_ref().map_or(0, |end| end.background),
        detached: end.is_some_and(|end| end.detached),
    }
}
