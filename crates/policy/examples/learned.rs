//! Compares the hits and the time of `learned` with those of the other policies. Run it with --release. With the path
//! of a trace in Mooncake's format as an argument it also runs that trace: all of it, its first half hour, and the
//! rest.
//!
//! Each row has the percentage of references that were hit as part of a prefix, for caches of 1, 3, 10 and 30 % of the
//! different blocks.

use std::time::Instant;

use kvlane_policy::policies::Learned;
use kvlane_policy::{CacheModel, Choice, PolicyKind, ReplacementPolicy, Replayed, Setup, Trace, replay};

#[path = "../tests/workloads/mod.rs"]
mod workloads;
use workloads::{
    AGENTS_SEED, CHAT_SEED, Requests, SHARED_PROMPTS_SEED, agents, chat, endless_loop, joined, never_again,
    shared_prompts, trace, turned,
};

const SHARES: [f64; 4] = [0.01, 0.03, 0.1, 0.3];
/// Sizes of RAM and of the tier below, as shares of the different blocks.
const TIERS: [(f64, f64); 5] = [(0.01, 0.05), (0.01, 0.1), (0.03, 0.1), (0.03, 0.3), (0.1, 0.5)];
const ROUNDS: usize = 7;

/// Hits in percent of the references, over the requests from number `from` on.
fn hits(trace: &Trace, policy: Box<dyn ReplacementPolicy>, capacity: usize, from: usize) -> f64 {
    let mut cache = CacheModel::with_policy(policy, capacity);
    let (mut hits, mut asked) = (0, 0);
    for (number, request) in trace.requests().enumerate() {
        let keys = request.keys;
        let keys: Vec<u64> = keys.collect();
        let outcome = cache.request(&keys, |_| ());
        if number >= from {
            hits += outcome.prefix_hits;
            asked += keys.len();
        }
    }
    100.0 * hits as f64 / asked.max(1) as f64
}

fn sizes(distinct: usize) -> Vec<usize> {
    SHARES.iter().map(|share| (distinct as f64 * share) as usize).collect()
}

/// Prints a row for each policy, and one for the control.
fn table(title: &str, trace: &Trace, capacities: &[usize], from: usize) {
    println!("{title}, caches of {capacities:?} blocks");
    let row = |name: &str, build: &dyn Fn(usize) -> Box<dyn ReplacementPolicy>| {
        let rates = capacities.iter().map(|&capacity| hits(trace, build(capacity), capacity, from));
        let rates: Vec<String> = rates.map(|rate| format!("{rate:6.2}")).collect();
        println!("  {name:14} {}", rates.join(" "));
    };
    for kind in PolicyKind::ALL {
        row(kind.name(), &|capacity| kind.build(capacity));
    }
    row("random classes", &|capacity| Box::new(Learned::with_random_classes(capacity)));
}

/// Prints the hits with a tier below: those of both tiers together, and in brackets those of the tier below.
fn two_tiers(title: &str, trace: &Trace) {
    println!("{title}, RAM and a tier below of {TIERS:?} of {} blocks", trace.distinct());
    let blocks = |share: f64| (trace.distinct() as f64 * share) as usize;
    for kind in PolicyKind::ALL {
        let rates = TIERS.map(|(ram, ssd)| {
            let setup =
                Setup { policy: Choice::Fixed(kind), capacity: blocks(ram), ssd_capacity: blocks(ssd) };
            let Replayed { references, prefix_hits, ssd_prefix_hits, .. } = replay(trace, setup, |_| ());
            let percent = |hits: usize| 100.0 * hits as f64 / references.max(1) as f64;
            format!("{:6.2} ({:.2})", percent(prefix_hits + ssd_prefix_hits), percent(ssd_prefix_hits))
        });
        println!("  {:14} {}", kind.name(), rates.join(" "));
    }
}

/// Prints nanoseconds for each reference of a replay beside those of LRU: the least of several rounds that take turns.
fn time(title: &str, trace: &Trace) {
    for capacity in sizes(trace.distinct()) {
        let kinds = [PolicyKind::Lru, PolicyKind::WTinyLfu, PolicyKind::Learned];
        let mut least = [f64::MAX; 3];
        for _ in 0..ROUNDS {
            for (least, kind) in least.iter_mut().zip(kinds) {
                let begun = Instant::now();
                replay(trace, Setup { policy: Choice::Fixed(kind), capacity, ssd_capacity: 0 }, |_| ());
                *least = least.min(begun.elapsed().as_secs_f64() * 1e9 / trace.references() as f64);
            }
        }
        let [lru, wtinylfu, learned] = least;
        let ratio = learned / lru;
        println!(
            "{title}, {capacity} blocks: lru {lru:.0} ns, wtinylfu {wtinylfu:.0}, learned {learned:.0}: {ratio:.2} times"
        );
    }
}

