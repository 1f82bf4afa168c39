//! Lends a prompt's blocks to the engine that decodes it: the prefill engine's scheduler, one [`Lending`] per hand-off. No
//! I/O; the time is an argument.
//!
//! ```text
//!             begin (the request arrives)            Want
//!  (nothing) ----------------------------> Unwanted -------> Wanted --- Landed, Cancel, peer gone, lease over,
//!      |                                      |  lease over     |       reset, request ended early
//!      |  Want, before the request            +-----------------+----> Closing --- Closed by every rank ---> blocks
//!      +-------------------------> Early -- begin --> Wanted                                                unpinned
//!                                    |  the request does not arrive
//!                                    +--> refused
//! ```
//! The decode engine holds a lease, which it renews by repeating its Want every second. The lease ends a lending that no
//! engine wants, so that its blocks are unpinned.
//!
//! Blocks stay pinned through Closing, because a READ may still be in flight until every rank has closed its windows.
//!
//! The first engine whose Want arrives becomes the reader. Every other engine is refused, and cannot end the lending. An id
//! is used once: `over` remembers the last 4,096 that ended, and refuses them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use kvlane_fabric::EngineId;

use crate::message::{Endpoint, HandoffId, Message, Queued, Reason, Want};
use crate::remembered::Remembered;

/// Limits of a prefill engine.
#[derive(Debug, Clone)]
pub struct LendingOptions {
    /// A lending ends if no Want has arrived for this long.
    pub lease: Duration,
    /// A Want that arrives before its request is refused after this long.
    pub early: Duration,
    /// Longest time between two Queued messages to the reader.
    pub report_every: Duration,
    /// Close is repeated to a rank that has not answered for this long, because either message may be lost.
    pub retry_every: Duration,
    /// Most lendings, wanted or not. For a moment there is one more, see [`Lendings::begin`].
    pub lendings_max: usize,
}

impl Default for LendingOptions {
    fn default() -> LendingOptions {
        LendingOptions {
            lease: Duration::from_secs(5),
            early: Duration::from_secs(2),
            report_every: Duration::from_millis(500),
            retry_every: Duration::from_secs(5),
            lendings_max: 1024,
        }
    }
}

/// An action for the agent, in the order of [`Lendings::next_action`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LendingAction {
    /// Send this to the scheduler of a decode engine.
    Send(EngineId, Message),
    /// Send this to the own rank of that number.
    Rank(u32, Message),
}

#[derive(Debug)]
struct Lending {
    /// Digest of what its tokens mean; None while only the Want has arrived (Early).
    content: Option<[u8; 16]>,
    ahead: u32,
    computed: u64,
    reader: Option<Reader>,
    /// The lease, or while Early the wait for the request, ends then.
    expires_at: Duration,
    /// The request runs, so without a reader the lending does not expire.
    is_held: bool,
    report_at: Duration,
    /// Ranks that have not answered Close; None before Closing.
    closing: Option<BTreeSet<u32>>,
    /// When Close is repeated to them; None until the first tick after it was sent.
    close_again_at: Option<Duration>,
}

impl Lending {
    /// Whether it stays although no engine wants it.
    fn waits_for_reader(&self) -> bool {
        self.is_held && self.reader.is_none()
    }
}

#[derive(Debug)]
struct Reader {
    engine: EngineId,
    want: Want,
}

/// All lendings of a prefill engine.
#[derive(Debug)]
pub struct Lendings {
    options: LendingOptions,
    shape: [u8; 16],
    ranks: Vec<Endpoint>,
    lendings: BTreeMap<HandoffId, Lending>,
    over: Remembered,
    /// Ended, and every rank has closed its windows: the engine may unpin their blocks.
    free: Vec<HandoffId>,
    actions: VecDeque<LendingAction>,
}

impl Lendings {
    /// `ranks`: the endpoint of each rank of this engine. `shape`: digest of how its blocks are cut.
    pub fn new(options: LendingOptions, shape: [u8; 16], ranks: Vec<Endpoint>) -> Lendings {
        Lendings {
            options,
            shape,
            ranks,
            lendings: BTreeMap::new(),
            over: Remembered::default(),
            free: Vec::new(),
            actions: VecDeque::new(),
        }
    }

