//! A connection of ours, until the peer has welcomed it.
//!
//! ```text
//!  connected --> Challenge: the proof is sent --> Verdict: the Hello is sent --> Welcome
//! ```
//! Pure: whoever owns the connection reads and writes it.

use super::greeting::{
    Answer, CHALLENGE_BYTES, Hello, Nonces, Purpose, SessionKey, VERDICT_BYTES, Verdict, WELCOME_BYTES,
    Welcome, decode_challenge,
};
use super::link::Ended;
use crate::fences::Whom;
use crate::identity::Identity;
use crate::random::random;
use crate::wire::{BadFrame, RingsOffer};

/// Where one side does not know the secret of the other.
const UNPROVED: &str = "it has another token, or other engines than ours are trusted there: without a token these are those of \
     one user, with one runtime folder. Give both sides the same token";

/// How far it is.
#[derive(Debug)]
pub(crate) struct Dialling {
    purpose: Purpose,
    /// Its number; unlike that of all others.
    pub(crate) connection: u64,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Connecting,
    Proving(Nonces),
    Greeted(SessionKey),
}

/// What follows from what the peer has said.
#[derive(Debug)]
pub(crate) enum Dialled {
    /// To be sent; then a greeting of so many bytes comes.
    Send(Vec<u8>, usize),
    /// The peer is whoever it should be, and takes the connection for its purpose.
    Welcome(Welcome),
}

impl Dialling {
    pub(crate) fn new(purpose: Purpose) -> std::io::Result<Dialling> {
        Ok(Dialling { purpose, connection: random()?, stage: Stage::Connecting })
    }

    /// Bytes of the greeting that comes first.
    pub(crate) const FIRST: usize = CHALLENGE_BYTES;

    /// The peer has said this. `sums`: whether they are wanted. `rings` is asked once, for what is offered.
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

/// That nobody else draws.
pub(crate) fn nonce() -> std::io::Result<[u8; 16]> {
    kvlane_memory::random()
}
