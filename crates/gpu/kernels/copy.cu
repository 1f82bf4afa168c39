// Copies many pieces in one launch: between pinned host memory and a GPU, or between two GPUs.
//
// A warp takes a piece at a time, so that pieces of 4 KiB keep as many threads busy as pieces of 64 KiB; the caller
// cuts long ranges into pieces. What limits a copy over PCIe is how many bytes are asked for at a time: each thread has
// eight loads of 16 bytes in flight.

#include <cstdint>

// As crates/gpu/src/driver.rs: TableEntry. Everything is a multiple of 16.
struct Entry {
    std::uint64_t dst;
    std::uint64_t src;
    std::uint64_t len;
};
static_assert(sizeof(Entry) == 24, "the table is shared with Rust");

namespace {

constexpr unsigned kThreads = 512;
constexpr unsigned kWarp = 32;
constexpr unsigned kInFlight = 8;

// Each byte is read once. Volatile: otherwise the compiler moves each load to its store, so that a thread waits for one load after
// the other. Between two H200s 8 blocks then copied pieces of 64 KiB at 115 GB/s instead of 332. Not by the read-only path
// (ld.global.nc), which is slower over a link: 269 GB/s.
__device__ __forceinline__ uint4 load_once(const uint4* from) {
    uint4 value;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from));
    return value;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) kvlane_copy(const Entry* __restrict__ table, unsigned count) {
    const unsigned lane = threadIdx.x % kWarp;
    const unsigned warps = gridDim.x * (kThreads / kWarp);
    // Neighbouring entries go to different blocks: a short list too is spread over the whole grid.
    unsigned index = threadIdx.x / kWarp * gridDim.x + blockIdx.x;
    if (index >= count) {
        return;
    }
    Entry entry = table[index];
    while (true) {
        // The table lies in host memory: the next entry is fetched while this one is copied.
        const unsigned following = index + warps;
        const bool more = following < count && following > index;
        Entry next = entry;
        if (more) {
            next = table[following];
        }

        const uint4* src = reinterpret_cast<const uint4*>(entry.src);
        uint4* dst = reinterpret_cast<uint4*>(entry.dst);
        const std::uint64_t units = entry.len / sizeof(uint4);
        for (std::uint64_t at = lane; at < units; at += kWarp * kInFlight) {
            uint4 values[kInFlight];
#pragma unroll
            for (unsigned k = 0; k < kInFlight; ++k) {
                if (at + k * kWarp < units) {
                    values[k] = load_once(src + at + k * kWarp);
                }
            }
#pragma unroll
            for (unsigned k = 0; k < kInFlight; ++k) {
                if (at + k * kWarp < units) {
                    dst[at + k * kWarp] = values[k];
                }
            }
        }

        if (!more) {
            return;
        }
        entry = next;
        index = following;
    }
}
