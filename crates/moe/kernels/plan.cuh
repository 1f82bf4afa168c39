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

// The expert that an id names, -1 if it names none.
DEVICE i32 expert_of(const Parameters& p, i64 id) { return id >= 0 && id < p.experts ? static_cast<i32>(id) : -1; }

DEVICE u32 token_of(const Parameters& p, u32 pair) { return divided(pair, p.top_k_inverse); }

DEVICE i32 expert_of_pair(const Parameters& p, u32 pair) {
    return expert_of(
        p, p.id_bytes == 8 ? load_once(reinterpret_cast<const i64*>(p.ids) + pair)
                           : load_once(reinterpret_cast<const i32*>(p.ids) + pair));
}

// Calls `act` for every `step`th pair of a token and a k, with its id. Each thread has several loads in flight.
template <typename Id, typename Act>
DEVICE void for_each_id_of(const Parameters& p, u32 from, u32 step, Act act) {
    const u32 pairs = p.tokens * p.top_k;
    const Id* all = reinterpret_cast<const Id*>(p.ids);
    for (u32 first = from; first < pairs; first += kIdsInFlight * step) {
        Id ids[kIdsInFlight];
        UNROLL
        for (u32 j = 0; j < kIdsInFlight; ++j) {
            const u32 pair = first + j * step;
            ids[j] = pair < pairs ? load_once(all + pair) : -1;
        }
        UNROLL
        for (u32 j = 0; j < kIdsInFlight; ++j) {
            const u32 pair = first + j * step;
            if (pair < pairs) act(pair, static_cast<i64>(ids[j]));
        }
    }
}

template <typename Act>
DEVICE void for_each_id(const Parameters& p, u32 from, u32 step, Act act) {
    if (p.id_bytes == 8) {
        for_each_id_of<i64>(p, from, step, act);
    } else {
        for_each_id_of<i32>(p, from, step, act);
    }
}

// The same with experts, for all pairs. They are in `known`, or follow from the ids.
template <typename Act>
DEVICE void for_each_pair(const Parameters& p, const i32* known, Act act) {
    if (known == nullptr) {
        for_each_id(p, thread(), threads(), [&](u32 pair, i64 id) { act(pair, expert_of(p, id)); });
        return;
    }
    for (u32 pair = thread(); pair < p.tokens * p.top_k; pair += threads()) act(pair, known[pair]);
}

// Writes down the expert of every `step`th pair. True: an id names none, which is told. Each thread says it of its pairs.
DEVICE bool read_ids(const Parameters& p, u32 from, u32 step, i32* experts) {
    bool is_wrong = false;
    for_each_id(p, from, step, [&](u32 pair, i64 id) {
        experts[pair] = expert_of(p, id);
        if (experts[pair] >= 0 || id == -1) return;
        fail(p, kBadExpert, token_of(p, pair), pair % p.top_k, static_cast<u64>(id));
        is_wrong = true;
    });
    return is_wrong;
}

// Writes for each word of a row the sum of the values of all words before it, and those of whole rows to `totals`. Rows begin
// with thread `begin`, so those of two calls are not of the same threads.
template <typename Value>
DEVICE void add_up(u32 begin, u32* sums, u32 rows, u32 words, u32* totals, Value value) {
    const u32 of_thread = (thread() + threads() - begin % threads()) % threads();
    if (words <= 8) {
        for (u32 row = of_thread; row < rows; row += threads()) {
            u32 sum = 0;
            for (u32 word = row * words; word < (row + 1) * words; ++word) {
                const u32 here = value(word);
                sums[word] = sum;
                sum += here;
            }
            totals[row] = sum;
        }
        return;
    }
    const u32 lane = thread() % kWarp;
    for (u32 row = of_thread / kWarp; row < rows; row += threads() / kWarp) {
        u32 before = 0;
        for (u32 first = 0; first < words; first += kWarp) {
            const bool is_one = first + lane < words;
            const u32 word = row * words + first + lane, here = is_one ? value(word) : 0;
            const u32 below = sum_below(here);
            if (is_one) sums[word] = before + below;
            before += of_last_lane(below + here);
        }
        if (lane == 0) totals[row] = before;
    }
}

