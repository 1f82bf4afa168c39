//! The arguments and results of [`Scheduler::choose`](super::Scheduler::choose).

use std::time::Duration;

use thiserror::Error;

use super::{nodes::NodeId, reservation::Reservation};
use crate::body::Mark;

/// A request that needs nodes.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Model or adapter. None: any node will do.
    pub model: Option<&'a str>,
    /// Marks of the prompt, in order; the last one is at its end. Empty if nothing is known of the prompt.
    pub marks: &'a [Mark],
    /// One node must serve all of it: prefill and decode cannot be split.
    pub one_node: bool,
    /// The answer comes token by token, so its first byte is its first token.
    pub streams: bool,
    /// Nodes that have failed this request; the choice leaves them out.
    pub tried: &'a [NodeId],
}

/// The nodes that serve a request, by their reservations.
#[derive(Debug)]
pub enum Chosen {
    /// One node serves all of it.
    One(Reservation),
    /// Two nodes of one group.
    Pair {
        /// The node that prefills.
        prefill: Reservation,
        /// The node that decodes.
        decode: Reservation,
    },
}

/// Why a request goes where it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// No prefill and decode nodes could pair for it.
    NoPair,
    /// The decode node has little to prefill: the prompt is short.
    Short,
    /// The decode node has little to prefill, because it has most of the prompt.
    Cached,
    /// The prompt would wait too long at the prefill nodes, and this decode node is free.
    Relief,
    /// The request cannot be split.
    MustStay,
    /// Prefill and decode nodes split it, which is what they are for.
    Pair,
    /// The prefill nodes hand nothing over, so a pair would compute the prompt twice.
    NoHandOff,
    /// Only this node is left; it has another role.
    OtherRole,
}

impl Why {
    /// As in metrics and answers.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoPair => "one node",
            Self::Short => "short prompt stays on decode node",
            Self::Cached => "cached prompt stays on decode node",
            Self::Relief => "prefill nodes are busy, decode node prefills",
            Self::MustStay => "request cannot be split",
            Self::Pair => "prefill, then decode",
            Self::NoHandOff => "prefill nodes hand nothing over, decode node prefills",
            Self::OtherRole => "no node of the right role is left",
        }
    }
}

/// The chosen nodes and the figures behind the choice, for `/decisions` and logs.
#[derive(Debug)]
pub struct Choice {
    /// One node or a pair.
    pub chosen: Chosen,
    /// The rule that led to them.
    pub why: Why,
    /// Tokens of the prompt: counted by a tokenizer, or estimated from its bytes.
    pub prompt_tokens: u64,
    /// Tokens of the prompt that the prefilling node has or can load, as far as the router knows.
    pub cached_tokens: u64,
    /// Number of nodes that could have prefilled it.
    pub candidates: usize,
}

/// No node can serve a request.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NoNode {
    /// No node has the model, though some have others.
    #[error("no node serves the model {model}")]
    UnknownModel {
        /// As the request names it.
        model: String,
    },
    /// No node is up, or all have failed this request.
    #[error("no node is there to serve this")]
    NoneLeft {
        /// Time until the first breaker lets a request through; 1 s if none is open.
        retry_after: Duration,
    },
}
