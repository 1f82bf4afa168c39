//! Carries out a scheduler's part of hand-offs: connects to other engines, and passes messages between their schedulers, the
//! own ranks and the two state machines.
//!
//! The engine's thread calls [`SchedulerAgent`], which changes [`Lendings`] and [`Landings`] under one lock and wakes the
//! thread "kvlane-handoff". That thread sends and receives, and does not hold the lock while it sends.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvlane_fabric::{Descriptor, Engine, EngineId, Message as Received, PeerId};
use parking_lot::{Condvar, Mutex};
use tokio::sync::{Notify, Semaphore, mpsc};

use crate::landings::{LandingAction, LandingOptions, LandingStatus, Landings, Wanted};
use crate::lendings::{LendingAction, LendingOptions, Lendings};
use crate::message::{Endpoint, HandoffId, Message, Want, engine_of};
use crate::talk::{AgentError, Talk};

/// Timeout of connecting to an engine by its address.
const DIAL_PATIENCE: Duration = Duration::from_secs(2);
/// Another scheduler's name in the fabric's logs.
const SCHEDULER: &str = "another engine's scheduler";
/// Most addresses that are dialled at once.
const DIALS_MAX: usize = 4;
/// An address that could not be dialled is not dialled again before this time; hand-offs from there fail at once.
const DIAL_RETRY_AFTER: Duration = Duration::from_secs(1);

/// A rank of this engine.
#[derive(Debug, Clone)]
pub struct RankAddress {
    /// As [`RankAgent::endpoint`](crate::RankAgent::endpoint) names it.
    pub endpoint: Endpoint,
    /// As in the rank's [`RankOptions::key`](crate::RankOptions::key).
    pub key: [u8; 16],
}

/// Arguments of [`SchedulerAgent::start`].
#[derive(Debug)]
pub struct SchedulerOptions {
    /// This engine's ranks, in rank order.
    pub ranks: Vec<RankAddress>,
    /// Digest of how blocks are cut; equal in engines that can hand over to each other.
    pub shape: [u8; 16],
    /// Networks that may be connected to, beside the loopback: address and length of the prefix in bits.
    pub networks: Vec<(IpAddr, u8)>,
    /// Limits and timeouts as a prefill engine.
    pub lendings: LendingOptions,
    /// Limits and timeouts as a decode engine.
    pub landings: LandingOptions,
}

#[derive(Debug)]
enum SchedulerEvent {
    Dialled(SocketAddr, Result<PeerId, String>),
    Lost(EngineId),
}

#[derive(Debug)]
struct State {
    lendings: Lendings,
    landings: Landings,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Notified after each turn of the thread, in which a hand-off may have ended.
    changed: Condvar,
    /// Wakes the thread to carry out actions.
    wake: Notify,
    started: Instant,
}

