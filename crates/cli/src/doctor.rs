//! `cofferdam doctor`: what this host can enforce, found out by doing it.
//!
//! A real cell is launched on a temporary workspace, and probes run in it. Nothing is concluded
//! from version numbers.

use std::fs;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};

use anyhow::Context as _;
use cofferdam_client::{
    Capabilities, Client as _, ExecuteReply, ExecuteRequest, Program, Workspace,
};
use cofferdam_client_grpc::{GrpcClient, UnixAddress};
use cofferdam_daemon::{Config, Daemon};
use cofferdam_sandbox::Plan;
use cofferdam_spec::{Exit, Policy};
use serde_json::{Value, json};
use tokio::net::UnixListener;
use tokio::sync::oneshot;

use crate::args::{DoctorArgs, Image};
use crate::connect::request_id;
use crate::exec::enforcement_json;
use crate::scratch::Scratch;
use crate::{Failure, prepare};

/// What was found out.
struct Report {
    capabilities: Capabilities,
    workspace: Workspace,
    canaries: Vec<Canary>,
    note: Option<String>,
}

/// One probe that ran in the cell.
struct Canary {
    name: &'static str,
    /// What was seen instead of what must be.
    problem: Option<String>,
}

impl Report {
    fn holds(&self) -> bool {
        self.canaries.iter().all(|canary| canary.problem.is_none())
    }
}

/// Says what this host can enforce. Success means that the level `namespaces` holds.
pub(crate) fn doctor(args: &DoctorArgs) -> Result<ExitCode, Failure> {
    let result = examine();
    match (&result, args.json) {
        (Ok(report), true) => println!("{:#}", report_json(report)),
        (Ok(report), false) => print_report(report),
        (Err(error), true) => println!(
            "{:#}",
            json!({ "host": host(), "level": null, "error": format!("{error:#}") })
        ),
        (Err(_), false) => {
            println!("host          {}", host());
            println!("level         none: a cell of the level `namespaces` cannot be made here");
        }
    }
    let report = result?;
    Ok(if report.holds() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn examine() -> anyhow::Result<Report> {
    let scratch = Scratch::new().context("make a temporary workspace")?;
    let home = scratch.state.join("home");
    let image = prepare::image(Image::Host);
    let plan = Plan::prepare(&scratch.workspace, &home, image, Policy::default())?;
    let daemon = Daemon::new(Config {
        plan,
        state: scratch.state.clone(),
        idle_exit: None,
        drain_grace: std::time::Duration::ZERO,
        version: env!("CARGO_PKG_VERSION"),
    })?;
    let address = UnixAddress::new(&scratch.state.join("daemon.sock"))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = UnixListener::bind(address.path())?;
        let (stop, stopped) = oneshot::channel::<()>();
        let examined = async {
            let result = ask(&address, &scratch).await;
            drop(stop);
            result
        };
        let served = daemon.run(listener, async { drop(stopped.await) });
        let (served, examined) = tokio::join!(served, examined);
        served?;
        examined
    })
}

async fn ask(address: &UnixAddress, scratch: &Scratch) -> anyhow::Result<Report> {
    let client = GrpcClient::connect(address).await?;
    Ok(Report {
        capabilities: client.get_capabilities().await?,
        workspace: client.get_workspace().await?,
        canaries: canaries(&client, scratch).await?,
        note: scratch.note.clone(),
    })
}

