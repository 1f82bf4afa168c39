//! Processes that are stopped and go on, and one that starts again in the place of another.

use std::time::{Duration, Instant};

use kvlane_fabric::{EngineId, Failure, Op, Pieces, Transfer, WindowRange};

use crate::side::{Side, done, pattern};
use crate::support::{MIB, PATIENCE, Process};
use crate::windows::{open, text};

const LEN: usize = 4 * MIB;
const OLD: u8 = 0x11;
const NEW: u8 = 0x77;
/// An owner that waited for a stopped peer would wait until the test lets it go on.
const AT_ONCE: Duration = Duration::from_secs(20);

/// The bytes of a copy that goes on come from memory that is used again, so they do not count.
#[test]
fn a_window_closes_at_once_while_its_reader_is_stopped_in_the_middle_of_a_copy() {
    let (here, mut there) = (Side::of(0, LEN), Process::with(LEN, "1 whole"));
    let peer = EngineId::from(&there.descriptor());
    there.order(&format!("meet {}", here.engine.describe().unwrap().to_text().unwrap()));
    there.order("read");
    let mut refused = 0;
    for turn in 0..4 {
        here.memory.fill(OLD);
        let range = WindowRange { region: here.region, offset: 0, len: LEN as u64 };
        let shown = here.engine.open_window(peer, vec![range]).unwrap();
        there.order(&format!("slow {}", 20_000 * (1 + turn)));
        there.order(&format!("begin-window {}", text(&shown)));
        there.pause();
        let begun = Instant::now();
        here.engine.close_window(&shown).unwrap();
        here.memory.fill(NEW);
        assert!(begun.elapsed() < AT_ONCE, "it waited for a process that is stopped");
        there.resume();
        match there.ask("end").as_str() {
            "Some(Err(Refused))" => refused += 1,
            // It was over before the stop.
            "Some(Ok(()))" => assert_eq!(there.ask(&format!("is-all {OLD}")), "true", "turn {turn}"),
            other => panic!("turn {turn}: {other}"),
        }
        there.order("slow 0");
        there.order("read");
        assert_eq!(there.ask(&format!("is-all {NEW}")), "true");
    }
    assert!(refused > 0, "no stop came in the middle of a copy");
}

/// This process copies by itself, so it reads on. A window that the owner has closed before it was stopped refuses.
#[test]
fn memory_of_a_stopped_process_is_read_on() {
    let (here, mut there) = (Side::of(0, LEN), Process::with(LEN, "1 whole"));
    there.order("pattern 5");
    let descriptor = there.descriptor();
    let (peer, region) = (here.meet(&descriptor), descriptor.regions[0].number);
    done(&here.move_all(peer, Op::Read, region));
    for turn in 0..4 {
        here.driver.slow_down(Duration::from_millis(5 * turn));
        here.memory.fill(0);
        let amid = here.move_all(peer, Op::Read, region);
        there.pause();
        done(&amid);
        assert!(here.memory.all() == pattern(LEN, 5), "turn {turn}");
        here.memory.fill(0);
        done(&here.move_all(peer, Op::Read, region));
        assert!(here.memory.all() == pattern(LEN, 5), "turn {turn}");
        there.resume();
        there.order("pattern 5");
    }
    here.driver.slow_down(Duration::ZERO);
    let shown = open(&mut there, here.engine.id(), &[(0, LEN)]);
    there.order("close-window");
    there.order(&format!("fill {NEW}"));
    there.pause();
    let all = here.run(shown.number, 0, 0, LEN);
    let late = Transfer::read_through(shown, Pieces::Runs(vec![all]));
    if let Ok(late) = here.engine.begin(peer, late) {
        assert_eq!(late.wait(Some(PATIENCE)), Some(Err(Failure::Refused)));
    }
    there.resume();
    assert_eq!(here.staged(), 0);
}

/// Its control connection breaks after about 10 s, and its memory is unmapped. The two meet again when it goes on.
#[test]
fn a_process_that_is_stopped_for_too_long_is_unmapped_and_met_again() {
    let here = Side::of(0, LEN);
    let own = here.mapped();
    let mut there = Process::with(LEN, "1 whole");
    there.order("pattern 5");
    let descriptor = there.descriptor();
    let (peer, region) = (here.meet(&descriptor), descriptor.regions[0].number);
    done(&here.move_all(peer, Op::Read, region));
    done(&here.move_all(peer, Op::Write, region));
    there.pause();
    let begun = Instant::now();
    while here.path(peer, "control").unwrap().is_up {
        assert!(begun.elapsed() < PATIENCE, "it stays up");
        // No event tells of it, and other tests run meanwhile.
        std::thread::sleep(Duration::from_millis(20));
    }
    here.unmaps_down_to(own);
    there.resume();
    here.is_neighbour(peer);
    there.order("pattern 6");
    done(&here.move_all(peer, Op::Read, region));
    assert!(here.memory.all() == pattern(LEN, 6));
    assert_eq!(here.staged(), 0);
}

/// Region and generation of the new process are those of the old one.
#[test]
fn bytes_of_a_process_that_starts_in_the_place_of_another_are_its_own() {
    let here = Side::of(0, LEN);
    let own = here.mapped();
    let mut there = Process::with(LEN, "1 whole");
    there.order("pattern 1");
    let first = there.descriptor();
    let address = String::from_utf8(first.addresses[0].bytes.clone()).unwrap();
    let (_, port) = address.rsplit_once(':').unwrap();
    let (old, region) = (here.meet(&first), first.regions[0].number);
    done(&here.move_all(old, Op::Read, region));
    let mut last = old;
    for seed in 2..4 {
        here.driver.slow_down(Duration::from_millis(seed));
        let amid = here.move_all(last, Op::Read, region);
        there.kill();
        there = Process::with(LEN, &format!("1 whole port={port}"));
        there.order(&format!("pattern {seed}"));
        // It was over before the kill, or fails.
        match amid.wait(Some(PATIENCE)).unwrap() {
            Ok(()) => assert!(here.memory.all() == pattern(LEN, seed - 1)),
            Err(why) => assert!(matches!(why, Failure::PeerLost | Failure::Refused), "{why}"),
        }
        let descriptor = there.descriptor();
        assert_eq!((&descriptor.addresses, &descriptor.regions), (&first.addresses, &first.regions));
        let peer = here.meet(&descriptor);
        here.memory.fill(0);
        done(&here.move_all(peer, Op::Read, region));
        assert!(here.memory.all() == pattern(LEN, seed));
        // The old descriptor reads nothing.
        let stale = here.move_all(last, Op::Read, region).wait(Some(PATIENCE)).unwrap();
        assert!(matches!(stale, Err(Failure::PeerLost | Failure::Refused)), "{stale:?}");
        assert!(here.memory.all() == pattern(LEN, seed));
        here.engine.disconnect(last);
        last = peer;
    }
    here.engine.disconnect(last);
    here.unmaps_down_to(own);
    assert_eq!(here.staged(), 0);
}
