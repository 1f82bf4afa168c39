//! A network that reorders, delays, breaks, refuses and repeats, as its dice say.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet, VecDeque};
use std::time::Duration;

use kvlane_fabric::{
    Admission, Arrival, Completion, EngineId, Event, Immediates, Inbox, InboxOptions, Message, NotNow,
    Options, PathId, PathSpec, PeerId, Post, Provider, Route, Ticket, Token, Work,
};

use crate::dice::Dice;
use crate::memory::{Memory, memory_of};

/// Longest time from a break until everything has been given back.
pub(crate) const FLUSH_US: u64 = 400;
const SENDER: u128 = 1;

/// What is going to happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Next {
    Submit(usize),
    Cancel(usize),
    /// A carrier's path to a peer goes for good, while its peer lives.
    Vanish(PathId),
    /// One like it comes.
    Return(usize, u8),
    Tick,
    Network(Happening),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Happening {
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
    /// Somebody at a peer takes a message.
    Receive(usize),
}

/// What the network does wrong in a control.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// Writes after it has given a post back.
    LateWrite,
    /// Says that bytes are in place that are not.
    LostWrite,
    /// The receiver takes each copy of a message for a new one.
    ForgetsNumbers,
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

/// What the network has seen of a transfer.
#[derive(Default)]
pub(crate) struct Seen {
    /// Its immediate was counted, or its message delivered, so often.
    pub(crate) told: u64,
    /// Somebody took its message.
    pub(crate) received: u64,
    pub(crate) no_room: bool,
    pub(crate) refused: bool,
    /// A GPU's driver could not copy a part.
    pub(crate) gpu_failed: bool,
    pub(crate) breaks: u32,
    pub(crate) is_over: bool,
}

#[derive(Clone, Copy)]
struct PathAt {
    peer: usize,
    spec: PathSpec,
    has_vanished: bool,
}

/// Peers and the paths to them.
pub(crate) struct Network {
    pub(crate) dice: Dice,
    pub(crate) now: u64,
    /// Nothing goes wrong any more.
    pub(crate) calm: bool,
    pub(crate) memory: Memory,
    pub(crate) seen: HashMap<Ticket, Seen>,
    /// Which transfer names a counter, by its number.
    pub(crate) counters: HashMap<u32, Ticket>,
    /// By what a message says first: its transfer, all that it says, and the peer that it is for.
    pub(crate) messages: HashMap<u64, (Ticket, Vec<u8>, usize)>,
    /// Transfers of which every post breaks its path.
    pub(crate) poison: HashSet<Ticket>,
    /// Of each peer, the routes for which it was lost.
    pub(crate) lost: HashSet<(PeerId, Route)>,
    /// Posts that a path of another class than the best has carried.
    pub(crate) second_best: usize,
    pub(crate) posts: usize,
    /// What is wrong with what was asked of the network, or with what it led to.
    pub(crate) wrong: Option<String>,
    fault: Fault,
    limits: Options,
    agenda: BinaryHeap<Reverse<(u64, u64, Next)>>,
    /// Events of one instant come in the order in which they were made.
    made: u64,
    happened: VecDeque<Event>,
    /// By the peer's place.
    peers: Vec<PeerId>,
    /// All that ever were, those that have vanished too.
    paths: BTreeMap<PathId, PathAt>,
    /// Paths that the transfers are told of, by their labels.
    coming: HashMap<u64, (usize, PathSpec)>,
    /// Paths that are to come for those that have vanished.
    to_return: usize,
    /// Between these times nobody answers.
    dead: HashMap<PathId, (u64, u64)>,
    /// The connection of each path that is up, and when a peer's last path went.
    up: HashMap<PathId, u32>,
    last_up: HashMap<(PeerId, Route), u64>,
    taken: BTreeMap<Token, Taken>,
    late: Vec<Taken>,
    late_pending: usize,
    immediates: Vec<Immediates>,
    inboxes: Vec<Inbox>,
    /// How long it takes at most until somebody at a peer takes a message.
    slow: Vec<u64>,
}

