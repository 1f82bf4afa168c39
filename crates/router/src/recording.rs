//! Records the requests that clients send, while `kvlane route record` reads them: times, lengths, and a number for each part
//! of a prompt's text.
//!
//! ```text
//!   body's marks --> blocks of text --> answer begins --> tokens, first token --> answer ends --> Recorder <-- operators' socket
//! ```
//! A block stands for [`MARK_BYTES`] bytes of text. Its key is the first mark at its end or behind it, so blocks of two prompts
//! are equal only if all text up to there is. Recording begins with the first read, and ends 10 s after the last one.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use kvlane_trace::{Lengths, Read, Recorder, Run, Whole};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128};

use crate::body::{MARK_BYTES, Mark};

/// Tokens that a block of text stands for: about four bytes a token.
pub const TOKENS_PER_BLOCK: u32 = (MARK_BYTES / 4) as u32;
/// A recording that nobody has read for so long is over.
const UNREAD_MAX: Duration = Duration::from_secs(10);
/// Most requests in one answer.
const REQUESTS_MAX: usize = 128;
/// Most models with names of their own.
const MODELS_MAX: usize = 1024;

/// A request whose answer has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) began: Instant,
    pub(crate) node: Arc<str>,
    pub(crate) model: Option<String>,
    /// Keys of its text, by [`blocks`].
    pub(crate) keys: Vec<u64>,
    /// None if the answer does not say how long it is.
    pub(crate) lengths: Option<Lengths>,
    pub(crate) first_token: Option<Duration>,
}

/// The answer to a reader, as it goes over the operators' socket.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedPage {
    /// For the next read.
    pub cursor: u64,
    /// Requests that the router dropped before this reader came for them.
    pub lost: u64,
    /// There are more already.
    pub has_more: bool,
    /// Blocks that the recording forgot since it began.
    pub forgotten_blocks: u64,
    /// Milliseconds since 1970 on the router's clock.
    pub now_ms: u64,
    /// When this recording began, in microseconds since 1970. Cursor 1 reads it from its beginning.
    pub began_us: u64,
    /// In the order in which they ended.
    pub requests: Vec<RecordedRequest>,
}

/// A recorded request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedRequest {
    /// When it came, in milliseconds since 1970 on the router's clock.
    pub at_ms: u64,
    /// The node that answered.
    pub node: String,
    /// The model that the request names.
    pub model: String,
    /// Numbers of its blocks: the first number of a run, its length, and so on.
    pub blocks: Vec<u64>,
    /// Tokens of the prompt, as the engine's answer or the router's estimate says, and of the answer. None if the answer does not
    /// say it.
    pub tokens: Option<(u64, u64)>,
    /// Milliseconds until the first token of a stream.
    pub ttft_ms: Option<u64>,
}

#[derive(Debug, Default)]
struct State {
    recorder: Option<Recorder>,
    read_at: Option<Instant>,
    /// Names of the recorded models.
    models: HashMap<[u8; 16], Arc<str>>,
}

/// The recording, while somebody reads it.
#[derive(Debug, Default)]
pub(crate) struct Recording {
    is_on: AtomicBool,
    state: Mutex<State>,
}

impl Recording {
    /// Whether requests are recorded.
    pub(crate) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// Records a request.
    pub(crate) fn ended(&self, ended: Ended, now: Instant) {
        let mut state = self.state.lock();
        if state.read_at.is_none_or(|read_at| now.saturating_duration_since(read_at) > UNREAD_MAX) {
            *state = State::default();
            self.is_on.store(false, Ordering::Relaxed);
            return;
        }
        let Ended { began, node, model, keys, lengths, first_token } = ended;
        let mut name: Arc<str> = model.unwrap_or_default().into();
        let mut model = xxh3_128(name.as_bytes()).to_le_bytes();
        if !state.models.contains_key(&model) {
            if state.models.len() >= MODELS_MAX {
                // Clients choose names, so further ones share one.
                (name, model) = ("other".into(), [0; 16]);
            }
            state.models.insert(model, name);
        }
        let at = clock().saturating_sub(now.saturating_duration_since(began));
        if let Some(recorder) = &mut state.recorder {
            recorder.whole(Whole { at, engine: node, model, keys, lengths, first_token });
        }
    }

