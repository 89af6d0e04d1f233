//! `ProcessService`.

use std::pin::Pin;
use std::sync::Arc;

use cofferdam_proto::v1::process_service_server::ProcessService;
use cofferdam_proto::{duration_to_wire, v1};
use futures::stream::Stream as FutureStream;
use prost::Message;
use tonic::{Request, Response, Status};

use crate::account::{self, INLINE_BYTES_MAX};
use crate::events::{Reader, output_account};
use crate::process::{End, Phase, Process};
use crate::status::{Fault, violation};
use crate::stdin::StdinError;
use crate::supervisor::Handle;
use crate::validate::{self, Checker, MESSAGE_BYTES_MAX, Rules, within};

/// Most bytes of a command that a description shows; the rest is left out and marked.
const COMMAND_BYTES_SHOWN: usize = 16 * 1024;

/// Room for everything of a List response but its processes.
const LIST_BYTES_RESERVED: usize = 64 * 1024;

type Events = Pin<Box<dyn FutureStream<Item = Result<v1::ProcessEvent, Status>> + Send>>;

/// Characters of a process's name that an error repeats; ours have far fewer.
const PROCESS_ID_SHOWN_MAX: usize = 128;

/// The service.
#[derive(Debug, Clone)]
pub(crate) struct Processes {
    supervisor: Handle,
    rules: Arc<Rules>,
}

impl Processes {
    /// A service over a supervisor.
    pub(crate) fn new(supervisor: Handle, rules: Arc<Rules>) -> Self {
        Self { supervisor, rules }
    }

    async fn find(&self, process_id: &str) -> Result<Arc<Process>, Fault> {
        let found = self.supervisor.find(process_id).await;
        // A long one would not fit into the error's metadata.
        let shown = || process_id.chars().take(PROCESS_ID_SHOWN_MAX).collect();
        found.ok_or_else(|| Fault::NotFound { process_id: shown() })
    }
}

#[tonic::async_trait]
impl ProcessService for Processes {
    type StartStream = Events;
    type ConnectStream = Events;

    async fn start(&self, request: Request<v1::StartRequest>) -> Result<Response<Events>, Status> {
        let start = validate::start(&self.rules, request.into_inner())?;
        let lease = self.supervisor.start(start).await.map_err(Fault::from)?;
        let reader = Reader::of_lease(self.supervisor.clone(), lease);
        Ok(Response::new(Box::pin(reader.into_stream())))
    }

    async fn execute(
        &self,
        request: Request<v1::ExecuteRequest>,
    ) -> Result<Response<v1::ExecuteResponse>, Status> {
        let start = validate::execute(&self.rules, request.into_inner())?;
        let mut lease = self.supervisor.start(start).await.map_err(Fault::from)?;
        let end = lease.process().ended().await;
        lease.release();
        let (stdout, stderr, output) = inline_output(lease.process(), &end)?;
        Ok(Response::new(v1::ExecuteResponse {
            exit: Some(v1::Exit::from(&end.exit)),
            stdout,
            stderr,
            output: Some(output),
            enforcement: Some(self.supervisor.enforcement()),
            duration: Some(duration_to_wire(end.duration)),
            ..v1::ExecuteResponse::default()
        }))
    }

    async fn connect(
        &self,
        request: Request<v1::ConnectRequest>,
    ) -> Result<Response<Events>, Status> {
        let request = request.into_inner();
        within(&request, MESSAGE_BYTES_MAX)?;
        let process = self.find(&request.process_id).await?;
        let offsets = connect_offsets(&process, &request)?;
        let reader = Reader::of_process(self.supervisor.clone(), process, offsets);
        Ok(Response::new(Box::pin(reader.into_stream())))
    }

    async fn write_stdin(
        &self,
        request: Request<v1::WriteStdinRequest>,
    ) -> Result<Response<v1::WriteStdinResponse>, Status> {
        let request = request.into_inner();
        let process_id = request.process_id.clone();
        let (data, offset) = validate::write(request)?;
        let process = self.find(&process_id).await?;
        let written = process.stdin.write(data, offset).await;
        let offset = written.map_err(|error| Fault::Stdin { process_id, error })?;
        let enforcement = Some(self.supervisor.enforcement());
        Ok(Response::new(v1::WriteStdinResponse { offset, enforcement }))
    }

