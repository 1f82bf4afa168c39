//! Nothing that an owner or a reader sends makes the index grow beyond its limits.

use std::time::Duration;

use kvlane_index::{
    Changes, Counters, Delta, Heartbeat, Index, KeySet, Limits, Progress, Question, Refused, State, Timing,
};
use proptest::prelude::*;

use crate::peer::{Peer, hashes, only};
use crate::world::{hash, space};

fn index(limits: Limits) -> Index {
    Index::new([1, 2], limits, Timing::default())
}

#[test]
fn above_the_limit_of_entries_announcements_are_refused_and_counted() {
    let mut index = index(Limits { entries: 10, ..Limits::default() });
    let mut a = Peer::joined(&mut index, "a");
    a.announce(&mut index, &hashes(0..8));
    let mut b = Peer::joined(&mut index, "b");
    b.announce(&mut index, &hashes(0..8));
    assert_eq!((index.entries(), index.counters().keys_refused), (10, 6));
    assert_eq!(only(&index, "b", &hashes(0..8), a.now), [0..2]);
    assert_eq!(
        b.beat(&mut index),
        Progress::Following,
        "it is known to lack keys, so a snapshot would not help"
    );

    a.withdraw(&mut index, &hashes(0..8));
    assert_eq!(b.beat(&mut index), Progress::NeedsSnapshot, "now there is room");
    assert_eq!(index.counters().lost_by_room, 1);
    b.now += Duration::from_secs(1);
    b.answer_snapshot(&mut index, 3);
    assert_eq!(only(&index, "b", &hashes(0..8), b.now), [0..8]);
    assert_eq!(b.beat(&mut index), Progress::Following);
}

#[test]
fn one_owner_cannot_take_all_entries() {
    let mut index = index(Limits { entries_an_owner: 5, ..Limits::default() });
    let mut a = Peer::joined(&mut index, "a");
    a.announce(&mut index, &hashes(0..8));
    assert_eq!((index.entries(), index.counters().keys_refused), (5, 3));
    a.announce(&mut index, &hashes(0..5));
    assert_eq!(index.counters().keys_refused, 3, "a repeated key takes no entry");
    let mut b = Peer::joined(&mut index, "b");
    b.announce(&mut index, &hashes(0..5));
    assert_eq!(index.entries(), 10);
}

#[test]
fn a_question_and_a_message_have_a_limit() {
    let mut index = index(Limits { keys_a_question: 4, keys_a_message: 3, ..Limits::default() });
    let (space, hashes) = (space(0), hashes(0..5));
    let question = Question { space: &space, hashes: &hashes, only_prefix: false, except: None, turn: 0 };
    assert_eq!(index.find(&question, Duration::ZERO), Err(Refused::TooManyKeys { keys: 5, most: 4 }));
    let mut a = Peer::joined(&mut index, "a");
    assert_eq!(a.try_announce(&mut index, &hashes[..3]), Err(Refused::TooManyKeys { keys: 4, most: 3 }));
    let empty = Changes { space, announced: Vec::new(), withdrawn: Vec::new() };
    let delta = Delta { first: 1, last: 9, changes: vec![empty; 4] };
    assert_eq!(index.delta("a", 1, delta, a.now), Err(Refused::TooManyKeys { keys: 4, most: 3 }));
    assert_eq!(index.entries(), 0);
}

#[test]
fn owners_and_their_names_have_a_limit() {
    let mut index = index(Limits { owners: 2, name_bytes: 4, ..Limits::default() });
    let now = Duration::ZERO;
    assert_eq!(index.join("", 1, "x", now), Err(Refused::NameLength { bytes: 0, most: 4 }));
    assert_eq!(index.join("abcde", 1, "x", now), Err(Refused::NameLength { bytes: 5, most: 4 }));
    assert_eq!(index.join("a", 1, "abcde", now), Err(Refused::NameLength { bytes: 5, most: 4 }));
    index.join("a", 1, "x", now).unwrap();
    index.join("b", 1, "x", now).unwrap();
    assert_eq!(index.join("c", 1, "x", now), Err(Refused::TooManyOwners(2)));
    index.join("a", 2, "x", now).unwrap();
}

#[test]
fn deltas_that_wait_for_an_earlier_one_have_a_limit() {
    let mut index = index(Limits { waiting_deltas: 3, waiting_keys: 100, ..Limits::default() });
    let mut a = Peer::joined(&mut index, "a");
    a.lose(&hashes(0..1));
    (1..4).for_each(|at| assert_eq!(a.announce(&mut index, &hashes(at..at + 1)), Progress::Waiting));
    assert_eq!(a.announce(&mut index, &hashes(4..5)), Progress::NeedsSnapshot);
    let Counters { deltas_dropped, lost_by_gap, .. } = index.counters();
    assert_eq!((deltas_dropped, lost_by_gap, index.entries()), (1, 1, 0));
    a.now += Duration::from_secs(1);
    a.answer_snapshot(&mut index, 100);
    assert_eq!(only(&index, "a", &hashes(0..5), a.now), [0..5]);

    let mut index = self::index(Limits { waiting_keys: 6, ..Limits::default() });
    let mut a = Peer::joined(&mut index, "a");
    a.lose(&hashes(0..1));
    assert_eq!(a.announce(&mut index, &hashes(1..5)), Progress::Waiting);
    assert_eq!(a.announce(&mut index, &hashes(5..6)), Progress::NeedsSnapshot);
}

