//! The command line's arguments.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// One locked workspace per agent, behind gRPC.
#[derive(Debug, Parser)]
#[command(name = "cofferdam", version, propagate_version = true, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve one workspace over gRPC until asked to stop.
    Serve(ServeArgs),
    /// Run a program in the cell of a workspace.
    Exec(ExecArgs),
    /// Call one tool as a model would, and print its JSON.
    Call(CallArgs),
    /// Show what sessions have seen of which file, verify it, or drop it.
    Stamps(StampsArgs),
    /// Say what this host can enforce, what is missing, and how to get it.
    Doctor(DoctorArgs),
    /// Show on a small sample repository what a cell can and cannot see.
    Tour,
    /// Print the tools for people.
    #[command(hide = true)]
    Tools {
        /// As a page in Markdown, the only form.
        #[arg(long, required = true)]
        markdown: bool,
    },
}

/// Which image the cell shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Image {
    /// The host's system directories, read-only.
    Host,
}

/// Which engine carries calls out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Engine {
    /// Processes under namespaces, Landlock and seccomp.
    Native,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Directory that the cell shows as /workspace.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) workspace: PathBuf,
    /// Where to listen, unix:/PATH; by default daemon.sock in the state directory.
    #[arg(long, value_name = "ADDR")]
    pub(crate) listen: Option<String>,
    /// Policy file; without one every key has its default.
    #[arg(long, value_name = "FILE")]
    pub(crate) policy: Option<PathBuf>,
    /// What the cell shows of the host.
    #[arg(long, value_enum, default_value_t = Image::Host)]
    pub(crate) image: Image,
    /// What carries calls out.
    #[arg(long, value_enum, default_value_t = Engine::Native)]
    pub(crate) engine: Engine,
    /// State directory; by default one per workspace below $XDG_STATE_HOME/cofferdam.
    #[arg(long, value_name = "DIR")]
    pub(crate) state: Option<PathBuf>,
    /// End after this time without a client or a process of a call, for example 60s; at least 1s.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) idle_exit: Option<Duration>,
    /// How long running calls may go on once the daemon was asked to stop.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "10s")]
    pub(crate) drain_grace: Duration,
    /// Started by a client: standard input is its start lock, standard output its ready pipe.
    #[arg(long, hide = true)]
    pub(crate) detached: bool,
}