    /// The engine has a request whose prompt it hands over. False if there are too many lendings, or the id is in use or over.
    pub fn begin(&mut self, now: Duration, id: HandoffId, content: [u8; 16]) -> bool {
        if self.over.has(id) {
            return false;
        }
        if let Some(lending) = self.lendings.get_mut(&id) {
            if lending.content.is_some() || lending.closing.is_some() {
                return false;
            }
            lending.content = Some(content);
            lending.expires_at = now + self.options.lease;
            self.serve(now, id);
            return true;
        }
        // The lending that ends stays until its ranks have closed: for a moment there is one more than `lendings_max`.
        if self.lendings.len() >= self.options.lendings_max && self.end_oldest_unwanted(id).is_none() {
            return false;
        }
        let lending = self.new_lending(now, now + self.options.lease);
        self.lendings.insert(id, Lending { content: Some(content), ..lending });
        true
    }

    fn new_lending(&self, now: Duration, expires_at: Duration) -> Lending {
        let report_at = now + self.options.report_every;
        Lending {
            content: None,
            ahead: 0,
            computed: 0,
            reader: None,
            expires_at,
            is_held: false,
            report_at,
            closing: None,
            close_again_at: None,
        }
    }

    /// Keeps a lending that no engine wants yet until [`Lendings::release`]. A router may ask the decode engine only once this
    /// engine has answered, and a prompt may wait and compute for longer than a lease.
    pub fn hold(&mut self, id: HandoffId) {
        self.lendings.get_mut(&id).into_iter().for_each(|lending| lending.is_held = true);
    }

    /// The request has ended: from now on an engine has to want the lending within a lease.
    pub fn release(&mut self, now: Duration, id: HandoffId) {
        let Some(lending) = self.lendings.get_mut(&id).filter(|lending| lending.is_held) else { return };
        lending.is_held = false;
        lending.expires_at = lending.expires_at.max(now + self.options.lease);
    }

    /// Records the requests ahead of this one, and the tokens of it that are computed; the next Queued reports them.
    pub fn progress(&mut self, id: HandoffId, ahead: u32, computed: u64) {
        if let Some(lending) = self.lendings.get_mut(&id) {
            (lending.ahead, lending.computed) = (ahead, computed);
        }
    }

    /// Whether the engine still has to pin blocks of it as it computes them.
    pub fn is_open(&self, id: HandoffId) -> bool {
        self.lendings.get(&id).is_some_and(|lending| lending.closing.is_none() && lending.content.is_some())
    }

    /// Lendings that ended since the last call, and have no READ in flight: the engine unpins their blocks.
    pub fn take_free(&mut self) -> Vec<HandoffId> {
        std::mem::take(&mut self.free)
    }

    /// Number of lendings that may have pinned blocks.
    pub fn live(&self) -> usize {
        self.lendings.values().filter(|lending| lending.content.is_some()).count()
    }

    /// Ends a lending, because its request ended early or its blocks cannot be offered.
    pub fn give_up(&mut self, id: HandoffId) {
        self.end(id, true);
    }

    /// Ends all lendings, because the cache is about to be reset.
    pub fn give_up_all(&mut self) {
        let all: Vec<HandoffId> = self.lendings.keys().copied().collect();
        all.into_iter().for_each(|id| self.end(id, true));
    }

    /// Handles a message from another engine's scheduler.
    pub fn message(&mut self, now: Duration, from: EngineId, message: Message) {
        match message {
            Message::Want(want) => self.want(now, from, want),
            Message::Landed(id) | Message::Cancel(id) if self.is_reader(id, from) => self.end(id, false),
            _ => {}
        }
    }

    fn is_reader(&self, id: HandoffId, engine: EngineId) -> bool {
        let reader = self.lendings.get(&id).and_then(|lending| lending.reader.as_ref());
        reader.is_some_and(|reader| reader.engine == engine)
    }

    fn want(&mut self, now: Duration, from: EngineId, want: Want) {
        let id = want.id;
        let refused = if self.over.has(id) {
            Some(Reason::Ended)
        } else if want.shape != self.shape || want.ranks.len() != self.ranks.len() {
            Some(Reason::OtherShape)
        } else {
            None
        };
        if let Some(reason) = refused {
            return self.refuse(from, id, reason);
        }
        if !self.lendings.contains_key(&id) {
            if self.lendings.len() >= self.options.lendings_max {
                return self.refuse(from, id, Reason::Full);
            }
            let lending = self.new_lending(now, now + self.options.early);
            self.lendings.insert(id, Lending { reader: Some(Reader { engine: from, want }), ..lending });
            return;
        }
        let Some(lending) = self.lendings.get_mut(&id) else { return };
        if lending.closing.is_some() {
            return self.refuse(from, id, Reason::Ended);
        }
        match &lending.reader {
            Some(reader) if reader.engine != from => self.refuse(from, id, Reason::Ended),
            // A repeated Want renews the lease. It does not prolong the wait for a request.
            Some(_) if lending.content.is_some() => lending.expires_at = now + self.options.lease,
            Some(_) => {}
            None => {
                lending.reader = Some(Reader { engine: from, want });
                lending.expires_at = now + self.options.lease;
                self.serve(now, id);
            }
        }
    }

