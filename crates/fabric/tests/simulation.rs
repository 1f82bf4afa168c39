//! Transfers and messages over a simulated network that reorders, delays, breaks, refuses and repeats, with memory that tells a late or
//! a missing write. `KVLANE_TEST_SEEDS` sets how many seeds run, `KVLANE_TEST_SEED` the first.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail like tests")]

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use kvlane_fabric::{
    Action, Admission, Arrival, Completion, EngineId, Failure, Immediates, Inbox, InboxOptions, Message, Op,
    Options, PathId, PeerId, Place, Post, Priority, Request, Run, Ticket, Token, Transfers, Work,
};

const SEEDS: u64 = 10_000;
/// Bytes of each transfer's own part of the memory.
const SLICE: u64 = 4096;
const SENDER: u128 = 1;
/// Longest time from a break until everything has been given back.
const FLUSH_US: u64 = 400;
/// More events mean that something goes round and round.
const EVENTS_MAX: usize = 200_000;

/// Numbers that follow from a seed (splitmix64).
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.roll() % limit
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The head of a message comes; its bytes come with `Apply`.
    Admit(Token),
    Apply(Token),
    /// The same after it was given back.
    ApplyLate(usize),
    Complete(Token),
    Ready(PathId),
    Connected(PathId, u32, bool),
    /// News of a connection, which may be of a former one by now.
    Broke(PathId, u32),
    Break(PathId),
    /// Everything posted on a connection is given back.
    Flush(PathId, u32),
    Submit(usize),
    Cancel(usize),
    /// Somebody at a peer takes a message.
    Receive(usize),
    Tick,
}

/// Something that the network has taken.
#[derive(Clone)]
struct Taken {
    ticket: Ticket,
    path: PathId,
    connection: u32,
    work: Work,
    applied: bool,
    refused: bool,
    /// Of a message whose head has come.
    admission: Option<Admission>,
}

/// A transfer as the test knows it.
struct Known {
    index: u64,
    op: Op,
    /// What the destination is to hold from where on.
    expected: Vec<(usize, Vec<u8>)>,
    deadline: Option<Duration>,
    counter: Option<u32>,
    over: Option<Result<(), Failure>>,
    told: u64,
    /// For a message: what it says, and how often somebody received it.
    message: Option<Arc<[u8]>>,
    received: u64,
    no_room: bool,
    cancelled: bool,
    refused: bool,
    breaks: u32,
}

/// What is asked for.
#[derive(Clone)]
struct Asked {
    request: Request,
    /// Instead of runs and a counter.
    message: Option<Arc<[u8]>>,
    /// Where its part of the memory begins.
    slice: Option<u64>,
}

/// What the network does wrong in a control.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// Writes after it has given a post back.
    LateWrite,
    /// Says that bytes are in place that are not.
    LostWrite,
    /// The receiver takes each copy of a message for a new one.
    ForgetsNumbers,
}

struct World {
    dice: Dice,
    fault: Fault,
    now: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    /// Events of one instant come in the order in which they were made.
    made: u64,
    transfers: Transfers,
    options: Options,
    peers: Vec<PeerId>,
    paths: Vec<PathId>,
    /// Between these times nobody answers.
    dead: HashMap<PathId, (u64, u64)>,
    /// The connection of each path that is up, and when a peer's last path went.
    up: HashMap<PathId, u32>,
    last_up: HashMap<PeerId, u64>,
    lost: HashSet<PeerId>,
    tick_at: Option<u64>,
    /// Transfers of which every post breaks its path.
    poison: HashSet<u64>,
    /// Nothing goes wrong any more.
    calm: bool,
    taken: BTreeMap<Token, Taken>,
    late: Vec<Taken>,
    late_pending: usize,
    requests: Vec<Asked>,
    /// Parts of the memory that transfers have; messages have none.
    slices: u64,
    tickets: HashMap<usize, Ticket>,
    known: HashMap<Ticket, Known>,
    local: Vec<u8>,
    remote: Vec<Vec<u8>>,
    immediates: Vec<Immediates>,
    inboxes: Vec<Inbox>,
    /// How long it takes at most until somebody at a peer takes a message.
    slow: Vec<u64>,
    posts: usize,
}

