//! How fast copies of one shape are on this machine.

use std::sync::Arc;
use std::time::Instant;

use crate::copier::{Copier, CopierOptions};
use crate::device::Gpu;
use crate::driver::{Copy, Priority};
use crate::error::GpuError;
use crate::pinned::HostBuffer;
use crate::plan::{Direction, Thresholds};
use crate::rails::{RailOptions, Rails, Staging};
use crate::stream::Stream;

/// Measured rounds, after one that warms up.
const ROUNDS: usize = 7;

/// Bytes between two pieces, so that no two are adjacent.
const GAP: u64 = 256;

/// Where the bytes move.
#[derive(Debug, Clone)]
pub enum Path {
    /// From pinned host memory to the GPU.
    HostToDevice,
    /// From the GPU to pinned host memory.
    DeviceToHost,
    /// From the GPU to this other one.
    Peer(Gpu),
}

impl Path {
    fn direction(&self) -> Direction {
        match self {
            Path::HostToDevice => Direction::HostToDevice,
            Path::DeviceToHost => Direction::DeviceToHost,
            Path::Peer(_) => Direction::Peer,
        }
    }
}

/// What is copied.
#[derive(Debug, Clone)]
pub struct Shape {
    /// Bytes in sum; what does not fill a piece is left out.
    pub total_bytes: u64,
    /// Bytes that are contiguous.
    pub piece_bytes: u64,
    /// Pieces that lie one after the other in the source, as a block's layers do in the pool; 1 for none.
    pub joined: u64,
    /// Whether neighbouring pieces of the one side are far apart on the other.
    pub shuffled: bool,
    /// Between what.
    pub path: Path,
}

/// How it is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyMethod {
    /// One call a piece.
    CopyEngine,
    /// Batch calls.
    Batch,
    /// The kernel.
    Kernel {
        /// Its thread blocks.
        blocks: u32,
    },
    /// All bytes as one piece, by a copy engine: what the link can do.
    Contiguous,
    /// As [`Copier`] chooses by default.
    Auto,
}

/// Measures copies of a shape from `gpu`'s point of view, in GB/s (10^9 bytes): the median of seven rounds, from the
/// first call until the stream is done. The bytes are checked afterwards; a destination that holds others is an error.
pub fn measure_copy(gpu: &Gpu, shape: &Shape, method: CopyMethod) -> Result<f64, GpuError> {
    let stream = Arc::new(Stream::new(gpu, Priority::High)?);
    let options = options(gpu, method, shape.path.direction())?;
    let mut copier = Copier::new(Arc::clone(&stream), options)?;
    measure(gpu, shape, method, &stream, |copies, direction| {
        // SAFETY: the ranges are those of `measure`, which waits for the stream.
        unsafe { copier.enqueue(copies, direction) }.map(drop)
    })
}

/// As [`measure_copy`], over the GPU's own link and those of all other GPUs that the options choose; what comes over its
/// own link goes through a ring on the GPU where that is `staged`.
pub fn measure_rails(gpu: &Gpu, options: RailOptions, shape: &Shape, staged: bool) -> Result<f64, GpuError> {
    if !matches!(shape.path, Path::HostToDevice) {
        return Err(GpuError::Invalid("rails are for copies from the host to a GPU".into()));
    }
    let rails = Rails::new(gpu.driver(), &[], RailOptions { least_bytes: 0, ..options })?;
    let wanted = rails.chosen().iter().filter(|ordinal| **ordinal != gpu.info().ordinal).count();
    let loader = rails.loader(gpu, "a benchmark");
    let stream = Arc::new(Stream::new(gpu, Priority::High)?);
    let direct = self::options(gpu, CopyMethod::Auto, Direction::HostToDevice)?;
    let mut copier = Copier::new(Arc::clone(&stream), direct)?;
    let pulls = Thresholds::idle(Direction::Peer);
    measure(gpu, shape, CopyMethod::Auto, &stream, |copies, _| {
        let staging = if staged { Staging::On } else { Staging::Off };
        let mut loading = loader.begin(&stream, shape.total_bytes, &pulls, staging);
        if loading.rails() != wanted || loading.is_staged() != staged {
            let reason = format!("{} of {wanted} GPUs can be used", loading.rails());
            return Err(GpuError::Unsupported { operation: "a load over rails", reason });
        }
        // SAFETY: the ranges are those of `measure`; stream and rails are waited for.
        let enqueued = unsafe { loading.enqueue(&mut copier, copies) };
        loading.synchronize()?;
        stream.synchronize()?;
        enqueued.map(drop)
    })
}

