//! Many clients at once: no error, and nothing is left.
#![forbid(unsafe_code)]

use std::time::Instant;

use cofferdam_e2e::{Daemon, both, program, soak};
use cofferdam_proto::v1::Exited;
use cofferdam_proto::v1::exit::Reason;
use cofferdam_proto::v1::process_service_client::ProcessServiceClient;
use tokio::task::JoinSet;

const CLIENTS: usize = 64;

both! {
    async fn sixty_four_clients_ten_thousand_calls(who) {
        let daemon = Daemon::start(who).await;
        daemon.bash("true").await.expect_code(0);
        let calls = if soak() { 100_000 } else { 10_000 };
        let before = daemon.footprint();
        let jobs = || std::fs::read_dir(daemon.state.join("jobs")).map_or(0, Iterator::count);
        let jobs_before = jobs();
        let start = Instant::now();
        let mut clients = JoinSet::new();
        for client in 0..CLIENTS {
            let channel = daemon.new_channel();
            let share = calls / CLIENTS + usize::from(client < calls % CLIENTS);
            clients.spawn(async move {
                let mut processes = ProcessServiceClient::new(channel);
                for call in 0..share {
                    let word = format!("{client}.{call}");
                    let request = program(["/bin/echo", &word]);
                    let answer = processes.execute(request).await;
                    let answer = answer.unwrap_or_else(|status| panic!("call {word}: {status:?}"));
                    let answer = answer.into_inner();
                    let reason = answer.exit.and_then(|exit| exit.reason);
                    assert_eq!(reason, Some(Reason::Exited(Exited { code: 0 })), "call {word}");
                    assert_eq!(answer.stdout, format!("{word}\n"), "call {word}");
                }
                share
            });
        }
        let mut done = 0;
        while let Some(client) = clients.join_next().await {
            done += client.expect("every call of the client ended well");
        }
        assert_eq!(done, calls);
        eprintln!("{calls} calls in {:?}", start.elapsed());
        daemon.expect_footprint(&before).await;
        assert_eq!(jobs(), jobs_before, "no job file is left");
        let info = daemon.workspace_info().await;
        assert_eq!(info.calls_total, calls as u64 + 1);
        assert_eq!((info.running_processes, info.cell_generation), (0, 1));
    }
}
