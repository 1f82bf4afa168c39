//! What a policy knows of a block, for whoever keeps the block elsewhere.

/// What a policy knows of a block, in a few bytes that only the policy can read. A tier below keeps it with the block when the
/// pool has none of it any more, and hands it back with the block. The default stands for nothing known. Time is
/// in 32 bits of references: what was not asked for in four thousand million looks younger than it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Memo([u8; 6]);

impl Memo {
    /// Nothing is known, as of what a tier has kept through a restart.
    pub const NOTHING: Self = Self([0; 6]);

    pub(crate) fn new(class: u8, uses: u8, asked_at: u32) -> Self {
        let [a, b, c, d] = asked_at.to_le_bytes();
        Self([class, uses, a, b, c, d])
    }

    /// The number of its class.
    pub(crate) fn class(self) -> u8 {
        self.0[0]
    }

    /// How often it was asked for.
    pub(crate) fn uses(self) -> u8 {
        self.0[1]
    }

    /// The policy's time when it was asked for last.
    pub(crate) fn asked_at(self) -> u32 {
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
        assert_eq!((memo.class(), memo.uses(), memo.asked_at()), (7, 64, 0xFFFF_0102));
        assert_eq!([Memo::default(), Memo::NOTHING], [Memo::new(0, 0, 0); 2]);
    }
}
