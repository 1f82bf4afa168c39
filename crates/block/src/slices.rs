//! Slices: a block that several workers hold alike is cut, so that each of them saves only a part.
//!
//! ```text
//!  one block, the same bytes in every worker: its regions one after the other
//!  +----------+----------+----------+----------+----------+
//!  | region 0 | region 1 | region 2 | region 3 | region 4 |
//!  +----------+----|-----+----------+-----|----+----------+
//!  |<-- slice 0 -->|<----- slice 1 ------>|<-- slice 2 -->|
//! ```

use crate::layout::{LayoutError, Region, shard_bytes};

/// Slices end at the borders of pieces, and inside a piece at multiples of this many bytes.
pub const SLICE_STEP: u64 = 512;

/// Cuts a block into `count` slices of about equal size. The regions of all slices, one after the other, are the block's
/// bytes in their order. Slices of valid regions are valid.
///
/// # Errors
/// [`LayoutError::TooSmall`] if there are not [`SLICE_STEP`] bytes for each slice.
pub fn slice(regions: &[Region], count: usize) -> Result<Vec<Vec<Region>>, LayoutError> {
    let bytes = shard_bytes(regions);
    // `u64::MAX` means that the sum has saturated.
    if count == 0 || bytes / SLICE_STEP < count as u64 || bytes == u64::MAX {
        return Err(LayoutError::TooSmall { bytes, slices: count });
    }
    let share = |index: usize| (u128::from(bytes) * index as u128 / count as u128) as u64;
    let mut from = 0;
    let slices = (1..=count).map(|index| {
        let to = border(regions, share(index));
        let part = part(regions, from, to);
        from = to;
        part
    });
    Ok(slices.collect())
}

/// The last byte offset in the block, up to `wanted`, where a slice may end. Two such offsets are at most `SLICE_STEP`
/// apart.
fn border(regions: &[Region], wanted: u64) -> u64 {
    let mut start = 0;
    for region in regions {
        let inside = wanted - start;
        if inside < region.block_bytes() {
            let in_piece = inside % region.piece_bytes;
            return wanted - in_piece % SLICE_STEP;
        }
        start += region.block_bytes();
    }
    start
}

/// The block's bytes from `from` to `to`.
fn part(regions: &[Region], from: u64, to: u64) -> Vec<Region> {
    let mut found = Vec::new();
    let mut start = 0;
    for region in regions {
        let end = start + region.block_bytes();
        let (first, last) = (from.max(start), to.min(end));
        if first < last {
            part_of_region(region, first - start, last - start, &mut found);
        }
        start = end;
    }
    found
}

/// A region's bytes of a block from `at` to `to`: the rest of a piece, whole pieces, the start of a piece.
fn part_of_region(region: &Region, mut at: u64, to: u64, found: &mut Vec<Region>) {
    let piece = region.piece_bytes;
    while at < to {
        let (index, inside) = ((at / piece) as usize, at % piece);
        let (bytes, offsets) = if inside == 0 && to - at >= piece {
            let whole = ((to - at) / piece) as usize;
            (piece, region.piece_offsets[index..index + whole].to_vec())
        } else {
            ((piece - inside).min(to - at), vec![region.piece_offsets[index] + inside])
        };
        at += bytes * offsets.len() as u64;
        found.push(Region { piece_bytes: bytes, piece_offsets: offsets, ..region.clone() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(base: u64, piece_bytes: u64) -> Region {
        Region { base, block_stride: piece_bytes, blocks: 8, piece_bytes, piece_offsets: vec![0] }
    }

    #[test]
    fn the_slices_of_a_latent_cache_are_even() {
        // DeepSeek-V3: 61 layers of 576 numbers of 2 bytes for each of 64 tokens.
        let layers: Vec<Region> = (0..61).map(|n| layer(n << 32, 576 * 2 * 64)).collect();
        let total = shard_bytes(&layers);
        for count in [2, 4, 8, 16] {
            let slices = slice(&layers, count).unwrap();
            assert_eq!(slices.iter().map(|part| shard_bytes(part)).sum::<u64>(), total);
            for part in &slices {
                let percent = shard_bytes(part) as f64 * 100.0 / total as f64;
                assert!((percent - 100.0 / count as f64).abs() < 0.1, "{percent} % in one of {count}");
                // Not finer than it has to be: whole layers but for the two ends.
                assert!(part.len() <= 61 / count + 2);
            }
        }
    }

    #[test]
    fn pieces_stay_whole_but_at_the_ends_of_a_slice() {
        let region = Region {
            base: 0x1000,
            block_stride: 8192,
            blocks: 4,
            piece_bytes: 1000,
            piece_offsets: vec![0, 2000, 4000, 6000],
        };
        let part = |bytes, offsets: &[u64]| Region {
            piece_bytes: bytes,
            piece_offsets: offsets.to_vec(),
            ..region.clone()
        };
        assert_eq!(
            slice(std::slice::from_ref(&region), 3).unwrap(),
            [
                vec![part(1000, &[0])],
                vec![part(1000, &[2000]), part(512, &[4000])],
                vec![part(488, &[4512]), part(1000, &[6000])],
            ]
        );
        assert_eq!(slice(std::slice::from_ref(&region), 1).unwrap(), [vec![region]]);
    }

    #[test]
    fn a_block_too_small_for_its_slices_is_refused() {
        assert_eq!(slice(&[layer(0, 2048)], 4).unwrap().len(), 4);
        let error = slice(&[layer(0, 2047)], 4).unwrap_err();
        assert_eq!(error, LayoutError::TooSmall { bytes: 2047, slices: 4 });
        assert!(
            error.to_string().contains("2047 bytes") && error.to_string().contains("4 slices"),
            "{error}"
        );
        assert!(slice(&[layer(0, 2048)], 0).is_err());
        let huge = Region { piece_bytes: u64::MAX, ..layer(0, 1) };
        assert!(slice(&[huge.clone(), huge], 2).is_err());
    }
}
