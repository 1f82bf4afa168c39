//! The peers that this process has connected to, and the memory that each of them shares.
//!
//! Regions and windows of a peer become known in two ways, which may overtake each other:
//! - A descriptor that the caller brings names numbers, generations and lengths. It may be older or newer than what the peer
//!   has announced, and it has no keys.
//! - The peer announces its regions and windows, with the carriers' keys, over the control connection. It lists all of them
//!   when the connection comes up, then announces each change. An empty announcement ends the list.
//!
//! A later generation wins over an earlier one, from either source. For the same generation the announcement wins. Transfers
//! may name a described region at once; carriers wait for its announcement ([`RemoteMemory::NotYet`]).

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::descriptor::{Access, Descriptor, MemoryKind, RegionDescriptor};
use crate::fences::Whom;
use crate::identity::Identity;
use crate::numbered::Numbered;
use crate::region_news::{Keys, RegionNews};
use crate::regions::{Shape, Shapes};
use crate::transfers::{Memory, PathId, PeerId};
use crate::trust::Trust;
use crate::window::{PEER_RANGES_MAX, Ranges, WINDOW_RANGES_MAX, WindowDescriptor, WindowRange};

/// By the id that [`crate::Transfers`] gave the peer.
pub(crate) type Peers = Numbered<PeerId, Peer>;

#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) whom: Whom,
    /// The caller connected by an address, without a descriptor.
    pub(crate) is_known_by_address: bool,
    /// The secret that both sides prove. It does not change while the peer runs.
    pub(crate) trust: Trust,
    /// The path that carries immediates and messages.
    pub(crate) control: PathId,
    /// The regions and windows that transfers may name, described or announced.
    shapes: Arc<Shapes>,
    /// The same regions, as the API shows them.
    regions: HashMap<u32, RegionDescriptor>,
    /// Announced regions, by number: the generation and the carriers' keys.
    keys: Numbered<u32, (u32, Keys)>,
    /// Announced windows, by number: the generation and the ranges.
    windows: Numbered<u32, (u32, Ranges)>,
    /// A window whose announcement has more parts to come: number, generation and the ranges until now.
    partial_window: Option<(u32, u32, Vec<WindowRange>)>,
    /// Ranges of all `windows`, at most [`PEER_RANGES_MAX`].
    window_ranges: usize,
    /// Numbers described since the peer was introduced, or since its last control connection ended. They may be newer than the
    /// first list of announcements.
    described: HashSet<u32>,
    has_had_gpus: bool,
    /// The first list of announcements over this control connection is complete.
    pub(crate) has_announced: bool,
    /// By carrier code: why the carrier cannot reach the peer.
    pub(crate) refusals: Vec<(u8, String)>,
    /// Refusals that the log has named.
    pub(crate) logged_refusals: Vec<(u8, String)>,
    /// Name that the engine's owner gave the peer; empty by default.
    pub(crate) label: String,
}

/// The bytes of a run at a peer, with the keys that the carrier's [`crate::Registrar`] there made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RemoteMemory<'a> {
    /// The bytes, one part after the other.
    Known(Vec<RemoteBytes<'a>>),
    /// The peer has not announced the region or window yet. [`crate::Carrier::regions_changed`] follows when it does.
    NotYet,
    /// The region or window is gone or has another generation by now, or has no key for this carrier.
    None,
}

/// Why bytes of a peer are not known; see [`RemoteMemory`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotThere {
    NotYet,
    None,
}

