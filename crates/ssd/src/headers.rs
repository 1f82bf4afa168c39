//! [`Headers`]: a pool of pages that record headers are read into. The pages are registered with io_uring and reused, so
//! that a read allocates nothing and faults nothing in.

use crate::io::Piece;
use crate::layout::PAGE_BYTES;
use crate::pages::Pages;

/// Equal to the most operations that io_uring has in flight.
const COUNT: u32 = 256;

/// The header pages of one device.
pub(crate) struct Headers {
    pages: Pages,
    free: Vec<u32>,
}

/// Memory for one header, from [`Headers::take`] until [`Headers::release`].
pub(crate) enum HeaderMemory {
    /// A page of [`Headers`].
    Shared(u32),
    /// Allocated, because the header is longer than a page or no page was free.
    Own(Pages),
}

impl Headers {
    pub(crate) fn new() -> Headers {
        Headers {
            pages: Pages::new((u64::from(COUNT) * PAGE_BYTES) as usize),
            free: (0..COUNT).rev().collect(),
        }
    }

    /// All pages, to be registered with io_uring.
    pub(crate) fn memory(&self) -> Piece {
        self.pages.piece(self.pages.len())
    }

    /// Takes memory for a header of `bytes`. It still holds what was read into it before.
    pub(crate) fn take(&mut self, bytes: u64) -> HeaderMemory {
        match self.free.pop() {
            Some(page) if bytes <= PAGE_BYTES => HeaderMemory::Shared(page),
            page => {
                self.free.extend(page);
                HeaderMemory::Own(Pages::new(bytes as usize))
            }
        }
    }

    /// The header's memory as an operation takes it.
    pub(crate) fn piece(&self, header: &HeaderMemory) -> Piece {
        match header {
            HeaderMemory::Shared(page) => self.pages.piece_at(*page as usize, PAGE_BYTES as usize),
            HeaderMemory::Own(pages) => pages.piece(pages.len()),
        }
    }

    /// The header's bytes. Never call this while an operation may write them.
    pub(crate) fn bytes<'a>(&'a self, header: &'a HeaderMemory) -> &'a [u8] {
        match header {
            HeaderMemory::Shared(page) => self.pages.page(*page as usize),
            HeaderMemory::Own(pages) => pages.bytes(),
        }
    }

    /// Returns the memory, which no operation may use any more.
    pub(crate) fn release(&mut self, header: HeaderMemory) {
        if let HeaderMemory::Shared(page) = header {
            self.free.push(page);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_used_again_and_no_two_at_once() {
        let mut headers = Headers::new();
        let taken: Vec<HeaderMemory> = (0..COUNT + 2).map(|_| headers.take(PAGE_BYTES)).collect();
        let mut pieces: Vec<usize> =
            taken.iter().map(|header| headers.piece(header).address as usize).collect();
        pieces.sort_unstable();
        assert!(pieces.windows(2).all(|pair| pair[0] + PAGE_BYTES as usize <= pair[1]));
        let own = taken.iter().filter(|header| matches!(header, HeaderMemory::Own(_))).count();
        assert_eq!(own, 2);
        taken.into_iter().for_each(|header| headers.release(header));
        let long = headers.take(PAGE_BYTES + 1);
        assert_eq!(headers.piece(&long).bytes, 2 * PAGE_BYTES as usize);
        assert!(matches!(headers.take(100), HeaderMemory::Shared(_)));
    }
}
