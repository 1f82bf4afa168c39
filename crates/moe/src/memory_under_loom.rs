//! [`Memory`] for models of loom: threads of the model share it, and no other process is involved. A model can plant defects.

#![allow(unsafe_code, reason = "bytes that threads of a model share")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread::panicking;

use loom::cell::UnsafeCell;

use crate::sync::{AtomicU64, Ordering};

/// Loom watches bytes in pieces of this size. All rows begin at a multiple of it.
const PIECE: usize = 16;

/// Defects of a memory, by offsets.
#[derive(Debug, Default)]
pub(crate) struct Defects {
    /// Words that are stored with `Relaxed`.
    pub(crate) stored_relaxed: BTreeSet<usize>,
    /// Words that are loaded with `Relaxed`.
    pub(crate) loaded_relaxed: BTreeSet<usize>,
    /// Words that read as this number whatever they are, so a rank does not wait for them.
    pub(crate) not_awaited: BTreeMap<usize, u64>,
    /// Words and pieces in whose place others are accessed.
    pub(crate) instead: BTreeMap<usize, usize>,
}

/// A memory that threads of a model share. Loom reports an access to a piece that is not ordered after the one before.
#[derive(Debug, Clone)]
pub(crate) struct Memory(Arc<Parts>);

#[derive(Debug)]
struct Parts {
    words: BTreeMap<usize, AtomicU64>,
    pieces: BTreeMap<usize, UnsafeCell<[u8; PIECE]>>,
    defects: Defects,
}

impl Memory {
    /// Zeros. It has only the words at these offsets, and rows of so many bytes at those.
    pub(crate) fn new(words: Vec<usize>, rows: Vec<(usize, usize)>, defects: Defects) -> Memory {
        let pieces = rows.into_iter().flat_map(|(at, bytes)| (at..at + bytes).step_by(PIECE));
        Memory(Arc::new(Parts {
            words: words.into_iter().map(|at| (at, AtomicU64::new(0))).collect(),
            pieces: pieces.map(|at| (at, UnsafeCell::new([0; PIECE]))).collect(),
            defects,
        }))
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        &self.0.words[self.0.defects.instead.get(&offset).unwrap_or(&offset)]
    }

    fn piece(&self, offset: usize) -> &UnsafeCell<[u8; PIECE]> {
        &self.0.pieces[self.0.defects.instead.get(&offset).unwrap_or(&offset)]
    }

    pub(crate) fn store(&self, offset: usize, value: u64, order: Ordering) {
        // A rank that is dropped by a panic leaves. Loom has ended the model.
        if !panicking() {
            let is_relaxed = self.0.defects.stored_relaxed.contains(&offset);
            self.word(offset).store(value, if is_relaxed { Ordering::Relaxed } else { order });
        }
    }

    pub(crate) fn load(&self, offset: usize, order: Ordering) -> u64 {
        let is_relaxed = self.0.defects.loaded_relaxed.contains(&offset);
        let value = self.word(offset).load(if is_relaxed { Ordering::Relaxed } else { order });
        self.0.defects.not_awaited.get(&offset).copied().unwrap_or(value)
    }

    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        for (index, bytes) in bytes.chunks(PIECE).enumerate() {
            // SAFETY: loom checks that no other thread accesses the piece.
            let to = |piece: *mut [u8; PIECE]| unsafe { (&mut *piece)[..bytes.len()].copy_from_slice(bytes) };
            self.piece(offset + index * PIECE).with_mut(to);
        }
    }

    pub(crate) fn read(&self, offset: usize, bytes: &mut [u8]) {
        for (index, bytes) in bytes.chunks_mut(PIECE).enumerate() {
            self.piece(offset + index * PIECE).with(|piece| {
                // SAFETY: loom checks that no other thread writes the piece.
                bytes.copy_from_slice(unsafe { &(&*piece)[..bytes.len()] });
            });
        }
    }
}
