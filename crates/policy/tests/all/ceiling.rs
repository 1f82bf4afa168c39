//! The hit-rate ceiling against exact counts.
use std::collections::HashSet;
use std::time::Duration;

use kvlane_policy::{BadSketch, Ceiling, Ceilings, HyperLogLog, Window, WindowCount, spread};
use proptest::prelude::*;

const MINUTE: Duration = Duration::from_secs(60);

#[test]
fn the_windows_of_a_namespace_fit_into_640_kib() {
    const { assert!(Ceiling::MAX_BYTES <= 640 << 10) };
}

#[test]
fn distinct_blocks_of_a_day_are_within_0_85_percent_rms() {
    let mut worst: f64 = 0.0;
    for (distinct, trials) in [(1_000u64, 100), (30_000, 100), (200_000, 40)] {
        let mut squares = 0.0;
        for trial in 0..trials {
            let mut ceiling = Ceiling::new();
            let keys: Vec<u64> = (0..distinct).map(|n| spread(trial << 40 | n)).collect();
            // Every block in two of 24 hours, so that slots overlap.
            for (hour, part) in keys.chunks(distinct.div_ceil(23) as usize).enumerate() {
                for repeat in 0..2 {
                    let now = MINUTE * (60 * (hour as u32 + repeat) + 7 + repeat);
                    ceiling.record(part.iter().copied(), now.max(MINUTE * 60 * hour as u32));
                }
            }
            let count = ceiling.window(Window::Day, MINUTE * (60 * 23 + 30));
            assert_eq!(count.references, 2 * distinct);
            squares += (count.distinct.estimate() / distinct as f64 - 1.0).powi(2);
        }
        let rms = 100.0 * (squares / trials as f64).sqrt();
        println!("{distinct} distinct in 24 h: rms {rms:.3} % over {trials} trials");
        worst = worst.max(rms);
    }
    assert!(worst <= 0.85, "{worst} %");
}

#[test]
fn windows_forget_in_their_own_time() {
    let mut ceiling = Ceiling::new();
    let epoch = Duration::from_secs(1_800_000_000 / 3600 * 3600);
    ceiling.record([1, 2, 2], epoch);
    ceiling.record([2, 3], epoch + MINUTE * 20);
    let seen = |now: Duration| ceiling.read(epoch + now).map(|(_, count)| count.references);
    assert_eq!(seen(MINUTE * 20), [2, 5, 5]);
    assert_eq!(seen(MINUTE * 34), [2, 5, 5]);
    assert_eq!(seen(MINUTE * 35), [0, 5, 5]);
    assert_eq!(seen(MINUTE * 60), [0, 2, 5]);
    assert_eq!(seen(MINUTE * 80), [0, 0, 5]);
    assert_eq!(seen(MINUTE * 60 * 24), [0, 0, 0]);
    let day = ceiling.window(Window::Day, epoch + MINUTE * 30);
    assert!((day.ceiling().unwrap() - 0.4).abs() < 0.01);
    assert_eq!(WindowCount::default().ceiling(), None);
}

#[test]
fn nodes_merge_to_what_one_would_have_counted() {
    let (mut left, mut right, mut both) = (Ceiling::new(), Ceiling::new(), Ceiling::new());
    for n in 0..20_000u64 {
        let now = MINUTE * (n / 100) as u32;
        if n % 3 > 0 {
            left.record([n % 7000], now);
            both.record([n % 7000], now);
        }
        if n % 3 < 2 {
            right.record([n % 9000], now);
            both.record([n % 9000], now);
        }
    }
    for window in Window::ALL {
        let now = MINUTE * 199;
        let mut merged = left.window(window, now);
        let sent = right.window(window, now);
        let received = HyperLogLog::from_bytes(sent.distinct.as_bytes()).unwrap();
        merged.merge(&WindowCount { references: sent.references, distinct: received });
        let whole = both.window(window, now);
        assert_eq!(merged.references, whole.references);
        assert_eq!(merged.distinct.as_bytes(), whole.distinct.as_bytes());
    }
}

#[test]
fn bytes_that_are_no_sketch_are_refused() {
    assert!(HyperLogLog::from_bytes(&[]).unwrap().is_empty());
    assert_eq!(HyperLogLog::from_bytes(&[1, 2]).err(), Some(BadSketch::Length(2)));
    let wrong = HyperLogLog::from_bytes(&vec![0xff; HyperLogLog::HEAP_BYTES]);
    assert_eq!(wrong.err(), Some(BadSketch::Register { register: 0, value: 63 }));
}

#[test]
fn the_seventeenth_namespace_waits_until_one_is_silent() {
    let mut ceilings = Ceilings::new();
    for namespace in 0..17 {
        ceilings.record(namespace, &[1, 1], MINUTE * namespace as u32);
    }
    let kept = |ceilings: &Ceilings| ceilings.namespaces().map(|(name, _)| name).collect::<HashSet<_>>();
    assert_eq!(kept(&ceilings), (0..16).collect());
    // The same key in 17 namespaces is 17 blocks.
    let total = ceilings.total().window(Window::Hour, MINUTE * 17);
    assert_eq!((total.references, total.distinct.estimate().round()), (34, 17.0));
    ceilings.record(16, &[1], MINUTE * 60);
    assert_eq!(kept(&ceilings), (1..17).collect());
}

proptest! {
    #[test]
    fn windows_cover_what_they_say(
        requests in prop::collection::vec((0u64..400, prop::collection::vec(0u64..500, 0..40)), 1..20),
    ) {
        let mut ceiling = Ceiling::new();
        let mut log: Vec<(Duration, Vec<u64>)> = Vec::new();
        let mut now = Duration::from_secs(1_800_000_000);
        for (seconds, keys) in requests {
            now += Duration::from_secs(seconds * seconds / 8);
            ceiling.record(keys.iter().copied(), now);
            log.push((now, keys));
        }
        for (window, count) in ceiling.read(now) {
            let covered = log.iter().filter(|(at, _)| *at >= window.start(now));
            let covered: Vec<u64> = covered.flat_map(|(_, keys)| keys.clone()).collect();
            prop_assert_eq!(count.references, covered.len() as u64);
            let distinct = covered.iter().collect::<HashSet<_>>().len() as f64;
            prop_assert!((count.distinct.estimate() - distinct).abs() <= 2.0 + 0.04 * distinct);
        }
    }
}
