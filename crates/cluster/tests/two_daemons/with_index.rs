//! The same with replicas of an index.

use std::time::{Duration, Instant};

use crate::host::{Host, Index, PATIENCE, prompt};

#[test]
fn what_one_host_announces_is_a_hit_on_the_next() {
    let index = Index::start();
    let [a, b] = Host::indexed(&[&index], PATIENCE / 4);
    let blocks = prompt(1, 40);
    a.save(&blocks);
    index.wait_for(&[0, 40]);
    assert!(b.fetch(&blocks));
    assert_eq!(b.hit(&blocks), 40);
    // B's copies are announced, too.
    index.wait_for(&[40, 40]);
    b.wait(|status| status.announced_blocks == 40);
    // Nobody has more of it, and the index does not name the one that asks.
    assert!(!b.fetch(&blocks));
    assert!(!a.fetch(&prompt(2, 600)));
}

/// Three owners, one part each, and none of the index's replicas is needed twice.
#[test]
fn a_prompt_that_hosts_have_in_part_comes_from_all_of_them() {
    let replicas = [Index::start(), Index::start()];
    let [a, b, c, d] = Host::indexed(&[&replicas[0], &replicas[1]], PATIENCE / 4);
    let blocks = prompt(1, 60);
    a.save(&blocks[..20]);
    b.save_after(&blocks[..40], 20);
    c.save_after(&blocks, 40);
    replicas.iter().for_each(|replica| replica.wait_for(&[0, 20, 20, 20]));
    assert!(d.fetch(&blocks));
    assert_eq!(d.hit(&blocks), 60);
}

/// What hosts have forgotten is not asked of them.
#[test]
fn the_index_forgets_what_an_owner_forgets() {
    let index = Index::start();
    let [a, b] = Host::indexed(&[&index], PATIENCE / 4);
    let blocks = prompt(1, 40);
    a.save(&blocks);
    index.wait_for(&[0, 40]);
    a.store.drop_namespace(crate::host::MODEL);
    index.wait_for(&[0, 0]);
    a.save(&blocks[..7]);
    index.wait_for(&[0, 7]);
    assert!(b.fetch(&blocks));
    assert_eq!((b.hit(&blocks), b.cluster.status().failed_blocks), (7, 0));
}

/// A replica keeps nothing. It asks the daemons for what they have.
#[test]
fn a_replica_that_starts_again_knows_all_blocks_soon() {
    let index = Index::start();
    let [a, b] = Host::indexed(&[&index], PATIENCE / 4);
    a.save(&prompt(1, 100));
    b.save(&prompt(2, 50));
    index.wait_for(&[50, 100]);
    let address = index.address;
    drop(index);
    a.save(&prompt(3, 20));
    let again = Index::at(address);
    again.wait_for(&[50, 120]);
    assert!(b.fetch(&prompt(3, 20)));
    assert_eq!(b.hit(&prompt(3, 20)), 20);
}

#[test]
fn lookups_go_on_while_one_replica_is_away_and_while_all_are() {
    let (first, second) = (Index::start(), Index::start());
    // The second replica is asked after half of it.
    let [a, b] = Host::indexed(&[&first, &second], Duration::from_secs(2));
    a.save(&prompt(1, 40));
    [&first, &second].iter().for_each(|replica| replica.wait_for(&[0, 40]));
    drop(first);
    assert!(b.fetch(&prompt(1, 20)), "the other replica is asked");
    drop(second);
    b.wait(|status| status.replicas.iter().all(|replica| !replica.is_reached));
    let began = Instant::now();
    assert!(!b.fetch(&prompt(1, 40)), "a miss, at once");
    assert!(began.elapsed() < PATIENCE / 8);
}

#[test]
fn an_owner_that_leaves_is_forgotten_at_once_and_one_that_starts_again_is_found() {
    let index = Index::start();
    let [a, b] = Host::indexed(&[&index], PATIENCE / 4);
    a.save(&prompt(1, 40));
    index.wait_for(&[0, 40]);
    let address = a.address;
    drop(a);
    index.wait_for(&[0]);
    assert!(!b.fetch(&prompt(1, 40)));
    b.wait(|status| status.members.iter().all(|member| !member.is_reached));
    let again = Host::indexed_at(address, &[&index], PATIENCE / 4);
    again.save(&prompt(1, 30));
    index.wait_for(&[0, 30]);
    // Both ways: a daemon lends nothing to one that it has not reached itself.
    for host in [&again, &b] {
        host.wait(|status| status.members.iter().any(|member| member.is_reached));
    }
    assert!(b.fetch(&prompt(1, 40)));
    assert_eq!(b.hit(&prompt(1, 40)), 30);
}

/// Two hosts may mean different weights by one name.
#[test]
fn blocks_that_must_not_cross_hosts_are_not_announced_until_they_may() {
    let index = Index::start();
    let [mut a, _b] = Host::indexed(&[&index], PATIENCE / 4);
    a.use_own_space();
    a.save(&prompt(1, 10));
    a.save(&prompt(2, 10));
    a.store.let_cross_hosts(a.space());
    index.wait_for(&[0, 20]);
}

#[test]
fn whatever_hosts_save_and_lose_the_index_is_their_union_in_the_end() {
    let replicas = [Index::start(), Index::start()];
    let hosts: [Host; 3] = Host::indexed(&[&replicas[0], &replicas[1]], Duration::from_millis(200));
    std::thread::scope(|scope| {
        for (number, host) in (0u8..).zip(&hosts) {
            scope.spawn(move || {
                for round in 0..60u8 {
                    let blocks = prompt(round.wrapping_mul(7) % 13, 5 + u16::from((round ^ number) % 60));
                    if (round + number) % 3 == 0 {
                        host.save(&blocks);
                    }
                    host.fetch(&blocks);
                    host.hit(&blocks);
                }
            });
        }
    });
    let mut blocks = hosts.each_ref().map(|host| host.store.stats().blocks);
    blocks.sort_unstable();
    for replica in &replicas {
        replica.wait_for(&blocks);
        assert_eq!(replica.replica.status().counters.snapshots_requested, 3, "deltas were enough");
    }
}

/// A wrong address in `--cluster-advertise` would else be a cluster that never hits, without a word.
#[test]
fn a_daemon_that_the_index_does_not_reach_says_so() {
    let index = Index::start();
    let [a] = Host::indexed(&[&index], PATIENCE / 4);
    // Another one at its address: the index reaches the first.
    let other = Host::indexed_under(a.address, &[&index]);
    other.wait(|status| {
        status.replicas.iter().any(|replica| {
            replica.trouble.as_deref() == Some(&*format!("it does not reach this daemon at {}", a.address))
        })
    });
    other.save(&prompt(1, 10));
    a.save(&prompt(2, 20));
    index.wait_for(&[20]);
}