impl World {
    fn new(seed: u64, fault: Fault) -> World {
        let mut dice = Dice(seed);
        let options = Options {
            chunk_bytes: 64 + dice.below(1000),
            chunk_runs: 1 + dice.below(6) as usize,
            credits: 1 + dice.below(4) as u32,
            bulk_every: 2 + dice.below(4) as u32,
            live_max: 100,
            breaks_max: 3,
            drain_patience: Duration::from_micros(300),
            post_patience: Duration::from_micros(2500),
            peer_patience: Duration::from_micros(8000),
            backoff: Duration::from_micros(50),
            backoff_max: Duration::from_micros(2000),
            message_bytes: 1 << 20,
            room_pause: Duration::from_micros(100),
            room_pause_max: Duration::from_micros(1000),
        };
        let mut transfers = Transfers::new(options.clone());
        let (mut peers, mut paths) = (Vec::new(), Vec::new());
        for _ in 0..=dice.below(2) {
            let (peer, its) = transfers.add_peer(Duration::ZERO, 1 + dice.below(3) as usize);
            peers.push(peer);
            paths.extend(its);
        }
        let count = 1 + dice.below(8);
        let messages = dice.below(6);
        // The last ones are for what is transferred when nothing goes wrong any more.
        let slices = count + peers.len() as u64;
        let memory: Vec<u8> = (0..slices * SLICE).map(|at| (at * 31 + at / 256) as u8).collect();
        let other: Vec<u8> = memory.iter().map(|byte| !byte).collect();
        let mut world = World {
            fault,
            now: 0,
            events: BinaryHeap::new(),
            made: 0,
            transfers,
            options,
            dead: HashMap::new(),
            up: HashMap::new(),
            last_up: HashMap::new(),
            lost: HashSet::new(),
            tick_at: None,
            poison: HashSet::new(),
            calm: false,
            taken: BTreeMap::new(),
            late: Vec::new(),
            late_pending: 0,
            requests: Vec::new(),
            slices: 0,
            tickets: HashMap::new(),
            known: HashMap::new(),
            local: memory,
            remote: vec![other; peers.len()],
            immediates: peers.iter().map(|_| Immediates::default()).collect(),
            inboxes: Vec::new(),
            slow: Vec::new(),
            posts: 0,
            peers,
            paths,
            dice,
        };
        for _ in 0..world.peers.len() {
            let messages = 1 + world.dice.below(3) as usize;
            world.inboxes.push(Inbox::new(InboxOptions { messages, bytes: 3000 }));
            world.slow.push(if world.dice.one_in(3) { 20_000 } else { 500 });
        }
        world.plan(count, messages);
        world
    }

    /// What is asked for and what goes wrong, and when.
    fn plan(&mut self, count: u64, messages: u64) {
        for index in 0..count + messages {
            let at = if self.dice.one_in(4) { self.dice.below(30_000) } else { self.dice.below(3000) };
            let request = if index < count { self.request(index, at) } else { self.message(index, at) };
            if self.dice.one_in(30) {
                self.poison.insert(index);
            }
            self.requests.push(request);
            self.later(at, Event::Submit(index as usize));
            if self.dice.one_in(4) {
                let after = self.dice.below(1500);
                self.later(at + after, Event::Cancel(index as usize));
            }
        }
        for path in self.paths.clone() {
            for _ in 0..self.dice.below(3) {
                let at = self.dice.below(5000);
                self.later(at, Event::Break(path));
            }
            if self.dice.one_in(4) {
                let (at, long) = (self.dice.below(4000), self.dice.below(40_000));
                self.dead.insert(path, (at, at + long));
                self.later(at, Event::Break(path));
            }
        }
    }

