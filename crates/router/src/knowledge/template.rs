//! Renders chat templates of Hugging Face's tokenizers: Jinja, with the functions of Python that they use.

use std::{fs, path::Path};

use minijinja::{Environment, Error, ErrorKind, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde_json::Value as Json;
use thiserror::Error;

use super::python::{strftime_now, to_json};

/// Most steps of one rendering: enough for thousands of messages, in some tens of milliseconds.
const FUEL: u64 = 1_000_000;
/// Deepest nesting of macros and includes.
const DEPTH_MAX: usize = 100;
/// The templates' names within their environment.
const CHAT: &str = "chat";
const WITH_TOOLS: &str = "tool_use";
/// Special tokens that templates use by name.
const TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"];

/// Why a folder's template cannot be used.
#[derive(Debug, Error)]
pub enum TemplateError {
    /// A file cannot be read.
    #[error("{file} cannot be read: {error}")]
    Read {
        /// Path of the file.
        file: String,
        /// The file system's error.
        error: std::io::Error,
    },
    /// tokenizer_config.json is no JSON.
    #[error("{file} is no JSON: {error}")]
    Json {
        /// Path of the file.
        file: String,
        /// Has the line and column.
        error: serde_json::Error,
    },
    /// Not Jinja, or it uses a function that only Python has.
    #[error("the chat template cannot be used: {0:#}")]
    Template(#[from] Error),
}

/// A model's chat template, compiled.
#[derive(Debug)]
pub struct Template {
    environment: Environment<'static>,
    has_tools: bool,
    /// Names and texts of [`TOKENS`].
    tokens: Vec<(&'static str, String)>,
    /// Whether it loops over a message's parts, and so expects a list of them.
    wants_parts: bool,
}

impl Template {
    /// Loads `chat_template.jinja` in this folder, else the template in `tokenizer_config.json`. None if there is neither.
    ///
    /// # Errors
    /// A file cannot be read, or its template cannot be used.
    pub fn of_folder(folder: &Path) -> Result<Option<Self>, TemplateError> {
        let config = match read(&folder.join("tokenizer_config.json"))? {
            Some((file, text)) => {
                serde_json::from_str(&text).map_err(|error| TemplateError::Json { file, error })?
            }
            None => Json::Null,
        };
        let chosen = match read(&folder.join("chat_template.jinja"))? {
            Some((_, text)) => Some((text, None)),
            None => in_config(&config),
        };
        let Some((chat, with_tools)) = chosen else { return Ok(None) };
        Ok(Some(Self::new(&chat, with_tools.as_deref(), &config)?))
    }

    /// Compiles a template, and the one for requests with tools if there is one. `config` is `tokenizer_config.json`, for the
    /// special tokens.
    ///
    /// # Errors
    /// A template is not Jinja.
    pub fn new(chat: &str, with_tools: Option<&str>, config: &Json) -> Result<Self, Error> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(DEPTH_MAX);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_filter("tojson", to_json);
        environment.add_function("strftime_now", strftime_now);
        environment.add_function("raise_exception", |sentence: &str| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, sentence.to_owned()))
        });
        environment.add_template_owned(CHAT, without_generation(chat))?;
        if let Some(with_tools) = with_tools {
            environment.add_template_owned(WITH_TOOLS, without_generation(with_tools))?;
        }
        let tokens = TOKENS.iter().filter_map(|&name| Some((name, token(config.get(name)?)?))).collect();
        Ok(Self { environment, has_tools: with_tools.is_some(), tokens, wants_parts: wants_parts(chat) })
    }

    /// Whether messages must be lists of parts.
    pub fn wants_parts(&self) -> bool {
        self.wants_parts
    }

    /// Renders the prompt of a chat.
    ///
    /// # Errors
    /// The template refuses these messages, or takes too long.
    pub fn render(
        &self,
        messages: Value,
        tools: Option<Value>,
        add_generation_prompt: bool,
        more: Vec<(String, Value)>,
    ) -> Result<String, Error> {
        let name = if tools.is_some() && self.has_tools { WITH_TOOLS } else { CHAT };
        let mut given: Vec<(String, Value)> =
            self.tokens.iter().map(|(name, text)| ((*name).to_owned(), Value::from(text.as_str()))).collect();
        given.push(("messages".into(), messages));
        given.push(("tools".into(), tools.unwrap_or_else(|| Value::from(()))));
        given.push(("documents".into(), Value::from(())));
        given.push(("add_generation_prompt".into(), Value::from(add_generation_prompt)));
        given.extend(more);
        self.environment.get_template(name)?.render(given.into_iter().collect::<Value>())
    }
}

fn read(file: &Path) -> Result<Option<(String, String)>, TemplateError> {
    match fs::read_to_string(file) {
        Ok(text) => Ok(Some((file.display().to_string(), text))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(TemplateError::Read { file: file.display().to_string(), error }),
    }
}

/// The template in `tokenizer_config.json`, and the one for tools: a text, or several with names.
fn in_config(config: &Json) -> Option<(String, Option<String>)> {
    match config.get("chat_template")? {
        Json::String(chat) => Some((chat.clone(), None)),
        Json::Array(named) => {
            let of = |wanted: &str| {
                let is_it = |each: &&Json| each.get("name").and_then(Json::as_str) == Some(wanted);
                named.iter().find(is_it)?.get("template")?.as_str().map(str::to_owned)
            };
            Some((of("default")?, of(WITH_TOOLS)))
        }
        _ => None,
    }
}

/// A special token's text, which is the value or its member `content`.
fn token(value: &Json) -> Option<String> {
    value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
}

/// Replaces the tags that mark an assistant's text for training. They do not change the prompt.
fn without_generation(template: &str) -> String {
    let mut text = template.to_owned();
    for tag in ["generation", "endgeneration"] {
        for (open, close) in [("{% ", " %}"), ("{%- ", " -%}"), ("{%- ", " %}"), ("{% ", " -%}")] {
            // A statement without effect treats the surrounding space as the tag does.
            text = text.replace(&format!("{open}{tag}{close}"), &format!("{open}set _ = 0{close}"));
        }
    }
    text
}

/// Whether a template loops over a message's content. vLLM decides the same by the syntax tree.
fn wants_parts(template: &str) -> bool {
    template.split("{%").skip(1).any(|block| {
        let block = block.split("%}").next().unwrap_or_default().trim_matches(['-', '+', ' ']);
        let Some((_, over)) = block.strip_prefix("for ").and_then(|rest| rest.split_once(" in ")) else {
            return false;
        };
        let over = over.split([' ', '|']).next().unwrap_or_default();
        over.ends_with(".content") || over.ends_with("['content']") || over.ends_with("[\"content\"]")
    })
}
