//! Memory that is allocated, imported and pinned on the fake's devices, and the checks of its accesses.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use kvlane_gpu::{IpcHandle, code};
use parking_lot::Mutex;

use super::handle::{Handle, MEMORY};
use super::mapping::{Arena, DeviceMapping, GRAIN, HostMapping, device_file};

/// Errors here are CUDA's numbers.
type Outcome<T> = Result<T, u32>;

#[derive(Debug)]
pub(super) struct Memory {
    arena: Arc<Arena>,
    device_bytes: u64,
    /// The host's number of each device of this process.
    numbers: Vec<u32>,
    /// Whether a GPU reaches memory that another one holds.
    is_peer_reachable: bool,
    tables: Mutex<Tables>,
}

#[derive(Debug, Default)]
struct Tables {
    device: BTreeMap<u64, Allocation>,
    host: BTreeMap<u64, HostRange>,
    /// Addresses for chunks: device and bytes.
    reserved: BTreeMap<u64, (u32, u64)>,
    /// (device, peer): kernels of the first reach memory of the second.
    peers: HashSet<(u32, u32)>,
}

#[derive(Debug)]
struct Allocation {
    /// The device for which it is mapped. Another one may hold it if it is an import.
    device: u32,
    mapping: Arc<DeviceMapping>,
    origin: Origin,
}

/// The origin of memory.
#[derive(Debug, PartialEq, Eq)]
enum Origin {
    /// Allocated by this process.
    Own,
    /// Opened by another process's handle, with its open count.
    Imported(IpcHandle, usize),
    /// A chunk at addresses that were reserved before.
    Chunk(Chunk),
}

#[derive(Debug, PartialEq, Eq)]
enum Chunk {
    Shareable,
    NotShareable,
    Imported,
}

#[derive(Debug)]
struct HostRange {
    bytes: u64,
    /// None for memory that the caller registered.
    own: Option<Arc<HostMapping>>,
}

/// The unit that accesses memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// Reaches all device memory, and host memory that is not pinned too, but no range that is pinned in part.
    CopyEngine,
    /// Reaches its own device's memory, that of peers, and pinned host memory.
    Kernel,
}

/// Keeps memory mapped while it is accessed.
pub(super) enum Hold {
    Device {
        mapping: Arc<DeviceMapping>,
    },
    Chunks {
        mappings: Vec<Arc<DeviceMapping>>,
    },
    Host {
        _mapping: Arc<HostMapping>,
    },
    /// Host memory that the caller vouches for.
    Caller,
}

impl Hold {
    /// Number of the host's GPU that holds the memory. None: the host does.
    pub(super) fn holder(&self) -> Option<u32> {
        match self {
            Hold::Device { mapping } => Some(mapping.holder),
            Hold::Chunks { mappings } => mappings.first().map(|mapping| mapping.holder),
            Hold::Host { .. } | Hold::Caller => None,
        }
    }
}

impl Memory {
    pub(super) fn new(
        device_bytes: u64,
        numbers: Vec<u32>,
        is_peer_reachable: bool,
    ) -> std::io::Result<Memory> {
        let (arena, tables) = (Arena::new()?, Mutex::default());
        Ok(Memory { arena, device_bytes, numbers, is_peer_reachable, tables })
    }

    /// The host's number of a device of this process.
    fn number(&self, device: u32) -> Outcome<u32> {
        self.numbers.get(device as usize).copied().ok_or(code::INVALID_CONTEXT)
    }

    pub(super) fn alloc(&self, device: u32, bytes: u64) -> Outcome<u64> {
        if bytes == 0 {
            return Err(code::INVALID_VALUE);
        }
        let mut tables = self.tables.lock();
        self.check_room(&tables, device, bytes)?;
        let holder = self.number(device)?;
        let mapping = DeviceMapping::new(&self.arena, holder, bytes).map_err(|_| code::OUT_OF_MEMORY)?;
        let base = mapping.base;
        tables.device.insert(base, Allocation { device, mapping: Arc::new(mapping), origin: Origin::Own });
        Ok(base)
    }

    fn check_room(&self, tables: &Tables, device: u32, bytes: u64) -> Outcome<()> {
        let used =
            tables.device.values().filter(|allocation| allocation.device == device && allocation.is_own());
        let used: u64 = used.map(|allocation| allocation.mapping.bytes).sum();
        match used.checked_add(bytes).is_some_and(|used| used <= self.device_bytes) {
            true => Ok(()),
            false => Err(code::OUT_OF_MEMORY),
        }
    }

