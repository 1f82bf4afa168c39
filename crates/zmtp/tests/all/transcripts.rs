//! Feeds sessions with the bytes of libzmq 4.3.5, as pyzmq 27.3 sent them to a plain socket.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use bytes::Bytes;
use kvlane_zmtp::{Event, Greeting, Limits, ProtocolError, Session, SocketType};

const GREETING: &str = "ff00000000000000017f03014e554c4c";
const DEALER_GREETING: &str = "ff000000000000000f7f03014e554c4c";
const DEALER: &str = "04370552454144590b536f636b65742d54797065000000064445414c4552\
    084964656e746974790000000e31302e302e302e313a3231303031000470696e670100000568656c6c6f";
const LONG_HEAD: &str = "02000000000000012c";
const REQ: &str =
    "04260552454144590b536f636b65742d5479706500000003524551084964656e74697479000000000100000361736b";
const SUB_31: &str = "04190552454144590b536f636b65742d5479706500000003535542\
    040d095355425343524942456b7640040a0643414e43454c6b7640";
const SUB_30: &str = "04190552454144590b536f636b65742d54797065000000035355420004016b76400004006b7640";
const PUB: &str = "04190552454144590b536f636b65742d5479706500000003505542\
    01066b7640706f64010800000000000000070004930190c0";
const ROUTER: &str = "04290552454144590b536f636b65742d5479706500000006524f55544552084964656e7469747900000000\
    01000108000000000000000500047061793501000108000000000000000600047061793601000108ffffffffffffffff0000";
const PINGING: &str = "04290552454144590b536f636b65742d54797065000000064445414c4552084964656e7469747900000000\
    04070450494e470032";
const PONG: &str = "040804504f4e47637478";

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

/// A greeting, filled up to its 64 bytes, and what follows.
fn stream(greeting: &str, rest: &str) -> Vec<u8> {
    let mut bytes = unhex(greeting);
    bytes.resize(64, 0);
    bytes.extend(unhex(rest));
    bytes
}

fn session(ours: SocketType) -> Session {
    Session::new(ours, Bytes::new(), Limits::default()).unwrap()
}

fn events(session: &mut Session, bytes: &[u8]) -> Result<Vec<Event>, ProtocolError> {
    let mut rest = bytes;
    let mut events = Vec::new();
    while let Some(event) = session.receive(&mut rest)? {
        events.push(event);
    }
    assert!(rest.is_empty());
    Ok(events)
}

fn ready(socket_type: SocketType, identity: &'static str) -> Event {
    Event::Ready { socket_type, identity: Bytes::from_static(identity.as_bytes()) }
}

