//! [`Recorder`]: joins lookups and ends of requests, and keeps the last requests for its readers.
//!
//! ```text
//!             looked_up                    ended, or the engine left
//!   (unknown) ---------> open (at most 4,096) ---------------------> ring (the last 4,096) --> read
//!       |                                                              ^
//!       '--- ended without a lookup: lengths only ---------------------'
//! ```
//! A request of an engine that reports no ends goes to the ring at once, without lengths.

use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::{
    numbers::BlockNumbers,
    runs::{Run, push_run},
};

/// Requests in the ring. A slow reader loses the oldest.
const RING_MAX: usize = 4096;
/// Requests whose end has not come. Beyond it, the oldest goes to the ring without lengths.
const OPEN_MAX: usize = 4096;
/// Requests that are remembered after their record, so that what comes late of them makes no second one.
const DONE_MAX: usize = 4096;
/// Runs of a record's looked-up and of its saved blocks. A conversation has two for each turn; further blocks are left out.
const RUNS_MAX: usize = 1024;

/// The meaning of the numbers of a trace's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Grade {
    /// Blocks of the engine's KV cache, as a daemon saw them.
    Blocks,
    /// Parts of the prompts' text, as a router saw them. Their number is an estimate of the tokens.
    Text,
}

/// Blocks of a hit, by the tier that they came from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TierBlocks {
    /// In RAM when the prompt was looked up.
    pub ram: u64,
    /// Fetched from the SSD.
    pub ssd: u64,
    /// Fetched from other hosts.
    pub peers: u64,
}

impl std::ops::AddAssign for TierBlocks {
    fn add_assign(&mut self, other: Self) {
        self.ram += other.ram;
        self.ssd += other.ssd;
        self.peers += other.peers;
    }
}

impl TierBlocks {
    /// Blocks of the whole hit.
    pub fn total(self) -> u64 {
        self.ram + self.ssd + self.peers
    }
}

/// The engine that served a request, when several engines share the work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Leg {
    /// One engine served all of it.
    #[default]
    Whole,
    /// The engine computed the prompt for another one.
    Prefill,
    /// The engine took the prompt over from another one.
    Decode,
}

/// Tokens of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lengths {
    /// Length of the prompt.
    pub prompt: u64,
    /// Length of the answer.
    pub output: u64,
}

/// A prompt that was looked up.
#[derive(Debug)]
pub struct LookedUp {
    /// When it came, on the recorder's clock.
    pub at: Duration,
    /// The engine that asked.
    pub engine: Arc<str>,
    /// Names the blocks' namespace.
    pub model: [u8; 16],
    /// The engine's number of the request; 0 if it has none.
    pub request: u64,
    /// Keys of all full blocks of the prompt.
    pub keys: Vec<u64>,
    /// How many of them, from the first one on, were looked up.
    pub looked_up: usize,
    /// The blocks that were found.
    pub hit: TierBlocks,
    /// Whether the engine reports the ends of its requests.
    pub reports_ends: bool,
}

/// The end of a request.
#[derive(Debug)]
pub struct Ended {
    /// When the request came, on the recorder's clock.
    pub at: Duration,
    /// The engine that served it.
    pub engine: Arc<str>,
    /// Names the namespace of its blocks.
    pub model: [u8; 16],
    /// The engine's number of the request.
    pub request: u64,
    /// The request's tokens.
    pub lengths: Lengths,
    /// Tokens that the engine had in its own cache.
    pub engine_tokens: u64,
    /// Its part in serving the request.
    pub leg: Leg,
    /// Index of the first block in `keys`.
    pub first_block: u64,
    /// Keys of blocks that were saved, from `first_block` on.
    pub keys: Vec<u64>,
}

/// A recorded request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recorded {
    /// When it came, on the recorder's clock.
    pub at: Duration,
    /// The engine that served it.
    pub engine: Arc<str>,
    /// Names the namespace of its blocks.
    pub model: [u8; 16],
    /// The blocks that were looked up, from the prompt's first one on.
    pub blocks: Vec<Run>,
    /// The blocks behind them that were saved: the prompt's last one, and those of the answer.
    pub saved: Vec<Run>,
    /// Which of `blocks` were found.
    pub hit: TierBlocks,
    /// Tokens that the engine had in its own cache.
    pub engine_tokens: u64,
    /// None if the engine did not report the request's end.
    pub lengths: Option<Lengths>,
    /// The engine's part in serving the request.
    pub leg: Leg,
    /// Time from the request to its first token. None if it is not known.
    pub first_token: Option<Duration>,
}

