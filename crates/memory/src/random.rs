//! [`random`]: random bytes for names and secrets. Only this function calls getrandom(2).

use std::io;

use rustix::rand::{GetRandomFlags, getrandom};

/// Draws bytes that are unpredictable and unique.
///
/// # Errors
/// That of getrandom(2). No weaker source stands in for it: if two processes drew the same nonce, the daemon would take
/// the blocks of one for those of the other.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    // The kernel never cuts up to 256 bytes short.
    const { assert!(N <= 256) };
    let mut bytes = [0; N];
    #[expect(clippy::disallowed_methods, reason = "the one place")]
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn draws_differ_and_none_is_empty() {
        let drawn: HashSet<[u8; 16]> = (0..1000).map(|_| random().unwrap()).collect();
        assert_eq!(drawn.len(), 1000);
        assert!(!drawn.contains(&[0; 16]));
    }
}
