// Combine: what experts made of rows goes back to the ranks of their tokens, which sum it up.

#pragma once

#include "group.cuh"
#include "wait.cuh"

namespace {

template <NumberKind kind>
struct Number {
    static constexpr u32 kElements = kind == kF32 ? 4 : 8;
    DEVICE static void add(float* sums, const uint4& unit, float weight, bool is_weighted) {
        const u32 words[4] = {unit.x, unit.y, unit.z, unit.w};
        UNROLL
        for (u32 i = 0; i < 4; ++i) {
            float low, high = 0;
            if (kind == kF32) {
                low = float_of_bits(words[i]);
            } else if (kind == kBf16) {
                low = float_of_bits(words[i] << 16);
                high = float_of_bits(words[i] & 0xffff0000u);
            } else {
                low = float_of_half(words[i] & 0xffff);
                high = float_of_half(words[i] >> 16);
            }
            if (kind == kF32) {
                sums[i] = is_weighted ? times_plus(weight, low, sums[i]) : plus(sums[i], low);
            } else {
                sums[2 * i] = is_weighted ? times_plus(weight, low, sums[2 * i]) : plus(sums[2 * i], low);
                sums[2 * i + 1] = is_weighted ? times_plus(weight, high, sums[2 * i + 1]) : plus(sums[2 * i + 1], high);
            }
        }
    }
    DEVICE static uint4 round(const float* sums) {
        u32 words[4];
        UNROLL
        for (u32 i = 0; i < 4; ++i) {
            words[i] = kind == kF32    ? bits_of_float(sums[i])
                       : kind == kBf16 ? bfloats_of(sums[2 * i], sums[2 * i + 1])
                                       : halves_of(sums[2 * i], sums[2 * i + 1]);
        }
        return uint4{words[0], words[1], words[2], words[3]};
    }
};

// Units of a thread that are summed at a time, and rows of which it loads them at a time. Many rows wait for each other less if a
// group has more units of each.
template <u32 units, u32 rows, u32 parts>
struct Step {
    static constexpr u32 kUnits = units;
    static constexpr u32 kRows = rows;
    // Rows of a token's sum.
    static constexpr u32 kParts = parts;
};
using OfFew = Step<2, 4, 4>;
using OfMany = Step<4, 2, 1>;

// Units of a row that a thread copies at a time.
constexpr u32 kOfSum = 7;

template <NumberKind kind, u32 units>
DEVICE void clear(float (*sums)[8]) {
    UNROLL
    for (u32 j = 0; j < units; ++j) {
        UNROLL
        for (u32 i = 0; i < Number<kind>::kElements; ++i) sums[j][i] = 0;
    }
}

// The weighted sum of the rows that experts here made of a received token, in the order of k. Units from `first` on. Layout
// `tokens`: the one row, which the caller has summed.
template <NumberKind kind, typename Step>
DEVICE void sum_here(const Parameters& p, const Group& group, u64 received, u32 first, u32 end, uint4* sum) {
    const u64 pairs = received * p.top_k;
    const PerLane positions(p.top_k, -1, [&](u32 k) { return p.positions[pairs + k]; });
    const PerLane weights(p.top_k, 0.f, [&](u32 k) { return p.weights_received[pairs + k]; });
    const bool is_weighted = p.arrangement != kTokens;
    constexpr u32 kUnits = Step::kUnits, kRowsInFlight = Step::kRows;
    float sums[kUnits][8];
    clear<kind, kUnits>(sums);
    u32 left = positions.not_below_zero();
    while (left != 0) {
        u32 ks[kRowsInFlight];
        uint4 units[kRowsInFlight][kUnits];
        UNROLL
        for (u32 u = 0; u < kRowsInFlight; ++u) {
            ks[u] = left != 0 ? lowest_bit(left) : kNowhere;
            left &= left - 1;
        }
        UNROLL
        for (u32 u = 0; u < kRowsInFlight; ++u) {
            if (ks[u] == kNowhere) continue;
            const char* row = p.y + static_cast<u64>(positions[ks[u]]) * p.sum_bytes;
            UNROLL
            for (u32 j = 0; j < kUnits; ++j) {
                const u32 unit = first + j * group.size;
                if (unit < end) units[u][j] = load_unit(row + static_cast<u64>(unit) * kUnit);
            }
        }
        UNROLL
        for (u32 u = 0; u < kRowsInFlight; ++u) {
            if (ks[u] == kNowhere) continue;
            const float weight = weights[ks[u]];
            UNROLL
            for (u32 j = 0; j < kUnits; ++j) {
                if (first + j * group.size < end) Number<kind>::add(sums[j], units[u][j], weight, is_weighted);
            }
        }
    }
    UNROLL
    for (u32 j = 0; j < kUnits; ++j) sum[j] = Number<kind>::round(sums[j]);
}

// Another rank's row that is sent back, in the order of ranks and slots. Exact and of few rows: a k of it.
struct Back {
    u32 source, slot, k;
    bool is_one;
    u64 received;
    // `counts`: rows of each rank.
    template <typename Counts>
    DEVICE Back(const Parameters& p, const Counts& counts, u32 task, u32 each) {
        const u32 row = each > 1 ? divided(task, p.top_k_inverse) : task;
        k = task - row * each;
        slot = divided(row, p.others_inverse);
        source = p.rank + 1 + row - slot * (p.ranks - 1);
        source -= source < p.ranks ? 0 : p.ranks;
        is_one = slot < counts[source];
        received = static_cast<u64>(source) * p.max_tokens + slot;
        if (is_one && each > 1) is_one = position(p, k) >= 0;
    }
    DEVICE i32 position(const Parameters& p, u32 k) const { return p.positions[received * p.top_k + k]; }
};

// Sends back the row of an expert.
DEVICE void send_pair(const Parameters& p, const Group& group, const Back& back, u64 number, u32 k, i32 position) {
    const u64 pair = pair_index(p, number, p.tokens_received[back.received], k);
    char* row = p.heap[back.source] + p.pairs + pair * p.sum_stride;
    copy_row<kOfSum>(group, row, p.y + static_cast<u64>(position) * p.sum_bytes, p.sum_bytes);
}

// Says that it is there.
DEVICE void tell_pair(const Parameters& p, const Back& back, u64 number, u32 k) {
    const u64 pair = pair_index(p, number, p.tokens_received[back.received], k);
    store_release(word_at(p, back.source, p.pair_words + pair * sizeof(u64)), number);
}

// Sends back the sum over the experts here.
template <NumberKind kind, typename Step>
DEVICE void send_sum(const Parameters& p, const Group& group, const Back& back, u64 number) {
    constexpr u32 kUnits = Step::kUnits;
    const u32 units = p.sum_bytes / kUnit;
    char* row = p.heap[back.source] + p.sums + slot_index(p, number, p.rank, back.slot) * p.sum_stride;
    for (u32 first = group.lane; first - group.lane < units; first += kUnits * group.size) {
        uint4 sum[kUnits];
        sum_here<kind, Step>(p, group, back.received, first, units, sum);
        UNROLL
        for (u32 j = 0; j < kUnits; ++j) {
            const u32 unit = first + j * group.size;
            if (unit < units) store_unit(row + static_cast<u64>(unit) * kUnit, sum[j]);
        }
    }
}

DEVICE void tell_sum(const Parameters& p, const Back& back, u64 number) {
    const u64 index = slot_index(p, number, p.rank, back.slot);
    store_release(word_at(p, back.source, p.sum_words + index * sizeof(u64)), number);
}

template <NumberKind kind, bool is_exact, typename Step, typename Counts>
DEVICE void send_back(const Parameters& p, u64 number, const Counts& counts, u32 of_role, u32 in_role) {
    if (p.ranks == 1) return;
    const Group group(p.send_group_bits, of_role, in_role, false);
    // With few rows each pair is a task, so more groups have one; with many a group waits once for all pairs of a row.
    const u32 each = is_exact && p.is_late ? p.top_k : 1;
    u32 most = 0;
    ROLLED for (u32 source = 0; source < p.ranks; ++source) {
        const u32 count = counts[source];
        if (source != p.rank && count > most) most = count;
    }
    const u32 tasks = most * (p.ranks - 1) * each;
    u32 rows = 0;
    for (u32 task = group.first; task < tasks; task += group.step) {
        const Back back(p, counts, task, each);
        if (!back.is_one) continue;
        if (!is_exact) {
            send_sum<kind, Step>(p, group, back, number);
            ++rows;
        } else if (each > 1) {
            send_pair(p, group, back, number, back.k, back.position(p, back.k));
            ++rows;
        } else {
            ROLLED for (u32 k = 0; k < p.top_k; ++k) {
                const i32 position = back.position(p, k);
                if (position < 0) continue;
                send_pair(p, group, back, number, k, position);
                ++rows;
            }
        }
        if (p.is_late) continue;
        group.sync();
        if (!is_exact) {
            if (group.lane == 0) tell_sum(p, back, number);
        } else {
            ROLLED for (u32 k = group.lane; k < p.top_k; k += group.size) {
                if (back.position(p, k) >= 0) tell_pair(p, back, number, k);
            }
        }
    }
    count_rows(p, group, kRowsSent, rows);
    if (!p.is_late) return;
    // All words after all rows: with few rows a group that would signal the first waits for it before the second.
    group.sync();
    for (u64 task = group.first + static_cast<u64>(group.lane) * group.step; task < tasks;
         task += static_cast<u64>(group.size) * group.step) {
        // Each thread has another one, so it asks the memory.
        const Back back(p, p.received, static_cast<u32>(task), each);
        if (!back.is_one) continue;
        if (is_exact) {
            tell_pair(p, back, number, back.k);
        } else {
            tell_sum(p, back, number);
        }
    }
}

// Whether this rank, which has rows of its own in the dispatch, had room for it: without room it received none.
DEVICE bool has_own_rows(const Parameters& p) { return load_once(p.received + p.rank) > 0; }

// Waits until all rows of a token are there. Each thread waits for some. False: one of its does not come.
template <bool is_exact>
DEVICE bool wait_for_sums(const Parameters& p, const Group& group, u64 number, u32 token) {
    bool are_there = true;
    for (u32 i = group.lane; i < (is_exact ? p.top_k : p.ranks); i += group.size) {
        if (is_exact) {
            const i32 expert = p.expert[token * p.top_k + i];
            const u32 rank = divided(static_cast<u32>(expert), p.experts_a_rank_inverse);
            if (expert < 0) continue;
            if (rank == p.rank) {
                are_there = are_there && has_own_rows(p);
                continue;
            }
            const u64 offset = p.pair_words + pair_index(p, number, token, i) * sizeof(u64);
            are_there = wait_for_sum(p, word_at(p, p.rank, offset), rank, number) && are_there;
        } else {
            const u32 slot = p.slot[token * p.ranks + i];
            if (slot == kNowhere) continue;
            if (i == p.rank) {
                are_there = are_there && has_own_rows(p);
                continue;
            }
            const u64 offset = p.sum_words + slot_index(p, number, i, slot) * sizeof(u64);
            are_there = wait_for_sum(p, word_at(p, p.rank, offset), i, number) && are_there;
        }
    }
    return are_there;
}

// Instead of a sum that does not come: NaN, whatever the type.
DEVICE void write_no_sum(const Parameters& p, const Group& group, char* out) {
    constexpr u32 kNan = 0x7fff7fff;
    for (u32 unit = group.lane; unit < p.sum_bytes / kUnit; unit += group.size) {
        store_unit(out + static_cast<u64>(unit) * kUnit, uint4{kNan, kNan, kNan, kNan});
    }
}

// Instead of an address: no row goes into the sum there, or the sum over this rank's experts, which is no row.
constexpr u64 kNoRow = 0;
constexpr u64 kOwnSum = 1;

// The address of a row that goes into a token's sum, for a k or for a rank.
template <bool is_exact>
DEVICE u64 part_of(const Parameters& p, u64 number, u32 token, u32 own, u32 index) {
    const char* here = p.heap[p.rank];
    if (!is_exact) {
        const u32 slot = p.slot[token * p.ranks + index];
        if (slot == kNowhere) return kNoRow;
        if (index == p.rank) return kOwnSum;
        return reinterpret_cast<u64>(here + p.sums + slot_index(p, number, index, slot) * p.sum_stride);
    }
    const i32 expert = p.expert[token * p.top_k + index];
    if (expert < 0) return kNoRow;
    if (static_cast<u32>(expert) - p.rank * p.experts_a_rank >= p.experts_a_rank) {
        return reinterpret_cast<u64>(here + p.pairs + pair_index(p, number, token, index) * p.sum_stride);
    }
    const i32 position = p.positions[(static_cast<u64>(p.rank) * p.max_tokens + own) * p.top_k + index];
    return position < 0 ? kNoRow : reinterpret_cast<u64>(p.y + static_cast<u64>(position) * p.sum_bytes);
}

// Sums up this rank's tokens.
template <NumberKind kind, bool is_exact, typename Step>
DEVICE void sum_tokens(const Parameters& p, u64 number, u32 of_role, u32 in_role) {
    constexpr u32 kUnits = Step::kUnits, kParts = Step::kParts;
    const Group group(p.receive_group_bits, of_role, in_role, true);
    const u32 units = p.sum_bytes / kUnit, parts = is_exact ? p.top_k : p.ranks;
    for (u32 token = group.first; token < p.tokens; token += group.step) {
        u32 own = p.slot[token * p.ranks + p.rank];
        // Without room, nothing says where this rank's own rows stand.
        if (!is_exact && !has_own_rows(p)) own = kNowhere;
        const u64 own_received = static_cast<u64>(p.rank) * p.max_tokens + own;
        char* out = p.out + static_cast<u64>(token) * p.sum_bytes;
        // Known before the wait.
        const PerLane rows(parts, kNoRow, [&](u32 index) { return part_of<is_exact>(p, number, token, own, index); });
        const PerLane weights(
            is_exact ? p.top_k : 0, 0.f, [&](u32 k) { return p.own_weights[token * p.top_k + k]; });
        for (u32 first = group.lane; first - group.lane < units; first += kUnits * group.size) {
            // The sum over this rank's experts, before the wait.
            uint4 own_sum[kUnits];
            if (!is_exact && own != kNowhere) sum_here<kind, Step>(p, group, own_received, first, units, own_sum);
            if (first == group.lane) {
                const bool are_there = wait_for_sums<is_exact>(p, group, number, token);
                if (group.any(!are_there)) {
                    write_no_sum(p, group, out);
                    break;
                }
            }
            float sums[kUnits][8];
            clear<kind, kUnits>(sums);
            ROLLED for (u32 begin = 0; begin < parts; begin += kParts) {
                u64 row[kParts];
                uint4 loaded[kParts][kUnits];
                UNROLL
                for (u32 u = 0; u < kParts; ++u) {
                    row[u] = begin + u < parts ? rows[begin + u] : kNoRow;
                    UNROLL
                    for (u32 j = 0; j < kUnits; ++j) {
                        const u32 unit = first + j * group.size;
                        if (row[u] == kOwnSum) {
                            loaded[u][j] = own_sum[j];
                        } else if (row[u] != kNoRow && unit < units) {
                            loaded[u][j] = load_unit(reinterpret_cast<const char*>(row[u]) + static_cast<u64>(unit) * kUnit);
                        }
                    }
                }
                UNROLL
                for (u32 u = 0; u < kParts; ++u) {
                    if (row[u] == kNoRow) continue;
                    const float weight = is_exact ? weights[begin + u] : 0.f;
                    UNROLL
                    for (u32 j = 0; j < kUnits; ++j) Number<kind>::add(sums[j], loaded[u][j], weight, is_exact);
                }
            }
            UNROLL
            for (u32 j = 0; j < kUnits; ++j) {
                const u32 unit = first + j * group.size;
                if (unit < units) store_unit(out + static_cast<u64>(unit) * kUnit, Number<kind>::round(sums[j]));
            }
        }
    }
    if (of_role == 0 && thread() < kWarp) {
        // Rows that others sent back, by one warp: for each expert, or for each rank, of theirs.
        u32 rows = 0;
        ROLLED for (u32 i = thread(); i < (is_exact ? p.experts : p.ranks); i += kWarp) {
            const u32 rank = is_exact ? divided(i, p.experts_a_rank_inverse) : i;
            if (rank != p.rank) rows += is_exact ? p.expert_counts[i] : p.sent[i];
        }
        const u32 all = of_last_lane(sum_below(rows) + rows);
        if (thread() == 0 && all > 0) add_global(p.stats + kRowsReceived, all);
    }
}

template <NumberKind kind, bool is_exact>
DEVICE void combine(const Parameters& p) {
    // All that a sender waits for, at a time.
    const u64 number = load_once(p.number);
    const PerLane counts(p.ranks, 0u, [&](u32 rank) { return load_once(p.received + rank); });
    if (has_block_failed(p)) return;
    const Role role(p);
    if ((p.phases & kReceive) && block() == 0 && thread() == 0) add_global(p.stats + kCombines, 1);
    if (is_exact || p.is_late) {
        if (role.sends) send_back<kind, is_exact, OfFew>(p, number, counts, role.of_senders, role.senders);
        if (role.receives) sum_tokens<kind, is_exact, OfFew>(p, number, role.of_receivers, role.receivers);
    } else {
        if (role.sends) send_back<kind, is_exact, OfMany>(p, number, counts, role.of_senders, role.senders);
        if (role.receives) sum_tokens<kind, is_exact, OfMany>(p, number, role.of_receivers, role.receivers);
    }
}

}  // namespace
