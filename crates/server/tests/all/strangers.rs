//! Strangers over TCP and HTTP do not keep other peers out.

#![allow(clippy::unwrap_used, reason = "a test may fail here")]

use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use crate::support::*;
use kvlane_proto::{Address, encode_frame, v1, v1::request::Body as Ask};
use kvlane_server::{Daemon, ServeOptions};

const LOOPBACK: &str = "127.0.0.1:0";

/// A port that nobody uses.
fn free_port() -> SocketAddr {
    TcpListener::bind(LOOPBACK).unwrap().local_addr().unwrap()
}

/// What is answered to `GET /health`; empty where the connection is closed instead.
fn health(at: SocketAddr) -> String {
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut answer = String::new();
    // Refused, it may be closed before or after the request was written.
    let _ = stream.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n");
    let _ = stream.read_to_string(&mut answer);
    answer
}

/// A local user who opened 64 connections to the HTTP port, and others for those that were closed, had probes closed:
/// Kubernetes then restarts a daemon that is well.
#[test]
fn a_probe_is_answered_while_strangers_hold_all_places() {
    let folder = tempfile::tempdir().unwrap();
    let http = free_port();
    let address = Address::Unix(folder.path().join("kvlane.sock"));
    let options = ServeOptions { http: Some(http), ..options(&address, 16 << 20) };
    let daemon = Daemon::start(&options, &|_| ()).unwrap();
    let mut silent = Vec::new();
    for turn in 0..200 {
        let mut stream = TcpStream::connect(http).unwrap();
        if turn % 2 == 0 {
            stream.write_all(b"GET /health HTTP/1.1\r\nX-Slow: ").unwrap();
        }
        silent.push(stream);
        if turn >= 64 && turn % 8 == 0 {
            assert!(health(http).starts_with("HTTP/1.1 200"), "beside {turn} connections");
        }
    }
    drop(silent);
    daemon.stop(PATIENCE);
}

/// Each message gave the connection 10 more seconds, also one before Hello: strangers held the places over TCP for ever.
#[test]
fn who_does_not_greet_is_cut_off_whatever_else_they_say() {
    let folder = tempfile::tempdir().unwrap();
    let tcp = free_port();
    let address = Address::Unix(folder.path().join("kvlane.sock"));
    let listen = vec![address.clone(), Address::Tcp(tcp)];
    let daemon = Daemon::start(&ServeOptions { listen, ..options(&address, 16 << 20) }, &|_| ()).unwrap();
    let mut stream = TcpStream::connect(tcp).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let (began, mut scratch) = (Instant::now(), [0; 4096]);
    let ask = encode_frame(&v1::Request { id: 1, body: Some(Ask::GetStatus(v1::GetStatus {})) });
    // They are given 2 s; it is enough that it ends.
    let is_over = loop {
        if began.elapsed() > PATIENCE {
            break false;
        }
        if stream.write_all(&ask).is_err() {
            break true;
        }
        match stream.read(&mut scratch) {
            Ok(0) => break true,
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => break true,
        }
    };
    assert!(is_over);
    daemon.stop(PATIENCE);
}
