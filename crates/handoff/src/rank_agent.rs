//! A rank's part of hand-offs, carried out: windows, READs, and what its scheduler and other ranks say.

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

use crate::geometry::Geometry;
use crate::message::{BLOCKS_MAX, Endpoint, HandoffId, Message, Offer};
use crate::offering::{Computed, Offering, OfferingAction};
use crate::progress::Progress;
use crate::reading::{Reading, ReadingAction};
use crate::talk::{AgentError, Talk};

/// Blocks are offered together until they have so many bytes: enough for a READ to be worth its messages, and little enough
/// that the next one is under way meanwhile.
const OFFER_BYTES: u64 = 64 << 20;
/// Layers are offered before their step is over where they have so many bytes.
const OFFER_BYTES_MIN: u64 = 1 << 20;
/// While a step computes what is to be offered, the thread looks so often how far it is: to be woken for each layer would cost
/// the engine a system call in each, and its processor.
const LOOK_EVERY: Duration = Duration::from_millis(1);
const READ_PATIENCE: Duration = Duration::from_secs(30);
/// Name in logs.
const SCHEDULER: &str = "this engine's scheduler";
/// Of so many engines the log says how their blocks come.
const TOLD_WAYS_MAX: usize = 1024;

/// Memory that a rank has registered with its engine of the fabric.
#[derive(Debug, Clone, Copy)]
pub struct Area {
    /// Its number there.
    pub region: u32,
    /// Where it begins in this process.
    pub base: u64,
    /// How long it is.
    pub bytes: u64,
}

/// What a rank needs.
#[derive(Debug)]
pub struct RankOptions {
    /// The regions of a block, usually one a layer.
    pub regions: Vec<Region>,
    /// Where they lie, registered for windows only.
    pub areas: Vec<Area>,
    /// The GPU whose memory the areas are; None for the host's.
    pub gpu: Option<Gpu>,
    /// Its own scheduler proves by this that it is that.
    pub key: [u8; 16],
}

/// Blocks that a step fills.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filled {
    /// For which hand-off.
    pub id: HandoffId,
    /// The first of them, counted from the prompt's start.
    pub first_block: u32,
    /// Ids of the engine's blocks.
    pub blocks: Vec<u32>,
    /// The hash of the last of them; None for one that is not full.
    pub hash: Option<[u8; 16]>,
}

/// What a rank has read from other engines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReadCounts {
    /// READs that brought their bytes.
    pub reads: u64,
    /// READs that did not.
    pub failed: u64,
    /// Runs of neighbouring bytes of which these READs consisted.
    pub runs: u64,
    /// Bytes that process_vm brought, from memory of this host.
    pub cma_bytes: u64,
    /// Bytes that came through sockets.
    pub tcp_bytes: u64,
}

/// A READ that brought its bytes.
#[derive(Debug)]
struct Read {
    from: (EngineId, PeerId),
    runs: u64,
    bytes: u64,
    /// Whether either side's memory is a GPU's.
    is_on_gpu: bool,
}

#[derive(Debug)]
enum Event {
    /// What the word will count from, and what is filled.
    StepBegins(u32, Vec<Filled>),
    StepEnds,
    ReadOver(HandoffId, u64, Option<Read>),
    Closed(HandoffId),
    Lost(EngineId),
}

/// A rank's part of hand-offs: an engine of the fabric, and a thread.
#[derive(Debug)]
pub struct RankAgent {
    engine: Arc<Engine>,
    events: mpsc::UnboundedSender<Event>,
    endpoint: Endpoint,
    counts: Arc<Mutex<ReadCounts>>,
    regions: u32,
    /// What `computed` counts the engine's present step from.
    step: AtomicU32,
    /// Whether that has begun and not ended.
    is_in_step: AtomicBool,
    computed: Arc<Progress>,
    thread: Option<JoinHandle<()>>,
}

