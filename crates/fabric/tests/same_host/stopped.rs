//! Processes that are stopped: a transfer that they may still read for when they resume has not ended.

use std::time::{Duration, Instant};

use kvlane_fabric::{EngineId, Failure, Handle, Op, Pieces, Transfer};

use crate::side::{CANARY, LARGE, POISON, Peer, Side, done, fails_soon, impatient, lost};
use crate::support::{Deadline, MIB, PATIENCE, Process};

/// Longer than a connection's lease.
const STOPPED: Duration = Duration::from_secs(4);

/// How long the end of a process may take to be told, on an idle machine.
const TOLD: Duration = Duration::from_millis(500);
/// On a busy machine it happens now and then that the peer has nothing left to read.
const ATTEMPTS: u32 = 10;

#[derive(Clone, Copy, PartialEq)]
enum Stopped {
    /// Before the write begins, which has a time limit.
    Before,
    /// While it takes the bytes of the write, which is cancelled then.
    Amid,
}

/// A write to a process that was stopped: it may be about to read our memory when it goes on.
fn written_to_a_stopped_process(stopped: Stopped) -> (Side, Peer, Process, Handle, Failure) {
    let here = Side::new(LARGE, impatient());
    here.memory.fill(0, LARGE, 7);
    let mut there = Process::new(LARGE);
    let peer = here.meet(&there.descriptor());
    here.is_neighbour(peer);
    there.order("fill 0 1 0");
    let (handle, failure) = match stopped {
        Stopped::Before => {
            there.pause();
            let pieces = Pieces::Contiguous(here.run(peer, 0, 0, LARGE));
            let timeout = Some(Duration::from_millis(300));
            let transfer = Transfer { timeout, ..Transfer::write(pieces) };
            let handle = here.engine.begin(peer.id, transfer).unwrap();
            assert_eq!(handle.wait(Some(STOPPED)), None, "it is over while its memory may still be read");
            (handle, Failure::DeadlineExceeded)
        }
        Stopped::Amid => (stopped_amid(&here, peer, &mut there), Failure::Cancelled),
    };
    (here, peer, there, handle, failure)
}

/// A write that was cancelled while its peer, which is stopped, has something of it left to read. The write is not over for as
/// long as a lease lasts and longer. The test stops the peer again if the peer had read all that it was told of, because such
/// a write is rightly over.
fn stopped_amid(here: &Side, peer: Peer, there: &mut Process) -> Handle {
    for _ in 0..ATTEMPTS {
        let handle = here.long(peer, Op::Write);
        there.order(&format!("await {}", MIB + 12_345));
        there.pause();
        handle.cancel();
        let Some(outcome) = handle.wait(Some(STOPPED)) else { return handle };
        assert_eq!(outcome, Err(Failure::Cancelled));
        there.resume();
        there.order(&format!("fill 0 {LARGE} 0"));
    }
    panic!("it is over while its memory may still be read, {ATTEMPTS} times");
}

fn a_write_to_a_stopped_process_is_over_when_that_goes_on(stopped: Stopped) {
    let (here, peer, mut there, handle, failure) = written_to_a_stopped_process(stopped);
    there.resume();
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(failure)));
    here.memory.fill(0, LARGE, POISON);
    here.memory.fill(0, 1, 7);
    here.reach(peer);
    here.is_neighbour(peer);
    for _ in 0..100 {
        there.order(&format!("absent {POISON}"));
        done(&here.write(peer, 0, 1));
    }
    assert_eq!(handle.outcome(), Some(Err(failure)), "it is over only once");
}

#[test]
fn a_write_to_a_stopped_process_that_is_out_of_time_is_over_when_that_goes_on() {
    a_write_to_a_stopped_process_is_over_when_that_goes_on(Stopped::Before);
}

#[test]
fn a_cancelled_write_to_a_process_that_was_stopped_amid_it_is_over_when_that_goes_on() {
    a_write_to_a_stopped_process_is_over_when_that_goes_on(Stopped::Amid);
}

#[test]
fn a_write_to_a_stopped_process_is_over_when_that_is_killed() {
    for stopped in [Stopped::Before, Stopped::Amid] {
        let (mut here, _, mut there, handle, failure) = written_to_a_stopped_process(stopped);
        there.kill();
        fails_soon(&handle, &[failure]);
        here.engine.unregister(here.region).unwrap();
        here.register();
    }
}