/// Which daemon a command talks to.
#[derive(Debug, Clone, Args)]
pub(crate) struct TargetArgs {
    /// Address of a running daemon, unix:/PATH; also read from COFFERDAM_ADDR.
    #[arg(long, value_name = "ADDR", conflicts_with_all = ["workspace", "policy", "state", "idle_exit"])]
    pub(crate) connect: Option<String>,
    /// Workspace whose daemon is joined, or started; by default the current directory.
    #[arg(long, value_name = "DIR")]
    pub(crate) workspace: Option<PathBuf>,
    /// Policy file for a daemon that has to be started; a running one must have the same policy.
    #[arg(long, value_name = "FILE")]
    pub(crate) policy: Option<PathBuf>,
    /// State directory of the workspace's daemon.
    #[arg(long, value_name = "DIR")]
    pub(crate) state: Option<PathBuf>,
    /// When a daemon that has to be started ends again: this time after its last use.
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "60s")]
    pub(crate) idle_exit: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct ExecArgs {
    #[command(flatten)]
    pub(crate) target: TargetArgs,
    /// Whose call this is; calls of different sessions cannot signal each other.
    #[arg(long, value_name = "ID", default_value = "cli")]
    pub(crate) session: String,
    /// Kill the whole tree after this time; the exit status is then 124.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) timeout: Option<Duration>,
    /// Kill the whole tree after this time without output; the exit status is then 124.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) idle_timeout: Option<Duration>,
    /// Add a variable to the environment; may be given more than once.
    #[arg(long, value_name = "NAME=VALUE", value_parser = variable)]
    pub(crate) env: Vec<(String, String)>,
    /// Directory in the cell.
    #[arg(long, value_name = "DIR", default_value = "/workspace")]
    pub(crate) cwd: String,
    /// Nothing under /workspace can be changed by this call; nor owners, modes, times and
    /// attributes of files anywhere.
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Run on a terminal, also when standard input or output is none.
    #[arg(long, overrides_with = "no_pty", conflicts_with = "json")]
    pub(crate) pty: bool,
    /// Run without a terminal.
    #[arg(long, overrides_with = "pty")]
    pub(crate) no_pty: bool,
    /// Run to the end and print one JSON object with output, exit reason and enforcement.
    #[arg(long)]
    pub(crate) json: bool,
    /// Program and arguments.
    #[arg(last = true, required = true, value_name = "ARGV")]
    pub(crate) argv: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct CallArgs {
    #[command(flatten)]
    pub(crate) target: TargetArgs,
    /// Whose call this is: what was read counts for this session.
    #[arg(long, value_name = "ID", default_value = "cli")]
    pub(crate) session: String,
    /// Name of the tool: bash, read_file, write_file, edit_file, glob or grep.
    #[arg(value_name = "TOOL")]
    pub(crate) tool: String,
    /// Its input, a JSON object; - reads it from standard input.
    #[arg(value_name = "JSON", allow_hyphen_values = true)]
    pub(crate) input: String,
}

#[derive(Debug, Args)]
pub(crate) struct StampsArgs {
    #[command(flatten)]
    pub(crate) target: TargetArgs,
    /// Only stamps of this session; by default of all.
    #[arg(long, value_name = "ID", global = true)]
    pub(crate) session: Option<String>,
    /// Only stamps of this path in the cell, and below it.
    #[arg(long, value_name = "PATH", global = true)]
    pub(crate) path: Option<String>,
    /// Print one JSON object.
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) command: StampsCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum StampsCommand {
    /// List the stamps that sessions hold.
    List,
    /// List what set and dropped the stamps of one path, newest first.
    History {
        /// Absolute path in the cell.
        #[arg(value_name = "PATH")]
        file: String,
    },
    /// Read the files again; the exit status is 1 when one is stale or gone.
    Verify,
    /// Drop stamps: the files must be read again before they can be overwritten.
    Clear,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Reads `30s`, `500ms`, `1.5h`, `2m`, `1d`, or a number of seconds.
fn duration(text: &str) -> Result<Duration, String> {
    let units = [("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0), ("d", 86400.0)];
    let (number, scale) = units
        .iter()
        .find_map(|(unit, scale)| text.strip_suffix(unit).map(|number| (number, *scale)))
        .unwrap_or((text, 1.0));
    let plain = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    plain
        .then(|| number.parse::<f64>().ok())
        .flatten()
        .and_then(|number| Duration::try_from_secs_f64(number * scale).ok())
        .ok_or_else(|| "is no length of time; write for example 30s, 500ms, 2m, 1h".to_owned())
}

/// Reads `NAME=VALUE`.
fn variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("is not of the form NAME=VALUE".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn durations_are_read_with_their_unit() {
        let table = [
            ("30s", Some(30_000)),
            ("500ms", Some(500)),
            ("2m", Some(120_000)),
            ("1.5h", Some(5_400_000)),
            ("7", Some(7_000)),
            ("", None),
            ("s", None),
            ("-1s", None),
            ("1e3", None),
            ("inf", None),
            ("5 s", None),
        ];
        for (text, milliseconds) in table {
            assert_eq!(duration(text).ok(), milliseconds.map(Duration::from_millis), "{text:?}");
        }
    }

    #[test]
    fn everything_after_the_dashes_belongs_to_the_program() {
        let cli = Cli::parse_from(["cofferdam", "exec", "--timeout", "2s", "--", "ls", "--json"]);
        let Command::Exec(args) = cli.command else { panic!("not exec") };
        assert_eq!(args.argv, ["ls", "--json"]);
        assert!(!args.json);
    }

    #[test]
    fn a_call_takes_its_input_as_it_is() {
        for input in ["-", "{\"command\": \"ls\"}"] {
            let cli = Cli::parse_from(["cofferdam", "call", "bash", input]);
            let Command::Call(args) = cli.command else { panic!("not call") };
            assert_eq!((args.tool.as_str(), args.input.as_str()), ("bash", input));
        }
    }

    #[test]
    fn options_of_stamps_stand_before_or_behind_the_subcommand() {
        let before = ["cofferdam", "stamps", "--session", "s", "--json", "list"];
        let behind = ["cofferdam", "stamps", "list", "--session", "s", "--json"];
        for line in [before, behind] {
            let Command::Stamps(args) = Cli::parse_from(line).command else { panic!("not stamps") };
            assert_eq!((args.session.as_deref(), args.json), (Some("s"), true));
        }
    }

    #[test]
    fn an_address_and_a_workspace_exclude_each_other() {
        let line = ["cofferdam", "exec", "--connect", "unix:/x", "--workspace", "/y", "--", "ls"];
        assert!(Cli::try_parse_from(line).is_err());
    }
}
