//! Extracts the text or the token ids of a request's prompt from its body, as the engine would.

use std::time::Duration;

use minijinja::Value;

use super::{
    grade::Reason,
    messages::{messages, tools},
    tokenizer::Tokenizer,
};
use crate::body::Scan;

/// Longest uncached text that is tokenized on the request's thread, which takes some tens of microseconds.
pub(super) const INLINE_BYTES_MAX: usize = 2 << 10;
/// Longest body that is rendered on the request's thread. A longer one takes milliseconds, even with all tokens cached.
pub(super) const INLINE_BODY_BYTES_MAX: usize = 128 << 10;
/// Longest text that is tokenized.
pub(super) const TEXT_BYTES_MAX: usize = 1 << 20;
/// Longest wait of a request for its tokens. Without them the scheduler chooses by its text at once.
pub(super) const PATIENCE: Duration = Duration::from_millis(25);

/// A prompt as tokens, with all else that decides its blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// All tokens of the prompt.
    pub tokens: Vec<u32>,
    /// The adapter that the request names.
    pub adapter: Option<String>,
    /// `cache_salt`, which keeps its blocks apart from other clients'.
    pub salt: Option<String>,
}

/// The text that the engine tokenizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text {
    /// Rendered by the chat template, if it is a chat.
    pub text: String,
    /// Whether the tokenizer adds its special tokens.
    pub special: bool,
}

/// The token ids in `prompt`, which need no tokenizer. None if it is no list of them.
pub fn token_ids(scan: &Scan<'_>) -> Option<Vec<u32>> {
    let raw = scan.raw("prompt").filter(|raw| raw.first() == Some(&b'['))?;
    serde_json::from_slice::<Vec<u32>>(raw)
        .ok()
        .or_else(|| {
            let [only]: [Vec<u32>; 1] = serde_json::from_slice(raw).ok()?;
            Some(only)
        })
        .filter(|tokens| !tokens.is_empty())
}

/// The text of a body of `/v1/completions`, or of a chat as the model's template renders it.
///
/// # Errors
/// Only the engine knows the prompt: several prompts, pictures, or members that change the prompt inside the engine.
pub fn text(scan: &Scan<'_>, is_chat: bool, tokenizer: &Tokenizer) -> Result<Text, Reason> {
    let is_given = |name: &str| scan.raw(name).is_some_and(|value| value != b"null" && value != b"false");
    let unknown = ["truncate_prompt_tokens", "prompt_embeds", "mm_processor_kwargs", "media_io_kwargs"];
    if unknown.iter().any(|name| is_given(name)) {
        return Err(Reason::Form);
    }
    if is_chat { chat(scan, tokenizer) } else { completion(scan) }
}

fn completion(scan: &Scan<'_>) -> Result<Text, Reason> {
    let raw = scan.raw("prompt").ok_or(Reason::Form)?;
    if scan.raw("suffix").is_some_and(|value| value != b"null") {
        return Err(Reason::Form);
    }
    let text = match raw.first() {
        Some(b'"') => serde_json::from_slice::<String>(raw).map_err(|_| Reason::Form)?,
        _ => {
            let [only]: [String; 1] = serde_json::from_slice(raw).map_err(|_| Reason::Form)?;
            only
        }
    };
    let special = scan.raw("add_special_tokens") != Some(b"false");
    Ok(Text { text, special })
}

fn chat(scan: &Scan<'_>, tokenizer: &Tokenizer) -> Result<Text, Reason> {
    let is_given = |name: &str| scan.raw(name).is_some_and(|value| value != b"null" && value != b"false");
    if ["chat_template", "documents", "continue_final_message"].iter().any(|name| is_given(name)) {
        return Err(Reason::Form);
    }
    let template = tokenizer.template().ok_or(Reason::NoTemplate)?;
    let raw = scan.raw("messages").ok_or(Reason::Form)?;
    let messages = messages(raw, template.wants_parts()).map_err(|_| Reason::Form)?;
    let tools = match scan.raw("tools") {
        Some(raw) => tools(raw).map_err(|_| Reason::Form)?,
        None => None,
    };
    let add_generation_prompt = scan.raw("add_generation_prompt") != Some(b"false");
    let mut more = Vec::new();
    if let Some(effort) = scan.string("reasoning_effort") {
        more.push(("reasoning_effort".to_owned(), Value::from(&*effort)));
    }
    if let Some(raw) = scan.raw("chat_template_kwargs").filter(|raw| *raw != b"null") {
        let given: Value = serde_json::from_slice(raw).map_err(|_| Reason::Form)?;
        for key in given.try_iter().map_err(|_| Reason::Form)? {
            let value = given.get_item(&key).map_err(|_| Reason::Form)?;
            more.push((key.as_str().ok_or(Reason::Form)?.to_owned(), value));
        }
    }
    let rendered = template.render(messages, tools, add_generation_prompt, more);
    let text = rendered.map_err(|error| {
        tracing::debug!(error = format!("{error:#}"), "chat template refused a request");
        Reason::Template
    })?;
    Ok(Text { text, special: scan.is_true("add_special_tokens") })
}
