//! Resources that engines take of a process: descriptors, threads, mappings.

use std::time::Duration;

use crate::shapes::PAGE;
use crate::support::{MIB, PATIENCE, Process};

#[test]
fn neighbours_that_come_and_go_leave_nothing_open() {
    let rounds = std::env::var("KVLANE_TEST_ROUNDS").map_or(50, |rounds| rounds.parse().unwrap());
    let (mut stays, mut goes) = (Process::new(MIB), Process::new(PAGE));
    let descriptor = stays.descriptor().to_text().unwrap();
    let all = |text: &str| -> Vec<usize> { text.split(' ').map(|count| count.parse().unwrap()).collect() };
    let patience = PATIENCE + Duration::from_millis(500) * rounds;
    // The threads that copy are made once, and stay.
    goes.tell(&format!("cycle {descriptor} 0"));
    goes.hear_within(PATIENCE);
    let before = stays.ask("count");
    goes.tell(&format!("cycle {descriptor} {rounds}"));
    let of_goes = all(&goes.hear_within(patience));
    let of_stays = [all(&before), all(&stays.ask(&format!("recount {before}")))].concat();
    for counts in [of_goes, of_stays] {
        let [descriptors, threads, mappings] = [0, 1, 2].map(|index| (counts[index], counts[index + 3]));
        assert!(descriptors.1 <= descriptors.0, "descriptors: {descriptors:?}");
        assert!(threads.1 <= threads.0, "threads: {threads:?}");
        // The allocator may have some more for itself, not one a round.
        assert!(mappings.1 <= mappings.0 + 16, "mappings: {mappings:?}");
    }
}
