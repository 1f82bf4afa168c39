//! State of one engine that outlives its connections: registered regions, sessions of peers, counters, the inbox, and the
//! memory that transfers in flight use.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use crate::gpus::Gpus;
use crate::identity::Identity;
use crate::immediates::Immediates;
use crate::inbox::{Inbox, InboxOptions};
use crate::numbered::Numbered;
use crate::regions::{Regions, Shape, Shapes};
use crate::runs::Run;
use crate::sessions::Sessions;
use crate::shape::{RegionLengths, Side};
use crate::tcp::Ended;
use crate::transfers::{Between, Memory, PeerId, Stretch, Ticket};

#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) me: Identity,
    pub(crate) regions: Regions,
    /// GPUs whose memory is registered, or was.
    pub(crate) gpus: Gpus,
    pub(crate) sessions: Sessions,
    pub(crate) immediates: Immediates,
    pub(crate) inbox: Inbox,
    /// Regions of both sides that each transfer in flight uses, and the bytes of it that were moved.
    used: Numbered<Ticket, (Used, Carried)>,
    /// Threads that wait until nothing touches memory that they take back.
    pub(crate) releasing: usize,
    pub(crate) news: News,
    /// Connections of either side that ended because a checksum differed, ever.
    pub(crate) checksum_errors: u64,
}

/// Events other than the ends of transfers that a thread may wait for.
#[derive(Debug, Default)]
pub(crate) struct News {
    /// A message arrived.
    pub(crate) message: bool,
    /// A counter counted, a peer's regions are known, or memory was released.
    pub(crate) change: bool,
}

/// The memory that a transfer uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Used {
    pub(crate) peer: PeerId,
    /// Regions of this process, each with its generation.
    own: Vec<(u32, u32)>,
    /// Regions of the peer, with the generation that they had when the transfer began.
    theirs: Vec<(u32, u32)>,
}

/// Bytes of a transfer, by the index of the carrier that moved them. Most transfers have one carrier, which needs no allocation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Carried {
    first: Option<(u8, u64)>,
    more: Vec<(u8, u64)>,
}

impl Carried {
    fn add(&mut self, carrier: u8, bytes: u64) {
        let (known, added) = self.first.get_or_insert((carrier, 0));
        if *known == carrier {
            *added += bytes;
        } else if let Some((_, added)) = self.more.iter_mut().find(|(known, _)| *known == carrier) {
            *added += bytes;
        } else {
            self.more.push((carrier, bytes));
        }
    }

    /// Each carrier's index, with its bytes.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u8, u64)> {
        self.first.into_iter().chain(self.more.iter().copied())
    }
}

/// The regions of this process and those of a peer.
#[derive(Debug, Clone)]
pub(crate) struct BothSides {
    pub(crate) own: Arc<Shapes>,
    pub(crate) theirs: Arc<Shapes>,
}

impl Process {
    pub(crate) fn new(me: Identity, inbox: InboxOptions) -> Process {
        Process {
            me,
            regions: Regions::default(),
            gpus: Gpus::default(),
            sessions: Sessions::default(),
            immediates: Immediates::default(),
            inbox: Inbox::new(inbox),
            used: Numbered::default(),
            releasing: 0,
            news: News::default(),
            checksum_errors: 0,
        }
    }

    /// Counts and logs a connection that ended because of a checksum. Other reasons are ignored.
    pub(crate) fn note_ended(&mut self, peer: Option<SocketAddr>, why: &Ended) {
        if matches!(why, Ended::Damaged) {
            self.checksum_errors += 1;
            // Log: bytes changed on their way; the connection is closed and its transfers fail or are sent again.
            // Do: if it repeats, test the network and both hosts' memory.
            tracing::warn!(?peer, %why, errors = self.checksum_errors, "connection closed: checksum mismatch");
        }
    }

    /// The events since the last call.
    pub(crate) fn take_news(&mut self) -> News {
        std::mem::take(&mut self.news)
    }

    /// Wakes the threads that wait to take memory back: less may touch it now.
    pub(crate) fn note_released(&mut self) {
        self.news.change |= self.releasing > 0;
    }

    /// Counts a transfer as a user of its regions, until [`Process::note_over`].
    pub(crate) fn note_use(&mut self, ticket: Ticket, used: Used) {
        used.own.iter().for_each(|(region, _)| self.regions.count_use(*region, 1));
        self.used.insert(ticket, (used, Carried::default()));
    }

