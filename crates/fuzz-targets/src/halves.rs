//! Inputs of targets that take two.

/// Two inputs from one: the first byte is the length of the first.
pub(crate) fn halves(bytes: &[u8]) -> (&[u8], &[u8]) {
    let Some((length, rest)) = bytes.split_first() else { return (&[], &[]) };
    rest.split_at(usize::from(*length).min(rest.len()))
}
