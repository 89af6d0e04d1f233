//! `cofferdam serve`: from arguments to a running daemon.
//!
//! Order: refuse what cannot be (nothing has been touched), take the start lock and the lock,
//! listen, launch the cell, and once the daemon has answered publish the address and say so. The
//! cell dies with the thread that launched it, so all of this, and the runtime, stay on the main
//! thread.

use std::fs::{self, File, TryLockError};
use std::future::Future;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use cofferdam_client::Client as _;
use cofferdam_client_grpc::{GrpcClient, UnixAddress};
use cofferdam_daemon::{Config, Daemon};
use cofferdam_sandbox::Plan;
use thiserror::Error;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use crate::args::{Engine, ServeArgs};
use crate::state::{self, StateDir};
use crate::{Failure, lock, prepare, text};

/// Longest wait for another process that is starting a daemon here: far above the milliseconds
/// that a start takes.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Longest wait of a detached daemon for the one before it, which is ending: a generous drain.
const END_LIMIT: Duration = Duration::from_secs(60);

/// Shortest idle time: whoever started the daemon must have time to connect, on a busy machine too.
const IDLE_EXIT_MIN: Duration = Duration::from_secs(1);

/// A log of a detached daemon above this size is emptied at its start.
const LOG_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// Why the daemon does not start.
#[derive(Debug, Error)]
enum ServeError {
    /// Another daemon holds the state.
    #[error("{}", already_served(workspace, *holder))]
    AlreadyServed { workspace: PathBuf, holder: Option<u32> },
    /// Another process has been starting a daemon for too long.
    #[error("another process has been starting a daemon for {workspace} for {START_LIMIT:?}")]
    StartInProgress { workspace: PathBuf },
    /// The socket's path belongs to something else.
    #[error("{path} exists and is not a socket")]
    NotASocket { path: PathBuf },
    /// The socket's path belongs to another server.
    #[error("another server listens on {path}")]
    SocketInUse { path: PathBuf },
    /// A file operation failed.
    #[error("{operation} {path}")]
    Io {
        operation: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

fn already_served(workspace: &Path, holder: Option<u32>) -> String {
    let workspace = workspace.display();
    match holder {
        Some(pid) => format!("{workspace} is already served by the daemon with process id {pid}"),
        None => format!("{workspace} is already served by another daemon"),
    }
}

fn failed(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ServeError {
    let path = path.to_owned();
    move |source| ServeError::Io { operation, path, source }
}

/// Serves a workspace until a signal, or until nobody uses it.
pub(crate) fn serve(args: &ServeArgs) -> Result<ExitCode, Failure> {
    let mut parent = if args.detached { Some(Parent::part()?) } else { None };
    tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_env_filter(
            tracing_subscriber::EnvFilter::builder()
                .with_default_directive(tracing_subscriber::filter::LevelFilter::WARN.into())
                .with_env_var("COFFERDAM_LOG")
                .from_env_lossy(),
        )
        .init();
    let result = serve_for(args, &mut parent);
    if let (Err(failure), Some(parent)) = (&result, &mut parent) {
        parent.tell_failure(failure);
    }
    result
}

fn serve_for(args: &ServeArgs, parent: &mut Option<Parent>) -> Result<ExitCode, Failure> {
    let Engine::Native = args.engine;
    let workspace = state::workspace(&args.workspace)?;
    let state = StateDir::locate(&workspace, args.state.as_deref())?;
    let address = match &args.listen {
        Some(text) => UnixAddress::parse(text)?,
        None => state.socket()?,
    };
    state::outside("socket", address.path(), &workspace)?;
    let policy = prepare::policy(args.policy.as_deref())?;
    let image = prepare::image(args.image);
    let open_to_others = !policy.socket_users.is_empty();

    state.create()?;
    let start_lock = match parent {
        Some(parent) => parent.start_lock.take(),
        None => Some(start_lock(&state, &workspace)?),
    };
    let _lock = lock_state(&state, &workspace, args.detached)?;
    let plan = Plan::prepare(&workspace, &state.home(), image, policy)?;
    raise_descriptor_limit()?;
    let listener = listen(&address, open_to_others)?;
    let daemon = Daemon::new(Config {
        plan,
        state: state.path().to_owned(),
        idle_exit: args.idle_exit.map(|time| time.max(IDLE_EXIT_MIN)),
        drain_grace: args.drain_grace,
        version: env!("CARGO_PKG_VERSION"),
    })
    .inspect_err(|_| remove_socket(&address))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        let listener = tokio::net::UnixListener::from_std(listener)?;
        let (shutdown, watcher) = watch_signals(state.clone(), address.clone())?;
        let served = daemon.run(listener, shutdown);
        tokio::pin!(served);
        let result = tokio::select! {
            result = &mut served => result.map_err(Failure::from),
            announced = announce(&workspace, &state, &address) => match announced {
                Ok(()) => {
                    drop(start_lock);
                    if let Some(parent) = parent {
                        parent.tell_ready(&address);
                    }
                    served.await.map_err(Failure::from)
                }
                Err(failure) => Err(failure),
            },
        };
        watcher.abort();
        result
    });
    // The lock is still held, so the files are ours.
    state.withdraw()?;
    remove_socket(&address);
    result.map(|()| ExitCode::SUCCESS)
}

/// Takes the hard limit of open descriptors: a call holds up to four and a connection one, so the
/// usual soft limit of 1,024 would be reached long before the daemon's own limits. Programs of the
/// cell get the policy's limit.
fn raise_descriptor_limit() -> Result<(), Failure> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
        .map_err(|errno| Failure::from(std::io::Error::from(errno)))
}

