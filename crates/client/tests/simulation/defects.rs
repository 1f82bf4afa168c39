//! Defects that the simulation must catch, planted between a link and its driver or in the daemon. The code under test has no
//! branch for them.

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
    /// Of the journal only what becomes visible reaches the engine.
    HearsOfNoEnds,
    /// The daemon does not answer the second greeting of a process.
    WelcomesOnce,
    /// Every fourth end is told twice.
    EndsTwice,
    /// While connected, a driver does not look at its clock.
    NeverTicks,
    /// Copies of workers say that all is there, and move nothing.
    CopiesNothing,
    /// A worker's driver lets pools go as soon as its connection is lost.
    UnmapsAtLoss,
    /// The end of a connection is told as the end of the process, too.
    EndsWithItsConnection,
    /// The fence stays as it is.
    LowFence,
    /// Flags are not written.
    KeepsFlags,
    /// Flags are written after the copies that were asked for behind them.
    WritesFlagsLate,
    /// With a connection, writes of a worker count as over.
    WritesGoOn,
    /// Pools stay mapped.
    NeverUnmaps,
    /// The end of a load is not told if its request goes on already.
    LosesEnds,
    /// The daemon says only once how long a lookup waits for another engine.
    SaysOnce,
    /// Before the calm it does not answer lookups that have waited.
    WaitsForEver,
    /// While down, a driver's clock is ten seconds ahead.
    TicksAhead,
}
