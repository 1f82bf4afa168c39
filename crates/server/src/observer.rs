//! The observer: a thread that counts the hit-rate ceiling and records requests, beside the threads that serve them.
//!
//! ```text
//!   lookup --(queue of 1,024)--> kvlane-observer --> Ceilings                            <-- metrics read them
//!   end of a request -------------'      '---------> Recorder (locked), while one reads  <-- kvlane record reads it
//! ```
//! A lookup only queues its block hashes, and a reader keeps no lookup waiting. The ceiling is the share of looked-up blocks
//! that a cache without limit could have hit. Requests are recorded from the first read on, until 10 s after the last one.

use std::{
    collections::HashMap,
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use kvlane_block::{BlockHash, Namespace};
use kvlane_policy::{Ceiling, Ceilings, Window, WindowCount, spread};
use kvlane_trace::{Ended, LookedUp, Read, Recorder};
use parking_lot::Mutex;

/// Most lookups in the queue, some kilobytes each. A lookup beyond that is left out, and counted as such.
const WAITING_MAX: usize = 1024;
/// How long a reader waits for the thread.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long the last read of a recording waits for what is queued.
const FLUSH_PATIENCE: Duration = Duration::from_secs(5);
/// A recording that nobody has read for so long is over.
const UNREAD_MAX: Duration = Duration::from_secs(10);
/// Most models of a recording; as many as the daemon keeps spaces.
const MODELS_MAX: usize = 4096;

/// The hits of a window and their ceiling at one moment.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Reading {
    /// None for all namespaces together.
    pub(crate) namespace: Option<Namespace>,
    /// "15m", "1h" or "24h", or as the operator chose.
    pub(crate) window: Window,
    /// Blocks that were looked up; at least one.
    pub(crate) references: u64,
    /// Share of them that were hits, 0 to 1.
    pub(crate) hit_ratio: f64,
    /// Share of them that a cache without limit could have hit, 0 to 1.
    pub(crate) ceiling: f64,
}

/// A model of a recording.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Model {
    /// The namespace that its recorded blocks are named by.
    pub(crate) namespace: Namespace,
    pub(crate) name: String,
    pub(crate) tokens_per_block: u32,
    /// Bytes of a block and of its further groups' blocks, of all workers.
    pub(crate) block_bytes: u64,
    /// Namespaces of its other groups.
    pub(crate) further: Vec<Namespace>,
}

/// The answer to a reader of the recording.
#[derive(Debug, Default)]
pub(crate) struct ReadOut {
    pub(crate) read: Read,
    pub(crate) forgotten_blocks: u64,
    /// Requests since the recording began whose lookup or end was not recorded.
    pub(crate) left_out: u64,
    /// When the recording began.
    pub(crate) since: Duration,
}

enum Event {
    /// The keys of the blocks that one group's lookup searched, and how many of them were hits.
    Counted(Namespace, Vec<u64>, u64),
    LookedUp(Box<LookedUp>),
    Ended(Vec<Ended>),
    EngineLeft(Arc<str>),
    ReadCeilings(mpsc::Sender<Vec<Reading>>),
    /// Answered when all before it is recorded.
    Flush(mpsc::Sender<()>),
    Stop,
}

/// The thread and its queue.
pub(crate) struct Observer {
    events: mpsc::SyncSender<Event>,
    /// Lookups that found the queue full, for the ceiling.
    left_out: AtomicU64,
    /// Requests whose lookup or end was not recorded.
    unrecorded: Arc<AtomicU64>,
    is_recording: Arc<AtomicBool>,
    /// Those of the present recording.
    models: Arc<Mutex<HashMap<Namespace, Model>>>,
    recording: Arc<Mutex<Recording>>,
    thread: Option<JoinHandle<()>>,
}

impl Observer {
    /// Starts the thread. `windows` are those of the ceiling.
    pub(crate) fn start(windows: &[Window]) -> io::Result<Self> {
        let (events, receiver) = mpsc::sync_channel(WAITING_MAX);
        let (unrecorded, is_recording, models) =
            <(Arc<AtomicU64>, Arc<AtomicBool>, Arc<Mutex<_>>)>::default();
        let counting = Counting::new(windows);
        let recording = Arc::new(Mutex::new(Recording {
            recorder: None,
            read_at: None,
            unrecorded_before: 0,
            unrecorded: Arc::clone(&unrecorded),
            is_on: Arc::clone(&is_recording),
            models: Arc::clone(&models),
        }));
        let observed = Arc::clone(&recording);
        let run = move || observe(&receiver, counting, &observed);
        let thread = std::thread::Builder::new().name("kvlane-observer".into()).spawn(run)?;
        Ok(Self {
            events,
            left_out: AtomicU64::new(0),
            unrecorded,
            is_recording,
            models,
            recording,
            thread: Some(thread),
        })
    }

