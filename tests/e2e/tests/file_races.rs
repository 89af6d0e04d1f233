//! Files that several want at once, names that change under a call, and ends in the middle of a
//! write: nothing is torn, nothing is lost, and nothing outside is reached.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::fmt::Debug;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use cofferdam_e2e::{Daemon, Who, both, program, snapshot, soak, tools_of, unique, wait_for};
use cofferdam_probes::Pattern;
use cofferdam_proto::v1;
use cofferdam_proto::v1::expected::State;
use cofferdam_proto::v1::filesystem_service_client::FilesystemServiceClient;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::task::JoinSet;
use tonic::transport::Channel;
use tonic::{Code, Status};

type Files = FilesystemServiceClient<Channel>;

/// Turns that a racing program makes at least.
fn turns() -> u64 {
    if soak() { 100_000 } else { 5_000 }
}

fn expected(state: State) -> Option<v1::Expected> {
    Some(v1::Expected { state: Some(state) })
}

/// WriteText of a whole file.
async fn write(
    files: &mut Files,
    session: &str,
    path: &str,
    text: &str,
    expected: Option<v1::Expected>,
) -> Result<v1::FileWritten, Status> {
    let target = v1::WriteTarget {
        path: path.to_owned(),
        expected,
        session: session.to_owned(),
        request_id: unique(),
        ..v1::WriteTarget::default()
    };
    let request = v1::WriteTextRequest { target: Some(target), text: text.to_owned() };
    let answer = files.write_text(request).await?.into_inner();
    Ok(answer.written.expect("a write tells what it wrote"))
}

/// ReadText of a whole file that fits into one answer.
async fn read(files: &mut Files, session: &str, path: &str) -> (String, v1::Stamp) {
    let request = v1::ReadTextRequest {
        path: path.to_owned(),
        max_lines: 1_000_000,
        session: session.to_owned(),
        ..v1::ReadTextRequest::default()
    };
    let answer = files.read_text(request).await.expect("it is readable").into_inner();
    assert_eq!(answer.next_line, 0, "the whole file is in the answer");
    (answer.text, answer.stamp.expect("it is small"))
}

/// The files that were kept because two wrote at once.
fn conflicts(daemon: &Daemon) -> Vec<String> {
    let conflicts = fs::read_dir(daemon.state.join("home/.cofferdam/conflicts"));
    let beside = fs::read_dir(&daemon.workspace).into_iter().flatten().flatten();
    let beside =
        beside.filter(|entry| entry.file_name().to_string_lossy().contains(".cofferdam-kept-"));
    let entries = conflicts.into_iter().flatten().flatten().chain(beside);
    entries.map(|entry| fs::read_to_string(entry.path()).expect("it is a text")).collect()
}

/// The names in a directory of the host, in order.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).expect("it can be listed").flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

