//! Measures the index by itself: bytes an entry, nanoseconds a change, microseconds a lookup. For `kvlane bench index`.
//!
//! 16 owners fill the index by snapshots. Then each in turn withdraws 256 keys and announces 256 others, at random places
//! of its list. Lookups ask 625 keys of a prompt that one owner has, that nobody has, or of which all owners have the
//! first 64. At last one owner leaves and is swept. All figures but `random_read_ns` count hashing, too.

use std::hint::black_box;
use std::time::{Duration, Instant};

use crate::{Changes, Delta, Index, Limits, Part, Question, Refused, Timing};
use kvlane_block::{BlockHash, CutDigest, Namespace, Space};

const OWNERS: u64 = 16;
const PROMPT: u64 = 625;
const SHARED: u64 = 64;
const PART: u64 = 4096;
/// Entries that a step of the sweep looks at.
const SWEEP: usize = 10_000;
const NOW: Duration = Duration::from_secs(1000);

/// Fewest entries that [`measure`] takes.
pub const ENTRIES_MIN: u64 = OWNERS * 4096;

/// A number without a pattern, made from another one.
pub fn mixed(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9E37_79B9_7F4A_7C15).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed ^= mixed >> 31;
    mixed = mixed.wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ mixed >> 29
}

/// The hash of block `number` of an owner. No list of hashes takes memory.
pub fn hash(owner: u64, number: u64) -> BlockHash {
    let low = mixed(owner << 40 | number);
    BlockHash((u128::from(mixed(low)) << 64 | u128::from(low)).to_le_bytes())
}

fn name(owner: u64) -> String {
    format!("host-{owner}")
}

struct Bench {
    index: Index,
    space: Space,
}

impl Bench {
    /// Sends the snapshots of all owners. Returns how long the index took.
    fn fill(&mut self, keys: u64) -> Result<Duration, Refused> {
        let mut spent = Duration::ZERO;
        for owner in 0..OWNERS {
            let name = name(owner);
            self.index.join(&name, 1, "10.0.0.1:7000", NOW)?;
            let ticket = self.index.tick(NOW)[0].ticket;
            let parts = keys.div_ceil(PART);
            for number in 0..parts {
                let range = number * PART..keys.min((number + 1) * PART);
                let hashes = range.map(|number| hash(owner, number)).collect();
                let (is_last, space) = (number + 1 == parts, self.space);
                let number = number as u32;
                let part = Part { ticket, number, is_last, base: 0, read_at: 0, space, hashes };
                let begun = Instant::now();
                self.index.part(&name, 1, &part, NOW)?;
                spent += begun.elapsed();
            }
        }
        Ok(spent)
    }

    /// Owners change keys. Returns nanoseconds a change, for each delta.
    fn change(&mut self, keys: u64, deltas: u64) -> Result<Vec<f64>, Refused> {
        let mut each = Vec::new();
        for nth in 0..deltas {
            let owner = nth % OWNERS;
            let round = nth / OWNERS;
            let from = mixed(nth) % (keys - 256);
            let withdrawn = (from..from + 256).map(|number| hash(owner, number)).collect();
            let announced = (0..256).map(|number| hash(owner, 1 << 36 | nth << 8 | number)).collect();
            let changes = vec![Changes { space: self.space, announced, withdrawn }];
            let (first, last) = (round * 512 + 1, round * 512 + 512);
            let name = name(owner);
            let begun = Instant::now();
            self.index.delta(&name, 1, Delta { first, last, changes }, NOW)?;
            each.push(begun.elapsed().as_secs_f64() * 1e9 / 512.0);
        }
        Ok(each)
    }

    /// Asks for prompts. Returns microseconds a lookup, and the positions that the first owner of each answer had.
    fn find(
        &self,
        questions: u64,
        prompt: impl Fn(u64) -> Vec<BlockHash>,
    ) -> Result<(Vec<f64>, u64), Refused> {
        let mut each = Vec::new();
        let mut positions = 0;
        for nth in 0..questions {
            let hashes = prompt(nth);
            let question = Question {
                space: &self.space,
                hashes: &hashes,
                only_prefix: false,
                except: None,
                turn: nth as u32,
            };
            let begun = Instant::now();
            let answer = black_box(self.index.find(&question, NOW)?);
            each.push(begun.elapsed().as_secs_f64() * 1e6);
            positions +=
                answer.iter().flat_map(|owner| &owner.positions).map(|run| run.len() as u64).sum::<u64>();
        }
        Ok((each, positions))
    }
}

