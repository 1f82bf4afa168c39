//! The GPU memory that this engine has registered: which of it peers may map, and the card by which they see that it still is
//! registered.

use std::collections::HashMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::OnceLock;

use kvlane_gpu::{Export, Gpu, GpuError};
use parking_lot::Mutex;

use super::super::card::Card;
use crate::identity::Identity;
use crate::ranges::{Piece, Spot};
use crate::registrar::{MemoryRegion, OpenedWindow};
use crate::transfers::Memory;

/// Memory of GPUs that peers may map while it is registered.
#[derive(Debug)]
pub(super) struct Exposed {
    me: Identity,
    /// Made with the first GPU. None: this process cannot share memory, or has none of a GPU.
    card: OnceLock<Card>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    gpus: HashMap<u16, Gpu>,
    /// By number, which is used once at a time.
    regions: HashMap<u32, ExposedRegion>,
    /// Regions that were withdrawn since the last [`Exposed::take_withdrawn`].
    withdrawn: Vec<(u32, u32)>,
}

/// A region of GPU memory.
#[derive(Debug, Clone)]
pub(super) struct ExposedRegion {
    pub(super) generation: u32,
    pub(super) gpu: u16,
    pub(super) address: u64,
    pub(super) len: u64,
    /// Whether peers may map it. False once its owner takes it back.
    pub(super) is_open: bool,
}

impl Exposed {
    pub(super) fn new(me: Identity) -> Exposed {
        Exposed { me, card: OnceLock::new(), state: Mutex::default() }
    }

    /// Makes the card, unless there is one.
    pub(super) fn make_card(&self) -> io::Result<()> {
        let card = Card::in_memfd(self.me)?;
        // If another thread was faster, its card stays.
        let _ = self.card.set(card);
        Ok(())
    }

    /// The card's descriptor, for peers.
    pub(super) fn card(&self) -> Option<BorrowedFd<'_>> {
        self.card.get()?.shared()
    }

    pub(super) fn add_gpu(&self, number: u16, gpu: &Gpu) {
        self.state.lock().gpus.insert(number, gpu.clone());
    }

    /// The GPU of this number. None: no memory of it was registered.
    pub(super) fn gpu(&self, number: u16) -> Option<Gpu> {
        self.state.lock().gpus.get(&number).cloned()
    }

    /// The numbers of all GPUs whose memory was registered.
    pub(super) fn gpus(&self) -> Vec<u16> {
        let mut numbers: Vec<u16> = self.state.lock().gpus.keys().copied().collect();
        numbers.sort_unstable();
        numbers
    }

    /// Lets peers map a region. Returns the UUID of its GPU.
    ///
    /// # Errors
    /// The memory was not made for that; then peers reach it by other carriers.
    pub(super) fn add(&self, region: &MemoryRegion, gpu: u16) -> Result<[u8; 16], GpuError> {
        let MemoryRegion { number, generation, address, len, .. } = *region;
        let opened = self.gpu(gpu).ok_or_else(|| GpuError::Invalid(format!("GPU {gpu} was not added")))?;
        let card =
            self.card.get().ok_or_else(|| GpuError::Invalid("this process cannot share memory".into()))?;
        check_shareable(&opened, address)?;
        let uuid = opened.info().uuid;
        let exposed = ExposedRegion { generation, gpu, address, len, is_open: true };
        self.state.lock().regions.insert(number, exposed);
        card.add(number, generation);
        Ok(uuid)
    }

    /// A region that peers have mapped or may map, with its GPU.
    pub(super) fn region(&self, number: u32, generation: u32) -> Option<(ExposedRegion, Gpu)> {
        let state = self.state.lock();
        let found = state.regions.get(&number).filter(|found| found.generation == generation)?;
        Some((found.clone(), state.gpus.get(&found.gpu)?.clone()))
    }

    /// The registered region that holds this memory of a GPU, with the offset there.
    pub(super) fn region_at(&self, spot: &Spot) -> Option<(u32, u32, u64)> {
        let state = self.state.lock();
        let Piece { address, len } = spot.piece;
        state.regions.iter().find_map(|(number, region)| {
            let offset = (address as u64).checked_sub(region.address)?;
            let is_inside = Some(region.gpu) == spot.gpu
                && offset.checked_add(len as u64).is_some_and(|end| end <= region.len);
            is_inside.then_some((*number, region.generation, offset))
        })
    }

    /// All memory of a region.
    pub(super) fn spot(&self, number: u32, generation: u32) -> Option<Spot> {
        let (region, _) = self.region(number, generation)?;
        let piece = Piece { address: region.address as usize, len: region.len as usize };
        Some(Spot { piece, gpu: Some(region.gpu) })
    }

    /// Bytes of a region that peers read by themselves count no more, and no other peer maps it.
    pub(super) fn withdraw(&self, region: &MemoryRegion) {
        self.card.get().iter().for_each(|card| card.remove(region.number));
        let mut state = self.state.lock();
        let known = state.regions.get_mut(&region.number);
        if let Some(known) = known.filter(|known| known.generation == region.generation) {
            known.is_open = false;
            state.withdrawn.push((region.number, region.generation));
        }
    }

    /// Forgets a region that nothing touches any more.
    pub(super) fn forget(&self, region: &MemoryRegion) {
        let mut state = self.state.lock();
        if state.regions.get(&region.number).is_some_and(|it| it.generation == region.generation) {
            state.regions.remove(&region.number);
        }
    }

    /// The regions that were withdrawn since the last call.
    pub(super) fn take_withdrawn(&self) -> Vec<(u32, u32)> {
        std::mem::take(&mut self.state.lock().withdrawn)
    }

    pub(super) fn open_window(&self, window: &OpenedWindow<'_>) {
        if let Memory::Gpu(_) = window.memory {
            self.card.get().iter().for_each(|card| card.add(window.number, window.generation));
        }
    }

    pub(super) fn close_window(&self, number: u32) {
        self.card.get().iter().for_each(|card| card.remove(number));
    }

    /// Calls of this thread do not break the capture of a graph in another thread.
    pub(super) fn let_others_capture(&self) {
        self.state.lock().gpus.values().for_each(Gpu::let_others_capture);
    }

    /// The engine closes: no byte that a peer reads from now on counts.
    pub(super) fn clear(&self) {
        self.card.get().iter().for_each(|card| card.clear());
    }
}

/// Whether the driver gives out handles of the memory at an address. (The handle itself is made anew for each peer.)
fn check_shareable(gpu: &Gpu, address: u64) -> Result<(), GpuError> {
    match gpu.is_chunked(address)? {
        true => gpu.export_chunk(address).map(drop),
        false => gpu.export(address).map(|_: Export| ()),
    }
}
