//! Several stores in one process, each with its part in a cluster: blocks of one are hits at another.
#![allow(clippy::unwrap_used, reason = "tests")]

mod host;
mod played;
mod with_index;

use std::time::{Duration, Instant};

use kvlane_block::BlockHash;
use kvlane_fabric::{MemoryKind, Transport, WindowDescriptor};
use kvlane_proto::cluster::{Borrow, Lease, envelope::Body};

use crate::host::{BLOCK_BYTES, Host, PATIENCE, free_address, prompt};
use crate::played::{Played, has_all};

#[test]
fn what_one_host_has_is_a_hit_on_the_next() {
    for transport in [Some(Transport::TCP), None] {
        let [a, b] = Host::pair(transport);
        let blocks = prompt(1, 40);
        a.save(&blocks);
        assert_eq!(b.hit(&blocks), 0);
        assert!(b.fetch(&blocks), "A has it");
        assert_eq!(b.hit(&blocks), 40);
        // Now B has it too, and nobody has more of it.
        assert!(!b.fetch(&blocks));
        assert!(!a.fetch(&blocks));
        let (lent, fetched) = (a.cluster.status(), b.cluster.status());
        assert_eq!((lent.lent_blocks, lent.lent_bytes), (40, 40 * BLOCK_BYTES));
        assert_eq!((fetched.fetched_blocks, fetched.failed_blocks, fetched.damaged_blocks), (40, 0, 0));
        a.wait(|status| status.lent_bytes_now == 0);
        assert_eq!(a.cluster.status().expired_loans, 0);
    }
}

/// One borrower may have a quarter of the pool at a time. What does not fit is lent next.
#[test]
fn a_prompt_of_most_of_a_pool_comes_whole() {
    let [a, b] = Host::pair(None);
    let blocks = prompt(1, 200);
    a.save(&blocks);
    assert!(b.fetch(&blocks));
    assert_eq!(b.hit(&blocks), 200);
    assert_eq!(b.cluster.status().failed_blocks, 0);
}

#[test]
fn a_prompt_that_two_hosts_have_in_part_comes_from_both() {
    let [a, b, c] = Host::cluster([None; 3]);
    let blocks = prompt(1, 60);
    a.save(&blocks[..30]);
    b.save_after(&blocks, 30);
    assert!(c.fetch(&blocks));
    assert_eq!(c.hit(&blocks), 60);
    assert_eq!((a.cluster.status().lent_blocks, b.cluster.status().lent_blocks), (30, 30));
}

#[test]
fn a_lookup_of_what_nobody_has_is_answered_at_once() {
    let [a, b] = Host::pair(None);
    a.save(&prompt(1, 4));
    let began = Instant::now();
    assert!(!b.fetch(&prompt(2, 600)));
    assert!(began.elapsed() < PATIENCE / 8, "it did not wait for a deadline");
}

/// The checksum of the owner's seal finds what no transport can: bytes that changed in the owner's memory.
#[test]
fn a_block_whose_bytes_changed_at_its_owner_is_a_miss() {
    let [a, b] = Host::pair(None);
    let blocks = prompt(1, 20);
    a.save(&blocks);
    a.flip_a_bit(&blocks[12]);
    assert!(b.fetch(&blocks));
    assert_eq!(b.hit(&blocks), 12);
    let status = b.cluster.status();
    assert_eq!((status.fetched_blocks, status.damaged_blocks), (19, 1));
}

#[test]
fn an_owner_that_ends_costs_a_miss_and_is_found_again_when_it_is_back() {
    let [a, b] = Host::pair(Some(Transport::TCP));
    let blocks = prompt(1, 20);
    a.save(&blocks);
    let address = a.address;
    drop(a);
    // It is asked until its end is noticed. No lookup waits for it longer than for any.
    assert_eq!(b.hit(&blocks), 0);
    b.wait(|status| status.members.iter().all(|member| !member.is_reached));
    assert!(!b.fetch(&blocks));
    let again = Host::at(address, &[b.address], Some(Transport::TCP));
    again.wait(|status| status.members.iter().any(|member| member.is_reached));
    b.wait(|status| status.members.iter().all(|member| member.is_reached));
    again.save(&blocks);
    assert!(b.fetch(&blocks));
    assert_eq!(b.hit(&blocks), 20);
}

#[test]
fn a_daemon_that_names_itself_among_its_peers_is_no_member_of_its_own() {
    let a = Host::alone();
    let b = Host::with(vec![a.address.to_string()], true);
    b.wait(|status| status.members.iter().any(|member| member.is_reached));
    b.wait(|status| status.members.len() == 1);
}

