//! The report of a replay, as text and as JSON.

use std::collections::BTreeMap;

use bytesize::ByteSize;
use kvlane_policy::{EstimatedCeiling, Replayed, Setup, Trace};
use serde_json::{Value, json};

use kvlane_trace::file::Format;

/// One policy at one capacity.
pub(super) struct Run {
    pub(super) setup: Setup,
    /// RAM as a share of the trace's distinct blocks, 0 to 1.
    pub(super) share: f64,
    pub(super) replayed: Replayed,
    pub(super) seconds: f64,
}

pub(super) struct Report<'a> {
    pub(super) name: String,
    pub(super) format: Format,
    pub(super) with_scans: bool,
    pub(super) block_bytes: Option<u64>,
    pub(super) ssd: bool,
    /// The hit rate of a cache without limit, 0 to 1.
    pub(super) ceiling: f64,
    pub(super) estimated: EstimatedCeiling,
    pub(super) trace: &'a Trace,
    pub(super) runs: &'a [Run],
    /// For each capacity in blocks, of all tiers, the prefix hits of a cache that knows the future.
    pub(super) bounds: &'a BTreeMap<usize, usize>,
}

fn percent(part: usize, whole: usize) -> f64 {
    100.0 * part as f64 / whole.max(1) as f64
}

impl Run {
    fn prefix_hit_percent(&self) -> f64 {
        percent(self.replayed.prefix_hits + self.replayed.ssd_prefix_hits, self.replayed.references)
    }

    fn references_per_second(&self) -> f64 {
        self.replayed.references as f64 / self.seconds.max(1e-9)
    }
}

impl Report<'_> {
    /// r* by the sketches and exactly, of the last 24 hours, in percent.
    fn last_day(&self) -> (f64, f64) {
        let estimated = 100.0 * self.estimated.estimated.ceiling().unwrap_or(0.0);
        let repeated = self.estimated.references - self.estimated.distinct;
        (estimated, percent(repeated, self.estimated.references))
    }

    /// The hits of a cache that knows the future and is as large as all tiers of this run.
    fn bound(&self, run: &Run) -> usize {
        self.bounds.get(&(run.setup.capacity + run.setup.ssd_capacity)).copied().unwrap_or_default()
    }

    pub(super) fn to_json(&self) -> Value {
        let (estimated, exact) = self.last_day();
        let results = self.runs.iter().map(|run| {
            let mut result = json!({
                "policy": run.setup.policy.to_string(),
                "capacity_share": run.share,
                "capacity_blocks": run.setup.capacity,
                "prefix_hit_percent": run.prefix_hit_percent(),
                "block_hit_percent": percent(run.replayed.block_hits, run.replayed.references),
                "references_per_second": run.references_per_second(),
            });
            if let Some(bytes) = self.block_bytes {
                result["capacity_bytes"] = json!(run.setup.capacity as u64 * bytes);
            }
            let bound = self.bound(run);
            result["clairvoyant_prefix_hit_percent"] = json!(percent(bound, run.replayed.references));
            if self.ssd {
                let tier = |hits| json!(percent(hits, run.replayed.references));
                result["ram_prefix_hit_percent"] = tier(run.replayed.prefix_hits);
                result["ssd_prefix_hit_percent"] = tier(run.replayed.ssd_prefix_hits);
                result["ssd_capacity_blocks"] = json!(run.setup.ssd_capacity);
            }
            if run.replayed.shadow_bytes > 0 {
                result["shadow_bytes"] = json!(run.replayed.shadow_bytes);
                let switches = run.replayed.switches.iter().map(|(request, switch)| {
                    json!({"request": request, "from": switch.from.name(), "to": switch.to.name()})
                });
                result["switches"] = switches.collect();
            }
            if !run.replayed.learnt.is_empty() {
                let classes = run.replayed.learnt.iter().map(|class| {
                    json!({"blocks": class.blocks, "seen": class.seen, "density_by_age": class.densities})
                });
                result["learnt"] = classes.collect();
            }
            result
        });
        json!({
            "trace": self.name,
            "format": self.format.name(),
            "with_scans": self.with_scans,
            "requests": self.trace.len(),
            "references": self.trace.references(),
            "distinct_blocks": self.trace.distinct(),
            "ceiling_percent": 100.0 * self.ceiling,
            "last_day": {"ceiling_percent": exact, "estimated_ceiling_percent": estimated},
            "results": results.collect::<Vec<_>>(),
        })
    }

    pub(super) fn to_text(&self) -> String {
        let (estimated, exact) = self.last_day();
        let mut text = format!(
            "{} requests, {} block references, {} different blocks\na cache without limit hits {:.2} % as prefixes; \
             in its last 24 h {exact:.2} %; as a daemon would \
             estimate it, {estimated:.2} %\n\n",
            self.trace.len(),
            self.trace.references(),
            self.trace.distinct(),
            100.0 * self.ceiling
        );
        let mut capacities: Vec<usize> = self.runs.iter().map(|run| run.setup.capacity).collect();
        capacities.sort_unstable();
        capacities.dedup();
        text.push_str("prefix hits, % of references");
        if self.ssd {
            let ssd = self.runs.first().map_or(0, |run| run.setup.ssd_capacity);
            text.push_str(&format!("; in brackets, what of it came from an SSD of {ssd} blocks"));
        }
        text.push_str(&format!("\n{:<20}", "capacity"));
        let mut policies: Vec<String> = self.runs.iter().map(|run| run.setup.policy.to_string()).collect();
        policies.dedup();
        let width = if self.ssd { 15 } else { 10 };
        policies.iter().for_each(|policy| text.push_str(&format!("{policy:>width$}")));
        text.push_str(&format!("{:>13}", "clairvoyant"));
        for capacity in capacities {
            let share = percent(capacity, self.trace.distinct());
            let size = match self.block_bytes {
                Some(bytes) => ByteSize::b(capacity as u64 * bytes).display().iec().to_string(),
                None => capacity.to_string(),
            };
            text.push_str(&format!("\n{:<20}", format!("{size} ({share:.2} %)")));
            for policy in &policies {
                let run = self
                    .runs
                    .iter()
                    .find(|run| run.setup.capacity == capacity && run.setup.policy.to_string() == *policy);
                let cell = run.map_or_else(String::new, |run| {
                    let below = percent(run.replayed.ssd_prefix_hits, run.replayed.references);
                    let hits = run.prefix_hit_percent();
                    if self.ssd { format!("{hits:.2} ({below:.2})") } else { format!("{hits:.2}") }
                });
                text.push_str(&format!("{cell:>width$}"));
            }
            let run = self.runs.iter().find(|run| run.setup.capacity == capacity);
            let bound = run.map_or(0.0, |run| percent(self.bound(run), run.replayed.references));
            text.push_str(&format!("{:>13}", format!("{bound:.2}")));
        }
        text.push_str("\nclairvoyant: a cache as large as RAM and SSD together that knows what will be asked for; no policy hits more\n");
        for run in self.runs.iter().filter(|run| !run.replayed.switches.is_empty()) {
            let switches = run.replayed.switches.iter();
            let switches: Vec<String> =
                switches.map(|(request, switch)| format!("{} after request {request}", switch.to)).collect();
            let first = run.replayed.switches.first().map_or("", |(_, switch)| switch.from.name());
            text.push_str(&format!(
                "auto at {} blocks: {first}, {}\n",
                run.setup.capacity,
                switches.join(", ")
            ));
        }
        text
    }
}
