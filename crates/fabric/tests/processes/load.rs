//! Many transfers in flight at once.

use std::time::Instant;

use kvlane_fabric::{Descriptor, EngineOptions, Handle, Op, Pieces, Transfer};

use crate::side::Side;
use crate::support::{MIB, PATIENCE};

/// Many transfers both ways, each with an immediate for one counter.
pub(crate) struct Load {
    here: Side,
    there: Side,
    generation: u32,
    handles: Vec<Handle>,
    wanted: [Vec<u8>; 2],
}

impl Load {
    pub(crate) const COUNT: usize = 48;
    pub(crate) const EACH: usize = 2 * MIB + 12_345;
    pub(crate) const COUNTER: u32 = 3;

    pub(crate) fn begin(there: Side, descriptor: &Descriptor, options: EngineOptions) -> Load {
        let bytes = Load::COUNT * Load::EACH;
        let here = Side::new(bytes, options);
        here.memory.scribble(0, bytes, 11);
        there.memory.scribble(0, bytes, 12);
        let mut wanted = [&here, &there].map(|side| side.memory.bytes(0, bytes));
        let generation = there.engine.open_counter(Load::COUNTER);
        let peer = here.meet(descriptor);
        let mut transfers = Vec::new();
        for index in 0..Load::COUNT {
            let (op, to) = if index % 3 == 0 { (Op::Read, 0) } else { (Op::Write, 1) };
            let at = index * Load::EACH;
            let source = wanted[1 - to][at..at + Load::EACH].to_vec();
            wanted[to][at..at + Load::EACH].copy_from_slice(&source);
            let pieces = Pieces::Contiguous(here.run(peer, at, at, Load::EACH));
            let immediate = Some((Load::COUNTER, generation));
            let transfer = Transfer { op, immediate, ..Transfer::write(pieces) };
            transfers.push(transfer);
        }
        let begin = |transfer| here.engine.begin(peer.id, transfer).unwrap();
        let handles = transfers.into_iter().map(begin).collect();
        Load { here, there, generation, handles, wanted }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.handles.iter().all(|handle| handle.outcome().is_some())
    }

    /// All of it is done, with the right bytes, and each immediate counted once.
    pub(crate) fn end(self) {
        let until = Instant::now() + PATIENCE;
        let left = || Some(until.saturating_duration_since(Instant::now()));
        let outcomes: Vec<_> = self.handles.iter().map(|handle| handle.wait(left())).collect();
        assert!(outcomes.iter().all(|outcome| *outcome == Some(Ok(()))), "{outcomes:?}");
        let bytes = Load::COUNT * Load::EACH;
        for (side, wanted) in [&self.here, &self.there].into_iter().zip(&self.wanted) {
            assert!(side.memory.bytes(0, bytes) == *wanted, "other bytes than the right ones");
        }
        let count = self.there.engine.count(Load::COUNTER, self.generation);
        assert_eq!(count, Load::COUNT as u64, "each immediate counts once");
    }
}
