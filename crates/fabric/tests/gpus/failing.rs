//! GPU drivers that fail.

use kvlane_fabric::{Failure, Op, Transport};

use crate::side::{On, Side, done, driver, pattern, small_parts};
use crate::support::{MIB, PATIENCE};

/// No error of CUDA's, and not one that costs the context.
const ODD: u32 = 999;
/// CUDA_ERROR_ILLEGAL_ADDRESS, which does.
const STICKY: u32 = 700;

/// Of which side the GPU is that fails, and how the bytes go.
const CASES: [(On, On, Op); 4] = [
    (On::Gpu(0), On::Host, Op::Write),
    (On::Gpu(0), On::Host, Op::Read),
    (On::Host, On::Gpu(0), Op::Write),
    (On::Host, On::Gpu(0), Op::Read),
];

#[test]
fn a_copy_that_fails_fails_its_transfer_and_no_other() {
    for (here_on, there_on, op) in CASES {
        for in_a_call in [false, true] {
            let driver = driver();
            let here = Side::new(&driver, here_on, MIB, small_parts(Some(Transport::TCP)));
            let there = Side::new(&driver, there_on, MIB, small_parts(Some(Transport::TCP)));
            let peer = here.meet(&there);
            let (from, to) = if op == Op::Write { (&here, &there) } else { (&there, &here) };
            from.memory.put(0, &pattern(MIB, 1));
            done(&here.move_all(peer, op, there.region));
            match in_a_call {
                false => driver.fail_work(0, 11, ODD),
                true => driver.fail_call(0, Some("cuMemcpyAsync"), 11, ODD),
            }
            let half = MIB / 2;
            let parts = [0, half].map(|at| here.begin(peer, op, vec![here.run(there.region, at, at, half)]));
            let outcomes = parts.map(|handle| handle.wait(Some(PATIENCE)).unwrap());
            let failed = outcomes.iter().filter(|outcome| **outcome == Err(Failure::Gpu)).count();
            let placed = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
            assert_eq!((failed, placed), (1, 1), "{here_on:?} {op:?} {in_a_call}: {outcomes:?}");
            assert_eq!(here.engine.staged().failed + there.engine.staged().failed, 1);
            // Nothing was lost for those that come after.
            for seed in 2..6 {
                from.memory.put(0, &pattern(MIB, seed));
                done(&here.move_all(peer, op, there.region));
                assert!(to.memory.get(0, MIB) == pattern(MIB, seed), "{here_on:?} {op:?}");
            }
            assert_eq!(here.engine.paths(peer)[0].trouble, None, "over the same connection");
        }
    }
}

#[test]
fn a_gpu_that_is_lost_fails_its_transfers_and_the_hosts_memory_goes_on() {
    let driver = driver();
    let (here, there) = (Side::of(&driver, On::Host, MIB), Side::of(&driver, On::Gpu(0), MIB));
    let host = Side::of(&driver, On::Host, MIB);
    let (peer, other) = (here.meet(&there), here.meet(&host));
    done(&here.move_all(peer, Op::Write, there.region));
    driver.fail_work(0, 1, STICKY);
    for op in [Op::Write, Op::Read] {
        let handles: Vec<_> = (0..8).map(|_| here.move_all(peer, op, there.region)).collect();
        for handle in handles {
            assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(Failure::Gpu)), "{op:?}");
        }
    }
    done(&here.move_all(other, Op::Write, host.region));
    assert_eq!(here.engine.paths(peer)[0].trouble, None);
    there.engine.unregister(there.region).unwrap();
}
