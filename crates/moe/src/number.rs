//! [`Number`]: the elements that combine sums.

use half::{bf16, f16};

/// How an element of a row is written, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Number {
    /// The upper half of an f32.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
}

impl Number {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Number::Bf16 | Number::F16 => 2,
            Number::F32 => 4,
        }
    }

    /// Adds `weight * element` to each sum; product and sum are rounded to f32, one after the other.
    pub(crate) fn add_weighted(self, sums: &mut [f32], row: &[u8], weight: f32) {
        match self {
            Number::Bf16 => add(sums, row, |bytes| weight * wide(bytes)),
            Number::F16 => add(sums, row, |bytes| weight * f16::from_le_bytes(bytes).to_f32()),
            Number::F32 => add(sums, row, |bytes| weight * f32::from_le_bytes(bytes)),
        }
    }

    /// Adds each element to its sum.
    pub(crate) fn add(self, sums: &mut [f32], row: &[u8]) {
        match self {
            Number::Bf16 => add(sums, row, wide),
            Number::F16 => add(sums, row, |bytes| f16::from_le_bytes(bytes).to_f32()),
            Number::F32 => add(sums, row, f32::from_le_bytes),
        }
    }

    /// Writes the sums, each rounded to the nearest element, ties to even.
    pub(crate) fn write(self, sums: &[f32], row: &mut [u8]) {
        match self {
            Number::Bf16 => write(sums, row, |sum| bf16::from_f32(sum).to_le_bytes()),
            Number::F16 => write(sums, row, |sum| f16::from_f32(sum).to_le_bytes()),
            Number::F32 => write(sums, row, f32::to_le_bytes),
        }
    }
}

/// The f32 of a bfloat16, without the look at NaN that `half` takes: with it combine took 1.25 times as long.
fn wide(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

fn add<const N: usize>(sums: &mut [f32], row: &[u8], element: impl Fn([u8; N]) -> f32) {
    for (sum, bytes) in sums.iter_mut().zip(row.as_chunks::<N>().0) {
        *sum += element(*bytes);
    }
}

fn write<const N: usize>(sums: &[f32], row: &mut [u8], bytes: impl Fn(f32) -> [u8; N]) {
    for (sum, place) in sums.iter().zip(row.as_chunks_mut::<N>().0) {
        *place = bytes(*sum);
    }
}
