//! Programs on a terminal.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use cofferdam_e2e::{Daemon, bash, both, program, unique, within};
use cofferdam_proto::v1;
use cofferdam_proto::v1::exit::Reason;
use cofferdam_proto::v1::process_event::Event;

/// A program on a terminal, with what it has drawn so far.
struct Terminal<'a> {
    daemon: &'a Daemon,
    events: tonic::Streaming<v1::ProcessEvent>,
    process_id: String,
    drawn: String,
    exit: Option<Reason>,
}

impl<'a> Terminal<'a> {
    async fn start(daemon: &'a Daemon, request: v1::ExecuteRequest) -> Terminal<'a> {
        let start = v1::StartRequest {
            process: request.process,
            pty: Some(v1::Pty { rows: 24, cols: 80, term: String::new() }),
            session: "test".to_owned(),
            request_id: unique(),
            ..Default::default()
        };
        let mut events = daemon.start_stream(start).await;
        let first = events.message().await.expect("the stream goes on").expect("a first event");
        let Some(Event::Started(started)) = first.event else {
            panic!("`started` first: {first:?}")
        };
        Terminal {
            daemon,
            events,
            process_id: started.process_id,
            drawn: String::new(),
            exit: None,
        }
    }

    /// Reads until the terminal shows `text`.
    async fn until(&mut self, text: &str) {
        let start = Instant::now();
        while !self.drawn.contains(text) {
            assert!(self.exit.is_none(), "it ended before {text:?}: {:?}", self.drawn);
            let left = within(10.0).saturating_sub(start.elapsed());
            let next = tokio::time::timeout(left, self.next()).await;
            next.unwrap_or_else(|_| panic!("never drew {text:?}: {:?}", self.drawn));
        }
    }

    /// Forgets what was drawn.
    fn clear(&mut self) {
        self.drawn.clear();
    }

    async fn next(&mut self) {
        match self.events.message().await.expect("the stream goes on") {
            Some(event) => match event.event {
                Some(Event::Pty(bytes)) => self.drawn.push_str(&String::from_utf8_lossy(&bytes)),
                Some(Event::Exit(exit)) => self.exit = exit.reason,
                Some(Event::Keepalive(_)) => {}
                other => panic!("a terminal has one stream: {other:?}"),
            },
            None => panic!("the stream ended without an exit: {:?}", self.drawn),
        }
    }

    async fn write(&self, text: &str) {
        let request = v1::WriteStdinRequest {
            process_id: self.process_id.clone(),
            data: text.to_owned().into(),
            request_id: unique(),
            offset: None,
        };
        self.daemon.processes().write_stdin(request).await.expect("the terminal takes it");
    }

    async fn ended(mut self) -> Reason {
        loop {
            if let Some(exit) = self.exit {
                return exit;
            }
            let next = tokio::time::timeout(within(10.0), self.next()).await;
            next.unwrap_or_else(|_| panic!("it did not end: {:?}", self.drawn));
        }
    }
}

fn exited(code: i32) -> Reason {
    Reason::Exited(v1::Exited { code })
}

both! {
    async fn a_program_has_a_terminal(who) {
        let daemon = Daemon::start(who).await;
        let mut terminal = Terminal::start(
            &daemon,
            bash("tty; stty size; echo $TERM; [ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo all; \
                  stat -c '%U %a' $(tty); echo x >/dev/tty; ps -o tty= -p $$; echo END"),
        )
        .await;
        terminal.until("END\r\n").await;
        let lines: Vec<String> = terminal.drawn.split("\r\n").map(str::to_owned).collect();
        assert!(lines[0].starts_with("/dev/pts/"), "{lines:?}");
        assert_eq!(lines[1..4], ["24 80", "xterm-256color", "all"]);
        assert!(lines[4].starts_with("agent 6"), "{lines:?}");
        assert_eq!(lines[5], "x");
        assert_eq!(lines[6], lines[0].trim_start_matches("/dev/"));
        assert_eq!(terminal.ended().await, exited(0));
        // Without one, the same program says so.
        daemon.bash("tty").await.expect(1, "not a tty\n");
    }

    async fn ctrl_c_interrupts(who) {
        let daemon = Daemon::start(who).await;
        let mut terminal = Terminal::start(&daemon, bash("echo ready; exec sleep 300")).await;
        terminal.until("ready\r\n").await;
        terminal.write("\u{3}").await;
        match terminal.ended().await {
            Reason::Signaled(signaled) => assert_eq!(signaled.number, nix::libc::SIGINT),
            other => panic!("{other:?}"),
        }
    }

    async fn a_resize_is_seen(who) {
        let daemon = Daemon::start(who).await;
        let command = "trap 'stty size' WINCH; stty size; while read -r x; do stty size; done";
        let mut terminal = Terminal::start(&daemon, bash(command)).await;
        terminal.until("24 80\r\n").await;
        let resize = v1::ResizePtyRequest {
            process_id: terminal.process_id.clone(),
            rows: 40,
            cols: 132,
            request_id: unique(),
        };
        daemon.processes().resize_pty(resize).await.expect("it answers");
        terminal.write("\n").await;
        terminal.until("40 132\r\n").await;
        terminal.write("\u{4}").await;
        assert_eq!(terminal.ended().await, exited(0));
    }

    async fn an_editor_is_drawn_and_quit(who) {
        let daemon = Daemon::start(who).await;
        let mut terminal =
            Terminal::start(&daemon, program(["vi", "-u", "NONE", "-i", "NONE", "-n", "edited.txt"])).await;
        terminal.until("edited.txt").await;
        // It went to the alternative screen, or cleared this one.
        assert!(terminal.drawn.contains("\u{1b}["), "{:?}", terminal.drawn);
        terminal.write("ihello from the cell\u{1b}").await;
        terminal.until("hello from the cell").await;
        terminal.write(":wq\r").await;
        assert_eq!(terminal.ended().await, exited(0));
        let text = std::fs::read_to_string(daemon.workspace.join("edited.txt")).expect("it was saved");
        assert_eq!(text, "hello from the cell\n");
    }

    async fn job_control_works(who) {
        let daemon = Daemon::start(who).await;
        let mut terminal = Terminal::start(
            &daemon,
            program(["/bin/bash", "--noprofile", "--norc", "-i"]),
        )
        .await;
        terminal.write("PS1=pro''mpt:\n").await;
        terminal.until("prompt:").await;
        assert!(!terminal.drawn.contains("no job control"), "{:?}", terminal.drawn);
        terminal.clear();
        terminal.write("sleep 311\n").await;
        cofferdam_e2e::wait_for("it sleeps", Duration::from_secs(5), || {
            daemon.marked("sleep 311").first().map(|_| ())
        })
        .await;
        terminal.write("\u{1a}").await;
        terminal.until("Stopped").await;
        terminal.until("prompt:").await;
        terminal.clear();
        terminal.write("jobs; bg; jobs; kill %1; wait; echo rc=$?\n").await;
        terminal.until("rc=0\r\n").await;
        terminal.until("prompt:").await;
        assert!(terminal.drawn.contains("Stopped"), "{:?}", terminal.drawn);
        assert!(terminal.drawn.contains("Running"), "{:?}", terminal.drawn);
        terminal.clear();
        // What is typed before the shell hands the terminal over is not a line of cat's.
        terminal.write("sh -c 'echo re\"\"ady; exec cat'\n").await;
        terminal.until("ready\r\n").await;
        terminal.write("echoed twice\n").await;
        terminal.until("echoed twice\r\nechoed twice\r\n").await;
        terminal.clear();
        terminal.write("\u{3}").await;
        terminal.until("prompt:").await;
        terminal.write("exit 9\n").await;
        assert_eq!(terminal.ended().await, exited(9));
    }

    async fn a_background_job_does_not_hold_the_terminals_end(who) {
        let daemon = Daemon::start(who).await;
        let terminal = Terminal::start(&daemon, bash("setsid sleep 312 & exit 4")).await;
        assert_eq!(terminal.ended().await, exited(4));
    }
}
