//! The CUDA driver, opened at run time through cudarc.

mod allocation;
mod call;

use std::collections::HashMap;
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr;

use cudarc::driver::sys::{self, CUresult};
use parking_lot::RwLock;

use self::allocation::AllocationHandle;
use self::call::{check, handle};
use crate::driver::{
    Copy, CopyMethods, DeviceInfo, Driver, EventHandle, EventScope, IpcHandle, Priority, StreamHandle,
};
use crate::error::{GpuError, code};
use crate::kernel::{COPY, Grid, Kernel, Residency};
use crate::no_driver::NoDriver;

/// Every function that this file calls except the batch copy. cudarc would panic at the first call of a missing one.
const REQUIRED: [&str; 62] = [
    "cuCtxEnablePeerAccess",
    "cuCtxGetCurrent",
    "cuCtxGetStreamPriorityRange",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxSynchronize",
    "cuDeviceCanAccessPeer",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetP2PAttribute",
    "cuDeviceGetPCIBusId",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuInit",
    "cuIpcCloseMemHandle",
    "cuIpcGetEventHandle",
    "cuIpcGetMemHandle",
    "cuIpcOpenEventHandle",
    "cuIpcOpenMemHandle_v2",
    "cuLaunchKernel",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemAlloc_v2",
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetAddressRange_v2",
    "cuMemHostAlloc",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemImportFromShareableHandle",
    "cuMemMap",
    "cuMemRelease",
    "cuMemRetainAllocationHandle",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpyAsync",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuPointerGetAttribute",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuStreamWaitValue32_v2",
    "cuStreamWriteValue32_v2",
];

/// The batch copy, which CUDA has since 12.8.
const BATCH: &str = "cuMemcpyBatchAsync";

// Values of cuda.h, which cudarc types as enums while the functions take integers.
const STREAM_NON_BLOCKING: c_uint = 1;
const HOST_PORTABLE_AND_MAPPED: c_uint = 1 | 2;
const EVENT_BLOCKING_SYNC: c_uint = 1;
const EVENT_DISABLE_TIMING: c_uint = 2;
const EVENT_INTERPROCESS: c_uint = 4;
const IPC_LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
const WAIT_VALUE_GEQ: c_uint = 0;
const WRITE_VALUE_DEFAULT: c_uint = 0;
const MEMCPY_PREFER_OVERLAP_WITH_COMPUTE: c_uint = 1;

/// CUDA_ERROR_NO_DEVICE.
const NO_DEVICE: u32 = 100;

/// libcuda and the devices that are open.
#[derive(Debug)]
pub(crate) struct CudaDriver {
    has_batch: bool,
    contexts: RwLock<HashMap<u32, Context>>,
}

/// The primary context of an open device. Handles are numbers, because they belong to no thread.
#[derive(Debug, Clone)]
struct Context {
    opened: u32,
    raw: u64,
    /// Modules and kernels by name.
    modules: HashMap<&'static str, u64>,
    kernels: HashMap<&'static CStr, u64>,
    /// Shared memory that each kernel may have at most: the largest that any user of it asked for.
    shared_bytes: HashMap<&'static CStr, u32>,
}

impl CudaDriver {
    /// Opens libcuda and starts it.
    pub(crate) fn load() -> Result<CudaDriver, NoDriver> {
        // SAFETY: opening libcuda runs its initialisers, which is what it is installed for.
        if !unsafe { sys::is_culib_present() } {
            return Err(NoDriver::NoLibrary);
        }
        if let Some(missing) = REQUIRED.into_iter().find(|name| !has_symbol(name)) {
            return Err(NoDriver::TooOld(missing));
        }
        // SAFETY: cuInit may be called at any time.
        match check("cuInit", unsafe { sys::cuInit(0) }) {
            Err(GpuError::Cuda { code: NO_DEVICE, .. }) => return Err(NoDriver::NoDevice),
            outcome => outcome?,
        }
        Ok(CudaDriver { has_batch: has_symbol(BATCH), contexts: RwLock::default() })
    }

