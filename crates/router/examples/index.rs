//! Measures the router's indexes: bytes a mark, nanoseconds to insert one, microseconds to look a prompt up. Prints JSON,
//! beside a plain map of the same in the same run. Times are this thread's processor time, the median of several rounds.
//!
//! ```sh
//! cargo run --release -p kvlane-router --example index
//! ```
#![allow(clippy::expect_used, reason = "an example ends with a message")]

use std::{collections::HashMap, fs, hint::black_box, time::Instant};

use kvlane_kv_events::{BlockStored, ExternalHash};
use kvlane_router::{
    body::{Mark, marks, scan},
    knowledge::{Blocks, Parent, chain},
    schedule::Index,
};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64_with_seed;

const NODES: usize = 16;
const ROUNDS: usize = 9;
/// Prompts that are looked up in a round.
const LOOKS: usize = 20_000;
/// Marks of the table, filled to two thirds.
const MARKS: usize = 1 << 20;
const PROMPT_BYTES: usize = 32 << 10;
/// About four bytes a token.
const PROMPT_TOKENS: u32 = 8 << 10;
const BLOCK_SIZE: u32 = 16;

fn main() {
    let index = marks_of_texts();
    let map = plain_map();
    let blocks = blocks_of_tokens();
    println!("{}", json!({ "nodes": NODES, "text_marks": index, "plain_map": map, "blocks": blocks }));
}

