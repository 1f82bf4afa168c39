//! A simulated carrier like process_vm, of the better class: reaches host memory only, needs the control connection, and may
//! vanish and return at any time. The side that wants the bytes reads them from the other process's memory.

pub(super) mod neighbours;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use self::neighbours::{FastEvent, Range, Said};
use super::faults::Fault;
use super::memory::{TransferName, overlaps};
use super::network::{Network, Next, SharedNetwork};
use crate::carrier::{BadWords, Carrier, CarrierPost, Context, Owner, Party, SessionId, Touched};
use crate::carriers::awaited::AwaitedRegions;
use crate::fences::LEASE;
use crate::peers::RemoteMemory;
use crate::provider::NotNow;
use crate::regions::Wanted;
use crate::registrar::{MemoryRegion, RegisterError, Registrar};
use crate::transfers::{Completion, Memory, Op, PathId, PathSpec, PeerId, Reach, Token};

pub(super) const FAST: u8 = 201;
pub(super) const CLASS: u8 = 0;
/// WRITEs of fewer bytes travel inside the request.
const PULLED_BYTES_MIN: usize = 48;
/// Longer than any process is stopped, and than any frame is in flight.
const KEYS_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes inside a request may be placed for so long after the other side has lost the connection.
const PLACES_US: u64 = 2_500_000;
/// Answers requests of a connection that was fenced.
pub(super) const NO_NEIGHBOUR: &str = "a request of a session that is not served";

/// The carrier of one process.
#[derive(Debug)]
pub(super) struct Fast {
    me: usize,
    network: SharedNetwork,
    /// Peers whose control connection is up.
    controls: BTreeSet<PeerId>,
    /// Those of them that have a path.
    with_path: BTreeSet<PeerId>,
    paths: BTreeMap<PeerId, PathId>,
    readers: BTreeMap<PeerId, FastPeer>,
    posted: BTreeMap<Token, FastPost>,
    /// The last offer of each session. It replaces earlier ones.
    offered: BTreeMap<SessionId, u64>,
    serving: BTreeMap<SessionId, FastSession>,
    copying: BTreeMap<u64, FastCopy>,
    /// Fenced connections: the process that may still read, and the WRITEs that it was to read.
    pulling: BTreeMap<u64, (usize, Vec<Token>)>,
    is_closed: bool,
}

/// A peer that this process reads from.
#[derive(Debug)]
struct FastPeer {
    path: PathId,
    number: u32,
    connection: u64,
    process: usize,
    is_up: bool,
    awaited: AwaitedRegions,
}

#[derive(Debug, Clone, Copy)]
struct FastPost {
    peer: PeerId,
    /// The copy by which this process reads. None: the peer reads.
    copy: Option<u64>,
    is_inline: bool,
}

#[derive(Debug, Clone, Copy)]
struct FastSession {
    owner: Owner,
    connection: u64,
}

#[derive(Debug)]
struct FastCopy {
    whose: CopyOf,
    ranges: Vec<CopiedRange>,
    next: usize,
    is_given_up: bool,
    is_refused: bool,
}

#[derive(Debug, Clone, Copy)]
struct CopiedRange {
    /// Address in this process; `from`: in the other one.
    to: usize,
    from: usize,
    region: u32,
    generation: u32,
    len: usize,
}

#[derive(Debug, Clone, Copy)]
enum CopyOf {
    /// A READ of this process, from that process.
    Ours { token: Token, whose: TransferName, connection: u64, process: usize },
    /// A neighbour's WRITE.
    Theirs { token: Token, whose: TransferName, session: SessionId, owner: Owner, connection: u64 },
}

impl Network {
    fn fast_later(&mut self, at: u64, process: usize, what: FastEvent) {
        self.fast.made += 1;
        let number = self.fast.made;
        self.fast.events.insert(number, what);
        self.at(at, process, Next::Carrier(FAST, number));
    }

    fn fast_soon(&mut self, process: usize, what: FastEvent) {
        let at = self.now + self.delay();
        self.fast_later(at, process, what);
    }

