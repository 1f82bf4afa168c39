//! Picks the next post: which peer's turn it is, which route, which transfer and how much of it. Also queues what has to be
//! posted again.

use std::ops::Bound;
use std::time::Duration;

use super::{
    Between, Failure, Immediate, LiveTransfer, Notice, Op, Path, PathId, PeerId, Post, PostedWork, Priority,
    Queue, Reach, Route, Stretch, Ticket, Timer, Token, Transfers, Work,
};
use crate::immediates::IMMEDIATES_AHEAD;
use crate::runs::Run;

impl Transfers {
    /// The next post, if there is one; peers take turns. If the path does not take it now, the caller calls
    /// [`Transfers::hand_back`].
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

    /// Takes a post back that its path cannot take now: nothing of it is under way. The path gets no other post before a
    /// completion or [`Transfers::path_ready`].
    pub fn hand_back(&mut self, now: Duration, token: Token) {
        let Some(posted) = self.take_posted(now, token, false) else { return };
        let path = posted.path;
        if let Some(known) = self.paths.get_mut(&path) {
            known.full = true;
            // The post does not count as a turn of its priority.
            if let Some(peer) = self.peers.get_mut(&known.peer) {
                peer.posts = peer.posts.wrapping_sub(1);
            }
        }
        self.post_again(posted);
        self.settle(now, path);
    }

    /// Entries of a peer's queues: a transfer counts for each route on which it has something to post. Some may have been
    /// given up.
    pub fn queued(&self, peer: PeerId) -> usize {
        self.peers.get(&peer).map_or(0, |peer| peer.queues.iter().map(Queue::len).sum())
    }

    /// The next post for a peer. Routes take turns, so that none waits for a path of another.
    fn next_of_peer(&mut self, now: Duration, id: PeerId) -> Option<Post> {
        let turn = self.peers.get(&id)?.turn;
        for step in 1..=Route::ALL.len() {
            let index = (turn + step) % Route::ALL.len();
            if self.peers.get(&id).is_none_or(|peer| peer.queues[index].is_empty()) {
                continue;
            }
            let route = Route::ALL[index];
            let Some(path) = self.best_path(now, id, route) else { continue };
            if let Some(post) = self.next_of_route(now, id, route, path) {
                return Some(post);
            }
        }
        if self.peers.get(&id).is_none_or(|peer| peer.queues.iter().all(Queue::is_empty)) {
            self.waiting.remove(&id);
        }
        None
    }

    fn next_of_route(&mut self, now: Duration, id: PeerId, route: Route, path: PathId) -> Option<Post> {
        loop {
            let peer = self.peers.get_mut(&id)?;
            let bulk_first = peer.posts.is_multiple_of(self.options.bulk_every);
            let ticket = peer.queues[route.index()].pop(bulk_first)?;
            if !self.live.get(&ticket).is_some_and(|transfer| transfer.queued.serves(route)) {
                peer.dead = peer.dead.saturating_sub(1);
                continue;
            }
            let Some(work) = self.next_work(ticket, route, path) else { continue };
            if let Some(peer) = self.peers.get_mut(&id) {
                peer.posts = peer.posts.wrapping_add(1);
                peer.turn = route.index();
            }
            let post = self.post(now, ticket, path, work);
            self.queue(ticket, false);
            return Some(post);
        }
    }

    /// Takes the next work of a transfer for a path and route. None: it has nothing to post there now.
    fn next_work(&mut self, ticket: Ticket, route: Route, path: PathId) -> Option<Work> {
        let transfer = self.live.get_mut(&ticket)?;
        transfer.queued = transfer.queued.without(Reach::of(&[route]));
        if route != Route::Words {
            let (op, options) = (transfer.op, &self.options);
            let path = self.paths.get(&path)?;
            let runs = path.spec.read_runs.filter(|_| op == Op::Read).unwrap_or(options.chunk_runs);
            return transfer.take_chunk(route, path.post_bytes(op, options.chunk_bytes), runs);
        }
        let Immediate::Due { what, number } = &transfer.immediate else { return None };
        if !transfer.under_way.is_empty() || !transfer.stretches.is_empty() {
            return None;
        }
        let peer = self.peers.get_mut(&transfer.peer)?;
        let number = match number {
            Some(number) => *number,
            // The receiver remembers so many numbers: further ahead, it would take the oldest for one that it has seen.
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
            transfer.no_room = false;
        }
        if let Some(known) = self.paths.get_mut(&path) {
            let bytes = work.bytes();
            known.under_way.insert(token, bytes);
            if bytes > 0 {
                known.tried = now;
                if known.bytes == 0 {
                    known.rate.begin(now);
                }
            }
            known.bytes += bytes;
            if !std::mem::replace(&mut known.has_stall_timer, true) {
                self.timers.insert((now.saturating_add(self.options.post_patience), Timer::Stall(path)));
            }
        }
        self.posted.insert(token, PostedWork { ticket, path, work: work.clone(), at: now });
        Post { path, token, ticket, work }
    }

