//! Pieces in a source and in a destination, which is poisoned before and checked afterwards.

use super::shape::{CopyMethod, Path, Shape};
use crate::device::Gpu;
use crate::driver::Copy;
use crate::error::GpuError;
use crate::pinned::HostBuffer;
use crate::plan::Direction;
use crate::stream::Stream;

/// Bytes between two pieces, so that no two are adjacent.
const GAP: u64 = 256;

/// A source full of a pattern, a poisoned destination, and the copies from the one to the other.
pub(super) struct Laid {
    plan: Pieces,
    ends: CopyEnds,
    /// The bytes that fill both, and then those that arrived.
    host: HostBuffer,
    pub(super) copies: Vec<Copy>,
}

impl Laid {
    /// Allocates and fills both, and waits until they are filled.
    pub(super) fn new(
        gpu: &Gpu,
        shape: &Shape,
        method: CopyMethod,
        stream: &Stream,
    ) -> Result<Laid, GpuError> {
        let plan = Pieces::new(shape, method)?;
        let ends = CopyEnds::new(gpu, shape, plan.extent())?;
        let host = HostBuffer::new(gpu, plan.extent())?;
        let whole = |dst, src| Copy { dst, src, len: plan.extent() };
        // SAFETY: all three ranges have the extent's length, and each copy is waited for before they are used otherwise.
        unsafe {
            write_pattern(&host);
            run(stream, whole(ends.source(), host.address()))?;
            poison(&host);
            run(stream, whole(ends.destination(), host.address()))?;
        }
        let copies = plan.copies(ends.destination(), ends.source());
        Ok(Laid { plan, ends, host, copies })
    }

    pub(super) fn direction(&self) -> Direction {
        self.ends.direction
    }

    /// Bytes of all copies.
    pub(super) fn bytes(&self) -> u64 {
        self.plan.bytes()
    }

    /// Checks that every piece arrived, and that nothing else was written. All enqueued work is done.
    pub(super) fn check(&self, stream: &Stream) -> Result<(), GpuError> {
        let back = Copy { dst: self.host.address(), src: self.ends.destination(), len: self.plan.extent() };
        // SAFETY: both ranges have the extent's length; the stream is idle before and after.
        unsafe {
            poison(&self.host);
            run(stream, back)?;
            let arrived = std::slice::from_raw_parts(self.host.as_ptr(), self.plan.extent() as usize);
            self.plan.check(arrived)
        }
    }
}

/// The memory at both ends of a copy.
struct CopyEnds {
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

impl CopyEnds {
    fn new(gpu: &Gpu, shape: &Shape, bytes: u64) -> Result<CopyEnds, GpuError> {
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
        Ok(CopyEnds { direction: shape.path.direction(), source, destination })
    }

    fn source(&self) -> u64 {
        self.source.address()
    }

    fn destination(&self) -> u64 {
        self.destination.address()
    }
}

/// The positions of pieces in both ranges: in order in the source, perhaps shuffled in the destination.
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
            let wanted = format!("{} bytes in pieces of {bytes}", shape.total_bytes);
            return Err(GpuError::Invalid(format!(
                "{wanted} cannot be measured: pieces are multiples of 8 bytes"
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

    /// Bytes of all pieces.
    fn bytes(&self) -> u64 {
        self.bytes * self.slots.len() as u64
    }

    /// Bytes of either range, gaps included.
    fn extent(&self) -> u64 {
        self.stride * self.slots.len() as u64
    }

    /// The offset of a piece in the source.
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

    /// Checks a destination of the extent's length: every piece arrived, and nothing was written between pieces.
    fn check(&self, arrived: &[u8]) -> Result<(), GpuError> {
        let (words, rest) = arrived.as_chunks::<8>();
        assert!(rest.is_empty() && arrived.len() as u64 == self.extent());
        for (piece, slot) in self.slots.iter().enumerate() {
            let (from, to) = (self.source(piece as u64) / 8, slot * self.stride / 8);
            let copied = self.bytes / 8;
            for offset in 0..self.stride / 8 {
                let expected = if offset < copied { word(from + offset) } else { POISON };
                if u64::from_ne_bytes(words[(to + offset) as usize]) != expected {
                    return Err(GpuError::WrongBytes { piece: piece as u64 });
                }
            }
        }
        Ok(())
    }
}

/// A word that no piece has.
const POISON: u64 = 0xdead_beef_dead_beef;

/// The word at an index of the source: a hash's finaliser, so no two positions have the same word.
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

/// Makes one copy and waits for it.
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

    #[test]
    fn a_byte_that_did_not_arrive_and_one_too_many_are_found() {
        let shape = Shape {
            total_bytes: 4096,
            piece_bytes: 512,
            joined: 1,
            shuffled: true,
            path: Path::HostToDevice,
        };
        let pieces = Pieces::new(&shape, CopyMethod::Auto).unwrap();
        assert!(pieces.slots.iter().enumerate().any(|(piece, slot)| piece as u64 != *slot));
        let mut arrived = POISON.to_ne_bytes().repeat(pieces.extent() as usize / 8);
        assert_eq!(pieces.check(&arrived), Err(GpuError::WrongBytes { piece: 0 }));
        for copy in pieces.copies(0, 0) {
            for offset in (0..copy.len).step_by(8) {
                let to = (copy.dst + offset) as usize;
                arrived[to..to + 8].copy_from_slice(&word((copy.src + offset) / 8).to_ne_bytes());
            }
        }
        assert_eq!(pieces.check(&arrived), Ok(()));
        let behind_piece_3 = pieces.slots[3] * pieces.stride + pieces.bytes;
        arrived[behind_piece_3 as usize] = 1;
        assert_eq!(pieces.check(&arrived), Err(GpuError::WrongBytes { piece: 3 }));
    }
}
