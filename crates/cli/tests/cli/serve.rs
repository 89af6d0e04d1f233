//! `cofferdam serve` refuses what cannot be, with the reason, and replaces what is dead.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::MetadataExt as _;
use std::process::{Command, Stdio};

use crate::place::{Ended, Kept, Place, wait_until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Starts `serve` and waits for its line.
fn serve(place: &Place, options: &[&str]) -> (Kept, String) {
    let mut command = place.command("serve");
    command.args(options).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = Kept(command.spawn().unwrap());
    let mut line = String::new();
    BufReader::new(child.0.stderr.take().unwrap()).read_line(&mut line).unwrap();
    (child, line)
}

/// Runs `serve` with exactly these arguments; it must refuse.
fn refused(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cofferdam"));
    let ended = Ended::of(command.arg("serve").args(arguments).output().unwrap());
    assert_eq!((ended.status, ended.stdout.as_str()), (Some(1), ""), "{}", ended.stderr);
    ended.stderr
}

#[test]
fn it_says_one_line_and_ends_gracefully() {
    let place = Place::new();
    let (mut child, line) = serve(&place, &[]);
    let socket = place.state().canonicalize().unwrap().join("daemon.sock");
    let workspace = place.workspace().canonicalize().unwrap();
    assert!(
        line.starts_with(&format!(
            "cofferdam: serving {} (level namespaces, ",
            workspace.display()
        )),
        "{line}"
    );
    assert!(line.ends_with(&format!(", network none) on unix:{}\n", socket.display())), "{line}");
    assert_eq!(fs::metadata(&socket).unwrap().mode() & 0o777, 0o600);
    assert_eq!(fs::metadata(place.state()).unwrap().mode() & 0o777, 0o700);
    kill(Pid::from_raw(child.0.id() as i32), Signal::SIGTERM).unwrap();
    assert_eq!(child.0.wait().unwrap().code(), Some(0));
    assert!(!socket.exists() && !place.state().join("address").exists());
}

#[test]
fn a_second_daemon_is_refused_and_named_the_first() {
    let place = Place::new();
    let (child, _) = serve(&place, &[]);
    let ended = Ended::of(place.command("serve").output().unwrap());
    assert_eq!(ended.status, Some(1));
    let pid = format!("is already served by the daemon with process id {}\n", child.0.id());
    assert!(ended.stderr.ends_with(&pid), "{}", ended.stderr);
}

#[test]
fn the_socket_of_a_dead_daemon_is_replaced() {
    let place = Place::new();
    let (mut child, _) = serve(&place, &[]);
    child.0.kill().unwrap();
    child.0.wait().unwrap();
    assert!(place.state().join("daemon.sock").exists());
    let (_child, line) = serve(&place, &[]);
    assert!(line.starts_with("cofferdam: serving "), "{line}");
    assert_eq!(place.run(&[], &["echo", "x"]), Ended::new(0, "x\n", ""));
}

#[test]
fn what_is_no_dead_socket_is_not_replaced() {
    let place = Place::new();
    let path = place.path().join("file");
    fs::write(&path, "precious").unwrap();
    let listen = format!("unix:{}", path.display());
    let ended = Ended::of(place.command("serve").args(["--listen", &listen]).output().unwrap());
    assert!(ended.stderr.contains("exists and is not a socket"), "{}", ended.stderr);
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");

    let other = place.path().join("other.sock");
    let _other = std::os::unix::net::UnixListener::bind(&other).unwrap();
    let listen = format!("unix:{}", other.display());
    let ended = Ended::of(place.command("serve").args(["--listen", &listen]).output().unwrap());
    assert!(ended.stderr.contains("another server listens on"), "{}", ended.stderr);
}

#[test]
fn every_refusal_names_its_reason() {
    let place = Place::new();
    let path = |name: &str| place.path().join(name).display().to_string();
    let (workspace, state) = (path("workspace"), path("state"));
    fs::write(path("file"), "").unwrap();
    let inside = path("workspace/state");
    let socket = format!("unix:{}", path("workspace/s.sock"));
    let long = format!("unix:/tmp/{}", "x".repeat(200));
    let table: [(&[&str], &str); 8] = [
        (&["--workspace", &path("file")], "is not a directory"),
        (&["--workspace", &path("none")], "No such file or directory"),
        (&["--workspace", "/"], "workspace / is refused"),
        (&["--workspace", &workspace, "--state", &inside], "lies inside the workspace"),
        (&["--workspace", &workspace, "--state", &path("")], "lies inside the state directory"),
        (
            &["--workspace", &workspace, "--state", &state, "--listen", &socket],
            "lies inside the workspace",
        ),
        (
            &["--workspace", &workspace, "--state", &state, "--listen", &long],
            "the kernel takes at most 107",
        ),
        (
            &["--workspace", &workspace, "--state", &state, "--listen", "127.0.0.1:1"],
            "unix sockets only",
        ),
    ];
    for (arguments, reason) in table {
        let said = refused(arguments);
        assert!(said.contains(reason), "{arguments:?}: {said}");
    }
    assert!(!place.state().exists(), "a refusal leaves nothing");
}

#[test]
fn a_second_signal_ends_at_once() {
    let place = Place::new();
    let (mut child, _) = serve(&place, &["--drain-grace", "1h"]);
    let seconds = crate::place::unique_seconds();
    let _call = Kept(place.exec(&[], &["sleep", &seconds]).stderr(Stdio::null()).spawn().unwrap());
    wait_until("the call runs", || crate::place::processes_with(&seconds) == 1);
    let pid = Pid::from_raw(child.0.id() as i32);
    kill(pid, Signal::SIGTERM).unwrap();
    wait_until("the address is withdrawn", || !place.state().join("address").exists());
    assert!(child.0.try_wait().unwrap().is_none(), "it drains");
    kill(pid, Signal::SIGTERM).unwrap();
    assert_eq!(child.0.wait().unwrap().code(), Some(143));
    wait_until("the cell has ended", || crate::place::processes_with(&seconds) == 0);
}
