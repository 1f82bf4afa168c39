//! Decides what to post next for the transfers in flight, and how each of them ends. Pure: time and outcomes come in as
//! arguments, posts and actions go out as values.
//!
//! ```text
//!             submit                  all bytes placed           immediate placed
//!  (nothing) -------> moving ------------------------> notifying -----------------> done
//!                       |    \______ no immediate _________/-----------------------^
//!                       | cancel, deadline, refused by the peer, peer lost
//!                       v
//!                    draining: posts nothing --- all of its posts have completed ---> failed
//!                       | not completed within drain_patience: closes its paths, which ends all posts on them
//! ```
//! A transfer is over, done or failed, when none of its posts is under way. Its memory may be reused then (no late write).
//! It ends exactly once.
//!
//! A path that breaks gives back all of its posts, whether or not they arrived:
//! - Bytes are posted again on another path. Writing or reading them twice changes nothing, because source and destination
//!   belong to the transfer until it is over.
//! - An immediate is sent again with the same number, by which the receiver ignores the second one ([`crate::Immediates`]).
//! - A message is an immediate with bytes of its own. If the receiver has no room for it, it is posted again after a pause,
//!   until its deadline.
//!
//! ```text
//!          tick: Connect              path_up             path_broke, an unknown completion, a post that
//!  down -----------------> connecting -------> up -----------------> closing     takes too long, a drain that does:
//!   ^                          | path_broke                             |        Close
//!   '--------------------------+<---- all of its posts completed -------'
//! ```
//! Each connection of a path has a number, by which late reports of a former connection are ignored.
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

/// All transfers of one engine.
///
/// Calls that name a path or peer that was removed do nothing, because late reports of it may still arrive.
#[derive(Debug)]
pub struct Transfers {
    options: Options,
    /// The most runs of one post, over any path that was ever added.
    most_runs: usize,
    peers: BTreeMap<PeerId, PeerState>,
    paths: BTreeMap<PathId, Path>,
    live: Numbered<Ticket, LiveTransfer>,
    posted: Numbered<Token, PostedWork>,
    /// Peers with something to post; they take turns.
    waiting: BTreeSet<PeerId>,
    /// The peer of the last post.
    last: PeerId,
    /// Each timer that runs, with the time at which it fires. A transfer's timers go when the transfer is over.
    timers: BTreeSet<(Duration, Timer)>,
    actions: VecDeque<Action>,
    /// Bytes of all messages that are not over.
    message_bytes: usize,
    next_peer: u32,
    next_path: u32,
    next_ticket: u64,
    next_token: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    /// Gives a transfer up.
    Deadline(Ticket),
    /// Closes the paths of a transfer that drains.
    Drain(Ticket),
    /// Checks a path for posts that take too long.
    Stall(PathId),
    /// Connects a path again.
    Retry(PathId),
    /// Declares a peer lost for a route.
    Lost(PeerId, Route),
    /// Posts a message again for which the peer had no room.
    Resend(Ticket),
}

#[derive(Debug)]
struct PeerState {
    paths: Vec<PathId>,
    /// By [`Route::index`].
    queues: [Queue; Route::ALL.len()],
    /// [`Route::index`] of the last post.
    turn: usize,
    /// Entries in all queues whose transfers were given up.
    dead: usize,
    live: BTreeSet<Ticket>,
    /// Posts so far, modulo 2^32: every [`Options::bulk_every`]th is bulk.
    posts: u32,
    /// The number of the next immediate or message.
    next_immediate: u64,
    /// Numbers of those whose outcome is not known.
    unsettled: BTreeSet<u64>,
    /// Transfers that wait until the oldest of `unsettled` is settled.
    blocked: VecDeque<Ticket>,
    /// By [`Route::index`]: since when no path is up that serves it.
    unreachable: [Option<Duration>; Route::ALL.len()],
    /// The routes that have been unreachable for [`Options::peer_patience`].
    lost: Reach,
    removed: bool,
}

/// Transfers of a peer with something to post on a route. Those that were given up stay until they are popped or swept.
#[derive(Debug, Default)]
struct Queue {
    high: VecDeque<Ticket>,
    bulk: VecDeque<Ticket>,
}

#[derive(Debug)]
struct Path {
    peer: PeerId,
    state: ConnectionState,
    /// The number of the current or last connection.
    connection: u32,
    /// Posts on the path, each with its bytes.
    under_way: BTreeMap<Token, u64>,
    /// The sum of `under_way`.
    bytes: u64,
    rate: Rate,
    /// When bytes were last posted on it.
    tried: Duration,
    spec: PathSpec,
    /// The path is forgotten once all of its posts have completed.
    removed: bool,
    /// The pause before the next connection.
    pause: Duration,
    /// It handed a post back, and gets none before a completion or [`Transfers::path_ready`].
    full: bool,
    /// A [`Timer::Stall`] runs for it.
    has_stall_timer: bool,
}

/// The states of the second picture above.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConnectionState {
    Up,
    /// The connection ends; the path's posts are completing.
    Closing,
    Down,
    Connecting,
}

/// A transfer that is not over.
#[derive(Debug)]
struct LiveTransfer {
    peer: PeerId,
    op: Op,
    priority: Priority,
    /// Runs to be posted, the next one last in each stretch. No stretch is empty.
    stretches: Vec<Stretch>,
    under_way: BTreeSet<Token>,
    immediate: Immediate,
    /// None: it is not a message.
    message_bytes: Option<usize>,
    deadline: Option<Duration>,
    /// When its [`Timer::Drain`] fires.
    drain: Option<Duration>,
    /// The first reason to give it up: it posts nothing more.
    failure: Option<Failure>,
    /// The routes of its peer's queues that it is in.
    queued: Reach,
    /// Connections that broke in a row while they carried it.
    breaks: u32,
    /// The last of them.
    broken: Option<(PathId, u32)>,
    /// The next pause of a message for which the peer has no room.
    room_pause: Duration,
    /// The pause runs until then, when its [`Timer::Resend`] fires.
    resend_at: Option<Duration>,
    /// The peer's last answer was that it has no room.
    no_room: bool,
}

