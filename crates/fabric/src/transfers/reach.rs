//! Which memory a path reaches, and which paths may carry a chunk.

use crate::runs::Run;

/// A memory of one side: bytes of one chunk all lie in one memory here and in one there, so that a path that is near to both
/// can carry all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Memory {
    /// The host's, of this NUMA node; 0 where it is not known or does not matter.
    Host(u16),
    /// A GPU's, by its number at the side that has it.
    Gpu(u16),
}

/// The memories that bytes move between.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Between {
    /// In this process.
    pub local: Memory,
    /// At the peer.
    pub remote: Memory,
}

/// Runs that all move between the same two memories.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stretch {
    /// Which.
    pub between: Between,
    /// In the order in which they are posted.
    pub runs: Vec<Run>,
}

/// What a post needs of its path. Each peer has a queue for each route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Route {
    /// Memory of the host on both sides.
    HostToHost,
    /// Of the host here, of a GPU at the peer.
    HostToGpu,
    /// Of a GPU here, of the host at the peer.
    GpuToHost,
    /// Of GPUs on both sides.
    GpuToGpu,
    /// No memory: immediates and messages.
    Words,
}

/// The routes that a path serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reach(u8);

/// What is known of a path before it is up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathSpec {
    /// The routes that it serves.
    pub reach: Reach,
    /// Paths of a higher number carry nothing on a route, trials included, while one of a lower number is up that serves it.
    /// Those of this crate have [`PathSpec::CMA`] and [`PathSpec::SOCKETS`]; there is room before, between and behind.
    pub class: u8,
    /// Most bytes of a post that writes; None for [`crate::Options::chunk_bytes`].
    pub write_bytes: Option<u64>,
    /// Most bytes of a post that reads; None for [`crate::Options::chunk_bytes`].
    pub read_bytes: Option<u64>,
}

impl Memory {
    /// Whether it is a GPU's.
    pub fn is_gpu(self) -> bool {
        matches!(self, Memory::Gpu(_))
    }
}

impl Between {
    /// The host's memory on both sides.
    pub const HOSTS: Between = Between { local: Memory::Host(0), remote: Memory::Host(0) };

    /// Whether either is a GPU's.
    pub(crate) fn has_gpus(self) -> bool {
        self.local.is_gpu() || self.remote.is_gpu()
    }

    /// What bytes that move between the two need of their path.
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
    /// Between the hosts' memory.
    pub fn of_hosts(runs: Vec<Run>) -> Stretch {
        Stretch { between: Between::HOSTS, runs }
    }
}

impl Route {
    /// All of them.
    pub const ALL: [Route; 5] =
        [Route::HostToHost, Route::HostToGpu, Route::GpuToHost, Route::GpuToGpu, Route::Words];

    pub(super) fn index(self) -> usize {
        self as usize
    }

    fn bit(self) -> u8 {
        1 << self.index()
    }
}

impl Reach {
    /// None.
    pub const NOTHING: Reach = Reach(0);
    /// Everything.
    pub const ALL: Reach = Reach(0b1_1111);
    /// Bytes of any memory, and no words.
    pub const ALL_MEMORY: Reach = Reach(0b0_1111);
    /// Bytes of the hosts' memory only.
    pub const HOSTS: Reach = Reach(0b0_0001);
    /// Bytes with a GPU on either side.
    pub const GPUS: Reach = Reach(0b0_1110);
    /// Immediates and messages only.
    pub const WORDS: Reach = Reach(0b1_0000);

    /// These.
    pub fn of(routes: &[Route]) -> Reach {
        Reach(routes.iter().fold(0, |bits, route| bits | route.bit()))
    }

    /// Whether a route is among them.
    pub fn serves(self, route: Route) -> bool {
        self.0 & route.bit() != 0
    }

    /// Of either.
    pub fn and(self, other: Reach) -> Reach {
        Reach(self.0 | other.0)
    }

    /// Of these, but not of the other's.
    pub(super) fn without(self, other: Reach) -> Reach {
        Reach(self.0 & !other.0)
    }

    /// Whether any route is among both.
    pub(crate) fn overlaps(self, other: Reach) -> bool {
        self.0 & other.0 != 0
    }

    /// How many routes they are.
    pub(super) fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Each of them.
    pub(super) fn routes(self) -> impl Iterator<Item = Route> {
        Route::ALL.into_iter().filter(move |route| self.serves(*route))
    }
}

impl PathSpec {
    /// The class of paths from memory to memory between processes of one host.
    pub const CMA: u8 = 64;
    /// The class of paths through sockets, which reach everybody.
    pub const SOCKETS: u8 = 128;

    /// A path that serves these routes, with the usual limits.
    pub fn new(reach: Reach, class: u8) -> PathSpec {
        PathSpec { reach, class, write_bytes: None, read_bytes: None }
    }
}
