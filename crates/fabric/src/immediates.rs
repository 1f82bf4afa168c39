//! Counters, and the immediates that count at them exactly once.
//!
//! A transfer ends with at most one immediate, sent after all of its bytes are in place. If a path breaks while an immediate is
//! under way, the sender cannot know whether it arrived, and sends it again over another path. Both copies have the same number,
//! which the sender counts up for each receiver. The receiver remembers the numbers that it has seen, and ignores the second.

use std::collections::{BTreeSet, HashMap};

/// The effect of an immediate that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// It counted; the counter's new count.
    Counted(u64),
    /// It has arrived before, and does not count again.
    Again,
    /// The generation of the counter that it names has been retired.
    Stale,
    /// No honest peer sends this: a generation that has not begun, the last of all numbers, or one counter more than
    /// [`COUNTERS_MAX`] that only peers have named.
    Refused,
}

/// Most counters that only peers have named.
pub const COUNTERS_MAX: usize = 65_536;

/// How far a sender's next number may be ahead of its oldest immediate whose outcome it does not know. The receiver remembers
/// at least as many.
pub(crate) const IMMEDIATES_AHEAD: u64 = 65_536;

/// The counters of one engine, by number, and the numbers that peers have sent.
///
/// A counter exists from the first time that either side names it, so the immediate may come before the wait. Counts never
/// fall; a wait is over when the count has reached its target, or passed it. Only the owner of a counter retires a generation
/// and begins the next.
#[derive(Debug, Default)]
pub struct Immediates {
    counters: HashMap<u32, Counter>,
    /// Counters that only peers have named.
    foreign: usize,
    /// By session of a peer.
    senders: HashMap<u128, SeenNumbers>,
}

#[derive(Debug, Default)]
struct Counter {
    /// Counts the retirements, from 0.
    generation: u32,
    count: u64,
    /// The owner has named it.
    own: bool,
}

/// The numbers of one sender that have arrived.
#[derive(Debug, Default)]
struct SeenNumbers {
    /// All lower numbers have arrived, or will not count any more.
    below: u64,
    /// Numbers that arrived before some lower one.
    ahead: BTreeSet<u64>,
}

impl Immediates {
    /// Counts an immediate that arrived. It is the `number`-th message or immediate, from 0, of `sender`, a session of a peer.
    pub fn arrive(&mut self, sender: u128, number: u64, counter: u32, generation: u32) -> Arrival {
        if number == u64::MAX {
            return Arrival::Refused;
        }
        let known = self.counters.get(&counter);
        if generation > known.map_or(0, |known| known.generation)
            || (known.is_none() && self.foreign >= COUNTERS_MAX)
        {
            return Arrival::Refused;
        }
        if !self.note(sender, number) {
            return Arrival::Again;
        }
        let counter = self.counters.entry(counter).or_insert_with(|| {
            self.foreign += 1;
            Counter::default()
        });
        if counter.generation > generation {
            return Arrival::Stale;
        }
        counter.count += 1;
        Arrival::Counted(counter.count)
    }

    /// Whether this number of a sender has arrived, or is so old that it counts as arrived. Messages and immediates are numbered
    /// together.
    pub(crate) fn has_seen(&self, sender: u128, number: u64) -> bool {
        self.senders.get(&sender).is_some_and(|seen| number < seen.below || seen.ahead.contains(&number))
    }

    /// Records a number of a sender. False: it has arrived before, or is too old.
    pub(crate) fn note(&mut self, sender: u128, number: u64) -> bool {
        self.senders.entry(sender).or_default().insert(number)
    }

    /// Opens a counter of this process, and returns its current generation, which peers have to send.
    pub fn open(&mut self, counter: u32) -> u32 {
        let known = self.counters.entry(counter).or_insert_with(|| {
            self.foreign += 1;
            Counter::default()
        });
        if !std::mem::replace(&mut known.own, true) {
            self.foreign -= 1;
        }
        known.generation
    }

    /// The count of a counter in this generation; 0 for another generation.
    pub fn count(&self, counter: u32, generation: u32) -> u64 {
        let known = self.counters.get(&counter).filter(|known| known.generation == generation);
        known.map_or(0, |known| known.count)
    }

    /// Whether this generation of a counter has been retired.
    pub fn is_retired(&self, counter: u32, generation: u32) -> bool {
        self.counters.get(&counter).is_some_and(|known| known.generation > generation)
    }

    /// Retires a generation of a counter: immediates that still arrive for it, or an older one, are stale. Returns the next
    /// generation. A counter that has had all generations stays at the last one, which cannot be retired.
    pub fn retire(&mut self, counter: u32, generation: u32) -> u32 {
        self.open(counter);
        let Some(known) = self.counters.get_mut(&counter) else { return 0 };
        if known.generation <= generation
            && let Some(next) = known.generation.checked_add(1)
        {
            (known.generation, known.count) = (next, 0);
        }
        known.generation
    }

    /// Forgets the numbers of a session, whose peer sends nothing again.
    pub fn forget(&mut self, sender: u128) {
        self.senders.remove(&sender);
    }
}

impl SeenNumbers {
    /// Records a number. False: it has arrived before, or is too old.
    fn insert(&mut self, number: u64) -> bool {
        if number < self.below || !self.ahead.insert(number) {
            return false;
        }
        // A number that was given up under way never arrives. The sender is never further ahead of one that it may still send.
        if self.ahead.len() as u64 > IMMEDIATES_AHEAD
            && let Some(oldest) = self.ahead.first()
        {
            self.below = *oldest;
        }
        while self.ahead.remove(&self.below) {
            self.below += 1;
        }
        true
    }
}
