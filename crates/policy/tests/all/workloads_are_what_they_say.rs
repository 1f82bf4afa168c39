//! The generated traces are the same each time, and have the properties that they are named for.

use crate::workloads::{
    AGENTS_SEED, CHAT_SEED, Requests, SHARED_PROMPTS_SEED, agents, chat, shared_prompts, trace, turned,
};
use kvlane_policy::spread;

fn fingerprint(requests: &Requests) -> u64 {
    let all = requests.iter().flat_map(|(at, blocks)| std::iter::once(at).chain(blocks));
    all.fold(0, |sum, number| spread(sum ^ number))
}

/// Name, the requests, and which part of the references an endless cache could hit, in percent.
#[test]
fn they_have_the_ceilings_that_their_kind_has() {
    let kinds = [
        ("chat", chat(CHAT_SEED, 150_000), 50..80),
        ("shared prompts", shared_prompts(SHARED_PROMPTS_SEED, 150_000), 60..90),
        ("agents", agents(AGENTS_SEED, 150_000), 80..97),
        ("turned, first", turned(1, 100_000).0, 55..65),
        ("turned, second", turned(1, 100_000).1, 55..65),
    ];
    for (name, requests, ceiling) in kinds {
        let trace = trace(&requests);
        let percent = (trace.ceiling() * 100.0).round() as i32;
        println!("{name}: {} requests, {} blocks, {percent} %", trace.len(), trace.distinct());
        assert!(ceiling.contains(&percent), "{name}: {percent} %");
        assert!(requests.is_sorted_by_key(|(at, _)| *at), "{name}");
    }
}

#[test]
fn a_seed_gives_the_same_trace_each_time_and_another_seed_another() {
    assert_eq!(fingerprint(&chat(7, 5000)), fingerprint(&chat(7, 5000)));
    assert_ne!(fingerprint(&chat(7, 5000)), fingerprint(&chat(8, 5000)));
}
