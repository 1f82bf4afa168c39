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
//! Immediates are told apart by the receiver ([`crate::Immediates`]), and so are messages, which are immediates with bytes of
//! their own: where the receiver has no room for one, it is posted again after a pause, until its deadline.
//!
//! ```text
//!          tick: Connect              path_up             path_broke, an unknown completion, a post that
//!  down -----------------> connecting -------> up -----------------> closing     takes too long, a drain that does:
//!   ^                          | path_broke                             |        Close
//!   '--------------------------+<------ everything posted is back ------'
//! ```
//! Each connection of a path has a number, so that late news of a former one are told apart.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use crate::immediates::IMMEDIATES_AHEAD;
use crate::numbered::Numbered;
use crate::runs::Run;

/// After so long without a post a path is tried again to which others were preferred, or after so many times what a chunk
/// took on it, at the most after the last of these.
const TRY_AGAIN: Duration = Duration::from_secs(1);
const TRIED_SHARE: f64 = 64.0;
const TRY_AGAIN_MAX: Duration = Duration::from_secs(10);

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

impl Token {
    /// As it goes over the wire.
    pub(crate) fn number(self) -> u64 {
        self.0
    }

    /// That a peer sent back; it may be nobody's.
    pub(crate) fn from_number(number: u64) -> Token {
        Token(number)
    }
}

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
    /// Everything else. It is not starved: of [`Options::bulk_every`] posts to a peer one is of this kind, if there are any.
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Work {
    /// Bytes.
    Move {
        /// Which way.
        op: Op,
        /// Which; none is empty.
        runs: Vec<Run>,
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
    /// A message, numbered with the immediates.
    Say {
        /// From 0 on; the same when it is sent again.
        number: u64,
        /// All of it.
        bytes: Arc<[u8]>,
    },
}

/// Something to be posted now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Post {
    /// Where.
    pub path: PathId,
    /// By which its completion is told.
    pub token: Token,
    /// Of which transfer it is a part.
    pub ticket: Ticket,
    /// What.
    pub work: Work,
}

/// What became of something posted. Everything that is posted gets one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completion {
    /// Its bytes are in place at their destination, its immediate has been counted, or its message was delivered.
    Placed,
    /// Its path broke or was closed. It may have been placed or not; nothing touches its memory any more.
    Unknown,
    /// The peer refused it: a stale descriptor, a place outside of its region, a write to what is read-only.
    Refused,
    /// The peer has no room for this message now.
    NoRoom,
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
    /// No path to the peer has been up for too long, or the peer was removed.
    #[error("the peer cannot be reached any more")]
    PeerLost,
    /// Paths broke again and again while they carried it, and nothing of it was placed in between.
    #[error("every path broke that carried the transfer")]
    PathsBreak,
    /// The peer had no room for the message until its deadline: nobody there takes what has arrived.
    #[error("the peer had no room for the message until its deadline")]
    NoRoom,
}

/// So many transfers are under way that no more can begin: wait for one to be over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{0} transfers are under way, as many as can be")]
pub struct Full(pub usize);

/// Why a message cannot begin: wait for others to be over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum CannotSend {
    /// As many transfers as can be.
    #[error(transparent)]
    Full(#[from] Full),
    /// As many bytes of messages as can be.
    #[error("{0} bytes of messages are under way, as many as can be")]
    Bytes(usize),
}

/// What else is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// A transfer is over. Told once for each.
    Over(Ticket, Result<(), Failure>),
    /// End this path's connection of that number, if that has not happened yet: everything posted on it is to complete, as
    /// [`Completion::Unknown`] unless it is known better, once nothing touches its memory any more.
    Close(PathId, u32),
    /// Connect this path, as the connection of that number; answer [`Transfers::path_up`] or [`Transfers::path_broke`].
    Connect(PathId, u32),
    /// No path to the peer has been up for [`Options::peer_patience`]; all its transfers are failed.
    Lost(PeerId),
}

