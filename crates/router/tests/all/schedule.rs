//! Choices: each policy, pairs, failures, and that every reservation is released. "Complaint n" is a report of users of other
//! routers (docs/choosing.md names them).
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::time::{Duration, Instant};

use kvlane_router::{
    body::Mark,
    schedule::{
        Choice, Chosen, Connector, Doubt, LegEnd, NoNode, Node, NodeId, NodeState, Pairing, Policy, Reported,
        Request, Reservation, Role, Scheduler, SchedulerSettings, Turn, Why,
    },
};
use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_64_with_seed;

fn prompt(name: u64, pieces: u32) -> Vec<Mark> {
    let mut hash = name;
    (1..=pieces)
        .map(|piece| {
            hash = xxh3_64_with_seed(b"piece", hash);
            Mark { hash, bytes: piece * 256 }
        })
        .collect()
}

fn node(name: &str, role: Role) -> Node {
    let mut node = Node::new(name, role, "");
    node.models = vec!["m".into()];
    node.state = NodeState::Ready;
    node
}

struct World {
    scheduler: Scheduler,
    ids: Vec<NodeId>,
    now: Instant,
}

impl World {
    fn new(policy: Policy, roles: &[Role]) -> Self {
        let settings = SchedulerSettings {
            policy,
            decode_policy: policy,
            seed: 1,
            marks_max: 1 << 12,
            ..SchedulerSettings::default()
        };
        let mut scheduler = Scheduler::new(settings);
        let ids = roles
            .iter()
            .enumerate()
            .map(|(at, &role)| scheduler.add(node(&format!("n{at}"), role)))
            .collect();
        Self { scheduler, ids, now: Instant::now() }
    }

    fn workers(policy: Policy, count: usize) -> Self {
        Self::new(policy, &vec![Role::Worker; count])
    }

    fn ask(&mut self, marks: &[Mark]) -> Result<Choice, NoNode> {
        self.ask_without(marks, &[])
    }

    fn ask_without(&mut self, marks: &[Mark], tried: &[NodeId]) -> Result<Choice, NoNode> {
        let request = Request { model: Some("m"), marks, one_node: false, streams: true, tried };
        self.scheduler.choose(&request, self.now)
    }

    /// Asks, and answers the number of the only node.
    fn one(&mut self, marks: &[Mark]) -> (usize, Reservation) {
        match self.ask(marks).unwrap().chosen {
            Chosen::One(reservation) => (self.number(reservation.node), reservation),
            Chosen::Pair { .. } => panic!("a pair"),
        }
    }

    fn pair(&mut self, marks: &[Mark]) -> (Reservation, Reservation) {
        match self.ask(marks).unwrap().chosen {
            Chosen::Pair { prefill, decode } => (prefill, decode),
            Chosen::One(_) => panic!("one node"),
        }
    }

    fn number(&self, id: NodeId) -> usize {
        self.ids.iter().position(|each| *each == id).unwrap()
    }

    fn end(&mut self, reservation: Reservation) {
        self.scheduler.end(reservation, LegEnd::Served, self.now);
    }

    fn is_at_rest(&self) -> bool {
        self.scheduler.nodes().all(|(_, node)| node.load.own_requests == 0 && node.load.own_tokens == 0)
    }
}

#[test]
fn a_prompt_goes_where_its_prefix_is() {
    for policy in [Policy::LeastWork, Policy::PrefixAffinity] {
        let mut world = World::workers(policy, 4);
        let (first, reservation) = world.one(&prompt(1, 20));
        world.end(reservation);
        for other in 2..6 {
            let (_, reservation) = world.one(&prompt(other, 20));
            world.end(reservation);
        }
        let choice = world.ask(&prompt(1, 30)).unwrap();
        assert_eq!((choice.prompt_tokens, choice.cached_tokens), (30 * 64, 20 * 64), "{policy}");
        let Chosen::One(reservation) = choice.chosen else { panic!("a pair") };
        assert_eq!(world.number(reservation.node), first, "{policy}");
        world.end(reservation);
    }
}

