//! Carries out the plan: what applications ask of their hubs, and what befalls processes and connections.

use std::time::Duration;

use super::memory::{PieceAt, Region, RegionState, SLICE};
use super::network::{Network, Next};
use super::operations::{Operation, What};
use super::planned::Planned;
use super::process::Node;
use super::world::World;
use crate::descriptor::{Access, Descriptor};
use crate::runs::{Place, Run};
use crate::shape::Pieces;
use crate::transfers::{Memory as Kind, Op, PeerId, Priority, Request};

impl World {
    pub(super) fn plan_all(&mut self, processes: usize) {
        let within = [20_000, 300_000, 4_000_000][self.below(3) as usize];
        let parts = [1, 4][self.below(2) as usize];
        let steps = 10 + self.below(40);
        for _ in 0..steps {
            let planned = match self.below(64) {
                0..24 => Planned::Transfer,
                24..32 => Planned::Message,
                32..36 => Planned::Register,
                36..42 => Planned::Unregister,
                42..44 => Planned::Connect,
                44 => Planned::Remove,
                45 => Planned::Describe,
                46..48 => Planned::Fresh,
                48..51 => Planned::Receive,
                51 => Planned::Retire,
                52 if self.one_in(2) => Planned::Close,
                53 if self.one_in(2) => Planned::Kill,
                54..56 => Planned::Stop,
                kind if (56..56 + parts).contains(&kind) => Planned::Part,
                56..60 => Planned::CutWire,
                _ => Planned::BreakLink,
            };
            let (process, at) = (self.below(processes as u64) as usize, self.below(within));
            self.add_plan(at, process, planned);
        }
    }

    pub(super) fn add_plan(&mut self, at: u64, process: usize, planned: Planned) {
        self.plan.push(planned);
        self.still_planned += 1;
        self.network.lock().at(at, process, Next::Planned(self.plan.len() - 1));
    }

    pub(super) fn do_planned(&mut self, process: usize, planned: Planned) {
        if self.nodes[process].hub.is_closed {
            return;
        }
        match planned {
            Planned::Transfer => {
                if let Some(peer) = self.any_peer(process) {
                    self.transfer(process, peer);
                }
            }
            Planned::Message => {
                if let Some(peer) = self.any_peer(process) {
                    self.message(process, peer);
                }
            }
            Planned::Cancel(index) => self.cancel(index),
            Planned::Register => drop(self.register(process)),
            Planned::Unregister => {
                let regions = self.network.lock().memory.live_regions(process);
                if !regions.is_empty() {
                    let region = regions[self.below(regions.len() as u64) as usize];
                    self.nodes[process].unregister(region);
                }
            }
            Planned::Connect => {
                let other = self.below(self.nodes.len() as u64) as usize;
                if other != process {
                    self.connect(process, other);
                }
            }
            Planned::Remove => {
                if let Some((peer, _)) = self.any_peer(process) {
                    self.nodes[process].remove_peer(peer);
                }
            }
            Planned::Describe => self.describe_to(process),
            Planned::Fresh => self.use_fresh(process),
            Planned::Receive => drop(self.receive(process)),
            Planned::Retire => self.retire(process),
            Planned::Close => self.close(process),
            Planned::Kill => self.kill(process),
            Planned::Stop => self.stop(process),
            Planned::Part => self.part(process),
            Planned::CutWire => self.network.lock().cut_any(),
            Planned::BreakLink => self.network.lock().break_links(None),
        }
    }

    /// A random peer of the application. A peer connected by address counts only once it has answered.
    pub(super) fn any_peer(&self, process: usize) -> Option<(PeerId, usize)> {
        let Node { hub, peers, .. } = &self.nodes[process];
        let (peer, to) = *peers.get(self.below(peers.len().max(1) as u64) as usize)?;
        let known = hub.outside.peer(peer)?;
        (known.has_announced || !known.is_known_by_address).then_some((peer, to))
    }

    pub(super) fn register(&mut self, process: usize) -> Option<usize> {
        let areas = self.network.lock().memory.free_areas(process);
        let area = *areas.get(self.below(areas.len().max(1) as u64) as usize)?;
        let kind = if self.one_in(4) { Kind::Gpu(0) } else { Kind::Host(0) };
        let access = if self.one_in(6) { Access::Read } else { Access::ReadWrite };
        self.nodes[process].register(area, kind, access)
    }

    pub(super) fn describe(&mut self, process: usize) {
        let descriptor = self.nodes[process].describe();
        self.descriptors.push((process, descriptor));
    }

    /// Gives this process another one's descriptor, the current or an earlier one.
    pub(super) fn describe_to(&mut self, process: usize) {
        let Some((peer, to)) = self.any_peer(process) else { return };
        self.describe(to);
        let of_it: Vec<&Descriptor> =
            self.descriptors.iter().filter(|(of, _)| *of == to).map(|(_, known)| known).collect();
        let descriptor = of_it[self.below(of_it.len() as u64) as usize];
        self.described_late.insert((process, peer));
        let outside = &mut self.nodes[process].hub.outside;
        outside.peer_mut(peer).map(|known| known.describe(descriptor));
        outside.notify_regions_changed(peer);
    }