/// A request that has ended, of a recorder that saw all of it.
#[derive(Debug)]
pub struct Whole {
    /// When it came, on the recorder's clock.
    pub at: Duration,
    /// The engine that served it.
    pub engine: Arc<str>,
    /// Names the model.
    pub model: [u8; 16],
    /// Keys of its blocks.
    pub keys: Vec<u64>,
    /// The request's tokens. None if they are not known.
    pub lengths: Option<Lengths>,
    /// Time from the request to its first token. None if it is not known.
    pub first_token: Option<Duration>,
}

/// The answer to a reader.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Read {
    /// For the next read.
    pub cursor: u64,
    /// Requests that left the ring before this reader came.
    pub lost: u64,
    /// In the order in which they ended.
    pub requests: Vec<Recorded>,
    /// There are more already.
    pub has_more: bool,
}

type RequestName = (Arc<str>, u64);

/// Keeps what readers have not read. Memory is bounded: 4,096 requests each, and [`BlockNumbers`].
#[derive(Debug)]
pub struct Recorder {
    numbers: BlockNumbers,
    /// Requests whose end has not come, oldest first.
    open: BTreeMap<u64, (RequestName, Recorded)>,
    /// Place in `open`.
    places: HashMap<RequestName, u64>,
    last_place: u64,
    /// Requests whose record is made before their lookup or end came, oldest first.
    done: VecDeque<RequestName>,
    is_done: HashSet<RequestName>,
    ring: VecDeque<Recorded>,
    /// Requests that have entered the ring.
    entered: u64,
    /// When the recording began, on the recorder's clock.
    since: Duration,
}

impl Recorder {
    /// Begins a recording.
    pub fn new(since: Duration) -> Self {
        Self {
            numbers: BlockNumbers::new(),
            open: BTreeMap::new(),
            places: HashMap::new(),
            last_place: 0,
            done: VecDeque::new(),
            is_done: HashSet::new(),
            ring: VecDeque::new(),
            entered: 0,
            since,
        }
    }

    /// Records a lookup. Another lookup of the same request, before it had blocks, only replaces what was found.
    pub fn looked_up(&mut self, lookup: LookedUp) {
        let LookedUp { at, engine, model, request, keys, looked_up, hit, reports_ends } = lookup;
        let name = (Arc::clone(&engine), request);
        if let Some((_, record)) = self.places.get(&name).and_then(|place| self.open.get_mut(place)) {
            record.hit = hit;
            return;
        }
        if self.is_done.contains(&name) {
            return;
        }
        let (searched, further) = keys.split_at(looked_up.min(keys.len()));
        let (mut blocks, mut saved) = (self.numbers.runs(searched), self.numbers.runs(further));
        if blocks.len() > RUNS_MAX {
            saved.clear();
        }
        blocks.truncate(RUNS_MAX);
        saved.truncate(RUNS_MAX);
        let (lengths, leg, engine_tokens, first_token) = (None, Leg::Whole, 0, None);
        let record =
            Recorded { at, engine, model, blocks, saved, hit, engine_tokens, lengths, leg, first_token };
        if !reports_ends || request == 0 {
            return self.push(record);
        }
        if self.open.len() >= OPEN_MAX
            && let Some((_, (name, record))) = self.open.pop_first()
        {
            self.places.remove(&name);
            self.note_done(name);
            self.push(record);
        }
        self.last_place += 1;
        self.places.insert(name.clone(), self.last_place);
        self.open.insert(self.last_place, (name, record));
    }

    /// Records a request as a whole. One that came before the recording is left out.
    pub fn whole(&mut self, whole: Whole) {
        let Whole { at, engine, model, keys, lengths, first_token } = whole;
        if at < self.since {
            return;
        }
        let mut blocks = self.numbers.runs(&keys);
        blocks.truncate(RUNS_MAX);
        let (saved, hit) = (Vec::new(), TierBlocks::default());
        let (engine_tokens, leg) = (0, Leg::Whole);
        self.push(Recorded {
            at,
            engine,
            model,
            blocks,
            saved,
            hit,
            engine_tokens,
            lengths,
            leg,
            first_token,
        });
    }