    fn request(&mut self, index: u64, at: u64) -> Asked {
        let peer = self.peers[self.dice.below(self.peers.len() as u64) as usize];
        let mut runs = Vec::new();
        let slice = self.slice();
        // Ranges that do not overlap, of any length, in shuffled order on the other side.
        let pieces = self.dice.below(6);
        let piece = SLICE / 6;
        for number in 0..pieces {
            let place = |number| Place { region: 0, offset: slice + number * piece };
            let len = self.dice.below(piece + 1);
            runs.push(Run { local: place(number), remote: place(pieces - 1 - number), len });
        }
        let request = Request {
            peer,
            op: if self.dice.one_in(2) { Op::Read } else { Op::Write },
            runs,
            immediate: self.dice.one_in(2).then_some((index as u32, 0)),
            deadline: self.dice.one_in(3).then(|| Duration::from_micros(at + self.dice.below(3000))),
            priority: if self.dice.one_in(2) { Priority::High } else { Priority::Bulk },
        };
        Asked { request, message: None, slice: Some(slice) }
    }

    /// Where the next transfer's part of the memory begins.
    fn slice(&mut self) -> u64 {
        self.slices += 1;
        (self.slices - 1) * SLICE
    }

    fn message(&mut self, index: u64, at: u64) -> Asked {
        let peer = self.peers[self.dice.below(self.peers.len() as u64) as usize];
        let deadline = Some(Duration::from_micros(at + self.dice.below(12_000)));
        let priority = if self.dice.one_in(2) { Priority::High } else { Priority::Bulk };
        let (op, runs, immediate) = (Op::Write, Vec::new(), None);
        // It says which it is.
        let mut bytes = index.to_le_bytes().to_vec();
        bytes.resize(8 + self.dice.below(1500) as usize, index as u8);
        let request = Request { peer, op, runs, immediate, deadline, priority };
        Asked { request, message: Some(bytes.into()), slice: None }
    }

    fn later(&mut self, at: u64, event: Event) {
        self.made += 1;
        self.events.push(Reverse((at, self.made, event)));
    }

    fn soon(&mut self, within: u64, event: Event) {
        let at = self.now + self.dice.below(within + 1);
        self.later(at, event);
    }

    fn now(&self) -> Duration {
        Duration::from_micros(self.now)
    }

    fn run(&mut self) -> Result<(), String> {
        self.carry_out()?;
        self.go_on_until(|world| world.all_over() && world.taken.is_empty() && world.late_pending == 0)?;
        self.judge()?;
        if self.fault != Fault::None {
            return Ok(());
        }
        // Whatever went wrong before: every path comes up again, and every peer is a peer.
        (self.calm, self.dead) = (true, HashMap::new());
        self.go_on_until(|world| world.up.len() == world.paths.len())?;
        for peer in self.peers.clone() {
            let index = self.requests.len();
            let offset = self.slice();
            let place = Place { region: 0, offset };
            let runs = vec![Run { local: place, remote: place, len: SLICE }];
            let priority = Priority::Bulk;
            let request = Request {
                peer,
                op: Op::Write,
                runs,
                immediate: Some((index as u32, 0)),
                deadline: None,
                priority,
            };
            self.requests.push(Asked { request, message: None, slice: Some(offset) });
            self.later(self.now, Event::Submit(index));
            let mut message = self.message(index as u64 + 1, self.now);
            message.request.deadline = Some(self.now() + Duration::from_secs(1));
            self.requests.push(message);
            self.later(self.now, Event::Submit(index + 1));
        }
        self.go_on_until(|world| world.all_over() && world.taken.is_empty())?;
        let last = self.requests.len() - 2 * self.peers.len();
        match self.known.values().find(|known| known.index >= last as u64 && known.over != Some(Ok(()))) {
            Some(known) => Err(format!("nothing goes wrong any more, and yet {:?}", known.over)),
            None => self.judge(),
        }
    }

    fn go_on_until(&mut self, done: impl Fn(&World) -> bool) -> Result<(), String> {
        let mut events = 0;
        while !done(self) {
            let Some(Reverse((at, _, event))) = self.events.pop() else {
                return Err("nothing happens any more".into());
            };
            events += 1;
            if events > EVENTS_MAX {
                return Err("it does not come to an end".into());
            }
            self.now = at;
            self.happen(event)?;
            self.transfers.tick(self.now());
            if self.transfers.next_tick().is_some_and(|next| next <= self.now()) {
                return Err("a timer that is due is not done".into());
            }
            self.carry_out()?;
        }
        Ok(())
    }

    fn all_over(&self) -> bool {
        self.tickets.len() == self.requests.len() && self.known.values().all(|known| known.over.is_some())
    }

