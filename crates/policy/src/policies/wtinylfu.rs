use super::per_slot::PerSlot;
use super::tinylfu::mean_uses;
use crate::PrefixLru;
use crate::kind::PolicyKind;
use crate::replacement::{Blocks, ReplacementPolicy};
use crate::sketch::FrequencySketch;

/// The window holds one block in this many of the cache.
const WINDOW_SHARE: usize = 100;
/// The protected segment holds at most this many tenths of the main part.
const PROTECTED_TENTHS: usize = 5;
/// Limit of the blocks of one run that are judged together.
const RUN: usize = 1024;

/// TinyLFU behind a small LRU window, in which new blocks have a chance to be used before they are judged.
///
/// Einziger, Eytan, Friedman, Manes, "Adaptive Software Cache Management", Middleware 2018, with a window of 1 %.
/// Blocks that were inserted together leave the window together. The mean of their recent uses is compared with that of
/// as many victims of the main part. The main part is segmented: blocks that were used in it are protected, up to half
/// of it. Good for tiny caches.
pub struct WTinyLfu {
    window: PrefixLru,
    probation: PrefixLru,
    protected: PrefixLru,
    uses: FrequencySketch,
    /// Number of the run that each slot was inserted with.
    run: PerSlot<u32>,
    next_run: u32,
    /// The cache is full: the caller took a victim since the last insertion.
    full: bool,
    /// The run that lost when it was judged since the last request. The rest of it is evicted without being judged
    /// again.
    lost: Option<u32>,
}

impl WTinyLfu {
    /// An empty policy for a cache of about `capacity` blocks.
    pub fn new(capacity: usize) -> Self {
        Self {
            window: PrefixLru::new(),
            probation: PrefixLru::new(),
            protected: PrefixLru::new(),
            uses: FrequencySketch::new(capacity),
            run: PerSlot::default(),
            next_run: 0,
            full: false,
            lost: None,
        }
    }

    fn allowed_window(&self) -> usize {
        (self.len() / WINDOW_SHARE).max(1)
    }

    fn main_len(&self) -> usize {
        self.probation.len() + self.protected.len()
    }

    fn main_oldest(&self) -> impl Iterator<Item = u32> + '_ {
        self.probation.iter().chain(self.protected.iter())
    }

    /// The oldest blocks of the window that were inserted together.
    fn oldest_run(&self) -> Vec<u32> {
        let mut blocks = self.window.iter().take(RUN).peekable();
        let run = blocks.peek().map(|&slot| self.run.get(slot));
        blocks.take_while(|&slot| Some(self.run.get(slot)) == run).collect()
    }

    /// Whether the run that would leave the window is used more than the blocks that it would displace.
    fn wins(&self, run: &[u32], blocks: &dyn Blocks) -> bool {
        let displaced = self.main_oldest().filter(|&slot| !blocks.in_use(slot)).take(run.len());
        let displaced = mean_uses(&self.uses, displaced.map(|slot| blocks.key(slot)));
        mean_uses(&self.uses, run.iter().map(|&slot| blocks.key(slot))) > displaced
    }

    fn take_from_main(&mut self, max_refusals: usize, blocks: &dyn Blocks) -> Option<u32> {
        let may_evict = |slot| blocks.may_evict(slot);
        let victim = self.probation.take_oldest(max_refusals / 2, may_evict);
        victim.or_else(|| self.protected.take_oldest(max_refusals / 2, may_evict))
    }
}

impl ReplacementPolicy for WTinyLfu {
    fn kind(&self) -> PolicyKind {
        PolicyKind::WTinyLfu
    }

    fn missed(&mut self, _cached: usize, run: &mut dyn Iterator<Item = u64>) {
        run.for_each(|key| self.uses.increment(key));
    }

    fn insert(&mut self, run: &[u32], parent: Option<u32>, _blocks: &dyn Blocks) {
        // A run that continues one in the window belongs to it, and both are judged together.
        let parent = parent.filter(|&parent| self.window.contains(parent));
        let number = parent.map_or(self.next_run, |parent| self.run.get(parent));
        run.iter().for_each(|&slot| self.run.set(slot, number));
        self.window.insert_run(run.iter().copied(), parent);
        self.next_run = self.next_run.wrapping_add(1);
        // While there is room, blocks leave the window without being judged.
        while !self.full && self.window.len() > self.allowed_window() {
            let Some(oldest) = self.window.oldest() else { break };
            self.window.remove(oldest);
            self.probation.push_newest(oldest);
        }
        self.full = false;
        self.lost = None;
    }

    fn touch(&mut self, prefix: &[u32], blocks: &dyn Blocks) {
        for &slot in prefix.iter().rev() {
            self.uses.increment(blocks.key(slot));
            if self.probation.remove(slot) {
                self.protected.push_newest(slot);
            } else {
                self.window.touch(slot);
                self.protected.touch(slot);
            }
        }
        self.lost = None;
        while self.protected.len() * 10 > self.main_len() * PROTECTED_TENTHS {
            let Some(oldest) = self.protected.oldest() else { break };
            self.protected.remove(oldest);
            self.probation.push_newest(oldest);
        }
    }

    fn remove(&mut self, slot: u32) -> bool {
        self.window.remove(slot) || self.probation.remove(slot) || self.protected.remove(slot)
    }

    fn take_victim(&mut self, max_refusals: usize, blocks: &dyn Blocks) -> Option<u32> {
        self.full = true;
        if self.window.len() > self.allowed_window() {
            let number = self.window.oldest().map(|slot| self.run.get(slot));
            let run = if self.lost == number { Vec::new() } else { self.oldest_run() };
            if !self.wins(&run, blocks) {
                self.lost = number;
                let victim = self.window.take_oldest(max_refusals / 2, |slot| blocks.may_evict(slot));
                return victim.or_else(|| self.take_from_main(max_refusals / 2, blocks));
            }
            for slot in run {
                self.window.remove(slot);
                self.probation.push_newest(slot);
            }
        }
        let victim = self.take_from_main(max_refusals / 2, blocks);
        victim.or_else(|| self.window.take_oldest(max_refusals / 2, |slot| blocks.may_evict(slot)))
    }

    fn grow(&mut self, capacity: usize) {
        self.uses.grow(capacity);
    }

    fn len(&self) -> usize {
        self.window.len() + self.main_len()
    }

    fn contains(&self, slot: u32) -> bool {
        self.window.contains(slot) || self.probation.contains(slot) || self.protected.contains(slot)
    }

    fn heap_bytes(&self) -> usize {
        self.window.heap_bytes()
            + self.probation.heap_bytes()
            + self.protected.heap_bytes()
            + self.uses.heap_bytes()
            + self.run.heap_bytes()
    }

    fn slots(&self) -> Vec<u32> {
        self.window.iter().chain(self.main_oldest()).collect()
    }
}
