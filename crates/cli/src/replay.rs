//! `kvlane replay`: a recorded trace against caches of several sizes and policies, or through a router and a fleet of engines,
//! in virtual time.

mod beside;
mod capacity;
mod fleet;
mod fleet_file;
mod picture;
mod pool_table;
mod report;
mod trace_file;
mod work;

use std::{
    io::{ErrorKind, Write},
    path::PathBuf,
    time::Instant,
};

use anyhow::{Result, bail};
use clap::Args;
use kvlane_policy::{Choice, PolicyKind, Setup, Trace, clairvoyant, estimate_ceiling, replay};
use serde_json::Value;

use self::{capacity::Capacity, report::Run, trace_file::TraceFile};
use crate::size::Size;

#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// A file of `kvlane record`; or requests, one JSON object a line: Mooncake's (timestamp in ms, hash_ids) or Qwen-Bailian's
    /// (chat_id, timestamp in s, hash_ids); with --route also input_length and output_length
    trace: PathBuf,
    /// Beside what the recorded daemon hit: a replay at its size and policy, at half, twice and four times the size
    #[arg(long, conflicts_with_all = ["route", "policy", "capacity", "block_bytes", "ssd", "with_scans"])]
    beside: bool,
    /// Send the requests through `kvlane route`'s scheduler to the simulated engines that this file describes, by each of its
    /// policies and at each of its loads (docs/replay.md); an empty file is eight H100s
    #[arg(long, value_name = "FILE", conflicts_with_all = ["policy", "capacity", "block_bytes", "ssd", "with_scans"])]
    route: Option<PathBuf>,
    /// Policies: lru, arc, s3fifo, sieve, tinylfu, wtinylfu, learned, auto, or all
    #[arg(long, value_name = "LIST", default_value = "all", value_delimiter = ',', value_parser = parse_policy)]
    policy: Vec<Policies>,
    /// Cache sizes: a share of the trace's different blocks (10%), blocks (50000), or bytes (1tib; needs --block-bytes)
    #[arg(long, value_name = "LIST", default_value = "1%,3%,10%,30%", value_delimiter = ',')]
    capacity: Vec<Capacity>,
    /// Bytes of one block of the trace in the cache, such as 64mib for 512 tokens of a model with 128 KiB a token
    #[arg(long, value_name = "SIZE")]
    block_bytes: Option<Size>,
    /// Capacity of an SSD tier below: it gets what comes into RAM, and a hit there brings it back
    #[arg(long, value_name = "CAPACITY")]
    ssd: Option<Capacity>,
    /// After each request one of the same length whose blocks are never asked for again
    #[arg(long)]
    with_scans: bool,
    /// Print JSON; then a picture is drawn only with --plot
    #[arg(long)]
    json: bool,
    /// The picture, hit rate against capacity or first tokens against load: a PNG [default: the trace's name in the current
    /// folder]
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// A second picture: what the policy learned has learnt in the largest cache, hit density by age of the kinds of blocks that it
    /// saw most: a PNG
    #[arg(long, value_name = "FILE", conflicts_with = "route")]
    plot_learned: Option<PathBuf>,
}

#[derive(Clone, Debug)]
enum Policies {
    All,
    One(Choice),
}

fn parse_policy(text: &str) -> Result<Policies, String> {
    match text.trim() {
        "all" => Ok(Policies::All),
        "auto" => Ok(Policies::One(Choice::Auto)),
        name => name
            .parse()
            .map(|kind| Policies::One(Choice::Fixed(kind)))
            .map_err(|error: kvlane_policy::UnknownPolicy| format!("{error}; or auto, or all")),
    }
}

impl ReplayArgs {
    fn policies(&self) -> Vec<Choice> {
        let mut choices = Vec::new();
        for policies in &self.policy {
            match policies {
                Policies::All => {
                    choices.extend(PolicyKind::ALL.map(Choice::Fixed));
                    choices.push(Choice::Auto);
                }
                Policies::One(choice) => choices.push(*choice),
            }
        }
        let mut unique = Vec::new();
        choices.retain(|choice| {
            let new = !unique.contains(choice);
            unique.push(*choice);
            new
        });
        choices
    }
}

/// The caches to replay.
struct Asked {
    policies: Vec<Choice>,
    capacity: Vec<Capacity>,
    ssd: Option<Capacity>,
    block_bytes: Option<Size>,
}

impl Asked {
    /// As the flags say, or with --beside as the recorded daemon was. A recorded trace knows the bytes of a block.
    fn new(args: &ReplayArgs, file: &TraceFile) -> Result<Self> {
        let of_trace = file.recorded.as_ref().map(|recorded| recorded.block_bytes).filter(|bytes| *bytes > 0);
        let block_bytes = args.block_bytes.or(of_trace.map(Size));
        if !args.beside {
            let (policies, capacity, ssd) = (args.policies(), args.capacity.clone(), args.ssd.clone());
            return Ok(Self { policies, capacity, ssd, block_bytes });
        }
        let Some(header) = file.recorded.as_ref().map(|recorded| &recorded.header) else {
            bail!(
                "--beside compares with the daemon that was recorded, and this is no file of kvlane record"
            );
        };
        if header.pool_bytes == 0 {
            bail!("--beside compares with a daemon's hits, and this trace was recorded at a router");
        }
        let Ok(Policies::One(policy)) = parse_policy(&header.policy) else {
            bail!("the trace's header names no policy that this kvlane knows: '{}'", header.policy);
        };
        let capacity =
            beside::SIZES.map(|times| Capacity::Bytes((header.pool_bytes as f64 * times) as u64)).into();
        let ssd = (header.ssd_bytes > 0).then_some(Capacity::Bytes(header.ssd_bytes));
        Ok(Self { policies: vec![policy], capacity, ssd, block_bytes })
    }
}

