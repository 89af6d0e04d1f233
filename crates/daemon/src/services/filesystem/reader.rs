//! Streams whose source holds something that others wait for: a reader that stops reading may not
//! keep it.

use std::time::Duration;

use futures::stream::{Stream, StreamExt};
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

/// Parts that wait for the reader, beside what its connection takes.
const PARTS_AHEAD: usize = 2;

/// Passes on what `source` brings, from a task of its own, which ends with the source, with the
/// reader, or when the reader takes nothing for `patience`. Then `stalled` is the last item, and the
/// source is gone before the reader comes back to see it.
pub(super) fn pass_on<T: Send + 'static>(
    source: impl Stream<Item = Result<T, Status>> + Send + 'static,
    patience: Duration,
    stalled: impl FnOnce() -> Status + Send + 'static,
) -> impl Stream<Item = Result<T, Status>> + Send {
    let (sender, mut receiver) = mpsc::channel(PARTS_AHEAD);
    let (end, ended) = oneshot::channel();
    tokio::spawn(async move {
        let mut source = Box::pin(source);
        loop {
            let part = tokio::select! {
                // Nobody reads any more, as at the end of the daemon.
                () = sender.closed() => return,
                part = source.next() => part,
            };
            let Some(part) = part else { return };
            if sender.send_timeout(part, patience).await.is_err() {
                drop(source);
                // Without a reader nobody is told.
                let _ = end.send(stalled());
                return;
            }
        }
    });
    let parts = futures::stream::poll_fn(move |context| receiver.poll_recv(context));
    // When the source ended by itself, there is no last word.
    let last = futures::stream::once(ended).filter_map(async |end| end.ok().map(Err));
    parts.chain(last)
}

#[cfg(test)]
mod tests {
    use futures::stream;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn stalled() -> Status {
        Status::resource_exhausted("stalled")
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_stops_loses_the_source_and_is_told() {
        let (held, gone) = oneshot::channel::<()>();
        let endless = stream::iter(0..).map(move |number: u32| {
            let _held = &held;
            Ok(number)
        });
        let mut parts = Box::pin(pass_on(endless, PATIENCE, stalled));
        for number in 0..10 {
            assert_eq!(parts.next().await.unwrap().unwrap(), number);
        }
        let before = tokio::time::Instant::now();
        gone.await.unwrap_err();
        assert!(before.elapsed() >= PATIENCE);
        let rest: Vec<_> = parts.collect().await;
        let (last, sent) = rest.split_last().unwrap();
        let sent: Vec<u32> = sent.iter().map(|part| *part.as_ref().unwrap()).collect();
        assert_eq!(sent, [10, 11]);
        assert_eq!(last.as_ref().unwrap_err().message(), "stalled");
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_source_and_its_end_are_no_stall() {
        let slow = stream::iter([1, 2]).then(async |number: u32| {
            tokio::time::sleep(10 * PATIENCE).await;
            Ok(number)
        });
        let parts: Vec<_> = pass_on(slow, PATIENCE, stalled).collect().await;
        let parts: Vec<u32> = parts.into_iter().map(Result::unwrap).collect();
        assert_eq!(parts, [1, 2]);
    }

    #[tokio::test]
    async fn a_reader_that_goes_ends_the_source() {
        let (held, gone) = oneshot::channel::<()>();
        let silent = stream::pending::<Result<u32, Status>>().map(move |part| {
            let _held = &held;
            part
        });
        drop(pass_on(silent, PATIENCE, stalled));
        gone.await.unwrap_err();
    }
}
