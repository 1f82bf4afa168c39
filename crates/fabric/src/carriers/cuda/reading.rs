//! Begins and ends the copies of READs, and asks peers to copy WRITEs.

use super::neighbour::{NotFound, WantedBytes};
use super::registrar::RegionKey;
use super::words::{PullSource, Words};
use super::{ActiveCopy, ConnectedPeer, CopyOrigin, Cuda, CudaPost, send};
use crate::carrier::{CarrierPost, Context, Party, PostedRun, SessionId};
use crate::carriers::awaited::AwaitedRegions;
use crate::peers::{NotThere, RemoteBytes};
use crate::provider::NotNow;
use crate::transfers::{Completion, PeerId};
use crate::wire::WireRun;
impl Cuda {
    /// Asks a peer to copy a WRITE. Its runs are on one GPU on both sides.
    pub(super) fn ask_pull(&mut self, cx: &mut Context<'_>, post: &CarrierPost<'_>) -> Result<(), NotNow> {
        let CarrierPost { peer, token, runs, .. } = *post;
        let source = |run: &PostedRun| {
            let (region, generation, offset) = self.exposed.region_at(&run.local)?;
            Some(PullSource { region, generation, offset })
        };
        let Some(sources) = runs.iter().map(source).collect() else {
            cx.completed(token, Completion::Refused);
            return Ok(());
        };
        let runs = runs.iter().map(|run| WireRun {
            region: run.region,
            generation: run.generation,
            offset: run.offset,
            len: run.len,
        });
        let words = Words::Pull { token: token.number(), runs: runs.collect(), sources };
        send(cx, Party::Peer(peer), &words);
        self.posted.insert(token, CudaPost { peer, is_pulled: true });
        Ok(())
    }

    /// Begins the copy of a READ.
    pub(super) fn read(
        &mut self,
        cx: &mut Context<'_>,
        post: &CarrierPost<'_>,
        gpu: u16,
    ) -> Result<(), NotNow> {
        let CarrierPost { path, peer, token, runs, .. } = *post;
        if !self.copies.has_room(gpu) {
            self.starved.push(path);
            return Err(NotNow);
        }
        let reader = self.peers.get_mut(&peer).ok_or(NotNow)?;
        let connection = reader.connection;
        let wanted = match wanted(cx, &mut reader.awaited, peer, runs) {
            Ok(wanted) => wanted,
            Err(CannotRead::Yet) => return Err(NotNow),
            Err(CannotRead::Refused) => {
                cx.completed(token, Completion::Refused);
                return Ok(());
            }
            Err(CannotRead::NotShared(why)) => {
                self.give_up(cx, peer, format!("the peer cannot share its GPU memory: {why}"));
                return Err(NotNow);
            }
        };
        let neighbour = reader.neighbour.as_mut().ok_or(NotNow)?;
        match neighbour.find(cx.now(), gpu, &wanted.bytes) {
            Ok(found) => {
                let marks = wanted.marks;
                let card = neighbour.card.clone().ok_or(NotNow)?;
                let opened = self.exposed.gpu(gpu).ok_or(NotNow)?;
                // SAFETY: the destinations are memory of a transfer of ours, which belongs to the post until the copy is over.
                // `ActiveCopy` keeps the sources mapped.
                let copy = unsafe { self.copies.begin(gpu, &opened, found.copies, found.within) };
                let origin = CopyOrigin::Ours { token, connection };
                self.copying.insert(copy, ActiveCopy { origin, card, marks, mapped: found.mapped });
                self.posted.insert(token, CudaPost { peer, is_pulled: false });
                Ok(())
            }
            Err(NotFound::Missing(regions)) => {
                self.fetch(cx, Party::Peer(peer), gpu, regions);
                Err(NotNow)
            }
            Err(NotFound::Refused) => {
                cx.completed(token, Completion::Refused);
                Ok(())
            }
        }
    }

