//! [`StreamWord`]: a word by which an engine's stream reports its progress to the host.

use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::device::Gpu;
use crate::driver::Priority;
use crate::error::GpuError;
use crate::stream::{EngineStream, Stream};
use crate::words::Words;

/// How long the drop of a word waits for writes that its streams still have to make.
const PATIENCE: Duration = Duration::from_secs(2);

/// A word in pinned memory, 0 at first.
///
/// Streams may write the word until their last enqueued write. So a drop waits for that write, and then frees the page. If it
/// does not come within two seconds, as after the loss of a GPU, the page is never freed.
#[derive(Debug)]
pub struct StreamWord {
    gpu: Gpu,
    words: ManuallyDrop<Words>,
    last: Mutex<u32>,
}

impl StreamWord {
    /// A word for streams of this GPU.
    ///
    /// # Errors
    /// The driver has no pinned memory left, or its streams cannot write words.
    pub fn new(gpu: &Gpu) -> Result<StreamWord, GpuError> {
        // After an error a stream may still write the word: then its page is never freed.
        let words = ManuallyDrop::new(Words::new(gpu, 1)?);
        let stream = Stream::new(gpu, Priority::Normal)?;
        // SAFETY: the word is not freed before the stream is done.
        unsafe { stream.write_word(words.address(0), 0)? };
        stream.synchronize()?;
        Ok(StreamWord { gpu: gpu.clone(), words, last: Mutex::new(0) })
    }

    /// The stream writes the word after the work that is enqueued there.
    pub fn write(&self, stream: &EngineStream, value: u32) -> Result<(), GpuError> {
        let (driver, device) = self.gpu.raw();
        let mut last = self.last.lock();
        // SAFETY: the stream lives, as its maker vouches; the word is valid until it has the last enqueued value.
        unsafe { driver.write_word(device, stream.raw(), self.words.address(0), value)? };
        *last = value;
        Ok(())
    }

    /// The last value that streams have written. Work that was enqueued before that write is done.
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
                    gpu = self.gpu.info().ordinal,
                    written = self.words.get(0),
                    awaited = last,
                    "engine's stream has not made its last write; a page stays pinned"
                );
                return;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        // SAFETY: the words are dropped once, here, and no stream writes them any more.
        unsafe { ManuallyDrop::drop(&mut self.words) };
    }
}
