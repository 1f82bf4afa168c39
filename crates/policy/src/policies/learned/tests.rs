//! Compares the policy with a plain search through all blocks, and checks its invariants.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::model::CacheModel;

/// A store with leases.
#[derive(Default)]
struct Store {
    blocks: HashMap<u32, Block>,
}

struct Block {
    key: u64,
    parent: Option<u32>,
    leased: bool,
}

impl Store {
    fn is_continued(&self, slot: u32) -> bool {
        self.blocks.values().any(|block| block.parent == Some(slot))
    }

    fn prefix(&self, slot: u32) -> Vec<u32> {
        let mut path: Vec<u32> = std::iter::successors(Some(slot), |slot| self.blocks[slot].parent).collect();
        path.reverse();
        path
    }
}

impl Blocks for Store {
    fn parent(&self, slot: u32) -> Option<u32> {
        self.blocks[&slot].parent
    }

    fn key(&self, slot: u32) -> u64 {
        self.blocks[&slot].key
    }

    fn may_evict(&self, slot: u32) -> bool {
        !self.blocks[&slot].leased && !self.is_continued(slot)
    }

    fn in_use(&self, slot: u32) -> bool {
        self.blocks[&slot].leased
    }
}

/// Sort key of eviction: rank, start of the span, class. Computed without cohorts or ranks.
fn plain_order(policy: &Learned, slot: u32) -> (Rank, u64, usize) {
    let Slot { requested_at, class, .. } = policy.slots[slot as usize];
    let time = policy.now.saturating_sub((policy.now as u32).wrapping_sub(requested_at).into());
    let start = policy.cohorts.span_at(time).start;
    let density = policy.densities.get(class, policy.ranked_at - start.min(policy.ranked_at));
    (Rank::of(density), start, class.index())
}

/// The key of the next victim among evictable blocks, without those that were refused since the last ranking.
fn plain_search(policy: &Learned, store: &Store) -> Option<(Rank, u64, usize)> {
    let leaves = store.blocks.keys().filter(|&&slot| store.may_evict(slot) && policy.cohorts.contains(slot));
    leaves.map(|&slot| plain_order(policy, slot)).min()
}

#[derive(Clone, Debug)]
enum Op {
    /// A missed run: index of the slot that it continues, its length, and its first key. Keys repeat, so some blocks
    /// were requested before.
    Miss(usize, u32, u64),
    Touch(usize),
    Lease(usize, bool),
    Evict,
    /// References to other blocks pass by.
    Pass(u64),
    /// A block comes back from a tier below: its number, class, uses, and the references since its last request.
    Remember(usize, u8, u8, u32),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0usize..80, 1u32..5, 0u64..200).prop_map(|(at, count, key)| Op::Miss(at, count, key)),
        4 => (0usize..40).prop_map(Op::Touch),
        1 => (0usize..40, any::<bool>()).prop_map(|(at, leased)| Op::Lease(at, leased)),
        4 => Just(Op::Evict),
        2 => (0u64..12).prop_map(|log| Op::Pass(1 << log)),
        1 => (0usize..40, any::<u8>(), any::<u8>(), 0u32..4000)
            .prop_map(|(at, class, uses, age)| Op::Remember(at, class, uses, age)),
    ]
}

