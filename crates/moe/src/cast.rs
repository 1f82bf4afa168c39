//! Rows of bfloat16 as float8_e4m3fn, with a scale for each 128 elements, as DeepEP's low-latency calls make them.
//!
//! The greatest element of a block, at least 1e-4, becomes 448: its scale is a 448th of that, and elements are multiplied with
//! 448 divided by it, in f32 and each rounded once. With powers of two the scale is rounded up to the next one.

use multiversion::multiversion;

use crate::MoeError;

/// Elements that share a scale.
pub const SCALED: usize = 128;
const FP8_MAX: f32 = 448.0;
const LEAST: f32 = 1e-4;

/// How scales are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scales {
    /// As an f32, of any size.
    Float,
    /// As f32, powers of two.
    PowerOfTwo,
    /// The exponent of a power of two, as an f32 has it: a byte.
    Exponent,
}

impl Scales {
    /// Bytes of a scale.
    pub fn bytes(self) -> usize {
        if self == Scales::Exponent { 1 } else { 4 }
    }
}

/// Casts rows, one after the other.
///
/// # Errors
/// [`MoeError::BadInput`] if `rows` are no whole blocks, or there is no room for exactly that.
pub fn cast_to_fp8(rows: &[u8], kind: Scales, to: &mut [u8], scales: &mut [u8]) -> Result<(), MoeError> {
    let blocks = rows.len() / (2 * SCALED);
    let wanted = (blocks * 2 * SCALED, blocks * SCALED, blocks * kind.bytes());
    if (rows.len(), to.len(), scales.len()) != wanted {
        return Err(MoeError::BadInput(format!("rows have no whole blocks of {SCALED} elements to scale")));
    }
    let (rows, to) = (rows.as_chunks::<{ 2 * SCALED }>().0, to.as_chunks_mut::<SCALED>().0);
    for ((block, to), written) in rows.iter().zip(to).zip(scales.chunks_exact_mut(kind.bytes())) {
        let greatest = greatest(block);
        let (scale, factor) = scale_of(f32::from_bits(greatest << 16), kind);
        match kind {
            Scales::Exponent => written[0] = (scale.to_bits() >> 23) as u8,
            _ => written.copy_from_slice(&scale.to_le_bytes()),
        }
        write_scaled(block, factor, to);
    }
    Ok(())
}

/// The greatest element, without signs, as the upper half of an f32. A NaN is greater than all.
#[multiversion(targets("x86_64+avx512f+avx512bw", "x86_64+avx2"))]
fn greatest(block: &[u8; 2 * SCALED]) -> u32 {
    let mut greatest = 0;
    for bytes in block.as_chunks::<2>().0 {
        greatest = greatest.max(u16::from_le_bytes(*bytes) & 0x7fff);
    }
    u32::from(greatest)
}

/// The scale, and what elements are multiplied with.
fn scale_of(greatest: f32, kind: Scales) -> (f32, f32) {
    // A NaN stays one.
    let most = if greatest < LEAST { LEAST } else { greatest };
    let scale = most * (1.0 / FP8_MAX);
    if kind == Scales::Float {
        return (scale, FP8_MAX / most);
    }
    let bits = scale.to_bits();
    let exponent = ((bits >> 23) + u32::from(bits & 0x7f_ffff != 0)).min(255);
    let factor = if exponent < 254 { f32::from_bits((254 - exponent) << 23) } else { 0.0 };
    (f32::from_bits(exponent << 23), factor)
}

#[multiversion(targets("x86_64+avx512f+avx512bw", "x86_64+avx2"))]
fn write_scaled(block: &[u8; 2 * SCALED], factor: f32, to: &mut [u8; SCALED]) {
    for (bytes, to) in block.as_chunks::<2>().0.iter().zip(to) {
        *to = fp8(f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16) * factor);
    }
}

/// The nearest float8_e4m3fn, ties to even, at most 448; 0x7f for a NaN.
#[inline(always)]
fn fp8(value: f32) -> u8 {
    const STEPS: f32 = 16384.0;
    let bits = value.to_bits();
    let (sign, size) = (bits >> 24 & 0x80, bits & 0x7fff_ffff);
    // Below 2^-6 steps are 2^-9, at which the sum of a float with 2^14 ends.
    let small = (f32::from_bits(size) + STEPS).to_bits().wrapping_sub(STEPS.to_bits());
    let normal = (size.wrapping_add(0x7_ffff + (size >> 20 & 1)) >> 20).wrapping_sub((127 - 7) << 3);
    let nearest = if size < 0x3c80_0000 { small } else { normal };
    let held = if size >= 0x43e0_0000 { 0x7e } else { nearest };
    (if size > 0x7f80_0000 { 0x7f } else { sign | held }) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of a byte.
    fn value(byte: u8) -> f32 {
        let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
        let size =
            if exponent == 0 { mantissa / 512.0 } else { (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7) };
        if byte < 128 { size } else { -size }
    }

    #[test]
    fn every_byte_is_the_nearest_of_what_lies_around_it_and_ties_are_even() {
        for byte in 0..0x7e {
            let (low, high) = (value(byte), value(byte + 1));
            assert_eq!((fp8(low), fp8(-low)), (byte, byte | 0x80));
            let middle = (low + high) / 2.0;
            assert_eq!(fp8(middle), byte + byte % 2);
            assert_eq!(fp8(middle.next_down()), byte);
            assert_eq!(fp8(middle.next_up()), byte + 1);
        }
        assert_eq!([448.0, 464.0, 1e9, f32::INFINITY].map(fp8), [0x7e; 4]);
        assert_eq!([f32::NAN, -f32::NAN].map(fp8), [0x7f; 2]);
        assert_eq!(fp8(-1e9), 0xfe);
    }

    #[test]
    fn the_greatest_element_becomes_448_and_powers_of_two_are_at_least_its_scale() {
        for greatest in [1.0f32, 3.0, 448.0, 1e-3, 2.5e30] {
            let (scale, factor) = scale_of(greatest, Scales::Float);
            assert_eq!((scale, factor), (greatest * (1.0 / 448.0), 448.0 / greatest));
            let (rounded, factor) = scale_of(greatest, Scales::PowerOfTwo);
            assert!(rounded >= scale && rounded < 2.0 * scale && rounded * factor == 1.0, "{greatest}");
            assert_eq!(rounded.log2().fract(), 0.0);
        }
        assert_eq!(scale_of(0.0, Scales::Float).1, 448.0 / LEAST);
        assert!(scale_of(f32::NAN, Scales::Float).0.is_nan());
    }

    #[test]
    fn rows_without_whole_blocks_are_refused() {
        for (rows, to, scales) in [(254, 127, 4), (256, 127, 4), (256, 128, 3)] {
            let cast = cast_to_fp8(&vec![0; rows], Scales::Float, &mut vec![0; to], &mut vec![0; scales]);
            assert!(matches!(cast, Err(MoeError::BadInput(_))));
        }
    }
}
