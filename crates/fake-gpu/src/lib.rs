//! GPUs made of threads and shared memory, so that all code above the driver runs on a machine without a GPU.
//!
//! Device memory is files that other processes can map, streams are threads, events are counters. The fake refuses what CUDA
//! refuses: a kernel that touches memory beyond its device's reach costs the context, a process cannot open its own export,
//! and a copy engine does not cross from one pinned range into the next. Tests can inject faults.
//!
//! Only tests use this crate; no program for users contains it.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("kvlane runs on 64-bit Linux");

mod bodies;
mod event;
mod faults;
mod handle;
mod machine;
mod mapping;
mod memory;
mod pace;
mod stream;

use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvlane_gpu::{
    COPY, Copy, CopyMethods, DeviceInfo, Driver, EventHandle, EventScope, GpuError, Grid, IpcHandle, Kernel,
    NoDriver, Priority, Residency, StreamHandle, code,
};
use parking_lot::Mutex;

use self::event::Event;
use self::machine::{Machine, Work};
use self::memory::Memory;
use self::pace::Pace;
pub use self::pace::Rates;
use self::stream::Stream;

/// The driver with this name, as [`kvlane_gpu::driver_named`] gives it, and `fake` besides: a host with two GPUs.
///
/// # Errors
/// Those of [`kvlane_gpu::driver_named`]. `fake` fails only if the system has no addresses left.
pub fn driver_named(name: Option<&str>) -> Result<Arc<dyn Driver>, NoDriver> {
    if name != Some("fake") {
        return kvlane_gpu::driver_named(name);
    }
    let failed = |error: io::Error| GpuError::Invalid(format!("no fake GPUs: {error}"));
    Ok(Arc::new(FakeDriver::new(FakeOptions::default()).map_err(failed)?))
}

/// The number that a fake says it has. It runs the blocks of a launch at a time, each in a thread.
const MULTIPROCESSORS: u32 = 8;

/// The GPUs of a fake host.
#[derive(Debug, Clone)]
pub struct FakeOptions {
    /// The number of the host's GPUs. They have the numbers from 0.
    pub devices: u32,
    /// Numbers of the GPUs that this process sees, as CUDA_VISIBLE_DEVICES has them. The first has ordinal 0. None: all.
    pub visible: Option<Vec<u32>>,
    /// Memory of each, in bytes. Only written pages take memory of the machine.
    pub device_bytes: u64,
    /// Ways to copy beside single copies.
    pub methods: CopyMethods,
    /// Whether links of their own join the GPUs, as NVLink does.
    pub linked: bool,
    /// Whether GPUs can reach each other's memory at all.
    pub reachable: bool,
    /// How fast copies are at most. None: as fast as this machine copies.
    pub rates: Option<Rates>,
}

impl Default for FakeOptions {
    fn default() -> FakeOptions {
        let methods = CopyMethods { batch: true, kernel: true };
        let (devices, visible, device_bytes) = (2, None, 16 << 30);
        FakeOptions { devices, visible, device_bytes, methods, linked: true, reachable: true, rates: None }
    }
}

impl FakeOptions {
    /// The number of each visible GPU, by ordinal.
    fn numbers(&self) -> Vec<u32> {
        self.visible.clone().unwrap_or_else(|| (0..self.devices).collect())
    }
}

/// The call that copied bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// A call for one copy.
    Single,
    /// A call for many.
    Batch,
    /// The copy kernel.
    Kernel,
}

/// A call that enqueued copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoggedCopy {
    /// Ordinal of the device.
    pub device: u32,
    /// Raw handle of the stream.
    pub stream: StreamHandle,
    /// The call of the driver that enqueued the copies.
    pub method: Method,
    /// Copies in this call.
    pub copies: u64,
    /// Bytes of all of them.
    pub bytes: u64,
}

