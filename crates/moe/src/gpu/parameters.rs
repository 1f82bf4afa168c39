//! [`Parameters`]: the struct that all kernels take, as kernels/parameters.cuh declares it.

#![allow(unsafe_code, reason = "the bytes of a struct")]

use super::limits::GPU_RANKS_MAX;

/// The launch sends rows.
pub(super) const SEND: u32 = 1;
/// The launch receives rows.
pub(super) const RECEIVE: u32 = 2;
/// Scales of a cast are powers of two.
pub(super) const POWERS_OF_TWO: u32 = 1;
/// A scale is a byte, the exponent.
pub(super) const PACKED: u32 = 2;
/// Scales that came stand column by column.
pub(super) const BY_COLUMN: u32 = 4;

/// Sizes, offsets and device addresses. Fields are as in kernels/parameters.cuh, which says what they are.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Parameters {
    pub(super) ranks: u32,
    pub(super) rank: u32,
    pub(super) top_k: u32,
    pub(super) experts: u32,
    pub(super) experts_a_rank: u32,
    pub(super) experts_here: u32,
    pub(super) alignment: u32,
    pub(super) capacity: u32,
    pub(super) max_tokens: u32,
    pub(super) tokens: u32,
    pub(super) id_bytes: u32,
    pub(super) arrangement: u32,
    pub(super) row_bytes: u32,
    pub(super) scale_bytes: u32,
    pub(super) sum_bytes: u32,
    pub(super) phases: u32,
    pub(super) senders: u32,
    pub(super) send_group_bits: u32,
    pub(super) receive_group_bits: u32,
    pub(super) plan_bytes: u32,
    pub(super) is_late: u32,
    pub(super) scale_piece: u32,
    pub(super) top_k_inverse: u32,
    pub(super) experts_a_rank_inverse: u32,
    pub(super) ranks_inverse: u32,
    pub(super) others_inverse: u32,
    pub(super) words_inverse: u32,
    pub(super) scaling: u32,
    pub(super) bulk_begin: u32,
    pub(super) bulk_rows: u32,
    pub(super) timeout_ns: u64,
    pub(super) offsets: Offsets,
    pub(super) call: Call,
    pub(super) scratch: Scratch,
    pub(super) own: Own,
    pub(super) heap: [u64; GPU_RANKS_MAX],
}

/// Offsets in the memory of each rank.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Offsets {
    pub(super) counts: u64,
    pub(super) row_words: u64,
    pub(super) rows: u64,
    pub(super) row_stride: u64,
    pub(super) scales: u64,
    pub(super) rest: u64,
    pub(super) sum_words: u64,
    pub(super) sums: u64,
    pub(super) sum_stride: u64,
    pub(super) pair_words: u64,
    pub(super) pairs: u64,
}

/// Addresses that a call reads and writes.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Call {
    pub(super) ids: u64,
    pub(super) x: u64,
    pub(super) scales: u64,
    pub(super) y: u64,
    pub(super) weights: u64,
    pub(super) out_rows: u64,
    pub(super) out_scales: u64,
    pub(super) out: u64,
    pub(super) out_counts: u64,
    pub(super) out_starts: u64,
    pub(super) out_ids: u64,
    pub(super) out_weights: u64,
}

/// Addresses of what is kept of a dispatch until it is combined.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Scratch {
    pub(super) number: u64,
    pub(super) list: u64,
    pub(super) slot: u64,
    pub(super) place: u64,
    pub(super) sent: u64,
    pub(super) expert_counts: u64,
    pub(super) expert: u64,
    pub(super) own_weights: u64,
    pub(super) positions: u64,
    pub(super) weights_received: u64,
    pub(super) tokens_received: u64,
    pub(super) received: u64,
}

/// Addresses of what a rank keeps.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Own {
    pub(super) sequence: u64,
    pub(super) failed: u64,
    pub(super) stats: u64,
    pub(super) control: u64,
}

impl Parameters {
    pub(super) fn bytes(&self) -> &[u8] {
        let first = std::ptr::from_ref(self).cast::<u8>();
        // SAFETY: the struct consists of integers, without padding, as the assertion below says.
        unsafe { std::slice::from_raw_parts(first, size_of::<Self>()) }
    }
}

// As kernels/parameters.cuh asserts.
const _: () = assert!(size_of::<Parameters>() == 120 + 8 + 11 * 8 + 28 * 8 + GPU_RANKS_MAX * 8);
const _: () = assert!(std::mem::offset_of!(Parameters, timeout_ns) == 120);
const _: () = assert!(std::mem::offset_of!(Parameters, offsets) == 128);
const _: () = assert!(std::mem::offset_of!(Parameters, heap) == 440);

#[cfg(test)]
mod tests {
    use super::*;

    /// The names of a struct's fields in both files, in order.
    #[test]
    fn fields_have_the_order_of_the_kernels() {
        let source = include_str!("../../kernels/parameters.cuh");
        let begin = source.find("struct Parameters {").unwrap();
        let body = &source[begin..source[begin..].find("};").unwrap() + begin];
        let theirs: Vec<String> = body
            .lines()
            .skip(1)
            .map(|line| line.split("//").next().unwrap().trim())
            .flat_map(|line| line.trim_end_matches(';').split(','))
            .filter_map(|field| field.split([' ', '*']).next_back().map(str::to_owned))
            .filter(|name| !name.is_empty())
            .map(|name| name.split('[').next().unwrap().trim_end_matches("_at").to_owned())
            .collect();
        let text = format!("{:?}", Parameters::default());
        let ours: Vec<String> = text
            .split(['{', ',', '}'])
            .filter_map(|field| field.split_once(':').map(|(name, _)| name.trim().to_owned()))
            .filter(|name| !["offsets", "call", "scratch", "own"].contains(&name.as_str()))
            .collect();
        assert!(ours.len() == 71, "{ours:?}");
        assert_eq!(ours, theirs);
    }
}
