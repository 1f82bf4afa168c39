//! Transfers under way: what is posted next, and what becomes of them.
//!
//! ```text
//!             submit                  all bytes placed          immediate placed
//!  (nothing) -------> moving ------------------------> telling -----------------> done
//!                       |    \______ nothing to tell ______/----------------------^
//!                       | cancel, deadline, refused by the peer, peer lost
//!                       v
//!                    draining: posts nothing --- what was posted is over ---> failed
//!                       | not over in time: its paths are closed, which ends all that was posted on them
//! ```
//! A transfer is over, one way or the other, when nothing of it is under way any more: its memory may then be used
//! otherwise (no late write). It ends exactly once.
//!
//! A path that breaks gives back what was posted on it, whether or not it arrived. Bytes are posted again on another path:
//! to write or read them twice changes nothing, since source and destination belong to the transfer until it is over.
//! Immediates are told apart by the receiver ([`crate::Immediates`]).
//!
//! ```text
//!  path:  down --Connect--> (connecting) --path_up--> up --path_broke, or Close asked for--> closing --all given back--> down
//! ```

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use thiserror::Error;

use crate::runs::Run;

/// A process that bytes move to or from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId(u32);

/// A way to a peer: a pair of addresses, joined by a connection while it is up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PathId(u32);

/// A transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(u64);

/// Something that was posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(u64);

/// Which way bytes move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// To the peer.
    Write,
    /// From the peer.
    Read,
}

/// Who comes first on a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Priority {
    /// Somebody waits for it.
    High,
    /// Everything else. It is not starved: of [`Options::bulk_every`] posts one is of this kind, if there are any.
    Bulk,
}

/// A transfer to be.
#[derive(Debug, Clone)]
pub struct Request {
    /// With whom.
    pub peer: PeerId,
    /// Which way.
    pub op: Op,
    /// What, as [`crate::Pieces::runs`] makes them; may be empty.
    pub runs: Vec<Run>,
    /// The number of a counter at the peer and its generation: told once all bytes are in place.
    pub immediate: Option<(u32, u32)>,
    /// When it is given up, if ever.
    pub deadline: Option<Duration>,
    /// Its turn.
    pub priority: Priority,
}

/// What is done on a path at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Bytes.
    Move {
        /// Which way.
        op: Op,
        /// Which.
        run: Run,
    },
    /// An immediate, the `number`-th for this peer.
    Tell {
        /// From 0 on; the same when it is sent again.
        number: u64,
        /// The counter.
        counter: u32,
        /// Its generation.
        generation: u32,
    },
}

/// Something to be posted now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Post {
    /// Where.
    pub path: PathId,
    /// By which its completion is told.
    pub token: Token,
    /// What.
    pub work: Work,
}

/// What became of something posted. Everything that is posted gets one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completion {
    /// Its bytes are in place at their destination, or its immediate has been counted.
    Placed,
    /// Its path broke or was closed. It may have been placed or not; nothing touches its memory any more.
    Unknown,
    /// The peer refused it: a stale descriptor, a place outside of its region, a write to what is read-only.
    Refused,
}

/// Why a transfer failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Failure {
    /// Whoever asked for it gave it up.
    #[error("the transfer was cancelled")]
    Cancelled,
    /// It took too long.
    #[error("the transfer was not over by its deadline")]
    DeadlineExceeded,
    /// The peer refused a part: its descriptor is out of date, or does not cover the bytes.
    #[error("the peer refused the transfer: describe its memory again")]
    Refused,
    /// No path to the peer has been up for too long.
    #[error("the peer cannot be reached any more")]
    PeerLost,
}

/// What else is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// A transfer is over. Told once for each.
    Over(Ticket, Result<(), Failure>),
    /// End this path's connection: everything posted on it is to complete, as [`Completion::Unknown`] unless it is known
    /// better, once nothing touches its memory any more.
    Close(PathId),
    /// Connect this path again; answer [`Transfers::path_up`] or [`Transfers::path_broke`].
    Connect(PathId),
    /// No path to the peer has been up for [`Options::peer_patience`]; all its transfers are failed.
    Lost(PeerId),
}

