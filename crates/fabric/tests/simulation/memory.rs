//! The memory of both sides, which detects missing and late writes.

use std::collections::HashMap;

use kvlane_fabric::{Memory as Kind, Op, Place, Request, Run, Ticket};

/// Bytes of each transfer's own part of the memory.
pub(crate) const SLICE: u64 = 4096;
/// What memory here holds whose transfer is over. At a peer it is the opposite, so that a late copy either way is seen.
const CANARY: u8 = 0xa5;

pub(crate) struct Memory {
    local: Vec<u8>,
    remote: Vec<Vec<u8>>,
    destinations: HashMap<Ticket, Destination>,
}

/// What a transfer's destination holds when it is done.
struct Destination {
    op: Op,
    peer: usize,
    /// From where on.
    bytes: Vec<(usize, Vec<u8>)>,
}

impl Memory {
    pub(crate) fn new(slices: u64, peers: usize) -> Memory {
        let local: Vec<u8> = (0..slices * SLICE).map(|at| (at * 31 + at / 256) as u8).collect();
        let other: Vec<u8> = local.iter().map(|byte| !byte).collect();
        Memory { local, remote: vec![other; peers], destinations: HashMap::new() }
    }

    /// A transfer begins.
    pub(crate) fn expect(&mut self, ticket: Ticket, peer: usize, request: &Request) {
        let bytes = request.stretches.iter().flat_map(|stretch| &stretch.runs).map(|run| {
            let (here, there, len) = range(run);
            match request.op {
                Op::Write => (there, self.local[here..here + len].to_vec()),
                Op::Read => (here, self.remote[peer][there..there + len].to_vec()),
            }
        });
        let bytes = bytes.collect();
        self.destinations.insert(ticket, Destination { op: request.op, peer, bytes });
    }

    /// Whether all bytes of a transfer are where they belong.
    pub(crate) fn is_placed(&self, ticket: Ticket) -> bool {
        let Destination { op, peer, bytes } = &self.destinations[&ticket];
        let memory = match op {
            Op::Write => &self.remote[*peer],
            Op::Read => &self.local,
        };
        bytes.iter().all(|(at, bytes)| memory[*at..at + bytes.len()] == bytes[..])
    }

    pub(crate) fn copy(&mut self, op: Op, peer: usize, runs: &[Run]) {
        for run in runs {
            let (here, there, len) = range(run);
            let (here, there) =
                (&mut self.local[here..here + len], &mut self.remote[peer][there..there + len]);
            match op {
                Op::Write => there.copy_from_slice(here),
                Op::Read => here.copy_from_slice(there),
            }
        }
    }

    /// The part that begins there is used otherwise from now on.
    pub(crate) fn use_otherwise(&mut self, slice: u64) {
        let slice = slice as usize..(slice + SLICE) as usize;
        self.local[slice.clone()].fill(CANARY);
        self.remote.iter_mut().for_each(|memory| memory[slice.clone()].fill(!CANARY));
    }

    /// Whether nothing has touched the first so many slices since they were used otherwise.
    pub(crate) fn is_untouched(&self, slices: u64) -> bool {
        let used = (slices * SLICE) as usize;
        let remote = self.remote.iter().map(|memory| (memory, !CANARY));
        remote
            .chain([(&self.local, CANARY)])
            .all(|(memory, canary)| memory[..used].iter().all(|byte| *byte == canary))
    }
}

/// Where a place lies: the regions of both sides are of these memories.
pub(crate) fn memory_of(place: Place) -> Kind {
    [Kind::Host(0), Kind::Host(1), Kind::Gpu(0)][place.region as usize]
}

fn range(run: &Run) -> (usize, usize, usize) {
    (run.local.offset as usize, run.remote.offset as usize, run.len as usize)
}
