//! Hand-offs that are encrypted.

use kvlane_fabric::{Engine, EngineOptions, Tls};
use kvlane_handoff::{Outcome, ReadCounts};

use crate::certificates::{Authority, Files};
use crate::{BLOCKS, CONTENT, LAYERS, PIECE, SHAPE, Side, id, layers, rank_of, side, side_by, wanted};

fn encrypted(number: u8, (certificate, key, authority): &Files) -> Side {
    let engine = || {
        let files = (certificate.clone(), key.clone(), authority.clone());
        let tls = Some(Tls { certificate: files.0, key: files.1, authority: files.2 });
        let listen = vec!["127.0.0.1:0".parse().unwrap()];
        Engine::new(EngineOptions { listen, token: "t".into(), tls, ..EngineOptions::default() }).unwrap()
    };
    let rank = rank_of(number, engine(), BLOCKS * PIECE * LAYERS, layers);
    side_by(engine(), vec![rank], SHAPE)
}

#[test]
fn encrypted_engines_hand_over_and_others_are_not_talked_to() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new("ours");
    let files = |name: &str| authority.files(folder.path(), name);
    let (mut p, mut d) = (encrypted(0, &files("p")), encrypted(0, &files("d")));
    let stranger = encrypted(0, &Authority::new("another").files(folder.path(), "stranger"));
    let plain = side(1, SHAPE, "t");
    for (number, other) in (31..).zip([&stranger, &plain]) {
        p.scheduler.begin_lending(id(number), CONTENT);
        other.scheduler.begin_landing(id(number), wanted(p.address, 0, 2));
    }
    p.scheduler.begin_lending(id(30), CONTENT);
    d.scheduler.begin_landing(id(30), wanted(p.address, 0, 2));
    d.scheduler.give_room(id(30), &[5, 4]);
    p.compute(id(30), 0, &[1, 2]);
    assert_eq!(d.over(id(30)).outcome, Some(Outcome::Landed));
    assert!(d.holds(0, &[5, 4]));
    let ReadCounts { cma_bytes, tcp_bytes, .. } = d.ranks[0].agent.take_counts();
    assert_eq!((cma_bytes, tcp_bytes), (0, 2 * LAYERS * PIECE), "what is encrypted goes through sockets");
    for (number, other) in (31..).zip([&stranger, &plain]) {
        let outcome = other.over(id(number)).outcome;
        assert!(matches!(outcome, Some(Outcome::Unreachable(_) | Outcome::Unheard)), "{outcome:?}");
    }
}
