//! Shapes, descriptors and counters against simple models.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::collections::BTreeSet;
use std::sync::Arc;

use kvlane_fabric::{
    Access, Address, Arrival, COUNTERS_MAX, Descriptor, DescriptorError, Immediates, MemoryKind, Pages,
    Pieces, Place, RegionDescriptor, RegionLengths, Run, Secret, ShapeError, Side, Trust,
};
use proptest::collection::vec;
use proptest::prelude::*;

/// Region `n` of either side has this many bytes.
struct Lengths(Vec<u64>);

impl RegionLengths for Lengths {
    fn region_bytes(&self, _: Side, region: u32) -> Option<u64> {
        self.0.get(region as usize).copied()
    }
}

fn run(local: (u32, u64), remote: (u32, u64), len: u64) -> Run {
    let place = |(region, offset)| Place { region, offset };
    Run { local: place(local), remote: place(remote), len }
}

/// Each byte, by its places.
fn bytes_of(runs: &[Run]) -> Vec<(u32, u64, u32, u64)> {
    let one = |run: &Run| {
        let Run { local, remote, len } = *run;
        (0..len).map(move |at| (local.region, local.offset + at, remote.region, remote.offset + at))
    };
    runs.iter().flat_map(one).collect()
}

fn runs() -> impl Strategy<Value = Vec<Run>> {
    let piece = (0..2u32, 0..40u64, 0..2u32, 0..40u64, 0..9u64, any::<bool>());
    vec(piece, 0..12).prop_map(|pieces| {
        let mut runs: Vec<Run> = Vec::new();
        for (here, from, there, to, len, follows) in pieces {
            match runs.last() {
                // As pages and layers of a block often do.
                Some(last) if follows => {
                    let (local, remote) = (last.local, last.remote);
                    let at = last.len;
                    runs.push(run(
                        (local.region, local.offset + at),
                        (remote.region, remote.offset + at),
                        len,
                    ));
                }
                _ => runs.push(run((here, from), (there, to), len)),
            }
        }
        runs
    })
}

