//! Peers, the paths to them, and the memory of both sides.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener};

use super::{BothSides, Hub, LinkId, PathAt, PathStatus, Peer, Transport, Used, random};
use crate::descriptor::{Access, Address, Descriptor, RegionDescriptor};
use crate::fences::Whom;
use crate::runs::Run;
use crate::tcp::{BadFrame, Ended, Identity};
use crate::transfers::{PathId, PeerId, Ticket};

/// Addresses of one peer that are used.
const ADDRESSES_MAX: usize = 16;
/// The provider's number in an [`Address`].
const TCP: u8 = 1;

impl Hub {
    pub(crate) fn descriptor(&self) -> io::Result<Descriptor> {
        let own = self.listeners.iter().map(TcpListener::local_addr);
        let addresses: Vec<SocketAddr> = match self.advertised.is_empty() {
            true => own.collect::<io::Result<_>>()?,
            false => self.advertised.clone(),
        };
        Ok(Descriptor {
            boot_nonce: self.me.boot,
            engine_id: self.me.engine,
            addresses: addresses.into_iter().map(encode_address).collect(),
            regions: self.regions.descriptors(),
        })
    }

    /// A peer; none if it has no address that is known here.
    pub(crate) fn add_peer(&mut self, descriptor: &Descriptor) -> io::Result<Option<PeerId>> {
        let known = descriptor.addresses.iter().filter_map(decode_address).take(ADDRESSES_MAX);
        let addresses: Vec<SocketAddr> = known.collect();
        if addresses.is_empty() {
            return Ok(None);
        }
        let session = u128::from(random()?) << 64 | u128::from(random()?);
        let now = self.now();
        let (peer, paths) = self.transfers.add_peer(now, addresses.len() * self.connections);
        for (path, address) in paths.into_iter().zip(addresses.iter().cycle()) {
            let (transport, link, address) = (Transport::Tcp, None, *address);
            let (trouble, fallback, no_rings) = (None, None, None);
            let at = PathAt { peer, address, link, trouble, transport, fallback, no_rings };
            self.paths.insert(path, at);
        }
        let whom = Whom { identity: identity(descriptor), session, addresses };
        self.peers.insert(peer, Peer { whom, regions: by_number(descriptor) });
        self.pump();
        Ok(Some(peer))
    }

    /// The peer's memory, as it is now. False if it is another process's descriptor, or no such peer is known.
    pub(crate) fn update_peer(&mut self, peer: PeerId, descriptor: &Descriptor) -> bool {
        let is_it = |peer: &&mut Peer| peer.whom.identity == identity(descriptor);
        match self.peers.get_mut(&peer).filter(is_it) {
            Some(peer) => {
                peer.regions = by_number(descriptor);
                true
            }
            None => false,
        }
    }

    /// Ends all transfers with a peer. Those that wrote are over when the peer has confirmed that, or with its lease.
    pub(crate) fn remove_peer(&mut self, peer: PeerId) {
        let now = self.now();
        self.transfers.remove_peer(now, peer);
        self.pump();
        self.peers.remove(&peer);
        // Links of paths that were still connecting.
        let left: Vec<LinkId> =
            self.paths.values().filter(|path| path.peer == peer).filter_map(|path| path.link).collect();
        left.into_iter().for_each(|link| drop(self.remove(link)));
        self.paths.retain(|_, path| path.peer != peer);
        self.pump();
    }

    /// All ways to a peer; none if there is no such peer.
    pub(crate) fn path_statuses(&self, peer: PeerId) -> Vec<PathStatus> {
        let status = |path: &PathId| {
            let PathAt { address, trouble, transport, fallback, no_rings, .. } = self.paths.get(path)?;
            let (is_up, bytes_per_second) = (self.transfers.is_up(*path), self.transfers.rate(*path));
            let (trouble, fallback, no_rings) = (trouble.clone(), fallback.clone(), no_rings.clone());
            let (address, transport) = (*address, *transport);
            Some(PathStatus { address, is_up, transport, fallback, no_rings, bytes_per_second, trouble })
        };
        self.transfers.paths(peer).iter().filter_map(status).collect()
    }

    pub(crate) fn add_region(&mut self, base: usize, len: u64, access: Access) -> u32 {
        let (number, generation) = self.regions.add(base, len, access);
        // A closed engine has cleared its card.
        self.card.iter().filter(|_| !self.is_closed).for_each(|card| card.add(number, generation));
        number
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
        let generation =
            |region: u32| Some((region, known?.regions.get(&region).map(|region| region.generation)?));
        let peer = sorted(|run| run.remote.region).into_iter().filter_map(generation).collect();
        Used { whom, own: sorted(|run| run.local.region), peer }
    }

    /// Notes what a transfer uses.
    pub(crate) fn note_use(&mut self, ticket: Ticket, used: Used) {
        used.own.iter().for_each(|region| self.regions.count_use(*region, 1));
        self.used.insert(ticket, used);
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
        !self.links_that_touch(region).is_empty()
    }

    pub(super) fn links_that_touch(&self, region: u32) -> Vec<LinkId> {
        let Some(memory) = self.regions.all_of(region) else { return Vec::new() };
        let by_socket =
            self.links.iter().filter(|(_, entry)| entry.link.touches(memory)).map(|(link, _)| *link);
        by_socket.chain(self.jobs_that_touch(memory)).collect()
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
