//! Routes: the kinds of memory that bytes move between. Says which routes a path serves, and which one a post needs.

use std::fmt;

use crate::runs::Run;

/// A memory of one side. All bytes of one chunk lie in one memory here and in one at the peer. So one path, near to both, can
/// carry the whole chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Memory {
    /// Memory of this NUMA node of the host; 0 if the node is not known or does not matter.
    Host(u16),
    /// Memory of a GPU, by the number that its side gave it.
    Gpu(u16),
}

/// The memories that bytes move between.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Between {
    /// Memory of this process.
    pub local: Memory,
    /// Memory of the peer.
    pub remote: Memory,
}

/// Runs that all move between the same two memories.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stretch {
    /// The two memories of all runs.
    pub between: Between,
    /// In the order in which they are posted.
    pub runs: Vec<Run>,
}

/// The service that a post needs from its path. Each peer has a queue for each route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Route {
    /// Memory of the host on both sides.
    HostToHost,
    /// Memory of the host here, of a GPU at the peer.
    HostToGpu,
    /// Memory of a GPU here, of the host at the peer.
    GpuToHost,
    /// Memory of GPUs on both sides.
    GpuToGpu,
    /// Immediates and messages, which need no registered memory.
    Words,
}

/// A set of routes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reach(u8);

/// The properties of a path, which do not change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathSpec {
    /// The routes that it serves.
    pub reach: Reach,
    /// Lower is better. A path carries nothing on a route, trials included, while a path of a lower class is up that serves the
    /// route. This crate's paths have [`PathSpec::CUDA`], [`PathSpec::CMA`] and [`PathSpec::SOCKETS`]; others may lie before, between and behind.
    pub class: u8,
    /// Most bytes of a post that writes. None: [`crate::Options::chunk_bytes`].
    pub write_bytes: Option<u64>,
    /// Most bytes of a post that reads. None: [`crate::Options::chunk_bytes`].
    pub read_bytes: Option<u64>,
    /// Most runs of a post that reads. None: [`crate::Options::chunk_runs`].
    pub read_runs: Option<usize>,
}

impl Memory {
    /// Whether it is memory of a GPU.
    pub fn is_gpu(self) -> bool {
        matches!(self, Memory::Gpu(_))
    }
}

impl Between {
    /// The host's memory on both sides.
    pub const HOSTS: Between = Between { local: Memory::Host(0), remote: Memory::Host(0) };

    /// The route of bytes that move between the two.
    pub fn route(self) -> Route {
        match (self.local.is_gpu(), self.remote.is_gpu()) {
            (false, false) => Route::HostToHost,
            (false, true) => Route::HostToGpu,
            (true, false) => Route::GpuToHost,
            (true, true) => Route::GpuToGpu,
        }
    }
}

impl Stretch {
    /// Runs between the hosts' memory, of unknown NUMA nodes.
    pub fn of_hosts(runs: Vec<Run>) -> Stretch {
        Stretch { between: Between::HOSTS, runs }
    }
}

impl Route {
    /// Every route, in the order of the variants.
    pub const ALL: [Route; 5] =
        [Route::HostToHost, Route::HostToGpu, Route::GpuToHost, Route::GpuToGpu, Route::Words];

    pub(super) fn index(self) -> usize {
        self as usize
    }

    fn bit(self) -> u8 {
        1 << self.index()
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Route::HostToHost => "memory of the hosts",
            Route::HostToGpu => "memory of the host here and of a GPU at the peer",
            Route::GpuToHost => "memory of a GPU here and of the host at the peer",
            Route::GpuToGpu => "memory of GPUs",
            Route::Words => "engines that only exchange words",
        })
    }
}

impl Reach {
    /// The empty set: no route at all.
    pub const NOTHING: Reach = Reach(0);
    /// Every route: bytes of any memory, and words.
    pub const ALL: Reach = Reach(0b1_1111);
    /// Bytes of any memory, and no words.
    pub const ALL_MEMORY: Reach = Reach(0b0_1111);
    /// Bytes of the hosts' memory only.
    pub const HOSTS: Reach = Reach(0b0_0001);
    /// Bytes with a GPU on either side.
    pub const GPUS: Reach = Reach(0b0_1110);
    /// Immediates and messages only.
    pub const WORDS: Reach = Reach(0b1_0000);

    /// The set of the given routes.
    pub fn of(routes: &[Route]) -> Reach {
        Reach(routes.iter().fold(0, |bits, route| bits | route.bit()))
    }

    /// Whether the set has this route.
    pub fn serves(self, route: Route) -> bool {
        self.0 & route.bit() != 0
    }

    /// The union of both sets.
    pub fn and(self, other: Reach) -> Reach {
        Reach(self.0 | other.0)
    }

    /// The routes of this set that are not in the other.
    pub(super) fn without(self, other: Reach) -> Reach {
        Reach(self.0 & !other.0)
    }

    /// Whether the two sets share a route.
    pub(crate) fn overlaps(self, other: Reach) -> bool {
        self.0 & other.0 != 0
    }

    /// The number of routes.
    pub(super) fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// The routes of the set, in the order of [`Route::ALL`].
    pub(super) fn routes(self) -> impl Iterator<Item = Route> {
        Route::ALL.into_iter().filter(move |route| self.serves(*route))
    }
}

impl PathSpec {
    /// The class of paths from a GPU's memory to a GPU's between processes of one host.
    pub const CUDA: u8 = 32;
    /// The class of paths from memory to memory between processes of one host.
    pub const CMA: u8 = 64;
    /// The class of paths through sockets, which reach every peer.
    pub const SOCKETS: u8 = 128;

    /// A path that serves these routes, with the engine's limits for posts.
    pub fn new(reach: Reach, class: u8) -> PathSpec {
        PathSpec { reach, class, write_bytes: None, read_bytes: None, read_runs: None }
    }
}
