//! When the daemon leaves, and how: new calls are refused, running ones end, what is left is
//! killed. Background processes of calls that ended do not hold it up; they end with the cell.

use std::time::{Duration, Instant};

use cofferdam_cell::protocol::KillCause;
use tokio::sync::watch;

use crate::decide::{GRACE, KILL_MAX};
use crate::listen::Connections;
use crate::supervisor::{Handle, State};

/// How often the wait for idleness looks, as a part of it. It asks by the clock instead of being
/// told, because to be told would wake one more task several times in every call.
const LOOKS: u32 = 8;

/// What has happened so far, as far as idleness goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Activity {
    connections: u64,
    calls: u64,
    busy: bool,
}

/// Waits until for so long no client was connected and no process of a call lived; at most an
/// eighth longer.
pub(crate) async fn idle(
    time: Option<Duration>,
    connections: watch::Receiver<Connections>,
    state: watch::Receiver<State>,
) {
    let Some(time) = time else { return std::future::pending().await };
    let look = || {
        let Connections { open, total } = *connections.borrow();
        let state = state.borrow();
        Activity { connections: total, calls: state.calls, busy: open > 0 || state.trees > 0 }
    };
    let mut last = look();
    let mut quiet_since = Instant::now();
    loop {
        tokio::time::sleep(time / LOOKS).await;
        let now = look();
        if now.busy || now != last {
            quiet_since = Instant::now();
        }
        if quiet_since.elapsed() >= time {
            return;
        }
        last = now;
    }
}

/// Refuses new calls, gives running ones `grace` to end, then kills them.
pub(crate) async fn drain(supervisor: &Handle, grace: Duration) {
    supervisor.drain();
    if tokio::time::timeout(grace, all_ended(supervisor)).await.is_ok() {
        return;
    }
    let left = supervisor.state().borrow().running;
    tracing::warn!(left, "calls did not end in time and are killed");
    supervisor.kill_running(KillCause::Drain);
    if tokio::time::timeout(GRACE + KILL_MAX, all_ended(supervisor)).await.is_err() {
        tracing::error!("killed calls did not end");
    }
}

async fn all_ended(supervisor: &Handle) {
    // An error means that the supervisor is gone, and every call with it.
    let _ = supervisor.state().wait_for(|state| state.running == 0).await;
}
