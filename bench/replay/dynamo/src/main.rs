//! A recorded trace to eight simulated workers, by Dynamo's selector and by policies of ours.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use std::{env, fs, thread};

use anyhow::{Context, Result, anyhow, bail};
use kvlane_fleet::{
    Class, Limits, NodeSetup, Request, Setup, Signals, Summary, Trace, TransferSetup, replay, replay_in,
};
use kvlane_router::schedule::{Policy, Role, SchedulerSettings};
use serde::Deserialize;
use serde_json::{Value, json};

mod dynamo;

use crate::dynamo::{Cut, Dynamo};

const USAGE: &str = "\
kvlane-replay-dynamo TRACE [--loads 0.3,0.5] [--prefill-load-scales 1,8] [--block-tokens 16] [--json FILE]";
/// As in Cargo.toml.
const DYNAMO: &str = "1.6.1";
const WORKERS: usize = 8;
/// With KV events, as Dynamo's selector hears them, or by the prompts that were sent.
const OURS: [(Policy, bool); 6] = [
    (Policy::LeastDelay, true),
    (Policy::LeastWork, true),
    (Policy::PrefixAffinity, true),
    (Policy::LeastDelay, false),
    (Policy::LeastWork, false),
    (Policy::PowerOfTwo, false),
];
const LIMITS: Limits = Limits { ttft: Duration::from_millis(2000), tpot: Duration::from_millis(50) };
/// Of Mooncake's traces.
const TRACE_BLOCK_TOKENS: u64 = 512;
/// As in `kvlane replay`: of all requests, so many count for what a fleet can serve, and all come at once, as good as.
const COUNTED: f64 = 0.95;
const AT_ONCE: f64 = 1e6;

struct Args {
    trace: PathBuf,
    loads: Vec<f64>,
    /// Of Dynamo, whose default is 1.
    scales: Vec<f64>,
    /// Of an engine's blocks, of which Dynamo hears.
    block_tokens: u64,
    json: Option<PathBuf>,
}

impl Args {
    fn read() -> Result<Self> {
        let mut args = env::args_os().skip(1);
        let trace = args.next().context(USAGE)?.into();
        let loads = vec![0.3, 0.5, 0.7, 0.8, 0.9, 0.95];
        let mut read = Self { trace, loads, scales: vec![1.0], block_tokens: 16, json: None };
        while let Some(name) = args.next() {
            let value = args.next().context(USAGE)?;
            let text = value.to_string_lossy();
            match name.to_string_lossy().as_ref() {
                "--loads" => read.loads = numbers(&text)?,
                "--prefill-load-scales" => read.scales = numbers(&text)?,
                "--block-tokens" => read.block_tokens = text.parse()?,
                "--json" => read.json = Some(value.into()),
                _ => bail!(USAGE),
            }
        }
        if read.block_tokens == 0 || !TRACE_BLOCK_TOKENS.is_multiple_of(read.block_tokens) {
            bail!("--block-tokens {}: {TRACE_BLOCK_TOKENS} is no multiple of it", read.block_tokens);
        }
        Ok(read)
    }
}

fn numbers(text: &str) -> Result<Vec<f64>> {
    text.split(',').map(|number| number.parse().with_context(|| format!("{number:?}"))).collect()
}

/// Who says which worker gets a request.
#[derive(Clone, Copy)]
enum Router {
    /// And whether the router hears which blocks engines have.
    Ours(Policy, bool),
    /// With its prefill load scale.
    Dynamo(f64),
}

impl Router {
    fn name(self) -> String {
        match self {
            Self::Ours(policy, true) => format!("{policy}, KV events"),
            Self::Ours(policy, false) => policy.name().to_owned(),
            Self::Dynamo(1.0) => "dynamo".to_owned(),
            Self::Dynamo(scale) => format!("dynamo, scale {scale}"),
        }
    }
}

#[derive(Deserialize)]
struct Line {
    timestamp: u64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

fn read_trace(text: &str) -> Result<Trace> {
    let requests = text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty()).map(|(line, number)| {
        let line: Line = serde_json::from_str(line).with_context(|| format!("line {number}"))?;
        Ok(Request {
            at: Duration::from_millis(line.timestamp),
            prompt_tokens: line.input_length,
            output_tokens: line.output_length,
            blocks: line.hash_ids,
        })
    });
    Ok(Trace::new(TRACE_BLOCK_TOKENS, requests.collect::<Result<_>>()?))
}

fn setup(class: &Arc<Class>, policy: Policy, kv_events: bool, speed: f64) -> Setup {
    let node = NodeSetup::new(Role::Worker, Arc::clone(class));
    Setup {
        nodes: vec![node; WORKERS],
        scheduler: SchedulerSettings { policy, decode_policy: policy, ..SchedulerSettings::default() },
        speed,
        transfer: TransferSetup::default(),
        signals: Signals { kv_events, ..Signals::default() },
        balance: None,
    }
}