/// Copies the pieces of a shape by `enqueue`, whose work is over when the stream is.
fn measure(
    gpu: &Gpu,
    shape: &Shape,
    method: CopyMethod,
    stream: &Stream,
    mut enqueue: impl FnMut(&[Copy], Direction) -> Result<(), GpuError>,
) -> Result<f64, GpuError> {
    let plan = Pieces::new(shape, method)?;
    let places = Places::new(gpu, shape, plan.extent())?;
    let staging = HostBuffer::new(gpu, plan.extent())?;

    let whole = |dst, src| Copy { dst, src, len: plan.extent() };
    // SAFETY: all three ranges have the extent's length, and each copy is waited for before they are used otherwise.
    unsafe {
        write_pattern(&staging);
        run(stream, whole(places.source(), staging.address()))?;
        poison(&staging);
        run(stream, whole(places.destination(), staging.address()))?;
    }

    let copies = plan.copies(places.destination(), places.source());
    let mut seconds = Vec::with_capacity(ROUNDS);
    for round in 0..=ROUNDS {
        let start = Instant::now();
        // The pieces lie in the source and the destination and do not overlap.
        let enqueued = enqueue(&copies, places.direction);
        // Also after an error, since a part of it may be under way.
        stream.synchronize()?;
        enqueued?;
        if round > 0 {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }

    // SAFETY: as above; the stream is idle.
    unsafe {
        poison(&staging);
        run(stream, whole(staging.address(), places.destination()))?;
        plan.check(&staging)?;
    }
    seconds.sort_by(f64::total_cmp);
    Ok(plan.bytes() as f64 / seconds[ROUNDS / 2] / 1e9)
}

/// The copier that does nothing but this method.
pub(crate) fn options(
    gpu: &Gpu,
    method: CopyMethod,
    direction: Direction,
) -> Result<CopierOptions, GpuError> {
    let never = Thresholds { engine_bytes: u64::MAX, batch_bytes: u64::MAX, ..Thresholds::default() };
    let only = |use_batch, use_kernel| CopierOptions { use_batch, use_kernel, ..CopierOptions::default() };
    let lacks = |operation| GpuError::Unsupported { operation, reason: "this device cannot".into() };
    match method {
        CopyMethod::CopyEngine | CopyMethod::Contiguous => Ok(only(false, false)),
        CopyMethod::Batch if !gpu.methods().batch => Err(lacks("cuMemcpyBatchAsync")),
        CopyMethod::Batch => Ok(CopierOptions { thresholds: never, ..only(true, false) }),
        CopyMethod::Kernel { .. } if !gpu.methods().kernel => Err(lacks("the copy kernel")),
        CopyMethod::Kernel { blocks } => {
            let some = CopierOptions { thresholds: never, ..only(false, true) };
            Ok(CopierOptions { host_blocks: blocks, peer_blocks: blocks, ..some })
        }
        CopyMethod::Auto => {
            Ok(CopierOptions { thresholds: Thresholds::idle(direction), ..CopierOptions::default() })
        }
    }
}

/// Source and destination.
struct Places {
    direction: Direction,
    source: Memory,
    destination: Memory,
}

enum Memory {
    Host(HostBuffer),
    Device(crate::device::DeviceMemory),
}

impl Memory {
    fn address(&self) -> u64 {
        match self {
            Memory::Host(buffer) => buffer.address(),
            Memory::Device(memory) => memory.address(),
        }
    }
}

impl Places {
    fn new(gpu: &Gpu, shape: &Shape, bytes: u64) -> Result<Places, GpuError> {
        let host = || HostBuffer::new(gpu, bytes).map(Memory::Host);
        let device = |gpu: &Gpu| gpu.alloc(bytes).map(Memory::Device);
        let (source, destination) = match &shape.path {
            Path::HostToDevice => (host()?, device(gpu)?),
            Path::DeviceToHost => (device(gpu)?, host()?),
            Path::Peer(peer) => {
                gpu.enable_peer(peer)?;
                (device(gpu)?, device(peer)?)
            }
        };
        Ok(Places { direction: shape.path.direction(), source, destination })
    }

    fn source(&self) -> u64 {
        self.source.address()
    }

    fn destination(&self) -> u64 {
        self.destination.address()
    }
}

/// Where pieces lie in both ranges: the source in order, the destination perhaps not.
struct Pieces {
    bytes: u64,
    stride: u64,
    joined: u64,
    /// The slot of each piece in the destination.
    slots: Vec<u64>,
}

impl Pieces {
    fn new(shape: &Shape, method: CopyMethod) -> Result<Pieces, GpuError> {
        let bytes = match method {
            CopyMethod::Contiguous => shape.total_bytes,
            _ => shape.piece_bytes,
        };
        let count = shape.total_bytes.checked_div(bytes).unwrap_or(0);
        if count == 0 || shape.joined == 0 || !bytes.is_multiple_of(8) {
            let asked = format!("{} bytes in pieces of {bytes}", shape.total_bytes);
            return Err(GpuError::Invalid(format!(
                "{asked} cannot be measured: pieces are multiples of 8 bytes"
            )));
        }
        let mut slots: Vec<u64> = (0..count).collect();
        if shape.shuffled {
            for last in (1..slots.len()).rev() {
                slots.swap(last, (word(last as u64) % (last as u64 + 1)) as usize);
            }
        }
        Ok(Pieces { bytes, stride: bytes.next_multiple_of(GAP) + GAP, joined: shape.joined, slots })
    }

    /// Bytes that are copied.
    fn bytes(&self) -> u64 {
        self.bytes * self.slots.len() as u64
    }

    /// Bytes of either range, gaps included.
    fn extent(&self) -> u64 {
        self.stride * self.slots.len() as u64
    }

    /// Where a piece lies in the source.
    fn source(&self, piece: u64) -> u64 {
        piece / self.joined * (self.joined * self.stride) + piece % self.joined * self.bytes
    }

    fn copies(&self, destination: u64, source: u64) -> Vec<Copy> {
        let copy = |(piece, slot): (usize, &u64)| Copy {
            dst: destination + slot * self.stride,
            src: source + self.source(piece as u64),
            len: self.bytes,
        };
        self.slots.iter().enumerate().map(copy).collect()
    }

    /// Whether every piece arrived, and nothing was written between pieces.
    ///
    /// # Safety
    /// The buffer has the extent's length, and no enqueued work touches it.
    unsafe fn check(&self, arrived: &HostBuffer) -> Result<(), GpuError> {
        let words: *const u64 = arrived.as_ptr().cast();
        for (piece, slot) in self.slots.iter().enumerate() {
            let (from, to) = (self.source(piece as u64) / 8, slot * self.stride / 8);
            let copied = self.bytes / 8;
            for offset in 0..self.stride / 8 {
                let expected = if offset < copied { word(from + offset) } else { POISON };
                // SAFETY: the slot lies in the buffer, which is page-aligned.
                if unsafe { words.add((to + offset) as usize).read() } != expected {
                    return Err(GpuError::WrongBytes { piece: piece as u64 });
                }
            }
        }
        Ok(())
    }
}

/// What no piece holds.
const POISON: u64 = 0xdead_beef_dead_beef;

/// The word at an index of the source: a finaliser of a hash, so that no two places look alike.
fn word(index: u64) -> u64 {
    let mut mixed = index.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

/// # Safety
/// No enqueued work touches the buffer.
unsafe fn write_pattern(buffer: &HostBuffer) {
    // SAFETY: the caller's promise.
    unsafe { fill(buffer, word) }
}

/// # Safety
/// No enqueued work touches the buffer.
unsafe fn poison(buffer: &HostBuffer) {
    // SAFETY: the caller's promise.
    unsafe { fill(buffer, |_| POISON) }
}

/// # Safety
/// No enqueued work touches the buffer.
unsafe fn fill(buffer: &HostBuffer, content: impl Fn(u64) -> u64) {
    let words: *mut u64 = buffer.as_ptr().cast();
    for index in 0..buffer.bytes() / 8 {
        // SAFETY: the word lies in the buffer, which is page-aligned and, by the caller's promise, ours alone.
        unsafe { words.add(index as usize).write(content(index)) };
    }
}

/// One copy, waited for.
///
/// # Safety
/// As for [`Stream::copy`].
unsafe fn run(stream: &Stream, copy: Copy) -> Result<(), GpuError> {
    // SAFETY: the caller's promise.
    unsafe { stream.copy(copy)? };
    stream.synchronize()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::detect::driver_named;

    #[test]
    fn a_byte_that_did_not_arrive_and_one_too_many_are_found() {
        let gpu = Gpu::open(driver_named(Some("fake")).unwrap(), 0).unwrap();
        let shape = Shape {
            total_bytes: 4096,
            piece_bytes: 512,
            joined: 1,
            shuffled: true,
            path: Path::HostToDevice,
        };
        let pieces = Pieces::new(&shape, CopyMethod::Auto).unwrap();
        assert!(pieces.slots.iter().enumerate().any(|(piece, slot)| piece as u64 != *slot));
        let arrived = HostBuffer::new(&gpu, pieces.extent()).unwrap();
        // SAFETY: nothing is enqueued, and all indices are in the buffer.
        unsafe {
            poison(&arrived);
            assert_eq!(pieces.check(&arrived), Err(GpuError::WrongBytes { piece: 0 }));
            for copy in pieces.copies(0, 0) {
                for offset in 0..copy.len / 8 {
                    let to: *mut u64 = arrived.as_ptr().cast();
                    to.add((copy.dst / 8 + offset) as usize).write(word(copy.src / 8 + offset));
                }
            }
            assert_eq!(pieces.check(&arrived), Ok(()));
            let behind_piece_3 = pieces.slots[3] * pieces.stride + pieces.bytes;
            arrived.as_ptr().add(behind_piece_3 as usize).write(1);
            assert_eq!(pieces.check(&arrived), Err(GpuError::WrongBytes { piece: 3 }));
        }
    }
}
