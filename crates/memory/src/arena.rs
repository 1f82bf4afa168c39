//! [`Arena`]: the pool's memory. It is one sealed memfd, mapped, faulted in before the first use, and shared by
//! descriptor.
//!
//! Several processes, the kernel and GPUs read and write the pool's bytes by agreement (claims, leases). Every copy is
//! checked to lie inside the pool. A copy at a wrong offset tears bytes, which the checksum finds, but harms no other
//! memory. So copies by offset are safe to call, and only a reference to pool bytes ([`Arena::bytes_at`]) is not.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use bytesize::ByteSize;
use kvlane_block::PoolOffset;
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::Advice;
use thiserror::Error;

use crate::available::available_memory;
use crate::hugepages::{self, HUGE_BYTES};
use crate::mapping::Mapping;
use crate::numa;

/// Seals of the pool's memfd. No holder of a descriptor can change its size, or add seals, such as one against our own
/// writes.
pub(crate) const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
/// Bytes that one thread faults in before it reports progress.
const CHUNK_BYTES: u64 = 64 << 20;

/// Whether the pool uses huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HugePages {
    /// Reserved 2 MB pages if enough are free, or else transparent ones if they are allowed, or else ordinary pages.
    #[default]
    Auto,
    /// Reserved 2 MB pages, or an error that says how to reserve them.
    On,
    /// Ordinary pages, even if huge ones are free.
    Off,
}

/// Whether the pool is spread over NUMA nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Numa {
    /// An equal contiguous part on each node that has memory.
    #[default]
    Auto,
    /// Left to the kernel.
    Off,
}

/// Argument of [`Arena::create`].
#[derive(Debug, Clone)]
pub struct ArenaOptions {
    /// Size in bytes; rounded up to the page size in use.
    pub bytes: u64,
    /// Whether to use pages of 2 MB, which take fewer page faults and table walks.
    pub hugepages: HugePages,
    /// Whether to spread the arena over the NUMA nodes.
    pub numa: Numa,
    /// Threads that fault the arena in; 0 counts as 1.
    pub threads: usize,
}

/// Why an arena cannot be made.
#[derive(Debug, Error)]
pub enum ArenaError {
    /// The options request 0 bytes.
    #[error("a pool of 0 bytes holds nothing; choose a larger size")]
    Empty,
    /// The machine or its control group has less memory available.
    #[error(
        "a pool of {} is larger than the {} of memory that are available; choose a smaller size, or free some memory",
        human_size(*asked), human_size(*available)
    )]
    LargerThanMemory {
        /// Bytes that the options request.
        asked: u64,
        /// Bytes that are available.
        available: u64,
    },
    /// The options demand huge pages, and too few are free.
    #[error(
        "huge pages are demanded, but of {needed} 2 MB pages only {free} are free; reserve them with `sysctl vm.nr_hugepages={nr_hugepages}` or leave huge pages on auto"
    )]
    NoHugePages {
        /// Pages that the pool needs.
        needed: u64,
        /// Pages that are free.
        free: u64,
        /// The value of vm.nr_hugepages that makes enough free.
        nr_hugepages: u64,
    },
    /// The kernel has no memory for a page.
    #[error("the pool cannot be faulted in at offset {offset}: {errno}")]
    Fault {
        /// Start of the chunk that failed, in bytes from the arena's start.
        offset: u64,
        /// The kernel's error.
        errno: Errno,
    },
    /// The kernel refused to make or map the memory.
    #[error("the pool of {} cannot be made: {call}: {source}", human_size(*bytes))]
    Refused {
        /// The system call, by name.
        call: &'static str,
        /// Bytes of the pool.
        bytes: u64,
        /// The kernel's error.
        source: io::Error,
    },
}

