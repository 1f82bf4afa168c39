//! [`Rank`] and its dispatch, on a CPU.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::arrivals::NOWHERE;
use crate::heap::{Heap, Peers};
use crate::layout::{Layout, rest_bytes};
use crate::refusal::refusal;
use crate::routing::Routing;
use crate::{Arrivals, MoeError, Phase, RowLayout, Shape};

/// How combine sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sum {
    /// The token's rank adds `weight * row` of all experts in f32, in the order of k, by fused multiply-adds, and rounds the sum to
    /// the element. So the result does not depend on how many ranks there are. One row for each expert comes back.
    Exact,
    /// Each rank adds those of its experts, and rounds; the token's rank adds these sums in the order of ranks, and rounds.
    /// One row for each rank comes back. In the layout of tokens the caller has added them.
    Reduced,
}

/// Counts of a rank's operations and rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Dispatches that were sent.
    pub dispatches: u64,
    /// Combines that were sent back.
    pub combines: u64,
    /// Rows that were sent to other ranks, in both.
    pub rows_sent: u64,
    /// Rows that came from other ranks, in both.
    pub rows_received: u64,
}

/// A dispatch of which this rank's part is sent.
#[derive(Debug)]
pub struct Sent {
    dispatch: Dispatch,
    /// Lives until the rows are placed.
    _unplaced: Arc<()>,
}

/// A dispatch that is not combined.
#[derive(Debug)]
pub(crate) struct Dispatch {
    pub(crate) number: u64,
    pub(crate) routing: Routing,
    pub(crate) weights: Vec<f32>,
    /// The same in all dispatches of a rank.
    of: Arc<()>,
    /// Lives until it is combined, or given up.
    _open: Arc<()>,
}

/// A dispatch whose rows are counted.
#[derive(Debug)]
pub struct Arrived {
    sent: Sent,
    slots: Vec<usize>,
    /// Where they will stand.
    pub arrivals: Arrivals,
}

/// A dispatch whose rows are placed, for combine.
#[derive(Debug)]
pub struct Handle {
    pub(crate) dispatch: Dispatch,
    pub(crate) sent_back: Option<Sum>,
    pub(crate) received: Vec<Received>,
    pub(crate) rows: usize,
}

/// A token that another rank, or this one, has sent here.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) source: usize,
    pub(crate) slot: usize,
    pub(crate) token: usize,
    /// In the order of k, all of them.
    pub(crate) pairs: Vec<Pair>,
}

/// A token and one of its experts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pair {
    /// Number of the expert among those of this rank, [`NOWHERE`] if another rank has it.
    expert: u32,
    /// Where its row stands, if the expert is here. In the layout of tokens all pairs of a token have the same.
    pub(crate) position: u32,
    pub(crate) weight: f32,
}

impl Received {
    /// The pairs of this rank's experts, with their k.
    pub(crate) fn here(&self) -> impl Iterator<Item = (usize, &Pair)> + Clone {
        self.pairs.iter().enumerate().filter(|(_, pair)| pair.expert != NOWHERE)
    }
}

impl Handle {
    pub(crate) fn reweigh(&mut self, weights: &[f32]) -> Result<(), MoeError> {
        let (given, wanted) = (weights.len(), self.dispatch.weights.len());
        if given != wanted {
            return Err(MoeError::BadInput(format!(
                "combine got {given} weights, and {wanted} were dispatched"
            )));
        }
        self.dispatch.weights.copy_from_slice(weights);
        Ok(())
    }
}