/// A [`Driver`] without hardware.
#[derive(Debug)]
pub struct FakeDriver {
    options: FakeOptions,
    /// The host's number of each device, by ordinal.
    numbers: Vec<u32>,
    machine: Arc<Machine>,
    next_handle: AtomicU64,
    /// The open count of each device.
    open: Mutex<HashMap<u32, u32>>,
    streams: Mutex<HashMap<(u32, StreamHandle), Arc<Stream>>>,
    events: Mutex<HashMap<EventHandle, Arc<Event>>>,
    log: Mutex<Vec<LoggedCopy>>,
    calls: AtomicU64,
}

impl FakeDriver {
    /// A host with these GPUs. Fails only if the system has no addresses left.
    pub fn new(options: FakeOptions) -> io::Result<FakeDriver> {
        let numbers = options.numbers();
        let memory = Memory::new(options.device_bytes, numbers.clone(), options.reachable)?;
        let machine = Arc::new(Machine::new(memory, Pace::new(options.rates)));
        Ok(FakeDriver {
            options,
            numbers,
            machine,
            next_handle: AtomicU64::new(1),
            open: Mutex::default(),
            streams: Mutex::default(),
            events: Mutex::default(),
            log: Mutex::default(),
            calls: AtomicU64::new(0),
        })
    }

    /// Fails the `nth` call from now on this device (1 is the next): of the operation with this CUDA name, or of any. A
    /// sticky error costs the device its context.
    pub fn fail_call(&self, device: u32, operation: Option<&'static str>, nth: u64, code: u32) {
        self.machine.call_faults.lock().add(device, operation, nth, code);
    }

    /// Fails the `nth` enqueued copy, batch or kernel that runs from now on this device. Its stream reports the error once.
    /// If the error is sticky, the device reports it for ever.
    pub fn fail_work(&self, device: u32, nth: u64, code: u32) {
        self.machine.work_faults.lock().add(device, None, nth, code);
    }

    /// Adds this time to every copy for each MiB.
    pub fn slow_down(&self, per_mib: Duration) {
        (0..self.numbers.len()).for_each(|device| self.slow_down_device(device as u32, per_mib));
    }

    /// The same for the copies of one device.
    pub fn slow_down_device(&self, device: u32, per_mib: Duration) {
        self.machine.slowness.lock().insert(device, per_mib);
    }

    /// Calls on open devices so far, those that failed too.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Every call that enqueued copies since the last [`FakeDriver::clear_log`].
    pub fn log(&self) -> Vec<LoggedCopy> {
        self.log.lock().clone()
    }

    /// Forgets the calls so far.
    pub fn clear_log(&self) {
        self.log.lock().clear();
    }

    /// The checks at the start of every call on a device.
    fn begin(&self, device: u32, operation: &'static str) -> Result<(), GpuError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        if !self.open.lock().contains_key(&device) {
            return Err(error(operation, code::INVALID_CONTEXT));
        }
        if let Some(code) = self.machine.lost(device) {
            return Err(error(operation, code));
        }
        match self.machine.call_faults.lock().next(device, operation) {
            Some(code) => Err(error(operation, self.machine.fail(device, code))),
            None => Ok(()),
        }
    }

    fn new_handle(&self) -> u64 {
        // Multiples of 16, as addresses of a driver's objects are.
        self.next_handle.fetch_add(1, Ordering::Relaxed) << 4
    }

    fn stream(
        &self,
        device: u32,
        stream: StreamHandle,
        operation: &'static str,
    ) -> Result<Arc<Stream>, GpuError> {
        let mut streams = self.streams.lock();
        match streams.get(&(device, stream)) {
            Some(found) => Ok(Arc::clone(found)),
            // The default stream exists from the start.
            None if stream == StreamHandle(0) => {
                let made = self.start_stream(device, operation)?;
                streams.insert((device, stream), Arc::clone(&made));
                Ok(made)
            }
            None => Err(error(operation, code::INVALID_HANDLE)),
        }
    }

    fn start_stream(&self, device: u32, operation: &'static str) -> Result<Arc<Stream>, GpuError> {
        let started = Stream::start(Arc::clone(&self.machine), device);
        started.map(Arc::new).map_err(|_| error(operation, code::OUT_OF_MEMORY))
    }

    fn event(&self, event: EventHandle, operation: &'static str) -> Result<Arc<Event>, GpuError> {
        self.events.lock().get(&event).cloned().ok_or_else(|| error(operation, code::INVALID_HANDLE))
    }

    fn add_event(&self, event: Event) -> EventHandle {
        let handle = EventHandle(self.new_handle());
        self.events.lock().insert(handle, Arc::new(event));
        handle
    }

    /// Freeing memory waits for all work of the device, as it does with CUDA.
    fn wait_idle(&self, device: u32) {
        let streams: Vec<_> = {
            let all = self.streams.lock();
            all.iter()
                .filter(|((owner, _), _)| *owner == device)
                .map(|(_, stream)| Arc::clone(stream))
                .collect()
        };
        for stream in streams {
            stream.wait_idle();
        }
    }

    fn enqueue(
        &self,
        device: u32,
        stream: StreamHandle,
        operation: &'static str,
        method: Method,
        copies: &[Copy],
        work: Work,
    ) -> Result<(), GpuError> {
        let queue = self.stream(device, stream, operation)?;
        let bytes = copies.iter().map(|copy| copy.len).sum();
        let copies = copies.len() as u64;
        self.log.lock().push(LoggedCopy { device, stream, method, copies, bytes });
        queue.push(work);
        Ok(())
    }
}

