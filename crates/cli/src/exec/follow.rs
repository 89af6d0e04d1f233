//! Follows one program from its start to its end: output out, input in, signals and sizes over.
//!
//! Four things go on at once, none of which may stop another: events become output, input becomes
//! writes, signals become calls, and the writer may fail. The first and the last end it.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use cofferdam_client::{
    Client, ClientError, Code, Events, ExitReport, ProcessEvent, STDIN_CHUNK_BYTES, SignalTarget,
};
use nix::sys::signal::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use super::input::READ_BYTES;
use super::output::{OutputError, Writer};
use super::{is_unknown, terminal};
use crate::connect::request_id;
use crate::text;

/// How long the end of a killed tree is waited for; the daemon kills it in any case.
const KILL_LIMIT: Duration = Duration::from_secs(5);

/// Pause before input that the daemon could not take is offered again.
const STDIN_PAUSE: Duration = Duration::from_millis(20);

/// How a followed program ended for us.
#[derive(Debug)]
pub(crate) enum End {
    /// It ended, and its output has been written but for `lost_bytes`.
    Exited { report: Box<ExitReport>, lost_bytes: u64 },
    /// Nobody reads the output any more; the tree was killed.
    ReaderGone,
    /// A signal came while nothing of the program could take it.
    Interrupted { signal: u8 },
}

/// What this process is told by signals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Told {
    /// A signal for the program.
    Forward(Signal),
    /// The terminal has another size.
    Resized,
}

/// The signals that are passed on. From here on they no longer end this process.
#[derive(Debug)]
pub(crate) struct Signals {
    told: mpsc::UnboundedReceiver<Told>,
}

impl Signals {
    /// Takes the signals over.
    pub(crate) fn new() -> io::Result<Self> {
        let (sender, told) = mpsc::unbounded_channel();
        let table = [
            (SignalKind::interrupt(), Told::Forward(Signal::SIGINT)),
            (SignalKind::terminate(), Told::Forward(Signal::SIGTERM)),
            (SignalKind::hangup(), Told::Forward(Signal::SIGHUP)),
            (SignalKind::quit(), Told::Forward(Signal::SIGQUIT)),
            (SignalKind::window_change(), Told::Resized),
        ];
        for (kind, what) in table {
            let mut stream = signal(kind)?;
            let sender = sender.clone();
            tokio::spawn(async move {
                while stream.recv().await.is_some() && sender.send(what).is_ok() {}
            });
        }
        Ok(Self { told })
    }

    /// Signals that a test sends.
    #[cfg(test)]
    pub(crate) fn scripted(told: mpsc::UnboundedReceiver<Told>) -> Self {
        Self { told }
    }

    async fn next(&mut self) -> Told {
        match self.told.recv().await {
            Some(told) => told,
            None => std::future::pending().await,
        }
    }

    /// The next one that would have ended this process.
    pub(crate) async fn next_ending(&mut self) -> u8 {
        loop {
            if let Told::Forward(signal) = self.next().await {
                return signal as u8;
            }
        }
    }
}

/// Follows the program that `events` tells of. Without `chunks` it has no input.
pub(crate) async fn follow<C: Client>(
    client: &C,
    mut events: C::Events,
    mut signals: Signals,
    chunks: Option<mpsc::Receiver<io::Result<Bytes>>>,
    writer: Writer,
) -> anyhow::Result<End> {
    let first = tokio::select! {
        first = events.next() => first?,
        // Dropping the events kills whatever is being started.
        signal = signals.next_ending() => return Ok(End::Interrupted { signal }),
    };
    let Some(ProcessEvent::Started { process_id, .. }) = first else {
        return match first {
            Some(ProcessEvent::Exit(report)) => Ok(End::Exited { report, lost_bytes: 0 }),
            _ => anyhow::bail!(ClientError::Malformed { operation: "Start", field: "started" }),
        };
    };
    let ended = {
        let show = show(&mut events, &writer);
        let forward = forward(client, &process_id, &mut signals);
        let feed = feed(client, &process_id, chunks);
        tokio::pin!(show, forward, feed);
        let mut fed = false;
        loop {
            tokio::select! {
                ended = &mut show => break Some(ended?),
                () = writer.failed() => break None,
                () = &mut forward => unreachable!("signals are forwarded as long as they come"),
                () = &mut feed, if !fed => fed = true,
            }
        }
    };
    let Some((report, lost_bytes)) = ended else {
        kill(client, &process_id, &mut events).await;
        return match writer.finish().await {
            Err(OutputError::ReaderGone) => Ok(End::ReaderGone),
            result => Err(result.err().unwrap_or(OutputError::ReaderGone).into()),
        };
    };
    tokio::select! {
        written = writer.finish() => match written {
            Ok(()) => Ok(End::Exited { report, lost_bytes }),
            Err(OutputError::ReaderGone) => Ok(End::ReaderGone),
            Err(error) => Err(error.into()),
        },
        // The program has ended, but its last output finds no reader.
        signal = signals.next_ending() => Ok(End::Interrupted { signal }),
    }
}

