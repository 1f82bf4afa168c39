//! `auto`: lookups feed shadow caches, and what those find best takes over.
//!
//! A lookup hands a sampled prompt's fingerprints over and goes on; a thread of its own runs the shadows, some microseconds
//! a block.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use kvlane_policy::{Auto, Choice, LearntClass, PolicyKind, Switch};
use parking_lot::{Condvar, Mutex};

use crate::api::LookupGroup;
use crate::entries::fingerprint;

/// Blocks of prompts that wait for the shadows, 8 bytes each; a prompt beyond that is left out and counted.
const WAITING_BLOCKS_MAX: usize = 1 << 17;

/// Which policy is at work, and what `auto` knows of all of them.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyReport {
    /// What was asked for.
    pub choice: Choice,
    /// The policy that decides now.
    pub active: PolicyKind,
    /// With `auto`, the recent prefix hit rate of each policy's shadow cache, 0 to 1; empty before the first lookup.
    pub shadow_hit_rates: Vec<(PolicyKind, f64)>,
    /// What the policy at work has learnt, if it learns.
    pub learnt: Vec<LearntClass>,
    /// Times that another policy took over.
    pub switches: u64,
    /// Sampled lookups that the shadows did not get, since too many came at once.
    pub left_out: u64,
}

#[derive(Default)]
pub(crate) struct AutoPolicy {
    pub(crate) waiting: Mutex<Waiting>,
    pub(crate) changed: Condvar,
    /// One prompt in so many is handed over; 0 before anything is known.
    sample: AtomicU32,
    /// And the capacity that they were made for.
    pub(crate) shadows: Mutex<Option<(Auto, usize)>>,
    pub(crate) switches: AtomicU64,
    pub(crate) left_out: AtomicU64,
}

#[derive(Default)]
pub(crate) struct Waiting {
    pub(crate) prompts: VecDeque<Box<[u64]>>,
    blocks: usize,
}

impl AutoPolicy {
    /// A prompt was looked up. Groups with a window are left out: their blocks are no prefixes.
    pub(crate) fn note(&self, groups: &[LookupGroup<'_>]) {
        let sample = self.sample.load(Ordering::Relaxed).max(1);
        for group in groups.iter().filter(|group| group.window_blocks == 0) {
            let key = |hash| fingerprint(group.space, hash);
            let Some(first) = group.hashes.first() else { continue };
            if !Auto::samples(sample, key(first), group.hashes.get(1).map(key)) {
                continue;
            }
            let prompt: Box<[u64]> = group.hashes.iter().map(key).collect();
            let mut waiting = self.waiting.lock();
            if waiting.blocks + prompt.len() > WAITING_BLOCKS_MAX {
                self.left_out.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            waiting.blocks += prompt.len();
            waiting.prompts.push_back(prompt);
            self.changed.notify_one();
        }
    }

    /// Wakes the thread that waits for prompts.
    pub(crate) fn wake(&self) {
        let _waiting = self.waiting.lock();
        self.changed.notify_all();
    }

    pub(crate) fn next(&self) -> Option<Box<[u64]>> {
        let mut waiting = self.waiting.lock();
        let prompt = waiting.prompts.pop_front()?;
        waiting.blocks -= prompt.len();
        Some(prompt)
    }

    /// Shows a prompt to the shadows, which are made anew when the pool turned out to hold another number of blocks.
    pub(crate) fn observe(&self, prompt: &[u64], active: PolicyKind, capacity: usize) -> Option<Switch> {
        let mut shadows = self.shadows.lock();
        if shadows.as_ref().is_none_or(|(_, made_for)| *made_for != capacity) {
            tracing::info!(capacity, policy = %active, "shadow caches are made for a pool of so many blocks");
            *shadows = Some((Auto::new(active, capacity), capacity));
        }
        let (auto, _) = shadows.as_mut()?;
        self.sample.store(auto.sample(), Ordering::Relaxed);
        auto.observe(prompt)
    }
}