    fn fast_says(&mut self, said: Said) -> Vec<u8> {
        self.fast.said.push(said);
        (self.fast.said.len() as u64 - 1).to_le_bytes().to_vec()
    }
}

/// Marks regions on the process's card.
#[derive(Debug)]
struct FastRegistrar {
    me: usize,
    network: SharedNetwork,
}

impl Registrar for FastRegistrar {
    fn register(&self, region: &MemoryRegion) -> Result<Option<Vec<u8>>, RegisterError> {
        if matches!(region.memory, Memory::Gpu(_)) {
            return Ok(None);
        }
        let card = &mut self.network.lock().hosts[self.me].card;
        card.insert(region.number, region.generation);
        Ok(Some(region.address.to_le_bytes().to_vec()))
    }

    fn withdraw(&self, region: &MemoryRegion) {
        self.network.lock().hosts[self.me].card.remove(&region.number);
    }
}

impl Fast {
    pub(super) fn new(me: usize, network: SharedNetwork) -> Fast {
        Fast {
            me,
            network,
            controls: BTreeSet::new(),
            with_path: BTreeSet::new(),
            paths: BTreeMap::new(),
            readers: BTreeMap::new(),
            posted: BTreeMap::new(),
            offered: BTreeMap::new(),
            serving: BTreeMap::new(),
            copying: BTreeMap::new(),
            pulling: BTreeMap::new(),
            is_closed: false,
        }
    }

    fn take(&mut self, cx: &mut Context<'_>, what: FastEvent) {
        match what {
            FastEvent::Probed(session, connection) => {
                let Some(owner) = cx.owner(session) else { return };
                if self.offered.get(&session) != Some(&connection) {
                    return;
                }
                if self.network.lock().goes_wrong(10) {
                    return cx.refuse(session, "it cannot be read");
                }
                self.serving.insert(session, FastSession { owner, connection });
                cx.accept(session, connection.to_le_bytes().to_vec());
            }
            FastEvent::Reached(peer, connection) => self.reached(cx, peer, connection),
            FastEvent::Copied(copy) => self.copied(cx, copy),
            FastEvent::CardRead(copy) => self.check_card(cx, copy),
            FastEvent::Returns(peer) => self.add_path(cx, peer),
            FastEvent::Vanishes(peer) => {
                if self.with_path.contains(&peer) && !self.network.lock().is_calm {
                    self.network.lock().seen.vanished += 1;
                    self.vanish(cx, peer, "it vanished");
                }
            }
            FastEvent::Gone(connection) => cx.fenced(connection),
            FastEvent::Ready(path) => cx.ready(path),
        }
    }

    fn add_path(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        if self.controls.contains(&peer) && self.with_path.insert(peer) {
            let is_swapped = self.network.lock().fault == Fault::ClassesSwapped;
            let class = if is_swapped { 2 } else { CLASS };
            cx.add_path(peer, PathSpec { read_bytes: Some(256), ..PathSpec::new(Reach::HOSTS, class) }, 0);
        }
    }

    /// Removes the path to a peer until it returns.
    fn vanish(&mut self, cx: &mut Context<'_>, peer: PeerId, why: &str) {
        let ends_first = {
            let network = &mut *self.network.lock();
            let within = if network.dice.one_in(3) { 3_000_000 } else { 20_000 };
            let at = network.now + network.dice.below(within);
            network.fast_later(at, self.me, FastEvent::Returns(peer));
            network.dice.one_in(2)
        };
        if ends_first {
            self.end(cx, peer, why);
        }
        // Otherwise the removed path's connection is closed later.
        self.with_path.remove(&peer);
        self.paths.remove(&peer).into_iter().for_each(|path| cx.remove_path(path));
    }

