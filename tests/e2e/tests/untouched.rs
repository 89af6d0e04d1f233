//! The host's own files: a cell leaves no trace in the workspace or beside it.
#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use cofferdam_e2e::{CellTrace, Daemon, both, snapshot, wait_for, within};
use nix::sys::signal::Signal;

fn furnish(daemon: &Daemon) {
    let workspace = &daemon.workspace;
    fs::create_dir_all(workspace.join("src/deep/er")).expect("directories");
    fs::create_dir_all(workspace.join(".git/hooks")).expect("directories");
    for (name, text) in [
        ("README", "text"),
        ("src/main.c", "int main(void) { return 0; }\n"),
        (".git/config", "[core]\n\tbare = false\n"),
        (".git/hooks/pre-commit", "#!/bin/sh\n"),
        (".envrc", "export A=1\n"),
    ] {
        fs::write(workspace.join(name), text).expect("a file");
    }
    symlink("README", workspace.join("link")).expect("a link");
    symlink("/nonexistent", workspace.join("dangling")).expect("a link");
    fs::hard_link(workspace.join("README"), workspace.join("hard")).expect("a hard link");
    give(workspace, daemon.who.id());
}

fn give(path: &Path, id: u32) {
    std::os::unix::fs::lchown(path, Some(id), Some(id)).expect("root can");
    if path.is_dir() && !path.is_symlink() {
        for entry in fs::read_dir(path).expect("it can be listed").flatten() {
            give(&entry.path(), id);
        }
    }
}

/// Workspace, the directory beside it, and the names in their parent.
fn seen(daemon: &Daemon) -> Vec<String> {
    let mut lines = snapshot(&daemon.workspace);
    lines.extend(snapshot(&daemon.outside));
    let mut names: Vec<String> = fs::read_dir(daemon.directory())
        .expect("it can be listed")
        .flatten()
        .map(|entry| entry.path().display().to_string())
        .collect();
    names.sort();
    lines.extend(names);
    lines
}

both! {
    async fn a_call_that_changes_nothing_changes_nothing(who) {
        let daemon = Daemon::start(who).await;
        furnish(&daemon);
        let before = seen(&daemon);
        daemon.bash("true").await.expect(0, "");
        daemon.bash("ls -laR . >/dev/null; cat README src/main.c").await.expect_code(0);
        assert_eq!(seen(&daemon), before);
        // Positive control: a change is seen.
        daemon.bash("chmod 700 src").await.expect(0, "");
        assert_ne!(seen(&daemon), before);
        daemon.bash("chmod 755 src").await.expect(0, "");
        let before_stop = seen(&daemon);
        assert_eq!(before_stop, before);
    }

    async fn a_killed_daemon_changes_nothing(who) {
        let mut daemon = Daemon::start(who).await;
        furnish(&daemon);
        let before = seen(&daemon);
        daemon.bash("true").await.expect(0, "");
        let trace = CellTrace::of(daemon.pid);
        daemon.signal(Signal::SIGKILL);
        daemon.ended().await;
        wait_for("the cell is gone", within(1.0), || trace.left().is_empty().then_some(())).await;
        assert_eq!(seen(&daemon), before);
    }
}
