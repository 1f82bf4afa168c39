//! A process with a real hub. Does what its engine would do, without threads.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use super::fast::{FAST, Fast};
use super::memory::{AREA, Region, RegionState};
use super::network::SharedNetwork;
use super::slow::Slow;
use super::wires::SimulatedControl;
use crate::carriers::Named;
use crate::clock::Clock;
use crate::descriptor::{Access, Descriptor};
use crate::fences::Whom;
use crate::hub::{Hub, Outside};
use crate::identity::Identity;
use crate::inbox::InboxOptions;
use crate::process::Process;
use crate::region_news::Keys;
use crate::regions::NewRegion;
use crate::registrar::{MemoryRegion, Registrar};
use crate::transfers::{Memory as Kind, Options, PathId, PeerId, Transfers};
use crate::trust::{Key, Trust};

/// As in `engine.rs`.
const RELEASE_PATIENCE: Duration = Duration::from_secs(1);
const RELEASE_RETRY: Duration = Duration::from_millis(50);
const DESCRIPTOR_ADDRESS: u8 = 1;

pub(super) struct Node {
    pub(super) process: usize,
    pub(super) hub: Hub<SimulatedControl>,
    pub(super) network: SharedNetwork,
    registrars: Vec<(u8, Arc<dyn Registrar>)>,
    /// Peers that were added and not removed, with their process.
    pub(super) peers: Vec<(PeerId, usize)>,
    releasing: Vec<Releasing>,
    /// Closing waits until then for neighbours that may still read.
    closing: Option<Duration>,
    pub(super) is_closed: bool,
    /// The process was killed.
    pub(super) is_dead: bool,
    /// Time of its next scheduled tick.
    pub(super) tick_at: Option<u64>,
}

/// A region that its owner waits for.
struct Releasing {
    region: usize,
    seen: MemoryRegion,
    /// From then on, whatever touches it is ended.
    at: Duration,
}

impl Node {
    pub(super) fn new(
        process: usize,
        network: &SharedNetwork,
        clock: &Arc<AtomicU64>,
        options: Options,
    ) -> Node {
        let identity = network.lock().hosts[process].identity;
        let fast = Fast::new(process, Arc::clone(network));
        let slow = Slow::new(process, Arc::clone(network));
        let carriers: Vec<Named> = vec![("fast", Box::new(fast)), ("slow", Box::new(slow))];
        let registrars =
            carriers.iter().filter_map(|(_, carrier)| Some((carrier.code(), carrier.registrar()?)));
        let registrars = registrars.collect();
        let control = SimulatedControl { process, network: Arc::clone(network) };
        let inbox = InboxOptions { messages: 3, bytes: 64 << 10 };
        let mut outside = Outside::new(Process::new(identity, inbox), control, carriers);
        outside.clock = Clock::Simulated(Arc::clone(clock));
        Node {
            process,
            hub: Hub::new(Transfers::new(options), outside),
            network: Arc::clone(network),
            registrars,
            peers: Vec::new(),
            releasing: Vec::new(),
            closing: None,
            is_closed: false,
            is_dead: false,
            tick_at: None,
        }
    }

    pub(super) fn register(&mut self, area: usize, kind: Kind, access: Access) -> Option<usize> {
        let outside = &mut self.hub.outside;
        let (number, generation) = outside.process.regions.reserve()?;
        let (base, len) = (area * AREA, AREA as u64);
        let is_writable = access == Access::ReadWrite;
        let seen = MemoryRegion { number, generation, address: base as u64, len, memory: kind, is_writable };
        let mut keys = Keys::new();
        for (code, registrar) in &self.registrars {
            let key = registrar.register(&seen).ok().flatten();
            keys.extend(key.map(|key| (*code, key.into_boxed_slice())));
        }
        outside.process.regions.add(number, NewRegion { base, len, access, memory: kind }, keys);
        outside.announce_region(number);
        let (process, state, taken) = (self.process, RegionState::Registered, Default::default());
        let region = Region { process, area, number, generation, is_writable, kind, state, taken };
        Some(self.network.lock().memory.add_region(region))
    }

    /// Begins to give a region back, unless a transfer of this process uses it.
    pub(super) fn unregister(&mut self, region: usize) {
        let number = self.network.lock().memory.regions[region].number;
        let outside = &mut self.hub.outside;
        if outside.process.regions.uses(number) > 0 {
            return;
        }
        let Some(seen) = outside.process.regions.seen(number) else { return };
        if !outside.process.regions.stop_serving(number) {
            return;
        }
        self.registrars.iter().for_each(|(_, registrar)| registrar.withdraw(&seen));
        outside.announce_region(number);
        outside.process.releasing += 1;
        self.network.lock().memory.regions[region].state = RegionState::Releasing;
        let at = outside.now() + RELEASE_PATIENCE;
        self.releasing.push(Releasing { region, seen, at });
    }

