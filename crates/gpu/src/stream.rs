//! [`Stream`] and [`Event`]: the driver's handles, destroyed when dropped; [`EngineStream`]: a stream of another library.

use crate::device::{Gpu, warn_of};
use crate::driver::{Copy, EventHandle, EventScope, IpcHandle, Priority, StreamHandle};
use crate::error::GpuError;

/// A queue of work on a GPU that runs in order. Enqueued work still runs after a drop.
#[derive(Debug)]
pub struct Stream {
    gpu: Gpu,
    raw: StreamHandle,
}

impl Stream {
    /// A stream that runs independently of the default stream.
    pub fn new(gpu: &Gpu, priority: Priority) -> Result<Stream, GpuError> {
        let (driver, device) = gpu.raw();
        let raw = driver.stream_create(device, priority)?;
        Ok(Stream { gpu: gpu.clone(), raw })
    }

    /// The stream's GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The driver's handle.
    pub fn raw(&self) -> StreamHandle {
        self.raw
    }

    /// Waits for all enqueued work, and returns its error.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        let (driver, device) = self.gpu.raw();
        // SAFETY: the stream lives.
        unsafe { driver.stream_synchronize(device, self.raw) }
    }

    /// Whether all enqueued work is done.
    pub fn is_idle(&self) -> Result<bool, GpuError> {
        let (driver, device) = self.gpu.raw();
        // SAFETY: the stream lives.
        unsafe { driver.stream_query(device, self.raw) }
    }

    /// Later work starts after the work that the event stands for; at once if nothing was recorded.
    pub fn wait(&self, event: &Event) -> Result<(), GpuError> {
        let (driver, device) = self.gpu.raw();
        // SAFETY: stream and event live.
        unsafe { driver.stream_wait_event(device, self.raw, event.raw) }
    }

    /// Enqueues one copy by a copy engine.
    ///
    /// # Safety
    /// Both ranges stay valid until the copy is done. Meanwhile no other code touches the destination or writes the source.
    pub unsafe fn copy(&self, copy: Copy) -> Result<(), GpuError> {
        let (driver, device) = self.gpu.raw();
        // SAFETY: the stream lives; the caller vouches for the ranges.
        unsafe { driver.copy_async(device, self.raw, copy) }
    }

    /// Writes a word in device or pinned memory after the enqueued work.
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
        warn_of(Some(device), "destroy a stream", unsafe { driver.stream_destroy(device, self.raw) });
    }
}

/// A stream that another library made, such as an engine's. [`EngineStream::from_raw`]'s caller vouches for it.
#[derive(Debug)]
pub struct EngineStream(StreamHandle);

impl EngineStream {
    /// For work in host memory, which no stream orders; on a GPU it is the default stream.
    pub const DEFAULT: Self = Self(StreamHandle(0));

    /// # Safety
    /// `raw` is the default stream, or a stream of this process and of the GPU with which this is used. It outlives this.
    pub unsafe fn from_raw(raw: StreamHandle) -> Self {
        Self(raw)
    }

    /// The driver's handle.
    pub fn raw(&self) -> StreamHandle {
        self.0
    }
}

/// A point in a stream's work for which others wait: made here, or opened from another process's handle.
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

    /// A handle by which another process can open the event, which has [`EventScope::Host`].
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

    /// Whether the work that the event stands for is done; true if nothing was recorded.
    pub fn is_done(&self) -> Result<bool, GpuError> {
        let (driver, device) = self.gpu.raw();
        // SAFETY: the event lives.
        unsafe { driver.event_query(device, self.raw) }
    }

    /// Waits for the work that the event stands for.
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
        warn_of(Some(device), "destroy an event", unsafe { driver.event_destroy(device, self.raw) });
    }
}
