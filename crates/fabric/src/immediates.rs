//! Numbers that arrive after a transfer's bytes.
//!
//! A transfer ends with at most one immediate, sent after all of its bytes are in place. When a path dies while an
//! immediate is under way, its sender cannot know whether it arrived and sends it again over another path: the receiver
//! tells the second one by its number, which the sender counts up for each receiver.

use std::collections::{BTreeSet, HashMap};

/// What an arriving immediate did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// It counts; so many have arrived for this counter by now.
    Counted(u64),
    /// It has been counted before.
    Again,
    /// The counter's use is over.
    Stale,
}

/// Counters of one process, by their number, and what peers have sent.
///
/// A counter exists from the first time that either side names it: whether the immediate or the wait comes first makes no
/// difference. Counts never fall; a wait is over when the count has reached what it waits for, or passed it.
#[derive(Debug, Default)]
pub struct Immediates {
    counters: HashMap<u32, Counter>,
    senders: HashMap<u128, Seen>,
}

#[derive(Debug, Default)]
struct Counter {
    /// A slot is used again with the next generation.
    generation: u32,
    count: u64,
}

/// Immediates of one sender that have arrived.
#[derive(Debug, Default)]
struct Seen {
    /// All below have arrived, or will not count any more.
    below: u64,
    /// Those that arrived ahead of others.
    ahead: BTreeSet<u64>,
}

/// Immediates that may arrive ahead of the oldest that is missing. One that was given up under way is missing for ever: so
/// long after it, nobody waits for it any more.
const AHEAD_MAX: usize = 65_536;

impl Immediates {
    /// An immediate for a counter arrived, the `number`-th (from 0) of `sender`, which is a peer's process: its engine id.
    pub fn arrive(&mut self, sender: u128, number: u64, counter: u32, generation: u32) -> Arrival {
        if !self.senders.entry(sender).or_default().is_new(number) {
            return Arrival::Again;
        }
        let counter = self.counters.entry(counter).or_default();
        if counter.generation > generation {
            return Arrival::Stale;
        }
        if counter.generation < generation {
            // The sender learned of the new use before the wait for it began here.
            *counter = Counter { generation, count: 0 };
        }
        counter.count += 1;
        Arrival::Counted(counter.count)
    }

    /// How many have arrived for a counter of this generation.
    pub fn count(&self, counter: u32, generation: u32) -> u64 {
        self.counters
            .get(&counter)
            .filter(|known| known.generation == generation)
            .map_or(0, |known| known.count)
    }

    /// Ends a counter's use: what still arrives for this generation or an older one is stale. The generation to use next
    /// is answered.
    pub fn retire(&mut self, counter: u32, generation: u32) -> u32 {
        let known = self.counters.entry(counter).or_default();
        if known.generation <= generation {
            *known = Counter { generation: generation + 1, count: 0 };
        }
        known.generation
    }

    /// Forgets a peer's process, which is gone and will not come back.
    pub fn forget(&mut self, sender: u128) {
        self.senders.remove(&sender);
    }
}

impl Seen {
    /// Takes note of a number; false if it has been noted before.
    fn is_new(&mut self, number: u64) -> bool {
        if number < self.below || !self.ahead.insert(number) {
            return false;
        }
        while self.ahead.remove(&self.below) {
            self.below += 1;
        }
        if self.ahead.len() > AHEAD_MAX
            && let Some(oldest) = self.ahead.pop_first()
        {
            self.below = oldest + 1;
            while self.ahead.remove(&self.below) {
                self.below += 1;
            }
        }
        true
    }
}
