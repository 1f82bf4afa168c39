//! [`Staging`]: bounded memory on huge pages, through which a device's transfers go if that is faster than to and from the pool.
//!
//! ```text
//!  device --read--> slot: | header | shard | shard |  --copied while its checksum is taken--> pool
//!  device <--write- slot: | header | shard | header | shard |  <--copied-- pool
//! ```
//!
//! A slot holds a record, or a batch of records, as the file has it: one piece of memory, and physically in runs of 2 MiB. A slot
//! belongs to one transfer, from [`Staging::take`] until [`Staging::release`].
#![expect(unsafe_code, reason = "hands out parts of one mapping")]

use std::collections::BTreeMap;
use std::io;

use kvlane_memory::{HugeMemory, copy_streaming};

use crate::io::Piece;
use crate::layout::PAGE_BYTES;

const PAGE: usize = PAGE_BYTES as usize;

/// The staging memory of one device.
pub(crate) struct Staging {
    memory: HugeMemory,
    free: FreePages,
    /// Pages of slots for writes.
    writing: u32,
}

/// Whether a slot holds bytes from the device or for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotUse {
    Read,
    Write,
}

/// A part of the memory. The owner of the value owns the bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    first: u32,
    pages: u32,
    used_for: SlotUse,
}

impl Staging {
    /// Allocates and faults in this many bytes, rounded up to 2 MiB.
    pub(crate) fn new(bytes: usize) -> io::Result<Staging> {
        let memory = HugeMemory::new(bytes)?;
        let pages = u32::try_from(memory.bytes() / PAGE).map_err(|_| io::ErrorKind::OutOfMemory)?;
        Ok(Staging { memory, free: FreePages::new(pages), writing: 0 })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.memory.bytes() as u64
    }

    /// Whether most of the memory is on huge pages. Without them it is no faster than the pool.
    pub(crate) fn is_huge(&self) -> bool {
        self.memory.huge_bytes() >= self.bytes() / 2
    }

    /// All memory, to be registered with io_uring.
    pub(crate) fn memory(&self) -> Piece {
        Piece { address: self.memory.base(), bytes: self.memory.bytes() }
    }

    /// Whether writes of so many bytes have to wait for slots of other writes. Writes get half of the memory, so that reads find
    /// room. They wait for room for a whole operation, because small ones are slow; a write that is larger than the half never
    /// fits, and does not wait.
    pub(crate) fn write_waits(&self, bytes: u64, op_bytes: usize) -> bool {
        let half = self.bytes() / 2;
        bytes <= half
            && self.writing > 0
            && u64::from(self.writing) * PAGE_BYTES + bytes.max(op_bytes as u64) > half
    }

    /// Size of write operations, of at most `most` bytes: a batch, which has up to half as much more, fits into the half for
    /// writes.
    pub(crate) fn write_op_bytes(&self, most: usize) -> usize {
        most.min((self.bytes() / 3) as usize)
    }

    /// Takes a slot of at least `bytes`. None if no run of free pages is long enough: the transfer then goes straight to or from
    /// the pool.
    pub(crate) fn take(&mut self, bytes: u64, used_for: SlotUse) -> Option<Slot> {
        let pages = u32::try_from(bytes.div_ceil(PAGE_BYTES)).ok()?;
        if used_for == SlotUse::Write && u64::from(self.writing + pages) * PAGE_BYTES > self.bytes() / 2 {
            return None;
        }
        let first = self.free.take(pages)?;
        if used_for == SlotUse::Write {
            self.writing += pages;
        }
        Some(Slot { first, pages, used_for })
    }

    /// Returns a slot, which no operation may use any more.
    pub(crate) fn release(&mut self, slot: Slot) {
        if slot.used_for == SlotUse::Write {
            self.writing -= slot.pages;
        }
        self.free.release(slot.first, slot.pages);
    }

    /// The slot's first `bytes` bytes, as an operation takes them.
    pub(crate) fn piece(&self, slot: &Slot, bytes: usize) -> Piece {
        assert!(bytes <= slot.pages as usize * PAGE, "{bytes} bytes of a slot of {} pages", slot.pages);
        Piece { address: self.memory.base().wrapping_add(slot.first as usize * PAGE), bytes }
    }

    /// The slot's bytes. Never call this while an operation may write them.
    pub(crate) fn slot_bytes(&self, slot: &Slot) -> &[u8] {
        let Piece { address, bytes } = self.piece(slot, slot.pages as usize * PAGE);
        // SAFETY: the slot lies inside the memory, which is mapped and initialised, and belongs to the caller alone.
        unsafe { std::slice::from_raw_parts(address, bytes) }
    }

