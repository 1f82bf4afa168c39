//! Memory of this process that transfers may touch.

use std::collections::HashMap;
use std::sync::Arc;

use crate::descriptor::{Access, MemoryKind, REGIONS_MAX, RegionDescriptor};
use crate::numbered::Numbered;
use crate::ranges::{Piece, Spot};
use crate::registrar::MemoryRegion;
use crate::tcp::{Keys, RegionNews};
use crate::transfers::Memory;

/// What has to be known of a region to check a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) generation: u32,
    pub(crate) len: u64,
    pub(crate) memory: Memory,
}

/// The regions of one side, by number, as they are at one moment: whoever checks a transfer holds no lock meanwhile.
pub(crate) type Shapes = HashMap<u32, Shape>;

#[derive(Debug)]
struct Known {
    descriptor: RegionDescriptor,
    base: usize,
    memory: Memory,
    keys: Keys,
    /// Transfers of this process that it belongs to.
    uses: usize,
    /// Only peers' requests for this generation are served; none while it is being given up.
    is_served: bool,
}

/// By number. A number that comes free is used again with the next generation.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    known: Numbered<u32, Known>,
    shapes: Arc<Shapes>,
    generations: Vec<u32>,
    free: Vec<u32>,
    has_had_gpus: bool,
}

/// Memory that is to be registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NewRegion {
    pub(crate) base: usize,
    pub(crate) len: u64,
    pub(crate) access: Access,
    pub(crate) memory: Memory,
}

impl Regions {
    /// A number and a generation for a region that is going to be registered; None: there are as many as can be.
    pub(crate) fn reserve(&mut self) -> Option<(u32, u32)> {
        let number = match self.free.pop() {
            Some(number) => number,
            None if self.generations.len() < REGIONS_MAX as usize => {
                self.generations.push(0);
                self.generations.len() as u32 - 1
            }
            None => return None,
        };
        Some((number, self.generations[number as usize]))
    }

    /// The region is registered from now on, under a number that was reserved.
    pub(crate) fn add(&mut self, number: u32, region: NewRegion, keys: Keys) {
        let NewRegion { base, len, access, memory } = region;
        let generation = self.generations[number as usize];
        let is_gpu = matches!(memory, Memory::Gpu(_));
        let kind = if is_gpu { MemoryKind::Cuda } else { MemoryKind::Host };
        self.has_had_gpus |= is_gpu;
        let descriptor = RegionDescriptor { number, generation, kind, access, len };
        let known = Known { descriptor, base, memory, keys, uses: 0, is_served: true };
        self.known.insert(number, known);
        Arc::make_mut(&mut self.shapes).insert(number, Shape { generation, len, memory });
    }

    /// Requests are refused from now on. False if there is no such region, or somebody else gives it up already.
    pub(crate) fn stop_serving(&mut self, number: u32) -> bool {
        Arc::make_mut(&mut self.shapes).remove(&number);
        self.known.get_mut(&number).is_some_and(|known| std::mem::replace(&mut known.is_served, false))
    }

    /// The number is used again, with the next generation.
    pub(crate) fn remove(&mut self, number: u32) {
        self.known.remove(&number);
        let generation = &mut self.generations[number as usize];
        // A number whose generations are used up is not used again.
        if let Some(next) = generation.checked_add(1) {
            *generation = next;
            self.free.push(number);
        }
    }

    pub(crate) fn descriptors(&self) -> Vec<RegionDescriptor> {
        let served = self.known.values().filter(|known| known.is_served);
        let mut all: Vec<RegionDescriptor> = served.map(|known| known.descriptor).collect();
        all.sort_by_key(|region| region.number);
        all
    }

    /// All that peers are to know of a region.
    pub(crate) fn news_of(&self, number: u32) -> Option<RegionNews> {
        let known = self.known.get(&number)?;
        let Known { descriptor, memory, keys, .. } = known;
        Some(match known.is_served {
            true => RegionNews::Here { region: *descriptor, memory: *memory, keys: keys.clone() },
            false => RegionNews::Gone { number, generation: descriptor.generation },
        })
    }

    /// The same of all.
    pub(crate) fn news(&self) -> Vec<RegionNews> {
        self.descriptors().iter().filter_map(|region| self.news_of(region.number)).collect()
    }

    /// A region as carriers see it.
    pub(crate) fn seen(&self, number: u32) -> Option<MemoryRegion> {
        let Known { descriptor, base, memory, .. } = self.known.get(&number)?;
        Some(MemoryRegion {
            number,
            generation: descriptor.generation,
            address: *base as u64,
            len: descriptor.len,
            memory: *memory,
            is_writable: descriptor.access == Access::ReadWrite,
        })
    }

