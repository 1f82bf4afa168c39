//! A tier in use: blocks come back, also after a restart; room is made; damaged and foreign files are refused or
//! repaired.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use crate::support::*;
use kvlane_block::{BlockKey, PoolExtent, PoolOffset, SealedShard, Space};
use kvlane_policy::{CacheModel, Memo, PolicyKind};
use kvlane_ssd::{
    DeviceOptions, Miss, OpenError, Options, PAGE_BYTES, Read, ReadEnd, Record, Refused, SsdTier, Superblock,
    WriteEnd,
};
use kvlane_store::Judge;

fn directory() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn refuse(options: Options, pool: &Pool) -> OpenError {
    match SsdTier::open(options, pool.arena.clone()) {
        Ok(_) => panic!("the tier opened"),
        Err(error) => error,
    }
}

// ---- Blocks come back ----

/// Through each way to the file, blocks of each shape.
#[test]
fn what_was_stored_is_found_with_its_bytes() {
    let shapes: [&[u64]; 6] = [&[1], &[4096], &[100_000, 1, 4097], &[2 * MIB], &[4096; 700], &[512; 3]];
    for (threads, buffered) in [(false, false), (true, false), (false, true), (true, true)] {
        let (directory, mut pool) = (directory(), Pool::new(24 * MIB));
        let options = Options {
            threads,
            buffered,
            ..options_for(vec![device(&directory.path().join("tier"), 128 * MIB)])
        };
        let tier = open(options, &pool);
        let status = &tier.status()[0];
        assert_eq!(status.io, if threads { "threads" } else { "io_uring" });
        assert_eq!(status.notes.is_empty(), !threads && !buffered, "{:?}", status.notes);
        let blocks: Vec<Block> =
            shapes.iter().enumerate().map(|(number, shape)| Block::new(number as u64, shape)).collect();
        for block in &blocks {
            assert_eq!(fetch(&tier, &mut pool, block), None);
            store(&tier, &mut pool, block);
        }
        for block in &blocks {
            assert!(is_found(&tier, &mut pool, block), "{:?}", block.lengths);
            assert_eq!(start_write(&tier, pool.record(block)).unwrap_err(), Refused::Present);
            pool.reset();
        }
        let stats = tier.stats();
        assert_eq!((stats.reads_found, stats.writes_stored, stats.blocks), (6, 6, 6));
        close(tier);
    }
}

#[test]
fn lookups_tell_spaces_apart_and_a_removed_block_is_gone() {
    let (directory, mut pool) = (directory(), Pool::new(MIB));
    let tier = open(small(&directory.path().join("tier")), &pool);
    let other_space = Space { cut: kvlane_block::CutDigest([1; 16]), ..SPACE };
    for number in [0, 1, 2, 4] {
        store(&tier, &mut pool, &Block::new(number, &[5000]));
    }
    let are_stored =
        |space| [0, 1, 2, 3, 4, 5].map(|number| tier.contains(&BlockKey { space, hash: hash(number) }));
    assert_eq!(are_stored(SPACE), [true, true, true, false, true, false]);
    assert_eq!(are_stored(other_space), [false; 6]);
    let key = BlockKey { space: SPACE, hash: hash(1) };
    assert!(tier.contains(&key) && !tier.contains(&BlockKey { space: other_space, hash: hash(1) }));
    assert!(tier.remove(&key) && !tier.remove(&key) && !tier.contains(&key));
    let mut keys = Vec::new();
    tier.for_each_key(|key| keys.push(key.hash));
    keys.sort();
    assert_eq!(keys, [hash(0), hash(2), hash(4)]);
    // And can be stored again.
    store(&tier, &mut pool, &Block::new(1, &[9000]));
    assert!(is_found(&tier, &mut pool, &Block::new(1, &[9000])));
    close(tier);
}

