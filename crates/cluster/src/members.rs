//! The other daemons of the cluster, or the replicas of its index: this process dials each, and talks to no other.
//!
//! ```text
//!   HOST:PORT --resolved--> addresses, each a member:
//!     unreached --connect--> reached: attended ----lost----> unreached, dialled again after 0.2 .. 5 s
//!         '-- it is this daemon itself: never asked
//! ```
//! A daemon is attended by a beat every second, a replica by announcements (announcer.rs).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use kvlane_fabric::{Engine, EngineId, FabricError, Handle, PeerId, SendOptions};
use parking_lot::{Condvar, Mutex, RwLock};

use crate::breaker::Breaker;
use crate::messages::Message;

/// Most members. A fetch knows 64 holders.
pub(crate) const MEMBERS_MAX: usize = 64;
const BEAT_EVERY: Duration = Duration::from_secs(1);
/// How long a beat may take before its member counts as unreached.
const BEAT_PATIENCE: Duration = Duration::from_secs(3);
/// How often a message that is not acknowledged makes its sender look whether a path to the member is up.
const LOOK_EVERY: Duration = Duration::from_millis(500);
const DIAL_PATIENCE: Duration = Duration::from_secs(2);
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// A replica that was reached this lately may have just started, and not know all blocks yet.
const NEW: Duration = Duration::from_secs(3);
/// How often names are resolved again.
const RESOLVE_EVERY: Duration = Duration::from_secs(10);

/// A member's number here. No other member ever gets it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct MemberNumber(pub(crate) u32);

/// Another daemon that this one dials.
pub(crate) struct Member {
    pub(crate) number: MemberNumber,
    pub(crate) address: SocketAddr,
    pub(crate) state: Mutex<MemberState>,
}

#[derive(Default)]
pub(crate) struct MemberState {
    /// The peer and its start, while it is reached.
    pub(crate) reached: Option<(PeerId, EngineId)>,
    /// When it was reached last.
    since: Option<Instant>,
    /// Its answers to questions.
    pub(crate) breaker: Breaker,
    /// Its loans.
    loans: Breaker,
    /// Bytes a second of its loans, a moving mean; None before the first.
    bytes_per_s: Option<f64>,
    /// As its beats say.
    pub(crate) name: String,
    pub(crate) software: String,
    /// Why it is not reached.
    pub(crate) trouble: Option<String>,
    /// The address is this daemon's own.
    is_self: bool,
}

/// Stays with a member that is reached until it is lost, and returns why. None: this process stops.
pub(crate) type Attend = Box<dyn Fn(&Member, PeerId) -> Option<String> + Send + Sync>;

/// The settings of the threads that dial.
pub(crate) struct Dialling {
    pub(crate) engine: Arc<Engine>,
    /// HOST:PORT, each maybe with several addresses.
    pub(crate) names: Vec<String>,
    /// The members' kind, for the log: `daemon` or `replica`.
    pub(crate) kind: &'static str,
    pub(crate) attend: Attend,
    /// Called when a member is no longer reached.
    pub(crate) when_lost: Box<dyn Fn(MemberNumber) + Send + Sync>,
}

/// All members, by number and by engine.
pub(crate) struct Members {
    all: RwLock<BTreeMap<MemberNumber, Arc<Member>>>,
    /// The number of the next member.
    next: AtomicU32,
    /// The addresses that the names had when they were resolved last.
    named: RwLock<BTreeSet<SocketAddr>>,
    /// An address was left out because there are too many, and that was logged.
    is_full: AtomicBool,
    by_engine: RwLock<HashMap<EngineId, MemberNumber>>,
    /// Names that could not be resolved, and why.
    pub(crate) unresolved: Mutex<Vec<(String, String)>>,
    stopped: Mutex<bool>,
    /// Notified at the end, and when members are to be dialled or sent a beat at once.
    stop: Condvar,
}

