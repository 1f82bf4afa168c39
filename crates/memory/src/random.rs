//! Random bytes, for names and secrets. The only place that asks the kernel for them.

use std::io;

use rustix::rand::{GetRandomFlags, getrandom};

/// Bytes that nobody can foresee and nobody else draws.
///
/// # Errors
/// That of getrandom(2). There is no weaker source instead: two processes with one nonce would let the daemon take the
/// blocks of one for those of the other.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    // Fewer bytes than 256 are never cut short.
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
