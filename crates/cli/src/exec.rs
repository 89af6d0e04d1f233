//! `cofferdam exec`: a program in the cell, as if it ran here.
//!
//! Standard streams, exit status, signals and the terminal's size pass through. The call is bound
//! to this process: when it goes away, the daemon kills the program's whole tree.

mod follow;
mod input;
mod json;
mod output;
mod terminal;

use std::process::ExitCode;

use cofferdam_client::{
    Client as _, ClientError, ExitReport, Program, Pty, StartRequest, StdinMode,
};
use cofferdam_spec::CallLimits;

use crate::args::ExecArgs;
use crate::connect::{ConnectError, Target, request_id};
use crate::{Failure, text};
use follow::{End, follow};
pub(crate) use json::enforcement_json;
use terminal::RawMode;

/// Exit status of a failure of ours, as `env(1)` and `timeout(1)` have it.
const FAILURE_STATUS: u8 = 125;

/// Runs a program in a workspace's cell.
pub(crate) fn exec(args: ExecArgs) -> Result<ExitCode, Failure> {
    let status = run(args).map_err(|error| {
        let hint = error.downcast_ref::<ConnectError>().and_then(ConnectError::hint);
        let error = error.context("exec");
        Failure { error, hint: hint.map(str::to_owned), status: FAILURE_STATUS }
    })?;
    Ok(ExitCode::from(status))
}

fn run(args: ExecArgs) -> anyhow::Result<u8> {
    let target = Target::choose(&args.target)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let status = if args.json {
        runtime.block_on(json::execute(&target, &args))
    } else {
        runtime.block_on(attached(&target, &args))
    };
    // A thread may still wait for standard input; nobody waits for it.
    runtime.shutdown_background();
    status
}

fn program(args: &ExecArgs) -> Program {
    Program {
        command: args.argv.clone(),
        env: args.env.iter().cloned().collect(),
        cwd: args.cwd.clone(),
    }
}

fn limits(args: &ExecArgs) -> CallLimits {
    CallLimits { wall: args.timeout, idle: args.idle_timeout, ..CallLimits::default() }
}

async fn attached(target: &Target, args: &ExecArgs) -> anyhow::Result<u8> {
    let on_terminal = terminal::both_are_terminals();
    let pty = !args.no_pty && (args.pty || on_terminal);
    let stdin = input::source(pty)?;
    let request = StartRequest {
        program: program(args),
        stdin_mode: if stdin { StdinMode::Pipe } else { StdinMode::Closed },
        limits: limits(args),
        workspace_read_only: args.read_only,
        session: args.session.clone(),
        request_id: request_id(),
        pty: pty.then(|| Pty { size: terminal::size(), term: terminal::name() }),
        kill_on_disconnect: true,
        wait_for_reader: true,
        ..StartRequest::default()
    };
    let signals = follow::Signals::new()?;
    let (client, events) = target
        .call(|client| {
            let request = request.clone();
            async move { client.start(request).await }
        })
        .await?;
    let raw = if pty && on_terminal { Some(RawMode::enter()?) } else { None };
    let chunks = stdin.then(input::read_chunks).transpose()?;
    let end = follow(&client, events, signals, chunks, output::Writer::spawn()?).await;
    // The terminal is as it was before anything is said.
    drop(raw);
    status(end?, args)
}

/// What this process exits with, after saying what the status alone does not.
fn status(end: End, args: &ExecArgs) -> anyhow::Result<u8> {
    let say = |text: String| text::complain(&format!("exec: {text}"));
    match end {
        End::Exited { report, lost_bytes } => {
            report_end(&report, args);
            if lost_bytes == 0 {
                return Ok(report.exit.shell_status());
            }
            say(format!(
                "{lost_bytes} bytes of output were lost: the reader was too slow, or the daemon had no room to keep them"
            ));
            Ok(match report.exit.shell_status() {
                0 => FAILURE_STATUS,
                status => status,
            })
        }
        End::ReaderGone => Ok(128 + SIGPIPE),
        End::Interrupted { signal } => Ok(128 + signal),
    }
}

/// A writer whose reader has gone away ends as by this signal.
const SIGPIPE: u8 = 13;

fn report_end(report: &ExitReport, args: &ExecArgs) {
    if let Some(text) = text::exit(&report.exit, &args.argv[0], &args.cwd) {
        text::complain(&format!("exec: {text}"));
    }
    for path in &report.protected_paths {
        text::complain(&format!("exec: protected path {}: {}", path.path, path.action));
    }
}

/// The error for an end that nobody saw.
fn is_unknown(error: &ClientError) -> bool {
    matches!(error, ClientError::OutcomeUnknown { .. })
}
