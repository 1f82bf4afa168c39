//! Lookups that wait for what an engine saves, by that engine: its end, and the daemon's, are told to them.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use parking_lot::Mutex;

/// How a wait ends by what happens elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// Everything is there.
    Complete,
    /// A block will not come.
    Failed,
    /// The engine that saves has lost its scheduler or a worker.
    Gone,
    /// The daemon stops.
    Stopping,
}

/// What has happened to one wait since its last look. Wakes who waits once for all of it.
pub(crate) struct Signal {
    news: Mutex<News>,
    wake: Box<dyn Fn() + Send + Sync>,
}

#[derive(Default)]
struct News {
    has_progressed: bool,
    end: Option<End>,
    is_awake: bool,
}

impl Signal {
    /// `wake` is called under other locks: it must be quick.
    pub(crate) fn new(wake: impl Fn() + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { news: Mutex::default(), wake: Box::new(wake) })
    }

    /// The saves go on.
    pub(crate) fn progress(&self) {
        self.note(|news| news.has_progressed = true);
    }

    /// It is over. The first end counts.
    pub(crate) fn end(&self, end: End) {
        self.note(|news| news.end = news.end.or(Some(end)));
    }

    /// Whether there was progress, and how it ended if it has. What comes after wakes anew.
    pub(crate) fn take(&self) -> (bool, Option<End>) {
        let mut news = self.news.lock();
        news.is_awake = false;
        (std::mem::take(&mut news.has_progressed), news.end)
    }

    fn note(&self, what: impl FnOnce(&mut News)) {
        let mut news = self.news.lock();
        what(&mut news);
        if !std::mem::replace(&mut news.is_awake, true) {
            (self.wake)();
        }
    }
}

/// All waits.
#[derive(Default)]
pub(crate) struct HandOffs {
    waits: Mutex<Waits>,
    /// A bit for each outcome that was complained of.
    complained: AtomicU32,
}

#[derive(Default)]
struct Waits {
    by_engine: HashMap<String, HashMap<u64, Arc<Signal>>>,
    last: u64,
}

/// The place of a wait among all, until it is over.
pub(crate) struct Place {
    of: Arc<HandOffs>,
    engine_id: String,
    number: u64,
}

impl Drop for Place {
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

impl HandOffs {
    /// From now on this wait hears when the engine goes, or the daemon.
    pub(crate) fn enter(all: &Arc<Self>, engine_id: &str, signal: Arc<Signal>) -> Place {
        let mut waits = all.waits.lock();
        waits.last += 1;
        let number = waits.last;
        waits.by_engine.entry(engine_id.to_owned()).or_default().insert(number, signal);
        Place { of: Arc::clone(all), engine_id: engine_id.to_owned(), number }
    }

    /// Ends all waits for an engine.
    pub(crate) fn end_of(&self, engine_id: &str, end: End) {
        let waits = self.waits.lock();
        waits.by_engine.get(engine_id).into_iter().flat_map(HashMap::values).for_each(|wait| wait.end(end));
    }

    /// The daemon stops.
    pub(crate) fn stop(&self) {
        let waits = self.waits.lock();
        waits.by_engine.values().flat_map(HashMap::values).for_each(|wait| wait.end(End::Stopping));
    }

    /// True once for each number below 32.
    pub(crate) fn is_first_complaint(&self, of: u32) -> bool {
        let bit = 1 << (of % u32::BITS);
        self.complained.fetch_or(bit, Ordering::Relaxed) & bit == 0
    }

    /// Whether somebody waits for what an engine saves. Takes as long as a lock and a look into a map.
    pub(crate) fn is_waited_for(&self, engine_id: &str) -> bool {
        self.waits.lock().by_engine.contains_key(engine_id)
    }

    /// Waits that there are.
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
        let all = Arc::new(HandOffs::default());
        let signals: Vec<_> = (0..3).map(|_| counted().0).collect();
        let names = ["p", "p", "q"];
        let mut places: Vec<_> = names
            .iter()
            .zip(&signals)
            .map(|(name, signal)| HandOffs::enter(&all, name, Arc::clone(signal)))
            .collect();
        assert_eq!(all.len(), 3);
        all.end_of("p", End::Gone);
        all.end_of("nobody", End::Gone);
        let ends = |signals: &[Arc<Signal>]| signals.iter().map(|signal| signal.take().1).collect::<Vec<_>>();
        assert_eq!(ends(&signals), [Some(End::Gone), Some(End::Gone), None]);
        places.remove(0);
        assert!(all.is_waited_for("p") && all.is_waited_for("q") && !all.is_waited_for("nobody"));
        all.stop();
        assert_eq!(ends(&signals), [Some(End::Gone), Some(End::Gone), Some(End::Stopping)]);
        places.clear();
        assert_eq!(all.len(), 0);
        assert!(!all.is_waited_for("p") && !all.is_waited_for("q"));
        assert!(all.is_first_complaint(1) && !all.is_first_complaint(1) && all.is_first_complaint(2));
    }
}
