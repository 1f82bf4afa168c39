//! Order, gaps, snapshots and the comparison of digests, one story each.

use std::time::Duration;

use kvlane_index::{Index, KeySet, Limits, Progress, Refused, State, Timing};

use crate::peer::{Peer, hashes, only};
use crate::world::{hash, space};

fn index() -> Index {
    Index::new([1, 2], Limits::default(), Timing::default())
}

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

#[test]
fn a_delta_waits_for_the_one_before_it() {
    let mut index = index();
    let mut a = Peer::joined(&mut index, "a");
    let first = a.delta(&hashes(0..2), &[]);
    let second = a.delta(&[], &hashes(0..1));
    assert_eq!(index.delta("a", 1, second.clone(), a.now), Ok(Progress::Waiting));
    assert_eq!(index.delta("a", 1, first.clone(), a.now), Ok(Progress::Following));
    assert_eq!(only(&index, "a", &hashes(0..2), a.now), [1..2]);
    index.delta("a", 1, first, a.now).unwrap();
    index.delta("a", 1, second, a.now).unwrap();
    assert_eq!(only(&index, "a", &hashes(0..2), a.now), [1..2], "repeated ones are dropped");
    assert_eq!(index.counters().deltas_repeated, 2);
}

#[test]
fn a_delta_that_overlaps_is_applied() {
    let mut index = index();
    let mut a = Peer::joined(&mut index, "a");
    let mut first = a.delta(&hashes(0..2), &[]);
    index.delta("a", 1, first.clone(), a.now).unwrap();
    let second = a.delta(&hashes(2..3), &[]);
    first.last = second.last;
    first.changes.extend(second.changes);
    assert_eq!(index.delta("a", 1, first, a.now), Ok(Progress::Following));
    assert_eq!(only(&index, "a", &hashes(0..3), a.now), [0..3]);
}

#[test]
fn a_gap_that_does_not_close_needs_a_snapshot() {
    let mut index = index();
    let mut a = Peer::joined(&mut index, "a");
    a.lose(&hashes(0..1));
    a.announce(&mut index, &hashes(1..2));
    a.now += millis(500);
    assert_eq!(index.tick(a.now), []);
    a.now += millis(600);
    a.answer_snapshot(&mut index, 1);
    assert_eq!(only(&index, "a", &hashes(0..2), a.now), [0..2]);
    assert_eq!((index.counters().lost_by_gap, index.owners(a.now)[0].state), (1, State::Following));
}

#[test]
fn a_heartbeat_reveals_that_the_latest_delta_is_lost() {
    let mut index = index();
    let mut a = Peer::joined(&mut index, "a");
    a.lose(&hashes(0..1));
    assert_eq!(a.beat(&mut index), Progress::Waiting);
    a.now += millis(1100);
    assert_eq!(index.tick(a.now).len(), 1);
}

#[test]
fn count_and_digest_reveal_a_defect() {
    for defect in [vec![hash(7)], vec![]] {
        let mut index = index();
        let mut a = Peer::joined(&mut index, "a");
        a.announce(&mut index, &hashes(0..4));
        assert_eq!(a.beat(&mut index), Progress::Following);
        // Another key in place of one; or a key too few.
        a.keys.remove(&hash(2));
        a.keys.extend(defect);
        assert_eq!(a.beat(&mut index), Progress::NeedsSnapshot);
        assert_eq!(index.counters().lost_by_difference, 1);
        a.now += millis(1000);
        a.answer_snapshot(&mut index, 2);
        assert_eq!(a.beat(&mut index), Progress::Following);
        assert_eq!(only(&index, "a", &hashes(0..4), a.now), [0..2, 3..4]);
    }
}

#[test]
fn a_heartbeat_ahead_is_compared_when_its_deltas_have_come() {
    let mut index = index();
    let mut a = Peer::joined(&mut index, "a");
    let delta = a.delta(&hashes(0..2), &[]);
    a.keys.insert(hash(9));
    assert_eq!(a.beat(&mut index), Progress::Waiting);
    assert_eq!(index.delta("a", 1, delta, a.now), Ok(Progress::NeedsSnapshot));
}

