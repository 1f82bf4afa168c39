//! Processes that are killed, and processes that are started in their place.

use std::time::Duration;

use kvlane_fabric::{Access, FabricError, Failure, Op};

use crate::side::{MARGIN, Side, done, impatient};
use crate::support::{Deadline, MIB, PATIENCE, Process};

/// So far must a transfer have come before something happens to it, and so far it goes.
const BEGUN: usize = 4 * MIB;
const LARGE: usize = 1 << 30;
/// So soon a transfer with a peer that was killed has failed.
const FAILED: Duration = Duration::from_secs(5).saturating_add(MARGIN);

fn a_killed_peer_fails_its_transfer_and_no_other(op: Op) {
    const MORE: usize = 128 * MIB;
    let here = Side::with(LARGE + MORE, impatient());
    let (mut doomed, mut living) = (Process::new(LARGE), Process::new(LARGE + MORE));
    let (lost, kept) = (here.meet(&doomed.descriptor()), here.meet(&living.descriptor()));
    match op {
        Op::Write => here.memory.fill(0, BEGUN + 1, 7),
        Op::Read => doomed.order(&format!("fill 0 {} 7", BEGUN + 1)),
    }
    here.memory.fill(LARGE, MORE, 9);
    let handle = here.begin(lost, op, here.run(lost, 0, 0, LARGE));
    match op {
        Op::Write => doomed.order(&format!("await {BEGUN}")),
        Op::Read => here.memory.wait_for(BEGUN),
    }
    let other = here.write(kept, LARGE, MORE);
    assert_eq!(handle.outcome(), None, "it is not over yet");
    doomed.kill();
    let deadline = Deadline::after(FAILED);
    let one_more = here.write(kept, LARGE, MORE);
    done(&other);
    done(&one_more);
    living.order(&format!("check {LARGE} {MORE} 9"));
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(Failure::PeerLost)));
    deadline.assert_kept();
    done(&here.post(kept));
    assert_eq!(handle.outcome(), Some(Err(Failure::PeerLost)), "it is over only once");
    here.engine.unregister(here.region).unwrap();
}

#[test]
fn a_write_to_a_killed_process_fails_and_others_go_on() {
    a_killed_peer_fails_its_transfer_and_no_other(Op::Write);
}

#[test]
fn a_read_from_a_killed_process_fails_and_others_go_on() {
    a_killed_peer_fails_its_transfer_and_no_other(Op::Read);
}

#[test]
fn a_process_whose_writer_is_killed_serves_others_and_gets_its_memory_back() {
    let here = Side::of(LARGE);
    let mut doomed = Process::new(LARGE);
    let other = Side::of(MIB);
    let peer = other.meet(&here.descriptor());
    doomed.order(&format!("fill 0 {} 7", BEGUN + 1));
    doomed.order(&format!("write {} 0 {LARGE}", here.descriptor().to_text().unwrap()));
    here.memory.wait_for(BEGUN);
    done(&other.post(peer));
    assert_eq!(here.memory.byte(LARGE - 1), 0);
    doomed.kill();
    done(&other.post(peer));
    here.engine.unregister(here.region).unwrap();
    here.memory.fill(0, 64 * MIB, 0x55);
    // Refused, or not even begun where it is known already.
    let late = other.try_post(peer).map(|late| late.wait(Some(PATIENCE)));
    assert!(matches!(late, Ok(Some(Err(Failure::Refused))) | Err(FabricError::Shape(_))), "{late:?}");
    // SAFETY: the engine goes before its memory.
    let region =
        unsafe { here.engine.register(here.memory.base, here.memory.len as u64, Access::ReadWrite).unwrap() };
    assert_eq!(region, here.region);
    done(&other.post(other.meet(&here.descriptor())));
    assert_eq!(here.memory.other_than(0, 64 * MIB, 0x55), None, "a late write");
}

#[test]
fn a_restarted_process_gets_nothing_that_was_meant_for_the_former_one() {
    let here = Side::with(LARGE, impatient());
    here.memory.fill(0, BEGUN + 1, 7);
    let mut former = Process::new(LARGE);
    let old = former.descriptor();
    let listen = String::from_utf8(old.addresses[0].bytes.clone()).unwrap();
    let peer = here.meet(&old);
    let handle = here.write(peer, 0, LARGE);
    former.order(&format!("await {BEGUN}"));
    assert_eq!(handle.outcome(), None, "it is not over yet");
    former.kill();
    let mut next = Process::with(LARGE, &listen);
    let new = next.descriptor();
    assert_eq!(new.addresses, old.addresses);
    let deadline = Deadline::after(FAILED);
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(Failure::PeerLost)));
    deadline.assert_kept();
    let again = here.meet(&old);
    assert_eq!(here.write(again, 0, LARGE).wait(Some(PATIENCE)), Some(Err(Failure::PeerLost)));
    assert_eq!(here.write(peer, 0, LARGE).wait(Some(PATIENCE)), Some(Err(Failure::PeerLost)));
    assert!(matches!(here.engine.update(peer.id, &new), Err(FabricError::NoSuchPeer)));
    next.order(&format!("check 0 {} 0", 64 * MIB));
    let known = here.meet(&new);
    done(&here.write(known, 0, BEGUN));
    next.order(&format!("check 0 {BEGUN} 7"));
    next.order(&format!("check {BEGUN} {} 0", 64 * MIB));
}
