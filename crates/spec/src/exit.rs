//! How a process ended, as a sum type: every end has its own name.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The time limits of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TimeLimit {
    /// Time since the start.
    Wall,
    /// Time since the last byte of output.
    Idle,
}

/// Why a process ended. A program that failed is data, never an error of ours.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exit {
    /// It exited with a status from 0 to 255.
    Exited {
        /// The status.
        code: i32,
    },
    /// A signal ended it.
    Signaled {
        /// Signal number.
        number: i32,
        /// Whether the kernel wrote a core file.
        core: bool,
        /// SIGKILL from an unknown sender, on a host without out-of-memory events.
        maybe_oom: bool,
    },
    /// A time limit of the call ended the tree.
    TimedOut {
        /// Which limit.
        limit: TimeLimit,
        /// Its value.
        after: Duration,
    },
    /// The kernel reported that its out-of-memory killer ended it.
    OomKilled,
    /// The tree produced more output than allowed.
    OutputLimit {
        /// The limit in bytes, standard output and standard error together.
        limit_bytes: u64,
    },
    /// Somebody asked for its end.
    Cancelled {
        /// Who: `client`, `session`, `drain`.
        by: String,
    },
    /// The policy refused it.
    Denied {
        /// The rule.
        rule: String,
    },
    /// The cell could not start it.
    SandboxFailed {
        /// The step that failed.
        step: String,
        /// Its errno.
        errno: i32,
    },
    /// The outcome is unknown: the cell ended before it could be reported.
    Lost,
}

impl Exit {
    /// The status a shell would show: the code, or 128 + signal; 124 for a time limit (as
    /// `timeout(1)`), 126 and 127 for a program that could not be executed or found, 125 for
    /// every other failure of the sandbox.
    pub fn shell_status(&self) -> u8 {
        match self {
            Exit::Exited { code } => (*code & 0xff) as u8,
            Exit::Signaled { number, .. } => (128 + (*number & 0x7f)) as u8,
            Exit::TimedOut { .. } => 124,
            Exit::OomKilled | Exit::OutputLimit { .. } => 137,
            Exit::Cancelled { .. } => 130,
            Exit::SandboxFailed { step, errno } if step == "exec" && *errno == 2 => 127,
            Exit::SandboxFailed { step, .. } if step == "exec" => 126,
            Exit::Denied { .. } => 126,
            Exit::SandboxFailed { .. } | Exit::Lost => 125,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shell_status_follows_the_shells_table() {
        let signaled = |number| Exit::Signaled { number, core: false, maybe_oom: false };
        let exec = |errno| Exit::SandboxFailed { step: "exec".into(), errno };
        let table = [
            (Exit::Exited { code: 77 }, 77),
            (signaled(11), 139),
            (Exit::TimedOut { limit: TimeLimit::Wall, after: Duration::from_secs(2) }, 124),
            (exec(2), 127),
            (exec(13), 126),
            (Exit::Lost, 125),
        ];
        for (exit, status) in table {
            assert_eq!(exit.shell_status(), status, "{exit:?}");
        }
    }
}
