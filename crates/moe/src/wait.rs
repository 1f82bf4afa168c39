//! How a [`Rank`] waits for another one, and how it leaves.

use std::cmp::Ordering;
use std::time::{Duration, Instant};

use kvlane_memory::pidfd_exited;

use crate::sync::{sleep, yield_now};
use crate::{MoeError, Phase, Rank};

/// Looks at a word before the thread lets others run. None in a model of loom, where a rank yields after each look.
const SPINS: u32 = if cfg!(loom) { 0 } else { 200 };
/// Longer waits sleep so long between two looks, and leave the processor to the ranks that compute.
const NAP: Duration = Duration::from_micros(50);
/// How often a waiting rank looks whether its peer lives. In a model of loom, which has no time, with each look.
const LOOK: Duration = if cfg!(loom) { Duration::ZERO } else { Duration::from_millis(1) };
/// Every so many looks it asks whether its caller still wants to wait.
const LOOKS_TO_CALLER: u32 = 64;

impl Rank {
    /// Waits until a word of this rank's memory, which that rank writes, compares as equal, and returns it. A greater one is of a
    /// later operation.
    pub(crate) fn wait(
        &mut self,
        word: usize,
        from: usize,
        phase: Phase,
        compare: impl Fn(u64) -> Ordering,
    ) -> Result<u64, MoeError> {
        for _ in 0..SPINS {
            let value = self.own.get(word);
            if compare(value) == Ordering::Equal {
                return Ok(value);
            }
            std::hint::spin_loop();
        }
        let (begun, mut looked, mut looks) = (Instant::now(), Instant::now(), 0u32);
        loop {
            // Before the word: words that a rank wrote before it left or ended count.
            let trouble = if looked.elapsed() >= LOOK {
                (looked, looks) = (Instant::now(), looks.wrapping_add(1));
                self.trouble(from, phase, begun.elapsed())
            } else {
                None
            };
            let value = self.own.get(word);
            match compare(value) {
                Ordering::Equal => return Ok(value),
                Ordering::Greater => return Err(self.fail(MoeError::OutOfStep { rank: from })),
                Ordering::Less => {}
            }
            if let Some(error) = trouble {
                return Err(self.fail(error));
            }
            if looks % LOOKS_TO_CALLER == LOOKS_TO_CALLER - 1 && (self.is_interrupted)() {
                return Err(self.fail(MoeError::Interrupted { rank: from, phase }));
            }
            if looks == 0 { yield_now() } else { sleep(NAP) }
        }
    }

    /// Why a rank's word will not come.
    fn trouble(&self, from: usize, phase: Phase, waited: Duration) -> Option<MoeError> {
        if let Some((heap, process)) = &self.peers[from] {
            if let Some(because) = heap.left() {
                let because = because.filter(|rank| *rank < self.shape.ranks);
                return Some(MoeError::PeerLeft { rank: from, phase, because });
            }
            if pidfd_exited(process) {
                return Some(MoeError::PeerLost { rank: from, phase });
            }
        }
        let timeout = self.timeout;
        (waited >= timeout).then_some(MoeError::TimedOut { rank: from, phase, waited: timeout })
    }

    /// Takes no part any more, and lets the others know, with the rank because of which.
    pub(crate) fn fail(&mut self, error: MoeError) -> MoeError {
        self.own.leave(error.because());
        self.failed = Some(error.clone());
        error
    }

    /// Takes no part any more: a dispatch that was sent is not received.
    pub fn give_up(&mut self) {
        if self.failed.is_none() {
            let _ = self.fail(MoeError::GivenUp);
        }
    }
}