/// Asks the daemon as any client would, and says that it serves once it has answered.
async fn announce(
    workspace: &Path,
    state: &StateDir,
    address: &UnixAddress,
) -> Result<(), Failure> {
    let client = GrpcClient::connect(address).await?;
    let enforcement = client.get_capabilities().await?.enforcement;
    for warning in client.get_workspace().await?.warnings {
        text::complain(&format!("warning: {warning}"));
    }
    state.publish(address)?;
    text::complain(&format!(
        "serving {} ({}) on {address}",
        workspace.display(),
        text::enforcement(&enforcement)
    ));
    Ok(())
}

/// Waits until nobody else is starting a daemon for this state.
fn start_lock(state: &StateDir, workspace: &Path) -> Result<File, ServeError> {
    let path = state.start_lock_file();
    let file = lock::open(&path).map_err(failed("open", &path))?;
    match lock::wait(file, START_LIMIT).map_err(failed("lock", &path))? {
        lock::Wait::Held(file) => Ok(file),
        lock::Wait::TimedOut => {
            Err(ServeError::StartInProgress { workspace: workspace.to_owned() })
        }
    }
}

/// Takes the state for the daemon's life. A detached daemon was started because no daemon could
/// be reached: one that still holds the lock is ending, and is waited for.
fn lock_state(state: &StateDir, workspace: &Path, detached: bool) -> Result<File, ServeError> {
    let path = state.lock_file();
    let open = || lock::open(&path).map_err(failed("open", &path));
    let held = if detached {
        match lock::wait(open()?, END_LIMIT).map_err(failed("lock", &path))? {
            lock::Wait::Held(file) => Some(file),
            lock::Wait::TimedOut => None,
        }
    } else {
        let file = open()?;
        match file.try_lock() {
            Ok(()) => Some(file),
            Err(TryLockError::WouldBlock) => None,
            Err(TryLockError::Error(error)) => return Err(failed("lock", &path)(error)),
        }
    };
    match held {
        Some(mut file) => {
            lock::sign(&mut file).map_err(failed("write", &path))?;
            Ok(file)
        }
        None => {
            let holder = lock::holder(&mut open()?).map_err(failed("read", &path))?;
            Err(ServeError::AlreadyServed { workspace: workspace.to_owned(), holder })
        }
    }
}

