//! Batches of KV events, and pings, of any bytes: refused within their length, or read with no more than the limits.
use kvlane_kv_events::{Event, Limits, decode_batch, ping::decode_ping};

const LIMITS: Limits = Limits { batch_bytes: 4096, events: 8, hashes: 16, tokens: 32, depth: 4 };

/// Panics if a property fails for these bytes.
pub(crate) fn run(bytes: &[u8]) {
    let _ = decode_ping(bytes);
    match decode_batch(bytes, &LIMITS) {
        Err(error) => assert!(error.offset <= bytes.len()),
        Ok(batch) => {
            assert!(batch.events.len() + batch.unknown <= LIMITS.events);
            for event in batch.events {
                match event {
                    Event::Stored(stored) => {
                        assert!(stored.hashes.len() <= LIMITS.hashes && stored.tokens.len() <= LIMITS.tokens);
                    }
                    Event::Removed(removed) => assert!(removed.hashes.len() <= LIMITS.hashes),
                    Event::Cleared => {}
                }
            }
        }
    }
}
