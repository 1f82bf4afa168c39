//! A rank of the engine that goes on: what it reads into which blocks. No I/O; the time is an argument.
//!
//! ```text
//!  Room: blocks of the engine  --+                               all its regions read
//!                                +--> READ of an Offer that fits ---------------------> Arrived
//!  Offer: blocks of the peer   --+
//!  Stop: no new READ; Stopped when none is under way
//! ```
//! Offers that have no room yet wait. Each region of a block is read once: what is offered twice is refused.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use kvlane_fabric::EngineId;

use crate::message::{Endpoint, HASHES_MAX, HandoffId, Message, Offer, whose};
use crate::remembered::Remembered;

/// Most offers of one hand-off that wait for room.
const OFFERS_MAX: usize = 4096;
/// Most hand-offs with offers of which the own scheduler has not said anything, and how long they are kept.
const UNKNOWN_MAX: usize = 256;
const UNKNOWN_KEPT: Duration = Duration::from_secs(10);

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadingAction {
    /// Read what is offered into these blocks; [`Reading::read_over`] is to be told of the end, by this number.
    Read {
        /// For whom.
        id: HandoffId,
        /// Of the READ.
        number: u64,
        /// Who offers.
        source: Endpoint,
        /// What.
        offer: Offer,
        /// Ids of the engine's blocks.
        blocks: Vec<u32>,
    },
    /// End its READs; each is over when [`Reading::read_over`] is told so.
    Cancel(HandoffId),
    /// Say this to the own scheduler.
    Answer(Message),
}

#[derive(Debug)]
struct Source {
    endpoint: Endpoint,
    engine: EngineId,
}

#[derive(Debug, Default)]
struct Read {
    source: Option<Source>,
    /// The engine's block for each block of the prompt.
    room: BTreeMap<u32, u32>,
    waiting: Vec<(EngineId, Offer)>,
    /// By block of the prompt: which regions are read or under way, and how many are still to come.
    regions: BTreeMap<u32, (Vec<bool>, u32)>,
    under_way: BTreeMap<u64, Offer>,
    hashes: BTreeMap<u32, [u8; 16]>,
    /// All before have arrived; None before the first room.
    end_block: Option<u32>,
    told_hashes: u32,
    is_stopping: bool,
    is_lost: bool,
    known_since: Duration,
}

/// All that a rank reads.
#[derive(Debug)]
pub struct Reading {
    regions: u32,
    reads: BTreeMap<HandoffId, Read>,
    over: Remembered,
    next_number: u64,
    actions: VecDeque<ReadingAction>,
}

impl Reading {
    /// Nothing yet. `regions`: of how many parts (layers) a block of this rank consists.
    pub fn new(regions: u32) -> Reading {
        let (reads, over, actions) = (BTreeMap::new(), Remembered::default(), VecDeque::new());
        Reading { regions, reads, over, next_number: 0, actions }
    }

    /// The own scheduler has said something.
    pub fn told(&mut self, message: Message) {
        match message {
            Message::Room { id, source, first_block, blocks } if !self.over.has(id) => {
                let Some(engine) = whose(&source) else { return };
                let read = self.reads.entry(id).or_default();
                read.source.get_or_insert(Source { endpoint: source, engine });
                let first = read.end_block.get_or_insert(first_block);
                *first = (*first).min(first_block);
                read.room.extend((first_block..).zip(blocks));
                self.go_on(id);
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
                self.end_if_still(id);
            }
            _ => {}
        }
    }

    /// A rank of the other engine offers something.
    pub fn offer(&mut self, now: Duration, from: EngineId, offer: Offer) {
        let id = offer.id;
        if self.over.has(id) {
            return;
        }
        let unknown = self.reads.values().filter(|read| read.source.is_none()).count();
        if !self.reads.contains_key(&id) && unknown >= UNKNOWN_MAX {
            return;
        }
        let read = self.reads.entry(id).or_insert_with(|| Read { known_since: now, ..Read::default() });
        if read.is_stopping || read.waiting.len() >= OFFERS_MAX {
            return;
        }
        read.waiting.push((from, offer));
        self.go_on(id);
    }