    /// Gives back regions that nothing touches any more, and ends what touches one for too long.
    fn release_regions(&mut self) {
        let now = self.hub.now();
        let mut left = Vec::new();
        for mut one in std::mem::take(&mut self.releasing) {
            let number = one.seen.number;
            if one.at <= now && self.hub.outside.is_touched(number) {
                self.hub.outside.release_region(number);
                self.pump();
                one.at = now + RELEASE_RETRY;
            }
            if self.hub.outside.is_touched(number) {
                self.network.lock().seen.waited_to_unregister += 1;
                left.push(one);
                continue;
            }
            self.hub.outside.process.releasing -= 1;
            self.registrars.iter().for_each(|(_, registrar)| registrar.unregister(&one.seen));
            self.hub.outside.process.regions.remove(number);
            self.network.lock().memory.give_back(one.region);
        }
        self.releasing.extend(left);
    }

    pub(super) fn is_releasing(&self) -> bool {
        !self.releasing.is_empty()
    }

    pub(super) fn describe(&self) -> Descriptor {
        let host = &self.network.lock().hosts[self.process];
        let address = host.address.to_string().into_bytes();
        Descriptor {
            boot_nonce: host.identity.boot,
            engine_id: host.identity.engine,
            trust: Trust::Token,
            addresses: vec![crate::descriptor::Address { kind: DESCRIPTOR_ADDRESS, bytes: address }],
            regions: self.hub.outside.process.regions.descriptors(),
        }
    }

    /// Adds a peer, by its descriptor or by its address only.
    pub(super) fn connect(&mut self, descriptor: Option<&Descriptor>, address: SocketAddr, to: usize) {
        let identity = |known: &Descriptor| Identity { engine: known.engine_id, boot: known.boot_nonce };
        let session = u128::from(self.network.lock().dice.roll());
        let (identity, addresses) = (descriptor.map(identity), vec![address]);
        let whom = Whom { identity, session, key: Key::new(b"secret"), addresses };
        let Some(peer) = self.hub.add_peer(whom, Trust::Token) else { return };
        if let (Some(known), Some(descriptor)) = (self.hub.outside.peer_mut(peer), descriptor) {
            known.introduce(descriptor);
        }
        self.peers.push((peer, to));
    }

    pub(super) fn remove_peer(&mut self, peer: PeerId) {
        self.peers.retain(|(other, _)| *other != peer);
        self.hub.remove_peer(peer);
    }

    pub(super) fn close(&mut self) {
        self.hub.close();
        self.network.lock().hosts[self.process].listens = false;
        let ends = self.network.lock().cut_all(self.process);
        self.end_wires(ends);
        self.peers.clear();
        self.closing = Some(self.hub.now() + RELEASE_PATIENCE);
    }

    /// Ends these ends of connections.
    pub(super) fn end_wires(&mut self, ends: Vec<(u64, usize)>) {
        for (wire, end) in ends {
            let served = self.network.lock().ended(wire, end);
            if let Some(served) = served {
                let (now, process) = (self.hub.now(), &mut self.hub.outside.process);
                process.sessions.leave(now, served.session);
                process.inbox.share_among(process.sessions.connected());
            }
        }
    }

    /// Finishes closing once nothing touches this process's memory.
    fn finish_closing(&mut self) {
        let Some(until) = self.closing else { return };
        let outside = &mut self.hub.outside;
        let is_pulled = outside.is_pulled() && outside.now() < until;
        if is_pulled || outside.is_ending() {
            return;
        }
        let may_be_read_still = outside.is_pulled();
        outside.end_fences();
        self.pump();
        (self.closing, self.is_closed) = (None, true);
        self.network.lock().memory.close(self.process, may_be_read_still);
    }

    fn pump(&mut self) {
        while self.hub.pump() {}
    }

    /// Takes what arrived, and does what is due.
    pub(super) fn settle(&mut self) {
        for place in 0..self.hub.outside.carriers.len() as u8 {
            self.hub.outside.with(place, |carrier, cx| carrier.poll(cx));
        }
        self.pump();
        self.release_regions();
        self.finish_closing();
        self.pump();
    }

