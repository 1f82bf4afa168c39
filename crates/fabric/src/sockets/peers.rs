//! Peers, the paths to them, and the memory of both sides.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener};

use kvlane_gpu::{Gpu, GpuError};

use super::{BothSides, Entry, LinkId, PathAt, PathStatus, Peer, Sockets, Transport, Used, random};
use crate::descriptor::{Access, Address, Descriptor, MemoryKind, RegionDescriptor};
use crate::engine::FabricError;
use crate::fences::Whom;
use crate::runs::Run;
use crate::staging::Spot;
use crate::tcp::{BadFrame, Ended, Identity};
use crate::transfers::{PathId, PeerId, Ticket};

/// Addresses of one peer that are used.
const ADDRESSES_MAX: usize = 16;
/// The provider's number in an [`Address`].
const TCP: u8 = 1;

impl Sockets {
    pub(crate) fn descriptor(&self) -> io::Result<Descriptor> {
        let own = self.listeners.iter().map(TcpListener::local_addr);
        let addresses: Vec<SocketAddr> = match self.advertised.is_empty() {
            true => own.collect::<io::Result<_>>()?,
            false => self.advertised.clone(),
        };
        Ok(Descriptor {
            boot_nonce: self.me.boot,
            engine_id: self.me.engine,
            trust: self.proofs.trust.clone(),
            addresses: addresses.into_iter().map(encode_address).collect(),
            regions: self.regions.descriptors(),
        })
    }

    /// How a peer can be reached; none if it has no address that is known here.
    pub(crate) fn ways_to(&self, descriptor: &Descriptor) -> Result<Option<Ways>, FabricError> {
        let key = self.proofs.key_for(&descriptor.trust)?;
        let known = descriptor.addresses.iter().filter_map(decode_address).take(ADDRESSES_MAX);
        let addresses: Vec<SocketAddr> = known.collect();
        if addresses.is_empty() {
            return Ok(None);
        }
        let session = u128::from(random()?) << 64 | u128::from(random()?);
        let whom = Whom { identity: identity(descriptor), session, key, addresses };
        Ok(Some(Ways { whom, connections: self.connections }))
    }

    /// A peer, with its paths: as many as its [`Ways::paths`].
    pub(crate) fn add_peer(&mut self, peer: PeerId, paths: &[PathId], ways: Ways, descriptor: &Descriptor) {
        let Ways { whom, .. } = ways;
        for (path, address) in paths.iter().zip(whom.addresses.iter().cycle()) {
            let (transport, link, address) = (Transport::Tcp, None, *address);
            let (trouble, fallback, no_rings) = (None, None, None);
            let at = PathAt { peer, address, link, trouble, transport, fallback, no_rings };
            self.paths.insert(*path, at);
        }
        let (trust, regions) = (descriptor.trust.clone(), by_number(descriptor));
        self.peers.insert(peer, Peer { whom, trust, regions });
    }

    /// The peer's memory, as it is now. False if it is another process's descriptor, or no such peer is known.
    pub(crate) fn update_peer(&mut self, peer: PeerId, descriptor: &Descriptor) -> bool {
        let is_it =
            |peer: &&mut Peer| peer.whom.identity == identity(descriptor) && peer.trust == descriptor.trust;
        match self.peers.get_mut(&peer).filter(is_it) {
            Some(peer) => {
                peer.regions = by_number(descriptor);
                true
            }
            None => false,
        }
    }

    /// Forgets a peer whose transfers were ended, and its paths.
    pub(crate) fn remove_peer(&mut self, peer: PeerId) {
        self.peers.remove(&peer);
        // Links of paths that were still connecting.
        let left: Vec<LinkId> =
            self.paths.values().filter(|path| path.peer == peer).filter_map(|path| path.link).collect();
        left.into_iter().for_each(|link| drop(self.remove(link)));
        self.paths.retain(|_, path| path.peer != peer);
    }

    pub(crate) fn peers(&self) -> Vec<PeerId> {
        self.peers.keys().copied().collect()
    }

    /// A path, as far as it is known here: not whether it is up, and at which rate.
    pub(crate) fn path_status(&self, path: PathId) -> Option<PathStatus> {
        let PathAt { address, trouble, transport, fallback, no_rings, .. } = self.paths.get(&path)?;
        let (trouble, fallback, no_rings) = (trouble.clone(), fallback.clone(), no_rings.clone());
        let (address, transport, is_up, bytes_per_second) = (*address, *transport, false, None);
        Some(PathStatus { address, is_up, transport, fallback, no_rings, bytes_per_second, trouble })
    }

    pub(crate) fn add_region(&mut self, base: usize, len: u64, access: Access) -> u32 {
        let (number, generation) = self.regions.add(base, len, access, None);
        // A closed engine has cleared its card.
        self.card.iter().filter(|_| !self.is_closed).for_each(|card| card.add(number, generation));
        number
    }

