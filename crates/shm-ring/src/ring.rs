//! [`Writer`] and [`Reader`]: the two ends of a ring.

#![allow(unsafe_code, reason = "copies between memory that was promised to be valid and the ring")]

use crate::memory::Memory;
use crate::sync::{AtomicU32, Ordering, fence};

/// Why a side cannot go on with a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// The other side wrote an impossible position. Do not trust it any more; no byte was touched.
    #[error(
        "the peer spoiled a ring of {capacity} bytes in shared memory: {written} bytes are written and {read} read"
    )]
    Corrupt {
        /// Bytes ever written: the writer's own count, or the header's if the reader reports the error.
        written: u64,
        /// Bytes ever read: the reader's own count, or the header's if the writer reports the error.
        read: u64,
        /// Bytes that the ring can hold.
        capacity: u64,
    },
}

/// The writing end of a ring.
#[derive(Debug)]
pub struct Writer {
    memory: Memory,
    written: u64,
    /// The reader's position as last seen. Invariant: `written - read <= capacity`.
    read: u64,
}

/// The reading end of a ring.
#[derive(Debug)]
pub struct Reader {
    memory: Memory,
    read: u64,
    /// The writer's position as last seen. Invariant: `written - read <= capacity`.
    written: u64,
}

impl Writer {
    /// The writing end of a new ring. Make one for each ring.
    pub fn new(memory: Memory) -> Writer {
        Writer { memory, written: 0, read: 0 }
    }

    /// Writes as many bytes of these ranges as fit, in order. Returns their number, 0 if the ring is full. The reader
    /// sees all of them at once.
    ///
    /// # Errors
    /// [`RingError::Corrupt`]; nothing was written.
    ///
    /// # Safety
    /// The ranges are valid for reads.
    pub unsafe fn write(&mut self, ranges: &[libc::iovec]) -> Result<usize, RingError> {
        let room = self.room(total(ranges))?;
        let mut taken = 0;
        for span in spans(ranges, self.written, room, self.memory.capacity()) {
            // SAFETY: the span is a part of a range, which is valid by the caller's promise and not in the ring.
            unsafe { self.memory.copy_in(span.at, span.pointer, span.len) };
            taken += span.len;
        }
        if taken > 0 {
            self.written = self.written.wrapping_add(taken as u64);
            // Release: a reader that sees this position also sees the bytes.
            self.memory.header().writer.written.store(self.written, Ordering::Release);
        }
        Ok(taken)
    }

    /// Whether the ring has no room now. False for a corrupt ring, so that the caller writes and gets the error.
    #[inline]
    pub fn is_full(&mut self) -> bool {
        self.room(1) == Ok(0)
    }

    /// Call this before waiting for room: it asks the reader to wake this side after its next read. Returns false, and
    /// withdraws the request, if there is room already: then a write takes more than 0 bytes, or fails.
    #[must_use]
    pub fn prepare_to_wait_for_room(&mut self) -> bool {
        set(&self.memory.header().reader.writer_waits, 1);
        // Pairs with the fence in the reader's take_writer_waits.
        fence(Ordering::SeqCst);
        let waits = self.is_full();
        if !waits {
            self.woken();
        }
        waits
    }

    /// Call this after waiting for room: the reader need not wake this side any more, but may have done so already.
    pub fn woken(&mut self) {
        set(&self.memory.header().reader.writer_waits, 0);
    }

    /// Call this after writing: returns whether the caller has to wake the reader. True once for each sleep.
    #[inline]
    #[must_use]
    pub fn take_reader_sleeps(&mut self) -> bool {
        take(&self.memory.header().writer.reader_sleeps)
    }

    /// How many bytes can be written, at most `capacity`. Refreshes the reader's position if it would be less than
    /// `wanted`.
    #[inline]
    fn room(&mut self, wanted: u64) -> Result<u64, RingError> {
        let capacity = self.memory.capacity();
        let unread = self.written.wrapping_sub(self.read);
        if capacity - unread >= wanted {
            return Ok(capacity - unread);
        }
        // Acquire: the reader has finished its copies out of the room that this position gives.
        let read = self.memory.header().reader.read.load(Ordering::Acquire);
        // The position must be at or past the one last seen, and not past what was written.
        if read.wrapping_sub(self.read) > unread {
            return Err(RingError::Corrupt { written: self.written, read, capacity });
        }
        self.read = read;
        Ok(capacity - self.written.wrapping_sub(read))
    }
}

