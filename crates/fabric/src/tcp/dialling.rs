//! The connecting side of a greeting, from the TCP connect to the peer's Welcome.
//!
//! ```text
//!  connected --> Challenge: send Proof --> Verdict: send Hello --> Welcome: done
//! ```
//! Pure: the owner of the connection reads and writes it. [`super::greeting`] draws the messages.

use super::greeting::{
    Answer, CHALLENGE_BYTES, Hello, Nonces, Purpose, SessionKey, VERDICT_BYTES, Verdict, WELCOME_BYTES,
    Welcome, decode_challenge,
};
use super::link::Ended;
use crate::fences::Whom;
use crate::identity::Identity;
use crate::random::random;
use crate::wire::{BadFrame, RingsOffer};

/// The error if one side does not know the secret of the other.
const UNPROVED: &str = "it has another token, or other engines than ours are trusted there: without a token these are those of \
     one user, with one runtime folder. Give both sides the same token";

/// State of one greeting.
#[derive(Debug)]
pub(crate) struct Dialling {
    purpose: Purpose,
    /// Random; names this connection to the peer, for fences too.
    pub(crate) connection: u64,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Connecting,
    Proving(Nonces),
    Greeted(SessionKey),
}

/// The reaction to the peer's message.
#[derive(Debug)]
pub(crate) enum Dialled {
    /// Send these bytes. The peer's next message has so many.
    Send(Vec<u8>, usize),
    /// The peer is the wanted one, and takes the connection for its purpose.
    Welcome(Welcome),
}

impl Dialling {
    pub(crate) fn new(purpose: Purpose) -> std::io::Result<Dialling> {
        Ok(Dialling { purpose, connection: random()?, stage: Stage::Connecting })
    }

    /// Bytes of the peer's first message, the Challenge.
    pub(crate) const FIRST: usize = CHALLENGE_BYTES;

    /// Takes the peer's next message. `sums`: whether this side wants checksums. `rings` is called at most once, when the
    /// Hello is made, and offers shared memory.
    pub(crate) fn take(
        &mut self,
        greeting: &[u8],
        me: Identity,
        whom: &Whom,
        sums: bool,
        rings: impl FnOnce() -> Option<RingsOffer>,
    ) -> Result<Dialled, Ended> {
        match &self.stage {
            Stage::Connecting => {
                let listening = decode_challenge(greeting)?;
                let nonces = Nonces { listening, connecting: nonce()? };
                self.stage = Stage::Proving(nonces);
                Ok(Dialled::Send(whom.key.encode_proof(&nonces), VERDICT_BYTES))
            }
            Stage::Proving(nonces) => {
                match whom.key.decode_verdict(greeting, nonces)? {
                    Verdict::Proved => {}
                    Verdict::Unproved | Verdict::Refused => return Err(BadFrame(UNPROVED).into()),
                }
                let key = whom.key.session(nonces);
                let (purpose, connection) = (self.purpose, self.connection);
                let (to, session) = (whom.identity.unwrap_or(Identity::ANYBODY), whom.session);
                let hello = Hello { purpose, connection, from: me, to, session, rings: rings(), sums };
                let bytes = hello.encode(&key);
                self.stage = Stage::Greeted(key);
                Ok(Dialled::Send(bytes, WELCOME_BYTES))
            }
            Stage::Greeted(key) => {
                let welcome = Welcome::decode(greeting, key)?;
                let is_wanted = whom.identity.is_none_or(|wanted| wanted == welcome.from);
                match welcome.answer {
                    Answer::Welcome if is_wanted => Ok(Dialled::Welcome(welcome)),
                    _ => Err(BadFrame("another process listens there now: describe the peer's memory again")
                        .into()),
                }
            }
        }
    }
}

/// Random, so no two connections share a nonce.
pub(crate) fn nonce() -> std::io::Result<[u8; 16]> {
    kvlane_memory::random()
}
