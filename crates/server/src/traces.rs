//! Spans of the requests whose callers sampled them: lookup, fetch, wait for another engine's saves, load and save.
//!
//! ```text
//!   parent: the span of vLLM's request, or the router's leg
//!     +-- kvlane.lookup        Lookup ............. LookupResult
//!     |     +-- kvlane.fetch      blocks that the SSD or other hosts brought
//!     |     '-- kvlane.hand_off   wait for another engine's saves
//!     +-- kvlane.load          LookupResult ....... Release: the engine has loaded the blocks
//!     '-- kvlane.save          Save or Claim ...... the blocks are written
//! ```
//! A lookup names its trace. A save does not: it belongs to the traced lookup that missed its first block.

use std::{
    collections::{HashMap, VecDeque},
    hash::{DefaultHasher, Hash, Hasher},
    io,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use kvlane_block::BlockHash;
use kvlane_otlp::{
    Counters, Exporter, Kind, Metrics, NewSpan, Settings, SpanId, TraceContext, Tracer, Value,
};
use kvlane_store::LeaseId;
use kvlane_trace::TierBlocks;
use parking_lot::Mutex;

/// Most traced requests whose load or whose saves have not ended. Beyond it the oldest are forgotten.
const OPEN_MAX: usize = 1024;
/// A block that is saved later than this after a lookup is not saved for it.
const SAVED_WITHIN: Duration = Duration::from_secs(120);
/// Most blocks of a traced prompt whose saves are recognised.
const BLOCKS_MAX: usize = 4096;

/// Exports the spans of sampled requests.
pub(crate) struct Traces {
    exporter: Exporter,
    tracer: Tracer,
    loads: Mutex<Recent<LeaseId, OpenLoad>>,
    /// By the engine, and the first block of each prompt that is not saved yet.
    saves: Mutex<Recent<(u64, BlockHash), Expected>>,
}

struct OpenLoad {
    context: TraceContext,
    since: Instant,
    tokens: u64,
    bytes: u64,
}

struct Expected {
    context: TraceContext,
    since: Instant,
    /// The blocks from the first that is not saved on.
    hashes: Arc<[BlockHash]>,
    at: usize,
}

/// A lookup that was answered.
pub(crate) struct AnsweredLookup<'a> {
    pub(crate) since: Instant,
    pub(crate) engine: &'a str,
    pub(crate) model: &'a str,
    /// Blocks of the recorded group, and how many of them the answer could have.
    pub(crate) hashes: &'a [BlockHash],
    pub(crate) looked_up: usize,
    pub(crate) hit: TierBlocks,
    pub(crate) tokens: u64,
    pub(crate) bytes: u64,
    /// None without a hit.
    pub(crate) lease: Option<LeaseId>,
    pub(crate) has_fetched: bool,
    pub(crate) has_awaited_save: bool,
}

/// A save of a traced request that is under way.
pub(crate) struct OpenSave {
    context: TraceContext,
    since: Instant,
    blocks: u64,
}

impl Traces {
    /// Starts to export, and the metrics with it.
    pub(crate) fn start(
        settings: &Settings,
        metrics: impl Fn() -> Metrics + Send + 'static,
    ) -> io::Result<Self> {
        Ok(Self {
            exporter: Exporter::start(settings, metrics)?,
            // Only requests that their callers sampled are traced.
            tracer: Tracer::new(kvlane_memory::random()?, 0.0),
            loads: Mutex::default(),
            saves: Mutex::default(),
        })
    }

    pub(crate) fn counters(&self) -> &Counters {
        self.exporter.counters()
    }

    pub(crate) fn stop(&self) {
        self.exporter.stop();
    }

    /// Exports the spans of a lookup whose request has this `traceparent`.
    pub(crate) fn looked_up(&self, traceparent: &str, lookup: &AnsweredLookup<'_>) {
        let Some(context) = sampled(traceparent) else { return };
        let id = self.tracer.span_id();
        let hit = lookup.hit;
        let tier = match hit {
            TierBlocks { peers: 1.., .. } => "peers",
            TierBlocks { ssd: 1.., .. } => "ssd",
            TierBlocks { ram: 1.., .. } => "ram",
            TierBlocks { .. } => "none",
        };
        let attributes = vec![
            ("kvlane.engine", lookup.engine.into()),
            ("kvlane.model", lookup.model.into()),
            ("kvlane.tier", tier.into()),
            ("kvlane.looked_up_blocks", (lookup.looked_up as u64).into()),
            ("kvlane.hit_tokens", lookup.tokens.into()),
            ("kvlane.hit_blocks.ram", hit.ram.into()),
            ("kvlane.hit_blocks.ssd", hit.ssd.into()),
            ("kvlane.hit_blocks.peers", hit.peers.into()),
        ];
        self.export(context, id, "kvlane.lookup", Kind::Server, lookup.since, attributes);
        let below = context.below(id);
        if lookup.has_fetched {
            let attributes =
                vec![("kvlane.blocks.ssd", hit.ssd.into()), ("kvlane.blocks.peers", hit.peers.into())];
            self.child(below, "kvlane.fetch", lookup.since, attributes);
        }
        if lookup.has_awaited_save {
            self.child(below, "kvlane.hand_off", lookup.since, Vec::new());
        }
        if let Some(lease) = lookup.lease {
            let (tokens, bytes) = (lookup.tokens, lookup.bytes);
            self.loads.lock().push(lease, OpenLoad { context, since: Instant::now(), tokens, bytes });
        }
        let missed = lookup.hashes.get(hit.total() as usize..).unwrap_or_default();
        if let Some(first) = missed.first() {
            let hashes = missed[..missed.len().min(BLOCKS_MAX)].into();
            let expected = Expected { context, since: Instant::now(), hashes, at: 0 };
            self.saves.lock().push((digest(lookup.engine), *first), expected);
        }
    }

