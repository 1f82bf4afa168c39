//! The pools that a worker has mapped: the present one, and former ones while promises on them may be open.
//!
//! The scheduler may promise a hit of a boot as long as it does not know that this boot is over, and the promise reaches
//! the worker steps later. So a worker lets a former pool go only when a step tells that the scheduler makes no promise
//! on it any more ([`Promises`]), and the daemon's process is gone, so that none can follow. While no step comes the
//! engine is idle; then a minute is enough, since a scheduler looks at its connection before it promises.

use std::{collections::VecDeque, os::fd::OwnedFd, sync::Arc, time::Duration};

use kvlane_memory::{PoolView, pidfd_exited};

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
    /// The daemon's process; None where the kernel does not tell.
    pub(crate) daemon: Option<Arc<OwnedFd>>,
}

impl Mapped {
    /// As long as it lives, its pool keeps its memory, mapped here or not.
    fn daemon_is_gone(&self) -> bool {
        self.daemon.as_ref().is_none_or(|daemon| pidfd_exited(daemon))
    }
}

/// What a step tells of the promises that its scheduler makes from the next step on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Promises {
    /// The boot that it is connected to, if all loads of this step are of that boot.
    pub present: Option<BootId>,
    /// Boots that it has been connected to and is no more; none of this step's loads is of one.
    pub gone: Vec<BootId>,
}

/// Bytes whose page tables are filled in one go, between two looks at the queue.
const PREFAULT_BYTES: u64 = 64 << 20;

/// An engine outside a step that does not poll is idle, has no open promise, and must not hold a dead daemon's memory for ever.
/// Counted in rounds of the mover, not in time: a stopped process does not count.
const IDLE_ROUNDS_TO_FORGET: u64 = 60;
/// Former pools; beyond it the oldest is let go. Each is a daemon that died within one step of the engine.
const FORMER_MAX: usize = 8;
/// Length of such a round.
pub(crate) const ROUND: Duration = Duration::from_secs(1);

/// Mapped pools by boot.
#[derive(Debug, Default)]
pub(crate) struct Pools {
    present: Option<Mapped>,
    /// The oldest first.
    former: VecDeque<Former>,
}

#[derive(Debug)]
struct Former {
    pool: Mapped,
    rounds: u64,
    /// The scheduler has said so.
    without_promises: bool,
}

impl Pools {
    pub(crate) fn present(&self) -> Option<&Mapped> {
        self.present.as_ref()
    }

    pub(crate) fn of(&self, boot: &BootId) -> Option<&Mapped> {
        let former = self.former.iter().map(|former| &former.pool);
        self.present.iter().chain(former).find(|pool| pool.boot == *boot)
    }

    /// The daemon of the present pool is there again, or another one is.
    pub(crate) fn set(&mut self, pool: Mapped) {
        if self.present.as_ref().is_some_and(|present| present.boot != pool.boot) {
            self.lost();
        }
        self.former.retain(|former| former.pool.boot != pool.boot);
        self.present = Some(pool);
    }

    /// The daemon went away; promises on its pool may still be open.
    pub(crate) fn lost(&mut self) {
        let Some(pool) = self.present.take() else { return };
        if self.former.len() >= FORMER_MAX {
            self.former.pop_front();
        }
        self.former.push_back(Former { pool, rounds: 0, without_promises: false });
    }

    /// A step has begun. Whoever calls this has queued the loads of all steps before it.
    pub(crate) fn step_begins(&mut self, promises: &Promises) {
        // What was mapped before the scheduler's present boot is older than it.
        let all_older =
            self.present.as_ref().is_some_and(|present| promises.present.as_ref() == Some(&present.boot));
        for former in &mut self.former {
            former.without_promises |= all_older || promises.gone.contains(&former.pool.boot);
        }
        self.let_go();
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
        !self.former.is_empty()
    }

    /// One round of the mover passed; unmaps former pools on which no promise can be open.
    pub(crate) fn round(&mut self, in_step: bool) {
        for former in &mut self.former {
            former.rounds += u64::from(!in_step);
        }
        self.let_go();
    }

