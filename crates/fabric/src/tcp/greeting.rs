//! The greeting: the first messages of every connection. Both sides prove that they know one secret, then say who they are.
//! Before its proof, a side sends only random numbers.
//!
//! ```text
//!  connecting side                                          listening side
//!     |  <---- Challenge: | KVFT | version u8 | 0 x 3 | nonce 16 |
//!     |  Proof:  | KVFT | version u8 | 0 x 3 | nonce 16 | proof 32 |  ---->
//!     |  <---- Verdict: | KVFT | version u8 | verdict u8 | 0 x 2 | proof 32 |   1: refused, no proof; the connection ends
//!     |  Hello  ---->
//!     |  <---- Welcome
//!
//!  Hello:      | KVFT | version u8 | purpose u8 | carrier u8 | sums u8 | connection u64 | engine u128 | boot u64
//!              | wanted engine u128 | wanted boot u64 | fenced connection u64 | session u128
//!              | pid u32 | rings u32 | device u64 | inode u64 | seal 32 |
//!  Welcome:    | KVFT | version u8 | answer u8 | rings u8 | sums u8 | engine u128 | boot u64 | seal 32 |
//! ```
//! purpose: 0 a control connection, 1 a fence of a connection of this carrier, 2 bytes of this carrier.
//!
//! `rings` of a Hello: 1 + the descriptor of a shared-memory segment in the connecting process `pid`, or 0 for none.
//! `device` and `inode` identify the segment, so another file under that descriptor is not mistaken for it. `rings` of a
//! Welcome: 1 if everything that follows goes through that segment, in both directions.
//!
//! `sums`: 1 if a side wants checksums behind the bytes of frames. Frames have them if the Welcome says 1 too and the
//! connection does not go through a segment.
//!
//! A proof is an HMAC-SHA256 with the secret as key ([`crate::trust`]), over the side that makes it and both nonces. Only a
//! process that knows the secret can make one. A proof is worth nothing on another connection, because the nonces differ,
//! and nothing when sent back to its maker, because it names the other side.
//!
//! The session's key is derived from the secret and both nonces. It seals Hello and Welcome, so they come from the process
//! that proved the secret, and nobody has changed them.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::identity::Identity;
use crate::trust::Key;
use crate::wire::{BadFrame, RingsOffer};

pub(crate) const CHALLENGE_BYTES: usize = 24;
pub(crate) const PROOF_MESSAGE_BYTES: usize = 56;
pub(crate) const VERDICT_BYTES: usize = 40;
pub(crate) const HELLO_BYTES: usize = 144;
pub(crate) const WELCOME_BYTES: usize = 64;
const MAGIC: [u8; 4] = *b"KVFT";
const VERSION: u8 = 5;
const PROOF_BYTES: usize = 32;
const CHANGED: BadFrame =
    BadFrame("a greeting with a wrong seal: another process made it, or it was changed");

/// Purpose of a connection, chosen by the connecting side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Everything between two processes except bytes of transfers.
    Control,
    /// Bytes of transfers, for the carrier with this code.
    Bytes(u8),
    /// Asks the listening side to place nothing more of that earlier connection of that carrier. The Welcome confirms it.
    Fence(u8, u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) purpose: Purpose,
    /// Random, drawn by the connecting side; unique among its connections.
    pub(crate) connection: u64,
    pub(crate) from: Identity,
    pub(crate) to: Identity,
    /// The same on all connections from one peer entry of the connecting side: numbers of immediates and messages
    /// count within it.
    pub(crate) session: u128,
    /// Shared memory that the connecting side offers instead of the socket.
    pub(crate) rings: Option<RingsOffer>,
    /// Whether the connecting side wants checksums.
    pub(crate) sums: bool,
}

/// The answer to a [`Hello`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Welcome {
    pub(crate) answer: Answer,
    pub(crate) from: Identity,
    /// Whether everything that follows goes through the offered segment.
    pub(crate) rings: bool,
    /// Whether both sides want checksums.
    pub(crate) sums: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    Welcome,
    /// A process other than the wanted one listens at this address.
    WrongProcess,
}

