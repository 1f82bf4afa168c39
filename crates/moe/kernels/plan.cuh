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

// Ids that a thread loads at a time, of few pairs and of many.
constexpr u32 kFewInFlight = 2;
constexpr u32 kManyInFlight = 8;

// An id as it is loaded. Whoever widens one while another is not loaded yet waits for each in turn.
struct Id {
    u32 low, high;
};

DEVICE Id load_id(const Parameters& p, u32 pair) {
    const bool is_wide = p.id_bytes == 8;
    const u32* at = reinterpret_cast<const u32*>(p.ids) + (is_wide ? 2 * pair : pair);
    return Id{at[0], is_wide ? at[1] : 0};
}

DEVICE i64 value_of(const Parameters& p, Id id) {
    if (p.id_bytes == 4) return static_cast<i32>(id.low);
    return static_cast<i64>(static_cast<u64>(id.high) << 32 | id.low);
}

// The expert that an id names, -1 if it names none.
DEVICE i32 expert_of(const Parameters& p, i64 id) { return id >= 0 && id < p.experts ? static_cast<i32>(id) : -1; }

// Experts of pairs, by their ids.
struct ByIds {
    const Parameters& p;
    DEVICE Id load(u32 pair) const { return load_id(p, pair); }
    DEVICE Id none() const { return Id{~0u, ~0u}; }
    DEVICE i32 expert(Id id) const { return expert_of(p, value_of(p, id)); }
};

// Experts of pairs that are known.
struct Known {
    const i32* experts;
    DEVICE i32 load(u32 pair) const { return experts[pair]; }
    DEVICE i32 none() const { return -1; }
    DEVICE i32 expert(i32 expert) const { return expert; }
};

DEVICE u32 token_of(const Parameters& p, u32 pair) { return divided(pair, p.top_k_inverse); }

// Calls `act` for every `step`th pair of a token and a k, with its id.
template <u32 in_flight, typename Act>
DEVICE void for_each_id(const Parameters& p, u32 from, u32 step, Act act) {
    const u32 pairs = p.tokens * p.top_k;
    ROLLED for (u32 first = from; first < pairs; first += in_flight * step) {
        Id ids[in_flight];
        UNROLL
        for (u32 j = 0; j < in_flight; ++j) {
            const u32 pair = first + j * step;
            if (pair < pairs) ids[j] = load_id(p, pair);
        }
        UNROLL
        for (u32 j = 0; j < in_flight; ++j) {
            const u32 pair = first + j * step;
            if (pair < pairs) act(pair, value_of(p, ids[j]));
        }
    }
}

// Writes down the expert of every `step`th pair. True: an id names none, which is told. Each thread says it of its pairs.
template <u32 in_flight>
DEVICE bool read_ids(const Parameters& p, u32 from, u32 step, i32* experts) {
    u32 wrong = kNowhere;
    for_each_id<in_flight>(p, from, step, [&](u32 pair, i64 id) {
        const i32 expert = expert_of(p, id);
        experts[pair] = expert;
        if (expert < 0 && id != -1 && wrong == kNowhere) wrong = pair;
    });
    if (wrong == kNowhere) return false;
    fail(p, kBadExpert, token_of(p, wrong), wrong - token_of(p, wrong) * p.top_k, static_cast<u64>(value_of(p, load_id(p, wrong))));
    return true;
}

// Writes for each word of a row the sum of the values of all words before it, and those of whole rows to `totals`. The first
// rows are those of the first threads, or of the last ones, so that two calls need not be of the same threads.
template <typename Value>
DEVICE void add_up(bool is_of_last, u32* sums, u32 rows, u32 words, u32* totals, Value value) {
    const u32 of_thread = is_of_last ? threads() - 1 - thread() : thread();
    if (words <= 8) {
        ROLLED for (u32 row = of_thread; row < rows; row += threads()) {
            u32 sum = 0;
            ROLLED for (u32 word = row * words; word < (row + 1) * words; ++word) {
                const u32 here = value(word);
                sums[word] = sum;
                sum += here;
            }
            totals[row] = sum;
        }
        return;
    }
    const u32 lane = thread() % kWarp;
    ROLLED for (u32 row = of_thread / kWarp; row < rows; row += threads() / kWarp) {
        u32 before = 0;
        ROLLED for (u32 first = 0; first < words; first += kWarp) {
            const bool is_one = first + lane < words;
            const u32 word = row * words + first + lane, here = is_one ? value(word) : 0;
            const u32 below = sum_below(here);
            if (is_one) sums[word] = before + below;
            before += of_last_lane(below + here);
        }
        if (lane == 0) totals[row] = before;
    }
}

