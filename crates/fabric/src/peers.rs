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
    has_had_gpus: bool,
    /// It has told its regions since its control connection is up.
    pub(crate) has_told: bool,
    /// Why a carrier cannot reach it, by the carrier's code.
    pub(crate) refusals: Vec<(u8, String)>,
    /// Of those, what the log has said.
    pub(crate) said_refusals: Vec<(u8, String)>,
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
            has_had_gpus: false,
            has_told: false,
            refusals: Vec::new(),
            said_refusals: Vec::new(),
        }
    }

    /// Takes a descriptor's word for what the peer has registered, until the peer tells. False if it is of another process.
    pub(crate) fn describe(&mut self, descriptor: &Descriptor) -> bool {
        if self.whom.identity.is_some_and(|known| known != identity(descriptor))
            || self.trust != descriptor.trust
        {
            return false;
        }
        // What the peer itself has told counts more, unless the descriptor is of a later moment.
        let is_news = |region: &&RegionDescriptor| {
            let known = self.shapes.get(&region.number);
            !self.has_told || known.is_none_or(|known| known.generation < region.generation)
        };
        let shape = |region: &RegionDescriptor| {
            let (generation, len) = (region.generation, region.len);
            // Which node or GPU it is, the peer tells.
            let known = self.shapes.get(&region.number).filter(|known| known.generation == generation);
            let unknown = if region.kind == MemoryKind::Cuda { Memory::Gpu(0) } else { Memory::Host(0) };
            (region.number, Shape { generation, len, memory: known.map_or(unknown, |known| known.memory) })
        };
        let mut shapes = if self.has_told { Shapes::clone(&self.shapes) } else { Shapes::default() };
        let news: Vec<&RegionDescriptor> = descriptor.regions.iter().filter(is_news).collect();
        shapes.extend(news.iter().copied().map(shape));
        if !self.has_told {
            self.regions.clear();
        }
        self.regions.extend(news.iter().map(|region| (region.number, **region)));
        self.shapes = Arc::new(shapes);
        self.has_had_gpus |= descriptor.regions.iter().any(|region| region.kind == MemoryKind::Cuda);
        true
    }

    /// The peer has told; nothing: that was all that it had registered when its connection came.
    pub(crate) fn take_news(&mut self, news: Vec<RegionNews>) {
        if news.is_empty() && !std::mem::replace(&mut self.has_told, true) {
            let keys = &self.keys;
            let is_told = |number: &u32| keys.contains_key(number);
            // What a descriptor has said is not so any more.
            Arc::make_mut(&mut self.shapes).retain(|number, _| is_told(number));
            self.regions.retain(|number, _| is_told(number));
        }
        let shapes = Arc::make_mut(&mut self.shapes);
        for news in news {
            match news {
                RegionNews::Here { region, memory, keys } => {
                    let (generation, len) = (region.generation, region.len);
                    self.has_had_gpus |= region.kind == MemoryKind::Cuda;
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

    /// Whether memory of a GPU is registered there, or ever was: a transfer of it may be waiting for its path still.
    pub(crate) fn has_had_gpus(&self) -> bool {
        self.has_had_gpus
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::descriptor::Access;
    use crate::tcp::Key;

    const OWN: u8 = 3;

    fn region(number: u32, generation: u32) -> RegionDescriptor {
        RegionDescriptor { number, generation, kind: MemoryKind::Host, access: Access::Read, len: 10 }
    }

    fn here(number: u32, generation: u32) -> RegionNews {
        let keys = vec![(OWN, [generation as u8].into())];
        RegionNews::Here { region: region(number, generation), memory: Memory::Host(0), keys }
    }

    fn described(regions: Vec<RegionDescriptor>) -> (Peer, Descriptor) {
        let identity = Identity { engine: 1, boot: 2 };
        let addresses = Vec::new();
        let whom = Whom { identity: Some(identity), session: 3, key: Key::new(b"secret"), addresses };
        let (boot_nonce, engine_id, addresses) = (identity.boot, identity.engine, Vec::new());
        let descriptor = Descriptor { boot_nonce, engine_id, trust: Trust::Token, addresses, regions };
        let mut peer = Peer::new(whom, Trust::Token, PathId::from_number(0));
        assert!(peer.describe(&descriptor));
        (peer, descriptor)
    }

    fn generations(peer: &Peer) -> Vec<(u32, u32)> {
        let known: Vec<_> =
            peer.descriptors().iter().map(|region| (region.number, region.generation)).collect();
        let shapes = peer.shapes();
        assert!(known.iter().all(|(number, generation)| shapes[number].generation == *generation));
        assert_eq!(shapes.len(), known.len());
        known
    }

    /// A descriptor may be old. A transfer of what it names and nobody has any more would wait for a key for ever.
    #[test]
    fn what_a_peer_has_not_told_it_does_not_have_whatever_its_descriptor_said() {
        let (mut peer, old) = described(vec![region(0, 0), region(1, 0), region(2, 0)]);
        assert_eq!(generations(&peer), [(0, 0), (1, 0), (2, 0)]);
        assert_eq!(peer.key(OWN, 1, 0), RemoteKey::NotYet);
        peer.take_news(vec![here(0, 0)]);
        peer.take_news(vec![here(2, 1)]);
        assert_eq!(peer.key(OWN, 1, 0), RemoteKey::NotYet, "there may be more");
        peer.take_news(Vec::new());
        assert_eq!(generations(&peer), [(0, 0), (2, 1)]);
        assert_eq!(peer.key(OWN, 0, 0), RemoteKey::Known(&[0]));
        assert_eq!((peer.key(OWN, 1, 0), peer.key(OWN, 2, 0)), (RemoteKey::None, RemoteKey::None));
        assert_eq!(peer.key(9, 0, 0), RemoteKey::None, "nothing for this carrier");
        // The old one once more brings back what is gone, for which its owner refuses it, but no former generation.
        assert!(peer.describe(&old));
        assert_eq!(generations(&peer), [(0, 0), (1, 0), (2, 1)]);
        peer.take_news(vec![
            RegionNews::Gone { number: 0, generation: 0 },
            RegionNews::Gone { number: 2, generation: 0 },
        ]);
        assert_eq!(generations(&peer), [(1, 0), (2, 1)]);
    }

    #[test]
    fn after_another_connection_the_peer_tells_anew() {
        let (mut peer, _) = described(Vec::new());
        peer.take_news(vec![here(0, 0), here(1, 0)]);
        peer.take_news(Vec::new());
        peer.forget_keys();
        assert_eq!(peer.key(OWN, 0, 0), RemoteKey::NotYet);
        peer.take_news(vec![here(1, 0)]);
        peer.take_news(Vec::new());
        assert_eq!(generations(&peer), [(1, 0)]);
    }
}
