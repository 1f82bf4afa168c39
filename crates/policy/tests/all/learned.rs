//! Compares the hits of `learned` on generated traces with those of the best other policy.

use crate::workloads::{
    Requests, agents, chat, endless_loop, joined, never_again, shared_prompts, trace, turned,
};
use kvlane_policy::{Choice, PolicyKind, Setup, Trace, replay};

fn hit_rate(trace: &Trace, kind: PolicyKind, capacity: usize) -> f64 {
    let setup = Setup { policy: Choice::Fixed(kind), capacity, ssd_capacity: 0 };
    replay(trace, setup, |_| ()).prefix_hits as f64 / trace.references() as f64
}

/// What it hits, and what the best other policy does.
fn beside_the_best(trace: &Trace, capacity: usize) -> (f64, f64) {
    let others = PolicyKind::ALL.into_iter().filter(|&kind| kind != PolicyKind::Learned);
    let best = others.map(|kind| hit_rate(trace, kind, capacity)).fold(0.0, f64::max);
    let learned = hit_rate(trace, PolicyKind::Learned, capacity);
    println!("{capacity} blocks: {learned:.4}, the best other {best:.4}");
    (learned, best)
}

/// With seeds that no figure is given for. Of these short traces a good part went by before anything was learnt.
#[test]
fn it_is_near_the_best_or_better_on_every_kind_of_traffic() {
    for requests in [chat(1, 60_000), shared_prompts(1, 60_000), agents(1, 60_000), turned(5, 60_000).0] {
        let trace = trace(&requests);
        for percent in [3, 10, 30] {
            let (learned, best) = beside_the_best(&trace, trace.distinct() * percent / 100);
            assert!(learned > 0.96 * best, "{percent} %: {learned} of {best}");
        }
    }
}

/// Hits in RAM and in a tier below.
fn hit_rate_of_both(trace: &Trace, kind: PolicyKind, capacity: usize, ssd_capacity: usize) -> f64 {
    let replayed = replay(trace, Setup { policy: Choice::Fixed(kind), capacity, ssd_capacity }, |_| ());
    (replayed.prefix_hits + replayed.ssd_prefix_hits) as f64 / trace.references() as f64
}

/// Before it knew of a tier below, what it kept out of RAM never got there: both hit a quarter less than with LRU.
#[test]
fn with_a_tier_below_it_is_near_the_best_or_better_too() {
    for requests in [chat(1, 40_000), shared_prompts(1, 40_000), agents(1, 40_000)] {
        let trace = trace(&requests);
        for (ram, ssd) in [(1, 10), (3, 30)] {
            let of = |percent: usize| trace.distinct() * percent / 100;
            let hits = |kind| hit_rate_of_both(&trace, kind, of(ram), of(ssd));
            let others = PolicyKind::ALL.into_iter().filter(|&kind| kind != PolicyKind::Learned);
            let (learned, best) = (hits(PolicyKind::Learned), others.map(hits).fold(0.0, f64::max));
            println!("{ram} % and {ssd} %: {learned:.4}, the best other {best:.4}");
            assert!(learned > 0.95 * best, "{ram} % and {ssd} %: {learned} of {best}");
        }
    }
}

#[test]
fn it_learns_anew_when_what_came_back_comes_back_no_more() {
    let (first, second) = turned(5, 80_000);
    let both = trace(&joined(&[&first, &second]));
    let (learned, best) = beside_the_best(&both, 1500);
    assert!(learned > 1.1 * best, "{learned} of {best}");
}

#[test]
fn a_loop_that_does_not_fit_hits_what_stays() {
    let (learned, _) = beside_the_best(&trace(&endless_loop(105, 10, 40_000)), 1000);
    assert!(learned > 0.8, "{learned}");
}

#[test]
fn a_scan_costs_little() {
    let chat = chat(2, 60_000);
    let (before, after) = chat.split_at(chat.len() / 2);
    let scan = never_again(1, 20, 10_000);
    let hits = |requests: &Requests| {
        let trace = trace(requests);
        hit_rate(&trace, PolicyKind::Learned, 1000) * trace.references() as f64
    };
    let with_scan = hits(&joined(&[&before.to_vec(), &scan, &after.to_vec()]));
    let without = hits(&chat);
    println!("{with_scan} hits, {without} without the scan");
    assert!(without - with_scan < 0.02 * 60_000.0, "{with_scan} of {without}");
}
