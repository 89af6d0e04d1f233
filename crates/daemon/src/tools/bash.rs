//! `bash`: one command in a fresh shell.
//!
//! The command runs as every process of the cell does, with its output in the daemon's logs. Only
//! when something has to be read later does a job directory appear in the cell: for output that the
//! answer leaves out, for a command that goes on in the background, and for one that is too long
//! for an argument. Its files are written by the toolbox, out of the reach of `kill -9 -1`, and
//! whole: a directory that a command removed comes back, and a full disk costs only the last state.
//! [`Jobs`] says how long they stay.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use cofferdam_cell::protocol::Stdio;
use cofferdam_spec::{CallLimits, Command, Exit, Limits, SessionId, Tag, TimeLimit};
use serde::Serialize;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinSet;

use crate::decide::DRAIN_MAX;
use crate::files::{Caller, FileError, Files, Overwrite, WriteContent, WriteFile};
use crate::process::{End, Phase, Process};
use crate::records::Keep;
use crate::supervisor::{Handle, Lease, OnDisconnect, StartProcess};
use crate::tools::errors::{Doing, Failed, ToolError, file_error, refused};
use crate::tools::jobs::{Jobs, remove};
use crate::tools::output::{Held, Rendered};
use crate::tools::paths;
use crate::tools::schema::{Arguments, Definition, Field, Kind};
use crate::tools::text::counted;
use crate::tools::to_json;
use crate::validate::Rules;

/// How long a call without `timeoutSeconds` waits before the command goes on in the background.
const PATIENCE: Duration = Duration::from_secs(30);

/// Longest `timeoutSeconds`: a day.
const TIMEOUT_SECONDS_MAX: u64 = 86_400;

/// Longest command that travels as an argument, of which the kernel takes 128 KiB.
const ARGUMENT_COMMAND_BYTES_MAX: usize = 96 * 1024;

/// Where job directories are, in the cell's private /tmp.
const JOBS: &str = "/tmp/.cofferdam/jobs";

/// Shortest time between two refreshes of a job's files: what a reader may be behind.
const REFRESH_MIN: Duration = Duration::from_millis(500);

/// After a refresh the job rests so many times as long as it took, so that it costs at most a
/// twentieth of the daemon's time.
const REFRESH_REST: u32 = 20;

/// After a refresh that failed, when it is tried again though nothing new was printed.
const REFRESH_RETRY: Duration = Duration::from_secs(5);

/// Output above which its text is made on a thread of its own, so that other calls do not wait.
const RENDER_HERE_BYTES_MAX: u64 = 256 * 1024;

/// Texts of large outputs made at once. Each takes up to 100 MiB for some milliseconds.
const RENDERS_MAX: usize = 2;

/// The output streams of a process without a terminal, in the order of its logs.
const STREAMS: [&str; 2] = ["stdout", "stderr"];

/// The tool.
pub(crate) static DEFINITION: Definition = Definition {
    name: "bash",
    about: "Runs a command with bash in /workspace. Each call is a fresh shell: directory, \
            variables and options do not persist, files and processes do. Standard input is empty \
            and there is no terminal. exitCode is bash's own, and not 0 is no error of the tool. \
            Without timeoutSeconds a command that takes longer than 30 seconds goes on in the \
            background: status is then running, and message says how to follow and how to stop it. \
            A process that the command leaves in the background (server &) goes on too; redirect \
            its output to a file. Of stdout and stderr each, at most 51200 bytes and 2000 lines \
            are shown, start and end; a line between says which file has all of it. Such files \
            stay for the last 16 finished commands that have any, at most 128 MiB together; the \
            oldest go first.",
    read_only: false,
    fields: &[
        Field {
            name: "command",
            about: "The command, as for bash -c; may have many lines.",
            kind: Kind::Text,
            required: true,
        },
        Field {
            name: "timeoutSeconds",
            about: "After so many seconds everything that the command started is killed, also what \
                    it left in the background, and status is timed_out. Default: none.",
            kind: Kind::Seconds { max: TIMEOUT_SECONDS_MAX },
            required: false,
        },
    ],
};

