//! Lookups that wait for blocks of the SSD tier, in a thread of their session: what RAM has is answered meanwhile.
//!
//! ```text
//!  Lookup --> the tier has more of it? --no--> LookupResult
//!                 | yes: fetch                      ^
//!                 '--> LookupPending --> (all came, or time is up: look again)
//! ```

use std::{collections::HashMap, io, sync::mpsc, thread::JoinHandle, time::Instant};

use kvlane_proto::v1;
use kvlane_store::OwnerId;

use super::table::Call;
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
    /// When it is answered at the latest.
    pub(crate) until: Instant,
    pub(crate) _busy: Busy,
}

/// Numbers what one lookup waits for; the peer's own numbers may repeat.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Fetch(u64);

enum Event {
    Asked(Fetch, Box<Late>),
    /// All blocks of it have come, or failed.
    Came(Fetch),
    Stop,
}

/// Answers the late lookups of one session.
pub(crate) struct LateLookups {
    events: mpsc::Sender<Event>,
    fetches: u64,
    thread: Option<JoinHandle<()>>,
}

impl LateLookups {
    /// For the session of one scheduler; `answer` looks up what RAM has now, and sends it.
    pub(crate) fn start(answer: impl Fn(Late) + Send + 'static) -> io::Result<Self> {
        let (events, come) = mpsc::channel();
        let run = move || serve(&come, answer);
        let thread = std::thread::Builder::new().name("kvlane-late".into()).spawn(run)?;
        Ok(Self { events, fetches: 0, thread: Some(thread) })
    }

    /// Answers it when its blocks have come, which is told by calling what this answers, or in time.
    ///
    /// # Errors
    /// The thread has ended: nobody answers it.
    pub(crate) fn push(&mut self, late: Late) -> io::Result<impl FnOnce() + Send + 'static> {
        self.fetches += 1;
        let (fetch, events) = (Fetch(self.fetches), self.events.clone());
        let asked = events.send(Event::Asked(fetch, Box::new(late)));
        asked.map_err(|_| io::Error::other("the thread that answers late lookups has ended"))?;
        Ok(move || {
            // Fails only after the session's end.
            let _ = events.send(Event::Came(fetch));
        })
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

fn serve(events: &mpsc::Receiver<Event>, answer: impl Fn(Late)) {
    let mut waiting: HashMap<Fetch, Late> = HashMap::new();
    loop {
        let next = waiting.values().map(|late| late.until).min();
        let event = match next {
            Some(next) => events.recv_timeout(next.saturating_duration_since(Instant::now())),
            None => events.recv().map_err(mpsc::RecvTimeoutError::from),
        };
        match event {
            Ok(Event::Asked(_, late)) if waiting.len() >= WAITING_MAX => answer(*late),
            Ok(Event::Asked(fetch, late)) => drop(waiting.insert(fetch, *late)),
            // It may have been answered in time already.
            Ok(Event::Came(fetch)) => waiting.remove(&fetch).into_iter().for_each(&answer),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let now = Instant::now();
                let due: Vec<Fetch> =
                    waiting.iter().filter(|(_, late)| late.until <= now).map(|(fetch, _)| *fetch).collect();
                due.iter().filter_map(|fetch| waiting.remove(fetch)).for_each(&answer);
            }
            Ok(Event::Stop) | Err(mpsc::RecvTimeoutError::Disconnected) => return,
        }
    }
}