/// The limits.
#[derive(Debug, Clone)]
pub struct Options {
    /// Most bytes of one post, unless [`Transfers::set_read_bytes`] says otherwise.
    pub chunk_bytes: u64,
    /// Most runs of one post.
    pub chunk_runs: usize,
    /// Most posts under way on one path. A path whose rate is not known yet gets one.
    pub credits: u32,
    /// Of so many posts to a peer one is of [`Priority::Bulk`]; at least 2.
    pub bulk_every: u32,
    /// Most transfers that are not over.
    pub live_max: usize,
    /// How many connections in a row may break that carried a transfer, with nothing of it placed in between.
    pub breaks_max: u32,
    /// How long a transfer that was given up waits for what was posted, before its paths are closed.
    pub drain_patience: Duration,
    /// How long a post may take before its path is closed.
    pub post_patience: Duration,
    /// How long a peer may have no path that is up before it counts as lost.
    pub peer_patience: Duration,
    /// The first pause before a broken path is connected again. It doubles until something has been placed over the path,
    /// and is up to a quarter longer, another part for each path.
    pub backoff: Duration,
    /// The longest pause.
    pub backoff_max: Duration,
    /// Most bytes of messages that are not over.
    pub message_bytes: usize,
    /// The first pause before a message is posted again for which the peer had no room. It doubles.
    pub room_pause: Duration,
    /// The longest of these pauses.
    pub room_pause_max: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            chunk_bytes: 512 << 10,
            chunk_runs: 256,
            credits: 16,
            bulk_every: 8,
            live_max: 65_536,
            breaks_max: 8,
            drain_patience: Duration::from_secs(1),
            post_patience: Duration::from_secs(5),
            peer_patience: Duration::from_millis(2500),
            backoff: Duration::from_millis(20),
            backoff_max: Duration::from_secs(2),
            message_bytes: 64 << 20,
            room_pause: Duration::from_millis(1),
            room_pause_max: Duration::from_millis(100),
        }
    }
}

/// All transfers of this process.
///
/// A path or peer that was removed, or never was, is passed over silently: late news of it may still come.
#[derive(Debug)]
pub struct Transfers {
    options: Options,
    peers: BTreeMap<PeerId, Peer>,
    paths: BTreeMap<PathId, Path>,
    live: Numbered<Ticket, Transfer>,
    posted: Numbered<Token, Posted>,
    /// Peers with something to post; they take turns.
    waiting: BTreeSet<PeerId>,
    last: PeerId,
    /// What happens when, if nothing else does.
    timers: BTreeSet<(Duration, Timer)>,
    actions: VecDeque<Action>,
    /// Of messages that are not over.
    message_bytes: usize,
    next_peer: u32,
    next_path: u32,
    next_ticket: u64,
    next_token: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    /// A transfer is given up.
    Deadline(Ticket),
    /// The paths of a transfer that drains are closed.
    Drain(Ticket),
    /// A path is looked at for posts that take too long.
    Stall(PathId),
    /// A path is connected again.
    Retry(PathId),
    /// A peer counts as lost.
    Lost(PeerId),
    /// A message is posted again.
    Again(Ticket),
}

#[derive(Debug)]
struct Peer {
    paths: Vec<PathId>,
    /// Transfers with something to post, and some that were given up since.
    high: VecDeque<Ticket>,
    bulk: VecDeque<Ticket>,
    /// Of the transfers in the two queues, those that were given up.
    dead: usize,
    live: BTreeSet<Ticket>,
    posts: u32,
    /// The number of the next immediate, those that are not settled, and who waits for the oldest of them.
    next_immediate: u64,
    unsettled: BTreeSet<u64>,
    blocked: VecDeque<Ticket>,
    /// Since when no path is up.
    unreachable: Option<Duration>,
    lost: bool,
    removed: bool,
}

#[derive(Debug)]
struct Path {
    peer: PeerId,
    state: PathState,
    /// Counts the connections.
    connection: u32,
    under_way: BTreeMap<Token, u64>,
    bytes: u64,
    /// Bytes a second over the last posts; None until it is known.
    rate: Option<f64>,
    /// When bytes were posted on it the last time.
    tried: Duration,
    /// Most bytes of a post that reads.
    read_bytes: u64,
    /// Before it is connected again.
    pause: Duration,
    /// It handed a post back.
    full: bool,
    /// A timer looks at it.
    watched: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PathState {
    Up,
    /// Everything posted is coming back.
    Closing,
    Down,
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
    /// Of a message.
    message_bytes: Option<usize>,
    deadline: Option<Duration>,
    drain: Option<Duration>,
    failure: Option<Failure>,
    /// In a queue of its peer.
    queued: bool,
    /// How many connections broke in a row that carried it, and the last of them.
    breaks: u32,
    broken: Option<(PathId, u32)>,
    /// For a message that found no room: the pause, and when it is over.
    room_pause: Duration,
    again: Option<Duration>,
}

#[derive(Debug, Clone)]
enum Immediate {
    None,
    Due {
        what: Told,
        /// Once it was posted for the first time.
        number: Option<u64>,
    },
    Posted {
        number: u64,
    },
    Placed,
}

/// What a peer is told.
#[derive(Debug, Clone)]
enum Told {
    Counter { counter: u32, generation: u32 },
    Message(Arc<[u8]>),
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
    /// If a limit would keep everything, or bulk transfers, from moving, or paths from ever being left alone.
    pub fn new(options: Options) -> Transfers {
        assert!(options.chunk_bytes > 0 && options.chunk_runs > 0 && options.credits > 0, "{options:?}");
        assert!(options.bulk_every > 1, "{options:?}");
        assert!(options.backoff > Duration::ZERO && options.live_max > 0, "{options:?}");
        assert!(options.room_pause > Duration::ZERO, "{options:?}");
        Transfers {
            options,
            peers: BTreeMap::new(),
            paths: BTreeMap::new(),
            live: Numbered::default(),
            posted: Numbered::default(),
            waiting: BTreeSet::new(),
            last: PeerId(0),
            timers: BTreeSet::new(),
            actions: VecDeque::new(),
            message_bytes: 0,
            next_peer: 0,
            next_path: 0,
            next_ticket: 0,
            next_token: 0,
        }
    }

