//! Copies by memcpy inside the engine's own process.
#![expect(unsafe_code, reason = "copies between the engine's tensors and the pool, by address")]

use kvlane_block::Run;

/// Memory of this process. A copy cannot fail: a wrong address is a crash, so the caller's regions must be those of live
/// tensors.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct OwnMemory;

impl OwnMemory {
    /// Gathers: engine to pool.
    ///
    /// # Safety
    /// Every run's `pool_offset..pool_offset + len` lies inside a writable mapping at `pool_base`, and nothing else reads or
    /// writes those bytes during the call. Runs do not share pool bytes. The engine addresses are valid to read, and are not
    /// written meanwhile.
    pub(crate) unsafe fn read(&self, runs: &[Run], pool_base: *mut u8) {
        for run in runs {
            // SAFETY: by the caller's promise both sides are valid for `len` bytes and this call's alone; the pool
            // and the engine's tensors are different mappings, so they do not overlap.
            unsafe {
                let engine = std::ptr::with_exposed_provenance::<u8>(run.engine_addr as usize);
                std::ptr::copy_nonoverlapping(
                    engine,
                    pool_base.add(run.pool_offset.0 as usize),
                    run.len as usize,
                );
            }
        }
    }

    /// Scatters: pool to engine.
    ///
    /// # Safety
    /// Every run's `pool_offset..pool_offset + len` lies inside a mapping at `pool_base`, and nothing writes those bytes during
    /// the call. The engine addresses are valid to write, and belong to this copy, because the engine has set those blocks
    /// aside.
    pub(crate) unsafe fn write(&self, runs: &[Run], pool_base: *const u8) {
        for run in runs {
            // SAFETY: as in `read`, the other way round.
            unsafe {
                let engine = std::ptr::with_exposed_provenance_mut::<u8>(run.engine_addr as usize);
                std::ptr::copy_nonoverlapping(
                    pool_base.add(run.pool_offset.0 as usize),
                    engine,
                    run.len as usize,
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kvlane_block::PoolOffset;

    use super::*;

    #[test]
    fn scatters_what_it_gathered() {
        let engine: Vec<u8> = (0..=255).collect();
        let mut pool = vec![0u8; 256];
        let mut back = vec![0u8; 256];
        let runs = |base: u64| {
            [(16, 200, 8), (0, 0, 16), (128, 64, 100)].map(|(from, to, len)| Run {
                engine_addr: base + from,
                pool_offset: PoolOffset(to),
                len,
            })
        };
        // SAFETY: all runs lie inside the vectors, which nothing else touches.
        unsafe {
            OwnMemory.read(&runs(engine.as_ptr().expose_provenance() as u64), pool.as_mut_ptr());
            OwnMemory.write(&runs(back.as_mut_ptr().expose_provenance() as u64), pool.as_ptr());
        }
        assert_eq!(pool[200..208], engine[16..24]);
        assert_eq!(pool[64..164], engine[128..228]);
        for copied in [0..24, 128..228] {
            assert_eq!(back[copied.clone()], engine[copied]);
        }
        assert_eq!(back[24..128], [0; 104]);
    }
}
