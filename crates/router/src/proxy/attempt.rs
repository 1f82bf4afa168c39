//! Runs one request, from the choice of its nodes to the first byte of its answer.
//!
//! An attempt chooses a node or a pair, and reserves load there; a [`LegGuard`] ends each reservation. If a leg fails, the next
//! attempt chooses among the nodes that have not been tried. Attempts end:
//! - with an answer, or with a node's refusal of the request itself, which other nodes would repeat;
//! - if no node is left, or after [`ATTEMPTS_MAX`] nodes;
//! - after [`TAKEN_MAX`] nodes that failed with the request in hand, or two that answered 500: the request may be the cause;
//! - after two nodes in a row that missed the deadline for the first byte.
//!
//! After the first byte the client has received a part of the answer, so no other node can replace the one that sends it.

use std::{
    cell::Cell,
    future::poll_fn,
    pin::pin,
    sync::Arc,
    task::Poll,
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{
    Response, StatusCode,
    header::HeaderValue,
    http::{request, response},
};
use tokio::time::timeout;

use super::{
    answer::{AnswerBody, EngineBody, Problem},
    doubted::Doubted,
    exchange::Incoming,
    forward,
    gathered::Gathered,
    held::Held,
    idle::Upstreams,
    leg::LegGuard,
    outgoing::Outgoing,
    pairing::PairingMode,
    tally::Tally,
    upstream,
    upstream_error::UpstreamError,
};
use crate::{
    body::{Edited, Mark, Scan},
    counters::Counters,
    decisions::Decision,
    ids::RequestId,
    knowledge::{Lookup, Prompt},
    legs::{self, Api, LegRequest},
    schedule::{Chosen, Leg, LegEnd, NoNode, NodeId, Request, Reservation, Why},
    shared::Shared,
};

/// Most nodes that one request is tried on.
const ATTEMPTS_MAX: usize = 16;
/// Most of these nodes that may fail after they took the request, because the request itself may kill engines.
const TAKEN_MAX: u32 = 3;
/// Time for a concurrent prefill leg to end by itself after the decode node's first byte. Then the router cancels it.
const PREFILL_GRACE: Duration = Duration::from_millis(100);
/// Longest answer that the router reads as a whole: a prefill node's, or a refusal.
const SHORT_ANSWER_BYTES_MAX: usize = 16 << 20;

/// A client's request on its way to nodes.
pub(super) struct Work<'a> {
    pub(super) shared: &'a Arc<Shared>,
    pub(super) upstreams: &'a Upstreams,
    pub(super) head: &'a request::Parts,
    pub(super) body: &'a Bytes,
    /// None if the body is not JSON.
    pub(super) scan: Option<&'a Scan<'a>>,
    /// None if the request names no model.
    pub(super) model: Option<&'a str>,
    pub(super) marks: &'a [Mark],
    /// Whether an engine computes the answer, and not only its HTTP server.
    pub(super) computes: bool,
    /// Interface of the request; None if it cannot be split.
    pub(super) api: Option<Api>,
    /// The prompt's tokens, if the router has the model's tokenizer.
    pub(super) prompt: Option<&'a Prompt>,
    pub(super) id: RequestId,
    /// The request's share of the memory for all requests.
    pub(super) held: &'a Held,
    /// The id under which the client knows the request.
    pub(super) client_id: &'a HeaderValue,
    /// The request cannot be split.
    pub(super) one_node: bool,
    /// The answer comes token by token.
    pub(super) streams: bool,
    /// Nodes that failed after they took the request.
    pub(super) taken: Cell<u32>,
    /// Nodes that have answered the request with 500.
    pub(super) doubted: Doubted<'a>,
    /// Number of the next attempt, from 0.
    pub(super) attempts: Cell<u32>,
    pub(super) tally: &'a Tally<'a>,
}

/// A leg that failed before the client received a byte. Another node may serve the request.
struct FailedLeg {
    node: Option<NodeId>,
    /// Goes to the client if no other node serves the request.
    answer: Box<Response<AnswerBody>>,
    /// The deadline for the first byte has passed.
    is_late: bool,
    /// The node reset a kept connection, so the router cannot tell whether it received the request.
    is_unsure: bool,
}

/// An answer whose head has arrived.
struct BegunAnswer {
    head: response::Parts,
    body: Incoming,
    guard: LegGuard,
}

