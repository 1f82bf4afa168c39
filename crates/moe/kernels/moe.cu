// Dispatch and combine of a mixture of experts between the GPUs of one host, by stores into each other's memory. The head of
// crates/moe/src/lib.rs describes the protocol, crates/moe/src/layout.rs the memory that ranks write into each other.
//
//   cast      rows of bfloat16 become fp8 with scales, if the caller wants that
//   plan      for many tokens, a launch of its own: where each row goes. For few, each block of dispatch plans for itself.
//   dispatch  some blocks send this rank's rows and counts, the others wait for those of all ranks and place them
//   combine   some blocks send back what experts made of the rows of other ranks, the others sum up this rank's tokens
//
// A part that sends waits for nobody. A part that receives waits for words, each of one row: for the number of the dispatch.

#include "cast.cuh"
#include "combine.cuh"
#include "dispatch.cuh"

KERNEL(kvlane_moe_cast, kThreads, 1) { cast_rows(p); }

// Blocks of experts, then a block for each rank.
KERNEL(kvlane_moe_plan, kPlanThreads, 1) {
    SHARED_MEMORY;
    if (has_block_failed(p)) return;
    const Plan plan{p.list, p.slot, p.expert, p.place, p.sent, p.expert_counts};
    u32* memory = reinterpret_cast<u32*>(shared_memory);
    const u32 of_experts = (p.experts + kExpertsOfPlanBlock - 1) / kExpertsOfPlanBlock;
    read_ids<1>(p, block() * threads() + thread(), blocks() * threads(), p.expert);
    if (block() < of_experts) {
        const u32 first = block() * kExpertsOfPlanBlock;
        plan_experts(p, plan, first, least(kExpertsOfPlanBlock, p.experts - first), memory);
    } else {
        plan_rank(p, plan, block() - of_experts, memory);
    }
}

KERNEL(kvlane_moe_dispatch, kThreads, 2) {
    SHARED_MEMORY;
    // Used after the plan: a sum with it here would wait for it.
    const u64 last = last_number(p);
    const Role role(p);
    Plan plan{p.list, p.slot, p.expert, p.place, p.sent, p.expert_counts};
    const bool plans = p.plan_bytes > 0 && (p.phases & kSend);
    // A wrong id is known before anything is sent.
    if (plans ? !plan_for_itself(p, shared_memory, &plan) : has_block_failed(p)) return;
    const u64 number = last + 1;
    if (role.sends) send_rows(p, plan, shared_memory, number, role.of_senders, role.senders);
    if (role.receives) receive_rows(p, plan, shared_memory, number, role.of_receivers, role.receivers);
    if (p.phases & kReceive) end_number(p, number);
}

KERNEL(kvlane_moe_exact_bf16, kThreads, 1) { combine<kBf16, true>(p); }
KERNEL(kvlane_moe_exact_f16, kThreads, 1) { combine<kF16, true>(p); }
KERNEL(kvlane_moe_exact_f32, kThreads, 1) { combine<kF32, true>(p); }
KERNEL(kvlane_moe_reduced_bf16, kThreads, 1) { combine<kBf16, false>(p); }
KERNEL(kvlane_moe_reduced_f16, kThreads, 1) { combine<kF16, false>(p); }
KERNEL(kvlane_moe_reduced_f32, kThreads, 1) { combine<kF32, false>(p); }
