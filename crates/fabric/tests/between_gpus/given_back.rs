//! An owner takes its memory back: peers unmap it at once, or the owner goes on without them.

use std::time::{Duration, Instant};

use kvlane_fabric::Op;

use crate::side::{Side, done};
use crate::support::{MIB, Process};

const LEN: usize = 4 * MIB;
/// The time that an owner waits for its peers.
const PATIENCE_OF_OWNERS: u64 = 1000;

#[test]
fn peers_unmap_memory_that_its_owner_takes_back_before_it_has_it() {
    let (here, mut there) = (Side::of(0, LEN), Process::with(LEN, "1 whole"));
    let own = here.mapped();
    for turn in 0..5 {
        let descriptor = there.descriptor();
        let peer = here.meet(&descriptor);
        there.order(&format!("fill {}", turn + 1));
        done(&here.move_all(peer, Op::Read, descriptor.regions[0].number));
        assert!(here.memory.is_all(turn + 1));
        assert!(here.mapped() > own, "its memory is mapped here");
        let took: u64 = there.ask("timed-unregister").parse().unwrap();
        assert_eq!(here.mapped(), own, "it is not mapped any more when its owner has it back");
        assert!(took < PATIENCE_OF_OWNERS, "it waited {took} ms for a peer that answers");
        there.order("register");
        here.engine.update(peer, &there.descriptor()).unwrap();
    }
}

/// A peer that pulled a WRITE has mapped the writer's memory, and unmaps it too.
#[test]
fn the_target_of_a_write_unmaps_its_source() {
    let (here, mut there) = (Side::of(0, LEN), Process::with(LEN, "1 whole"));
    let alone: usize = there.ask("mapped").parse().unwrap();
    let descriptor = there.descriptor();
    let peer = here.meet(&descriptor);
    done(&here.move_all(peer, Op::Write, descriptor.regions[0].number));
    assert!(there.ask("mapped").parse::<usize>().unwrap() > alone);
    here.engine.unregister(here.region).unwrap();
    assert_eq!(there.ask("mapped").parse::<usize>().unwrap(), alone);
}

#[test]
fn an_owner_does_not_wait_for_a_peer_that_is_stopped() {
    let (here, mut there) = (Side::of(0, LEN), Process::with(LEN, "1 whole"));
    let descriptor = here.engine.describe().unwrap().to_text().unwrap();
    there.order(&format!("meet {descriptor}"));
    there.order("read");
    there.pause();
    let begun = Instant::now();
    here.engine.unregister(here.region).unwrap();
    let took = begun.elapsed();
    there.resume();
    assert!(took < Duration::from_millis(PATIENCE_OF_OWNERS) + Duration::from_secs(4), "{took:?}");
    // What is read from now on does not count.
    let outcome = there.ask("try-read");
    assert!(outcome == "Err(Refused)" || outcome.starts_with("not begun"), "{outcome}");
}

#[test]
fn a_disconnected_peer_and_a_closed_engine_map_nothing() {
    let (here, mut there) = (Side::of(0, LEN), Process::with(LEN, "1 chunks"));
    let own = here.mapped();
    let descriptor = there.descriptor();
    let peer = here.meet(&descriptor);
    done(&here.move_all(peer, Op::Read, descriptor.regions[0].number));
    assert!(here.mapped() > own);
    here.engine.disconnect(peer);
    here.unmaps_down_to(own);
    let peer = here.meet(&descriptor);
    done(&here.move_all(peer, Op::Read, descriptor.regions[0].number));
    here.engine.close();
    assert_eq!(here.mapped(), own, "closed");
}
