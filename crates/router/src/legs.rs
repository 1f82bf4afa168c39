//! What each leg of a request says: the prefill leg computes the prompt and one token, the decode leg gets what the prefill node
//! answered.

use std::borrow::Cow;

use serde::Deserialize;

use crate::body::{Change, Edited, Scan, edit, find_member};

/// The member in which engines say where a prompt's blocks are: vLLM's name for it.
pub const TRANSFER: &str = "kv_transfer_params";

/// Members from which vLLM takes hosts and blocks. vLLM also takes them out of [`EXTRA`], which it merges with them.
const RESERVED: [&str; 2] = [TRANSFER, "ec_transfer_params"];
const EXTRA: &str = "vllm_xargs";
/// Longest [`EXTRA`] that the router searches. Searching more would delay other clients.
const EXTRA_BYTES_MAX: usize = 1 << 20;

/// Why a client's member is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reserved {
    /// Only the router may set it.
    #[error("{0} are the router's to set: leave them out")]
    Transfer(String),
    /// The member is too long to search, so it could hide a reserved one.
    #[error("{EXTRA} has more than {EXTRA_BYTES_MAX} bytes")]
    TooLong,
}

impl Reserved {
    /// Name of the member, as the client may see it.
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
/// Members of a request to `/v1/responses` that a prefill leg leaves out.
const OF_A_RESPONSE: [&str; 4] = ["stream", "stream_options", "include", "top_logprobs"];
/// Tools that the client runs. vLLM runs all others itself, and computes a further prompt with their results.
const CLIENT_TOOLS: [&str; 3] = ["function", "custom", "namespace"];
/// Longest `tools` and `thinking` that the router searches. Searching more would delay other clients.
const TOOLS_BYTES_MAX: usize = 256 << 10;
const THINKING_BYTES_MAX: usize = 1 << 10;

/// The interface that a generating request speaks, by its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    /// `/v1/completions`
    Completions,
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/responses`, OpenAI's for agents.
    Responses,
    /// `/v1/messages`, Anthropic's.
    Messages,
}

impl Api {
    /// The interface of a path. None: requests to this path cannot be split.
    pub fn of(path: &str) -> Option<Self> {
        match path {
            "/v1/completions" => Some(Self::Completions),
            "/v1/chat/completions" => Some(Self::Chat),
            "/v1/responses" => Some(Self::Responses),
            "/v1/messages" => Some(Self::Messages),
            _ => None,
        }
    }
}

/// Space at the beginning of an array that is searched for its first element.
const SPACE_BYTES_MAX: usize = 1 << 10;

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
    /// The prompt continues an answer that one engine stores.
    StoredAnswer,
    /// The engine answers before it has computed anything.
    Background,
    /// The engine runs tools, and would load the handed-over blocks again for the prompt with their results.
    EngineTools,
}

/// The member of a client's request that only the router may set, if any. Names are compared after unescaping, as engines do.
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

/// Why a request to this interface goes to one node; None if it can be split.
pub fn stays_at(api: Api, scan: &Scan<'_>) -> Option<Stays> {
    let is_given = |name: &str| scan.raw(name).is_some_and(|value| value != b"null");
    if api == Api::Responses {
        if is_given("previous_response_id") {
            return Some(Stays::StoredAnswer);
        } else if is_given("background") && scan.raw("background") != Some(b"false") {
            return Some(Stays::Background);
        } else if has_engine_tools(scan) {
            return Some(Stays::EngineTools);
        }
    }
    stays(scan)
}

/// Whether `prompt` is an array of prompts, and not of tokens. An array that begins with much white space counts as one, because
/// no client writes it and searching it takes time.
fn has_many_prompts(scan: &Scan<'_>) -> bool {
    let Some([b'[', inside @ ..]) = scan.raw("prompt") else { return false };
    let searched = &inside[..inside.len().min(SPACE_BYTES_MAX)];
    let first = searched.iter().find(|byte| !byte.is_ascii_whitespace());
    first.map_or(searched.len() < inside.len(), |&first| matches!(first, b'"' | b'['))
}

/// A member whose `type` decides.
#[derive(Deserialize)]
struct Typed<'a> {
    #[serde(borrow, rename = "type")]
    kind: Cow<'a, str>,
}

/// Whether `tools` names one that the engine runs. Tools that are malformed or too long count as such.
fn has_engine_tools(scan: &Scan<'_>) -> bool {
    let Some(raw) = scan.raw("tools").filter(|raw| *raw != b"null") else { return false };
    if raw.len() > TOOLS_BYTES_MAX {
        return true;
    }
    let tools: Result<Vec<Typed<'_>>, _> = serde_json::from_slice(raw);
    tools.map_or(true, |tools| tools.iter().any(|tool| !CLIENT_TOOLS.contains(&&*tool.kind)))
}

/// The kind of request that a leg sends to its node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ask {
    /// The request as it came.
    Whole,
    /// The prompt and one token, with this JSON as its `kv_transfer_params`.
    OneToken(Option<String>),
    /// The request, with this JSON as its `kv_transfer_params`.
    GoOn(String),
}

impl Ask {
    /// The prefill leg of a pair whose prefill node answers where the blocks are.
    pub fn prefill() -> Self {
        Self::OneToken(Some(PREFILL_TRANSFER.into()))
    }

    /// The prefill leg of a P2P NCCL pair. Its request id holds everything about the transfer.
    pub fn prefill_by_id() -> Self {
        Self::OneToken(None)
    }

    /// Both legs of a pair that work at the same time. `handoff` is the hand-off's id, `peer` the address at which the prefill
    /// node hands over. Neither contains a character that JSON escapes.
    pub fn direct(handoff: &str, peer: &str) -> (Self, Self) {
        let prefill = format!(
            r#"{{"do_remote_decode": true, "do_remote_prefill": false, "kvlane": {{"handoff": "{handoff}"}}}}"#
        );
        let goes_on = format!(
            r#"{{"do_remote_decode": false, "do_remote_prefill": true, "kvlane": {{"handoff": "{handoff}", "peer": "{peer}"}}}}"#
        );
        (Self::OneToken(Some(prefill)), Self::GoOn(goes_on))
    }
}

/// The body of a leg with this id. None: the client's own bytes.
///
/// vLLM takes the id of a request to `/v1/responses` from the body, not from a header, and finds stored answers only by ids that
/// begin with `resp_`.
pub fn body<'b>(api: Option<Api>, scan: &Scan<'b>, ask: &Ask, id: &str) -> Option<Edited<'b>> {
    let response_id = (api == Some(Api::Responses)).then(|| format!("\"resp_{id}\""));
    let mut changes = match (ask, api) {
        (Ask::Whole | Ask::GoOn(_), _) => Vec::new(),
        (Ask::OneToken(_), Some(Api::Responses)) => one_token_of_a_response(),
        (Ask::OneToken(_), Some(Api::Messages)) => one_token_of_a_message(scan),
        (Ask::OneToken(_), _) => one_token(scan),
    };
    if let Ask::OneToken(Some(transfer)) | Ask::GoOn(transfer) = ask {
        changes.push(Change::Set(TRANSFER, transfer));
    }
    changes.extend(response_id.as_deref().map(|id| Change::Set("request_id", id)));
    (!changes.is_empty()).then(|| edit(scan, &changes))
}

fn one_token(scan: &Scan<'_>) -> Vec<Change<'static>> {
    let mut changes: Vec<_> = OF_THE_ANSWER
        .into_iter()
        .map(|name| match (name, scan.member(name)) {
            ("max_completion_tokens", Some(_)) => Change::Set(name, "1"),
            _ => Change::Remove(name),
        })
        .collect();
    changes.push(Change::Set("max_tokens", "1"));
    changes
}

fn one_token_of_a_response() -> Vec<Change<'static>> {
    let mut changes: Vec<_> = OF_A_RESPONSE.into_iter().map(Change::Remove).collect();
    // The decode node, not the prefill node, stores the answer.
    changes.extend([Change::Set("max_output_tokens", "1"), Change::Set("store", "false")]);
    changes
}

fn one_token_of_a_message(scan: &Scan<'_>) -> Vec<Change<'static>> {
    let mut changes = vec![Change::Remove("stream"), Change::Set("max_tokens", "1")];
    // vLLM requires the token budget for thinking to be below `max_tokens`. The budget does not change the prompt; disabled
    // thinking does.
    let raw = scan.raw("thinking").filter(|raw| raw.len() <= THINKING_BYTES_MAX);
    let thinking = raw.and_then(|raw| serde_json::from_slice::<Typed<'_>>(raw).ok());
    if thinking.is_some_and(|thinking| thinking.kind == "enabled") {
        changes.push(Change::Remove("thinking"));
    }
    changes
}

/// What the prefill node answered for the decode node, as it stands in its answer; `None` if it answered nothing for it.
pub fn handed_over<'b>(answer: &Scan<'b>) -> Option<&'b [u8]> {
    answer.raw(TRANSFER).filter(|value| value.first() == Some(&b'{'))
}
