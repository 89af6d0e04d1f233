//! Requests become plain data here, or a list of everything that is wrong with them.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use bytes::Bytes;
use cofferdam_cell::protocol::{CallId, Stdio, Target};
use cofferdam_proto::v1::expected;
use cofferdam_proto::{call_limits, duration_from_wire, v1};
use cofferdam_spec::{
    Command, IdError, Limits, PATH_BYTES_MAX, PtySize, RequestId, SessionId, Stamp, Tag,
};
use prost::Message;
use tonic_types::FieldViolation;

use crate::config::TERM_DEFAULT;
use crate::decide::{RETENTION_DEFAULT, RETENTION_MAX};
use crate::files::{Caller, Overwrite};
use crate::records::Keep;
use crate::status::{Fault, violation};
use crate::supervisor::{OnDisconnect, StartProcess};

/// Largest ExecuteRequest.
pub(crate) const EXECUTE_REQUEST_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// Largest request of every other kind, and largest response.
pub(crate) const MESSAGE_BYTES_MAX: u64 = 1024 * 1024;

/// The transport's limit lies so much above ours, so that ours answers.
pub(crate) const TRANSPORT_SLACK_BYTES: u64 = 64 * 1024;

/// Entries of a page when the request names no number, and the most that it may name.
const PAGE_DEFAULT: usize = 100;
pub(crate) const PAGE_MAX: u32 = 1000;

/// Where relative paths begin.
const WORKSPACE: &str = "/workspace";

/// What requests are checked against.
#[derive(Debug)]
pub(crate) struct Rules {
    /// The policy's limits.
    pub(crate) limits: Limits,
    /// The policy's environment.
    pub(crate) environment: BTreeMap<String, String>,
}

/// Refuses a request above its limit.
pub(crate) fn within(request: &impl Message, limit: u64) -> Result<(), Fault> {
    let size = request.encoded_len() as u64;
    if size > limit { Err(Fault::TooLarge { size, limit }) } else { Ok(()) }
}

/// Collects what is wrong with a request.
#[derive(Debug, Default)]
pub(crate) struct Checker {
    problems: Vec<FieldViolation>,
}

impl Checker {
    /// Notes a wrong field.
    pub(crate) fn refuse(&mut self, field: impl Into<String>, reason: impl ToString) {
        self.problems.push(violation(field, reason));
    }

    /// Checks the fields of a message in `field`: what is wrong with them is named `field.…`.
    pub(crate) fn inside<T>(&mut self, field: &str, check: impl FnOnce(&mut Self) -> T) -> T {
        let mut inner = Self::default();
        let checked = check(&mut inner);
        self.problems.extend(inner.problems.into_iter().map(|problem| FieldViolation {
            field: format!("{field}.{}", problem.field),
            ..problem
        }));
        checked
    }

    /// The checked value, unless anything was wrong.
    pub(crate) fn finish<T>(self, value: Option<T>) -> Result<T, Fault> {
        match value {
            Some(value) if self.problems.is_empty() => Ok(value),
            _ => Err(Fault::Invalid(self.problems)),
        }
    }

    /// Checks the id that every mutating call carries.
    pub(crate) fn request_id(&mut self, text: &str) {
        self.id("request_id", RequestId::new(text));
    }

    /// Checks a session.
    pub(crate) fn session(&mut self, text: &str) -> Option<SessionId> {
        self.id("session", SessionId::new(text))
    }

    fn id<T>(&mut self, field: &str, result: Result<T, IdError>) -> Option<T> {
        result.map_err(|error| self.refuse(field, error)).ok()
    }

    /// Checks who makes a call that changes something.
    pub(crate) fn caller(&mut self, session: &str, request_id: &str) -> Option<Caller> {
        self.request_id(request_id);
        let session = self.session(session);
        Some(Caller { session: session?, call: request_id.to_owned() })
    }

    /// Checks who makes a call that only reads; a session without a name holds no stamp.
    pub(crate) fn reader(&mut self, session: &str, method: &str) -> Option<Caller> {
        Some(Caller { session: self.session(session)?, call: method.to_owned() })
    }

