//! Carries out a rank's part of hand-offs: opens and closes windows, posts READs, and passes messages between its scheduler,
//! other ranks and the two state machines.
//!
//! ```text
//!  engine's thread: step_begins, layers_computed, step_ends        fabric: messages, READs, windows
//!        | events, a word of progress                                   |
//!        +----------------> thread "kvlane-handoff" <-------------------+
//!                           Offering, Reading: decide; this file carries out
//! ```
//! The engine's thread never waits. It enqueues events, and one word counts the computed regions: the engine's stream writes
//! it, or on a CPU the thread itself. The agent's thread polls that word every millisecond while a step has blocks to offer.

use std::collections::{HashMap, HashSet, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvlane_block::Region;
use kvlane_fabric::{
    Engine, EngineId, FabricError, MemoryKind, Message as Received, PeerId, Pieces, Place, Run, Transfer,
    WINDOW_RANGES_MAX, WindowDescriptor, WindowRange,
};
use kvlane_gpu::{EngineStream, Gpu, GpuError};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};

use crate::geometry::{AreaRange, Geometry};
use crate::message::{BLOCKS_MAX, Endpoint, HandoffId, Message, Offer};
use crate::offering::{Computed, Offering, OfferingAction};
use crate::progress::Progress;
use crate::reading::{Reading, ReadingAction};
use crate::short_timer::ShortTimer;
use crate::talk::{AgentError, Talk};

/// Most bytes of one offer, unless a single block has more. A READ of this size is worth its messages, and small enough that
/// the next offer follows while it runs.
const OFFER_BYTES: u64 = 64 << 20;
/// Computed layers of a step that is not over are offered once they have this many bytes.
const OFFER_BYTES_MIN: u64 = 1 << 20;
/// How often the thread polls the progress of steps that have blocks to offer. Waking the thread for each layer would cost the
/// engine a system call per layer, and its processor.
const POLL_EVERY: Duration = Duration::from_millis(1);
/// The same for a GPU, whose layers take less than a millisecond, and whose last one the decode engine waits for. A twentieth of a
/// processor, while a prompt is computed.
const POLL_GPU_EVERY: Duration = Duration::from_micros(200);
const READ_PATIENCE: Duration = Duration::from_secs(30);
/// The scheduler's name in the fabric's logs.
const SCHEDULER: &str = "this engine's scheduler";
/// Most engines whose path is logged, once each.
const LOGGED_PATHS_MAX: usize = 1024;

/// Memory that a rank has registered with its fabric engine.
#[derive(Debug, Clone, Copy)]
pub struct Area {
    /// The fabric's number of the registered region.
    pub region: u32,
    /// Address of its first byte in this process.
    pub base: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// Arguments of [`RankAgent::start`].
#[derive(Debug)]
pub struct RankOptions {
    /// The regions of a block, usually one per layer.
    pub regions: Vec<Region>,
    /// The memory that holds the regions, registered for windows only.
    pub areas: Vec<Area>,
    /// The GPU whose memory the areas are; None for host memory.
    pub gpu: Option<Gpu>,
    /// Secret by which the rank recognizes its own scheduler ([`Message::Adopt`]).
    pub key: [u8; 16],
}

/// Consecutive blocks of a prompt that a step fills.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filled {
    /// The hand-off that the blocks are computed for.
    pub id: HandoffId,
    /// First block, counted by place.
    pub first_block: u32,
    /// Block ids of the engine's cache.
    pub blocks: Vec<u32>,
    /// Hash of the last block; None for a block that is not full.
    pub hash: Option<[u8; 16]>,
}

/// Counters of a rank's READs from other engines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReadCounts {
    /// READs that succeeded.
    pub reads: u64,
    /// READs that failed or were cancelled.
    pub failed: u64,
    /// Runs of adjacent bytes in the READs that succeeded.
    pub runs: u64,
    /// Bytes read from GPUs of this host, over the link between them or within one.
    pub cuda_bytes: u64,
    /// Bytes read by process_vm, from memory of this host.
    pub cma_bytes: u64,
    /// Bytes read through sockets.
    pub tcp_bytes: u64,
}