impl Network {
    pub(crate) fn new(
        mut dice: Dice,
        fault: Fault,
        limits: Options,
        memory: Memory,
        peers: Vec<PeerId>,
    ) -> Network {
        let (mut inboxes, mut slow) = (Vec::new(), Vec::new());
        for _ in &peers {
            let messages = 1 + dice.below(3) as usize;
            inboxes.push(Inbox::new(InboxOptions { messages, bytes: 3000 }));
            slow.push(if dice.one_in(3) { 20_000 } else { 500 });
        }
        Network {
            dice,
            now: 0,
            calm: false,
            memory,
            seen: HashMap::new(),
            counters: HashMap::new(),
            messages: HashMap::new(),
            poison: HashSet::new(),
            lost: HashSet::new(),
            posts: 0,
            second_best: 0,
            wrong: None,
            fault,
            limits,
            agenda: BinaryHeap::new(),
            made: 0,
            happened: VecDeque::new(),
            immediates: peers.iter().map(|_| Immediates::default()).collect(),
            peers,
            paths: BTreeMap::new(),
            coming: HashMap::new(),
            to_return: 0,
            dead: HashMap::new(),
            up: HashMap::new(),
            last_up: HashMap::new(),
            taken: BTreeMap::new(),
            late: Vec::new(),
            late_pending: 0,
            inboxes,
            slow,
        }
    }

    /// There is going to be one more path.
    pub(crate) fn comes(&mut self, peer: usize, spec: PathSpec) {
        self.made += 1;
        self.coming.insert(self.made, (peer, spec));
        let (peer, label) = (self.peers[peer], self.made);
        self.happened.push_back(Event::PathAdded { peer, spec, label });
    }

    /// There is one more path. What goes wrong with it, and when.
    fn add_path(&mut self, path: PathId, peer: usize, spec: PathSpec) {
        self.to_return = self.to_return.saturating_sub(1);
        self.paths.insert(path, PathAt { peer, spec, has_vanished: false });
        if self.calm {
            return;
        }
        for _ in 0..self.dice.below(3) {
            let at = self.now + self.dice.below(5000);
            self.later(at, Next::Network(Happening::Break(path)));
        }
        if self.dice.one_in(4) {
            let (at, long) = (self.now + self.dice.below(4000), self.dice.below(40_000));
            self.dead.insert(path, (at, at + long));
            self.later(at, Next::Network(Happening::Break(path)));
        }
        // Words have to come through: their paths break, but they do not vanish.
        if !spec.reach.serves(Route::Words) && self.dice.one_in(2) {
            let at = self.now + self.dice.below(6000);
            self.later(at, Next::Vanish(path));
        }
    }

    /// A path is gone for good. Another one of its kind comes later.
    pub(crate) fn vanish(&mut self, path: PathId) {
        self.happened.push_back(Event::PathRemoved(path));
        if self.up.contains_key(&path) {
            self.note_not_up(path);
        }
        let at = self.paths.get_mut(&path).unwrap();
        at.has_vanished = true;
        let (peer, class) = (at.peer, at.spec.class);
        let after = if self.dice.one_in(3) { 15_000 } else { 3000 };
        let at = self.now + self.dice.below(after);
        self.to_return += 1;
        self.later(at, Next::Return(peer, class));
    }

    /// Nothing goes wrong any more.
    pub(crate) fn calm_down(&mut self) {
        (self.calm, self.dead) = (true, HashMap::new());
    }

    pub(crate) fn later(&mut self, at: u64, next: Next) {
        self.made += 1;
        self.agenda.push(Reverse((at, self.made, next)));
    }

    fn soon(&mut self, within: u64, happening: Happening) {
        let at = self.now + self.dice.below(within + 1);
        self.later(at, Next::Network(happening));
    }

    /// What happens next, at that time.
    pub(crate) fn next(&mut self) -> Option<Next> {
        let Reverse((at, _, next)) = self.agenda.pop()?;
        self.now = at;
        Some(next)
    }

    pub(crate) fn time(&self) -> Duration {
        Duration::from_micros(self.now)
    }

    /// Nothing is under way, also nothing that was given up.
    pub(crate) fn is_quiet(&self) -> bool {
        self.taken.is_empty() && self.late_pending == 0
    }

    pub(crate) fn is_all_up(&self) -> bool {
        let mut paths = self.paths.iter().filter(|(_, at)| !at.has_vanished);
        self.to_return == 0 && paths.all(|(path, _)| self.up.contains_key(path))
    }