/// Replays the trace, prints the report, and draws it.
pub(crate) fn run(args: &ReplayArgs) -> Result<()> {
    let file = trace_file::read(&args.trace)?;
    if let Some(route) = &args.route {
        let report = fleet::run(&args.trace, route, file)?;
        let text = fleet::to_text(&report);
        return publish(args, &report, &text, "route_replay_picture");
    }
    let pictures = args.plot.iter().chain(&args.plot_learned);
    if let Some(path) =
        pictures.clone().find(|path| path.extension().is_none_or(|extension| extension != "png"))
    {
        bail!("a picture is a PNG: name it {}", path.with_extension("png").display());
    }
    let asked = Asked::new(args, &file)?;
    let learns = |choice: &Choice| choice.first() == PolicyKind::Learned;
    if args.plot_learned.is_some() && !asked.policies.iter().any(learns) {
        bail!("--plot-learned draws what the policy learned has learnt: it needs --policy learned, or all");
    }
    let trace = if args.with_scans { file.trace.with_scans() } else { file.trace };
    let blocks = |capacity: &Capacity| capacity.blocks(trace.distinct(), asked.block_bytes);
    let ssd_capacity = asked.ssd.as_ref().map(&blocks).transpose()?.unwrap_or(0);
    let mut setups = Vec::new();
    for policy in asked.policies.iter().copied() {
        for capacity in &asked.capacity {
            let wanted = capacity;
            let capacity = blocks(wanted)?;
            if u32::try_from(capacity).is_err() || u32::try_from(ssd_capacity).is_err() {
                bail!(
                    "a capacity of {} blocks is too much: at most {}",
                    capacity.max(ssd_capacity),
                    u32::MAX
                );
            }
            let share = wanted.share(capacity, trace.distinct());
            setups.push((Setup { policy, capacity, ssd_capacity }, share));
        }
    }
    let runs = replay_all(&trace, &setups);
    let blocks = |(setup, _): &(Setup, f64)| setup.capacity + setup.ssd_capacity;
    let bounds = setups.iter().map(blocks).map(|blocks| (blocks, clairvoyant(&trace, blocks))).collect();
    let report = report::Report {
        name: args.trace.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        format: file.format,
        with_scans: args.with_scans,
        block_bytes: asked.block_bytes.map(|size| size.0),
        ssd: asked.ssd.is_some(),
        ceiling: trace.ceiling(),
        estimated: estimate_ceiling(&trace),
        trace: &trace,
        runs: &runs,
        bounds: &bounds,
    };
    let mut json = report.to_json();
    let mut text = report.to_text();
    if let Some(recorded) = file.recorded.as_ref().filter(|_| args.beside) {
        let beside = beside::Beside::new(recorded, &trace, &runs);
        json["beside"] = beside.to_json();
        text.insert_str(0, &beside.to_text());
    }
    publish(args, &json, &text, "replay_picture")?;
    if let Some(path) = &args.plot_learned {
        picture::draw(path, &json, "learned_picture")?;
        if !args.json {
            print(&format!("{}\n", path.display()))?;
        }
    }
    Ok(())
}

/// Prints. A closed pipe, as of `head`, is no error.
fn print(text: &str) -> Result<()> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// Prints the report, and draws it.
fn publish(args: &ReplayArgs, json: &Value, text: &str, module: &str) -> Result<()> {
    print(&if args.json { format!("{json:#}\n") } else { text.to_owned() })?;
    match &args.plot {
        Some(path) => picture::draw(path, json, module)?,
        None if args.json => return Ok(()),
        None => {
            let path = picture::default_path(&args.trace);
            if let Err(error) = picture::draw(&path, json, module) {
                return print(&format!("no picture: {error:#}\n"));
            }
            return print(&format!("{}\n", path.display()));
        }
    }
    if let Some(path) = args.plot.as_ref().filter(|_| !args.json) {
        print(&format!("{}\n", path.display()))?;
    }
    Ok(())
}

/// Replays all setups, each with its share, on all cores. The results have the order of `setups`.
fn replay_all(trace: &Trace, setups: &[(Setup, f64)]) -> Vec<Run> {
    let bar = work::progress_bar(trace.references() * setups.len(), "references");
    let runs = work::on_all_cores(setups, |&(setup, share)| {
        let start = Instant::now();
        let replayed = replay(trace, setup, |references| bar.inc(references as u64));
        Run { setup, share, replayed, seconds: start.elapsed().as_secs_f64() }
    });
    bar.finish_and_clear();
    runs
}