    /// Records the end of a request. One that came before the recording is left out.
    pub fn ended(&mut self, ended: Ended) {
        let Ended { at, engine, model, request, lengths, engine_tokens, leg, first_block, keys } = ended;
        let name = (Arc::clone(&engine), request);
        let open = self.places.remove(&name).and_then(|place| self.open.remove(&place));
        let Some((_, mut record)) = open else {
            if at >= self.since && !self.is_done.contains(&name) {
                // Its lookup may still come, if it waited for blocks when the request was aborted.
                self.note_done(name);
                let (blocks, saved, hit) = (Vec::new(), Vec::new(), TierBlocks::default());
                let (lengths, first_token) = (Some(lengths), None);
                self.push(Recorded {
                    at,
                    engine,
                    model,
                    blocks,
                    saved,
                    hit,
                    engine_tokens,
                    lengths,
                    leg,
                    first_token,
                });
            }
            return;
        };
        let known: u64 = record.blocks.iter().chain(&record.saved).map(|run| run.count).sum();
        if first_block <= known && record.blocks.len() < RUNS_MAX {
            let further = keys.get((known - first_block) as usize..).unwrap_or_default();
            self.numbers.runs(further).into_iter().for_each(|run| push_run(&mut record.saved, run));
            record.saved.truncate(RUNS_MAX);
        }
        self.push(Recorded { lengths: Some(lengths), engine_tokens, leg, ..record });
    }

    /// An engine has left: its open requests will not end, and it may begin to count again.
    pub fn engine_left(&mut self, engine: &str) {
        let of_engine: Vec<u64> =
            self.open.iter().filter(|(_, (name, _))| &*name.0 == engine).map(|(place, _)| *place).collect();
        for place in of_engine {
            if let Some((name, record)) = self.open.remove(&place) {
                self.places.remove(&name);
                self.push(record);
            }
        }
        self.done.retain(|name| &*name.0 != engine);
        self.is_done.retain(|name| &*name.0 != engine);
    }

    /// As [`read`](Self::read), for a reader that does not come again: behind the last request come those that have not ended,
    /// without lengths. They stay open for other readers.
    pub fn read_last(&self, cursor: u64, most: usize) -> Read {
        let mut read = self.read(cursor, most);
        if !read.has_more {
            read.requests.extend(self.open.values().map(|(_, record)| record.clone()));
        }
        read
    }

    /// The next requests, at most `most`. A reader begins at cursor 0, and gets what enters the ring from then on.
    pub fn read(&self, cursor: u64, most: usize) -> Read {
        let end = self.entered + 1;
        if cursor == 0 || cursor > end {
            return Read { cursor: end, ..Read::default() };
        }
        let oldest = end - self.ring.len() as u64;
        let from = cursor.max(oldest);
        let unread = self.ring.iter().skip((from - oldest) as usize);
        let requests: Vec<Recorded> = unread.take(most).cloned().collect();
        let cursor_after = from + requests.len() as u64;
        Read { cursor: cursor_after, lost: from - cursor, requests, has_more: cursor_after < end }
    }

    /// When the recording began, on the recorder's clock. It tells recordings apart: their numbers and cursors have nothing to do
    /// with each other. Cursor 1 reads one from its beginning.
    pub fn since(&self) -> Duration {
        self.since
    }

    /// Blocks that were forgotten; see [`BlockNumbers::forgotten`].
    pub fn forgotten_blocks(&self) -> u64 {
        self.numbers.forgotten()
    }

    /// Remembers a request whose record is made.
    fn note_done(&mut self, name: RequestName) {
        // Without a number it is no name.
        if name.1 == 0 || !self.is_done.insert(name.clone()) {
            return;
        }
        self.done.push_back(name);
        if self.done.len() > DONE_MAX
            && let Some(oldest) = self.done.pop_front()
        {
            self.is_done.remove(&oldest);
        }
    }

