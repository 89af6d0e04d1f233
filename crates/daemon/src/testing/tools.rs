//! Calls of tools, as far as they need no files: those are tested end to end.

use cofferdam_proto::v1::tool_service_client::ToolServiceClient;
use serde_json::{Value, json};
use tonic::Code;
use tonic_types::StatusExt;

use super::*;
use crate::files::{Caller, Files};
use crate::supervisor::Supervisor;
use crate::tools::{Background, Tools};
use crate::validate::Rules;

fn call(name: &str, input: &Value) -> v1::CallToolRequest {
    v1::CallToolRequest {
        name: name.to_owned(),
        input_json: input.to_string(),
        session: "s".to_owned(),
        request_id: request_id(),
    }
}

async fn tools(daemon: &TestDaemon) -> ToolServiceClient<Channel> {
    ToolServiceClient::new(connect(daemon.directory.path().join("socket")).await)
}

/// What a tool answers, and whether that is an error.
async fn answer(daemon: &TestDaemon, name: &str, input: Value) -> (Value, bool) {
    let mut tools = tools(daemon).await;
    let answer = soon(tools.call_tool(call(name, &input))).await.unwrap().into_inner();
    assert_eq!(answer.enforcement.unwrap().level, "namespaces");
    (serde_json::from_str(&answer.output_json).unwrap(), answer.is_error)
}

#[tokio::test]
async fn tools_are_listed_in_their_order_with_closed_schemas() {
    let daemon = TestDaemon::new().await;
    let listed = tools(&daemon).await.list_tools(v1::ListToolsRequest {}).await.unwrap();
    let listed = listed.into_inner().tools;
    let names: Vec<(&str, bool)> =
        listed.iter().map(|tool| (tool.name.as_str(), tool.read_only)).collect();
    let expected = [
        ("bash", false),
        ("read_file", true),
        ("write_file", false),
        ("edit_file", false),
        ("glob", true),
        ("grep", true),
    ];
    assert_eq!(names, expected);
    for tool in &listed {
        let schema: Value = serde_json::from_str(&tool.input_schema_json).unwrap();
        assert_eq!(schema["type"], "object");
        assert_eq!(schema["additionalProperties"], false, "{}", tool.name);
    }
}

#[tokio::test]
async fn a_command_brings_both_streams_and_its_code() {
    let daemon = TestDaemon::new().await;
    let command = json!({ "command": "printf abc; echo 'exit code: 0' >&2; exit 5" });
    let expected = json!({
        "status": "completed", "exitCode": 5, "stdout": "abc", "stderr": "exit code: 0\n",
        "truncated": false,
    });
    assert_eq!(answer(&daemon, "bash", command).await, (expected, false));
}

#[tokio::test]
async fn a_command_above_its_time_keeps_what_it_printed() {
    let daemon = TestDaemon::new().await;
    let command = json!({ "command": "echo line; sleep 60", "timeoutSeconds": 0.5 });
    let (output, is_error) = answer(&daemon, "bash", command).await;
    assert!(!is_error);
    assert_eq!((&output["status"], &output["exitCode"]), (&json!("timed_out"), &Value::Null));
    assert_eq!(output["stdout"], "line\n");
    assert!(output["message"].as_str().unwrap().starts_with("Timed out after 0.5 s; "), "{output}");
}

#[tokio::test]
async fn a_command_that_a_signal_ends_says_which() {
    let daemon = TestDaemon::new().await;
    let (output, _) = answer(&daemon, "bash", json!({ "command": "kill -SEGV $$" })).await;
    assert_eq!((&output["exitCode"], &output["signal"]), (&json!(139), &json!(11)));
}

#[tokio::test]
async fn a_time_above_the_policys_is_refused_and_nothing_runs() {
    let daemon = TestDaemon::with(|config| {
        config.plan.policy.limits.wall = Some(Duration::from_secs(10));
    })
    .await;
    let mark = daemon.directory.path().join("mark");
    let command = format!("touch {}", mark.display());
    let input = json!({ "command": command, "timeoutSeconds": 11 });
    let (output, is_error) = answer(&daemon, "bash", input).await;
    assert!(is_error && !mark.exists());
    assert_eq!(output["error"]["code"], "INVALID_INPUT");
    let (_, is_error) = answer(&daemon, "bash", json!({ "command": command })).await;
    assert!(!is_error && mark.exists());
}

