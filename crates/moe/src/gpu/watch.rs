//! [`Watch`]: a thread that tells the kernels of a rank which peers are gone, and the peers that this rank has failed.
//!
//! ```text
//!   a peer's process ends, or it leaves --> its bit in pinned memory --> a kernel that waits for it ends
//!   a kernel notes a failure -----------> pinned memory --> this rank leaves --> its peers' threads see that
//! ```

#![allow(unsafe_code, reason = "words of pinned memory that kernels write")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use kvlane_gpu::{Gpu, HostBuffer};
use kvlane_memory::pidfd_exited;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::heap::{Heap, Peers};
use crate::{MoeError, Phase, RowLayout, Shape};

/// The longest that a peer that leaves, or a failure of this rank, is not seen. A process that ends wakes the thread at once.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };

/// Pinned memory, as kernels/parameters.cuh declares it.
#[repr(C)]
#[derive(Debug)]
struct Control {
    gone: AtomicU64,
    failure: AtomicU64,
    rank: AtomicU32,
    waited: AtomicU32,
    value: AtomicU64,
    refused: AtomicU64,
}
const _: () = assert!(size_of::<Control>() == 40);

/// Why a kernel failed: kernels/parameters.cuh, `Failure`.
mod failure {
    pub(super) const GONE: u64 = 1;
    pub(super) const TIMED_OUT: u64 = 2;
    pub(super) const OUT_OF_STEP: u64 = 3;
    pub(super) const NONSENSE: u64 = 4;
    pub(super) const BAD_EXPERT: u64 = 5;
}

#[derive(Debug)]
pub(super) struct Watch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    own: Heap,
    peers: Peers,
    control: HostBuffer,
    timeout: Duration,
    /// Number of experts, and room for rows, for the words of an error.
    experts: usize,
    layout: RowLayout,
    capacity: usize,
    /// Why each peer is gone.
    gone: Mutex<Vec<Option<Gone>>>,
    failed: Mutex<Option<MoeError>>,
    closing: AtomicBool,
}

#[derive(Debug, Clone, Copy)]
enum Gone {
    /// Its process has ended.
    Ended,
    /// It has left, because of that rank.
    Left(Option<usize>),
}

impl Watch {
    /// Starts the thread.
    pub(super) fn start(
        gpu: &Gpu,
        own: Heap,
        peers: Peers,
        timeout: Duration,
        shape: &Shape,
        capacity: usize,
    ) -> Result<Watch, MoeError> {
        let control = HostBuffer::new(gpu, size_of::<Control>() as u64).map_err(MoeError::of_gpu)?;
        // SAFETY: the buffer is this large, page-aligned, and no kernel knows it yet.
        unsafe { control.as_ptr().write_bytes(0, size_of::<Control>()) };
        let gone = Mutex::new(vec![None; peers.len()]);
        let shared = Arc::new(Shared {
            own,
            peers,
            control,
            timeout,
            experts: shape.experts,
            layout: shape.layout,
            capacity,
            gone,
            failed: Mutex::default(),
            closing: AtomicBool::new(false),
        });
        let watched = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("kvlane-moe".into())
            .spawn(move || watched.run())
            .map_err(|error| MoeError::NotJoined(format!("cannot start the thread kvlane-moe: {error}")))?;
        Ok(Watch { shared, thread: Some(thread) })
    }

    /// Address of the pinned memory, for kernels.
    pub(super) fn address(&self) -> u64 {
        self.shared.control.address()
    }

    /// # Errors
    /// Why this rank has failed.
    pub(super) fn check(&self) -> Result<(), MoeError> {
        self.shared.note_failure();
        self.shared.failed.lock().clone().map_or(Ok(()), Err)
    }

    /// # Errors
    /// The last refusal of a dispatch that kernels have met since this was asked.
    pub(super) fn refused(&self) -> Result<(), MoeError> {
        let refused = self.shared.control().refused.swap(0, Ordering::Acquire);
        if refused == 0 {
            return Ok(());
        }
        let (rank, needed) = (refused as u32 as usize >> 1, (refused >> 32) as u32);
        Err(match self.shared.layout {
            RowLayout::Masked { capacity } => MoeError::OverCapacity { rank, needed, capacity },
            _ => MoeError::TooManyRows { rank, needed: needed as usize, capacity: self.shared.capacity },
        })
    }