/// The state of the notice that follows a transfer's bytes.
#[derive(Debug, Clone)]
enum Immediate {
    None,
    Due {
        what: Notice,
        /// None before the first post; a later post has the same number.
        number: Option<u64>,
    },
    Posted {
        number: u64,
    },
    Placed,
}

/// The notice itself: a count, or a message.
#[derive(Debug, Clone)]
enum Notice {
    Counter { counter: u32, generation: u32 },
    Message(Arc<[u8]>),
}

/// A post that has not completed.
#[derive(Debug)]
struct PostedWork {
    ticket: Ticket,
    path: PathId,
    work: Work,
    at: Duration,
}

impl Transfers {
    /// The most runs of one post, over any path.
    pub(crate) fn post_runs(&self) -> usize {
        self.most_runs
    }

    /// No peers and no transfers.
    ///
    /// # Panics
    /// If a limit would let nothing move (`chunk_bytes`, `chunk_runs`, `credits`, `live_max`: 0), starve a priority
    /// (`bulk_every`: below 2), or retry without a pause (`backoff`, `room_pause`: 0).
    pub fn new(options: Options) -> Transfers {
        assert!(options.chunk_bytes > 0 && options.chunk_runs > 0 && options.credits > 0, "{options:?}");
        assert!(options.bulk_every > 1, "{options:?}");
        assert!(options.backoff > Duration::ZERO && options.live_max > 0, "{options:?}");
        assert!(options.room_pause > Duration::ZERO, "{options:?}");
        Transfers {
            most_runs: options.chunk_runs,
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

    /// Begins a transfer. Its memory belongs to it until [`Action::Over`]. If the peer is lost or removed, the transfer fails
    /// at once.
    pub fn submit(&mut self, now: Duration, request: Request) -> Result<Ticket, Full> {
        let notice = request.immediate.map(|(counter, generation)| Notice::Counter { counter, generation });
        self.begin(now, request, notice)
    }

    /// Begins a message, which is delivered once or fails. Messages have no order. A message that fails, except as
    /// [`Failure::NoRoom`], may have been delivered; if its path broke, it may still be, once.
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
        // Counted first, because the message may be over at once.
        self.message_bytes += len;
        let begun = self.begin(now, request, Some(Notice::Message(bytes)));
        if begun.is_err() {
            self.message_bytes -= len;
        }
        Ok(begun?)
    }

    fn begin(&mut self, now: Duration, request: Request, notice: Option<Notice>) -> Result<Ticket, Full> {
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
        let immediate = notice.map_or(Immediate::None, |what| Immediate::Due { what, number: None });
        let message_bytes = match &immediate {
            Immediate::Due { what: Notice::Message(bytes), .. } => Some(bytes.len()),
            _ => None,
        };
        let transfer = LiveTransfer {
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
            resend_at: None,
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
                    false => self.advance(ticket),
                    true => self.give_up(now, ticket, Failure::PeerLost),
                }
            }
            _ => self.give_up(now, ticket, Failure::PeerLost),
        }
        Ok(ticket)
    }

    /// Gives a transfer up. It is over when [`Action::Over`] says so. Does nothing if it is over already.
    pub fn cancel(&mut self, now: Duration, ticket: Ticket) {
        self.give_up(now, ticket, Failure::Cancelled);
    }

    /// The transfer, path and bytes of a post that moves bytes and has not been completed.
    pub fn moves(&self, token: Token) -> Option<(Ticket, PathId, u64)> {
        let posted = self.posted.get(&token)?;
        let is_move = matches!(posted.work, Work::Move { .. });
        is_move.then(|| (posted.ticket, posted.path, posted.work.bytes()))
    }

    /// Records how a post ended. A repeated report is ignored.
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
            Completion::Placed => self.advance(ticket),
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

    /// Fires all timers that are due.
    pub fn tick(&mut self, now: Duration) {
        while let Some((at, timer)) = self.timers.first().copied().filter(|(at, _)| *at <= now) {
            self.timers.remove(&(at, timer));
            match timer {
                Timer::Deadline(ticket) => {
                    // Also if its pause is over and no path took it again.
                    let failure = match self.live.get(&ticket) {
                        Some(transfer) if transfer.no_room => Failure::NoRoom,
                        _ => Failure::DeadlineExceeded,
                    };
                    self.give_up(now, ticket, failure);
                }
                Timer::Drain(ticket) => self.close_paths_of(now, ticket),
                Timer::Stall(path) => self.check_stall(now, path),
                Timer::Retry(path) => self.connect(path),
                Timer::Lost(peer, route) => self.lose(now, peer, route),
                Timer::Resend(ticket) => {
                    if let Some(transfer) = self.live.get_mut(&ticket) {
                        transfer.resend_at = None;
                    }
                    self.queue(ticket, false);
                }
            }
        }
    }

    /// When the next timer fires.
    pub fn next_tick(&self) -> Option<Duration> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// The next thing to do besides posting, in the order in which they arose.
    pub fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Transfers that are not over.
    pub fn live(&self) -> usize {
        self.live.len()
    }

    /// How many more transfers [`Options::live_max`] lets begin.
    pub fn room(&self) -> usize {
        self.options.live_max.saturating_sub(self.live.len())
    }

    /// The number of records of each kind: none when all transfers are over and all peers were removed.
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
