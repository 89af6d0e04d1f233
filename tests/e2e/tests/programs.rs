//! Real programs do their real work in a cell.
#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use cofferdam_e2e::{Daemon, Options, both, run_outside};

/// Runs a script that must print what is expected and succeed.
async fn works(daemon: &Daemon, script: &str, expected: &str) {
    daemon.bash_timeout(&format!("set -e\n{script}"), 120.0).await.expect(0, expected);
}

/// The Rust toolchain in a directory that everybody may read: the very files, by hard links where
/// the file system allows it.
fn toolchain(target: &Path) -> PathBuf {
    let sysroot = run_outside(Command::new("rustc").args(["--print", "sysroot"])).stdout;
    let target = target.join("toolchain");
    fs::create_dir(&target).expect("a directory");
    for part in ["bin", "lib"] {
        let from = Path::new(sysroot.trim()).join(part);
        let linked = Command::new("cp").args(["-al"]).arg(&from).arg(&target).status();
        if !linked.is_ok_and(|status| status.success()) {
            let _ = fs::remove_dir_all(target.join(part));
            run_outside(Command::new("cp").args(["-a"]).arg(&from).arg(&target));
        }
    }
    target
}

both! {
    async fn git(who) {
        let policy = "[git]\nname = \"Agent\"\nemail = \"agent@example.invalid\"\n";
        let daemon = Daemon::start_with(who, Options { policy: Some(policy.into()), ..Options::default() }).await;
        works(
            &daemon,
            "git init -q -b main repository; cd repository; echo one > file; git add file; \
             git commit -q -m first; echo two >> file; git commit -q -a -m second; \
             git checkout -q -b topic HEAD~1; echo other > other; git add .; git commit -q -m third; \
             git merge -q -m merged main; git worktree add -q ../tree main; git gc -q; \
             git clone -q . ../clone; git log --format='%an %s' | sort; git status --short",
            "Agent first\nAgent merged\nAgent second\nAgent third\n",
        )
        .await;
        // A repository that root or the user made before is trusted.
        let mut make = who.command("git");
        run_outside(make.args(["init", "-q"]).arg(daemon.workspace.join("given")));
        works(&daemon, "cd given; git status --short; git rev-parse --is-inside-work-tree", "true\n").await;
    }

    async fn cargo_check(who) {
        let tools = tempfile::Builder::new()
            .prefix("cofferdam-test-tools-")
            .permissions(fs::Permissions::from_mode(0o755))
            .tempdir_in("/tmp")
            .expect("a temporary directory");
        let host = toolchain(tools.path());
        let policy = format!(
            "[[mounts]]\nhost = \"{}\"\ncell = \"/opt/rust\"\n\n[env]\n\
             path = \"/opt/rust/bin:/usr/local/bin:/usr/bin:/bin\"\n",
            host.display()
        );
        let options = Options { policy: Some(policy), ..Options::default() };
        let daemon = Daemon::start_with(who, options).await;
        works(
            &daemon,
            "cargo init -q --name small --vcs none small; cd small; \
             printf 'pub fn f() -> u32 { 7 }\\n' > src/lib.rs; \
             printf 'fn main() { println!(\"{}\", small::f()); }\\n' > src/main.rs; \
             cargo check -q --offline; cargo run -q --offline",
            "7\n",
        )
        .await;
        let run = daemon.bash("touch /opt/rust/bin/x; echo $?; [ -w /opt/rust/bin ] || echo read-only").await;
        run.expect(0, "1\nread-only\n");
        assert!(run.stderr().contains("Read-only file system"), "{run:?}");
    }

    async fn python_with_multiprocessing(who) {
        let daemon = Daemon::start(who).await;
        daemon.put_text(
            "pool.py",
            "import multiprocessing as m, threading, tempfile, concurrent.futures as c\n\
             def f(x): return x * x\n\
             if __name__ == '__main__':\n\
             \x20for method in ('fork', 'spawn', 'forkserver'):\n\
             \x20 with m.get_context(method).Pool(4) as p: print(method, sum(p.map(f, range(100))))\n\
             \x20q = m.Queue(); q.put(1); print(q.get())\n\
             \x20with c.ThreadPoolExecutor(8) as e: print(sum(e.map(f, range(10))))\n\
             \x20from multiprocessing import shared_memory as s\n\
             \x20b = s.SharedMemory(create=True, size=4096); b.buf[0] = 9; print(b.buf[0]); b.close(); b.unlink()\n\
             \x20print(tempfile.gettempdir())\n",
        );
        works(
            &daemon,
            "python3 pool.py",
            "fork 328350\nspawn 328350\nforkserver 328350\n1\n285\n9\n/tmp\n",
        )
        .await;
    }

    async fn node_workers(who) {
        let daemon = Daemon::start(who).await;
        daemon.put_text(
            "workers.js",
            "const { Worker, isMainThread, parentPort } = require('worker_threads');\n\
             const { execFileSync } = require('child_process'); const http = require('http');\n\
             if (!isMainThread) { parentPort.postMessage(7); } else {\n\
             const one = () => new Promise((r, e) => { const w = new Worker(__filename); w.on('message', r); w.on('error', e); });\n\
             Promise.all(Array.from({ length: 8 }, one)).then(v => {\n\
             console.log(v.reduce((a, b) => a + b)); console.log(execFileSync('echo', ['child']).toString().trim());\n\
             const s = http.createServer((q, r) => r.end('served')).listen(0, '127.0.0.1', () =>\n\
             http.get({ port: s.address().port, host: '127.0.0.1' }, r => r.on('data', d => { console.log(d.toString()); s.close(); })));\n\
             }); }\n",
        );
        works(&daemon, "node workers.js", "56\nchild\nserved\n").await;
    }

    async fn gcc_and_make(who) {
        let daemon = Daemon::start(who).await;
        works(
            &daemon,
            "for i in $(seq 12); do printf 'int f%d(void) { return %d; }\\n' $i $i > f$i.c; done; \
             { for i in $(seq 12); do echo \"int f$i(void);\"; done; echo '#include <stdio.h>'; \
               echo 'int main(void) { int s = 0;'; for i in $(seq 12); do echo \"s += f$i();\"; done; \
               echo 'printf(\"%d\\n\", s); return 0; }'; } > main.c; \
             printf 'O := $(patsubst %%.c,%%.o,$(wildcard *.c))\\nall: $(O)\\n\\t$(CC) -o all $(O)\\n' > Makefile; \
             make -s -j4; ./all",
            "78\n",
        )
        .await;
    }

    async fn tar_and_ssh_keygen(who) {
        let daemon = Daemon::start(who).await;
        works(
            &daemon,
            "mkdir -p a/b; echo text > a/b/f; ln -s f a/b/l; chmod 750 a/b; tar czf a.tgz a; \
             mkdir out; tar xzf a.tgz -C out; cat out/a/b/l; stat -c %a out/a/b; \
             tar cf - a | tar tf - | sort",
            "text\n750\na/\na/b/\na/b/f\na/b/l\n",
        )
        .await;
        works(
            &daemon,
            "ssh-keygen -q -t ed25519 -N '' -C agent -f key; cut -d' ' -f1,3 key.pub; stat -c %a key; \
             mkdir -p ~/.ssh; cp key ~/.ssh/id; ssh-keygen -y -f ~/.ssh/id | cut -d' ' -f1",
            "ssh-ed25519 agent\n600\nssh-ed25519\n",
        )
        .await;
    }

    async fn tmux(who) {
        let daemon = Daemon::start(who).await;
        works(
            &daemon,
            "tmux -L own new-session -d -s work -x 80 -y 24 'echo in tmux > drawn; tty >> drawn; exec sleep 300'; \
             until [ -s drawn ] && [ $(wc -l < drawn) = 2 ]; do sleep 0.02; done; head -1 drawn; \
             tail -1 drawn | cut -c1-9; tmux -L own list-sessions -F '#{session_name}'; \
             tmux -L own kill-server; tmux -L own list-sessions 2>/dev/null || echo gone",
            "in tmux\n/dev/pts/\nwork\ngone\n",
        )
        .await;
    }

    async fn ps_free_and_uptime(who) {
        let daemon = Daemon::start(who).await;
        let run = daemon.bash("set -e; sleep 313 & ps aux; ps -ef >/dev/null; free -m; uptime; nproc; kill $!").await;
        run.expect_code(0);
        let stdout = run.stdout();
        for part in ["sleep 313", "ps aux", "Mem:", "load average"] {
            assert!(stdout.contains(part), "{part}: {stdout}");
        }
        assert!(!stdout.contains("cofferdam serve"), "{stdout}");
    }

    async fn shell_plumbing(who) {
        let daemon = Daemon::start(who).await;
        works(
            &daemon,
            "diff <(echo a) <(echo a) && echo same; cat <(echo x) | tee >(cat >/dev/null); \
             mkfifo p; (echo through > p &); cat p; coproc C { while read -r y; do echo ${y^^}; done; }; echo up >&${C[1]}; \
             read -r x <&${C[0]}; echo $x; echo $((1 << 40)); printf '%s\\n' /dev/fd/0; \
             echo here <<< string; cat <<< string",
            "same\nx\nthrough\nUP\n1099511627776\n/dev/fd/0\nhere\nstring\n",
        )
        .await;
    }

    async fn the_home_directory_is_kept_and_tmp_is_not(who) {
        let daemon = Daemon::start(who).await;
        works(&daemon, "echo kept > ~/kept; echo x > /tmp/x; cat /tmp/x; df -k /tmp | tail -1 | awk '{print $1}'; \
            stat -c %a /tmp; dd if=/dev/zero of=/dev/shm/x bs=1k count=8 2>/dev/null; stat -c %s /dev/shm/x",
            "x\ntmpfs\n1777\n8192\n").await;
        works(&daemon, "cat ~/kept /tmp/x", "kept\nx\n").await;
    }
}