    fn happen(&mut self, event: Event) -> Result<(), String> {
        let now = self.now();
        match event {
            Event::Submit(index) => {
                let Asked { request, message, .. } = self.requests[index].clone();
                let known = self.expect(index as u64, &request, message.clone());
                let ticket = match message {
                    None => self.transfers.submit(now, request).map_err(|full| full.to_string())?,
                    Some(bytes) => {
                        let Request { peer, deadline, priority, .. } = request;
                        let sent = self.transfers.send(now, peer, bytes, deadline.unwrap(), priority);
                        sent.map_err(|why| why.to_string())?
                    }
                };
                self.tickets.insert(index, ticket);
                self.known.insert(ticket, known);
            }
            Event::Cancel(index) => {
                if let Some(ticket) = self.tickets.get(&index) {
                    self.known.get_mut(ticket).unwrap().cancelled = true;
                    self.transfers.cancel(now, *ticket);
                }
            }
            Event::Admit(token) => self.admit(token),
            Event::Apply(token) => self.apply(token)?,
            Event::ApplyLate(index) => {
                self.late_pending -= 1;
                let Taken { path, work, ticket, admission, .. } = self.late[index].clone();
                let admission = admission.or_else(|| self.admission(path, &work));
                self.take_effect(path, ticket, work, admission)?;
            }
            Event::Receive(peer) => self.receive(peer)?,
            Event::Complete(token) => {
                if let Some(taken) = self.taken.remove(&token) {
                    let known = self.known.get_mut(&taken.ticket).unwrap();
                    let completion = match taken.refused {
                        true => Completion::Refused,
                        // One that is told before the others of its connection.
                        false if !self.calm && self.dice.one_in(100) => Completion::Unknown,
                        false if taken.admission == Some(Admission::NoRoom) => Completion::NoRoom,
                        false => Completion::Placed,
                    };
                    known.refused |= completion == Completion::Refused;
                    known.no_room |= completion == Completion::NoRoom;
                    known.breaks += u32::from(completion == Completion::Unknown);
                    self.transfers.complete(now, token, completion);
                    // A queue that tells the same twice.
                    if self.dice.one_in(20) {
                        self.transfers.complete(now, token, Completion::Unknown);
                    }
                }
            }
            Event::Ready(path) => self.transfers.path_ready(path),
            Event::Connected(path, connection, works) => {
                if !works || !self.answers(path) {
                    self.transfers.path_broke(now, path, connection);
                } else if self.transfers.path_up(path, connection) {
                    self.up.insert(path, connection);
                }
            }
            Event::Broke(path, connection) => {
                let before = self.up.get(&path).copied();
                self.transfers.path_broke(now, path, connection);
                assert!(before != Some(connection), "the test tells only what is over");
            }
            Event::Break(_) if self.calm => {}
            Event::Break(path) => self.break_path(path),
            Event::Flush(path, connection) => self.flush(path, connection)?,
            Event::Tick => {}
        }
        Ok(())
    }

    fn answers(&self, path: PathId) -> bool {
        self.dead.get(&path).is_none_or(|(from, until)| !(*from..*until).contains(&self.now))
    }

    /// Whoever ended the connection.
    fn break_path(&mut self, path: PathId) {
        let Some(connection) = self.up.remove(&path) else { return };
        let peer = self.peers[self.peer_of(path)];
        self.last_up.insert(peer, self.now);
        self.soon(FLUSH_US, Event::Flush(path, connection));
        // The news may come late, or only by what is given back, or again and again.
        if self.dice.one_in(2) {
            self.transfers.path_broke(self.now(), path, connection);
        }
        for _ in 0..self.dice.below(3) {
            self.soon(3000, Event::Broke(path, connection));
        }
        self.later(self.now + FLUSH_US, Event::Broke(path, connection));
    }

