//! Processes that are killed.

use kvlane_fabric::{Handle, Op};

use crate::shapes::PAGE;
use crate::side::{CANARY, LARGE, Side, impatient, lost};
use crate::support::{Process, Random};

/// Again and again the other process is killed, each time when the transfers have come another way.
fn killed_in_the_middle(op: Op) {
    const ROUNDS: usize = 20;
    let mut random = Random(0x0f1e_2d3c_4b5a_6978);
    let mut here = Side::new(LARGE, impatient());
    let mailbox = Side::of(PAGE);
    for round in 0..ROUNDS {
        let mut there = Process::new(LARGE);
        let descriptor = there.descriptor();
        // A process that was started again is reached.
        mailbox.is_neighbour(mailbox.meet(&descriptor));
        if round > 0 {
            assert_eq!(here.memory.other_than(0, LARGE, CANARY), None, "late bytes of round {round}");
            here.register();
        }
        let peer = here.meet(&descriptor);
        here.is_neighbour(peer);
        here.memory.fill(0, LARGE, 7 * u8::from(op == Op::Write));
        there.order(&format!("fill 0 {LARGE} {}", 7 * u8::from(op == Op::Read)));
        let at = random.below(LARGE);
        let handles: Vec<Handle> = (0..3).map(|_| here.long(peer, op)).collect();
        match op {
            Op::Write => there.order(&format!("await {at}")),
            Op::Read => here.memory.wait_for(at),
        }
        assert!(here.has_cma(peer));
        there.kill();
        handles.iter().for_each(lost);
        here.engine.disconnect(peer.id);
        here.engine.unregister(here.region).unwrap();
        here.memory.fill(0, LARGE, CANARY);
    }
}

#[test]
fn writes_to_a_process_that_is_killed_while_it_takes_them_are_lost_and_the_next_process_is_reached() {
    killed_in_the_middle(Op::Write);
}

#[test]
fn reads_from_a_process_that_is_killed_meanwhile_are_lost_and_the_next_process_is_reached() {
    killed_in_the_middle(Op::Read);
}

#[test]
fn a_process_whose_writers_are_killed_serves_others_and_gets_its_memory_back() {
    let mut random = Random(0x1f2e_3d4c_5b6a_7988);
    let mut here = Side::of(LARGE);
    let mut witness = Process::new(LARGE);
    for _ in 0..20 {
        let mut doomed = Process::new(LARGE);
        here.memory.fill(0, LARGE, 0);
        let descriptor = here.descriptor().to_text().unwrap();
        witness.order(&format!("meet {descriptor}"));
        witness.order("write 0 1");
        doomed.order(&format!("fill 0 {LARGE} 7"));
        doomed.order(&format!("meet {descriptor}"));
        doomed.order("write-on");
        here.memory.wait_for(random.below(LARGE));
        doomed.kill();
        witness.order("read 0 1");
        here.engine.unregister(here.region).unwrap();
        here.memory.fill(0, LARGE, CANARY);
        here.register();
        witness.order(&format!("meet {}", here.descriptor().to_text().unwrap()));
        witness.order(&format!("read 0 {LARGE}"));
        witness.order(&format!("check 0 {LARGE} {CANARY}"));
        assert_eq!(here.memory.other_than(0, LARGE, CANARY), None, "a late write");
    }
}