/// Bytes of one region of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteBytes<'a> {
    /// The key that the carrier's [`crate::Registrar`] at the peer made for the region.
    pub key: &'a [u8],
    /// The region's number. Differs from the run's number if the run names a window.
    pub region: u32,
    /// The region's generation.
    pub generation: u32,
    /// Bytes from the start of the region.
    pub offset: u64,
    /// Bytes of this part.
    pub len: u64,
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
            keys: Numbered::default(),
            windows: Numbered::default(),
            partial_window: None,
            window_ranges: 0,
            described: HashSet::new(),
            has_had_gpus: false,
            has_announced: false,
            refusals: Vec::new(),
            logged_refusals: Vec::new(),
            label: String::new(),
        }
    }

    /// Its label and addresses, for logs.
    pub(crate) fn name(&self) -> String {
        let addresses: Vec<String> = self.whom.addresses.iter().map(ToString::to_string).collect();
        let addresses = addresses.join(" or ");
        if self.label.is_empty() { addresses } else { format!("{} at {addresses}", self.label) }
    }

    /// As [`Peer::describe`], before the first connection to the peer. Whatever the peer announces over it is newer.
    pub(crate) fn introduce(&mut self, descriptor: &Descriptor) -> bool {
        let is_it = self.describe(descriptor);
        self.described.clear();
        is_it
    }

    /// Adds the regions of a descriptor, until the peer announces its own. False: it is the descriptor of another process.
    pub(crate) fn describe(&mut self, descriptor: &Descriptor) -> bool {
        if self.whom.identity.is_some_and(|known| known != identity(descriptor))
            || self.trust != descriptor.trust
        {
            return false;
        }
        // The peer's own announcement wins, unless the descriptor is newer.
        let is_news = |region: &&RegionDescriptor| match self.keys.get(&region.number) {
            Some((announced, _)) => *announced < region.generation,
            // A window has the number by now.
            None if self
                .windows
                .get(&region.number)
                .is_some_and(|(announced, _)| *announced >= region.generation) =>
            {
                false
            }
            None if !self.has_announced && !self.described.contains(&region.number) => true,
            None => {
                let known = self.shapes.get(&region.number);
                known.is_none_or(|known| known.generation < region.generation)
            }
        };
        let shape = |region: &RegionDescriptor| {
            let (generation, len) = (region.generation, region.len);
            // Only the peer's announcement names the node or the GPU.
            let known = self.shapes.get(&region.number).filter(|known| known.generation == generation);
            let unknown = if region.kind == MemoryKind::Cuda { Memory::Gpu(0) } else { Memory::Host(0) };
            let memory = known.map_or(unknown, |known| known.memory);
            (region.number, Shape { generation, len, memory, is_window: false })
        };
        let is_announced = |number: &u32| self.keys.contains_key(number) || self.windows.contains_key(number);
        // A transfer may already name a region that another descriptor described over this connection.
        let stays =
            |number: &u32| self.has_announced || is_announced(number) || self.described.contains(number);
        let news: Vec<&RegionDescriptor> = descriptor.regions.iter().filter(is_news).collect();
        let mut shapes = Shapes::clone(&self.shapes);
        shapes.retain(|number, _| stays(number));
        shapes.extend(news.iter().copied().map(shape));
        self.regions.retain(|number, _| stays(number));
        self.described.extend(news.iter().map(|region| region.number));
        self.regions.extend(news.iter().map(|region| (region.number, **region)));
        self.shapes = Arc::new(shapes);
        self.has_had_gpus |= descriptor.regions.iter().any(|region| region.kind == MemoryKind::Cuda);
        true
    }

    /// Adds a window by its descriptor, until the peer announces it. False: the window was closed, and its number has been used
    /// again.
    pub(crate) fn describe_window(&mut self, window: &WindowDescriptor) -> bool {
        let WindowDescriptor { number, generation, len, kind } = *window;
        match self.shapes.get(&number) {
            Some(known) if known.generation == generation => known.is_window && known.len == len,
            Some(known) if known.generation > generation => false,
            _ => {
                // Only the peer's announcement names the node or the GPU.
                let memory = if kind == MemoryKind::Cuda { Memory::Gpu(0) } else { Memory::Host(0) };
                let shape = Shape { generation, len, memory, is_window: true };
                Arc::make_mut(&mut self.shapes).insert(number, shape);
                self.described.insert(number);
                self.has_had_gpus |= kind == MemoryKind::Cuda;
                true
            }
        }
    }

    /// Applies announcements of the peer. An empty list: it has announced all that it had when the connection came up.
    ///
    /// # Errors
    /// The peer violates the protocol.
    pub(crate) fn take_news(&mut self, news: Vec<RegionNews>) -> Result<(), &'static str> {
        if news.is_empty() && !std::mem::replace(&mut self.has_announced, true) {
            let (keys, windows) = (&self.keys, &self.windows);
            let described = std::mem::take(&mut self.described);
            let is_announced = |number: &u32| keys.contains_key(number) || windows.contains_key(number);
            let stays = |number: &u32| is_announced(number) || described.contains(number);
            // The rest came from earlier descriptors, and is gone at the peer.
            Arc::make_mut(&mut self.shapes).retain(|number, _| stays(number));
            self.regions.retain(|number, _| stays(number));
        }
        for news in news {
            let shapes = Arc::make_mut(&mut self.shapes);
            if !matches!(news, RegionNews::Window { .. }) && self.partial_window.take().is_some() {
                return Err("a window of which the rest is missing");
            }
            match news {
                RegionNews::Here { region, memory, keys } => {
                    let (number, generation, len) = (region.number, region.generation, region.len);
                    self.has_had_gpus |= region.kind == MemoryKind::Cuda;
                    self.keys.insert(number, (generation, keys));
                    // A descriptor may have named a later one.
                    if !is_later(shapes, number, generation) {
                        if region.access == Access::Windows {
                            // Only carriers need it: transfers name the windows.
                            shapes.remove(&number);
                            self.regions.remove(&number);
                        } else {
                            shapes.insert(number, Shape { generation, len, memory, is_window: false });
                            self.regions.insert(number, region);
                        }
                    }
                    self.forget_window(number);
                }
                RegionNews::Window { number, generation, memory, ranges, has_more } => {
                    self.take_window((number, generation), memory, ranges, has_more)?;
                }
                RegionNews::Gone { number, generation } => {
                    if shapes.get(&number).is_some_and(|shape| shape.generation == generation) {
                        shapes.remove(&number);
                        self.regions.remove(&number);
                    }
                    if self.keys.get(&number).is_some_and(|(known, _)| *known == generation) {
                        self.keys.remove(&number);
                    }
                    if self.windows.get(&number).is_some_and(|(known, _)| *known == generation) {
                        self.forget_window(number);
                    }
                }
            }
        }
        Ok(())
    }

    fn take_window(
        &mut self,
        (number, generation): (u32, u32),
        memory: Memory,
        ranges: Vec<WindowRange>,
        has_more: bool,
    ) -> Result<(), &'static str> {
        let mut all = match self.partial_window.take() {
            Some((of, its, known)) if (of, its) == (number, generation) => known,
            Some(_) => return Err("a window of which the rest is missing"),
            None => Vec::new(),
        };
        all.extend(ranges);
        if all.len() > WINDOW_RANGES_MAX {
            return Err("a window of too many ranges");
        }
        if has_more {
            self.partial_window = Some((number, generation, all));
            return Ok(());
        }
        let ranges = Ranges::new(all).ok_or("a window of ranges that make no sense")?;
        self.forget_window(number);
        self.window_ranges += ranges.all().len();
        if self.window_ranges > PEER_RANGES_MAX {
            return Err("windows of too many ranges");
        }
        self.has_had_gpus |= matches!(memory, Memory::Gpu(_));
        let shapes = Arc::make_mut(&mut self.shapes);
        if !is_later(shapes, number, generation) {
            shapes.insert(number, Shape { generation, len: ranges.len(), memory, is_window: true });
            self.regions.remove(&number);
        }
        self.keys.remove(&number);
        self.windows.insert(number, (generation, ranges));
        Ok(())
    }

    fn forget_window(&mut self, number: u32) {
        if let Some((_, ranges)) = self.windows.remove(&number) {
            self.window_ranges -= ranges.all().len();
        }
    }

    /// Forgets the announcements of a control connection that is gone. The peer announces everything again over the next one.
    pub(crate) fn forget_keys(&mut self) {
        self.keys.clear();
        self.windows.clear();
        (self.partial_window, self.window_ranges) = (None, 0);
        self.described.clear();
        self.has_announced = false;
    }

    /// Its regions, sorted by number.
    pub(crate) fn descriptors(&self) -> Vec<RegionDescriptor> {
        let mut all: Vec<RegionDescriptor> = self.regions.values().copied().collect();
        all.sort_unstable_by_key(|region| region.number);
        all
    }

    pub(crate) fn shapes(&self) -> Arc<Shapes> {
        Arc::clone(&self.shapes)
    }

    /// Whether the peer shares, or ever shared, memory of a GPU: a transfer of it may still wait for its path.
    pub(crate) fn has_had_gpus(&self) -> bool {
        self.has_had_gpus
    }

    /// Finds bytes of a region or window of this generation, with the keys of the carrier with this code.
    pub(crate) fn memory(&self, code: u8, which: (u32, u32), offset: u64, len: u64) -> RemoteMemory<'_> {
        let mut parts = Vec::with_capacity(1);
        match self.find(code, which, offset, len, &mut parts) {
            Ok(()) => RemoteMemory::Known(parts),
            Err(NotThere::NotYet) => RemoteMemory::NotYet,
            Err(NotThere::None) => RemoteMemory::None,
        }
    }

    /// As [`Peer::memory`], for many runs: adds the parts to `parts`. After an error it may have some of them.
    pub(crate) fn find<'a>(
        &'a self,
        code: u8,
        (region, generation): (u32, u32),
        offset: u64,
        len: u64,
        parts: &mut Vec<RemoteBytes<'a>>,
    ) -> Result<(), NotThere> {
        let known = self.keys.get(&region).map(|(known, _)| *known);
        let window = if known.is_some() { None } else { self.windows.get(&region) };
        match known.or_else(|| window.map(|(known, _)| *known)) {
            Some(known) if known == generation => match window {
                None => {
                    let bytes = self.bytes(code, WindowRange { region, offset, len });
                    parts.push(bytes.ok_or(NotThere::None)?);
                    Ok(())
                }
                Some((_, ranges)) => {
                    for part in ranges.cut(offset, len).ok_or(NotThere::None)? {
                        parts.push(self.bytes(code, part).ok_or(NotThere::None)?);
                    }
                    Ok(())
                }
            },
            // Generations count up.
            Some(known) if known > generation => Err(NotThere::None),
            _ if self.has_announced && !self.shapes.contains_key(&region) => Err(NotThere::None),
            _ => Err(NotThere::NotYet),
        }
    }

    /// Whether it shows any of its memory to this process alone.
    pub(crate) fn has_windows(&self) -> bool {
        !self.windows.is_empty()
    }

    /// The announced regions that have a key of this carrier, as (number, generation, key).
    pub(crate) fn keyed(&self, code: u8) -> impl Iterator<Item = (u32, u32, &[u8])> {
        self.keys.iter().filter_map(move |(number, (generation, keys))| {
            let (_, key) = keys.iter().find(|(of, _)| *of == code)?;
            Some((*number, *generation, &**key))
        })
    }

    fn bytes(&self, code: u8, range: WindowRange) -> Option<RemoteBytes<'_>> {
        let WindowRange { region, offset, len } = range;
        let (generation, keys) = self.keys.get(&region)?;
        let (_, key) = keys.iter().find(|(of, _)| *of == code)?;
        Some(RemoteBytes { key, region, generation: *generation, offset, len })
    }
}