/// One rank of an all-to-all. Made by [`join`](crate::join()).
///
/// A dispatch may begin once the rows of the one before are placed, and the one before that is combined or dropped. All ranks
/// dispatch equally often, and combine the same dispatches.
///
/// A send waits for nobody. So several ranks can also run one after the other in a thread, as long as all send before the first
/// one receives.
pub struct Rank {
    pub(crate) shape: Shape,
    pub(crate) rank: usize,
    pub(crate) layout: Layout,
    pub(crate) own: Heap,
    pub(crate) peers: Peers,
    pub(crate) timeout: Duration,
    pub(crate) is_interrupted: Box<dyn Fn() -> bool + Send>,
    dispatched: u64,
    placed: u64,
    id: Arc<()>,
    unplaced: Weak<()>,
    /// The last even and the last odd dispatch.
    open: [Weak<()>; 2],
    pub(crate) failed: Option<MoeError>,
    pub(crate) stats: Stats,
}

impl Rank {
    pub(crate) fn new(
        shape: Shape,
        rank: usize,
        layout: Layout,
        own: Heap,
        peers: Peers,
        timeout: Duration,
    ) -> Rank {
        Rank {
            shape,
            rank,
            layout,
            own,
            peers,
            timeout,
            is_interrupted: Box::new(|| false),
            dispatched: 0,
            placed: 0,
            id: Arc::new(()),
            unplaced: Weak::new(),
            open: [Weak::new(), Weak::new()],
            failed: None,
            stats: Stats::default(),
        }
    }

    /// The sizes that all ranks have.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Bytes of this rank's memory. The kernel gives pages as they are first written.
    pub fn bytes(&self) -> usize {
        self.layout.bytes
    }

    /// Has a wait call this about every 100 ms; the operation fails once it says true.
    pub fn interrupt_by(&mut self, is_interrupted: impl Fn() -> bool + Send + 'static) {
        self.is_interrupted = Box::new(is_interrupted);
    }

    /// Counts of operations and rows so far.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// # Errors
    /// That of the operation that failed for good.
    pub fn check(&self) -> Result<(), MoeError> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Sends the rows of tokens to the ranks of their experts: `rows` and `scales` one after the other, `top_k` ids and weights
    /// for each token. An id of -1 is no expert.
    ///
    /// # Errors
    /// [`MoeError::BadInput`] if the sizes do not fit, an expert does not exist, or an earlier dispatch is in the way; nothing is
    /// sent then. The error of an earlier operation.
    pub fn send(
        &mut self,
        rows: &[u8],
        scales: &[u8],
        ids: &[i64],
        weights: &[f32],
    ) -> Result<Sent, MoeError> {
        self.check()?;
        let routing = self.routed(rows, scales, ids, weights)?;
        let number = self.dispatched + 1;
        if self.unplaced.strong_count() > 0 {
            return Err(MoeError::BadInput("the rows of the dispatch before are not received yet".into()));
        }
        if self.placed != self.dispatched {
            return Err(self.fail(MoeError::GivenUp));
        }
        if self.open[(number & 1) as usize].strong_count() > 0 {
            let why = "two dispatches are neither combined nor given up";
            return Err(MoeError::BadInput(why.into()));
        }
        self.dispatched = number;
        self.stats.dispatches += 1;
        let Shape { row_bytes, scale_bytes, .. } = self.shape;
        for peer in self.others_first() {
            for (here, expert) in self.shape.experts_of(peer).enumerate() {
                self.count(peer, number, here, routing.counts[expert]);
            }
            self.count(peer, number, self.shape.experts_a_rank(), routing.tokens[peer].len() as u32);
        }
        let mut rest = vec![0; rest_bytes(self.shape.top_k)];
        for peer in self.others_first() {
            for (slot, token) in routing.tokens[peer].iter().enumerate() {
                let token = *token as usize;
                self.describe(&routing, weights, peer, token, &mut rest);
                let (word, at) = self.layout.row(number, self.rank, slot);
                let heap = self.heap(peer);
                heap.write(at, &rows[token * row_bytes..][..row_bytes]);
                heap.write(at + self.layout.scales_at, &scales[token * scale_bytes..][..scale_bytes]);
                heap.write(at + self.layout.rest_at, &rest);
                heap.set(word, number);
            }
            self.stats.rows_sent += if peer == self.rank { 0 } else { routing.tokens[peer].len() as u64 };
        }
        let (unplaced, open) = (Arc::new(()), Arc::new(()));
        self.unplaced = Arc::downgrade(&unplaced);
        self.open[(number & 1) as usize] = Arc::downgrade(&open);
        let of = Arc::clone(&self.id);
        let dispatch = Dispatch { number, routing, weights: weights.to_vec(), of, _open: open };
        Ok(Sent { dispatch, _unplaced: unplaced })
    }

