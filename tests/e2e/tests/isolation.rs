//! What commands cannot see, reach or do. Three runs per rule: the allowed thing works, the
//! forbidden thing fails with the exact errno, and the same attempt succeeds outside of the cell,
//! made by the same program and the same user.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use cofferdam_e2e::{
    Daemon, Options, Who, as_user, bash, both, probe, program, run_outside, unique, wait_for,
};
use cofferdam_proto::v1;

/// What the probe gave in the cell.
async fn inside(daemon: &Daemon, probe: &str, arguments: &[&str]) -> String {
    let mut argv = vec![probe];
    argv.extend(arguments);
    let run = daemon.run(program(argv)).await;
    run.expect_code(0);
    run.stdout().trim_end().to_owned()
}

/// What the probe gave outside, as the user that the cell's programs are.
async fn outside(daemon: &Daemon, arguments: &[&str]) -> String {
    let id = daemon.workspace_info().await.uid;
    let program = daemon.workspace.join("probe");
    run_outside(as_user(id, program).args(arguments)).stdout.trim_end().to_owned()
}

/// What the probe gave outside, as root.
fn by_root(arguments: &[&str]) -> String {
    run_outside(Who::Root.command(probe()).args(arguments)).stdout.trim_end().to_owned()
}

/// A process of the test outside of every cell, ended with the value.
struct Stranger(Child);

impl Stranger {
    /// Returns once it is that user's program, and no longer the one that became that user.
    async fn start(id: u32) -> Stranger {
        let child = as_user(id, "sleep").arg("98765.4321").stdin(Stdio::null()).spawn();
        let stranger = Stranger(child.expect("sleep can be started"));
        wait_for("the stranger sleeps", Duration::from_secs(5), || {
            let line = fs::read(format!("/proc/{}/cmdline", stranger.pid())).unwrap_or_default();
            line.starts_with(b"sleep").then_some(())
        })
        .await;
        stranger
    }

    fn pid(&self) -> i32 {
        self.0.id() as i32
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let _ = self.0.kill();
        self.0.wait().expect("a child can be waited for");
    }
}

/// A directory of the host, removed with the value.
struct Decoy(std::path::PathBuf);

impl Decoy {
    /// A directory that everybody may enter, with a file that everybody may read.
    fn make(parent: &Path) -> Decoy {
        let path = parent.join(format!("cofferdam-decoy-{}", unique()));
        fs::DirBuilder::new().mode(0o755).create(&path).expect("a directory can be made");
        fs::write(path.join("secret"), "secret").expect("a file can be written");
        Decoy(path)
    }

    fn file(&self) -> String {
        self.0.join("secret").display().to_string()
    }
}

