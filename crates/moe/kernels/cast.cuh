// Rows of bfloat16 as float8_e4m3fn, with a scale for each 128 elements: before a dispatch sends them.

#pragma once

#include "parameters.cuh"

namespace {

// Elements that share a scale, and 16-byte units of them.
constexpr u32 kScaled = 128;
constexpr u32 kUnitsOfScale = kScaled * sizeof(u16) / kUnit;
constexpr u32 kUnitsOfLane = kUnitsOfScale / kHalfWarp;
constexpr float kFp8Max = 448.f;
// 1e-4: the least that counts as the greatest element.
constexpr u32 kLeastBits = 0x38d1b717;

// The greatest element of a word of two, without signs. A NaN is greater than all.
DEVICE u32 greatest_of_word(u32 word) {
    const u32 low = word & 0x7fff, high = word >> 16 & 0x7fff;
    return low > high ? low : high;
}

DEVICE u32 greatest_of_unit(uint4 unit) {
    const u32 a = greatest_of_word(unit.x), b = greatest_of_word(unit.y), c = greatest_of_word(unit.z), d = greatest_of_word(unit.w);
    const u32 ab = a > b ? a : b, cd = c > d ? c : d;
    return ab > cd ? ab : cd;
}

// A scale, and what elements are multiplied with.
struct Scale {
    float scale, factor;
    u32 exponent;
    DEVICE Scale(const Parameters& p, u32 greatest) {
        const u32 bits = greatest << 16;
        const float most = float_of_bits(bits > kLeastBits ? bits : kLeastBits);
        scale = times(most, 1.f / kFp8Max);
        factor = quotient(kFp8Max, most);
        if ((p.scaling & kPowersOfTwo) == 0) return;
        // 2 to the power of ceil(log2(scale)).
        const u32 of_scale = bits_of_float(scale);
        exponent = least((of_scale >> 23) + ((of_scale & 0x7fffff) != 0), 255);
        scale = float_of_bits(exponent << 23);
        factor = exponent < 254 ? float_of_bits((254 - exponent) << 23) : 0.f;
    }
};

// Two elements, the second one in the upper byte.
DEVICE u32 scaled_word(u32 word, float factor) {
    return fp8s_of(times(float_of_bits(word << 16), factor), times(float_of_bits(word & 0xffff0000), factor));
}

DEVICE void cast_rows(const Parameters& p) {
    constexpr u32 of_warp = kWarp / kHalfWarp;
    const u32 scales = p.tokens * (p.row_bytes / kScaled), lane = thread() % kHalfWarp;
    const u32 warps = blocks() * (threads() / kWarp);
    ROLLED for (u32 warp = block() * (threads() / kWarp) + thread() / kWarp; warp * of_warp < scales; warp += warps) {
        const u32 index = warp * of_warp + thread() % kWarp / kHalfWarp;
        const bool is_one = index < scales;
        const char* from = p.x + static_cast<u64>(index) * kScaled * sizeof(u16);
        uint4 units[kUnitsOfLane];
        u32 greatest = 0;
        UNROLL
        for (u32 j = 0; j < kUnitsOfLane; ++j) {
            units[j] = is_one ? load_unit(from + (lane + j * kHalfWarp) * kUnit) : uint4{0, 0, 0, 0};
            const u32 of_unit = greatest_of_unit(units[j]);
            greatest = of_unit > greatest ? of_unit : greatest;
        }
        const Scale scale(p, greatest_of_half_warp(greatest));
        if (!is_one) continue;
        u64* to = reinterpret_cast<u64*>(p.out_rows + static_cast<u64>(index) * kScaled);
        UNROLL
        for (u32 j = 0; j < kUnitsOfLane; ++j) {
            const uint4 unit = units[j];
            const u32 low = scaled_word(unit.x, scale.factor) | scaled_word(unit.y, scale.factor) << 16;
            const u32 high = scaled_word(unit.z, scale.factor) | scaled_word(unit.w, scale.factor) << 16;
            to[lane + j * kHalfWarp] = static_cast<u64>(high) << 32 | low;
        }
        if (lane != 0) continue;
        if (p.scaling & kPacked) {
            reinterpret_cast<u8*>(p.out_scales)[index] = static_cast<u8>(scale.exponent);
        } else {
            reinterpret_cast<float*>(p.out_scales)[index] = scale.scale;
        }
    }
}

}  // namespace