#[tokio::test]
async fn a_wrong_input_is_an_answer_and_nothing_runs() {
    let daemon = TestDaemon::new().await;
    let table = [
        ("nosuch", json!({})),
        ("bash", json!({})),
        ("bash", json!({ "command": "true", "cwd": "/" })),
        ("bash", json!({ "command": "a\0b" })),
        ("read_file", json!({ "filePath": "relative" })),
        ("grep", json!({ "pattern": "" })),
        ("edit_file", json!({ "filePath": "/f", "oldString": "a", "newString": "a" })),
    ];
    for (name, input) in table {
        let (output, is_error) = answer(&daemon, name, input.clone()).await;
        assert!(is_error, "{name} {input}");
        assert_eq!(output["error"]["code"], "INVALID_INPUT", "{name} {input}");
    }
}

#[tokio::test]
async fn a_call_without_session_or_id_is_no_call() {
    let daemon = TestDaemon::new().await;
    let request = v1::CallToolRequest { name: "bash".to_owned(), ..Default::default() };
    let status = tools(&daemon).await.call_tool(request).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    let details = status.get_error_details();
    let violations = &details.bad_request().unwrap().field_violations;
    let fields: Vec<&str> = violations.iter().map(|one| one.field.as_str()).collect();
    assert_eq!(fields, ["request_id", "session"]);
}

#[tokio::test]
async fn a_command_ends_with_its_client() {
    let daemon = TestDaemon::new().await;
    let mark = daemon.directory.path().join("mark");
    let command = format!("touch {}; sleep 60", mark.display());
    let mut client = tools(&daemon).await;
    let request = call("bash", &json!({ "command": command }));
    let waiting = tokio::spawn(async move { client.call_tool(request).await });
    until(async || mark.exists()).await;
    waiting.abort();
    let mut workspace = daemon.workspace.clone();
    until(async || {
        let answer = workspace.get_workspace(v1::GetWorkspaceRequest {}).await.unwrap();
        answer.into_inner().running_processes == 0
    })
    .await;
}

/// Tools over a fake cell, which lose patience soon.
struct Impatient {
    tools: Tools,
    directory: tempfile::TempDir,
    _cell: FakeCell,
}

impl Impatient {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (cell, port) = fake::launch(directory.path().to_owned());
        let launch = || Err(LaunchError::Spawn(std::io::Error::other("one cell is enough")));
        let logs = directory.path().to_owned();
        let (supervisor, handle) = Supervisor::new(Box::new(launch), port, logs, 7).unwrap();
        tokio::spawn(supervisor.run());
        let rules = Arc::new(Rules {
            limits: cofferdam_spec::Limits::default(),
            environment: std::collections::BTreeMap::from([(
                "PATH".to_owned(),
                "/usr/bin:/bin".to_owned(),
            )]),
        });
        let jobs = directory.path().join("cell/jobs").to_string_lossy().into_owned();
        let background = Background { after: Duration::from_millis(300), jobs };
        let tools = Tools::new(handle.clone(), rules, Files::new(handle), background);
        Self { tools, directory, _cell: cell }
    }

    async fn bash(&self, command: &str) -> Value {
        let session = cofferdam_spec::SessionId::new("s").unwrap();
        let caller = Caller { session, call: request_id() };
        let input = json!({ "command": command }).to_string();
        let answer = soon(self.tools.call(&caller, "bash", &input)).await.unwrap();
        assert!(!answer.is_error, "{}", answer.output_json);
        serde_json::from_str(&answer.output_json).unwrap()
    }
}

