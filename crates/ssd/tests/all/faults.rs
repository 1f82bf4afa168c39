//! Devices that fail, stall, or cut operations short.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::failing::Failing;
use crate::support::*;
use kvlane_ssd::{Miss, OpKind, Options, Read, ReadEnd, Refused, SsdPath, SsdTier, WriteEnd};
use rustix::io::Errno;

struct Bench {
    tier: SsdTier,
    pool: Pool,
    failing: Failing,
    directory: tempfile::TempDir,
}

fn options(directory: &tempfile::TempDir, failing: &Failing) -> Options {
    Options { wrap_io: Some(Arc::new(failing.clone())), ..small(&directory.path().join("tier")) }
}

fn bench(change: impl FnOnce(&mut Options)) -> Bench {
    let (directory, pool, failing) = (tempfile::tempdir().unwrap(), Pool::new(8 * MIB), Failing::default());
    let mut options = options(&directory, &failing);
    change(&mut options);
    let tier = open(options, &pool);
    Bench { tier, pool, failing, directory }
}

fn block(number: u64) -> Block {
    Block::new(number, &[30_000, 5])
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < end, "{what} does not happen");
        std::thread::yield_now();
    }
}

// ---- Writes fail ----

#[test]
fn a_write_that_fails_stores_nothing_and_the_device_rests_before_the_next() {
    for errno in [Errno::NOSPC, Errno::IO] {
        let Bench { tier, mut pool, failing, .. } = bench(|_| {});
        store(&tier, &mut pool, &block(1));
        failing.set(|faults| faults.failing_writes = (1, errno.raw_os_error()));
        assert_eq!(write(&tier, &mut pool, &block(2)), WriteEnd::Failed);
        let reason = tier.status()[0].degraded.clone().expect("it shows");
        assert!(reason.contains(&format!("os error {}", errno.raw_os_error())), "{reason}");
        assert!(!tier.contains(&block(2).key));
        assert_eq!(start_write(&tier, pool.record(&block(3))).unwrap_err(), Refused::Degraded);
        let stats = tier.stats();
        assert_eq!((stats.writes_failed, stats.writes_degraded, stats.writes_stored), (1, 1, 1));
        assert!(is_found(&tier, &mut pool, &block(1)), "reads go on");
        // It tries again after a second.
        until("the device's recovery", || {
            pool.reset();
            start_write(&tier, pool.record(&block(4)))
                .is_ok_and(|end| end.recv().unwrap() == WriteEnd::Stored)
        });
        assert_eq!(tier.status()[0].degraded, None);
        close(tier);
    }
}

/// The head of a segment, records before and behind, tables: whichever write fails, what was stored is found, and what
/// was not is not.
#[test]
fn whichever_write_fails_what_counts_as_stored_is_found_after_a_restart() {
    for nth in 0..40 {
        let Bench { tier, mut pool, failing, directory } =
            bench(|options| options.checkpoint_interval = Duration::from_millis(1));
        let mut stored = Vec::new();
        for number in 0..30 {
            if number == nth {
                failing.set(|faults| faults.failing_writes = (1, Errno::IO.raw_os_error()));
            }
            pool.reset();
            let Ok(end) = start_write(&tier, pool.record(&block(number))) else { continue };
            if end.recv_timeout(PATIENCE).unwrap() == WriteEnd::Stored {
                stored.push(number);
            }
        }
        pool.reset();
        let check = |tier: &SsdTier, pool: &mut Pool| {
            for number in 0..30 {
                assert_eq!(
                    is_found(tier, pool, &block(number)),
                    stored.contains(&number),
                    "{number} of {nth}"
                );
            }
        };
        check(&tier, &mut pool);
        close(tier);
        let tier = open(options(&directory, &Failing::default()), &pool);
        check(&tier, &mut pool);
        close(tier);
    }
}

