//! Owners join, miss heartbeats, restart, leave and are forgotten.

use std::time::Duration;

use kvlane_index::{Index, Limits, Progress, Refused, State, Timing};

use crate::peer::{Peer, hashes, only};

const NOTHING: [std::ops::Range<u32>; 0] = [];

fn index() -> Index {
    Index::new([1, 2], Limits::default(), Timing::default())
}

fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

#[test]
fn three_missed_heartbeats_hide_an_owner_and_the_next_shows_it() {
    let mut index = index();
    let mut a = Peer::joined(&mut index, "a");
    a.announce(&mut index, &hashes(0..4));
    a.beat(&mut index);
    assert_eq!(only(&index, "a", &hashes(0..4), a.now + seconds(3.0)), [0..4]);
    assert_eq!(only(&index, "a", &hashes(0..4), a.now + seconds(3.1)), NOTHING);
    a.now += seconds(20.0);
    index.tick(a.now);
    a.beat(&mut index);
    assert_eq!(only(&index, "a", &hashes(0..4), a.now), [0..4]);
}

#[test]
fn a_silent_owner_is_forgotten_after_90_seconds() {
    let mut index = index();
    let mut a = Peer::joined(&mut index, "a");
    a.announce(&mut index, &hashes(0..4));
    index.tick(a.now + seconds(89.9));
    assert_eq!((index.owners(a.now).len(), index.unswept()), (1, 0));
    a.now += seconds(90.0);
    index.tick(a.now);
    assert_eq!((index.owners(a.now).len(), index.unswept(), index.counters().owners_forgotten), (0, 4, 1));
    assert_eq!((index.sweep(usize::MAX), index.entries()), (0, 0));
    assert_eq!(a.try_announce(&mut index, &hashes(4..5)), Err(Refused::Unknown));
}

#[test]
fn a_goodbye_hides_at_once_and_late_messages_do_not_undo_it() {
    let mut index = index();
    let mut a = Peer::joined(&mut index, "a");
    a.announce(&mut index, &hashes(0..4));
    index.bye("a", 1, a.now).unwrap();
    assert_eq!(only(&index, "a", &hashes(0..4), a.now), NOTHING);
    assert_eq!(index.owners(a.now)[0].state, State::Gone);
    assert_eq!(index.join("a", 1, "x", a.now), Err(Refused::Gone { epoch: 1 }));
    assert_eq!(a.try_announce(&mut index, &hashes(4..5)), Err(Refused::Gone { epoch: 1 }));
    assert_eq!(index.bye("a", 1, a.now), Ok(()), "a repeated goodbye");
    a.restart(2);
    a.join(&mut index);
    a.announce(&mut index, &hashes(7..8));
    a.answer_snapshot(&mut index, 10);
    assert_eq!(only(&index, "a", &hashes(0..8), a.now), [7..8]);
    assert_eq!(index.bye("a", 1, a.now), Err(Refused::OldEpoch { epoch: 1, current: 2 }));
    index.bye("a", 2, a.now).unwrap();
    index.tick(a.now + seconds(90.0));
    assert_eq!(index.owners(a.now).len(), 0);
}

#[test]
fn a_goodbye_before_its_join_ends_that_epoch() {
    let mut index = index();
    let a = Peer::joined(&mut index, "a");
    index.bye("a", 2, a.now).unwrap();
    assert_eq!(index.join("a", 2, "x", a.now), Err(Refused::Gone { epoch: 2 }));
    assert_eq!(index.bye("b", 1, a.now), Err(Refused::Unknown));
}

#[test]
fn a_new_epoch_hides_the_old_keys_without_a_sweep() {
    let mut index = index();
    let mut a = Peer::joined(&mut index, "a");
    a.announce(&mut index, &hashes(0..100));
    a.restart(2);
    a.join(&mut index);
    assert_eq!(only(&index, "a", &hashes(0..100), a.now), NOTHING);
    assert_eq!((index.entries(), index.unswept()), (100, 100));
    a.answer_snapshot(&mut index, 10);
    a.announce(&mut index, &hashes(50..60));
    assert_eq!(only(&index, "a", &hashes(0..100), a.now), [50..60]);
    let mut steps = 0;
    while index.sweep(10) > 0 {
        steps += 1;
    }
    assert!(steps > 100, "a step looked at more than its budget");
    assert_eq!(index.entries(), 10);
    assert_eq!(only(&index, "a", &hashes(0..100), a.now), [50..60]);
}

#[test]
fn messages_of_other_epochs_are_refused() {
    let mut index = index();
    let mut a = Peer::joined(&mut index, "a");
    a.epoch = 2;
    assert_eq!(a.try_announce(&mut index, &hashes(0..1)), Err(Refused::NotJoined { epoch: 2, current: 1 }));
    a.epoch = 0;
    assert_eq!(a.try_announce(&mut index, &hashes(0..1)), Err(Refused::OldEpoch { epoch: 0, current: 1 }));
    assert_eq!(index.join("a", 0, "x", a.now), Err(Refused::OldEpoch { epoch: 0, current: 1 }));
    assert_eq!(index.join("a", 1, "y", a.now), Ok(Progress::Following), "a repeated join");
    assert_eq!(&*index.owners(a.now)[0].address, "10.0.0.1:7000");
}
