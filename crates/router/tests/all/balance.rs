//! The balancer: it changes the nodes' roles as the work changes.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::{Duration, Instant};

use kvlane_router::balance::{Act, BalanceSettings, Balancer, Balancers, Capacity, Sample, State, View};
use kvlane_router::schedule::{Node, NodeId, NodeState, Role, Scheduler};
use proptest::prelude::*;

const CAPACITY: Capacity = Capacity {
    prefill_rate: 10_000.0,
    decodes: 100.0,
    step_tokens: 8000.0,
    queue: 8.0,
    ttft: Duration::from_secs(2),
};

fn ids(count: usize) -> Vec<NodeId> {
    let mut scheduler = Scheduler::new(kvlane_router::schedule::SchedulerSettings::default());
    (0..count).map(|_| scheduler.add(Node::new("a", Role::Worker, ""))).collect()
}

fn view(id: NodeId, role: Role) -> View {
    View {
        id,
        role,
        next_role: None,
        may_flip: true,
        is_ready: true,
        requests: 0,
        leans_to_prefill: None,
        sample: Sample::default(),
        capacity: CAPACITY,
    }
}

/// Tokens to prefill at each prefill node, requests at each decode node.
fn loaded(views: &mut [View], prefill_tokens: u64, decoding: u64) {
    for view in views {
        view.sample = match view.role {
            Role::Prefill => Sample { prefill_tokens, ..Sample::default() },
            _ => Sample { decoding, ..Sample::default() },
        };
    }
}

/// Does what is to be done.
fn carry_out(views: &mut [View], acts: &[Act]) {
    for act in acts {
        let (Act::Drain(id, role) | Act::Turn(id, role)) = *act else { continue };
        let view = views.iter_mut().find(|view| view.id == id).unwrap();
        match act {
            Act::Drain(..) => view.next_role = Some(role),
            _ => (view.role, view.next_role) = (role, None),
        }
    }
}

/// Eight workers that have got their roles, four of each.
fn eight(settings: BalanceSettings, now: Instant) -> (Balancer, Vec<View>) {
    let mut balancer = Balancer::new(settings);
    let mut views: Vec<View> = ids(8).into_iter().map(|id| view(id, Role::Worker)).collect();
    let acts = balancer.tick(&views, now);
    carry_out(&mut views, &acts);
    assert_eq!(prefill_nodes(&views), 4);
    (balancer, views)
}

fn serving(views: &[View], role: Role) -> usize {
    views.iter().filter(|view| view.is_ready && view.role == role && view.next_role.is_none()).count()
}

fn prefill_nodes(views: &[View]) -> usize {
    views.iter().filter(|view| view.role == Role::Prefill).count()
}

/// So many looks at an unchanged load.
fn looks(
    balancer: &mut Balancer,
    views: &mut [View],
    now: &mut Instant,
    (prefill_tokens, decoding): (u64, u64),
    count: usize,
) -> Vec<Act> {
    let mut all = Vec::new();
    for _ in 0..count {
        *now += balancer.settings().every;
        loaded(views, prefill_tokens, decoding);
        let acts = balancer.tick(views, *now);
        carry_out(views, &acts);
        all.extend(acts);
    }
    all
}

#[test]
fn states_follow_both_levels() {
    let (busy, some, idle) = (40_000, 6000, 0);
    let (full, half, none) = (120, 50, 0);
    let rows = [
        (idle, none, State::Underload),
        (some, none, State::Normal),
        (idle, half, State::Normal),
        (some, half, State::Normal),
        (busy, none, State::Imbalanced(Role::Prefill)),
        (busy, half, State::Imbalanced(Role::Prefill)),
        (idle, full, State::Imbalanced(Role::Decode)),
        (some, full, State::Imbalanced(Role::Decode)),
        (busy, full, State::Overload),
    ];
    for (prefill_tokens, decoding, wanted) in rows {
        let mut now = Instant::now();
        let (mut balancer, mut views) =
            eight(BalanceSettings { flips: true, ..BalanceSettings::default() }, now);
        // Nobody may change: only the state is looked at.
        views.iter_mut().for_each(|view| view.may_flip = false);
        looks(&mut balancer, &mut views, &mut now, (prefill_tokens, decoding), 40);
        assert_eq!(balancer.state(), wanted, "{prefill_tokens} {decoding} {:?}", balancer.scores());
    }
}

