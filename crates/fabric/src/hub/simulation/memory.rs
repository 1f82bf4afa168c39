//! The memory of all processes, which checks every access. No transfer may touch memory after it has ended, and none may
//! touch a region that was given back.

use std::collections::HashMap;

use crate::carrier::Touched;
use crate::ranges::{Piece, Spot};
use crate::transfers::{Memory as Kind, Op, Ticket};

/// Each process's memory has so many areas. An area is one region at a time.
pub(super) const AREAS: usize = 5;
pub(super) const SLICES: usize = 6;
/// Bytes that one piece of a transfer has to itself, on each side.
pub(super) const SLICE: usize = 64;
pub(super) const AREA: usize = SLICES * SLICE;

/// Names a transfer: the process that began it, and the ticket there.
pub(super) type TransferName = (usize, Ticket);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RegionState {
    Registered,
    /// Being given back: the owner waits until nothing touches it.
    Releasing,
    /// Given back; the memory is in other use.
    Gone,
}

/// Every region that was ever registered.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) process: usize,
    pub(super) area: usize,
    pub(super) number: u32,
    pub(super) generation: u32,
    pub(super) is_writable: bool,
    pub(super) kind: Kind,
    pub(super) state: RegionState,
    /// Slices that belong to a transfer.
    pub(super) taken: [bool; SLICES],
}

/// A slice of a region, which belongs to one transfer at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slice {
    pub(super) region: usize,
    pub(super) slice: usize,
}

/// Bytes of a transfer that are contiguous on both sides. `remote` is None if the peer has given the region back.
#[derive(Debug, Clone, Copy)]
pub(super) struct PieceAt {
    pub(super) local: Slice,
    pub(super) remote: Option<Slice>,
    pub(super) offset: usize,
    pub(super) len: usize,
}

#[derive(Debug, Default)]
pub(super) struct WorldMemory {
    bytes: Vec<Vec<u8>>,
    /// The region of each area of each process, also while it is being given back.
    areas: Vec<[Option<usize>; AREAS]>,
    pub(super) regions: Vec<Region>,
    /// Whether each transfer has ended.
    is_over: HashMap<TransferName, bool>,
    /// Processes that closed their engine or were killed. Their bytes in flight may still arrive at others.
    is_closed: Vec<bool>,
    /// Closed processes whose own memory is not checked any more.
    is_unwatched: Vec<bool>,
    scribbles: u8,
}

impl WorldMemory {
    pub(super) fn add_process(&mut self) {
        self.bytes.push(vec![0; AREAS * AREA]);
        self.areas.push([None; AREAS]);
        self.is_closed.push(false);
        self.is_unwatched.push(false);
    }

    pub(super) fn free_areas(&self, process: usize) -> Vec<usize> {
        (0..AREAS).filter(|area| self.areas[process][*area].is_none()).collect()
    }

    pub(super) fn add_region(&mut self, region: Region) -> usize {
        self.areas[region.process][region.area] = Some(self.regions.len());
        self.scribble(region.process, region.area * AREA, AREA);
        self.regions.push(region);
        self.regions.len() - 1
    }

    /// Gives a region back. Its memory is in other use at once.
    pub(super) fn give_back(&mut self, region: usize) {
        let Region { process, area, .. } = self.regions[region];
        self.regions[region].state = RegionState::Gone;
        self.areas[process][area] = None;
        self.scribble(process, area * AREA, AREA);
    }

    pub(super) fn live_regions(&self, process: usize) -> Vec<usize> {
        let is_live = |index: &usize| self.regions[*index].state == RegionState::Registered;
        self.areas[process].iter().flatten().copied().filter(is_live).collect()
    }

    pub(super) fn take_slice(&mut self, region: usize, dice: u64) -> Option<Slice> {
        let free: Vec<usize> = (0..SLICES).filter(|slice| !self.regions[region].taken[*slice]).collect();
        let slice = *free.get(dice as usize % free.len().max(1))?;
        self.regions[region].taken[slice] = true;
        Some(Slice { region, slice })
    }

    /// Begins a transfer: fills the source with the bytes that the destination must have at the end.
    pub(super) fn begin(&mut self, whose: TransferName, op: Op, pieces: &[PieceAt]) {
        self.is_over.insert(whose, false);
        for (index, piece) in pieces.iter().enumerate() {
            let sides = [Some(piece.local), piece.remote];
            let (source, to) = if op == Op::Write { (sides[0], sides[1]) } else { (sides[1], sides[0]) };
            for (slice, is_source) in [(source, true), (to, false)] {
                let Some((process, at)) = slice.and_then(|slice| self.place(slice, piece.offset)) else {
                    continue;
                };
                for byte in 0..piece.len {
                    let right = pattern(whose, index, byte);
                    self.bytes[process][at + byte] = if is_source { right } else { !right };
                }
            }
        }
    }

