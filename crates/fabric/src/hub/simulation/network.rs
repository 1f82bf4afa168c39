//! The state that all processes of a simulation share: time, chance, memory, and everything between the processes.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::dice::Dice;
use super::fast::neighbours::Neighbours;
use super::faults::Fault;
use super::memory::WorldMemory;
use super::slow::links::SlowLinks;
use super::wires::wire::Wires;
use crate::control::ControlEvent;
use crate::identity::Identity;
use crate::transfers::{PathId, PeerId};

pub(super) type SharedNetwork = Arc<Mutex<Network>>;

/// An event of one process.
#[derive(Debug)]
pub(super) enum Next {
    /// The application carries out this entry of the plan.
    Planned(usize),
    /// An event with this number for the carrier with this code.
    Carrier(u8, u64),
    /// The control connections report this.
    Control(ControlEvent),
    /// A peer's control connection arrives.
    Dialled(u64),
    /// The process that made a control connection learns that it is up.
    Welcomed(u64),
    /// A frame arrives over this control connection, at this end.
    Frame(u64, usize),
    /// This end of a control connection has ended.
    Ended(u64, usize),
    /// A peer asks for a fence, over a connection made for it.
    FenceAsked(usize),
    /// Something is due.
    Tick,
}

/// A process as the others see it.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) identity: Identity,
    pub(super) address: SocketAddr,
    /// Accepts connections.
    pub(super) listens: bool,
    /// Handles no event before this time.
    pub(super) stopped_until: u64,
    /// A neighbour that probes it finds that it no longer reads anything.
    pub(super) is_gone: bool,
    /// The process's card: its registered regions, number to generation.
    pub(super) card: BTreeMap<u32, u32>,
}

pub(super) struct Network {
    pub(super) dice: Dice,
    pub(super) now: u64,
    clock: Arc<AtomicU64>,
    /// Nothing goes wrong from now on.
    pub(super) is_calm: bool,
    /// One in so many copies and bytes takes long.
    pub(super) long_once_in: u64,
    pub(super) fault: Fault,
    pub(super) memory: WorldMemory,
    pub(super) hosts: Vec<Host>,
    pub(super) wires: Wires,
    pub(super) slow: SlowLinks,
    pub(super) fast: Neighbours,
    /// Until when two processes cannot reach each other. The lower number comes first.
    parted: BTreeMap<(usize, usize), u64>,
    /// Events of each process's control connections, not taken yet.
    pub(super) control_events: Vec<VecDeque<ControlEvent>>,
    /// Due events of each process's carriers: (code, number).
    pub(super) due: Vec<VecDeque<(u8, u64)>>,
    /// Paths of the better carrier that are up as that carrier knows, by process and peer.
    pub(super) better: BTreeMap<(usize, PeerId), (PathId, u32)>,
    /// Posts between host memory that went to the worse carrier.
    pub(super) lower: Vec<(usize, PeerId)>,
    pub(super) seen: SeenCounts,
    /// The first violation.
    pub(super) wrong: Option<String>,
    agenda: BTreeMap<(u64, u64), (usize, Next)>,
    made: u64,
}

/// Counts of events that are hard to handle. Every one must have occurred.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct SeenCounts {
    pub(super) cuts: u64,
    pub(super) fast_posts: u64,
    pub(super) slow_posts: u64,
    /// Paths of the better carrier that vanished.
    pub(super) vanished: u64,
    pub(super) fences: u64,
    /// Fences asked for over a connection of their own.
    pub(super) insisted: u64,
    pub(super) fences_denied: u64,
    /// Bytes that landed after the other side had closed their connection.
    pub(super) late_landings: u64,
    pub(super) waited_for_keys: u64,
    pub(super) ended_by_release: u64,
    pub(super) waited_to_unregister: u64,
}

impl SeenCounts {
    pub(super) fn add(&mut self, other: &SeenCounts) {
        self.all().into_iter().zip(other.counts()).for_each(|(count, more)| *count += more);
    }

    pub(super) fn counts(&self) -> impl Iterator<Item = u64> + use<> {
        let mut copy = *self;
        copy.all().map(|count| *count).into_iter()
    }

    fn all(&mut self) -> [&mut u64; 11] {
        let SeenCounts { cuts, fast_posts, slow_posts, vanished, fences, insisted, .. } = self;
        let SeenCounts {
            fences_denied,
            late_landings,
            waited_for_keys,
            ended_by_release,
            waited_to_unregister,
            ..
        } = self;
        [
            cuts,
            fast_posts,
            slow_posts,
            vanished,
            fences,
            insisted,
            fences_denied,
            late_landings,
            waited_for_keys,
            ended_by_release,
            waited_to_unregister,
        ]
    }
}

