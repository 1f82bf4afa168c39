//! Lands a prompt's blocks in the decode engine's own cache. The decode engine's scheduler keeps one [`Landing`] per hand-off.
//! No I/O; the time is an argument.
//!
//! ```text
//!                    dialled           Queued                 all ranks have read all blocks
//!  begin --> Dialling -----> Asking ---------> Landing --------------------------------------> Over (Landed)
//!               |              |                  |  refused, cancelled, lost, stalled, too long, given up
//!               |              |                  +--> Stopping --- Stopped by every rank ---> Over (why)
//!               +--------------+-------------------------------------------------------------> Over (why)
//! ```
//! READs may write the landing's blocks until it is Over, so the engine uses none of them before. Blocks that have arrived by
//! then are right, however the landing ended.
//!
//! A hand-off lands at most once:
//! - The prefill engine ([`Lendings`](crate::Lendings)) has one reader per hand-off: the engine whose Want came first. It
//!   refuses the Want of any other decode engine with [`Reason::Ended`]. A restarted decode engine counts as another one,
//!   because its `EngineId` holds a boot nonce.
//! - The prefill engine's ranks open their windows for that reader's ranks only, and the fabric refuses READs by others.
//! - A hand-off's id is used once: the router draws a new one for each attempt. The prefill engine remembers the last 4,096 that
//!   ended, and refuses a Want for one of them. A Want for an older one waits 2 s for a request, which does not come.
//! - A prefill engine that restarts has no hand-off of its former life: its windows are gone, landings from it end as
//!   [`Outcome::PeerLost`], and a Want finds no request there.
//! - In the decode engine an id has one landing at a time ([`Landings::begin`]), and a landing reads each region of a block once
//!   ([`Reading`](crate::Reading)). A second landing of an id finds it ended at the prefill engine.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use kvlane_fabric::EngineId;

use crate::message::{BLOCKS_MAX, Endpoint, HandoffId, Message, Reason, Want};

/// Limits of a decode engine.
#[derive(Debug, Clone)]
pub struct LandingOptions {
    /// The prefill engine has to answer the first Want within this time.
    pub unheard: Duration,
    /// A landing ends if neither the request at the prefill engine nor a rank here makes progress for this long.
    pub stalled: Duration,
    /// Interval of Wants, which renew the lease at the prefill engine.
    pub want_every: Duration,
    /// Stop is repeated to a rank that has not answered for this long, because either message may be lost.
    pub retry_every: Duration,
    /// Most landings at once.
    pub landings_max: usize,
}

impl Default for LandingOptions {
    fn default() -> LandingOptions {
        LandingOptions {
            unheard: Duration::from_secs(2),
            stalled: Duration::from_secs(30),
            want_every: Duration::from_secs(1),
            retry_every: Duration::from_secs(5),
            landings_max: 1024,
        }
    }
}

/// The blocks that a decode engine wants, and how long it waits for them.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// Where the prefill engine listens.
    pub address: SocketAddr,
    /// Digest of what the tokens mean, as in [`Want::content`].
    pub content: [u8; 16],
    /// First block wanted, counted by place.
    pub first_block: u32,
    /// One past the last block wanted.
    pub end_block: u32,
    /// The landing is given up after this long (`kvlane.direct.wait_ms`), even if it makes progress.
    pub patience: Duration,
    /// The landing is given up after this long too, because computing the prompt here takes less.
    pub budget: Duration,
}

/// How a landing ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Every wanted block has arrived.
    Landed,
    /// The prefill engine refused the Want, or cancelled the hand-off.
    Refused(Reason),
    /// The prefill engine cannot be reached: why.
    Unreachable(String),
    /// The prefill engine did not answer the Want in time.
    Unheard,
    /// The request made no progress at the prefill engine, and no block arrived.
    Stalled,
    /// The hand-off took longer than `kvlane.direct.wait_ms`.
    TooLong,
    /// The hand-off took longer than its budget: computing the prompt here takes less.
    OverBudget,
    /// The prefill engine was lost, a READ failed, or an offer was bad.
    PeerLost,
    /// The request here ended, or its blocks were needed.
    GivenUp,
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Outcome::Landed => write!(f, "it landed"),
            Outcome::Refused(reason) => f.write_str(reason.sentence()),
            Outcome::Unreachable(why) => write!(f, "that engine cannot be reached: {why}"),
            Outcome::Unheard => write!(f, "that engine did not hear of the request in time"),
            Outcome::Stalled => write!(f, "the request made no progress at that engine"),
            Outcome::TooLong => write!(f, "it took longer than kvlane.direct.wait_ms"),
            Outcome::OverBudget => write!(f, "it took more than twice as long as to compute it here"),
            Outcome::PeerLost => write!(f, "that engine was lost"),
            Outcome::GivenUp => write!(f, "the request ended, or its blocks were needed"),
        }
    }
}