    /// Has the ranks serve the reader once both the request and the Want have arrived; refuses a Want of other content.
    fn serve(&mut self, now: Duration, id: HandoffId) {
        let Some(lending) = self.lendings.get_mut(&id) else { return };
        let (Some(content), Some(reader)) = (lending.content, &lending.reader) else { return };
        let engine = reader.engine;
        if content != reader.want.content {
            lending.reader = None;
            return self.refuse(engine, id, Reason::OtherContent);
        }
        for (rank, reader_rank) in reader.want.ranks.iter().enumerate() {
            let Want { first_block, end_block, .. } = reader.want;
            let serve = Message::Serve { id, first_block, end_block, reader: reader_rank.clone() };
            self.actions.push_back(LendingAction::Rank(rank as u32, serve));
        }
        self.report(now, id);
    }

    fn report(&mut self, now: Duration, id: HandoffId) {
        let Some(lending) = self.lendings.get_mut(&id) else { return };
        lending.report_at = now + self.options.report_every;
        let (Some(_), Some(reader)) = (lending.content, &lending.reader) else { return };
        let queued =
            Queued { id, ahead: lending.ahead, computed: lending.computed, ranks: self.ranks.clone() };
        self.actions.push_back(LendingAction::Send(reader.engine, Message::Queued(queued)));
    }

    fn refuse(&mut self, to: EngineId, id: HandoffId, reason: Reason) {
        self.actions.push_back(LendingAction::Send(to, Message::Refused(id, reason)));
    }

    /// Handles a message from an own rank.
    pub fn rank_said(&mut self, rank: u32, message: &Message) {
        let id = match message {
            // The rank cannot offer blocks that it has computed, so the reader would wait in vain.
            Message::Lost(id) => return self.give_up(*id),
            Message::Closed(id) => id,
            _ => return,
        };
        let Some(lending) = self.lendings.get_mut(id) else { return };
        let Some(closing) = &mut lending.closing else { return };
        closing.remove(&rank);
        if closing.is_empty() {
            self.forget(*id);
        }
    }

    /// Ends the lendings to an engine that cannot be reached any more, or was restarted.
    pub fn peer_gone(&mut self, engine: EngineId) {
        let of_it = self.lendings.iter().filter(|(_, lending)| {
            lending.closing.is_none() && lending.reader.as_ref().is_some_and(|reader| reader.engine == engine)
        });
        let ids: Vec<HandoffId> = of_it.map(|(id, _)| *id).collect();
        ids.into_iter().for_each(|id| self.end(id, false));
    }

    /// Ends the oldest lending that no engine has asked for, but never `but`. No rank has offered its blocks to anybody, so the
    /// engine may unpin them at once.
    pub fn end_oldest_unwanted(&mut self, but: HandoffId) -> Option<HandoffId> {
        let unwanted = self
            .lendings
            .iter()
            .filter(|(id, lending)| **id != but && lending.reader.is_none() && lending.closing.is_none());
        let oldest = unwanted.min_by_key(|(_, lending)| lending.expires_at).map(|(id, _)| *id);
        oldest.into_iter().for_each(|id| self.end(id, false));
        oldest
    }

    fn end(&mut self, id: HandoffId, tells_reader: bool) {
        let Some(lending) = self.lendings.get_mut(&id) else { return };
        if lending.closing.is_some() {
            return;
        }
        if let (true, Some(reader)) = (tells_reader, &lending.reader) {
            self.actions.push_back(LendingAction::Send(reader.engine, Message::Cancel(id)));
        }
        if lending.content.is_none() {
            return self.forget(id);
        }
        let ranks = 0..self.ranks.len() as u32;
        lending.closing = Some(ranks.clone().collect());
        self.actions.extend(ranks.map(|rank| LendingAction::Rank(rank, Message::Close(id))));
        if self.ranks.is_empty() {
            self.forget(id);
        }
    }

    fn forget(&mut self, id: HandoffId) {
        let Some(lending) = self.lendings.remove(&id) else { return };
        self.over.add(id);
        if lending.content.is_some() {
            self.free.push(id);
        }
    }

