//! Reads offered blocks into blocks of the own cache: a rank of the decode engine. No I/O; the time is an argument.
//!
//! ```text
//!  Room: blocks of this engine --+                                all regions of a block read
//!                                +--> READ of an Offer that fits ----------------------------> Arrived
//!  Offer: blocks of the peer   --+
//!  Stop: no new READ; Stopped once none is in flight
//! ```
//! An Offer waits until all its blocks have room. Each region of a block is read once: a second offer of it ends the
//! hand-off (Lost). A block that has arrived has no room any more, so no READ writes into it again.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use kvlane_fabric::EngineId;

use crate::message::{Endpoint, HASHES_MAX, HandoffId, Message, Offer, engine_of};
use crate::remembered::Remembered;

/// Most offers of one hand-off that wait for room.
const OFFERS_MAX: usize = 4096;
/// Most hand-offs that have offers but no Room or Stop yet, and how long their offers are kept.
const UNKNOWN_MAX: usize = 256;
const UNKNOWN_KEPT: Duration = Duration::from_secs(10);

/// An action for the agent, in the order of [`Reading::next_action`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadingAction {
    /// Post a READ of the offered bytes into these blocks, and report its completion to [`Reading::read_over`].
    Read {
        /// The hand-off that the READ is part of.
        id: HandoffId,
        /// Names this READ in its completion.
        number: u64,
        /// Endpoint of the rank that offers.
        source: Endpoint,
        /// As it came, with its window.
        offer: Offer,
        /// Block ids of the own cache, one for each block of the offer.
        blocks: Vec<u32>,
    },
    /// Cancel the hand-off's READs. Each is in flight until [`Reading::read_over`] is called for it.
    Cancel(HandoffId),
    /// Send this to the own scheduler.
    Answer(Message),
}

#[derive(Debug)]
struct Source {
    endpoint: Endpoint,
    engine: EngineId,
}

/// The state of one hand-off.
#[derive(Debug, Default)]
struct HandoffReads {
    /// From the first Room. Offers of other engines are ignored.
    source: Option<Source>,
    /// The own block for each block of the prompt.
    room: BTreeMap<u32, u32>,
    /// Offers without room, each with its sender.
    waiting: Vec<(EngineId, Offer)>,
    /// By block of the prompt: which regions are read or in flight, and how many have not arrived.
    regions: BTreeMap<u32, (Vec<bool>, u32)>,
    in_flight: BTreeMap<u64, Offer>,
    hashes: BTreeMap<u32, [u8; 16]>,
    /// All blocks before this one have arrived; None before the first Room.
    end_block: Option<u32>,
    /// Hashes of the blocks before this one were reported.
    hashes_reported: u32,
    is_stopping: bool,
    is_lost: bool,
    first_offer_at: Duration,
}

/// All hand-offs that a rank reads blocks for.
#[derive(Debug)]
pub struct Reading {
    regions: u32,
    reads: BTreeMap<HandoffId, HandoffReads>,
    over: Remembered,
    next_number: u64,
    actions: VecDeque<ReadingAction>,
}

impl Reading {
    /// `regions`: number of regions (layers) of a block of this rank.
    pub fn new(regions: u32) -> Reading {
        let (reads, over, actions) = (BTreeMap::new(), Remembered::default(), VecDeque::new());
        Reading { regions, reads, over, next_number: 0, actions }
    }

    /// Handles a message from the own scheduler.
    pub fn scheduler_said(&mut self, message: Message) {
        match message {
            Message::Room { id, source, first_block, blocks } if !self.over.has(id) => {
                let Some(engine) = engine_of(&source) else { return };
                let read = self.reads.entry(id).or_default();
                read.source.get_or_insert(Source { endpoint: source, engine });
                let first = read.end_block.get_or_insert(first_block);
                *first = (*first).min(first_block);
                read.room.extend((first_block..).zip(blocks));
                self.start_reads(id);
            }
            Message::Stop(id) => {
                if self.over.has(id) {
                    return self.actions.push_back(ReadingAction::Answer(Message::Stopped(id)));
                }
                let read = self.reads.entry(id).or_default();
                if !std::mem::replace(&mut read.is_stopping, true) {
                    read.waiting.clear();
                    self.actions.push_back(ReadingAction::Cancel(id));
                }
                self.finish_if_idle(id);
            }
            _ => {}
        }
    }

