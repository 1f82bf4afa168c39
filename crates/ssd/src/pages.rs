//! [`Pages`]: page-aligned memory for direct I/O, owned by the tier.
#![expect(unsafe_code, reason = "memory with an alignment comes from the allocator's raw interface")]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

use crate::io::Piece;
use crate::layout::PAGE_BYTES;

/// Whole pages of 4096 bytes, zeroed when allocated.
#[derive(Debug)]
pub(crate) struct Pages {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory belongs to this value alone, like a Vec's.
unsafe impl Send for Pages {}

impl Pages {
    /// Allocates at least `bytes`, and at least one page.
    pub(crate) fn new(bytes: usize) -> Pages {
        let size = bytes.max(1).next_multiple_of(PAGE_BYTES as usize);
        #[expect(
            clippy::expect_used,
            reason = "sizes come from segments and tables, below 2^40, and 4096 is a power of two"
        )]
        let layout = Layout::from_size_align(size, PAGE_BYTES as usize).expect("a size below isize::MAX");
        // SAFETY: the size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout));
        Pages { start, layout }
    }

    /// Pages that begin with these bytes.
    pub(crate) fn with(bytes: &[u8]) -> Pages {
        let mut pages = Pages::new(bytes.len());
        pages.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        pages
    }

    pub(crate) fn len(&self) -> usize {
        self.layout.size()
    }

    /// All bytes. Never call this while an operation may write them.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: start and size are those of the allocation, which is initialised.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len()) }
    }

    /// All bytes. Never call this while an operation uses them.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: start and size are those of the allocation, which is initialised, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len()) }
    }

    /// The bytes of one page. Never call this while an operation may write that page.
    pub(crate) fn page(&self, number: usize) -> &[u8] {
        let piece = self.piece_at(number, PAGE_BYTES as usize);
        // SAFETY: inside the allocation, which is initialised. The reference covers no other page.
        unsafe { std::slice::from_raw_parts(piece.address, piece.bytes) }
    }

    /// `bytes` bytes from page `page` on, as an operation takes them.
    pub(crate) fn piece_at(&self, page: usize, bytes: usize) -> Piece {
        let at = page * PAGE_BYTES as usize;
        assert!(at + bytes <= self.len(), "{bytes} bytes from page {page} of {}", self.len());
        Piece { address: self.start.as_ptr().wrapping_add(at), bytes }
    }

    /// The first `bytes` bytes, as an operation takes them.
    pub(crate) fn piece(&self, bytes: usize) -> Piece {
        self.piece_at(0, bytes)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}
