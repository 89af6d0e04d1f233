//! Plain requests to messages, and messages to plain answers.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use cofferdam_client::{
    Capabilities, Capability, ClientError, ExecuteReply, ExecuteRequest, ExitReport, MessageLimits,
    OutputAccount, OutputStream, Page, ProcessEvent, ProcessInfo, Program, ProtectedPath, Pty,
    SignalTarget, StampChange, StampEvent, StampRecord, StampState, StartRequest, StdinMode,
    StreamAccount, Tool, ToolReply, Workspace,
};
use cofferdam_proto::v1;
use cofferdam_proto::{duration_from_wire, duration_to_wire};
use cofferdam_spec::{Enforcement, Engine, Exit, Level, LineRange, NetworkMode, Stamp};

/// Names the field of an answer that cannot be used.
pub(crate) type Unusable = &'static str;

/// The client's error for an answer that cannot be used.
pub(crate) fn malformed(operation: &'static str) -> impl Fn(Unusable) -> ClientError {
    move |field| ClientError::Malformed { operation, field }
}

fn program_to_wire(program: Program) -> v1::ProcessConfig {
    let env = program.env.into_iter().collect();
    v1::ProcessConfig { command: program.command, env, cwd: program.cwd }
}

fn policy_to_wire(workspace_read_only: bool) -> v1::CallPolicy {
    v1::CallPolicy { workspace_read_only }
}

pub(crate) fn execute_to_wire(request: ExecuteRequest) -> v1::ExecuteRequest {
    v1::ExecuteRequest {
        process: Some(program_to_wire(request.program)),
        stdin: request.stdin,
        limits: Some((&request.limits).into()),
        policy: Some(policy_to_wire(request.workspace_read_only)),
        session: request.session,
        request_id: request.request_id,
    }
}

pub(crate) fn start_to_wire(request: StartRequest) -> v1::StartRequest {
    let stdin_mode = match request.stdin_mode {
        StdinMode::Closed => v1::StdinMode::Closed,
        StdinMode::Pipe => v1::StdinMode::Pipe,
    };
    v1::StartRequest {
        process: Some(program_to_wire(request.program)),
        stdin: request.stdin,
        limits: Some((&request.limits).into()),
        policy: Some(policy_to_wire(request.workspace_read_only)),
        session: request.session,
        request_id: request.request_id,
        pty: request.pty.map(|Pty { size, term }| v1::Pty {
            rows: size.rows.into(),
            cols: size.cols.into(),
            term,
        }),
        stdin_mode: stdin_mode.into(),
        retention: request.retention.map(duration_to_wire),
        tag: request.tag,
        kill_on_disconnect: request.kill_on_disconnect,
        wait_for_reader: request.wait_for_reader,
    }
}

pub(crate) fn target_to_wire(target: SignalTarget) -> v1::SignalTarget {
    match target {
        SignalTarget::Leader => v1::SignalTarget::Leader,
        SignalTarget::Group => v1::SignalTarget::Group,
        SignalTarget::Tree => v1::SignalTarget::Tree,
    }
}

fn exit_from_wire(exit: Option<v1::Exit>) -> Result<Exit, Unusable> {
    exit.ok_or("exit")?.try_into().map_err(|_| "exit")
}

fn time_from_wire(time: Option<prost_types::Duration>) -> Result<Duration, Unusable> {
    duration_from_wire(&time.unwrap_or_default()).map_err(|_| "duration")
}

fn instant_from_wire(
    time: Option<prost_types::Timestamp>,
    field: Unusable,
) -> Result<SystemTime, Unusable> {
    let time = time.ok_or(field)?;
    let seconds = u64::try_from(time.seconds).map_err(|_| field)?;
    let nanos = u32::try_from(time.nanos).map_err(|_| field)?;
    if nanos > 999_999_999 {
        return Err(field);
    }
    UNIX_EPOCH.checked_add(Duration::new(seconds, nanos)).ok_or(field)
}

/// What is enforced must be understood wholly: a word that is not known here could mean less.
fn enforcement_from_wire(wire: Option<v1::Enforcement>) -> Result<Enforcement, Unusable> {
    let wire = wire.ok_or("enforcement")?;
    let known = |word: &str, known: &'static str, field: Unusable| {
        if word == known { Ok(()) } else { Err(field) }
    };
    known(&wire.engine, Engine::Native.as_str(), "enforcement.engine")?;
    known(&wire.level, Level::Namespaces.as_str(), "enforcement.level")?;
    known(&wire.network, NetworkMode::None.as_str(), "enforcement.network")?;
    Ok(Enforcement {
        engine: Engine::Native,
        level: Level::Namespaces,
        landlock_abi: wire.landlock_abi,
        rights_not_handled: wire.rights_not_handled,
        network: NetworkMode::None,
        policy_digest: digest(&wire.policy_digest, "enforcement.policy_digest")?,
        seccomp_digest: digest(&wire.seccomp_digest, "enforcement.seccomp_digest")?,
        not_enforced: wire.not_enforced,
    })
}