#[test]
fn calls_that_cannot_be_carried_out_are_refused_and_do_nothing() {
    let (directory, mut pool) = (directory(), Pool::new(2 * MIB));
    let tier = open(small(&directory.path().join("tier")), &pool);
    let pool_bytes = pool.arena.bytes();
    let bad = [
        PoolExtent { offset: PoolOffset(0), bytes: 0 },
        PoolExtent { offset: PoolOffset(100), bytes: 4096 },
        PoolExtent { offset: PoolOffset(pool_bytes - 4096), bytes: 4097 },
        PoolExtent { offset: PoolOffset(u64::MAX - 4095), bytes: 4096 },
        PoolExtent { offset: PoolOffset(4096), bytes: u64::MAX },
    ];
    let key = Block::new(1, &[1]).key;
    for extent in bad {
        let record = Record { key, shards: vec![SealedShard { extent, crc32c: 0 }], memo: Memo::NOTHING };
        let PoolExtent { offset, bytes } = extent;
        assert_eq!(start_write(&tier, record).unwrap_err(), Refused::BadExtent { offset, bytes });
        assert_eq!(start_read(&tier, key, vec![extent]).unwrap_err(), Refused::BadExtent { offset, bytes });
    }
    let none = Record { key, shards: Vec::new(), memo: Memo::NOTHING };
    assert!(matches!(start_write(&tier, none), Err(Refused::BadExtent { .. })));
    let large = pool.record(&Block::new(1, &[256 * KIB]));
    assert!(matches!(start_write(&tier, large), Err(Refused::TooLarge { pages: 65, segment_pages: 64 })));
    pool.reset();
    store(&tier, &mut pool, &Block::new(1, &[60 * 4096]));
    let into = pool.extents(&[59 * 4096]);
    assert_eq!(start_read(&tier, key, into).unwrap_err(), Refused::Lengths);
    // As many pages, other lengths: only the header knows.
    let into = pool.extents(&[60 * 4096 - 1]);
    let end = start_read(&tier, key, into).unwrap().recv_timeout(PATIENCE).unwrap();
    assert_eq!(end, ReadEnd::Miss(Miss::Lengths));
    assert!(tier.contains(&key), "whoever asked wrongly does not cost the block");
    assert!(tier.close(PATIENCE));
    pool.reset();
    assert_eq!(start_write(&tier, pool.record(&Block::new(2, &[1]))).unwrap_err(), Refused::Closed);
    assert_eq!(start_read(&tier, key, pool.extents(&[60 * 4096])).unwrap_err(), Refused::Closed);
}

// ---- Restarts ----

#[test]
fn a_restart_finds_everything_from_the_tables_and_a_second_one_too() {
    let (directory, mut pool) = (directory(), Pool::new(MIB));
    let path = directory.path().join("tier");
    let blocks: Vec<Block> = (0..100).map(|number| Block::new(number, &[10_000, number + 1])).collect();
    let tier = open(small(&path), &pool);
    assert!(!tier.status()[0].warm);
    for block in &blocks {
        store(&tier, &mut pool, block);
    }
    close(tier);
    for _ in 0..2 {
        let tier = open(small(&path), &pool);
        let stats = tier.stats();
        assert!(tier.status()[0].warm);
        assert_eq!((stats.recovered_from_tables, stats.recovered_by_scan, stats.blocks), (100, 0, 100));
        assert!(blocks.iter().all(|block| is_found(&tier, &mut pool, block)));
        close(tier);
    }
}

/// Without any table left, the headers say the same.
#[test]
fn a_restart_without_tables_finds_everything_by_headers_and_writes_the_tables_again() {
    let (directory, mut pool) = (directory(), Pool::new(8 * MIB));
    let path = directory.path().join("tier");
    // 600 shards: a header of two pages.
    let blocks: Vec<Block> = (0..40)
        .map(|number| Block::new(number, if number % 9 == 3 { &[64; 20] } else { &[20_000] }))
        .chain([Block::new(100, &[4096; 600])])
        .collect();
    let options = || Options { segment_bytes: Some(4 * MIB), ..options_for(vec![device(&path, 32 * MIB)]) };
    let tier = open(options(), &pool);
    for block in &blocks {
        store(&tier, &mut pool, block);
    }
    close(tier);
    wipe(&path, b"kvlnFOOT");
    for (from_tables, by_scan) in [(0, 41), (41, 0)] {
        let tier = open(options(), &pool);
        let stats = tier.stats();
        assert_eq!((stats.recovered_from_tables, stats.recovered_by_scan), (from_tables, by_scan));
        assert!(blocks.iter().all(|block| is_found(&tier, &mut pool, block)));
        close(tier);
    }
}

