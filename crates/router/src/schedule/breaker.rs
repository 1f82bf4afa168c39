//! A node's circuit breaker: after some failures in a row the node gets no requests for a while, then one trial request.
//!
//! ```text
//!            FAILURES in a row                 pause over: one request
//!   closed --------------------> open(pause) -------------------------> trying
//!     ^                            ^  pause doubles, up to PAUSE_MAX        |
//!     |                            '--------------- it fails ---------------|
//!     '--------------------------------------------- it is served ----------'
//! ```

use std::time::{Duration, Instant};

/// Failures in a row that open the breaker.
pub(super) const FAILURES: u32 = 3;
/// The first pause.
const PAUSE: Duration = Duration::from_secs(1);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Counts a node's failures in a row, and decides whether it may get a request.
#[derive(Debug, Clone, Copy, Default)]
pub struct Breaker {
    failures: u32,
    pause: Duration,
    /// End of the pause. None: closed.
    until: Option<Instant>,
    /// When it opened; None: closed.
    since: Option<Instant>,
    /// When the trial request was sent.
    trying: Option<Instant>,
}

impl Breaker {
    /// Whether the node may get a request.
    pub fn allows(&self, now: Instant) -> bool {
        match (self.until, self.trying) {
            // The trial request may have been lost without an end, so after a further pause another one may try.
            (_, Some(since)) => now.saturating_duration_since(since) >= self.pause,
            (Some(until), None) => now >= until,
            (None, None) => true,
        }
    }

    /// Time until it allows a request. None if it does now.
    pub fn wait(&self, now: Instant) -> Option<Duration> {
        let until = self.trying.map(|since| since + self.pause).or(self.until)?;
        Some(until.saturating_duration_since(now)).filter(|wait| !wait.is_zero())
    }

    /// The node gets a request: a trial, if the breaker is open.
    pub fn sent(&mut self, now: Instant) {
        if self.until.is_some() {
            self.trying = Some(now);
        }
    }

    /// The node has served a request. Returns how long the breaker was open, if this closes it.
    pub fn served(&mut self, now: Instant) -> Option<Duration> {
        std::mem::take(self).since.map(|since| now.saturating_duration_since(since))
    }

    /// The node refused the connection, died, or answered that it cannot serve. Returns the pause, if one begins.
    pub fn failed(&mut self, now: Instant) -> Option<Duration> {
        self.failures += 1;
        let was_tried = self.trying.take().is_some();
        // A 500 counts only after another node has served the request. By then the pause may be over, and the trial too.
        let opens = match self.until {
            None => self.failures >= FAILURES,
            Some(until) => was_tried || now >= until,
        };
        if !opens {
            return None;
        }
        self.pause = if self.until.is_some() { (self.pause * 2).min(PAUSE_MAX) } else { PAUSE };
        self.until = Some(now + self.pause);
        self.since.get_or_insert(now);
        Some(self.pause)
    }

    /// The request neither succeeded nor failed: the client left, or the node answered 500 in doubt. Ends a trial.
    pub fn left(&mut self) {
        self.trying = None;
    }

    /// Failures in a row.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// Whether it is open, or a trial is under way.
    pub fn is_open(&self) -> bool {
        self.until.is_some()
    }
}
