//! Calls of tools, as far as they need no files: those are tested end to end.

use cofferdam_proto::v1::tool_service_client::ToolServiceClient;
use serde_json::{Value, json};
use tonic::Code;
use tonic_types::StatusExt;

use super::*;

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