/// Passes output on until the exit.
async fn show<E: Events>(
    events: &mut E,
    writer: &Writer,
) -> Result<(Box<ExitReport>, u64), ClientError> {
    let mut lost_bytes = 0;
    loop {
        match events.next().await? {
            Some(ProcessEvent::Output { stream, data, .. }) => writer.write(stream, data).await,
            Some(ProcessEvent::Lag { skipped_from, skipped_to, .. }) => {
                lost_bytes += skipped_to.saturating_sub(skipped_from);
            }
            Some(ProcessEvent::Exit(report)) => return Ok((report, lost_bytes)),
            Some(ProcessEvent::Started { .. } | ProcessEvent::Keepalive) => {}
            None => {
                return Err(ClientError::OutcomeUnknown { operation: "Start", source: None });
            }
        }
    }
}

/// Passes signals and sizes on, for ever. A program that has ended in between needs none.
async fn forward<C: Client>(client: &C, process_id: &str, signals: &mut Signals) {
    loop {
        let result = match signals.next().await {
            Told::Forward(signal) => client
                .send_signal(process_id, signal as i32, SignalTarget::Group, &request_id())
                .await
                .map(drop),
            Told::Resized => client.resize_pty(process_id, terminal::size(), &request_id()).await,
        };
        if let Err(error) = result
            && !gone(&error)
        {
            text::complain(&format!("exec: {error}"));
        }
    }
}

/// Passes input on until its end, or until the program takes no more.
async fn feed<C: Client>(
    client: &C,
    process_id: &str,
    chunks: Option<mpsc::Receiver<io::Result<Bytes>>>,
) {
    let Some(mut chunks) = chunks else { return };
    let mut offset = 0;
    while let Some(chunk) = chunks.recv().await {
        let mut rest = match chunk.and_then(|first| with_what_waits(first, &mut chunks)) {
            Ok(chunk) => chunk,
            Err(error) => {
                text::complain(&format!("exec: read standard input: {error}"));
                break;
            }
        };
        while !rest.is_empty() {
            match client.write_stdin(process_id, offset, rest.clone(), &request_id()).await {
                // What was not taken is offered again.
                Ok(accepted) => {
                    let taken = accepted.saturating_sub(offset).min(rest.len() as u64);
                    rest = rest.split_off(taken as usize);
                    offset += taken;
                    if taken == 0 {
                        tokio::time::sleep(STDIN_PAUSE).await;
                    }
                }
                Err(error) if is_busy(&error) => {
                    let after = error.refusal().and_then(|refusal| refusal.retry_after);
                    tokio::time::sleep(after.unwrap_or(STDIN_PAUSE)).await;
                }
                // As a writer into a pipe that nobody reads: the program has had enough.
                Err(error) => {
                    if !gone(&error) {
                        text::complain(&format!("exec: {error}"));
                    }
                    return;
                }
            }
        }
    }
    if let Err(error) = client.close_stdin(process_id, &request_id()).await
        && !gone(&error)
    {
        text::complain(&format!("exec: {error}"));
    }
}

/// Joins what has been read already, so that a call carries more than one read.
fn with_what_waits(
    first: Bytes,
    chunks: &mut mpsc::Receiver<io::Result<Bytes>>,
) -> io::Result<Bytes> {
    let mut all = vec![first];
    let mut length = all[0].len();
    while length + READ_BYTES <= STDIN_CHUNK_BYTES
        && let Ok(next) = chunks.try_recv()
    {
        let next = next?;
        length += next.len();
        all.push(next);
    }
    Ok(if all.len() == 1 { all.swap_remove(0) } else { Bytes::from(all.concat()) })
}

/// Whether the program, or its input, has ended; or the connection has, which the event stream
/// will tell better.
fn gone(error: &ClientError) -> bool {
    let kind = error.refusal().map(|refusal| refusal.code);
    matches!(error, ClientError::Transport { .. })
        || is_unknown(error)
        || matches!(kind, Some(Code::FailedPrecondition | Code::NotFound))
}

/// Whether the daemon has no room for the input yet.
fn is_busy(error: &ClientError) -> bool {
    error.refusal().is_some_and(|refusal| {
        refusal.code == Code::ResourceExhausted && refusal.retry_after.is_some()
    })
}