    fn flush(&mut self, path: PathId, connection: u32) -> Result<(), String> {
        let of_path = self
            .taken
            .iter()
            .filter(|(_, taken)| (taken.path, taken.connection) == (path, connection))
            .map(|(token, _)| *token);
        for token in of_path.collect::<Vec<_>>() {
            // What was on its way may still have arrived.
            if self.dice.one_in(2) {
                self.apply(token)?;
            }
            let Some(taken) = self.taken.remove(&token) else { continue };
            let is_told = matches!(taken.work, Work::Tell { .. } | Work::Say { .. });
            if is_told && !taken.applied && !taken.refused && self.dice.one_in(3) {
                // Nobody waits until the other side reads no more of it.
                self.soon(2000, Event::ApplyLate(self.late.len()));
                self.late.push(taken.clone());
                self.late_pending += 1;
            } else if !taken.applied && taken.admission == Some(Admission::Admitted) {
                self.release(&taken);
            }
            let is_move = matches!(taken.work, Work::Move { .. });
            if is_move && self.fault == Fault::LateWrite && !taken.applied {
                self.soon(2000, Event::ApplyLate(self.late.len()));
                self.late.push(taken.clone());
                self.late_pending += 1;
            }
            self.known.get_mut(&taken.ticket).unwrap().breaks += 1;
            self.transfers.complete(self.now(), token, Completion::Unknown);
        }
        Ok(())
    }

    /// A post takes effect.
    fn apply(&mut self, token: Token) -> Result<(), String> {
        let fault = self.fault;
        let Some(taken) = self.taken.get_mut(&token) else { return Ok(()) };
        if taken.applied || taken.refused {
            return Ok(());
        }
        taken.applied = true;
        let (path, ticket, work) = (taken.path, taken.ticket, taken.work.clone());
        self.admit(token);
        let admission = self.taken[&token].admission;
        if fault == Fault::LostWrite && self.dice.one_in(3) {
            return Ok(());
        }
        self.take_effect(path, ticket, work, admission)
    }

    /// The head of a message comes, if it has not come yet.
    fn admit(&mut self, token: Token) {
        let Some(taken) = self.taken.get(&token).filter(|taken| taken.admission.is_none() && !taken.refused)
        else {
            return;
        };
        let (path, work) = (taken.path, taken.work.clone());
        let admission = self.admission(path, &work);
        self.taken.get_mut(&token).unwrap().admission = admission;
    }

    fn admission(&mut self, path: PathId, work: &Work) -> Option<Admission> {
        let Work::Say { number, bytes } = work else { return None };
        let peer = self.peer_of(path);
        let sender = self.sender();
        Some(self.inboxes[peer].admit(&self.immediates[peer], sender, *number, bytes.len() as u64))
    }

    fn release(&mut self, taken: &Taken) {
        let Work::Say { bytes, .. } = &taken.work else { return };
        let peer = self.peer_of(taken.path);
        let sender = self.sender();
        self.inboxes[peer].release(sender, bytes.len());
    }

    /// Who sends, as the receiver sees it.
    fn sender(&mut self) -> u128 {
        self.made += 1;
        if self.fault == Fault::ForgetsNumbers { SENDER + u128::from(self.made) } else { SENDER }
    }

    /// Somebody at a peer takes a message, if there is one.
    fn receive(&mut self, peer: usize) -> Result<(), String> {
        let Some(message) = self.inboxes[peer].take() else { return Ok(()) };
        let index = u64::from_le_bytes(message.bytes[..8].try_into().unwrap()) as usize;
        let known = self.known.get_mut(&self.tickets[&index]).unwrap();
        if known.message.as_deref() != Some(&message.bytes[..])
            || self.requests[index].request.peer != self.peers[peer]
        {
            return Err(format!("message {index} is not what was sent"));
        }
        known.received += 1;
        Ok(())
    }

