//! Windows and READs. A READ copies its pieces one after the other, at any time until it is over, while its window is open.

use kvlane_fabric::{EngineId, MemoryKind, WindowDescriptor};
use kvlane_handoff::{Computed, Endpoint, HandoffId, Message, Offer, engine_of};

use crate::agents::Agent;
use crate::engine::{Owner, Window};
use crate::faults::Fault;
use crate::world::{Event, World};

/// A READ that is under way.
pub(crate) struct Read {
    pub(crate) by: Agent,
    pub(crate) id: HandoffId,
    number: u64,
    from: Agent,
    window: u32,
    /// Which block of the window goes into which of the reader's, in which region.
    pieces: Vec<(usize, u32, u32)>,
    copied: usize,
    pub(crate) is_cancelled: bool,
    has_failed: bool,
}

impl World {
    /// As a rank's agent does it: blocks are offered in parts.
    pub(crate) fn offer(&mut self, at: Agent, id: HandoffId, reader: &Endpoint, computed: &Computed) {
        let Some(reader) = engine_of(reader) else { return };
        let together = self.dice.between(1, 4) as usize;
        let mut first_block = computed.first_block;
        let parts: Vec<&[u32]> = computed.blocks.chunks(together).collect();
        for (part, blocks) in parts.iter().enumerate() {
            let hash = if part + 1 == parts.len() { computed.hash } else { None };
            let window = self.open(at, id, reader, blocks);
            let (first_region, regions) = (computed.regions.start, computed.regions.len() as u32);
            let (is_by_block, blocks) = (self.dice.one_in(2), blocks.len() as u32);
            let offer = Offer { id, first_block, blocks, first_region, regions, is_by_block, window, hash };
            // An engine that is not ours may say it twice.
            if self.dice.one_in(60) && !self.is_calm {
                self.send(at, Agent::of(reader), Message::Offer(offer.clone()));
            }
            self.send(at, Agent::of(reader), Message::Offer(offer));
            first_block += blocks;
        }
    }

    fn open(&mut self, at: Agent, id: HandoffId, reader: EngineId, blocks: &[u32]) -> WindowDescriptor {
        self.windows += 1;
        let number = self.windows;
        let window = Window { id, reader, blocks: blocks.to_vec(), is_closing: false, is_closed: false };
        self.rank(at).windows.insert(number, window);
        WindowDescriptor { number, generation: 0, len: blocks.len() as u64, kind: MemoryKind::Host }
    }

    pub(crate) fn close_windows(&mut self, at: Agent, id: HandoffId) {
        let windows = self.rank(at).windows.values_mut().filter(|window| window.id == id);
        let count = windows.map(|window| window.is_closing = true).count();
        match count {
            0 => self.windows_closed(at, id),
            _ => self.after(0, 150, Event::Closed(at, id)),
        }
    }

    pub(crate) fn windows_closed(&mut self, at: Agent, id: HandoffId) {
        let read = |read: &&Read| read.from == at && read.id == id && read.copied < read.pieces.len();
        let count = self.reads.values().filter(read).count();
        self.seen.closed_amid += count as u64;
        let rank = self.rank(at);
        rank.windows.values_mut().filter(|window| window.id == id).for_each(|window| window.is_closed = true);
        rank.offering.closed(id);
    }

    pub(crate) fn begin_read(
        &mut self,
        by: Agent,
        (id, number): (HandoffId, u64),
        source: &Endpoint,
        offer: &Offer,
        blocks: &[u32],
    ) {
        let Some(from) = engine_of(source).map(Agent::of) else { return };
        let regions = offer.first_region..offer.first_region + offer.regions;
        let of_region = |region| blocks.iter().enumerate().map(move |(at, block)| (at, *block, region));
        let mut pieces: Vec<(usize, u32, u32)> = regions.flat_map(of_region).collect();
        if offer.is_by_block {
            pieces.sort();
        }
        let (window, copied) = (offer.window.number, 0);
        let read =
            Read { by, id, number, from, window, pieces, copied, is_cancelled: false, has_failed: false };
        self.read_count += 1;
        self.seen.reads += 1;
        self.reads.insert(self.read_count, read);
        self.copy_later(self.read_count);
    }

