//! The connections of paths, and the choice of the path for the next post.

use std::time::Duration;

use super::{Action, ConnectionState, Path, PathId, PeerId, Reach, Route, Timer, Transfers};

/// A path that gets nothing, because others are faster, is tried again after a pause. This is the shortest.
const TRY_AGAIN: Duration = Duration::from_secs(1);
/// The pause, in durations of a chunk on that path: one 64th of the time is lost to a path that is as slow as it was.
const TRIED_SHARE: f64 = 64.0;
/// The longest pause.
const TRY_AGAIN_MAX: Duration = Duration::from_secs(10);

impl Transfers {
    /// Records that a path's connection is up. False: it is not wanted any more, and the caller ends it.
    pub fn path_up(&mut self, now: Duration, path: PathId, connection: u32) -> bool {
        let Some(known) = self.paths.get_mut(&path) else { return false };
        if (known.state, known.connection) != (ConnectionState::Connecting, connection) {
            return false;
        }
        (known.state, known.full) = (ConnectionState::Up, false);
        let peer = known.peer;
        self.note_reach(now, peer);
        true
    }

    /// Records that a path's connection broke, or could not be made. Its posts still complete.
    pub fn path_broke(&mut self, now: Duration, path: PathId, connection: u32) {
        let Some(known) = self.paths.get_mut(&path) else { return };
        if known.connection != connection {
            return;
        }
        match known.state {
            ConnectionState::Up => known.state = ConnectionState::Closing,
            ConnectionState::Connecting => self.schedule_retry(now, path),
            ConnectionState::Closing | ConnectionState::Down => {}
        }
        self.settle(now, path);
    }

    /// Records that a path which handed a post back takes posts again.
    pub fn path_ready(&mut self, path: PathId) {
        if let Some(path) = self.paths.get_mut(&path) {
            path.full = false;
        }
    }

    /// Whether a path carries posts now.
    pub fn is_up(&self, path: PathId) -> bool {
        self.paths.get(&path).is_some_and(|path| path.state == ConnectionState::Up)
    }

    /// Bytes a second of a path's last posts, over the time in which it had any under way. None before the first completes.
    pub fn rate(&self, path: PathId) -> Option<f64> {
        self.paths.get(&path)?.rate.per_second()
    }

    /// Posts under way on a path.
    pub fn under_way(&self, path: PathId) -> usize {
        self.paths.get(&path).map_or(0, |path| path.under_way.len())
    }

    /// The path for the next post on a route. Only paths of the best class count that is up and serves the route, even if all of
    /// them are full. It is the path that takes a post and would be done first with one more chunk. A path that has had no post
    /// for long goes first, because it may be faster by now.
    pub(super) fn best_path(&self, now: Duration, peer: PeerId, route: Route) -> Option<PathId> {
        let chunk_bytes = self.options.chunk_bytes;
        let paths = || self.peers.get(&peer).into_iter().flat_map(|peer| &peer.paths);
        let known = || paths().filter_map(|id| self.paths.get_key_value(id));
        let serves = |path: &Path| path.state == ConnectionState::Up && path.spec.reach.serves(route);
        let up = || known().filter(|(_, path)| serves(path));
        let class = up().map(|(_, path)| path.spec.class).min()?;
        let best = || up().filter(|(_, path)| path.spec.class == class);
        // Only a path to which another of its class was preferred since is tried again.
        let latest = best().map(|(_, path)| path.tried).max()?;
        let usable = |(id, path): (&PathId, &Path)| {
            let rate = path.rate.per_second();
            let has_credits = path.under_way.len() < self.options.credits as usize;
            // The first post on a path that carries bytes measures its rate.
            let is_known = rate.is_some() || !path.spec.reach.overlaps(Reach::ALL_MEMORY);
            let takes = !path.full && has_credits && (is_known || path.under_way.is_empty());
            let is_tried =
                path.tried < latest && path.under_way.is_empty() && now >= path.try_again_at(chunk_bytes);
            // A path whose rate is not known is tried.
            let seconds = match rate.filter(|_| !is_tried) {
                Some(rate) => path.bytes.saturating_add(chunk_bytes) as f64 / rate,
                None => 0.0,
            };
            takes.then_some((seconds, *id))
        };
        let first = best().filter_map(usable).min_by(|one, other| one.0.total_cmp(&other.0));
        first.map(|(_, path)| path)
    }

