//! Starts a cell: the trusted side executes its own program again, hands over the plan, and hears
//! either that the cell stands or which step failed.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use cofferdam_sandbox::{Plan, SetupError, enter};
use cofferdam_spec::{Enforcement, Engine, Level, NetworkMode};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, socketpair};
use rustix::process::{WaitOptions, waitpid};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::channel::Channel;
use crate::protocol::{Event, Request, ToolboxReply, ToolboxRequest};
use crate::{init, toolbox};

/// Name under which the program is executed again.
const CELL_NAME: &str = "cofferdam-cell";

/// Longest time to wait for a cell, a thousand times what it takes on an idle machine.
const LAUNCH_TIME_MAX: Duration = Duration::from_secs(10);

/// Longest time to wait for a cell to end by itself before its first process is killed.
const END_TIME_MAX: Duration = Duration::from_secs(2);

/// First message from the cell.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    /// It stands. Beside it travels the channel to init.
    Ready { landlock_abi: u32, rights_not_handled: Vec<String>, seccomp_digest: [u8; 32] },
    /// It does not, and nothing of it is left but the process that says so.
    Failed(SetupError),
}

/// A running cell. Dropping it ends every process of the cell and reaps its first one.
#[derive(Debug)]
pub struct Cell {
    /// To init. Non-blocking. Its end means that the cell is gone.
    pub init: Channel<Request, Event>,
    /// To the toolbox. Non-blocking. Its end means that the cell is gone.
    pub toolbox: Channel<ToolboxRequest, ToolboxReply>,
    /// What the kernel enforces.
    pub enforcement: Enforcement,
    /// Process id of the cell's first process (the toolbox) as the host sees it.
    pub pid: u32,
    first: Child,
}

impl Drop for Cell {
    fn drop(&mut self) {
        // Init ends at the end of its channel, and with it everything below it. The toolbox ends
        // at the end of its own, after it has reaped init.
        let _ended = rustix::net::shutdown(&self.init, Shutdown::Both);
        let _ended = rustix::net::shutdown(&self.toolbox, Shutdown::Write);
        let _gone_or_late = wait_for_end(&self.toolbox);
        end(&mut self.first);
    }
}

fn end(first: &mut Child) {
    // Both fail only when it has been reaped already.
    let _ended = first.kill();
    let _reaped = first.wait();
}

fn wait_for_end(channel: &impl AsFd) -> io::Result<bool> {
    let mut ready = [PollFd::new(channel, PollFlags::empty())];
    Ok(poll(&mut ready, Some(&timespec(END_TIME_MAX)))? > 0)
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() }
}