impl Drop for Decoy {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

both! {
    async fn files_of_the_host_are_absent(who) {
        let daemon = Daemon::start(who).await;
        let probe = daemon.put_probe();
        daemon.put_text("own", "text");
        assert_eq!(inside(&daemon, &probe, &["open", "/workspace/own"]).await, "ok");
        assert_eq!(inside(&daemon, &probe, &["open", "/usr/bin/env"]).await, "ok");

        let parents = ["/tmp", "/var/tmp", "/home", "/opt", "/srv", "/mnt", "/run", "/var/lib"];
        for parent in parents.map(Path::new).into_iter().chain([daemon.outside.as_path()]) {
            let decoy = Decoy::make(parent);
            let file = decoy.file();
            assert_eq!(outside(&daemon, &["open", &file]).await, "ok", "{file}");
            assert_eq!(inside(&daemon, &probe, &["open", &file]).await, "ENOENT", "{file}");
            let through = format!("/proc/self/root{file}");
            assert_eq!(inside(&daemon, &probe, &["open", &through]).await, "ENOENT", "{file}");
            // A link in the workspace leads to the same nothing.
            std::os::unix::fs::symlink(&file, daemon.workspace.join("link")).expect("a link");
            assert_eq!(outside(&daemon, &["open", &file]).await, "ok");
            assert_eq!(inside(&daemon, &probe, &["open", "/workspace/link"]).await, "ENOENT");
            let made = daemon.bash("echo x > /workspace/link").await;
            made.expect_code(1);
            assert_eq!(fs::read_to_string(&file).expect("it is there"), "secret");
            fs::remove_file(daemon.workspace.join("link")).expect("the link can go");
        }
        let decoy = Decoy::make(Path::new("/root"));
        assert_eq!(by_root(&["open", &decoy.file()]), "ok");
        assert_eq!(inside(&daemon, &probe, &["open", &decoy.file()]).await, "ENOENT");
        for path in ["/etc/shadow", "/root", "/sys/kernel", "/var/log"] {
            assert_eq!(by_root(&["open", path]), "ok", "{path}");
            assert_eq!(inside(&daemon, &probe, &["open", path]).await, "ENOENT", "{path}");
        }
        for path in [daemon.socket(), daemon.state.clone(), daemon.workspace.clone()] {
            let path = path.display().to_string();
            assert_eq!(inside(&daemon, &probe, &["open", &path]).await, "ENOENT", "{path}");
        }
    }

    async fn the_root_holds_what_the_design_names(who) {
        let daemon = Daemon::start(who).await;
        let listed = daemon.bash("ls -A /").await;
        let allowed = [
            "bin", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin",
            "tmp", "usr", "var", "workspace", "opt", "root", "mnt", "srv", "sys",
        ];
        let names: Vec<String> = listed.stdout().lines().map(str::to_owned).collect();
        for needed in ["bin", "dev", "etc", "home", "proc", "tmp", "usr", "workspace"] {
            assert!(names.iter().any(|name| name == needed), "{needed}: {names:?}");
        }
        for name in &names {
            assert!(allowed.contains(&name.as_str()), "{name} is not of the design");
        }
        daemon.bash("ls -A /home /home/agent; ls -A /tmp").await.expect(0, "/home:\nagent\n\n/home/agent:\n");
        let devices = daemon.bash("ls -A /dev | sort | tr '\\n' ' '").await.stdout();
        let known = [
            "fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty",
            "urandom", "zero",
        ];
        for name in devices.split_whitespace() {
            assert!(known.contains(&name), "/dev/{name} is not of the design");
        }
        for name in ["fd", "full", "null", "ptmx", "pts", "random", "shm", "tty", "urandom", "zero"] {
            assert!(devices.split_whitespace().any(|device| device == name), "{name}: {devices}");
        }
        let etc = daemon.bash("cat /etc/hostname; grep -c . /etc/passwd; id -un; echo ~").await;
        etc.expect_code(0);
        let host = fs::read_to_string("/etc/hostname").unwrap_or_default();
        assert!(host.trim().is_empty() || !etc.stdout().starts_with(&host), "{etc:?}");
        assert!(etc.stdout().ends_with("agent\n/home/agent\n"), "{etc:?}");
    }

    async fn processes_of_the_host_are_absent(who) {
        let daemon = Daemon::start(who).await;
        let probe = daemon.put_probe();
        let id = daemon.workspace_info().await.uid;
        let stranger = Stranger::start(id).await;
        let pid = stranger.pid().to_string();
        // Allowed: a process of the same call.
        daemon.bash("sleep 50 & kill -0 $! && kill -9 $! && echo ok").await.expect(0, "ok\n");
        // Rule off: the same signal outside.
        assert_eq!(outside(&daemon, &["kill", &pid, "0"]).await, "ok");
        assert_eq!(inside(&daemon, &probe, &["kill", &pid, "0"]).await, "ESRCH");
        assert_eq!(inside(&daemon, &probe, &["kill", &pid, "9"]).await, "ESRCH");
        assert_eq!(by_root(&["kill", &daemon.pid.to_string(), "0"]), "ok");
        let own = daemon.pid.to_string();
        assert_eq!(inside(&daemon, &probe, &["kill", &own, "9"]).await, "ESRCH");
        // The bracket keeps the search from finding itself.
        let search = "grep -laE '[s]leep.98765.4321|[c]offerdam.serve' /proc/[0-9]*/cmdline 2>/dev/null; true";
        let found = run_outside(Who::Root.command("bash").args(["-c", search])).stdout;
        assert!(found.lines().count() >= 2, "outside both are seen: {found}");
        daemon.bash(search).await.expect(0, "");
        let run = daemon.bash("ls -d /proc/[0-9]*").await;
        run.expect_code(0);
        assert!(run.stdout().lines().count() < 8, "only the cell's own: {}", run.stdout());
    }

    async fn init_and_other_calls_cannot_be_read_or_traced(who) {
        let daemon = Daemon::start(who).await;
        let probe = daemon.put_probe();
        for file in ["environ", "mem", "fd", "root", "cwd", "exe", "maps"] {
            let own = format!("/proc/self/{file}");
            assert_eq!(inside(&daemon, &probe, &["open", &own]).await, "ok", "{own}");
            let init = format!("/proc/1/{file}");
            assert_eq!(inside(&daemon, &probe, &["open", &init]).await, "EACCES", "{init}");
        }
        let supervisor = "cat /proc/$PPID/environ; echo $?; cat /proc/$PPID/mem; echo $?";
        daemon.bash(supervisor).await.expect(0, "1\n1\n");

        let mut other = bash("echo $BASHPID; exec sleep 300");
        other.process.as_mut().expect("it has one").env.insert("SECRET".into(), "s".into());
        let start = v1::StartRequest {
            process: other.process,
            session: "other".to_owned(),
            request_id: unique(),
            ..Default::default()
        };
        let process_id = daemon.start_detached(start).await;
        let get = v1::GetRequest { process_id };
        let info = daemon.processes().get(get).await.expect("it is known").into_inner().process;
        let pid = info.expect("a process").pid.to_string();
        // The kernel lets the same user list descriptors by number, and nothing behind them.
        for file in ["environ", "mem", "fd/1", "root", "cwd", "exe", "maps"] {
            let path = format!("/proc/{pid}/{file}");
            assert_eq!(inside(&daemon, &probe, &["open", &path]).await, "EACCES", "{path}");
        }
        assert_eq!(inside(&daemon, &probe, &["trace", &pid]).await, "EPERM");
        assert_eq!(inside(&daemon, &probe, &["trace", "1"]).await, "EPERM");
        assert_eq!(inside(&daemon, &probe, &["trace-me"]).await, "EPERM");
        assert_eq!(inside(&daemon, &probe, &["limit", "0"]).await, "ok");
        assert_eq!(inside(&daemon, &probe, &["limit", "1"]).await, "EPERM");
        assert_eq!(inside(&daemon, &probe, &["limit", &pid]).await, "EPERM");
        // Signals stay in their session; within it they arrive.
        assert_eq!(inside(&daemon, &probe, &["kill", &pid, "0"]).await, "EPERM");
        let mut same = program([probe.as_str(), "kill", &pid, "0"]);
        same.session = "other".to_owned();
        daemon.run(same).await.expect(0, "ok\n");
        // Rule off: two processes of one user outside.
        let stranger = Stranger::start(daemon.workspace_info().await.uid).await;
        let pid = stranger.pid().to_string();
        for attempt in [["trace", &pid], ["limit", &pid], ["open", &format!("/proc/{pid}/environ")]] {
            assert_eq!(outside(&daemon, &attempt).await, "ok", "{attempt:?}");
        }
    }

    async fn debugging_stays_within_a_call(who) {
        let options = Options { policy: Some("debug = true\n".into()), ..Options::default() };
        let daemon = Daemon::start_with(who, options).await;
        let probe = daemon.put_probe();
        assert_eq!(inside(&daemon, &probe, &["trace-me"]).await, "ok");
        let own_child = format!("sleep 50 & {probe} trace $!; kill -9 $!");
        daemon.bash(&own_child).await.expect(0, "ok\n");
        assert_eq!(inside(&daemon, &probe, &["trace", "1"]).await, "EPERM");
        let other = daemon.bash("sleep 300 >/dev/null 2>&1 & echo $!").await.stdout();
        assert_eq!(inside(&daemon, &probe, &["trace", other.trim()]).await, "EPERM");
        let supervisor = format!("{probe} trace $PPID");
        daemon.bash(&supervisor).await.expect(0, "EPERM\n");
    }

    async fn unix_sockets_of_the_host_are_unreachable(who) {
        let daemon = Daemon::start(who).await;
        let probe = daemon.put_probe();
        let path = daemon.outside.join("listener.sock");
        let _listener = UnixListener::bind(&path).expect("a socket can be bound");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).expect("its mode can be set");
        let path = path.display().to_string();
        let name = format!("cofferdam-test-{}", unique());
        let address = UnixAddr::from_abstract_name(&name).expect("a name");
        let _abstract = UnixListener::bind_addr(&address).expect("a name can be bound");
        let name = format!("@{name}");

        let talk = "python3 - <<'EOF'\nimport socket\na, b = socket.socketpair()\na.send(b'x')\n\
                    s = socket.socket(socket.AF_UNIX); s.bind('/tmp/s'); s.listen()\n\
                    c = socket.socket(socket.AF_UNIX); c.connect('/tmp/s')\n\
                    t = socket.socket(socket.AF_UNIX); t.bind('\\0own'); t.listen()\n\
                    d = socket.socket(socket.AF_UNIX); d.connect('\\0own')\n\
                    print(b.recv(1))\nEOF";
        daemon.bash(talk).await.expect(0, "b'x'\n");
        assert_eq!(outside(&daemon, &["connect-unix", &path]).await, "ok");
        assert_eq!(inside(&daemon, &probe, &["connect-unix", &path]).await, "ENOENT");
        assert_eq!(outside(&daemon, &["connect-unix", &name]).await, "ok");
        assert_eq!(inside(&daemon, &probe, &["connect-unix", &name]).await, "ECONNREFUSED");
        let socket = daemon.socket().display().to_string();
        assert_eq!(by_root(&["connect-unix", &socket]), "ok");
        assert_eq!(inside(&daemon, &probe, &["connect-unix", &socket]).await, "ENOENT");
    }

