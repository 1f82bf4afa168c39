//! A trace against a cache, in virtual time.

use crate::ceiling::{Ceiling, Window, WindowCount};
use crate::kind::Choice;
use crate::learning::LearntClass;
use crate::shadow::{Auto, Switch};
use crate::tiers::TieredModel;
use crate::trace::Trace;

/// Requests between two reports of progress.
const STEP: usize = 256;

/// The cache of a replay.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Which blocks make room for others.
    pub policy: Choice,
    /// Blocks that fit into RAM.
    pub capacity: usize,
    /// Blocks that fit into the tier below; 0 is none. It gets what comes into RAM, and keeps it as
    /// [`SsdModel`](crate::SsdModel) does. A hit there brings the block back to RAM and leaves the copy.
    pub ssd_capacity: usize,
}

/// What a replay counted, in block references.
#[derive(Clone, Debug, Default)]
pub struct Replayed {
    /// References that were replayed, hits or not.
    pub references: usize,
    /// Hits in RAM as part of a prefix: from a request's first block on, up to the first that is not there.
    pub prefix_hits: usize,
    /// Hits further on in such a prefix that the tier below gave, or that RAM gave behind one of those.
    pub ssd_prefix_hits: usize,
    /// Hits in RAM wherever they stood.
    pub block_hits: usize,
    /// The changes of policy, with the request that each followed.
    pub switches: Vec<(usize, Switch)>,
    /// Bytes that the shadow caches held at most.
    pub shadow_bytes: usize,
    /// What the policy of RAM had learnt at the end.
    pub learnt: Vec<LearntClass>,
}

/// Replays a whole trace; `progress` is told now and then how many more references are done.
pub fn replay(trace: &Trace, setup: Setup, mut progress: impl FnMut(usize)) -> Replayed {
    let first = setup.policy.first();
    let mut auto = (setup.policy == Choice::Auto).then(|| Auto::new(first, setup.capacity));
    // Twice what is ever written is without limit, and costs less memory than a petabyte.
    let ssd_capacity = setup.ssd_capacity.min(2 * trace.distinct() + 1024);
    let mut cache = TieredModel::new(first, setup.capacity, ssd_capacity);
    let mut replayed = Replayed::default();
    let mut keys: Vec<u64> = Vec::new();
    let mut told = 0;
    for (index, (_, request)) in trace.requests().enumerate() {
        keys.clear();
        keys.extend(request);
        replayed.references += keys.len();
        let outcome = cache.request(&keys);
        replayed.prefix_hits += outcome.prefix_hits;
        replayed.ssd_prefix_hits += outcome.ssd_prefix_hits;
        replayed.block_hits += outcome.block_hits;
        if let Some(auto) = &mut auto
            && let Some(switch) = auto.observe(&keys)
        {
            cache.switch(switch.to);
            replayed.switches.push((index, switch));
        }
        if index % STEP == STEP - 1 {
            progress(replayed.references - told);
            told = replayed.references;
        }
    }
    replayed.learnt = cache.ram().learnt();
    replayed.shadow_bytes = auto.map_or(0, |auto| auto.heap_bytes());
    progress(replayed.references - told);
    replayed
}

/// What the sketches of the longest window say of a trace, beside the exact count of the same stretch.
#[derive(Clone)]
pub struct EstimatedCeiling {
    /// References and distinct blocks as the sketches count them.
    pub estimated: WindowCount,
    /// References of the same stretch, counted one by one.
    pub references: usize,
    /// Different blocks in them, counted one by one.
    pub distinct: usize,
}

/// Runs a trace through the rolling windows as a daemon does, and reads the day at its end.
pub fn estimate_ceiling(trace: &Trace) -> EstimatedCeiling {
    let mut ceiling = Ceiling::new();
    for (at, keys) in trace.requests() {
        ceiling.record(keys, at);
    }
    let (references, distinct) = trace.count_since(Window::Day.start(trace.end()));
    EstimatedCeiling { estimated: ceiling.window(Window::Day, trace.end()), references, distinct }
}
