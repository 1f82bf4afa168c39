//! An engine: the state machines of its scheduler and its ranks, and the blocks that all ranks have.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvlane_fabric::EngineId;
use kvlane_handoff::{HandoffId, LandingOptions, Landings, LendingOptions, Lendings, Offering, Reading};

use crate::agents::Agent;
use crate::dice::{Dice, mix};
use crate::going_on::Task;
use crate::prompts::Prompt;

/// Few, so that they are used again soon.
pub(crate) const BLOCKS: usize = 20;

pub(crate) const LEASE: Duration = Duration::from_millis(500);
pub(crate) const EARLY: Duration = Duration::from_millis(250);

/// How an engine is cut; it is the same after a restart.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) digest: [u8; 16],
    pub(crate) ranks: u32,
    pub(crate) regions: u32,
    pub(crate) lendings_max: usize,
    /// Engines of one host copy from each other by themselves ([`Mover::Reader`](crate::reads::Mover)).
    pub(crate) host: u64,
}

/// Who uses a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    Nobody,
    /// A prompt that is computed here.
    Prompt(HandoffId),
    /// A request that goes on here.
    Task(HandoffId),
}

pub(crate) struct Window {
    pub(crate) id: HandoffId,
    pub(crate) reader: EngineId,
    /// In the order in which they are offered.
    pub(crate) blocks: Vec<u32>,
    pub(crate) is_closing: bool,
    pub(crate) is_closed: bool,
    /// Bytes that the reader copied by itself before it saw this count.
    pub(crate) is_marked: bool,
}

pub(crate) struct Rank {
    pub(crate) offering: Offering,
    pub(crate) reading: Reading,
    /// By block, then by region.
    pub(crate) memory: Vec<Vec<u64>>,
    pub(crate) windows: BTreeMap<u32, Window>,
}

pub(crate) struct Engine {
    pub(crate) shape: Shape,
    pub(crate) run: u64,
    pub(crate) lendings: Lendings,
    pub(crate) landings: Landings,
    pub(crate) ranks: Vec<Rank>,
    pub(crate) owners: Vec<Owner>,
    pub(crate) prompts: BTreeMap<HandoffId, Prompt>,
    pub(crate) tasks: BTreeMap<HandoffId, Task>,
    /// Ids that another request has had, in this run: they are not used again.
    pub(crate) used: BTreeSet<HandoffId>,
}

impl Engine {
    pub(crate) fn new(number: usize, run: u64, shape: Shape) -> Engine {
        let agent = |rank| Agent { engine: number, run, rank };
        let endpoints: Vec<_> = (0..shape.ranks).map(|rank| agent(Some(rank)).endpoint()).collect();
        let rank = |_| Rank {
            offering: Offering::default(),
            reading: Reading::new(shape.regions),
            memory: vec![vec![0; shape.regions as usize]; BLOCKS],
            windows: BTreeMap::new(),
        };
        let lendings = LendingOptions {
            // Never: a message that is lost for good is to be seen.
            retry_every: Duration::MAX,
            lease: LEASE,
            early: EARLY,
            report_every: Duration::from_millis(100),
            lendings_max: shape.lendings_max,
        };
        let landings = LandingOptions {
            retry_every: Duration::MAX,
            unheard: Duration::from_millis(300),
            stalled: Duration::from_millis(1000),
            want_every: Duration::from_millis(150),
            landings_max: 8,
        };
        Engine {
            shape,
            run,
            lendings: Lendings::new(lendings, shape.digest, endpoints.clone()),
            landings: Landings::new(landings, shape.digest, agent(None).endpoint(), endpoints),
            ranks: (0..shape.ranks).map(rank).collect(),
            owners: vec![Owner::Nobody; BLOCKS],
            prompts: BTreeMap::new(),
            tasks: BTreeMap::new(),
            used: BTreeSet::new(),
        }
    }

    /// A free block, if there is one.
    pub(crate) fn allocate(&mut self, owner: Owner, dice: &mut Dice) -> Option<u32> {
        let from = dice.below(BLOCKS as u64) as usize;
        let block = (from..from + BLOCKS).map(|block| block % BLOCKS);
        let block = block.into_iter().find(|block| self.owners[*block] == Owner::Nobody)?;
        self.owners[block] = owner;
        Some(block as u32)
    }

    /// Gives a block back: whoever gets it next writes into it at once.
    pub(crate) fn free(&mut self, block: u32) {
        let block = block as usize;
        self.owners[block] = Owner::Nobody;
        for rank in &mut self.ranks {
            rank.memory[block].iter_mut().for_each(|word| *word = mix(*word) | 1 << 63);
        }
    }

    /// When one of its machines has something to do.
    pub(crate) fn next_tick(&self) -> Option<Duration> {
        let of_ranks = self.ranks.iter().filter_map(|rank| rank.reading.next_tick());
        of_ranks.chain(self.lendings.next_tick()).chain(self.landings.next_tick()).min()
    }

    pub(crate) fn tick(&mut self, now: Duration) {
        self.lendings.tick(now);
        self.landings.tick(now);
        self.ranks.iter_mut().for_each(|rank| rank.reading.tick(now));
    }

    /// What is left of hand-offs; None: nothing.
    pub(crate) fn left_over(&self) -> Option<String> {
        let of_rank = |rank: &Rank| rank.offering.live() + rank.reading.live();
        let in_ranks: usize = self.ranks.iter().map(of_rank).sum();
        let open = self.ranks.iter().flat_map(|rank| rank.windows.values());
        let open = open.filter(|window| !window.is_closed).count();
        let used = self.owners.iter().filter(|owner| **owner != Owner::Nobody).count();
        let machines =
            (self.lendings.live(), self.landings.live().next().is_some(), in_ranks, self.next_tick());
        let is_empty =
            machines == (0, false, 0, None) && open + used + self.prompts.len() + self.tasks.len() == 0;
        (!is_empty).then(|| {
            let (prompts, tasks) = (self.prompts.keys(), self.tasks.keys());
            format!("{machines:?}, {open} windows, {used} blocks, {prompts:?}, {tasks:?}")
        })
    }
}

/// What a block of a prompt holds.
pub(crate) fn word(id: HandoffId, content: [u8; 16], rank: u32, region: u32, block: u32) -> u64 {
    let at = u64::from(block) << 32 | u64::from(rank) << 16 | u64::from(region) << 8;
    // The others are of blocks that were given back.
    mix(at ^ mix(u64::from(id.0[0]) << 8 | u64::from(content[0]))) & !(1 << 63)
}

/// The hash of a prompt's block.
pub(crate) fn hash(id: HandoffId, block: u32) -> [u8; 16] {
    let mut bytes = [id.0[0]; 16];
    bytes[..4].copy_from_slice(&block.to_le_bytes());
    bytes
}