    /// Begins a transfer of memory that a peer has only just registered and described.
    pub(super) fn use_fresh(&mut self, process: usize) {
        let Some((peer, to)) = self.any_peer(process) else { return };
        if self.nodes[to].is_dead || self.nodes[to].hub.is_closed || self.register(to).is_none() {
            return;
        }
        let descriptor = self.nodes[to].describe();
        self.described_late.insert((process, peer));
        let outside = &mut self.nodes[process].hub.outside;
        outside.peer_mut(peer).map(|known| known.describe(&descriptor));
        outside.notify_regions_changed(peer);
        self.transfer(process, (peer, to));
    }

    pub(super) fn connect(&mut self, process: usize, to: usize) {
        let address = self.network.lock().hosts[to].address;
        if self.one_in(8) {
            // By address only: whichever process listens there.
            let listens = self.network.lock().listener_at(address);
            let Some(to) = listens.filter(|to| *to != process) else { return };
            return self.nodes[process].connect(None, address, to);
        }
        if self.one_in(2) && !self.nodes[to].is_dead {
            self.describe(to);
        }
        let of_it: Vec<&Descriptor> =
            self.descriptors.iter().filter(|(of, _)| *of == to).map(|(_, known)| known).collect();
        let descriptor = of_it[self.below(of_it.len() as u64) as usize].clone();
        self.nodes[process].connect(Some(&descriptor), address, to);
    }

    pub(super) fn transfer(&mut self, process: usize, (peer, to): (PeerId, usize)) -> Option<usize> {
        let node = &self.nodes[process];
        let sides = node.hub.both_sides(peer)?;
        let mut numbers: Vec<(u32, u32)> =
            sides.theirs.iter().map(|(number, shape)| (*number, shape.generation)).collect();
        numbers.sort_unstable();
        let mut guard = self.network.lock();
        let network = &mut *guard;
        let own = network.memory.live_regions(process);
        let op = if network.dice.one_in(2) { Op::Read } else { Op::Write };
        let (mut pieces, mut runs) = (Vec::new(), Vec::new());
        let count = if own.is_empty() || numbers.is_empty() { 0 } else { network.dice.below(7) };
        for _ in 0..count {
            let local = own[network.dice.below(own.len() as u64) as usize];
            let (number, generation) = numbers[network.dice.below(numbers.len() as u64) as usize];
            let is_it = |region: &Region| {
                (region.process, region.number, region.generation) == (to, number, generation)
            };
            let regions = &network.memory.regions;
            let remote = regions.iter().position(is_it);
            let is_gone = remote.is_none_or(|remote| regions[remote].state == RegionState::Gone);
            let (first, second) = (network.dice.roll(), network.dice.roll());
            let Some(local) = network.memory.take_slice(local, first >> 8) else { continue };
            let remote = match remote.filter(|_| !is_gone) {
                None => None,
                Some(remote) => match network.memory.take_slice(remote, second >> 8) {
                    Some(remote) => Some(remote),
                    None => {
                        network.memory.regions[local.region].taken[local.slice] = false;
                        continue;
                    }
                },
            };
            let offset = network.dice.below(SLICE as u64) as usize;
            let len = 1 + network.dice.below((SLICE - offset) as u64) as usize;
            let at = |slice: usize| (slice * SLICE + offset) as u64;
            let of_local = network.memory.regions[local.region].number;
            let there = remote.map_or(0, |remote| remote.slice);
            runs.push(Run {
                local: Place { region: of_local, offset: at(local.slice) },
                remote: Place { region: number, offset: at(there) },
                len: len as u64,
            });
            pieces.push(PieceAt { local, remote, offset, len });
        }
        let give_back = |network: &mut Network| {
            for slice in pieces.iter().flat_map(|piece| [Some(piece.local), piece.remote]).flatten() {
                network.memory.regions[slice.region].taken[slice.slice] = false;
            }
        };
        let Ok(runs) = Pieces::Runs(runs).runs(&sides) else {
            give_back(network);
            return None;
        };
        let index = self.operations.len();
        let has_counter = network.dice.one_in(2);
        let timeout = network.dice.one_in(4).then(|| Duration::from_micros(network.dice.below(3_000_000)));
        let deadline = timeout.map(|timeout| Duration::from_micros(network.now) + timeout);
        let deadline = deadline.filter(|_| !network.is_calm);
        let used = sides.used_by(peer, &runs);
        let request = Request {
            peer,
            op,
            stretches: sides.stretches(runs),
            immediate: has_counter.then_some((index as u32, 0)),
            deadline,
            priority: if network.dice.one_in(2) { Priority::High } else { Priority::Bulk },
        };
        let Ok(Some(ticket)) = self.nodes[process].hub.submit(request, used) else {
            give_back(network);
            return None;
        };
        network.memory.begin((process, ticket), op, &pieces);
        let is_calm = network.is_calm;
        let (is_counted, is_retired) = (false, false);
        let what = What::Transfer { op, pieces, has_counter, is_counted, is_retired };
        let (is_cancelled, over) = (false, None);
        let operation = Operation { process, to, peer, ticket, what, deadline, is_cancelled, is_calm, over };
        self.operations.push(operation);
        let cancel = network.goes_wrong(6).then(|| network.now + network.dice.below(20_000));
        drop(guard);
        cancel.into_iter().for_each(|at| self.add_plan(at, process, Planned::Cancel(index)));
        Some(index)
    }

