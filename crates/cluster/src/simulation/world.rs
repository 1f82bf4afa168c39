//! Hosts in simulated time, and all that a seed does to them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane_store::{BlockRead, FetchPlan, FindDone, HolderId, Question, Source};
use parking_lot::Mutex;

use super::asking::{ANSWER_WITHIN, Asking};
use super::borrowing::Borrowing;
use super::faults::Fault;
use super::lending::Lender;
use super::net::{Address, Event, Net, Plan, Seen};
use super::pool::{Pool, prompt};
use crate::members::MemberState;
use crate::messages::Message;

/// Nothing is planned after that.
const BUSY_MS: u64 = 2000;
const PROMPTS: u64 = 5;
const PROMPT_BLOCKS: u64 = 14;
/// A fetch may end so long after its deadline: its last READs are given up, and other holders say no.
const FETCH_SPARE: Duration = Duration::from_millis(100);

/// A host's store asks for it, or tells it.
enum Request {
    Find(Question, FindDone),
    Read(HolderId, Vec<BlockRead>, Instant),
    Planned(u64, Option<FetchPlan>),
    Fetched(u64),
}

#[derive(Default)]
struct Mailbox(Mutex<Vec<Request>>);

struct Mailing(Arc<Mailbox>);

impl Source for Mailing {
    fn find(&self, question: Question, done: FindDone) {
        self.0.0.lock().push(Request::Find(question, done));
    }

    fn read(&self, holder: HolderId, blocks: Vec<BlockRead>, deadline: Instant) {
        self.0.0.lock().push(Request::Read(holder, blocks, deadline));
    }

    fn brings_copies(&self) -> bool {
        true
    }
}

struct Lookup {
    prompt: u8,
    blocks: u16,
    planned_until: Duration,
    deadline: Duration,
    is_planned: bool,
    is_fetching: bool,
    is_answered: bool,
}

struct Host {
    me: Address,
    pool: Pool,
    mailbox: Arc<Mailbox>,
    members: Vec<MemberState>,
    asking: Asking,
    borrowing: Borrowing,
    lender: Lender,
    lookups: BTreeMap<u64, Lookup>,
    /// The last deadline of all fetches. One may wait for a block that another one brings.
    last_deadline: Duration,
}

impl Drop for Host {
    fn drop(&mut self) {
        // Reads and questions hold the store, and a dropped one may bring others.
        loop {
            let left = std::mem::take(&mut *self.mailbox.0.lock());
            if left.is_empty() {
                return;
            }
        }
    }
}

impl Host {
    fn new(me: Address, hosts: usize, longest_loan: Duration) -> Host {
        let mailbox = Arc::<Mailbox>::default();
        let pool = Pool::new(Arc::new(Mailing(Arc::clone(&mailbox))));
        let arena = Arc::clone(&pool.arena);
        Host {
            me,
            pool,
            mailbox,
            members: (0..hosts).map(|_| MemberState::default()).collect(),
            asking: Asking::new(me),
            borrowing: Borrowing::new(me, hosts, arena),
            lender: Lender::new(me, longest_loan),
            lookups: BTreeMap::new(),
            last_deadline: Duration::ZERO,
        }
    }

    /// Names something that is not over.
    fn left_over(&self) -> Option<&'static str> {
        let stats = self.pool.store.stats();
        let left = [
            (!self.asking.is_idle(), "a question"),
            (!self.borrowing.is_idle(), "a read"),
            (!self.lender.is_idle(), "a loan"),
            (!self.lookups.is_empty(), "a lookup"),
            (!self.mailbox.0.lock().is_empty(), "a request of the store"),
            (stats.leases > 0 || stats.claimed_blocks > 0 || stats.limbo_bytes > 0, "memory of blocks"),
        ];
        left.into_iter().find_map(|(is_left, what)| is_left.then_some(what))
    }
}

pub(crate) struct World {
    net: Net,
    hosts: Vec<Host>,
    lookup_count: u64,
}

