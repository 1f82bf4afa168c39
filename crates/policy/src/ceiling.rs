//! [`Ceiling`]: the hit-rate ceiling of a time window, which is what an unlimited cache could have hit.
//!
//! If N block references in the window went to U different blocks, all others could have been hits. So the ceiling is
//! r* = (N - U) / N. N is counted, U is estimated by [`HyperLogLog`] sketches. A key is added only to the sketch of the
//! present minute. When the minute is over, its sketch is merged into those of its five minutes and its hour. A window
//! is the union of its slots, the one being filled included, so it covers its length less up to one slot.
//!
//! Time counts from the Unix epoch, so that several nodes have the same slots and their windows can be
//! [merged](WindowCount::merge).

use std::mem::size_of;
use std::time::Duration;

use crate::hyperloglog::HyperLogLog;
use crate::key::spread;

/// Limit of namespaces that have windows of their own.
const NAMESPACES: usize = 16;

/// The time windows over which ceilings are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// 15 minutes in slots of one.
    QuarterHour,
    /// One hour in slots of 5 minutes.
    Hour,
    /// 24 hours in slots of one.
    Day,
}

impl Window {
    /// All windows, shortest first.
    pub const ALL: [Self; 3] = [Self::QuarterHour, Self::Hour, Self::Day];

    /// The name that metrics use.
    pub fn name(self) -> &'static str {
        match self {
            Self::QuarterHour => "15m",
            Self::Hour => "1h",
            Self::Day => "24h",
        }
    }

    fn minutes_a_slot(self) -> u64 {
        match self {
            Self::QuarterHour => 1,
            Self::Hour => 5,
            Self::Day => 60,
        }
    }

    fn slots(self) -> usize {
        match self {
            Self::QuarterHour => 15,
            Self::Hour => 12,
            Self::Day => 24,
        }
    }

    /// Start of the oldest slot that the window covers at `now`.
    pub fn start(self, now: Duration) -> Duration {
        let slot = minute(now) / self.minutes_a_slot();
        let first = slot.saturating_sub(self.slots() as u64 - 1);
        Duration::from_secs(first * self.minutes_a_slot() * 60)
    }
}

fn minute(now: Duration) -> u64 {
    now.as_secs() / 60
}

/// References and different blocks in a span of time, on one node or, after a merge, on several.
#[derive(Clone, Default)]
pub struct WindowCount {
    /// Block references, N in the ceiling's formula.
    pub references: u64,
    /// Sketch of the blocks that were referenced.
    pub distinct: HyperLogLog,
}

impl WindowCount {
    /// Adds the counts of another node.
    pub fn merge(&mut self, other: &Self) {
        self.references += other.references;
        self.distinct.merge(&other.distinct);
    }

    /// The share of references that an unlimited cache could have hit, 0 to 1; None without references.
    pub fn ceiling(&self) -> Option<f64> {
        let references = self.references as f64;
        (self.references > 0).then(|| (1.0 - self.distinct.estimate() / references).max(0.0))
    }

    fn clear(&mut self) {
        self.references = 0;
        self.distinct.clear();
    }
}

/// The slots of a window, each with the number of its time span since the epoch.
struct WindowSlots {
    window: Window,
    slots: Vec<(u64, WindowCount)>,
}

impl WindowSlots {
    fn new(window: Window) -> Self {
        Self { window, slots: (0..window.slots()).map(|_| (0, WindowCount::default())).collect() }
    }

    /// The slot of `minute`; cleared first if it still holds an older span.
    fn slot(&mut self, minute: u64) -> &mut WindowCount {
        let number = minute / self.window.minutes_a_slot();
        let at = (number % self.slots.len() as u64) as usize;
        let (held, count) = &mut self.slots[at];
        if *held != number {
            *held = number;
            count.clear();
        }
        count
    }

    /// The union of the slots that the window covers at `minute`.
    fn union(&self, minute: u64) -> WindowCount {
        let last = minute / self.window.minutes_a_slot();
        let covered = last.saturating_sub(self.slots.len() as u64 - 1)..=last;
        let mut union = WindowCount::default();
        for (_, count) in self.slots.iter().filter(|(number, _)| covered.contains(number)) {
            union.merge(count);
        }
        union
    }
}

/// The three windows of one stream of references. Takes at most [`Ceiling::MAX_BYTES`].
pub struct Ceiling {
    minutes: WindowSlots,
    five_minutes: WindowSlots,
    hours: WindowSlots,
    /// The minute being counted, which is not merged into the longer windows yet.
    present: u64,
}