/// One random number of each side, for this connection only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Nonces {
    pub(crate) listening: [u8; 16],
    pub(crate) connecting: [u8; 16],
}

/// The key of one connection, whose sides have proved the [`Key`] to each other. Seals Hello and Welcome.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct SessionKey([u8; PROOF_BYTES]);

impl std::fmt::Debug for SessionKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SessionKey(..)")
    }
}

/// The purpose of a MAC, which is part of its input: a MAC for one purpose is worth nothing for another.
#[derive(Clone, Copy)]
enum MacUse {
    ProofOfConnecting,
    ProofOfListening,
    Session,
    Hello,
    Welcome,
}

impl MacUse {
    /// Labels have one length, so no label with its data equals another.
    fn label(self) -> [u8; 16] {
        *match self {
            MacUse::ProofOfConnecting => b"kvlane connects ",
            MacUse::ProofOfListening => b"kvlane listens  ",
            MacUse::Session => b"kvlane session  ",
            MacUse::Hello => b"kvlane hello    ",
            MacUse::Welcome => b"kvlane welcome  ",
        }
    }
}

fn mac(key: &[u8], of: MacUse, parts: &[&[u8]]) -> Option<Hmac<Sha256>> {
    // HMAC takes keys of any length, so this never fails.
    let mut mac = Hmac::<Sha256>::new_from_slice(key).ok()?;
    mac.update(&of.label());
    parts.iter().for_each(|part| mac.update(part));
    Some(mac)
}

fn prove(key: &[u8], of: MacUse, parts: &[&[u8]]) -> [u8; PROOF_BYTES] {
    mac(key, of, parts).map_or([0; PROOF_BYTES], |mac| mac.finalize().into_bytes().into())
}

/// Compares in constant time.
fn is_proof(key: &[u8], of: MacUse, parts: &[&[u8]], proof: &[u8]) -> bool {
    mac(key, of, parts).is_some_and(|mac| mac.verify_slice(proof).is_ok())
}

impl Key {
    /// Derives the session's key of the connection with these nonces.
    pub(crate) fn session(&self, nonces: &Nonces) -> SessionKey {
        SessionKey(prove(self.bytes(), MacUse::Session, &[&nonces.listening, &nonces.connecting]))
    }

    /// The Proof message of the connecting side.
    pub(crate) fn encode_proof(&self, nonces: &Nonces) -> Vec<u8> {
        let mut bytes = begin(0);
        bytes.extend(nonces.connecting);
        let parts: [&[u8]; 2] = [&nonces.listening, &nonces.connecting];
        bytes.extend(prove(self.bytes(), MacUse::ProofOfConnecting, &parts));
        bytes
    }

    /// Checks a Proof against this side's challenge. Returns both nonces, or None if the peer does not know the secret.
    pub(crate) fn decode_proof(
        &self,
        bytes: &[u8],
        challenge: &[u8; 16],
    ) -> Result<Option<Nonces>, BadFrame> {
        let bytes: &[u8; PROOF_MESSAGE_BYTES] = whole(bytes)?;
        let nonces = Nonces { listening: *challenge, connecting: array(bytes, 8) };
        let parts: [&[u8]; 2] = [&nonces.listening, &nonces.connecting];
        Ok(is_proof(self.bytes(), MacUse::ProofOfConnecting, &parts, &bytes[24..]).then_some(nonces))
    }

    /// The Verdict on a right Proof. It proves the listening side's knowledge in turn.
    pub(crate) fn encode_verdict(&self, nonces: &Nonces) -> Vec<u8> {
        let mut bytes = begin(0);
        let parts: [&[u8]; 2] = [&nonces.listening, &nonces.connecting];
        bytes.extend(prove(self.bytes(), MacUse::ProofOfListening, &parts));
        bytes
    }

    /// Checks the listening side's Verdict on our Proof.
    pub(crate) fn decode_verdict(&self, bytes: &[u8], nonces: &Nonces) -> Result<Verdict, BadFrame> {
        let bytes: &[u8; VERDICT_BYTES] = whole(bytes)?;
        let parts: [&[u8]; 2] = [&nonces.listening, &nonces.connecting];
        match bytes[5] {
            0 if is_proof(self.bytes(), MacUse::ProofOfListening, &parts, &bytes[8..]) => Ok(Verdict::Proved),
            0 => Ok(Verdict::Unproved),
            1 => Ok(Verdict::Refused),
            _ => Err(BadFrame("a verdict that is not known")),
        }
    }
}