    /// This rank takes no part any more, for that reason.
    pub(super) fn fail(&self, error: MoeError) -> MoeError {
        self.shared.fail(error)
    }

    /// Takes no part any more: no kernel waits for anybody, and nobody for this rank.
    pub(super) fn end_waits(&self) {
        self.shared.closing.store(true, Ordering::Release);
        self.shared.control().gone.store(u64::MAX, Ordering::Release);
        if self.shared.failed.lock().is_none() {
            self.shared.own.leave(None);
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.end_waits();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            // A thread of ours that panicked is a bug, which its own message has told.
            debug_assert!(false, "the thread kvlane-moe panicked");
        }
    }
}

impl Shared {
    fn control(&self) -> &Control {
        // SAFETY: the buffer was made for one, is zeroed and lives as long as self. All access is atomic, on both sides.
        unsafe { &*self.control.as_ptr().cast::<Control>() }
    }

    fn run(&self) {
        while !self.closing.load(Ordering::Acquire) {
            self.note_failure();
            let mut living = Vec::new();
            for (rank, (heap, process)) in self.others() {
                if self.gone.lock()[rank].is_some() {
                    continue;
                }
                let gone = match heap.left() {
                    Some(because) => Gone::Left(because.filter(|rank| *rank < self.peers.len())),
                    None if pidfd_exited(process) => Gone::Ended,
                    None => {
                        living.push(process);
                        continue;
                    }
                };
                self.gone.lock()[rank] = Some(gone);
                // After the reason, which the failure of a kernel asks for.
                self.control().gone.fetch_or(1 << rank, Ordering::Release);
            }
            let mut polled: Vec<PollFd<'_>> =
                living.iter().map(|process| PollFd::new(*process, PollFlags::IN)).collect();
            // Interrupted or not: the next look is due.
            let _ = poll(&mut polled, Some(&LOOK));
        }
    }

    fn others(&self) -> impl Iterator<Item = (usize, &(Heap, std::os::fd::OwnedFd))> {
        self.peers.iter().enumerate().filter_map(|(rank, peer)| peer.as_ref().map(|peer| (rank, peer)))
    }

    /// Fails if a kernel has noted why.
    fn note_failure(&self) {
        let control = self.control();
        let failure = control.failure.load(Ordering::Acquire);
        if failure == 0 || self.failed.lock().is_some() {
            return;
        }
        let rank = control.rank.load(Ordering::Relaxed) as usize;
        let phase = match control.waited.load(Ordering::Relaxed) {
            0 => Phase::Counts,
            1 => Phase::Rows,
            _ => Phase::Sums,
        };
        let value = control.value.load(Ordering::Relaxed);
        let error = match failure {
            failure::GONE => match self.gone.lock().get(rank).copied().flatten() {
                Some(Gone::Ended) => MoeError::PeerLost { rank, phase },
                Some(Gone::Left(because)) => MoeError::PeerLeft { rank, phase, because },
                None => MoeError::GivenUp,
            },
            failure::TIMED_OUT => MoeError::TimedOut { rank, phase, waited: self.timeout },
            failure::OUT_OF_STEP => MoeError::OutOfStep { rank },
            failure::BAD_EXPERT => {
                let (token, k) = (rank, control.waited.load(Ordering::Relaxed) as usize);
                MoeError::BadExpert { token, k, expert: value as i64, experts: self.experts }
            }
            failure::NONSENSE => {
                let what = if phase == Phase::Counts { "counts" } else { "rows" };
                MoeError::Nonsense { rank, what }
            }
            _ => MoeError::Nonsense { rank, what: "a failure" },
        };
        self.fail(error);
    }

    fn fail(&self, error: MoeError) -> MoeError {
        let mut failed = self.failed.lock();
        if failed.is_none() {
            self.own.leave(error.because());
            // A graph that is replayed still launches kernels.
            self.control().gone.store(u64::MAX, Ordering::Release);
            *failed = Some(error.clone());
        }
        error
    }
}
