//! A scheduler's part of hand-offs, carried out: what other schedulers and the own ranks say.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvlane_fabric::{Descriptor, Engine, EngineId, Message as Received, PeerId};
use parking_lot::{Condvar, Mutex};
use tokio::sync::{Notify, Semaphore, mpsc};

use crate::landings::{LandingAction, LandingOptions, Landings, Standing, Wanted};
use crate::legs::{LegAction, LegOptions, Legs};
use crate::message::{Endpoint, HandoffId, Message, Want, whose};
use crate::talk::{AgentError, Talk};

/// An engine that does not answer by then is not reached.
const DIAL_PATIENCE: Duration = Duration::from_secs(2);
/// Name in logs.
const SCHEDULER: &str = "another engine's scheduler";
/// So many at once.
const DIALS_MAX: usize = 4;
/// An address that failed is not tried again before that.
const REST: Duration = Duration::from_secs(1);

/// A rank of this engine.
#[derive(Debug, Clone)]
pub struct RankAddress {
    /// Where it can be reached.
    pub endpoint: Endpoint,
    /// By which it knows its own scheduler.
    pub key: [u8; 16],
}

/// What a scheduler needs.
#[derive(Debug)]
pub struct SchedulerOptions {
    /// This engine's ranks, in their order.
    pub ranks: Vec<RankAddress>,
    /// How its blocks are cut: a digest that is the same where two engines can hand over to each other.
    pub shape: [u8; 16],
    /// Networks beside the loopback whose addresses may be connected to, each with the bits of its prefix.
    pub networks: Vec<(IpAddr, u8)>,
    /// Limits.
    pub legs: LegOptions,
    /// Limits.
    pub landings: LandingOptions,
}

#[derive(Debug)]
enum Event {
    Dialled(SocketAddr, Result<PeerId, String>),
    Lost(EngineId),
}

#[derive(Debug)]
struct State {
    legs: Legs,
    landings: Landings,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Something is over.
    changed: Condvar,
    /// There is something to carry out.
    wake: Notify,
    started: Instant,
}