    /// A lease was released: if its request is traced, its load has ended.
    pub(crate) fn released(&self, lease: LeaseId) {
        let Some(load) = self.loads.lock().take(&lease) else { return };
        let attributes = vec![("kvlane.tokens", load.tokens.into()), ("kvlane.bytes", load.bytes.into())];
        self.child(load.context, "kvlane.load", load.since, attributes);
    }

    /// The traced request of this engine that these blocks are saved for, if there is one.
    pub(crate) fn save_begins(&self, engine: &str, hashes: &[BlockHash], since: Instant) -> Option<OpenSave> {
        let (engine, first) = (digest(engine), hashes.first()?);
        let mut saves = self.saves.lock();
        let mut expected =
            saves.take(&(engine, *first)).filter(|expected| expected.since.elapsed() < SAVED_WITHIN)?;
        let same = hashes.iter().zip(&expected.hashes[expected.at..]).take_while(|(one, other)| one == other);
        let blocks = same.count();
        expected.at += blocks;
        let context = expected.context;
        if let Some(next) = expected.hashes.get(expected.at).copied() {
            saves.push((engine, next), expected);
        }
        Some(OpenSave { context, since, blocks: blocks as u64 })
    }

    /// The blocks of that save are written, or not.
    pub(crate) fn save_ended(&self, save: OpenSave, is_written: bool) {
        let OpenSave { context, since, blocks } = save;
        let error = (!is_written).then_some("not saved");
        let attributes = vec![("kvlane.blocks", blocks.into())];
        let id = self.tracer.span_id();
        self.export_with(context, id, "kvlane.save", Kind::Internal, since, attributes, error);
    }

    fn child(
        &self,
        context: TraceContext,
        name: &'static str,
        since: Instant,
        attributes: Vec<(&'static str, Value)>,
    ) {
        self.export(context, self.tracer.span_id(), name, Kind::Internal, since, attributes);
    }

    fn export(
        &self,
        context: TraceContext,
        id: SpanId,
        name: &'static str,
        kind: Kind,
        since: Instant,
        attributes: Vec<(&'static str, Value)>,
    ) {
        self.export_with(context, id, name, kind, since, attributes, None);
    }

    #[allow(clippy::too_many_arguments, reason = "the parts of a span")]
    fn export_with(
        &self,
        context: TraceContext,
        id: SpanId,
        name: &'static str,
        kind: Kind,
        since: Instant,
        attributes: Vec<(&'static str, Value)>,
        error: Option<&'static str>,
    ) {
        let ended = SystemTime::now();
        let began = ended.checked_sub(since.elapsed()).unwrap_or(ended);
        self.exporter.export(NewSpan { context, id, name, kind, began, ended, attributes, error });
    }
}

/// Tells engines apart.
fn digest(engine: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    engine.hash(&mut hasher);
    hasher.finish()
}

/// Whether spans of a request with this `traceparent` are exported.
pub(crate) fn is_sampled(traceparent: &str) -> bool {
    sampled(traceparent).is_some()
}

/// The context of a request whose caller sampled it. None for other texts, which only a faulty engine sends.
fn sampled(traceparent: &str) -> Option<TraceContext> {
    traceparent.parse::<TraceContext>().ok().filter(|context| context.is_sampled)
}

/// The newest entries of a map.
struct Recent<K, V> {
    entries: HashMap<K, V>,
    /// Keys in order of their insertion; those that were taken are still here.
    order: VecDeque<K>,
}

impl<K, V> Default for Recent<K, V> {
    fn default() -> Self {
        Self { entries: HashMap::new(), order: VecDeque::new() }
    }
}

impl<K: std::hash::Hash + Eq + Copy, V> Recent<K, V> {
    fn push(&mut self, key: K, value: V) {
        if self.order.len() >= 2 * OPEN_MAX {
            self.order.retain(|key| self.entries.contains_key(key));
        }
        while self.entries.len() >= OPEN_MAX {
            let Some(oldest) = self.order.pop_front() else { break };
            self.entries.remove(&oldest);
        }
        if self.entries.insert(key, value).is_none() {
            self.order.push_back(key);
        }
    }

    fn take(&mut self, key: &K) -> Option<V> {
        self.entries.remove(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sampled_requests_are_traced() {
        let text = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0";
        assert!(sampled(&format!("{text}1")).is_some());
        assert!(sampled(&format!("{text}0")).is_none());
        assert!(sampled("").is_none());
    }

    #[test]
    fn the_oldest_are_forgotten() {
        let mut recent = Recent::default();
        for key in 0..2 * OPEN_MAX {
            recent.push(key, ());
            if key % 2 == 0 {
                recent.take(&key);
            }
        }
        assert!(recent.entries.len() <= OPEN_MAX && recent.order.len() <= 2 * OPEN_MAX);
        for key in 0..10 * OPEN_MAX {
            recent.push(key, ());
        }
        assert_eq!(recent.entries.len(), OPEN_MAX);
        assert!(recent.take(&0).is_none() && recent.take(&(10 * OPEN_MAX - 1)).is_some());
    }
}
