//! A simulated carrier like sockets, of the worse class: reaches all memory. Its connections are its own, and survive the end
//! of a control connection. Bytes of a broken connection still land, until a fence or the lease ends that.

pub(super) mod links;

use std::collections::BTreeMap;
use std::time::Duration;

use self::links::{Move, Part, SlowEvent, SlowLink};
use super::faults::Fault;
use super::memory::overlaps;
use super::network::{Network, Next, SharedNetwork};
use crate::carrier::{BadWords, Carrier, CarrierPost, Context, Owner, SessionId, Touched};
use crate::fences::LEASE;
use crate::identity::Identity;
use crate::provider::NotNow;
use crate::regions::Wanted;
use crate::transfers::{Completion, Memory, Op, PathId, PathSpec, PeerId, Reach, Token};

pub(super) const SLOW: u8 = 202;
const CLASS: u8 = 1;
/// Bytes may be placed for so long after the connecting side has closed the connection.
const PLACES_US: u64 = 2_500_000;

/// The carrier of one process.
#[derive(Debug)]
pub(super) struct Slow {
    me: usize,
    network: SharedNetwork,
    /// Peers that accepted the offer, and whether their paths were added.
    peers: BTreeMap<PeerId, bool>,
    paths: BTreeMap<PathId, u64>,
    is_closed: bool,
}

impl Network {
    fn slow_later(&mut self, at: u64, process: usize, what: SlowEvent) {
        self.slow.made += 1;
        let number = self.slow.made;
        self.slow.events.insert(number, what);
        self.at(at, process, Next::Carrier(SLOW, number));
    }

    fn slow_soon(&mut self, process: usize, what: SlowEvent) -> u64 {
        let at = self.now + self.delay();
        self.slow_later(at, process, what);
        at
    }

    /// Breaks a connection between its ends.
    fn break_link(&mut self, id: u64) {
        let Some(link) = self.slow.links.get_mut(&id).filter(|link| !link.is_broken) else { return };
        link.is_broken = true;
        let (from, to) = (link.from, link.to);
        let notice = self.notice();
        self.slow_later(self.now + notice, from, SlowEvent::Broke(id));
        // An end that sends nothing may not notice for long.
        let notice = if self.dice.one_in(2) { self.dice.below(7_000_000) } else { self.notice() };
        self.slow_later(self.now + notice, to, SlowEvent::Left(id));
    }

    /// Breaks all connections between two processes.
    pub(super) fn part_links(&mut self, one: usize, other: usize) {
        let is_between = |link: &SlowLink| [(one, other), (other, one)].contains(&(link.from, link.to));
        let links: Vec<u64> =
            self.slow.links.iter().filter(|(_, link)| is_between(link)).map(|(id, _)| *id).collect();
        links.into_iter().for_each(|id| self.break_link(id));
    }

    /// Breaks all connections of a process, or a random one.
    pub(super) fn break_links(&mut self, process: Option<usize>) {
        let is_one = |link: &SlowLink| process.is_none_or(|process| [link.from, link.to].contains(&process));
        let links: Vec<u64> =
            self.slow.links.iter().filter(|(_, link)| is_one(link)).map(|(id, _)| *id).collect();
        match process {
            Some(_) => links.into_iter().for_each(|id| self.break_link(id)),
            None if links.is_empty() => {}
            None => {
                let link = links[self.dice.below(links.len() as u64) as usize];
                self.break_link(link);
            }
        }
    }
}

impl Slow {
    pub(super) fn new(me: usize, network: SharedNetwork) -> Slow {
        Slow { me, network, peers: BTreeMap::new(), paths: BTreeMap::new(), is_closed: false }
    }

    fn take(&mut self, cx: &mut Context<'_>, what: SlowEvent) {
        match what {
            SlowEvent::Dialled(link) => self.dialled(cx, link),
            SlowEvent::Broke(link) => self.end(cx, link, "it broke"),
            SlowEvent::Left(link) => self.leave(cx, link),
            SlowEvent::Sent(of) => self.send(of),
            SlowEvent::Requested(of) => self.serve(cx, of),
            SlowEvent::Served(of, part) => self.serve_part(cx, of, part),
            SlowEvent::Landed(of, part) => self.land(of, part),
            SlowEvent::Answered(of, completion) => self.answered(cx, of, completion),
            SlowEvent::Ready(path) => cx.ready(path),
            SlowEvent::Considered(session) => cx.accept(session, Vec::new()),
        }
    }

