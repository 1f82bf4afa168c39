//! The hub over real sockets: what an engine's threads do in each turn, with epoll, jobs, sleep and the close.

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

/// Owner number of the control connections in the watch. Carriers have their index.
pub(crate) const CONTROL: u8 = 254;
/// Owner number of the eventfd that only wakes a sleeping thread.
const WAKE: u8 = 255;
/// Polls of busy rings before sockets are polled once. Polling sockets is a system call, which takes as long as several polls
/// of rings.
const BUSY_RING_POLLS_MAX: u32 = 32;
/// The same while neither rings nor sockets bring anything.
const IDLE_RING_POLLS_MAX: u32 = 8;

#[derive(Debug)]
pub(crate) struct SocketHub {
    pub(crate) hub: Hub<ControlSockets>,
    watch: Watch,
    wake: OwnedFd,
    /// Told to peers instead of the addresses that this process listens on.
    advertised: Vec<SocketAddr>,
    /// Polls in a row that left the sockets out.
    polls_without_sockets: u32,
    /// The last poll of sockets found nothing.
    has_quiet_sockets: bool,
    /// A socket of a job of another thread is ready, as the last poll of sockets has found. Until that job has read it, the
    /// watch wakes at once whoever sleeps on it.
    pub(crate) waits_for_job: bool,
    /// Index of the carrier whose job ran last; the others come first.
    turn: usize,
    /// How long the lock was held each time, if that is measured.
    pub(crate) holds: Option<Vec<HoldTime>>,
    /// The engine's thread sleeps until then if nothing happens.
    pub(crate) asleep_until: Option<Duration>,
}

/// A job and its owner.
#[allow(
    clippy::large_enum_variant,
    reason = "there is one at a time, and a box would be an allocation for each"
)]
pub(crate) enum HubJob {
    Control(LinkJob),
    Carrier(u8, Box<dyn Job>),
}

