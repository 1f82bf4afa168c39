//! The driver that the tests run on, and sizes that suit it.

use std::sync::Arc;

use kvlane_gpu::{Driver, Gpu};

/// Chooses it: `fake`, which is the default, or `cuda`.
const TESTED: &str = "KVLANE_TEST_DRIVER";

/// Blocks of an engine.
pub const BLOCKS: u32 = 32;
pub const LAYERS: u64 = 4;
/// Two layers of a block are 256 KiB: a flag follows each second one.
pub const SMALL_PIECE: u64 = 128 << 10;
/// How slow a fake GPU has to be, in microseconds for each MiB, for a copy to be met under way: four blocks take a fifth
/// of a second. That is shorter than the time after which a worker carries a load out itself.
pub const VERY_SLOW: u64 = 100_000;

pub fn is_real() -> bool {
    std::env::var(TESTED).is_ok_and(|name| name != "fake")
}

pub fn driver() -> Arc<dyn Driver> {
    let name = if is_real() { "cuda" } else { "fake" };
    kvlane_fake_gpu::driver_named(Some(name)).unwrap()
}

/// The GPU of engines: the second one where there are several, so that numbers are not mixed up unnoticed.
pub fn engines_gpu(driver: &Arc<dyn Driver>) -> Gpu {
    let second = 1.min(driver.devices().unwrap().len() as u32 - 1);
    Gpu::open(Arc::clone(driver), second).unwrap()
}

/// Bytes of a layer of a block. A real GPU cannot be made slow, so there is more to copy.
pub fn piece() -> u64 {
    if is_real() { 8 << 20 } else { SMALL_PIECE }
}

/// Blocks that take long enough to copy that a test can do something in the middle.
pub fn many() -> u32 {
    if is_real() { 12 } else { 4 }
}

/// Says why a test has nothing to do here.
pub fn skip(test: &str, reason: &str) {
    println!("not tested: {test}: {reason}");
}
