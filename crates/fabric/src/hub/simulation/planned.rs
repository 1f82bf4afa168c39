//! What may happen in a world.

/// What an application does, or what befalls its process.
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
