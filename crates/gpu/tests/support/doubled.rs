//! A driver whose every device counts as two, so that what several GPUs do runs on one.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use kvlane_gpu::{
    Copy, CopyMethods, DeviceInfo, Driver, EventHandle, EventScope, GpuError, Grid, IpcHandle, Kernel,
    Priority, Residency, StreamHandle,
};

/// Device 2n and 2n + 1 are device n of the driver.
#[derive(Debug)]
pub(crate) struct Doubled(pub(crate) Arc<dyn Driver>);

/// Functions that do what the driver's do, with its number of the device.
macro_rules! same {
    ($(fn $name:ident($($argument:ident: $kind:ty),*) $(-> $answer:ty)?;)*) => {
        $(fn $name(&self, device: u32, $($argument: $kind),*) $(-> $answer)? {
            self.0.$name(device / 2, $($argument),*)
        })*
    };
}
macro_rules! same_unsafe {
    ($(fn $name:ident($($argument:ident: $kind:ty),*);)*) => {
        $(unsafe fn $name(&self, device: u32, $($argument: $kind),*) -> Result<(), GpuError> {
            // SAFETY: the caller's promise.
            unsafe { self.0.$name(device / 2, $($argument),*) }
        })*
    };
}

impl Driver for Doubled {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>, GpuError> {
        let twice = |device: DeviceInfo| {
            let twin = |index| {
                let mut uuid = device.uuid;
                uuid[0] ^= index as u8;
                DeviceInfo { ordinal: 2 * device.ordinal + index, uuid, ..device.clone() }
            };
            [twin(0), twin(1)]
        };
        Ok(self.0.devices()?.into_iter().flat_map(twice).collect())
    }

    fn is_linked(&self, _: u32, _: u32) -> Result<bool, GpuError> {
        Ok(true)
    }

    fn can_reach(&self, _: u32, _: u32) -> Result<bool, GpuError> {
        Ok(true)
    }

    fn let_others_capture(&self) {
        self.0.let_others_capture();
    }

    fn enable_peer(&self, device: u32, peer: u32) -> Result<(), GpuError> {
        if device / 2 == peer / 2 { Ok(()) } else { self.0.enable_peer(device / 2, peer / 2) }
    }

    same! {
        fn open() -> Result<(), GpuError>;
        fn close() -> Result<(), GpuError>;
        fn methods() -> CopyMethods;
        fn alloc(bytes: u64) -> Result<u64, GpuError>;
        fn address_range(address: u64) -> Result<(u64, u64), GpuError>;
        fn is_ipc_capable(address: u64) -> Result<bool, GpuError>;
        fn ipc_export(address: u64) -> Result<IpcHandle, GpuError>;
        fn ipc_open(handle: &IpcHandle) -> Result<u64, GpuError>;
        fn reserve(bytes: u64) -> Result<u64, GpuError>;
        fn chunk_export(address: u64) -> Result<OwnedFd, GpuError>;
        fn host_alloc(bytes: u64) -> Result<u64, GpuError>;
        fn stream_create(priority: Priority) -> Result<StreamHandle, GpuError>;
        fn event_create(scope: EventScope) -> Result<EventHandle, GpuError>;
        fn event_open(handle: &IpcHandle) -> Result<EventHandle, GpuError>;
        fn synchronize() -> Result<(), GpuError>;
        fn load_kernel(kernel: &'static Kernel, shared_bytes: u32) -> Result<Residency, GpuError>;
    }

    same_unsafe! {
        fn free(address: u64);
        fn ipc_close(base: u64);
        fn unreserve(address: u64, bytes: u64);
        fn chunk_create(address: u64, bytes: u64, shareable: bool);
        fn chunk_import(address: u64, bytes: u64, descriptor: BorrowedFd<'_>);
        fn chunk_unmap(address: u64, bytes: u64);
        fn host_register(address: u64, bytes: u64);
        fn host_unregister(address: u64);
        fn host_free(address: u64);
        fn stream_destroy(stream: StreamHandle);
        fn stream_synchronize(stream: StreamHandle);
        fn stream_wait_event(stream: StreamHandle, event: EventHandle);
        fn event_destroy(event: EventHandle);
        fn event_record(event: EventHandle, stream: StreamHandle);
        fn event_synchronize(event: EventHandle);
        fn copy_async(stream: StreamHandle, copy: Copy);
        fn copy_batch_async(stream: StreamHandle, copies: &[Copy]);
        fn zero_async(stream: StreamHandle, address: u64, bytes: u64);
        fn launch(stream: StreamHandle, kernel: &'static Kernel, grid: Grid, parameters: &[&[u8]]);
        fn write_word(stream: StreamHandle, address: u64, value: u32);
        fn wait_word(stream: StreamHandle, address: u64, value: u32);
    }

    unsafe fn stream_query(&self, device: u32, stream: StreamHandle) -> Result<bool, GpuError> {
        // SAFETY: the caller's promise.
        unsafe { self.0.stream_query(device / 2, stream) }
    }

    unsafe fn event_query(&self, device: u32, event: EventHandle) -> Result<bool, GpuError> {
        // SAFETY: the caller's promise.
        unsafe { self.0.event_query(device / 2, event) }
    }

    unsafe fn event_export(&self, device: u32, event: EventHandle) -> Result<IpcHandle, GpuError> {
        // SAFETY: the caller's promise.
        unsafe { self.0.event_export(device / 2, event) }
    }
}
