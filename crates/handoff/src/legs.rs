//! The engine that computes a prompt: its side of each hand-off. No I/O; the time is an argument.
//!
//! ```text
//!             begin (the request is here)            Want
//!  (nothing) ----------------------------> Unwanted -------> Wanted --- Landed, Cancel, peer gone, lease over,
//!      |                                      |  lease over     |       reset, request ended early
//!      |  Want, before the request            +-----------------+----> Closing --- Closed of every rank ---> blocks
//!      +-------------------------> Early -- begin --> Wanted                                                unpinned
//!                                    |  the request does not come
//!                                    +--> refused
//! ```
//! A lease: whoever wants a hand-off says so again every second. Of one that nobody wants any more the blocks are unpinned.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use kvlane_fabric::EngineId;

use crate::message::{Endpoint, HandoffId, Message, Queued, Reason, Want};
use crate::remembered::Remembered;

/// Limits of an engine that computes.
#[derive(Debug, Clone)]
pub struct LegOptions {
    /// A hand-off that nobody has wanted for so long is given up.
    pub lease: Duration,
    /// A Want waits for its request for so long.
    pub early: Duration,
    /// Whoever wants one hears at least so often how far it is.
    pub report_every: Duration,
    /// A rank that has not answered for so long is told again: what it was told, or said, may be lost.
    pub ask_again: Duration,
    /// Most hand-offs, wanted or not.
    pub legs_max: usize,
}

impl Default for LegOptions {
    fn default() -> LegOptions {
        LegOptions {
            lease: Duration::from_secs(5),
            early: Duration::from_secs(2),
            report_every: Duration::from_millis(500),
            ask_again: Duration::from_secs(5),
            legs_max: 1024,
        }
    }
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LegAction {
    /// Say this to an engine that wants something.
    Send(EngineId, Message),
    /// Say this to the rank of that number.
    Rank(u32, Message),
}

#[derive(Debug)]
struct Leg {
    /// What its tokens mean; None while only the Want is here.
    content: Option<[u8; 16]>,
    ahead: u32,
    computed: u64,
    reader: Option<Reader>,
    /// It ends then.
    until: Duration,
    report_at: Duration,
    /// Ranks that have not said yet that nothing is read any more; None while it goes on.
    closing: Option<BTreeSet<u32>>,
    /// When these are told again; None until it is known when they were told.
    close_again_at: Option<Duration>,
}

#[derive(Debug)]
struct Reader {
    engine: EngineId,
    want: Want,
}

/// All hand-offs of an engine that computes.
#[derive(Debug)]
pub struct Legs {
    options: LegOptions,
    shape: [u8; 16],
    ranks: Vec<Endpoint>,
    legs: BTreeMap<HandoffId, Leg>,
    /// Those that are over.
    over: Remembered,
    /// Of those that are over, whose blocks may be unpinned.
    free: Vec<HandoffId>,
    actions: VecDeque<LegAction>,
}

impl Legs {
    /// None yet. `ranks`: where each rank can be reached; `shape`: how the engine's blocks are cut.
    pub fn new(options: LegOptions, shape: [u8; 16], ranks: Vec<Endpoint>) -> Legs {
        Legs {
            options,
            shape,
            ranks,
            legs: BTreeMap::new(),
            over: Remembered::default(),
            free: Vec::new(),
            actions: VecDeque::new(),
        }
    }

    /// A request is here that is to be handed over. False: there are too many, its id is another's, or it is over already.
    pub fn begin(&mut self, now: Duration, id: HandoffId, content: [u8; 16]) -> bool {
        if self.over.has(id) {
            return false;
        }
        if let Some(leg) = self.legs.get_mut(&id) {
            if leg.content.is_some() || leg.closing.is_some() {
                return false;
            }
            leg.content = Some(content);
            leg.until = now + self.options.lease;
            self.match_up(now, id);
            return true;
        }
        // The one that ends stays until its ranks have said so: for a moment there is one more than `legs_max`.
        if self.legs.len() >= self.options.legs_max && self.end_oldest_unwanted(id).is_none() {
            return false;
        }
        let leg = self.leg(now, now + self.options.lease);
        self.legs.insert(id, Leg { content: Some(content), ..leg });
        true
    }

    fn leg(&self, now: Duration, until: Duration) -> Leg {
        let report_at = now + self.options.report_every;
        Leg {
            content: None,
            ahead: 0,
            computed: 0,
            reader: None,
            until,
            report_at,
            closing: None,
            close_again_at: None,
        }
    }