/// Reads a trace in Mooncake's format: times in ms, and ids of blocks.
fn read(path: &str) -> Result<Requests, String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("cannot read '{path}': {error}"))?;
    let request = |line: &str| {
        let after = |name: &str| line.split_once(name).map(|(_, rest)| rest);
        let at = after("\"timestamp\": ")?.split([',', '}']).next()?.parse().ok()?;
        let ids = after("\"hash_ids\": [")?.split(']').next()?;
        Some((at, ids.split(',').filter_map(|id| id.trim().parse().ok()).collect()))
    };
    let requests = text.lines().map(|line| request(line).ok_or_else(|| format!("'{line}' is no request")));
    requests.collect()
}

fn recorded(path: &str) -> Result<(), String> {
    let requests = read(path)?;
    let half_hour = requests.partition_point(|(at, _)| *at < 30 * 60 * 1000);
    let (all, first) = (trace(&requests), trace(&requests[..half_hour].to_vec()));
    let capacities = sizes(all.distinct());
    table("the trace", &all, &capacities, 0);
    table("its first half hour", &first, &capacities, 0);
    table("what comes after that", &all, &capacities, half_hour);
    two_tiers("the trace", &all);
    two_tiers("its first half hour", &first);
    two_tiers("the trace, with one-time prompts", &all.with_scans());
    time("the trace", &all);
    Ok(())
}

/// Prints a table for a trace whose second half is of another kind, counted from a tenth of all references after the
/// turn.
fn after_the_turn(title: &str, first: &Requests, second: &Requests) {
    let both = joined(&[first, second]);
    let count = |requests: &Requests| requests.iter().map(|(_, blocks)| blocks.len()).sum::<usize>();
    let judged_after = count(first) + count(&both) / 10;
    let mut references = 0;
    let from = both.iter().take_while(|(_, blocks)| {
        references += blocks.len();
        references < judged_after
    });
    let from = from.count();
    let both = trace(&both);
    table(title, &both, &sizes(both.distinct()), from);
}

/// Prints tables for loads that are bad for one policy or another, in a cache of `capacity` blocks.
fn adversarial(capacity: usize) {
    let prompts = capacity as u64 * 21 / 200;
    table("a loop of 1.05 times the capacity", &trace(&endless_loop(prompts, 10, 100_000)), &[capacity], 0);
    table("nothing comes back", &trace(&never_again(0, 10, 100_000)), &[capacity], 0);
    let chat = chat(CHAT_SEED, 150_000);
    let (before, after) = chat.split_at(chat.len() / 2);
    let scan = never_again(1, 20, 10 * capacity);
    table("the second half of the chat", &trace(&chat), &[capacity], before.len());
    let with_scan = joined(&[&before.to_vec(), &scan, &after.to_vec()]);
    table("the same after a scan", &trace(&with_scan), &[capacity], before.len() + scan.len());
}

fn main() -> Result<(), String> {
    if let Some(path) = std::env::args().nth(1) {
        recorded(&path)?;
    }
    let kinds = |references| {
        [
            ("chat", chat(CHAT_SEED, references)),
            ("shared prompts", shared_prompts(SHARED_PROMPTS_SEED, references)),
            ("agents", agents(AGENTS_SEED, references)),
        ]
    };
    for (title, requests) in kinds(150_000) {
        let trace = trace(&requests);
        table(title, &trace, &sizes(trace.distinct()), 0);
        two_tiers(title, &trace);
        time(title, &trace);
    }
    let (first, second) = turned(1, 200_000);
    after_the_turn("classes change places", &first, &second);
    let [(_, chat), (_, shared), (_, agents)] = kinds(100_000);
    after_the_turn("agents, then shared prompts", &agents, &shared);
    after_the_turn("shared prompts, then chat", &shared, &chat);
    after_the_turn("chat, then agents", &chat, &agents);
    adversarial(1000);
    adversarial(5000);
    Ok(())
}