/// Whether a later generation of this number is known already.
fn is_later(shapes: &Shapes, number: u32, generation: u32) -> bool {
    shapes.get(&number).is_some_and(|known| known.generation > generation)
}

pub(crate) fn identity(descriptor: &Descriptor) -> Identity {
    Identity { engine: descriptor.engine_id, boot: descriptor.boot_nonce }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use crate::trust::Key;

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
        assert!(peer.introduce(&descriptor));
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

    /// A descriptor may be old. A transfer that names a region which is gone would wait for a key for ever.
    #[test]
    fn what_a_peer_has_not_told_it_does_not_have_whatever_its_descriptor_said() {
        let (mut peer, old) = described(vec![region(0, 0), region(1, 0), region(2, 0)]);
        assert_eq!(generations(&peer), [(0, 0), (1, 0), (2, 0)]);
        assert_eq!(peer.memory(OWN, (1, 0), 4, 2), RemoteMemory::NotYet);
        peer.take_news(vec![here(0, 0)]).unwrap();
        peer.take_news(vec![here(2, 1)]).unwrap();
        assert_eq!(peer.memory(OWN, (1, 0), 4, 2), RemoteMemory::NotYet, "there may be more");
        peer.take_news(Vec::new()).unwrap();
        assert_eq!(generations(&peer), [(0, 0), (2, 1)]);
        let known = vec![RemoteBytes { key: &[0], region: 0, generation: 0, offset: 4, len: 2 }];
        assert_eq!(peer.memory(OWN, (0, 0), 4, 2), RemoteMemory::Known(known));
        assert_eq!(
            (peer.memory(OWN, (1, 0), 4, 2), peer.memory(OWN, (2, 0), 4, 2)),
            (RemoteMemory::None, RemoteMemory::None)
        );
        assert_eq!(peer.memory(9, (0, 0), 4, 2), RemoteMemory::None, "nothing for this carrier");
        // The old one once more brings back what is gone, for which its owner refuses it, but no former generation.
        assert!(peer.describe(&old));
        assert_eq!(generations(&peer), [(0, 0), (1, 0), (2, 1)]);
        peer.take_news(vec![
            RegionNews::Gone { number: 0, generation: 0 },
            RegionNews::Gone { number: 2, generation: 0 },
        ])
        .unwrap();
        assert_eq!(generations(&peer), [(1, 0), (2, 1)]);
    }

    /// Found by the simulation of hubs: a peer announces its regions, registers another, and its new descriptor overtakes some
    /// announcements. A transfer of the new region was refused while the region's announcement was under way.
    #[test]
    fn a_descriptor_that_comes_while_a_peer_tells_may_be_of_a_later_moment() {
        let (mut peer, descriptor) = described(vec![region(0, 0), region(5, 0)]);
        let later = Descriptor { regions: vec![region(1, 0), region(2, 0), region(3, 1)], ..descriptor };
        peer.take_news(vec![here(1, 0), here(3, 0), here(4, 0)]).unwrap();
        assert!(peer.describe(&later));
        assert_eq!(generations(&peer), [(1, 0), (2, 0), (3, 1), (4, 0)], "and what was told stays");
        assert!(matches!(peer.memory(OWN, (4, 0), 0, 1), RemoteMemory::Known(_)));
        peer.take_news(Vec::new()).unwrap();
        assert_eq!(generations(&peer), [(1, 0), (2, 0), (3, 1), (4, 0)]);
        let told = [(2, 0), (3, 1)].map(|of| peer.memory(OWN, of, 0, 1));
        assert_eq!(told, [RemoteMemory::NotYet, RemoteMemory::NotYet]);
        peer.take_news(vec![here(2, 0)]).unwrap();
        assert!(matches!(peer.memory(OWN, (2, 0), 0, 1), RemoteMemory::Known(_)));
        // Over the next connection it announces what it has then.
        peer.forget_keys();
        peer.take_news(vec![here(2, 0)]).unwrap();
        peer.take_news(Vec::new()).unwrap();
        assert_eq!(generations(&peer), [(2, 0)]);
    }

    /// Found by the simulation of hubs: before the peer had announced anything, an older descriptor followed a newer one. The
    /// region of a transfer in flight was forgotten, and the transfer was refused.
    #[test]
    fn an_older_descriptor_takes_back_nothing_that_a_newer_one_described() {
        let (mut peer, old) = described(vec![region(0, 0), region(5, 0)]);
        let newer = Descriptor { regions: vec![region(0, 1), region(1, 0)], ..old.clone() };
        assert!(peer.describe(&newer));
        assert!(peer.describe(&old));
        assert_eq!(generations(&peer), [(0, 1), (1, 0), (5, 0)]);
        peer.take_news(vec![here(0, 0)]).unwrap();
        peer.take_news(Vec::new()).unwrap();
        let found = [(0, 1), (1, 0)].map(|of| peer.memory(OWN, of, 0, 1));
        assert_eq!(found, [RemoteMemory::NotYet, RemoteMemory::NotYet]);
    }

    #[test]
    fn after_another_connection_the_peer_tells_anew() {
        let (mut peer, _) = described(Vec::new());
        peer.take_news(vec![here(0, 0), here(1, 0)]).unwrap();
        peer.take_news(Vec::new()).unwrap();
        peer.forget_keys();
        assert_eq!(peer.memory(OWN, (0, 0), 4, 2), RemoteMemory::NotYet);
        peer.take_news(vec![here(1, 0)]).unwrap();
        peer.take_news(Vec::new()).unwrap();
        assert_eq!(generations(&peer), [(1, 0)]);
    }

    #[test]
    fn a_window_is_found_by_the_keys_of_the_regions_that_it_shows() {
        let (mut peer, _) = described(Vec::new());
        let range = |region, offset, len| WindowRange { region, offset, len };
        let window = |number, generation, ranges, has_more| RegionNews::Window {
            number,
            generation,
            memory: Memory::Host(0),
            ranges,
            has_more,
        };
        let descriptor = WindowDescriptor { number: 9, generation: 2, len: 30, kind: MemoryKind::Host };
        assert!(peer.describe_window(&descriptor), "it may come before the peer's own word");
        assert_eq!(peer.memory(OWN, (9, 2), 0, 1), RemoteMemory::NotYet);
        let shown = RegionDescriptor { access: Access::Windows, ..region(0, 0) };
        let keys = vec![(OWN, [7].into())];
        let only_shown = RegionNews::Here { region: shown, memory: Memory::Host(0), keys };
        peer.take_news(vec![only_shown, here(1, 5)]).unwrap();
        assert_eq!(peer.descriptors().len(), 1, "what only windows show cannot be named");
        peer.take_news(vec![window(9, 2, vec![range(0, 4, 10)], true)]).unwrap();
        assert_eq!(peer.memory(OWN, (9, 2), 0, 1), RemoteMemory::NotYet, "there is more of it");
        peer.take_news(vec![window(9, 2, vec![range(1, 0, 20)], false)]).unwrap();
        let found = vec![
            RemoteBytes { key: &[7], region: 0, generation: 0, offset: 13, len: 1 },
            RemoteBytes { key: &[5], region: 1, generation: 5, offset: 0, len: 2 },
        ];
        assert_eq!(peer.memory(OWN, (9, 2), 9, 3), RemoteMemory::Known(found));
        assert_eq!(peer.memory(OWN, (9, 1), 0, 1), RemoteMemory::None, "it was another window");
        assert_eq!(peer.memory(8, (9, 2), 0, 1), RemoteMemory::None, "nothing for this carrier");
        assert!(peer.describe_window(&descriptor));
        let former = WindowDescriptor { generation: 1, ..descriptor };
        assert!(!peer.describe_window(&former), "its number is another window's by now");
        // The owner announces in order, and a descriptor may overtake several windows of one number.
        let next = WindowDescriptor { generation: 5, ..descriptor };
        assert!(peer.describe_window(&next));
        for generation in 2..5 {
            peer.take_news(vec![RegionNews::Gone { number: 9, generation }]).unwrap();
            peer.take_news(vec![window(9, generation + 1, vec![range(1, 0, 30)], false)]).unwrap();
            let is_known = generation + 1 == 5;
            assert_eq!(matches!(peer.memory(OWN, (9, 5), 0, 1), RemoteMemory::Known(_)), is_known);
        }
        peer.take_news(vec![RegionNews::Gone { number: 9, generation: 5 }]).unwrap();
        peer.take_news(Vec::new()).unwrap();
        assert_eq!(peer.memory(OWN, (9, 2), 0, 1), RemoteMemory::None);
        assert_eq!(peer.window_ranges, 0);
    }

    #[test]
    fn a_peer_that_tells_nonsense_of_windows_is_found_out() {
        let range = WindowRange { region: 0, offset: 0, len: 1 };
        let window = |number, ranges, has_more| {
            let (generation, memory) = (0, Memory::Host(0));
            RegionNews::Window { number, generation, memory, ranges, has_more }
        };
        let tell = |news| described(Vec::new()).0.take_news(news);
        assert!(tell(vec![window(1, vec![range], true), window(2, vec![range], false)]).is_err());
        assert!(tell(vec![window(1, vec![range], true), here(1, 0)]).is_err());
        assert!(tell(vec![window(1, vec![WindowRange { len: 0, ..range }], false)]).is_err());
        assert!(tell(vec![window(1, vec![range; WINDOW_RANGES_MAX + 1], true)]).is_err());
        let full = |number| window(number, vec![range; WINDOW_RANGES_MAX], false);
        let most = (PEER_RANGES_MAX / WINDOW_RANGES_MAX) as u32;
        assert!(tell((0..most).map(full).collect()).is_ok());
        assert!(tell((0..=most).map(full).collect()).is_err());
        assert!(tell([0; 40].map(full).into()).is_ok(), "the same one again and again");
    }
}