/// An action for the agent, in the order of [`Landings::next_action`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LandingAction {
    /// Connect to this address, and report the outcome to [`Landings::dialled`].
    Dial(SocketAddr),
    /// Send this to a prefill engine's scheduler.
    Send(EngineId, Message),
    /// Send this to the own rank of that number.
    Rank(u32, Message),
}

#[derive(Debug)]
enum Phase {
    Dialling,
    Asking,
    Landing,
    /// Ranks that have not answered Stop, whose READs may still write.
    Stopping(BTreeSet<u32>, Outcome),
    Over(Outcome),
}

#[derive(Debug)]
struct Landing {
    wanted: Wanted,
    phase: Phase,
    peer: Option<EngineId>,
    /// Block ids of this engine, from `first_block` on; the ranks were sent the first `room_sent` of them.
    room: Vec<u32>,
    room_sent: usize,
    /// The ranks were sent Room, so they keep the hand-off until Stop.
    ranks_know: bool,
    /// Endpoints of the prefill engine's ranks, from its first Queued.
    sources: Vec<Endpoint>,
    /// By rank: all blocks before this one have arrived.
    arrived: Vec<u32>,
    hashes: BTreeMap<u32, [u8; 16]>,
    /// Requests ahead and tokens computed, from the last Queued; a change of them is progress.
    last_progress: (u32, u64),
    heard_by: Duration,
    progress_by: Duration,
    patience_over_at: Duration,
    budget_over_at: Duration,
    want_at: Duration,
    /// When Stop is repeated; None until the first tick after it was sent.
    stop_again_at: Option<Duration>,
}

impl Landing {
    fn give_up_at(&self) -> Duration {
        self.patience_over_at.min(self.budget_over_at)
    }
}

/// Progress of a landing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LandingStatus {
    /// None until the landing is over; until then its blocks may be written.
    pub outcome: Option<Outcome>,
    /// All blocks before this one have arrived in all ranks.
    pub end_block: u32,
    /// Hashes that came, each with its block. Those from `end_block` on are of blocks that the prefill engine offers, and that
    /// are in flight or wait for room.
    pub hashes: Vec<(u32, [u8; 16])>,
}

/// All landings of a decode engine.
#[derive(Debug)]
pub struct Landings {
    options: LandingOptions,
    shape: [u8; 16],
    scheduler: Endpoint,
    ranks: Vec<Endpoint>,
    landings: BTreeMap<HandoffId, Landing>,
    actions: VecDeque<LandingAction>,
    /// A landing has ended since the last call of [`Landings::take_has_ended`].
    has_ended: bool,
}

impl Landings {
    /// `scheduler`, `ranks`: endpoints of this engine's processes. `shape`: digest of how its blocks are cut.
    pub fn new(
        options: LandingOptions,
        shape: [u8; 16],
        scheduler: Endpoint,
        ranks: Vec<Endpoint>,
    ) -> Landings {
        let (landings, actions) = (BTreeMap::new(), VecDeque::new());
        Landings { options, shape, scheduler, ranks, landings, actions, has_ended: false }
    }

