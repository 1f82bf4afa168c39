//! Late lookups: those that wait for blocks of a source (an SSD, another host), for blocks that another engine saves, or
//! for both. A thread of
//! the session answers them, so that other lookups are answered meanwhile.
//!
//! ```text
//!  Lookup --> does a source have more? does another engine save more? --no--> LookupResult
//!                 | yes: fetch             | yes: watch                              ^
//!                 '------------------------+--> LookupPending --> all came, one      |
//!                                                    ^            failed, or the ----'
//!                                                    '- longer? - deadline passed: look up now
//! ```

use std::{
    collections::{BTreeSet, HashMap},
    io,
    sync::mpsc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use kvlane_proto::v1;
use kvlane_store::{FetchPlan, OwnerId, PlannedRun};

use super::{
    awaited_save::{Polled, Wait},
    outcome::WaitOutcome,
    table::Call,
};
use crate::sessions::Busy;

/// Most lookups of a session that wait at the same time. Beyond that, each is answered at once with what RAM has.
const WAITING_MAX: usize = 4096;

/// A lookup that waits.
pub(crate) struct LateLookup {
    /// The request's number.
    pub(crate) id: u64,
    pub(crate) lookup: v1::Lookup,
    pub(crate) owner: OwnerId,
    pub(crate) call: Call,
    /// When the request was read.
    pub(crate) since: Instant,
    /// Deadline of the fetch. None without a fetch, and once it is over.
    pub(crate) fetch_until: Option<Instant>,
    /// The blocks that the fetch brings, group by group.
    pub(crate) planned: Vec<Vec<PlannedRun>>,
    /// The wait for another engine's saves. Kept until the answer, because it leases the prefix that was visible before.
    pub(crate) save_wait: Option<Wait>,
    /// That wait is over.
    pub(crate) is_save_wait_over: bool,
    pub(crate) _busy: Busy,
}

impl LateLookup {
    fn is_over(&self) -> bool {
        self.fetch_until.is_none() && (self.save_wait.is_none() || self.is_save_wait_over)
    }

    /// When to poll it if no event comes.
    fn wake_at(&self) -> Option<Instant> {
        let save_wait = self.save_wait.as_ref().filter(|_| !self.is_save_wait_over);
        self.fetch_until.into_iter().chain(save_wait.map(|wait| wait.clock.wake_at())).min()
    }

    /// Takes events and checks deadlines. Returns the time left, in ms, if the engine is to be sent a later deadline.
    fn poll(&mut self, now: Instant) -> Option<u32> {
        self.fetch_until.take_if(|until| *until <= now);
        let wait = self.save_wait.as_mut().filter(|_| !self.is_save_wait_over)?;
        match wait.poll(now) {
            Polled::Waits(longer) => {
                let fetch = self.fetch_until.map(|until| until.saturating_duration_since(now));
                let longest = longer.map(|longer| fetch.map_or(longer, |fetch| fetch.max(longer)))?;
                Some(wait_ms(longest))
            }
            Polled::Over => {
                self.is_save_wait_over = true;
                None
            }
        }
    }
}

/// Milliseconds for the wire, rounded up.
pub(crate) fn wait_ms(wait: Duration) -> u32 {
    u32::try_from(wait.as_micros().div_ceil(1000)).unwrap_or(u32::MAX)
}

/// Identifies a late lookup of a session. The request's number would not do, because the peer may repeat it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LateNumber(u64);

type OnFetched = Box<dyn FnOnce() + Send>;

enum LateEvent {
    Added(LateNumber, Box<LateLookup>),
    /// A source has answered that it has more. The callback is for the fetch.
    Found(LateNumber, Box<FetchPlan>, OnFetched),
    /// All blocks of its fetch have come or failed.
    Fetched(LateNumber),
    /// The signal of its wait for another engine's saves.
    Signalled(LateNumber),
    Stop,
}

/// Sends the answers of late lookups to their engine.
pub(crate) trait Answering: Send + 'static {
    /// Looks up what RAM has now, and sends it.
    fn answer(&self, late: LateLookup);
    /// Sends a later deadline: the answer may take so long from now.
    fn send_pending(&self, id: u64, wait_ms: u32);
    /// The blocks that a fetch brings, group by group.
    fn planned(&self, plan: &FetchPlan) -> Vec<Vec<PlannedRun>>;
    /// Fetches blocks for an engine that computes so many tokens in a second (0: not known). Calls `fetched` once they
    /// have come or failed, or if none is fetched.
    fn fetch(&self, plan: FetchPlan, tokens_per_s: u32, deadline: Instant, fetched: OnFetched);
}

/// Answers the late lookups of one session.
pub(crate) struct LateLookups {
    events: mpsc::Sender<LateEvent>,
    /// Lookups that have been numbered.
    lookups: u64,
    thread: Option<JoinHandle<()>>,
}

impl LateLookups {
    /// Starts the thread, for the session of one scheduler.
    pub(crate) fn start(answering: impl Answering) -> io::Result<Self> {
        let (events, receiver) = mpsc::channel();
        let run = move || serve(&receiver, &answering);
        let thread = std::thread::Builder::new().name("kvlane-late".into()).spawn(run)?;
        Ok(Self { events, lookups: 0, thread: Some(thread) })
    }