    pub(super) fn free(&self, device: u32, base: u64) -> Outcome<()> {
        let mut tables = self.tables.lock();
        match tables.device.get(&base) {
            Some(allocation) if allocation.device == device && allocation.origin == Origin::Own => {
                tables.device.remove(&base);
                Ok(())
            }
            _ => Err(code::INVALID_VALUE),
        }
    }

    pub(super) fn address_range(&self, address: u64) -> Outcome<(u64, u64)> {
        let tables = self.tables.lock();
        let allocation = tables.allocation(address).ok_or(code::INVALID_VALUE)?;
        Ok((allocation.mapping.base, allocation.mapping.bytes))
    }

    pub(super) fn is_ipc_capable(&self, address: u64) -> Outcome<bool> {
        let tables = self.tables.lock();
        let allocation = tables.allocation(address).ok_or(code::INVALID_VALUE)?;
        Ok(!matches!(allocation.origin, Origin::Chunk(_)))
    }

    pub(super) fn export(&self, address: u64) -> Outcome<IpcHandle> {
        let tables = self.tables.lock();
        match tables.allocation(address) {
            Some(Allocation { mapping, origin: Origin::Own, .. }) => {
                Ok(Handle::new(&mapping.file, mapping.bytes)?.encode(MEMORY))
            }
            _ => Err(code::INVALID_VALUE),
        }
    }

    pub(super) fn import(&self, device: u32, handle: &IpcHandle) -> Outcome<u64> {
        let mut tables = self.tables.lock();
        let opened = tables.device.values_mut().find_map(|allocation| match &mut allocation.origin {
            Origin::Imported(opened, count) if opened == handle && allocation.device == device => {
                *count += 1;
                Some(allocation.mapping.base)
            }
            _ => None,
        });
        if let Some(base) = opened {
            return Ok(base);
        }
        let named = Handle::decode(handle, MEMORY)?;
        let mapping =
            DeviceMapping::of(&self.arena, named.open()?, named.bytes).map_err(|_| code::MAP_FAILED)?;
        let base = mapping.base;
        let origin = Origin::Imported(*handle, 1);
        tables.device.insert(base, Allocation { device, mapping: Arc::new(mapping), origin });
        Ok(base)
    }

    pub(super) fn close(&self, device: u32, base: u64) -> Outcome<()> {
        let mut tables = self.tables.lock();
        let allocation = tables.device.get_mut(&base).filter(|allocation| allocation.device == device);
        let Some(Origin::Imported(_, count)) = allocation.map(|allocation| &mut allocation.origin) else {
            return Err(code::INVALID_VALUE);
        };
        *count -= 1;
        if *count == 0 {
            tables.device.remove(&base);
        }
        Ok(())
    }

    pub(super) fn reserve(&self, device: u32, bytes: u64) -> Outcome<u64> {
        if bytes == 0 || !bytes.is_multiple_of(GRAIN) {
            return Err(code::INVALID_VALUE);
        }
        let base = self.arena.take(bytes).map_err(|_| code::OUT_OF_MEMORY)?;
        self.tables.lock().reserved.insert(base, (device, bytes));
        Ok(base)
    }

    pub(super) fn unreserve(&self, device: u32, address: u64, bytes: u64) -> Outcome<()> {
        let mut tables = self.tables.lock();
        let whole = tables.reserved.get(&address) == Some(&(device, bytes));
        if !whole || tables.device.range(address..address + bytes).next().is_some() {
            return Err(code::INVALID_VALUE);
        }
        tables.reserved.remove(&address);
        Ok(())
    }

    pub(super) fn chunk_create(&self, device: u32, address: u64, bytes: u64, shareable: bool) -> Outcome<()> {
        let mut tables = self.tables.lock();
        self.check_room(&tables, device, bytes)?;
        let file = device_file(self.number(device)?, bytes).map_err(|_| code::OUT_OF_MEMORY)?;
        let chunk = if shareable { Chunk::Shareable } else { Chunk::NotShareable };
        self.map_chunk(&mut tables, device, address, bytes, file, chunk)
    }

