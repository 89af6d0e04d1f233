//! What a person reads: complaints, hints, exit reasons, enforcement.

use std::io::Write as _;

use cofferdam_spec::{Enforcement, Exit, TimeLimit};
use nix::errno::Errno;

/// Prints a complaint. A standard error that cannot be written is no reason to fail otherwise.
pub(crate) fn complain(text: &str) {
    let _ = writeln!(std::io::stderr(), "cofferdam: {text}");
}

/// Prints what would help.
pub(crate) fn hint(text: &str) {
    let _ = writeln!(std::io::stderr(), "hint: {text}");
}

/// The level and what it consists of, in a few words.
pub(crate) fn enforcement(enforcement: &Enforcement) -> String {
    format!(
        "level {}, Landlock ABI {}, network {}",
        enforcement.level.as_str(),
        enforcement.landlock_abi,
        enforcement.network.as_str()
    )
}

/// Bytes as lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What to tell about an end that the exit status alone does not explain.
pub(crate) fn exit(exit: &Exit, program: &str, cwd: &str) -> Option<String> {
    let because = |errno: i32| Errno::from_raw(errno).desc();
    Some(match exit {
        Exit::Exited { .. } | Exit::Signaled { maybe_oom: false, .. } => return None,
        Exit::Signaled { number, maybe_oom: true, .. } => {
            format!("{program}: ended by signal {number}; memory may have run out")
        }
        Exit::TimedOut { limit, after } => {
            let limit = match limit {
                TimeLimit::Wall => "after",
                TimeLimit::Idle => "after no output for",
            };
            format!("{program}: timed out {limit} {after:?}")
        }
        Exit::OomKilled => format!("{program}: ended because memory ran out"),
        Exit::OutputLimit { limit_bytes } => {
            format!("{program}: ended because it printed more than {limit_bytes} bytes")
        }
        Exit::Cancelled { by } => format!("{program}: cancelled by {by}"),
        Exit::Denied { rule } => format!("{program}: denied by {rule}"),
        Exit::SandboxFailed { step, errno } if step == "exec" => {
            format!("{program}: {}", because(*errno))
        }
        Exit::SandboxFailed { step, errno } if step == "cwd" => {
            format!("directory {cwd}: {}", because(*errno))
        }
        Exit::SandboxFailed { step, errno } => {
            format!("{program}: the cell could not start it, step {step}: {}", because(*errno))
        }
        Exit::Lost => format!("{program}: outcome unknown, its supervisor or cell has ended"),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn ends_that_the_status_explains_are_not_commented() {
        assert_eq!(exit(&Exit::Exited { code: 1 }, "ls", "/"), None);
        let killed = Exit::Signaled { number: 9, core: false, maybe_oom: false };
        assert_eq!(exit(&killed, "ls", "/"), None);
    }

    #[test]
    fn a_failed_start_names_what_failed() {
        let failed = |step: &str, errno| Exit::SandboxFailed { step: step.into(), errno };
        let table = [
            (failed("exec", 2), "no-such: No such file or directory"),
            (failed("exec", 13), "no-such: Permission denied"),
            (failed("cwd", 2), "directory /x: No such file or directory"),
            (
                Exit::TimedOut { limit: TimeLimit::Wall, after: Duration::from_secs(2) },
                "no-such: timed out after 2s",
            ),
        ];
        for (reason, text) in table {
            assert_eq!(exit(&reason, "no-such", "/x").as_deref(), Some(text));
        }
    }
}
