//! Serves peers' WRITEs: copies the bytes that they ask for out of their memory.

use super::neighbour::{NotFound, WantedBytes};
use super::served::{PulledWrite, ServedPeer};
use super::words::{PullSource, Words};
use super::{ActiveCopy, CopyOrigin, Cuda};
use crate::carrier::{BadWords, Context, Owner, Party, SessionId};
use crate::ranges::Spot;
use crate::transfers::Completion;
use crate::wire::{Fate, Outcome, WireRun};

/// A request counts as this many runs, beside its own.
const REQUEST_RUNS: usize = 4;
/// Runs that one peer may have in flight here.
const RUNS_QUEUED_MAX: usize = 1 << 20;

impl Cuda {
    /// A peer asks this process to copy its WRITE from these places of its regions.
    pub(super) fn pull(
        &mut self,
        cx: &mut Context<'_>,
        session: SessionId,
        token: u64,
        runs: &[WireRun],
        sources: &[PullSource],
    ) -> Result<(), BadWords> {
        let Some(serving) = self.serving.get_mut(&session) else {
            return Err(BadWords("a request of a session that is not served"));
        };
        crate::audit::serves(runs.len());
        let Some((gpu, spots)) = spots(cx, serving.owner, runs) else {
            serving.outcomes.push(Outcome { token, fate: Fate::Refused });
            return Ok(());
        };
        let weight = runs.len() + REQUEST_RUNS;
        serving.queued += weight;
        if serving.queued > RUNS_QUEUED_MAX {
            return Err(BadWords("too much at a time"));
        }
        let mut bytes = Vec::with_capacity(spots.len());
        for (parts, source) in spots.iter().zip(sources) {
            let PullSource { region, generation, mut offset } = *source;
            for spot in parts {
                let len = spot.piece.len as u64;
                bytes.push(WantedBytes { region, generation, offset, len, to: spot.piece.address as u64 });
                offset = offset.checked_add(len).ok_or(BadWords("an offset beyond all memory"))?;
            }
        }
        serving.waiting.push_back(PulledWrite { token, gpu, bytes, weight });
        self.serve_waiting(cx, session);
        Ok(())
    }

    /// Begins the copies of a session's WRITEs that can begin.
    pub(super) fn serve_waiting(&mut self, cx: &mut Context<'_>, session: SessionId) {
        loop {
            let Some(serving) = self.serving.get_mut(&session) else { return };
            let Some(first) = serving.waiting.front() else { return };
            if !self.copies.has_room(first.gpu) {
                return;
            }
            let gpu = first.gpu;
            match serving.neighbour.find(cx.now(), gpu, &first.bytes) {
                Ok(found) => {
                    let Some(PulledWrite { token, weight, .. }) = serving.waiting.pop_front() else { return };
                    let (owner, connection) = (serving.owner, serving.neighbour.connection);
                    let origin = CopyOrigin::Theirs { session, owner, connection, token, weight };
                    let card = serving.neighbour.card.clone();
                    let (Some(card), Some(opened)) = (card, self.exposed.gpu(gpu)) else { return };
                    let marks =
                        found.mapped.iter().map(|held| (held.of.region, held.of.generation)).collect();
                    // SAFETY: the destinations are registered memory, and a region is not given back before no copy
                    // touches it. `ActiveCopy` keeps the sources mapped.
                    let copy = unsafe { self.copies.begin(gpu, &opened, found.copies, found.within) };
                    self.copying.insert(copy, ActiveCopy { origin, card, marks, mapped: found.mapped });
                }
                Err(NotFound::Missing(regions)) => {
                    return self.fetch(cx, Party::Session(session), gpu, regions);
                }
                Err(NotFound::Refused) => {
                    let Some(PulledWrite { token, weight, .. }) = serving.waiting.pop_front() else { return };
                    serving.queued -= weight;
                    serving.outcomes.push(Outcome { token, fate: Fate::Refused });
                }
            }
        }
    }

    /// A copy for a peer has ended: queues the outcome of its WRITE.
    pub(super) fn finish_pull(
        &mut self,
        session: SessionId,
        (connection, token, weight): (u64, u64, usize),
        outcome: Completion,
    ) {
        let is_its = |serving: &&mut ServedPeer| serving.neighbour.connection == connection;
        let Some(serving) = self.serving.get_mut(&session).filter(is_its) else { return };
        serving.queued -= weight;
        let fate = match outcome {
            Completion::Placed => Fate::Placed,
            Completion::GpuFailed => Fate::GpuFailed,
            Completion::Unknown | Completion::Refused | Completion::NoRoom => Fate::Refused,
        };
        serving.outcomes.push(Outcome { token, fate });
    }

    /// Sends peers the outcomes of their WRITEs.
    pub(super) fn send_outcomes(&mut self, cx: &mut Context<'_>) {
        for (session, serving) in &mut self.serving {
            if !serving.outcomes.is_empty() {
                let done = Words::Done(std::mem::take(&mut serving.outcomes));
                done.encode().into_iter().for_each(|words| cx.send(Party::Session(*session), words));
            }
        }
    }

    /// Serves nothing more for a session. Copies in flight end by themselves.
    pub(super) fn stop_serving(&mut self, session: SessionId) {
        self.pending.retain(|offer| offer.session != session);
        if let Some(mut serving) = self.serving.remove(&session) {
            self.unwatch(&serving.neighbour);
            let mapped = serving.neighbour.take_all();
            self.close_imports(mapped);
        }
    }
}

/// Where the runs lie in this process: one GPU, and for each run its parts. None: the peer may not write there, or the bytes are
/// not on one GPU.
fn spots(cx: &Context<'_>, Owner(peer): Owner, runs: &[WireRun]) -> Option<(u16, Vec<Vec<Spot>>)> {
    let mut all = Vec::with_capacity(runs.len());
    for run in runs {
        let mut spots = Vec::new();
        cx.process.regions.for_peer(peer, run.wanted(true), &mut spots)?;
        all.push(spots);
    }
    let gpu = all.first()?.first()?.gpu?;
    all.iter().flatten().all(|spot| spot.gpu == Some(gpu)).then_some((gpu, all))
}
