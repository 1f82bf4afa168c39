//! Is what was read what was written?
#![expect(unsafe_code, reason = "checksums are taken of the pool's bytes")]

use kvlane_block::{BlockKey, PoolExtent};

use crate::index::Location;
use crate::layout::{RecordHeader, ShardSum, Superblock};
use crate::memory::Memory;
use crate::request::{Miss, ReadEnd};

/// Looks at a record's header and at all its bytes.
///
/// # Safety
/// The extents are inside of the memory, and nobody writes to them during the call.
pub(crate) unsafe fn verify(
    superblock: &Superblock,
    generation: u64,
    location: &Location,
    key: &BlockKey,
    header: &[u8],
    into: &[PoolExtent],
    memory: &dyn Memory,
) -> ReadEnd {
    let Some(header) = identify(superblock, generation, location, key, header) else {
        return ReadEnd::Miss(Miss::Damaged);
    };
    let lengths = header.shards.iter().map(|shard| u64::from(shard.bytes));
    if !lengths.eq(into.iter().map(|extent| extent.bytes)) {
        return ReadEnd::Miss(Miss::Lengths);
    }
    for (ShardSum { crc, .. }, extent) in header.shards.iter().zip(into) {
        // SAFETY: inside of the memory, which is mapped, and not written, by the caller's promise.
        let bytes = unsafe {
            std::slice::from_raw_parts(memory.base().add(extent.offset.0 as usize), extent.bytes as usize)
        };
        if crc32c::crc32c(bytes) != *crc {
            return ReadEnd::Miss(Miss::Damaged);
        }
    }
    ReadEnd::Found { crcs: header.shards.iter().map(|shard| shard.crc).collect() }
}

/// The header, if it is the one that was written here for this block.
pub(crate) fn identify(
    superblock: &Superblock,
    generation: u64,
    location: &Location,
    key: &BlockKey,
    header: &[u8],
) -> Option<RecordHeader> {
    let header = RecordHeader::decode(header).ok()?;
    let here = superblock.is_of(&header.device_id)
        && header.generation == generation
        && header.segment == location.segment
        && header.page == location.page
        && header.key == *key
        && header.pages() == Some(location.pages);
    here.then_some(header)
}

/// Whether the shards that follow each other in `bytes`, each on pages of its own, are those that the header names.
pub(crate) fn shards_are_right(header: &RecordHeader, bytes: &[u8]) -> bool {
    let mut rest = bytes;
    header.shards.iter().all(|&ShardSum { bytes: length, crc }| {
        let pages = crate::layout::shard_pages(u64::from(length)) * crate::PAGE_BYTES;
        let Some((shard, behind)) = rest.split_at_checked(pages as usize) else { return false };
        rest = behind;
        crc32c::crc32c(&shard[..length as usize]) == crc
    })
}