    fn info(ordinal: u32) -> Result<DeviceInfo, GpuError> {
        let device = device_handle(ordinal)?;
        let mut name = [0; 256];
        let mut bus = [0; 32];
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        let mut total_bytes = 0;
        // SAFETY: the device exists, and the buffers are as long as is said.
        unsafe {
            check("cuDeviceGetName", sys::cuDeviceGetName(name.as_mut_ptr(), 256, device))?;
            check("cuDeviceGetPCIBusId", sys::cuDeviceGetPCIBusId(bus.as_mut_ptr(), 32, device))?;
            check("cuDeviceGetUuid", sys::cuDeviceGetUuid_v2(&mut uuid, device))?;
            check("cuDeviceTotalMem", sys::cuDeviceTotalMem_v2(&mut total_bytes, device))?;
        }
        Ok(DeviceInfo {
            ordinal,
            uuid: uuid.bytes.map(|byte| byte as u8),
            name: text(&name),
            total_bytes: total_bytes as u64,
            // As the kernel writes it in sysfs.
            pci_bus_id: text(&bus).to_lowercase(),
            compute_capability: compute_capability(device)?,
        })
    }

    /// Makes a device's context current until the guard is dropped.
    fn enter(&self, device: u32, operation: &'static str) -> Result<Current, GpuError> {
        let context = self.contexts.read().get(&device).map(|context| context.raw);
        let closed = || GpuError::Invalid(format!("{operation}: GPU {device} is not open"));
        Current::new(context.ok_or_else(closed)?)
    }

    /// Makes one call with the device's context.
    fn call(
        &self,
        device: u32,
        operation: &'static str,
        call: impl FnOnce() -> CUresult,
    ) -> Result<(), GpuError> {
        let _current = self.enter(device, operation)?;
        check(operation, call())
    }

    /// Makes a call whose NOT_READY means false.
    fn query(
        &self,
        device: u32,
        operation: &'static str,
        call: impl FnOnce() -> CUresult,
    ) -> Result<bool, GpuError> {
        match self.call(device, operation, call) {
            Ok(()) => Ok(true),
            Err(GpuError::Cuda { code: code::NOT_READY, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// A context that is current on this thread; afterwards the one before it is again. The thread may belong to a
/// framework that keeps its own context current.
struct Current {
    pushed: bool,
}

impl Current {
    fn new(context: u64) -> Result<Current, GpuError> {
        let wanted: sys::CUcontext = handle(context);
        let mut current = ptr::null_mut();
        // SAFETY: the pointer is valid.
        check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut current) })?;
        let pushed = current != wanted;
        if pushed {
            // SAFETY: the context is retained as long as the device is open.
            check("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(wanted) })?;
        }
        Ok(Current { pushed })
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = ptr::null_mut();
            // SAFETY: the context was pushed on this thread, and calls are not nested.
            let outcome = check("cuCtxPopCurrent", unsafe { sys::cuCtxPopCurrent_v2(&mut popped) });
            crate::device::warn_of(None, "leave a context", outcome);
        }
    }
}

fn has_symbol(name: &str) -> bool {
    // SAFETY: libcuda is there; the symbol is looked up but not called.
    unsafe { sys::culib().get::<unsafe extern "C" fn()>(name.as_bytes()).is_ok() }
}

/// The number of a driver's object.
fn number<T>(handle: *mut T) -> u64 {
    handle.expose_provenance() as u64
}

fn device_handle(ordinal: u32) -> Result<sys::CUdevice, GpuError> {
    let mut device = 0;
    // SAFETY: the pointer is valid, and the driver checks the ordinal.
    check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, ordinal as c_int) })?;
    Ok(device)
}

fn attribute(device: sys::CUdevice, attribute: sys::CUdevice_attribute) -> Result<u32, GpuError> {
    let mut value = 0;
    // SAFETY: the pointer is valid and the device exists.
    check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) })?;
    Ok(value as u32)
}