#[test]
fn snapshots_under_way_have_a_limit() {
    let mut index = index(Limits { snapshots: 2, ..Limits::default() });
    let now = Duration::from_secs(5);
    for name in ["a", "b", "c"] {
        index.join(name, 1, "x", now).unwrap();
    }
    assert_eq!((index.tick(now).len(), index.tick(now).len()), (2, 0));
    let later = now + Timing::default().snapshot + Duration::from_millis(1);
    let again = index.tick(later);
    assert_eq!(again.len(), 2);
    assert_eq!(&*again[0].owner, "c", "the one that has waited longest comes first");
}

#[test]
fn a_part_with_a_great_number_is_refused() {
    let mut index = index(Limits { snapshot_parts: 4, ..Limits::default() });
    let a = Peer::new("a");
    a.join(&mut index);
    let ticket = index.tick(a.now)[0].ticket;
    let part = |number| a.part(ticket, number, false, 0, &[hash(1)]);
    assert_eq!(index.part("a", 1, &part(4), a.now), Err(Refused::BadNumbers));
    assert_eq!(index.part("a", 1, &part(u32::MAX), a.now), Err(Refused::BadNumbers));
    assert_eq!(index.part("a", 1, &part(3), a.now), Ok(Progress::Waiting));
}

#[test]
fn numbers_that_jump_harm_only_their_sender() {
    let mut index = index(Limits::default());
    let mut b = Peer::joined(&mut index, "b");
    b.announce(&mut index, &hashes(0..4));
    let mut a = Peer::joined(&mut index, "a");
    a.number = u64::MAX - 1;
    a.lose(&[]);
    assert_eq!(a.try_announce(&mut index, &hashes(0..1)), Ok(Progress::Waiting));
    a.now += Duration::from_secs(2);
    assert_eq!(index.tick(a.now).len(), 1);
    assert_eq!(index.owners(a.now).iter().find(|owner| &*owner.name == "a").unwrap().state, State::Asked);
    assert_eq!(only(&index, "b", &hashes(0..4), a.now), [0..4]);
    assert_eq!(a.try_delta(&mut index, 0, 0), Err(Refused::BadNumbers));
    assert_eq!(a.try_delta(&mut index, 5, 4), Err(Refused::BadNumbers));
}

#[test]
fn restarts_end_when_no_slot_is_free_until_the_sweep() {
    let mut index = index(Limits::default());
    let mut a = Peer::new("a");
    for epoch in 1..=4095 {
        a.restart(epoch);
        a.join(&mut index);
        a.keys.insert(hash(1));
        a.answer_snapshot(&mut index, 10);
    }
    a.restart(5000);
    a.join(&mut index);
    let ticket = index.tick(a.now)[0].ticket;
    let part = a.part(ticket, 0, true, 0, &[hash(1)]);
    assert_eq!(index.part("a", 5000, &part, a.now), Err(Refused::NoSlot));
    assert_eq!((index.sweep(usize::MAX), index.entries()), (0, 0));
    assert_eq!(index.part("a", 5000, &part, a.now), Ok(Progress::Following));
    assert_eq!(index.entries(), 1);
}

/// A number that a defective or hostile owner might send.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0..4u64, any::<u64>(), u64::MAX - 3..=u64::MAX]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever one owner sends, nothing panics, the limits hold, and the other owner's keys are found.
    #[test]
    fn any_numbers_leave_the_others_alone(
        messages in prop::collection::vec((0..5u8, number(), number(), number(), any::<u8>()), 1..60),
    ) {
        let limits = Limits { waiting_deltas: 4, entries_an_owner: 20, ..Limits::default() };
        let mut index = index(limits);
        let mut b = Peer::joined(&mut index, "b");
        b.announce(&mut index, &hashes(0..4));
        let mut a = Peer::new("a");
        a.join(&mut index);
        for (kind, x, y, z, key) in messages {
            let ticket = index.tick(a.now).first().map_or(x, |request| request.ticket);
            let announced = vec![hash(key)];
            let changes = vec![Changes { space: space(0), announced, withdrawn: hashes(0..key % 4) }];
            let _ = match kind {
                0 => index.delta("a", 1, Delta { first: x, last: y, changes }, a.now),
                1 => index.delta("a", 1, Delta { first: x % 4, last: x % 4 + 9, changes }, a.now),
                2 => {
                    let keys = KeySet { count: y, digest: z };
                    index.heartbeat("a", 1, Heartbeat { number: x, keys }, a.now)
                }
                3 => {
                    let mut part = a.part(ticket, y as u32, z % 2 == 0, z, &hashes(0..key));
                    part.read_at = x;
                    index.part("a", 1, &part, a.now)
                }
                _ => index.part("a", 1, &a.part(ticket, 0, key % 2 == 0, z % 4, &hashes(0..key)), a.now),
            };
            a.now += Duration::from_millis(u64::from(key) * 8);
            b.now = a.now;
            b.beat(&mut index);
            index.sweep(usize::from(key));
            prop_assert_eq!(only(&index, "b", &hashes(0..4), a.now), [0..4]);
            prop_assert!(index.entries() - index.unswept() <= 24);
        }
    }
}
