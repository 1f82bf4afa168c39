//! [`Memo`]: what a learning policy knows of a block, in six bytes that a tier below keeps with the block.

/// A policy's knowledge of a block; only the policy can read it. When the pool evicts a block, a tier below keeps the
/// memo, and hands it back with the block. The default says that nothing is known. Time is 32 bits of references, so a
/// block that was not requested for four thousand million references looks younger than it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Memo([u8; 6]);

impl Memo {
    /// Nothing is known of the block. Blocks that a tier recovers after a restart have this memo.
    pub const NOTHING: Self = Self([0; 6]);

    pub(crate) fn new(class: u8, uses: u8, requested_at: u32) -> Self {
        let [a, b, c, d] = requested_at.to_le_bytes();
        Self([class, uses, a, b, c, d])
    }

    /// Index of the block's class, not yet checked.
    pub(crate) fn class(self) -> u8 {
        self.0[0]
    }

    /// How often the block was requested; 0 means that nothing is known.
    pub(crate) fn uses(self) -> u8 {
        self.0[1]
    }

    /// The low 32 bits of the policy's time at the block's last request.
    pub(crate) fn requested_at(self) -> u32 {
        let [_, _, a, b, c, d] = self.0;
        u32::from_le_bytes([a, b, c, d])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_tells_what_it_was_told() {
        let memo = Memo::new(7, 64, 0xFFFF_0102);
        assert_eq!((memo.class(), memo.uses(), memo.requested_at()), (7, 64, 0xFFFF_0102));
        assert_eq!([Memo::default(), Memo::NOTHING], [Memo::new(0, 0, 0); 2]);
    }
}