    /// Ends expired lendings, reports the progress of others, and repeats Close where it was not answered.
    pub fn tick(&mut self, now: Duration) {
        let open = || self.lendings.iter().filter(|(_, lending)| lending.closing.is_none());
        let expired: Vec<(HandoffId, bool)> = open()
            .filter(|(_, lending)| lending.expires_at <= now && !lending.waits_for_reader())
            .map(|(id, lending)| (*id, lending.content.is_none()))
            .collect();
        let to_report: Vec<HandoffId> =
            open().filter(|(_, lending)| lending.report_at <= now).map(|(id, _)| *id).collect();
        for (id, never_came) in expired {
            let reader = self
                .lendings
                .get(&id)
                .and_then(|lending| lending.reader.as_ref())
                .map(|reader| reader.engine);
            if let (true, Some(reader)) = (never_came, reader) {
                self.refuse(reader, id, Reason::Unknown);
            }
            self.end(id, !never_came);
        }
        to_report.into_iter().for_each(|id| self.report(now, id));
        self.close_again(now);
    }

    fn close_again(&mut self, now: Duration) {
        for (id, lending) in &mut self.lendings {
            let Some(closing) = &lending.closing else { continue };
            let again_at = lending.close_again_at.get_or_insert(now.saturating_add(self.options.retry_every));
            if *again_at <= now {
                *again_at = now.saturating_add(self.options.retry_every);
                self.actions
                    .extend(closing.iter().map(|rank| LendingAction::Rank(*rank, Message::Close(*id))));
            }
        }
    }

    /// When [`Lendings::tick`] is due; None if there is nothing to wait for.
    pub fn next_tick(&self) -> Option<Duration> {
        let of = |lending: &Lending| match &lending.closing {
            None if lending.waits_for_reader() => lending.report_at,
            None => lending.expires_at.min(lending.report_at),
            Some(_) => lending.close_again_at.unwrap_or(lending.report_at),
        };
        self.lendings.values().map(of).filter(|at| *at < Duration::MAX).min()
    }