    fn reached(&mut self, cx: &mut Context<'_>, peer: PeerId, connection: u64) {
        let Some(reader) = self.readers.get_mut(&peer).filter(|reader| reader.connection == connection)
        else {
            return;
        };
        let network = &mut *self.network.lock();
        reader.is_up = true;
        network.better.insert((self.me, peer), (reader.path, reader.number));
        cx.up(reader.path, reader.number);
        if network.goes_wrong(2) {
            let at = network.now + network.dice.below(1_000_000);
            network.fast_later(at, self.me, FastEvent::Vanishes(peer));
        }
    }

    /// Ends the connection to a peer. A post on it completes once nothing touches its memory any more.
    fn end(&mut self, cx: &mut Context<'_>, peer: PeerId, why: &str) {
        let Some(reader) = self.readers.remove(&peer) else { return };
        let FastPeer { path, number, connection, process, .. } = reader;
        let network = &mut *self.network.lock();
        network.better.remove(&(self.me, peer));
        network.fast.ended.insert(connection, network.now);
        cx.broke(path, number, why);
        let of_peer: Vec<(Token, FastPost)> = self
            .posted
            .iter()
            .filter(|(_, posted)| posted.peer == peer)
            .map(|(token, posted)| (*token, *posted))
            .collect();
        let (mut pulled, mut inline) = (Vec::new(), Vec::new());
        for (token, posted) in of_peer {
            match posted.copy {
                // The post completes when the copy has ended.
                Some(copy) => {
                    self.copying.get_mut(&copy).into_iter().for_each(|copy| copy.is_given_up = true);
                    continue;
                }
                None if posted.is_inline => inline.push(token),
                None => pulled.push(token),
            }
            self.posted.remove(&token);
        }
        if network.fault == Fault::LosesPosts {
            return;
        }
        if !pulled.is_empty() {
            network.seen.fences += 1;
            self.pulling.insert(connection, (process, pulled.clone()));
            cx.fence(peer, connection, pulled, None);
        }
        if !inline.is_empty() {
            cx.fence(peer, connection, inline, Some(LEASE));
        }
    }

    fn begin_copy(&mut self, copying: FastCopy) -> u64 {
        let network = &mut *self.network.lock();
        network.fast.made += 1;
        let copy = network.fast.made;
        self.copying.insert(copy, copying);
        // The thread may be stopped in the middle of a call.
        let delay = network.long_delay();
        network.fast_later(network.now + delay, self.me, FastEvent::Copied(copy));
        copy
    }

    /// One call copies its bytes, even if its transfer has ended meanwhile.
    fn copied(&mut self, cx: &mut Context<'_>, id: u64) {
        let Some(copying) = self.copying.get_mut(&id) else { return };
        let range = copying.ranges[copying.next];
        copying.next += 1;
        let mut network = self.network.lock();
        let (what, memory) = ((range.region, range.generation), &mut network.memory);
        match copying.whose {
            CopyOf::Ours { whose, process, .. } => {
                let bytes = memory.read_unasked(process, range.from, range.len);
                let outcome = memory.write_own(whose, range.to, &bytes);
                network.checked(outcome);
                let at = network.now + network.long_delay();
                network.fast_later(at, self.me, FastEvent::CardRead(id));
            }
            CopyOf::Theirs { whose, .. } => {
                let outcome = memory
                    .read_own(whose, range.from, range.len)
                    .and_then(|bytes| memory.write_region(self.me, range.to, &bytes, what, whose));
                network.checked(outcome);
                drop(network);
                self.next_call(cx, id);
            }
        }
    }

    /// Checks the card after a call.
    fn check_card(&mut self, cx: &mut Context<'_>, id: u64) {
        let Some(copying) = self.copying.get_mut(&id) else { return };
        let CopyOf::Ours { process, .. } = copying.whose else { return };
        let range = copying.ranges[copying.next - 1];
        let network = self.network.lock();
        let is_there = network.hosts[process].card.get(&range.region) == Some(&range.generation);
        copying.is_refused |= !is_there && network.fault != Fault::CardNotRead;
        drop(network);
        self.next_call(cx, id);
    }

