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

/// Takes 4 GiB of memory: the source is written at few places only.
#[test]
fn transfers_around_four_gibibytes_move_all_their_bytes() {
    const LIMIT: usize = 1 << 32;
    let (here, there) = (Side::of(LIMIT + MIB), Side::of(LIMIT + MIB));
    let peer = here.meet(&there.descriptor());
    for (mark, len) in (1..).zip([LIMIT - 1, LIMIT, LIMIT + 1]) {
        let places = [0, 1, 512 << 10, (1 << 31) - 1, 1 << 31, (1 << 31) + 12_345, len - 2, len - 1];
        places.iter().for_each(|place| here.memory.set(*place, mark));
        let behind = there.memory.byte(len);
        // Seconds where nothing else runs, a minute where others build.
        let moved = here.write(peer, 0, len).wait(Some(10 * PATIENCE));
        assert_eq!(moved, Some(Ok(())), "{len} bytes");
        for place in places {
            assert_eq!(there.memory.byte(place), mark, "byte {place} of {len}");
        }
        assert_eq!(there.memory.byte(len), behind, "behind {len} bytes");
        assert_eq!(there.memory.other_than(2, 1000, 0), None);
    }
}
