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

// The expert of a pair of token and k, -1 for none.
DEVICE i32 wanted(const Parameters& p, u32 pair) {
    const i64 id = p.id_bytes == 8 ? load_once(reinterpret_cast<const i64*>(p.ids) + pair)
                                   : load_once(reinterpret_cast<const i32*>(p.ids) + pair);
    if (id >= 0 && id < p.experts) return static_cast<i32>(id);
    if (id != -1) fail(p, kBadExpert, pair / p.top_k, pair % p.top_k, static_cast<u64>(id));
    return -1;
}

// Makes of the number in each word the sum of all words before it, and returns that of all. By one warp.
DEVICE u32 add_up(u32* words, u32 count) {
    const u32 lane = thread() % kWarp;
    u32 before = 0;
    for (u32 first = 0; first < count; first += kWarp) {
        const u32 value = first + lane < count ? words[first + lane] : 0;
        const u32 below = sum_below(value);
        if (first + lane < count) words[first + lane] = before + below;
        before += of_last_lane(below + value);
    }
    return before;
}

// Places the pairs of experts `begin` to `end`. In `bits` each expert has a bit for each token that wants it, in `before` the
// pairs of each 32 tokens, and then those of all tokens before.
DEVICE void plan_experts(const Parameters& p, const Plan& plan, u32 begin, u32 end, u32* bits, u32* before) {
    const u32 words = words_of(p.tokens), pairs = p.tokens * p.top_k, experts = end - begin;
    for (u32 i = thread(); i < experts * words; i += threads()) bits[i] = before[i] = 0;
    block_sync();
    for (u32 pair = thread(); pair < pairs; pair += threads()) {
        const i32 expert = wanted(p, pair);
        const u32 token = pair / p.top_k;
        if (expert < 0 || static_cast<u32>(expert) - begin >= experts) continue;
        const u32 word = (static_cast<u32>(expert) - begin) * words + token / 32;
        or_shared(&bits[word], 1u << token % 32);
        add_shared(&before[word], 1);
    }
    block_sync();
    for (u32 expert = thread() / kWarp; expert < experts; expert += threads() / kWarp) {
        const u32 all = add_up(before + expert * words, words);
        if (thread() % kWarp == 0) plan.counts[begin + expert] = all;
    }
    block_sync();
    for (u32 pair = thread(); pair < pairs; pair += threads()) {
        const i32 expert = wanted(p, pair);
        const u32 token = pair / p.top_k, nth = token / 32;
        if (expert < 0 || static_cast<u32>(expert) - begin >= experts) continue;
        const u32 word = (static_cast<u32>(expert) - begin) * words + nth;
        const u32 after = nth + 1 < words ? before[word + 1] : plan.counts[expert];
        u32 within = bits_of(bits[word] & ((1u << token % 32) - 1));
        if (after - before[word] != bits_of(bits[word])) {
            // A token wants an expert twice.
            within = 0;
            for (u32 other = nth * 32 * p.top_k; other < pair; ++other) within += wanted(p, other) == expert;
        }
        plan.place[pair] = before[word] + within;
    }
}

// Gives each token a slot at ranks `begin` to `end`.
DEVICE void plan_ranks(const Parameters& p, const Plan& plan, u32 begin, u32 end, u32* bits, u32* before) {
    const u32 words = words_of(p.tokens), ranks = end - begin;
    for (u32 i = thread(); i < ranks * words; i += threads()) bits[i] = 0;
    block_sync();
    for (u32 pair = thread(); pair < p.tokens * p.top_k; pair += threads()) {
        const i32 expert = wanted(p, pair);
        if (begin == 0) plan.expert[pair] = expert;
        const u32 token = pair / p.top_k;
        const u32 rank = static_cast<u32>(expert) / p.experts_a_rank - begin;
        if (expert >= 0 && rank < ranks) or_shared(&bits[rank * words + token / 32], 1u << token % 32);
    }
    block_sync();
    for (u32 i = thread(); i < ranks * words; i += threads()) before[i] = bits_of(bits[i]);
    block_sync();
    for (u32 rank = thread() / kWarp; rank < ranks; rank += threads() / kWarp) {
        const u32 all = add_up(before + rank * words, words);
        if (thread() % kWarp == 0) plan.sent[begin + rank] = all;
    }
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

DEVICE Plan plan_of_scratch(const Parameters& p) {
    return Plan{p.list, p.slot, p.expert, p.place, p.sent, p.expert_counts};
}

// The whole plan in a block's own memory. The first block also writes it where combine reads it.
DEVICE Plan plan_for_itself(const Parameters& p, char* memory, bool is_written) {
    const u32 words = words_of(p.tokens), pairs = p.tokens * p.top_k;
    u32* at = reinterpret_cast<u32*>(memory);
    const auto take = [&at](u32 count) {
        u32* begin = at;
        at += count;
        return begin;
    };
    u32* bits = take((p.experts > p.ranks ? p.experts : p.ranks) * words);
    u32* before = take((p.experts > p.ranks ? p.experts : p.ranks) * words);
    Plan plan;
    plan.list = take(p.ranks * p.tokens);
    plan.slot = take(p.tokens * p.ranks);
    plan.expert = reinterpret_cast<i32*>(take(pairs));
    plan.place = take(pairs);
    plan.sent = take(p.ranks);
    plan.counts = take(p.experts);
    plan_ranks(p, plan, 0, p.ranks, bits, before);
    block_sync();
    plan_experts(p, plan, 0, p.experts, bits, before);
    block_sync();
    if (is_written) {
        for (u32 i = thread(); i < p.ranks * p.tokens; i += threads()) {
            p.list[i] = plan.list[i];
            p.slot[i] = plan.slot[i];
        }
        for (u32 i = thread(); i < pairs; i += threads()) {
            p.expert[i] = plan.expert[i];
            p.place[i] = plan.place[i];
        }
        for (u32 i = thread(); i < p.ranks; i += threads()) p.sent[i] = plan.sent[i];
    }
    return plan;
}

}  // namespace