// The experts and the ranks for which a block plans, and its own memory for that.
struct Planned {
    u32 expert, experts, rank, ranks;
    u32* wanted;       // [experts][words]: a bit for each token that wants the expert
    u32* pairs_before; // [experts][words]: the pairs of each 32 tokens, and then those of all tokens before
    u32* sent;         // [ranks][words]: a bit for each token that goes to the rank
    u32* sent_before;  // [ranks][words]
    DEVICE Planned(u32 expert, u32 experts, u32 rank, u32 ranks, u32* memory, u32 words)
        : expert(expert), experts(experts), rank(rank), ranks(ranks), wanted(memory) {
        pairs_before = wanted + experts * words;
        sent = pairs_before + experts * words;
        sent_before = sent + ranks * words;
        for (u32 i = thread(); i < (2 * experts + ranks) * words; i += threads()) memory[i] = 0;
    }
};

// Places the pairs of experts, and gives each token a slot at ranks. A barrier has come before.
DEVICE void plan_part(const Parameters& p, const Plan& plan, const i32* known, const Planned& part) {
    const u32 words = words_of(p.tokens);
    for_each_pair(p, known, [&](u32 pair, i32 expert) {
        if (expert < 0) return;
        const u32 here = static_cast<u32>(expert) - part.expert;
        const u32 rank = part.ranks == 0 ? 0 : divided(static_cast<u32>(expert), p.experts_a_rank_inverse) - part.rank;
        const bool is_placed = here < part.experts, is_sent = rank < part.ranks;
        if (!is_placed && !is_sent) return;
        const u32 token = token_of(p, pair), word = token / 32, bit = 1u << token % 32;
        if (is_placed) {
            or_shared(&part.wanted[here * words + word], bit);
            add_shared(&part.pairs_before[here * words + word], 1);
        }
        if (is_sent) or_shared(&part.sent[rank * words + word], bit);
    });
    block_sync();
    add_up(0, part.pairs_before, part.experts, words, plan.counts + part.expert, [&](u32 word) { return part.pairs_before[word]; });
    add_up(
        words <= 8 ? part.experts : part.experts * kWarp, part.sent_before, part.ranks, words, plan.sent + part.rank,
        [&](u32 word) { return bits_of(part.sent[word]); });
    block_sync();
    for_each_pair(p, known, [&](u32 pair, i32 expert) {
        const u32 here = static_cast<u32>(expert) - part.expert;
        if (expert < 0 || here >= part.experts) return;
        const u32 token = token_of(p, pair), nth = token / 32, word = here * words + nth;
        const u32 after = nth + 1 < words ? part.pairs_before[word + 1] : plan.counts[expert];
        u32 within = bits_of(part.wanted[word] & ((1u << token % 32) - 1));
        if (after - part.pairs_before[word] != bits_of(part.wanted[word])) {
            // A token wants an expert twice.
            within = 0;
            for (u32 other = nth * 32 * p.top_k; other < pair; ++other) within += expert_of_pair(p, other) == expert;
        }
        plan.place[pair] = part.pairs_before[word] + within;
    });
    for (u32 rank = 0; rank < part.ranks; ++rank) {
        for (u32 token = thread(); token < p.tokens; token += threads()) {
            const u32 word = rank * words + token / 32, bit = 1u << token % 32;
            u32 slot = kNowhere;
            if (part.sent[word] & bit) {
                slot = part.sent_before[word] + bits_of(part.sent[word] & (bit - 1));
                plan.list[(part.rank + rank) * p.tokens + slot] = token;
            }
            plan.slot[token * p.ranks + part.rank + rank] = slot;
        }
    }
}

// The whole plan in a block's own memory. False: an id is wrong, or this rank has failed before.
DEVICE bool plan_for_itself(const Parameters& p, char* memory, Plan* plan) {
    const u32 words = words_of(p.tokens), pairs = p.tokens * p.top_k;
    u32* at = reinterpret_cast<u32*>(memory);
    const auto take = [&at](u32 count) {
        u32* begin = at;
        at += count;
        return begin;
    };
    plan->list = take(p.ranks * p.tokens);
    plan->slot = take(p.tokens * p.ranks);
    plan->expert = reinterpret_cast<i32*>(take(pairs));
    plan->place = take(pairs);
    plan->sent = take(p.ranks);
    plan->counts = take(p.experts);
    const Planned all(0, p.experts, 0, p.ranks, at, words);
    const bool has_failed_before = has_failed(p);
    const bool is_wrong = read_ids(p, thread(), threads(), plan->expert);
    if (any_of_block(is_wrong || has_failed_before)) return false;
    plan_part(p, *plan, plan->expert, all);
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
