//! Regions that are registered again, late, or in large numbers.

use kvlane_fabric::{Op, Place, Run};

use crate::side::{LARGE, Side, done};
use crate::support::{MIB, PATIENCE, Process};

/// A descriptor is of one moment. What changes after it, a peer that is connected tells by itself.
#[test]
fn what_a_peer_registers_anew_is_known_without_its_new_descriptor() {
    let here = Side::of(MIB);
    here.memory.fill(0, MIB, 7);
    let mut there = Process::new(MIB);
    let peer = here.meet(&there.descriptor());
    here.is_neighbour(peer);
    for turn in 0..20 {
        there.order("unregister");
        there.order("register");
        // A transfer that the news overtakes is refused, or not begun, and never goes to what is not registered.
        let begun = std::time::Instant::now();
        let op = if turn % 2 == 0 { Op::Write } else { Op::Read };
        let whole = || here.try_begin(peer, op, vec![here.run(peer, 0, 0, MIB)]).ok()?.wait(Some(PATIENCE));
        while whole() != Some(Ok(())) {
            assert!(begun.elapsed() < PATIENCE);
        }
        there.order(&format!("check 0 {MIB} 7"));
    }
    assert!(here.path(peer, "cma").is_some_and(|path| path.is_up && path.trouble.is_none()));
}

#[test]
fn thousands_of_regions_are_read_by_cma() {
    const MANY: usize = 5000;
    let here = Side::of(LARGE);
    let mut there = Process::new(MIB);
    there.ask("secret 77");
    there.order(&format!("regions {MANY}"));
    let peer = here.meet(&there.descriptor());
    here.is_neighbour(peer);
    for number in [1, MANY / 2, MANY] {
        let remote = Place { region: number as u32, offset: 0 };
        let local = Place { region: here.region, offset: number as u64 };
        done(&here.begin(peer, Op::Read, vec![Run { local, remote, len: 1 }]));
        assert_eq!(here.memory.byte(number), 77);
    }
}
