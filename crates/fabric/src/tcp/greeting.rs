//! Who is at the other end of a connection, before anything else.
//!
//! ```text
//!  Challenge:  | KVFT | version u8 | 0 x 3 | nonce 16 |
//!  Hello:      | KVFT | version u8 | purpose u8 | 0 x 2 | connection u64 | engine u128 | boot u64
//!              | wanted engine u128 | wanted boot u64 | fenced connection u64 | nonce 16 | session u128
//!              | pid u32 | rings u32 | card u64 | proof 32 |
//!  Welcome:    | KVFT | version u8 | answer u8 | 0 x 2 | engine u128 | boot u64
//!              | pid u32 | reads u8, rings u8, 0 x 2 | card u64 | proof 32 |
//! ```
//! `pid` and `card` say where a process of the same host lets its card be read (pid 0: nowhere); `reads` whether the
//! listening side could read that of the connecting side: 0 it was not asked to or may not, 255 yes, else why not, an errno.
//! `rings` of a Hello is 1 + the descriptor of a segment of shared memory of the process that connects, 0 if there is none;
//! of a Welcome 1 if all that follows goes through that segment, in both directions.
//!
//! A proof is the HMAC-SHA256 of the other side's nonce and the message before the proof, with the shared token as key:
//! only who has the token can make it, and none is good a second time.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::frame::BadFrame;

pub(crate) const CHALLENGE_BYTES: usize = 24;
pub(crate) const HELLO_BYTES: usize = 152;
pub(crate) const WELCOME_BYTES: usize = 80;
const MAGIC: [u8; 4] = *b"KVFT";
const VERSION: u8 = 2;
/// Of a welcome: the listening side reads memory of the connecting side. Not an errno.
const READS: u8 = 255;
const PROOF_BYTES: usize = 32;

/// A process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Identity {
    pub(crate) engine: u128,
    /// Another one after each start.
    pub(crate) boot: u64,
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Transfers.
    Path,
    /// The listening side is to read nothing more of this earlier connection; a welcome says that it does not.
    Fence(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) purpose: Purpose,
    /// Drawn by the side that connects; unlike that of all others.
    pub(crate) connection: u64,
    pub(crate) from: Identity,
    pub(crate) to: Identity,
    pub(crate) nonce: [u8; 16],
    /// All connections of one peer of the side that connects have the same: its immediates are numbered within it.
    pub(crate) session: u128,
    /// Where the process that connects lets its card be read.
    pub(crate) offer: Option<Offer>,
}

/// Where a process lets its card be read by others of its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Offer {
    pub(crate) pid: u32,
    pub(crate) card: u64,
    /// Of the side that connects: its descriptor of a segment of shared memory.
    pub(crate) rings: Option<u32>,
}

/// What came of an offer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reads {
    /// There was none, or it was not wanted.
    No,
    /// The listening side can read memory of the side that connects.
    Yes,
    /// It cannot, by this errno.
    Refused(u8),
}

/// The answer to a [`Hello`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Welcome {
    pub(crate) answer: Answer,
    pub(crate) from: Identity,
    pub(crate) offer: Option<Offer>,
    pub(crate) reads: Reads,
    /// Whether what follows goes through the segment that was offered.
    pub(crate) rings: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    Welcome,
    /// The proof is wrong.
    WrongToken,
    /// Another process than the wanted one listens here.
    SomebodyElse,
}

/// The token that both sides have; may be empty.
#[derive(Clone)]
pub(crate) struct Key(Vec<u8>);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Key {
    pub(crate) fn new(token: &str) -> Key {
        Key(token.as_bytes().to_vec())
    }