/// Overwrites every page of the file that begins with `kind`.
fn wipe(path: &std::path::Path, kind: &[u8; 8]) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let bytes = std::fs::read(path).unwrap();
    let mut wiped = 0;
    for at in (0..bytes.len()).step_by(4096).filter(|at| bytes[*at..].starts_with(kind)) {
        file.write_all_at(&[0; 4096], at as u64).unwrap();
        wiped += 1;
    }
    assert!(wiped > 0);
}

#[test]
fn a_checkpoint_while_the_tier_works_saves_the_scan() {
    let (directory, mut pool) = (directory(), Pool::new(4 * MIB));
    let path = directory.path().join("tier");
    let options = Options { checkpoint_interval: Duration::from_millis(1), ..small(&path) };
    let tier = open(options, &pool);
    for number in 0..6 {
        store(&tier, &mut pool, &Block::new(number, &[10_000]));
        // Each block that was stored is followed by one.
        let until = Instant::now() + PATIENCE;
        while tier.stats().checkpoints <= number {
            assert!(Instant::now() < until, "no checkpoint");
            std::thread::yield_now();
        }
    }
    // As a crash would leave it.
    let copy = directory.path().join("copy");
    std::fs::copy(&path, &copy).unwrap();
    close(tier);
    let tier = open(small(&copy), &pool);
    let stats = tier.stats();
    assert_eq!((stats.recovered_from_tables, stats.recovered_by_scan), (6, 0));
    for number in 0..6 {
        assert!(is_found(&tier, &mut pool, &Block::new(number, &[10_000])));
    }
    close(tier);
}

// ---- Room ----

#[test]
fn a_full_tier_drops_the_oldest_blocks_and_keeps_those_that_are_read() {
    let (directory, mut pool) = (directory(), Pool::new(MIB));
    let path = directory.path().join("tier");
    let tier = open(small(&path), &pool);
    let block = |number| Block::new(number, &[12_000]);
    let favourites = [3, 17, 40];
    for number in 0..2000 {
        store(&tier, &mut pool, &block(number));
        if number % 20 == 0 && number > 40 {
            for favourite in favourites {
                assert!(is_found(&tier, &mut pool, &block(favourite)), "{favourite} after {number}");
            }
        }
    }
    let stats = tier.stats();
    assert!(
        stats.segments_cleaned > 10 && stats.blocks_kept >= 3 && stats.blocks_dropped > 1000,
        "{stats:?}"
    );
    // 16 segments of 256 KiB hold 15 of these blocks each; one is written, up to three are free.
    assert!(stats.blocks >= 12 * 15 - 15, "{stats:?}");
    let newest = 2000 - 11 * 15;
    assert!((newest..2000).all(|number| tier.contains(&block(number).key)));
    assert!(!tier.contains(&block(100).key));
    close(tier);
    let tier = open(small(&path), &pool);
    assert!(favourites.iter().all(|&number| is_found(&tier, &mut pool, &block(number))));
    assert!((newest..2000).all(|number| is_found(&tier, &mut pool, &block(number))));
    close(tier);
}

/// Finds one block in 20 dense, whatever is known of it.
#[derive(Default)]
struct OneInTwenty {
    asked: AtomicU64,
    given_up: parking_lot::Mutex<Vec<f32>>,
}

impl Judge for OneInTwenty {
    fn densities(&self, blocks: &[(BlockKey, Memo)]) -> Option<Vec<f32>> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let number = |key: &BlockKey| u64::from_le_bytes(*key.hash.0.first_chunk().unwrap());
        Some(blocks.iter().map(|(key, _)| if number(key).is_multiple_of(20) { 0.5 } else { 0.01 }).collect())
    }

    fn given_up(&self, density: f32) {
        self.given_up.lock().push(density);
    }
}

