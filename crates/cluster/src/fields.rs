//! Fields that several messages have, and why they may be wrong.

use std::net::SocketAddr;
use std::ops::Range;

use kvlane_block::{BlockHash, CutDigest, Namespace, Space, parse_hashes};
use thiserror::Error;

/// The version of the protocol that this crate speaks.
pub(crate) const VERSION: u32 = 1;
/// Most characters of a name or a sentence that is kept.
pub(crate) const TEXT_MAX: usize = 200;

/// Why a message is not understood.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum BadMessage {
    #[error("a message of version {0}, this daemon has {VERSION}: use one version of kvlane in the cluster")]
    Later(u32),
    #[error("not a message of a kvlane daemon")]
    Malformed,
    #[error("a message with {0}")]
    Invalid(&'static str),
}

pub(crate) fn text(mut text: String) -> String {
    if let Some((end, _)) = text.char_indices().nth(TEXT_MAX) {
        text.truncate(end);
    }
    text.retain(|letter| !letter.is_control());
    text
}

pub(crate) fn address(text: &str) -> Result<SocketAddr, BadMessage> {
    text.parse().map_err(|_| BadMessage::Invalid("an address that is not IP:PORT"))
}

pub(crate) fn space(namespace: &[u8], cut: &[u8]) -> Result<Space, BadMessage> {
    let digest =
        |bytes: &[u8]| <[u8; 16]>::try_from(bytes).map_err(|_| BadMessage::Invalid("an unknown space"));
    Ok(Space { namespace: Namespace(digest(namespace)?), cut: CutDigest(digest(cut)?) })
}

/// At most `most` hashes.
pub(crate) fn hashes(bytes: &[u8], most: usize) -> Result<Vec<BlockHash>, BadMessage> {
    if bytes.len() > 16 * most {
        return Err(BadMessage::Invalid("more blocks than one message has"));
    }
    parse_hashes(bytes).map_err(|_| BadMessage::Invalid("hashes that are not 16 bytes each"))
}

pub(crate) fn hash_bytes(hashes: &[BlockHash]) -> Vec<u8> {
    hashes.iter().flat_map(|hash| hash.0).collect()
}

/// Ascending runs without overlap, from firsts and lengths.
pub(crate) fn runs(pairs: &[u32]) -> Result<Vec<Range<u32>>, BadMessage> {
    let bad = BadMessage::Invalid("runs that are empty, overlap or go down");
    let (pairs, rest) = pairs.as_chunks::<2>();
    if !rest.is_empty() {
        return Err(bad);
    }
    let mut end = 0;
    let mut runs = Vec::with_capacity(pairs.len());
    for [first, len] in pairs {
        let next = first.checked_add(*len).filter(|_| *len > 0 && *first >= end).ok_or(bad.clone())?;
        runs.push(*first..next);
        end = next;
    }
    Ok(runs)
}

pub(crate) fn run_pairs(runs: &[Range<u32>]) -> Vec<u32> {
    runs.iter().flat_map(|run| [run.start, run.end - run.start]).collect()
}
