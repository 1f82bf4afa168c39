//! `auto`: lookups feed shadow caches, and what those find best takes over.
//!
//! A lookup hands a sampled prompt's fingerprints over and goes on; a thread of its own runs the shadows, some microseconds
//! a block.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use kvlane_policy::{Auto, Choice, LearntClass, PolicyKind, Switch};
use parking_lot::{Condvar, Mutex};

use crate::api::LookupGroup;
use crate::index::Index;
use crate::store::Store;

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
    waiting: Mutex<Waiting>,
    changed: Condvar,
    /// One prompt in so many is handed over; 0 before anything is known.
    sample: AtomicU32,
    /// And the capacity that they were made for.
    shadows: Mutex<Option<(Auto, usize)>>,
    switches: AtomicU64,
    left_out: AtomicU64,
}

#[derive(Default)]
struct Waiting {
    prompts: VecDeque<Box<[u64]>>,
    blocks: usize,
}

impl AutoPolicy {
    /// A prompt was looked up. Groups with a window are left out: their blocks are no prefixes.
    pub(crate) fn note(&self, groups: &[LookupGroup<'_>]) {
        let sample = self.sample.load(Ordering::Relaxed).max(1);
        for group in groups.iter().filter(|group| group.window_blocks == 0) {
            let key = |hash| Index::fingerprint(group.space, hash);
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

    fn next(&self) -> Option<Box<[u64]>> {
        let mut waiting = self.waiting.lock();
        let prompt = waiting.prompts.pop_front()?;
        waiting.blocks -= prompt.len();
        Some(prompt)
    }

    /// Shows a prompt to the shadows, which are made anew when the pool turned out to hold another number of blocks.
    fn observe(&self, prompt: &[u64], active: PolicyKind, capacity: usize) -> Option<Switch> {
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

impl Store {
    /// Shows the shadow caches the prompts that were looked up, and goes on with another policy when they find one better.
    /// False if there was none. The background does it; without one, who calls this.
    pub fn observe_pending(&self) -> bool {
        let Some(auto) = &self.auto else { return false };
        let mut any = false;
        while let Some(prompt) = auto.next() {
            any = true;
            let (active, capacity) = {
                let index = self.index.lock();
                (index.policy.kind(), index.capacity())
            };
            let Some(Switch { from, to, hit_rates }) = auto.observe(&prompt, active, capacity) else {
                continue;
            };
            self.index.lock().switch_policy(to);
            auto.switches.fetch_add(1, Ordering::Relaxed);
            let percent = |rate: f64| (1000.0 * rate).round() / 10.0;
            tracing::info!(
                %from, %to, from_hit_percent = percent(hit_rates.0), to_hit_percent = percent(hit_rates.1),
                "another replacement policy takes over: its shadow cache hits more"
            );
        }
        any
    }

    /// Observes until `stop`.
    pub(crate) fn observe_until(&self, stop: &AtomicBool) {
        let Some(auto) = &self.auto else { return };
        loop {
            self.observe_pending();
            let mut waiting = auto.waiting.lock();
            while waiting.prompts.is_empty() {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                auto.changed.wait(&mut waiting);
            }
            if stop.load(Ordering::Relaxed) {
                return;
            }
        }
    }

    /// Which policy is at work, and why.
    pub fn policy(&self) -> PolicyReport {
        let (choice, active, learnt) = {
            let index = self.index.lock();
            (index.options.policy, index.policy.kind(), index.policy.learnt())
        };
        let mut report =
            PolicyReport { choice, active, shadow_hit_rates: Vec::new(), learnt, switches: 0, left_out: 0 };
        if let Some(auto) = &self.auto {
            let shadows = auto.shadows.lock();
            report.shadow_hit_rates = shadows.iter().flat_map(|(auto, _)| auto.hit_rates()).collect();
            report.switches = auto.switches.load(Ordering::Relaxed);
            report.left_out = auto.left_out.load(Ordering::Relaxed);
        }
        report
    }
}
