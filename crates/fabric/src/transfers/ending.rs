//! Ends transfers: done, or given up and drained.

use std::collections::BTreeSet;
use std::time::Duration;

use super::{Action, Failure, Immediate, LiveTransfer, PathId, Ticket, Timer, Transfers};

impl Transfers {
    /// Ends a transfer that has nothing to post and nothing under way, else queues it for its next post.
    pub(super) fn advance(&mut self, ticket: Ticket) {
        let Some(transfer) = self.live.get(&ticket) else { return };
        let outcome = match transfer.failure {
            _ if !transfer.under_way.is_empty() => return self.queue(ticket, false),
            // The peer got the message while it drained.
            Some(_) if transfer.is_delivered() => Ok(()),
            Some(failure) => Err(failure),
            None if transfer.has_more() => return self.queue(ticket, false),
            None => Ok(()),
        };
        let Some(transfer) = self.live.remove(&ticket) else { return };
        transfer.deadline.map(|at| self.timers.remove(&(at, Timer::Deadline(ticket))));
        transfer.drain.map(|at| self.timers.remove(&(at, Timer::Drain(ticket))));
        transfer.resend_at.map(|at| self.timers.remove(&(at, Timer::Resend(ticket))));
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

    /// Stops a transfer from posting, and begins to drain it. The first reason counts.
    pub(super) fn give_up(&mut self, now: Duration, ticket: Ticket, failure: Failure) {
        let Some(transfer) = self.live.get_mut(&ticket) else { return };
        if transfer.failure.is_none() {
            transfer.failure = Some(failure);
            transfer.stretches = Vec::new();
            if !transfer.under_way.is_empty() {
                let drain = now.saturating_add(self.options.drain_patience);
                transfer.drain = Some(drain);
                self.timers.insert((drain, Timer::Drain(ticket)));
            }
            let queued = std::mem::take(&mut transfer.queued);
            let peer = transfer.peer;
            self.drop_from_queues(peer, queued.len());
        }
        self.advance(ticket);
    }

    /// Closes the paths of a transfer that has not drained in time.
    pub(super) fn close_paths_of(&mut self, now: Duration, ticket: Ticket) {
        let Some(transfer) = self.live.get_mut(&ticket) else { return };
        transfer.drain = None;
        let tokens = transfer.under_way.iter().filter_map(|token| self.posted.get(token));
        let paths: BTreeSet<PathId> = tokens.map(|posted| posted.path).collect();
        for path in paths {
            self.close(now, path);
        }
    }

    /// Counts that a connection broke while it carried a transfer, and gives the transfer up after too many.
    pub(super) fn count_break(&mut self, now: Duration, ticket: Ticket, path: PathId) {
        let broken = self.paths.get(&path).map(|known| (path, known.connection));
        let Some(transfer) = self.live.get_mut(&ticket) else { return };
        // Each post of a broken connection comes back, but the connection counts once.
        transfer.breaks += u32::from(transfer.broken != broken);
        transfer.broken = broken;
        if transfer.breaks > self.options.breaks_max {
            self.give_up(now, ticket, Failure::PathsBreak);
        }
    }
}

impl LiveTransfer {
    /// Whether it is a message that the peer has.
    fn is_delivered(&self) -> bool {
        self.message_bytes.is_some() && matches!(self.immediate, Immediate::Placed)
    }
}