/// Complaint 1: a prompt that nobody has goes to the same node each time when little is to do. Complaint 2: to the smallest tree
/// whatever its load.
#[test]
fn prompts_that_nobody_has_are_spread() {
    for policy in Policy::ALL {
        let mut world = World::workers(policy, 4);
        let mut counts = [0; 4];
        for name in 0..400 {
            let (number, reservation) = world.one(&prompt(name, 10));
            counts[number] += 1;
            world.end(reservation);
        }
        assert!(counts.iter().all(|count| (60..=140).contains(count)), "{policy}: {counts:?}");
    }
}

/// Complaint 3: load that counts only when an answer starts sends a burst to one node.
#[test]
fn a_burst_is_spread_at_once() {
    for policy in [Policy::RoundRobin, Policy::LeastLoaded, Policy::PrefixAffinity, Policy::LeastWork] {
        let mut world = World::workers(policy, 4);
        let mut counts = [0; 4];
        let mut held = Vec::new();
        for name in 0..100 {
            let (number, reservation) = world.one(&prompt(name, 10));
            counts[number] += 1;
            held.push(reservation);
        }
        assert_eq!(counts, [25; 4], "{policy}");
        held.into_iter().for_each(|reservation| world.end(reservation));
        assert!(world.is_at_rest());
    }
}

/// A shared prefix draws all requests to one node only until its load outweighs what is saved.
#[test]
fn a_hot_prefix_does_not_drown_its_node() {
    for policy in [Policy::PrefixAffinity, Policy::LeastWork] {
        let mut world = World::workers(policy, 4);
        let (_, reservation) = world.one(&prompt(1, 50));
        world.end(reservation);
        let mut counts = [0; 4];
        for _ in 0..100 {
            let (number, mut reservation) = world.one(&prompt(1, 50));
            counts[number] += 1;
            world.scheduler.prefilled(&mut reservation, &prompt(1, 50), world.now);
            drop(reservation);
        }
        assert!(counts.iter().all(|&count| count < 60), "{policy}: {counts:?}");
    }
}

/// Complaint 6: one imbalance throws away all affinity. Complaint 19: one node out of service does.
#[test]
fn affinity_outlives_imbalance_and_a_suspect() {
    for policy in [Policy::PrefixAffinity, Policy::LeastWork] {
        let mut world = World::workers(policy, 3);
        let (home, reservation) = world.one(&prompt(1, 50));
        world.end(reservation);
        let other = (home + 1) % 3;
        let id = world.ids[other];
        world.scheduler.node_mut(id).unwrap().state = NodeState::Suspect;
        world.scheduler.node_mut(world.ids[(home + 2) % 3]).unwrap().load.other_requests = 100;
        for _ in 0..20 {
            let (number, reservation) = world.one(&prompt(1, 50));
            assert_eq!(number, home, "{policy}");
            world.end(reservation);
        }
    }
}

/// Complaint 32: health checks reset the load.
#[test]
fn what_metrics_say_does_not_touch_own_counters() {
    let mut world = World::workers(Policy::LeastLoaded, 2);
    let (number, held) = world.one(&prompt(1, 4));
    let id = world.ids[number];
    let reported = |requests| Reported { requests, ..Reported::default() };
    let load = &mut world.scheduler.node_mut(id).unwrap().load;
    load.observe(reported(0), 1);
    assert_eq!((load.own_requests, load.other_requests, load.batch()), (1, 0, 1));
    load.observe(reported(5), 1);
    assert_eq!((load.own_requests, load.other_requests, load.batch()), (1, 4, 5));
    world.end(held);
    assert_eq!(world.scheduler.node(id).unwrap().load.batch(), 4);
}

#[test]
fn long_prompts_are_prefilled_apart_and_short_or_cached_ones_stay() {
    let mut world = World::new(Policy::LeastWork, &[Role::Prefill, Role::Decode]);
    let short = world.ask(&prompt(1, 1)).unwrap();
    assert_eq!(short.why, Why::Short);
    let Chosen::One(reservation) = short.chosen else { panic!("a pair") };
    assert_eq!(world.number(reservation.node), 1);
    world.end(reservation);
    let (prefill, mut decode) = world.pair(&prompt(2, 20));
    world.scheduler.prefilled(&mut decode, &prompt(2, 20), world.now);
    assert_eq!((world.number(prefill.node), world.number(decode.node)), (0, 1));
    world.end(prefill);
    world.end(decode);
    let cached = world.ask(&prompt(2, 21)).unwrap();
    assert_eq!((cached.why, cached.prompt_tokens, cached.cached_tokens), (Why::Cached, 21 * 64, 20 * 64));
    let Chosen::One(reservation) = cached.chosen else { panic!("a pair") };
    world.end(reservation);
    let request =
        Request { model: Some("m"), marks: &prompt(3, 50), one_node: true, streams: true, tried: &[] };
    let stays = world.scheduler.choose(&request, world.now).unwrap();
    assert_eq!(stays.why, Why::MustStay);
    let Chosen::One(reservation) = stays.chosen else { panic!("a pair") };
    assert_eq!(world.number(reservation.node), 1, "the decode node, which holds what comes after the prompt");
    world.end(reservation);
    assert!(world.is_at_rest());
}