impl Members {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            all: RwLock::default(),
            next: AtomicU32::new(0),
            named: RwLock::default(),
            is_full: AtomicBool::new(false),
            by_engine: RwLock::default(),
            unresolved: Mutex::default(),
            stopped: Mutex::new(false),
            stop: Condvar::new(),
        })
    }

    pub(crate) fn all(&self) -> Vec<Arc<Member>> {
        self.all.read().values().cloned().collect()
    }

    pub(crate) fn get(&self, number: MemberNumber) -> Option<Arc<Member>> {
        self.all.read().get(&number).cloned()
    }

    /// The member that sends as this engine.
    pub(crate) fn of(&self, engine: EngineId) -> Option<Arc<Member>> {
        let number = *self.by_engine.read().get(&engine)?;
        self.get(number)
    }

    /// Starts the thread that resolves the names and dials what it finds. Without names, [`dial_only`](Self::dial_only) gives
    /// addresses.
    pub(crate) fn start(self: &Arc<Self>, dialling: Arc<Dialling>) -> std::io::Result<()> {
        if dialling.names.is_empty() {
            return Ok(());
        }
        let members = Arc::clone(self);
        let run = move || members.run(&dialling);
        std::thread::Builder::new().name("kvlane-members".into()).spawn(run).map(drop)
    }

    /// Dials these addresses, and no longer those that are not among them once they are not reached.
    pub(crate) fn dial_only(self: &Arc<Self>, addresses: BTreeSet<SocketAddr>, dialling: &Arc<Dialling>) {
        if *self.stopped.lock() {
            return;
        }
        // First, or the thread of a new address would find that it is not named. An address that was named before may still
        // lack a place.
        self.named.write().clone_from(&addresses);
        addresses.into_iter().for_each(|address| self.start_dialling(address, dialling));
    }

    /// The member at an address, if it is reached.
    pub(crate) fn reached_at(&self, address: SocketAddr) -> Option<Arc<Member>> {
        let all = self.all.read();
        let member = all.values().find(|member| member.address == address)?;
        member.peer().is_some().then(|| Arc::clone(member))
    }

    /// Ends all threads.
    pub(crate) fn stop(&self) {
        *self.stopped.lock() = true;
        self.stop.notify_all();
    }

    /// A daemon that is no member has sent something: a member may have started again. So all are dialled or sent a beat now.
    pub(crate) fn hurry(&self) {
        self.stop.notify_all();
    }

    /// True: it is stopped.
    fn pause(&self, time: Duration) -> bool {
        let mut stopped = self.stopped.lock();
        if !*stopped {
            self.stop.wait_for(&mut stopped, time);
        }
        *stopped
    }

    fn run(self: &Arc<Self>, dialling: &Arc<Dialling>) {
        loop {
            let mut named = BTreeSet::new();
            let mut unresolved = Vec::new();
            for name in &dialling.names {
                match name.to_socket_addrs().map(Iterator::collect::<Vec<_>>) {
                    Ok(found) if !found.is_empty() => {
                        // At once, because the next name may take long.
                        self.named.write().extend(&found);
                        found.iter().for_each(|address| self.start_dialling(*address, dialling));
                        named.extend(found);
                    }
                    Ok(_) => unresolved.push((name.clone(), "it has no address".to_owned())),
                    Err(error) => unresolved.push((name.clone(), error.to_string())),
                }
                if *self.stopped.lock() {
                    return;
                }
            }
            // While a name is not resolved, its daemons stay.
            if unresolved.is_empty() {
                *self.named.write() = named;
            }
            self.note_unresolved(unresolved);
            if self.pause(RESOLVE_EVERY) {
                return;
            }
        }
    }

    /// Dials an address in a thread of its own, if it is new.
    fn start_dialling(self: &Arc<Self>, address: SocketAddr, dialling: &Arc<Dialling>) {
        let Some(member) = self.add(address) else { return };
        let (members, dialling) = (Arc::clone(self), Arc::clone(dialling));
        let dial = move || members.dial(&member, &dialling);
        // Log: this daemon of the cluster is never asked. Do: raise the limit of threads (ulimit -u, pids of the
        // container).
        let warn = |error| tracing::warn!(%address, %error, "cannot start thread kvlane-member");
        // The threads end once the engine is closed.
        std::thread::Builder::new().name("kvlane-member".into()).spawn(dial).map_or_else(warn, drop);
    }

    fn note_unresolved(&self, unresolved: Vec<(String, String)>) {
        let mut before = self.unresolved.lock();
        for (name, why) in unresolved.iter().filter(|each| !before.contains(each)) {
            // Log: a name of `--peers` leads to no daemon; it is tried again. Do: check the name, and DNS.
            tracing::warn!(name, "a name of --peers is not resolved: {why}");
        }
        *before = unresolved;
    }

    /// Adds a member. None: it is known, or there are too many.
    fn add(&self, address: SocketAddr) -> Option<Arc<Member>> {
        let mut all = self.all.write();
        if all.values().any(|member| member.address == address) {
            return None;
        }
        if all.len() >= MEMBERS_MAX {
            if !self.is_full.swap(true, Ordering::Relaxed) {
                // Log: the cluster has more than 64 daemons; the others are not asked. Do: make smaller clusters.
                tracing::warn!(%address, most = MEMBERS_MAX, once = true, "daemon not dialled: there are too many");
            }
            return None;
        }
        let number = MemberNumber(self.next.fetch_add(1, Ordering::Relaxed));
        let member = Arc::new(Member { number, address, state: Mutex::default() });
        all.insert(number, Arc::clone(&member));
        Some(member)
    }

    /// Removes a member that is not reached and that no name leads to any more: a container's next address is another one.
    /// True if it is gone.
    fn remove_unnamed(&self, member: &Member) -> bool {
        // First, or the address could be named again in between, and `add` would find this member.
        let mut all = self.all.write();
        let is_gone = !self.named.read().contains(&member.address);
        if is_gone {
            all.remove(&member.number);
        }
        is_gone
    }

    /// Keeps one member reached, until the end.
    fn dial(&self, member: &Member, dialling: &Dialling) {
        let Dialling { engine, kind, attend, when_lost, .. } = dialling;
        let mut pause = FIRST_PAUSE;
        loop {
            match engine.connect_to(member.address, DIAL_PATIENCE) {
                Ok(peer) => {
                    if let Some(id) = engine.peer_id(peer) {
                        if id == engine.id() {
                            engine.disconnect(peer);
                            member.state.lock().is_self = true;
                            return;
                        }
                        if let Some(other) = self.of(id) {
                            let why = format!("it is the daemon at {}, under another address", other.address);
                            member.state.lock().trouble = Some(why);
                            pause = LONGEST_PAUSE;
                        } else {
                            pause = FIRST_PAUSE;
                            self.reached(member, dialling, peer, id);
                            let why = attend(member, peer);
                            self.lost(member, kind, id, why);
                            when_lost(member.number);
                        }
                    }
                    engine.disconnect(peer);
                }
                Err(error) => {
                    let why = error.to_string();
                    let mut state = member.state.lock();
                    if state.trouble.is_none() {
                        // Log: another daemon, or a replica of the index, is not reached; it is dialled again, and prompts
                        // that only it has are computed. Do: check that it runs, its address, token and network.
                        tracing::warn!(member = %member.address, "{kind} not reached: {why}");
                    }
                    state.trouble = Some(why);
                }
            }
            if self.remove_unnamed(member) || self.pause(pause) {
                return;
            }
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }

    fn reached(&self, member: &Member, dialling: &Dialling, peer: PeerId, id: EngineId) {
        let kind = dialling.kind;
        dialling.engine.name_peer(peer, format!("{kind} {}", member.address));
        let mut state = member.state.lock();
        // Name and version may be of the member's start before. Its first beat names it again.
        (state.name, state.software) = (String::new(), String::new());
        (state.reached, state.since) = (Some((peer, id)), Some(Instant::now()));
        state.trouble = None;
        (state.breaker, state.loans) = (Breaker::default(), Breaker::default());
        drop(state);
        self.by_engine.write().insert(id, member.number);
        // Log: blocks of that daemon are hits here from now on, or that replica of the index is asked.
        tracing::info!(member = %member.address, "{kind} reached");
    }

    fn lost(&self, member: &Member, kind: &str, id: EngineId, why: Option<String>) {
        self.by_engine.write().remove(&id);
        let mut state = member.state.lock();
        state.reached = None;
        if let Some(why) = why {
            // Log: a daemon, or a replica of the index, has ended or is cut off; prompts that only it has are computed.
            // Do: check that it runs, and the network.
            tracing::warn!(member = %member.address, name = state.name, "{kind} lost: {why}");
            state.trouble = Some(why);
        }
    }

    /// Sends beats that are this message, until one is lost. See [`Attend`].
    pub(crate) fn beat(
        &self,
        member: &Member,
        engine: &Engine,
        bytes: &Arc<[u8]>,
        peer: PeerId,
    ) -> Option<String> {
        loop {
            let options = SendOptions { timeout: BEAT_PATIENCE, ..SendOptions::default() };
            match engine.send(peer, Arc::clone(bytes), options).map(|sent| acknowledged(engine, peer, &sent))
            {
                Ok(Some(Ok(()))) => {}
                Ok(Some(Err(why))) => return Some(why),
                Ok(None) => return None,
                // This daemon's other messages fill what there is: that says nothing about the member.
                Err(FabricError::Full(_) | FabricError::MessagesFull(_)) => {}
                Err(error) => return Some(error.to_string()),
            }
            if self.pause(BEAT_EVERY) {
                return None;
            }
            debug_assert!(member.state.lock().reached.is_some());
        }
    }
}