/// Listens. The socket of a dead daemon is replaced; anything else on its path is not.
fn listen(address: &UnixAddress, open_to_others: bool) -> Result<UnixListener, ServeError> {
    let path = address.path();
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed("examine", path)(error)),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(ServeError::NotASocket { path: path.to_owned() });
        }
        Ok(_) if UnixStream::connect(path).is_ok() => {
            return Err(ServeError::SocketInUse { path: path.to_owned() });
        }
        Ok(_) => fs::remove_file(path).map_err(failed("remove the dead socket", path))?,
    }
    // Between bind and chmod nobody else may connect. The process has one thread.
    let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(path);
    rustix::process::umask(before);
    let listener = listener.map_err(failed("listen on", path))?;
    if open_to_others {
        // The daemon asks the kernel who a peer is, and turns away whom the policy does not name.
        let mode = fs::Permissions::from_mode(0o666);
        fs::set_permissions(path, mode).map_err(failed("open to the policy's users", path))?;
    }
    listener.set_nonblocking(true).map_err(failed("prepare", path))?;
    Ok(listener)
}

/// Removes the socket at the end. A socket that stays is replaced by the next daemon.
fn remove_socket(address: &UnixAddress) {
    if let Err(error) = fs::remove_file(address.path())
        && error.kind() != io::ErrorKind::NotFound
    {
        text::complain(&format!("remove {}: {error}", address.path().display()));
    }
}

/// The first signal asks for a graceful end, a second one ends at once.
fn watch_signals(
    state: StateDir,
    address: UnixAddress,
) -> io::Result<(impl Future<Output = ()>, tokio::task::JoinHandle<()>)> {
    let mut signals = EndSignals::new()?;
    let (ask, asked) = oneshot::channel::<()>();
    let watcher = tokio::spawn(async move {
        signals.next().await;
        // New clients start a new daemon, which waits for this one's end.
        if let Err(error) = state.withdraw() {
            text::complain(&format!("{error}"));
        }
        let _ = ask.send(());
        let number = signals.next().await;
        remove_socket(&address);
        std::process::exit(128 + number);
    });
    // The sender lives until it has asked; a runtime that goes away also ends the daemon.
    Ok((async { drop(asked.await) }, watcher))
}

/// The signals that ask a daemon to end.
struct EndSignals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
}

impl EndSignals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    /// Number of the next one.
    async fn next(&mut self) -> i32 {
        tokio::select! {
            _ = self.terminate.recv() => SignalKind::terminate().as_raw_value(),
            _ = self.interrupt.recv() => SignalKind::interrupt().as_raw_value(),
            _ = self.hang_up.recv() => SignalKind::hangup().as_raw_value(),
        }
    }
}

/// The client that started this daemon detached: it handed over its start lock as standard input
/// and waits on the other end of standard output.
struct Parent {
    start_lock: Option<File>,
    ready_pipe: Option<File>,
}

impl Parent {
    /// Leaves the client's session and takes lock and pipe out of the standard streams, so that
    /// nothing that this process starts inherits them.
    fn part() -> io::Result<Self> {
        rustix::process::setsid()?;
        let keep = |fd| rustix::io::fcntl_dupfd_cloexec(fd, 3).map(|fd: OwnedFd| File::from(fd));
        let start_lock = keep(rustix::stdio::stdin())?;
        let ready_pipe = keep(rustix::stdio::stdout())?;
        let null = File::options().read(true).write(true).open("/dev/null")?;
        rustix::stdio::dup2_stdin(&null)?;
        rustix::stdio::dup2_stdout(&null)?;
        let log = rustix::fs::fstat(rustix::stdio::stderr())?;
        if u64::try_from(log.st_size).is_ok_and(|size| size > LOG_BYTES_MAX) {
            rustix::fs::ftruncate(rustix::stdio::stderr(), 0)?;
        }
        Ok(Self { start_lock: Some(start_lock), ready_pipe: Some(ready_pipe) })
    }

    fn tell_ready(&mut self, address: &UnixAddress) {
        self.tell(&format!("ready {address}"));
    }

    fn tell_failure(&mut self, failure: &Failure) {
        let hint = failure.hint.as_ref().map(|hint| format!("\nhint: {hint}")).unwrap_or_default();
        self.tell(&format!("error {:#}{hint}", failure.error));
    }

    /// Says it once. A client that has gone is not missed.
    fn tell(&mut self, text: &str) {
        if let Some(mut pipe) = self.ready_pipe.take() {
            let _ = pipe.write_all(text.as_bytes());
        }
    }
}