    async fn the_hosts_network_is_unreachable(who) {
        let daemon = Daemon::start(who).await;
        let probe = daemon.put_probe();
        // Allowed: the cell's own loopback.
        let own = "python3 - <<'EOF'\nimport socket\n\
                   for f, a in ((socket.AF_INET, '127.0.0.1'), (socket.AF_INET6, '::1')):\n\
                   \x20s = socket.socket(f); s.bind((a, 0)); s.listen()\n\
                   \x20c = socket.socket(f); c.connect(s.getsockname()[:2]); print('ok')\nEOF";
        daemon.bash(own).await.expect(0, "ok\nok\n");
        for host in ["127.0.0.1:0", "[::1]:0"] {
            let tcp = TcpListener::bind(host).expect("a port");
            let address = tcp.local_addr().expect("an address");
            let text = address.to_string();
            assert_eq!(outside(&daemon, &["connect-tcp", &text]).await, "ok");
            let (_, from) = tcp.accept().expect("the connection from outside");
            assert_eq!(inside(&daemon, &probe, &["connect-tcp", &text]).await, "ECONNREFUSED");
            if address.is_ipv4() {
                assert_eq!(inside(&daemon, &probe, &["fast-open", &text]).await, "EPERM");
                assert_eq!(outside(&daemon, &["fast-open", &text]).await, "ok");
                let (mut stream, _) = tcp.accept().expect("the fast-open connection from outside");
                let mut got = [0; 4];
                stream.read_exact(&mut got).expect("its payload");
                assert_eq!(&got, b"fast");
            }
            // The next connection that arrives is this one, so none came from the cell.
            let mut sentinel = TcpStream::connect(address).expect("the listener listens");
            let own = sentinel.local_addr().expect("an address");
            sentinel.write_all(b"x").expect("a byte");
            let (_, arrived) = tcp.accept().expect("the sentinel's connection");
            assert_eq!(arrived, own);
            assert_ne!(arrived, from);

            let udp = UdpSocket::bind(host).expect("a port");
            udp.set_read_timeout(Some(Duration::from_secs(5))).expect("a timeout");
            let address = udp.local_addr().expect("an address");
            let text = address.to_string();
            let mut buffer = [0; 16];
            assert_eq!(outside(&daemon, &["send-udp", &text, "control"]).await, "ok");
            let length = udp.recv(&mut buffer).expect("the datagram from outside");
            assert_eq!(&buffer[..length], b"control");
            // The cell's own loopback takes it.
            assert_eq!(inside(&daemon, &probe, &["send-udp", &text, "escaped"]).await, "ok");
            let own = UdpSocket::bind(host).expect("a port");
            own.send_to(b"sentinel", address).expect("a datagram");
            let length = udp.recv(&mut buffer).expect("the sentinel");
            assert_eq!(&buffer[..length], b"sentinel");
        }
        let routes = "tail -n +2 /proc/net/route | wc -l; ls /proc/net/dev >/dev/null; \
                      tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '";
        daemon.bash(routes).await.expect(0, "0\nlo\n");
    }

