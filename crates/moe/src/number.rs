//! [`Number`]: the elements that combine sums.

use std::ops::Range;

use half::f16;
use multiversion::multiversion;

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

    /// Writes the weighted sum of rows, one after the other from zero: each product is added without having been rounded, each sum
    /// is rounded to f32, and the last one to the nearest element, ties to even. DeepEP's low-latency combine adds so, too.
    pub(crate) fn write_weighted<'a>(
        self,
        rows: impl Iterator<Item = (&'a [u8], f32)> + Clone,
        target: &mut [u8],
    ) {
        self.in_columns(rows, target, |sums, (row, weight), columns| {
            let row = &row[columns];
            match self {
                Number::Bf16 => add_weighted_bf16(sums, row, weight),
                Number::F16 => add_weighted_f16(sums, row, weight),
                Number::F32 => add_weighted_f32(sums, row, weight),
            }
        });
    }

    /// The same without weights.
    pub(crate) fn write_sum<'a>(self, rows: impl Iterator<Item = &'a [u8]> + Clone, target: &mut [u8]) {
        self.in_columns(rows, target, |sums, row, columns| {
            let row = &row[columns];
            match self {
                Number::Bf16 => add_bf16(sums, row),
                Number::F16 => add(sums, row, |bytes| f16::from_le_bytes(bytes).to_f32()),
                Number::F32 => add(sums, row, f32::from_le_bytes),
            }
        });
    }

    /// Some columns of all rows, then the next ones: the sums stay in the fastest cache.
    fn in_columns<T>(
        self,
        rows: impl Iterator<Item = T> + Clone,
        target: &mut [u8],
        add_row: impl Fn(&mut [f32], T, Range<usize>),
    ) {
        let mut sums = [0.0; COLUMNS];
        let bytes = COLUMNS * self.bytes();
        for (index, target) in target.chunks_mut(bytes).enumerate() {
            let sums = &mut sums[..target.len() / self.bytes()];
            sums.fill(0.0);
            let begin = index * bytes;
            for row in rows.clone() {
                add_row(sums, row, begin..begin + target.len());
            }
            match self {
                Number::Bf16 => write_bf16(sums, target),
                Number::F16 => write(sums, target, |sum| f16::from_f32(sum).to_le_bytes()),
                Number::F32 => write(sums, target, f32::to_le_bytes),
            }
        }
    }
}

/// Elements of a row that are summed at a time.
const COLUMNS: usize = 1024;

// The compiler makes these for several kinds of CPU, and the first call takes the best one. A CPU without instructions for
// `mul_add` calls a function for each element.

#[multiversion(targets("x86_64+avx512f+avx512bw+fma", "x86_64+avx2+fma"))]
fn add_weighted_bf16(sums: &mut [f32], row: &[u8], weight: f32) {
    add_weighted(sums, row, weight, wide);
}

#[multiversion(targets("x86_64+avx512f+avx512bw+fma", "x86_64+avx2+fma"))]
fn add_weighted_f16(sums: &mut [f32], row: &[u8], weight: f32) {
    add_weighted(sums, row, weight, |bytes| f16::from_le_bytes(bytes).to_f32());
}

#[multiversion(targets("x86_64+avx512f+avx512bw", "x86_64+avx2"))]
fn add_bf16(sums: &mut [f32], row: &[u8]) {
    add(sums, row, wide);
}

#[multiversion(targets("x86_64+avx512f+avx512bw", "x86_64+avx2"))]
fn write_bf16(sums: &[f32], row: &mut [u8]) {
    write(sums, row, narrow);
}

#[multiversion(targets("x86_64+avx512f+avx512bw+fma", "x86_64+avx2+fma"))]
fn add_weighted_f32(sums: &mut [f32], row: &[u8], weight: f32) {
    add_weighted(sums, row, weight, f32::from_le_bytes);
}

