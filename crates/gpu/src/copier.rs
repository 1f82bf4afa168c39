//! Enqueues lists of copies of any length and shape.

use std::collections::VecDeque;
use std::ops::AddAssign;
use std::sync::Arc;

use crate::driver::{Copy, CopyMethods, EventScope, TableEntry};
use crate::error::GpuError;
use crate::pinned::HostBuffer;
use crate::plan::{Direction, KERNEL_ALIGNMENT, Thresholds, plan};
use crate::stream::{Event, Stream};

/// Copies of a long list that are planned and enqueued before the rest is looked at, so that the device starts early.
const FIRST_COPIES: usize = 2048;

/// Copies that one batch call takes: the device starts with the first call while the next is made. On an H200, 64 KiB
/// from the host: 0.97 of the contiguous copy with 512, 0.92 with 2048, 0.85 with 20,000.
const BATCH_COPIES: usize = 512;

/// How a copier works.
#[derive(Debug, Clone)]
pub struct CopierOptions {
    /// What decides between the ways to copy.
    pub thresholds: Thresholds,
    /// Whether the kernel may be used where the device has it.
    pub use_kernel: bool,
    /// Whether the batch call may be used where the driver has it.
    pub use_batch: bool,
    /// Thread blocks of the kernel to and from the host: few, since the link is slow and the compute wants the rest.
    pub host_blocks: u32,
    /// Thread blocks of the kernel between GPUs.
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
            peer_blocks: 48,
            table_entries: 16384,
            tables: 4,
            seams: Vec::new(),
        }
    }
}

/// What was enqueued one way.
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

/// What a list of copies became.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Enqueued {
    /// Single copies.
    pub single: Amount,
    /// Batch calls.
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

    /// The stream that everything is enqueued in.
    pub fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// From now on these decide between the ways to copy.
    pub fn set_thresholds(&mut self, thresholds: Thresholds) {
        self.options.thresholds = thresholds;
    }

    /// The ways to copy beside single copies that are in use.
    pub fn methods(&self) -> &CopyMethods {
        &self.methods
    }

    /// Whether the kernel may copy some of these.
    pub(crate) fn may_launch(&self, copies: &[Copy]) -> bool {
        let longest = self.options.thresholds.kernel_below(&self.methods);
        self.methods.kernel && copies.iter().any(|copy| copy.len < longest)
    }

    /// Whether [`Copier::enqueue`] would not block.
    pub(crate) fn has_room(&self, copies: &[Copy]) -> Result<bool, GpuError> {
        if !self.methods.kernel {
            return Ok(true);
        }
        // At least as many launches as there will be: each part of the list ends with one that is not full.
        let piece_bytes = self.options.thresholds.piece_bytes.max(KERNEL_ALIGNMENT);
        let entries: u64 = copies.iter().map(|copy| copy.len.div_ceil(piece_bytes) + 1).sum();
        let parts = 2 + copies.len() / self.options.table_entries;
        let launches = entries as usize / self.options.table_entries + parts;
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

    /// Enqueues all copies, in no order among themselves, after what is in the stream already. It blocks only while all
    /// tables are in use by launches that still run. After an error some may have been enqueued: wait for the stream
    /// before the memory is used otherwise.
    ///
    /// # Safety
    /// All ranges stay valid until the stream has done the copies, and nobody else touches a destination, or writes a
    /// source, meanwhile; destinations overlap neither each other nor a source. Host ranges are pinned.
    pub unsafe fn enqueue(&mut self, copies: &[Copy], direction: Direction) -> Result<Enqueued, GpuError> {
        let mut enqueued = Enqueued::default();
        let (first, rest) = copies.split_at(copies.len().min(FIRST_COPIES));
        for copies in std::iter::once(first).chain(rest.chunks(self.options.table_entries)) {
            // SAFETY: the caller's promise is passed on.
            unsafe { self.enqueue_some(copies, direction, &mut enqueued)? };
        }
        Ok(enqueued)
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
        // The engines first: they then work beside the kernel's start.
        for copy in &plan.singles {
            // SAFETY: the caller vouches for the ranges.
            unsafe { self.stream.copy(*copy)? };
            enqueued.single.add(std::iter::once(copy.len));
        }
        for copies in plan.batch.chunks(BATCH_COPIES) {
            // SAFETY: the caller vouches for the ranges.
            unsafe { self.batch(copies, enqueued)? };
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

    /// One batch call, or single copies from the first time on that the driver has none.
    ///
    /// # Safety
    /// As for [`Copier::enqueue`].
    unsafe fn batch(&mut self, copies: &[Copy], enqueued: &mut Enqueued) -> Result<(), GpuError> {
        if self.methods.batch {
            let (driver, device) = self.stream.gpu().raw();
            // SAFETY: the stream lives; the caller vouches for the ranges.
            match unsafe { driver.copy_batch_async(device, self.stream.raw(), copies) } {
                Err(error @ GpuError::Unsupported { .. }) => {
                    tracing::warn!(%error, "copies are enqueued one by one");
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
        let launched =
            unsafe { driver.launch_copy_kernel(device, stream, address, entries.len() as u32, blocks) };
        if let Err(error) = launched {
            // Nothing reads this table.
            self.tables.push_front(table);
            return Err(error);
        }
        if let Err(error) = table.read.record(&self.stream) {
            // Nobody will know when the table has been read, so it waits here and is given up.
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

impl Drop for Copier {
    fn drop(&mut self) {
        for table in &self.tables {
            // Where the device is lost, nothing reads the table any more either.
            let _ = table.read.synchronize();
        }
    }
}