impl Default for Ceiling {
    fn default() -> Self {
        Self::new()
    }
}

impl Ceiling {
    /// Memory in bytes once every slot has been used.
    pub const MAX_BYTES: usize =
        size_of::<Self>() + (15 + 12 + 24) * (size_of::<(u64, WindowCount)>() + HyperLogLog::HEAP_BYTES);

    /// The three windows, without a reference.
    pub fn new() -> Self {
        Self {
            minutes: WindowSlots::new(Window::QuarterHour),
            five_minutes: WindowSlots::new(Window::Hour),
            hours: WindowSlots::new(Window::Day),
            present: 0,
        }
    }

    /// Counts a request that referenced these blocks. A `now` before the present minute counts as the present minute.
    pub fn record(&mut self, keys: impl IntoIterator<Item = u64>, now: Duration) {
        let now = minute(now).max(self.present);
        if now != self.present {
            self.close_minute();
            self.present = now;
        }
        let count = self.minutes.slot(now);
        for key in keys {
            count.references += 1;
            count.distinct.insert(spread(key));
        }
    }

    fn close_minute(&mut self) {
        let count = self.minutes.slot(self.present);
        self.five_minutes.slot(self.present).merge(count);
        self.hours.slot(self.present).merge(count);
    }

    /// The counts of a window at `now`. Takes some milliseconds for the longest.
    pub fn window(&self, window: Window, now: Duration) -> WindowCount {
        let now = minute(now).max(self.present);
        let slots = match window {
            Window::QuarterHour => return self.minutes.union(now),
            Window::Hour => &self.five_minutes,
            Window::Day => &self.hours,
        };
        let mut union = slots.union(now);
        let age = now / window.minutes_a_slot() - self.present / window.minutes_a_slot();
        let held = &self.minutes.slots[(self.present % self.minutes.slots.len() as u64) as usize];
        if held.0 == self.present && age < window.slots() as u64 {
            union.merge(&held.1);
        }
        union
    }

    /// The counts of all three windows at `now`.
    pub fn read(&self, now: Duration) -> [(Window, WindowCount); 3] {
        Window::ALL.map(|window| (window, self.window(window, now)))
    }
}

/// The ceilings of the whole cache and of at most 16 namespaces.
#[derive(Default)]
pub struct Ceilings {
    total: Ceiling,
    namespaces: Vec<(u64, Duration, Ceiling)>,
}

impl Ceilings {
    /// Empty windows of all references, and no namespace.
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts a request of `namespace`, any number that identifies it, that referenced these blocks. The same key in
    /// two namespaces is two blocks. A namespace beyond the 16th replaces one that had no request for an hour. As long
    /// as there is none, the new namespace counts only in the total.
    pub fn record(&mut self, namespace: u64, keys: &[u64], now: Duration) {
        let salt = spread(namespace);
        self.total.record(keys.iter().map(|key| key ^ salt), now);
        if let Some(ceiling) = self.of_namespace(namespace, now) {
            ceiling.record(keys.iter().copied(), now);
        }
    }

    fn of_namespace(&mut self, namespace: u64, now: Duration) -> Option<&mut Ceiling> {
        let at = match self.namespaces.iter().position(|(known, ..)| *known == namespace) {
            Some(at) => at,
            None if self.namespaces.len() < NAMESPACES => {
                self.namespaces.push((namespace, now, Ceiling::new()));
                self.namespaces.len() - 1
            }
            None => {
                let (at, (_, heard, _)) =
                    self.namespaces.iter().enumerate().min_by_key(|(_, (_, heard, _))| *heard)?;
                if now.saturating_sub(*heard) < Duration::from_secs(3600) {
                    return None;
                }
                self.namespaces[at] = (namespace, now, Ceiling::new());
                at
            }
        };
        let (_, heard, ceiling) = &mut self.namespaces[at];
        *heard = now.max(*heard);
        Some(ceiling)
    }

    /// The ceiling of all namespaces together.
    pub fn total(&self) -> &Ceiling {
        &self.total
    }

    /// The namespaces that have windows of their own.
    pub fn namespaces(&self) -> impl Iterator<Item = (u64, &Ceiling)> {
        self.namespaces.iter().map(|(namespace, _, ceiling)| (*namespace, ceiling))
    }
}
