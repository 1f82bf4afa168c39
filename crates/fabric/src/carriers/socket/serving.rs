//! Serves peers' requests, and takes the answers to this process's own.

use super::posted::{PostState, SocketPost};
use super::{BytesRole, SocketCarrier};
use crate::carrier::Context;
use crate::identity::Identity;
use crate::lease;
use crate::links::LinkId;
use crate::ranges::{Piece, Spot, take_bytes};
use crate::regions::Regions;
use crate::tcp::{ENTRIES_MAX, Ended, Head, Out};
use crate::transfers::{Completion, Op, Token};
use crate::window::WINDOW_RANGES_MAX;
use crate::wire::{BadFrame, Fate, Outcome, WireRun};

/// Most spots of one request. A run of a region is one spot, but a run of a window may be all of its many small ranges.
/// A peer may name that window again and again.
const SPOTS_MAX: usize = 4 * WINDOW_RANGES_MAX;

impl SocketCarrier {
    pub(super) fn take_frame(
        &mut self,
        cx: &mut Context<'_>,
        id: LinkId,
        head: Head,
        entries: &[u8],
    ) -> Result<(), Ended> {
        let lease = self.lease(id);
        let Some(entry) = self.links.get_mut(id) else { return Ok(()) };
        let gpus = if self.slots.reach_gpus() { GpuSpots::Served } else { GpuSpots::Refused };
        match (&mut entry.role, head) {
            (BytesRole::Serving { .. }, Head::Ping { stamp }) => {
                if let Some(mut lease) = lease {
                    lease.renew(stamp)?;
                    self.links.set_lease(id, lease);
                }
                self.links.send_head(id, Head::Pong { stamp: lease::stamp() });
            }
            (BytesRole::Up { stamp, .. }, Head::Pong { stamp: new }) => *stamp = new,
            (BytesRole::Serving { from, body, .. }, Head::Write { token, bytes, stamp, .. }) => {
                let runs = WireRun::decode_all(entries, bytes)?;
                crate::audit::serves(runs.len());
                let spots = spots_for_peer(&cx.process.regions, *from, &runs, Op::Write, gpus);
                let is_staged = spots.as_ref().is_some_and(|spots| any_on_gpu(spots));
                if !is_staged {
                    *body = Some((token, spots.is_none()));
                }
                if let Some(mut lease) = lease {
                    lease.renew(stamp)?;
                    self.links.set_lease(id, lease);
                }
                match spots {
                    Some(spots) if is_staged => self.receive_staged(id, token, spots),
                    Some(spots) => self.links.expect(id, pieces(spots), 0),
                    None => self.links.expect(id, Vec::new(), bytes),
                }
            }
            (BytesRole::Serving { from, acks, .. }, Head::Read { token, bytes, .. }) => {
                let runs = WireRun::decode_all(entries, bytes)?;
                crate::audit::serves(runs.len());
                match spots_for_peer(&cx.process.regions, *from, &runs, Op::Read, gpus) {
                    None => acks.push(Outcome { token, fate: Fate::Refused }),
                    Some(spots) if any_on_gpu(&spots) => return self.answer_staged(id, token, spots),
                    Some(spots) => {
                        let pieces = pieces(spots).into_iter().map(Out::Memory);
                        self.links.send_frame(id, Head::Data { token, bytes }, &[], pieces);
                    }
                }
            }
            (BytesRole::Up { body, .. }, Head::Data { token, bytes }) => {
                let number = token;
                let token = Token::from_number(token);
                let found = match self.posted.get_mut(&token).filter(|posted| posted.link == id) {
                    Some(SocketPost { state: PostState::Read(pieces), .. }) => take_pieces(pieces, bytes),
                    Some(SocketPost { state: PostState::ReadStaged(_), .. }) => {
                        return self.take_staged_data(id, number, bytes);
                    }
                    _ => return Err(BadFrame("an answer to nothing").into()),
                };
                *body = Some(token);
                self.links.expect(id, found.ok_or(BadFrame("an answer of other bytes"))?, 0);
            }
            (BytesRole::Up { stamp, .. }, Head::Ack { stamp: new, .. }) => {
                *stamp = new;
                self.take_outcomes(cx, id, entries)?;
            }
            _ => return Err(BadFrame("a frame that is not its side's").into()),
        }
        Ok(())
    }

    fn take_outcomes(&mut self, cx: &mut Context<'_>, id: LinkId, entries: &[u8]) -> Result<(), Ended> {
        let Some(entry) = self.links.get(id) else { return Ok(()) };
        let mut staged = Vec::new();
        for Outcome { token, fate } in Outcome::decode_all(entries) {
            let token = Token::from_number(token);
            let Some(posted) = self.posted.get(&token).filter(|posted| posted.link == id) else { continue };
            let may_be = match &posted.state {
                PostState::Write(mark) => entry.has_written(*mark),
                PostState::Read(_) | PostState::ReadStaged(_) => fate != Fate::Placed,
                PostState::Staged => false,
            };
            if !may_be {
                return Err(BadFrame("an answer before it can be known").into());
            }
            if matches!(posted.state, PostState::ReadStaged(_)) {
                staged.push((token, fate.into()));
                continue;
            }
            self.posted.remove(&token);
            cx.completed(token, fate.into());
        }
        for (token, completion) in staged {
            self.end_staged_read(cx, token, completion);
        }
        Ok(())
    }