impl Reader {
    /// The reading end of a new ring, which may have been written to already. Make one for each ring.
    pub fn new(memory: Memory) -> Reader {
        Reader { memory, read: 0, written: 0 }
    }

    /// Reads as many bytes as are there into these ranges, in order. Returns their number, 0 if the ring is empty. The
    /// writer sees all the room that becomes free at once.
    ///
    /// # Errors
    /// [`RingError::Corrupt`]; nothing was read.
    ///
    /// # Safety
    /// The ranges are valid for writes.
    pub unsafe fn read(&mut self, ranges: &[libc::iovec]) -> Result<usize, RingError> {
        let available = self.available(total(ranges))?;
        let mut taken = 0;
        for span in spans(ranges, self.read, available, self.memory.capacity()) {
            // SAFETY: the span is a part of a range, which is valid by the caller's promise and not in the ring.
            unsafe { self.memory.copy_out(span.at, span.pointer, span.len) };
            taken += span.len;
        }
        if taken > 0 {
            self.read = self.read.wrapping_add(taken as u64);
            // Release: a writer that sees this position may overwrite the bytes, whose copies have ended.
            self.memory.header().reader.read.store(self.read, Ordering::Release);
        }
        Ok(taken)
    }

    /// Whether the ring has no byte now. False for a corrupt ring, so that the caller reads and gets the error.
    #[inline]
    pub fn is_empty(&mut self) -> bool {
        self.available(1) == Ok(0)
    }

    /// Call this before sleeping: it asks the writer to wake this side after its next write. Returns false, and
    /// withdraws the request, if bytes are there already: then a read takes more than 0 bytes, or fails.
    #[must_use]
    pub fn prepare_to_sleep(&mut self) -> bool {
        set(&self.memory.header().writer.reader_sleeps, 1);
        // Pairs with the fence in the writer's take_reader_sleeps.
        fence(Ordering::SeqCst);
        let sleeps = self.is_empty();
        if !sleeps {
            self.woken();
        }
        sleeps
    }

    /// Call this after sleeping: the writer need not wake this side any more, but may have done so already.
    pub fn woken(&mut self) {
        set(&self.memory.header().writer.reader_sleeps, 0);
    }

    /// Call this after reading: returns whether the caller has to wake the writer. True once for each wait.
    #[inline]
    #[must_use]
    pub fn take_writer_waits(&mut self) -> bool {
        take(&self.memory.header().reader.writer_waits)
    }

    /// How many bytes can be read, at most `capacity`. Refreshes the writer's position if it would be less than
    /// `wanted`.
    #[inline]
    fn available(&mut self, wanted: u64) -> Result<u64, RingError> {
        let capacity = self.memory.capacity();
        let seen = self.written.wrapping_sub(self.read);
        if seen >= wanted {
            return Ok(seen);
        }
        // Acquire: the writer has finished its copies of the bytes up to this position.
        let written = self.memory.header().writer.written.load(Ordering::Acquire);
        let available = written.wrapping_sub(self.read);
        // The position must be at or past the one last seen, and must not overwrite unread bytes.
        if available < seen || available > capacity {
            return Err(RingError::Corrupt { written, read: self.read, capacity });
        }
        self.written = written;
        Ok(available)
    }
}

/// Raises or clears the side's own flag. A store would do, because the other side's swap directly follows the value
/// that it took. But loom does not know that order (0.7.2 orders a store only behind what its thread has seen), and
/// reports lost wakes. A swap tells loom too, and costs nothing beside the fence and the sleep.
fn set(flag: &AtomicU32, value: u32) {
    flag.swap(value, Ordering::Relaxed);
}

/// Clears a flag; returns whether it was set.
#[inline]
fn take(flag: &AtomicU32) -> bool {
    // The caller has moved its position. Either this load sees the flag, or the side that sets it sees the position.
    fence(Ordering::SeqCst);
    // Load first, because a swap would take the cache line from a processor that only reads it.
    flag.load(Ordering::Relaxed) != 0 && flag.swap(0, Ordering::Relaxed) != 0
}

