// What differs between a GPU and a CPU. On a CPU tests run the same kernels with one thread a block.
//
// A group is some threads of a block that share a row, a warp 32 of them. On a CPU both are the one thread, so barriers between
// threads are nothing, and a loop over all threads' parts goes over all of it.

#pragma once

#include <cstdint>

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i32 = std::int32_t;
using i64 = std::int64_t;

#ifdef __CUDACC__

#define DEVICE __device__ __forceinline__
// Code that rarely runs: a copy at each place would push other code out of the cache of instructions.
#define COLD __device__ __noinline__
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#define SHARED_MEMORY extern __shared__ __align__(128) char shared_memory[]

constexpr u32 kWarp = 32;
constexpr u32 kHalfWarp = 16;
constexpr u32 kWarpBits = 5;

DEVICE u32 thread() { return threadIdx.x; }
DEVICE u32 threads() { return blockDim.x; }
DEVICE u32 block() { return blockIdx.x; }
DEVICE u32 blocks() { return gridDim.x; }
DEVICE void block_sync() { __syncthreads(); }
DEVICE void warp_sync() { __syncwarp(); }
// Barrier 0 is the block's.
DEVICE void group_sync(u32 group, u32 size) { asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(size) : "memory"); }

// The same, and whether that is so for any of its threads.
DEVICE bool any_of_group(u32 group, u32 size, bool is_so) {
    u32 any;
    asm volatile(
        "{ .reg .pred one, all; setp.ne.u32 one, %1, 0; bar.red.or.pred all, %2, %3, one; selp.u32 %0, 1, 0, all; }"
        : "=r"(any)
        : "r"(static_cast<u32>(is_so)), "r"(group + 1), "r"(size)
        : "memory");
    return any != 0;
}

// Whether that is so for any thread of the block, which all reach this.
DEVICE bool any_of_block(bool is_so) { return __syncthreads_or(is_so); }

DEVICE u32 bits_of(u32 word) { return __popc(word); }
DEVICE u32 lowest_bit(u32 word) { return __ffs(word) - 1; }
DEVICE void or_shared(u32* word, u32 bits) { atomicOr(word, bits); }
DEVICE u32 add_shared(u32* word, u32 value) { return atomicAdd(word, value); }
// Sets the bit of an index, of which each lane of a warp has the next, from a multiple of 32 on.
DEVICE void mark(u32* words, u32 index, bool is_so) {
    const u32 bits = __ballot_sync(~0u, is_so);
    if (threadIdx.x % kWarp == 0) words[index / kWarp] = bits;
}
// Writes a word that is 0. True: this was the first to do so.
DEVICE bool claim(u32* word, u32 value) { return atomicCAS(word, 0, value) == 0; }

DEVICE void add_global(u64* word, u64 value) { atomicAdd(reinterpret_cast<unsigned long long*>(word), value); }

// The sum of the values of all lower lanes.
DEVICE u32 sum_below(u32 value) {
    u32 sum = value;
    for (u32 step = 1; step < kWarp; step <<= 1) {
        const u32 other = __shfl_up_sync(~0u, sum, step);
        sum += threadIdx.x % kWarp >= step ? other : 0;
    }
    return sum - value;
}

// The greatest value of a warp.
DEVICE u32 greatest_of_warp(u32 value) {
    for (u32 step = kWarp / 2; step > 0; step /= 2) {
        const u32 other = __shfl_xor_sync(~0u, value, step);
        value = other > value ? other : value;
    }
    return value;
}

DEVICE u32 greatest_of_half_warp(u32 value) {
    for (u32 step = kHalfWarp / 2; step > 0; step /= 2) {
        const u32 other = __shfl_xor_sync(~0u, value, step);
        value = other > value ? other : value;
    }
    return value;
}

// One value of a warp, of its last lane.
DEVICE u32 of_last_lane(u32 value) { return __shfl_sync(~0u, value, kWarp - 1); }

// At most 32 values, of which each lane of a warp makes one. All lanes ask for the same one.
template <typename T, typename Make>
struct PerLane {
    T value;
    DEVICE PerLane(u32 count, T none, Make make) : value(none) {
        if (threadIdx.x % kWarp < count) value = make(threadIdx.x % kWarp);
    }
    DEVICE T operator[](u32 index) const { return __shfl_sync(~0u, value, index); }
    DEVICE u32 not_below_zero() const { return __ballot_sync(~0u, value >= 0); }
};

