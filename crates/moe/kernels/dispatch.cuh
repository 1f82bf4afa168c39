// Dispatch: this rank's rows to the ranks of their experts, and those of all ranks to their places here.

#pragma once

#include "group.cuh"
#include "plan.cuh"

namespace {

// The weight of a pair of token and k. Without weights combine gets them.
DEVICE float weight_of(const Parameters& p, u32 pair) { return p.weights == nullptr ? 0.f : p.weights[pair]; }

// A number of what goes with a row: for each k the expert at that rank and the place, then the weights, then the token.
DEVICE u32 description(const Parameters& p, const Plan& plan, u32 rank, u32 token, u32 index) {
    if (index < 2 * p.top_k) {
        const u32 pair = token * p.top_k + index / 2;
        const i32 expert = plan.expert[pair];
        if (index % 2 == 1) return expert >= 0 ? plan.place[pair] : 0;
        const u32 here = static_cast<u32>(expert) - rank * p.experts_a_rank;
        return expert >= 0 && here < p.experts_a_rank ? here : kNowhere;
    }
    return index < 3 * p.top_k ? bits_of_float(weight_of(p, token * p.top_k + index - 2 * p.top_k)) : token;
}

DEVICE void send_row(const Parameters& p, const Plan& plan, const Group& group, char* row, u32 rank, u32 token) {
    const char* from = p.x + static_cast<u64>(token) * p.row_bytes;
    const u32 count = p.row_bytes / kUnit, numbers = 3 * p.top_k + 1;
    // All loads before the first store.
    uint4 units[kInFlight];
    load_units(group, units, from, group.lane, count);
    u32 index = group.lane;
    u32 number = index < numbers ? description(p, plan, rank, token, index) : 0;
    copy_pieces(group, p.scale_piece, row + p.scales_at, p.scales + static_cast<u64>(token) * p.scale_bytes, p.scale_bytes);
    store_units(group, units, row, group.lane, count);
    for (u32 first = group.lane + kInFlight * group.size; first - group.lane < count; first += kInFlight * group.size) {
        load_units(group, units, from, first, count);
        store_units(group, units, row, first, count);
    }
    u32* rest = reinterpret_cast<u32*>(row + p.rest_at);
    while (index < numbers) {
        rest[index] = number;
        index += group.size;
        if (index < numbers) number = description(p, plan, rank, token, index);
    }
}

// A row that this rank sends: to whom, and which slot it takes there.
struct Sent {
    u32 rank, slot;
    DEVICE Sent(const Parameters& p, u32 task) {
        slot = divided(task, p.others_inverse);
        rank = p.rank + 1 + task - slot * (p.ranks - 1);
        rank -= rank < p.ranks ? 0 : p.ranks;
    }
    DEVICE u64 index(const Parameters& p, u64 number) const { return slot_index(p, number, p.rank, slot); }
    DEVICE char* row(const Parameters& p, u64 number) const { return p.heap[rank] + p.rows + index(p, number) * p.row_stride; }
    DEVICE u64* word(const Parameters& p, u64 number) const {
        return word_at(p, rank, p.row_words + index(p, number) * sizeof(u64));
    }
};

#ifdef HAS_BULK_COPIES
// A warp's room for a row in the block's memory.
struct BulkRow {
    char* buffer;
    u64* barrier;
    u32 parity;
    DEVICE BulkRow(const Parameters& p, char* memory, bool receives) : parity(0) {
        const u32 warp = thread() / kWarp;
        buffer = memory + warp * p.row_stride;
        barrier = reinterpret_cast<u64*>(memory + p.bulk_rows * p.row_stride) + 2 * warp + receives;
        if (thread() % kWarp == 0) begin_barrier(barrier);
        warp_sync();
    }
    DEVICE void load(const Parameters& p, const char* row, const char* scales) const {
        if (thread() % kWarp != 0) return;
        expect_bytes(barrier, p.row_bytes + p.scale_bytes);
        bulk_load(buffer, row, p.row_bytes, barrier);
        if (p.scale_bytes > 0) bulk_load(buffer + p.scales_at, scales, p.scale_bytes, barrier);
    }
    DEVICE void wait() {
        wait_for_bytes(barrier, parity);
        parity ^= 1;
    }
};

// Sends rows through the block's memory, a warp each: fewer blocks keep a link busy than with stores of threads.
DEVICE void send_rows_in_bulk(
    const Parameters& p, const Plan& plan, char* memory, u64 number, u32 tasks, u32 of_role, u32 in_role) {
    const u32 warp = thread() / kWarp, lane = thread() % kWarp;
    if (warp >= p.bulk_rows) return;
    BulkRow bulk(p, memory, false);
    char* buffer = bulk.buffer;
    u32 rows = 0;
    ROLLED for (u32 task = warp * in_role + of_role; task < tasks; task += in_role * p.bulk_rows) {
        const Sent sent(p, task);
        if (sent.slot >= plan.sent[sent.rank]) continue;
        const u32 token = plan.list[sent.rank * p.tokens + sent.slot], numbers = 3 * p.top_k + 1;
        bulk.load(p, p.x + static_cast<u64>(token) * p.row_bytes, p.scales + static_cast<u64>(token) * p.scale_bytes);
        ROLLED for (u32 index = lane; index < numbers; index += kWarp) {
            reinterpret_cast<u32*>(buffer + p.rest_at)[index] = description(p, plan, sent.rank, token, index);
        }
        fence_for_bulk_store();
        warp_sync();
        bulk.wait();
        if (lane == 0) {
            bulk_store(sent.row(p, number), buffer, static_cast<u32>(p.rest_at) + round_up(numbers * sizeof(u32), kUnit));
            bulk_stores_are_done();
            store_release(sent.word(p, number), number);
        }
        warp_sync();
        ++rows;
    }
    if (lane == 0 && rows > 0) add_global(p.stats + kRowsSent, rows);
}
#endif

DEVICE void send_rows_by_threads(const Parameters& p, const Plan& plan, u64 number, u32 tasks, u32 of_role, u32 in_role) {
    const Group group(p.send_group_bits, of_role, in_role, false);
    u32 rows = 0;
    ROLLED for (u32 task = group.first; task < tasks; task += group.step) {
        const Sent sent(p, task);
        if (sent.slot >= plan.sent[sent.rank]) continue;
        send_row(p, plan, group, sent.row(p, number), sent.rank, plan.list[sent.rank * p.tokens + sent.slot]);
        group.sync();
        if (group.lane == 0) store_release(sent.word(p, number), number);
        ++rows;
    }
    count_rows(p, group, kRowsSent, rows);
}

DEVICE void send_rows(const Parameters& p, const Plan& plan, [[maybe_unused]] char* memory, u64 number, u32 of_role, u32 in_role) {
    if (of_role == 0) {
        const u32 words = p.experts_a_rank + 1;
        ROLLED for (u32 i = thread(); i < p.ranks * words; i += threads()) {
            const u32 rank = divided(i, p.words_inverse), here = i - rank * words, expert = rank * p.experts_a_rank + here;
            const bool is_slots = here == p.experts_a_rank;
            if (!is_slots && expert >= p.experts) continue;
            const u32 count = is_slots ? plan.sent[rank] : plan.counts[expert];
            store_relaxed(count_word(p, rank, number, p.rank, here), number << 32 | count);
        }
    }
    u32 most = 0;
    ROLLED for (u32 rank = 0; rank < p.ranks; ++rank) {
        if (rank != p.rank && plan.sent[rank] > most) most = plan.sent[rank];
    }
    const u32 tasks = most * (p.ranks - 1);
#ifdef HAS_BULK_COPIES
    if (p.bulk_rows > 0) {
        send_rows_in_bulk(p, plan, memory + p.bulk_begin, number, tasks, of_role, in_role);
    } else
#endif
    {
        send_rows_by_threads(p, plan, number, tasks, of_role, in_role);
    }
    // Not the block that writes counts, for which all ranks wait.
    if (of_role + 1 == in_role) {
        if (p.plan_bytes > 0) write_down(p, plan);
        for (u32 i = thread(); i < p.tokens * p.top_k; i += threads()) p.own_weights[i] = weight_of(p, i);
        if (thread() == 0) *p.number = number;
    }
}

// Where rows of other ranks stand here.
struct Arrivals {
    u32* counts;  // [ranks][experts a rank + 1]: rows of each source, and its slots
    u32* bases;   // [ranks][experts a rank]: position of a source's first row
    u32* firsts;  // [ranks]: slots of all sources before
    u32* needed;  // rows for which there would have to be room, 0 if there is
    DEVICE u32 slots(const Parameters& p, u32 source) const { return counts[source * (p.experts_a_rank + 1) + p.experts_a_rank]; }
};

// Waits for the counts of all ranks. False: they did not come.
DEVICE bool receive_counts(const Parameters& p, const Arrivals& arrivals, u64 number, bool is_first) {
    const u32 words = p.experts_a_rank + 1, here = p.experts_here;
    bool is_bad = false;
    for (u32 i = thread(); i < p.ranks * words; i += threads()) {
        const u32 source = divided(i, p.words_inverse), expert = i - source * words;
        u64 value = 0;
        if (expert == p.experts_a_rank || expert < here) {
            const auto compare = [number](u64 seen) {
                return static_cast<i64>(static_cast<i32>(static_cast<u32>(seen >> 32) - static_cast<u32>(number)));
            };
            is_bad = !wait(p, count_word(p, p.rank, number, source, expert), source, kCounts, &value, compare) || is_bad;
            const u32 most = expert == p.experts_a_rank ? p.max_tokens : p.max_tokens * p.top_k;
            if (static_cast<u32>(value) > most) {
                fail(p, kNonsense, source, kCounts, 0);
                is_bad = true;
                value = 0;
            }
        }
        arrivals.counts[i] = static_cast<u32>(value);
    }
    block_sync();
    if (thread() < kWarp) {
        const u32 each = (here + kWarp - 1) / kWarp, begin = thread() * each, end = least(begin + each, here);
        u32 sum = 0, most = 0;
        ROLLED for (u32 expert = begin; expert < end; ++expert) {
            u32 count = 0;
            ROLLED for (u32 source = 0; source < p.ranks; ++source) count += arrivals.counts[source * words + expert];
            sum += round_up(count, p.alignment);
            if (count > most) most = count;
        }
        const u32 before = sum_below(sum);
        u32 slots = 0;
        ROLLED for (u32 source = 0; source < p.ranks; ++source) {
            if (thread() == 0) arrivals.firsts[source] = slots;
            slots += arrivals.counts[source * words + p.experts_a_rank];
        }
        // Rows for which there has to be room. Every block finds the same.
        const u32 needed = p.arrangement == kExperts   ? of_last_lane(before + sum)
                           : p.arrangement == kMasked ? greatest_of_warp(most)
                                                      : slots;
        const bool has_room = needed <= p.capacity;
        if (thread() == 0) {
            *arrivals.needed = has_room ? 0 : needed;
            if (is_first) {
                if (p.arrangement == kTokens) p.out_starts[0] = has_room ? static_cast<i32>(slots) : 0;
                if (!has_room) note_refusal(p, p.rank, needed);
            }
        }
        u32 start = before;
        ROLLED for (u32 expert = begin; expert < end; ++expert) {
            if (p.arrangement == kMasked) start = expert * p.capacity;
            u32 at = start;
            ROLLED for (u32 source = 0; source < p.ranks; ++source) {
                arrivals.bases[source * p.experts_a_rank + expert] = at;
                at += arrivals.counts[source * words + expert];
            }
            if (is_first) {
                p.out_counts[expert] = has_room ? static_cast<i32>(at - start) : 0;
                if (p.arrangement != kTokens && p.out_starts != nullptr) p.out_starts[expert] = has_room ? static_cast<i32>(start) : 0;
            }
            start += round_up(at - start, p.alignment);
        }
    }
    is_bad = any_of_block(is_bad);
    if (is_first) {
        ROLLED for (u32 source = thread(); source < p.ranks; source += threads()) {
            // No row goes back from a dispatch that is refused.
            p.received[source] = *arrivals.needed == 0 ? arrivals.slots(p, source) : 0;
        }
    }
    return !is_bad;
}

// The position of a row of which a source says this, kNowhere if it is not for an expert here.
DEVICE u32 position_of(const Parameters& p, const Arrivals& arrivals, u32 source, u32 expert, u32 place) {
    if (expert == kNowhere) return kNowhere;
    if (expert >= p.experts_here || place >= arrivals.counts[source * (p.experts_a_rank + 1) + expert]) {
        fail(p, kNonsense, source, kRows, 0);
        return kNowhere;
    }
    return arrivals.bases[source * p.experts_a_rank + expert] + place;
}

// The description of a row that this rank sends to itself, at a k.
DEVICE void describe_own(
    const Parameters& p, const Plan& plan, u32 token, u32 k, u32* expert, u32* place, float* weight) {
    const u32 pair = token * p.top_k + k;
    const i32 id = plan.expert[pair];
    const u32 here = static_cast<u32>(id) - p.rank * p.experts_a_rank;
    const bool is_here = id >= 0 && here < p.experts_a_rank;
    *expert = is_here ? here : kNowhere;
    *place = is_here ? plan.place[pair] : 0;
    *weight = weight_of(p, pair);
}

// What a group knows of its row, in the block's memory.
struct OfGroup {
    u32 positions[kTopK];
    u32 has_come, unused[3];
};

// Notes where a row stands that has come: its place for each k, also for combine.
DEVICE void note_places(
    const Parameters& p, const Plan& plan, const Arrivals& arrivals, const Group& group, OfGroup* of_group, u32 source,
    u32 slot, u32 token, const u32* rest) {
    const u64 received = static_cast<u64>(source) * p.max_tokens + slot;
    const u32 at = arrivals.firsts[source] + slot;
    for (u32 k = group.lane; k < p.top_k; k += group.size) {
        u32 expert, place;
        float weight;
        if (source == p.rank) {
            describe_own(p, plan, token, k, &expert, &place, &weight);
        } else {
            expert = load_once(rest + 2 * k);
            place = load_once(rest + 2 * k + 1);
            weight = float_of_bits(load_once(rest + 2 * p.top_k + k));
        }
        u32 position = position_of(p, arrivals, source, expert, place);
        if (p.arrangement == kTokens) {
            const u64 pair = static_cast<u64>(at) * p.top_k + k;
            p.out_ids[pair] = position == kNowhere ? -1 : static_cast<i64>(expert);
            p.out_weights[pair] = position == kNowhere ? 0.f : weight;
            // The row stands there once.
            position = k == 0 ? at : kNowhere;
        }
        // The counts said that there is room.
        const u32 room = p.arrangement == kMasked ? (expert + 1) * p.capacity : p.capacity;
        if (position != kNowhere && position >= room) {
            fail(p, kNonsense, source, kRows, position);
            position = kNowhere;
        }
        of_group->positions[k] = position;
        p.positions[received * p.top_k + k] = static_cast<i32>(position);
        p.weights_received[received * p.top_k + k] = weight;
    }
    if (group.lane == 0) p.tokens_received[received] = token;
}

// Where a number of a row's scales stands if they go by column: [experts][columns][capacity] if rows are masked.
DEVICE u32* scale_in_column(const Parameters& p, u32 position, u32 column) {
    const u32 expert = p.arrangement == kMasked ? position / p.capacity : 0, columns = p.scale_bytes / sizeof(u32);
    const u64 first = (static_cast<u64>(expert) * columns + column) * p.capacity;
    return reinterpret_cast<u32*>(p.out_scales) + first + (position - expert * p.capacity);
}

DEVICE void store_scales(const Parameters& p, u32 position, u32 at, uint4 piece) {
    if ((p.scaling & kByColumn) == 0) {
        store_piece(p.scale_piece, p.out_scales + static_cast<u64>(position) * p.scale_bytes, at, piece);
        return;
    }
    const u32 words = p.scale_piece / sizeof(u32);
    u32* to = scale_in_column(p, position, at * words);
    to[0] = piece.x;
    if (words == 1) return;
    to[p.capacity] = piece.y;
    to[2 * static_cast<u64>(p.capacity)] = piece.z;
    to[3 * static_cast<u64>(p.capacity)] = piece.w;
}

// Writes the scales of a row to its places. `first` is this thread's first piece of them, which is loaded.
DEVICE void place_scales(const Parameters& p, const Group& group, const OfGroup* of_group, uint4 first, const char* scales) {
    ROLLED for (u32 at = group.lane; at * p.scale_piece < p.scale_bytes; at += group.size) {
        const uint4 piece = at == group.lane ? first : load_piece(p.scale_piece, scales, at, p.scale_bytes);
        ROLLED for (u32 k = 0; k < p.top_k; ++k) {
            const u32 position = of_group->positions[k];
            if (position == kNowhere) continue;
            store_scales(p, position, at, piece);
        }
    }
}

// A row that this rank receives.
struct Coming {
    u32 source, slot;
    bool is_own;
    DEVICE Coming(const Parameters& p, u32 task) {
        slot = divided(task, p.ranks_inverse);
        source = p.rank + task - slot * p.ranks;
        source -= source < p.ranks ? 0 : p.ranks;
        is_own = source == p.rank;
    }
};

// Where a row and what belongs to it can be read.
struct Readable {
    const char *row, *scales;
    const u32* rest;
    u32 token;
    DEVICE Readable(const Parameters& p, const Plan& plan, const Coming& coming, u64 index) {
        row = p.heap[p.rank] + p.rows + index * p.row_stride;
        scales = row + p.scales_at;
        rest = reinterpret_cast<const u32*>(row + p.rest_at);
        token = 0;
        if (!coming.is_own) return;
        token = plan.list[p.rank * p.tokens + coming.slot];
        row = p.x + static_cast<u64>(token) * p.row_bytes;
        scales = p.scales + static_cast<u64>(token) * p.scale_bytes;
    }
};

// The token of a row that is there.
DEVICE u32 token_of_row(const Parameters& p, const Coming& coming, const Readable& from) {
    const u32 token = coming.is_own ? from.token : load_once(from.rest + 3 * p.top_k);
    if (token < p.max_tokens) return token;
    fail(p, kNonsense, coming.source, kRows, token);
    return 0;
}

#ifdef HAS_BULK_COPIES
// Receives rows through the block's memory, a warp each.
DEVICE void receive_rows_in_bulk(
    const Parameters& p, const Plan& plan, const Arrivals& arrivals, OfGroup* of_groups, char* memory, u64 number, u32 tasks,
    u32 of_role, u32 in_role) {
    const u32 warp = thread() / kWarp;
    if (warp >= p.bulk_rows) return;
    Group group(kWarpBits, of_role, in_role, true);
    OfGroup* of_group = of_groups + warp;
    BulkRow bulk(p, memory, true);
    u32 rows = 0;
    ROLLED for (u32 task = group.first; task < tasks; task += in_role * p.bulk_rows) {
        const Coming coming(p, task);
        if (coming.slot >= arrivals.slots(p, coming.source)) continue;
        const u64 index = slot_index(p, number, coming.source, coming.slot);
        const Readable from(p, plan, coming, index);
        if (!coming.is_own && group.lane == 0) {
            const u64* word = word_at(p, p.rank, p.row_words + index * sizeof(u64));
            of_group->has_come = wait_for_row(p, word, coming.source, kRows, number);
            fence_for_bulk_load();
        }
        warp_sync();
        const bool is_there = coming.is_own || of_group->has_come != 0;
        // All have read it before the next row's is written.
        warp_sync();
        // A row that did not come is none, and nothing of it is read.
        if (!is_there) continue;
        bulk.load(p, from.row, from.scales);
        note_places(p, plan, arrivals, group, of_group, coming.source, coming.slot, token_of_row(p, coming, from), from.rest);
        warp_sync();
        bulk.wait();
        ROLLED for (u32 k = group.lane; k < p.top_k; k += kWarp) {
            const u64 position = of_group->positions[k];
            if (position == kNowhere) continue;
            bulk_store(p.out_rows + position * p.row_bytes, bulk.buffer, p.row_bytes);
            if (p.scale_bytes == 0 || (p.scaling & kByColumn)) continue;
            bulk_store(p.out_scales + position * p.scale_bytes, bulk.buffer + p.scales_at, p.scale_bytes);
        }
        if (p.scaling & kByColumn) {
            ROLLED for (u32 at = group.lane; at * kUnit < p.scale_bytes; at += kWarp) {
                const uint4 piece = *reinterpret_cast<const uint4*>(bulk.buffer + p.scales_at + at * kUnit);
                ROLLED for (u32 k = 0; k < p.top_k; ++k) {
                    if (of_group->positions[k] != kNowhere) store_scales(p, of_group->positions[k], at, piece);
                }
            }
        }
        bulk_stores_have_read();
        warp_sync();
        rows += !coming.is_own;
    }
    bulk_stores_are_done();
    count_rows(p, group, kRowsReceived, rows);
}
#endif

DEVICE void receive_rows_by_threads(
    const Parameters& p, const Plan& plan, const Arrivals& arrivals, OfGroup* of_groups, u64 number, u32 tasks, u32 of_role,
    u32 in_role) {
    const Group group(p.receive_group_bits, of_role, in_role, true);
    OfGroup* of_group = of_groups + group.index;
    const u32 count = p.row_bytes / kUnit;
    u32 rows = 0;
    ROLLED for (u32 task = group.first; task < tasks; task += group.step) {
        const Coming coming(p, task);
        if (coming.slot >= arrivals.slots(p, coming.source)) continue;
        const u64 index = slot_index(p, number, coming.source, coming.slot);
        const Readable from(p, plan, coming, index);
        if (!coming.is_own) {
            if (group.lane == 0) {
                const u64* word = word_at(p, p.rank, p.row_words + index * sizeof(u64));
                of_group->has_come = wait_for_row(p, word, coming.source, kRows, number);
            }
            group.sync();
        }
        // A row that did not come is none, and nothing of it is read.
        const bool is_there = coming.is_own || of_group->has_come != 0;
        uint4 units[kInFlight], of_scales = uint4{0, 0, 0, 0};
        if (is_there) {
            load_units(group, units, from.row, group.lane, count);
            of_scales = load_piece(p.scale_piece, from.scales, group.lane, p.scale_bytes);
            const u32 token = token_of_row(p, coming, from);
            note_places(p, plan, arrivals, group, of_group, coming.source, coming.slot, token, from.rest);
        }
        group.sync();
        if (is_there) {
            ROLLED for (u32 first = group.lane; first - group.lane < count; first += kInFlight * group.size) {
                if (first != group.lane) load_units(group, units, from.row, first, count);
                ROLLED for (u32 k = 0; k < p.top_k; ++k) {
                    const u32 position = of_group->positions[k];
                    if (position == kNowhere) continue;
                    store_units(group, units, p.out_rows + static_cast<u64>(position) * p.row_bytes, first, count);
                }
            }
            place_scales(p, group, of_group, of_scales, from.scales);
        }
        rows += !coming.is_own;
        // The next row's places are noted by other threads.
        group.sync();
    }
    count_rows(p, group, kRowsReceived, rows);
}

// Tells each rank whose token came that no sum comes, however it would wait for it. Its own tokens' sums find that out themselves.
COLD void refuse_rows(
    const Parameters& p, const Plan& plan, const Arrivals& arrivals, u64 number, u32 tasks, u32 of_role, u32 in_role) {
    const u64 word = refusal(number, *arrivals.needed);
    for (u32 task = of_role * threads() + thread(); task < tasks; task += in_role * threads()) {
        const Coming coming(p, task);
        if (coming.is_own || coming.slot >= arrivals.slots(p, coming.source)) continue;
        const u64 index = slot_index(p, number, coming.source, coming.slot);
        const u64* of_row = word_at(p, p.rank, p.row_words + index * sizeof(u64));
        if (!wait_for_row(p, of_row, coming.source, kRows, number)) continue;
        const Readable from(p, plan, coming, index);
        const u32 token = token_of_row(p, coming, from);
        add_global(p.stats + kRowsReceived, 1);
        for (u32 k = 0; p.pair_words > 0 && k < p.top_k; ++k) {
            if (load_once(from.rest + 2 * k) == kNowhere) continue;
            const u64 pair = pair_index(p, number, token, k);
            store_release(word_at(p, coming.source, p.pair_words + pair * sizeof(u64)), word);
        }
        const u64 sum = slot_index(p, number, p.rank, coming.slot);
        store_release(word_at(p, coming.source, p.sum_words + sum * sizeof(u64)), word);
    }
}

DEVICE void receive_rows(const Parameters& p, const Plan& plan, char* memory, u64 number, u32 of_role, u32 in_role) {
    Arrivals arrivals;
    arrivals.counts = reinterpret_cast<u32*>(memory + p.plan_bytes);
    arrivals.bases = arrivals.counts + p.ranks * (p.experts_a_rank + 1);
    arrivals.firsts = arrivals.bases + p.ranks * p.experts_a_rank;
    arrivals.needed = arrivals.firsts + p.ranks;
    OfGroup* of_groups = reinterpret_cast<OfGroup*>(arrivals.needed + 1);
    if (!receive_counts(p, arrivals, number, of_role == 0)) return;
    u32 most = 0;
    ROLLED for (u32 source = 0; source < p.ranks; ++source) {
        if (arrivals.slots(p, source) > most) most = arrivals.slots(p, source);
    }
    const u32 tasks = most * p.ranks;
    if (*arrivals.needed > 0) {
        refuse_rows(p, plan, arrivals, number, tasks, of_role, in_role);
        return;
    }
#ifdef HAS_BULK_COPIES
    if (p.bulk_rows > 0) {
        receive_rows_in_bulk(p, plan, arrivals, of_groups, memory + p.bulk_begin, number, tasks, of_role, in_role);
        return;
    }
#endif
    receive_rows_by_threads(p, plan, arrivals, of_groups, number, tasks, of_role, in_role);
}

// The number of the dispatch before, which each block keeps: grids have to have the same size each time.
DEVICE u64 last_number(const Parameters& p) { return load_once(p.sequence + block()); }

// Keeps it for the next dispatch.
DEVICE void end_number(const Parameters& p, u64 number) {
    if (thread() == 0) p.sequence[block()] = number;
}

}  // namespace
