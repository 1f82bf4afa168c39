//! The world of one seed: asks for transfers and messages, and checks how each of them ends.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use kvlane_fabric::{
    Between, Failure, Op, Options, PathSpec, PeerId, Place, Priority, Reach, Request, Run, Stretch, Ticket,
    Transfers, drive,
};

use crate::dice::Dice;
use crate::memory::{Memory, SLICE, memory_of};
use crate::network::{FLUSH_US, Fault, Network, Next};

/// What carries immediates and messages.
const WORDS: PathSpec = PathSpec { reach: Reach::WORDS, ..EVERYTHING };
/// A carrier that reaches the hosts' memory only, and is preferred there.
const FAST: PathSpec = PathSpec { reach: Reach::HOSTS, ..EVERYTHING };
/// One that reaches all memory.
const SLOW: PathSpec = PathSpec { reach: Reach::ALL_MEMORY, class: 1, ..EVERYTHING };
const EVERYTHING: PathSpec =
    PathSpec { reach: Reach::ALL, class: 0, write_bytes: None, read_bytes: None, read_runs: None };

/// More events mean that something goes round and round.
const EVENTS_MAX: usize = 200_000;

pub(crate) struct World {
    pub(crate) network: Network,
    pub(crate) ledger: Ledger,
    transfers: Transfers,
    fault: Fault,
    requests: Vec<Asked>,
    /// Parts of the memory that transfers have; messages have none.
    slices: u64,
    tickets: HashMap<usize, Ticket>,
    peers: Vec<PeerId>,
    tick_at: Option<u64>,
}

/// What is asked for.
#[derive(Clone)]
struct Asked {
    request: Request,
    /// Instead of runs and a counter.
    message: Option<Arc<[u8]>>,
    /// Where its part of the memory begins.
    slice: Option<u64>,
    /// Each post of it breaks its path.
    is_poison: bool,
}

/// The transfers, and how they ended.
pub(crate) struct Ledger {
    pub(crate) known: HashMap<Ticket, Known>,
    options: Options,
    wrong: Option<String>,
}

/// A transfer.
pub(crate) struct Known {
    pub(crate) over: Option<Result<(), Failure>>,
    pub(crate) is_message: bool,
    index: usize,
    peer: PeerId,
    slice: Option<u64>,
    deadline: Option<Duration>,
    has_counter: bool,
    cancelled: bool,
}

impl World {
    pub(crate) fn new(seed: u64, fault: Fault) -> World {
        let mut dice = Dice(seed);
        let options = Options {
            chunk_bytes: 64 + dice.below(1000),
            chunk_runs: 1 + dice.below(6) as usize,
            credits: 1 + dice.below(4) as u32,
            bulk_every: 2 + dice.below(4) as u32,
            live_max: 100,
            breaks_max: 3,
            drain_patience: Duration::from_micros(300),
            post_patience: Duration::from_micros(2500),
            peer_patience: Duration::from_micros(8000),
            backoff: Duration::from_micros(50),
            backoff_max: Duration::from_micros(2000),
            message_bytes: 1 << 20,
            room_pause: Duration::from_micros(100),
            room_pause_max: Duration::from_micros(1000),
        };
        let mut transfers = Transfers::new(options.clone());
        let peers: Vec<PeerId> = (0..=dice.below(2)).map(|_| transfers.add_peer(Duration::ZERO)).collect();
        // Some peers have paths that serve everything; others have two carriers beside what carries words.
        let mut specs = Vec::new();
        for peer in 0..peers.len() {
            let carriers = [(WORDS, 1 + dice.below(2)), (FAST, 1 + dice.below(2)), (SLOW, 1 + dice.below(2))];
            let kinds =
                if dice.one_in(3) { vec![(EVERYTHING, 1 + dice.below(3))] } else { carriers.to_vec() };
            specs.extend(kinds.into_iter().flat_map(|(spec, count)| (0..count).map(move |_| (peer, spec))));
        }
        let count = 1 + dice.below(8);
        let messages = dice.below(6);
        // The last ones are for what is transferred when nothing goes wrong any more.
        let memory = Memory::new(count + peers.len() as u64, peers.len());
        let mut world = World {
            network: Network::new(dice, fault, options.clone(), memory, peers.clone()),
            ledger: Ledger { known: HashMap::new(), options, wrong: None },
            transfers,
            fault,
            requests: Vec::new(),
            slices: 0,
            tickets: HashMap::new(),
            peers,
            tick_at: None,
        };
        specs.into_iter().for_each(|(peer, spec)| world.network.comes(peer, spec));
        world.plan(count, messages);
        world
    }

