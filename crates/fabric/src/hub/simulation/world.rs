//! One seed's world: what applications do and what goes wrong, whether all of it ends as it should, and what is left then.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use parking_lot::Mutex;

use super::faults::Fault;
use super::memory::{PieceAt, SLICE, State};
use super::network::{Network, Next, Seen, Shared};
use super::operations::{Operation, What};
use super::process::Node;
use crate::descriptor::{Access, Descriptor};
use crate::runs::{Place, Run};
use crate::shape::Pieces;
use crate::tcp::Identity;
use crate::transfers::{Memory as Kind, Op, Options, PeerId, Priority, Request};

/// More events mean that something goes round and round.
const EVENTS_MAX: usize = 100_000;
/// Longer than everything takes once nothing goes wrong any more.
const CALM_US: u64 = 60_000_000;
/// By then whatever broke before is known to be broken, and whoever was stopped goes on.
const NOTICED_US: u64 = 8_000_000;
/// Longer than a session is remembered.
const SESSIONS_KEPT: Duration = Duration::from_secs(130);

pub(super) struct World {
    seed_of_options: Options,
    network: Shared,
    clock: Arc<AtomicU64>,
    nodes: Vec<Node>,
    pub(super) operations: Vec<Operation>,
    plan: Vec<Planned>,
    still_planned: usize,
    /// What processes have told of themselves at some time.
    descriptors: Vec<(usize, Descriptor)>,
    /// Peers that were described when they were known.
    described_late: BTreeSet<(usize, PeerId)>,
    fault: Fault,
}

/// What an application does, or what befalls its process.
#[derive(Debug, Clone, Copy)]
enum Planned {
    Transfer,
    Message,
    Cancel(usize),
    Register,
    Unregister,
    Connect,
    Remove,
    Describe,
    Fresh,
    Receive,
    Retire,
    Close,
    Kill,
    Stop,
    Part,
    CutWire,
    BreakLink,
}

impl World {
    pub(super) fn new(seed: u64, fault: Fault) -> World {
        let clock = Arc::new(AtomicU64::new(0));
        let mut network = Network::new(seed, fault, Arc::clone(&clock));
        let dice = &mut network.dice;
        let options = Options {
            chunk_bytes: 40 + dice.below(200),
            chunk_runs: 1 + dice.below(4) as usize,
            credits: 1 + dice.below(4) as u32,
            breaks_max: 4,
            ..Options::default()
        };
        let processes = 2 + dice.below(2) as usize;
        let mut world = World {
            seed_of_options: options,
            network: Arc::new(Mutex::new(network)),
            clock,
            nodes: Vec::new(),
            operations: Vec::new(),
            plan: Vec::new(),
            still_planned: 0,
            descriptors: Vec::new(),
            described_late: BTreeSet::new(),
            fault,
        };
        (0..processes).for_each(|process| world.add_process(process));
        for process in 0..processes {
            for other in (0..processes).filter(|other| *other != process) {
                if world.below(4) > 0 {
                    world.connect(process, other);
                }
            }
        }
        world.plan_all(processes);
        world
    }

    fn below(&self, limit: u64) -> u64 {
        self.network.lock().dice.below(limit)
    }

    fn one_in(&self, count: u64) -> bool {
        self.below(count) == 0
    }

    /// A process begins, at an address that a former one may have had.
    fn add_process(&mut self, at: usize) {
        let boot = self.nodes.len() as u64;
        let identity = Identity { engine: at as u128, boot };
        let address = SocketAddr::from(([10, 0, 0, at as u8], 1));
        let process = self.network.lock().add_host(identity, address);
        let node = Node::new(process, &self.network, &self.clock, self.seed_of_options.clone());
        self.nodes.push(node);
        for _ in 0..=self.below(2) {
            self.register(process);
        }
        self.describe(process);
    }

