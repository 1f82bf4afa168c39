//! Listeners and clients over loopback.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use kvlane_zmtp::{
    ConnectionError, Counts, Dealer, Event, Limits, Listener, ListenerOptions, PeerOptions, ProtocolError,
    Session, SocketType, Subscriber,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

fn loopback() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

async fn dealer(listener: &Listener, identity: &'static str) -> Dealer {
    let identity = Bytes::from_static(identity.as_bytes());
    Dealer::connect(listener.address(), identity, PeerOptions::default()).await.unwrap()
}

/// Waits until the peer has closed the connection, whatever it sends before.
async fn closed(stream: &mut TcpStream) {
    let mut bytes = [0; 4096];
    while stream.read(&mut bytes).await.is_ok_and(|read| read > 0) {}
}

#[tokio::test]
async fn a_listener_hears_each_peer_under_its_identity() {
    let mut listener = Listener::bind(loopback(), ListenerOptions::default()).await.unwrap();
    let (mut named, mut nameless) = (dealer(&listener, "10.0.0.1:21001").await, dealer(&listener, "").await);
    named.send(&[b"ping"]).await.unwrap();
    let first = listener.recv().await.unwrap();
    assert_eq!(
        (&first.identity[..], &first.frames[..]),
        (&b"10.0.0.1:21001"[..], &[Bytes::from("ping")][..])
    );
    nameless.send(&[&b""[..], &[7; 5000]]).await.unwrap();
    let second = listener.recv().await.unwrap();
    assert_eq!((second.identity.len(), second.identity[0]), (5, 0));
    assert_eq!(second.frames, [Bytes::new(), Bytes::from(vec![7; 5000])]);
    assert_ne!(first.peer, second.peer);
    assert_eq!(listener.counts(), Counts { accepted: 2, ..Counts::default() });
}

#[tokio::test]
async fn a_breach_ends_its_own_connection_and_is_counted() {
    let mut listener = Listener::bind(loopback(), ListenerOptions::default()).await.unwrap();
    let mut honest = dealer(&listener, "honest").await;
    let mut stranger = TcpStream::connect(listener.address()).await.unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    closed(&mut stranger).await;
    assert_eq!(listener.counts().breaches, 1);
    honest.send(&[b"still here"]).await.unwrap();
    assert_eq!(listener.recv().await.unwrap().frames, [Bytes::from("still here")]);
}

#[tokio::test]
async fn a_message_over_the_limit_ends_the_connection() {
    let limits = Limits { frame_bytes: 10, ..Limits::default() };
    let options = ListenerOptions { limits, ..ListenerOptions::default() };
    let listener = Listener::bind(loopback(), options).await.unwrap();
    let mut dealer = dealer(&listener, "").await;
    dealer.send(&[[0; 11]]).await.unwrap();
    let end = dealer.recv().await.unwrap_err();
    assert!(matches!(end, ConnectionError::Closed | ConnectionError::Io(_)), "{end}");
    assert_eq!(listener.counts().breaches, 1);
}

#[tokio::test]
async fn connections_beyond_the_most_are_closed_at_once_and_a_place_is_free_again() {
    let options = ListenerOptions { connections: 1, ..ListenerOptions::default() };
    let mut listener = Listener::bind(loopback(), options).await.unwrap();
    let first = dealer(&listener, "first").await;
    let mut second = TcpStream::connect(listener.address()).await.unwrap();
    closed(&mut second).await;
    assert_eq!(listener.counts().refused, 1);
    drop(first);
    let mut third = None;
    for _ in 0..10_000 {
        let options = PeerOptions::default();
        third = Dealer::connect(listener.address(), Bytes::from("third"), options).await.ok();
        if third.is_some() {
            break;
        }
    }
    let mut third = third.unwrap();
    third.send(&[b"in"]).await.unwrap();
    assert_eq!(listener.recv().await.unwrap().identity, "third");
}

#[tokio::test]
async fn a_peer_that_greets_nobody_is_let_go() {
    let options = ListenerOptions { handshake: Duration::from_millis(30), ..ListenerOptions::default() };
    let listener = Listener::bind(loopback(), options).await.unwrap();
    let mut silent = TcpStream::connect(listener.address()).await.unwrap();
    closed(&mut silent).await;
    assert_eq!(listener.counts(), Counts { accepted: 1, handshakes_late: 1, ..Counts::default() });
}

#[tokio::test]
async fn a_peer_that_falls_silent_is_let_go() {
    let options = ListenerOptions { idle: Duration::from_millis(30), ..ListenerOptions::default() };
    let listener = Listener::bind(loopback(), options).await.unwrap();
    assert!(dealer(&listener, "").await.recv().await.is_err());
    assert_eq!(listener.counts(), Counts { accepted: 1, idle: 1, ..Counts::default() });
}

/// Plays a PUB for one connection: publishes once the subscription came, and closes.
async fn publish(listener: TcpListener, frames: Vec<Bytes>) {
    let (mut stream, _) = listener.accept().await.unwrap();
    let mut session = Session::new(SocketType::Pub, Bytes::new(), Limits::default()).unwrap();
    let mut bytes = [0; 4096];
    let mut subscribed = false;
    while !subscribed {
        stream.write_all(session.unsent()).await.unwrap();
        session.mark_sent(session.unsent().len());
        let count = stream.read(&mut bytes).await.unwrap();
        let mut rest = &bytes[..count];
        while let Some(event) = session.receive(&mut rest).unwrap() {
            subscribed |= event == Event::Subscribe(Bytes::from("kv@"));
        }
    }
    session.send(&frames).unwrap();
    stream.write_all(session.unsent()).await.unwrap();
}

#[tokio::test]
async fn a_subscriber_receives_and_learns_of_the_end() {
    let publisher = TcpListener::bind(loopback()).await.unwrap();
    let address = publisher.local_addr().unwrap();
    let frames = vec![Bytes::from("kv@pod"), Bytes::from(vec![0; 8]), Bytes::from("payload")];
    let publishing = tokio::spawn(publish(publisher, frames.clone()));
    let mut subscriber = Subscriber::connect(address, b"kv@", PeerOptions::default()).await.unwrap();
    assert_eq!(subscriber.recv().await.unwrap(), frames);
    assert!(matches!(subscriber.recv().await, Err(ConnectionError::Closed)));
    publishing.await.unwrap();
}

#[tokio::test]
async fn a_client_tells_a_wrong_peer_and_a_silent_one() {
    let router = Listener::bind(loopback(), ListenerOptions::default()).await.unwrap();
    let found = Subscriber::connect(router.address(), b"", PeerOptions::default()).await.unwrap_err();
    let expected = ProtocolError::SocketType { peer: "ROUTER".to_owned(), ours: "SUB" };
    assert!(matches!(&found, ConnectionError::Protocol(error) if *error == expected), "{found}");
    let silent = TcpListener::bind(loopback()).await.unwrap();
    let options = PeerOptions { handshake: Duration::from_millis(30), ..PeerOptions::default() };
    let late = Dealer::connect(silent.local_addr().unwrap(), Bytes::new(), options).await.unwrap_err();
    assert!(matches!(late, ConnectionError::Handshake(_)), "{late}");
}
