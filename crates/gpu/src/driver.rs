//! [`Driver`]: the operations of a GPU driver that this crate uses, by raw handles.

use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};

use kvlane_block::Contiguous;

use crate::error::GpuError;
use crate::kernel::{Grid, Kernel, Residency};

/// Opens memory or an event in another process. Opaque; valid on this host while the exporter lives.
pub type IpcHandle = [u8; 64];

/// A GPU that the driver lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The device's number in this process. Other processes may number the same devices differently.
    pub ordinal: u32,
    /// The same in every process of the host.
    pub uuid: [u8; 16],
    /// Name of the product.
    pub name: String,
    /// Size of its memory, in bytes.
    pub total_bytes: u64,
    /// Such as `0000:1b:00.0`, as in `/sys/bus/pci/devices`.
    pub pci_bus_id: String,
    /// Major and minor number.
    pub compute_capability: (u32, u32),
}

/// Bytes to move from one address to another, in the unified address space of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copy {
    /// First destination address.
    pub dst: u64,
    /// First source address.
    pub src: u64,
    /// Bytes. A plan leaves out copies of 0.
    pub len: u64,
}

impl Contiguous for Copy {
    type One = u64;
    type Other = u64;

    fn begin(&self) -> (u64, u64) {
        (self.dst, self.src)
    }

    fn bytes(&self) -> u64 {
        self.len
    }

    fn with_bytes(self, len: u64) -> Copy {
        Copy { len, ..self }
    }
}

/// An entry of the table that the copy kernel reads. The addresses and the length are multiples of 16.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableEntry {
    /// First destination address.
    pub dst: u64,
    /// First source address.
    pub src: u64,
    /// Bytes, above 0.
    pub len: u64,
}

/// Ways to copy that some drivers and devices lack. Single copies always work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyMethods {
    /// Whether one call can enqueue many copies.
    pub batch: bool,
    /// Whether the copy kernel is loaded.
    pub kernel: bool,
}

/// The priority of a stream's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Priority {
    /// The same as other streams.
    Normal,
    /// Before all others, as far as the device can.
    High,
}

/// The processes that can use an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventScope {
    /// This process alone.
    Process,
    /// This process, and those that get the event's handle from it.
    Host,
}

/// A stream, by the driver's own handle: of ours, or of another library in this process. 0 is the default stream.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StreamHandle(pub u64);

/// An event, by the driver's own handle.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EventHandle(pub u64);

/// Operations on devices, by raw handles.
///
/// `device` is an ordinal of [`Driver::devices`] that was opened with [`Driver::open`]. Calls may come from any thread
/// and leave the thread's current context as it was. A function whose name ends in `_async`, and the others that take
/// a stream, return when the work is enqueued.
///
/// # Safety of the unsafe functions
/// Handles come from the same driver and device and were not destroyed. Addresses that enqueued work reads or writes
/// are valid for that until the work is done, and no other code touches the written bytes meanwhile. Running work uses
/// nothing that is freed, closed or unregistered.
pub trait Driver: Send + Sync + Debug {
    /// `cuda` or `fake`.
    fn name(&self) -> &'static str;

    /// All devices that the driver lists, by ordinal.
    fn devices(&self) -> Result<Vec<DeviceInfo>, GpuError>;

    /// Makes a device usable; counted.
    fn open(&self, device: u32) -> Result<(), GpuError>;

    /// Undoes one [`Driver::open`].
    fn close(&self, device: u32) -> Result<(), GpuError>;

    /// The ways to copy of an open device; all false for one that is not open.
    fn methods(&self, device: u32) -> CopyMethods;

    /// Allocates device memory and returns its first address.
    fn alloc(&self, device: u32, bytes: u64) -> Result<u64, GpuError>;

    /// Frees memory of [`Driver::alloc`].
    ///
    /// # Safety
    /// See [`Driver`].
    unsafe fn free(&self, device: u32, address: u64) -> Result<(), GpuError>;

    /// First address and bytes of the device allocation, or chunk, that holds an address.
    fn address_range(&self, device: u32, address: u64) -> Result<(u64, u64), GpuError>;

    /// Whether [`Driver::ipc_export`] can share the memory at an address. If not, the memory consists of chunks.
    fn is_ipc_capable(&self, device: u32, address: u64) -> Result<bool, GpuError>;

