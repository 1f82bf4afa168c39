//! Transfers that are cancelled: after their end, neither side touches their memory.

use std::cell::Cell;
use std::time::{Duration, Instant};

use kvlane_fabric::{EngineOptions, Failure, Handle, Op, Options};

use crate::gate::Gate;
use crate::side::{CANARY, LARGE, POISON, Side, done};
use crate::support::{MIB, PATIENCE, Process, Random};

/// Once each is over, its memory is filled with what the other side, or this one, is not to see there.
fn what_is_given_up_leaves_memory_alone(transfers: Options) {
    const SLOT: usize = 2 * MIB;
    const SLOTS: usize = 32;
    const THEIRS: u8 = 0x33;
    const ROUNDS: usize = 12;
    const MOST_ROUNDS: usize = 10 * ROUNDS;
    let mut random = Random(0x7777_1234_aaaa_0001);
    let here =
        Side::new(SLOTS * SLOT, EngineOptions { transfers, connections: 2, ..EngineOptions::default() });
    let mut there = Process::new(SLOTS * SLOT);
    let peer = here.meet(&there.descriptor());
    here.is_neighbour(peer);
    let outcomes = [Cell::new(0), Cell::new(0)];
    let is_enough = || outcomes.iter().all(|count| count.get() > 20);
    for round in 0..MOST_ROUNDS {
        // A machine with much else to do may end nearly all before they are given up.
        if round >= ROUNDS && is_enough() {
            break;
        }
        here.memory.fill(0, SLOTS * SLOT, 7);
        there.order(&format!("fill 0 {} {THEIRS}", SLOTS * SLOT));
        let mut under_way: Vec<(Op, usize, Handle)> = Vec::new();
        let end = |(op, slot, handle): (Op, usize, Handle)| {
            match handle.wait(Some(PATIENCE)) {
                Some(Ok(())) => outcomes[0].update(|count| count + 1),
                Some(Err(Failure::Cancelled)) => outcomes[1].update(|count| count + 1),
                other => panic!("{other:?} in round {round}"),
            }
            // The memory is ours again.
            here.memory.fill(slot * SLOT, SLOT, if op == Op::Write { POISON } else { CANARY });
        };
        let slots = random.order(SLOTS);
        for slot in &slots {
            let op = if slot % 2 == 0 { Op::Write } else { Op::Read };
            let at = slot * SLOT;
            // In a few pieces of any size.
            let mut cuts: Vec<usize> = (0..6).map(|_| random.below(SLOT)).chain([0, SLOT]).collect();
            cuts.sort_unstable();
            let run = |cut: &[usize]| here.run(peer, at + cut[0], at + cut[0], cut[1] - cut[0]);
            under_way.push((op, *slot, here.begin(peer, op, cuts.windows(2).map(run).collect())));
            let begun = Instant::now();
            // How long a transfer takes is the machine's affair: where most are over by then, the next is given up sooner.
            let longest = match (outcomes[0].get(), outcomes[1].get()) {
                (done, cancelled) if done > 8 * cancelled => 1,
                (done, cancelled) if done > 2 * cancelled => 50,
                _ => 1_500,
            };
            let pause = Duration::from_micros(random.below(longest) as u64);
            while begun.elapsed() < pause {
                std::thread::yield_now();
            }
            if random.below(8) > 0 {
                let (op, slot, handle) = under_way.swap_remove(random.below(under_way.len()));
                handle.cancel();
                end((op, slot, handle));
            }
        }
        under_way.iter().for_each(|(_, _, handle)| handle.cancel());
        under_way.into_iter().for_each(end);
        assert_eq!(
            there.ask(&format!("absent {POISON}")),
            "done",
            "a late read of our memory in round {round}"
        );
        for slot in slots.iter().filter(|slot| **slot % 2 == 1) {
            let touched = here.memory.other_than(slot * SLOT, SLOT, CANARY);
            assert_eq!(touched, None, "a late write in round {round}");
        }
    }
    assert!(is_enough(), "done, cancelled: {outcomes:?}");
    here.is_neighbour(peer);
}

#[test]
fn what_is_given_up_leaves_the_memory_of_both_sides_alone_once_it_is_over() {
    what_is_given_up_leaves_memory_alone(Options { chunk_bytes: 128 << 10, ..Options::default() });
}

#[test]
fn what_is_given_up_with_its_connections_leaves_the_memory_of_both_sides_alone_once_it_is_over() {
    let (drain_patience, backoff) = (Duration::ZERO, Duration::from_millis(1));
    let transfers = Options { chunk_bytes: 128 << 10, drain_patience, backoff, ..Options::default() };
    what_is_given_up_leaves_memory_alone(transfers);
}

#[test]
fn what_a_slow_connection_holds_back_is_not_read_after_the_write_was_cancelled() {
    let (drain_patience, backoff) = (Duration::ZERO, Duration::from_millis(1));
    let transfers = Options { drain_patience, backoff, ..Options::default() };
    let here = Side::new(LARGE, EngineOptions { transfers, ..EngineOptions::default() });
    here.memory.fill(0, LARGE, 7);
    let mut there = Process::new(LARGE);
    let (gate, descriptor) = Gate::before(&there.descriptor());
    let peer = here.meet(&descriptor);
    here.is_neighbour(peer);
    done(&here.write(peer, 0, MIB));
    // A part of it is asked for by 64 bytes, and pings are no longer.
    let wanted = gate.change(|state| {
        state.is_held = true;
        state.came + 4 * 64
    });
    let handle = here.write(peer, 0, LARGE);
    gate.wait(|state| state.came >= wanted);
    handle.cancel();
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(Failure::Cancelled)));
    here.memory.fill(0, LARGE, POISON);
    gate.change(|state| state.is_held = false);
    gate.wait(|state| state.is_first_over);
    there.order(&format!("absent {POISON}"));
    here.memory.fill(0, 1, 7);
    here.reach(peer);
    there.order(&format!("absent {POISON}"));
    here.is_neighbour(peer);
}