/// The limits.
#[derive(Debug, Clone)]
pub struct Options {
    /// Most bytes of one post.
    pub chunk_bytes: u64,
    /// Most posts under way on one path.
    pub credits: u32,
    /// Of so many posts to a peer one is of [`Priority::Bulk`].
    pub bulk_every: u32,
    /// How long a transfer that was given up waits for what was posted, before its paths are closed.
    pub drain_patience: Duration,
    /// How long a peer may have no path that is up before it counts as lost.
    pub peer_patience: Duration,
    /// The first pause before a broken path is connected again; it doubles.
    pub backoff: Duration,
    /// The longest pause.
    pub backoff_max: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            chunk_bytes: 512 << 10,
            credits: 16,
            bulk_every: 8,
            drain_patience: Duration::from_secs(1),
            peer_patience: Duration::from_secs(5),
            backoff: Duration::from_millis(20),
            backoff_max: Duration::from_secs(2),
        }
    }
}

/// All transfers of this process.
#[derive(Debug)]
pub struct Transfers {
    options: Options,
    peers: Vec<Peer>,
    paths: Vec<Path>,
    live: HashMap<Ticket, Transfer>,
    posted: HashMap<Token, Posted>,
    /// When a transfer is given up.
    deadlines: BTreeSet<(Duration, Ticket)>,
    /// When a transfer that drains has its paths closed.
    drains: BTreeSet<(Duration, Ticket)>,
    actions: VecDeque<Action>,
    tickets: u64,
    tokens: u64,
}

#[derive(Debug)]
struct Peer {
    paths: Vec<PathId>,
    /// Transfers with something to post.
    high: VecDeque<Ticket>,
    bulk: VecDeque<Ticket>,
    live: BTreeSet<Ticket>,
    posts: u32,
    immediates: u64,
    /// Since when no path is up.
    unreachable: Option<Duration>,
    lost: bool,
}

#[derive(Debug)]
struct Path {
    peer: PeerId,
    state: PathState,
    under_way: BTreeMap<Token, u64>,
    bytes: u64,
    /// Bytes a second over the last posts; 0 until it is known.
    rate: f64,
    /// Before it is connected again.
    pause: Duration,
    /// It handed a post back.
    full: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PathState {
    Up,
    /// Everything posted is given back.
    Closing,
    Down {
        /// When it is connected again.
        retry: Duration,
    },
    Connecting,
}

#[derive(Debug)]
struct Transfer {
    peer: PeerId,
    op: Op,
    priority: Priority,
    /// Not posted yet, the next one last.
    runs: Vec<Run>,
    under_way: BTreeSet<Token>,
    immediate: Immediate,
    deadline: Option<Duration>,
    drain: Option<Duration>,
    failure: Option<Failure>,
    queued: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Immediate {
    None,
    /// Its number once it was posted for the first time.
    Due {
        counter: u32,
        generation: u32,
        number: Option<u64>,
    },
    Posted {
        counter: u32,
        generation: u32,
        number: u64,
    },
    Placed,
}

#[derive(Debug)]
struct Posted {
    ticket: Ticket,
    path: PathId,
    work: Work,
    at: Duration,
}

impl Transfers {
    /// None yet.
    ///
    /// # Panics
    /// If a limit is 0 that would keep everything from moving.
    pub fn new(options: Options) -> Transfers {
        assert!(options.chunk_bytes > 0 && options.credits > 0 && options.bulk_every > 0, "{options:?}");
        Transfers {
            options,
            peers: Vec::new(),
            paths: Vec::new(),
            live: HashMap::new(),
            posted: HashMap::new(),
            deadlines: BTreeSet::new(),
            drains: BTreeSet::new(),
            actions: VecDeque::new(),
            tickets: 0,
            tokens: 0,
        }
    }