/// The Verdict on a wrong Proof. It is the same for every peer, so it tells a stranger nothing.
pub(crate) fn encode_refusal() -> Vec<u8> {
    let mut bytes = begin(1);
    bytes.extend([0; PROOF_BYTES]);
    bytes
}

/// The result of the proofs, for the connecting side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The listening side knows the secret.
    Proved,
    /// The listening side accepted our proof, but does not know the secret.
    Unproved,
    /// The listening side refused our proof.
    Refused,
}

impl SessionKey {
    /// Puts the right seal at the end of any message.
    #[cfg(any(feature = "fuzzing", test))]
    pub(crate) fn sign<const N: usize>(&self, mut message: [u8; N]) -> [u8; N] {
        let of = if N == HELLO_BYTES { MacUse::Hello } else { MacUse::Welcome };
        let (sealed, seal) = message.split_at_mut(N - PROOF_BYTES);
        seal.copy_from_slice(&prove(&self.0, of, &[sealed]));
        message
    }
}

pub(crate) fn encode_challenge(nonce: &[u8; 16]) -> Vec<u8> {
    let mut bytes = begin(0);
    bytes.extend(nonce);
    bytes
}

pub(crate) fn decode_challenge(bytes: &[u8]) -> Result<[u8; 16], BadFrame> {
    let bytes: &[u8; CHALLENGE_BYTES] = whole(bytes)?;
    Ok(array(bytes, 8))
}

impl Hello {
    pub(crate) fn encode(&self, key: &SessionKey) -> Vec<u8> {
        let (purpose, code, fenced) = match self.purpose {
            Purpose::Control => (0, 0, 0),
            Purpose::Fence(code, connection) => (1, code, connection),
            Purpose::Bytes(code) => (2, code, 0),
        };
        let mut bytes = begin(purpose);
        (bytes[6], bytes[7]) = (code, self.sums.into());
        bytes.extend(self.connection.to_le_bytes());
        self.from.encode(&mut bytes);
        self.to.encode(&mut bytes);
        bytes.extend(fenced.to_le_bytes());
        bytes.extend(self.session.to_le_bytes());
        let rings = self.rings.and_then(|offer| Some((offer, offer.descriptor.checked_add(1)?)));
        let (pid, descriptor, file) =
            rings.map_or((0, 0, (0, 0)), |(offer, rings)| (offer.pid, rings, offer.file));
        bytes.extend(pid.to_le_bytes());
        bytes.extend(descriptor.to_le_bytes());
        bytes.extend(file.0.to_le_bytes());
        bytes.extend(file.1.to_le_bytes());
        bytes.extend(prove(&key.0, MacUse::Hello, &[&bytes]));
        bytes
    }

    pub(crate) fn decode(bytes: &[u8], key: &SessionKey) -> Result<Hello, BadFrame> {
        let bytes: &[u8; HELLO_BYTES] = whole(bytes)?;
        let (sealed, seal) = bytes.split_at(HELLO_BYTES - PROOF_BYTES);
        if !is_proof(&key.0, MacUse::Hello, &[sealed], seal) {
            return Err(CHANGED);
        }
        let purpose = match bytes[5] {
            0 => Purpose::Control,
            1 => Purpose::Fence(bytes[6], u64::from_le_bytes(array(bytes, 64))),
            2 => Purpose::Bytes(bytes[6]),
            _ => return Err(BadFrame("a connection for no known purpose")),
        };
        Ok(Hello {
            purpose,
            connection: u64::from_le_bytes(array(bytes, 8)),
            from: Identity::decode(bytes, 16),
            to: Identity::decode(bytes, 40),
            session: u128::from_le_bytes(array(bytes, 72)),
            sums: bytes[7] == 1,
            rings: u32::from_le_bytes(array(bytes, 92)).checked_sub(1).map(|descriptor| RingsOffer {
                pid: u32::from_le_bytes(array(bytes, 88)),
                descriptor,
                file: (u64::from_le_bytes(array(bytes, 96)), u64::from_le_bytes(array(bytes, 104))),
            }),
        })
    }
}