    /// What is asked for, and when.
    fn plan(&mut self, count: u64, messages: u64) {
        for index in 0..count + messages {
            let dice = &mut self.network.dice;
            let at = if dice.one_in(4) { dice.below(30_000) } else { dice.below(3000) };
            let mut asked = if index < count { self.request(index, at) } else { self.message(index, at) };
            asked.is_poison = self.network.dice.one_in(30);
            self.requests.push(asked);
            self.network.later(at, Next::Submit(index as usize));
            if self.network.dice.one_in(4) {
                let after = self.network.dice.below(1500);
                self.network.later(at + after, Next::Cancel(index as usize));
            }
        }
    }

    fn any_peer(&mut self) -> PeerId {
        self.peers[self.network.dice.below(self.peers.len() as u64) as usize]
    }

    fn request(&mut self, index: u64, at: u64) -> Asked {
        let peer = self.any_peer();
        let slice = self.slice();
        let dice = &mut self.network.dice;
        let mut stretches: Vec<Stretch> = Vec::new();
        // Ranges that do not overlap, of any length, in shuffled order on the other side, in several memories.
        let pieces = dice.below(6);
        let piece = SLICE / 6;
        let memories = if dice.one_in(2) { 1 } else { 3 };
        for number in 0..pieces {
            let mut place =
                |number| Place { region: dice.below(memories) as u32, offset: slice + number * piece };
            let (local, remote) = (place(number), place(pieces - 1 - number));
            let run = Run { local, remote, len: dice.below(piece + 1) };
            let between = Between { local: memory_of(local), remote: memory_of(remote) };
            match stretches.iter_mut().find(|stretch| stretch.between == between) {
                Some(stretch) => stretch.runs.push(run),
                None => stretches.push(Stretch { between, runs: vec![run] }),
            }
        }
        let request = Request {
            peer,
            op: if dice.one_in(2) { Op::Read } else { Op::Write },
            stretches,
            immediate: dice.one_in(2).then_some((index as u32, 0)),
            deadline: dice.one_in(3).then(|| Duration::from_micros(at + dice.below(3000))),
            priority: if dice.one_in(2) { Priority::High } else { Priority::Bulk },
        };
        Asked { request, message: None, slice: Some(slice), is_poison: false }
    }

    /// Where the next transfer's part of the memory begins.
    fn slice(&mut self) -> u64 {
        self.slices += 1;
        (self.slices - 1) * SLICE
    }

    fn message(&mut self, index: u64, at: u64) -> Asked {
        let peer = self.any_peer();
        let dice = &mut self.network.dice;
        let deadline = Some(Duration::from_micros(at + dice.below(12_000)));
        let priority = if dice.one_in(2) { Priority::High } else { Priority::Bulk };
        let (op, stretches, immediate) = (Op::Write, Vec::new(), None);
        // It says which it is.
        let mut bytes = index.to_le_bytes().to_vec();
        bytes.resize(8 + dice.below(1500) as usize, index as u8);
        let request = Request { peer, op, stretches, immediate, deadline, priority };
        Asked { request, message: Some(bytes.into()), slice: None, is_poison: false }
    }