#[test]
fn a_full_tier_keeps_what_the_policy_finds_dense_whether_or_not_it_was_read() {
    let (directory, mut pool) = (directory(), Pool::new(MIB));
    let tier = open(small(&directory.path().join("tier")), &pool);
    let judge = Arc::new(OneInTwenty::default());
    tier.set_judge(Arc::clone(&judge) as Arc<dyn Judge>);
    let block = |number| Block::new(number, &[12_000]);
    for number in 0..1000 {
        store(&tier, &mut pool, &block(number));
        if number == 100 {
            assert!(is_found(&tier, &mut pool, &block(90)));
        }
    }
    let kept: Vec<u64> = (0..700).filter(|&number| tier.contains(&block(number).key)).collect();
    assert!(kept.len() > 25 && kept.iter().all(|number| number.is_multiple_of(20)), "{kept:?}");
    assert!(kept.iter().all(|&number| is_found(&tier, &mut pool, &block(number))));
    let given_up = judge.given_up.lock();
    assert!(judge.asked.load(Ordering::Relaxed) > 10 && given_up.len() > 10);
    assert!(given_up.iter().all(|density| (0.009..0.02).contains(density)), "{given_up:?}");
    close(tier);
}

/// Stores a block of which the pool's policy knows this.
fn store_with(tier: &SsdTier, pool: &mut Pool, block: &Block, memo: Memo) {
    pool.reset();
    let record = Record { memo, ..pool.record(block) };
    let (done, is_done) = channel();
    tier.write(record, move |end| done.send(end).unwrap()).unwrap();
    assert_eq!(is_done.recv_timeout(PATIENCE), Ok(WriteEnd::Stored));
}

#[test]
fn what_the_policy_knew_of_a_block_stays_with_it_until_a_restart() {
    let (directory, mut pool) = (directory(), Pool::new(MIB));
    let path = directory.path().join("tier");
    let tier = open(small(&path), &pool);
    tier.set_judge(Arc::new(OneInTwenty::default()));
    let [first, later] = memos();
    let block = |number| Block::new(number, &[12_000]);
    store_with(&tier, &mut pool, &block(20), first);
    assert_eq!((tier.memo(&block(20).key), tier.memo(&block(21).key)), (Some(first), None));
    tier.remember([(block(20).key, later), (block(21).key, first)]);
    assert_eq!((tier.memo(&block(20).key), tier.memo(&block(21).key)), (Some(later), None));
    // Also where it was written again.
    for number in 1000..1500 {
        store(&tier, &mut pool, &block(number));
    }
    assert!(tier.stats().blocks_kept > 0);
    assert_eq!(tier.memo(&block(20).key), Some(later));
    close(tier);
    let tier = open(small(&path), &pool);
    assert_eq!(tier.memo(&block(20).key), Some(Memo::NOTHING));
    close(tier);
}

/// Two that differ, as a policy tells them.
fn memos() -> [Memo; 2] {
    let mut cache = CacheModel::new(PolicyKind::Learned, 10);
    let mut memo = || {
        cache.request(&[7], |_| ());
        cache.memo(7).unwrap()
    };
    let memos = [memo(), memo()];
    assert_ne!(memos[0], memos[1]);
    memos
}

#[test]
fn blocks_are_spread_over_files_by_their_capacity() {
    let (directory, mut pool) = (directory(), Pool::new(MIB));
    std::fs::create_dir(directory.path().join("second")).unwrap();
    let options = || Options {
        segment_bytes: Some(256 * KIB),
        ..options_for(vec![
            device(&directory.path().join("first"), 4 * MIB),
            // In a directory the file has a name of its own.
            device(&directory.path().join("second"), 8 * MIB),
        ])
    };
    let tier = open(options(), &pool);
    for number in 0..120 {
        store(&tier, &mut pool, &Block::new(number, &[30_000]));
    }
    close(tier);
    let written = |path: PathBuf| {
        std::fs::read(path).unwrap().chunks(4096).filter(|page| page.starts_with(b"kvlnBLCK")).count()
    };
    let first = written(directory.path().join("first"));
    let second = written(directory.path().join("second").join("kvlane-ssd.data"));
    assert_eq!(first + second, 120);
    assert!((38..=42).contains(&first), "{first}");
    let tier = open(options(), &pool);
    assert!((0..120).all(|number| is_found(&tier, &mut pool, &Block::new(number, &[30_000]))));
    close(tier);
}

#[test]
fn writes_keep_to_their_rate() {
    let (directory, mut pool) = (directory(), Pool::new(4 * MIB));
    let options = Options {
        write_rate: Some(16 * MIB),
        ..options_for(vec![device(&directory.path().join("tier"), 32 * MIB)])
    };
    let tier = open(options, &pool);
    let began = Instant::now();
    for number in 0..12 {
        store(&tier, &mut pool, &Block::new(number, &[MIB / 2]));
    }
    // 6 MiB, of which 0.8 go at once, and one operation is overdrawn. It cannot be faster; slower it may be.
    assert!(began.elapsed() >= Duration::from_millis(200), "{:?}", began.elapsed());
    close(tier);
}

