//! `kvlane route record`: the requests of a running router.

use std::{collections::HashMap, time::Duration};

use anyhow::{Result, anyhow};
use clap::Args;
use kvlane_router::{
    members::{AskError, Call},
    recording::{RecordedPage, RecordedRequest, TOKENS_PER_BLOCK},
};
use kvlane_trace::{Grade, Leg, Lengths, Recorded, Run, TierBlocks, file::Header};

use super::{
    recording::{FileArgs, Source, record},
    trace_writer::{ModelFacts, TraceWriter},
};
use crate::route_socket::SocketArgs;

#[derive(Debug, Args)]
pub(crate) struct RouteRecordArgs {
    #[command(flatten)]
    file: FileArgs,
    /// Record only this engine, as `kvlane route list` names it
    #[arg(long, value_name = "NODE")]
    node: Option<String>,
    #[command(flatten)]
    socket: SocketArgs,
}

/// Records until the time is over, or a signal comes.
pub(crate) fn run(args: &RouteRecordArgs) -> Result<()> {
    let mut router = Router {
        socket: &args.socket,
        node: args.node.as_deref(),
        cursor: 0,
        began_us: 0,
        dropped: 0,
        forgotten: 0,
        forgotten_before: 0,
        models: HashMap::new(),
    };
    let first = router.ask()?;
    (router.cursor, router.began_us) = (first.cursor, first.began_us);
    let since = Duration::from_millis(first.now_ms);
    let header = Header { tokens_per_block: TOKENS_PER_BLOCK, ..Header::new(Grade::Text, since) };
    record(&args.file, header, since, &mut router)
}

/// Reads the router's recording, also of a router that is started again meanwhile.
struct Router<'a> {
    socket: &'a SocketArgs,
    node: Option<&'a str>,
    cursor: u64,
    /// When the recording began that the cursor is of.
    began_us: u64,
    dropped: u64,
    /// Blocks that this recording forgot, and those before it.
    forgotten: u64,
    forgotten_before: u64,
    /// A number for each model.
    models: HashMap<String, u64>,
}

impl Router<'_> {
    fn ask(&self) -> Result<RecordedPage> {
        let answer = self.socket.ask_whole(&Call::Record { cursor: self.cursor })?;
        answer.recorded.ok_or_else(|| anyhow!("the router answers without a recording"))
    }
}

impl Source for Router<'_> {
    fn read(&mut self, writer: &mut TraceWriter, _is_last: bool) -> Result<bool> {
        loop {
            let page = match self.ask() {
                Ok(page) => page,
                Err(error) if matches!(error.downcast_ref(), Some(AskError::Refused(_))) => {
                    return Err(error);
                }
                Err(_) => return Ok(false),
            };
            if page.began_us != self.began_us {
                // The router was started again, or this reader was stopped for too long.
                writer.recorder_restarted();
                self.forgotten_before += std::mem::take(&mut self.forgotten);
                (self.cursor, self.began_us) = (1, page.began_us);
                continue;
            }
            self.cursor = page.cursor;
            self.dropped += page.lost;
            writer.header().dropped = self.dropped;
            writer.header().forgotten_blocks = self.forgotten_before + page.forgotten_blocks;
            self.forgotten = page.forgotten_blocks;
            for request in &page.requests {
                if self.node.is_none_or(|node| node == request.node) {
                    let next = self.models.len() as u64;
                    let model = *self.models.entry(request.model.clone()).or_insert(next);
                    let (request, model) = recorded(request, model);
                    writer.push(&request, &model)?;
                }
            }
            if !page.has_more {
                return Ok(true);
            }
        }
    }

    fn nothing_came(&self) -> &'static str {
        "no such request was answered meanwhile: see `kvlane route list` for the names of engines"
    }

    fn next(&self, file: &str) -> String {
        format!("next: kvlane replay {file} --route FLEET.toml (docs/replay.md)")
    }
}

/// A request of the model with this number.
fn recorded(request: &RecordedRequest, model: u64) -> (Recorded, ModelFacts) {
    let mut namespace = [0; 16];
    namespace[..8].copy_from_slice(&model.to_le_bytes());
    let (pairs, _) = request.blocks.as_chunks::<2>();
    let recorded = Recorded {
        at: Duration::from_millis(request.at_ms),
        engine: request.node.as_str().into(),
        model: namespace,
        blocks: pairs.iter().map(|[first, count]| Run { first: *first, count: *count }).collect(),
        saved: Vec::new(),
        hit: TierBlocks::default(),
        engine_tokens: 0,
        lengths: request.tokens.map(|(prompt, output)| Lengths { prompt, output }),
        leg: Leg::Whole,
        first_token: request.ttft_ms.map(Duration::from_millis),
    };
    let model = ModelFacts {
        namespace,
        name: request.model.clone(),
        tokens_per_block: TOKENS_PER_BLOCK,
        block_bytes: 0,
    };
    (recorded, model)
}
