//! A hub whose control connections are sockets: what its engine does with it, turn by turn.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::epoll::Event;
use rustix::event::{EventfdFlags, eventfd};

use super::Hub;
use crate::carrier::Job;
use crate::control::sockets::ControlSockets;
use crate::descriptor::{Address, Descriptor};
use crate::hold_time::HoldTime;
use crate::links::LinkJob;
use crate::status::PathStatus;
use crate::transfers::{PathId, PeerId};
use crate::watch::{Happened, Interest, Watch};

/// The control connections' part of the watch.
pub(crate) const CONTROL: u8 = 254;
/// The part that only wakes.
const WAKE: u8 = 255;
/// Rings that bring something are polled so often before sockets are looked at once more, which takes a system call as long as
/// several looks at rings.
const WITHOUT_SOCKETS_MAX: u32 = 32;
/// The same while neither brings anything.
const WITHOUT_SOCKETS: u32 = 8;

#[derive(Debug)]
pub(crate) struct SocketHub {
    pub(crate) hub: Hub<ControlSockets>,
    watch: Watch,
    wake: OwnedFd,
    /// What peers are told instead of what is listened on.
    advertised: Vec<SocketAddr>,
    /// Polls in a row that brought enough without a look at sockets.
    without_sockets: u32,
    /// Whether the last of those looks brought nothing.
    has_quiet_sockets: bool,
    /// Whose job is next.
    turn: usize,
    /// How long its lock was held each time; None: that is not measured.
    pub(crate) holds: Option<Vec<HoldTime>>,
    /// Until when the thread behind this sleeps if nothing happens.
    pub(crate) asleep_until: Option<Duration>,
}

/// A job, and whose it is.
#[allow(
    clippy::large_enum_variant,
    reason = "there is one at a time, and a box would be an allocation for each"
)]
pub(crate) enum Work {
    Control(LinkJob),
    Carrier(u8, Box<dyn Job>),
}

impl Work {
    /// Does it, while nobody holds the lock for it.
    pub(crate) fn run(&mut self) {
        crate::audit::takes_time("a job");
        match self {
            Work::Control(job) => job.run(),
            Work::Carrier(_, job) => job.run(),
        }
    }
}

