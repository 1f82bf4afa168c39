//! The flags of `kvlane route` for tokenizers and for engines' KV events.

use std::{path::PathBuf, sync::Arc};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use kvlane_router::{
    address::Address,
    knowledge::{EventSource, Knowledge, KnowledgeSettings},
};

/// Each field is a flag; its text is the flag's help.
#[derive(Debug, Args)]
pub(crate) struct KnowledgeArgs {
    /// A model's tokenizer: the folder with its tokenizer.json, tokenizer_config.json and chat_template.jinja, or the first of
    /// these. The model is named as engines serve it. May be given more than once
    #[arg(long, env = "KVLANE_ROUTE_TOKENIZER", value_name = "MODEL=PATH", value_delimiter = ' ')]
    tokenizer: Vec<String>,

    /// Where an engine publishes its KV events, and where it replays them:
    /// http://HOST:PORT=tcp://HOST:PORT,replay=tcp://HOST:PORT. The first is the engine's address, as another flag names it.
    /// May be given more than once
    #[arg(long, env = "KVLANE_ROUTE_KV_EVENTS", value_name = "ENGINE=ADDRESS", value_delimiter = ' ')]
    kv_events: Vec<EventSource>,
}

/// Loads the tokenizers. `engines` are those of flags and file. If `is_closed`, no others will come.
pub(crate) fn knowledge<'a>(
    args: &KnowledgeArgs,
    engines: impl Iterator<Item = &'a Address>,
    is_closed: bool,
) -> Result<Arc<Knowledge>> {
    let engines: Vec<String> = engines.map(ToString::to_string).collect();
    let mut events = Vec::new();
    for source in &args.kv_events {
        let address: Address = source.node.parse().map_err(|error| anyhow!("--kv-events: {error}"))?;
        let node = address.to_string();
        if is_closed && !engines.is_empty() && !engines.contains(&node) {
            bail!("--kv-events {node}: no engine has this address; there are {}", engines.join(", "));
        }
        events.push(EventSource { node, ..source.clone() });
    }
    let tokenizers = args.tokenizer.iter().map(|given| tokenizer(given)).collect::<Result<_>>()?;
    let settings = KnowledgeSettings { tokenizers, events, ..KnowledgeSettings::default() };
    Ok(Arc::new(Knowledge::new(settings).context("--tokenizer")?))
}

fn tokenizer(given: &str) -> Result<(String, PathBuf)> {
    match given.rsplit_once('=') {
        Some((model, path)) if !model.is_empty() && !path.is_empty() => {
            Ok((model.to_owned(), PathBuf::from(path)))
        }
        _ => bail!("--tokenizer {given}: write it as MODEL=PATH, the model as engines serve it"),
    }
}
