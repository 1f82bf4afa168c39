//! A dropped namespace stays away, whatever is in flight and however the process ends.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use crate::failing::Failing;
use crate::support::*;
use kvlane_block::{BlockKey, CutDigest, Namespace, Space};
use kvlane_ssd::{Drops, NotNoted, Options, SsdTier, WriteEnd};
use proptest::prelude::*;

const OTHER: Space = Space { namespace: Namespace([8; 16]), cut: CutDigest([9; 16]) };
/// Offsets of the drop table's two copies.
const COPIES: [u64; 2] = [8 * KIB, 36 * KIB];

fn block(number: u64) -> Block {
    Block::new(number, &[4096, 5000])
}

fn of_other(number: u64) -> Block {
    Block { key: BlockKey { space: OTHER, hash: hash(number) }, ..block(number) }
}

fn found(tier: &SsdTier, pool: &mut Pool) -> (usize, usize) {
    let ours = (0..8).filter(|number| is_found(tier, pool, &block(*number))).count();
    (ours, (0..8).filter(|number| is_found(tier, pool, &of_other(*number))).count())
}

/// Outcome of a drop: the number of blocks that left the index, and the files that failed to note it.
struct Dropped {
    blocks: u64,
    not_noted: Vec<NotNoted>,
}

impl Dropped {
    /// Whether the blocks stay away after a restart, and after a crash.
    fn is_durable(&self) -> bool {
        self.not_noted.is_empty()
    }
}

/// As the store does it.
fn drop_namespace(tier: &SsdTier, namespace: Namespace) -> Dropped {
    let blocks = tier.forget_namespace(namespace);
    Dropped { blocks, not_noted: tier.note_forgotten(namespace) }
}

/// Eight blocks of each namespace are stored, and one of them is dropped.
fn dropped(path: &Path, pool: &mut Pool) -> SsdTier {
    let tier = open(small(path), pool);
    for number in 0..8 {
        store(&tier, pool, &block(number));
        store(&tier, pool, &of_other(number));
    }
    assert_eq!(found(&tier, pool), (8, 8));
    let dropped = drop_namespace(&tier, SPACE.namespace);
    assert!(dropped.is_durable());
    assert_eq!(dropped.blocks, 8);
    assert_eq!(found(&tier, pool), (0, 8));
    tier
}

#[test]
fn it_stays_away_after_a_restart_and_another_namespace_stays() {
    let (directory, mut pool) = (tempfile::tempdir().unwrap(), Pool::new(MIB));
    let path = directory.path().join("tier");
    close(dropped(&path, &mut pool));
    for _ in 0..2 {
        let tier = open(small(&path), &pool);
        assert_eq!(found(&tier, &mut pool), (0, 8));
        close(tier);
    }
}

#[test]
fn it_stays_away_after_a_crash_right_after_the_call() {
    let (directory, mut pool) = (tempfile::tempdir().unwrap(), Pool::new(MIB));
    let path = directory.path().join("tier");
    let tier = dropped(&path, &mut pool);
    // What a process that is killed now leaves behind.
    let left = directory.path().join("left");
    std::fs::copy(&path, &left).unwrap();
    let after = open(small(&left), &pool);
    assert_eq!(found(&after, &mut pool), (0, 8));
    close(after);
    close(tier);
}

#[test]
fn what_is_written_later_is_found_and_of_the_next_run_also_after_a_restart() {
    let (directory, mut pool) = (tempfile::tempdir().unwrap(), Pool::new(MIB));
    let path = directory.path().join("tier");
    let tier = dropped(&path, &mut pool);
    store(&tier, &mut pool, &block(3));
    assert_eq!(found(&tier, &mut pool), (1, 8));
    close(tier);
    // The file does not tell it from those that were dropped.
    let tier = open(small(&path), &pool);
    assert_eq!(found(&tier, &mut pool), (0, 8));
    store(&tier, &mut pool, &block(4));
    close(tier);
    let tier = open(small(&path), &pool);
    assert_eq!(found(&tier, &mut pool), (1, 8));
    assert!(is_found(&tier, &mut pool, &block(4)));
    // And it can be dropped again.
    assert!(drop_namespace(&tier, SPACE.namespace).is_durable());
    close(tier);
    let tier = open(small(&path), &pool);
    assert_eq!(found(&tier, &mut pool), (0, 8));
    close(tier);
}

