//! A trace through the router's scheduler to simulated engines.

use std::{path::Path, sync::Arc, time::Duration};

use anyhow::{Context, Result, anyhow};
use kvlane_fleet::{Limits, NodeSetup, Replayed, Served, Setup, Summary, Trace, replay};
use kvlane_router::schedule::{Policy, Role};
use serde_json::{Value, json};

use super::{
    fleet_file,
    trace_file::TraceFile,
    work::{on_all_cores, progress_bar},
};

/// The share of the requests that measures a fleet's capacity. The last requests run alone, so they do not count.
const COUNTED: f64 = 0.95;
/// Points of a curve over time.
const SPANS: u32 = 180;
/// A speed at which practically all requests come at once.
const AT_ONCE: f64 = 1e6;

/// Replays all policies at all loads: the report. `trace` is the path that `file` was read from.
pub(super) fn run(trace: &Path, route: &Path, file: TraceFile) -> Result<Value> {
    let name = trace.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let block_tokens = file.block_tokens()?;
    let without_lengths = file.recorded.as_ref().map_or(0, |recorded| recorded.without_lengths);
    let requests = file
        .requests
        .map_err(|line| anyhow!(line))
        .with_context(|| format!("{}: --route needs the lengths of prompts and answers", trace.display()))?;
    let trace = Trace::new(block_tokens, requests);
    let fleet = fleet_file::read(route)?;
    let recorded = trace.requests.len() as f64 / trace.end().as_secs_f64().max(1e-3);
    let capacity = capacity(&trace, &fleet.setup);
    let loads: Vec<f64> = match fleet.speeds[..] {
        [] => fleet.loads.clone(),
        _ => fleet.speeds.iter().map(|speed| speed * recorded / capacity).collect(),
    };
    let cases: Vec<(f64, Policy)> =
        loads.iter().flat_map(|load| fleet.policies.iter().map(|policy| (*load, *policy))).collect();
    let bar = progress_bar(trace.requests.len() * cases.len(), "requests");
    let summaries = on_all_cores(&cases, |(load, policy)| {
        let mut setup = fleet.setup.clone();
        (setup.scheduler.policy, setup.scheduler.decode_policy) = (*policy, *policy);
        setup.speed = load * capacity / recorded;
        let replayed = replay(&trace, &setup, |count| bar.inc(count as u64));
        let over_time = over_time(&replayed, &setup, fleet.limits);
        (Summary::of(&replayed.served, fleet.limits), replayed.role_changes.len(), over_time)
    });
    bar.finish_and_clear();
    let results: Vec<Value> = cases
        .iter()
        .zip(&summaries)
        .map(|((load, policy), (summary, turns, over_time))| {
            json!({
                "load": load,
                "requests_per_second": load * capacity,
                "policy": policy.name(),
                "ttft_mean_ms": milliseconds(summary.ttft_mean),
                "ttft_p50_ms": milliseconds(summary.ttft_p50),
                "ttft_p99_ms": milliseconds(summary.ttft_p99),
                "tpot_p50_ms": milliseconds(summary.tpot_p50),
                "tpot_p99_ms": milliseconds(summary.tpot_p99),
                "within_limits_percent": 100.0 * summary.within,
                "found_percent": 100.0 * summary.found,
                "lost": summary.lost,
                "turns": turns,
                "over_time": over_time,
            })
        })
        .collect();
    Ok(json!({
        "trace": name,
        "requests": trace.requests.len(),
        "requests_without_lengths": without_lengths,
        "recorded_requests_per_second": recorded,
        "capacity_requests_per_second": capacity,
        "fleet": describe(&fleet.setup.nodes),
        "ttft_limit_ms": milliseconds(fleet.limits.ttft),
        "tpot_limit_ms": milliseconds(fleet.limits.tpot),
        "seed": fleet.setup.scheduler.seed,
        "results": results,
    }))
}

/// For each span of time: its start, its requests, the share of them that was served within limits, and the nodes of each
/// role at its end.
fn over_time(replayed: &Replayed, setup: &Setup, limits: Limits) -> Vec<Value> {
    let mut roles: Vec<Role> = setup.nodes.iter().map(|node| node.role).collect();
    let mut changes = replayed.role_changes.iter().peekable();
    let end = replayed.served.iter().map(|served| served.at).max().unwrap_or_default();
    let span = (end / SPANS).max(Duration::from_secs(1));
    let mut requests = replayed.served.iter().peekable();
    let mut spans = Vec::new();
    let mut from = Duration::ZERO;
    while from <= end {
        let to = from + span;
        while let Some(change) = changes.next_if(|change| change.at < to) {
            roles[change.node] = change.role;
        }
        let came: Vec<_> = std::iter::from_fn(|| requests.next_if(|served| served.at < to)).collect();
        let within = came.iter().filter(|served| limits.hold(served)).count();
        let count = |role| roles.iter().filter(|of| **of == role).count();
        spans.push(json!({
            "from_s": from.as_secs_f64(),
            "requests": came.len(),
            "within_limits_percent": (!came.is_empty()).then(|| 100.0 * within as f64 / came.len() as f64),
            "prefill_nodes": count(Role::Prefill),
            "decode_nodes": count(Role::Decode),
            "workers": count(Role::Worker),
        }));
        from = to;
    }
    spans
}