// Words that other GPUs write and read: system scope.
DEVICE u64 load_acquire(const u64* word) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}
DEVICE u64 load_relaxed(const u64* word) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}
DEVICE u32 load_relaxed(const u32* word) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}
DEVICE void store_release(u64* word, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
DEVICE void store_relaxed(u64* word, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Bytes that are read once, and that another kernel may have written since this one began: not by the read-only path.
DEVICE uint4 load_unit(const char* from) {
    uint4 unit;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(unit.x), "=r"(unit.y), "=r"(unit.z), "=r"(unit.w)
                 : "l"(from)
                 : "memory");
    return unit;
}
DEVICE void store_unit(char* to, uint4 unit) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(unit.x), "r"(unit.y), "r"(unit.z), "r"(unit.w)
                 : "memory");
}
// Numbers, likewise.
DEVICE u8 load_once(const u8* from) {
    u32 value;
    asm volatile("ld.global.L1::no_allocate.u8 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return static_cast<u8>(value);
}
DEVICE u32 load_once(const u32* from) {
    u32 value;
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
DEVICE u64 load_once(const u64* from) {
    u64 value;
    asm volatile("ld.global.L1::no_allocate.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

#if __CUDA_ARCH__ >= 900
// Copies of the GPU's own engine, in multiples of 16 bytes: into a block's memory, whose arrival a barrier there tells, and out.
#define HAS_BULK_COPIES
DEVICE u32 shared_address(const void* memory) { return static_cast<u32>(__cvta_generic_to_shared(memory)); }
DEVICE void begin_barrier(u64* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void expect_bytes(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
DEVICE void bulk_load(char* to, const char* from, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
// Waits for the bytes that were expected. Each phase of the barrier has the other parity.
DEVICE void wait_for_bytes(u64* barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }" ::"r"(
            shared_address(barrier)),
        "r"(parity)
        : "memory");
}
// Copies from the block's memory see all that this thread wrote there.
DEVICE void fence_for_bulk_store() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Copies from the GPU's memory see all that this thread may read there.
DEVICE void fence_for_bulk_load() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
DEVICE void bulk_store(char* to, const char* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}
// Waits for copies out of this thread: until their bytes have been read, or until they are there.
DEVICE void bulk_stores_have_read() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
DEVICE void bulk_stores_are_done() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
#endif

DEVICE u64 now_ns() {
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}
DEVICE void pause() { __nanosleep(20); }

DEVICE float times(float a, float b) { return __fmul_rn(a, b); }
DEVICE float plus(float a, float b) { return __fadd_rn(a, b); }
// Rounds once.
DEVICE float times_plus(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float quotient(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float float_of_bits(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 bits_of_float(float value) { return __float_as_uint(value); }
DEVICE float float_of_half(u32 half) {
    float value;
    asm("{ .reg .f16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "h"(static_cast<unsigned short>(half)));
    return value;
}
// Rounds both, the second into the upper half.
DEVICE u32 halves_of(float low, float high) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
DEVICE u32 bfloats_of(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

#if __CUDA_ARCH__ >= 890
// Two numbers as float8_e4m3fn, the second one in the upper byte: the nearest, ties to even, at most 448.
DEVICE u32 fp8s_of(float low, float high) {
    u16 both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
}
#else
#define WITHOUT_FP8
#endif

// A kernel with its most threads, and the blocks that a multiprocessor has to run at a time.
#define KERNEL(name, most_threads, at_a_time) \
    extern "C" __global__ void __launch_bounds__(most_threads, at_a_time) name(const __grid_constant__ Parameters p)

#else  // A CPU

#include <sched.h>
#include <time.h>

#include <cstdlib>
#include <cstring>

#define DEVICE inline
#define COLD inline
#define UNROLL
#define ROLLED
#define SHARED_MEMORY char* const shared_memory = memory_of_block

constexpr u32 kWarp = 1;
constexpr u32 kHalfWarp = 1;

struct uint4 {
    u32 x, y, z, w;
};

constexpr u32 kMemoryOfBlock = 256 << 10;

static thread_local u32 this_block, all_blocks;
// As a thread's own array it would take that much of the stack of every thread.
static thread_local char* memory_of_block;

DEVICE u32 thread() { return 0; }
DEVICE u32 threads() { return 1; }
DEVICE u32 block() { return this_block; }
DEVICE u32 blocks() { return all_blocks; }
DEVICE void block_sync() {}
DEVICE void warp_sync() {}
DEVICE void group_sync(u32, u32) {}
DEVICE bool any_of_group(u32, u32, bool is_so) { return is_so; }

DEVICE bool any_of_block(bool is_so) { return is_so; }

DEVICE u32 bits_of(u32 word) { return static_cast<u32>(__builtin_popcount(word)); }
DEVICE u32 lowest_bit(u32 word) { return static_cast<u32>(__builtin_ctz(word)); }
DEVICE void or_shared(u32* word, u32 bits) { *word |= bits; }
DEVICE u32 add_shared(u32* word, u32 value) {
    *word += value;
    return *word - value;
}
DEVICE void mark(u32* words, u32 index, bool is_so) {
    if (is_so) words[index / 32] |= 1u << index % 32;
}
DEVICE bool claim(u32* word, u32 value) {
    u32 none = 0;
    return __atomic_compare_exchange_n(word, &none, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
DEVICE void add_global(u64* word, u64 value) { __atomic_fetch_add(word, value, __ATOMIC_RELAXED); }
DEVICE u32 sum_below(u32) { return 0; }
DEVICE u32 greatest_of_warp(u32 value) { return value; }
DEVICE u32 greatest_of_half_warp(u32 value) { return value; }
DEVICE u32 of_last_lane(u32 value) { return value; }

template <typename T, typename Make>
struct PerLane {
    u32 count;
    T none;
    Make make;
    PerLane(u32 count, T none, Make make) : count(count), none(none), make(make) {}
    T operator[](u32 index) const { return index < count ? make(index) : none; }
    u32 not_below_zero() const {
        u32 found = 0;
        for (u32 index = 0; index < count; ++index) found |= make(index) >= 0 ? 1u << index : 0;
        return found;
    }
};

DEVICE u64 load_acquire(const u64* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
DEVICE u64 load_relaxed(const u64* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
DEVICE u32 load_relaxed(const u32* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
DEVICE void store_release(u64* word, u64 value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
// A thread that reads it may be of another kind, which wants what was written before.
DEVICE void store_relaxed(u64* word, u64 value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

DEVICE uint4 load_unit(const char* from) {
    uint4 unit;
    std::memcpy(&unit, from, sizeof unit);
    return unit;
}
DEVICE void store_unit(char* to, uint4 unit) { std::memcpy(to, &unit, sizeof unit); }
template <typename T>
DEVICE T load_once(const T* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

DEVICE u64 now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<u64>(time.tv_sec) * 1000000000 + static_cast<u64>(time.tv_nsec);
}
DEVICE void pause() { sched_yield(); }

// Compiled without contraction of a product and a sum.
DEVICE float times(float a, float b) { return a * b; }
DEVICE float plus(float a, float b) { return a + b; }
DEVICE float times_plus(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE float quotient(float a, float b) { return a / b; }
DEVICE float float_of_bits(u32 bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
DEVICE u32 bits_of_float(float value) {
    u32 bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
DEVICE float float_of_half(u32 half) {
    const u16 bits = static_cast<u16>(half);
    _Float16 value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
DEVICE u32 half_of(float value) {
    const _Float16 half = static_cast<_Float16>(value);
    u16 bits;
    std::memcpy(&bits, &half, sizeof bits);
    return bits;
}
DEVICE u32 bfloat_of(float value) {
    const u32 bits = bits_of_float(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;  // as the GPU's conversion writes what is no number
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
DEVICE u32 halves_of(float low, float high) { return half_of(low) | half_of(high) << 16; }
DEVICE u32 bfloats_of(float low, float high) { return bfloat_of(low) | bfloat_of(high) << 16; }

#define WITHOUT_FP8

// A function that does a block of a launch. All blocks run at a time, as on a GPU.
#define KERNEL(name, most_threads, at_a_time)                                         \
    static void name##_block(const Parameters& p);                                    \
    extern "C" void name##_on_a_cpu(const void* parameters, u32 each, u32 launched) { \
        this_block = each;                                                            \
        all_blocks = launched;                                                        \
        memory_of_block = static_cast<char*>(std::malloc(kMemoryOfBlock));            \
        name##_block(*static_cast<const Parameters*>(parameters));                    \
        std::free(memory_of_block);                                                   \
    }                                                                                 \
    static void name##_block(const Parameters& p)

#endif

#ifdef WITHOUT_FP8
// As the newer GPUs' instruction does it.
DEVICE u32 fp8_of(float value) {
    const u32 bits = bits_of_float(value), sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return 0x7f;
    // 448, and what is rounded to it.
    if (size >= 0x43e00000) return sign | 0x7e;
    // Below 2^-6 steps are 2^-9. The sum of a float with 2^14 ends at that step.
    if (size < 0x3c800000) return sign | (bits_of_float(plus(float_of_bits(size), 16384.f)) - bits_of_float(16384.f));
    return sign | (((size + 0x7ffff + (size >> 20 & 1)) >> 20) - ((127 - 7) << 3));
}
DEVICE u32 fp8s_of(float low, float high) { return fp8_of(low) | fp8_of(high) << 8; }
#endif