    /// Handles an Offer from a rank of another engine.
    pub fn offer(&mut self, now: Duration, from: EngineId, offer: Offer) {
        let id = offer.id;
        if self.over.has(id) {
            return;
        }
        let unknown = self.reads.values().filter(|read| read.source.is_none()).count();
        if !self.reads.contains_key(&id) && unknown >= UNKNOWN_MAX {
            return;
        }
        let read = self
            .reads
            .entry(id)
            .or_insert_with(|| HandoffReads { first_offer_at: now, ..HandoffReads::default() });
        if read.is_stopping || read.waiting.len() >= OFFERS_MAX {
            return;
        }
        read.waiting.push((from, offer));
        self.start_reads(id);
    }

    /// Starts a READ for each offer that has room.
    fn start_reads(&mut self, id: HandoffId) {
        let Some(read) = self.reads.get_mut(&id).filter(|read| !read.is_stopping && !read.is_lost) else {
            return;
        };
        let Some(source) = &read.source else { return };
        let mut left = Vec::new();
        for (from, offer) in std::mem::take(&mut read.waiting) {
            if from != source.engine {
                continue;
            }
            let of_prompt = offer.first_block..offer.first_block + offer.blocks;
            let blocks: Option<Vec<u32>> =
                of_prompt.clone().map(|block| read.room.get(&block).copied()).collect();
            let Some(blocks) = blocks else {
                left.push((from, offer));
                continue;
            };
            let regions = offer.first_region as usize..(offer.first_region + offer.regions) as usize;
            let all = self.regions;
            let is_new = regions.end <= all as usize
                && of_prompt.clone().all(|block| {
                    let state = read.regions.get(&block);
                    state.is_none_or(|(taken, _)| taken[regions.clone()].iter().all(|taken| !taken))
                });
            if !is_new {
                read.is_lost = true;
                self.actions.push_back(ReadingAction::Answer(Message::Lost(id)));
                return;
            }
            for block in of_prompt {
                let (taken, _) = read.regions.entry(block).or_insert((vec![false; all as usize], all));
                taken[regions.clone()].fill(true);
            }
            let number = self.next_number;
            self.next_number += 1;
            read.in_flight.insert(number, offer.clone());
            let source = source.endpoint.clone();
            self.actions.push_back(ReadingAction::Read { id, number, source, offer, blocks });
        }
        read.waiting = left;
    }

    /// The completion of a READ: whether all its bytes have arrived.
    pub fn read_over(&mut self, id: HandoffId, number: u64, has_arrived: bool) {
        let Some(read) = self.reads.get_mut(&id) else { return };
        let Some(offer) = read.in_flight.remove(&number) else { return };
        if has_arrived {
            let end = offer.first_block + offer.blocks;
            for block in offer.first_block..end {
                if let Some((_, left)) = read.regions.get_mut(&block) {
                    *left -= offer.regions;
                }
            }
            read.hashes.extend(offer.hash.map(|hash| (end - 1, hash)));
            let before = read.end_block;
            while let Some(next) = read.end_block
                && read.regions.get(&next).is_some_and(|(_, left)| *left == 0)
            {
                read.end_block = Some(next + 1);
                read.regions.remove(&next);
                // Without room, no READ writes into the block again.
                read.room.remove(&next);
            }
            if let Some(end_block) = read.end_block.filter(|_| read.end_block != before) {
                let hashes = read.hashes.range(read.hashes_reported..end_block);
                let hashes: Vec<(u32, [u8; 16])> = hashes.map(|(block, hash)| (*block, *hash)).collect();
                read.hashes_reported = end_block;
                self.report_arrived(id, end_block, hashes);
            }
        } else if !read.is_stopping && !std::mem::replace(&mut read.is_lost, true) {
            self.actions.push_back(ReadingAction::Answer(Message::Lost(id)));
        }
        self.finish_if_idle(id);
    }

    /// Reports arrived blocks, in several messages if one would be too long. Each message reports only blocks whose hashes it
    /// carries or that came before, because the scheduler reads no further hashes once all blocks are reported.
    fn report_arrived(&mut self, id: HandoffId, end_block: u32, mut hashes: Vec<(u32, [u8; 16])>) {
        while hashes.len() > HASHES_MAX {
            let rest = hashes.split_off(HASHES_MAX);
            let hashes = std::mem::replace(&mut hashes, rest);
            let end_block = hashes.last().map_or(end_block, |(block, _)| block + 1);
            self.actions.push_back(ReadingAction::Answer(Message::Arrived { id, end_block, hashes }));
        }
        self.actions.push_back(ReadingAction::Answer(Message::Arrived { id, end_block, hashes }));
    }

