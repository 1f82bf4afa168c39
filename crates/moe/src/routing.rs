//! [`Routing`]: where the rows of a rank's tokens go. Every place follows from the experts' ids alone, so no two ranks have to
//! agree on one, and the same ids always give the same places.

use thiserror::Error;

use crate::Shape;

/// An expert that does not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("token {token} wants expert {expert} as its number {k}: experts are 0 to {}, and -1 is none", experts - 1)]
pub(crate) struct BadExpert {
    /// Position of the token.
    pub(crate) token: usize,
    /// Position among the token's experts.
    pub(crate) k: usize,
    /// Id that was asked for.
    pub(crate) expert: i64,
    /// Number of experts.
    pub(crate) experts: usize,
}

/// The way of each row of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Routing {
    /// For each rank, the tokens that go there, by slot. A token goes to a rank once, however many of its experts are there.
    pub(crate) tokens: Vec<Vec<u32>>,
    /// For each token and number k, the expert; None where it wants none.
    pub(crate) experts: Vec<Option<u32>>,
    /// For each token and number k, how many pairs of an earlier token, or of the same and an earlier k, want that expert.
    pub(crate) places: Vec<u32>,
    /// For each expert, how many pairs want it.
    pub(crate) counts: Vec<u32>,
}

impl Routing {
    /// Routes tokens by their experts' ids, `top_k` for each token; -1 is none.
    ///
    /// # Errors
    /// The first id that is no expert.
    ///
    /// # Panics
    /// If the number of ids is no multiple of `top_k`.
    pub(crate) fn of(ids: &[i64], shape: &Shape) -> Result<Routing, BadExpert> {
        assert!(ids.len().is_multiple_of(shape.top_k), "each token has top_k ids");
        let mut routing = Routing {
            tokens: vec![Vec::new(); shape.ranks],
            experts: Vec::with_capacity(ids.len()),
            places: Vec::with_capacity(ids.len()),
            counts: vec![0; shape.experts],
        };
        for (token, wanted) in ids.chunks(shape.top_k).enumerate() {
            for (k, id) in wanted.iter().enumerate() {
                let expert = match usize::try_from(*id) {
                    Ok(expert) if expert < shape.experts => expert,
                    Err(_) if *id == -1 => {
                        routing.experts.push(None);
                        routing.places.push(0);
                        continue;
                    }
                    _ => return Err(BadExpert { token, k, expert: *id, experts: shape.experts }),
                };
                routing.experts.push(Some(expert as u32));
                routing.places.push(routing.counts[expert]);
                routing.counts[expert] += 1;
                let there = &mut routing.tokens[shape.rank_of(expert)];
                if there.last() != Some(&(token as u32)) {
                    there.push(token as u32);
                }
            }
        }
        Ok(routing)
    }

    /// Number of tokens.
    pub(crate) fn len(&self, shape: &Shape) -> usize {
        self.experts.len() / shape.top_k
    }
}