#[test]
fn a_stopped_process_is_read_until_it_has_been_silent_for_too_long() {
    let here = Side::new(LARGE, impatient());
    let mut there = Process::new(LARGE);
    there.order(&format!("fill 0 {LARGE} 9"));
    let peer = here.meet(&there.descriptor());
    here.is_neighbour(peer);
    there.order("fill 0 1 9");
    there.pause();
    done(&here.read(peer, 0, LARGE));
    assert_eq!(here.memory.other_than(0, LARGE, 9), None);
    let begun = Instant::now();
    while here.path(peer, "control").unwrap().is_up {
        assert!(begun.elapsed() < PATIENCE, "it stays up");
        std::thread::yield_now();
    }
    here.memory.fill(0, LARGE, CANARY);
    lost(&here.read(peer, 0, LARGE));
    assert_eq!(here.memory.other_than(0, LARGE, CANARY), None, "of a transfer that failed");
    there.resume();
    here.reach(peer);
    done(&here.read(peer, 1, LARGE - 1));
    assert_eq!(here.memory.other_than(1, LARGE - 1, 9), None);
}

/// By its id it looks as if it were gone. That does not keep its other threads from reading.
#[test]
fn a_write_to_a_stopped_process_whose_first_thread_has_ended_is_over_when_that_goes_on() {
    let here = Side::new(LARGE, impatient());
    here.memory.fill(0, LARGE, 7);
    let mut there = Process::new(LARGE);
    let peer = here.meet(&there.descriptor());
    here.is_neighbour(peer);
    there.order("end-first-thread");
    there.order("fill 0 1 0");
    let handle = stopped_amid(&here, peer, &mut there);
    there.resume();
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(Failure::Cancelled)));
    here.memory.fill(0, LARGE, POISON);
    here.memory.fill(0, 1, 7);
    here.reach(peer);
    done(&here.read(peer, 0, LARGE));
    assert_eq!(here.memory.find(POISON), None);
    assert!(!here.has_cma(peer), "it cannot be read any more by its id");
}

/// It cannot see any more whether the peer is there. That does not keep the peer from reading it.
#[test]
fn a_write_of_a_process_that_may_read_others_no_more_is_not_over_while_the_peer_is_stopped() {
    let (mut writer, mut taker) = (Process::new(LARGE), Process::new(LARGE));
    writer.order(&format!("meet {}", taker.descriptor().to_text().unwrap()));
    writer.order("write 0 1");
    writer.order(&format!("fill 0 {LARGE} 7"));
    writer.order("write-on");
    taker.order(&format!("await {}", MIB + 12_345));
    taker.pause();
    writer.order("forbid");
    writer.order("disconnect");
    // The lease of the connection ends by the writer's own clock, and no event tells that it has.
    std::thread::sleep(STOPPED);
    assert_eq!(writer.ask("outcome"), "None", "over while its memory may still be read");
    taker.resume();
    writer.order("lost");
}

/// A peer closed its control connection after 1.5 s of silence, and everything under way failed or started over. On a busy host a
/// process may get no processor for longer. The test stops the process, which looks the same to its peer.
#[test]
fn a_process_that_gets_no_processor_for_seconds_keeps_its_connection() {
    let here = Side::new(LARGE, impatient());
    let mut there = Process::new(LARGE);
    let peer = here.meet(&there.descriptor());
    here.is_neighbour(peer);
    there.order("fill 0 1 0");
    stays_up(&here, peer, &there, STOPPED);
}

/// Between the processes of one engine silence says nothing: the kernel tells when one of them ends.
#[test]
fn a_process_whose_silence_is_allowed_keeps_its_connection_for_as_long_as_it_lives() {
    let here = Side::new(LARGE, impatient());
    let mut there = Process::new(LARGE);
    let descriptor = there.descriptor();
    here.engine.allow_silence(EngineId::from(&descriptor));
    let peer = here.meet(&descriptor);
    here.is_neighbour(peer);
    there.order("fill 0 1 0");
    stays_up(&here, peer, &there, Duration::from_secs(13));
    there.kill();
    let deadline = Deadline::after(TOLD);
    while here.path(peer, "control").unwrap().is_up {
        assert!(!deadline.has_passed(), "its end is not told");
        std::thread::yield_now();
    }
}

/// While a process is stopped for so long, and when it goes on.
fn stays_up(here: &Side, peer: Peer, there: &Process, stopped: Duration) {
    there.pause();
    let is_up = |when: &str| {
        let control = here.path(peer, "control").unwrap();
        assert!(control.is_up, "{when}: {:?}", control.trouble);
    };
    let begun = Instant::now();
    while begun.elapsed() < stopped {
        is_up("while it is stopped");
        std::thread::sleep(Duration::from_millis(20));
    }
    there.resume();
    for _ in 0..100 {
        // A write would be refused until the process has told its time again.
        done(&here.read(peer, 0, 1));
        is_up("when it goes on");
    }
}