    /// Queues the blocks of a looked-up prompt, of which `hits` were hits, for the ceiling.
    pub(crate) fn count(&self, namespace: Namespace, hashes: &[BlockHash], hits: u64) {
        if !hashes.is_empty() {
            let was_queued = self.queue(Event::Counted(namespace, keys(hashes), hits));
            self.left_out.fetch_add(u64::from(!was_queued), Ordering::Relaxed);
        }
    }

    /// Whether requests are recorded.
    pub(crate) fn is_recording(&self) -> bool {
        self.is_recording.load(Ordering::Relaxed)
    }

    /// Records a lookup, and counts it for the ceiling.
    pub(crate) fn looked_up(&self, lookup: LookedUp) {
        if !self.queue(Event::LookedUp(Box::new(lookup))) {
            self.left_out.fetch_add(1, Ordering::Relaxed);
            self.leave_out(1);
        }
    }

    /// Records the ends of requests.
    pub(crate) fn ended(&self, ended: Vec<Ended>) {
        let count = ended.len();
        if !self.queue(Event::Ended(ended)) {
            self.leave_out(count);
        }
    }

    /// Counts requests that are not recorded, or only in part.
    pub(crate) fn leave_out(&self, requests: usize) {
        self.unrecorded.fetch_add(requests as u64, Ordering::Relaxed);
    }

    /// Records that an engine's scheduler has left.
    pub(crate) fn engine_left(&self, engine: &str) {
        if self.is_recording() {
            let _ = self.queue(Event::EngineLeft(engine.into()));
        }
    }

    /// Adds what `describe` says of a model, if the recording does not know it.
    pub(crate) fn add_model(&self, namespace: Namespace, describe: impl FnOnce() -> Model) {
        let is_new = {
            let models = self.models.lock();
            !models.contains_key(&namespace) && models.len() < MODELS_MAX
        };
        if is_new {
            // Outside the lock, because it asks the store.
            let model = describe();
            self.models.lock().insert(namespace, model);
        }
    }

    /// A model that the recording knows.
    pub(crate) fn model(&self, namespace: Namespace) -> Option<Model> {
        self.models.lock().get(&namespace).cloned()
    }

    /// Lookups that the ceilings do not count.
    pub(crate) fn left_out(&self) -> u64 {
        self.left_out.load(Ordering::Relaxed)
    }

    /// All ceilings whose window has a block reference. Empty if the thread is too busy to answer in time.
    pub(crate) fn ceilings(&self) -> Vec<Reading> {
        let (answer, answered) = mpsc::channel();
        if self.events.try_send(Event::ReadCeilings(answer)).is_err() {
            return Vec::new();
        }
        answered.recv_timeout(PATIENCE).unwrap_or_default()
    }

    /// The next recorded requests; begins the recording if there is none. Takes as long as one record. The last read first waits
    /// until all that is queued is recorded, some seconds at most.
    pub(crate) fn read_recording(&self, cursor: u64, most: usize, is_last: bool) -> ReadOut {
        if is_last {
            let (answer, answered) = mpsc::channel();
            if self.events.send(Event::Flush(answer)).is_ok() {
                let _ = answered.recv_timeout(FLUSH_PATIENCE);
            }
        }
        self.recording.lock().read(cursor, most, is_last, clock())
    }

    /// False if the queue is full.
    fn queue(&self, event: Event) -> bool {
        self.events.try_send(event).is_ok()
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        // Waits for room in the queue. The thread takes what is queued before it stops.
        let _ = self.events.send(Event::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            // Log: a bug: `kvlane_hit_ceiling_ratio` is no longer updated, and no request is recorded; caching works. Do:
            // report it, with the daemon's log.
            tracing::error!("thread kvlane-observer panicked");
        }
    }
}

/// The daemon's clock for recordings: the time since 1970.
pub(crate) fn clock() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Keys of recorded blocks. The same tokens have the same hash in each namespace, and are different blocks.
pub(crate) fn recorded_keys(namespace: Namespace, hashes: &[BlockHash]) -> Vec<u64> {
    let salt = salt(namespace);
    hashes.iter().map(|hash| number(&hash.0) ^ salt).collect()
}

/// Tells the recorded keys of a namespace from those of others.
fn salt(namespace: Namespace) -> u64 {
    spread(number(&namespace.0))
}