proptest! {
    #[test]
    fn the_victim_is_the_one_that_a_search_through_all_blocks_finds(
        ops in prop::collection::vec(op(), 1..200),
    ) {
        let mut policy = Learned::new(40);
        let mut store = Store::default();
        for op in ops {
            let slots = policy.slots();
            let at = |at: usize| slots.get(at).copied();
            match op {
                Op::Miss(parent, count, key) => {
                    let mut parent = at(parent);
                    let top = parent;
                    let free: Vec<u32> = (0..60).filter(|slot| !store.blocks.contains_key(slot)).collect();
                    let run: Vec<u32> = free.into_iter().take(count as usize).collect();
                    for (key, &slot) in (key..).zip(&run) {
                        store.blocks.insert(slot, Block { key: spread(key), parent, leased: false });
                        parent = Some(slot);
                    }
                    let known = top.map_or(0, |top| store.prefix(top).len());
                    policy.missed(known, &mut run.iter().map(|&slot| store.key(slot)));
                    policy.insert(&run, top, &store);
                }
                Op::Touch(slot) => {
                    if let Some(slot) = at(slot) {
                        policy.touch(&store.prefix(slot), &store);
                    }
                }
                Op::Lease(slot, leased) => {
                    if let Some(block) = at(slot).and_then(|slot| store.blocks.get_mut(&slot)) {
                        block.leased = leased;
                    }
                }
                Op::Evict => {
                    let expected = plain_search(&policy, &store);
                    let free_again = || store.blocks.keys().any(|&slot| store.may_evict(slot));
                    match policy.take_victim(1000, &store) {
                        None => prop_assert!(expected.is_none() && !free_again()),
                        Some(slot) => {
                            let found = expected.is_some().then(|| plain_order(&policy, slot));
                            prop_assert_eq!(found, expected);
                            prop_assert!(store.may_evict(slot));
                            store.blocks.remove(&slot);
                        }
                    }
                }
                Op::Pass(references) => policy.advance(references as usize),
                Op::Remember(slot, class, uses, age) => {
                    if let Some(slot) = at(slot) {
                        let requested_at = policy.now.saturating_sub(age.into()) as u32;
                        policy.remember(slot, Memo::new(class, uses, requested_at));
                    }
                }
            }
            for (&slot, block) in &store.blocks {
                let known = policy.slots[slot as usize];
                prop_assert_eq!(known.parent, block.parent.unwrap_or(NONE));
                prop_assert_eq!(known.children > 0, store.is_continued(slot));
                // A refused slot may have got a child or have left since, so `refused` proves nothing by itself.
                let (in_cohort, refused) = (policy.cohorts.contains(slot), policy.refused.contains(&slot));
                let is_leaf = known.children == 0;
                prop_assert!(is_leaf || !in_cohort, "{} is continued", slot);
                prop_assert!(!is_leaf || in_cohort || refused, "{} is lost", slot);
            }
        }
    }
}

fn prompt(number: u64, length: u64) -> Vec<u64> {
    (0..length).map(|block| spread(number << 16 | block)).collect()
}

#[test]
fn before_anything_was_learnt_it_evicts_what_lru_evicts() {
    let mut learned = CacheModel::new(PolicyKind::Learned, 400);
    let mut lru = CacheModel::new(PolicyKind::Lru, 400);
    let (mut hits, mut both) = (0, 0);
    for step in 0..300u64 {
        let keys = prompt(spread(step) % 60, 12);
        let (a, b) = (learned.request(&keys, |_| ()).prefix_hits, lru.request(&keys, |_| ()).prefix_hits);
        hits += b;
        both += a.min(b);
    }
    assert!(hits > 1000 && both * 50 > hits * 49, "{both} of {hits}");
}

/// Prompts that come back soon beside prompts that never do.
fn ask_for_two_kinds(cache: &mut CacheModel, steps: std::ops::Range<u64>) -> usize {
    let mut hits = 0;
    for step in steps {
        hits += cache.request(&prompt(step / 40 * 10 + spread(step) % 10, 3), |_| ()).prefix_hits;
        cache.request(&prompt(1 << 32 | step, 40), |_| ());
    }
    hits
}

#[test]
fn what_comes_back_is_kept_from_what_does_not_and_random_classes_do_not_tell_them_apart() {
    let hits =
        |policy: Learned| ask_for_two_kinds(&mut CacheModel::with_policy(Box::new(policy), 400), 0..4000);
    let lru = ask_for_two_kinds(&mut CacheModel::new(PolicyKind::Lru, 400), 0..4000);
    let (learned, control) = (hits(Learned::new(400)), hits(Learned::with_random_classes(400)));
    println!("lru {lru}, learned {learned}, random {control}");
    assert!(learned > lru * 13 / 10, "{learned} beside {lru}");
    assert!(control < (learned + lru) / 2, "{control} beside {learned}");
}

#[test]
fn nothing_is_kept_for_ever() {
    for asked_for in [1, 3, 100] {
        let mut cache = CacheModel::new(PolicyKind::Learned, 400);
        let old = prompt(1 << 40, 10);
        (0..asked_for).for_each(|_| {
            cache.request(&old, |_| ());
        });
        ask_for_two_kinds(&mut cache, 0..6000);
        assert!(!old.iter().any(|&key| cache.contains(key)), "asked for {asked_for} times");
    }
}

#[test]
fn memory_beside_the_slots_is_bounded() {
    let fixed = Learned::new(1 << 20).heap_bytes();
    assert!(fixed <= 256 << 10, "{fixed}");
    let mut cache = CacheModel::new(PolicyKind::Learned, 5000);
    let empty = cache.heap_bytes();
    ask_for_two_kinds(&mut cache, 0..2000);
    assert!(cache.heap_bytes() > empty);
}

