//! Parts of transfers go out.

use super::{Asked, Posted, Role, Sockets, Used};
use crate::provider::NotNow;
use crate::regions::Piece;
use crate::runs::Run;
use crate::tcp::{Head, WireRun};
use crate::transfers::{Completion, Op, Post, Work};

impl Sockets {
    pub(super) fn send(&mut self, post: Post) -> Result<(), NotNow> {
        let Post { path, token, ticket, work } = post;
        let link = self.paths.get(&path).and_then(|at| at.link);
        let Some((link, entry)) = link.and_then(|link| Some((link, self.links.get_mut(&link)?))) else {
            return Err(NotNow);
        };
        let number = token.number();
        let entry = match &work {
            Work::Move { op, runs, .. } if entry.neighbour.is_some() => {
                match self.post_to_neighbour(link, token, ticket, *op, runs) {
                    Some(what) => {
                        self.posted.insert(token, Posted { link, what });
                        return Ok(());
                    }
                    None => match self.links.get_mut(&link) {
                        Some(entry) => entry,
                        None => return Err(NotNow),
                    },
                }
            }
            _ => entry,
        };
        let is_staged = |used: &Used| used.is_gpu_here;
        let what = match work {
            Work::Move { op, runs, .. } if self.used.get(&ticket).is_some_and(is_staged) => {
                return self.post_staged(link, token, ticket, op, &runs);
            }
            Work::Tell { number: of, counter, generation } => {
                let head = Head::Tell { token: number, number: of, counter, generation };
                entry.link.say(head.encode().to_vec());
                Asked::Tell
            }
            Work::Say { number: of, bytes } => {
                let head = Head::Message { token: number, number: of, bytes: bytes.len() as u64 };
                entry.link.say(head.encode().to_vec());
                let piece = Piece { address: bytes.as_ptr().expose_provenance(), len: bytes.len() };
                (piece.len > 0).then(|| entry.link.say_memory(piece));
                Asked::Message(entry.link.mark(), bytes)
            }
            Work::Move { op, runs, .. } => {
                let bytes = runs.iter().map(|run| run.len).sum();
                let count = runs.len();
                let head = match op {
                    Op::Write => {
                        let stamp = if let Role::Up { stamp, .. } = entry.role { stamp } else { 0 };
                        Head::Write { token: number, runs: count, bytes, stamp }
                    }
                    Op::Read => Head::Read { token: number, runs: count, bytes },
                };
                let mut frame = head.encode().to_vec();
                let mut pieces = Vec::with_capacity(count);
                for Run { local, remote, len } in runs {
                    let known = self.used.get(&ticket).map_or(&[][..], |used| &used.peer);
                    let generation = known.iter().find(|(region, _)| *region == remote.region);
                    let piece = self.regions.own(local.region, local.offset, len);
                    let (Some(piece), Some((_, generation))) = (piece, generation) else {
                        self.completed(token, Completion::Refused);
                        return Ok(());
                    };
                    WireRun { region: remote.region, generation: *generation, offset: remote.offset, len }
                        .encode(&mut frame);
                    pieces.push(piece);
                }
                entry.link.say(frame);
                match op {
                    Op::Write => {
                        pieces.into_iter().for_each(|piece| entry.link.say_memory(piece));
                        Asked::Write(entry.link.mark())
                    }
                    Op::Read => Asked::Read(pieces),
                }
            }
        };
        self.posted.insert(token, Posted { link, what });
        self.dirty.push(link);
        Ok(())
    }
}
