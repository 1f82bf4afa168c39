//! The wait of one lookup for another engine's saves: whether it begins, its deadlines, and how it ends.
//!
//! ```text
//!   is the hit as long as the request says? --yes--> ready                  no wait
//!          | no
//!   is the saver connected, and does it save such blocks? --no--> gone, other blocks
//!          | yes
//!   wait: progress extends the deadline ---+--> complete | stalled | too long | failed | gone | stopping
//! ```
//! The request comes over the wire as `HandOff`.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kvlane_proto::v1;
use kvlane_store::{LookupGroup, OwnerId, Watch, WatchEvent, Watching};

use super::outcome::WaitOutcome;
use crate::{
    awaited_saves::{AwaitedSaves, End, Listed, Signal},
    engines::OpenGroup,
    refusal::Refusal,
    shared::Shared,
};

/// Longest wait, whatever the progress.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// Longest engine id, in bytes; no session has a longer one.
const ENGINE_ID_BYTES_MAX: usize = 512;

/// The saves that a lookup awaits, as its engine names them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AwaitedSave {
    /// The engine that saves.
    engine_id: String,
    /// The nonce of its scheduler's process.
    run: [u8; 16],
    /// How many of the prompt's tokens it saves.
    tokens: u64,
    /// Longest wait without progress.
    wait: Duration,
}

impl AwaitedSave {
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
    /// The deadline that the engine was sent last.
    reported: Instant,
    reported_at: Instant,
}

impl Clock {
    /// The caller sends the first deadline at once.
    pub(crate) fn new(wait: Duration, now: Instant) -> Self {
        Self { since: now, wait, progress_at: now, reported: now + wait, reported_at: now }
    }

    pub(crate) fn progress(&mut self, now: Instant) {
        self.progress_at = now;
    }

    /// When the wait times out, if there is no further progress.
    pub(crate) fn deadline(&self) -> Instant {
        (self.progress_at + self.wait).min(self.since + WAIT_MAX)
    }

    /// The outcome if the deadline has passed.
    pub(crate) fn timed_out(&self, now: Instant) -> Option<WaitOutcome> {
        let is_capped = self.since + WAIT_MAX <= self.progress_at + self.wait;
        let outcome = if is_capped { WaitOutcome::TooLong } else { WaitOutcome::Stalled };
        (now >= self.deadline()).then_some(outcome)
    }

    /// When to send the engine a later deadline. Twice in `wait` at most.
    fn report_at(&self) -> Option<Instant> {
        (self.deadline() > self.reported).then(|| self.reported_at + self.wait / 2)
    }

    /// Takes the time left until the deadline, if it is due to be sent to the engine.
    pub(crate) fn take_report(&mut self, now: Instant) -> Option<Duration> {
        self.report_at().filter(|at| *at <= now)?;
        (self.reported, self.reported_at) = (self.deadline(), now);
        Some(self.reported.saturating_duration_since(now))
    }

    /// When to poll the wait if no event comes.
    pub(crate) fn wake_at(&self) -> Instant {
        self.report_at().map_or(self.deadline(), |at| at.min(self.deadline()))
    }
}

/// A lookup's wait for another engine's saves. Dropped before it is over, it counts as abandoned.
pub(crate) struct Wait {
    shared: Arc<Shared>,
    awaited: AwaitedSave,
    pub(crate) clock: Clock,
    signal: Arc<Signal>,
    is_over: bool,
    _listed: Listed,
    _watch: Watch,
    /// Held so that the watched spaces are not forgotten.
    _open: Arc<Vec<OpenGroup>>,
}

/// The result of polling a wait.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Polled {
    /// It goes on. Send the engine the time left, if there is one.
    Waits(Option<Duration>),
    Over,
}

