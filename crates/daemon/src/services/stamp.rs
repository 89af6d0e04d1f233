//! `StampService`.

use std::time::SystemTime;

use cofferdam_proto::v1;
use cofferdam_proto::v1::stamp_service_server::StampService;
use cofferdam_spec::SessionId;
use prost::Message;
use tonic::{Request, Response, Status};

use crate::files::{Files, guess};
use crate::stamps::{Change, Event, Freshness, Record};
use crate::status::Fault;
use crate::validate::{Checker, MESSAGE_BYTES_MAX, PAGE_MAX, within};

/// Entries of a page when the request names no number.
const PAGE_DEFAULT: u32 = 100;

/// Room for everything of a response but its entries.
const BYTES_RESERVED: usize = 64 * 1024;

/// Tell tokens of ours from other text.
const STAMPS_TOKEN_PREFIX: &str = "after-";
const HISTORY_TOKEN_PREFIX: &str = "before-";

/// The service.
#[derive(Debug, Clone)]
pub(crate) struct Stamping {
    files: Files,
}

impl Stamping {
    /// A service over the stamps of files.
    pub(crate) fn new(files: Files) -> Self {
        Self { files }
    }
}

#[tonic::async_trait]
impl StampService for Stamping {
    async fn list_stamps(
        &self,
        request: Request<v1::ListStampsRequest>,
    ) -> Result<Response<v1::ListStampsResponse>, Status> {
        let request = request.into_inner();
        within(&request, MESSAGE_BYTES_MAX)?;
        let mut checker = Checker::default();
        let session = checker.session(&request.session);
        let session = session.map(|one| (one != SessionId::default()).then_some(one));
        let page = page(&mut checker, session, request.path_prefix, &request.page_token);
        let count = checker.bounded("page_size", request.page_size, PAGE_DEFAULT, PAGE_MAX);
        let (page, count) = checker.finish(page.zip(count))?;
        let (records, next_page_token) = self.find(&page, count);
        let stamps = records.into_iter().map(to_wire).collect();
        Ok(Response::new(v1::ListStampsResponse { stamps, next_page_token }))
    }

    async fn get_stamp_history(
        &self,
        request: Request<v1::GetStampHistoryRequest>,
    ) -> Result<Response<v1::GetStampHistoryResponse>, Status> {
        let request = request.into_inner();
        within(&request, MESSAGE_BYTES_MAX)?;
        let mut checker = Checker::default();
        let path = checker.path("path", &request.path).map(|path| guess(&path));
        let session = checker.session(&request.session);
        let count = checker.bounded("page_size", request.page_size, PAGE_DEFAULT, PAGE_MAX);
        let before = match request.page_token.as_str() {
            "" => Some(None),
            token => token
                .strip_prefix(HISTORY_TOKEN_PREFIX)
                .and_then(|number| u64::from_str_radix(number, 16).ok())
                .map(Some),
        };
        if before.is_none() {
            checker.refuse("page_token", "is none that this service gave");
        }
        let checked = || Some((path?, session?, count?, before?));
        let (path, session, count, before) = checker.finish(checked())?;
        let session = Some(&session).filter(|one| **one != SessionId::default());
        let count = count as usize;
        // One more than asked for tells whether there is a next page. 1,000 events are far below
        // what a response may hold.
        let mut found =
            self.files.with_stamps(|stamps| stamps.history(&path, session, before, count + 1));
        let more = found.len() > count;
        found.truncate(count);
        let last = found.last().filter(|_| more);
        let next_page_token =
            last.map(|last| format!("{HISTORY_TOKEN_PREFIX}{:x}", last.number)).unwrap_or_default();
        let events = found.into_iter().map(event_to_wire).collect();
        Ok(Response::new(v1::GetStampHistoryResponse { events, next_page_token }))
    }

    async fn verify_stamps(
        &self,
        request: Request<v1::VerifyStampsRequest>,
    ) -> Result<Response<v1::VerifyStampsResponse>, Status> {
        let request = request.into_inner();
        within(&request, MESSAGE_BYTES_MAX)?;
        let mut checker = Checker::default();
        let session = checker.named_session(&request.session).map(Some);
        let page = page(&mut checker, session, request.path_prefix, &request.page_token);
        let count = checker.bounded("page_size", request.page_size, PAGE_DEFAULT, PAGE_MAX);
        let (page, count) = checker.finish(page.zip(count))?;
        let (records, next_page_token) = self.find(&page, count);
        let mut stamps = Vec::with_capacity(records.len());
        for mut record in records {
            record.freshness = self.files.verify(&record).await.map_err(Fault::from)?;
            stamps.push(to_wire(record));
        }
        Ok(Response::new(v1::VerifyStampsResponse { stamps, next_page_token }))
    }

