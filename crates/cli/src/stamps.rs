//! `cofferdam stamps`: what sessions have seen of which file.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use cofferdam_client::{Client as _, ClientError, Page, StampEvent, StampRecord, StampState};
use cofferdam_client_grpc::GrpcClient;
use cofferdam_spec::{LineRange, Stamp};
use serde_json::{Value, json};

use crate::args::{StampsArgs, StampsCommand};
use crate::connect::{ConnectError, Target, request_id};
use crate::{Failure, text};

/// Pages that are fetched; with 100 stamps each more than a daemon holds.
const PAGES_MAX: usize = 10_000;

/// Digits of a digest that a person sees.
const DIGEST_DIGITS: usize = 12;

/// Lists, shows, verifies or drops stamps.
pub(crate) fn stamps(args: &StampsArgs) -> Result<ExitCode, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(run(args)).map_err(|error| {
        let hint = error.downcast_ref::<ConnectError>().and_then(ConnectError::hint);
        let hint = hint.map(str::to_owned);
        Failure { error: error.context("stamps"), hint, status: 1 }
    })
}

async fn run(args: &StampsArgs) -> anyhow::Result<ExitCode> {
    let target = Target::choose(&args.target)?;
    let session = args.session.as_deref().unwrap_or_default();
    let prefix = args.path.as_deref().unwrap_or_default();
    let (client, _) = target.call(|client| async move { client.get_workspace().await }).await?;
    let (json, text) = match &args.command {
        StampsCommand::List => {
            let list = |token: String| {
                let client = client.clone();
                async move { client.list_stamps(session, prefix, &token).await }
            };
            let stamps = all(list).await?;
            (records_json(&stamps), records_text(&stamps))
        }
        StampsCommand::History { file } => {
            let history = |token: String| {
                let client = client.clone();
                async move { client.get_stamp_history(file, session, &token).await }
            };
            let events = all(history).await?;
            (events_json(&events), events_text(&events))
        }
        StampsCommand::Verify => {
            let stamps = verify(&client, session, prefix).await?;
            let fresh = stamps.iter().all(|stamp| stamp.state == StampState::Fresh);
            print(args.json, &records_json(&stamps), &records_text(&stamps))?;
            return Ok(if fresh { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        StampsCommand::Clear => {
            let mut cleared = 0;
            for session in sessions(&client, session, prefix).await? {
                cleared += client.clear_stamps(&session, prefix, &request_id()).await?;
            }
            (json!({ "cleared": cleared }), format!("{cleared} stamps dropped\n"))
        }
    };
    print(args.json, &json, &text)?;
    Ok(ExitCode::SUCCESS)
}

/// Verifies the stamps of one session, or of every session that has some.
async fn verify(
    client: &GrpcClient,
    session: &str,
    prefix: &str,
) -> anyhow::Result<Vec<StampRecord>> {
    let mut stamps = Vec::new();
    for session in sessions(client, session, prefix).await? {
        let verify = |token: String| {
            let (client, session) = (client.clone(), session.clone());
            async move { client.verify_stamps(&session, prefix, &token).await }
        };
        stamps.extend(all(verify).await?);
    }
    Ok(stamps)
}

/// The session that is named, or all that hold stamps.
async fn sessions(client: &GrpcClient, session: &str, prefix: &str) -> anyhow::Result<Vec<String>> {
    if !session.is_empty() {
        return Ok(vec![session.to_owned()]);
    }
    let list = |token: String| {
        let client = client.clone();
        async move { client.list_stamps("", prefix, &token).await }
    };
    let mut names: Vec<String> = all(list).await?.into_iter().map(|stamp| stamp.session).collect();
    names.sort();
    names.dedup();
    Ok(names)
}

/// All pages, one after the other.
async fn all<T, F>(page: impl Fn(String) -> F) -> anyhow::Result<Vec<T>>
where
    F: Future<Output = Result<Page<T>, ClientError>>,
{
    let mut items = Vec::new();
    let mut token = String::new();
    for _ in 0..PAGES_MAX {
        let next = page(token).await?;
        items.extend(next.items);
        if next.next_page_token.is_empty() {
            return Ok(items);
        }
        token = next.next_page_token;
    }
    anyhow::bail!("the list has no end after {PAGES_MAX} pages")
}

fn print(as_json: bool, json: &Value, text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let written = if as_json { writeln!(out, "{json:#}") } else { write!(out, "{text}") };
    written.context("print")
}

fn records_text(stamps: &[StampRecord]) -> String {
    let mut page = String::new();
    for stamp in stamps {
        let seen = if stamp.complete { "all".to_owned() } else { ranges(&stamp.shown) };
        page.push_str(&format!(
            "{:<5}  {}  {:>9} bytes  lines {seen}  {}  {}  by {} {}\n",
            stamp.state.as_str(),
            short(&stamp.stamp),
            stamp.stamp.size,
            stamp.session,
            printable(&stamp.path),
            stamp.call,
            age(stamp.time),
        ));
    }
    page
}

fn events_text(events: &[StampEvent]) -> String {
    let mut page = String::new();
    for event in events {
        let stamp = event.stamp.as_ref().map_or("-".repeat(DIGEST_DIGITS), short);
        page.push_str(&format!(
            "{:<13}  {stamp}  {}  by {} {}\n",
            event.change.as_str(),
            event.session,
            event.call,
            age(event.time),
        ));
    }
    page
}

fn records_json(stamps: &[StampRecord]) -> Value {
    let records = stamps.iter().map(|stamp| {
        let shown = stamp.shown.iter().map(|range| json!([range.first, range.last]));
        json!({
            "session": stamp.session,
            "path": stamp.path,
            "stamp": stamp_json(&stamp.stamp),
            "call": stamp.call,
            "time": seconds(stamp.time),
            "state": stamp.state.as_str(),
            "shown": shown.collect::<Vec<_>>(),
            "complete": stamp.complete,
        })
    });
    json!({ "stamps": records.collect::<Vec<_>>() })
}

fn events_json(events: &[StampEvent]) -> Value {
    let events = events.iter().map(|event| {
        json!({
            "session": event.session,
            "change": event.change.as_str(),
            "stamp": event.stamp.as_ref().map(stamp_json),
            "call": event.call,
            "time": seconds(event.time),
        })
    });
    json!({ "events": events.collect::<Vec<_>>() })
}

fn stamp_json(stamp: &Stamp) -> Value {
    json!({ "algorithm": "sha256", "digest": text::hex(&stamp.digest), "size": stamp.size })
}

/// Seconds since 1970.
fn seconds(time: SystemTime) -> f64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn short(stamp: &Stamp) -> String {
    text::hex(&stamp.digest).chars().take(DIGEST_DIGITS).collect()
}

/// `1-10,20-30`.
fn ranges(ranges: &[LineRange]) -> String {
    let shown: Vec<String> =
        ranges.iter().map(|range| format!("{}-{}", range.first, range.last)).collect();
    shown.join(",")
}

/// A name on a terminal, whatever is in it.
fn printable(path: &str) -> String {
    path.chars().map(|one| if one.is_control() { '\u{fffd}' } else { one }).collect()
}

fn age(time: SystemTime) -> String {
    let age = SystemTime::now().duration_since(time).unwrap_or(Duration::ZERO).as_secs();
    match age {
        0..120 => format!("{age} s ago"),
        120..7200 => format!("{} min ago", age / 60),
        _ => format!("{} h ago", age / 3600),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn record() -> StampRecord {
        StampRecord {
            session: "s".to_owned(),
            path: "/workspace/a\nb".to_owned(),
            stamp: Stamp { digest: [0xab; 32], size: 7 },
            call: "r".to_owned(),
            time: SystemTime::UNIX_EPOCH + Duration::from_secs(5),
            state: StampState::Stale,
            shown: vec![LineRange { first: 1, last: 10 }],
            complete: false,
        }
    }

    #[test]
    fn a_stamp_is_one_line_for_a_person() {
        let text = records_text(&[record()]);
        let start =
            "stale  abababababab          7 bytes  lines 1-10  s  /workspace/a\u{fffd}b  by r ";
        assert!(text.starts_with(start), "{text}");
        assert_eq!(text.lines().count(), 1);
    }

    #[test]
    fn a_stamp_is_an_object_for_a_program() {
        let expected = json!({ "stamps": [{
            "session": "s", "path": "/workspace/a\nb", "call": "r", "time": 5.0, "state": "stale",
            "stamp": { "algorithm": "sha256", "digest": "ab".repeat(32), "size": 7 },
            "shown": [[1, 10]], "complete": false,
        }] });
        assert_eq!(records_json(&[record()]), expected);
    }

    #[tokio::test]
    async fn pages_are_fetched_until_there_is_no_next_one() {
        let asked = Cell::new(0);
        let page = |token: String| {
            asked.set(asked.get() + 1);
            let number = asked.get();
            let next = if number < 3 { number.to_string() } else { String::new() };
            async move { Ok(Page { items: vec![token], next_page_token: next }) }
        };
        assert_eq!(all(page).await.unwrap(), ["", "1", "2"]);
    }
}
