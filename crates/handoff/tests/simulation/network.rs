//! Messages between agents: late, in order for each pair, and lost if one of the two cannot be reached any more. The sender
//! hears of that later, as from its agent; its messages until then are lost, too.

use std::collections::BTreeMap;
use std::time::Duration;

use kvlane_fabric::EngineId;
use kvlane_handoff::{HandoffId, Message};

use crate::agents::{Agent, engine_at};
use crate::engine::Engine;
use crate::faults::Fault;
use crate::world::{Event, World};

/// The longest that a message takes.
pub(crate) const LATE_MS: u64 = 1500;

#[derive(Default)]
pub(crate) struct Way {
    /// When the last message arrives.
    last: Duration,
    /// Messages of former connections are lost.
    pub(crate) connection: u64,
    is_broken: bool,
}

pub(crate) type Ways = BTreeMap<(Agent, Agent), Way>;

impl World {
    pub(crate) fn send(&mut self, from: Agent, to: Agent, message: Message) {
        let mut message = message;
        match (self.fault, &mut message) {
            (Fault::LosesClose, Message::Close(_)) | (Fault::LosesStop, Message::Stop(_))
                if self.dice.one_in(2) =>
            {
                return;
            }
            (Fault::ShiftsHashes, Message::Arrived { hashes, .. }) => {
                hashes.iter_mut().for_each(|(block, _)| *block += 1);
            }
            _ => {}
        }
        if !self.is_alive(to) {
            // What it had sent before it ended may still be on its way, but nothing after this.
            let last = self.way(to, from).last;
            let heard = last.max(self.now + self.dice.ms(1, 200));
            return self.at(heard, Event::Gone(from, to));
        }
        let is_late = self.late_one_in.is_some_and(|count| self.dice.one_in(count));
        let delay = if is_late { self.dice.ms(100, LATE_MS) } else { self.dice.ms(0, 15) };
        let (now, way) = (self.now, self.ways.entry((from, to)).or_default());
        if way.is_broken {
            return;
        }
        way.last = way.last.max(now + delay);
        let event = Event::Deliver { from, to, connection: way.connection, message };
        self.at(self.ways[&(from, to)].last, event);
    }

    fn way(&mut self, from: Agent, to: Agent) -> &mut Way {
        self.ways.entry((from, to)).or_default()
    }

    pub(crate) fn deliver(&mut self, from: Agent, to: Agent, message: Message) -> Result<(), String> {
        if self.checks_wire && Message::decode(&message.encode()) != Ok(message.clone()) {
            return Err(format!("on the wire it is something else: {message:?}"));
        }
        let (now, id) = (self.now, message.id());
        let engine = &mut self.engines[to.engine];
        match to.rank {
            None if from.scheduler() == to => {
                engine.lendings.rank_said(from.rank.unwrap_or(0), &message);
                engine.landings.rank_said(now, from.rank.unwrap_or(0), message);
            }
            None => match message {
                Message::Want(_) | Message::Landed(_) => engine.lendings.message(now, from.id(), message),
                Message::Queued(_) | Message::Refused(..) => {
                    engine.landings.message(now, from.id(), message);
                }
                _ => {
                    engine.lendings.message(now, from.id(), message.clone());
                    engine.landings.message(now, from.id(), message);
                }
            },
            Some(_) => {
                let rank = self.rank(to);
                match message {
                    Message::Offer(offer) => rank.reading.offer(now, from.id(), offer),
                    Message::Serve { .. } | Message::Close(_) => rank.offering.scheduler_said(message),
                    _ => rank.reading.scheduler_said(message),
                }
            }
        }
        self.settle(to.engine)?;
        self.abort(to, id)
    }

    /// Whatever has happened, it may be the moment at which one of the two requests ends, or a cache is reset.
    pub(crate) fn abort(&mut self, agent: Agent, id: Option<HandoffId>) -> Result<(), String> {
        let (Some(count), true) = (self.abort_one_in, self.is_alive(agent)) else { return Ok(()) };
        let at = agent.scheduler();
        match (self.dice.below(count * 8), id) {
            (0..8, Some(id)) => self.engines[at.engine].lendings.give_up(id),
            (8..16, Some(id)) => self.give_up_landing(at, id),
            (16, _) => self.reset(at),
            _ => return Ok(()),
        }
        self.settle(at.engine)
    }

    /// All of both sides is given up, as before a cache is reset.
    pub(crate) fn reset(&mut self, at: Agent) {
        self.engines[at.engine].lendings.give_up_all();
        let ids: Vec<_> = self.engines[at.engine].tasks.keys().copied().collect();
        ids.into_iter().for_each(|id| self.give_up_landing(at, id));
        self.engines[at.engine].landings.give_up_all();
    }

    /// Two agents of different engines cannot reach each other, for a while; sometimes only one of them sees it.
    pub(crate) fn lose(&mut self, one: Agent, other: Agent) {
        self.seen.losses += 1;
        let sees_one = !self.dice.one_in(4);
        for (from, to) in [(one, other), (other, one)].into_iter().take(1 + usize::from(sees_one)) {
            let way = self.way(from, to);
            way.connection += 1;
            way.is_broken = true;
            self.fail_reads(from, to);
            self.after(1, 300, Event::Gone(from, to));
        }
    }

    /// An agent hears that another one is lost; what it sends from now on has a new connection.
    pub(crate) fn gone(&mut self, at: Agent, gone: Agent) -> Result<(), String> {
        self.way(at, gone).is_broken = false;
        let engine = &mut self.engines[at.engine];
        if at.rank.is_none() && gone.rank.is_none() {
            engine.lendings.peer_gone(gone.id());
            engine.landings.peer_gone(gone.id());
        }
        self.settle(at.engine)
    }

    /// The engine begins anew, without memory of anything.
    pub(crate) fn restart(&mut self, engine: usize) {
        self.seen.restarts += 1;
        let run = self.engines[engine].run;
        let former = Agent { engine, run, rank: None };
        let successor = Engine::new(engine, run + 1, self.engines[engine].shape);
        let mut dead = std::mem::replace(&mut self.engines[engine], successor);
        // An engine that is killed clears no marks.
        let is_killed = self.dice.one_in(2);
        let windows = dead.ranks.iter_mut().flat_map(|rank| rank.windows.values_mut());
        windows.for_each(|window| window.is_marked &= is_killed);
        self.dead.insert((engine, run), dead);
        self.reads.retain(|_, read| read.by.engine != engine);
        let keeps = self.dice.one_in(2);
        let of_it = self.ways.iter_mut().filter(|((from, _), _)| (from.engine, from.run) == (engine, run));
        of_it.filter(|_| !keeps).for_each(|(_, way)| way.connection += 1);
        for other in (0..self.engines.len()).filter(|other| *other != engine) {
            let at = self.scheduler(other);
            let last = self.way(former, at).last;
            let heard = last.max(self.now + self.dice.ms(1, 400));
            self.at(heard, Event::Gone(at, former));
        }
    }

    pub(crate) fn dialled(&mut self, at: Agent, address: std::net::SocketAddr) -> Result<(), String> {
        let engine = engine_at(address);
        let is_there = engine < self.engines.len() && (self.is_calm || !self.dice.one_in(15));
        let outcome: Result<EngineId, String> =
            if is_there { Ok(self.scheduler(engine).id()) } else { Err("nobody answers".into()) };
        self.engines[at.engine].landings.dialled(self.now, address, &outcome);
        self.settle(at.engine)
    }
}