    /// The next action for the agent to carry out.
    pub fn next_action(&mut self) -> Option<LendingAction> {
        self.actions.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: HandoffId = HandoffId([1; 16]);
    const READER: EngineId = EngineId { engine_id: 1, boot_nonce: 1 };
    const OTHER: EngineId = EngineId { engine_id: 2, boot_nonce: 1 };

    fn want() -> Message {
        let (first_block, end_block) = (0, 1);
        let (content, shape) = ([0; 16], [0; 16]);
        let (scheduler, ranks) = (Vec::new(), vec![Vec::new()]);
        Message::Want(Want { id: ID, content, shape, first_block, end_block, scheduler, ranks })
    }

    #[test]
    fn only_its_reader_ends_a_hand_off_and_its_blocks_are_free_when_the_rank_has_closed() {
        for end in [Message::Landed(ID), Message::Cancel(ID)] {
            let mut lendings = Lendings::new(LendingOptions::default(), [0; 16], vec![Vec::new()]);
            assert!(lendings.begin(Duration::ZERO, ID, [0; 16]));
            lendings.message(Duration::ZERO, OTHER, end.clone());
            lendings.message(Duration::ZERO, READER, want());
            // Another engine's Want is refused, and does not end the lending.
            lendings.message(Duration::ZERO, OTHER, want());
            lendings.message(Duration::ZERO, OTHER, end.clone());
            assert!(lendings.is_open(ID));
            let said: Vec<LendingAction> = std::iter::from_fn(|| lendings.next_action()).collect();
            let refused = LendingAction::Send(OTHER, Message::Refused(ID, Reason::Ended));
            assert!(said.contains(&refused), "{said:?}");
            lendings.message(Duration::ZERO, READER, end);
            assert!(!lendings.is_open(ID) && lendings.live() == 1 && lendings.take_free().is_empty());
            assert_eq!(lendings.next_action(), Some(LendingAction::Rank(0, Message::Close(ID))));
            lendings.rank_said(0, &Message::Closed(ID));
            assert_eq!((lendings.live(), lendings.take_free()), (0, vec![ID]));
        }
    }

    /// Proxies of P2P NCCL and NIXL ask the decode engine once the prefill engine has answered. A prompt that waited and computed
    /// for longer than a lease was handed over to nobody.
    #[test]
    fn a_lending_whose_request_runs_waits_for_its_reader_as_long_as_that_takes() {
        let (second, lease) = (Duration::from_secs(1), LendingOptions::default().lease);
        for is_held in [true, false] {
            let mut lendings = Lendings::new(LendingOptions::default(), [0; 16], vec![Vec::new()]);
            assert!(lendings.begin(Duration::ZERO, ID, [0; 16]));
            if is_held {
                lendings.hold(ID);
            }
            for tick in 0..60 {
                lendings.tick(tick * second);
                assert!(lendings.next_tick().is_none_or(|next| next > tick * second), "ticks without an end");
            }
            assert_eq!(lendings.is_open(ID), is_held);
            lendings.release(60 * second, ID);
            lendings.tick(60 * second + lease - second);
            assert_eq!(lendings.is_open(ID), is_held);
            lendings.tick(60 * second + lease);
            assert!(!lendings.is_open(ID));
        }
        // One that is wanted has its reader's lease, whether the request runs or not.
        let mut lendings = Lendings::new(LendingOptions::default(), [0; 16], vec![Vec::new()]);
        assert!(lendings.begin(Duration::ZERO, ID, [0; 16]));
        lendings.hold(ID);
        lendings.message(60 * second, READER, want());
        lendings.tick(60 * second + lease);
        assert!(!lendings.is_open(ID));
    }

    #[test]
    fn a_rank_that_cannot_offer_what_it_has_computed_ends_the_hand_off_for_its_reader() {
        let mut lendings = Lendings::new(LendingOptions::default(), [0; 16], vec![Vec::new()]);
        assert!(lendings.begin(Duration::ZERO, ID, [0; 16]));
        lendings.message(Duration::ZERO, READER, want());
        while lendings.next_action().is_some() {}
        lendings.rank_said(0, &Message::Lost(ID));
        lendings.rank_said(0, &Message::Lost(ID));
        let said: Vec<LendingAction> = std::iter::from_fn(|| lendings.next_action()).collect();
        let cancel = LendingAction::Send(READER, Message::Cancel(ID));
        assert_eq!(said, [cancel, LendingAction::Rank(0, Message::Close(ID))]);
        assert!(!lendings.is_open(ID));
    }

    #[test]
    fn of_those_that_nobody_wants_the_oldest_goes_first_and_no_rank_was_told_of_it() {
        let mut lendings = Lendings::new(LendingOptions::default(), [0; 16], vec![Vec::new()]);
        let other = |number| HandoffId([number; 16]);
        for (second, id) in (0..).zip([ID, other(2), other(3)]) {
            assert!(lendings.begin(Duration::from_secs(second), id, [0; 16]));
        }
        lendings.message(Duration::ZERO, READER, want());
        while lendings.next_action().is_some() {}
        assert_eq!(lendings.end_oldest_unwanted(other(2)), Some(other(3)), "the first one is wanted");
        assert_eq!(lendings.end_oldest_unwanted(ID), Some(other(2)));
        assert_eq!(lendings.end_oldest_unwanted(other(9)), None);
        let said: Vec<LendingAction> = std::iter::from_fn(|| lendings.next_action()).collect();
        assert_eq!(said, [3, 2].map(|number| LendingAction::Rank(0, Message::Close(other(number)))));
        assert!(lendings.is_open(ID) && !lendings.is_open(other(2)));
    }

    /// A message to or from a rank may be lost, as when the rank is stopped for long. Its blocks then stayed pinned for ever.
    #[test]
    fn a_rank_that_does_not_answer_is_told_again_to_close() {
        let mut lendings = Lendings::new(LendingOptions::default(), [0; 16], vec![Vec::new(), Vec::new()]);
        assert!(lendings.begin(Duration::ZERO, ID, [0; 16]));
        lendings.give_up(ID);
        let close = |rank| LendingAction::Rank(rank, Message::Close(ID));
        let told = |lendings: &mut Lendings| {
            std::iter::from_fn(|| lendings.next_action()).collect::<Vec<LendingAction>>()
        };
        lendings.tick(Duration::ZERO);
        assert_eq!(told(&mut lendings), [close(0), close(1)]);
        lendings.rank_said(0, &Message::Closed(ID));
        let again = LendingOptions::default().retry_every;
        assert_eq!(lendings.next_tick(), Some(again));
        lendings.tick(again - Duration::from_millis(1));
        assert_eq!(told(&mut lendings), []);
        for time in [again, 2 * again] {
            lendings.tick(time);
            assert_eq!(told(&mut lendings), [close(1)]);
        }
        lendings.rank_said(1, &Message::Closed(ID));
        assert_eq!((lendings.take_free(), lendings.next_tick()), (vec![ID], None));
    }
}