    /// Makes the next call of a copy, or ends it.
    fn next_call(&mut self, cx: &mut Context<'_>, id: u64) {
        let Some(copying) = self.copying.get(&id) else { return };
        let is_over = copying.next == copying.ranges.len() || copying.is_given_up || copying.is_refused;
        if !is_over {
            let network = &mut *self.network.lock();
            network.fast_soon(self.me, FastEvent::Copied(id));
            return;
        }
        let Some(copying) = self.copying.remove(&id) else { return };
        cx.note_released();
        let is_whole = copying.next == copying.ranges.len() && !copying.is_refused;
        match copying.whose {
            CopyOf::Ours { token, connection, .. } => {
                let Some(FastPost { peer, .. }) = self.posted.remove(&token) else { return };
                let is_connected =
                    self.readers.get(&peer).is_some_and(|reader| reader.connection == connection);
                let completion = match is_connected {
                    false => Completion::Unknown,
                    true if is_whole => Completion::Placed,
                    true => Completion::Refused,
                };
                cx.completed(token, completion);
            }
            CopyOf::Theirs { token, session, connection, .. } => {
                let completion = if is_whole { Completion::Placed } else { Completion::Refused };
                self.done(cx, session, connection, token, completion);
            }
        }
        if self.is_closed && self.copying.is_empty() {
            self.network.lock().hosts[self.me].is_gone = true;
        }
    }

    fn done(
        &mut self,
        cx: &mut Context<'_>,
        session: SessionId,
        connection: u64,
        token: Token,
        completion: Completion,
    ) {
        if self.serving.get(&session).is_some_and(|serving| serving.connection == connection) {
            let words = self.network.lock().fast_says(Said::Done { token, completion });
            cx.send(Party::Session(session), words);
        }
    }

    fn stop_serving(&mut self, session: SessionId) {
        self.serving.remove(&session);
        for copying in self.copying.values_mut() {
            if matches!(copying.whose, CopyOf::Theirs { session: of, .. } if of == session) {
                copying.is_given_up = true;
            }
        }
    }

    /// Takes a neighbour's WRITE.
    fn serve(&mut self, cx: &mut Context<'_>, session: SessionId, said: Said) -> Result<(), BadWords> {
        let Some(FastSession { owner, connection }) = self.serving.get(&session).copied() else {
            return Err(BadWords(NO_NEIGHBOUR));
        };
        let places = |runs: &[Range]| -> Option<Vec<CopiedRange>> {
            let place = |range: &Range| {
                let Range { here, region, generation, offset, len } = *range;
                let regions = &cx.process.regions;
                let (offset, bytes, is_write) = (offset as u64, len as u64, true);
                let wanted = Wanted { region, generation, offset, len: bytes, is_write };
                let mut spots = Vec::new();
                regions.for_peer(owner.0, wanted, &mut spots)?;
                let to = spots.first()?.piece.address;
                Some(CopiedRange { to, from: here, region, generation, len })
            };
            runs.iter().map(place).collect()
        };
        match said {
            Said::Pull { token, whose, runs } => match places(&runs) {
                Some(ranges) => {
                    let whose = CopyOf::Theirs { token, whose, session, owner, connection };
                    let (next, is_given_up, is_refused) = (0, false, false);
                    self.begin_copy(FastCopy { whose, ranges, next, is_given_up, is_refused });
                }
                None => self.done(cx, session, connection, token, Completion::Refused),
            },
            Said::Inline { token, whose, runs, bytes, connection: of } => {
                let completion = match places(&runs) {
                    Some(ranges) => {
                        let network = &mut *self.network.lock();
                        let ended = network.fast.ended.get(&of).copied();
                        if ended.is_some_and(|at| network.now > at + PLACES_US) {
                            return Err(BadWords(NO_NEIGHBOUR));
                        }
                        for (range, bytes) in ranges.iter().zip(&bytes) {
                            let what = (range.region, range.generation);
                            let memory = &mut network.memory;
                            let outcome = memory.write_region(self.me, range.to, bytes, what, whose);
                            network.checked(outcome);
                        }
                        Completion::Placed
                    }
                    None => Completion::Refused,
                };
                self.done(cx, session, connection, token, completion);
            }
            Said::Done { .. } => return Err(BadWords("words that are not their side's")),
        }
        Ok(())
    }