    fn take_effect(
        &mut self,
        path: PathId,
        ticket: Ticket,
        work: Work,
        admission: Option<Admission>,
    ) -> Result<(), String> {
        let peer = self.peer_of(path);
        match work {
            Work::Move { op, runs } => {
                for run in runs {
                    let (here, there, len) =
                        (run.local.offset as usize, run.remote.offset as usize, run.len as usize);
                    let (here, there) =
                        (&mut self.local[here..here + len], &mut self.remote[peer][there..there + len]);
                    match op {
                        Op::Write => there.copy_from_slice(here),
                        Op::Read => here.copy_from_slice(there),
                    }
                }
            }
            Work::Tell { number, counter, generation } => {
                let arrival = self.immediates[peer].arrive(SENDER, number, counter, generation);
                let ticket = self.tickets[&(counter as usize)];
                let placed = self.is_placed(ticket);
                let known = self.known.get_mut(&ticket).unwrap();
                if known.over.is_none() && !placed {
                    return Err(format!("transfer {counter} was told before its bytes were in place"));
                }
                if arrival != Arrival::Again {
                    known.told += 1;
                }
            }
            Work::Say { number, bytes } => {
                if admission == Some(Admission::Admitted) {
                    let from = EngineId { engine_id: 0, boot_nonce: 0 };
                    let message = Message { from, bytes: bytes.to_vec() };
                    let sender = self.sender();
                    if self.inboxes[peer].deliver(&mut self.immediates[peer], sender, number, message) {
                        self.known.get_mut(&ticket).unwrap().told += 1;
                        self.soon(self.slow[peer], Event::Receive(peer));
                    }
                }
            }
        }
        Ok(())
    }

    fn peer_of(&self, path: PathId) -> usize {
        // Paths are numbered peer by peer.
        let before = |peer: usize| self.paths_of(peer).contains(&path);
        (0..self.peers.len()).find(|peer| before(*peer)).unwrap()
    }

    fn paths_of(&self, peer: usize) -> Vec<PathId> {
        self.transfers.paths(self.peers[peer]).to_vec()
    }

    /// What a transfer's destination holds when it is done.
    fn expect(&self, index: u64, request: &Request, message: Option<Arc<[u8]>>) -> Known {
        let peer = self.peers.iter().position(|peer| *peer == request.peer).unwrap();
        let expected = request.runs.iter().map(|run| {
            let (here, there, len) =
                (run.local.offset as usize, run.remote.offset as usize, run.len as usize);
            match request.op {
                Op::Write => (there, self.local[here..here + len].to_vec()),
                Op::Read => (here, self.remote[peer][there..there + len].to_vec()),
            }
        });
        let expected = expected.collect();
        let counter = request.immediate.map(|(counter, _)| counter);
        let (op, deadline) = (request.op, request.deadline);
        Known {
            index,
            op,
            expected,
            deadline,
            counter,
            over: None,
            told: 0,
            message,
            received: 0,
            no_room: false,
            cancelled: false,
            refused: false,
            breaks: 0,
        }
    }

    fn is_placed(&self, ticket: Ticket) -> bool {
        let known = &self.known[&ticket];
        let peer = self.requests[known.index as usize].request.peer;
        let peer = self.peers.iter().position(|other| *other == peer).unwrap();
        let memory = match known.op {
            Op::Write => &self.remote[peer],
            Op::Read => &self.local,
        };
        known.expected.iter().all(|(at, bytes)| memory[*at..at + bytes.len()] == bytes[..])
    }

    /// Does what the transfers ask for, until they ask for nothing.
    fn carry_out(&mut self) -> Result<(), String> {
        loop {
            if let Some(action) = self.transfers.next_action() {
                self.act(action)?;
            } else if let Some(post) = self.transfers.next_post(self.now()) {
                self.take(post)?;
            } else {
                break;
            }
        }
        if let Some(at) = self.transfers.next_tick() {
            let at = (at.as_nanos().div_ceil(1000) as u64).max(self.now);
            if self.tick_at.is_none_or(|before| before <= self.now || at < before) {
                self.tick_at = Some(at);
                self.later(at, Event::Tick);
            }
        }
        Ok(())
    }

    fn act(&mut self, action: Action) -> Result<(), String> {
        match action {
            Action::Over(ticket, outcome) => return self.over(ticket, outcome),
            Action::Close(path, connection) => {
                if self.up.get(&path) == Some(&connection) {
                    self.break_path(path);
                }
            }
            Action::Connect(path, connection) => {
                if self.up.contains_key(&path) || self.taken.values().any(|taken| taken.path == path) {
                    return Err("connected again before the former connection was over".into());
                }
                let works = self.calm || !self.dice.one_in(4);
                self.soon(300, Event::Connected(path, connection, works));
            }
            Action::Lost(peer) => {
                let index = self.peers.iter().position(|other| *other == peer).unwrap();
                let since = Duration::from_micros(self.last_up.get(&peer).copied().unwrap_or(0));
                if self.paths_of(index).iter().any(|path| self.up.contains_key(path))
                    || self.now() < since + self.options.peer_patience
                {
                    return Err("a peer is lost that was there a moment ago".into());
                }
                self.lost.insert(peer);
            }
        }
        Ok(())
    }

