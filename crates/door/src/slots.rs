//! Bounds the open connections of one door (TCP or HTTP) of a program. Its peers prove nothing, so they must leave memory,
//! threads and descriptors to engines.

use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};

/// A door takes at most this fraction of the process's descriptors: one sixteenth.
const DESCRIPTORS_PART: u64 = 16;

/// The connection limit of one door, and a count of the connections beyond it.
#[derive(Debug)]
pub struct Slots {
    taken: AtomicUsize,
    most: usize,
    turned_away: AtomicU64,
}

/// Counts an open connection until it is dropped.
#[derive(Debug)]
pub struct Slot(Arc<Slots>);

impl Slots {
    /// At most `most` slots. Fewer if the process may have few `descriptors` (None: any number).
    pub fn new(most: usize, descriptors: Option<u64>) -> Arc<Self> {
        let part = descriptors.map_or(u64::MAX, |all| (all / DESCRIPTORS_PART).max(1));
        let most = most.min(usize::try_from(part).unwrap_or(usize::MAX));
        Arc::new(Self { taken: AtomicUsize::new(0), most, turned_away: AtomicU64::new(0) })
    }

    /// Takes a slot for a new connection. None if all are taken: the caller closes the connection.
    pub fn take(self: &Arc<Self>) -> Option<Slot> {
        let one_more = |taken: usize| (taken < self.most).then_some(taken + 1);
        let taken = self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        if taken.is_err() {
            self.turned_away.fetch_add(1, Ordering::Relaxed);
        }
        taken.ok().map(|_| Slot(Arc::clone(self)))
    }

    /// Connections that found no slot so far.
    pub fn turned_away(&self) -> u64 {
        self.turned_away.load(Ordering::Relaxed)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_are_open_at_once_and_the_others_are_counted() {
        let slots = Slots::new(2, Some(1 << 20));
        let (one, _two) = (slots.take().unwrap(), slots.take().unwrap());
        assert!(slots.take().is_none());
        drop(one);
        let _three = slots.take().unwrap();
        assert!(slots.take().is_none());
        assert_eq!(slots.turned_away(), 2);
    }

    #[test]
    fn where_descriptors_are_few_a_door_takes_few() {
        assert_eq!(Slots::new(64, Some(256)).most, 16);
        assert_eq!(Slots::new(64, Some(4)).most, 1);
        assert_eq!(Slots::new(64, None).most, 64);
    }
}
