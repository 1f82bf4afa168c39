//! Regions of a peer that posts wait for: a descriptor has named them, and the peer has not announced them yet.

use std::time::Duration;

/// The peer reports a region over the control connection at about the time at which its descriptor names it. A region that
/// was not reported for this long never will be.
const KEYS_TIMEOUT: Duration = Duration::from_secs(1);

/// The regions of one peer for which posts were answered `NotNow`.
#[derive(Debug, Default)]
pub(super) struct AwaitedRegions(Vec<Awaited>);

#[derive(Debug, Clone, Copy)]
struct Awaited {
    region: u32,
    generation: u32,
    since: Duration,
    /// [`KEYS_TIMEOUT`] is over, so posts for it are refused.
    is_late: bool,
}

impl AwaitedRegions {
    /// Notes that a post waits for this region. True if it has waited for too long and the post is to be refused.
    pub(super) fn add(&mut self, now: Duration, region: u32, generation: u32) -> bool {
        let is_it = |awaited: &&Awaited| (awaited.region, awaited.generation) == (region, generation);
        if let Some(awaited) = self.0.iter().find(is_it) {
            return awaited.is_late;
        }
        self.0.push(Awaited { region, generation, since: now, is_late: false });
        false
    }

    /// When the oldest wait runs out.
    pub(super) fn deadline(&self) -> Option<Duration> {
        let waiting = self.0.iter().filter(|awaited| !awaited.is_late);
        waiting.map(|awaited| awaited.since + KEYS_TIMEOUT).min()
    }

    /// Gives up the waits that have run out. Whether there were any: then the path takes their posts, to refuse them.
    pub(super) fn expire(&mut self, now: Duration) -> bool {
        if self.deadline().is_none_or(|until| until > now) {
            return false;
        }
        let late = self.0.iter_mut().filter(|awaited| awaited.since + KEYS_TIMEOUT <= now);
        late.for_each(|awaited| awaited.is_late = true);
        true
    }

    /// Drops regions that were announced, also those that no post asks for again. The others keep waiting from when they
    /// began. Whether anything was awaited: then the path takes posts again.
    pub(super) fn retain(&mut self, is_awaited: impl Fn(u32, u32) -> bool) -> bool {
        let any = !self.0.is_empty();
        self.0.retain(|awaited| is_awaited(awaited.region, awaited.generation));
        any
    }
}
