//! Defects that the simulation must find. Only its own agents have branches for them.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// The reader counts its lease from the moment when it comes.
    LeaseFromItsArrival,
    /// The reader does not compare checksums.
    NoChecksums,
    /// The reader takes any lease of a member for the one that it has waited for longest.
    AnyLease,
    /// The reader takes an answer for its newest question, and the parts of one in their order.
    AnswersInOrder,
    /// The owner gives blocks back to its store before their window is closed.
    GivesBackEarly,
    /// The owner ends loans only when they are returned.
    LoansWithoutEnd,
    /// Questions end only when all have answered.
    QuestionsWithoutEnd,
}