    fn dialled(&mut self, cx: &mut Context<'_>, id: u64) {
        let network = &mut *self.network.lock();
        let is_refused = network.goes_wrong(6);
        let Some(link) = network.slow.links.get(&id).filter(|link| link.ours) else { return };
        let (from, to, path, number) = (link.from, link.to, link.path, link.number);
        if is_refused || !network.hosts[to].listens || network.is_parted(from, to) {
            network.slow.links.remove(&id);
            self.paths.remove(&path);
            return cx.broke(path, number, "refused");
        }
        if let Some(link) = network.slow.links.get_mut(&id) {
            (link.is_up, link.theirs) = (true, true);
        }
        cx.up(path, number);
        if network.goes_wrong(2) {
            let at = network.now + network.dice.below(1_000_000);
            let from = self.me;
            network.slow_later(at, from, SlowEvent::Broke(id));
        }
    }

    /// Ends a connection that this process made: nothing of its memory is read or written any more.
    fn end(&mut self, cx: &mut Context<'_>, id: u64, why: &str) {
        let network = &mut *self.network.lock();
        let lateness = match network.fault {
            Fault::LeaseNotKept => PLACES_US + 3_000_000,
            _ => network.dice.below(PLACES_US),
        };
        let until = network.now + lateness;
        let Some(link) = network.slow.links.get_mut(&id).filter(|link| link.ours) else { return };
        (link.ours, link.places_until) = (false, until);
        let SlowLink { path, number, peer, is_up, .. } = *link;
        self.paths.remove(&path);
        if !is_up {
            network.slow.links.remove(&id);
            return cx.broke(path, number, why);
        }
        network.break_link(id);
        let mut writes = Vec::new();
        let mut reads = Vec::new();
        for of in network.slow.moves.values().filter(|of| of.link == id) {
            if of.op == Op::Write { writes.push(of.token) } else { reads.push(of.token) }
        }
        if network.fault == Fault::LosesPosts {
            return cx.broke(path, number, why);
        }
        let news_first = network.dice.one_in(2);
        if news_first {
            cx.broke(path, number, why);
        }
        reads.into_iter().for_each(|token| cx.completed(token, Completion::Unknown));
        if !news_first {
            cx.broke(path, number, why);
        }
        if !writes.is_empty() {
            network.seen.fences += 1;
            cx.fence(peer, id, writes, Some(LEASE));
        }
    }

    /// Stops placing bytes of a peer's connection.
    fn leave(&mut self, cx: &mut Context<'_>, id: u64) {
        let network = &mut *self.network.lock();
        if let Some(link) = network.slow.links.get_mut(&id) {
            link.theirs = false;
            cx.note_released();
            network.break_link(id);
        }
    }

    fn send(&mut self, id: u64) {
        let network = &mut *self.network.lock();
        let Some(of) = network.slow.moves.get_mut(&id) else { return };
        if !network.slow.links[&of.link].ours {
            return;
        }
        for part in &mut of.parts {
            match network.memory.read_own(of.whose, part.here, part.len) {
                Ok(bytes) => part.bytes = bytes,
                Err(wrong) => return network.report_wrong(wrong),
            }
        }
    }