/// A scheduler's part of hand-offs: a fabric engine and a thread.
#[derive(Debug)]
pub struct SchedulerAgent {
    engine: Arc<Engine>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl SchedulerAgent {
    /// Starts the thread. The caller uses `engine` for nothing but this agent.
    pub fn start(engine: Engine, options: SchedulerOptions) -> Result<SchedulerAgent, AgentError> {
        let ranks: Vec<Endpoint> = options.ranks.iter().map(|rank| rank.endpoint.clone()).collect();
        if ranks.iter().any(|rank| engine_of(rank).is_none()) {
            return Err(AgentError::NoRank);
        }
        let own = engine.describe()?.to_bytes().map_err(|_| AgentError::TooMany(ranks.len()))?;
        // A Want names all ranks in one message. No other message is longer, so if a Want fits, all do.
        let (id, content, shape) = (HandoffId([0; 16]), [0; 16], options.shape);
        let (first_block, end_block, scheduler) = (u32::MAX - 1, u32::MAX, own.clone());
        let want = Want { id, content, shape, first_block, end_block, scheduler, ranks: ranks.clone() };
        if !Message::Want(want).fits() {
            return Err(AgentError::TooMany(ranks.len()));
        }
        let landings = Landings::new(options.landings, options.shape, own.clone(), ranks.clone());
        let state =
            Mutex::new(State { lendings: Lendings::new(options.lendings, options.shape, ranks), landings });
        let (changed, wake, started) = (Condvar::new(), Notify::new(), Instant::now());
        let shared = Arc::new(Shared { state, changed, wake, started });
        let engine = Arc::new(engine);
        let (events, incoming) = mpsc::unbounded_channel();
        let scheduler_thread = SchedulerThread {
            engine: Arc::clone(&engine),
            shared: Arc::clone(&shared),
            events,
            ranks: options.ranks,
            own,
            networks: options.networks,
            connected: HashMap::new(),
            failed_dials: HashMap::new(),
            dials: Arc::new(Semaphore::new(DIALS_MAX)),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        let thread = std::thread::Builder::new().name("kvlane-handoff".into()).spawn(move || {
            let local = tokio::task::LocalSet::new();
            local.block_on(&runtime, scheduler_thread.run(incoming));
        })?;
        Ok(SchedulerAgent { engine, shared, thread: Some(thread) })
    }

    fn with<T>(&self, change: impl FnOnce(&mut State, Duration) -> T) -> T {
        let answer = change(&mut self.shared.state.lock(), self.shared.now());
        self.shared.wake.notify_one();
        answer
    }

    /// As [`Lendings::begin`].
    pub fn begin_lending(&self, id: HandoffId, content: [u8; 16]) -> bool {
        self.with(|state, now| state.lendings.begin(now, id, content))
    }

    /// As [`Lendings::hold`].
    pub fn hold_lending(&self, id: HandoffId) {
        self.with(|state, _| state.lendings.hold(id));
    }

    /// As [`Lendings::release`].
    pub fn release_lending(&self, id: HandoffId) {
        self.with(|state, now| state.lendings.release(now, id));
    }

    /// As [`Lendings::progress`]. False if the engine need not pin further blocks for it.
    pub fn lending_progress(&self, id: HandoffId, ahead: u32, computed: u64) -> bool {
        let lendings = &mut self.shared.state.lock().lendings;
        lendings.progress(id, ahead, computed);
        lendings.is_open(id)
    }

    /// As [`Lendings::give_up`].
    pub fn give_up_lending(&self, id: HandoffId) {
        self.with(|state, _| state.lendings.give_up(id));
    }

    /// As [`Lendings::take_free`].
    pub fn take_free_lendings(&self) -> Vec<HandoffId> {
        self.shared.state.lock().lendings.take_free()
    }

    /// As [`Landings::begin`].
    pub fn begin_landing(&self, id: HandoffId, wanted: Wanted) -> bool {
        self.with(|state, now| state.landings.begin(now, id, wanted))
    }

    /// As [`Landings::give_room`].
    pub fn give_room(&self, id: HandoffId, blocks: &[u32]) {
        self.with(|state, _| state.landings.give_room(id, blocks));
    }

    /// As [`Landings::postpone`].
    pub fn postpone_landing(&self, id: HandoffId, budget: Duration, waits_for_room: bool) {
        self.with(|state, now| state.landings.postpone(now, id, budget, waits_for_room));
    }

    /// As [`Lendings::end_oldest_unwanted`].
    pub fn end_oldest_unwanted_lending(&self, but: HandoffId) -> Option<HandoffId> {
        self.with(|state, _| state.lendings.end_oldest_unwanted(but))
    }

    /// As [`Landings::status`].
    pub fn landing_status(&self, id: HandoffId) -> Option<LandingStatus> {
        self.shared.state.lock().landings.status(id)
    }

    /// As [`Landings::live`].
    pub fn live_landings(&self) -> Vec<HandoffId> {
        self.shared.state.lock().landings.live().collect()
    }

    /// As [`Landings::give_up`].
    pub fn give_up_landing(&self, id: HandoffId) {
        self.with(|state, _| state.landings.give_up(id));
    }

    /// As [`Landings::forget`].
    ///
    /// # Panics
    /// If it is not over.
    pub fn forget_landing(&self, id: HandoffId) {
        self.shared.state.lock().landings.forget(id);
    }

    /// Ends all lendings and landings, and waits until no READ reads or writes this engine's blocks: the engine may then reset
    /// its cache. False at the timeout.
    pub fn end_all(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        self.with(|state, _| {
            state.lendings.give_up_all();
            state.landings.give_up_all();
        });
        let mut state = self.shared.state.lock();
        let is_live = |state: &State| state.lendings.live() > 0 || state.landings.live().next().is_some();
        while is_live(&state) {
            if self.shared.changed.wait_until(&mut state, deadline).timed_out() {
                return !is_live(&state);
            }
        }
        true
    }

    /// Waits until a landing has ended since the last call. False at the timeout.
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

    /// Waits until a landing is over. False at the timeout.
    pub fn wait_over(&self, id: HandoffId, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut state = self.shared.state.lock();
        let is_live =
            |state: &State| state.landings.status(id).is_some_and(|status| status.outcome.is_none());
        while is_live(&state) {
            if self.shared.changed.wait_until(&mut state, deadline).timed_out() {
                return !is_live(&state);
            }
        }
        true
    }

    /// Closes the fabric engine and ends the thread.
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

struct SchedulerThread {
    engine: Arc<Engine>,
    shared: Arc<Shared>,
    events: mpsc::UnboundedSender<SchedulerEvent>,
    ranks: Vec<RankAddress>,
    own: Endpoint,
    networks: Vec<(IpAddr, u8)>,
    /// Engines that were dialled, and are not lost.
    connected: HashMap<SocketAddr, EngineId>,
    /// Addresses that could not be dialled: when they may be tried again, and why they failed.
    failed_dials: HashMap<SocketAddr, (Duration, String)>,
    dials: Arc<Semaphore>,
}

impl SchedulerThread {
    async fn run(mut self, mut events: mpsc::UnboundedReceiver<SchedulerEvent>) {
        let lost = self.events.clone();
        let on_lost = move |engine| drop(lost.send(SchedulerEvent::Lost(engine)));
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
            let (next, idle) = talk.tidy(Instant::now());
            self.connected.retain(|_, connected| !idle.contains(connected));
            let wait = self.next_tick().saturating_sub(shared.now()).min(next);
            tokio::select! {
                received = &mut receiving => match received {
                    Some(received) => self.handle_message(&mut talk, &of_ranks, received),
                    None => return,
                },
                Some(event) = events.recv() => self.handle_event(&mut talk, event),
                () = shared.wake.notified() => {}
                () = tokio::time::sleep(wait) => {}
            }
            let now = shared.now();
            let mut state = shared.state.lock();
            state.lendings.tick(now);
            state.landings.tick(now);
            drop(state);
            shared.changed.notify_all();
        }
    }

    fn next_tick(&self) -> Duration {
        let state = self.shared.state.lock();
        let ticks = [state.lendings.next_tick(), state.landings.next_tick()];
        ticks.into_iter().flatten().min().unwrap_or(Duration::MAX)
    }

    fn handle_message(&mut self, talk: &mut Talk, ranks: &HashMap<EngineId, u32>, received: Received) {
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
        let now = self.shared.now();
        if let Some(rank) = ranks.get(&from) {
            let mut state = self.shared.state.lock();
            state.lendings.rank_said(*rank, &message);
            return state.landings.rank_said(now, *rank, message);
        }
        if let Message::Want(want) = &message {
            let endpoints = want.ranks.iter().chain([&want.scheduler]);
            if !endpoints.into_iter().all(|endpoint| self.may_reach(endpoint)) {
                // Log: a decode engine asked for blocks and named an address that is not allowed; it computes the
                // prompt. Do: add the engine's address to `kvlane.direct.peers`, if it is yours.
                tracing::warn!(
                    "hand-off ignored: kvlane.direct.peers does not allow an address that it names"
                );
                return;
            }
            if talk.connect(&want.scheduler, SCHEDULER) != Some(from) {
                return;
            }
        }
        let mut state = self.shared.state.lock();
        match message {
            Message::Want(_) | Message::Landed(_) => state.lendings.message(now, from, message),
            Message::Queued(_) | Message::Refused(..) => state.landings.message(now, from, message),
            Message::Cancel(_) => {
                state.lendings.message(now, from, message.clone());
                state.landings.message(now, from, message);
            }
            _ => {}
        }
    }

    /// Whether this engine may connect to all addresses of a descriptor.
    fn may_reach(&self, endpoint: &Endpoint) -> bool {
        let Ok(descriptor) = Descriptor::from_bytes(endpoint) else { return false };
        let mut addresses = descriptor.socket_addresses().peekable();
        addresses.peek().is_some() && addresses.all(|address| self.is_allowed(address.ip()))
    }

    fn is_allowed(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        address.is_loopback() || self.networks.iter().any(|(network, bits)| is_in(address, *network, *bits))
    }

    fn handle_event(&mut self, talk: &mut Talk, event: SchedulerEvent) {
        let now = self.shared.now();
        match event {
            SchedulerEvent::Dialled(address, outcome) => {
                let outcome = outcome.and_then(|peer| {
                    let id = self.engine.peer_id(peer).ok_or("it went away again")?;
                    talk.add(id, peer, SCHEDULER);
                    self.connected.insert(address, id);
                    Ok(id)
                });
                if let Err(why) = &outcome {
                    self.failed_dials.insert(address, (now + DIAL_RETRY_AFTER, why.clone()));
                }
                self.shared.state.lock().landings.dialled(now, address, &outcome);
            }
            SchedulerEvent::Lost(engine) => {
                talk.forget(engine);
                self.connected.retain(|_, connected| *connected != engine);
                let mut state = self.shared.state.lock();
                state.lendings.peer_gone(engine);
                state.landings.peer_gone(engine);
            }
        }
    }

    fn carry_out(&mut self, talk: &mut Talk, ranks: &HashMap<u32, EngineId>) {
        let shared = Arc::clone(&self.shared);
        loop {
            let mut state = shared.state.lock();
            let (of_lending, of_landing) = (state.lendings.next_action(), state.landings.next_action());
            drop(state);
            if of_lending.is_none() && of_landing.is_none() {
                return;
            }
            match of_lending {
                Some(LendingAction::Send(to, message)) => talk.send(to, &message),
                Some(LendingAction::Rank(rank, message)) => self.send_rank(talk, ranks, rank, &message),
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

    /// Sends to an own rank, and reconnects to it if it was lost, as after it was stopped for long.
    fn send_rank(&self, talk: &mut Talk, ranks: &HashMap<u32, EngineId>, rank: u32, message: &Message) {
        let (Some(id), Some(at)) = (ranks.get(&rank), self.ranks.get(rank as usize)) else { return };
        if talk.peer(*id).is_none() {
            self.adopt(talk, rank, at);
        }
        talk.send(*id, message);
    }

    fn adopt(&self, talk: &mut Talk, rank: u32, at: &RankAddress) -> Option<EngineId> {
        let id = talk.connect_own(&at.endpoint, format_args!("this engine's rank {rank}"))?;
        talk.send(id, &Message::Adopt { rank, key: at.key, scheduler: self.own.clone() });
        Some(id)
    }

    fn dial(&mut self, address: SocketAddr) {
        let now = self.shared.now();
        self.failed_dials.retain(|_, (until, _)| now < *until);
        let connected = self.connected.get(&address).map(|id| Ok(*id));
        let failed = || self.failed_dials.get(&address).map(|(_, why)| Err(why.clone()));
        let outcome = connected.or_else(failed).or_else(|| {
            (!self.is_allowed(address.ip())).then(|| Err("kvlane.direct.peers does not allow it".into()))
        });
        if let Some(outcome) = outcome {
            return self.shared.state.lock().landings.dialled(now, address, &outcome);
        }
        let (engine, events, dials) =
            (Arc::clone(&self.engine), self.events.clone(), Arc::clone(&self.dials));
        tokio::task::spawn_local(async move {
            let Ok(_one) = dials.acquire().await else { return };
            let reach = move || engine.connect_to(address, DIAL_PATIENCE).map_err(|error| error.to_string());
            let outcome = tokio::task::spawn_blocking(reach).await;
            let outcome = outcome.unwrap_or_else(|_| Err("it could not be tried".into()));
            let _ = events.send(SchedulerEvent::Dialled(address, outcome));
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
