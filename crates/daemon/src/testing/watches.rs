//! Watches over gRPC.

use std::fs;

use v1::watch_dir_response::Event;

use super::files::directory;
use super::*;

struct Watch(tonic::Streaming<v1::WatchDirResponse>, String);

impl Watch {
    async fn next(&mut self) -> Event {
        let response = soon(self.0.next()).await.unwrap().unwrap();
        self.1 = response.resume_token;
        response.event.unwrap()
    }

    async fn started(&mut self) {
        let event = self.next().await;
        assert!(matches!(event, Event::Started(_)), "{event:?}");
    }

    async fn created(&mut self) -> String {
        loop {
            match self.next().await {
                Event::Change(change) if change.kind() == v1::ChangeKind::Create => {
                    return change.path;
                }
                Event::Change(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

async fn watch(daemon: &mut TestDaemon, path: &str, resume_token: &str) -> Watch {
    let (path, resume_token) = (path.to_owned(), resume_token.to_owned());
    let request = v1::WatchDirRequest { path, recursive: false, resume_token };
    let events = soon(daemon.files.watch_dir(request)).await.unwrap().into_inner();
    Watch(events, String::new())
}

#[tokio::test]
async fn a_watch_goes_on_exactly_where_its_client_was() {
    let mut daemon = TestDaemon::new().await;
    let place = directory(&daemon);
    let mut first = watch(&mut daemon, &place, "").await;
    first.started().await;
    fs::create_dir(format!("{place}/1")).unwrap();
    assert_eq!(first.created().await, format!("{place}/1"));
    let token = first.1.clone();
    fs::create_dir(format!("{place}/2")).unwrap();
    assert_eq!(first.created().await, format!("{place}/2"));
    // The second change was sent, but this client says that it did not get it.
    drop(first);
    fs::create_dir(format!("{place}/3")).unwrap();
    let mut second = watch(&mut daemon, &place, &token).await;
    second.started().await;
    assert_eq!(second.created().await, format!("{place}/2"));
    assert_eq!(second.created().await, format!("{place}/3"));
}

#[tokio::test]
async fn a_token_that_cannot_be_gone_on_from_gets_an_overflow() {
    let mut daemon = TestDaemon::new().await;
    let place = directory(&daemon);
    let mut events = watch(&mut daemon, &place, "w-1-2-3").await;
    events.started().await;
    assert!(matches!(events.next().await, Event::Overflow(_)));
    fs::create_dir(format!("{place}/1")).unwrap();
    assert_eq!(events.created().await, format!("{place}/1"));
}

#[tokio::test]
async fn a_second_stream_takes_the_watch_over() {
    let mut daemon = TestDaemon::new().await;
    let place = directory(&daemon);
    let mut first = watch(&mut daemon, &place, "").await;
    first.started().await;
    let token = first.1.clone();
    let mut second = watch(&mut daemon, &place, &token).await;
    second.started().await;
    fs::create_dir(format!("{place}/1")).unwrap();
    assert_eq!(second.created().await, format!("{place}/1"));
}
