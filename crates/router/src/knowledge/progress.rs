//! How far an engine's events have come: which messages are taken in, which are missing, and whether it is the same engine.
//!
//! ```text
//!   connect --> subscribe --> replay from the last message that was taken in --> live messages
//!                               |  it is not there, or another one: the engine began anew      | a number is missing
//!                               v                                                              v
//!                             forget all, replay from 0                                     replay from it
//! ```
//! Without a replay socket, what is missing is lost: all that was known is forgotten then. Pure.

use kvlane_kv_events::sequence::{Step, Tracker};
use xxhash_rust::xxh3::xxh3_64;

/// What is to be done with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Take it in.
    Take,
    /// It was taken in before.
    Skip,
    /// The engine began anew: forget all, and take it in.
    ForgetAndTake,
    /// Messages before it are missing, from this number on: have them replayed, this one with them.
    Replay(u64),
}

/// Of one engine.
#[derive(Debug, Clone, Copy, Default)]
pub struct Progress {
    /// The last message that was taken in, and a hash of what it said.
    taken: Option<(u64, u64)>,
    /// Of this connection.
    live: Tracker,
}

impl Progress {
    /// A new connection: nothing came over it yet.
    pub fn connected(&mut self) {
        self.live = Tracker::default();
    }

    /// All is forgotten, as of an engine that began anew.
    pub fn forgotten(&mut self) {
        self.taken = None;
    }

    /// The number from which messages should be replayed: the last that was taken in, so that it can be compared.
    pub fn replay_from(&self) -> u64 {
        self.taken.map_or(0, |(number, _)| number)
    }

    /// Whether anything was taken in.
    pub fn has_begun(&self) -> bool {
        self.taken.is_some()
    }

    /// A live message came.
    pub fn live(&mut self, number: u64) -> Next {
        let step = self.live.take(number);
        let Some((taken, _)) = self.taken else { return Next::Take };
        match step {
            Step::Restarted => Next::ForgetAndTake,
            Step::Duplicate => Next::Skip,
            Step::InOrder | Step::Gap { .. } if number <= taken => Next::Skip,
            Step::InOrder | Step::Gap { .. } if number == taken + 1 => Next::Take,
            Step::InOrder | Step::Gap { .. } => Next::Replay(taken + 1),
        }
    }

    /// A replayed message came. `is_first`: of this replay, which began with [`Progress::replay_from`].
    pub fn replayed(&self, number: u64, payload: &[u8], is_first: bool) -> Next {
        match self.taken {
            None => Next::Take,
            Some((taken, said)) if number == taken => {
                if said == xxh3_64(payload) {
                    Next::Skip
                } else {
                    Next::ForgetAndTake
                }
            }
            // The engine no longer has the message that was asked for, so what lies between is lost.
            Some((taken, _)) if number > taken + 1 || is_first => Next::ForgetAndTake,
            Some((taken, _)) if number < taken => Next::Skip,
            Some(_) => Next::Take,
        }
    }

    /// A message was taken in.
    pub fn took(&mut self, number: u64, payload: &[u8]) {
        self.taken = Some((number, xxh3_64(payload)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(number: u64) -> Progress {
        let mut progress = Progress::default();
        progress.took(number, b"as before");
        progress
    }

    #[test]
    fn live_messages_are_taken_in_once_and_gaps_are_replayed() {
        let mut progress = Progress::default();
        assert_eq!(progress.live(7), Next::Take);
        progress.took(7, b"");
        assert_eq!((progress.live(7), progress.live(9)), (Next::Skip, Next::Replay(8)));
        progress.took(9, b"");
        assert_eq!(progress.live(10), Next::Take);
        progress.took(10, b"");
        // Complaints 21 and 23: a number that falls is an engine that began anew, also where nothing can be replayed.
        assert_eq!(progress.live(0), Next::ForgetAndTake);
    }

    #[test]
    fn what_a_replay_gave_is_not_taken_in_again_when_it_comes_live() {
        let mut progress = at(20);
        progress.connected();
        assert_eq!(
            (progress.live(18), progress.live(19), progress.live(20)),
            (Next::Skip, Next::Skip, Next::Skip)
        );
        assert_eq!((progress.live(21), progress.live(3)), (Next::Take, Next::ForgetAndTake));
    }

    #[test]
    fn a_replay_shows_whether_it_is_the_same_engine() {
        let progress = at(5);
        assert_eq!(progress.replay_from(), 5);
        assert_eq!(progress.replayed(5, b"as before", true), Next::Skip);
        assert_eq!(progress.replayed(6, b"new", false), Next::Take);
        // Another one that has come as far; one whose buffer begins later; a hole within.
        assert_eq!(progress.replayed(5, b"something else", true), Next::ForgetAndTake);
        assert_eq!(progress.replayed(6, b"new", true), Next::ForgetAndTake);
        assert_eq!(progress.replayed(8, b"new", false), Next::ForgetAndTake);
    }
}
