//! How long the choice of an engine takes among a thousand, by each policy: JSON at standard output.
//!
//! `cargo run --release -p kvlane-router --example choice [NODES]`
//!
//! Beside it a minimal loop of the same run: over as many numbers, to the least one.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a program for developers")]

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use kvlane_router::{
    body::Mark,
    schedule::{
        Chosen, LegEnd, Node, NodeState, Policy, Request, Reservation, Role, Scheduler, SchedulerSettings,
    },
};
use serde_json::{Value, json};

const CHOICES: usize = 20_000;
/// Requests that are under way.
const OPEN: usize = 4000;
/// Prompts that begin alike, with so many marks of 256 bytes each.
const FAMILIES: u64 = 2000;
const MARKS: u64 = 128;
const NODES_A_HOST: usize = 8;

/// By SplitMix64.
fn any(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

fn marks(number: u64, chance: &mut u64) -> Vec<Mark> {
    let family = any(chance) % FAMILIES;
    let shared = MARKS / 2 + any(chance) % (MARKS / 2);
    (0..MARKS)
        .map(|at| {
            let mut seed = if at < shared { family << 20 | at } else { 1 << 60 | number << 20 | at };
            Mark { hash: any(&mut seed), bytes: (at as u32 + 1) * 256 }
        })
        .collect()
}

fn quantiles(mut times: Vec<Duration>) -> Value {
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6;
    json!({ "p50_us": at(0.5), "p99_us": at(0.99) })
}

fn choices(policy: Policy, nodes: usize, is_pairs: bool) -> Value {
    let settings = SchedulerSettings {
        policy,
        decode_policy: policy,
        marks_max: 1 << 22,
        ..SchedulerSettings::default()
    };
    let mut scheduler = Scheduler::new(settings);
    for number in 0..nodes {
        let role = match (is_pairs, number % 2) {
            (false, _) => Role::Worker,
            (true, 0) => Role::Prefill,
            (true, _) => Role::Decode,
        };
        let mut node = Node::new(&format!("http://10.0.0.1:{number}"), role, "");
        node.state = NodeState::Ready;
        node.host = format!("10.0.{}", number / NODES_A_HOST).into();
        scheduler.add(node);
    }
    let (mut chance, now) = (1, Instant::now());
    let mut open: std::collections::VecDeque<Vec<Reservation>> = std::collections::VecDeque::new();
    let mut times = Vec::with_capacity(CHOICES);
    for number in 0..2 * CHOICES {
        let marks = marks(number as u64, &mut chance);
        let request = Request { model: None, marks: &marks, one_node: false, streams: true, tried: &[] };
        let now = now + Duration::from_millis(number as u64);
        let began = Instant::now();
        let choice = scheduler.choose(&request, now).unwrap();
        // The first half fills the index, and lets predictions learn.
        if number >= CHOICES {
            times.push(began.elapsed());
        }
        let mut legs = match choice.chosen {
            Chosen::One(one) => vec![one],
            Chosen::Pair { prefill, decode } => vec![prefill, decode],
        };
        let later = now + Duration::from_millis(20 + number as u64 % 50);
        let mut first = later;
        for leg in &mut legs {
            scheduler.prefilled(leg, &marks, first);
            // The decode node of a pair waits this long for the prompt.
            first += Duration::from_millis(5 + number as u64 % 7);
        }
        open.push_back(legs);
        if open.len() > OPEN {
            for leg in open.pop_front().into_iter().flatten() {
                scheduler.end(leg, LegEnd::Served, later);
            }
        }
    }
    for leg in open.into_iter().flatten() {
        scheduler.end(leg, LegEnd::Served, now);
    }
    quantiles(times)
}

fn bare(nodes: usize) -> Value {
    let mut chance = 1;
    let numbers: Vec<u64> = (0..nodes).map(|_| any(&mut chance)).collect();
    let once = || {
        let began = Instant::now();
        black_box(black_box(&numbers).iter().enumerate().min_by_key(|(_, number)| **number));
        began.elapsed()
    };
    quantiles((0..CHOICES).map(|_| once()).collect())
}

fn main() {
    let nodes = std::env::args().nth(1).map_or(1000, |text| text.parse().unwrap());
    let each = |is_pairs| -> serde_json::Map<String, Value> {
        Policy::ALL
            .map(|policy| (policy.name().to_owned(), choices(policy, nodes, is_pairs)))
            .into_iter()
            .collect()
    };
    let report = json!({
        "nodes": nodes,
        "marks_of_a_prompt": MARKS,
        "choices": CHOICES,
        "workers": each(false),
        "pairs": each(true),
        "least_of_as_many_numbers": bare(nodes),
    });
    println!("{}", serde_json::to_string_pretty(&report).unwrap());
}