    fn plan_all(&mut self, processes: usize) {
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

    fn add_plan(&mut self, at: u64, process: usize, planned: Planned) {
        self.plan.push(planned);
        self.still_planned += 1;
        self.network.lock().at(at, process, Next::Asked(self.plan.len() - 1));
    }

    pub(super) fn run(&mut self) -> Result<(), String> {
        self.go_on(u64::MAX, |world| world.still_planned == 0)?;
        self.network.lock().calm_down();
        self.go_on_calmly(|world| world.all_over())?;
        if self.fault == Fault::None || self.fault == Fault::LosesNews {
            self.all_is_well()?;
        }
        self.end()
    }

    pub(super) fn seen(&self) -> Seen {
        std::mem::take(&mut self.network.lock().seen)
    }

    fn now(&self) -> u64 {
        self.network.lock().now
    }

    fn go_on_calmly(&mut self, done: impl Fn(&World) -> bool) -> Result<(), String> {
        if done(self) {
            return Ok(());
        }
        let until = self.now() + CALM_US;
        self.go_on(until, done)
    }

    fn go_on(&mut self, until: u64, done: impl Fn(&World) -> bool) -> Result<(), String> {
        for _ in 0..EVENTS_MAX {
            let next = self.network.lock().next();
            let Some((process, next)) = next else {
                return Err(format!("nothing happens any more; not over: {:?}", self.not_over()));
            };
            if self.now() > until {
                return Err(format!("it does not come to an end; not over: {:?}", self.not_over()));
            }
            self.step(process, next)?;
            if done(self) {
                return Ok(());
            }
        }
        Err(format!("it goes round and round; not over: {:?}", self.not_over()))
    }

    fn not_over(&self) -> Vec<&Operation> {
        let of_living = |of: &&Operation| of.over.is_none() && !self.nodes[of.process].is_dead;
        self.operations.iter().filter(of_living).collect()
    }

    fn all_over(&self) -> bool {
        let is_idle = |node: &Node| node.is_dead || !node.is_letting_go();
        self.not_over().is_empty() && self.nodes.iter().all(is_idle)
    }

    fn step(&mut self, process: usize, next: Next) -> Result<(), String> {
        self.still_planned -= usize::from(matches!(next, Next::Asked(_)));
        if self.nodes[process].is_dead {
            return Ok(());
        }
        let before = self.nodes[process].better_paths();
        match next {
            Next::Asked(index) => self.do_planned(process, self.plan[index]),
            Next::Carrier(code, number) => self.network.lock().due[process].push_back((code, number)),
            Next::Told(event) => self.network.lock().told[process].push_back(event),
            Next::Dialled(wire) => {
                let served = self.network.lock().dialled(wire);
                if let Some(served) = served {
                    let node = &mut self.nodes[process].hub.outside;
                    let (now, known) = (node.now(), &mut node.process);
                    let joined = known.sessions.join(now, served.session, served.from);
                    joined.map_err(|many| format!("{many:?} sessions"))?;
                    known.inbox.share_among(known.sessions.connected());
                }
            }
            Next::Welcomed(wire) => self.network.lock().welcomed(wire),
            Next::Frame(wire, end) => self.network.lock().frame(wire, end),
            Next::Ended(wire, end) => self.nodes[process].end_wires(vec![(wire, end)]),
            Next::FenceAsked(index) => self.network.lock().fence_asked(index),
            Next::Tick => {}
        }
        self.settle(process, &before)?;
        let is_calm = self.network.lock().is_calm;
        while is_calm && self.receive(process) {}
        Ok(())
    }

    fn settle(
        &mut self,
        process: usize,
        before: &[(PeerId, crate::transfers::PathId, u32)],
    ) -> Result<(), String> {
        let node = &mut self.nodes[process];
        if node.is_dead {
            return Ok(());
        }
        node.settle();
        self.note_who_answered(process);
        let node = &mut self.nodes[process];
        let after = node.better_paths();
        let lower = std::mem::take(&mut self.network.lock().lower);
        let was_up = |peer: &PeerId| before.iter().any(|path| path.0 == *peer && after.contains(path));
        if lower.iter().any(|(_, peer)| was_up(peer)) {
            return Err("a post over the worse class while a path of the better one is up".into());
        }
        self.count()?;
        self.look_at_ends(process)?;
        let mut network = self.network.lock();
        if let Some(wrong) = network.wrong.take() {
            return Err(wrong);
        }
        let node = &mut self.nodes[process];
        if let Some((at, what)) = node.next_tick() {
            let at = at.as_nanos().div_ceil(1000) as u64;
            if at <= network.now {
                return Err(format!("{what}: something that is due is not done"));
            }
            if node.tick_at.is_none_or(|before| before <= network.now || at < before) {
                node.tick_at = Some(at);
                network.at(at, process, Next::Tick);
            }
        }
        Ok(())
    }

    /// Of peers that are known by their address only, another process may have begun to listen there meanwhile.
    fn note_who_answered(&mut self, process: usize) {
        let Node { hub, peers, .. } = &mut self.nodes[process];
        let network = self.network.lock();
        for (peer, to) in peers {
            let identity = hub.outside.peer(*peer).and_then(|known| known.whom.identity);
            *to = identity.and_then(|identity| network.process(identity)).unwrap_or(*to);
        }
    }

    /// What counters have counted: once each, and after the bytes are in place.
    fn count(&mut self) -> Result<(), String> {
        for index in 0..self.operations.len() {
            let operation = &self.operations[index];
            let (whose, is_over) = (operation.whose(), operation.over.is_some());
            let What::Transfer { op, pieces, has_counter: true, is_counted, .. } = &operation.what else {
                continue;
            };
            let count = self.nodes[operation.to].hub.outside.process.immediates.count(index as u32, 0);
            if count > 1 {
                return Err(format!("{operation:?} was counted {count} times"));
            }
            if count == 1 && !is_counted {
                let is_placed = self.network.lock().memory.is_placed(whose, *op, pieces);
                if !is_over && !is_placed {
                    return Err(format!("{operation:?} was counted before its bytes were in place"));
                }
                if let What::Transfer { is_counted, .. } = &mut self.operations[index].what {
                    *is_counted = true;
                }
            }
        }
        Ok(())
    }

    /// Transfers of a process that are over: their memory is used otherwise at once.
    fn look_at_ends(&mut self, process: usize) -> Result<(), String> {
        for operation in self.operations.iter_mut().filter(|operation| operation.process == process) {
            let node = &self.nodes[process];
            let outcome = node.hub.outcomes.of(operation.ticket);
            if operation.over.is_some() && operation.over != outcome {
                return Err(format!("{operation:?} was over twice: {outcome:?}"));
            }
            let (Some(outcome), None) = (outcome, operation.over) else { continue };
            let network = &mut *self.network.lock();
            let now = Duration::from_micros(network.now);
            let is_removed = !node.peers.iter().any(|(peer, _)| *peer == operation.peer);
            let is_gone = is_removed || !network.hosts[operation.to].listens || node.hub.is_closed;
            operation.judge(&network.memory, now, outcome, is_gone, self.fault)?;
            network.memory.end(operation.whose(), operation.pieces());
            operation.over = Some(outcome);
        }
        Ok(())
    }

    fn do_planned(&mut self, process: usize, planned: Planned) {
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

    /// A peer that the application has: one by its address only when that has answered.
    fn any_peer(&self, process: usize) -> Option<(PeerId, usize)> {
        let Node { hub, peers, .. } = &self.nodes[process];
        let (peer, to) = *peers.get(self.below(peers.len().max(1) as u64) as usize)?;
        let known = hub.outside.peer(peer)?;
        (known.has_told || !known.is_known_by_address).then_some((peer, to))
    }

    fn register(&mut self, process: usize) -> Option<usize> {
        let areas = self.network.lock().memory.free_areas(process);
        let area = *areas.get(self.below(areas.len().max(1) as u64) as usize)?;
        let kind = if self.one_in(4) { Kind::Gpu(0) } else { Kind::Host(0) };
        let access = if self.one_in(6) { Access::Read } else { Access::ReadWrite };
        self.nodes[process].register(area, kind, access)
    }

    fn describe(&mut self, process: usize) {
        let descriptor = self.nodes[process].describe();
        self.descriptors.push((process, descriptor));
    }

    /// Another process is described to this one, as it is or as it once was.
    fn describe_to(&mut self, process: usize) {
        let Some((peer, to)) = self.any_peer(process) else { return };
        self.describe(to);
        let of_it: Vec<&Descriptor> =
            self.descriptors.iter().filter(|(of, _)| *of == to).map(|(_, known)| known).collect();
        let descriptor = of_it[self.below(of_it.len() as u64) as usize];
        self.described_late.insert((process, peer));
        let outside = &mut self.nodes[process].hub.outside;
        outside.peer_mut(peer).map(|known| known.describe(descriptor));
        outside.peer_has_changed(peer);
    }

    /// A transfer begins of memory that a peer has just registered and described.
    fn use_fresh(&mut self, process: usize) {
        let Some((peer, to)) = self.any_peer(process) else { return };
        if self.nodes[to].is_dead || self.nodes[to].hub.is_closed || self.register(to).is_none() {
            return;
        }
        let descriptor = self.nodes[to].describe();
        self.described_late.insert((process, peer));
        let outside = &mut self.nodes[process].hub.outside;
        outside.peer_mut(peer).map(|known| known.describe(&descriptor));
        outside.peer_has_changed(peer);
        self.transfer(process, (peer, to));
    }

    fn connect(&mut self, process: usize, to: usize) {
        let address = self.network.lock().hosts[to].address;
        if self.one_in(8) {
            // Whoever listens there.
            let listens = self.network.lock().who_listens(address);
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

    fn transfer(&mut self, process: usize, (peer, to): (PeerId, usize)) -> Option<usize> {
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
            let is_it = |region: &super::memory::Region| {
                (region.process, region.number, region.generation) == (to, number, generation)
            };
            let regions = &network.memory.regions;
            let remote = regions.iter().position(is_it);
            let is_gone = remote.is_none_or(|remote| regions[remote].state == State::Gone);
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

    fn message(&mut self, process: usize, (peer, to): (PeerId, usize)) -> Option<usize> {
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

    fn cancel(&mut self, index: usize) {
        let operation = &mut self.operations[index];
        operation.is_cancelled = true;
        let hub = &mut self.nodes[operation.process].hub;
        let now = hub.now();
        hub.transfers.cancel(now, operation.ticket);
    }

    /// Somebody takes a message. Whether there was one.
    fn receive(&mut self, process: usize) -> bool {
        let message = self.nodes[process].hub.outside.process.inbox.take();
        let Some(message) = message else { return false };
        let mut network = self.network.lock();
        let index = message.bytes.first_chunk().map(|bytes| u64::from_le_bytes(*bytes) as usize);
        let operation = index.and_then(|index| self.operations.get_mut(index));
        let Some(Operation { process: from, to, what: What::Message { bytes, received }, .. }) = operation
        else {
            network.is_wrong("a message that nobody has sent");
            return true;
        };
        let identity = network.hosts[*from].identity;
        let is_from = (message.from.engine_id, message.from.boot_nonce) == (identity.engine, identity.boot);
        *received += 1;
        if *bytes != message.bytes || *to != process || !is_from || *received > 1 {
            let wrong = format!("message {index:?} was received {received} times, or is another");
            network.is_wrong(wrong);
        }
        true
    }

    /// The use of a counter that a transfer names ends.
    fn retire(&mut self, process: usize) {
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

    fn close(&mut self, process: usize) {
        self.network.lock().memory.close(process, false);
        self.nodes[process].close();
        if self.one_in(2) {
            self.restart(process);
        }
    }

    fn kill(&mut self, process: usize) {
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

    /// Another process begins where one was.
    fn restart(&mut self, process: usize) {
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

    /// Nothing gets through to another process for a while.
    fn part(&mut self, process: usize) {
        let network = &mut *self.network.lock();
        let other = network.dice.below(self.nodes.len() as u64) as usize;
        let long = network.dice.below(6_000_000);
        network.part(process, other, long);
        network.part_wires(process, other);
        network.part_links(process, other);
    }

    fn stop(&mut self, process: usize) {
        let network = &mut *self.network.lock();
        let within = if network.dice.one_in(3) { 6_000_000 } else { 500_000 };
        let long = network.dice.below(within);
        network.hosts[process].stopped_until = network.now + long;
        // Nothing is heard of it.
        if long > 1_500_000 {
            network.cut_all(process);
            network.break_links(Some(process));
        }
    }

    /// Whatever went wrong before: each peer that is there is reached by all ways, and what is asked for is done.
    fn all_is_well(&mut self) -> Result<(), String> {
        let noticed = self.now() + NOTICED_US;
        let living = self.living();
        living.iter().for_each(|process| self.network.lock().at(noticed, *process, Next::Tick));
        self.go_on_calmly(|world| living.is_empty() || world.now() >= noticed)?;
        for process in living {
            let before = self.nodes[process].better_paths();
            for (peer, to) in self.nodes[process].peers.clone() {
                let network = self.network.lock();
                let identity = self.nodes[process].hub.outside.peer(peer).and_then(|peer| peer.whom.identity);
                let is_there = network.hosts[to].listens
                    && identity.is_none_or(|identity| identity == network.hosts[to].identity);
                drop(network);
                if !is_there {
                    self.nodes[process].remove_peer(peer);
                }
            }
            while self.receive(process) {}
            self.settle(process, &before)?;
        }
        self.go_on_calmly(|world| {
            world.living().into_iter().all(|process| world.nodes[process].is_all_up())
        })?;
        let known = self.go_on_calmly(|world| world.each_knows_what_others_have().is_ok());
        self.each_knows_what_others_have()?;
        known?;
        let before = self.operations.len();
        for process in self.living() {
            let better = self.nodes[process].better_paths();
            for peer in self.nodes[process].peers.clone() {
                self.transfer(process, peer);
                self.message(process, peer);
            }
            self.settle(process, &better)?;
        }
        self.go_on_calmly(World::all_over)?;
        for process in self.living() {
            let kept = self.nodes[process].kept();
            if !kept.is_empty() {
                return Err(format!("nothing is under way, and process {process} has {kept:?}"));
            }
        }
        let failed = self.operations[before..].iter().find(|operation| {
            operation.over != Some(Ok(())) && !operation.may_be_refused(&self.network.lock().memory)
        });
        failed.map_or(Ok(()), |failed| Err(format!("nothing goes wrong any more, and yet {failed:?}")))
    }

    fn living(&self) -> Vec<usize> {
        (0..self.nodes.len())
            .filter(|process| !self.nodes[*process].is_dead && !self.nodes[*process].hub.is_closed)
            .collect()
    }

    /// What is registered is known to all who are connected. An old descriptor may have brought back what is gone.
    fn each_knows_what_others_have(&self) -> Result<(), String> {
        for process in self.living() {
            for (peer, to) in &self.nodes[process].peers {
                let Some(known) = self.nodes[process].hub.outside.peer(*peer) else { continue };
                let theirs = self.nodes[*to].hub.outside.process.regions.descriptors();
                let mut taken = known.descriptors();
                if self.described_late.contains(&(process, *peer)) {
                    taken.retain(|region| theirs.iter().any(|known| known.number == region.number));
                }
                if taken != theirs || !known.has_told {
                    return Err(format!(
                        "process {process} takes {to} to have {taken:?}, and it has {theirs:?}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// All peers are removed and all memory is given back: then nothing is left.
    fn end(&mut self) -> Result<(), String> {
        for process in
            (0..self.nodes.len()).filter(|process| !self.nodes[*process].is_dead).collect::<Vec<_>>()
        {
            while self.receive(process) {}
            for (peer, _) in self.nodes[process].peers.clone() {
                self.nodes[process].remove_peer(peer);
            }
            let regions = self.network.lock().memory.live_regions(process);
            for region in regions {
                self.nodes[process].unregister(region);
            }
            self.settle(process, &[])?;
        }
        let until = self.now() + CALM_US;
        loop {
            let next = self.network.lock().next();
            let Some((process, next)) = next else { break };
            if self.now() > until {
                return Err("it does not come to rest".into());
            }
            self.step(process, next)?;
        }
        for node in self.nodes.iter_mut().filter(|node| !node.is_dead) {
            let left = node.left_over(SESSIONS_KEPT);
            if !left.is_empty() {
                return Err(format!("all is over, and process {} still has {left:?}", node.process));
            }
        }
        if let Some(left) = self.network.lock().slow.left_over(|process| self.nodes[process].is_dead) {
            return Err(format!("all is over, and a connection is left: {left}"));
        }
        self.judge_messages()
    }

    fn judge_messages(&self) -> Result<(), String> {
        for operation in &self.operations {
            let What::Message { received, .. } = operation.what else { continue };
            let is_lost = self.nodes[operation.to].is_dead;
            if operation.over == Some(Ok(())) && received != 1 && !is_lost {
                return Err(format!("{operation:?} is done, and was received {received} times"));
            }
        }
        Ok(())
    }
}
