//! Processes that this one has connected to, and what is known of them.

use std::collections::HashMap;
use std::sync::Arc;

use crate::descriptor::{Descriptor, MemoryKind, RegionDescriptor};
use crate::fences::Whom;
use crate::numbered::Numbered;
use crate::regions::{Shape, Shapes};
use crate::tcp::{Identity, Keys, RegionNews};
use crate::transfers::{Memory, PathId, PeerId};
use crate::trust::Trust;

/// All of them.
pub(crate) type Peers = Numbered<PeerId, Peer>;

#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) whom: Whom,
    /// It was connected by an address, and not by its descriptor.
    pub(crate) is_known_by_address: bool,
    /// What is proved to it, which does not change while it runs.
    pub(crate) trust: Trust,
    /// What carries its immediates and messages.
    pub(crate) control: PathId,
    /// What it has registered, as far as it is known.
    shapes: Arc<Shapes>,
    regions: HashMap<u32, RegionDescriptor>,
    /// By region: the generation, and what each carrier has to know of it.
    keys: HashMap<u32, (u32, Keys)>,
    /// It has told its regions since its control connection is up.
    pub(crate) has_told: bool,
    /// Why a carrier cannot reach it, by the carrier's code.
    pub(crate) refusals: Vec<(u8, String)>,
}

/// What a carrier has to know of a peer's region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemoteKey<'a> {
    /// This.
    Known(&'a [u8]),
    /// The peer has not told yet; [`crate::Carrier::regions_changed`] follows when it has.
    NotYet,
    /// The region has another generation by now, or nothing for this carrier.
    None,
}

impl Peer {
    pub(crate) fn new(whom: Whom, trust: Trust, control: PathId) -> Peer {
        Peer {
            is_known_by_address: whom.identity.is_none(),
            whom,
            trust,
            control,
            shapes: Arc::default(),
            regions: HashMap::new(),
            keys: HashMap::new(),
            has_told: false,
            refusals: Vec::new(),
        }
    }

    /// Takes a descriptor's word for what the peer has registered, until the peer tells. False if it is of another process.
    pub(crate) fn describe(&mut self, descriptor: &Descriptor) -> bool {
        if self.whom.identity.is_some_and(|known| known != identity(descriptor))
            || self.trust != descriptor.trust
        {
            return false;
        }
        self.regions = descriptor.regions.iter().map(|region| (region.number, *region)).collect();
        let shape = |region: &RegionDescriptor| {
            let (generation, len) = (region.generation, region.len);
            // Which node or GPU it is, the peer tells.
            let known = self.shapes.get(&region.number).filter(|known| known.generation == generation);
            let unknown = if region.kind == MemoryKind::Cuda { Memory::Gpu(0) } else { Memory::Host(0) };
            (region.number, Shape { generation, len, memory: known.map_or(unknown, |known| known.memory) })
        };
        self.shapes = Arc::new(descriptor.regions.iter().map(shape).collect());
        true
    }

    /// The peer has told.
    pub(crate) fn take_news(&mut self, news: Vec<RegionNews>) {
        let shapes = Arc::make_mut(&mut self.shapes);
        for news in news {
            match news {
                RegionNews::Here { region, memory, keys } => {
                    let (generation, len) = (region.generation, region.len);
                    shapes.insert(region.number, Shape { generation, len, memory });
                    self.regions.insert(region.number, region);
                    self.keys.insert(region.number, (generation, keys));
                }
                RegionNews::Gone { number, generation } => {
                    if shapes.get(&number).is_some_and(|shape| shape.generation == generation) {
                        shapes.remove(&number);
                        self.regions.remove(&number);
                    }
                    if self.keys.get(&number).is_some_and(|(known, _)| *known == generation) {
                        self.keys.remove(&number);
                    }
                }
            }
        }
        self.has_told = true;
    }

    /// Its control connection is gone: what it tells over the next one counts.
    pub(crate) fn forget_keys(&mut self) {
        self.keys.clear();
        self.has_told = false;
    }

    /// What it has registered, by number.
    pub(crate) fn descriptors(&self) -> Vec<RegionDescriptor> {
        let mut all: Vec<RegionDescriptor> = self.regions.values().copied().collect();
        all.sort_unstable_by_key(|region| region.number);
        all
    }

    pub(crate) fn shapes(&self) -> Arc<Shapes> {
        Arc::clone(&self.shapes)
    }

    pub(crate) fn has_gpus(&self) -> bool {
        self.shapes.values().any(|shape| matches!(shape.memory, Memory::Gpu(_)))
    }

    /// What the carrier of this code has to know of a region's generation.
    pub(crate) fn key(&self, code: u8, region: u32, generation: u32) -> RemoteKey<'_> {
        match self.keys.get(&region) {
            Some((known, keys)) if *known == generation => keys
                .iter()
                .find(|(of, _)| *of == code)
                .map_or(RemoteKey::None, |(_, key)| RemoteKey::Known(key)),
            // Generations count up.
            Some((known, _)) if *known > generation => RemoteKey::None,
            _ if self.has_told && !self.shapes.contains_key(&region) => RemoteKey::None,
            _ => RemoteKey::NotYet,
        }
    }
}

pub(crate) fn identity(descriptor: &Descriptor) -> Identity {
    Identity { engine: descriptor.engine_id, boot: descriptor.boot_nonce }
}
