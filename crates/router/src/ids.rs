//! Makes the request ids that the router sends to engines. The router neither reads a client's own id nor sends it to an engine.
//! vLLM's P2P NCCL connector takes addresses from ids, so a client could name hosts there, and two clients may use the same id.
//!
//! ```text
//!   kvlane-0123456789ab-2s-p1        at most 40 characters
//!          |            |  |`- attempt of this leg, from 0
//!          |            |  `-- leg: w whole, p prefill, d decode
//!          |            `----- number of the request, base 36
//!          `------------------ this run of the router, random
//! ```

use crate::schedule::Leg;

/// Longest request id, except those of [`RequestId::p2p_nccl`].
pub const ID_LENGTH_MAX: usize = 40;

/// Source of request ids. Each is new.
#[derive(Debug)]
pub struct Ids {
    run: u64,
    next: u64,
}

/// The id of one client's request. Its legs' ids are made of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestId {
    run: u64,
    number: u64,
}

impl Ids {
    /// `run` is random, and tells this run of the router from others. Its low 48 bits count.
    pub fn new(run: u64) -> Self {
        Self { run: run & 0xffff_ffff_ffff, next: 0 }
    }

    /// The id of the next request.
    pub fn next_id(&mut self) -> RequestId {
        self.next += 1;
        RequestId { run: self.run, number: self.next }
    }
}

impl RequestId {
    /// The id in logs, in `/decisions`, and in answers to clients that sent none.
    pub fn name(self) -> String {
        format!("kvlane-{:012x}-{}", self.run, base36(self.number))
    }

    /// The id that the engine of this leg gets at this attempt.
    pub fn of_leg(self, leg: Leg, attempt: u32) -> String {
        let letter = match leg {
            Leg::Whole => 'w',
            Leg::Prefill => 'p',
            Leg::Decode => 'd',
        };
        format!("{}-{letter}{}", self.name(), attempt.min(999))
    }

    /// The id by which both engines of a pair know a direct hand-off. A client sees its request's id and could guess the next
    /// ones; the random bytes keep it from claiming another request's blocks.
    pub fn of_hand_off(self, attempt: u32, random: [u8; 16]) -> String {
        format!("{}-{:032x}", self.of_leg(Leg::Whole, attempt), u128::from_ne_bytes(random))
    }

    /// The id that both engines of a P2P NCCL pair get, and find each other by. After the router's own name it has what proxies
    /// for vLLM's P2P NCCL connector write: the addresses of both engines, and 32 hex digits that no client can guess.
    pub fn p2p_nccl(self, prefill: &str, decode: &str, attempt: u32, random: [u8; 16]) -> String {
        let name = self.of_leg(Leg::Whole, attempt);
        let unique = u128::from_ne_bytes(random);
        format!("{name}___prefill_addr_{prefill}___decode_addr_{decode}_{unique:032x}")
    }
}

fn base36(mut number: u64) -> String {
    let mut digits = Vec::new();
    loop {
        digits.push(char::from_digit((number % 36) as u32, 36).unwrap_or('0'));
        number /= 36;
        if number == 0 {
            return digits.into_iter().rev().collect();
        }
    }
}