    /// The engine has a request whose prompt another engine computes. False if there are too many landings, the id is in use,
    /// or no block is wanted.
    pub fn begin(&mut self, now: Duration, id: HandoffId, wanted: Wanted) -> bool {
        if self.landings.len() >= self.options.landings_max
            || self.landings.contains_key(&id)
            || wanted.first_block >= wanted.end_block
        {
            return false;
        }
        let address = wanted.address;
        let landing = Landing {
            arrived: vec![wanted.first_block; self.ranks.len()],
            patience_over_at: now.saturating_add(wanted.patience),
            budget_over_at: now.saturating_add(wanted.budget),
            phase: Phase::Dialling,
            peer: None,
            room: Vec::new(),
            room_sent: 0,
            ranks_know: false,
            sources: Vec::new(),
            hashes: BTreeMap::new(),
            last_progress: (u32::MAX, 0),
            heard_by: Duration::MAX,
            progress_by: now + self.options.stalled,
            want_at: Duration::MAX,
            stop_again_at: None,
            wanted,
        };
        self.landings.insert(id, landing);
        self.actions.push_back(LandingAction::Dial(address));
        true
    }

    /// The outcome of [`LandingAction::Dial`], for every landing that waits for this address.
    pub fn dialled(&mut self, now: Duration, address: SocketAddr, outcome: &Result<EngineId, String>) {
        let waiting = self.landings.iter().filter(|(_, landing)| {
            landing.wanted.address == address && matches!(landing.phase, Phase::Dialling)
        });
        for id in waiting.map(|(id, _)| *id).collect::<Vec<_>>() {
            match outcome {
                Err(why) => self.stop(id, Outcome::Unreachable(why.clone())),
                Ok(peer) => {
                    let Some(landing) = self.landings.get_mut(&id) else { continue };
                    (landing.peer, landing.phase) = (Some(*peer), Phase::Asking);
                    landing.heard_by = now + self.options.unheard;
                    self.send_want(now, id);
                }
            }
        }
    }

    fn send_want(&mut self, now: Duration, id: HandoffId) {
        let Some(landing) = self.landings.get_mut(&id) else { return };
        let Some(peer) = landing.peer else { return };
        landing.want_at = now + self.options.want_every;
        let want = Want {
            id,
            content: landing.wanted.content,
            shape: self.shape,
            first_block: landing.wanted.first_block,
            end_block: landing.wanted.end_block,
            scheduler: self.scheduler.clone(),
            ranks: self.ranks.clone(),
        };
        self.actions.push_back(LandingAction::Send(peer, Message::Want(want)));
    }

    /// Adds blocks of this engine's cache for the prompt's next blocks. Blocks past the wanted end are not written. A block
    /// whose bytes have arrived ([`LandingStatus::end_block`]) and were copied elsewhere may be given again.
    pub fn give_room(&mut self, id: HandoffId, blocks: &[u32]) {
        if let Some(landing) = self.landings.get_mut(&id) {
            landing.room.extend_from_slice(blocks);
            self.send_room(id);
        }
    }

    /// Extends the landing's budget to this time from now, because this engine could not compute the prompt earlier either.
    /// If its offers wait for room, this engine is what holds it up, so the landing does not count as stalled.
    /// [`Wanted::patience`] stays.
    pub fn postpone(&mut self, now: Duration, id: HandoffId, budget: Duration, waits_for_room: bool) {
        if let Some(landing) = self.landings.get_mut(&id) {
            landing.budget_over_at = landing.budget_over_at.max(now.saturating_add(budget));
            if waits_for_room {
                landing.progress_by = landing.progress_by.max(now.saturating_add(self.options.stalled));
            }
        }
    }

    /// Number of blocks that the landing was given.
    pub fn room(&self, id: HandoffId) -> usize {
        self.landings.get(&id).map_or(0, |landing| landing.room.len())
    }

    fn send_room(&mut self, id: HandoffId) {
        let Some(landing) = self.landings.get_mut(&id) else { return };
        if !matches!(landing.phase, Phase::Landing) {
            return;
        }
        // Blocks past the end are for the request itself, which uses them as soon as all wanted blocks have arrived.
        let most = (landing.wanted.end_block - landing.wanted.first_block) as usize;
        let end = landing.room.len().min(most);
        let rest = &landing.room[landing.room_sent..end];
        // The first Room goes out even without blocks. The ranks then know whose offers to keep, and report their hashes.
        let nothing: &[u32] = &[];
        let first = (!std::mem::replace(&mut landing.ranks_know, true) && rest.is_empty()).then_some(nothing);
        for blocks in first.into_iter().chain(rest.chunks(BLOCKS_MAX)) {
            let first_block = landing.wanted.first_block + landing.room_sent as u32;
            for (rank, source) in landing.sources.iter().enumerate() {
                let (source, blocks) = (source.clone(), blocks.to_vec());
                let room = Message::Room { id, source, first_block, blocks };
                self.actions.push_back(LandingAction::Rank(rank as u32, room));
            }
            landing.room_sent += blocks.len();
        }
    }

