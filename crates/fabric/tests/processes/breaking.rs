//! Connections that are cut or stall under load.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvlane_fabric::{EngineOptions, InboxOptions, MESSAGE_BYTES_MAX, Options, Pieces, SendOptions, Transfer};

use crate::load::Load;
use crate::proxy::{New, Proxy, through, two};
use crate::side::{Peer, Side, by_tcp, done, quick};
use crate::support::{MIB, PATIENCE, Random};

#[test]
fn connections_that_are_cut_again_and_again_lose_nothing_and_count_nothing_twice() {
    for connections in [1, 3] {
        let there = Side::of(Load::COUNT * Load::EACH);
        let proxy = Proxy::to(&there.descriptor());
        let descriptor = through(&there.descriptor(), &[&proxy]);
        // A machine that is busy takes longer than the other patience to connect again.
        let transfers = Options { breaks_max: 100, peer_patience: PATIENCE, ..quick() };
        let options = EngineOptions { connections, socket_threads: connections, transfers, ..by_tcp() };
        let load = Load::begin(there, &descriptor, options);
        for cut in 0..20 {
            // Not all at the same byte of a post.
            proxy.wait_for_more(MIB as u64 + cut * 54_321);
            proxy.cut();
        }
        assert!(!load.is_over(), "nothing was under way any more");
        load.end();
    }
}

#[test]
fn slow_connections_that_stop_for_a_while_lose_nothing() {
    let there = Side::of(Load::COUNT * Load::EACH);
    let proxy = Proxy::to(&there.descriptor());
    let descriptor = through(&there.descriptor(), &[&proxy]);
    proxy.change(|state| state.delay = Duration::from_micros(200));
    // Only what is held for longer than the patience of a post breaks.
    let transfers = Options { breaks_max: 100, peer_patience: PATIENCE, ..quick() };
    let options = EngineOptions { connections: 2, transfers, ..by_tcp() };
    let load = Load::begin(there, &descriptor, options);
    for pause in [10, 100, 600, 50, 400, 10] {
        proxy.wait_for_more(4 * MIB as u64);
        proxy.hold_all();
        std::thread::sleep(Duration::from_millis(pause));
        proxy.release();
    }
    assert!(!load.is_over(), "nothing was under way any more");
    load.end();
}

/// Of two ways to a peer one ends for good under load.
fn one_of_two_ways_ends(end: impl Fn(&Proxy)) {
    let there = Side::of(Load::COUNT * Load::EACH);
    let proxies = two(&there.descriptor());
    let slow = Duration::from_millis(1);
    proxies.iter().for_each(|proxy| proxy.change(|state| state.delay = slow));
    let descriptor = through(&there.descriptor(), &[&proxies[0], &proxies[1]]);
    // As above.
    let transfers = Options { peer_patience: PATIENCE, ..quick() };
    let load = Load::begin(there, &descriptor, EngineOptions { transfers, ..by_tcp() });
    proxies.iter().for_each(|proxy| proxy.wait_for(4 * MIB as u64));
    end(&proxies[0]);
    assert!(!load.is_over(), "nothing was under way any more");
    load.end();
}

#[test]
fn with_two_ways_all_goes_over_one_when_the_other_is_cut_and_refuses() {
    one_of_two_ways_ends(|proxy| {
        proxy.take_new(New::Refused);
        proxy.cut();
    });
}

#[test]
fn with_two_ways_all_goes_over_one_when_the_other_is_cut_and_resets_whoever_connects() {
    one_of_two_ways_ends(|proxy| {
        proxy.take_new(New::Reset);
        proxy.cut();
    });
}

#[test]
fn with_two_ways_all_goes_over_one_when_the_other_swallows_everything() {
    one_of_two_ways_ends(Proxy::hold_all);
}

