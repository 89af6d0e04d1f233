//! The measurements, as whoever runs them.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Context as _, ensure};
use cofferdam_client::{Client as _, ExecuteRequest};
use cofferdam_client_grpc::GrpcClient;
use cofferdam_sandbox::Filter;
use cofferdam_spec::HostImage;
use futures::future::try_join_all;
use rustix::process::{WaitOptions, wait};

use super::daemon::{Daemon, Place};
use super::stats::Summary;
use super::{Figures, Program, files};

/// The cheapest program.
pub(crate) const TRUE: &str = "/bin/true";

/// What is measured: the usual call of an agent, and the cheapest.
const PROGRAMS: [(&str, &[&str]); 2] =
    [("bash -c true", &["/bin/bash", "--noprofile", "--norc", "-c", "true"]), (TRUE, &[TRUE])];

/// Calls in flight when the rate is measured.
pub(crate) const IN_FLIGHT: usize = 64;

/// Calls of one measurement of the rate.
const RATE_CALLS: usize = 1000;

/// Measurements of each rate, in turns.
const RATE_ROUNDS: usize = 5;

/// Starts of a daemon.
const STARTS: usize = 20;

/// Calls before the first that counts.
const WARM_UP: usize = 20;

/// A workspace and a state directory for a daemon of `user`, or of root.
pub(crate) fn place(directory: &Path, user: Option<u32>) -> anyhow::Result<Place> {
    let made = tempfile::Builder::new().prefix("place-").tempdir_in(directory)?;
    let (workspace, state) = (made.path().join("workspace"), made.path().join("state"));
    for path in [&workspace, &state] {
        std::fs::create_dir(path)?;
        std::os::unix::fs::chown(path, user, user)?;
    }
    std::os::unix::fs::chown(made.path(), user, user)?;
    Ok(Place { workspace, state, _directory: made })
}

/// Measures everything but the weight, which needs root for every user.
pub(crate) fn measure(directory: &Path, rounds: usize) -> anyhow::Result<Figures> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(measure_all(&directory.join("cofferdam"), rounds))
}

async fn measure_all(cofferdam: &Path, rounds: usize) -> anyhow::Result<Figures> {
    let scratch = std::env::temp_dir();
    let mut starts = Vec::new();
    for _ in 0..STARTS {
        let place = place(&scratch, None)?;
        let daemon = Daemon::start(Command::new(cofferdam), &place)?;
        let client = GrpcClient::connect(&daemon.address).await?;
        client.get_capabilities().await?;
        starts.push(milliseconds(daemon.since));
    }
    let place = place(&scratch, None)?;
    let daemon = Daemon::start(Command::new(cofferdam), &place)?;
    let client = GrpcClient::connect(&daemon.address).await?;
    let filter = place.state.join("filter.bpf");
    std::fs::write(&filter, Filter::of_commands(false).to_bytes())?;
    let mut programs = Vec::new();
    for (name, argv) in PROGRAMS {
        let bench = Bench {
            client: &client,
            argv,
            workspace: &place.workspace,
            shown: shown_as_arguments()?,
            filter: &filter,
        };
        programs.push(bench.program(name, rounds).await?);
    }
    let files = files::measure(&client, &place.workspace, rounds).await?;
    let user = rustix::process::geteuid().as_raw();
    let who = if user == 0 { "root".to_owned() } else { format!("user {user}") };
    Ok(Figures { who, start_ms: Summary::of(&mut starts), programs, files, idle_mib: None })
}

/// A request id that no other call has.
pub(crate) fn unique() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("bench-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Time that has passed.
pub(crate) fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

/// One program, in all ways.
struct Bench<'a> {
    client: &'a GrpcClient,
    argv: &'a [&'a str],
    workspace: &'a Path,
    /// What the image shows, as bubblewrap's arguments.
    shown: Vec<String>,
    /// A file with the cell's seccomp program.
    filter: &'a Path,
}

/// The arguments with which bubblewrap shows what the image `host` does.
fn shown_as_arguments() -> anyhow::Result<Vec<String>> {
    let image = HostImage::parse(include_str!("../../../sandbox-images/host/image.toml"))?;
    let etc = image.etc.iter().map(|name| format!("/etc/{name}"));
    let mut arguments = Vec::new();
    for path in image.directories.iter().cloned().chain(etc) {
        match std::fs::read_link(&path) {
            Ok(target) => {
                let target = target.to_string_lossy().into_owned();
                arguments.extend(["--symlink".to_owned(), target, path]);
            }
            Err(_) if Path::new(&path).exists() => {
                arguments.extend(["--ro-bind".to_owned(), path.clone(), path]);
            }
            Err(_) => {}
        }
    }
    Ok(arguments)
}