// Memory of a block for experts.
struct OfExperts {
    u32* wanted;  // [experts][words]: a bit for each token that wants the expert
    u32* before;  // [experts][words]: the pairs of each 32 tokens, and then those of all tokens before
};

// A token wants the expert that is `here` among the block's.
DEVICE void note_pair(const OfExperts& of, u32 words, u32 here, u32 token) {
    or_shared(&of.wanted[here * words + token / 32], 1u << token % 32);
    add_shared(&of.before[here * words + token / 32], 1);
}

// The rows of earlier pairs for the same expert, of which `count` come in all.
template <typename Experts>
DEVICE u32 place_of(
    const Parameters& p, const OfExperts& of, u32 words, u32 here, u32 count, u32 pair, u32 token, const Experts& by) {
    const u32 nth = token / 32, word = here * words + nth, wanted = of.wanted[word], before = of.before[word];
    const u32 after = nth + 1 < words ? of.before[word + 1] : count;
    if (after - before == bits_of(wanted)) return before + bits_of(wanted & ((1u << token % 32) - 1));
    // A token wants an expert twice.
    u32 within = 0;
    const i32 expert = by.expert(by.load(pair));
    ROLLED for (u32 other = nth * 32 * p.top_k; other < pair; ++other) within += by.expert(by.load(other)) == expert;
    return before + within;
}

// Memory of a block for ranks.
struct OfRanks {
    u32 first, count;
    u32* sent;    // [ranks][words]: a bit for each token that goes to the rank
    u32* before;  // [ranks][words]: slots of all tokens before
};

// Marks which tokens go to which rank.
template <typename Experts>
DEVICE void mark_ranks(const Parameters& p, const OfRanks& of, u32 words, const Experts& by) {
    ROLLED for (u32 token = thread(); token < words * 32; token += threads()) {
        u32 ranks = 0;
        ROLLED for (u32 first = 0; first < p.top_k; first += kManyInFlight) {
            decltype(by.none()) loaded[kManyInFlight];
            UNROLL
            for (u32 j = 0; j < kManyInFlight; ++j) {
                const bool is_one = token < p.tokens && first + j < p.top_k;
                loaded[j] = is_one ? by.load(token * p.top_k + first + j) : by.none();
            }
            UNROLL
            for (u32 j = 0; j < kManyInFlight; ++j) {
                const i32 expert = first + j < p.top_k ? by.expert(loaded[j]) : -1;
                ranks |= expert >= 0 ? 1u << divided(static_cast<u32>(expert), p.experts_a_rank_inverse) : 0;
            }
        }
        ROLLED for (u32 i = 0; i < of.count; ++i) mark(of.sent + i * words, token, ranks >> (of.first + i) & 1);
    }
}

// Gives each token a slot at ranks, when the slots before are added up.
DEVICE void place_tokens(const Parameters& p, const Plan& plan, const OfRanks& of, u32 words) {
    ROLLED for (u32 i = 0; i < of.count; ++i) {
        const u32 rank = of.first + i;
        ROLLED for (u32 token = thread(); token < p.tokens; token += threads()) {
            const u32 word = i * words + token / 32, bit = 1u << token % 32;
            u32 slot = kNowhere;
            if (of.sent[word] & bit) {
                slot = of.before[word] + bits_of(of.sent[word] & (bit - 1));
                plan.list[rank * p.tokens + slot] = token;
            }
            plan.slot[token * p.ranks + rank] = slot;
        }
    }
}

DEVICE void clear(u32* words, u32 count) {
    ROLLED for (u32 i = thread(); i < count; i += threads()) words[i] = 0;
}

