//! What each leg of a request says: the prefill leg computes the prompt and one token, the decode leg gets what the prefill node
//! answered.

use crate::body::{Change, Scan, edit, find_member};

/// The member in which engines say where a prompt's blocks are: vLLM's name for it.
pub const TRANSFER: &str = "kv_transfer_params";

/// Members in which vLLM takes hosts and blocks from a request. vLLM also takes them out of [`EXTRA`], which it merges with them.
const RESERVED: [&str; 2] = [TRANSFER, "ec_transfer_params"];
const EXTRA: &str = "vllm_xargs";
/// Most bytes of [`EXTRA`], so that looking through it takes no time that other clients would notice.
const EXTRA_BYTES_MAX: usize = 1 << 20;

/// Why a client's member is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reserved {
    /// Only the router may set it.
    #[error("{0} are the router's to set: leave them out")]
    Transfer(String),
    /// It may hide anything.
    #[error("{EXTRA} has more than {EXTRA_BYTES_MAX} bytes")]
    TooLong,
}

impl Reserved {
    /// The member.
    pub fn param(&self) -> &str {
        match self {
            Self::Transfer(name) => name,
            Self::TooLong => EXTRA,
        }
    }
}

/// The prefill leg's transfer: vLLM's connectors for two engines ask for exactly these (NixlConnector reads them all).
const PREFILL_TRANSFER: &str = r#"{"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null, "remote_block_ids": null, "remote_host": null, "remote_port": null}"#;

/// What has a meaning for the answer only, or is refused together with one token of it: `min_tokens` above `max_tokens`,
/// `stream_options` without `stream`, several answers.
const OF_THE_ANSWER: [&str; 8] = [
    "stream",
    "stream_options",
    "min_tokens",
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
    "max_completion_tokens",
];

/// Why a request cannot be served by two nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stays {
    /// It asks for the prompt's log-probabilities: vLLM keeps such a request from its prefix cache.
    PromptLogprobs,
    /// It has several prompts, of which each would have blocks of its own.
    ManyPrompts,
    /// It searches with several beams, which share blocks.
    BeamSearch,
    /// Its prompt is not text and not tokens.
    Embeddings,
}

/// The member of a client's request that only the router may set, if there is one. Names are compared as engines read them.
pub fn reserved(scan: &Scan<'_>) -> Option<Reserved> {
    let is_given = |name: &&str| scan.raw(name).is_some_and(|value| value != b"null");
    if let Some(name) = RESERVED.into_iter().find(is_given) {
        return Some(Reserved::Transfer(name.to_owned()));
    }
    let extra = scan.raw(EXTRA)?;
    if extra.len() > EXTRA_BYTES_MAX {
        return Some(Reserved::TooLong);
    }
    let found = find_member(extra, |name| RESERVED.contains(&name))?;
    Some(Reserved::Transfer(format!("{EXTRA}.{found}")))
}

/// Why this request has to stay on one node, if it has to.
pub fn stays(scan: &Scan<'_>) -> Option<Stays> {
    let is_given = |name: &str| scan.raw(name).is_some_and(|value| value != b"null");
    if is_given("prompt_logprobs") || scan.is_true("echo") && is_given("logprobs") {
        Some(Stays::PromptLogprobs)
    } else if is_given("prompt_embeds") {
        Some(Stays::Embeddings)
    } else if scan.is_true("use_beam_search") {
        Some(Stays::BeamSearch)
    } else if has_many_prompts(scan) {
        Some(Stays::ManyPrompts)
    } else {
        None
    }
}

/// Whether `prompt` is an array of prompts, and not of tokens.
fn has_many_prompts(scan: &Scan<'_>) -> bool {
    let Some([b'[', inside @ ..]) = scan.raw("prompt") else { return false };
    inside.iter().find(|byte| !byte.is_ascii_whitespace()).is_some_and(|&first| matches!(first, b'"' | b'['))
}

/// The body of the prefill leg of a pair whose prefill node answers where the blocks are.
pub fn prefill(scan: &Scan<'_>) -> Vec<u8> {
    one_token(scan, Some(PREFILL_TRANSFER))
}

/// The body of the prefill leg of a P2P NCCL pair: all that concerns the transfer stands in the id.
pub fn prefill_by_id(scan: &Scan<'_>) -> Vec<u8> {
    one_token(scan, None)
}

/// The bodies of both legs of a pair that work at the same time. `handoff`: the hand-off's name; `peer`: where the prefill node
/// hands over. Neither has a character that JSON escapes.
pub fn direct(scan: &Scan<'_>, handoff: &str, peer: &str) -> (Vec<u8>, Vec<u8>) {
    let prefill = format!(
        r#"{{"do_remote_decode": true, "do_remote_prefill": false, "kvlane": {{"handoff": "{handoff}"}}}}"#
    );
    let goes_on = format!(
        r#"{{"do_remote_decode": false, "do_remote_prefill": true, "kvlane": {{"handoff": "{handoff}", "peer": "{peer}"}}}}"#
    );
    (one_token(scan, Some(&prefill)), decode(scan, &goes_on))
}

fn one_token(scan: &Scan<'_>, transfer: Option<&str>) -> Vec<u8> {
    let mut changes: Vec<_> = OF_THE_ANSWER
        .into_iter()
        .map(|name| match (name, scan.member(name)) {
            ("max_completion_tokens", Some(_)) => Change::Set(name, "1"),
            _ => Change::Remove(name),
        })
        .collect();
    changes.push(Change::Set("max_tokens", "1"));
    changes.extend(transfer.map(|transfer| Change::Set(TRANSFER, transfer)));
    edit(scan, &changes)
}

/// The body of a request to `/v1/responses`, of which vLLM takes the id out of the body and not out of a header. It finds
/// answers again only by ids that begin with `resp_`.
pub fn response(scan: &Scan<'_>, id: &str) -> Vec<u8> {
    edit(scan, &[Change::Set("request_id", &format!("\"resp_{id}\""))])
}

/// What the prefill node answered for the decode node, as it stands in its answer; `None` if it answered nothing for it.
pub fn handed_over<'b>(answer: &Scan<'b>) -> Option<&'b [u8]> {
    answer.raw(TRANSFER).filter(|value| value.first() == Some(&b'{'))
}

/// The body of the decode leg. `transfer` is JSON.
pub fn decode(scan: &Scan<'_>, transfer: &str) -> Vec<u8> {
    edit(scan, &[Change::Set(TRANSFER, transfer)])
}