#[test]
fn a_name_that_leads_nowhere_is_told_and_stops_nobody() {
    let a = Host::alone();
    let b = Host::with(vec!["no.such.host.invalid:1".into(), a.address.to_string()], false);
    b.wait(|status| status.members.iter().any(|member| member.is_reached));
    assert_eq!(b.cluster.status().unresolved.len(), 1);
}

/// A daemon lends only to those that it dials itself.
#[test]
fn a_stranger_is_not_answered() {
    let a = Host::alone();
    let blocks = prompt(1, 10);
    a.save(&blocks);
    let stranger = Host::with(vec![a.address.to_string()], false);
    stranger.wait(|status| status.members.iter().any(|member| member.is_reached));
    assert!(!stranger.fetch(&blocks));
    a.wait(|status| status.strangers > 0);
    assert_eq!(a.cluster.status().lent_blocks, 0);
}

/// Two hosts may mean different weights by one name.
#[test]
fn blocks_of_a_namespace_that_rests_on_a_name_stay_on_their_host() {
    let mut hosts = Host::pair(None);
    hosts.iter_mut().for_each(Host::use_own_space);
    let [a, b] = &hosts;
    let blocks = prompt(1, 10);
    a.save(&blocks);
    assert!(!b.fetch(&blocks));
    // One that lets them cross is not lent them either.
    b.store.let_cross_hosts(b.space());
    assert!(!b.fetch(&blocks));
    a.store.let_cross_hosts(a.space());
    assert!(b.fetch(&blocks));
    assert_eq!(b.hit(&blocks), 10);
}

/// Blocks that a prompt needs from the owner and that it has lost meanwhile are misses, and the others come.
#[test]
fn blocks_that_are_gone_when_they_are_borrowed_are_misses() {
    let [a, b] = Host::pair(None);
    let blocks = prompt(1, 20);
    a.save(&blocks);
    let plan = b.plan(&blocks).unwrap();
    a.store.drop_namespace(host::MODEL);
    a.save(&blocks[..7]);
    b.take(plan, PATIENCE);
    assert_eq!(b.hit(&blocks), 7);
}

/// Each loan of a long prompt was waited for, one after the other, until there was no time left for another owner.
#[test]
fn all_reads_of_a_member_that_does_not_lend_fail_while_there_is_time() {
    let mut mute = Played::new();
    let reader = Host::large(vec![mute.address.to_string()]);
    mute.join(&reader, |message| match message {
        Body::Question(question) => (has_all(question), None::<()>),
        _ => Default::default(),
    });
    let blocks = prompt(1, 1000);
    let plan = reader.plan(&blocks).unwrap();
    let (began, within) = (Instant::now(), Duration::from_secs(16));
    reader.take(plan, within);
    assert!(began.elapsed() < within / 2, "{:?}", began.elapsed());
    assert_eq!(reader.cluster.status().failed_blocks, 1000);
}

/// Whatever a member grants: blocks that it did not lend are misses, and the reader goes on.
#[test]
fn leases_that_make_no_sense_lend_nothing() {
    let window = |len: u64| WindowDescriptor { number: 7, generation: 1, len, kind: MemoryKind::Host };
    let lease = |blocks: usize, len: u64| Lease {
        number: 0,
        window: window(len).to_bytes().to_vec().into(),
        gone: vec![0; blocks.div_ceil(8)].into(),
        // Two shards a block.
        crcs: vec![1; 8 * blocks].into(),
        lasts_ms: 60_000,
        refused: String::new(),
    };
    const BLOCKS: usize = 6;
    let whole = BLOCKS as u64 * BLOCK_BYTES;
    let grants: [fn(&mut Lease); 9] = [
        // A window that it never opened: the READ is refused.
        |_| (),
        |lease| lease.gone = vec![0; 9].into(),
        |lease| lease.gone = Default::default(),
        |lease| lease.crcs = vec![1; 8].into(),
        |lease| lease.crcs = vec![1; 8 * BLOCKS + 8].into(),
        |lease| lease.gone = vec![0b11].into(),
        |lease| lease.lasts_ms = 0,
        |lease| lease.window = vec![0; 5].into(),
        |lease| lease.window = Default::default(),
    ];
    for (at, grant) in grants.iter().enumerate() {
        for len in [whole, whole - 1, u64::MAX] {
            let mut member = Played::new();
            let reader = Host::with(vec![member.address.to_string()], false);
            let (mut lease, grant) = (lease(BLOCKS, len), *grant);
            let returned = member.join(&reader, move |message| match message {
                Body::Question(question) => (has_all(question), None),
                Body::Borrow(borrow) => {
                    lease.number = borrow.number;
                    grant(&mut lease);
                    // It comes twice, and another one that was not asked for.
                    let other = Lease { number: borrow.number + 1, ..lease.clone() };
                    ([other, lease.clone(), lease.clone()].map(Body::Lease).into(), None)
                }
                Body::Returned(returned) => (Vec::new(), Some(returned.number)),
                _ => Default::default(),
            });
            let blocks = prompt(1, BLOCKS as u16);
            let plan = reader.plan(&blocks).unwrap();
            reader.take(plan, Duration::from_secs(2));
            assert_eq!(reader.hit(&blocks), 0, "grant {at} of {len} bytes");
            assert_eq!(reader.cluster.status().fetched_blocks, 0);
            assert_eq!(reader.store.stats().used_bytes, 0);
            returned.recv_timeout(PATIENCE).unwrap();
        }
    }
}

