//! The standard streams of a call, made inside the cell: pipes and terminals belong to the cell's
//! user, so that a program can open `/dev/stdout` again.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::pipe::{PipeFlags, pipe_with};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::protocol::Stdio;

/// Both sides of a call's streams.
#[derive(Debug)]
pub(crate) struct Streams {
    /// Standard input, output and error; one terminal stands for all three.
    program: Vec<OwnedFd>,
    /// What the daemon gets, non-blocking.
    daemon: Vec<OwnedFd>,
}

impl Streams {
    /// Opens what `stdio` asks for; `null` stands in where no standard input is wanted.
    pub(crate) fn open(stdio: Stdio, null: BorrowedFd<'_>) -> io::Result<Self> {
        match stdio {
            Stdio::Pipes { stdin } => {
                let (stdout, stdout_program) = pipe()?;
                let (stderr, stderr_program) = pipe()?;
                let (input, input_program) = if stdin {
                    let (program, daemon) = pipe()?;
                    (Some(daemon), program)
                } else {
                    (None, null.try_clone_to_owned()?)
                };
                let daemon: Vec<_> = input.into_iter().chain([stdout, stderr]).collect();
                for end in &daemon {
                    rustix::io::ioctl_fionbio(end, true)?;
                }
                Ok(Self { program: vec![input_program, stdout_program, stderr_program], daemon })
            }
            Stdio::Pty(size) => {
                let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
                let master = openpt(flags)?;
                unlockpt(&master)?;
                let terminal = ioctl_tiocgptpeer(&master, flags)?;
                tcsetwinsize(
                    &master,
                    Winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 },
                )?;
                rustix::io::ioctl_fionbio(&master, true)?;
                Ok(Self { program: vec![terminal], daemon: vec![master] })
            }
        }
    }

    /// Standard input, output and error of the program.
    pub(crate) fn program_ends(&self) -> Vec<BorrowedFd<'_>> {
        let last = self.program.len().saturating_sub(1);
        (0..3).filter_map(|index| self.program.get(index.min(last))).map(AsFd::as_fd).collect()
    }

    /// Gives the daemon's ends away and closes the program's, so that the program alone holds
    /// them.
    pub(crate) fn take_daemon_ends(&mut self) -> Vec<OwnedFd> {
        self.program.clear();
        std::mem::take(&mut self.daemon)
    }
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(pipe_with(PipeFlags::CLOEXEC)?)
}