#[test]
fn with_one_device_failing_the_other_one_stores() {
    let (directory, mut pool, failing) = (tempfile::tempdir().unwrap(), Pool::new(MIB), Failing::default());
    let options = Options {
        segment_bytes: Some(256 * KIB),
        wrap_io: Some(Arc::new(failing.clone())),
        ..options_for(vec![
            device(&directory.path().join("one"), 4 * MIB),
            device(&directory.path().join("two"), 4 * MIB),
        ])
    };
    let tier = open(options, &pool);
    failing.set(|faults| faults.failing_writes = (1, Errno::IO.raw_os_error()));
    assert_eq!(write(&tier, &mut pool, &block(0)), WriteEnd::Failed);
    for number in 1..10 {
        store(&tier, &mut pool, &block(number));
    }
    assert_eq!(tier.status().iter().filter(|status| status.degraded.is_some()).count(), 1);
    close(tier);
}

// ---- Reads fail ----

#[test]
fn a_read_that_fails_is_a_miss_and_the_block_is_kept() {
    let Bench { tier, mut pool, failing, .. } = bench(|_| {});
    store(&tier, &mut pool, &block(1));
    failing.set(|faults| faults.failing_reads = (1, Errno::IO.raw_os_error()));
    assert_eq!(fetch(&tier, &mut pool, &block(1)), Some(ReadEnd::Miss(Miss::Failed)));
    assert!(is_found(&tier, &mut pool, &block(1)));
    assert_eq!(tier.stats().reads_failed, 1);
    close(tier);
}

#[test]
fn transfers_cut_short_and_interrupted_are_carried_on_to_their_end() {
    for threads in [false, true] {
        let Bench { tier, mut pool, failing, .. } = bench(|options| options.threads = threads);
        failing.set(|faults| (faults.at_most, faults.interrupt) = (Some(8192), true));
        for number in 0..20 {
            store(&tier, &mut pool, &block(number));
        }
        assert!((0..20).all(|number| is_found(&tier, &mut pool, &block(number))));
        assert!(tier.stats().short_transfers > 100);
        // Half a page is no progress: the page is transferred again, and in the end given up.
        failing.set(|faults| (faults.at_most, faults.interrupt) = (Some(0), false));
        assert_eq!(fetch(&tier, &mut pool, &block(1)), Some(ReadEnd::Miss(Miss::Failed)));
        failing.set(|faults| faults.at_most = None);
        close(tier);
    }
}

// ---- Slow devices ----

#[test]
fn a_slow_read_is_late_at_its_deadline_and_done_when_the_kernel_is() {
    let Bench { tier, mut pool, failing, .. } = bench(|_| {});
    store(&tier, &mut pool, &block(1));
    failing.set(|faults| faults.hold_reads = true);
    let (end, ends) = channel();
    let into = pool.extents(&block(1).lengths);
    let read = Read {
        key: block(1).key,
        into: into.clone(),
        deadline: Some(Instant::now() + Duration::from_millis(20)),
    };
    tier.read(read, move |how| end.send(how).unwrap()).unwrap();
    let until = Instant::now() + PATIENCE;
    while tier.stats().reads_late == 0 {
        assert!(Instant::now() < until, "the deadline has passed, and the read is not counted as late");
        std::thread::yield_now();
    }
    assert!(ends.try_recv().is_err(), "the memory is still the kernel's");
    assert_eq!((tier.stats().reads_late, tier.status()[0].reads), (1, 1));
    failing.set(|faults| faults.hold_reads = false);
    assert!(matches!(ends.recv_timeout(PATIENCE).unwrap(), ReadEnd::Found { .. }));
    block(1).check(&pool, &into);
    assert_eq!(tier.stats().reads_late, 1, "late once");
    close(tier);
}

