//! Splits a load among links: the GPU's own, and those of rails. Pure.

use kvlane_block::{Contiguous, push_run};

use crate::driver::Copy;
use crate::plan::KERNEL_ALIGNMENT;

/// Copies that go over another GPU: gathered into a slot of its memory, and scattered from there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Chunk {
    /// Host to slot, in long runs; the destinations are offsets in the slot.
    gather: Vec<Copy>,
    /// Slot to destination; the sources are offsets in the slot.
    scatter: Vec<Copy>,
}

/// The share of each link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shares {
    /// Over the GPU's own link.
    pub direct: Vec<Copy>,
    /// Over each other GPU, chunk by chunk.
    pub relayed: Vec<Vec<Chunk>>,
}

impl Chunk {
    /// The copies that fill a slot at this address.
    pub fn gather(&self, slot: u64) -> Vec<Copy> {
        self.gather.iter().map(|copy| Copy { dst: slot + copy.dst, ..*copy }).collect()
    }

    /// The copies that empty a slot at this address.
    pub fn scatter(&self, slot: u64) -> Vec<Copy> {
        self.scatter.iter().map(|copy| Copy { src: slot + copy.src, ..*copy }).collect()
    }

    /// Bytes that the chunk brings to their destination.
    pub fn bytes(&self) -> u64 {
        self.scatter.iter().map(|copy| copy.len).sum()
    }

    /// Appends a copy of at most a slot. Returns the copy if the slot has no room for it.
    fn push(&mut self, copy: Copy, slot_bytes: u64) -> Option<Copy> {
        let used = self.gather.last().map_or(0, |run| run.dst + run.len);
        let follows = self.gather.last().is_some_and(|run| run.is_continued_by(&Copy { dst: used, ..copy }));
        // The start of a run is aligned, so that the kernel can read the copies of an aligned source.
        let place = if follows { used } else { used.next_multiple_of(KERNEL_ALIGNMENT) };
        if place + copy.len > slot_bytes {
            return Some(copy);
        }
        push_run(&mut self.gather, Copy { dst: place, ..copy });
        self.scatter.push(Copy { src: place, ..copy });
        None
    }
}

/// Cuts a list into shares of about equal bytes: the first is for the GPU's own link, the others are for `rails` other
/// GPUs. The list keeps its order, so neighbours in the host's memory stay together. A share ends between two copies, and
/// only a copy that no slot holds is cut.
pub fn split(copies: &[Copy], rails: usize, slot_bytes: u64) -> Shares {
    let mut shares = Shares { direct: Vec::new(), relayed: vec![Vec::new(); rails] };
    for (link, copy) in deal(copies, rails + 1, slot_bytes) {
        match link.checked_sub(1).and_then(|rail| shares.relayed.get_mut(rail)) {
            Some(chunks) => append(chunks, copy, slot_bytes),
            None => shares.direct.push(copy),
        }
    }
    shares
}

/// The same if each share goes over a GPU's memory. Lists of equal sources and lengths are cut alike.
pub fn split_among(copies: &[Copy], rings: usize, slot_bytes: u64) -> Vec<Vec<Chunk>> {
    let mut shares = vec![Vec::new(); rings];
    for (link, copy) in deal(copies, rings, slot_bytes) {
        if let Some(chunks) = shares.get_mut(link) {
            append(chunks, copy, slot_bytes);
        }
    }
    shares
}

/// A list in parts of at least `part_bytes`, except the last, in its order.
pub fn parts(copies: &[Copy], part_bytes: u64) -> impl Iterator<Item = &[Copy]> {
    let mut bytes = 0;
    copies.split_inclusive(move |copy| {
        bytes += copy.len;
        let full = bytes >= part_bytes;
        if full {
            bytes = 0;
        }
        full
    })
}

/// The link of each copy, none of which is longer than a slot.
fn deal(copies: &[Copy], links: usize, slot_bytes: u64) -> impl Iterator<Item = (usize, Copy)> {
    let total: u128 = copies.iter().map(|copy| u128::from(copy.len)).sum();
    let mut before: u128 = 0;
    copies.iter().flat_map(move |copy| pieces(*copy, slot_bytes)).map(move |copy| {
        // Below `links`, because the bytes before a copy that is not empty are fewer than the total.
        let link = (before * links as u128 / total) as usize;
        before += u128::from(copy.len);
        (link, copy)
    })
}

fn append(chunks: &mut Vec<Chunk>, copy: Copy, slot_bytes: u64) {
    let left = match chunks.last_mut() {
        Some(chunk) => chunk.push(copy, slot_bytes),
        None => Some(copy),
    };
    if let Some(copy) = left {
        let mut chunk = Chunk::default();
        chunk.push(copy, slot_bytes);
        chunks.push(chunk);
    }
}