impl SocketHub {
    pub(crate) fn new(
        hub: Hub<ControlSockets>,
        watch: Watch,
        advertised: Vec<SocketAddr>,
    ) -> std::io::Result<SocketHub> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        watch.of(WAKE).add(&wake, 0, Interest::READS)?;
        Ok(SocketHub {
            hub,
            watch,
            wake,
            advertised,
            without_sockets: 0,
            has_quiet_sockets: false,
            turn: 0,
            holds: None,
            asleep_until: None,
        })
    }

    pub(crate) fn watch(&self) -> Watch {
        self.watch.clone()
    }

    /// What the hub's clock says then; what is past is now.
    pub(crate) fn time_of(&self, instant: Instant) -> Duration {
        self.hub.now().saturating_add(instant.saturating_duration_since(Instant::now()))
    }

    /// The time is that of now until it is read again.
    pub(crate) fn read_clock(&mut self) {
        self.hub.outside.clock.read();
    }

    /// Lets whoever sleeps for this hub look again.
    pub(crate) fn wake(&self) {
        // A counter that is full wakes too.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// The next poll looks at sockets.
    pub(crate) fn look_at_sockets(&mut self) {
        self.without_sockets = WITHOUT_SOCKETS_MAX;
    }

    /// Takes what came, without waiting, and does what is due. Whether anything happened.
    pub(crate) fn poll(&mut self, events: &mut Vec<Event>) -> bool {
        let outside = &mut self.hub.outside;
        let now = outside.now();
        let by_rings = outside.control.poll(now, &mut outside.process);
        let mut any = by_rings;
        let most = match (by_rings, outside.control.has_rings() && self.has_quiet_sockets) {
            (true, _) => WITHOUT_SOCKETS_MAX,
            (false, true) => WITHOUT_SOCKETS,
            (false, false) => 1,
        };
        self.without_sockets += 1;
        if self.without_sockets >= most {
            self.without_sockets = 0;
            self.watch.wait(events, Duration::ZERO);
            self.has_quiet_sockets = events.is_empty();
            any |= !events.is_empty();
            for event in events.iter() {
                self.take(Happened::of(event));
            }
        } else if by_rings {
            // What is to be read is read first: somebody waits for it at either end.
            return true;
        }
        let outside = &mut self.hub.outside;
        for place in 0..outside.carriers.len() as u8 {
            any |= outside.with(place, |carrier, cx| carrier.poll(cx)).unwrap_or(false);
        }
        self.pump() || any
    }

    fn take(&mut self, happened: Happened) {
        let outside = &mut self.hub.outside;
        let now = outside.now();
        match happened {
            Happened { owner: CONTROL, tag } => outside.control.descriptor_ready(now, tag),
            // For the thread that sleeps.
            Happened { owner: WAKE, .. } => {}
            Happened { owner, tag } => {
                outside.with(owner, |carrier, cx| carrier.descriptor_ready(cx, tag));
            }
        }
    }

    /// Does what is due now. Whether there was anything.
    pub(crate) fn pump(&mut self) -> bool {
        let any = self.hub.pump();
        if self.hub.outside.control.take_news_of_rings() && self.asleep_until.is_some() {
            // Whoever sleeps on sockets would not hear of what comes next.
            self.wake();
        }
        any
    }

    /// Something that takes its time, if there is anything.
    pub(crate) fn take_job(&mut self) -> Option<Work> {
        let outside = &mut self.hub.outside;
        if let Some(job) = outside.control.take_job() {
            return Some(Work::Control(job));
        }
        let carriers = outside.carriers.len();
        for step in 1..=carriers {
            let place = (self.turn + step) % carriers;
            if let Some(job) = outside.carriers[place].take_job() {
                self.turn = place;
                return Some(Work::Carrier(place as u8, job));
            }
        }
        None
    }

    pub(crate) fn put_back(&mut self, work: Work) {
        let outside = &mut self.hub.outside;
        match work {
            Work::Control(job) => {
                let now = outside.now();
                outside.control.put_back(now, &mut outside.process, job);
            }
            Work::Carrier(place, job) => {
                outside.with(place, |carrier, cx| carrier.put_back(cx, job));
            }
        }
    }

    /// When there is something to do if nothing comes.
    pub(crate) fn next_tick(&self) -> Duration {
        let outside = &self.hub.outside;
        let now = outside.now();
        let carriers = outside.carriers.iter().filter_map(|carrier| carrier.next_tick(now)).min();
        let control = outside.control.next_tick(&outside.process);
        let own = (!outside.outbox.events.is_empty()).then_some(Duration::ZERO);
        let ticks = [self.hub.transfers.next_tick(), outside.fences.next_tick(), carriers, control, own];
        ticks.into_iter().flatten().min().unwrap_or(Duration::MAX)
    }

    /// Whether something is expected so soon that whoever waits had better look again and again.
    pub(crate) fn is_expecting(&self) -> bool {
        self.hub.outside.carriers.iter().any(|carrier| carrier.is_expecting())
    }

    /// Whoever has something for this process from now on wakes it over a descriptor. False: something is there already.
    pub(crate) fn prepare_to_sleep(&mut self) -> bool {
        let outside = &mut self.hub.outside;
        let mut may_sleep = outside.control.prepare_to_sleep();
        for carrier in &mut outside.carriers {
            may_sleep &= carrier.prepare_to_sleep();
        }
        may_sleep
    }

    /// Nobody need wake this process any more.
    pub(crate) fn woken(&mut self) {
        let outside = &mut self.hub.outside;
        outside.control.woken();
        outside.carriers.iter_mut().for_each(|carrier| carrier.woken());
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut count);
    }

    /// Ends everything, for good: see [`Hub::close`].
    pub(crate) fn close(&mut self) {
        self.hub.close();
        let outside = &mut self.hub.outside;
        let now = outside.now();
        outside.control.end_all(now, &mut outside.process);
        self.pump();
    }

    /// Of a closed hub: asks nobody any more. All that was under way is over.
    pub(crate) fn finish(&mut self) {
        let outside = &mut self.hub.outside;
        outside.end_fences();
        let now = outside.now();
        outside.control.end_fences(now, &mut outside.process);
        while self.pump() {}
    }

    pub(crate) fn descriptor(&self) -> std::io::Result<Descriptor> {
        let outside = &self.hub.outside;
        let addresses = match self.advertised.is_empty() {
            true => outside.control.listens_at()?,
            false => self.advertised.clone(),
        };
        Ok(Descriptor {
            boot_nonce: outside.process.me.boot,
            engine_id: outside.process.me.engine,
            trust: outside.control.proofs.trust.clone(),
            addresses: addresses.into_iter().map(Address::tcp).collect(),
            regions: outside.process.regions.descriptors(),
        })
    }

    /// All ways to a peer; none if there is no such peer.
    pub(crate) fn path_statuses(&self, peer: PeerId) -> Vec<PathStatus> {
        let paths = self.hub.transfers.paths(peer).iter().copied();
        let known = paths.filter_map(|path| self.path_status(peer, path));
        let refusals = self.hub.outside.peer(peer).map_or(&[][..], |peer| &peer.refusals);
        known.chain(refusals.iter().filter_map(|(code, why)| self.refused_status(*code, why))).collect()
    }

    /// A carrier that cannot reach a peer has no path there; why not is to be seen all the same.
    fn refused_status(&self, code: u8, why: &str) -> Option<PathStatus> {
        let outside = &self.hub.outside;
        let name = outside.name_at(outside.place_of(code)?);
        let is_only_one = outside.carriers.len() == 1;
        let trouble = if is_only_one { format!("{name} is required, but {why}") } else { why.to_owned() };
        Some(PathStatus {
            carrier: name,
            address: None,
            is_up: false,
            no_rings: None,
            bytes_per_second: None,
            trouble: Some(trouble),
        })
    }

    fn path_status(&self, peer: PeerId, path: PathId) -> Option<PathStatus> {
        let Hub { transfers, outside, .. } = &self.hub;
        let at = outside.paths.get(&path)?;
        let known = outside.peer(peer)?;
        let control = outside.control.status(known.control);
        let carrier = at.carrier.map(|place| outside.name_at(place));
        let own = at.carrier.is_none().then_some(control).flatten();
        Some(PathStatus {
            carrier: carrier.unwrap_or("control"),
            address: at.address.or_else(|| control.and_then(|control| control.address)),
            is_up: transfers.is_up(path),
            bytes_per_second: transfers.rate(path),
            trouble: own.map_or_else(|| at.trouble.clone(), |control| control.trouble.clone()),
            no_rings: own.and_then(|control| control.no_rings.clone()),
        })
    }
}