impl World {
    pub(crate) fn new(seed: u64, fault: Fault) -> World {
        let count = 2 + (seed % 2) as usize;
        let mut net = Net::new(seed, fault, count);
        let hosts = (0..count).map(|host| {
            let longest = Duration::from_millis([100, 300, 5000][net.dice.below(3) as usize]);
            Host::new(Address { host, run: 0 }, count, longest)
        });
        let hosts = hosts.collect();
        let mut world = World { net, hosts, lookup_count: 0 };
        world.plan();
        world
    }

    fn plan(&mut self) {
        let net = &mut self.net;
        let hosts = self.hosts.len() as u64;
        let drawn = |net: &mut Net| {
            let (host, prompt) = (net.dice.below(hosts) as usize, net.dice.below(PROMPTS) as u8);
            (host, prompt, net.dice.between(1, PROMPT_BLOCKS) as u16)
        };
        for _ in 0..net.dice.between(5, 25) {
            let (host, prompt, blocks) = drawn(net);
            net.after(0, BUSY_MS, Event::Plan(Plan::Save { host, prompt, blocks }));
        }
        for _ in 0..net.dice.between(10, 40) {
            let (host, prompt, blocks) = drawn(net);
            net.after(0, BUSY_MS, Event::Plan(Plan::Lookup { host, prompt, blocks }));
        }
        for _ in 0..net.dice.below(20) {
            let (host, prompt, block) = drawn(net);
            net.after(0, BUSY_MS, Event::Plan(Plan::Damage { host, prompt, block: block - 1 }));
        }
        for _ in 0..net.dice.below(3) {
            let (host, for_ms) = (net.dice.below(hosts) as usize, net.dice.between(10, 500));
            net.after(0, BUSY_MS, Event::Plan(Plan::Slow { host, for_ms }));
        }
        for _ in 0..net.dice.below(3) {
            let one = net.dice.below(hosts);
            let other = (one + net.dice.between(1, hosts - 1)) % hosts;
            let (hosts, for_ms) =
                ([one.min(other) as usize, one.max(other) as usize], net.dice.between(5, 800));
            net.after(0, BUSY_MS, Event::Plan(Plan::Cut { hosts, for_ms }));
        }
        for _ in 0..net.dice.below(3) {
            let host = net.dice.below(hosts) as usize;
            let plan = if net.dice.one_in(3) { Plan::Drop { host } } else { Plan::Restart { host } };
            net.after(0, BUSY_MS, Event::Plan(plan));
        }
    }

    /// Until nothing happens any more.
    pub(crate) fn run(&mut self) -> Result<Seen, String> {
        while let Some(event) = self.net.next() {
            self.happen(event);
            (0..self.hosts.len()).for_each(|host| self.settle(host));
            if let Some(wrong) = self.net.wrong.take() {
                return Err(format!("after {:?}: {wrong}", self.net.now));
            }
        }
        for host in &self.hosts {
            if let Some(left) = host.left_over() {
                return Err(format!("not over at rest: {left} of host {}", host.me.host));
            }
            self.net.seen.evicted_blocks += host.pool.store.stats().counters.evicted_blocks;
            host.pool.drop_all();
            if host.pool.store.stats().used_bytes > 0 {
                return Err("not over at rest: memory that nobody uses".into());
            }
        }
        if self.net.windows.is_empty() { Ok(self.net.seen) } else { Err("not over at rest: a window".into()) }
    }

