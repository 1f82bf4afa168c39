//! A cache of texts' tokens, because a conversation's text comes again with each turn.

use std::{collections::HashMap, sync::Arc};

/// Memory of an entry beside its tokens.
const ENTRY_BYTES: usize = 64;

/// Tokens by a 128-bit hash of the text. It has two generations: when the young one is full, it replaces the old one, which is
/// dropped. A hit in the old one moves to the young one.
#[derive(Debug)]
pub(super) struct TokenCache {
    young: HashMap<u128, Arc<[u32]>>,
    old: HashMap<u128, Arc<[u32]>>,
    bytes_of_young: usize,
    /// Bound of one generation.
    bytes_max: usize,
}

impl TokenCache {
    /// A cache that takes at most this much memory.
    pub(super) fn new(bytes_max: usize) -> Self {
        Self { young: HashMap::new(), old: HashMap::new(), bytes_of_young: 0, bytes_max: bytes_max / 2 }
    }

    /// The tokens of the text with this hash.
    pub(super) fn get(&mut self, text: u128) -> Option<Arc<[u32]>> {
        if let Some(tokens) = self.young.get(&text) {
            return Some(Arc::clone(tokens));
        }
        let tokens = self.old.remove(&text)?;
        self.put(text, Arc::clone(&tokens));
        Some(tokens)
    }

    /// Keeps a text's tokens, unless they alone exceed a generation.
    pub(super) fn put(&mut self, text: u128, tokens: Arc<[u32]>) {
        let bytes = size_of_val(&*tokens) + ENTRY_BYTES;
        if bytes > self.bytes_max {
            return;
        }
        if self.bytes_of_young + bytes > self.bytes_max {
            self.old = std::mem::take(&mut self.young);
            self.bytes_of_young = 0;
        }
        if self.young.insert(text, tokens).is_none() {
            self.bytes_of_young += bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_keeps_what_is_asked_for_and_no_more_than_it_may() {
        let mut cache = TokenCache::new(20 * (ENTRY_BYTES + 4));
        for text in 0..1000 {
            cache.put(text, [text as u32].into());
            assert!(cache.young.len() <= 10 && cache.old.len() <= 10);
            assert_eq!(cache.get(0).as_deref(), Some(&[0][..]));
        }
        assert_eq!((cache.get(1), cache.get(999).is_some()), (None, true));
        cache.put(5000, vec![0; 100_000].into());
        assert_eq!(cache.get(5000), None);
    }
}
