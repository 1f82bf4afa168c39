//! Runs the queued prompts of `auto` through its shadow caches, and switches the policy when another one hits more.

use std::sync::atomic::{AtomicBool, Ordering};

use kvlane_policy::{Learning, Switch};

use crate::auto::PolicyReport;
use crate::store::Store;

impl Store {
    /// Runs the queued prompts through the shadow caches, and switches to the policy that hits more. False if no prompt
    /// was queued. The background calls it; a store without background needs a caller.
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
            // Log: `--policy auto` evicts by another policy from now on; the line has both expected hit rates.
            tracing::info!(
                %from, %to, from_hit_percent = percent(hit_rates.0), to_hit_percent = percent(hit_rates.1),
                "replacement policy switched: the shadow cache of the new one hits more"
            );
        }
        any
    }

    /// Observes until `stop`.
    pub(crate) fn observe_until(&self, stop: &AtomicBool) {
        let Some(auto) = &self.auto else { return };
        loop {
            self.observe_pending();
            let mut queue = auto.queue.lock();
            while queue.prompts.is_empty() {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                auto.changed.wait(&mut queue);
            }
            if stop.load(Ordering::Relaxed) {
                return;
            }
        }
    }

    /// The policy that decides now, and the figures behind the choice.
    pub fn policy(&self) -> PolicyReport {
        let (choice, active, learnt) = {
            let index = self.index.lock();
            let learnt = index.policy.learning().map(Learning::learnt).unwrap_or_default();
            (index.options.policy, index.policy.kind(), learnt)
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
