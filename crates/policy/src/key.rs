//! [`spread`]: turns any number into a key that is uniform over 64 bits.

/// Mixes a number into a uniform 64-bit key, the same on every machine. This is the finaliser of splitmix64 (Steele,
/// Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
pub fn spread(number: u64) -> u64 {
    let mixed = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ mixed >> 31
}
