//! Defects that a simulation makes on purpose, to show that it would find them.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    /// The side asked for a fence confirms it at once, and goes on placing bytes.
    FenceNotKept,
    /// The listening side places bytes of a broken connection for longer than its lease.
    LeaseNotKept,
    /// A carrier reports bytes as placed before the last of them are.
    CompletesEarly,
    /// A session gets a new number with each connection, so messages that are sent again look new.
    ForgetsSessions,
    /// The better carrier claims to be the worse one.
    ClassesSwapped,
    /// A region's number is served in any generation.
    ServesAnyGeneration,
    /// A carrier claims not to touch memory that is being given back.
    HidesTouches,
    /// The reader of a neighbour's memory does not check the card.
    CardNotRead,
    /// Posts of a broken connection never complete.
    LosesPosts,
    /// News of regions are lost although their connection stays.
    LosesNews,
}
