//! Peers that cannot map memory: the reason is one sentence, and bytes go through pinned memory of the host.

use kvlane_fabric::{EngineOptions, Op};

use crate::side::{Kind, Side, done, pattern};
use crate::support::{MIB, Process};

const LEN: usize = 2 * MIB;

#[test]
fn memory_that_was_not_made_for_sharing_goes_through_slots() {
    let (here, mut there) = (Side::of(0, LEN), Process::with(LEN, "0 own-chunks"));
    there.order("pattern 8");
    let descriptor = there.descriptor();
    let (peer, region) = (here.connect(&descriptor), descriptor.regions[0].number);
    done(&here.move_all(peer, Op::Read, region));
    assert!(here.memory.all() == pattern(LEN, 8));
    assert_eq!(here.staged(), LEN as u64);
    let why = here.trouble(peer);
    assert!(why.contains("the peer cannot share its GPU memory") && why.ends_with("sleep mode)"), "{why}");
}

#[test]
fn a_peer_without_the_carrier_is_reached_through_slots() {
    let (here, mut there) = (Side::of(0, LEN), Process::with(LEN, "0 whole slots"));
    there.order("pattern 8");
    let descriptor = there.descriptor();
    let (peer, region) = (here.connect(&descriptor), descriptor.regions[0].number);
    done(&here.move_all(peer, Op::Read, region));
    assert!(here.memory.all() == pattern(LEN, 8));
    assert!(here.staged() > 0);
    assert!(!here.trouble(peer).is_empty());
}

/// A process cannot open its own handles, as with CUDA.
#[test]
fn two_engines_of_one_process_use_slots() {
    let (here, there) = (Side::of(0, LEN), Side::new(0, Kind::Whole, LEN, EngineOptions::default()));
    there.memory.put(0, &pattern(LEN, 2));
    let peer = here.connect(&there.engine.describe().unwrap());
    done(&here.move_all(peer, Op::Read, there.region));
    assert!(here.memory.all() == pattern(LEN, 2));
    let why = here.trouble(peer);
    assert!(why.contains("it is in this process"), "{why}");
}
