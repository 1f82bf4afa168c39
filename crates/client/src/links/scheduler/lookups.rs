//! The engine's lookups, by the names that the engine gives them, from their start until it takes the answer.
//!
//! ```text
//!   Unsent --(the engine is open)--> Sent --(LookupResult, Refused)--> Answered --> taken
//!      |                               |                                  |
//!      +---- timeout, forgotten -------+------- forgotten: its lease is released
//! ```

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use kvlane_proto::v1;

use crate::hit::Hit;

/// Most lookups whose answer is not taken; beyond that, new ones are misses.
pub(super) const PENDING_MAX: usize = 4096;

/// A lookup that is held until the engine is open.
#[derive(Debug)]
pub(super) struct Unsent {
    pub(super) ask: v1::Lookup,
    /// When it becomes a miss.
    pub(super) until: Instant,
    pub(super) timeout: Duration,
}

#[derive(Debug)]
pub(super) enum Lookup {
    Unsent(Unsent),
    /// In flight under this request id; becomes a miss at `until`.
    Sent {
        id: u64,
        until: Instant,
    },
    /// Answered, and not taken by the engine.
    Answered(Hit),
}

/// All lookups whose answer the engine has not taken.
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

    /// Takes the lookups that were not sent, in the order of their names.
    pub(super) fn take_unsent(&mut self) -> Vec<(String, Unsent)> {
        let (mut unsent, mut others) = (Vec::new(), HashMap::new());
        for (request, lookup) in self.by_request.drain() {
            match lookup {
                Lookup::Unsent(lookup) => unsent.push((request, lookup)),
                other => drop(others.insert(request, other)),
            }
        }
        self.by_request = others;
        // A hash map has no stable order, and a seed of the simulation has to repeat exactly.
        unsent.sort_by(|(one, _), (other, _)| one.cmp(other));
        unsent
    }

    /// Moves the deadline of the lookup that was sent under this id, because the daemon needs longer.
    pub(super) fn extend(&mut self, request: &str, id: u64, longer: Instant) {
        if let Some(Lookup::Sent { id: sent, until }) = self.by_request.get_mut(request)
            && *sent == id
        {
            *until = longer;
        }
    }

    /// Drops all lookups, because the connection is over. Returns the hits that the engine has not taken.
    pub(super) fn clear(&mut self) -> Vec<Hit> {
        let untaken = self.by_request.drain().filter_map(|(_, lookup)| match lookup {
            Lookup::Answered(hit) if hit.tokens > 0 => Some(hit),
            _ => None,
        });
        untaken.collect()
    }
}