    async fn memory_and_queues_of_the_host_are_absent(who) {
        let daemon = Daemon::start(who).await;
        let probe = daemon.put_probe();
        let key = (0x4000_0000 + u64::from(std::process::id()) * 4 + u64::from(who == Who::Root)).to_string();
        let queue = format!("/cofferdam-test-{}", unique());
        assert_eq!(outside(&daemon, &["shm-create", &key]).await, "ok");
        assert_eq!(outside(&daemon, &["mq-create", &queue]).await, "ok");
        let forbidden = [
            outside(&daemon, &["shm-get", &key]).await,
            inside(&daemon, &probe, &["shm-get", &key]).await,
            outside(&daemon, &["mq-open", &queue]).await,
            inside(&daemon, &probe, &["mq-open", &queue]).await,
        ];
        // The cell has shared memory of its own. Its own queues are refused by Landlock, which on
        // this kernel denies every file of the queues' internal mount.
        let own = [
            inside(&daemon, &probe, &["shm-create", &key]).await,
            inside(&daemon, &probe, &["shm-get", &key]).await,
            inside(&daemon, &probe, &["shm-remove", &key]).await,
            inside(&daemon, &probe, &["mq-create", &queue]).await,
        ];
        assert_eq!(outside(&daemon, &["shm-remove", &key]).await, "ok");
        assert_eq!(outside(&daemon, &["mq-unlink", &queue]).await, "ok");
        assert_eq!(forbidden, ["ok", "ENOENT", "ok", "ENOENT"]);
        assert_eq!(own, ["ok", "ok", "ok", "EACCES"]);
    }

    async fn the_daemons_environment_is_not_inherited(who) {
        let secret = ("COFFERDAM_TEST_SECRET".to_owned(), "s3cr3t".to_owned());
        let harmful = ("LD_PRELOAD".to_owned(), String::new());
        let env = vec![secret, harmful];
        let daemon = Daemon::start_with(who, Options { env: env.clone(), ..Options::default() }).await;
        let own = fs::read(format!("/proc/{}/environ", daemon.pid)).expect("root reads it");
        assert!(String::from_utf8_lossy(&own).contains("s3cr3t"), "the daemon has it");
        let run = daemon.run(program(["/usr/bin/env"])).await;
        run.expect_code(0);
        let names: Vec<String> =
            run.stdout().lines().filter_map(|line| Some(line.split_once('=')?.0.to_owned())).collect();
        let known = [
            "GIT_CONFIG_SYSTEM", "HOME", "LANG", "LOGNAME", "PATH", "PWD", "SHELL", "SHLVL", "TERM", "TMPDIR", "TZ", "USER",
        ];
        for name in &names {
            assert!(known.contains(&name.as_str()), "{name} is in the environment: {names:?}");
        }
        assert!(run.stdout().contains("HOME=/home/agent\n"), "{run:?}");
        let policy = "[env]\nallow = [\"COFFERDAM_TEST_SECRET\"]\nset = { FIXED = \"1\" }\n";
        let allowed = Options { policy: Some(policy.into()), env, ..Options::default() };
        let daemon = Daemon::start_with(who, allowed).await;
        daemon.bash("echo $COFFERDAM_TEST_SECRET $FIXED").await.expect(0, "s3cr3t 1\n");
    }

