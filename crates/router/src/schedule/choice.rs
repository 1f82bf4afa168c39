//! What the scheduler is asked, and what it answers.

use std::time::Duration;

use thiserror::Error;

use super::{nodes::NodeId, reservation::Reservation};
use crate::body::Mark;

/// What is asked of the scheduler.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Model or adapter; any node will do for a request that names none.
    pub model: Option<&'a str>,
    /// Of the prompt, in order; the last one is at its end. Empty if nothing is known of it.
    pub marks: &'a [Mark],
    /// Prefill and decode must not be apart.
    pub one_node: bool,
    /// Its answer comes token by token: when its first byte comes, that is its first token.
    pub streams: bool,
    /// Nodes that have failed this request.
    pub tried: &'a [NodeId],
}

/// Who serves a request.
#[derive(Debug)]
pub enum Chosen {
    /// One node all of it.
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
    /// No prefill and decode nodes are there for it.
    NoPair,
    /// The decode node has little to prefill: the prompt is short.
    Short,
    /// The decode node has little to prefill: it has most of the prompt.
    Cached,
    /// Prefill nodes have too much to do, and this decode node has not.
    Relief,
    /// The request cannot be served by two.
    MustStay,
    /// Two nodes, which is what prefill and decode nodes are for.
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

/// A choice and what led to it.
#[derive(Debug)]
pub struct Choice {
    /// The nodes.
    pub chosen: Chosen,
    /// What led to them.
    pub why: Why,
    /// Tokens of the prompt, estimated from its bytes.
    pub prompt_tokens: u64,
    /// Tokens of the prompt that the node that prefills probably has.
    pub cached_tokens: u64,
    /// Nodes that could have prefilled it.
    pub candidates: usize,
}

/// Nobody can serve a request.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NoNode {
    /// No node has the model, though some have others.
    #[error("no node serves the model {model}")]
    UnknownModel {
        /// What was asked for.
        model: String,
    },
    /// None is there, or all have failed this request.
    #[error("no node is there to serve this")]
    NoneLeft {
        /// When it is worth to ask again.
        retry_after: Duration,
    },
}
