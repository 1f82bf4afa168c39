//! The pinned slots of an engine, which all its GPUs share.

use std::sync::atomic::{AtomicU64, Ordering};

use kvlane_gpu::{Gpu, GpuError};
use parking_lot::Mutex;

use super::slot::{Direction, Slot};
use crate::registrar::{MemoryRegion, RegisterError, Registrar};

/// Slots per direction.
const SLOTS_MAX: usize = 32;

/// Allocates slots as they are needed and keeps them. The lock is not held while one is allocated.
#[derive(Debug)]
pub(crate) struct SlotPool {
    slot_bytes: u64,
    state: Mutex<PoolState>,
    to_gpus: AtomicU64,
    from_gpus: AtomicU64,
    failed: AtomicU64,
}

#[derive(Debug, Default)]
struct PoolState {
    /// GPUs whose memory passes through slots, with the engine's numbers for them.
    gpus: Vec<(u16, Gpu)>,
    /// Indexed by [`Direction`].
    directions: [DirectionSlots; 2],
}

#[derive(Debug, Default)]
struct DirectionSlots {
    free: Vec<Slot>,
    made: usize,
    /// Why the last allocation failed. No other is tried: the slots that exist have to do.
    trouble: Option<GpuError>,
}

/// Bytes that passed through pinned host memory since the engine was made, because no carrier reaches the GPU's memory
/// directly.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Staged {
    /// Bytes copied into the memory of GPUs.
    pub to_gpus: u64,
    /// Bytes copied out of it.
    pub from_gpus: u64,
    /// Copies that the driver reported as failed.
    pub failed: u64,
}

impl SlotPool {
    pub(crate) fn new(slot_bytes: u64) -> SlotPool {
        let (to_gpus, from_gpus, failed) = Default::default();
        SlotPool { slot_bytes, state: Mutex::default(), to_gpus, from_gpus, failed }
    }

    pub(crate) fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    pub(super) fn gpus(&self) -> Vec<(u16, Gpu)> {
        self.state.lock().gpus.clone()
    }

    /// Whether allocating one more slot is worth a try: none is free, and the limit is not reached.
    pub(super) fn can_grow(&self, direction: Direction) -> bool {
        let state = self.state.lock();
        let slots = &state.directions[direction as usize];
        slots.free.is_empty() && slots.made < SLOTS_MAX && slots.trouble.is_none() && !state.gpus.is_empty()
    }

    /// Allocates one more slot. Slow: the driver pins the memory.
    pub(super) fn grow(&self, direction: Direction) {
        let made = Slot::new(&self.gpus(), self.slot_bytes);
        let mut state = self.state.lock();
        let is_first = state.directions.iter().all(|direction| direction.made == 0);
        let of_direction = &mut state.directions[direction as usize];
        let slot = match made {
            Ok(slot) => {
                if is_first {
                    // Log: blocks in GPU memory are copied through the host's memory, which is slower than a direct
                    // way.
                    tracing::info!(
                        once = true,
                        "GPU transfers pass through pinned host memory and sockets: no carrier reaches GPU memory \
                         directly"
                    );
                }
                slot
            }
            Err(error) => {
                // Log: transfers between GPUs use the pinned buffers that there are (the field slots), and are slower;
                // without any they fail. Do: free memory of the host, and restart the engine.
                tracing::warn!(%error, slots = of_direction.made, "cannot pin another slot for GPU transfers");
                if of_direction.made > 0 {
                    of_direction.trouble = Some(error);
                    return;
                }
                // A transfer waits for this slot: it fails, and the next one tries again.
                Slot::refused(error, self.slot_bytes)
            }
        };
        of_direction.made += 1;
        of_direction.free.push(slot);
    }

    /// A free slot, if there is one.
    pub(super) fn take(&self, direction: Direction) -> Option<Slot> {
        self.state.lock().directions[direction as usize].free.pop()
    }

    /// Gives back a slot that no copy touches any more.
    pub(super) fn give_back(&self, slot: Slot, direction: Direction) {
        debug_assert!(slot.is_idle());
        let mut state = self.state.lock();
        let of_direction = &mut state.directions[direction as usize];
        if slot.is_refused() {
            (of_direction.made, of_direction.trouble) = (of_direction.made - 1, None);
        } else {
            of_direction.free.push(slot);
        }
    }

    pub(super) fn count(&self, direction: Direction, bytes: u64) {
        match direction {
            Direction::Out => self.from_gpus.fetch_add(bytes, Ordering::Relaxed),
            Direction::In => self.to_gpus.fetch_add(bytes, Ordering::Relaxed),
        };
    }

    pub(super) fn count_failure(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts since the engine was made.
    pub(crate) fn staged(&self) -> Staged {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (to_gpus, from_gpus, failed) = (read(&self.to_gpus), read(&self.from_gpus), read(&self.failed));
        Staged { to_gpus, from_gpus, failed }
    }
}

impl Registrar for SlotPool {
    /// Slots are allocated when a transfer needs them: most GPUs' bytes pass by other carriers.
    fn add_gpu(&self, number: u16, gpu: &Gpu) -> Result<(), GpuError> {
        let mut state = self.state.lock();
        if state.gpus.iter().all(|(known, _)| *known != number) {
            state.gpus.push((number, gpu.clone()));
        }
        Ok(())
    }

    /// Peers need no key, since they reach the memory through a socket.
    fn register(&self, _: &MemoryRegion) -> Result<Option<Vec<u8>>, RegisterError> {
        Ok(None)
    }
}
