//! Decides which pools stay mapped in a worker: the present one, and former ones that promised loads may still read.
//!
//! The scheduler may promise a hit of a boot until it learns that this boot is over, and the promise reaches the worker some
//! steps later. So a worker unmaps a former pool only after a step has said that the scheduler makes no promise on it any more
//! ([`Promises`]).
//!
//! The scheduler says so once it has seen the end of the daemon's process. Until then it may connect to that daemon again. (If
//! the kernel does not report the end, the scheduler says so as soon as it has left the boot, although it may come back.)
//!
//! An engine without steps is idle. A minute is enough then, because a scheduler checks its connection before it promises.

use std::{
    collections::{BTreeSet, VecDeque},
    time::Duration,
};

use super::ids::{Life, ProcessId};
use crate::boot::BootId;

/// The boots that the scheduler may promise hits of from the next step on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Promises {
    /// The boot that the scheduler is connected to, if all loads of this step are of that boot.
    pub present: Option<BootId>,
    /// Boots that the scheduler has left for good; no load of this step is of one.
    pub gone: Vec<BootId>,
}

/// Rounds without a step after which former pools are unmapped. An engine that runs no step has no open promise, and must not
/// keep a dead daemon's memory for ever. Counted in rounds of the mover, not in time, because a stopped process does not count.
const IDLE_ROUNDS_TO_FORGET: u64 = 60;
/// Most former pools; beyond that, the oldest is unmapped. Each is a daemon that died within one step of the engine.
const FORMER_MAX: usize = 8;
/// Length of a round of the mover.
pub const ROUND: Duration = Duration::from_secs(1);

/// The pools that a worker has mapped, by boot.
#[derive(Debug, Default)]
pub struct PoolBook {
    present: Option<Pool>,
    /// In the order in which their daemons were lost.
    former: VecDeque<Former>,
}

#[derive(Debug)]
struct Pool {
    boot: BootId,
    /// While the daemon lives, unmapping its pool here would free no memory.
    life: Life,
}

#[derive(Debug)]
struct Former {
    pool: Pool,
    /// Rounds outside a step.
    rounds: u64,
    /// A step has said so; this does not change back.
    without_promises: bool,
}

/// Each call returns the boots whose pools the driver unmaps. `in_use` are the boots of loads that are not over.
impl PoolBook {
    /// The worker has mapped the pool of this boot, its former one or another one.
    pub fn set(&mut self, boot: BootId, life: Life) -> Vec<BootId> {
        let is_other = self.present.as_ref().is_some_and(|present| present.boot != boot);
        let unmapped = if is_other { self.lost() } else { Vec::new() };
        self.former.retain(|former| former.pool.boot != boot);
        self.present = Some(Pool { boot, life });
        unmapped
    }

    /// The connection to the daemon was lost. Its pool becomes a former one, because promises on it may be open.
    pub fn lost(&mut self) -> Vec<BootId> {
        let Some(pool) = self.present.take() else { return Vec::new() };
        let mut unmapped = Vec::new();
        if self.former.len() >= FORMER_MAX {
            unmapped.extend(self.former.pop_front().map(|former| former.pool.boot));
        }
        self.former.push_back(Former { pool, rounds: 0, without_promises: false });
        unmapped
    }

    /// A step has begun. The caller has started the loads of all steps before it, so `in_use` has their boots.
    pub fn step_begins(&mut self, promises: &Promises, in_use: &BTreeSet<BootId>) -> Vec<BootId> {
        // If the scheduler is at the present boot, it has left all former ones.
        let all_older =
            self.present.as_ref().is_some_and(|present| promises.present.as_ref() == Some(&present.boot));
        for former in &mut self.former {
            former.without_promises |= all_older || promises.gone.contains(&former.pool.boot);
        }
        self.remove_unneeded(in_use)
    }

    /// A round of the mover has passed.
    pub fn round(&mut self, in_step: bool, in_use: &BTreeSet<BootId>) -> Vec<BootId> {
        for former in &mut self.former {
            former.rounds += u64::from(!in_step);
        }
        self.remove_unneeded(in_use)
    }

    /// Records that a daemon's process has ended. The next step or round may then unmap its pool.
    pub fn process_ended(&mut self, process: ProcessId) {
        self.pools_mut().for_each(|pool| pool.life.ended(process));
    }

    /// Whether a pool is kept until this process ends.
    pub fn needs(&self, process: ProcessId) -> bool {
        self.pools().any(|pool| pool.life.needs(process))
    }

    /// Whether the pool of that boot is mapped.
    pub fn holds(&self, boot: &BootId) -> bool {
        self.pools().any(|pool| pool.boot == *boot)
    }

    /// Whether the link has to call [`round`](Self::round).
    pub fn has_former(&self) -> bool {
        !self.former.is_empty()
    }

