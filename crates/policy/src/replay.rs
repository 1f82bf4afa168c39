//! [`replay`]: runs a trace against a cache in virtual time, and counts the hits.

use crate::ceiling::{Ceiling, Window, WindowCount};
use crate::kind::Choice;
use crate::learning::LearntClass;
use crate::shadow::{Auto, Switch};
use crate::tiers::TieredModel;
use crate::trace::{Trace, TraceRequest};

/// Requests between two calls of `progress`.
const STEP: usize = 256;

/// The cache of a replay.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// The replacement policy in RAM.
    pub policy: Choice,
    /// Capacity of RAM in blocks.
    pub capacity: usize,
    /// Capacity of the SSD tier in blocks; 0 for no such tier. The tier gets every block that is stored in RAM, and
    /// decides as [`SsdModel`](crate::SsdModel) does. A hit in the tier copies the block back to RAM.
    pub ssd_capacity: usize,
}

/// Result of a replay. Counts are block references.
#[derive(Clone, Debug, Default)]
pub struct Replayed {
    /// References that were replayed, hits or not.
    pub references: usize,
    /// Hits in RAM as part of a prefix: from a request's first block on, up to the first that is missing there.
    pub prefix_hits: usize,
    /// Hits behind those in the same prefix: blocks that the tier below had, and blocks in RAM behind them.
    pub ssd_prefix_hits: usize,
    /// Hits in RAM anywhere in a prompt.
    pub block_hits: usize,
    /// References of the second half of the requests, and their prefix hits in all tiers.
    pub late: (usize, usize),
    /// The switches of policy, each with the index of the request that it followed.
    pub switches: Vec<(usize, Switch)>,
    /// Heap bytes of the shadow caches at the end of the replay.
    pub shadow_bytes: usize,
    /// The classes that the policy in RAM had learnt at the end.
    pub learnt: Vec<LearntClass>,
}

/// Replays a whole trace. Calls `progress` every 256 requests, and at the end, with the number of references since the
/// call before.
pub fn replay(trace: &Trace, setup: Setup, mut progress: impl FnMut(usize)) -> Replayed {
    let first = setup.policy.first();
    let mut auto = (setup.policy == Choice::Auto).then(|| Auto::new(first, setup.capacity));
    // Twice the blocks of the trace are as good as no limit, and bound the memory of a model of a petabyte.
    let ssd_capacity = setup.ssd_capacity.min(2 * trace.distinct() + 1024);
    let mut cache = TieredModel::new(first, setup.capacity, ssd_capacity);
    let mut replayed = Replayed::default();
    let mut keys: Vec<u64> = Vec::new();
    let mut reported = 0;
    for (index, TraceRequest { keys: of_request, looked_up, .. }) in trace.requests().enumerate() {
        keys.clear();
        keys.extend(of_request);
        replayed.references += looked_up;
        // Blocks behind the looked-up ones are only saved, so finding them is no hit.
        let outcome = cache.request(&keys);
        let prefix_hits = outcome.prefix_hits.min(looked_up);
        replayed.prefix_hits += prefix_hits;
        let ssd_prefix_hits = outcome.ssd_prefix_hits.min(looked_up - prefix_hits);
        replayed.ssd_prefix_hits += ssd_prefix_hits;
        if index >= trace.len() / 2 {
            replayed.late.0 += looked_up;
            replayed.late.1 += prefix_hits + ssd_prefix_hits;
        }
        replayed.block_hits += outcome.block_hits.min(looked_up);
        if let Some(auto) = &mut auto
            && let Some(switch) = auto.observe(&keys[..looked_up])
        {
            cache.switch(switch.to);
            replayed.switches.push((index, switch));
        }
        if index % STEP == STEP - 1 {
            progress(replayed.references - reported);
            reported = replayed.references;
        }
    }
    replayed.learnt = cache.ram().learnt();
    replayed.shadow_bytes = auto.map_or(0, |auto| auto.heap_bytes());
    progress(replayed.references - reported);
    replayed
}

/// The counts of a trace's last day: by the sketches of the longest window, and exactly.
#[derive(Clone)]
pub struct EstimatedCeiling {
    /// References and distinct blocks by the sketches.
    pub estimated: WindowCount,
    /// References of the same span of time, counted one by one.
    pub references: usize,
    /// Different blocks of the same span of time, counted one by one.
    pub distinct: usize,
}

/// Records a trace in the rolling windows as a daemon does, and reads the window of a day at the trace's end.
pub fn estimate_ceiling(trace: &Trace) -> EstimatedCeiling {
    let [.., day] = Window::DEFAULT;
    let mut ceiling = Ceiling::new(&[day]);
    for TraceRequest { at, keys, looked_up } in trace.requests() {
        ceiling.record(keys.take(looked_up), 0, at);
    }
    let (references, distinct) = trace.count_since(day.start(trace.end()));
    let estimated = ceiling.read(trace.end()).pop().map(|(_, count)| count).unwrap_or_default();
    EstimatedCeiling { estimated, references, distinct }
}
