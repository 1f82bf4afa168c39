//! A word that a stream writes, on a fake GPU.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]
#![allow(unsafe_code, reason = "tests own what their streams touch")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use kvlane_fake_gpu::{FakeDriver, FakeOptions};
use kvlane_gpu::{EngineStream, Gpu, HostBuffer, Priority, Stream, StreamWord};

struct Blocked {
    stream: Stream,
    gate: HostBuffer,
}

impl Blocked {
    fn new(gpu: &Gpu) -> Blocked {
        let blocked = Blocked {
            stream: Stream::new(gpu, Priority::Normal).unwrap(),
            gate: HostBuffer::new(gpu, 4).unwrap(),
        };
        blocked.gate().store(0, Ordering::SeqCst);
        // SAFETY: the gate lives until the stream has come past it: `synchronize` below.
        unsafe { blocked.stream.wait_word(blocked.gate.address(), 1).unwrap() };
        blocked
    }

    fn gate(&self) -> &AtomicU32 {
        // SAFETY: the buffer lives as long; everybody accesses the word as a whole.
        unsafe { AtomicU32::from_ptr(self.gate.as_ptr().cast()) }
    }

    fn engine_stream(&self) -> EngineStream {
        // SAFETY: tests use it while the stream lives.
        unsafe { EngineStream::from_raw(self.stream.raw()) }
    }
}

fn gpu() -> Gpu {
    Gpu::open(Arc::new(FakeDriver::new(FakeOptions::default()).unwrap()), 0).unwrap()
}

#[test]
fn it_has_the_value_once_the_stream_has_come_to_it() {
    let gpu = gpu();
    let (word, blocked) = (StreamWord::new(&gpu).unwrap(), Blocked::new(&gpu));
    word.write(&blocked.engine_stream(), 7).unwrap();
    assert_eq!(word.value(), 0);
    blocked.gate().store(1, Ordering::SeqCst);
    blocked.stream.synchronize().unwrap();
    assert_eq!(word.value(), 7);
}

#[test]
fn it_is_given_back_after_the_last_write_only() {
    let gpu = gpu();
    let (word, blocked) = (StreamWord::new(&gpu).unwrap(), Blocked::new(&gpu));
    word.write(&blocked.engine_stream(), 7).unwrap();
    let dropper = std::thread::spawn(move || drop(word));
    // The stream writes into a page that is still there, or this process ends by a signal.
    assert!(!dropper.is_finished());
    blocked.gate().store(1, Ordering::SeqCst);
    blocked.stream.synchronize().unwrap();
    dropper.join().unwrap();
}
