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
//!
//! Paths come and go while a peer lives. Each serves some routes: bytes between two kinds of memory, or words (immediates and
//! messages). A post takes the fastest path of the best class that is up and serves its route.

mod ending;
mod options;
mod paths;
mod peers;
mod queue;
mod rate;
mod reach;
mod requests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

pub use self::options::Options;
pub use self::reach::{Between, Memory, PathSpec, Reach, Route, Stretch};
pub use self::requests::{
    Action, CannotSend, Completion, Failure, Full, Op, PathId, PeerId, Post, Priority, Request, Ticket,
    Token, Work,
};

use self::rate::Rate;
use crate::numbered::Numbered;

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
    /// A peer counts as lost for a route.
    Lost(PeerId, Route),
    /// A message is posted again.
    Again(Ticket),
}

#[derive(Debug)]
struct Peer {
    paths: Vec<PathId>,
    /// By route.
    queues: [Queue; Route::ALL.len()],
    /// The route of the last post.
    turn: usize,
    /// Of the entries of all queues, those of transfers that were given up.
    dead: usize,
    live: BTreeSet<Ticket>,
    posts: u32,
    /// The number of the next immediate, those that are not settled, and who waits for the oldest of them.
    next_immediate: u64,
    unsettled: BTreeSet<u64>,
    blocked: VecDeque<Ticket>,
    /// By route: since when no path is up that serves it.
    unreachable: [Option<Duration>; Route::ALL.len()],
    /// The routes for which that was too long ago.
    lost: Reach,
    removed: bool,
}

/// Transfers of a peer with something to post on a route, and some that were given up since.
#[derive(Debug, Default)]
struct Queue {
    high: VecDeque<Ticket>,
    bulk: VecDeque<Ticket>,
}

#[derive(Debug)]
struct Path {
    peer: PeerId,
    state: PathState,
    /// Counts the connections.
    connection: u32,
    under_way: BTreeMap<Token, u64>,
    bytes: u64,
    rate: Rate,
    /// When bytes were posted on it the last time.
    tried: Duration,
    spec: PathSpec,
    /// It is forgotten when everything posted is back.
    removed: bool,
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
    /// Not posted yet; of each the next run is the last one, and none is empty.
    stretches: Vec<Stretch>,
    under_way: BTreeSet<Token>,
    immediate: Immediate,
    /// Of a message.
    message_bytes: Option<usize>,
    deadline: Option<Duration>,
    drain: Option<Duration>,
    failure: Option<Failure>,
    /// The routes in whose queues of its peer it is.
    queued: Reach,
    /// How many connections broke in a row that carried it, and the last of them.
    breaks: u32,
    broken: Option<(PathId, u32)>,
    /// For a message that found no room: the pause, and when it is over.
    room_pause: Duration,
    again: Option<Duration>,
    /// That was the last answer.
    no_room: bool,
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
    /// Most runs of a post.
    pub(crate) fn post_runs(&self) -> usize {
        self.options.chunk_runs
    }

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
            stretches: Vec::new(),
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
        let Request { peer, op, mut stretches, deadline, priority, .. } = request;
        for stretch in &mut stretches {
            stretch.runs.retain(|run| run.len > 0);
            stretch.runs.reverse();
        }
        stretches.retain(|stretch| !stretch.runs.is_empty());
        let immediate = told.map_or(Immediate::None, |what| Immediate::Due { what, number: None });
        let message_bytes = match &immediate {
            Immediate::Due { what: Told::Message(bytes), .. } => Some(bytes.len()),
            _ => None,
        };
        let transfer = Transfer {
            peer,
            op,
            priority,
            stretches,
            under_way: BTreeSet::new(),
            immediate,
            message_bytes,
            deadline,
            drain: None,
            failure: None,
            queued: Reach::NOTHING,
            breaks: 0,
            broken: None,
            room_pause: self.options.room_pause,
            no_room: false,
            again: None,
        };
        self.live.insert(ticket, transfer);
        if let Some(deadline) = deadline {
            self.timers.insert((deadline, Timer::Deadline(ticket)));
        }
        match self.peers.get_mut(&peer) {
            Some(known) if !known.removed => {
                known.live.insert(ticket);
                let lost = known.lost;
                match self.routes_needed(ticket).overlaps(lost) {
                    false => self.go_on(ticket),
                    true => self.give_up(now, ticket, Failure::PeerLost),
                }
            }
            _ => self.give_up(now, ticket, Failure::PeerLost),
        }
        Ok(ticket)
    }

    /// Gives a transfer up. It is over when [`Action::Over`] says so; nothing happens if it is over already.
    pub fn cancel(&mut self, now: Duration, ticket: Ticket) {
        self.give_up(now, ticket, Failure::Cancelled);
    }

    /// Something posted is over. Told twice it counts once.
    pub fn complete(&mut self, now: Duration, token: Token, completion: Completion) {
        let Some(posted) = self.take_posted(now, token, completion == Completion::Placed) else { return };
        let (path, ticket) = (posted.path, posted.ticket);
        if let Some(known) = self.paths.get_mut(&path) {
            known.full = false;
            if completion == Completion::Placed {
                known.pause = self.options.backoff;
            }
        }
        if let (Completion::Placed, Some(transfer)) = (completion, self.live.get_mut(&ticket)) {
            transfer.breaks = 0;
            if let Work::Immediate { number, .. } | Work::Message { number, .. } = posted.work {
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
            Completion::GpuFailed => self.give_up(now, ticket, Failure::Gpu),
        }
        self.settle(now, path);
    }

    /// Does what is due by now.
    pub fn tick(&mut self, now: Duration) {
        while let Some((at, timer)) = self.timers.first().copied().filter(|(at, _)| *at <= now) {
            self.timers.remove(&(at, timer));
            match timer {
                Timer::Deadline(ticket) => {
                    // Also if its pause is over and nobody came to post it again.
                    let failure = match self.live.get(&ticket) {
                        Some(transfer) if transfer.no_room => Failure::NoRoom,
                        _ => Failure::DeadlineExceeded,
                    };
                    self.give_up(now, ticket, failure);
                }
                Timer::Drain(ticket) => self.close_paths_of(now, ticket),
                Timer::Stall(path) => self.look_for_stall(now, path),
                Timer::Retry(path) => self.connect(path),
                Timer::Lost(peer, route) => self.lose(now, peer, route),
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

    /// Transfers that are not over.
    pub fn live(&self) -> usize {
        self.live.len()
    }

    /// How many more can begin.
    pub fn room(&self) -> usize {
        self.options.live_max.saturating_sub(self.live.len())
    }

    /// What is kept, by kind: nothing when all is over and all peers were removed.
    #[cfg(test)]
    pub(crate) fn left_over(&self) -> [(&'static str, usize); 7] {
        [
            ("known peers", self.peers.len()),
            ("known paths", self.paths.len()),
            ("transfers", self.live.len()),
            ("posts", self.posted.len()),
            ("timers", self.timers.len()),
            ("actions", self.actions.len()),
            ("bytes of messages", self.message_bytes),
        ]
    }
}
