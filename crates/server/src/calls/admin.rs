//! GetStatus, Settle, DropNamespaces and Bye: the calls of people and tools, and the end of a session.

use std::time::{Duration, Instant};

use kvlane_block::Namespace;
use kvlane_proto::v1::{self, reply::Body as Answer};

use super::context::{Context, done};
use crate::{peer::Peer, refusal::Refusal, status};

/// Reports what the daemon holds and who uses it. Over TCP it leaves out everything about others.
pub(crate) fn status(context: &Context<'_>) -> Result<Answer, Refusal> {
    let status = match context.peer {
        Peer::Local { .. } => status::collect(context.shared),
        Peer::Remote => status::for_anybody(context.shared),
    };
    Ok(Answer::Status(Box::new(status)))
}

/// Ends the session: its process holds nothing any more.
pub(crate) fn bye(context: &mut Context<'_>) -> Result<Answer, Refusal> {
    context.greeted.said_bye = true;
    Ok(done())
}

/// Waits until all saved blocks are sealed, and on the SSD if there is one.
pub(crate) fn settle(context: &Context<'_>, settle: &v1::Settle) -> Result<Answer, Refusal> {
    let (store, timeout) = (&context.shared.store, settle.timeout_ms);
    let deadline = Instant::now() + Duration::from_millis(timeout.into());
    if !store.settle(deadline.saturating_duration_since(Instant::now())) {
        Err(Refusal::limit(format!("not everything was sealed within {timeout} ms")))
    } else if context.shared.ssd.is_some() && !store.settle_spill(deadline) {
        Err(Refusal::limit(format!("not everything was on the SSD within {timeout} ms")))
    } else {
        Ok(done())
    }
}

/// Drops the blocks of namespaces, in RAM and on the SSD.
pub(crate) fn drop_namespaces(context: &Context<'_>, drop: &v1::DropNamespaces) -> Result<Answer, Refusal> {
    let shared = context.shared;
    let mut known = shared.engines.all_namespaces();
    known.extend(shared.store.spaces().into_iter().map(|space| space.namespace));
    let named = drop
        .namespaces
        .iter()
        .map(|n| Namespace::from_bytes(n))
        .collect::<Result<Vec<_>, _>>()
        .map_err(Refusal::invalid)?;
    for namespace in &named {
        // The SSD may have blocks of engines that have not reconnected yet.
        if !known.contains(namespace) && !shared.ssd.as_ref().is_some_and(|ssd| ssd.knows(namespace)) {
            return Err(Refusal::unknown(format!("namespace {namespace} does not exist here")));
        }
    }
    let mut not_durable = Vec::new();
    for namespace in named {
        let dropped = shared.store.drop_namespace(namespace);
        // Log: `kvlane drop` removed these blocks from the pool.
        tracing::info!(%namespace, blocks = dropped.blocks, "namespace dropped");
        if let Err(error) = dropped.below {
            not_durable.push(format!("namespace {namespace} was dropped from RAM, but {error}"));
        }
    }
    if not_durable.is_empty() {
        return Ok(done());
    }
    let sentence = format!(
        "{}. A restart of the daemon would bring back the blocks there; until then it tries again to note it",
        not_durable.join("; ")
    );
    Err(Refusal::not_durable(sentence))
}
