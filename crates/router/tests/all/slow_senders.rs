//! A client whose body comes byte by byte.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use kvlane_router::{
    proxy::Proxy,
    schedule::{Scheduler, SchedulerSettings},
    shared::{ProxySettings, Shared},
};

/// Each piece came in time, so the body held its connection for ever.
#[test]
fn a_body_that_comes_too_slowly_is_given_up_though_each_piece_comes_in_time() {
    let settings = ProxySettings { client_timeout: Duration::from_secs(1), ..ProxySettings::default() };
    let shared = Shared::new(settings, Scheduler::new(SchedulerSettings::default()), 1);
    let proxy = Proxy::start(TcpListener::bind("127.0.0.1:0").unwrap(), &shared).unwrap();
    let mut client = TcpStream::connect(proxy.address()).unwrap();
    client.write_all(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 9999\r\n\r\n{").unwrap();
    client.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let (mut answer, until) = ([0; 12], Instant::now() + Duration::from_secs(10));
    while client.read_exact(&mut answer).is_err() {
        assert!(Instant::now() < until, "it still has its connection");
        client.write_all(b" ").unwrap();
        thread::yield_now();
    }
    assert_eq!(&answer, b"HTTP/1.1 408");
    proxy.stop(Duration::ZERO);
}
