//! [`HyperLogLog`]: estimates the number of different keys, in 12 KiB.

/// Bits of a key that choose the register. 2^14 registers give a standard error of 1.04 / 2^7 = 0.81 %.
const PRECISION: u32 = 14;
const REGISTERS: usize = 1 << PRECISION;
/// The highest value that a register can have.
const MAX_RANK: usize = 64 - PRECISION as usize + 1;
/// Six bits for each register, and one more byte, because every register is read as two bytes.
const BYTES: usize = REGISTERS * 6 / 8 + 1;

/// A HyperLogLog sketch of 6-bit registers with Ertl's improved raw estimator, which needs no table and no switch
/// between ranges. Flajolet, Fusy, Gandouet, Meunier, "HyperLogLog", 2007; Ertl, "New cardinality estimation algorithms
/// for HyperLogLog sketches", 2017, algorithm 6.
#[derive(Clone, Default)]
pub struct HyperLogLog {
    /// Empty until the first key.
    registers: Vec<u8>,
}

/// Why bytes are not a sketch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadSketch {
    /// The length is neither 0 nor that of a sketch. Holds the length.
    #[error("{0} bytes are no sketch: it has 0 or {BYTES}")]
    Length(usize),
    /// A register has a value that no key produces.
    #[error("register {register} is {value}, above {MAX_RANK}")]
    Register {
        /// The register's number, from 0.
        register: usize,
        /// The rank that it holds.
        value: u8,
    },
}

impl HyperLogLog {
    /// Bytes of a sketch on the heap, once it has a key.
    pub const HEAP_BYTES: usize = BYTES;

    /// A sketch without keys.
    pub fn new() -> Self {
        Self::default()
    }

    /// True if the sketch never had a key.
    pub fn is_empty(&self) -> bool {
        self.registers.is_empty()
    }

    /// Adds a key, whose bits must be uniform.
    #[inline]
    pub fn insert(&mut self, key: u64) {
        if self.registers.is_empty() {
            self.registers = vec![0; BYTES];
        }
        let register = (key >> (64 - PRECISION)) as usize;
        let rest = key << PRECISION | 1 << (PRECISION - 1);
        let rank = rest.leading_zeros() as u8 + 1;
        if rank > self.get(register) {
            self.set(register, rank);
        }
    }

    /// Adds all keys of `other`.
    pub fn merge(&mut self, other: &Self) {
        if other.is_empty() {
            return;
        }
        if self.is_empty() {
            self.registers.clone_from(&other.registers);
            return;
        }
        for register in 0..REGISTERS {
            let rank = other.get(register);
            if rank > self.get(register) {
                self.set(register, rank);
            }
        }
    }

    /// Removes all keys, and keeps the memory.
    pub fn clear(&mut self) {
        self.registers.fill(0);
    }

    /// The estimated number of different keys.
    pub fn estimate(&self) -> f64 {
        if self.is_empty() {
            return 0.0;
        }
        let mut counts = [0u32; MAX_RANK + 1];
        (0..REGISTERS).for_each(|register| counts[self.get(register) as usize] += 1);
        let registers = REGISTERS as f64;
        let mut z = registers * tau(1.0 - f64::from(counts[MAX_RANK]) / registers);
        for &count in counts[1..MAX_RANK].iter().rev() {
            z = 0.5 * (z + f64::from(count));
        }
        z += registers * sigma(f64::from(counts[0]) / registers);
        registers * registers / (2.0 * std::f64::consts::LN_2 * z)
    }

    /// The sketch's bytes, to be sent to another node; [`from_bytes`](Self::from_bytes) reads them.
    pub fn as_bytes(&self) -> &[u8] {
        &self.registers
    }

    /// Reads a sketch that another node sent.
    ///
    /// # Errors
    /// [`BadSketch`] if the bytes are not a sketch.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BadSketch> {
        if !bytes.is_empty() && bytes.len() != BYTES {
            return Err(BadSketch::Length(bytes.len()));
        }
        let sketch = Self { registers: bytes.to_vec() };
        if !sketch.is_empty() {
            for register in 0..REGISTERS {
                let value = sketch.get(register);
                if usize::from(value) > MAX_RANK {
                    return Err(BadSketch::Register { register, value });
                }
            }
        }
        Ok(sketch)
    }

    fn get(&self, register: usize) -> u8 {
        let byte = register * 6 / 8;
        let pair = u16::from_le_bytes([self.registers[byte], self.registers[byte + 1]]);
        (pair >> (register * 6 % 8) & 63) as u8
    }

    fn set(&mut self, register: usize, value: u8) {
        let (byte, shift) = (register * 6 / 8, register * 6 % 8);
        let pair = u16::from_le_bytes([self.registers[byte], self.registers[byte + 1]]);
        let pair = pair & !(63 << shift) | u16::from(value) << shift;
        self.registers[byte..byte + 2].copy_from_slice(&pair.to_le_bytes());
    }
}

/// x + the sum over k >= 1 of x^(2^k) 2^(k-1).
fn sigma(mut x: f64) -> f64 {
    if x >= 1.0 {
        return f64::INFINITY;
    }
    let (mut power, mut sum) = (1.0, x);
    loop {
        x *= x;
        let before = sum;
        sum += x * power;
        power *= 2.0;
        if sum == before {
            return sum;
        }
    }
}

/// (1 - x - the sum over k >= 1 of (1 - x^(2^-k))^2 2^-k) / 3.
fn tau(mut x: f64) -> f64 {
    if x <= 0.0 || x >= 1.0 {
        return 0.0;
    }
    let (mut power, mut sum) = (1.0, 1.0 - x);
    loop {
        x = x.sqrt();
        let before = sum;
        power *= 0.5;
        sum -= (1.0 - x) * (1.0 - x) * power;
        if sum == before {
            return sum / 3.0;
        }
    }
}