    fn peer_of(&self, path: PathId) -> usize {
        self.paths[&path].peer
    }

    /// Paths of a peer that are up and serve a route.
    fn up_for(&self, peer: usize, route: Route) -> impl Iterator<Item = (PathId, PathSpec)> {
        let serves = move |(path, at): &(&PathId, &PathAt)| {
            at.peer == peer && !at.has_vanished && at.spec.reach.serves(route) && self.up.contains_key(path)
        };
        self.paths.iter().filter(serves).map(|(path, at)| (*path, at.spec))
    }

    fn is_wrong(&mut self, what: impl Into<String>) {
        self.wrong.get_or_insert(what.into());
    }

    pub(crate) fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Admit(token) => self.admit(token),
            Happening::Apply(token) => self.apply(token),
            Happening::ApplyLate(index) => {
                self.late_pending -= 1;
                let Taken { path, work, ticket, admission, .. } = self.late[index].clone();
                let admission = admission.or_else(|| self.admission(path, &work));
                self.take_effect(path, ticket, work, admission);
            }
            Happening::Receive(peer) => self.receive(peer),
            Happening::Complete(token) => self.complete(token),
            Happening::Ready(path) => self.happened.push_back(Event::Ready(path)),
            Happening::Connected(path, connection, works) => {
                if !works || !self.answers(path) {
                    self.happened.push_back(Event::Broke { path, connection });
                } else {
                    self.up.insert(path, connection);
                    self.happened.push_back(Event::Up { path, connection });
                }
            }
            Happening::Broke(path, connection) => {
                assert!(self.up.get(&path) != Some(&connection), "only what is over is told to be");
                self.happened.push_back(Event::Broke { path, connection });
            }
            Happening::Break(_) if self.calm => {}
            Happening::Break(path) => self.break_path(path),
            Happening::Flush(path, connection) => self.flush(path, connection),
        }
    }

    fn answers(&self, path: PathId) -> bool {
        self.dead.get(&path).is_none_or(|(from, until)| !(*from..*until).contains(&self.now))
    }

    fn complete(&mut self, token: Token) {
        let Some(taken) = self.taken.remove(&token) else { return };
        let is_move = matches!(taken.work, Work::Move { .. });
        let completion = match taken.refused {
            true if is_move && self.dice.one_in(2) => Completion::GpuFailed,
            true => Completion::Refused,
            // One that is told before the others of its connection.
            false if !self.calm && self.dice.one_in(100) => Completion::Unknown,
            false if taken.admission == Some(Admission::NoRoom) => Completion::NoRoom,
            false => Completion::Placed,
        };
        let seen = self.seen.get_mut(&taken.ticket).unwrap();
        seen.refused |= completion == Completion::Refused;
        seen.gpu_failed |= completion == Completion::GpuFailed;
        seen.no_room |= completion == Completion::NoRoom;
        seen.breaks += u32::from(completion == Completion::Unknown);
        self.happened.push_back(Event::Completed(token, completion));
        // A queue that tells the same twice.
        if self.dice.one_in(20) {
            self.happened.push_back(Event::Completed(token, Completion::Unknown));
        }
    }

    /// A path that was up is not any more. One that has vanished is nobody's hope.
    fn note_not_up(&mut self, path: PathId) {
        let PathAt { peer, spec, has_vanished } = self.paths[&path];
        for route in Route::ALL.into_iter().filter(|route| !has_vanished && spec.reach.serves(*route)) {
            self.last_up.insert((self.peers[peer], route), self.now);
        }
    }

    /// Whoever ended the connection.
    fn break_path(&mut self, path: PathId) {
        let Some(connection) = self.up.remove(&path) else { return };
        self.note_not_up(path);
        self.soon(FLUSH_US, Happening::Flush(path, connection));
        // The news may come late, or only by what is given back, or again and again.
        if self.dice.one_in(2) {
            self.happened.push_back(Event::Broke { path, connection });
        }
        for _ in 0..self.dice.below(3) {
            self.soon(3000, Happening::Broke(path, connection));
        }
        self.later(self.now + FLUSH_US, Next::Network(Happening::Broke(path, connection)));
    }

    fn flush(&mut self, path: PathId, connection: u32) {
        let of_path = self
            .taken
            .iter()
            .filter(|(_, taken)| (taken.path, taken.connection) == (path, connection))
            .map(|(token, _)| *token);
        for token in of_path.collect::<Vec<_>>() {
            // What was on its way may still have arrived.
            if self.dice.one_in(2) {
                self.apply(token);
            }
            let Some(taken) = self.taken.remove(&token) else { continue };
            let is_told = matches!(taken.work, Work::Immediate { .. } | Work::Message { .. });
            if is_told && !taken.applied && !taken.refused && self.dice.one_in(3) {
                // Nobody waits until the other side reads no more of it.
                self.apply_late(taken.clone());
            } else if !taken.applied && taken.admission == Some(Admission::Admitted) {
                self.release(&taken);
            }
            let is_move = matches!(taken.work, Work::Move { .. });
            if is_move && self.fault == Fault::LateWrite && !taken.applied {
                self.apply_late(taken.clone());
            }
            self.seen.get_mut(&taken.ticket).unwrap().breaks += 1;
            self.happened.push_back(Event::Completed(token, Completion::Unknown));
        }
    }

    fn apply_late(&mut self, taken: Taken) {
        self.soon(2000, Happening::ApplyLate(self.late.len()));
        self.late.push(taken);
        self.late_pending += 1;
    }

    /// A post takes effect.
    fn apply(&mut self, token: Token) {
        let Some(taken) = self.taken.get_mut(&token) else { return };
        if taken.applied || taken.refused {
            return;
        }
        taken.applied = true;
        let (path, ticket, work) = (taken.path, taken.ticket, taken.work.clone());
        self.admit(token);
        let admission = self.taken[&token].admission;
        if self.fault == Fault::LostWrite && self.dice.one_in(3) {
            return;
        }
        self.take_effect(path, ticket, work, admission);
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
        let Work::Message { number, bytes } = work else { return None };
        let peer = self.peer_of(path);
        let sender = self.sender();
        Some(self.inboxes[peer].admit(&self.immediates[peer], sender, *number, bytes.len() as u64))
    }

    fn release(&mut self, taken: &Taken) {
        let Work::Message { bytes, .. } = &taken.work else { return };
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
    fn receive(&mut self, peer: usize) {
        let Some(message) = self.inboxes[peer].take() else { return };
        let index = u64::from_le_bytes(message.bytes[..8].try_into().unwrap());
        let (ticket, said, to) = &self.messages[&index];
        if (*said != message.bytes) || *to != peer {
            return self.is_wrong(format!("message {index} is not what was sent"));
        }
        self.seen.get_mut(ticket).unwrap().received += 1;
    }

    /// Somebody takes all that waits at the peers.
    pub(crate) fn receive_all(&mut self) {
        for peer in 0..self.inboxes.len() {
            while self.inboxes[peer].held() > 0 {
                let held = self.inboxes[peer].held();
                self.receive(peer);
                if self.inboxes[peer].held() == held {
                    return self.is_wrong("room is held for a message that does not come");
                }
            }
        }
    }

    fn take_effect(&mut self, path: PathId, ticket: Ticket, work: Work, admission: Option<Admission>) {
        let peer = self.peer_of(path);
        match work {
            Work::Move { op, runs, .. } => self.memory.copy(op, peer, &runs),
            Work::Immediate { number, counter, generation } => {
                let arrival = self.immediates[peer].arrive(SENDER, number, counter, generation);
                let ticket = self.counters[&counter];
                if !self.seen[&ticket].is_over && !self.memory.is_placed(ticket) {
                    self.is_wrong(format!("transfer {counter} was told before its bytes were in place"));
                }
                if arrival != Arrival::Again {
                    self.seen.get_mut(&ticket).unwrap().told += 1;
                }
            }
            Work::Message { number, bytes } => {
                if admission == Some(Admission::Admitted) {
                    let from = EngineId { engine_id: 0, boot_nonce: 0 };
                    let message = Message { from, bytes: bytes.to_vec() };
                    let sender = self.sender();
                    if self.inboxes[peer].deliver(&mut self.immediates[peer], sender, number, message) {
                        self.seen.get_mut(&ticket).unwrap().told += 1;
                        self.soon(self.slow[peer], Happening::Receive(peer));
                    }
                }
            }
        }
    }

    fn check(&mut self, post: &Post) {
        // With this one.
        let under_way = 1 + self.taken.values().filter(|taken| taken.path == post.path).count();
        if under_way > self.limits.credits as usize {
            self.is_wrong("more posts than credits");
        }
        let PathAt { peer, spec, has_vanished } = self.paths[&post.path];
        let route = match &post.work {
            Work::Move { between, .. } => between.route(),
            Work::Immediate { .. } | Work::Message { .. } => Route::Words,
        };
        if !spec.reach.serves(route) || has_vanished {
            self.is_wrong(format!("{route:?} over a path that does not serve it"));
        }
        self.second_best += usize::from(spec.class > 0);
        // The news of a break may be late.
        let believed_up = |other: &PathId| {
            !self.happened.iter().any(|event| matches!(event, Event::Up { path, .. } if path == other))
        };
        if self.up_for(peer, route).any(|(other, known)| known.class < spec.class && believed_up(&other)) {
            self.is_wrong("a post over a path of a lower class while a better one is up");
        }
        if let Work::Move { between, runs, .. } = &post.work {
            if runs
                .iter()
                .any(|run| memory_of(run.local) != between.local || memory_of(run.remote) != between.remote)
            {
                self.is_wrong("a post of two memories");
            }
            let bytes: u64 = runs.iter().map(|run| run.len).sum();
            if !(1..=self.limits.chunk_bytes).contains(&bytes) || runs.iter().any(|run| run.len == 0) {
                self.is_wrong(format!("a post of {bytes} bytes"));
            }
            if runs.len() > self.limits.chunk_runs {
                self.is_wrong(format!("a post of {} runs", runs.len()));
            }
        }
    }
}

