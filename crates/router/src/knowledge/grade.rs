//! What a router's knowledge of a node's prefixes is worth, and why it is not more.

/// How prefixes are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Grade {
    /// The engine tells of its blocks, and our tokens are its tokens.
    Exact,
    /// By hashes of texts that were sent there; our count of tokens agrees with the engine's.
    Checked,
    /// By hashes of texts that were sent there.
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

/// Why knowledge is not exact: of a node, or of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// No events of the node are read.
    NoEvents,
    /// Its events cannot be read now.
    EventsLost,
    /// No event told yet how long its blocks are.
    BlockSizeUnknown,
    /// None of its models has a tokenizer here.
    NoTokenizer,
    /// It counts other tokens than we do.
    TokensDiffer,
    /// The request's model has a tokenizer, but no chat template.
    NoTemplate,
    /// The template refused the request.
    Template,
    /// The request has a form whose prompt cannot be known here.
    Form,
    /// The prompt is too long to be tokenized.
    TooLong,
    /// Tokenizing took too long.
    Late,
    /// Too many prompts are being tokenized.
    Busy,
}

impl Reason {
    /// All of them.
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

    /// What it means and what to do, in a sentence.
    pub fn sentence(self) -> &'static str {
        match self {
            Self::NoEvents => "no events of this engine are read: name them with --kv-events",
            Self::EventsLost => {
                "the engine's events cannot be read: see whether it publishes them at the address of --kv-events"
            }
            Self::BlockSizeUnknown => {
                "no event has told yet how long the engine's blocks are: the first block it stores does"
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
