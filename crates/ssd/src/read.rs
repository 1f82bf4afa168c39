//! Verifies a record that was read: its header must name this block at this location, and every shard must have its
//! crc32c.
#![expect(unsafe_code, reason = "checksums are taken of the pool's bytes")]

use kvlane_block::{BlockKey, Crc32c, PoolExtent, crc32c};

use kvlane_memory::copy_streaming;

use crate::index::Location;
use crate::layout::{PAGE_BYTES, RecordHeader, ShardSum, Superblock, header_pages, shard_pages};
use crate::memory::Memory;
use crate::request::{Miss, ReadEnd};

/// Verifies the header and the shards of a record that was read into the pool.
///
/// # Safety
/// The extents are inside the memory, and nothing writes to them during the call.
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
        // SAFETY: by the caller's promise the extent is inside the memory, which is mapped, and nothing writes to it.
        let bytes = unsafe {
            std::slice::from_raw_parts(memory.base().add(extent.offset.0 as usize), extent.bytes as usize)
        };
        if crc32c(bytes) != *crc {
            return ReadEnd::Miss(Miss::Damaged);
        }
    }
    ReadEnd::Found { crcs: header.shards.iter().map(|shard| shard.crc).collect() }
}

/// Verifies a record that was read into staging, and copies its shards into the pool. The checksum is taken of each part of the
/// staged bytes just before it is copied.
///
/// # Safety
/// The extents are inside the memory, and nothing else reads or writes them during the call.
pub(crate) unsafe fn verify_staged(
    superblock: &Superblock,
    generation: u64,
    location: &Location,
    key: &BlockKey,
    record: &[u8],
    into: &[PoolExtent],
    memory: &dyn Memory,
) -> ReadEnd {
    let (header, mut rest) = record.split_at((header_pages(into.len()) * PAGE_BYTES) as usize);
    let Some(header) = identify(superblock, generation, location, key, header) else {
        return ReadEnd::Miss(Miss::Damaged);
    };
    let lengths = header.shards.iter().map(|shard| u64::from(shard.bytes));
    if !lengths.eq(into.iter().map(|extent| extent.bytes)) {
        return ReadEnd::Miss(Miss::Lengths);
    }
    for (ShardSum { crc, bytes }, extent) in header.shards.iter().zip(into) {
        let pages = (shard_pages(extent.bytes) * PAGE_BYTES) as usize;
        let (shard, behind) = rest.split_at(pages);
        rest = behind;
        // SAFETY: by the caller's promise the extent, whose length is that of the shard, is inside the memory, and nothing
        // else touches it. Staging is no part of the pool.
        let copied =
            unsafe { copy_checked(&shard[..*bytes as usize], memory.base().add(extent.offset.0 as usize)) };
        if copied != *crc {
            return ReadEnd::Miss(Miss::Damaged);
        }
    }
    ReadEnd::Found { crcs: header.shards.iter().map(|shard| shard.crc).collect() }
}

/// Bytes whose checksum is taken before they are copied. They are still in the core's first cache then.
const CHECKED_AT_ONCE: usize = 4096;

/// Takes the crc32c of the bytes while it copies them.
///
/// # Safety
/// `from.len()` bytes from `to` are writable, no part of `from`, and nothing else touches them during the call.
pub(crate) unsafe fn copy_checked(from: &[u8], to: *mut u8) -> u32 {
    let mut crc = Crc32c::new();
    for (number, part) in from.chunks(CHECKED_AT_ONCE).enumerate() {
        crc.update(part);
        // SAFETY: the part ends at most `from.len()` bytes behind `to`; the caller vouches for these bytes.
        unsafe { copy_streaming(part.as_ptr(), to.add(number * CHECKED_AT_ONCE), part.len()) };
    }
    crc.value()
}

/// Decodes a header, and returns it only if it was written at this location, in this generation, for this block.
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

/// Whether the shards in `bytes`, each beginning a page, have the lengths and checksums that the header names.
pub(crate) fn shards_are_right(header: &RecordHeader, bytes: &[u8]) -> bool {
    let mut rest = bytes;
    header.shards.iter().all(|&ShardSum { bytes: length, crc }| {
        let pages = shard_pages(u64::from(length)) * PAGE_BYTES;
        let Some((shard, behind)) = rest.split_at_checked(pages as usize) else { return false };
        rest = behind;
        crc32c(&shard[..length as usize]) == crc
    })
}