    async fn clear_stamps(
        &self,
        request: Request<v1::ClearStampsRequest>,
    ) -> Result<Response<v1::ClearStampsResponse>, Status> {
        let request = request.into_inner();
        within(&request, MESSAGE_BYTES_MAX)?;
        let mut checker = Checker::default();
        let caller = checker.caller(&request.session, &request.request_id);
        checker.named_session(&request.session);
        let prefix = prefix(&mut checker, request.path_prefix);
        let (caller, prefix) = checker.finish(caller.zip(prefix))?;
        let now = SystemTime::now();
        let cleared = self.files.with_stamps(|stamps| stamps.clear(&caller, &prefix, now));
        let enforcement = Some(self.files.enforcement());
        Ok(Response::new(v1::ClearStampsResponse { cleared, enforcement }))
    }
}

impl Stamping {
    /// The records of a page, as many as a response has room for, and the next page's token.
    fn find(&self, page: &Page, count: u32) -> (Vec<Record>, String) {
        let Page { session, prefix, after } = page;
        let count = count as usize;
        // One more than asked for tells whether there is a next page.
        let mut records = self
            .files
            .with_stamps(|stamps| stamps.page(session.as_ref(), prefix, after.as_ref(), count + 1));
        let mut room = MESSAGE_BYTES_MAX as usize - BYTES_RESERVED;
        let mut kept = 0;
        for record in records.iter().take(count) {
            let size = to_wire(record.clone()).encoded_len() + 8;
            let Some(left) = room.checked_sub(size) else { break };
            room = left;
            kept += 1;
        }
        let more = kept < records.len();
        records.truncate(kept);
        let last = records.last().filter(|_| more);
        let token = last.map(|last| page_token(&last.session, &last.path)).unwrap_or_default();
        (records, token)
    }
}

/// Which stamps are wanted.
struct Page {
    session: Option<SessionId>,
    prefix: String,
    after: Option<(SessionId, String)>,
}

fn page(
    checker: &mut Checker,
    session: Option<Option<SessionId>>,
    path_prefix: String,
    token: &str,
) -> Option<Page> {
    let prefix = prefix(checker, path_prefix);
    let after = match token {
        "" => Some(None),
        token => parse_page_token(token).map(Some),
    };
    if after.is_none() {
        checker.refuse("page_token", "is none that this service gave");
    }
    Some(Page { session: session?, prefix: prefix?, after: after? })
}

/// A path under which stamps are held; the empty one means every path.
fn prefix(checker: &mut Checker, text: String) -> Option<String> {
    if text.is_empty() {
        return Some(text);
    }
    checker.path("path_prefix", &text).map(|path| guess(&path))
}

fn page_token(session: &SessionId, path: &str) -> String {
    let session = session.as_str();
    format!("{STAMPS_TOKEN_PREFIX}{:x}-{session}{path}", session.len())
}

fn parse_page_token(token: &str) -> Option<(SessionId, String)> {
    let (length, rest) = token.strip_prefix(STAMPS_TOKEN_PREFIX)?.split_once('-')?;
    let (session, path) = rest.split_at_checked(usize::from_str_radix(length, 16).ok()?)?;
    Some((SessionId::new(session).ok()?, path.to_owned()))
}

fn to_wire(record: Record) -> v1::StampRecord {
    let state = match record.freshness {
        Freshness::Fresh => v1::StampState::Fresh,
        Freshness::Stale => v1::StampState::Stale,
        Freshness::Gone => v1::StampState::Gone,
    };
    v1::StampRecord {
        session: record.session.as_str().to_owned(),
        path: record.path.to_string(),
        stamp: Some((&record.stamp).into()),
        call: record.call,
        time: Some(record.time.into()),
        state: state.into(),
        shown: record.shown.into_iter().map(Into::into).collect(),
        complete: record.complete,
    }
}

fn event_to_wire(event: Event) -> v1::StampEvent {
    let change = match event.change {
        Change::Read => v1::StampChange::Read,
        Change::Written => v1::StampChange::Written,
        Change::Moved => v1::StampChange::Moved,
        Change::Removed => v1::StampChange::Removed,
        Change::Cleared => v1::StampChange::Cleared,
        Change::RefusedStale => v1::StampChange::RefusedStale,
    };
    v1::StampEvent {
        session: event.session.as_str().to_owned(),
        change: change.into(),
        stamp: event.stamp.as_ref().map(Into::into),
        call: event.call,
        time: Some(event.time.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_tokens_come_back() {
        for (session, path) in [("a-b c", "/é"), ("", "/"), ("x", "/workspace/-")] {
            let session = SessionId::new(session).unwrap();
            let token = page_token(&session, path);
            assert_eq!(parse_page_token(&token), Some((session, path.to_owned())));
        }
        for token in ["after-9-a/", "x", "after-zz-a", "after-1-é/"] {
            assert_eq!(parse_page_token(token), None, "{token}");
        }
    }
}
