//! Copies memory of peers into memory of this process's GPUs, in streams of its own.
//!
//! ```text
//!  begin: cut into parts --> waiting --> job: enqueue --> running --> stream idle --> ended, taken by take_ended
//!                                                            | the driver failed: a job waits for the stream, then ended
//! ```
//! Each part has a stream for itself, so an error ends the copy whose bytes it moved, and no other. Streams are made when they
//! are needed, and kept. A stream that failed is dropped once nothing runs in it any more.
//!
//! Parts of long runs, and of few, go side by side, by copy engines. Parts of many short runs go by the copy kernel, two at a
//! time: a stream waits in the GPU for the kernel before the last. So few multiprocessors are taken from the engines' own
//! kernels, and the link has no gap between two kernels.

#![allow(unsafe_code, reason = "GPUs read and write registered memory")]

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvlane_block::merge;
use kvlane_gpu::{
    Copier, CopierOptions, Copy, Direction, Event, EventScope, Gpu, GpuError, Priority, Stream, Thresholds,
};
use parking_lot::Mutex;

use crate::carrier::Job;
use crate::numbered::Numbered;
use crate::ranges::{Piece, Spot, Spots};

/// Streams on each GPU. They bound the bytes in flight: a part is never longer than a post.
const STREAMS_MAX: usize = 8;
/// A list of long runs is cut into parts of about this many bytes, because one stream does not fill the link: with runs of 1 MiB
/// between two H200s one stream moves 0.84 of the contiguous copy, two 0.91, four 0.94.
const PART_BYTES: u64 = 8 << 20;
/// Most parts of a copy.
const PARTS_MAX: usize = 4;
/// Kernels that run at the same time.
const KERNELS: usize = 2;
/// Thread blocks of a copy kernel between two GPUs. Pieces of 64 KiB between two H200s: 8 blocks 332 GB/s, 16 369, 132 372. More
/// would take multiprocessors from the engines' own kernels.
const LINK_BLOCKS: u32 = 8;
/// Thread blocks within one GPU, where more are faster. Pieces of 64 KiB on an H200: 16 blocks 753 GB/s, 32 1,457, 132 1,868.
const OWN_BLOCKS: u32 = 64;
/// Fewer runs go by copy engines: a kernel has one block for each, and one block moves 64 KiB in 70 us.
const KERNEL_RUNS_MIN: usize = 24;
/// Within one GPU, runs below this are left to the copy kernel: the batch call takes 4.6 us for each.
const OWN_ENGINE_BYTES: u64 = 8 << 20;

/// Names a copy. Never reused within a process.
pub(super) type CopyId = u64;

/// The copies of one engine.
#[derive(Debug, Default)]
pub(super) struct GpuCopies {
    gpus: Numbered<u16, Streams>,
    copies: Numbered<CopyId, GpuCopy>,
    waiting: VecDeque<Enqueue>,
    running: Vec<Running>,
    draining: Vec<Draining>,
    /// Streams of failed parts that a job is to wait for.
    drains: Vec<Drain>,
    jobs: usize,
    ended: Vec<(CopyId, Result<(), GpuError>)>,
    next: CopyId,
}

/// The streams of a GPU.
#[derive(Debug)]
struct Streams {
    gpu: Gpu,
    free: Vec<CopyStream>,
    made: usize,
    kernels: Arc<Mutex<VecDeque<Arc<Event>>>>,
}

/// A stream, and the event that stands for the kernel that was enqueued in it last.
#[derive(Debug)]
struct CopyStream {
    copier: Copier,
    kernel: Arc<Event>,
}

impl CopyStream {
    fn new(gpu: &Gpu) -> Result<CopyStream, GpuError> {
        let stream = Arc::new(Stream::new(gpu, Priority::Normal)?);
        let copier = Copier::new(stream, CopierOptions::default())?;
        Ok(CopyStream { copier, kernel: Arc::new(Event::new(gpu, EventScope::Process)?) })
    }
}

#[derive(Debug)]
struct GpuCopy {
    /// All that it writes, on this GPU.
    copies: Vec<Copy>,
    gpu: u16,
    parts: usize,
    failed: Option<GpuError>,
}

/// A part in a stream.
#[derive(Debug)]
struct Running {
    copy: CopyId,
    gpu: u16,
    stream: CopyStream,
    is_kernel: bool,
}