/// One counter for both roles, as the P2P NCCL proxy has, never sends some pairs anything.
#[test]
fn every_pair_occurs() {
    for policy in Policy::ALL {
        let mut world = World::new(
            policy,
            &[Role::Prefill, Role::Prefill, Role::Prefill, Role::Prefill, Role::Decode, Role::Decode],
        );
        let mut pairs = std::collections::BTreeSet::new();
        let mut held: Vec<Reservation> = Vec::new();
        for name in 0..400 {
            let (prefill, decode) = world.pair(&prompt(name, 10));
            pairs.insert((world.number(prefill.node), world.number(decode.node)));
            world.end(prefill);
            held.push(decode);
            // Some answers are longer than others.
            if name % 3 == 1 {
                let oldest = held.remove((name % 2) as usize);
                world.end(oldest);
            }
        }
        assert_eq!(pairs.len(), 8, "{policy}: {pairs:?}");
    }
}

#[test]
fn pairs_stay_within_their_group() {
    let mut world =
        World::new(Policy::LeastLoaded, &[Role::Prefill, Role::Decode, Role::Prefill, Role::Decode]);
    for (at, group) in ["a", "a", "b", "b"].iter().enumerate() {
        world.scheduler.node_mut(world.ids[at]).unwrap().group = (*group).into();
    }
    for name in 0..20 {
        let (prefill, decode) = world.pair(&prompt(name, 10));
        assert_eq!(world.number(prefill.node) / 2, world.number(decode.node) / 2);
    }
    world.scheduler.node_mut(world.ids[1]).unwrap().state = NodeState::Draining;
    for name in 20..40 {
        let (prefill, decode) = world.pair(&prompt(name, 10));
        assert_eq!((world.number(prefill.node), world.number(decode.node)), (2, 3), "a has no decode node");
    }
}

#[test]
fn whoever_lives_serves() {
    let roles = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];
    let mut world = World::new(Policy::LeastWork, &roles);
    let marks = prompt(1, 10);
    let (prefill, decode) = world.pair(&marks);
    let (p, d) = (prefill.node, decode.node);
    world.scheduler.end(prefill, LegEnd::Failed, world.now);
    world.scheduler.end(decode, LegEnd::Left, world.now);
    let Chosen::Pair { prefill, decode } = world.ask_without(&marks, &[p]).unwrap().chosen else {
        panic!("one")
    };
    assert_ne!(prefill.node, p);
    let request = Request { model: Some("m"), marks: &marks, one_node: false, streams: true, tried: &[d] };
    let again = world.scheduler.choose_decode(&request, prefill.node, world.now).unwrap();
    assert_ne!(again.node, d);
    let alone = world.ask_without(&marks, &[world.ids[0], world.ids[1]]).unwrap();
    assert_eq!(alone.why, Why::OtherRole);
    let last = world.ask_without(&marks, &[world.ids[0], world.ids[2], world.ids[3]]).unwrap();
    assert_eq!(last.why, Why::OtherRole);
    let Chosen::One(last) = last.chosen else { panic!("a pair") };
    assert_eq!(last.node, world.ids[1]);
    let all = world.ids.clone();
    assert!(matches!(world.ask_without(&marks, &all), Err(NoNode::NoneLeft { .. })));
    for &id in &all {
        world.scheduler.node_mut(id).unwrap().state = NodeState::Suspect;
    }
    assert!(world.ask(&marks).is_ok(), "suspects are asked where nobody else is there");
    for &id in &all {
        world.scheduler.node_mut(id).unwrap().state = NodeState::Draining;
    }
    assert!(matches!(world.ask(&marks), Err(NoNode::NoneLeft { .. })));
    drop((prefill, decode, again, last));
}