    /// So many requests are before it, and so many of its tokens are computed.
    pub fn progress(&mut self, id: HandoffId, ahead: u32, computed: u64) {
        if let Some(leg) = self.legs.get_mut(&id) {
            (leg.ahead, leg.computed) = (ahead, computed);
        }
    }

    /// Whether its blocks still have to be pinned as they are computed.
    pub fn goes_on(&self, id: HandoffId) -> bool {
        self.legs.get(&id).is_some_and(|leg| leg.closing.is_none() && leg.content.is_some())
    }

    /// Hand-offs that are over, whose blocks nobody reads any more.
    pub fn take_free(&mut self) -> Vec<HandoffId> {
        std::mem::take(&mut self.free)
    }

    /// Hand-offs of which something may still be pinned.
    pub fn live(&self) -> usize {
        self.legs.values().filter(|leg| leg.content.is_some()).count()
    }

    /// The request ended before its prompt was computed, or its blocks cannot be offered.
    pub fn give_up(&mut self, id: HandoffId) {
        self.end(id, true);
    }

    /// All are over: the cache is about to be reset.
    pub fn give_all_up(&mut self) {
        let all: Vec<HandoffId> = self.legs.keys().copied().collect();
        all.into_iter().for_each(|id| self.end(id, true));
    }

    /// Something came from another engine.
    pub fn message(&mut self, now: Duration, from: EngineId, message: Message) {
        match message {
            Message::Want(want) => self.want(now, from, want),
            Message::Landed(id) | Message::Cancel(id) if self.is_reader(id, from) => self.end(id, false),
            _ => {}
        }
    }

    fn is_reader(&self, id: HandoffId, engine: EngineId) -> bool {
        let reader = self.legs.get(&id).and_then(|leg| leg.reader.as_ref());
        reader.is_some_and(|reader| reader.engine == engine)
    }

    fn want(&mut self, now: Duration, from: EngineId, want: Want) {
        let id = want.id;
        let refused = if self.over.has(id) {
            Some(Reason::Over)
        } else if want.shape != self.shape || want.ranks.len() != self.ranks.len() {
            Some(Reason::OtherShape)
        } else {
            None
        };
        if let Some(reason) = refused {
            return self.refuse(from, id, reason);
        }
        if !self.legs.contains_key(&id) {
            if self.legs.len() >= self.options.legs_max {
                return self.refuse(from, id, Reason::Full);
            }
            let leg = self.leg(now, now + self.options.early);
            self.legs.insert(id, Leg { reader: Some(Reader { engine: from, want }), ..leg });
            return;
        }
        let Some(leg) = self.legs.get_mut(&id) else { return };
        if leg.closing.is_some() {
            return self.refuse(from, id, Reason::Over);
        }
        match &leg.reader {
            Some(reader) if reader.engine != from => self.refuse(from, id, Reason::Over),
            // Said again: it is still wanted. One whose request has not come is not waited for any longer.
            Some(_) if leg.content.is_some() => leg.until = now + self.options.lease,
            Some(_) => {}
            None => {
                leg.reader = Some(Reader { engine: from, want });
                leg.until = now + self.options.lease;
                self.match_up(now, id);
            }
        }
    }

    /// Request and Want are both here.
    fn match_up(&mut self, now: Duration, id: HandoffId) {
        let Some(leg) = self.legs.get_mut(&id) else { return };
        let (Some(content), Some(reader)) = (leg.content, &leg.reader) else { return };
        let engine = reader.engine;
        if content != reader.want.content {
            leg.reader = None;
            return self.refuse(engine, id, Reason::OtherContent);
        }
        for (rank, reader_rank) in reader.want.ranks.iter().enumerate() {
            let Want { first_block, end_block, .. } = reader.want;
            let serve = Message::Serve { id, first_block, end_block, reader: reader_rank.clone() };
            self.actions.push_back(LegAction::Rank(rank as u32, serve));
        }
        self.report(now, id);
    }

    fn report(&mut self, now: Duration, id: HandoffId) {
        let Some(leg) = self.legs.get_mut(&id) else { return };
        leg.report_at = now + self.options.report_every;
        let (Some(_), Some(reader)) = (leg.content, &leg.reader) else { return };
        let queued = Queued { id, ahead: leg.ahead, computed: leg.computed, ranks: self.ranks.clone() };
        self.actions.push_back(LegAction::Send(reader.engine, Message::Queued(queued)));
    }

