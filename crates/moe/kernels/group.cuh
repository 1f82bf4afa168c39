// A group of threads that shares a row, and its copies; the roles of blocks.

#pragma once

#include "parameters.cuh"

namespace {

// Groups of a block at most.
constexpr u32 kGroups = 4;

// Threads of a block that share a row.
struct Group {
    u32 index, lane, size, first, step, barrier;
    // Barriers of senders and receivers differ: a thread that receives meets none that still sends, with other groups.
    DEVICE Group(u32 bits, u32 of_role, u32 in_role, bool receives) {
        size = least(1u << bits, threads());
        index = thread() >> bits;
        lane = thread() & (size - 1);
        const u32 here = threads() >> bits;
        first = index * in_role + of_role;
        step = (here > 0 ? here : 1) * in_role;
        barrier = index + (receives ? kGroups : 0);
    }
    DEVICE void sync() const { group_sync(barrier, size); }
    DEVICE bool any(bool is_so) const { return any_of_group(barrier, size, is_so); }
};

// Pieces of 16, 4 or 1 bytes.
DEVICE uint4 load_piece(u32 size, const char* from, u32 index, u32 bytes) {
    if (index * size >= bytes) return uint4{0, 0, 0, 0};
    if (size == 16) return load_unit(from + index * 16);
    if (size == 4) return uint4{load_once(reinterpret_cast<const u32*>(from) + index), 0, 0, 0};
    return uint4{load_once(reinterpret_cast<const u8*>(from) + index), 0, 0, 0};
}

DEVICE void store_piece(u32 size, char* to, u32 index, uint4 piece) {
    if (size == 16) {
        store_unit(to + index * 16, piece);
    } else if (size == 4) {
        reinterpret_cast<u32*>(to)[index] = piece.x;
    } else {
        reinterpret_cast<u8*>(to)[index] = static_cast<u8>(piece.x);
    }
}

DEVICE void copy_pieces(const Group& group, u32 size, char* to, const char* from, u32 bytes) {
    ROLLED for (u32 at = group.lane; at * size < bytes; at += group.size) store_piece(size, to, at, load_piece(size, from, at, bytes));
}

// Loads units of a row that lie a group apart, from this thread's first on.
template <u32 most = kInFlight>
DEVICE void load_units(const Group& group, uint4* units, const char* row, u32 first, u32 count) {
    UNROLL
    for (u32 j = 0; j < most; ++j) {
        const u32 unit = first + j * group.size;
        if (unit < count) units[j] = load_unit(row + static_cast<u64>(unit) * kUnit);
    }
}

template <u32 most = kInFlight>
DEVICE void store_units(const Group& group, const uint4* units, char* row, u32 first, u32 count) {
    UNROLL
    for (u32 j = 0; j < most; ++j) {
        const u32 unit = first + j * group.size;
        if (unit < count) store_unit(row + static_cast<u64>(unit) * kUnit, units[j]);
    }
}

// Copies a row, `most` units of a thread at a time.
template <u32 most>
DEVICE void copy_row(const Group& group, char* to, const char* from, u32 bytes) {
    const u32 count = bytes / kUnit;
    for (u32 first = group.lane; first - group.lane < count; first += most * group.size) {
        uint4 units[most];
        load_units<most>(group, units, from, first, count);
        store_units<most>(group, units, to, first, count);
    }
}

// Adds to a count of this rank's.
DEVICE void count_rows(const Parameters& p, const Group& group, Stat stat, u32 rows) {
    if (group.lane == 0 && rows > 0) add_global(p.stats + stat, rows);
}

// This block's role: whether it sends or receives, and its number among those that do.
struct Role {
    bool sends, receives;
    u32 of_senders, senders, of_receivers, receivers;
    DEVICE explicit Role(const Parameters& p) {
        const bool is_both = p.phases == (kSend | kReceive), are_apart = is_both && p.senders > 0;
        sends = (p.phases & kSend) && (!are_apart || block() < p.senders);
        receives = (p.phases & kReceive) && (!are_apart || block() >= p.senders);
        senders = are_apart ? p.senders : blocks();
        of_senders = block();
        receivers = are_apart ? blocks() - p.senders : blocks();
        of_receivers = are_apart ? block() - p.senders : block();
    }
};

}  // namespace
