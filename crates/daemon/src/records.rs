//! The processes that clients can ask for: running ones, and finished ones until they are
//! forgotten.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cofferdam_cell::protocol::CallId;
use cofferdam_spec::SessionId;

use crate::decide::{self, Finished, RETENTION_DEFAULT};
use crate::process::Process;

/// What becomes of a process's record after its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    /// It stays readable for so long.
    For(Duration),
    /// It goes with the answer, unless the answer leaves out what can still be read.
    IfCut,
}

#[derive(Debug)]
struct Record {
    process: Arc<Process>,
    keep: Keep,
    until: Option<Instant>,
}

/// The records of one daemon, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Records {
    records: BTreeMap<CallId, Record>,
    /// The earliest end of a retention.
    next_expiry: Option<Instant>,
}

impl Records {
    /// Adds a process that is being started.
    pub(crate) fn insert(&mut self, process: Arc<Process>, keep: Keep) {
        self.records.insert(process.about.call, Record { process, keep, until: None });
    }

    /// The process of that name.
    pub(crate) fn find(&self, id: &str) -> Option<Arc<Process>> {
        let call = id.rsplit('-').next()?.parse().ok()?;
        let process = &self.records.get(&call)?.process;
        (process.about.id == id).then(|| Arc::clone(process))
    }

    /// At most `count` processes after `after`, oldest first.
    pub(crate) fn page(
        &self,
        session: Option<&SessionId>,
        after: CallId,
        count: usize,
    ) -> Vec<Arc<Process>> {
        let of_session =
            |process: &&Arc<Process>| session.is_none_or(|one| process.about.session == *one);
        let later = self.records.range(after.saturating_add(1)..);
        later.map(|(_, record)| &record.process).filter(of_session).take(count).cloned().collect()
    }

    /// A process's end has been reported; false when that was known.
    pub(crate) fn finish(&mut self, process: &Process, now: Instant) -> bool {
        let Some(record) = self.records.get_mut(&process.about.call) else { return false };
        if record.until.is_some() {
            return false;
        }
        let retention = match record.keep {
            Keep::For(retention) => retention,
            Keep::IfCut if process.is_worth_keeping() => RETENTION_DEFAULT,
            Keep::IfCut => {
                self.records.remove(&process.about.call);
                return true;
            }
        };
        record.until = Some(now + retention);
        self.forget(now);
        true
    }

    /// Drops what is over, and the oldest finished ones above the bounds.
    pub(crate) fn forget(&mut self, now: Instant) {
        let finished: Vec<Finished> = self
            .records
            .iter()
            .filter_map(|(&number, record)| {
                let until = record.until?;
                Some(Finished { number, until, bytes: record.process.file_bytes() })
            })
            .collect();
        for number in decide::forget(&finished, now) {
            if let Some(record) = self.records.remove(&number) {
                // A background process may still write; its bytes are only counted from here on.
                record.process.discard_output();
            }
        }
        self.next_expiry = self.records.values().filter_map(|record| record.until).min();
    }

    /// When [`Records::forget`] has something to do.
    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        self.next_expiry
    }
}

#[cfg(test)]
mod tests {
    use cofferdam_spec::{Limits, Tag};

    use super::*;
    use crate::process::About;
    use crate::stdin::{Kind, Stdin};

    fn process(call: CallId, session: &str) -> Arc<Process> {
        let about = About {
            id: format!("p-0-{call}"),
            call,
            session: SessionId::new(session).unwrap(),
            tag: Tag::default(),
            argv: vec!["true".to_owned()],
            pty: false,
            limits: Limits::default(),
            start_time: std::time::SystemTime::now(),
            start: Instant::now(),
        };
        let stdin = Stdin::new(Kind::Null, bytes::Bytes::new(), true);
        Arc::new(Process::new(
            about,
            stdin,
            crate::flow::Flow::new(false),
            std::path::Path::new("/nonexistent"),
        ))
    }

    fn numbers(records: &Records) -> Vec<CallId> {
        records.page(None, 0, 1000).iter().map(|process| process.about.call).collect()
    }

    #[test]
    fn pages_go_on_where_the_last_one_ended() {
        let mut records = Records::default();
        for call in 1..=5 {
            records.insert(process(call, if call % 2 == 0 { "even" } else { "odd" }), Keep::IfCut);
        }
        let odd = SessionId::new("odd").unwrap();
        let page = |after| -> Vec<CallId> {
            records.page(Some(&odd), after, 2).iter().map(|process| process.about.call).collect()
        };
        assert_eq!((page(0), page(3)), (vec![1, 3], vec![5]));
    }

    #[test]
    fn a_name_of_another_daemon_is_not_found() {
        let mut records = Records::default();
        records.insert(process(1, ""), Keep::IfCut);
        assert!(records.find("p-0-1").is_some());
        assert!(records.find("p-1-1").is_none());
        assert!(records.find("p-0-x").is_none());
    }

    #[test]
    fn retention_ends() {
        let mut records = Records::default();
        let now = Instant::now();
        let second = Duration::from_secs(1);
        for call in 1..=2 {
            let process = process(call, "");
            records.insert(Arc::clone(&process), Keep::For(call as u32 * second));
            records.finish(&process, now);
        }
        assert_eq!(records.next_expiry(), Some(now + second));
        records.forget(now + second);
        assert_eq!((numbers(&records), records.next_expiry()), (vec![2], Some(now + 2 * second)));
    }

    #[test]
    fn an_execute_that_left_nothing_out_is_forgotten_at_once() {
        let mut records = Records::default();
        let process = process(1, "");
        records.insert(Arc::clone(&process), Keep::IfCut);
        records.finish(&process, Instant::now());
        assert_eq!(numbers(&records), Vec::<CallId>::new());
    }
}
