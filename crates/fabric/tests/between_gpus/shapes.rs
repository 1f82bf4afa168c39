//! Bytes of every shape arrive, in both directions, on one GPU and on two, of whole allocations and of chunks.

use kvlane_fabric::{EngineOptions, Op};

use crate::side::{Kind, Side, done, pattern};
use crate::support::{Deadline, MIB, PATIENCE, Process, Random};

const LEN: usize = 8 * MIB;

fn both(other: &str, kind: Kind) -> (Side, Process) {
    let mut there = Process::with(LEN, other);
    there.order("pattern 7");
    (Side::new(0, kind, LEN, EngineOptions::default()), there)
}

#[test]
fn bytes_of_every_shape_arrive_as_the_model_has_them() {
    for (other, kind) in [("1 whole", Kind::Whole), ("0 chunks", Kind::Chunks), ("0 whole", Kind::Chunks)] {
        let (here, mut there) = both(other, kind);
        let descriptor = there.descriptor();
        let (peer, region) = (here.meet(&descriptor), descriptor.regions[0].number);
        let (mut theirs, mut mine) = (pattern(LEN, 7), pattern(LEN, 9));
        here.memory.put(0, &mine);
        let mut random = Random(0x1234_5678_9abc_def1 ^ LEN as u64);
        for turn in 0..30 {
            let op = if turn % 3 == 2 { Op::Write } else { Op::Read };
            // Pieces of one size in a random order, so that no two overlap.
            let piece = [16, 24, 4096, 4100, 65_536, MIB][random.below(6)];
            let slots = LEN / piece;
            let count = 1 + random.below(slots.min(700));
            let (local, remote) = (random.order(slots), random.order(slots));
            let runs: Vec<_> = (0..count).map(|at| (local[at] * piece, remote[at] * piece)).collect();
            for (to, from) in &runs {
                match op {
                    Op::Read => mine[*to..to + piece].copy_from_slice(&theirs[*from..from + piece]),
                    Op::Write => theirs[*from..from + piece].copy_from_slice(&mine[*to..to + piece]),
                }
            }
            let runs = runs.into_iter().map(|(local, remote)| here.run(region, local, remote, piece));
            done(&here.begin(peer, op, runs.collect()));
            assert!(here.memory.all() == mine, "{other} {turn}: {op:?} of {count} x {piece}");
        }
        // The other side's memory, by a READ of all of it.
        done(&here.move_all(peer, Op::Read, region));
        assert!(here.memory.all() == theirs, "{other}: what was written");
        assert_eq!(here.staged(), 0, "{other}: through pinned memory");
        assert_eq!(there.ask("staged"), "0");
        let path = here.path(peer, "cuda").unwrap();
        assert!(path.trouble.is_none() && path.bytes_per_second.is_some(), "{path:?}");
    }
}

/// Either side may register its first GPU memory after they have connected.
#[test]
fn an_offer_waits_until_there_is_gpu_memory() {
    let (here, mut there) = both("1 whole late", Kind::Whole);
    let peer = here.engine.connect(&there.descriptor()).unwrap();
    let waits = || here.path(peer, "cuda").and_then(|path| path.trouble);
    let deadline = Deadline::after(PATIENCE);
    while waits().as_deref() != Some("the peer has registered no memory of a GPU yet") {
        assert!(!deadline.has_passed(), "{:?}", here.engine.paths(peer));
    }
    there.order("register");
    here.is_neighbour(peer);
    let descriptor = there.descriptor();
    here.engine.update(peer, &descriptor).unwrap();
    done(&here.move_all(peer, Op::Read, descriptor.regions[0].number));
    assert!(here.memory.all() == pattern(LEN, 7));
    there.order(&format!("meet {}", here.engine.describe().unwrap().to_text().unwrap()));
    here.memory.put(0, &pattern(LEN, 21));
    there.order("read");
    assert_eq!(there.ask("is 21"), "true");
    here.memory.fill(0);
    there.order("pattern 5");
    there.order("write");
    assert!(here.memory.all() == pattern(LEN, 5));
    assert_eq!((here.staged(), there.ask("staged")), (0, "0".into()));
}