both! {
    async fn two_writers_with_one_stamp_have_one_winner(who) {
        let rounds = if soak() { 100_000 } else { 1_000 };
        let daemon = Daemon::start(who).await;
        let mut writers = [daemon.new_channel(), daemon.new_channel()].map(Files::new);
        let path = "/workspace/one";
        let first = write(&mut writers[0], "a", path, "start", expected(State::Absent(v1::Absent {})));
        let mut stamp = first.await.expect("it is new").stamp.expect("a stamp");
        let mut wins = [0, 0];
        for round in 0..rounds {
            let texts = ["a", "b"].map(|letter| format!("{letter}-{round}\n").repeat(1000));
            let expect = || expected(State::Stamp(stamp.clone()));
            let [a, b] = &mut writers;
            let (a, b) = tokio::join!(
                write(a, "a", path, &texts[0], expect()),
                write(b, "b", path, &texts[1], expect())
            );
            let (winner, written, refused) = match (a, b) {
                (Ok(written), Err(refused)) => (0, written, refused),
                (Err(refused), Ok(written)) => (1, written, refused),
                both => panic!("round {round}: exactly one wins: {both:?}"),
            };
            assert_eq!(refused.code(), Code::Aborted, "round {round}: {refused:?}");
            let held = fs::read_to_string(daemon.workspace.join("one")).expect("it is there");
            assert!(held == texts[winner], "round {round}: torn, or the loser's");
            wins[winner] += 1;
            stamp = written.stamp.expect("a stamp");
        }
        assert_eq!(wins[0] + wins[1], rounds, "{wins:?}");
        assert_eq!(names(&daemon.workspace), ["one"]);
    }

    async fn what_a_shell_appends_between_writers_is_not_lost(who) {
        let rounds = if soak() { 20_000 } else { 200 };
        let daemon = Daemon::start(who).await;
        daemon.put_text("shared", "start\n");
        let append = "i=0; while [ ! -e /workspace/end ]; do echo bash-$i >> /workspace/shared; \
                      i=$((i+1)); sleep 0.01; done; echo $i";
        let shell = tokio::spawn({
            let mut client = tools_of(daemon.new_channel());
            let input = serde_json::json!({ "command": append, "timeoutSeconds": 350 }).to_string();
            async move { cofferdam_e2e::call_tool(&mut client, "shell", "bash", input).await }
        });
        wait_for("the shell appends", Duration::from_secs(10), || {
            let held = fs::read_to_string(daemon.workspace.join("shared")).ok()?;
            held.contains("bash-1").then_some(())
        })
        .await;
        let mut writers = JoinSet::new();
        for name in ["a", "b"] {
            let mut files = Files::new(daemon.new_channel());
            writers.spawn(async move { append_lines(&mut files, name, rounds).await });
        }
        let mut told = HashSet::from(["start".to_owned()]);
        let mut archived = HashSet::new();
        while let Some(ended) = writers.join_next().await {
            let (lines, set_aside) = ended.expect("no writer panicked");
            told.extend(lines);
            archived.extend(set_aside);
        }
        daemon.put_text("end", "");
        let shell = shell.await.expect("no panic").expect("it answers");
        let appended: u64 = shell.expect_code(0).text("stdout").trim().parse().expect("a number");
        told.extend((0..appended).map(|number| format!("bash-{number}")));
        let mut found = archived;
        let held = fs::read_to_string(daemon.workspace.join("shared")).expect("it is there");
        for text in conflicts(&daemon).iter().chain([&held]) {
            found.extend(text.lines().map(str::to_owned));
        }
        let lost: Vec<_> = told.difference(&found).collect();
        assert!(lost.is_empty(), "{} of {} lines are lost: {lost:?}", lost.len(), told.len());
        // Beside what a shell still had open, under names that say so.
        let mut left = names(&daemon.workspace);
        left.retain(|name| !name.contains(".cofferdam-kept-"));
        assert_eq!(left, ["end", "shared"]);
    }

    async fn names_that_change_under_a_call_lead_nowhere_else(who) {
        let rounds = if soak() { 2_000 } else { 60 };
        let daemon = Daemon::start(who).await;
        let probe = daemon.put_probe();
        let decoy = daemon.outside.join("decoy");
        fs::create_dir_all(decoy.join("sub")).expect("a directory");
        for name in ["f", "secret", "sub/f"] {
            fs::write(decoy.join(name), DECOY).expect("a file");
        }
        fs::set_permissions(&daemon.outside, std::os::unix::fs::PermissionsExt::from_mode(0o777))
            .expect("root can");
        let make = format!(
            "mkdir vault; echo vault > vault/f; for n in 1 2 3 4; do mkdir -p a$n/spot; \
             echo inside > a$n/spot/f; done; ln -s {decoy} a1/link; ln -s /etc a2/link; \
             ln -s /workspace/vault a4/link; mkdir a5; echo inside > a5/f; ln -s {decoy}/f a5/link",
            decoy = decoy.display()
        );
        daemon.shell(&make).await.expect(0, "");
        let etc = "find -P /etc -exec stat -c '%n %s %Y %a' {} + | sort | sha256sum; \
                   cat /etc/passwd | sha256sum";
        let etc_before = daemon.shell(etc).await.ok().text("stdout").to_owned();
        let (outside_before, root_before) = (snapshot(&daemon.outside), names(Path::new("/")));
        // The session has read what lies in the arenas, and never the vault.
        let mut files = daemon.files();
        for arena in ["a1/spot/f", "a2/spot/f", "a3/spot/f", "a4/spot/f", "a5/f"] {
            read(&mut files, "racer", &format!("/workspace/{arena}")).await;
        }

        let mut racers = JoinSet::new();
        let (turns, end) = (turns().to_string(), "/workspace/end");
        let outside = decoy.display().to_string();
        for argv in [
            ["exchange", "/workspace/a1/spot", "/workspace/a1/link", &turns, end],
            ["exchange", "/workspace/a2/spot", "/workspace/a2/link", &turns, end],
            ["replace", "/workspace/a3/spot", &outside, &turns, end],
            ["exchange", "/workspace/a4/spot", "/workspace/a4/link", &turns, end],
            ["exchange", "/workspace/a5/f", "/workspace/a5/link", &turns, end],
        ] {
            let request = program([probe.as_str()].into_iter().chain(argv));
            let channel = daemon.new_channel();
            racers.spawn(async move {
                let mut client =
                    v1::process_service_client::ProcessServiceClient::new(channel);
                client.execute(request).await
            });
        }
        wait_for("the racers run", Duration::from_secs(20), || {
            (daemon.marked(end).len() >= 5).then_some(())
        })
        .await;
        for round in 0..rounds {
            for arena in ["a1/spot", "a2/spot", "a3/spot", "a4/spot"] {
                harass(&daemon, &format!("/workspace/{arena}"), "f", round).await;
            }
            harass(&daemon, "/workspace/a5", "f", round).await;
        }
        daemon.put_text("end", "");
        while let Some(ended) = racers.join_next().await {
            let answer = ended.expect("no panic").expect("it answers").into_inner();
            let said = String::from_utf8_lossy(&answer.stdout).into_owned();
            let made: u64 =
                said.trim().parse().unwrap_or_else(|_| panic!("a racer said {said}: {answer:?}"));
            assert!(made >= turns.parse().expect("a number"), "{made}");
        }

        assert_eq!(snapshot(&daemon.outside), outside_before);
        for name in ["f", "secret", "sub/f"] {
            assert_eq!(fs::read_to_string(decoy.join(name)).expect("it is there"), DECOY);
        }
        assert_eq!(names(Path::new("/")), root_before);
        daemon.shell(etc).await.expect(0, &etc_before);
        daemon.shell("cat vault/f").await.expect(0, "vault\n");
        let known = ["f", "made", "moved", "new", "sub", "spot", "link", "spot.aside"];
        let workspace = snapshot(&daemon.workspace);
        for line in &workspace {
            let path = line.split(' ').next().expect("a path");
            let below = path.strip_prefix(daemon.workspace.to_str().expect("UTF-8")).expect("below");
            let mut components = below.split('/').skip(2);
            assert!(components.all(|name| known.contains(&name)), "left behind: {line}");
        }
    }

    async fn a_killed_daemon_leaves_the_old_or_the_new_file(who) {
        killed_in_the_middle(who, Victim::Daemon, false).await;
    }

    async fn a_killed_daemon_leaves_the_old_or_the_new_file_also_in_place(who) {
        killed_in_the_middle(who, Victim::Daemon, true).await;
    }

    async fn a_killed_toolbox_leaves_the_old_or_the_new_file(who) {
        killed_in_the_middle(who, Victim::Toolbox, false).await;
    }

    async fn a_killed_toolbox_leaves_the_old_or_the_new_file_also_in_place(who) {
        killed_in_the_middle(who, Victim::Toolbox, true).await;
    }
}

