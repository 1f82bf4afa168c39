//! A rank's part of hand-offs, carried out: windows, READs, and what its scheduler and other ranks say.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvlane_block::Region;
use kvlane_fabric::{
    Engine, EngineId, Message as Received, Pieces, Place, Run, Transfer, WINDOW_RANGES_MAX, WindowDescriptor,
    WindowRange,
};
use tokio::sync::{mpsc, watch};

use crate::geometry::Geometry;
use crate::message::{BLOCKS_MAX, Endpoint, HandoffId, Message, Offer};
use crate::offering::{Computed, Offering, OfferingAction};
use crate::reading::{Reading, ReadingAction};
use crate::talk::{AgentError, Talk};

/// Blocks are offered together until they have so many bytes: enough for a READ to be worth its messages, and little enough
/// that the next one is under way meanwhile.
const OFFER_BYTES: u64 = 4 << 20;
/// Layers are offered before their step is over where they have so many bytes.
const OFFER_BYTES_MIN: u64 = 1 << 20;
const READ_PATIENCE: Duration = Duration::from_secs(30);

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

#[derive(Debug)]
enum Event {
    StepBegins(Vec<Filled>),
    Layers(u32),
    StepEnds,
    ReadOver(HandoffId, u64, bool),
    Closed(HandoffId),
    Lost(EngineId),
}

/// A rank's part of hand-offs: an engine of the fabric, and a thread.
#[derive(Debug)]
pub struct RankAgent {
    engine: Arc<Engine>,
    events: mpsc::UnboundedSender<Event>,
    endpoint: Endpoint,
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
        let at_rank = AtRank {
            engine: Arc::clone(&engine),
            events: events.clone(),
            reading: Reading::new(geometry.regions()),
            geometry,
            areas: options.areas.iter().map(|area| area.region).collect(),
            key: options.key,
            scheduler: None,
            step: Step::default(),
            offering: Offering::default(),
            windows: HashMap::new(),
            cancels: HashMap::new(),
            started: Instant::now(),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        let thread = std::thread::Builder::new().name("kvlane-handoff".into()).spawn(move || {
            let local = tokio::task::LocalSet::new();
            local.block_on(&runtime, at_rank.run(incoming));
        })?;
        Ok(RankAgent { engine, events, endpoint, thread: Some(thread) })
    }

    /// Where it can be reached.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// A step of the engine fills these blocks. They stay as they are, once computed, until their hand-off is over.
    pub fn step_begins(&self, filled: Vec<Filled>) {
        // Without the thread nobody reads them.
        let _ = self.events.send(Event::StepBegins(filled));
    }

    /// Of the step's blocks so many regions, the first ones, are computed.
    pub fn layers_computed(&self, regions: u32) {
        let _ = self.events.send(Event::Layers(regions));
    }

