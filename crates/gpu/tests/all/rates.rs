//! The rates that a fake's links are given.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::time::{Duration, Instant};

use crate::support::{device_memory, fake, pattern, read, stream};
use kvlane_fake_gpu::{FakeOptions, Rates};
use kvlane_gpu::{Copy, HostBuffer};

const BYTES: usize = 1 << 20;
/// The time of [`BYTES`] over each link.
const OWN: Duration = Duration::from_millis(10);
const LINK: Duration = Duration::from_millis(20);
const PCIE: Duration = Duration::from_millis(40);

#[test]
fn copies_of_all_streams_share_the_rate_of_their_link() {
    let rate = |time: Duration| (BYTES as f64 / time.as_secs_f64()) as u64;
    let rates = Some(Rates { own: rate(OWN), link: rate(LINK), pcie: rate(PCIE) });
    let (_driver, gpu, other) = fake(FakeOptions { rates, ..FakeOptions::default() });
    let streams = [stream(&gpu), stream(&gpu)];
    let near = device_memory(&streams[0], &pattern(1, BYTES));
    let (beside, far) = (gpu.alloc(BYTES as u64).unwrap(), other.alloc(BYTES as u64).unwrap());
    let host = HostBuffer::new(&gpu, BYTES as u64).unwrap();
    for (to, time) in [(beside.address(), OWN), (far.address(), LINK), (host.address(), PCIE)] {
        let begun = Instant::now();
        for (stream, half) in streams.iter().zip([0, BYTES as u64 / 2]) {
            let copy = Copy { dst: to + half, src: near.address() + half, len: BYTES as u64 / 2 };
            // SAFETY: the ranges are the test's own, and the streams are waited for.
            unsafe { stream.copy(copy).unwrap() };
        }
        streams.iter().for_each(|stream| stream.synchronize().unwrap());
        // A link takes a whole number of bytes a second.
        assert!(begun.elapsed() > time.mul_f64(0.999), "{:?} instead of {time:?}", begun.elapsed());
    }
    assert!(read(&streams[0], far.address(), BYTES) == pattern(1, BYTES));
}
