//! From `--connect`, `--workspace` and the environment to a connected client.

use std::future::Future;
use std::path::Path;
use std::time::Duration;

use cofferdam_client::{Client as _, ClientError};
use cofferdam_client_grpc::{AddressError, GrpcClient, UnixAddress};
use thiserror::Error;

use crate::args::TargetArgs;
use crate::join::{self, JoinError, Wanted};
use crate::prepare::{self, PolicyError};
use crate::state::{self, StateDir, StateError};
use crate::text;

/// How often a call is tried on a new daemon, when the one that was found is just ending. Each
/// time a daemon is waited for or started, so more tries mean that daemons end as they start.
const TRIES_MAX: u32 = 5;

/// Longest wait for the end of a daemon that is ending, before the next one is looked for.
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// Why no call could be made.
#[derive(Debug, Error)]
pub(crate) enum ConnectError {
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Address(#[from] AddressError),
    #[error(transparent)]
    Join(#[from] JoinError),
    #[error(transparent)]
    Policy(#[from] PolicyError),
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The running daemon has another policy.
    #[error(
        "the running daemon of {workspace} has the policy {running}, and the policy asked for is {asked}"
    )]
    OtherPolicy { workspace: String, running: String, asked: String },
}

impl ConnectError {
    /// What would help.
    pub(crate) fn hint(&self) -> Option<&'static str> {
        match self {
            Self::OtherPolicy { .. } => Some("stop that daemon, or leave --policy out"),
            _ => None,
        }
    }
}

/// Which daemon is meant.
#[derive(Debug)]
pub(crate) enum Target {
    /// The one at this address, and no other.
    Address(UnixAddress),
    /// That of a workspace, which is started when it does not run.
    Workspace(Wanted),
}

impl Target {
    /// A flag is stronger than the environment, and the environment stronger than the default.
    pub(crate) fn choose(args: &TargetArgs) -> Result<Self, ConnectError> {
        let from_environment = || {
            let named = args.workspace.is_some() || args.state.is_some() || args.policy.is_some();
            std::env::var("COFFERDAM_ADDR").ok().filter(|text| !named && !text.is_empty())
        };
        if let Some(address) = args.connect.clone().or_else(from_environment) {
            return Ok(Self::Address(UnixAddress::parse(&address)?));
        }
        let workspace = state::workspace(args.workspace.as_deref().unwrap_or(Path::new(".")))?;
        let state = StateDir::locate(&workspace, args.state.as_deref())?;
        let policy = args.policy.clone();
        Ok(Self::Workspace(Wanted { workspace, state, policy, idle_exit: args.idle_exit }))
    }

    /// Connects and makes the first call. When the daemon that was found turns out to be ending,
    /// so that the call was certainly not carried out, the next one is asked.
    pub(crate) async fn call<T, F>(
        &self,
        first_call: impl Fn(GrpcClient) -> F,
    ) -> Result<(GrpcClient, T), ConnectError>
    where
        F: Future<Output = Result<T, ClientError>>,
    {
        let wanted = match self {
            Self::Address(address) => {
                let client = GrpcClient::connect(address).await?;
                let answer = first_call(client.clone()).await?;
                return Ok((client, answer));
            }
            Self::Workspace(wanted) => wanted,
        };
        let mut tries = 1;
        loop {
            let address = join::join_or_start(wanted)?;
            let result = async {
                let client = GrpcClient::connect(&address).await?;
                meet(&client, wanted).await?;
                let answer = first_call(client.clone()).await?;
                Ok((client, answer))
            };
            match result.await {
                Err(ConnectError::Client(error))
                    if tries < TRIES_MAX && not_carried_out(&error) =>
                {
                    join::wait_for_end(&wanted.state, PAUSE_MAX)?;
                    tries += 1;
                }
                result => return result,
            }
        }
    }
}

/// Whether the daemon certainly did nothing: it said so, or the call was never sent.
fn not_carried_out(error: &ClientError) -> bool {
    error.is_unavailable() || matches!(error, ClientError::Transport { .. })
}

/// Makes sure that a daemon serves this connection, by a call that changes nothing: one that was
/// only queued at the socket of a daemon which then ended would leave the next call's outcome open.
/// A daemon with a client does not end for idleness. And a policy that was asked for must be the one
/// in force.
async fn meet(client: &GrpcClient, wanted: &Wanted) -> Result<(), ConnectError> {
    let running = client.get_capabilities().await?.enforcement.policy_digest;
    if wanted.policy.is_none() {
        return Ok(());
    }
    let asked = prepare::policy(wanted.policy.as_deref())?.digest();
    if running == asked {
        return Ok(());
    }
    let short = |digest: &[u8; 32]| text::hex(&digest[..8]);
    Err(ConnectError::OtherPolicy {
        workspace: wanted.workspace.display().to_string(),
        running: short(&running),
        asked: short(&asked),
    })
}

/// A new request id: 128 random bits.
pub(crate) fn request_id() -> String {
    let mut bytes = [0_u8; 16];
    // Up to 256 bytes come whole, or not at all (getrandom(2)).
    rustix::io::retry_on_intr(|| {
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
    })
    .expect("every kernel with Landlock has getrandom");
    format!("cli-{}", text::hex(&bytes))
}
