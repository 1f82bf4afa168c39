//! One slot: pinned host memory, and the copies between it and GPUs.

#![allow(unsafe_code, reason = "GPUs read and write registered memory")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use kvlane_block::merge;
use kvlane_gpu::{Copy, Gpu, GpuError, HostBuffer, Priority, Stream};

use crate::ranges::{Piece, Spot};

/// Which way bytes pass, seen from the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From a GPU into a slot.
    Out,
    /// From a slot to a GPU.
    In,
}

/// A range of pinned memory. Its streams are its own, so an error on a stream is an error of this slot's copies.
#[derive(Debug)]
pub(crate) struct Slot {
    /// One per GPU number; created when first needed.
    streams: Vec<(u16, Arc<Stream>)>,
    /// GPUs whose streams have work.
    busy: Vec<u16>,
    failed: Option<GpuError>,
    /// The stream of a failed copy is being drained. True when that is over.
    drained: Option<Arc<AtomicBool>>,
    buffer: SlotBuffer,
}

#[derive(Debug)]
enum SlotBuffer {
    Pinned(HostBuffer),
    /// The driver refused to pin memory. The error is that of every copy; the bytes are where a socket puts them.
    Refused(GpuError, Box<[AtomicU8]>),
}

/// A stream on which a copy failed. Copies that were enqueued behind it may still run.
#[derive(Debug)]
pub(crate) struct Drain {
    stream: Arc<Stream>,
    is_over: Arc<AtomicBool>,
}

impl Drain {
    /// Blocks until the stream is idle.
    pub(super) fn wait(&self) {
        crate::audit::takes_time("a wait for a GPU");
        // The slot has reported this error already.
        let _ = self.stream.synchronize();
        self.is_over.store(true, Ordering::Release);
    }
}

impl Slot {
    /// A slot with a stream on each of these GPUs that works.
    pub(super) fn new(gpus: &[(u16, Gpu)], bytes: u64) -> Result<Slot, GpuError> {
        crate::audit::takes_time("the making of a slot");
        let mut pinned = Err(GpuError::NoSuchDevice("no GPU is registered".into()));
        for (_, gpu) in gpus {
            // Another GPU's context may be lost.
            pinned = HostBuffer::new(gpu, bytes);
            if pinned.is_ok() {
                break;
            }
        }
        let mut slot = Slot::with(SlotBuffer::Pinned(pinned?));
        for (number, gpu) in gpus {
            // The first copy of that GPU reports the error.
            let _ = slot.stream(gpu, *number);
        }
        Ok(slot)
    }

    /// A slot whose copies all fail with this error.
    pub(super) fn refused(error: GpuError, bytes: u64) -> Slot {
        Slot::with(SlotBuffer::Refused(error, (0..bytes).map(|_| AtomicU8::new(0)).collect()))
    }

    fn with(buffer: SlotBuffer) -> Slot {
        Slot { streams: Vec::new(), busy: Vec::new(), failed: None, drained: None, buffer }
    }

    pub(super) fn is_refused(&self) -> bool {
        matches!(self.buffer, SlotBuffer::Refused(..))
    }

    /// Where the socket sends or receives each spot: host memory in place, GPU memory in the slot, packed in order.
    pub(crate) fn host_pieces(&self, spots: &[Spot]) -> Vec<Piece> {
        let mut free = match &self.buffer {
            SlotBuffer::Pinned(buffer) => buffer.address() as usize,
            SlotBuffer::Refused(_, bytes) => bytes.as_ptr().expose_provenance(),
        };
        let host = |spot: &Spot| match spot.gpu {
            None => spot.piece,
            Some(_) => {
                let piece = Piece { address: free, len: spot.piece.len };
                free += piece.len;
                piece
            }
        };
        spots.iter().map(host).collect()
    }

