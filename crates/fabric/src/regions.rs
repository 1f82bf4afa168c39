//! The regions and windows of this process: gives out their numbers, checks what peers ask for, and says what to announce.
//!
//! ```text
//!  region:   reserve --> add: served --> stop_serving: requests are refused --> remove: the number is free again
//!  window:   reserve --> open_window --> stop_serving_window                --> remove
//! ```
//! Between `stop_serving` and `remove` the engine waits until nothing touches the memory any more. A number that is used again
//! has the next generation, and a request for another generation is refused. So a late request never reaches newer memory.

use std::collections::HashMap;
use std::sync::Arc;

use thiserror::Error;

use crate::descriptor::{Access, MemoryKind, REGIONS_MAX, RegionDescriptor};
use crate::identity::Identity;
use crate::numbered::Numbered;
use crate::ranges::{Piece, Spot, Spots, disjoint};
use crate::region_news::{Keys, RegionNews};
use crate::registrar::MemoryRegion;
use crate::tcp::window_news;
use crate::transfers::Memory;
use crate::window::{PEER_RANGES_MAX, Ranges, WindowRange};
use crate::wire::WireRun;

/// The properties of a region or a window that a transfer is checked against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) generation: u32,
    pub(crate) len: u64,
    pub(crate) memory: Memory,
    /// Only a transfer that names this very window may touch it.
    pub(crate) is_window: bool,
}

/// The regions of one side at one moment, by number. A snapshot, so that transfers are checked without a lock.
pub(crate) type Shapes = Numbered<u32, Shape>;

#[derive(Debug)]
struct Registered {
    descriptor: RegionDescriptor,
    base: usize,
    memory: Memory,
    keys: Keys,
    /// Transfers of this process that use it.
    uses: usize,
    /// Whether peers' requests for this generation are served. False once it is being given back.
    is_served: bool,
}

/// Regions and windows share one space of numbers.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    known: Numbered<u32, Registered>,
    /// The regions that transfers of this process may name. Windows are for peers, so none is among them.
    shapes: Arc<Shapes>,
    windows: Numbered<u32, Window>,
    /// By peer: the ranges of all of its windows, at most [`PEER_RANGES_MAX`].
    shown_to: HashMap<Identity, usize>,
    /// By number: the generation of its current or next use.
    generations: Vec<u32>,
    /// Numbers that are free again.
    free: Vec<u32>,
    has_had_gpus: bool,
}

/// Ranges of regions that one peer may read.
#[derive(Debug)]
struct Window {
    generation: u32,
    to: Identity,
    memory: Memory,
    ranges: Ranges,
    /// The addresses of the same bytes, sorted and without overlaps.
    shown: Vec<Spot>,
    /// Whether the peer's requests are served. False once it is being closed.
    is_served: bool,
}

/// Bytes that a peer asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// The number of a region or a window.
    pub(crate) region: u32,
    pub(crate) generation: u32,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) is_write: bool,
}

/// Why a window cannot be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(crate) enum WindowRefused {
    #[error("some are not registered, or in another memory")]
    NotInOneMemory,
    /// The peer keeps no more than [`PEER_RANGES_MAX`].
    #[error("the peer keeps no more ranges")]
    PeerFull,
}

/// Memory that a caller registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NewRegion {
    pub(crate) base: usize,
    pub(crate) len: u64,
    pub(crate) access: Access,
    pub(crate) memory: Memory,
}

impl WireRun {
    pub(crate) fn wanted(&self, is_write: bool) -> Wanted {
        let WireRun { region, generation, offset, len } = *self;
        Wanted { region, generation, offset, len, is_write }
    }
}

impl Regions {
    /// Reserves a number, with its generation, for a region or a window. None: all [`REGIONS_MAX`] are in use.
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

    /// Registers a region under a reserved number, and serves peers' requests for it.
    pub(crate) fn add(&mut self, number: u32, region: NewRegion, keys: Keys) {
        let NewRegion { base, len, access, memory } = region;
        let generation = self.generations[number as usize];
        let is_gpu = matches!(memory, Memory::Gpu(_));
        let kind = if is_gpu { MemoryKind::Cuda } else { MemoryKind::Host };
        self.has_had_gpus |= is_gpu;
        let descriptor = RegionDescriptor { number, generation, kind, access, len };
        let known = Registered { descriptor, base, memory, keys, uses: 0, is_served: true };
        self.known.insert(number, known);
        Arc::make_mut(&mut self.shapes).insert(number, Shape { generation, len, memory, is_window: false });
    }

