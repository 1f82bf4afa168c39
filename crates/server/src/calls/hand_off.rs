//! Lookups that wait for what another engine saves: for whom, how long, and how it ends.
//!
//! ```text
//!   the hit is as long as it shall be? --yes--> ready                       nothing is waited for
//!          | no
//!   the saver is here, and saves such blocks? --no--> gone, other blocks
//!          | yes
//!   wait: progress moves the deadline on --+--> complete | stalled | too long | failed | gone | stopping
//! ```

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kvlane_proto::v1;
use kvlane_store::{LookupGroup, OwnerId, Watch, WatchEvent, Watching};

use super::outcome::Outcome;
use crate::{
    engines::OpenGroup,
    hand_offs::{End, HandOffs, Place, Signal},
    refusal::Refusal,
    shared::Shared,
};

/// A wait ends after so long, whatever progress there is.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// Longest engine id, in bytes; no session has a longer one.
const ENGINE_ID_BYTES_MAX: usize = 512;

/// Whom a lookup names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HandOff {
    engine_id: String,
    run: [u8; 16],
    tokens: u64,
    wait: Duration,
}

impl HandOff {
    /// Checks what came over the wire.
    pub(crate) fn parse(wire: v1::HandOff) -> Result<Self, Refusal> {
        let run = wire.run.as_ref().try_into().map_err(|_| {
            Refusal::invalid(format!("the run of a hand-off has 16 bytes, this one {}", wire.run.len()))
        })?;
        if wire.engine_id.is_empty() || wire.engine_id.len() > ENGINE_ID_BYTES_MAX {
            return Err(Refusal::invalid(format!(
                "the engine id of a hand-off has 1 to {ENGINE_ID_BYTES_MAX} bytes, this one {}",
                wire.engine_id.len()
            )));
        }
        let wait = Duration::from_millis(wire.wait_ms.into()).min(WAIT_MAX);
        Ok(Self { engine_id: wire.engine_id, run, tokens: wire.tokens, wait })
    }
}

/// The deadlines of one wait. Pure.
#[derive(Debug, Clone)]
pub(crate) struct Clock {
    since: Instant,
    /// Longest time without progress.
    wait: Duration,
    progress_at: Instant,
    /// The deadline that the engine knows, and since when.
    told: Instant,
    told_at: Instant,
}

impl Clock {
    /// The engine is told of the first deadline at once.
    pub(crate) fn new(wait: Duration, now: Instant) -> Self {
        Self { since: now, wait, progress_at: now, told: now + wait, told_at: now }
    }

    pub(crate) fn progress(&mut self, now: Instant) {
        self.progress_at = now;
    }

    /// When it is over without further progress.
    pub(crate) fn deadline(&self) -> Instant {
        (self.progress_at + self.wait).min(self.since + WAIT_MAX)
    }

    /// How the wait has ended by itself, if it has.
    pub(crate) fn over(&self, now: Instant) -> Option<Outcome> {
        let is_capped = self.since + WAIT_MAX <= self.progress_at + self.wait;
        let outcome = if is_capped { Outcome::TooLong } else { Outcome::Stalled };
        (now >= self.deadline()).then_some(outcome)
    }

    /// When the engine is to hear that the deadline has moved: twice in a wait at most.
    fn notice_at(&self) -> Option<Instant> {
        (self.deadline() > self.told).then(|| self.told_at + self.wait / 2)
    }

    /// How long it takes now, if the engine is to hear of it.
    pub(crate) fn take_notice(&mut self, now: Instant) -> Option<Duration> {
        self.notice_at().filter(|at| *at <= now)?;
        (self.told, self.told_at) = (self.deadline(), now);
        Some(self.told.saturating_duration_since(now))
    }

    /// When there is something to do.
    pub(crate) fn wake_at(&self) -> Instant {
        self.notice_at().map_or(self.deadline(), |at| at.min(self.deadline()))
    }
}

