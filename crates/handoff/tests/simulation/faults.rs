//! Faults that the simulation must catch, in the network, the memory or the applications. The state machines have no branch for
//! them.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// A READ goes on through a window that is closed.
    ReadsLate,
    /// A reader that copies by itself looks at the window's mark before the bytes, not after them.
    LooksBefore,
    /// The owner clears a window's mark only after the close.
    ClearsLate,
    /// A READ that fails is told as one whose bytes are there.
    FailsAsRead,
    /// The engine that computes unpins blocks as soon as it need not pin further ones, before its ranks said Closed.
    UnpinsEarly,
    /// The engine that goes on uses blocks of a hand-off that it gives up at once, before its ranks said Stopped.
    FreesEarly,
    /// Some Close to the own rank is not delivered.
    LosesClose,
    /// Some Stop to the own rank is not delivered.
    LosesStop,
    /// The end of a READ is not told.
    LosesReads,
    /// A task that overflows gives a block as room again before it has arrived.
    RecyclesEarly,
    /// A hash is told of the block after its own.
    ShiftsHashes,
}
