//! Cases of the area `sandbox`: what a workspace is to its programs and tools, and what is left of
//! it.
#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use cofferdam_e2e::{
    CellTrace, Daemon, Footprint, Options, USER, both, call_tool, run_outside, tools_of, unique,
    wait_for, within,
};
use nix::sys::signal::Signal;
use serde_json::json;

/// Real sockets of an engine, an agent and a bus, beside the workspace.
fn sockets(root: &Path) {
    let run = root.join("run");
    fs::create_dir(&run).expect("a directory");
    for name in ["docker.sock", "agent.sock", "bus"] {
        // The file stays when the listener is closed, and that is all an environment names.
        UnixListener::bind(run.join(name)).expect("a socket");
    }
}

both! {
    async fn c190_confined_means_confined(who) {
        let daemon = Daemon::start(who).await;
        fs::write(daemon.outside.join("secret.txt"), "TOPSECRET").expect("a file");
        let outside = daemon.outside.display();
        let command = format!(
            "touch {outside}/x 2>&1; echo rc=$?; cat {outside}/secret.txt 2>&1; echo rc=$?; ls / | head"
        );
        let run = daemon.shell(&command).await;
        run.expect_code(0);
        let level = run.enforcement.as_ref().map(|enforced| enforced.level.as_str());
        assert_eq!(level, Some("namespaces"), "{}", run.describe());
        let lines: Vec<&str> = run.text("stdout").lines().collect();
        assert_eq!((lines[1], lines[3]), ("rc=1", "rc=1"), "{}", run.describe());
        assert!(!run.text("stdout").contains("TOPSECRET"), "{}", run.describe());
        assert!(!daemon.outside.join("x").exists());
        let secret = daemon.read(&format!("{outside}/secret.txt")).await;
        secret.err();
        daemon.write(&format!("{outside}/y"), "x").await;
        assert!(!daemon.outside.join("y").exists());
    }

    async fn c191_loopback_works_inside(who) {
        let daemon = Daemon::start(who).await;
        let command = "python3 -c 'import socket,threading; s=socket.socket(); \
                       s.bind((\"127.0.0.1\",0)); s.listen(); p=s.getsockname()[1]; \
                       c=socket.create_connection((\"localhost\",p)); print(\"ok\")'";
        daemon.shell(command).await.expect(0, "ok\n");
    }

    async fn c194_sockets_of_engines_and_buses(who) {
        let env = [
            ("DOCKER_HOST", "unix://{}/run/docker.sock"),
            ("SSH_AUTH_SOCK", "{}/run/agent.sock"),
            ("DBUS_SESSION_BUS_ADDRESS", "unix:path={}/run/bus"),
            ("XDG_RUNTIME_DIR", "{}/run"),
        ];
        let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        let options = Options { env, before: Some(sockets), ..Options::default() };
        let daemon = Daemon::start_with(who, options).await;
        let given = fs::read(format!("/proc/{}/environ", daemon.pid)).expect("it lives");
        let given = String::from_utf8_lossy(&given).into_owned();
        assert!(given.contains("SSH_AUTH_SOCK="), "the daemon has them: {given}");
        let command = "env | grep -E 'DOCKER_HOST|SSH_AUTH|DBUS|XDG_RUNTIME' ; \
                       ls /var/run/*.sock /run/user 2>/dev/null";
        let run = daemon.shell(command).await;
        assert_eq!(run.ok().text("stdout"), "", "{}", run.describe());
        let run = daemon.directory().join("run");
        daemon.shell(&format!("ls {} 2>/dev/null | wc -l", run.display())).await.expect(0, "0\n");
    }

    async fn c196_shared_memory_semaphores_and_ptys(who) {
        let daemon = Daemon::start(who).await;
        let command = "python3 -c 'import multiprocessing as m; l=m.Lock(); q=m.Queue(); q.put(1); \
                       print(q.get())'; echo x > /dev/null; head -c4 /dev/urandom | wc -c; \
                       python3 -c 'import pty; pty.openpty(); print(\"pty\")'; echo <(true)";
        let run = daemon.shell(command).await;
        run.expect_code(0);
        let lines: Vec<&str> = run.text("stdout").lines().collect();
        assert_eq!(lines.len(), 4, "{}", run.describe());
        assert_eq!(lines[..3], ["1", "4", "pty"], "{}", run.describe());
        assert!(lines[3].starts_with("/dev/fd/"), "{}", run.describe());
    }

    async fn c197_tmp_is_private_and_cleaned(who) {
        let (mut a, b) = (Daemon::start(who).await, Daemon::start(who).await);
        let name = format!("x-{}", unique());
        let make = format!(
            "echo secretA > /tmp/{name}; mktemp; python3 -c 'import tempfile; \
             tempfile.NamedTemporaryFile()'"
        );
        let made = a.shell(&make).await;
        let other = made.expect_code(0).text("stdout").trim().to_owned();
        assert!(other.starts_with("/tmp/"), "{}", made.describe());
        let read = format!("cat /tmp/{name}");
        let missing = b.shell(&read).await;
        missing.expect(1, "");
        assert!(missing.text("stderr").contains("No such file"), "{}", missing.describe());
        b.read(&format!("/tmp/{name}")).await.err_with("File not found");
        a.shell(&read).await.expect(0, "secretA\n");
        a.read(&format!("/tmp/{name}")).await.expect_content("1: secretA");
        a.signal(Signal::SIGTERM);
        a.ended().await;
        assert!(!Path::new("/tmp").join(&name).exists());
        assert!(!Path::new(&other).exists(), "{other}");
        a.restart().await;
        a.shell(&read).await.expect(1, "");
    }

    async fn c200_dubious_ownership(who) {
        let foreign = Options { workspace_owner: Some(USER), ..Options::default() };
        for (options, owner) in [(Options::default(), who.id()), (foreign, USER)] {
            let daemon = Daemon::start_with(who, options).await;
            let command = "git init -q . ; echo x > f; git status --short; \
                           stat -c %u f .git | sort -u | wc -l";
            let run = daemon.shell(command).await;
            run.expect(0, "?? f\n1\n");
            assert!(!run.text("stderr").contains("ownership"), "{}", run.describe());
            daemon.write("/workspace/tool", "x").await.ok();
            for name in ["f", "tool"] {
                let meta = daemon.workspace.join(name).metadata().expect("it is there");
                assert_eq!(meta.uid(), owner, "{name}");
            }
        }
    }

    async fn c202_ca_certificates(who) {
        let daemon = Daemon::start(who).await;
        let links = "find /etc/ssl/certs -xtype l 2>/dev/null | wc -l";
        let command = format!(
            "for f in /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt \
             /etc/ssl/cert.pem; do [ -L $f ] && {{ [ -e $f ] && echo link-ok $f || \
             echo DANGLING $f; }}; done; {links}; python3 -c 'import ssl; \
             print(len(ssl.create_default_context().get_ca_certs())>0 or \"capath\")'; \
             env | grep -E 'SSL_CERT|CA_BUNDLE' | while IFS== read k v; do [ -e $v ] || \
             echo MISSING $k; done"
        );
        let run = daemon.shell(&command).await;
        let stdout = run.ok().text("stdout");
        assert!(!stdout.contains("DANGLING") && !stdout.contains("MISSING"), "{stdout}");
        let host = run_outside(Command::new("sh").args(["-c", links])).stdout;
        let count = |text: &str| text.trim().parse::<u32>().ok();
        let broken = stdout.lines().find_map(count).expect("a count");
        assert!(broken <= count(&host).expect("a count"), "{stdout} {host}");
        if Path::new("/etc/ssl/certs/ca-certificates.crt").exists() {
            assert!(stdout.lines().any(|line| line == "True" || line == "capath"), "{stdout}");
        }
    }

    async fn c206_rename_and_link_across_directories(who) {
        let daemon = Daemon::start(who).await;
        let command = "mkdir a b; echo x > a/f; python3 -c 'import os; os.rename(\"a/f\",\"b/f\"); \
                       os.link(\"b/f\",\"a/g\"); os.rename(\"a\",\"b/a2\"); print(\"ok\")'; \
                       cp b/f /tmp/f && mv /tmp/f c && cat c";
        daemon.shell(command).await.expect(0, "ok\nx\n");
    }

    async fn c211_session_flood_and_clean_up(who) {
        let mut daemon = Daemon::start(who).await;
        daemon.shell("true").await.expect(0, "");
        let before = daemon.footprint();
        let mut tools = tools_of(daemon.new_channel());
        for number in 0..500 {
            let input = json!({ "command": format!("echo {number}") }).to_string();
            let session = format!("flood-{number}");
            match call_tool(&mut tools, &session, "bash", input).await {
                Ok(reply) => {
                    assert!(!reply.is_error, "session {number}: {}", reply.describe());
                    reply.expect(0, &format!("{number}\n"));
                }
                Err(status) => {
                    assert_eq!(status.code(), tonic::Code::ResourceExhausted, "{status:?}");
                    let (reason, domain) = cofferdam_e2e::error_info(&status);
                    assert!(!reason.is_empty() && domain == "cofferdam", "{status:?}");
                }
            }
        }
        drop(tools);
        daemon.expect_footprint(&before).await;
        // A new cell over the same directories shows nothing of the old one but the workspace.
        daemon.shell("echo old > /tmp/old; sleep 1000 & sleep 1001 &").await.expect(0, "");
        let trace = CellTrace::of(daemon.pid);
        daemon.kill_and_restart().await;
        wait_for("the first cell is gone", within(5.0), || trace.left().is_empty().then_some(()))
            .await;
        daemon.shell("ls -A /tmp /workspace").await.expect(0, "/tmp:\n\n/workspace:\n");
        daemon.expect_footprint(&before).await;
    }

    async fn c211_killed_daemons_leave_nothing(who) {
        let mut daemons = Vec::new();
        for _ in 0..20 {
            daemons.push(Daemon::start(who).await);
        }
        let traces: Vec<CellTrace> = daemons.iter().map(|d| CellTrace::of(d.pid)).collect();
        for daemon in &daemons {
            daemon.shell("sleep 1000 & echo x > /tmp/x").await.expect(0, "");
            daemon.signal(Signal::SIGKILL);
        }
        for (daemon, trace) in daemons.iter_mut().zip(traces) {
            daemon.ended().await;
            wait_for("the cell is gone", within(5.0), || trace.left().is_empty().then_some(()))
                .await;
            // Of the dead daemon: what is counted by directory and name, not by process.
            let left = Footprint::of(1, daemon.directory(), &daemon.directory().join("tmp"));
            assert_eq!((left.host_mounts, left.temporary_files), (0, 0), "{left:?}");
        }
        let mut one = daemons.pop().expect("there are 20");
        one.restart().await;
        one.shell("ls -A /tmp /workspace").await.expect(0, "/tmp:\n\n/workspace:\n");
        one.stop().await;
    }

    async fn c212_closing_ends_everything(who) {
        let daemon = Daemon::start(who).await;
        let command = "nohup sleep 1000 >/dev/null 2>&1 & (setsid setsid sleep 1001 &) ; \
                       trap '' TERM HUP; (while :; do sleep 1; done) & echo";
        daemon.shell(command).await.expect(0, "\n");
        wait_for("all three run", Duration::from_secs(5), || {
            let runs = |marker: &str| daemon.cell().iter().any(|p| p.command_line == marker);
            (runs("sleep 1000") && runs("sleep 1001") && runs("sleep 1")).then_some(())
        })
        .await;
        // Within 5 s nothing of the cell is left, whoever its parent is by then.
        daemon.stop().await;
    }

    async fn c214_one_view_for_every_tool(who) {
        let daemon = Daemon::start(who).await;
        let (v, w) = (format!("/tmp/v-{}", unique()), format!("/tmp/w-{}", unique()));
        let make = format!("echo in > {v}; echo h > $HOME/v; pwd; echo $HOME");
        daemon.shell(&make).await.expect(0, "/workspace\n/home/agent\n");
        daemon.read(&v).await.expect_content("1: in");
        daemon.read("/home/agent/v").await.expect_content("1: h");
        daemon.write(&w, "fromtool").await.ok();
        daemon.shell(&format!("cat {w}")).await.expect(0, "fromtool");
        daemon.glob("/tmp/*").await.expect_paths(&[&v, &w]);
        let grep = daemon.call("grep", json!({ "pattern": "in", "path": v })).await;
        assert_eq!(grep.lines(), [format!("{v}:1:in")], "{}", grep.describe());
        assert!(!Path::new(&v).exists() && !Path::new(&w).exists());
    }
}