/// A rounded size for people, such as "24.5 GB".
fn human_size(bytes: u64) -> impl std::fmt::Display {
    ByteSize::b(bytes).display().si()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pages {
    Ordinary,
    Transparent,
    Reserved,
}

impl Pages {
    fn bytes(self) -> u64 {
        match self {
            Pages::Ordinary => rustix::param::page_size() as u64,
            Pages::Transparent | Pages::Reserved => HUGE_BYTES,
        }
    }
}

/// One memfd, mapped shared and writable in this process. Its size is sealed, so no holder of a descriptor can shrink
/// it and make an access here fault.
#[derive(Debug)]
pub struct Arena {
    mapping: Mapping,
    memfd: OwnedFd,
    pages: Pages,
    nodes: Vec<Range<u64>>,
}

impl Arena {
    /// Makes an arena and faults all of it in. Calls `progress` from any thread with the bytes faulted in so far.
    pub fn create(options: &ArenaOptions, progress: &(dyn Fn(u64) + Sync)) -> Result<Arena, ArenaError> {
        if options.bytes == 0 {
            return Err(ArenaError::Empty);
        }
        if options.hugepages != HugePages::Off {
            let needed = options.bytes.div_ceil(HUGE_BYTES);
            let hugepages::Reserved { total, free } = hugepages::reserved();
            if needed <= free {
                match Arena::with_pages(Pages::Reserved, options, progress) {
                    Err(error) if options.hugepages == HugePages::Auto => {
                        // Log: huge pages are reserved but cannot be used; the pool uses ordinary pages, which is
                        // a little slower. Do: mend what the error names, such as a container's limit.
                        tracing::warn!(%error, free, needed, "reserved huge pages unusable; pool uses other pages");
                    }
                    arena => return arena,
                }
            } else if options.hugepages == HugePages::On {
                let nr_hugepages = total.saturating_add(needed - free);
                return Err(ArenaError::NoHugePages { needed, free, nr_hugepages });
            }
        }
        // Check before allocating, because the kernel does not refuse too much memory: it kills the process. Reserved
        // pages are not part of the available memory, so they need no check.
        if let Some(available) = available_memory()
            && options.bytes > available
        {
            return Err(ArenaError::LargerThanMemory { asked: options.bytes, available });
        }
        let transparent = options.hugepages == HugePages::Auto && hugepages::transparent_for_shared_memory();
        let pages = if transparent { Pages::Transparent } else { Pages::Ordinary };
        let mut arena = Arena::with_pages(pages, options, progress)?;
        if transparent && !hugepages::mostly_huge(arena.base() as u64, arena.bytes()) {
            arena.pages = Pages::Ordinary;
        }
        Ok(arena)
    }

    fn with_pages(
        pages: Pages,
        options: &ArenaOptions,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Arena, ArenaError> {
        let bytes = options
            .bytes
            .checked_next_multiple_of(pages.bytes())
            .filter(|bytes| *bytes <= i64::MAX as u64)
            .ok_or(ArenaError::LargerThanMemory { asked: options.bytes, available: i64::MAX as u64 })?;
        let refused = |call| move |errno: Errno| ArenaError::Refused { call, bytes, source: errno.into() };

        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        if pages == Pages::Reserved {
            flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        }
        let memfd = rustix::fs::memfd_create("kvlane-pool", flags).map_err(refused("memfd_create"))?;
        rustix::fs::ftruncate(&memfd, bytes).map_err(refused("ftruncate"))?;
        // With this mode a holder of the same user cannot reopen a read-only descriptor for writing.
        rustix::fs::fchmod(&memfd, Mode::RUSR).map_err(refused("fchmod"))?;
        rustix::fs::fcntl_add_seals(&memfd, SEALS).map_err(refused("fcntl(F_ADD_SEALS)"))?;
        let mapping = Mapping::new(memfd.as_fd(), bytes, true).map_err(|source| ArenaError::Refused {
            call: "mmap",
            bytes,
            source,
        })?;

        let mut arena = Arena { mapping, memfd, pages, nodes: numa::split(bytes, 1, 1) };
        arena.advise();
        if options.numa == Numa::Auto {
            arena.spread_over_nodes();
        }
        arena.fault_in(options.threads, progress)?;
        Ok(arena)
    }

    fn advise(&self) {
        let advise = |advice| {
            // SAFETY: the range is the whole mapping of this arena; both kinds of advice leave its bytes alone.
            unsafe { rustix::mm::madvise(self.base().cast(), self.bytes() as usize, advice) }
        };
        if self.pages == Pages::Transparent
            && let Err(errno) = advise(Advice::LinuxHugepage)
        {
            tracing::debug!(%errno, "transparent huge pages refused for the pool");
        }
        if let Err(errno) = advise(Advice::LinuxDontDump) {
            tracing::debug!(%errno, "pool cannot be excluded from core dumps");
        }
    }

    fn spread_over_nodes(&mut self) {
        let nodes = numa::nodes_with_memory();
        if nodes.len() < 2 {
            return;
        }
        let ranges = numa::split(self.bytes(), nodes.len(), HUGE_BYTES);
        for (range, node) in ranges.iter().zip(nodes) {
            // SAFETY: the range lies inside the mapping and begins at a multiple of 2 MB from its page-aligned base.
            let preferred = unsafe {
                numa::prefer_node(self.base().add(range.start as usize), range.end - range.start, node)
            };
            if let Err(error) = preferred {
                // Log: the pool works, but lies unevenly on the host's memory nodes, so some copies are slower.
                // Do: allow mbind in the container, or set `--numa off`.
                tracing::warn!(%error, node, "pool not spread over NUMA nodes: the kernel refused to place a part");
                return;
            }
        }
        self.nodes = ranges;
    }

    fn fault_in(&self, threads: usize, progress: &(dyn Fn(u64) + Sync)) -> Result<(), ArenaError> {
        let bytes = self.bytes();
        let (next, done) = (AtomicU64::new(0), AtomicU64::new(0));
        let failed = AtomicBool::new(false);
        let failure = Mutex::new(None);
        let work = || {
            while !failed.load(Ordering::Relaxed) {
                let offset = next.fetch_add(CHUNK_BYTES, Ordering::Relaxed);
                if offset >= bytes {
                    break;
                }
                let length = CHUNK_BYTES.min(bytes - offset);
                match self.fault_in_chunk(offset, length) {
                    Ok(()) => progress(done.fetch_add(length, Ordering::Relaxed) + length),
                    Err(errno) => {
                        failed.store(true, Ordering::Relaxed);
                        let mut failure = failure.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                        *failure = Some(ArenaError::Fault { offset, errno });
                    }
                }
            }
        };
        let helpers = threads.saturating_sub(1).min((bytes / CHUNK_BYTES) as usize);
        thread::scope(|scope| {
            for _ in 0..helpers {
                if let Err(error) = thread::Builder::new().spawn_scoped(scope, work) {
                    // Log: the daemon starts more slowly; nothing else changes. Do: raise the limit of threads
                    // (ulimit -u, pids of the container).
                    tracing::warn!(%error, threads, "cannot start a thread; faulting the pool in with fewer");
                    break;
                }
            }
            work();
        });
        failure.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()).map_or(Ok(()), Err)
    }

    /// Allocates memory for every page of a range, or returns the error that touching the page would turn into SIGBUS.
    fn fault_in_chunk(&self, offset: u64, length: u64) -> Result<(), Errno> {
        loop {
            // SAFETY: the range lies inside the mapping; populating keeps the bytes of pages that exist.
            let populated = unsafe {
                let start = self.base().add(offset as usize);
                rustix::mm::madvise(start.cast(), length as usize, Advice::LinuxPopulateWrite)
            };
            match populated {
                Err(Errno::INTR | Errno::AGAIN) => {}
                // Linux before 5.14 does not know the advice: allocate the pages through the file.
                Err(Errno::INVAL) => {
                    match rustix::fs::fallocate(&self.memfd, FallocateFlags::empty(), offset, length) {
                        Err(Errno::INTR) => {}
                        allocated => return allocated,
                    }
                }
                populated => return populated,
            }
        }
    }

    /// Size in bytes, after rounding.
    pub fn bytes(&self) -> u64 {
        self.mapping.bytes()
    }

    /// The page size in use, as text: "4 kB", "2 MB (hugetlb)", "2 MB (transparent)".
    pub fn page_size(&self) -> &'static str {
        match (self.pages, self.pages.bytes()) {
            (Pages::Reserved, _) => "2 MB (hugetlb)",
            (Pages::Transparent, _) => "2 MB (transparent)",
            (Pages::Ordinary, 16384) => "16 kB",
            (Pages::Ordinary, 65536) => "64 kB",
            (Pages::Ordinary, _) => "4 kB",
        }
    }

    /// Whether most of the arena is on pages of 2 MB.
    pub fn is_huge(&self) -> bool {
        self.pages != Pages::Ordinary
    }

    /// The byte ranges that each lie on one NUMA node, in order. Together they are the arena.
    pub fn nodes(&self) -> &[Range<u64>] {
        &self.nodes
    }

    /// Address of the first byte in this process.
    pub fn base(&self) -> *mut u8 {
        self.mapping.base()
    }

    /// A new descriptor of the arena, to be sent to another process. Only a writable one allows writes.
    pub fn descriptor(&self, writable: bool) -> io::Result<OwnedFd> {
        if writable {
            return self.memfd.try_clone();
        }
        let path = format!("/proc/self/fd/{}", self.memfd.as_raw_fd());
        Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// The bytes of an extent.
    ///
    /// # Safety
    /// No process writes `offset..offset + len` while the slice lives. So the extent is sealed, or its claim has been
    /// committed, and it is not freed before the slice is dropped.
    ///
    /// # Panics
    /// If the range is not inside the arena.
    pub unsafe fn bytes_at(&self, offset: PoolOffset, len: u64) -> &[u8] {
        assert!(
            offset.end_inside(len, self.bytes()).is_some(),
            "{len} bytes at {offset} are not inside {} bytes",
            self.bytes()
        );
        // SAFETY: the range is inside the mapping, which lives as long as self. By the caller's promise no process
        // writes it meanwhile. Every page is faulted in and the size is sealed, so reading cannot fault.
        unsafe { std::slice::from_raw_parts(self.base().add(offset.0 as usize), len as usize) }
    }
}