impl Drop for FakeDriver {
    fn drop(&mut self) {
        self.machine.stopping.store(true, Ordering::Relaxed);
        let streams: Vec<_> = self.streams.get_mut().drain().map(|(_, stream)| stream).collect();
        for stream in &streams {
            stream.close();
        }
        for stream in streams {
            if let Some(stream) = Arc::into_inner(stream) {
                stream.join();
            }
        }
    }
}

fn error(operation: &'static str, code: u32) -> GpuError {
    let name = match code {
        code::INVALID_VALUE => "CUDA_ERROR_INVALID_VALUE",
        code::OUT_OF_MEMORY => "CUDA_ERROR_OUT_OF_MEMORY",
        code::INVALID_CONTEXT => "CUDA_ERROR_INVALID_CONTEXT",
        code::MAP_FAILED => "CUDA_ERROR_MAP_FAILED",
        code::OPERATING_SYSTEM => "CUDA_ERROR_OPERATING_SYSTEM",
        code::INVALID_HANDLE => "CUDA_ERROR_INVALID_HANDLE",
        code::ILLEGAL_ADDRESS => "CUDA_ERROR_ILLEGAL_ADDRESS",
        code::HOST_MEMORY_ALREADY_REGISTERED => "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        code::HOST_MEMORY_NOT_REGISTERED => "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        _ => "an error that a test asked for",
    };
    GpuError::Cuda { operation, code, name: name.into() }
}

fn missing(operation: &'static str) -> GpuError {
    GpuError::Unsupported { operation, reason: "this fake was made without it".into() }
}

/// The same for every fake, so that two processes agree on which GPU is which.
fn uuid(number: u32) -> [u8; 16] {
    let mut uuid = *b"kvlane-fake-0000";
    uuid[12..].copy_from_slice(&number.to_be_bytes());
    uuid
}

impl Driver for FakeDriver {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>, GpuError> {
        let info = |(ordinal, number): (usize, &u32)| DeviceInfo {
            ordinal: ordinal as u32,
            uuid: uuid(*number),
            name: "fake GPU".into(),
            total_bytes: self.options.device_bytes,
            pci_bus_id: format!("0000:{:02x}:00.0", 0xf0 + number),
            compute_capability: (0, 0),
        };
        Ok(self.numbers.iter().enumerate().map(info).collect())
    }

    fn open(&self, device: u32) -> Result<(), GpuError> {
        if device as usize >= self.numbers.len() {
            return Err(GpuError::NoSuchDevice(device.to_string()));
        }
        if let Some(code) = self.machine.call_faults.lock().next(device, "cuDevicePrimaryCtxRetain") {
            return Err(error("cuDevicePrimaryCtxRetain", code));
        }
        *self.open.lock().entry(device).or_default() += 1;
        Ok(())
    }