    /// Handles a message from another engine's scheduler.
    pub fn message(&mut self, now: Duration, from: EngineId, message: Message) {
        let Some(id) = message.id() else { return };
        let Some(landing) = self.landings.get_mut(&id).filter(|landing| landing.peer == Some(from)) else {
            return;
        };
        match message {
            Message::Queued(queued) => {
                let progress = (queued.ahead, queued.computed);
                if landing.last_progress != progress {
                    landing.last_progress = progress;
                    landing.progress_by = now + self.options.stalled;
                }
                if matches!(landing.phase, Phase::Asking) {
                    if queued.ranks.len() != self.ranks.len() {
                        return self.stop(id, Outcome::Refused(Reason::OtherShape));
                    }
                    (landing.sources, landing.phase) = (queued.ranks, Phase::Landing);
                    self.send_room(id);
                }
            }
            Message::Refused(_, reason) => self.stop(id, Outcome::Refused(reason)),
            Message::Cancel(_) => self.stop(id, Outcome::Refused(Reason::Ended)),
            _ => {}
        }
    }

    /// Handles a message from an own rank.
    pub fn rank_said(&mut self, now: Duration, rank: u32, message: Message) {
        let Some(id) = message.id() else { return };
        let Some(landing) = self.landings.get_mut(&id) else { return };
        match message {
            Message::Arrived { end_block, hashes, .. } => {
                let Some(arrived) = landing.arrived.get_mut(rank as usize) else { return };
                let most = landing.wanted.first_block + landing.room_sent as u32;
                *arrived = (*arrived).max(end_block.min(most));
                landing.progress_by = now + self.options.stalled;
                // All ranks report the same hashes.
                if rank == 0 {
                    landing.hashes.extend(hashes);
                }
                let has_all = landing.arrived.iter().all(|end| *end >= landing.wanted.end_block);
                if has_all && matches!(landing.phase, Phase::Landing) {
                    landing.phase = Phase::Over(Outcome::Landed);
                    self.has_ended = true;
                    let peer = landing.peer;
                    let landed = |peer| LandingAction::Send(peer, Message::Landed(id));
                    self.actions.extend(peer.map(landed));
                    // Stop lets the ranks forget the hand-off. Their answers are ignored.
                    let ranks = 0..self.ranks.len() as u32;
                    self.actions.extend(ranks.map(|rank| LandingAction::Rank(rank, Message::Stop(id))));
                }
            }
            Message::Lost(_) => self.stop(id, Outcome::PeerLost),
            Message::Stopped(_) => {
                if let Phase::Stopping(ranks, outcome) = &mut landing.phase {
                    ranks.remove(&rank);
                    if ranks.is_empty() {
                        landing.phase = Phase::Over(outcome.clone());
                        self.has_ended = true;
                    }
                }
            }
            _ => {}
        }
    }

    /// Stops the landings from an engine that cannot be reached any more, or was restarted.
    pub fn peer_gone(&mut self, engine: EngineId) {
        let of_it = self.landings.iter().filter(|(_, landing)| landing.peer == Some(engine));
        let ids: Vec<HandoffId> = of_it.map(|(id, _)| *id).collect();
        ids.into_iter().for_each(|id| self.stop(id, Outcome::PeerLost));
    }

    /// Stops a landing, because its request ended or its blocks are needed.
    pub fn give_up(&mut self, id: HandoffId) {
        self.stop(id, Outcome::GivenUp);
    }

    /// Stops all landings, because the cache is about to be reset.
    pub fn give_up_all(&mut self) {
        let ids: Vec<HandoffId> = self.landings.keys().copied().collect();
        ids.into_iter().for_each(|id| self.give_up(id));
    }

