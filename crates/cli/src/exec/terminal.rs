//! The terminal that this process stands on.

use std::io;

use cofferdam_spec::PtySize;
use rustix::stdio::{stdin, stdout};
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};

/// Size of a terminal that does not say its own, as every terminal once had it.
const FALLBACK_SIZE: PtySize = PtySize { rows: 24, cols: 80 };

/// Whether a person sits at both ends.
pub(crate) fn both_are_terminals() -> bool {
    isatty(stdin()) && isatty(stdout())
}

/// The terminal's size now.
pub(crate) fn size() -> PtySize {
    let size = tcgetwinsize(stdout()).or_else(|_| tcgetwinsize(stdin()));
    match size {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => {
            PtySize { rows: size.ws_row, cols: size.ws_col }
        }
        _ => FALLBACK_SIZE,
    }
}

/// Value of TERM; empty leaves the choice to the daemon.
pub(crate) fn name() -> String {
    std::env::var("TERM").unwrap_or_default()
}

/// The terminal passes every byte on while this lives, and is restored when it is dropped, also
/// when a panic unwinds.
pub(crate) struct RawMode {
    before: Termios,
}

impl RawMode {
    /// Changes the terminal of standard input.
    pub(crate) fn enter() -> io::Result<Self> {
        let before = tcgetattr(stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(stdin(), OptionalActions::Now, &raw)?;
        Ok(Self { before })
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // A terminal that has hung up has nothing to restore.
        let _ = tcsetattr(stdin(), OptionalActions::Now, &self.before);
    }
}