    /// The next requests; begins the recording if there is none.
    pub(crate) fn read(&self, cursor: u64, now: Instant) -> RecordedPage {
        let mut state = self.state.lock();
        state.read_at = Some(now);
        self.is_on.store(true, Ordering::Relaxed);
        let recorder = state.recorder.get_or_insert_with(|| Recorder::new(clock()));
        let (forgotten_blocks, began_us) = (recorder.forgotten_blocks(), recorder.since().as_micros() as u64);
        let Read { cursor, lost, requests, has_more } = recorder.read(cursor, REQUESTS_MAX);
        let to_page = |request: kvlane_trace::Recorded| RecordedRequest {
            at_ms: request.at.as_millis() as u64,
            node: request.engine.to_string(),
            model: state.models.get(&request.model).map(ToString::to_string).unwrap_or_default(),
            blocks: request.blocks.iter().flat_map(|Run { first, count }| [*first, *count]).collect(),
            tokens: request.lengths.map(|lengths| (lengths.prompt, lengths.output)),
            ttft_ms: request.first_token.map(|time| time.as_millis() as u64),
        };
        RecordedPage {
            cursor,
            lost,
            has_more,
            forgotten_blocks,
            now_ms: clock().as_millis() as u64,
            began_us,
            requests: requests.into_iter().map(to_page).collect(),
        }
    }
}

/// Keys of the whole blocks of a prompt's text.
pub(crate) fn blocks(marks: &[Mark]) -> Vec<u64> {
    let bytes = marks.last().map_or(0, |mark| mark.bytes) as usize;
    let mut at = marks.iter();
    let mut mark = at.next();
    let key = |block: usize| {
        while mark.is_some_and(|mark| (mark.bytes as usize) < block * MARK_BYTES) {
            mark = at.next();
        }
        xxh3_64_with_seed(&block.to_le_bytes(), mark.map_or(0, |mark| mark.hash))
    };
    (1..=bytes / MARK_BYTES).map(key).collect()
}

/// The router's clock for recordings: the time since 1970.
fn clock() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::{Scan, marks, outline};

    fn blocks_of(messages: &[String]) -> Vec<u64> {
        let messages: Vec<_> =
            messages.iter().map(|text| serde_json::json!({ "role": "user", "content": text })).collect();
        let body = serde_json::to_vec(&serde_json::json!({ "messages": messages })).unwrap();
        let scan = Scan::new(&body, outline(&body).unwrap());
        blocks(&marks(&scan, 7))
    }

    fn common(one: &[u64], other: &[u64]) -> usize {
        one.iter().zip(other).take_while(|(one, other)| one == other).count()
    }

    #[test]
    fn prompts_share_the_blocks_of_their_common_text() {
        let said = |letter: &str, count| letter.repeat(count);
        let first = [said("a", 1000), said("b", 700)];
        let longer = [said("a", 1000), said("b", 700), said("c", 2000)];
        let other = [said("a", 1000), said("x", 700), said("c", 2000)];
        let [first, longer, other] = [&first[..], &longer, &other].map(blocks_of);
        assert_eq!(first.len(), (1000 + 700) / MARK_BYTES + usize::from(first.len() > 6));
        assert!(common(&first, &longer) >= first.len() - 1, "the last block ends behind the last message");
        let shared = common(&longer, &other);
        assert!((3..=4).contains(&shared), "1,000 bytes and the message's frame: {shared}");
        assert!(blocks(&[]).is_empty());
    }

    fn ended(began: Instant, model: &str, keys: &[u64]) -> Ended {
        Ended {
            began,
            node: "http://a:1".into(),
            model: Some(model.into()),
            keys: keys.to_vec(),
            lengths: Some(Lengths { prompt: 100, output: 5 }),
            first_token: Some(Duration::from_millis(30)),
        }
    }

    #[test]
    fn requests_are_recorded_from_the_first_read_until_nobody_reads() {
        let recording = Recording::default();
        let start = Instant::now();
        assert!(!recording.is_on());
        recording.ended(ended(start, "m", &[1]), start);
        let cursor = recording.read(0, start).cursor;
        assert!(recording.is_on());
        recording.ended(ended(start, "m", &[5, 6]), start);
        recording.ended(ended(start, "n", &[5, 7]), start);
        let page = recording.read(cursor, start);
        let shown: Vec<_> = page
            .requests
            .iter()
            .map(|each| (each.model.as_str(), each.blocks.clone(), each.ttft_ms))
            .collect();
        assert_eq!(shown, [("m", vec![0, 2], Some(30)), ("n", vec![0, 1, 2, 1], Some(30))]);
        let late = start + UNREAD_MAX + Duration::from_millis(1);
        recording.ended(ended(late, "m", &[5]), late);
        assert!(!recording.is_on());
        assert_eq!(recording.read(page.cursor, late).requests, [], "it is another recording");
    }

    #[test]
    fn clients_cannot_make_names_beyond_the_bound() {
        let recording = Recording::default();
        let now = Instant::now();
        let cursor = recording.read(0, now).cursor;
        for number in 0..MODELS_MAX + 9 {
            recording.ended(ended(now, &format!("model-{number}"), &[]), now);
        }
        assert_eq!(recording.state.lock().models.len(), MODELS_MAX + 1);
        let mut page = recording.read(cursor, now);
        while page.has_more {
            page = recording.read(page.cursor, now);
        }
        assert_eq!(page.requests.last().unwrap().model, "other");
    }
}
