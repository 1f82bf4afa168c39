//! Calibration measures a GPU through the pool's own memory, whose bytes stay the same.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use kvlane_fake_gpu::driver_named;
use kvlane_gpu::calibrate::{Calibration, LENGTHS};
use kvlane_gpu::{Gpu, GpuError, HostBuffer};

#[test]
fn a_gpu_is_measured_in_every_way_and_the_host_keeps_its_bytes() {
    let gpu = Gpu::open(driver_named(Some("fake")).unwrap(), 0).unwrap();
    let bytes = 2 * LENGTHS[3];
    let host = HostBuffer::new(&gpu, bytes + 100).unwrap();
    let content: Vec<u8> = (0..bytes).map(|index| (index / 4096 * 7 + index) as u8).collect();
    // SAFETY: the buffer is longer than the content, and nothing is enqueued but by `measure`, which waits.
    let (measured, kept) = unsafe {
        host.as_ptr().copy_from_nonoverlapping(content.as_ptr(), content.len());
        let measured = Calibration::measure(&gpu, host.address(), host.bytes()).unwrap();
        (measured, std::slice::from_raw_parts(host.as_ptr(), content.len()))
    };
    assert!(kept == content);
    assert_eq!(measured.rates().len(), 2 * 2 * LENGTHS.len());
    assert!(measured.rates().iter().all(|rate| rate.gb_per_s > 0.0));
    // SAFETY: as above.
    let few = unsafe { Calibration::measure(&gpu, host.address(), bytes - 1) };
    assert!(matches!(few, Err(GpuError::Invalid(_))));
}
