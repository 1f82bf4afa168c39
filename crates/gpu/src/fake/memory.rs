//! What is allocated, imported and pinned on the fake's devices, and who may touch it.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use parking_lot::Mutex;

use super::handle::{Handle, MEMORY};
use super::mapping::{Arena, DeviceMapping, HostMapping};
use crate::driver::IpcHandle;
use crate::error::code;

/// Errors here are CUDA's numbers.
type Outcome<T> = Result<T, u32>;

#[derive(Debug)]
pub(super) struct Memory {
    arena: Arc<Arena>,
    device_bytes: u64,
    tables: Mutex<Tables>,
}

#[derive(Debug, Default)]
struct Tables {
    device: BTreeMap<u64, Allocation>,
    host: BTreeMap<u64, HostRange>,
    /// (device, peer): kernels of the one reach memory of the other.
    peers: HashSet<(u32, u32)>,
}

#[derive(Debug)]
struct Allocation {
    device: u32,
    mapping: Arc<DeviceMapping>,
    /// For memory of another process: its handle, and how often it was opened.
    imported: Option<(IpcHandle, usize)>,
}

#[derive(Debug)]
struct HostRange {
    bytes: u64,
    /// None for memory that the caller registered.
    own: Option<Arc<HostMapping>>,
}

/// Who touches memory.
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
        _mapping: Arc<DeviceMapping>,
    },
    Host {
        _mapping: Arc<HostMapping>,
    },
    /// Host memory that the caller vouches for.
    Caller,
}

impl Memory {
    pub(super) fn new(device_bytes: u64) -> std::io::Result<Memory> {
        Ok(Memory { arena: Arena::new()?, device_bytes, tables: Mutex::default() })
    }

    pub(super) fn alloc(&self, device: u32, bytes: u64) -> Outcome<u64> {
        if bytes == 0 {
            return Err(code::INVALID_VALUE);
        }
        let mut tables = self.tables.lock();
        let own = |allocation: &&Allocation| allocation.device == device && allocation.imported.is_none();
        let used: u64 = tables.device.values().filter(own).map(|allocation| allocation.mapping.bytes).sum();
        if used.checked_add(bytes).is_none_or(|used| used > self.device_bytes) {
            return Err(code::OUT_OF_MEMORY);
        }
        let mapping = DeviceMapping::new(&self.arena, bytes).map_err(|_| code::OUT_OF_MEMORY)?;
        let base = mapping.base;
        tables.device.insert(base, Allocation { device, mapping: Arc::new(mapping), imported: None });
        Ok(base)
    }

    pub(super) fn free(&self, device: u32, base: u64) -> Outcome<()> {
        let mut tables = self.tables.lock();
        match tables.device.get(&base) {
            Some(allocation) if allocation.device == device && allocation.imported.is_none() => {
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

    pub(super) fn export(&self, address: u64) -> Outcome<IpcHandle> {
        let tables = self.tables.lock();
        match tables.allocation(address) {
            Some(Allocation { mapping, imported: None, .. }) => {
                Ok(Handle::new(&mapping.file, mapping.bytes)?.encode(MEMORY))
            }
            _ => Err(code::INVALID_VALUE),
        }
    }

    pub(super) fn import(&self, device: u32, handle: &IpcHandle) -> Outcome<u64> {
        let mut tables = self.tables.lock();
        let opened = tables.device.values_mut().find_map(|allocation| match &mut allocation.imported {
            Some((known, count)) if known == handle && allocation.device == device => {
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
        let imported = Some((*handle, 1));
        tables.device.insert(base, Allocation { device, mapping: Arc::new(mapping), imported });
        Ok(base)
    }

    pub(super) fn close(&self, device: u32, base: u64) -> Outcome<()> {
        let mut tables = self.tables.lock();
        let allocation = tables.device.get_mut(&base).filter(|allocation| allocation.device == device);
        let Some((_, count)) = allocation.and_then(|allocation| allocation.imported.as_mut()) else {
            return Err(code::INVALID_VALUE);
        };
        *count -= 1;
        if *count == 0 {
            tables.device.remove(&base);
        }
        Ok(())
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

    /// Keeps a range mapped for an access by `device`, or says why that may not touch it.
    pub(super) fn hold(&self, device: u32, address: u64, bytes: u64, reach: Reach) -> Outcome<Hold> {
        let refused = match reach {
            Reach::CopyEngine => code::INVALID_VALUE,
            Reach::Kernel => code::ILLEGAL_ADDRESS,
        };
        let end = address.checked_add(bytes).ok_or(refused)?;
        let tables = self.tables.lock();
        if let Some(allocation) = tables.allocation(address) {
            let owner = allocation.device;
            let reached =
                reach == Reach::CopyEngine || owner == device || tables.peers.contains(&(device, owner));
            let mapping = &allocation.mapping;
            if !reached || end > mapping.base + mapping.bytes {
                return Err(refused);
            }
            return Ok(Hold::Device { _mapping: Arc::clone(mapping) });
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

impl Tables {
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