/// Waits until a message to a member is acknowledged, or why it is not. None: the engine is closed.
///
/// It does not wait for a member that has ended: the fabric takes 2.5 s to give one up, and meanwhile it may have started again.
pub(crate) fn acknowledged(engine: &Engine, peer: PeerId, sent: &Handle) -> Option<Result<(), String>> {
    loop {
        match sent.wait(Some(LOOK_EVERY)) {
            Some(outcome) => return Some(outcome.map_err(|failure| failure.to_string())),
            None if engine.is_closed() => return None,
            None if engine.paths(peer).iter().any(|path| path.is_up) => {}
            None => return Some(Err("no path to it is up".to_owned())),
        }
    }
}

/// The message that is sent to daemons every second.
pub(crate) fn own_beat(name: &str) -> Arc<[u8]> {
    let software = env!("CARGO_PKG_VERSION").to_owned();
    Message::Beat { name: name.to_owned(), software }.encode().into()
}

impl MemberState {
    /// Since when it is reached, if that is only lately.
    pub(crate) fn new_since(&self, now: Instant) -> Option<Instant> {
        self.since.filter(|since| now < *since + NEW)
    }

    /// How long a loan may take to be granted, with so much time left: then another holder can still be asked.
    pub(crate) fn lease_patience(&self, left: Duration) -> Duration {
        (20 * self.breaker.round_trip()).max(left / 4)
    }