    /// A peer with so many paths, none of which is up; [`Transfers::next_action`] asks to connect them.
    pub fn add_peer(&mut self, now: Duration, paths: usize) -> (PeerId, Vec<PathId>) {
        let peer = PeerId(self.next_peer);
        self.next_peer += 1;
        let mut ids = Vec::with_capacity(paths);
        for _ in 0..paths {
            let id = PathId(self.next_path);
            self.next_path += 1;
            let path = Path {
                peer,
                state: PathState::Connecting,
                connection: 0,
                under_way: BTreeMap::new(),
                bytes: 0,
                rate: None,
                tried: Duration::ZERO,
                read_bytes: self.options.chunk_bytes,
                pause: self.options.backoff,
                full: false,
                watched: false,
            };
            self.paths.insert(id, path);
            self.actions.push_back(Action::Connect(id, 0));
            ids.push(id);
        }
        let known = Peer {
            paths: ids.clone(),
            high: VecDeque::new(),
            bulk: VecDeque::new(),
            dead: 0,
            live: BTreeSet::new(),
            posts: 0,
            next_immediate: 0,
            unsettled: BTreeSet::new(),
            blocked: VecDeque::new(),
            unreachable: Some(now),
            lost: false,
            removed: false,
        };
        self.peers.insert(peer, known);
        self.timers.insert((now.saturating_add(self.options.peer_patience), Timer::Lost(peer)));
        (peer, ids)
    }

    /// Gives up all transfers of a peer and closes its paths; it is forgotten when nothing is under way any more.
    pub fn remove_peer(&mut self, now: Duration, peer: PeerId) {
        let Some(known) = self.peers.get_mut(&peer) else { return };
        known.removed = true;
        let (live, paths) = (known.live.clone(), known.paths.clone());
        live.into_iter().for_each(|ticket| self.give_up(now, ticket, Failure::PeerLost));
        for path in paths {
            self.close(now, path);
            self.settle(now, path);
        }
        self.forget(peer);
    }

    /// The paths of a peer.
    pub fn paths(&self, peer: PeerId) -> &[PathId] {
        self.peers.get(&peer).map_or(&[], |peer| &peer.paths)
    }

    /// Begins a transfer. Its memory belongs to it until [`Action::Over`]. With a peer that is lost or gone it fails at
    /// once.
    pub fn submit(&mut self, now: Duration, request: Request) -> Result<Ticket, Full> {
        let told = request.immediate.map(|(counter, generation)| Told::Counter { counter, generation });
        self.begin(now, request, told)
    }

    /// Begins a message, which is delivered once or fails; it has no order with others. One that fails otherwise than as
    /// [`Failure::NoRoom`] may have been delivered, and one whose path broke meanwhile may still be, once.
    pub fn send(
        &mut self,
        now: Duration,
        peer: PeerId,
        bytes: Arc<[u8]>,
        deadline: Duration,
        priority: Priority,
    ) -> Result<Ticket, CannotSend> {
        let len = bytes.len();
        if len > self.options.message_bytes.saturating_sub(self.message_bytes) {
            return Err(CannotSend::Bytes(self.message_bytes));
        }
        let request = Request {
            peer,
            op: Op::Write,
            runs: Vec::new(),
            immediate: None,
            deadline: Some(deadline),
            priority,
        };
        // Counted first: it may be over at once.
        self.message_bytes += len;
        let begun = self.begin(now, request, Some(Told::Message(bytes)));
        if begun.is_err() {
            self.message_bytes -= len;
        }
        Ok(begun?)
    }

    fn begin(&mut self, now: Duration, request: Request, told: Option<Told>) -> Result<Ticket, Full> {
        if self.live.len() >= self.options.live_max {
            return Err(Full(self.live.len()));
        }
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        let Request { peer, op, mut runs, deadline, priority, .. } = request;
        runs.retain(|run| run.len > 0);
        runs.reverse();
        let immediate = told.map_or(Immediate::None, |what| Immediate::Due { what, number: None });
        let message_bytes = match &immediate {
            Immediate::Due { what: Told::Message(bytes), .. } => Some(bytes.len()),
            _ => None,
        };
        let transfer = Transfer {
            peer,
            op,
            priority,
            runs,
            under_way: BTreeSet::new(),
            immediate,
            message_bytes,
            deadline,
            drain: None,
            failure: None,
            queued: false,
            breaks: 0,
            broken: None,
            room_pause: self.options.room_pause,
            again: None,
        };
        self.live.insert(ticket, transfer);
        if let Some(deadline) = deadline {
            self.timers.insert((deadline, Timer::Deadline(ticket)));
        }
        match self.peers.get_mut(&peer) {
            Some(known) if !known.lost && !known.removed => {
                known.live.insert(ticket);
                self.go_on(ticket);
            }
            _ => self.give_up(now, ticket, Failure::PeerLost),
        }
        Ok(ticket)
    }