    fn mac(&self, nonce: &[u8; 16], message: &[u8]) -> Option<Hmac<Sha256>> {
        // HMAC takes keys of any length.
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).ok()?;
        mac.update(nonce);
        mac.update(message);
        Some(mac)
    }

    fn prove(&self, nonce: &[u8; 16], message: &[u8]) -> [u8; PROOF_BYTES] {
        self.mac(nonce, message).map_or([0; PROOF_BYTES], |mac| mac.finalize().into_bytes().into())
    }

    /// The message with the right proof at its end.
    #[cfg(any(feature = "fuzzing", test))]
    pub(crate) fn sign<const N: usize>(&self, nonce: &[u8; 16], mut message: [u8; N]) -> [u8; N] {
        let (said, proof) = message.split_at_mut(N - PROOF_BYTES);
        proof.copy_from_slice(&self.prove(nonce, said));
        message
    }

    /// In constant time.
    fn is_proof(&self, nonce: &[u8; 16], message: &[u8], proof: &[u8]) -> bool {
        self.mac(nonce, message).is_some_and(|mac| mac.verify_slice(proof).is_ok())
    }
}

pub(crate) fn encode_challenge(nonce: &[u8; 16]) -> Vec<u8> {
    let mut bytes = begin(0);
    bytes.extend(nonce);
    bytes
}

pub(crate) fn decode_challenge(bytes: &[u8; CHALLENGE_BYTES]) -> Result<[u8; 16], BadFrame> {
    check(bytes)?;
    Ok(array(bytes, 8))
}

impl Hello {
    pub(crate) fn encode(&self, key: &Key, challenge: &[u8; 16]) -> Vec<u8> {
        let (purpose, fenced) = match self.purpose {
            Purpose::Path => (0, 0),
            Purpose::Fence(connection) => (1, connection),
        };
        let mut bytes = begin(purpose);
        bytes.extend(self.connection.to_le_bytes());
        self.from.encode(&mut bytes);
        self.to.encode(&mut bytes);
        bytes.extend(fenced.to_le_bytes());
        bytes.extend(self.nonce);
        bytes.extend(self.session.to_le_bytes());
        let rings = self.offer.and_then(|offer| offer.rings?.checked_add(1)).unwrap_or(0);
        Offer::encode(self.offer, rings.to_le_bytes(), &mut bytes);
        bytes.extend(key.prove(challenge, &bytes));
        bytes
    }

    /// None where the proof is wrong.
    pub(crate) fn decode(
        bytes: &[u8; HELLO_BYTES],
        key: &Key,
        challenge: &[u8; 16],
    ) -> Result<Option<Hello>, BadFrame> {
        check(bytes)?;
        let (said, proof) = bytes.split_at(HELLO_BYTES - PROOF_BYTES);
        if !key.is_proof(challenge, said, proof) {
            return Ok(None);
        }
        let purpose = match bytes[5] {
            0 => Purpose::Path,
            1 => Purpose::Fence(u64::from_le_bytes(array(bytes, 64))),
            _ => return Err(BadFrame("a connection for no known purpose")),
        };
        Ok(Some(Hello {
            purpose,
            connection: u64::from_le_bytes(array(bytes, 8)),
            from: Identity::decode(bytes, 16),
            to: Identity::decode(bytes, 40),
            nonce: array(bytes, 72),
            session: u128::from_le_bytes(array(bytes, 88)),
            offer: Offer::decode(bytes, 104)
                .map(|offer| Offer { rings: u32::from_le_bytes(array(bytes, 108)).checked_sub(1), ..offer }),
        }))
    }
}

impl Welcome {
    pub(crate) fn encode(&self, key: &Key, nonce: &[u8; 16]) -> Vec<u8> {
        let mut bytes = begin(match self.answer {
            Answer::Welcome => 0,
            Answer::WrongToken => 1,
            Answer::SomebodyElse => 2,
        });
        self.from.encode(&mut bytes);
        let reads = match self.reads {
            Reads::No => 0,
            Reads::Yes => READS,
            Reads::Refused(errno) => errno,
        };
        Offer::encode(self.offer, [reads, u8::from(self.rings), 0, 0], &mut bytes);
        bytes.extend(key.prove(nonce, &bytes));
        bytes
    }

