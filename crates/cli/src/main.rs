//! `cofferdam`: a daemon that holds one locked workspace, and the commands that use it.

#![forbid(unsafe_code)]

mod args;
mod call;
mod connect;
mod doctor;
mod exec;
mod join;
mod lock;
mod prepare;
mod scratch;
mod serve;
mod stamps;
mod state;
mod text;
mod tour;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    // The daemon executes this program again as the first process of its cell.
    if let Some(code) = cofferdam_cell::run_if_launched() {
        return code;
    }
    let result = match args::Cli::parse().command {
        args::Command::Serve(args) => serve::serve(&args),
        args::Command::Exec(args) => exec::exec(args),
        args::Command::Call(args) => call::call(&args),
        args::Command::Stamps(args) => stamps::stamps(&args),
        args::Command::Doctor(args) => doctor::doctor(&args),
        args::Command::Tour => tour::tour(),
        args::Command::Tools { markdown: _ } => call::tools_page(),
    };
    result.unwrap_or_else(|failure| {
        text::complain(&format!("{:#}", failure.error));
        if let Some(hint) = failure.hint {
            text::hint(&hint);
        }
        ExitCode::from(failure.status)
    })
}

/// Why a command of ours could not do its work.
struct Failure {
    error: anyhow::Error,
    hint: Option<String>,
    /// Exit status: 1, or 125 for `exec` and `call`, whose other statuses belong to the program and
    /// the tool.
    status: u8,
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self { error: error.into(), hint: None, status: 1 }
    }
}