    fn read(&mut self, cx: &mut Context<'_>, post: &CarrierPost<'_>) -> Result<(), NotNow> {
        let CarrierPost { peer, token, .. } = *post;
        let Some(reader) = self.readers.get_mut(&peer) else { return Err(NotNow) };
        let mut ranges = Vec::new();
        for run in post.runs {
            let key = match cx.remote_memory(peer, run) {
                RemoteMemory::Known(found) => found[0].key.try_into().ok().map(u64::from_le_bytes),
                RemoteMemory::None => None,
                RemoteMemory::NotYet => {
                    self.network.lock().seen.waited_for_keys += 1;
                    if !reader.awaited.add(cx.now(), run.region, run.generation) {
                        return Err(NotNow);
                    }
                    None
                }
            };
            let Some(base) = key else {
                cx.completed(token, Completion::Refused);
                return Ok(());
            };
            let (mut to, mut from, mut left) =
                (run.address().addr(), (base + run.offset) as usize, run.len as usize);
            while left > 0 {
                let len = 1 + self.network.lock().dice.below(left as u64) as usize;
                let (region, generation) = (run.region, run.generation);
                ranges.push(CopiedRange { to, from, region, generation, len });
                (to, from, left) = (to + len, from + len, left - len);
            }
        }
        let (connection, process) = (reader.connection, reader.process);
        let whose = CopyOf::Ours { token, whose: (self.me, post.ticket), connection, process };
        let (next, is_given_up, is_refused) = (0, false, false);
        let copy = self.begin_copy(FastCopy { whose, ranges, next, is_given_up, is_refused });
        self.posted.insert(token, FastPost { peer, copy: Some(copy), is_inline: false });
        Ok(())
    }

    fn write(&mut self, cx: &mut Context<'_>, post: &CarrierPost<'_>) {
        let CarrierPost { peer, token, .. } = *post;
        let Some(connection) = self.readers.get(&peer).map(|reader| reader.connection) else { return };
        let whose = (self.me, post.ticket);
        let range = |run: &crate::carrier::PostedRun| Range {
            here: run.address().addr(),
            region: run.region,
            generation: run.generation,
            offset: run.offset as usize,
            len: run.len as usize,
        };
        let runs: Vec<Range> = post.runs.iter().map(range).collect();
        let is_inline = runs.iter().map(|run| run.len).sum::<usize>() < PULLED_BYTES_MIN;
        let network = &mut *self.network.lock();
        let said = if is_inline {
            let read = |run: &Range| network.memory.read_own(whose, run.here, run.len);
            let bytes: Result<Vec<Vec<u8>>, String> = runs.iter().map(read).collect();
            let bytes = network.checked(bytes).unwrap_or_default();
            Said::Inline { token, whose, runs, bytes, connection }
        } else {
            Said::Pull { token, whose, runs }
        };
        let words = network.fast_says(said);
        self.posted.insert(token, FastPost { peer, copy: None, is_inline });
        cx.send(Party::Peer(peer), words);
    }
}

impl Carrier for Fast {
    fn code(&self) -> u8 {
        FAST
    }

    fn registrar(&self) -> Option<Arc<dyn Registrar>> {
        Some(Arc::new(FastRegistrar { me: self.me, network: Arc::clone(&self.network) }))
    }

    fn control_up(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        self.controls.insert(peer);
        // The carrier may not reach the peer at first.
        let is_away = self.network.lock().goes_wrong(5);
        if is_away {
            self.network.lock().fast_soon(self.me, FastEvent::Returns(peer));
        } else {
            self.add_path(cx, peer);
        }
    }