/// When commands go on in the background, and where their files are.
#[derive(Debug)]
pub(crate) struct Background {
    /// How long a call without `timeoutSeconds` is waited for.
    pub(crate) after: Duration,
    /// The directory of job directories, in the cell.
    pub(crate) jobs: String,
}

impl Default for Background {
    fn default() -> Self {
        Self { after: PATIENCE, jobs: JOBS.to_owned() }
    }
}

#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Output {
    status: &'static str,
    exit_code: Option<u8>,
    stdout: String,
    stderr: String,
    truncated: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    signal: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_directory: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
}

/// What the tool needs.
#[derive(Debug)]
pub(crate) struct Bash {
    supervisor: Handle,
    rules: Arc<Rules>,
    files: Files,
    background: Background,
    renders: Semaphore,
    /// Whose files stay.
    finished: Arc<Jobs>,
    /// The tasks of commands in the background; they end with the daemon.
    tasks: Mutex<JoinSet<()>>,
}

impl Bash {
    /// Over a cell's processes and files.
    pub(crate) fn new(
        supervisor: Handle,
        rules: Arc<Rules>,
        files: Files,
        background: Background,
    ) -> Self {
        Self {
            supervisor,
            rules,
            files,
            background,
            renders: Semaphore::new(RENDERS_MAX),
            finished: Arc::default(),
            tasks: Mutex::default(),
        }
    }

    /// Calls it.
    pub(crate) async fn call(
        &self,
        caller: &Caller,
        mut input: Arguments,
    ) -> Result<String, Failed> {
        let command = input.required_text("command")?;
        let timeout = input.seconds("timeoutSeconds");
        paths::without_nul("command", &command)?;
        let limits = self.limits(timeout)?;
        let directory = format!("{}/{:08x}", self.background.jobs, random());
        let (program, command_file) = self.program(command, &directory).await?;
        let start = start(program, caller, limits, timeout.is_some());
        let mut lease = self.supervisor.start(start).await.map_err(refused)?;
        let command_file = command_file.map(|file| file.runs(lease.process()));
        let ended = match timeout {
            Some(_) => Some(lease.process().ended().await),
            None => tokio::time::timeout(self.background.after, lease.process().ended()).await.ok(),
        };
        match ended {
            Some(end) => {
                lease.release();
                if let Some(removed) = command_file {
                    // Before other files come into its directory, which goes with it.
                    let _ = removed.await;
                }
                self.ended(lease.process(), &end, timeout.is_some(), &directory).await
            }
            None => self.hand_over(lease, directory).await,
        }
    }

    fn limits(&self, timeout: Option<f64>) -> Result<Limits, ToolError> {
        let Some(seconds) = timeout else { return Ok(self.rules.limits.clone()) };
        let refuse = |reason: String| ToolError::invalid_input("bash", &reason, "Nothing was run.");
        let wall = Duration::try_from_secs_f64(seconds)
            .map_err(|error| refuse(format!("timeoutSeconds is no length of time: {error}.")))?;
        let call = CallLimits { wall: Some(wall), ..CallLimits::default() };
        self.rules
            .limits
            .narrow(&call)
            .map_err(|error| refuse(format!("timeoutSeconds cannot be used: {error}.")))
    }