    /// None where the proof is wrong; who has no token is told so all the same.
    pub(crate) fn decode(
        bytes: &[u8; WELCOME_BYTES],
        key: &Key,
        nonce: &[u8; 16],
    ) -> Result<Option<Welcome>, BadFrame> {
        check(bytes)?;
        let answer = match bytes[5] {
            0 => Answer::Welcome,
            1 => return Ok(None),
            2 => Answer::SomebodyElse,
            _ => return Err(BadFrame("an answer that is not known")),
        };
        let (said, proof) = bytes.split_at(WELCOME_BYTES - PROOF_BYTES);
        let reads = match bytes[36] {
            0 => Reads::No,
            READS => Reads::Yes,
            errno => Reads::Refused(errno),
        };
        let (from, offer, rings) = (Identity::decode(bytes, 8), Offer::decode(bytes, 32), bytes[37] == 1);
        let welcome = Welcome { answer, from, offer, reads, rings };
        Ok(key.is_proof(nonce, said, proof).then_some(welcome))
    }
}

impl Offer {
    fn encode(offer: Option<Offer>, more: [u8; 4], to: &mut Vec<u8>) {
        let (pid, card) = offer.map_or((0, 0), |offer| (offer.pid, offer.card));
        to.extend(pid.to_le_bytes());
        to.extend(more);
        to.extend(card.to_le_bytes());
    }

    fn decode(bytes: &[u8], at: usize) -> Option<Offer> {
        let offer = Offer {
            pid: u32::from_le_bytes(array(bytes, at)),
            card: u64::from_le_bytes(array(bytes, at + 8)),
            rings: None,
        };
        (offer.pid != 0).then_some(offer)
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

    fn sent(key: &Key, challenge: &[u8; 16], purpose: Purpose) -> (Hello, [u8; HELLO_BYTES]) {
        let offer = (purpose == Purpose::Path).then_some(Offer { pid: 77, card: 1 << 40, rings: Some(0) });
        let hello = Hello { purpose, connection: 9, from: ME, to: YOU, nonce: [4; 16], session: 11, offer };
        (hello, hello.encode(key, challenge).try_into().unwrap())
    }

    #[test]
    fn who_has_the_token_is_known_and_nobody_else() {
        let key = Key::new("secret");
        for purpose in [Purpose::Path, Purpose::Fence(5)] {
            let (hello, bytes) = sent(&key, &[1; 16], purpose);
            assert_eq!(Hello::decode(&bytes, &key, &[1; 16]), Ok(Some(hello)));
            assert_eq!(Hello::decode(&bytes, &Key::new("other"), &[1; 16]), Ok(None), "another token");
            assert_eq!(Hello::decode(&bytes, &key, &[2; 16]), Ok(None), "heard on an earlier connection");
        }
        for reads in [Reads::No, Reads::Yes, Reads::Refused(1)] {
            let offer = (reads != Reads::No).then_some(Offer { pid: 5, card: 6, rings: None });
            let rings = reads == Reads::Yes;
            let welcome = Welcome { answer: Answer::Welcome, from: YOU, offer, reads, rings };
            let bytes: [u8; WELCOME_BYTES] = welcome.encode(&key, &[4; 16]).try_into().unwrap();
            assert_eq!(Welcome::decode(&bytes, &key, &[4; 16]), Ok(Some(welcome)));
            assert_eq!(Welcome::decode(&bytes, &key, &[5; 16]), Ok(None));
            assert_eq!(Welcome::decode(&bytes, &Key::new(""), &[4; 16]), Ok(None));
        }
        let challenge: [u8; CHALLENGE_BYTES] = encode_challenge(&[6; 16]).try_into().unwrap();
        assert_eq!(decode_challenge(&challenge), Ok([6; 16]));
    }

    proptest! {
        #[test]
        fn a_greeting_that_was_changed_is_none(at in 0..HELLO_BYTES, by in 1..=255u8, noise in any::<[u8; WELCOME_BYTES]>()) {
            let key = Key::new("secret");
            let (_, mut bytes) = sent(&key, &[1; 16], Purpose::Path);
            bytes[at] ^= by;
            prop_assert!(!matches!(Hello::decode(&bytes, &key, &[1; 16]), Ok(Some(_))));
            prop_assert!(!matches!(Welcome::decode(&noise, &key, &[1; 16]), Ok(Some(_))));
        }
    }
}