    /// Gives a transfer up. It is over when [`Action::Over`] says so; nothing happens if it is over already.
    pub fn cancel(&mut self, now: Duration, ticket: Ticket) {
        self.give_up(now, ticket, Failure::Cancelled);
    }

    /// A path's connection of that number is there. False if it is not wanted any more: end it.
    pub fn path_up(&mut self, path: PathId, connection: u32) -> bool {
        let Some(known) = self.paths.get_mut(&path) else { return false };
        if (known.state, known.connection) != (PathState::Connecting, connection) {
            return false;
        }
        (known.state, known.full) = (PathState::Up, false);
        let id = known.peer;
        if let Some(peer) = self.peers.get_mut(&id) {
            if let Some(since) = peer.unreachable.take() {
                self.timers.remove(&(since.saturating_add(self.options.peer_patience), Timer::Lost(id)));
            }
            peer.lost = false;
        }
        true
    }

    /// Posts that read over a path have at most so many bytes from now on, at least one; None for
    /// [`Options::chunk_bytes`].
    pub fn set_read_bytes(&mut self, path: PathId, bytes: Option<u64>) {
        if let Some(path) = self.paths.get_mut(&path) {
            path.read_bytes = bytes.unwrap_or(self.options.chunk_bytes).max(1);
        }
    }

    /// A path's connection of that number broke, or could not be made. What was posted on it is still to complete.
    pub fn path_broke(&mut self, now: Duration, path: PathId, connection: u32) {
        let Some(known) = self.paths.get_mut(&path) else { return };
        if known.connection != connection {
            return;
        }
        match known.state {
            PathState::Up => known.state = PathState::Closing,
            PathState::Connecting => self.put_down(now, path),
            PathState::Closing | PathState::Down => {}
        }
        self.settle(now, path);
    }

    /// What is to be posted now, if anything; peers take turns. A post that the path does not take at the moment is handed
    /// back by [`Transfers::hand_back`].
    pub fn next_post(&mut self, now: Duration) -> Option<Post> {
        let mut peer = self.last;
        for _ in 0..self.waiting.len() {
            let after = (Bound::Excluded(peer), Bound::Unbounded);
            peer = *self.waiting.range(after).next().or_else(|| self.waiting.first())?;
            if let Some(post) = self.next_of_peer(now, peer) {
                self.last = peer;
                return Some(post);
            }
        }
        None
    }

    /// The path cannot take this post now: nothing of it is under way. It gets no other one before a completion, or
    /// [`Transfers::path_ready`].
    pub fn hand_back(&mut self, now: Duration, token: Token) {
        let Some(posted) = self.take_posted(token) else { return };
        let path = posted.path;
        if let Some(known) = self.paths.get_mut(&path) {
            known.full = true;
            // It was nobody's turn.
            if let Some(peer) = self.peers.get_mut(&known.peer) {
                peer.posts = peer.posts.wrapping_sub(1);
            }
        }
        self.post_again(posted);
        self.settle(now, path);
    }

    /// A path that handed a post back takes one again.
    pub fn path_ready(&mut self, path: PathId) {
        if let Some(path) = self.paths.get_mut(&path) {
            path.full = false;
        }
    }

    /// Something posted is over. Told twice it counts once.
    pub fn complete(&mut self, now: Duration, token: Token, completion: Completion) {
        let Some(posted) = self.take_posted(token) else { return };
        let (path, ticket) = (posted.path, posted.ticket);
        if let Some(known) = self.paths.get_mut(&path) {
            known.full = false;
            if completion == Completion::Placed {
                known.note(&posted, now, self.options.backoff);
            }
        }
        if let (Completion::Placed, Some(transfer)) = (completion, self.live.get_mut(&ticket)) {
            transfer.breaks = 0;
            if let Work::Tell { number, .. } | Work::Say { number, .. } = posted.work {
                transfer.immediate = Immediate::Placed;
                let peer = transfer.peer;
                self.settle_immediate(peer, number);
            }
        }
        match completion {
            Completion::Placed => self.go_on(ticket),
            Completion::Refused => self.give_up(now, ticket, Failure::Refused),
            Completion::Unknown => {
                self.post_again(posted);
                self.count_break(now, ticket, path);
                self.close(now, path);
            }
            Completion::NoRoom => self.pause(now, posted),
        }
        self.settle(now, path);
    }