    /// The shell with its command, which is put into a file when it is too long.
    async fn program(
        &self,
        command: String,
        directory: &str,
    ) -> Result<(Command, Option<CommandFile>), Failed> {
        let (command, file) = if command.len() <= ARGUMENT_COMMAND_BYTES_MAX {
            (command, None)
        } else {
            let path = format!("{directory}/command");
            let file = self.command_file(directory);
            let written = put(&self.files, &path, Bytes::from(command), 0o600).await;
            written.map_err(|error| file_error(Doing::Write, &path, error))?;
            // Bash reads a sourced file as a whole before it runs any of it.
            (format!(". {path}"), Some(file))
        };
        let argv = ["/bin/bash", "--noprofile", "--norc", "-c"].map(str::to_owned);
        let argv = argv.into_iter().chain([command]).collect();
        let made = Command::new(argv, &self.rules.environment, [], String::new());
        let made = made.map_err(|error| {
            let reason = format!("the command cannot be run: {error}.");
            ToolError::invalid_input("bash", &reason, "Nothing was run.")
        })?;
        Ok((made, file))
    }

    /// Sees to it that the command's file goes when its process has ended, or was never started,
    /// and its directory too when nothing else is there. A call that is given up changes nothing.
    fn command_file(&self, directory: &str) -> CommandFile {
        let (process, runs) = oneshot::channel::<Arc<Process>>();
        let (done, removed) = oneshot::channel();
        let (files, directory) = (self.files.clone(), directory.to_owned());
        self.spawn(async move {
            if let Ok(process) = runs.await {
                process.ended().await;
            }
            remove(&files, &format!("{directory}/command"), false).await;
            remove(&files, &directory, false).await;
            // Nobody waits for it when the command goes on in the background.
            let _ = done.send(());
        });
        CommandFile { process, removed }
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }

    /// The answer about a command that has ended.
    async fn ended(
        &self,
        process: &Arc<Process>,
        end: &End,
        bounded: bool,
        directory: &str,
    ) -> Result<String, Failed> {
        let shown = self.show(process, directory).await;
        let mut output = Output {
            status: "completed",
            stdout: shown.stdout,
            stderr: shown.stderr,
            truncated: shown.truncated,
            notes: shown.notes,
            ..Output::default()
        };
        match &end.exit {
            Exit::Exited { .. } => output.exit_code = Some(end.exit.shell_status()),
            Exit::Signaled { number, maybe_oom, .. } => {
                output.exit_code = Some(end.exit.shell_status());
                output.signal = Some(*number);
                output.message = Some(if *maybe_oom {
                    format!("Ended by signal {number}. Memory may have run out.")
                } else {
                    format!("Ended by signal {number}.")
                });
            }
            Exit::TimedOut { limit, after } => {
                let limit = match limit {
                    TimeLimit::Wall => "after",
                    TimeLimit::Idle => "after no output for",
                };
                output.status = "timed_out";
                output.message = Some(format!(
                    "Timed out {limit} {} s; everything that the command had started was killed.",
                    after.as_secs_f64()
                ));
            }
            Exit::OutputLimit { limit_bytes } => {
                output.exit_code = Some(end.exit.shell_status());
                output.message = Some(format!(
                    "Killed with everything it had started: it printed more than {limit_bytes} \
                     bytes, which is the policy's limit."
                ));
            }
            Exit::OomKilled => {
                output.exit_code = Some(end.exit.shell_status());
                output.message = Some("Killed because memory ran out.".to_owned());
            }
            other => return Err(no_outcome(other, output).into()),
        }
        if end.background > 0 {
            output.notes.push(background_note(end, bounded));
        }
        let expected = output.stdout.len() + output.stderr.len();
        Ok(to_json(&output, expected))
    }