/// Why a cell could not be started. Nothing of it is left.
#[derive(Debug, Error)]
pub enum LaunchError {
    /// A step of the recipe failed.
    #[error("start the cell: {0}")]
    Setup(#[source] SetupError),
    /// The program could not be executed again.
    #[error("start the cell's first process")]
    Spawn(#[source] io::Error),
    /// The first process ended, or was silent for too long, before it answered.
    #[error("start the cell: its first process gave no answer")]
    NoAnswer(#[source] io::Error),
}

/// Starts a cell by `plan`. Call it on a thread that lives as long as the cell should: the kernel
/// ends the cell when that thread ends (`prctl(2)`, PR_SET_PDEATHSIG).
///
/// Blocks until the cell stands, a few milliseconds.
pub fn launch(plan: &Plan) -> Result<Cell, LaunchError> {
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(|errno| LaunchError::Spawn(errno.into()))?;
    let mut first = Command::new("/proc/self/exe")
        .arg0(CELL_NAME)
        .env_clear()
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(LaunchError::Spawn)?;
    match converse(plan, &ours) {
        Ok((init, enforcement)) => Ok(Cell {
            init: Channel::new(init),
            toolbox: Channel::new(ours),
            enforcement,
            pid: first.id(),
            first,
        }),
        Err(error) => {
            end(&mut first);
            Err(error)
        }
    }
}

fn converse(plan: &Plan, socket: &OwnedFd) -> Result<(OwnedFd, Enforcement), LaunchError> {
    let channel = Channel::<Plan, Answer>::new(socket.try_clone().map_err(LaunchError::Spawn)?);
    channel.send(plan, &[]).map_err(LaunchError::NoAnswer)?;
    let mut ready = [PollFd::new(&channel, PollFlags::IN)];
    let waited = poll(&mut ready, Some(&timespec(LAUNCH_TIME_MAX)));
    if waited.map_err(|errno| LaunchError::NoAnswer(errno.into()))? == 0 {
        return Err(LaunchError::NoAnswer(io::ErrorKind::TimedOut.into()));
    }
    let ended = || LaunchError::NoAnswer(io::ErrorKind::UnexpectedEof.into());
    let mut received = channel.receive().map_err(LaunchError::NoAnswer)?.ok_or_else(ended)?;
    match received.message {
        Answer::Failed(error) => Err(LaunchError::Setup(error)),
        Answer::Ready { landlock_abi, rights_not_handled, seccomp_digest } => {
            let init = received.descriptors.pop().ok_or_else(ended)?;
            rustix::io::ioctl_fionbio(socket, true)
                .map_err(|errno| LaunchError::NoAnswer(errno.into()))?;
            let enforcement = Enforcement {
                engine: Engine::Native,
                level: Level::Namespaces,
                landlock_abi,
                rights_not_handled,
                network: NetworkMode::None,
                policy_digest: plan.policy.digest(),
                seccomp_digest,
                not_enforced: NOT_ENFORCED.iter().map(|text| (*text).to_owned()).collect(),
            };
            Ok((init, enforcement))
        }
    }
}

/// What the native engine does not enforce on any host.
const NOT_ENFORCED: [&str; 4] = [
    "memory: limited for each process (RLIMIT_DATA), not for a call or the cell",
    "cpu: not limited",
    "workspace and home size: not limited",
    "unix sockets of the host inside the workspace: can be connected to",
];

/// The first statement of `main` in every program that launches cells: when this process was
/// started by [`launch`], it becomes the cell and this returns its exit code.
pub fn run_if_launched() -> Option<ExitCode> {
    (std::env::args_os().next()? == CELL_NAME).then(|| ExitCode::from(run()))
}

fn run() -> u8 {
    // For whoever looks from the host; a failure changes nothing.
    let _named = rustix::thread::set_name(c"cofferdam-cell");
    let Ok(socket) = take_stdin() else { return 70 };
    let plan = {
        let Ok(copy) = socket.try_clone() else { return 70 };
        match Channel::<Answer, Plan>::new(copy).receive() {
            Ok(Some(received)) => received.message,
            _ => return 70,
        }
    };
    let entered = enter(&plan, init::run);
    let answers = {
        let Ok(copy) = socket.try_clone() else { return 70 };
        Channel::<Answer, Plan>::new(copy)
    };
    match entered {
        Err(error) => {
            let _daemon_gone = answers.send(&Answer::Failed(error), &[]);
            1
        }
        Ok(side) => {
            let ready = Answer::Ready {
                landlock_abi: side.landlock_abi,
                rights_not_handled: side.rights_not_handled,
                seccomp_digest: side.seccomp_digest,
            };
            if answers.send(&ready, &[side.control.as_fd()]).is_err() {
                return 0;
            }
            drop((answers, side.control));
            let code = toolbox::run(Channel::new(socket), side.init);
            drop(side.life);
            // Whoever would inherit it may never reap it.
            let _reaped = waitpid(Some(side.init), WaitOptions::empty());
            code
        }
    }
}

/// Takes the channel off descriptor 0 and leaves `/dev/null` there, so that init does not inherit
/// the toolbox's channel.
fn take_stdin() -> io::Result<OwnedFd> {
    let socket = io::stdin().as_fd().try_clone_to_owned()?;
    let null = std::fs::File::open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    Ok(socket)
}