impl Bench<'_> {
    async fn program(&self, name: &str, rounds: usize) -> anyhow::Result<Program> {
        let mut times: [Vec<f64>; 4] = Default::default();
        for round in 0..WARM_UP + rounds {
            let before = Instant::now();
            self.spawn()?;
            let spawn = milliseconds(before);
            let before = Instant::now();
            self.execute().await?;
            let execute = milliseconds(before);
            let before = Instant::now();
            self.spawn_and_read()?;
            let spawn_and_read = milliseconds(before);
            let before = Instant::now();
            self.bubblewrap()?;
            let bubblewrap = milliseconds(before);
            if round >= WARM_UP {
                let round = [spawn, spawn_and_read, execute, bubblewrap];
                times.iter_mut().zip(round).for_each(|(times, time)| times.push(time));
            }
        }
        let mut rates: [Vec<f64>; 2] = Default::default();
        for _ in 0..RATE_ROUNDS {
            let before = Instant::now();
            self.spawn_many()?;
            rates[0].push(RATE_CALLS as f64 / before.elapsed().as_secs_f64());
            let before = Instant::now();
            self.execute_many().await?;
            rates[1].push(RATE_CALLS as f64 / before.elapsed().as_secs_f64());
        }
        let [mut spawn, mut spawn_and_read, mut execute, mut bubblewrap] = times;
        let [mut spawn_rate, mut execute_rate] = rates;
        Ok(Program {
            name: name.to_owned(),
            spawn_ms: Summary::of(&mut spawn),
            spawn_and_read_ms: Summary::of(&mut spawn_and_read),
            execute_ms: Summary::of(&mut execute),
            bubblewrap_ms: Summary::of(&mut bubblewrap),
            spawn_rate: Summary::of(&mut spawn_rate),
            execute_rate: Summary::of(&mut execute_rate),
        })
    }

    /// Without `pre_exec` and ids the standard library uses `posix_spawn`.
    fn bare(&self) -> Command {
        let mut command = Command::new(self.argv[0]);
        command.args(&self.argv[1..]).env_clear().env("PATH", "/usr/bin:/bin");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    fn spawn(&self) -> anyhow::Result<()> {
        let status = self.bare().status().context("spawn")?;
        ensure!(status.success(), "{status}");
        Ok(())
    }

    fn spawn_and_read(&self) -> anyhow::Result<()> {
        let output = self.bare().stdout(Stdio::piped()).stderr(Stdio::piped()).output()?;
        ensure!(output.status.success(), "{}", output.status);
        Ok(())
    }

    /// The policy of a cell as bubblewrap's arguments: the image's directories and files read-only,
    /// a private `/dev`, `/proc`, `/tmp` and home, every namespace, no capability, and the same
    /// seccomp program. Landlock it does not know.
    fn bubblewrap(&self) -> anyhow::Result<()> {
        let mut command = Command::new("bwrap");
        command
            .args(["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"])
            .args(&self.shown)
            .args(["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"])
            .args(["--tmpfs", "/home/agent", "--bind"])
            .arg(self.workspace)
            .args(["/workspace", "--chdir", "/workspace", "--clearenv"])
            .args(["--setenv", "PATH", "/usr/bin:/bin", "--seccomp", "0", "--"])
            .args(self.argv)
            .stdin(Stdio::from(std::fs::File::open(self.filter)?))
            .stdout(Stdio::null());
        let status = command.status().context("start bwrap")?;
        ensure!(status.success(), "bwrap: {status}");
        Ok(())
    }

    async fn execute(&self) -> anyhow::Result<()> {
        let mut request = ExecuteRequest {
            session: "bench".to_owned(),
            request_id: unique(),
            ..ExecuteRequest::default()
        };
        request.program.command = self.argv.iter().map(|text| (*text).to_owned()).collect();
        let reply = self.client.execute(request).await?;
        let status = reply.report.exit.shell_status();
        ensure!(status == 0, "{:?}", reply.report.exit);
        Ok(())
    }

    /// One thread keeps as many children as allowed; whichever ends first makes room.
    fn spawn_many(&self) -> anyhow::Result<()> {
        let mut running = 0;
        let mut started = 0;
        while started < RATE_CALLS || running > 0 {
            if started < RATE_CALLS && running < IN_FLIGHT {
                // Reaped below, by `wait`, whichever it is.
                drop(self.bare().spawn().context("spawn")?);
                (started, running) = (started + 1, running + 1);
                continue;
            }
            let ended = wait(WaitOptions::empty())?.context("a child is left")?;
            // The daemon is a child as well; while it is measured it does not end.
            ensure!(ended.1.exit_status() == Some(0), "a child failed: {:?}", ended.1);
            running -= 1;
        }
        Ok(())
    }

    async fn execute_many(&self) -> anyhow::Result<()> {
        let lanes = (0..IN_FLIGHT).map(async |lane| {
            for _ in (lane..RATE_CALLS).step_by(IN_FLIGHT) {
                self.execute().await?;
            }
            anyhow::Ok(())
        });
        try_join_all(lanes).await?;
        Ok(())
    }
}
