//! Exposes GPU memory when it is registered. The first time it opens the meeting place.

use std::sync::Arc;

use kvlane_gpu::{Gpu, GpuError};
use parking_lot::Mutex;

use super::exposed::Exposed;
use super::imports::Waker;
use super::meeting::{Meeting, MeetingPlace};
use crate::registrar::{MemoryRegion, OpenedWindow, RegisterError, Registrar};
use crate::transfers::Memory;

/// Most bytes of the sentence in a key.
const WHY_BYTES_MAX: usize = 240;
const SHARED: u8 = 1;
const NOT_SHARED: u8 = 0;

/// A region's key: whether peers may map it.
///
/// ```text
///  | 1 u8 | UUID of the GPU, 16 B |        peers may map it
///  | 0 u8 | the reason, UTF-8 |            they cannot
/// ```
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RegionKey<'a> {
    Shared([u8; 16]),
    NotShared(std::borrow::Cow<'a, str>),
}

impl RegionKey<'_> {
    fn encode(&self) -> Vec<u8> {
        match self {
            RegionKey::Shared(uuid) => [&[SHARED], &uuid[..]].concat(),
            RegionKey::NotShared(why) => {
                let cut = why.char_indices().map(|(at, _)| at).take_while(|at| *at <= WHY_BYTES_MAX).last();
                let short = if why.len() <= WHY_BYTES_MAX { why } else { &why[..cut.unwrap_or(0)] };
                [&[NOT_SHARED], short.as_bytes()].concat()
            }
        }
    }

    /// A key of a peer, which may send any bytes.
    pub(super) fn decode(key: &[u8]) -> RegionKey<'_> {
        match key.split_first() {
            Some((&SHARED, uuid)) if uuid.len() == 16 => {
                let mut found = [0; 16];
                found.copy_from_slice(uuid);
                RegionKey::Shared(found)
            }
            Some((&NOT_SHARED, why)) => RegionKey::NotShared(String::from_utf8_lossy(why)),
            _ => RegionKey::NotShared("its key makes no sense".into()),
        }
    }
}

#[derive(Debug)]
pub(super) struct CudaRegistrar {
    exposed: Arc<Exposed>,
    /// None: no GPU memory was registered yet.
    place: Mutex<Option<Result<MeetingPlace, String>>>,
    waker: Waker,
}

impl CudaRegistrar {
    pub(super) fn new(exposed: Arc<Exposed>, waker: Waker) -> CudaRegistrar {
        CudaRegistrar { exposed, place: Mutex::default(), waker }
    }

    /// Where peers meet this engine, or why they cannot. None: no GPU memory was registered yet.
    pub(super) fn meeting(&self) -> Option<Result<Meeting, String>> {
        let place = self.place.lock();
        place.as_ref().map(|place| place.as_ref().map(|place| place.meeting).map_err(String::clone))
    }

    /// Gives out no more handles.
    pub(super) fn close(&self) {
        *self.place.lock() = None;
    }
}

impl Registrar for CudaRegistrar {
    fn add_gpu(&self, number: u16, gpu: &Gpu) -> Result<(), GpuError> {
        self.exposed.add_gpu(number, gpu);
        let mut place = self.place.lock();
        if place.is_none() {
            let opened = MeetingPlace::open(&self.exposed);
            if let Err(why) = &opened {
                // Log: engines of this host cannot map this one's GPU memory, so bytes go through pinned memory of
                // the host. Do: mend what the field why names, and restart the engine.
                tracing::warn!(%why, "peers cannot map GPU memory");
            }
            *place = Some(opened);
            self.waker.wake();
        }
        Ok(())
    }

    fn register(&self, region: &MemoryRegion) -> Result<Option<Vec<u8>>, RegisterError> {
        let Memory::Gpu(gpu) = region.memory else { return Ok(None) };
        let key = match self.exposed.add(region, gpu) {
            Ok(uuid) => RegionKey::Shared(uuid),
            Err(error) => {
                // Log: this memory was not made for sharing, so bytes go through pinned memory of the host. Do: as
                // the field error says.
                tracing::info!(%error, "GPU memory cannot be mapped by peers");
                RegionKey::NotShared(short_reason(&error).into())
            }
        };
        Ok(Some(key.encode()))
    }

    fn withdraw(&self, region: &MemoryRegion) {
        if region.memory.is_gpu() {
            self.exposed.withdraw(region);
            self.waker.wake();
        }
    }

    fn open_window(&self, window: &OpenedWindow<'_>) {
        self.exposed.open_window(window);
    }

    fn close_window(&self, number: u32, _: u32) {
        self.exposed.close_window(number);
    }

    fn unregister(&self, region: &MemoryRegion) {
        self.exposed.forget(region);
    }
}

/// The reason for peers, which fits into a key.
fn short_reason(error: &GpuError) -> String {
    match error {
        GpuError::NotShareable { .. } => {
            "it was not made for sharing (PYTORCH_CUDA_ALLOC_CONF with expandable_segments:True and without \
             TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=1, or with backend:cudaMallocAsync; or vLLM's sleep mode)"
                .into()
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_read_as_it_was_written_and_fits() {
        let shared = RegionKey::Shared([7; 16]);
        assert_eq!(RegionKey::decode(&shared.encode()), shared);
        let why = RegionKey::NotShared("ö".repeat(300).into()).encode();
        assert!(why.len() <= 255);
        assert_eq!(RegionKey::decode(&why), RegionKey::NotShared("ö".repeat(120).into()));
        for strange in [&[][..], &[1], &[2, 3], &[1; 18]] {
            assert!(matches!(RegionKey::decode(strange), RegionKey::NotShared(_)));
        }
    }
}
