//! Engines that are closed while bytes move.

use kvlane_fabric::{Failure, Handle, Op};

use crate::side::{LARGE, POISON, Side, fails_soon, impatient};
use crate::support::{MIB, PATIENCE, Process};

#[test]
fn what_goes_to_an_engine_that_is_closed_ends_soon_although_its_process_lives() {
    let here = Side::new(LARGE, impatient());
    here.memory.fill(0, LARGE, 7);
    let mut there = Process::new(LARGE);
    for _ in 0..5 {
        let peer = here.meet(&there.descriptor());
        here.is_neighbour(peer);
        there.order(&format!("fill 0 {LARGE} 0"));
        // What is read has nothing of what is waited for below.
        let half = here.run(peer, LARGE / 2, LARGE / 2, LARGE / 2);
        let read = here.begin(peer, Op::Read, vec![half; 256]);
        let handles = [here.long(peer, Op::Write), read, here.long(peer, Op::Write)];
        there.order(&format!("await {}", MIB + 12_345));
        there.order("close");
        for handle in &handles {
            // Some ask for memory of which the closed engine says no more than that it has none.
            fails_soon(handle, &[Failure::PeerLost, Failure::Refused]);
        }
        here.engine.disconnect(peer.id);
        there.order("reopen");
    }
}

#[test]
fn an_engine_that_is_closed_amid_its_writes_is_read_no_more_and_tells_who_waits() {
    let mut there = Process::new(LARGE);
    let descriptor = there.descriptor();
    for _ in 0..20 {
        let here = Side::new(LARGE, impatient());
        here.memory.fill(0, LARGE, 7);
        let peer = here.meet(&descriptor);
        here.is_neighbour(peer);
        there.order(&format!("fill 0 {LARGE} 0"));
        let handles: Vec<Handle> = (0..3).map(|_| here.long(peer, Op::Write)).collect();
        there.order(&format!("await {}", MIB + 12_345));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| handles[0].wait(Some(PATIENCE)));
            here.engine.close();
            here.memory.fill(0, LARGE, POISON);
            assert_eq!(waits.join().unwrap(), Some(Err(Failure::PeerLost)));
        });
        let outcomes: Vec<_> = handles.iter().map(Handle::outcome).collect();
        assert_eq!(outcomes, [Some(Err(Failure::PeerLost)); 3]);
        there.order(&format!("absent {POISON}"));
    }
}

#[test]
fn an_engine_that_is_closed_while_a_process_is_stopped_that_it_writes_to_tells_who_waits() {
    let here = Side::new(LARGE, impatient());
    let mut there = Process::new(LARGE);
    let peer = here.meet(&there.descriptor());
    here.is_neighbour(peer);
    there.order("fill 0 1 0");
    there.pause();
    let handle = here.long(peer, Op::Write);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| handle.wait(Some(PATIENCE)));
        here.engine.close();
        assert_eq!(waits.join().unwrap(), Some(Err(Failure::PeerLost)));
    });
}