/// Lengths and ends that 32 bits do not hold.
#[test]
fn runs_around_four_gibibytes_stay_as_they_are_and_end_within_their_region() {
    const LIMIT: u64 = 1 << 32;
    for len in [LIMIT - 1, LIMIT, LIMIT + 1] {
        let (lengths, asked) = (Lengths(vec![len + 7; 2]), run((0, 7), (1, 7), len));
        assert_eq!(Pieces::Contiguous(asked).runs(&lengths), Ok(vec![asked]));
        assert!(Pieces::Contiguous(run((0, 7), (1, 8), len)).runs(&lengths).is_err());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn runs_hold_exactly_the_bytes_asked_for_and_no_two_neighbours_could_be_one(asked in runs()) {
        let made = Pieces::Runs(asked.clone()).runs(&Lengths(vec![1 << 20; 2])).unwrap();
        prop_assert_eq!(bytes_of(&made), bytes_of(&asked));
        for pair in made.windows(2) {
            let joined = run(
                (pair[0].local.region, pair[0].local.offset),
                (pair[0].remote.region, pair[0].remote.offset),
                pair[0].len + pair[1].len,
            );
            prop_assert!(joined.split(pair[0].len).1 != pair[1]);
        }
    }

    #[test]
    fn pages_are_paired_in_order(
        page_bytes in 0..64u64,
        stride in 0..200u64,
        pages in vec((0..20u32, 0..20u32), 0..20),
    ) {
        let (here, there): (Vec<u32>, Vec<u32>) = pages.iter().copied().unzip();
        let local = Pages { region: 0, offset: 5, stride, indices: Arc::from(here) };
        let remote = Pages { region: 1, offset: 7, stride: page_bytes, indices: Arc::from(there) };
        let made = Pieces::Paged { page_bytes, local, remote }.runs(&Lengths(vec![1 << 20; 2])).unwrap();
        let expected: Vec<Run> = pages
            .iter()
            .map(|(here, there)| {
                run((0, 5 + stride * u64::from(*here)), (1, 7 + page_bytes * u64::from(*there)), page_bytes)
            })
            .collect();
        prop_assert_eq!(bytes_of(&made), bytes_of(&expected));
    }

    #[test]
    fn a_descriptor_comes_back_as_it_was_and_every_part_of_one_is_refused(
        boot_nonce: u64,
        engine_id: u128,
        addresses in vec((any::<u8>(), vec(any::<u8>(), 0..40)), 0..4),
        regions in vec((any::<u32>(), any::<u32>(), any::<bool>(), any::<bool>(), any::<u64>()), 0..4),
        trust in prop_oneof![Just(Trust::Token), Just(Trust::User), any::<[u8; 32]>().prop_map(|bytes| Trust::Own(Secret::new(bytes)))],
    ) {
        let addresses = addresses.into_iter().map(|(kind, bytes)| Address { kind, bytes }).collect();
        let regions = regions
            .into_iter()
            .map(|(number, generation, cuda, writable, len)| RegionDescriptor {
                number,
                generation,
                kind: if cuda { MemoryKind::Cuda } else { MemoryKind::Host },
                access: if writable { Access::ReadWrite } else { Access::Read },
                len,
            })
            .collect();
        let descriptor = Descriptor { boot_nonce, engine_id, trust, addresses, regions };
        let bytes = descriptor.to_bytes().unwrap();
        let text = descriptor.to_text().unwrap();
        prop_assert_eq!(text.parse(), Ok(descriptor.clone()));
        prop_assert_eq!(text.to_uppercase().parse(), Ok(descriptor.clone()));
        let digits = text.len();
        for wrong in [&text[1..], &format!("{}g0", &text[..digits - 2]), &format!("{}+0", &text[..digits - 2])] {
            prop_assert!(matches!(wrong.parse::<Descriptor>(), Err(DescriptorError::Malformed(_))));
        }
        prop_assert_eq!(Descriptor::from_bytes(&bytes), Ok(descriptor));
        for len in 0..bytes.len() {
            prop_assert!(matches!(Descriptor::from_bytes(&bytes[..len]), Err(DescriptorError::Malformed(_))));
        }
        prop_assert!(Descriptor::from_bytes(&[&bytes[..], &[0]].concat()).is_err());
    }

    #[test]
    fn no_bytes_make_the_reader_panic(bytes in vec(any::<u8>(), 0..200), sound: bool) {
        let head = *b"KVFD\x03\0\0\0";
        let bytes = if sound { [&head[..], &bytes].concat() } else { bytes };
        if let Ok(descriptor) = Descriptor::from_bytes(&bytes) {
            // What is read can be written; kinds that are not known are left out.
            prop_assert!(descriptor.to_bytes().unwrap().len() <= bytes.len());
        }
    }

    #[test]
    fn each_immediate_counts_once_in_whatever_order_it_comes(
        numbers in vec(0..50u64, 0..200),
    ) {
        let mut immediates = Immediates::default();
        let mut seen = BTreeSet::new();
        for number in numbers {
            let expected =
                if seen.insert(number) { Arrival::Counted(seen.len() as u64) } else { Arrival::Again };
            prop_assert_eq!(immediates.arrive(7, number, 3, 0), expected);
        }
        prop_assert_eq!(immediates.count(3, 0), seen.len() as u64);
    }
}

#[test]
fn a_gap_that_never_closes_costs_bounded_memory_and_holds_nothing_up() {
    let mut immediates = Immediates::default();
    for number in 1..200_000 {
        assert_eq!(immediates.arrive(7, number, 3, 0), Arrival::Counted(number));
    }
    assert_eq!(immediates.arrive(7, 0, 3, 0), Arrival::Again, "too late to tell");
    assert_eq!(immediates.arrive(7, 199_999, 3, 0), Arrival::Again);
    assert_eq!(immediates.arrive(8, 0, 3, 0), Arrival::Counted(200_000), "another sender");
}

#[test]
fn what_arrives_for_a_counter_whose_use_is_over_does_not_count_for_the_next() {
    let mut immediates = Immediates::default();
    assert_eq!(immediates.arrive(7, 0, 3, 0), Arrival::Counted(1), "before anybody here has named it");
    assert_eq!((immediates.open(3), immediates.count(3, 0)), (0, 1));
    assert_eq!(immediates.retire(3, 0), 1);
    assert_eq!(immediates.arrive(7, 1, 3, 0), Arrival::Stale);
    assert_eq!((immediates.count(3, 0), immediates.count(3, 1)), (0, 0));
    assert_eq!(immediates.arrive(7, 2, 3, 1), Arrival::Counted(1));
    // Retired twice it is retired once.
    assert_eq!(immediates.retire(3, 0), 1);
    assert_eq!(immediates.count(3, 1), 1);
    immediates.forget(7);
    assert_eq!(immediates.arrive(7, 0, 3, 1), Arrival::Counted(2));
}

#[test]
fn a_peer_can_neither_end_a_use_of_a_counter_nor_fill_the_memory() {
    let mut immediates = Immediates::default();
    for generation in [1, u32::MAX] {
        assert_eq!(immediates.arrive(7, 0, 3, generation), Arrival::Refused);
    }
    assert_eq!(immediates.arrive(7, u64::MAX, 3, 0), Arrival::Refused);
    assert_eq!(immediates.arrive(7, u64::MAX - 1, 3, 0), Arrival::Counted(1));
    assert_eq!(immediates.arrive(7, 0, 3, 0), Arrival::Counted(2));
    for number in 1..COUNTERS_MAX as u32 {
        assert_eq!(immediates.arrive(8, number.into(), 1_000_000 + number, 0), Arrival::Counted(1));
    }
    assert_eq!(immediates.arrive(9, 0, 1, 0), Arrival::Refused, "one counter too many");
    assert_eq!(immediates.open(1), 0);
    assert_eq!(immediates.arrive(9, 0, 1, 0), Arrival::Counted(1), "unless this process knows it");
    assert_eq!(immediates.arrive(9, 1, 2, 0), Arrival::Refused);
    immediates.open(3);
    assert_eq!(immediates.arrive(9, 1, 2, 0), Arrival::Counted(1), "a counter is no peer's any more");
}

#[test]
fn what_does_not_lie_in_its_region_is_refused_with_its_place() {
    let lengths = Lengths(vec![100]);
    let check = |run: Run| Pieces::Contiguous(run).runs(&lengths);
    assert_eq!(check(run((0, 0), (0, 0), 100)).unwrap().len(), 1);
    assert_eq!(check(run((0, 100), (0, 100), 0)).unwrap(), []);
    let out =
        |side, offset, len| Err(ShapeError::OutOfBounds { side, region: 0, offset, len, region_bytes: 100 });
    assert_eq!(check(run((0, 1), (0, 0), 100)), out(Side::Local, 1, 100));
    assert_eq!(check(run((0, 0), (0, 90), 11)), out(Side::Remote, 90, 11));
    assert_eq!(check(run((0, u64::MAX), (0, 0), 2)), out(Side::Local, u64::MAX, 2));
    assert_eq!(
        check(run((0, 0), (1, 0), 1)),
        Err(ShapeError::NoSuchRegion { side: Side::Remote, region: 1 })
    );

    let pages =
        |indices: &[u32]| Pages { region: 0, offset: 0, stride: u64::MAX / 2, indices: indices.into() };
    let paged = |local, remote| Pieces::Paged { page_bytes: 8, local, remote }.runs(&lengths);
    assert_eq!(paged(pages(&[0]), pages(&[0, 0])), Err(ShapeError::UnequalPages { local: 1, remote: 2 }));
    assert_eq!(paged(pages(&[0]), pages(&[3])), out(Side::Remote, u64::MAX, 8));
}

#[test]
fn sizes_around_every_limit_are_kept() {
    let huge = Lengths(vec![u64::MAX]);
    for len in [0, 1, 8191, 8193, 16385, u64::from(u32::MAX), 1 << 32, (1 << 32) + 1] {
        let runs = Pieces::Contiguous(run((0, 3), (0, 5), len)).runs(&huge).unwrap();
        assert_eq!(runs.iter().map(|run| run.len).sum::<u64>(), len);
    }
}

#[test]
fn other_versions_are_named_and_unknown_kinds_left_out() {
    let region =
        |number, kind| RegionDescriptor { number, generation: 1, kind, access: Access::Read, len: 64 };
    let regions = vec![region(0, MemoryKind::Host), region(1, MemoryKind::Cuda)];
    let descriptor =
        Descriptor { boot_nonce: 1, engine_id: 2, trust: Trust::Token, addresses: Vec::new(), regions };
    let bytes = descriptor.to_bytes().unwrap();
    let mut newer = bytes.clone();
    newer[4] = 4;
    assert_eq!(Descriptor::from_bytes(&newer), Err(DescriptorError::Newer(4)));
    newer[4] = 2;
    let older = Descriptor::from_bytes(&newer).unwrap_err();
    assert_eq!(older, DescriptorError::Older(2));
    assert!(older.to_string().contains("made by an older kvlane"), "{older}");
    let mut untrusted = bytes.clone();
    untrusted[5] = 3;
    assert!(matches!(Descriptor::from_bytes(&untrusted), Err(DescriptorError::Malformed(_))));
    let mut unknown = bytes;
    unknown[36 + 8] = 200;
    let read = Descriptor::from_bytes(&unknown).unwrap();
    assert_eq!(read.region(0), None);
    assert_eq!(read.region(1), descriptor.region(1));
    let long = Address { kind: 0, bytes: vec![0; 256] };
    let long = Descriptor { addresses: vec![long], ..descriptor };
    assert!(matches!(long.to_bytes(), Err(DescriptorError::TooLarge(_))));
}
