//! Finds the daemon of a workspace, or starts one detached.
//!
//! Whoever starts a daemon holds `start.lock` until the new daemon serves or has failed; the lock
//! travels to the daemon as its standard input, so it is held even when the client dies. So of
//! many clients that come at once one starts a daemon, and the others wait and join it.

use std::fs::{File, OpenOptions};
use std::io::{self, PipeReader, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use cofferdam_client_grpc::{AddressError, UnixAddress};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use thiserror::Error;

use crate::lock;
use crate::state::{StateDir, StateError};

/// Longest wait for a start: that of the daemon before it to end, and its own.
const READY_LIMIT: Duration = Duration::from_secs(90);

/// Largest report of a daemon that starts.
const REPORT_BYTES_MAX: usize = 64 * 1024;

/// The daemon that a client wants when it names no address.
#[derive(Debug)]
pub(crate) struct Wanted {
    /// Real path of the workspace.
    pub(crate) workspace: PathBuf,
    pub(crate) state: StateDir,
    pub(crate) policy: Option<PathBuf>,
    pub(crate) idle_exit: Duration,
}

/// Why there is no daemon.
#[derive(Debug, Error)]
pub(crate) enum JoinError {
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Address(#[from] AddressError),
    /// The daemon said why it does not start.
    #[error("{0}")]
    Refused(String),
    /// The daemon ended without a word.
    #[error("the daemon ended while it started; its log is {log}")]
    Silent { log: PathBuf },
    /// Nothing came.
    #[error("the daemon did not start within {READY_LIMIT:?}; its log is {log}")]
    TimedOut { log: PathBuf },
    /// A file operation failed.
    #[error("{operation} {path}")]
    Io {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

fn failed(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> JoinError {
    let path = path.to_owned();
    move |source| JoinError::Io { operation, path, source }
}

/// Returns the address of a daemon that accepts connections.
pub(crate) fn join_or_start(wanted: &Wanted) -> Result<UnixAddress, JoinError> {
    wanted.state.create()?;
    if let Some(address) = running(&wanted.state)? {
        return Ok(address);
    }
    let path = wanted.state.start_lock_file();
    let file = lock::open(&path).map_err(failed("open", &path))?;
    let start_lock = match lock::wait(file, READY_LIMIT).map_err(failed("lock", &path))? {
        lock::Wait::Held(file) => file,
        lock::Wait::TimedOut => {
            return Err(JoinError::TimedOut { log: wanted.state.log_file() });
        }
    };
    // Somebody else may have started it meanwhile.
    match running(&wanted.state)? {
        Some(address) => Ok(address),
        None => start(wanted, start_lock),
    }
}

/// Waits until no daemon holds the state, at most `limit`.
pub(crate) fn wait_for_end(state: &StateDir, limit: Duration) -> Result<(), JoinError> {
    let path = state.lock_file();
    let file = lock::open(&path).map_err(failed("open", &path))?;
    // Whether it has ended shows at the next try.
    lock::wait(file, limit).map(drop).map_err(failed("lock", &path))
}

/// The published address, when somebody listens there.
fn running(state: &StateDir) -> Result<Option<UnixAddress>, JoinError> {
    Ok(state.read_address()?.filter(|address| UnixStream::connect(address.path()).is_ok()))
}

fn start(wanted: &Wanted, start_lock: File) -> Result<UnixAddress, JoinError> {
    let log = wanted.state.log_file();
    let stderr = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(&log)
        .map_err(failed("open", &log))?;
    let program = std::env::current_exe().map_err(failed("find", Path::new("/proc/self/exe")))?;
    let (report, write_end) = io::pipe().map_err(failed("make a pipe to", &program))?;
    let mut command = Command::new(&program);
    command
        .args(["serve", "--detached", "--workspace"])
        .arg(&wanted.workspace)
        .arg("--state")
        .arg(wanted.state.path())
        .arg("--idle-exit")
        .arg(format!("{}ms", wanted.idle_exit.as_millis()))
        .current_dir("/")
        .env_remove("COFFERDAM_ADDR")
        .stdin(start_lock)
        .stdout(write_end)
        .stderr(stderr);
    if let Some(policy) = &wanted.policy {
        let policy = std::path::absolute(policy).map_err(failed("resolve", policy))?;
        command.arg("--policy").arg(policy);
    }
    // The daemon outlives this process, so nobody here waits for its end.
    command.spawn().map_err(failed("start", &program))?;
    // Our copies of lock and pipe.
    drop(command);
    read_report(report, &log)
}

/// Reads what the daemon says: `ready ADDRESS` or `error TEXT`.
fn read_report(mut pipe: PipeReader, log: &Path) -> Result<UnixAddress, JoinError> {
    let mut report = Vec::new();
    let deadline = Instant::now() + READY_LIMIT;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).unwrap_or_default();
        let mut fds = [PollFd::new(&pipe, PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(0) => return Err(JoinError::TimedOut { log: log.to_owned() }),
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(failed("wait for the daemon of", log)(error.into())),
        }
        let mut chunk = [0; 4096];
        match pipe.read(&mut chunk).map_err(failed("read from the daemon of", log))? {
            0 => break,
            // What is longer than any report is only read away.
            count if report.len() < REPORT_BYTES_MAX => report.extend_from_slice(&chunk[..count]),
            _ => {}
        }
    }
    let report = String::from_utf8_lossy(&report);
    if let Some(address) = report.strip_prefix("ready ") {
        Ok(UnixAddress::parse(address)?)
    } else if let Some(error) = report.strip_prefix("error ") {
        Err(JoinError::Refused(error.to_owned()))
    } else {
        Err(JoinError::Silent { log: log.to_owned() })
    }
}
