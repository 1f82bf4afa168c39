//! The policy `auto`: lookups feed shadow caches, one for each policy, and the policy that would hit the most takes
//! over.
//!
//! A lookup only queues the fingerprints of a sampled prompt. The thread `kvlane-policy` runs the shadow caches, which
//! takes some microseconds a block.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use kvlane_policy::{Auto, Choice, LearntClass, PolicyKind, Switch};
use parking_lot::{Condvar, Mutex};

use crate::api::LookupGroup;
use crate::entries::fingerprint;

/// Blocks of all queued prompts, 8 bytes each. A prompt beyond that is left out and counted.
const QUEUED_BLOCKS_MAX: usize = 1 << 17;

/// Which policy decides, and how `auto` rates all of them.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyReport {
    /// The operator's choice, which may be `auto`.
    pub choice: Choice,
    /// The policy that decides now.
    pub active: PolicyKind,
    /// With `auto`, the recent prefix hit rate of each policy's shadow cache, 0 to 1; empty before the first lookup.
    pub shadow_hit_rates: Vec<(PolicyKind, f64)>,
    /// Classes of blocks that the active policy has learnt; empty if it does not learn.
    pub learnt: Vec<LearntClass>,
    /// How often another policy took over.
    pub switches: u64,
    /// Sampled lookups that the shadow caches did not get, because the queue was full.
    pub left_out: u64,
}

#[derive(Default)]
pub(crate) struct AutoPolicy {
    pub(crate) queue: Mutex<PromptQueue>,
    /// Notified when a prompt was queued, and when the background is to stop.
    pub(crate) changed: Condvar,
    /// One prompt in `sample` is queued. 0 until the shadow caches exist: every prompt is.
    sample: AtomicU32,
    /// The shadow caches, and the capacity in blocks that they were made for. None before the first prompt.
    pub(crate) shadows: Mutex<Option<(Auto, usize)>>,
    pub(crate) switches: AtomicU64,
    pub(crate) left_out: AtomicU64,
}

#[derive(Default)]
pub(crate) struct PromptQueue {
    pub(crate) prompts: VecDeque<Box<[u64]>>,
    /// Sum over `prompts`.
    blocks: usize,
}

impl AutoPolicy {
    /// Queues the prompt of a lookup if it is sampled. Groups with a window are left out, because their blocks are no
    /// prefixes.
    pub(crate) fn note(&self, groups: &[LookupGroup<'_>]) {
        let sample = self.sample.load(Ordering::Relaxed).max(1);
        for group in groups.iter().filter(|group| group.window_blocks == 0) {
            let key = |hash| fingerprint(group.space, hash);
            let Some(first) = group.hashes.first() else { continue };
            if !Auto::samples(sample, key(first), group.hashes.get(1).map(key)) {
                continue;
            }
            let prompt: Box<[u64]> = group.hashes.iter().map(key).collect();
            let mut queue = self.queue.lock();
            if queue.blocks + prompt.len() > QUEUED_BLOCKS_MAX {
                self.left_out.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            queue.blocks += prompt.len();
            queue.prompts.push_back(prompt);
            self.changed.notify_one();
        }
    }

    /// Wakes the thread that waits for prompts.
    pub(crate) fn wake(&self) {
        let _queue = self.queue.lock();
        self.changed.notify_all();
    }

    pub(crate) fn next(&self) -> Option<Box<[u64]>> {
        let mut queue = self.queue.lock();
        let prompt = queue.prompts.pop_front()?;
        queue.blocks -= prompt.len();
        Some(prompt)
    }

    /// Runs a prompt through the shadow caches. They are made anew when the pool's capacity has been corrected.
    pub(crate) fn observe(&self, prompt: &[u64], active: PolicyKind, capacity: usize) -> Option<Switch> {
        let mut shadows = self.shadows.lock();
        if shadows.as_ref().is_none_or(|(_, made_for)| *made_for != capacity) {
            // Log: `--policy auto` begins to compare policies for this capacity.
            tracing::info!(capacity_blocks = capacity, policy = %active, "shadow caches created for the pool's capacity");
            *shadows = Some((Auto::new(active, capacity), capacity));
        }
        let (auto, _) = shadows.as_mut()?;
        self.sample.store(auto.sample(), Ordering::Relaxed);
        auto.observe(prompt)
    }
}
