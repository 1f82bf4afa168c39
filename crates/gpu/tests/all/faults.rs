//! Errors: each is reported to its causer, and devices that are not lost go on.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::sync::Arc;

use crate::support::{device_memory, fake, pattern, read, stream};
use kvlane_fake_gpu::FakeOptions;
use kvlane_gpu::bench::{CopyMethod, Path, Shape};
use kvlane_gpu::{
    Copier, CopierOptions, Copy, CopyMethods, Direction, Driver, Gpu, GpuError, Pinned, measure_copy,
};

const BYTES: usize = 4096;
const INVALID_VALUE: u32 = 1;
const OUT_OF_MEMORY: u32 = 2;
const ILLEGAL_ADDRESS: u32 = 700;

#[test]
fn a_call_that_fails_fails_once_and_for_its_device_only() {
    let (driver, gpu, other) = fake(FakeOptions::default());
    driver.fail_call(0, None, 1, OUT_OF_MEMORY);
    assert!(other.alloc(1).is_ok());
    let error = gpu.alloc(1).unwrap_err();
    assert_eq!((error.code(), error.is_sticky()), (Some(OUT_OF_MEMORY), false));
    assert!(error.to_string().starts_with("cuMemAlloc: CUDA error 2"));
    assert!(gpu.alloc(1).is_ok());
}

#[test]
fn work_that_fails_is_reported_once_by_its_stream() {
    let (driver, gpu, _) = fake(FakeOptions::default());
    let (failing, sound) = (stream(&gpu), stream(&gpu));
    let content = pattern(1, BYTES);
    let (from, to) = (device_memory(&failing, &content), device_memory(&failing, &pattern(2, BYTES)));
    driver.fail_work(0, 1, INVALID_VALUE);
    let copy = Copy { dst: to.address(), src: from.address(), len: BYTES as u64 };
    // SAFETY: the ranges are the test's own, and the stream is waited for.
    unsafe { failing.copy(copy).unwrap() };
    assert_eq!(failing.synchronize().unwrap_err().code(), Some(INVALID_VALUE));
    failing.synchronize().unwrap();
    sound.synchronize().unwrap();
    // SAFETY: as above.
    unsafe { failing.copy(copy).unwrap() };
    assert!(read(&failing, to.address(), BYTES) == content);
}

#[test]
fn a_kernel_that_goes_astray_costs_its_device_the_context_and_no_other() {
    let (_driver, gpu, other) = fake(FakeOptions::default());
    let (stream, sound) = (stream(&gpu), stream(&other));
    let near = device_memory(&stream, &pattern(1, BYTES));
    let far = device_memory(&sound, &pattern(2, BYTES));
    let mut copier = Copier::new(Arc::clone(&stream), CopierOptions::default()).unwrap();
    let copy = Copy { dst: far.address(), src: near.address(), len: BYTES as u64 };
    // SAFETY: the ranges are valid; that the devices are no peers is what the fake finds out.
    if let Err(error) = unsafe { copier.enqueue(&[copy], Direction::Peer) } {
        assert!(error.is_sticky(), "the kernel was faster than the calls after it: {error}");
    }
    for _ in 0..2 {
        let error = stream.synchronize().unwrap_err();
        assert_eq!((error.code(), error.is_sticky()), (Some(ILLEGAL_ADDRESS), true));
    }
    assert!(gpu.alloc(1).unwrap_err().is_sticky());
    assert!(read(&sound, far.address(), BYTES) == pattern(2, BYTES));
}

#[test]
fn the_kernel_reaches_a_peer_once_it_may() {
    let (_driver, gpu, other) = fake(FakeOptions::default());
    let stream = stream(&gpu);
    let near = device_memory(&stream, &pattern(1, BYTES));
    let far = other.alloc(BYTES as u64).unwrap();
    for _ in 0..2 {
        gpu.enable_peer(&other).unwrap();
    }
    let mut copier = Copier::new(Arc::clone(&stream), CopierOptions::default()).unwrap();
    let copy = Copy { dst: far.address(), src: near.address(), len: BYTES as u64 };
    // SAFETY: the ranges are the test's own, and the stream is waited for.
    let enqueued = unsafe { copier.enqueue(&[copy], Direction::Peer).unwrap() };
    assert_eq!(enqueued.kernel.bytes, BYTES as u64);
    assert!(read(&stream, far.address(), BYTES) == pattern(1, BYTES));
}