/// What only the host may see.
const DECOY: &str = "DECOY-7f3a";

/// Appends lines of a writer's own, reading again after each refusal. Gives the lines whose write
/// was told to have happened, and those that were taken out on purpose to keep the file small.
async fn append_lines(
    files: &mut Files,
    name: &str,
    rounds: u32,
) -> (Vec<String>, HashSet<String>) {
    let (mut told, mut archived) = (Vec::new(), HashSet::new());
    let start = Instant::now();
    let mut number = 0;
    while told.len() < rounds as usize {
        assert!(start.elapsed() < Duration::from_secs(300), "{name} never gets through");
        let (text, stamp) = read(files, name, "/workspace/shared").await;
        let line = format!("{name}-{number}");
        number += 1;
        let small = text.len() < 32 * 1024;
        let new = if small { format!("{text}{line}\n") } else { format!("{line}\n") };
        let expect = expected(State::Stamp(stamp));
        match write(files, name, "/workspace/shared", &new, expect).await {
            Ok(_) => {
                told.push(line);
                if !small {
                    archived.extend(text.lines().map(str::to_owned));
                }
            }
            Err(refused) => assert_eq!(refused.code(), Code::Aborted, "{refused:?}"),
        }
    }
    (told, archived)
}

/// Makes every kind of call against a directory whose name changes meanwhile.
async fn harass(daemon: &Daemon, directory: &str, name: &str, round: u32) {
    let mut files = daemon.files();
    let path = |name: &str| format!("{directory}/{name}");
    let (file, new, made, moved) = (path(name), path("new"), path("made"), path("moved"));
    let any = || expected(State::Any(v1::Any {}));
    let session = || "racer".to_owned();

    clean(daemon.read(&file).await.json);
    clean(
        daemon
            .call_as(
                "racer",
                "write_file",
                serde_json::json!({
                    "filePath": file, "content": format!("inside {round}\n"),
                }),
            )
            .await
            .json,
    );
    clean(
        daemon
            .call_as(
                "racer",
                "edit_file",
                serde_json::json!({
                    "filePath": file, "oldString": "inside", "newString": "inside",
                    "replaceAll": true,
                }),
            )
            .await
            .json,
    );
    let edit = serde_json::json!({
        "filePath": file, "oldString": format!("inside {round}"), "newString": "inside",
    });
    clean(daemon.call_as("racer", "edit_file", edit).await.json);
    let glob = serde_json::json!({ "pattern": "**/secret", "path": directory });
    let found = daemon.call("glob", glob).await;
    if !found.is_error {
        assert_eq!(found.number("count"), 0, "{}", found.describe());
    }
    clean(found.json);
    let grep = serde_json::json!({ "pattern": "DECOY", "path": directory });
    let found = daemon.call("grep", grep).await;
    assert!(!found.json.to_string().contains(DECOY), "{}", found.describe());

    for path in [&file, directory] {
        let request =
            v1::StatRequest { path: path.to_owned(), with_stamp: true, ..Default::default() };
        checked(files.stat(request).await);
    }
    let list = v1::ListDirRequest { path: directory.to_owned(), ..Default::default() };
    checked(files.list_dir(list).await);
    let make = v1::MakeDirRequest {
        path: made.clone(),
        session: session(),
        request_id: unique(),
        parents: true,
        mode: 0,
    };
    checked(files.make_dir(make).await);
    checked(write(&mut files, "racer", &new, "inside new\n", any()).await);
    let r#move = v1::MoveRequest {
        from: new.clone(),
        to: moved.clone(),
        expected: any(),
        session: session(),
        request_id: unique(),
    };
    checked(files.r#move(r#move).await);
    for path in [moved, new, made] {
        let remove = v1::RemoveRequest {
            path,
            expected: any(),
            session: session(),
            request_id: unique(),
            recursive: true,
        };
        checked(files.remove(remove).await);
    }
}

