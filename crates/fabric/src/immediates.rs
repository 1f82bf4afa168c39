//! Numbers that arrive after a transfer's bytes, and which of a sender's numbers have arrived.
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
    /// The use of the counter that it is for is over.
    Stale,
    /// No honest peer sends this: a use of the counter that has not begun, a number beyond all others, or more counters
    /// than [`COUNTERS_MAX`] that nobody here knows.
    Refused,
}

/// Most counters that only peers have named.
pub const COUNTERS_MAX: usize = 65_536;

/// Most immediates to one receiver whose outcome a sender does not know, counted from the oldest. A receiver remembers more.
pub(crate) const IMMEDIATES_AHEAD: u64 = 65_536;

/// Counters of one process, by their number, and what peers have sent.
///
/// A counter exists from the first time that either side names it: whether the immediate or the wait comes first makes no
/// difference. Counts never fall; a wait is over when the count has reached what it waits for, or passed it. Only its owner
/// ends a use of a counter and begins the next.
#[derive(Debug, Default)]
pub struct Immediates {
    counters: HashMap<u32, Counter>,
    /// Of them, those that only peers have named.
    foreign: usize,
    senders: HashMap<u128, Seen>,
}

#[derive(Debug, Default)]
struct Counter {
    /// A number is used again with the next generation; the first is 0.
    generation: u32,
    count: u64,
    /// Its owner has named it.
    own: bool,
}

/// Immediates of one sender that have arrived.
#[derive(Debug, Default)]
struct Seen {
    /// All below have arrived, or will not count any more.
    below: u64,
    /// Those that arrived ahead of others.
    ahead: BTreeSet<u64>,
}

impl Immediates {
    /// An immediate for a counter arrived, the `number`-th (from 0) of `sender`, which is what a peer's process is to this one.
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

    /// Whether this number of a sender has arrived, or is taken for one that has. Messages are numbered with the immediates.
    pub(crate) fn has_seen(&self, sender: u128, number: u64) -> bool {
        self.senders.get(&sender).is_some_and(|seen| number < seen.below || seen.ahead.contains(&number))
    }

    /// Takes note of a number of a sender; false if it has been noted before.
    pub(crate) fn note(&mut self, sender: u128, number: u64) -> bool {
        self.senders.entry(sender).or_default().is_new(number)
    }

    /// Names a counter of this process, and answers the generation of its use now, which peers are to send.
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

    /// How many have arrived for a counter of this generation.
    pub fn count(&self, counter: u32, generation: u32) -> u64 {
        let known = self.counters.get(&counter).filter(|known| known.generation == generation);
        known.map_or(0, |known| known.count)
    }

    /// Whether this use of a counter has ended.
    pub fn is_retired(&self, counter: u32, generation: u32) -> bool {
        self.counters.get(&counter).is_some_and(|known| known.generation > generation)
    }

    /// Ends a counter's use: what still arrives for this generation or an older one is stale. Answers the generation to use
    /// next; a counter whose generations are used up stays at the last one, which does not end.
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
        // One that was given up under way is missing for ever: so long after it, nobody waits for it any more.
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