#[test]
fn messages_are_delivered_once_although_their_connections_break() {
    const UNDER_WAY: usize = 64;
    let inbox = InboxOptions { messages: 16, ..InboxOptions::default() };
    let there = Side::new(0, EngineOptions { inbox, ..by_tcp() });
    let proxies = two(&there.descriptor());
    let transfers = Options { breaks_max: 1000, ..quick() };
    let here = Side::new(0, EngineOptions { connections: 2, transfers, ..by_tcp() });
    let peer = here.engine.connect(&through(&there.descriptor(), &[&proxies[0], &proxies[1]])).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let mut random = Random(17);
            let options = SendOptions { timeout: PATIENCE, ..SendOptions::default() };
            let mut under_way = VecDeque::new();
            for index in 0u64.. {
                if stop.load(Ordering::Acquire) {
                    under_way.iter().for_each(done);
                    return index;
                }
                let mut bytes = index.to_le_bytes().to_vec();
                bytes.resize(8 + random.below(MESSAGE_BYTES_MAX - 7), index as u8);
                under_way.push_back(here.engine.send(peer, bytes, options.clone()).unwrap());
                if under_way.len() == UNDER_WAY {
                    done(&under_way.pop_front().unwrap());
                }
            }
            unreachable!()
        });
        let receiver = scope.spawn(|| {
            let mut counts: Vec<u32> = Vec::new();
            while let Some(message) = there.engine.receive(None) {
                let (index, rest) = message.bytes.split_first_chunk().unwrap();
                let index = u64::from_le_bytes(*index) as usize;
                assert!(rest.iter().all(|byte| *byte == index as u8));
                counts.resize(counts.len().max(index + 1), 0);
                counts[index] += 1;
            }
            counts
        });
        for cut in 0..40 {
            // Not all at the same byte of a message.
            let proxy = &proxies[cut % 2];
            proxy.wait_for_more(200_000 + cut as u64 * 7_654);
            proxy.cut();
        }
        stop.store(true, Ordering::Release);
        let sent = sender.join().unwrap();
        // All that was done has arrived, and can still be taken.
        there.engine.close();
        let counts = receiver.join().unwrap();
        let other: Vec<_> = counts.iter().enumerate().filter(|(_, count)| **count != 1).collect();
        assert!(counts.len() as u64 == sent && other.is_empty(), "{sent} sent; {} {other:?}", counts.len());
    });
}

#[test]
fn the_room_of_a_message_whose_connection_breaks_in_the_middle_comes_free() {
    let inbox = InboxOptions { messages: 1, ..InboxOptions::default() };
    let there = Side::new(0, EngineOptions { inbox, ..by_tcp() });
    let here = Side::with(0, quick());
    let proxy = Proxy::to(&there.descriptor());
    let peer = here.engine.connect(&through(&there.descriptor(), &[&proxy])).unwrap();
    for byte in 0..3 {
        let limit = proxy.change(|state| {
            let limit = state.forwarded + MESSAGE_BYTES_MAX as u64 / 2;
            state.limit = Some(limit);
            limit
        });
        let options = SendOptions { timeout: PATIENCE, ..SendOptions::default() };
        let handle = here.engine.send(peer, vec![byte; MESSAGE_BYTES_MAX], options).unwrap();
        proxy.wait_for(limit);
        proxy.cut();
        proxy.change(|state| state.limit = None);
        done(&handle);
        assert!(there.engine.receive(Some(PATIENCE)).unwrap().bytes == vec![byte; MESSAGE_BYTES_MAX]);
    }
    assert_eq!(there.engine.receive(Some(Duration::ZERO)), None);
}

#[test]
fn immediates_count_again_for_a_peer_that_was_disconnected_and_connected_again() {
    let (here, there) = (Side::of(MIB), Side::of(MIB));
    let generation = there.engine.open_counter(5);
    let tell = |peer: Peer| {
        let pieces = Pieces::Contiguous(here.run(peer, 0, 0, 100));
        let transfer = Transfer { immediate: Some((5, generation)), ..Transfer::write(pieces) };
        done(&here.engine.begin(peer.id, transfer).unwrap());
    };
    let peer = here.meet(&there.descriptor());
    tell(peer);
    tell(peer);
    assert_eq!(there.engine.count(5, generation), 2);
    here.engine.disconnect(peer.id);
    let again = here.meet(&there.descriptor());
    tell(again);
    tell(again);
    assert_eq!(there.engine.count(5, generation), 4);
}
