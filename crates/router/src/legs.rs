//! Builds the body of each leg of a request. Pure.
//!
//! A leg is a request of the router to one engine. A client's request has one leg, or two if it is split:
//!
//! ```text
//!   one leg        whole    the client's body
//!   by answer      prefill  the prompt and one token  --> answers kv_transfer_params: where the blocks are
//!                  decode   the client's body, with these kv_transfer_params
//!   by request id  prefill  the prompt and one token      the id has both engines' addresses
//!                  decode   the client's body             the same id
//!   direct         prefill  the prompt and one token, with the hand-off's id                 both at once
//!                  decode   the client's body, with this id and the prefill engine's address
//! ```
//! - A request stays in one leg if two engines cannot serve it: [`unsplittable_at`] says why.
//! - Only the router sets `kv_transfer_params`: [`reserved`] finds requests in which the client did.

use std::borrow::Cow;

use serde::Deserialize;

use crate::body::{BodyChange, Edited, Scan, edit, find_member};

/// The member in which engines say where a prompt's blocks are. The name is vLLM's.
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

/// `kv_transfer_params` of a prefill leg. vLLM's P/D connectors require exactly these members; NixlConnector reads all of them.
const PREFILL_TRANSFER: &str = r#"{"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null, "remote_block_ids": null, "remote_host": null, "remote_port": null}"#;

/// Members that a prefill leg leaves out. They concern only the answer, or vLLM refuses them beside `max_tokens` 1: `min_tokens`
/// above `max_tokens`, `stream_options` without `stream`, several answers.
const ANSWER_MEMBERS: [&str; 8] = [
    "stream",
    "stream_options",
    "min_tokens",
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
    "max_completion_tokens",
];
/// The same of a request to `/v1/responses`.
const RESPONSE_MEMBERS: [&str; 4] = ["stream", "stream_options", "include", "top_logprobs"];
/// Types of tools that the client runs. vLLM runs all others itself, and computes a further prompt with their results.
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
    /// The interface that a path belongs to. None: requests to this path cannot be split.
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

/// Bytes at the beginning of an array that are searched for its first element.
const SPACE_BYTES_MAX: usize = 1 << 10;

/// Why a request goes to one node and is not split into a prefill and a decode leg.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unsplittable {
    /// The request asks for log-probabilities of its prompt. vLLM computes such a prompt without its prefix cache.
    PromptLogprobs,
    /// The request has several prompts, each with blocks of its own.
    ManyPrompts,
    /// The request searches with several beams, which share blocks.
    BeamSearch,
    /// The prompt is neither text nor tokens.
    Embeddings,
    /// The prompt continues an answer that only one engine stores.
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

/// Why a request cannot be split, whatever its interface. None if it can.
pub fn unsplittable(scan: &Scan<'_>) -> Option<Unsplittable> {
    let is_given = |name: &str| scan.raw(name).is_some_and(|value| value != b"null");
    if is_given("prompt_logprobs") || scan.is_true("echo") && is_given("logprobs") {
        Some(Unsplittable::PromptLogprobs)
    } else if is_given("prompt_embeds") {
        Some(Unsplittable::Embeddings)
    } else if scan.is_true("use_beam_search") {
        Some(Unsplittable::BeamSearch)
    } else if has_many_prompts(scan) {
        Some(Unsplittable::ManyPrompts)
    } else {
        None
    }
}

/// Why a request to this interface cannot be split. None if it can.
pub fn unsplittable_at(api: Api, scan: &Scan<'_>) -> Option<Unsplittable> {
    let is_given = |name: &str| scan.raw(name).is_some_and(|value| value != b"null");
    if api == Api::Responses {
        if is_given("previous_response_id") {
            return Some(Unsplittable::StoredAnswer);
        } else if is_given("background") && scan.raw("background") != Some(b"false") {
            return Some(Unsplittable::Background);
        } else if has_engine_tools(scan) {
            return Some(Unsplittable::EngineTools);
        }
    }
    unsplittable(scan)
}

/// Whether `prompt` is an array of prompts, and not of tokens. An array that begins with more than [`SPACE_BYTES_MAX`] of white
/// space counts as one of prompts. No client writes that, and a longer search takes time.
fn has_many_prompts(scan: &Scan<'_>) -> bool {
    let Some([b'[', inside @ ..]) = scan.raw("prompt") else { return false };
    let searched = &inside[..inside.len().min(SPACE_BYTES_MAX)];
    let first = searched.iter().find(|byte| !byte.is_ascii_whitespace());
    first.map_or(searched.len() < inside.len(), |&first| matches!(first, b'"' | b'['))
}

/// An object of which only the `type` matters.
#[derive(Deserialize)]
struct Typed<'a> {
    #[serde(borrow, rename = "type")]
    kind: Cow<'a, str>,
}

