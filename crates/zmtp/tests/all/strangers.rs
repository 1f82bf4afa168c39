//! Feeds sessions with arbitrary bytes, cut anywhere.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use bytes::Bytes;
use kvlane_zmtp::{Event, Greeting, Limits, ProtocolError, Session, SocketType};
use proptest::collection::vec;
use proptest::prelude::*;

const LIMITS: Limits =
    Limits { frame_bytes: 700, message_bytes: 1500, message_frames: 4, command_bytes: 300 };

/// A ROUTER whose peer, a DEALER, has ended its handshake.
fn opened(limits: Limits) -> Session {
    let mut router = Session::new(SocketType::Router, Bytes::new(), limits).unwrap();
    let opening = dealer().1;
    let event = router.receive(&mut opening.as_slice()).unwrap();
    assert_eq!(
        event,
        Some(Event::Ready { socket_type: SocketType::Dealer, identity: Bytes::from_static(b"me") })
    );
    router
}

/// A DEALER that may send, and what it sent so far.
fn dealer() -> (Session, Vec<u8>) {
    let mut dealer = Session::new(SocketType::Dealer, Bytes::from_static(b"me"), Limits::default()).unwrap();
    let mut router = Session::new(SocketType::Router, Bytes::new(), Limits::default()).unwrap();
    assert_eq!(dealer.receive(&mut &Greeting::OURS.encode()[..]), Ok(None));
    let opening = dealer.unsent().to_vec();
    dealer.mark_sent(opening.len());
    router.receive(&mut opening.as_slice()).unwrap();
    let theirs = router.unsent()[Greeting::OURS.encode().len()..].to_vec();
    assert!(matches!(dealer.receive(&mut theirs.as_slice()), Ok(Some(Event::Ready { .. }))));
    (dealer, opening)
}

/// The events of bytes that come in pieces, and how it ended. Looks at the buffers after each event.
fn in_pieces(session: &mut Session, bytes: &[u8], cuts: &[usize]) -> (Vec<Event>, Option<ProtocolError>) {
    let mut events = Vec::new();
    let mut rest = bytes;
    let mut cuts = cuts.iter().cycle();
    while !rest.is_empty() {
        let (mut piece, later) = rest.split_at((*cuts.next().unwrap_or(&1)).clamp(1, rest.len()));
        rest = later;
        loop {
            let event = session.receive(&mut piece);
            assert!(session.buffered() <= LIMITS.most_buffered(), "{} are held", session.buffered());
            assert!(session.unsent().len() <= 2048, "{} wait to be sent", session.unsent().len());
            match event {
                Ok(Some(event)) => events.push(event),
                Ok(None) => break,
                Err(error) => return (events, Some(error)),
            }
        }
        assert!(piece.is_empty());
    }
    (events, None)
}

fn refused(limits: Limits, bytes: &[u8]) -> ProtocolError {
    let mut session = opened(limits);
    let before = session.buffered();
    let error = session.receive(&mut &bytes[..]).unwrap_err();
    assert_eq!(session.buffered(), before, "nothing is allocated for it");
    error
}

#[test]
fn the_nine_bytes_that_abort_another_crates_process_are_a_refusal() {
    let error = refused(LIMITS, b"\x02\xff\xff\xff\xff\xff\xff\xff\xff");
    assert_eq!(error, ProtocolError::FrameTooLong { announced: u64::MAX, most: 700 });
    assert!(error.to_string().contains("18446744073709551615") && error.to_string().contains("700"));
    let unlimited = Limits { frame_bytes: usize::MAX, message_bytes: usize::MAX, ..LIMITS };
    let mut trusting = opened(unlimited);
    assert_eq!(trusting.receive(&mut &b"\x02\xff\xff\xff\xff\xff\xff\xff\xff"[..]), Ok(None));
    assert_eq!(trusting.buffered(), 0);
    assert_eq!(trusting.receive(&mut &b"abc"[..]), Ok(None));
    assert_eq!(trusting.buffered(), 3, "room for what came, not for what was announced");
}