/// Major and minor number.
fn compute_capability(device: sys::CUdevice) -> Result<(u32, u32), GpuError> {
    let major = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
    let minor = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR;
    Ok((attribute(device, major)?, attribute(device, minor)?))
}

fn text(buffer: &[std::ffi::c_char]) -> String {
    let bytes: Vec<u8> = buffer.iter().map(|byte| *byte as u8).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The copy kernel reads its table at the address that the host has for it.
fn check_same_address(device: sys::CUdevice) -> Result<(), GpuError> {
    let same_address = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM;
    if attribute(device, same_address)? == 0 {
        let reason = "the device does not reach pinned memory at its host address".into();
        return Err(GpuError::Unsupported { operation: "the copy kernel", reason });
    }
    Ok(())
}

impl Context {
    /// Loads a kernel, and its module if it is the first of it, into this context, which is current. Returns its function.
    fn load(&mut self, device: sys::CUdevice, kernel: &'static Kernel) -> Result<u64, GpuError> {
        if let Some(function) = self.kernels.get(kernel.entry) {
            return Ok(*function);
        }
        let module = match self.modules.get(kernel.module.name) {
            Some(module) => *module,
            None => {
                let image = kernel.module.image(compute_capability(device)?);
                let mut module = ptr::null_mut();
                // SAFETY: the image is machine code, which says itself how long it is, or text that ends in a zero.
                let loaded = unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) };
                check("cuModuleLoadData", loaded)?;
                self.modules.insert(kernel.module.name, number(module));
                number(module)
            }
        };
        let mut function = ptr::null_mut();
        // SAFETY: the module is loaded and the name ends in a zero.
        let found = unsafe { sys::cuModuleGetFunction(&mut function, handle(module), kernel.entry.as_ptr()) };
        check("cuModuleGetFunction", found)?;
        self.kernels.insert(kernel.entry, number(function));
        Ok(number(function))
    }
}

impl Driver for CudaDriver {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>, GpuError> {
        let mut count = 0;
        // SAFETY: the pointer is valid.
        check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
        (0..count as u32).map(CudaDriver::info).collect()
    }