    /// The answer about a command that goes on.
    async fn hand_over(&self, mut lease: Lease, directory: String) -> Result<String, Failed> {
        let process = Arc::clone(lease.process());
        let (files, finished) = (self.files.clone(), Arc::clone(&self.finished));
        let mut job = Job::new(Arc::clone(&process), files, finished, directory);
        let written = job.refresh_all().await;
        let shown = self
            .show_with(&process, written.as_ref().err().map(String::as_str), &job.directory)
            .await;
        // From here on it needs no client.
        lease.release();
        let directory = job.directory.clone();
        let pid = match process.phase() {
            Phase::Running { pid } => Some(pid),
            Phase::Starting => None,
            // It ended while its files were written. By now its number may be another process's,
            // so nobody may be told to kill that.
            Phase::Ended(end) => {
                remove(&self.files, &directory, true).await;
                return self.ended(&process, &end, false, &directory).await;
            }
        };
        self.spawn(job.follow());
        let stop = pid.map_or(String::new(), |pid| format!(" kill -- -{pid} stops it."));
        let failed = written.err().map_or(String::new(), |reason| {
            format!(" The files could not be written so far ({reason}); that is tried again.")
        });
        let message = format!(
            "The command still runs after {} s and goes on in the background. Follow it with \
             ordinary commands: tail -n 50 {directory}/stdout or {directory}/stderr shows what it \
             printed, at most some seconds old; {directory}/exit has its exit code once it has \
             ended.{stop}{failed}",
            self.background.after.as_secs_f64()
        );
        let output = Output {
            status: "running",
            exit_code: None,
            stdout: shown.stdout,
            stderr: shown.stderr,
            truncated: shown.truncated,
            signal: None,
            pid,
            output_directory: Some(directory),
            message: Some(message),
            notes: shown.notes,
        };
        let expected = output.stdout.len() + output.stderr.len();
        Ok(to_json(&output, expected))
    }

    /// Both streams of a process; what is left out is put into files.
    async fn show(&self, process: &Arc<Process>, directory: &str) -> Shown {
        let mut all = Shown::default();
        for (index, stream) in STREAMS.into_iter().enumerate() {
            match self.render(process, index).await {
                Err(reason) => all.add_unreadable(stream, &reason),
                Ok((held, rendered)) if rendered.is_truncated() => {
                    let path = format!("{directory}/{stream}");
                    let content = held.into_file();
                    // First, so that older files make room.
                    let bytes = content.len() as u64;
                    self.finished.finished(&self.files, directory, bytes).await;
                    let written = put(&self.files, &path, content, 0o644).await;
                    let reason = written.map_err(|error| in_words(&path, error));
                    all.add(
                        index,
                        rendered,
                        reason.as_ref().map(|_| path.as_str()).map_err(|r| r.as_str()),
                    );
                }
                Ok((_, rendered)) => all.add(index, rendered, Ok("")),
            }
        }
        all
    }

    /// Both streams of a process whose files are there already, or are not for a reason.
    async fn show_with(
        &self,
        process: &Arc<Process>,
        failed: Option<&str>,
        directory: &str,
    ) -> Shown {
        let mut all = Shown::default();
        for (index, stream) in STREAMS.into_iter().enumerate() {
            match self.render(process, index).await {
                Err(reason) => all.add_unreadable(stream, &reason),
                Ok((_, rendered)) => {
                    let path = format!("{directory}/{stream}");
                    all.add(index, rendered, failed.map_or(Ok(path.as_str()), Err));
                }
            }
        }
        all
    }

    async fn render(
        &self,
        process: &Arc<Process>,
        index: usize,
    ) -> Result<(Held, Rendered), String> {
        let make = move |process: &Process| {
            let held = read(process, index)?;
            let rendered = held.render(STREAMS[index]);
            Ok((held, rendered))
        };
        if total(process, index) <= RENDER_HERE_BYTES_MAX {
            return make(process);
        }
        // The semaphore is never closed.
        let _permit = self.renders.acquire().await;
        let process = Arc::clone(process);
        let made = tokio::task::spawn_blocking(move || make(&process)).await;
        made.unwrap_or_else(|error| Err(error.to_string()))
    }
}

/// What a model is shown of both streams.
#[derive(Debug, Default)]
struct Shown {
    stdout: String,
    stderr: String,
    truncated: bool,
    notes: Vec<String>,
}

