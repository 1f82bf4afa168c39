//! Owners that keep the truth, a wire that delays, repeats and loses, and an index that listens.
//!
//! After each step the world compares the index with the owners' own history: where the index says that it follows an
//! owner, it must hold what that owner had after the change that it names.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvlane_block::{BlockHash, CutDigest, Namespace, Space};
use kvlane_index::{
    Changes, Delta, Heartbeat, Index, KeySet, Limits, OwnerStatus, Part, Question, State, Timing,
};
use proptest::prelude::*;

pub(crate) const HOSTS: usize = 3;
const SPACES: u8 = 2;
const HASHES: u8 = 12;

/// A space and a hash of the small world.
pub(crate) type Key = (u8, u8);

pub(crate) fn space(number: u8) -> Space {
    Space { namespace: Namespace([number; 16]), cut: CutDigest([7; 16]) }
}

pub(crate) fn hash(number: u8) -> BlockHash {
    BlockHash([number; 16])
}

fn keys() -> impl Iterator<Item = Key> {
    (0..SPACES).flat_map(|space| (0..HASHES).map(move |hash| (space, hash)))
}

#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// A key of a host comes, or goes.
    Toggle(usize, Key),
    /// The host sends its latest changes as a delta.
    Send(usize),
    /// The same; but the delta lacks one of them, by a defect.
    SendTooLittle(usize),
    Beat(usize),
    /// The host sends the next part of its snapshot.
    Part(usize, usize),
    /// Of the messages under way, this one arrives; the wire keeps it if told to repeat it.
    Arrive(usize, bool),
    Lose(usize),
    /// The index ticks, so many milliseconds later.
    Tick(u64),
    Restart(usize),
    Bye(usize),
    Sweep(usize),
}

pub(crate) fn steps(length: usize) -> impl Strategy<Value = Vec<Step>> {
    let host = 0..HOSTS;
    let key = (0..SPACES, 0..HASHES);
    let step = prop_oneof![
        12 => (host.clone(), key).prop_map(|(host, key)| Step::Toggle(host, key)),
        8 => host.clone().prop_map(Step::Send),
        1 => host.clone().prop_map(Step::SendTooLittle),
        4 => host.clone().prop_map(Step::Beat),
        8 => (host.clone(), 1..6usize).prop_map(|(host, keys)| Step::Part(host, keys)),
        24 => (any::<usize>(), prop::bool::weighted(0.15)).prop_map(|(at, again)| Step::Arrive(at, again)),
        2 => any::<usize>().prop_map(Step::Lose),
        8 => prop_oneof![0..50u64, 50..2000u64].prop_map(Step::Tick),
        1 => host.clone().prop_map(Step::Restart),
        1 => host.prop_map(Step::Bye),
        2 => (0..40usize).prop_map(Step::Sweep),
    ];
    prop::collection::vec(step, 1..length)
}

/// Steps of one host that is busy while it sends snapshots.
pub(crate) fn snapshot_steps(length: usize) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..2u8, 0..4u8).prop_map(|key| Step::Toggle(0, key)),
        4 => Just(Step::Send(0)),
        4 => (1..3usize).prop_map(|keys| Step::Part(0, keys)),
        8 => any::<usize>().prop_map(|at| Step::Arrive(at, false)),
        2 => (0..200u64).prop_map(Step::Tick),
    ];
    prop::collection::vec(step, 1..length)
}

/// A mechanism of the index that a control takes away, by a change to what arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Without {
    /// Messages of all epochs count as those of the current one.
    Epochs,
    /// A delta counts as the next one even if others before it are missing.
    Order,
    /// Heartbeats agree with the index.
    Digest,
    /// A snapshot names all that the index has, so nothing is swept.
    Sweep,
    /// Parts of a snapshot count as read when they arrive.
    LateParts,
}

#[derive(Clone, Debug)]
enum Message {
    Join,
    Delta(Delta),
    Beat(Heartbeat),
    Part(Part),
    Bye,
}

