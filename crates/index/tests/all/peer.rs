//! One owner of a story: it sends what the test says, and counts as a real one does.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

use kvlane_block::BlockHash;
use kvlane_index::{Changes, Delta, Heartbeat, Index, KeySet, Part, Progress, Question, Refused};

use crate::world::{hash, space};

pub(crate) fn hashes(numbers: Range<u8>) -> Vec<BlockHash> {
    numbers.map(hash).collect()
}

/// Positions that the owner has, of a question for these hashes in space 0.
pub(crate) fn only(index: &Index, owner: &str, hashes: &[BlockHash], now: Duration) -> Vec<Range<u32>> {
    let space = space(0);
    let question = Question { space: &space, hashes, only_prefix: false, except: None, turn: 0 };
    let answer = index.find(&question, now).unwrap();
    answer.into_iter().find(|runs| &*runs.owner == owner).map_or(Vec::new(), |runs| runs.positions)
}

pub(crate) struct Peer {
    name: String,
    pub(crate) epoch: u64,
    pub(crate) number: u64,
    pub(crate) keys: BTreeSet<BlockHash>,
    pub(crate) now: Duration,
}

impl Peer {
    pub(crate) const START: Duration = Duration::from_secs(1000);

    pub(crate) fn new(name: &str) -> Self {
        Self { name: name.into(), epoch: 1, number: 0, keys: BTreeSet::new(), now: Self::START }
    }

    /// An owner without keys that the index follows.
    pub(crate) fn joined(index: &mut Index, name: &str) -> Self {
        let mut peer = Self::new(name);
        peer.join(index);
        peer.answer_snapshot(index, 1);
        peer
    }

    pub(crate) fn restart(&mut self, epoch: u64) {
        *self = Self { epoch, now: self.now, ..Self::new(&self.name) };
    }

    pub(crate) fn join(&self, index: &mut Index) {
        let progress = index.join(&self.name, self.epoch, "10.0.0.1:7000", self.now);
        assert_eq!(progress, Ok(Progress::NeedsSnapshot));
    }

    pub(crate) fn delta(&mut self, announced: &[BlockHash], withdrawn: &[BlockHash]) -> Delta {
        let first = self.number + 1;
        self.number += (announced.len() + withdrawn.len()).max(1) as u64;
        self.keys.extend(announced);
        self.keys.retain(|key| !withdrawn.contains(key));
        let (announced, withdrawn) = (announced.to_vec(), withdrawn.to_vec());
        Delta { first, last: self.number, changes: vec![Changes { space: space(0), announced, withdrawn }] }
    }

    /// A change of which the index does not hear.
    pub(crate) fn lose(&mut self, announced: &[BlockHash]) {
        self.number -= u64::from(announced.is_empty());
        self.delta(announced, &[]);
    }

    pub(crate) fn announce(&mut self, index: &mut Index, hashes: &[BlockHash]) -> Progress {
        self.try_announce(index, hashes).unwrap()
    }

    pub(crate) fn try_announce(
        &mut self,
        index: &mut Index,
        hashes: &[BlockHash],
    ) -> Result<Progress, Refused> {
        let delta = self.delta(hashes, &[]);
        index.delta(&self.name, self.epoch, delta, self.now)
    }

    pub(crate) fn try_delta(&self, index: &mut Index, first: u64, last: u64) -> Result<Progress, Refused> {
        index.delta(&self.name, self.epoch, Delta { first, last, changes: Vec::new() }, self.now)
    }

    pub(crate) fn withdraw(&mut self, index: &mut Index, hashes: &[BlockHash]) {
        let delta = self.delta(&[], hashes);
        index.delta(&self.name, self.epoch, delta, self.now).unwrap();
    }

    pub(crate) fn beat(&self, index: &mut Index) -> Progress {
        let mut keys = KeySet::default();
        self.keys.iter().for_each(|hash| keys.add(&space(0), hash));
        let heartbeat = Heartbeat { number: self.number, keys };
        index.heartbeat(&self.name, self.epoch, heartbeat, self.now).unwrap()
    }

    pub(crate) fn part(
        &self,
        ticket: u64,
        number: u32,
        is_last: bool,
        base: u64,
        hashes: &[BlockHash],
    ) -> Part {
        let (space, hashes) = (space(0), hashes.to_vec());
        Part { ticket, number, is_last, base, read_at: base, space, hashes }
    }

    /// Takes the index's request, and sends all keys, so many in each part.
    pub(crate) fn answer_snapshot(&mut self, index: &mut Index, keys: usize) {
        let requests = index.tick(self.now);
        let request = requests.iter().find(|request| *request.owner == *self.name).unwrap();
        let all: Vec<BlockHash> = self.keys.iter().copied().collect();
        let parts: Vec<&[BlockHash]> = if all.is_empty() { vec![&[]] } else { all.chunks(keys).collect() };
        for (number, hashes) in parts.iter().enumerate() {
            let is_last = number + 1 == parts.len();
            let part = self.part(request.ticket, number as u32, is_last, self.number, hashes);
            index.part(&self.name, self.epoch, &part, self.now).unwrap();
        }
    }
}