#[test]
fn an_unknown_model_is_told_from_nobody_there() {
    let mut world = World::workers(Policy::LeastWork, 1);
    let ask = |world: &mut World, model| {
        let request = Request { model: Some(model), marks: &[], one_node: false, streams: true, tried: &[] };
        world.scheduler.choose(&request, world.now).map(|choice| choice.prompt_tokens)
    };
    assert_eq!(ask(&mut world, "m"), Ok(1));
    assert_eq!(ask(&mut world, "other"), Err(NoNode::UnknownModel { model: "other".into() }));
    world.scheduler.node_mut(world.ids[0]).unwrap().models.clear();
    assert!(matches!(ask(&mut world, "other"), Err(NoNode::NoneLeft { .. })));
}

#[test]
fn a_node_that_fails_is_left_alone_for_longer_and_longer() {
    let mut world = World::workers(Policy::LeastLoaded, 2);
    let bad = world.ids[0];
    let fail = |world: &mut World| loop {
        let (_, reservation) = world.one(&[]);
        let is_bad = reservation.node == bad;
        world.scheduler.end(reservation, if is_bad { LegEnd::Failed } else { LegEnd::Served }, world.now);
        if is_bad {
            return;
        }
    };
    (0..3).for_each(|_| fail(&mut world));
    for pause in [1, 2, 4, 8, 16, 30, 30] {
        for _ in 0..10 {
            let (number, reservation) = world.one(&[]);
            assert_eq!(number, 1, "it is open");
            world.end(reservation);
        }
        world.now += Duration::from_secs(pause);
        // One request tries it; while that one is there no other one does.
        let (number, trying) = world.one(&[]);
        assert_eq!(number, 0, "after {pause} s");
        let (number, other) = world.one(&[]);
        assert_eq!(number, 1);
        world.end(other);
        world.scheduler.end(trying, LegEnd::Failed, world.now);
    }
    world.now += Duration::from_secs(30);
    let (number, trying) = world.one(&[]);
    assert_eq!(number, 0);
    world.end(trying);
    let counts: Vec<usize> = (0..4).map(|_| world.one(&[]).0).collect();
    assert_eq!(counts.iter().filter(|&&number| number == 0).count(), 2, "it serves again");
}

/// Complaint 21: what a node had before it went, or started anew, counts no more.
#[test]
fn a_node_that_comes_back_has_no_prefix() {
    let mut world = World::workers(Policy::LeastWork, 2);
    let marks = prompt(1, 50);
    let (home, reservation) = world.one(&marks);
    let gone = world.ids[home];
    world.scheduler.remove(gone);
    world.end(reservation);
    world.ids[home] = world.scheduler.add(node("back", Role::Worker));
    assert_ne!(world.ids[home], gone);
    assert!(world.is_at_rest(), "the load of a node that went is not its successor's");
    assert_eq!(world.ask(&marks).unwrap().cached_tokens, 0);
    let (home, _) = world.one(&marks);
    world.scheduler.forget_prefixes(world.ids[home]);
    world.scheduler.forget_prefixes(world.ids[1 - home]);
    assert_eq!(world.ask(&marks).unwrap().cached_tokens, 0);
}

/// Nodes of two classes, of which one takes four times as long; each has answered so many prompts of different lengths.
fn of_two_speeds(answered: u32, streams: bool) -> World {
    let mut world = World::workers(Policy::LeastDelay, 2);
    for (id, class) in world.ids.clone().into_iter().zip(["fast", "slow"]) {
        world.scheduler.node_mut(id).unwrap().class = class.into();
    }
    for number in 0..answered {
        for (at, slower) in [(0, 1), (1, 4)] {
            let marks = prompt(u64::from(1000 + number), 1 + number * 7 % 90);
            let other = world.ids[1 - at];
            let request =
                Request { model: Some("m"), marks: &marks, one_node: false, streams, tried: &[other] };
            let Chosen::One(mut reservation) = world.scheduler.choose(&request, world.now).unwrap().chosen
            else {
                panic!("a pair")
            };
            assert_eq!(world.number(reservation.node), at);
            // 10 ms, and 20 us a token of four bytes.
            let took = Duration::from_micros(10_000 + 20 * u64::from(marks.last().unwrap().bytes) / 4);
            world.scheduler.prefilled(&mut reservation, &marks, world.now + slower * took);
            world.end(reservation);
        }
    }
    world
}