    /// All bytes of the last frame are in place.
    pub(super) fn take_body(&mut self, cx: &mut Context<'_>, id: LinkId) -> Result<(), Ended> {
        if !self.slots.is_idle() && self.take_staged_body(id)? {
            return Ok(());
        }
        let Some(entry) = self.links.get_mut(id) else { return Ok(()) };
        match &mut entry.role {
            BytesRole::Serving { body, acks, .. } => {
                if let Some((token, refused)) = body.take() {
                    acks.push(Outcome { token, fate: Fate::of(refused) });
                }
            }
            BytesRole::Up { body, .. } => {
                let Some(token) = body.take() else { return Ok(()) };
                // The peer sends memory of a GPU in several Data frames.
                let is_part =
                    |posted: &SocketPost| matches!(&posted.state, PostState::Read(left) if !left.is_empty());
                if !self.posted.get(&token).is_some_and(is_part) {
                    self.posted.remove(&token);
                    cx.completed(token, Completion::Placed);
                }
            }
            BytesRole::Dialling { .. } => {}
        }
        Ok(())
    }

    /// Sends a peer the outcomes of its requests that have ended.
    pub(super) fn answer(&mut self, id: LinkId) {
        let Some(BytesRole::Serving { acks, .. }) = self.links.get_mut(id).map(|entry| &mut entry.role)
        else {
            return;
        };
        if acks.is_empty() {
            return;
        }
        for outcomes in std::mem::take(acks).chunks(ENTRIES_MAX) {
            let head = Head::Ack { outcomes: outcomes.len(), stamp: lease::stamp() };
            let mut entries = Vec::new();
            outcomes.iter().for_each(|outcome| outcome.encode(&mut entries));
            self.links.send_frame(id, head, &entries, []);
        }
    }
}

fn any_on_gpu(spots: &[Spot]) -> bool {
    spots.iter().any(|spot| spot.gpu.is_some())
}

fn pieces(spots: Vec<Spot>) -> Vec<Piece> {
    spots.into_iter().map(|spot| spot.piece).collect()
}

/// Takes the first `bytes` bytes off `pieces`. None if there are fewer.
fn take_pieces(pieces: &mut Vec<Piece>, bytes: u64) -> Option<Vec<Piece>> {
    if pieces.iter().map(|piece| piece.len as u64).sum::<u64>() == bytes {
        return Some(std::mem::take(pieces));
    }
    let mut spots: Vec<Spot> = pieces.iter().map(|piece| Spot { piece: *piece, gpu: None }).collect();
    let taken = take_bytes(&mut spots, bytes)?;
    *pieces = self::pieces(spots);
    Some(self::pieces(taken))
}

/// Whether a peer's request may name memory of GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GpuSpots {
    /// The carrier has slots, which their bytes go through.
    Served,
    Refused,
}

/// Finds the bytes that a peer asks for. `op` is the peer's: a write places bytes here. None: the request is refused.
fn spots_for_peer(
    regions: &Regions,
    peer: Identity,
    runs: &[WireRun],
    op: Op,
    gpus: GpuSpots,
) -> Option<Vec<Spot>> {
    let mut spots = Vec::with_capacity(runs.len());
    for run in runs {
        regions.for_peer(peer, run.wanted(op == Op::Write), &mut spots)?;
        if spots.len() > SPOTS_MAX {
            return None;
        }
    }
    (gpus == GpuSpots::Served || !any_on_gpu(&spots)).then_some(spots)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use crate::descriptor::Access;
    use crate::region_news::Keys;
    use crate::regions::NewRegion;
    use crate::transfers::Memory;
    use crate::window::{Ranges, WindowRange};

    /// A peer named a whole window of 65,536 ranges in each of 512 runs: 33 million spots for one frame.
    #[test]
    fn a_request_of_more_places_than_a_few_windows_have_is_refused() {
        let peer = Identity { engine: 1, boot: 2 };
        let mut regions = Regions::default();
        let (region, _) = regions.reserve().unwrap();
        let memory = Memory::Host(0);
        let len = WINDOW_RANGES_MAX as u64;
        regions.add(region, NewRegion { base: 0x1000, len, access: Access::Read, memory }, Keys::new());
        let (window, generation) = regions.reserve().unwrap();
        let ranges = (0..len).map(|offset| WindowRange { region, offset, len: 1 }).collect();
        regions.open_window(window, peer, Ranges::new(ranges).unwrap()).unwrap();
        let all = WireRun { region: window, generation, offset: 0, len };
        let asked =
            |runs: usize| spots_for_peer(&regions, peer, &vec![all; runs], Op::Read, GpuSpots::Refused);
        assert_eq!(asked(4).map(|spots| spots.len()), Some(SPOTS_MAX));
        assert_eq!(asked(5), None);
        assert_eq!(asked(ENTRIES_MAX), None);
    }
}
