//! [`PrefixLru`]: an eviction order as a doubly linked list over slot numbers, 8 bytes a slot.

/// Links in a chunk. Chunks never move, so growth costs one small allocation.
const CHUNK: usize = 4096;
/// End of the list.
const NONE: u32 = u32::MAX;
/// In `Link::older`: the slot is not in the list.
const OUT: u32 = u32::MAX - 1;

#[derive(Clone, Copy)]
struct Link {
    older: u32,
    newer: u32,
}

/// Least-recently-used order of slots in which a prefix ages from its tail.
///
/// Callers keep one rule: a parent is newer than its children, so that the old end holds blocks whose children are
/// gone. [`touch_prefix`](Self::touch_prefix) and [`insert_run`](Self::insert_run) keep it for them.
///
/// Slot numbers are below `u32::MAX - 1` and should be dense: memory is 8 bytes times the largest one.
#[derive(Default)]
pub struct PrefixLru {
    chunks: Vec<Box<[Link]>>,
    ends: Option<Ends>,
    len: usize,
}

#[derive(Clone, Copy)]
struct Ends {
    oldest: u32,
    newest: u32,
}

impl PrefixLru {
    /// Makes an empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// The number of slots in the list.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if the list has no slot.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// True if `slot` is in the list.
    pub fn contains(&self, slot: u32) -> bool {
        self.get(slot).is_some()
    }

    /// Adds `slot` as the last to be evicted. It must not be in the list.
    pub fn push_newest(&mut self, slot: u32) {
        self.reserve(slot);
        match self.ends {
            None => self.insert_first(slot),
            Some(ends) => {
                *self.link(slot) = Link { older: ends.newest, newer: NONE };
                self.link(ends.newest).newer = slot;
                self.ends = Some(Ends { newest: slot, ..ends });
            }
        }
        self.len += 1;
    }

    /// Adds new blocks that continue each other, head first: just older than `parent` if that is in the list, or else
    /// as the newest. The tail is evicted first.
    pub fn insert_run(&mut self, run: impl IntoIterator<Item = u32>, parent: Option<u32>) {
        let mut newer = parent.filter(|&parent| self.contains(parent));
        for slot in run {
            match newer {
                Some(newer) => self.insert_older(slot, newer),
                None => self.push_newest(slot),
            }
            newer = Some(slot);
        }
    }

    /// Adds `slot` just older than `newer`, which must be in the list: `slot` is evicted right before it.
    pub fn insert_older(&mut self, slot: u32, newer: u32) {
        assert!(self.contains(newer), "slot {newer} is not in the list");
        self.reserve(slot);
        let older = self.link(newer).older;
        *self.link(slot) = Link { older, newer };
        self.link(newer).older = slot;
        match older {
            NONE => self.ends = self.ends.map(|ends| Ends { oldest: slot, ..ends }),
            _ => self.link(older).newer = slot,
        }
        self.len += 1;
    }

    /// Removes `slot`; false if it was not in the list.
    pub fn remove(&mut self, slot: u32) -> bool {
        if !self.contains(slot) {
            return false;
        }
        let Link { older, newer } = *self.link(slot);
        self.link(slot).older = OUT;
        self.join(older, newer);
        self.len -= 1;
        true
    }

    /// Makes `slot` the newest, if it is in the list.
    pub fn touch(&mut self, slot: u32) {
        if self.ends.is_some_and(|ends| ends.newest != slot) && self.remove(slot) {
            self.push_newest(slot);
        }
    }

    /// Touches the blocks of a prefix, given from its head. Touches the tail first, so that the head ends up newest.
    pub fn touch_prefix(&mut self, slots: &[u32]) {
        self.touch_from_tail(slots.iter().rev().copied());
    }

