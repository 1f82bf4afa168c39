//! Connections that end, and what was under way on them.

use std::io;
use std::time::Duration;

use rustix::net::sockopt;

use super::{Asked, Entry, Goal, LinkId, Posted, Role, Sockets};
use crate::fences::LEASE;
use crate::same_host::Card;
use crate::tcp::{Ended, Head};
use crate::transfers::{Completion, PathId, PeerId, Token};

/// How long a connection may say nothing.
const SILENT: Duration = Duration::from_millis(1500);

impl Sockets {
    /// Ends all connections, for good, but those that ask neighbours to read nothing more of this process
    /// ([`Sockets::is_pulled`]).
    pub(crate) fn end_all(&mut self) {
        self.is_closed = true;
        let is_fence = |entry: &Entry| {
            matches!(
                entry.role,
                Role::Connecting { to: Goal::Fence(_), .. }
                    | Role::Proving { to: Goal::Fence(_), .. }
                    | Role::Greeted { to: Goal::Fence(_), .. }
            )
        };
        self.remove_links(|entry| !is_fence(entry));
        // After the links: whoever finds nobody here any more knows that nothing of its own is read.
        self.card.iter().for_each(Card::clear);
        self.listeners.clear();
    }

    /// Ends these too. Nothing is under way any more.
    pub(crate) fn forsake(&mut self) {
        self.remove_links(|_| true);
        self.drain_copies();
        self.pulling.clear();
        let tokens = self.fences.take_all();
        self.give_back(tokens);
    }

    /// A connection is over.
    pub(super) fn end(&mut self, id: LinkId, why: &Ended) {
        let Some(entry) = self.remove(id) else { return };
        let now = self.now();
        let peer = entry.link.socket().peer_addr().ok();
        match entry.role {
            Role::Accepted { .. } | Role::Proved { .. } | Role::Leaving => {
                tracing::debug!(?peer, %why, "a connection ended")
            }
            Role::Serving { .. } => tracing::debug!(?peer, %why, "a peer's connection ended"),
            Role::Connecting { to, .. } | Role::Proving { to, .. } | Role::Greeted { to, .. } => {
                tracing::debug!(?peer, %why, ?to, "a connection failed");
                match to {
                    Goal::Path(path, number) => {
                        self.note_trouble(path, why);
                        self.unlink(path, id);
                        self.broke(path, number);
                    }
                    Goal::Fence(of) => self.fence_failed(now, of),
                }
            }
            Role::Up { path, number, connection, .. } => {
                tracing::info!(?peer, %why, "a path broke");
                self.note_trouble(path, why);
                // Closed first: nothing of ours is read or written any more. What the kernel has not sent, it is not to send:
                // without this it would go on behind our back for as long as the network takes.
                let _ = sockopt::set_socket_linger(&entry.link, Some(Duration::ZERO));
                drop(entry.link);
                let of_link = |posted: &&Posted| posted.link == id;
                let is_write = |posted: &Posted| matches!(posted.what, Asked::Write(_) | Asked::Pull);
                let is_pulled =
                    self.posted.values().any(|posted| of_link(&posted) && matches!(posted.what, Asked::Pull));
                let mut broken: Vec<(Token, bool)> = self
                    .posted
                    .iter()
                    .filter(|(_, posted)| of_link(posted))
                    .map(|(token, posted)| (*token, is_write(posted)))
                    .collect();
                broken.sort_unstable_by_key(|(token, _)| *token);
                broken.iter().for_each(|(token, _)| drop(self.posted.remove(token)));
                let peer = self.unlink(path, id);
                self.broke(path, number);
                let (writes, others): (Vec<_>, Vec<_>) =
                    broken.into_iter().partition(|(_, is_write)| *is_write);
                let tokens: Vec<Token> = writes.into_iter().map(|(token, _)| token).collect();
                self.give_back(others.into_iter().map(|(token, _)| token).collect());
                match peer.and_then(|peer| self.peers.get(&peer)).filter(|_| !tokens.is_empty()) {
                    Some(peer) => {
                        // After it was closed: until then its bytes went out, and this thread may have been stopped.
                        let now = self.now();
                        let neighbour = entry.neighbour.filter(|_| is_pulled);
                        let lease = neighbour.is_none().then_some(LEASE);
                        self.fences.add(now, connection, peer.whom.clone(), tokens, lease);
                        self.pulling.extend(neighbour.map(|neighbour| (connection, neighbour)));
                        self.see_to_fences(now);
                    }
                    None => self.give_back(tokens),
                }
            }
        }
    }

    pub(super) fn note_trouble(&mut self, path: PathId, why: &dyn std::fmt::Display) {
        if let Some(path) = self.paths.get_mut(&path) {
            path.trouble = Some(why.to_string());
        }
    }

    /// The path has this connection no more. Answers its peer.
    pub(super) fn unlink(&mut self, path: PathId, link: LinkId) -> Option<PeerId> {
        let path = self.paths.get_mut(&path)?;
        if path.link == Some(link) {
            path.link = None;
        }
        Some(path.peer)
    }

    pub(super) fn see_to_fences(&mut self, now: Duration) {
        let over = self.fences.take_over(now);
        self.give_back(over);
        for (connection, address) in self.fences.take_due(now) {
            if let Err(error) = self.open_link(address, Goal::Fence(connection)) {
                tracing::debug!(%address, %error, "cannot connect");
                self.fence_failed(now, connection);
            }
        }
    }

    /// Nothing touches the memory of these posts any more, but a GPU that still copies: then that is told when it is done.
    pub(super) fn give_back(&mut self, tokens: Vec<Token>) {
        for token in tokens.into_iter().filter(|token| !self.staging.holds(*token)).collect::<Vec<_>>() {
            self.completed(token, Completion::Unknown);
        }
    }

    /// Ends connections that say nothing, unless nobody has listened, and says something where nobody else does.
    pub(super) fn look(&mut self, now: Duration, is_late: bool) {
        let silent = |entry: &Entry| now.saturating_sub(entry.heard);
        let is_dead = |entry: &Entry| !is_late && silent(entry) >= SILENT;
        let dead: Vec<LinkId> =
            self.links.iter().filter(|(_, entry)| is_dead(entry)).map(|(link, _)| *link).collect();
        for link in dead {
            self.end(link, &Ended::Io(io::ErrorKind::TimedOut.into()));
        }
        // Whoever speaks TLS speaks at once. A peer that waits for us to speak is told so before it gives up.
        let is_mute = |entry: &Entry| {
            matches!(entry.role, Role::Accepted { .. })
                && entry.link.awaits_first_word()
                && !is_late
                && silent(entry) >= SILENT / 2
        };
        let mute: Vec<LinkId> =
            self.links.iter().filter(|(_, entry)| is_mute(entry)).map(|(link, _)| *link).collect();
        mute.into_iter().for_each(|link| self.end(link, &Ended::NoTls));
        let stamp = |entry: &Entry| if let Role::Up { stamp, .. } = entry.role { Some(stamp) } else { None };
        let up: Vec<(LinkId, u64)> =
            self.links.iter().filter_map(|(link, entry)| Some((*link, stamp(entry)?))).collect();
        up.into_iter().for_each(|(link, stamp)| self.say(link, Head::Ping { stamp }.encode().to_vec()));
        let immediates = &mut self.immediates;
        self.sessions.forget_old(now, |session| immediates.forget(session));
    }
}
