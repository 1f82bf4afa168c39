//! Whether a session may use a call at all, by the call's row. Pure; one place for all calls.

use kvlane_proto::v1::hello::Role;

use super::table::{Over, Row, WhileStopping, Who};
use crate::{greeted::Greeted, peer::Peer, refusal::Refusal, shared::Phase};

/// Says no for the first of these reasons: the call comes over TCP, the daemon is stopping, the session is not one of those
/// who may. What a call itself has to say against a request comes after.
pub(crate) fn admit(row: &Row, greeted: &Greeted, peer: &Peer, phase: Phase) -> Result<(), Refusal> {
    if matches!(peer, Peer::Remote) && row.over == Over::UnixOnly {
        return Err(Refusal::not_allowed("over TCP only status is served: use the Unix socket"));
    }
    if phase == Phase::Stopping && row.stopping == WhileStopping::Refused {
        return Err(Refusal::stopping("work"));
    }
    let may = match row.who {
        Who::Anybody => true,
        Who::Tool => greeted.info.role == Role::Tool,
        Who::Scheduler => greeted.info.role == Role::Scheduler,
        Who::OpenedEngine => greeted.opened.is_some(),
        Who::Worker => greeted.info.role == Role::Worker,
        Who::RegisteredWorker => greeted.worker.is_some(),
    };
    if may { Ok(()) } else { Err(Refusal::not_allowed(row.others_hear)) }
}