#[test]
fn a_write_under_way_is_never_found_and_does_not_stand_in_the_way_of_a_new_one() {
    let (directory, mut pool) = (tempfile::tempdir().unwrap(), Pool::new(MIB));
    let path = directory.path().join("tier");
    let failing = Failing::default();
    let tier = open(Options { wrap_io: Some(Arc::new(failing.clone())), ..small(&path) }, &pool);
    store(&tier, &mut pool, &of_other(0));
    failing.set(|faults| faults.hold_writes = true);
    let old = start_write(&tier, pool.record(&block(0))).unwrap();
    assert_eq!(drop_namespace(&tier, SPACE.namespace).blocks, 0);
    let other_bytes = Block { lengths: vec![12_288], ..block(0) };
    let new = start_write(&tier, pool.record(&other_bytes)).unwrap();
    failing.set(|faults| faults.hold_writes = false);
    assert!(old.recv_timeout(PATIENCE).is_ok());
    assert_eq!(new.recv_timeout(PATIENCE).unwrap(), WriteEnd::Stored);
    // The lengths tell which of the two is there.
    assert!(is_found(&tier, &mut pool, &other_bytes));
    close(tier);
    let tier = open(small(&path), &pool);
    assert!(!tier.contains(&block(0).key) && is_found(&tier, &mut pool, &of_other(0)));
    close(tier);
}

#[test]
fn one_damaged_copy_is_enough_and_without_both_the_tier_starts_empty() {
    let (directory, mut pool) = (tempfile::tempdir().unwrap(), Pool::new(MIB));
    let path = directory.path().join("tier");
    close(dropped(&path, &mut pool));
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&[0x55], COPIES[0] + 40).unwrap();
    let tier = open(small(&path), &pool);
    assert_eq!(found(&tier, &mut pool), (0, 8));
    close(tier);
    for copy in COPIES {
        file.write_all_at(&[0x55], copy + 40).unwrap();
    }
    let tier = open(small(&path), &pool);
    assert_eq!(found(&tier, &mut pool), (0, 0));
    store(&tier, &mut pool, &block(1));
    close(tier);
    // What was there before stays away, what came after is found.
    let tier = open(small(&path), &pool);
    assert_eq!(found(&tier, &mut pool), (1, 0));
    close(tier);
}

fn namespace(number: u64) -> Namespace {
    let mut bytes = [1; 16];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    Namespace(bytes)
}

/// One block of a namespace of its own.
fn of_namespace(number: u64) -> Block {
    let space = Space { namespace: namespace(number), ..OTHER };
    Block { key: BlockKey { space, hash: hash(number) }, ..Block::new(number, &[100]) }
}

/// The table of dropped names took 1,192 of them and never gave one back. The next `kvlane drop` reported success, and the
/// blocks were hits again after a restart.
#[test]
fn five_thousand_names_are_dropped_over_the_life_of_a_file() {
    const NAMES: u64 = 5000;
    // In memory where that is to be had: ten thousand syncs are not what is looked at.
    let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let mut pool = Pool::new(MIB);
    let options = || Options { buffered: true, ..small(&directory.path().join("tier")) };
    let mut tier = open(options(), &pool);
    store(&tier, &mut pool, &of_other(0));
    for number in 0..NAMES {
        store(&tier, &mut pool, &of_namespace(number));
        let dropped = drop_namespace(&tier, namespace(number));
        assert_eq!(dropped.blocks, 1);
        assert!(dropped.is_durable(), "name {number}: {:?}", dropped.not_noted);
        // What is read is kept when its segment is emptied.
        assert!(number % 50 != 0 || is_found(&tier, &mut pool, &of_other(0)));
        // First without a restart, then with many.
        if number >= NAMES / 2 && number % 250 == 0 {
            close(tier);
            tier = open(options(), &pool);
            let back = (0..=number).filter(|number| tier.contains(&of_namespace(*number).key)).count();
            assert_eq!(back, 0, "after name {number}");
        }
    }
    let left = directory.path().join("left");
    std::fs::copy(directory.path().join("tier"), &left).unwrap();
    close(tier);
    let tier = open(Options { buffered: true, ..small(&left) }, &pool);
    assert_eq!((0..NAMES).filter(|number| tier.contains(&of_namespace(*number).key)).count(), 0);
    assert!(is_found(&tier, &mut pool, &of_other(0)));
    close(tier);
}

#[test]
fn a_name_of_which_the_file_has_nothing_takes_no_room_in_it() {
    let (directory, pool) = (tempfile::tempdir().unwrap(), Pool::new(MIB));
    let path = directory.path().join("tier");
    let tier = open(small(&path), &pool);
    assert!((0..3000).all(|number| drop_namespace(&tier, namespace(number)).is_durable()));
    close(tier);
    let bytes = std::fs::read(&path).unwrap();
    assert!(bytes[COPIES[0] as usize..64 * KIB as usize].iter().all(|byte| *byte == 0));
}

