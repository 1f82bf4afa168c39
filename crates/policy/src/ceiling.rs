//! [`Ceiling`]: over several time windows, the hit rate beside its ceiling, which is what an unlimited cache could have hit.
//!
//! If N block references in the window went to U different blocks, all others could have been hits. So the ceiling is
//! r* = (N - U) / N. N is counted, U is estimated by [`HyperLogLog`] sketches. A key is added only to the sketch of the
//! present minute. When the minute is over, its sketch is merged into the present slot of each window. A window is the
//! union of its slots, the one being filled included, so it covers its length less up to one slot.
//!
//! Time counts from the Unix epoch, so that several nodes have the same slots and their windows can be
//! [merged](WindowCount::merge).

use std::fmt;
use std::time::Duration;

use thiserror::Error;

use crate::hyperloglog::HyperLogLog;
use crate::key::spread;

/// Limit of namespaces that have windows of their own.
const NAMESPACES: usize = 16;
/// Lengths that a slot can have, in minutes.
const SLOT_MINUTES: [u64; 7] = [1, 5, 15, 60, 180, 360, 720];
/// Most slots of a window, each with a sketch of 12 KiB.
const SLOTS_MAX: u64 = 24;

/// A time window over which hits and their ceiling are counted, in at most 24 slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Window {
    minutes: u64,
    slot_minutes: u64,
}

/// Why a window cannot have this length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum BadWindow {
    /// It is too short or too long.
    #[error("a window has 5 minutes to 7 days")]
    Length,
    /// Its slots would not be whole. Holds the length of its slots in minutes.
    #[error("a window of this length has a multiple of {0} minutes")]
    NotWhole(u64),
}

impl Window {
    /// 15 minutes in slots of one, an hour in slots of 5 minutes, and 24 hours in slots of one.
    pub const DEFAULT: [Self; 3] = [
        Self { minutes: 15, slot_minutes: 1 },
        Self { minutes: 60, slot_minutes: 5 },
        Self { minutes: 24 * 60, slot_minutes: 60 },
    ];

    /// A window of this length, in the shortest slots of which it needs at most 24.
    ///
    /// # Errors
    /// The length is out of range, or no multiple of the slot.
    pub fn new(length: Duration) -> Result<Self, BadWindow> {
        let (seconds, day) = (length.as_secs(), 24 * 3600);
        if !(300..=7 * day).contains(&seconds) {
            return Err(BadWindow::Length);
        }
        let slots_of = |slot: u64| seconds.div_ceil(60 * slot);
        let slot_minutes = SLOT_MINUTES.into_iter().find(|&slot| slots_of(slot) <= SLOTS_MAX);
        let slot_minutes = slot_minutes.ok_or(BadWindow::Length)?;
        if !seconds.is_multiple_of(60 * slot_minutes) || length.subsec_nanos() > 0 {
            return Err(BadWindow::NotWhole(slot_minutes));
        }
        Ok(Self { minutes: seconds / 60, slot_minutes })
    }

    /// Its length in seconds.
    pub fn seconds(self) -> u64 {
        60 * self.minutes
    }

    /// How many slots it has.
    pub fn slots(self) -> usize {
        (self.minutes / self.slot_minutes) as usize
    }

    /// Start of the oldest slot that the window covers at `now`.
    pub fn start(self, now: Duration) -> Duration {
        let slot = minute(now) / self.slot_minutes;
        let first = slot.saturating_sub(self.slots() as u64 - 1);
        Duration::from_secs(first * self.slot_minutes * 60)
    }
}

/// The name that metrics use: "15m", "24h".
impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.minutes {
            minutes if minutes.is_multiple_of(60) => write!(f, "{}h", minutes / 60),
            minutes => write!(f, "{minutes}m"),
        }
    }
}

fn minute(now: Duration) -> u64 {
    now.as_secs() / 60
}

/// References, hits and different blocks in a span of time, on one node or, after a merge, on several.
#[derive(Clone, Default)]
pub struct WindowCount {
    /// Block references, N in the ceiling's formula.
    pub references: u64,
    /// References that were hits.
    pub hits: u64,
    /// Sketch of the blocks that were referenced.
    pub distinct: HyperLogLog,
}

impl WindowCount {
    /// Adds the counts of another node.
    pub fn merge(&mut self, other: &Self) {
        self.references += other.references;
        self.hits += other.hits;
        self.distinct.merge(&other.distinct);
    }

