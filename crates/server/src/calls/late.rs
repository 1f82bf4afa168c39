//! Lookups that wait, in a thread of their session: what RAM has is answered meanwhile. They wait for blocks of the SSD tier,
//! for blocks that another engine saves, or for both.
//!
//! ```text
//!  Lookup --> the tier has more of it? another engine saves more of it? --no--> LookupResult
//!                 | yes: fetch             | yes: watch                              ^
//!                 '------------------------+--> LookupPending --> (all came, it      |
//!                                                    ^             failed, or time --'
//!                                                    '- longer? -- is up: look again)
//! ```

use std::{
    collections::{BTreeSet, HashMap},
    io,
    sync::mpsc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use kvlane_proto::v1;
use kvlane_store::OwnerId;

use super::{
    hand_off::{Turn, Wait},
    outcome::Outcome,
    table::Call,
};
use crate::sessions::Busy;

/// Lookups of a session that may wait at the same time; of more, each is answered with what RAM has.
const WAITING_MAX: usize = 4096;

/// A lookup that waits.
pub(crate) struct Late {
    pub(crate) id: u64,
    pub(crate) lookup: v1::Lookup,
    pub(crate) owner: OwnerId,
    pub(crate) call: Call,
    pub(crate) since: Instant,
    /// While blocks come from the SSD: when it waits for them no more.
    pub(crate) fetch_until: Option<Instant>,
    /// While it waits for another engine. Kept until the answer, with its lease on what was there before.
    pub(crate) hand_off: Option<Wait>,
    /// That wait is over.
    pub(crate) is_handed_over: bool,
    pub(crate) _busy: Busy,
}

impl Late {
    fn is_over(&self) -> bool {
        self.fetch_until.is_none() && (self.hand_off.is_none() || self.is_handed_over)
    }

    /// When there is something to do, if nothing happens.
    fn wake_at(&self) -> Option<Instant> {
        let hand_off = self.hand_off.as_ref().filter(|_| !self.is_handed_over);
        self.fetch_until.into_iter().chain(hand_off.map(|wait| wait.clock.wake_at())).min()
    }

    /// Looks at the time and at what has happened. Answers what the engine is to be told of the time that it takes, in ms.
    fn turn(&mut self, now: Instant) -> Option<u32> {
        self.fetch_until.take_if(|until| *until <= now);
        let wait = self.hand_off.as_mut().filter(|_| !self.is_handed_over)?;
        match wait.turn(now) {
            Turn::Waits(longer) => {
                let fetch = self.fetch_until.map(|until| until.saturating_duration_since(now));
                let longest = longer.map(|longer| fetch.map_or(longer, |fetch| fetch.max(longer)))?;
                Some(wait_ms(longest))
            }
            Turn::Over => {
                self.is_handed_over = true;
                None
            }
        }
    }
}

/// Milliseconds for the wire, rounded up.
pub(crate) fn wait_ms(wait: Duration) -> u32 {
    u32::try_from(wait.as_micros().div_ceil(1000)).unwrap_or(u32::MAX)
}

/// Numbers a lookup that waits; the peer's own numbers may repeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Number(u64);

enum Event {
    Asked(Number, Box<Late>),
    /// All blocks that the SSD has of it have come, or failed.
    Fetched(Number),
    /// Something happened to what another engine saves.
    Stirred(Number),
    Stop,
}

/// Whom late lookups are answered to.
pub(crate) trait Answering: Send + 'static {
    /// Looks up what RAM has now, and sends it.
    fn answer(&self, late: Late);
    /// Says that an answer takes longer.
    fn send_pending(&self, id: u64, wait_ms: u32);
}

/// Answers the late lookups of one session.
pub(crate) struct LateLookups {
    events: mpsc::Sender<Event>,
    lookups: u64,
    thread: Option<JoinHandle<()>>,
}

impl LateLookups {
    /// For the session of one scheduler.
    pub(crate) fn start(answering: impl Answering) -> io::Result<Self> {
        let (events, come) = mpsc::channel();
        let run = move || serve(&come, &answering);
        let thread = std::thread::Builder::new().name("kvlane-late".into()).spawn(run)?;
        Ok(Self { events, lookups: 0, thread: Some(thread) })
    }