    /// A peer with so many paths, none of which is up; [`Transfers::next_action`] asks to connect them.
    pub fn add_peer(&mut self, now: Duration, paths: usize) -> (PeerId, Vec<PathId>) {
        let peer = PeerId(self.peers.len() as u32);
        let ids: Vec<PathId> =
            (self.paths.len()..self.paths.len() + paths).map(|id| PathId(id as u32)).collect();
        for id in &ids {
            self.paths.push(Path {
                peer,
                state: PathState::Connecting,
                under_way: BTreeMap::new(),
                bytes: 0,
                rate: 0.0,
                pause: self.options.backoff,
                full: false,
            });
            self.actions.push_back(Action::Connect(*id));
        }
        self.peers.push(Peer {
            paths: ids.clone(),
            high: VecDeque::new(),
            bulk: VecDeque::new(),
            live: BTreeSet::new(),
            posts: 0,
            immediates: 0,
            unreachable: Some(now),
            lost: false,
        });
        (peer, ids)
    }

    /// The paths of a peer.
    pub fn paths(&self, peer: PeerId) -> &[PathId] {
        &self.peers[peer.0 as usize].paths
    }

    /// Begins a transfer. Its memory belongs to it until [`Action::Over`].
    pub fn submit(&mut self, now: Duration, request: Request) -> Ticket {
        let ticket = Ticket(self.tickets);
        self.tickets += 1;
        let Request { peer, op, mut runs, immediate, deadline, priority } = request;
        runs.retain(|run| run.len > 0);
        runs.reverse();
        let immediate = immediate.map_or(Immediate::None, |(counter, generation)| Immediate::Due {
            counter,
            generation,
            number: None,
        });
        let transfer = Transfer {
            peer,
            op,
            priority,
            runs,
            under_way: BTreeSet::new(),
            immediate,
            deadline,
            drain: None,
            failure: None,
            queued: false,
        };
        self.live.insert(ticket, transfer);
        self.peer_mut(peer).live.insert(ticket);
        if let Some(deadline) = deadline {
            self.deadlines.insert((deadline, ticket));
        }
        if self.peer_mut(peer).lost {
            self.give_up(now, ticket, Failure::PeerLost);
        } else {
            self.go_on(ticket);
        }
        ticket
    }

    /// Gives a transfer up. It is over when [`Action::Over`] says so; nothing happens if it is over already.
    pub fn cancel(&mut self, now: Duration, ticket: Ticket) {
        self.give_up(now, ticket, Failure::Cancelled);
    }

    /// A path is connected.
    pub fn path_up(&mut self, path: PathId) {
        let known = &mut self.paths[path.0 as usize];
        if known.state != PathState::Connecting {
            return;
        }
        (known.state, known.pause, known.full) = (PathState::Up, self.options.backoff, false);
        let peer = known.peer;
        let peer = self.peer_mut(peer);
        (peer.unreachable, peer.lost) = (None, false);
    }

    /// A path broke, or could not be connected. What was posted on it is still to complete.
    pub fn path_broke(&mut self, now: Duration, path: PathId) {
        let backoff_max = self.options.backoff_max;
        let known = &mut self.paths[path.0 as usize];
        match known.state {
            PathState::Up => known.state = PathState::Closing,
            PathState::Connecting => {
                known.state = PathState::Down { retry: now + known.pause };
                known.pause = (known.pause * 2).min(backoff_max);
            }
            PathState::Closing | PathState::Down { .. } => {}
        }
        self.settle_path(now, path);
    }

    /// What is to be posted now, if anything. A post that the path does not take at the moment is handed back by
    /// [`Transfers::hand_back`].
    pub fn next_post(&mut self, now: Duration) -> Option<Post> {
        (0..self.peers.len()).find_map(|peer| self.next_of_peer(now, PeerId(peer as u32)))
    }

    /// The path cannot take this post now: nothing of it is under way. It gets no other one before a completion, or
    /// [`Transfers::path_ready`].
    pub fn hand_back(&mut self, token: Token) {
        let Some(posted) = self.take_posted(token) else { return };
        self.paths[posted.path.0 as usize].full = true;
        self.post_again(posted);
    }

