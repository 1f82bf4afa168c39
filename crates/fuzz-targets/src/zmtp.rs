//! A stranger's ZMTP connection, cut anywhere: its events do not depend on the cuts, and it holds no more than the limits.
use kvlane_zmtp::{Event, Greeting, Limits, ProtocolError, Session, SocketType};

use crate::halves::halves;

const LIMITS: Limits =
    Limits { frame_bytes: 700, message_bytes: 1500, message_frames: 4, command_bytes: 300 };
const READY: &[u8] = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER";

/// A session at its start, or after the handshake.
fn start(handshake_done: bool) -> Session {
    let mut router =
        Session::new(SocketType::Router, Default::default(), LIMITS).expect("it has no identity");
    if handshake_done {
        let opening = [&Greeting::OURS.encode(), READY].concat();
        let event = router.receive(&mut opening.as_slice());
        assert!(matches!(event, Ok(Some(Event::Ready { .. }))), "{event:?}");
    }
    router
}

fn receive(session: &mut Session, mut piece: &[u8], events: &mut Vec<Event>) -> Result<(), ProtocolError> {
    loop {
        let event = session.receive(&mut piece);
        assert!(session.buffered() <= LIMITS.most_buffered());
        assert!(session.unsent().len() <= 2048);
        match event? {
            Some(event) => events.push(event),
            None => break,
        }
    }
    assert!(piece.is_empty());
    Ok(())
}

/// Panics if a property fails for these bytes.
pub(crate) fn run(bytes: &[u8]) {
    let Some((first, rest)) = bytes.split_first() else { return };
    let handshake_done = first % 2 == 1;
    let (cuts, stream) = halves(rest);
    let mut expected = Vec::new();
    let end = receive(&mut start(handshake_done), stream, &mut expected);

    let mut session = start(handshake_done);
    let mut found = Vec::new();
    let mut rest = stream;
    let mut end_in_pieces = Ok(());
    for cut in cuts.iter().copied().map(usize::from).chain([usize::MAX]) {
        let (piece, later) = rest.split_at(cut.min(rest.len()));
        rest = later;
        end_in_pieces = receive(&mut session, piece, &mut found);
        if end_in_pieces.is_err() {
            break;
        }
    }
    assert_eq!(found, expected);
    assert_eq!(end_in_pieces, end);
}