impl std::fmt::Debug for Network {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Network").field("now", &self.now).finish_non_exhaustive()
    }
}

impl Network {
    pub(super) fn new(seed: u64, fault: Fault, clock: Arc<AtomicU64>) -> Network {
        let mut dice = Dice(seed);
        let long_once_in = [12, 12, 2][dice.below(3) as usize];
        Network {
            dice,
            now: 0,
            clock,
            is_calm: false,
            long_once_in,
            fault,
            memory: WorldMemory::default(),
            hosts: Vec::new(),
            wires: Wires::default(),
            slow: SlowLinks::default(),
            fast: Neighbours::default(),
            parted: BTreeMap::new(),
            control_events: Vec::new(),
            due: Vec::new(),
            better: BTreeMap::new(),
            lower: Vec::new(),
            seen: SeenCounts::default(),
            wrong: None,
            agenda: BTreeMap::new(),
            made: 0,
        }
    }

    pub(super) fn add_host(&mut self, identity: Identity, address: SocketAddr) -> usize {
        let (stopped_until, is_gone, card) = (0, false, BTreeMap::new());
        self.hosts.push(Host { identity, address, listens: true, stopped_until, is_gone, card });
        self.control_events.push(VecDeque::new());
        self.due.push(VecDeque::new());
        self.memory.add_process();
        self.hosts.len() - 1
    }

    /// The process that listens at this address.
    pub(super) fn listener_at(&self, address: SocketAddr) -> Option<usize> {
        self.hosts.iter().position(|host| host.listens && host.address == address)
    }

    pub(super) fn process(&self, identity: Identity) -> Option<usize> {
        self.hosts.iter().position(|host| host.identity == identity)
    }

    pub(super) fn at(&mut self, at: u64, process: usize, next: Next) {
        self.made += 1;
        self.agenda.insert((at, self.made), (process, next));
    }

    pub(super) fn after(&mut self, micros: u64, process: usize, next: Next) {
        self.at(self.now + micros, process, next);
    }

    /// Schedules an event after [`Network::delay`].
    pub(super) fn soon(&mut self, process: usize, next: Next) {
        let delay = self.delay();
        self.after(delay, process, next);
    }

    pub(super) fn delay(&mut self) -> u64 {
        let within = match self.dice.below(40) {
            _ if self.is_calm => 300,
            0 => 400_000,
            1..=4 => 20_000,
            _ => 300,
        };
        10 + self.dice.below(within)
    }

    /// Time to copy or place bytes. The thread may be stopped in the middle of it.
    pub(super) fn long_delay(&mut self) -> u64 {
        if self.goes_wrong(self.long_once_in) { self.dice.below(4_000_000) } else { self.delay() }
    }

    /// Time until an end notices that its connection is broken: at most the longest silence that a connection survives.
    pub(super) fn notice(&mut self) -> u64 {
        let within = if self.dice.one_in(3) { 1_900_000 } else { 3000 };
        self.dice.below(within)
    }

    /// True once in so many calls, until nothing goes wrong any more.
    pub(super) fn goes_wrong(&mut self, once_in: u64) -> bool {
        !self.is_calm && self.dice.one_in(once_in)
    }

    /// The next event and its process. A stopped process handles its events when it resumes, in the same order.
    pub(super) fn next(&mut self) -> Option<(usize, Next)> {
        loop {
            let ((at, made), (process, next)) = self.agenda.pop_first()?;
            let until = self.hosts[process].stopped_until;
            if at < until {
                self.agenda.insert((until, made), (process, next));
                continue;
            }
            self.now = at;
            self.clock.store(at, Ordering::Relaxed);
            return Some((process, next));
        }
    }

    pub(super) fn report_wrong(&mut self, what: impl Into<String>) {
        self.wrong.get_or_insert(what.into());
    }

    pub(super) fn part(&mut self, one: usize, other: usize, micros: u64) {
        self.parted.insert((one.min(other), one.max(other)), self.now + micros);
    }

    /// Nothing goes wrong from now on.
    pub(super) fn calm_down(&mut self) {
        self.is_calm = true;
        self.parted.clear();
    }

    pub(super) fn is_parted(&self, one: usize, other: usize) -> bool {
        let until = self.parted.get(&(one.min(other), one.max(other)));
        until.is_some_and(|until| self.now < *until)
    }

    /// Notes a violation, if the outcome is one.
    pub(super) fn checked<T>(&mut self, outcome: Result<T, String>) -> Option<T> {
        outcome.map_err(|wrong| self.report_wrong(wrong)).ok()
    }
}
