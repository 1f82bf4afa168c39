//! Tokens of texts that came before: a conversation comes again with each turn.

use std::{collections::HashMap, sync::Arc};

/// Bytes that an entry takes beside its tokens.
const ENTRY_BYTES: usize = 64;

/// Texts by a hash of 128 bits. Two halves: when the younger one is full, the older one goes and it takes its place. What is
/// asked for comes back into the younger half.
#[derive(Debug)]
pub(super) struct TokenCache {
    young: HashMap<u128, Arc<[u32]>>,
    old: HashMap<u128, Arc<[u32]>>,
    bytes_of_young: usize,
    /// Of one half.
    bytes_max: usize,
}

impl TokenCache {
    /// One that takes so much memory at most.
    pub(super) fn new(bytes_max: usize) -> Self {
        Self { young: HashMap::new(), old: HashMap::new(), bytes_of_young: 0, bytes_max: bytes_max / 2 }
    }

    /// The tokens of a text.
    pub(super) fn get(&mut self, text: u128) -> Option<Arc<[u32]>> {
        if let Some(tokens) = self.young.get(&text) {
            return Some(Arc::clone(tokens));
        }
        let tokens = self.old.remove(&text)?;
        self.put(text, Arc::clone(&tokens));
        Some(tokens)
    }

    /// Keeps a text's tokens, unless they alone are too many.
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
