//! What peers ask for, and what they answer.

use super::neighbours::Job;
use super::staged::spots_for_peer;
use super::{Asked, Coming, LinkId, Posted, Role, Sockets};
use crate::immediates::Arrival;
use crate::inbox::{Admission, EngineId, Message};
use crate::lease;
use crate::provider::Event;
use crate::regions::{Piece, Regions};
use crate::staging::{Spot, take_bytes};
use crate::tcp::{BadFrame, Ended, Fate, Head, Outcome, WireRun};
use crate::transfers::{Completion, Token};

impl Sockets {
    pub(super) fn take_frame(&mut self, id: LinkId, head: Head, entries: &[u8]) -> Result<(), Ended> {
        let Some(entry) = self.links.get_mut(&id) else { return Ok(()) };
        match (&mut entry.role, head) {
            (Role::Serving { lease, .. }, Head::Ping { stamp }) => {
                lease.renew(stamp)?;
                self.say(id, Head::Pong { stamp: lease::stamp() }.encode().to_vec());
            }
            (Role::Up { stamp, .. }, Head::Pong { stamp: new }) => *stamp = new,
            (Role::Serving { body, lease, .. }, Head::Write { token, bytes, stamp, .. }) => {
                lease.renew(stamp)?;
                let runs = WireRun::decode_all(entries, bytes)?;
                let pieces = pieces_for_peer(&self.regions, &runs, true);
                if let Some(spots) =
                    pieces.as_ref().and_then(|pieces| spots_for_peer(&self.regions, &runs, pieces))
                {
                    self.receive_staged(id, token, spots);
                    return Ok(());
                }
                *body = Some((token, pieces.is_none()));
                let discard = if pieces.is_none() { bytes } else { 0 };
                entry.link.expect(pieces.unwrap_or_default(), discard);
            }
            (Role::Serving { .. }, Head::Pull { token, bytes, .. }) => {
                let (runs, addresses) = WireRun::decode_pulled(entries, bytes)?;
                if entry.neighbour.is_none() {
                    return Err(BadFrame("a frame of a neighbour that is none").into());
                }
                match pieces_for_peer(&self.regions, &runs, true) {
                    Some(pieces) if spots_for_peer(&self.regions, &runs, &pieces).is_none() => {
                        self.queue(Job::pull(id, token, pieces, &addresses))?;
                    }
                    _ => entry.acks.push(Outcome { token, fate: Fate::Refused }),
                }
            }
            (Role::Serving { .. }, Head::Read { token, bytes, .. }) => {
                let runs = WireRun::decode_all(entries, bytes)?;
                let pieces = pieces_for_peer(&self.regions, &runs, false);
                if let Some(spots) =
                    pieces.as_ref().and_then(|pieces| spots_for_peer(&self.regions, &runs, pieces))
                {
                    return self.answer_staged(id, token, spots);
                }
                match pieces {
                    Some(pieces) => {
                        entry.link.say(Head::Data { token, bytes }.encode().to_vec());
                        pieces.into_iter().for_each(|piece| entry.link.say_memory(piece));
                        self.dirty.push(id);
                    }
                    None => entry.acks.push(Outcome { token, fate: Fate::Refused }),
                }
            }
            (Role::Serving { session, .. }, Head::Tell { token, number, counter, generation }) => {
                let arrival = self.immediates.arrive(*session, number, counter, generation);
                if matches!(arrival, Arrival::Counted(_)) {
                    self.news.change = true;
                }
                entry.acks.push(Outcome { token, fate: Fate::of(arrival == Arrival::Refused) });
            }
            (Role::Serving { session, .. }, Head::Message { token, number, bytes }) => {
                let admission = self.inbox.admit(&self.immediates, *session, number, bytes);
                let is_admitted = admission == Admission::Admitted;
                let (len, discard) = if is_admitted { (bytes as usize, 0) } else { (0, bytes) };
                let coming = Coming { token, number, admission, bytes: vec![0; len] };
                let address = entry.coming.insert(coming).bytes.as_mut_ptr().expose_provenance();
                let piece = (len > 0).then_some(Piece { address, len });
                entry.link.expect(piece.into_iter().collect(), discard);
            }
            (Role::Up { .. }, Head::NoRoom { token }) => {
                let token = Token::from_number(token);
                let Some(posted) = self.posted.get(&token).filter(|posted| posted.link == id) else {
                    return Ok(());
                };
                if !matches!(posted.what, Asked::Message(mark, _) if entry.link.has_written(mark)) {
                    return Err(BadFrame("an answer before it can be known").into());
                }
                self.posted.remove(&token);
                self.completed(token, Completion::NoRoom);
            }
            (Role::Up { body, .. }, Head::Data { token, bytes }) => {
                let number = token;
                let token = Token::from_number(token);
                let pieces = match self.posted.get_mut(&token).filter(|posted| posted.link == id) {
                    Some(Posted { what: Asked::Read(pieces), .. }) => take_pieces(pieces, bytes),
                    Some(Posted { what: Asked::ReadStaged(_), .. }) => {
                        return self.take_staged_data(id, number, bytes);
                    }
                    _ => return Err(BadFrame("an answer to nothing").into()),
                };
                *body = Some(token);
                entry.link.expect(pieces.ok_or(BadFrame("an answer of other bytes"))?, 0);
            }
            (Role::Up { stamp, .. }, Head::Ack { stamp: new, .. }) => {
                *stamp = new;
                let mut ended = Vec::new();
                for Outcome { token, fate } in Outcome::decode_all(entries) {
                    let token = Token::from_number(token);
                    let Some(posted) = self.posted.get(&token).filter(|posted| posted.link == id) else {
                        continue;
                    };
                    let may_be = match &posted.what {
                        Asked::Write(mark) | Asked::Message(mark, _) => entry.link.has_written(*mark),
                        Asked::Read(_) | Asked::ReadStaged(_) => fate != Fate::Placed,
                        Asked::Job | Asked::Staged => false,
                        Asked::Pull | Asked::Tell => true,
                    };
                    if !may_be {
                        return Err(BadFrame("an answer before it can be known").into());
                    }
                    if matches!(posted.what, Asked::ReadStaged(_)) {
                        ended.push((token, fate.into()));
                        continue;
                    }
                    self.posted.remove(&token);
                    self.happened.push_back(Event::Completed(token, fate.into()));
                }
                ended.into_iter().for_each(|(token, completion)| self.end_staged_read(token, completion));
            }
            _ => return Err(BadFrame("a frame that is not its side's").into()),
        }
        Ok(())
    }

