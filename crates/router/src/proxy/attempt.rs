//! One request, from the choice of its nodes to the first byte of its answer.

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
    hand_over::HandOver,
    held::Held,
    idle::Upstreams,
    leg::LegGuard,
    outgoing::Outgoing,
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
    legs::{self, Api, Ask},
    schedule::{Chosen, Leg, LegEnd, NoNode, NodeId, Request, Reservation, Why},
    shared::Shared,
};

/// Nodes that one request is tried on.
const ATTEMPTS_MAX: usize = 16;
/// Of them, nodes that may fail after they took the request: it may be the request that kills engines.
const TAKEN_MAX: u32 = 3;
/// Time for a concurrent prefill leg to end by itself after the decode node's first byte. Then the router cancels it.
const PREFILL_GRACE: Duration = Duration::from_millis(100);
/// Longest answer of a prefill node, or of one that refuses.
const SHORT_ANSWER_BYTES_MAX: usize = 16 << 20;

/// A client's request.
pub(super) struct Work<'a> {
    pub(super) shared: &'a Arc<Shared>,
    pub(super) upstreams: &'a Upstreams,
    pub(super) head: &'a request::Parts,
    pub(super) body: &'a Bytes,
    /// None where the body is no JSON.
    pub(super) scan: Option<&'a Scan<'a>>,
    /// None where the request names none.
    pub(super) model: Option<&'a str>,
    pub(super) marks: &'a [Mark],
    /// Whether an engine computes its answer.
    pub(super) computes: bool,
    /// Interface of the request; None if it cannot be split.
    pub(super) api: Option<Api>,
    /// Its tokens, if they are known.
    pub(super) prompt: Option<&'a Prompt>,
    pub(super) id: RequestId,
    /// Memory that the request takes.
    pub(super) held: &'a Held,
    /// What the client knows the request by.
    pub(super) client_id: &'a HeaderValue,
    /// It cannot be split.
    pub(super) one_node: bool,
    /// Its answer comes token by token.
    pub(super) streams: bool,
    /// Nodes that have failed after they took it.
    pub(super) taken: Cell<u32>,
    /// Nodes that have answered the request with 500.
    pub(super) doubted: Doubted<'a>,
    /// The number of the next attempt.
    pub(super) attempts: Cell<u32>,
    pub(super) tally: &'a Tally<'a>,
}

/// A node failed a request before its first byte: another one may serve it.
struct Failed {
    node: Option<NodeId>,
    /// What the client gets if there is no other one.
    answer: Box<Response<AnswerBody>>,
    /// Since the deadline for the first byte had passed.
    is_late: bool,
    /// The node reset a kept connection, so it may have had the request.
    is_unsure: bool,
}

/// An answer whose head has come.
struct Begun {
    head: response::Parts,
    body: Incoming,
    guard: LegGuard,
}

