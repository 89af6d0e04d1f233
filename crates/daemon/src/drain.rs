//! When the daemon leaves, and how: new calls are refused, running ones end, what is left is
//! killed. Background processes of calls that ended do not hold it up; they end with the cell.

use std::time::Duration;

use cofferdam_cell::protocol::KillCause;
use tokio::sync::watch;

use crate::decide::{GRACE, KILL_MAX};
use crate::supervisor::{Handle, State};

/// Waits until for so long no client was connected and no process of a call lived.
pub(crate) async fn idle(
    time: Option<Duration>,
    mut connections: watch::Receiver<usize>,
    mut state: watch::Receiver<State>,
) {
    let Some(time) = time else { return std::future::pending().await };
    loop {
        let open = *connections.borrow_and_update();
        let trees = state.borrow_and_update().trees;
        let quiet = open == 0 && trees == 0;
        tokio::select! {
            () = tokio::time::sleep(time), if quiet => return,
            result = connections.changed() => if result.is_err() { return },
            result = state.changed() => if result.is_err() { return },
        }
    }
}

/// Refuses new calls, gives running ones `grace` to end, then kills them.
pub(crate) async fn drain(supervisor: &Handle, grace: Duration) {
    supervisor.drain().await;
    if tokio::time::timeout(grace, all_ended(supervisor)).await.is_ok() {
        return;
    }
    let left = supervisor.state().borrow().running;
    tracing::warn!(left, "calls did not end in time and are killed");
    supervisor.kill_running(KillCause::Drain).await;
    if tokio::time::timeout(GRACE + KILL_MAX, all_ended(supervisor)).await.is_err() {
        tracing::error!("killed calls did not end");
    }
}

async fn all_ended(supervisor: &Handle) {
    // An error means that the supervisor is gone, and every call with it.
    let _ = supervisor.state().wait_for(|state| state.running == 0).await;
}