/// A copy in pieces that a slot holds; an empty copy has none.
fn pieces(copy: Copy, slot_bytes: u64) -> impl Iterator<Item = Copy> {
    (0..copy.len.div_ceil(slot_bytes)).map(move |piece| {
        let done = piece * slot_bytes;
        Copy { dst: copy.dst + done, src: copy.src + done, len: slot_bytes.min(copy.len - done) }
    })
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn copy(dst: u64, src: u64, len: u64) -> Copy {
        Copy { dst, src, len }
    }

    #[test]
    fn layers_of_a_block_are_one_run_to_the_slot_and_scattered_from_there() {
        // Two blocks of two layers, the blocks apart in the pool and the layers apart in the engine.
        let copies = [copy(1000, 0, 64), copy(5000, 64, 64), copy(1064, 4096, 64), copy(5064, 4160, 64)];
        let shares = split(&copies, 1, 1024);
        assert_eq!(shares.direct, copies[..2]);
        let [chunk] = &shares.relayed[0][..] else { panic!("{shares:?}") };
        assert_eq!(chunk.gather(1 << 20), [copy(1 << 20, 4096, 128)]);
        assert_eq!(chunk.scatter(1 << 20), [copy(1064, 1 << 20, 64), copy(5064, (1 << 20) + 64, 64)]);
        assert_eq!(chunk.bytes(), 128);
    }

    #[test]
    fn a_copy_longer_than_a_slot_is_cut_and_shared() {
        let shares = split(&[copy(0, 10_000, 1000)], 3, 64);
        assert_eq!(shares.direct.len(), 4);
        assert_eq!(shares.relayed.iter().map(Vec::len).collect::<Vec<_>>(), [4, 4, 4]);
        assert_eq!(split(&[], 3, 64), Shares { direct: vec![], relayed: vec![vec![]; 3] });
        assert_eq!(split(&[copy(0, 0, 0)], 0, 64), Shares { direct: vec![], relayed: vec![] });
    }

    proptest! {
        #[test]
        fn shares_are_the_list_in_about_equal_parts(
            lens in vec((0..3000u64, 0..3u64), 0..60),
            rails in 0..5usize,
            slot_bytes in (1..100u64).prop_map(|units| units * 16),
        ) {
            let mut src = 0;
            let copies: Vec<Copy> = lens.iter().map(|(len, gap)| {
                src += gap * 8;
                let made = copy(1_000_000 + 2 * src, src, *len);
                src += len;
                made
            }).collect();
            let shares = split(&copies, rails, slot_bytes);

            // Every byte of the list once, in its order.
            let bytes = |copies: &[Copy]| -> Vec<(u64, u64)> {
                copies.iter().flat_map(|copy| (0..copy.len).map(|at| (copy.dst + at, copy.src + at))).collect()
            };
            let mut moved = bytes(&shares.direct);
            for chunk in shares.relayed.iter().flatten() {
                // A slot at 0: each byte scattered from it was gathered there before.
                let gathered: std::collections::HashMap<u64, u64> = bytes(&chunk.gather(0)).into_iter().collect();
                let ends = chunk.gather(0).iter().map(|run| run.dst + run.len).max();
                prop_assert!(ends.is_some_and(|end| end <= slot_bytes));
                moved.extend(bytes(&chunk.scatter(0)).into_iter().map(|(dst, slot)| (dst, gathered[&slot])));
            }
            prop_assert_eq!(moved, bytes(&copies));

            let total: u64 = copies.iter().map(|copy| copy.len).sum();
            let longest = copies.iter().map(|copy| copy.len.min(slot_bytes)).max().unwrap_or(0);
            let fair = total / (rails as u64 + 1);
            let relayed = shares.relayed.iter().map(|chunks| chunks.iter().map(Chunk::bytes).sum());
            for share in relayed.chain([shares.direct.iter().map(|copy| copy.len).sum::<u64>()]) {
                prop_assert!(share.abs_diff(fair) <= longest + 1, "{share} of {total}, {rails} rails");
            }
        }

        #[test]
        fn aligned_copies_stay_aligned_in_the_slot(
            units in vec((1..40u64, 0..2u64), 1..60), rails in 1..4usize,
        ) {
            let mut src = 0;
            let copies: Vec<Copy> = units.iter().map(|(units, gap)| {
                src += gap * 16;
                let made = copy(4 * src, src, units * 16);
                src += units * 16;
                made
            }).collect();
            for chunk in split(&copies, rails, 4096).relayed.iter().flatten() {
                for Copy { dst, src, len } in chunk.scatter(0) {
                    prop_assert!((dst | src | len).is_multiple_of(KERNEL_ALIGNMENT));
                }
            }
        }
    }
}