#[test]
fn more_names_than_the_file_can_note_are_told_and_a_restart_makes_room() {
    const NAMES: u64 = 1300;
    let (directory, mut pool) = (tempfile::tempdir().unwrap(), Pool::new(MIB));
    let path = directory.path().join("tier");
    // So large that no segment is used twice.
    let devices = vec![device(&path, 16 * MIB + 64 * KIB)];
    let options = || Options { buffered: true, devices: devices.clone(), ..small(&path) };
    let tier = open(options(), &pool);
    for number in 0..NAMES {
        store(&tier, &mut pool, &of_namespace(number));
    }
    assert_eq!(tier.spaces().len(), NAMES as usize);
    let noted =
        (0..NAMES).take_while(|number| drop_namespace(&tier, namespace(*number)).is_durable()).count();
    assert_eq!(noted, 1192);
    let refused = drop_namespace(&tier, namespace(noted as u64));
    let sentence = refused.not_noted[0].to_string();
    assert!(
        sentence.contains(path.to_str().unwrap()) && sentence.contains("restart the daemon"),
        "{sentence}"
    );
    assert_eq!(tier.missing_notes().len(), 1);
    assert_eq!(tier.note_missing().len(), 1, "there is no room yet");
    // One that is noted already can be dropped again, and the one that is not stays away until the restart.
    assert!(drop_namespace(&tier, namespace(5)).is_durable());
    assert!(!tier.contains(&of_namespace(noted as u64).key));
    close(tier);
    let tier = open(options(), &pool);
    let back = (0..noted as u64).filter(|number| tier.contains(&of_namespace(*number).key)).count();
    assert_eq!(back, 0);
    assert!(tier.contains(&of_namespace(noted as u64).key), "as the answer said");
    // What held nothing else was erased.
    assert!((noted as u64..NAMES).all(|number| drop_namespace(&tier, namespace(number)).is_durable()));
    close(tier);
    let tier = open(options(), &pool);
    assert_eq!(tier.spaces(), []);
    close(tier);
}

#[derive(Debug, Clone)]
enum Step {
    Store {
        name: u64,
        number: u64,
    },
    Drop(u64),
    Restart,
    /// The process is killed: another one opens the file as it is.
    Kill,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        60 => (0..4u64, 0..40u64).prop_map(|(name, number)| Step::Store { name, number }),
        3 => (0..4u64).prop_map(Step::Drop),
        1 => Just(Step::Restart),
        1 => Just(Step::Kill),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]
    /// In a file whose segments are used again and again, whose table forgets names meanwhile.
    #[test]
    fn what_was_dropped_is_never_found(steps in prop::collection::vec(step(), 50..400)) {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let mut pool = Pool::new(MIB);
        let mut path = directory.path().join("tier");
        let options = |path: &Path| Options {
            buffered: true,
            segment_bytes: Some(64 * KIB),
            ..options_for(vec![device(path, 8 * 64 * KIB + 64 * KIB)])
        };
        let of = |name: u64, number: u64| {
            let space = Space { namespace: namespace(name), ..OTHER };
            Block { key: BlockKey { space, hash: hash(number) }, ..Block::new(number, &[100]) }
        };
        let mut tier = open(options(&path), &pool);
        let mut stored = std::collections::BTreeSet::new();
        for (turn, step) in steps.into_iter().enumerate() {
            match step {
                Step::Store { name, number } => {
                    if !tier.contains(&of(name, number).key) {
                        store(&tier, &mut pool, &of(name, number));
                    }
                    stored.insert((name, number));
                }
                Step::Drop(name) => {
                    prop_assert!(drop_namespace(&tier, namespace(name)).is_durable());
                    stored.retain(|(other, _)| *other != name);
                }
                Step::Restart => {
                    close(tier);
                    tier = open(options(&path), &pool);
                }
                Step::Kill => {
                    let left = directory.path().join(format!("left-{turn}"));
                    std::fs::copy(&path, &left).unwrap();
                    close(tier);
                    path = left;
                    tier = open(options(&path), &pool);
                }
            }
            let is_wrong = |(name, number)| {
                !stored.contains(&(name, number)) && tier.contains(&of(name, number).key)
            };
            prop_assert!(!(0..4).any(|name| (0..40).any(|number| is_wrong((name, number)))));
        }
        close(tier);
    }
}

/// Those that a file can have, and all of this run.
fn generation() -> impl Strategy<Value = u64> {
    prop_oneof![0..1u64 << 63, Just(Drops::OF_THIS_RUN)]
}

proptest! {
    #[test]
    fn what_is_noted_is_read_or_refused(
        sequence in 0..1u64 << 63,
        all_up_to in generation(),
        namespaces in prop::collection::btree_map(any::<[u8; 16]>().prop_map(Namespace), generation(), 0..50),
        flip in any::<prop::sample::Index>(),
        junk in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let drops = Drops { sequence, all_up_to, namespaces, ..Drops::none([3; 16]) };
        let mut bytes = drops.encode();
        prop_assert_eq!(Drops::decode(&bytes), Ok(drops.clone()));
        let beyond = Drops { sequence: sequence | 1 << 63, ..drops };
        prop_assert!(Drops::decode(&beyond.encode()).is_err());
        let at = flip.index(bytes.len());
        bytes[at] ^= 1;
        prop_assert!(Drops::decode(&bytes).is_err());
        prop_assert!(Drops::decode(&junk).is_err());
    }
}