#[test]
fn where_first_tokens_come_sooner_is_learned_for_each_class_of_nodes() {
    let mut world = of_two_speeds(80, true);
    let classes = ["fast", "slow"].map(|class| world.scheduler.prediction(class).unwrap().clone());
    assert!(classes.iter().all(|each| each.is_calibrated() && each.error() < 0.1), "{classes:?}");
    // The slow node waits until the fast one has as much to do as it takes four times as long.
    let held: Vec<_> = (0..10).map(|name| world.one(&prompt(name, 60))).collect();
    let on_fast = held.iter().filter(|(number, _)| *number == 0).count();
    assert!((7..10).contains(&on_fast), "{on_fast}");
    assert_eq!(held[0].0, 0);
    held.into_iter().for_each(|(_, reservation)| world.end(reservation));
    assert!(world.is_at_rest());
}

#[test]
fn nothing_is_predicted_before_enough_first_tokens_came() {
    for (answered, streams) in [(40, true), (80, false)] {
        let mut world = of_two_speeds(answered, streams);
        let known = ["fast", "slow"].map(|class| world.scheduler.prediction(class).is_some());
        assert_eq!(known, [streams, streams], "whole answers say nothing of their first token");
        let held: Vec<_> = (0..10).map(|name| world.one(&prompt(name, 60))).collect();
        let on_fast = held.iter().filter(|(number, _)| *number == 0).count();
        assert_eq!(on_fast, 5, "as least-work");
        held.into_iter().for_each(|(_, reservation)| world.end(reservation));
    }
}

#[derive(Debug, Clone)]
enum Step {
    Ask { name: u64, pieces: u32, one_node: bool },
    Prefilled(usize),
    End(usize, u8),
    Remove(usize),
    Add(u8),
    State(usize, u8),
    Wait(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0u64..5, 0u32..12, any::<bool>()).prop_map(|(name, pieces, one_node)| Step::Ask { name, pieces, one_node }),
        3 => any::<usize>().prop_map(Step::Prefilled),
        5 => (any::<usize>(), 0u8..3).prop_map(|(at, end)| Step::End(at, end)),
        1 => any::<usize>().prop_map(Step::Remove),
        1 => (0u8..3).prop_map(Step::Add),
        1 => (any::<usize>(), 0u8..3).prop_map(|(at, state)| Step::State(at, state)),
        1 => (0u64..3000).prop_map(Step::Wait),
    ];
    prop::collection::vec(step, 0..120)
}