fn total(ranges: &[libc::iovec]) -> u64 {
    ranges.iter().fold(0, |sum, range| sum.saturating_add(range.iov_len as u64))
}

/// A part of a range, and its offset in the ring.
struct Span {
    at: usize,
    pointer: *mut u8,
    len: usize,
}

/// The first `bytes` bytes of the ranges as spans, from this position of the stream on. A span never crosses the ring's
/// end.
fn spans(ranges: &[libc::iovec], mut position: u64, bytes: u64, capacity: u64) -> impl Iterator<Item = Span> {
    // Fits into a usize, because it is at most the capacity of a ring in memory.
    let mut left = bytes as usize;
    let mut ranges = ranges.iter().map(|range| (range.iov_base.cast::<u8>(), range.iov_len));
    let mut range = (std::ptr::null_mut(), 0);
    std::iter::from_fn(move || {
        while left > 0 && range.1 == 0 {
            range = ranges.next()?;
        }
        if left == 0 {
            return None;
        }
        let at = (position & (capacity - 1)) as usize;
        let len = range.1.min(left).min(capacity as usize - at);
        let span = Span { at, pointer: range.0, len };
        range = (range.0.wrapping_add(len), range.1 - len);
        left -= len;
        position = position.wrapping_add(len as u64);
        Some(span)
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::collections::VecDeque;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use proptest::collection::vec;
    use proptest::prelude::*;
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

    use super::*;
    use crate::header::{HEADER_BYTES, Header};

    const PAGE: usize = HEADER_BYTES;

    /// Pages between two guard pages.
    struct Pages {
        base: *mut u8,
        len: usize,
    }

    // SAFETY: only its maker uses the address, as memory that others write.
    unsafe impl Send for Pages {}
    // SAFETY: as above.
    unsafe impl Sync for Pages {}

    impl Pages {
        fn new(len: usize) -> Pages {
            // SAFETY: a new mapping, of which only a part is made accessible.
            unsafe {
                let around = len + 2 * PAGE;
                let flags = MapFlags::PRIVATE;
                let around = mmap_anonymous(std::ptr::null_mut(), around, ProtFlags::empty(), flags).unwrap();
                let base = around.cast::<u8>().add(PAGE);
                mprotect(base.cast(), len, MprotectFlags::READ | MprotectFlags::WRITE).unwrap();
                Pages { base, len }
            }
        }
    }

    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: this is the whole mapping, and no address of it is in use any more.
            unsafe { munmap(self.base.sub(PAGE).cast(), self.len + 2 * PAGE).unwrap() }
        }
    }

    /// An empty ring after `position` bytes were written and read, and its memory.
    fn ring(capacity: usize, position: u64) -> (Writer, Reader, Memory) {
        let pages = Arc::new(Pages::new(HEADER_BYTES + capacity.next_multiple_of(PAGE)));
        // SAFETY: valid as long as the pages live; tests make one writer and one reader.
        let memory = unsafe {
            pages.base.cast::<Header>().write(Header::new(position));
            Memory::at(pages.base, capacity, pages)
        };
        let writer = Writer { memory: memory.clone(), written: position, read: position };
        let reader = Reader { memory: memory.clone(), written: position, read: position };
        (writer, reader, memory)
    }

    /// Cuts the bytes into ranges of these lengths.
    fn ranges(bytes: &mut [u8], lens: &[usize]) -> Vec<libc::iovec> {
        let mut rest = bytes;
        let mut ranges = Vec::new();
        for len in lens {
            let (range, behind) = rest.split_at_mut(*len);
            ranges.push(libc::iovec { iov_base: range.as_mut_ptr().cast(), iov_len: *len });
            rest = behind;
        }
        ranges
    }

    /// Positions near 0, near 2^64, or anywhere.
    fn positions() -> impl Strategy<Value = u64> {
        prop_oneof![0..1000u64, u64::MAX - 1000..=u64::MAX, any::<u64>()]
    }

    #[derive(Debug, Clone)]
    enum Step {
        Write(Vec<usize>),
        Read(Vec<usize>),
        Sleep,
        WaitForRoom,
        /// Adds a number to a word of the header.
        Spoil(usize, i64),
        /// Sets a word of the header to any value.
        SpoilAnyhow(usize, u64),
    }

    fn moves(len: usize) -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => vec(0..len, 0..6).prop_map(Step::Write),
            4 => vec(0..len, 0..6).prop_map(Step::Read),
            1 => Just(Step::Sleep),
            1 => Just(Step::WaitForRoom),
        ]
    }

    fn moves_and_garbage() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => moves(3000),
            1 => (0..4usize, -5000..5000i64).prop_map(|(word, by)| Step::Spoil(word, by)),
            1 => (0..4usize, any::<u64>()).prop_map(|(word, value)| Step::SpoilAnyhow(word, value)),
        ]
    }

    fn spoil(header: &Header, word: usize, value: impl Fn(u64) -> u64) {
        match word {
            0 => header
                .writer
                .written
                .store(value(header.writer.written.load(Ordering::Relaxed)), Ordering::Relaxed),
            1 => {
                header.reader.read.store(value(header.reader.read.load(Ordering::Relaxed)), Ordering::Relaxed)
            }
            2 => header.writer.reader_sleeps.store(value(0) as u32, Ordering::Relaxed),
            _ => header.reader.writer_waits.store(value(0) as u32, Ordering::Relaxed),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn a_ring_is_a_queue_of_bounded_length(
            shift in 0..9u32,
            position in positions(),
            steps in vec(moves(200), 1..100),
        ) {
            let capacity = 1 << shift;
            let (mut writer, mut reader, _) = ring(capacity, position);
            let mut model = VecDeque::new();
            let mut next = 0u8;
            for step in steps {
                match step {
                    Step::Write(lens) => {
                        let total = lens.iter().sum();
                        let mut bytes: Vec<u8> = (0..total).map(|index: usize| next.wrapping_add(index as u8)).collect();
                        // SAFETY: the ranges are of these bytes.
                        let taken = unsafe { writer.write(&ranges(&mut bytes, &lens)).unwrap() };
                        prop_assert_eq!(taken, total.min(capacity - model.len()));
                        model.extend(&bytes[..taken]);
                        next = next.wrapping_add(taken as u8);
                    }
                    Step::Read(lens) => {
                        let mut bytes = vec![0; lens.iter().sum()];
                        // SAFETY: as above.
                        let taken = unsafe { reader.read(&ranges(&mut bytes, &lens)).unwrap() };
                        prop_assert_eq!(taken, bytes.len().min(model.len()));
                        let expected: Vec<u8> = model.drain(..taken).collect();
                        prop_assert_eq!(&bytes[..taken], &expected);
                        prop_assert!(bytes[taken..].iter().all(|byte| *byte == 0));
                    }
                    Step::Sleep => {
                        prop_assert_eq!(reader.prepare_to_sleep(), model.is_empty());
                        prop_assert_eq!(writer.take_reader_sleeps(), model.is_empty());
                        prop_assert!(!writer.take_reader_sleeps());
                    }
                    _ => {
                        prop_assert_eq!(writer.prepare_to_wait_for_room(), model.len() == capacity);
                        prop_assert_eq!(reader.take_writer_waits(), model.len() == capacity);
                        prop_assert!(!reader.take_writer_waits());
                    }
                }
                prop_assert_eq!(reader.is_empty(), model.is_empty());
                prop_assert_eq!(writer.is_full(), model.len() == capacity);
            }
        }

        /// An access outside the ring would hit the guard pages. Both sides return bytes or the error.
        #[test]
        fn garbage_in_the_header_is_an_error_and_never_worse(
            position in positions(),
            steps in vec(moves_and_garbage(), 1..100),
        ) {
            let (mut writer, mut reader, memory) = ring(PAGE, position);
            let mut bytes = vec![0; 3000 * 6];
            for step in steps {
                let taken = match &step {
                    // SAFETY: the ranges are of these bytes.
                    Step::Write(lens) => unsafe { writer.write(&ranges(&mut bytes, lens)) },
                    // SAFETY: as above.
                    Step::Read(lens) => unsafe { reader.read(&ranges(&mut bytes, lens)) },
                    Step::Sleep => {
                        // A reader that must not sleep can read, or gets the error.
                        if !reader.prepare_to_sleep() {
                            prop_assert!(!reader.is_empty());
                        }
                        let _ = writer.take_reader_sleeps();
                        Ok(0)
                    }
                    Step::WaitForRoom => {
                        if !writer.prepare_to_wait_for_room() {
                            prop_assert!(!writer.is_full());
                        }
                        let _ = reader.take_writer_waits();
                        Ok(0)
                    }
                    Step::Spoil(word, by) => {
                        spoil(memory.header(), *word, |before| before.wrapping_add_signed(*by));
                        Ok(0)
                    }
                    Step::SpoilAnyhow(word, value) => {
                        spoil(memory.header(), *word, |_| *value);
                        Ok(0)
                    }
                };
                if let (Ok(taken), Step::Write(lens) | Step::Read(lens)) = (taken, &step) {
                    prop_assert!(taken <= PAGE.min(lens.iter().sum()));
                }
            }
        }
    }

    #[test]
    fn positions_that_cannot_be_are_told() {
        let (mut writer, mut reader, memory) = ring(PAGE, 10_000);
        let header = memory.header();
        let mut bytes = [7; PAGE];
        let all = ranges(&mut bytes, &[PAGE]);
        let corrupt = |written, read| Err(RingError::Corrupt { written, read, capacity: PAGE as u64 });
        for written in [9_999, 0, 10_001 + PAGE as u64, u64::MAX] {
            header.writer.written.store(written, Ordering::Relaxed);
            // SAFETY: the range is of these bytes.
            assert_eq!(unsafe { reader.read(&all) }, corrupt(written, 10_000));
            assert!(!reader.is_empty() && !reader.prepare_to_sleep());
        }
        // SAFETY: as above.
        assert_eq!(unsafe { writer.write(&all) }, Ok(PAGE));
        for read in [9_999, 0, 10_001 + PAGE as u64, u64::MAX] {
            header.reader.read.store(read, Ordering::Relaxed);
            // SAFETY: as above.
            assert_eq!(unsafe { writer.write(&all) }, corrupt(10_000 + PAGE as u64, read));
            assert!(!writer.is_full() && !writer.prepare_to_wait_for_room());
        }
        header.writer.written.store(10_001, Ordering::Relaxed);
        // SAFETY: as above.
        assert_eq!(unsafe { reader.read(&all) }, Ok(1));
        // A position that was seen once cannot go back.
        header.writer.written.store(10_000, Ordering::Relaxed);
        assert_eq!(
            // SAFETY: as above.
            unsafe { reader.read(&all) }.unwrap_err().to_string(),
            "the peer spoiled a ring of 4096 bytes in shared memory: 10000 bytes are written and 10001 read"
        );
    }

    /// Like the test above, with a third thread that spoils the header at any moment.
    #[test]
    fn garbage_in_the_header_while_both_sides_go_on() {
        let (mut writer, mut reader, memory) = ring(PAGE, 0);
        let [writer_saw, reader_saw] = [AtomicBool::new(false), AtomicBool::new(false)];
        let both_saw = || writer_saw.load(Ordering::Relaxed) && reader_saw.load(Ordering::Relaxed);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut from = vec![1; 1000];
                let mut wrong = 0;
                for round in 0.. {
                    // SAFETY: the ranges are of these bytes.
                    wrong += unsafe { writer.write(&ranges(&mut from, &[round % 700, 300])) }.is_err() as u32;
                    let _ = writer.prepare_to_wait_for_room() || writer.take_reader_sleeps();
                    writer_saw.store(wrong > 1000, Ordering::Relaxed);
                    if both_saw() {
                        break;
                    }
                }
            });
            scope.spawn(|| {
                let mut to = vec![0; 1000];
                let mut wrong = 0;
                for round in 0.. {
                    // SAFETY: as above.
                    wrong += unsafe { reader.read(&ranges(&mut to, &[300, round % 600])) }.is_err() as u32;
                    let _ = reader.prepare_to_sleep() || reader.take_writer_waits();
                    reader_saw.store(wrong > 1000, Ordering::Relaxed);
                    if both_saw() {
                        break;
                    }
                }
            });
            let mut random = 88_172_645_463_325_252u64;
            while !both_saw() {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                // Often a possible position.
                let far = random >> (random % 64);
                spoil(memory.header(), (random >> 20) as usize % 4, |before| {
                    if random.is_multiple_of(3) { random } else { before.wrapping_add(far % 5000) }
                });
            }
        });
    }
}
