//! Simulated time, and what hosts share: the messages on their way, who reaches whom, and the windows on their memory.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane_block::PoolExtent;
use kvlane_memory::Arena;
use kvlane_store::LeaseId;

use super::dice::Dice;
use super::faults::Fault;
use crate::messages::Message;

/// The longest that a message takes.
const LATE_MS: u64 = 400;

/// One run of one host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Address {
    pub(crate) host: usize,
    pub(crate) run: u64,
}

/// A host has to do it at some time.
pub(crate) enum Event {
    Deliver {
        from: Address,
        to: Address,
        bytes: Arc<[u8]>,
    },
    QuestionsDue(Address),
    /// The lease of this number has not come for too long.
    LeaseDue(Address, u64),
    /// A part of a READ is copied.
    Copy(Address, u64),
    ReadEnds(Address, u64),
    LoansDue(Address),
    /// A window is closed.
    Closed(Address, u32),
    Release(Address, LeaseId),
    LookupDue(Address, u64),
    /// The first finds the second again, or loses it.
    Reaches(usize, usize),
    Loses(usize, usize),
    Plan(Plan),
}

/// It happens to hosts from outside.
pub(crate) enum Plan {
    Lookup {
        host: usize,
        prompt: u8,
        blocks: u16,
    },
    Save {
        host: usize,
        prompt: u8,
        blocks: u16,
    },
    /// A bit of a block changes in the host's memory.
    Damage {
        host: usize,
        prompt: u8,
        block: u16,
    },
    Drop {
        host: usize,
    },
    Restart {
        host: usize,
    },
    Cut {
        hosts: [usize; 2],
        for_ms: u64,
    },
    Mend {
        hosts: [usize; 2],
    },
    Slow {
        host: usize,
        for_ms: u64,
    },
}

/// Memory of a host that one other may read.
pub(crate) struct Window {
    pub(crate) owner: Address,
    pub(crate) arena: Arc<Arena>,
    pub(crate) extents: Vec<PoolExtent>,
    /// READs fail from now on. The memory belongs to its readers until the window is gone.
    pub(crate) is_closing: bool,
}

/// Counts of the events that seeds exist for.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Seen {
    pub(crate) hit_blocks: u64,
    pub(crate) fetched_blocks: u64,
    pub(crate) damaged_blocks: u64,
    pub(crate) late_reads: u64,
    pub(crate) lost_messages: u64,
    pub(crate) repeated_messages: u64,
    pub(crate) expired_questions: u64,
    pub(crate) expired_loans: u64,
    pub(crate) refused_loans: u64,
    pub(crate) waited_loans: u64,
    pub(crate) unwanted_leases: u64,
    pub(crate) left_out: u64,
    pub(crate) evicted_blocks: u64,
    pub(crate) restarts: u64,
}

impl Seen {
    fn all(&mut self) -> [&mut u64; 14] {
        [
            &mut self.hit_blocks,
            &mut self.fetched_blocks,
            &mut self.damaged_blocks,
            &mut self.late_reads,
            &mut self.lost_messages,
            &mut self.repeated_messages,
            &mut self.expired_questions,
            &mut self.expired_loans,
            &mut self.refused_loans,
            &mut self.waited_loans,
            &mut self.unwanted_leases,
            &mut self.left_out,
            &mut self.evicted_blocks,
            &mut self.restarts,
        ]
    }

    pub(crate) fn counts(mut self) -> [u64; 14] {
        self.all().map(|count| *count)
    }

    pub(crate) fn add(&mut self, other: &Seen) {
        self.all().into_iter().zip(other.counts()).for_each(|(count, more)| *count += more);
    }
}

/// Runs that one host said it has, of a part of a question: by who asked, the number, who answered, and the part's start.
pub(crate) type Said = HashMap<(Address, u64, usize, u32), Vec<Vec<Range<u32>>>>;

pub(crate) struct Net {
    pub(crate) dice: Dice,
    pub(crate) fault: Fault,
    pub(crate) now: Duration,
    start: Instant,
    /// The run of each host that is alive.
    pub(crate) runs: Vec<u64>,
    /// The run of the second host that the first one has reached.
    pub(crate) reached: BTreeMap<(usize, usize), u64>,
    pub(crate) cuts: BTreeSet<[usize; 2]>,
    /// Until then messages to a host wait.
    pub(crate) slow_until: Vec<Duration>,
    pub(crate) windows: BTreeMap<u32, Window>,
    /// Those whose owner ended the loan before its borrower returned it.
    pub(crate) expired_windows: BTreeSet<u32>,
    last_window: u32,
    pub(crate) said: Said,
    pub(crate) seen: Seen,
    /// The first broken promise.
    pub(crate) wrong: Option<String>,
    lost_one_in: Option<u64>,
    late_one_in: Option<u64>,
    repeated_one_in: Option<u64>,
    queue: BTreeMap<(Duration, u64), Event>,
    queued: u64,
}