    fn close(&self, device: u32) -> Result<(), GpuError> {
        let mut open = self.open.lock();
        match open.get_mut(&device) {
            Some(count) if *count > 1 => *count -= 1,
            Some(_) => drop(open.remove(&device)),
            None => return Err(error("cuDevicePrimaryCtxRelease", code::INVALID_CONTEXT)),
        }
        Ok(())
    }

    fn methods(&self, device: u32) -> CopyMethods {
        match self.open.lock().contains_key(&device) {
            true => self.options.methods.clone(),
            false => CopyMethods { batch: false, kernel: false },
        }
    }

    fn alloc(&self, device: u32, bytes: u64) -> Result<u64, GpuError> {
        self.begin(device, "cuMemAlloc")?;
        self.machine.memory.alloc(device, bytes).map_err(|code| error("cuMemAlloc", code))
    }

    unsafe fn free(&self, device: u32, address: u64) -> Result<(), GpuError> {
        self.begin(device, "cuMemFree")?;
        self.wait_idle(device);
        self.machine.memory.free(device, address).map_err(|code| error("cuMemFree", code))
    }

    fn address_range(&self, device: u32, address: u64) -> Result<(u64, u64), GpuError> {
        self.begin(device, "cuMemGetAddressRange")?;
        self.machine.memory.address_range(address).map_err(|code| error("cuMemGetAddressRange", code))
    }

    fn is_ipc_capable(&self, device: u32, address: u64) -> Result<bool, GpuError> {
        self.begin(device, "cuPointerGetAttribute")?;
        self.machine.memory.is_ipc_capable(address).map_err(|code| error("cuPointerGetAttribute", code))
    }

    fn ipc_export(&self, device: u32, address: u64) -> Result<IpcHandle, GpuError> {
        self.begin(device, "cuIpcGetMemHandle")?;
        self.machine.memory.export(address).map_err(|code| error("cuIpcGetMemHandle", code))
    }

    fn ipc_open(&self, device: u32, handle: &IpcHandle) -> Result<u64, GpuError> {
        self.begin(device, "cuIpcOpenMemHandle")?;
        self.machine.memory.import(device, handle).map_err(|code| error("cuIpcOpenMemHandle", code))
    }

    unsafe fn ipc_close(&self, device: u32, base: u64) -> Result<(), GpuError> {
        self.begin(device, "cuIpcCloseMemHandle")?;
        self.machine.memory.close(device, base).map_err(|code| error("cuIpcCloseMemHandle", code))
    }

    fn reserve(&self, device: u32, bytes: u64) -> Result<u64, GpuError> {
        self.begin(device, "cuMemAddressReserve")?;
        self.machine.memory.reserve(device, bytes).map_err(|code| error("cuMemAddressReserve", code))
    }

    unsafe fn unreserve(&self, device: u32, address: u64, bytes: u64) -> Result<(), GpuError> {
        self.begin(device, "cuMemAddressFree")?;
        let given_up = self.machine.memory.unreserve(device, address, bytes);
        given_up.map_err(|code| error("cuMemAddressFree", code))
    }

    unsafe fn chunk_create(
        &self,
        device: u32,
        address: u64,
        bytes: u64,
        shareable: bool,
    ) -> Result<(), GpuError> {
        self.begin(device, "cuMemCreate")?;
        let made = self.machine.memory.chunk_create(device, address, bytes, shareable);
        made.map_err(|code| error("cuMemCreate", code))
    }

    fn chunk_export(&self, device: u32, address: u64) -> Result<OwnedFd, GpuError> {
        self.begin(device, "cuMemExportToShareableHandle")?;
        self.machine.memory.chunk_export(address).map_err(|(operation, code)| match error(operation, code) {
            GpuError::Cuda { code: code::OPERATING_SYSTEM, .. } => GpuError::NoDescriptor { operation },
            GpuError::Cuda { name, .. } => GpuError::NotShareable { address, operation, name },
            other => other,
        })
    }