    pub(super) fn message(&mut self, process: usize, (peer, to): (PeerId, usize)) -> Option<usize> {
        let network = &mut *self.network.lock();
        let index = self.operations.len();
        let mut bytes = (index as u64).to_le_bytes().to_vec();
        bytes.resize(8 + network.dice.below(40) as usize, index as u8);
        let now = Duration::from_micros(network.now);
        let within = if network.is_calm { 20_000_000 } else { network.dice.below(4_000_000) };
        let deadline = now + Duration::from_micros(within);
        let hub = &mut self.nodes[process].hub;
        let sent = hub.transfers.send(now, peer, bytes.clone().into(), deadline, Priority::High);
        let ticket = sent.ok()?;
        hub.outcomes.want(ticket);
        let (what, is_calm) = (What::Message { bytes, received: 0 }, network.is_calm);
        let (deadline, is_cancelled, over) = (Some(deadline), false, None);
        let operation = Operation { process, to, peer, ticket, what, deadline, is_cancelled, is_calm, over };
        self.operations.push(operation);
        Some(index)
    }

    pub(super) fn cancel(&mut self, index: usize) {
        let operation = &mut self.operations[index];
        operation.is_cancelled = true;
        let hub = &mut self.nodes[operation.process].hub;
        let now = hub.now();
        hub.transfers.cancel(now, operation.ticket);
    }

    /// Takes a message from the inbox. Whether there was one.
    pub(super) fn receive(&mut self, process: usize) -> bool {
        let message = self.nodes[process].hub.outside.process.inbox.take();
        let Some(message) = message else { return false };
        let mut network = self.network.lock();
        let index = message.bytes.first_chunk().map(|bytes| u64::from_le_bytes(*bytes) as usize);
        let operation = index.and_then(|index| self.operations.get_mut(index));
        let Some(Operation { process: from, to, what: What::Message { bytes, received }, .. }) = operation
        else {
            network.report_wrong("a message that nobody has sent");
            return true;
        };
        let identity = network.hosts[*from].identity;
        let is_from = (message.from.engine_id, message.from.boot_nonce) == (identity.engine, identity.boot);
        *received += 1;
        if *bytes != message.bytes || *to != process || !is_from || *received > 1 {
            let wrong = format!("message {index:?} was received {received} times, or is another");
            network.report_wrong(wrong);
        }
        true
    }

    /// Retires the counters that transfers to this process name.
    pub(super) fn retire(&mut self, process: usize) {
        for (index, operation) in self.operations.iter_mut().enumerate() {
            let immediates = &mut self.nodes[process].hub.outside.process.immediates;
            if let What::Transfer { is_retired, .. } = &mut operation.what
                && operation.to == process
            {
                *is_retired = true;
                immediates.retire(index as u32, 0);
            }
        }
    }

    pub(super) fn close(&mut self, process: usize) {
        self.network.lock().memory.close(process, false);
        self.nodes[process].close();
        if self.one_in(2) {
            self.restart(process);
        }
    }

    pub(super) fn kill(&mut self, process: usize) {
        let mut network = self.network.lock();
        let host = &mut network.hosts[process];
        (host.listens, host.is_gone) = (false, true);
        network.memory.close(process, true);
        network.cut_all(process);
        network.break_links(Some(process));
        self.nodes[process].is_dead = true;
        drop(network);
        if self.one_in(2) {
            self.restart(process);
        }
    }

    /// Starts a new process at the same address.
    pub(super) fn restart(&mut self, process: usize) {
        let at = self.network.lock().hosts[process].identity.engine as usize;
        self.add_process(at);
        let new = self.nodes.len() - 1;
        for other in 0..new {
            if !self.nodes[other].is_dead && !self.nodes[other].hub.is_closed && self.one_in(2) {
                self.connect(new, other);
                self.connect(other, new);
            }
        }
        for _ in 0..self.below(6) {
            let at = self.now() + self.below(300_000);
            self.add_plan(at, new, Planned::Transfer);
        }
    }

    /// Cuts off one process from another for a while.
    pub(super) fn part(&mut self, process: usize) {
        let network = &mut *self.network.lock();
        let other = network.dice.below(self.nodes.len() as u64) as usize;
        let long = network.dice.below(6_000_000);
        network.part(process, other, long);
        network.part_wires(process, other);
        network.part_links(process, other);
    }

    pub(super) fn stop(&mut self, process: usize) {
        let network = &mut *self.network.lock();
        let within = if network.dice.one_in(3) { 6_000_000 } else { 500_000 };
        let long = network.dice.below(within);
        network.hosts[process].stopped_until = network.now + long;
        // The others notice that it is silent.
        if long > 1_500_000 {
            network.cut_all(process);
            network.break_links(Some(process));
        }
    }
}