#[test]
fn reads_that_wait_behind_a_slow_one_end_at_their_deadline() {
    let Bench { tier, mut pool, failing, .. } = bench(|options| {
        options.segment_bytes = Some(4 * MIB);
        options.devices[0].capacity = Some(64 * MIB);
    });
    // What may be in flight is 32 MiB; these are 50.
    let large = Block::new(0, &[2 * MIB]);
    store(&tier, &mut pool, &large);
    failing.set(|faults| faults.hold_reads = true);
    let into = pool.extents(&large.lengths);
    let deadline = Some(Instant::now() + Duration::from_millis(50));
    let ends: Vec<_> = (0..25)
        .map(|_| {
            let (end, ends) = channel();
            let read = Read { key: large.key, into: into.clone(), deadline };
            tier.read(read, move |how| end.send(how).unwrap()).unwrap();
            ends
        })
        .collect();
    until("the deadline", || tier.stats().reads_late == 25);
    let ended = ends.iter().filter_map(|end| end.try_recv().ok()).collect::<Vec<_>>();
    assert!(ended.len() >= 8 && ended.iter().all(|end| *end == ReadEnd::Miss(Miss::Late)), "{ended:?}");
    failing.set(|faults| faults.hold_reads = false);
    let found = ends.iter().filter_map(|end| end.recv_timeout(PATIENCE).ok()).count();
    assert_eq!(found + ended.len(), 25);
    close(tier);
}

#[test]
fn a_full_backlog_refuses_and_accepts_again_when_it_is_written() {
    let Bench { tier, mut pool, failing, .. } = bench(|options| options.backlog_bytes = 4 * 40_960);
    failing.set(|faults| faults.hold_writes = true);
    let ends: Vec<_> =
        (0..4).map(|number| start_write(&tier, pool.record(&block(number))).unwrap()).collect();
    assert_eq!(start_write(&tier, pool.record(&block(9))).unwrap_err(), Refused::Full);
    assert_eq!(start_write(&tier, pool.record(&block(0))).unwrap_err(), Refused::Full);
    assert!(!tier.contains(&block(0).key), "what is not on the device is not there");
    assert_eq!(tier.stats().writes_refused, 2);
    failing.set(|faults| faults.hold_writes = false);
    assert!(ends.iter().all(|end| end.recv_timeout(PATIENCE).unwrap() == WriteEnd::Stored));
    assert_eq!(tier.status()[0].backlog_bytes, 0);
    store(&tier, &mut pool, &block(9));
    close(tier);
}

#[test]
fn a_device_that_never_answers_keeps_its_memory_and_nobody_waits_for_it() {
    let Bench { tier, mut pool, failing, .. } = bench(|_| {});
    store(&tier, &mut pool, &block(1));
    failing.set(|faults| faults.hold_next_read = true);
    let (end, ends) = channel();
    let guard = Arc::new(());
    let held = Arc::clone(&guard);
    let into = pool.extents(&block(1).lengths);
    let read = Read { key: block(1).key, into, deadline: None };
    tier.read(read, move |how| {
        drop(held);
        end.send(how).unwrap();
    })
    .unwrap();
    until("the read", || !failing.holds_next_read());
    assert!(!tier.close(Duration::from_millis(100)));
    assert_eq!(Arc::strong_count(&guard), 2, "nobody gave the memory back");
    failing.set(|faults| faults.release = true);
    let end = ends.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(end, ReadEnd::Found { .. }), "{end:?}");
    assert_eq!(Arc::strong_count(&guard), 1);
    assert!(tier.close(PATIENCE));
}

/// The checksum is taken of what the device left in staging, or in the pool. A byte that changed there would else become a hit.
#[test]
fn a_byte_that_changes_after_the_device_is_done_is_a_miss() {
    let Bench { tier, mut pool, failing, .. } = bench(|_| {});
    // In the header, in the first shard, in its last page, and in the second shard.
    for (number, offset) in [(1, 3), (2, 4096), (3, 4096 + 29_999), (4, 4096 + 32_768 + 4)] {
        store(&tier, &mut pool, &block(number));
        failing.set(|faults| faults.flip = Some(offset));
        let end = fetch(&tier, &mut pool, &block(number));
        assert!(failing.has_flipped(), "offset {offset}");
        assert_eq!(end, Some(ReadEnd::Miss(Miss::Damaged)), "offset {offset}");
        assert!(!tier.contains(&block(number).key));
    }
    // Behind the second shard's five bytes nothing is anyone's.
    store(&tier, &mut pool, &block(5));
    failing.set(|faults| faults.flip = Some(4096 + 32_768 + 5));
    assert!(is_found(&tier, &mut pool, &block(5)) && failing.has_flipped());
    close(tier);
}

