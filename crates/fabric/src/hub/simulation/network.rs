//! What all processes of a simulation share: time, chance, and what lies between them.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::dice::Dice;
use super::fast::neighbours::Neighbours;
use super::faults::Fault;
use super::memory::Memory;
use super::slow::links::Links;
use super::wires::wire::Wires;
use crate::control::ControlEvent;
use crate::identity::Identity;
use crate::transfers::{PathId, PeerId};

pub(super) type Shared = Arc<Mutex<Network>>;

/// What is going to happen, to one process each.
#[derive(Debug)]
pub(super) enum Next {
    /// Its application does what is planned.
    Asked(usize),
    /// Something of its carrier with this code.
    Carrier(u8, u64),
    /// Its control connections tell this.
    Told(ControlEvent),
    /// A control connection to it comes.
    Dialled(u64),
    /// The process that made a control connection hears that it is there.
    Welcomed(u64),
    /// A frame comes over this control connection, to this end of it.
    Frame(u64, usize),
    /// This end of a control connection is over.
    Ended(u64, usize),
    /// It is asked for a fence over a connection of its own.
    FenceAsked(usize),
    /// Something is due.
    Tick,
}

/// A process.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) identity: Identity,
    pub(super) address: SocketAddr,
    /// It listens.
    pub(super) listens: bool,
    /// It is stopped until then.
    pub(super) stopped_until: u64,
    /// Whoever looks sees that nothing of its is read here any more.
    pub(super) is_gone: bool,
    /// Regions that neighbours may rely on, with their generation.
    pub(super) card: BTreeMap<u32, u32>,
}

pub(super) struct Network {
    pub(super) dice: Dice,
    pub(super) now: u64,
    clock: Arc<AtomicU64>,
    /// Nothing goes wrong any more.
    pub(super) is_calm: bool,
    /// Copies and bytes take long once in so many times.
    pub(super) long_once_in: u64,
    pub(super) fault: Fault,
    pub(super) memory: Memory,
    pub(super) hosts: Vec<Host>,
    pub(super) wires: Wires,
    pub(super) slow: Links,
    pub(super) fast: Neighbours,
    /// Until when nothing new gets from one process to another, or back. The first of two has the lower number.
    parted: BTreeMap<(usize, usize), u64>,
    /// What each process's control connections tell.
    pub(super) told: Vec<VecDeque<ControlEvent>>,
    /// What is due at each process's carriers, by their codes.
    pub(super) due: Vec<VecDeque<(u8, u64)>>,
    /// Paths of the better class that carry something as their carrier knows, by process and peer.
    pub(super) better: BTreeMap<(usize, PeerId), (PathId, u32)>,
    /// Posts between hosts' memory over the other class.
    pub(super) lower: Vec<(usize, PeerId)>,
    pub(super) seen: Seen,
    /// The first thing that was not as it should be.
    pub(super) wrong: Option<String>,
    agenda: BTreeMap<(u64, u64), (usize, Next)>,
    made: u64,
}

/// How often something happened that is hard to get right.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Seen {
    pub(super) cuts: u64,
    pub(super) fast_posts: u64,
    pub(super) slow_posts: u64,
    /// Of the better carrier.
    pub(super) vanished: u64,
    pub(super) fences: u64,
    /// Over a connection of their own.
    pub(super) insisted: u64,
    pub(super) fences_denied: u64,
    /// Of connections that the other side had closed.
    pub(super) late_landings: u64,
    pub(super) waited_for_keys: u64,
    pub(super) let_go: u64,
    pub(super) waited_to_unregister: u64,
}

impl Seen {
    pub(super) fn add(&mut self, other: &Seen) {
        self.all().into_iter().zip(other.counts()).for_each(|(count, more)| *count += more);
    }

    pub(super) fn counts(&self) -> impl Iterator<Item = u64> + use<> {
        let mut copy = *self;
        copy.all().map(|count| *count).into_iter()
    }

    fn all(&mut self) -> [&mut u64; 11] {
        let Seen { cuts, fast_posts, slow_posts, vanished, fences, insisted, .. } = self;
        let Seen { fences_denied, late_landings, waited_for_keys, let_go, waited_to_unregister, .. } = self;
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
            let_go,
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
            memory: Memory::default(),
            hosts: Vec::new(),
            wires: Wires::default(),
            slow: Links::default(),
            fast: Neighbours::default(),
            parted: BTreeMap::new(),
            told: Vec::new(),
            due: Vec::new(),
            better: BTreeMap::new(),
            lower: Vec::new(),
            seen: Seen::default(),
            wrong: None,
            agenda: BTreeMap::new(),
            made: 0,
        }
    }

    pub(super) fn add_host(&mut self, identity: Identity, address: SocketAddr) -> usize {
        let (stopped_until, is_gone, card) = (0, false, BTreeMap::new());
        self.hosts.push(Host { identity, address, listens: true, stopped_until, is_gone, card });
        self.told.push(VecDeque::new());
        self.due.push(VecDeque::new());
        self.memory.add_process();
        self.hosts.len() - 1
    }

    /// Who listens there.
    pub(super) fn who_listens(&self, address: SocketAddr) -> Option<usize> {
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

    /// In a while that is mostly short.
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

    /// How long it takes to copy or place some bytes: whoever does may be stopped in the middle of it.
    pub(super) fn long_delay(&mut self) -> u64 {
        if self.goes_wrong(self.long_once_in) { self.dice.below(4_000_000) } else { self.delay() }
    }

    /// How long it takes until somebody notices that a connection is broken: at most as long as silence is borne.
    pub(super) fn notice(&mut self) -> u64 {
        let within = if self.dice.one_in(3) { 1_900_000 } else { 3000 };
        self.dice.below(within)
    }

    /// Whether this goes wrong, which it does once in so many times.
    pub(super) fn goes_wrong(&mut self, once_in: u64) -> bool {
        !self.is_calm && self.dice.one_in(once_in)
    }

    /// What happens next, and to whom. A stopped process hears of it when it goes on, in the same order.
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

    pub(super) fn is_wrong(&mut self, what: impl Into<String>) {
        self.wrong.get_or_insert(what.into());
    }

    pub(super) fn part(&mut self, one: usize, other: usize, micros: u64) {
        self.parted.insert((one.min(other), one.max(other)), self.now + micros);
    }

    /// Nothing goes wrong any more.
    pub(super) fn calm_down(&mut self) {
        self.is_calm = true;
        self.parted.clear();
    }

    pub(super) fn is_parted(&self, one: usize, other: usize) -> bool {
        let until = self.parted.get(&(one.min(other), one.max(other)));
        until.is_some_and(|until| self.now < *until)
    }

    /// Takes note of what is wrong, if anything is.
    pub(super) fn checked<T>(&mut self, outcome: Result<T, String>) -> Option<T> {
        outcome.map_err(|wrong| self.is_wrong(wrong)).ok()
    }
}
