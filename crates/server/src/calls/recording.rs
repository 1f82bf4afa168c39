//! RequestsEnded and ReadRecording: engines report the ends of requests while somebody records, and tools read the recording.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use kvlane_block::{BlockHash, Namespace, parse_hashes};
use kvlane_proto::v1::{self, ended_request::Leg as WireLeg, reply::Body as Answer};
use kvlane_trace::{Ended, Leg, Lengths, LookedUp, Recorded, Run, TierBlocks};

use super::context::Context;
use crate::{
    engines::OpenGroup,
    observer::{Model, clock, recorded_keys},
    refusal::Refusal,
    shared::Shared,
};

/// Most requests in one answer.
const REQUESTS_MAX: usize = 512;
/// Most ends in one message.
const ENDS_MAX: usize = 1 << 16;

/// Whether somebody records, for an engine that reports ends.
pub(crate) fn state(shared: &Shared) -> Answer {
    Answer::Done(v1::Done { is_recorded: Some(shared.observer.is_recording()) })
}

/// The group whose blocks are recorded: the first one without a window, else the first one.
pub(crate) fn recorded_group(open: &[OpenGroup]) -> Option<(usize, OpenGroup)> {
    let whole = open.iter().position(|group| group.window_blocks == 0).unwrap_or(0);
    open.get(whole).map(|group| (whole, *group))
}

/// Records a lookup of `hashes` in the recorded group, of which `looked_up` were searched. It came at `since`.
pub(crate) fn record_lookup(
    shared: &Shared,
    engine_id: &str,
    open: &[OpenGroup],
    (hashes, looked_up): (&[BlockHash], usize),
    (request, reports_ends, since): (u64, bool, Instant),
    hit: TierBlocks,
) {
    let Some(model) = describe(shared, open) else { return };
    shared.observer.looked_up(LookedUp {
        at: clock().saturating_sub(since.elapsed()),
        engine: engine_id.into(),
        model: model.0,
        request,
        keys: recorded_keys(model, hashes),
        looked_up,
        hit,
        reports_ends,
    });
}

/// The namespace of the recorded group, whose model the recording knows from here on.
fn describe(shared: &Shared, open: &[OpenGroup]) -> Option<Namespace> {
    let (index, group) = recorded_group(open)?;
    let namespace = shared.store.namespace(group.space);
    shared.observer.add_model(namespace, || {
        let tokens = u64::from(group.tokens_per_block);
        // A group of larger blocks has fewer of them.
        let bytes = |each: &OpenGroup| {
            shared.store.block_bytes(each.space) * tokens / u64::from(each.tokens_per_block.max(1))
        };
        let further = open.iter().enumerate().filter(|(other, _)| *other != index);
        Model {
            namespace,
            name: shared.store.space_label(group.space),
            tokens_per_block: group.tokens_per_block,
            block_bytes: open.iter().map(bytes).sum(),
            further: further.map(|(_, each)| shared.store.namespace(each.space)).collect(),
        }
    });
    Some(namespace)
}

/// Takes the ends of an engine's requests.
pub(crate) fn requests_ended(context: &Context<'_>, ended: v1::RequestsEnded) -> Result<Answer, Refusal> {
    context.owner()?;
    let (shared, engine_id) = (context.shared, &context.greeted.info.engine_id);
    if ended.requests.len() > ENDS_MAX {
        return Err(Refusal::invalid(format!(
            "{} ends in one message, at most {ENDS_MAX}",
            ended.requests.len()
        )));
    }
    if !shared.observer.is_recording() || ended.requests.is_empty() {
        return Ok(state(shared));
    }
    let open = shared.engines.opened(engine_id);
    let Some(model) = describe(shared, &open) else {
        // A worker is missing just now.
        shared.observer.leave_out(ended.requests.len());
        return Ok(state(shared));
    };
    let (now, engine): (_, Arc<str>) = (clock(), engine_id.as_str().into());
    let end = |request: v1::EndedRequest| {
        let hashes = parse_hashes(&request.hashes).map_err(Refusal::invalid)?;
        Ok(Ended {
            at: now.saturating_sub(Duration::from_millis(request.age_ms)),
            engine: Arc::clone(&engine),
            model: model.0,
            request: request.request,
            lengths: Lengths { prompt: request.prompt_tokens, output: request.output_tokens },
            engine_tokens: request.engine_tokens,
            leg: leg(request.leg()),
            first_block: request.first_block,
            keys: recorded_keys(model, &hashes),
        })
    };
    let ends = ended.requests.into_iter().map(end).collect::<Result<_, Refusal>>()?;
    shared.observer.ended(ends);
    Ok(state(shared))
}

/// The next recorded requests.
pub(crate) fn read(context: &Context<'_>, read: &v1::ReadRecording) -> Result<Answer, Refusal> {
    let observer = &context.shared.observer;
    let most = (read.max as usize).clamp(1, REQUESTS_MAX);
    let out = observer.read_recording(read.cursor, most, read.is_last);
    let mut models: Vec<[u8; 16]> = out.read.requests.iter().map(|request| request.model).collect();
    models.sort_unstable();
    models.dedup();
    let models = models.into_iter().filter_map(|model| observer.model(Namespace(model))).map(model_to_wire);
    Ok(Answer::RecordedRequests(v1::RecordedRequests {
        cursor: out.read.cursor,
        lost: out.read.lost,
        left_out: out.left_out,
        has_more: out.read.has_more,
        models: models.collect(),
        requests: out.read.requests.into_iter().map(request_to_wire).collect(),
        forgotten_blocks: out.forgotten_blocks,
        now_ms: clock().as_millis() as u64,
        began_us: out.since.as_micros() as u64,
    }))
}

fn leg(leg: WireLeg) -> Leg {
    match leg {
        WireLeg::Whole => Leg::Whole,
        WireLeg::Prefill => Leg::Prefill,
        WireLeg::Decode => Leg::Decode,
    }
}

fn request_to_wire(request: Recorded) -> v1::RecordedRequest {
    let pairs = |runs: &[Run]| runs.iter().flat_map(|run| [run.first, run.count]).collect();
    let leg = match request.leg {
        Leg::Whole => WireLeg::Whole,
        Leg::Prefill => WireLeg::Prefill,
        Leg::Decode => WireLeg::Decode,
    };
    v1::RecordedRequest {
        at_ms: request.at.as_millis() as u64,
        engine_id: request.engine.to_string(),
        namespace: Bytes::copy_from_slice(&request.model),
        blocks: pairs(&request.blocks),
        saved: pairs(&request.saved),
        ram_blocks: request.hit.ram,
        ssd_blocks: request.hit.ssd,
        peer_blocks: request.hit.peers,
        engine_tokens: request.engine_tokens,
        has_ended: request.lengths.is_some(),
        prompt_tokens: request.lengths.map_or(0, |lengths| lengths.prompt),
        output_tokens: request.lengths.map_or(0, |lengths| lengths.output),
        leg: leg.into(),
    }
}

fn model_to_wire(model: Model) -> v1::RecordedModel {
    let bytes = |namespace: &Namespace| Bytes::copy_from_slice(&namespace.0);
    v1::RecordedModel {
        namespace: bytes(&model.namespace),
        name: model.name,
        tokens_per_block: model.tokens_per_block,
        block_bytes: model.block_bytes,
        further_namespaces: model.further.iter().map(bytes).collect(),
    }
}