    /// How long so many bytes may take, with so much time left. All of it, before the rate is known.
    pub(crate) fn read_patience(&self, bytes: u64, left: Duration) -> Duration {
        let Some(rate) = self.bytes_per_s else { return left };
        let usual = Duration::try_from_secs_f64(bytes as f64 / rate).unwrap_or(Duration::MAX);
        usual.saturating_mul(4).max(left / 2).min(left)
    }

    /// A loan is over. Three in a row that are late or damaged leave the member out for a while. True: from now on.
    pub(crate) fn note_loan(&mut self, is_right: bool, bytes: u64, took: Duration, now: Instant) -> bool {
        let is_left_out = !is_right && self.loans.missed(now);
        if is_right {
            self.loans.alive();
        }
        if bytes > 0 && !took.is_zero() {
            let rate = bytes as f64 / took.as_secs_f64();
            self.bytes_per_s = Some(self.bytes_per_s.map_or(rate, |mean| 0.75 * mean + 0.25 * rate));
        }
        is_left_out
    }

    /// Whether to ask it now, if it is reached.
    pub(crate) fn may_ask(&mut self, now: Instant) -> bool {
        self.loans.may_ask(now) && self.breaker.may_ask(now)
    }

    /// Why it is not asked, although it is reached.
    pub(crate) fn left_out(&self) -> Option<&'static str> {
        if self.breaker.is_open() {
            Some("it does not answer in time")
        } else {
            self.loans.is_open().then_some("its blocks come late or damaged")
        }
    }
}

