//! NUMA: cuts the pool into a part for each node, and places each part on its node.

use std::fs;
use std::io;
use std::ops::Range;

/// Ids of the nodes that have memory, ascending. Empty if the kernel does not say.
pub(crate) fn nodes_with_memory() -> Vec<usize> {
    fs::read_to_string("/sys/devices/system/node/has_memory")
        .map(|text| parse_list(&text))
        .unwrap_or_default()
}

/// Parses the kernel's list format, such as "0-1,4".
fn parse_list(text: &str) -> Vec<usize> {
    text.trim()
        .split(',')
        .filter_map(|part| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            Some(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?)
        })
        .flatten()
        .collect()
}

/// Cuts `bytes` into `parts` contiguous ranges of nearly equal length, at multiples of `align`.
pub(crate) fn split(bytes: u64, parts: usize, align: u64) -> Vec<Range<u64>> {
    let parts = parts.max(1) as u64;
    let cut = |part: u64| if part == parts { bytes } else { bytes / parts * part / align * align };
    (0..parts).map(|part| cut(part)..cut(part + 1)).filter(|range| !range.is_empty()).collect()
}

/// Sets a node as preferred for the pages of a mapped range; the kernel uses other nodes when it is full.
///
/// # Safety
/// `addr..addr + bytes` is mapped in this process and page-aligned.
pub(crate) unsafe fn prefer_node(addr: *mut u8, bytes: u64, node: usize) -> io::Result<()> {
    const BITS: usize = u64::BITS as usize;
    let mut mask = vec![0u64; node / BITS + 1];
    mask[node / BITS] = 1 << (node % BITS);
    // Prefer the node instead of binding to it, because a full node must not end in the OOM killer.
    // SAFETY: the caller vouches for the range. The mask holds the bits that maxnode announces (the kernel reads
    // maxnode - 1 bits). mbind changes where pages come from, not their bytes.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            addr,
            bytes as usize,
            libc::MPOL_PREFERRED,
            mask.as_ptr(),
            mask.len() * BITS + 1,
            0u32,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // one part
mod tests {
    use super::*;

    #[test]
    fn lists_of_the_kernel() {
        assert_eq!(parse_list("0\n"), [0]);
        assert_eq!(parse_list("0-2,5,7-8\n"), [0, 1, 2, 5, 7, 8]);
        assert_eq!(parse_list("\n"), []);
    }

    #[test]
    fn parts_are_contiguous_aligned_and_complete() {
        assert_eq!(split(100, 3, 16), [0..32, 32..64, 64..100]);
        assert_eq!(split(100, 1, 16), [0..100]);
        // Too small to cut: one range, no empty ones.
        assert_eq!(split(10, 2, 16), [0..10]);
    }
}
