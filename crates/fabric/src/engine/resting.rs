//! Tests that the engine's thread rests while there is nothing that it can do.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::{Duration, Instant};

use super::{Engine, EngineOptions, PeerId, SendOptions, Transport};

const PATIENCE: Duration = Duration::from_secs(60);
/// How long the job of a socket is kept from reading it.
const KEPT: Duration = Duration::from_millis(100);
/// Many more times than a thread that rests takes the lock meanwhile, and a tenth of what one does that polls.
const HOLDS_MAX: usize = 2_000;

fn engine() -> Engine {
    let (transport, token) = (Some(Transport::TCP), "of this test".into());
    Engine::new(EngineOptions { transport, token, ..EngineOptions::default() }).unwrap()
}

fn send(from: &Engine, to: PeerId, bytes: &[u8]) {
    drop(from.send(to, bytes, SendOptions::default()).unwrap());
}

fn receive(at: &Engine) -> Vec<u8> {
    at.receive(Some(PATIENCE)).unwrap().bytes.to_vec()
}

/// A thread that was to read a message lost its processor to the engine's own thread. That polled without a pause, because the
/// watch reported the socket until it was read. On two busy cores 1 of 100 messages took 30 ms.
#[test]
fn a_socket_that_another_thread_is_to_read_is_not_polled() {
    let (here, there) = (engine(), engine());
    let peer = here.connect(&there.describe().unwrap()).unwrap();
    send(&here, peer, b"first");
    assert_eq!(receive(&there), b"first");

    let mut hold = there.hold();
    send(&here, peer, b"second");
    let (mut events, begun) = (Vec::with_capacity(8), Instant::now());
    let job = loop {
        hold.poll(&mut events);
        match hold.take_job() {
            Some(job) => break job,
            None => assert!(begun.elapsed() < PATIENCE, "the message does not come"),
        }
    };
    drop(hold);
    there.measure_holds();
    std::thread::sleep(KEPT);
    let holds = there.take_holds().len();
    assert!(holds < HOLDS_MAX, "{holds} times in {KEPT:?}");

    there.hold().put_back(job);
    assert_eq!(receive(&there), b"second");
}