/// A borrower gets a quarter of the pool at a time, whatever it asks for, and keeps nothing.
#[test]
fn a_borrower_that_returns_nothing_is_no_harm_to_others() {
    let mut greedy = Played::new();
    let (of_a, of_b) = (free_address(), free_address());
    let (a, b) = (Host::at(of_a, &[of_b, greedy.address], None), Host::at(of_b, &[of_a], None));
    b.wait(|status| status.members.iter().any(|member| member.is_reached));
    a.wait(|status| status.members.iter().filter(|member| member.is_reached).count() == 2);
    let blocks = prompt(1, 250);
    a.save(&blocks);
    let leases = greedy.join(&a, |message| match message {
        Body::Lease(lease) => (Vec::new(), Some(lease)),
        _ => Default::default(),
    });
    let asked = kvlane_proto::cluster::Blocks {
        namespace: host::MODEL.0.to_vec().into(),
        cut: host::CUT.0.to_vec().into(),
        shard_bytes: host::shard_bytes().to_vec(),
        hashes: blocks.iter().flat_map(|hash| hash.0).collect::<Vec<u8>>().into(),
    };
    // Each of 100 loans twice, for as long as there is no end.
    for number in (0..100).chain(0..100) {
        let lasts_ms = if number == 0 { 3000 } else { u32::MAX };
        greedy.say(Body::Borrow(Borrow { number, blocks: Some(asked.clone()), lasts_ms }));
    }
    let first = leases.recv_timeout(PATIENCE).unwrap();
    assert!(!first.window.is_empty() && first.lasts_ms == 3000);
    assert!(a.cluster.status().lent_bytes_now <= a.arena_bytes() / 4);
    assert!(b.fetch(&blocks), "the other half is for others");
    assert_eq!(b.hit(&blocks), 250);
    // The first loan ends by its time, and the next one begins.
    let second = leases.iter().find(|lease| !lease.window.is_empty()).unwrap();
    assert_eq!(second.lasts_ms, 60_000, "longer than that is not granted");
    let status = a.cluster.status();
    assert!(status.expired_loans == 1 && status.lent_bytes_now <= a.arena_bytes() / 4, "{status:?}");
    drop(greedy);
    // With its store nothing is left behind: the host ends at once.
    drop(a);
}

/// Whatever hosts save, lose and ask for: each hit has the right bytes.
#[test]
fn many_prompts_go_between_hosts() {
    let hosts = Host::cluster([None, Some(Transport::TCP), None]);
    std::thread::scope(|scope| {
        for (number, host) in (0u8..).zip(&hosts) {
            scope.spawn(move || {
                for round in 0..40u8 {
                    let blocks: Vec<BlockHash> =
                        prompt(round.wrapping_mul(7) % 11, 5 + u16::from((round ^ number) % 30));
                    if (round + number) % 3 == 0 {
                        host.save(&blocks);
                    }
                    host.fetch(&blocks);
                    host.hit(&blocks);
                }
            });
        }
    });
    let fetched: u64 = hosts.iter().map(|host| host.cluster.status().fetched_blocks).sum();
    let damaged: u64 = hosts.iter().map(|host| host.cluster.status().damaged_blocks).sum();
    assert!(fetched > 100, "{fetched}");
    assert_eq!(damaged, 0);
}