fn digest(bytes: &[u8], field: Unusable) -> Result<[u8; 32], Unusable> {
    bytes.try_into().map_err(|_| field)
}

fn account_from_wire(wire: Option<v1::OutputAccount>) -> OutputAccount {
    let wire = wire.unwrap_or_default();
    let stream = |wire: Option<v1::StreamAccount>| {
        let wire = wire.unwrap_or_default();
        StreamAccount {
            total_bytes: wire.total_bytes,
            kept_bytes: wire.kept_bytes,
            dropped_bytes: wire.dropped_bytes,
            head_bytes: wire.head_bytes,
            tail_bytes: wire.tail_bytes,
            readable_bytes: wire.readable_bytes,
        }
    };
    OutputAccount {
        stdout: stream(wire.stdout),
        stderr: stream(wire.stderr),
        process_id: wire.process_id,
        background_processes: wire.background_processes,
        detached: wire.detached,
    }
}

fn protected_from_wire(wire: Vec<v1::ProtectedPath>) -> Vec<ProtectedPath> {
    wire.into_iter()
        .map(|v1::ProtectedPath { path, action }| ProtectedPath { path, action })
        .collect()
}

pub(crate) fn execute_from_wire(wire: v1::ExecuteResponse) -> Result<ExecuteReply, Unusable> {
    Ok(ExecuteReply {
        stdout: wire.stdout,
        stderr: wire.stderr,
        replayed: wire.replayed,
        report: ExitReport {
            exit: exit_from_wire(wire.exit)?,
            output: account_from_wire(wire.output),
            protected_paths: protected_from_wire(wire.protected_paths),
            duration: time_from_wire(wire.duration)?,
            enforcement: enforcement_from_wire(wire.enforcement)?,
            audit_sequence: wire.audit_sequence,
            audit_hash: wire.audit_hash,
        },
    })
}

pub(crate) fn event_from_wire(wire: v1::ProcessEvent) -> Result<ProcessEvent, Unusable> {
    use v1::process_event::Event;
    let output = |stream, data| ProcessEvent::Output { stream, offset: wire.offset, data };
    Ok(match wire.event.ok_or("event")? {
        Event::Started(started) => ProcessEvent::Started {
            process_id: started.process_id,
            pid: started.pid,
            replayed: started.replayed,
        },
        Event::Stdout(data) => output(OutputStream::Stdout, data),
        Event::Stderr(data) => output(OutputStream::Stderr, data),
        Event::Pty(data) => output(OutputStream::Pty, data),
        Event::Lag(lag) => ProcessEvent::Lag {
            stream: match v1::OutputStream::try_from(lag.stream) {
                Ok(v1::OutputStream::Stdout) => OutputStream::Stdout,
                Ok(v1::OutputStream::Stderr) => OutputStream::Stderr,
                Ok(v1::OutputStream::Pty) => OutputStream::Pty,
                _ => return Err("lag.stream"),
            },
            skipped_from: lag.skipped_from,
            skipped_to: lag.skipped_to,
        },
        Event::Keepalive(v1::Keepalive {}) => ProcessEvent::Keepalive,
        Event::Exit(exit) => ProcessEvent::Exit(Box::new(ExitReport {
            exit: exit_from_wire(Some(exit))?,
            output: account_from_wire(wire.output),
            protected_paths: protected_from_wire(wire.protected_paths),
            duration: time_from_wire(wire.duration)?,
            enforcement: enforcement_from_wire(wire.enforcement)?,
            audit_sequence: wire.audit_sequence,
            audit_hash: wire.audit_hash,
        })),
    })
}

pub(crate) fn process_from_wire(wire: Option<v1::ProcessInfo>) -> Result<ProcessInfo, Unusable> {
    let wire = wire.ok_or("process")?;
    let exit = match v1::ProcessState::try_from(wire.state) {
        Ok(v1::ProcessState::Running) => None,
        Ok(v1::ProcessState::Exited) => Some(exit_from_wire(wire.exit)?),
        _ => return Err("process.state"),
    };
    Ok(ProcessInfo {
        process_id: wire.process_id,
        pid: wire.pid,
        session: wire.session,
        tag: wire.tag,
        command: wire.command,
        start_time: instant_from_wire(wire.start_time, "start_time")?,
        exit,
        output: account_from_wire(wire.output),
        pty: wire.pty,
    })
}

