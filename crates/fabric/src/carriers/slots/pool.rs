//! The slots of an engine, which its GPUs share.

use std::sync::atomic::{AtomicU64, Ordering};

use kvlane_gpu::{Gpu, GpuError};
use parking_lot::Mutex;

use super::slot::{Slot, Way};

/// Slots of one direction.
const SLOTS_MAX: usize = 32;

/// Made as they are needed, and kept. Whoever makes one holds no lock meanwhile.
#[derive(Debug)]
pub(crate) struct SlotPool {
    slot_bytes: u64,
    state: Mutex<State>,
    to_gpus: AtomicU64,
    from_gpus: AtomicU64,
    failed: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    gpus: Vec<Gpu>,
    /// By way.
    ways: [OneWay; 2],
}

#[derive(Debug, Default)]
struct OneWay {
    free: Vec<Slot>,
    made: usize,
    /// Why the last one could not be made. Those that are there have to do.
    trouble: Option<GpuError>,
}

/// What has passed through pinned host memory since the engine was made, since no way of the fabric's reaches a GPU's memory
/// itself.
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

    /// The number of a GPU, with slots to begin with. Takes its time.
    pub(crate) fn add_gpu(&self, gpu: &Gpu) -> Result<u16, GpuError> {
        let is_it = |known: &Gpu| {
            std::ptr::addr_eq(known.raw().0, gpu.raw().0) && known.info().ordinal == gpu.info().ordinal
        };
        let mut gpus = self.gpus();
        let number = match gpus.iter().position(is_it) {
            Some(number) => number,
            None => {
                // That it can be used at all is known before it has a number.
                Slot::new(std::slice::from_ref(gpu), self.slot_bytes)?;
                let mut state = self.state.lock();
                let number = state.gpus.iter().position(is_it).unwrap_or(state.gpus.len());
                if number == state.gpus.len() {
                    state.gpus.push(gpu.clone());
                }
                gpus = state.gpus.clone();
                number
            }
        };
        for way in [Way::Out, Way::In] {
            if self.state.lock().ways[way as usize].made == 0 {
                let slot = Slot::new(&gpus, self.slot_bytes)?;
                self.add(way, slot);
            }
        }
        // As many as a u16 tells: no host has more.
        Ok(number as u16)
    }

    pub(super) fn gpus(&self) -> Vec<Gpu> {
        self.state.lock().gpus.clone()
    }

    /// Whether one more can be made.
    pub(super) fn may_make(&self, way: Way) -> bool {
        let state = self.state.lock();
        let way = &state.ways[way as usize];
        way.free.is_empty() && way.made < SLOTS_MAX && way.trouble.is_none() && !state.gpus.is_empty()
    }

    /// One more slot. Takes its time.
    pub(super) fn make(&self, way: Way) {
        let made = Slot::new(&self.gpus(), self.slot_bytes);
        match made {
            Ok(slot) => self.add(way, slot),
            Err(error) => {
                let mut state = self.state.lock();
                let of_way = &mut state.ways[way as usize];
                tracing::warn!(%error, slots = of_way.made, "no more pinned memory for GPUs' bytes");
                of_way.trouble = Some(error);
            }
        }
    }

    fn add(&self, way: Way, slot: Option<Slot>) {
        let mut state = self.state.lock();
        let of_way = &mut state.ways[way as usize];
        of_way.made += usize::from(slot.is_some());
        of_way.free.extend(slot);
    }

    /// A slot, unless all are in use.
    pub(super) fn take(&self, way: Way) -> Option<Slot> {
        self.state.lock().ways[way as usize].free.pop()
    }

    /// One that nothing touches any more.
    pub(super) fn give_back(&self, slot: Slot, way: Way) {
        debug_assert!(slot.is_idle());
        self.state.lock().ways[way as usize].free.push(slot);
    }

    pub(super) fn count(&self, way: Way, bytes: u64) {
        match way {
            Way::Out => self.from_gpus.fetch_add(bytes, Ordering::Relaxed),
            Way::In => self.to_gpus.fetch_add(bytes, Ordering::Relaxed),
        };
    }

    pub(super) fn count_failure(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    /// What has passed since the engine was made.
    pub(crate) fn staged(&self) -> Staged {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (to_gpus, from_gpus, failed) = (read(&self.to_gpus), read(&self.from_gpus), read(&self.failed));
        Staged { to_gpus, from_gpus, failed }
    }
}