    fn stop(&mut self, id: HandoffId, outcome: Outcome) {
        let Some(landing) = self.landings.get_mut(&id) else { return };
        if matches!(landing.phase, Phase::Stopping(..) | Phase::Over(_)) {
            return;
        }
        // The prefill engine may still run and pin blocks, for example if only a READ failed. After Refused it pins none.
        let peer_has_ended_it = matches!(outcome, Outcome::Refused(_));
        if let (Some(peer), false) = (landing.peer, peer_has_ended_it) {
            self.actions.push_back(LandingAction::Send(peer, Message::Cancel(id)));
        }
        if !landing.ranks_know {
            landing.phase = Phase::Over(outcome);
            self.has_ended = true;
            return;
        }
        let ranks = 0..self.ranks.len() as u32;
        landing.phase = Phase::Stopping(ranks.clone().collect(), outcome);
        self.actions.extend(ranks.map(|rank| LandingAction::Rank(rank, Message::Stop(id))));
    }

    /// Progress of a landing; None if there is none of this id.
    pub fn status(&self, id: HandoffId) -> Option<LandingStatus> {
        let landing = self.landings.get(&id)?;
        let outcome = match &landing.phase {
            Phase::Over(outcome) => Some(outcome.clone()),
            _ => None,
        };
        let end_block = landing.arrived.iter().copied().min().unwrap_or(landing.wanted.first_block);
        let hashes = landing.hashes.iter().map(|(block, hash)| (*block, *hash)).collect();
        Some(LandingStatus { outcome, end_block, hashes })
    }

    /// Forgets a landing that is over.
    ///
    /// # Panics
    /// If it is not over, because its blocks may still be written.
    pub fn forget(&mut self, id: HandoffId) {
        let landing = self.landings.remove(&id);
        let is_over = landing.is_none_or(|landing| matches!(landing.phase, Phase::Over(_)));
        assert!(is_over, "{id:?} is forgotten while it may be written");
    }

    /// Whether a landing has ended since the last call.
    pub fn take_has_ended(&mut self) -> bool {
        std::mem::take(&mut self.has_ended)
    }

    /// Landings whose blocks may still be written, in the order of their ids.
    pub fn live(&self) -> impl Iterator<Item = HandoffId> {
        let live =
            |(id, landing): (&HandoffId, &Landing)| (!matches!(landing.phase, Phase::Over(_))).then_some(*id);
        self.landings.iter().filter_map(live)
    }

    /// Stops landings whose time is over, repeats Wants, and repeats Stop where it was not answered.
    pub fn tick(&mut self, now: Duration) {
        let mut late = Vec::new();
        let mut to_renew = Vec::new();
        for (id, landing) in &self.landings {
            let outcome = match landing.phase {
                Phase::Stopping(..) | Phase::Over(_) => continue,
                _ if landing.patience_over_at <= now => Some(Outcome::TooLong),
                _ if landing.budget_over_at <= now => Some(Outcome::OverBudget),
                Phase::Asking if landing.heard_by <= now => Some(Outcome::Unheard),
                Phase::Landing if landing.progress_by <= now => Some(Outcome::Stalled),
                _ => None,
            };
            match outcome {
                Some(outcome) => late.push((*id, outcome)),
                None if landing.want_at <= now => to_renew.push(*id),
                None => {}
            }
        }
        late.into_iter().for_each(|(id, outcome)| self.stop(id, outcome));
        to_renew.into_iter().for_each(|id| self.send_want(now, id));
        self.stop_again(now);
    }

    fn stop_again(&mut self, now: Duration) {
        for (id, landing) in &mut self.landings {
            let Phase::Stopping(ranks, _) = &landing.phase else { continue };
            let again_at = landing.stop_again_at.get_or_insert(now.saturating_add(self.options.retry_every));
            if *again_at <= now {
                *again_at = now.saturating_add(self.options.retry_every);
                self.actions.extend(ranks.iter().map(|rank| LandingAction::Rank(*rank, Message::Stop(*id))));
            }
        }
    }