// The plan of few tokens in a block's own memory. False: an id is wrong, or this rank has failed before.
DEVICE bool plan_for_itself(const Parameters& p, char* memory, Plan* plan) {
    const u32 words = words_of(p.tokens), pairs = p.tokens * p.top_k;
    u32* at = reinterpret_cast<u32*>(memory);
    const auto take = [&at](u32 count) {
        u32* begin = at;
        at += count;
        return begin;
    };
    const OfExperts of_experts{take(p.experts * words), take(p.experts * words)};
    const OfRanks of_ranks{0, p.ranks, take(p.ranks * words), take(p.ranks * words)};
    clear(of_experts.wanted, (2 * p.experts + p.ranks) * words);
    plan->list = take(p.ranks * p.tokens);
    plan->slot = take(p.tokens * p.ranks);
    plan->expert = reinterpret_cast<i32*>(take(pairs));
    plan->place = take(pairs);
    plan->sent = take(p.ranks);
    plan->counts = take(p.experts);
    const i32* experts = plan->expert;
    const bool has_failed_before = has_failed(p);
    const bool is_wrong = read_ids<kFewInFlight>(p, thread(), threads(), plan->expert);
    if (any_of_block(is_wrong || has_failed_before)) return false;
    ROLLED for (u32 pair = thread(); pair < pairs; pair += threads()) {
        if (experts[pair] >= 0) note_pair(of_experts, words, static_cast<u32>(experts[pair]), token_of(p, pair));
    }
    const Known known{experts};
    mark_ranks(p, of_ranks, words, known);
    block_sync();
    add_up(false, of_experts.before, p.experts, words, plan->counts, [&](u32 word) { return of_experts.before[word]; });
    add_up(true, of_ranks.before, p.ranks, words, plan->sent, [&](u32 word) { return bits_of(of_ranks.sent[word]); });
    block_sync();
    ROLLED for (u32 pair = thread(); pair < pairs; pair += threads()) {
        const i32 expert = experts[pair];
        if (expert < 0) continue;
        plan->place[pair] = place_of(
            p, of_experts, words, static_cast<u32>(expert), plan->counts[expert], pair, token_of(p, pair), known);
    }
    place_tokens(p, *plan, of_ranks, words);
    block_sync();
    return true;
}

// Calls `act` for the pairs that want a block's experts: those of its list, or all of them again.
template <typename Act>
DEVICE void for_each_listed(const Parameters& p, const u32* listed, u32 first, u32 count, Act act) {
    if (*listed <= kListed) {
        const u32* list = listed + 1;
        ROLLED for (u32 i = thread(); i < *listed; i += threads()) {
            act(list[i] / kExpertsOfPlanBlock, list[i] % kExpertsOfPlanBlock);
        }
        return;
    }
    for_each_id<1>(p, thread(), threads(), [&](u32 pair, i64 id) {
        const u32 here = static_cast<u32>(expert_of(p, id)) - first;
        if (here < count) act(pair, here);
    });
}

// The plan of many tokens: some experts, for a block. Pairs that want them are listed first, unless they are too many.
DEVICE void plan_experts(const Parameters& p, const Plan& plan, u32 first, u32 count, u32* memory) {
    const u32 words = words_of(p.tokens);
    const OfExperts of{memory, memory + count * words};
    u32* listed = of.before + count * words;
    u32* list = listed + 1;
    clear(memory, 2 * count * words + 1);
    block_sync();
    for_each_id<kManyInFlight>(p, thread(), threads(), [&](u32 pair, i64 id) {
        const u32 here = static_cast<u32>(expert_of(p, id)) - first;
        if (here >= count) return;
        const u32 index = add_shared(listed, 1);
        if (index < kListed) list[index] = pair * kExpertsOfPlanBlock + here;
    });
    block_sync();
    for_each_listed(p, listed, first, count, [&](u32 pair, u32 here) { note_pair(of, words, here, token_of(p, pair)); });
    block_sync();
    add_up(false, of.before, count, words, plan.counts + first, [&](u32 word) { return of.before[word]; });
    block_sync();
    for_each_listed(p, listed, first, count, [&](u32 pair, u32 here) {
        plan.place[pair] = place_of(p, of, words, here, plan.counts[first + here], pair, token_of(p, pair), ByIds{p});
    });
}

// The plan of many tokens: a rank, for a block.
DEVICE void plan_rank(const Parameters& p, const Plan& plan, u32 rank, u32* memory) {
    const u32 words = words_of(p.tokens);
    const OfRanks of{rank, 1, memory, memory + words};
    clear(memory, words);
    block_sync();
    mark_ranks(p, of, words, ByIds{p});
    block_sync();
    add_up(false, of.before, 1, words, plan.sent + rank, [&](u32 word) { return bits_of(of.sent[word]); });
    block_sync();
    place_tokens(p, plan, of, words);
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