/// Requests a second that the workers serve where all of them wait from the beginning, by our default policy.
fn capacity(trace: &Trace, class: &Arc<Class>) -> f64 {
    let served = replay(trace, &setup(class, Policy::default(), false, AT_ONCE), |_| ()).served;
    let mut ends: Vec<Duration> =
        served.iter().filter_map(|each| each.last.map(|last| each.at + last)).collect();
    ends.sort_unstable();
    let counted = ((ends.len() as f64 * COUNTED) as usize).max(1);
    let last = ends.get(counted - 1).copied().unwrap_or(Duration::from_secs(1));
    counted as f64 / last.as_secs_f64().max(1e-9)
}

fn run(trace: &Trace, class: &Arc<Class>, cut: &Cut, router: Router, speed: f64) -> Result<Summary> {
    let served = match router {
        Router::Ours(policy, kv_events) => {
            replay(trace, &setup(class, policy, kv_events, speed), |_| ()).served
        }
        Router::Dynamo(scale) => {
            let setup = setup(class, Policy::default(), false, speed);
            let mut dynamo = Dynamo::new(cut, WORKERS as u64, class, scale, setup.scheduler.seed)?;
            let served = replay_in(&mut dynamo, trace, &setup, |_| ()).served;
            dynamo.finish()?;
            served
        }
    };
    Ok(Summary::of(&served, LIMITS))
}

/// In the order of the cases, on two threads.
fn on_threads<C: Sync, T: Send>(cases: &[C], work: impl Fn(&C) -> Result<T> + Sync) -> Result<Vec<T>> {
    let next = AtomicUsize::new(0);
    let take = || {
        let mut done = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(case) = cases.get(number) else { break };
            done.push((number, work(case)?));
        }
        Ok(done)
    };
    let done: Result<Vec<Vec<(usize, T)>>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..2).map(|_| scope.spawn(take)).collect();
        threads.into_iter().map(|each| each.join().map_err(|_| anyhow!("a thread died"))?).collect()
    });
    let mut done: Vec<_> = done?.into_iter().flatten().collect();
    done.sort_by_key(|(number, _)| *number);
    Ok(done.into_iter().map(|(_, done)| done).collect())
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn main() -> Result<()> {
    let args = Args::read()?;
    let place = || args.trace.display().to_string();
    let trace = read_trace(&fs::read_to_string(&args.trace).with_context(place)?).with_context(place)?;
    let class = Arc::new(Class::default());
    let cut = Cut::new(&trace, args.block_tokens);
    let recorded = trace.requests.len() as f64 / trace.end().as_secs_f64().max(1e-3);
    let capacity = capacity(&trace, &class);
    let ours = OURS.map(|(policy, kv_events)| Router::Ours(policy, kv_events));
    let routers: Vec<Router> = args.scales.iter().map(|scale| Router::Dynamo(*scale)).chain(ours).collect();
    let cases: Vec<(f64, Router)> =
        args.loads.iter().flat_map(|load| routers.iter().map(|router| (*load, *router))).collect();
    let summaries =
        on_threads(&cases, |(load, router)| run(&trace, &class, &cut, *router, load * capacity / recorded))?;
    println!(
        "{:<6}{:<27}{:>9}{:>9}{:>9}{:>9}{:>9}{:>8}{:>6}",
        "load", "policy", "TTFT p50", "p99", "TPOT p50", "p99", "within %", "found %", "lost"
    );
    let mut results: Vec<Value> = Vec::new();
    for ((load, router), summary) in cases.iter().zip(&summaries) {
        let name = router.name();
        let times = [summary.ttft_p50, summary.ttft_p99, summary.tpot_p50, summary.tpot_p99];
        let [ttft_p50, ttft_p99, tpot_p50, tpot_p99] = times.map(milliseconds);
        let (within, found) = (100.0 * summary.within, 100.0 * summary.found);
        println!(
            "{load:<6}{name:<27}{ttft_p50:>9.0}{ttft_p99:>9.0}{tpot_p50:>9.1}{tpot_p99:>9.1}{within:>9.1}{found:>8.1}{:>6}",
            summary.lost
        );
        results.push(json!({
            "load": load,
            "requests_per_second": load * capacity,
            "policy": name,
            "ttft_p50_ms": ttft_p50,
            "ttft_p99_ms": ttft_p99,
            "tpot_p50_ms": tpot_p50,
            "tpot_p99_ms": tpot_p99,
            "within_limits_percent": within,
            "found_percent": found,
            "lost": summary.lost,
        }));
    }
    let report = json!({
        "trace": args.trace.file_name().unwrap_or_default().to_string_lossy(),
        "requests": trace.requests.len(),
        "recorded_requests_per_second": recorded,
        "capacity_requests_per_second": capacity,
        "fleet": format!("{WORKERS} worker {}", class.name),
        "dynamo_kv_router": DYNAMO,
        "dynamo_block_tokens": args.block_tokens,
        "ttft_limit_ms": milliseconds(LIMITS.ttft),
        "tpot_limit_ms": milliseconds(LIMITS.tpot),
        "seed": SchedulerSettings::default().seed,
        "results": results,
    });
    if let Some(path) = args.json {
        fs::write(path, format!("{report:#}\n"))?;
    }
    Ok(())
}