    /// All of the step's blocks are computed.
    pub fn step_ends(&self) {
        let _ = self.events.send(Event::StepEnds);
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

/// What the engine's present step fills.
#[derive(Debug, Default)]
struct Step {
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
    scheduler: Option<(EngineId, Endpoint)>,
    step: Step,
    offering: Offering,
    reading: Reading,
    windows: HashMap<HandoffId, Vec<WindowDescriptor>>,
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
            let wait = tick.saturating_sub(self.now()).min(Duration::from_secs(3600));
            tokio::select! {
                received = &mut receiving => match received {
                    Some(received) => self.take(&mut talk, received),
                    None => return,
                },
                Some(event) = events.recv() => self.happen(&mut talk, event),
                () = tokio::time::sleep(wait) => self.reading.tick(self.now()),
            }
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
            Message::Adopt { key, scheduler, .. } if key == self.key => {
                self.scheduler = talk.reach(&scheduler).map(|id| (id, scheduler));
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
            Event::StepBegins(filled) => {
                self.offer_up_to(self.geometry.regions());
                self.step = Step { filled, offered: 0 };
            }
            Event::Layers(regions) => {
                let blocks: usize = self.step.filled.iter().map(|filled| filled.blocks.len()).sum();
                let bytes = self.geometry.bytes_of(self.step.offered..regions) * blocks as u64;
                if bytes >= OFFER_BYTES_MIN {
                    self.offer_up_to(regions);
                }
            }
            Event::StepEnds => {
                self.offer_up_to(self.geometry.regions());
                self.step = Step::default();
            }
            Event::ReadOver(id, number, is_there) => self.reading.read_over(id, number, is_there),
            Event::Closed(id) => self.offering.closed(id),
            // READs from it fail by themselves; whose offers do not come is the schedulers' business.
            Event::Lost(engine) => talk.forget(engine),
        }
    }

    /// Of the step's blocks so many regions can be read.
    fn offer_up_to(&mut self, regions: u32) {
        let all = self.geometry.regions();
        let (from, to) = (self.step.offered, regions.min(all));
        if from >= to {
            return;
        }
        self.step.offered = to;
        for Filled { id, first_block, blocks, hash } in &self.step.filled {
            let hash = hash.filter(|_| to == all);
            let computed =
                Computed { first_block: *first_block, blocks: blocks.clone(), regions: from..to, hash };
            self.offering.computed(*id, computed);
        }
    }

    fn carry_out(&mut self, talk: &mut Talk) {
        while let Some(action) = self.offering.next_action() {
            match action {
                OfferingAction::Offer(id, reader, computed) => self.offer(talk, id, &reader, &computed),
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
        let scheduler = self.scheduler.as_ref().and_then(|(_, endpoint)| talk.reach(endpoint));
        scheduler.into_iter().for_each(|scheduler| talk.send(scheduler, message));
    }

    fn is_scheduler(&self, engine: EngineId) -> bool {
        self.scheduler.as_ref().is_some_and(|(scheduler, _)| *scheduler == engine)
    }

    fn offer(&mut self, talk: &mut Talk, id: HandoffId, reader: &Endpoint, computed: &Computed) {
        let Some(to) = talk.reach(reader) else { return };
        if !self.geometry.has(&computed.blocks) {
            tracing::warn!("a block of a hand-off is none of this rank's");
            return;
        }
        let regions = computed.regions.clone();
        let block_bytes = self.geometry.bytes_of(regions.clone()).max(1);
        let together = (OFFER_BYTES / block_bytes).clamp(1, BLOCKS_MAX as u64) as usize;
        let mut first_block = computed.first_block;
        for blocks in computed.blocks.chunks(together) {
            let [by_region, by_block] =
                [false, true].map(|is_by_block| self.geometry.ranges(blocks, regions.clone(), is_by_block));
            let is_by_block = by_block.len() < by_region.len();
            let ranges = if is_by_block { by_block } else { by_region };
            let is_last =
                first_block as usize + blocks.len() == computed.first_block as usize + computed.blocks.len();
            if ranges.len() > WINDOW_RANGES_MAX {
                tracing::warn!("a block consists of {} pieces, too many for a window", ranges.len());
                return;
            }
            let of_fabric = |range: &crate::geometry::Range| WindowRange {
                region: self.areas[range.area],
                offset: range.offset,
                len: range.len,
            };
            let window = match self.engine.open_window(to, ranges.iter().map(of_fabric).collect()) {
                Ok(window) => window,
                Err(error) => {
                    tracing::warn!("blocks of a hand-off cannot be offered: {error}");
                    return;
                }
            };
            self.windows.entry(id).or_default().push(window);
            let offer = Offer {
                id,
                first_block,
                blocks: blocks.len() as u32,
                first_region: regions.start,
                regions: regions.end - regions.start,
                is_by_block,
                window,
                hash: if is_last { computed.hash } else { None },
            };
            talk.send(to, &Message::Offer(offer));
            first_block += blocks.len() as u32;
        }
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
        let peer = talk.reach(source).and_then(|source| talk.peer(source));
        let begun = match (transfer, peer) {
            (Some(transfer), Some(peer)) => self.engine.begin(peer, transfer).ok(),
            _ => None,
        };
        let events = self.events.clone();
        let Some(mut handle) = begun else {
            let _ = events.send(Event::ReadOver(id, number, false));
            return;
        };
        let mut cancel = self.cancels.entry(id).or_insert_with(|| watch::Sender::new(false)).subscribe();
        tokio::task::spawn_local(async move {
            let outcome = tokio::select! {
                outcome = &mut handle => outcome,
                _ = cancel.wait_for(|is_over| *is_over) => {
                    handle.cancel();
                    handle.await
                }
            };
            let _ = events.send(Event::ReadOver(id, number, outcome.is_ok()));
        });
    }

    /// None: what is offered has another length than our blocks.
    fn transfer(&self, offer: &Offer, blocks: &[u32]) -> Option<Transfer> {
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
        let transfer = Transfer::read_through(offer.window, Pieces::Runs(runs));
        (at == offer.window.len).then_some(Transfer { timeout: Some(READ_PATIENCE), ..transfer })
    }
}
