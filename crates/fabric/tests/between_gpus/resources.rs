//! Peers that come and go leave no mapping, descriptor or thread behind.

use std::time::Duration;

use crate::support::{MIB, PATIENCE, Process};

const LEN: usize = 4 * MIB;

/// Rounds, of which `KVLANE_TEST_ROUNDS` makes more for a soak.
pub(crate) fn rounds(usual: u32) -> u32 {
    std::env::var("KVLANE_TEST_ROUNDS").map_or(usual, |rounds| rounds.parse().unwrap())
}

/// Descriptors, threads and mappings of a process before and after, the last of which may be some more of the allocator's.
fn assert_none_left(before: &str, after: &str) {
    let all = |text: &str| -> Vec<usize> { text.split(' ').map(|count| count.parse().unwrap()).collect() };
    let (before, after) = (all(before), all(after));
    let is_kept = |index: usize| after[index] <= before[index];
    assert!(is_kept(0) && is_kept(1), "descriptors, threads and mappings: {after:?} after {before:?}");
    assert!(after[2] <= before[2] + 16, "mappings: {after:?} after {before:?}");
}

#[test]
fn peers_that_come_and_go_leave_nothing_mapped_or_open() {
    for kind in ["whole", "chunks"] {
        let rounds = rounds(8);
        let patience = PATIENCE + Duration::from_millis(500) * rounds;
        let (mut stays, mut goes) =
            (Process::with(LEN, &format!("1 {kind}")), Process::with(LEN, &format!("0 {kind}")));
        let (stays_own, goes_own) = (stays.ask("mapped"), goes.ask("mapped"));
        let descriptor = stays.descriptor().to_text().unwrap();
        // The first rounds make threads and streams that stay.
        goes.tell(&format!("cycle {descriptor} 3"));
        goes.hear_within(patience);
        let before = [stays.ask("count"), goes.ask("count")];
        goes.tell(&format!("cycle {descriptor} {rounds}"));
        assert_eq!(goes.hear_within(patience), "done");
        for (process, before) in [&mut stays, &mut goes].into_iter().zip(&before) {
            assert_none_left(before, &process.ask(&format!("recount {before}")));
        }
        assert_eq!((stays.ask("mapped"), goes.ask("mapped")), (stays_own, goes_own));
    }
}

#[test]
fn killed_peers_that_come_and_go_leave_nothing_mapped_or_open() {
    let mut stays = Process::with(LEN, "1 whole");
    let own = stays.ask("mapped");
    let descriptor = stays.descriptor().to_text().unwrap();
    let meet_and_kill = |stays: &mut Process| {
        let mut goes = Process::with(LEN, "0 whole");
        goes.order(&format!("meet {descriptor}"));
        stays.order(&format!("meet {}", goes.descriptor().to_text().unwrap()));
        for order in ["read", "write"] {
            goes.order(order);
            stays.order(order);
        }
        goes.order("begin-read");
        goes.kill();
        stays.order("disconnect");
    };
    meet_and_kill(&mut stays);
    let before = stays.ask("count");
    (0..rounds(4)).for_each(|_| meet_and_kill(&mut stays));
    assert_none_left(&before, &stays.ask(&format!("recount {before}")));
    assert_eq!(stays.ask("mapped"), own);
}