impl Welcome {
    pub(crate) fn encode(&self, key: &SessionKey) -> Vec<u8> {
        let mut bytes = begin(match self.answer {
            Answer::Welcome => 0,
            Answer::WrongProcess => 1,
        });
        (bytes[6], bytes[7]) = (self.rings.into(), self.sums.into());
        self.from.encode(&mut bytes);
        bytes.extend(prove(&key.0, MacUse::Welcome, &[&bytes]));
        bytes
    }

    pub(crate) fn decode(bytes: &[u8], key: &SessionKey) -> Result<Welcome, BadFrame> {
        let bytes: &[u8; WELCOME_BYTES] = whole(bytes)?;
        let (sealed, seal) = bytes.split_at(WELCOME_BYTES - PROOF_BYTES);
        if !is_proof(&key.0, MacUse::Welcome, &[sealed], seal) {
            return Err(CHANGED);
        }
        let answer = match bytes[5] {
            0 => Answer::Welcome,
            1 => Answer::WrongProcess,
            _ => return Err(BadFrame("an answer that is not known")),
        };
        Ok(Welcome { answer, from: Identity::decode(bytes, 8), rings: bytes[6] == 1, sums: bytes[7] == 1 })
    }
}

impl Identity {
    fn encode(&self, to: &mut Vec<u8>) {
        to.extend(self.engine.to_le_bytes());
        to.extend(self.boot.to_le_bytes());
    }

    fn decode(bytes: &[u8], at: usize) -> Identity {
        Identity {
            engine: u128::from_le_bytes(array(bytes, at)),
            boot: u64::from_le_bytes(array(bytes, at + 16)),
        }
    }
}

fn begin(kind: u8) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend([VERSION, kind, 0, 0]);
    bytes
}

/// Checks that a message has the length of its kind, the magic and the version.
fn whole<const N: usize>(bytes: &[u8]) -> Result<&[u8; N], BadFrame> {
    let whole: &[u8; N] = bytes.try_into().map_err(|_| BadFrame("a greeting of another length"))?;
    check(whole)?;
    Ok(whole)
}