    fn refuse(&mut self, to: EngineId, id: HandoffId, reason: Reason) {
        self.actions.push_back(LegAction::Send(to, Message::Refused(id, reason)));
    }

    /// A rank has said something.
    pub fn rank_said(&mut self, rank: u32, message: &Message) {
        let id = match message {
            // It cannot offer what it has computed: the reader need not wait for it.
            Message::Lost(id) => return self.give_up(*id),
            Message::Closed(id) => id,
            _ => return,
        };
        let Some(leg) = self.legs.get_mut(id) else { return };
        let Some(closing) = &mut leg.closing else { return };
        closing.remove(&rank);
        if closing.is_empty() {
            self.forget(*id);
        }
    }

    /// An engine cannot be reached any more, or is another run.
    pub fn peer_gone(&mut self, engine: EngineId) {
        let of_it = self.legs.iter().filter(|(_, leg)| {
            leg.closing.is_none() && leg.reader.as_ref().is_some_and(|reader| reader.engine == engine)
        });
        let ids: Vec<HandoffId> = of_it.map(|(id, _)| *id).collect();
        ids.into_iter().for_each(|id| self.end(id, false));
    }

    /// Ends the one that nobody has wanted for the longest time, another one than `but`. Its ranks have told nobody of its
    /// blocks, so these may be unpinned at once.
    pub fn end_oldest_unwanted(&mut self, but: HandoffId) -> Option<HandoffId> {
        let unwanted =
            self.legs.iter().filter(|(id, leg)| **id != but && leg.reader.is_none() && leg.closing.is_none());
        let oldest = unwanted.min_by_key(|(_, leg)| leg.until).map(|(id, _)| *id);
        oldest.into_iter().for_each(|id| self.end(id, false));
        oldest
    }

    fn end(&mut self, id: HandoffId, tells_reader: bool) {
        let Some(leg) = self.legs.get_mut(&id) else { return };
        if leg.closing.is_some() {
            return;
        }
        if let (true, Some(reader)) = (tells_reader, &leg.reader) {
            self.actions.push_back(LegAction::Send(reader.engine, Message::Cancel(id)));
        }
        if leg.content.is_none() {
            return self.forget(id);
        }
        let ranks = 0..self.ranks.len() as u32;
        leg.closing = Some(ranks.clone().collect());
        self.actions.extend(ranks.map(|rank| LegAction::Rank(rank, Message::Close(id))));
        if self.ranks.is_empty() {
            self.forget(id);
        }
    }

    fn forget(&mut self, id: HandoffId) {
        let Some(leg) = self.legs.remove(&id) else { return };
        self.over.add(id);
        if leg.content.is_some() {
            self.free.push(id);
        }
    }

    /// Ends what is over by time, and tells how far the others are.
    pub fn tick(&mut self, now: Duration) {
        let going_on = || self.legs.iter().filter(|(_, leg)| leg.closing.is_none());
        let late: Vec<(HandoffId, bool)> = going_on()
            .filter(|(_, leg)| leg.until <= now)
            .map(|(id, leg)| (*id, leg.content.is_none()))
            .collect();
        let to_report: Vec<HandoffId> =
            going_on().filter(|(_, leg)| leg.report_at <= now).map(|(id, _)| *id).collect();
        for (id, never_came) in late {
            let reader = self.legs.get(&id).and_then(|leg| leg.reader.as_ref()).map(|reader| reader.engine);
            if let (true, Some(reader)) = (never_came, reader) {
                self.refuse(reader, id, Reason::Unknown);
            }
            self.end(id, !never_came);
        }
        to_report.into_iter().for_each(|id| self.report(now, id));
        self.close_again(now);
    }

    fn close_again(&mut self, now: Duration) {
        for (id, leg) in &mut self.legs {
            let Some(closing) = &leg.closing else { continue };
            let again_at = leg.close_again_at.get_or_insert(now.saturating_add(self.options.ask_again));
            if *again_at <= now {
                *again_at = now.saturating_add(self.options.ask_again);
                self.actions.extend(closing.iter().map(|rank| LegAction::Rank(*rank, Message::Close(*id))));
            }
        }
    }

    /// When [`Legs::tick`] has something to do.
    pub fn next_tick(&self) -> Option<Duration> {
        let of = |leg: &Leg| match &leg.closing {
            None => leg.until.min(leg.report_at),
            Some(_) => leg.close_again_at.unwrap_or(leg.report_at),
        };
        self.legs.values().map(of).filter(|at| *at < Duration::MAX).min()
    }

