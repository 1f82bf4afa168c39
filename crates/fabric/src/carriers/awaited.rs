//! Regions of a peer that posts wait for: a descriptor has named them, and the peer has not announced them yet.

use std::time::Duration;

/// The peer announces a region over the control connection at about the time at which its descriptor names it. A region that
/// was not announced for this long never will be.
pub(super) const KEYS_TIMEOUT: Duration = Duration::from_secs(1);
/// This process may have been stopped past the timeout, with the announcement in its socket. So it reads for this long more.
const LAST_LOOK: Duration = Duration::from_millis(50);

/// The regions of one peer for which posts were answered `NotNow`.
///
/// ```text
///  add -> Waiting --timeout--> LastLook --LAST_LOOK--> Late: its posts are refused
///            |                     |
///            '---- announced ------'--> forgotten: its posts are taken
/// ```
#[derive(Debug)]
pub(crate) struct AwaitedRegions {
    all: Vec<Awaited>,
    timeout: Duration,
}

#[derive(Debug, Clone, Copy)]
struct Awaited {
    region: u32,
    generation: u32,
    stage: Stage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Until this time.
    Waiting(Duration),
    /// Until this time.
    LastLook(Duration),
    Late,
}

impl Stage {
    fn deadline(self) -> Option<Duration> {
        match self {
            Stage::Waiting(until) | Stage::LastLook(until) => Some(until),
            Stage::Late => None,
        }
    }
}

impl AwaitedRegions {
    /// Posts for a region are refused once it was awaited for `timeout`.
    pub(crate) fn new(timeout: Duration) -> AwaitedRegions {
        AwaitedRegions { all: Vec::new(), timeout }
    }

    /// Notes that a post waits for this region. True if it has waited for too long and the post is to be refused.
    pub(crate) fn add(&mut self, now: Duration, region: u32, generation: u32) -> bool {
        let is_it = |awaited: &&Awaited| (awaited.region, awaited.generation) == (region, generation);
        if let Some(awaited) = self.all.iter().find(is_it) {
            return awaited.stage == Stage::Late;
        }
        self.all.push(Awaited { region, generation, stage: Stage::Waiting(now + self.timeout) });
        false
    }

    /// When [`AwaitedRegions::expire`] is due.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.all.iter().filter_map(|awaited| awaited.stage.deadline()).min()
    }

    /// Gives up the waits that have run out. Whether there were any: then the path takes their posts, to refuse them.
    pub(crate) fn expire(&mut self, now: Duration) -> bool {
        let mut any = false;
        for awaited in &mut self.all {
            match awaited.stage {
                Stage::Waiting(until) if until <= now => awaited.stage = Stage::LastLook(now + LAST_LOOK),
                Stage::LastLook(until) if until <= now => {
                    awaited.stage = Stage::Late;
                    any = true;
                }
                Stage::Waiting(_) | Stage::LastLook(_) | Stage::Late => {}
            }
        }
        any
    }

    /// Drops regions that were announced, also those that no post asks for again. The others keep waiting from when they
    /// began. Whether anything was awaited: then the path takes posts again.
    pub(crate) fn retain(&mut self, is_awaited: impl Fn(u32, u32) -> bool) -> bool {
        let any = !self.all.is_empty();
        self.all.retain(|awaited| is_awaited(awaited.region, awaited.generation));
        any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Found by the simulation of hubs: a process was stopped while the announcement came, and refused its own transfer when it
    /// went on, before it had read its sockets.
    #[test]
    fn a_process_that_was_stopped_reads_before_it_refuses() {
        let mut awaited = AwaitedRegions::new(KEYS_TIMEOUT);
        assert!(!awaited.add(Duration::ZERO, 1, 0));
        assert_eq!(awaited.deadline(), Some(KEYS_TIMEOUT));
        let resumed = Duration::from_secs(9);
        assert!(!awaited.expire(resumed));
        assert!(!awaited.add(resumed, 1, 0));
        assert_eq!(awaited.deadline(), Some(resumed + LAST_LOOK));
        assert!(awaited.expire(resumed + LAST_LOOK));
        assert!(awaited.add(resumed + LAST_LOOK, 1, 0), "it was not announced");
        assert_eq!((awaited.deadline(), awaited.expire(resumed * 2)), (None, false));
        // Announced in the end.
        assert!(awaited.retain(|_, _| false));
        assert!(!awaited.add(resumed * 2, 1, 0));
    }
}