    pub(super) fn take_posted(&mut self, now: Duration, token: Token, is_placed: bool) -> Option<PostedWork> {
        let posted = self.posted.remove(&token)?;
        if let Some(path) = self.paths.get_mut(&posted.path) {
            let bytes = path.under_way.remove(&token).unwrap_or(0);
            path.bytes -= bytes;
            if bytes > 0 {
                path.rate.note(now, is_placed.then_some(bytes));
            }
        }
        if let Some(transfer) = self.live.get_mut(&posted.ticket) {
            transfer.under_way.remove(&token);
        }
        Some(posted)
    }

    /// Queues a post's work again, unless its transfer was given up.
    pub(super) fn post_again(&mut self, posted: PostedWork) {
        if let Some(transfer) = self.live.get_mut(&posted.ticket) {
            match posted.work {
                Work::Move { between, runs, .. } => transfer.put_back(between, runs),
                Work::Immediate { number, counter, generation } => {
                    let what = Notice::Counter { counter, generation };
                    transfer.immediate = Immediate::Due { what, number: Some(number) };
                }
                Work::Message { number, bytes } => {
                    transfer.immediate =
                        Immediate::Due { what: Notice::Message(bytes), number: Some(number) };
                }
            }
        }
        // A transfer that has begun goes ahead of the others.
        self.queue(posted.ticket, true);
        self.advance(posted.ticket);
    }

    /// Pauses a message for which the peer had no room; [`Timer::Resend`] posts it again.
    pub(super) fn pause(&mut self, now: Duration, posted: PostedWork) {
        let ticket = posted.ticket;
        if let Some(transfer) = self.live.get_mut(&ticket) {
            (transfer.breaks, transfer.no_room) = (0, true);
            if transfer.failure == Some(Failure::DeadlineExceeded) {
                transfer.failure = Some(Failure::NoRoom);
            }
            if transfer.failure.is_none() {
                let resend_at = now.saturating_add(transfer.room_pause);
                transfer.resend_at = Some(resend_at);
                self.timers.insert((resend_at, Timer::Resend(ticket)));
                let longest = self.options.room_pause_max.max(self.options.room_pause);
                transfer.room_pause = transfer.room_pause.saturating_mul(2).min(longest);
            }
        }
        self.post_again(posted);
    }

    /// An immediate was placed, or is given up. If it was the oldest, transfers that waited for it may post.
    pub(super) fn settle_immediate(&mut self, peer: PeerId, number: u64) {
        let Some(known) = self.peers.get_mut(&peer) else { return };
        let was_oldest = known.unsettled.first() == Some(&number);
        known.unsettled.remove(&number);
        if was_oldest {
            let blocked = std::mem::take(&mut known.blocked);
            blocked.into_iter().for_each(|ticket| self.queue(ticket, false));
        }
    }

    /// Adds a transfer to the queues of the routes on which it has something to post; `first` puts it at their head.
    pub(super) fn queue(&mut self, ticket: Ticket, first: bool) {
        let Some(transfer) = self.live.get_mut(&ticket) else { return };
        if transfer.failure.is_some() {
            return;
        }
        let more = transfer.routes_due().without(transfer.queued);
        let Some(peer) = self.peers.get_mut(&transfer.peer) else { return };
        for route in more.routes() {
            peer.queues[route.index()].push(ticket, transfer.priority, first);
            self.waiting.insert(transfer.peer);
        }
        transfer.queued = transfer.queued.and(more);
    }

    /// Counts entries of a peer's queues whose transfers were given up. Sweeps them out once they are more than half.
    pub(super) fn drop_from_queues(&mut self, peer: PeerId, entries: usize) {
        let Some(known) = self.peers.get_mut(&peer) else { return };
        known.dead += entries;
        if known.dead * 2 <= known.queues.iter().map(Queue::len).sum() {
            return;
        }
        for route in Route::ALL {
            let live =
                |ticket: &Ticket| self.live.get(ticket).is_some_and(|transfer| transfer.queued.serves(route));
            known.queues[route.index()].retain(live);
        }
        known.dead = 0;
    }