impl Member {
    /// The peer to ask, if it may be asked now.
    pub(crate) fn to_ask(&self, now: Instant) -> Option<PeerId> {
        let mut state = self.state.lock();
        let (peer, _) = state.reached?;
        state.may_ask(now).then_some(peer)
    }

    /// The peer, if it may be asked by then.
    pub(crate) fn to_ask_later(&self, then: Instant) -> Option<PeerId> {
        let state = self.state.lock();
        let (peer, _) = state.reached?;
        (state.breaker.is_over(then) && state.loans.is_over(then)).then_some(peer)
    }

    /// The peer, while it is reached.
    pub(crate) fn peer(&self) -> Option<PeerId> {
        self.state.lock().reached.map(|(peer, _)| peer)
    }

    /// Whether it is another daemon.
    pub(crate) fn is_other(&self) -> bool {
        !self.state.lock().is_self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_whose_loans_are_bad_is_left_out_until_one_is_right() {
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let mut state = MemberState::default();
        assert_eq!((state.read_patience(1 << 30, second), state.left_out()), (second, None));
        state.note_loan(true, 1 << 20, second, now);
        // Four times as long as usual, half of the time at least, and all of it at most.
        assert_eq!(state.read_patience(1 << 10, second), second / 2);
        assert_eq!(state.read_patience(3 << 18, 4 * second), 3 * second);
        assert_eq!(state.read_patience(u64::MAX, second), second);
        assert_eq!(state.lease_patience(second), second / 4);
        for at in [now, now, now + second] {
            assert_eq!(state.left_out(), None);
            state.note_loan(false, 0, Duration::ZERO, at);
        }
        let now = now + second;
        assert!(!state.note_loan(false, 0, Duration::ZERO, now), "said before");
        assert!(state.left_out().is_some() && !state.loans.may_ask(now));
        state.note_loan(true, 1 << 20, second, now);
        assert!(state.left_out().is_none() && state.loans.may_ask(now));
    }

    /// A replica that had just started was the nearest, and answered that nobody has any blocks. Later the same came about when
    /// both replicas were new: so the order is by this time.
    #[test]
    fn a_member_is_new_for_some_seconds_each_time_it_is_reached() {
        let now = Instant::now();
        let mut state = MemberState::default();
        assert_eq!(state.new_since(now), None);
        for reached in [now, now + 5 * NEW] {
            state.since = Some(reached);
            assert_eq!(state.new_since(reached), Some(reached));
            assert_eq!(state.new_since(reached + NEW), None);
        }
        assert!(None < Some(now) && Some(now) < Some(now + NEW), "the newest is the last");
    }

    /// Containers start again at other addresses. After 32 starts no new one was dialled.
    #[test]
    fn an_address_that_no_name_leads_to_makes_room_for_others() {
        let members = Members::new();
        let address = |number: u16| SocketAddr::from(([127, 0, 0, 1], number));
        for number in 1..500 {
            let member = members.add(address(number)).expect("there is room");
            assert_eq!(member.number, MemberNumber(u32::from(number) - 1));
            *members.named.write() = BTreeSet::from([address(number)]);
            assert!(members.add(address(number)).is_none(), "it is known");
            assert!(!members.remove_unnamed(&member), "a name leads to it");
            *members.named.write() = BTreeSet::from([address(number + 1)]);
            assert!(members.remove_unnamed(&member));
            assert!(members.get(member.number).is_none() && members.all().is_empty());
        }
        let all: Vec<_> = (0..200).filter_map(|number| members.add(address(1000 + number))).collect();
        assert_eq!(all.len(), MEMBERS_MAX);
    }
}