fn text(path: &std::path::Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

#[tokio::test]
async fn a_slow_command_goes_on_and_its_files_follow_it() {
    let tools = Impatient::new();
    let go = tools.directory.path().join("go");
    let wait = format!("until [ -e {} ]; do sleep 0.01; done", go.display());
    let output = tools.bash(&format!("echo first; {wait}; echo last; echo err >&2; exit 7")).await;
    assert_eq!((&output["status"], &output["exitCode"]), (&json!("running"), &Value::Null));
    assert_eq!(output["stdout"], "first\n");
    let job = PathBuf::from(output["outputDirectory"].as_str().unwrap());
    assert_eq!(job.file_name().unwrap().len(), 8);
    let message = output["message"].as_str().unwrap();
    assert!(message.contains(&format!("kill -- -{} stops it", output["pid"])), "{message}");
    assert_eq!(text(&job.join("stdout")).as_deref(), Some("first\n"));
    assert_eq!(text(&job.join("exit")), None);
    // Somebody cleans up; the files come back with the next news.
    std::fs::remove_dir_all(&job).unwrap();
    std::fs::write(&go, "").unwrap();
    until(async || text(&job.join("exit")).is_some()).await;
    let files = ["exit", "stdout", "stderr"].map(|name| text(&job.join(name)).unwrap());
    assert_eq!(files, ["7\n", "first\nlast\n", "err\n"]);
}

#[tokio::test]
async fn what_an_answer_leaves_out_is_in_a_file_and_else_there_is_none() {
    let tools = Impatient::new();
    let output = tools.bash("seq 2000").await;
    assert_eq!((&output["truncated"], output.get("outputDirectory")), (&json!(false), None));
    assert!(!tools.directory.path().join("cell").exists());
    let output = tools.bash("seq 2001").await;
    let shown = output["stdout"].as_str().unwrap();
    let marker = shown.lines().nth(500).unwrap();
    let start = "[stdout truncated: showing first 500 and last 1500 of 2001 lines; all of it: ";
    let path = marker.strip_prefix(start).unwrap().strip_suffix(']').unwrap();
    let all: String = (1..=2001).map(|line| format!("{line}\n")).collect();
    assert_eq!(text(path.as_ref()), Some(all));
}

#[tokio::test]
async fn a_command_that_is_too_long_for_an_argument_runs_all_the_same() {
    let tools = Impatient::new();
    let long = "x".repeat(200_000);
    let output = tools.bash(&format!("cat <<'EOF' | wc -c\n{long}\nEOF\nexit 9")).await;
    assert_eq!((&output["stdout"], &output["exitCode"]), (&json!("200001\n"), &json!(9)));
    // The file that it was in is gone with it.
    let jobs = tools.directory.path().join("cell/jobs");
    assert_eq!(std::fs::read_dir(&jobs).unwrap().count(), 0);
}

#[tokio::test]
async fn files_of_the_last_jobs_stay_and_older_ones_go() {
    let tools = Impatient::new();
    let go = tools.directory.path().join("go");
    let wait = format!("until [ -e {} ]; do sleep 0.01; done", go.display());
    let running = tools.bash(&wait).await;
    let running = PathBuf::from(running["outputDirectory"].as_str().unwrap());
    let mut files = Vec::new();
    for _ in 0..18 {
        let output = tools.bash("seq 2001").await;
        let shown = output["stdout"].as_str().unwrap();
        let path = shown.lines().nth(500).unwrap().rsplit(": ").next().unwrap();
        files.push(PathBuf::from(path.strip_suffix(']').unwrap()));
    }
    let there: Vec<bool> = files.iter().map(|path| path.exists()).collect();
    assert_eq!((&there[..2], &there[2..]), (&[false; 2][..], &[true; 16][..]));
    assert!(running.join("stdout").exists());
    // Once it has ended, it counts as the newest.
    std::fs::write(&go, "").unwrap();
    until(async || !files[2].parent().unwrap().exists()).await;
    assert!(running.join("exit").exists() && files[3].exists());
}

#[tokio::test]
async fn an_edit_with_too_long_texts_is_told_so_and_not_about_its_file() {
    let tools = Impatient::new();
    let caller =
        Caller { session: cofferdam_spec::SessionId::new("s").unwrap(), call: request_id() };
    let (old, new) = ("x".repeat(3 << 20), "y".repeat(2 << 20));
    let input = json!({ "filePath": "/f", "oldString": old, "newString": new }).to_string();
    let answer = soon(tools.tools.call(&caller, "edit_file", &input)).await.unwrap();
    let output: Value = serde_json::from_str(&answer.output_json).unwrap();
    assert_eq!(output["error"]["code"], "INVALID_INPUT");
    assert_eq!(
        output["error"]["message"],
        "Invalid input for tool \"edit_file\": oldString and newString together are 5242880 bytes \
         long, the limit is 4161536."
    );
}