    /// All bytes of the last frame are in place.
    pub(super) fn take_body(&mut self, id: LinkId) -> Result<(), Ended> {
        if !self.staging.is_idle() && self.take_staged_body(id)? {
            return Ok(());
        }
        let Some(entry) = self.links.get_mut(&id) else { return Ok(()) };
        if self.letting_go > 0 {
            self.news.change = true;
        }
        match &mut entry.role {
            Role::Serving { body, from, session, .. } => {
                if let Some((token, refused)) = body.take() {
                    entry.acks.push(Outcome { token, fate: Fate::of(refused) });
                }
                let Some(Coming { token, number, admission, bytes }) = entry.coming.take() else {
                    return Ok(());
                };
                match admission {
                    Admission::NoRoom => {
                        entry.link.say(Head::NoRoom { token }.encode().to_vec());
                        self.dirty.push(id);
                        return Ok(());
                    }
                    Admission::Admitted => {
                        let from = EngineId { engine_id: from.engine, boot_nonce: from.boot };
                        let message = Message { from, bytes };
                        if self.inbox.deliver(&mut self.immediates, *session, number, message) {
                            self.news.message = true;
                        }
                    }
                    Admission::Known | Admission::Refused => {}
                }
                entry.acks.push(Outcome { token, fate: Fate::of(admission == Admission::Refused) });
            }
            Role::Up { body, .. } => {
                let Some(token) = body.take() else { return Ok(()) };
                // Memory of a GPU comes in parts.
                let is_part = |posted: &Posted| matches!(&posted.what, Asked::Read(left) if !left.is_empty());
                if !self.posted.get(&token).is_some_and(is_part) {
                    self.posted.remove(&token);
                    self.completed(token, Completion::Placed);
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// The first of these, of so many bytes together; None if they have fewer.
fn take_pieces(pieces: &mut Vec<Piece>, bytes: u64) -> Option<Vec<Piece>> {
    if pieces.iter().map(|piece| piece.len as u64).sum::<u64>() == bytes {
        return Some(std::mem::take(pieces));
    }
    let mut spots: Vec<Spot> = pieces.iter().map(|piece| Spot { piece: *piece, gpu: None }).collect();
    let taken = take_bytes(&mut spots, bytes)?;
    let of = |spots: Vec<Spot>| spots.into_iter().map(|spot| spot.piece).collect();
    *pieces = of(spots);
    Some(of(taken))
}

fn pieces_for_peer(regions: &Regions, runs: &[WireRun], is_write: bool) -> Option<Vec<Piece>> {
    runs.iter()
        .map(|run| regions.for_peer(run.region, run.generation, run.offset, run.len, is_write))
        .collect()
}
