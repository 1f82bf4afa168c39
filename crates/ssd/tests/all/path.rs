//! Which way transfers take: measured, remembered, or given.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::failing::Failing;
use crate::support::*;
use kvlane_ssd::{OpKind, Options, PathStatus, SsdPath, SsdTier};

const SHARD: u64 = 2 * MIB;

/// Large enough that two segments hold what a measurement wants to read.
fn options(path: &Path, failing: &Failing) -> Options {
    Options {
        path: SsdPath::Auto,
        staging_bytes: 64 * MIB,
        segment_bytes: Some(32 * MIB),
        wrap_io: Some(Arc::new(failing.clone())),
        ..Options::new(vec![device(path, 192 * MIB)])
    }
}

fn way(tier: &SsdTier) -> PathStatus {
    tier.status()[0].path_taken.clone()
}

fn rates_file(path: &Path) -> PathBuf {
    PathBuf::from(format!("{}.rates.json", path.display()))
}

/// Fills three segments. Two of them are full then.
fn fill(tier: &SsdTier, pool: &mut Pool) {
    for number in 0..40 {
        store(tier, pool, &Block::new(number, &[SHARD]));
    }
}

fn wait_for(tier: &SsdTier, what: impl Fn(&PathStatus) -> bool) -> PathStatus {
    let end = Instant::now() + PATIENCE;
    loop {
        let status = way(tier);
        if what(&status) {
            return status;
        }
        assert!(Instant::now() < end, "{status:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits for the rates. A machine that is too busy to measure them in a second gets another start.
fn wait_for_rates(mut tier: SsdTier, options: &Options, pool: &Pool) -> (SsdTier, PathStatus) {
    let end = Instant::now() + PATIENCE;
    loop {
        let status = wait_for(&tier, |status| !status.reason.contains("not measured yet"));
        if status.rates.is_some() {
            return (tier, status);
        }
        assert!(Instant::now() < end, "{status:?}");
        close(tier);
        tier = open(options.clone(), pool);
    }
}

/// Whether this machine gives private memory huge pages. Otherwise all transfers are direct, which is looked at instead.
fn has_huge_pages(status: &PathStatus) -> bool {
    let has = status.staging_bytes > 0;
    assert!(has || (!status.staged && status.reason.contains("huge pages")), "{status:?}");
    has
}

/// A tier that may measure.
struct Started {
    directory: tempfile::TempDir,
    pool: Pool,
    failing: Failing,
    tier: SsdTier,
}

/// None where this machine gives no huge pages.
fn started() -> Option<Started> {
    let (directory, pool, failing) = (tempfile::tempdir().unwrap(), Pool::new(8 * MIB), Failing::default());
    let tier = open(options(&directory.path().join("tier"), &failing), &pool);
    if !has_huge_pages(&way(&tier)) {
        close(tier);
        return None;
    }
    Some(Started { directory, pool, failing, tier })
}

#[test]
fn both_ways_are_measured_once_there_is_something_to_read_and_a_restart_remembers() {
    let Some(Started { directory, mut pool, failing, tier }) = started() else { return };
    let path = directory.path().join("tier");
    let before = way(&tier);
    assert!(before.staged && before.rates.is_none() && before.reason.contains("not measured"), "{before:?}");
    fill(&tier, &mut pool);
    let (tier, measured) = wait_for_rates(tier, &options(&path, &failing), &pool);
    let rates = measured.rates.unwrap();
    assert_eq!(measured.staged, rates.staged as f64 > 1.1 * rates.direct as f64, "{measured:?}");
    for number in 0..40 {
        assert!(is_found(&tier, &mut pool, &Block::new(number, &[SHARD])));
    }
    close(tier);

    let reads = |failing: &Failing| failing.seen().iter().filter(|seen| seen.0 == OpKind::Read).count();
    let failing = Failing::default();
    let tier = open(options(&path, &failing), &pool);
    assert!(is_found(&tier, &mut pool, &Block::new(3, &[SHARD])));
    let remembered = way(&tier);
    assert_eq!((remembered.rates, remembered.staged), (Some(rates), measured.staged));
    assert!(reads(&failing) <= 3, "a block's own operations, and no measurement: {}", reads(&failing));
    close(tier);

    std::fs::write(rates_file(&path), "{\"version\":").unwrap();
    let tier = open(options(&path, &failing), &pool);
    close(wait_for_rates(tier, &options(&path, &failing), &pool).0);
    assert!(std::fs::read_to_string(rates_file(&path)).unwrap().ends_with('}'), "it is written again");
}

/// Requests of an engine wait for the measurement, so a device that stalls ends it.
#[test]
fn a_device_that_hangs_ends_the_measurement_within_a_second() {
    let Some(Started { directory, mut pool, failing, tier }) = started() else { return };
    let path = directory.path().join("tier");
    failing.set(|faults| faults.hold_reads = true);
    fill(&tier, &mut pool);
    let began = Instant::now();
    let hung = wait_for(&tier, |status| status.reason.contains("within a second"));
    assert!(began.elapsed() < Duration::from_secs(20), "a second, on a busy machine");
    assert_eq!((hung.staged, hung.staging_bytes, hung.rates), (false, 0, None));
    assert!(!rates_file(&path).exists(), "nothing was measured");
    failing.set(|faults| faults.hold_reads = false);
    for number in 0..40 {
        assert!(is_found(&tier, &mut pool, &Block::new(number, &[SHARD])));
    }
    close(tier);
}

/// A disk of 40 MB/s needs 0.4 s for the reads that a measurement has in flight, and used to count as one that hangs.
#[test]
fn a_slow_device_is_not_measured_and_keeps_its_staging_memory() {
    let Some(Started { directory, mut pool, failing, tier }) = started() else { return };
    let path = directory.path().join("tier");
    failing.set(|faults| faults.read_delay = Duration::from_millis(60));
    fill(&tier, &mut pool);
    let slow = wait_for(&tier, |status| status.reason.contains("too slow"));
    assert!(slow.staged && slow.staging_bytes > 0 && slow.rates.is_none(), "{slow:?}");
    assert!(!rates_file(&path).exists(), "nothing was measured");
    failing.set(|faults| faults.read_delay = Duration::ZERO);
    assert!(is_found(&tier, &mut pool, &Block::new(0, &[SHARD])));
    close(tier);
}

#[test]
fn a_device_that_fails_the_measurements_reads_is_used_as_before() {
    let Some(Started { directory: _directory, mut pool, failing, tier }) = started() else { return };
    failing.set(|faults| faults.failing_reads = (1, rustix::io::Errno::IO.raw_os_error()));
    fill(&tier, &mut pool);
    let failed = wait_for(&tier, |status| status.reason.contains("failed a read"));
    assert!(failed.staged && failed.rates.is_none(), "{failed:?}");
    assert!(is_found(&tier, &mut pool, &Block::new(0, &[SHARD])));
    close(tier);
}

#[test]
fn where_nothing_can_be_gained_there_is_no_staging_memory() {
    let (directory, pool, failing) = (tempfile::tempdir().unwrap(), Pool::new(8 * MIB), Failing::default());
    let path = directory.path().join("tier");
    for (options, reason) in [
        (Options { path: SsdPath::Direct, ..options(&path, &failing) }, "--ssd-path direct"),
        (Options { buffered: true, ..options(&path, &failing) }, "page cache"),
    ] {
        let tier = open(options, &pool);
        let status = way(&tier);
        assert!(!status.staged && status.staging_bytes == 0 && status.reason.contains(reason), "{status:?}");
        close(tier);
    }
}
