//! Traces through simulated fleets.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;
use std::time::Duration;

use kvlane_fleet::{
    Class, Costs, Limits, LiveEngine, LiveOutput, NodeSetup, PoolSetup, Request, Served, Setup, Signals,
    Summary, Trace, TransferSetup, replay,
};
use kvlane_router::balance::BalanceSettings;
use kvlane_router::schedule::{Policy, Role, SchedulerSettings};
use proptest::prelude::*;

mod lab;

const BLOCK: u64 = 512;

fn request(at_ms: u64, prompt: u64, output: u64, first_block: u64) -> Request {
    let blocks = (first_block..first_block + prompt.div_ceil(BLOCK)).collect();
    Request { at: Duration::from_millis(at_ms), prompt_tokens: prompt, output_tokens: output, blocks }
}

fn trace(requests: Vec<Request>) -> Trace {
    Trace::new(BLOCK, requests)
}

fn node(role: Role, class: &Class) -> NodeSetup {
    NodeSetup::new(role, Arc::new(class.clone()))
}

fn fleet(roles: &[Role], class: &Class, policy: Policy) -> Setup {
    Setup {
        nodes: roles.iter().map(|role| node(*role, class)).collect(),
        pools: Vec::new(),
        scheduler: SchedulerSettings { policy, decode_policy: policy, ..SchedulerSettings::default() },
        speed: 1.0,
        transfer: TransferSetup::default(),
        signals: Signals::default(),
        balance: None,
    }
}

fn run(trace: &Trace, setup: &Setup) -> Vec<Served> {
    replay(trace, setup, |_| ()).served
}

fn near(found: Duration, wanted: Duration) -> bool {
    found.abs_diff(wanted) < Duration::from_micros(1)
}

#[test]
fn a_request_alone_takes_what_the_formulas_say() {
    let (class, costs) = (Class::default(), Costs::H100_LLAMA_8B);
    let trace = trace(vec![request(10, 2000, 3, 0)]);
    let served = run(&trace, &fleet(&[Role::Worker], &class, Policy::LeastWork))[0];
    let first = costs.before(0) + costs.step(0, 0, std::iter::once((2000, 0)));
    assert!(near(served.first.unwrap(), first), "{served:?}");
    let decode = costs.step(1, 2001, std::iter::empty()) + costs.step(1, 2002, std::iter::empty());
    assert!(near(served.last.unwrap(), first + decode), "{served:?}");
    assert!(near(served.tpot().unwrap(), decode / 2));
}

#[test]
fn a_long_prompt_is_prefilled_in_parts_beside_what_decodes() {
    let class = Class { step_tokens: 1000, ..Class::default() };
    let trace = trace(vec![request(0, 100, 200, 0), request(500, 5000, 1, 100)]);
    let served = run(&trace, &fleet(&[Role::Worker], &class, Policy::LeastWork));
    let costs = Costs::H100_LLAMA_8B;
    // Six steps, of which each has one token of the request that decodes.
    let parts = [(999, 0), (999, 999), (999, 1998), (999, 2997), (999, 3996), (5, 4995)];
    let steps: Duration = parts.map(|part| costs.step(1, 170, std::iter::once(part))).iter().sum();
    let ttft = served[1].first.unwrap();
    assert!(ttft > steps && ttft < steps + Duration::from_millis(15), "{ttft:?} {steps:?}");
}

#[test]
fn what_a_node_has_is_not_prefilled_again() {
    let trace = trace(vec![request(0, 4096, 2, 0), request(5000, 4096, 2, 0), request(9000, 4096, 2, 500)]);
    let served = run(&trace, &fleet(&[Role::Worker], &Class::default(), Policy::LeastWork));
    assert_eq!([0, 1, 2].map(|index: usize| served[index].found_tokens), [0, 4095, 0]);
    assert!(served[1].first.unwrap() * 4 < served[0].first.unwrap());
    assert!(near(served[2].first.unwrap(), served[0].first.unwrap()));
    // With a cache of one block nothing is left.
    let small = Class { cached_tokens: BLOCK, ..Class::default() };
    let served = run(&trace, &fleet(&[Role::Worker], &small, Policy::LeastWork));
    assert!(served[1].found_tokens <= BLOCK);
}