impl Work<'_> {
    /// Makes attempts until they end (see the head of this file). Returns the answer, or the last failure.
    pub(super) async fn serve(&self) -> Response<AnswerBody> {
        let mut tried = Vec::new();
        let mut last: Option<FailedLeg> = None;
        let mut unsure = None;
        for _ in 0..ATTEMPTS_MAX {
            let attempt = self.next_attempt();
            let chosen = self.choose(&tried, attempt).or_else(|none| {
                let node = unsure.take().ok_or(none)?;
                // Log: an engine reset a kept connection as the request came, so it may have begun it; no other
                // node could take it. Do: give the model a second engine.
                tracing::warn!(
                    id = self.id.name(),
                    "kept connection reset and no other node left: sending the request to the same node again, which may run \
                     it twice"
                );
                tried.retain(|each| *each != node);
                self.choose(&tried, attempt)
            });
            let chosen = match chosen {
                Ok(chosen) => chosen,
                Err(none) => {
                    Counters::count(&self.shared.counters.refused);
                    return last.map_or_else(|| no_node(&none).answer(), |failed| *failed.answer);
                }
            };
            let served = match chosen {
                Chosen::One(whole) => self.whole(whole, attempt).await.map_err(Unserved::from),
                Chosen::Pair { prefill, decode } => self.pair(prefill, decode, attempt, &mut tried).await,
            };
            let failed = match served {
                Ok(answer) | Err(Unserved::Refused(answer)) => return answer,
                Err(Unserved::Failed(failed)) => failed,
            };
            tried.extend(failed.node.filter(|node| !tried.contains(node)));
            if failed.is_unsure {
                unsure = failed.node;
            }
            // The request itself may be slow, so the router does not try a third node.
            if failed.is_late && last.as_ref().is_some_and(|last| last.is_late) {
                return *failed.answer;
            }
            if self.is_given_up() {
                return *failed.answer;
            }
            last = Some(failed);
        }
        last.map_or_else(
            || Problem::new(StatusCode::BAD_GATEWAY, "no node answered").answer(),
            |failed| *failed.answer,
        )
    }

    fn choose(&self, tried: &[NodeId], attempt: u32) -> Result<Chosen, NoNode> {
        let request = self.request(tried);
        let now = Instant::now();
        let lookup = self.prompt.map(|prompt| self.shared.knowledge.look_up(prompt, now));
        let cached = lookup.as_ref().map(|lookup| lookup.cached.clone()).unwrap_or_default();
        let mut state = self.shared.state.lock();
        let choice = state.scheduler.choose_with(&request, cached, now)?;
        let (prefill, node) = match &choice.chosen {
            Chosen::One(one) => (None, one.node),
            Chosen::Pair { prefill, decode } => (Some(prefill.node), decode.node),
        };
        self.tally.set_choice(node, &choice);
        let name = |id| state.scheduler.node(id).map(|node| Arc::clone(&node.name));
        let decision = Decision {
            at: SystemTime::now(),
            id: self.id,
            client_id: String::from_utf8_lossy(self.client_id.as_bytes()).into_owned(),
            model: self.model.map(str::to_owned),
            attempt,
            prefill: prefill.and_then(name),
            node: name(node).unwrap_or_else(|| "".into()),
            why: choice.why,
            prompt_tokens: choice.prompt_tokens,
            cached_tokens: choice.cached_tokens,
            candidates: choice.candidates,
        };
        if choice.why == Why::OtherRole && Counters::count(&self.shared.counters.other_role) {
            // Log: all nodes of the right role are away; answers come, perhaps more slowly. Do: bring the prefill
            // or decode engines back; `kvlane route list` shows them.
            tracing::warn!(
                once = true,
                id = self.id.name(),
                node = %decision.node,
                "no node of the right role left: a node of another role serves the request"
            );
        }
        tracing::debug!(?decision, "nodes chosen");
        state.decisions.push(decision);
        drop(state);
        self.promise(lookup, &choice.chosen, now);
        Ok(choice.chosen)
    }

    /// Notes that the prefilling node will have the prompt's blocks, so that equal prompts that come meanwhile go there.
    fn promise(&self, lookup: Option<Lookup>, chosen: &Chosen, now: Instant) {
        let (Chosen::One(first) | Chosen::Pair { prefill: first, .. }) = chosen;
        if let Some(lookup) = lookup {
            self.shared.knowledge.promise(&lookup, first.node, now);
        }
    }

    /// Checks a node's count of the prompt's tokens, in its answer, against the router's own.
    fn compare(&self, node: Option<NodeId>, answer: &[u8]) {
        if let (Some(prompt), Some(node)) = (self.prompt, node) {
            self.shared.knowledge.compare(node, prompt.tokens.len(), answer);
        }
    }

    fn request<'r>(&'r self, tried: &'r [NodeId]) -> Request<'r> {
        Request {
            model: self.model,
            marks: self.marks,
            one_node: self.one_node,
            streams: self.streams,
            tried,
        }
    }

    /// Sends the request to one node.
    async fn whole(&self, whole: Reservation, attempt: u32) -> Result<Response<AnswerBody>, FailedLeg> {
        let guard = LegGuard::new(self.shared, whole);
        let guard = if self.computes { guard } else { guard.computes_nothing() };
        let id = self.id.of_leg(Leg::Whole, attempt);
        let begun = self.send(guard, Leg::Whole, &LegRequest::Whole, &id).await?;
        self.pass_on(begun).await
    }

    fn next_attempt(&self) -> u32 {
        let attempt = self.attempts.get();
        self.attempts.set(attempt + 1);
        attempt
    }

    /// Runs both legs of a pair, in its mode.
    async fn pair(
        &self,
        prefill: Reservation,
        decode: Reservation,
        attempt: u32,
        tried: &mut Vec<NodeId>,
    ) -> Result<Response<AnswerBody>, Unserved> {
        let nodes = (prefill.node, decode.node);
        let guard = |reservation| LegGuard::new(self.shared, reservation);
        let pair = Pair { attempt, prefill: guard(prefill), decode: guard(decode) };
        match self.shared.pairing_mode(nodes.0, nodes.1) {
            Ok(PairingMode::ByAnswer) => self.by_answer(pair, tried).await,
            Ok(PairingMode::ByRequestId { prefill, decode }) => {
                let id = self.id.p2p_nccl(&prefill, &decode, attempt, secret(pair.decode.node())?);
                self.by_request_id(pair, &id).await
            }
            Ok(PairingMode::Concurrent(peer)) => self.concurrent(pair, &peer, tried).await,
            Err(gone) => Err(FailedLeg::gone(Some(gone)).into()),
        }
    }

    /// Prefill, then decode with the `kv_transfer_params` of the prefill node's answer. If the decode node fails, another decode
    /// node gets the same parameters.
    async fn by_answer(&self, pair: Pair, tried: &mut Vec<NodeId>) -> Result<Response<AnswerBody>, Unserved> {
        let Pair { mut attempt, prefill, decode: mut decode_guard } = pair;
        let Some(prefill_node) = prefill.node() else { return Err(FailedLeg::gone(None).into()) };
        let request = match self.prefill(prefill, attempt).await {
            Ok(Some(transfer)) => LegRequest::WithTransfer(transfer),
            Ok(None) => {
                // The decode node computes the prompt itself, so its first token says nothing about hand-offs.
                decode_guard.learn_nothing();
                LegRequest::Whole
            }
            Err(unserved) => {
                decode_guard.end(LegEnd::Left);
                return Err(unserved);
            }
        };
        loop {
            let id = self.id.of_leg(Leg::Decode, attempt);
            let sent = self.send(decode_guard, Leg::Decode, &request, &id).await;
            let failed = match sent {
                Ok(begun) => match self.pass_on(begun).await {
                    Ok(answer) => return Ok(answer),
                    Err(failed) => failed,
                },
                Err(failed) => failed,
            };
            tried.extend(failed.node.filter(|node| !tried.contains(node)));
            if failed.is_late || self.is_given_up() || tried.len() >= ATTEMPTS_MAX {
                return Err(failed.into());
            }
            let open = self.request(tried);
            let next = self.shared.state.lock().scheduler.choose_decode(&open, prefill_node, Instant::now());
            let Some(next) = next else { return Err(failed.into()) };
            self.tally.count_attempt(next.node);
            attempt = self.next_attempt();
            decode_guard = LegGuard::new(self.shared, next);
        }
    }

    /// Prefill, then decode, with one request id from which each engine takes the other's address. Blocks that went to a decode
    /// node are lost if it fails, so a retry begins with another pair.
    async fn by_request_id(&self, pair: Pair, id: &str) -> Result<Response<AnswerBody>, Unserved> {
        let Pair { prefill, mut decode, .. } = pair;
        if let Err(unserved) = self.prefill_answer(prefill, &LegRequest::prefill_by_id(), id).await {
            decode.end(LegEnd::Left);
            return Err(unserved);
        }
        let begun = self.send(decode, Leg::Decode, &LegRequest::Whole, id).await?;
        Ok(self.pass_on(begun).await?)
    }

    /// Both legs at once. The decode node reads blocks from the prefill node, and computes those that do not come. So its answer
    /// is good even if the prefill node fails, and the router tries another pair only if the decode node fails.
    async fn concurrent(
        &self,
        pair: Pair,
        peer: &str,
        tried: &mut Vec<NodeId>,
    ) -> Result<Response<AnswerBody>, Unserved> {
        let Pair { attempt, prefill, decode } = pair;
        let secret = secret(decode.node())?;
        let (prefill_request, decode_request) =
            LegRequest::direct(&self.id.of_hand_off(attempt, secret), peer);
        let prefill_id = self.id.of_leg(Leg::Prefill, attempt);
        let mut prefilling = pin!(self.prefill_answer(prefill, &prefill_request, &prefill_id));
        let mut decoding = pin!(async {
            let id = self.id.of_leg(Leg::Decode, attempt);
            let begun = self.send(decode, Leg::Decode, &decode_request, &id).await?;
            self.pass_on(begun).await.map_err(Unserved::from)
        });
        tokio::select! {
            prefilled = &mut prefilling => {
                match prefilled {
                    Ok(_) => {}
                    Err(Unserved::Failed(failed)) => {
                        tried.extend(failed.node.filter(|node| !tried.contains(node)));
                    }
                    Err(refused) => return Err(refused),
                }
                decoding.await
            }
            answer = &mut decoding => {
                let answer = answer?;
                // The decode node needs nothing more of the prefill leg, which ends soon unless the prefill node is stuck.
                let _ = timeout(PREFILL_GRACE, prefilling).await;
                Ok(answer)
            }
        }
    }

    /// Runs the prefill leg of a pair in mode [`PairingMode::ByAnswer`]. Returns `kv_transfer_params` for the decode leg, or None
    /// if the node handed nothing over.
    async fn prefill(&self, prefill: LegGuard, attempt: u32) -> Result<Option<String>, Unserved> {
        let id = self.id.of_leg(Leg::Prefill, attempt);
        let node = prefill.node();
        let answer = self.prefill_answer(prefill, &LegRequest::prefill(), &id).await?;
        let outlined = self.shared.scanner.outline(&answer).await.ok();
        let scanned = outlined.map(|outlined| Scan::new(&answer, outlined.outline));
        let transfer = scanned.as_ref().and_then(legs::transfer_params);
        let transfer = transfer.and_then(|transfer| std::str::from_utf8(transfer).ok());
        if let Some(node) = node {
            self.shared.prefill_answered(node, transfer.is_some());
        }
        Ok(transfer.map(str::to_owned))
    }

    /// Runs a prefill leg to the end of its answer.
    async fn prefill_answer(
        &self,
        prefill: LegGuard,
        request: &LegRequest,
        id: &str,
    ) -> Result<Bytes, Unserved> {
        let BegunAnswer { head, body, mut guard } = self.send(prefill, Leg::Prefill, request, id).await?;
        let node = guard.node();
        let answer = match self.short_answer(body).await {
            Ok(answer) => answer,
            Err(error) => {
                guard.fail(&error.to_string());
                let sentence = format!("a prefill node did not complete its answer: {error}");
                return Err(self.count_taken(FailedLeg::bad_gateway(node, sentence)).into());
            }
        };
        guard.note_status(head.status);
        guard.prefilled(self.marks_of(head.status));
        guard.end(LegEnd::Served);
        if !head.status.is_success() {
            return Err(Unserved::Refused(self.buffered(head, answer)));
        }
        self.doubted.convict(Some(Leg::Prefill));
        self.compare(node, &answer);
        Ok(answer)
    }

    /// Sends a leg and waits for the head of its answer. A status that [blames the node](blames_node) is a failure.
    async fn send(
        &self,
        mut guard: LegGuard,
        leg: Leg,
        request: &LegRequest,
        id: &str,
    ) -> Result<BegunAnswer, FailedLeg> {
        let node = guard.node();
        let address = node.and_then(|node| self.shared.state.lock().addresses.get(&node).cloned());
        let Some(address) = address else {
            guard.end(LegEnd::Left);
            return Err(FailedLeg::gone(node));
        };
        let changed = self.scan.and_then(|scan| legs::body(self.api, scan, request, id));
        let body = changed.map_or_else(|| self.body.clone().into(), |edited| self.edited(edited));
        let settings = &self.shared.settings;
        let (span, traceparent) = self.tally.leg_span(leg, &address);
        guard.trace(span);
        let head = forward::to_engine(
            self.head,
            &address,
            leg,
            id,
            body.len(),
            settings.keys.is_empty(),
            traceparent.as_deref(),
        );
        let sending = upstream::send(self.upstreams, &address, head, body, settings.connect_timeout);
        let sent = match settings.first_byte_timeout {
            None => Ok(sending.await),
            Some(deadline) => timeout(deadline, sending).await.map_err(|_| deadline),
        };
        let response = match sent {
            Ok(Ok(sent)) => sent,
            Ok(Err(error)) => {
                guard.fail(&error.to_string());
                tracing::debug!(id, node = %address, %error, "node failed a leg");
                let mut failed =
                    FailedLeg::bad_gateway(node, format!("the node at {address} failed: {error}"));
                failed.is_unsure = matches!(error, UpstreamError::Reset(_));
                let was_taken = error.was_taken();
                return Err(if was_taken { self.count_taken(failed) } else { failed });
            }
            Err(deadline) => {
                let failed = FailedLeg::late(node, deadline);
                guard.fail(&late(deadline));
                return Err(failed);
            }
        };
        let (head, body) = response.into_parts();
        if !blames_node(head.status) {
            return Ok(BegunAnswer { head, body, guard });
        }
        let status = head.status;
        match status {
            // An overloaded node is alive, so it has not failed.
            StatusCode::TOO_MANY_REQUESTS => guard.end(LegEnd::Left),
            StatusCode::INTERNAL_SERVER_ERROR => self.doubted.doubt(&mut guard, leg),
            _ => guard.fail(&format!("it answered {status}")),
        }
        let answer = match self.short_answer(body).await {
            Ok(answer) => self.buffered(head, answer),
            Err(error) => {
                Problem::new(StatusCode::BAD_GATEWAY, format!("the node at {address} failed: {error}"))
                    .answer()
            }
        };
        let failed = FailedLeg { node, answer: Box::new(answer), is_late: false, is_unsure: false };
        // vLLM's server answers 500 when its engine dies of a request, and then exits.
        Err(if status == StatusCode::INTERNAL_SERVER_ERROR { self.count_taken(failed) } else { failed })
    }

    /// Marks of the prompt that the node holds after an answer with this status. A node that refuses has computed nothing.
    fn marks_of(&self, status: StatusCode) -> &[Mark] {
        if status.is_success() { self.marks } else { &[] }
    }

    fn edited(&self, edited: Edited<'_>) -> Outgoing {
        Outgoing::edited(self.body, edited)
    }

    /// Reads an answer as a whole. Its bytes count as memory of the request.
    async fn short_answer(&self, mut body: Incoming) -> Result<Bytes, String> {
        let mut answer = Gathered::new(None, SHORT_ANSWER_BYTES_MAX);
        while let Some(frame) = body.frame().await {
            let Ok(piece) = frame.map_err(|error| error.to_string())?.into_data() else { continue };
            self.held.take(piece.len()).map_err(|problem| problem.message)?;
            answer.add(piece).map_err(|error| error.to_string())?;
        }
        Ok(answer.whole())
    }

    /// Whether to stop, because the request may be what kills engines or makes them answer 500.
    fn is_given_up(&self) -> bool {
        self.taken.get() >= TAKEN_MAX || self.doubted.are_enough()
    }

    /// Counts a node that failed after it took the request.
    fn count_taken(&self, failed: FailedLeg) -> FailedLeg {
        self.taken.set(self.taken.get() + 1);
        failed
    }

    /// Passes the engine's answer on to the client, once its first byte has arrived.
    async fn pass_on(&self, begun: BegunAnswer) -> Result<Response<AnswerBody>, FailedLeg> {
        let BegunAnswer { head, mut body, mut guard } = begun;
        let node = guard.node();
        let first = match self.shared.settings.first_byte_timeout {
            None => Ok(body.frame().await),
            Some(deadline) => timeout(deadline, body.frame()).await.map_err(|_| deadline),
        };
        let cut = |mut guard: LegGuard, error: UpstreamError| {
            guard.fail(&error.to_string());
            let sentence = format!("a node ended its answer before the first byte: {error}");
            self.count_taken(FailedLeg::bad_gateway(node, sentence))
        };
        let body = match first {
            Ok(Some(Ok(first))) => {
                // The client has received nothing yet. If the connection has already ended, hyper's next read would fail before
                // its first write, and the client would never receive anything.
                if let Some(error) = poll_fn(|context| Poll::Ready(body.poll_cut(context))).await {
                    return Err(cut(guard, error));
                }
                self.compare(node, first.data_ref().map_or(&[], |data| data));
                guard.note_status(head.status);
                if head.status.is_success() {
                    self.doubted.convict(guard.leg());
                }
                EngineBody::new(first, body, guard, self.marks_of(head.status))
            }
            // An empty answer without a length cannot be told from one that was cut.
            Ok(None) if body.ends_with_connection() && head.status.is_success() => {
                return Err(cut(guard, UpstreamError::Cut));
            }
            Ok(None) => EngineBody::empty(guard),
            Ok(Some(Err(error))) => return Err(cut(guard, error)),
            Err(deadline) => {
                guard.fail(&late(deadline));
                return Err(FailedLeg::late(node, deadline));
            }
        };
        let mut response = Response::from_parts(head, AnswerBody::Engine(Box::new(body)));
        forward::to_client(&mut response);
        Ok(response)
    }

    /// The answer to the client for an engine's answer that the router has read. Its bytes count as memory until the client has
    /// them, which may be long after the request's other memory is free.
    fn buffered(&self, head: response::Parts, body: Bytes) -> Response<AnswerBody> {
        let body = Held::new(self.shared).counting(body);
        let mut response = Response::from_parts(head, AnswerBody::Buffered(Full::new(body)));
        forward::to_client(&mut response);
        response
    }
}

