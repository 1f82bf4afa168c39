//! A file that an earlier release wrote (fixtures/, made by tests/daemon/ssd_fixture.py with that release) keeps its
//! blocks when a user installs this version. Its format version is ours, so these tests notice if the bytes change
//! their meaning.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::collections::BTreeSet;
use std::path::Path;

use crate::support::*;
use kvlane_block::{BlockHash, BlockKey, Namespace};
use kvlane_ssd::{Miss, ReadEnd, SsdTier};

const PAGE_BYTES: usize = 4096;
const BLOCK_BYTES: usize = 1024;

/// The SSD file, from its pages: see tests/daemon/ssd_fixture.py.
fn file() -> Vec<u8> {
    let mut packed = &include_bytes!("../fixtures/0.1.0.pages")[..];
    let mut take = |bytes: usize| packed.split_off(..bytes);
    let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap()) as usize;
    let length = u64::from_le_bytes(take(8).unwrap().try_into().unwrap()) as usize;
    let mut file = vec![0; length];
    while let Some(page) = take(4).map(number) {
        let used = take(4).map(number).unwrap();
        file[page * PAGE_BYTES..][..used].copy_from_slice(take(used).unwrap());
    }
    file
}

/// Hash and bytes of each block that the release was given.
fn blocks() -> Vec<(BlockHash, &'static [u8])> {
    let blocks = include_bytes!("../fixtures/0.1.0.blocks").chunks_exact(16 + BLOCK_BYTES);
    blocks.map(|block| (BlockHash(block[..16].try_into().unwrap()), &block[16..])).collect()
}

fn open_file(path: &Path, bytes: &[u8], pool: &Pool) -> (SsdTier, Vec<BlockKey>) {
    std::fs::write(path, bytes).unwrap();
    let mut options = options_for(vec![device(path, bytes.len() as u64)]);
    options.buffered = true;
    let tier = open(options, pool);
    let mut keys = Vec::new();
    tier.for_each_key(|key| keys.push(key));
    (tier, keys)
}

fn read(tier: &SsdTier, pool: &mut Pool, key: BlockKey) -> (ReadEnd, Vec<u8>) {
    let into = pool.extents(&[BLOCK_BYTES as u64]);
    let end = start_read(tier, key, into.clone()).unwrap().recv_timeout(PATIENCE).unwrap();
    (end, pool.bytes(&into[0]).to_vec())
}

#[test]
fn every_block_of_the_release_before_is_found_with_its_bytes() {
    let (directory, mut pool) = (tempfile::tempdir().unwrap(), Pool::new(MIB));
    let (tier, keys) = open_file(&directory.path().join("tier"), &file(), &pool);
    let expected = blocks();
    let hashes = |hashes: &mut dyn Iterator<Item = BlockHash>| hashes.collect::<BTreeSet<_>>();
    assert_eq!(
        hashes(&mut keys.iter().map(|key| key.hash)),
        hashes(&mut expected.iter().map(|block| block.0))
    );
    assert_eq!(keys.len(), 3);
    for key in keys {
        assert_eq!(key.space.namespace, Namespace([3; 16]));
        let (end, bytes) = read(&tier, &mut pool, key);
        assert!(matches!(end, ReadEnd::Found { .. }), "{key:?}: {end:?}");
        let (_, right) = expected.iter().find(|(hash, _)| *hash == key.hash).unwrap();
        assert!(bytes == *right, "wrong bytes of {key:?}");
    }
    close(tier);
}

/// The control: the test above would see a file that this version does not read.
#[test]
fn a_block_of_that_file_with_one_other_byte_is_no_hit() {
    let (directory, mut pool) = (tempfile::tempdir().unwrap(), Pool::new(MIB));
    let mut changed = file();
    let (hash, content) = blocks()[1];
    let places: Vec<usize> = (0..changed.len() - BLOCK_BYTES)
        .step_by(PAGE_BYTES)
        .filter(|&at| changed[at..].starts_with(content))
        .collect();
    assert_eq!(places.len(), 1, "the fixture has the block's bytes once");
    changed[places[0] + 7] ^= 1;
    let (tier, keys) = open_file(&directory.path().join("tier"), &changed, &pool);
    for key in keys {
        let (end, _) = read(&tier, &mut pool, key);
        match key.hash == hash {
            true => assert_eq!(end, ReadEnd::Miss(Miss::Damaged)),
            false => assert!(matches!(end, ReadEnd::Found { .. }), "{end:?}"),
        }
    }
    close(tier);
}

/// The bytes of a record's header that no build has used are zeros. Whoever gives them a meaning has to give the file a new
/// version: until then a header with something in them is none of ours.
#[test]
fn a_header_with_something_in_its_unused_bytes_is_no_hit() {
    let (directory, mut pool) = (tempfile::tempdir().unwrap(), Pool::new(MIB));
    let mut changed = file();
    let (hash, _) = blocks()[2];
    let is_its_header = |page: &[u8]| page.starts_with(b"kvlnBLCK") && page[80..96] == hash.0;
    let header = changed.chunks_mut(PAGE_BYTES).find(|page| is_its_header(page)).unwrap();
    assert_eq!(header[96..116], [0; 20]);
    header[100] = 1;
    let length = u32::from_le_bytes(header[12..16].try_into().unwrap()) as usize;
    let crc = kvlane_block::crc32c(&header[12..length]);
    header[8..12].copy_from_slice(&crc.to_le_bytes());
    let (tier, keys) = open_file(&directory.path().join("tier"), &changed, &pool);
    for key in keys {
        let (end, _) = read(&tier, &mut pool, key);
        match key.hash == hash {
            true => assert_eq!(end, ReadEnd::Miss(Miss::Damaged)),
            false => assert!(matches!(end, ReadEnd::Found { .. }), "{end:?}"),
        }
    }
    close(tier);
}