#[test]
fn each_limit_is_told_with_what_breached_it() {
    let found = refused(LIMITS, b"\x02\0\0\0\0\0\0\x02\xbd");
    assert_eq!(found, ProtocolError::FrameTooLong { announced: 701, most: 700 });
    let found = refused(LIMITS, b"\x06\0\0\0\0\0\0\x01\x2d");
    assert_eq!(found, ProtocolError::CommandTooLong { announced: 301, most: 300 });
    let found = refused(LIMITS, b"\x01\0\x01\0\x01\0\x01\0");
    assert_eq!(found, ProtocolError::TooManyFrames { frames: 5, most: 4 });
    let short = Limits { message_bytes: 3, ..LIMITS };
    let mut session = opened(short);
    let found = session.receive(&mut &b"\x01\x02ab\x00\x02"[..]);
    assert_eq!(found, Err(ProtocolError::MessageTooLong { announced: 4, most: 3 }));
}

#[test]
fn before_ready_there_are_no_messages_and_after_it_no_second_one() {
    let mut early = Session::new(SocketType::Router, Bytes::new(), LIMITS).unwrap();
    let greeting = Greeting::OURS.encode();
    assert_eq!(early.receive(&mut &greeting[..]), Ok(None));
    assert_eq!(early.receive(&mut &b"\x00\x01"[..]), Err(ProtocolError::OutOfTurn { what: "a message" }));
    let again = &dealer().1[greeting.len()..];
    assert_eq!(
        opened(LIMITS).receive(&mut &again[..]),
        Err(ProtocolError::OutOfTurn { what: "a second READY" })
    );
}

#[test]
fn identities_that_could_be_taken_for_made_up_ones_are_refused() {
    for identity in [vec![0, 1], vec![b'x'; 256]] {
        let error = Session::new(SocketType::Dealer, identity.clone().into(), LIMITS).unwrap_err();
        assert_eq!(error, ProtocolError::Identity { bytes: identity.len() });
    }
    let mut opening = dealer().1;
    let end = opening.len();
    opening[end - 2] = 0;
    let mut router = Session::new(SocketType::Router, Bytes::new(), LIMITS).unwrap();
    assert_eq!(router.receive(&mut opening.as_slice()), Err(ProtocolError::Identity { bytes: 2 }));
}

#[test]
fn a_peer_that_reads_nothing_gets_no_more_pongs_than_fit() {
    let mut router = opened(LIMITS);
    for _ in 0..10_000 {
        assert_eq!(router.receive(&mut &b"\x04\x0a\x04PING\x00\x10ctx"[..]), Ok(Some(Event::Alive)));
        // It takes one byte now and then, so that something always waits.
        router.mark_sent(1);
        assert!(router.unsent().len() < 2048);
    }
}

proptest! {
    #[test]
    fn messages_come_out_as_they_were_sent_wherever_they_are_cut(
        messages in vec(vec(vec(any::<u8>(), 0..370), 1..=4), 1..6),
        cuts in vec(1usize..400, 1..20),
    ) {
        let (mut dealer, _) = dealer();
        for message in &messages {
            dealer.send(message).unwrap();
        }
        let stream = dealer.unsent().to_vec();
        let (events, error) = in_pieces(&mut opened(LIMITS), &stream, &cuts);
        let expected: Vec<Event> = messages
            .into_iter()
            .map(|message| Event::Message(message.into_iter().map(Bytes::from).collect()))
            .collect();
        prop_assert_eq!(error, None);
        prop_assert_eq!(events, expected);
    }

    #[test]
    fn any_bytes_give_the_same_however_they_are_cut(
        noise in vec(prop_oneof![4 => 0u8..8, 1 => any::<u8>()], 0..4000),
        cuts in vec(1usize..400, 1..20),
        handshake_done: bool,
    ) {
        let fresh = || Session::new(SocketType::Router, Bytes::new(), LIMITS).unwrap();
        let start = || if handshake_done { opened(LIMITS) } else { fresh() };
        let whole = in_pieces(&mut start(), &noise, &[usize::MAX]);
        prop_assert_eq!(in_pieces(&mut start(), &noise, &cuts), whole);
    }

    #[test]
    fn a_changed_byte_in_a_conversation_is_no_more_than_an_error(
        at in any::<proptest::sample::Index>(),
        to in any::<u8>(),
        cuts in vec(1usize..90, 1..20),
    ) {
        let (mut dealer, mut stream) = dealer();
        dealer.send(&[&b""[..], &[b'x'; 300]]).unwrap();
        dealer.send(&[b"short"]).unwrap();
        stream.extend_from_slice(dealer.unsent());
        let at = at.index(stream.len());
        stream[at] = to;
        let mut router = Session::new(SocketType::Router, Bytes::new(), LIMITS).unwrap();
        let (events, _) = in_pieces(&mut router, &stream, &cuts);
        prop_assert!(events.len() <= stream.len() / 2);
    }
}