    /// A handle for the whole allocation that holds an address.
    fn ipc_export(&self, device: u32, address: u64) -> Result<IpcHandle, GpuError>;

    /// Maps an allocation of another process, and gives its first address here.
    fn ipc_open(&self, device: u32, handle: &IpcHandle) -> Result<u64, GpuError>;

    /// Unmaps memory of [`Driver::ipc_open`].
    ///
    /// # Safety
    /// See [`Driver`].
    unsafe fn ipc_close(&self, device: u32, base: u64) -> Result<(), GpuError>;

    /// Reserves addresses without memory, for chunks. The bytes here and those of chunks are multiples of 2 MiB.
    fn reserve(&self, device: u32, bytes: u64) -> Result<u64, GpuError>;

    /// Releases addresses of [`Driver::reserve`].
    ///
    /// # Safety
    /// See [`Driver`]. No chunk is mapped there.
    unsafe fn unreserve(&self, device: u32, address: u64, bytes: u64) -> Result<(), GpuError>;

    /// New device memory, mapped at free addresses of a reservation. Other processes can map it only if it is `shareable`.
    ///
    /// # Safety
    /// See [`Driver`].
    unsafe fn chunk_create(
        &self,
        device: u32,
        address: u64,
        bytes: u64,
        shareable: bool,
    ) -> Result<(), GpuError>;

    /// A descriptor of the chunk that holds an address. It keeps the memory, and every process of the host can use it.
    fn chunk_export(&self, device: u32, address: u64) -> Result<OwnedFd, GpuError>;

    /// Maps an exported chunk at free addresses of a reservation. The descriptor may be closed afterwards.
    ///
    /// # Safety
    /// See [`Driver`].
    unsafe fn chunk_import(
        &self,
        device: u32,
        address: u64,
        bytes: u64,
        descriptor: BorrowedFd<'_>,
    ) -> Result<(), GpuError>;

    /// Unmaps one chunk. Its memory is freed once no process has a mapping or a descriptor of it.
    ///
    /// # Safety
    /// See [`Driver`].
    unsafe fn chunk_unmap(&self, device: u32, address: u64, bytes: u64) -> Result<(), GpuError>;

    /// Pins host memory, for all devices.
    ///
    /// # Safety
    /// The range stays mapped until it is unregistered.
    unsafe fn host_register(&self, device: u32, address: u64, bytes: u64) -> Result<(), GpuError>;

    /// Unpins the range that begins at this address.
    ///
    /// # Safety
    /// See [`Driver`].
    unsafe fn host_unregister(&self, device: u32, address: u64) -> Result<(), GpuError>;

    /// Pinned host memory, usable by all devices at the same address.
    fn host_alloc(&self, device: u32, bytes: u64) -> Result<u64, GpuError>;

    /// Frees memory of [`Driver::host_alloc`].
    ///
    /// # Safety
    /// See [`Driver`].
    unsafe fn host_free(&self, device: u32, address: u64) -> Result<(), GpuError>;

    /// A queue of work that runs in order, independent of the default stream.
    fn stream_create(&self, device: u32, priority: Priority) -> Result<StreamHandle, GpuError>;

    /// Destroys a stream. Enqueued work still runs.
    ///
    /// # Safety
    /// See [`Driver`].
    unsafe fn stream_destroy(&self, device: u32, stream: StreamHandle) -> Result<(), GpuError>;

    /// Waits for all enqueued work, and returns its error.
    ///
    /// # Safety
    /// See [`Driver`].
    unsafe fn stream_synchronize(&self, device: u32, stream: StreamHandle) -> Result<(), GpuError>;

    /// Whether all enqueued work is done.
    ///
    /// # Safety
    /// See [`Driver`].
    unsafe fn stream_query(&self, device: u32, stream: StreamHandle) -> Result<bool, GpuError>;

    /// Later work of the stream starts after the work that the event stands for; at once if nothing was recorded.
    ///
    /// # Safety
    /// See [`Driver`].
    unsafe fn stream_wait_event(
        &self,
        device: u32,
        stream: StreamHandle,
        event: EventHandle,
    ) -> Result<(), GpuError>;

    /// An event without timing.
    fn event_create(&self, device: u32, scope: EventScope) -> Result<EventHandle, GpuError>;