impl RankAgent {
    /// Starts the thread. The blocks that a hand-off has are not used otherwise before it is over; `engine` is for this agent
    /// alone.
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
        let at_rank = AtRank {
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
            told_ways: HashSet::new(),
            cancels: HashMap::new(),
            started: Instant::now(),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        let thread = std::thread::Builder::new().name("kvlane-handoff".into()).spawn(move || {
            let local = tokio::task::LocalSet::new();
            local.block_on(&runtime, at_rank.run(incoming));
        })?;
        let step = AtomicU32::new(0);
        let is_in_step = AtomicBool::new(false);
        let thread = Some(thread);
        Ok(RankAgent { engine, events, endpoint, counts, regions, step, is_in_step, computed, thread })
    }

    /// Where it can be reached.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// What was read since the last call.
    pub fn take_counts(&self) -> ReadCounts {
        std::mem::take(&mut self.counts.lock())
    }

    /// A step of the engine fills these blocks. They stay as they are, once computed, until their hand-off is over. One thread
    /// says when steps begin and how far they are; a step may begin while the stream computes the one before.
    pub fn step_begins(&self, filled: Vec<Filled>) {
        if self.is_in_step.swap(true, Ordering::Relaxed) {
            // Nobody has said that the former one is over: it counts as computed when a layer of this one is.
            self.step.fetch_add(self.regions, Ordering::Relaxed);
        }
        // Without the thread nobody reads them.
        let _ = self.events.send(Event::StepBegins(self.step.load(Ordering::Relaxed), filled));
    }

    /// Of the step's blocks so many regions, the first ones, are computed once `stream` has done what is enqueued; in the
    /// host's memory they are now. The agent's thread sees it within a millisecond.
    pub fn layers_computed(&self, regions: u32, stream: &EngineStream) -> Result<(), GpuError> {
        let from = self.step.load(Ordering::Relaxed);
        self.computed.reach(from.wrapping_add(regions.min(self.regions)), stream)
    }

    /// As [`RankAgent::layers_computed`], of all of the step's blocks. What comes next is another step.
    pub fn step_ends(&self, stream: &EngineStream) -> Result<(), GpuError> {
        let end = self.step.load(Ordering::Relaxed).wrapping_add(self.regions);
        self.step.store(end, Ordering::Relaxed);
        self.is_in_step.store(false, Ordering::Relaxed);
        self.computed.reach(end, stream)?;
        let _ = self.events.send(Event::StepEnds);
        Ok(())
    }

    /// Nothing is read or written any more when this returns.
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

/// Why blocks are not offered.
enum NotOffered {
    /// All windows are taken; so many blocks have one. The rest is offered when others are closed.
    NoWindows { offered: usize },
    /// They cannot be.
    Never(String),
}

/// What a step of the engine fills.
#[derive(Debug)]
struct Step {
    /// What the word of progress counts it from.
    from: u32,
    filled: Vec<Filled>,
    /// So many regions are offered.
    offered: u32,
}

struct AtRank {
    engine: Arc<Engine>,
    events: mpsc::UnboundedSender<Event>,
    geometry: Geometry,
    /// The fabric's number of each area.
    areas: Vec<u32>,
    key: [u8; 16],
    /// Rank that its scheduler assigned.
    rank: u32,
    scheduler: Option<(EngineId, Endpoint)>,
    is_on_gpu: bool,
    /// Those of which not everything is offered.
    steps: VecDeque<Step>,
    offering: Offering,
    reading: Reading,
    windows: HashMap<HandoffId, Vec<WindowDescriptor>>,
    /// Offers for which there are no windows left before others are closed.
    waiting: Vec<(HandoffId, Endpoint, Computed)>,
    counts: Arc<Mutex<ReadCounts>>,
    computed: Arc<Progress>,
    /// By which ways which engines' blocks come: the log has it once.
    told_ways: HashSet<(EngineId, bool)>,
    /// What tells the READs of a hand-off to end.
    cancels: HashMap<HandoffId, watch::Sender<bool>>,
    started: Instant,
}

impl AtRank {
    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    async fn run(mut self, mut events: mpsc::UnboundedReceiver<Event>) {
        let lost = self.events.clone();
        let on_lost = move |engine| drop(lost.send(Event::Lost(engine)));
        let mut talk = Talk::new(Arc::clone(&self.engine), Rc::new(on_lost));
        let mut receiving = self.engine.receiving();
        loop {
            let tick = self.reading.next_tick().unwrap_or(Duration::MAX);
            let look = if self.steps.is_empty() { Duration::from_secs(3600) } else { LOOK_EVERY };
            let wait = tick.saturating_sub(self.now()).min(look);
            tokio::select! {
                received = &mut receiving => match received {
                    Some(received) => self.take(&mut talk, received),
                    None => return,
                },
                Some(event) = events.recv() => self.happen(&mut talk, event),
                () = tokio::time::sleep(wait) => self.reading.tick(self.now()),
            }
            self.look_how_far_steps_are();
            self.carry_out(&mut talk);
        }
    }

