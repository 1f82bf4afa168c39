//! What belongs to this process, and not to one of its connections or carriers.

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
    /// What peers are to this process.
    pub(crate) sessions: Sessions,
    pub(crate) immediates: Immediates,
    pub(crate) inbox: Inbox,
    /// What transfers under way use.
    used: Numbered<Ticket, Used>,
    /// Regions that are being given back: somebody waits until nothing touches them.
    pub(crate) letting_go: usize,
    pub(crate) news: News,
    /// Connections that ended since a checksum differed.
    pub(crate) checksum_errors: u64,
}

/// What happened beside transfers that somebody may wait for.
#[derive(Debug, Default)]
pub(crate) struct News {
    /// A message came.
    pub(crate) message: bool,
    /// Something else: a counter counted, a peer's regions are known, or memory was let go.
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
            letting_go: 0,
            news: News::default(),
            checksum_errors: 0,
        }
    }

    /// A connection ended for this reason.
    pub(crate) fn note_ended(&mut self, peer: Option<SocketAddr>, why: &Ended) {
        if matches!(why, Ended::Damaged) {
            self.checksum_errors += 1;
            tracing::warn!(?peer, %why, "a connection is closed and made again");
        }
    }

    /// What came by itself since this was asked the last time.
    pub(crate) fn take_news(&mut self) -> News {
        std::mem::take(&mut self.news)
    }

    /// Something may not be touched any more: whoever gives it back looks again.
    pub(crate) fn note_let_go(&mut self) {
        self.news.change |= self.letting_go > 0;
    }

    /// Notes what a transfer uses, until it is over.
    pub(crate) fn note_use(&mut self, ticket: Ticket, used: Used) {
        used.own.iter().for_each(|(region, _)| self.regions.count_use(*region, 1));
        self.used.insert(ticket, used);
    }

    pub(crate) fn note_over(&mut self, ticket: Ticket) {
        for (region, _) in self.used.remove(&ticket).map(|used| used.own).unwrap_or_default() {
            self.regions.count_use(region, -1);
        }
    }

    /// How many transfers use memory.
    #[cfg(test)]
    pub(crate) fn uses(&self) -> usize {
        self.used.len()
    }

    /// The generation of a peer's region with which a transfer began, and the peer.
    pub(crate) fn used_generation(&self, ticket: Ticket, region: u32) -> Option<(PeerId, u32)> {
        let used = self.used.get(&ticket)?;
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
    /// What runs use, which were checked against both sides.
    pub(crate) fn used_by(&self, peer: PeerId, runs: &[Run]) -> Used {
        let regions = |shapes: &Shapes, region: fn(&Run) -> u32| {
            let mut regions: Vec<u32> = Vec::new();
            for run in runs {
                // Mostly it is one.
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

    /// Runs by the memories that they are in.
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

    /// Whether all of this is still as it was.
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
