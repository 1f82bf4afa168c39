//! Reads offered blocks into blocks of the own cache: a rank of the decode engine. No I/O; the time is an argument.
//!
//! ```text
//!  Room: blocks of this engine --+                                all regions of a block read
//!                                +--> READ of an Offer that fits ----------------------------> Arrived
//!  Offer: blocks of the peer   --+
//!  Stop: no new READ; Stopped once none is in flight
//! ```
//! A READ takes the first blocks of an Offer that have room; the others wait. Each region of a block is read once: a second
//! offer of it ends the hand-off (Lost). A block that has arrived has no room any more, so no READ writes into it again.
//!
//! The hash of an Offer is reported before its blocks have arrived if some of them wait for room. So the scheduler knows that
//! the peer has blocks which it cannot take yet, and that those before the hash are right.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
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
        /// Number of the offer's first blocks that other READs take.
        skip: u32,
        /// Block ids of the own cache for the offer's blocks after those.
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

/// An offer of which some blocks have no room yet.
#[derive(Debug)]
struct WaitingOffer {
    from: EngineId,
    offer: Offer,
    /// READs have begun for so many of its first blocks.
    begun: u32,
    /// The scheduler knows its hash.
    is_reported: bool,
}

/// Blocks that a READ writes, counted by place, and how many regions of each.
#[derive(Debug)]
struct InFlight {
    blocks: Range<u32>,
    regions: u32,
}

