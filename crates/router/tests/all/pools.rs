//! Pools that several nodes share: once one node has prefilled a prompt, the others can load it, at a cost.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kvlane_router::{
    body::Mark,
    schedule::{
        Cached, CachedPrefixes, Chosen, LegEnd, Node, NodeId, NodeState, Policy, Request, Reservation, Role,
        Scheduler, SchedulerSettings,
    },
};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The length of the prompt that was seen to go to one engine six times, in pieces of 64 tokens.
const PIECES: u32 = 63;

fn prompt(name: u64, pieces: u32) -> Vec<Mark> {
    let mut hash = name;
    (1..=pieces)
        .map(|piece| {
            hash = xxh3_64_with_seed(b"piece", hash);
            Mark { hash, bytes: piece * 256 }
        })
        .collect()
}

struct World {
    scheduler: Scheduler,
    ids: Vec<NodeId>,
    now: Instant,
}

impl World {
    /// Workers, each of the pool of this name if it has one.
    fn new(policy: Policy, pools: &[Option<&str>]) -> Self {
        let settings = SchedulerSettings {
            policy,
            decode_policy: policy,
            marks_max: 1 << 14,
            ..SchedulerSettings::default()
        };
        let mut scheduler = Scheduler::new(settings);
        let mut ids = Vec::new();
        for (number, pool) in pools.iter().enumerate() {
            let mut node = Node::new(&format!("n{number}"), Role::Worker, "");
            node.state = NodeState::Ready;
            let id = scheduler.add(node);
            if let Some(pool) = pool {
                scheduler.set_pool(id, Some(&Arc::from(*pool)), false).unwrap();
            }
            ids.push(id);
        }
        Self { scheduler, ids, now: Instant::now() }
    }

    fn ask_with(&mut self, marks: &[Mark], cached: CachedPrefixes) -> (usize, u64, Reservation) {
        let request = Request { model: None, marks, one_node: false, streams: true, tried: &[] };
        let choice = self.scheduler.choose_with(&request, cached, self.now).unwrap();
        let Chosen::One(reservation) = choice.chosen else { panic!("a pair") };
        let number = self.ids.iter().position(|id| *id == reservation.node).unwrap();
        (number, choice.cached_tokens, reservation)
    }

    fn ask(&mut self, marks: &[Mark]) -> (usize, Reservation) {
        let (number, _, reservation) = self.ask_with(marks, CachedPrefixes::default());
        (number, reservation)
    }

    /// A request that has ended, with its first token after this time.
    fn serve(&mut self, marks: &[Mark], first: Duration) -> usize {
        let (number, mut reservation) = self.ask(marks);
        self.scheduler.prefilled(&mut reservation, marks, self.now + first);
        self.scheduler.end(reservation, LegEnd::Served, self.now + first);
        number
    }

    /// Sends this many requests of a prompt at once. Returns the number that each node gets.
    fn at_once(&mut self, marks: &[Mark], requests: usize) -> Vec<usize> {
        let mut counts = vec![0; self.ids.len()];
        let held: Vec<Reservation> = (0..requests)
            .map(|_| {
                let (number, reservation) = self.ask(marks);
                counts[number] += 1;
                reservation
            })
            .collect();
        for each in held {
            self.scheduler.end(each, LegEnd::Served, self.now);
        }
        counts
    }
}

/// The router sent six requests of a prompt of 4,032 tokens to the engine that had computed it; another engine of the same daemon
/// stayed idle, although it would have loaded the prompt.
#[test]
fn a_prompt_that_the_pool_has_goes_to_both_engines_of_the_pool() {
    let of = |pools: [Option<&str>; 2]| {
        let mut world = World::new(Policy::LeastWork, &pools);
        world.serve(&prompt(1, PIECES), Duration::from_millis(100));
        let mut counts = world.at_once(&prompt(1, PIECES), 6);
        counts.sort_unstable();
        counts
    };
    assert_eq!(of([Some("a"), Some("a")]), [3, 3]);
    for apart in [[None, None], [Some("a"), Some("b")], [Some("a"), None]] {
        assert_eq!(of(apart), [0, 6], "{apart:?}: nothing is shared");
    }
}

#[test]
fn a_node_that_has_the_prompt_itself_comes_before_those_that_would_load_it() {
    let mut world = World::new(Policy::LeastWork, &[Some("a"); 4]);
    let first = world.serve(&prompt(1, PIECES), Duration::from_millis(100));
    for _ in 0..8 {
        assert_eq!(world.serve(&prompt(1, PIECES + 4), Duration::from_millis(5)), first);
    }
}

