//! Who is at the other end of a connection, and how bytes are to travel.

use super::neighbours::PULLED_CHUNKS;
use super::{Entry, Goal, LinkId, Role, Sockets, Transport};
use crate::provider::Event;
use crate::sessions::TooMany;
use crate::tcp::{
    Answer, BYTES_MAX, BadFrame, Ended, Hello, Nonces, Purpose, SessionKey, Welcome, encode_refusal,
};

impl Sockets {
    /// Somebody who has connected has proved to know the secret; None: has not, and learns nothing else.
    pub(super) fn judge(&mut self, id: LinkId, proved: Option<Nonces>) {
        let Some(entry) = self.links.get_mut(&id) else { return };
        let verdict = match (proved, &entry.role) {
            (Some(nonces), Role::Accepted { lease, .. }) => {
                let (key, lease) = (self.proofs.own.session(&nonces), *lease);
                entry.role = Role::Proved { key, lease };
                self.proofs.own.encode_verdict(&nonces)
            }
            _ => {
                let peer = entry.link.socket().peer_addr().ok();
                if self.told.is_news(peer, "unproved") {
                    tracing::warn!(
                        ?peer,
                        "refused a peer that does not know the secret; said once of this address"
                    );
                }
                entry.role = Role::Leaving;
                encode_refusal()
            }
        };
        self.say(id, verdict);
    }

    /// A peer that has proved to know the secret has said who it is. `key`: of the connection.
    pub(super) fn greet(&mut self, id: LinkId, hello: Hello, key: &SessionKey) {
        let answer = if hello.to == self.me { Answer::Welcome } else { Answer::SomebodyElse };
        if let (Answer::Welcome, Hello { purpose: Purpose::Fence(of), from, .. }) = (answer, hello) {
            let is_it = |entry: &Entry| matches!(entry.role, Role::Serving { from: f, connection, .. } if (f, connection) == (from, of));
            let fenced: Vec<LinkId> =
                self.links.iter().filter(|(_, entry)| is_it(entry)).map(|(link, _)| *link).collect();
            fenced.iter().for_each(|link| self.end(*link, &Ended::Closed));
            if self.still_places(from, of) {
                return self.end(id, &Ended::StillPlaces);
            }
        }
        let path = (hello.purpose == Purpose::Path && answer == Answer::Welcome).then_some(hello);
        if let Some(Hello { session, from, .. }) = path {
            match self.sessions.join(self.now(), session, from) {
                Ok(forgotten) => forgotten.into_iter().for_each(|session| self.immediates.forget(session)),
                Err(TooMany) => return self.end(id, &BadFrame("it has too many sessions").into()),
            }
            self.inbox.share_among(self.sessions.connected());
        }
        let (neighbour, reads, rings) = self.meet(path);
        let offer = self.offer(None).filter(|_| neighbour.is_some());
        let Some(entry) = self.links.get_mut(&id) else { return };
        entry.neighbour = neighbour;
        entry.role = match (path, &entry.role) {
            (Some(Hello { from, connection, session, .. }), Role::Proved { lease, .. }) => {
                Role::Serving { from, session, connection, body: None, lease: *lease }
            }
            _ => Role::Leaving,
        };
        let welcome = Welcome { answer, from: self.me, offer, reads, rings: rings.is_some() };
        self.say(id, welcome.encode(key));
        if let Some(rings) = rings {
            self.flush(id);
            self.go_through(id, rings);
        }
    }

    /// The peer has answered our greeting.
    pub(super) fn welcomed(
        &mut self,
        id: LinkId,
        to: Goal,
        connection: u64,
        welcome: Welcome,
    ) -> Result<bool, Ended> {
        match (welcome, to) {
            (Welcome { answer: Answer::Welcome, .. }, Goal::Path(path, number)) => {
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
            (Welcome { answer: Answer::Welcome, .. }, Goal::Fence(of)) => {
                self.remove(id);
                self.pulling.remove(&of);
                self.news.change = true;
                let tokens = self.fences.confirmed(of);
                self.give_back(tokens);
                Ok(false)
            }
            _ => Err(BadFrame("another process listens there now: describe the peer's memory again").into()),
        }
    }
}

pub(super) fn challenge_of(one: u64, other: u64) -> [u8; 16] {
    (u128::from(one) << 64 | u128::from(other)).to_le_bytes()
}