    /// A number for a lookup that is about to wait.
    pub(crate) fn number(&mut self) -> Number {
        self.lookups += 1;
        Number(self.lookups)
    }

    /// To be called when the blocks of the SSD have come. Calls for a lookup that has been answered do nothing.
    pub(crate) fn fetched(&self, number: Number) -> impl FnOnce() + Send + use<> + 'static {
        let events = self.events.clone();
        // Fails only after the session's end.
        move || drop(events.send(Event::Fetched(number)))
    }

    /// To be called when the lookup's wait for another engine has to be looked at.
    pub(crate) fn stirred(&self, number: Number) -> impl Fn() + Send + Sync + use<> + 'static {
        let events = self.events.clone();
        move || drop(events.send(Event::Stirred(number)))
    }

    /// Answers it when it has nothing more to wait for.
    ///
    /// # Errors
    /// The thread has ended: nobody answers it.
    pub(crate) fn push(&self, number: Number, late: Late) -> io::Result<()> {
        let asked = self.events.send(Event::Asked(number, Box::new(late)));
        asked.map_err(|_| io::Error::other("the thread that answers late lookups has ended"))
    }
}

impl Drop for LateLookups {
    fn drop(&mut self) {
        // The channel itself stays open as long as something is being fetched.
        let _ = self.events.send(Event::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("a thread of late lookups had panicked");
        }
    }
}

/// Those that wait, and when each is to be looked at if nothing happens.
#[derive(Default)]
struct Waiting {
    lookups: HashMap<Number, Late>,
    wakes: BTreeSet<(Instant, Number)>,
}

impl Waiting {
    fn add(&mut self, number: Number, late: Late) {
        self.wakes.extend(late.wake_at().map(|at| (at, number)));
        self.lookups.insert(number, late);
    }

    fn next(&self) -> Option<Instant> {
        self.wakes.first().map(|(at, _)| *at)
    }

    fn due(&self, now: Instant) -> Vec<Number> {
        self.wakes.iter().take_while(|(at, _)| *at <= now).map(|(_, number)| *number).collect()
    }

    /// Looks at one. It may have been answered already.
    fn look_at(&mut self, number: Number, is_fetched: bool, now: Instant, answering: &impl Answering) {
        let Some(late) = self.lookups.get_mut(&number) else { return };
        if let Some(at) = late.wake_at() {
            self.wakes.remove(&(at, number));
        }
        late.fetch_until.take_if(|_| is_fetched);
        if let Some(wait_ms) = late.turn(now) {
            answering.send_pending(late.id, wait_ms);
        }
        if !late.is_over() {
            self.wakes.extend(late.wake_at().map(|at| (at, number)));
        } else if let Some(late) = self.lookups.remove(&number) {
            answering.answer(late);
        }
    }
}

fn serve(events: &mpsc::Receiver<Event>, answering: &impl Answering) {
    let mut waiting = Waiting::default();
    loop {
        let event = match waiting.next() {
            Some(next) => events.recv_timeout(next.saturating_duration_since(Instant::now())),
            None => events.recv().map_err(mpsc::RecvTimeoutError::from),
        };
        let now = Instant::now();
        match event {
            Ok(Event::Asked(_, mut late)) if waiting.lookups.len() >= WAITING_MAX => {
                if let Some(wait) = &mut late.hand_off {
                    wait.over(Outcome::TooMany, now);
                }
                answering.answer(*late);
            }
            Ok(Event::Asked(number, late)) => {
                waiting.add(number, *late);
                // What happened before woke nobody.
                waiting.look_at(number, false, now, answering);
            }
            Ok(Event::Fetched(number)) => waiting.look_at(number, true, now, answering),
            Ok(Event::Stirred(number)) => waiting.look_at(number, false, now, answering),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                for number in waiting.due(now) {
                    waiting.look_at(number, false, now, answering);
                }
            }
            Ok(Event::Stop) | Err(mpsc::RecvTimeoutError::Disconnected) => return,
        }
    }
}
