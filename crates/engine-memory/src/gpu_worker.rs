//! The worker's side of its GPU: exports memory to the daemon, holds fence, flags and events, and copies without the daemon.
#![expect(unsafe_code, reason = "copies, words and streams in GPU memory")]

use std::{ops::Range, os::fd::OwnedFd, sync::Arc};

use kvlane_block::{Region, Run};
use kvlane_gpu::{
    ChunkRange, Copy, DeviceMemory, EngineStream, Event, EventScope, Export, Gpu, GpuError, Priority, Stream,
};
use kvlane_memory::DESCRIPTORS_MAX;
use parking_lot::Mutex;

use crate::exported::{Allocation, ChunkShare, Exported};
use crate::fence::{EPOCH_OFFSET, FenceValue};
use crate::flags::{EVENTS, FLAGS_END, FLAGS_OFFSET, Flags};

/// Size of the allocation with fence and flags. A smaller one may share a driver page with the engine's own memory, and the
/// export would give that to the daemon, too.
const FENCE_ALLOCATION: u64 = 2 << 20;
const _: () = assert!(FLAGS_END <= FENCE_ALLOCATION);

/// A worker's GPU. The engine's threads use it too, for events, flags and streams. The diagram in lib.rs shows fence and flags.
#[derive(Debug)]
pub struct WorkerGpu {
    gpu: Gpu,
    exports: Vec<Export>,
    /// Shared chunk by chunk at every registration, because the descriptors are not kept.
    chunk_ranges: Vec<ChunkRange>,
    fence: DeviceMemory,
    fence_export: Export,
    events: Vec<Event>,
    event_handles: Vec<[u8; 64]>,
    free_events: Mutex<Vec<u32>>,
    /// For this process's own copies, and for fence and flags.
    stream: Stream,
}

impl WorkerGpu {
    /// Exports the allocations that hold the regions.
    ///
    /// # Errors
    /// There is no such device, or its memory cannot be shared between processes.
    pub fn with_driver(
        driver: Arc<dyn kvlane_gpu::Driver>,
        device_uuid: [u8; 16],
        regions: &[Region],
    ) -> Result<Self, GpuError> {
        let gpu = Gpu::open_uuid(driver, device_uuid)?;
        let mut exports: Vec<Export> = Vec::new();
        let mut chunked = Vec::new();
        for region in regions {
            let known = |export: &Export| (export.base..export.base + export.bytes).contains(&region.base);
            if exports.iter().any(known) {
                continue;
            }
            if gpu.is_chunked(region.base)? {
                let bytes = region.span_bytes();
                let wrong = || GpuError::Invalid(format!("a region at {:#x} has no end", region.base));
                chunked.push((region.base, bytes.ok_or_else(wrong)?));
            } else {
                exports.push(gpu.export(region.base)?);
            }
        }
        let chunk_ranges = gpu.chunk_ranges(&chunked)?;
        for range in &chunk_ranges {
            // Fails now if such memory cannot be shared, instead of at the first registration.
            gpu.export_chunk(range.base)?;
        }
        let fence = gpu.alloc(FENCE_ALLOCATION)?;
        let fence_export = gpu.export(fence.address())?;
        let events: Vec<Event> =
            (0..EVENTS).map(|_| Event::new(&gpu, EventScope::Host)).collect::<Result<_, _>>()?;
        let event_handles = events.iter().map(Event::export).collect::<Result<_, _>>()?;
        let stream = Stream::new(&gpu, Priority::High)?;
        let zeros = vec![0u8; FLAGS_END as usize];
        let src = zeros.as_ptr().expose_provenance() as u64;
        // SAFETY: both sides live until the stream is synchronized.
        unsafe { stream.copy(Copy { dst: fence.address(), src, len: zeros.len() as u64 })? };
        stream.synchronize()?;
        let free_events = Mutex::new((0..EVENTS).rev().collect());
        Ok(Self {
            gpu,
            exports,
            chunk_ranges,
            fence,
            fence_export,
            events,
            event_handles,
            free_events,
            stream,
        })
    }

    /// Address of the first flag of event 0. The link that requests loads owns the flags, and takes this once.
    pub fn first_flag(&self) -> u64 {
        self.fence.address() + FLAGS_OFFSET
    }

    /// Makes later work of `stream` wait until this region of a group has arrived; None is all of the load. A load without
    /// blocks of the group is not waited for.
    ///
    /// # Errors
    /// From the driver.
    ///
    /// # Panics
    /// If the flags are another worker's.
    pub fn hold_up(
        &self,
        stream: &EngineStream,
        flags: &Flags,
        region: Option<(u32, u32)>,
    ) -> Result<(), GpuError> {
        let word = match region {
            Some((group, region)) => flags.word_of(group, region),
            None => Some(flags.last_word()),
        };
        let Some(word) = word.map(|word| self.own_word(word)) else { return Ok(()) };
        let (driver, device) = self.gpu.raw();
        // SAFETY: the stream lives; the word is ours and lives as long as this.
        unsafe { driver.wait_word(device, stream.raw(), word, flags.value) }
    }

    /// The word, checked to be a flag of this worker.
    fn own_word(&self, word: u64) -> u64 {
        let first = self.first_flag();
        let end = self.fence.address() + FLAGS_END;
        assert!(
            (first..end).contains(&word) && word.is_multiple_of(4),
            "{word:#x} is no flag of this worker"
        );
        word
    }

