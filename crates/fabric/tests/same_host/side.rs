//! An engine with a region, and what its memory holds.

use std::time::{Duration, Instant};

use kvlane_fabric::{
    Access, Descriptor, Engine, EngineOptions, FabricError, Failure, Handle, Op, Options, PathStatus, PeerId,
    Pieces, Place, Run, Transfer,
};

use crate::support::{Deadline, MIB, Memory, PATIENCE};

/// How long a transfer may take to end whose peer is gone, on an idle machine.
const SOON: Duration = Duration::from_secs(5);
/// Bytes of most regions.
pub(crate) const LARGE: usize = 16 * MIB;
/// What memory is filled with when nothing is to be written there any more.
pub(crate) const CANARY: u8 = 0x55;
/// Of memory that no transfer has any more: nobody is to see it.
pub(crate) const POISON: u8 = 0xee;
/// The counter that transfers name.
pub(crate) const COUNTER: u32 = 3;

/// An engine with one region.
pub(crate) struct Side {
    pub(crate) engine: Engine,
    pub(crate) region: u32,
    pub(crate) memory: Memory,
}

/// Somebody's region, as an engine knows it.
#[derive(Clone, Copy)]
pub(crate) struct Peer {
    pub(crate) id: PeerId,
    pub(crate) region: u32,
}

impl Side {
    pub(crate) fn new(bytes: usize, options: EngineOptions) -> Side {
        let engine = Engine::new(options).unwrap();
        let memory = Memory::new(bytes);
        let mut side = Side { engine, region: 0, memory };
        side.register();
        side
    }

    pub(crate) fn of(bytes: usize) -> Side {
        Side::new(bytes, EngineOptions::default())
    }

    pub(crate) fn register(&mut self) {
        let Memory { base, len } = self.memory;
        // SAFETY: the engine is dropped before its memory, as the first field.
        self.region = unsafe { self.engine.register(base, len as u64, Access::ReadWrite).unwrap() };
    }

    pub(crate) fn descriptor(&self) -> Descriptor {
        self.engine.describe().unwrap()
    }

    pub(crate) fn meet(&self, descriptor: &Descriptor) -> Peer {
        Peer { id: self.engine.connect(descriptor).unwrap(), region: descriptor.regions[0].number }
    }

    pub(crate) fn run(&self, peer: Peer, local: usize, remote: usize, len: usize) -> Run {
        let local = Place { region: self.region, offset: local as u64 };
        Run { local, remote: Place { region: peer.region, offset: remote as u64 }, len: len as u64 }
    }

    pub(crate) fn begin(&self, peer: Peer, op: Op, runs: Vec<Run>) -> Handle {
        self.try_begin(peer, op, runs).unwrap()
    }

    pub(crate) fn try_begin(&self, peer: Peer, op: Op, runs: Vec<Run>) -> Result<Handle, FabricError> {
        let transfer = Transfer { op, ..Transfer::write(Pieces::Runs(runs)) };
        self.engine.begin(peer.id, transfer)
    }

    /// The same bytes on both sides.
    pub(crate) fn write(&self, peer: Peer, at: usize, len: usize) -> Handle {
        self.begin(peer, Op::Write, vec![self.run(peer, at, at, len)])
    }

    pub(crate) fn read(&self, peer: Peer, at: usize, len: usize) -> Handle {
        self.begin(peer, Op::Read, vec![self.run(peer, at, at, len)])
    }

    /// One transfer that moves all bytes again and again, in order, so that it takes seconds.
    pub(crate) fn long(&self, peer: Peer, op: Op) -> Handle {
        let all = self.run(peer, 0, 0, self.memory.len);
        self.begin(peer, op, vec![all; 128])
    }

    /// How a carrier reaches a peer, or why not.
    pub(crate) fn path(&self, peer: Peer, carrier: &str) -> Option<PathStatus> {
        self.engine.paths(peer.id).into_iter().find(|path| path.carrier == carrier)
    }

    /// Whether bytes go by cma.
    pub(crate) fn has_cma(&self, peer: Peer) -> bool {
        self.path(peer, "cma").is_some_and(|path| path.is_up)
    }

    /// Why they do not.
    pub(crate) fn why_no_cma(&self, peer: Peer) -> Option<String> {
        self.path(peer, "cma").filter(|path| !path.is_up)?.trouble
    }

    /// Waits until the peer is met, and by cma.
    pub(crate) fn is_neighbour(&self, peer: Peer) {
        self.reach(peer);
        let begun = Instant::now();
        while !self.has_cma(peer) {
            assert!(begun.elapsed() < PATIENCE, "{:?}", self.engine.paths(peer.id));
            // Nobody tells when a path is up.
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until a peer takes something, also one that was lost, or could not be met in time on a busy machine.
    pub(crate) fn reach(&self, peer: Peer) {
        let begun = Instant::now();
        while self.write(peer, 0, 1).wait(Some(PATIENCE)) != Some(Ok(())) {
            assert!(begun.elapsed() < PATIENCE, "the peer stays lost");
            // Nobody tells when a peer is there again.
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

pub(crate) fn done(handle: &Handle) {
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Ok(())));
}

/// The transfer fails soon because its peer is gone.
pub(crate) fn lost(handle: &Handle) {
    fails_soon(handle, &[Failure::PeerLost]);
}

/// The transfer fails soon for one of these reasons, and its outcome stays as it is.
pub(crate) fn fails_soon(handle: &Handle, reasons: &[Failure]) {
    let deadline = Deadline::after(SOON);
    let outcome = handle.wait(Some(PATIENCE));
    assert!(reasons.iter().any(|reason| outcome == Some(Err(*reason))), "{outcome:?}");
    deadline.assert_kept();
    assert_eq!(handle.outcome(), outcome, "it is over only once");
}

pub(crate) fn impatient() -> EngineOptions {
    let transfers = Options { peer_patience: Duration::from_millis(500), ..Options::default() };
    EngineOptions { transfers, ..EngineOptions::default() }
}