    /// A descriptor of the chunk, or the call that refuses, as CUDA has it.
    pub(super) fn chunk_export(&self, address: u64) -> Result<OwnedFd, (&'static str, u32)> {
        let tables = self.tables.lock();
        match tables.allocation(address) {
            Some(Allocation {
                mapping, origin: Origin::Chunk(Chunk::Shareable | Chunk::Imported), ..
            }) => {
                let copied = mapping.file.try_clone().map(OwnedFd::from);
                copied.map_err(|_| ("cuMemExportToShareableHandle", code::OPERATING_SYSTEM))
            }
            Some(Allocation { origin: Origin::Chunk(Chunk::NotShareable), .. }) => {
                Err(("cuMemExportToShareableHandle", code::INVALID_VALUE))
            }
            _ => Err(("cuMemRetainAllocationHandle", code::INVALID_VALUE)),
        }
    }

    pub(super) fn chunk_import(
        &self,
        device: u32,
        address: u64,
        bytes: u64,
        descriptor: BorrowedFd<'_>,
    ) -> Outcome<()> {
        let file = descriptor.try_clone_to_owned().map_err(|_| code::OPERATING_SYSTEM)?;
        let status = rustix::fs::fstat(&file).map_err(|_| code::INVALID_VALUE)?;
        // A chunk is mapped as a whole.
        if status.st_size as u64 != bytes {
            return Err(code::INVALID_VALUE);
        }
        self.map_chunk(&mut self.tables.lock(), device, address, bytes, file.into(), Chunk::Imported)
    }

    fn map_chunk(
        &self,
        tables: &mut Tables,
        device: u32,
        address: u64,
        bytes: u64,
        file: File,
        chunk: Chunk,
    ) -> Outcome<()> {
        let end = address.checked_add(bytes).ok_or(code::INVALID_VALUE)?;
        let reserved = tables.reserved.range(..=address).next_back();
        let inside = reserved.is_some_and(|(base, (owner, room))| *owner == device && end <= base + room);
        let last = tables.device.range(..end).next_back();
        let free = last.is_none_or(|(base, taken)| base + taken.mapping.bytes <= address);
        if bytes == 0 || !(address | bytes).is_multiple_of(GRAIN) || !inside || !free {
            return Err(code::INVALID_VALUE);
        }
        let mapping = DeviceMapping::at(&self.arena, address, file, bytes).map_err(|_| code::MAP_FAILED)?;
        let origin = Origin::Chunk(chunk);
        tables.device.insert(address, Allocation { device, mapping: Arc::new(mapping), origin });
        Ok(())
    }

    pub(super) fn chunk_unmap(&self, device: u32, address: u64, bytes: u64) -> Outcome<()> {
        let mut tables = self.tables.lock();
        match tables.device.get(&address) {
            Some(Allocation { device: owner, mapping, origin: Origin::Chunk(_) })
                if *owner == device && mapping.bytes == bytes =>
            {
                tables.device.remove(&address);
                Ok(())
            }
            _ => Err(code::INVALID_VALUE),
        }
    }

