//! The daemon's side of a worker's host memory: reads it by process_vm_readv.
#![expect(unsafe_code, reason = "the kernel writes into the pool what it reads of the engine")]

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{Ordering, fence};

use kvlane_block::Run;
use kvlane_memory::{ProbeError, RANGES_MAX, RemoteProcess, peer_pidfd};
use rustix::io::Errno;
use thiserror::Error;

use crate::fence::{FENCE_BYTES, FenceValue};
use crate::host_worker::HostFence;
use crate::runs::Runs;

/// Most bytes that one call copies. The fence is checked after each call, so that a copy that was given up ends there.
const BATCH_BYTES: u64 = 64 << 20;

/// A process whose memory a probe has found readable.
///
/// Each copy checks the fence. Its nonce shows whether a later process has got the same pid. By its epoch the engine gives up
/// copies that it no longer waits for.
#[derive(Debug)]
pub struct ProcessVm {
    process: RemoteProcess,
    fence_address: u64,
    nonce: [u8; 16],
}

/// Why a copy does not count.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CopyError {
    /// The process has exited, or another one has its pid.
    #[error("the engine's process {pid} has exited")]
    Gone {
        /// Process id of the worker.
        pid: u32,
    },
    /// The engine gave the copy up and may have reused its blocks.
    #[error("the engine is at epoch {found} and gave up the copy that it asked for at epoch {asked}")]
    Cancelled {
        /// The epoch of the request.
        asked: u64,
        /// The epoch that the fence held.
        found: u64,
    },
    /// The kernel refused, because an address is not mapped, or a permission was taken away.
    #[error("the engine's process {pid} cannot be copied at {address:#x}: {errno}")]
    Refused {
        /// Process id of the worker.
        pid: u32,
        /// Address of the run that failed.
        address: u64,
        /// From the kernel.
        errno: Errno,
    },
}

impl ProcessVm {
    /// Reads the fence of a process by the call that copies will use. `pid` is 0 for a process that is not visible from here,
    /// which is unsupported.
    pub fn probe(
        pid: u32,
        pidfd: OwnedFd,
        fence_address: u64,
        nonce: [u8; 16],
    ) -> Result<ProcessVm, ProbeError> {
        if pid == 0 {
            return Err(ProbeError::Unsupported(Errno::SRCH));
        }
        let process = ProcessVm { process: RemoteProcess::new(pid, pidfd), fence_address, nonce };
        let read = process.read_fence();
        if process.process.has_exited() {
            return Err(ProbeError::Gone);
        }
        match read {
            Ok(found) if found.nonce == nonce => Ok(process),
            Ok(_) => Err(ProbeError::WrongNonce),
            Err(errno) => Err(RemoteProcess::explain(errno)),
        }
    }

    /// As [`Self::probe`], of this process. A process may always read itself, so only a missing system call or a seccomp filter
    /// can refuse it. For `kvlane doctor`.
    pub fn probe_own() -> Result<(), ProbeError> {
        let fence = HostFence::new([7; 16]);
        // A kernel without pidfds cannot run the daemon either, which doctor reports elsewhere.
        let Ok(pidfd) = UnixStream::pair().and_then(|(one, _other)| peer_pidfd(&one)) else { return Ok(()) };
        Self::probe(std::process::id(), pidfd, fence.address(), fence.nonce()).map(drop)
    }

    /// The worker's process id, as this process sees it.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// The process's pidfd, which turns readable when it exits.
    pub fn pidfd(&self) -> &OwnedFd {
        self.process.pidfd()
    }

    /// The fence's epoch. Fails if the process is not the one that was probed.
    pub fn fence(&self) -> Result<u64, CopyError> {
        match self.read_fence() {
            Ok(found) if found.nonce == self.nonce && !self.process.has_exited() => Ok(found.epoch),
            Ok(_) => Err(CopyError::Gone { pid: self.pid() }),
            Err(errno) => Err(self.failed(self.fence_address, errno)),
        }
    }

    /// Copies from the engine into the pool, for a request made at `epoch`. The copy is made in bounded batches, with a check of
    /// the fence before the first and after each. On success the engine was at that epoch after the last byte was read. So it
    /// had not reused the blocks, and the bytes are right.
    ///
    /// # Errors
    /// [`CopyError`]; then what the pool holds there is undefined.
    pub fn copy_out(&self, runs: &Runs, epoch: u64) -> Result<(), CopyError> {
        let (pool_base, runs) = (runs.pool().base(), runs.as_slice());
        let check = || match self.fence()? {
            found if found == epoch => Ok(()),
            found => Err(CopyError::Cancelled { asked: epoch, found }),
        };
        let mut cursor = Cursor::default();
        let mut local = Vec::with_capacity(RANGES_MAX.min(runs.len()));
        let mut remote = Vec::with_capacity(RANGES_MAX.min(runs.len()));
        check()?;
        while let Some(address) = cursor.address(runs) {
            cursor.fill(runs, pool_base, &mut local, &mut remote);
            // SAFETY: the local ranges are parts of the runs, which lie inside the pool.
            let copied = unsafe { self.process.read(&local, &remote) };
            match copied {
                Ok(0) => return Err(self.failed(address, Errno::FAULT)),
                Ok(copied) => cursor.advance(runs, copied),
                Err(errno) => return Err(self.failed(address, errno)),
            }
            // The fence must not be read before the bytes that it vouches for.
            fence(Ordering::SeqCst);
            check()?;
        }
        Ok(())
    }