    unsafe fn chunk_import(
        &self,
        device: u32,
        address: u64,
        bytes: u64,
        descriptor: BorrowedFd<'_>,
    ) -> Result<(), GpuError> {
        self.begin(device, "cuMemImportFromShareableHandle")?;
        let imported = self.machine.memory.chunk_import(device, address, bytes, descriptor);
        imported.map_err(|code| error("cuMemImportFromShareableHandle", code))
    }

    unsafe fn chunk_unmap(&self, device: u32, address: u64, bytes: u64) -> Result<(), GpuError> {
        self.begin(device, "cuMemUnmap")?;
        self.machine.memory.chunk_unmap(device, address, bytes).map_err(|code| error("cuMemUnmap", code))
    }

    unsafe fn host_register(&self, device: u32, address: u64, bytes: u64) -> Result<(), GpuError> {
        self.begin(device, "cuMemHostRegister")?;
        self.machine.memory.register(address, bytes).map_err(|code| error("cuMemHostRegister", code))
    }

    unsafe fn host_unregister(&self, device: u32, address: u64) -> Result<(), GpuError> {
        self.begin(device, "cuMemHostUnregister")?;
        self.machine.memory.unregister(address).map_err(|code| error("cuMemHostUnregister", code))
    }

    fn host_alloc(&self, device: u32, bytes: u64) -> Result<u64, GpuError> {
        self.begin(device, "cuMemHostAlloc")?;
        self.machine.memory.host_alloc(bytes).map_err(|code| error("cuMemHostAlloc", code))
    }

    unsafe fn host_free(&self, device: u32, address: u64) -> Result<(), GpuError> {
        self.begin(device, "cuMemFreeHost")?;
        self.wait_idle(device);
        self.machine.memory.host_free(address).map_err(|code| error("cuMemFreeHost", code))
    }

    fn stream_create(&self, device: u32, _priority: Priority) -> Result<StreamHandle, GpuError> {
        self.begin(device, "cuStreamCreateWithPriority")?;
        let stream = self.start_stream(device, "cuStreamCreateWithPriority")?;
        let handle = StreamHandle(self.new_handle());
        self.streams.lock().insert((device, handle), stream);
        Ok(handle)
    }

    unsafe fn stream_destroy(&self, device: u32, stream: StreamHandle) -> Result<(), GpuError> {
        self.begin(device, "cuStreamDestroy")?;
        match self.streams.lock().remove(&(device, stream)) {
            Some(stream) => stream.close(),
            None => return Err(error("cuStreamDestroy", code::INVALID_HANDLE)),
        }
        Ok(())
    }

    unsafe fn stream_synchronize(&self, device: u32, stream: StreamHandle) -> Result<(), GpuError> {
        self.begin(device, "cuStreamSynchronize")?;
        let queue = self.stream(device, stream, "cuStreamSynchronize")?;
        queue.wait_idle();
        let failure = self.machine.lost(device).or_else(|| queue.take_failure());
        failure.map_or(Ok(()), |code| Err(error("cuStreamSynchronize", code)))
    }

    unsafe fn stream_query(&self, device: u32, stream: StreamHandle) -> Result<bool, GpuError> {
        self.begin(device, "cuStreamQuery")?;
        let queue = self.stream(device, stream, "cuStreamQuery")?;
        let idle = queue.is_idle();
        match queue.take_failure() {
            Some(code) => Err(error("cuStreamQuery", code)),
            None => Ok(idle),
        }
    }

    unsafe fn stream_wait_event(
        &self,
        device: u32,
        stream: StreamHandle,
        event: EventHandle,
    ) -> Result<(), GpuError> {
        self.begin(device, "cuStreamWaitEvent")?;
        let event = self.event(event, "cuStreamWaitEvent")?;
        let record = event.latest();
        self.stream(device, stream, "cuStreamWaitEvent")?.push(Work::Wait { event, record });
        Ok(())
    }