    /// Checks a session that must have a name.
    pub(crate) fn named_session(&mut self, text: &str) -> Option<SessionId> {
        if text.is_empty() {
            self.refuse("session", "is empty: stamps belong to a session with a name");
            return None;
        }
        self.session(text)
    }

    /// Checks a path; a relative one is taken below the workspace.
    pub(crate) fn path(&mut self, field: &str, text: &str) -> Option<String> {
        if text.is_empty() {
            self.refuse(field, "is empty");
            return None;
        }
        if let Some(index) = text.bytes().position(|byte| byte == 0) {
            self.refuse(field, format!("holds a NUL byte at {index}"));
            return None;
        }
        let path =
            if text.starts_with('/') { text.to_owned() } else { format!("{WORKSPACE}/{text}") };
        if path.len() > PATH_BYTES_MAX {
            let length = path.len();
            let reason = format!("is {length} bytes long, the limit is {PATH_BYTES_MAX}");
            self.refuse(field, reason);
            return None;
        }
        Some(path)
    }

    /// Checks a directory to search; none means the workspace.
    pub(crate) fn directory(&mut self, field: &str, text: &str) -> Option<String> {
        if text.is_empty() { Some(WORKSPACE.to_owned()) } else { self.path(field, text) }
    }

    /// Checks what a change expects; unset means what the session has seen.
    pub(crate) fn expected(&mut self, wire: Option<&v1::Expected>) -> Option<Overwrite> {
        let Some(wire) = wire else { return Some(Overwrite::Seen) };
        match &wire.state {
            // Neither stamp, nor absent, nor any: it says nothing, as if it were not there.
            None => Some(Overwrite::Seen),
            Some(expected::State::Absent(_)) => Some(Overwrite::Absent),
            Some(expected::State::Any(_)) => Some(Overwrite::Any),
            Some(expected::State::Stamp(stamp)) => match Stamp::try_from(stamp) {
                Ok(stamp) => Some(Overwrite::Stamp(stamp)),
                Err(error) => {
                    self.refuse("expected.stamp", error);
                    None
                }
            },
        }
    }

    /// Checks what a change of something that must exist expects.
    pub(crate) fn expected_content(&mut self, wire: Option<&v1::Expected>) -> Option<Overwrite> {
        let expected = self.expected(wire)?;
        if expected == Overwrite::Absent {
            self.refuse("expected", "cannot be absent: there must be something to change");
            return None;
        }
        Some(expected)
    }

    /// Checks permission bits; 0 means `default`.
    pub(crate) fn mode(&mut self, mode: u32, default: u32) -> Option<u32> {
        match mode {
            0 => Some(default),
            1..=0o777 => Some(mode),
            _ => {
                self.refuse("mode", format!("is {mode:#o}, the largest is 0777"));
                None
            }
        }
    }

    /// Checks a number that has a largest value; 0 means `default`.
    pub(crate) fn bounded(
        &mut self,
        field: &str,
        value: u32,
        default: u32,
        max: u32,
    ) -> Option<u32> {
        match value {
            0 => Some(default),
            value if value <= max => Some(value),
            _ => {
                self.refuse(field, format!("is {value}, the largest is {max}"));
                None
            }
        }
    }

    fn limits(&mut self, rules: &Rules, wire: Option<&v1::Limits>) -> Option<Limits> {
        let Some(wire) = wire else { return Some(rules.limits.clone()) };
        let call = match call_limits(wire) {
            Ok(call) => call,
            Err(problems) => {
                for problem in problems {
                    self.refuse(format!("limits.{}", problem.field), problem.source);
                }
                return None;
            }
        };
        let narrowed = rules.limits.narrow(&call);
        narrowed.map_err(|error| self.refuse(format!("limits.{}", error.field()), error)).ok()
    }

    fn command(
        &mut self,
        base: &BTreeMap<String, String>,
        process: Option<v1::ProcessConfig>,
    ) -> Option<Command> {
        let Some(process) = process else {
            self.refuse("process", "is missing");
            return None;
        };
        let v1::ProcessConfig { command, env, cwd } = process;
        let command = Command::new(command, base, sorted(env), cwd);
        command.map_err(|error| self.refuse(format!("process.{}", error.field()), error)).ok()
    }