    /// Destroys an event. Enqueued waits for it still hold.
    ///
    /// # Safety
    /// See [`Driver`].
    unsafe fn event_destroy(&self, device: u32, event: EventHandle) -> Result<(), GpuError>;

    /// The event now stands for all work enqueued in the stream so far. The stream may be one that another library
    /// made in this process, or the default stream.
    ///
    /// # Safety
    /// See [`Driver`].
    unsafe fn event_record(
        &self,
        device: u32,
        event: EventHandle,
        stream: StreamHandle,
    ) -> Result<(), GpuError>;

    /// Whether the work that the event stands for is done; true if nothing was recorded.
    ///
    /// # Safety
    /// See [`Driver`].
    unsafe fn event_query(&self, device: u32, event: EventHandle) -> Result<bool, GpuError>;

    /// Waits for the work that the event stands for.
    ///
    /// # Safety
    /// See [`Driver`].
    unsafe fn event_synchronize(&self, device: u32, event: EventHandle) -> Result<(), GpuError>;

    /// A handle for an event of [`EventScope::Host`].
    ///
    /// # Safety
    /// See [`Driver`].
    unsafe fn event_export(&self, device: u32, event: EventHandle) -> Result<IpcHandle, GpuError>;

    /// Opens an event of another process.
    fn event_open(&self, device: u32, handle: &IpcHandle) -> Result<EventHandle, GpuError>;

    /// One copy by a copy engine, in either direction or between devices.
    ///
    /// # Safety
    /// See [`Driver`].
    unsafe fn copy_async(&self, device: u32, stream: StreamHandle, copy: Copy) -> Result<(), GpuError>;

    /// Many copies by copy engines, in no order among themselves. [`GpuError::Unsupported`] if the driver has no such call.
    ///
    /// # Safety
    /// See [`Driver`].
    unsafe fn copy_batch_async(
        &self,
        device: u32,
        stream: StreamHandle,
        copies: &[Copy],
    ) -> Result<(), GpuError>;

    /// Waits for all work of a device, in whatever stream.
    fn synchronize(&self, device: u32) -> Result<(), GpuError>;

    /// Fills memory with zeros.
    ///
    /// # Safety
    /// See [`Driver`].
    unsafe fn zero_async(
        &self,
        device: u32,
        stream: StreamHandle,
        address: u64,
        bytes: u64,
    ) -> Result<(), GpuError>;

    /// Loads a kernel, and returns how many blocks of it with that much shared memory run at a time. [`GpuError::Unsupported`] if
    /// it cannot be loaded.
    fn load_kernel(
        &self,
        device: u32,
        kernel: &'static Kernel,
        shared_bytes: u32,
    ) -> Result<Residency, GpuError>;

    /// Launches a kernel. `parameters` are the bytes of each of its parameters. [`GpuError::Unsupported`] if it was not loaded.
    ///
    /// # Safety
    /// See [`Driver`]. The parameters are those that the kernel declares.
    unsafe fn launch(
        &self,
        device: u32,
        stream: StreamHandle,
        kernel: &'static Kernel,
        grid: Grid,
        parameters: &[&[u8]],
    ) -> Result<(), GpuError>;

    /// Writes a word once the work before it is done.
    ///
    /// # Safety
    /// See [`Driver`].
    unsafe fn write_word(
        &self,
        device: u32,
        stream: StreamHandle,
        address: u64,
        value: u32,
    ) -> Result<(), GpuError>;

    /// Later work starts once the word has reached a value. The comparison is cyclic, as the driver's is.
    ///
    /// # Safety
    /// See [`Driver`].
    unsafe fn wait_word(
        &self,
        device: u32,
        stream: StreamHandle,
        address: u64,
        value: u32,
    ) -> Result<(), GpuError>;

    /// Whether a link of their own, such as NVLink, joins two devices. Its traffic takes nothing from the links to the host.
    fn is_linked(&self, device: u32, peer: u32) -> Result<bool, GpuError>;

    /// Whether `device` can reach the memory of `peer`, over a link of their own or PCIe.
    fn can_reach(&self, device: u32, peer: u32) -> Result<bool, GpuError>;

    /// Calls of this thread that could break the capture of a graph in another thread are allowed from now on.
    fn let_others_capture(&self);

    /// Lets kernels of `device` reach the memory of `peer`, which is open too. No error if they already can.
    fn enable_peer(&self, device: u32, peer: u32) -> Result<(), GpuError>;
}
