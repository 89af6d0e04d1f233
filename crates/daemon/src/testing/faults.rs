//! Bad input: each is answered with a typed error, and the daemon goes on.

use bytes::Bytes;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::{Code, Status};
use tonic_types::StatusExt;

use super::*;

/// On the wire like ExecuteRequest, but a string may hold any bytes.
#[derive(Clone, PartialEq, prost::Message)]
struct RawExecute {
    #[prost(bytes = "vec", tag = "5")]
    session: Vec<u8>,
}

async fn send_raw(channel: Channel, request: RawExecute) -> Status {
    let mut grpc = tonic::client::Grpc::new(channel);
    grpc.ready().await.unwrap();
    let path = PathAndQuery::from_static("/cofferdam.v1.ProcessService/Execute");
    let codec = tonic_prost::ProstCodec::<RawExecute, v1::ExecuteResponse>::default();
    grpc.unary(tonic::Request::new(request), path, codec).await.unwrap_err()
}

fn too_large(status: &Status) -> (Code, String, String) {
    let info = status.get_details_error_info().unwrap();
    assert_eq!((info.reason.as_str(), info.domain.as_str()), ("MESSAGE_TOO_LARGE", "cofferdam"));
    assert!(status.get_details_quota_failure().is_some());
    (status.code(), info.metadata["limit"].clone(), info.metadata["size"].clone())
}

#[tokio::test]
async fn messages_above_their_limit_name_limit_and_size() {
    let mut daemon = TestDaemon::new().await;
    let execute_of =
        |size| v1::ExecuteRequest { stdin: Bytes::from(vec![0; size]), ..execute("true") };
    // Above our limit, and above the transport's.
    for size in [(16 << 20) + 1000, 20 << 20] {
        let status = soon(daemon.processes.execute(execute_of(size))).await.unwrap_err();
        let (code, limit, got) = too_large(&status);
        assert_eq!((code, limit.as_str()), (Code::ResourceExhausted, "16777216"));
        assert!(got.parse::<usize>().unwrap() > size);
    }
    for size in [(1 << 20) + 1000, 20 << 20] {
        let request = v1::StartRequest { stdin: Bytes::from(vec![0; size]), ..start("true") };
        let status = soon(daemon.processes.start(request)).await.unwrap_err();
        assert_eq!(too_large(&status).1, "1048576");
    }
    let session = "x".repeat(2 << 20);
    let request = v1::EndSessionRequest { session, request_id: request_id() };
    let status = daemon.workspace.end_session(request).await.unwrap_err();
    assert_eq!(too_large(&status).1, "1048576");
    assert_eq!(daemon.execute("echo on").await.stdout, "on\n");
}

#[tokio::test]
async fn bytes_that_are_no_request_are_an_invalid_argument_with_the_field() {
    let mut daemon = TestDaemon::new().await;
    let channel = connect(daemon.directory.path().join("socket")).await;
    let status = send_raw(channel, RawExecute { session: vec![0xff, 0xfe] }).await;
    assert_eq!(status.code(), Code::InvalidArgument);
    assert_eq!(status.get_details_error_info().unwrap().reason, "UNDECODABLE_REQUEST");
    let violations = status.get_details_bad_request().unwrap().field_violations;
    assert_eq!(violations[0].field, "session");
    assert_eq!(daemon.execute("echo on").await.stdout, "on\n");
}

