//! The engine's lookups by its names of them, from asking until the answer is taken.
//!
//! ```text
//!   Unsent --(the engine is open)--> Sent --(LookupResult, Refused)--> Answered --> taken
//!      |                               |                                  |
//!      +---- out of time, forgotten ---+------- forgotten: its lease goes back
//! ```

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use kvlane_proto::v1;

use crate::hit::Hit;

/// Lookups that wait for their answer to be taken; beyond it new ones are misses.
pub(super) const PENDING_MAX: usize = 4096;

/// A lookup that nobody was asked yet.
#[derive(Debug)]
pub(super) struct Unsent {
    pub(super) ask: v1::Lookup,
    /// Without an answer by then it is a miss.
    pub(super) until: Instant,
    pub(super) timeout: Duration,
}

/// One lookup.
#[derive(Debug)]
pub(super) enum Lookup {
    /// To be sent when the engine is open.
    Unsent(Unsent),
    /// On its way under this id.
    Sent { id: u64, until: Instant },
    /// Waits to be taken.
    Answered(Hit),
}

/// All lookups that were not taken yet.
#[derive(Debug, Default)]
pub(super) struct Lookups {
    by_request: HashMap<String, Lookup>,
}

impl Lookups {
    pub(super) fn is_full(&self) -> bool {
        self.by_request.len() >= PENDING_MAX
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_request.is_empty()
    }

    pub(super) fn insert(&mut self, request: String, lookup: Lookup) {
        self.by_request.insert(request, lookup);
    }

    pub(super) fn get(&self, request: &str) -> Option<&Lookup> {
        self.by_request.get(request)
    }

    pub(super) fn remove(&mut self, request: &str) -> Option<Lookup> {
        self.by_request.remove(request)
    }

    /// Takes out what was not sent.
    pub(super) fn take_unsent(&mut self) -> Vec<(String, Unsent)> {
        let (mut unsent, mut others) = (Vec::new(), HashMap::new());
        for (request, lookup) in self.by_request.drain() {
            match lookup {
                Lookup::Unsent(lookup) => unsent.push((request, lookup)),
                other => drop(others.insert(request, other)),
            }
        }
        self.by_request = others;
        // A map has no order of its own, and a seed of the simulation is to play the same again.
        unsent.sort_by(|(one, _), (other, _)| one.cmp(other));
        unsent
    }

    /// The daemon needs longer for what was sent under this id.
    pub(super) fn prolong(&mut self, request: &str, id: u64, longer: Instant) {
        if let Some(Lookup::Sent { id: sent, until }) = self.by_request.get_mut(request)
            && *sent == id
        {
            *until = longer;
        }
    }

    /// What was asked will not be answered, and what was answered is of a run that is over. The hits that nobody has taken.
    pub(super) fn clear(&mut self) -> Vec<Hit> {
        let untaken = self.by_request.drain().filter_map(|(_, lookup)| match lookup {
            Lookup::Answered(hit) if hit.tokens > 0 => Some(hit),
            _ => None,
        });
        untaken.collect()
    }
}
