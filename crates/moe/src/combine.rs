//! The combine of a [`Rank`]: rows go back to the tokens' ranks, which sum them.

use crate::rank::Dispatch;
use crate::refusal::{compare, needed};
use crate::{Handle, MoeError, Phase, Rank, RowLayout, Sum};

impl Rank {
    /// Sends back what the experts made of the rows. `outputs` has as many rows as `rows` of [`Rank::place`] had, of
    /// [`Shape::sum_bytes`](crate::Shape::sum_bytes) each.
    ///
    /// In the layout of tokens these are sums that the caller has made, and `sum` is [`Sum::Reduced`].
    ///
    /// `weights`, `top_k` for each token of the dispatch, take the place of those that were dispatched. For [`Sum::Exact`] only:
    /// in a reduced sum other ranks multiply.
    ///
    /// # Errors
    /// [`MoeError::BadInput`] if it has another size, or was sent back before; nothing is sent or changed then. The error of an
    /// earlier operation.
    pub fn send_back(
        &mut self,
        handle: &mut Handle,
        outputs: &[u8],
        sum: Sum,
        weights: Option<&[f32]>,
    ) -> Result<(), MoeError> {
        self.check()?;
        self.check_own(&handle.dispatch)?;
        let sum_bytes = self.shape.sum_bytes();
        if outputs.len() != handle.rows * sum_bytes {
            return Err(MoeError::BadInput(format!(
                "combine got {} bytes, and {} rows of {sum_bytes} bytes were dispatched",
                outputs.len(),
                handle.rows
            )));
        }
        if handle.sent_back.is_some() {
            return Err(MoeError::BadInput("this dispatch was combined before".into()));
        }
        let by_token = self.shape.layout == RowLayout::Tokens;
        if by_token && sum == Sum::Exact {
            let why = "in the layout of tokens the caller has added the rows of experts: combine is reduced";
            return Err(MoeError::BadInput(why.into()));
        }
        if let Some(weights) = weights {
            handle.reweigh(weights)?;
        }
        handle.sent_back = Some(sum);
        self.stats.combines += 1;
        let (number, mut sent) = (handle.dispatch.number, 0);
        let output = |position: u32| &outputs[position as usize * sum_bytes..][..sum_bytes];
        let mut reduced = vec![0; sum_bytes];
        for one in &handle.received {
            let mut here = one.here();
            let heap = self.heap(one.source);
            match sum {
                Sum::Exact => {
                    for (k, pair) in here {
                        let (word, at) = self.layout.pair_row(number, one.token, k);
                        heap.write(at, output(pair.position));
                        heap.set(word, number);
                        sent += u64::from(one.source != self.rank);
                    }
                }
                Sum::Reduced => {
                    let (word, at) = self.layout.sum(number, self.rank, one.slot);
                    if by_token {
                        heap.write(at, here.next().map_or(&reduced, |(_, pair)| output(pair.position)));
                    } else {
                        let rows = here.map(|(_, pair)| (output(pair.position), pair.weight));
                        self.shape.number.write_weighted(rows, &mut reduced);
                        heap.write(at, &reduced);
                    }
                    heap.set(word, number);
                    sent += u64::from(one.source != self.rank);
                }
            }
        }
        self.stats.rows_sent += sent;
        Ok(())
    }

    /// Waits for what came back, and writes one row for each token of the dispatch: the weighted sum; zeros for a token that
    /// wanted no expert.
    ///
    /// # Errors
    /// [`MoeError::BadInput`] if `tokens` has no room for exactly that, or nothing was sent back. [`MoeError::OverCapacity`] if a
    /// rank had no room for one of the tokens; `tokens` is undefined then. All others.
    pub fn gather(&mut self, handle: Handle, tokens: &mut [u8]) -> Result<(), MoeError> {
        self.check()?;
        self.check_own(&handle.dispatch)?;
        let Some(sum) = handle.sent_back else {
            return Err(MoeError::BadInput("what the experts made is to be sent back first".into()));
        };
        let Dispatch { number, routing, weights, .. } = &handle.dispatch;
        let (sum_bytes, top_k, count) = (self.shape.sum_bytes(), self.shape.top_k, routing.len(&self.shape));
        if tokens.len() != count * sum_bytes {
            let why = format!("the output has no room for exactly {count} rows of {sum_bytes} bytes");
            return Err(MoeError::BadInput(why));
        }
        // The rows of a token, and the weight of each.
        let (mut rows, mut factors) = (vec![0; sum_bytes * top_k.max(self.shape.ranks)], Vec::new());
        // The next slot of each rank. Its tokens are in order.
        let mut slots = vec![0; self.shape.ranks];
        for (token, out) in tokens.chunks_mut(sum_bytes).enumerate() {
            factors.clear();
            match sum {
                Sum::Exact => {
                    let pairs = token * top_k..(token + 1) * top_k;
                    let experts = routing.experts[pairs.clone()].iter().zip(&weights[pairs]);
                    for (k, (expert, weight)) in experts.enumerate() {
                        let Some(expert) = expert else { continue };
                        let from = self.shape.rank_of(*expert as usize);
                        let (word, at) = self.layout.pair_row(*number, token, k);
                        let row = &mut rows[factors.len() * sum_bytes..][..sum_bytes];
                        self.row_back(*number, from, word, at, row)?;
                        factors.push(*weight);
                    }
                }
                Sum::Reduced => {
                    for (rank, slot) in slots.iter_mut().enumerate() {
                        if routing.tokens[rank].get(*slot) != Some(&(token as u32)) {
                            continue;
                        }
                        let (word, at) = self.layout.sum(*number, rank, *slot);
                        let row = &mut rows[factors.len() * sum_bytes..][..sum_bytes];
                        self.row_back(*number, rank, word, at, row)?;
                        factors.push(1.0);
                        *slot += 1;
                    }
                }
            }
            let rows = rows.chunks(sum_bytes);
            match sum {
                Sum::Exact => self.shape.number.write_weighted(rows.zip(factors.iter().copied()), out),
                Sum::Reduced => self.shape.number.write_sum(rows.take(factors.len()), out),
            }
        }
        Ok(())
    }

    /// Waits for a row of combine, and reads it.
    fn row_back(
        &mut self,
        number: u64,
        rank: usize,
        word: usize,
        at: usize,
        row: &mut [u8],
    ) -> Result<(), MoeError> {
        let word = self.wait(word, rank, Phase::Sums, |value| compare(value, number))?;
        if let Some(needed) = needed(word) {
            return Err(match self.shape.layout {
                RowLayout::Masked { capacity } => MoeError::OverCapacity { rank, needed, capacity },
                _ => self.fail(MoeError::Nonsense { rank, what: "a refusal" }),
            });
        }
        self.own.read(at, row);
        self.stats.rows_received += u64::from(rank != self.rank);
        Ok(())
    }
}