#[tokio::test]
async fn wrong_fields_are_named() {
    let mut daemon = TestDaemon::new().await;
    let with_limits = |change: fn(&mut v1::Limits)| {
        let mut limits = v1::Limits::default();
        change(&mut limits);
        v1::ExecuteRequest { limits: Some(limits), ..execute("true") }
    };
    let with_process = |change: fn(&mut v1::ProcessConfig)| {
        let mut request = execute("true");
        change(request.process.as_mut().unwrap());
        request
    };
    let table = [
        (v1::ExecuteRequest { request_id: String::new(), ..execute("true") }, "request_id"),
        (v1::ExecuteRequest { session: "é".to_owned(), ..execute("true") }, "session"),
        (v1::ExecuteRequest { process: None, ..execute("true") }, "process"),
        (with_process(|process| process.command.clear()), "process.command"),
        (with_process(|process| process.command[1] = "a\0".to_owned()), "process.command[1]"),
        (with_process(|process| process.cwd = format!("/{}", "x".repeat(5000))), "process.cwd"),
        (with_process(|process| process.cwd = "relative".to_owned()), "process.cwd"),
        (with_limits(|limits| limits.wall = milliseconds(-1)), "limits.wall"),
        (with_limits(|limits| limits.wall = milliseconds(0)), "limits.wall"),
        (with_limits(|limits| limits.processes = u32::MAX), "limits.processes"),
        (with_limits(|limits| limits.open_files = 1), "limits.open_files"),
    ];
    for (request, field) in table {
        let status = daemon.processes.execute(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{field}: {status:?}");
        let violations = status.get_details_bad_request().unwrap().field_violations;
        let fields: Vec<_> = violations.iter().map(|one| one.field.as_str()).collect();
        assert_eq!(fields, [field]);
        assert_eq!(status.get_details_error_info().unwrap().domain, "cofferdam");
    }
    assert_eq!(daemon.execute("echo on").await.stdout, "on\n");
}

#[tokio::test]
async fn an_unknown_process_is_not_found_by_every_method() {
    let mut daemon = TestDaemon::new().await;
    let process_id = || "p-00000000-1".to_owned();
    let connect = daemon.processes.connect(connect_from(&process_id(), 0)).await;
    let get = daemon.processes.get(v1::GetRequest { process_id: process_id() }).await;
    let wait = v1::WaitRequest { process_id: process_id(), timeout: None };
    let wait = daemon.processes.wait(wait).await;
    let write = v1::WriteStdinRequest {
        process_id: process_id(),
        request_id: request_id(),
        ..v1::WriteStdinRequest::default()
    };
    let write = daemon.processes.write_stdin(write).await;
    let resize = v1::ResizePtyRequest {
        process_id: process_id(),
        rows: 1,
        cols: 1,
        request_id: request_id(),
    };
    let resize = daemon.processes.resize_pty(resize).await;
    let statuses = [
        connect.map(drop).unwrap_err(),
        get.map(drop).unwrap_err(),
        wait.map(drop).unwrap_err(),
        write.map(drop).unwrap_err(),
        resize.map(drop).unwrap_err(),
    ];
    for status in statuses {
        assert_eq!(status.code(), Code::NotFound);
        assert_eq!(status.get_details_resource_info().unwrap().resource_name, process_id());
    }
}

#[tokio::test]
async fn a_process_without_a_terminal_cannot_be_resized() {
    let mut daemon = TestDaemon::new().await;
    let mut events = daemon.start(start("sleep 60")).await;
    let process_id = events.started().await;
    let request_id = request_id();
    let resize = v1::ResizePtyRequest { process_id, rows: 5, cols: 5, request_id };
    let status = daemon.processes.resize_pty(resize).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert_eq!(status.get_details_error_info().unwrap().reason, "NO_TERMINAL");
}

#[tokio::test]
async fn calls_above_the_limit_are_refused_and_may_be_tried_again() {
    let mut daemon = TestDaemon::new().await;
    let mut held = Vec::new();
    for _ in 0..crate::decide::CALLS_MAX {
        let mut request = start("");
        request.process.as_mut().unwrap().command = vec!["sleep".to_owned(), "60".to_owned()];
        held.push(daemon.start(request).await);
    }
    let status = daemon.processes.execute(execute("true")).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert_eq!(status.get_details_error_info().unwrap().reason, "TOO_MANY_CALLS");
    assert!(status.get_details_retry_info().is_some());
}
