//! A prefill node's second breaker: stops its pairs while it hands nothing over, because each pair would compute the prompt
//! twice.
//!
//! ```text
//!            MISSED in a row without a hand-off                PROBE_EVERY over: one pair
//!   pairs -------------------------------------> decode alone ----------------------------> probe
//!     ^                                              ^                                        |
//!     |                                              '----------- nothing handed over --------'
//!     '--------------------------------------------------------------- a hand-off -----------'
//! ```

use std::time::{Duration, Instant};

/// Answers in a row without a hand-off after which pairs stop.
const MISSED: u32 = 3;
/// Time between two pairs that probe whether the node hands over again.
const PROBE_EVERY: Duration = Duration::from_secs(10);

/// Counts a prefill node's answers without a hand-off, and stops pairs after three in a row.
#[derive(Debug, Clone, Copy, Default)]
pub struct PairingBreaker {
    /// Answers in a row without a hand-off.
    missed: u32,
    /// Earliest time of the next probe. None: pairs are not stopped.
    probe_at: Option<Instant>,
}

/// Effect of a prefill node's answer on its pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairing {
    /// Nothing changed.
    Same,
    /// Pairs stop: prompts go to decode nodes alone until a pair probes the node.
    Stopped {
        /// Answers in a row without a hand-off.
        missed: u32,
        /// Time until the next probe.
        probe_in: Duration,
    },
    /// Pairs resume, because the node hands over again.
    Resumed,
}

impl PairingBreaker {
    /// Whether the node may be one of a pair.
    pub fn allows(&self, now: Instant) -> bool {
        self.probe_at.is_none_or(|at| now >= at)
    }

    /// A pair with this node was chosen; starts the time to the next probe.
    pub fn sent(&mut self, now: Instant) {
        if self.probe_at.is_some() {
            self.probe_at = Some(now + PROBE_EVERY);
        }
    }

    /// Counts the node's answer to a prefill leg, with a hand-off or without one.
    pub fn answered(&mut self, handed_over: bool, now: Instant) -> Pairing {
        if handed_over {
            let was_stopped = self.probe_at.is_some();
            *self = Self::default();
            return if was_stopped { Pairing::Resumed } else { Pairing::Same };
        }
        self.missed += 1;
        if self.probe_at.is_some() || self.missed < MISSED {
            return Pairing::Same;
        }
        self.probe_at = Some(now + PROBE_EVERY);
        Pairing::Stopped { missed: self.missed, probe_in: PROBE_EVERY }
    }

    /// Whether pairs are stopped, except for probes.
    pub fn is_stopped(&self) -> bool {
        self.probe_at.is_some()
    }

    /// Answers in a row without a hand-off.
    pub fn missed(&self) -> u32 {
        self.missed
    }

    /// Time until the next probe, if pairs are stopped.
    pub fn probe_in(&self, now: Instant) -> Option<Duration> {
        self.probe_at.map(|at| at.saturating_duration_since(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_three_in_a_row_pairs_stop_and_one_in_ten_seconds_probes() {
        let (mut pairing, start) = (PairingBreaker::default(), Instant::now());
        assert_eq!(pairing.answered(false, start), Pairing::Same);
        assert_eq!(pairing.answered(false, start), Pairing::Same);
        assert!(pairing.allows(start));
        let stopped = Pairing::Stopped { missed: 3, probe_in: PROBE_EVERY };
        assert_eq!(pairing.answered(false, start), stopped);
        assert_eq!(pairing.answered(false, start), Pairing::Same, "it was under way already");
        let mut probes = 0;
        for second in 0..60 {
            let now = start + Duration::from_secs(second);
            if pairing.allows(now) {
                pairing.sent(now);
                assert!(!pairing.allows(now), "one at a time");
                assert_eq!(pairing.answered(false, now), Pairing::Same);
                probes += 1;
            }
        }
        assert_eq!(probes, 5);
    }

    #[test]
    fn one_hand_off_brings_pairs_back() {
        let (mut pairing, start) = (PairingBreaker::default(), Instant::now());
        for _ in 0..2 {
            (0..2).for_each(|_| assert_eq!(pairing.answered(false, start), Pairing::Same));
            assert_eq!(pairing.answered(true, start), Pairing::Same, "not in a row");
        }
        let last = (0..3).map(|_| pairing.answered(false, start)).last();
        assert_eq!(last, Some(Pairing::Stopped { missed: 3, probe_in: PROBE_EVERY }));
        assert_eq!(pairing.probe_in(start), Some(PROBE_EVERY));
        assert_eq!(pairing.answered(true, start + PROBE_EVERY), Pairing::Resumed);
        assert!(pairing.allows(start) && pairing.probe_in(start).is_none());
    }
}
