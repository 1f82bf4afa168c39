//! Measures what the hit-rate ceiling costs for each block reference. Run it with --release. Prints nanoseconds for
//! each insert, the median of the rounds, beside a loop that only reads the same keys. A reference goes into two
//! ceilings: its namespace's and the total.
use std::hint::black_box;
use std::time::{Duration, Instant};

use kvlane_policy::{Ceiling, Ceilings, Window};

const PROMPTS: u64 = 1600;
const PROMPT: u64 = 625;
const ROUNDS: usize = 9;

/// Runs `work` on all prompts; returns nanoseconds for each key, the median of the rounds.
fn time(mut work: impl FnMut(&[u64])) -> f64 {
    let keys: Vec<u64> =
        (0..PROMPTS * PROMPT).map(|number| number.wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect();
    let mut rounds: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let begun = Instant::now();
            keys.chunks(PROMPT as usize).for_each(&mut work);
            begun.elapsed().as_secs_f64() * 1e9 / keys.len() as f64
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    rounds[ROUNDS / 2]
}

fn main() {
    let now = Duration::from_secs(1_000_000);
    let mut sum = 0u64;
    let read = time(|prompt| sum = prompt.iter().fold(sum, |sum, key| sum.wrapping_add(*key)));
    black_box(sum);
    let mut one = Ceiling::new(&Window::DEFAULT);
    let insert = time(|prompt| one.record(prompt.iter().copied(), 0, now));
    let mut all = Ceilings::new(&Window::DEFAULT);
    let both = time(|prompt| all.record(7, prompt, 0, now));
    println!(
        "an insert: {insert:.1} ns; a reference, with its namespace and the total: {both:.1} ns; a read: {read:.1} ns"
    );
}