    /// Memory of a GPU, which is on no card: neighbours cannot read it.
    pub(crate) fn add_gpu_region(
        &mut self,
        gpu: &Gpu,
        address: u64,
        len: u64,
        access: Access,
    ) -> Result<u32, GpuError> {
        let gpu = self.staging.add_gpu(gpu)?;
        Ok(self.regions.add(address as usize, len, access, Some(gpu)).0)
    }

    /// Requests for a region are refused from now on. False if there is no such region, or somebody else gives it up already.
    pub(crate) fn stop_serving(&mut self, region: u32) -> bool {
        let is_first = self.regions.stop_serving(region);
        self.card.iter().filter(|_| is_first).for_each(|card| card.remove(region));
        is_first
    }

    /// What both sides have registered, if the peer is known.
    pub(crate) fn both_sides(&self, peer: PeerId) -> Option<BothSides<'_>> {
        let peer = &self.peers.get(&peer)?.regions;
        Some(BothSides { own: &self.regions, peer })
    }

    /// What a transfer is going to use.
    pub(crate) fn used_by(&self, whom: PeerId, runs: &[Run]) -> Used {
        let sorted = |region: fn(&Run) -> u32| {
            let mut regions: Vec<u32> = Vec::new();
            for run in runs {
                // Mostly it is one.
                if regions.last() != Some(&region(run)) {
                    regions.push(region(run));
                }
            }
            regions.sort_unstable();
            regions.dedup();
            regions
        };
        let known = self.peers.get(&whom);
        let mut is_gpu_there = false;
        let generation = |region: u32| {
            let known = known?.regions.get(&region)?;
            is_gpu_there |= known.kind == MemoryKind::Cuda;
            Some((region, known.generation))
        };
        let peer = sorted(|run| run.remote.region).into_iter().filter_map(generation).collect();
        let own = sorted(|run| run.local.region);
        let is_gpu_here =
            self.regions.has_gpus() && own.iter().any(|region| self.regions.gpu_of(*region).is_some());
        Used { whom, own, is_gpu_here, peer, is_gpu_there }
    }

    /// Notes what a transfer uses, until it is over.
    pub(crate) fn note_use(&mut self, ticket: Ticket, used: Used) {
        used.own.iter().for_each(|region| self.regions.count_use(*region, 1));
        self.used.insert(ticket, used);
    }

    pub(crate) fn note_over(&mut self, ticket: Ticket) {
        for region in self.used.remove(&ticket).map(|used| used.own).unwrap_or_default() {
            self.regions.count_use(region, -1);
        }
    }

    /// Ends the connections that move bytes of a region for a peer. Whether there were any.
    pub(crate) fn end_links_that_touch(&mut self, region: u32) -> bool {
        let busy = self.links_that_touch(region);
        for link in &busy {
            self.end(
                *link,
                &Ended::Bad(BadFrame("it was too slow to let go of memory that is not shared any more")),
            );
        }
        !busy.is_empty()
    }

    pub(crate) fn is_touched(&self, region: u32) -> bool {
        let by_orphans = |memory: Spot| self.staging.is_touched_by_orphans(memory);
        !self.links_that_touch(region).is_empty() || self.regions.all_of(region).is_some_and(by_orphans)
    }

    pub(super) fn links_that_touch(&self, region: u32) -> Vec<LinkId> {
        let Some(memory) = self.regions.all_of(region) else { return Vec::new() };
        let mut busy = self.staging.links_that_touch(memory);
        if let Spot { piece: memory, gpu: None } = memory {
            let touches = |entry: &Entry| entry.link.touches(memory);
            busy.extend(self.links.iter().filter(|(_, entry)| touches(entry)).map(|(link, _)| *link));
            busy.extend(self.jobs_that_touch(memory));
        }
        busy
    }
}

/// How a peer can be reached.
#[derive(Debug)]
pub(crate) struct Ways {
    whom: Whom,
    /// Paths to each address.
    connections: usize,
}

impl Ways {
    pub(crate) fn paths(&self) -> usize {
        self.whom.addresses.len() * self.connections
    }
}

fn identity(descriptor: &Descriptor) -> Identity {
    Identity { engine: descriptor.engine_id, boot: descriptor.boot_nonce }
}

fn by_number(descriptor: &Descriptor) -> HashMap<u32, RegionDescriptor> {
    descriptor.regions.iter().map(|region| (region.number, *region)).collect()
}

fn encode_address(address: SocketAddr) -> Address {
    Address { kind: TCP, bytes: address.to_string().into_bytes() }
}

/// None if it is of another provider, or nothing that this one can reach.
fn decode_address(address: &Address) -> Option<SocketAddr> {
    let text = (address.kind == TCP).then_some(&address.bytes)?;
    std::str::from_utf8(text).ok()?.parse().ok()
}
