//! The engine that goes on with a prompt: its side of each hand-off. No I/O; the time is an argument.
//!
//! ```text
//!                    dialled           Queued                 all ranks have everything
//!  begin --> Dialling -----> Asking ---------> Landing --------------------------------------> Over (Landed)
//!               |              |                  |  refused, cancelled, lost, stalled, too long, given up
//!               |              |                  +--> Stopping --- Stopped of every rank ---> Over (why)
//!               +--------------+-------------------------------------------------------------> Over (why)
//! ```
//! While it is not over, its blocks may be written. What has arrived by its end is right, however it ended.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use kvlane_fabric::EngineId;

use crate::message::{BLOCKS_MAX, Endpoint, HandoffId, Message, Reason, Want};

/// Limits of an engine that goes on.
#[derive(Debug, Clone)]
pub struct LandingOptions {
    /// The other engine has to know of the request by then.
    pub unheard: Duration,
    /// Without any progress of the request it is given up.
    pub stalled: Duration,
    /// It is said again so often that a hand-off is wanted.
    pub want_every: Duration,
    /// A rank that has not answered for so long is told again: what it was told, or said, may be lost.
    pub ask_again: Duration,
    /// Most hand-offs at once.
    pub landings_max: usize,
}

impl Default for LandingOptions {
    fn default() -> LandingOptions {
        LandingOptions {
            unheard: Duration::from_secs(2),
            stalled: Duration::from_secs(30),
            want_every: Duration::from_secs(1),
            ask_again: Duration::from_secs(5),
            landings_max: 1024,
        }
    }
}

/// What is wanted.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// Where the engine that computes it listens.
    pub address: SocketAddr,
    /// What its tokens mean.
    pub content: [u8; 16],
    /// The first block that is wanted.
    pub first_block: u32,
    /// The one after the last.
    pub end_block: u32,
    /// Given up after so long.
    pub patience: Duration,
    /// Longest time until it has landed, even if it makes progress. Computing the prompt here takes less.
    pub budget: Duration,
}

/// How a hand-off ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// All that was wanted has arrived.
    Landed,
    /// The other engine does not hand it over.
    Refused(Reason),
    /// It cannot be reached.
    Unreachable(String),
    /// It did not know of the request in time.
    Unheard,
    /// The request made no progress there.
    Stalled,
    /// The hand-off took longer than `kvlane.direct.wait_ms`.
    TooLong,
    /// The hand-off took longer than its budget: computing the prompt here takes less.
    OverBudget,
    /// It cannot be reached any more.
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

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LandingAction {
    /// Connect to this address; [`Landings::dialled`] is to be told what became of it.
    Dial(SocketAddr),
    /// Say this to an engine.
    Send(EngineId, Message),
    /// Say this to the rank of that number.
    Rank(u32, Message),
}

#[derive(Debug)]
enum Phase {
    Dialling,
    Asking,
    Landing,
    /// Ranks that may still write.
    Stopping(BTreeSet<u32>, Outcome),
    Over(Outcome),
}

#[derive(Debug)]
struct Landing {
    wanted: Wanted,
    phase: Phase,
    peer: Option<EngineId>,
    /// Ids of the engine's blocks, from `first_block` on, and how many of them the ranks know of.
    room: Vec<u32>,
    told: usize,
    sources: Vec<Endpoint>,
    /// By rank: all before that block have arrived.
    arrived: Vec<u32>,
    hashes: BTreeMap<u32, [u8; 16]>,
    /// Of the request at the other engine.
    last_seen: (u32, u64),
    heard_by: Duration,
    progress_by: Duration,
    give_up_at: Duration,
    want_at: Duration,
    /// When ranks that stop are told again; None until it is known when they were told.
    stop_again_at: Option<Duration>,
}

/// How far a hand-off is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// None while it goes on, and its blocks may be written.
    pub outcome: Option<Outcome>,
    /// All blocks before this one have arrived in all ranks.
    pub end_block: u32,
    /// Hashes that came with them, each with its block.
    pub hashes: Vec<(u32, [u8; 16])>,
}

