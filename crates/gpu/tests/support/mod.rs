//! Fake GPUs, memory to copy between, and a gate that holds a stream up.
#![allow(dead_code, reason = "every test binary uses a part")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail like tests")]

pub(crate) mod doubled;
pub(crate) mod role;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use kvlane_fake_gpu::{FakeDriver, FakeOptions};
use kvlane_gpu::{Copy, DeviceInfo, DeviceMemory, Driver, Gpu, HostBuffer, Priority, Stream};

pub(crate) fn fake(options: FakeOptions) -> (Arc<FakeDriver>, Gpu, Gpu) {
    let driver = Arc::new(FakeDriver::new(options).unwrap());
    let gpu = |ordinal| Gpu::open(Arc::clone(&driver) as Arc<dyn Driver>, ordinal).unwrap();
    let (first, second) = (gpu(0), gpu(1));
    (driver, first, second)
}

/// The driver that tests of every driver run on: `fake`, or on a machine with a GPU `cuda`.
pub(crate) fn tested_driver() -> String {
    std::env::var("KVLANE_TEST_DRIVER").unwrap_or_else(|_| "fake".into())
}

/// All GPUs of the tested driver. One alone counts as two.
pub(crate) fn several_gpus() -> (Arc<dyn Driver>, Vec<Gpu>) {
    let mut driver = kvlane_fake_gpu::driver_named(Some(&tested_driver())).unwrap();
    if driver.devices().unwrap().len() == 1 {
        driver = Arc::new(doubled::Doubled(driver));
    }
    let open = |device: &DeviceInfo| Gpu::open(Arc::clone(&driver), device.ordinal).unwrap();
    let gpus = driver.devices().unwrap().iter().map(open).collect();
    (driver, gpus)
}

/// Two GPUs of the tested driver; the same one where there is no second.
pub(crate) fn gpus() -> (Gpu, Gpu) {
    let driver = kvlane_fake_gpu::driver_named(Some(&tested_driver())).unwrap();
    let second = 1.min(driver.devices().unwrap().len() as u32 - 1);
    (Gpu::open(Arc::clone(&driver), 0).unwrap(), Gpu::open(driver, second).unwrap())
}

pub(crate) fn stream(gpu: &Gpu) -> Arc<Stream> {
    Arc::new(Stream::new(gpu, Priority::High).unwrap())
}

/// A pinned word that a stream waits for.
pub(crate) struct Gate(HostBuffer);

impl Gate {
    /// Closed: what is enqueued in the stream from now on runs when it opens.
    pub(crate) fn across(stream: &Stream) -> Gate {
        let word = HostBuffer::new(stream.gpu(), 4096).unwrap();
        // SAFETY: the word is in the buffer, which freeing keeps until the stream is idle.
        unsafe {
            word.as_ptr().cast::<u32>().write(0);
            stream.wait_word(word.address(), 1).unwrap();
        }
        Gate(word)
    }

    pub(crate) fn open(&self) {
        // SAFETY: the word is in the buffer; the stream too accesses it atomically.
        unsafe { AtomicU32::from_ptr(self.0.as_ptr().cast()) }.store(1, Ordering::Release);
    }
}

pub(crate) fn device_memory(stream: &Stream, content: &[u8]) -> DeviceMemory {
    let memory = stream.gpu().alloc(content.len() as u64).unwrap();
    write(stream, memory.address(), content);
    memory
}

/// Copies bytes to a device and waits.
pub(crate) fn write(stream: &Stream, address: u64, content: &[u8]) {
    let src = content.as_ptr().expose_provenance() as u64;
    // SAFETY: the source outlives the copy, which is waited for; the test owns the destination.
    unsafe { stream.copy(Copy { dst: address, src, len: content.len() as u64 }).unwrap() };
    stream.synchronize().unwrap();
}

/// Bytes of a device, after everything that is enqueued in the stream.
pub(crate) fn read(stream: &Stream, address: u64, len: usize) -> Vec<u8> {
    let mut content = vec![0; len];
    let dst = content.as_mut_ptr().expose_provenance() as u64;
    // SAFETY: the destination outlives the copy, which is waited for.
    unsafe { stream.copy(Copy { dst, src: address, len: len as u64 }).unwrap() };
    stream.synchronize().unwrap();
    content
}

/// Bytes that differ from one place to the next and from one seed to another.
pub(crate) fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|index| (index * 31 + index / 251) as u8 ^ seed).collect()
}