    fn size(&mut self, prefix: &str, rows: u32, cols: u32) -> Option<PtySize> {
        let mut one = |name, value: u32| match u16::try_from(value) {
            Ok(value) if value > 0 => Some(value),
            _ => {
                self.refuse(
                    format!("{prefix}{name}"),
                    format!("is {value}, allowed are 1 to 65535"),
                );
                None
            }
        };
        let (rows, cols) = (one("rows", rows), one("cols", cols));
        Some(PtySize { rows: rows?, cols: cols? })
    }
}

/// A map in the order of its keys, so that the same request always gives the same answer.
fn sorted(map: HashMap<String, String>) -> BTreeMap<String, String> {
    map.into_iter().collect()
}

/// Checks Execute.
pub(crate) fn execute(rules: &Rules, request: v1::ExecuteRequest) -> Result<StartProcess, Fault> {
    within(&request, EXECUTE_REQUEST_BYTES_MAX)?;
    let mut checker = Checker::default();
    checker.request_id(&request.request_id);
    let session = checker.session(&request.session);
    let wall_bounds_tree = wall_is_set(request.limits.as_ref());
    let limits = checker.limits(rules, request.limits.as_ref());
    let program = checker.command(&rules.environment, request.process);
    let start = || {
        Some(StartProcess {
            program: program?,
            session: session?,
            tag: Tag::default(),
            limits: limits?,
            wall_bounds_tree,
            stdio: Stdio::Pipes { stdin: !request.stdin.is_empty() },
            input: request.stdin,
            input_is_whole: true,
            workspace_read_only: request.policy.is_some_and(|policy| policy.workspace_read_only),
            keep: Keep::IfCut,
            on_disconnect: OnDisconnect::Kill,
            wait_for_reader: false,
        })
    };
    checker.finish(start())
}

/// Checks Start.
pub(crate) fn start(rules: &Rules, request: v1::StartRequest) -> Result<StartProcess, Fault> {
    within(&request, MESSAGE_BYTES_MAX)?;
    let mut checker = Checker::default();
    checker.request_id(&request.request_id);
    let session = checker.session(&request.session);
    let tag = checker.id("tag", Tag::new(&request.tag));
    let wall_bounds_tree = wall_is_set(request.limits.as_ref());
    let limits = checker.limits(rules, request.limits.as_ref());
    let mode = stdin_mode(&mut checker, request.stdin_mode);
    let keep = retention(&mut checker, request.retention.as_ref());
    let (program, stdio) = match &request.pty {
        None => {
            let pipe = mode == v1::StdinMode::Pipe || !request.stdin.is_empty();
            let program = checker.command(&rules.environment, request.process);
            (program, Some(Stdio::Pipes { stdin: pipe }))
        }
        Some(pty) => {
            if !request.stdin.is_empty() {
                checker.refuse("stdin", "cannot be given with pty: write it with WriteStdin");
            }
            if mode == v1::StdinMode::Closed {
                checker.refuse("stdin_mode", "cannot be CLOSED with pty: a terminal stays open");
            }
            let mut environment = rules.environment.clone();
            environment.insert("TERM".to_owned(), term(&mut checker, &pty.term));
            let program = checker.command(&environment, request.process);
            (program, checker.size("pty.", pty.rows, pty.cols).map(Stdio::Pty))
        }
    };
    let on_disconnect =
        if request.kill_on_disconnect { OnDisconnect::Kill } else { OnDisconnect::GoOn };
    let start = || {
        Some(StartProcess {
            program: program?,
            session: session?,
            tag: tag?,
            limits: limits?,
            wall_bounds_tree,
            stdio: stdio?,
            input: request.stdin,
            input_is_whole: mode != v1::StdinMode::Pipe && request.pty.is_none(),
            workspace_read_only: request.policy.is_some_and(|policy| policy.workspace_read_only),
            keep: keep?,
            on_disconnect,
            wait_for_reader: request.wait_for_reader,
        })
    };
    checker.finish(start())
}

