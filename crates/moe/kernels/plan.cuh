// Where each row of a rank's tokens goes: pure functions of the ids, so no two blocks have to agree on one.

#pragma once

#include "wait.cuh"

namespace {

// Where each row of this rank's tokens goes.
struct Plan {
    u32* list;    // [ranks][tokens]: the token of each slot
    u32* slot;    // [tokens][ranks]
    i32* expert;  // [tokens][top_k], -1: none
    u32* place;   // [tokens][top_k]: rows of earlier pairs for the same expert
    u32* sent;    // [ranks]: slots
    u32* counts;  // [experts]: rows
};

// Ids of pairs that a thread loads at a time.
constexpr u32 kIdsInFlight = 8;

DEVICE i64 id_of(const Parameters& p, u32 pair) {
    return p.id_bytes == 8 ? load_once(reinterpret_cast<const i64*>(p.ids) + pair)
                           : load_once(reinterpret_cast<const i32*>(p.ids) + pair);
}

// The expert that an id names, -1 if it names none.
DEVICE i32 expert_of(const Parameters& p, i64 id) { return id >= 0 && id < p.experts ? static_cast<i32>(id) : -1; }

// Calls `act` for pairs of a token and a k, with their ids. Each thread has several loads in flight.
template <typename Act>
DEVICE void for_each_id(const Parameters& p, Act act) {
    const u32 pairs = p.tokens * p.top_k;
    for (u32 first = thread(); first < pairs; first += kIdsInFlight * threads()) {
        i64 ids[kIdsInFlight];
        UNROLL
        for (u32 j = 0; j < kIdsInFlight; ++j) {
            const u32 pair = first + j * threads();
            ids[j] = pair < pairs ? id_of(p, pair) : -1;
        }
        UNROLL
        for (u32 j = 0; j < kIdsInFlight; ++j) {
            const u32 pair = first + j * threads();
            if (pair < pairs) act(pair, ids[j]);
        }
    }
}

// The same with experts. They are in `known`, or follow from the ids.
template <typename Act>
DEVICE void for_each_pair(const Parameters& p, const i32* known, Act act) {
    if (known == nullptr) {
        for_each_id(p, [&](u32 pair, i64 id) { act(pair, expert_of(p, id)); });
        return;
    }
    for (u32 pair = thread(); pair < p.tokens * p.top_k; pair += threads()) act(pair, known[pair]);
}

// Writes down the expert of each pair. True: an id names none, which is told. Each thread says it of its pairs.
DEVICE bool read_ids(const Parameters& p, i32* experts) {
    bool is_wrong = false;
    for_each_id(p, [&](u32 pair, i64 id) {
        experts[pair] = expert_of(p, id);
        if (experts[pair] >= 0 || id == -1) return;
        fail(p, kBadExpert, pair / p.top_k, pair % p.top_k, static_cast<u64>(id));
        is_wrong = true;
    });
    return is_wrong;
}

// Makes of the number in each word of a row the sum of all words before it, and writes those of whole rows to `totals`.
DEVICE void add_up(u32* numbers, u32 rows, u32 words, u32* totals) {
    if (words <= 8) {
        for (u32 row = thread(); row < rows; row += threads()) {
            u32 sum = 0;
            for (u32 word = 0; word < words; ++word) {
                const u32 value = numbers[row * words + word];
                numbers[row * words + word] = sum;
                sum += value;
            }
            totals[row] = sum;
        }
        return;
    }
    const u32 lane = thread() % kWarp;
    for (u32 row = thread() / kWarp; row < rows; row += threads() / kWarp) {
        u32* at = numbers + row * words;
        u32 before = 0;
        for (u32 first = 0; first < words; first += kWarp) {
            const u32 value = first + lane < words ? at[first + lane] : 0;
            const u32 below = sum_below(value);
            if (first + lane < words) at[first + lane] = before + below;
            before += of_last_lane(below + value);
        }
        if (lane == 0) totals[row] = before;
    }
}

// Places the pairs of experts `begin` to `end`. In `bits` each expert has a bit for each token that wants it, in `before` the
// pairs of each 32 tokens, and then those of all tokens before.
DEVICE void plan_experts(
    const Parameters& p, const Plan& plan, const i32* known, u32 begin, u32 end, u32* bits, u32* before) {
    const u32 words = words_of(p.tokens), experts = end - begin;
    for (u32 i = thread(); i < experts * words; i += threads()) bits[i] = before[i] = 0;
    block_sync();
    for_each_pair(p, known, [&](u32 pair, i32 expert) {
        const u32 here = static_cast<u32>(expert) - begin, token = pair / p.top_k;
        if (expert < 0 || here >= experts) return;
        or_shared(&bits[here * words + token / 32], 1u << token % 32);
        add_shared(&before[here * words + token / 32], 1);
    });
    block_sync();
    add_up(before, experts, words, plan.counts + begin);
    block_sync();
    for_each_pair(p, known, [&](u32 pair, i32 expert) {
        const u32 here = static_cast<u32>(expert) - begin, token = pair / p.top_k, nth = token / 32;
        if (expert < 0 || here >= experts) return;
        const u32 word = here * words + nth;
        const u32 after = nth + 1 < words ? before[word + 1] : plan.counts[expert];
        u32 within = bits_of(bits[word] & ((1u << token % 32) - 1));
        if (after - before[word] != bits_of(bits[word])) {
            // A token wants an expert twice.
            within = 0;
            for (u32 other = nth * 32 * p.top_k; other < pair; ++other) within += expert_of(p, id_of(p, other)) == expert;
        }
        plan.place[pair] = before[word] + within;
    });
}

// Gives each token a slot at ranks `begin` to `end`.
DEVICE void plan_ranks(
    const Parameters& p, const Plan& plan, const i32* known, u32 begin, u32 end, u32* bits, u32* before) {
    const u32 words = words_of(p.tokens), ranks = end - begin;
    for (u32 i = thread(); i < ranks * words; i += threads()) bits[i] = 0;
    block_sync();
    for_each_pair(p, known, [&](u32 pair, i32 expert) {
        const u32 token = pair / p.top_k, rank = static_cast<u32>(expert) / p.experts_a_rank - begin;
        if (expert >= 0 && rank < ranks) or_shared(&bits[rank * words + token / 32], 1u << token % 32);
    });
    block_sync();
    for (u32 i = thread(); i < ranks * words; i += threads()) before[i] = bits_of(bits[i]);
    block_sync();
    add_up(before, ranks, words, plan.sent + begin);
    block_sync();
    for (u32 i = thread(); i < p.tokens * ranks; i += threads()) {
        const u32 token = i / ranks, rank = i % ranks, word = rank * words + token / 32, bit = 1u << token % 32;
        u32 slot = kNowhere;
        if (bits[word] & bit) {
            slot = before[word] + bits_of(bits[word] & (bit - 1));
            plan.list[(begin + rank) * p.tokens + slot] = token;
        }
        plan.slot[token * p.ranks + begin + rank] = slot;
    }
}

// The whole plan in a block's own memory. False: an id is wrong.
DEVICE bool plan_for_itself(const Parameters& p, char* memory, Plan* plan) {
    const u32 words = words_of(p.tokens), pairs = p.tokens * p.top_k;
    u32* at = reinterpret_cast<u32*>(memory);
    const auto take = [&at](u32 count) {
        u32* begin = at;
        at += count;
        return begin;
    };
    u32* bits = take((p.experts > p.ranks ? p.experts : p.ranks) * words);
    u32* before = take((p.experts > p.ranks ? p.experts : p.ranks) * words);
    plan->list = take(p.ranks * p.tokens);
    plan->slot = take(p.tokens * p.ranks);
    plan->expert = reinterpret_cast<i32*>(take(pairs));
    plan->place = take(pairs);
    plan->sent = take(p.ranks);
    plan->counts = take(p.experts);
    if (any_of_block(read_ids(p, plan->expert))) return false;
    plan_ranks(p, *plan, plan->expert, 0, p.ranks, bits, before);
    block_sync();
    plan_experts(p, *plan, plan->expert, 0, p.experts, bits, before);
    block_sync();
    return true;
}

// Writes a block's own plan to where combine reads it.
DEVICE void write_down(const Parameters& p, const Plan& plan) {
    for (u32 i = thread(); i < p.ranks * p.tokens; i += threads()) {
        p.list[i] = plan.list[i];
        p.slot[i] = plan.slot[i];
    }
    for (u32 i = thread(); i < p.tokens * p.top_k; i += threads()) {
        p.expert[i] = plan.expert[i];
        p.place[i] = plan.place[i];
    }
    for (u32 i = thread(); i < p.ranks; i += threads()) p.sent[i] = plan.sent[i];
    for (u32 i = thread(); i < p.experts; i += threads()) p.expert_counts[i] = plan.counts[i];
}

}  // namespace