impl Net {
    pub(crate) fn new(seed: u64, fault: Fault, hosts: usize) -> Net {
        let mut dice = Dice(seed);
        let mut often = || match dice.below(3) {
            0 => None,
            1 => Some(40),
            _ => Some(8),
        };
        let (lost_one_in, late_one_in, repeated_one_in) = (often(), often(), often());
        let all = (0..hosts).flat_map(|one| (0..hosts).map(move |other| (one, other)));
        Net {
            dice,
            fault,
            now: Duration::ZERO,
            start: Instant::now(),
            runs: vec![0; hosts],
            reached: all.filter(|(one, other)| one != other).map(|pair| (pair, 0)).collect(),
            cuts: BTreeSet::new(),
            slow_until: vec![Duration::ZERO; hosts],
            windows: BTreeMap::new(),
            expired_windows: BTreeSet::new(),
            last_window: 0,
            said: HashMap::new(),
            seen: Seen::default(),
            wrong: None,
            lost_one_in,
            late_one_in,
            repeated_one_in,
            queue: BTreeMap::new(),
            queued: 0,
        }
    }

    pub(crate) fn instant(&self) -> Instant {
        self.start + self.now
    }

    pub(crate) fn since_start(&self, instant: Instant) -> Duration {
        instant.saturating_duration_since(self.start)
    }

    pub(crate) fn at(&mut self, at: Duration, event: Event) {
        self.queued += 1;
        self.queue.insert((at.max(self.now), self.queued), event);
    }

    pub(crate) fn after(&mut self, least_ms: u64, most_ms: u64, event: Event) {
        let delay = self.dice.ms(least_ms, most_ms);
        self.at(self.now + delay, event);
    }

    /// The next event, at whose time it is then.
    pub(crate) fn next(&mut self) -> Option<Event> {
        let ((at, _), event) = self.queue.pop_first()?;
        self.now = at;
        Some(event)
    }

    pub(crate) fn is_wrong(&mut self, why: impl Into<String>) {
        self.wrong.get_or_insert_with(|| why.into());
    }

    pub(crate) fn is_alive(&self, address: Address) -> bool {
        self.runs[address.host] == address.run
    }

    pub(crate) fn is_cut(&self, one: usize, other: usize) -> bool {
        self.cuts.contains(&[one.min(other), one.max(other)])
    }

    /// The other host, while it is reached.
    pub(crate) fn peer(&self, from: usize, to: usize) -> Option<Address> {
        self.reached.get(&(from, to)).map(|run| Address { host: to, run: *run })
    }

    /// Messages have no order. They are lost, late and repeated.
    pub(crate) fn send(&mut self, from: Address, to: usize, message: Message) {
        let Some(to) = self.peer(from.host, to) else { return };
        let draw = |dice: &mut Dice, one_in: Option<u64>| one_in.is_some_and(|count| dice.one_in(count));
        if self.is_cut(from.host, to.host) || draw(&mut self.dice, self.lost_one_in) {
            self.seen.lost_messages += 1;
            return;
        }
        let bytes: Arc<[u8]> = message.encode().into();
        let copies = 1 + u64::from(draw(&mut self.dice, self.repeated_one_in));
        self.seen.repeated_messages += copies - 1;
        for _ in 0..copies {
            let most = if draw(&mut self.dice, self.late_one_in) { LATE_MS } else { 2 };
            self.after(0, most, Event::Deliver { from, to, bytes: Arc::clone(&bytes) });
        }
    }

    pub(crate) fn open_window(
        &mut self,
        owner: Address,
        arena: &Arc<Arena>,
        extents: Vec<PoolExtent>,
    ) -> u32 {
        self.last_window += 1;
        let arena = Arc::clone(arena);
        let window = Window { owner, arena, extents, is_closing: false };
        self.windows.insert(self.last_window, window);
        self.last_window
    }

    /// A host begins to write there.
    pub(crate) fn check_unshown(&mut self, host: Address, extent: PoolExtent) {
        let (start, end) = (extent.offset.0, extent.offset.0 + extent.bytes);
        let is_shown = self.windows.values().filter(|window| window.owner == host).any(|window| {
            window.extents.iter().any(|shown| shown.offset.0 < end && start < shown.offset.0 + shown.bytes)
        });
        if is_shown {
            self.is_wrong("an extent was reused that a window shows");
        }
    }
}