    /// Touches slots in this order, and passes over those that are not in the list. Slots that follow each other in the
    /// list, as the blocks of a prefix mostly do, are moved together: their links are only read.
    pub fn touch_from_tail(&mut self, slots: impl IntoIterator<Item = u32>) {
        // The oldest and the newest slot of the run that is moved next.
        let mut run: Option<(u32, u32)> = None;
        for slot in slots {
            let Some(Link { older, .. }) = self.get(slot) else { continue };
            match &mut run {
                Some((_, newest)) if *newest == older => *newest = slot,
                _ => {
                    if let Some((oldest, newest)) = run.replace((slot, slot)) {
                        self.move_to_newest(oldest, newest);
                    }
                }
            }
        }
        if let Some((oldest, newest)) = run {
            self.move_to_newest(oldest, newest);
        }
    }

    /// Removes and returns the victim: the first slot from the old end that `accept` accepts. A refused slot moves to
    /// the new end, because the resident child that makes it refusable was used later than it. None after
    /// `max_refusals`, or if every slot is refused.
    pub fn take_oldest(&mut self, max_refusals: usize, mut accept: impl FnMut(u32) -> bool) -> Option<u32> {
        for _ in 0..self.len.min(max_refusals.saturating_add(1)) {
            let oldest = self.ends?.oldest;
            if accept(oldest) {
                self.remove(oldest);
                return Some(oldest);
            }
            self.touch(oldest);
        }
        None
    }

    /// Bytes on the heap.
    pub fn heap_bytes(&self) -> usize {
        self.chunks.len() * CHUNK * size_of::<Link>()
    }

    /// All slots, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors(self.oldest(), |&slot| self.newer(slot))
    }

    /// The first to be evicted.
    pub fn oldest(&self) -> Option<u32> {
        self.ends.map(|ends| ends.oldest)
    }

    /// The slot just newer than `slot`, which must be in the list; None for the newest.
    pub fn newer(&self, slot: u32) -> Option<u32> {
        assert!(self.contains(slot), "slot {slot} is not in the list");
        let newer = self.chunks[slot as usize / CHUNK][slot as usize % CHUNK].newer;
        (newer != NONE).then_some(newer)
    }

    /// Moves a run of neighbours, from `oldest` to `newest`, to the new end.
    fn move_to_newest(&mut self, oldest: u32, newest: u32) {
        let newer = self.link(newest).newer;
        if newer == NONE {
            return;
        }
        let older = self.link(oldest).older;
        self.join(older, newer);
        if let Some(ends) = self.ends {
            self.link(oldest).older = ends.newest;
            self.link(ends.newest).newer = oldest;
            self.link(newest).newer = NONE;
            self.ends = Some(Ends { newest, ..ends });
        }
    }

    /// Links the neighbours of a removed slot or run to each other.
    fn join(&mut self, older: u32, newer: u32) {
        if older != NONE {
            self.link(older).newer = newer;
        }
        if newer != NONE {
            self.link(newer).older = older;
        }
        self.ends = self.ends.and_then(|ends| match (older, newer) {
            (NONE, NONE) => None,
            (NONE, _) => Some(Ends { oldest: newer, ..ends }),
            (_, NONE) => Some(Ends { newest: older, ..ends }),
            _ => Some(ends),
        });
    }

    fn insert_first(&mut self, slot: u32) {
        *self.link(slot) = Link { older: NONE, newer: NONE };
        self.ends = Some(Ends { oldest: slot, newest: slot });
    }

    fn reserve(&mut self, slot: u32) {
        assert!(slot < OUT, "slot {slot} is out of range");
        assert!(!self.contains(slot), "slot {slot} is in the list already");
        while self.chunks.len() <= slot as usize / CHUNK {
            self.chunks.push(vec![Link { older: OUT, newer: NONE }; CHUNK].into_boxed_slice());
        }
    }

    fn get(&self, slot: u32) -> Option<Link> {
        let link = self.chunks.get(slot as usize / CHUNK)?[slot as usize % CHUNK];
        (link.older != OUT).then_some(link)
    }

    fn link(&mut self, slot: u32) -> &mut Link {
        &mut self.chunks[slot as usize / CHUNK][slot as usize % CHUNK]
    }
}