/// The state of one hand-off.
#[derive(Debug, Default)]
struct HandoffReads {
    /// From the first Room. Offers of other engines are ignored.
    source: Option<Source>,
    /// The own block for each block of the prompt.
    room: BTreeMap<u32, u32>,
    waiting: Vec<WaitingOffer>,
    /// By block of the prompt: which regions are read or in flight, and how many have not arrived.
    regions: BTreeMap<u32, (Vec<bool>, u32)>,
    in_flight: BTreeMap<u64, InFlight>,
    /// Hashes that the scheduler does not know yet, by their blocks.
    hashes: BTreeMap<u32, [u8; 16]>,
    /// All blocks before this one have arrived; None before the first Room.
    end_block: Option<u32>,
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
        read.waiting.push(WaitingOffer { from, offer, begun: 0, is_reported: false });
        self.start_reads(id);
    }

    /// Starts READs of the offered blocks that have room, and reports the hashes of the others.
    fn start_reads(&mut self, id: HandoffId) {
        let Some(read) = self.reads.get_mut(&id).filter(|read| !read.is_stopping && !read.is_lost) else {
            return;
        };
        let Some(source) = &read.source else { return };
        let mut left = Vec::new();
        for mut waiting in std::mem::take(&mut read.waiting) {
            let offer = &waiting.offer;
            if waiting.from != source.engine {
                continue;
            }
            let first = offer.first_block + waiting.begun;
            let rest = first..offer.first_block + offer.blocks;
            let blocks: Vec<u32> = rest.clone().map_while(|block| read.room.get(&block).copied()).collect();
            let of_prompt = first..first + blocks.len() as u32;
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
            if !std::mem::replace(&mut waiting.is_reported, true) {
                read.hashes.extend(offer.hash.map(|hash| (rest.end - 1, hash)));
            }
            if !blocks.is_empty() {
                for block in of_prompt.clone() {
                    let (taken, _) = read.regions.entry(block).or_insert((vec![false; all as usize], all));
                    taken[regions.clone()].fill(true);
                }
                let number = self.next_number;
                self.next_number += 1;
                read.in_flight.insert(number, InFlight { blocks: of_prompt.clone(), regions: offer.regions });
                let (source, offer, skip) = (source.endpoint.clone(), offer.clone(), waiting.begun);
                self.actions.push_back(ReadingAction::Read { id, number, source, offer, skip, blocks });
            }
            waiting.begun += of_prompt.len() as u32;
            if of_prompt.end < rest.end {
                left.push(waiting);
            }
        }
        read.waiting = left;
        if !read.waiting.is_empty() && !read.hashes.is_empty() {
            self.report_arrived(id);
        }
    }

    /// The completion of a READ: whether all its bytes have arrived.
    pub fn read_over(&mut self, id: HandoffId, number: u64, has_arrived: bool) {
        let Some(read) = self.reads.get_mut(&id) else { return };
        let Some(InFlight { blocks, regions }) = read.in_flight.remove(&number) else { return };
        if has_arrived {
            for block in blocks {
                if let Some((_, left)) = read.regions.get_mut(&block) {
                    *left -= regions;
                }
            }
            let before = read.end_block;
            while let Some(next) = read.end_block
                && read.regions.get(&next).is_some_and(|(_, left)| *left == 0)
            {
                read.end_block = Some(next + 1);
                read.regions.remove(&next);
                // Without room, no READ writes into the block again.
                read.room.remove(&next);
            }
            if read.end_block != before {
                self.report_arrived(id);
            }
        } else if !read.is_stopping && !std::mem::replace(&mut read.is_lost, true) {
            self.actions.push_back(ReadingAction::Answer(Message::Lost(id)));
        }
        self.finish_if_idle(id);
    }

    /// Reports arrived blocks and new hashes, in several messages if one would be too long. A block is reported with its hash
    /// or after it, because the scheduler reads no further hashes once all blocks are reported.
    fn report_arrived(&mut self, id: HandoffId) {
        let Some(read) = self.reads.get_mut(&id) else { return };
        let Some(end_block) = read.end_block else { return };
        let mut hashes: Vec<(u32, [u8; 16])> = std::mem::take(&mut read.hashes).into_iter().collect();
        while hashes.len() > HASHES_MAX {
            let rest = hashes.split_off(HASHES_MAX);
            let hashes = std::mem::replace(&mut hashes, rest);
            let end_block = hashes.last().map_or(end_block, |(block, _)| end_block.min(block + 1));
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

    /// The endpoint of [`SOURCE`].
    fn source() -> Endpoint {
        let EngineId { engine_id, boot_nonce } = SOURCE;
        let (addresses, regions) = (Vec::new(), Vec::new());
        Descriptor { boot_nonce, engine_id, trust: Trust::Token, addresses, regions }.to_bytes().unwrap()
    }

    fn give_room(reading: &mut Reading, first_block: u32, blocks: Vec<u32>) {
        reading.scheduler_said(Message::Room { id: ID, source: source(), first_block, blocks });
    }

    /// A rank with room for that many blocks.
    fn reading(blocks: u32) -> Reading {
        let mut reading = Reading::new(1);
        give_room(&mut reading, 0, (0..blocks).collect());
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

    /// The decode engine had room for two blocks, and an offer had four. It waited for room that never came.
    #[test]
    fn an_offer_is_read_in_parts_as_room_comes_and_its_hash_is_reported_at_once() {
        let mut reading = reading(2);
        let whole = Offer { blocks: 4, ..offer(0) };
        reading.offer(Duration::ZERO, SOURCE, whole.clone());
        let next = |reading: &mut Reading| reading.next_action().unwrap();
        let read = |number, skip, blocks: [u32; 2]| {
            let (offer, blocks) = (whole.clone(), blocks.to_vec());
            ReadingAction::Read { id: ID, number, source: source(), offer, skip, blocks }
        };
        let arrived = |end_block, hashes: &[(u32, [u8; 16])]| {
            ReadingAction::Answer(Message::Arrived { id: ID, end_block, hashes: hashes.to_vec() })
        };
        assert_eq!(next(&mut reading), read(0, 0, [0, 1]));
        // The offer's hash is of its last block, which has no room yet.
        assert_eq!(next(&mut reading), arrived(0, &[(3, [0; 16])]));
        reading.read_over(ID, 0, true);
        assert_eq!(next(&mut reading), arrived(2, &[]));
        // The same blocks again.
        give_room(&mut reading, 2, vec![1, 0]);
        assert_eq!(next(&mut reading), read(1, 2, [1, 0]));
        reading.read_over(ID, 1, true);
        assert_eq!(next(&mut reading), arrived(4, &[]));
        assert_eq!(reading.next_action(), None);
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