fn message(frames: &[&'static [u8]]) -> Event {
    Event::Message(frames.iter().map(|frame| Bytes::from_static(frame)).collect())
}

fn sent(session: &mut Session) -> Vec<u8> {
    let bytes = session.unsent().to_vec();
    session.mark_sent(bytes.len());
    bytes
}

#[test]
fn a_dealer_with_an_identity_sends_short_and_long_frames() {
    let mut bytes = stream(DEALER_GREETING, DEALER);
    bytes.extend(unhex(LONG_HEAD));
    bytes.extend([b'x'; 300]);
    let found = events(&mut session(SocketType::Router), &bytes).unwrap();
    let expected = [
        ready(SocketType::Dealer, "10.0.0.1:21001"),
        message(&[b"ping"]),
        message(&[b"", b"hello"]),
        message(&[&[b'x'; 300]]),
    ];
    assert_eq!(found, expected);
}

#[test]
fn a_req_puts_an_empty_frame_before_its_question() {
    let found = events(&mut session(SocketType::Router), &stream(GREETING, REQ)).unwrap();
    assert_eq!(found, [ready(SocketType::Req, ""), message(&[b"", b"ask"])]);
}

#[test]
fn a_sub_tells_its_topics_by_commands_to_a_peer_of_3_1_and_by_messages_to_one_of_3_0() {
    let by_commands = events(&mut session(SocketType::Pub), &stream(GREETING, SUB_31)).unwrap();
    let topic = Bytes::from_static(b"kv@");
    let expected = [ready(SocketType::Sub, ""), Event::Subscribe(topic.clone()), Event::Cancel(topic)];
    assert_eq!(by_commands, expected);
    let by_messages = events(&mut session(SocketType::Pub), &stream(GREETING, SUB_30)).unwrap();
    assert_eq!(by_messages, [ready(SocketType::Sub, ""), message(&[b"\x01kv@"]), message(&[b"\x00kv@"])]);
}

#[test]
fn our_sub_says_what_libzmqs_says() {
    for (minor, theirs) in [(1, SUB_31), (0, SUB_30)] {
        let mut sub = session(SocketType::Sub);
        let mut greeting = Greeting::OURS;
        greeting.minor = minor;
        events(&mut sub, &greeting.encode()).unwrap();
        assert!(sub.subscribe(b"kv@").is_err(), "before READY");
        events(&mut sub, &unhex(&PUB[..54])).unwrap();
        sub.subscribe(b"kv@").unwrap();
        sub.cancel(b"kv@").unwrap();
        let mut expected = stream(GREETING, &theirs[54..]);
        expected[8] = 0; // a length for ZMTP 1.0, which libzmq writes
        // Ours names an empty identity, which a SUB of libzmq leaves away.
        let mut ours = sent(&mut sub);
        let ready: Vec<u8> = ours.drain(64..64 + 2 + 38).collect();
        assert!(ready.ends_with(b"\x03SUB\x08Identity\0\0\0\0"));
        assert_eq!(ours, expected);
    }
}

#[test]
fn a_pub_publishes_topic_number_and_payload() {
    let found = events(&mut session(SocketType::Sub), &stream(GREETING, PUB)).unwrap();
    let published = message(&[b"kv@pod", &[0, 0, 0, 0, 0, 0, 0, 7], b"\x93\x01\x90\xc0"]);
    assert_eq!(found, [ready(SocketType::Pub, ""), published]);
}

#[test]
fn a_router_answers_a_replay_until_minus_one() {
    let mut dealer = session(SocketType::Dealer);
    let bytes = stream(GREETING, ROUTER);
    let mut rest = bytes.as_slice();
    assert_eq!(dealer.receive(&mut rest).unwrap(), Some(ready(SocketType::Router, "")));
    sent(&mut dealer);
    dealer.send(&[&b""[..], &5u64.to_be_bytes()]).unwrap();
    assert_eq!(sent(&mut dealer), unhex("010000080000000000000005"));
    let answers = [
        message(&[b"", &[0, 0, 0, 0, 0, 0, 0, 5], b"pay5"]),
        message(&[b"", &[0, 0, 0, 0, 0, 0, 0, 6], b"pay6"]),
        message(&[b"", &[0xff; 8], b""]),
    ];
    assert_eq!(events(&mut dealer, rest).unwrap(), answers);
}

#[test]
fn a_ping_is_answered_as_libzmq_answers_one() {
    let mut router = session(SocketType::Router);
    let found = events(&mut router, &stream(GREETING, PINGING)).unwrap();
    assert_eq!(found, [ready(SocketType::Dealer, ""), Event::Alive]);
    assert!(sent(&mut router).ends_with(b"\x04\x05\x04PONG"));
    assert_eq!(events(&mut router, b"\x04\x0a\x04PING\x00\x10ctx").unwrap(), [Event::Alive]);
    assert_eq!(sent(&mut router), unhex(PONG));
}

#[test]
fn a_peer_whose_type_does_not_fit_is_named() {
    let error = events(&mut session(SocketType::Router), &stream(GREETING, PUB)).unwrap_err();
    assert_eq!(error, ProtocolError::SocketType { peer: "PUB".to_owned(), ours: "ROUTER" });
    assert_eq!(error.to_string(), "the peer's socket is a \"PUB\", to which a ROUTER does not talk");
}