    fn take(&mut self, post: Post) -> Result<(), String> {
        let Post { path, token, ticket, work } = post;
        self.posts += 1;
        if self.transfers.under_way(path) > self.options.credits as usize {
            return Err("more posts than credits".into());
        }
        if let Work::Move { runs, .. } = &work {
            let bytes: u64 = runs.iter().map(|run| run.len).sum();
            if !(1..=self.options.chunk_bytes).contains(&bytes) || runs.iter().any(|run| run.len == 0) {
                return Err(format!("a post of {bytes} bytes"));
            }
            if runs.len() > self.options.chunk_runs {
                return Err(format!("a post of {} runs", runs.len()));
            }
        }
        if !self.up.contains_key(&path) || (!self.calm && self.dice.one_in(10)) {
            if self.dice.one_in(3) {
                self.break_path(path);
            }
            self.transfers.hand_back(self.now(), token);
            self.soon(100, Event::Ready(path));
            return Ok(());
        }
        let refused = !self.calm && self.dice.one_in(300);
        let connection = self.up[&path];
        self.taken.insert(
            token,
            Taken { ticket, path, connection, work, applied: false, refused, admission: None },
        );
        if self.poison.contains(&self.known[&ticket].index) {
            self.break_path(path);
            return Ok(());
        }
        if !self.calm && self.dice.one_in(200) {
            // Nobody hears of it again while its path is up.
            return Ok(());
        }
        // Some posts take very long.
        let within = if self.dice.one_in(30) { 2000 } else { 120 };
        let (placed, known) = (self.dice.below(within), self.dice.below(50));
        if self.dice.one_in(2) {
            // Before its bytes; otherwise with them.
            let head = self.dice.below(placed + 1);
            self.later(self.now + head, Event::Admit(token));
        }
        self.later(self.now + placed, Event::Apply(token));
        self.later(self.now + placed + known, Event::Complete(token));
        Ok(())
    }

    /// Judges a transfer, and uses its memory otherwise at once.
    fn over(&mut self, ticket: Ticket, outcome: Result<(), Failure>) -> Result<(), String> {
        let placed = self.is_placed(ticket);
        let now = self.now();
        let known = self.known.get_mut(&ticket).unwrap();
        if known.over.replace(outcome).is_some() {
            return Err(format!("transfer {} was over twice", known.index));
        }
        if outcome.is_ok() && !placed {
            return Err(format!("transfer {} is done and its bytes are not in place", known.index));
        }
        // Given up at the deadline; then what was posted drains, or its paths are closed and flushed.
        let latest =
            known.deadline.map(|at| at + self.options.drain_patience + Duration::from_micros(FLUSH_US + 1));
        if latest.is_some_and(|latest| now > latest) {
            return Err(format!("transfer {} was over long after its deadline", known.index));
        }
        let peer = self.requests[known.index as usize].request.peer;
        let justified = match outcome {
            Err(Failure::Cancelled) => known.cancelled,
            Err(Failure::Refused) => known.refused,
            Err(Failure::PeerLost) => self.lost.contains(&peer),
            Err(Failure::NoRoom) => known.no_room && known.deadline.is_some_and(|at| now >= at),
            Err(Failure::PathsBreak) => known.breaks > self.options.breaks_max,
            Ok(()) | Err(Failure::DeadlineExceeded) => true,
        };
        if !justified {
            return Err(format!("transfer {} ended without a cause: {outcome:?}", known.index));
        }
        if outcome == Err(Failure::NoRoom) && known.breaks == 0 && known.told > 0 {
            return Err(format!("there was no room for message {}, and it was delivered", known.index));
        }
        if outcome == Err(Failure::DeadlineExceeded) && known.deadline.is_none_or(|at| now < at) {
            return Err(format!("transfer {} was over before its deadline", known.index));
        }
        if let Some(slice) = self.requests[known.index as usize].slice {
            let slice = slice as usize..(slice + SLICE) as usize;
            self.local[slice.clone()].fill(CANARY);
            self.remote.iter_mut().for_each(|memory| memory[slice.clone()].fill(!CANARY));
        }
        Ok(())
    }