    /// The routing of an input that fits.
    fn routed(&self, rows: &[u8], scales: &[u8], ids: &[i64], weights: &[f32]) -> Result<Routing, MoeError> {
        let Shape { top_k, max_tokens, row_bytes, scale_bytes, .. } = self.shape;
        let bad = |why: String| Err(MoeError::BadInput(why));
        if !ids.len().is_multiple_of(top_k) || weights.len() != ids.len() {
            let (ids, weights) = (ids.len(), weights.len());
            return bad(format!("there are {ids} ids and {weights} weights, and {top_k} of each a token"));
        }
        let tokens = ids.len() / top_k;
        if tokens > max_tokens {
            return bad(format!("there are {tokens} tokens, and room for {max_tokens} (max_tokens)"));
        }
        if rows.len() != tokens * row_bytes || scales.len() != tokens * scale_bytes {
            let (rows, scales) = (rows.len(), scales.len());
            return bad(format!(
                "there are {rows} bytes of rows and {scales} of scales, and {tokens} tokens have {row_bytes} and \
                 {scale_bytes} each"
            ));
        }
        Routing::of(ids, &self.shape).map_err(|error| MoeError::BadInput(error.to_string()))
    }

    /// This rank's own part is sent last: nobody else waits for it.
    fn others_first(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, ranks) = (self.rank, self.shape.ranks);
        (1..=ranks).map(move |step| (rank + step) % ranks)
    }

    pub(crate) fn heap(&self, rank: usize) -> &Heap {
        match &self.peers[rank] {
            Some((heap, _)) => heap,
            None => &self.own,
        }
    }

    fn count(&self, peer: usize, number: u64, expert: usize, rows: u32) {
        let word = self.layout.count(number, self.rank, expert);
        self.heap(peer).set(word, number << 32 | u64::from(rows));
    }

    /// Writes what goes with a row: experts of that peer and places, weights, and the token.
    fn describe(&self, routing: &Routing, weights: &[f32], peer: usize, token: usize, rest: &mut [u8]) {
        let top_k = self.shape.top_k;
        let held = self.shape.experts_of(peer);
        let pairs = token * top_k..(token + 1) * top_k;
        let mut words = Vec::with_capacity(3 * top_k + 1);
        for (expert, place) in routing.experts[pairs.clone()].iter().zip(&routing.places[pairs.clone()]) {
            let here = expert.map(|expert| expert as usize).filter(|expert| held.contains(expert));
            words.push(here.map_or(NOWHERE, |expert| (expert - held.start) as u32));
            words.push(*place);
        }
        words.extend(weights[pairs].iter().map(|weight| weight.to_bits()));
        words.push(token as u32);
        for (bytes, word) in rest.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *bytes = word.to_le_bytes();
        }
    }

    /// Waits until all ranks have sent their counts.
    ///
    /// # Errors
    /// All but [`MoeError::BadInput`].
    pub fn arrive(&mut self, sent: Sent) -> Result<Arrived, MoeError> {
        self.check()?;
        self.check_own(&sent.dispatch)?;
        let number = sent.dispatch.number;
        let experts = self.shape.experts_of(self.rank).len();
        let (mut by_source, mut slots) = (Vec::new(), Vec::new());
        for source in 0..self.shape.ranks {
            let mut rows = Vec::with_capacity(experts);
            for expert in 0..experts {
                rows.push(self.counted(number, source, expert)?);
            }
            let here = self.counted(number, source, self.shape.experts_a_rank())? as usize;
            let pairs: u64 = rows.iter().map(|rows| u64::from(*rows)).sum();
            let most = (self.shape.max_tokens * self.shape.top_k) as u64;
            if here > self.shape.max_tokens || pairs > most || pairs < here as u64 {
                return Err(self.fail(MoeError::Nonsense { rank: source, what: "counts" }));
            }
            by_source.push(rows);
            slots.push(here);
        }
        let arrivals = Arrivals::of(by_source, &slots, &self.shape);
        Ok(Arrived { sent, slots, arrivals })
    }

    pub(crate) fn check_own(&self, dispatch: &Dispatch) -> Result<(), MoeError> {
        if Arc::ptr_eq(&dispatch.of, &self.id) {
            return Ok(());
        }
        Err(MoeError::BadInput("this dispatch is of another all-to-all".into()))
    }

    fn counted(&mut self, number: u64, source: usize, expert: usize) -> Result<u32, MoeError> {
        let word = self.layout.count(number, source, expert);
        // The word has the lower half of the number. All ranks write it in each second dispatch.
        let ahead = |value: u64| ((value >> 32) as u32).wrapping_sub(number as u32) as i32;
        let value = self.wait(word, source, Phase::Counts, |value| ahead(value).cmp(&0))?;
        Ok(value as u32)
    }

    /// Copies the rows that arrived to their places. `rows` and `scales` have room for `arrivals.rows` of each; rows that no
    /// token has are left as they are.
    ///
    /// # Errors
    /// [`MoeError::BadInput`] if the room is another one, or the dispatch another rank's. [`MoeError::OverCapacity`] if
    /// `arrivals.needed` says so; nothing is written then. All others.
    pub fn place(
        &mut self,
        arrived: Arrived,
        rows: &mut [u8],
        scales: &mut [u8],
    ) -> Result<Handle, MoeError> {
        self.check()?;
        self.check_own(&arrived.sent.dispatch)?;
        let Shape { ranks, row_bytes, scale_bytes, top_k, .. } = self.shape;
        let Arrived { sent: Sent { dispatch, _unplaced }, slots, arrivals } = arrived;
        let room = arrivals.rows;
        if rows.len() != room * row_bytes || scales.len() != room * scale_bytes {
            return Err(MoeError::BadInput(format!("the output has no room for exactly {room} rows")));
        }
        let mut received = Vec::with_capacity(slots.iter().sum());
        let mut rest = vec![0; rest_bytes(top_k)];
        for step in 0..ranks {
            let source = (self.rank + step) % ranks;
            let mut counted = vec![0; arrivals.of_source(source).len()];
            for slot in 0..slots[source] {
                let (word, at) = self.layout.row(dispatch.number, source, slot);
                self.wait(word, source, Phase::Rows, |value| value.cmp(&dispatch.number))?;
                self.own.read(at + self.layout.rest_at, &mut rest);
                let one = self.described(source, slot, &arrivals, &rest, &mut counted)?;
                if let Some(needed) = arrivals.needed {
                    self.refuse(dispatch.number, &one, needed);
                    continue;
                }
                // In the layout of tokens all are the same row.
                let copies = if self.shape.layout == RowLayout::Tokens { 1 } else { top_k };
                for (_, pair) in one.here().take(copies) {
                    let position = pair.position as usize;
                    self.own.read(at, &mut rows[position * row_bytes..][..row_bytes]);
                    let scales = &mut scales[position * scale_bytes..][..scale_bytes];
                    self.own.read(at + self.layout.scales_at, scales);
                }
                received.push(one);
            }
            if counted != arrivals.of_source(source) {
                return Err(self.fail(MoeError::Nonsense { rank: source, what: "other rows than counts" }));
            }
            self.stats.rows_received += if source == self.rank { 0 } else { slots[source] as u64 };
        }
        self.placed = dispatch.number;
        if let (Some(needed), RowLayout::Masked { capacity }) = (arrivals.needed, self.shape.layout) {
            return Err(MoeError::OverCapacity { rank: self.rank, needed, capacity });
        }
        Ok(Handle { dispatch, sent_back: None, received, rows: room })
    }

    /// Writes what each token wants here, in the layout of tokens: for each row `top_k` numbers of experts among those of this
    /// rank, and their weights. Those of other ranks' experts are -1 and 0.
    ///
    /// # Errors
    /// [`MoeError::BadInput`] if the layout is another one, there is no room for exactly that, or the dispatch is another rank's.
    pub fn write_wanted(
        &self,
        handle: &Handle,
        ids: &mut [i64],
        weights: &mut [f32],
    ) -> Result<(), MoeError> {
        self.check_own(&handle.dispatch)?;
        if self.shape.layout != RowLayout::Tokens {
            return Err(MoeError::BadInput("only the layout of tokens has one row for each token".into()));
        }
        let (top_k, pairs) = (self.shape.top_k, handle.rows * self.shape.top_k);
        if ids.len() != pairs || weights.len() != pairs {
            return Err(MoeError::BadInput(format!("there is no room for exactly {pairs} ids and weights")));
        }
        ids.fill(-1);
        weights.fill(0.0);
        for one in &handle.received {
            for (k, pair) in one.here() {
                let at = pair.position as usize * top_k + k;
                (ids[at], weights[at]) = (i64::from(pair.expert), pair.weight);
            }
        }
        Ok(())
    }

    /// Tells the token's rank that no sum comes, however it would wait for it.
    fn refuse(&self, number: u64, one: &Received, needed: u32) {
        let (heap, word) = (self.heap(one.source), refusal(number, needed));
        for (k, _) in one.here() {
            heap.set(self.layout.pair_row(number, one.token, k).0, word);
        }
        heap.set(self.layout.sum(number, self.rank, one.slot).0, word);
    }

    /// Reads what goes with a row, and checks it: another process wrote it. Counts the rows of each expert.
    fn described(
        &mut self,
        source: usize,
        slot: usize,
        arrivals: &Arrivals,
        rest: &[u8],
        counted: &mut [u32],
    ) -> Result<Received, MoeError> {
        let top_k = self.shape.top_k;
        let words: Vec<u32> = rest.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let token = words[3 * top_k] as usize;
        if token >= self.shape.max_tokens {
            return Err(self.fail(MoeError::Nonsense { rank: source, what: "a token" }));
        }
        let mut pairs = Vec::with_capacity(top_k);
        for k in 0..top_k {
            let (expert, place) = (words[2 * k], words[2 * k + 1]);
            let position = if expert == NOWHERE {
                NOWHERE
            } else {
                let found = match self.shape.layout {
                    RowLayout::Tokens => arrivals.token_position(source, slot, expert as usize, place),
                    _ => arrivals.position(source, expert as usize, place),
                };
                let Some(position) = found else {
                    return Err(self.fail(MoeError::Nonsense { rank: source, what: "a place" }));
                };
                counted[expert as usize] += 1;
                position
            };
            pairs.push(Pair { expert, position, weight: f32::from_bits(words[2 * top_k + k]) });
        }
        Ok(Received { source, slot, token, pairs })
    }
}

