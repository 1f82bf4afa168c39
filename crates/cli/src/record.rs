//! `kvlane record`: the requests of a running daemon, in a file for `kvlane replay`.

mod trace_writer;

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use kvlane_client::{Tool, ToolError};
use kvlane_proto::v1::{self, RecordedModel, RecordedRequest, RecordedRequests, ended_request};
use kvlane_trace::{
    Grade, Leg, Lengths, Recorded, Run, TierBlocks,
    file::{Header, VERSION},
};
use tokio::signal::unix::{SignalKind, signal};

use self::trace_writer::{ModelFacts, TraceWriter};
use crate::{
    span::Span,
    status::{DaemonArgs, hex},
};

/// Pause between two reads. The daemon keeps 4,096 requests meanwhile.
const INTERVAL: Duration = Duration::from_millis(250);
/// Pause between two writes of the header.
const HEADER_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
pub(crate) struct RecordArgs {
    /// The file to write
    file: PathBuf,
    /// How long to record: 90s, 10m, 1h, 2d [default: until Ctrl-C]
    #[arg(long = "for", value_name = "TIME", allow_hyphen_values = true)]
    span: Option<Span>,
    /// Record only this engine, by its engine_id in `kvlane status`
    #[arg(long, value_name = "ID")]
    engine: Option<String>,
    /// Record only this namespace, as `kvlane status` prints it; the first digits are enough
    #[arg(long, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// Write the names of engines and models too. Without it the file has numbers
    #[arg(long)]
    names: bool,
    /// Replace the file if it exists
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    daemon: DaemonArgs,
}

/// Records until the time is over, or a signal comes.
pub(crate) fn run(args: &RecordArgs) -> Result<()> {
    let wanted = Wanted::new(args)?;
    let mut tool = args.daemon.connect()?;
    let status = tool.status()?;
    let started = tool.read_recording(0, false)?;
    let since = Duration::from_millis(started.now_ms);
    let header = header(&status, since);
    let mut writer = TraceWriter::create(&args.file, header, since, args.force)?.with_names(args.names);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut term, mut interrupt) = {
        let _inside = runtime.enter();
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?)
    };
    let bar = progress_bar(args.span);
    let begun = Instant::now();
    let deadline = args.span.map(|Span(span)| begun + span);
    let mut reader =
        Reader { args, tool: Some(tool), cursor: started.cursor, left_out: 0, dropped_before: 0 };
    let mut header_at = begun + HEADER_INTERVAL;
    loop {
        let now = Instant::now();
        let pause =
            deadline.map_or(INTERVAL, |deadline| deadline.saturating_duration_since(now).min(INTERVAL));
        let was_stopped = runtime.block_on(async {
            tokio::select! {
                () = tokio::time::sleep(pause) => false,
                _ = term.recv() => true,
                _ = interrupt.recv() => true,
            }
        });
        let now = Instant::now();
        let is_last = was_stopped || deadline.is_some_and(|deadline| now >= deadline);
        let was_read = reader.read(&mut writer, &wanted, is_last)?;
        writer.header().seconds = now.duration_since(begun).as_secs_f64();
        if now >= header_at || is_last {
            writer.header().is_complete = is_last && was_read;
            writer.flush()?;
            header_at = now + HEADER_INTERVAL;
        }
        bar.set_position(now.duration_since(begun).as_secs());
        bar.set_message(writer.progress());
        if is_last {
            break;
        }
    }
    bar.finish_and_clear();
    println!("{}: {}", args.file.display(), writer.progress());
    if !writer.header().is_complete {
        println!("the daemon did not answer at the end, so its last requests are missing");
    }
    println!("{}", next(args, writer.header().requests));
    Ok(())
}

/// The sentence that says how to go on.
fn next(args: &RecordArgs, requests: u64) -> String {
    match (requests, &args.engine, &args.namespace) {
        (0, None, None) => {
            "no request came meanwhile: see `kvlane status` whether engines are connected".into()
        }
        (0, ..) => {
            "no such request came meanwhile: see `kvlane status` for the names of engines and namespaces"
                .into()
        }
        _ => format!("next: kvlane replay {} --beside", args.file.display()),
    }
}

fn header(status: &v1::Status, since: Duration) -> Header {
    Header {
        kvlane_trace: VERSION,
        kvlane: env!("CARGO_PKG_VERSION").into(),
        grade: Grade::Blocks,
        tokens_per_block: 0,
        started: since.as_secs(),
        seconds: 0.0,
        requests: 0,
        dropped: 0,
        forgotten_blocks: 0,
        restarts: 0,
        is_complete: false,
        pool_bytes: status.pool_bytes,
        ssd_bytes: status.ssds.iter().map(|ssd| ssd.capacity_bytes).sum(),
        block_bytes: 0,
        policy: status.policy.clone(),
    }
}

/// The requests that the user asked for.
struct Wanted {
    engine: Option<String>,
    namespace: Option<String>,
}