/// Kills the whole tree and waits for its end.
async fn kill<C: Client>(client: &C, process_id: &str, events: &mut C::Events) {
    let kill = Signal::SIGKILL as i32;
    let end = async {
        // When the call fails, the end of the event stream kills as well.
        if client.send_signal(process_id, kill, SignalTarget::Tree, &request_id()).await.is_ok() {
            while let Ok(Some(_)) = events.next().await {}
        }
    };
    let _ = tokio::time::timeout(KILL_LIMIT, end).await;
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use cofferdam_client::{Call, FakeClient, OutputStream, StartRequest};
    use cofferdam_spec::{Enforcement, Engine, Exit, Level, NetworkMode};

    use super::*;

    fn started() -> ProcessEvent {
        ProcessEvent::Started { process_id: "p1".into(), pid: 7, replayed: false }
    }

    fn output(offset: u64, text: &'static str) -> ProcessEvent {
        let stream = OutputStream::Stdout;
        ProcessEvent::Output { stream, offset, data: Bytes::from_static(text.as_bytes()) }
    }

    fn exited(code: i32) -> ProcessEvent {
        ProcessEvent::Exit(Box::new(ExitReport {
            exit: Exit::Exited { code },
            output: Default::default(),
            protected_paths: Vec::new(),
            duration: Duration::ZERO,
            enforcement: Enforcement {
                engine: Engine::Native,
                level: Level::Namespaces,
                landlock_abi: 7,
                rights_not_handled: Vec::new(),
                network: NetworkMode::None,
                policy_digest: [0; 32],
                seccomp_digest: [0; 32],
                not_enforced: Vec::new(),
            },
            audit_sequence: 0,
            audit_hash: Bytes::new(),
        }))
    }

    /// A writer into memory, and what it has got.
    fn memory() -> (Writer, Arc<Mutex<Vec<u8>>>) {
        let written = Arc::new(Mutex::new(Vec::new()));
        let copy = written.clone();
        let writer = Writer::spawn_with(move |_, data| {
            copy.lock().unwrap().extend_from_slice(data);
            Ok(())
        });
        (writer.unwrap(), written)
    }

    fn quiet() -> Signals {
        Signals::scripted(mpsc::unbounded_channel().1)
    }

    async fn run(client: &FakeClient, writer: Writer) -> anyhow::Result<End> {
        let events = client.start(StartRequest::default()).await.unwrap();
        follow(client, events, quiet(), None, writer).await
    }

    #[tokio::test]
    async fn output_is_passed_on_and_the_exit_is_reported() {
        let client = FakeClient::new().answer_stream([
            started(),
            output(0, "one "),
            ProcessEvent::Keepalive,
            output(4, "two"),
            exited(3),
        ]);
        let (writer, written) = memory();
        let End::Exited { report, lost_bytes } = run(&client, writer).await.unwrap() else {
            panic!("not an exit");
        };
        assert_eq!((report.exit, lost_bytes), (Exit::Exited { code: 3 }, 0));
        assert_eq!(*written.lock().unwrap(), b"one two");
    }

    #[tokio::test]
    async fn an_end_without_an_exit_event_is_an_error() {
        let client = FakeClient::new().answer_stream([started(), output(0, "half")]);
        let error = run(&client, memory().0).await.unwrap_err();
        let error = error.downcast_ref::<ClientError>().unwrap();
        assert!(is_unknown(error), "{error}");
    }

    #[tokio::test]
    async fn lost_output_is_counted() {
        let stream = OutputStream::Stdout;
        let lag = ProcessEvent::Lag { stream, skipped_from: 10, skipped_to: 25 };
        let client = FakeClient::new().answer_stream([started(), lag, exited(0)]);
        let end = run(&client, memory().0).await.unwrap();
        assert!(matches!(end, End::Exited { lost_bytes: 15, .. }), "{end:?}");
    }

    #[tokio::test]
    async fn a_reader_that_goes_away_ends_the_tree() {
        let client = FakeClient::new().answer_stream(
            [started()].into_iter().chain((0..1000).map(|offset| output(offset, "y"))),
        );
        let writer = Writer::spawn_with(|_, _| Err(OutputError::ReaderGone)).unwrap();
        let end = run(&client, writer).await;
        assert!(matches!(end, Ok(End::ReaderGone)), "{end:?}");
        let target = SignalTarget::Tree;
        let kill = Call::SendSignal { process_id: "p1".into(), signal: 9, target };
        assert_eq!(client.calls().last(), Some(&kill));
    }

    #[tokio::test]
    async fn input_is_written_in_order_and_closed() {
        let client = FakeClient::new();
        let (sender, chunks) = mpsc::channel(4);
        for text in ["ab", "cde"] {
            sender.send(Ok(Bytes::from(text))).await.unwrap();
        }
        drop(sender);
        feed(&client, "p1", Some(chunks)).await;
        let write = |offset, text: &'static str| Call::WriteStdin {
            process_id: "p1".into(),
            offset,
            data: Bytes::from(text),
        };
        let close = Call::CloseStdin { process_id: "p1".into() };
        // What was there already went in one call.
        assert_eq!(client.calls(), [write(0, "abcde"), close]);
    }

    #[tokio::test]
    async fn signals_reach_the_group() {
        let client = FakeClient::new();
        let (sender, told) = mpsc::unbounded_channel();
        sender.send(Told::Forward(Signal::SIGTERM)).unwrap();
        let mut signals = Signals::scripted(told);
        let forward = forward(&client, "p1", &mut signals);
        let _ = tokio::time::timeout(Duration::from_millis(1), forward).await;
        let target = SignalTarget::Group;
        let expected = Call::SendSignal { process_id: "p1".into(), signal: 15, target };
        assert_eq!(client.calls(), [expected]);
    }
}