    /// Takes a peer's request.
    fn serve(&mut self, cx: &mut Context<'_>, id: u64) {
        let network = &mut *self.network.lock();
        let Some(of) = network.slow.moves.get_mut(&id) else { return };
        let (link, is_write) = (&network.slow.links[&of.link], of.op == Op::Write);
        let is_sent = !is_write || of.parts.iter().all(|part| !part.bytes.is_empty());
        if !link.theirs || !is_sent || self.is_closed || network.now > link.places_until {
            return;
        }
        let any_generation = network.fault == Fault::ServesAnyGeneration;
        let regions = &cx.process.regions;
        let mut is_refused = false;
        for part in &mut of.parts {
            let current = regions.seen(part.region).map_or(0, |seen| seen.generation);
            let generation = if any_generation { current } else { part.generation };
            let (offset, len) = (part.offset as u64, part.len as u64);
            let wanted = Wanted { region: part.region, generation, offset, len, is_write };
            let mut spots = Vec::new();
            // Regions are open to all peers; windows are not simulated.
            let is_served = regions.for_peer(Identity::ANYBODY, wanted, &mut spots);
            match is_served.and_then(|()| spots.first()) {
                Some(spot) => (part.there, part.generation) = (spot.piece.address, generation),
                None => is_refused = true,
            }
        }
        let (parts, from) = (of.parts.len(), of.whose.0);
        if is_refused {
            network.slow_soon(from, SlowEvent::Answered(id, Completion::Refused));
            return;
        }
        of.is_served = true;
        for part in 0..parts {
            let delay = network.long_delay();
            network.slow_later(network.now + delay, self.me, SlowEvent::Served(id, part));
        }
        if network.goes_wrong(40) {
            let link = network.slow.moves[&id].link;
            network.break_link(link);
        }
    }

    fn serve_part(&mut self, cx: &mut Context<'_>, id: u64, index: usize) {
        let network = &mut *self.network.lock();
        let Some(of) = network.slow.moves.get_mut(&id) else { return };
        let link = &network.slow.links[&of.link];
        if !link.theirs || network.now > link.places_until || self.is_closed {
            return;
        }
        network.seen.late_landings += u64::from(!link.ours);
        let part = &mut of.parts[index];
        let what = (part.region, part.generation);
        let (me, from) = (self.me, of.whose.0);
        let outcome = match of.op {
            Op::Write => {
                part.is_over = true;
                network.memory.write_region(me, part.there, &part.bytes, what, of.whose)
            }
            Op::Read => {
                let read = network.memory.read_region(me, part.there, part.len, what);
                read.map(|bytes| part.bytes = bytes)
            }
        };
        cx.note_released();
        if of.op == Op::Read {
            part.is_over = true;
            network.checked(outcome);
            network.slow_soon(from, SlowEvent::Landed(id, index));
            return;
        }
        of.left -= 1;
        let is_early = network.fault == Fault::CompletesEarly && of.left == 1;
        let is_over = of.left == 0 || is_early;
        network.checked(outcome);
        if is_over {
            network.slow_soon(from, SlowEvent::Answered(id, Completion::Placed));
        }
    }

    fn land(&mut self, id: u64, index: usize) {
        let network = &mut *self.network.lock();
        let Some(of) = network.slow.moves.get_mut(&id) else { return };
        let link = &network.slow.links[&of.link];
        if !link.ours || link.is_broken {
            return;
        }
        let part = &of.parts[index];
        let outcome = network.memory.write_own(of.whose, part.here, &part.bytes);
        of.left -= 1;
        let is_over = of.left == 0;
        network.checked(outcome);
        if is_over {
            network.slow_soon(self.me, SlowEvent::Answered(id, Completion::Placed));
        }
    }

    fn answered(&mut self, cx: &mut Context<'_>, id: u64, completion: Completion) {
        let network = &mut *self.network.lock();
        let Some(of) = network.slow.moves.get(&id) else { return };
        let link = &network.slow.links[&of.link];
        if !link.ours || link.is_broken {
            return;
        }
        let token = of.token;
        network.slow.moves.remove(&id);
        cx.completed(token, completion);
    }

    fn add_paths(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        if let Some(has_paths) = self.peers.get_mut(&peer)
            && !std::mem::replace(has_paths, true)
        {
            let spec = PathSpec::new(Reach::ALL_MEMORY, CLASS);
            let paths = 1 + self.network.lock().dice.below(2);
            (0..paths).for_each(|name| cx.add_path(peer, spec, name));
        }
    }
}

impl Carrier for Slow {
    fn code(&self) -> u8 {
        SLOW
    }

    fn control_up(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        cx.offer(peer, Vec::new());
    }