    fn take(&mut self, talk: &mut Talk, received: Received) {
        let from = received.from;
        let message = match Message::decode(&received.bytes) {
            Ok(message) => message,
            Err(error) => {
                tracing::warn!("a hand-off's message is passed over: {error}");
                return;
            }
        };
        match message {
            Message::Adopt { key, scheduler, rank } if key == self.key => {
                self.rank = rank;
                self.scheduler = talk.reach_own(&scheduler, SCHEDULER).map(|id| (id, scheduler));
            }
            Message::Offer(offer) => self.reading.offer(self.now(), from, offer),
            Message::Serve { .. } | Message::Close(_) if self.is_scheduler(from) => {
                self.offering.told(message);
            }
            Message::Room { .. } | Message::Stop(_) if self.is_scheduler(from) => {
                self.reading.told(message);
            }
            _ => tracing::warn!("a hand-off's message of somebody who may not say it is passed over"),
        }
    }

    fn happen(&mut self, talk: &mut Talk, event: Event) {
        match event {
            Event::StepBegins(from, filled) => self.steps.push_back(Step { from, filled, offered: 0 }),
            // Whatever happens, the steps are looked at.
            Event::StepEnds => {}
            Event::ReadOver(id, number, read) => {
                self.count(read.as_ref());
                self.reading.read_over(id, number, read.is_some());
            }
            Event::Closed(id) => {
                self.offering.closed(id);
                for (id, reader, computed) in std::mem::take(&mut self.waiting) {
                    if self.offering.is_open(id) {
                        self.offer(talk, id, &reader, computed);
                    }
                }
            }
            // READs from it fail by themselves; whose offers do not come is the schedulers' business.
            Event::Lost(engine) => talk.forget(engine),
        }
    }

