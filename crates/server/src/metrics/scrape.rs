//! A snapshot of all figures that the metrics read, and helpers that pick a metric's values from it.

use std::{collections::BTreeMap, fmt::Display, sync::Arc};

use kvlane_block::Namespace;
use kvlane_cluster::{ClusterStatus, MemberStatus};
use kvlane_door::{Distribution, Labels};
use kvlane_policy::Choice;
use kvlane_store::{PolicyReport, RESIDENCE_BOUNDS_S, SpaceStats, StoreStats};

use super::events::Events;
use crate::observer::Reading;

/// Values of the label `role`.
pub(crate) const ROLES: [&str; 3] = ["scheduler", "worker", "tool"];

/// Taken once a scrape, for all metrics.
#[derive(Debug)]
pub(crate) struct Scrape {
    pub(crate) stats: StoreStats,
    pub(crate) policy: PolicyReport,
    /// A namespace has one for each of its cuts.
    pub(crate) spaces: Vec<SpaceStats>,
    /// Ready engines by their namespace and its name.
    pub(crate) engines: Vec<(Namespace, String, u64)>,
    /// The role of each session, and whether its connection was lost.
    pub(crate) sessions: Vec<(&'static str, bool)>,
    /// Connections turned away, by door.
    pub(crate) turned_away: [(&'static str, u64); 2],
    /// Lookups that await another engine's saves.
    pub(crate) waiting_lookups: usize,
    /// The blocks that they await; one that two lookups await counts twice.
    pub(crate) watched_blocks: usize,
    pub(crate) ceilings: Vec<Reading>,
    pub(crate) ceilings_left_out: u64,
    /// All 0 without a GPU.
    pub(crate) gpus: GpuScrape,
    /// None without an SSD.
    pub(crate) ssd: Option<SsdScrape>,
    /// None without other daemons.
    pub(crate) cluster: Option<ClusterStatus>,
    /// Counted as they happen; the only part that is not a snapshot.
    pub(crate) events: Arc<Events>,
}

/// Figures of the daemon's GPUs.
#[derive(Debug, Default)]
pub(crate) struct GpuScrape {
    pub(crate) relayed_bytes: u64,
    pub(crate) staged_bytes: u64,
    pub(crate) unstaged_loads: u64,
    /// By the GPU's ordinal.
    pub(crate) bytes_by_link: BTreeMap<u32, u64>,
    /// Thresholds from which copy engines are used, by direction.
    pub(crate) engine_bytes: Vec<(&'static str, u64)>,
}

/// Figures of the SSD tier.
#[derive(Debug)]
pub(crate) struct SsdScrape {
    pub(crate) tier: kvlane_ssd::Stats,
    pub(crate) devices: Vec<kvlane_ssd::DeviceStatus>,
}

impl Scrape {
    /// How many sessions of a role are connected.
    pub(crate) fn connected(&self, role: &str) -> u64 {
        self.sessions.iter().filter(|(of, is_lost)| !is_lost && *of == role).count() as u64
    }

    /// How many sessions have lost their connection.
    pub(crate) fn lost_sessions(&self) -> u64 {
        self.sessions.iter().filter(|(_, is_lost)| *is_lost).count() as u64
    }

    /// The report of the policy `auto`; None under a fixed policy.
    pub(crate) fn auto(&self) -> Option<&PolicyReport> {
        Some(&self.policy).filter(|report| report.choice == Choice::Auto)
    }

    /// A figure of all namespaces together, by window.
    pub(crate) fn of_windows(&self, value: impl Fn(&Reading) -> f64) -> Samples {
        let of_all = self.ceilings.iter().filter(|reading| reading.namespace.is_none());
        by_label(of_all.map(|reading| (reading.window, value(reading))))
    }

    /// A figure of each namespace, with its name and the window.
    pub(crate) fn of_namespace_windows(&self, value: impl Fn(&Reading) -> f64) -> Samples {
        let names: BTreeMap<Namespace, &str> =
            self.spaces.iter().map(|space| (space.namespace, space.name.as_str())).collect();
        let of_namespace = |reading: &Reading| {
            let namespace = reading.namespace?;
            let name = names.get(&namespace).copied().unwrap_or_default();
            Some((vec![namespace.to_string(), name.to_owned(), reading.window.to_string()], value(reading)))
        };
        self.ceilings.iter().filter_map(of_namespace).collect()
    }

    /// How long the operations of each SSD took, by device and operation.
    pub(crate) fn ssd_latencies(&self) -> Vec<(Labels, Distribution)> {
        let row = |device: &kvlane_ssd::DeviceStatus, operation: &str, took: &kvlane_ssd::Latencies| {
            let labels = vec![device.path.display().to_string(), operation.to_owned()];
            (
                labels,
                Distribution::new(
                    &kvlane_ssd::LATENCY_BOUNDS_US,
                    took.counts.to_vec(),
                    took.sum_ns as f64 / 1e9,
                ),
            )
        };
        let rows = |device| {
            [row(device, "read", &device.read_latencies), row(device, "write", &device.write_latencies)]
        };
        self.ssd_devices().flat_map(rows).collect()
    }

    /// Rates of each SSD's reads both ways, where they were measured.
    pub(crate) fn ssd_path_rates(&self) -> Samples {
        let rows = |device: &kvlane_ssd::DeviceStatus| {
            let row = |path: &str, rate: u64| {
                (vec![device.path.display().to_string(), path.to_owned()], rate as f64)
            };
            let (direct, staged) =
                device.path_taken.rates.map_or((0, 0), |rates| (rates.direct, rates.staged));
            [row("direct", direct), row("staged", staged)]
        };
        self.ssd_devices().flat_map(rows).collect()
    }

    /// How long evicted blocks had been in the pool.
    pub(crate) fn residence(&self) -> Distribution {
        const BOUNDS_US: [u64; RESIDENCE_BOUNDS_S.len()] = {
            let mut bounds = RESIDENCE_BOUNDS_S;
            let mut at = 0;
            while at < bounds.len() {
                bounds[at] *= 1_000_000;
                at += 1;
            }
            bounds
        };
        let residence = &self.stats.residence;
        Distribution::new(&BOUNDS_US, residence.counts.to_vec(), residence.seconds as f64)
    }

    /// Each device of the SSD tier.
    pub(crate) fn ssd_devices(&self) -> impl Iterator<Item = &kvlane_ssd::DeviceStatus> {
        self.ssd.iter().flat_map(|ssd| &ssd.devices)
    }
}

/// The values of a metric, each with its label values.
pub(crate) type Samples = Vec<(Labels, f64)>;

/// A value for each value of the metric's only label.
pub(crate) fn by_label<L: Display, N: Number>(values: impl IntoIterator<Item = (L, N)>) -> Samples {
    values.into_iter().map(|(label, value)| (vec![label.to_string()], value.number())).collect()
}

/// A value for each namespace and its name: the sum over its spaces, one for each cut.
pub(crate) fn by_namespace(spaces: &[SpaceStats], value: impl Fn(&SpaceStats) -> u64) -> Samples {
    let mut sums: BTreeMap<(Namespace, &str), u64> = BTreeMap::new();
    for space in spaces {
        *sums.entry((space.namespace, &space.name)).or_default() += value(space);
    }
    let labelled = |((namespace, name), sum): ((Namespace, &str), u64)| {
        (vec![namespace.to_string(), name.to_owned()], sum as f64)
    };
    sums.into_iter().map(labelled).collect()
}

/// A value of the SSD tier; none without one.
pub(crate) fn of_ssd(scrape: &Scrape, value: impl Fn(&SsdScrape) -> u64) -> Samples {
    scrape.ssd.iter().map(|ssd| (Labels::new(), value(ssd) as f64)).collect()
}

/// How many daemons or replicas are reached, and how many are not; none without a cluster.
pub(crate) fn of_reached(scrape: &Scrape, all: impl Fn(&ClusterStatus) -> &Vec<MemberStatus>) -> Samples {
    let Some(cluster) = &scrape.cluster else { return Samples::new() };
    let reached = all(cluster).iter().filter(|member| member.is_reached).count() as u64;
    by_label([("reached", reached), ("not reached", all(cluster).len() as u64 - reached)])
}

/// A value of the cluster; none without other daemons.
pub(crate) fn of_cluster(scrape: &Scrape, value: impl Fn(&ClusterStatus) -> u64) -> Samples {
    scrape.cluster.iter().map(|cluster| (Labels::new(), value(cluster) as f64)).collect()
}

/// A value of the policy `auto`; none under a fixed policy.
pub(crate) fn of_auto(scrape: &Scrape, value: impl Fn(&PolicyReport) -> u64) -> Samples {
    scrape.auto().map(|report| (Labels::new(), value(report) as f64)).into_iter().collect()
}

/// A type that becomes a metric's value: Prometheus keeps only floating-point numbers.
pub(crate) trait Number {
    fn number(self) -> f64;
}

impl Number for u64 {
    fn number(self) -> f64 {
        self as f64
    }
}

impl Number for f64 {
    fn number(self) -> f64 {
        self
    }
}