// ---- Files that are not as they should be ----

#[test]
fn a_flipped_bit_anywhere_is_a_miss_or_harmless() {
    let (directory, mut pool) = (directory(), Pool::new(MIB));
    let path = directory.path().join("tier");
    let blocks: Vec<Block> = (0..60).map(|number| Block::new(number, &[9_000, 500])).collect();
    let tier = open(small(&path), &pool);
    for block in &blocks {
        store(&tier, &mut pool, block);
    }
    close(tier);
    let whole = std::fs::read(&path).unwrap();
    let used: Vec<usize> = (0..whole.len() / 4096)
        .filter(|page| whole[page * 4096..][..4096].iter().any(|byte| *byte != 0))
        .collect();
    let mut lost_at_all = 0;
    for (round, page) in used.iter().enumerate() {
        let mut damaged = whole.clone();
        // Its kind, near the start, where a header's fields are, and somewhere.
        for at in [round % 8, round * 7 % 160, round * 613 % 4096] {
            damaged[page * 4096 + at] ^= 1 << (round % 8);
        }
        std::fs::write(&path, &damaged).unwrap();
        let tier = open(small(&path), &pool);
        // `fetch` asserts that what is found is right.
        let lost = blocks.iter().filter(|block| !is_found(&tier, &mut pool, block)).count();
        assert!(lost <= 1, "{lost} blocks lost by one page, {page}");
        lost_at_all += lost;
        let damaged = tier.stats().reads_damaged;
        assert!(blocks.iter().filter(|block| tier.contains(&block.key)).count() + lost == blocks.len());
        assert!(damaged <= 1);
        close(tier);
    }
    assert!(lost_at_all > 100, "flips in headers and shards are noticed: {lost_at_all}");
}

#[test]
fn a_file_that_was_cut_keeps_what_is_left() {
    let (directory, mut pool) = (directory(), Pool::new(MIB));
    let path = directory.path().join("tier");
    let blocks: Vec<Block> = (0..60).map(|number| Block::new(number, &[9_000, 500])).collect();
    let tier = open(small(&path), &pool);
    for block in &blocks {
        store(&tier, &mut pool, block);
    }
    close(tier);
    let length = std::fs::metadata(&path).unwrap().len();
    let mut last = blocks.len();
    for cut in [length - 1, 3 * 256 * KIB + 10_001, 256 * KIB + 70_000, 64 * KIB + 5000, 64 * KIB, 8192, 4096]
    {
        File::options().write(true).open(&path).unwrap().set_len(cut).unwrap();
        let tier = open(small(&path), &pool);
        assert!(tier.status()[0].notes.iter().any(|note| note.contains("made")), "{:?}", tier.status());
        let left = blocks.iter().filter(|block| is_found(&tier, &mut pool, block)).count();
        assert!(left <= last);
        last = left;
        store(&tier, &mut pool, &Block::new(1000 + cut, &[20_000]));
        assert!(tier.remove(&Block::new(1000 + cut, &[20_000]).key));
        close(tier);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), length);
    }
    assert_eq!(last, 0);
}

#[test]
fn a_file_of_somebody_else_is_left_alone() {
    let (directory, pool) = (directory(), Pool::new(MIB));
    let path = directory.path().join("precious");
    for content in [vec![0u8; 100_000], b"dear diary".to_vec(), vec![0xFF; 4095]] {
        std::fs::write(&path, &content).unwrap();
        let error = refuse(small(&path), &pool);
        assert!(matches!(error, OpenError::NotOurs { .. }), "{error}");
        assert!(error.to_string().contains("left alone"));
        assert_eq!(std::fs::read(&path).unwrap(), content);
    }
    let error = refuse(small(std::path::Path::new("/dev/null")), &pool);
    assert!(matches!(error, OpenError::NotAFile { .. }), "{error}");
    let error = refuse(small(&directory.path().join("no/such/directory")), &pool);
    assert!(matches!(&error, OpenError::NoFolder { folder } if folder.ends_with("no/such")), "{error}");
    let error = refuse(small(&directory.path().join("none/")), &pool);
    assert!(matches!(&error, OpenError::NoFolder { folder } if folder.ends_with("none")), "{error}");
    assert!(!directory.path().join("none").exists(), "a disk that is not mounted is not filled elsewhere");
    assert!(matches!(refuse(options_for(Vec::new()), &pool), OpenError::DeviceCount(0)));
    // An empty file is a name that somebody reserved.
    File::create(directory.path().join("empty")).unwrap();
    close(open(small(&directory.path().join("empty")), &pool));
}