    fn let_go(&mut self) {
        self.former.retain(|former| {
            let is_free = former.without_promises || former.rounds >= IDLE_ROUNDS_TO_FORGET;
            !(is_free && former.pool.daemon_is_gone())
        });
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use kvlane_memory::{Arena, ArenaOptions, HugePages, Numa};
    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    fn pool(boot: u8, daemon: Option<Arc<OwnedFd>>) -> Mapped {
        let options = ArenaOptions { bytes: 4096, hugepages: HugePages::Off, numa: Numa::Off, threads: 1 };
        let arena = Arena::create(&options, &|_| {}).unwrap();
        let view = PoolView::map(arena.descriptor(false).unwrap(), 4096, false).unwrap();
        Mapped { boot: [boot; 16], reading: Arc::new(view), writing: None, prefaulted: 4096, daemon }
    }

    fn lost_pool() -> Pools {
        let mut pools = Pools::default();
        pools.set(pool(1, None));
        pools.lost();
        pools
    }

    fn gone(boots: &[u8]) -> Promises {
        Promises { present: None, gone: boots.iter().map(|boot| [*boot; 16]).collect() }
    }

    /// A process that stands for a daemon that lives.
    fn living() -> (Child, Option<Arc<OwnedFd>>) {
        let child = Command::new("sleep").arg("600").spawn().unwrap();
        let pid = Pid::from_raw(child.id() as i32).unwrap();
        (child, Some(Arc::new(pidfd_open(pid, PidfdFlags::empty()).unwrap())))
    }

    #[test]
    fn a_lost_pool_stays_through_a_step_of_any_length() {
        let mut pools = lost_pool();
        (0..10 * IDLE_ROUNDS_TO_FORGET).for_each(|_| pools.round(true));
        assert!(pools.of(&[1; 16]).is_some(), "the next step may bring a load that was promised");
        (0..IDLE_ROUNDS_TO_FORGET).for_each(|_| pools.round(false));
        assert!(pools.of(&[1; 16]).is_none(), "an idle engine holds it no longer");
    }

    /// A request that waits for room waits for any number of steps; the pool used to go after three of them.
    #[test]
    fn a_lost_pool_goes_when_the_scheduler_promises_nothing_on_it() {
        let mut pools = lost_pool();
        (0..100).for_each(|_| pools.step_begins(&gone(&[])));
        (0..100).for_each(|_| pools.step_begins(&gone(&[2])));
        assert!(pools.of(&[1; 16]).is_some(), "the scheduler does not know yet that this boot is over");
        pools.step_begins(&gone(&[2, 1]));
        assert!(pools.of(&[1; 16]).is_none());
    }

    /// Of two restarts in a row only the last former pool used to be kept.
    #[test]
    fn pools_of_several_boots_stay_until_the_scheduler_is_at_the_last_one() {
        let mut pools = lost_pool();
        pools.set(pool(2, None));
        pools.set(pool(3, None));
        assert!([1, 2, 3].iter().all(|boot| pools.of(&[*boot; 16]).is_some()));
        pools.step_begins(&Promises { present: Some([2; 16]), gone: Vec::new() });
        assert!(pools.of(&[1; 16]).is_some(), "who is behind the worker may not know what is over");
        pools.step_begins(&Promises { present: Some([3; 16]), gone: Vec::new() });
        assert!(pools.of(&[1; 16]).is_none() && pools.of(&[2; 16]).is_none());
        assert!(pools.of(&[3; 16]).is_some());
        for boot in 4..4 + 2 * FORMER_MAX as u8 {
            pools.set(pool(boot, None));
        }
        assert_eq!(pools.former.len(), FORMER_MAX, "they are bounded");
    }

    #[test]
    fn the_pool_of_a_daemon_that_lives_stays_for_it_may_be_connected_to_again() {
        let (mut child, daemon) = living();
        let mut pools = Pools::default();
        pools.set(pool(1, daemon));
        pools.lost();
        pools.step_begins(&gone(&[1]));
        (0..IDLE_ROUNDS_TO_FORGET).for_each(|_| pools.round(false));
        assert!(pools.of(&[1; 16]).is_some());
        child.kill().unwrap();
        child.wait().unwrap();
        pools.round(false);
        assert!(pools.of(&[1; 16]).is_none());
    }
}