    /// Whether all bytes of a transfer are in place. Regions given back meanwhile do not count.
    pub(super) fn is_placed(&self, whose: TransferName, op: Op, pieces: &[PieceAt]) -> bool {
        pieces.iter().enumerate().all(|(index, piece)| {
            let to = if op == Op::Write { piece.remote } else { Some(piece.local) };
            let Some((process, at)) = to.and_then(|slice| self.place(slice, piece.offset)) else {
                return true;
            };
            (0..piece.len).all(|byte| self.bytes[process][at + byte] == pattern(whose, index, byte))
        })
    }

    /// Ends a transfer: its slices on both sides are in other use at once. If the process that began it is closed, the peer's
    /// slices get no new transfer, because bytes in flight may still arrive there.
    pub(super) fn end(&mut self, whose: TransferName, pieces: &[PieceAt]) {
        self.is_over.insert(whose, true);
        for slice in pieces.iter().flat_map(|piece| [Some(piece.local), piece.remote]).flatten() {
            let may_arrive = self.is_closed[whose.0] && self.regions[slice.region].process != whose.0;
            self.regions[slice.region].taken[slice.slice] = may_arrive;
            if let Some((process, at)) = self.place(slice, 0) {
                self.scribble(process, at, SLICE);
            }
        }
    }

    pub(super) fn close(&mut self, process: usize, is_unwatched: bool) {
        self.is_closed[process] = true;
        self.is_unwatched[process] |= is_unwatched;
    }

    fn place(&self, slice: Slice, offset: usize) -> Option<(usize, usize)> {
        let region = &self.regions[slice.region];
        let at = region.area * AREA + slice.slice * SLICE + offset;
        (region.state != RegionState::Gone).then_some((region.process, at))
    }

    /// Overwrites memory with bytes of another use.
    fn scribble(&mut self, process: usize, at: usize, len: usize) {
        self.scribbles = self.scribbles.wrapping_add(1);
        self.bytes[process][at..at + len].fill(self.scribbles);
    }

    /// Checks an access to the memory of the process that began a transfer.
    fn check_own(&self, whose: TransferName) -> Result<(), String> {
        if self.is_unwatched[whose.0] || self.is_over.get(&whose) == Some(&false) {
            return Ok(());
        }
        Err(format!("memory of process {} was touched after its transfer {:?} was over", whose.0, whose.1))
    }

    fn check_region(&self, process: usize, at: usize, what: (u32, u32)) -> Result<(), String> {
        let known = self.areas[process][at / AREA].map(|index| &self.regions[index]);
        if self.is_unwatched[process]
            || known.is_some_and(|region| (region.number, region.generation) == what)
        {
            return Ok(());
        }
        Err(format!("memory of process {process} was touched after its region {what:?} was given back"))
    }

    /// Reads bytes that this transfer writes to a peer.
    pub(super) fn read_own(&self, whose: TransferName, at: usize, len: usize) -> Result<Vec<u8>, String> {
        self.check_own(whose)?;
        Ok(self.bytes[whose.0][at..at + len].to_vec())
    }

    /// Places bytes that this transfer reads from a peer.
    pub(super) fn write_own(&mut self, whose: TransferName, at: usize, bytes: &[u8]) -> Result<(), String> {
        self.check_own(whose)?;
        self.bytes[whose.0][at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    /// Reads a region, named by (number, generation), for a peer.
    pub(super) fn read_region(
        &self,
        process: usize,
        at: usize,
        len: usize,
        what: (u32, u32),
    ) -> Result<Vec<u8>, String> {
        self.check_region(process, at, what)?;
        Ok(self.read_unasked(process, at, len))
    }

    /// Reads as a neighbour does: without asking, whatever is there.
    pub(super) fn read_unasked(&self, process: usize, at: usize, len: usize) -> Vec<u8> {
        self.bytes[process][at..at + len].to_vec()
    }

    /// Writes a process's region for this transfer of a peer.
    pub(super) fn write_region(
        &mut self,
        process: usize,
        at: usize,
        bytes: &[u8],
        what: (u32, u32),
        whose: TransferName,
    ) -> Result<(), String> {
        self.check_region(process, at, what)?;
        if self.is_over.get(&whose) != Some(&false) && !self.is_closed[whose.0] {
            return Err(format!("memory of process {process} was written after {whose:?} was over"));
        }
        self.bytes[process][at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
}

/// Whether these bytes lie in this memory.
pub(super) fn overlaps(memory: Touched<'_>, at: usize, len: usize) -> bool {
    let piece = Piece { address: at, len };
    // The simulated GPU has addresses of its own, so both kinds must be asked for.
    [None, Some(0)].into_iter().any(|gpu| memory.spots.overlap(Spot { piece, gpu }))
}

fn pattern(whose: TransferName, piece: usize, byte: usize) -> u8 {
    let (process, ticket) = whose;
    // A ticket's number is private, so its debug text has to do.
    let ticket = format!("{ticket:?}").bytes().fold(0u64, |sum, byte| sum.wrapping_mul(31) + u64::from(byte));
    (ticket.wrapping_mul(97) as usize + process * 59 + piece * 41 + byte * 7) as u8
}