#[test]
fn entries_stay_visible_during_a_snapshot_and_the_rest_goes_at_its_end() {
    let mut index = index();
    let mut a = Peer::joined(&mut index, "a");
    a.announce(&mut index, &hashes(0..6));
    a.keys.remove(&hash(5));
    a.beat(&mut index);
    a.now += millis(1000);
    let ticket = index.tick(a.now)[0].ticket;
    let base = a.number;
    let parts = [a.part(ticket, 0, false, base, &hashes(0..2)), a.part(ticket, 1, true, base, &hashes(2..4))];
    index.part("a", 1, &parts[1], a.now).unwrap();
    a.announce(&mut index, &hashes(4..5));
    assert_eq!(only(&index, "a", &hashes(0..6), a.now), [0..6]);
    assert_eq!(index.part("a", 1, &parts[1], a.now), Ok(Progress::Waiting), "a repeated part");
    assert_eq!(index.part("a", 1, &parts[0], a.now), Ok(Progress::Following));
    assert_eq!(only(&index, "a", &hashes(0..6), a.now), [0..5], "block 4 by its delta");
    assert_eq!((index.unswept(), index.counters().parts_repeated), (1, 1));
    assert_eq!(index.part("a", 1, &parts[0], a.now), Err(Refused::OtherSnapshot), "it has ended");
    index.sweep(usize::MAX);
    assert_eq!((index.entries(), a.beat(&mut index)), (5, Progress::Following));
}

#[test]
fn a_snapshot_that_stops_is_requested_again_with_pauses() {
    let mut index = index();
    let mut a = Peer::new("a");
    a.join(&mut index);
    let mut requests = Vec::new();
    for _ in 0..1000 {
        a.now += millis(100);
        a.beat(&mut index);
        requests.extend(index.tick(a.now).iter().map(|_| a.now));
    }
    let pauses: Vec<u64> = requests.windows(2).map(|pair| (pair[1] - pair[0]).as_secs()).collect();
    assert_eq!(pauses, [2, 2, 4, 8, 16, 32]);
    assert_eq!(index.counters().snapshots_failed, 7);
}

#[test]
fn parts_that_contradict_each_other_are_refused() {
    let mut index = index();
    let mut a = Peer::joined(&mut index, "a");
    a.announce(&mut index, &hashes(0..6));
    a.keys.clear();
    a.beat(&mut index);
    a.now += millis(1000);
    let ticket = index.tick(a.now)[0].ticket;
    let base = a.number;
    let old = a.part(ticket, 0, false, base - 1, &[]);
    assert_eq!(index.part("a", 1, &old, a.now), Err(Refused::OldSnapshot { base: base - 1, applied: base }));
    let other = a.part(ticket + 1, 0, true, base, &[]);
    assert_eq!(index.part("a", 1, &other, a.now), Err(Refused::OtherSnapshot));
    let mut part = a.part(ticket, 3, false, base, &[]);
    part.read_at = base - 1;
    assert_eq!(index.part("a", 1, &part, a.now), Err(Refused::BadNumbers), "read before its base");
    part.read_at = base;
    index.part("a", 1, &part, a.now).unwrap();
    for wrong in [a.part(ticket, 2, true, base, &[]), a.part(ticket, 1, false, base + 1, &[])] {
        assert_eq!(index.part("a", 1, &wrong, a.now), Err(Refused::BadNumbers));
    }
    index.part("a", 1, &a.part(ticket, 4, true, base, &[]), a.now).unwrap();
    assert_eq!(index.part("a", 1, &a.part(ticket, 5, false, base, &[]), a.now), Err(Refused::BadNumbers));
}

#[test]
fn a_part_that_comes_after_forgotten_withdrawals_fails_the_snapshot() {
    let limits = Limits { late_withdrawals: 2, ..Limits::default() };
    let mut index = Index::new([1, 2], limits, Timing::default());
    let mut a = Peer::new("a");
    a.join(&mut index);
    a.keys.extend(hashes(0..6));
    let ticket = index.tick(a.now)[0].ticket;
    index.part("a", 1, &a.part(ticket, 0, false, 0, &hashes(0..1)), a.now).unwrap();
    let late = a.part(ticket, 1, true, 0, &hashes(1..6));
    a.withdraw(&mut index, &hashes(2..3));
    a.withdraw(&mut index, &hashes(3..6));
    assert_eq!(index.part("a", 1, &late, a.now), Ok(Progress::NeedsSnapshot));
    assert_eq!(only(&index, "a", &hashes(0..6), a.now), [0..1], "it brought nothing back");
}

#[test]
fn the_digest_is_a_sum_that_any_order_gives() {
    let mut one = KeySet::default();
    let mut other = KeySet::default();
    hashes(0..20).iter().for_each(|hash| one.add(&space(0), hash));
    hashes(0..25).iter().rev().for_each(|hash| other.add(&space(0), hash));
    assert_ne!(one, other);
    hashes(20..25).iter().for_each(|hash| other.remove(&space(0), hash));
    assert_eq!(one, other);
    other.remove(&space(0), &hash(3));
    other.add(&space(1), &hash(3));
    assert_eq!(one.count, other.count);
    assert_ne!(one.digest, other.digest, "a space is part of a key");
}