impl Shown {
    fn add(&mut self, index: usize, mut rendered: Rendered, file: Result<&str, &str>) {
        self.truncated |= rendered.is_truncated();
        self.notes.append(&mut rendered.notes);
        let text = rendered.finish(file);
        match index {
            0 => self.stdout = text,
            _ => self.stderr = text,
        }
    }

    fn add_unreadable(&mut self, stream: &str, reason: &str) {
        self.truncated = true;
        self.notes.push(format!("{stream}: what was printed cannot be read: {reason}."));
    }
}

/// The file of a command that is too long for an argument.
#[derive(Debug)]
struct CommandFile {
    process: oneshot::Sender<Arc<Process>>,
    removed: oneshot::Receiver<()>,
}

impl CommandFile {
    /// Its process was started. The answer comes when the file is gone, after the process's end.
    fn runs(self, process: &Arc<Process>) -> oneshot::Receiver<()> {
        // When its task is gone, the daemon ends, and the cell with the file.
        let _ = self.process.send(Arc::clone(process));
        self.removed
    }
}

/// How a command is started.
fn start(program: Command, caller: &Caller, limits: Limits, bounds_tree: bool) -> StartProcess {
    StartProcess {
        program,
        session: caller.session.clone(),
        tag: Tag::default(),
        limits,
        wall_bounds_tree: bounds_tree,
        stdio: Stdio::Pipes { stdin: false },
        input: Bytes::new(),
        input_is_whole: true,
        workspace_read_only: false,
        keep: Keep::IfCut,
        on_disconnect: OnDisconnect::Kill,
        wait_for_reader: false,
    }
}

fn background_note(end: &End, bounded: bool) -> String {
    let left = counted(u64::from(end.background), "process", "processes");
    let was_killed = !matches!(end.exit, Exit::Exited { .. } | Exit::Signaled { .. });
    let then = match (was_killed, bounded) {
        (true, _) => " that could not be killed",
        (false, true) => ", until timeoutSeconds is over",
        (false, false) => "",
    };
    let mut note = format!("Still running in the background: {left}{then}.");
    if end.detached {
        note.push_str(" What is printed there from now on is not shown: redirect it to a file.");
    }
    note
}

/// The error for a command whose end was not its own.
fn no_outcome(exit: &Exit, output: Output) -> ToolError {
    let unknown = "Files may have been changed. Look at the state before running it again.";
    let (code, message, hint) = match exit {
        Exit::Lost => (
            "OUTCOME_UNKNOWN",
            "The outcome of the command is unknown: its supervisor or its cell has ended."
                .to_owned(),
            unknown,
        ),
        Exit::Cancelled { by } => {
            let who = match by.as_str() {
                "session" => "the end of its session",
                "drain" => "the end of the daemon",
                _ => "its client",
            };
            ("CANCELLED", format!("The command was ended by {who}."), unknown)
        }
        Exit::Denied { rule } => (
            "DENIED",
            format!("The policy does not allow the command: {rule}."),
            "Nothing was run.",
        ),
        Exit::SandboxFailed { step, errno } => (
            "SANDBOX_FAILED",
            format!(
                "The command could not be started: {step} failed: {}.",
                std::io::Error::from_raw_os_error(*errno)
            ),
            "Nothing was run. When processes or memory have run out, end some first.",
        ),
        other => ("OUTCOME_UNKNOWN", format!("The command ended as {other:?}."), unknown),
    };
    let mut error = ToolError::new(code, message, hint);
    error.stdout = Some(output.stdout);
    error.stderr = Some(output.stderr);
    error
}

/// A command in the background, whose files follow its output.
#[derive(Debug)]
struct Job {
    process: Arc<Process>,
    files: Files,
    finished: Arc<Jobs>,
    directory: String,
    /// Bytes of each stream that its file tells of.
    written: [Option<u64>; 2],
    /// Length of each file.
    sizes: [u64; 2],
}