    pub(crate) fn shapes(&self) -> Arc<Shapes> {
        Arc::clone(&self.shapes)
    }

    pub(crate) fn uses(&self, number: u32) -> usize {
        self.known.get(&number).map_or(0, |known| known.uses)
    }

    pub(crate) fn count_use(&mut self, number: u32, by: isize) {
        if let Some(known) = self.known.get_mut(&number) {
            known.uses = known.uses.saturating_add_signed(by);
        }
    }

    /// Whether any region is on a GPU, or ever was: a transfer of it may be waiting for its path still.
    pub(crate) fn has_had_gpus(&self) -> bool {
        self.has_had_gpus
    }

    /// All bytes of a region.
    pub(crate) fn all_of(&self, number: u32) -> Option<Spot> {
        let known = self.known.get(&number)?;
        known.spot(0, known.descriptor.len)
    }

    /// Bytes of a region for a transfer of this process, which counts as a use of it.
    pub(crate) fn own(&self, number: u32, offset: u64, len: u64) -> Option<Spot> {
        self.known.get(&number)?.spot(offset, len)
    }

    /// Bytes of a region that a peer asks for. None: refused.
    pub(crate) fn for_peer(
        &self,
        number: u32,
        generation: u32,
        offset: u64,
        len: u64,
        is_write: bool,
    ) -> Option<Spot> {
        let known = self.known.get(&number).filter(|known| known.is_served)?;
        let may = !is_write || known.descriptor.access == Access::ReadWrite;
        if known.descriptor.generation != generation || !may {
            return None;
        }
        known.spot(offset, len)
    }
}

impl Known {
    fn spot(&self, offset: u64, len: u64) -> Option<Spot> {
        let end = offset.checked_add(len)?;
        let piece = || Piece { address: self.base + offset as usize, len: len as usize };
        let gpu = match self.memory {
            Memory::Gpu(number) => Some(usize::from(number)),
            Memory::Host(_) => None,
        };
        (end <= self.descriptor.len).then(|| Spot { piece: piece(), gpu })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    fn add(regions: &mut Regions, base: usize, len: u64, access: Access) -> u32 {
        let (number, _) = regions.reserve().unwrap();
        regions.add(number, NewRegion { base, len, access, memory: Memory::Host(0) }, Keys::new());
        number
    }

    #[test]
    fn a_peer_is_served_what_it_was_told_of_and_nothing_else() {
        let mut regions = Regions::default();
        let first = add(&mut regions, 0x1000, 100, Access::Read);
        let second = add(&mut regions, 0x2000, 50, Access::ReadWrite);
        let spot = |address, len| Some(Spot { piece: Piece { address, len }, gpu: None });
        assert_eq!(regions.for_peer(first, 0, 10, 90, false), spot(0x1000 + 10, 90));
        assert_eq!(regions.for_peer(first, 0, 10, 91, false), None, "one byte too many");
        assert_eq!(regions.for_peer(first, 0, u64::MAX, 2, false), None);
        assert_eq!(regions.for_peer(first, 0, 0, 1, true), None, "it is only to be read");
        assert_eq!(regions.for_peer(second, 1, 0, 1, true), None, "another generation");
        assert!(regions.for_peer(second, 0, 0, 50, true).is_some());
        let before = regions.shapes();
        assert!(regions.stop_serving(second));
        assert!(!regions.stop_serving(second), "once");
        assert!(before.contains_key(&second) && !regions.shapes().contains_key(&second));
        assert_eq!(regions.for_peer(second, 0, 0, 50, true), None);
        assert_eq!(regions.news_of(second), Some(RegionNews::Gone { number: second, generation: 0 }));
        assert!(regions.own(second, 0, 50).is_some(), "a transfer under way goes on");
        regions.remove(second);
        assert_eq!(add(&mut regions, 0x3000, 50, Access::ReadWrite), second);
        assert_eq!(regions.for_peer(second, 0, 0, 1, true), None, "of the former region of this number");
        assert!(regions.for_peer(second, 1, 0, 1, true).is_some());
        assert_eq!(regions.descriptors().len(), 2);
        assert_eq!(regions.shapes()[&second].generation, 1);
    }

    #[test]
    fn there_are_so_many_regions_and_no_more() {
        let mut regions = Regions::default();
        for number in 0..REGIONS_MAX {
            assert_eq!(regions.reserve(), Some((number, 0)));
        }
        assert_eq!(regions.reserve(), None);
        regions.remove(7);
        assert_eq!(regions.reserve(), Some((7, 1)));
    }
}