#[test]
fn idle_decode_nodes_become_prefill_nodes_and_come_back() {
    let mut now = Instant::now();
    let (mut balancer, mut views) = eight(BalanceSettings::default(), now);
    looks(&mut balancer, &mut views, &mut now, (40_000, 5), 400);
    assert_eq!(prefill_nodes(&views), 7, "one always decodes");
    looks(&mut balancer, &mut views, &mut now, (0, 120), 400);
    assert_eq!(prefill_nodes(&views), 1, "one always prefills");
    assert!(looks(&mut balancer, &mut views, &mut now, (0, 50), 400).is_empty(), "nothing has to change");
}

#[test]
fn a_node_whose_work_the_others_of_its_role_cannot_take_stays() {
    let mut now = Instant::now();
    let (mut balancer, mut views) = eight(BalanceSettings::default(), now);
    // Four decode nodes that are half full: three would be at two thirds, which is too much.
    let acts = looks(&mut balancer, &mut views, &mut now, (40_000, 62), 100);
    assert_eq!((balancer.state(), acts), (State::Imbalanced(Role::Prefill), vec![]));
}

#[test]
fn a_node_that_drains_changes_when_its_requests_are_over() {
    let mut now = Instant::now();
    let (mut balancer, mut views) =
        eight(BalanceSettings { drains: true, flips_at_once: 1, ..BalanceSettings::default() }, now);
    views.iter_mut().for_each(|view| view.requests = 3);
    let acts = looks(&mut balancer, &mut views, &mut now, (40_000, 5), 100);
    let [Act::Drain(id, Role::Prefill)] = acts[..] else { panic!("{acts:?}") };
    assert_eq!(prefill_nodes(&views), 4);
    views.iter_mut().find(|view| view.id == id).unwrap().requests = 0;
    let acts = looks(&mut balancer, &mut views, &mut now, (40_000, 5), 1);
    assert_eq!(acts[0], Act::Turn(id, Role::Prefill));
}

#[test]
fn the_node_that_is_better_at_it_changes_and_two_that_are_better_at_the_others_work_swap() {
    let mut now = Instant::now();
    let (mut balancer, mut views) = eight(BalanceSettings::default(), now);
    let decode: Vec<NodeId> =
        views.iter().filter(|view| view.role == Role::Decode).map(|view| view.id).collect();
    views
        .iter_mut()
        .for_each(|view| view.leans_to_prefill = Some(if view.id == decode[2] { 6.0 } else { 1.0 }));
    let acts = looks(&mut balancer, &mut views, &mut now, (40_000, 5), 41);
    assert!(acts.starts_with(&[Act::Turn(decode[2], Role::Prefill)]), "{acts:?}");

    let (mut balancer, mut views) = eight(BalanceSettings::default(), now);
    for view in &mut views {
        view.leans_to_prefill = Some(if view.role == Role::Decode { 6.0 } else { 1.0 });
    }
    looks(&mut balancer, &mut views, &mut now, (4000, 50), 400);
    let is_well = |view: &View| (view.role == Role::Prefill) == (view.leans_to_prefill == Some(6.0));
    assert!(views.iter().all(is_well), "{views:?}");
    assert!(looks(&mut balancer, &mut views, &mut now, (4000, 50), 400).is_empty(), "they stay so");
}

#[test]
fn nodes_are_asked_for_after_a_long_overload_and_offered_after_a_longer_underload() {
    let mut now = Instant::now();
    let (mut balancer, mut views) = eight(BalanceSettings::default(), now);
    views.iter_mut().for_each(|view| view.may_flip = false);
    let acts = looks(&mut balancer, &mut views, &mut now, (400_000, 150), 4 * 40);
    assert_eq!(acts, [Act::ScaleUp(Role::Prefill); 2], "once each 15 s");
    let acts = looks(&mut balancer, &mut views, &mut now, (10_000, 250), 4 * 20);
    assert_eq!(acts, [Act::ScaleUp(Role::Decode)]);
    let acts = looks(&mut balancer, &mut views, &mut now, (0, 3), 4 * 290);
    assert_eq!((balancer.state(), acts), (State::Underload, vec![]));
    let acts = looks(&mut balancer, &mut views, &mut now, (0, 3), 4 * 30);
    assert_eq!(acts, [Act::ScaleDown(Role::Prefill)]);
}