fn check(bytes: &[u8]) -> Result<(), BadFrame> {
    match (bytes.starts_with(&MAGIC), bytes[4]) {
        (true, VERSION) => Ok(()),
        (true, _) => Err(BadFrame("it has another version: use the same version of kvlane on both sides")),
        (false, _) => Err(BadFrame("it begins with something else")),
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use proptest::prelude::*;

    use super::*;

    const ME: Identity = Identity { engine: 1 << 100, boot: 7 };
    const YOU: Identity = Identity { engine: 3, boot: 8 };

    const NONCES: Nonces = Nonces { listening: [1; 16], connecting: [4; 16] };

    fn sent(key: &SessionKey, purpose: Purpose) -> (Hello, [u8; HELLO_BYTES]) {
        let offer = RingsOffer { pid: 77, descriptor: 0, file: (1 << 40, 9) };
        let rings = (purpose == Purpose::Control).then_some(offer);
        let sums = purpose != Purpose::Control;
        let hello = Hello { purpose, connection: 9, from: ME, to: YOU, session: 11, rings, sums };
        (hello, hello.encode(key).try_into().unwrap())
    }

    fn proof(key: &Key, nonces: &Nonces) -> [u8; PROOF_MESSAGE_BYTES] {
        key.encode_proof(nonces).try_into().unwrap()
    }

    fn verdict(key: &Key, nonces: &Nonces) -> [u8; VERDICT_BYTES] {
        key.encode_verdict(nonces).try_into().unwrap()
    }

    #[test]
    fn who_knows_the_secret_proves_it_and_nobody_else() {
        let (key, other) = (Key::new(b"secret"), Key::new(b"other"));
        let challenge: [u8; CHALLENGE_BYTES] = encode_challenge(&[6; 16]).try_into().unwrap();
        assert_eq!(decode_challenge(&challenge), Ok([6; 16]));

        let said = proof(&key, &NONCES);
        assert_eq!(key.decode_proof(&said, &[1; 16]), Ok(Some(NONCES)));
        assert_eq!(other.decode_proof(&said, &[1; 16]), Ok(None), "another secret");
        assert_eq!(key.decode_proof(&said, &[2; 16]), Ok(None), "heard on an earlier connection");

        let said = verdict(&key, &NONCES);
        assert_eq!(key.decode_verdict(&said, &NONCES), Ok(Verdict::Proved));
        assert_eq!(other.decode_verdict(&said, &NONCES), Ok(Verdict::Unproved));
        let later = Nonces { connecting: [5; 16], ..NONCES };
        assert_eq!(
            key.decode_verdict(&said, &later),
            Ok(Verdict::Unproved),
            "heard on an earlier connection"
        );
        let refusal: [u8; VERDICT_BYTES] = encode_refusal().try_into().unwrap();
        assert_eq!(key.decode_verdict(&refusal, &NONCES), Ok(Verdict::Refused));
        assert_eq!(refusal[8..], [0; PROOF_BYTES], "and tells nothing");
    }

    /// A stranger that listens in a peer's place could else answer with the peer's own proof.
    #[test]
    fn a_proof_that_is_sent_back_to_its_side_is_none() {
        let key = Key::new(b"secret");
        let heard = proof(&key, &NONCES);
        let mut back = verdict(&Key::new(b""), &NONCES);
        back[8..].copy_from_slice(&heard[24..]);
        assert_eq!(key.decode_verdict(&back, &NONCES), Ok(Verdict::Unproved));
        let mut back = heard;
        back[24..].copy_from_slice(&verdict(&key, &NONCES)[8..]);
        assert_eq!(key.decode_proof(&back, &NONCES.listening), Ok(None));
    }

    #[test]
    fn what_is_said_then_is_of_whoever_proved_it() {
        let key = Key::new(b"secret");
        let session = key.session(&NONCES);
        let others = [
            key.session(&Nonces { listening: [2; 16], ..NONCES }),
            key.session(&Nonces { connecting: [2; 16], ..NONCES }),
            Key::new(b"other").session(&NONCES),
        ];
        for purpose in [Purpose::Control, Purpose::Bytes(3), Purpose::Fence(2, 5)] {
            let (hello, bytes) = sent(&session, purpose);
            assert_eq!(Hello::decode(&bytes, &session), Ok(hello));
            others.iter().for_each(|other| assert!(Hello::decode(&bytes, other).is_err()));
        }
        for rings in [false, true] {
            for answer in [Answer::Welcome, Answer::WrongProcess] {
                let welcome = Welcome { answer, from: YOU, rings, sums: !rings };
                let bytes: [u8; WELCOME_BYTES] = welcome.encode(&session).try_into().unwrap();
                assert_eq!(Welcome::decode(&bytes, &session), Ok(welcome));
                others.iter().for_each(|other| assert!(Welcome::decode(&bytes, other).is_err()));
            }
        }
    }

    proptest! {
        #[test]
        fn a_greeting_that_was_changed_is_none(at in 0..HELLO_BYTES, by in 1..=255u8, noise in any::<[u8; WELCOME_BYTES]>()) {
            let key = Key::new(b"secret");
            let session = key.session(&NONCES);
            let (_, mut bytes) = sent(&session, Purpose::Control);
            bytes[at] ^= by;
            prop_assert!(Hello::decode(&bytes, &session).is_err());
            prop_assert!(Welcome::decode(&noise, &session).is_err());
            let mut said = proof(&key, &NONCES);
            let at = at % PROOF_MESSAGE_BYTES;
            said[at] ^= by;
            // Three bytes of the head have no meaning yet.
            prop_assert_eq!(matches!(key.decode_proof(&said, &[1; 16]), Ok(Some(_))), (5..8).contains(&at));
            let mut said = verdict(&key, &NONCES);
            let at = at % VERDICT_BYTES;
            said[at] ^= by;
            let proved = matches!(key.decode_verdict(&said, &NONCES), Ok(Verdict::Proved));
            prop_assert_eq!(proved, (6..8).contains(&at));
        }
    }
}
