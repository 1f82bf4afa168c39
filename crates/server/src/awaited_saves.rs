//! Lookups that await another engine's saves, listed by that engine. All of them end when the engine goes or the daemon
//! stops. calls/awaited_save.rs says how a single wait goes on.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use parking_lot::Mutex;

/// How an event ends a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// All blocks are visible.
    Complete,
    /// A block will not come.
    Failed,
    /// The engine that saves has lost its scheduler or a worker.
    Gone,
    /// The daemon stops.
    Stopping,
}

/// Events of one wait since its last poll. Wakes the waiting thread once for all of them.
pub(crate) struct Signal {
    pending: Mutex<Pending>,
    wake: Box<dyn Fn() + Send + Sync>,
}

#[derive(Default)]
struct Pending {
    has_progressed: bool,
    end: Option<End>,
    /// `wake` was called since the last `take`.
    is_awake: bool,
}

impl Signal {
    /// `wake` is called under other locks: it must be quick.
    pub(crate) fn new(wake: impl Fn() + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { pending: Mutex::default(), wake: Box::new(wake) })
    }

    /// The saves make progress.
    pub(crate) fn progress(&self) {
        self.update(|pending| pending.has_progressed = true);
    }

    /// Ends the wait. The first end counts.
    pub(crate) fn end(&self, end: End) {
        self.update(|pending| pending.end = pending.end.or(Some(end)));
    }

    /// Returns whether there was progress since the last call, and the end if there is one. A later event wakes again.
    pub(crate) fn take(&self) -> (bool, Option<End>) {
        let mut pending = self.pending.lock();
        pending.is_awake = false;
        (std::mem::take(&mut pending.has_progressed), pending.end)
    }

    fn update(&self, change: impl FnOnce(&mut Pending)) {
        let mut pending = self.pending.lock();
        change(&mut pending);
        if !std::mem::replace(&mut pending.is_awake, true) {
            (self.wake)();
        }
    }
}

/// The waits of all lookups that await saves.
#[derive(Default)]
pub(crate) struct AwaitedSaves {
    waits: Mutex<Waits>,
    /// A bit for each outcome that the log has complained of.
    complained: AtomicU32,
}

#[derive(Default)]
struct Waits {
    by_engine: HashMap<String, HashMap<u64, Arc<Signal>>>,
    last: u64,
}

/// Keeps a wait listed until it is dropped.
pub(crate) struct Listed {
    of: Arc<AwaitedSaves>,
    engine_id: String,
    number: u64,
}

impl Drop for Listed {
    fn drop(&mut self) {
        let mut waits = self.of.waits.lock();
        if let Some(of_engine) = waits.by_engine.get_mut(&self.engine_id) {
            of_engine.remove(&self.number);
            if of_engine.is_empty() {
                waits.by_engine.remove(&self.engine_id);
            }
        }
    }
}

impl AwaitedSaves {
    /// Lists a wait, so that it ends when the engine goes or the daemon stops.
    pub(crate) fn enter(all: &Arc<Self>, engine_id: &str, signal: Arc<Signal>) -> Listed {
        let mut waits = all.waits.lock();
        waits.last += 1;
        let number = waits.last;
        waits.by_engine.entry(engine_id.to_owned()).or_default().insert(number, signal);
        Listed { of: Arc::clone(all), engine_id: engine_id.to_owned(), number }
    }

    /// Ends all waits for an engine's saves.
    pub(crate) fn end_all_of(&self, engine_id: &str, end: End) {
        let waits = self.waits.lock();
        waits.by_engine.get(engine_id).into_iter().flat_map(HashMap::values).for_each(|wait| wait.end(end));
    }

    /// Ends all waits, because the daemon stops.
    pub(crate) fn stop(&self) {
        let waits = self.waits.lock();
        waits.by_engine.values().flat_map(HashMap::values).for_each(|wait| wait.end(End::Stopping));
    }

    /// Marks an outcome, by its number below 32, as complained of. True the first time.
    pub(crate) fn mark_complained(&self, outcome: u32) -> bool {
        let bit = 1 << (outcome % u32::BITS);
        self.complained.fetch_or(bit, Ordering::Relaxed) & bit == 0
    }

    /// Whether a lookup awaits an engine's saves. Costs a lock and a search of a map.
    pub(crate) fn has_waits_for(&self, engine_id: &str) -> bool {
        self.waits.lock().by_engine.contains_key(engine_id)
    }

    /// How many lookups wait.
    pub(crate) fn len(&self) -> usize {
        self.waits.lock().by_engine.values().map(HashMap::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    fn counted() -> (Arc<Signal>, Arc<AtomicUsize>) {
        let wakes = Arc::new(AtomicUsize::new(0));
        let of_signal = Arc::clone(&wakes);
        let wake = move || {
            of_signal.fetch_add(1, Ordering::Relaxed);
        };
        (Signal::new(wake), wakes)
    }

    #[test]
    fn a_signal_wakes_once_for_all_that_happened_and_keeps_its_first_end() {
        let (signal, wakes) = counted();
        for _ in 0..1000 {
            signal.progress();
        }
        assert_eq!(wakes.load(Ordering::Relaxed), 1);
        assert_eq!(signal.take(), (true, None));
        signal.end(End::Gone);
        signal.end(End::Complete);
        assert_eq!(wakes.load(Ordering::Relaxed), 2);
        assert_eq!(signal.take(), (false, Some(End::Gone)));
    }

    #[test]
    fn an_end_reaches_those_who_wait_for_that_engine() {
        let all = Arc::new(AwaitedSaves::default());
        let signals: Vec<_> = (0..3).map(|_| counted().0).collect();
        let names = ["p", "p", "q"];
        let mut listed: Vec<_> = names
            .iter()
            .zip(&signals)
            .map(|(name, signal)| AwaitedSaves::enter(&all, name, Arc::clone(signal)))
            .collect();
        assert_eq!(all.len(), 3);
        all.end_all_of("p", End::Gone);
        all.end_all_of("nobody", End::Gone);
        let ends = |signals: &[Arc<Signal>]| signals.iter().map(|signal| signal.take().1).collect::<Vec<_>>();
        assert_eq!(ends(&signals), [Some(End::Gone), Some(End::Gone), None]);
        listed.remove(0);
        assert!(all.has_waits_for("p") && all.has_waits_for("q") && !all.has_waits_for("nobody"));
        all.stop();
        assert_eq!(ends(&signals), [Some(End::Gone), Some(End::Gone), Some(End::Stopping)]);
        listed.clear();
        assert_eq!(all.len(), 0);
        assert!(!all.has_waits_for("p") && !all.has_waits_for("q"));
        assert!(all.mark_complained(1) && !all.mark_complained(1) && all.mark_complained(2));
    }
}