#[test]
fn a_role_that_loses_its_last_node_gets_another_one_at_once() {
    for (lost, other) in [(Role::Decode, Role::Prefill), (Role::Prefill, Role::Decode)] {
        let mut now = Instant::now();
        let (mut balancer, mut views) = eight(BalanceSettings::default(), now);
        views.iter_mut().filter(|view| view.role == lost).for_each(|view| view.is_ready = false);
        let acts = looks(&mut balancer, &mut views, &mut now, (40_000, 120), 1);
        let [Act::Turn(id, role)] = acts[..] else { panic!("{acts:?}") };
        assert_eq!(role, lost);
        assert_eq!((serving(&views, lost), serving(&views, other)), (1, 3), "{id}");
    }
}

#[test]
fn one_node_alone_keeps_serving_all_and_nothing_is_said_of_a_role_without_nodes() {
    let mut now = Instant::now();
    let mut balancer = Balancer::new(BalanceSettings::default());
    let mut views: Vec<View> = ids(3).into_iter().map(|id| view(id, Role::Worker)).collect();
    views[1].is_ready = false;
    views[2].is_ready = false;
    assert!(looks(&mut balancer, &mut views, &mut now, (40_000, 120), 40).is_empty());
    assert_eq!((balancer.state(), balancer.scores()), (State::Normal, (None, None)));
    views[1].is_ready = true;
    let acts = looks(&mut balancer, &mut views, &mut now, (0, 0), 1);
    assert_eq!(acts, [Act::Turn(views[0].id, Role::Decode), Act::Turn(views[1].id, Role::Prefill)]);
}

#[test]
fn nodes_of_two_models_are_two_groups() {
    let mut scheduler = Scheduler::new(kvlane_router::schedule::SchedulerSettings::default());
    let ids: Vec<NodeId> = ["a", "b", "a", "b"]
        .into_iter()
        .map(|model| {
            let mut node = Node::new(model, Role::Worker, "");
            (node.state, node.may_flip, node.models) = (NodeState::Ready, true, vec![model.into()]);
            scheduler.add(node)
        })
        .collect();
    Balancers::new(BalanceSettings::default()).tick(&mut scheduler, Instant::now());
    let roles: Vec<Role> = ids.iter().map(|id| scheduler.node(*id).unwrap().role).collect();
    assert_eq!(roles, [Role::Decode, Role::Decode, Role::Prefill, Role::Prefill]);
}

#[test]
fn decode_nodes_that_prefill_by_themselves_get_help() {
    let mut now = Instant::now();
    let (mut balancer, mut views) = eight(BalanceSettings::default(), now);
    for _ in 0..200 {
        now += balancer.settings().every;
        views.iter_mut().for_each(|view| {
            let prefill_tokens = if view.role == Role::Decode { 30_000 } else { 0 };
            view.sample = Sample { prefill_tokens, ..Sample::default() };
        });
        let acts = balancer.tick(&views, now);
        carry_out(&mut views, &acts);
    }
    assert_eq!(prefill_nodes(&views), 1);
}

#[test]
fn a_switch_that_is_off_changes_nothing() {
    let mut now = Instant::now();
    let mut balancer = Balancer::new(BalanceSettings { flips: false, ..BalanceSettings::default() });
    let mut views: Vec<View> = ids(4).into_iter().map(|id| view(id, Role::Worker)).collect();
    views[0].role = Role::Prefill;
    views[1].role = Role::Decode;
    assert!(looks(&mut balancer, &mut views, &mut now, (40_000, 5), 100).is_empty());
    assert_eq!(balancer.state(), State::Imbalanced(Role::Prefill));
}

/// One look of a random history: which node, its load, what is told, and how far the clock goes, back, too.
type Step = (usize, u64, u64, Option<f64>, Option<f64>, bool, i64);

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let told = prop::option::of(prop_oneof![0.0..2.0f64, Just(f64::NAN), Just(-1.0), Just(1e18)]);
    let leans = prop::option::of(0.1..10.0f64);
    let step = (0usize..6, 0u64..60_000, 0u64..200, told, leans, prop::bool::weighted(0.9), -2000i64..20_000);
    prop::collection::vec(step, 0..300)
}