    async fn denied_system_calls_give_their_errno(who) {
        let daemon = Daemon::start(who).await;
        let probe = daemon.put_probe();
        let parse = |text: String| -> BTreeMap<String, String> {
            text.lines()
                .filter_map(|line| line.split_once(": "))
                .map(|(name, result)| (name.to_owned(), result.to_owned()))
                .collect()
        };
        let inside = parse(inside(&daemon, &probe, &["syscalls"]).await);
        let same_user = parse(outside(&daemon, &["syscalls"]).await);
        let root = parse(by_root(&["syscalls"]));
        let unimplemented = [
            "clone3", "open_tree", "open_tree_attr", "move_mount", "fsopen", "fsconfig", "fsmount",
            "fspick", "mount_setattr", "io_uring_setup", "io_uring_enter", "io_uring_register",
            "io_setup", "openat2", "fchmodat2", "getpid by its x32 number",
        ];
        // The kernel of this host has no x32 entry, so the number is unknown without a filter too.
        let same_outside = ["getpid by its x32 number"];
        assert!(inside.len() >= 89, "every call was made: {inside:?}");
        assert_eq!(inside.len(), same_user.len());
        let mut wrong = Vec::new();
        for (name, result) in &inside {
            let right = if unimplemented.contains(&name.as_str()) { "ENOSYS" } else { "EPERM" };
            let off = [&same_user[name], &root[name]];
            let shown = same_outside.contains(&name.as_str()) || off.iter().any(|off| *off != right);
            if result != right || !shown {
                wrong.push(format!("{name}: {result} in the cell, wanted {right}; outside {off:?}"));
            }
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
    }

    async fn the_32_bit_entry_kills(who) {
        let daemon = Daemon::start(who).await;
        let probe = daemon.put_probe();
        assert_eq!(outside(&daemon, &["int80"]).await, "ok");
        let run = daemon.run(program([probe.as_str(), "int80"])).await;
        assert_eq!(run.shell_status(), 128 + nix::libc::SIGSYS, "{run:?}");
    }

    async fn socket_families_are_a_short_list(who) {
        let daemon = Daemon::start(who).await;
        let probe = daemon.put_probe();
        let allowed = ["1 1 0", "2 1 0", "10 1 0", "16 3 0", "2 2 0", "10 2 0"];
        let refused = "EAFNOSUPPORT";
        let outside = outside(&daemon, &["sockets"]).await;
        let root = by_root(&["sockets"]);
        for needed in ["40 1 0 ok", "16 3 9 ok", "16 3 12 ok", "2 1 262 ok"] {
            assert!(outside.lines().any(|line| line == needed), "{needed}: {outside}");
        }
        for needed in ["17 3 0 ok", "2 3 1 ok"] {
            assert!(root.lines().any(|line| line == needed), "{needed}: {root}");
        }
        let inside = inside(&daemon, &probe, &["sockets"]).await;
        assert_eq!(inside.lines().count(), outside.lines().count());
        for line in inside.lines() {
            let (socket, result) = line.rsplit_once(' ').expect("a result");
            let right = if allowed.contains(&socket) { "ok" } else { refused };
            assert_eq!(result, right, "socket({socket})");
        }
    }

    async fn a_command_has_no_privilege_at_all(who) {
        let daemon = Daemon::start(who).await;
        let read = "grep -E '^(Cap|NoNewPrivs|Seccomp:|Groups|Uid|Gid)' /proc/self/status | tr -s '\\t ' ' '";
        let run = daemon.bash(read).await;
        run.expect_code(0);
        let status: BTreeMap<String, String> = run
            .stdout()
            .lines()
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
            .collect();
        for name in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(status[name], "0000000000000000", "{name}");
        }
        assert_eq!(status["NoNewPrivs"], "1");
        assert_eq!(status["Seccomp"], "2");
        assert_eq!(status["Groups"], "");
        let info = daemon.workspace_info().await;
        assert_ne!(info.uid, 0);
        assert_eq!(status["Uid"], format!("{0} {0} {0} {0}", info.uid));
        assert_eq!(status["Gid"], format!("{0} {0} {0} {0}", info.gid));
        // Positive control: the same lines of a plain process are others.
        let plain = fs::read_to_string("/proc/self/status").expect("/proc is mounted");
        assert!(!plain.contains("CapBnd:\t0000000000000000"), "{plain}");
        assert!(plain.contains("Seccomp:\t0"), "{plain}");
        let suid = daemon.bash("find /usr -perm -4000 -type f 2>/dev/null | head -1").await.stdout();
        if !suid.is_empty() {
            daemon.bash("su -c true </dev/null; echo $?; id -u").await.expect_code(0);
            let id = daemon.bash("id -u").await.stdout();
            assert_eq!(id.trim(), info.uid.to_string());
        }
    }

    async fn a_command_holds_three_descriptors(who) {
        let daemon = Daemon::start(who).await;
        let probe = daemon.put_probe();
        let listed = inside(&daemon, &probe, &["fds"]).await;
        let numbers: Vec<&str> = listed.lines().filter_map(|line| line.split(' ').next()).collect();
        assert_eq!(numbers, ["0", "1", "2"], "{listed}");
        assert!(listed.starts_with("0 /dev/null\n1 pipe:"), "{listed}");
        let with_stdin = v1::ExecuteRequest { stdin: "x".into(), ..program([probe.as_str(), "fds"]) };
        let listed = daemon.run(with_stdin).await.stdout();
        let numbers: Vec<&str> = listed.lines().filter_map(|line| line.split(' ').next()).collect();
        assert_eq!(numbers, ["0", "1", "2"], "{listed}");
        assert!(listed.starts_with("0 pipe:"), "{listed}");
        // While other calls run, theirs do not leak in either.
        daemon.bash("sleep 300 &").await.expect_code(0);
        let listed = inside(&daemon, &probe, &["fds"]).await;
        assert_eq!(listed.lines().count(), 3, "{listed}");
        let above = "ls /proc/self/fd | sort -n | tail -n +5; ulimit -c; ulimit -n";
        daemon.bash(above).await.expect(0, "0\n4096\n");
    }