    fn consider(&mut self, cx: &mut Context<'_>, session: SessionId, _: &[u8]) -> Result<(), BadWords> {
        let network = &mut *self.network.lock();
        if network.dice.one_in(3) {
            network.slow_soon(self.me, SlowEvent::Considered(session));
        } else {
            cx.accept(session, Vec::new());
        }
        Ok(())
    }

    fn accepted(&mut self, cx: &mut Context<'_>, peer: PeerId, _: &[u8]) -> Result<(), BadWords> {
        self.peers.entry(peer).or_insert(false);
        self.add_paths(cx, peer);
        Ok(())
    }

    fn peer_removed(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        self.peers.remove(&peer);
        let network = &mut *self.network.lock();
        // Paths that were still connecting.
        let of_peer = |link: &SlowLink| link.from == self.me && link.peer == peer && link.ours && !link.is_up;
        let links: Vec<u64> =
            network.slow.links.iter().filter(|(_, link)| of_peer(link)).map(|(id, _)| *id).collect();
        for id in links {
            let Some(SlowLink { path, number, .. }) = network.slow.links.remove(&id) else { continue };
            self.paths.remove(&path);
            cx.broke(path, number, "the peer is gone");
        }
    }

    fn connect(&mut self, cx: &mut Context<'_>, path: PathId, number: u32, peer: PeerId, _: u64) {
        let network = &mut *self.network.lock();
        let identity = cx.peers.get(&peer).and_then(|known| known.whom.identity);
        let Some(to) = identity.and_then(|identity| network.process(identity)) else {
            return cx.broke(path, number, "the peer is gone");
        };
        if self.paths.contains_key(&path) {
            network.report_wrong("a path is connected again before its former connection is over");
        }
        // Random, as the real carrier draws it.
        let id = network.dice.roll();
        let (is_up, ours, theirs, is_broken) = (false, true, false, false);
        let (in_hand_until, places_until) = (0, u64::MAX);
        let link = SlowLink {
            from: self.me,
            to,
            peer,
            path,
            number,
            is_up,
            ours,
            theirs,
            in_hand_until,
            is_broken,
            places_until,
        };
        network.slow.links.insert(id, link);
        self.paths.insert(path, id);
        network.slow_soon(self.me, SlowEvent::Dialled(id));
    }

    fn close(&mut self, cx: &mut Context<'_>, path: PathId, connection: u32) {
        let Some(id) = self.paths.get(&path).copied() else { return };
        let is_it = self.network.lock().slow.links.get(&id).is_some_and(|link| link.number == connection);
        if is_it {
            self.end(cx, id, "it is not wanted");
        }
    }

