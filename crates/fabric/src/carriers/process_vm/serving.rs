//! Serves neighbours' WRITEs: reads the bytes that they ask for, or places those that came inside the request.

use std::sync::Arc;

use super::copies::NewCopy;
use super::neighbour::{PullError, PulledRange};
use super::words::Words;
use super::{ActiveCopy, CopyOrigin, ProcessVm};
use crate::carrier::{BadWords, Context, Owner, Party, SessionId};
use crate::ranges::Piece;
use crate::wire::{Fate, Outcome, WireRun};

/// A request counts as this many ranges, beside its own.
const REQUEST_RANGES: usize = 4;
/// Ranges that one neighbour may have in flight here, 24 bytes each.
const RANGES_QUEUED_MAX: usize = 1 << 20;
/// Outcomes of one Done.
const OUTCOMES_AT_ONCE: usize = 1024;

impl ProcessVm {
    /// A neighbour asks this process to read its WRITE from these addresses.
    pub(super) fn pull(
        &mut self,
        cx: &mut Context<'_>,
        session: SessionId,
        token: u64,
        runs: &[WireRun],
        addresses: &[u64],
    ) -> Result<(), BadWords> {
        let Some(serving) = self.serving.get_mut(&session) else {
            return Err(BadWords("a request of a session that is not served"));
        };
        crate::audit::serves(runs.len());
        let Some(pieces) = pieces(cx, serving.owner, runs) else {
            serving.outcomes.push(Outcome { token, fate: Fate::Refused });
            return Ok(());
        };
        let weight = runs.len() + REQUEST_RANGES;
        serving.queued += weight;
        if serving.queued > RANGES_QUEUED_MAX {
            return Err(BadWords("too much at a time"));
        }
        let ranges = pieces.into_iter().zip(addresses).map(|(to, from)| PulledRange { to, from: *from });
        let copy =
            NewCopy { neighbour: Arc::clone(&serving.neighbour), ranges: ranges.collect(), regions: None };
        let (owner, connection) = (serving.owner, serving.connection);
        // SAFETY: the destinations are registered memory, and a region is not given back before no copy touches it.
        let handle = unsafe { self.copies.begin(copy) };
        let origin = CopyOrigin::Theirs { session, owner, connection, token, weight };
        self.copying.insert(handle.id(), ActiveCopy { handle, origin });
        Ok(())
    }

    /// Places a neighbour's WRITE of less than a page, whose bytes came inside the request.
    pub(super) fn place(
        &mut self,
        cx: &mut Context<'_>,
        session: SessionId,
        token: u64,
        runs: &[WireRun],
        mut bytes: &[u8],
    ) -> Result<(), BadWords> {
        let Some(serving) = self.serving.get_mut(&session) else {
            return Err(BadWords("a request of a session that is not served"));
        };
        crate::audit::serves(runs.len());
        crate::audit::copies_few(bytes.len());
        let pieces = pieces(cx, serving.owner, runs);
        let fate = Fate::of(pieces.is_none());
        for Piece { address, len } in pieces.unwrap_or_default() {
            let Some((first, rest)) = bytes.split_at_checked(len) else { break };
            bytes = rest;
            // The peer reuses its memory when the lease is over, so nothing may be placed after that.
            if !cx.may_place() {
                return Err(BadWords("its lease expired: it has not echoed a recent stamp"));
            }
            // SAFETY: the piece lies in a registered region, valid for writes of `len` bytes until the region is given back.
            // Giving it back takes the engine's lock, which this thread holds. Other threads write such memory as they may.
            unsafe {
                let to = std::ptr::with_exposed_provenance_mut(address);
                std::ptr::copy_nonoverlapping(first.as_ptr(), to, len);
            }
        }
        serving.outcomes.push(Outcome { token, fate });
        Ok(())
    }

    /// A copy for a neighbour has ended: queues the outcome of its WRITE.
    pub(super) fn finish_pull(
        &mut self,
        cx: &mut Context<'_>,
        session: SessionId,
        connection: u64,
        token: u64,
        weight: usize,
        outcome: Result<(), PullError>,
    ) {
        let Some(serving) = self.serving.get_mut(&session).filter(|serving| serving.connection == connection)
        else {
            return;
        };
        serving.queued -= weight;
        match outcome {
            Ok(()) => serving.outcomes.push(Outcome { token, fate: Fate::Placed }),
            // A copy is given up here if its memory was unregistered.
            Err(PullError::Refused | PullError::GivenUp) => {
                serving.outcomes.push(Outcome { token, fate: Fate::Refused });
            }
            // The outcome of this WRITE is unknown. If the neighbour is still there, it uses another carrier from now on.
            Err(error) => {
                tracing::debug!(?session, %error, "a neighbour's memory cannot be read any more");
                cx.refuse(session, &error.to_string());
                self.stop_serving(session);
            }
        }
    }

    /// Sends neighbours the outcomes of their WRITEs.
    pub(super) fn send_outcomes(&mut self, cx: &mut Context<'_>) {
        for (session, serving) in &mut self.serving {
            for outcomes in std::mem::take(&mut serving.outcomes).chunks(OUTCOMES_AT_ONCE) {
                cx.send(Party::Session(*session), Words::done(outcomes));
            }
        }
    }

    /// Serves nothing more for a session, and cancels its copies. Those in flight end by themselves.
    pub(super) fn stop_serving(&mut self, session: SessionId) {
        self.serving.remove(&session);
        let is_of_it =
            |origin: &CopyOrigin| matches!(origin, CopyOrigin::Theirs { session: of, .. } if *of == session);
        let of_session = self.copying.values().filter(|copying| is_of_it(&copying.origin));
        of_session.for_each(|copying| copying.handle.give_up());
    }
}

/// Where the runs lie in this process. None: the peer may not write there, or a run is on a GPU.
fn pieces(cx: &Context<'_>, Owner(peer): Owner, runs: &[WireRun]) -> Option<Vec<Piece>> {
    let mut spots = Vec::with_capacity(runs.len());
    for run in runs {
        cx.process.regions.for_peer(peer, run.wanted(true), &mut spots)?;
    }
    spots.into_iter().map(|spot| spot.gpu.is_none().then_some(spot.piece)).collect()
}
