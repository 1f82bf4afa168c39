//! A wire: stands for the network or driver of a real carrier.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use kvlane_fabric::{Completion, MemoryRegion, Op, PostedRun, RegisterError, RemoteBytes};
use parking_lot::RwLock;

/// The end of a wire, the number of its region, and how often that was used before.
pub(crate) type Name = (u64, u32, u32);

/// Lays memory of several engines of this process side by side: each copies to and from what the others have laid there.
#[derive(Debug)]
pub(crate) struct Wire {
    /// Whoever copies holds it for reading: nothing is copied any more of what was taken away.
    laid: RwLock<Laid>,
    ends: AtomicU64,
    /// Posts that it carries before it breaks, or sticks.
    left: AtomicI64,
    sticks: AtomicBool,
    /// Regions of more bytes are refused.
    longest: AtomicU64,
}

#[derive(Debug, Default)]
struct Laid {
    ends: HashSet<u64>,
    memories: HashMap<Name, MemoryRegion>,
    windows: HashSet<Name>,
}

/// Contiguous bytes.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) here: usize,
    pub(crate) there: Name,
    /// The same, or the window through which it is read.
    pub(crate) named: Name,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Part {
    /// Those of a run, which names a region or a window.
    pub(crate) fn add(parts: &mut Vec<Part>, run: &PostedRun, found: &[RemoteBytes<'_>]) {
        let mut here = run.address().addr();
        for RemoteBytes { key, region, generation, offset, len } in found.iter().copied() {
            // As its registrar has answered.
            let end = key.try_into().map_or(u64::MAX, u64::from_le_bytes);
            let (there, named) = ((end, region, generation), (end, run.region, run.generation));
            parts.push(Part { here, there, named, offset, len });
            here += len as usize;
        }
    }
}

impl Wire {
    pub(crate) fn new() -> Wire {
        Wire {
            laid: RwLock::default(),
            ends: AtomicU64::new(0),
            left: AtomicI64::new(i64::MAX),
            sticks: AtomicBool::new(false),
            longest: AtomicU64::new(u64::MAX),
        }
    }

    pub(crate) fn breaks_after(&self, posts: i64) {
        self.left.store(posts, Ordering::SeqCst);
    }

    pub(crate) fn sticks_after(&self, posts: i64) {
        self.sticks.store(true, Ordering::SeqCst);
        self.left.store(posts, Ordering::SeqCst);
    }

    pub(crate) fn refuses_more_than(&self, bytes: u64) {
        self.longest.store(bytes, Ordering::SeqCst);
    }

    /// Posts that it still carries; below 0: those that it was to carry since it is broken.
    pub(crate) fn left(&self) -> i64 {
        self.left.load(Ordering::SeqCst)
    }

    /// Regions that lie there.
    pub(crate) fn count(&self) -> usize {
        self.laid.read().memories.len()
    }

    /// Which wire it is.
    pub(crate) fn name(&self) -> Vec<u8> {
        std::ptr::from_ref(self).addr().to_le_bytes().to_vec()
    }

    pub(crate) fn new_end(&self) -> u64 {
        let end = self.ends.fetch_add(1, Ordering::SeqCst);
        self.laid.write().ends.insert(end);
        end
    }

    pub(crate) fn lay(&self, name: Name, region: MemoryRegion) -> Result<(), RegisterError> {
        let longest = self.longest.load(Ordering::SeqCst);
        if region.len > longest {
            let why = format!("a region of {} bytes, and {longest} are the most", region.len);
            return Err(RegisterError { carrier: "toy", why });
        }
        self.laid.write().memories.insert(name, region);
        Ok(())
    }

    pub(crate) fn show(&self, name: Name) {
        self.laid.write().windows.insert(name);
    }

    pub(crate) fn take_away(&self, name: Name) {
        let mut laid = self.laid.write();
        laid.memories.remove(&name);
        laid.windows.remove(&name);
    }

    /// Takes away all of an end, unless somebody copies right now.
    pub(crate) fn try_leave(&self, end: u64) -> bool {
        let Some(mut laid) = self.laid.try_write() else { return false };
        laid.ends.remove(&end);
        laid.memories.retain(|name, _| name.0 != end);
        true
    }

    pub(crate) fn is_stuck(&self) -> bool {
        self.sticks.load(Ordering::SeqCst) && self.left() <= 0
    }

    /// Copies these, here as the first of both sides. A wire that breaks has carried a part.
    pub(crate) fn carry(&self, op: Op, parts: &[Part]) -> Completion {
        let laid = self.laid.read();
        let breaks = self.left.fetch_sub(1, Ordering::SeqCst) <= 0;
        for part in parts {
            if !laid.ends.contains(&part.there.0) {
                return Completion::Unknown;
            }
            let memory = laid.memories.get(&part.there);
            let memory = memory.filter(|memory| op == Op::Read || memory.is_writable);
            let is_shown = part.named == part.there || laid.windows.contains(&part.named);
            let Some(memory) = memory.filter(|memory| is_shown && part.offset + part.len <= memory.len)
            else {
                return Completion::Refused;
            };
            let there = (memory.address + part.offset) as usize;
            let (from, to) = if op == Op::Write { (part.here, there) } else { (there, part.here) };
            let (from, to) =
                (std::ptr::with_exposed_provenance::<u8>(from), std::ptr::with_exposed_provenance_mut(to));
            // SAFETY: both are inside registered regions. The one here belongs to the post; that of the other engine is not
            // given back before it was taken away from here, for which nobody may be copying.
            unsafe { std::ptr::copy(from, to, part.len as usize) };
            if breaks {
                return Completion::Unknown;
            }
        }
        Completion::Placed
    }
}
