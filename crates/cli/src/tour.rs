//! `cofferdam tour`: the daemon on a small sample repository, and what its cell can and cannot do.
//!
//! Everything that is printed below a command is what that command really printed. Each stop
//! checks its own outcome, and the tour fails when one is not as told.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use cofferdam_client::{CallToolRequest, Client as _, ExecuteReply, ExecuteRequest, Program};
use cofferdam_client_grpc::{GrpcClient, UnixAddress};
use cofferdam_spec::{CallLimits, Exit};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::connect::request_id;
use crate::join::{Wanted, join_or_start};
use crate::scratch::Scratch;
use crate::state::StateDir;
use crate::{Failure, lock, text};

/// The sample repository.
const SAMPLE: [(&str, &str); 3] = [
    ("README.md", include_str!("../../../samples/greeting/README.md")),
    ("greet.sh", include_str!("../../../samples/greeting/greet.sh")),
    ("tests.sh", include_str!("../../../samples/greeting/tests.sh")),
];

/// A daemon that the tour forgot would end after this time.
const IDLE_EXIT: Duration = Duration::from_secs(60);

/// How long the daemon may take to end when it is asked to.
const END_LIMIT: Duration = Duration::from_secs(20);

/// How long anything of a killed daemon's cell may live.
const CELL_END_LIMIT: Duration = Duration::from_millis(100);

/// Makes a sample repository, serves it, and shows what is kept and what is kept away.
pub(crate) fn tour() -> Result<ExitCode, Failure> {
    let scratch = Scratch::new().context("make a temporary directory")?;
    if let Some(note) = &scratch.note {
        say(&format!("({note})"))?;
    }
    let sample = Sample::create(&scratch)?;
    let state = StateDir::locate(&scratch.workspace, Some(&scratch.state))?;
    let wanted = Wanted {
        workspace: scratch.workspace.clone(),
        state: state.clone(),
        policy: None,
        idle_exit: IDLE_EXIT,
    };
    say(&format!(
        "A sample repository with a bug in it is in {}; a file that is none of its business is \
         in {}.",
        scratch.workspace.display(),
        sample.secret_path.display()
    ))?;
    let before = Instant::now();
    let address = join_or_start(&wanted)?;
    let took = before.elapsed();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        let guide = Guide::meet(&address, took).await?;
        let result = guide.show(&sample).await;
        // However it went, the daemon does not outlive the tour.
        guide.end(&state)?;
        result
    });
    result?;
    say("Everything was as told. The repository, the daemon and its cell are gone again.")?;
    Ok(ExitCode::SUCCESS)
}

fn say(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}").context("print")
}

/// What the tour is shown on.
struct Sample {
    workspace: PathBuf,
    secret_path: PathBuf,
    secret: String,
    server: TcpListener,
}

impl Sample {
    fn create(scratch: &Scratch) -> anyhow::Result<Self> {
        let workspace = scratch.workspace.clone();
        for (name, contents) in SAMPLE {
            fs::write(workspace.join(name), contents).context("write the sample")?;
        }
        git(&workspace, &["init", "--quiet", "--initial-branch=main"])?;
        git(&workspace, &["config", "user.name", "Agent"])?;
        git(&workspace, &["config", "user.email", "agent@example.invalid"])?;
        git(&workspace, &["add", "."])?;
        git(&workspace, &["commit", "--quiet", "--message=Say hello"])?;
        let secret_path = scratch.path().join("credentials");
        let secret = format!("token={}", request_id());
        fs::write(&secret_path, &secret).context("write the host's file")?;
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("listen")?;
        Ok(Self { workspace, secret_path, secret, server })
    }
}