    /// Completes the posts and requests whose copies have ended. Whether there were any.
    pub(super) fn take_ended(&mut self, cx: &mut Context<'_>) -> bool {
        let ended = self.copies.take_ended();
        let any = !ended.is_empty();
        for (copy, outcome) in ended {
            let Some(ActiveCopy { origin, card, marks, mapped }) = self.copying.remove(&copy) else {
                continue;
            };
            // The card is read after the last byte was copied.
            let completion = match outcome {
                Ok(()) if card.marks(&marks) => Completion::Placed,
                Ok(()) => Completion::Refused,
                Err(error) => {
                    // Log: a GPU failed to copy bytes of another engine's GPU; for a hand-off, the decode engine
                    // computes those blocks. Do: look for CUDA errors in the engine's log and Xid in dmesg.
                    tracing::warn!(%error, "GPU driver failed to copy bytes of a peer's GPU");
                    Completion::GpuFailed
                }
            };
            self.close_given_up(mapped);
            cx.note_released();
            match origin {
                CopyOrigin::Ours { token, connection } => {
                    let Some(CudaPost { peer, .. }) = self.posted.remove(&token) else { continue };
                    // If that connection is gone, the outcome of its other posts is unknown, so this one's is too.
                    let is_of = |reader: &ConnectedPeer| reader.connection == connection;
                    let is_connected = self.peers.get(&peer).is_some_and(is_of);
                    cx.completed(token, if is_connected { completion } else { Completion::Unknown });
                }
                CopyOrigin::Theirs { session, connection, token, weight, .. } => {
                    self.finish_pull(session, (connection, token, weight), completion);
                }
            }
        }
        if any {
            std::mem::take(&mut self.starved).into_iter().for_each(|path| cx.ready(path));
            let sessions: Vec<SessionId> = self.serving.keys().copied().collect();
            sessions.into_iter().for_each(|session| self.serve_waiting(cx, session));
        }
        any
    }
}

/// The bytes of a READ, and what the card has to mark afterwards.
struct Wanted {
    bytes: Vec<WantedBytes>,
    /// Regions and windows, as (number, generation).
    marks: Vec<(u32, u32)>,
}

/// Why a READ cannot begin.
enum CannotRead {
    Yet,
    Refused,
    /// The peer's memory was not made for sharing: why.
    NotShared(String),
}

/// Where the bytes of these runs are at the peer.
fn wanted(
    cx: &Context<'_>,
    awaited: &mut AwaitedRegions,
    peer: PeerId,
    runs: &[PostedRun],
) -> Result<Wanted, CannotRead> {
    let known = cx.peers.get(&peer).ok_or(CannotRead::Refused)?;
    let mut wanted = Wanted { bytes: Vec::with_capacity(runs.len()), marks: Vec::new() };
    let mut parts: Vec<RemoteBytes<'_>> = Vec::new();
    // The last region whose key was read. Runs mostly follow each other in one region.
    let mut shared = None;
    for run in runs {
        parts.clear();
        match known.find(cx.code, (run.region, run.generation), run.offset, run.len, &mut parts) {
            Ok(()) => {}
            Err(NotThere::NotYet) if !awaited.add(cx.now(), run.region, run.generation) => {
                return Err(CannotRead::Yet);
            }
            Err(NotThere::NotYet | NotThere::None) => return Err(CannotRead::Refused),
        }
        if !wanted.marks.contains(&(run.region, run.generation)) {
            wanted.marks.push((run.region, run.generation));
        }
        let mut to = run.local.piece.address as u64;
        for RemoteBytes { key, region, generation, offset, len } in &parts {
            let (region, generation) = (*region, *generation);
            if shared != Some((region, generation)) {
                if let RegionKey::NotShared(why) = RegionKey::decode(key) {
                    return Err(CannotRead::NotShared(why.into_owned()));
                }
                shared = Some((region, generation));
            }
            wanted.bytes.push(WantedBytes { region, generation, offset: *offset, len: *len, to });
            to += len;
        }
    }
    Ok(wanted)
}