    /// A path that handed a post back takes one again.
    pub fn path_ready(&mut self, path: PathId) {
        self.paths[path.0 as usize].full = false;
    }

    /// Something posted is over. Told twice it counts once.
    pub fn complete(&mut self, now: Duration, token: Token, completion: Completion) {
        let Some(posted) = self.take_posted(token) else { return };
        let path = &mut self.paths[posted.path.0 as usize];
        path.full = false;
        match (completion, posted.work) {
            (Completion::Placed, Work::Move { run, .. }) => {
                let seconds = now.saturating_sub(posted.at).as_secs_f64().max(1e-9);
                let rate = run.len as f64 / seconds;
                path.rate = if path.rate == 0.0 { rate } else { path.rate * 0.875 + rate * 0.125 };
                self.go_on(posted.ticket);
            }
            (Completion::Placed, Work::Tell { .. }) => {
                if let Some(transfer) = self.live.get_mut(&posted.ticket) {
                    transfer.immediate = Immediate::Placed;
                }
                self.go_on(posted.ticket);
            }
            (Completion::Refused, _) => self.give_up(now, posted.ticket, Failure::Refused),
            (Completion::Unknown, _) => {
                let path = posted.path;
                self.post_again(posted);
                self.path_broke(now, path);
                return;
            }
        }
        self.settle_path(now, posted.path);
    }

    /// Does what is due by now.
    pub fn tick(&mut self, now: Duration) {
        while let Some((at, ticket)) = self.deadlines.first().copied().filter(|(at, _)| *at <= now) {
            self.deadlines.remove(&(at, ticket));
            self.give_up(now, ticket, Failure::DeadlineExceeded);
        }
        while let Some((at, ticket)) = self.drains.first().copied().filter(|(at, _)| *at <= now) {
            self.drains.remove(&(at, ticket));
            self.close_paths_of(ticket);
        }
        for index in 0..self.paths.len() {
            let path = &mut self.paths[index];
            if matches!(path.state, PathState::Down { retry } if retry <= now) {
                path.state = PathState::Connecting;
                self.actions.push_back(Action::Connect(PathId(index as u32)));
            }
        }
        for index in 0..self.peers.len() {
            let patience = self.options.peer_patience;
            let peer = &mut self.peers[index];
            if peer.lost || peer.unreachable.is_none_or(|since| now < since + patience) {
                continue;
            }
            peer.lost = true;
            let (id, live) = (PeerId(index as u32), peer.live.clone());
            self.actions.push_back(Action::Lost(id));
            live.into_iter().for_each(|ticket| self.give_up(now, ticket, Failure::PeerLost));
        }
    }

    /// When [`Transfers::tick`] has something to do next, if nothing else happens.
    pub fn next_tick(&self) -> Option<Duration> {
        let first = |set: &BTreeSet<(Duration, Ticket)>| set.first().map(|(at, _)| *at);
        let retries = self.paths.iter().filter_map(|path| match path.state {
            PathState::Down { retry } => Some(retry),
            _ => None,
        });
        let lost = self.peers.iter().filter(|peer| !peer.lost).filter_map(|peer| peer.unreachable);
        let lost = lost.map(|since| since + self.options.peer_patience);
        first(&self.deadlines).into_iter().chain(first(&self.drains)).chain(retries).chain(lost).min()
    }

    /// What is to be done next beside posting.
    pub fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Posts under way on a path.
    pub fn under_way(&self, path: PathId) -> usize {
        self.paths[path.0 as usize].under_way.len()
    }

    /// Transfers that are not over.
    pub fn live(&self) -> usize {
        self.live.len()
    }

    fn peer_mut(&mut self, peer: PeerId) -> &mut Peer {
        &mut self.peers[peer.0 as usize]
    }