/// The f32 of a bfloat16, without the look at NaN that `half` takes: with it combine took 1.25 times as long.
#[inline(always)]
fn wide(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// The bfloat16 nearest to an f32, ties to even, as `half` gives it, but without branches.
#[inline(always)]
fn narrow(sum: f32) -> [u8; 2] {
    let bits = sum.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let quiet_nan = bits >> 16 | 0x40;
    (if bits & 0x7fff_ffff > 0x7f80_0000 { quiet_nan } else { nearest } as u16).to_le_bytes()
}

#[inline(always)]
fn add<const N: usize>(sums: &mut [f32], row: &[u8], element: impl Fn([u8; N]) -> f32) {
    for (sum, bytes) in sums.iter_mut().zip(row.as_chunks::<N>().0) {
        *sum += element(*bytes);
    }
}

#[inline(always)]
fn add_weighted<const N: usize>(sums: &mut [f32], row: &[u8], weight: f32, element: impl Fn([u8; N]) -> f32) {
    for (sum, bytes) in sums.iter_mut().zip(row.as_chunks::<N>().0) {
        *sum = weight.mul_add(element(*bytes), *sum);
    }
}

#[inline(always)]
fn write<const N: usize>(sums: &[f32], row: &mut [u8], bytes: impl Fn(f32) -> [u8; N]) {
    for (sum, place) in sums.iter().zip(row.as_chunks_mut::<N>().0) {
        *place = bytes(*sum);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use half::bf16;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_bfloat16_is_rounded_as_half_rounds_it() {
        let edges = [0.0, -0.0, f32::MAX, f32::MIN_POSITIVE, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
        // All upper halves, with lower ones around the tie.
        let all = (0..1 << 16_u32)
            .flat_map(|upper| [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|lower| upper << 16 | lower));
        for sum in edges.into_iter().chain(all.map(f32::from_bits)) {
            assert_eq!(narrow(sum), bf16::from_f32(sum).to_le_bytes(), "{:x}", sum.to_bits());
        }
    }

    proptest! {
        /// Element by element, whatever the CPU has.
        #[test]
        fn sums_are_those_of_one_element_at_a_time(
            columns in prop_oneof![1..40_usize, COLUMNS - 3..COLUMNS + 40],
            weights in prop::collection::vec(-2.0f32..2.0, 0..5),
            seed: u64,
        ) {
            for number in [Number::Bf16, Number::F16, Number::F32] {
                let rows: Vec<Vec<u8>> = (0..weights.len())
                    .map(|row| {
                        let element = |column: usize| {
                            let drawn = seed.wrapping_mul(2 * (row * 4096 + column) as u64 + 1) >> 40;
                            drawn as f32 / 1e6 - 8.0
                        };
                        let mut bytes = Vec::new();
                        for column in 0..columns {
                            match number {
                                Number::Bf16 => bytes.extend(bf16::from_f32(element(column)).to_le_bytes()),
                                Number::F16 => bytes.extend(f16::from_f32(element(column)).to_le_bytes()),
                                Number::F32 => bytes.extend(element(column).to_le_bytes()),
                            }
                        }
                        bytes
                    })
                    .collect();
                let element = |row: &[u8], column: usize| {
                    let bytes = &row[column * number.bytes()..][..number.bytes()];
                    match number {
                        Number::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
                        Number::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
                        Number::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
                    }
                };
                let written = |sum: f32| match number {
                    Number::Bf16 => bf16::from_f32(sum).to_le_bytes().to_vec(),
                    Number::F16 => f16::from_f32(sum).to_le_bytes().to_vec(),
                    Number::F32 => sum.to_le_bytes().to_vec(),
                };
                let (mut weighted, mut plain) = (Vec::new(), Vec::new());
                for column in 0..columns {
                    let (mut product_sum, mut sum) = (0.0f32, 0.0f32);
                    for (row, weight) in rows.iter().zip(&weights) {
                        product_sum = weight.mul_add(element(row, column), product_sum);
                        sum += element(row, column);
                    }
                    weighted.extend(written(product_sum));
                    plain.extend(written(sum));
                }
                let mut found = vec![7; columns * number.bytes()];
                let both = rows.iter().map(Vec::as_slice).zip(weights.iter().copied());
                number.write_weighted(both, &mut found);
                prop_assert_eq!(&found, &weighted);
                number.write_sum(rows.iter().map(Vec::as_slice), &mut found);
                prop_assert_eq!(&found, &plain);
            }
        }
    }
}
