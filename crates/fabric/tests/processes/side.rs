//! An engine with a region, and the time limits of its transfers.

use std::time::{Duration, Instant};

use kvlane_fabric::{
    Access, Descriptor, Engine, EngineOptions, FabricError, Handle, Op, Options, PathStatus, PeerId, Pieces,
    Place, Run, Transfer, Transport,
};

use crate::support::{Memory, PATIENCE};

/// How late something may be on an idle machine.
pub(crate) const MARGIN: Duration = Duration::from_secs(2);
/// A part of each region, its last bytes, for small transfers beside those that a test looks at.
const MAILBOX: usize = 4096;
/// What memory is filled with when nothing is to be written there any more.
pub(crate) const CANARY: u8 = 0x55;

/// An engine with one region, a mailbox at its end.
pub(crate) struct Side {
    pub(crate) engine: Engine,
    pub(crate) region: u32,
    pub(crate) memory: Memory,
}

/// Somebody's region, as an engine knows it.
#[derive(Clone, Copy)]
pub(crate) struct Peer {
    pub(crate) id: PeerId,
    region: u32,
    mailbox: u64,
}

impl Side {
    /// Of so many bytes and a mailbox.
    pub(crate) fn new(bytes: usize, options: EngineOptions) -> Side {
        let engine = Engine::new(options).unwrap();
        let memory = Memory::new(bytes + MAILBOX);
        // SAFETY: the engine is dropped first, as the first field.
        let region = unsafe { engine.register(memory.base, memory.len as u64, Access::ReadWrite).unwrap() };
        Side { engine, region, memory }
    }

    pub(crate) fn with(bytes: usize, transfers: Options) -> Side {
        Side::new(bytes, EngineOptions { transfers, ..by_tcp() })
    }

    pub(crate) fn of(bytes: usize) -> Side {
        Side::with(bytes, Options::default())
    }

    pub(crate) fn descriptor(&self) -> Descriptor {
        self.engine.describe().unwrap()
    }

    pub(crate) fn meet(&self, descriptor: &Descriptor) -> Peer {
        let region = descriptor.regions[0];
        let id = self.engine.connect(descriptor).unwrap();
        Peer { id, region: region.number, mailbox: region.len - MAILBOX as u64 }
    }

    pub(crate) fn run(&self, peer: Peer, local: usize, remote: usize, len: usize) -> Run {
        let local = Place { region: self.region, offset: local as u64 };
        Run { local, remote: Place { region: peer.region, offset: remote as u64 }, len: len as u64 }
    }

    pub(crate) fn begin(&self, peer: Peer, op: Op, run: Run) -> Handle {
        let transfer = Transfer { op, ..Transfer::write(Pieces::Contiguous(run)) };
        self.engine.begin(peer.id, transfer).unwrap()
    }

    /// The same bytes on both sides.
    pub(crate) fn write(&self, peer: Peer, at: usize, len: usize) -> Handle {
        self.begin(peer, Op::Write, self.run(peer, at, at, len))
    }

    /// From this mailbox into the peer's.
    pub(crate) fn post(&self, peer: Peer) -> Handle {
        self.try_post(peer).unwrap()
    }

    pub(crate) fn try_post(&self, peer: Peer) -> Result<Handle, FabricError> {
        let local = self.memory.len - MAILBOX;
        let run = self.run(peer, local, peer.mailbox as usize, MAILBOX);
        self.engine.begin(peer.id, Transfer::write(Pieces::Contiguous(run)))
    }

    pub(crate) fn paths_for_bytes(&self, peer: Peer) -> Vec<PathStatus> {
        self.engine.paths(peer.id).into_iter().filter(|path| path.carrier != "control").collect()
    }

    /// Waits until a peer that was lost takes something again.
    pub(crate) fn reach(&self, peer: Peer) {
        let begun = Instant::now();
        while self.post(peer).wait(Some(PATIENCE)) != Some(Ok(())) {
            assert!(begun.elapsed() < PATIENCE, "the peer stays lost");
            // Nobody tells when a peer is there again.
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

pub(crate) fn done(handle: &Handle) {
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Ok(())));
}

/// What breaks here is a connection's: neighbours have tests of their own.
pub(crate) fn by_tcp() -> EngineOptions {
    EngineOptions { transport: Some(Transport::TCP), ..EngineOptions::default() }
}

pub(crate) fn impatient() -> Options {
    Options { peer_patience: Duration::from_secs(1), ..Options::default() }
}

pub(crate) fn quick() -> Options {
    Options {
        post_patience: Duration::from_millis(300),
        drain_patience: Duration::from_millis(100),
        peer_patience: Duration::from_millis(500),
        backoff: Duration::from_millis(5),
        backoff_max: Duration::from_millis(50),
        ..Options::default()
    }
}
