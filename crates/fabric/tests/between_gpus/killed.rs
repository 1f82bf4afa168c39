//! Processes that die or stop in the middle of a copy.

use std::time::{Duration, Instant};

use kvlane_fabric::{Failure, Op};

use crate::side::{Side, done, pattern};
use crate::support::{MIB, PATIENCE, Process};

const LEN: usize = 4 * MIB;

/// The driver reports success for every copy from a dead process, with its old bytes.
#[test]
fn a_read_from_a_killed_process_does_not_count_and_its_memory_is_free_at_once() {
    let here = Side::of(0, LEN);
    let own = here.mapped();
    for turn in 0..4u64 {
        let mut there = Process::with(LEN, "1 whole");
        there.order("pattern 3");
        let descriptor = there.descriptor();
        let (peer, region) = (here.meet(&descriptor), descriptor.regions[0].number);
        done(&here.move_all(peer, Op::Read, region));
        here.driver.slow_down(Duration::from_millis(20 * turn));
        let read = here.move_all(peer, Op::Read, region);
        there.kill();
        let begun = Instant::now();
        // A copy that was over before counts; what ends later does not.
        match read.wait(Some(PATIENCE)).unwrap() {
            Ok(()) => assert!(here.memory.all() == pattern(LEN, 3)),
            Err(why) => assert!(matches!(why, Failure::PeerLost | Failure::Refused), "{why}"),
        }
        here.driver.slow_down(Duration::ZERO);
        here.unmaps_down_to(own);
        assert!(begun.elapsed() < Duration::from_secs(30), "it took {:?}", begun.elapsed());
        here.engine.disconnect(peer);
    }
}

#[test]
fn a_target_that_is_killed_while_it_pulls_ends_the_write() {
    let here = Side::of(0, LEN);
    let mut there = Process::with(LEN, "1 whole");
    let descriptor = there.descriptor();
    let (peer, region) = (here.meet(&descriptor), descriptor.regions[0].number);
    done(&here.move_all(peer, Op::Write, region));
    there.order("slow 50000");
    let write = here.move_all(peer, Op::Write, region);
    there.kill();
    let outcome = write.wait(Some(PATIENCE));
    assert!(matches!(outcome, Some(Ok(()) | Err(Failure::PeerLost))), "{outcome:?}");
    // Nothing of it is left, so that the memory can be taken back.
    here.engine.unregister(here.region).unwrap();
}

#[test]
fn a_copy_that_the_driver_fails_ends_its_transfer_and_no_other() {
    let here = Side::of(0, LEN);
    let mut there = Process::with(LEN, "0 whole");
    there.order("pattern 6");
    let descriptor = there.descriptor();
    let (peer, region) = (here.meet(&descriptor), descriptor.regions[0].number);
    done(&here.move_all(peer, Op::Read, region));
    here.driver.fail_work(0, 1, 1);
    let failed = here.begin(peer, Op::Read, vec![here.run(region, 0, 0, 4096)]);
    assert_eq!(failed.wait(Some(PATIENCE)), Some(Err(Failure::Gpu)));
    done(&here.move_all(peer, Op::Read, region));
    assert!(here.memory.all() == pattern(LEN, 6));
    // The other side's driver fails while it pulls.
    done(&here.move_all(peer, Op::Write, region));
    there.order("fail-work 1 1");
    let failed = here.begin(peer, Op::Write, vec![here.run(region, 0, 0, 4096)]);
    assert_eq!(failed.wait(Some(PATIENCE)), Some(Err(Failure::Gpu)));
    done(&here.move_all(peer, Op::Write, region));
    assert_eq!(here.staged(), 0);
}

#[test]
fn a_process_that_starts_again_is_met_again() {
    let here = Side::of(1, LEN);
    let own = here.mapped();
    for seed in 1..4 {
        let mut there = Process::with(LEN, "0 whole");
        there.order(&format!("pattern {seed}"));
        let descriptor = there.descriptor();
        let (peer, region) = (here.meet(&descriptor), descriptor.regions[0].number);
        done(&here.move_all(peer, Op::Read, region));
        assert!(here.memory.all() == pattern(LEN, seed));
        there.kill();
        here.unmaps_down_to(own);
    }
}
