//! The states of paths, how fast each is, and which one gets the next post.

use std::time::Duration;

use super::{Action, Path, PathId, PathState, PeerId, Reach, Route, Timer, Transfers};

/// After so long without a post a path is tried again to which others were preferred, or after so many times what a chunk
/// took on it, at the most after the last of these.
const TRY_AGAIN: Duration = Duration::from_secs(1);
const TRIED_SHARE: f64 = 64.0;
const TRY_AGAIN_MAX: Duration = Duration::from_secs(10);

impl Transfers {
    /// A path's connection of that number is there. False if it is not wanted any more: end it.
    pub fn path_up(&mut self, now: Duration, path: PathId, connection: u32) -> bool {
        let Some(known) = self.paths.get_mut(&path) else { return false };
        if (known.state, known.connection) != (PathState::Connecting, connection) {
            return false;
        }
        (known.state, known.full) = (PathState::Up, false);
        let peer = known.peer;
        self.note_reach(now, peer);
        true
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

    /// A path that handed a post back takes one again.
    pub fn path_ready(&mut self, path: PathId) {
        if let Some(path) = self.paths.get_mut(&path) {
            path.full = false;
        }
    }

    /// Whether a path carries transfers now.
    pub fn is_up(&self, path: PathId) -> bool {
        self.paths.get(&path).is_some_and(|path| path.state == PathState::Up)
    }

    /// Bytes a second over the last posts of a path, in the time in which it had any; None before the first.
    pub fn rate(&self, path: PathId) -> Option<f64> {
        self.paths.get(&path)?.rate.per_second()
    }

    /// Posts under way on a path.
    pub fn under_way(&self, path: PathId) -> usize {
        self.paths.get(&path).map_or(0, |path| path.under_way.len())
    }

    /// Of the best class of paths that are up and serve a route, the path that would be done first with one more chunk, of
    /// those that take one; or one that others were preferred to for so long that it may be faster by now.
    pub(super) fn best_path(&self, now: Duration, peer: PeerId, route: Route) -> Option<PathId> {
        let chunk_bytes = self.options.chunk_bytes;
        let paths = || self.peers.get(&peer).into_iter().flat_map(|peer| &peer.paths);
        let known = || paths().filter_map(|id| self.paths.get_key_value(id));
        let serves = |path: &Path| path.state == PathState::Up && path.spec.reach.serves(route);
        let up = || known().filter(|(_, path)| serves(path));
        let class = up().map(|(_, path)| path.spec.class).min()?;
        let best = || up().filter(|(_, path)| path.spec.class == class);
        // Of those that can be preferred to others.
        let latest = best().map(|(_, path)| path.tried).max()?;
        let usable = |(id, path): (&PathId, &Path)| {
            let rate = path.rate.per_second();
            let has_credits = path.under_way.len() < self.options.credits as usize;
            // Where bytes go, the first post tells how fast it is.
            let is_known = rate.is_some() || !path.spec.reach.overlaps(Reach::ALL_MEMORY);
            let takes = !path.full && has_credits && (is_known || path.under_way.is_empty());
            let is_tried =
                path.tried < latest && path.under_way.is_empty() && now >= path.try_again_at(chunk_bytes);
            // One whose rate is not known is tried.
            let seconds = match rate.filter(|_| !is_tried) {
                Some(rate) => path.bytes.saturating_add(chunk_bytes) as f64 / rate,
                None => 0.0,
            };
            takes.then_some((seconds, *id))
        };
        let first = best().filter_map(usable).min_by(|one, other| one.0.total_cmp(&other.0));
        first.map(|(_, path)| path)
    }

    /// Closes a path that has a post which takes too long; else looks again when one might.
    pub(super) fn look_for_stall(&mut self, now: Duration, path: PathId) {
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
    pub(super) fn close(&mut self, now: Duration, path: PathId) {
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

    pub(super) fn connect(&mut self, path: PathId) {
        let Some(known) = self.paths.get_mut(&path) else { return };
        // A removed peer may be known still when its path's pause is over.
        let is_wanted = self.peers.get(&known.peer).is_some_and(|peer| !peer.removed);
        if known.state == PathState::Down && is_wanted {
            known.state = PathState::Connecting;
            known.connection = known.connection.wrapping_add(1);
            self.actions.push_back(Action::Connect(path, known.connection));
        }
    }

    /// A closing path is down, or forgotten, when everything has come back.
    pub(super) fn settle(&mut self, now: Duration, path: PathId) {
        let Some(known) = self.paths.get(&path) else { return };
        let peer = known.peer;
        match known.state {
            PathState::Up => return self.forget(peer),
            PathState::Closing if known.under_way.is_empty() && known.removed => {
                return self.forget_path(now, path);
            }
            PathState::Closing if known.under_way.is_empty() => self.put_down(now, path),
            _ => {}
        }
        self.note_reach(now, peer);
        self.forget(peer);
    }
}

impl Path {
    /// When a path may have a post although others seem faster: so that at most a small part of the time is lost to one that
    /// is still as slow as it was.
    fn try_again_at(&self, chunk_bytes: u64) -> Duration {
        let chunk = self.rate.per_second().map_or(0.0, |rate| chunk_bytes as f64 / rate);
        let pause = (chunk * TRIED_SHARE).clamp(TRY_AGAIN.as_secs_f64(), TRY_AGAIN_MAX.as_secs_f64());
        self.tried.saturating_add(Duration::from_secs_f64(pause))
    }
}