/// A part that failed. Others of its copies may still run until the stream was waited for.
#[derive(Debug)]
struct Draining {
    copy: CopyId,
    gpu: u16,
    is_over: Arc<AtomicBool>,
}

/// A job: enqueues a part.
#[derive(Debug)]
pub(super) struct Enqueue {
    copy: CopyId,
    number: u16,
    gpu: Gpu,
    /// None: the job makes one.
    stream: Option<CopyStream>,
    copies: Vec<Copy>,
    within: Within,
    /// The last [`KERNELS`] that were enqueued on this GPU.
    kernels: Arc<Mutex<VecDeque<Arc<Event>>>>,
    is_kernel: bool,
    failed: Option<GpuError>,
}

/// The memory between which bytes move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Within {
    /// Both on one GPU.
    OneGpu,
    /// From another GPU.
    TwoGpus,
}

/// A job: waits until a stream in which a part failed has nothing left to do.
#[derive(Debug)]
pub(super) struct Drain {
    stream: Arc<Stream>,
    is_over: Arc<AtomicBool>,
    /// Keeps the kernel's tables until then.
    kept: Option<CopyStream>,
}

impl Job for Enqueue {
    fn run(&mut self) {
        crate::audit::takes_time("calls of a GPU's driver");
        if self.stream.is_none() {
            match CopyStream::new(&self.gpu) {
                Ok(stream) => self.stream = Some(stream),
                Err(error) => self.failed = Some(error),
            }
        }
        if self.failed.is_none() {
            self.failed = self.enqueue().err();
        }
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

impl Job for Drain {
    fn run(&mut self) {
        crate::audit::takes_time("a wait for a GPU");
        // The copy has reported this error already.
        let _ = self.stream.synchronize();
        self.kept = None;
        self.is_over.store(true, Ordering::Release);
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

impl Enqueue {
    fn enqueue(&mut self) -> Result<(), GpuError> {
        let Some(CopyStream { copier, kernel }) = &mut self.stream else { return Ok(()) };
        let (mut thresholds, blocks) = self.within.way();
        if self.copies.len() < KERNEL_RUNS_MIN {
            (thresholds.batch_bytes, thresholds.engine_bytes) = (0, 0);
        }
        copier.set_thresholds(thresholds);
        copier.set_peer_blocks(blocks);
        self.is_kernel = copier.may_launch(&self.copies);
        // Held while the part is enqueued, so that each kernel waits for the right one before it.
        let mut kernels = self.is_kernel.then(|| self.kernels.lock());
        if let Some(kernels) = &mut kernels
            && kernels.len() == KERNELS
            && let Some(before) = kernels.pop_front()
        {
            copier.stream().wait(&before)?;
        }
        // SAFETY: the destinations belong to the copy until it has ended, by the promise of `GpuCopies::begin`. The sources are
        // imports that the caller keeps until then. They may be written meanwhile; then the card refuses the bytes.
        unsafe { copier.enqueue(&self.copies, Direction::Peer)? };
        if let Some(kernels) = &mut kernels {
            kernel.record(copier.stream())?;
            kernels.push_back(Arc::clone(kernel));
        }
        Ok(())
    }
}

impl Within {
    /// The lengths from which copy engines copy, and the blocks of the kernel.
    fn way(self) -> (Thresholds, u32) {
        let between = Thresholds::idle(Direction::Peer);
        match self {
            Within::TwoGpus => (between, LINK_BLOCKS),
            Within::OneGpu => {
                let own = OWN_ENGINE_BYTES;
                (Thresholds { batch_bytes: own, engine_bytes: own, ..between }, OWN_BLOCKS)
            }
        }
    }
}

impl GpuCopies {
    /// Whether a copy to this GPU can begin now. If not, it can after one of them has ended.
    pub(super) fn has_room(&self, number: u16) -> bool {
        self.gpus.get(&number).is_none_or(|streams| !streams.free.is_empty() || streams.made < STREAMS_MAX)
    }

    /// Begins a copy to a GPU. Call it only if [`GpuCopies::has_room`].
    ///
    /// # Safety
    /// The destinations are valid for writes and belong to the copy, and the sources stay mapped, until
    /// [`GpuCopies::take_ended`] has returned the copy or `self` was dropped.
    pub(super) unsafe fn begin(
        &mut self,
        number: u16,
        gpu: &Gpu,
        copies: Vec<Copy>,
        within: Within,
    ) -> CopyId {
        let id = self.next;
        self.next += 1;
        let copies = merge(copies);
        let streams = self.gpus.entry(number).or_insert_with(|| Streams {
            gpu: gpu.clone(),
            free: Vec::new(),
            made: 0,
            kernels: Arc::default(),
        });
        let room = streams.free.len() + (STREAMS_MAX - streams.made);
        let parts = split(copies.clone(), room, within.way().0.batch_bytes);
        self.copies.insert(id, GpuCopy { copies, gpu: number, parts: parts.len(), failed: None });
        for copies in parts {
            let stream = streams.free.pop();
            streams.made += usize::from(stream.is_none());
            let (gpu, kernels) = (streams.gpu.clone(), Arc::clone(&streams.kernels));
            let (is_kernel, failed) = (false, None);
            let part = Enqueue { copy: id, number, gpu, stream, copies, within, kernels, is_kernel, failed };
            self.waiting.push_back(part);
        }
        id
    }

    /// Whether any copy has not ended.
    pub(super) fn is_busy(&self) -> bool {
        !self.copies.is_empty() || self.jobs > 0
    }

    /// Whether [`GpuCopies::take_job`] has something.
    pub(super) fn has_job(&self) -> bool {
        !self.waiting.is_empty() || !self.drains.is_empty()
    }

    /// Whether a stream works, so that its end can be seen only by polling.
    pub(super) fn is_running(&self) -> bool {
        !self.running.is_empty() || !self.draining.is_empty()
    }

    pub(super) fn take_job(&mut self) -> Option<Box<dyn Job>> {
        let job: Option<Box<dyn Job>> = match self.drains.pop() {
            Some(drain) => Some(Box::new(drain)),
            None => self.waiting.pop_front().map(|enqueue| Box::new(enqueue) as Box<dyn Job>),
        };
        self.jobs += usize::from(job.is_some());
        job
    }

    /// Takes back a job that has run.
    pub(super) fn put_back(&mut self, job: Box<dyn Any>) {
        self.jobs -= 1;
        let Ok(enqueue) = job.downcast::<Enqueue>() else { return };
        let Enqueue { copy, number: gpu, stream, is_kernel, failed, .. } = *enqueue;
        match (stream, failed) {
            (Some(stream), None) => self.running.push(Running { copy, gpu, stream, is_kernel }),
            (Some(stream), Some(error)) => self.drain(copy, gpu, stream, error),
            (None, failed) => {
                if let Some(streams) = self.gpus.get_mut(&gpu) {
                    streams.made -= 1;
                }
                self.part_over(copy, failed);
            }
        }
    }

    /// Sees which streams are done.
    pub(super) fn poll(&mut self) {
        let (mut index, mut kernels) = (0, 0);
        while let Some(part) = self.running.get(index) {
            // Kernels behind those that run have not begun.
            if part.is_kernel && kernels >= 2 * KERNELS {
                index += 1;
                continue;
            }
            match part.stream.copier.stream().is_idle() {
                Ok(false) => {
                    kernels += usize::from(part.is_kernel);
                    index += 1;
                }
                Ok(true) => {
                    let Running { copy, gpu, stream, .. } = self.running.remove(index);
                    if let Some(streams) = self.gpus.get_mut(&gpu) {
                        streams.free.push(stream);
                    }
                    self.part_over(copy, None);
                }
                Err(error) => {
                    let Running { copy, gpu, stream, .. } = self.running.remove(index);
                    self.drain(copy, gpu, stream, error);
                }
            }
        }
        let is_over = |draining: &Draining| draining.is_over.load(Ordering::Acquire);
        while let Some(index) = self.draining.iter().position(is_over) {
            let Draining { copy, gpu, .. } = self.draining.swap_remove(index);
            if let Some(streams) = self.gpus.get_mut(&gpu) {
                streams.made -= 1;
            }
            self.part_over(copy, None);
        }
    }

    /// Copies that have ended since the last call. Nothing touches their memory any more.
    pub(super) fn take_ended(&mut self) -> Vec<(CopyId, Result<(), GpuError>)> {
        std::mem::take(&mut self.ended)
    }

    /// Whether a copy writes any of this memory.
    pub(super) fn touches(&self, copy: CopyId, memory: Spots<'_>) -> bool {
        let Some(GpuCopy { copies, gpu, .. }) = self.copies.get(&copy) else { return false };
        copies.iter().any(|copy| {
            let piece = Piece { address: copy.dst as usize, len: copy.len as usize };
            memory.overlap(Spot { piece, gpu: Some(*gpu) })
        })
    }

    fn drain(&mut self, copy: CopyId, gpu: u16, failed: CopyStream, error: GpuError) {
        if let Some(copy) = self.copies.get_mut(&copy) {
            copy.failed.get_or_insert(error);
        }
        let (is_over, stream) = (Arc::new(AtomicBool::new(false)), Arc::clone(failed.copier.stream()));
        self.drains.push(Drain { stream, is_over: Arc::clone(&is_over), kept: Some(failed) });
        self.draining.push(Draining { copy, gpu, is_over });
    }

    fn part_over(&mut self, id: CopyId, failed: Option<GpuError>) {
        let Some(copy) = self.copies.get_mut(&id) else { return };
        if let Some(error) = failed {
            copy.failed.get_or_insert(error);
        }
        copy.parts -= 1;
        if copy.parts == 0
            && let Some(copy) = self.copies.remove(&id)
        {
            self.ended.push((id, copy.failed.map_or(Ok(()), Err)));
        }
    }
}

impl Drop for GpuCopies {
    fn drop(&mut self) {
        for part in &self.running {
            crate::audit::takes_time("a wait for a GPU");
            // The copies go, so an error has nowhere to go.
            let _ = part.stream.copier.stream().synchronize();
        }
    }
}

/// Cuts a list of runs into up to `room` parts, if copy engines move them: kernels go one after the other anyway.
fn split(copies: Vec<Copy>, room: usize, engine_bytes: u64) -> Vec<Vec<Copy>> {
    let bytes: u64 = copies.iter().map(|copy| copy.len).sum();
    let is_long = bytes / copies.len().max(1) as u64 >= engine_bytes;
    let wanted = (bytes.div_ceil(PART_BYTES) as usize).clamp(1, PARTS_MAX.min(room).max(1));
    if !is_long || wanted == 1 {
        return vec![copies];
    }
    // Cut at pages, so that the parts stay aligned as the runs are.
    let each = bytes.div_ceil(wanted as u64).next_multiple_of(4096);
    let (mut parts, mut left) = (vec![Vec::new()], each);
    for mut copy in copies {
        while copy.len > left {
            let (dst, src) = (copy.dst, copy.src);
            if let Some(part) = parts.last_mut().filter(|_| left > 0) {
                part.push(Copy { dst, src, len: left });
            }
            copy = Copy { dst: dst + left, src: src + left, len: copy.len - left };
            parts.push(Vec::new());
            left = each;
        }
        left -= copy.len;
        if let Some(part) = parts.last_mut() {
            part.push(copy);
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    proptest! {
        #[test]
        fn parts_are_all_bytes_and_not_more_than_there_is_room_for(
            lens in vec(1..40_000_000u64, 1..40), room in 1..10usize,
        ) {
            let mut at = 0;
            let copies: Vec<Copy> = lens.iter().map(|len| {
                at += len + 4096;
                Copy { dst: at, src: 3 * at, len: *len }
            }).collect();
            let parts = split(copies.clone(), room, MIB);
            prop_assert!(parts.len() <= room.min(PARTS_MAX) && parts.iter().all(|part| !part.is_empty()));
            prop_assert!(parts.iter().flatten().all(|copy| copy.len > 0));
            prop_assert_eq!(merge(parts.into_iter().flatten()), merge(copies));
        }
    }

    #[test]
    fn long_runs_are_shared_evenly_and_short_ones_stay_in_one_stream() {
        let copy = |index: u64, len| Copy { dst: index << 32, src: index << 40, len };
        let long: Vec<Copy> = (0..16).map(|index| copy(index, 2 << 20)).collect();
        let bytes: Vec<u64> =
            split(long, 8, MIB).iter().map(|part| part.iter().map(|copy| copy.len).sum()).collect();
        assert_eq!(bytes, [8 << 20; 4]);
        let short = (0..512).map(|index| copy(index, 64 << 10)).collect();
        assert_eq!(split(short, 8, MIB).len(), 1);
    }
}