    /// Numbers a lookup that is about to wait.
    pub(crate) fn number(&mut self) -> LateNumber {
        self.lookups += 1;
        LateNumber(self.lookups)
    }

    /// The callback for a lookup's fetch. Does nothing once the lookup is answered.
    pub(crate) fn on_fetched(&self, number: LateNumber) -> impl FnOnce() + Send + use<> + 'static {
        let events = self.events.clone();
        // Fails only after the session's end.
        move || drop(events.send(LateEvent::Fetched(number)))
    }

    /// The callback for the sources' answer, if that comes later than the lookup's thread waits. Does nothing once the lookup
    /// is answered.
    pub(crate) fn on_found(
        &self,
        number: LateNumber,
    ) -> impl FnOnce(Option<FetchPlan>) + Send + use<> + 'static {
        let events = self.events.clone();
        let fetched = self.on_fetched(number);
        move |plan| match plan {
            Some(plan) => drop(events.send(LateEvent::Found(number, Box::new(plan), Box::new(fetched)))),
            None => fetched(),
        }
    }

    /// The wake-up for a lookup's wait for another engine's saves. Does nothing once the lookup is answered.
    pub(crate) fn on_signal(&self, number: LateNumber) -> impl Fn() + Send + Sync + use<> + 'static {
        let events = self.events.clone();
        move || drop(events.send(LateEvent::Signalled(number)))
    }

    /// Hands a lookup to the thread, which answers it once it has nothing more to wait for.
    ///
    /// # Errors
    /// The thread has ended, so the lookup is not answered.
    pub(crate) fn push(&self, number: LateNumber, late: LateLookup) -> io::Result<()> {
        let sent = self.events.send(LateEvent::Added(number, Box::new(late)));
        sent.map_err(|_| io::Error::other("the thread that answers late lookups has ended"))
    }
}

impl Drop for LateLookups {
    fn drop(&mut self) {
        // Fetches hold senders, so the channel does not close by itself.
        let _ = self.events.send(LateEvent::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            // Log: a bug: lookups of one engine that waited were not answered, and timed out as misses. Do:
            // report it, with the daemon's log.
            tracing::error!("thread kvlane-late panicked");
        }
    }
}

/// The lookups that wait.
#[derive(Default)]
struct WaitingLookups {
    lookups: HashMap<LateNumber, LateLookup>,
    /// When to poll each if no event comes.
    wakes: BTreeSet<(Instant, LateNumber)>,
}

impl WaitingLookups {
    fn add(&mut self, number: LateNumber, late: LateLookup) {
        self.wakes.extend(late.wake_at().map(|at| (at, number)));
        self.lookups.insert(number, late);
    }

    fn next(&self) -> Option<Instant> {
        self.wakes.first().map(|(at, _)| *at)
    }

    fn due(&self, now: Instant) -> Vec<LateNumber> {
        self.wakes.iter().take_while(|(at, _)| *at <= now).map(|(_, number)| *number).collect()
    }

    /// Polls a lookup, and answers it if it is over. Does nothing if it has been answered already.
    fn poll(&mut self, number: LateNumber, is_fetched: bool, now: Instant, answering: &impl Answering) {
        let Some(late) = self.lookups.get_mut(&number) else { return };
        if let Some(at) = late.wake_at() {
            self.wakes.remove(&(at, number));
        }
        late.fetch_until.take_if(|_| is_fetched);
        if let Some(wait_ms) = late.poll(now) {
            answering.send_pending(late.id, wait_ms);
        }
        if !late.is_over() {
            self.wakes.extend(late.wake_at().map(|at| (at, number)));
        } else if let Some(late) = self.lookups.remove(&number) {
            answering.answer(late);
        }
    }
}

fn serve(events: &mpsc::Receiver<LateEvent>, answering: &impl Answering) {
    let mut waiting = WaitingLookups::default();
    loop {
        let event = match waiting.next() {
            Some(next) => events.recv_timeout(next.saturating_duration_since(Instant::now())),
            None => events.recv().map_err(mpsc::RecvTimeoutError::from),
        };
        let now = Instant::now();
        match event {
            Ok(LateEvent::Added(_, mut late)) if waiting.lookups.len() >= WAITING_MAX => {
                if let Some(wait) = &mut late.save_wait {
                    wait.end(WaitOutcome::TooMany, now);
                }
                answering.answer(*late);
            }
            Ok(LateEvent::Added(number, late)) => {
                waiting.add(number, *late);
                // Signals that came before it was added were dropped.
                waiting.poll(number, false, now, answering);
            }
            Ok(LateEvent::Found(number, plan, fetched)) => {
                if let Some(late) = waiting.lookups.get_mut(&number)
                    && let Some(until) = late.fetch_until
                {
                    late.planned = answering.planned(&plan);
                    answering.fetch(*plan, late.lookup.tokens_per_s, until, fetched);
                }
            }
            Ok(LateEvent::Fetched(number)) => waiting.poll(number, true, now, answering),
            Ok(LateEvent::Signalled(number)) => waiting.poll(number, false, now, answering),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                for number in waiting.due(now) {
                    waiting.poll(number, false, now, answering);
                }
            }
            Ok(LateEvent::Stop) | Err(mpsc::RecvTimeoutError::Disconnected) => return,
        }
    }
}
