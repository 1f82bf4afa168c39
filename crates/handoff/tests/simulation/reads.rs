//! Windows and READs. A READ copies its pieces one after the other, at any time until it is over.
//!
//! ```text
//!  the owner sends:  each piece, while the window is open ---> all are sent: read
//!  the reader copies by itself:  each piece, at any time ----> all are copied; the mark is still there? read : failed
//! ```
//! The second way also copies after the close, and after the owner's death.

use kvlane_fabric::{EngineId, MemoryKind, WindowDescriptor};
use kvlane_handoff::{Computed, Endpoint, HandoffId, Message, Offer, engine_of};

use crate::agents::Agent;
use crate::engine::{Engine, Owner, Window};
use crate::faults::Fault;
use crate::world::{Event, World};

/// The side that moves the bytes of a READ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mover {
    /// As through sockets.
    Owner,
    /// As the carrier "cuda" does.
    Reader,
}

/// A READ that is under way.
pub(crate) struct Read {
    pub(crate) by: Agent,
    pub(crate) id: HandoffId,
    number: u64,
    from: Agent,
    window: u32,
    mover: Mover,
    /// Which block of the window goes into which of the reader's, in which region.
    pieces: Vec<(usize, u32, u32)>,
    copied: usize,
    /// [`Fault::LooksBefore`]: the mark was there when the READ began.
    was_marked: bool,
    /// A piece was copied from a block that its owner had given back.
    is_stale: bool,
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
        let (is_closing, is_closed, is_marked, blocks) = (false, false, true, blocks.to_vec());
        let len = blocks.len() as u64;
        let window = Window { id, reader, blocks, is_closing, is_closed, is_marked };
        self.rank(at).windows.insert(number, window);
        WindowDescriptor { number, generation: 0, len, kind: MemoryKind::Host }
    }

    pub(crate) fn close_windows(&mut self, at: Agent, id: HandoffId) {
        let windows = self.rank(at).windows.values_mut().filter(|window| window.id == id);
        let count = windows.map(|window| window.is_closing = true).count();
        match count {
            0 => self.windows_closed(at, id),
            // An owner that sends no piece itself waits for no reader.
            _ => {
                let most = if self.dice.one_in(2) { 150 } else { 2 };
                self.after(0, most, Event::Closed(at, id));
            }
        }
    }

    pub(crate) fn windows_closed(&mut self, at: Agent, id: HandoffId) {
        let read = |read: &&Read| read.from == at && read.id == id && read.copied < read.pieces.len();
        let count = self.reads.values().filter(read).count();
        self.seen.closed_amid += count as u64;
        if self.fault == Fault::ClearsLate {
            self.after(20, 300, Event::Clear(at, id));
        } else {
            self.clear_marks(at, id);
        }
        let rank = self.rank(at);
        rank.windows.values_mut().filter(|window| window.id == id).for_each(|window| window.is_closed = true);
        rank.offering.closed(id);
    }

    pub(crate) fn clear_marks(&mut self, at: Agent, id: HandoffId) {
        let windows = self.rank(at).windows.values_mut().filter(|window| window.id == id);
        windows.for_each(|window| window.is_marked = false);
    }

    pub(crate) fn begin_read(
        &mut self,
        by: Agent,
        (id, number): (HandoffId, u64),
        source: &Endpoint,
        offer: &Offer,
        (skip, blocks): (u32, &[u32]),
    ) {
        let Some(from) = engine_of(source).map(Agent::of) else { return };
        let regions = offer.first_region..offer.first_region + offer.regions;
        let of_region = |region| (skip as usize..).zip(blocks).map(move |(at, block)| (at, *block, region));
        let mut pieces: Vec<(usize, u32, u32)> = regions.flat_map(of_region).collect();
        if offer.is_by_block {
            pieces.sort();
        }
        let host = |agent: Agent| self.engines[agent.engine].shape.host;
        let is_near = host(by) == host(from);
        // A carrier takes the place of another that has trouble.
        let mover = if is_near && !self.dice.one_in(8) { Mover::Reader } else { Mover::Owner };
        let mut read = Read {
            by,
            id,
            number,
            from,
            window: offer.window.number,
            mover,
            pieces,
            copied: 0,
            was_marked: false,
            is_stale: false,
            is_cancelled: false,
            has_failed: false,
        };
        read.was_marked = self.is_marked(&read);
        self.read_count += 1;
        self.seen.reads += 1;
        self.reads.insert(self.read_count, read);
        self.copy_later(self.read_count);
    }

    /// Sometimes it hangs, until it is cancelled or its patience is over.
    fn copy_later(&mut self, read: u64) {
        let under_way = self.reads.get(&read);
        let is_cancelled = under_way.is_some_and(|read| read.is_cancelled);
        // A GPU has other work, too, or its process is stopped.
        let (least, one_in) = match under_way.map(|read| read.mover) {
            Some(Mover::Reader) => (100, 6),
            _ => (1000, 30),
        };
        let hangs = !self.is_calm && !is_cancelled && self.dice.one_in(one_in);
        if hangs {
            self.after(least, 1500, Event::Copy(read))
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
        let has_to_end = read.has_failed && (read.mover == Mover::Owner || ends);
        if has_all || has_to_end || (read.is_cancelled && ends) {
            let counts = has_all && self.counts(&mut read);
            if counts && read.is_stale {
                return Err(format!("{:?}: bytes count that were read after they were unpinned", read.id));
            }
            return self.read_over(&read, counts);
        }
        if read.mover == Mover::Owner && !self.may_read(&read) {
            self.seen.failed += 1;
            read.has_failed = true;
        } else {
            let left = read.pieces.len() - read.copied;
            let count = self.dice.between(1, left as u64) as usize;
            for at in read.copied..read.copied + count {
                self.copy_piece(&mut read, at)?;
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

    /// Whether a READ counts, all of whose pieces are copied.
    fn counts(&mut self, read: &mut Read) -> bool {
        if read.mover == Mover::Owner {
            return true;
        }
        let is_dead = !self.is_alive(read.from);
        // The reader sees the owner's death at any time.
        read.has_failed |= is_dead && self.dice.one_in(3);
        read.has_failed |= !match self.fault {
            Fault::LooksBefore => read.was_marked,
            _ => self.is_marked(read),
        };
        self.seen.failed += u64::from(read.has_failed);
        self.seen.refused += u64::from(read.has_failed && read.is_stale);
        self.seen.of_dead += u64::from(!read.has_failed && is_dead);
        !read.has_failed
    }

    fn is_marked(&self, read: &Read) -> bool {
        let rank = &self.owner(read.from).ranks[read.from.rank.unwrap_or(0) as usize];
        rank.windows.get(&read.window).is_some_and(|window| window.is_marked)
    }

    /// The engine of a READ's source, which may be dead.
    fn owner(&self, agent: Agent) -> &Engine {
        self.dead.get(&(agent.engine, agent.run)).unwrap_or(&self.engines[agent.engine])
    }

    fn copy_piece(&mut self, read: &mut Read, at: usize) -> Result<(), String> {
        let (of_window, to, region) = read.pieces[at];
        let (id, source) = (read.id, self.owner(read.from));
        let rank = &source.ranks[read.from.rank.unwrap_or(0) as usize];
        let from = rank.windows[&read.window].blocks[of_window] as usize;
        let (is_stale, word) = (source.owners[from] != Owner::Prompt(id), rank.memory[from][region as usize]);
        if is_stale && read.mover == Mover::Owner {
            return Err(format!("{id:?}: a block was read after it was unpinned"));
        }
        self.seen.stale += u64::from(is_stale);
        read.is_stale |= is_stale;
        let owner = self.engines[read.by.engine].owners[to as usize];
        if owner != Owner::Task(id) {
            return Err(format!("{id:?}: a block was written that is {owner:?}'s"));
        }
        self.rank(read.by).memory[to as usize][region as usize] = word;
        Ok(())
    }

    fn read_over(&mut self, read: &Read, counts: bool) -> Result<(), String> {
        let is_there = counts || (self.fault == Fault::FailsAsRead && read.has_failed);
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