    async fn mounts_cannot_be_changed_nor_the_system_written(who) {
        let daemon = Daemon::start(who).await;
        let probe = daemon.put_probe();
        for path in ["/usr/cofferdam-x", "/etc/cofferdam-x", "/cofferdam-x"] {
            assert_eq!(inside(&daemon, &probe, &["create", path]).await, "EROFS", "{path}");
            // Outside it is the directory's mode that refuses, not the mount.
            assert_eq!(outside(&daemon, &["create", path]).await, "EACCES", "{path}");
        }
        for path in ["/workspace/x", "/tmp/x", "/home/agent/x", "/dev/shm/x"] {
            assert_eq!(inside(&daemon, &probe, &["create", path]).await, "ok", "{path}");
        }
        for path in ["/usr", "/", "/workspace", "/proc"] {
            assert_eq!(inside(&daemon, &probe, &["remount", path]).await, "EPERM", "{path}");
            assert_eq!(inside(&daemon, &probe, &["unmount", path]).await, "EPERM", "{path}");
        }
        // Rule off: in a plain namespace of its own the same calls succeed.
        let plain = "mount --bind /usr /usr && mount -o remount,ro,bind /usr && \
                     \"$1\" remount /usr && \"$1\" unmount /usr";
        let program = daemon.workspace.join("probe");
        let mut command = Who::Root.command("unshare");
        command.args(["-m", "bash", "-c", plain, "bash"]).arg(program);
        assert_eq!(run_outside(&mut command).stdout, "ok\nok\n");
        assert_eq!(inside(&daemon, &probe, &["mknod", "/workspace/null"]).await, "EPERM");
        let node = daemon.outside.join("null").display().to_string();
        assert_eq!(by_root(&["mknod", &node]), "ok");
        daemon.bash("unshare -U true").await.expect_code(1);
        daemon.bash("mount -t tmpfs x /tmp").await.expect_code(32);
    }

    async fn renames_and_links_work_in_the_workspace(who) {
        let daemon = Daemon::start(who).await;
        let probe = daemon.put_probe();
        daemon.bash("mkdir -p a b/c; echo x > a/f; mkdir a/d").await.expect(0, "");
        let attempts: [&[&str]; 5] = [
            &["rename", "/workspace/a/f", "/workspace/b/c/f"],
            &["rename", "/workspace/a/d", "/workspace/b/d"],
            &["link", "/workspace/b/c/f", "/workspace/a/hard"],
            &["rename", "/workspace/a/hard", "/workspace/hard"],
            &["link", "/workspace/hard", "/workspace/b/again"],
        ];
        for attempt in attempts {
            assert_eq!(inside(&daemon, &probe, attempt).await, "ok", "{attempt:?}");
        }
        daemon.bash("cat hard; stat -c %h hard; ls b").await.expect(0, "x\n3\nagain\nc\nd\n");
        let across = inside(&daemon, &probe, &["rename", "/workspace/hard", "/tmp/hard"]).await;
        assert_eq!(across, "EXDEV");
        let system = inside(&daemon, &probe, &["link", "/usr/bin/env", "/workspace/env"]).await;
        assert_eq!(system, "EXDEV");
        daemon.bash("mkdir -p /tmp/p /tmp/q ~/p ~/q; touch /tmp/p/f ~/p/f; mv /tmp/p/f /tmp/q/ && mv ~/p/f ~/q/ && echo ok")
            .await
            .expect(0, "ok\n");
    }

    async fn a_terminals_input_cannot_be_pushed(who) {
        let daemon = Daemon::start(who).await;
        let probe = daemon.put_probe();
        let start = v1::StartRequest {
            process: program([probe.as_str(), "push-input"]).process,
            pty: Some(v1::Pty { rows: 24, cols: 80, term: String::new() }),
            session: "test".to_owned(),
            request_id: unique(),
            ..Default::default()
        };
        let mut events = daemon.start_stream(start).await;
        let mut text = String::new();
        while let Some(event) = events.message().await.expect("the stream goes on") {
            if let Some(v1::process_event::Event::Pty(bytes)) = event.event {
                text.push_str(&String::from_utf8_lossy(&bytes));
            }
        }
        assert_eq!(text, "EPERM\r\n");
        // Rule off: on a terminal outside.
        let program = daemon.workspace.join("probe").display().to_string();
        let mut command = Who::Root.command("script");
        command.args(["-qec", &format!("{program} push-input"), "/dev/null"]);
        assert!(run_outside(&mut command).stdout.contains("ok"));
    }

    async fn a_call_can_be_narrowed_to_reading(who) {
        let daemon = Daemon::start(who).await;
        let probe = daemon.put_probe();
        daemon.bash("mkdir d; echo old > f; echo old > d/f").await.expect(0, "");
        let narrowed = |command: &str| v1::ExecuteRequest {
            policy: Some(v1::CallPolicy { workspace_read_only: true }),
            ..bash(command)
        };
        daemon.run(narrowed("cat f d/f; echo x > /tmp/f && echo x > ~/f && cat /tmp/f")).await
            .expect(0, "old\nold\nx\n");
        let before = cofferdam_e2e::snapshot(&daemon.workspace);
        for attempt in ["create /workspace/new", "write /workspace/f", "rename /workspace/f /workspace/g",
            "link /workspace/f /workspace/h"] {
            daemon.bash("rm -f new g h; [ -e f ] || echo old > f").await.expect(0, "");
            let run = daemon.run(narrowed(&format!("{probe} {attempt}"))).await;
            assert!(["EACCES\n", "EROFS\n"].contains(&run.stdout().as_str()), "{attempt}: {run:?}");
        }
        for attempt in ["rm f", "mkdir e", "truncate -s 0 f", "echo x >> f", "ln -s x l", "mkfifo p"] {
            let run = daemon.run(narrowed(attempt)).await;
            assert_ne!(run.code(), Some(0), "{attempt} changes the workspace: {run:?}");
        }
        assert_eq!(cofferdam_e2e::snapshot(&daemon.workspace), before);
        daemon.bash("chmod 600 f && touch new && mkdir e && echo ok").await.expect(0, "ok\n");
    }

