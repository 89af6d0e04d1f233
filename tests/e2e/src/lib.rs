//! The harness of every test that drives the real daemon: it starts `cofferdam serve` as root or
//! as an ordinary user in a unique directory, waits for the line that says it is ready, speaks gRPC
//! to it over its socket, and ends it by its own process id.
//!
//! Nothing here sleeps to let something happen: [`wait_for`] watches a state and gives up loudly.
#![forbid(unsafe_code)]

mod binary;
mod call;
mod daemon;
mod host;
mod processes;
mod raw;
mod tool;
mod watch;

pub use binary::{binary, probe, standalone};
pub use call::{Run, bash, duration, error_info, field_violations, limits, program, unique};
pub use daemon::{Daemon, Options, call_tool, tools_of};
pub use host::{Outside, USER, Who, as_user, run_outside, snapshot};
pub use processes::{Process, all_processes, descendants};
pub use raw::raw_call;
pub use tool::{ToolError, ToolReply};
pub use watch::{CellTrace, Footprint, resident_bytes, wait_for, within};

use std::future::Future;
use std::time::Duration;

/// Longest time of one test: none may hang the suite.
const TEST_TIME_MAX: Duration = Duration::from_secs(400);

/// Runs one test on a thread of its own, within [`TEST_TIME_MAX`].
pub fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime can be built");
    runtime.block_on(async {
        tokio::time::timeout(TEST_TIME_MAX, test).await.expect("the test ends within its time");
    });
}

/// Whether the long counts are wanted (`COFFERDAM_SOAK=1`).
pub fn soak() -> bool {
    std::env::var_os("COFFERDAM_SOAK").is_some_and(|value| value == "1")
}

/// Defines tests that run with a daemon of root and with a daemon of an ordinary user: each
/// `async fn name(who)` becomes `name::as_root` and `name::as_user`.
#[macro_export]
macro_rules! both {
    ($($(#[$attribute:meta])* async fn $name:ident($who:ident) $body:block)+) => {$(
        $(#[$attribute])*
        mod $name {
            #[allow(unused_imports, reason = "not every test uses every name of its file")]
            use super::*;

            async fn test($who: $crate::Who) $body

            #[test]
            fn as_root() {
                $crate::run(test($crate::Who::Root));
            }

            #[test]
            fn as_user() {
                $crate::run(test($crate::Who::User));
            }
        }
    )+};
}