async fn canaries(client: &GrpcClient, scratch: &Scratch) -> anyhow::Result<Vec<Canary>> {
    let secret = Secret::plant(scratch.path())?;
    let process = HostProcess::start()?;
    let server = HostServer::start()?;
    let run = |script: &'static str, argument: String| {
        let request = ExecuteRequest {
            program: Program::new([
                "/bin/bash",
                "--noprofile",
                "--norc",
                "-c",
                script,
                "-",
                &argument,
            ]),
            session: "doctor".to_owned(),
            request_id: request_id(),
            ..ExecuteRequest::default()
        };
        client.execute(request)
    };

    let wrote = run("echo \"$1\" > canary && cat canary", secret.text.clone()).await?;
    let on_host = fs::read_to_string(scratch.workspace.join("canary")).unwrap_or_default();
    let read = run("cat \"$1\"", secret.path.display().to_string()).await?;
    let seen = run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", String::new()).await?;
    let links = run("tail -n +3 /proc/net/dev; tail -n +2 /proc/net/route", String::new()).await?;
    let port = server.port_reachable_from_here()?;
    let host_loopback = run("exec 3<>/dev/tcp/127.0.0.1/$1", port.to_string()).await?;
    let system = run("touch /usr/cofferdam-canary", String::new()).await?;
    let privileges =
        run("grep -E '^(CapPrm|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status", String::new());
    let privileges = privileges.await?;

    let canary = |name, holds: bool, reply: &ExecuteReply| Canary {
        name,
        problem: (!holds).then(|| describe(reply)),
    };
    Ok(vec![
        canary(
            "a program runs, and its file lands in the workspace",
            succeeded(&wrote) && on_host.trim_end() == secret.text,
            &wrote,
        ),
        canary(
            "a file of the host outside of the workspace cannot be read",
            !succeeded(&read) && !contains(&read.stdout, &secret.text),
            &read,
        ),
        canary(
            "processes of the host are not seen, those of the cell are",
            contains(&seen.stdout, "cmdline") && !contains(&seen.stdout, &process.marker),
            &seen,
        ),
        canary(
            "there is no network but the cell's own loopback, and no route",
            succeeded(&links) && only_loopback(&links.stdout),
            &links,
        ),
        canary(
            "a server on the host's loopback cannot be reached",
            contains(&host_loopback.stderr, "Connection refused"),
            &host_loopback,
        ),
        canary(
            "system directories are read-only",
            contains(&system.stderr, "Read-only file system"),
            &system,
        ),
        canary(
            "no capability, no new privileges, a seccomp filter",
            unprivileged(&privileges.stdout),
            &privileges,
        ),
    ])
}

fn succeeded(reply: &ExecuteReply) -> bool {
    reply.report.exit == Exit::Exited { code: 0 }
}

fn contains(bytes: &[u8], text: &str) -> bool {
    String::from_utf8_lossy(bytes).contains(text)
}

/// `/proc/net/dev` without its heading, and `/proc/net/route` without its own.
fn only_loopback(text: &[u8]) -> bool {
    let text = String::from_utf8_lossy(text);
    let mut lines = text.lines().map(str::trim_start);
    lines.next().is_some_and(|line| line.starts_with("lo:")) && lines.next().is_none()
}

/// Lines of `/proc/self/status`.
fn unprivileged(text: &[u8]) -> bool {
    let text = String::from_utf8_lossy(text);
    let values: Vec<_> =
        text.lines().filter_map(|line| line.split_once(':')).map(|(n, v)| (n, v.trim())).collect();
    let none = "0000000000000000";
    values == [("CapPrm", none), ("CapBnd", none), ("NoNewPrivs", "1"), ("Seccomp", "2")]
}

fn describe(reply: &ExecuteReply) -> String {
    format!(
        "{:?}, printed {:?} and {:?}",
        reply.report.exit,
        String::from_utf8_lossy(&reply.stdout),
        String::from_utf8_lossy(&reply.stderr)
    )
}

/// A file of the host that every user could read, were it not outside.
struct Secret {
    path: PathBuf,
    text: String,
}

impl Secret {
    fn plant(directory: &Path) -> anyhow::Result<Self> {
        let path = directory.join("secret");
        let text = request_id();
        fs::write(&path, &text).context("plant a file outside of the workspace")?;
        Ok(Self { path, text })
    }
}

/// A process of the host with an unmistakable command line.
struct HostProcess {
    marker: String,
    child: Child,
}

impl HostProcess {
    fn start() -> anyhow::Result<Self> {
        let marker = format!("3600.{:010}", std::process::id());
        let mut command = Command::new("sleep");
        command.arg(&marker).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self { child: command.spawn().context("start a process on the host")?, marker })
    }
}