    /// A carrier has moved bytes of a transfer.
    pub(crate) fn note_carried(&mut self, ticket: Ticket, carrier: u8, bytes: u64) {
        if let Some((_, carried)) = self.used.get_mut(&ticket) {
            carried.add(carrier, bytes);
        }
    }

    /// A transfer is over. Returns the bytes that each carrier moved of it.
    pub(crate) fn note_over(&mut self, ticket: Ticket) -> Carried {
        let Some((used, carried)) = self.used.remove(&ticket) else { return Carried::default() };
        used.own.iter().for_each(|(region, _)| self.regions.count_use(*region, -1));
        carried
    }

    /// Transfers in flight that use memory.
    #[cfg(test)]
    pub(crate) fn uses(&self) -> usize {
        self.used.len()
    }

    /// The peer of a transfer, and the generation that the peer's region had when the transfer began.
    pub(crate) fn used_generation(&self, ticket: Ticket, region: u32) -> Option<(PeerId, u32)> {
        let (used, _) = self.used.get(&ticket)?;
        let (_, generation) = used.theirs.iter().find(|(number, _)| *number == region)?;
        Some((used.peer, *generation))
    }
}

impl Used {
    /// Regions and windows of the peer, each with its generation.
    pub(crate) fn theirs(&self) -> &[(u32, u32)] {
        &self.theirs
    }
}

impl BothSides {
    /// The regions that these runs use. The runs were checked against both sides.
    pub(crate) fn used_by(&self, peer: PeerId, runs: &[Run]) -> Used {
        let regions = |shapes: &Shapes, region: fn(&Run) -> u32| {
            let mut regions: Vec<u32> = Vec::new();
            for run in runs {
                // Most transfers have one region a side.
                if regions.last() != Some(&region(run)) {
                    regions.push(region(run));
                }
            }
            regions.sort_unstable();
            regions.dedup();
            let with_generation = |region| Some((region, shapes.get(&region)?.generation));
            regions.into_iter().filter_map(with_generation).collect()
        };
        let own = regions(&self.own, |run| run.local.region);
        let theirs = regions(&self.theirs, |run| run.remote.region);
        Used { peer, own, theirs }
    }

    /// Groups runs by the two memories that they move between.
    pub(crate) fn stretches(&self, runs: Vec<Run>) -> Vec<Stretch> {
        let memory =
            |shapes: &Shapes, region| shapes.get(&region).map_or(Memory::Host(0), |shape| shape.memory);
        let between = |run: &Run| Between {
            local: memory(&self.own, run.local.region),
            remote: memory(&self.theirs, run.remote.region),
        };
        let Some(first) = runs.first().map(between) else { return Vec::new() };
        let is_one = |shapes: &Shapes| shapes.len() == 1;
        if is_one(&self.own) && is_one(&self.theirs) || runs.iter().all(|run| between(run) == first) {
            return vec![Stretch { between: first, runs }];
        }
        let mut stretches: HashMap<Between, Vec<Run>> = HashMap::new();
        runs.into_iter().for_each(|run| stretches.entry(between(&run)).or_default().push(run));
        let mut stretches: Vec<Stretch> =
            stretches.into_iter().map(|(between, runs)| Stretch { between, runs }).collect();
        stretches.sort_unstable_by_key(|stretch| stretch.between);
        stretches
    }

    /// Whether these regions are still registered with the same generations.
    pub(crate) fn still_have(&self, used: &Used) -> bool {
        let is = |shapes: &Shapes, (region, generation): &(u32, u32)| {
            shapes.get(region).is_some_and(|shape| shape.generation == *generation)
        };
        used.own.iter().all(|region| is(&self.own, region))
            && used.theirs.iter().all(|region| is(&self.theirs, region))
    }

    fn shape(&self, side: Side, region: u32) -> Option<&Shape> {
        match side {
            Side::Local => self.own.get(&region),
            Side::Remote => self.theirs.get(&region),
        }
    }
}

impl RegionLengths for BothSides {
    fn region_bytes(&self, side: Side, region: u32) -> Option<u64> {
        self.shape(side, region).map(|shape| shape.len)
    }
}