proptest! {
    /// Complaints 4 and 5. Reservations are never negative (a subtraction would panic), sum up to what is held, and are zero at
    /// rest, whatever joins, goes and fails meanwhile; a request is refused only when no node could take it.
    #[test]
    fn loads_are_what_is_held(steps in steps(), policy in prop::sample::select(&Policy::ALL[..])) {
        let roles = [Role::Prefill, Role::Decode, Role::Worker];
        let mut world = World::new(policy, &[Role::Prefill, Role::Decode, Role::Decode]);
        let mut held: Vec<Reservation> = Vec::new();
        for step in steps {
            match step {
                Step::Ask { name, pieces, one_node } => {
                    let marks = prompt(name, pieces);
                    let request = Request { model: Some("m"), marks: &marks, one_node, streams: true, tried: &[] };
                    let lives = world.scheduler.nodes().any(|(_, node)| node.state != NodeState::Draining);
                    match world.scheduler.choose(&request, world.now) {
                        Ok(Choice { chosen: Chosen::One(one), .. }) => held.push(one),
                        Ok(Choice { chosen: Chosen::Pair { prefill, decode }, .. }) => {
                            let group = |id| world.scheduler.node(id).unwrap().group.clone();
                            prop_assert!(!one_node);
                            prop_assert_eq!(group(prefill.node), group(decode.node));
                            held.extend([prefill, decode]);
                        }
                        Err(_) => prop_assert!(!lives),
                    }
                }
                Step::Prefilled(at) if !held.is_empty() => {
                    let at = at % held.len();
                    world.scheduler.prefilled(&mut held[at], &prompt(1, 3), world.now);
                }
                Step::End(at, end) if !held.is_empty() => {
                    let reservation = held.swap_remove(at % held.len());
                    let end = [LegEnd::Served, LegEnd::Failed, LegEnd::Left][end as usize];
                    world.scheduler.end(reservation, end, world.now);
                }
                Step::Remove(at) if !world.ids.is_empty() => {
                    let id = world.ids.swap_remove(at % world.ids.len());
                    prop_assert!(world.scheduler.remove(id).is_some());
                }
                Step::Add(role) => {
                    let id = world.scheduler.add(node("new", roles[role as usize]));
                    world.ids.push(id);
                }
                Step::State(at, state) if !world.ids.is_empty() => {
                    let id = world.ids[at % world.ids.len()];
                    let states = [NodeState::Ready, NodeState::Suspect, NodeState::Draining];
                    world.scheduler.node_mut(id).unwrap().state = states[state as usize];
                }
                Step::Wait(milliseconds) => world.now += Duration::from_millis(milliseconds),
                _ => {}
            }
            for (id, node) in world.scheduler.nodes() {
                let there = held.iter().filter(|each| each.node == id).count() as u64;
                prop_assert_eq!(node.load.own_requests, there);
            }
        }
        for reservation in held {
            world.scheduler.end(reservation, LegEnd::Served, world.now);
        }
        prop_assert!(world.is_at_rest());
    }
}

#[derive(Debug, Clone)]
struct Many {
    prefills: Vec<(u8, Connector)>,
    decodes: Vec<(u8, Connector)>,
}

fn many() -> impl Strategy<Value = Many> {
    let node = || (0u8..2, prop::sample::select(&Connector::ALL[..]));
    let role = || prop::collection::vec(node(), 1..7);
    (role(), role()).prop_map(|(prefills, decodes)| Many { prefills, decodes })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Pairs are of one group and one connector. All of them occur, whatever the numbers of both roles have in common; and a P2P
    /// NCCL node, which ends at an id without addresses, never serves a whole request.
    #[test]
    fn every_allowed_pair_occurs_and_no_other_one(
        many in many(),
        policy in prop::sample::select(&Policy::ALL[..]),
        seed in any::<u64>(),
    ) {
        let settings =
            SchedulerSettings { policy, decode_policy: policy, seed, marks_max: 1 << 12, ..SchedulerSettings::default() };
        let mut scheduler = Scheduler::new(settings);
        let now = Instant::now();
        let mut all = Vec::new();
        for (role, nodes) in [(Role::Prefill, &many.prefills), (Role::Decode, &many.decodes)] {
            for (number, (group, connector)) in nodes.iter().enumerate() {
                let mut node = node(&format!("{role}{number}"), role);
                node.group = group.to_string().into();
                node.connector = *connector;
                node.connector_address = Some(format!("{role}:{}", number + 1).into());
                all.push((scheduler.add(node), role, *group, *connector));
            }
        }
        let of = |id: NodeId| all.iter().find(|each| each.0 == id).unwrap();
        let allowed: std::collections::BTreeSet<_> = all
            .iter()
            .filter(|each| each.1 == Role::Prefill)
            .flat_map(|one| all.iter().map(move |other| (one, other)))
            .filter(|(one, other)| other.1 == Role::Decode && (one.2, one.3) == (other.2, other.3))
            .map(|(one, other)| (one.0, other.0))
            .collect();
        let mut met = std::collections::BTreeSet::new();
        for name in 0..1500 {
            let marks = prompt(name, 10);
            let request = Request { model: Some("m"), marks: &marks, one_node: name % 10 == 9, streams: name % 2 == 0, tried: &[] };
            match scheduler.choose(&request, now).map(|choice| choice.chosen) {
                Ok(Chosen::Pair { prefill, decode }) => {
                    met.insert((prefill.node, decode.node));
                    scheduler.end(prefill, LegEnd::Served, now);
                    scheduler.end(decode, LegEnd::Served, now);
                }
                Ok(Chosen::One(one)) => {
                    prop_assert_ne!(of(one.node).3, Connector::P2pNccl);
                    scheduler.end(one, LegEnd::Served, now);
                }
                Err(_) => prop_assert!(all.iter().all(|each| each.3 == Connector::P2pNccl)),
            }
        }
        prop_assert_eq!(met, allowed);
    }
}