/// Nanoseconds a read of a random word in so many bytes, with reads that overlap: the ceiling of what a table can reach.
fn random_read(bytes: usize) -> f64 {
    let words: Vec<u64> = (0..bytes as u64 / 8).collect();
    let at: Vec<usize> = (0..1 << 20).map(|nth| mixed(nth) as usize % words.len()).collect();
    let begun = Instant::now();
    black_box(at.iter().fold(0, |all, at| all ^ words[*at]));
    begun.elapsed().as_secs_f64() * 1e9 / at.len() as f64
}

fn at(each: &mut [f64], part: f64) -> f64 {
    each.sort_by(f64::total_cmp);
    each[((each.len() - 1) as f64 * part) as usize]
}

fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096
}

/// Figures by name, of an index with so many entries, at least [`ENTRIES_MIN`].
///
/// # Errors
/// The index refuses a message: more entries than [`Limits::entries`].
pub fn measure(entries: u64) -> Result<Vec<(&'static str, f64)>, Refused> {
    let keys = entries.max(ENTRIES_MIN) / OWNERS;
    let space = Space { namespace: Namespace([1; 16]), cut: CutDigest([2; 16]) };
    let index = Index::new([3, 4], Limits::default(), Timing::default());
    let mut bench = Bench { index, space };
    let before = resident();
    let filled = bench.fill(keys)?;
    let entries = bench.index.entries() as f64;
    let table_bytes = bench.index.entry_bytes() as f64 / entries;
    let resident_bytes = resident().saturating_sub(before) as f64 / entries;

    let one = |nth: u64| {
        let from = mixed(nth) % (keys - PROMPT);
        (from..from + PROMPT).map(|number| hash(nth % OWNERS, number)).collect::<Vec<_>>()
    };
    let nobody = |nth: u64| (0..PROMPT).map(|number| hash(1 << 20, nth << 20 | number)).collect::<Vec<_>>();
    let rounds = (keys / 128).min(4000);
    let (mut hits, hit_positions) = bench.find(rounds, one)?;
    let (mut misses, missed_positions) = bench.find(rounds, nobody)?;
    assert_eq!((hit_positions, missed_positions), (rounds * PROMPT, 0));

    for owner in 0..OWNERS {
        let announced = (0..SHARED).map(|number| hash(1 << 21, number)).collect();
        let changes = vec![Changes { space, announced, withdrawn: Vec::new() }];
        bench.index.delta(&name(owner), 1, Delta { first: 1, last: SHARED, changes }, NOW)?;
    }
    let shared = |nth: u64| {
        let first = (0..SHARED).map(|number| hash(1 << 21, number));
        first.chain(one(nth).into_iter().skip(SHARED as usize)).collect::<Vec<_>>()
    };
    let (mut shared, _) = bench.find(rounds, shared)?;

    let mut again = Bench { index: Index::new([5, 6], Limits::default(), Timing::default()), space };
    std::mem::swap(&mut again, &mut bench);
    drop(again);
    let refilled = bench.fill(keys)?;
    let mut changes = bench.change(keys, 2 * rounds)?;
    bench.index.bye(&name(0), 1, NOW)?;
    let hidden = bench.index.unswept() as f64;
    let mut steps = Vec::new();
    while bench.index.unswept() > 0 {
        let begun = Instant::now();
        bench.index.sweep(SWEEP);
        steps.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    let swept = steps.iter().sum::<f64>() * 1e3 / hidden;
    let read = random_read(bench.index.entry_bytes());
    Ok(vec![
        ("entries", entries),
        ("table_bytes_an_entry", table_bytes),
        ("resident_bytes_an_entry", resident_bytes),
        ("insert_ns", filled.as_secs_f64() * 1e9 / entries),
        ("insert_again_ns", refilled.as_secs_f64() * 1e9 / entries),
        ("change_ns_p50", at(&mut changes, 0.5)),
        ("change_ns_p99", at(&mut changes, 0.99)),
        ("lookup_hit_us_p50", at(&mut hits, 0.5)),
        ("lookup_hit_us_p99", at(&mut hits, 0.99)),
        ("lookup_miss_us_p50", at(&mut misses, 0.5)),
        ("lookup_miss_us_p99", at(&mut misses, 0.99)),
        ("lookup_shared_us_p50", at(&mut shared, 0.5)),
        ("sweep_ns_a_hidden_entry", swept),
        ("sweep_step_us_p50", at(&mut steps, 0.5)),
        ("sweep_step_us_p99", at(&mut steps, 0.99)),
        ("random_read_ns", read),
    ])
}