    /// Does what is due by now.
    pub fn tick(&mut self, now: Duration) {
        while let Some((at, timer)) = self.timers.first().copied().filter(|(at, _)| *at <= now) {
            self.timers.remove(&(at, timer));
            match timer {
                Timer::Deadline(ticket) => {
                    let waits = self.live.get(&ticket).is_some_and(|transfer| transfer.again.is_some());
                    let failure = if waits { Failure::NoRoom } else { Failure::DeadlineExceeded };
                    self.give_up(now, ticket, failure);
                }
                Timer::Drain(ticket) => self.close_paths_of(now, ticket),
                Timer::Stall(path) => self.look_for_stall(now, path),
                Timer::Retry(path) => self.connect(path),
                Timer::Lost(peer) => self.lose(now, peer),
                Timer::Again(ticket) => {
                    if let Some(transfer) = self.live.get_mut(&ticket) {
                        transfer.again = None;
                    }
                    self.queue(ticket, false);
                }
            }
        }
    }

    /// When [`Transfers::tick`] has something to do next, if nothing else happens.
    pub fn next_tick(&self) -> Option<Duration> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// What is to be done next beside posting.
    pub fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Whether a path carries transfers now.
    pub fn is_up(&self, path: PathId) -> bool {
        self.paths.get(&path).is_some_and(|path| path.state == PathState::Up)
    }

    /// Bytes a second of the last posts of a path, each by itself; None before the first.
    pub fn rate(&self, path: PathId) -> Option<f64> {
        self.paths.get(&path)?.rate
    }

    /// Posts under way on a path.
    pub fn under_way(&self, path: PathId) -> usize {
        self.paths.get(&path).map_or(0, |path| path.under_way.len())
    }

    /// Entries of a peer's queues: its transfers with something to post, and some that were given up.
    pub fn queued(&self, peer: PeerId) -> usize {
        self.peers.get(&peer).map_or(0, |peer| peer.high.len() + peer.bulk.len())
    }

    /// Transfers that are not over.
    pub fn live(&self) -> usize {
        self.live.len()
    }

    /// How many more can begin.
    pub fn room(&self) -> usize {
        self.options.live_max.saturating_sub(self.live.len())
    }

    fn next_of_peer(&mut self, now: Duration, id: PeerId) -> Option<Post> {
        let path = self.best_path(now, id)?;
        loop {
            let peer = self.peers.get_mut(&id)?;
            let bulk_first = peer.posts.is_multiple_of(self.options.bulk_every);
            let queue = match (peer.high.is_empty(), peer.bulk.is_empty()) {
                (true, true) => {
                    self.waiting.remove(&id);
                    return None;
                }
                (false, false) if bulk_first => &mut peer.bulk,
                (false, _) => &mut peer.high,
                (true, false) => &mut peer.bulk,
            };
            let ticket = queue.pop_front()?;
            if !self.live.get(&ticket).is_some_and(|transfer| transfer.queued) {
                peer.dead = peer.dead.saturating_sub(1);
                continue;
            }
            let Some(work) = self.next_work(ticket, path) else { continue };
            if let Some(peer) = self.peers.get_mut(&id) {
                peer.posts = peer.posts.wrapping_add(1);
            }
            let post = self.post(now, ticket, path, work);
            self.queue(ticket, false);
            return Some(post);
        }
    }

    /// The path that would be done first with one more chunk, of those that take one; or one that others were preferred to
    /// for so long that it may be faster by now.
    fn best_path(&self, now: Duration, peer: PeerId) -> Option<PathId> {
        let chunk_bytes = self.options.chunk_bytes;
        let paths = || self.peers.get(&peer).into_iter().flat_map(|peer| &peer.paths);
        let known = || paths().filter_map(|id| self.paths.get_key_value(id));
        // Of those that can be preferred to others.
        let latest =
            known().filter(|(_, path)| path.state == PathState::Up).map(|(_, path)| path.tried).max()?;
        let usable = |(id, path): (&PathId, &Path)| {
            let most = if path.rate.is_none() { 1 } else { self.options.credits as usize };
            let takes = path.state == PathState::Up && !path.full && path.under_way.len() < most;
            let is_tried =
                path.tried < latest && path.under_way.is_empty() && now >= path.try_again_at(chunk_bytes);
            // One whose rate is not known is tried.
            let seconds = match path.rate.filter(|_| !is_tried) {
                Some(rate) => path.bytes.saturating_add(chunk_bytes) as f64 / rate,
                None => 0.0,
            };
            takes.then_some((seconds, *id))
        };
        let best = known().filter_map(usable).min_by(|one, other| one.0.total_cmp(&other.0));
        best.map(|(_, path)| path)
    }

