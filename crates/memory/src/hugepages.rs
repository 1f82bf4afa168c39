//! Huge pages of the machine: how many are reserved and free, and whether transparent ones can be had.

use std::fs;

use crate::available::meminfo_bytes;

/// Bytes of a huge page; kvlane uses no other size.
pub(crate) const HUGE_BYTES: u64 = 2 << 20;

/// Reserved 2 MB pages of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reserved {
    pub(crate) total: u64,
    /// Pages that are neither used nor promised to a mapping.
    pub(crate) free: u64,
}

pub(crate) fn reserved() -> Reserved {
    let count = |file: &str| {
        fs::read_to_string(format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{file}"))
            .ok()
            .and_then(|text| text.trim().parse::<u64>().ok())
            .unwrap_or(0)
    };
    Reserved {
        total: count("nr_hugepages"),
        free: count("free_hugepages").saturating_sub(count("resv_hugepages")),
    }
}

/// Whether madvise can give shared memory transparent huge pages.
pub(crate) fn transparent_for_shared_memory() -> bool {
    let setting = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
    ["[advise]", "[always]", "[within_size]"].iter().any(|chosen| setting.contains(chosen))
}

/// Whether most of a mapping of shared memory is in transparent huge pages now. The kernel promises none, so look.
pub(crate) fn mostly_huge(base: u64, bytes: u64) -> bool {
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    huge_bytes(&smaps, base, bytes, "ShmemPmdMapped") >= bytes / 2
}

/// Bytes of a range of private memory that are in transparent huge pages now.
pub(crate) fn private_huge_bytes(base: u64, bytes: u64) -> u64 {
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    huge_bytes(&smaps, base, bytes, "AnonHugePages")
}

/// Sums a counter over the mappings inside a range, because advice and NUMA policies split one mapping into several.
fn huge_bytes(smaps: &str, base: u64, bytes: u64, counter: &str) -> u64 {
    let mut inside = false;
    let mut sum = 0;
    for line in smaps.lines() {
        let start = line.split_once('-').and_then(|(start, _)| u64::from_str_radix(start, 16).ok());
        if let Some(start) = start {
            inside = (base..base + bytes).contains(&start);
        } else if inside {
            sum += meminfo_bytes(line, counter).unwrap_or(0);
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_bytes_are_summed_over_the_parts_of_a_mapping_only() {
        let smaps = "1000-2000 rw-s 00000000 00:01 5 /memfd:kvlane (deleted)\nSize: 4 kB\nShmemPmdMapped:    4 kB\n\
                     2000-3000 rw-s 00000000 00:01 5 /memfd:kvlane (deleted)\nShmemPmdMapped:    2 kB\n\
                     7000-8000 rw-p 00000000 00:00 0\nShmemPmdMapped:    64 kB\n";
        assert_eq!(huge_bytes(smaps, 0x1000, 0x2000, "ShmemPmdMapped"), 6 * 1024);
        assert_eq!(huge_bytes(smaps, 0x4000, 0x1000, "ShmemPmdMapped"), 0);
        assert_eq!(huge_bytes(smaps, 0x1000, 0x2000, "AnonHugePages"), 0);
    }
}