/// Two legs that were chosen together.
struct Pair {
    attempt: u32,
    prefill: LegGuard,
    decode: LegGuard,
}

/// Why a leg brought no answer.
enum Unserved {
    /// The node failed. Another one may serve the request.
    Failed(FailedLeg),
    /// The node refused the request itself, and others would refuse it too.
    Refused(Response<AnswerBody>),
}

impl From<FailedLeg> for Unserved {
    fn from(failed: FailedLeg) -> Self {
        Self::Failed(failed)
    }
}

impl FailedLeg {
    fn gone(node: Option<NodeId>) -> Self {
        Self::bad_gateway(node, "the chosen node has just been removed".into())
    }

    fn bad_gateway(node: Option<NodeId>, sentence: String) -> Self {
        Self {
            node,
            answer: Box::new(Problem::new(StatusCode::BAD_GATEWAY, sentence).answer()),
            is_late: false,
            is_unsure: false,
        }
    }

    fn late(node: Option<NodeId>, deadline: Duration) -> Self {
        Self {
            node,
            answer: Box::new(Problem::new(StatusCode::GATEWAY_TIMEOUT, late(deadline)).answer()),
            is_late: true,
            is_unsure: false,
        }
    }
}

fn late(deadline: Duration) -> String {
    format!("no node answered within {} s", deadline.as_secs_f64())
}

/// Whether this status blames the node, and not the request. Another node may serve it.
fn blames_node(status: StatusCode) -> bool {
    status.is_server_error() && status != StatusCode::NOT_IMPLEMENTED
        || status == StatusCode::TOO_MANY_REQUESTS
}

fn no_node(none: &NoNode) -> Problem {
    match none {
        NoNode::UnknownModel { .. } => {
            Problem::new(StatusCode::NOT_FOUND, none.to_string()).with_param("model")
        }
        NoNode::NoneLeft { retry_after, .. } => Problem {
            retry_after: Some(*retry_after),
            ..Problem::new(StatusCode::SERVICE_UNAVAILABLE, none.to_string())
        },
    }
}

/// Bytes that keep clients from guessing the name of a hand-off.
fn secret(node: Option<NodeId>) -> Result<[u8; 16], FailedLeg> {
    kvlane_memory::random().map_err(|_| {
        let sentence = "the operating system has no random bytes for a hand-off's name";
        FailedLeg::bad_gateway(node, sentence.into())
    })
}