proptest! {
    #[test]
    fn whatever_comes_no_role_is_emptied_and_no_node_changes_before_its_time(steps in steps(), drains: bool) {
        let settings = BalanceSettings { drains, ..BalanceSettings::default() };
        let mut balancer = Balancer::new(settings);
        let mut views: Vec<View> = ids(6).into_iter().map(|id| view(id, Role::Worker)).collect();
        let start = Instant::now() + Duration::from_secs(1000);
        let mut now = start;
        let mut changed = std::collections::HashMap::new();
        let acts = balancer.tick(&views, now);
        carry_out(&mut views, &acts);
        views.iter().for_each(|view| { changed.insert(view.id, now); });
        for (node, prefill_tokens, decoding, told, leans, is_ready, ms) in steps {
            now = if ms < 0 { now - Duration::from_millis(ms.unsigned_abs()) } else { now + Duration::from_millis(ms as u64) };
            let before = views.clone();
            views[node].sample = Sample {
                prefill_tokens, decoding, sending: told, waiting: told, preempted: told, step_tokens: told,
                cache_used: told, gpu_used: told, memory_used: told,
            };
            views[node].requests = decoding / 20;
            views[node].is_ready = is_ready;
            views[node].leans_to_prefill = leans;
            let served = [serving(&views, Role::Prefill), serving(&views, Role::Decode)];
            let acts = balancer.tick(&views, now);
            for act in &acts {
                let (Act::Drain(id, role) | Act::Turn(id, role)) = *act else { continue };
                let was = before.iter().find(|view| view.id == id).unwrap();
                prop_assert!(was.role != role || was.next_role.is_some(), "it has this role already");
                prop_assert!(role != Role::Worker);
                let is_empty = |role| serving(&views, role) == 0;
                if was.next_role.is_none() && !is_empty(role) {
                    let since: Instant = changed[&id];
                    prop_assert!(now.saturating_duration_since(since) >= settings.role_dwell);
                }
                if matches!(act, Act::Turn(..)) {
                    changed.insert(id, now);
                }
            }
            carry_out(&mut views, &acts);
            // Nobody takes a role's last node away; one that is lost is replaced, as long as the other role has two.
            for (role, other) in [(Role::Prefill, Role::Decode), (Role::Decode, Role::Prefill)] {
                let before = served[usize::from(role == Role::Decode)];
                prop_assert!(serving(&views, role) > 0 || before == 0, "{role} was emptied");
                let is_refilled = acts.iter().any(|act| matches!(act, Act::Turn(_, to) if *to == role));
                let is_alone = serving(&views, other) < 2;
                prop_assert!(serving(&views, role) > 0 || is_alone || is_refilled, "{role} stays empty");
            }
            for score in [balancer.scores().0, balancer.scores().1].into_iter().flatten() {
                prop_assert!((0.0..=2.0).contains(&score));
            }
        }
    }
}

#[test]
fn nodes_that_come_and_go_are_forgotten_and_a_new_one_gets_a_role() {
    let mut now = Instant::now();
    let (mut balancer, mut views) = eight(BalanceSettings::default(), now);
    let gone = views.pop().unwrap();
    looks(&mut balancer, &mut views, &mut now, (4000, 50), 1);
    assert!(balancer.score(gone.id).is_none());
    let mut scheduler = Scheduler::new(kvlane_router::schedule::SchedulerSettings::default());
    let mut node = Node::new("b", Role::Worker, "");
    (node.state, node.may_flip) = (NodeState::Ready, true);
    let mut other = Node::new("a", Role::Decode, "");
    other.state = NodeState::Ready;
    scheduler.add(other);
    let id = scheduler.add(node);
    let reports = Balancers::new(BalanceSettings::default()).tick(&mut scheduler, now);
    let [report] = &reports[..] else { panic!("{reports:?}") };
    assert_eq!(report.acts, [Act::Turn(id, Role::Prefill)], "the other one decodes already");
    assert_eq!(scheduler.node(id).unwrap().role, Role::Prefill);
}

#[test]
fn what_has_a_weight_and_no_node_tells_is_named_once() {
    let mut scheduler = Scheduler::new(kvlane_router::schedule::SchedulerSettings::default());
    let mut balancers = Balancers::new(BalanceSettings::default());
    for _ in 0..4 {
        let mut node = Node::new("a", Role::Worker, "");
        (node.state, node.may_flip) = (NodeState::Ready, true);
        scheduler.add(node);
    }
    let begin = Instant::now();
    let mut missing = Vec::new();
    for tick in 0..400 {
        let reports = balancers.tick(&mut scheduler, begin + Duration::from_millis(250 * tick));
        missing.extend(reports.into_iter().flat_map(|report| report.missing));
    }
    assert_eq!(missing, [(Role::Decode, "waiting"), (Role::Decode, "kv-cache")]);
}
