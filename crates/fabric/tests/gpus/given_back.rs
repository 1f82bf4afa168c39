//! Memory that its owner reuses as soon as it may: no earlier transfer touches it any more.

use std::sync::Arc;
use std::time::Duration;

use kvlane_fabric::{Failure, Op, Pieces, Transfer, Transport};

use crate::side::{Bytes, CANARY, On, Side, done, driver, pattern, shuffled, small_parts};
use crate::support::{PATIENCE, Random};

const PAGE: usize = 2 << 10;
const PAGES: usize = 96;
const BYTES: usize = PAGE * PAGES;
const ROUNDS: usize = 24;
/// A page takes a fifth of a millisecond.
const SLOW: Duration = Duration::from_millis(100);

/// So that something is under way of each kind: sockets, copies.
fn pause(random: &mut Random) {
    // Any moment will do: there is no event for what is under way inside.
    std::thread::sleep(Duration::from_micros(random.below(5_000) as u64));
}

/// Copies one after the other until all that was enqueued on the device must be over.
fn settle(memory: &Bytes) {
    std::thread::sleep(SLOW / 10);
    memory.get(0, 1);
}

#[test]
fn a_transfer_that_was_given_up_writes_no_more_into_a_gpu() {
    let driver = driver();
    let mut random = Random(0x1357_9bdf_0246_8ace);
    let mut given_up = 0;
    for transport in [Some(Transport::TCP), None] {
        let here = Side::new(&driver, On::Gpu(0), BYTES, small_parts(transport));
        let there = Side::new(&driver, On::Host, BYTES, small_parts(transport));
        there.memory.put(0, &pattern(BYTES, 1));
        let peer = here.meet(&there);
        driver.slow_down(SLOW);
        for round in 0..ROUNDS {
            let runs = Pieces::Runs(shuffled(PAGES, PAGE, &here, there.region));
            let timeout = (round % 2 == 0).then(|| Duration::from_micros(random.below(5_000) as u64));
            let handle = here.engine.begin(peer, Transfer { timeout, ..Transfer::read(runs) }).unwrap();
            if timeout.is_none() {
                pause(&mut random);
                handle.cancel();
            }
            match handle.wait(Some(PATIENCE)).expect("it is over in time") {
                Ok(()) => {}
                Err(Failure::Cancelled | Failure::DeadlineExceeded) => given_up += 1,
                other => panic!("{other:?} in round {round}"),
            }
            here.memory.fill(CANARY);
            settle(&here.memory);
            assert!(here.memory.is_all(CANARY), "a late write in round {round}");
        }
        driver.slow_down(Duration::ZERO);
        done(&here.move_all(peer, Op::Read, there.region));
        assert!(here.memory.get(0, BYTES) == pattern(BYTES, 1));
    }
    assert!(given_up > ROUNDS / 2, "{given_up} were given up");
}

/// Into ours, or into a peer's, which is asked not to touch it any more.
#[test]
fn a_transfer_whose_connection_is_ended_writes_no_more_into_a_gpu() {
    for op in [Op::Read, Op::Write] {
        let driver = driver();
        let mut random = Random(0x2468_ace0_1357_9bdf);
        let kinds = if op == Op::Read { [On::Gpu(0), On::Host] } else { [On::Host, On::Gpu(0)] };
        let [here, there] = kinds.map(|on| Side::new(&driver, on, BYTES, small_parts(Some(Transport::TCP))));
        let (from, to) = if op == Op::Read { (&there, &here) } else { (&here, &there) };
        from.memory.put(0, &pattern(BYTES, 1));
        driver.slow_down(SLOW);
        let mut lost = 0;
        for round in 0..ROUNDS {
            let peer = here.meet(&there);
            let handle = here.begin(peer, op, shuffled(PAGES, PAGE, &here, there.region));
            pause(&mut random);
            here.engine.disconnect(peer);
            match handle.wait(Some(PATIENCE)).expect("it is over in time") {
                Ok(()) => {}
                Err(Failure::PeerLost) => lost += 1,
                other => panic!("{other:?} in round {round} of {op:?}"),
            }
            to.memory.fill(CANARY);
            settle(&to.memory);
            assert!(to.memory.is_all(CANARY), "a late write in round {round} of {op:?}");
        }
        assert!(lost > ROUNDS / 2, "{lost} were lost");
    }
}

#[test]
fn memory_of_a_gpu_that_was_given_back_is_not_touched_any_more() {
    let driver = driver();
    let mut random = Random(0x9bdf_1357_ace0_2468);
    let here = Side::new(&driver, On::Host, BYTES, small_parts(Some(Transport::TCP)));
    let there = Side::new(&driver, On::Gpu(0), BYTES, small_parts(Some(Transport::TCP)));
    let peer = here.meet(&there);
    there.engine.unregister(there.region).unwrap();
    driver.slow_down(SLOW);
    let mut refused = 0;
    for round in 0..ROUNDS {
        let memory = Bytes::new(&driver, On::Gpu(round as u32 % 2), BYTES);
        // SAFETY: it is unregistered below.
        let region = unsafe { memory.register(&there.engine) };
        here.engine.update(peer, &there.descriptor()).unwrap();
        let handles: Vec<_> = [Op::Write, Op::Read, Op::Write]
            .map(|op| here.begin(peer, op, shuffled(PAGES, PAGE, &here, region)))
            .into();
        pause(&mut random);
        there.engine.unregister(region).unwrap();
        if round % 3 == 0 {
            // What still read or wrote it would lose the device.
            drop(memory);
        } else {
            memory.fill(CANARY);
            settle(&memory);
            assert!(memory.is_all(CANARY), "a late write in round {round}");
        }
        for handle in handles {
            match handle.wait(Some(PATIENCE)).expect("it is over in time") {
                Ok(()) => {}
                Err(Failure::Refused) => refused += 1,
                other => panic!("{other:?} in round {round}"),
            }
        }
    }
    assert!(refused > ROUNDS / 2, "{refused} were refused");
    assert_eq!(there.engine.staged().failed, 0);
}

#[test]
fn a_closed_engine_touches_no_memory_of_gpus() {
    let driver = driver();
    let mut random = Random(0xdf13_57ac_e024_689b);
    driver.slow_down(SLOW);
    for round in 0..ROUNDS / 2 {
        let here = Side::new(&driver, On::Gpu(0), BYTES, small_parts(None));
        let there = Side::new(&driver, On::Gpu(1), BYTES, small_parts(None));
        let peer = here.meet(&there);
        let op = if round % 2 == 0 { Op::Write } else { Op::Read };
        let handle = here.begin(peer, op, shuffled(PAGES, PAGE, &here, there.region));
        pause(&mut random);
        let (first, second) = if round % 4 < 2 { (&here, &there) } else { (&there, &here) };
        first.engine.close();
        first.memory.fill(CANARY);
        settle(&first.memory);
        assert!(first.memory.is_all(CANARY), "a late write in round {round}");
        second.engine.close();
        assert!(handle.wait(Some(PATIENCE)).is_some());
    }
    // All slots, streams and pinned memory went with the engines.
    assert!(Arc::strong_count(&driver) == 1, "{}", Arc::strong_count(&driver));
}