    fn open(&self, device: u32) -> Result<(), GpuError> {
        let mut contexts = self.contexts.write();
        if let Some(context) = contexts.get_mut(&device) {
            context.opened += 1;
            return Ok(());
        }
        let raw_device = device_handle(device)?;
        let mut context = ptr::null_mut();
        // SAFETY: the pointer is valid and the device exists.
        let retained = unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, raw_device) };
        check("cuDevicePrimaryCtxRetain", retained)?;
        let raw = number(context);
        let mut context = Context {
            opened: 1,
            raw,
            modules: HashMap::new(),
            kernels: HashMap::new(),
            shared_bytes: HashMap::new(),
        };
        let loaded = Current::new(raw).and_then(|_current| {
            check_same_address(raw_device)?;
            context.load(raw_device, &COPY)
        });
        if let Err(error) = &loaded {
            // Log: blocks are copied by the GPU's copy engines only, which is slower for short pieces. Do: see
            // whether the driver is too old for this GPU or the wheel.
            tracing::warn!(gpu = device, %error, "copy kernel cannot be used");
        }
        contexts.insert(device, context);
        Ok(())
    }

    fn close(&self, device: u32) -> Result<(), GpuError> {
        let mut contexts = self.contexts.write();
        match contexts.get_mut(&device) {
            Some(context) if context.opened > 1 => {
                context.opened -= 1;
                return Ok(());
            }
            Some(_) => {}
            None => return Err(GpuError::Invalid(format!("GPU {device} is not open"))),
        }
        let closed = contexts.remove(&device);
        for (raw, module) in closed.iter().flat_map(|of| of.modules.values().map(|module| (of.raw, *module)))
        {
            // SAFETY: all users of its kernels have closed the device.
            let unload = |_current| unsafe { sys::cuModuleUnload(handle(module)) };
            let unloaded = Current::new(raw).map(unload).and_then(|result| check("cuModuleUnload", result));
            crate::device::warn_of(Some(device), "unload kernels", unloaded);
        }
        // SAFETY: the context was retained once by this driver.
        let released = unsafe { sys::cuDevicePrimaryCtxRelease_v2(device_handle(device)?) };
        check("cuDevicePrimaryCtxRelease", released)
    }

    fn methods(&self, device: u32) -> CopyMethods {
        let contexts = self.contexts.read();
        let context = contexts.get(&device);
        CopyMethods {
            batch: context.is_some() && self.has_batch,
            kernel: context.is_some_and(|context| context.kernels.contains_key(COPY.entry)),
        }
    }

    fn alloc(&self, device: u32, bytes: u64) -> Result<u64, GpuError> {
        let mut address = 0;
        // SAFETY: the pointer is valid.
        self.call(device, "cuMemAlloc", || unsafe { sys::cuMemAlloc_v2(&mut address, bytes as usize) })?;
        Ok(address)
    }

    unsafe fn free(&self, device: u32, address: u64) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        self.call(device, "cuMemFree", || unsafe { sys::cuMemFree_v2(address) })
    }

    fn address_range(&self, device: u32, address: u64) -> Result<(u64, u64), GpuError> {
        let (mut base, mut bytes) = (0, 0);
        self.call(device, "cuMemGetAddressRange", || {
            // SAFETY: the pointers are valid, and the driver checks the address.
            unsafe { sys::cuMemGetAddressRange_v2(&mut base, &mut bytes, address) }
        })?;
        Ok((base, bytes as u64))
    }

    fn is_ipc_capable(&self, device: u32, address: u64) -> Result<bool, GpuError> {
        let capable = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
        // A boolean, of whatever width the driver writes.
        let mut value = 0u64;
        self.call(device, "cuPointerGetAttribute", || {
            // SAFETY: there is room for the attribute, and the driver checks the address.
            unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), capable, address) }
        })?;
        Ok(value != 0)
    }

    fn ipc_export(&self, device: u32, address: u64) -> Result<IpcHandle, GpuError> {
        let mut exported = sys::CUipcMemHandle { reserved: [0; 64] };
        self.call(device, "cuIpcGetMemHandle", || {
            // SAFETY: the pointer is valid, and the driver checks the address.
            unsafe { sys::cuIpcGetMemHandle(&mut exported, address) }
        })?;
        Ok(exported.reserved.map(|byte| byte as u8))
    }

    fn ipc_open(&self, device: u32, ipc: &IpcHandle) -> Result<u64, GpuError> {
        let exported = sys::CUipcMemHandle { reserved: ipc.map(|byte| byte as std::ffi::c_char) };
        let mut base = 0;
        self.call(device, "cuIpcOpenMemHandle", || {
            // SAFETY: the pointer is valid, and the driver checks the handle.
            unsafe { sys::cuIpcOpenMemHandle_v2(&mut base, exported, IPC_LAZY_ENABLE_PEER_ACCESS) }
        })?;
        Ok(base)
    }

    unsafe fn ipc_close(&self, device: u32, base: u64) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        self.call(device, "cuIpcCloseMemHandle", || unsafe { sys::cuIpcCloseMemHandle(base) })
    }

    fn reserve(&self, device: u32, bytes: u64) -> Result<u64, GpuError> {
        let mut address = 0;
        self.call(device, "cuMemAddressReserve", || {
            // SAFETY: the pointer is valid; the driver picks unused addresses.
            unsafe { sys::cuMemAddressReserve(&mut address, bytes as usize, 0, 0, 0) }
        })?;
        Ok(address)
    }

    unsafe fn unreserve(&self, device: u32, address: u64, bytes: u64) -> Result<(), GpuError> {
        self.call(device, "cuMemAddressFree", || {
            // SAFETY: the caller's promise.
            unsafe { sys::cuMemAddressFree(address, bytes as usize) }
        })
    }

    unsafe fn chunk_create(
        &self,
        device: u32,
        address: u64,
        bytes: u64,
        shareable: bool,
    ) -> Result<(), GpuError> {
        let _current = self.enter(device, "cuMemCreate")?;
        let memory = AllocationHandle::create(device, bytes, shareable)?;
        // SAFETY: the caller's promise.
        unsafe { memory.map(device, address, bytes) }
    }

    fn chunk_export(&self, device: u32, address: u64) -> Result<OwnedFd, GpuError> {
        let _current = self.enter(device, "cuMemExportToShareableHandle")?;
        AllocationHandle::at(address).and_then(|memory| memory.export()).map_err(|error| match error {
            GpuError::Cuda { operation, code: code::OPERATING_SYSTEM, .. } => {
                GpuError::NoDescriptor { operation }
            }
            GpuError::Cuda {
                operation,
                code: code::INVALID_VALUE | code::NOT_PERMITTED | code::NOT_SUPPORTED,
                name,
            } => GpuError::NotShareable { address, operation, name },
            error => error,
        })
    }

    unsafe fn chunk_import(
        &self,
        device: u32,
        address: u64,
        bytes: u64,
        descriptor: BorrowedFd<'_>,
    ) -> Result<(), GpuError> {
        let _current = self.enter(device, "cuMemImportFromShareableHandle")?;
        let memory = AllocationHandle::import(descriptor)?;
        // SAFETY: the caller's promise.
        unsafe { memory.map(device, address, bytes) }
    }

    unsafe fn chunk_unmap(&self, device: u32, address: u64, bytes: u64) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        self.call(device, "cuMemUnmap", || unsafe { sys::cuMemUnmap(address, bytes as usize) })
    }

    unsafe fn host_register(&self, device: u32, address: u64, bytes: u64) -> Result<(), GpuError> {
        let start: *mut c_void = handle(address);
        self.call(device, "cuMemHostRegister", || {
            // SAFETY: the caller keeps the range mapped.
            unsafe { sys::cuMemHostRegister_v2(start, bytes as usize, HOST_PORTABLE_AND_MAPPED) }
        })
    }

    unsafe fn host_unregister(&self, device: u32, address: u64) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        self.call(device, "cuMemHostUnregister", || unsafe { sys::cuMemHostUnregister(handle(address)) })
    }

    fn host_alloc(&self, device: u32, bytes: u64) -> Result<u64, GpuError> {
        let mut start = ptr::null_mut();
        self.call(device, "cuMemHostAlloc", || {
            // SAFETY: the pointer is valid.
            unsafe { sys::cuMemHostAlloc(&mut start, bytes as usize, HOST_PORTABLE_AND_MAPPED) }
        })?;
        Ok(number(start))
    }

    unsafe fn host_free(&self, device: u32, address: u64) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        self.call(device, "cuMemFreeHost", || unsafe { sys::cuMemFreeHost(handle(address)) })
    }

    fn stream_create(&self, device: u32, priority: Priority) -> Result<StreamHandle, GpuError> {
        let _current = self.enter(device, "cuStreamCreateWithPriority")?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the pointers are valid.
        let range = unsafe { sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) };
        check("cuCtxGetStreamPriorityRange", range)?;
        let priority = match priority {
            Priority::Normal => least,
            Priority::High => greatest,
        };
        let mut stream = ptr::null_mut();
        // SAFETY: the pointer is valid.
        let made = unsafe { sys::cuStreamCreateWithPriority(&mut stream, STREAM_NON_BLOCKING, priority) };
        check("cuStreamCreateWithPriority", made)?;
        Ok(StreamHandle(number(stream)))
    }

    unsafe fn stream_destroy(&self, device: u32, stream: StreamHandle) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        self.call(device, "cuStreamDestroy", || unsafe { sys::cuStreamDestroy_v2(handle(stream.0)) })
    }

    unsafe fn stream_synchronize(&self, device: u32, stream: StreamHandle) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        self.call(device, "cuStreamSynchronize", || unsafe { sys::cuStreamSynchronize(handle(stream.0)) })
    }

    unsafe fn stream_query(&self, device: u32, stream: StreamHandle) -> Result<bool, GpuError> {
        // SAFETY: the caller's promise.
        self.query(device, "cuStreamQuery", || unsafe { sys::cuStreamQuery(handle(stream.0)) })
    }

    unsafe fn stream_wait_event(
        &self,
        device: u32,
        stream: StreamHandle,
        event: EventHandle,
    ) -> Result<(), GpuError> {
        self.call(device, "cuStreamWaitEvent", || {
            // SAFETY: the caller's promise.
            unsafe { sys::cuStreamWaitEvent(handle(stream.0), handle(event.0), 0) }
        })
    }

    fn event_create(&self, device: u32, scope: EventScope) -> Result<EventHandle, GpuError> {
        // A host thread that waits for the event sleeps, because a load takes milliseconds and the engine needs the processors.
        let flags = EVENT_BLOCKING_SYNC
            | EVENT_DISABLE_TIMING
            | match scope {
                EventScope::Process => 0,
                EventScope::Host => EVENT_INTERPROCESS,
            };
        let mut event = ptr::null_mut();
        // SAFETY: the pointer is valid.
        self.call(device, "cuEventCreate", || unsafe { sys::cuEventCreate(&mut event, flags) })?;
        Ok(EventHandle(number(event)))
    }

    unsafe fn event_destroy(&self, device: u32, event: EventHandle) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        self.call(device, "cuEventDestroy", || unsafe { sys::cuEventDestroy_v2(handle(event.0)) })
    }

    unsafe fn event_record(
        &self,
        device: u32,
        event: EventHandle,
        stream: StreamHandle,
    ) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        self.call(device, "cuEventRecord", || unsafe {
            sys::cuEventRecord(handle(event.0), handle(stream.0))
        })
    }

    unsafe fn event_query(&self, device: u32, event: EventHandle) -> Result<bool, GpuError> {
        // SAFETY: the caller's promise.
        self.query(device, "cuEventQuery", || unsafe { sys::cuEventQuery(handle(event.0)) })
    }

    unsafe fn event_synchronize(&self, device: u32, event: EventHandle) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        self.call(device, "cuEventSynchronize", || unsafe { sys::cuEventSynchronize(handle(event.0)) })
    }

    unsafe fn event_export(&self, device: u32, event: EventHandle) -> Result<IpcHandle, GpuError> {
        let mut exported = sys::CUipcEventHandle { reserved: [0; 64] };
        self.call(device, "cuIpcGetEventHandle", || {
            // SAFETY: the pointer is valid; the rest is the caller's promise.
            unsafe { sys::cuIpcGetEventHandle(&mut exported, handle(event.0)) }
        })?;
        Ok(exported.reserved.map(|byte| byte as u8))
    }

    fn event_open(&self, device: u32, ipc: &IpcHandle) -> Result<EventHandle, GpuError> {
        let exported = sys::CUipcEventHandle { reserved: ipc.map(|byte| byte as std::ffi::c_char) };
        let mut event = ptr::null_mut();
        self.call(device, "cuIpcOpenEventHandle", || {
            // SAFETY: the pointer is valid, and the driver checks the handle.
            unsafe { sys::cuIpcOpenEventHandle(&mut event, exported) }
        })?;
        Ok(EventHandle(number(event)))
    }

    unsafe fn copy_async(&self, device: u32, stream: StreamHandle, copy: Copy) -> Result<(), GpuError> {
        let Copy { dst, src, len } = copy;
        self.call(device, "cuMemcpyAsync", || {
            // SAFETY: the caller's promise.
            unsafe { sys::cuMemcpyAsync(dst, src, len as usize, handle(stream.0)) }
        })
    }

    unsafe fn copy_batch_async(
        &self,
        device: u32,
        stream: StreamHandle,
        copies: &[Copy],
    ) -> Result<(), GpuError> {
        let missing = |reason: &str| GpuError::Unsupported { operation: BATCH, reason: reason.into() };
        if !self.has_batch {
            return Err(missing("the driver is older than CUDA 12.8"));
        }
        let mut destinations: Vec<u64> = copies.iter().map(|copy| copy.dst).collect();
        let mut sources: Vec<u64> = copies.iter().map(|copy| copy.src).collect();
        let mut lens: Vec<usize> = copies.iter().map(|copy| copy.len as usize).collect();
        // These hints are for managed memory only.
        let nowhere =
            sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut attributes = sys::CUmemcpyAttributes {
            srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: MEMCPY_PREFER_OVERLAP_WITH_COMPUTE,
        };
        // One attribute, which holds for all copies from the first on.
        let (mut from_the_first, mut failed) = (0, 0);
        let copied = self.call(device, BATCH, || {
            // SAFETY: the three lists are of the same length, and there is one attribute; the ranges are the caller's
            // promise.
            unsafe {
                sys::cuMemcpyBatchAsync(
                    destinations.as_mut_ptr(),
                    sources.as_mut_ptr(),
                    lens.as_mut_ptr(),
                    copies.len(),
                    &mut attributes,
                    &mut from_the_first,
                    1,
                    &mut failed,
                    handle(stream.0),
                )
            }
        });
        match copied {
            Err(GpuError::Cuda { code: code::NOT_SUPPORTED, .. }) => Err(missing("the device has none")),
            outcome => outcome,
        }
    }

    fn synchronize(&self, device: u32) -> Result<(), GpuError> {
        // SAFETY: the context is current.
        self.call(device, "cuCtxSynchronize", || unsafe { sys::cuCtxSynchronize() })
    }

    unsafe fn zero_async(
        &self,
        device: u32,
        stream: StreamHandle,
        address: u64,
        bytes: u64,
    ) -> Result<(), GpuError> {
        self.call(device, "cuMemsetD8Async", || {
            // SAFETY: the caller's promise.
            unsafe { sys::cuMemsetD8Async(address, 0, bytes as usize, handle(stream.0)) }
        })
    }

    fn load_kernel(
        &self,
        device: u32,
        kernel: &'static Kernel,
        shared_bytes: u32,
    ) -> Result<Residency, GpuError> {
        let mut contexts = self.contexts.write();
        let closed = || GpuError::Invalid(format!("{:?}: GPU {device} is not open", kernel.entry));
        let context = contexts.get_mut(&device).ok_or_else(closed)?;
        let _current = Current::new(context.raw)?;
        let raw_device = device_handle(device)?;
        let function: sys::CUfunction = handle(context.load(raw_device, kernel)?);
        let dynamic = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let largest = context.shared_bytes.entry(kernel.entry).or_default();
        *largest = shared_bytes.max(*largest);
        let most = *largest as c_int;
        let mut each = 0;
        // SAFETY: the function is of a module that is loaded, and the pointer is valid.
        unsafe {
            check("cuFuncSetAttribute", sys::cuFuncSetAttribute(function, dynamic, most))?;
            let (threads, shared) = (kernel.threads as c_int, shared_bytes as usize);
            let found =
                sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut each, function, threads, shared);
            check("cuOccupancyMaxActiveBlocksPerMultiprocessor", found)?;
        }
        let count = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        Ok(Residency { each: each as u32, multiprocessors: attribute(raw_device, count)? })
    }

    unsafe fn launch(
        &self,
        device: u32,
        stream: StreamHandle,
        kernel: &'static Kernel,
        grid: Grid,
        parameters: &[&[u8]],
    ) -> Result<(), GpuError> {
        let contexts = self.contexts.read();
        let function = contexts.get(&device).and_then(|context| context.kernels.get(kernel.entry)).copied();
        drop(contexts);
        let Some(function) = function else {
            let reason = format!("{} is not loaded on GPU {device}", kernel.entry.to_string_lossy());
            return Err(GpuError::Unsupported { operation: "cuLaunchKernel", reason });
        };
        let mut pointers: Vec<*mut c_void> =
            parameters.iter().map(|bytes| bytes.as_ptr().cast_mut().cast()).collect();
        self.call(device, "cuLaunchKernel", || {
            // SAFETY: the driver reads the parameters during the call. That they are the kernel's, and all else, is the
            // caller's promise.
            unsafe {
                sys::cuLaunchKernel(
                    handle(function),
                    grid.blocks,
                    1,
                    1,
                    kernel.threads,
                    1,
                    1,
                    grid.shared_bytes,
                    handle(stream.0),
                    pointers.as_mut_ptr(),
                    ptr::null_mut(),
                )
            }
        })
    }

    unsafe fn write_word(
        &self,
        device: u32,
        stream: StreamHandle,
        address: u64,
        value: u32,
    ) -> Result<(), GpuError> {
        self.call(device, "cuStreamWriteValue32", || {
            // SAFETY: the caller's promise.
            unsafe { sys::cuStreamWriteValue32_v2(handle(stream.0), address, value, WRITE_VALUE_DEFAULT) }
        })
    }

    unsafe fn wait_word(
        &self,
        device: u32,
        stream: StreamHandle,
        address: u64,
        value: u32,
    ) -> Result<(), GpuError> {
        self.call(device, "cuStreamWaitValue32", || {
            // SAFETY: the caller's promise.
            unsafe { sys::cuStreamWaitValue32_v2(handle(stream.0), address, value, WAIT_VALUE_GEQ) }
        })
    }

    fn is_linked(&self, device: u32, peer: u32) -> Result<bool, GpuError> {
        // NVLink carries native atomics, PCIe does not.
        let native = sys::CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
        let mut value = 0;
        let (from, to) = (device_handle(device)?, device_handle(peer)?);
        // SAFETY: the pointer is valid and both devices exist.
        let queried = unsafe { sys::cuDeviceGetP2PAttribute(&mut value, native, from, to) };
        check("cuDeviceGetP2PAttribute", queried)?;
        Ok(value != 0)
    }

    fn can_reach(&self, device: u32, peer: u32) -> Result<bool, GpuError> {
        let mut reachable = 0;
        let (from, to) = (device_handle(device)?, device_handle(peer)?);
        // SAFETY: the pointer is valid and both devices exist.
        check("cuDeviceCanAccessPeer", unsafe { sys::cuDeviceCanAccessPeer(&mut reachable, from, to) })?;
        Ok(reachable != 0)
    }

    fn let_others_capture(&self) {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the pointer is valid. The mode is this thread's own.
        let exchanged = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        crate::device::warn_of(
            None,
            "relax the capture mode",
            check("cuThreadExchangeStreamCaptureMode", exchanged),
        );
    }

    fn enable_peer(&self, device: u32, peer: u32) -> Result<(), GpuError> {
        if !self.can_reach(device, peer)? {
            let reason = format!("GPU {device} does not reach the memory of GPU {peer}");
            return Err(GpuError::Unsupported { operation: "peer access", reason });
        }
        let context = self.contexts.read().get(&peer).map(|context| context.raw);
        let peer_context =
            context.ok_or_else(|| GpuError::Invalid(format!("peer access: GPU {peer} is not open")))?;
        // SAFETY: the context is retained as long as the peer is open.
        let enable = || unsafe { sys::cuCtxEnablePeerAccess(handle(peer_context), 0) };
        match self.call(device, "cuCtxEnablePeerAccess", enable) {
            Err(GpuError::Cuda { code: code::PEER_ACCESS_ALREADY_ENABLED, .. }) => Ok(()),
            outcome => outcome,
        }
    }
}