    fn connect(&mut self, cx: &mut Context<'_>, path: PathId, number: u32, peer: PeerId, _: u64) {
        let network = &mut *self.network.lock();
        let identity = cx.peers.get(&peer).and_then(|known| known.whom.identity);
        let process = identity.and_then(|identity| network.process(identity));
        let (Some(process), true) = (process, self.with_path.contains(&peer)) else {
            return cx.broke(path, number, "it is gone");
        };
        if self.readers.contains_key(&peer) {
            network.report_wrong("a path is connected again before its former connection is over");
        }
        let connection = network.dice.roll();
        self.paths.insert(peer, path);
        let (is_up, awaited) = (false, AwaitedRegions::new(KEYS_TIMEOUT));
        let reader = FastPeer { path, number, connection, process, is_up, awaited };
        self.readers.insert(peer, reader);
        cx.offer(peer, connection.to_le_bytes().to_vec());
    }

    fn consider(&mut self, _: &mut Context<'_>, session: SessionId, offer: &[u8]) -> Result<(), BadWords> {
        let connection = offer.try_into().map(u64::from_le_bytes).map_err(|_| BadWords("no number"))?;
        self.stop_serving(session);
        self.offered.insert(session, connection);
        self.network.lock().fast_soon(self.me, FastEvent::Probed(session, connection));
        Ok(())
    }

    fn accepted(&mut self, _: &mut Context<'_>, peer: PeerId, answer: &[u8]) -> Result<(), BadWords> {
        let connection = answer.try_into().map(u64::from_le_bytes).map_err(|_| BadWords("no number"))?;
        self.network.lock().fast_soon(self.me, FastEvent::Reached(peer, connection));
        Ok(())
    }

    fn refused(&mut self, cx: &mut Context<'_>, peer: PeerId, why: &str) {
        self.vanish(cx, peer, why);
        cx.cannot_reach(peer, why.to_owned());
    }

    fn control_lost(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        self.controls.remove(&peer);
        self.end(cx, peer, "the control connection broke");
        self.with_path.remove(&peer);
        self.paths.remove(&peer).into_iter().for_each(|path| cx.remove_path(path));
    }

    fn peer_removed(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        self.controls.remove(&peer);
        self.with_path.remove(&peer);
        self.end(cx, peer, "the peer was removed");
        self.paths.remove(&peer);
    }

    fn session_ended(&mut self, _: &mut Context<'_>, session: SessionId) {
        self.stop_serving(session);
    }

    fn regions_changed(&mut self, cx: &mut Context<'_>, peer: PeerId) {
        let Some(reader) = self.readers.get_mut(&peer) else { return };
        if reader.awaited.retain(|region, generation| cx.is_awaited(peer, region, generation)) {
            cx.ready(reader.path);
        }
    }

    fn receive(&mut self, cx: &mut Context<'_>, from: Party, words: &[u8]) -> Result<(), BadWords> {
        let number = words.try_into().map(u64::from_le_bytes).map_err(|_| BadWords("no number"))?;
        let said = self.network.lock().fast.said[number as usize].clone();
        match (from, said) {
            (Party::Session(session), said) => self.serve(cx, session, said),
            (Party::Peer(peer), Said::Done { token, completion }) => {
                let is_asked = |posted: &&FastPost| posted.peer == peer && posted.copy.is_none();
                if self.posted.get(&token).filter(is_asked).is_some() {
                    self.posted.remove(&token);
                    cx.completed(token, completion);
                }
                Ok(())
            }
            _ => Err(BadWords("words that are not their side's")),
        }
    }

    fn close(&mut self, cx: &mut Context<'_>, path: PathId, connection: u32) {
        let is_it = |reader: &FastPeer| (reader.path, reader.number) == (path, connection);
        let peer = self.readers.iter().find(|(_, reader)| is_it(reader)).map(|(peer, _)| *peer);
        peer.into_iter().for_each(|peer| self.end(cx, peer, "it is not wanted"));
    }

