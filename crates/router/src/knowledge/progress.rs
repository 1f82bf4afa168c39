//! The reader's position in an engine's events: which messages were applied, which are missing, and whether it is still the
//! same engine. Pure.
//!
//! ```text
//!   connect --> subscribe --> replay from the last applied message --> live messages
//!                               |  it is missing or differs:             | a number is missing
//!                               v  the engine has restarted              v
//!                             drop all, replay from 0                  replay from it
//! ```
//! Without a replay socket missing messages are lost, so all known blocks are dropped then.

use kvlane_kv_events::sequence::{Step, Tracker};
use xxhash_rust::xxh3::xxh3_64;

/// The reader's next action for a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Apply it, because it is the next one.
    Apply,
    /// Skip it, because it was applied before.
    Skip,
    /// Drop all known blocks, because the engine has restarted, and apply it.
    ForgetAndApply,
    /// Replay from this number on, because messages are missing. The replay has this message too.
    Replay(u64),
}

/// The position in one engine's events.
#[derive(Debug, Clone, Copy, Default)]
pub struct Progress {
    /// Number of the last applied message, and a hash of its payload.
    applied: Option<(u64, u64)>,
    /// Numbers of this connection's live messages.
    live: Tracker,
}

impl Progress {
    /// Starts a new connection.
    pub fn connected(&mut self) {
        self.live = Tracker::default();
    }

    /// Starts from nothing, as with a new engine.
    pub fn forgotten(&mut self) {
        self.applied = None;
    }

    /// The number to replay from: the last applied message, so that the replay shows whether it is the same engine.
    pub fn replay_from(&self) -> u64 {
        self.applied.map_or(0, |(number, _)| number)
    }

    /// Whether any message was applied.
    pub fn has_begun(&self) -> bool {
        self.applied.is_some()
    }

    /// Decides on a live message.
    pub fn live(&mut self, number: u64) -> Next {
        let step = self.live.take(number);
        let Some((applied, _)) = self.applied else { return Next::Apply };
        match step {
            Step::Restarted => Next::ForgetAndApply,
            Step::Duplicate => Next::Skip,
            Step::InOrder | Step::Gap { .. } if number <= applied => Next::Skip,
            Step::InOrder | Step::Gap { .. } if number == applied + 1 => Next::Apply,
            Step::InOrder | Step::Gap { .. } => Next::Replay(applied + 1),
        }
    }

    /// Decides on a replayed message. `is_first`: it is the first one of a replay from [`Progress::replay_from`].
    pub fn replayed(&self, number: u64, payload: &[u8], is_first: bool) -> Next {
        match self.applied {
            None => Next::Apply,
            Some((applied, hash)) if number == applied => {
                if hash == xxh3_64(payload) {
                    Next::Skip
                } else {
                    Next::ForgetAndApply
                }
            }
            // The engine no longer has the requested message, so those in between are lost.
            Some((applied, _)) if number > applied + 1 || is_first => Next::ForgetAndApply,
            Some((applied, _)) if number < applied => Next::Skip,
            Some(_) => Next::Apply,
        }
    }

    /// Records that a message was applied.
    pub fn applied(&mut self, number: u64, payload: &[u8]) {
        self.applied = Some((number, xxh3_64(payload)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(number: u64) -> Progress {
        let mut progress = Progress::default();
        progress.applied(number, b"as before");
        progress
    }

    #[test]
    fn live_messages_are_taken_in_once_and_gaps_are_replayed() {
        let mut progress = Progress::default();
        assert_eq!(progress.live(7), Next::Apply);
        progress.applied(7, b"");
        assert_eq!((progress.live(7), progress.live(9)), (Next::Skip, Next::Replay(8)));
        progress.applied(9, b"");
        assert_eq!(progress.live(10), Next::Apply);
        progress.applied(10, b"");
        // Complaints 21 and 23: a number that falls is an engine that began anew, also where nothing can be replayed.
        assert_eq!(progress.live(0), Next::ForgetAndApply);
    }

    #[test]
    fn what_a_replay_gave_is_not_taken_in_again_when_it_comes_live() {
        let mut progress = at(20);
        progress.connected();
        assert_eq!(
            (progress.live(18), progress.live(19), progress.live(20)),
            (Next::Skip, Next::Skip, Next::Skip)
        );
        assert_eq!((progress.live(21), progress.live(3)), (Next::Apply, Next::ForgetAndApply));
    }

    #[test]
    fn a_replay_shows_whether_it_is_the_same_engine() {
        let progress = at(5);
        assert_eq!(progress.replay_from(), 5);
        assert_eq!(progress.replayed(5, b"as before", true), Next::Skip);
        assert_eq!(progress.replayed(6, b"new", false), Next::Apply);
        // Another one that has come as far; one whose buffer begins later; a hole within.
        assert_eq!(progress.replayed(5, b"something else", true), Next::ForgetAndApply);
        assert_eq!(progress.replayed(6, b"new", true), Next::ForgetAndApply);
        assert_eq!(progress.replayed(8, b"new", false), Next::ForgetAndApply);
    }
}
