//! Plans copies between an engine's blocks and the pool, checked to lie inside the pool.

use std::sync::Arc;

use kvlane_block::{BlockId, LayoutError, PoolOffset, Region, Run, plan};
use kvlane_memory::Arena;
use thiserror::Error;

/// Why copies cannot be planned.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PlanError {
    /// The regions do not have one of the blocks.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A run does not lie in the pool.
    #[error("{bytes} bytes at {offset} are not inside the pool")]
    OutsidePool {
        /// Where the run begins in the pool.
        offset: PoolOffset,
        /// Length of the run.
        bytes: u64,
    },
}

/// Plans copies between an engine's blocks and a pool of this size.
///
/// # Errors
/// [`PlanError`]; then nothing is planned.
pub(crate) fn plan_inside(
    regions: &[Region],
    places: &[(BlockId, PoolOffset)],
    pool_bytes: u64,
) -> Result<Vec<Run>, PlanError> {
    let runs = plan(regions, places)?;
    match runs.iter().find(|run| run.pool_offset.end_inside(run.len, pool_bytes).is_none()) {
        Some(run) => Err(PlanError::OutsidePool { offset: run.pool_offset, bytes: run.len }),
        None => Ok(runs),
    }
}

/// Planned copies between an engine's blocks and the daemon's pool. All lie inside the pool, so at worst they tear bytes of it.
/// Keeps the pool mapped.
#[derive(Debug, Clone)]
pub struct Runs {
    runs: Vec<Run>,
    pool: Arc<Arena>,
}

impl Runs {
    /// Plans the copies between these blocks of the regions and their pool offsets, in either direction.
    ///
    /// # Errors
    /// [`PlanError`]; then nothing is planned.
    pub fn plan(
        regions: &[Region],
        places: &[(BlockId, PoolOffset)],
        pool: &Arc<Arena>,
    ) -> Result<Self, PlanError> {
        let mut all = Self::none(pool);
        all.extend(regions, places)?;
        Ok(all)
    }

    /// An empty plan for this pool.
    pub fn none(pool: &Arc<Arena>) -> Self {
        Self { runs: Vec::new(), pool: Arc::clone(pool) }
    }

    /// Adds the copies of further blocks.
    ///
    /// # Errors
    /// As for [`Self::plan`]; then the plan is unchanged.
    pub fn extend(&mut self, regions: &[Region], places: &[(BlockId, PoolOffset)]) -> Result<(), PlanError> {
        self.runs.extend(plan_inside(regions, places, self.pool.bytes())?);
        Ok(())
    }

    /// The runs in the order in which they were planned.
    pub fn as_slice(&self) -> &[Run] {
        &self.runs
    }

    /// The pool that the runs lie in.
    pub fn pool(&self) -> &Arc<Arena> {
        &self.pool
    }
}

#[cfg(test)]
mod tests {
    use kvlane_memory::{ArenaOptions, HugePages, Numa};

    use super::*;

    #[test]
    fn what_ends_outside_the_pool_is_not_planned() {
        let options =
            ArenaOptions { bytes: 64 << 10, hugepages: HugePages::Off, numa: Numa::Off, threads: 1 };
        let pool = Arc::new(Arena::create(&options, &|_| {}).unwrap());
        let region = Region {
            base: 1 << 20,
            block_stride: 4096,
            blocks: 4,
            piece_bytes: 4096,
            piece_offsets: vec![0],
        };
        let regions = [region];
        let planned = |(id, offset)| {
            let places = [(BlockId(0), PoolOffset(0)), (BlockId(id), PoolOffset(offset))];
            Runs::plan(&regions, &places, &pool).map(|runs| runs.runs.len())
        };
        let outside = |offset| PlanError::OutsidePool { offset: PoolOffset(offset), bytes: 4096 };
        let end = pool.bytes();
        assert_eq!(planned((2, end - 4096)), Ok(2), "up to its last byte");
        assert_eq!(planned((2, end - 4095)), Err(outside(end - 4095)));
        assert_eq!(planned((2, end)), Err(outside(end)));
        assert!(matches!(planned((2, u64::MAX - 1)), Err(PlanError::Layout(_))));
        assert!(matches!(planned((4, 0)), Err(PlanError::Layout(_))));
    }
}