/// A lookup's wait for another engine. Whoever drops it before it is over has abandoned it.
pub(crate) struct Wait {
    shared: Arc<Shared>,
    hand_off: HandOff,
    pub(crate) clock: Clock,
    signal: Arc<Signal>,
    is_over: bool,
    _place: Place,
    _watch: Watch,
    /// As long as these are held, the spaces that are watched stay.
    _open: Arc<Vec<OpenGroup>>,
}

/// What a wait has come to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It goes on; the engine hears how much longer, if that has changed.
    Waits(Option<Duration>),
    Over,
}

impl Wait {
    /// Begins to wait, if there is something to wait for. `signal` is told what happens meanwhile.
    pub(crate) fn begin(
        shared: &Arc<Shared>,
        hand_off: HandOff,
        owner: OwnerId,
        (open, groups, max_tokens): (&Arc<Vec<OpenGroup>>, &[LookupGroup<'_>], u64),
        signal: Arc<Signal>,
        now: Instant,
    ) -> Option<Self> {
        match Self::try_begin(shared, &hand_off, owner, (open, groups, max_tokens), &signal, now) {
            Ok((place, watch)) => Some(Self {
                shared: Arc::clone(shared),
                clock: Clock::new(hand_off.wait, now),
                hand_off,
                signal,
                is_over: false,
                _place: place,
                _watch: watch,
                _open: Arc::clone(open),
            }),
            Err(outcome) => {
                note(shared, &hand_off, outcome, Duration::ZERO);
                None
            }
        }
    }

    fn try_begin(
        shared: &Arc<Shared>,
        hand_off: &HandOff,
        owner: OwnerId,
        (open, groups, max_tokens): (&Arc<Vec<OpenGroup>>, &[LookupGroup<'_>], u64),
        signal: &Arc<Signal>,
        now: Instant,
    ) -> Result<(Place, Watch), Outcome> {
        // Before the looks at the saver and at the daemon: what ends after them is told.
        let place = HandOffs::enter(&shared.hand_offs, &hand_off.engine_id, Arc::clone(signal));
        let saver = shared.engines.saver(&hand_off.engine_id);
        let watched = Arc::clone(signal);
        let on_event = Box::new(move |event: WatchEvent| match event {
            WatchEvent::Progress => watched.progress(),
            WatchEvent::Complete => watched.end(End::Complete),
            WatchEvent::Lost => watched.end(End::Failed),
        });
        // An engine that is not there saves nothing: no owner has this number.
        let saver_id = saver.as_ref().map_or(OwnerId(0), |saver| saver.owner);
        let tokens = hand_off.tokens.min(max_tokens);
        let watch = match shared.store.watch((owner, saver_id), groups, tokens, now, on_event) {
            Watching::Complete => return Err(Outcome::Ready),
            Watching::TooMany => return Err(Outcome::TooMany),
            Watching::Waits(watch) => watch,
        };
        let saver = saver.ok_or(Outcome::Gone)?;
        if !shared.sessions.are_connected(&hand_off.run, saver.scheduler, &saver.workers) {
            return Err(Outcome::Gone);
        }
        let saves = |group: &OpenGroup| saver.open.iter().any(|of_saver| of_saver.space == group.space);
        if !open.iter().all(saves) {
            return Err(Outcome::OtherBlocks);
        }
        if hand_off.wait.is_zero() {
            return Err(Outcome::Stalled);
        }
        if shared.is_stopping() {
            return Err(Outcome::Stopping);
        }
        Ok((place, watch))
    }

    /// How long it takes without any progress.
    pub(crate) fn first(&self) -> Duration {
        self.hand_off.wait
    }

    /// Looks at what has happened, and at the time.
    pub(crate) fn turn(&mut self, now: Instant) -> Turn {
        let (has_progressed, end) = self.signal.take();
        if let Some(end) = end {
            return self.over(end.into(), now);
        }
        if has_progressed {
            self.clock.progress(now);
        }
        match self.clock.over(now) {
            Some(outcome) => self.over(outcome, now),
            None => Turn::Waits(self.clock.take_notice(now)),
        }
    }

    /// Ends it for another reason.
    pub(crate) fn over(&mut self, outcome: Outcome, now: Instant) -> Turn {
        self.is_over = true;
        note(&self.shared, &self.hand_off, outcome, now.saturating_duration_since(self.clock.since));
        Turn::Over
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        if !self.is_over {
            self.over(Outcome::Abandoned, Instant::now());
        }
    }
}

/// Counts a hand-off that is over, and tells the log: of the first one that was not complete in a way that is seen.
fn note(shared: &Shared, hand_off: &HandOff, outcome: Outcome, waited: Duration) {
    shared.metrics.hand_off(outcome, waited);
    let HandOff { engine_id, tokens, .. } = hand_off;
    let (waited_ms, outcome_name) = (waited.as_millis() as u64, outcome.name());
    tracing::debug!(engine = engine_id, tokens, outcome = outcome_name, waited_ms, "a hand-off is over");
    if let Some(why) = outcome.complaint().filter(|_| shared.hand_offs.is_first_complaint(outcome as u32)) {
        tracing::warn!(
            engine = engine_id,
            tokens,
            waited_ms,
            "a prompt was not handed over as a whole, and the rest is computed again: {why}; further ones for this reason \
             are counted in kvlane_hand_offs_total"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_wait_without_progress_stalls_at_its_first_deadline() {
        let start = Instant::now();
        let mut clock = Clock::new(100 * MS, start);
        assert_eq!((clock.deadline(), clock.wake_at()), (start + 100 * MS, start + 100 * MS));
        assert_eq!(clock.take_notice(start + 99 * MS), None, "that is what was told");
        assert_eq!(clock.over(start + 99 * MS), None);
        assert_eq!(clock.over(start + 100 * MS), Some(Outcome::Stalled));
    }

    #[test]
    fn progress_moves_the_deadline_and_is_told_twice_in_a_wait_at_most() {
        let start = Instant::now();
        let mut clock = Clock::new(100 * MS, start);
        let mut words = Vec::new();
        for at in 1..=1000u32 {
            let now = start + at * MS;
            clock.progress(now);
            words.extend(clock.take_notice(now).map(|longer| (at, longer)));
            assert_eq!(clock.over(now), None);
            assert!(clock.told > now, "the engine gives up before it hears of more time");
        }
        let expected: Vec<_> = (1..=20).map(|word| (50 * word, 100 * MS)).collect();
        assert_eq!(words, expected);
        // Progress that was not told yet is told when it may be.
        clock.progress(start + 1020 * MS);
        assert_eq!(clock.wake_at(), start + 1050 * MS);
        assert_eq!(clock.take_notice(start + 1050 * MS), Some(70 * MS));
        assert_eq!(clock.wake_at(), start + 1120 * MS);
        assert_eq!(clock.over(start + 1120 * MS), Some(Outcome::Stalled));
    }

    #[test]
    fn no_progress_moves_it_beyond_its_cap() {
        let start = Instant::now();
        let mut clock = Clock::new(2 * WAIT_MAX / 3, start);
        clock.progress(start + WAIT_MAX / 2);
        assert_eq!(clock.deadline(), start + WAIT_MAX);
        assert_eq!(clock.over(start + WAIT_MAX - MS), None);
        assert_eq!(clock.over(start + WAIT_MAX), Some(Outcome::TooLong));
    }

    #[test]
    fn each_outcome_has_a_name_of_its_own() {
        use Outcome::*;
        let all =
            [Ready, Complete, Stalled, TooLong, Failed, Gone, OtherBlocks, TooMany, Stopping, Abandoned];
        let names: std::collections::HashSet<&str> = all.iter().map(|outcome| outcome.name()).collect();
        assert_eq!(names.len(), all.len());
    }
}
