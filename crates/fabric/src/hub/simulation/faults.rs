//! What a simulation does wrong on purpose, to show that it would be seen.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    /// Who is asked for a fence says at once that it is over, and goes on.
    FenceNotKept,
    /// The listening side places bytes of a broken connection for longer than its lease.
    LeaseNotKept,
    /// A carrier says that bytes are in place before the last of them are.
    CompletesEarly,
    /// A session has another number each time that it connects: what is sent again is new.
    ForgetsSessions,
    /// The better carrier says that it is the worse one.
    ClassesSwapped,
    /// Whatever is registered under a region's number is served, of whichever generation.
    ServesAnyGeneration,
    /// Nothing is said to touch memory that is being given back.
    HidesTouches,
    /// Who reads a neighbour's memory does not look at the card.
    CardNotRead,
    /// What was posted on a broken connection does not come back.
    LosesPosts,
    /// News of regions get lost while their connection stays.
    LosesNews,
}