    fn event_create(&self, device: u32, scope: EventScope) -> Result<EventHandle, GpuError> {
        self.begin(device, "cuEventCreate")?;
        let event = match scope {
            EventScope::Process => Event::new(),
            EventScope::Host => Event::shared().map_err(|_| error("cuEventCreate", code::OUT_OF_MEMORY))?,
        };
        Ok(self.add_event(event))
    }

    unsafe fn event_destroy(&self, device: u32, event: EventHandle) -> Result<(), GpuError> {
        self.begin(device, "cuEventDestroy")?;
        match self.events.lock().remove(&event) {
            Some(_) => Ok(()),
            None => Err(error("cuEventDestroy", code::INVALID_HANDLE)),
        }
    }

    unsafe fn event_record(
        &self,
        device: u32,
        event: EventHandle,
        stream: StreamHandle,
    ) -> Result<(), GpuError> {
        self.begin(device, "cuEventRecord")?;
        let queue = self.stream(device, stream, "cuEventRecord")?;
        let event = self.event(event, "cuEventRecord")?;
        let record = event.record();
        queue.push(Work::Record { event, record });
        Ok(())
    }

    unsafe fn event_query(&self, device: u32, event: EventHandle) -> Result<bool, GpuError> {
        self.begin(device, "cuEventQuery")?;
        let event = self.event(event, "cuEventQuery")?;
        Ok(event.is_done(event.latest()))
    }

    unsafe fn event_synchronize(&self, device: u32, event: EventHandle) -> Result<(), GpuError> {
        self.begin(device, "cuEventSynchronize")?;
        let event = self.event(event, "cuEventSynchronize")?;
        let record = event.latest();
        if self.machine.wait_until(device, || event.is_done(record)) {
            return Ok(());
        }
        let lost = self.machine.lost(device).unwrap_or(code::INVALID_CONTEXT);
        Err(error("cuEventSynchronize", lost))
    }

    unsafe fn event_export(&self, device: u32, event: EventHandle) -> Result<IpcHandle, GpuError> {
        self.begin(device, "cuIpcGetEventHandle")?;
        let event = self.event(event, "cuIpcGetEventHandle")?;
        event.export().map_err(|code| error("cuIpcGetEventHandle", code))
    }

    fn event_open(&self, device: u32, handle: &IpcHandle) -> Result<EventHandle, GpuError> {
        self.begin(device, "cuIpcOpenEventHandle")?;
        let event = Event::open(handle).map_err(|code| error("cuIpcOpenEventHandle", code))?;
        Ok(self.add_event(event))
    }

    unsafe fn copy_async(&self, device: u32, stream: StreamHandle, copy: Copy) -> Result<(), GpuError> {
        self.begin(device, "cuMemcpyAsync")?;
        self.enqueue(device, stream, "cuMemcpyAsync", Method::Single, &[copy], Work::Copies(vec![copy]))
    }

    unsafe fn copy_batch_async(
        &self,
        device: u32,
        stream: StreamHandle,
        copies: &[Copy],
    ) -> Result<(), GpuError> {
        if !self.methods(device).batch {
            return Err(missing("cuMemcpyBatchAsync"));
        }
        self.begin(device, "cuMemcpyBatchAsync")?;
        let work = Work::Copies(copies.to_vec());
        self.enqueue(device, stream, "cuMemcpyBatchAsync", Method::Batch, copies, work)
    }

    fn synchronize(&self, device: u32) -> Result<(), GpuError> {
        self.begin(device, "cuCtxSynchronize")?;
        self.wait_idle(device);
        Ok(())
    }

    unsafe fn zero_async(
        &self,
        device: u32,
        stream: StreamHandle,
        address: u64,
        bytes: u64,
    ) -> Result<(), GpuError> {
        self.begin(device, "cuMemsetD8Async")?;
        self.stream(device, stream, "cuMemsetD8Async")?.push(Work::Zeros { address, bytes });
        Ok(())
    }