    /// Sometimes it hangs, until it is cancelled or its patience is over.
    fn copy_later(&mut self, read: u64) {
        let is_cancelled = self.reads.get(&read).is_some_and(|read| read.is_cancelled);
        let hangs = !self.is_calm && !is_cancelled && self.dice.one_in(30);
        if hangs {
            self.after(1000, 1500, Event::Copy(read))
        } else {
            self.after(0, self.copy_ms, Event::Copy(read))
        }
    }

    pub(crate) fn cancel_reads(&mut self, by: Agent, id: HandoffId) {
        let of_it = self.reads.iter_mut().filter(|(_, read)| read.by == by && read.id == id);
        let numbers: Vec<u64> = of_it.map(|(number, read)| (*number, read.is_cancelled = true).0).collect();
        self.seen.cancelled += numbers.len() as u64;
        for number in numbers {
            self.after(0, 60, Event::Copy(number));
        }
    }

    /// Some more of a READ.
    pub(crate) fn copy(&mut self, number: u64) -> Result<(), String> {
        let Some(mut read) = self.reads.remove(&number) else { return Ok(()) };
        self.abort(read.from, Some(read.id))?;
        let (has_all, ends) = (read.copied == read.pieces.len(), self.dice.one_in(2));
        if has_all || read.has_failed || (read.is_cancelled && ends) {
            return self.read_over(&read, has_all);
        }
        if !self.may_read(&read) {
            self.seen.failed += 1;
            read.has_failed = true;
        } else {
            let left = read.pieces.len() - read.copied;
            let count = self.dice.between(1, left as u64) as usize;
            for at in read.copied..read.copied + count {
                self.copy_piece(&read, at)?;
            }
            read.copied += count;
        }
        self.reads.insert(number, read);
        self.copy_later(number);
        Ok(())
    }

    fn may_read(&mut self, read: &Read) -> bool {
        if !self.is_alive(read.from) || (!self.is_calm && self.dice.one_in(300)) {
            return false;
        }
        let reads_late = self.fault == Fault::ReadsLate;
        let stops_amid = self.dice.one_in(2);
        let window = self.rank(read.from).windows.get(&read.window);
        window.is_some_and(|window| {
            let is_shut = window.is_closed || (window.is_closing && stops_amid);
            window.reader == read.by.id() && (!is_shut || reads_late)
        })
    }

    fn copy_piece(&mut self, read: &Read, at: usize) -> Result<(), String> {
        let (of_window, to, region) = read.pieces[at];
        let (id, source) = (read.id, &self.engines[read.from.engine]);
        let rank = &source.ranks[read.from.rank.unwrap_or(0) as usize];
        let from = rank.windows[&read.window].blocks[of_window] as usize;
        if source.owners[from] != Owner::Prompt(id) {
            return Err(format!("{id:?}: a block was read after it was unpinned"));
        }
        let word = rank.memory[from][region as usize];
        let owner = self.engines[read.by.engine].owners[to as usize];
        if owner != Owner::Task(id) {
            return Err(format!("{id:?}: a block was written that is {owner:?}'s"));
        }
        self.rank(read.by).memory[to as usize][region as usize] = word;
        Ok(())
    }

    fn read_over(&mut self, read: &Read, has_all: bool) -> Result<(), String> {
        let is_there = has_all || (self.fault == Fault::FailsAsRead && read.has_failed);
        if self.fault == Fault::LosesReads && self.dice.one_in(3) {
            return Ok(());
        }
        self.rank(read.by).reading.read_over(read.id, read.number, is_there);
        self.settle(read.by.engine)
    }

    /// What is read from there fails, whenever its reader looks at it.
    pub(crate) fn fail_reads(&mut self, by: Agent, from: Agent) {
        let both = |read: &&mut Read| read.by == by && read.from == from;
        self.reads.values_mut().filter(both).for_each(|read| read.has_failed = true);
    }
}
