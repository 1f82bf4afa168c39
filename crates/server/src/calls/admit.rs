//! Admits or refuses a call by its row in the table, before the call itself is looked at. Pure.

use kvlane_proto::v1::hello::Role;

use super::table::{Allowed, Row, Transports, WhileStopping};
use crate::{greeted::Greeted, peer::Peer, refusal::Refusal, shared::Phase};

/// Refuses a call for the first of these reasons: TCP does not serve it, a stopping daemon does not, the session may not
/// use it. The call's own checks come later.
pub(crate) fn admit(row: &Row, greeted: &Greeted, peer: &Peer, phase: Phase) -> Result<(), Refusal> {
    if matches!(peer, Peer::Remote) && row.transports == Transports::UnixOnly {
        return Err(Refusal::not_allowed("over TCP only status is served: use the Unix socket"));
    }
    if phase == Phase::Stopping && row.stopping == WhileStopping::Refused {
        return Err(Refusal::stopping("work"));
    }
    let is_allowed = match row.allowed {
        Allowed::Anybody => true,
        Allowed::Tool => greeted.info.role == Role::Tool,
        Allowed::Scheduler => greeted.info.role == Role::Scheduler,
        Allowed::OpenedEngine => greeted.opened.is_some(),
        Allowed::Worker => greeted.info.role == Role::Worker,
        Allowed::RegisteredWorker => greeted.worker.is_some(),
    };
    if is_allowed { Ok(()) } else { Err(Refusal::not_allowed(row.refusal)) }
}