    async fn no_file_becomes_set_id(who) {
        let daemon = Daemon::start(who).await;
        let attempts = "import errno, os\n\
            open('f', 'w').close()\n\
            os.chmod('f', 0o755)\n\
            for attempt in [\n\
              lambda: os.chmod('f', 0o4755), lambda: os.chmod('f', 0o2755),\n\
              lambda: os.fchmod(os.open('f', os.O_RDONLY), 0o6755),\n\
              lambda: os.open('g', os.O_CREAT | os.O_WRONLY, 0o4755),\n\
              lambda: os.mknod('h', 0o104755)]:\n\
              \x20try: attempt(); print('done')\n\
              \x20except OSError as error: print(errno.errorcode[error.errno])\n";
        daemon.put_text("attempts.py", attempts);
        daemon.bash("python3 attempts.py").await.expect(0, &"EPERM\n".repeat(5));
        // The same user can do all of it where no filter is.
        let mut outside = who.command("/usr/bin/python3");
        outside.arg("attempts.py").current_dir(&daemon.workspace);
        let output = outside.output().expect("python3 runs");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "done\n".repeat(5));
    }

    async fn a_narrowed_call_cannot_change_modes_times_and_attributes(who) {
        let daemon = Daemon::start(who).await;
        daemon.bash("mkdir d; echo old > f").await.expect(0, "");
        let mut changed = Vec::new();
        for attempt in [
            "chmod 777 f",
            "chmod 700 d",
            "touch -d @0 f",
            "python3 -c 'import os; os.setxattr(\"f\", \"user.x\", b\"1\")'",
        ] {
            let request = v1::ExecuteRequest {
                policy: Some(v1::CallPolicy { workspace_read_only: true }),
                ..bash(attempt)
            };
            let run = daemon.run(request).await;
            if run.code() == Some(0) {
                changed.push(attempt);
            }
            daemon.bash(attempt).await.expect(0, "");
        }
        assert_eq!(changed, Vec::<&str>::new());
    }

    async fn two_cells_share_nothing(who) {
        let (a, b) = (Daemon::start(who).await, Daemon::start(who).await);
        let (probe_a, probe_b) = (a.put_probe(), b.put_probe());
        let name = format!("cofferdam-test-{}", unique());
        let key = (0x5000_0000 + u64::from(std::process::id()) * 4 + u64::from(who == Who::Root)).to_string();
        b.put_text(
            "listen.py",
            format!(
                "import socket, time\n\
                 u = socket.socket(socket.AF_UNIX); u.bind('\\0{name}'); u.listen()\n\
                 t = socket.socket(); t.bind(('127.0.0.1', 0)); t.listen()\n\
                 open('port.new', 'w').write(str(t.getsockname()[1]))\n\
                 import os; os.rename('port.new', 'port'); time.sleep(300)\n"
            ),
        );
        b.bash("python3 listen.py >/dev/null 2>&1 & until [ -e port ]; do sleep 0.02; done; echo b > /tmp/b; echo b > ~/b")
            .await
            .expect(0, "");
        assert_eq!(inside(&b, &probe_b, &["shm-create", &key]).await, "ok");
        let port = b.bash("cat port").await.stdout();
        let address = format!("127.0.0.1:{port}");
        let name = format!("@{name}");
        // Another call of the same cell reaches all of it; the other cell none.
        for (attempt, there, elsewhere) in [
            (["connect-unix", &name], "ok", "ECONNREFUSED"),
            (["connect-tcp", &address], "ok", "ECONNREFUSED"),
            (["shm-get", &key], "ok", "ENOENT"),
            (["open", "/tmp/b"], "ok", "ENOENT"),
            (["open", "/home/agent/b"], "ok", "ENOENT"),
        ] {
            assert_eq!(inside(&b, &probe_b, &attempt).await, there, "{attempt:?}");
            assert_eq!(inside(&a, &probe_a, &attempt).await, elsewhere, "{attempt:?}");
        }
    }

    async fn every_mount_is_nosuid_and_most_are_read_only(who) {
        let daemon = Daemon::start(who).await;
        let mounts = daemon.bash("cut -d' ' -f5,6 /proc/self/mountinfo").await;
        mounts.expect_code(0);
        let stdout = mounts.stdout();
        let mounts: BTreeMap<&str, &str> =
            stdout.lines().filter_map(|line| line.split_once(' ')).collect();
        for (path, options) in &mounts {
            let has = |option: &str| options.split(',').any(|one| one == option);
            let node = path.starts_with("/dev/") && !["/dev/pts", "/dev/shm"].contains(path);
            assert!(has("nosuid") || node, "{path}: {options}");
            assert!(has("nodev") || path.starts_with("/dev"), "{path}: {options}");
            let writable = ["/workspace", "/home/agent", "/tmp", "/proc"].contains(path)
                || path.starts_with("/dev/");
            assert!(has("ro") || writable, "{path}: {options}");
        }
        for path in ["/", "/usr", "/workspace", "/home/agent", "/tmp", "/proc", "/dev/pts", "/dev/shm"] {
            assert!(mounts.contains_key(path), "{path}: {mounts:?}");
        }
        // The kernel gives ns_last_pid to everybody by mode, and takes writes from nobody here.
        let writable = "find /proc/sys /proc/sysrq-trigger /proc/irq /proc/bus -type f -writable 2>/dev/null | grep -v ns_last_pid";
        daemon.bash(&format!("{writable}; true")).await.expect(0, "");
        daemon.bash("echo 5 > /proc/sys/kernel/ns_last_pid").await.expect(1, "");
    }

    async fn supervisors_programs_cannot_be_written(who) {
        let daemon = Daemon::start(who).await;
        let probe = daemon.put_probe();
        assert_eq!(inside(&daemon, &probe, &["write", "/proc/1/exe"]).await, "EACCES");
        daemon.bash(&format!("{probe} write /proc/$PPID/exe; {probe} write /proc/$PPID/mem")).await
            .expect(0, "EACCES\nEACCES\n");
        // A directory that is only a descriptor of ours is none for a call.
        for descriptor in [3, 5, 7, 9, 11] {
            let mut request = bash("pwd");
            let cwd = format!("/proc/self/fd/{descriptor}");
            request.process.as_mut().expect("it has one").cwd = cwd;
            let run = daemon.run(request).await;
            let reason = run.reason();
            let refused = matches!(reason, v1::exit::Reason::SandboxFailed(failed) if failed.step == "cwd");
            assert!(refused, "{descriptor}: {run:?}");
        }
    }

    async fn temporary_files_are_bounded(who) {
        let options = Options { policy: Some("tmp_bytes = 16777216\n".into()), ..Options::default() };
        let daemon = Daemon::start_with(who, options).await;
        let run = daemon.bash("head -c 8000000 /dev/zero > /tmp/a && echo fits; head -c 32000000 /dev/zero > /tmp/b; echo $?").await;
        run.expect(0, "fits\n1\n");
        assert!(run.stderr().contains("No space left on device"), "{run:?}");
        daemon.bash("rm /tmp/a /tmp/b; echo x > /tmp/c && cat /tmp/c").await.expect(0, "x\n");
    }

    async fn the_policys_mounts_are_shown_as_it_says(who) {
        let shared = Decoy::make(Path::new("/var/tmp"));
        let cell_id = if who == Who::Root { 60989 } else { 1000 };
        std::os::unix::fs::chown(&shared.0, Some(cell_id), Some(cell_id)).expect("root can");
        let host = shared.0.display();
        let policy = format!(
            "[[mounts]]\nhost = \"{host}\"\ncell = \"/data/ro\"\n\
             [[mounts]]\nhost = \"{host}\"\ncell = \"/data/rw\"\naccess = \"read-write\"\n"
        );
        let options = Options { policy: Some(policy), ..Options::default() };
        let daemon = Daemon::start_with(who, options).await;
        let probe = daemon.put_probe();
        for (attempt, result) in [
            (["open", "/data/ro/secret"], "ok"),
            (["create", "/data/ro/new"], "EROFS"),
            (["create", "/data/rw/new"], "ok"),
        ] {
            assert_eq!(inside(&daemon, &probe, &attempt).await, result, "{attempt:?}");
        }
        assert!(shared.0.join("new").exists(), "it is on the host");
    }

    async fn every_answer_names_what_is_enforced(who) {
        let daemon = Daemon::start(who).await;
        let run = daemon.bash("true").await;
        let enforced = run.response.enforcement.clone().expect("it is in every answer");
        assert_eq!((enforced.engine.as_str(), enforced.level.as_str()), ("native", "namespaces"));
        assert_eq!(enforced.network, "none");
        assert!(enforced.landlock_abi >= 2);
        assert_eq!((enforced.policy_digest.len(), enforced.seccomp_digest.len()), (32, 32));
        assert_eq!(daemon.workspace_info().await.enforcement, Some(enforced.clone()));
        let capabilities = daemon.workspaces().get_capabilities(v1::GetCapabilitiesRequest {}).await;
        let capabilities = capabilities.expect("it answers").into_inner();
        assert_eq!(capabilities.enforcement, Some(enforced));
        assert!(!capabilities.capabilities.is_empty());
        let limits = capabilities.message_limits.expect("they are advertised");
        assert_eq!(limits.execute_request_bytes, 16 << 20);
        assert_eq!((limits.request_bytes, limits.response_bytes), (1 << 20, 1 << 20));
        assert_eq!(limits.argument_bytes, 131_071);
    }
}