/// Requests a second that the fleet serves by the default policy if all of them wait from the beginning.
fn capacity(trace: &Trace, setup: &Setup) -> f64 {
    let bar = progress_bar(trace.requests.len(), "requests, to see what the fleet can serve");
    let mut setup = Setup { speed: AT_ONCE, ..setup.clone() };
    (setup.scheduler.policy, setup.scheduler.decode_policy) = (Policy::default(), Policy::default());
    setup.balance = None;
    setup.nodes.iter_mut().for_each(|node| {
        *node = NodeSetup { pool: node.pool, ..NodeSetup::new(node.role, Arc::clone(&node.class)) };
    });
    let served = replay(trace, &setup, |count| bar.inc(count as u64)).served;
    bar.finish_and_clear();
    let end = |each: &Served| each.last.map(|last| each.at + last);
    let mut ends: Vec<Duration> = served.iter().filter_map(end).collect();
    ends.sort_unstable();
    let counted = ((ends.len() as f64 * COUNTED) as usize).max(1);
    let last = ends.get(counted - 1).copied().unwrap_or(Duration::from_secs(1));
    counted as f64 / last.as_secs_f64().max(1e-9)
}

/// As "8 worker h100-llama-8b".
fn describe(nodes: &[NodeSetup]) -> String {
    let mut kinds: Vec<(String, usize)> = Vec::new();
    for node in nodes {
        let kind = format!("{} {}", node.role, node.class.name);
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, count)) => *count += 1,
            None => kinds.push((kind, 1)),
        }
    }
    kinds.iter().map(|(kind, count)| format!("{count} {kind}")).collect::<Vec<_>>().join(", ")
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The report as a table.
pub(super) fn to_text(report: &Value) -> String {
    let number = |value: &Value, name: &str| value[name].as_f64().unwrap_or(f64::NAN);
    let mut text = format!(
        "{} requests of {}, recorded at {:.2} a second; {} can serve {:.2} a second\nwithin limits: first token in {} ms, \
         {} ms a token behind it\n\n{:<6}{:<17}{:>9}{:>9}{:>9}{:>9}{:>9}{:>8}{:>6}\n{:<6}{:<17}{:>9}{:>9}{:>9}{:>9}{:>9}{:>8}{:>6}\n",
        report["requests"],
        report["trace"].as_str().unwrap_or_default(),
        number(report, "recorded_requests_per_second"),
        report["fleet"].as_str().unwrap_or_default(),
        number(report, "capacity_requests_per_second"),
        number(report, "ttft_limit_ms"),
        number(report, "tpot_limit_ms"),
        "load",
        "policy",
        "TTFT ms",
        "",
        "TPOT ms",
        "",
        "within",
        "found",
        "lost",
        "",
        "",
        "p50",
        "p99",
        "p50",
        "p99",
        "limits %",
        "%",
        "",
    );
    if report["requests_without_lengths"] != 0 {
        let left_out = &report["requests_without_lengths"];
        text.insert_str(
            0,
            &format!("{left_out} requests are left out, because their lengths are not known, or they have no answer\n"),
        );
    }
    let mut former = f64::NAN;
    for result in report["results"].as_array().into_iter().flatten() {
        let load = number(result, "load");
        let shown = if load == former { String::new() } else { format!("{:.0} %", 100.0 * load) };
        former = load;
        text.push_str(&format!(
            "{shown:<6}{:<17}{:>9.0}{:>9.0}{:>9.1}{:>9.1}{:>9.1}{:>8.1}{:>6}\n",
            result["policy"].as_str().unwrap_or_default(),
            number(result, "ttft_p50_ms"),
            number(result, "ttft_p99_ms"),
            number(result, "tpot_p50_ms"),
            number(result, "tpot_p99_ms"),
            number(result, "within_limits_percent"),
            number(result, "found_percent"),
            result["lost"],
        ));
    }
    text
}
