//! The hit-rate ceiling of what engines look up: what a cache without limit could have hit.
//!
//! Counted in a thread of its own: a lookup hands its block hashes over and goes on, and who reads the figures, some
//! milliseconds of work for each namespace, keeps no lookup waiting.

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

/// Lookups that wait to be counted, of some kilobytes each; of more, each is left out and counted as such.
const WAITING_MAX: usize = 1024;
/// How long a reader waits for the thread.
const PATIENCE: Duration = Duration::from_secs(1);

/// A ceiling as it is read.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Reading {
    /// None: of all together.
    pub(crate) namespace: Option<Namespace>,
    /// "15m", "1h", "24h".
    pub(crate) window: &'static str,
    /// 0 to 1.
    pub(crate) ratio: f64,
}

enum Event {
    Asked(Namespace, Vec<u64>),
    Read(mpsc::Sender<Vec<Reading>>),
    Stop,
}

/// Counts what is looked up.
pub(crate) struct HitCeilings {
    events: mpsc::SyncSender<Event>,
    left_out: AtomicU64,
    thread: Option<JoinHandle<()>>,
}

impl HitCeilings {
    pub(crate) fn start() -> io::Result<Self> {
        let (events, come) = mpsc::sync_channel(WAITING_MAX);
        let thread = std::thread::Builder::new().name("kvlane-ceiling".into()).spawn(move || count(&come))?;
        Ok(Self { events, left_out: AtomicU64::new(0), thread: Some(thread) })
    }

    /// A prompt's blocks were looked up.
    pub(crate) fn record(&self, namespace: Namespace, hashes: &[BlockHash]) {
        if hashes.is_empty() {
            return;
        }
        let keys = hashes.iter().map(|hash| number(&hash.0)).collect();
        if self.events.try_send(Event::Asked(namespace, keys)).is_err() {
            self.left_out.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Lookups that were not counted.
    pub(crate) fn left_out(&self) -> u64 {
        self.left_out.load(Ordering::Relaxed)
    }

    /// All ceilings of which there was a reference in their window.
    pub(crate) fn read(&self) -> Vec<Reading> {
        let (answer, answered) = mpsc::channel();
        if self.events.try_send(Event::Read(answer)).is_err() {
            return Vec::new();
        }
        answered.recv_timeout(PATIENCE).unwrap_or_default()
    }
}

impl Drop for HitCeilings {
    fn drop(&mut self) {
        // The thread takes what waits and comes to it.
        let _ = self.events.send(Event::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that counts lookups had panicked");
        }
    }
}

fn count(events: &mpsc::Receiver<Event>) {
    let mut ceilings = Ceilings::new();
    let mut names: HashMap<u64, Namespace> = HashMap::new();
    while let Ok(event) = events.recv() {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        match event {
            Event::Asked(namespace, keys) => {
                let number = number(&namespace.0);
                ceilings.record(number, &keys, now);
                if !names.contains_key(&number) {
                    // Only those that are counted apart: a bounded number.
                    let counted: Vec<u64> = ceilings.namespaces().map(|(known, _)| known).collect();
                    names.retain(|known, _| counted.contains(known));
                    if counted.contains(&number) {
                        names.insert(number, namespace);
                    }
                }
            }
            Event::Read(answer) => {
                let of_all = readings(None, ceilings.total(), now);
                let apart = ceilings.namespaces().filter_map(|(number, ceiling)| {
                    names.get(&number).map(|namespace| readings(Some(*namespace), ceiling, now))
                });
                // Fails where nobody waits any more.
                let _ = answer.send(of_all.into_iter().chain(apart.flatten()).collect());
            }
            Event::Stop => return,
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

/// Block hashes and namespaces are digests: half of their bytes tell them apart as well as this estimate needs.
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
