//! How a rank reaches the memory that another one has on its GPU.
//!
//! ```text
//!   told in memory of the host:  process | address | bytes | handle | GPU
//!   of this process: the address itself      of another one: the handle is opened
//!   then 8 bytes are read from there: a driver may map what the GPU does not reach
//! ```

#![allow(unsafe_code, reason = "a copy from memory that was mapped for it")]

use std::sync::{Arc, LazyLock, Weak};

use kvlane_gpu::{Copy, DeviceMemory, Export, Gpu, GpuError, HostBuffer, Imported, Stream, uuid_text};
use kvlane_memory::random;
use parking_lot::Mutex;

use crate::heap::{Heap, Peers};
use crate::join::TOLD_AT;

/// A number that no other process has, whatever its namespace of processes.
static PROCESS: LazyLock<[u8; 16]> = LazyLock::new(|| random().unwrap_or_default());
/// The memory of this process's ranks.
static HERE: Mutex<Vec<Weak<DeviceMemory>>> = Mutex::new(Vec::new());
const TOLD_BYTES: usize = 16 + 8 + 8 + 64 + 16;

/// Another rank's memory.
#[derive(Debug)]
pub(super) enum Reached {
    /// Memory of this process, with the GPU that holds it.
    Here { memory: Arc<DeviceMemory>, _peer: Gpu },
    /// Memory of another process.
    Imported(Imported),
}

impl Reached {
    pub(super) fn address(&self) -> u64 {
        match self {
            Reached::Here { memory, .. } => memory.address(),
            Reached::Imported(imported) => imported.base(),
        }
    }
}

/// The bytes by which others reach this memory.
pub(super) fn tell(gpu: &Gpu, memory: &Arc<DeviceMemory>) -> Result<Vec<u8>, GpuError> {
    let export = gpu.export(memory.address())?;
    let mut here = HERE.lock();
    here.retain(|memory| memory.strong_count() > 0);
    here.push(Arc::downgrade(memory));
    let mut told = PROCESS.to_vec();
    told.extend(memory.address().to_le_bytes());
    told.extend(export.bytes.to_le_bytes());
    told.extend(export.handle);
    told.extend(export.device_uuid);
    Ok(told)
}

/// How many ranks, this one among them, have their memory on this GPU.
pub(super) fn sharing(gpu: &Gpu, peers: &Peers) -> u32 {
    let there = peers.iter().flatten().filter(|(heap, _)| read(heap).2.device_uuid == gpu.info().uuid);
    there.count() as u32 + 1
}

/// Reaches the memory of all peers, of `bytes` bytes each; None for this rank.
///
/// # Errors
/// A sentence that names the rank.
pub(super) fn reach_all(gpu: &Gpu, peers: &Peers, bytes: u64) -> Result<Vec<Option<Reached>>, String> {
    let reach = |(rank, peer): (usize, &Option<(Heap, std::os::fd::OwnedFd)>)| {
        let Some((heap, _)) = peer else { return Ok(None) };
        let (process, address, export) = read(heap);
        reach_one(gpu, process, address, &export, bytes).map(Some).map_err(|error| {
            format!(
                "GPU {} does not reach the memory of rank {rank} on {} ({error}): `kvlane doctor` shows which GPUs reach each \
                 other",
                uuid_text(gpu.info().uuid),
                uuid_text(export.device_uuid)
            )
        })
    };
    peers.iter().enumerate().map(reach).collect()
}

/// A peer wrote that.
fn read(heap: &Heap) -> ([u8; 16], u64, Export) {
    let mut told = [0; TOLD_BYTES];
    heap.read(TOLD_AT, &mut told);
    let (mut process, mut number, mut handle, mut device_uuid) = ([0; 16], [0; 8], [0; 64], [0; 16]);
    process.copy_from_slice(&told[..16]);
    number.copy_from_slice(&told[16..24]);
    let base = u64::from_le_bytes(number);
    number.copy_from_slice(&told[24..32]);
    let bytes = u64::from_le_bytes(number);
    handle.copy_from_slice(&told[32..96]);
    device_uuid.copy_from_slice(&told[96..]);
    (process, base, Export { handle, base, bytes, device_uuid })
}

fn reach_one(
    gpu: &Gpu,
    process: [u8; 16],
    address: u64,
    export: &Export,
    bytes: u64,
) -> Result<Reached, GpuError> {
    if export.bytes < bytes {
        return Err(GpuError::Invalid(format!("it has {} bytes instead of {bytes}", export.bytes)));
    }
    let reached = if process == *PROCESS {
        let here = HERE.lock().iter().filter_map(Weak::upgrade).find(|memory| memory.address() == address);
        let memory = here.ok_or_else(|| GpuError::Invalid("it is gone".into()))?;
        let peer = Gpu::open_uuid(gpu.driver(), export.device_uuid)?;
        if peer.info().uuid != gpu.info().uuid {
            gpu.enable_peer(&peer)?;
        }
        Reached::Here { memory, _peer: peer }
    } else {
        Reached::Imported(gpu.import_from_any(export)?)
    };
    let (stream, landed) = (Stream::new(gpu, kvlane_gpu::Priority::Normal)?, HostBuffer::new(gpu, 8)?);
    // SAFETY: the source was mapped for this GPU, or is memory of this process; its owner lives, as it waits for this rank. The
    // buffer lives until the copy is done.
    unsafe { stream.copy(Copy { dst: landed.address(), src: reached.address(), len: 8 })? };
    stream.synchronize()?;
    Ok(reached)
}
