//! What to run.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Longest argument or `NAME=value`, in bytes: Linux's MAX_ARG_STRLEN (128 KiB) less the NUL.
pub const ARGUMENT_BYTES_MAX: usize = 131_071;

/// Arguments and environment together, in bytes, each with its NUL and pointer: a quarter of the
/// 8 MiB stack limit that every program of the cell starts with, less room for the kernel's own
/// use (see `execve(2)`, "Limits on size of arguments and environment").
pub const ARGUMENTS_BYTES_MAX: usize = 2 * 1024 * 1024 - 8192;

/// Longest path, in bytes: Linux's PATH_MAX less the NUL.
pub const PATH_BYTES_MAX: usize = 4095;

/// Size of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PtySize {
    /// Rows, at least 1.
    pub rows: u16,
    /// Columns, at least 1.
    pub cols: u16,
}

/// A validated program with its arguments, environment and directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    argv: Vec<String>,
    env: BTreeMap<String, String>,
    cwd: String,
}

/// Why a command was refused. Nothing has run.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CommandError {
    /// There is no program.
    #[error("command is empty: its first element is the program")]
    Empty,
    /// The program's name is the empty string.
    #[error("command[0] is empty: it names the program")]
    EmptyProgram,
    /// A string holds a NUL byte, which no argument can carry.
    #[error("{field} holds a NUL byte at {index}")]
    Nul {
        /// `command[i]`, `env[NAME]` or `cwd`.
        field: String,
        /// Position of the first NUL.
        index: usize,
    },
    /// One argument or variable is longer than the kernel takes.
    #[error("{field} is {length} bytes long, the limit is {ARGUMENT_BYTES_MAX}")]
    ArgumentTooLong {
        /// `command[i]` or `env[NAME]`.
        field: String,
        /// Its length.
        length: usize,
    },
    /// All arguments and variables together are longer than the kernel takes.
    #[error("command and env take {length} bytes together, the limit is {ARGUMENTS_BYTES_MAX}")]
    ArgumentsTooLong {
        /// Their length.
        length: usize,
    },
    /// A variable's name is empty or holds `=`.
    #[error("env name {name:?} is empty or holds '='")]
    EnvName {
        /// The name.
        name: String,
    },
    /// The directory is not absolute.
    #[error("cwd {cwd:?} is not an absolute path")]
    CwdRelative {
        /// The path.
        cwd: String,
    },
    /// A path is longer than the kernel takes.
    #[error("{field} is {length} bytes long, the limit of a path is {PATH_BYTES_MAX}")]
    PathTooLong {
        /// `cwd` or `command[0]`.
        field: &'static str,
        /// Its length.
        length: usize,
    },
}

impl CommandError {
    /// The request's field that is wrong, below `process`.
    pub fn field(&self) -> &str {
        match self {
            Self::Empty | Self::ArgumentsTooLong { .. } => "command",
            Self::EmptyProgram => "command[0]",
            Self::Nul { field, .. } | Self::ArgumentTooLong { field, .. } => field,
            Self::EnvName { .. } => "env",
            Self::CwdRelative { .. } => "cwd",
            Self::PathTooLong { field, .. } => field,
        }
    }
}

impl Command {
    /// Checks the parts. `base` is the policy's environment, which `env` adds to and overrides;
    /// an empty `cwd` means `/workspace`.
    pub fn new(
        argv: Vec<String>,
        base: &BTreeMap<String, String>,
        env: impl IntoIterator<Item = (String, String)>,
        cwd: String,
    ) -> Result<Self, CommandError> {
        let program = argv.first().ok_or(CommandError::Empty)?;
        if program.is_empty() {
            return Err(CommandError::EmptyProgram);
        }
        if program.len() > PATH_BYTES_MAX {
            return Err(CommandError::PathTooLong { field: "command[0]", length: program.len() });
        }
        for (index, argument) in argv.iter().enumerate() {
            check_string(argument, argument.len(), || format!("command[{index}]"))?;
        }
        let mut merged = base.clone();
        for (name, value) in env {
            if name.is_empty() || name.contains('=') {
                return Err(CommandError::EnvName { name });
            }
            merged.insert(name, value);
        }
        for (name, value) in &merged {
            let field = || format!("env[{}]", name.escape_default());
            check_string(name, 0, field)?;
            check_string(value, name.len() + 1 + value.len(), field)?;
        }
        let pointer = size_of::<usize>();
        let length = argv.iter().map(|a| a.len() + 1 + pointer).sum::<usize>()
            + merged.iter().map(|(n, v)| n.len() + v.len() + 2 + pointer).sum::<usize>();
        if length > ARGUMENTS_BYTES_MAX {
            return Err(CommandError::ArgumentsTooLong { length });
        }
        let cwd = if cwd.is_empty() { "/workspace".to_owned() } else { cwd };
        if cwd.len() > PATH_BYTES_MAX {
            return Err(CommandError::PathTooLong { field: "cwd", length: cwd.len() });
        }
        check_string(&cwd, cwd.len(), || "cwd".to_owned())?;
        if !cwd.starts_with('/') {
            return Err(CommandError::CwdRelative { cwd });
        }
        Ok(Self { argv, env: merged, cwd })
    }

    /// Program and arguments; never empty.
    pub fn argv(&self) -> &[String] {
        &self.argv
    }

    /// The whole environment.
    pub fn env(&self) -> &BTreeMap<String, String> {
        &self.env
    }

    /// Directory in the cell; absolute.
    pub fn cwd(&self) -> &str {
        &self.cwd
    }
}

fn check_string(text: &str, length: usize, field: impl Fn() -> String) -> Result<(), CommandError> {
    if let Some(index) = text.bytes().position(|byte| byte == 0) {
        return Err(CommandError::Nul { field: field(), index });
    }
    if length > ARGUMENT_BYTES_MAX {
        return Err(CommandError::ArgumentTooLong { field: field(), length });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(argv: &[&str], cwd: &str) -> Result<Command, CommandError> {
        let argv = argv.iter().map(|text| (*text).to_owned()).collect();
        Command::new(argv, &BTreeMap::new(), [], cwd.to_owned())
    }

    #[test]
    fn every_problem_names_its_field() {
        let long = "x".repeat(ARGUMENT_BYTES_MAX + 1);
        let path = format!("/{}", "p".repeat(5000));
        let table = [
            (command(&[], ""), "command"),
            (command(&[""], ""), "command[0]"),
            (command(&["a", "b\0"], ""), "command[1]"),
            (command(&["a", &long], ""), "command[1]"),
            (command(&["a"], "rel"), "cwd"),
            (command(&["a"], "/a\0b"), "cwd"),
            (command(&["a"], &path), "cwd"),
            (command(&[&path], ""), "command[0]"),
        ];
        for (result, field) in table {
            assert_eq!(result.unwrap_err().field(), field);
        }
    }

    #[test]
    fn the_calls_environment_wins_over_the_policys() {
        let base = BTreeMap::from([("A".to_owned(), "1".to_owned())]);
        let env = [("A".to_owned(), "2".to_owned())];
        let command = Command::new(vec!["x".into()], &base, env, String::new()).unwrap();
        assert_eq!(command.env()["A"], "2");
        assert_eq!(command.cwd(), "/workspace");
    }

    #[test]
    fn names_with_an_equals_sign_are_refused() {
        let env = [("A=B".to_owned(), "2".to_owned())];
        let result = Command::new(vec!["x".into()], &BTreeMap::new(), env, String::new());
        assert_eq!(result, Err(CommandError::EnvName { name: "A=B".into() }));
    }
}
