//! Memory that its owner takes from its engine while peers write and read it.

use kvlane_fabric::{EngineOptions, FabricError, Failure, Handle, Op};

use crate::side::Side;
use crate::support::{MIB, PATIENCE, Process, Random};

#[test]
fn memory_that_is_given_back_is_not_written_and_what_is_read_of_it_does_not_count() {
    const BYTES: usize = 2 * MIB;
    const ROUNDS: usize = 60;
    const BEFORE: u8 = 0x11;
    const WRITTEN: u8 = 0x22;
    let mut random = Random(0x5a5a_1234_9876_0f0f);
    let here = Side::new(8 * BYTES, EngineOptions::default());
    here.memory.fill(0, BYTES, WRITTEN);
    let mut there = Process::new(BYTES);
    let peer = here.meet(&there.descriptor());
    here.is_neighbour(peer);
    there.order("unregister");
    let mut outcomes = [0; 2];
    for round in 0..ROUNDS {
        there.order(&format!("fill 0 {BYTES} {BEFORE}"));
        there.order("register");
        here.engine.update(peer.id, &there.descriptor()).unwrap();
        there.tell(&format!("revoke {}", random.below(4_000)));
        // Once it is known that the memory was given back, nothing is begun.
        let begin = |slot: usize| {
            let op = if slot == 0 { Op::Write } else { Op::Read };
            match here.try_begin(peer, op, vec![here.run(peer, slot * BYTES, 0, BYTES)]) {
                Ok(handle) => Some((slot, handle)),
                Err(FabricError::Shape(_)) => None,
                Err(other) => panic!("{other}"),
            }
        };
        let mut handles: Vec<(usize, Handle)> = (0..4).filter_map(begin).collect();
        let is_right = |byte: &u8| matches!(*byte, BEFORE | WRITTEN);
        let mut revoked = None;
        while !handles.is_empty() {
            let (slot, handle) = handles.remove(0);
            match handle.wait(Some(PATIENCE)) {
                Some(Ok(())) if slot == 0 => outcomes[0] += 1,
                Some(Ok(())) => {
                    outcomes[0] += 1;
                    let strange = here.memory.find_other(slot * BYTES, BYTES, is_right);
                    assert_eq!(strange, None, "read after it was given back, in round {round}");
                }
                Some(Err(Failure::Refused)) => outcomes[1] += 1,
                other => panic!("{other:?} in round {round}"),
            }
            revoked = revoked.or_else(|| there.has_said());
            if revoked.is_none() {
                handles.extend(begin(slot));
            }
        }
        let revoked = revoked.or_else(|| Some(there.hear()));
        assert_eq!(revoked.as_deref(), Some("done"), "in round {round}");
        handles.extend((0..4).filter_map(begin));
        for (_, handle) in handles {
            assert_eq!(
                handle.wait(Some(PATIENCE)),
                Some(Err(Failure::Refused)),
                "begun after it was given back"
            );
        }
    }
    assert!(outcomes.iter().all(|count| *count > ROUNDS), "done, refused: {outcomes:?}");
    assert!(here.has_cma(peer));
    assert_eq!(here.path(peer, "cma").unwrap().trouble, None, "all of it over one connection");
}
