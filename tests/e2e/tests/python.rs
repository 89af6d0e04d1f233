//! Stock Python grpcio, which knows nothing of us, drives the daemon by reflection.
#![forbid(unsafe_code)]

use std::env;
use std::process::Command;

use cofferdam_e2e::{Daemon, both, run_outside};

const CLIENT: &str = include_str!("stock_client.py");

both! {
    async fn stock_grpcio_drives_the_daemon(who) {
        let daemon = Daemon::start(who).await;
        let python = env::var("COFFERDAM_PYTHON").unwrap_or_else(|_| "python3".to_owned());
        let needed = "import grpc, grpc_health.v1.health_pb2, grpc_reflection.v1alpha.reflection_pb2";
        let there = Command::new(&python).args(["-c", needed]).output().expect("python can be started");
        assert!(
            there.status.success(),
            "{python} lacks grpcio, grpcio-health-checking or grpcio-reflection: set COFFERDAM_PYTHON \
             to one that has them (`cargo xtask test` does): {}",
            String::from_utf8_lossy(&there.stderr)
        );
        let script = daemon.directory().join("stock_client.py");
        std::fs::write(&script, CLIENT).expect("a script");
        let mut command = who.command("env");
        // The interpreter may lie where only root can reach it; root may connect to any daemon.
        if !run_as_user_works(&python, who) {
            command = Command::new("env");
        }
        let client = run_outside(command.arg(&python).arg(&script).arg(daemon.socket()));
        let services = ["Filesystem", "Process", "Stamp", "Tool", "Workspace"]
            .map(|name| format!("cofferdam.v1.{name}Service"))
            .join(" ");
        assert_eq!(
            client.stdout,
            format!(
                "health SERVING\n\
                 v1alpha {services}\n\
                 v1 {services}\n\
                 execute 7 b'from python\\n'\n\
                 stream started stdout exit\n\
                 refused INVALID_ARGUMENT\n"
            ),
            "{}",
            client.stderr
        );
    }
}

fn run_as_user_works(python: &str, who: cofferdam_e2e::Who) -> bool {
    // Through `env`, which has only that user's rights: setpriv itself executes with root's.
    let mut command = who.command("env");
    command.args([python, "-c", "import grpc"]).output().is_ok_and(|output| output.status.success())
}