/// Runs git on the host, without the person's own configuration.
fn git(workspace: &Path, args: &[&str]) -> anyhow::Result<String> {
    let output = Command::new("git")
        .arg("-C")
        .arg(workspace)
        .args(args)
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_CONFIG_SYSTEM", "/dev/null")
        .output()
        .context("the tour needs git on this host")?;
    ensure!(
        output.status.success(),
        "git {}: {}",
        args.join(" "),
        String::from_utf8_lossy(&output.stderr).trim_end()
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// One command of the tour.
struct Stop {
    /// What a person should look at.
    about: &'static str,
    command: String,
    session: &'static str,
    wall: Option<Duration>,
}

impl Stop {
    fn new(about: &'static str, command: impl Into<String>) -> Self {
        Self { about, command: command.into(), session: "tour", wall: None }
    }
}

/// Talks to the daemon.
struct Guide {
    client: GrpcClient,
    daemon: Pid,
}

impl Guide {
    async fn meet(address: &UnixAddress, took: Duration) -> anyhow::Result<Self> {
        let client = GrpcClient::connect(address).await?;
        let workspace = client.get_workspace().await?;
        let capabilities = client.get_capabilities().await?;
        let daemon = i32::try_from(workspace.daemon_pid).ok().and_then(Pid::from_raw);
        say(&format!(
            "Its daemon (process {}) serves it at {address}, ready after {:.0} ms.\nIts cell: {}; \
             programs run as user {}.",
            workspace.daemon_pid,
            took.as_secs_f64() * 1000.0,
            text::enforcement(&capabilities.enforcement),
            workspace.uid,
        ))?;
        Ok(Self { client, daemon: daemon.context("the daemon names no process id")? })
    }

    /// Runs one command and prints it with everything that it printed.
    async fn run(&self, stop: Stop) -> anyhow::Result<ExecuteReply> {
        let argv = ["bash", "--noprofile", "--norc", "-c", &stop.command];
        let request = ExecuteRequest {
            program: Program::new(argv),
            limits: CallLimits { wall: stop.wall, ..CallLimits::default() },
            session: stop.session.to_owned(),
            request_id: request_id(),
            ..ExecuteRequest::default()
        };
        let reply = self.client.execute(request).await?;
        let mut page = format!("\n{}\n  $ {}\n", stop.about, stop.command);
        for line in lines(&reply.stdout).iter().chain(&lines(&reply.stderr)) {
            writeln!(page, "  {line}")?;
        }
        let end = match text::exit(&reply.report.exit, "bash", "/workspace") {
            Some(text) => text,
            None => format!("status {}", reply.report.exit.shell_status()),
        };
        write!(page, "  [{end}, {:.1} ms]", reply.report.duration.as_secs_f64() * 1000.0)?;
        say(&page)?;
        Ok(reply)
    }

    async fn show(&self, sample: &Sample) -> anyhow::Result<()> {
        self.show_work(sample).await?;
        self.show_walls(sample).await?;
        self.show_control().await?;
        self.show_death().await
    }

    /// The job: side effects land in the workspace.
    async fn show_work(&self, sample: &Sample) -> anyhow::Result<()> {
        let about = "The repository, as the cell shows it:";
        let reply = self.run(Stop::new(about, "pwd && ls -l && git log --oneline")).await?;
        expect(&reply, Exit::Exited { code: 0 }, &["/workspace\n", "greet.sh", "Say hello"])?;

        let about = "Its tests fail. That is an answer (status 2), not an error of the call:";
        let reply = self.run(Stop::new(about, "sh tests.sh")).await?;
        expect(&reply, Exit::Exited { code: 2 }, &["FAILED"])?;

        self.show_tools().await?;

        let log = git(&sample.workspace, &["log", "--format=%h %s, by %an"])?;
        say(&format!(
            "\nOn the host, git log shows that the work has landed:\n  {}",
            log.trim_end().replace('\n', "\n  ")
        ))?;
        ensure!(log.contains("Fix the name"), "the commit is not on the host");
        Ok(())
    }

    /// What an agent would do, with the tools that a model calls.
    async fn show_tools(&self) -> anyhow::Result<()> {
        const SCRIPT: &str = "/workspace/greet.sh";
        let about = "A model would look for the bug with tools: JSON in, JSON out.";
        let found = self.tool(about, "glob", json!({ "pattern": "**/*.sh" })).await?;
        ensure!(found["count"] == 2, "glob found {found}");
        let found = self.tool("", "grep", json!({ "pattern": "Hello", "glob": "g*.sh" })).await?;
        ensure!(found["matchCount"] == 1, "grep found {found}");

        let about = "It may not overwrite a file that it has not read:";
        let blind = json!({ "filePath": SCRIPT, "content": "echo Hello\n" });
        let refused = self.tool(about, "write_file", blind.clone()).await?;
        ensure!(refused["error"]["code"] == "NOT_READ", "a blind write: {refused}");
        let about = "So it reads the file, and changes what is wrong:";
        let read = self.tool(about, "read_file", json!({ "filePath": SCRIPT })).await?;
        ensure!(read["totalLines"] == 4, "read_file showed {read}");
        let edit = json!({ "filePath": SCRIPT, "oldString": "$nam!", "newString": "$name!" });
        let edited = self.tool("", "edit_file", edit).await?;
        ensure!(edited["firstLine"] == 4, "edit_file did {edited}");

        let about = "Nor may it write over what somebody else wrote in between:";
        let append = json!({ "command": "echo '# Reviewed by a person.' >> greet.sh" });
        let appended = self.tool(about, "bash", append).await?;
        ensure!(appended["exitCode"] == 0, "bash did {appended}");
        let refused = self.tool("", "write_file", blind).await?;
        ensure!(refused["error"]["code"] == "STALE_READ", "a stale write: {refused}");

        let about = "A new file needs nothing. Then the tests, and the commit:";
        let notes = json!({ "filePath": "/workspace/NEWS.md", "content": "Names are greeted.\n" });
        let written = self.tool(about, "write_file", notes).await?;
        ensure!(written["existed"] == false, "write_file did {written}");
        let command = "sh tests.sh && git add --all && git commit -qm 'Fix the name'";
        let tested = self.tool("", "bash", json!({ "command": command })).await?;
        ensure!(tested["stdout"] == "ok: greet \nok: greet Ada\n", "bash did {tested}");
        Ok(())
    }

    /// Calls a tool and prints what went in and what came out.
    async fn tool(&self, about: &str, name: &str, input: Value) -> anyhow::Result<Value> {
        let input_json = input.to_string();
        let request = CallToolRequest {
            name: name.to_owned(),
            input_json: input_json.clone(),
            session: "tour".to_owned(),
            request_id: request_id(),
        };
        let reply = self.client.call_tool(request).await?;
        let about = if about.is_empty() { String::new() } else { format!("\n{about}\n") };
        say(&format!("{about}  {name} {input_json}\n    {}", reply.output_json))?;
        let output: Value = serde_json::from_str(&reply.output_json)?;
        ensure!(reply.is_error == output.get("error").is_some(), "is_error does not fit {output}");
        Ok(output)
    }

    /// What the cell cannot see or change.
    async fn show_walls(&self, sample: &Sample) -> anyhow::Result<()> {
        let path = sample.secret_path.display();
        let about = "The host's other files are not there, not even as names:";
        let reply = self.run(Stop::new(about, format!("cat {path}; ls -m / /home"))).await?;
        ensure!(!everything(&reply).contains(&sample.secret), "the host's file was read");
        ensure!(everything(&reply).contains("No such file or directory"), "{path} was found");
        ensure!(fs::read_to_string(&sample.secret_path)? == sample.secret, "the control failed");

        let about = "Nor are its processes; this is all of them:";
        let reply = self.run(Stop::new(about, "ps -eo pid,user,args")).await?;
        let text = everything(&reply);
        ensure!(text.contains("ps -eo"), "ps did not show itself");
        ensure!(!text.contains(" serve "), "the daemon was seen");

        let address = sample.server.local_addr()?;
        TcpStream::connect(address).context("the control: reach the server from the host")?;
        let about = "Nor the network; a server of the host listens on that port right now:";
        let connect =
            format!("cat /proc/net/dev | tail -n +3; echo </dev/tcp/127.0.0.1/{}", address.port());
        let reply = self.run(Stop::new(about, connect)).await?;
        expect(&reply, Exit::Exited { code: 1 }, &["lo:", "Connection refused"])?;

        let about = "The system can be used, not changed:";
        let reply =
            self.run(Stop::new(about, "git --version; touch /usr/bin/mine /etc/passwd")).await?;
        expect(&reply, Exit::Exited { code: 1 }, &["git version", "Read-only file system"])
    }

    /// Limits reach everything that a call started.
    async fn show_control(&self) -> anyhow::Result<()> {
        let about = "A limit of 300 ms ends the call with all that it left behind:";
        let mut stop = Stop::new(about, "setsid sleep 4004 & (setsid sleep 4004 &); sleep 4004");
        stop.wall = Some(Duration::from_millis(300));
        let reply = self.run(stop).await?;
        ensure!(matches!(reply.report.exit, Exit::TimedOut { .. }), "it was not ended");
        let reply = self.run(Stop::new("Nothing of it is left:", "pgrep -c sleep")).await?;
        expect(&reply, Exit::Exited { code: 1 }, &["0\n"])?;

        let about = "Killing everything kills only what is one's own; another session runs on:";
        let mut neighbour = Stop::new("That other session:", "sleep 0.5; echo undisturbed");
        neighbour.session = "neighbour";
        let killer = Stop::new(about, "kill -9 -1");
        let (killed, neighbour) = tokio::join!(self.run(killer), self.run(neighbour));
        killed?;
        expect(&neighbour?, Exit::Exited { code: 0 }, &["undisturbed\n"])
    }

    /// Nothing outlives the daemon.
    async fn show_death(&self) -> anyhow::Result<()> {
        let seconds = format!("4005.{}", std::process::id());
        let request = ExecuteRequest {
            program: Program::new([
                "bash",
                "-c",
                &format!("setsid sleep {seconds} & sleep {seconds}"),
            ]),
            session: "tour".to_owned(),
            request_id: request_id(),
            ..ExecuteRequest::default()
        };
        let call = self.client.execute(request);
        let watch = async {
            wait_for_processes(&seconds, 2, Duration::from_secs(10)).await?;
            kill_process(self.daemon, Signal::KILL).context("kill the daemon")?;
            let before = Instant::now();
            wait_for_processes(&seconds, 0, CELL_END_LIMIT).await?;
            anyhow::Ok(before.elapsed())
        };
        let (reply, took) = tokio::join!(call, watch);
        let Err(error) = reply else { bail!("a dead daemon answered") };
        say(&format!(
            "\nLast, kill -9 for the daemon while a call with two processes runs:\n  nothing of the \
             cell was left after {:.1} ms; the client was told: {error}",
            took?.as_secs_f64() * 1000.0
        ))
    }

    /// Ends the daemon, unless it has ended, and waits until it has.
    fn end(&self, state: &StateDir) -> anyhow::Result<()> {
        // It may be dead already; then the lock is free.
        let _ = kill_process(self.daemon, Signal::TERM);
        match lock::wait(lock::open(&state.lock_file())?, END_LIMIT)? {
            lock::Wait::Held(_) => Ok(()),
            lock::Wait::TimedOut => bail!("the daemon has not ended after {END_LIMIT:?}"),
        }
    }
}

fn lines(bytes: &[u8]) -> Vec<String> {
    String::from_utf8_lossy(bytes).lines().map(str::to_owned).collect()
}

fn everything(reply: &ExecuteReply) -> String {
    String::from_utf8_lossy(&reply.stdout).into_owned() + &String::from_utf8_lossy(&reply.stderr)
}

/// Fails the tour when a command did not do what the tour says.
fn expect(reply: &ExecuteReply, exit: Exit, texts: &[&str]) -> anyhow::Result<()> {
    ensure!(reply.report.exit == exit, "expected {exit:?}, got {:?}", reply.report.exit);
    let all = everything(reply);
    for text in texts {
        ensure!(all.contains(text), "expected {text:?} in {all:?}");
    }
    Ok(())
}

/// Waits until as many processes of the host have `argument` on their command line.
async fn wait_for_processes(argument: &str, count: usize, limit: Duration) -> anyhow::Result<()> {
    let deadline = Instant::now() + limit;
    loop {
        let seen = processes_with(argument)?;
        if seen == count {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{seen} processes after {limit:?}, expected {count}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn processes_with(argument: &str) -> anyhow::Result<usize> {
    let mut count = 0;
    for entry in fs::read_dir("/proc")? {
        // A process may end while it is looked at.
        let line = fs::read(entry?.path().join("cmdline")).unwrap_or_default();
        let mut arguments = line.split(|byte| *byte == 0);
        if arguments.next() == Some(b"sleep") && arguments.next() == Some(argument.as_bytes()) {
            count += 1;
        }
    }
    Ok(count)
}
