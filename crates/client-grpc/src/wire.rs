//! Plain requests to messages, and messages to plain answers.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use cofferdam_client::{
    Capabilities, Capability, ClientError, ExecuteReply, ExecuteRequest, ExitReport, MessageLimits,
    OutputAccount, OutputStream, Page, ProcessEvent, ProcessInfo, Program, ProtectedPath, Pty,
    SignalTarget, StartRequest, StdinMode, StreamAccount, Workspace,
};
use cofferdam_proto::v1;
use cofferdam_proto::{duration_from_wire, duration_to_wire};
use cofferdam_spec::{Enforcement, Engine, Exit, Level, NetworkMode};

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

fn instant_from_wire(time: Option<prost_types::Timestamp>) -> Result<SystemTime, Unusable> {
    let time = time.ok_or("start_time")?;
    let seconds = u64::try_from(time.seconds).map_err(|_| "start_time")?;
    let nanos = u32::try_from(time.nanos).map_err(|_| "start_time")?;
    Ok(UNIX_EPOCH + Duration::new(seconds, nanos))
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
        start_time: instant_from_wire(wire.start_time)?,
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
        start_time: instant_from_wire(wire.start_time)?,
        daemon_pid: wire.daemon_pid,
        running_processes: wire.running_processes,
        calls_total: wire.calls_total,
        cell_generation: wire.cell_generation,
        warnings: wire.warnings,
    })
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
}