/// A pool has nothing of a prompt that is still being prefilled: the other node would compute it too.
#[test]
fn a_prompt_that_nobody_has_prefilled_is_not_in_the_pool() {
    let given = |pool: Option<&str>| {
        let mut world = World::new(Policy::LeastWork, &[pool; 2]);
        let held: Vec<_> = (0..9).map(|turn| world.ask(&prompt(turn % 2, PIECES))).collect();
        let numbers: Vec<usize> = held.iter().map(|(number, _)| *number).collect();
        for (_, each) in held {
            world.scheduler.end(each, LegEnd::Served, world.now);
        }
        numbers
    };
    assert_eq!(given(Some("a")), given(None));
}

/// Loads are as slow as computing, as if the pool had evicted its prompts, so the router must not move prompts.
#[test]
fn what_a_load_takes_is_learned_from_first_tokens() {
    let learned = |load_us: u64| {
        let mut world = World::new(Policy::LeastWork, &[Some("a"), Some("a")]);
        for name in 0..600 {
            let marks = prompt(name, 8 + (name * 37 % 60) as u32);
            let tokens = 64 * marks.len() as u64;
            let first = world.serve(&marks, Duration::from_micros(10_000 + 100 * tokens));
            // The holder is away for a moment, and the other one loads the prompt.
            world.scheduler.node_mut(world.ids[first]).unwrap().state = NodeState::Draining;
            assert_eq!(world.serve(&marks, Duration::from_micros(10_100 + load_us * tokens)), 1 - first);
            world.scheduler.node_mut(world.ids[first]).unwrap().state = NodeState::Ready;
        }
        let (share, is_learned) = world.scheduler.load_share("");
        assert!(is_learned);
        world.serve(&prompt(9999, PIECES), Duration::from_millis(400));
        let counts = world.at_once(&prompt(9999, PIECES), 6);
        (share, counts.into_iter().min().unwrap())
    };
    let (cheap, spread) = learned(2);
    assert!((cheap - 0.02).abs() < 0.01 && spread >= 2, "{cheap} {spread}");
    let (dear, spread) = learned(100);
    assert!(dear > 0.9 && spread == 0, "{dear} {spread}");
}

#[test]
fn a_pool_is_forgotten_with_its_last_node_and_a_configured_one_stays() {
    let mut world = World::new(Policy::LeastWork, &[Some("a"), Some("a")]);
    world.serve(&prompt(1, PIECES), Duration::from_millis(100));
    let [one, other] = [world.ids[0], world.ids[1]];
    // The daemon restarted, so both engines name another run.
    for id in [one, other] {
        world.scheduler.set_pool(id, Some(&"b".into()), false);
        world.scheduler.set_pool(id, Some(&"a".into()), false);
        world.scheduler.set_pool(id, Some(&"b".into()), false);
    }
    assert!(world.at_once(&prompt(1, PIECES), 6).contains(&0));
    world.scheduler.set_pool(one, Some(&"c".into()), true);
    world.scheduler.set_pool(one, Some(&"b".into()), false);
    world.scheduler.set_pool(one, None, false);
    assert_eq!(world.scheduler.node(one).unwrap().pool(), Some("c"));
    world.scheduler.set_pool(other, None, false);
    assert_eq!(world.scheduler.node(other).unwrap().pool(), None);
    world.scheduler.remove(one);
    assert_eq!(world.scheduler.set_pool(one, Some(&"c".into()), true), None, "it has gone");
}

/// Events tell that the pool has evicted the prompt, which the texts do not know.
#[test]
fn what_engines_tell_of_their_pool_counts_more_than_texts() {
    let mut world = World::new(Policy::LeastWork, &[Some("a"), Some("a")]);
    let marks = prompt(1, PIECES);
    let first = world.serve(&marks, Duration::from_millis(100));
    let slot = world.scheduler.set_pool(world.ids[0], Some(&"a".into()), false).unwrap();
    for (pooled, wanted) in [(0, 0), (3000, 3000)] {
        let mut prefixes = CachedPrefixes::of_length(4032);
        for id in &world.ids {
            prefixes.set(*id, Cached { tokens: 0, block_size: 16 });
        }
        prefixes.set_pooled(slot, pooled);
        world.scheduler.node_mut(world.ids[first]).unwrap().state = NodeState::Draining;
        let (number, cached, reservation) = world.ask_with(&marks, prefixes);
        assert_eq!((number, cached), (1 - first, wanted));
        world.scheduler.node_mut(world.ids[first]).unwrap().state = NodeState::Ready;
        world.scheduler.end(reservation, LegEnd::Served, world.now);
    }
}
