//! Sends a post over its path's connection.

use super::posted::{PostState, SocketPost};
use super::{BytesRole, SocketCarrier};
use crate::carrier::{CarrierPost, Context, PostedRun};
use crate::provider::NotNow;
use crate::tcp::{Head, Out};
use crate::transfers::Op;
use crate::wire::WireRun;

impl SocketCarrier {
    pub(super) fn send(&mut self, cx: &mut Context<'_>, post: &CarrierPost<'_>) -> Result<(), NotNow> {
        let CarrierPost { path, token, op, runs, .. } = post;
        let link = *self.paths.get(path).ok_or(NotNow)?;
        let Some(BytesRole::Up { stamp, .. }) = self.links.get(link).map(|entry| &entry.role) else {
            return Err(NotNow);
        };
        let stamp = *stamp;
        if post.between.local.is_gpu() {
            self.post_staged(cx, link, post);
            return Ok(());
        }
        let (number, count) = (token.number(), runs.len());
        let bytes = runs.iter().map(|run| run.len).sum();
        let head = match op {
            Op::Write => Head::Write { token: number, runs: count, bytes, stamp },
            Op::Read => Head::Read { token: number, runs: count, bytes },
        };
        let mut entries = Vec::new();
        runs.iter().for_each(|run| wire_run(run).encode(&mut entries));
        let pieces = runs.iter().map(|run| run.local.piece);
        let state = match op {
            Op::Write => {
                self.links.send_frame(link, head, &entries, pieces.map(Out::Memory));
                PostState::Write(self.links.mark(link))
            }
            Op::Read => {
                self.links.send_frame(link, head, &entries, []);
                PostState::Read(pieces.collect())
            }
        };
        self.posted.insert(*token, SocketPost { link, state });
        Ok(())
    }
}

pub(super) fn wire_run(run: &PostedRun) -> WireRun {
    let PostedRun { region, generation, offset, len, .. } = *run;
    WireRun { region, generation, offset, len }
}