struct Sending {
    ticket: u64,
    base: u64,
    next: u32,
    /// Keys up to here are sent.
    read: Option<Key>,
}

struct Host {
    epoch: u64,
    has_left: bool,
    number: u64,
    keys: BTreeSet<Key>,
    /// Its keys after each change.
    history: Vec<BTreeSet<Key>>,
    changed: BTreeSet<Key>,
    sent: u64,
    sending: Option<Sending>,
    /// One of its deltas lacks a change, so only the digest can tell.
    is_defective: bool,
}

impl Host {
    fn new(epoch: u64) -> Self {
        Self {
            epoch,
            has_left: false,
            number: 0,
            keys: BTreeSet::new(),
            history: vec![BTreeSet::new()],
            changed: BTreeSet::new(),
            sent: 0,
            sending: None,
            is_defective: false,
        }
    }

    fn toggle(&mut self, key: Key) {
        if !self.keys.remove(&key) {
            self.keys.insert(key);
        }
        self.number += 1;
        self.history.push(self.keys.clone());
        self.changed.insert(key);
    }

    fn delta(&mut self) -> Option<Delta> {
        let first = self.sent + 1;
        self.sent = self.number;
        let changed = std::mem::take(&mut self.changed);
        let of_space = |number: u8| {
            let mine = changed.iter().filter(|(space, _)| *space == number);
            let (announced, withdrawn): (Vec<Key>, Vec<Key>) = mine.partition(|key| self.keys.contains(*key));
            let hashes = |keys: Vec<Key>| keys.into_iter().map(|(_, number)| hash(number)).collect();
            Changes { space: space(number), announced: hashes(announced), withdrawn: hashes(withdrawn) }
        };
        let delta = Delta { first, last: self.number, changes: (0..SPACES).map(of_space).collect() };
        (first <= self.number).then_some(delta)
    }

    fn heartbeat(&self) -> Heartbeat {
        let mut set = KeySet::default();
        self.keys.iter().for_each(|(number, key)| set.add(&space(*number), &hash(*key)));
        Heartbeat { number: self.number, keys: set }
    }

    /// The next keys of one space. The last part comes when no keys are left.
    fn part(&mut self, most: usize) -> Option<Part> {
        let sending = self.sending.as_mut()?;
        let left: Vec<Key> =
            self.keys.iter().filter(|key| sending.read.is_none_or(|read| **key > read)).copied().collect();
        let of = left.first().map_or(0, |(space, _)| *space);
        let taken: Vec<Key> = left.iter().filter(|(space, _)| *space == of).take(most).copied().collect();
        let part = Part {
            ticket: sending.ticket,
            number: sending.next,
            is_last: taken.len() == left.len(),
            base: sending.base,
            read_at: self.number,
            space: space(of),
            hashes: taken.iter().map(|(_, number)| hash(*number)).collect(),
        };
        sending.next += 1;
        sending.read = taken.last().copied().or(sending.read);
        if part.is_last {
            self.sending = None;
        }
        Some(part)
    }
}

pub(crate) struct World {
    pub(crate) index: Index,
    now: Duration,
    hosts: Vec<Host>,
    wire: Vec<(usize, u64, Message)>,
    without: Option<Without>,
    /// The greatest epoch of each host that the index took in, and whether that one has said goodbye.
    heard: BTreeMap<String, (u64, bool)>,
}

fn name(host: usize) -> String {
    format!("host-{host}")
}

impl World {
    pub(crate) fn new(without: Option<Without>) -> Self {
        let mut world = Self {
            index: Index::new([1, 2], Limits::default(), Timing::default()),
            now: Duration::from_secs(1000),
            hosts: (0..HOSTS).map(|_| Host::new(1)).collect(),
            wire: Vec::new(),
            without,
            heard: BTreeMap::new(),
        };
        (0..HOSTS).for_each(|host| world.send(host, Message::Join));
        world
    }