    fn happen(&mut self, event: Event) {
        let net = &mut self.net;
        match event {
            Event::Deliver { from, to, bytes } if net.is_alive(to) => {
                let slow_until = net.slow_until[to.host];
                if net.now < slow_until {
                    return net.at(slow_until, Event::Deliver { from, to, bytes });
                }
                // A daemon listens to those that it has reached itself.
                if net.peer(to.host, from.host) == Some(from) {
                    self.deliver(from, to, &bytes);
                }
            }
            Event::QuestionsDue(at) if net.is_alive(at) => {
                let host = &mut self.hosts[at.host];
                host.asking.due(net, &mut host.members);
            }
            Event::LeaseDue(at, number) if net.is_alive(at) => {
                let host = &mut self.hosts[at.host];
                host.borrowing.lease_due(net, &mut host.members, number);
            }
            Event::Copy(at, read) if net.is_alive(at) => self.hosts[at.host].borrowing.copy(net, read),
            Event::ReadEnds(at, read) if net.is_alive(at) => {
                let host = &mut self.hosts[at.host];
                host.borrowing.read_ends(net, &mut host.members, read);
            }
            Event::LoansDue(at) if net.is_alive(at) => {
                let host = &mut self.hosts[at.host];
                host.lender.due(net, &host.pool);
            }
            Event::Closed(at, window) if net.is_alive(at) => {
                let host = &mut self.hosts[at.host];
                host.lender.closed(net, &host.pool, window);
            }
            Event::Release(at, lease) if net.is_alive(at) => self.hosts[at.host].pool.release(lease),
            Event::LookupDue(at, lookup) if net.is_alive(at) => self.answer(at.host, lookup),
            Event::Reaches(one, other) if !net.is_cut(one, other) => {
                let run = net.runs[other];
                if net.reached.insert((one, other), run) != Some(run) {
                    self.hosts[one].members[other] = MemberState::default();
                }
            }
            Event::Loses(one, other) => drop(net.reached.remove(&(one, other))),
            Event::Plan(plan) => self.carry_out(plan),
            _ => {}
        }
    }

    fn deliver(&mut self, from: Address, to: Address, bytes: &[u8]) {
        let (net, host) = (&mut self.net, &mut self.hosts[to.host]);
        let Ok(message) = Message::decode(bytes) else { return net.is_wrong("a message is not understood") };
        match message {
            Message::Beat { .. } | Message::ToReplica(_) | Message::FromReplica(_) => {}
            Message::Question { number, first, blocks, only_prefix } => {
                let store = &host.pool.store;
                let runs = store.visible_runs(blocks.space, &blocks.shard_bytes, &blocks.hashes, only_prefix);
                net.said.entry((from, number, to.host, first)).or_default().push(runs.clone());
                net.send(to, from.host, Message::Answer { number, first, runs });
            }
            Message::Answer { number, first, runs } => {
                host.asking.answered(net, &mut host.members, from.host, (number, first), runs);
            }
            Message::Borrow { number, blocks, lasts_ms } => {
                let lasts = Duration::from_millis(u64::from(lasts_ms));
                host.lender.borrow(net, &host.pool, from, number, blocks, lasts);
            }
            Message::Lease { number, lease } => {
                host.borrowing.leased(net, &mut host.members, from.host, number, lease);
            }
            Message::Return { number } => host.lender.returned(net, from, number),
        }
    }

    /// Does what the host's store asks for.
    fn settle(&mut self, at: usize) {
        loop {
            let requests = std::mem::take(&mut *self.hosts[at].mailbox.0.lock());
            if requests.is_empty() {
                return;
            }
            for request in requests {
                self.take(at, request);
            }
        }
    }

    fn take(&mut self, at: usize, request: Request) {
        let (net, host) = (&mut self.net, &mut self.hosts[at]);
        match request {
            Request::Find(question, done) => host.asking.find(net, &mut host.members, &question, done),
            Request::Read(holder, blocks, deadline) => {
                for extent in blocks.iter().flat_map(|block| &block.extents) {
                    net.check_unshown(host.me, *extent);
                }
                host.borrowing.read(net, &mut host.members, holder.0 as usize, blocks, deadline);
            }
            Request::Planned(number, plan) => {
                let Some(lookup) = host.lookups.get_mut(&number).filter(|lookup| !lookup.is_planned) else {
                    return net.is_wrong("a lookup was planned twice");
                };
                lookup.is_planned = true;
                if net.now > lookup.planned_until {
                    return net.is_wrong("a question ended late");
                }
                let Some(plan) = plan else { return self.answer(at, number) };
                lookup.is_fetching = true;
                host.last_deadline = host.last_deadline.max(lookup.deadline);
                let (now, mailbox) = (net.instant(), Arc::clone(&host.mailbox));
                let deadline = now + (lookup.deadline - net.now);
                let fetched = move || mailbox.0.lock().push(Request::Fetched(number));
                host.pool.store.fetch(plan, now, deadline, fetched);
            }
            Request::Fetched(number) => {
                let Some(lookup) = host.lookups.get_mut(&number).filter(|lookup| lookup.is_fetching) else {
                    return net.is_wrong("a fetch ended twice");
                };
                lookup.is_fetching = false;
                if net.now > host.last_deadline + FETCH_SPARE {
                    net.is_wrong("a fetch ended late");
                }
                self.answer(at, number);
            }
        }
    }