    fn pools(&self) -> impl Iterator<Item = &Pool> {
        self.present.iter().chain(self.former.iter().map(|former| &former.pool))
    }

    fn pools_mut(&mut self) -> impl Iterator<Item = &mut Pool> {
        self.present.iter_mut().chain(self.former.iter_mut().map(|former| &mut former.pool))
    }

    fn remove_unneeded(&mut self, in_use: &BTreeSet<BootId>) -> Vec<BootId> {
        let mut unmapped = Vec::new();
        self.former.retain(|former| {
            let is_free = former.without_promises || former.rounds >= IDLE_ROUNDS_TO_FORGET;
            let is_gone = !matches!(former.pool.life, Life::Watched(_));
            let stays = !(is_free && is_gone) || in_use.contains(&former.pool.boot);
            if !stays {
                unmapped.push(former.pool.boot);
            }
            stays
        });
        unmapped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: &BTreeSet<BootId> = &BTreeSet::new();

    fn lost_pool() -> PoolBook {
        let mut pools = PoolBook::default();
        pools.set([1; 16], Life::Unknown);
        pools.lost();
        pools
    }

    fn gone(boots: &[u8]) -> Promises {
        Promises { present: None, gone: boots.iter().map(|boot| [*boot; 16]).collect() }
    }

    #[test]
    fn a_lost_pool_stays_through_a_step_of_any_length() {
        let mut pools = lost_pool();
        (0..10 * IDLE_ROUNDS_TO_FORGET).for_each(|_| drop(pools.round(true, NOTHING)));
        assert!(pools.holds(&[1; 16]), "the next step may bring a load that was promised");
        (0..IDLE_ROUNDS_TO_FORGET).for_each(|_| drop(pools.round(false, NOTHING)));
        assert!(!pools.holds(&[1; 16]), "an idle engine holds it no longer");
    }

    /// A request may wait for room for any number of steps; the pool was unmapped after three of them.
    #[test]
    fn a_lost_pool_goes_when_the_scheduler_promises_nothing_on_it() {
        let mut pools = lost_pool();
        (0..100).for_each(|_| drop(pools.step_begins(&gone(&[]), NOTHING)));
        (0..100).for_each(|_| drop(pools.step_begins(&gone(&[2]), NOTHING)));
        assert!(pools.holds(&[1; 16]), "the scheduler does not know yet that this boot is over");
        assert_eq!(pools.step_begins(&gone(&[2, 1]), NOTHING), [[1; 16]]);
        assert!(!pools.holds(&[1; 16]));
    }

    /// After two restarts in a row, only the last former pool was kept.
    #[test]
    fn pools_of_several_boots_stay_until_the_scheduler_is_at_the_last_one() {
        let mut pools = lost_pool();
        pools.set([2; 16], Life::Unknown);
        pools.set([3; 16], Life::Unknown);
        assert!([1, 2, 3].iter().all(|boot| pools.holds(&[*boot; 16])));
        pools.step_begins(&Promises { present: Some([2; 16]), gone: Vec::new() }, NOTHING);
        assert!(pools.holds(&[1; 16]), "who is behind the worker may not know what is over");
        pools.step_begins(&Promises { present: Some([3; 16]), gone: Vec::new() }, NOTHING);
        assert!(!pools.holds(&[1; 16]) && !pools.holds(&[2; 16]));
        assert!(pools.holds(&[3; 16]));
        for boot in 4..4 + 2 * FORMER_MAX as u8 {
            pools.set([boot; 16], Life::Unknown);
        }
        assert_eq!(pools.former.len(), FORMER_MAX, "they are bounded");
    }

    #[test]
    fn the_pool_of_a_daemon_that_lives_stays_for_it_may_be_connected_to_again() {
        let mut pools = PoolBook::default();
        pools.set([1; 16], Life::Watched(ProcessId(7)));
        pools.lost();
        pools.step_begins(&gone(&[1]), NOTHING);
        (0..IDLE_ROUNDS_TO_FORGET).for_each(|_| drop(pools.round(false, NOTHING)));
        assert!(pools.holds(&[1; 16]) && pools.needs(ProcessId(7)));
        pools.process_ended(ProcessId(7));
        assert_eq!(pools.round(false, NOTHING), [[1; 16]]);
        assert!(!pools.holds(&[1; 16]) && !pools.needs(ProcessId(7)));
    }

    #[test]
    fn a_pool_that_a_load_copies_from_stays() {
        let mut pools = lost_pool();
        assert!(pools.step_begins(&gone(&[1]), &BTreeSet::from([[1; 16]])).is_empty());
        assert_eq!(pools.round(true, NOTHING), [[1; 16]]);
    }
}
