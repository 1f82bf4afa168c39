//! Kills a process that fills a small tier at any moment, again and again. The next process to open the file never
//! reads a wrong byte. It finds every block that the killed one was told is stored, unless the block made room for
//! younger ones.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod support;

use std::cell::Cell;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kvlane_ssd::{Options, SsdPath, WriteEnd};
use support::*;

/// Set for the process that is killed: the file.
const CHILD: &str = "KVLANE_SSD_TEST_CHILD";
/// How many rounds.
const ROUNDS: &str = "KVLANE_TEST_ROUNDS";
/// When the process is killed follows from it; another one each time.
const SEED: &str = "KVLANE_TEST_SEED";
const SEGMENT: u64 = 128 * KIB;
/// The youngest of so many bytes are in no segment that is emptied: half of the file's segments.
const KEPT: u64 = 5 * SEGMENT;

/// What a helper takes where no test says otherwise.
const PATH: SsdPath = SsdPath::Auto;

/// Which way the process that begins with this block takes. The next process takes the other one.
fn way(first: u64) -> SsdPath {
    if first.is_multiple_of(2) { SsdPath::Direct } else { SsdPath::Staged }
}

fn options(path: &Path, way: SsdPath) -> Options {
    Options {
        path: way,
        staging_bytes: 2 * MIB,
        segment_bytes: Some(SEGMENT),
        checkpoint_interval: Duration::from_millis(2),
        ..Options::new(vec![device(path, 16 * SEGMENT + 64 * KIB)])
    }
}

fn block(number: u64) -> Block {
    let lengths: [&[u64]; 4] = [&[3000, 9000], &[1], &[20_000], &[500; 13]];
    Block::new(number, lengths[number as usize % 4])
}

fn record_bytes(block: &Block) -> u64 {
    4096 + block.lengths.iter().map(|bytes| bytes.next_multiple_of(4096)).sum::<u64>()
}

/// Writes blocks, eight at a time, reads some so that cleaning copies, and says which are stored.
fn fill(path: &Path, first: u64) -> ! {
    let mut pool = Pool::new(4 * MIB);
    let tier = open(options(path, way(first)), &pool);
    let mut number = first;
    loop {
        pool.reset();
        let (end, ends) = channel();
        let mut started = 0;
        for _ in 0..8 {
            let (end, block) = (end.clone(), block(number));
            let (record, this) = (pool.record(&block), number);
            number += 1;
            if tier.write(record, move |how| end.send((this, how)).unwrap_or(())).is_ok() {
                started += 1;
            }
        }
        for _ in 0..started {
            let (number, how) = ends.recv().unwrap();
            if how == WriteEnd::Stored {
                println!("stored {number}");
            }
        }
        for older in [number.saturating_sub(9), number.saturating_sub(60)] {
            fetch(&tier, &mut pool, &block(older));
        }
    }
}

/// Not a test by itself: what the killed process runs.
#[test]
fn child() {
    if let Ok(path) = std::env::var(CHILD) {
        let (path, first) = path.split_once('|').unwrap();
        fill(Path::new(path), first.parse().unwrap());
    }
}

#[test]
fn a_daemon_killed_at_any_moment_leaves_what_it_stored_and_nothing_wrong() {
    let rounds: u64 = std::env::var(ROUNDS).map_or(10, |rounds| rounds.parse().unwrap());
    let seed: u64 = std::env::var(SEED).map_or_else(
        |_| SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as u64,
        |seed| seed.parse().unwrap(),
    );
    println!("{rounds} rounds of {SEED}={seed}");
    let (directory, mut pool) = (tempfile::tempdir().unwrap(), Pool::new(MIB));
    let path = directory.path().join("tier");
    let mut stored: Vec<u64> = Vec::new();
    let mut dice = seed;
    let scanned = Cell::new(0);
    let (mut first, mut found) = (0, 0);
    // A kill may leave nothing that only headers tell of: then it goes on for a while.
    let goes_on = |round: u64, scanned: u64| round < rounds || (scanned == 0 && round < 10 * rounds);
    for round in (0..).take_while(|round| goes_on(*round, scanned.get())) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(CHILD, format!("{}|{first}", path.display()))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // After some writes and a bit: any moment of a write, a cleaning, a checkpoint, or of the start.
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (writes, bit) = (dice >> 33 & 0xFF, Duration::from_micros(dice >> 50 & 0xFFF));
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut told = Vec::new();
        let number = |line: &str| line.strip_prefix("stored ").and_then(|number| number.parse::<u64>().ok());
        while (told.len() as u64) < writes {
            told.extend(number(&lines.next().expect("the child ended by itself").unwrap()));
        }
        std::thread::sleep(bit);
        child.kill().unwrap();
        child.wait().unwrap();
        told.extend(lines.map_while(Result::ok).filter_map(|line| number(&line)));
        stored.extend(told);

        let tier = open(options(&path, way(first + 1)), &pool);
        scanned.set(scanned.get() + tier.stats().recovered_by_scan);
        let next = stored.last().map_or(first, |last| last + 1).max(first) + 16;
        let mut young = 0;
        for &number in stored.iter().rev() {
            young += record_bytes(&block(number));
            let is_there = is_found(&tier, &mut pool, &block(number));
            assert!(is_there || young > KEPT, "block {number} was stored and is lost in round {round}");
        }
        // Those too that were written and not told of: `is_found` compares their bytes.
        for number in first.saturating_sub(300)..next {
            found += u64::from(is_found(&tier, &mut pool, &block(number)));
        }
        assert_eq!(tier.stats().reads_failed, 0);
        assert!(tier.close(PATIENCE));
        stored.drain(..stored.len().saturating_sub(200));
        first = next;
    }
    assert!(found > rounds * 20, "the tier holds blocks: {found}");
    assert!(scanned.get() > 0, "some were found by their headers");
}
