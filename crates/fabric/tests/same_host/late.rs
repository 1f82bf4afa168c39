//! Memory that is registered after a peer has connected, or under a number of earlier memory, over each carrier.

use std::time::{Duration, Instant};

use kvlane_fabric::{Access, EngineOptions, Failure, Op, Transport};

use crate::gate::Gate;
use crate::side::{Peer, Side, done};
use crate::support::{MIB, Memory, PATIENCE, Random};

const WAYS: [(Transport, &str); 2] = [(Transport::CMA, "cma"), (Transport::TCP, "tcp")];
const OLD: u8 = 0x11;
const WRITTEN: u8 = 0x22;
/// Of the memory that has the number next.
const SECRET: u8 = 0x33;

fn side(transport: Transport) -> Side {
    Side::new(12 * MIB, EngineOptions { transport: Some(transport), ..EngineOptions::default() })
}

fn register(side: &Side, memory: &Memory) -> u32 {
    // SAFETY: each test gives the memory back, or ends the engine, before the memory goes.
    unsafe { side.engine.register(memory.base, memory.len as u64, Access::ReadWrite).unwrap() }
}

/// Waits until a peer is known to have this generation of a region.
fn wait_for(side: &Side, peer: Peer, generation: u32) {
    let is_it = || {
        let regions = side.engine.regions(peer.id).unwrap();
        regions.iter().any(|region| (region.number, region.generation) == (peer.region, generation))
    };
    let begun = Instant::now();
    while !is_it() {
        assert!(begun.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
}

#[test]
fn memory_that_is_registered_after_the_peer_has_connected_is_reached_at_once() {
    for (transport, carrier) in WAYS {
        let (here, there) = (side(transport), side(transport));
        let known = here.meet(&there.descriptor());
        here.reach(known);
        for turn in 0..20u64 {
            let late = Memory::new(MIB);
            late.scribble(0, MIB, turn + 1);
            let peer = Peer { region: register(&there, &late), ..known };
            if turn % 2 == 0 {
                here.engine.update(peer.id, &there.descriptor()).unwrap();
            } else {
                wait_for(&here, peer, turn as u32);
            }
            if turn % 4 < 2 {
                done(&here.begin(peer, Op::Read, vec![here.run(peer, 0, 0, MIB)]));
                assert!(here.memory.bytes(0, MIB) == late.bytes(0, MIB), "{carrier}: other bytes are read");
            }
            here.memory.scribble(MIB, MIB, turn + 77);
            done(&here.begin(peer, Op::Write, vec![here.run(peer, MIB, 0, MIB)]));
            assert!(here.memory.bytes(MIB, MIB) == late.bytes(0, MIB), "{carrier}: other bytes are written");
            there.engine.unregister(peer.region).unwrap();
        }
        let path = here.path(known, carrier).unwrap();
        assert!(path.is_up && path.bytes_per_second.is_some() && path.trouble.is_none(), "{path:?}");
    }
}

/// Where a key is needed, a READ waits for it; sockets need none.
#[test]
fn a_read_of_memory_whose_key_comes_late_waits_for_it() {
    for (transport, carrier) in WAYS {
        let (here, there) = (side(transport), side(transport));
        let (gate, descriptor) = Gate::before(&there.descriptor());
        let known = here.meet(&descriptor);
        here.reach(known);
        let late = Memory::new(MIB);
        late.scribble(0, MIB, 5);
        gate.change(|state| state.holds_answers = true);
        let peer = Peer { region: register(&there, &late), ..known };
        here.engine.update(peer.id, &there.descriptor()).unwrap();
        let read = here.begin(peer, Op::Read, vec![here.run(peer, 0, 0, MIB)]);
        if transport == Transport::CMA {
            // No event tells that it waits.
            assert_eq!(read.wait(Some(Duration::from_millis(50))), None);
        } else {
            done(&read);
        }
        gate.change(|state| state.holds_answers = false);
        done(&read);
        assert!(here.memory.bytes(0, MIB) == late.bytes(0, MIB), "{carrier}: other bytes");
        assert_eq!(here.path(peer, carrier).unwrap().trouble, None);
        there.engine.unregister(peer.region).unwrap();
    }
}

/// What it waited for came, but it did not ask again. A second later the next that waited was refused at once.
#[test]
fn a_read_that_was_given_up_while_it_waited_for_a_key_has_no_other_refused() {
    let (here, there) = (side(Transport::CMA), side(Transport::CMA));
    let (gate, descriptor) = Gate::before(&there.descriptor());
    let known = here.meet(&descriptor);
    here.reach(known);
    let late = [Memory::new(MIB), Memory::new(MIB)];
    let read = |memory: &Memory| {
        gate.change(|state| state.holds_answers = true);
        let peer = Peer { region: register(&there, memory), ..known };
        here.engine.update(peer.id, &there.descriptor()).unwrap();
        let read = here.begin(peer, Op::Read, vec![here.run(peer, 0, 0, MIB)]);
        assert_eq!(read.wait(Some(Duration::from_millis(50))), None);
        read
    };
    let first = read(&late[0]);
    first.cancel();
    assert_eq!(first.wait(Some(PATIENCE)), Some(Err(Failure::Cancelled)));
    gate.change(|state| state.holds_answers = false);
    // The second passes by the engine's own clock.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(1100) {
        here.reach(known);
    }
    let second = read(&late[1]);
    gate.change(|state| state.holds_answers = false);
    done(&second);
    there.engine.close();
}

/// The news of it are held, so that it is the peer, or its card, that refuses.
#[test]
fn what_is_begun_for_memory_that_was_given_back_is_not_for_the_next_that_has_its_number() {
    for (transport, carrier) in WAYS {
        let (here, there) = (side(transport), side(transport));
        let (gate, descriptor) = Gate::before(&there.descriptor());
        let peer = here.meet(&descriptor);
        here.reach(peer);
        gate.change(|state| state.holds_answers = true);
        there.engine.unregister(there.region).unwrap();
        let next = Memory::new(MIB);
        next.fill(0, MIB, SECRET);
        assert_eq!(register(&there, &next), there.region);
        here.memory.fill(0, 2 * MIB, WRITTEN);
        let all = [Op::Read, Op::Write].map(|op| here.begin(peer, op, vec![here.run(peer, 0, 0, MIB)]));
        // A part of a page goes another way.
        let small = here.write(peer, 0, 100);
        gate.change(|state| state.holds_answers = false);
        for handle in [&all[0], &all[1], &small] {
            assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(Failure::Refused)), "{carrier}");
        }
        assert_eq!((next.other_than(0, MIB, SECRET), here.memory.find(SECRET)), (None, None), "{carrier}");
        wait_for(&here, peer, 1);
        done(&here.begin(peer, Op::Read, vec![here.run(peer, 0, 0, MIB)]));
        assert_eq!(here.memory.other_than(0, MIB, SECRET), None, "{carrier}");
        there.engine.unregister(there.region).unwrap();
    }
}

