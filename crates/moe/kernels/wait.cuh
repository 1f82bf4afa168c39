// How a kernel waits for a word of another rank, and notes that this rank fails.

#pragma once

#include "parameters.cuh"

namespace {

// Notes why this rank fails, if nothing else was noted before.
COLD void fail(const Parameters& p, Failure failure, u32 rank, u32 waited, u64 value) {
    if (!claim(p.failed, failure)) return;
    p.control->rank = rank;
    p.control->waited = waited;
    p.control->value = value;
    store_release(&p.control->failure, failure);
}

DEVICE bool has_failed(const Parameters& p) { return load_relaxed(p.failed) != kNone; }

// The same for all threads of a block: they leave together, or meet at all barriers that follow.
DEVICE bool has_block_failed(const Parameters& p) { return any_of_block(has_failed(p)); }

// Waits for a word of this rank's memory. Each 256 looks it looks whether there is an end to that.
template <typename Compare>
DEVICE bool wait(const Parameters& p, const u64* word, u32 from, Waited waited, u64* value, Compare compare) {
    u64 begun = 0;
    for (u32 looks = 1;; ++looks) {
        // Before the word: words that a rank wrote before it left count.
        const bool is_look = looks % 256 == 0;
        const u64 gone = is_look ? load_acquire(&p.control->gone) : 0;
        u64 seen = load_relaxed(word);
        const i64 ahead = compare(seen);
        if (ahead == 0) {
            *value = seen;
            return true;
        }
        if (ahead > 0) {
            fail(p, kOutOfStep, from, waited, seen);
            return false;
        }
        if (!is_look) continue;
        if (has_failed(p)) return false;
        if (gone >> from & 1) {
            fail(p, kGone, from, waited, 0);
            return false;
        }
        const u64 now = now_ns();
        if (begun == 0) begun = now;
        if (now - begun > p.timeout_ns) {
            fail(p, kTimedOut, from, waited, 0);
            return false;
        }
        pause();
    }
}

// Notes that a rank had no room for a dispatch. Later ones work.
COLD void note_refusal(const Parameters& p, u32 rank, u32 needed) {
    store_relaxed(&p.control->refused, static_cast<u64>(needed) << 32 | rank << 1 | 1);
}

// Instead of the number of its dispatch, the word of a sum whose rank had no room: crates/moe/src/refusal.rs.
constexpr u64 kRefused = 1ull << 63;
DEVICE u64 refusal(u64 number, u32 needed) { return kRefused | static_cast<u64>(needed) << 32 | static_cast<u32>(number); }

// Waits for the word of a sum. False: none comes, for good or because its rank had no room.
DEVICE bool wait_for_sum(const Parameters& p, const u64* word, u32 from, u64 number) {
    u64 value;
    const auto compare = [number](u64 seen) {
        // A refusal of another dispatch is an old one.
        const i64 of_refusal = static_cast<u32>(seen) == static_cast<u32>(number) ? 0 : -1;
        return seen & kRefused ? of_refusal : static_cast<i64>(seen - number);
    };
    if (!wait(p, word, from, kSums, &value, compare)) return false;
    if (value & kRefused) {
        note_refusal(p, from, static_cast<u32>(value >> 32) & 0x7fffffff);
        return false;
    }
    return load_acquire(word) != 0;
}

// Waits for the word of a row. What was written before it may be read then.
DEVICE bool wait_for_row(const Parameters& p, const u64* word, u32 from, Waited waited, u64 number) {
    u64 value;
    const auto compare = [number](u64 seen) { return static_cast<i64>(seen - number); };
    return wait(p, word, from, waited, &value, compare) && load_acquire(word) != 0;
}

}  // namespace
