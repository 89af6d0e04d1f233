//! The programs that the tests run, beside our own. None is skipped when it is not
//! there: what is missing is named, and nothing starts.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::ensure;

/// Each program, and the Debian package that brings it.
const TOOLS: [(&str, &str); 22] = [
    ("bash", "bash"),
    ("cargo", "rustup"),
    ("dd", "coreutils"),
    ("find", "findutils"),
    ("free", "procps"),
    ("gcc", "gcc"),
    ("git", "git"),
    ("make", "make"),
    ("node", "nodejs"),
    ("pgrep", "procps"),
    ("ps", "procps"),
    ("python3", "python3"),
    ("rg", "ripgrep"),
    ("rustc", "rustup"),
    ("script", "bsdutils"),
    ("setpriv", "util-linux"),
    ("ssh-keygen", "openssh-client"),
    ("stty", "coreutils"),
    ("tar", "tar"),
    ("tmux", "tmux"),
    ("uptime", "procps"),
    ("vi", "vim-tiny"),
];

/// What stock gRPC clients need of Python.
const PYTHON_MODULES: &str =
    "import grpc, grpc_health.v1.health_pb2, grpc_reflection.v1alpha.reflection_pb2, grpc_status";

/// Finds every program, and the Python that has gRPC.
pub(crate) fn find() -> anyhow::Result<PathBuf> {
    let missing: Vec<String> = TOOLS
        .iter()
        .filter(|(tool, _)| !exists(tool))
        .map(|(tool, package)| format!("{tool} (Debian package {package})"))
        .collect();
    let python = std::env::var_os("COFFERDAM_PYTHON")
        .map_or_else(|| PathBuf::from("target/python/bin/python"), PathBuf::from);
    let mut check = Command::new(&python);
    check.args(["-c", PYTHON_MODULES]).stdout(Stdio::null()).stderr(Stdio::null());
    let grpc = check.status().is_ok_and(|status| status.success());
    let mut problems = missing;
    if !grpc {
        problems.push(format!(
            "{} with grpcio, grpcio-health-checking, grpcio-reflection and grpcio-status (or the \
             path of such a Python in COFFERDAM_PYTHON)",
            python.display()
        ));
    }
    ensure!(
        rustix::process::geteuid().is_root(),
        "the tests must be started by root: they run everything as root and as an ordinary user"
    );
    ensure!(problems.is_empty(), "missing, and installed by .ci/run:\n  {}", problems.join("\n  "));
    Ok(std::path::absolute(python)?)
}

fn exists(tool: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(tool).is_file())
}
