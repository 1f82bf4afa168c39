//! Descriptors that say something else than what is so.

use kvlane_fabric::{Descriptor, EngineOptions, Failure, Op, Options, Place, Run, Transport};

use crate::side::{Side, done};
use crate::support::{MIB, PATIENCE, Process};

/// The same, but the region lies elsewhere.
fn moved(descriptor: &Descriptor, base: u64) -> Descriptor {
    let mut descriptor = descriptor.clone();
    descriptor.regions[0].base = base;
    descriptor
}

/// What the kernel lets a process read of another, it can read; where memory lies is no secret that protects it. What
/// is written is written by its owner, who knows better.
#[test]
fn a_descriptor_of_memory_elsewhere_reads_what_is_there_and_writes_what_was_registered() {
    let here = Side::of(MIB);
    here.memory.fill(0, MIB, 7);
    let mut there = Process::new(MIB);
    let descriptor = there.descriptor();
    let elsewhere = there.ask("secret 77").parse().unwrap();
    let peer = here.meet(&moved(&descriptor, elsewhere));
    here.is_neighbour(peer);
    done(&here.write(peer, 0, MIB));
    there.order(&format!("check 0 {MIB} 7"));
    done(&here.read(peer, 0, MIB));
    assert_eq!(here.memory.other_than(0, MIB, 77), None);
}

#[test]
fn a_descriptor_of_memory_that_is_not_there_is_refused_and_the_path_stays() {
    const BYTES: usize = 4 * MIB;
    // A part of it takes more than one turn.
    let transfers = Options { chunk_bytes: BYTES as u64, ..Options::default() };
    let here = Side::new(BYTES, EngineOptions { transfers, ..EngineOptions::default() });
    let mut there = Process::new(BYTES);
    let descriptor = there.descriptor();
    let peer = here.meet(&descriptor);
    here.is_neighbour(peer);
    // Nowhere, at the end of all addresses, behind what processes have, over the end of what is there.
    let end = descriptor.regions[0].base + (BYTES - MIB) as u64;
    for base in [0, 4096, u64::MAX, u64::MAX - 4096, u64::MAX - BYTES as u64, 1 << 63, 1 << 47, end] {
        here.engine.update(peer.id, &moved(&descriptor, base)).unwrap();
        let outcome = here.read(peer, 0, BYTES).wait(Some(PATIENCE));
        assert_eq!(outcome, Some(Err(Failure::Refused)), "at {base:#x}");
    }
    here.engine.update(peer.id, &descriptor).unwrap();
    done(&here.read(peer, 0, BYTES));
    assert_eq!((here.path(peer).is_up, here.path(peer).trouble), (true, None));
}

#[test]
fn a_former_generation_is_refused_both_ways_and_the_path_stays() {
    let here = Side::of(MIB);
    let mut there = Process::new(MIB);
    let former = there.descriptor();
    let peer = here.meet(&former);
    here.is_neighbour(peer);
    there.order("unregister");
    there.order("register");
    let now = there.descriptor();
    assert_eq!(now.regions[0].number, former.regions[0].number);
    for op in [Op::Write, Op::Read] {
        let handle = here.begin(peer, op, vec![here.run(peer, 0, 0, MIB)]);
        assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(Failure::Refused)), "{op:?}");
    }
    here.engine.update(peer.id, &now).unwrap();
    done(&here.write(peer, 0, MIB));
    assert_eq!((here.path(peer).is_up, here.path(peer).trouble), (true, None));
}

#[test]
fn regions_that_the_card_has_no_place_for_are_read_over_tcp() {
    const PLACES: usize = 4096;
    let here = Side::of(MIB);
    let mut there = Process::new(MIB);
    there.ask("secret 77");
    there.order(&format!("regions {}", PLACES + 1));
    let mut descriptor = there.descriptor();
    // By cma nothing would be found there: their owner finds them.
    descriptor.regions.iter_mut().for_each(|region| region.base = 4096);
    let peer = here.meet(&descriptor);
    here.is_neighbour(peer);
    let read = |number: usize| {
        let remote = Place { region: number as u32, offset: 0 };
        let local = Place { region: here.region, offset: number as u64 };
        here.begin(peer, Op::Read, vec![Run { local, remote, len: 1 }]).wait(Some(PATIENCE))
    };
    assert_eq!(read(PLACES - 1), Some(Err(Failure::Refused)));
    for number in [PLACES, PLACES + 1] {
        assert_eq!(read(number), Some(Ok(())));
        assert_eq!(here.memory.byte(number), 77);
    }
    assert_eq!(here.path(peer).transport, Transport::Cma);
}