#[test]
fn a_block_asked_for_four_thousand_million_references_ago_is_no_harm() {
    let mut policy = Learned::new(8);
    let mut store = Store::default();
    for slot in 0..8 {
        store
            .blocks
            .insert(slot, Block { key: spread(slot.into()), parent: slot.checked_sub(1), leased: false });
        policy.insert(&[slot], slot.checked_sub(1), &store);
        policy.advance(1 << 31);
        policy.touch(&store.prefix(slot), &store);
    }
    for slot in (0..8).rev() {
        assert_eq!(policy.take_victim(0, &store), Some(slot));
        store.blocks.remove(&slot);
    }
}

/// Blocks of a sliding window continue none. The policy took a run of them for a chain, of which only the last one
/// could be evicted.
#[test]
fn blocks_that_continue_nothing_go_one_by_one() {
    let mut policy = Learned::new(8);
    let mut store = Store::default();
    let insert = |policy: &mut Learned, store: &mut Store, run: &[u32]| {
        for &slot in run {
            store.blocks.insert(slot, Block { key: spread(slot.into()), parent: None, leased: false });
        }
        policy.insert(run, None, store);
    };
    insert(&mut policy, &mut store, &[5, 4, 3, 2, 1]);
    for slot in 10..2000 {
        policy.touch(&[1], &store);
        insert(&mut policy, &mut store, &[slot]);
        let victim = policy.take_victim(100, &store).unwrap();
        assert_ne!(victim, 1, "it is asked for all the time");
        store.blocks.remove(&victim);
        policy.advance(10);
    }
    assert!([2, 3, 4, 5].iter().all(|slot| !policy.contains(*slot)));
    // A slot that is reused has no child.
    insert(&mut policy, &mut store, &[3, 2]);
    policy.remove(2);
    store.blocks.remove(&2);
    insert(&mut policy, &mut store, &[2]);
    assert_eq!(policy.slots[2].children, 0);
}

/// One key in two is sampled here, one in 64 in a large cache. So a short prompt mostly has no sampled block there.
#[test]
fn a_prompt_of_which_no_block_is_followed_comes_in_all_the_same() {
    let capacity = 400;
    let mut cache = CacheModel::new(PolicyKind::Learned, capacity);
    let history = History::new(capacity);
    let unseen: Vec<u64> = (0..1 << 20).map(spread).filter(|&key| !history.samples(key)).take(3).collect();
    let mut hits = 0;
    for step in 0..6000u64 {
        // More is asked for again and again than there is room for; the rest never is.
        cache.request(&prompt(step % 80, 6), |_| ());
        cache.request(&prompt(1 << 32 | step, 6), |_| ());
        if step > 1000 && step % 5 == 0 {
            hits += cache.request(&unseen, |_| ()).prefix_hits;
        }
    }
    assert!(hits > 2000, "{hits} of 3000");
}

/// In a cache of many millions of blocks, a block older than the last age bucket stayed dense for ever.
#[test]
fn what_was_asked_for_longer_ago_than_ages_are_told_apart_goes_first() {
    let densities = Densities::new();
    for class in Class::all() {
        assert_eq!(densities.get(class, u64::from(u32::MAX)), 0.0);
        assert!(densities.get(class, 8 << 20) > 0.0);
    }
}

#[test]
fn a_block_that_comes_back_from_a_tier_below_is_what_it_was_when_it_left() {
    let mut policy = Learned::new(8);
    policy.learnt = true;
    let mut store = Store::default();
    store.blocks.insert(1, Block { key: spread(1), parent: None, leased: false });
    policy.missed(0, &mut [spread(1)].into_iter());
    policy.insert(&[1], None, &store);
    for _ in 0..3 {
        policy.advance(1000);
        policy.touch(&[1], &store);
    }
    let left_as = policy.slots[1];
    let memo = policy.memo(1).unwrap();
    let dense = policy.density(memo).unwrap();
    assert_eq!(policy.take_victim(0, &store), Some(1));
    policy.advance(500);
    assert!(policy.density(memo).unwrap() < dense, "it has grown older meanwhile");
    policy.insert(&[1], None, &store);
    policy.remember(1, memo);
    let back_as = policy.slots[1];
    assert_eq!((back_as.class, back_as.uses, back_as.requested_at), (left_as.class, 4, left_as.requested_at));
    assert_eq!(policy.memo(1), Some(memo));
    policy.touch(&[1], &store);
    assert_eq!((policy.slots[1].class, policy.slots[1].uses), (Class::of_used(5, 500 + 1), 5));
    // A tier that knows nothing of a block, as after a restart, changes nothing.
    policy.remember(1, Memo::default());
    assert_eq!(policy.slots[1].uses, 5);
}