#[test]
fn a_router_that_knows_prefixes_finds_more_of_them() {
    let turns = (0..200).map(|number| request(number * 100, 3000, 20, number % 11 * 100)).collect();
    let trace = trace(turns);
    let found = |policy| {
        let served = run(&trace, &fleet(&[Role::Worker; 4], &Class::default(), policy));
        let all = Limits { ttft: Duration::MAX, tpot: Duration::MAX };
        Summary::of(&served, all).found
    };
    let (by_turns, by_work) = (found(Policy::RoundRobin), found(Policy::LeastWork));
    assert!(by_work > 0.9 && by_work > by_turns + 0.05, "{by_work} {by_turns}");
}

#[test]
fn a_pair_hands_over_and_its_first_token_comes_from_the_node_that_decodes() {
    let transfer = TransferSetup { base_ms: 30.0, token_ms: 0.01, ..TransferSetup::default() };
    let setup =
        Setup { transfer, ..fleet(&[Role::Prefill, Role::Decode], &Class::default(), Policy::LeastWork) };
    let trace = trace(vec![request(0, 2000, 3, 0)]);
    let served = run(&trace, &setup)[0];
    assert_eq!((served.prefill, served.decode), (Some(0), Some(1)));
    let costs = Costs::H100_LLAMA_8B;
    let prefill = costs.before(0) + costs.step(0, 0, std::iter::once((2000, 0)));
    let last_token = costs.before(0) + costs.step(0, 0, std::iter::once((1, 1999)));
    let wanted = prefill + Duration::from_millis(50) + last_token;
    assert!(near(served.first.unwrap(), wanted), "{served:?} {wanted:?}");
    assert!(served.last.unwrap() > served.first.unwrap());
}

#[test]
fn an_engine_without_room_has_requests_wait_and_preempts_none_twice_for_ever() {
    let class = Class { kv_tokens: 3000, ..Class::default() };
    let trace = trace((0..20).map(|number| request(0, 900, 400, number * 10)).collect());
    let served = run(&trace, &fleet(&[Role::Worker], &class, Policy::LeastWork));
    assert!(served.iter().all(|each| each.last.is_some()), "{served:?}");
    let roomy = run(&trace, &fleet(&[Role::Worker], &Class::default(), Policy::LeastWork));
    let end = |served: &[Served]| served.iter().filter_map(|each| each.last).max().unwrap();
    assert!(end(&served) > 2 * end(&roomy));
    // One that fits nowhere runs alone.
    let tiny = Class { kv_tokens: 100, ..Class::default() };
    assert!(
        run(&trace, &fleet(&[Role::Worker], &tiny, Policy::LeastWork)).iter().all(|each| each.last.is_some())
    );
}

#[test]
fn when_a_node_dies_another_one_begins_what_nobody_has_heard_of() {
    let trace = trace((0..60).map(|number| request(number * 100, 8000, 50, number * 100)).collect());
    let mut setup = fleet(&[Role::Worker; 2], &Class::default(), Policy::LeastLoaded);
    setup.nodes[0].dies = Some((Duration::from_millis(2050), Some(Duration::from_secs(2))));
    let served = run(&trace, &setup);
    let lost: Vec<_> = served.iter().filter(|each| each.last.is_none()).collect();
    assert!(lost.iter().all(|each| each.first.is_some() && each.prefill == Some(0)), "{lost:?}");
    assert!(!lost.is_empty(), "somebody was amid an answer");
    assert!(served.iter().any(|each| each.attempts == 2 && each.last.is_some()));
    let after = |each: &&Served| each.at > Duration::from_secs(5);
    assert!(served.iter().filter(after).any(|each| each.prefill == Some(0)), "it has come back");
    // A fleet without nodes that live serves nobody, and ends.
    setup.nodes.iter_mut().for_each(|node| node.dies = Some((Duration::ZERO, None)));
    assert!(run(&trace, &setup).iter().all(|each| each.first.is_none()));
}

#[test]
fn faster_arrivals_make_longer_waits() {
    let trace = trace((0..300).map(|number| request(number * 500, 6000, 100, number * 100)).collect());
    let at = |speed| {
        let setup = Setup { speed, ..fleet(&[Role::Worker; 2], &Class::default(), Policy::LeastWork) };
        let limits = Limits { ttft: Duration::from_secs(1), tpot: Duration::from_millis(50) };
        Summary::of(&run(&trace, &setup), limits)
    };
    let (slow, fast) = (at(0.5), at(20.0));
    assert!(slow.within > 0.99 && fast.within < 0.5, "{slow:?} {fast:?}");
    assert!(fast.ttft_p99 > 10 * slow.ttft_p99);
}