impl Wanted {
    fn new(args: &RecordArgs) -> Result<Self> {
        let namespace = args.namespace.as_ref().map(|text| text.to_ascii_lowercase());
        if namespace.as_ref().is_some_and(|text| {
            text.is_empty() || text.len() > 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit())
        }) {
            bail!("--namespace: it has up to 32 hexadecimal digits, as `kvlane status` prints it");
        }
        Ok(Self { engine: args.engine.clone(), namespace })
    }

    fn has(&self, request: &RecordedRequest, model: &RecordedModel) -> bool {
        let is_named = |prefix: &String| {
            let mut of_model = model.further_namespaces.iter().chain([&model.namespace]);
            of_model.any(|namespace| hex(namespace).starts_with(prefix))
        };
        self.engine.as_ref().is_none_or(|engine| *engine == request.engine_id)
            && self.namespace.as_ref().is_none_or(is_named)
    }
}

/// Reads the daemon's recording, also of a daemon that is started again meanwhile.
struct Reader<'a> {
    args: &'a RecordArgs,
    /// None while no daemon answers.
    tool: Option<Tool>,
    cursor: u64,
    /// Requests that the daemon left out, by its last answer.
    left_out: u64,
    /// Dropped requests of former daemons, and those that were lost to this reader.
    dropped_before: u64,
}

impl Reader<'_> {
    /// Reads all there is, and writes what is wanted. False if the daemon does not answer: it is tried again at the next read.
    fn read(&mut self, writer: &mut TraceWriter, wanted: &Wanted, is_last: bool) -> Result<bool> {
        loop {
            let answer = match self.ask(writer, is_last) {
                Ok(Some(answer)) => answer,
                Ok(None) => return Ok(false),
                Err(ToolError::Refused(sentence)) => bail!(sentence),
                Err(_) => {
                    self.tool = None;
                    return Ok(false);
                }
            };
            self.cursor = answer.cursor;
            self.dropped_before += answer.lost;
            self.left_out = answer.left_out;
            let header = writer.header();
            header.dropped = self.dropped_before + self.left_out;
            header.forgotten_blocks = answer.forgotten_blocks;
            let has_more = answer.has_more;
            write(answer, writer, wanted)?;
            if !has_more {
                return Ok(true);
            }
        }
    }

    /// None while no daemon answers.
    fn ask(
        &mut self,
        writer: &mut TraceWriter,
        is_last: bool,
    ) -> Result<Option<RecordedRequests>, ToolError> {
        if let Some(tool) = &mut self.tool {
            return tool.read_recording(self.cursor, is_last).map(Some);
        }
        let Ok(mut tool) = self.args.daemon.connect() else { return Ok(None) };
        // Numbers and cursors of another run, or of a recording that has ended meanwhile, mean nothing here.
        self.dropped_before += std::mem::take(&mut self.left_out);
        writer.recorder_restarted();
        let answer = tool.read_recording(0, is_last)?;
        self.tool = Some(tool);
        Ok(Some(answer))
    }
}

/// Writes the wanted requests of an answer.
fn write(answer: RecordedRequests, writer: &mut TraceWriter, wanted: &Wanted) -> Result<()> {
    let unknown = RecordedModel::default();
    for request in &answer.requests {
        let model = answer.models.iter().find(|model| model.namespace == request.namespace);
        let model = model.unwrap_or(&unknown);
        if !wanted.has(request, model) {
            continue;
        }
        let namespace = request.namespace.as_ref().try_into().unwrap_or_default();
        let facts = ModelFacts {
            namespace,
            name: model.name.clone(),
            tokens_per_block: model.tokens_per_block,
            block_bytes: model.block_bytes,
        };
        writer.push(&recorded(request, namespace), &facts)?;
    }
    Ok(())
}

fn recorded(request: &RecordedRequest, model: [u8; 16]) -> Recorded {
    let runs = |pairs: &[u64]| {
        let run = |pair: &[u64]| Run { first: pair[0], count: pair[1] };
        pairs.as_chunks::<2>().0.iter().map(|pair| run(pair)).collect()
    };
    Recorded {
        at: Duration::from_millis(request.at_ms),
        engine: request.engine_id.as_str().into(),
        model,
        blocks: runs(&request.blocks),
        saved: runs(&request.saved),
        hit: TierBlocks { ram: request.ram_blocks, ssd: request.ssd_blocks, peers: request.peer_blocks },
        engine_tokens: request.engine_tokens,
        lengths: request
            .has_ended
            .then_some(Lengths { prompt: request.prompt_tokens, output: request.output_tokens }),
        leg: match request.leg() {
            ended_request::Leg::Whole => Leg::Whole,
            ended_request::Leg::Prefill => Leg::Prefill,
            ended_request::Leg::Decode => Leg::Decode,
        },
    }
}

/// Shows on a terminal how far the recording is.
fn progress_bar(span: Option<Span>) -> ProgressBar {
    let (bar, style) = match span {
        Some(Span(span)) => {
            (ProgressBar::new(span.as_secs()), "recording [{bar:30}] {elapsed} of {len} s: {msg}")
        }
        None => (ProgressBar::new_spinner(), "recording for {elapsed}, until Ctrl-C: {msg}"),
    };
    if let Ok(style) = ProgressStyle::with_template(style) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