    /// Plays the steps, then lets everything arrive. The error says how index and truth differ.
    pub(crate) fn play(steps: &[Step], without: Option<Without>) -> Result<(), String> {
        let mut world = Self::new(without);
        for step in steps {
            world.step(step);
            world.compare()?;
        }
        world.settle()
    }

    fn send(&mut self, host: usize, message: Message) {
        self.wire.push((host, self.hosts[host].epoch, message));
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Toggle(host, key) => self.hosts[host].toggle(key),
            Step::Send(host) => self.send_delta(host, false),
            Step::SendTooLittle(host) => self.send_delta(host, true),
            Step::Beat(host) if !self.hosts[host].has_left => {
                let heartbeat = self.hosts[host].heartbeat();
                self.send(host, Message::Beat(heartbeat));
            }
            Step::Part(host, keys) => {
                if let Some(part) = self.hosts[host].part(keys) {
                    self.send(host, Message::Part(part));
                }
            }
            Step::Arrive(at, again) if !self.wire.is_empty() => {
                let at = at % self.wire.len();
                let arrived = self.wire[at].clone();
                if !again {
                    self.wire.remove(at);
                }
                self.arrive(arrived);
            }
            Step::Lose(at) if !self.wire.is_empty() => {
                self.wire.remove(at % self.wire.len());
            }
            Step::Tick(later) => self.tick(later),
            Step::Restart(host) => {
                self.hosts[host] = Host::new(self.hosts[host].epoch + 1);
                self.send(host, Message::Join);
            }
            Step::Bye(host) if !self.hosts[host].has_left => {
                self.hosts[host].has_left = true;
                self.send(host, Message::Bye);
            }
            Step::Sweep(budget) => {
                self.index.sweep(budget);
            }
            _ => {}
        }
    }

    fn send_delta(&mut self, host: usize, is_defective: bool) {
        let Some(mut delta) = self.hosts[host].delta() else { return };
        if is_defective {
            delta.changes.retain_mut(|changes| changes.announced.pop().or(changes.withdrawn.pop()).is_none());
            self.hosts[host].is_defective = true;
        }
        self.send(host, Message::Delta(delta));
    }

    fn tick(&mut self, later: u64) {
        self.now += Duration::from_millis(later);
        for request in self.index.tick(self.now) {
            let host: usize = request.owner.strip_prefix("host-").unwrap().parse().unwrap();
            let asked = &mut self.hosts[host];
            if asked.epoch == request.epoch && !asked.has_left {
                let (ticket, base) = (request.ticket, asked.number);
                asked.sending = Some(Sending { ticket, base, next: 0, read: None });
            }
        }
    }

    pub(crate) fn status(&self, host: usize) -> Option<OwnerStatus> {
        self.index.owners(self.now).into_iter().find(|owner| *owner.name == *name(host))
    }

    fn arrive(&mut self, (host, mut epoch, mut message): (usize, u64, Message)) {
        if let Some(status) = self.status(host) {
            match (self.without, &mut message) {
                (Some(Without::Epochs), Message::Delta(_) | Message::Part(_)) => epoch = status.epoch,
                (Some(Without::Order), Message::Delta(delta)) => {
                    delta.first = delta.first.min(status.applied + 1);
                }
                (Some(Without::Digest), Message::Beat(heartbeat)) => heartbeat.keys = status.keys,
                (Some(Without::Sweep), Message::Part(part)) => {
                    let held = self.held(host);
                    let same_space = held.iter().filter(|(number, _)| space(*number) == part.space);
                    part.hashes.extend(same_space.map(|(_, number)| hash(*number)));
                }
                (Some(Without::LateParts), Message::Part(part)) => {
                    part.read_at = part.read_at.max(status.applied);
                }
                _ => {}
            }
        }
        let (name, now, index) = (name(host), self.now, &mut self.index);
        let is_taken = match message {
            Message::Join => index.join(&name, epoch, "10.0.0.1:7000", now).is_ok(),
            Message::Delta(delta) => index.delta(&name, epoch, delta, now).is_ok(),
            Message::Beat(heartbeat) => index.heartbeat(&name, epoch, heartbeat, now).is_ok(),
            Message::Part(part) => index.part(&name, epoch, &part, now).is_ok(),
            Message::Bye => {
                if index.bye(&name, epoch, now).is_ok() {
                    self.heard.insert(name, (epoch, true));
                }
                return;
            }
        };
        if is_taken {
            let (latest, _) = self.heard.entry(name).or_insert((epoch, false));
            if epoch > *latest {
                self.heard.insert(self::name(host), (epoch, false));
            }
        }
    }

    /// The keys that questions of one key find at a host.
    fn held(&self, host: usize) -> BTreeSet<Key> {
        let finds = |(number, key): &Key| {
            let (space, hashes) = (space(*number), [hash(*key)]);
            let question =
                Question { space: &space, hashes: &hashes, only_prefix: false, except: None, turn: 0 };
            let answer = self.index.find(&question, self.now).unwrap();
            answer.iter().any(|runs| *runs.owner == *name(host))
        };
        keys().filter(finds).collect()
    }

    fn compare(&self) -> Result<(), String> {
        let all: Vec<OwnerStatus> = self.index.owners(self.now);
        let shown: usize = all.iter().map(|owner| owner.keys.count as usize).sum();
        if shown + self.index.unswept() > self.index.entries() {
            return Err(format!("{shown} keys are more than {} entries", self.index.entries()));
        }
        for owner in all {
            let number: usize = owner.name.strip_prefix("host-").unwrap().parse().unwrap();
            let host = &self.hosts[number];
            let held = self.held(number);
            let (latest, is_gone) = self.heard[&*owner.name];
            if owner.epoch < latest || is_gone && owner.epoch == latest && owner.state != State::Gone {
                return Err(format!("{owner:?} is over, the index has heard of epoch {latest}"));
            }
            if !owner.is_visible && !held.is_empty() {
                return Err(format!("{owner:?} is hidden and has {held:?}"));
            }
            let is_exact = owner.state == State::Following && owner.is_visible && owner.epoch == host.epoch;
            if is_exact && !host.is_defective && self.without != Some(Without::Digest) {
                let truth = host.history.get(owner.applied as usize);
                if truth != Some(&held) {
                    return Err(format!("{owner:?} has {truth:?}, the index {held:?}"));
                }
            }
        }
        Ok(())
    }

    /// Everything arrives from now on, in order. In the end the index has what the living owners have.
    fn settle(&mut self) -> Result<(), String> {
        for _ in 0..200 {
            for host in 0..HOSTS {
                if self.hosts[host].has_left {
                    continue;
                }
                if self.status(host).is_none_or(|status| status.epoch != self.hosts[host].epoch) {
                    self.send(host, Message::Join);
                }
                self.send_delta(host, false);
                let heartbeat = self.hosts[host].heartbeat();
                self.send(host, Message::Beat(heartbeat));
            }
            for _ in 0..2 {
                std::mem::take(&mut self.wire).into_iter().for_each(|message| self.arrive(message));
                self.compare()?;
                self.tick(400);
                for host in 0..HOSTS {
                    while let Some(part) = self.hosts[host].part(5) {
                        self.send(host, Message::Part(part));
                    }
                }
            }
        }
        for host in (0..HOSTS).filter(|host| !self.hosts[*host].has_left) {
            let (truth, held) = (&self.hosts[host].keys, self.held(host));
            if *truth != held {
                return Err(format!("after quiet {} has {truth:?}, the index {held:?}", name(host)));
            }
        }
        let left = self.index.sweep(usize::MAX);
        let living = self.hosts.iter().filter(|host| !host.has_left);
        let keys: usize = living.map(|host| host.keys.len()).sum();
        let gone: usize = self.index.owners(self.now).iter().map(|owner| owner.keys.count as usize).sum();
        if left != 0 || self.index.entries() != gone || gone < keys {
            return Err(format!("{} entries for {keys} keys, {left} left", self.index.entries()));
        }
        Ok(())
    }
}
