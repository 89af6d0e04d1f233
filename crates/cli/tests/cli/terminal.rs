//! `cofferdam exec` on a terminal.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use crate::place::{Kept, Place, wait_until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

/// A terminal with `cofferdam exec` on it.
struct Terminal {
    child: Kept,
    keyboard: File,
    screen: Arc<Mutex<String>>,
    line: File,
}

impl Terminal {
    fn start(place: &Place, argv: &[&str]) -> Self {
        let master =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let line = File::options().read(true).write(true).open(name).unwrap();
        resize(&line, 30, 100);
        let mut command = place.exec(&[], argv);
        let copy = || Stdio::from(line.try_clone().unwrap());
        command.stdin(copy()).stdout(copy()).stderr(copy()).env("TERM", "vt100");
        let child = Kept(command.spawn().unwrap());
        let screen = Arc::new(Mutex::new(String::new()));
        watch(master.try_clone().unwrap(), screen.clone());
        Self { child, keyboard: File::from(master), screen, line }
    }

    fn type_in(&mut self, text: &str) {
        self.keyboard.write_all(text.as_bytes()).unwrap();
    }

    fn wait_for(&self, text: &str) {
        wait_until(&format!("{text:?} is shown"), || self.screen.lock().unwrap().contains(text));
    }

    fn echoes(&self) -> bool {
        tcgetattr(&self.line).unwrap().local_modes.contains(LocalModes::ECHO)
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.0.id() as i32)
    }
}

fn watch(master: OwnedFd, screen: Arc<Mutex<String>>) {
    std::thread::spawn(move || {
        let mut master = File::from(master);
        let mut chunk = [0; 4096];
        while let Ok(count @ 1..) = master.read(&mut chunk) {
            screen.lock().unwrap().push_str(&String::from_utf8_lossy(&chunk[..count]));
        }
    });
}

fn resize(line: &File, rows: u16, cols: u16) {
    let size = Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(line, size).unwrap();
}

#[test]
fn a_program_on_a_terminal_sees_one_of_its_own_and_ours_is_restored() {
    let place = Place::new();
    let script = "tty; stty size; echo $TERM; read -r line; echo \"line: $line\"; exit 4";
    let mut terminal = Terminal::start(&place, &["bash", "-c", script]);
    terminal.wait_for("/dev/pts/");
    terminal.wait_for("30 100\r\n");
    terminal.wait_for("vt100\r\n");
    assert!(!terminal.echoes(), "our terminal is raw, the program's own one echoes");
    terminal.type_in("hello\r");
    terminal.wait_for("line: hello\r\n");
    assert_eq!(terminal.child.0.wait().unwrap().code(), Some(4));
    assert!(terminal.echoes());
}

#[test]
fn control_c_goes_through_the_programs_terminal() {
    let place = Place::new();
    let script = "trap 'echo interrupted; exit 9' INT; echo ready; while :; do sleep 0.05; done";
    let mut terminal = Terminal::start(&place, &["bash", "-c", script]);
    terminal.wait_for("ready");
    terminal.type_in("\x03");
    terminal.wait_for("interrupted");
    assert_eq!(terminal.child.0.wait().unwrap().code(), Some(9));
    assert!(terminal.echoes());
}

#[test]
fn a_new_size_reaches_the_program() {
    let place = Place::new();
    let script = "trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.05; done";
    let mut terminal = Terminal::start(&place, &["bash", "-c", script]);
    terminal.wait_for("ready");
    resize(&terminal.line, 41, 123);
    // The kernel sends it to the terminal's foreground group; this one controls nobody.
    kill(terminal.pid(), Signal::SIGWINCH).unwrap();
    terminal.wait_for("41 123\r\n");
    assert_eq!(terminal.child.0.wait().unwrap().code(), Some(0));
}

#[test]
fn the_terminal_is_restored_when_the_daemon_dies() {
    let place = Place::new();
    let mut terminal = Terminal::start(&place, &["sh", "-c", "echo ready; sleep 60"]);
    terminal.wait_for("ready");
    place.end_daemon(Signal::SIGKILL);
    assert_eq!(terminal.child.0.wait().unwrap().code(), Some(125));
    assert!(terminal.echoes());
    terminal.wait_for("outcome unknown");
}
