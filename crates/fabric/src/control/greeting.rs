//! The listening side of a greeting: checks a peer's proof, then makes the connection what its Hello asks for.

use std::os::fd::AsFd;
use std::time::Duration;

use kvlane_memory::RemoteProcess;
use kvlane_shm_ring::{Reader, Writer};

use super::sockets::{ControlRole, ControlSockets};
use super::{ChannelId, ControlEvent};
use crate::greeted::Greeted;
use crate::lease::Lease;
use crate::links::{LinkId, Wants};
use crate::process::Process;
use crate::served::Served;
use crate::sessions::TooMany;
use crate::shm::{RingSide, Segment};
use crate::tcp::{Answer, Ended, HELLO_BYTES, Hello, Purpose, SessionKey, Welcome, encode_refusal};
use crate::wire::{BadFrame, RingsOffer};

impl ControlSockets {
    /// Takes the next message of a greeting, on either side.
    pub(super) fn take_greeting(
        &mut self,
        now: Duration,
        process: &mut Process,
        id: LinkId,
        bytes: &[u8],
    ) -> Result<(), Ended> {
        match self.links.get(id).map(|entry| &entry.role) {
            Some(ControlRole::Accepted { challenge }) => {
                let challenge = *challenge;
                self.check_proof(id, bytes, &challenge)
            }
            Some(ControlRole::Proved { key }) => {
                let key = key.clone();
                let hello = Hello::decode(bytes, &key)?;
                self.take_hello(now, process, id, hello, &key)
            }
            Some(ControlRole::Dialling { .. }) => self.advance_handshake(id, bytes),
            _ => Ok(()),
        }
    }

    /// Checks the Proof of a stranger. If it is wrong, the stranger learns nothing else.
    fn check_proof(&mut self, id: LinkId, proof: &[u8], challenge: &[u8; 16]) -> Result<(), Ended> {
        let proved = self.proofs.own.decode_proof(proof, challenge)?;
        let Some(entry) = self.links.get_mut(id) else { return Ok(()) };
        let peer = entry.peer();
        let (role, wants, verdict) = match proved {
            Some(nonces) => {
                let key = self.proofs.own.session(&nonces);
                let verdict = self.proofs.own.encode_verdict(&nonces);
                (ControlRole::Proved { key }, Wants::Greeting(HELLO_BYTES), verdict)
            }
            None => (ControlRole::Leaving, Wants::Nothing, encode_refusal()),
        };
        entry.role = role;
        if proved.is_none() && self.logged.insert(peer, "unproved") {
            // Log: a process without the same token or user secret tried to connect, and learned nothing. Do:
            // give both engines the same `kvlane.direct.token`; otherwise find out who it is.
            tracing::warn!(once = true, ?peer, "peer refused: it does not know the secret");
        }
        self.links.want(id, wants);
        self.links.send(id, verdict);
        Ok(())
    }

    /// Takes the Hello of a peer that has proved the secret. `key` is that of the connection.
    fn take_hello(
        &mut self,
        now: Duration,
        process: &mut Process,
        id: LinkId,
        hello: Hello,
        key: &SessionKey,
    ) -> Result<(), Ended> {
        let Hello { purpose, connection, from, to, session, rings, sums } = hello;
        let me = self.me();
        let is_me = to == me || to == crate::identity::Identity::ANYBODY;
        let answer = if is_me { Answer::Welcome } else { Answer::WrongProcess };
        let mut welcome = Welcome { answer, from: me, rings: false, sums: sums && self.wants_sums };
        let Some(entry) = self.links.get_mut(id) else { return Ok(()) };
        match purpose {
            _ if !is_me => {
                entry.role = ControlRole::Leaving;
                self.links.want(id, Wants::Nothing);
                self.links.send(id, welcome.encode(key));
            }
            Purpose::Fence(code, of) => {
                entry.role = ControlRole::Fencing { key: key.clone() };
                self.links.want(id, Wants::Nothing);
                self.events.push_back(ControlEvent::FenceAsked { channel: id, from, broken: (code, of) });
            }
            Purpose::Bytes(code) => {
                if !self.carriers.contains(&code) {
                    return Err(BadFrame("bytes of a carrier that is not here").into());
                }
                let lease = entry.lease().unwrap_or_else(Lease::begin);
                self.links.send(id, welcome.encode(key));
                if welcome.sums {
                    self.links.begin_sums(id);
                }
                let Some(link) = self.links.take_out(id) else { return Ok(()) };
                let greeted = Greeted { link, lease, from, connection };
                self.events.push_back(ControlEvent::Greeted { code, greeted });
            }
            Purpose::Control => {
                match process.sessions.join(now, session, from) {
                    Ok(forgotten) => forgotten.into_iter().for_each(|old| process.immediates.forget(old)),
                    Err(TooMany) => return Err(BadFrame("it has too many sessions").into()),
                }
                process.inbox.share_among(process.sessions.connected());
                let served = Served { from, session };
                entry.role = ControlRole::Serving { served };
                self.links.want(id, Wants::Frames);
                let ends = rings.filter(|_| self.offers_rings()).and_then(|rings| self.open_rings(rings));
                welcome.rings = ends.is_some();
                self.links.send(id, welcome.encode(key));
                if welcome.sums && !welcome.rings {
                    self.links.begin_sums(id);
                }
                ends.into_iter().for_each(|ends| self.links.switch_to_rings(id, ends));
                self.events.push_back(ControlEvent::Session { channel: id, served });
            }
        }
        Ok(())
    }

    /// This process's ends of the rings that a process of this host offers. None if it cannot map them.
    fn open_rings(&mut self, offer: RingsOffer) -> Option<(Writer, Reader)> {
        match segment_of(offer) {
            Ok(segment) => Some(segment.ends(RingSide::Listening)),
            Err(error) => {
                // Log: a peer's shared memory cannot be mapped; its small messages take the socket, which is a
                // little slower. Do: nothing, unless engines of one host shall share memory: see the error.
                tracing::info!(pid = offer.pid, %error, "cannot use the peer's shared memory: control messages use the socket");
                self.without_rings += 1;
                None
            }
        }
    }

    /// Answers [`ControlEvent::FenceAsked`].
    pub(super) fn send_fence_answer(&mut self, id: ChannelId, is_over: bool) {
        let Some(entry) = self.links.get_mut(id) else { return };
        if !matches!(entry.role, ControlRole::Fencing { .. }) {
            return;
        }
        if !is_over {
            // The end makes the peer ask again.
            return self.links.fail(id, Ended::StillPlaces);
        }
        let welcome = Welcome { answer: Answer::Welcome, from: self.me(), rings: false, sums: false };
        let Some(entry) = self.links.get_mut(id) else { return };
        let ControlRole::Fencing { key } = std::mem::replace(&mut entry.role, ControlRole::Leaving) else {
            return;
        };
        self.links.send(id, welcome.encode(&key));
    }
}

fn segment_of(offer: RingsOffer) -> std::io::Result<Segment> {
    let other = || std::io::Error::other("it is not the segment that was offered");
    let process = RemoteProcess::open(offer.pid).map_err(std::io::Error::other)?;
    let descriptor = i32::try_from(offer.descriptor).map_err(|_| other())?;
    let memfd = process.descriptor(descriptor)?;
    let found = rustix::fs::fstat(memfd.as_fd())?;
    match (found.st_dev, found.st_ino) == offer.file {
        true => Segment::open(memfd),
        false => Err(other()),
    }
}