impl HubJob {
    /// Runs it, without the lock.
    pub(crate) fn run(&mut self) {
        crate::audit::takes_time("a job");
        match self {
            HubJob::Control(job) => job.run(),
            HubJob::Carrier(_, job) => job.run(),
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
            polls_without_sockets: 0,
            has_quiet_sockets: false,
            waits_for_job: false,
            turn: 0,
            holds: None,
            asleep_until: None,
        })
    }

    pub(crate) fn watch(&self) -> Watch {
        self.watch.clone()
    }

    /// The hub's time at that instant. An instant in the past counts as now.
    pub(crate) fn time_of(&self, instant: Instant) -> Duration {
        self.hub.now().saturating_add(instant.saturating_duration_since(Instant::now()))
    }

    /// Sets the hub's time to now. It stands still until the next call.
    pub(crate) fn read_clock(&mut self) {
        self.hub.outside.clock.read();
    }

    /// Wakes the thread that sleeps for this hub.
    pub(crate) fn wake(&self) {
        // A full eventfd counter is readable too, so a failed write loses nothing.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Makes the next poll include the sockets.
    pub(crate) fn poll_sockets_next(&mut self) {
        self.polls_without_sockets = BUSY_RING_POLLS_MAX;
    }

    /// Takes what has arrived, without waiting, and does what is due. Whether anything happened.
    pub(crate) fn poll(&mut self, events: &mut Vec<Event>) -> bool {
        let outside = &mut self.hub.outside;
        let now = outside.now();
        let by_rings = outside.control.poll(now, &mut outside.process);
        let mut any = by_rings;
        let most = match (by_rings, outside.control.has_rings() && self.has_quiet_sockets) {
            (true, _) => BUSY_RING_POLLS_MAX,
            (false, true) => IDLE_RING_POLLS_MAX,
            (false, false) => 1,
        };
        self.polls_without_sockets += 1;
        if self.polls_without_sockets >= most {
            self.polls_without_sockets = 0;
            self.watch.wait(events, Duration::ZERO);
            let handled = events.iter().filter(|event| self.handle(Happened::of(event))).count();
            self.has_quiet_sockets = events.is_empty();
            self.waits_for_job = handled < events.len();
            any |= handled > 0;
        } else if by_rings {
            // Read the rings first: a thread waits at either end of them.
            return true;
        }
        let outside = &mut self.hub.outside;
        for index in 0..outside.carriers.len() as u8 {
            any |= outside.with(index, |carrier, cx| carrier.poll(cx)).unwrap_or(false);
        }
        self.pump() || any
    }

    /// False: what happened waits for the end of a job.
    fn handle(&mut self, happened: Happened) -> bool {
        let outside = &mut self.hub.outside;
        let now = outside.now();
        match happened {
            Happened { owner: CONTROL, tag } => outside.control.descriptor_ready(now, tag),
            // The eventfd has done its work by waking.
            Happened { owner: WAKE, .. } => true,
            Happened { owner, tag } => {
                outside.with(owner, |carrier, cx| carrier.descriptor_ready(cx, tag)).unwrap_or(true)
            }
        }
    }

    /// Does what is due now. Whether there was anything.
    pub(crate) fn pump(&mut self) -> bool {
        let any = self.hub.pump();
        if self.hub.outside.control.take_wake_needed() && self.asleep_until.is_some() {
            // The thread sleeps on sockets, which say nothing about new rings.
            self.wake();
        }
        any
    }

    /// The next job, control connections first, then the carriers in turn.
    pub(crate) fn take_job(&mut self) -> Option<HubJob> {
        let outside = &mut self.hub.outside;
        if let Some(job) = outside.control.take_job() {
            return Some(HubJob::Control(job));
        }
        let carriers = outside.carriers.len();
        for step in 1..=carriers {
            let index = (self.turn + step) % carriers;
            if let Some(job) = outside.carriers[index].take_job() {
                self.turn = index;
                return Some(HubJob::Carrier(index as u8, job));
            }
        }
        None
    }

    pub(crate) fn put_back(&mut self, work: HubJob) {
        let outside = &mut self.hub.outside;
        match work {
            HubJob::Control(job) => {
                let now = outside.now();
                outside.control.put_back(now, &mut outside.process, job);
            }
            HubJob::Carrier(index, job) => {
                outside.with(index, |carrier, cx| carrier.put_back(cx, job));
            }
        }
    }

    /// When [`SocketHub::poll`] has something to do if nothing arrives.
    pub(crate) fn next_tick(&self) -> Duration {
        let outside = &self.hub.outside;
        let now = outside.now();
        let carriers = outside.carriers.iter().filter_map(|carrier| carrier.next_tick(now)).min();
        let control = outside.control.next_tick(&outside.process);
        let own = (!outside.outbox.events.is_empty()).then_some(Duration::ZERO);
        let ticks = [self.hub.transfers.next_tick(), outside.fences.next_tick(), carriers, control, own];
        ticks.into_iter().flatten().min().unwrap_or(Duration::MAX)
    }

    /// Whether something will happen so soon that a waiting thread should poll rather than sleep.
    pub(crate) fn is_expecting(&self) -> bool {
        self.hub.outside.carriers.iter().any(|carrier| carrier.is_expecting())
    }

    /// From now on whatever arrives makes a descriptor readable. False: something is there already.
    pub(crate) fn prepare_to_sleep(&mut self) -> bool {
        let outside = &mut self.hub.outside;
        let mut may_sleep = outside.control.prepare_to_sleep();
        for carrier in &mut outside.carriers {
            may_sleep &= carrier.prepare_to_sleep();
        }
        may_sleep
    }

    /// The thread is awake: peers and copies need not write to descriptors any more.
    pub(crate) fn woken(&mut self) {
        let outside = &mut self.hub.outside;
        outside.control.woken();
        outside.carriers.iter_mut().for_each(|carrier| carrier.woken());
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut count);
    }

    /// Ends everything for good; see [`Hub::close`].
    pub(crate) fn close(&mut self) {
        self.hub.close();
        let outside = &mut self.hub.outside;
        let now = outside.now();
        outside.control.end_all(now, &mut outside.process);
        self.pump();
    }

    /// Ends what [`SocketHub::close`] left: gives up the fences, so that everything in flight is over.
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

    /// All paths to a peer, then the carriers that cannot reach it. None if there is no such peer.
    pub(crate) fn path_statuses(&self, peer: PeerId) -> Vec<PathStatus> {
        let paths = self.hub.transfers.paths(peer).iter().copied();
        let known = paths.filter_map(|path| self.path_status(peer, path));
        let refusals = self.hub.outside.peer(peer).map_or(&[][..], |peer| &peer.refusals);
        known.chain(refusals.iter().filter_map(|(code, why)| self.refused_status(*code, why))).collect()
    }

    /// Shows a carrier that cannot reach the peer, and so has no path, with the reason.
    fn refused_status(&self, code: u8, why: &str) -> Option<PathStatus> {
        let outside = &self.hub.outside;
        let name = outside.name_of(outside.index_of(code)?);
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
        let carrier = at.carrier.map(|index| outside.name_of(index));
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