    /// What is to be done next.
    pub fn next_action(&mut self) -> Option<LegAction> {
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
            let mut legs = Legs::new(LegOptions::default(), [0; 16], vec![Vec::new()]);
            assert!(legs.begin(Duration::ZERO, ID, [0; 16]));
            legs.message(Duration::ZERO, OTHER, end.clone());
            legs.message(Duration::ZERO, READER, want());
            // Who wants it too is refused, and does not end it.
            legs.message(Duration::ZERO, OTHER, want());
            legs.message(Duration::ZERO, OTHER, end.clone());
            assert!(legs.goes_on(ID));
            let said: Vec<LegAction> = std::iter::from_fn(|| legs.next_action()).collect();
            let refused = LegAction::Send(OTHER, Message::Refused(ID, Reason::Over));
            assert!(said.contains(&refused), "{said:?}");
            legs.message(Duration::ZERO, READER, end);
            assert!(!legs.goes_on(ID) && legs.live() == 1 && legs.take_free().is_empty());
            assert_eq!(legs.next_action(), Some(LegAction::Rank(0, Message::Close(ID))));
            legs.rank_said(0, &Message::Closed(ID));
            assert_eq!((legs.live(), legs.take_free()), (0, vec![ID]));
        }
    }

    #[test]
    fn a_rank_that_cannot_offer_what_it_has_computed_ends_the_hand_off_for_its_reader() {
        let mut legs = Legs::new(LegOptions::default(), [0; 16], vec![Vec::new()]);
        assert!(legs.begin(Duration::ZERO, ID, [0; 16]));
        legs.message(Duration::ZERO, READER, want());
        while legs.next_action().is_some() {}
        legs.rank_said(0, &Message::Lost(ID));
        legs.rank_said(0, &Message::Lost(ID));
        let said: Vec<LegAction> = std::iter::from_fn(|| legs.next_action()).collect();
        let cancel = LegAction::Send(READER, Message::Cancel(ID));
        assert_eq!(said, [cancel, LegAction::Rank(0, Message::Close(ID))]);
        assert!(!legs.goes_on(ID));
    }

    #[test]
    fn of_those_that_nobody_wants_the_oldest_goes_first_and_no_rank_was_told_of_it() {
        let mut legs = Legs::new(LegOptions::default(), [0; 16], vec![Vec::new()]);
        let other = |number| HandoffId([number; 16]);
        for (second, id) in (0..).zip([ID, other(2), other(3)]) {
            assert!(legs.begin(Duration::from_secs(second), id, [0; 16]));
        }
        legs.message(Duration::ZERO, READER, want());
        while legs.next_action().is_some() {}
        assert_eq!(legs.end_oldest_unwanted(other(2)), Some(other(3)), "the first one is wanted");
        assert_eq!(legs.end_oldest_unwanted(ID), Some(other(2)));
        assert_eq!(legs.end_oldest_unwanted(other(9)), None);
        let said: Vec<LegAction> = std::iter::from_fn(|| legs.next_action()).collect();
        assert_eq!(said, [3, 2].map(|number| LegAction::Rank(0, Message::Close(other(number)))));
        assert!(legs.goes_on(ID) && !legs.goes_on(other(2)));
    }

    /// What a rank is told, or says, may be lost, as when it is stopped for long: then its blocks were pinned for ever.
    #[test]
    fn a_rank_that_does_not_answer_is_told_again_to_close() {
        let mut legs = Legs::new(LegOptions::default(), [0; 16], vec![Vec::new(), Vec::new()]);
        assert!(legs.begin(Duration::ZERO, ID, [0; 16]));
        legs.give_up(ID);
        let close = |rank| LegAction::Rank(rank, Message::Close(ID));
        let told = |legs: &mut Legs| std::iter::from_fn(|| legs.next_action()).collect::<Vec<LegAction>>();
        legs.tick(Duration::ZERO);
        assert_eq!(told(&mut legs), [close(0), close(1)]);
        legs.rank_said(0, &Message::Closed(ID));
        let again = LegOptions::default().ask_again;
        assert_eq!(legs.next_tick(), Some(again));
        legs.tick(again - Duration::from_millis(1));
        assert_eq!(told(&mut legs), []);
        for time in [again, 2 * again] {
            legs.tick(time);
            assert_eq!(told(&mut legs), [close(1)]);
        }
        legs.rank_said(1, &Message::Closed(ID));
        assert_eq!((legs.take_free(), legs.next_tick()), (vec![ID], None));
    }
}