    /// Starts the copies between the slot and the spots that are on GPUs. [`Slot::poll`] reports what the driver refused.
    ///
    /// # Safety
    /// The spots are valid for reads, and for writes if the bytes go in, until [`Slot::poll`] has returned a result.
    /// Dropping the slot waits for them too. Those on GPUs have no more bytes together than the slot.
    pub(crate) unsafe fn start(&mut self, gpus: &[(u16, Gpu)], spots: &[Spot], direction: Direction) {
        debug_assert!(self.busy.is_empty() && self.failed.is_none());
        if let SlotBuffer::Refused(error, _) = &self.buffer {
            self.failed = Some(error.clone());
            return;
        }
        let host_pieces = self.host_pieces(spots);
        for (number, gpu) in gpus {
            let number = *number;
            let of_gpu = spots.iter().zip(&host_pieces).filter(|(spot, _)| spot.gpu == Some(number));
            let copies = merge(of_gpu.map(|(spot, host)| copy_of(spot.piece, *host, direction)));
            if copies.is_empty() {
                continue;
            }
            // SAFETY: the spots are valid by the caller's promise, and the host pieces lie in the buffer.
            let begun = self.stream(gpu, number).and_then(|stream| unsafe { enqueue(stream, &copies) });
            self.busy.push(number);
            if let Err(error) = begun {
                self.failed = Some(error);
                return;
            }
        }
    }

    /// The result of the copies that were started last. None while some run. Streams that must be drained go to
    /// `drains`.
    pub(crate) fn poll(&mut self, drains: &mut Vec<Drain>) -> Option<Result<(), GpuError>> {
        while let Some(number) = self.busy.last() {
            if let Some(is_over) = &self.drained {
                if !is_over.load(Ordering::Acquire) {
                    return None;
                }
                self.drained = None;
                self.busy.pop();
                continue;
            }
            let stream = self.streams.iter().find(|(known, _)| known == number);
            match stream.map(|(_, stream)| (stream, stream.is_idle())) {
                Some((_, Ok(false))) => return None,
                Some((stream, Err(error))) => {
                    self.failed.get_or_insert(error);
                    let is_over = Arc::new(AtomicBool::new(false));
                    drains.push(Drain { stream: Arc::clone(stream), is_over: Arc::clone(&is_over) });
                    self.drained = Some(is_over);
                    return None;
                }
                Some((_, Ok(true))) | None => drop(self.busy.pop()),
            }
        }
        Some(self.failed.take().map_or(Ok(()), Err))
    }

    /// Whether no copy is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.busy.is_empty()
    }

    /// The stream on this GPU, created if there is none.
    pub(super) fn stream(&mut self, gpu: &Gpu, number: u16) -> Result<&Stream, GpuError> {
        let index = match self.streams.iter().position(|(known, _)| *known == number) {
            Some(index) => index,
            None => {
                self.streams.push((number, Arc::new(Stream::new(gpu, Priority::High)?)));
                self.streams.len() - 1
            }
        };
        Ok(&self.streams[index].1)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let busy = |number: &u16| self.busy.contains(number);
        for (_, stream) in self.streams.iter().filter(|(number, _)| busy(number)) {
            crate::audit::takes_time("a wait for a GPU");
            // The slot goes, so an error has nowhere to go.
            let _ = stream.synchronize();
        }
    }
}

fn copy_of(on_gpu: Piece, host: Piece, direction: Direction) -> Copy {
    let (gpu, host, len) = (on_gpu.address as u64, host.address as u64, host.len as u64);
    match direction {
        Direction::Out => Copy { dst: host, src: gpu, len },
        Direction::In => Copy { dst: gpu, src: host, len },
    }
}

/// # Safety
/// As for [`Stream::copy`], for each copy.
unsafe fn enqueue(stream: &Stream, copies: &[Copy]) -> Result<(), GpuError> {
    let gpu = stream.gpu();
    if copies.len() > 1 && gpu.methods().batch {
        let (driver, device) = gpu.raw();
        // SAFETY: the stream lives, and the ranges are valid by the caller's promise.
        match unsafe { driver.copy_batch_async(device, stream.raw(), copies) } {
            // The device has no batch copies. That turns out only here.
            Err(GpuError::Unsupported { .. }) => {}
            outcome => return outcome,
        }
    }
    // SAFETY: the caller's promise is passed on.
    copies.iter().try_for_each(|copy| unsafe { stream.copy(*copy) })
}