pub(crate) fn list_from_wire(wire: v1::ListResponse) -> Result<Page<ProcessInfo>, Unusable> {
    let items: Result<_, _> =
        wire.processes.into_iter().map(|process| process_from_wire(Some(process))).collect();
    Ok(Page { items: items?, next_page_token: wire.next_page_token })
}

pub(crate) fn capabilities_from_wire(
    wire: v1::GetCapabilitiesResponse,
) -> Result<Capabilities, Unusable> {
    let limits = wire.message_limits.unwrap_or_default();
    Ok(Capabilities {
        enforcement: enforcement_from_wire(wire.enforcement)?,
        version: wire.version,
        protocol_generation: wire.protocol_generation,
        message_limits: MessageLimits {
            execute_request_bytes: limits.execute_request_bytes,
            request_bytes: limits.request_bytes,
            response_bytes: limits.response_bytes,
            concurrent_calls: limits.concurrent_calls,
            retained_output_bytes: limits.retained_output_bytes,
        },
        capabilities: wire
            .capabilities
            .into_iter()
            .map(|v1::Capability { name, available, detail, fix }| Capability {
                name,
                available,
                detail,
                fix,
            })
            .collect(),
    })
}

pub(crate) fn workspace_from_wire(wire: v1::GetWorkspaceResponse) -> Result<Workspace, Unusable> {
    Ok(Workspace {
        host_directory: wire.host_directory,
        cell_directory: wire.cell_directory,
        image: wire.image,
        uid: wire.uid,
        gid: wire.gid,
        start_time: instant_from_wire(wire.start_time, "start_time")?,
        daemon_pid: wire.daemon_pid,
        running_processes: wire.running_processes,
        calls_total: wire.calls_total,
        cell_generation: wire.cell_generation,
        warnings: wire.warnings,
    })
}

pub(crate) fn tools_from_wire(wire: v1::ListToolsResponse) -> Vec<Tool> {
    wire.tools
        .into_iter()
        .map(|v1::Tool { name, description, input_schema_json, read_only }| Tool {
            name,
            description,
            input_schema_json,
            read_only,
        })
        .collect()
}

pub(crate) fn tool_reply_from_wire(wire: v1::CallToolResponse) -> Result<ToolReply, Unusable> {
    Ok(ToolReply {
        output_json: wire.output_json,
        is_error: wire.is_error,
        replayed: wire.replayed,
        enforcement: enforcement_from_wire(wire.enforcement)?,
        audit_sequence: wire.audit_sequence,
        audit_hash: wire.audit_hash,
    })
}

fn stamp_from_wire(wire: &v1::Stamp) -> Result<Stamp, Unusable> {
    Stamp::try_from(wire).map_err(|_| "stamp")
}

fn stamp_record_from_wire(wire: v1::StampRecord) -> Result<StampRecord, Unusable> {
    let state = match v1::StampState::try_from(wire.state) {
        Ok(v1::StampState::Fresh) => StampState::Fresh,
        Ok(v1::StampState::Stale) => StampState::Stale,
        Ok(v1::StampState::Gone) => StampState::Gone,
        _ => return Err("stamps.state"),
    };
    let shown = wire.shown.into_iter();
    Ok(StampRecord {
        session: wire.session,
        path: wire.path,
        stamp: stamp_from_wire(wire.stamp.as_ref().ok_or("stamp")?)?,
        call: wire.call,
        time: instant_from_wire(wire.time, "stamps.time")?,
        state,
        shown: shown.map(|v1::LineRange { first, last }| LineRange { first, last }).collect(),
        complete: wire.complete,
    })
}

pub(crate) fn stamps_from_wire(
    stamps: Vec<v1::StampRecord>,
    next_page_token: String,
) -> Result<Page<StampRecord>, Unusable> {
    let items: Result<_, _> = stamps.into_iter().map(stamp_record_from_wire).collect();
    Ok(Page { items: items?, next_page_token })
}

fn stamp_event_from_wire(wire: v1::StampEvent) -> Result<StampEvent, Unusable> {
    let change = match v1::StampChange::try_from(wire.change) {
        Ok(v1::StampChange::Read) => StampChange::Read,
        Ok(v1::StampChange::Written) => StampChange::Written,
        Ok(v1::StampChange::Moved) => StampChange::Moved,
        Ok(v1::StampChange::Removed) => StampChange::Removed,
        Ok(v1::StampChange::Cleared) => StampChange::Cleared,
        Ok(v1::StampChange::RefusedStale) => StampChange::RefusedStale,
        _ => return Err("events.change"),
    };
    Ok(StampEvent {
        session: wire.session,
        change,
        stamp: wire.stamp.as_ref().map(stamp_from_wire).transpose()?,
        call: wire.call,
        time: instant_from_wire(wire.time, "events.time")?,
    })
}