    pub(crate) fn run(&mut self) -> Result<(), String> {
        self.carry_out()?;
        self.go_on_until(|world| world.all_over() && world.network.is_quiet())?;
        self.judge()?;
        if self.fault != Fault::None {
            return Ok(());
        }
        // Whatever went wrong before: every path comes up again, and every peer is a peer.
        self.network.calm_down();
        self.go_on_until(|world| world.network.is_all_up())?;
        let before = self.requests.len();
        for peer in self.peers.clone() {
            let index = self.requests.len();
            let offset = self.slice();
            let place = Place { region: 0, offset };
            let stretches = vec![Stretch::of_hosts(vec![Run { local: place, remote: place, len: SLICE }])];
            let (op, priority, deadline) = (Op::Write, Priority::Bulk, None);
            let immediate = Some((index as u32, 0));
            let request = Request { peer, op, stretches, immediate, deadline, priority };
            self.requests.push(Asked { request, message: None, slice: Some(offset), is_poison: false });
            self.network.later(self.network.now, Next::Submit(index));
            let mut message = self.message(index as u64 + 1, self.network.now);
            message.request.deadline = Some(self.network.time() + Duration::from_secs(1));
            self.requests.push(message);
            self.network.later(self.network.now, Next::Submit(index + 1));
        }
        self.go_on_until(|world| world.all_over() && world.network.is_quiet())?;
        let failed =
            self.ledger.known.values().find(|known| known.index >= before && known.over != Some(Ok(())));
        match failed {
            Some(known) => Err(format!("nothing goes wrong any more, and yet {:?}", known.over)),
            None => self.judge(),
        }
    }

    fn go_on_until(&mut self, done: impl Fn(&World) -> bool) -> Result<(), String> {
        let mut events = 0;
        while !done(self) {
            let Some(next) = self.network.next() else {
                return Err("nothing happens any more".into());
            };
            events += 1;
            if events > EVENTS_MAX {
                return Err("it does not come to an end".into());
            }
            match next {
                Next::Submit(index) => self.submit(index)?,
                Next::Cancel(index) => self.cancel(index),
                Next::Vanish(_) if self.network.calm => {}
                Next::Vanish(path) => self.network.vanish(path),
                Next::Return(peer, class) => {
                    self.network.comes(peer, if class == 0 { FAST } else { SLOW });
                }
                Next::Tick => {}
                Next::Network(happening) => self.network.happen(happening),
            }
            self.carry_out()?;
        }
        Ok(())
    }

    fn all_over(&self) -> bool {
        self.tickets.len() == self.requests.len()
            && self.ledger.known.values().all(|known| known.over.is_some())
    }

    fn submit(&mut self, index: usize) -> Result<(), String> {
        let Asked { request, message, slice, is_poison } = self.requests[index].clone();
        let now = self.network.time();
        let peer = self.peers.iter().position(|peer| *peer == request.peer).unwrap();
        let known = Known {
            over: None,
            is_message: message.is_some(),
            index,
            peer: request.peer,
            slice,
            deadline: request.deadline,
            has_counter: request.immediate.is_some(),
            cancelled: false,
        };
        let ticket = match &message {
            None => self.transfers.submit(now, request.clone()).map_err(|full| full.to_string())?,
            Some(bytes) => {
                let deadline = request.deadline.unwrap();
                let sent =
                    self.transfers.send(now, request.peer, Arc::clone(bytes), deadline, request.priority);
                sent.map_err(|why| why.to_string())?
            }
        };
        self.network.memory.expect(ticket, peer, &request);
        self.network.seen.entry(ticket).or_default();
        if let Some((counter, _)) = request.immediate {
            self.network.counters.insert(counter, ticket);
        }
        if let Some(bytes) = message {
            self.network.messages.insert(index as u64, (ticket, bytes.to_vec(), peer));
        }
        if is_poison {
            self.network.poison.insert(ticket);
        }
        self.tickets.insert(index, ticket);
        self.ledger.known.insert(ticket, known);
        Ok(())
    }

    fn cancel(&mut self, index: usize) {
        if let Some(ticket) = self.tickets.get(&index) {
            self.ledger.known.get_mut(ticket).unwrap().cancelled = true;
            self.transfers.cancel(self.network.time(), *ticket);
        }
    }

