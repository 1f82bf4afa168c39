//! `--beside`: what the recorded daemon hit, beside what a replay of its requests hits.

use kvlane_policy::Trace;
use kvlane_trace::{GENERATION_MAX, TierBlocks};
use serde_json::{Value, json};

use super::{report::Run, trace_file::RecordedFacts};
use crate::size::Size;

/// The replayed sizes, as multiples of the daemon's pool.
pub(super) const SIZES: [f64; 4] = [1.0, 0.5, 2.0, 4.0];

/// Shares of looked-up blocks, in percent.
pub(super) struct Beside<'a> {
    recorded: &'a RecordedFacts,
    /// The daemon's hits: of all requests, by tier, and of their second half.
    hit: [f64; 3],
    late: f64,
    /// The replay's hits at the daemon's size, of the same requests.
    replayed: f64,
    replayed_late: f64,
    /// The replay's hits at half, twice and four times that size.
    others: [f64; 3],
}

impl<'a> Beside<'a> {
    /// `runs` are those of [`SIZES`], in this order.
    pub(super) fn new(recorded: &'a RecordedFacts, trace: &Trace, runs: &[Run]) -> Self {
        let percent = |part: u64, whole: usize| 100.0 * part as f64 / whole.max(1) as f64;
        let TierBlocks { ram, ssd, peers } = recorded.hit;
        let of = |index: usize| {
            let replayed = &runs[index].replayed;
            percent((replayed.prefix_hits + replayed.ssd_prefix_hits) as u64, replayed.references)
        };
        let (late_references, late_hits) = runs[0].replayed.late;
        Self {
            recorded,
            hit: [ram, ssd, peers].map(|blocks| percent(blocks, trace.references())),
            late: percent(recorded.late_hit.total(), late_references),
            replayed: of(0),
            replayed_late: percent(late_hits as u64, late_references),
            others: [of(1), of(2), of(3)],
        }
    }

    pub(super) fn to_json(&self) -> Value {
        let header = &self.recorded.header;
        let [ram, ssd, peers] = self.hit;
        let [half, twice, four_times] = self.others;
        json!({
            "policy": header.policy,
            "pool_bytes": header.pool_bytes,
            "seconds": header.seconds,
            "dropped": header.dropped,
            "daemon_hit_percent": ram + ssd + peers,
            "daemon_ram_hit_percent": ram,
            "daemon_ssd_hit_percent": ssd,
            "daemon_peer_hit_percent": peers,
            "replay_hit_percent": self.replayed,
            "second_half": {"daemon_hit_percent": self.late, "replay_hit_percent": self.replayed_late},
            "replay_half_the_pool_hit_percent": half,
            "replay_twice_the_pool_hit_percent": twice,
            "replay_four_times_the_pool_hit_percent": four_times,
        })
    }

    pub(super) fn to_text(&self) -> String {
        let header = &self.recorded.header;
        let [ram, ssd, peers] = self.hit;
        let [half, twice, four_times] = self.others;
        let mut text =
            format!("hits, % of the looked-up blocks{:>22}{:>16}\n", "all requests", "second half");
        let mut row = |name: String, all: f64, late: Option<f64>| {
            let late = late.map_or_else(String::new, |late| format!("{late:.1}"));
            text.push_str(&format!("{name:<35}{all:>18.1}{late:>16}\n"));
        };
        row(format!("the daemon, {}", Size(header.pool_bytes)), ram + ssd + peers, Some(self.late));
        if ssd + peers > 0.0 {
            row("  of it from its SSD".into(), ssd, None);
            row("  of it from other hosts".into(), peers, None);
        }
        row(format!("a replay at this size, {}", header.policy), self.replayed, Some(self.replayed_late));
        row("  at half the size".into(), half, None);
        row("  at twice the size".into(), twice, None);
        row("  at four times the size".into(), four_times, None);
        text.push_str(
            "A replay begins with an empty pool. If the daemon's was full, compare the second half.\n",
        );
        let facts = &self.recorded;
        if header.dropped > 0 {
            let dropped = header.dropped;
            text.push_str(&format!(
                "{dropped} requests are missing or have no blocks: the daemon was too busy.\n"
            ));
        }
        if header.forgotten_blocks > 0 {
            text.push_str(&format!(
                "{} blocks were forgotten while recording: replays of more blocks than {} hit too little.\n",
                header.forgotten_blocks, GENERATION_MAX
            ));
        }
        if facts.has_several_sizes {
            text.push_str("The blocks have several sizes, so the replay counts with their mean.\n");
        }
        text.push('\n');
        text
    }
}