    /// When [`Landings::tick`] is due; None if there is nothing to wait for.
    pub fn next_tick(&self) -> Option<Duration> {
        let of = |landing: &Landing| match landing.phase {
            Phase::Over(_) => None,
            Phase::Stopping(..) => Some(landing.stop_again_at.unwrap_or(landing.give_up_at())),
            Phase::Dialling => Some(landing.give_up_at()),
            Phase::Asking => Some(landing.heard_by.min(landing.give_up_at()).min(landing.want_at)),
            Phase::Landing => Some(landing.progress_by.min(landing.give_up_at()).min(landing.want_at)),
        };
        self.landings.values().filter_map(of).filter(|at| *at < Duration::MAX).min()
    }

    /// The next action for the agent to carry out.
    pub fn next_action(&mut self) -> Option<LandingAction> {
        self.actions.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: HandoffId = HandoffId([1; 16]);
    const PEER: EngineId = EngineId { engine_id: 1, boot_nonce: 1 };

    /// A landing in its phase Landing: blocks 2 to 4, two ranks.
    fn landing() -> Landings {
        let ranks = vec![vec![1], vec![2]];
        let mut landings = Landings::new(LandingOptions::default(), [0; 16], vec![0], ranks.clone());
        let address = SocketAddr::from(([127, 0, 0, 1], 1));
        let patience = Duration::from_secs(1);
        let budget = Duration::MAX;
        let wanted = Wanted { address, content: [0; 16], first_block: 2, end_block: 5, patience, budget };
        assert!(landings.begin(Duration::ZERO, ID, wanted));
        landings.dialled(Duration::ZERO, address, &Ok(PEER));
        let queued = crate::message::Queued { id: ID, ahead: 0, computed: 0, ranks };
        landings.message(Duration::ZERO, PEER, Message::Queued(queued));
        landings
    }

    fn told_room(landings: &mut Landings) -> Vec<(u32, u32, Vec<u32>)> {
        let actions = std::iter::from_fn(|| landings.next_action());
        let room = |action| match action {
            LandingAction::Rank(rank, Message::Room { first_block, blocks, .. }) => {
                Some((rank, first_block, blocks))
            }
            _ => None,
        };
        actions.filter_map(room).collect()
    }

    /// Found by the simulation: an engine gave its request room for the next token, too. Blocks offered past the end were read
    /// into it, even after the landing was over and the request had resumed.
    #[test]
    fn room_past_the_end_is_not_written() {
        let mut landings = landing();
        // The ranks report the hashes of what waits for room, so they know of the landing before it has any.
        assert_eq!(told_room(&mut landings), [(0, 2, vec![]), (1, 2, vec![])]);
        landings.give_room(ID, &[10, 11]);
        assert_eq!(told_room(&mut landings), [(0, 2, vec![10, 11]), (1, 2, vec![10, 11])]);
        landings.give_room(ID, &[12, 13]);
        landings.give_room(ID, &[14]);
        assert_eq!(told_room(&mut landings), [(0, 4, vec![12]), (1, 4, vec![12])]);
        assert_eq!(landings.room(ID), 5);
    }

    /// A prompt waited for 30 s without progress, or for `kvlane.direct.wait_ms`, even if it takes less to compute.
    #[test]
    fn a_prompt_that_waits_for_longer_than_it_takes_to_compute_it_is_given_up() {
        let secs = Duration::from_secs;
        for (patience, budget, outcome) in
            [(secs(60), secs(4), Outcome::OverBudget), (secs(3), secs(4), Outcome::TooLong)]
        {
            let mut landings = Landings::new(LandingOptions::default(), [0; 16], vec![0], vec![vec![1]]);
            let address = SocketAddr::from(([127, 0, 0, 1], 1));
            let wanted = Wanted { address, content: [0; 16], first_block: 0, end_block: 3, patience, budget };
            assert!(landings.begin(Duration::ZERO, ID, wanted));
            landings.dialled(Duration::ZERO, address, &Ok(PEER));
            // The other engine keeps reporting progress.
            for second in 0..patience.min(budget).as_secs() {
                let queued =
                    crate::message::Queued { id: ID, ahead: 0, computed: second, ranks: vec![vec![1]] };
                landings.message(secs(second), PEER, Message::Queued(queued));
                landings.tick(secs(second));
                assert_eq!(landings.status(ID).unwrap().outcome, None, "after {second} s");
            }
            assert!(!landings.take_has_ended());
            landings.tick(patience.min(budget));
            landings.rank_said(secs(60), 0, Message::Stopped(ID));
            assert_eq!(landings.status(ID).unwrap().outcome, Some(outcome));
            assert!(landings.take_has_ended() && !landings.take_has_ended(), "told once");
        }
    }

    #[test]
    fn a_landing_that_waits_for_room_goes_on_until_its_patience_is_over() {
        let secs = Duration::from_secs;
        let stalled = LandingOptions::default().stalled.as_secs();
        for (waits_for_room, last, outcome) in
            [(true, 2 * stalled, Outcome::TooLong), (false, stalled, Outcome::Stalled)]
        {
            let mut landings = Landings::new(LandingOptions::default(), [0; 16], vec![0], vec![vec![1]]);
            let address = SocketAddr::from(([127, 0, 0, 1], 1));
            let (patience, budget) = (secs(2 * stalled), secs(2));
            let wanted = Wanted { address, content: [0; 16], first_block: 0, end_block: 3, patience, budget };
            assert!(landings.begin(Duration::ZERO, ID, wanted));
            landings.dialled(Duration::ZERO, address, &Ok(PEER));
            let queued = crate::message::Queued { id: ID, ahead: 0, computed: 3, ranks: vec![vec![1]] };
            landings.message(Duration::ZERO, PEER, Message::Queued(queued));
            for second in 0..last {
                landings.postpone(secs(second), ID, secs(2), waits_for_room);
                landings.tick(secs(second + 1) - Duration::from_millis(1));
                assert_eq!(landings.status(ID).unwrap().outcome, None, "in second {second}");
            }
            landings.tick(secs(last));
            landings.rank_said(secs(last), 0, Message::Stopped(ID));
            assert_eq!(landings.status(ID).unwrap().outcome, Some(outcome));
        }
    }

    #[test]
    fn a_hand_off_of_which_a_read_failed_is_called_off_at_the_other_engine() {
        let mut landings = landing();
        landings.give_room(ID, &[10]);
        landings.rank_said(Duration::ZERO, 1, Message::Lost(ID));
        let said: Vec<LandingAction> = std::iter::from_fn(|| landings.next_action()).collect();
        let is_there = |action| said.contains(&action);
        assert!(is_there(LandingAction::Send(PEER, Message::Cancel(ID))), "{said:?}");
        assert!((0..2).all(|rank| is_there(LandingAction::Rank(rank, Message::Stop(ID)))), "{said:?}");
        // Until both ranks have said so, it may be written.
        landings.rank_said(Duration::ZERO, 0, Message::Stopped(ID));
        assert_eq!(landings.status(ID).unwrap().outcome, None);
        landings.rank_said(Duration::ZERO, 1, Message::Stopped(ID));
        assert_eq!(landings.status(ID).unwrap().outcome, Some(Outcome::PeerLost));
    }

    #[test]
    fn a_rank_that_does_not_answer_is_told_again_to_stop() {
        let mut landings = landing();
        landings.give_room(ID, &[10]);
        landings.give_up(ID);
        let stops = |landings: &mut Landings| {
            let actions = std::iter::from_fn(|| landings.next_action());
            actions.filter(|action| matches!(action, LandingAction::Rank(_, Message::Stop(_)))).count()
        };
        landings.tick(Duration::ZERO);
        assert_eq!(stops(&mut landings), 2);
        landings.rank_said(Duration::ZERO, 0, Message::Stopped(ID));
        let again = LandingOptions::default().retry_every;
        assert_eq!(landings.next_tick(), Some(again));
        for time in [again, 2 * again] {
            landings.tick(time);
            assert_eq!(stops(&mut landings), 1);
        }
        landings.rank_said(again, 1, Message::Stopped(ID));
        assert_eq!(landings.status(ID).unwrap().outcome, Some(Outcome::GivenUp));
        assert_eq!(landings.next_tick(), None);
    }
}