    /// The share of references that an unlimited cache could have hit, 0 to 1; None without references.
    pub fn ceiling(&self) -> Option<f64> {
        let references = self.references as f64;
        (self.references > 0).then(|| (1.0 - self.distinct.estimate() / references).max(0.0))
    }

    /// The share of references that were hits, 0 to 1; None without references.
    pub fn hit_ratio(&self) -> Option<f64> {
        (self.references > 0).then(|| self.hits as f64 / self.references as f64)
    }

    fn clear(&mut self) {
        (self.references, self.hits) = (0, 0);
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
        let number = minute / self.window.slot_minutes;
        let at = (number % self.slots.len() as u64) as usize;
        let (held, count) = &mut self.slots[at];
        if *held != number {
            *held = number;
            count.clear();
        }
        count
    }

    /// The union of the slots that the window covers at `minute`, and of the present minute.
    fn union(&self, minute: u64, (present, count): (u64, &WindowCount)) -> WindowCount {
        let last = minute / self.window.slot_minutes;
        let covered = last.saturating_sub(self.slots.len() as u64 - 1)..=last;
        let mut union = WindowCount::default();
        for (_, count) in self.slots.iter().filter(|(number, _)| covered.contains(number)) {
            union.merge(count);
        }
        if covered.contains(&(present / self.window.slot_minutes)) {
            union.merge(count);
        }
        union
    }
}

/// The windows of one stream of references. A slot that was used takes 12 KiB.
pub struct Ceiling {
    windows: Vec<WindowSlots>,
    /// The minute being counted, which is not merged into the windows yet.
    present: (u64, WindowCount),
}

impl Ceiling {
    /// These windows, without a reference.
    pub fn new(windows: &[Window]) -> Self {
        let windows = windows.iter().map(|window| WindowSlots::new(*window)).collect();
        Self { windows, present: (0, WindowCount::default()) }
    }

    /// Counts a request that referenced these blocks, of which `hits` were hits. A `now` before the present minute counts as
    /// the present minute.
    pub fn record(&mut self, keys: impl IntoIterator<Item = u64>, hits: u64, now: Duration) {
        let (present, count) = &mut self.present;
        let now = minute(now).max(*present);
        if now != *present {
            self.windows.iter_mut().for_each(|window| window.slot(*present).merge(count));
            count.clear();
            *present = now;
        }
        count.hits += hits;
        for key in keys {
            count.references += 1;
            count.distinct.insert(spread(key));
        }
    }

    /// The counts of all windows at `now`. Takes some milliseconds for a window of many slots.
    pub fn read(&self, now: Duration) -> Vec<(Window, WindowCount)> {
        let present = (self.present.0, &self.present.1);
        let now = minute(now).max(present.0);
        self.windows.iter().map(|slots| (slots.window, slots.union(now, present))).collect()
    }
}

/// The ceilings of the whole cache and of at most 16 namespaces.
pub struct Ceilings {
    windows: Vec<Window>,
    total: Ceiling,
    namespaces: Vec<(u64, Duration, Ceiling)>,
}

impl Ceilings {
    /// Empty windows of all references, and no namespace.
    pub fn new(windows: &[Window]) -> Self {
        Self { windows: windows.to_vec(), total: Ceiling::new(windows), namespaces: Vec::new() }
    }

    /// Counts a request of `namespace`, any number that identifies it, that referenced these blocks, of which `hits` were
    /// hits. The same key in two namespaces is two blocks. A namespace beyond the 16th replaces one that had no request for
    /// an hour. As long as there is none, the new namespace counts only in the total.
    pub fn record(&mut self, namespace: u64, keys: &[u64], hits: u64, now: Duration) {
        let salt = spread(namespace);
        self.total.record(keys.iter().map(|key| key ^ salt), hits, now);
        if let Some(ceiling) = self.of_namespace(namespace, now) {
            ceiling.record(keys.iter().copied(), hits, now);
        }
    }

    fn of_namespace(&mut self, namespace: u64, now: Duration) -> Option<&mut Ceiling> {
        let at = match self.namespaces.iter().position(|(known, ..)| *known == namespace) {
            Some(at) => at,
            None if self.namespaces.len() < NAMESPACES => {
                self.namespaces.push((namespace, now, Ceiling::new(&self.windows)));
                self.namespaces.len() - 1
            }
            None => {
                let (at, (_, heard, _)) =
                    self.namespaces.iter().enumerate().min_by_key(|(_, (_, heard, _))| *heard)?;
                if now.saturating_sub(*heard) < Duration::from_secs(3600) {
                    return None;
                }
                self.namespaces[at] = (namespace, now, Ceiling::new(&self.windows));
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