    /// Refuses requests for a region from now on. False: there is no such region, or another thread gives it back already.
    pub(crate) fn stop_serving(&mut self, number: u32) -> bool {
        Arc::make_mut(&mut self.shapes).remove(&number);
        self.known.get_mut(&number).is_some_and(|known| std::mem::replace(&mut known.is_served, false))
    }

    /// Removes a region, a window or a reservation. Its number may be used again, with the next generation.
    pub(crate) fn remove(&mut self, number: u32) {
        self.known.remove(&number);
        if let Some(Window { to, ranges, .. }) = self.windows.remove(&number)
            && let Some(shown) = self.shown_to.get_mut(&to)
        {
            *shown -= ranges.all().len();
            if *shown == 0 {
                self.shown_to.remove(&to);
            }
        }
        let generation = &mut self.generations[number as usize];
        // A number that has had all generations is not used again.
        if let Some(next) = generation.checked_add(1) {
            *generation = next;
            self.free.push(number);
        }
    }

    /// The regions that peers may read or write without a window.
    pub(crate) fn descriptors(&self) -> Vec<RegionDescriptor> {
        let is_open = |known: &&Registered| known.is_served && known.descriptor.access != Access::Windows;
        let served = self.known.values().filter(is_open);
        let mut all: Vec<RegionDescriptor> = served.map(|known| known.descriptor).collect();
        all.sort_by_key(|region| region.number);
        all
    }

    /// The announcement of a region for all peers.
    pub(crate) fn news_of(&self, number: u32) -> Option<RegionNews> {
        let known = self.known.get(&number)?;
        let Registered { descriptor, memory, keys, .. } = known;
        Some(match known.is_served {
            true => RegionNews::Here { region: *descriptor, memory: *memory, keys: keys.clone() },
            false => RegionNews::Gone { number, generation: descriptor.generation },
        })
    }

    /// The announcements of everything for a peer that has just connected: all regions, and the windows opened for it.
    pub(crate) fn news(&self, peer: Identity) -> Vec<RegionNews> {
        let mut served: Vec<u32> =
            self.known.iter().filter(|(_, known)| known.is_served).map(|(number, _)| *number).collect();
        served.sort_unstable();
        let mut news: Vec<RegionNews> =
            served.into_iter().filter_map(|number| self.news_of(number)).collect();
        let mut open: Vec<u32> =
            self.windows.iter().filter(|(_, window)| window.to == peer).map(|(number, _)| *number).collect();
        open.sort_unstable();
        news.extend(open.into_iter().flat_map(|number| self.news_of_window(number)));
        news
    }

    /// The announcement of a window for its peer.
    pub(crate) fn news_of_window(&self, number: u32) -> Vec<RegionNews> {
        let Some(Window { generation, memory, ranges, is_served, .. }) = self.windows.get(&number) else {
            return Vec::new();
        };
        match is_served {
            true => window_news(number, *generation, *memory, ranges.all()),
            false => vec![RegionNews::Gone { number, generation: *generation }],
        }
    }

    /// The memory that holds all of these ranges.
    ///
    /// # Errors
    /// A range is not registered, or lies in another memory than the first.
    pub(crate) fn memory_of(&self, ranges: &Ranges) -> Result<Memory, WindowRefused> {
        let mut memory = None;
        for WindowRange { region, offset, len } in ranges.all() {
            let known = self.known.get(region).filter(|known| known.is_served);
            let known = known.filter(|known| known.spot(*offset, *len).is_some());
            let known = known.ok_or(WindowRefused::NotInOneMemory)?;
            if *memory.get_or_insert(known.memory) != known.memory {
                return Err(WindowRefused::NotInOneMemory);
            }
        }
        memory.ok_or(WindowRefused::NotInOneMemory)
    }

    /// Lets a peer read these ranges, under a reserved number.
    ///
    /// # Errors
    /// A range is no longer registered, or the peer's windows would have more than [`PEER_RANGES_MAX`] ranges.
    pub(crate) fn open_window(
        &mut self,
        number: u32,
        to: Identity,
        ranges: Ranges,
    ) -> Result<(), WindowRefused> {
        let memory = self.memory_of(&ranges)?;
        let shown_to = self.shown_to.entry(to).or_default();
        let all = *shown_to + ranges.all().len();
        if all > PEER_RANGES_MAX {
            return Err(WindowRefused::PeerFull);
        }
        *shown_to = all;
        let generation = self.generations[number as usize];
        let spot = |range: &WindowRange| self.known.get(&range.region)?.spot(range.offset, range.len);
        let shown = disjoint(ranges.all().iter().filter_map(spot).collect());
        self.windows.insert(number, Window { generation, to, memory, ranges, shown, is_served: true });
        Ok(())
    }