/// A READ whose bytes have all arrived.
#[derive(Debug)]
struct FinishedRead {
    from: (EngineId, PeerId),
    runs: u64,
    /// By the carrier's name.
    carried: Vec<(&'static str, u64)>,
    /// Whether the memory of either side is a GPU's.
    is_on_gpu: bool,
}

#[derive(Debug)]
enum RankEvent {
    /// The count of the progress word at which the step begins, and the blocks that it fills.
    StepBegins(u32, Vec<Filled>),
    StepEnds,
    /// The engine that was read from; None: the READ did not begin.
    ReadOver(HandoffId, u64, Option<(EngineId, PeerId)>, Option<FinishedRead>),
    Closed(HandoffId),
    Lost(EngineId),
}

/// A rank's part of hand-offs: a fabric engine and a thread.
#[derive(Debug)]
pub struct RankAgent {
    engine: Arc<Engine>,
    events: mpsc::UnboundedSender<RankEvent>,
    endpoint: Endpoint,
    counts: Arc<Mutex<ReadCounts>>,
    regions: u32,
    /// The count of `computed` at which the engine's present step begins.
    step: AtomicU32,
    /// Whether that step has begun and not ended.
    is_in_step: AtomicBool,
    computed: Arc<Progress>,
    thread: Option<JoinHandle<()>>,
}

impl RankAgent {
    /// Starts the thread. The caller uses a hand-off's blocks for nothing else until the hand-off is over, and `engine` for
    /// nothing but this agent.
    pub fn start(engine: Engine, options: RankOptions) -> Result<RankAgent, AgentError> {
        let areas: Vec<(u64, u64)> = options.areas.iter().map(|area| (area.base, area.bytes)).collect();
        let geometry = Geometry::new(options.regions, &areas)?;
        let endpoint = engine.describe()?.to_bytes().map_err(|_| AgentError::TooMany(areas.len()))?;
        let engine = Arc::new(engine);
        let (events, incoming) = mpsc::unbounded_channel();
        let counts = Arc::new(Mutex::new(ReadCounts::default()));
        let is_on_gpu = options.gpu.is_some();
        let computed = Arc::new(Progress::new(options.gpu.as_ref())?);
        let regions = geometry.regions();
        let rank_thread = RankThread {
            engine: Arc::clone(&engine),
            events: events.clone(),
            reading: Reading::new(geometry.regions()),
            geometry,
            areas: options.areas.iter().map(|area| area.region).collect(),
            key: options.key,
            rank: 0,
            scheduler: None,
            is_on_gpu,
            steps: VecDeque::new(),
            offering: Offering::default(),
            windows: HashMap::new(),
            waiting: Vec::new(),
            counts: Arc::clone(&counts),
            computed: Arc::clone(&computed),
            logged_paths: HashSet::new(),
            cancels: HashMap::new(),
            started: Instant::now(),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        let polling = is_on_gpu.then(|| ShortTimer::new(POLL_GPU_EVERY)).transpose()?;
        let thread = std::thread::Builder::new().name("kvlane-handoff".into()).spawn(move || {
            let local = tokio::task::LocalSet::new();
            local.block_on(&runtime, rank_thread.run(incoming, polling));
        })?;
        let step = AtomicU32::new(0);
        let is_in_step = AtomicBool::new(false);
        let thread = Some(thread);
        Ok(RankAgent { engine, events, endpoint, counts, regions, step, is_in_step, computed, thread })
    }

    /// This rank's fabric descriptor, for its scheduler.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Counters since the last call.
    pub fn take_counts(&self) -> ReadCounts {
        std::mem::take(&mut self.counts.lock())
    }

    /// A step of the engine begins, which fills these blocks. Once computed, the blocks do not change until their hand-off is
    /// over. One thread makes all calls about steps. A step may begin while the stream still computes the one before.
    pub fn step_begins(&self, filled: Vec<Filled>) {
        if self.is_in_step.swap(true, Ordering::Relaxed) {
            // The former step never ended. It counts as computed once a layer of this step is.
            self.step.fetch_add(self.regions, Ordering::Relaxed);
        }
        // If the thread has ended, no blocks are offered any more.
        let _ = self.events.send(RankEvent::StepBegins(self.step.load(Ordering::Relaxed), filled));
    }

    /// The first `regions` regions of the step's blocks are computed: in GPU memory once `stream` has done the work enqueued
    /// so far, in host memory now. The agent's thread sees it within a millisecond, on a GPU within a quarter of one.
    pub fn layers_computed(&self, regions: u32, stream: &EngineStream) -> Result<(), GpuError> {
        let from = self.step.load(Ordering::Relaxed);
        self.computed.reach(from.wrapping_add(regions.min(self.regions)), stream)
    }

    /// All regions of the step's blocks are computed, as in [`RankAgent::layers_computed`], and the step is over.
    pub fn step_ends(&self, stream: &EngineStream) -> Result<(), GpuError> {
        let end = self.step.load(Ordering::Relaxed).wrapping_add(self.regions);
        self.step.store(end, Ordering::Relaxed);
        self.is_in_step.store(false, Ordering::Relaxed);
        self.computed.reach(end, stream)?;
        let _ = self.events.send(RankEvent::StepEnds);
        Ok(())
    }

    /// Closes the fabric engine and ends the thread. When this returns, no READ reads or writes this rank's memory any more.
    pub fn close(&mut self) {
        self.engine.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for RankAgent {
    fn drop(&mut self) {
        self.close();
    }
}

/// Waits for a timer, for ever if there is none.
async fn fired(timer: Option<&ShortTimer>) {
    match timer {
        Some(timer) => timer.wait().await,
        None => std::future::pending().await,
    }
}

/// Why blocks were not offered.
enum NotOffered {
    /// No window is free; the first `offered` blocks have one. The others are offered once windows close.
    NoWindows { offered: usize },
    /// Waiting does not help: why.
    Never(String),
}

/// A step of the engine with blocks that are not all offered.
#[derive(Debug)]
struct Step {
    /// The count of the progress word at which the step begins.
    from: u32,
    filled: Vec<Filled>,
    /// The first so many regions are offered.
    offered: u32,
}

/// The state of the agent's thread.
struct RankThread {
    engine: Arc<Engine>,
    events: mpsc::UnboundedSender<RankEvent>,
    geometry: Geometry,
    /// The fabric's number of each area.
    areas: Vec<u32>,
    key: [u8; 16],
    /// Assigned by the scheduler's Adopt.
    rank: u32,
    /// None before Adopt.
    scheduler: Option<(EngineId, Endpoint)>,
    is_on_gpu: bool,
    /// In the order in which they began.
    steps: VecDeque<Step>,
    offering: Offering,
    reading: Reading,
    windows: HashMap<HandoffId, Vec<WindowDescriptor>>,
    /// Offers that wait until other windows close, because no window was free.
    waiting: Vec<(HandoffId, Endpoint, Computed)>,
    counts: Arc<Mutex<ReadCounts>>,
    computed: Arc<Progress>,
    /// Engine and carrier, for each path that the log has.
    logged_paths: HashSet<(EngineId, &'static str)>,
    /// Sends true to cancel all READs of a hand-off.
    cancels: HashMap<HandoffId, watch::Sender<bool>>,
    started: Instant,
}

impl RankThread {
    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    async fn run(mut self, mut events: mpsc::UnboundedReceiver<RankEvent>, polling: Option<ShortTimer>) {
        let lost = self.events.clone();
        let on_lost = move |engine| drop(lost.send(RankEvent::Lost(engine)));
        let mut talk = Talk::new(Arc::clone(&self.engine), Rc::new(on_lost));
        let mut receiving = self.engine.receiving();
        loop {
            let tick = self.reading.next_tick().unwrap_or(Duration::MAX);
            let poll = match self.steps.is_empty() || self.is_on_gpu {
                true => Duration::from_secs(3600),
                false => POLL_EVERY,
            };
            let (next, _) = talk.tidy(Instant::now());
            let wait = tick.saturating_sub(self.now()).min(poll).min(next);
            let polls_gpu = !self.steps.is_empty() && self.is_on_gpu;
            tokio::select! {
                () = fired(polling.as_ref()), if polls_gpu => {}
                received = &mut receiving => match received {
                    Some(received) => self.handle_message(&mut talk, received),
                    None => return,
                },
                Some(event) = events.recv() => self.handle_event(&mut talk, event),
                () = tokio::time::sleep(wait) => self.reading.tick(self.now()),
            }
            self.offer_computed();
            self.carry_out(&mut talk);
        }
    }

    fn handle_message(&mut self, talk: &mut Talk, received: Received) {
        let from = received.from;
        let message = match Message::decode(&received.bytes) {
            Ok(message) => message,
            Err(error) => {
                // Log: a peer sent a message that this version cannot read; the hand-off is computed instead. Do:
                // use one version of kvlane on both engines.
                tracing::warn!(peer = ?from, %error, "hand-off message ignored");
                return;
            }
        };
        match message {
            Message::Adopt { key, scheduler, rank } if key == self.key => {
                self.rank = rank;
                self.scheduler = talk.connect_own(&scheduler, SCHEDULER).map(|id| (id, scheduler));
            }
            Message::Offer(offer) => self.reading.offer(self.now(), from, offer),
            Message::Serve { .. } | Message::Close(_) if self.is_scheduler(from) => {
                self.offering.scheduler_said(message);
            }
            Message::Room { .. } | Message::Stop(_) if self.is_scheduler(from) => {
                self.reading.scheduler_said(message);
            }
            _ => {
                // Log: a process sent a message that only this engine's scheduler may send; it has no effect. Do:
                // find out which engine sent it, if it repeats.
                tracing::warn!(peer = ?from, "hand-off message ignored: its sender may not send it to this rank");
            }
        }
    }

    fn handle_event(&mut self, talk: &mut Talk, event: RankEvent) {
        match event {
            RankEvent::StepBegins(from, filled) => self.steps.push_back(Step { from, filled, offered: 0 }),
            // Wakes the thread, which polls the steps after every event.
            RankEvent::StepEnds => {}
            RankEvent::ReadOver(id, number, from, read) => {
                from.into_iter().for_each(|(from, peer)| talk.end_read(from, peer));
                self.count(read.as_ref());
                self.reading.read_over(id, number, read.is_some());
            }
            RankEvent::Closed(id) => {
                self.offering.closed(id);
                for (id, reader, computed) in std::mem::take(&mut self.waiting) {
                    if self.offering.is_open(id) {
                        self.offer(talk, id, &reader, computed);
                    }
                }
            }
            // READs from the lost engine fail by themselves. If its offers stay away, the schedulers end the hand-off.
            RankEvent::Lost(engine) => talk.forget(engine),
        }
    }

    /// Offers steps that are computed, and of the step that is not the computed layers, if they are worth a READ.
    fn offer_computed(&mut self) {
        let all = self.geometry.regions();
        while let Some(mut step) = self.steps.pop_front() {
            let computed = self.computed.since(step.from).min(all);
            let blocks: usize = step.filled.iter().map(|filled| filled.blocks.len()).sum();
            let bytes = self.geometry.bytes_of(step.offered..computed.max(step.offered)) * blocks as u64;
            if computed == all || bytes >= OFFER_BYTES_MIN {
                self.offer_up_to(&mut step, computed);
            }
            if computed < all {
                self.steps.push_front(step);
                return;
            }
        }
    }

    /// Offers the step's regions up to this one, without those that were offered before.
    fn offer_up_to(&mut self, step: &mut Step, regions: u32) {
        let from = std::mem::replace(&mut step.offered, regions);
        for Filled { id, first_block, blocks, hash } in &step.filled {
            let hash = hash.filter(|_| regions == self.geometry.regions());
            let computed =
                Computed { first_block: *first_block, blocks: blocks.clone(), regions: from..regions, hash };
            self.offering.computed(*id, computed);
        }
    }

    fn carry_out(&mut self, talk: &mut Talk) {
        while let Some(action) = self.offering.next_action() {
            match action {
                OfferingAction::Offer(id, reader, computed) => self.offer(talk, id, &reader, computed),
                OfferingAction::CloseWindows(id) => self.close_windows(id),
                OfferingAction::Answer(message) => self.answer(talk, &message),
            }
        }
        while let Some(action) = self.reading.next_action() {
            match action {
                ReadingAction::Read { id, number, source, offer, skip, blocks } => {
                    self.read(talk, (id, number), &source, &offer, (skip, &blocks));
                }
                ReadingAction::Cancel(id) => {
                    if let Some(cancel) = self.cancels.remove(&id) {
                        // No receiver is left if all READs have completed.
                        let _ = cancel.send(true);
                    }
                }
                ReadingAction::Answer(message) => self.answer(talk, &message),
            }
        }
    }

    /// Sends to the own scheduler, and reconnects to it if it was lost.
    fn answer(&self, talk: &mut Talk, message: &Message) {
        let scheduler =
            self.scheduler.as_ref().and_then(|(_, endpoint)| talk.connect_own(endpoint, SCHEDULER));
        scheduler.into_iter().for_each(|scheduler| talk.send(scheduler, message));
    }

    /// The peer rank's name in the fabric's logs. Ranks of equal number exchange blocks.
    fn other_rank(&self) -> String {
        format!("another engine's rank {}", self.rank)
    }

    fn is_scheduler(&self, engine: EngineId) -> bool {
        self.scheduler.as_ref().is_some_and(|(scheduler, _)| *scheduler == engine)
    }

    fn offer(&mut self, talk: &mut Talk, id: HandoffId, reader: &Endpoint, computed: Computed) {
        match self.try_offer(talk, id, reader, &computed) {
            Ok(()) => {}
            Err(NotOffered::NoWindows { offered }) => {
                let Computed { first_block, mut blocks, regions, hash } = computed;
                let rest = blocks.split_off(offered);
                let rest =
                    Computed { first_block: first_block + offered as u32, blocks: rest, regions, hash };
                self.waiting.push((id, reader.clone(), rest));
            }
            Err(NotOffered::Never(why)) => {
                // Log: this prefill engine cannot hand over a prompt's rest; the decode engine computes it. Do:
                // read the reason.
                tracing::warn!(reason = why, "cannot offer blocks of a hand-off; its reader computes them");
                self.answer(talk, &Message::Lost(id));
            }
        }
    }

    fn try_offer(
        &mut self,
        talk: &mut Talk,
        id: HandoffId,
        reader: &Endpoint,
        computed: &Computed,
    ) -> Result<(), NotOffered> {
        let never = |why: &str| NotOffered::Never(why.into());
        let to =
            talk.connect(reader, self.other_rank()).ok_or_else(|| never("its reader cannot be reached"))?;
        if !self.geometry.has(&computed.blocks) {
            return Err(never("one is none of this rank's"));
        }
        let regions = computed.regions.clone();
        let block_bytes = self.geometry.bytes_of(regions.clone()).max(1);
        let most = BLOCKS_MAX.min(WINDOW_RANGES_MAX / self.geometry.pieces_of(regions.clone()).max(1));
        let together = ((OFFER_BYTES / block_bytes) as usize).min(most).max(1);
        let mut offered = 0;
        for blocks in computed.blocks.chunks(together) {
            let [by_region, by_block] =
                [false, true].map(|is_by_block| self.geometry.ranges(blocks, regions.clone(), is_by_block));
            let is_by_block = by_block.len() < by_region.len();
            let ranges = if is_by_block { by_block } else { by_region };
            let of_fabric = |range: &AreaRange| WindowRange {
                region: self.areas[range.area],
                offset: range.offset,
                len: range.len,
            };
            let window = match self.engine.open_window(to, ranges.iter().map(of_fabric).collect()) {
                Ok(window) => window,
                Err(FabricError::RegionsFull(_) | FabricError::WindowsFull) => {
                    return Err(NotOffered::NoWindows { offered });
                }
                Err(error) => return Err(NotOffered::Never(error.to_string())),
            };
            self.windows.entry(id).or_default().push(window);
            let first_block = computed.first_block + offered as u32;
            offered += blocks.len();
            let offer = Offer {
                id,
                first_block,
                blocks: blocks.len() as u32,
                first_region: regions.start,
                regions: regions.end - regions.start,
                is_by_block,
                window,
                hash: computed.hash.filter(|_| offered == computed.blocks.len()),
            };
            talk.send(to, &Message::Offer(offer));
        }
        Ok(())
    }

    /// Closes windows in a thread of the pool, because that takes a second if the peer does not take bytes in flight.
    fn close_windows(&mut self, id: HandoffId) {
        let windows = self.windows.remove(&id).unwrap_or_default();
        if windows.is_empty() {
            return self.offering.closed(id);
        }
        let (engine, events) = (Arc::clone(&self.engine), self.events.clone());
        tokio::task::spawn_blocking(move || {
            for window in windows {
                // Fails only if the engine is closed, which closes all windows.
                let _ = engine.close_window(&window);
            }
            let _ = events.send(RankEvent::Closed(id));
        });
    }

    fn read(
        &mut self,
        talk: &mut Talk,
        (id, number): (HandoffId, u64),
        source: &Endpoint,
        offer: &Offer,
        (skip, blocks): (u32, &[u32]),
    ) {
        let transfer = self.transfer(offer, skip, blocks);
        let source = talk.connect(source, self.other_rank());
        let begun = match (transfer, source.and_then(|source| Some((source, talk.peer(source)?)))) {
            (Some((transfer, runs)), Some((source, peer))) => {
                let begun = self.engine.begin(peer, transfer).ok();
                begun.map(|handle| (handle, source, peer, runs))
            }
            _ => None,
        };
        let events = self.events.clone();
        let Some((mut handle, source, peer, runs)) = begun else {
            let _ = events.send(RankEvent::ReadOver(id, number, None, None));
            return;
        };
        talk.begin_read(source);
        let is_on_gpu = self.is_on_gpu || offer.window.kind == MemoryKind::Cuda;
        let mut cancel = self.cancels.entry(id).or_insert_with(|| watch::Sender::new(false)).subscribe();
        tokio::task::spawn_local(async move {
            let outcome = tokio::select! {
                outcome = &mut handle => outcome,
                _ = cancel.wait_for(|is_over| *is_over) => {
                    handle.cancel();
                    (&mut handle).await
                }
            };
            let read = FinishedRead { from: (source, peer), runs, carried: handle.carried(), is_on_gpu };
            let read = outcome.is_ok().then_some(read);
            let _ = events.send(RankEvent::ReadOver(id, number, Some((source, peer)), read));
        });
    }

    fn count(&mut self, read: Option<&FinishedRead>) {
        let mut counts = self.counts.lock();
        let Some(FinishedRead { from: (engine, peer), runs, carried, is_on_gpu }) = read else {
            counts.failed += 1;
            return;
        };
        for (carrier, bytes) in carried {
            *match *carrier {
                "cuda" => &mut counts.cuda_bytes,
                "cma" => &mut counts.cma_bytes,
                _ => &mut counts.tcp_bytes,
            } += bytes;
        }
        counts.reads += 1;
        counts.runs += runs;
        drop(counts);
        for (carrier, _) in carried {
            if self.logged_paths.len() < LOGGED_PATHS_MAX && self.logged_paths.insert((*engine, carrier)) {
                self.log_path(*peer, carrier, *is_on_gpu);
            }
        }
    }

    fn log_path(&self, peer: PeerId, carrier: &str, is_on_gpu: bool) {
        let paths = self.engine.paths(peer);
        let address = paths.iter().find_map(|path| path.address);
        let address = address.map_or_else(String::new, |address| format!(" at {address}"));
        match carrier {
            "cuda" => {
                // Log: blocks of this engine come the fast way, copied from its GPU's memory to this one's.
                tracing::info!(
                    once = true,
                    "reading blocks of the engine{address} from its GPU's memory, on this host"
                );
            }
            "cma" => {
                // Log: blocks of this engine come the fast way, copied from its memory on this host.
                tracing::info!(
                    once = true,
                    "reading blocks of the engine{address} by process_vm, on this host"
                );
            }
            _ => {
                let better = if is_on_gpu { "cuda" } else { "cma" };
                let why = paths.iter().find(|path| path.carrier == better);
                let why = why.and_then(|path| path.trouble.as_deref());
                let why = why.map_or_else(String::new, |why| format!(" because {why}"));
                // Log: blocks of this engine come through sockets, for the reason named. Do: nothing, unless both
                // engines run on one host: then mend the reason.
                tracing::info!(once = true, "reading blocks of the engine{address} by TCP{why}");
            }
        }
    }

    /// The READ of an offer's blocks after the first `skip` into these blocks, and its number of runs. None if the offer's
    /// length is not that of its blocks.
    fn transfer(&self, offer: &Offer, skip: u32, blocks: &[u32]) -> Option<(Transfer, u64)> {
        let regions = offer.first_region..offer.first_region + offer.regions;
        let of_offer = u64::from(offer.blocks) * self.geometry.bytes_of(regions.clone());
        if !self.geometry.has(blocks) || offer.window.len != of_offer {
            return None;
        }
        let is_part = blocks.len() < offer.blocks as usize;
        let mut runs: Vec<Run> = Vec::new();
        let mut add = |regions: std::ops::Range<u32>, mut at: u64| {
            for range in self.geometry.ranges(blocks, regions, offer.is_by_block) {
                let local = Place { region: self.areas[range.area], offset: range.offset };
                let remote = Place { region: offer.window.number, offset: at };
                runs.push(Run { local, remote, len: range.len });
                at += range.len;
            }
        };
        if is_part && !offer.is_by_block {
            // In the window each region has all blocks of the offer.
            for region in regions.clone() {
                let before = u64::from(offer.blocks) * self.geometry.bytes_of(regions.start..region);
                add(
                    region..region + 1,
                    before + u64::from(skip) * self.geometry.bytes_of(region..region + 1),
                );
            }
        } else {
            add(regions.clone(), u64::from(skip) * self.geometry.bytes_of(regions));
        }
        let count = runs.len() as u64;
        let transfer = Transfer::read_through(offer.window, Pieces::Runs(runs));
        Some((Transfer { timeout: Some(READ_PATIENCE), ..transfer }, count))
    }
}