pub(crate) fn history_from_wire(
    wire: v1::GetStampHistoryResponse,
) -> Result<Page<StampEvent>, Unusable> {
    let items: Result<_, _> = wire.events.into_iter().map(stamp_event_from_wire).collect();
    Ok(Page { items: items?, next_page_token: wire.next_page_token })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enforcement() -> Enforcement {
        Enforcement {
            engine: Engine::Native,
            level: Level::Namespaces,
            landlock_abi: 7,
            rights_not_handled: vec!["resolve_unix".into()],
            network: NetworkMode::None,
            policy_digest: [1; 32],
            seccomp_digest: [2; 32],
            not_enforced: vec!["memory".into()],
        }
    }

    #[test]
    fn enforcement_survives_the_wire() {
        let wire = v1::Enforcement::from(&enforcement());
        assert_eq!(enforcement_from_wire(Some(wire)), Ok(enforcement()));
    }

    #[test]
    fn enforcement_in_unknown_words_is_not_taken_for_the_known_one() {
        let wire = v1::Enforcement { level: "landlock".into(), ..(&enforcement()).into() };
        assert_eq!(enforcement_from_wire(Some(wire)), Err("enforcement.level"));
        assert_eq!(enforcement_from_wire(None), Err("enforcement"));
    }

    #[test]
    fn an_exit_event_without_its_reason_is_refused() {
        let exit = v1::process_event::Event::Exit(v1::Exit { reason: None });
        let wire = v1::ProcessEvent { event: Some(exit), ..Default::default() };
        assert_eq!(event_from_wire(wire), Err("exit"));
        assert_eq!(event_from_wire(v1::ProcessEvent::default()), Err("event"));
    }

    fn stamp_record() -> v1::StampRecord {
        v1::StampRecord {
            session: "s".into(),
            path: "/workspace/f".into(),
            stamp: Some(v1::Stamp::from(&Stamp { digest: [7; 32], size: 5 })),
            call: "r".into(),
            time: Some(prost_types::Timestamp { seconds: 1, nanos: 2 }),
            state: v1::StampState::Stale.into(),
            shown: vec![v1::LineRange { first: 1, last: 3 }],
            complete: false,
        }
    }

    #[test]
    fn a_stamp_is_understood_wholly() {
        let page = stamps_from_wire(vec![stamp_record()], "next".into()).unwrap();
        assert_eq!(
            page,
            Page {
                items: vec![StampRecord {
                    session: "s".into(),
                    path: "/workspace/f".into(),
                    stamp: Stamp { digest: [7; 32], size: 5 },
                    call: "r".into(),
                    time: UNIX_EPOCH + Duration::new(1, 2),
                    state: StampState::Stale,
                    shown: vec![LineRange { first: 1, last: 3 }],
                    complete: false,
                }],
                next_page_token: "next".into(),
            }
        );
    }

    #[test]
    fn a_stamp_that_says_less_than_it_must_is_refused() {
        let refused = |record| stamps_from_wire(vec![record], String::new()).unwrap_err();
        assert_eq!(refused(v1::StampRecord { stamp: None, ..stamp_record() }), "stamp");
        assert_eq!(refused(v1::StampRecord { state: 0, ..stamp_record() }), "stamps.state");
        assert_eq!(refused(v1::StampRecord { time: None, ..stamp_record() }), "stamps.time");
        let late = Some(prost_types::Timestamp { seconds: i64::MAX, nanos: 1_000_000_000 });
        assert_eq!(refused(v1::StampRecord { time: late, ..stamp_record() }), "stamps.time");
    }

    #[test]
    fn a_history_entry_may_have_no_stamp_but_has_a_kind() {
        let time = Some(prost_types::Timestamp { seconds: 1, nanos: 0 });
        let change = v1::StampChange::Cleared.into();
        let event = v1::StampEvent { change, time, ..v1::StampEvent::default() };
        let history = |event| {
            let events = vec![event];
            history_from_wire(v1::GetStampHistoryResponse {
                events,
                next_page_token: String::new(),
            })
        };
        let page = history(event.clone()).unwrap();
        assert_eq!((page.items[0].change, page.items[0].stamp), (StampChange::Cleared, None));
        assert_eq!(history(v1::StampEvent { change: 0, ..event }).unwrap_err(), "events.change");
    }
}
