//! Ends connections, and completes the posts that were in flight on them.

use std::io;
use std::time::Duration;

use rustix::net::sockopt;

use super::posted::{PostState, SocketPost};
use super::{BytesRole, SocketCarrier};
use crate::carrier::{Context, Touched};
use crate::fences::LEASE;
use crate::links::LinkId;
use crate::tcp::{Ended, Head};
use crate::transfers::{Completion, Token};

impl SocketCarrier {
    /// Ends a connection. If a job holds its link, the end waits until the job is back.
    pub(super) fn end(&mut self, cx: &mut Context<'_>, id: LinkId, why: Ended) {
        let Some((role, link, why)) = self.links.end(id, why) else { return };
        cx.note_released();
        let peer = link.socket().peer_addr().ok();
        cx.process.note_ended(peer, &why);
        let is_ours = matches!(role, BytesRole::Up { .. });
        match role {
            BytesRole::Serving { .. } => {
                tracing::debug!(?peer, %why, "a peer's connection ended");
                drop(link);
                self.slots.detach(id, |_| None);
            }
            BytesRole::Dialling { path, number, .. } => {
                tracing::debug!(?peer, %why, "a connection failed");
                self.paths.remove(&path);
                cx.broke(path, number, why);
            }
            BytesRole::Up { path, number, peer: whose, connection, .. } => {
                // Log: a data connection to a peer ended; it is opened again, and transfers use other paths
                // meanwhile. Do: look at the peer's log if it repeats.
                tracing::info!(?peer, %why, "a path broke");
                self.paths.remove(&path);
                // Closed first, so that nothing of ours is read or written any more. Linger 0 also discards what the
                // kernel has not sent, which it would otherwise keep sending for as long as the network takes.
                let _ = sockopt::set_socket_linger(&*link, Some(Duration::ZERO));
                drop(link);
                self.slots.detach(id, |token| is_ours.then(|| Token::from_number(token)));
                let is_write = |posted: &SocketPost| matches!(posted.state, PostState::Write(_));
                let of_link = self.posted.iter().filter(|(_, posted)| posted.link == id);
                let mut broken: Vec<(Token, bool)> =
                    of_link.map(|(token, posted)| (*token, is_write(posted))).collect();
                broken.sort_unstable_by_key(|(token, _)| *token);
                broken.iter().for_each(|(token, _)| drop(self.posted.remove(token)));
                cx.broke(path, number, why);
                let (writes, others): (Vec<_>, Vec<_>) =
                    broken.into_iter().partition(|(_, is_write)| *is_write);
                self.complete_unknown(cx, others.into_iter().map(|(token, _)| token).collect());
                let writes: Vec<Token> = writes.into_iter().map(|(token, _)| token).collect();
                if !writes.is_empty() {
                    cx.fence(whose, connection, writes, Some(LEASE));
                }
            }
        }
    }

    /// Completes posts whose memory is free again. A post that an orphan still copies completes with that copy.
    pub(super) fn complete_unknown(&mut self, cx: &mut Context<'_>, tokens: Vec<Token>) {
        for token in tokens.into_iter().filter(|token| !self.slots.has_orphan_of(*token)) {
            cx.completed(token, Completion::Unknown);
        }
    }

    /// Ends connections whose peer was silent for too long, unless this process was itself too late to hear it. Then pings on
    /// all connections that this process made.
    pub(super) fn check_liveness(&mut self, now: Duration, is_late: bool) {
        let silent = |heard: Duration| now.saturating_sub(heard);
        let dead = self.links.find(|entry| !is_late && silent(entry.heard) >= entry.progress().patience());
        for id in dead {
            self.links.fail(id, Ended::Io(io::ErrorKind::TimedOut.into()));
        }
        let stamp =
            |role: &BytesRole| if let BytesRole::Up { stamp, .. } = role { Some(*stamp) } else { None };
        let up: Vec<(LinkId, u64)> =
            self.links.iter().filter_map(|(id, entry)| Some((id, stamp(&entry.role)?))).collect();
        up.into_iter().for_each(|(id, stamp)| self.links.send_head(id, Head::Ping { stamp }));
    }

    pub(super) fn links_that_touch(&self, memory: Touched<'_>) -> Vec<LinkId> {
        let Touched { spots, reader } = memory;
        let mut busy = self.slots.links_that_touch(spots);
        busy.extend(self.links.touching(spots));
        let counts = |role: &BytesRole| reader.is_none_or(|reader| role.serves(reader));
        busy.retain(|id| self.links.get(*id).is_none_or(|entry| counts(&entry.role)));
        busy
    }
}