    fn judge(&mut self) -> Result<(), String> {
        if self.transfers.live() > 0 {
            return Err("a transfer is never over".into());
        }
        for peer in 0..self.peers.len() {
            while self.inboxes[peer].held() > 0 {
                let held = self.inboxes[peer].held();
                self.receive(peer)?;
                if self.inboxes[peer].held() == held {
                    return Err("room is held for a message that does not come".into());
                }
            }
        }
        let remote = self.remote.iter().map(|memory| (memory, !CANARY));
        // The slices of all that have been asked for.
        let used = (self.slices * SLICE) as usize;
        for (memory, canary) in remote.chain([(&self.local, CANARY)]) {
            if memory[..used].iter().any(|byte| *byte != canary) {
                return Err("memory was written after its transfer was over".into());
            }
        }
        for known in self.known.values() {
            let expected = u64::from(known.counter.is_some() || known.message.is_some());
            if known.message.is_some() && known.received != known.told {
                return Err(format!("message {} was received {} times", known.index, known.received));
            }
            match known.over {
                Some(Ok(())) if known.told != expected => {
                    return Err(format!("transfer {} was told {} times", known.index, known.told));
                }
                Some(Err(_)) if known.told > expected => {
                    return Err(format!("transfer {} failed and was told {} times", known.index, known.told));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// What memory here holds whose transfer is over. At the peer it is the opposite, so that a late copy either way is seen.
const CANARY: u8 = 0xa5;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

#[test]
fn every_transfer_ends_once_rightly_told_and_nothing_is_written_late() {
    let first = number("KVLANE_TEST_SEED").unwrap_or(0);
    let mut ends: BTreeMap<String, u64> = BTreeMap::new();
    let mut messages: BTreeMap<String, u64> = BTreeMap::new();
    let mut posts = 0;
    for seed in first..first + number("KVLANE_TEST_SEEDS").unwrap_or(SEEDS) {
        let mut world = World::new(seed, Fault::None);
        if let Err(wrong) = world.run() {
            panic!("seed {seed}: {wrong}");
        }
        posts += world.posts;
        for known in world.known.values() {
            let ends = if known.message.is_some() { &mut messages } else { &mut ends };
            *ends.entry(format!("{:?}", known.over.unwrap())).or_default() += 1;
        }
    }
    println!("{posts} posts; {ends:?}; messages: {messages:?}");
    // The seeds see every way to end.
    if number("KVLANE_TEST_SEEDS").is_none() {
        for end in [
            "Ok(())",
            "Err(Cancelled)",
            "Err(DeadlineExceeded)",
            "Err(Refused)",
            "Err(PeerLost)",
            "Err(PathsBreak)",
        ] {
            assert!(ends.get(end).is_some_and(|count| *count > 50), "{end}: {ends:?}");
            assert!(messages.get(end).is_some_and(|count| *count > 50), "{end}: {messages:?}");
        }
        assert!(messages.get("Err(NoRoom)").is_some_and(|count| *count > 50), "{messages:?}");
    }
}

#[test]
fn a_receiver_that_takes_a_copy_for_a_new_message_is_caught() {
    let twice = |seed: &u64| {
        let wrong = World::new(*seed, Fault::ForgetsNumbers).run();
        wrong.is_err_and(|wrong| wrong.contains("was told 2 times"))
    };
    let caught = (0..1000).filter(twice).count();
    assert!(caught > 20, "{caught} times");
}

#[test]
fn a_network_that_writes_late_or_loses_what_it_has_confirmed_is_caught() {
    for (fault, said) in
        [(Fault::LateWrite, "after its transfer was over"), (Fault::LostWrite, "not in place")]
    {
        let caught =
            (0..500).filter(|seed| World::new(*seed, fault).run().is_err_and(|wrong| wrong.contains(said)));
        let caught = caught.count();
        assert!(caught > 20, "{caught} times: {said}");
    }
}
