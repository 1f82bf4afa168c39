//! `kvlane record`: the requests of a running daemon.

use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use kvlane_client::{Tool, ToolError};
use kvlane_proto::v1::{self, RecordedModel, RecordedRequest, RecordedRequests, ended_request};
use kvlane_trace::{Grade, Leg, Lengths, Recorded, Run, TierBlocks, file::Header};

use super::{
    recording::{FileArgs, Source, record},
    trace_writer::{ModelFacts, TraceWriter},
};
use crate::status::{DaemonArgs, hex};

#[derive(Debug, Args)]
pub(crate) struct RecordArgs {
    #[command(flatten)]
    file: FileArgs,
    /// Record only this engine, by its engine_id in `kvlane status`
    #[arg(long, value_name = "ID")]
    engine: Option<String>,
    /// Record only this namespace, as `kvlane status` prints it; the first digits are enough
    #[arg(long, value_name = "NAMESPACE")]
    namespace: Option<String>,
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
    let (cursor, began_us) = (started.cursor, started.began_us);
    let mut reader = Reader {
        args,
        wanted,
        tool: Some(tool),
        cursor,
        began_us,
        left_out: 0,
        dropped_before: 0,
        forgotten: 0,
        forgotten_before: 0,
    };
    record(&args.file, header(&status, since), since, &mut reader)
}

fn header(status: &v1::Status, since: Duration) -> Header {
    Header {
        pool_bytes: status.pool_bytes,
        ssd_bytes: status.ssds.iter().map(|ssd| ssd.capacity_bytes).sum(),
        policy: status.policy.clone(),
        ..Header::new(Grade::Blocks, since)
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
    wanted: Wanted,
    /// None while no daemon answers.
    tool: Option<Tool>,
    cursor: u64,
    /// When the recording began that the cursor is of.
    began_us: u64,
    /// Requests that the daemon left out, by its last answer.
    left_out: u64,
    /// Dropped requests of former daemons, and those that were lost to this reader.
    dropped_before: u64,
    /// Blocks that this recording forgot, and those before it.
    forgotten: u64,
    forgotten_before: u64,
}

impl Reader<'_> {
    /// None while no daemon answers.
    fn ask(&mut self, is_last: bool) -> Result<Option<RecordedRequests>, ToolError> {
        if let Some(tool) = &mut self.tool {
            return tool.read_recording(self.cursor, is_last).map(Some);
        }
        let Ok(mut tool) = self.args.daemon.connect() else { return Ok(None) };
        let answer = tool.read_recording(self.cursor, is_last)?;
        self.tool = Some(tool);
        Ok(Some(answer))
    }
}

impl Source for Reader<'_> {
    fn read(&mut self, writer: &mut TraceWriter, is_last: bool) -> Result<bool> {
        loop {
            let answer = match self.ask(is_last) {
                Ok(Some(answer)) => answer,
                Ok(None) => return Ok(false),
                // The daemon is stopping, or was replaced by an older one. The next read asks again.
                Err(ToolError::Refused(_)) => return Ok(false),
                Err(_) => {
                    self.tool = None;
                    return Ok(false);
                }
            };
            if answer.began_us != self.began_us {
                // The daemon was started again, or this reader was stopped for too long.
                writer.recorder_restarted();
                self.dropped_before += std::mem::take(&mut self.left_out);
                self.forgotten_before += std::mem::take(&mut self.forgotten);
                (self.cursor, self.began_us) = (1, answer.began_us);
                continue;
            }
            self.cursor = answer.cursor;
            self.dropped_before += answer.lost;
            self.left_out = answer.left_out;
            let header = writer.header();
            header.dropped = self.dropped_before + self.left_out;
            header.forgotten_blocks = self.forgotten_before + answer.forgotten_blocks;
            self.forgotten = answer.forgotten_blocks;
            let has_more = answer.has_more;
            write(answer, writer, &self.wanted)?;
            if !has_more {
                return Ok(true);
            }
        }
    }

    fn nothing_came(&self) -> &'static str {
        if self.args.engine.is_some() || self.args.namespace.is_some() {
            "no such request came meanwhile: see `kvlane status` for the names of engines and namespaces"
        } else {
            "no request came meanwhile: see `kvlane status` whether engines are connected"
        }
    }

    fn next(&self, file: &str) -> String {
        format!("next: kvlane replay {file} --beside")
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
        first_token: None,
    }
}