    /// Refuses requests for a window from now on. Returns its generation and its peer. None: there is no such window, or
    /// another thread closes it already.
    pub(crate) fn stop_serving_window(&mut self, number: u32) -> Option<(u32, Identity)> {
        let window = self.windows.get_mut(&number).filter(|window| window.is_served)?;
        window.is_served = false;
        Some((window.generation, window.to))
    }

    /// Whether this number names a window of this generation, open or being closed.
    pub(crate) fn is_window(&self, number: u32, generation: u32) -> bool {
        self.windows.get(&number).is_some_and(|window| window.generation == generation)
    }

    /// The peer of a window, and the addresses of its bytes.
    pub(crate) fn shown(&self, number: u32) -> Option<(Identity, Spots<'_>)> {
        let window = self.windows.get(&number)?;
        Some((window.to, Spots::of(&window.shown)))
    }

    /// Windows with ranges of a region, in the order of their numbers.
    pub(crate) fn windows_of(&self, region: u32) -> Vec<u32> {
        let shows = |window: &Window| window.ranges.all().iter().any(|range| range.region == region);
        let mut found: Vec<u32> =
            self.windows.iter().filter(|(_, window)| shows(window)).map(|(number, _)| *number).collect();
        found.sort_unstable();
        found
    }

    /// Windows that are open or being closed.
    pub(crate) fn windows(&self) -> usize {
        self.windows.len()
    }

    /// A region as [`crate::Registrar`] gets it.
    pub(crate) fn seen(&self, number: u32) -> Option<MemoryRegion> {
        let Registered { descriptor, base, memory, .. } = self.known.get(&number)?;
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

    /// Whether any region is, or ever was, on a GPU: a transfer of it may still wait for its path.
    pub(crate) fn has_had_gpus(&self) -> bool {
        self.has_had_gpus
    }

    /// All bytes of a region.
    pub(crate) fn all_of(&self, number: u32) -> Option<Spot> {
        let known = self.known.get(&number)?;
        known.spot(0, known.descriptor.len)
    }

    /// Bytes of a region for a transfer of this process, also while the region is being given back. The transfer must count as a
    /// use of the region.
    pub(crate) fn own(&self, number: u32, offset: u64, len: u64) -> Option<Spot> {
        self.known.get(&number)?.spot(offset, len)
    }

    /// Adds the addresses of the bytes that a peer asks for to `spots`. None: the request is refused, and `spots` may have got
    /// some of them.
    pub(crate) fn for_peer(&self, peer: Identity, wanted: Wanted, spots: &mut Vec<Spot>) -> Option<()> {
        let Wanted { region, generation, offset, len, is_write } = wanted;
        if let Some(known) = self.known.get(&region) {
            let may = match known.descriptor.access {
                Access::Read => !is_write,
                Access::ReadWrite => true,
                Access::Windows => false,
            };
            let is_it = known.is_served && known.descriptor.generation == generation;
            spots.push(known.spot(offset, len).filter(|_| may && is_it)?);
            return Some(());
        }
        let window = self.windows.get(&region)?;
        if !window.is_served || window.generation != generation || window.to != peer || is_write {
            return None;
        }
        for part in window.ranges.cut(offset, len)? {
            spots.push(self.known.get(&part.region)?.spot(part.offset, part.len)?);
        }
        Some(())
    }
}

impl Registered {
    fn spot(&self, offset: u64, len: u64) -> Option<Spot> {
        let end = offset.checked_add(len)?;
        let piece = || Piece { address: self.base + offset as usize, len: len as usize };
        let gpu = match self.memory {
            Memory::Gpu(number) => Some(number),
            Memory::Host(_) => None,
        };
        (end <= self.descriptor.len).then(|| Spot { piece: piece(), gpu })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    const PEER: Identity = Identity { engine: 1, boot: 2 };

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
        let spot = |address, len| Some(vec![Spot { piece: Piece { address, len }, gpu: None }]);
        let asked = |regions: &Regions, region, generation, offset, len, is_write| {
            let mut spots = Vec::new();
            let wanted = Wanted { region, generation, offset, len, is_write };
            regions.for_peer(PEER, wanted, &mut spots).map(|()| spots)
        };
        assert_eq!(asked(&regions, first, 0, 10, 90, false), spot(0x1000 + 10, 90));
        assert_eq!(asked(&regions, first, 0, 10, 91, false), None, "one byte too many");
        assert_eq!(asked(&regions, first, 0, u64::MAX, 2, false), None);
        assert_eq!(asked(&regions, first, 0, 0, 1, true), None, "it is only to be read");
        assert_eq!(asked(&regions, second, 1, 0, 1, true), None, "another generation");
        assert!(asked(&regions, second, 0, 0, 50, true).is_some());
        let before = regions.shapes();
        assert!(regions.stop_serving(second));
        assert!(!regions.stop_serving(second), "once");
        assert!(before.contains_key(&second) && !regions.shapes().contains_key(&second));
        assert_eq!(asked(&regions, second, 0, 0, 50, true), None);
        assert_eq!(regions.news_of(second), Some(RegionNews::Gone { number: second, generation: 0 }));
        assert!(regions.own(second, 0, 50).is_some(), "a transfer under way goes on");
        regions.remove(second);
        assert_eq!(add(&mut regions, 0x3000, 50, Access::ReadWrite), second);
        assert_eq!(asked(&regions, second, 0, 0, 1, true), None, "of the former region of this number");
        assert!(asked(&regions, second, 1, 0, 1, true).is_some());
        assert_eq!(regions.descriptors().len(), 2);
        assert_eq!(regions.shapes()[&second].generation, 1);
    }