#[test]
fn a_file_of_a_newer_version_or_with_a_damaged_superblock_is_refused_and_kept() {
    let (directory, mut pool) = (directory(), Pool::new(MIB));
    let path = directory.path().join("tier");
    let tier = open(small(&path), &pool);
    store(&tier, &mut pool, &Block::new(1, &[100]));
    close(tier);
    let whole = std::fs::read(&path).unwrap();
    let superblock = Superblock::decode(&whole[..4096]).unwrap();

    let newer = Superblock { version: superblock.version + 1, ..superblock }.encode();
    let mut changed = whole.clone();
    changed[..4096].copy_from_slice(&newer);
    changed[4096..8192].copy_from_slice(&newer);
    std::fs::write(&path, &changed).unwrap();
    let error = refuse(small(&path), &pool);
    assert!(matches!(error, OpenError::OtherVersion { found: 2, known: 1, .. }), "{error}");
    assert!(error.to_string().contains("newer kvlane"));
    assert_eq!(std::fs::read(&path).unwrap(), changed);

    // One copy is enough, two damaged ones are too many.
    let mut changed = whole.clone();
    changed[30] ^= 1;
    std::fs::write(&path, &changed).unwrap();
    let tier = open(small(&path), &pool);
    assert!(is_found(&tier, &mut pool, &Block::new(1, &[100])));
    close(tier);
    changed[4096 + 30] ^= 1;
    std::fs::write(&path, &changed).unwrap();
    assert!(matches!(refuse(small(&path), &pool), OpenError::Damaged { .. }));
}

#[test]
fn another_capacity_or_segment_size_than_the_files_is_refused() {
    let (directory, mut pool) = (directory(), Pool::new(MIB));
    let path = directory.path().join("tier");
    let tier = open(small(&path), &pool);
    store(&tier, &mut pool, &Block::new(1, &[100]));
    close(tier);
    let options = |capacity, segment_bytes| Options {
        segment_bytes,
        ..options_for(vec![DeviceOptions { path: path.clone(), capacity }])
    };
    for capacity in [2 * MIB, 4 * MIB, 8 * MIB] {
        let error = refuse(options(Some(capacity), None), &pool);
        assert!(matches!(error, OpenError::OtherGeometry { of: "of capacity", .. }), "{error}");
    }
    let error = refuse(options(None, Some(512 * KIB)), &pool);
    assert!(matches!(error, OpenError::OtherGeometry { of: "a segment", found: 262_144, .. }), "{error}");
    // Left out, it is what the file has. A capacity is rounded down to whole segments, here as when it was made.
    for capacity in [None, Some(4 * MIB + 64 * KIB), Some(4 * MIB + 65 * KIB)] {
        let tier = open(options(capacity, None), &pool);
        assert!(is_found(&tier, &mut pool, &Block::new(1, &[100])));
        close(tier);
    }
}

#[test]
fn a_capacity_below_a_few_segments_says_what_the_smallest_is() {
    let (directory, pool) = (directory(), Pool::new(MIB));
    let path = directory.path().join("tier");
    for capacity in [0, 4096, MIB] {
        let error = refuse(options_for(vec![device(&path, capacity)]), &pool);
        let OpenError::TooSmall { least, .. } = error else { panic!("{error}") };
        assert_eq!(least, 4 * MIB + 64 * KIB);
        assert!(error.to_string().contains("the smallest is 4160kib"), "as it may be typed: {error}");
        assert!(!path.exists());
    }
    close(open(options_for(vec![device(&path, 4 * MIB + 64 * KIB)]), &pool));
    for bytes in [0, 4096, 100_000, 2 << 30] {
        let options = Options {
            segment_bytes: Some(bytes),
            ..options_for(vec![device(&directory.path().join("other"), 64 * MIB)])
        };
        assert!(matches!(refuse(options, &pool), OpenError::SegmentBytes(_)));
    }
}

