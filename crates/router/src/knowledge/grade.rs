//! How exact the router's knowledge of a node's prefixes is, and why it is not better. Metrics and `/nodes` show both.

/// How a node's prefixes are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Grade {
    /// By the engine's KV events, with the engine's tokens.
    Exact,
    /// By hashes of the texts that were sent there. The router counts tokens as the engine does.
    Checked,
    /// By hashes of the texts that were sent there.
    Approximate,
}

impl Grade {
    /// As in metrics and pages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Checked => "checked",
            Self::Approximate => "approximate",
        }
    }
}

/// Why knowledge of a node, or of one request's prompt, is not exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The router reads no events of the node.
    NoEvents,
    /// The node's events cannot be read now.
    EventsLost,
    /// No event has reported the size of its blocks yet.
    BlockSizeUnknown,
    /// The router has no tokenizer for any of its models.
    NoTokenizer,
    /// The engine counts other tokens than the router does.
    TokensDiffer,
    /// The request's model has a tokenizer, but no chat template.
    NoTemplate,
    /// The template refused the request.
    Template,
    /// Only the engine can know the prompt of such a request: pictures, several prompts.
    Form,
    /// The prompt is longer than the router tokenizes.
    TooLong,
    /// Tokenizing took longer than a request waits.
    Late,
    /// Too many prompts are being tokenized.
    Busy,
}

impl Reason {
    /// In the order of the variants, which counters are indexed by.
    pub const ALL: [Self; 11] = [
        Self::NoEvents,
        Self::EventsLost,
        Self::BlockSizeUnknown,
        Self::NoTokenizer,
        Self::TokensDiffer,
        Self::NoTemplate,
        Self::Template,
        Self::Form,
        Self::TooLong,
        Self::Late,
        Self::Busy,
    ];

    /// As in metrics and pages.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoEvents => "no_events",
            Self::EventsLost => "events_lost",
            Self::BlockSizeUnknown => "block_size_unknown",
            Self::NoTokenizer => "no_tokenizer",
            Self::TokensDiffer => "tokens_differ",
            Self::NoTemplate => "no_template",
            Self::Template => "template_failed",
            Self::Form => "request_form",
            Self::TooLong => "too_long",
            Self::Late => "late",
            Self::Busy => "busy",
        }
    }

    /// A sentence for logs and `/nodes`: the meaning, and what to do.
    pub fn sentence(self) -> &'static str {
        match self {
            Self::NoEvents => "the router reads no events of this engine: name them with --kv-events",
            Self::EventsLost => {
                "the engine's events cannot be read: see whether it publishes them at the address of --kv-events"
            }
            Self::BlockSizeUnknown => {
                "no event has reported the size of the engine's blocks yet: its first stored block will"
            }
            Self::NoTokenizer => "none of its models has a tokenizer here: name it with --tokenizer",
            Self::TokensDiffer => {
                "the engine counts other tokens than the tokenizer of --tokenizer: give that the engine's tokenizer and chat template"
            }
            Self::NoTemplate => {
                "there is no chat template beside the tokenizer: put tokenizer_config.json or chat_template.jinja there"
            }
            Self::Template => "the chat template refused a request: see the log at debug",
            Self::Form => {
                "a request has a form whose prompt only the engine knows, such as pictures or several prompts"
            }
            Self::TooLong => "a prompt is too long to be tokenized here",
            Self::Late => "tokenizing a prompt took too long",
            Self::Busy => "too many prompts were being tokenized at once",
        }
    }
}