/// Processor time of this thread in nanoseconds, by /proc: jobs beside this one must not count.
fn now() -> f64 {
    let stat = fs::read_to_string("/proc/thread-self/schedstat").expect("/proc is mounted");
    stat.split(' ').next().and_then(|spent| spent.parse().ok()).expect("schedstat begins with nanoseconds")
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

fn prompt(name: u64, marks: usize) -> Vec<Mark> {
    let mut hash = name;
    (0..marks as u32)
        .map(|place| {
            hash = xxh3_64_with_seed(&place.to_le_bytes(), hash);
            Mark { hash, bytes: (place + 1) * 256 }
        })
        .collect()
}

fn marks_of_texts() -> Value {
    let per_prompt = PROMPT_BYTES / 256;
    let prompts: Vec<_> =
        (0..(MARKS * 2 / 3 / per_prompt) as u64).map(|name| prompt(name, per_prompt)).collect();
    let mut inserts = Vec::new();
    let mut index = Index::new(MARKS);
    // The table's memory is touched first, as in a router that has run for a while.
    for (place, prompt) in prompts.iter().enumerate() {
        index.insert(prompt, place % NODES);
    }
    for round in 0..ROUNDS {
        let start = now();
        for (place, prompt) in prompts.iter().enumerate() {
            index.insert(prompt, (place + round) % NODES);
        }
        inserts.push((now() - start) / (prompts.len() * per_prompt) as f64);
    }
    for node in 0..NODES {
        index.insert(&prompts[0], node);
    }
    let mut matched = Vec::new();
    let mut looks = Vec::new();
    for _ in 0..ROUNDS {
        let start = now();
        // The kernel counts in ticks of some milliseconds: many times.
        for prompt in prompts.iter().cycle().take(LOOKS) {
            index.matched(prompt, &mut matched);
            black_box(&matched);
        }
        looks.push((now() - start) / 1e3 / LOOKS as f64);
    }
    let body = json!({ "model": "m", "prompt": "All of it is text. ".repeat(PROMPT_BYTES / 19) }).to_string();
    let scanned = scan(body.as_bytes()).expect("it is JSON");
    let hashing = (0..ROUNDS).map(|round| {
        let start = now();
        for _ in 0..LOOKS {
            black_box(marks(&scanned, round as u64));
        }
        (now() - start) / 1e3 / LOOKS as f64
    });
    json!({
        "bytes_per_mark": index.bytes() as f64 / MARKS as f64,
        "marks": index.marks(),
        "ns_per_insert": median(inserts),
        "us_per_match_32kb": median(looks),
        "us_per_hash_32kb": median(hashing.collect()),
    })
}

/// The same with a map of a word of bits for each mark: it grows for ever.
fn plain_map() -> Value {
    let per_prompt = PROMPT_BYTES / 256;
    let prompts: Vec<_> =
        (0..(MARKS * 2 / 3 / per_prompt) as u64).map(|name| prompt(name, per_prompt)).collect();
    let mut map: HashMap<u64, u64> = HashMap::new();
    let mut inserts = Vec::new();
    for round in 0..=ROUNDS {
        let start = now();
        for (place, prompt) in prompts.iter().enumerate() {
            for mark in prompt {
                *map.entry(mark.hash).or_default() |= 1 << ((place + round) % NODES);
            }
        }
        inserts.push((now() - start) / (prompts.len() * per_prompt) as f64);
    }
    let mut looks = Vec::new();
    for _ in 0..ROUNDS {
        let start = now();
        for prompt in prompts.iter().cycle().take(LOOKS) {
            let mut matched = [0; NODES];
            let mut still = (1u64 << NODES) - 1;
            for mark in prompt {
                still &= map.get(&mark.hash).copied().unwrap_or(0);
                if still == 0 {
                    break;
                }
                (0..NODES).filter(|node| still >> node & 1 == 1).for_each(|node| matched[node] = mark.bytes);
            }
            black_box(&matched);
        }
        looks.push((now() - start) / 1e3 / LOOKS as f64);
    }
    // 16 bytes an entry and one of control, and room for seven of eight, in powers of two.
    let places = (map.capacity() * 8 / 7).next_power_of_two();
    json!({
        "bytes_per_mark": places as f64 * 17.0 / map.len() as f64,
        "marks": map.len(),
        "ns_per_insert": median(inserts[1..].to_vec()),
        "us_per_match_32kb": median(looks),
    })
}

fn blocks_of_tokens() -> Value {
    let count = MARKS / 2 / (PROMPT_TOKENS / BLOCK_SIZE) as usize;
    let events: Vec<_> = (0..count as u32).map(stored).collect();
    let of_an_event = (PROMPT_TOKENS / BLOCK_SIZE) as usize;
    let mut blocks = Blocks::new(MARKS);
    let mut inserts = Vec::new();
    for round in 0..=ROUNDS {
        let start = now();
        for (place, event) in events.iter().enumerate() {
            let mut next = Some((0, Parent::OfEvent));
            while let Some((from, parent)) = next {
                next = blocks.stored((place + round) % NODES, event, from, parent);
            }
        }
        inserts.push((now() - start) / (events.len() * of_an_event) as f64);
    }
    let (mut chains, mut looks) = (Vec::new(), Vec::new());
    let at = Instant::now();
    for _ in 0..ROUNDS {
        let start = now();
        let made: Vec<_> = events
            .iter()
            .cycle()
            .take(2000)
            .map(|event| chain(&event.tokens, BLOCK_SIZE, None, None))
            .collect();
        chains.push((now() - start) / 1e3 / made.len() as f64);
        let start = now();
        for chain in &made {
            blocks.matched(chain, &[(1 << NODES) - 1], at, |node, count| {
                black_box((node, count));
            });
        }
        looks.push((now() - start) / 1e3 / made.len() as f64);
    }
    // GPU memory only, all engines hashing alike: an entry of the index and one of the translation each.
    json!({
        "bytes_per_block": blocks.bytes() as f64 / MARKS as f64,
        "blocks": count * of_an_event,
        "ns_per_stored_block": median(inserts[1..].to_vec()),
        "us_per_match_8k_tokens": median(looks),
        "us_per_chain_8k_tokens": median(chains),
    })
}

fn stored(name: u32) -> BlockStored {
    BlockStored {
        hashes: (0..PROMPT_TOKENS / BLOCK_SIZE)
            .map(|block| ExternalHash::Number(u64::from(name) << 32 | u64::from(block)))
            .collect(),
        parent: None,
        tokens: (0..PROMPT_TOKENS).map(|token| token.wrapping_mul(name * 2 + 1)).collect(),
        block_size: BLOCK_SIZE,
        lora_id: None,
        medium: Some("GPU".into()),
        lora_name: None,
        extra_keys: Vec::new(),
        group: None,
        kind: None,
        window: None,
    }
}