fn observe(events: &mpsc::Receiver<Event>, mut counting: Counting, recording: &Mutex<Recording>) {
    while let Ok(event) = events.recv() {
        let now = clock();
        recording.lock().end_if_unread(Instant::now());
        match event {
            Event::Counted(namespace, keys, hits) => counting.count(namespace, &keys, hits, now),
            Event::LookedUp(lookup) => {
                let namespace = Namespace(lookup.model);
                let salt = salt(namespace);
                let searched = &lookup.keys[..lookup.looked_up.min(lookup.keys.len())];
                let counted: Vec<u64> = searched.iter().map(|key| key ^ salt).collect();
                counting.count(namespace, &counted, lookup.hit.total(), now);
                recording.lock().with(|recorder| recorder.looked_up(*lookup));
            }
            Event::Ended(ended) => {
                recording.lock().with(|recorder| ended.into_iter().for_each(|each| recorder.ended(each)));
            }
            Event::EngineLeft(engine) => recording.lock().with(|recorder| recorder.engine_left(&engine)),
            // Sends fail if the reader has given up.
            Event::ReadCeilings(answer) => drop(answer.send(counting.read(now))),
            Event::Flush(answer) => drop(answer.send(())),
            Event::Stop => return,
        }
    }
}

/// The ceilings, and the namespaces that are counted apart.
struct Counting {
    ceilings: Ceilings,
    names: HashMap<u64, Namespace>,
}

impl Counting {
    fn new(windows: &[Window]) -> Self {
        Self { ceilings: Ceilings::new(windows), names: HashMap::new() }
    }

    fn count(&mut self, namespace: Namespace, keys: &[u64], hits: u64, now: Duration) {
        let number = number(&namespace.0);
        self.ceilings.record(number, keys, hits, now);
        if !self.names.contains_key(&number) {
            // Names are kept only for namespaces that are counted apart, which bounds them.
            let counted: Vec<u64> = self.ceilings.namespaces().map(|(number, _)| number).collect();
            self.names.retain(|number, _| counted.contains(number));
            if counted.contains(&number) {
                self.names.insert(number, namespace);
            }
        }
    }

    fn read(&self, now: Duration) -> Vec<Reading> {
        let of_all = readings(None, self.ceilings.total(), now);
        let apart = self.ceilings.namespaces().filter_map(|(number, ceiling)| {
            self.names.get(&number).map(|namespace| readings(Some(*namespace), ceiling, now))
        });
        of_all.into_iter().chain(apart.flatten()).collect()
    }
}

fn readings(namespace: Option<Namespace>, ceiling: &Ceiling, now: Duration) -> Vec<Reading> {
    let reading = |(window, count): (Window, WindowCount)| {
        Some(Reading {
            namespace,
            window,
            references: count.references,
            hit_ratio: count.hit_ratio()?,
            ceiling: count.ceiling()?,
        })
    };
    ceiling.read(now).into_iter().filter_map(reading).collect()
}

/// The recording, while somebody reads it.
struct Recording {
    recorder: Option<Recorder>,
    /// When it was last read.
    read_at: Option<Instant>,
    /// `unrecorded` when it began.
    unrecorded_before: u64,
    unrecorded: Arc<AtomicU64>,
    is_on: Arc<AtomicBool>,
    models: Arc<Mutex<HashMap<Namespace, Model>>>,
}

impl Recording {
    fn with(&mut self, record: impl FnOnce(&mut Recorder)) {
        if let Some(recorder) = &mut self.recorder {
            record(recorder);
        }
    }

    fn end_if_unread(&mut self, now: Instant) {
        let is_unread =
            self.read_at.is_none_or(|read_at| now.saturating_duration_since(read_at) > UNREAD_MAX);
        if self.recorder.is_some() && is_unread {
            self.recorder = None;
            self.is_on.store(false, Ordering::Relaxed);
            self.models.lock().clear();
            // Log: `kvlane record` has ended, or has not read for 10 s. Its file says whether it is complete.
            tracing::info!("recording ended");
        }
    }

    fn read(&mut self, cursor: u64, most: usize, is_last: bool, now: Duration) -> ReadOut {
        self.read_at = Some(Instant::now());
        let unrecorded = self.unrecorded.load(Ordering::Relaxed);
        let is_new = self.recorder.is_none();
        let recorder = self.recorder.get_or_insert_with(|| Recorder::new(now));
        if is_new {
            self.unrecorded_before = unrecorded;
            self.is_on.store(true, Ordering::Relaxed);
            // Log: `kvlane record` began to read the requests of this daemon: lengths, times, and numbers of blocks.
            tracing::info!("recording began");
        }
        let read = if is_last { recorder.read_last(cursor, most) } else { recorder.read(cursor, most) };
        ReadOut {
            read,
            forgotten_blocks: recorder.forgotten_blocks(),
            left_out: unrecorded - self.unrecorded_before,
            since: recorder.since(),
        }
    }
}