    fn push(&mut self, record: Recorded) {
        if self.ring.len() >= RING_MAX {
            self.ring.pop_front();
        }
        self.ring.push_back(record);
        self.entered += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runs::ids;

    const SECOND: Duration = Duration::from_secs(1);

    fn lookup(engine: &str, request: u64, keys: &[u64]) -> LookedUp {
        let hit = TierBlocks { ram: 1, ..TierBlocks::default() };
        LookedUp {
            at: 2 * SECOND,
            engine: engine.into(),
            model: [1; 16],
            request,
            keys: keys.to_vec(),
            looked_up: keys.len() - 1,
            hit,
            reports_ends: true,
        }
    }

    fn end(engine: &str, request: u64, at: Duration, keys: &[u64]) -> Ended {
        Ended {
            at,
            engine: engine.into(),
            model: [1; 16],
            request,
            lengths: Lengths { prompt: 40, output: 20 },
            engine_tokens: 16,
            leg: Leg::Whole,
            first_block: 1,
            keys: keys.to_vec(),
        }
    }

    fn numbers(runs: &[Run]) -> Vec<u64> {
        ids(runs).collect()
    }

    #[test]
    fn a_request_is_recorded_once_it_ends() {
        let mut recorder = Recorder::new(SECOND);
        let cursor = recorder.read(0, 10).cursor;
        recorder.looked_up(lookup("a", 7, &[50, 60, 70]));
        assert_eq!(recorder.read(cursor, 10), Read { cursor, ..Read::default() });
        recorder.ended(end("a", 7, 2 * SECOND, &[60, 70, 80, 90]));
        let read = recorder.read(cursor, 10);
        let [record] = &read.requests[..] else { panic!("{read:?}") };
        assert_eq!((numbers(&record.blocks), numbers(&record.saved)), (vec![0, 1], vec![2, 3, 4]));
        assert_eq!(record.lengths, Some(Lengths { prompt: 40, output: 20 }));
        assert_eq!((record.hit.total(), record.engine_tokens), (1, 16));
        assert!(!read.has_more);
        assert_eq!(recorder.read(read.cursor, 10).requests, []);
    }

    #[test]
    fn a_request_that_was_not_looked_up_is_recorded_as_lengths() {
        let mut recorder = Recorder::new(SECOND);
        let cursor = recorder.read(0, 10).cursor;
        recorder.ended(end("a", 7, 2 * SECOND, &[60]));
        recorder.ended(end("a", 8, SECOND / 2, &[60]));
        let read = recorder.read(cursor, 10);
        assert_eq!(read.requests.len(), 1, "the other one came before the recording");
        assert_eq!((&read.requests[0].blocks[..], &read.requests[0].saved[..]), (&[][..], &[][..]));
        assert!(read.requests[0].lengths.is_some());
    }

    #[test]
    fn engines_that_report_no_ends_or_leave_are_recorded_without_lengths() {
        let mut recorder = Recorder::new(SECOND);
        let cursor = recorder.read(0, 10).cursor;
        recorder.looked_up(LookedUp { reports_ends: false, ..lookup("old", 0, &[1, 2]) });
        recorder.looked_up(lookup("a", 1, &[1, 2]));
        recorder.looked_up(lookup("b", 1, &[1, 2]));
        recorder.engine_left("a");
        let engines =
            |read: &Read| read.requests.iter().map(|each| each.engine.to_string()).collect::<Vec<_>>();
        let read = recorder.read(cursor, 10);
        assert_eq!(engines(&read), ["old", "a"]);
        assert!(read.requests.iter().all(|each| each.lengths.is_none()));
        assert_eq!(engines(&recorder.read_last(read.cursor, 10)), ["b"]);
        assert_eq!(engines(&recorder.read(read.cursor, 10)), [""; 0], "it is open for other readers");
    }

    #[test]
    fn a_second_lookup_of_a_request_replaces_what_was_found() {
        let mut recorder = Recorder::new(SECOND);
        let cursor = recorder.read(0, 10).cursor;
        recorder.looked_up(lookup("a", 1, &[1, 2]));
        let hit = TierBlocks { ssd: 9, ..TierBlocks::default() };
        recorder.looked_up(LookedUp { hit, ..lookup("a", 1, &[1, 2, 3, 4]) });
        let read = recorder.read_last(cursor, 10);
        assert_eq!(read.requests.len(), 1);
        assert_eq!((read.requests[0].hit, numbers(&read.requests[0].blocks)), (hit, vec![0]));
    }

    #[test]
    fn a_slow_reader_loses_the_oldest_and_learns_how_many() {
        let mut recorder = Recorder::new(SECOND);
        let cursor = recorder.read(0, 10).cursor;
        let total = (RING_MAX + 10) as u64;
        (1..=total).for_each(|request| recorder.ended(end("a", request, 2 * SECOND, &[])));
        let read = recorder.read(cursor, 100);
        assert_eq!((read.lost, read.requests.len(), read.has_more), (10, 100, true));
        let mut all = read.requests.len();
        let mut cursor = read.cursor;
        loop {
            let read = recorder.read(cursor, 1000);
            assert_eq!(read.lost, 0);
            all += read.requests.len();
            cursor = read.cursor;
            if !read.has_more {
                break;
            }
        }
        assert_eq!(all, RING_MAX);
    }

    #[test]
    fn too_many_open_requests_close_the_oldest() {
        let mut recorder = Recorder::new(SECOND);
        let cursor = recorder.read(0, 10).cursor;
        let total = OPEN_MAX as u64 + 1;
        (1..=total).for_each(|request| recorder.looked_up(lookup("a", request, &[request, 2])));
        assert_eq!(recorder.read(cursor, 10).requests.len(), 1);
        assert_eq!(recorder.open.len(), recorder.places.len());
        recorder.ended(end("a", 1, 2 * SECOND, &[]));
        assert_eq!(recorder.read(cursor, 10).requests.len(), 1, "its record is made already");
    }

    /// A request that was aborted while its lookup waited for blocks had two records.
    #[test]
    fn a_lookup_that_comes_after_the_end_makes_no_second_record() {
        let mut recorder = Recorder::new(SECOND);
        let cursor = recorder.read(0, 10).cursor;
        recorder.ended(end("a", 7, 2 * SECOND, &[]));
        recorder.looked_up(lookup("a", 7, &[1, 2]));
        assert_eq!(recorder.read_last(cursor, 10).requests.len(), 1);
        // Another process of this name counts anew.
        recorder.engine_left("a");
        recorder.looked_up(lookup("a", 7, &[1, 2]));
        assert_eq!(recorder.read_last(cursor, 10).requests.len(), 2);
        (1..=2 * DONE_MAX as u64).for_each(|request| recorder.ended(end("b", request, 2 * SECOND, &[])));
        assert_eq!((recorder.done.len(), recorder.is_done.len()), (DONE_MAX, DONE_MAX));
    }

    #[test]
    fn a_record_has_so_many_runs_at_most() {
        let mut recorder = Recorder::new(SECOND);
        let cursor = recorder.read(0, 10).cursor;
        // Numbers that go down follow no other.
        let keys: Vec<u64> = (0..3 * RUNS_MAX as u64).map(kvlane_policy::spread).collect();
        keys.iter().rev().for_each(|key| drop(recorder.numbers.runs(&[*key])));
        recorder.looked_up(lookup("a", 1, &keys));
        let read = recorder.read_last(cursor, 10);
        assert_eq!((read.requests[0].blocks.len(), read.requests[0].saved.len()), (RUNS_MAX, 0));
    }

    /// A prompt of 8,000 tokens is 500 blocks of 16. In a conversation it is two runs a turn, because other requests come in
    /// between.
    #[test]
    fn the_line_of_a_long_conversation_is_short() {
        const CHATS: u64 = 50;
        const TURNS: u64 = 20;
        let mut recorder = Recorder::new(SECOND);
        let cursor = recorder.read(0, 10).cursor;
        let key = |chat: u64, block: u64| kvlane_policy::spread(chat << 32 | block);
        for turn in 1..=TURNS {
            for chat in 0..CHATS {
                let request = turn * CHATS + chat;
                let prompt = turn * 25 - 5;
                let keys: Vec<u64> = (0..prompt).map(|block| key(chat, block)).collect();
                recorder.looked_up(lookup("engine", request, &keys));
            }
            for chat in 0..CHATS {
                let (prompt, answer) = (turn * 25 - 5, turn * 25);
                let keys: Vec<u64> = (prompt..answer).map(|block| key(chat, block)).collect();
                let ended = end("engine", turn * CHATS + chat, 2 * SECOND, &keys);
                recorder.ended(Ended { first_block: prompt, ..ended });
            }
        }
        let (mut cursor, mut longest, mut most_blocks) = (cursor, 0, 0);
        loop {
            let read = recorder.read(cursor, 1000);
            for request in &read.requests {
                let line = crate::file::RequestLine::new(request, SECOND, (0, 0), 1_000_000).to_line();
                longest = longest.max(line.len());
                most_blocks = most_blocks.max(request.blocks.iter().map(|run| run.count).sum::<u64>());
            }
            cursor = read.cursor;
            if !read.has_more {
                break;
            }
        }
        println!("{longest} bytes for {most_blocks} blocks");
        assert!(most_blocks >= 490 && longest <= 2000, "{longest} bytes for {most_blocks} blocks");
    }
}