    #[test]
    fn only_its_peer_reads_through_a_window_until_it_is_closed() {
        let mut regions = Regions::default();
        let first = add(&mut regions, 0x1000, 100, Access::Windows);
        let second = add(&mut regions, 0x2000, 50, Access::ReadWrite);
        let range = |region, offset, len| WindowRange { region, offset, len };
        let ranges = Ranges::new(vec![range(first, 90, 10), range(second, 5, 20)]).unwrap();
        let (number, _) = regions.reserve().unwrap();
        regions.open_window(number, PEER, ranges.clone()).unwrap();
        let asked = |regions: &Regions, peer, region, generation, offset, len, is_write| {
            let mut spots = Vec::new();
            let wanted = Wanted { region, generation, offset, len, is_write };
            regions.for_peer(peer, wanted, &mut spots).map(|()| spots)
        };
        let spot = |address, len| Spot { piece: Piece { address, len }, gpu: None };
        let read = |regions: &Regions, offset, len| asked(regions, PEER, number, 0, offset, len, false);
        assert_eq!(read(&regions, 0, 30), Some(vec![spot(0x1000 + 90, 10), spot(0x2000 + 5, 20)]));
        assert_eq!(read(&regions, 9, 2), Some(vec![spot(0x1000 + 99, 1), spot(0x2000 + 5, 1)]));
        assert_eq!(read(&regions, 10, 21), None, "one byte too many");
        assert_eq!(asked(&regions, PEER, first, 0, 90, 1, false), None, "not without the window");
        assert_eq!(asked(&regions, PEER, number, 0, 0, 1, true), None, "it is only to be read");
        assert_eq!(asked(&regions, PEER, number, 1, 0, 1, false), None, "another generation");
        let other = Identity { boot: 3, ..PEER };
        assert_eq!(asked(&regions, other, number, 0, 0, 1, false), None, "another start of the peer");
        assert!(!regions.shapes().contains_key(&number), "it is no memory of this process's own");
        assert_eq!(regions.windows_of(second), [number]);
        let told = |regions: &Regions, peer| regions.news(peer).len();
        assert_eq!((told(&regions, PEER), told(&regions, other)), (3, 2));
        assert_eq!(regions.descriptors().len(), 1, "what only windows show has no place in a descriptor");
        assert_eq!(regions.stop_serving_window(number), Some((0, PEER)));
        assert_eq!(regions.stop_serving_window(number), None, "once");
        assert_eq!(read(&regions, 0, 30), None);
        assert_eq!(regions.news_of_window(number), [RegionNews::Gone { number, generation: 0 }]);
        regions.remove(number);
        assert_eq!((regions.reserve(), regions.windows()), (Some((number, 1)), 0));
        assert!(regions.stop_serving(first));
        assert!(regions.open_window(number, PEER, ranges).is_err(), "a range of it is being given back");
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