#[test]
fn what_is_not_worth_a_place_here_passes_through_if_it_is_worth_one_in_the_tier_below() {
    let mut cache = CacheModel::new(PolicyKind::Learned, 400);
    let admitted = |cache: &mut CacheModel, prompts: std::ops::Range<u64>| {
        let mut admitted = 0;
        for step in prompts {
            // More is asked for again and again than there is room for; the rest never is.
            cache.request(&prompt(step % 80, 6), |_| ());
            let once = prompt(1 << 32 | step, 6);
            cache.request(&once, |_| ());
            admitted += usize::from(once.iter().all(|&key| cache.contains(key)));
        }
        admitted
    };
    admitted(&mut cache, 0..2000);
    let alone = admitted(&mut cache, 2000..3000);
    cache.set_below(Some(0.0));
    let above_an_empty_tier = admitted(&mut cache, 3000..4000);
    cache.set_below(Some(1.0));
    let above_a_tier_of_what_is_dense = admitted(&mut cache, 4000..5000);
    println!("{alone}, {above_an_empty_tier}, {above_a_tier_of_what_is_dense} of 1000");
    assert!(alone < 100 && above_an_empty_tier == 1000 && above_a_tier_of_what_is_dense < 100);
}

/// An engine saves a long prompt in parts. A miss notes only the first block of the prompt, so the later parts were
/// judged as blocks of which nothing is known.
#[test]
fn the_later_parts_of_a_save_are_judged_as_what_the_first_part_was() {
    let mut policy = Learned::new(1000);
    policy.learnt = true;
    let mut store = Store::default();
    let keys: Vec<u64> = (1000..1200).map(spread).collect();
    policy.missed(0, &mut keys.iter().copied());
    let mut parent = None;
    for (slot, &key) in (0..64).zip(&keys) {
        store.blocks.insert(slot, Block { key, parent, leased: true });
        parent = Some(slot);
    }
    policy.insert(&(0..64).collect::<Vec<_>>(), None, &store);
    let class = Class::of_new(0, 200);
    assert_eq!(policy.slots[63].class, class);
    // Teach the policy that blocks of that class never come back, and that all others do.
    let mut fates = vec![density::Fates::NONE; classes::CLASSES];
    fates[Class::of_used(2, 100).index()].requested[density::bucket(100)] = 1e6;
    fates[class.index()].left[density::bucket(1 << 20)] = 1e6;
    policy.densities.learn(&fates, 1.0);
    store.blocks.insert(64, Block { key: 7, parent: None, leased: false });
    policy.insert(&[64], None, &store);
    policy.slots[64].class = Class::UNKNOWN;
    policy.rank_cohorts();
    let judged = |parent: Option<u32>| {
        let admitted =
            (64..200).step_by(2).filter(|&at| policy.admit(&keys[at..], parent, 1, &store)).count();
        println!("{admitted} of 68 behind {parent:?}");
        admitted
    };
    assert!(judged(Some(63)) < 10, "but by chance");
    assert!(judged(None) < 10, "a prompt of as many new blocks is of that class too");
}

/// After another policy had been active for a while, time began anew: an old request soon looked as if it were recent.
#[test]
fn what_a_tier_below_keeps_from_before_another_policy_decided_is_as_old_as_it_is() {
    let mut cache = CacheModel::new(PolicyKind::Learned, 400);
    ask_for_two_kinds(&mut cache, 0..600);
    let key = prompt(600 / 40 * 10 + spread(600) % 10, 3)[0];
    ask_for_two_kinds(&mut cache, 600..601);
    let memo = cache.memo(key).unwrap();
    cache.switch(PolicyKind::Lru);
    assert_eq!((cache.memo(key), cache.density(key, memo)), (None, None));
    ask_for_two_kinds(&mut cache, 601..1400);
    cache.switch(PolicyKind::Learned);
    ask_for_two_kinds(&mut cache, 1400..2011);
    assert!(!cache.contains(key));
    let (old, unknown) = (cache.density(key, memo).unwrap(), cache.density(key, Memo::NOTHING).unwrap());
    ask_for_two_kinds(&mut cache, 2011..2012);
    let now = prompt(2011 / 40 * 10 + spread(2011) % 10, 3)[0];
    let new = cache.density(now, Memo::NOTHING).unwrap();
    println!("{old}, unknown {unknown}, just now {new}");
    assert!(old < new / 10.0 && unknown < new / 10.0);
}