    /// Does what the transfers ask for, until they ask for nothing.
    fn carry_out(&mut self) -> Result<(), String> {
        let World { transfers, network, ledger, .. } = self;
        let now = network.time();
        let mut runs = usize::MAX;
        drive(transfers, network, now, &mut runs, |network, ticket, outcome| {
            ledger.over(network, ticket, outcome);
        });
        if let Some(wrong) = network.wrong.take().or_else(|| ledger.wrong.take()) {
            return Err(wrong);
        }
        if let Some(at) = transfers.next_tick() {
            if at <= now {
                return Err("a timer that is due is not done".into());
            }
            let at = at.as_nanos().div_ceil(1000) as u64;
            if self.tick_at.is_none_or(|before| before <= network.now || at < before) {
                self.tick_at = Some(at);
                network.later(at, Next::Tick);
            }
        }
        Ok(())
    }

    fn judge(&mut self) -> Result<(), String> {
        if self.transfers.live() > 0 {
            return Err("a transfer is never over".into());
        }
        self.network.receive_all();
        if let Some(wrong) = self.network.wrong.take() {
            return Err(wrong);
        }
        // The slices of all that have been asked for.
        if !self.network.memory.is_untouched(self.slices) {
            return Err("memory was written after its transfer was over".into());
        }
        for (ticket, known) in &self.ledger.known {
            let (seen, index) = (&self.network.seen[ticket], known.index);
            let expected = u64::from(known.has_counter || known.is_message);
            if known.is_message && seen.received != seen.told {
                return Err(format!("message {index} was received {} times", seen.received));
            }
            match known.over {
                Some(Ok(())) if seen.told != expected => {
                    return Err(format!("transfer {index} was told {} times", seen.told));
                }
                Some(Err(_)) if seen.told > expected => {
                    return Err(format!("transfer {index} failed and was told {} times", seen.told));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl Ledger {
    /// Judges a transfer, and uses its memory otherwise at once.
    fn over(&mut self, network: &mut Network, ticket: Ticket, outcome: Result<(), Failure>) {
        if let Err(wrong) = self.is_right(network, ticket, outcome) {
            self.wrong.get_or_insert(wrong);
        }
        network.seen.get_mut(&ticket).unwrap().is_over = true;
        if let Some(slice) = self.known[&ticket].slice {
            network.memory.use_otherwise(slice);
        }
    }

    fn is_right(
        &mut self,
        network: &Network,
        ticket: Ticket,
        outcome: Result<(), Failure>,
    ) -> Result<(), String> {
        let (now, seen) = (network.time(), &network.seen[&ticket]);
        let known = self.known.get_mut(&ticket).unwrap();
        let index = known.index;
        if known.over.replace(outcome).is_some() {
            return Err(format!("transfer {index} was over twice"));
        }
        if outcome.is_ok() && !network.memory.is_placed(ticket) {
            return Err(format!("transfer {index} is done and its bytes are not in place"));
        }
        // Given up at the deadline; then what was posted drains, or its paths are closed and flushed.
        let latest =
            known.deadline.map(|at| at + self.options.drain_patience + Duration::from_micros(FLUSH_US + 1));
        if latest.is_some_and(|latest| now > latest) {
            return Err(format!("transfer {index} was over long after its deadline"));
        }
        let justified = match outcome {
            Err(Failure::Cancelled) => known.cancelled,
            Err(Failure::Refused) => seen.refused,
            Err(Failure::Gpu) => seen.gpu_failed,
            Err(Failure::PeerLost) => network.lost.iter().any(|(peer, _)| *peer == known.peer),
            Err(Failure::NoRoom) => seen.no_room && known.deadline.is_some_and(|at| now >= at),
            Err(Failure::PathsBreak) => seen.breaks > self.options.breaks_max,
            Ok(()) | Err(Failure::DeadlineExceeded) => true,
        };
        if !justified {
            return Err(format!("transfer {index} ended without a cause: {outcome:?}"));
        }
        if outcome == Err(Failure::NoRoom) && seen.breaks == 0 && seen.told > 0 {
            return Err(format!("there was no room for message {index}, and it was delivered"));
        }
        if outcome == Err(Failure::DeadlineExceeded) && known.deadline.is_none_or(|at| now < at) {
            return Err(format!("transfer {index} was over before its deadline"));
        }
        Ok(())
    }
}
