//! Transfers of no bytes, of a few, and of more than 4 GiB.

use kvlane_fabric::Op;

use crate::side::{CANARY, Side, done};
use crate::support::{MIB, PATIENCE};

#[test]
fn transfers_of_any_size_move_their_bytes_and_no_others() {
    const BYTES: usize = 64 << 10;
    let (here, there) = (Side::of(BYTES), Side::of(BYTES));
    let peer = here.meet(&there.descriptor());
    for len in [0, 1, 8191, 8193, 16385] {
        for (op, from, to) in [(Op::Write, &here, &there), (Op::Read, &there, &here)] {
            from.memory.scribble(0, BYTES, len as u64 + 1);
            to.memory.fill(0, BYTES, CANARY);
            let (source, target) = (1_001, 4_099);
            let run = match op {
                Op::Write => here.run(peer, source, target, len),
                Op::Read => here.run(peer, target, source, len),
            };
            done(&here.begin(peer, op, run));
            assert!(to.memory.bytes(target, len) == from.memory.bytes(source, len), "{op:?} of {len} bytes");
            assert_eq!(to.memory.other_than(0, target, CANARY), None);
            assert_eq!(to.memory.other_than(target + len, BYTES - target - len, CANARY), None);
        }
    }
}

/// Takes 4 GiB of memory: the source is written at few places only. What 4 GiB less a byte and no byte more become is
/// in tests/all/transfers.rs.
#[test]
fn a_transfer_of_more_than_four_gibibytes_moves_all_its_bytes() {
    const LIMIT: usize = 1 << 32;
    const LEN: usize = LIMIT + 1;
    let (here, there) = (Side::of(LIMIT + MIB), Side::of(LIMIT + MIB));
    let peer = here.meet(&there.descriptor());
    let places = [0, 1, 512 << 10, (1 << 31) - 1, 1 << 31, (1 << 31) + 12_345, LIMIT - 2, LIMIT - 1, LIMIT];
    places.iter().for_each(|place| here.memory.set(*place, 7));
    // Seconds where nothing else runs, a minute where others build.
    assert_eq!(here.write(peer, 0, LEN).wait(Some(10 * PATIENCE)), Some(Ok(())));
    for place in places {
        assert_eq!(there.memory.byte(place), 7, "byte {place}");
    }
    assert_eq!(there.memory.other_than(2, 1000, 0), None);
    assert_eq!(there.memory.other_than(LEN, MIB - 1, 0), None, "behind the last byte");
}