/// All hand-offs of an engine that goes on.
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
    /// None yet. `scheduler` and `ranks`: where this engine's can be reached; `shape`: how its blocks are cut.
    pub fn new(
        options: LandingOptions,
        shape: [u8; 16],
        scheduler: Endpoint,
        ranks: Vec<Endpoint>,
    ) -> Landings {
        let (landings, actions) = (BTreeMap::new(), VecDeque::new());
        Landings { options, shape, scheduler, ranks, landings, actions, has_ended: false }
    }

    /// A request is here whose prompt another engine computes. False: there are too many, or its id is another's.
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
            give_up_at: now.saturating_add(wanted.patience.min(wanted.budget)),
            phase: Phase::Dialling,
            peer: None,
            room: Vec::new(),
            told: 0,
            sources: Vec::new(),
            hashes: BTreeMap::new(),
            last_seen: (u32::MAX, 0),
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

    /// What became of connecting to an address.
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
                    self.say_want(now, id);
                }
            }
        }
    }

    fn say_want(&mut self, now: Duration, id: HandoffId) {
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

    /// These blocks of the engine are for the next of the prompt. Those past what is wanted are not written.
    pub fn give_room(&mut self, id: HandoffId, blocks: &[u32]) {
        if let Some(landing) = self.landings.get_mut(&id) {
            landing.room.extend_from_slice(blocks);
            self.tell_room(id);
        }
    }

    /// How many blocks it has been given.
    pub fn room(&self, id: HandoffId) -> usize {
        self.landings.get(&id).map_or(0, |landing| landing.room.len())
    }

    fn tell_room(&mut self, id: HandoffId) {
        let Some(landing) = self.landings.get_mut(&id) else { return };
        if !matches!(landing.phase, Phase::Landing) {
            return;
        }
        // What lies past the end is for the request itself, which uses it as soon as all before it has arrived.
        let most = (landing.wanted.end_block - landing.wanted.first_block) as usize;
        let end = landing.room.len().min(most);
        for blocks in landing.room[landing.told..end].chunks(BLOCKS_MAX) {
            let first_block = landing.wanted.first_block + landing.told as u32;
            for (rank, source) in landing.sources.iter().enumerate() {
                let (source, blocks) = (source.clone(), blocks.to_vec());
                let room = Message::Room { id, source, first_block, blocks };
                self.actions.push_back(LandingAction::Rank(rank as u32, room));
            }
            landing.told += blocks.len();
        }
    }

    /// Something came from another engine.
    pub fn message(&mut self, now: Duration, from: EngineId, message: Message) {
        let Some(id) = message.id() else { return };
        let Some(landing) = self.landings.get_mut(&id).filter(|landing| landing.peer == Some(from)) else {
            return;
        };
        match message {
            Message::Queued(queued) => {
                let seen = (queued.ahead, queued.computed);
                if landing.last_seen != seen {
                    landing.last_seen = seen;
                    landing.progress_by = now + self.options.stalled;
                }
                if matches!(landing.phase, Phase::Asking) {
                    if queued.ranks.len() != self.ranks.len() {
                        return self.stop(id, Outcome::Refused(Reason::OtherShape));
                    }
                    (landing.sources, landing.phase) = (queued.ranks, Phase::Landing);
                    self.tell_room(id);
                }
            }
            Message::Refused(_, reason) => self.stop(id, Outcome::Refused(reason)),
            Message::Cancel(_) => self.stop(id, Outcome::Refused(Reason::Over)),
            _ => {}
        }
    }

    /// A rank has said something.
    pub fn rank_said(&mut self, now: Duration, rank: u32, message: Message) {
        let Some(id) = message.id() else { return };
        let Some(landing) = self.landings.get_mut(&id) else { return };
        match message {
            Message::Arrived { end_block, hashes, .. } => {
                let Some(arrived) = landing.arrived.get_mut(rank as usize) else { return };
                let most = landing.wanted.first_block + landing.told as u32;
                *arrived = (*arrived).max(end_block.min(most));
                landing.progress_by = now + self.options.stalled;
                // All ranks have the same ones.
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
                    // They forget it; their answers are for nothing.
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

    /// An engine cannot be reached any more, or is another run.
    pub fn peer_gone(&mut self, engine: EngineId) {
        let of_it = self.landings.iter().filter(|(_, landing)| landing.peer == Some(engine));
        let ids: Vec<HandoffId> = of_it.map(|(id, _)| *id).collect();
        ids.into_iter().for_each(|id| self.stop(id, Outcome::PeerLost));
    }

    /// The request here ended, or its blocks are needed.
    pub fn give_up(&mut self, id: HandoffId) {
        self.stop(id, Outcome::GivenUp);
    }

    /// All are given up.
    pub fn give_all_up(&mut self) {
        let ids: Vec<HandoffId> = self.landings.keys().copied().collect();
        ids.into_iter().for_each(|id| self.give_up(id));
    }

    fn stop(&mut self, id: HandoffId, outcome: Outcome) {
        let Some(landing) = self.landings.get_mut(&id) else { return };
        if matches!(landing.phase, Phase::Stopping(..) | Phase::Over(_)) {
            return;
        }
        // Where only a READ failed, the other engine is there, and pins blocks for it.
        let knows = matches!(outcome, Outcome::Refused(_));
        if let (Some(peer), false) = (landing.peer, knows) {
            self.actions.push_back(LandingAction::Send(peer, Message::Cancel(id)));
        }
        if landing.told == 0 {
            landing.phase = Phase::Over(outcome);
            self.has_ended = true;
            return;
        }
        let ranks = 0..self.ranks.len() as u32;
        landing.phase = Phase::Stopping(ranks.clone().collect(), outcome);
        self.actions.extend(ranks.map(|rank| LandingAction::Rank(rank, Message::Stop(id))));
    }

    /// How far one is; None if there is no such hand-off.
    pub fn standing(&self, id: HandoffId) -> Option<Standing> {
        let landing = self.landings.get(&id)?;
        let outcome = match &landing.phase {
            Phase::Over(outcome) => Some(outcome.clone()),
            _ => None,
        };
        let end_block = landing.arrived.iter().copied().min().unwrap_or(landing.wanted.first_block);
        let hashes = landing.hashes.range(..end_block).map(|(block, hash)| (*block, *hash)).collect();
        Some(Standing { outcome, end_block, hashes })
    }

    /// Forgets one that is over. Panics if it is not: its blocks may still be written.
    ///
    /// # Panics
    /// See above.
    pub fn forget(&mut self, id: HandoffId) {
        let landing = self.landings.remove(&id);
        let is_over = landing.is_none_or(|landing| matches!(landing.phase, Phase::Over(_)));
        assert!(is_over, "{id:?} is forgotten while it may be written");
    }

    /// Whether a landing has ended since the last call.
    pub fn take_has_ended(&mut self) -> bool {
        std::mem::take(&mut self.has_ended)
    }

    /// Those that may be written still, in no order.
    pub fn live(&self) -> impl Iterator<Item = HandoffId> {
        let live =
            |(id, landing): (&HandoffId, &Landing)| (!matches!(landing.phase, Phase::Over(_))).then_some(*id);
        self.landings.iter().filter_map(live)
    }

    /// Gives up what is over by time, and says again what is wanted.
    pub fn tick(&mut self, now: Duration) {
        let mut late = Vec::new();
        let mut to_say = Vec::new();
        for (id, landing) in &self.landings {
            let outcome = match landing.phase {
                Phase::Stopping(..) | Phase::Over(_) => continue,
                _ if landing.give_up_at <= now && landing.wanted.budget < landing.wanted.patience => {
                    Some(Outcome::OverBudget)
                }
                _ if landing.give_up_at <= now => Some(Outcome::TooLong),
                Phase::Asking if landing.heard_by <= now => Some(Outcome::Unheard),
                Phase::Landing if landing.progress_by <= now => Some(Outcome::Stalled),
                _ => None,
            };
            match outcome {
                Some(outcome) => late.push((*id, outcome)),
                None if landing.want_at <= now => to_say.push(*id),
                None => {}
            }
        }
        late.into_iter().for_each(|(id, outcome)| self.stop(id, outcome));
        to_say.into_iter().for_each(|id| self.say_want(now, id));
        self.stop_again(now);
    }

    fn stop_again(&mut self, now: Duration) {
        for (id, landing) in &mut self.landings {
            let Phase::Stopping(ranks, _) = &landing.phase else { continue };
            let again_at = landing.stop_again_at.get_or_insert(now.saturating_add(self.options.ask_again));
            if *again_at <= now {
                *again_at = now.saturating_add(self.options.ask_again);
                self.actions.extend(ranks.iter().map(|rank| LandingAction::Rank(*rank, Message::Stop(*id))));
            }
        }
    }

    /// When [`Landings::tick`] has something to do.
    pub fn next_tick(&self) -> Option<Duration> {
        let of = |landing: &Landing| match landing.phase {
            Phase::Over(_) => None,
            Phase::Stopping(..) => Some(landing.stop_again_at.unwrap_or(landing.give_up_at)),
            Phase::Dialling => Some(landing.give_up_at),
            Phase::Asking => Some(landing.heard_by.min(landing.give_up_at).min(landing.want_at)),
            Phase::Landing => Some(landing.progress_by.min(landing.give_up_at).min(landing.want_at)),
        };
        self.landings.values().filter_map(of).filter(|at| *at < Duration::MAX).min()
    }

    /// What is to be done next.
    pub fn next_action(&mut self) -> Option<LandingAction> {
        self.actions.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: HandoffId = HandoffId([1; 16]);
    const PEER: EngineId = EngineId { engine_id: 1, boot_nonce: 1 };

    /// One that all is known of: from block 2 to before block 5, in two ranks.
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

    /// Found by the simulation: an engine gave its request room for the next token, too. What was offered past the end was read
    /// into it, also after all that was wanted had landed and the request had gone on.
    #[test]
    fn room_past_the_end_is_not_written() {
        let mut landings = landing();
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
                assert_eq!(landings.standing(ID).unwrap().outcome, None, "after {second} s");
            }
            assert!(!landings.take_has_ended());
            landings.tick(patience.min(budget));
            assert_eq!(landings.standing(ID).unwrap().outcome, Some(outcome));
            assert!(landings.take_has_ended() && !landings.take_has_ended(), "told once");
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
        assert_eq!(landings.standing(ID).unwrap().outcome, None);
        landings.rank_said(Duration::ZERO, 1, Message::Stopped(ID));
        assert_eq!(landings.standing(ID).unwrap().outcome, Some(Outcome::PeerLost));
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
        let again = LandingOptions::default().ask_again;
        assert_eq!(landings.next_tick(), Some(again));
        for time in [again, 2 * again] {
            landings.tick(time);
            assert_eq!(stops(&mut landings), 1);
        }
        landings.rank_said(again, 1, Message::Stopped(ID));
        assert_eq!(landings.standing(ID).unwrap().outcome, Some(Outcome::GivenUp));
        assert_eq!(landings.next_tick(), None);
    }
}