    fn next_of_peer(&mut self, now: Duration, peer: PeerId) -> Option<Post> {
        let path = self.best_path(peer)?;
        let bulk_every = self.options.bulk_every;
        loop {
            let state = self.peer_mut(peer);
            let bulk_first = state.posts.is_multiple_of(bulk_every);
            let queue = match (state.high.is_empty(), state.bulk.is_empty()) {
                (true, true) => return None,
                (false, false) if bulk_first => &mut state.bulk,
                (false, _) => &mut state.high,
                (true, false) => &mut state.bulk,
            };
            let ticket = queue.pop_front()?;
            let Some(work) = self.next_work(ticket) else { continue };
            self.peer_mut(peer).posts = self.peer_mut(peer).posts.wrapping_add(1);
            return Some(self.post(now, ticket, path, work));
        }
    }

    /// The path that would be done first with one more chunk, of those that take one.
    fn best_path(&self, peer: PeerId) -> Option<PathId> {
        let credits = self.options.credits as usize;
        let usable = |path: &&PathId| {
            let path = &self.paths[path.0 as usize];
            path.state == PathState::Up && !path.full && path.under_way.len() < credits
        };
        let done = |path: &PathId| {
            let path = &self.paths[path.0 as usize];
            // An unknown path is tried; among those, the one with less to do.
            let seconds = if path.rate == 0.0 {
                0.0
            } else {
                (path.bytes + self.options.chunk_bytes) as f64 / path.rate
            };
            (seconds, path.bytes)
        };
        let paths = self.peers[peer.0 as usize].paths.iter();
        paths.filter(usable).copied().min_by(|one, other| {
            let (one, other) = (done(one), done(other));
            one.0.total_cmp(&other.0).then(one.1.cmp(&other.1))
        })
    }

    /// Takes what a transfer posts next; it stays in its queue while it has more.
    fn next_work(&mut self, ticket: Ticket) -> Option<Work> {
        let chunk_bytes = self.options.chunk_bytes;
        let transfer = self.live.get_mut(&ticket)?;
        transfer.queued = false;
        if transfer.failure.is_some() {
            return None;
        }
        let work = match transfer.runs.pop() {
            Some(run) => {
                let (run, rest) = run.split(run.len.min(chunk_bytes));
                if rest.len > 0 {
                    transfer.runs.push(rest);
                }
                Work::Move { op: transfer.op, run }
            }
            None => {
                let Immediate::Due { counter, generation, number } = transfer.immediate else { return None };
                if !transfer.under_way.is_empty() {
                    return None;
                }
                let peer = &mut self.peers[transfer.peer.0 as usize];
                let number = number.unwrap_or_else(|| {
                    peer.immediates += 1;
                    peer.immediates - 1
                });
                transfer.immediate = Immediate::Posted { counter, generation, number };
                Work::Tell { number, counter, generation }
            }
        };
        self.queue(ticket);
        Some(work)
    }

    fn post(&mut self, now: Duration, ticket: Ticket, path: PathId, work: Work) -> Post {
        let token = Token(self.tokens);
        self.tokens += 1;
        if let Some(transfer) = self.live.get_mut(&ticket) {
            transfer.under_way.insert(token);
        }
        let bytes = work.bytes();
        let known = &mut self.paths[path.0 as usize];
        known.under_way.insert(token, bytes);
        known.bytes += bytes;
        self.posted.insert(token, Posted { ticket, path, work, at: now });
        Post { path, token, work }
    }

    fn take_posted(&mut self, token: Token) -> Option<Posted> {
        let posted = self.posted.remove(&token)?;
        let path = &mut self.paths[posted.path.0 as usize];
        path.bytes -= path.under_way.remove(&token).unwrap_or(0);
        if let Some(transfer) = self.live.get_mut(&posted.ticket) {
            transfer.under_way.remove(&token);
        }
        Some(posted)
    }