    /// Takes what a transfer posts next on a path, if it has something to post now.
    fn next_work(&mut self, ticket: Ticket, path: PathId) -> Option<Work> {
        let transfer = self.live.get_mut(&ticket)?;
        transfer.queued = false;
        if !transfer.runs.is_empty() {
            let (op, options) = (transfer.op, &self.options);
            let known = self.paths.get(&path).filter(|_| op == Op::Read);
            let bytes = known.map_or(options.chunk_bytes, |path| path.read_bytes);
            return Some(Work::Move { op, runs: transfer.take_chunk(bytes, options.chunk_runs) });
        }
        let Immediate::Due { what, number } = &transfer.immediate else { return None };
        if !transfer.under_way.is_empty() {
            return None;
        }
        let peer = self.peers.get_mut(&transfer.peer)?;
        let number = match number {
            Some(number) => *number,
            // The receiver could not tell the oldest from one that it has forgotten.
            None if peer.next_immediate - peer.unsettled.first().unwrap_or(&peer.next_immediate)
                >= IMMEDIATES_AHEAD =>
            {
                peer.blocked.push_back(ticket);
                return None;
            }
            None => {
                let number = peer.next_immediate;
                peer.next_immediate += 1;
                peer.unsettled.insert(number);
                number
            }
        };
        let work = what.clone().work(number);
        transfer.immediate = Immediate::Posted { number };
        Some(work)
    }

    fn post(&mut self, now: Duration, ticket: Ticket, path: PathId, work: Work) -> Post {
        let token = Token(self.next_token);
        self.next_token += 1;
        if let Some(transfer) = self.live.get_mut(&ticket) {
            transfer.under_way.insert(token);
        }
        if let Some(known) = self.paths.get_mut(&path) {
            known.under_way.insert(token, work.bytes());
            known.bytes += work.bytes();
            if work.bytes() > 0 {
                known.tried = now;
            }
            if !std::mem::replace(&mut known.watched, true) {
                self.timers.insert((now.saturating_add(self.options.post_patience), Timer::Stall(path)));
            }
        }
        self.posted.insert(token, Posted { ticket, path, work: work.clone(), at: now });
        Post { path, token, ticket, work }
    }

    fn take_posted(&mut self, token: Token) -> Option<Posted> {
        let posted = self.posted.remove(&token)?;
        if let Some(path) = self.paths.get_mut(&posted.path) {
            path.bytes -= path.under_way.remove(&token).unwrap_or(0);
        }
        if let Some(transfer) = self.live.get_mut(&posted.ticket) {
            transfer.under_way.remove(&token);
        }
        Some(posted)
    }

    /// What was posted is to be posted again, unless its transfer was given up.
    fn post_again(&mut self, posted: Posted) {
        if let Some(transfer) = self.live.get_mut(&posted.ticket) {
            match posted.work {
                Work::Move { runs, .. } => transfer.runs.extend(runs.into_iter().rev()),
                Work::Tell { number, counter, generation } => {
                    let what = Told::Counter { counter, generation };
                    transfer.immediate = Immediate::Due { what, number: Some(number) };
                }
                Work::Say { number, bytes } => {
                    transfer.immediate = Immediate::Due { what: Told::Message(bytes), number: Some(number) };
                }
            }
        }
        // What was begun comes first.
        self.queue(posted.ticket, true);
        self.go_on(posted.ticket);
    }

    /// There was no room for a message: it is posted again after a pause.
    fn pause(&mut self, now: Duration, posted: Posted) {
        let ticket = posted.ticket;
        if let Some(transfer) = self.live.get_mut(&ticket) {
            transfer.breaks = 0;
            if transfer.failure == Some(Failure::DeadlineExceeded) {
                transfer.failure = Some(Failure::NoRoom);
            }
            if transfer.failure.is_none() {
                let again = now.saturating_add(transfer.room_pause);
                transfer.again = Some(again);
                self.timers.insert((again, Timer::Again(ticket)));
                let longest = self.options.room_pause_max.max(self.options.room_pause);
                transfer.room_pause = transfer.room_pause.saturating_mul(2).min(longest);
            }
        }
        self.post_again(posted);
    }

    fn count_break(&mut self, now: Duration, ticket: Ticket, path: PathId) {
        let broken = self.paths.get(&path).map(|known| (path, known.connection));
        let Some(transfer) = self.live.get_mut(&ticket) else { return };
        // All that one connection carried comes back.
        transfer.breaks += u32::from(transfer.broken != broken);
        transfer.broken = broken;
        if transfer.breaks > self.options.breaks_max {
            self.give_up(now, ticket, Failure::PathsBreak);
        }
    }