    /// Offers whole steps, and before them layers together that are worth a READ.
    fn look_how_far_steps_are(&mut self) {
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

    /// Of the step's blocks so many regions can be read.
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
                ReadingAction::Read { id, number, source, offer, blocks } => {
                    self.read(talk, id, number, &source, &offer, &blocks);
                }
                ReadingAction::Cancel(id) => {
                    if let Some(cancel) = self.cancels.remove(&id) {
                        // Nobody listens where all are over.
                        let _ = cancel.send(true);
                    }
                }
                ReadingAction::Answer(message) => self.answer(talk, &message),
            }
        }
    }

    /// To the own scheduler, which is connected again if it was lost.
    fn answer(&self, talk: &mut Talk, message: &Message) {
        let scheduler = self.scheduler.as_ref().and_then(|(_, endpoint)| talk.reach_own(endpoint, SCHEDULER));
        scheduler.into_iter().for_each(|scheduler| talk.send(scheduler, message));
    }

    /// Name of the peer rank with which this rank exchanges blocks, for logs.
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
                tracing::warn!("blocks of a hand-off cannot be offered: {why}");
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
            talk.reach(reader, self.other_rank()).ok_or_else(|| never("its reader cannot be reached"))?;
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
            let of_fabric = |range: &crate::geometry::Range| WindowRange {
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

    /// A window whose peer takes no bytes that are on their way takes a second to close.
    fn close_windows(&mut self, id: HandoffId) {
        let windows = self.windows.remove(&id).unwrap_or_default();
        if windows.is_empty() {
            return self.offering.closed(id);
        }
        let (engine, events) = (Arc::clone(&self.engine), self.events.clone());
        tokio::task::spawn_blocking(move || {
            for window in windows {
                // It fails only where the engine is closed, and with it all windows.
                let _ = engine.close_window(&window);
            }
            let _ = events.send(Event::Closed(id));
        });
    }

    fn read(
        &mut self,
        talk: &mut Talk,
        id: HandoffId,
        number: u64,
        source: &Endpoint,
        offer: &Offer,
        blocks: &[u32],
    ) {
        let transfer = self.transfer(offer, blocks);
        let source = talk.reach(source, self.other_rank());
        let begun = match (transfer, source.and_then(|source| Some((source, talk.peer(source)?)))) {
            (Some((transfer, runs)), Some((source, peer))) => {
                let begun = self.engine.begin(peer, transfer).ok();
                begun.map(|handle| (handle, source, peer, runs))
            }
            _ => None,
        };
        let events = self.events.clone();
        let Some((mut handle, source, peer, runs)) = begun else {
            let _ = events.send(Event::ReadOver(id, number, None));
            return;
        };
        let is_on_gpu = self.is_on_gpu || offer.window.kind == MemoryKind::Cuda;
        let read = Read { from: (source, peer), runs, bytes: offer.window.len, is_on_gpu };
        let mut cancel = self.cancels.entry(id).or_insert_with(|| watch::Sender::new(false)).subscribe();
        tokio::task::spawn_local(async move {
            let outcome = tokio::select! {
                outcome = &mut handle => outcome,
                _ = cancel.wait_for(|is_over| *is_over) => {
                    handle.cancel();
                    handle.await
                }
            };
            let _ = events.send(Event::ReadOver(id, number, outcome.is_ok().then_some(read)));
        });
    }

    fn count(&mut self, read: Option<&Read>) {
        let mut counts = self.counts.lock();
        let Some(Read { from: (engine, peer), runs, bytes, is_on_gpu }) = read else {
            counts.failed += 1;
            return;
        };
        let paths = self.engine.paths(*peer);
        let is_cma = !is_on_gpu && paths.iter().any(|path| path.carrier == "cma" && path.is_up);
        *(if is_cma { &mut counts.cma_bytes } else { &mut counts.tcp_bytes }) += bytes;
        counts.reads += 1;
        counts.runs += runs;
        drop(counts);
        if self.told_ways.len() < TOLD_WAYS_MAX && self.told_ways.insert((*engine, is_cma)) {
            let address = paths.iter().find_map(|path| path.address);
            let address = address.map_or_else(String::new, |address| format!(" at {address}"));
            let trouble =
                paths.iter().find(|path| path.carrier == "cma").and_then(|path| path.trouble.as_deref());
            let why = if *is_on_gpu { Some("they are in a GPU's memory") } else { trouble };
            if is_cma {
                tracing::info!("blocks of the engine{address} are read by process_vm, on this host");
            } else {
                let why = why.map_or_else(String::new, |why| format!(", since {why}"));
                tracing::info!("blocks of the engine{address} are read by TCP{why}");
            }
        }
    }

    /// And of how many runs it consists. None: what is offered has another length than our blocks.
    fn transfer(&self, offer: &Offer, blocks: &[u32]) -> Option<(Transfer, u64)> {
        if !self.geometry.has(blocks) {
            return None;
        }
        let regions = offer.first_region..offer.first_region + offer.regions;
        let ranges = self.geometry.ranges(blocks, regions, offer.is_by_block);
        let mut at = 0;
        let run = |range: &crate::geometry::Range| {
            let run = Run {
                local: Place { region: self.areas[range.area], offset: range.offset },
                remote: Place { region: offer.window.number, offset: at },
                len: range.len,
            };
            at += range.len;
            run
        };
        let runs: Vec<Run> = ranges.iter().map(run).collect();
        let count = runs.len() as u64;
        let transfer = Transfer::read_through(offer.window, Pieces::Runs(runs));
        let transfer = Transfer { timeout: Some(READ_PATIENCE), ..transfer };
        (at == offer.window.len).then_some((transfer, count))
    }
}
