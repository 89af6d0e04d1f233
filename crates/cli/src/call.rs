//! `cofferdam call`: one tool call, as a model would make it. And the page that describes the
//! tools.

use std::io::{Read as _, Write as _};
use std::process::ExitCode;

use anyhow::Context as _;
use cofferdam_client::{CallToolRequest, Client as _};

use crate::Failure;
use crate::args::CallArgs;
use crate::connect::{ConnectError, Target, request_id};

/// Most input that one call takes, with its other fields.
const INPUT_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// Calls a tool and prints its JSON. The exit status is 1 when the tool refused or failed.
pub(crate) fn call(args: &CallArgs) -> Result<ExitCode, Failure> {
    let called = run(args).map_err(|error| {
        let hint = error.downcast_ref::<ConnectError>().and_then(ConnectError::hint);
        let hint = hint.map(str::to_owned);
        Failure { error: error.context("call"), hint, status: FAILURE_STATUS }
    })?;
    Ok(if called { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Exit status when there is no answer of the tool, as `exec` has it.
const FAILURE_STATUS: u8 = 125;

/// Whether the tool did what was asked.
fn run(args: &CallArgs) -> anyhow::Result<bool> {
    let target = Target::choose(&args.target)?;
    let request = CallToolRequest {
        name: args.tool.clone(),
        input_json: input(&args.input)?,
        session: args.session.clone(),
        request_id: request_id(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let call = target.call(|client| {
        let request = request.clone();
        async move { client.call_tool(request).await }
    });
    let (_, reply) = runtime.block_on(call)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", reply.output_json).context("print")?;
    Ok(!reply.is_error)
}

/// The input itself, or standard input for `-`: one argument may have 128 KiB only.
fn input(argument: &str) -> anyhow::Result<String> {
    if argument != "-" {
        return Ok(argument.to_owned());
    }
    let mut text = String::new();
    let limit = INPUT_BYTES_MAX + 1;
    std::io::stdin().lock().take(limit).read_to_string(&mut text).context("read input")?;
    anyhow::ensure!(
        text.len() as u64 <= INPUT_BYTES_MAX,
        "standard input is longer than {INPUT_BYTES_MAX} bytes, the limit of a call"
    );
    Ok(text)
}

/// Prints the tools as a page in Markdown.
pub(crate) fn tools_page() -> Result<ExitCode, Failure> {
    let mut out = std::io::stdout().lock();
    write!(out, "{}", cofferdam_daemon::tools_markdown()).context("print")?;
    Ok(ExitCode::SUCCESS)
}