    fn post(&mut self, _: &mut Context<'_>, post: &CarrierPost<'_>) -> Result<(), NotNow> {
        let link = *self.paths.get(&post.path).ok_or(NotNow)?;
        let network = &mut *self.network.lock();
        if !network.slow.links.get(&link).is_some_and(|link| link.is_up) {
            return Err(NotNow);
        }
        if network.goes_wrong(12) {
            network.slow_soon(self.me, SlowEvent::Ready(post.path));
            return Err(NotNow);
        }
        network.seen.slow_posts += 1;
        let on_gpus = post.runs.iter().any(|run| run.local.gpu.is_some());
        let to = network.slow.links[&link].to;
        let is_gpus = |run: &crate::carrier::PostedRun| {
            network.memory.regions.iter().any(|region| {
                (region.process, region.number, region.generation) == (to, run.region, run.generation)
                    && matches!(region.kind, Memory::Gpu(_))
            })
        };
        if !on_gpus && !post.runs.iter().any(is_gpus) {
            network.lower.push((self.me, post.peer));
        }
        let mut parts = Vec::new();
        for run in post.runs {
            let (mut here, mut offset, mut left) =
                (run.local.piece.address, run.offset as usize, run.len as usize);
            while left > 0 {
                let len = 1 + network.dice.below(left as u64) as usize;
                let (region, generation, there) = (run.region, run.generation, 0);
                let (bytes, is_over) = (Vec::new(), false);
                parts.push(Part { here, region, generation, offset, there, len, bytes, is_over });
                (here, offset, left) = (here + len, offset + len, left - len);
            }
        }
        network.slow.made += 1;
        let (id, left) = (network.slow.made, parts.len());
        let whose = (self.me, post.ticket);
        let (token, op, is_served) = (post.token, post.op, false);
        network.slow.moves.insert(id, Move { link, token, whose, op, parts, is_served, left });
        // One in a hundred posts is never answered, although its connection stays.
        if network.goes_wrong(100) {
            return Ok(());
        }
        let came = network.now + network.delay();
        if post.op == Op::Write {
            let sent = network.now + network.dice.below(came - network.now);
            network.slow_later(sent, self.me, SlowEvent::Sent(id));
        }
        network.slow_later(came, to, SlowEvent::Requested(id));
        if network.goes_wrong(40) {
            network.break_link(link);
        }
        Ok(())
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> bool {
        let mut any = false;
        loop {
            let what = {
                let network = &mut *self.network.lock();
                let due = &mut network.due[self.me];
                let index = due.iter().position(|(code, _)| *code == SLOW);
                let number = index.and_then(|index| due.remove(index)).map(|(_, number)| number);
                number.and_then(|number| network.slow.events.remove(&number))
            };
            let Some(what) = what else { return any };
            any = true;
            self.take(cx, what);
        }
    }

    fn next_tick(&self, _: Duration) -> Option<Duration> {
        None
    }

    fn fence(&mut self, cx: &mut Context<'_>, Owner(from): Owner, connection: u64) -> bool {
        let network = &mut *self.network.lock();
        let owner = network.process(from);
        let has_in_hand = network.goes_wrong(4);
        let in_hand_until = network.now + network.dice.below(400_000);
        let (now, me) = (network.now, self.me);
        let is_it = |link: &&mut SlowLink| Some(link.from) == owner && link.to == me;
        let Some(link) = network.slow.links.get_mut(&connection).filter(is_it) else { return true };
        if !link.theirs {
            return true;
        }
        if link.in_hand_until == 0 && has_in_hand {
            link.in_hand_until = in_hand_until;
        }
        if link.in_hand_until > now {
            network.seen.fences_denied += 1;
            return false;
        }
        link.theirs = false;
        cx.note_released();
        true
    }

    fn fence_over(&mut self, cx: &mut Context<'_>, _: u64, tokens: Vec<Token>) {
        tokens.into_iter().for_each(|token| cx.completed(token, Completion::Unknown));
    }

    fn touches(&self, memory: Touched<'_>) -> bool {
        let network = &mut *self.network.lock();
        let is_touched = network.slow.is_touched(self.me, memory, network.now);
        is_touched && network.fault != Fault::HidesTouches
    }

    fn release(&mut self, cx: &mut Context<'_>, memory: Touched<'_>) {
        let network = &mut *self.network.lock();
        let touching = |of: &&Move| of.parts.iter().any(|part| overlaps(memory, part.there, part.len));
        let of_me = |of: &&Move| network.slow.links[&of.link].to == self.me && of.is_served;
        let links: Vec<u64> =
            network.slow.moves.values().filter(of_me).filter(touching).map(|of| of.link).collect();
        for id in links {
            network.seen.ended_by_release += 1;
            if let Some(link) = network.slow.links.get_mut(&id) {
                link.theirs = false;
            }
            network.break_link(id);
            cx.note_released();
        }
    }

    fn close_all(&mut self, cx: &mut Context<'_>) {
        self.is_closed = true;
        let ids = |is_one: fn(&SlowLink, usize) -> bool| -> Vec<u64> {
            let network = self.network.lock();
            network.slow.links.iter().filter(|(_, link)| is_one(link, self.me)).map(|(id, _)| *id).collect()
        };
        let (ours, theirs) = (ids(|link, me| link.from == me), ids(|link, me| link.to == me));
        ours.into_iter().for_each(|id| self.end(cx, id, "the engine was closed"));
        theirs.into_iter().for_each(|id| self.leave(cx, id));
    }
}
