//! Whose turn it is, what is posted for it, and what is posted again.

use std::ops::Bound;
use std::time::Duration;

use super::{
    Failure, Immediate, Op, PathId, PeerId, Post, Posted, Priority, Ticket, Timer, Token, Told, Transfer,
    Transfers, Work,
};
use crate::immediates::IMMEDIATES_AHEAD;
use crate::runs::Run;

impl Transfers {
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

    /// Entries of a peer's queues: its transfers with something to post, and some that were given up.
    pub fn queued(&self, peer: PeerId) -> usize {
        self.peers.get(&peer).map_or(0, |peer| peer.high.len() + peer.bulk.len())
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
            transfer.no_room = false;
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

    pub(super) fn take_posted(&mut self, token: Token) -> Option<Posted> {
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
    pub(super) fn post_again(&mut self, posted: Posted) {
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
    pub(super) fn pause(&mut self, now: Duration, posted: Posted) {
        let ticket = posted.ticket;
        if let Some(transfer) = self.live.get_mut(&ticket) {
            (transfer.breaks, transfer.no_room) = (0, true);
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

    /// An immediate was placed, or never will be: the next ones may go ahead of it.
    pub(super) fn settle_immediate(&mut self, peer: PeerId, number: u64) {
        let Some(known) = self.peers.get_mut(&peer) else { return };
        let was_oldest = known.unsettled.first() == Some(&number);
        known.unsettled.remove(&number);
        if was_oldest {
            let blocked = std::mem::take(&mut known.blocked);
            blocked.into_iter().for_each(|ticket| self.queue(ticket, false));
        }
    }

    pub(super) fn queue(&mut self, ticket: Ticket, first: bool) {
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

    /// One more entry of a peer's queues is of a transfer that was given up. They are cleared away by the half.
    pub(super) fn drop_from_queue(&mut self, peer: PeerId) {
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

    pub(super) fn has_more(&self) -> bool {
        !self.runs.is_empty() || matches!(self.immediate, Immediate::Due { .. })
    }

    fn can_post(&self) -> bool {
        if self.again.is_some() {
            return false;
        }
        !self.runs.is_empty() || (self.under_way.is_empty() && self.has_more())
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
