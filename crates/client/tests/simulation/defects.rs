//! Defects that the controls plant, between a link and its driver or in the daemon: the code under test has no branch for them.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Defect {
    None,
    /// A poll after the last one gives the same hit again.
    AnswersTwice,
    /// The link is given the time of its connection.
    ClockStands,
    /// The scheduler's link hears of a lost connection ten seconds later.
    HidesLoss,
    /// The filter answers CancelSaves with Done by itself.
    CancelsByItself,
    /// Releases are not sent, and heartbeats name their leases still.
    KeepsLeases,
    /// The daemon does not answer the second greeting of a process.
    WelcomesOnce,
}