fn keys(hashes: &[BlockHash]) -> Vec<u64> {
    hashes.iter().map(|hash| number(&hash.0)).collect()
}

/// Half of a digest. Block hashes and namespaces are digests, and half of their bytes tells them apart well enough.
fn number(digest: &[u8; 16]) -> u64 {
    u128::from_le_bytes(*digest) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(prompt: u64, block: u64) -> BlockHash {
        BlockHash(u128::from(spread(prompt << 32 | block)).to_le_bytes())
    }

    #[test]
    fn what_is_asked_for_again_could_have_been_hit() {
        let observer = Observer::start(&Window::DEFAULT).unwrap();
        let (one, two) = (Namespace([1; 16]), Namespace([2; 16]));
        // The first namespace sees each prompt four times, the second each once.
        for prompt in 0..40 {
            let blocks = |prompt| (0..100).map(|block| hash(prompt, block)).collect::<Vec<_>>();
            observer.count(one, &blocks(prompt % 10), 20);
            observer.count(two, &blocks(prompt), 0);
        }
        let read = observer.ceilings();
        let ratio = |namespace, window| {
            let is_it =
                |reading: &&Reading| reading.namespace == namespace && reading.window.to_string() == window;
            let found = read.iter().find(is_it).unwrap();
            (found.ceiling, found.hit_ratio)
        };
        for window in ["15m", "1h", "24h"] {
            let (ceiling, hit_ratio) = ratio(Some(one), window);
            assert!((ceiling - 0.75).abs() < 0.02 && hit_ratio == 0.2, "{read:?}");
            let (ceiling, hit_ratio) = ratio(Some(two), window);
            assert!(ceiling < 0.03 && hit_ratio == 0.0, "{read:?}");
            let (ceiling, hit_ratio) = ratio(None, window);
            assert!((ceiling - 0.375).abs() < 0.02 && hit_ratio == 0.1, "{read:?}");
        }
        assert_eq!(observer.left_out(), 0);
    }

    #[test]
    fn a_recorded_lookup_counts_for_the_ceiling_as_any_other() {
        let (counted, recorded) =
            (Observer::start(&Window::DEFAULT).unwrap(), Observer::start(&Window::DEFAULT).unwrap());
        let namespace = Namespace([1; 16]);
        for prompt in 0..40 {
            let hashes: Vec<_> = (0..100).map(|block| hash(prompt % 10, block)).collect();
            counted.count(namespace, &hashes[..90], 30);
            recorded.looked_up(LookedUp {
                at: Duration::ZERO,
                engine: "e".into(),
                model: namespace.0,
                request: 0,
                keys: recorded_keys(namespace, &hashes),
                looked_up: 90,
                hit: kvlane_trace::TierBlocks { ram: 20, ssd: 7, peers: 3 },
                reports_ends: false,
            });
        }
        assert_eq!(counted.ceilings(), recorded.ceilings());
        assert!(!counted.ceilings().is_empty());
    }

    #[test]
    fn the_same_tokens_in_another_namespace_are_another_block() {
        let hashes = [hash(1, 0), hash(1, 1)];
        let [one, two] = [1, 2].map(|number| recorded_keys(Namespace([number; 16]), &hashes));
        assert!(one.iter().all(|key| !two.contains(key)));
        assert_eq!(one, recorded_keys(Namespace([1; 16]), &hashes));
    }

    #[test]
    fn a_recording_ends_when_nobody_reads_it() {
        let (unrecorded, is_on, models) = <(Arc<AtomicU64>, Arc<AtomicBool>, Arc<Mutex<_>>)>::default();
        let mut recording = Recording {
            recorder: None,
            read_at: None,
            unrecorded_before: 0,
            unrecorded,
            is_on: Arc::clone(&is_on),
            models,
        };
        recording.read(0, 1, false, clock());
        recording.end_if_unread(Instant::now() + UNREAD_MAX / 2);
        assert!(is_on.load(Ordering::Relaxed));
        recording.end_if_unread(Instant::now() + UNREAD_MAX * 2);
        assert!(!is_on.load(Ordering::Relaxed) && recording.recorder.is_none());
    }
}
