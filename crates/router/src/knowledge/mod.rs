//! What nodes have of prompts, exactly: by the tokens that the engine's tokenizer makes of a prompt, and by what engines tell
//! of their caches.
//!
//! ```text
//!  request --> template, tokenizer --> tokens --> chain: our hash of each block ----.
//!                                                                                   v
//!  engine --- KV events ---> reader ---> blocks: our hash of each block --> nodes that hold it --> look: tokens that
//!             in order, replayed,        by tokens, parent, adapter, salt;                          each node has
//!             forgotten at restarts      the engine's hash only names what goes
//! ```
//! Where something of it is missing, the scheduler goes by [marks](crate::body::marks) of the text, as if none of this was
//! there; [`Grade`] and [`Reason`] say so for each node.

mod agreement;
mod blocks;
mod cache;
mod chain;
mod grade;
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
    blocks::{BLOCKS_A_STEP, Before, Blocks, Told},
    chain::{block, chain, seed},
    grade::{Grade, Reason},
    messages::{NotText, messages, tools},
    node::Status,
    progress::{Next, Progress},
    prompt::{Prompt, Text, text, token_ids},
    reader::{EventReaders, ListNodes},
    settings::{Endpoint, EventSource, EventSourceError, KnowledgeSettings},
    shared::{Knowledge, Looked},
    template::{Template, TemplateError},
    tokenizer::{Pieces, Tokenizer, TokenizerError},
};