fn wall_is_set(limits: Option<&v1::Limits>) -> bool {
    limits.is_some_and(|limits| limits.wall.is_some())
}

fn stdin_mode(checker: &mut Checker, value: i32) -> v1::StdinMode {
    v1::StdinMode::try_from(value).unwrap_or_else(|_| {
        checker.refuse("stdin_mode", format!("{value} is not known"));
        v1::StdinMode::Unspecified
    })
}

fn term(checker: &mut Checker, text: &str) -> String {
    if text.is_empty() {
        return TERM_DEFAULT.to_owned();
    }
    checker.id("pty.term", Tag::new(text)).map_or_else(String::new, |term| term.as_str().to_owned())
}

fn retention(checker: &mut Checker, wire: Option<&prost_types::Duration>) -> Option<Keep> {
    let Some(wire) = wire else { return Some(Keep::For(RETENTION_DEFAULT)) };
    match duration_from_wire(wire) {
        Ok(time) if time <= RETENTION_MAX => Some(Keep::For(time)),
        Ok(time) => {
            checker.refuse("retention", format!("is {} s, the largest is 1 day", time.as_secs()));
            None
        }
        Err(error) => {
            checker.refuse("retention", error);
            None
        }
    }
}

/// Checks SendSignal: the number and whom it reaches.
pub(crate) fn signal(request: &v1::SendSignalRequest) -> Result<(i32, Target), Fault> {
    let mut checker = Checker::default();
    checker.request_id(&request.request_id);
    if !(1..=64).contains(&request.signal) {
        checker.refuse("signal", format!("is {}, allowed are 1 to 64", request.signal));
    }
    let target = match v1::SignalTarget::try_from(request.target) {
        Ok(v1::SignalTarget::Unspecified | v1::SignalTarget::Leader) => Some(Target::Leader),
        Ok(v1::SignalTarget::Group) => Some(Target::Group),
        Ok(v1::SignalTarget::Tree) => Some(Target::Tree),
        Err(_) => {
            checker.refuse("target", format!("{} is not known", request.target));
            None
        }
    };
    checker.finish(target.map(|target| (request.signal, target)))
}

/// Checks ResizePty.
pub(crate) fn resize(request: &v1::ResizePtyRequest) -> Result<PtySize, Fault> {
    let mut checker = Checker::default();
    checker.request_id(&request.request_id);
    let size = checker.size("", request.rows, request.cols);
    checker.finish(size)
}

/// Checks WriteStdin: the bytes and where they belong.
pub(crate) fn write(request: v1::WriteStdinRequest) -> Result<(Bytes, Option<u64>), Fault> {
    within(&request, MESSAGE_BYTES_MAX)?;
    let mut checker = Checker::default();
    checker.request_id(&request.request_id);
    checker.finish(Some((request.data, request.offset)))
}

/// Which page of processes is wanted.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Page {
    pub(crate) session: Option<SessionId>,
    pub(crate) after: CallId,
    pub(crate) count: usize,
}

/// Checks List.
pub(crate) fn page(request: &v1::ListRequest) -> Result<Page, Fault> {
    let mut checker = Checker::default();
    let session = checker.session(&request.session);
    let count = match request.page_size {
        0 => PAGE_DEFAULT,
        size @ 1..=PAGE_MAX => size as usize,
        size => {
            checker.refuse("page_size", format!("is {size}, the largest is {PAGE_MAX}"));
            0
        }
    };
    let after = match request.page_token.as_str() {
        "" => Some(0),
        token => {
            token.strip_prefix(PAGE_TOKEN_PREFIX).and_then(|n| CallId::from_str_radix(n, 16).ok())
        }
    };
    if after.is_none() {
        checker.refuse("page_token", "is none that this service gave");
    }
    let session = session.map(|session| (!request.session.is_empty()).then_some(session));
    let page = || Some(Page { session: session?, after: after?, count });
    checker.finish(page())
}

/// Tells a token of ours from other text.
const PAGE_TOKEN_PREFIX: &str = "after-";

/// The token of the page after this process.
pub(crate) fn page_token(last: CallId) -> String {
    format!("{PAGE_TOKEN_PREFIX}{last:x}")
}