/// Who decodes looks for who prefills, and not the other way round; P2P NCCL engines look for each other.
#[test]
fn a_pair_needs_the_addresses_that_one_of_both_looks_for() {
    let of = |connector, has_address: bool| {
        let mut node = node("node", Role::Prefill);
        node.connector = connector;
        node.connector_address = has_address.then(|| "127.0.0.1:1".into());
        node
    };
    for (connector, expected) in [
        (Connector::Store, [true; 4]),
        (Connector::Nixl, [true; 4]),
        (Connector::Direct, [false, false, true, true]),
        (Connector::P2pNccl, [false, false, false, true]),
    ] {
        let cases = [(false, false), (false, true), (true, false), (true, true)];
        let pairs = cases.map(|(prefill, decode)| of(connector, prefill).pairs_with(&of(connector, decode)));
        assert_eq!(pairs, expected, "{connector}");
    }
}

/// A prefill node, a decode node beside it, and two on another host, to which a hand-over takes 200 ms in place of 5.
fn near_and_far(handed_over: u64, policy: Policy) -> World {
    let mut world = World::new(policy, &[Role::Prefill, Role::Decode, Role::Decode, Role::Decode]);
    for (id, host) in world.ids.clone().into_iter().zip(["a", "a", "b", "b"]) {
        world.scheduler.node_mut(id).unwrap().host = host.into();
    }
    for number in 0..handed_over {
        let marks = prompt(1000 + number, 20 + number as u32 % 7);
        let (mut prefill, mut decode) = world.pair(&marks);
        world.scheduler.prefilled(&mut prefill, &marks, world.now);
        world.end(prefill);
        let takes = if world.number(decode.node) == 1 { 5 } else { 200 };
        world.now += Duration::from_millis(takes);
        world.scheduler.prefilled(&mut decode, &marks, world.now);
        world.end(decode);
    }
    assert!(world.is_at_rest());
    world
}

#[test]
fn a_prompt_is_handed_over_to_where_it_is_soonest_as_long_as_there_is_room() {
    let mut world = near_and_far(400, Policy::LeastDelay);
    let mut beside = Vec::new();
    for name in 0..20 {
        let (prefill, decode) = world.pair(&prompt(name, 20));
        assert_eq!(world.number(decode.node), 1, "{name} requests are there");
        beside.extend([prefill, decode]);
    }
    beside.into_iter().for_each(|leg| world.end(leg));
    let id = world.ids[1];
    world.scheduler.node_mut(id).unwrap().load.cache_percent = Some(95);
    let (prefill, decode) = world.pair(&prompt(51, 20));
    assert_ne!(world.number(decode.node), 1, "it has no room");
    [prefill, decode].into_iter().for_each(|leg| world.end(leg));
}

/// A network that was slow for a while would be left alone for ever.
#[test]
fn a_way_that_was_not_taken_for_a_while_is_tried_again() {
    let mut world = near_and_far(400, Policy::LeastDelay);
    let mut taken = |world: &mut World| {
        let (prefill, decode) = world.pair(&prompt(7, 20));
        let number = world.number(decode.node);
        [prefill, decode].into_iter().for_each(|leg| world.end(leg));
        number
    };
    let counts = |world: &mut World, taken: &mut dyn FnMut(&mut World) -> usize| {
        let mut counts = [0; 4];
        (0..30).for_each(|_| counts[taken(world)] += 1);
        counts
    };
    assert_eq!(counts(&mut world, &mut taken)[1], 30);
    world.now += Duration::from_secs(61);
    let found = counts(&mut world, &mut taken);
    assert!(found[2] >= 9 && found[3] >= 9, "{found:?}");
}

#[test]
fn where_hand_overs_are_not_known_or_another_policy_decides_all_decode_nodes_get_prompts() {
    for (handed_over, policy) in
        [(9, Policy::LeastDelay), (400, Policy::LeastWork), (400, Policy::RoundRobin)]
    {
        let mut world = near_and_far(handed_over, policy);
        let mut counts = [0; 4];
        for name in 0..30 {
            let (prefill, decode) = world.pair(&prompt(name, 20));
            counts[world.number(decode.node)] += 1;
            [prefill, decode].into_iter().for_each(|leg| world.end(leg));
        }
        assert!(counts[1..].iter().all(|count| *count >= 9), "{policy} {handed_over}: {counts:?}");
    }
}