impl fmt::Debug for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rank").field("rank", &self.rank).field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // The others have mapped the memory themselves, so a write that comes now harms nobody.
        if self.failed.is_none() {
            self.own.leave(None);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use crate::Number;

    const TERMS: crate::Terms = crate::Terms { is_exact: true, cast: None };
    const SHAPE: Shape = Shape {
        ranks: 1,
        experts: 2,
        top_k: 1,
        max_tokens: 2,
        row_bytes: 16,
        scale_bytes: 0,
        hidden: 8,
        number: Number::Bf16,
        alignment: 1,
        layout: RowLayout::Experts,
    };

    /// A rank that is its own peer. `garble` changes its memory between send and receive, as another process could.
    fn received(garble: impl FnOnce(&Rank)) -> MoeError {
        let told = &mut |bytes: &[u8]| Ok(vec![bytes.to_vec()]);
        let mut rank = crate::join(&SHAPE, 0, TERMS, Duration::from_millis(200), told).unwrap();
        let sent = rank.send(&[7; 32], &[], &[0, 1], &[1.0, 1.0]).unwrap();
        garble(&rank);
        let place = |rank: &mut Rank, arrived: Arrived| {
            let mut rows = vec![0; arrived.arrivals.rows * 16];
            rank.place(arrived, &mut rows, &mut []).map(|_| ())
        };
        let error = rank.arrive(sent).and_then(|arrived| place(&mut rank, arrived)).unwrap_err();
        assert_eq!(rank.check(), Err(error.clone()));
        error
    }

    fn word_of_row(rank: &Rank, slot: usize, word: usize, value: u32) {
        let (_, at) = rank.layout.row(1, 0, slot);
        rank.own.write(at + rank.layout.rest_at + 4 * word, &value.to_le_bytes());
    }

    #[test]
    fn bytes_that_no_routing_gives_are_an_error_and_no_panic() {
        let nonsense = |what| MoeError::Nonsense { rank: 0, what };
        let count =
            |rank: &Rank, expert, value: u64| rank.own.set(rank.layout.count(1, 0, expert), 1 << 32 | value);
        assert_eq!(received(|rank| count(rank, 0, u64::from(u32::MAX))), nonsense("counts"));
        assert_eq!(received(|rank| count(rank, 2, 3)), nonsense("counts"));
        // More slots than pairs.
        assert_eq!(received(|rank| count(rank, 0, 0)), nonsense("counts"));
        assert_eq!(received(|rank| word_of_row(rank, 0, 3, 2)), nonsense("a token"));
        assert_eq!(received(|rank| word_of_row(rank, 0, 0, 2)), nonsense("a place"));
        assert_eq!(received(|rank| word_of_row(rank, 1, 1, 1)), nonsense("a place"));
        // An expert's row that does not come.
        assert_eq!(received(|rank| word_of_row(rank, 1, 0, NOWHERE)), nonsense("other rows than counts"));
    }

    #[test]
    fn a_refusal_in_a_layout_that_always_has_room_is_nonsense() {
        let told = &mut |bytes: &[u8]| Ok(vec![bytes.to_vec()]);
        let mut rank = crate::join(&SHAPE, 0, TERMS, Duration::from_secs(20), told).unwrap();
        let sent = rank.send(&[7; 16], &[], &[0], &[1.0]).unwrap();
        let arrived = rank.arrive(sent).unwrap();
        let mut handle = rank.place(arrived, &mut [0; 16], &mut []).unwrap();
        rank.send_back(&mut handle, &[0; 16], Sum::Exact, None).unwrap();
        rank.own.set(rank.layout.pair_row(1, 0, 0).0, refusal(1, 5));
        let error = rank.gather(handle, &mut [0; 16]).unwrap_err();
        assert_eq!(error, MoeError::Nonsense { rank: 0, what: "a refusal" });
        assert_eq!(rank.check(), Err(error));
    }

    #[test]
    fn a_word_of_a_later_dispatch_ends_the_wait() {
        let later = |rank: &Rank| rank.own.set(rank.layout.row(1, 0, 1).0, 3);
        assert_eq!(received(later), MoeError::OutOfStep { rank: 0 });
        let later = |rank: &Rank| rank.own.set(rank.layout.count(1, 0, 0), 3 << 32);
        assert_eq!(received(later), MoeError::OutOfStep { rank: 0 });
    }
}