    /// Answers Stopped and forgets the hand-off, if it is stopping and no READ is in flight.
    fn finish_if_idle(&mut self, id: HandoffId) {
        if self.reads.get(&id).is_some_and(|read| read.is_stopping && read.in_flight.is_empty()) {
            self.reads.remove(&id);
            self.over.add(id);
            self.actions.push_back(ReadingAction::Answer(Message::Stopped(id)));
        }
    }

    /// Number of hand-offs that are not over, those with offers only included.
    pub fn live(&self) -> usize {
        self.reads.len()
    }

    /// Forgets offers for which no Room has come in time.
    pub fn tick(&mut self, now: Duration) {
        self.reads.retain(|_, read| {
            read.source.is_some() || read.is_stopping || now < read.first_offer_at + UNKNOWN_KEPT
        });
    }

    /// When [`Reading::tick`] is due; None if there is nothing to wait for.
    pub fn next_tick(&self) -> Option<Duration> {
        let unknown = self.reads.values().filter(|read| read.source.is_none() && !read.is_stopping);
        unknown.map(|read| read.first_offer_at + UNKNOWN_KEPT).min()
    }

    /// The next action for the agent to carry out.
    pub fn next_action(&mut self) -> Option<ReadingAction> {
        self.actions.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use kvlane_fabric::{Descriptor, MESSAGE_BYTES_MAX, MemoryKind, Trust, WindowDescriptor};

    use super::*;

    const ID: HandoffId = HandoffId([1; 16]);
    const SOURCE: EngineId = EngineId { engine_id: 1, boot_nonce: 1 };

    /// A rank with room for that many blocks.
    fn reading(blocks: u32) -> Reading {
        let EngineId { engine_id, boot_nonce } = SOURCE;
        let (addresses, regions) = (Vec::new(), Vec::new());
        let source = Descriptor { boot_nonce, engine_id, trust: Trust::Token, addresses, regions };
        let source = source.to_bytes().unwrap();
        let mut reading = Reading::new(1);
        reading.scheduler_said(Message::Room {
            id: ID,
            source,
            first_block: 0,
            blocks: (0..blocks).collect(),
        });
        reading
    }

    fn offer(first_block: u32) -> Offer {
        let window = WindowDescriptor { number: first_block, generation: 0, len: 1, kind: MemoryKind::Host };
        let (blocks, first_region, regions, is_by_block) = (1, 0, 1, false);
        let hash = Some([first_block as u8; 16]);
        Offer { id: ID, first_block, blocks, first_region, regions, is_by_block, window, hash }
    }

    /// Hashes that arrived before the first block were reported in one message, which was longer than the fabric takes. The rank
    /// lost its scheduler, and the hand-off never ended.
    #[test]
    fn thousands_of_hashes_at_once_are_told_in_messages_that_the_fabric_takes() {
        let count = 2 * HASHES_MAX as u32 + 1;
        let mut reading = reading(count);
        for block in 0..count {
            reading.offer(Duration::ZERO, SOURCE, offer(block));
        }
        (0..u64::from(count)).rev().for_each(|number| reading.read_over(ID, number, true));
        let answers = std::iter::from_fn(|| reading.next_action()).filter_map(|action| match action {
            ReadingAction::Answer(answer) => Some(answer),
            _ => None,
        });
        let (mut told, mut before) = (Vec::new(), 0);
        for answer in answers {
            let bytes = answer.encode();
            assert!(bytes.len() <= MESSAGE_BYTES_MAX, "{} bytes", bytes.len());
            let Ok(Message::Arrived { end_block, hashes, .. }) = Message::decode(&bytes) else {
                unreachable!("{answer:?}")
            };
            // A message that reports a block carries its hash, unless an earlier one did.
            assert!(hashes.iter().all(|(block, _)| (before..end_block).contains(block)));
            told.extend(hashes);
            before = end_block;
            assert_eq!(told.len(), end_block as usize);
        }
        let all: Vec<_> = (0..count).map(|block| (block, [block as u8; 16])).collect();
        assert_eq!((told, before), (all, count));
    }

    #[test]
    fn what_another_engine_offers_is_passed_over() {
        let mut reading = reading(1);
        reading.offer(Duration::ZERO, EngineId { boot_nonce: 2, ..SOURCE }, offer(0));
        assert_eq!(reading.next_action(), None);
        reading.offer(Duration::ZERO, SOURCE, offer(0));
        assert!(matches!(reading.next_action(), Some(ReadingAction::Read { number: 0, .. })));
    }
}