/// A scheduler's part of hand-offs: an engine of the fabric, and a thread.
#[derive(Debug)]
pub struct SchedulerAgent {
    engine: Arc<Engine>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl SchedulerAgent {
    /// Starts the thread; `engine` is for this agent alone.
    pub fn start(engine: Engine, options: SchedulerOptions) -> Result<SchedulerAgent, AgentError> {
        let ranks: Vec<Endpoint> = options.ranks.iter().map(|rank| rank.endpoint.clone()).collect();
        if ranks.iter().any(|rank| whose(rank).is_none()) {
            return Err(AgentError::NoRank);
        }
        let own = engine.describe()?.to_bytes().map_err(|_| AgentError::TooMany(ranks.len()))?;
        // What it wants of others names all of its ranks in one message, and no other message names more.
        let (id, content, shape) = (HandoffId([0; 16]), [0; 16], options.shape);
        let (first_block, end_block, scheduler) = (u32::MAX - 1, u32::MAX, own.clone());
        let want = Want { id, content, shape, first_block, end_block, scheduler, ranks: ranks.clone() };
        if !Message::Want(want).fits() {
            return Err(AgentError::TooMany(ranks.len()));
        }
        let landings = Landings::new(options.landings, options.shape, own.clone(), ranks.clone());
        let state = Mutex::new(State { legs: Legs::new(options.legs, options.shape, ranks), landings });
        let (changed, wake, started) = (Condvar::new(), Notify::new(), Instant::now());
        let shared = Arc::new(Shared { state, changed, wake, started });
        let engine = Arc::new(engine);
        let (events, incoming) = mpsc::unbounded_channel();
        let at_scheduler = AtScheduler {
            engine: Arc::clone(&engine),
            shared: Arc::clone(&shared),
            events,
            ranks: options.ranks,
            own,
            networks: options.networks,
            reached: HashMap::new(),
            resting: HashMap::new(),
            dials: Arc::new(Semaphore::new(DIALS_MAX)),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        let thread = std::thread::Builder::new().name("kvlane-handoff".into()).spawn(move || {
            let local = tokio::task::LocalSet::new();
            local.block_on(&runtime, at_scheduler.run(incoming));
        })?;
        Ok(SchedulerAgent { engine, shared, thread: Some(thread) })
    }

    fn with<T>(&self, change: impl FnOnce(&mut State, Duration) -> T) -> T {
        let answer = change(&mut self.shared.state.lock(), self.shared.now());
        self.shared.wake.notify_one();
        answer
    }

    /// As [`Legs::begin`].
    pub fn begin_leg(&self, id: HandoffId, content: [u8; 16]) -> bool {
        self.with(|state, now| state.legs.begin(now, id, content))
    }

    /// As [`Legs::progress`]. False: its blocks need not be pinned any more.
    pub fn leg_progress(&self, id: HandoffId, ahead: u32, computed: u64) -> bool {
        let legs = &mut self.shared.state.lock().legs;
        legs.progress(id, ahead, computed);
        legs.goes_on(id)
    }

    /// As [`Legs::give_up`].
    pub fn give_leg_up(&self, id: HandoffId) {
        self.with(|state, _| state.legs.give_up(id));
    }

    /// Hand-offs whose blocks nobody reads any more, since the last call.
    pub fn take_free_legs(&self) -> Vec<HandoffId> {
        self.shared.state.lock().legs.take_free()
    }

    /// As [`Landings::begin`].
    pub fn begin_landing(&self, id: HandoffId, wanted: Wanted) -> bool {
        self.with(|state, now| state.landings.begin(now, id, wanted))
    }

    /// As [`Landings::give_room`].
    pub fn give_room(&self, id: HandoffId, blocks: &[u32]) {
        self.with(|state, _| state.landings.give_room(id, blocks));
    }

    /// As [`Legs::end_oldest_unwanted`].
    pub fn end_oldest_unwanted_leg(&self, but: HandoffId) -> Option<HandoffId> {
        self.with(|state, _| state.legs.end_oldest_unwanted(but))
    }

    /// As [`Landings::standing`].
    pub fn standing(&self, id: HandoffId) -> Option<Standing> {
        self.shared.state.lock().landings.standing(id)
    }

    /// As [`Landings::live`].
    pub fn live_landings(&self) -> Vec<HandoffId> {
        self.shared.state.lock().landings.live().collect()
    }

    /// As [`Landings::give_up`].
    pub fn give_landing_up(&self, id: HandoffId) {
        self.with(|state, _| state.landings.give_up(id));
    }

    /// As [`Landings::forget`].
    ///
    /// # Panics
    /// If it is not over.
    pub fn forget_landing(&self, id: HandoffId) {
        self.shared.state.lock().landings.forget(id);
    }

    /// Gives everything up, and waits until nothing of this engine's is read or written: before its cache is reset. False: not
    /// in this time.
    pub fn end_all(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        self.with(|state, _| {
            state.legs.give_all_up();
            state.landings.give_all_up();
        });
        let mut state = self.shared.state.lock();
        let is_live = |state: &State| state.legs.live() > 0 || state.landings.live().next().is_some();
        while is_live(&state) {
            if self.shared.changed.wait_until(&mut state, deadline).timed_out() {
                return !is_live(&state);
            }
        }
        true
    }

    /// Waits until a landing has ended since the last call. Returns false after the timeout.
    pub fn wait_for_end(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut state = self.shared.state.lock();
        while !state.landings.take_has_ended() {
            if self.shared.changed.wait_until(&mut state, deadline).timed_out() {
                return state.landings.take_has_ended();
            }
        }
        true
    }

    /// Waits until a hand-off is over. False: not in this time.
    pub fn wait_over(&self, id: HandoffId, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut state = self.shared.state.lock();
        let goes_on =
            |state: &State| state.landings.standing(id).is_some_and(|standing| standing.outcome.is_none());
        while goes_on(&state) {
            if self.shared.changed.wait_until(&mut state, deadline).timed_out() {
                return !goes_on(&state);
            }
        }
        true
    }

    /// Ends all connections.
    pub fn close(&mut self) {
        self.engine.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for SchedulerAgent {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn now(&self) -> Duration {
        self.started.elapsed()
    }
}

struct AtScheduler {
    engine: Arc<Engine>,
    shared: Arc<Shared>,
    events: mpsc::UnboundedSender<Event>,
    ranks: Vec<RankAddress>,
    own: Endpoint,
    networks: Vec<(IpAddr, u8)>,
    /// Engines that were connected to by their address.
    reached: HashMap<SocketAddr, EngineId>,
    /// Addresses that failed: until when, and why.
    resting: HashMap<SocketAddr, (Duration, String)>,
    dials: Arc<Semaphore>,
}

impl AtScheduler {
    async fn run(mut self, mut events: mpsc::UnboundedReceiver<Event>) {
        let lost = self.events.clone();
        let on_lost = move |engine| drop(lost.send(Event::Lost(engine)));
        let mut talk = Talk::new(Arc::clone(&self.engine), Rc::new(on_lost));
        let mut of_ranks: HashMap<EngineId, u32> = HashMap::new();
        for (rank, at) in (0..).zip(&self.ranks) {
            let Some(id) = self.adopt(&mut talk, rank, at) else { continue };
            of_ranks.insert(id, rank);
        }
        let ranks: HashMap<u32, EngineId> = of_ranks.iter().map(|(id, rank)| (*rank, *id)).collect();
        let mut receiving = self.engine.receiving();
        let shared = Arc::clone(&self.shared);
        loop {
            self.carry_out(&mut talk, &ranks);
            let wait = self.next_tick().saturating_sub(shared.now()).min(Duration::from_secs(3600));
            tokio::select! {
                received = &mut receiving => match received {
                    Some(received) => self.take(&mut talk, &of_ranks, received),
                    None => return,
                },
                Some(event) = events.recv() => self.happen(&mut talk, event),
                () = shared.wake.notified() => {}
                () = tokio::time::sleep(wait) => {}
            }
            let now = shared.now();
            let mut state = shared.state.lock();
            state.legs.tick(now);
            state.landings.tick(now);
            drop(state);
            shared.changed.notify_all();
        }
    }

    fn next_tick(&self) -> Duration {
        let state = self.shared.state.lock();
        let ticks = [state.legs.next_tick(), state.landings.next_tick()];
        ticks.into_iter().flatten().min().unwrap_or(Duration::MAX)
    }

    fn take(&mut self, talk: &mut Talk, ranks: &HashMap<EngineId, u32>, received: Received) {
        let from = received.from;
        let message = match Message::decode(&received.bytes) {
            Ok(message) => message,
            Err(error) => {
                tracing::warn!("a hand-off's message is passed over: {error}");
                return;
            }
        };
        let now = self.shared.now();
        if let Some(rank) = ranks.get(&from) {
            let mut state = self.shared.state.lock();
            state.legs.rank_said(*rank, &message);
            return state.landings.rank_said(now, *rank, message);
        }
        if let Message::Want(want) = &message {
            let endpoints = want.ranks.iter().chain([&want.scheduler]);
            if !endpoints.into_iter().all(|endpoint| self.may_reach(endpoint)) {
                tracing::warn!(
                    "a hand-off is not answered: it names an address that kvlane.direct.peers does not allow"
                );
                return;
            }
            if talk.reach(&want.scheduler, SCHEDULER) != Some(from) {
                return;
            }
        }
        let mut state = self.shared.state.lock();
        match message {
            Message::Want(_) | Message::Landed(_) => state.legs.message(now, from, message),
            Message::Queued(_) | Message::Refused(..) => state.landings.message(now, from, message),
            Message::Cancel(_) => {
                state.legs.message(now, from, message.clone());
                state.landings.message(now, from, message);
            }
            _ => {}
        }
    }

    /// Whether all addresses of a descriptor may be connected to.
    fn may_reach(&self, endpoint: &Endpoint) -> bool {
        let Ok(descriptor) = Descriptor::from_bytes(endpoint) else { return false };
        let mut addresses = descriptor.socket_addresses().peekable();
        addresses.peek().is_some() && addresses.all(|address| self.is_allowed(address.ip()))
    }

    fn is_allowed(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        address.is_loopback() || self.networks.iter().any(|(network, bits)| is_in(address, *network, *bits))
    }

    fn happen(&mut self, talk: &mut Talk, event: Event) {
        let now = self.shared.now();
        match event {
            Event::Dialled(address, outcome) => {
                let outcome = outcome.and_then(|peer| {
                    let id = self.engine.peer_id(peer).ok_or("it went away again")?;
                    talk.add(id, peer, SCHEDULER);
                    self.reached.insert(address, id);
                    Ok(id)
                });
                if let Err(why) = &outcome {
                    self.resting.insert(address, (now + REST, why.clone()));
                }
                self.shared.state.lock().landings.dialled(now, address, &outcome);
            }
            Event::Lost(engine) => {
                talk.forget(engine);
                self.reached.retain(|_, reached| *reached != engine);
                let mut state = self.shared.state.lock();
                state.legs.peer_gone(engine);
                state.landings.peer_gone(engine);
            }
        }
    }

    fn carry_out(&mut self, talk: &mut Talk, ranks: &HashMap<u32, EngineId>) {
        let shared = Arc::clone(&self.shared);
        loop {
            let mut state = shared.state.lock();
            let (of_leg, of_landing) = (state.legs.next_action(), state.landings.next_action());
            drop(state);
            if of_leg.is_none() && of_landing.is_none() {
                return;
            }
            match of_leg {
                Some(LegAction::Send(to, message)) => talk.send(to, &message),
                Some(LegAction::Rank(rank, message)) => self.send_rank(talk, ranks, rank, &message),
                None => {}
            }
            match of_landing {
                Some(LandingAction::Dial(address)) => self.dial(address),
                Some(LandingAction::Send(to, message)) => talk.send(to, &message),
                Some(LandingAction::Rank(rank, message)) => self.send_rank(talk, ranks, rank, &message),
                None => {}
            }
        }
    }

    /// A rank that was lost, as one that was stopped for long, is connected again.
    fn send_rank(&self, talk: &mut Talk, ranks: &HashMap<u32, EngineId>, rank: u32, message: &Message) {
        let (Some(id), Some(at)) = (ranks.get(&rank), self.ranks.get(rank as usize)) else { return };
        if talk.peer(*id).is_none() {
            self.adopt(talk, rank, at);
        }
        talk.send(*id, message);
    }

    fn adopt(&self, talk: &mut Talk, rank: u32, at: &RankAddress) -> Option<EngineId> {
        let id = talk.reach_own(&at.endpoint, format_args!("this engine's rank {rank}"))?;
        talk.send(id, &Message::Adopt { rank, key: at.key, scheduler: self.own.clone() });
        Some(id)
    }

    fn dial(&mut self, address: SocketAddr) {
        let now = self.shared.now();
        self.resting.retain(|_, (until, _)| now < *until);
        let known = self.reached.get(&address).map(|id| Ok(*id));
        let rests = || self.resting.get(&address).map(|(_, why)| Err(why.clone()));
        let known = known.or_else(rests).or_else(|| {
            (!self.is_allowed(address.ip())).then(|| Err("kvlane.direct.peers does not allow it".into()))
        });
        if let Some(known) = known {
            return self.shared.state.lock().landings.dialled(now, address, &known);
        }
        let (engine, events, dials) =
            (Arc::clone(&self.engine), self.events.clone(), Arc::clone(&self.dials));
        tokio::task::spawn_local(async move {
            let Ok(_one) = dials.acquire().await else { return };
            let reach = move || engine.connect_to(address, DIAL_PATIENCE).map_err(|error| error.to_string());
            let outcome = tokio::task::spawn_blocking(reach).await;
            let outcome = outcome.unwrap_or_else(|_| Err("it could not be tried".into()));
            let _ = events.send(Event::Dialled(address, outcome));
        });
    }
}

fn is_in(address: IpAddr, network: IpAddr, bits: u8) -> bool {
    let bits = u32::from(bits);
    match (address, network) {
        (IpAddr::V4(address), IpAddr::V4(network)) => {
            let mask = u32::MAX.checked_shl(32 - bits.min(32)).unwrap_or(0);
            (address.to_bits() ^ network.to_bits()) & mask == 0
        }
        (IpAddr::V6(address), IpAddr::V6(network)) => {
            let mask = u128::MAX.checked_shl(128 - bits.min(128)).unwrap_or(0);
            (address.to_bits() ^ network.to_bits()) & mask == 0
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_in_a_network_whose_first_bits_it_has() {
        let is_in = |address: &str, network: &str, bits| {
            is_in(address.parse().unwrap(), network.parse().unwrap(), bits)
        };
        assert!(is_in("10.1.2.3", "10.0.0.0", 8) && !is_in("11.1.2.3", "10.0.0.0", 8));
        assert!(is_in("1.2.3.4", "9.9.9.9", 0) && is_in("1.2.3.4", "1.2.3.4", 32));
        assert!(!is_in("1.2.3.4", "::", 0) && is_in("fd00::1", "fd00::", 8));
    }
}