/// Root on a workspace of an ordinary user: the programs are that user, without an id map.
#[test]
fn roots_daemon_serves_an_ordinary_users_workspace_as_that_user() {
    cofferdam_e2e::run(async {
        let options = Options { workspace_owner: Some(1000), ..Options::default() };
        let daemon = Daemon::start_with(Who::Root, options).await;
        daemon.bash("id -u; touch f; stat -c %u f").await.expect(0, "1000\n1000\n");
        use std::os::unix::fs::MetadataExt;
        let meta = daemon.workspace.join("f").metadata().expect("it is on the host");
        assert_eq!(meta.uid(), 1000);
    });
}

/// Root on its own workspace: what the cell makes is root's on disk, and never root's in the cell.
#[test]
fn roots_workspace_is_mapped() {
    cofferdam_e2e::run(async {
        let daemon = Daemon::start(Who::Root).await;
        daemon.put_text("given", "x");
        daemon.bash("id -u; stat -c %u given; touch f; rm given").await.expect(0, "60989\n60989\n");
        use std::os::unix::fs::MetadataExt;
        let meta = daemon.workspace.join("f").metadata().expect("it is on the host");
        assert_eq!((meta.uid(), meta.gid()), (0, 0));
        // A file of a third owner can be read and not be changed.
        daemon.put_text("third", "x");
        std::os::unix::fs::chown(daemon.workspace.join("third"), Some(1234), Some(1234))
            .expect("root");
        let probe = daemon.put_probe();
        let third = inside(&daemon, &probe, &["open", "/workspace/third"]).await;
        assert_eq!(third, "ok");
        assert_eq!(inside(&daemon, &probe, &["write", "/workspace/third"]).await, "EACCES");
    });
}