    /// The routes of all work of a transfer that is not placed yet, posted or not.
    pub(super) fn routes_needed(&self, ticket: Ticket) -> Reach {
        let Some(transfer) = self.live.get(&ticket) else { return Reach::NOTHING };
        let mut needed = transfer.routes_of_stretches();
        if matches!(transfer.immediate, Immediate::Due { .. }) {
            needed = needed.and(Reach::of(&[Route::Words]));
        }
        let posted = transfer.under_way.iter().filter_map(|token| self.posted.get(token));
        posted.fold(needed, |needed, posted| needed.and(Reach::of(&[posted.work.route()])))
    }
}

impl Queue {
    fn len(&self) -> usize {
        self.high.len() + self.bulk.len()
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn push(&mut self, ticket: Ticket, priority: Priority, first: bool) {
        let queue = match priority {
            Priority::High => &mut self.high,
            Priority::Bulk => &mut self.bulk,
        };
        if first { queue.push_front(ticket) } else { queue.push_back(ticket) }
    }

    fn pop(&mut self, bulk_first: bool) -> Option<Ticket> {
        match bulk_first && !self.bulk.is_empty() {
            true => self.bulk.pop_front(),
            false => self.high.pop_front().or_else(|| self.bulk.pop_front()),
        }
    }

    fn retain(&mut self, is_live: impl Fn(&Ticket) -> bool) {
        self.high.retain(&is_live);
        self.bulk.retain(is_live);
    }
}

impl Path {
    /// Most bytes of one post: the path's own limit, or the engine's.
    fn post_bytes(&self, op: Op, chunk_bytes: u64) -> u64 {
        let own = match op {
            Op::Write => self.spec.write_bytes,
            Op::Read => self.spec.read_bytes,
        };
        own.unwrap_or(chunk_bytes).max(1)
    }
}

impl LiveTransfer {
    /// Takes the next runs of a route: all between the same two memories, and at most `bytes` bytes and `most` runs.
    fn take_chunk(&mut self, route: Route, bytes: u64, most: usize) -> Option<Work> {
        let index = self.stretches.iter().position(|stretch| stretch.between.route() == route)?;
        let Stretch { between, runs: waiting } = &mut self.stretches[index];
        let mut runs = Vec::new();
        let mut left = bytes;
        while left > 0 && runs.len() < most {
            let Some(run) = waiting.pop() else { break };
            let (run, rest) = run.split(run.len.min(left));
            if rest.len > 0 {
                waiting.push(rest);
            }
            left -= run.len;
            runs.push(run);
        }
        let work = Work::Move { op: self.op, between: *between, runs };
        if waiting.is_empty() {
            self.stretches.swap_remove(index);
        }
        Some(work)
    }

    /// Puts runs back that were posted, ahead of the others between the same memories.
    fn put_back(&mut self, between: Between, runs: Vec<Run>) {
        let backwards = runs.into_iter().rev();
        match self.stretches.iter_mut().find(|stretch| stretch.between == between) {
            Some(stretch) => stretch.runs.extend(backwards),
            None => self.stretches.push(Stretch { between, runs: backwards.collect() }),
        }
    }

    pub(super) fn has_more(&self) -> bool {
        !self.stretches.is_empty() || matches!(self.immediate, Immediate::Due { .. })
    }

    fn routes_of_stretches(&self) -> Reach {
        let add = |reach: Reach, stretch: &Stretch| reach.and(Reach::of(&[stretch.between.route()]));
        self.stretches.iter().fold(Reach::NOTHING, add)
    }

    /// The routes on which it has something to post now. The immediate comes only after all bytes are in place.
    fn routes_due(&self) -> Reach {
        let is_notice_next = self.stretches.is_empty() && self.under_way.is_empty() && self.has_more();
        match self.resend_at {
            Some(_) => Reach::NOTHING,
            None if is_notice_next => Reach::of(&[Route::Words]),
            None => self.routes_of_stretches(),
        }
    }
}

impl Notice {
    fn work(self, number: u64) -> Work {
        match self {
            Notice::Counter { counter, generation } => Work::Immediate { number, counter, generation },
            Notice::Message(bytes) => Work::Message { number, bytes },
        }
    }
}
