//! Memory of this process that transfers may touch.

use crate::descriptor::{Access, MemoryKind, RegionDescriptor};
use crate::numbered::Numbered;
use crate::staging::Spot;

/// Bytes that a socket or a system call reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) address: usize,
    pub(crate) len: usize,
}

impl Piece {
    pub(crate) fn pointer(self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.address)
    }

    pub(crate) fn overlaps(self, other: Piece) -> bool {
        self.address < other.address + other.len && other.address < self.address + self.len
    }

    /// The bytes after the first `by`.
    pub(crate) fn after(self, by: usize) -> Piece {
        debug_assert!(by <= self.len);
        Piece { address: self.address + by, len: self.len - by }
    }
}

#[derive(Debug)]
struct Known {
    descriptor: RegionDescriptor,
    /// The number of the GPU whose memory it is.
    gpu: Option<usize>,
    /// Transfers of this process that it belongs to.
    uses: usize,
    /// Only peers' requests for this generation are served; none while it is being given up.
    is_served: bool,
}

/// By number. A number that comes free is used again with the next generation.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    known: Numbered<u32, Known>,
    generations: Vec<u32>,
    free: Vec<u32>,
    /// Those on GPUs.
    on_gpus: usize,
}

impl Regions {
    /// Its number and generation.
    pub(crate) fn add(&mut self, base: usize, len: u64, access: Access, gpu: Option<usize>) -> (u32, u32) {
        let number = self.free.pop().unwrap_or(self.generations.len() as u32);
        if number as usize == self.generations.len() {
            self.generations.push(0);
        }
        let generation = self.generations[number as usize];
        let kind = if gpu.is_some() { MemoryKind::Cuda } else { MemoryKind::Host };
        let base = base as u64;
        self.on_gpus += usize::from(gpu.is_some());
        let descriptor = RegionDescriptor { number, generation, kind, access, base, len, key: 0 };
        self.known.insert(number, Known { descriptor, gpu, uses: 0, is_served: true });
        (number, generation)
    }

    /// Requests are refused from now on. False if there is no such region, or somebody else gives it up already.
    pub(crate) fn stop_serving(&mut self, number: u32) -> bool {
        self.known.get_mut(&number).is_some_and(|known| std::mem::replace(&mut known.is_served, false))
    }

    pub(crate) fn remove(&mut self, number: u32) {
        if let Some(known) = self.known.remove(&number) {
            self.on_gpus -= usize::from(known.gpu.is_some());
            let generation = &mut self.generations[number as usize];
            // A number whose generations are used up is not used again.
            if let Some(next) = generation.checked_add(1) {
                *generation = next;
                self.free.push(number);
            }
        }
    }

    pub(crate) fn descriptors(&self) -> Vec<RegionDescriptor> {
        let mut all: Vec<RegionDescriptor> =
            self.known.values().filter(|known| known.is_served).map(|known| known.descriptor).collect();
        all.sort_by_key(|region| region.number);
        all
    }

    pub(crate) fn bytes(&self, number: u32) -> Option<u64> {
        self.known.get(&number).filter(|known| known.is_served).map(|known| known.descriptor.len)
    }

    pub(crate) fn uses(&self, number: u32) -> usize {
        self.known.get(&number).map_or(0, |known| known.uses)
    }

    pub(crate) fn count_use(&mut self, number: u32, by: isize) {
        if let Some(known) = self.known.get_mut(&number) {
            known.uses = known.uses.saturating_add_signed(by);
        }
    }

    /// All bytes of a region.
    pub(crate) fn all_of(&self, number: u32) -> Option<Spot> {
        let known = self.known.get(&number)?;
        self.own_spot(number, 0, known.descriptor.len)
    }

    /// Whether any region is on a GPU.
    pub(crate) fn has_gpus(&self) -> bool {
        self.on_gpus > 0
    }

    /// The number of the GPU that a region is on.
    pub(crate) fn gpu_of(&self, number: u32) -> Option<usize> {
        self.known.get(&number)?.gpu
    }

    /// As [`Regions::own`], of the host or of a GPU.
    pub(crate) fn own_spot(&self, number: u32, offset: u64, len: u64) -> Option<Spot> {
        let known = self.known.get(&number)?;
        Some(Spot { piece: piece(&known.descriptor, offset, len)?, gpu: known.gpu })
    }

    /// Bytes of a region for a transfer of this process, which counts as a use of it.
    pub(crate) fn own(&self, number: u32, offset: u64, len: u64) -> Option<Piece> {
        piece(&self.known.get(&number)?.descriptor, offset, len)
    }

    /// Bytes of a region that a peer asks for. None: refused.
    pub(crate) fn for_peer(
        &self,
        number: u32,
        generation: u32,
        offset: u64,
        len: u64,
        is_write: bool,
    ) -> Option<Piece> {
        let known = self.known.get(&number).filter(|known| known.is_served)?;
        let may = !is_write || known.descriptor.access == Access::ReadWrite;
        if known.descriptor.generation != generation || !may {
            return None;
        }
        piece(&known.descriptor, offset, len)
    }
}

fn piece(region: &RegionDescriptor, offset: u64, len: u64) -> Option<Piece> {
    let end = offset.checked_add(len)?;
    (end <= region.len).then(|| Piece { address: (region.base + offset) as usize, len: len as usize })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_served_what_it_was_told_of_and_nothing_else() {
        let mut regions = Regions::default();
        let (first, _) = regions.add(0x1000, 100, Access::Read, None);
        let (second, _) = regions.add(0x2000, 50, Access::ReadWrite, None);
        assert_eq!(regions.for_peer(first, 0, 10, 90, false), Some(Piece { address: 0x1000 + 10, len: 90 }));
        assert_eq!(regions.for_peer(first, 0, 10, 91, false), None, "one byte too many");
        assert_eq!(regions.for_peer(first, 0, u64::MAX, 2, false), None);
        assert_eq!(regions.for_peer(first, 0, 0, 1, true), None, "it is only to be read");
        assert_eq!(regions.for_peer(second, 1, 0, 1, true), None, "another generation");
        assert!(regions.for_peer(second, 0, 0, 50, true).is_some());
        assert!(regions.stop_serving(second));
        assert!(!regions.stop_serving(second), "once");
        assert_eq!(regions.for_peer(second, 0, 0, 50, true), None);
        assert!(regions.own(second, 0, 50).is_some(), "a transfer under way goes on");
        regions.remove(second);
        assert_eq!(regions.add(0x3000, 50, Access::ReadWrite, None).0, second);
        assert_eq!(regions.for_peer(second, 0, 0, 1, true), None, "of the former region of this number");
        assert!(regions.for_peer(second, 1, 0, 1, true).is_some());
        assert_eq!(regions.descriptors().len(), 2);
    }
}