    /// Closes a path whose oldest post takes too long, else sets the timer for when it would.
    pub(super) fn check_stall(&mut self, now: Duration, path: PathId) {
        let Some(known) = self.paths.get_mut(&path) else { return };
        let oldest = known.under_way.keys().next().and_then(|token| self.posted.get(token));
        let Some(oldest) = oldest else {
            known.has_stall_timer = false;
            return;
        };
        let at = oldest.at.saturating_add(self.options.post_patience);
        if at <= now {
            known.has_stall_timer = false;
            self.close(now, path);
        } else {
            self.timers.insert((at, Timer::Stall(path)));
        }
    }

    /// Ends a path's connection if it is up.
    pub(super) fn close(&mut self, now: Duration, path: PathId) {
        let Some(known) = self.paths.get_mut(&path) else { return };
        if known.state == ConnectionState::Up {
            known.state = ConnectionState::Closing;
            self.actions.push_back(Action::Close(path, known.connection));
            self.settle(now, path);
        }
    }

    /// Takes a path down, and sets the timer that connects it again, unless its peer was removed.
    fn schedule_retry(&mut self, now: Duration, path: PathId) {
        let Some(known) = self.paths.get_mut(&path) else { return };
        known.state = ConnectionState::Down;
        if self.peers.get(&known.peer).is_none_or(|peer| peer.removed) {
            return;
        }
        // Jitter of up to a quarter, so that the paths to a host that is back do not connect all at once.
        let part =
            path.0.wrapping_mul(0x9e37_79b9).wrapping_add(known.connection.wrapping_mul(0x85eb_ca6b)) >> 24;
        let pause = known.pause.saturating_add(known.pause / 1024 * part);
        known.pause = known.pause.saturating_mul(2).min(self.options.backoff_max);
        self.timers.insert((now.saturating_add(pause), Timer::Retry(path)));
    }

    pub(super) fn connect(&mut self, path: PathId) {
        let Some(known) = self.paths.get_mut(&path) else { return };
        // A removed peer may still be known when the pause of its path is over.
        let is_wanted = self.peers.get(&known.peer).is_some_and(|peer| !peer.removed);
        if known.state == ConnectionState::Down && is_wanted {
            known.state = ConnectionState::Connecting;
            known.connection = known.connection.wrapping_add(1);
            self.actions.push_back(Action::Connect(path, known.connection));
        }
    }

    /// Takes a closing path down, or forgets it if it was removed, once all of its posts have completed.
    pub(super) fn settle(&mut self, now: Duration, path: PathId) {
        let Some(known) = self.paths.get(&path) else { return };
        let peer = known.peer;
        match known.state {
            ConnectionState::Up => return self.forget(peer),
            ConnectionState::Closing if known.under_way.is_empty() && known.removed => {
                return self.forget_path(now, path);
            }
            ConnectionState::Closing if known.under_way.is_empty() => self.schedule_retry(now, path),
            _ => {}
        }
        self.note_reach(now, peer);
        self.forget(peer);
    }
}

impl Path {
    /// When a path gets a post although others seem faster.
    fn try_again_at(&self, chunk_bytes: u64) -> Duration {
        let chunk = self.rate.per_second().map_or(0.0, |rate| chunk_bytes as f64 / rate);
        let pause = (chunk * TRIED_SHARE).clamp(TRY_AGAIN.as_secs_f64(), TRY_AGAIN_MAX.as_secs_f64());
        self.tried.saturating_add(Duration::from_secs_f64(pause))
    }
}
