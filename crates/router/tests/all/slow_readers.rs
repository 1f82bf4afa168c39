//! A client that does not read its answer.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use kvlane_router::{
    proxy::Proxy,
    schedule::{Node, NodeState, Role, Scheduler, SchedulerSettings},
    shared::{ProxySettings, Shared},
};

const PATIENCE: Duration = Duration::from_secs(30);

/// An engine that answers for ever. Returns when nobody takes the answer any more.
fn answer_for_ever(listener: &TcpListener) {
    let (mut stream, _) = listener.accept().unwrap();
    let head = BufReader::new(stream.try_clone().unwrap()).lines();
    head.map_while(Result::ok).find(String::is_empty).unwrap();
    let head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    let chunk = [b"4000\r\n", &[b'x'; 0x4000][..], b"\r\n"].concat();
    let mut written = stream.write_all(head);
    while written.is_ok() {
        written = stream.write_all(&chunk);
    }
}

fn requests(shared: &Shared) -> u64 {
    shared.with_scheduler(|scheduler| scheduler.nodes().map(|(_, node)| node.load.own_requests).sum())
}

fn wait_for(shared: &Shared, wanted: u64) {
    let until = Instant::now() + PATIENCE;
    while requests(shared) != wanted {
        assert!(Instant::now() < until, "{wanted} requests are waited for, there are {}", requests(shared));
        thread::yield_now();
    }
}

/// It used to keep its node loaded for ever, so that draining never ended.
#[test]
fn a_client_that_does_not_read_ends_its_request_in_the_engine() {
    let engine = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", engine.local_addr().unwrap());
    let settings = ProxySettings { client_timeout: Duration::from_secs(1), ..ProxySettings::default() };
    let shared = Shared::new(settings, Scheduler::new(SchedulerSettings::default()), 1);
    let node = shared.add(Node::new(&address, Role::Worker, ""), address.parse().unwrap());
    shared.set_models(node, vec![("m".into(), "{}".into())]);
    shared.with_scheduler(|scheduler| scheduler.node_mut(node).unwrap().state = NodeState::Ready);
    let proxy = Proxy::start(TcpListener::bind("127.0.0.1:0").unwrap(), &Arc::clone(&shared)).unwrap();
    let answering = thread::spawn(move || answer_for_ever(&engine));

    let mut client = TcpStream::connect(proxy.address()).unwrap();
    let body = r#"{"model": "m", "prompt": "x"}"#;
    write!(
        client,
        "POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    wait_for(&shared, 1);
    wait_for(&shared, 0);
    answering.join().unwrap();
    drop(client);
    proxy.stop(Duration::ZERO);
}