#[test]
fn reads_that_find_no_room_in_staging_are_found_all_the_same() {
    let Bench { tier, mut pool, .. } = bench(|options| {
        options.segment_bytes = Some(4 * MIB);
        options.devices[0].capacity = Some(32 * MIB + 64 * KIB);
    });
    // Staging has 2 MiB, of which writes get one: the first block fits as a read only, the second not at all.
    for lengths in [vec![MIB + 5000], vec![2 * MIB + 1, 7]] {
        let blocks: Vec<Block> =
            (0..3).map(|number| Block::new(lengths.len() as u64 * 10 + number, &lengths)).collect();
        for block in &blocks {
            store(&tier, &mut pool, block);
        }
        pool.reset();
        let reads: Vec<_> = blocks
            .iter()
            .map(|block| {
                let into = pool.extents(&block.lengths);
                (start_read(&tier, block.key, into.clone()).unwrap(), into)
            })
            .collect();
        for ((end, into), block) in reads.into_iter().zip(&blocks) {
            assert!(matches!(end.recv_timeout(PATIENCE).unwrap(), ReadEnd::Found { .. }));
            block.check(&pool, &into);
        }
        pool.reset();
    }
    close(tier);
}

// ---- Ends ----

/// Checkpoints stop while closing; the time of the next one passes, and must not keep the device from seeing what ended.
#[test]
fn closing_ends_though_a_checkpoint_was_due_while_writes_were_in_flight() {
    let Bench { tier, mut pool, failing, .. } =
        bench(|options| options.checkpoint_interval = Duration::from_millis(1));
    store(&tier, &mut pool, &block(0));
    // From then on the device writes nothing of its own.
    until("a checkpoint", || failing.seen().iter().any(|(kind, ..)| *kind == OpKind::Sync));
    failing.set(|faults| faults.hold_writes = true);
    let writes: Vec<_> =
        (1..4).map(|number| start_write(&tier, pool.record(&block(number))).unwrap()).collect();
    let into = pool.extents(&block(0).lengths);
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| tier.close(PATIENCE));
        until("the close", || match start_read(&tier, block(0).key, into.clone()) {
            Err(refused) => refused == Refused::Closed,
            Ok(end) => end.recv_timeout(PATIENCE).is_err(),
        });
        // One is stored, so that the open segment wants a checkpoint, whose time has passed.
        failing.set(|faults| faults.let_writes = 1);
        assert_eq!(writes[0].recv_timeout(PATIENCE).unwrap(), WriteEnd::Stored);
        let due = Instant::now() + Duration::from_millis(5);
        until("the checkpoint's time", || Instant::now() > due);
        failing.set(|faults| faults.hold_writes = false);
        assert!(closing.join().unwrap());
    });
    assert!(writes[1..].iter().all(|end| end.recv_timeout(PATIENCE).unwrap() == WriteEnd::Stored));
}

#[test]
fn a_device_whose_thread_panics_is_left_out_and_its_keys_are_free_again() {
    let directory = tempfile::tempdir().unwrap();
    let Bench { tier, mut pool, failing, .. } = bench(|options| {
        options.devices.push(device(&directory.path().join("second"), 4 * MIB + 64 * KIB));
    });
    for number in 0..8 {
        store(&tier, &mut pool, &block(number));
    }
    failing.set(|faults| faults.hold_writes = true);
    tier.write(pool.record(&block(8)), |_| panic!("as a test wants it")).unwrap();
    let others: Vec<_> =
        (9..16).map(|number| start_write(&tier, pool.record(&block(number))).unwrap()).collect();
    failing.set(|faults| faults.hold_writes = false);
    // Of those that went to the device that is gone, nothing is heard.
    let _heard: Vec<_> = others.iter().map(|end| end.recv_timeout(PATIENCE)).collect();
    let gone = || tier.status().iter().filter(|device| device.degraded.is_some()).count() == 1;
    until("the end of a device", gone);
    for number in 8..16 {
        until("a write", || {
            pool.reset();
            match start_write(&tier, pool.record(&block(number))) {
                Ok(end) => end.recv_timeout(PATIENCE) == Ok(WriteEnd::Stored),
                Err(refused) => refused == Refused::Present && tier.contains(&block(number).key),
            }
        });
    }
    pool.reset();
    let found = (0..16).filter(|number| is_found(&tier, &mut pool, &block(*number))).count();
    assert_eq!(found as u64, tier.stats().blocks, "what is in the index is on the device that is left");
    assert!((9..16).contains(&found), "{found} of 16");
    assert!(tier.close(PATIENCE));
}

