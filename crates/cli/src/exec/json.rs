//! `exec --json`: one bounded result as one JSON object.

use std::io::Read as _;

use anyhow::Context as _;
use bytes::Bytes;
use cofferdam_client::{Client as _, ExecuteReply, ExecuteRequest, StreamAccount};
use cofferdam_spec::{Enforcement, Exit, TimeLimit};
use serde_json::{Value, json};

use super::follow::Signals;
use super::{input, limits, program};
use crate::args::ExecArgs;
use crate::connect::{Target, request_id};
use crate::text;

/// Most input that one call takes, with its other fields.
const STDIN_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// Runs the program to its end and prints what came of it.
pub(crate) async fn execute(target: &Target, args: &ExecArgs) -> anyhow::Result<u8> {
    let mut stdin = Vec::new();
    if input::source(false)? {
        let limit = STDIN_BYTES_MAX + 1;
        std::io::stdin().lock().take(limit).read_to_end(&mut stdin).context("read input")?;
        anyhow::ensure!(
            stdin.len() as u64 <= STDIN_BYTES_MAX,
            "standard input is longer than {STDIN_BYTES_MAX} bytes, the limit with --json"
        );
    }
    let request = ExecuteRequest {
        program: program(args),
        stdin: Bytes::from(stdin),
        limits: limits(args),
        workspace_read_only: args.read_only,
        session: args.session.clone(),
        request_id: request_id(),
    };
    let mut signals = Signals::new()?;
    let call = target.call(|client| {
        let request = request.clone();
        async move { client.execute(request).await }
    });
    tokio::select! {
        result = call => {
            let reply = result?.1;
            println!("{:#}", reply_json(&reply));
            Ok(reply.report.exit.shell_status())
        }
        // The daemon kills the tree of a call whose client goes away.
        signal = signals.next_ending() => Ok(128 + signal),
    }
}

fn reply_json(reply: &ExecuteReply) -> Value {
    let report = &reply.report;
    let paths = report.protected_paths.iter();
    let mut object = json!({
        "exit": exit_json(&report.exit),
        "status": report.exit.shell_status(),
        "output": {
            "stdout": account_json(&report.output.stdout),
            "stderr": account_json(&report.output.stderr),
            "process_id": report.output.process_id,
            "background_processes": report.output.background_processes,
            "detached": report.output.detached,
        },
        "protected_paths":
            paths.map(|p| json!({ "path": p.path, "action": p.action })).collect::<Vec<_>>(),
        "duration_ms": report.duration.as_secs_f64() * 1000.0,
        "replayed": reply.replayed,
        "enforcement": enforcement_json(&report.enforcement),
    });
    bytes_json(&mut object, "stdout", &reply.stdout);
    bytes_json(&mut object, "stderr", &reply.stderr);
    object
}

/// Sets `name` where the bytes are UTF-8, and otherwise `name_hex`: nothing is replaced.
fn bytes_json(object: &mut Value, name: &str, bytes: &[u8]) {
    match std::str::from_utf8(bytes) {
        Ok(text) => object[name] = json!(text),
        Err(_) => object[format!("{name}_hex")] = json!(text::hex(bytes)),
    }
}

fn account_json(account: &StreamAccount) -> Value {
    json!({
        "total_bytes": account.total_bytes,
        "kept_bytes": account.kept_bytes,
        "dropped_bytes": account.dropped_bytes,
        "head_bytes": account.head_bytes,
        "tail_bytes": account.tail_bytes,
        "readable_bytes": account.readable_bytes,
    })
}

/// What the kernel enforces.
pub(crate) fn enforcement_json(enforcement: &Enforcement) -> Value {
    json!({
        "engine": enforcement.engine.as_str(),
        "level": enforcement.level.as_str(),
        "landlock_abi": enforcement.landlock_abi,
        "rights_not_handled": enforcement.rights_not_handled,
        "network": enforcement.network.as_str(),
        "policy_digest": text::hex(&enforcement.policy_digest),
        "seccomp_digest": text::hex(&enforcement.seccomp_digest),
        "not_enforced": enforcement.not_enforced,
    })
}

fn exit_json(exit: &Exit) -> Value {
    match exit {
        Exit::Exited { code } => json!({ "reason": "exited", "code": code }),
        Exit::Signaled { number, core, maybe_oom } => json!({
            "reason": "signaled", "number": number, "core": core, "maybe_oom": maybe_oom,
        }),
        Exit::TimedOut { limit, after } => json!({
            "reason": "timed_out",
            "limit": match limit { TimeLimit::Wall => "wall", TimeLimit::Idle => "idle" },
            "after_ms": after.as_secs_f64() * 1000.0,
        }),
        Exit::OomKilled => json!({ "reason": "oom_killed" }),
        Exit::OutputLimit { limit_bytes } => {
            json!({ "reason": "output_limit", "limit_bytes": limit_bytes })
        }
        Exit::Cancelled { by } => json!({ "reason": "cancelled", "by": by }),
        Exit::Denied { rule } => json!({ "reason": "denied", "rule": rule }),
        Exit::SandboxFailed { step, errno } => {
            json!({ "reason": "sandbox_failed", "step": step, "errno": errno })
        }
        Exit::Lost => json!({ "reason": "lost" }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_no_text_are_not_replaced() {
        let mut object = json!({});
        bytes_json(&mut object, "stdout", b"caf\xc3\xa9");
        bytes_json(&mut object, "stderr", b"\xff\n");
        assert_eq!(object, json!({ "stdout": "café", "stderr_hex": "ff0a" }));
    }
}