impl Job {
    fn new(process: Arc<Process>, files: Files, finished: Arc<Jobs>, directory: String) -> Self {
        Self { process, files, finished, directory, written: [None; 2], sizes: [0; 2] }
    }

    /// Writes both files.
    async fn refresh_all(&mut self) -> Result<(), String> {
        self.written = [None; 2];
        self.refresh().await
    }

    /// Writes the files of streams with news.
    async fn refresh(&mut self) -> Result<(), String> {
        for (index, stream) in STREAMS.into_iter().enumerate() {
            let total = total(&self.process, index);
            if self.written[index] == Some(total) {
                continue;
            }
            let content = read(&self.process, index)?.into_file();
            self.sizes[index] = content.len() as u64;
            let path = format!("{}/{stream}", self.directory);
            let written = put(&self.files, &path, content, 0o644).await;
            written.map_err(|error| in_words(&path, error))?;
            self.written[index] = Some(total);
        }
        Ok(())
    }

    /// Follows the command until nothing of it is left.
    async fn follow(mut self) {
        let process = Arc::clone(&self.process);
        let (mut progress, mut tree) = (process.progress(), process.tree());
        let mut told = false;
        loop {
            // Looked at before the refresh, which then has everything that came until then.
            let gone = tree.borrow_and_update().gone;
            progress.borrow_and_update();
            let end = process.end();
            let before = Instant::now();
            let refreshed = match &end {
                Some(end) if !told => self.finish(end).await,
                _ => self.refresh().await,
            };
            let took = before.elapsed();
            told |= end.is_some() && refreshed.is_ok();
            // What a killed tree left in its pipes is taken within this time.
            let settled = gone.is_some_and(|gone| gone.elapsed() > 2 * DRAIN_MAX);
            match &refreshed {
                Ok(()) if told && settled => {
                    let bytes = self.sizes.iter().sum();
                    return self.finished.finished(&self.files, &self.directory, bytes).await;
                }
                Err(reason) => tracing::warn!(directory = self.directory, reason, "job files"),
                Ok(()) => {}
            }
            let pause = REFRESH_MIN.max(took * REFRESH_REST);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = process.ended(), if end.is_none() => continue,
            }
            let retry =
                if refreshed.is_err() || gone.is_some() { Some(REFRESH_RETRY) } else { None };
            tokio::select! {
                _ = progress.changed() => {}
                _ = tree.changed() => {}
                () = tokio::time::sleep(retry.unwrap_or_default()), if retry.is_some() => {}
            }
        }
    }

    /// Writes everything once more, then the exit code: who sees it sees all of the output.
    async fn finish(&mut self, end: &End) -> Result<(), String> {
        self.refresh_all().await?;
        let path = format!("{}/exit", self.directory);
        let code = format!("{}\n", end.exit.shell_status());
        let written = put(&self.files, &path, Bytes::from(code), 0o644).await;
        written.map_err(|error| in_words(&path, error))
    }
}

fn total(process: &Process, index: usize) -> u64 {
    process.with_logs(|logs| logs.get(index).map_or(0, |log| log.total()))
}

fn read(process: &Process, index: usize) -> Result<Held, String> {
    process.with_logs(|logs| match logs.get(index) {
        Some(log) => Held::read(log).map_err(|error| error.to_string()),
        None => Err("there is no such stream".to_owned()),
    })
}

/// Writes a file of a job. It belongs to no session: nobody's stamps are touched.
async fn put(files: &Files, path: &str, content: Bytes, mode: u32) -> Result<(), FileError> {
    let caller = Caller { session: SessionId::default(), call: "bash".to_owned() };
    let write = WriteFile {
        path: path.to_owned(),
        content: WriteContent::Bytes(content),
        expected: Overwrite::Any,
        mode,
        parents: true,
        keep_bom: false,
    };
    files.write(&caller, write).await.map(drop)
}