#[test]
fn memory_is_bounded_and_freed() {
    let (_driver, gpu, other) = fake(FakeOptions { device_bytes: 1 << 20, ..FakeOptions::default() });
    let half = gpu.alloc(1 << 19).unwrap();
    assert_eq!(gpu.alloc((1 << 19) + 1).unwrap_err().code(), Some(OUT_OF_MEMORY));
    assert!(other.alloc(1 << 20).is_ok());
    drop(half);
    assert!(gpu.alloc(1 << 20).is_ok());
    assert_eq!(gpu.alloc(0).unwrap_err().code(), Some(INVALID_VALUE));
}

#[test]
fn a_pinned_range_reports_progress_and_is_undone_when_a_chunk_fails() {
    let (driver, gpu, _) = fake(FakeOptions::default());
    let memory = vec![0u8; 10_000];
    let start = memory.as_ptr().expose_provenance() as u64;
    let pin = |progress: &mut Vec<u64>| {
        // SAFETY: the memory outlives what pins it.
        unsafe { Pinned::new(&gpu, start, 10_000, 4096, |done| progress.push(done)) }
    };
    let mut progress = Vec::new();
    driver.fail_call(0, Some("cuMemHostRegister"), 3, OUT_OF_MEMORY);
    assert_eq!(pin(&mut progress).unwrap_err().code(), Some(OUT_OF_MEMORY));
    assert_eq!(progress, [4096, 8192]);

    progress.clear();
    let pinned = pin(&mut progress).unwrap();
    assert_eq!(
        (progress.as_slice(), pinned.seams()),
        (&[4096, 8192, 10_000][..], &[start + 4096, start + 8192][..])
    );
    // Registered already, so that the first try must have been undone.
    assert_eq!(pin(&mut Vec::new()).unwrap_err().code(), Some(712));
    // SAFETY: nothing is pinned.
    assert!(unsafe { Pinned::new(&gpu, start, 10_000, 0, |_| {}) }.is_err());
}

#[test]
fn a_device_is_found_by_its_uuid_and_others_are_not_there() {
    let (driver, gpu, other) = fake(FakeOptions::default());
    let driver: Arc<dyn Driver> = driver;
    let found = Gpu::open_uuid(Arc::clone(&driver), other.info().uuid).unwrap();
    assert_eq!(found.info().ordinal, 1);
    assert!(matches!(Gpu::open(Arc::clone(&driver), 2), Err(GpuError::NoSuchDevice(name)) if name == "2"));
    assert!(matches!(Gpu::open_uuid(driver, [0; 16]), Err(GpuError::NoSuchDevice(_))));

    // An export says which device holds the memory.
    let memory = gpu.alloc(1 << 21).unwrap();
    let export = gpu.export(memory.address() + 4096).unwrap();
    assert_eq!((export.base, export.bytes), (memory.address(), 1 << 21));
    assert!(matches!(other.import(&export), Err(GpuError::WrongDevice { .. })));
}

#[test]
fn every_shape_and_method_is_measured_and_its_bytes_are_checked() {
    let (driver, gpu, other) = fake(FakeOptions::default());
    let every = [
        CopyMethod::CopyEngine,
        CopyMethod::Batch,
        CopyMethod::Kernel { blocks: 4 },
        CopyMethod::Contiguous,
        CopyMethod::Auto,
    ];
    for path in [Path::HostToDevice, Path::DeviceToHost, Path::Peer(other)] {
        for method in every {
            let shape = Shape {
                total_bytes: 1 << 18,
                piece_bytes: 4096,
                joined: 1,
                shuffled: true,
                path: path.clone(),
            };
            let rate = measure_copy(&gpu, &shape, method).unwrap();
            assert!(rate > 0.0 && rate.is_finite(), "{path:?} {method:?}: {rate}");
        }
    }
    let shape = Shape {
        total_bytes: 1 << 18,
        piece_bytes: 4096,
        joined: 1,
        shuffled: false,
        path: Path::HostToDevice,
    };
    let wrong = Shape { piece_bytes: 4, ..shape.clone() };
    assert!(matches!(measure_copy(&gpu, &wrong, CopyMethod::Auto), Err(GpuError::Invalid(_))));
    driver.fail_call(0, Some("cuLaunchKernel"), 3, INVALID_VALUE);
    assert_eq!(measure_copy(&gpu, &shape, CopyMethod::Auto).unwrap_err().code(), Some(INVALID_VALUE));

    let methods = CopyMethods { batch: false, kernel: false };
    let (_driver, plain, _) = fake(FakeOptions { methods, ..FakeOptions::default() });
    for method in [CopyMethod::Batch, CopyMethod::Kernel { blocks: 4 }] {
        assert!(matches!(measure_copy(&plain, &shape, method), Err(GpuError::Unsupported { .. })));
    }
    assert!(measure_copy(&plain, &shape, CopyMethod::Auto).is_ok());
}
