//! Streams and events.

use crate::device::{Gpu, warn_of};
use crate::driver::{Copy, EventHandle, EventScope, IpcHandle, Priority, StreamHandle};
use crate::error::GpuError;

/// A queue of work on a GPU that runs in order. What is enqueued when this is dropped still runs.
#[derive(Debug)]
pub struct Stream {
    gpu: Gpu,
    raw: StreamHandle,
}

impl Stream {
    /// A new stream.
    pub fn new(gpu: &Gpu, priority: Priority) -> Result<Stream, GpuError> {
        let (driver, device) = gpu.raw();
        let raw = driver.stream_create(device, priority)?;
        Ok(Stream { gpu: gpu.clone(), raw })
    }

    /// The GPU that it runs on.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The driver's handle.
    pub fn raw(&self) -> StreamHandle {
        self.raw
    }

    /// Waits for everything that is enqueued, and reports what failed.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        let (driver, device) = self.gpu.raw();
        // SAFETY: the stream lives.
        unsafe { driver.stream_synchronize(device, self.raw) }
    }

    /// Whether everything that was enqueued is done.
    pub fn is_idle(&self) -> Result<bool, GpuError> {
        let (driver, device) = self.gpu.raw();
        // SAFETY: the stream lives.
        unsafe { driver.stream_query(device, self.raw) }
    }

    /// Later work starts after what was recorded last in the event; at once if nothing was.
    pub fn wait(&self, event: &Event) -> Result<(), GpuError> {
        let (driver, device) = self.gpu.raw();
        // SAFETY: stream and event live.
        unsafe { driver.stream_wait_event(device, self.raw, event.raw) }
    }

    /// Enqueues one copy by a copy engine.
    ///
    /// # Safety
    /// Both ranges stay valid until the copy is done, and nobody else touches the destination, or writes the source,
    /// meanwhile.
    pub unsafe fn copy(&self, copy: Copy) -> Result<(), GpuError> {
        let (driver, device) = self.gpu.raw();
        // SAFETY: the stream lives; the caller vouches for the ranges.
        unsafe { driver.copy_async(device, self.raw, copy) }
    }

    /// Writes a word in device or pinned memory after the work that is enqueued.
    ///
    /// # Safety
    /// The address is a multiple of 4 and valid until that is done.
    pub unsafe fn write_word(&self, address: u64, value: u32) -> Result<(), GpuError> {
        let (driver, device) = self.gpu.raw();
        // SAFETY: the stream lives; the caller vouches for the word.
        unsafe { driver.write_word(device, self.raw, address, value) }
    }

    /// Later work starts once the word in device or pinned memory has reached a value, compared cyclically.
    ///
    /// # Safety
    /// The address is a multiple of 4 and valid until that is done.
    pub unsafe fn wait_word(&self, address: u64, value: u32) -> Result<(), GpuError> {
        let (driver, device) = self.gpu.raw();
        // SAFETY: the stream lives; the caller vouches for the word.
        unsafe { driver.wait_word(device, self.raw, address, value) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let (driver, device) = self.gpu.raw();
        // SAFETY: the stream is destroyed once, here.
        warn_of("destroy a stream", unsafe { driver.stream_destroy(device, self.raw) });
    }
}

/// A stream that another library made, such as an engine's: its number was vouched for once.
#[derive(Debug)]
pub struct EngineStream(StreamHandle);

impl EngineStream {
    /// For work in host memory, which no stream orders; on a GPU it is the default stream.
    pub const DEFAULT: Self = Self(StreamHandle(0));

    /// # Safety
    /// It is the default stream or one in this process, which lives as long as this, of the GPU that this is used with.
    pub unsafe fn from_raw(raw: StreamHandle) -> Self {
        Self(raw)
    }

    /// The driver's handle.
    pub fn raw(&self) -> StreamHandle {
        self.0
    }
}

/// A point in a stream's work that others wait for: made here, or opened from another process's handle.
#[derive(Debug)]
pub struct Event {
    gpu: Gpu,
    raw: EventHandle,
}

impl Event {
    /// A new event, with nothing recorded.
    pub fn new(gpu: &Gpu, scope: EventScope) -> Result<Event, GpuError> {
        let (driver, device) = gpu.raw();
        let raw = driver.event_create(device, scope)?;
        Ok(Event { gpu: gpu.clone(), raw })
    }

    /// The event that another process exported.
    pub fn open(gpu: &Gpu, handle: &IpcHandle) -> Result<Event, GpuError> {
        let (driver, device) = gpu.raw();
        let raw = driver.event_open(device, handle)?;
        Ok(Event { gpu: gpu.clone(), raw })
    }

    /// A handle by which another process can open it; only for [`EventScope::Host`].
    pub fn export(&self) -> Result<IpcHandle, GpuError> {
        let (driver, device) = self.gpu.raw();
        // SAFETY: the event lives.
        unsafe { driver.event_export(device, self.raw) }
    }

    /// The driver's handle.
    pub fn raw(&self) -> EventHandle {
        self.raw
    }

    /// The event now stands for all work enqueued in the stream so far.
    pub fn record(&self, stream: &Stream) -> Result<(), GpuError> {
        // SAFETY: the stream lives.
        unsafe { self.record_raw(stream.raw) }
    }

    /// As [`Event::record`], in a stream of this GPU that another library made; 0 is the default stream.
    ///
    /// # Safety
    /// The handle names a live stream of this GPU in this process.
    pub unsafe fn record_raw(&self, stream: StreamHandle) -> Result<(), GpuError> {
        let (driver, device) = self.gpu.raw();
        // SAFETY: the event lives; the caller vouches for the stream.
        unsafe { driver.event_record(device, self.raw, stream) }
    }

    /// Lets a stream that another library made wait as [`Stream::wait`] does; 0 is the default stream.
    ///
    /// # Safety
    /// The handle names a live stream of this GPU in this process.
    pub unsafe fn hold_up_raw(&self, stream: StreamHandle) -> Result<(), GpuError> {
        let (driver, device) = self.gpu.raw();
        // SAFETY: the event lives; the caller vouches for the stream.
        unsafe { driver.stream_wait_event(device, stream, self.raw) }
    }

    /// Whether what was recorded last is done; true if nothing was recorded.
    pub fn is_done(&self) -> Result<bool, GpuError> {
        let (driver, device) = self.gpu.raw();
        // SAFETY: the event lives.
        unsafe { driver.event_query(device, self.raw) }
    }

    /// Waits for what was recorded last.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        let (driver, device) = self.gpu.raw();
        // SAFETY: the event lives.
        unsafe { driver.event_synchronize(device, self.raw) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let (driver, device) = self.gpu.raw();
        // SAFETY: the event is destroyed once, here.
        warn_of("destroy an event", unsafe { driver.event_destroy(device, self.raw) });
    }
}