    /// Writes all flags of a load, in stream order after this process's own copies.
    ///
    /// # Panics
    /// If the flags are another worker's.
    pub fn write_flags(&self, flags: &Flags) {
        // SAFETY: the word is ours, and lives as long as this.
        let write = |word| unsafe { self.stream.write_word(self.own_word(word), flags.value) };
        let written = flags.words().try_for_each(write).and_then(|()| self.stream.synchronize());
        if let Err(error) = written {
            // Then the context is lost, and no stream waits any more.
            // Log: the worker's GPU is lost to this process, so a load could not be ended on it. Do: look for
            // CUDA errors in the engine's log and Xid in dmesg, then restart the engine.
            tracing::warn!(%error, "cannot write the flags of a load");
        }
    }

    /// The device that holds the blocks.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Records an event after the work enqueued on `stream` so far, and returns its index. None if all events are in use: then
    /// this has waited for the work.
    ///
    /// # Errors
    /// From the driver.
    pub fn after(&self, stream: &EngineStream) -> Result<Option<u32>, GpuError> {
        let free = self.free_events.lock().pop();
        let Some(index) = free else {
            let (driver, device) = self.gpu.raw();
            // SAFETY: the stream lives.
            unsafe { driver.stream_synchronize(device, stream.raw())? };
            return Ok(None);
        };
        // SAFETY: the stream lives.
        let recorded = unsafe { self.events[index as usize].record_raw(stream.raw()) };
        if recorded.is_err() {
            self.give_back(index);
        }
        recorded.map(|()| Some(index))
    }

    /// Frees an event, after the copy that waited for it is over.
    pub fn give_back(&self, event: u32) {
        self.free_events.lock().push(event);
    }

    /// Writes the fence in GPU memory, where the daemon's GPU reads it. It is written when this returns.
    pub(crate) fn write_fence(&self, value: FenceValue) {
        let bytes = value.to_bytes();
        let (nonce, epoch) = bytes.split_at(EPOCH_OFFSET);
        let write = |offset: usize, bytes: &[u8]| {
            let src = bytes.as_ptr().expose_provenance() as u64;
            let copy = Copy { dst: self.fence.address() + offset as u64, src, len: bytes.len() as u64 };
            // SAFETY: both sides live until the stream is synchronized below.
            unsafe { self.stream.copy(copy) }
        };
        let written = write(0, nonce)
            .and_then(|()| write(EPOCH_OFFSET, epoch))
            .and_then(|()| self.stream.synchronize());
        if let Err(error) = written {
            // Then the context is lost, and with it all memory that the daemon could still read.
            // Log: the worker's GPU is lost to this process, so the daemon cannot see there that saves were given
            // up. Do: look for CUDA errors in the engine's log and Xid in dmesg, then restart the engine.
            tracing::warn!(%error, "cannot write the fence in GPU memory");
        }
    }

    /// Copies runs from host memory after `event`, without the daemon.
    ///
    /// # Safety
    /// As for [`crate::own_copies::OwnMemory::write`], with addresses of this GPU.
    pub(crate) unsafe fn write(
        &self,
        runs: &[Run],
        base: *const u8,
        event: Option<u32>,
    ) -> Result<(), GpuError> {
        let base = base.expose_provenance() as u64;
        if let Some(event) = event {
            self.stream.wait(&self.events[event as usize])?;
        }
        let enqueue = |run: &Run| {
            let copy = Copy { dst: run.engine_addr, src: base + run.pool_offset.0, len: run.len };
            // SAFETY: the caller's promise; the stream is synchronized below, also after an error.
            unsafe { self.stream.copy(copy) }
        };
        let enqueued = runs.iter().try_for_each(enqueue);
        self.stream.synchronize()?;
        enqueued
    }

    /// The chunks to share before registering, in batches of as many descriptors as one message takes.
    pub fn chunk_batches(&self) -> Vec<ChunkBatch> {
        let batches = |(range, ChunkRange { chunks, .. }): (usize, &ChunkRange)| {
            let starts = (0..chunks.len()).step_by(DESCRIPTORS_MAX);
            let batch = |start| start..chunks.len().min(start + DESCRIPTORS_MAX);
            starts.map(|start| ChunkBatch { range, chunks: batch(start) }).collect::<Vec<_>>()
        };
        self.chunk_ranges.iter().enumerate().flat_map(batches).collect()
    }

    /// The message that shares a batch, and the descriptors that travel with it.
    ///
    /// # Errors
    /// As for [`Gpu::export_chunk`].
    pub fn share(&self, batch: &ChunkBatch) -> Result<(ChunkShare, Vec<OwnedFd>), GpuError> {
        let range = &self.chunk_ranges[batch.range];
        let mut address = range.base + range.chunks[..batch.chunks.start].iter().sum::<u64>();
        let mut descriptors = Vec::with_capacity(batch.chunks.len());
        for bytes in &range.chunks[batch.chunks.clone()] {
            descriptors.push(self.gpu.export_chunk(address)?);
            address += bytes;
        }
        let share = ChunkShare {
            device_uuid: self.gpu.info().uuid,
            base: range.base,
            bytes: range.bytes(),
            chunk_bytes: range.chunks[batch.chunks.clone()].to_vec(),
        };
        Ok((share, descriptors))
    }

    /// The memory and events that the daemon maps.
    pub fn exported(&self) -> Exported {
        let chunked =
            |range: &ChunkRange| Allocation { base: range.base, bytes: range.bytes(), handle: None };
        let exported = self.exports.iter().map(allocation);
        Exported {
            device_uuid: self.gpu.info().uuid,
            allocations: exported.chain(self.chunk_ranges.iter().map(chunked)).collect(),
            fence: allocation(&self.fence_export),
            events: self.event_handles.clone(),
        }
    }
}

/// Chunks of one range that one message shares.
#[derive(Debug)]
pub struct ChunkBatch {
    range: usize,
    chunks: Range<usize>,
}

fn allocation(export: &Export) -> Allocation {
    Allocation { base: export.base, bytes: export.bytes, handle: Some(export.handle) }
}
