// The parameters of all kernels, and the memory of a rank that they name.

#pragma once

#include "machine.cuh"

namespace {

constexpr u32 kThreads = 512;
constexpr u32 kPlanThreads = 1024;
constexpr u32 kRanks = 16;
constexpr u32 kTopK = 32;
constexpr u32 kNowhere = ~0u;
constexpr u32 kUnit = 16;
// Units that a thread has in flight.
constexpr u32 kInFlight = 4;
constexpr u32 kExpertsOfPlanBlock = 8;
// Pairs of these experts that a block lists.
constexpr u32 kListed = 8192;

enum Phase : u32 { kSend = 1, kReceive = 2 };
enum Arrangement : u32 { kExperts, kMasked, kTokens };
// Scales that a cast makes are powers of two, and only their exponents, a byte each. Scales that came stand column by column.
enum Scaling : u32 { kPowersOfTwo = 1, kPacked = 2, kByColumn = 4 };
enum NumberKind : u32 { kBf16, kF16, kF32 };
// As crates/moe/src/gpu/watch.rs.
enum Failure : u32 { kNone, kGone, kTimedOut, kOutOfStep, kNonsense, kBadExpert };
enum Stat : u32 { kCombines, kRowsSent, kRowsReceived };
enum Waited : u32 { kCounts, kRows, kSums };

// As crates/moe/src/gpu/parameters.rs.
struct Parameters {
    u32 ranks, rank, top_k, experts;
    u32 experts_a_rank, experts_here, alignment, capacity;
    u32 max_tokens, tokens, id_bytes, arrangement;
    u32 row_bytes, scale_bytes, sum_bytes, phases;
    // Groups of 2^bits threads.
    u32 senders, send_group_bits, receive_group_bits, plan_bytes;
    // Bytes of a piece of scales: 16, 4 or 1, as they are aligned.
    u32 is_late, scale_piece;
    // 2^31 divided by that, rounded up: see `divided`. `others`: ranks but this one. `words`: words of counts of a rank.
    u32 top_k_inverse, experts_a_rank_inverse, ranks_inverse, others_inverse, words_inverse;
    // Bits of `Scaling`.
    u32 scaling;
    // Where senders have room for rows in a block's memory, and for how many; 0: for none.
    u32 bulk_begin, bulk_rows;
    u64 timeout_ns;
    // Offsets in the memory of each rank.
    u64 counts_at, row_words, rows, row_stride, scales_at, rest_at, sum_words, sums, sum_stride, pair_words, pairs;
    // What this call reads and writes.
    const char *ids, *x, *scales, *y;
    const float* weights;
    char *out_rows, *out_scales, *out;
    i32 *out_counts, *out_starts;
    i64* out_ids;
    float* out_weights;
    // Of this dispatch: plan, and what was received.
    u64* number;
    u32 *list, *slot, *place, *sent, *expert_counts;
    i32* expert;
    float* own_weights;
    i32* positions;
    float* weights_received;
    u32 *tokens_received, *received;
    // Of this rank: the number of the dispatch before for each block, whether it has failed, and what the host reads.
    u64* sequence;
    u32* failed;
    u64* stats;  // combines, rows sent, rows received
    struct Control* control;
    char* heap[kRanks];
};
static_assert(sizeof(Parameters) == 120 + 8 + 11 * 8 + 28 * 8 + kRanks * 8, "shared with Rust");

// Pinned memory of the host.
struct Control {
    // A bit for each rank that is gone: it writes no more words.
    u64 gone;
    // Written last.
    u64 failure;
    u32 rank, waited;
    u64 value;
    // The last refusal: rows needed << 32 | rank << 1 | 1.
    u64 refused;
};
static_assert(sizeof(Control) == 40, "shared with Rust");

DEVICE u32 round_up(u32 value, u32 multiple) { return (value + multiple - 1) / multiple * multiple; }
DEVICE u32 least(u32 a, u32 b) { return a < b ? a : b; }
// A number divided by another one, whose inverse is known: exact if their product has at most 31 bits.
DEVICE u32 divided(u32 number, u32 inverse) { return static_cast<u32>(static_cast<u64>(number) * inverse >> 31); }
DEVICE u32 words_of(u32 tokens) { return (tokens + 31) / 32; }

DEVICE u64* word_at(const Parameters& p, u32 rank, u64 offset) { return reinterpret_cast<u64*>(p.heap[rank] + offset); }

// The word of `source`'s rows for an expert of the rank in whose memory it lies; the last one counts slots.
DEVICE u64* count_word(const Parameters& p, u32 rank, u64 number, u32 source, u32 expert) {
    const u64 index = (static_cast<u64>(number & 1) * p.ranks + source) * (p.experts_a_rank + 1) + expert;
    return word_at(p, rank, p.counts_at + index * sizeof(u64));
}

DEVICE u64 slot_index(const Parameters& p, u64 number, u32 rank, u32 slot) {
    return (static_cast<u64>(number & 1) * p.ranks + rank) * p.max_tokens + slot;
}

DEVICE u64 pair_index(const Parameters& p, u64 number, u32 token, u32 k) {
    return (static_cast<u64>(number & 1) * p.max_tokens + token) * p.top_k + k;
}

}  // namespace