impl Provider for Network {
    fn path_added(&mut self, path: Option<PathId>, label: u64) {
        let (peer, spec) = self.coming.remove(&label).unwrap();
        path.into_iter().for_each(|path| self.add_path(path, peer, spec));
    }

    fn connect(&mut self, _: Duration, path: PathId, connection: u32) {
        if self.up.contains_key(&path) || self.taken.values().any(|taken| taken.path == path) {
            self.is_wrong("connected again before the former connection was over");
        }
        let works = self.calm || !self.dice.one_in(4);
        self.soon(300, Happening::Connected(path, connection, works));
    }

    fn close(&mut self, _: Duration, path: PathId, connection: u32) {
        if self.up.get(&path) == Some(&connection) {
            self.break_path(path);
        }
    }

    fn lost(&mut self, now: Duration, peer: PeerId, route: Route) {
        let since = Duration::from_micros(self.last_up.get(&(peer, route)).copied().unwrap_or(0));
        let place = self.peers.iter().position(|other| *other == peer).unwrap();
        let is_up = self.up_for(place, route).next().is_some();
        if is_up || now < since + self.limits.peer_patience {
            self.is_wrong("a peer is lost that was there a moment ago");
        }
        self.lost.insert((peer, route));
    }

    fn post(&mut self, _: Duration, post: Post) -> Result<(), NotNow> {
        self.posts += 1;
        self.check(&post);
        let Post { path, token, ticket, work } = post;
        if !self.up.contains_key(&path) || (!self.calm && self.dice.one_in(10)) {
            if self.dice.one_in(3) {
                self.break_path(path);
            }
            self.soon(100, Happening::Ready(path));
            return Err(NotNow);
        }
        let refused = !self.calm && self.dice.one_in(300);
        let connection = self.up[&path];
        let taken = Taken { ticket, path, connection, work, applied: false, refused, admission: None };
        self.taken.insert(token, taken);
        if self.poison.contains(&ticket) {
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
            self.later(self.now + head, Next::Network(Happening::Admit(token)));
        }
        self.later(self.now + placed, Next::Network(Happening::Apply(token)));
        self.later(self.now + placed + known, Next::Network(Happening::Complete(token)));
        Ok(())
    }

    fn next_event(&mut self) -> Option<Event> {
        self.happened.pop_front()
    }
}