    /// The next time at which something is due, and for which part.
    pub(super) fn next_tick(&self) -> Option<(Duration, &'static str)> {
        let outside = &self.hub.outside;
        let carriers = outside.carriers.iter().filter_map(|carrier| carrier.next_tick(outside.now())).min();
        let closing = self.closing.filter(|until| *until > outside.now());
        let ticks = [
            (self.hub.transfers.next_tick(), "transfers"),
            (outside.fences.next_tick(), "fences"),
            (carriers, "carriers"),
            (self.releasing.iter().map(|one| one.at).min(), "memory that is given back"),
            (closing, "closing"),
        ];
        let ticks = ticks.into_iter().filter_map(|(at, what)| Some((at?, what)));
        ticks.filter(|(at, _)| *at < Duration::MAX).min()
    }

    /// Peers whose path of the better carrier is up, for transfers too, with its connection.
    pub(super) fn better_paths(&self) -> Vec<(PeerId, PathId, u32)> {
        let network = self.network.lock();
        let of_process = network.better.iter().filter(|((process, _), _)| *process == self.process);
        of_process
            .filter(|(_, (path, _))| self.hub.transfers.is_up(*path))
            .map(|((_, peer), (path, number))| (*peer, *path, *number))
            .collect()
    }

    /// Whether the control connection and both carriers' paths are up for each peer.
    pub(super) fn is_all_up(&self) -> bool {
        self.peers.iter().all(|(peer, _)| {
            let paths = self.hub.transfers.paths(*peer);
            let fast = self.hub.outside.index_of(FAST);
            let carried = |path: &PathId| self.hub.outside.paths.get(path).and_then(|at| at.carrier);
            let has_fast = paths.iter().any(|path| carried(path) == fast);
            has_fast && paths.len() >= 3 && paths.iter().all(|path| self.hub.transfers.is_up(*path))
        })
    }
}

impl Node {
    /// Everything that a hub still keeps although all its peers are connected and nothing is in flight. Empty if it is right.
    pub(super) fn kept(&self) -> Vec<String> {
        let Hub { transfers, outside, .. } = &self.hub;
        let paths: usize = outside.peers.keys().map(|peer| transfers.paths(*peer).len()).sum();
        let peers = self.peers.len();
        let counts = [
            ("peers", outside.peers.len(), peers),
            ("channels", outside.channels.len(), peers),
            ("channels of peers", outside.channel_of.len(), peers),
            ("paths", outside.paths.len(), paths),
            ("peers that leave", outside.leaving.len(), 0),
            ("words under way", outside.posted.len(), 0),
            ("fences", usize::from(outside.fences.next_tick().is_some()), 0),
            ("new paths", outside.outbox.new_paths.len(), 0),
            ("transfers", transfers.live(), 0),
            ("uses of memory", outside.process.uses(), 0),
        ];
        let wrong = counts.into_iter().filter(|(_, is, should_be)| is != should_be);
        wrong.map(|(what, is, should_be)| format!("{is} {what}, not {should_be}")).collect()
    }

    /// Everything that a hub still keeps after the end. Empty if it is right.
    pub(super) fn left_over(&mut self, sessions_kept: Duration) -> Vec<String> {
        let now = self.hub.now() + sessions_kept;
        let Hub { transfers, outside, .. } = &mut self.hub;
        let Process { sessions, immediates, inbox, .. } = &mut outside.process;
        sessions.forget_old(now, |session| immediates.forget(session));
        let outbox = &outside.outbox;
        let counts = [
            ("sessions remembered", usize::from(!sessions.is_empty())),
            ("messages", inbox.held()),
            ("memory that somebody waits for", self.releasing.len()),
            ("regions", outside.process.regions.descriptors().len()),
            ("uses of memory", outside.process.uses()),
            ("peers", outside.peers.len()),
            ("peers that leave", outside.leaving.len()),
            ("sessions", outside.sessions.len()),
            ("channels", outside.channels.len() + outside.channel_of.len()),
            ("paths", outside.paths.len()),
            ("words under way", outside.posted.len()),
            ("fences", usize::from(outside.fences.next_tick().is_some())),
            ("letters", outbox.letters.len() + outbox.events.len()),
            ("new paths", outbox.new_paths.len() + outbox.fences.len() + outbox.fenced.len()),
        ];
        let counts = counts.into_iter().chain(transfers.left_over());
        counts.filter(|(_, count)| *count > 0).map(|(what, count)| format!("{count} {what}")).collect()
    }
}