/// Half of the nodes take three times as long. Who takes all for alike gives them as much work.
#[test]
fn a_router_that_learns_what_nodes_take_spares_the_slow_ones() {
    let all = (0..2000).map(|number| request(number * 60, 500 + number * 37 % 7000, 20, number * 100));
    let trace = trace(all.collect());
    let Costs { step, request, cached_token, token, pair, found, before } = Costs::H100_LLAMA_8B;
    let [step, request, token, pair] = [step, request, token, pair].map(|each| 3.0 * each);
    let costs = Costs { step, request, cached_token, token, pair, found, before };
    let slow = Class { name: "slow".into(), costs, ..Class::default() };
    let at = |policy| {
        let mut setup = fleet(&[Role::Worker; 2], &Class::default(), policy);
        setup.nodes.extend([node(Role::Worker, &slow), node(Role::Worker, &slow)]);
        Summary::of(&run(&trace, &setup), Limits { ttft: Duration::MAX, tpot: Duration::MAX })
    };
    let (blind, learning) = (at(Policy::LeastWork), at(Policy::LeastDelay));
    assert!(learning.ttft_p50 < blind.ttft_p50.mul_f64(0.9), "{learning:?} {blind:?}");
    assert!(learning.ttft_p99 < blind.ttft_p99.mul_f64(0.9), "{learning:?} {blind:?}");
}

/// A minute and a half of long prompts with short answers, then of the reverse.
fn swinging() -> Trace {
    let long = (0..4000).map(|number| request(number * 22, 3500 + number * 37 % 1500, 60, number * 100));
    let short = (0..6500).map(|number| request(90_000 + number * 13, 400, 700, 1_000_000 + number * 100));
    trace(long.chain(short).collect())
}

#[test]
fn roles_follow_the_work_and_serve_more_than_roles_that_stay() {
    let trace = swinging();
    let limits = Limits { ttft: Duration::from_millis(500), tpot: Duration::from_millis(30) };
    let within = |setup: &Setup| {
        let replayed = replay(&trace, setup, |_| ());
        (Summary::of(&replayed.served, limits), replayed.role_changes)
    };
    let (half, _) = within(&fleet(
        &[[Role::Prefill; 3], [Role::Decode; 3]].concat(),
        &Class::default(),
        Policy::LeastWork,
    ));
    let workers = fleet(&[Role::Worker; 6], &Class::default(), Policy::LeastWork);
    let settings = BalanceSettings {
        ttft: limits.ttft,
        tpot: limits.tpot,
        // Decode nodes that help out would do without changes.
        relief: 0.0,
        ..BalanceSettings::default()
    };
    for drains in [false, true] {
        let balance = Some(BalanceSettings { drains, ..settings });
        let (ours, changes) = within(&Setup { balance, ..workers.clone() });
        assert_eq!(ours.lost, 0);
        assert!(ours.within > half.within + 0.2, "{ours:?} {half:?}");
        let prefill_at = |at: Duration| {
            let before = changes.iter().filter(|change| change.at <= at);
            let mut roles = [Role::Worker; 6];
            before.for_each(|change| roles[change.node] = change.role);
            roles.iter().filter(|role| **role == Role::Prefill).count()
        };
        let (first, second) = (prefill_at(Duration::from_secs(85)), prefill_at(Duration::from_secs(170)));
        assert!(first > 3 && second < 3, "{first} then {second} of 6 prefill");
    }
}

/// The engine of a server, in the caller's time.
#[test]
fn a_live_engine_takes_the_same_time_as_one_in_a_replay() {
    let asked = || (0..20).map(|number| request(0, 700 + 300 * number, 5 + number, 100 * number));
    let all = trace(asked().collect());
    let served = run(&all, &fleet(&[Role::Worker], &Class::default(), Policy::LeastWork));
    let mut engine = LiveEngine::new(Class::default(), BLOCK, None);
    let numbers: Vec<usize> = all.requests.iter().map(|request| engine.push(request.clone())).collect();
    assert_eq!(engine.load(), (0, 20, 0));
    let (mut now, mut firsts, mut lasts) = (Duration::ZERO, vec![None; 20], vec![None; 20]);
    while lasts.iter().any(Option::is_none) {
        match engine.begin_step(now) {
            Ok(over) => {
                now = over;
                for brought in engine.end_step() {
                    match brought {
                        LiveOutput::First(number) => firsts[number] = Some(now),
                        LiveOutput::Last(number) => lasts[number] = Some(now),
                    }
                }
            }
            Err(again) => now = again.unwrap(),
        }
    }
    for (number, served) in numbers.into_iter().zip(&served) {
        assert_eq!((firsts[number], lasts[number]), (served.first, served.last));
    }
    assert_eq!(engine.load(), (0, 0, 0));
}

