//! The state that all devices and streams of a fake share, and the execution of enqueued work.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvlane_gpu::driver::TableEntry;
use kvlane_gpu::{Copy, code};
use parking_lot::Mutex;

use super::bodies::Body;
use super::event::Event;
use super::faults::Faults;
use super::mapping::pointer;
use super::memory::{Memory, Reach};
use super::pace::Pace;

/// The longest that a poll of a word or an event of another process sleeps.
const LONGEST_PAUSE: Duration = Duration::from_micros(200);

/// Bytes that a slow copy moves before it takes their extra time. So it copies over its whole time, as a GPU does, and its
/// bytes may be older and newer ones.
const SLICE_BYTES: u64 = 64 << 10;

/// The name under which faults count running copies.
const RUNNING_COPY: &str = "a copy that runs";

/// Work of a stream.
#[derive(Debug)]
pub(super) enum Work {
    Copies(Vec<Copy>),
    Copy { table: u64, count: u32 },
    Body { body: Body, parameters: Vec<u8>, blocks: u32 },
    Zeros { address: u64, bytes: u64 },
    Record { event: Arc<Event>, record: u64 },
    Wait { event: Arc<Event>, record: u64 },
    WriteWord { address: u64, value: u32 },
    WaitWord { address: u64, value: u32 },
}

#[derive(Debug)]
pub(super) struct Machine {
    pub(super) memory: Memory,
    pub(super) call_faults: Mutex<Faults>,
    pub(super) work_faults: Mutex<Faults>,
    /// Extra time of a copy of 1 MiB, for each slow device.
    pub(super) slowness: Mutex<BTreeMap<u32, Duration>>,
    pace: Pace,
    /// The fake is being dropped: no more work is done.
    pub(super) stopping: AtomicBool,
    /// Devices whose context is lost, with the error that they return.
    lost: Mutex<BTreeMap<u32, u32>>,
}

impl Machine {
    pub(super) fn new(memory: Memory, pace: Pace) -> Machine {
        Machine {
            memory,
            call_faults: Mutex::default(),
            work_faults: Mutex::default(),
            slowness: Mutex::default(),
            pace,
            stopping: AtomicBool::new(false),
            lost: Mutex::default(),
        }
    }

    /// The error of a device whose context is lost.
    pub(super) fn lost(&self, device: u32) -> Option<u32> {
        self.lost.lock().get(&device).copied()
    }

    /// Records an error. A sticky one costs the device its context.
    pub(super) fn fail(&self, device: u32, code: u32) -> u32 {
        if code::is_sticky(code) {
            self.lost.lock().entry(device).or_insert(code);
        }
        code
    }

    /// Polls until the condition holds; false if the device is lost or the fake is dropped first.
    pub(super) fn wait_until(&self, device: u32, mut holds: impl FnMut() -> bool) -> bool {
        let mut pause = Duration::from_micros(1);
        loop {
            if holds() {
                return true;
            }
            if self.is_over(device) {
                return false;
            }
            thread::sleep(pause);
            pause = LONGEST_PAUSE.min(pause * 2);
        }
    }

    pub(super) fn execute(&self, device: u32, work: &Work) -> Result<(), u32> {
        if self.is_over(device) {
            return Ok(());
        }
        let done = match work {
            Work::Copies(copies) => self.copy_all(device, copies, Reach::CopyEngine),
            Work::Copy { table, count } => self
                .table(device, *table, *count)
                .and_then(|copies| self.copy_all(device, &copies, Reach::Kernel)),
            Work::Body { body, parameters, blocks } => {
                // SAFETY: the caller of the driver vouches for the parameters, and for what they name.
                unsafe { body.run(parameters, *blocks) };
                Ok(())
            }
            Work::Zeros { address, bytes } => {
                self.memory.hold(device, *address, *bytes, Reach::Kernel).map(|_held| {
                    // SAFETY: the range is held mapped, or the caller of the driver vouches for it.
                    unsafe { pointer(*address).write_bytes(0, *bytes as usize) };
                })
            }
            Work::Record { event, record } => {
                event.finish(*record);
                Ok(())
            }
            Work::Wait { event, record } => {
                self.wait_until(device, || event.is_done(*record));
                Ok(())
            }
            Work::WriteWord { address, value } => {
                self.word(device, *address, |word| word.store(*value, Ordering::Release))
            }
            Work::WaitWord { address, value } => self.word(device, *address, |word| {
                let reached = || word.load(Ordering::Acquire).wrapping_sub(*value) as i32 >= 0;
                self.wait_until(device, reached);
            }),
        };
        done.map_err(|code| self.fail(device, code))
    }