#[test]
fn whoever_closes_on_a_devices_thread_does_not_wait_for_himself() {
    let Bench { tier, mut pool, .. } = bench(|_| {});
    let (tell, told) = channel();
    let (tier, record) = (Arc::new(tier), pool.record(&block(1)));
    let last = Arc::clone(&tier);
    let done = move |_| tell.send(last.close(10 * PATIENCE)).unwrap_or(());
    tier.write(record, done).unwrap();
    assert!(!told.recv_timeout(PATIENCE).unwrap());
    assert!(tier.close(PATIENCE), "it ends all the same");
}

// ---- Tables that are late ----

/// A benchmark did not find the newer half of what it had written. On a slow disk that happened if older segments waited for
/// their tables: newer ones were emptied in their stead.
#[test]
fn while_old_segments_wait_for_their_tables_no_newer_ones_are_emptied() {
    let Bench { tier, mut pool, failing, .. } = bench(|_| {});
    let (segments, each) = (16, 6);
    // Of the first eight segments, each of which begins with its head.
    failing.set(|faults| {
        faults.holds_write = Some(|op| {
            let is_inside = |at: u64| at < 8 * 256 * KIB && !at.is_multiple_of(256 * KIB);
            op.bytes() == 4096 && op.offset.checked_sub(64 * KIB).is_some_and(is_inside)
        });
    });
    let count = (segments + 2) * each;
    let blocks: Vec<Block> = (0..count).map(block).collect();
    let ends: Vec<_> = blocks.iter().map(|block| start_write(&tier, pool.record(block)).unwrap()).collect();
    let stored = |ends: &[Receiver<WriteEnd>]| {
        ends.iter().all(|end| end.recv_timeout(PATIENCE).unwrap() == WriteEnd::Stored)
    };
    // The last free segment is kept for copies.
    let fit = ((segments - 1) * each) as usize;
    assert!(stored(&ends[..fit]));
    assert!(blocks[..fit].iter().all(|block| tier.contains(&block.key)));
    failing.set(|faults| faults.holds_write = None);
    assert!(stored(&ends[fit..]));
    let first = blocks.iter().position(|block| tier.contains(&block.key)).unwrap() as u64;
    assert!((each..=5 * each).contains(&first), "{first}");
    assert!(blocks[first as usize..].iter().all(|block| tier.contains(&block.key)));
    close(tier);
}

// ---- Records that wait together ----

/// Records that were accepted while the device's thread was kept busy, and their ends.
fn waiting_together(fails: bool) -> (Bench, Vec<Block>, Vec<WriteEnd>) {
    let (directory, mut pool, failing) =
        (tempfile::tempdir().unwrap(), Pool::new(16 * MIB), Failing::default());
    let options = Options {
        segment_bytes: Some(4 * MIB),
        wrap_io: Some(Arc::new(failing.clone())),
        staging_bytes: 16 * MIB,
        ..options_for(vec![device(&directory.path().join("tier"), 20 * MIB)])
    };
    let tier = open(options, &pool);
    let ((entered, enters), (go, goes)) = (channel(), channel::<()>());
    let keep_busy = move |_| {
        entered.send(()).unwrap();
        goes.recv().unwrap();
    };
    tier.write(pool.record(&block(0)), keep_busy).unwrap();
    enters.recv_timeout(PATIENCE).unwrap();
    let blocks: Vec<Block> = (1..=12).map(|number| Block::new(number, &[200 * KIB, 56 * KIB])).collect();
    let ends: Vec<_> = blocks.iter().map(|block| start_write(&tier, pool.record(block)).unwrap()).collect();
    failing.set(|faults| {
        faults.seen.clear();
        faults.failing_writes = (usize::from(fails), Errno::IO.raw_os_error());
    });
    go.send(()).unwrap();
    let ends = ends.iter().map(|end| end.recv_timeout(PATIENCE).unwrap()).collect();
    pool.reset();
    (Bench { tier, pool, failing, directory }, blocks, ends)
}