    /// Ends a transfer if it is over, or sees to it that it is asked for its next post.
    fn go_on(&mut self, ticket: Ticket) {
        let Some(transfer) = self.live.get(&ticket) else { return };
        let outcome = match transfer.failure {
            _ if !transfer.under_way.is_empty() => return self.queue(ticket, false),
            // It was delivered while it drained.
            Some(_) if transfer.is_delivered() => Ok(()),
            Some(failure) => Err(failure),
            None if transfer.has_more() => return self.queue(ticket, false),
            None => Ok(()),
        };
        let Some(transfer) = self.live.remove(&ticket) else { return };
        transfer.deadline.map(|at| self.timers.remove(&(at, Timer::Deadline(ticket))));
        transfer.drain.map(|at| self.timers.remove(&(at, Timer::Drain(ticket))));
        transfer.again.map(|at| self.timers.remove(&(at, Timer::Again(ticket))));
        self.message_bytes -= transfer.message_bytes.unwrap_or(0);
        if let Immediate::Due { number: Some(number), .. } | Immediate::Posted { number } = transfer.immediate
        {
            self.settle_immediate(transfer.peer, number);
        }
        if let Some(peer) = self.peers.get_mut(&transfer.peer) {
            peer.live.remove(&ticket);
        }
        self.actions.push_back(Action::Over(ticket, outcome));
        self.forget(transfer.peer);
    }

    /// An immediate was placed, or never will be: the next ones may go ahead of it.
    fn settle_immediate(&mut self, peer: PeerId, number: u64) {
        let Some(known) = self.peers.get_mut(&peer) else { return };
        let was_oldest = known.unsettled.first() == Some(&number);
        known.unsettled.remove(&number);
        if was_oldest {
            let blocked = std::mem::take(&mut known.blocked);
            blocked.into_iter().for_each(|ticket| self.queue(ticket, false));
        }
    }

    fn queue(&mut self, ticket: Ticket, first: bool) {
        let Some(transfer) = self.live.get_mut(&ticket) else { return };
        if transfer.queued || transfer.failure.is_some() || !transfer.can_post() {
            return;
        }
        let Some(peer) = self.peers.get_mut(&transfer.peer) else { return };
        transfer.queued = true;
        let queue = match transfer.priority {
            Priority::High => &mut peer.high,
            Priority::Bulk => &mut peer.bulk,
        };
        if first {
            queue.push_front(ticket)
        } else {
            queue.push_back(ticket)
        }
        self.waiting.insert(transfer.peer);
    }

    /// From now on a transfer posts nothing; the first reason counts.
    fn give_up(&mut self, now: Duration, ticket: Ticket, failure: Failure) {
        let Some(transfer) = self.live.get_mut(&ticket) else { return };
        if transfer.failure.is_none() {
            transfer.failure = Some(failure);
            transfer.runs = Vec::new();
            if !transfer.under_way.is_empty() {
                let drain = now.saturating_add(self.options.drain_patience);
                transfer.drain = Some(drain);
                self.timers.insert((drain, Timer::Drain(ticket)));
            }
            let queued = std::mem::take(&mut transfer.queued);
            let peer = transfer.peer;
            if queued {
                self.drop_from_queue(peer);
            }
        }
        self.go_on(ticket);
    }

    /// One more entry of a peer's queues is of a transfer that was given up. They are cleared away by the half.
    fn drop_from_queue(&mut self, peer: PeerId) {
        let Some(known) = self.peers.get_mut(&peer) else { return };
        known.dead += 1;
        if known.dead * 2 <= known.high.len() + known.bulk.len() {
            return;
        }
        let live = |ticket: &Ticket| self.live.get(ticket).is_some_and(|transfer| transfer.queued);
        known.high.retain(live);
        known.bulk.retain(live);
        known.dead = 0;
    }

    fn close_paths_of(&mut self, now: Duration, ticket: Ticket) {
        let Some(transfer) = self.live.get_mut(&ticket) else { return };
        transfer.drain = None;
        let tokens = transfer.under_way.iter().filter_map(|token| self.posted.get(token));
        let paths: BTreeSet<PathId> = tokens.map(|posted| posted.path).collect();
        for path in paths {
            self.close(now, path);
        }
    }

    /// Closes a path that has a post which takes too long; else looks again when one might.
    fn look_for_stall(&mut self, now: Duration, path: PathId) {
        let Some(known) = self.paths.get_mut(&path) else { return };
        let oldest = known.under_way.keys().next().and_then(|token| self.posted.get(token));
        let Some(oldest) = oldest else {
            known.watched = false;
            return;
        };
        let at = oldest.at.saturating_add(self.options.post_patience);
        if at <= now {
            known.watched = false;
            self.close(now, path);
        } else {
            self.timers.insert((at, Timer::Stall(path)));
        }
    }

    /// Ends a path's connection, if it has one.
    fn close(&mut self, now: Duration, path: PathId) {
        let Some(known) = self.paths.get_mut(&path) else { return };
        if known.state == PathState::Up {
            known.state = PathState::Closing;
            self.actions.push_back(Action::Close(path, known.connection));
            self.settle(now, path);
        }
    }