fn any_trace() -> impl Strategy<Value = Trace> {
    let one = (0u64..20_000, 1u64..9000, 1u64..60, 0u64..8);
    prop::collection::vec(one, 1..40).prop_map(|all| {
        trace(
            all.into_iter()
                .map(|(at, prompt, output, chat)| request(at, prompt, output, chat * 100))
                .collect(),
        )
    })
}

fn any_setup() -> impl Strategy<Value = Setup> {
    let roles = prop::sample::select(vec![
        vec![Role::Worker],
        vec![Role::Worker; 3],
        vec![Role::Prefill, Role::Decode],
        vec![Role::Prefill, Role::Prefill, Role::Decode, Role::Worker],
    ]);
    let deaths = prop::option::of((0u64..20_000, prop::option::of(0u64..5000)));
    let class = (500u64..30_000, 256u64..100_000, 1usize..9, 1u64..9000);
    let policy = prop::sample::select(Policy::ALL.to_vec());
    (roles, deaths, class, policy, 0u64..9, 0u8..101, any::<bool>()).prop_map(
        |(roles, dies, class, policy, seed, lost_percent, is_balanced)| {
            let (kv_tokens, cached_tokens, requests_max, step_tokens) = class;
            let class = Class { kv_tokens, cached_tokens, requests_max, step_tokens, ..Class::default() };
            let mut setup = fleet(&roles, &class, policy);
            setup.scheduler.seed = seed;
            setup.signals.lost_percent = lost_percent;
            setup.balance = is_balanced.then(BalanceSettings::default);
            setup.nodes[0].dies =
                dies.map(|(at, back)| (Duration::from_millis(at), back.map(Duration::from_millis)));
            setup
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// The replay asserts by itself that no node has a load left.
    #[test]
    fn every_request_ends_and_the_same_arguments_give_the_same_answers(trace in any_trace(), setup in any_setup()) {
        let served = run(&trace, &setup);
        prop_assert_eq!(served.len(), trace.requests.len());
        for (each, request) in served.iter().zip(&trace.requests) {
            if let Some(first) = each.first {
                // Nothing is faster than a request alone that has all but one token.
                let alone = Costs::H100_LLAMA_8B.step(0, 0, std::iter::once((1, request.prompt_tokens - 1)));
                prop_assert!(first >= alone);
                prop_assert!(each.last.is_none_or(|last| last >= first));
            }
            prop_assert!(each.found_tokens < each.prompt_tokens);
            prop_assert!(each.first.is_some() || each.last.is_none());
        }
        if setup.nodes.iter().all(|node| node.dies.is_none()) {
            prop_assert!(served.iter().all(|each| each.last.is_some()));
        }
        prop_assert_eq!(run(&trace, &setup), served);
    }
}

/// Two workers, of which one comes at one second and another one leaves at two.
#[test]
fn a_node_gets_nothing_before_it_joins_and_nothing_new_once_it_drains() {
    let mut setup = fleet(&[Role::Worker; 3], &Class::default(), Policy::RoundRobin);
    (setup.nodes[1].joins, setup.nodes[2].drains) =
        (Some(Duration::from_secs(1)), Some(Duration::from_secs(2)));
    let trace = trace((0..60).map(|number| request(number * 50, 500, 40, number * 10)).collect());
    let served = run(&trace, &setup);
    let by = |node| served.iter().filter(move |each| each.prefill == Some(node));
    assert!(by(1).all(|each| each.at >= Duration::from_secs(1)) && by(1).count() > 10);
    assert!(by(2).all(|each| each.at <= Duration::from_secs(2)) && by(2).count() > 10);
    assert!(served.iter().all(|each| each.last.is_some()), "what it had is finished");
}

/// Two prefill nodes and a decode node on one host, two decode nodes on another one, between which prompts go over a slow network.
#[test]
fn prompts_stay_on_their_host_as_long_as_tokens_come_about_as_soon_there() {
    let roles = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode, Role::Decode];
    let run = |policy, output| {
        let mut setup = fleet(&roles, &Class::default(), policy);
        setup.transfer.far_token_ms = Some(0.1);
        setup.nodes[..3].iter_mut().for_each(|node| node.host = "a".into());
        let requests =
            (0..1500).map(|number| request(number * 50, 1500 + number % 9 * 100, output, number * 100));
        let served = run(&trace(requests.collect()), &setup);
        let near = served.iter().filter(|each| each.decode == Some(2)).count();
        let summary = Summary::of(&served, Limits { ttft: Duration::MAX, tpot: Duration::MAX });
        (near, summary.ttft_p50, summary.tpot_p99)
    };
    let (spread, slow, tpot) = run(Policy::LeastWork, 30);
    let (near, fast, near_tpot) = run(Policy::LeastDelay, 30);
    assert!((400..600).contains(&spread), "{spread} of 1500 by turns");
    assert!(near > 1200 && fast.mul_f64(1.5) < slow, "{near} {fast:?} {slow:?}");
    assert!(near_tpot < tpot.mul_f64(1.6), "{near_tpot:?} {tpot:?}");
    // Long answers: one node for all of them would be too slow.
    let (near, _, long_tpot) = run(Policy::LeastDelay, 1500);
    assert!((500..1100).contains(&near), "{near}");
    assert!(long_tpot < run(Policy::LeastWork, 1500).2.mul_f64(1.6));
}

/// Each conversation's next prompt is its former one and more; all come while others are under way.
#[test]
fn a_router_that_engines_tell_of_their_blocks_knows_as_much_of_them_as_one_that_remembers_prompts() {
    let turns = (0..40).flat_map(|turn: u64| (0..10).map(move |chat: u64| (turn, chat)));
    let requests =
        turns.map(|(turn, chat)| request(turn * 2000 + chat * 20, 512 * (turn + 4), 30, chat * 1000));
    let trace = trace(requests.collect());
    let mut setup = fleet(&[Role::Worker; 4], &Class::default(), Policy::LeastWork);
    let found = |setup: &Setup| {
        let served = run(&trace, setup);
        assert!(served.iter().all(|each| each.last.is_some()));
        served.iter().map(|each| each.found_tokens).sum::<u64>()
    };
    let by_texts = found(&setup);
    setup.signals.kv_events = true;
    let by_events = found(&setup);
    assert!(by_events.abs_diff(by_texts) < by_texts / 20, "{by_events} {by_texts}");
    // Nothing is found of what an engine has lost, and nobody is sent there for it.
    setup.nodes.iter_mut().for_each(|node| {
        node.class = Arc::new(Class { cached_tokens: BLOCK, ..Class::default() });
    });
    assert!(found(&setup) * 5 < by_events);
}

/// Bursts of requests for prompts that engines of one host have computed before. While their long answers queue at one engine,
/// idle neighbours could load the prompt in milliseconds and serve them.
#[test]
fn a_router_that_knows_of_a_pool_spreads_the_prompts_that_it_holds() {
    let first = (0..8).map(|name: u64| request(name * 500, 8192, 2, name * 100));
    let bursts = (0..40).flat_map(|burst: u64| (0..24).map(move |_| burst));
    let again = bursts.map(|burst| request(10_000 + burst * 4000, 8192, 150, burst % 8 * 100));
    let trace = trace(first.chain(again).collect());
    let class = Class { costs: Costs::H100_LLAMA_8B.times(20.0, 1.0), requests_max: 6, ..Class::default() };
    for kv_events in [false, true] {
        let summary = |is_reported| {
            let mut setup = fleet(&[Role::Worker; 4], &class, Policy::LeastWork);
            setup.pools = vec![PoolSetup { is_reported, ..PoolSetup::default() }];
            setup.nodes.iter_mut().for_each(|node| node.pool = Some(0));
            setup.signals.kv_events = kv_events;
            Summary::of(&run(&trace, &setup), Limits { ttft: Duration::MAX, tpot: Duration::MAX })
        };
        let (told, untold) = (summary(true), summary(false));
        assert_eq!((told.lost, untold.lost), (0, 0));
        assert!(told.ttft_mean < untold.ttft_mean.mul_f64(0.8), "{kv_events}: {told:?} {untold:?}");
        assert!(told.found > 0.98 && told.found >= untold.found, "{told:?} {untold:?}");
    }
}
