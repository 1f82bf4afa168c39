//! Bytes of any shape: of any size, in halves, in pages, in very many pieces.

use kvlane_fabric::{Failure, Op, Pages, Pieces, Transfer};

use crate::side::{CANARY, COUNTER, Peer, Side, done};
use crate::support::{MIB, PATIENCE, Process, Random};

/// Bytes of both sides' regions.
const REGION: usize = 22 * MIB;
pub(crate) const PAGE: usize = 4096;
const PAGES: usize = 4096;

/// What moves, for both processes to know: from where, to where, how much.
fn shape(name: &str) -> Vec<(usize, usize, usize)> {
    let mut random = Random(0x1234_5678_9abc_def1);
    match name.parse::<usize>() {
        Ok(len) => vec![(1_001, 4_099, len)],
        // Two halves that change places, each in a few pieces.
        Err(_) if name == "halves" => {
            let piece = |half: usize, at: usize, len: usize| {
                (half * 6 * MIB + at, (1 - half) * 6 * MIB + 77 * (1 + half) + at, len)
            };
            let cuts = [0, 1, 4_096, 70_001, MIB, 3 * MIB + 5, 4 * MIB, 5 * MIB];
            let cut = |half: usize| cuts.windows(2).map(move |cut| piece(half, cut[0], cut[1] - cut[0]));
            [0, 1].into_iter().flat_map(cut).rev().collect()
        }
        Err(_) if name == "pages" => {
            let slots = REGION / PAGE;
            let (from, to) = (random.order(slots), random.order(slots));
            from.into_iter().zip(to).take(PAGES).map(|(from, to)| (from * PAGE, to * PAGE, PAGE)).collect()
        }
        Err(_) => {
            let (count, slot) = (100_000, 220);
            let (from, to) = (random.order(count), random.order(count));
            let piece = |(from, to): (usize, usize)| (from * slot, to * slot + 13, 1 + from * 7 % 200);
            from.into_iter().zip(to).map(piece).collect()
        }
    }
}

/// Bytes that tell where they are from.
pub(crate) fn scribbled(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Random(seed);
    let words: Vec<u64> = (0..len.div_ceil(8)).map(|_| random.word()).collect();
    // SAFETY: the words have at least so many bytes, which may be anything.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast::<u8>(), len) }.to_vec()
}

/// How memory looks that was full of canaries, and got the bytes of a shape.
pub(crate) fn image(name: &str, seed: u64, len: usize) -> Vec<u8> {
    let (source, mut image) = (scribbled(seed, len), vec![CANARY; len]);
    for (from, to, len) in shape(name) {
        image[to..to + len].copy_from_slice(&source[from..from + len]);
    }
    image
}

/// A shape of this side and the peer's.
fn pieces(here: &Side, peer: Peer, name: &str, op: Op) -> Pieces {
    let places = shape(name).into_iter().map(|(from, to, len)| match op {
        Op::Write => (from, to, len),
        Op::Read => (to, from, len),
    });
    if name != "pages" {
        return Pieces::Runs(places.map(|(local, remote, len)| here.run(peer, local, remote, len)).collect());
    }
    let (local, remote): (Vec<u32>, Vec<u32>) =
        places.map(|(local, remote, _)| ((local / PAGE) as u32, (remote / PAGE) as u32)).unzip();
    let pages = |region: u32, indices: Vec<u32>| Pages {
        region,
        offset: 0,
        stride: PAGE as u64,
        indices: indices.into(),
    };
    Pieces::Paged {
        page_bytes: PAGE as u64,
        local: pages(here.region, local),
        remote: pages(peer.region, remote),
    }
}

#[test]
fn bytes_of_any_shape_arrive_both_ways_and_are_counted_once_when_they_are_there() {
    let here = Side::of(REGION);
    let mut there = Process::new(REGION);
    let peer = here.meet(&there.descriptor());
    here.is_neighbour(peer);
    let sizes = [0, 1, 4095, 4096, 8191, 8193, 16_385, MIB + 3].map(|size| size.to_string());
    let names = sizes.iter().map(String::as_str).chain(["halves", "pages", "pieces"]);
    let mut counted = 0;
    for (seed, name) in (1..).zip(names) {
        for op in [Op::Write, Op::Read] {
            counted += 1;
            let seed = 2 * seed + u64::from(op == Op::Read);
            let begin = || {
                let transfer = Transfer {
                    op,
                    immediate: Some((COUNTER, 0)),
                    ..Transfer::write(pieces(&here, peer, name, op))
                };
                here.engine.begin(peer.id, transfer).unwrap()
            };
            match op {
                Op::Write => {
                    here.memory.put(&scribbled(seed, REGION));
                    assert_eq!(there.ask(&format!("expect {name} {seed} {counted}")), "ready");
                    let handle = begin();
                    assert_eq!(there.hear(), "done", "a write of {name}");
                    done(&handle);
                }
                Op::Read => {
                    there.order(&format!("scribble {seed}"));
                    here.memory.fill(0, REGION, CANARY);
                    done(&begin());
                    let is_right = here.memory.bytes(0, REGION) == image(name, seed, REGION);
                    assert!(is_right, "a read of {name}");
                }
            }
        }
    }
    // What is counted late would be counted by now.
    here.is_neighbour(peer);
    assert_eq!(there.ask(&format!("expect 0 1 {counted}")), "ready");
    assert_eq!(there.hear(), "done", "each is counted once");
}

#[test]
fn a_read_of_very_many_very_short_pieces_lets_others_have_their_turn() {
    const PIECES: usize = 500_000;
    let here = Side::of(2 * PIECES);
    let mut there = Process::new(2 * PIECES);
    let peer = here.meet(&there.descriptor());
    here.is_neighbour(peer);
    // No two of them continue each other.
    let runs = (0..PIECES).map(|at| here.run(peer, 2 * at, at, 1)).collect();
    let handle = here.begin(peer, Op::Read, runs);
    handle.cancel();
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(Failure::Cancelled)), "all of it was done at a stretch");
    here.is_neighbour(peer);
}
