//! Problems in plain words, each with an action for the operator. Pure.

use kvlane_door::{
    Problems,
    Severity::{Critical, Info, Warning},
};

use crate::metrics::scrape::Scrape;

/// Lookups of fewer blocks say little about the size of the pool.
const REFERENCES_MIN: u64 = 1000;
/// So much more could have been hit by a pool without limit before the page says it.
const GAP_MIN: f64 = 0.1;
/// A sum of a rate a second, from which on the event has happened. A single event may sum up to a little less than 1,
/// because samples are a little more than a second apart.
const EVENT_MIN: f64 = 0.5;

/// All problems of this moment, the worst first. `recent` is the sum of a series over the last ten minutes.
pub(super) fn problems(
    scrape: &Scrape,
    is_unreachable: bool,
    recent: impl Fn(&'static str) -> f64,
) -> Problems {
    let mut found = Problems::default();
    let mut say = |is_there, severity, text, action| found.add(is_there, severity, text, action);
    let (stats, counters) = (&scrape.stats, &scrape.stats.counters);
    say(
        is_unreachable,
        Critical,
        "Engines cannot reach the daemon's socket.".into(),
        "The daemon's log says why.",
    );
    say(
        counters.scrub_bad > 0,
        Critical,
        format!("{} blocks in RAM had changed and were dropped.", counters.scrub_bad),
        "Test the machine's memory.",
    );
    if let Some(ssd) = &scrape.ssd {
        let degraded = ssd.devices.iter().filter(|device| device.degraded.is_some()).count();
        say(
            degraded > 0,
            Warning,
            format!("{degraded} of {} SSDs take no writes.", ssd.devices.len()),
            "kvlane status says whether they failed or are full.",
        );
        say(
            ssd.tier.reads_damaged > 0,
            Warning,
            format!("{} blocks on the SSD had wrong bytes and were dropped.", ssd.tier.reads_damaged),
            "Check the disk's own health.",
        );
    }
    let unsaved = recent("unsaved_blocks");
    say(
        unsaved >= EVENT_MIN,
        Warning,
        format!(
            "{unsaved:.0} blocks were not saved in the last ten minutes, because all of the pool was in use."
        ),
        if stats.seal_queue > stats.blocks / 10 {
            "Start the daemon with more --seal-threads: blocks wait for their checksums."
        } else {
            "Give the daemon a larger pool (--pool-size)."
        },
    );
    if let Some(cluster) = &scrape.cluster {
        for (members, what) in [(&cluster.members, "other daemons"), (&cluster.replicas, "index replicas")] {
            let lost = members.iter().filter(|member| !member.is_reached).count();
            say(
                lost > 0,
                Warning,
                format!("{lost} of {} {what} are not reached.", members.len()),
                "kvlane status names them and says why.",
            );
        }
    }
    say(
        scrape.connected("worker") == 0,
        Info,
        "No engine is connected.".into(),
        "Look at the engine's log (vllm.kvlane), and run kvlane doctor beside it.",
    );
    let refused: f64 = scrape.events.refused().into_iter().map(|(_, count)| count).sum();
    say(
        refused > 0.0,
        Info,
        format!("{refused} requests of engines or tools were refused since the start."),
        "The daemon's log has the reasons.",
    );
    // The last window is usually the longest.
    let of_all = || scrape.ceilings.iter().filter(|reading| reading.namespace.is_none());
    if let Some(reading) = of_all().rfind(|reading| reading.references >= REFERENCES_MIN) {
        let (hit, ceiling) = (100.0 * reading.hit_ratio, 100.0 * reading.ceiling);
        say(
            reading.ceiling - reading.hit_ratio > GAP_MIN && recent("evicted_blocks") >= EVENT_MIN,
            Info,
            format!(
                "The pool may be too small: {hit:.0} % of the blocks of the last {} were hits, and without a limit {ceiling:.0} % would have been.",
                reading.window
            ),
            "kvlane record, then kvlane replay, say how large it should be.",
        );
    }
    found
}