/// Why a file could not be written, for a sentence.
fn in_words(path: &str, error: FileError) -> String {
    match file_error(Doing::Write, path, error) {
        Failed::Tool(error) => error.message.trim_end_matches('.').to_owned(),
        Failed::Call(_) => "the cell or the daemon is ending".to_owned(),
    }
}

/// A number for a job's directory. A name that is in use already costs an old job its files, so it
/// must be unlikely, not impossible.
fn random() -> u32 {
    let mut bytes = [0_u8; 4];
    let flags = rustix::rand::GetRandomFlags::empty();
    match rustix::io::retry_on_intr(|| rustix::rand::getrandom(&mut bytes, flags)) {
        Ok(_) => u32::from_ne_bytes(bytes),
        // Every kernel with Landlock has it; the clock does as well.
        Err(_) => crate::nonce(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(exit: Exit) -> End {
        End { exit, pid: Some(7), duration: Duration::ZERO, background: 2, detached: false }
    }

    #[tokio::test]
    async fn a_command_that_ends_while_it_is_handed_over_has_completed() {
        let directory = tempfile::tempdir().unwrap();
        let (_cell, port) = crate::testing::fake::launch(directory.path().to_owned());
        let launch =
            || Err(cofferdam_cell::LaunchError::Spawn(std::io::Error::other("one is enough")));
        let logs = directory.path().to_owned();
        let made = crate::supervisor::Supervisor::new(Box::new(launch), port, logs, 7);
        let (supervisor, handle) = made.unwrap();
        tokio::spawn(supervisor.run());
        let rules = Rules { limits: Limits::default(), environment: Default::default() };
        let files = Files::new(handle.clone());
        let bash = Bash::new(handle, Arc::new(rules), files, Background::default());
        let caller = Caller { session: SessionId::default(), call: "c".to_owned() };
        let job = directory.path().join("job").to_string_lossy().into_owned();
        let (program, _) = bash.program("echo a; exit 3".to_owned(), &job).await.unwrap();
        let start = start(program, &caller, Limits::default(), false);
        let lease = bash.supervisor.start(start).await.unwrap();
        lease.process().ended().await;
        let output = bash.hand_over(lease, job.clone()).await.unwrap();
        let expected = serde_json::json!({
            "status": "completed", "exitCode": 3, "stdout": "a\n", "stderr": "",
            "truncated": false,
        });
        assert_eq!(serde_json::from_str::<serde_json::Value>(&output).unwrap(), expected);
        assert!(!std::path::Path::new(&job).exists());
    }

    #[test]
    fn processes_in_the_background_are_told_with_what_becomes_of_them() {
        let exited = || Exit::Exited { code: 0 };
        assert_eq!(
            background_note(&end(exited()), false),
            "Still running in the background: 2 processes."
        );
        assert_eq!(
            background_note(&end(exited()), true),
            "Still running in the background: 2 processes, until timeoutSeconds is over."
        );
        let detached = End { detached: true, ..end(exited()) };
        assert!(background_note(&detached, false).contains("redirect it to a file"));
        let timed_out = Exit::TimedOut { limit: TimeLimit::Wall, after: Duration::from_secs(2) };
        assert!(background_note(&end(timed_out), true).contains("that could not be killed"));
    }

    #[test]
    fn an_unknown_outcome_is_an_error_with_what_was_printed() {
        let output = Output { stdout: "partial".to_owned(), ..Output::default() };
        let error = no_outcome(&Exit::Lost, output);
        assert_eq!((error.code, error.stdout.as_deref()), ("OUTCOME_UNKNOWN", Some("partial")));
        assert!(error.message.contains("unknown"));
    }

    #[test]
    fn a_shell_that_could_not_be_started_names_step_and_reason() {
        let exit = Exit::SandboxFailed { step: "fork".to_owned(), errno: 11 };
        let error = no_outcome(&exit, Output::default());
        assert_eq!(
            error.message,
            "The command could not be started: fork failed: Resource temporarily unavailable (os \
            error 11)."
        );
    }
}