/// Whether the engine runs one of the `tools`. Malformed or too long `tools` count as such.
fn has_engine_tools(scan: &Scan<'_>) -> bool {
    let Some(raw) = scan.raw("tools").filter(|raw| *raw != b"null") else { return false };
    if raw.len() > TOOLS_BYTES_MAX {
        return true;
    }
    let tools: Result<Vec<Typed<'_>>, _> = serde_json::from_slice(raw);
    tools.map_or(true, |tools| tools.iter().any(|tool| !CLIENT_TOOLS.contains(&&*tool.kind)))
}

/// The request that a leg sends to its node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LegRequest {
    /// The client's request, unchanged.
    Whole,
    /// The prompt and one token, with this JSON as `kv_transfer_params` if it is given.
    OneToken(Option<String>),
    /// The client's request, with this JSON as `kv_transfer_params`.
    WithTransfer(String),
}

impl LegRequest {
    /// The prefill leg of a pair whose prefill node says in its answer where the blocks are.
    pub fn prefill() -> Self {
        Self::OneToken(Some(PREFILL_TRANSFER.into()))
    }

    /// The prefill leg of a P2P NCCL pair. Its request id says everything about the transfer.
    pub fn prefill_by_id() -> Self {
        Self::OneToken(None)
    }

    /// The prefill and the decode leg of a direct pair, which run at the same time. `handoff` is the hand-off's id, `peer` the
    /// address at which the prefill node offers its blocks. Neither contains a character that JSON escapes.
    pub fn direct(handoff: &str, peer: &str) -> (Self, Self) {
        let prefill = format!(
            r#"{{"do_remote_decode": true, "do_remote_prefill": false, "kvlane": {{"handoff": "{handoff}"}}}}"#
        );
        let decode = format!(
            r#"{{"do_remote_decode": false, "do_remote_prefill": true, "kvlane": {{"handoff": "{handoff}", "peer": "{peer}"}}}}"#
        );
        (Self::OneToken(Some(prefill)), Self::WithTransfer(decode))
    }
}

/// The body of a leg whose request id is `id`. None: the leg sends the client's body as it is.
///
/// vLLM takes the id of a request to `/v1/responses` from the body, not from a header. It finds stored answers only by ids that
/// begin with `resp_`.
pub fn body<'b>(api: Option<Api>, scan: &Scan<'b>, request: &LegRequest, id: &str) -> Option<Edited<'b>> {
    let response_id = (api == Some(Api::Responses)).then(|| format!("\"resp_{id}\""));
    let mut changes = match (request, api) {
        (LegRequest::Whole | LegRequest::WithTransfer(_), _) => Vec::new(),
        (LegRequest::OneToken(_), Some(Api::Responses)) => one_token_of_a_response(),
        (LegRequest::OneToken(_), Some(Api::Messages)) => one_token_of_a_message(scan),
        (LegRequest::OneToken(_), _) => one_token(scan),
    };
    if let LegRequest::OneToken(Some(transfer)) | LegRequest::WithTransfer(transfer) = request {
        changes.push(BodyChange::Set(TRANSFER, transfer));
    }
    changes.extend(response_id.as_deref().map(|id| BodyChange::Set("request_id", id)));
    (!changes.is_empty()).then(|| edit(scan, &changes))
}

fn one_token(scan: &Scan<'_>) -> Vec<BodyChange<'static>> {
    let mut changes: Vec<_> = ANSWER_MEMBERS
        .into_iter()
        .map(|name| match (name, scan.member(name)) {
            ("max_completion_tokens", Some(_)) => BodyChange::Set(name, "1"),
            _ => BodyChange::Remove(name),
        })
        .collect();
    changes.push(BodyChange::Set("max_tokens", "1"));
    changes
}

fn one_token_of_a_response() -> Vec<BodyChange<'static>> {
    let mut changes: Vec<_> = RESPONSE_MEMBERS.into_iter().map(BodyChange::Remove).collect();
    // The decode node, not the prefill node, stores the answer.
    changes.extend([BodyChange::Set("max_output_tokens", "1"), BodyChange::Set("store", "false")]);
    changes
}

fn one_token_of_a_message(scan: &Scan<'_>) -> Vec<BodyChange<'static>> {
    let mut changes = vec![BodyChange::Remove("stream"), BodyChange::Set("max_tokens", "1")];
    // vLLM requires the token budget for thinking to be below `max_tokens`. The budget does not change the prompt; disabled
    // thinking does.
    let raw = scan.raw("thinking").filter(|raw| raw.len() <= THINKING_BYTES_MAX);
    let thinking = raw.and_then(|raw| serde_json::from_slice::<Typed<'_>>(raw).ok());
    if thinking.is_some_and(|thinking| thinking.kind == "enabled") {
        changes.push(BodyChange::Remove("thinking"));
    }
    changes
}

/// The `kv_transfer_params` in a prefill node's answer: raw JSON for the decode leg. None if the node handed nothing over.
pub fn transfer_params<'b>(answer: &Scan<'b>) -> Option<&'b [u8]> {
    answer.raw(TRANSFER).filter(|value| value.first() == Some(&b'{'))
}