/// Asserts that a tool's answer shows nothing of the decoy.
#[track_caller]
fn clean(json: serde_json::Value) {
    let said = json.to_string();
    assert!(!said.contains(DECOY), "{said}");
}

/// Asserts that an answer shows nothing of the decoy, or that a refusal is one of ours.
#[track_caller]
fn checked<T: Debug>(answer: Result<T, Status>) {
    let said = format!("{answer:?}");
    assert!(!said.contains(DECOY), "{said}");
    if let Err(status) = answer {
        let odd = [Code::Internal, Code::Unknown, Code::Unavailable, Code::Unimplemented];
        assert!(!odd.contains(&status.code()), "{status:?}");
    }
}

/// Who is killed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Victim {
    Daemon,
    Toolbox,
}

/// Kills the victim at a random moment of a write of 1 MiB over 1 MiB, again and again, and checks
/// what is left. In place: the file's directory cannot be written.
async fn killed_in_the_middle(who: Who, victim: Victim, in_place: bool) {
    const SIZE: usize = 1 << 20;
    let rounds: u64 = if soak() { 1_000 } else { 60 };
    let mut daemon = Daemon::start(who).await;
    let text = |round: u64| {
        let line = format!("round {round:06}\n");
        line.repeat(SIZE / line.len())
    };
    let (path, host) = ("/workspace/d/f", daemon.workspace.join("d/f"));
    let any = || expected(State::Any(v1::Any {}));
    write(&mut daemon.files(), "t", path, &text(0), any()).await.expect("it is new");
    if in_place {
        daemon.shell("chmod 555 d").await.expect(0, "");
    }
    let start = Instant::now();
    let written = write(&mut daemon.files(), "t", path, &text(1), any()).await.expect("a write");
    let mut window = start.elapsed().mul_f64(1.5);
    assert_eq!(written.atomic, !in_place);
    let (mut held, mut outcomes) = (1, [0, 0]);
    for round in 2..rounds + 2 {
        let mut files = Files::new(daemon.new_channel());
        let new = text(round);
        let call = tokio::spawn(async move {
            let any = expected(State::Any(v1::Any {}));
            write(&mut files, "t", path, &new, any).await
        });
        // The moment is the seed's, from before the start to a little after the end: the window
        // follows what the rounds show, for a busy machine has its own times.
        let random = Pattern::new(round).bytes(0, 4);
        let random = u32::from_le_bytes([random[0], random[1], random[2], random[3]]);
        tokio::time::sleep(window.mul_f64(f64::from(random) / f64::from(u32::MAX))).await;
        match victim {
            Victim::Daemon => daemon.kill_and_restart().await,
            Victim::Toolbox => {
                let toolbox = daemon.toolbox().pid;
                kill(Pid::from_raw(toolbox), Signal::SIGKILL).expect("root can kill it");
            }
        }
        let told = call.await.expect("no panic");
        answers_again(&daemon, path).await;
        let now = fs::read_to_string(&host).expect("it is there");
        let is_new = now == text(round);
        assert!(is_new || now == text(held), "round {round}: neither old nor new");
        assert!(told.is_err() || is_new, "round {round}: told to be written: {told:?}");
        if is_new {
            held = round;
        }
        outcomes[usize::from(is_new)] += 1;
        window = window.mul_f64(if is_new { 0.85 } else { 1.15 });
        assert_eq!(names(&daemon.workspace.join("d")), ["f"], "round {round}");
        assert_eq!(names(&daemon.workspace), ["d"], "round {round}");
    }
    assert!(outcomes[0] > 0 && outcomes[1] > 0, "the moments are spread: {outcomes:?}");
}

/// Waits until the cell that follows a killed one answers about a file.
async fn answers_again(daemon: &Daemon, path: &str) {
    let start = Instant::now();
    loop {
        let request = v1::StatRequest { path: path.to_owned(), ..v1::StatRequest::default() };
        match daemon.files().stat(request).await {
            Ok(_) => return,
            Err(status) => {
                let waits = status.code() == Code::Unavailable || status.code() == Code::Aborted;
                assert!(waits && start.elapsed() < Duration::from_secs(20), "{status:?}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}