#[test]
fn no_byte_of_the_next_memory_with_a_number_comes_while_the_number_changes_hands() {
    // More than whoever begins a transfer does of it at once.
    const BYTES: usize = 3 * MIB;
    let mut random = Random(0x1357_9bdf_0246_8ace);
    for (transport, carrier) in WAYS {
        let (here, there) = (side(transport), side(transport));
        let known = here.meet(&there.descriptor());
        here.reach(known);
        let mut outcomes = [0; 2];
        // How long to wait before the number changes hands, at most: less when all was over by then, more when nothing was.
        let mut most_us = 800;
        for round in 0..400u32 {
            if round >= 40 && outcomes.iter().all(|count| *count > 0) {
                break;
            }
            let before = outcomes;
            let (old, next) = (Memory::new(BYTES), Memory::new(BYTES));
            old.fill(0, BYTES, OLD);
            next.fill(0, BYTES, SECRET);
            here.memory.fill(0, 4 * BYTES, WRITTEN);
            let peer = Peer { region: register(&there, &old), ..known };
            here.engine.update(peer.id, &there.descriptor()).unwrap();
            wait_for(&here, peer, 2 * round);
            let begin = |at: usize| {
                let op = if at == 0 { Op::Write } else { Op::Read };
                here.begin(peer, op, vec![here.run(peer, at * BYTES, 0, BYTES)])
            };
            let handles: Vec<_> = (0..4).map(begin).collect();
            let pause = Duration::from_micros(random.below(most_us) as u64);
            assert_eq!(handles[3].wait(Some(pause)).unwrap_or(Ok(())), Ok(()));
            there.engine.unregister(peer.region).unwrap();
            assert_eq!(register(&there, &next), peer.region);
            for handle in &handles {
                match handle.wait(Some(PATIENCE)) {
                    Some(Ok(())) => outcomes[0] += 1,
                    Some(Err(Failure::Refused)) => outcomes[1] += 1,
                    other => panic!("{carrier}: {other:?} in round {round}"),
                }
            }
            most_us = match [0, 1].map(|at| outcomes[at] > before[at]) {
                [true, false] => (most_us / 2).max(1),
                [false, true] => (most_us * 2).min(1 << 20),
                _ => most_us,
            };
            assert_eq!(here.memory.find(SECRET), None, "{carrier}: read in round {round}");
            assert_eq!(next.other_than(0, BYTES, SECRET), None, "{carrier}: written in round {round}");
            there.engine.unregister(peer.region).unwrap();
        }
        assert!(outcomes.iter().all(|count| *count > 0), "{carrier}: done, refused: {outcomes:?}");
    }
}