/// Checks the time of Wait.
pub(crate) fn timeout(wire: Option<&prost_types::Duration>) -> Result<Option<Duration>, Fault> {
    let mut checker = Checker::default();
    let time = wire.map(duration_from_wire).transpose();
    let time = time.map_err(|error| checker.refuse("timeout", error)).ok();
    checker.finish(time)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> Rules {
        Rules { limits: Limits::default(), environment: BTreeMap::new() }
    }

    fn fields(fault: Fault) -> Vec<String> {
        match fault {
            Fault::Invalid(problems) => problems.into_iter().map(|one| one.field).collect(),
            other => panic!("{other:?}"),
        }
    }

    fn config(command: &[&str]) -> Option<v1::ProcessConfig> {
        let command = command.iter().map(|text| (*text).to_owned()).collect();
        Some(v1::ProcessConfig { command, ..v1::ProcessConfig::default() })
    }

    #[test]
    fn everything_wrong_is_reported_at_once() {
        let negative = prost_types::Duration { seconds: -1, nanos: 0 };
        let request = v1::StartRequest {
            process: config(&["a\0b"]),
            limits: Some(v1::Limits { wall: Some(negative), ..v1::Limits::default() }),
            session: "\n".to_owned(),
            tag: "x".repeat(129),
            pty: Some(v1::Pty { rows: 0, cols: 70_000, term: "a\0".to_owned() }),
            stdin: Bytes::from_static(b"x"),
            stdin_mode: 9,
            retention: Some(prost_types::Duration { seconds: 86_401, nanos: 0 }),
            ..v1::StartRequest::default()
        };
        let expected = [
            "request_id",
            "session",
            "tag",
            "limits.wall",
            "stdin_mode",
            "retention",
            "stdin",
            "pty.term",
            "process.command[0]",
            "pty.rows",
            "pty.cols",
        ];
        assert_eq!(fields(start(&rules(), request).unwrap_err()), expected);
    }

    #[test]
    fn an_empty_execute_names_what_is_missing() {
        let fault = execute(&rules(), v1::ExecuteRequest::default()).unwrap_err();
        assert_eq!(fields(fault), ["request_id", "process"]);
    }

    #[test]
    fn an_explicit_wall_limit_bounds_the_tree() {
        let wall = Some(prost_types::Duration { seconds: 2, nanos: 0 });
        let mut request = v1::ExecuteRequest {
            process: config(&["true"]),
            request_id: "r".to_owned(),
            ..v1::ExecuteRequest::default()
        };
        assert!(!execute(&rules(), request.clone()).unwrap().wall_bounds_tree);
        request.limits = Some(v1::Limits { wall, ..v1::Limits::default() });
        let start = execute(&rules(), request).unwrap();
        assert!(start.wall_bounds_tree);
        assert_eq!(start.limits.wall, Some(Duration::from_secs(2)));
    }

    #[test]
    fn a_request_above_its_limit_is_refused_with_both_numbers() {
        let request = v1::WriteStdinRequest {
            data: Bytes::from(vec![0; MESSAGE_BYTES_MAX as usize]),
            ..v1::WriteStdinRequest::default()
        };
        match write(request) {
            Err(Fault::TooLarge { size, limit: MESSAGE_BYTES_MAX }) => {
                assert!(size > MESSAGE_BYTES_MAX);
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn signals_have_bounds() {
        for number in [0, 65, -1] {
            let request = v1::SendSignalRequest {
                signal: number,
                target: 7,
                request_id: "r".to_owned(),
                ..v1::SendSignalRequest::default()
            };
            assert_eq!(fields(signal(&request).unwrap_err()), ["signal", "target"]);
        }
    }

    #[test]
    fn page_tokens_come_back() {
        let request = |page_token| v1::ListRequest { page_token, ..v1::ListRequest::default() };
        let expected = Page { session: None, after: 77, count: PAGE_DEFAULT };
        assert_eq!(page(&request(page_token(77))).unwrap(), expected);
        assert_eq!(fields(page(&request("77".to_owned())).unwrap_err()), ["page_token"]);
    }
}