    fn read_fence(&self) -> Result<FenceValue, Errno> {
        let mut bytes = [0u8; FENCE_BYTES];
        let local = [range(bytes.as_mut_ptr(), FENCE_BYTES)];
        let remote = [range(std::ptr::without_provenance_mut(self.fence_address as usize), FENCE_BYTES)];
        // SAFETY: the local range is `bytes`, which nothing else touches.
        let copied = unsafe { self.process.read(&local, &remote)? };
        if copied != FENCE_BYTES as u64 {
            return Err(Errno::FAULT);
        }
        Ok(FenceValue::from_bytes(bytes))
    }

    fn failed(&self, address: u64, errno: Errno) -> CopyError {
        if errno == Errno::SRCH || self.process.has_exited() {
            CopyError::Gone { pid: self.pid() }
        } else {
            CopyError::Refused { pid: self.pid(), address, errno }
        }
    }
}

fn range(start: *mut u8, bytes: usize) -> libc::iovec {
    libc::iovec { iov_base: start.cast(), iov_len: bytes }
}

/// A position in a list of runs.
#[derive(Default)]
struct Cursor {
    /// Runs before this one are copied.
    run: usize,
    /// Bytes of that run that are copied; less than its length.
    done: u64,
}

impl Cursor {
    /// Engine address of the next byte; None at the end.
    fn address(&self, runs: &[Run]) -> Option<u64> {
        runs.get(self.run).map(|run| run.engine_addr + self.done)
    }

    /// Fills in the next batch, of at most [`BATCH_BYTES`] and [`RANGES_MAX`].
    fn fill(
        &self,
        runs: &[Run],
        pool_base: *mut u8,
        local: &mut Vec<libc::iovec>,
        remote: &mut Vec<libc::iovec>,
    ) {
        local.clear();
        remote.clear();
        let mut room = BATCH_BYTES;
        let mut done = self.done;
        let mut local_end = None;
        for run in runs[self.run..].iter().take(RANGES_MAX) {
            if room == 0 {
                break;
            }
            let bytes = (run.len - done).min(room);
            let pool_offset = run.pool_offset.0 + done;
            remote.push(range(
                std::ptr::without_provenance_mut((run.engine_addr + done) as usize),
                bytes as usize,
            ));
            // Pieces of a block that are scattered in the engine are adjacent in the pool.
            match local.last_mut() {
                Some(last) if local_end == Some(pool_offset) => last.iov_len += bytes as usize,
                _ => local.push(range(pool_base.wrapping_add(pool_offset as usize), bytes as usize)),
            }
            local_end = Some(pool_offset + bytes);
            room -= bytes;
            done = 0;
        }
    }

    fn advance(&mut self, runs: &[Run], copied: u64) {
        self.done += copied;
        while let Some(run) = runs.get(self.run)
            && self.done >= run.len
        {
            self.done -= run.len;
            self.run += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use kvlane_block::PoolOffset;

    use super::*;

    fn run(engine_addr: u64, pool_offset: u64, len: u64) -> Run {
        Run { engine_addr, pool_offset: PoolOffset(pool_offset), len }
    }

    /// Every batch of a list of runs, as (engine address, length) and the number of local ranges, when each call
    /// moves at most `most` bytes.
    fn batches(runs: &[Run], most: u64) -> Vec<(Vec<(u64, u64)>, usize)> {
        let (mut cursor, mut local, mut remote) = (Cursor::default(), Vec::new(), Vec::new());
        let mut all = Vec::new();
        while cursor.address(runs).is_some() {
            cursor.fill(runs, std::ptr::null_mut(), &mut local, &mut remote);
            let sum = |ranges: &[libc::iovec]| ranges.iter().map(|range| range.iov_len as u64).sum::<u64>();
            assert_eq!(sum(&local), sum(&remote));
            assert!(sum(&local) <= BATCH_BYTES && remote.len() <= RANGES_MAX);
            let ranges = remote.iter().map(|range| (range.iov_base.addr() as u64, range.iov_len as u64));
            all.push((ranges.collect(), local.len()));
            cursor.advance(runs, sum(&local).min(most));
        }
        all
    }

    #[test]
    fn long_runs_are_cut_and_many_are_bundled() {
        let long = [run(0, 0, BATCH_BYTES + 10), run(1 << 40, 1 << 30, 5)];
        let expected = [(vec![(0, BATCH_BYTES)], 1), (vec![(BATCH_BYTES, 10), (1 << 40, 5)], 2)];
        assert_eq!(batches(&long, u64::MAX), expected);

        let many: Vec<Run> = (0..2000).map(|i| run(i * 100, i * 10, 10)).collect();
        let sizes: Vec<_> =
            batches(&many, u64::MAX).iter().map(|(ranges, locals)| (ranges.len(), *locals)).collect();
        assert_eq!(sizes, [(1024, 1), (976, 1)]);
    }

    #[test]
    fn after_a_partial_transfer_the_rest_is_asked_for() {
        let runs = [run(0, 0, 10), run(100, 50, 10)];
        let asked: Vec<_> = batches(&runs, 13).into_iter().map(|(ranges, _)| ranges).collect();
        assert_eq!(asked, [vec![(0, 10), (100, 10)], vec![(103, 7)]]);
    }
}
