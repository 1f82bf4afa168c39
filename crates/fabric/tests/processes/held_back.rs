//! Bytes that are held back in the network: once their WRITE has ended, they no longer arrive.

use std::time::{Duration, Instant};

use kvlane_fabric::{Descriptor, Failure, Handle, PathStatus};

use crate::proxy::{New, Proxy, State, one, through, two};
use crate::side::{CANARY, Peer, Side, done, quick};
use crate::support::{MIB, PATIENCE};

const HELD: usize = 64 * MIB;

/// A write whose first connection the network holds back for a while.
struct HeldBack {
    here: Side,
    there: Side,
    peer: Peer,
    handle: Handle,
}

impl HeldBack {
    /// Over the proxies that are made, of which the first holds back.
    fn begin(proxies: impl Fn(&Descriptor) -> Vec<Proxy>) -> (HeldBack, Vec<Proxy>) {
        let (here, there) = (Side::with(HELD, quick()), Side::of(HELD));
        here.memory.fill(0, HELD, 7);
        let proxies = proxies(&there.descriptor());
        let peer = here.meet(&through(&there.descriptor(), &proxies.iter().collect::<Vec<_>>()));
        // One that is not known yet takes only one post.
        let begun = Instant::now();
        let is_known = |path: &PathStatus| path.bytes_per_second.is_some();
        while here.paths_for_bytes(peer).iter().filter(|path| is_known(path)).count() < proxies.len() {
            assert!(begun.elapsed() < PATIENCE, "a way stays unknown");
            here.reach(peer);
        }
        proxies[0].hold();
        let handle = here.write(peer, 0, HELD);
        proxies[0].wait_until_it_keeps(400 << 10);
        (HeldBack { here, there, peer, handle }, proxies)
    }

    /// The transfer is over and the peer can be reached. Now the network delivers what it had.
    fn deliver_late(&self, proxy: &Proxy) {
        self.there.memory.fill(0, HELD, CANARY);
        proxy.release();
        proxy.wait_until_the_first_for_bytes_is_gone();
        done(&self.here.post(self.peer));
        assert_eq!(self.there.memory.other_than(0, HELD, CANARY), None, "a late write");
    }
}

#[test]
fn what_a_slow_connection_holds_back_does_not_arrive_after_the_write_was_done_over_another() {
    let (held, proxies) = HeldBack::begin(one);
    done(&held.handle);
    assert_eq!(held.there.memory.other_than(0, HELD, 7), None);
    held.deliver_late(&proxies[0]);
}

#[test]
fn what_a_slow_connection_holds_back_does_not_arrive_after_the_write_was_cancelled() {
    let (held, proxies) = HeldBack::begin(one);
    held.handle.cancel();
    assert_eq!(held.handle.wait(Some(PATIENCE)), Some(Err(Failure::Cancelled)));
    held.deliver_late(&proxies[0]);
}

#[test]
fn what_a_slow_connection_holds_back_does_not_arrive_after_a_lost_peer_is_reached_again() {
    let (held, proxies) = HeldBack::begin(one);
    proxies[0].take_new(New::Reset);
    assert_eq!(held.handle.wait(Some(PATIENCE)), Some(Err(Failure::PeerLost)));
    proxies[0].take_new(New::Carried);
    held.here.reach(held.peer);
    held.deliver_late(&proxies[0]);
}

#[test]
fn what_a_slow_connection_holds_back_does_not_arrive_after_a_peer_was_disconnected_and_connected_again() {
    let (mut held, proxies) = HeldBack::begin(one);
    held.here.engine.disconnect(held.peer.id);
    assert_eq!(held.handle.wait(Some(PATIENCE)), Some(Err(Failure::PeerLost)));
    held.peer = held.here.meet(&through(&held.there.descriptor(), &[&proxies[0]]));
    held.here.reach(held.peer);
    held.deliver_late(&proxies[0]);
}

/// That bytes come does not say that somebody still sends them.
#[test]
fn what_a_slow_connection_delivers_bit_by_bit_does_not_arrive_after_the_write_has_failed() {
    let (held, proxies) = HeldBack::begin(one);
    let proxy = &proxies[0];
    // Nobody can confirm anything.
    proxy.take_new(New::Reset);
    proxy.change(|state| (state.delay, state.portion) = (Duration::from_millis(50), Some(4096)));
    proxy.release();
    assert_eq!(held.handle.wait(Some(PATIENCE)), Some(Err(Failure::PeerLost)));
    held.there.memory.fill(0, HELD, CANARY);
    let before = proxy.change(|state| state.forwarded);
    // The first connection is for what is said, the second one for bytes.
    let is_gone = |state: &State| !state.there.contains(&1);
    proxy.wait("more arrives", |state| is_gone(state) || state.forwarded >= before + (64 << 10));
    proxy.take_new(New::Carried);
    held.here.reach(held.peer);
    assert_eq!(held.there.memory.other_than(0, HELD, CANARY), None, "a late write");
}

#[test]
fn what_a_slow_connection_holds_back_does_not_arrive_after_its_address_refuses_connections() {
    let (held, proxies) = HeldBack::begin(two);
    proxies[0].take_new(New::Refused);
    done(&held.handle);
    assert_eq!(held.there.memory.other_than(0, HELD, 7), None);
    held.deliver_late(&proxies[0]);
}

/// A thread may have the connection in hand when its peer is removed. Its writes came back without a fence then.
#[test]
fn what_is_under_way_when_a_peer_is_disconnected_does_not_arrive_after_its_write_is_over() {
    const BYTES: usize = 8 * MIB;
    let (here, there) = (Side::of(BYTES), Side::of(BYTES));
    for round in 0..60u8 {
        let peer = here.meet(&there.descriptor());
        here.memory.fill(0, BYTES, 1 + round % 2);
        done(&here.post(peer));
        let handles: Vec<Handle> = (0..4).map(|_| here.write(peer, 0, BYTES)).collect();
        std::thread::scope(|scope| {
            // Whoever waits does the engine's work.
            let waits = scope.spawn(|| handles[0].wait(Some(PATIENCE)));
            there.memory.wait_for(BYTES / 8);
            here.engine.disconnect(peer.id);
            assert!(waits.join().unwrap().is_some());
        });
        for handle in &handles {
            assert!(
                matches!(handle.wait(Some(PATIENCE)), Some(Ok(()) | Err(Failure::PeerLost))),
                "round {round}"
            );
        }
        there.memory.fill(0, BYTES, CANARY);
        let again = here.meet(&there.descriptor());
        done(&here.post(again));
        assert_eq!(there.memory.other_than(0, BYTES, CANARY), None, "a late write in round {round}");
        here.engine.disconnect(again.id);
        there.memory.fill(0, BYTES, 0);
    }
}