impl Drop for HostProcess {
    fn drop(&mut self) {
        // It may have been killed by somebody else; either way it is reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A server on the host's loopback.
struct HostServer(TcpListener);

impl HostServer {
    fn start() -> anyhow::Result<Self> {
        Ok(Self(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("listen on the loopback")?))
    }

    /// The control of the network canary: from here the host's loopback is reached.
    fn port_reachable_from_here(&self) -> anyhow::Result<u16> {
        let address = self.0.local_addr()?;
        TcpStream::connect(address).context("reach the host's own loopback")?;
        Ok(address.port())
    }
}

fn host() -> String {
    let uname = rustix::system::uname();
    format!(
        "{} {} {}, user {}",
        uname.sysname().to_string_lossy(),
        uname.release().to_string_lossy(),
        uname.machine().to_string_lossy(),
        rustix::process::geteuid().as_raw()
    )
}

fn print_report(report: &Report) {
    let enforcement = &report.capabilities.enforcement;
    let list = |items: &[String]| {
        if items.is_empty() { "nothing".to_owned() } else { items.join("\n              ") }
    };
    let verdict = if report.holds() { "holds" } else { "DOES NOT HOLD, see the probes" };
    println!("host          {}", host());
    println!("level         {}: {verdict}", enforcement.level.as_str());
    println!("landlock      ABI {}", enforcement.landlock_abi);
    println!("not handled   {}", list(&enforcement.rights_not_handled));
    println!("not enforced  {}", list(&enforcement.not_enforced));
    println!("network       {}", enforcement.network.as_str());
    println!("programs run  as user {}, group {}", report.workspace.uid, report.workspace.gid);
    for text in report.workspace.warnings.iter().chain(&report.note) {
        println!("note          {text}");
    }
    if !report.capabilities.capabilities.is_empty() {
        println!("\ntried on this host");
    }
    for found in &report.capabilities.capabilities {
        println!("  {:<4} {}: {}", yes(found.available), found.name, found.detail);
        if !found.available && !found.fix.is_empty() {
            println!("       fix: {}", found.fix);
        }
    }
    println!("\nprobes in a cell");
    for canary in &report.canaries {
        println!("  {:<4} {}", yes(canary.problem.is_none()), canary.name);
        if let Some(problem) = &canary.problem {
            println!("       {problem}");
        }
    }
}

fn yes(yes: bool) -> &'static str {
    if yes { "yes" } else { "NO" }
}

fn report_json(report: &Report) -> Value {
    let capabilities = report.capabilities.capabilities.iter().map(|found| {
        json!({
            "name": found.name,
            "available": found.available,
            "detail": found.detail,
            "fix": found.fix,
        })
    });
    let canaries = report.canaries.iter().map(|canary| {
        json!({ "name": canary.name, "holds": canary.problem.is_none(), "problem": canary.problem })
    });
    json!({
        "host": host(),
        "level": report.holds().then_some(report.capabilities.enforcement.level.as_str()),
        "enforcement": enforcement_json(&report.capabilities.enforcement),
        "capabilities": capabilities.collect::<Vec<_>>(),
        "canaries": canaries.collect::<Vec<_>>(),
        "warnings": report.workspace.warnings,
        "note": report.note,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_loopback_is_accepted() {
        assert!(only_loopback(b"    lo: 0 0 0\n"));
        assert!(!only_loopback(b"    lo: 0 0\n  eth0: 0 0\n"));
        assert!(!only_loopback(b"    lo: 0 0\nlo 00000000 0100007F\n"));
        assert!(!only_loopback(b""));
    }

    #[test]
    fn a_missing_or_other_privilege_line_is_not_accepted() {
        let zero = "0000000000000000";
        let good = "NoNewPrivs:\t1\nSeccomp:\t2\n";
        let status = format!("CapPrm:\t{zero}\nCapBnd:\t{zero}\n{good}");
        assert!(unprivileged(status.as_bytes()));
        assert!(!unprivileged(good.as_bytes()));
        assert!(!unprivileged(status.replace("Seccomp:\t2", "Seccomp:\t0").as_bytes()));
    }
}
