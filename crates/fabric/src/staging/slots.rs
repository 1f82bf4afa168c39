//! Pinned host memory that bytes of GPUs pass through, and the copies between the two.

#![allow(unsafe_code, reason = "GPUs read and write registered memory")]

use kvlane_gpu::{Copy, Gpu, GpuError, HostBuffer, Priority, Stream};

use super::Spot;
use crate::regions::Piece;

/// Slots of one direction.
const SLOTS_MAX: usize = 32;

/// Which way bytes pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// From a GPU into a slot.
    Out,
    /// From a slot to a GPU.
    In,
}

/// A range of pinned memory. It has streams of its own, so that what fails there is known to be of this slot.
#[derive(Debug)]
pub(crate) struct Slot {
    /// By the number of their GPU; made as they are needed.
    streams: Vec<(usize, Stream)>,
    /// GPUs whose streams have work.
    busy: Vec<usize>,
    failed: Option<GpuError>,
    buffer: HostBuffer,
}

impl Slot {
    fn new(gpu: &Gpu, bytes: u64) -> Result<Slot, GpuError> {
        let buffer = HostBuffer::new(gpu, bytes)?;
        Ok(Slot { streams: Vec::new(), busy: Vec::new(), failed: None, buffer })
    }

    /// Where each of these is to be sent from, or received: host memory as it is, a GPU's in the slot, one after the other.
    pub(crate) fn host_pieces(&self, spots: &[Spot]) -> Vec<Piece> {
        let mut free = self.buffer.address() as usize;
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

    /// Starts the copies between the slot and those of the spots that are on GPUs.
    ///
    /// # Errors
    /// Of a driver, after which none of them runs any more.
    ///
    /// # Safety
    /// The spots are valid, also for writes where the way is in, until [`Slot::is_done`] has answered, or the slot was dropped;
    /// together those on GPUs have no more bytes than the slot.
    pub(crate) unsafe fn start(&mut self, gpus: &[Gpu], spots: &[Spot], way: Way) -> Result<(), GpuError> {
        debug_assert!(self.busy.is_empty());
        let places = self.host_pieces(spots);
        for (number, gpu) in gpus.iter().enumerate() {
            let of_gpu = spots.iter().zip(&places).filter(|(spot, _)| spot.gpu == Some(number));
            let copies = join(of_gpu.map(|(spot, place)| copy_of(spot.piece, *place, way)));
            if copies.is_empty() {
                continue;
            }
            // SAFETY: the spots are valid by the caller's promise, and the places lie in the buffer.
            let begun = self.stream(gpu, number).and_then(|stream| unsafe { enqueue(stream, &copies) });
            self.busy.push(number);
            if let Err(error) = begun {
                self.drain();
                self.failed = None;
                return Err(error);
            }
        }
        Ok(())
    }

    /// How the copies ended that were started last; None while some run.
    pub(crate) fn is_done(&mut self) -> Option<Result<(), GpuError>> {
        while let Some(number) = self.busy.last() {
            let stream = self.streams.iter().find(|(known, _)| known == number);
            match stream.map_or(Ok(true), |(_, stream)| stream.is_idle()) {
                Ok(false) => return None,
                Ok(true) => {}
                Err(error) => {
                    // What was enqueued behind may still run.
                    if let Some((_, stream)) = stream {
                        let _ = stream.synchronize();
                    }
                    self.failed.get_or_insert(error);
                }
            }
            self.busy.pop();
        }
        Some(self.failed.take().map_or(Ok(()), Err))
    }

    /// Waits for all copies.
    pub(crate) fn drain(&mut self) {
        for (number, stream) in &self.streams {
            if self.busy.contains(number)
                && let Err(error) = stream.synchronize()
            {
                self.failed.get_or_insert(error);
            }
        }
        self.busy.clear();
    }

    fn stream(&mut self, gpu: &Gpu, number: usize) -> Result<&Stream, GpuError> {
        let index = match self.streams.iter().position(|(known, _)| *known == number) {
            Some(index) => index,
            None => {
                self.streams.push((number, Stream::new(gpu, Priority::High)?));
                self.streams.len() - 1
            }
        };
        Ok(&self.streams[index].1)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.drain();
    }
}

/// Slots of one direction, made as they are needed and kept.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    free: Vec<Slot>,
    made: usize,
    /// Why the last one could not be made.
    trouble: Option<GpuError>,
}

impl Slots {
    /// Sees to it that there is a slot, and that the GPU of this number can copy.
    pub(super) fn prepare(&mut self, gpu: &Gpu, number: usize, bytes: u64) -> Result<(), GpuError> {
        if self.made == 0 {
            self.free.push(Slot::new(gpu, bytes)?);
            self.made = 1;
        }
        self.free.last_mut().map_or(Ok(()), |slot| slot.stream(gpu, number).map(drop))
    }

    /// A slot, unless all are in use. Where no further one can be made those that are there have to do.
    pub(super) fn take(&mut self, gpus: &[Gpu], bytes: u64) -> Option<Slot> {
        if self.free.is_empty() && self.made < SLOTS_MAX {
            match Slot::new(gpus.first()?, bytes) {
                Ok(slot) => {
                    self.made += 1;
                    return Some(slot);
                }
                Err(error) => {
                    if self.trouble.as_ref() != Some(&error) {
                        tracing::warn!(%error, slots = self.made, "no more pinned memory for GPUs' bytes");
                    }
                    self.trouble = Some(error);
                }
            }
        }
        self.free.pop()
    }

    /// One that nothing touches any more.
    pub(super) fn give_back(&mut self, slot: Slot) {
        debug_assert!(slot.busy.is_empty());
        self.free.push(slot);
    }
}

fn copy_of(on_gpu: Piece, place: Piece, way: Way) -> Copy {
    let (gpu, host, len) = (on_gpu.address as u64, place.address as u64, place.len as u64);
    match way {
        Way::Out => Copy { dst: host, src: gpu, len },
        Way::In => Copy { dst: gpu, src: host, len },
    }
}

/// Copies that continue each other on both sides become one.
fn join(copies: impl Iterator<Item = Copy>) -> Vec<Copy> {
    let mut joined: Vec<Copy> = Vec::new();
    for copy in copies {
        match joined.last_mut() {
            Some(last) if last.dst + last.len == copy.dst && last.src + last.len == copy.src => {
                last.len += copy.len;
            }
            _ => joined.push(copy),
        }
    }
    joined
}

/// # Safety
/// As for [`Stream::copy`], for each.
unsafe fn enqueue(stream: &Stream, copies: &[Copy]) -> Result<(), GpuError> {
    let gpu = stream.gpu();
    if copies.len() > 1 && gpu.methods().batch {
        let (driver, device) = gpu.raw();
        // SAFETY: the stream lives, and the caller vouches for the ranges.
        match unsafe { driver.copy_batch_async(device, stream.raw(), copies) } {
            // The device has none, as turns out only here.
            Err(GpuError::Unsupported { .. }) => {}
            outcome => return outcome,
        }
    }
    // SAFETY: the caller's promise is passed on.
    copies.iter().try_for_each(|copy| unsafe { stream.copy(*copy) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_that_continue_each_other_on_both_sides_are_one() {
        let copy = |dst, src, len| Copy { dst, src, len };
        let joined = join([copy(0, 100, 4), copy(4, 104, 4), copy(8, 200, 4), copy(16, 204, 4)].into_iter());
        assert_eq!(joined, [copy(0, 100, 8), copy(8, 200, 4), copy(16, 204, 4)]);
    }
}
