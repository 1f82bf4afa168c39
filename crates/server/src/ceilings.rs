//! The hit-rate ceiling: the share of looked-up blocks that a cache without limit could have hit.
//!
//! A thread of its own counts. A lookup only queues its block hashes, and a reader of the figures, which takes some
//! milliseconds for each namespace, keeps no lookup waiting.

use std::{
    collections::HashMap,
    io,
    sync::{
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use kvlane_block::{BlockHash, Namespace};
use kvlane_policy::{Ceiling, Ceilings};

/// Most lookups in the queue, some kilobytes each. A lookup beyond that is left out, and counted as such.
const WAITING_MAX: usize = 1024;
/// How long a reader waits for the thread.
const PATIENCE: Duration = Duration::from_secs(1);

/// A ceiling at one moment.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Reading {
    /// None for all namespaces together.
    pub(crate) namespace: Option<Namespace>,
    /// "15m", "1h" or "24h".
    pub(crate) window: &'static str,
    /// Share of the looked-up blocks, 0 to 1.
    pub(crate) ratio: f64,
}

enum CeilingEvent {
    LookedUp(Namespace, Vec<u64>),
    Read(mpsc::Sender<Vec<Reading>>),
    Stop,
}

/// The counting thread, and its queue.
pub(crate) struct HitCeilings {
    events: mpsc::SyncSender<CeilingEvent>,
    /// Lookups that found the queue full.
    left_out: AtomicU64,
    thread: Option<JoinHandle<()>>,
}

impl HitCeilings {
    pub(crate) fn start() -> io::Result<Self> {
        let (events, receiver) = mpsc::sync_channel(WAITING_MAX);
        let thread =
            std::thread::Builder::new().name("kvlane-ceiling".into()).spawn(move || count(&receiver))?;
        Ok(Self { events, left_out: AtomicU64::new(0), thread: Some(thread) })
    }

    /// Queues the blocks of a looked-up prompt.
    pub(crate) fn record(&self, namespace: Namespace, hashes: &[BlockHash]) {
        if hashes.is_empty() {
            return;
        }
        let keys = hashes.iter().map(|hash| number(&hash.0)).collect();
        if self.events.try_send(CeilingEvent::LookedUp(namespace, keys)).is_err() {
            self.left_out.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Lookups that were not counted.
    pub(crate) fn left_out(&self) -> u64 {
        self.left_out.load(Ordering::Relaxed)
    }

    /// All ceilings whose window has a block reference. Empty if the thread is too busy to answer in time.
    pub(crate) fn read(&self) -> Vec<Reading> {
        let (answer, answered) = mpsc::channel();
        if self.events.try_send(CeilingEvent::Read(answer)).is_err() {
            return Vec::new();
        }
        answered.recv_timeout(PATIENCE).unwrap_or_default()
    }
}

impl Drop for HitCeilings {
    fn drop(&mut self) {
        // Waits for room in the queue. The thread counts what is queued before it stops.
        let _ = self.events.send(CeilingEvent::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            // Log: a bug: `kvlane_hit_ceiling_ratio` is no longer updated; caching works. Do: report it, with the
            // daemon's log.
            tracing::error!("thread kvlane-ceiling panicked");
        }
    }
}

fn count(events: &mpsc::Receiver<CeilingEvent>) {
    let mut ceilings = Ceilings::new();
    let mut names: HashMap<u64, Namespace> = HashMap::new();
    while let Ok(event) = events.recv() {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        match event {
            CeilingEvent::LookedUp(namespace, keys) => {
                let number = number(&namespace.0);
                ceilings.record(number, &keys, now);
                if !names.contains_key(&number) {
                    // Names are kept only for namespaces that are counted apart, which bounds them.
                    let counted: Vec<u64> = ceilings.namespaces().map(|(number, _)| number).collect();
                    names.retain(|number, _| counted.contains(number));
                    if counted.contains(&number) {
                        names.insert(number, namespace);
                    }
                }
            }
            CeilingEvent::Read(answer) => {
                let of_all = readings(None, ceilings.total(), now);
                let apart = ceilings.namespaces().filter_map(|(number, ceiling)| {
                    names.get(&number).map(|namespace| readings(Some(*namespace), ceiling, now))
                });
                // Fails if the reader has given up.
                let _ = answer.send(of_all.into_iter().chain(apart.flatten()).collect());
            }
            CeilingEvent::Stop => return,
        }
    }
}

fn readings(namespace: Option<Namespace>, ceiling: &Ceiling, now: Duration) -> Vec<Reading> {
    let windows = ceiling.read(now).into_iter();
    let reading = |(window, count): (kvlane_policy::Window, kvlane_policy::WindowCount)| {
        Some(Reading { namespace, window: window.name(), ratio: count.ceiling()? })
    };
    windows.filter_map(reading).collect()
}

/// Half of a digest. Block hashes and namespaces are digests, and half of their bytes tells them apart well enough for this
/// estimate.
fn number(digest: &[u8; 16]) -> u64 {
    u128::from_le_bytes(*digest) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(prompt: u64, block: u64) -> BlockHash {
        BlockHash(u128::from(kvlane_policy::spread(prompt << 32 | block)).to_le_bytes())
    }

    #[test]
    fn what_is_asked_for_again_could_have_been_hit() {
        let ceilings = HitCeilings::start().unwrap();
        let (one, two) = (Namespace([1; 16]), Namespace([2; 16]));
        // The first namespace sees each prompt four times, the second each once.
        for prompt in 0..40 {
            let blocks = |prompt| (0..100).map(|block| hash(prompt, block)).collect::<Vec<_>>();
            ceilings.record(one, &blocks(prompt % 10));
            ceilings.record(two, &blocks(prompt));
        }
        let read = ceilings.read();
        let ratio = |namespace, window| {
            let is_it = |reading: &&Reading| reading.namespace == namespace && reading.window == window;
            read.iter().find(is_it).unwrap().ratio
        };
        for window in ["15m", "1h", "24h"] {
            assert!((ratio(Some(one), window) - 0.75).abs() < 0.02, "{read:?}");
            assert!(ratio(Some(two), window) < 0.03, "{read:?}");
            assert!((ratio(None, window) - 0.375).abs() < 0.02, "{read:?}");
        }
        assert_eq!(ceilings.left_out(), 0);
    }
}