    /// Reads what is offered and has room.
    fn go_on(&mut self, id: HandoffId) {
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
                    let known = read.regions.get(&block);
                    known.is_none_or(|(asked, _)| asked[regions.clone()].iter().all(|asked| !asked))
                });
            if !is_new {
                read.is_lost = true;
                self.actions.push_back(ReadingAction::Answer(Message::Lost(id)));
                return;
            }
            for block in of_prompt {
                let (asked, _) = read.regions.entry(block).or_insert((vec![false; all as usize], all));
                asked[regions.clone()].fill(true);
            }
            let number = self.next_number;
            self.next_number += 1;
            read.under_way.insert(number, offer.clone());
            let source = source.endpoint.clone();
            self.actions.push_back(ReadingAction::Read { id, number, source, offer, blocks });
        }
        read.waiting = left;
    }

    /// A READ is over; whether its bytes are there.
    pub fn read_over(&mut self, id: HandoffId, number: u64, is_there: bool) {
        let Some(read) = self.reads.get_mut(&id) else { return };
        let Some(offer) = read.under_way.remove(&number) else { return };
        if is_there {
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
                // Nothing is read into it again.
                read.room.remove(&next);
            }
            if let Some(end_block) = read.end_block.filter(|_| read.end_block != before) {
                let hashes = read.hashes.range(read.told_hashes..end_block);
                let hashes: Vec<(u32, [u8; 16])> = hashes.map(|(block, hash)| (*block, *hash)).collect();
                read.told_hashes = end_block;
                self.tell_arrived(id, end_block, hashes);
            }
        } else if !read.is_stopping && !std::mem::replace(&mut read.is_lost, true) {
            self.actions.push_back(ReadingAction::Answer(Message::Lost(id)));
        }
        self.end_if_still(id);
    }

    /// In several messages where one would be too long; each tells of the blocks whose hashes it has, since no more is asked
    /// for when all blocks are told.
    fn tell_arrived(&mut self, id: HandoffId, end_block: u32, mut hashes: Vec<(u32, [u8; 16])>) {
        while hashes.len() > HASHES_MAX {
            let rest = hashes.split_off(HASHES_MAX);
            let hashes = std::mem::replace(&mut hashes, rest);
            let end_block = hashes.last().map_or(end_block, |(block, _)| block + 1);
            self.actions.push_back(ReadingAction::Answer(Message::Arrived { id, end_block, hashes }));
        }
        self.actions.push_back(ReadingAction::Answer(Message::Arrived { id, end_block, hashes }));
    }

    /// One that is stopped is over when nothing of it is read any more.
    fn end_if_still(&mut self, id: HandoffId) {
        if self.reads.get(&id).is_some_and(|read| read.is_stopping && read.under_way.is_empty()) {
            self.reads.remove(&id);
            self.over.add(id);
            self.actions.push_back(ReadingAction::Answer(Message::Stopped(id)));
        }
    }

    /// Hand-offs of which something is read, or is offered for nothing so far.
    pub fn live(&self) -> usize {
        self.reads.len()
    }

    /// READs of a hand-off that are under way.
    pub fn under_way(&self, id: HandoffId) -> usize {
        self.reads.get(&id).map_or(0, |read| read.under_way.len())
    }

    /// Forgets what was offered for nothing.
    pub fn tick(&mut self, now: Duration) {
        self.reads.retain(|_, read| {
            read.source.is_some() || read.is_stopping || now < read.known_since + UNKNOWN_KEPT
        });
    }

    /// When [`Reading::tick`] has something to do.
    pub fn next_tick(&self) -> Option<Duration> {
        let unknown = self.reads.values().filter(|read| read.source.is_none() && !read.is_stopping);
        unknown.map(|read| read.known_since + UNKNOWN_KEPT).min()
    }

    /// What is to be done next.
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

    /// One with room for so many blocks.
    fn reading(blocks: u32) -> Reading {
        let EngineId { engine_id, boot_nonce } = SOURCE;
        let (addresses, regions) = (Vec::new(), Vec::new());
        let source = Descriptor { boot_nonce, engine_id, trust: Trust::Token, addresses, regions };
        let source = source.to_bytes().unwrap();
        let mut reading = Reading::new(1);
        reading.told(Message::Room { id: ID, source, first_block: 0, blocks: (0..blocks).collect() });
        reading
    }

    fn offer(first_block: u32) -> Offer {
        let window = WindowDescriptor { number: first_block, generation: 0, len: 1, kind: MemoryKind::Host };
        let (blocks, first_region, regions, is_by_block) = (1, 0, 1, false);
        let hash = Some([first_block as u8; 16]);
        Offer { id: ID, first_block, blocks, first_region, regions, is_by_block, window, hash }
    }

    /// All hashes that came before the first block did were told in one message, which was longer than the fabric takes: the rank
    /// lost its scheduler, and the hand-off was never over.
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
            // Whoever has heard of a block has heard of its hash.
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
