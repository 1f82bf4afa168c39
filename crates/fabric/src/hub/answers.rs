//! Takes what peers send over the control connections that this process made: outcomes, regions, carriers' answers.

use super::Outside;
use crate::control::{ChannelId, Control};
use crate::frames::Frame;
use crate::provider::Event;
use crate::tcp::decode_regions;
use crate::transfers::{Completion, PeerId, Token};
use crate::wire::{Outcome, WordsKind};

impl<C: Control> Outside<C> {
    pub(super) fn receive_from_peer(&mut self, channel: ChannelId, peer: PeerId, frame: Frame<Vec<u8>>) {
        match frame {
            Frame::Outcomes(outcomes) => {
                for Outcome { token, fate } in outcomes {
                    self.answered(channel, token, fate.into());
                }
            }
            Frame::NoRoom { token } => self.answered(channel, token, Completion::NoRoom),
            Frame::Fenced { code, connection, is_over } => self.fence_answered((code, connection), is_over),
            Frame::Regions(bytes) => match decode_regions(&bytes) {
                Ok(news) => {
                    if let Some(Err(why)) = self.peers.get_mut(&peer).map(|known| known.take_news(news)) {
                        return self.end_channel(channel, why);
                    }
                    self.process.news.change = true;
                    self.notify_regions_changed(peer);
                }
                Err(bad) => self.end_channel(channel, bad.0),
            },
            Frame::Words { code, kind, bytes } => {
                // This process has no such carrier, so it has offered nothing.
                let Some(index) = self.index_of(code) else { return };
                let heard = self.with(index, |carrier, cx| match kind {
                    WordsKind::Accepted => carrier.accepted(cx, peer, &bytes),
                    WordsKind::Refused => {
                        carrier.refused(cx, peer, &String::from_utf8_lossy(&bytes));
                        Ok(())
                    }
                    WordsKind::Other => carrier.receive(cx, crate::carrier::Party::Peer(peer), &bytes),
                    WordsKind::Offer => Err(crate::carrier::BadWords("an offer of the side that listens")),
                });
                if let Some(Err(bad)) = heard {
                    self.end_channel(channel, bad.0);
                }
            }
            _ => self.end_channel(channel, "a frame that is not its side's"),
        }
    }

    fn answered(&mut self, channel: ChannelId, token: u64, completion: Completion) {
        let token = Token::from_number(token);
        if self.posted.get(&token) == Some(&channel) {
            self.posted.remove(&token);
            self.outbox.events.push_back(Event::Completed(token, completion));
        }
    }

    pub(super) fn end_channel(&mut self, channel: ChannelId, why: &'static str) {
        let now = self.now();
        self.control.end(now, channel, why);
    }
}