    /// Answers a lookup, once. Forgets it when its fetch is over too.
    fn answer(&mut self, at: usize, number: u64) {
        let (net, host) = (&mut self.net, &mut self.hosts[at]);
        let Some(lookup) = host.lookups.get_mut(&number) else { return };
        if !std::mem::replace(&mut lookup.is_answered, true) {
            match host.pool.hit(&prompt(lookup.prompt, lookup.blocks), net.instant()) {
                Err(hash) => net.is_wrong(format!("a hit has wrong bytes: {hash:?}")),
                Ok(None) => {}
                Ok(Some((lease, blocks))) => {
                    net.seen.hit_blocks += blocks;
                    net.after(0, 100, Event::Release(host.me, lease));
                }
            }
        }
        if lookup.is_planned && !lookup.is_fetching {
            host.lookups.remove(&number);
        }
    }

    fn carry_out(&mut self, plan: Plan) {
        let count = self.hosts.len();
        let net = &mut self.net;
        match plan {
            Plan::Lookup { host: at, prompt: number, blocks } => {
                self.lookup_count += 1;
                let (host, lookup) = (&mut self.hosts[at], self.lookup_count);
                let patience = ANSWER_WITHIN + net.dice.ms(0, 600);
                let deadline = net.now + patience;
                let planned_until = net.now + ANSWER_WITHIN;
                let of_lookup = Lookup {
                    prompt: number,
                    blocks,
                    planned_until,
                    deadline,
                    is_planned: false,
                    is_fetching: false,
                    is_answered: false,
                };
                host.lookups.insert(lookup, of_lookup);
                net.at(deadline, Event::LookupDue(host.me, lookup));
                let (hashes, mailbox) = (prompt(number, blocks), Arc::clone(&host.mailbox));
                let finding = host.pool.store.find(&[host.pool.group(&hashes)], u64::MAX);
                finding.then(move |plan| mailbox.0.lock().push(Request::Planned(lookup, plan)));
            }
            Plan::Save { host: at, prompt: number, blocks } => {
                let host = &mut self.hosts[at];
                for extent in host.pool.save(&prompt(number, blocks), net.instant()) {
                    net.check_unshown(host.me, extent);
                }
            }
            Plan::Damage { host, prompt: number, block } => {
                let hash = prompt(number, block + 1)[usize::from(block)];
                self.hosts[host].pool.damage(hash, net.instant());
            }
            Plan::Drop { host } => self.hosts[host].pool.drop_all(),
            Plan::Slow { host, for_ms } => {
                net.slow_until[host] = net.now + Duration::from_millis(for_ms);
            }
            Plan::Restart { host: at } => {
                net.seen.restarts += 1;
                net.runs[at] += 1;
                let longest = Duration::from_millis([100, 300, 5000][net.dice.below(3) as usize]);
                let me = Address { host: at, run: net.runs[at] };
                net.windows.retain(|_, window| window.owner.host != at);
                self.hosts[at] = Host::new(me, count, longest);
                for other in (0..count).filter(|other| *other != at) {
                    net.reached.remove(&(at, other));
                    net.after(1, 50, Event::Reaches(at, other));
                    net.after(1, 300, Event::Loses(other, at));
                    net.after(300, 600, Event::Reaches(other, at));
                }
            }
            Plan::Cut { hosts, for_ms } => {
                let [one, other] = hosts;
                net.cuts.insert(hosts);
                for (from, to) in [(one, other), (other, one)] {
                    // A short one may not be noticed.
                    if for_ms > 300 {
                        net.after(100, 300, Event::Loses(from, to));
                    }
                    net.after(for_ms + 1, for_ms + 300, Event::Reaches(from, to));
                }
                net.after(for_ms, for_ms, Event::Plan(Plan::Mend { hosts }));
            }
            Plan::Mend { hosts } => drop(net.cuts.remove(&hosts)),
        }
    }
}
