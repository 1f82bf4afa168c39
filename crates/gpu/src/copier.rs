//! [`Copier`]: enqueues lists of copies of any length and shape in one stream, each run by the way that [`plan`] chooses.

use std::collections::VecDeque;
use std::ops::AddAssign;
use std::sync::Arc;

use crate::driver::{Copy, CopyMethods, EventScope, TableEntry};
use crate::error::GpuError;
use crate::kernel::{COPY, Grid};
use crate::pinned::HostBuffer;
use crate::plan::{Direction, KERNEL_ALIGNMENT, Thresholds, plan};
use crate::stream::{Event, Stream};

/// Copies of a long list that are planned and enqueued before the others, so the device starts early and copies while the
/// next ones are planned. 256 MiB in pieces of 64 KiB on an H200, share of the contiguous copy
/// with 2048, 512 and 256: from the host 0.93, 0.96 and 0.98, to the host 0.922, 0.930 and 0.932, to another GPU 0.835,
/// 0.847 and 0.861.
const FIRST_COPIES: usize = 256;

/// Each part of a list is at most this many times as long as the part before.
const PARTS_GROW: usize = 4;

/// Most copies of one batch call. The device starts with the first call while the next is made. On an H200, 64 KiB
/// from the host: 0.97 of the contiguous copy with 512, 0.92 with 2048, 0.85 with 20,000.
const BATCH_COPIES: usize = 512;

/// A batch call of at least [`BATCH_COPIES_LEAST`] copies ends with the copy that reaches this many bytes, because small
/// copies of another process, like those of each decode step, wait for the whole call. On an H200, 99th percentile of an
/// engine's gaps between tokens beside saves and loads of 10 GB/s, as a multiple of the gaps without: 1.045 with calls of
/// 32 MiB, 1.03 with 4 MiB, in pieces of 64 KiB, which come as fast.
const BATCH_BYTES: u64 = 4 << 20;

/// Fewest copies of a batch call that ends by its bytes. With calls of 4 MiB in two copies 256 MiB came 0.02 slower than in
/// one call, share of the contiguous copy.
const BATCH_COPIES_LEAST: usize = 64;

/// The options of a copier.
#[derive(Debug, Clone)]
pub struct CopierOptions {
    /// The lengths that decide between the ways to copy.
    pub thresholds: Thresholds,
    /// Whether the copier may use the kernel, if the device has it.
    pub use_kernel: bool,
    /// Whether the copier may use the batch call, if the driver has it.
    pub use_batch: bool,
    /// Thread blocks of the kernel to and from the host: few, because the link is slow and the compute needs the rest.
    pub host_blocks: u32,
    /// Thread blocks of the kernel between GPUs. Pieces of 64 KiB between two H200s, share of the contiguous copy: 0.871
    /// with 48, 0.877 with 96, 0.889 with 132, one for each multiprocessor.
    pub peer_blocks: u32,
    /// Entries of one table of the kernel, of 24 bytes each; a longer list takes several launches.
    pub table_entries: usize,
    /// Most tables in use at a time.
    pub tables: usize,
    /// Host addresses, ascending, that a copy engine must not cross: [`crate::Pinned::seams`].
    pub seams: Vec<u64>,
}

impl Default for CopierOptions {
    fn default() -> CopierOptions {
        CopierOptions {
            thresholds: Thresholds::default(),
            use_kernel: true,
            use_batch: true,
            host_blocks: 8,
            peer_blocks: 132,
            table_entries: 16384,
            tables: 4,
            seams: Vec::new(),
        }
    }
}

/// Work that was enqueued one way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amount {
    /// Calls of the driver.
    pub calls: u64,
    /// Ranges in these calls.
    pub copies: u64,
    /// Bytes of these ranges.
    pub bytes: u64,
}

impl Amount {
    fn add(&mut self, lens: impl Iterator<Item = u64>) {
        self.calls += 1;
        for len in lens {
            self.copies += 1;
            self.bytes += len;
        }
    }
}

impl AddAssign for Amount {
    fn add_assign(&mut self, more: Amount) {
        self.calls += more.calls;
        self.copies += more.copies;
        self.bytes += more.bytes;
    }
}

/// The work that a list of copies became.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Enqueued {
    /// Runs with a call for each.
    pub single: Amount,
    /// Runs in batch calls.
    pub batch: Amount,
    /// Launches of the kernel.
    pub kernel: Amount,
}

impl AddAssign for Enqueued {
    fn add_assign(&mut self, more: Enqueued) {
        self.single += more.single;
        self.batch += more.batch;
        self.kernel += more.kernel;
    }
}

/// Enqueues copies in one stream, by the best way for each.
#[derive(Debug)]
pub struct Copier {
    stream: Arc<Stream>,
    options: CopierOptions,
    methods: CopyMethods,
    /// Tables of launches, the oldest first; made as they are needed.
    tables: VecDeque<Table>,
}

/// A table of the kernel, and the event that follows the launch which reads it.
#[derive(Debug)]
struct Table {
    buffer: HostBuffer,
    read: Event,
}

