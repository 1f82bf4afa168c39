//! Fallbacks: hosts where memory cannot be read or must not be, or where no rings can be made.

use kvlane_fabric::{EngineOptions, Op, Transport};

use crate::shapes::scribbled;
use crate::side::{LARGE, Peer, Side, done, impatient, lost};
use crate::support::{MIB, Process};

#[test]
fn what_may_not_be_read_goes_by_tcp_and_the_path_says_why() {
    let here = Side::of(LARGE);
    here.memory.put(&scribbled(5, LARGE));
    let moves = |there: &mut Process, peer: Peer| {
        there.order(&format!("fill 0 {LARGE} 0"));
        done(&here.write(peer, 0, 5 * MIB));
        done(&here.begin(peer, Op::Read, vec![here.run(peer, 6 * MIB, 0, 5 * MIB)]));
        assert!(here.memory.bytes(0, 5 * MIB) == here.memory.bytes(6 * MIB, 5 * MIB), "other bytes");
        assert!(!here.has_cma(peer) && here.path(peer, "tcp").unwrap().is_up);
        here.why_no_cma(peer)
    };
    let mut forbidden = Process::with(LARGE, "forbidden");
    let peer = here.meet(&forbidden.descriptor());
    let why = moves(&mut forbidden, peer).unwrap();
    assert!(why.contains("the peer may not read this process's memory"), "{why}");
    let mut by_tcp = Process::with(LARGE, "tcp");
    let peer = here.meet(&by_tcp.descriptor());
    assert_eq!(moves(&mut by_tcp, peer).as_deref(), Some("the peer has no such carrier"));
    // The other way: it is not the peer that may not.
    forbidden.order(&format!("meet {}", here.descriptor().to_text().unwrap()));
    forbidden.order(&format!("fill 0 {LARGE} 6"));
    forbidden.order(&format!("write 0 {}", 5 * MIB));
    assert_eq!(here.memory.other_than(0, 5 * MIB, 6), None);
    let why = forbidden.ask("path");
    let is_right = why.starts_with("tcp this process may not read the peer's memory: ");
    assert!(is_right && why.contains("seccomp"), "{why}");
}

/// Bytes go by cma as ever. That the rest goes through the socket was said in the log only.
#[test]
fn where_rings_cannot_be_had_the_path_says_why_and_it_is_counted() {
    let here = Side::of(LARGE);
    here.memory.fill(0, LARGE, 7);
    for (setup, is_asked, why) in [
        ("no-getfd", true, "the peer cannot use our shared memory"),
        ("no-memfd", false, "this process cannot share memory: Operation not permitted"),
    ] {
        let mut there = Process::with(LARGE, setup);
        let before = here.engine.connections_without_rings();
        let peer = here.meet(&there.descriptor());
        done(&here.write(peer, 0, 64));
        done(&here.write(peer, 64, LARGE - 64));
        there.order(&format!("check 0 {LARGE} 7"));
        assert!(here.has_cma(peer));
        let no_rings = here.path(peer, "control").unwrap().no_rings;
        assert_eq!(no_rings.is_some_and(|no_rings| no_rings.contains(why)), is_asked, "{setup}");
        assert_eq!(here.engine.connections_without_rings() - before, u64::from(is_asked));
        assert_eq!(
            there.ask("without-rings"),
            u64::from(is_asked).to_string(),
            "{setup}: it took none of ours"
        );
        // And the other way.
        there.order(&format!("meet {}", here.descriptor().to_text().unwrap()));
        there.order("write 0 64");
        there.order(&format!("read 64 {}", LARGE - 64));
        let says = there.ask("no-rings");
        assert_eq!(says.contains(why), !is_asked, "{setup}: {says}");
    }
}

#[test]
fn a_process_that_may_read_others_no_more_goes_on_by_tcp() {
    let mut here = Side::of(LARGE);
    here.memory.fill(0, LARGE, 9);
    let mut forbidden = Process::new(LARGE);
    forbidden.order(&format!("meet {}", here.descriptor().to_text().unwrap()));
    forbidden.order("read 0 4096");
    assert_eq!(forbidden.ask("path").trim(), "cma");
    forbidden.order("forbid");
    forbidden.order(&format!("read 0 {LARGE}"));
    forbidden.order(&format!("check 0 {LARGE} 9"));
    // It finds out by a copy that fails, and then by its next try.
    let why = forbidden.ask("path");
    assert!(why.starts_with("tcp ") && why.contains("read"), "{why}");
    // What it asks of us, it cannot do itself any more.
    let peer = here.meet(&forbidden.descriptor());
    done(&here.write(peer, 0, LARGE));
    here.engine.unregister(here.region).unwrap();
    here.register();
}

#[test]
fn who_wants_cma_only_does_not_reach_those_without_it_and_hears_why() {
    let here = Side::new(MIB, EngineOptions { transport: Some(Transport::CMA), ..impatient() });
    for (setup, why) in [("forbidden", "may not read"), ("tcp", "the peer has no such carrier")] {
        let mut there = Process::with(MIB, setup);
        let peer = here.meet(&there.descriptor());
        lost(&here.write(peer, 0, MIB));
        let trouble = here.why_no_cma(peer).unwrap();
        assert!(trouble.contains("cma is required") && trouble.contains(why), "{trouble}");
        there.order(&format!("check 0 {MIB} 0"));
    }
    let mut there = Process::new(MIB);
    here.is_neighbour(here.meet(&there.descriptor()));
}

#[test]
fn who_wants_tcp_only_gets_it() {
    let options = EngineOptions { transport: Some(Transport::TCP), ..EngineOptions::default() };
    let here = Side::new(MIB, options);
    here.memory.fill(0, MIB, 6);
    let mut there = Process::new(MIB);
    let peer = here.meet(&there.descriptor());
    done(&here.write(peer, 0, MIB));
    there.order(&format!("check 0 {MIB} 6"));
    assert!(here.path(peer, "cma").is_none() && here.path(peer, "tcp").unwrap().is_up);
}