#[test]
fn two_daemons_do_not_share_a_file() {
    let (directory, pool) = (directory(), Pool::new(MIB));
    let path = directory.path().join("tier");
    let first = open(small(&path), &pool);
    let error = refuse(small(&path), &pool);
    assert!(matches!(error, OpenError::InUse { .. }), "{error}");
    let twice = Options {
        segment_bytes: Some(256 * KIB),
        ..options_for(vec![device(&directory.path().join("other"), 4 * MIB); 2])
    };
    let error = refuse(twice, &pool);
    assert!(matches!(error, OpenError::Twice { .. }), "{error}");
    close(first);
    close(open(small(&path), &pool));
}

/// In memory there is nothing to bypass; kernels differ in whether they say so.
#[test]
fn a_file_system_in_memory_works() {
    let (directory, mut pool) = (tempfile::tempdir_in("/dev/shm").unwrap(), Pool::new(4 * MIB));
    let path = directory.path().join("tier");
    let blocks: Vec<Block> = (0..30).map(|number| Block::new(number, &[50_000])).collect();
    let tier = open(small(&path), &pool);
    for block in &blocks {
        store(&tier, &mut pool, block);
    }
    close(tier);
    let tier = open(small(&path), &pool);
    assert!(blocks.iter().all(|block| is_found(&tier, &mut pool, block)));
    let status = &tier.status()[0];
    assert_eq!(status.direct, status.notes.is_empty(), "{status:?}");
    close(tier);
}

#[test]
fn a_disk_without_room_for_the_capacity_is_an_error_and_leaves_nothing_behind() {
    let (directory, pool) = (directory(), Pool::new(MIB));
    let path = directory.path().join("tier");
    // 2^46 bytes fit into a file; 2^60 do not.
    for capacity in [1u64 << 46, 1 << 60] {
        let error = refuse(options_for(vec![device(&path, capacity)]), &pool);
        assert!(matches!(error, OpenError::NoSpace { .. }), "{error}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}

// ---- Many at once ----

#[test]
fn readers_and_writers_from_many_threads_get_what_they_asked_for() {
    let (directory, mut pool) = (directory(), Pool::new(64 * MIB));
    let options = options_for(vec![
        device(&directory.path().join("one"), 32 * MIB),
        device(&directory.path().join("two"), 32 * MIB),
    ]);
    let tier = Arc::new(open(options, &pool));
    let blocks: Vec<Block> = (0..256).map(|number| Block::new(number, &[100_000])).collect();
    let (end, ends) = channel();
    for block in &blocks {
        let end = end.clone();
        let record = pool.record(block);
        tier.write(record, move |how| end.send(how).unwrap()).unwrap();
    }
    assert!(blocks.iter().all(|_| ends.recv_timeout(PATIENCE).unwrap() == WriteEnd::Stored));
    pool.reset();
    let extents: Vec<Vec<PoolExtent>> = (0..256).map(|_| pool.extents(&[100_000])).collect();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (tier, blocks, extents, pool) = (&tier, &blocks, &extents, &pool);
            scope.spawn(move || {
                for round in 0..3 {
                    let mine = (0..256).filter(|number| number % 4 == (thread + round) % 4);
                    // Each thread has its own memory.
                    let reads: Vec<_> = mine
                        .map(|number| {
                            let into = vec![extents[number / 4 * 4 + thread][0]];
                            let (end, ends) = channel();
                            let read = Read { key: blocks[number].key, into: into.clone(), deadline: None };
                            tier.read(read, move |how| end.send(how).unwrap()).unwrap();
                            (number, into, ends)
                        })
                        .collect();
                    for (number, into, ends) in reads {
                        assert!(matches!(ends.recv_timeout(PATIENCE).unwrap(), ReadEnd::Found { .. }));
                        blocks[number].check(pool, &into);
                    }
                }
            });
        }
    });
    assert_eq!(tier.stats().reads_found, 768);
    assert!(tier.close(PATIENCE));
    assert_eq!(PAGE_BYTES, 4096);
}