/// Records of 260 KiB that one operation writes: about 1 MiB from the pool, 2 MiB from staging.
const TOGETHER: usize = match crate::PATH {
    SsdPath::Staged => 8,
    _ => 4,
};

#[test]
fn records_that_wait_are_written_by_large_operations() {
    let (Bench { tier, mut pool, failing, .. }, blocks, ends) = waiting_together(false);
    assert!(ends.iter().all(|end| *end == WriteEnd::Stored));
    let records =
        failing.seen().into_iter().map(|(_, _, bytes)| bytes as u64).filter(|bytes| *bytes > 64 * KIB);
    let sizes: Vec<u64> = records.collect();
    assert_eq!(sizes[0], TOGETHER as u64 * 260 * KIB);
    assert_eq!((sizes.len(), sizes.iter().sum()), (12_usize.div_ceil(TOGETHER), 12 * 260 * KIB));
    assert!(blocks.iter().all(|block| is_found(&tier, &mut pool, block)));
    close(tier);
}

#[test]
fn an_operation_that_fails_takes_its_own_records_with_it_and_no_others() {
    let (Bench { tier, mut pool, failing, directory }, blocks, ends) = waiting_together(true);
    let stored: Vec<bool> = ends.iter().map(|end| *end == WriteEnd::Stored).collect();
    assert_eq!(stored, [vec![false; TOGETHER], vec![true; 12 - TOGETHER]].concat());
    let found = |tier: &SsdTier, pool: &mut Pool| -> Vec<bool> {
        blocks.iter().map(|block| is_found(tier, pool, block)).collect()
    };
    assert_eq!(found(&tier, &mut pool), stored);
    close(tier);
    drop(failing);
    let again = Options {
        segment_bytes: Some(4 * MIB),
        ..options_for(vec![device(&directory.path().join("tier"), 20 * MIB)])
    };
    let tier = open(again, &pool);
    assert_eq!(found(&tier, &mut pool), stored, "also after a restart");
    close(tier);
}

// ---- Turns ----

#[test]
fn while_something_is_read_a_tenth_of_it_is_written_and_the_rest_waits() {
    let Bench { tier, mut pool, failing, .. } = bench(|_| {});
    store(&tier, &mut pool, &block(0));
    // One read stays in flight, so that the device is being read from all the time.
    failing.set(|faults| faults.hold_next_read = true);
    let held = start_read(&tier, block(0).key, pool.extents(&block(0).lengths)).unwrap();
    until("the read", || !failing.holds_next_read());
    failing.set(|faults| faults.seen.clear());
    let writes: Vec<_> =
        (1..40).map(|number| start_write(&tier, pool.record(&block(number))).unwrap()).collect();
    assert!((0..100).all(|_| is_found(&tier, &mut pool, &block(0))));
    until("a write", || failing.seen().iter().any(|(kind, ..)| *kind == OpKind::Write));
    let bytes = |wanted| -> usize {
        failing.seen().iter().filter(|(kind, ..)| *kind == wanted).map(|(_, _, bytes)| bytes).sum()
    };
    let (read, written) = (bytes(OpKind::Read), bytes(OpKind::Write));
    // Of the 1.5 MiB that wait, and what the first read, which was not held, brought.
    assert!(written <= (read + 40_960) / 10, "{written} beside {read}");
    failing.set(|faults| faults.release = true);
    assert!(matches!(held.recv_timeout(PATIENCE).unwrap(), ReadEnd::Found { .. }));
    assert!(writes.iter().all(|end| end.recv_timeout(PATIENCE).unwrap() == WriteEnd::Stored));
    close(tier);
}