    pub(super) fn register(&self, address: u64, bytes: u64) -> Outcome<()> {
        let end = address.checked_add(bytes).filter(|_| bytes > 0).ok_or(code::INVALID_VALUE)?;
        let mut tables = self.tables.lock();
        if self.arena.contains(address) {
            return Err(code::INVALID_VALUE);
        }
        let before = tables.host.range(..end).next_back();
        if before.is_some_and(|(start, range)| start + range.bytes > address) {
            return Err(code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        tables.host.insert(address, HostRange { bytes, own: None });
        Ok(())
    }

    pub(super) fn unregister(&self, address: u64) -> Outcome<()> {
        let mut tables = self.tables.lock();
        match tables.host.get(&address) {
            Some(HostRange { own: None, .. }) => {
                tables.host.remove(&address);
                Ok(())
            }
            _ => Err(code::HOST_MEMORY_NOT_REGISTERED),
        }
    }

    pub(super) fn host_alloc(&self, bytes: u64) -> Outcome<u64> {
        if bytes == 0 {
            return Err(code::INVALID_VALUE);
        }
        let mapping = HostMapping::new(bytes).map_err(|_| code::OUT_OF_MEMORY)?;
        let base = mapping.base;
        let range = HostRange { bytes, own: Some(Arc::new(mapping)) };
        self.tables.lock().host.insert(base, range);
        Ok(base)
    }

    pub(super) fn host_free(&self, address: u64) -> Outcome<()> {
        let mut tables = self.tables.lock();
        match tables.host.get(&address) {
            Some(HostRange { own: Some(_), .. }) => {
                tables.host.remove(&address);
                Ok(())
            }
            _ => Err(code::INVALID_VALUE),
        }
    }

    pub(super) fn enable_peer(&self, device: u32, peer: u32) -> Outcome<()> {
        if self.tables.lock().peers.insert((device, peer)) {
            Ok(())
        } else {
            Err(code::PEER_ACCESS_ALREADY_ENABLED)
        }
    }

    /// Keeps a range mapped for an access by `device`, or returns the error of that access.
    pub(super) fn hold(&self, device: u32, address: u64, bytes: u64, reach: Reach) -> Outcome<Hold> {
        let refused = match reach {
            Reach::CopyEngine => code::INVALID_VALUE,
            Reach::Kernel => code::ILLEGAL_ADDRESS,
        };
        let end = address.checked_add(bytes).ok_or(refused)?;
        let tables = self.tables.lock();
        if let Some(allocation) = tables.allocation(address) {
            let (owner, mapping) = (allocation.device, &allocation.mapping);
            let is_mapped =
                reach == Reach::CopyEngine || owner == device || tables.peers.contains(&(device, owner));
            // A driver maps imports that the GPU does not reach, and refuses only their copies. A copy engine reaches all memory
            // that its process allocated, because the driver copies by way of the host where there is no other.
            let is_reached =
                self.is_peer_reachable || allocation.is_own() || self.number(device)? == mapping.holder;
            if !is_mapped || !is_reached {
                return Err(refused);
            }
            if end <= mapping.base + mapping.bytes {
                return Ok(Hold::Device { mapping: Arc::clone(mapping) });
            }
            // Chunks at consecutive addresses are one range; other allocations are not.
            return tables
                .chunks(address, end, owner)
                .map(|mappings| Hold::Chunks { mappings })
                .ok_or(refused);
        }
        if self.arena.contains(address) {
            return Err(code::ILLEGAL_ADDRESS);
        }
        let pinned = tables.host.range(..=address).next_back();
        match pinned.filter(|(start, range)| address < *start + range.bytes) {
            Some((start, range)) if end <= start + range.bytes => Ok(match &range.own {
                Some(mapping) => Hold::Host { _mapping: Arc::clone(mapping) },
                None => Hold::Caller,
            }),
            // A kernel sees neighbouring registrations as one range of addresses; a copy engine is refused.
            Some(_) if reach == Reach::Kernel && tables.pinned_throughout(address, end) => Ok(Hold::Caller),
            Some(_) => Err(refused),
            None if reach == Reach::CopyEngine => Ok(Hold::Caller),
            None => Err(refused),
        }
    }
}

impl Allocation {
    /// Whether it takes memory of this process's device.
    fn is_own(&self) -> bool {
        !matches!(self.origin, Origin::Imported(..) | Origin::Chunk(Chunk::Imported))
    }
}

impl Tables {
    /// The chunks of a device that hold a range without a gap.
    fn chunks(&self, start: u64, end: u64, device: u32) -> Option<Vec<Arc<DeviceMapping>>> {
        let mut reached = start;
        let mut mappings = Vec::new();
        while reached < end {
            let allocation = self.allocation(reached)?;
            if allocation.device != device || !matches!(allocation.origin, Origin::Chunk(_)) {
                return None;
            }
            reached = allocation.mapping.base + allocation.mapping.bytes;
            mappings.push(Arc::clone(&allocation.mapping));
        }
        Some(mappings)
    }

    fn allocation(&self, address: u64) -> Option<&Allocation> {
        let (base, allocation) = self.device.range(..=address).next_back()?;
        (address < base + allocation.mapping.bytes).then_some(allocation)
    }

    fn pinned_throughout(&self, start: u64, end: u64) -> bool {
        let mut reached = start;
        while reached < end {
            match self.host.range(..=reached).next_back() {
                Some((from, range)) if reached < from + range.bytes => reached = from + range.bytes,
                _ => return false,
            }
        }
        true
    }
}
