//! Exact knowledge of prefixes: how many tokens of a prompt each node has cached. The router tokenizes prompts as the engines
//! do, and reads the KV events by which engines report their blocks.
//!
//! ```text
//!  request --> template, tokenizer --> tokens --> chain: our hash of each block ----.
//!                                                                                   v
//!  engine --- KV events ---> reader ---> blocks: our hash of each block --> nodes that hold it --> look_up: tokens
//!             in order, replayed,        by tokens, parent, adapter, salt;                         that each node has
//!             forgotten at restarts      the engine's hash only names a block that is removed
//! ```
//! If a tokenizer, template or event is missing, the scheduler falls back to [marks](crate::body::marks) of the text.
//! [`Grade`] and [`Reason`] show that for each node.
//!
//! A serving thread tokenizes up to 2 KiB of new text itself. Longer texts go to threads of their own.

mod agreement;
mod blocks;
mod cache;
mod chain;
mod grade;
mod groups;
mod messages;
mod node;
mod pool_nodes;
mod progress;
mod promises;
mod prompt;
mod python;
mod reader;
mod settings;
mod shared;
mod template;
mod tokenizer;
mod translation;

pub use self::{
    agreement::Agreement,
    blocks::{BLOCKS_A_STEP, BlockStats, Blocks, Parent},
    chain::{block, chain, seed},
    grade::{Grade, Reason},
    messages::{NotText, messages, tools},
    node::Status,
    progress::{Next, Progress},
    prompt::{Prompt, Text, text, token_ids},
    reader::{EventReaders, ListNodes},
    settings::{Endpoint, EventSource, EventSourceError, KnowledgeSettings},
    shared::{Knowledge, Lookup},
    template::{Template, TemplateError},
    tokenizer::{Pieces, Tokenizer, TokenizerError},
};