    async fn close_stdin(
        &self,
        request: Request<v1::CloseStdinRequest>,
    ) -> Result<Response<v1::CloseStdinResponse>, Status> {
        let request = request.into_inner();
        within(&request, MESSAGE_BYTES_MAX)?;
        let mut checker = Checker::default();
        checker.request_id(&request.request_id);
        checker.finish(Some(()))?;
        let process_id = request.process_id;
        let process = self.find(&process_id).await?;
        process
            .stdin
            .close()
            .map_err(|closed| Fault::Stdin { process_id, error: StdinError::Closed(closed) })?;
        let enforcement = Some(self.supervisor.enforcement());
        Ok(Response::new(v1::CloseStdinResponse { enforcement }))
    }

    async fn send_signal(
        &self,
        request: Request<v1::SendSignalRequest>,
    ) -> Result<Response<v1::SendSignalResponse>, Status> {
        let request = request.into_inner();
        within(&request, MESSAGE_BYTES_MAX)?;
        let (signal, target) = validate::signal(&request)?;
        let process = self.find(&request.process_id).await?;
        let delivered = self.supervisor.signal(process.about.call, signal, target).await;
        let delivered = delivered.ok_or(Fault::Ended { process_id: request.process_id })?;
        let enforcement = Some(self.supervisor.enforcement());
        Ok(Response::new(v1::SendSignalResponse { delivered, enforcement }))
    }

    async fn resize_pty(
        &self,
        request: Request<v1::ResizePtyRequest>,
    ) -> Result<Response<v1::ResizePtyResponse>, Status> {
        let request = request.into_inner();
        within(&request, MESSAGE_BYTES_MAX)?;
        let size = validate::resize(&request)?;
        let process = self.find(&request.process_id).await?;
        resize(&process, size)?;
        let enforcement = Some(self.supervisor.enforcement());
        Ok(Response::new(v1::ResizePtyResponse { enforcement }))
    }

    async fn list(
        &self,
        request: Request<v1::ListRequest>,
    ) -> Result<Response<v1::ListResponse>, Status> {
        let request = request.into_inner();
        within(&request, MESSAGE_BYTES_MAX)?;
        let page = validate::page(&request)?;
        // One more than asked for tells whether there is a next page.
        let found = self.supervisor.page(page.session, page.after, page.count + 1).await;
        let (processes, next_page_token) = fill_page(&found, page.count);
        let enforcement = Some(self.supervisor.enforcement());
        Ok(Response::new(v1::ListResponse { processes, next_page_token, enforcement }))
    }

    async fn get(
        &self,
        request: Request<v1::GetRequest>,
    ) -> Result<Response<v1::GetResponse>, Status> {
        let request = request.into_inner();
        within(&request, MESSAGE_BYTES_MAX)?;
        let process = self.find(&request.process_id).await?;
        let enforcement = Some(self.supervisor.enforcement());
        Ok(Response::new(v1::GetResponse { process: Some(describe(&process)), enforcement }))
    }

    async fn wait(
        &self,
        request: Request<v1::WaitRequest>,
    ) -> Result<Response<v1::WaitResponse>, Status> {
        let request = request.into_inner();
        within(&request, MESSAGE_BYTES_MAX)?;
        let timeout = validate::timeout(request.timeout.as_ref())?;
        let process = self.find(&request.process_id).await?;
        match timeout {
            None => drop(process.ended().await),
            // A time that runs out is no error: the answer then has no exit.
            Some(time) => drop(tokio::time::timeout(time, process.ended()).await),
        }
        let enforcement = Some(self.supervisor.enforcement());
        Ok(Response::new(v1::WaitResponse { process: Some(describe(&process)), enforcement }))
    }
}

fn unreadable(process: &Process, error: std::io::Error) -> Fault {
    Fault::Output { process_id: process.about.id.clone(), error }
}

fn inline_output(
    process: &Process,
    end: &End,
) -> Result<(bytes::Bytes, bytes::Bytes, v1::OutputAccount), Fault> {
    let excerpt = |index: usize| {
        process
            .with_logs(|logs| account::excerpt(&logs[index], INLINE_BYTES_MAX))
            .map_err(|error| unreadable(process, error))
    };
    let (stdout, stdout_account) = excerpt(0)?;
    let (stderr, stderr_account) = excerpt(1)?;
    let retained = process.is_worth_keeping();
    let account = v1::OutputAccount {
        stdout: Some(stdout_account),
        stderr: Some(stderr_account),
        process_id: if retained { process.about.id.clone() } else { String::new() },
        background_processes: end.background,
        detached: end.detached,
    };
    Ok((stdout, stderr, account))
}