    /// Copies these pieces of memory into the slot, one after the other.
    ///
    /// # Safety
    /// The pieces are readable, and nothing writes to them during the call.
    pub(crate) unsafe fn fill(&mut self, slot: &Slot, pieces: &[Piece]) {
        let total: usize = pieces.iter().map(|piece| piece.bytes).sum();
        let mut to = self.piece(slot, total).address;
        for piece in pieces {
            // SAFETY: `piece` above checked that the slot has room for all pieces. It is no part of the pool, so the
            // ranges do not overlap; the caller vouches for the source.
            unsafe {
                copy_streaming(piece.address, to, piece.bytes);
                to = to.add(piece.bytes);
            }
        }
    }
}

/// Which pages are free, as runs: first page to length. Neighbouring runs are one.
#[derive(Debug)]
struct FreePages(BTreeMap<u32, u32>);

impl FreePages {
    fn new(pages: u32) -> FreePages {
        FreePages(BTreeMap::from([(0, pages)]))
    }

    /// Takes the first run that is long enough. The map is short: a run lies between two slots.
    fn take(&mut self, pages: u32) -> Option<u32> {
        let (&first, &length) = self.0.iter().find(|&(_, &length)| length >= pages.max(1))?;
        self.0.remove(&first);
        if length > pages {
            self.0.insert(first + pages, length - pages);
        }
        Some(first)
    }

    fn release(&mut self, first: u32, pages: u32) {
        let (mut first, mut pages) = (first, pages);
        if let Some((&before, &length)) = self.0.range(..first).next_back()
            && before + length == first
        {
            self.0.remove(&before);
            (first, pages) = (before, length + pages);
        }
        if let Some(length) = self.0.remove(&(first + pages)) {
            pages += length;
        }
        self.0.insert(first, pages);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn writes_leave_half_of_it_to_reads() {
        let mut staging = Staging::new(2 << 20).unwrap();
        let write = staging.take(1 << 20, SlotUse::Write).unwrap();
        assert!(staging.write_waits(4096, 0) && staging.take(4096, SlotUse::Write).is_none());
        assert!(!staging.write_waits((1 << 20) + 1, 0), "it would wait for ever");
        staging.release(write);
        let write = staging.take(512 << 10, SlotUse::Write).unwrap();
        assert!(!staging.write_waits(512 << 10, 512 << 10));
        assert!(staging.write_waits(4096, 1 << 20), "there is room for less than an operation");
        staging.release(write);
        let write = staging.take(1 << 20, SlotUse::Write).unwrap();
        let read = staging.take(1 << 20, SlotUse::Read).unwrap();
        assert!(staging.take(1, SlotUse::Read).is_none());
        staging.release(write);
        assert!(!staging.write_waits(1 << 20, 1 << 20));
        staging.release(read);
        assert!(staging.take(2 << 20, SlotUse::Read).is_some());
    }

    #[test]
    fn a_slot_is_filled_with_one_piece_after_the_other() {
        let mut staging = Staging::new(1).unwrap();
        let (a, b) = (vec![1u8; 4096], vec![2u8; 8192]);
        let pieces = [&a, &b].map(|from| Piece { address: from.as_ptr().cast_mut(), bytes: from.len() });
        let slot = staging.take(12288, SlotUse::Write).unwrap();
        // SAFETY: both vectors live, and nothing writes them.
        unsafe { staging.fill(&slot, &pieces) };
        assert_eq!(staging.slot_bytes(&slot), [a, b].concat());
    }

    proptest! {
        #[test]
        fn slots_never_overlap_and_all_pages_come_back(steps in prop::collection::vec((0u32..40, any::<prop::sample::Index>()), 1..200)) {
            let mut free = FreePages::new(256);
            let mut taken: Vec<(u32, u32)> = Vec::new();
            for (pages, which) in steps {
                if pages == 0 && !taken.is_empty() {
                    let (first, pages) = taken.swap_remove(which.index(taken.len()));
                    free.release(first, pages);
                } else if let Some(first) = free.take(pages.max(1)) {
                    let pages = pages.max(1);
                    prop_assert!(first + pages <= 256);
                    prop_assert!(taken.iter().all(|&(other, length)| first + pages <= other || other + length <= first));
                    taken.push((first, pages));
                }
            }
            for (first, pages) in taken {
                free.release(first, pages);
            }
            prop_assert_eq!(free.0, BTreeMap::from([(0, 256)]));
        }
    }
}