impl Wait {
    /// Begins to wait, if there is something to wait for. `signal` gets the events meanwhile.
    pub(crate) fn begin(
        shared: &Arc<Shared>,
        awaited: AwaitedSave,
        owner: OwnerId,
        (open, groups, max_tokens): (&Arc<Vec<OpenGroup>>, &[LookupGroup<'_>], u64),
        signal: Arc<Signal>,
        now: Instant,
    ) -> Option<Self> {
        match Self::try_begin(shared, &awaited, owner, (open, groups, max_tokens), &signal, now) {
            Ok((listed, watch)) => Some(Self {
                shared: Arc::clone(shared),
                clock: Clock::new(awaited.wait, now),
                awaited,
                signal,
                is_over: false,
                _listed: listed,
                _watch: watch,
                _open: Arc::clone(open),
            }),
            Err(outcome) => {
                note(shared, &awaited, outcome, Duration::ZERO);
                None
            }
        }
    }

    fn try_begin(
        shared: &Arc<Shared>,
        awaited: &AwaitedSave,
        owner: OwnerId,
        (open, groups, max_tokens): (&Arc<Vec<OpenGroup>>, &[LookupGroup<'_>], u64),
        signal: &Arc<Signal>,
        now: Instant,
    ) -> Result<(Listed, Watch), WaitOutcome> {
        // Listed before the saver and the daemon are checked, so that an end after the check reaches the wait.
        let listed = AwaitedSaves::enter(&shared.awaited_saves, &awaited.engine_id, Arc::clone(signal));
        let saver = shared.engines.saver(&awaited.engine_id);
        let watched = Arc::clone(signal);
        let on_event = Box::new(move |event: WatchEvent| match event {
            WatchEvent::Progress => watched.progress(),
            WatchEvent::Complete => watched.end(End::Complete),
            WatchEvent::Lost => watched.end(End::Failed),
        });
        // An engine that is not connected saves nothing: no owner has number 0.
        let saver_id = saver.as_ref().map_or(OwnerId(0), |saver| saver.owner);
        let tokens = awaited.tokens.min(max_tokens);
        let watch = match shared.store.watch((owner, saver_id), groups, tokens, now, on_event) {
            Watching::Complete => return Err(WaitOutcome::Ready),
            Watching::TooMany => return Err(WaitOutcome::TooMany),
            Watching::Waits(watch) => watch,
        };
        let saver = saver.ok_or(WaitOutcome::Gone)?;
        if !shared.sessions.are_connected(&awaited.run, saver.scheduler, &saver.workers) {
            return Err(WaitOutcome::Gone);
        }
        let saves = |group: &OpenGroup| saver.open.iter().any(|of_saver| of_saver.space == group.space);
        if !open.iter().all(saves) {
            return Err(WaitOutcome::OtherBlocks);
        }
        if awaited.wait.is_zero() {
            return Err(WaitOutcome::Stalled);
        }
        if shared.is_stopping() {
            return Err(WaitOutcome::Stopping);
        }
        Ok((listed, watch))
    }

    /// The time until the first deadline.
    pub(crate) fn first_wait(&self) -> Duration {
        self.awaited.wait
    }

    /// Takes the events since the last poll, and checks the deadline.
    pub(crate) fn poll(&mut self, now: Instant) -> Polled {
        let (has_progressed, end) = self.signal.take();
        if let Some(end) = end {
            return self.end(end.into(), now);
        }
        if has_progressed {
            self.clock.progress(now);
        }
        match self.clock.timed_out(now) {
            Some(outcome) => self.end(outcome, now),
            None => Polled::Waits(self.clock.take_report(now)),
        }
    }

    /// Ends the wait, counts it and logs it.
    pub(crate) fn end(&mut self, outcome: WaitOutcome, now: Instant) -> Polled {
        self.is_over = true;
        note(&self.shared, &self.awaited, outcome, now.saturating_duration_since(self.clock.since));
        Polled::Over
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        if !self.is_over {
            self.end(WaitOutcome::Abandoned, Instant::now());
        }
    }
}

/// Counts a wait that is over. Logs it, and warns of the first one of each outcome that is a fault.
fn note(shared: &Shared, awaited: &AwaitedSave, outcome: WaitOutcome, waited: Duration) {
    shared.metrics.save_wait_ended(outcome, waited);
    let AwaitedSave { engine_id, tokens, .. } = awaited;
    let (waited_ms, outcome_name) = (waited.as_millis() as u64, outcome.name());
    tracing::debug!(engine = engine_id, tokens, outcome = outcome_name, waited_ms, "wait for saves ended");
    if let Some(why) = outcome.complaint().filter(|_| shared.awaited_saves.mark_complained(outcome as u32)) {
        // Log: a decode engine waited for a prefill engine's saves, and computes what did not come. Do: see the
        // reason; if nothing was heard, look at that engine.
        tracing::warn!(
            once = true,
            engine = engine_id,
            tokens,
            waited_ms,
            "prompt not handed over as a whole, the rest is computed again: {why}; kvlane_hand_offs_total counts further ones"
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
        assert_eq!(clock.take_report(start + 99 * MS), None, "the engine has this deadline");
        assert_eq!(clock.timed_out(start + 99 * MS), None);
        assert_eq!(clock.timed_out(start + 100 * MS), Some(WaitOutcome::Stalled));
    }

    #[test]
    fn progress_moves_the_deadline_and_is_told_twice_in_a_wait_at_most() {
        let start = Instant::now();
        let mut clock = Clock::new(100 * MS, start);
        let mut reports = Vec::new();
        for at in 1..=1000u32 {
            let now = start + at * MS;
            clock.progress(now);
            reports.extend(clock.take_report(now).map(|longer| (at, longer)));
            assert_eq!(clock.timed_out(now), None);
            assert!(clock.reported > now, "the engine gives up before it hears of more time");
        }
        let expected: Vec<_> = (1..=20).map(|report| (50 * report, 100 * MS)).collect();
        assert_eq!(reports, expected);
        // Progress that was not reported yet is reported when it may be.
        clock.progress(start + 1020 * MS);
        assert_eq!(clock.wake_at(), start + 1050 * MS);
        assert_eq!(clock.take_report(start + 1050 * MS), Some(70 * MS));
        assert_eq!(clock.wake_at(), start + 1120 * MS);
        assert_eq!(clock.timed_out(start + 1120 * MS), Some(WaitOutcome::Stalled));
    }

    #[test]
    fn no_progress_moves_it_beyond_its_cap() {
        let start = Instant::now();
        let mut clock = Clock::new(2 * WAIT_MAX / 3, start);
        clock.progress(start + WAIT_MAX / 2);
        assert_eq!(clock.deadline(), start + WAIT_MAX);
        assert_eq!(clock.timed_out(start + WAIT_MAX - MS), None);
        assert_eq!(clock.timed_out(start + WAIT_MAX), Some(WaitOutcome::TooLong));
    }

    #[test]
    fn each_outcome_has_a_name_of_its_own() {
        use WaitOutcome::*;
        let all =
            [Ready, Complete, Stalled, TooLong, Failed, Gone, OtherBlocks, TooMany, Stopping, Abandoned];
        let names: std::collections::HashSet<&str> = all.iter().map(|outcome| outcome.name()).collect();
        assert_eq!(names.len(), all.len());
    }
}
