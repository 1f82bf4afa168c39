//! Who is at the other end of a connection, on the listening side.

use std::os::fd::AsFd;
use std::time::Duration;

use kvlane_memory::RemoteProcess;
use kvlane_shm_ring::{Reader, Writer};

use super::sockets::{ControlSockets, Role};
use super::{ChannelId, ControlEvent};
use crate::greeted::Greeted;
use crate::lease::Lease;
use crate::links::{LinkId, Wants};
use crate::process::Process;
use crate::served::Served;
use crate::sessions::TooMany;
use crate::shm::{Segment, Side};
use crate::tcp::{Answer, Ended, HELLO_BYTES, Hello, Purpose, SessionKey, Welcome, encode_refusal};
use crate::wire::{BadFrame, RingsOffer};

impl ControlSockets {
    /// The next message of a greeting, of either side.
    pub(super) fn take_greeting(
        &mut self,
        now: Duration,
        process: &mut Process,
        id: LinkId,
        bytes: &[u8],
    ) -> Result<(), Ended> {
        match self.links.get(id).map(|entry| &entry.role) {
            Some(Role::Accepted { challenge }) => {
                let challenge = *challenge;
                self.judge(id, bytes, &challenge)
            }
            Some(Role::Proved { key }) => {
                let key = key.clone();
                let hello = Hello::decode(bytes, &key)?;
                self.greet(now, process, id, hello, &key)
            }
            Some(Role::Dialling { .. }) => self.go_on(id, bytes),
            _ => Ok(()),
        }
    }

    /// Somebody who has connected has proved to know the secret, or has not, and learns nothing else.
    fn judge(&mut self, id: LinkId, proof: &[u8], challenge: &[u8; 16]) -> Result<(), Ended> {
        let proved = self.proofs.own.decode_proof(proof, challenge)?;
        let Some(entry) = self.links.get_mut(id) else { return Ok(()) };
        let peer = entry.peer();
        let (role, wants, verdict) = match proved {
            Some(nonces) => {
                let key = self.proofs.own.session(&nonces);
                let verdict = self.proofs.own.encode_verdict(&nonces);
                (Role::Proved { key }, Wants::Greeting(HELLO_BYTES), verdict)
            }
            None => (Role::Leaving, Wants::Nothing, encode_refusal()),
        };
        entry.role = role;
        if proved.is_none() && self.logged.insert(peer, "unproved") {
            tracing::warn!(?peer, "refused a peer that does not know the secret; said once of this address");
        }
        self.links.want(id, wants);
        self.links.send(id, verdict);
        Ok(())
    }

    /// A peer that has proved to know the secret has said who it is. `key`: of the connection.
    fn greet(
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
        let answer = if is_me { Answer::Welcome } else { Answer::SomebodyElse };
        let mut welcome = Welcome { answer, from: me, rings: false, sums: sums && self.wants_sums };
        let Some(entry) = self.links.get_mut(id) else { return Ok(()) };
        match purpose {
            _ if !is_me => {
                entry.role = Role::Leaving;
                self.links.want(id, Wants::Nothing);
                self.links.send(id, welcome.encode(key));
            }
            Purpose::Fence(code, of) => {
                entry.role = Role::Fencing { key: key.clone() };
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
                entry.role = Role::Serving { served };
                self.links.want(id, Wants::Frames);
                let ends = rings.filter(|_| self.offers_rings()).and_then(|rings| self.take_up(rings));
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

    /// The ends of a segment that a process of this host offers, if this process can have them.
    fn take_up(&mut self, offer: RingsOffer) -> Option<(Writer, Reader)> {
        match segment_of(offer) {
            Ok(segment) => Some(segment.ends(Side::Listening)),
            Err(error) => {
                tracing::info!(pid = offer.pid, %error, "a peer's shared memory cannot be used");
                self.without_rings += 1;
                None
            }
        }
    }

    /// The answer to [`ControlEvent::FenceAsked`].
    pub(super) fn report_fenced(&mut self, id: ChannelId, is_over: bool) {
        let Some(entry) = self.links.get_mut(id) else { return };
        if !matches!(entry.role, Role::Fencing { .. }) {
            return;
        }
        if !is_over {
            // It asks again.
            return self.links.fail(id, Ended::StillPlaces);
        }
        let welcome = Welcome { answer: Answer::Welcome, from: self.me(), rings: false, sums: false };
        let Some(entry) = self.links.get_mut(id) else { return };
        let Role::Fencing { key } = std::mem::replace(&mut entry.role, Role::Leaving) else { return };
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
