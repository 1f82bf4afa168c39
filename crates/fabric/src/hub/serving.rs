//! Serves what peers send over the control connections that they made: immediates, messages, fences and carriers' words.

use super::Outside;
use crate::carrier::{BadWords, Party, SessionId};
use crate::control::{ChannelId, Control};
use crate::frames::Frame;
use crate::immediates::Arrival;
use crate::inbox::{Admission, EngineId, Message};
use crate::lease::Lease;
use crate::wire::{Fate, Outcome, WordsKind};

impl<C: Control> Outside<C> {
    pub(super) fn receive_from_session(
        &mut self,
        channel: ChannelId,
        frame: Frame<Vec<u8>>,
        lease: Option<Lease>,
    ) {
        let Some(served) = self.sessions.get(&channel).copied() else { return };
        let outcome = match frame {
            Frame::Immediate { token, number, counter, generation } => {
                let arrival = self.process.immediates.arrive(served.session, number, counter, generation);
                if matches!(arrival, Arrival::Counted(_)) {
                    self.process.news.change = true;
                }
                Outcome { token, fate: Fate::of(arrival == Arrival::Refused) }
            }
            Frame::Message { token, number, bytes } => {
                let process = &mut self.process;
                let len = bytes.len() as u64;
                let admission = process.inbox.admit(&process.immediates, served.session, number, len);
                match admission {
                    Admission::NoRoom => return self.control.send(channel, Frame::NoRoom { token }),
                    Admission::Admitted => {
                        let from = served.from;
                        let from = EngineId { engine_id: from.engine, boot_nonce: from.boot };
                        let message = Message { from, bytes };
                        if process.inbox.deliver(&mut process.immediates, served.session, number, message) {
                            process.news.message = true;
                        }
                    }
                    Admission::Known | Admission::Refused => {}
                }
                Outcome { token, fate: Fate::of(admission == Admission::Refused) }
            }
            Frame::Fence { code, connection } => {
                let is_over = self.fence(served.from, (code, connection));
                return self.control.send(channel, Frame::Fenced { code, connection, is_over });
            }
            Frame::Words { code, kind, bytes } => {
                return self.receive_words(channel, code, kind, &bytes, lease);
            }
            _ => return self.end_channel(channel, "a frame that is not its side's"),
        };
        self.control.send(channel, Frame::Outcomes(vec![outcome]));
    }

    fn receive_words(
        &mut self,
        channel: ChannelId,
        code: u8,
        kind: WordsKind,
        bytes: &[u8],
        lease: Option<Lease>,
    ) {
        let session = SessionId(channel);
        let Some(index) = self.index_of(code) else {
            if kind == WordsKind::Offer {
                let bytes = b"the peer has no such carrier".to_vec();
                self.control.send(channel, Frame::Words { code, kind: WordsKind::Refused, bytes });
            }
            return;
        };
        let heard = self.with_lease(index, lease, |carrier, cx| match kind {
            WordsKind::Offer => carrier.consider(cx, session, bytes),
            WordsKind::Other => carrier.receive(cx, Party::Session(session), bytes),
            WordsKind::Accepted | WordsKind::Refused => Err(BadWords("an answer to nothing")),
        });
        if let Some(Err(bad)) = heard {
            self.end_channel(channel, bad.0);
        }
    }
}