    /// What was posted is to be posted again, unless its transfer was given up.
    fn post_again(&mut self, posted: Posted) {
        if let Some(transfer) = self.live.get_mut(&posted.ticket) {
            match posted.work {
                Work::Move { run, .. } => transfer.runs.push(run),
                Work::Tell { number, counter, generation } => {
                    transfer.immediate = Immediate::Due { counter, generation, number: Some(number) };
                }
            }
        }
        self.go_on(posted.ticket);
    }

    /// Ends a transfer if it is over, or sees to it that it is asked for its next post.
    fn go_on(&mut self, ticket: Ticket) {
        let Some(transfer) = self.live.get(&ticket) else { return };
        if !transfer.under_way.is_empty() {
            return self.queue(ticket);
        }
        let outcome = match transfer.failure {
            Some(failure) => Err(failure),
            None if transfer.has_more() => return self.queue(ticket),
            None => Ok(()),
        };
        if let Some(transfer) = self.live.remove(&ticket) {
            self.peer_mut(transfer.peer).live.remove(&ticket);
            transfer.deadline.map(|at| self.deadlines.remove(&(at, ticket)));
            transfer.drain.map(|at| self.drains.remove(&(at, ticket)));
            self.actions.push_back(Action::Over(ticket, outcome));
        }
    }

    fn queue(&mut self, ticket: Ticket) {
        let Some(transfer) = self.live.get_mut(&ticket) else { return };
        if transfer.queued || transfer.failure.is_some() || !transfer.can_post() {
            return;
        }
        transfer.queued = true;
        let (peer, priority) = (transfer.peer, transfer.priority);
        let peer = self.peer_mut(peer);
        match priority {
            Priority::High => peer.high.push_back(ticket),
            Priority::Bulk => peer.bulk.push_back(ticket),
        }
    }

    /// From now on a transfer posts nothing; the first reason counts.
    fn give_up(&mut self, now: Duration, ticket: Ticket, failure: Failure) {
        let drain = now + self.options.drain_patience;
        let Some(transfer) = self.live.get_mut(&ticket) else { return };
        if transfer.failure.is_none() {
            transfer.failure = Some(failure);
            transfer.runs.clear();
            if !transfer.under_way.is_empty() {
                transfer.drain = Some(drain);
                self.drains.insert((drain, ticket));
            }
        }
        self.go_on(ticket);
    }

    fn close_paths_of(&mut self, ticket: Ticket) {
        let Some(transfer) = self.live.get_mut(&ticket) else { return };
        transfer.drain = None;
        let paths: BTreeSet<PathId> = transfer
            .under_way
            .iter()
            .filter_map(|token| self.posted.get(token))
            .map(|posted| posted.path)
            .collect();
        for path in paths {
            let known = &mut self.paths[path.0 as usize];
            if known.state == PathState::Up {
                known.state = PathState::Closing;
                self.actions.push_back(Action::Close(path));
            }
        }
    }

    /// A closing path is down when everything has been given back.
    fn settle_path(&mut self, now: Duration, path: PathId) {
        let known = &mut self.paths[path.0 as usize];
        if known.state == PathState::Closing && known.under_way.is_empty() {
            known.state = PathState::Down { retry: now + known.pause };
            known.pause = (known.pause * 2).min(self.options.backoff_max);
        }
        let peer = known.peer;
        let is_up = |path: &PathId| self.paths[path.0 as usize].state == PathState::Up;
        let reachable = self.peers[peer.0 as usize].paths.iter().any(is_up);
        let peer = self.peer_mut(peer);
        if !reachable && peer.unreachable.is_none() {
            peer.unreachable = Some(now);
        }
    }
}

impl Transfer {
    fn has_more(&self) -> bool {
        !self.runs.is_empty() || matches!(self.immediate, Immediate::Due { .. })
    }

    fn can_post(&self) -> bool {
        !self.runs.is_empty() || (self.under_way.is_empty() && self.has_more())
    }
}

impl Work {
    fn bytes(&self) -> u64 {
        match self {
            Work::Move { run, .. } => run.len,
            Work::Tell { .. } => 0,
        }
    }
}
