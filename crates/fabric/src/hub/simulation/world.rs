//! One seed's world. Runs the plan, checks every outcome, and checks at the end that nothing is left.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use parking_lot::Mutex;

use super::faults::Fault;
use super::network::{Network, Next, SeenCounts, SharedNetwork};
use super::operations::{Operation, What};
use super::planned::Planned;
use super::process::Node;
use crate::descriptor::Descriptor;
use crate::identity::Identity;
use crate::transfers::{Options, PeerId};

/// A run with more events is caught in a loop.
const EVENTS_MAX: usize = 100_000;
/// Longer than anything takes once nothing goes wrong.
const CALM_US: u64 = 60_000_000;
/// By then, broken connections are noticed and stopped processes have resumed.
const NOTICED_US: u64 = 8_000_000;
/// Longer than a session is remembered.
const SESSIONS_KEPT: Duration = Duration::from_secs(130);

pub(super) struct World {
    pub(super) options: Options,
    pub(super) network: SharedNetwork,
    pub(super) clock: Arc<AtomicU64>,
    pub(super) nodes: Vec<Node>,
    pub(super) operations: Vec<Operation>,
    pub(super) plan: Vec<Planned>,
    /// Entries of the plan that have not happened yet.
    pub(super) still_planned: usize,
    /// Every descriptor that a process ever made.
    pub(super) descriptors: Vec<(usize, Descriptor)>,
    /// Peers that got another descriptor after they were added.
    pub(super) described_late: BTreeSet<(usize, PeerId)>,
    pub(super) fault: Fault,
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
            options,
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

    pub(super) fn below(&self, limit: u64) -> u64 {
        self.network.lock().dice.below(limit)
    }

    pub(super) fn one_in(&self, count: u64) -> bool {
        self.below(count) == 0
    }

    /// Starts a process, at an address that an earlier one may have had.
    pub(super) fn add_process(&mut self, at: usize) {
        let boot = self.nodes.len() as u64;
        let identity = Identity { engine: at as u128, boot };
        let address = SocketAddr::from(([10, 0, 0, at as u8], 1));
        let process = self.network.lock().add_host(identity, address);
        let node = Node::new(process, &self.network, &self.clock, self.options.clone());
        self.nodes.push(node);
        for _ in 0..=self.below(2) {
            self.register(process);
        }
        self.describe(process);
    }

    pub(super) fn run(&mut self) -> Result<(), String> {
        self.run_until(u64::MAX, |world| world.still_planned == 0)?;
        self.network.lock().calm_down();
        self.run_calm_until(|world| world.all_over())?;
        if self.fault == Fault::None || self.fault == Fault::LosesNews {
            self.all_is_well()?;
        }
        self.end()
    }

    pub(super) fn seen(&self) -> SeenCounts {
        std::mem::take(&mut self.network.lock().seen)
    }

    pub(super) fn now(&self) -> u64 {
        self.network.lock().now
    }

    pub(super) fn run_calm_until(&mut self, done: impl Fn(&World) -> bool) -> Result<(), String> {
        if done(self) {
            return Ok(());
        }
        let until = self.now() + CALM_US;
        self.run_until(until, done)
    }

    pub(super) fn run_until(&mut self, until: u64, done: impl Fn(&World) -> bool) -> Result<(), String> {
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

    pub(super) fn not_over(&self) -> Vec<&Operation> {
        let of_living = |of: &&Operation| of.over.is_none() && !self.nodes[of.process].is_dead;
        self.operations.iter().filter(of_living).collect()
    }

    pub(super) fn all_over(&self) -> bool {
        let is_idle = |node: &Node| node.is_dead || !node.is_releasing();
        self.not_over().is_empty() && self.nodes.iter().all(is_idle)
    }

    pub(super) fn step(&mut self, process: usize, next: Next) -> Result<(), String> {
        self.still_planned -= usize::from(matches!(next, Next::Planned(_)));
        if self.nodes[process].is_dead {
            // The asking side must learn at least that it gets no answer.
            if let Next::FenceAsked(index) = next {
                self.network.lock().fence_asked(index);
            }
            return Ok(());
        }
        let before = self.nodes[process].better_paths();
        match next {
            Next::Planned(index) => self.do_planned(process, self.plan[index]),
            Next::Carrier(code, number) => self.network.lock().due[process].push_back((code, number)),
            Next::Control(event) => self.network.lock().control_events[process].push_back(event),
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

    pub(super) fn settle(
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
        self.check_ends(process)?;
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

    /// At the address of a peer connected by address only, another process may listen by now.
    pub(super) fn note_who_answered(&mut self, process: usize) {
        let Node { hub, peers, .. } = &mut self.nodes[process];
        let network = self.network.lock();
        for (peer, to) in peers {
            let identity = hub.outside.peer(*peer).and_then(|known| known.whom.identity);
            *to = identity.and_then(|identity| network.process(identity)).unwrap_or(*to);
        }
    }

    /// Checks the counters: each transfer counts once, after its bytes are in place.
    pub(super) fn count(&mut self) -> Result<(), String> {
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

    /// Checks the transfers of a process that have ended. Their memory is in other use at once.
    pub(super) fn check_ends(&mut self, process: usize) -> Result<(), String> {
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
            operation.check_outcome(&network.memory, now, outcome, is_gone, self.fault)?;
            network.memory.end(operation.whose(), operation.pieces());
            operation.over = Some(outcome);
        }
        Ok(())
    }

    /// Checks that the world recovers: every living peer is reached over all its paths, and new transfers succeed.
    pub(super) fn all_is_well(&mut self) -> Result<(), String> {
        let noticed = self.now() + NOTICED_US;
        let living = self.living();
        living.iter().for_each(|process| self.network.lock().at(noticed, *process, Next::Tick));
        self.run_calm_until(|world| living.is_empty() || world.now() >= noticed)?;
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
        self.run_calm_until(|world| {
            world.living().into_iter().all(|process| world.nodes[process].is_all_up())
        })?;
        let known = self.run_calm_until(|world| world.each_knows_what_others_have().is_ok());
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
        self.run_calm_until(World::all_over)?;
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

    pub(super) fn living(&self) -> Vec<usize> {
        (0..self.nodes.len())
            .filter(|process| !self.nodes[*process].is_dead && !self.nodes[*process].hub.is_closed)
            .collect()
    }

    /// Each peer must know every region of a connected process. An old descriptor may have added one that is gone.
    pub(super) fn each_knows_what_others_have(&self) -> Result<(), String> {
        for process in self.living() {
            for (peer, to) in &self.nodes[process].peers {
                let Some(known) = self.nodes[process].hub.outside.peer(*peer) else { continue };
                let theirs = self.nodes[*to].hub.outside.process.regions.descriptors();
                let mut taken = known.descriptors();
                if self.described_late.contains(&(process, *peer)) {
                    taken.retain(|region| theirs.iter().any(|known| known.number == region.number));
                }
                if taken != theirs || !known.has_announced {
                    return Err(format!(
                        "process {process} takes {to} to have {taken:?}, and it has {theirs:?}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Removes all peers and gives back all memory, then checks that nothing is left.
    pub(super) fn end(&mut self) -> Result<(), String> {
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
        self.check_messages()
    }

    pub(super) fn check_messages(&self) -> Result<(), String> {
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
