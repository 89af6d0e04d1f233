//! Requests and what comes back.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cofferdam_proto::v1;
use cofferdam_proto::v1::exit::Reason;
use tonic::Status;
use tonic_types::StatusExt;

/// A request id that no other call has.
pub fn unique() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// The wire's duration.
pub fn duration(time: Duration) -> prost_types::Duration {
    prost_types::Duration { seconds: time.as_secs() as i64, nanos: time.subsec_nanos() as i32 }
}

/// An Execute of `argv`.
pub fn program<T: Into<String>>(argv: impl IntoIterator<Item = T>) -> v1::ExecuteRequest {
    v1::ExecuteRequest {
        process: Some(v1::ProcessConfig {
            command: argv.into_iter().map(Into::into).collect(),
            ..v1::ProcessConfig::default()
        }),
        session: "test".to_owned(),
        request_id: unique(),
        ..v1::ExecuteRequest::default()
    }
}

/// An Execute of a shell command, as the tool `bash` runs it.
pub fn bash(command: &str) -> v1::ExecuteRequest {
    program(["/bin/bash", "--noprofile", "--norc", "-c", command])
}

/// Limits with a wall time.
pub fn limits(wall_seconds: f64) -> v1::Limits {
    v1::Limits {
        wall: Some(duration(Duration::from_secs_f64(wall_seconds))),
        ..v1::Limits::default()
    }
}

/// An answer, with the time it took as the client saw it.
#[derive(Debug)]
pub struct Run {
    /// The answer.
    pub response: v1::ExecuteResponse,
    /// From call to answer.
    pub took: Duration,
}

impl Run {
    /// Standard output; what is not UTF-8 is replaced.
    pub fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.response.stdout).into_owned()
    }

    /// Standard error; what is not UTF-8 is replaced.
    pub fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.response.stderr).into_owned()
    }

    /// Why the process ended.
    pub fn reason(&self) -> &Reason {
        let exit = self.response.exit.as_ref().expect("an answer has an exit");
        exit.reason.as_ref().expect("an exit has a reason")
    }

    /// The exit code of a process that ended by itself.
    pub fn code(&self) -> Option<i32> {
        match self.reason() {
            Reason::Exited(exited) => Some(exited.code),
            _ => None,
        }
    }

    /// The status a shell would show.
    pub fn shell_status(&self) -> i32 {
        match self.reason() {
            Reason::Exited(exited) => exited.code,
            Reason::Signaled(signaled) => 128 + signaled.number,
            other => panic!("neither an exit code nor a signal: {other:?}"),
        }
    }

    /// The account of both streams.
    pub fn account(&self) -> &v1::OutputAccount {
        self.response.output.as_ref().expect("an answer accounts for its output")
    }

    /// Asserts an exit code, and shows everything when it is another.
    #[track_caller]
    pub fn expect_code(&self, code: i32) -> &Self {
        assert_eq!(self.code(), Some(code), "{}", self.describe());
        self
    }

    /// Asserts exit code and standard output.
    #[track_caller]
    pub fn expect(&self, code: i32, stdout: &str) -> &Self {
        assert_eq!(
            (self.code(), self.stdout().as_str()),
            (Some(code), stdout),
            "{}",
            self.describe()
        );
        self
    }

    /// Asserts an upper limit of the time; see [`crate::within`].
    #[track_caller]
    pub fn expect_within(&self, seconds: f64) -> &Self {
        let limit = crate::within(seconds);
        assert!(self.took < limit, "took {:?}, limit {limit:?}: {}", self.took, self.describe());
        self
    }

    fn describe(&self) -> String {
        let cut = |text: String| text.chars().take(2000).collect::<String>();
        format!(
            "{:?} after {:?}\nstdout: {}\nstderr: {}",
            self.reason(),
            self.took,
            cut(self.stdout()),
            cut(self.stderr())
        )
    }
}

/// Reason, domain and metadata of an error's ErrorInfo.
#[track_caller]
pub fn error_info(status: &Status) -> (String, String) {
    let info = status.get_details_error_info();
    let info = info.unwrap_or_else(|| panic!("an error of ours has an ErrorInfo: {status:?}"));
    (info.reason, info.domain)
}

/// Fields that an error's BadRequest names, each with its reason.
#[track_caller]
pub fn field_violations(status: &Status) -> Vec<(String, String)> {
    status
        .get_details_bad_request()
        .unwrap_or_else(|| panic!("the error has a BadRequest: {status:?}"))
        .field_violations
        .into_iter()
        .map(|violation| (violation.field, violation.description))
        .collect()
}
