//! Who is at the other end of a connection, and how bytes are to travel.

use super::neighbours::PULLED_CHUNKS;
use super::{Entry, Goal, LinkId, Role, Sockets, Transport};
use crate::provider::Event;
use crate::sessions::TooMany;
use crate::tcp::{Answer, BYTES_MAX, BadFrame, Ended, Hello, Purpose, Welcome};

impl Sockets {
    /// A peer has said who it is; None: without a proof.
    pub(super) fn greet(&mut self, id: LinkId, hello: Option<Hello>) {
        let (answer, nonce) = match hello {
            None => (Answer::WrongToken, [0; 16]),
            Some(hello) if hello.to != self.me => (Answer::SomebodyElse, hello.nonce),
            Some(hello) => (Answer::Welcome, hello.nonce),
        };
        if let (Answer::Welcome, Some(Hello { purpose: Purpose::Fence(of), from, .. })) = (answer, hello) {
            let is_it = |entry: &Entry| matches!(entry.role, Role::Serving { from: f, connection, .. } if (f, connection) == (from, of));
            let fenced: Vec<LinkId> =
                self.links.iter().filter(|(_, entry)| is_it(entry)).map(|(link, _)| *link).collect();
            fenced.iter().for_each(|link| self.end(*link, &Ended::Closed));
            if self.still_places(from, of) {
                return self.end(id, &Ended::StillPlaces);
            }
        }
        let wants = |hello: &Hello| hello.purpose == Purpose::Path && answer == Answer::Welcome;
        if let Some(Hello { session, from, .. }) = hello.filter(wants) {
            match self.sessions.join(self.now(), session, from) {
                Ok(forgotten) => forgotten.into_iter().for_each(|session| self.immediates.forget(session)),
                Err(TooMany) => return self.end(id, &BadFrame("it has too many sessions").into()),
            }
            self.inbox.share_among(self.sessions.connected());
        }
        let (neighbour, reads, rings) = self.meet(hello.filter(wants));
        let offer = self.offer(None).filter(|_| neighbour.is_some());
        let Some(entry) = self.links.get_mut(&id) else { return };
        entry.neighbour = neighbour;
        entry.role = match (answer, hello, &entry.role) {
            (
                Answer::Welcome,
                Some(Hello { purpose: Purpose::Path, from, connection, session, .. }),
                Role::Accepted { lease, .. },
            ) => Role::Serving { from, session, connection, body: None, lease: *lease },
            _ => Role::Leaving,
        };
        if answer == Answer::WrongToken {
            tracing::warn!(peer = ?entry.link.socket().peer_addr().ok(), "refused a peer without the token");
        }
        let welcome = Welcome { answer, from: self.me, offer, reads, rings: rings.is_some() };
        self.say(id, welcome.encode(&self.key, &nonce));
        if let Some(rings) = rings {
            self.flush(id);
            self.go_through(id, rings);
        }
    }

    /// The peer has answered our greeting; None: without a proof.
    pub(super) fn welcomed(
        &mut self,
        id: LinkId,
        to: Goal,
        connection: u64,
        welcome: Option<Welcome>,
    ) -> Result<bool, Ended> {
        match (welcome, to) {
            (Some(welcome @ Welcome { answer: Answer::Welcome, .. }), Goal::Path(path, number)) => {
                let transport = self.know_neighbour(id, path, &welcome)?;
                let read_bytes = (transport == Transport::Cma)
                    .then(|| self.chunk_bytes.saturating_mul(PULLED_CHUNKS).min(BYTES_MAX));
                self.take_up_rings(id, path, &welcome, transport)?;
                self.happened.push_back(Event::Up { path, connection: number, read_bytes });
                if let Some(entry) = self.links.get_mut(&id) {
                    entry.role = Role::Up { path, number, connection, body: None, stamp: 0 };
                }
                Ok(true)
            }
            (Some(Welcome { answer: Answer::Welcome, .. }), Goal::Fence(of)) => {
                self.remove(id);
                self.pulling.remove(&of);
                self.news.change = true;
                let tokens = self.fences.confirmed(of);
                self.give_back(tokens);
                Ok(false)
            }
            (Some(_), _) => {
                Err(BadFrame("another process listens there now: describe the peer's memory again").into())
            }
            (None, _) => Err(BadFrame("it has another token").into()),
        }
    }
}

pub(super) fn challenge_of(one: u64, other: u64) -> [u8; 16] {
    (u128::from(one) << 64 | u128::from(other)).to_le_bytes()
}