    /// A path is connected again when its pause is over.
    fn put_down(&mut self, now: Duration, path: PathId) {
        let Some(known) = self.paths.get_mut(&path) else { return };
        known.state = PathState::Down;
        if self.peers.get(&known.peer).is_none_or(|peer| peer.removed) {
            return;
        }
        // Not all paths of a host that is back at the same instant.
        let part =
            path.0.wrapping_mul(0x9e37_79b9).wrapping_add(known.connection.wrapping_mul(0x85eb_ca6b)) >> 24;
        let pause = known.pause.saturating_add(known.pause / 1024 * part);
        known.pause = known.pause.saturating_mul(2).min(self.options.backoff_max);
        self.timers.insert((now.saturating_add(pause), Timer::Retry(path)));
    }

    fn connect(&mut self, path: PathId) {
        let Some(known) = self.paths.get_mut(&path) else { return };
        if known.state == PathState::Down {
            known.state = PathState::Connecting;
            known.connection = known.connection.wrapping_add(1);
            self.actions.push_back(Action::Connect(path, known.connection));
        }
    }

    /// A closing path is down when everything has come back. Notes when a peer cannot be reached any more.
    fn settle(&mut self, now: Duration, path: PathId) {
        let Some(known) = self.paths.get(&path) else { return };
        let id = known.peer;
        if known.state == PathState::Closing && known.under_way.is_empty() {
            self.put_down(now, path);
        }
        let is_up = |path: &PathId| self.paths.get(path).is_some_and(|path| path.state == PathState::Up);
        let Some(peer) = self.peers.get_mut(&id) else { return };
        if peer.unreachable.is_none() && !peer.paths.iter().any(is_up) {
            peer.unreachable = Some(now);
            self.timers.insert((now.saturating_add(self.options.peer_patience), Timer::Lost(id)));
        }
        self.forget(id);
    }

    fn lose(&mut self, now: Duration, id: PeerId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        if peer.removed {
            return;
        }
        peer.lost = true;
        let live = peer.live.clone();
        self.actions.push_back(Action::Lost(id));
        live.into_iter().for_each(|ticket| self.give_up(now, ticket, Failure::PeerLost));
    }

    /// Forgets a removed peer of which nothing is under way.
    fn forget(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get(&id) else { return };
        let idle = |path: &PathId| self.paths.get(path).is_none_or(|path| path.under_way.is_empty());
        if !peer.removed || !peer.live.is_empty() || !peer.paths.iter().all(idle) {
            return;
        }
        let Some(peer) = self.peers.remove(&id) else { return };
        peer.paths.iter().for_each(|path| drop(self.paths.remove(path)));
        self.waiting.remove(&id);
    }
}

impl Path {
    /// When a path may have a post although others seem faster: so that at most a small part of the time is lost to one that
    /// is still as slow as it was.
    fn try_again_at(&self, chunk_bytes: u64) -> Duration {
        let chunk = self.rate.map_or(0.0, |rate| chunk_bytes as f64 / rate);
        let pause = (chunk * TRIED_SHARE).clamp(TRY_AGAIN.as_secs_f64(), TRY_AGAIN_MAX.as_secs_f64());
        self.tried.saturating_add(Duration::from_secs_f64(pause))
    }

    /// A post was placed.
    fn note(&mut self, posted: &Posted, now: Duration, backoff: Duration) {
        self.pause = backoff;
        if posted.work.bytes() > 0 {
            let seconds = now.saturating_sub(posted.at).as_secs_f64().max(1e-9);
            let rate = posted.work.bytes() as f64 / seconds;
            self.rate = Some(self.rate.map_or(rate, |known| known * 0.875 + rate * 0.125));
        }
    }
}

impl Transfer {
    /// The next runs, within the limits of one post.
    fn take_chunk(&mut self, bytes: u64, most: usize) -> Vec<Run> {
        let mut chunk = Vec::new();
        let mut left = bytes;
        while left > 0 && chunk.len() < most {
            let Some(run) = self.runs.pop() else { break };
            let (run, rest) = run.split(run.len.min(left));
            if rest.len > 0 {
                self.runs.push(rest);
            }
            left -= run.len;
            chunk.push(run);
        }
        chunk
    }

    fn has_more(&self) -> bool {
        !self.runs.is_empty() || matches!(self.immediate, Immediate::Due { .. })
    }

    /// Whether it is a message that its peer has.
    fn is_delivered(&self) -> bool {
        self.message_bytes.is_some() && matches!(self.immediate, Immediate::Placed)
    }

    fn can_post(&self) -> bool {
        if self.again.is_some() {
            return false;
        }
        !self.runs.is_empty() || (self.under_way.is_empty() && self.has_more())
    }
}

impl Work {
    fn bytes(&self) -> u64 {
        match self {
            Work::Move { runs, .. } => runs.iter().map(|run| run.len).sum(),
            Work::Say { bytes, .. } => bytes.len() as u64,
            Work::Tell { .. } => 0,
        }
    }
}

impl Told {
    fn work(self, number: u64) -> Work {
        match self {
            Told::Counter { counter, generation } => Work::Tell { number, counter, generation },
            Told::Message(bytes) => Work::Say { number, bytes },
        }
    }
}