fn connect_offsets(process: &Process, request: &v1::ConnectRequest) -> Result<Vec<u64>, Fault> {
    let named =
        [("stdout_offset", request.stdout_offset), ("stderr_offset", request.stderr_offset)];
    let (used, unused) = named.split_at(process.streams().len());
    if let Some((field, _)) = unused.iter().find(|(_, offset)| *offset != 0) {
        return Err(Fault::Invalid(vec![violation(*field, "a terminal has one stream only")]));
    }
    let ended = process.end().is_some();
    process.with_logs(|logs| {
        for (log, &(field, offset)) in logs.iter().zip(used) {
            let total = log.total();
            if ended && offset > total {
                return Err(Fault::BeyondEnd { field, offset, total });
            }
        }
        Ok(used.iter().map(|(_, offset)| *offset).collect())
    })
}

fn resize(process: &Process, size: cofferdam_spec::PtySize) -> Result<(), Fault> {
    let process_id = || process.about.id.clone();
    if !process.about.pty {
        return Err(Fault::NoTerminal { process_id: process_id() });
    }
    let Some(master) = process.terminal() else {
        return Err(Fault::Ended { process_id: process_id() });
    };
    let size = rustix::termios::Winsize {
        ws_row: size.rows,
        ws_col: size.cols,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    rustix::termios::tcsetwinsize(&master, size)
        .map_err(|error| Fault::Terminal { process_id: process_id(), error })
}

fn describe(process: &Process) -> v1::ProcessInfo {
    let (pid, end) = match process.phase() {
        Phase::Starting => (0, None),
        Phase::Running { pid } => (pid, None),
        Phase::Ended(end) => (end.pid.unwrap_or(0), Some(end)),
    };
    let state = if end.is_some() { v1::ProcessState::Exited } else { v1::ProcessState::Running };
    let about = &process.about;
    let (command, command_truncated) = shown_command(&about.argv);
    v1::ProcessInfo {
        process_id: about.id.clone(),
        pid,
        session: about.session.as_str().to_owned(),
        tag: about.tag.as_str().to_owned(),
        command,
        state: state.into(),
        start_time: Some(about.start_time.into()),
        exit: end.map(|end| v1::Exit::from(&end.exit)),
        output: Some(output_account(process)),
        pty: about.pty,
        command_truncated,
    }
}

/// The command as far as a description shows it, and whether something is left out.
fn shown_command(argv: &[String]) -> (Vec<String>, bool) {
    let mut room = COMMAND_BYTES_SHOWN;
    let mut shown = Vec::new();
    for argument in argv {
        // An empty argument costs something too, so that their number is bounded.
        let Some(left) = room.checked_sub(argument.len() + 1) else {
            shown.push(argument[..argument.floor_char_boundary(room)].to_owned());
            return (shown, true);
        };
        room = left;
        shown.push(argument.clone());
    }
    (shown, false)
}

/// The first `count` of what was found, as far as a response has room, and the next page's token.
fn fill_page(found: &[Arc<Process>], count: usize) -> (Vec<v1::ProcessInfo>, String) {
    let mut room = MESSAGE_BYTES_MAX as usize - LIST_BYTES_RESERVED;
    let mut processes = Vec::new();
    for process in found.iter().take(count) {
        let info = describe(process);
        let Some(left) = room.checked_sub(info.encoded_len() + 8) else { break };
        room = left;
        processes.push(info);
    }
    let last = processes.len().checked_sub(1).and_then(|index| found.get(index));
    let token = match last {
        Some(last) if processes.len() < found.len() => validate::page_token(last.about.call),
        _ => String::new(),
    };
    (processes, token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_command_is_cut_at_a_character_and_marked() {
        let argv = vec!["é".repeat(COMMAND_BYTES_SHOWN), "more".to_owned()];
        let (shown, truncated) = shown_command(&argv);
        assert_eq!((shown, truncated), (vec!["é".repeat(COMMAND_BYTES_SHOWN / 2)], true));
        let argv = vec!["a".to_owned(), String::new()];
        assert_eq!(shown_command(&argv), (argv, false));
    }
}