impl Copier {
    /// A copier for the stream's GPU.
    pub fn new(stream: Arc<Stream>, options: CopierOptions) -> Result<Copier, GpuError> {
        if options.table_entries == 0 || options.tables == 0 || u32::try_from(options.table_entries).is_err()
        {
            return Err(GpuError::Invalid(
                "a copier needs at least one table with at least one entry".into(),
            ));
        }
        if options.host_blocks == 0 || options.peer_blocks == 0 {
            return Err(GpuError::Invalid("the copy kernel needs at least one block".into()));
        }
        let has = stream.gpu().methods();
        let methods =
            CopyMethods { batch: has.batch && options.use_batch, kernel: has.kernel && options.use_kernel };
        Ok(Copier { stream, options, methods, tables: VecDeque::new() })
    }

    /// The stream of all its copies.
    pub fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// Replaces the thresholds from the next call on.
    pub fn set_thresholds(&mut self, thresholds: Thresholds) {
        self.options.thresholds = thresholds;
    }

    /// Replaces [`CopierOptions::peer_blocks`] from the next call on.
    ///
    /// # Panics
    /// If there are none.
    pub fn set_peer_blocks(&mut self, blocks: u32) {
        assert!(blocks > 0, "the copy kernel needs at least one block");
        self.options.peer_blocks = blocks;
    }

    /// The ways to copy that this copier uses beside single copies.
    pub fn methods(&self) -> &CopyMethods {
        &self.methods
    }

    /// Whether the kernel may copy some of these.
    pub fn may_launch(&self, copies: &[Copy]) -> bool {
        let longest = self.options.thresholds.kernel_below(&self.methods);
        self.methods.kernel && copies.iter().any(|copy| copy.len < longest)
    }

    /// Whether [`Copier::enqueue`] would not block.
    pub(crate) fn has_room(&self, copies: &[Copy]) -> Result<bool, GpuError> {
        if !self.methods.kernel {
            return Ok(true);
        }
        // An upper bound on the launches, because each part of the list ends with one that is not full.
        let piece_bytes = self.options.thresholds.piece_bytes.max(KERNEL_ALIGNMENT);
        let entries: u64 = copies.iter().map(|copy| copy.len.div_ceil(piece_bytes) + 1).sum();
        let launches = entries as usize / self.options.table_entries + self.parts(copies).count();
        if launches > self.options.tables {
            return self.stream.is_idle();
        }
        let mut free = self.options.tables.saturating_sub(self.tables.len());
        for table in &self.tables {
            if free >= launches || !table.read.is_done()? {
                break;
            }
            free += 1;
        }
        Ok(free >= launches)
    }

    /// Enqueues all copies, in no order among themselves, behind the work that is in the stream. It blocks only while
    /// launches use all tables. After an error some copies may have been enqueued: wait for the stream before you use the
    /// memory otherwise.
    ///
    /// # Safety
    /// All ranges stay valid until the stream has done the copies. Meanwhile no other code touches a destination or writes
    /// a source. Destinations overlap neither each other nor a source. Host ranges are pinned.
    pub unsafe fn enqueue(&mut self, copies: &[Copy], direction: Direction) -> Result<Enqueued, GpuError> {
        let mut enqueued = Enqueued::default();
        for part in self.parts(copies) {
            // SAFETY: the caller's promise is passed on.
            unsafe { self.enqueue_some(part, direction, &mut enqueued)? };
        }
        Ok(enqueued)
    }

