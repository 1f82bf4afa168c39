//! Replays of a small synthetic trace, compared with figures that were found another way.
use std::time::Duration;

use kvlane_policy::{
    Choice, PolicyKind, Replayed, Setup, Trace, TraceRequest, estimate_ceiling, replay, spread,
};

/// Conversations that grow turn by turn below one of three system prompts; which one goes on is chance that follows from
/// the seed, recent ones more often.
fn conversations(seed: u64, requests: u64) -> Trace {
    let mut trace = Trace::new();
    let mut state = seed;
    let mut chance = move |below: u64| {
        state = state.wrapping_add(1);
        spread(state) % below
    };
    let mut open: Vec<Vec<u64>> = Vec::new();
    let mut next_block = 1000;
    for request in 0..requests {
        if open.is_empty() || chance(4) == 0 {
            let system = chance(3);
            open.push((0..4).map(|block| system * 4 + block).collect());
        }
        let back = chance(60).min(chance(60)) as usize;
        let at = open.len() - 1 - back.min(open.len() - 1);
        let turn = 1 + chance(12);
        open[at].extend(next_block..next_block + turn);
        next_block += turn;
        trace.push(Duration::from_secs(request * 7), &open[at]);
        if open[at].len() > 120 {
            open.remove(at);
        }
    }
    trace
}

fn run(trace: &Trace, policy: Choice, capacity: usize, ssd_capacity: usize) -> Replayed {
    replay(trace, Setup { policy, capacity, ssd_capacity }, |_| ())
}

fn fixed(trace: &Trace, kind: PolicyKind, capacity: usize) -> f64 {
    let replayed = run(trace, Choice::Fixed(kind), capacity, 0);
    replayed.prefix_hits as f64 / replayed.references as f64
}

/// LRU over a vector, tail touched first.
fn plain_lru(trace: &Trace, capacity: usize) -> f64 {
    let mut order: Vec<u64> = Vec::new();
    let mut hits = 0;
    for TraceRequest { keys, .. } in trace.requests() {
        let keys: Vec<u64> = keys.collect();
        let found = keys.iter().take_while(|key| order.contains(key)).count();
        hits += found;
        order.retain(|key| !keys.contains(key));
        order.extend(keys.iter().rev());
        order.drain(..order.len().saturating_sub(capacity));
    }
    hits as f64 / trace.references() as f64
}

#[test]
fn lru_hits_what_a_plain_list_hits() {
    let trace = conversations(1, 600);
    for capacity in [150, 300, 900] {
        assert_eq!(fixed(&trace, PolicyKind::Lru, capacity), plain_lru(&trace, capacity), "{capacity}");
    }
}

#[test]
fn a_cache_for_everything_hits_the_ceiling_with_every_policy() {
    let trace = conversations(2, 800);
    let ceiling = trace.ceiling();
    let repeated = (trace.references() - trace.distinct()) as f64 / trace.references() as f64;
    assert!((ceiling - repeated).abs() < 1e-12);
    for kind in PolicyKind::ALL {
        assert_eq!(fixed(&trace, kind, trace.distinct()), ceiling, "{kind}");
        let little = fixed(&trace, kind, trace.distinct() / 50);
        assert!(little > 0.0 && little < ceiling, "{kind}: {little}");
    }
}

#[test]
fn one_time_prompts_halve_the_ceiling() {
    let trace = conversations(3, 300);
    let mixed = trace.with_scans();
    assert_eq!((mixed.len(), mixed.references()), (2 * trace.len(), 2 * trace.references()));
    assert!((mixed.ceiling() - trace.ceiling() / 2.0).abs() < 1e-12);
}

#[test]
fn what_ram_evicts_is_hit_in_the_tier_below() {
    let trace = conversations(4, 1500);
    let (ram, ssd) = (trace.distinct() / 40, trace.distinct() / 4);
    let alone = run(&trace, Choice::Fixed(PolicyKind::Lru), ram, 0);
    let both = run(&trace, Choice::Fixed(PolicyKind::Lru), ram, ssd);
    assert_eq!(alone.ssd_prefix_hits, 0);
    assert_eq!(both.prefix_hits, alone.prefix_hits, "RAM does not hit less for it");
    let all = (both.prefix_hits + both.ssd_prefix_hits) as f64 / both.references as f64;
    // Copies are in both tiers, so together they hold less than their sum and at least what the lower one holds.
    assert!(all <= fixed(&trace, PolicyKind::Lru, ram + ssd) + 0.01, "{all}");
    assert!(all >= 0.9 * fixed(&trace, PolicyKind::Lru, ssd), "{all}");
    let endless = run(&trace, Choice::Fixed(PolicyKind::Lru), ram, trace.distinct());
    assert_eq!(
        (endless.prefix_hits + endless.ssd_prefix_hits) as f64 / endless.references as f64,
        trace.ceiling()
    );
}

/// What `auto` hits, and the best of the policies alone.
fn auto_and_best(trace: &Trace, capacity: usize) -> (f64, f64, Replayed) {
    let best = PolicyKind::ALL.map(|kind| fixed(trace, kind, capacity)).into_iter().fold(0.0, f64::max);
    let auto = run(trace, Choice::Auto, capacity, 0);
    let reached = auto.prefix_hits as f64 / auto.references as f64;
    println!("{capacity} blocks: auto {reached:.4}, best {best:.4}, {} switches", auto.switches.len());
    (reached, best, auto)
}

#[test]
fn auto_comes_near_the_best_policy() {
    let trace = conversations(5, 6000).with_scans();
    for (share, within) in [(1, 0.90), (10, 0.97), (30, 0.97)] {
        let (reached, best, _) = auto_and_best(&trace, trace.distinct() * share / 100);
        assert!(reached >= within * best, "{share} %: {reached} of {best}");
    }
}

#[test]
fn auto_keeps_what_is_used_where_one_time_prompts_would_displace_it() {
    let mut trace = Trace::new();
    let mut once = 1 << 40;
    for round in 0..400u64 {
        for prompt in 0..20 {
            let keys: Vec<u64> = (prompt * 10..prompt * 10 + 10).collect();
            (0..3).for_each(|_| trace.push(Duration::from_secs(round), &keys));
            trace.push(Duration::from_secs(round), &(once..once + 12).collect::<Vec<_>>());
            once += 12;
        }
    }
    let (reached, best, _) = auto_and_best(&trace, 220);
    let lru = fixed(&trace, PolicyKind::Lru, 220);
    assert!(lru < 0.7 * best && reached > 0.95 * best, "lru {lru}, auto {reached}, best {best}");
}

#[test]
fn the_sketches_are_near_the_exact_count_of_the_last_day() {
    let trace = conversations(6, 20_000);
    let found = estimate_ceiling(&trace);
    assert!(found.references < trace.references(), "the trace is longer than a day");
    assert_eq!(found.estimated.references, found.references as u64);
    let error = found.estimated.distinct.estimate() / found.distinct as f64 - 1.0;
    assert!(error.abs() < 3.0 * 0.0081, "{error}");
}