impl Work<'_> {
    /// Serves it, whoever can.
    pub(super) async fn serve(&self) -> Response<AnswerBody> {
        let mut tried = Vec::new();
        let mut last: Option<Failed> = None;
        let mut unsure = None;
        for _ in 0..ATTEMPTS_MAX {
            let attempt = self.next_attempt();
            let chosen = self.choose(&tried, attempt).or_else(|none| {
                let node = unsure.take().ok_or(none)?;
                tracing::warn!(
                    id = self.id.name(),
                    "a node reset a kept connection and no other node is left: the same node gets the request again, and may \
                     run it twice"
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
            // A slow node may be slow for the request: two are enough.
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
        self.tally.chosen(node, &choice);
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
            tracing::warn!(
                id = self.id.name(),
                node = %decision.node,
                "no node of the right role is left: one of another role serves. Further cases are only counted"
            );
        }
        tracing::debug!(?decision, "chosen");
        state.decisions.push(decision);
        drop(state);
        self.promise(lookup, &choice.chosen, now);
        Ok(choice.chosen)
    }

    /// The node that prefills will have the prompt.
    fn promise(&self, lookup: Option<Lookup>, chosen: &Chosen, now: Instant) {
        let (Chosen::One(first) | Chosen::Pair { prefill: first, .. }) = chosen;
        if let Some(lookup) = lookup {
            self.shared.knowledge.promise(&lookup, first.node, now);
        }
    }

    /// A node has answered: whether it counts the prompt's tokens as we do.
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

    async fn whole(&self, whole: Reservation, attempt: u32) -> Result<Response<AnswerBody>, Failed> {
        let guard = LegGuard::new(self.shared, whole);
        let guard = if self.computes { guard } else { guard.computes_nothing() };
        let id = self.id.of_leg(Leg::Whole, attempt);
        let begun = self.send(guard, Leg::Whole, &Ask::Whole, &id).await?;
        self.pass_on(begun).await
    }

    fn next_attempt(&self) -> u32 {
        let attempt = self.attempts.get();
        self.attempts.set(attempt + 1);
        attempt
    }

    /// Both legs of a pair, as its connector wants them.
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
        match self.shared.hand_over(nodes.0, nodes.1) {
            Ok(HandOver::ByAnswer) => self.by_answer(pair, tried).await,
            Ok(HandOver::ById { prefill, decode }) => {
                let id = self.id.p2p_nccl(&prefill, &decode, attempt);
                self.by_id(pair, &id).await
            }
            Ok(HandOver::AtOnce(peer)) => self.at_once(pair, &peer, tried).await,
            Err(gone) => Err(Failed::gone(Some(gone)).into()),
        }
    }

    /// The decode leg gets what the prefill node answered.
    async fn by_answer(&self, pair: Pair, tried: &mut Vec<NodeId>) -> Result<Response<AnswerBody>, Unserved> {
        let Pair { mut attempt, prefill, decode: mut decode_guard } = pair;
        let Some(prefill_node) = prefill.node() else { return Err(Failed::gone(None).into()) };
        let ask = match self.prefill(prefill, attempt).await {
            Ok(Some(handed_over)) => Ask::GoOn(handed_over),
            Ok(None) => {
                // It prefills by itself.
                decode_guard.learn_nothing();
                Ask::Whole
            }
            Err(unserved) => {
                decode_guard.end(LegEnd::Left);
                return Err(unserved);
            }
        };
        loop {
            let id = self.id.of_leg(Leg::Decode, attempt);
            let sent = self.send(decode_guard, Leg::Decode, &ask, &id).await;
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
            let request = self.request(tried);
            let again =
                self.shared.state.lock().scheduler.choose_decode(&request, prefill_node, Instant::now());
            let Some(again) = again else { return Err(failed.into()) };
            self.tally.tries(again.node);
            attempt = self.next_attempt();
            decode_guard = LegGuard::new(self.shared, again);
        }
    }

    /// Both engines read in the request's id where the other one is. What was sent to a decode node that fails is lost: another
    /// pair begins anew.
    async fn by_id(&self, pair: Pair, id: &str) -> Result<Response<AnswerBody>, Unserved> {
        let Pair { prefill, mut decode, .. } = pair;
        if let Err(unserved) = self.prefill_answer(prefill, &Ask::prefill_by_id(), id).await {
            decode.end(LegEnd::Left);
            return Err(unserved);
        }
        let begun = self.send(decode, Leg::Decode, &Ask::Whole, id).await?;
        Ok(self.pass_on(begun).await?)
    }

    /// The decode node reads blocks from the prefill node, and computes those that do not come. So its answer is good even if the
    /// prefill node fails, and the router tries another pair only if the decode node fails.
    async fn at_once(
        &self,
        pair: Pair,
        peer: &str,
        tried: &mut Vec<NodeId>,
    ) -> Result<Response<AnswerBody>, Unserved> {
        let Pair { attempt, prefill, decode } = pair;
        let Ok(secret) = kvlane_memory::random() else {
            let sentence = "the operating system has no random bytes for a hand-off's name";
            return Err(Failed::bad_gateway(decode.node(), sentence.into()).into());
        };
        let (prefill_ask, decode_ask) = Ask::direct(&self.id.of_hand_off(attempt, secret), peer);
        let prefill_id = self.id.of_leg(Leg::Prefill, attempt);
        let mut prefilling = pin!(self.prefill_answer(prefill, &prefill_ask, &prefill_id));
        let mut decoding = pin!(async {
            let id = self.id.of_leg(Leg::Decode, attempt);
            let begun = self.send(decode, Leg::Decode, &decode_ask, &id).await?;
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

    /// The prefill leg of a pair whose prefill node answers where the blocks are. Answers what the decode node gets; None if
    /// nothing was handed over.
    async fn prefill(&self, prefill: LegGuard, attempt: u32) -> Result<Option<String>, Unserved> {
        let id = self.id.of_leg(Leg::Prefill, attempt);
        let node = prefill.node();
        let answer = self.prefill_answer(prefill, &Ask::prefill(), &id).await?;
        let outlined = self.shared.scanner.outline(&answer).await.ok();
        let handed_over = outlined.map(|outlined| Scan::new(&answer, outlined.outline));
        let transfer = handed_over.as_ref().and_then(legs::handed_over);
        let transfer = transfer.and_then(|transfer| std::str::from_utf8(transfer).ok());
        if let Some(node) = node {
            self.shared.prefill_answered(node, transfer.is_some());
        }
        Ok(transfer.map(str::to_owned))
    }

    /// A prefill leg, to the end of its answer.
    async fn prefill_answer(&self, prefill: LegGuard, ask: &Ask, id: &str) -> Result<Bytes, Unserved> {
        let Begun { head, body, mut guard } = self.send(prefill, Leg::Prefill, ask, id).await?;
        let node = guard.node();
        let answer = match self.short_answer(body).await {
            Ok(answer) => answer,
            Err(error) => {
                guard.fail(&error.to_string());
                let sentence = format!("a prefill node ended its answer before its end: {error}");
                return Err(self.taken(Failed::bad_gateway(node, sentence)).into());
            }
        };
        guard.answers(head.status);
        guard.prefilled(self.marks_of(head.status));
        guard.end(LegEnd::Served);
        if !head.status.is_success() {
            return Err(Unserved::Refused(self.own(head, answer)));
        }
        self.doubted.convict(Some(Leg::Prefill));
        self.compare(node, &answer);
        Ok(answer)
    }

    /// Sends a leg and waits for the head of its answer. A node that says that it cannot is a failure, as one that says nothing.
    async fn send(&self, mut guard: LegGuard, leg: Leg, ask: &Ask, id: &str) -> Result<Begun, Failed> {
        let node = guard.node();
        let address = node.and_then(|node| self.shared.state.lock().addresses.get(&node).cloned());
        let Some(address) = address else {
            guard.end(LegEnd::Left);
            return Err(Failed::gone(node));
        };
        let changed = self.scan.and_then(|scan| legs::body(self.api, scan, ask, id));
        let body = changed.map_or_else(|| self.body.clone().into(), |edited| self.edited(edited));
        let settings = &self.shared.settings;
        let request = forward::to_engine(self.head, &address, leg, id, body.len(), settings.keys.is_empty());
        let sending = upstream::send(self.upstreams, &address, request, body, settings.connect_timeout);
        let sent = match settings.first_byte_timeout {
            None => Ok(sending.await),
            Some(deadline) => timeout(deadline, sending).await.map_err(|_| deadline),
        };
        let response = match sent {
            Ok(Ok(sent)) => sent,
            Ok(Err(error)) => {
                guard.fail(&error.to_string());
                tracing::debug!(id, node = %address, %error, "a node failed a request");
                let mut failed = Failed::bad_gateway(node, format!("the node at {address} failed: {error}"));
                failed.is_unsure = matches!(error, UpstreamError::Reset(_));
                let was_taken = error.was_taken();
                return Err(if was_taken { self.taken(failed) } else { failed });
            }
            Err(deadline) => {
                let failed = Failed::late(node, deadline);
                guard.fail(&late(deadline));
                return Err(failed);
            }
        };
        let (head, body) = response.into_parts();
        if !is_of_the_node(head.status) {
            return Ok(Begun { head, body, guard });
        }
        let status = head.status;
        match status {
            // An overloaded node is alive, so this is no failure.
            StatusCode::TOO_MANY_REQUESTS => guard.end(LegEnd::Left),
            StatusCode::INTERNAL_SERVER_ERROR => self.doubted.doubt(&mut guard, leg),
            _ => guard.fail(&format!("it answered {status}")),
        }
        let answer = match self.short_answer(body).await {
            Ok(answer) => self.own(head, answer),
            Err(error) => {
                Problem::new(StatusCode::BAD_GATEWAY, format!("the node at {address} failed: {error}"))
                    .answer()
            }
        };
        let failed = Failed { node, answer: Box::new(answer), is_late: false, is_unsure: false };
        // vLLM answers so when its engine dies of a request, and ends.
        Err(if status == StatusCode::INTERNAL_SERVER_ERROR { self.taken(failed) } else { failed })
    }

    /// Marks that the node holds after an answer with this status. A node that refuses has computed nothing.
    fn marks_of(&self, status: StatusCode) -> &[Mark] {
        if status.is_success() { self.marks } else { &[] }
    }

    fn edited(&self, edited: Edited<'_>) -> Outgoing {
        Outgoing::edited(self.body, edited)
    }

    /// An answer that the router reads itself. Its bytes count as memory of the request.
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

    /// A node has failed after it took the request.
    fn taken(&self, failed: Failed) -> Failed {
        self.taken.set(self.taken.get() + 1);
        failed
    }

    /// The engine's answer to the client, once its first byte is there.
    async fn pass_on(&self, begun: Begun) -> Result<Response<AnswerBody>, Failed> {
        let Begun { head, mut body, mut guard } = begun;
        let node = guard.node();
        let first = match self.shared.settings.first_byte_timeout {
            None => Ok(body.frame().await),
            Some(deadline) => timeout(deadline, body.frame()).await.map_err(|_| deadline),
        };
        let cut = |mut guard: LegGuard, error: UpstreamError| {
            guard.fail(&error.to_string());
            let sentence = format!("a node ended its answer before the first byte: {error}");
            self.taken(Failed::bad_gateway(node, sentence))
        };
        let body = match first {
            Ok(Some(Ok(first))) => {
                // The client has received nothing yet, and would receive nothing if the next read failed before the first write.
                if let Some(error) = poll_fn(|context| Poll::Ready(body.poll_cut(context))).await {
                    return Err(cut(guard, error));
                }
                self.compare(node, first.data_ref().map_or(&[], |data| data));
                guard.answers(head.status);
                if head.status.is_success() {
                    self.doubted.convict(guard.leg());
                }
                EngineBody::new(first, body, guard, self.marks_of(head.status))
            }
            // An empty answer without a length looks like one that was cut.
            Ok(None) if body.ends_with_connection() && head.status.is_success() => {
                return Err(cut(guard, UpstreamError::Cut));
            }
            Ok(None) => EngineBody::empty(guard),
            Ok(Some(Err(error))) => return Err(cut(guard, error)),
            Err(deadline) => {
                guard.fail(&late(deadline));
                return Err(Failed::late(node, deadline));
            }
        };
        let mut response = Response::from_parts(head, AnswerBody::Engine(Box::new(body)));
        forward::to_client(&mut response);
        Ok(response)
    }

    /// An engine's answer that was read already. Its bytes count until the client has them, which may be long after the request's
    /// other memory is free.
    fn own(&self, head: response::Parts, body: Bytes) -> Response<AnswerBody> {
        let body = Held::new(self.shared).counting(body);
        let mut response = Response::from_parts(head, AnswerBody::Own(Full::new(body)));
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

/// Why a leg has no answer to go on with.
enum Unserved {
    /// The node failed: another one may serve the request.
    Failed(Failed),
    /// It refused the request itself: so would the others.
    Refused(Response<AnswerBody>),
}

impl From<Failed> for Unserved {
    fn from(failed: Failed) -> Self {
        Self::Failed(failed)
    }
}

impl Failed {
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

/// Whether this answer says something of the node, and not of the request: another node may do better.
fn is_of_the_node(status: StatusCode) -> bool {
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