    fn post(&mut self, cx: &mut Context<'_>, post: &CarrierPost<'_>) -> Result<(), NotNow> {
        let is_up = self.readers.get(&post.peer).is_some_and(|reader| reader.is_up);
        if !is_up {
            return Err(NotNow);
        }
        {
            let network = &mut *self.network.lock();
            if network.goes_wrong(12) {
                network.fast_soon(self.me, FastEvent::Ready(post.path));
                return Err(NotNow);
            }
            network.seen.fast_posts += 1;
        }
        match post.op {
            Op::Read => self.read(cx, post),
            Op::Write => {
                self.write(cx, post);
                Ok(())
            }
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> bool {
        let mut any = false;
        for reader in self.readers.values_mut() {
            if reader.awaited.expire(cx.now()) {
                cx.ready(reader.path);
            }
        }
        loop {
            let what = {
                let network = &mut *self.network.lock();
                let due = &mut network.due[self.me];
                let index = due.iter().position(|(code, _)| *code == FAST);
                let number = index.and_then(|index| due.remove(index)).map(|(_, number)| number);
                number.and_then(|number| network.fast.events.remove(&number))
            };
            let Some(what) = what else { return any };
            any = true;
            self.take(cx, what);
        }
    }

    fn next_tick(&self, _: Duration) -> Option<Duration> {
        self.readers.values().filter_map(|reader| reader.awaited.deadline()).min()
    }

    fn fence(&mut self, _: &mut Context<'_>, from: Owner, connection: u64) -> bool {
        let is_it = |serving: &FastSession| serving.owner == from && serving.connection == connection;
        let sessions: Vec<SessionId> =
            self.serving.iter().filter(|(_, serving)| is_it(serving)).map(|(session, _)| *session).collect();
        sessions.into_iter().for_each(|session| self.stop_serving(session));
        let is_of_it = |copying: &FastCopy| {
            matches!(copying.whose, CopyOf::Theirs { owner, connection: of, .. }
                if (owner, of) == (from, connection))
        };
        let is_over = !self.copying.values().any(is_of_it);
        self.network.lock().seen.fences_denied += u64::from(!is_over);
        is_over
    }

    fn fence_over(&mut self, cx: &mut Context<'_>, connection: u64, tokens: Vec<Token>) {
        if let Some((_, left)) = self.pulling.get_mut(&connection) {
            left.retain(|token| !tokens.contains(token));
            if left.is_empty() {
                self.pulling.remove(&connection);
            }
        }
        tokens.into_iter().for_each(|token| cx.completed(token, Completion::Unknown));
    }

    fn probe_gone(&mut self, _: &mut Context<'_>, connection: u64) {
        if let Some((process, _)) = self.pulling.get(&connection) {
            let network = &mut *self.network.lock();
            if network.hosts[*process].is_gone {
                network.fast_soon(self.me, FastEvent::Gone(connection));
            }
        }
    }

    fn touches(&self, memory: Touched<'_>) -> bool {
        let ranges = self.copying.values().flat_map(|copying| &copying.ranges);
        let is_touched = ranges.into_iter().any(|range| overlaps(memory, range.to, range.len));
        is_touched && self.network.lock().fault != Fault::HidesTouches
    }

    fn release(&mut self, _: &mut Context<'_>, memory: Touched<'_>) {
        for copying in self.copying.values_mut() {
            if copying.ranges.iter().any(|range| overlaps(memory, range.to, range.len)) {
                self.network.lock().seen.ended_by_release += 1;
                copying.is_given_up = true;
            }
        }
    }

    fn close_all(&mut self, cx: &mut Context<'_>) {
        let peers: Vec<PeerId> = self.readers.keys().copied().collect();
        peers.into_iter().for_each(|peer| self.end(cx, peer, "the engine was closed"));
        let sessions: Vec<SessionId> = self.serving.keys().copied().collect();
        sessions.into_iter().for_each(|session| self.stop_serving(session));
        self.is_closed = true;
        self.network.lock().hosts[self.me].is_gone = self.copying.is_empty();
    }

    fn is_busy(&self) -> bool {
        !self.copying.is_empty()
    }
}
