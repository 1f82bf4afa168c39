//! Lists of any shape arrive, between host and GPUs, over each transport.

use kvlane_fabric::{EngineOptions, Op, Options, Pages, Pieces, Place, Run, Transfer, Transport};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::side::{Bytes, On, Side, done, driver, driver_with, pattern, shuffled};
use crate::support::{MIB, PATIENCE};

/// Where from, where to, how much; nothing too.
fn runs() -> impl Strategy<Value = Vec<(u64, u64, u64)>> {
    let len = prop_oneof![0..40u64, 1..9000u64, Just(8191), Just(8193), Just(16385), 1..120_000u64];
    vec((0..200_000u64, 0..5_000u64, len), 0..40).prop_map(|runs| {
        let mut free = 0;
        let place = |(far, gap, len): (u64, u64, u64)| {
            let at = free + gap;
            free = at + len;
            (far, at, len)
        };
        runs.into_iter().map(place).collect()
    })
}

fn on() -> impl Strategy<Value = On> {
    prop_oneof![1 => Just(On::Host), 2 => (0..2u32).prop_map(On::Gpu)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn lists_of_any_runs_arrive_as_they_are_wherever_the_memory_is(
        runs in runs(), op in prop_oneof![Just(Op::Write), Just(Op::Read)], here_on in on(), there_on in on(),
        chunks in (1000..200_000u64, 1000..200_000u64), chunk_runs in 1..300usize, connections in 1..3usize,
        transport in prop_oneof![Just(None), Just(Some(Transport::TCP))], batch in any::<bool>(),
    ) {
        const BYTES: usize = 6 * MIB;
        let driver = driver_with(batch);
        let options = |chunk_bytes| {
            let transfers = Options { chunk_bytes, chunk_runs, ..Options::default() };
            EngineOptions { transfers, connections, transport, ..EngineOptions::default() }
        };
        let here = Side::new(&driver, here_on, BYTES, options(chunks.0));
        let there = Side::new(&driver, there_on, BYTES, options(chunks.1));
        let (ours, theirs) = (pattern(BYTES, 3), pattern(BYTES, 4));
        here.memory.put(0, &ours);
        there.memory.put(0, &theirs);
        let (from, mut expected) = match op {
            Op::Write => (ours, theirs),
            Op::Read => (theirs, ours),
        };
        let mut list = Vec::new();
        for (source, target, len) in runs {
            let [source, target, len] = [source, target, len].map(|number| number as usize);
            expected[target..target + len].copy_from_slice(&from[source..source + len]);
            list.push(match op {
                Op::Write => here.run(there.region, source, target, len),
                Op::Read => here.run(there.region, target, source, len),
            });
        }
        let generation = there.engine.open_counter(7);
        let transfer = Transfer { op, immediate: Some((7, generation)), ..Transfer::write(Pieces::Runs(list)) };
        let handle = here.engine.begin(here.meet(&there), transfer).unwrap();
        prop_assert!(there.engine.wait_count(7, generation, 1, Some(PATIENCE)));
        let arrived = match op { Op::Write => &there.memory, Op::Read => &here.memory };
        prop_assert!(arrived.get(0, BYTES) == expected);
        done(&handle);
    }
}

/// One transfer, regions of the host and of two GPUs on both sides.
#[test]
fn one_transfer_moves_memory_of_several_kinds() {
    const BYTES: usize = 300_000;
    const PIECE: usize = 7_001;
    let driver = driver();
    for op in [Op::Write, Op::Read] {
        let (here, there) = (Side::of(&driver, On::Host, BYTES), Side::of(&driver, On::Gpu(1), BYTES));
        let kinds = [On::Gpu(0), On::Gpu(1), On::Host];
        let more = |side: &Side| {
            let memories = kinds.map(|on| Bytes::new(&driver, on, BYTES));
            // SAFETY: the memories are kept until the engines were closed, below.
            let numbers = memories.each_ref().map(|memory| unsafe { memory.register(&side.engine) });
            (memories, numbers)
        };
        let ((ours, our_numbers), (theirs, their_numbers)) = (more(&here), more(&there));
        let (from, to) = if op == Op::Write { (&ours, &theirs) } else { (&theirs, &ours) };
        from.iter().zip(1..).for_each(|(memory, seed)| memory.put(0, &pattern(BYTES, seed)));
        to.iter().for_each(|memory| memory.fill(0xee));
        // Each piece goes from another kind to another kind than the one before.
        let runs = (0..BYTES / PIECE).map(|index| {
            let place = |region, index: usize| Place { region, offset: (index * PIECE) as u64 };
            let (local, remote) = (our_numbers[index % 3], their_numbers[(index / 3) % 3]);
            Run { local: place(local, index), remote: place(remote, index), len: PIECE as u64 }
        });
        done(&here.begin(here.meet(&there), op, runs.collect()));
        for index in 0..BYTES / PIECE {
            let (local, remote) = (index % 3, (index / 3) % 3);
            let (source, target) = if op == Op::Write { (local, remote) } else { (remote, local) };
            let at = index * PIECE;
            assert!(to[target].get(at, PIECE) == from[source].get(at, PIECE), "piece {index} of {op:?}");
            for other in (0..3).filter(|other| *other != target) {
                assert!(
                    to[other].get(at, PIECE) == vec![0xee; PIECE],
                    "piece {index} of {op:?} is nowhere else"
                );
            }
        }
        here.engine.close();
        there.engine.close();
    }
}

#[test]
fn pages_of_gpus_go_both_ways_in_one_call() {
    const PAGE: usize = 4 << 10;
    const PAGES: u32 = 2048;
    const BYTES: usize = PAGE * PAGES as usize;
    let driver = driver();
    let (here, there) = (Side::of(&driver, On::Gpu(0), BYTES), Side::of(&driver, On::Gpu(1), BYTES));
    let peer = here.meet(&there);
    let pages =
        |region, indices: Vec<u32>| Pages { region, offset: 0, stride: PAGE as u64, indices: indices.into() };
    let pieces = Pieces::Paged {
        page_bytes: PAGE as u64,
        local: pages(here.region, (0..PAGES).collect()),
        remote: pages(there.region, (0..PAGES).rev().collect()),
    };
    here.memory.put(0, &pattern(BYTES, 5));
    done(&here.engine.begin(peer, Transfer::write(pieces.clone())).unwrap());
    let turned = |bytes: Vec<u8>| bytes.chunks(PAGE).rev().flatten().copied().collect::<Vec<u8>>();
    assert!(there.memory.get(0, BYTES) == turned(pattern(BYTES, 5)));
    there.memory.put(0, &pattern(BYTES, 6));
    done(&here.engine.begin(peer, Transfer::read(pieces)).unwrap());
    assert!(here.memory.get(0, BYTES) == turned(pattern(BYTES, 6)));
    let (ours, theirs) = (here.engine.staged(), there.engine.staged());
    assert_eq!((ours.from_gpus, ours.to_gpus), (BYTES as u64, BYTES as u64));
    assert_eq!(ours, theirs);
}

#[test]
fn an_immediate_comes_after_the_last_copy() {
    const PAGE: usize = 512;
    const PAGES: usize = 64;
    let driver = driver();
    let (here, there) =
        (Side::of(&driver, On::Host, PAGE * PAGES), Side::of(&driver, On::Gpu(0), PAGE * PAGES));
    here.memory.put(0, &pattern(PAGE * PAGES, 9));
    let peer = here.meet(&there);
    // A quarter of a millisecond between two pages.
    driver.slow_down(std::time::Duration::from_millis(512));
    let generation = there.engine.open_counter(1);
    let runs = shuffled(PAGES, PAGE, &here, there.region);
    let transfer =
        Transfer { immediate: Some((1, generation)), ..Transfer::write(Pieces::Runs(runs.clone())) };
    let handle = here.engine.begin(peer, transfer).unwrap();
    assert!(there.engine.wait_count(1, generation, 1, Some(PATIENCE)));
    driver.slow_down(std::time::Duration::ZERO);
    let came = there.memory.get(0, PAGE * PAGES);
    for run in runs {
        let (from, to) = (run.local.offset as usize, run.remote.offset as usize);
        assert!(came[to..to + PAGE] == here.memory.get(from, PAGE));
    }
    done(&handle);
}

#[test]
fn nothing_and_one_byte_of_a_gpu_arrive() {
    let driver = driver();
    let (here, there) = (Side::of(&driver, On::Gpu(0), 10), Side::of(&driver, On::Gpu(0), 10));
    here.memory.put(0, &pattern(10, 1));
    let peer = here.meet(&there);
    done(&here.begin(peer, Op::Write, vec![here.run(there.region, 3, 10, 0)]));
    assert!(there.memory.is_all(0));
    done(&here.begin(peer, Op::Write, vec![here.run(there.region, 9, 0, 1)]));
    assert_eq!(there.memory.get(0, 2), [pattern(10, 1)[9], 0]);
}