    /// The present content of the kernel's table.
    pub(super) fn table(&self, device: u32, table: u64, count: u32) -> Result<Vec<Copy>, u32> {
        let bytes = u64::from(count) * size_of::<TableEntry>() as u64;
        let _held = self.memory.hold(device, table, bytes, Reach::Kernel)?;
        if !table.is_multiple_of(align_of::<TableEntry>() as u64) {
            return Err(code::ILLEGAL_ADDRESS);
        }
        let first: *const TableEntry = pointer(table).cast();
        let entries = (0..count as usize).map(|index| {
            // SAFETY: the table is held mapped and aligned; any bytes make an entry. It may change meanwhile if its
            // owner breaks the contract, which a volatile read survives.
            unsafe { first.wrapping_add(index).read_volatile() }
        });
        Ok(entries.map(|TableEntry { dst, src, len }| Copy { dst, src, len }).collect())
    }

    fn is_over(&self, device: u32) -> bool {
        self.stopping.load(Ordering::Relaxed) || self.lost(device).is_some()
    }

    fn copy_all(&self, device: u32, copies: &[Copy], reach: Reach) -> Result<(), u32> {
        if let Some(code) = self.work_faults.lock().next(device, RUNNING_COPY) {
            return Err(code);
        }
        let per_mib = self.slowness.lock().get(&device).copied().unwrap_or_default();
        let slice_bytes = if per_mib.is_zero() { u64::MAX } else { SLICE_BYTES };
        let (mut bytes, mut end) = (0, None);
        for copy in copies {
            let source = self.memory.hold(device, copy.src, copy.len, reach)?;
            let destination = self.memory.hold(device, copy.dst, copy.len, reach)?;
            // The kernel could not load this in one instruction.
            if reach == Reach::Kernel && !(copy.src | copy.dst | copy.len).is_multiple_of(16) {
                return Err(code::ILLEGAL_ADDRESS);
            }
            end = end.max(self.pace.reserve((source.holder(), destination.holder()), copy.len));
            let mut at = 0;
            while at < copy.len {
                if bytes >= SLICE_BYTES {
                    dawdle(per_mib, std::mem::take(&mut bytes));
                }
                let len = slice_bytes.min(copy.len - at);
                // SAFETY: both ranges are held mapped, or the caller of the driver vouches for them.
                unsafe { std::ptr::copy(pointer(copy.src + at), pointer(copy.dst + at), len as usize) };
                (at, bytes) = (at + len, bytes + len);
            }
        }
        dawdle(per_mib, bytes);
        thread::sleep(end.map_or(Duration::ZERO, |end| end.saturating_duration_since(Instant::now())));
        Ok(())
    }

    fn word(&self, device: u32, address: u64, use_it: impl FnOnce(&AtomicU32)) -> Result<(), u32> {
        let _held = self.memory.hold(device, address, 4, Reach::Kernel)?;
        if !address.is_multiple_of(4) {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: the word is held mapped or its caller vouches for it, and is aligned.
        use_it(unsafe { AtomicU32::from_ptr(pointer(address).cast()) });
        Ok(())
    }
}

/// Takes the extra time of so many bytes.
fn dawdle(per_mib: Duration, bytes: u64) {
    let nanos = (per_mib.as_nanos() * u128::from(bytes)) >> 20;
    if nanos > 0 {
        thread::sleep(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)));
    }
}