/// Two nodes that answer 500 at once have the least to do. Without doubts each request would go to these two, and to no third.
#[test]
fn a_second_try_goes_to_a_node_that_nobody_doubts() {
    let mut world = World::workers(Policy::LeastLoaded, 3);
    let ids = world.ids.clone();
    let doubt = Doubt { client: 1, request: 1 };
    let (_, busy) = world.one(&[]);
    for id in ids.iter().filter(|id| **id != busy.node) {
        assert_eq!(world.scheduler.doubt(*id, doubt, world.now), None);
    }
    let doubted: Vec<NodeId> = ids.iter().copied().filter(|id| *id != busy.node).collect();
    let first = world.one(&[]).1;
    assert!(doubted.contains(&first.node), "a first try knows nothing of doubts");
    let second = world.ask_without(&[], &[first.node]).unwrap();
    let Chosen::One(second) = second.chosen else { panic!("a pair") };
    assert_eq!(second.node, busy.node);
    let third = world.ask_without(&[], &[first.node, second.node]).unwrap();
    let Chosen::One(third) = third.chosen else { panic!("a pair") };
    assert!(doubted.contains(&third.node), "where no other one is left");
    drop((busy, first, second, third));
}

#[test]
fn a_500_counts_when_another_node_serves_the_request_even_after_the_pause() {
    let mut world = World::workers(Policy::LeastLoaded, 1);
    let id = world.ids[0];
    let doubt = |request| Doubt { client: 1, request };
    for request in 0..2 {
        assert_eq!(world.scheduler.doubt(id, doubt(request), world.now), None);
        assert_eq!(world.scheduler.convict(id, doubt(request), world.now), None);
    }
    assert_eq!(world.scheduler.doubt(id, doubt(2), world.now), None);
    let pause = Duration::from_secs(1);
    let ejected = world.scheduler.convict(id, doubt(2), world.now);
    assert_eq!(ejected, Some(Turn::Ejected { pause, failures: 3 }));
    world.now += pause;
    let (_, trial) = world.one(&[]);
    assert_eq!(world.scheduler.end(trial, LegEnd::InDoubt, world.now), None);
    assert_eq!(world.scheduler.doubt(id, doubt(3), world.now), None);
    let again = world.scheduler.convict(id, doubt(3), world.now);
    assert_eq!(again, Some(Turn::Ejected { pause: pause * 2, failures: 4 }), "the trial has failed");
    world.now += pause * 2;
    let (_, trial) = world.one(&[]);
    let returned = world.scheduler.end(trial, LegEnd::Served, world.now);
    assert_eq!(returned, Some(Turn::Returned { after: pause * 3 }));
}

#[test]
fn a_prefill_node_that_hands_nothing_over_gets_a_pair_now_and_then() {
    let mut world = World::new(Policy::LeastWork, &[Role::Prefill, Role::Decode]);
    let (prefill, decode) = (world.ids[0], world.ids[1]);
    for name in 0..3 {
        let (one, other) = world.pair(&prompt(name, 20));
        world.scheduler.prefill_answered(prefill, false, world.now);
        world.end(one);
        world.end(other);
    }
    for name in 3..6 {
        let choice = world.ask(&prompt(name, 20)).unwrap();
        assert_eq!(choice.why, Why::NoHandOff);
        let Chosen::One(alone) = choice.chosen else { panic!("a pair") };
        assert_eq!(alone.node, decode);
        world.end(alone);
    }
    world.now += Duration::from_secs(10);
    let (one, other) = world.pair(&prompt(6, 20));
    assert_eq!(world.ask(&prompt(7, 20)).unwrap().why, Why::NoHandOff, "one at a time");
    assert_eq!(world.scheduler.prefill_answered(prefill, true, world.now), Pairing::Resumed);
    world.end(one);
    world.end(other);
    assert_eq!(world.ask(&prompt(8, 20)).unwrap().why, Why::Pair);
}
