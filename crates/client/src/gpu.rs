//! A worker whose blocks lie on a GPU: what it shares with the daemon, and its own copies without the daemon.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use bytes::Bytes;
use kvlane_block::{Region, Run};
use kvlane_gpu::{Copy, DeviceMemory, Event, EventScope, Export, Gpu, GpuError, Priority, Stream};
use kvlane_proto::v1;
use parking_lot::Mutex;

/// Copies that may be under way: each holds an event.
const EVENTS: u32 = 256;
/// Smaller ones may share a page of the driver with memory of the engine, which the daemon has no business with.
const FENCE_ALLOCATION: u64 = 2 << 20;
const EPOCH_OFFSET: u64 = 16;

/// What a worker shares of its GPU. See `Fence` for the words.
#[derive(Debug)]
pub struct WorkerGpu {
    gpu: Gpu,
    exports: Vec<Export>,
    fence: DeviceMemory,
    fence_export: Export,
    events: Vec<Event>,
    event_handles: Vec<[u8; 64]>,
    free_events: Mutex<Vec<u32>>,
    /// For copies of our own.
    stream: Stream,
}

impl WorkerGpu {
    /// Exports the allocations that the regions lie in.
    ///
    /// # Errors
    /// No driver, no such device, or memory that cannot be shared between processes.
    pub fn new(device_uuid: [u8; 16], regions: &[Region]) -> Result<Self, GpuError> {
        let driver = kvlane_gpu::detect().map_err(|reason| GpuError::Invalid(reason.to_string()))?;
        Self::with_driver(driver, device_uuid, regions)
    }

    /// As [`new`](Self::new), with a driver.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn with_driver(
        driver: Arc<dyn kvlane_gpu::Driver>,
        device_uuid: [u8; 16],
        regions: &[Region],
    ) -> Result<Self, GpuError> {
        let gpu = Gpu::open_uuid(driver, device_uuid)?;
        let mut exports: Vec<Export> = Vec::new();
        for region in regions {
            let known = |export: &Export| (export.base..export.base + export.bytes).contains(&region.base);
            if !exports.iter().any(known) {
                exports.push(gpu.export(region.base)?);
            }
        }
        let fence = gpu.alloc(FENCE_ALLOCATION)?;
        let fence_export = gpu.export(fence.address())?;
        let events: Vec<Event> =
            (0..EVENTS).map(|_| Event::new(&gpu, EventScope::Host)).collect::<Result<_, _>>()?;
        let event_handles = events.iter().map(Event::export).collect::<Result<_, _>>()?;
        let stream = Stream::new(&gpu, Priority::High)?;
        let free_events = Mutex::new((0..EVENTS).rev().collect());
        Ok(Self { gpu, exports, fence, fence_export, events, event_handles, free_events, stream })
    }

    /// The device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Records what `stream` has been given so far. None when all events are in use: then it has waited for it.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// `stream` is a live stream of this device in this process, or 0 for its default stream.
    pub(crate) unsafe fn record(&self, stream: u64) -> Result<Option<u32>, GpuError> {
        let free = self.free_events.lock().pop();
        let Some(index) = free else {
            let (driver, device) = self.gpu.raw();
            // SAFETY: the caller's promise.
            unsafe { driver.stream_synchronize(device, stream)? };
            return Ok(None);
        };
        // SAFETY: the caller's promise.
        let recorded = unsafe { self.events[index as usize].record_raw(stream) };
        if recorded.is_err() {
            self.give_back(index);
        }
        recorded.map(|()| Some(index))
    }

    /// The copy that waited for the event is over.
    pub(crate) fn give_back(&self, event: u32) {
        self.free_events.lock().push(event);
    }

    /// Writes the fence's words where the daemon's GPU reads them; when it returns they hold.
    pub(crate) fn write_fence(&self, nonce: &[u8; 16], epoch: &AtomicU64) {
        let epoch = epoch.load(Ordering::SeqCst).to_le_bytes();
        let write = |offset: u64, bytes: &[u8]| {
            let src = bytes.as_ptr().expose_provenance() as u64;
            let copy = Copy { dst: self.fence.address() + offset, src, len: bytes.len() as u64 };
            // SAFETY: both sides live until the stream is synchronized below.
            unsafe { self.stream.copy(copy) }
        };
        let written = write(0, nonce)
            .and_then(|()| write(EPOCH_OFFSET, &epoch))
            .and_then(|()| self.stream.synchronize());
        if let Err(error) = written {
            // The context is lost, and with it all that the daemon could still read.
            tracing::warn!(%error, "the fence in GPU memory could not be written");
        }
    }

    /// Copies runs from host memory after `event`, without the daemon.
    ///
    /// # Safety
    /// As for [`kvlane_memory::EngineMemory::write`], with addresses of this GPU.
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
            let copy = Copy { dst: run.engine_addr, src: base + run.pool_offset, len: run.len };
            // SAFETY: the caller's promise; the stream is synchronized below, also after an error.
            unsafe { self.stream.copy(copy) }
        };
        let enqueued = runs.iter().try_for_each(enqueue);
        self.stream.synchronize()?;
        enqueued
    }

    pub(crate) fn to_wire(&self) -> v1::WorkerGpu {
        v1::WorkerGpu {
            device_uuid: Bytes::copy_from_slice(&self.gpu.info().uuid),
            allocations: self.exports.iter().map(allocation).collect(),
            fence: Some(allocation(&self.fence_export)),
            events: self.event_handles.iter().map(|handle| Bytes::copy_from_slice(handle)).collect(),
        }
    }
}

fn allocation(export: &Export) -> v1::GpuAllocation {
    v1::GpuAllocation {
        base: export.base,
        bytes: export.bytes,
        handle: Bytes::copy_from_slice(&export.handle),
    }
}
