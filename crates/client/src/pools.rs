//! The pools that a worker has mapped: the present one, and the last one while promises on it may be open.

use std::{sync::Arc, time::Duration};

use kvlane_memory::PoolView;

use crate::BootId;

/// How the pool of one boot is mapped.
#[derive(Debug, Clone)]
pub(crate) struct Mapped {
    pub(crate) boot: BootId,
    /// Read-only; loads copy from it.
    pub(crate) reading: Arc<PoolView>,
    /// Where saves are written when the daemon may not read this process.
    pub(crate) writing: Option<Arc<PoolView>>,
    /// So far the page tables are filled.
    pub(crate) prefaulted: u64,
}

/// Bytes whose page tables are filled in one go, between two looks at the queue.
const PREFAULT_BYTES: u64 = 64 << 20;

/// A promise reaches the worker with the engine's next step or the one after: so many polls after the daemon was
/// lost, no load of its pool can come any more.
const POLLS_TO_FORGET: u64 = 3;
/// An engine outside a step that does not poll is idle, has no open promise, and must not hold a dead daemon's memory for ever.
/// Counted in rounds of the mover, not in time: a stopped process does not count.
const IDLE_ROUNDS_TO_FORGET: u64 = 60;
/// Length of such a round.
pub(crate) const ROUND: Duration = Duration::from_secs(1);

/// Mapped pools by boot.
#[derive(Debug, Default)]
pub(crate) struct Pools {
    present: Option<Mapped>,
    former: Option<Former>,
}

#[derive(Debug)]
struct Former {
    pool: Mapped,
    polls_at_loss: u64,
    rounds: u64,
}

impl Pools {
    pub(crate) fn present(&self) -> Option<&Mapped> {
        self.present.as_ref()
    }

    pub(crate) fn of(&self, boot: &BootId) -> Option<&Mapped> {
        let former = self.former.as_ref().map(|f| &f.pool);
        self.present.iter().chain(former).find(|pool| pool.boot == *boot)
    }

    /// The daemon of the present pool is there again, or another one is.
    pub(crate) fn set(&mut self, pool: Mapped, polls: u64) {
        if self.present.as_ref().is_some_and(|present| present.boot != pool.boot) {
            self.lost(polls);
        }
        if self.former.as_ref().is_some_and(|former| former.pool.boot == pool.boot) {
            self.former = None;
        }
        self.present = Some(pool);
    }

    /// The daemon went away; promises on its pool may still be open.
    pub(crate) fn lost(&mut self, polls: u64) {
        if let Some(pool) = self.present.take() {
            self.former = Some(Former { pool, polls_at_loss: polls, rounds: 0 });
        }
    }

    /// Fills page tables of the present pool, so that the first loads do not fault page by page. True while there is
    /// more to do.
    pub(crate) fn prefault_some(&mut self) -> bool {
        let Some(pool) = &mut self.present else { return false };
        let length = PREFAULT_BYTES.min(pool.reading.bytes() - pool.prefaulted);
        if length == 0 {
            return false;
        }
        for view in std::iter::once(&pool.reading).chain(&pool.writing) {
            if let Err(error) = view.prefault(pool.prefaulted, length) {
                tracing::debug!(%error, "the kernel does not fill page tables ahead; loads fault page by page");
                pool.prefaulted = pool.reading.bytes();
                return false;
            }
        }
        pool.prefaulted += length;
        true
    }

    /// Whether rounds must be counted.
    pub(crate) fn has_former(&self) -> bool {
        self.former.is_some()
    }

    /// One round of the mover passed; unmaps the former pool when no promise on it can be open.
    pub(crate) fn round(&mut self, polls: u64, in_step: bool) {
        if let Some(former) = &mut self.former {
            former.rounds += u64::from(!in_step);
            let polled = polls >= former.polls_at_loss + POLLS_TO_FORGET;
            if polled || former.rounds >= IDLE_ROUNDS_TO_FORGET {
                self.former = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lost_pool() -> Pools {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let view = PoolView::map(file.into(), 4096, false).unwrap();
        let mut pools = Pools::default();
        pools.set(Mapped { boot: [1; 16], reading: Arc::new(view), writing: None, prefaulted: 4096 }, 7);
        pools.lost(7);
        pools
    }

    #[test]
    fn a_lost_pool_stays_through_a_step_of_any_length() {
        let mut pools = lost_pool();
        (0..10 * IDLE_ROUNDS_TO_FORGET).for_each(|_| pools.round(7, true));
        assert!(pools.of(&[1; 16]).is_some(), "the next step may bring a load that was promised");
        (0..IDLE_ROUNDS_TO_FORGET).for_each(|_| pools.round(8, false));
        assert!(pools.of(&[1; 16]).is_none(), "an idle engine holds it no longer");
    }

    #[test]
    fn a_lost_pool_goes_when_the_engine_polled_often_enough() {
        let mut pools = lost_pool();
        pools.round(7 + POLLS_TO_FORGET - 1, true);
        assert!(pools.of(&[1; 16]).is_some());
        pools.round(7 + POLLS_TO_FORGET, true);
        assert!(pools.of(&[1; 16]).is_none());
    }
}