    fn load_kernel(
        &self,
        device: u32,
        kernel: &'static Kernel,
        _shared_bytes: u32,
    ) -> Result<Residency, GpuError> {
        self.begin(device, "cuModuleLoadData")?;
        match kernel.entry == COPY.entry || bodies::body_of(kernel.entry).is_some() {
            true => Ok(Residency { each: 1, multiprocessors: MULTIPROCESSORS }),
            false => Err(GpuError::Unsupported {
                operation: "cuModuleLoadData",
                reason: format!("this fake has no {}: {}", kernel.entry.to_string_lossy(), bodies::WHY_NONE),
            }),
        }
    }

    unsafe fn launch(
        &self,
        device: u32,
        stream: StreamHandle,
        kernel: &'static Kernel,
        grid: Grid,
        parameters: &[&[u8]],
    ) -> Result<(), GpuError> {
        if !self.methods(device).kernel {
            return Err(missing("cuLaunchKernel"));
        }
        self.begin(device, "cuLaunchKernel")?;
        let invalid = || error("cuLaunchKernel", code::INVALID_VALUE);
        if grid.blocks == 0 {
            return Err(invalid());
        }
        if kernel.entry == COPY.entry {
            let [table, count] = parameters else { return Err(invalid()) };
            let table = u64::from_ne_bytes((*table).try_into().map_err(|_| invalid())?);
            let count = u32::from_ne_bytes((*count).try_into().map_err(|_| invalid())?);
            if count == 0 {
                return Err(invalid());
            }
            // For the log only: the kernel reads the table when it runs.
            let copies = self.machine.table(device, table, count).unwrap_or_default();
            let work = Work::Copy { table, count };
            return self.enqueue(device, stream, "cuLaunchKernel", Method::Kernel, &copies, work);
        }
        let (Some(body), [parameters]) = (bodies::body_of(kernel.entry), parameters) else {
            return Err(invalid());
        };
        let work = Work::Body { body, parameters: parameters.to_vec(), blocks: grid.blocks };
        self.stream(device, stream, "cuLaunchKernel")?.push(work);
        Ok(())
    }

    unsafe fn write_word(
        &self,
        device: u32,
        stream: StreamHandle,
        address: u64,
        value: u32,
    ) -> Result<(), GpuError> {
        self.begin(device, "cuStreamWriteValue32")?;
        self.stream(device, stream, "cuStreamWriteValue32")?.push(Work::WriteWord { address, value });
        Ok(())
    }

    unsafe fn wait_word(
        &self,
        device: u32,
        stream: StreamHandle,
        address: u64,
        value: u32,
    ) -> Result<(), GpuError> {
        self.begin(device, "cuStreamWaitValue32")?;
        self.stream(device, stream, "cuStreamWaitValue32")?.push(Work::WaitWord { address, value });
        Ok(())
    }

    fn is_linked(&self, device: u32, peer: u32) -> Result<bool, GpuError> {
        match (device.max(peer) as usize) < self.numbers.len() {
            true => Ok(self.options.linked && device != peer),
            false => Err(GpuError::NoSuchDevice(device.max(peer).to_string())),
        }
    }

    fn can_reach(&self, device: u32, peer: u32) -> Result<bool, GpuError> {
        self.is_linked(device, peer)?;
        Ok(self.options.reachable || device == peer)
    }

    fn let_others_capture(&self) {}

    fn enable_peer(&self, device: u32, peer: u32) -> Result<(), GpuError> {
        if !self.can_reach(device, peer)? {
            let reason = format!("GPU {device} does not reach the memory of GPU {peer}");
            return Err(GpuError::Unsupported { operation: "peer access", reason });
        }
        self.begin(device, "cuCtxEnablePeerAccess")?;
        self.begin(peer, "cuCtxEnablePeerAccess")?;
        match self.machine.memory.enable_peer(device, peer) {
            Ok(()) | Err(code::PEER_ACCESS_ALREADY_ENABLED) => Ok(()),
            Err(code) => Err(error("cuCtxEnablePeerAccess", code)),
        }
    }
}