    /// Parts of a list in the order of planning: a short one first, then longer ones.
    fn parts<'c>(&self, copies: &'c [Copy]) -> impl Iterator<Item = &'c [Copy]> + use<'c> {
        let entries = self.options.table_entries;
        let (mut left, mut most) = (copies, FIRST_COPIES);
        std::iter::from_fn(move || {
            let (part, rest) = left.split_at(left.len().min(most).min(entries));
            (left, most) = (rest, most.saturating_mul(PARTS_GROW));
            (!part.is_empty()).then_some(part)
        })
    }

    /// Enqueues a part of a list.
    ///
    /// # Safety
    /// As for [`Copier::enqueue`].
    unsafe fn enqueue_some(
        &mut self,
        copies: &[Copy],
        direction: Direction,
        enqueued: &mut Enqueued,
    ) -> Result<(), GpuError> {
        let plan = plan(copies, &self.methods, &self.options.thresholds, &self.options.seams);
        // Copy engines first, so they work while the kernel starts.
        for copy in &plan.singles {
            // SAFETY: the caller vouches for the ranges.
            unsafe { self.stream.copy(*copy)? };
            enqueued.single.add(std::iter::once(copy.len));
        }
        let mut left = plan.batch.as_slice();
        while !left.is_empty() {
            let (copies, rest) = left.split_at(one_call(left));
            // SAFETY: the caller vouches for the ranges.
            unsafe { self.batch(copies, enqueued)? };
            left = rest;
        }
        let blocks = match direction {
            Direction::HostToDevice | Direction::DeviceToHost => self.options.host_blocks,
            Direction::Peer => self.options.peer_blocks,
        };
        for entries in plan.kernel.chunks(self.options.table_entries) {
            // SAFETY: the caller vouches for the ranges.
            unsafe { self.launch(entries, blocks)? };
            enqueued.kernel.add(entries.iter().map(|entry| entry.len));
        }
        Ok(())
    }

    /// One batch call. Once the driver has refused it, single copies from then on.
    ///
    /// # Safety
    /// As for [`Copier::enqueue`].
    unsafe fn batch(&mut self, copies: &[Copy], enqueued: &mut Enqueued) -> Result<(), GpuError> {
        if self.methods.batch {
            let (driver, device) = self.stream.gpu().raw();
            // SAFETY: the stream lives; the caller vouches for the ranges.
            match unsafe { driver.copy_batch_async(device, self.stream.raw(), copies) } {
                Err(error @ GpuError::Unsupported { .. }) => {
                    // Log: this driver has no batched copies; copies work, and cost more CPU time. Do: install a
                    // newer driver.
                    tracing::info!(once = true, gpu = device, %error, "copies are enqueued one by one");
                    self.methods.batch = false;
                }
                outcome => {
                    outcome?;
                    enqueued.batch.add(copies.iter().map(|copy| copy.len));
                    return Ok(());
                }
            }
        }
        for copy in copies {
            // SAFETY: the caller vouches for the ranges.
            unsafe { self.stream.copy(*copy)? };
            enqueued.single.add(std::iter::once(copy.len));
        }
        Ok(())
    }

    /// One launch of the kernel.
    ///
    /// # Safety
    /// As for [`Copier::enqueue`].
    unsafe fn launch(&mut self, entries: &[TableEntry], blocks: u32) -> Result<(), GpuError> {
        let table = self.take_table()?;
        let first: *mut TableEntry = table.buffer.as_ptr().cast();
        // SAFETY: the buffer holds table_entries entries, of which there are not more here, is aligned, and no launch
        // reads it any more.
        unsafe { first.copy_from_nonoverlapping(entries.as_ptr(), entries.len()) };
        let (driver, device) = self.stream.gpu().raw();
        let (stream, address) = (self.stream.raw(), table.buffer.address());
        // SAFETY: the stream lives; the table is not written again before the event that follows is done; the caller
        // vouches for the ranges.
        let launched = unsafe {
            let (table, count) = (address.to_ne_bytes(), (entries.len() as u32).to_ne_bytes());
            driver.launch(device, stream, &COPY, Grid { blocks, shared_bytes: 0 }, &[&table, &count])
        };
        if let Err(error) = launched {
            // Nothing reads this table.
            self.tables.push_front(table);
            return Err(error);
        }
        if let Err(error) = table.read.record(&self.stream) {
            // Without an event the read of this table cannot be observed. So this waits for it, and drops the table.
            let _ = self.stream.synchronize();
            return Err(error);
        }
        self.tables.push_back(table);
        Ok(())
    }

    /// A table that no launch reads.
    fn take_table(&mut self) -> Result<Table, GpuError> {
        if let Some(oldest) = self.tables.front() {
            if !oldest.read.is_done()? {
                if self.tables.len() < self.options.tables {
                    return self.make_table();
                }
                oldest.read.synchronize()?;
            }
            if let Some(oldest) = self.tables.pop_front() {
                return Ok(oldest);
            }
        }
        self.make_table()
    }

    fn make_table(&self) -> Result<Table, GpuError> {
        let gpu = self.stream.gpu();
        let bytes = (self.options.table_entries * size_of::<TableEntry>()) as u64;
        Ok(Table { buffer: HostBuffer::new(gpu, bytes)?, read: Event::new(gpu, EventScope::Process)? })
    }
}

/// How many of these copies go into the next batch call.
fn one_call(copies: &[Copy]) -> usize {
    let mut bytes = 0u64;
    let is_full = |(index, copy): (usize, &Copy)| {
        bytes = bytes.saturating_add(copy.len);
        bytes >= BATCH_BYTES && index + 1 >= BATCH_COPIES_LEAST
    };
    let most = copies.len().min(BATCH_COPIES);
    copies[..most].iter().enumerate().position(is_full).map_or(most, |last| last + 1)
}

impl Drop for Copier {
    fn drop(&mut self) {
        for table in &self.tables {
            // If the device is lost, nothing reads the table any more either.
            let _ = table.read.synchronize();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls(copies: usize, len: u64) -> Vec<usize> {
        let copies = vec![Copy { dst: 0, src: 0, len }; copies];
        let (mut left, mut calls) = (copies.as_slice(), Vec::new());
        while !left.is_empty() {
            let (call, rest) = left.split_at(one_call(left));
            calls.push(call.len());
            left = rest;
        }
        calls
    }

    #[test]
    fn a_batch_call_of_many_short_copies_ends_with_a_few_mebibytes() {
        assert_eq!(calls(1100, 16), [512, 512, 76]);
        assert_eq!(calls(600, 16 << 10), [256, 256, 88]);
        assert_eq!(calls(150, 64 << 10), [64, 64, 22]);
        assert_eq!(calls(100, 2 << 20), [64, 36]);
        assert_eq!(calls(65, u64::MAX), [64, 1]);
    }
}
