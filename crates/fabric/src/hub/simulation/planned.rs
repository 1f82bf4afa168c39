//! The kinds of events that a world plans.

/// An action of an application, or a blow to its process.
#[derive(Debug, Clone, Copy)]
pub(super) enum Planned {
    Transfer,
    Message,
    Cancel(usize),
    Register,
    Unregister,
    Connect,
    Remove,
    Describe,
    Fresh,
    Receive,
    Retire,
    Close,
    Kill,
    Stop,
    Part,
    CutWire,
    BreakLink,
}
