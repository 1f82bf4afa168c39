//! A word by which an engine's stream tells the host how far it is.

use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::device::Gpu;
use crate::driver::Priority;
use crate::error::GpuError;
use crate::stream::{EngineStream, Stream};
use crate::words::Words;

/// How long a word waits, at its end, for what its streams have yet to write.
const PATIENCE: Duration = Duration::from_secs(2);

/// A word in pinned memory, 0 at first.
///
/// Streams may write it as long as they have not come to the last write, so it is given back once they have; if they do not
/// within two seconds, as where the GPU is lost, its page is never given back.
#[derive(Debug)]
pub struct StreamWord {
    gpu: Gpu,
    words: ManuallyDrop<Words>,
    last: Mutex<u32>,
}

impl StreamWord {
    /// For streams of this GPU.
    ///
    /// # Errors
    /// Where its driver has no pinned memory to give, or no stream of it can write a word.
    pub fn new(gpu: &Gpu) -> Result<StreamWord, GpuError> {
        // On an error a stream may write it still: then it is never given back.
        let words = ManuallyDrop::new(Words::new(gpu, 1)?);
        let stream = Stream::new(gpu, Priority::Normal)?;
        // SAFETY: the word is not given back before the stream is done.
        unsafe { stream.write_word(words.address(0), 0)? };
        stream.synchronize()?;
        Ok(StreamWord { gpu: gpu.clone(), words, last: Mutex::new(0) })
    }

    /// The stream writes it after the work that is enqueued there.
    pub fn write(&self, stream: &EngineStream, value: u32) -> Result<(), GpuError> {
        let (driver, device) = self.gpu.raw();
        let mut last = self.last.lock();
        // SAFETY: the stream lives, as whoever made it vouches; the word is valid until it has the last value that is enqueued.
        unsafe { driver.write_word(device, stream.raw(), self.words.address(0), value)? };
        *last = value;
        Ok(())
    }

    /// The value that streams have come to. What they had enqueued before it is done.
    pub fn value(&self) -> u32 {
        self.words.get(0)
    }
}

impl Drop for StreamWord {
    fn drop(&mut self) {
        let (end, last) = (Instant::now() + PATIENCE, *self.last.lock());
        while self.words.get(0) != last {
            if Instant::now() >= end {
                // Log: the engine's GPU did not finish its work within the wait at the end; a small page stays
                // pinned. Do: look for CUDA errors in the engine's log if it did not just end.
                tracing::warn!(
                    "a stream of the engine has not come to its last write: a pinned page is not given back"
                );
                return;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        // SAFETY: it is dropped once, here, and no stream writes it any more.
        unsafe { ManuallyDrop::drop(&mut self.words) };
    }
}
