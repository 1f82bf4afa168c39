//! The hit-rate ceiling against exact counts.
use std::collections::{HashMap, HashSet};
use std::time::Duration;

use kvlane_policy::{BadSketch, BadWindow, Ceiling, Ceilings, HyperLogLog, Window, WindowCount, spread};
use proptest::prelude::*;

const MINUTE: Duration = Duration::from_secs(60);
const DAY: Window = Window::DEFAULT[2];

fn window(ceiling: &Ceiling, window: Window, now: Duration) -> WindowCount {
    let counts: HashMap<Window, WindowCount> = ceiling.read(now).into_iter().collect();
    counts[&window].clone()
}

#[test]
fn the_windows_of_a_namespace_fit_into_640_kib() {
    let slots: usize = Window::DEFAULT.into_iter().map(Window::slots).sum();
    // The present minute has a sketch, too.
    assert!((slots + 1) * (HyperLogLog::HEAP_BYTES + size_of::<(u64, WindowCount)>()) <= 640 << 10);
}

#[test]
fn distinct_blocks_of_a_day_are_within_0_85_percent_rms() {
    let mut worst: f64 = 0.0;
    for (distinct, trials) in [(1_000u64, 100), (30_000, 100), (200_000, 40)] {
        let mut squares = 0.0;
        for trial in 0..trials {
            let mut ceiling = Ceiling::new(&Window::DEFAULT);
            let keys: Vec<u64> = (0..distinct).map(|n| spread(trial << 40 | n)).collect();
            // Every block in two of 24 hours, so that slots overlap.
            for (hour, part) in keys.chunks(distinct.div_ceil(23) as usize).enumerate() {
                for repeat in 0..2 {
                    let now = MINUTE * (60 * (hour as u32 + repeat) + 7 + repeat);
                    ceiling.record(part.iter().copied(), 0, now.max(MINUTE * 60 * hour as u32));
                }
            }
            let count = window(&ceiling, DAY, MINUTE * (60 * 23 + 30));
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
    let mut ceiling = Ceiling::new(&Window::DEFAULT);
    let epoch = Duration::from_secs(1_800_000_000 / 3600 * 3600);
    ceiling.record([1, 2, 2], 1, epoch);
    ceiling.record([2, 3], 0, epoch + MINUTE * 20);
    let seen = |now: Duration| {
        let counts = ceiling.read(epoch + now);
        counts.into_iter().map(|(_, count)| (count.references, count.hits)).collect::<Vec<_>>()
    };
    assert_eq!(seen(MINUTE * 20), [(2, 0), (5, 1), (5, 1)]);
    assert_eq!(seen(MINUTE * 34), [(2, 0), (5, 1), (5, 1)]);
    assert_eq!(seen(MINUTE * 35), [(0, 0), (5, 1), (5, 1)]);
    assert_eq!(seen(MINUTE * 60), [(0, 0), (2, 0), (5, 1)]);
    assert_eq!(seen(MINUTE * 80), [(0, 0), (0, 0), (5, 1)]);
    assert_eq!(seen(MINUTE * 60 * 24), [(0, 0); 3]);
    let day = window(&ceiling, DAY, epoch + MINUTE * 30);
    assert!((day.ceiling().unwrap() - 0.4).abs() < 0.01);
    assert_eq!(day.hit_ratio(), Some(0.2));
    assert_eq!((WindowCount::default().ceiling(), WindowCount::default().hit_ratio()), (None, None));
}

#[test]
fn an_operator_chooses_the_windows() {
    let window = |minutes: u64| Window::new(Duration::from_secs(60 * minutes));
    for (minutes, slots, name) in [
        (5, 5, "5m"),
        (15, 15, "15m"),
        (60, 12, "1h"),
        (240, 16, "4h"),
        (24 * 60, 24, "24h"),
        (7 * 1440, 14, "168h"),
    ] {
        let window = window(minutes).unwrap();
        assert_eq!(
            (window.slots(), window.seconds(), window.to_string()),
            (slots, 60 * minutes, name.to_owned())
        );
    }
    assert_eq!(Window::DEFAULT.map(|default| window(default.seconds() / 60)), Window::DEFAULT.map(Ok));
    assert_eq!(window(27), Err(BadWindow::NotWhole(5)));
    assert_eq!([window(4), window(7 * 1440 + 720)], [Err(BadWindow::Length); 2]);
    assert_eq!(Window::new(Duration::from_millis(300_500)), Err(BadWindow::NotWhole(1)));
}

#[test]
fn nodes_merge_to_what_one_would_have_counted() {
    let (mut left, mut right, mut both) =
        (Ceiling::new(&Window::DEFAULT), Ceiling::new(&Window::DEFAULT), Ceiling::new(&Window::DEFAULT));
    for n in 0..20_000u64 {
        let now = MINUTE * (n / 100) as u32;
        if n % 3 > 0 {
            left.record([n % 7000], n % 2, now);
            both.record([n % 7000], n % 2, now);
        }
        if n % 3 < 2 {
            right.record([n % 9000], 0, now);
            both.record([n % 9000], 0, now);
        }
    }
    for each in Window::DEFAULT {
        let now = MINUTE * 199;
        let mut merged = window(&left, each, now);
        let sent = window(&right, each, now);
        let received = HyperLogLog::from_bytes(sent.distinct.as_bytes()).unwrap();
        merged.merge(&WindowCount { distinct: received, ..sent });
        let whole = window(&both, each, now);
        assert_eq!((merged.references, merged.hits), (whole.references, whole.hits));
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
    let mut ceilings = Ceilings::new(&Window::DEFAULT);
    for namespace in 0..17 {
        ceilings.record(namespace, &[1, 1], 0, MINUTE * namespace as u32);
    }
    let kept = |ceilings: &Ceilings| ceilings.namespaces().map(|(name, _)| name).collect::<HashSet<_>>();
    assert_eq!(kept(&ceilings), (0..16).collect());
    // The same key in 17 namespaces is 17 blocks.
    let total = window(ceilings.total(), Window::DEFAULT[1], MINUTE * 17);
    assert_eq!((total.references, total.distinct.estimate().round()), (34, 17.0));
    ceilings.record(16, &[1], 0, MINUTE * 60);
    assert_eq!(kept(&ceilings), (1..17).collect());
}

proptest! {
    #[test]
    fn windows_cover_what_they_say(
        requests in prop::collection::vec((0u64..400, prop::collection::vec(0u64..500, 0..40)), 1..20),
    ) {
        let mut ceiling = Ceiling::new(&Window::DEFAULT);
        let mut log: Vec<(Duration, Vec<u64>)> = Vec::new();
        let mut now = Duration::from_secs(1_800_000_000);
        for (seconds, keys) in requests {
            now += Duration::from_secs(seconds * seconds / 8);
            ceiling.record(keys.iter().copied(), 0, now);
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
